"""A small part of `python -m tests.support.engine_machine`, and checks that it detects errors."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("peft")

from hf_paged import PagedEngine
from hf_paged.cache.block_pool import BlockPool
from tests.support import engine_machine


@pytest.mark.slow
def test_the_engine_under_any_order_of_events() -> None:
    seen = engine_machine.run(120, 6)
    assert (
        seen["results"] > 50 and seen["calls"] and seen["cancelled"] and seen["own code raised"]
    ), seen
    assert seen["changed weights"] and seen["prefix-hit tokens"], seen


def lose(pool: BlockPool, block_ids: Any) -> None:
    release(pool, list(block_ids)[1:])


def tell_twice(engine: PagedEngine) -> list[Any]:
    outputs = step(engine)
    return [*outputs, *(output for output in outputs if output.new_tokens and not output.result)]


release, step = BlockPool.release, PagedEngine.step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "message"),
    [(BlockPool, "release", lose, "refcount"), (PagedEngine, "step", tell_twice, "streamed")],
)
def test_blocks_that_are_lost_and_tokens_that_are_told_twice_are_found(
    owner: Any, name: str, wrong: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, wrong)
    with pytest.raises(AssertionError, match=message):
        engine_machine.run(60, 6, shrinks=False)
