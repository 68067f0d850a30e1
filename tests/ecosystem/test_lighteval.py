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

torch.set_grad_enabled(True)  # lighteval disables gradients in the process that imports it

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
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    yield
    hf_paged.uninstall()
    hf_paged.install()


def plain(model: Any, ids: list[int]) -> list[int]:
    tokens = model.generate(torch.tensor([ids]), max_new_tokens=NEW_TOKENS, do_sample=False)
    return list(map(int, tokens[0, len(ids) :]))


@pytest.mark.usefixtures("native_names")
def test_a_task_by_generate_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The correct answers of every other row are the model's in a plain call, so half are scored as
    correct."""
    for name in ("_load_from_files", "_load_from_subdirs"):
        # of lighteval's own tasks, one of which downloads a file
        monkeypatch.setattr(Registry, name, staticmethod(lambda *args: {}))
    model: Any = models.build("llama")
    tokenizer: Any = models.tokenizer()
    # without one, lighteval reads a field that the document lacks
    tokenizer.chat_template = TEMPLATE
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "model")
    words, rows = models.corpus()[0], []
    for i in range(NUM_ROWS):
        question = words[3 * i : 20 + 7 * i]
        answer = tokenizer.decode(
            plain(model, tokenizer(question)["input_ids"]), skip_special_tokens=True
        )
        rows.append({"question": question, "answer": f"not {answer}" if i % 2 else answer})
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (tmp_path / "task.py").write_text(
        TASK.format(folder=str(tmp_path / "data"), new_tokens=NEW_TOKENS)
    )

    roads: list[str] = []
    generate_batch: Any = ContinuousMixin.generate_batch

    def counted(model: Any, **arguments: Any) -> Any:
        outputs = generate_batch(model, **arguments)
        route = hf_paged.last_route(model)
        roads.append("" if route is None else route.road)
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
    assert roads and set(roads) == {"engine"}
    details = [
        row for rows in pipeline.evaluation_tracker.details_logger.details.values() for row in rows
    ]
    assert len(details) == NUM_ROWS
    for row in details:
        response = row.model_response
        assert response.output_tokens == [plain(model, response.input_tokens)]
    expected = {row["question"]: 0 if row["answer"].startswith("not ") else 1 for row in rows}
    assert {row.doc.query: row.metric["em"] for row in details} == expected
    assert pipeline.get_results()["results"]["all"]["em"] == 0.5
