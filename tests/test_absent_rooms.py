"""Options of rooms that are not there raise; calls that ask for none of them do not notice."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from transformers.generation.continuous_batching import ContinuousMixin

import hf_paged
from hf_paged import PagedCache, PagedEngine, rooms
from tests.support import models


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
