"""Each benchmark runs with `--quick`, prints its table and writes its rows; its committed results
are such rows."""

from __future__ import annotations

import importlib
import itertools
import os
import random

import pytest
import torch
from transformers import AutoModelForCausalLM

import hf_paged
from benchmarks import (
    first_call,
    linears,
    lora,
    parallel,
    readme,
    report,
    side_by_side,
    speculation,
    tiers,
    trained,
    virtual,
)
from benchmarks.systems import Answer
from hf_paged.kernels import cpp
from tests.callers.test_mixed_precision import no_accelerator_left  # noqa: F401

ONLY = "Bloom|NemotronH tiny|Qwen2.5|Whisper tiny 1|(T5|BART).*beams"
NEEDS_MEMORY_FILES = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")
NEEDS_COMPILER = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
FULL = [pytest.mark.slow, pytest.mark.full]
RUNS = {
    "linears": ("| llama-tiny, 5 rows | ours | 1, 1 |", [NEEDS_COMPILER]),
    "virtual": ("| decode step of bloom, 2x64 | virtual |", [pytest.mark.slow, NEEDS_MEMORY_FILES]),
    "first_call": ("1.5 times plain's time and 1 s more are ", FULL),
    "grpo": ("rollouts: 4 steps of 4 x 8 x 6 tokens |", FULL),
    "lora": ("| one adapter a forward / it |", FULL),
    "parallel": ("| 2 processes |", FULL),
    "side_by_side": ("| Bloom, tiny, 16 new | engine |", FULL),
    "speculation": ("| W7: 32 rows, edit a text of 96 words | n-grams | 1, 1 |", FULL),
    "tiers": ("first token, new process", FULL),
    "trainer": ("| T5-small, 3 evaluations | paged |", FULL),
}
"""By benchmark: what is printed, and the marks of its test."""
ARGUMENTS = {"first_call": ["--dtype", "float32"], "side_by_side": ["--only", ONLY]}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=marks) for name, (_, marks) in RUNS.items()]
)
def test_quick(name, tmp_path, capsys):
    if name in ("grpo", "lora"):
        pytest.importorskip({"grpo": "trl", "lora": "peft"}[name])
    module, path = importlib.import_module(f"benchmarks.{name}"), tmp_path / "found.json"
    try:
        status = module.BENCHMARK.main(["--quick", *ARGUMENTS.get(name, ()), "--json", str(path)])
    finally:
        if name == "grpo":  # it installs more
            hf_paged.uninstall()
            hf_paged.install()
    assert status == 0 and RUNS[name][0] in capsys.readouterr().out
    data = report.read(path)
    assert data["facts"]["torch"] and data["rows"]
    assert all(sum(row["seconds"]) > 0 and row.get("equal", 1) == 1 for row in data["rows"])
    CHECKS.get(name, lambda rows: None)(data["rows"])


def by_system(rows, key):
    """A figure of each system."""
    return {row["system"]: row["figures"].get(key) for row in rows}


def check_first_call(rows):
    plain, paged, compiling = (row["figures"] for row in rows)
    assert not any(plain[part] for part in first_call.PARTS.values())
    for part in ("self-check, s", "kernels, s"):
        assert 0 < compiling[part] < rows[2]["seconds"][0]
    assert paged["kernels, s"] < compiling["kernels, s"]


def check_grpo(rows):
    routes = {"plain": "plain", "paged": "engine", "generate_batch": "engine"}
    assert len(rows) == 6 and by_system(rows, "route") == routes
    assert all(row["figures"]["training, s"] > row["seconds"][0] for row in rows)


def check_lora(rows):
    forwards = by_system(rows, "forwards")
    assert forwards[lora.MIXED] == forwards[lora.ONE] == forwards[lora.BASE]
    assert forwards[lora.APART] == 8 * forwards[lora.MIXED]
    assert by_system(rows, "adapters loaded")[lora.FOLDERS] > 0


def check_parallel(rows):
    held = by_system(rows, "K/V of each process, MiB")
    assert held["2 processes"] * 2 == held["1 process"]


def check_side_by_side(rows):
    even, beams = side_by_side.WORKLOADS
    expected = [(name, even) for name in ("Bloom", "NemotronH", "Qwen2.5-VL", "Whisper")]
    expected += [(name, beams) for name in ("Whisper", "T5-small", "BART-base")]
    names = {f"{model}, tiny, {workload}" for model, workload in expected}
    assert {row["case"] for row in rows} == names and len(rows) == 3 * len(names)
    routes = {row["figures"]["route"] for row in rows if row["system"] != "plain"}
    assert routes == {"engine"}


def check_speculation(rows):
    assert [row["case"][:2] for row in rows[::2]] == ["W7", "W8"]
    for row in rows[1::2]:
        assert 0 <= row["figures"]["acceptance, %"] <= 100
        stages = {name: s for name, s in row["figures"].items() if name.endswith(", s")}
        assert sum(stages.values()) == pytest.approx(row["seconds"][0])
        assert "target, steps, s" in stages


def check_tiers(rows):
    assert by_system(rows[:2], tiers.FOUND) == {"computed": 0, "disk": 192}
    assert by_system(rows[2:], tiers.FOUND)["disk"] > 0


def check_virtual(rows):
    names = {f"decode step of {name}, 2x64" for name in virtual.TARGETS}
    assert {row["case"] for row in rows} == names


CHECKS = {name[6:]: check for name, check in globals().items() if name.startswith("check_")}


@pytest.mark.parametrize("module", [*readme.FIGURES_OF, linears, parallel, virtual])
def test_committed_results_have_the_rows_of_the_runner(module):
    names = list(filter(report.exists, itertools.chain(*module.BENCHMARK.results)))
    assert names
    for name in names:
        data = report.result(name)
        for run in data.get("runs", [data]):
            assert run["rows"] and run["facts"]["revision"]
            assert all(row["case"] and row["system"] for row in run["rows"])
    assert "| case | system |" in module.BENCHMARK.section()


def test_speculation_edits_texts_and_counts_accepted_tokens():
    prompt, answer = trained.edit(random.Random(0), 256)
    text = prompt[1:-1]
    changed = [word for word, new in zip(text, answer) if word != new]
    assert len(text) == len(answer) and 0 < len(changed) < len(text) / 8
    assert all(word % trained.OLD_WORDS == trained.FIRST_WORD for word in changed)
    workload = speculation.EDITS["W7"]
    assert workload.batch(0, 256).prompts != workload.batch(1, 256).prompts
    answer = Answer([[1] * 6, [1] * 4], [[0.0, 1.0, 1.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    assert speculation.accepted_a_step(answer) == [1.5, 0.0]


@pytest.mark.slow
def test_a_model_is_trained_saved_and_loaded(tmp_path):
    model = trained.editor(tmp_path, steps=3)
    assert (tmp_path / "model.safetensors").exists() and not model.training
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
