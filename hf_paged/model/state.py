"""Whether a model's prefixes can be cached, and the fingerprint that shows whether the model has
changed. The optional package `fingerprints` reads the model."""

from __future__ import annotations

import os
from typing import Any, Protocol

from torch import Tensor, nn

from ..rooms import FingerprintsRoom, room_if_installed
from ..topics import Topic
from .registry import warn_once
from .writes import notes_of


class ModelState(Protocol):
    """The state of a model that determines the results of its forward. The optional package
    `fingerprints` reads it, and then also records the modules and tensors for `is_in_place`."""

    undetectable: str | None
    """Message about a value that user code reads and whose changes cannot be detected; `None` if
    there is no such value."""

    tensors: list[Tensor]
    """The distinct tensors of the model whose content its forward reads."""

    overwritten: list[Tensor]
    """Tensors of the model whose content each forward overwrites in place and none reads."""

    def addresses(self) -> tuple[bytes, list[int]]:
        """Returns 32 bytes that depend on the whole state except for the tensors' content, and the
        addresses of `tensors` and of `overwritten`."""

    def read_values(self) -> tuple[Any, ...] | None:
        """Returns the values, other than tensors, that the forward's Python code reads, followed by
        items that identify them: two calls with equal items have read the same values. Returns
        `None` if the values cannot be read now."""

    def is_like(self, other: ModelState) -> bool:
        """Whether both states describe equal models."""

    def keep_memory(self) -> None:
        """Keeps the tensors' memory alive."""

    def mark_unchecked(self) -> None:
        """Called after code has run that may have changed the model."""

    def is_in_place(self) -> bool:
        """Whether the model still has the recorded modules and tensors, with the tensors at the
        same addresses. Reads the model at most once after each `mark_unchecked`."""

    def accept(self) -> None:
        """Records the model for `is_same`, except modules and tensors. Must be called before other
        code can run, and again after each forward, so that its writes do not count as changes."""

    def watch(self) -> None:
        """Records the tensors for `is_same`, so that it detects writes to them."""

    def is_same(self) -> bool:
        """Whether the model is as it was when this state was read, at the last `accept` and, if it
        was called, at the last `watch`. After `False`, the model may still be equal (`is_like`)."""


def carries_state(model: nn.Module) -> bool:
    """Whether forwards of the model read values that earlier forwards wrote into it, so a prefix's
    keys and values depend on those forwards. If so, logs a warning, once per model and reason."""
    name = notes_of(model).carried_attribute
    if name is None:
        return False
    warn_uncached(
        model,
        f"its forward reads `{name}`, which earlier forwards wrote, so the same tokens may get"
        " other keys and values",
    )
    return True


def warn_uncached(model: nn.Module, reason: object) -> None:
    """Warns, once per model and reason, that the model's prefixes are not cached. Reasons that
    differ only in numbers count as one."""
    message = Topic.PREFIX_CACHE(f"runs without prefix caching: {reason}")
    warn_once(model, message, distinguishes_numbers=False)


def fingerprint(model: nn.Module, state: ModelState | None = None) -> bytes | None:
    """Returns 32 bytes that change with the state of the model, the content of its tensors
    included; `None`, with a warning once per model and reason, if the model carries state or cannot
    be read. `state`: the model's state, if it has just been read. Without the optional package
    `fingerprints`, returns random bytes, which equal no other fingerprint: the prefix cache then
    serves blocks only within the call or engine step that computed them."""
    if carries_state(model):
        return None
    fingerprints: FingerprintsRoom | None = room_if_installed("fingerprints")
    return os.urandom(32) if fingerprints is None else fingerprints.fingerprint(model, state)
