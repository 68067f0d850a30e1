"""Prefixes evicted from the pool and loaded again: tokens equal plain's, and K/V of other weights
are never used."""

from __future__ import annotations

import contextlib
import errno
import gc
import itertools
import json
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.cache.prefix_index import PrefixIndex
from hf_paged.model import registry
from hf_paged.tiers import block_files
from hf_paged.tiers import store as tiers
from tests.attention import test_latent
from tests.support import models
from tests.support.engine_helpers import assert_drained, lone_run, prompts, run_all
from tests.support.missing import forbidden
from tests.tiers.test_block_files import (
    OPERATIONS,
    fail_operation,
    replace_by_file,
    replace_by_loop,
)

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
SIZE = models.BLOCK_SIZE


def build(name: str) -> Any:
    return test_latent.build() if name == "mla" else models.build(name)


def config(path: Any, **others: Any) -> dict[str, Any]:
    return {"block_size": SIZE, "prefix_tiers": {"disk_path": str(path)}, **others}


def stores_of(memory: Any) -> list[tiers.PrefixStore]:
    held = [manager.tier for manager in memory.managers.values()]
    return [tier for tier in held if isinstance(tier, tiers.PrefixStore)]


def blocks_on_disk(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*.safetensors") if each.is_file())


def run(engine: PagedEngine, prompt: list[int], **options: Any) -> tuple[list[int], int]:
    """New tokens, and the number of prompt tokens found."""
    (result,) = engine.generate([prompt], GREEDY, **options)
    assert result.error is None, result.error
    return result.token_ids, result.num_prefix_hit_tokens


def save_all(engine: PagedEngine) -> None:
    """Writes all cached blocks to disk and empties the pool."""
    store = engine._core.loop.blocks.tier  # type: ignore[union-attr]
    engine.free()
    store.wait()  # type: ignore[union-attr]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    yield
    gc.collect()
    end = time.monotonic() + 10
    while any("prefix blocks" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < end, "a thread still writes"
        time.sleep(0.01)


_OTHER_PROCESS = """
import json, sys, torch
torch.set_num_threads(1)
from tests.tiers.test_prefix_tiers import GREEDY, PagedEngine, build, config
name, path, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
with PagedEngine(build(name), config(path)) as engine:
    (result,) = engine.generate([prompt], GREEDY)
    engine.check_integrity()
print(json.dumps([result.token_ids, result.num_prefix_hit_tokens]))
"""


def in_another_process(name: str, path: Path, prompt: list[int]) -> tuple[list[int], int]:
    done = subprocess.run(
        [sys.executable, "-c", _OTHER_PROCESS, name, str(path), json.dumps(prompt)],
        capture_output=True, text=True, timeout=120, env={**os.environ, "PYTHONHASHSEED": "7"},
        cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    tokens, num_hits = json.loads(done.stdout.splitlines()[-1])
    return tokens, num_hits


@pytest.mark.slow
def test_another_process_finds_all_full_blocks(tmp_path: Path) -> None:
    (prompt,), model = prompts(2003), build("llama")
    expected = lone_run(model, prompt, GREEDY)[0]
    with PagedEngine(model, config(tmp_path)) as engine:
        assert run(engine, prompt) == (expected, 0)
        save_all(engine)
    assert len(blocks_on_disk(tmp_path)) == 2008 // SIZE
    assert in_another_process("llama", tmp_path, prompt) == (expected, 2000)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss", "mla"])
def test_another_process_and_other_layouts(name: str, tmp_path: Path) -> None:
    (prompt,), model = prompts(100), build(name)
    expected = lone_run(model, prompt, GREEDY)[0]
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt)
    assert in_another_process(name, tmp_path, prompt) == (expected, 96)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "mla"])
def test_an_emptied_pool_finds_what_it_gave_up(name: str, tmp_path: Path) -> None:
    model, (prompt, other) = build(name), prompts(75, 60)
    cut = [*prompt[:40], *other]
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt)
        for text in (prompt, cut, prompt[:41], [*prompt, *other]):
            expected = lone_run(model, text, GREEDY)[0]
            save_all(engine)
            tokens, num_hits = run(engine, text)
            engine.check_integrity()
            assert tokens == expected
            # a window keeps only the blocks before the end
            assert num_hits >= (
                72 if text[:72] == prompt[:72] else 40 if name in ("llama", "mla") else 0
            )
        assert engine.stats().used_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["llama", "mla"])
