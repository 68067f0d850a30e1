"""The keys of recorded steps, which say which recorded step serves which step: sizes, rounded up to
few values, and options that must be equal. Leaves when a step is recorded to `graphs.py`."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, NamedTuple

from ..batching.execution.buckets import bucket, chunk_bucket, draft_bucket, power_of_two
from ..batching.execution.inputs import PackedTokens
from ..cache.group_memory import GroupMemory
from ..kernels.triton.cascade import SharedPrefix

# least capacity of block tables, so that short sequences need no new graph when they grow
MIN_TABLE_TOKENS = 1024
# the same where a forward computes with as many keys as the tables have room for
MIN_READ_TOKENS = 64
# Most tokens of chunks in a recorded step: with more, the GPU computes for longer than the host
# needs to launch (vLLM records up to 512 tokens). An estimate, not a measurement
MAX_CHUNK_TOKENS = 512
MIN_CHUNKS, MIN_PREFIXES = 4, 4

Prefixes = tuple[tuple[SharedPrefix, ...], ...]
"""The prefixes that a step's decodes share, by layer group; empty if the step shares nothing."""


class Key(NamedTuple):
    """Identifies a recorded graph: the capacity of its steps, and the options that they share."""

    num_decodes: int  # leading rows, of one token each
    widths: tuple[int, ...]  # columns of each layer group's block tables
    num_chunks: int = 0  # rows after the decodes, of any number of tokens
    num_chunk_tokens: int = 0  # in all chunks together
    # by group: prefixes shared by decodes, columns of their tables
    prefixes: tuple[tuple[int, int], ...] = ()
    num_ranges: int = 0  # token ranges with an adapter
    num_axes: int = 0  # of positions that the host gives; 0: positions count tokens
    variant: Hashable = None  # of the context
    # autocast dtype, training mode, batch invariance, whether hidden states are stored, torch's
    # options
    options: Hashable = None

    @property
    def num_rows(self) -> int:
        """All rows, including, with chunks, one for padding tokens."""
        if not self.num_chunks:
            return self.num_decodes
        return self.num_decodes + self.num_chunks + 1

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_chunk_tokens

    @property
    def capacities(self) -> tuple[int, ...]:
        """The sizes that a step may use in part."""
        return (self.num_decodes, self.num_chunks, self.num_chunk_tokens, *self.widths)

    def serves(self, other: Key) -> bool:
        """Whether this graph can run steps of key `other`: padded, but to at most twice their chunk
        tokens, and perhaps without their cascade over shared prefixes."""
        if self.options != other.options or not _covers(self.variant, other.variant):
            return False
        if self.num_axes != other.num_axes or bool(self.num_chunks) != bool(other.num_chunks):
            return False
        if self.num_chunk_tokens > 2 * other.num_chunk_tokens:
            return False
        if any(map(operator.lt, self.capacities, other.capacities)):
            return False
        if not self.prefixes:
            return True
        if not other.prefixes:
            return False
        return all(map(_fits, self.prefixes, other.prefixes))

    def padding(self) -> tuple[Any, ...]:
        """Sorts the graphs that serve a step, the best first."""
        return not self.prefixes, self.num_tokens, self.widths

    @property
    def without_widths(self) -> Hashable:
        """The key without table widths. Its uses are counted as well, so that when tables outgrow
        a graph the next is recorded at once."""
        return (
            self.num_decodes,
            self.num_chunks,
            self.num_chunk_tokens,
            bool(self.prefixes),
            self.num_axes,
            self.variant,
            self.options,
        )


def _covers(variant: Any, requested: Any) -> bool:
    """Whether a graph's variant equals a step's, or has adapters besides those of the step."""
    if isinstance(variant, frozenset) and isinstance(requested, frozenset):
        return variant >= requested
    return bool(variant == requested)


def _fits(capacity: tuple[int, int], needed: tuple[int, int]) -> bool:
    """Whether a graph has capacity for a group's shared prefixes. A graph with a cascade does not
    fit a group without prefixes: its launches would do nothing."""
    max_prefixes, max_width = capacity
    num_prefixes, width = needed
    if bool(max_prefixes) != bool(num_prefixes):
        return False
    return max_prefixes >= num_prefixes and max_width >= width


def key_of(
    tokens: PackedTokens,
    prefixes: Prefixes,
    memories: list[GroupMemory],
    num_ranges: int,
    variant: Hashable,
    options: Hashable,
    reads_keys: bool = False,
) -> Key:
    """The key of a step. Sizes are rounded up to few values, such as powers of two, so that few
    graphs serve many steps. `reads_keys`: whether the forward computes with as many keys as the
    tables have room for."""
    min_table_tokens = MIN_READ_TOKENS if reads_keys else MIN_TABLE_TOKENS
    widths = []
    shared = []
    for number, memory in enumerate(memories):
        min_width = -(-min_table_tokens // memory.block_size)
        longest = max(map(len, tokens.groups[number].tables))
        widths.append(power_of_two(min_width, longest))
        if not prefixes:
            continue
        capacity = (0, 0)
        group_prefixes = prefixes[number]
        if group_prefixes:
            most_blocks = max(prefix.num_blocks for prefix in group_prefixes)
            num_prefixes = power_of_two(MIN_PREFIXES, len(group_prefixes))
            capacity = (num_prefixes, power_of_two(min_width, most_blocks))
        shared.append(capacity)
    decodes = tokens.num_decodes
    num_chunk_tokens = len(tokens.token_ids) - decodes
    num_chunks = len(tokens.query_start) - 1 - decodes
    chunks = 0
    chunk_tokens = 0
    if num_chunk_tokens:
        chunks = power_of_two(MIN_CHUNKS, num_chunks)
        # more tokens than rows, so that the number of logits shows whether a forward ignores
        # `logits_to_keep`
        chunk_tokens = chunk_bucket(max(num_chunk_tokens, chunks + 1))
        num_ranges *= 2
        rows = power_of_two(1, decodes) if decodes else 0
    else:
        rows = draft_bucket(decodes) if tokens.has_drafts else bucket(decodes)
    return Key(
        rows,
        tuple(widths),
        chunks,
        chunk_tokens,
        tuple(shared),
        num_ranges,
        len(tokens.axes or ()),
        variant,
        options,
    )
