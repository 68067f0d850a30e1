"""A hook for observers of attention in forwards that are not packed. Observers do not change the
result of attention."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar

from torch import Tensor

Observer = Callable[[tuple[int, int, int], Tensor | None, bool], None]
"""Called in every call of our attention function outside packed steps, with the numbers of rows,
queries and keys, the mask, and whether attention without a mask is causal."""

attention_observer: ContextVar[Observer | None] = ContextVar("attention_observer", default=None)
