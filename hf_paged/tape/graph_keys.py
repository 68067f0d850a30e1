"""Which recorded step serves which step: sizes, rounded up to few values, and what else must be
equal."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, NamedTuple

from ..batching.execution.buckets import bucket, chunk_bucket, draft_bucket, power_of_two
from ..batching.execution.inputs import PackedTokens
from ..cache.group_memory import GroupMemory
from ..kernels.triton.cascade import SharedPrefix

# least capacity of block tables: short sequences need no new graph when they grow
MIN_TABLE_TOKENS = 1024
# Most tokens of chunks in a recorded step. With more, the GPU computes for longer than the host
# takes to launch (vLLM records up to 512 tokens): an estimate, not a measurement
MAX_CHUNK_TOKENS = 512
MIN_CHUNKS, MIN_PREFIXES = 4, 4

Prefixes = tuple[tuple[SharedPrefix, ...], ...]
"""The prefixes that a step's decodes share, by layer group; empty if the step shares nothing."""


class Key(NamedTuple):
    """Identifies a recorded graph: the capacity of its steps, and what is the same in all of
    them."""

    decodes: int  # leading rows, of one token each
    widths: tuple[int, ...]  # columns of each layer group's block tables
    chunks: int = 0  # rows after the decodes, of any number of tokens
    chunk_tokens: int = 0  # in all chunks together
    # by group: prefixes shared by decodes, columns of their tables
    prefixes: tuple[tuple[int, int], ...] = ()
    ranges: int = 0  # token ranges with an adapter
    axes: int = 0  # of positions that the host gives; 0: positions count tokens
    variant: Hashable = None  # of the context
    # autocast dtype, training mode, batch invariance, whether hidden states are kept, options of
    # torch
    options: Hashable = None

    @property
    def rows(self) -> int:
        """All rows; with chunks one more, for padding tokens."""
        if not self.chunks:
            return self.decodes
        return self.decodes + self.chunks + 1

    @property
    def tokens(self) -> int:
        return self.decodes + self.chunk_tokens

    @property
    def rooms(self) -> tuple[int, ...]:
        """The numbers of which a step may use fewer."""
        return (self.decodes, self.chunks, self.chunk_tokens, *self.widths)

    def serves(self, other: Key) -> bool:
        """Whether steps of key `other` may run with this graph: padded, with at most twice their
        chunk tokens, or without a cascade over shared prefixes."""
        if self.options != other.options or not _covers(self.variant, other.variant):
            return False
        if self.axes != other.axes:
            return False
        if bool(self.chunks) != bool(other.chunks):
            return False
        if self.chunk_tokens > 2 * other.chunk_tokens:
            return False
        if any(map(operator.lt, self.rooms, other.rooms)):
            return False
        if not self.prefixes:
            return True
        if not other.prefixes:
            return False
        return all(map(_has_room, self.prefixes, other.prefixes))

    def padding(self) -> tuple[Any, ...]:
        """Least for the best of the graphs that serve a step."""
        return not self.prefixes, self.tokens, self.widths

    @property
    def use(self) -> Hashable:
        """The key without table widths, whose uses are counted as well: when tables outgrow a
        graph, the next is recorded at once."""
        return (
            self.decodes,
            self.chunks,
            self.chunk_tokens,
            bool(self.prefixes),
            self.axes,
            self.variant,
            self.options,
        )


def _covers(mine: Any, needed: Any) -> bool:
    """Whether the variants are equal, or differ only in what the needed step's context does not
    use."""
    if isinstance(mine, frozenset) and isinstance(needed, frozenset):
        return mine >= needed
    return bool(mine == needed)


def _has_room(mine: tuple[int, int], needed: tuple[int, int]) -> bool:
    """Whether a graph has room for a group's prefixes; not if the group has none, since launches
    would do nothing."""
    num_mine, width = mine
    num_needed, least = needed
    if bool(num_mine) != bool(num_needed):
        return False
    return num_mine >= num_needed and width >= least


def key_of(
    tokens: PackedTokens,
    prefixes: Prefixes,
    memories: list[GroupMemory],
    num_ranges: int,
    variant: Hashable,
    options: Hashable,
) -> Key:
    """The key of a step, with sizes rounded up to few values, such as powers of two, so that few
    graphs serve many steps."""
    widths = []
    shared = []
    for number, memory in enumerate(memories):
        least = -(-MIN_TABLE_TOKENS // memory.block_size)
        longest = max(map(len, tokens.groups[number].tables))
        widths.append(power_of_two(least, longest))
        if not prefixes:
            continue
        room = (0, 0)
        group_prefixes = prefixes[number]
        if group_prefixes:
            most_blocks = max(prefix.num_blocks for prefix in group_prefixes)
            num_prefixes = power_of_two(MIN_PREFIXES, len(group_prefixes))
            room = (num_prefixes, power_of_two(least, most_blocks))
        shared.append(room)
    decodes = tokens.num_decodes
    num_chunk_tokens = len(tokens.token_ids) - decodes
    num_chunks = len(tokens.query_start) - 1 - decodes
    chunks = 0
    chunk_tokens = 0
    if num_chunk_tokens:
        chunks = power_of_two(MIN_CHUNKS, num_chunks)
        # always more tokens than rows: the number of logits then tells whether a forward ignores
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
