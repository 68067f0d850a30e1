"""lm-evaluation-harness by its command line, on a local model and a local task."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lm_eval")

import hf_paged

from ..support import models

ROOT = Path(hf_paged.__file__).parents[1]
TASK = """
task: continues
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs: {{until: ["zzzz"], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and a task whose right answers are the model's for two questions in three."""
    folder = tmp_path_factory.mktemp("lm_eval")
    model, tokenizer = models.get("llama"), models.tokenizer()
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    lines = []
    for i, text in enumerate(models.corpus()[:9]):
        ids = tokenizer(text, return_tensors="pt").input_ids
        new = model.generate(ids, max_new_tokens=12, do_sample=False)[0, ids.shape[1] :]
        answer = tokenizer.decode(new, skip_special_tokens=True) if i % 3 else "something else"
        lines.append(json.dumps({"question": text, "answer": answer}))
    (folder / "data.jsonl").write_text("\n".join(lines))
    (folder / "continues.yaml").write_text(TASK.format(data=folder / "data.jsonl"))
    return folder


def evaluate(folder: Path, name: str, run: str = "", options: str = "") -> tuple[Any, list[Any]]:
    """Scores and answers."""
    command = f"""-m {run} lm_eval run --model hf --tasks continues --include_path {folder}
        --model_args pretrained={folder / "model"},dtype=float32 --output_path {folder / name}
        --device cpu --batch_size 4 --log_samples {options}"""
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "home")}
    ended = subprocess.run(
        [sys.executable, *command.split()],
        cwd=ROOT,
        env={**os.environ, **offline, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        encoding="utf-8",
        timeout=300,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    [results] = (folder / name).rglob("results*.json")
    [samples] = (folder / name).rglob("samples*.jsonl")
    answers = [json.loads(line)["resps"] for line in samples.read_text().splitlines()]
    return json.loads(results.read_text())["results"]["continues"], answers


def test_scores_are_equal(folder: Path) -> None:
    scores, answers = evaluate(folder, "plain")
    run, asked = "hf_paged run --set block_size=32", "--gen_kwargs cache_implementation=paged"
    assert evaluate(folder, "paged", run, asked) == (scores, answers)
    numbers = [value for value in scores.values() if isinstance(value, float)]
    assert any(value == pytest.approx(2 / 3) for value in numbers)


@pytest.mark.slow
def test_without_an_option(folder: Path) -> None:
    """`--paged` alone does it, too."""
    scores = evaluate(folder, "again")
    assert evaluate(folder, "default", "hf_paged run --paged") == scores