def test_quantized_blocks_come_back_as_they_were(name: str, kv_dtype: str, tmp_path: Path) -> None:
    """Codes and scales are saved; blocks of another `kv_dtype` are not found, and a saved prefix is
    refused."""
    model, (prompt,) = build(name), prompts(75)
    with PagedEngine(model, config(tmp_path / "tier", kv_dtype=kv_dtype)) as engine:
        expected, _ = run(engine, prompt)
        engine.save_prefix(prompt, tmp_path / "prefix.safetensors")
        save_all(engine)
        assert run(engine, prompt) == (expected, 72)
        engine.check_integrity()
    with PagedEngine(model, config(tmp_path / "tier")) as engine:
        assert run(engine, prompt) == (lone_run(model, prompt, GREEDY)[0], 0)
        with pytest.raises(ValueError, match="kv_dtype"):
            engine.load_prefix(tmp_path / "prefix.safetensors")
    with PagedEngine(model, config(tmp_path / "other", kv_dtype=kv_dtype)) as engine:
        assert engine.load_prefix(tmp_path / "prefix.safetensors") == 72
        assert run(engine, prompt) == (expected, 72)


@pytest.mark.slow
def test_generate_finds_it_too(tmp_path: Path) -> None:
    model, (prompt,) = build("llama"), prompts(160)
    ids, paged = (
        torch.tensor([prompt]),
        {"cache_implementation": "paged", "cache_config": config(tmp_path)},
    )
    expected = model.generate(ids, **GREEDY)
    for _ in range(3):
        assert torch.equal(model.generate(ids, **GREEDY, **paged), expected)
        kept = hf_paged.memory_stats(model).tier_restored_blocks
        hf_paged.check_integrity(model)
        hf_paged.free(model)
        while any("prefix blocks" in thread.name for thread in threading.enumerate()):
            time.sleep(0.01)
    assert kept == 159 // SIZE


@pytest.mark.slow
def test_engines_and_calls_find_each_others(tmp_path: Path) -> None:
    """Blocks that a call leaves are also found after its pool is rebuilt for another config."""
    model, texts = build("llama"), prompts(160, 150)
    paged = {**GREEDY, "cache_implementation": "paged"}
    with PagedEngine(model, config(tmp_path)) as engine:
        expected = run(engine, texts[0])[0]
        (store,) = stores_of(engine.memory)
    store.wait()
    found = model.generate(torch.tensor([texts[0]]), **paged, cache_config=config(tmp_path))
    assert found[0, 160:].tolist() == expected
    assert hf_paged.memory_stats(model).tier_restored_blocks == 159 // SIZE
    expected = model.generate(torch.tensor([texts[1]]), **paged, cache_config=config(tmp_path))[
        0, 150:
    ].tolist()
    (store,) = stores_of(registry._memories[model][1])
    model.generate(torch.tensor([texts[1]]), **paged, cache_config={"block_size": 2 * SIZE})
    store.wait()
    with PagedEngine(model, config(tmp_path)) as engine:
        assert run(engine, texts[1]) == (expected, 144)


@pytest.mark.slow
def test_what_is_freed_goes_while_a_slow_disk_takes_its_blocks(
    tmp_path: Path, monkeypatch: Any
) -> None:
    gate, write = threading.Event(), block_files.DiskFolder.write
    monkeypatch.setattr(
        block_files.DiskFolder, "write", lambda *given: gate.wait(30) and write(*given)
    )
    with PagedEngine(build("llama"), config(tmp_path)) as engine:
        run(engine, prompts(90)[0])
        loop = engine._core.loop
        assert loop is not None
        blocks, store = weakref.ref(loop.blocks.groups[0].storage.layers[0]), loop.blocks.tier  # type: ignore[attr-defined]
        del loop
        engine.free()
        gc.collect()
        try:
            assert blocks() is None and not blocks_on_disk(tmp_path)
        finally:
            gate.set()
        store.wait()  # type: ignore[union-attr]
        assert blocks_on_disk(tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_a_small_pool(preemption: str, tmp_path: Path) -> None:
    """Requests that lose their blocks, and prefixes evicted by others."""
    model, texts = build("gemma2"), prompts(90, 70, 80, 60, 75)
    texts += [[*texts[0][:50], *texts[1][:20]], texts[2][:60]]
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    with PagedEngine(model, config(tmp_path, num_blocks=40, preemption=preemption)) as engine:
        for _ in range(3):
            for number, text in enumerate(texts):
                engine.add_request(text, GREEDY, request_id=str(number))
            results = run_all(engine)
            assert [results[str(number)].token_ids for number in range(len(texts))] == expected
        stats = engine.memory.stats()
        assert stats.tier_restored_blocks and stats.tier_kept_blocks
        assert_drained(engine)


@pytest.mark.slow
def test_what_the_last_step_computed_is_kept_too(tmp_path: Path) -> None:
    """In steps of one's own, each a window by itself; and where one step is all there is."""
    model, (prompt, other) = build("llama"), prompts(70, 70)
    with PagedEngine(model, config(tmp_path)) as engine:
        engine.add_request(prompt, GREEDY)
        run_all(engine)
        save_all(engine)
        assert len(blocks_on_disk(tmp_path)) == 75 // SIZE
        assert run(engine, prompt)[1] == 64
        engine.generate([other], {**GREEDY, "max_new_tokens": 1})
        save_all(engine)
        assert run(engine, other) == (lone_run(model, other, GREEDY)[0], 64)


@pytest.mark.slow
def test_other_weights_find_nothing(tmp_path: Path) -> None:
    model, (prompt,) = build("llama"), prompts(70)
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt)
        save_all(engine)
        weight = model.model.layers[0].self_attn.k_proj.weight
        before = weight.detach().clone()
        weight.data[3, 5] += 0.5
        expected = lone_run(model, prompt, GREEDY)[0]
        assert run(engine, prompt) == (expected, 0)
        save_all(engine)
        assert run(engine, prompt) == (expected, 64)
        save_all(engine)
        weight.data.copy_(before)
        assert run(engine, prompt) == (lone_run(model, prompt, GREEDY)[0], 64)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_a_change_that_only_a_fingerprint_sees_is_not_written(tmp_path: Path) -> None:
    """Between two steps of one request: its later blocks belong to no single version of the
    weights."""
    model, (prompt, other) = build("llama"), prompts(40, 30)
    weight = model.model.layers[1].self_attn.k_proj.weight
    before = weight.detach().clone()
    with PagedEngine(model, config(tmp_path, max_num_batched_tokens=16, capture=False)) as engine:
        engine.add_request(other, {**GREEDY, "max_new_tokens": 2})
        run_all(engine)  # there is a fingerprint
        engine.add_request(prompt, {**GREEDY, "max_new_tokens": 30})
        engine.step()
        weight.detach().numpy()[7, 9] += 2.0  # changes neither a version nor an address
        run_all(engine)
        save_all(engine)
        weight.data.copy_(before)
        for text in (prompt, other):
            tokens, _ = run(engine, text)
            assert tokens == lone_run(model, text, GREEDY)[0]


