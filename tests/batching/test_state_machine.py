"""A small part of `python -m tests.support.engine_machine`, and checks that it detects errors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("peft")

from hf_paged import PagedEngine
from hf_paged.cache.block_pool import BlockPool
from tests.support import engine_machine

release, step = BlockPool.release, PagedEngine.step


def lose(pool: BlockPool, block_ids: Any) -> None:
    release(pool, list(block_ids)[1:])


def tell_twice(engine: PagedEngine) -> list[Any]:
    outputs = step(engine)
    return [*outputs, *(output for output in outputs if output.new_tokens and not output.result)]


@pytest.mark.slow
def test_the_engine_under_any_order_of_events(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = engine_machine.run(120, 6)
    events = ("calls", "cancelled", "own code raised", "changed weights", "prefix-hit tokens")
    assert seen["results"] > 50 and all(seen[event] for event in events), seen
    for owner, name, wrong, message in [
        (BlockPool, "release", lose, "refcount"),
        (PagedEngine, "step", tell_twice, "streamed"),
    ]:
        with monkeypatch.context() as patch, pytest.raises(AssertionError, match=message):
            patch.setattr(owner, name, wrong)
            engine_machine.run(60, 6, shrinks=False)
