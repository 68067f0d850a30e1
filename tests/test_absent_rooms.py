"""Options of rooms that are not there raise; calls that ask for none of them do not notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from transformers import BloomForCausalLM
from transformers.generation.continuous_batching import ContinuousMixin

import hf_paged
from hf_paged import PagedCache, PagedEngine, last_route, rooms
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.forwards import build


@pytest.fixture(autouse=True)
def without_rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rooms, "is_installed", lambda name: False)
    rooms.room.cache_clear()
    yield
    rooms.room.cache_clear()


def test_virtual_storage() -> None:
    config = models.get("llama").config
    message = r"`storage=VirtualStorage\(.*\)` needs `hf_paged.virtual`"
    with pytest.raises(rooms.RoomMissingError, match=message):
        PagedCache(config, {"storage": "virtual"})
    with pytest.raises(rooms.RoomMissingError, match=message):
        PagedEngine(models.get("llama"), {"storage": "virtual"})


def test_the_names_of_continuous_batching_stay_those_of_transformers() -> None:
    own = ContinuousMixin.generate_batch
    with pytest.raises(rooms.RoomMissingError, match="`continuous_batching` needs"):
        hf_paged.install(continuous_batching=True)
    assert ContinuousMixin.generate_batch is own
    hf_paged.uninstall()
    hf_paged.install()
    assert ContinuousMixin.generate_batch is own


def test_pictures() -> None:
    engine, cache = PagedEngine(models.get("llama")), PagedCache()
    for owner in (engine, cache, cache.stats()):
        assert owner._repr_html_() is None  # notebooks then show this:
        assert type(owner).__name__ in repr(owner)
    for plot in (engine.plot_memory, engine.plot_timeline, cache.plot_memory):
        with pytest.raises(rooms.RoomMissingError, match=r"`plot_.*` needs `hf_paged.tools`"):
            plot()


def test_rectangles(caplog: pytest.LogCaptureFixture) -> None:
    """A call takes the path of plain `generate`, and a warning names the room; an engine raises."""
    model, ids = build("GPTNeoForCausalLM"), models.token_ids(2, 9)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    paged = model.generate(ids, **options, **models.PAGED)
    route = last_route(model)
    assert route is not None and route.road == "hf_loop"
    assert "needs `hf_paged.rectangles`" in route.reason
    warning = caplog.messages[0]
    assert warning.startswith("GPTNeoForCausalLM runs in transformers' own loop: ")
    assert "needs `hf_paged.rectangles`" in warning and "[troubleshooting.md#rooms]" in warning
    assert paged.equal(model.generate(ids, **options))
    with pytest.raises(rooms.RoomMissingError, match=r"needs `hf_paged.rectangles`"):
        PagedEngine(model, {"capture": False}).add_request(ids[0].tolist())


def test_models_with_their_own_attention_code_are_not_packed() -> None:
    model = tiny_model(BloomForCausalLM)
    inputs = {"input_ids": torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]]), "max_new_tokens": 6}
    expected = model.generate(**inputs)
    assert torch.equal(model.generate(**inputs, **models.UNRECORDED), expected)
    route = hf_paged.last_route(model)
    assert route is not None and "needs `hf_paged.own_attention`" in route.reason
