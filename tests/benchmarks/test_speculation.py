"""The benchmark of speculation runs and reports its measurements."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch

from benchmarks import speculation, trained
from benchmarks.systems import Answer


@pytest.mark.slow
@pytest.mark.full
def test_quick_prints_and_writes_its_rows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.json"
    speculation.main(["--quick", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert [row["case"].split(":")[0][:2] for row in rows] == ["W7", "W8", "32", "on", "8 "]
    for row in rows:
        assert row["equal"] and row["plain"] and row["turns"] == 1 and row["off_s"] > 0
        assert 0 <= row["accepted"] <= row["proposed"] and len(row["acceptance_by_turn"]) == 1
    assert rows[-1]["parameters"][0] < rows[-1]["parameters"][1] and rows[-1]["break_even_from"]
    out = capsys.readouterr().out
    assert (
        "| W7: 32 rows, edit a text of 96 words | n-grams | 1, 1 |" in out
        and "at most 0.75: " in out
    )


def test_an_unknown_part_names_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        speculation.main(["--only", "W7,W9"])
    assert "'W9' (choose from W7, W8, random, assistants, stages)" in capsys.readouterr().err


def test_the_target_and_its_tenth_are_as_large_as_the_issue_asks() -> None:
    with torch.device("meta"):
        target, *others = (
            trained.AutoModelForCausalLM.from_config(shape.config()).num_parameters()
            for shape in (trained.TARGET, *trained.ASSISTANTS)
        )
    sizes = dict(zip([shape.name for shape in trained.ASSISTANTS], others))
    assert target >= 25e6 and sizes[speculation.TENTH] <= target / 10 and others == sorted(others)


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
    "ratios, even, told",
    [
        (
            [0.5, 0.9, 1.1],
            pytest.approx((4e6 * 16e6) ** 0.5),
            "computed between the measured 4M and 16M",
        ),
        ([0.5, 0.6, 0.7], None, "all of the measured sizes are faster"),
        ([1.1, 1.2, 1.3], None, "none of the measured sizes is faster"),
        ([1.1, 0.9, 0.8], pytest.approx(2e6), "computed between the measured 1M and 4M"),
    ],
)
def test_break_even(ratios: list[float], even: float | None, told: str) -> None:
    assert speculation.break_even([1_000_000, 4_000_000, 16_000_000], ratios) == (even, told)


@pytest.mark.slow
def test_a_model_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    model = trained.editor(trained.EDITOR, tmp_path, steps=3)
    assert (tmp_path / trained.EDITOR.name / "model.safetensors").exists() and not model.training
    again = trained.load(tmp_path / trained.EDITOR.name)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters()))


@pytest.mark.slow
def test_stages_are_all_of_a_turn(tmp_path: Path) -> None:
    path = tmp_path / "stages.json"
    speculation.main(["--only", "stages", "--quick", "--json", str(path)])
    stages = {row["stage"]: row for row in json.loads(path.read_text())["stages"]}
    for system in ("off", "assistant of a tenth"):
        mine = {name: row["seconds"] for name, row in stages.items() if name.startswith(system)}
        whole = mine.pop(f"{system}: whole")
        assert sum(mine.values()) == pytest.approx(whole) and f"{system}: target, steps" in mine
    assert stages["assistant of a tenth: assistant, steps"]["runs"] > 0
