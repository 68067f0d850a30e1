"""lighteval's transformers backend with `continuous_batching=True`, end to end on a local model and a local task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lighteval")

from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.models.transformers.transformers_model import TransformersModelConfig
from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
from lighteval.tasks.registry import Registry
from transformers.generation.continuous_batching import ContinuousMixin

import hf_paged
from tests.support import models

NUM_ROWS, NEW_TOKENS = 12, 10
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
TASK = """
from lighteval.metrics.metrics import Metrics
from lighteval.tasks.lighteval_task import LightevalTaskConfig
from lighteval.tasks.requests import Doc

def prompt(line, task_name=None):
    return Doc(task_name=task_name, query=line["question"], choices=[line["answer"]], gold_index=0)

TASKS_TABLE = [
    LightevalTaskConfig(
        name="local",
        prompt_function=prompt,
        hf_repo={folder!r},
        hf_subset="default",
        hf_avail_splits=["train"],
        evaluation_splits=["train"],
        metrics=[Metrics.exact_match],
        generation_size={new_tokens},
    )
]
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model, a data set and the task over it."""
    for name in ("_load_from_files", "_load_from_subdirs"):  # of lighteval's own tasks, one of which downloads a file
        monkeypatch.setattr(Registry, name, staticmethod(lambda *args: {}))
    model = models.build("llama")
    tokenizer = models.tokenizer()
    tokenizer.chat_template = TEMPLATE  # without one lighteval's road asks a document for what it has not
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    (tmp_path / "data").mkdir()
    words = models.corpus()[0]
    rows = [{"question": words[3 * i : 20 + 7 * i], "answer": words[i : i + 5]} for i in range(NUM_ROWS)]
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.py").write_text(TASK.format(folder=str(tmp_path / "data"), new_tokens=NEW_TOKENS))
    return tmp_path


@pytest.fixture
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    yield
    hf_paged.uninstall()
    hf_paged.install()


def evaluate(folder: Path, name: str, **options: Any) -> tuple[dict[str, Any], list[Any]]:
    """The results and the answers."""
    config = TransformersModelConfig(
        model_name=str(folder / "model"),
        dtype="float32",
        device="cpu",
        batch_size=4,
        model_parallel=False,
        generation_parameters={"max_new_tokens": NEW_TOKENS},  # of which the road by batches makes its configuration
        **options,
    )
    pipeline = Pipeline(
        tasks="local",
        pipeline_parameters=PipelineParameters(
            launcher_type=ParallelismManager.ACCELERATE, custom_tasks_directory=str(folder / "task.py")
        ),
        evaluation_tracker=EvaluationTracker(output_dir=str(folder / name)),
        model_config=config,
    )
    pipeline.evaluate()
    details = pipeline.evaluation_tracker.details_logger.details
    answers = [(row.doc.query, row.model_response.output_tokens) for rows in details.values() for row in rows]
    results = pipeline.get_results()["results"]
    return results, [(query, list(map(list, tokens))) for query, tokens in answers]


@pytest.mark.usefixtures("native_names")
def test_answers_are_those_of_the_padded_road(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    roads: set[str] = set()
    generate_batch: Any = ContinuousMixin.generate_batch

    def counted(model: Any, **arguments: Any) -> Any:
        calls.append(len(arguments["inputs"]))
        outputs = generate_batch(model, **arguments)
        route = hf_paged.last_route(model)
        roads.add("" if route is None else route.road)
        return outputs

    monkeypatch.setattr(ContinuousMixin, "generate_batch", counted)
    results, answers = evaluate(folder, "batches", continuous_batching=True)
    assert sum(calls) == NUM_ROWS == len(answers) and roads == {"engine"}
    padded_results, padded = evaluate(folder, "padded")
    assert results == padded_results and any("local" in name for name in results)
    assert answers == padded and len({str(tokens) for _, tokens in answers}) > 1
    monkeypatch.undo()  # before the names are given back