@pytest.mark.slow
def test_evicted_blocks_wait_for_a_fingerprint(tmp_path: Path) -> None:
    """Blocks evicted while a request runs are written once the weights are checked, and dropped if
    they changed."""
    model, texts = build("llama"), prompts(80, 80, 80)
    for moves in (False, True):
        engine = PagedEngine(model, config(tmp_path / str(moves), num_blocks=26, capture=False))
        engine.add_request(texts[0], GREEDY)
        engine.add_request(texts[1], {**GREEDY, "max_new_tokens": 60})
        engine.add_request(texts[2], GREEDY)
        while engine.has_unfinished:
            engine.step()
            store = engine._core.loop.blocks.tier  # type: ignore[union-attr]
            assert isinstance(store, tiers.PrefixStore)
            if store._pending:
                break
        assert (
            store._pending and not store._host_entries and not blocks_on_disk(tmp_path / str(moves))
        )
        if moves:
            model.lm_head.weight.detach().numpy()[0, 0] += 1.0
        run_all(engine)
        store.wait()
        assert not store._pending
        assert bool(blocks_on_disk(tmp_path / str(moves))) is not moves
        engine.free()


@pytest.mark.slow
def test_tenants_and_uncached_prompts(tmp_path: Path) -> None:
    model, (prompt,) = build("llama"), prompts(70)
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt, prompt_logprobs=True)
        save_all(engine)
        assert not blocks_on_disk(tmp_path), "what is never cached was written"
        run(engine, prompt, cache_salt="one")
        save_all(engine)
        assert run(engine, prompt, cache_salt="other")[1] == 0
        assert run(engine, prompt)[1] == 0
        assert run(engine, prompt, cache_salt="one")[1] == 64


@pytest.mark.slow
def test_why_a_model_or_a_pool_has_no_tiers(tmp_path: Path) -> None:
    hybrid = PagedEngine(build("qwen3_next"), config(tmp_path))
    run(hybrid, prompts(20)[0])
    assert "snapshots of the model's states" in str(hybrid.route)
    with pytest.raises(
        ValueError, match=r"cannot be saved or loaded: .*snapshots of the model's states"
    ):
        hybrid.save_prefix(prompts(20)[0], tmp_path / "file")
    on_cpu = PagedEngine(
        build("llama"), {"block_size": SIZE, "prefix_tiers": {"host_bytes": 1 << 20}}
    )
    run(on_cpu, prompts(20)[0])
    assert "the pool is already in host memory, so only a disk tier helps" in str(on_cpu.route)


