"""Counts the seconds that a call spends on work that later calls reuse: checks of the model,
builds, recordings."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextvars import ContextVar

from .interrupts import restoring

counted: ContextVar[dict[str, float] | None] = ContextVar("hf_paged_setup_seconds", default=None)
"""Seconds by part, to which `timed` adds; `None`: nothing is counted."""


@restoring
def counting(seconds: dict[str, float]) -> Iterator[None]:
    """A context in which `timed` adds to `seconds`, by part."""
    token = counted.set(seconds)
    try:
        yield
    finally:
        counted.reset(token)


@restoring
def timed(part: str) -> Iterator[None]:
    """Adds the duration of the context, without that of parts within it, to the part's seconds."""
    seconds = counted.get()
    if seconds is None:
        yield
        return
    # `inner` is this thread's alone: several threads may share `seconds`
    start = time.perf_counter()
    inner = dict[str, float]()
    try:
        with counting(inner):
            yield
    finally:
        duration = time.perf_counter() - start - sum(inner.values())
        inner[part] = inner.get(part, 0.0) + duration
        for name, value in inner.items():
            seconds[name] = seconds.get(name, 0.0) + value
