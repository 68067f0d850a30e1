"""The keys of recorded steps, by which a step finds a graph to replay: sizes, rounded up to few
values, and options that must be equal. `graphs.py` decides when a step is recorded."""

from __future__ import annotations

import operator
from collections.abc import Hashable
from typing import Any, NamedTuple

from ..batching.execution.buckets import bucket, chunk_bucket, draft_bucket, power_of_two
from ..batching.execution.inputs import PackedTokens
from ..cache.group_memory import GroupMemory
from ..kernels.triton.cascade import SharedPrefix

# tables have columns for at least this many tokens per row, so that short sequences can grow
# without a new graph
MIN_TABLE_TOKENS = 1024
# the same with `reads_keys`: the forward then computes with a key for each of these tokens
MIN_TABLE_TOKENS_IF_READ = 64
# maximum number of chunk tokens in a recorded step: with more, the GPU computes for longer than the
# host needs to launch (an estimate, not measured; vLLM records up to 512 tokens)
MAX_CHUNK_TOKENS = 512
MIN_CHUNKS = 4  # minimum capacity of a graph with chunks, in chunks
MIN_PREFIXES = 4  # minimum capacity of a graph with shared prefixes, in prefixes per layer group

# maximum number of stored graphs: 27 for the sizes up to 256 decodes, the others for chunks, wider
# tables and adapters
MAX_GRAPHS = 64

Prefixes = tuple[tuple[SharedPrefix, ...], ...]
"""The prefixes that a step's decodes share, by layer group; empty if they share none."""


class GraphKey(NamedTuple):
    """Identifies a recorded graph by its capacity and the options of the steps that it serves."""

    num_decodes: int  # leading rows, of one token each
    widths: tuple[int, ...]  # columns of each layer group's block tables
    num_chunks: int = 0  # rows after the decodes, of any number of tokens
    num_chunk_tokens: int = 0  # in all chunks together
    # by layer group: number of prefixes that decodes share, columns of the prefixes' tables
    prefixes: tuple[tuple[int, int], ...] = ()
    num_ranges: int = 0  # token ranges of the context, each with its adapter
    num_axes: int = 0  # axes of the model's `position_ids`; 0 if positions count tokens
    variant: Hashable = None  # of the context
    # autocast dtype, training mode, batch invariance, kind of step, torch's options
    options: Hashable = None

    def without_unused_rows(self, num_decodes: int) -> GraphKey:
        """Returns the key of a graph that serves only steps of exactly this many decodes."""
        return self._replace(num_decodes=num_decodes, options=(self.options, num_decodes))

    @property
    def num_rows(self) -> int:
        """All rows. With chunks, these include one more row, for the padding tokens."""
        if not self.num_chunks:
            return self.num_decodes
        return self.num_decodes + self.num_chunks + 1

    @property
    def num_tokens(self) -> int:
        return self.num_decodes + self.num_chunk_tokens

    @property
    def capacities(self) -> tuple[int, ...]:
        """The graph's sizes. Each must be at least the corresponding size of every step that the
        graph serves."""
        return (self.num_decodes, self.num_chunks, self.num_chunk_tokens, *self.widths)

    def serves(self, step: GraphKey) -> bool:
        """Whether this graph can run steps of key `step`. It may pad a step's chunk tokens to up to
        twice as many. A graph without `prefixes` also serves steps whose decodes share prefixes,
        and computes these steps without a cascade."""
        if self.options != step.options or not _covers(self.variant, step.variant):
            return False
        if self.num_axes != step.num_axes or bool(self.num_chunks) != bool(step.num_chunks):
            return False
        if self.num_chunk_tokens > 2 * step.num_chunk_tokens:
            return False
        if any(map(operator.lt, self.capacities, step.capacities)):
            return False
        if not self.prefixes:
            return True
        if not step.prefixes:
            return False
        return all(map(_has_capacity, self.prefixes, step.prefixes))

    def waste(self) -> tuple[Any, ...]:
        """A sort key for the graphs that serve a step: the graph with the least key wastes the
        least work."""
        return not self.prefixes, self.num_tokens, self.widths

    @property
    def without_widths(self) -> Hashable:
        """A coarser key, without the widths of tables and the capacity for prefixes and ranges.
        Steps without a graph are also counted by this key, so that a step whose tables outgrow a
        graph is recorded at once."""
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
    """Whether a graph's variant equals the step's variant or, if both are sets of adapters,
    contains it."""
    if isinstance(variant, frozenset) and isinstance(requested, frozenset):
        return variant >= requested
    return bool(variant == requested)


