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


@pytest.mark.slow
def test_blocks_that_are_lost_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    release = BlockPool.release
    monkeypatch.setattr(
        BlockPool, "release", lambda self, block_ids: release(self, list(block_ids)[1:])
    )
    with pytest.raises(AssertionError, match="refcount"):
        engine_machine.run(60, 6, shrinks=False)


@pytest.mark.slow
def test_a_token_that_is_told_twice_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    step = PagedEngine.step

    def twice(self: PagedEngine) -> list[Any]:
        return [
            copy
            for output in step(self)
            for copy in [output] * (1 + bool(output.new_tokens and not output.result))
        ]

    monkeypatch.setattr(PagedEngine, "step", twice)
    with pytest.raises(AssertionError, match="streamed"):
        engine_machine.run(60, 6, shrinks=False)
