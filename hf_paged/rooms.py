"""The rooms beside the core: features in folders of their own, each imported when a call first
needs it. The core imports no room by name; whether a call needs one is the caller's question."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Part = TypeVar("Part")

ROOMS = (
    "adapters",
    "grammar",
    "native",
    "ranks",
    "ray",
    "speculation",
    "tape",
    "tiers",
    "tools",
    "virtual",
)


class RoomMissingError(ImportError):
    """A call asks for a feature whose room this installation lacks."""


@functools.cache
def is_installed(name: str) -> bool:
    """Whether the room with this name (`ROOMS`) is there."""
    return importlib.util.find_spec(f"{__package__}.{name}") is not None


@functools.cache
def room(name: str, option: str) -> Any:
    """Imports the room with this name (`ROOMS`), which `option`, as its users write it, needs, and
    returns its module, whose type is a protocol of `hf_paged.seams`. Raises [`RoomMissingError`] if
    the room is not there."""
    require(name, option)
    return importlib.import_module(f"{__package__}.{name}")


def require(name: str, option: str) -> None:
    """Raises [`RoomMissingError`] if the room with this name, which `option` needs, is not
    there."""
    assert name in ROOMS
    if not is_installed(name):
        raise RoomMissingError(
            f"{option} needs `{__package__}.{name}`, which this installation of hf_paged lacks:"
            " install all of hf_paged, or leave the option out",
            name=f"{__package__}.{name}",
        )


def optional(name: str) -> Any | None:
    """Returns the module of the room with this name, `None` if the room is not there."""
    return room(name, "") if is_installed(name) else None


class OnDemand(Generic[Part]):
    """A part that few calls need: made when it is first asked for; `made` is `None` before. Without
    `make` no call needs it."""

    def __init__(self, make: Callable[[], Part] | None = None) -> None:
        self._make = make
        self.made: Part | None = None

    def __call__(self) -> Part:
        if self.made is None:
            assert self._make is not None
            self.made = self._make()
        return self.made
