"""A small part of `python -m tests.support.load`, and a check that it detects errors."""

from __future__ import annotations

import collections
import dataclasses
import os

import pytest

pytest.importorskip("peft")

from hf_paged import PagedConfig
from hf_paged.cache.block_pool import BlockPool
from tests.support import load, load_cases
from tests.support.load_cases import Run

SEED, REQUESTS = 3, 24
FEW_BLOCKS = {"block_size": 8, "num_blocks": 10, "max_num_batched_tokens": 17}


def small_run(number: int, preemption: str, lora: bool = True) -> Run:
    return Run(
        SEED, number, "llama", lora, PagedConfig(preemption=preemption, **FEW_BLOCKS), in_flight=16
    )


def played(run: Run, num_steps: int) -> collections.Counter[str]:
    seen, failure = load.play(run, num_steps, REQUESTS)
    assert not failure, failure
    return seen


@pytest.mark.slow
@pytest.mark.parametrize(("number", "preemption"), [(5, "recompute"), (3, "swap")])
def test_adapters_beams_and_preemption(number: int, preemption: str) -> None:
    """The first of these has a step with two adapters in which no sequence ends."""
    seen = played(small_run(number, preemption), 150)
    assert seen["finished"] > 10 and seen["beams"] and seen["samples"] and seen["cancelled"]
    assert seen["swaps" if preemption == "swap" else "recomputes"] > 5, seen
    events = ("chunks", "mixed steps", "prefix-hit tokens", "preempted beams")
    assert all(seen[event] for event in events), seen


@pytest.mark.slow
@pytest.mark.full
def test_a_run_repeats() -> None:
    first, second = (played(small_run(4, "swap"), 40) for _ in range(2))
    assert {**first, "milliseconds": 0} == {**second, "milliseconds": 0}
    assert load_cases.draw_run(1, 7) == load_cases.draw_run(1, 7) != load_cases.draw_run(2, 7)


@pytest.mark.slow
def test_a_wrong_token_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    known = [
        dataclasses.replace(wanted, rows=[[row[0] ^ 1, *row[1:]] for row in wanted.rows])
        for wanted in load_cases.catalogue(SEED, "llama", True, REQUESTS)
    ]
    monkeypatch.setattr(load_cases, "catalogue", lambda *arguments: known)
    _, failure = load.play(small_run(0, "swap"), 40, REQUESTS)
    assert "difference: python -m tests.support.load --seed 3 --only 0 --run-steps 40" in failure


@pytest.mark.slow
def test_blocks_that_are_lost_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(
        BlockPool, "release", lambda self, block_ids: release(self, list(block_ids)[1:])
    )
    seen, failure = load.play(small_run(0, "swap"), 40, REQUESTS)
    assert seen["failures"] == 1 and "AssertionError" in failure


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("name", load_cases.KINDS)
def test_every_kind(name: str) -> None:
    """With files for evicted blocks, and with drafts where they can be had."""
    kind = load_cases.KINDS[name]
    speculation = "ngram" if kind.has_drafts else None
    for number, preemption in enumerate(("recompute", "swap")):
        size = 16 if "storage" in kind.config else 8
        config = PagedConfig(
            **kind.config,
            block_size=size,
            num_blocks=kind.budget[1] * 8 // size,
            preemption=preemption,
            max_num_batched_tokens=40,
            speculation=speculation,
        )
        lora = kind.has_adapters and not number
        run = Run(SEED, number, name, lora, config, 16, tier=True, assisted=kind.has_drafts)
        seen = played(run, 250)
        assert seen["finished"] > 10 and seen["beams"] and seen["samples"], seen
        assert bool(seen["drafts accepted"]) == kind.has_drafts, seen


@pytest.mark.slow
def test_what_is_lost_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    files = []
    monkeypatch.setattr(
        load, "_play", lambda *given: files.append(open(os.devnull)) or (collections.Counter(), "")
    )
    seen, failure = load.play(small_run(0, "swap"), 40, REQUESTS)
    files.pop().close()
    assert seen["failures"] == 1 and "lost {'open files': 1}" in failure


def test_every_part_is_drawn() -> None:
    runs = [load_cases.draw_run(0, number) for number in range(200)]
    assert {(run.name, run.config.preemption, run.lora) for run in runs} == {
        (name, how, lora)
        for name, kind in load_cases.KINDS.items()
        for how in ("recompute", "swap")
        for lora in {kind.has_adapters, False}
    }
    assert {run.num_engines for run in runs} == {1, 2}
    for flag in ("captured", "tier", "assisted"):
        assert {getattr(run, flag) for run in runs} == {True, False}
    assert {run.config.speculation for run in runs} == {None, "ngram"}
    assert {run.config.block_size for run in runs} == {8, 16}
