"""Objects that calls switch for their duration."""

from __future__ import annotations

import sys

import pytest

from hf_paged.switches import Switches


def test_any_number_of_items_is_switched_back() -> None:
    state: dict[int, str] = {}
    switches: Switches[list[int]] = Switches(
        lambda item: (
            lambda: state.update({item[0]: "switched"}),
            lambda: state.update({item[0]: "before"}),
        )
    )
    items = [[number] for number in range(2 * sys.getrecursionlimit())]
    with switches.switched(items):
        assert set(state.values()) == {"switched"}
    assert set(state.values()) == {"before"} and not switches.entries


def test_all_others_are_switched_back_if_one_raises() -> None:
    state: dict[int, str] = {}

    def restore(item: list[int]) -> None:
        state[item[0]] = "before"
        if item[0] == 1:
            raise MemoryError

    switches: Switches[list[int]] = Switches(
        lambda item: (lambda: state.update({item[0]: "switched"}), lambda: restore(item))
    )
    with pytest.raises(MemoryError), switches.switched([[0], [1], [2]]):
        pass
    assert set(state.values()) == {"before"} and not switches.entries
