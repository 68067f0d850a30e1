"""Parity on trained models, whose every row says many different tokens."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models, trained
from tests.support.engine_helpers import assert_drained, assert_same_as_lone, lone_run, run_all

NEW_TOKENS = 24
MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False, "max_new_tokens": NEW_TOKENS},
    "samples": {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": NEW_TOKENS},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2, "max_new_tokens": NEW_TOKENS},
}
PROMPTS = [" ".join(sentence.split()[:count]) for sentence, count in zip(models.corpus()[::9], (7, 1, 3, 5, 2, 4))]


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One for all processes of a run."""
    own = tmp_path_factory.getbasetemp()
    return own.parent if "PYTEST_XDIST_WORKER" in os.environ else own


def assert_varied(rows: list[list[int]]) -> None:
    for row in rows:
        assert len(set(row)) >= 8, row


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", trained.NAMES)
def test_generate(name: str, mode: str, folder: Path) -> None:
    model = trained.load(name, folder)
    inputs = models.tokenizer()(PROMPTS, padding=True, return_tensors="pt", return_token_type_ids=False)
    assert len(set(inputs["attention_mask"].sum(1).tolist())) > 3, "the prompts have few lengths"
    torch.manual_seed(1)
    expected = model.generate(**inputs, **MODES[mode])
    torch.manual_seed(1)
    actual = model.generate(**inputs, **MODES[mode], **models.PAGED)
    assert actual.tolist() == expected.tolist()
    assert_varied(expected[:, inputs["input_ids"].shape[1] :].tolist())
    hf_paged.check_integrity(model)


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
