"""Reads weak sets to which other threads may add members meanwhile."""

from __future__ import annotations

import weakref
from typing import TypeVar

T = TypeVar("T")


def members_of(weak_set: weakref.WeakSet[T]) -> list[T]:
    """Returns the live members. Iterating a `WeakSet` raises `RuntimeError` if another thread adds
    a member meanwhile; copying the set of references is a single C call."""
    references = weak_set.data.copy()  # type: ignore[attr-defined]
    members = (reference() for reference in references)
    return [member for member in members if member is not None]
