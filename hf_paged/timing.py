"""Measures the seconds that a call spends on work that later calls reuse: checks of models, builds
of kernels, recordings of steps."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextvars import ContextVar

from .interrupts import restoring, setting

setup_seconds: ContextVar[dict[str, float] | None] = ContextVar(
    "hf_paged_setup_seconds", default=None
)
"""The seconds of each part of this work, to which `timed` adds; `None`: `timed` measures
nothing."""


@restoring
def timed(part: str) -> Iterator[None]:
    """A context that adds its duration, without the duration of other parts within it, to the
    seconds of `part`."""
    seconds = setup_seconds.get()
    if seconds is None:
        yield
        return
    # several threads may share `seconds`, but `inner_seconds` counts only parts within this part
    start = time.perf_counter()
    inner_seconds = dict[str, float]()
    try:
        with setting(setup_seconds, inner_seconds):
            yield
    finally:
        duration = time.perf_counter() - start - sum(inner_seconds.values())
        inner_seconds[part] = inner_seconds.get(part, 0.0) + duration
        for name, value in inner_seconds.items():
            seconds[name] = seconds.get(name, 0.0) + value
