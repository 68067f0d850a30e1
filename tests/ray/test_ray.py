"""`hf_paged.ray` without Ray installed; `tests/ecosystem/test_ray.py` has the rest."""

from __future__ import annotations

import asyncio
import copy
import importlib
import json
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from hf_paged import PagedEngine
from tests.support import models
from tests.support.missing import take_away


def test_without_ray(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "ray")
    monkeypatch.delitem(sys.modules, "hf_paged.ray", raising=False)
    with pytest.raises(ImportError, match=r'needs Ray: pip install "hf_paged\[ray\]"'):
        importlib.import_module("hf_paged.ray")


def test_what_the_model_cannot_take_is_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """Status 400 for a prompt that is longer than the model's table of positions."""
    responses: Any = ModuleType("starlette.responses")
    responses.Response = lambda content, status, media_type: (status, json.loads(content))
    responses.StreamingResponse = None
    for name, module in {"ray": ModuleType("ray"), "starlette.responses": responses}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "hf_paged.ray", raising=False)
    package = importlib.import_module("hf_paged.ray")
    server = package.LLMServer(lambda: PagedEngine(models.build("gpt2")))
    monkeypatch.delitem(sys.modules, "hf_paged.ray")

    async def status(prompt: list[int]) -> tuple[int, Any]:
        async def body() -> dict[str, Any]:
            return {"prompt": prompt, "generation_config": {"max_new_tokens": 2}}

        found: tuple[int, Any] = await server(SimpleNamespace(json=body))
        return found

    assert asyncio.run(status([5, 6, 7]))[0] == 200
    assert asyncio.run(status([models.VOCAB_SIZE]))[0] == 400
    code, answer = asyncio.run(status([5] * 300))
    assert code == 400 and "positions" in answer["error"]

    async def empty() -> dict[str, Any]:
        return {}

    code, answer = asyncio.run(server(SimpleNamespace(json=empty)))
    assert code == 400 and "no `prompt`" in answer["error"]


class Block:
    """Ray's `BlockAccessor` for a dict of NumPy arrays, as far as the predictor uses it: rows hold
    what the arrays hold."""

    def __init__(self, batch: dict[str, np.ndarray]) -> None:
        self.batch = batch
        self.column_names = list(batch)

    batch_to_block = staticmethod(lambda batch: batch)
    for_block = classmethod(lambda cls, block: block if isinstance(block, cls) else cls(block))

    def to_arrow(self) -> Block:
        return self

    def select(self, names: list[str]) -> Block:
        return Block({name: self.batch[name] for name in names})

    def append_column(self, name: str, values: Any) -> Block:
        return Block({**self.batch, name: values.to_pylist()})

    def iter_rows(self, public_row_format: bool) -> Any:
        return (dict(zip(self.batch, row)) for row in zip(*self.batch.values()))


@pytest.fixture
def predictor(monkeypatch: pytest.MonkeyPatch) -> Any:
    pytest.importorskip("pyarrow")
    block: Any = ModuleType("ray.data.block")
    block.BlockAccessor = Block
    for name in ("ray", "ray.data"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, "ray.data.block", block)
    monkeypatch.delitem(sys.modules, "hf_paged.ray", raising=False)
    yield importlib.import_module("hf_paged.ray").LLMPredictor
    sys.modules.pop("hf_paged.ray", None)


def objects(*values: Any) -> np.ndarray:
    array = np.empty(len(values), dtype=object)
    array[:] = values
    return array


def test_chats_in_batches_of_numpy(predictor: Any) -> None:
    """NumPy and pandas hold lists as arrays: the messages of a chat, the parts of a message, an
    option's values."""
    tokenizer = copy.copy(models.tokenizer())
    text = "{{ m.content if m.content is string else m.content[0].text }}"
    tokenizer.chat_template = "{% for m in messages %}" + text + "{% endfor %}"
    chat = [{"role": "user", "content": "bade"}, {"role": "user", "content": "cifo"}]
    parts = [{"role": "user", "content": objects({"type": "text", "text": "badecifo"})}]
    make = lambda: PagedEngine(models.get("llama"), tokenizer=tokenizer)  # noqa: E731
    predict = predictor(make, {"max_new_tokens": 3, "do_sample": False})
    first = predict.engine.generate([chat], {"max_new_tokens": 3, "do_sample": False})[0].token_ids
    configs = objects({"eos_token_id": np.array([first[1], 5])}, None)
    rows = predict(
        {"prompt": objects(objects(*chat), objects(*parts)), "generation_config": configs}
    ).batch
    assert rows["__inference_error__"] == ["", ""]
    assert rows["generated_tokens"] == [first[:2], first]


def test_one_seed_for_all_rows_does_not_depend_on_their_places(predictor: Any) -> None:
    predict = predictor(
        lambda: PagedEngine(models.get("llama")), {"max_new_tokens": 6, "do_sample": True}, seed=3
    )
    first, second = predict({"prompt": objects([5, 6], [5, 6])}).batch["generated_tokens"]
    assert first == second
