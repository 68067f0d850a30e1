"""The seams of the core: the protocols that features implement, and `EngineParts`, which gives an
engine what implements them. No code of a feature stands here."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. A field that is `None` stands for the part that its config asks
    for."""


DEFAULT_PARTS = EngineParts()
