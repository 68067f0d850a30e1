"""Rotary factors that depend on a sequence's length, as far as they concern scheduling."""

from __future__ import annotations

from collections.abc import Hashable
from typing import NamedTuple, Protocol

from ...cache.sequence_blocks import UNCACHED
from ..request import Request


class Rope(Protocol):
    """Rotary factors that depend on the sequence's length (`model.rope.LengthRope`)."""

    restarts: bool  # whether a sequence is recomputed when its factors change

    def factors(self, length: int) -> int: ...


class RopeNamespace(NamedTuple):
    """The namespace of prefixes computed with other rotary factors than usual."""

    usual: Hashable  # the namespace with the usual factors
    factors: int


def update_factors(rope: Rope, request: Request) -> bool:
    """Updates the request's rotary factors and namespace; returns whether they changed. Prefixes
    with different factors are not shared."""
    length = request.num_prompt_tokens
    if rope.restarts:
        length = max(sequence.num_tokens for sequence in request.open_sequences)
    factors = rope.factors(length)
    if factors == request.rope_factors:
        return False
    namespace = request.namespace
    if isinstance(namespace, RopeNamespace):
        namespace = namespace.usual
    if namespace is not UNCACHED:
        namespace = RopeNamespace(namespace, factors)
    request.rope_factors = factors
    request.namespace = namespace
    return True
