"""Models in shards over several processes, as the core sees them."""

from __future__ import annotations

import pytest

import hf_paged
from hf_paged import rooms
from hf_paged.model import sharding
from hf_paged.rooms import RoomMissingError
from tests.support import models


def test_without_the_room_only_calls_that_need_it_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.build("llama")
    rooms.room.cache_clear()
    for module in (rooms, sharding):
        monkeypatch.setattr(module, "is_installed", lambda name: name != "ranks")
    assert sharding.processes_of(model) is sharding.lead(model, hf_paged.PagedConfig(), ()) is None
    monkeypatch.setattr(sharding.compat, "shard_ranks", lambda model: [0, 1])
    with sharding.deferring_signals(model):  # as in a plain call
        pass
    for call in (
        lambda: hf_paged.PagedEngine(model),
        lambda: hf_paged.serve_rank(model),
        lambda: model.generate(models.token_ids(1, 5), max_new_tokens=2, **models.PAGED),
    ):
        with pytest.raises(RoomMissingError, match=r"in shards.*needs `hf_paged\.ranks`"):
            call()
