"""Blocks of draft tokens, which are computed behind a sequence's last token and kept as far as they
are accepted."""

from __future__ import annotations

from ...cache.block_manager import BlockManager
from ...cache.sequence_blocks import NO_BLOCKS
from ..request import Sequence


def append_draft(blocks: BlockManager, sequence: Sequence, limit: int) -> int:
    """Appends a sequence's last token and up to `limit` tokens of its draft to its blocks; returns
    the number of draft tokens. If blocks are short, drops the draft and returns 0: drafts preempt
    no request."""
    table = sequence.blocks
    del sequence.draft[max(0, limit) :]
    count = len(sequence.draft)
    if count:
        blocks.register(
            table,
            sequence.keys,
            sequence.num_computed_tokens,
            sequence.request.namespace,
        )
        before = NO_BLOCKS
        if blocks.has_states:
            before = blocks.fork(table)
        if blocks.append(table, 1 + count):
            sequence.before_draft = before
            return count
        blocks.free(before)
    sequence.draft = []
    return 0


def settle_draft(blocks: BlockManager, sequence: Sequence, num_accepted: int = 0) -> None:
    """Drops the K and V of a draft except for its first `num_accepted` tokens. A state cannot be
    truncated: with states, unless all tokens were accepted, restores the state from before the
    step, whose tokens are then recomputed."""
    if not sequence.draft:
        return
    before, sequence.before_draft = sequence.before_draft, NO_BLOCKS
    if before is NO_BLOCKS or num_accepted == len(sequence.draft):
        sequence.num_computed_tokens += num_accepted
        blocks.truncate(sequence.blocks, sequence.num_computed_tokens)
    else:
        before, sequence.blocks = sequence.blocks, before
        sequence.num_computed_tokens = sequence.blocks.tables[0].num_tokens
    blocks.free(before)
    sequence.draft = []
