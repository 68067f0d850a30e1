"""The room of recorded steps: what replaces it, and what its absence changes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest.mock import Mock

import pytest

from hf_paged import PagedConfig, PagedEngine, rooms
from hf_paged.batching import factory
from hf_paged.batching.execution import executor, runner
from hf_paged.rooms import RoomMissingError
from hf_paged.seams import EngineParts
from tests.batching.test_runner import SIZE
from tests.support import models
from tests.support.engine_helpers import assert_same_as_lone, lone_run, prompts, run_all

pytestmark = pytest.mark.usefixtures("needs_compiler")
GREEDY: dict[str, Any] = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 12}


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (rooms, factory, executor):
        monkeypatch.setattr(module, "is_installed", lambda name: name != "tape")
    rooms.room.cache_clear()
    yield
    rooms.room.cache_clear()


def num_replays(parts: EngineParts = EngineParts()) -> int:  # noqa: B008  it is frozen
    """Recorded steps of a request, whose tokens are a lone run's."""
    model, (prompt,) = models.get("llama"), prompts(7)
    with PagedEngine(model, PagedConfig(block_size=SIZE), parts=parts) as engine:
        name = engine.add_request(prompt, GREEDY)
        found = run_all(engine)[name]
        assert_same_as_lone(lone_run(model, prompt, GREEDY), found, GREEDY, "llama")
        return engine.stats().num_captured_steps


def test_without_the_room_steps_run_as_modules(missing: None) -> None:
    assert num_replays() == 0


def test_a_fixed_order_needs_the_room(missing: None) -> None:
    text = r"`batch_invariant` needs `hf_paged\.tape`"
    with PagedEngine(models.get("llama"), PagedConfig(batch_invariant=True)) as engine:
        with pytest.raises(RoomMissingError, match=text):
            engine.add_request(prompts(7)[0], GREEDY)
    options = {"cache_implementation": "paged", "cache_config": {"batch_invariant": True}}
    with pytest.raises(RoomMissingError, match=text):
        models.build("llama").generate(models.token_ids(1, 9), **GREEDY, **options)


def test_an_engine_takes_another_recorder() -> None:
    """Here, one that has no replay for any step."""
    never = Mock()
    never.run.return_value = never.run_ahead.return_value = None
    never.in_order.return_value = runner.NOTHING
    assert num_replays() > 0
    assert num_replays(EngineParts(recorder=lambda model, cache: never)) == 0
    assert never.begin.called and never.run.call_count > 5
    assert num_replays(EngineParts(recorder=lambda model, cache: None)) == 0
