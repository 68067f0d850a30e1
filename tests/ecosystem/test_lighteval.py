"""lighteval's transformers backend with `continuous_batching=True`, end to end on a local model and
a local task."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("lighteval")

from lighteval.logging.evaluation_tracker import EvaluationTracker
from lighteval.models.transformers.transformers_model import TransformersModelConfig
from lighteval.pipeline import ParallelismManager, Pipeline, PipelineParameters
from lighteval.tasks.registry import Registry
from transformers.generation.continuous_batching import ContinuousMixin

import hf_paged
from tests.support import models
from tests.support.engine_helpers import lone_run

torch.set_grad_enabled(True)  # lighteval disables gradients in the process that imports it

NEW_TOKENS = 10
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
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    yield
    hf_paged.uninstall()
    hf_paged.install()


def plain(ids: list[int]) -> list[int]:
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False}
    return lone_run(models.get("llama"), list(map(int, ids)), options)[0]


@pytest.mark.usefixtures("native_names")
def test_a_task_by_generate_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The correct answers of every other row are the model's in a plain call, so half are scored as
    correct."""
    for name in ("_load_from_files", "_load_from_subdirs"):
        # of lighteval's own tasks, one of which downloads a file
        monkeypatch.setattr(Registry, name, staticmethod(lambda *args: {}))
    tokenizer = models.tokenizer()
    # without one, lighteval reads a field that the document lacks
    monkeypatch.setattr(tokenizer, "chat_template", TEMPLATE)
    tokenizer.save_pretrained(tmp_path / "model")
    models.get("llama").save_pretrained(tmp_path / "model")
    words, expected, lines = models.corpus()[0], dict[str, int](), []
    for i in range(12):
        question = words[3 * i : 20 + 7 * i]
        answer = tokenizer.decode(plain(tokenizer(question)["input_ids"]), skip_special_tokens=True)
        expected[question] = (i + 1) % 2
        answer = answer if expected[question] else f"not {answer}"
        lines.append(json.dumps({"question": question, "answer": answer}))
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(lines))
    task = TASK.format(folder=str(tmp_path / "data"), new_tokens=NEW_TOKENS)
    (tmp_path / "task.py").write_text(task)
    routes: list[Any] = []
    generate_batch: Any = ContinuousMixin.generate_batch

    def counted(model: Any, **arguments: Any) -> Any:
        outputs = generate_batch(model, **arguments)
        routes.append(hf_paged.last_route(model))
        return outputs

    with monkeypatch.context() as patch:
        patch.setattr(ContinuousMixin, "generate_batch", counted)
        pipeline = Pipeline(
            tasks="local",
            pipeline_parameters=PipelineParameters(
                launcher_type=ParallelismManager.ACCELERATE,
                custom_tasks_directory=str(tmp_path / "task.py"),
            ),
            evaluation_tracker=EvaluationTracker(output_dir=str(tmp_path / "out")),
            model_config=TransformersModelConfig(
                model_name=str(tmp_path / "model"),
                dtype="float32",
                device="cpu",
                continuous_batching=True,
                generation_parameters={"max_new_tokens": NEW_TOKENS},
            ),
        )
        pipeline.evaluate()
    assert routes and {route.road for route in routes} == {"engine"}
    details = pipeline.evaluation_tracker.details_logger.details.values()
    rows = [row for details_of_task in details for row in details_of_task]
    for row in rows:
        response = row.model_response
        assert response.output_tokens == [plain(response.input_tokens)]
    assert {row.doc.query: row.metric["em"] for row in rows} == expected
    assert len(rows) == 12 and pipeline.get_results()["results"]["all"]["em"] == 0.5
