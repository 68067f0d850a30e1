"""Which rooms are there, for tests that see more with them; drafts whose lengths do not follow
measured times; errors of rectangles that are taken away."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hf_paged.kernels import cpp
from hf_paged.rooms import ROOMS, is_installed, room

needs_all_rooms = pytest.mark.skipif(
    not all(map(is_installed, ROOMS)), reason="looks at all rooms, and some are taken away"
)


def records_on_cpu() -> bool:
    """Whether steps on the CPU are recorded."""
    return is_installed("tape") and cpp.is_available()


def fix_prices(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, steps are not observed: a draft token's price stays that of the beginning."""
    if is_installed("speculation"):
        from hf_paged.speculation.speculator import Speculator

        replace(Speculator, "computed", lambda self, num_tokens, seconds: None)


def ask_for_rectangles(replace: Callable[[Any, str, Any], None] = setattr) -> list[str]:
    """From now on, if the room `rectangles` is taken away, a model or a call that needs it raises,
    in place of running on transformers' own loop, and lengthens the returned list: its test is then
    skipped."""
    asked = list[str]()
    if is_installed("rectangles"):
        return asked
    from hf_paged.generation import candidate
    from hf_paged.model import capability

    def fail(*_: Any) -> None:
        asked.append("rectangles")
        room("rectangles", "this test")

    replace(candidate, "warn_once", fail)
    replace(capability, "room_if_installed", fail)
    return asked
