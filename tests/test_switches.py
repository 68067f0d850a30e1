"""Objects that calls switch for their duration."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from hf_paged.switches import Switches


def test_any_number_of_items_is_switched_back() -> None:
    state: dict[int, str] = {}
    switches: Switches[list[int]] = Switches(
        lambda item: "before",
        lambda item, saved: state.update({item[0]: "switched"}),
        lambda item, saved: state.update({item[0]: saved}),
    )
    items = [[number] for number in range(2 * sys.getrecursionlimit())]
    with switches.switched(items):
        assert set(state.values()) == {"switched"}
    assert set(state.values()) == {"before"} and not switches.held


def test_all_others_are_switched_back_if_one_raises() -> None:
    state: dict[int, str] = {}

    def restore(item: list[int], saved: Any) -> None:
        state[item[0]] = saved
        if item[0] == 1:
            raise MemoryError

    switches: Switches[list[int]] = Switches(
        lambda item: "before", lambda item, saved: state.update({item[0]: "switched"}), restore
    )
    with pytest.raises(MemoryError), switches.switched([[0], [1], [2]]):
        pass
    assert set(state.values()) == {"before"} and not switches.held
