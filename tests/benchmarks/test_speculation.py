"""The model and the figures of the benchmark of speculation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks import speculation, trained
from benchmarks.systems import Answer


def test_an_answer_edits_its_prompt() -> None:
    prompt, answer = trained.edit(random.Random(0), 256)
    text = prompt[1:-1]
    changed = [place for place in range(len(text)) if text[place] != answer[place]]
    assert len(text) == len(answer) and 0 < len(changed) < len(text) / 8
    assert all(text[place] % trained.OLD_WORDS == trained.FIRST_WORD for place in changed)
    workload = speculation.EDITS["W7"]
    assert workload.batch(0, 256).prompts != workload.batch(1, 256).prompts


def test_accepted_tokens_are_those_beyond_one_a_step() -> None:
    answer = Answer([[1] * 6, [1] * 4], [[0.0, 1.0, 1.0, 1.0, 2.0, 2.0], [0.0, 1.0, 2.0, 3.0]])
    assert speculation.accepted_a_step(answer) == [1.5, 0.0]


@pytest.mark.slow
def test_a_model_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    model = trained.editor(tmp_path, steps=3)
    assert (tmp_path / "model.safetensors").exists() and not model.training
    again = trained.load(tmp_path)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