def _has_capacity(capacity: tuple[int, int], required: tuple[int, int]) -> bool:
    """Whether a graph has capacity for a layer group's shared prefixes. A graph with a cascade for
    the group does not serve steps without prefixes there: its cascade launches would be wasted."""
    max_prefixes, max_width = capacity
    num_prefixes, width = required
    if bool(max_prefixes) != bool(num_prefixes):
        return False
    return max_prefixes >= num_prefixes and max_width >= width


def key_of(
    tokens: PackedTokens,
    prefixes: Prefixes,
    memories: list[GroupMemory],
    num_keys: int,
    variant: Hashable,
    options: Hashable,
    reads_keys: bool = False,
) -> GraphKey:
    """Returns the key of the smallest graph that serves a step. Sizes are rounded up to few values,
    such as powers of two, so that few graphs serve many steps. `memories`: by layer group.
    `num_keys` and `variant`: those of the step's `ForwardContext`; 0 and `None` without one.
    `reads_keys`: whether the forward computes attention with as many keys as the tables can hold
    tokens."""
    min_table_tokens = MIN_TABLE_TOKENS_IF_READ if reads_keys else MIN_TABLE_TOKENS
    widths = []
    prefix_capacities = []
    for group, memory in enumerate(memories):
        min_width = -(-min_table_tokens // memory.block_size)
        max_blocks = max(map(len, tokens.groups[group].tables))
        widths.append(power_of_two(min_width, max_blocks))
        if not prefixes:
            continue
        capacity = (0, 0)
        group_prefixes = prefixes[group]
        if group_prefixes:
            max_prefix_blocks = max(prefix.num_blocks for prefix in group_prefixes)
            max_prefixes = power_of_two(MIN_PREFIXES, len(group_prefixes))
            capacity = (max_prefixes, power_of_two(min_width, max_prefix_blocks))
        prefix_capacities.append(capacity)
    num_decodes = tokens.num_decodes
    num_chunk_tokens = len(tokens.token_ids) - num_decodes
    num_chunks = len(tokens.query_start) - 1 - num_decodes
    max_chunks = 0
    max_chunk_tokens = 0
    num_ranges = num_keys
    if num_chunk_tokens:
        max_chunks = power_of_two(MIN_CHUNKS, num_chunks)
        # more chunk tokens than chunks, so that the number of logits shows whether a forward
        # ignores `logits_to_keep`
        max_chunk_tokens = chunk_bucket(max(num_chunk_tokens, max_chunks + 1))
        num_ranges *= 2  # for each key of the context: one of decodes, one of chunks
        max_decodes = power_of_two(1, num_decodes) if num_decodes else 0
    else:
        max_decodes = draft_bucket(num_decodes) if tokens.has_drafts else bucket(num_decodes)
    return GraphKey(
        max_decodes,
        tuple(widths),
        max_chunks,
        max_chunk_tokens,
        tuple(prefix_capacities),
        num_ranges,
        len(tokens.axes or ()),
        variant,
        options,
    )


def limit_below(key: GraphKey) -> tuple[str, int]:
    """Returns the limit on later recordings after a recording of this key has failed: the limited
    quantity ("decodes" or "chunk tokens"), and the largest number of decodes or chunk tokens for
    which a smaller graph is recorded (0 if there is no smaller graph)."""
    if key.num_chunks:
        quantity, size = "chunk tokens", key.num_chunk_tokens
        smaller_sizes = [count for count in range(1, size) if chunk_bucket(count) < size]
    else:
        quantity, size = "decodes", key.num_decodes
        smaller_sizes = [count for count in range(1, size) if bucket(count) < size]
    return quantity, max(smaller_sizes, default=0)
