"""How the blocks of a whole request come and go. Plain Python: no tensors, no order among requests."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ...cache.block_manager import NO_BLOCKS, BlockManager
from ...cache.block_pool import OutOfBlocksError
from ..request import Request, Sequence


class Swapper(Protocol):
    """
    Moves a request's blocks to host memory and back. `sequence.swapped` tells what a sequence has there; it may move to
    another sequence of the request, be shared by several, or be set to `None` for a sequence that is gone.
    """

    def swap_out(self, request: Request) -> bool:
        """Takes the blocks off the request's tables, which keep their counts; `False`, with nothing changed, if not."""

    def num_blocks(self, request: Request) -> int:
        """Blocks that `swap_in` takes, over all groups."""

    def swap_in(self, request: Request) -> None:
        """Fills the tables again. Raises `OutOfBlocksError` with nothing changed."""

    def discard(self, request: Request) -> None:
        """Forgets what is on the host."""


class Preemption:
    """
    Takes and gives back blocks for all sequences of a request together, so that what they share stays shared.

    Args:
        blocks ([`BlockManager`]): Where blocks come from.
        preempt (`str` or `Callable[[Request], str]`): `"recompute"` or `"swap"`, or what chooses between them.
        swapper ([`Swapper`], *optional*): Without one, everything is recomputed.
        vouch (`Callable[[], bool]`, *optional*): Whether blocks may be served whose sequences began before this window
            (`BlockManager.needs_vouching`); if not, it has dropped them.
        chunks (`bool`): Whether a sequence may be computed in chunks, and so begin with what another one computed.
    """

    def __init__(
        self,
        blocks: BlockManager,
        preempt: str | Callable[[Request], str] = "recompute",
        swapper: Swapper | None = None,
        vouch: Callable[[], bool] | None = None,
        chunks: bool = True,
    ) -> None:
        self._chunks = chunks
        self.blocks, self._preempt, self._swapper, self._vouch = blocks, preempt, swapper, vouch

    # -- in and out -----------------------------------------------------------------------------------------------

    def check_fits(self, request: Request) -> None:
        """Raises `OutOfBlocksError` if the request could not finish even if it had all blocks for itself."""
        size, rows = self.blocks.block_size, request.num_rows
        # rows that are recomputed share all full blocks short of a prompt's last token
        shared = (request.num_prompt_tokens - 1) // size * size if rows > 1 and self._chunks else 0
        # the last token of all is never computed
        longest = max(1, request.max_num_tokens - 1, *(len(sequence.token_ids) for sequence in request.sequences))
        common = self.blocks.num_spanned(0, shared, 1)
        own = self.blocks.num_spanned(shared, longest, 1)
        needs = [together + rows * alone for together, alone in zip(common, own)]
        needed, total = sum(needs), self.blocks.num_total
        for group, group_needs in zip(self.blocks.groups, needs):
            if not group.can_grow and group_needs > group.pool.num_blocks:
                needed, total = group_needs, group.pool.num_blocks
        if needed > total:
            raise OutOfBlocksError(
                f"request {request.request_id!r} needs {needed} blocks of {size} tokens, at most {total} can be had: "
                "raise `num_blocks`, or lower `max_new_tokens`, the prompt length or the number of sequences"
            )

    def bring_in(self, request: Request, chunk: int, reserve: int, is_alone: bool) -> bool:
        """
        Swaps a waiting request in, or lets its rows begin with what the prefix cache has of them, if there is room for
        all that it has to compute.

        Args:
            chunk (`int`): Most tokens that are computed at a time.
            reserve (`int`): Blocks that must be left then.
            is_alone (`bool`): No other request runs: what does not fit now never will, unless it is recomputed.
        """
        manager = self.blocks
        if request.is_swapped:
            if self._swap_in(request, reserve, is_alone):
                return True
            if not is_alone:
                return False
            self.forget_swapped(request)
        if reserve >= manager.num_free:
            return False
        needs = [0] * len(manager.groups)
        for sequence, first in self._attach(request):
            more = manager.num_spanned(first, sequence.num_tokens, chunk, sequence.blocks)
            needs = [sum(pair) for pair in zip(needs, more)]
        if manager.has_room(needs, reserve):
            if not self._may_be_served(request):
                self.forget(request)
                return self.bring_in(request, chunk, reserve, is_alone)
            if not request.num_preemptions and request.sequences[0].num_tokens == request.num_prompt_tokens:
                request.num_hit_tokens = sum(sequence.num_computed_tokens for sequence in request.sequences)
            return True
        self.forget(request)
        return False

    def _may_be_served(self, request: Request) -> bool:
        """Whether what the prefix cache gave the rows is of the model of now."""
        if self._vouch is None or not any(map(self.blocks.needs_vouching, (s.blocks for s in request.sequences))):
            return True
        try:
            return self._vouch()
        except BaseException:
            self.forget(request)
            raise

    def _swap_in(self, request: Request, reserve: int, is_alone: bool) -> bool:
        assert self._swapper is not None
        manager = self.blocks
        # beside others, every row must be able to go on
        growth = [0 if is_alone else request.num_open_rows] * len(manager.groups)
        if self._swapper.num_blocks(request) + sum(growth) + reserve > manager.num_free:
            return False
        manager.flush_copies()  # the targets of queued copies may be handed out again
        try:
            self._swapper.swap_in(request)
        except OutOfBlocksError:
            return False
        if manager.has_room(growth):
            return True
        self.send_out(request)
        return False

    def _attach(self, request: Request) -> list[tuple[Sequence, int]]:
        """
        Gives rows what the prefix cache has of them. Returns for each open row the tokens that it starts with.

        If a request of several rows is recomputed, they must share again what they shared before. If the cache does
        not have all of that, the first row computes it and the others fork from there (`num_shared_tokens`).
        """
        manager, rows, size = self.blocks, request.open_sequences, self.blocks.block_size
        for sequence in rows:
            sequence.blocks = manager.new()
            hit = manager.match(sequence.blocks, sequence.token_ids, request.namespace)
            sequence.num_computed_tokens = hit
        can_share = len(rows) > 1 and self._chunks
        shared = _num_common([sequence.token_ids for sequence in rows]) // size * size if can_share else 0
        if all(sequence.num_computed_tokens >= shared for sequence in rows):
            return [(sequence, sequence.num_computed_tokens) for sequence in rows]
        self.forget(request)
        first, request.num_shared_tokens = rows[0], shared
        first.blocks = manager.new()
        first.num_computed_tokens = manager.match(first.blocks, first.token_ids[: shared + 1], request.namespace)
        return [(first, first.num_computed_tokens), *((sequence, shared) for sequence in rows[1:])]

    def num_until_shared(self, request: Request, sequence: Sequence) -> int:
        """Tokens that `sequence` may compute before the rows of its request part, which they do here."""
        rows, shared = request.open_sequences, request.num_shared_tokens
        if sequence is not rows[0]:
            return 0
        if sequence.num_computed_tokens < shared:
            return shared - sequence.num_computed_tokens
        for other in rows[1:]:
            other.blocks, other.num_computed_tokens = self.blocks.fork(sequence.blocks), shared
        request.num_shared_tokens = 0
        return sequence.num_to_compute

    def send_out(self, request: Request) -> None:
        """Takes the blocks of a preempted request: to the host, or for good, but for what the prefix cache keeps."""
        self.register(request)
        if not self._swap_out(request):
            self.forget(request)

    def _swap_out(self, request: Request) -> bool:
        rows = request.open_sequences
        if self._swapper is None or any(sequence.blocks is NO_BLOCKS for sequence in rows):
            return False
        how = self._preempt if isinstance(self._preempt, str) else self._preempt(request)
        if how not in ("recompute", "swap"):
            raise ValueError(f"preemption by {how!r}: it must be 'recompute' or 'swap'")
        if how == "recompute":
            return False
        self.blocks.flush_copies()
        if not self._swapper.swap_out(request):
            return False
        for sequence in rows:
            sequence.blocks.capacity = 0  # what comes back is looked at before it is written to
        return True

    def register(self, request: Request) -> None:
        """Names all full blocks of a request, which must have been computed."""
        for sequence in request.sequences:
            self.blocks.register(sequence.blocks, sequence.token_ids, sequence.num_computed_tokens, request.namespace)

    def forget(self, request: Request) -> None:
        """Gives all blocks back; nothing counts as computed any more."""
        for sequence in request.sequences:
            self.forget_sequence(sequence)
        request.num_shared_tokens = 0

    def forget_sequence(self, sequence: Sequence) -> None:
        """Gives the blocks of one sequence back."""
        self.blocks.free(sequence.blocks)
        sequence.blocks, sequence.num_computed_tokens = NO_BLOCKS, 0

    def end_sequence(self, sequence: Sequence) -> None:
        """Gives the blocks of one sequence back, on the host or here; the prefix cache keeps the full ones."""
        if sequence.swapped is None:
            namespace = sequence.request.namespace
            self.blocks.register(sequence.blocks, sequence.token_ids, sequence.num_computed_tokens, namespace)
        sequence.swapped = None
        self.forget_sequence(sequence)

    def forget_swapped(self, request: Request) -> None:
        """Gives up what is on the host, if anything is: the request is recomputed."""
        if request.is_swapped:
            assert self._swapper is not None
            self._swapper.discard(request)
            for sequence in request.sequences:
                sequence.swapped = None
            self.forget(request)


def _num_common(rows: list[list[int]]) -> int:
    """Tokens that all rows begin with, short of the last of the shortest."""
    common = min(map(len, rows)) - 1
    for row in rows[1:]:
        common = next((place for place in range(common) if row[place] != rows[0][place]), common)
    return common
