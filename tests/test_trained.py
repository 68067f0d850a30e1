"""Parity on trained models, whose rows have varied text."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models, trained
from tests.support.checks import generate_both
from tests.support.engine_helpers import assert_drained, assert_same_as_lone, lone_run, run_all

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "samples": {**GREEDY, "do_sample": True, "num_return_sequences": 3},
    "beams": {**GREEDY, "num_beams": 4, "num_return_sequences": 2},
}
PROMPTS = [
    " ".join(sentence.split()[:count])
    for sentence, count in zip(models.corpus()[::9], (7, 1, 3, 5, 2, 4))
]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One folder for all processes of a run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def inputs() -> Any:
    options = {"padding": True, "return_tensors": "pt", "return_token_type_ids": False}
    return models.tokenizer()(PROMPTS, **options)


def assert_varied(rows: list[list[int]]) -> None:
    for row in rows:
        assert len(set(row)) >= 8, row


@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", trained.NAMES)
def test_generate(name: str, mode: str, folder: Path) -> None:
    model, given = trained.load(name, folder), inputs()
    assert len(set(given["attention_mask"].sum(1).tolist())) > 3, "the prompts have few lengths"
    expected, actual = generate_both(model, given, MODES[mode])
    assert actual.tolist() == expected.tolist()
    assert_varied(expected[:, given["input_ids"].shape[1] :].tolist())
    hf_paged.check_integrity(model)


@pytest.mark.slow_cases(but=["*-1.0"])
@pytest.mark.parametrize(
    ("kv_dtype", "error", "agreement"),
    [("int8", 0.01, 1.0), ("fp8_e4m3", 0.03, 0.9), ("fp8_e5m2", 0.06, 0.8)],
)
def test_quantized_keys_and_values(
    kv_dtype: str, error: float, agreement: float, folder: Path
) -> None:
    """Effect of rounded K/V on logits, token by token, in standard deviations, and the number of
    unchanged greedy tokens. (In bfloat16 without rounded blocks, the same model's is 0.005.)"""
    model = trained.load("llama", folder)
    ids = models.tokenizer()(" ".join(models.corpus()[:3]), return_tensors="pt").input_ids
    logits, rows = [], []
    for config in ({"kv_dtype": None}, {"kv_dtype": kv_dtype}):
        cache, paged = hf_paged.PagedCache(model.config, config), {"cache_config": config}
        with torch.no_grad():
            steps = [model(token, past_key_values=cache).logits[0] for token in ids.split(1, dim=1)]
        logits.append(torch.cat(steps))
        rows.append(model.generate(**inputs(), **GREEDY, **paged, cache_implementation="paged"))
    assert 0 < (logits[1] - logits[0]).square().mean().sqrt() < error * logits[0].std()
    assert (rows[0] == rows[1]).float().mean() >= agreement
    hf_paged.free(model)


@pytest.mark.slow
@pytest.mark.parametrize("name", trained.NAMES)
def test_engine(name: str, folder: Path) -> None:
    model = trained.load(name, folder)
    engine = PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=32))
    prompts = models.tokenizer()(PROMPTS).input_ids
    wanted = {}
    for seed, (mode, options) in enumerate(MODES.items()):
        for prompt in prompts:
            request_id = engine.add_request(prompt, options, seed=seed)
            wanted[request_id] = (mode, options, lone_run(model, prompt, options, seed=seed))
    results = run_all(engine)
    for request_id, (mode, options, rows) in wanted.items():
        assert_varied(rows)
        assert_same_as_lone(rows, results[request_id], options, f"{name}, {mode}")
    assert_drained(engine)
    engine.free()
