"""Reads weak sets to which other threads may add members meanwhile."""

from __future__ import annotations

import weakref
from typing import Any, TypeVar

T = TypeVar("T")


def members_of(weak_set: weakref.WeakSet[T]) -> list[T]:
    """Returns the live members. Iterating a `WeakSet` raises `RuntimeError` if another thread adds
    a member meanwhile; copying the set of references is a single C call."""
    any_set: Any = weak_set
    references: set[weakref.ref[T]] = any_set.data.copy()
    members = (reference() for reference in references)
    return [member for member in members if member is not None]
