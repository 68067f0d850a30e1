"""The models and the figures of the benchmark of speculation."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from benchmarks import speculation, trained
from benchmarks.systems import Answer


def test_the_target_and_its_tenth_are_as_large_as_the_issue_asks() -> None:
    with torch.device("meta"):
        target, *others = (
            trained.AutoModelForCausalLM.from_config(shape.config()).num_parameters()
            for shape in (trained.TARGET, *trained.ASSISTANTS)
        )
    sizes = dict(zip([shape.name for shape in trained.ASSISTANTS], others))
    tenth = sizes["language-2.5m"]
    assert target >= 25e6 and tenth <= target / 10 and others == sorted(others)
    assert speculation.TENTH == f"assistant of {tenth / 1e6:.3g}M"


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


@pytest.mark.parametrize(
    "ratios, told",
    [
        ([0.5, 0.9, 1.1], "assistant of 8M: computed between the measured 4M and 16M"),
        ([0.5, 0.6, 0.7], "no break-even size: all of the measured sizes are faster"),
        ([1.1, 1.2, 1.3], "no break-even size: none of the measured sizes is faster"),
        ([1.1, 0.9, 0.8], "assistant of 2M: computed between the measured 1M and 4M"),
    ],
)
def test_break_even(ratios: list[float], told: str) -> None:
    assert speculation.break_even([1_000_000, 4_000_000, 16_000_000], ratios).endswith(told)


@pytest.mark.slow
def test_a_model_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    model = trained.editor(trained.EDITOR, tmp_path, steps=3)
    assert (tmp_path / trained.EDITOR.name / "model.safetensors").exists() and not model.training
    again = trained.load(tmp_path / trained.EDITOR.name)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))