@pytest.mark.slow
def test_an_engine_that_is_not_freed_writes_when_the_process_ends(tmp_path: Path) -> None:
    script = _OTHER_PROCESS.replace(
        "with PagedEngine(build(name), config(path)) as engine:", "if True:"
    ).replace("    (result,)", "    engine = PagedEngine(build(name), config(path))\n    (result,)")
    (prompt,) = prompts(70)
    done = subprocess.run(
        [sys.executable, "-c", script, "llama", str(tmp_path), json.dumps(prompt)],
        capture_output=True, text=True, timeout=120, cwd=Path(__file__).parents[2],
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert len(blocks_on_disk(tmp_path)) == 75 // SIZE


@pytest.mark.slow
def test_a_forked_child_writes_nothing_twice_and_still_finds(tmp_path: Path) -> None:
    model, (prompt,) = build("llama"), prompts(70)
    expected = lone_run(model, prompt, GREEDY)[0]
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt)
        save_all(engine)
        child = os.fork()
        if not child:
            code = 1
            try:
                code = 0 if run(engine, prompt) == (expected, 64) else 2
            finally:
                os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert run(engine, prompt) == (expected, 64)


@pytest.mark.slow
def test_an_interrupt_of_a_step_that_brings_blocks_back(tmp_path: Path, sigint: None) -> None:
    model, (prompt,) = build("llama"), prompts(70)
    expected = lone_run(model, prompt, GREEDY)[0]
    with PagedEngine(model, config(tmp_path, capture=False)) as engine:
        run(engine, prompt)
        save_all(engine)
        engine.add_request(prompt, GREEDY, request_id="0")
        hook = model.model.register_forward_pre_hook(lambda *_: signal.raise_signal(signal.SIGINT))
        with pytest.raises(KeyboardInterrupt):
            engine.step()
        hook.remove()
        engine.check_integrity()
        assert run_all(engine)["0"].token_ids == expected


@pytest.mark.slow
def test_calls_of_threads_on_two_models_under_a_budget(tmp_path: Path) -> None:
    both = [build("llama"), build("gemma2")]
    texts = prompts(160, 140, 150)
    texts += [texts[0][:100] + texts[1][:60], texts[1][:90] + texts[2][:80]]
    expected = [[lone_run(model, text, GREEDY)[0] for text in texts] for model in both]
    failures: list[Any] = []

    def call(seed: int) -> None:
        draw = random.Random(seed)
        for _ in range(40):
            which, place = draw.randrange(2), draw.randrange(len(texts))
            options = config(tmp_path, idle_release_seconds=draw.choice([0, 0.1, 60]))
            paged = {**GREEDY, "cache_implementation": "paged", "cache_config": options}
            try:
                found = (
                    both[which]
                    .generate(torch.tensor([texts[place]]), **paged)[0, len(texts[place]) :]
                    .tolist()
                )
                if found != expected[which][place]:
                    failures.append((which, place, found))
            except Exception as error:
                failures.append(error)
            if draw.random() < 0.05:
                hf_paged.free(both[which])

    hf_paged.budget(90 * 4096)  # for two or three of the four calls
    try:
        threads = [threading.Thread(target=call, args=(seed,), daemon=True) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
            assert not thread.is_alive(), "stuck"
    finally:
        hf_paged.budget(None)
    assert not failures
    for model in both:
        hf_paged.check_integrity(model)


# ---- faults


class Faults:
    """Faults of a folder of blocks, one at a time."""

    def __init__(self, path: Path, seed: int, monkeypatch: Any) -> None:
        self.path, self.draw, self._monkeypatch = path, random.Random(seed), monkeypatch

    def cause(self) -> str:
        kinds = (
            self.flip,
            self.truncate,
            self.empty,
            self.delete,
            self.swap_names,
            self.kill,
            self.fill,
            self.forbid,
        )
        kind = self.draw.choice(kinds)
        for _ in range(self.draw.randrange(1, 6)):
            kind()
        return kind.__name__

    def one(self) -> Path | None:
        found = blocks_on_disk(self.path)
        return self.draw.choice(found) if found else None

    def flip(self) -> None:
        if path := self.one():
            content = bytearray(path.read_bytes())
            if content:
                content[self.draw.randrange(len(content))] ^= 1 << self.draw.randrange(8)
            path.write_bytes(content)

    def truncate(self) -> None:
        if path := self.one():
            content = path.read_bytes()
            path.write_bytes(content[: self.draw.randrange(len(content) + 1)])

    def empty(self) -> None:
        if path := self.one():
            path.write_bytes(b"")

    def delete(self) -> None:
        if path := self.one():
            path.unlink()

    def swap_names(self) -> None:
        first, second = self.one(), self.one()
        if first and second:
            content = first.read_bytes()
            first.write_bytes(second.read_bytes())
            second.write_bytes(content)

    def kill(self) -> None:
        """A writer of the same files is killed."""
        path = self.one()
        child = os.fork()
        if not child:
            try:
                while path is not None and path.exists():
                    block_files.write_private(path, path.read_bytes())
            finally:
                os._exit(0)
        time.sleep(0.02 * self.draw.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)

    def fill(self) -> None:
        """The disk has no room for the next files."""
        left, write = [self.draw.randrange(1, 4)], Path.write_bytes

        def half(path: Path, content: bytes) -> int:
            if path.suffix != ".part" or left[0] <= 0:
                return write(path, content)
            left[0] -= 1
            write(path, content[: self.draw.randrange(len(content))])
            raise OSError(errno.ENOSPC, "No space left on device")

        self._monkeypatch.setattr(Path, "write_bytes", half)

    def forbid(self) -> None:
        """Another kind of object is in the place of a file."""
        if path := self.one():
            path.unlink()
            path.mkdir()


def survive(num_faults: int, path: Path, monkeypatch: Any) -> None:
    model, draw = build("gemma2"), random.Random(1)
    texts = prompts(90, 70, 80, 40)
    texts += [[*texts[0][:50], *texts[1][:20]], [*texts[0][:50], *texts[2][:30]], texts[2][:60]]
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    monkeypatch.setattr(block_files, "RETRY_SECONDS", 0.0)
    num_restored = 0
    engine = PagedEngine(model, config(path, num_blocks=40))
    for number in range(num_faults):
        with monkeypatch.context() as patch:
            fault = Faults(path, number, patch).cause()
            chosen = draw.sample(range(len(texts)), 3)
            for each in chosen:
                engine.add_request(texts[each], GREEDY, request_id=str(each))
            start = time.monotonic()
            results = run_all(engine)
            assert time.monotonic() - start < 60, f"{fault}: stuck"
            for each in chosen:
                assert results[str(each)].error is None, (
                    f"fault {number}, {fault}: {results[str(each)].error!r}"
                )
                assert results[str(each)].token_ids == expected[each], f"fault {number}, {fault}"
            num_restored += engine.memory.stats().tier_restored_blocks
            assert_drained(engine)
            save_all(engine)
    assert num_restored > 2 * num_faults, "hardly a block came back"


@pytest.mark.slow
def test_ten_faults(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    with caplog.at_level(logging.ERROR):
        survive(10, tmp_path, monkeypatch)


@pytest.mark.slow
@pytest.mark.full
def test_two_hundred_faults(tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    with caplog.at_level(logging.ERROR):
        survive(200, tmp_path, monkeypatch)


# ---- a folder that cannot be used


def evict_all(engine: PagedEngine) -> None:
    """Writes all cached blocks to disk; the pool and its tier stay."""
    engine.memory.evict_cached()
    engine._core.loop.blocks.tier.wait()  # type: ignore[union-attr]


def check_goes_on(
    engine: PagedEngine, texts: list[list[int]], expected: list[list[int]], caplog: Any
) -> None:
    """Requests get their tokens while the folder fails, in steps, restored or not, and nothing is
    lost."""
    for _ in range(2):
        results = engine.generate(texts, GREEDY)
        assert [result.error for result in results] == [None] * len(texts)
        assert [result.token_ids for result in results] == expected
        assert_drained(engine)
        evict_all(engine)
    said = [record.getMessage() for record in caplog.records]
    assert len(said) <= 2, "one warning that it cannot be read, one that it cannot be written"


@pytest.mark.slow
@pytest.mark.parametrize("name", ["EIO", "EACCES"])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_requests_go_on_whatever_a_file_operation_raises(
    operation: str, name: str, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, texts = models.get("llama"), prompts(60, 50)
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    with PagedEngine(model, config(tmp_path, num_blocks=20)) as engine:
        run(engine, texts[0])
        evict_all(engine)
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "hf_paged"):
            fail_operation(patch, tmp_path, operation, name)
            check_goes_on(engine, texts, expected, caplog)
        check_goes_on(engine, texts, expected, caplog)


@pytest.mark.slow
@pytest.mark.parametrize("change", [replace_by_file, replace_by_loop, shutil.rmtree, forbidden])
def test_requests_go_on_without_a_folder(change: Any, tmp_path: Path, caplog: Any) -> None:
    model, texts, path = models.get("llama"), prompts(60, 50), tmp_path / "tier"
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    with PagedEngine(model, config(path, num_blocks=20)) as engine:
        run(engine, texts[0])
        evict_all(engine)
        engine.add_request(texts[1], GREEDY)
        engine.step()  # in the middle of a request
        with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING, "hf_paged"):
            stack.enter_context(change(path)) if change is forbidden else change(path)
            assert run_all(engine).popitem()[1].token_ids == expected[1]
            check_goes_on(engine, texts, expected, caplog)
        assert bool(blocks_on_disk(path)) == (change in (shutil.rmtree, forbidden))
        path.unlink() if path.is_file() or path.is_symlink() else None
        caplog.set_level(logging.WARNING, "hf_paged")
        save_all(engine)
        assert engine.generate(texts[:1], GREEDY)[0].token_ids == expected[0]
    assert bool(caplog.records) == (change is not shutil.rmtree), "a removed folder is made again"


@pytest.mark.slow
def test_calls_go_on_without_a_folder(tmp_path: Path, caplog: Any) -> None:
    model, path = build("llama"), tmp_path / "tier"
    paged = {"cache_implementation": "paged", "cache_config": config(path, num_blocks=30)}
    texts = [torch.tensor([prompt]) for prompt in prompts(160, 150)]
    expected = [model.generate(ids, **GREEDY) for ids in texts]
    with caplog.at_level(logging.WARNING, "hf_paged"):
        for turn in range(3):
            with forbidden(path) if turn else contextlib.nullcontext():
                found = [model.generate(ids, **GREEDY, **paged) for ids in texts]
            assert all(map(torch.equal, found, expected))
            hf_paged.check_integrity(model)
        with forbidden(path):
            hf_paged.free(model)
    assert 1 <= len(caplog.records) <= 2 and str(path) in caplog.text


@pytest.mark.slow
def test_no_memory_for_evicted_blocks_and_for_files(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    model, texts = models.get("llama"), prompts(60, 50)
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]

    def fail(*args: Any) -> Any:
        raise MemoryError

    places = ((tiers, "free_bytes"), (block_files, "to_bytes"), (safetensors.torch, "load"))
    with PagedEngine(model, config(tmp_path, num_blocks=20)) as engine:
        run(engine, texts[0])
        evict_all(engine)
        for module, name in places:
            with monkeypatch.context() as patch, caplog.at_level(logging.WARNING, "hf_paged"):
                patch.setattr(module, name, fail)
                check_goes_on(engine, texts, expected, caplog)


@pytest.mark.parametrize("method", ["read", "put_back"])
@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("torch"), ValueError("other")])
def test_what_a_tier_cannot_copy_is_computed_instead(
    error: Exception, method: str, tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    model, (prompt,) = build("llama"), prompts(70)

    def fail(*args: Any) -> Any:
        raise error

    with PagedEngine(model, config(tmp_path)) as engine:
        expected = run(engine, prompt)[0]
        evict_all(engine)
        monkeypatch.setattr(tiers.PrefixStore, method, fail)
        with caplog.at_level(logging.WARNING, "hf_paged"):
            assert run(engine, prompt) == (expected, 0)
        assert "could not be restored" in caplog.text and repr(error) in caplog.text
        assert_drained(engine)


@pytest.mark.parametrize("error", [MemoryError("none"), RuntimeError("torch"), ValueError("other")])
def test_an_error_while_restored_blocks_are_registered_ends_the_step(
    error: Exception, tmp_path: Path, monkeypatch: Any
) -> None:
    """It may have split a change of the pool: the step is recovered, and computed again."""
    model, (prompt,) = build("llama"), prompts(70)
    with PagedEngine(model, config(tmp_path)) as engine:
        expected = run(engine, prompt)[0]
        evict_all(engine)
        engine.add_request(prompt, GREEDY, request_id="0")
        add, calls = PrefixIndex.add, itertools.count()

        def fail_once(*args: Any) -> Any:
            if next(calls) == 2:
                raise error
            return add(*args)

        monkeypatch.setattr(PrefixIndex, "add", fail_once)
        with pytest.raises(type(error)) as caught:
            engine.step()
        assert caught.value is error
        engine.check_integrity()
        assert run_all(engine)["0"].token_ids == expected
        assert_drained(engine)


@pytest.mark.slow
@pytest.mark.parametrize("entry", ["engine", "generate", "manager"])
@pytest.mark.parametrize("kind", ["file", "forbidden"])
def test_a_folder_that_cannot_be_used_is_refused_at_first(
    kind: str, entry: str, tmp_path: Path
) -> None:
    model, path, ids = build("llama"), tmp_path / "tier", torch.tensor(prompts(20))
    paged = {"cache_implementation": "paged", "cache_config": config(path)}
    with contextlib.ExitStack() as stack:
        if kind == "file":
            path.write_text("a file")
        else:
            path.mkdir()
            stack.enter_context(forbidden(path))
        with pytest.raises(OSError, match=f"`disk_path`.*{path}"):
            if entry == "engine":
                PagedEngine(model, config(path))
            elif entry == "generate":
                model.generate(ids, **GREEDY, **paged)
            else:
                from hf_paged.native.continuous_batching import PagedBatchingManager

                PagedBatchingManager(model, GenerationConfig(**paged), ContinuousBatchingConfig())
        assert hf_paged.memory_stats(model).held_bytes == 0
    without = {**paged, "cache_config": {"block_size": SIZE}}
    assert torch.equal(model.generate(ids, **GREEDY, **without), model.generate(ids, **GREEDY))


# ---- saved prefixes


@pytest.mark.slow
@pytest.mark.parametrize("operation", ["stat", "open", "read", "write", "replace", "unlink"])
def test_saving_and_loading_raise_an_error_of_the_system(
    operation: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, (prompt,), folder = models.get("llama"), prompts(60), tmp_path / "saved"
    folder.mkdir()
    expected, path = lone_run(model, prompt, GREEDY)[0], folder / "prefix.safetensors"
    with PagedEngine(model, {"block_size": SIZE}) as engine:
        engine.save_prefix(prompt, path)
        before = path.read_bytes()
        calls: dict[str, Any] = {
            "stat open write replace": lambda: engine.save_prefix(prompt, path),
            "open read": lambda: engine.load_prefix(path),
        }
        for operations, call in calls.items():
            raises = pytest.raises(OSError, match="Input/output")
            with monkeypatch.context() as patch:
                fail_operation(patch, folder, operation, "EIO")
                with raises if operation in operations.split() else contextlib.nullcontext():
                    call()
            assert len(path.read_bytes()) == len(before) and list(folder.iterdir()) == [path]
            engine.check_integrity()
        engine.reset_prefix_cache()
        assert engine.load_prefix(path) == 56 and run(engine, prompt) == (expected, 56)
        assert_drained(engine)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2", "mla"])
def test_a_saved_prefix_is_loaded(name: str, tmp_path: Path) -> None:
    model, (prompt, rest) = build(name), prompts(50, 20)
    path, text = tmp_path / "prefix.safetensors", [*prompt, *rest]
    expected = lone_run(model, text, GREEDY)[0]
    with PagedEngine(model, {"block_size": SIZE}) as engine:
        assert engine.save_prefix(prompt, path) == 48
        assert_drained(engine)
    with PagedEngine(build(name), PagedConfig(block_size=SIZE)) as engine:
        assert engine.load_prefix(path) == 48
        assert engine.load_prefix(str(path)) == 48  # already loaded
        assert_drained(engine)
        assert run(engine, text) == (expected, 48)
        assert run(engine, text, cache_salt="tenant") == (expected, 0)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_a_saved_prefix_has_its_tenant(tmp_path: Path) -> None:
    model, (prompt,) = build("llama"), prompts(50)
    path = tmp_path / "prefix"
    with PagedEngine(model, {"block_size": SIZE, "num_blocks": 100}) as engine:
        engine.save_prefix(prompt, path, cache_salt="one")
        engine.reset_prefix_cache()
        engine.load_prefix(path)
        assert run(engine, prompt)[1] == 0
        assert run(engine, prompt, cache_salt="one")[1] == 48


@pytest.mark.slow
def test_what_cannot_be_saved_or_loaded(tmp_path: Path) -> None:
    model, (prompt,) = build("llama"), prompts(50)
    path = tmp_path / "prefix"
    with PagedEngine(model, {"block_size": SIZE}) as engine:
        with pytest.raises(
            ValueError, match=r"the prompt has 5 tokens, but only full blocks of 8 can be saved"
        ):
            engine.save_prefix(prompt[:5], path)
        with pytest.raises(FileNotFoundError):
            engine.save_prefix(prompt, tmp_path / "no" / "folder")
        assert not list(tmp_path.iterdir())
        engine.save_prefix(prompt, path)
        content = path.read_bytes()
        for wrong in (content[:-1], content[:100], b"", content[:-40] + b"x" + content[-39:]):
            path.write_bytes(wrong)
            with pytest.raises(ValueError, match="is not a complete saved prefix"):
                engine.load_prefix(path)
        path.write_bytes(content)
        with pytest.raises(FileNotFoundError):
            engine.load_prefix(tmp_path / "other")
        with torch.no_grad():
            model.model.embed_tokens.weight[5, 5] += 1
        with pytest.raises(
            ValueError, match="was computed by another model than this LlamaForCausalLM is now"
        ):
            engine.load_prefix(path)
        with torch.no_grad():
            model.model.embed_tokens.weight[5, 5] -= 1
        assert_drained(engine)
    with (
        PagedEngine(build("llama"), {"block_size": 2 * SIZE}) as engine,
        pytest.raises(ValueError, match="`block_size`"),
    ):
        engine.load_prefix(path)
    with PagedEngine(build("llama"), {"block_size": SIZE, "num_blocks": 5}) as engine:
        with pytest.raises(hf_paged.OutOfBlocksError, match="6 blocks"):
            engine.load_prefix(path)
        with pytest.raises(hf_paged.OutOfBlocksError):
            engine.save_prefix(prompt, path)
        assert_drained(engine)
    engine = PagedEngine(build("llama"), {"block_size": SIZE, "prefix_caching": False})
    with pytest.raises(ValueError, match="prompts of this model are not cached"):
        engine.load_prefix(path)


@pytest.mark.slow
def test_an_engine_that_keeps_no_idle_pool(tmp_path: Path) -> None:
    """It saves; it explains why it cannot load, unless tiers keep evicted blocks or a request
    runs."""
    model, (prompt,) = build("llama"), prompts(50)
    path, options = tmp_path / "prefix", {"block_size": SIZE, "idle_release_seconds": 0}
    with PagedEngine(model, options) as engine:
        assert engine.save_prefix(prompt, path) == 48
        assert engine.memory.stats().held_bytes == 0
        with pytest.raises(ValueError, match="`idle_release_seconds` is 0"):
            engine.load_prefix(path)
        engine.add_request(prompt[:5], {**GREEDY, "max_new_tokens": 30})
        engine.step()
        assert engine.load_prefix(path) == 48
        assert run(engine, prompt)[1] == 48
        run_all(engine)
        assert engine.memory.stats().held_bytes == 0
    with PagedEngine(model, config(tmp_path / "tier", idle_release_seconds=0)) as engine:
        assert engine.load_prefix(path) == 48
        assert engine.memory.stats().held_bytes == 0
        assert run(engine, prompt)[1] == 48


@pytest.mark.slow
def test_where_a_prefix_cannot_be_saved_is_known_before_it_is_computed(tmp_path: Path) -> None:
    with PagedEngine(build("llama"), {"block_size": SIZE}) as engine:
        for path, error in (
            (tmp_path / "no" / "file", FileNotFoundError),
            (tmp_path, IsADirectoryError),
        ):
            with pytest.raises(
                error, match=str(path.parent if error is FileNotFoundError else path)
            ):
                engine.save_prefix(prompts(50)[0], path)
        assert engine.stats().num_steps == 0


@pytest.mark.slow
def test_a_prefix_is_saved_and_loaded_while_requests_run(tmp_path: Path) -> None:
    model, (prompt, other) = build("llama"), prompts(50, 40)
    expected = lone_run(model, other, {**GREEDY, "max_new_tokens": 30})[0]
    with PagedEngine(model, {"block_size": SIZE}) as engine:
        engine.add_request(other, {**GREEDY, "max_new_tokens": 30}, request_id="0")
        engine.step()
        engine.save_prefix(prompt, tmp_path / "prefix")
        engine.load_prefix(tmp_path / "prefix")
        assert run_all(engine)["0"].token_ids == expected
        assert_drained(engine)


# ---- host memory


def host_tier(engine: PagedEngine, num_bytes: int, path: str | None = None) -> tiers.PrefixStore:
    """The tier of a pool on another device, below a pool on this one."""
    loop = engine._core.loop
    assert loop is not None
    wanted = hf_paged.PrefixTiers(path, host_bytes=num_bytes)
    core = engine._core
    store = tiers.PrefixStore(core.model, engine.memory, loop.blocks, wanted, core.layout)
    store._host_bytes = num_bytes
    loop.blocks.set_tier(store)
    return store


@pytest.mark.slow
@pytest.mark.parametrize("with_disk", [False, True])
def test_blocks_stay_in_host_memory_up_to_its_limit(with_disk: bool, tmp_path: Path) -> None:
    model, texts = build("gemma2"), prompts(90, 70)
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    with PagedEngine(model, {"block_size": SIZE, "num_blocks": 60}) as engine:
        run(engine, texts[0])
        block = engine._core.loop.blocks.groups[0].block_bytes  # type: ignore[union-attr]
        store = host_tier(engine, 30 * block, str(tmp_path) if with_disk else None)
        for turn in range(3):
            for text, tokens in zip(texts, expected):
                found, num_hits = run(engine, text)
                assert found == tokens and (turn == 0 or num_hits), f"turn {turn}"
                engine.memory.evict_cached()
                store.wait()
                assert (
                    store.counts().host_bytes <= 30 * block
                    and bool(blocks_on_disk(tmp_path)) is with_disk
                )
                engine.check_integrity()
        assert (
            store.num_restored
            and store.counts().host_bytes
            == sum(each.num_bytes for each in store._host_entries.values())
            > 0
        )
        for text in prompts(100, 110, 120, seed=7):
            assert run(engine, text)[0] == lone_run(model, text, GREEDY)[0]
            engine.memory.evict_cached()
            store.wait()
            assert 25 * block < store.counts().host_bytes <= 30 * block
        assert_drained(engine)


@pytest.mark.slow
def test_a_slow_disk_skips_blocks_and_nothing_waits(tmp_path: Path, monkeypatch: Any) -> None:
    model, texts = build("llama"), prompts(90, 90, 90)
    monkeypatch.setattr(tiers, "QUEUE_BYTES", 0)
    monkeypatch.setattr(tiers, "free_bytes", lambda device: 40_000)
    gate, write = threading.Event(), block_files.DiskFolder.write
    monkeypatch.setattr(
        block_files.DiskFolder, "write", lambda *given: gate.wait(30) and write(*given)
    )
    with PagedEngine(model, config(tmp_path, num_blocks=60)) as engine:
        for text in texts:
            assert run(engine, text)[0] == lone_run(model, text, GREEDY)[0]
            engine.memory.evict_cached()
        (store,) = stores_of(engine.memory)
        assert store.num_skipped and store.counts().host_bytes < 40_000
        gate.set()
        store.wait()
        assert len(blocks_on_disk(tmp_path)) == store.num_kept
