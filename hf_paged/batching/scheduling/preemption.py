"""Allocates, swaps and frees the blocks of whole requests, which the scheduler chooses. In mode
"auto", a cost model chooses between swap and recompute. Plain Python: no tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, ClassVar

from ...cache.block_manager import BlockManager
from ...cache.block_pool import OutOfBlocksError
from ...cache.sequence_blocks import NO_BLOCKS
from ...config import PREEMPTION
from ..request import Request, Sequence

if TYPE_CHECKING:  # not imported at run time: it uses tensors
    from ...cache.swap import BlockSwapper


class CostModel:
    """Chooses between recompute and swap (PagedAttention, arXiv 2309.06180, section 7.3) from
    average seconds per token and bytes per second. The weight of an observation halves every
    `HALF_LIFE` observations. Seconds per token include a step's fixed cost."""

    HALF_LIFE = 32

    def __init__(self, bytes_per_second: float = 10e9) -> None:
        """`bytes_per_second`: speed of copies between the pool and host memory, assumed until a
        swap is observed."""
        self._assumed_bytes_per_second = bytes_per_second
        self._prefills = 0.0, 0.0  # weighted sums of tokens and of seconds
        self._swaps = 0.0, 0.0  # weighted sums of bytes and of seconds

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefills = self._decayed(self._prefills, num_tokens, seconds)

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        self._swaps = self._decayed(self._swaps, num_bytes, seconds)

    def _decayed(
        self,
        sums: tuple[float, float],
        amount: int,
        seconds: float,
    ) -> tuple[float, float]:
        decay = 0.5 ** (1 / self.HALF_LIFE)
        total, total_seconds = sums
        return decay * total + amount, decay * total_seconds + seconds

    @property
    def seconds_per_token(self) -> float:
        """Seconds per prefill token; 0 before the first observation."""
        tokens, seconds = self._prefills
        return seconds / tokens if tokens else 0.0

    @property
    def bytes_per_second(self) -> float:
        num_bytes, seconds = self._swaps
        return num_bytes / seconds if seconds > 0 else self._assumed_bytes_per_second

    def choose(self, num_tokens: int, num_bytes: int) -> str:
        """Returns `"swap"` if copying `num_bytes` out and back is estimated to take less time than
        computing `num_tokens` tokens, otherwise `"recompute"`."""
        swap_seconds = 2 * num_bytes / self.bytes_per_second
        if swap_seconds < num_tokens * self.seconds_per_token:
            return "swap"
        return "recompute"


@dataclass(eq=False)
class Preemption:
    """Allocates, swaps and frees the blocks of all sequences of a request together, so that shared
    blocks stay shared."""

    blocks: BlockManager
    mode: str = "recompute"  # or "swap", or "auto", in which `cost_model` chooses
    swapper: BlockSwapper | None = None  # `None`: every preempted request is recomputed
    # returns whether blocks cached before the current step or call (`Epochs.begin_span`) are still
    # valid; drops them if not. Called before a request uses these blocks, or blocks of the tier
    verify: Callable[[], bool] | None = None
    # whether a sequence may be computed in chunks; if not, its prefill is split only at its stops
    # (`SequenceBlocks.stops`)
    can_chunk: ClassVar[bool] = True
    # chooses in mode "auto"; learns from times of prefills and, in this mode, of swaps
    cost_model: CostModel = field(default_factory=CostModel)
    # returns the first process's value: processes must schedule alike, but measure different times
    agree: Callable[[int], int] = int
    num_preemptions: int = 0
    num_swaps: int = 0  # how often a request was swapped out
    # hashes of the prefixes at whose ends the prefills of running requests will stop; the
    # scheduler clears the set before each step
    awaited_prefixes: set[int] = field(default_factory=set)
    min_saved: int = 0  # minimum length of a cached prefix that is used, in tokens

    def note_waiting(self, request: Request) -> None:
        """Called when a request begins to wait."""

    def note_removed(self, request: Request) -> None:
        """Called when a request no longer waits."""

    def forget_waiting(self) -> None:
        """Called when no request waits any longer."""

    def announce_stops(self, request: Request, stops: list[int]) -> None:
        """Called when a step computes tokens of a request whose prefill will stop after each of
        these numbers of tokens."""

    def awaits_prefix(self, request: Request) -> bool:
        """Whether this waiting request can begin at a stop that a running request will reach, in
        this step or a later one. Called only if there are `awaited_prefixes`."""
        return False

    def num_other_blocks(self, request: Request) -> int:
        """Returns how many blocks the request needs besides its sequences' blocks: those that hold
        encoder outputs."""
        return 0

    def take_other_blocks(self, request: Request) -> bool:
        """Allocates the request's other blocks; returns `False` if too few are free."""
        return True

    def free_other_blocks(self, request: Request) -> None:
        """Frees the request's other blocks."""

    def check_fits(self, request: Request) -> None:
        """Raises `OutOfBlocksError` if the request could not finish even alone in the memory."""
        num_needed = self.num_needed_blocks(request)
        total = self.blocks.num_total
        if num_needed > total:
            raise OutOfBlocksError(
                f"request {request.request_id!r} needs {num_needed} blocks of"
                f" {self.blocks.size_text} tokens, but at most {total} are available: raise"
                " `num_blocks`, `memory_fraction` or `hf_paged.budget`, or lower `max_new_tokens`,"
                " the prompt length or the number of sequences"
            )

    def num_needed_blocks(self, request: Request) -> int:
        """Returns the minimum number of blocks with which the request can finish alone in the
        memory. Layers with windows need the fewest blocks in chunks of one token."""
        size = self.blocks.block_size
        num_rows = request.num_rows
        num_shared_tokens = 0
        if num_rows > 1 and self.shares_prompt(request):
            num_shared_tokens = (request.num_prompt_tokens - 1) // size * size
        max_tokens = max(1, request.max_num_tokens - 1)  # the last token is not computed
        for sequence in request.sequences:
            max_tokens = max(max_tokens, len(sequence.token_ids))
        num_common = sum(self.blocks.num_spanned(0, num_shared_tokens, 1))
        num_separate = sum(self.blocks.num_spanned(num_shared_tokens, max_tokens, 1))
        return num_common + num_rows * num_separate + self.num_other_blocks(request)

    def admit(
        self,
        request: Request,
        max_chunk_tokens: int,
        num_reserved_blocks: int,
        is_alone: bool,
    ) -> bool:
        """Swaps a waiting request in, or attaches its rows to their cached blocks. Returns whether
        enough blocks are free besides `num_reserved_blocks`: for the swap-in, or for all tokens
        that the request has to compute, in chunks of at most `max_chunk_tokens`. `is_alone`: no
        other request runs. A request that cannot be swapped in is then recomputed, since no more
        blocks will become free. After an exception the request's tables may be partly changed."""
        manager = self.blocks
        if request.is_swapped:
            if self._swap_in(request, num_reserved_blocks, is_alone):
                return True
            if not is_alone:
                return False
            self.reset(request)
        # new variables, since a retry needs the original arguments
        num_reserved = num_reserved_blocks + self.num_other_blocks(request)
        max_tokens = max_chunk_tokens
        if num_reserved >= manager.num_free:
            return False
        needs = [0] * len(manager.groups)
        num_prompt_tokens = request.num_prompt_tokens
        for sequence, num_cached in self._attach(request):
            num_tokens = sequence.num_tokens
            is_prompt = num_tokens == num_prompt_tokens
            # a prompt computed as a whole skips blocks that no later token attends to
            skips_blocks = not num_cached and request.inputs is not None and is_prompt
            if num_cached and sequence.computes_whole_prompt:
                max_tokens = num_prompt_tokens
            chunk = 1 if skips_blocks else max_tokens
            row_needs = manager.num_spanned(num_cached, num_tokens, chunk, sequence.blocks)
            needs = [sum(counts) for counts in zip(needs, row_needs)]
        if not manager.can_take(needs, num_reserved):
            self.reset(request)
            return False
        is_restorable = self.is_restorable(request)
        may_be_outdated = is_restorable or any(
            sequence.blocks.needs_verification for sequence in request.sequences
        )
        if may_be_outdated and self.verify is not None and not self.verify():
            self.reset(request)
            # retry without the outdated blocks, which `verify` has dropped
            return self.admit(request, max_chunk_tokens, num_reserved_blocks, is_alone)
        if is_restorable:
            self._restore(request)
        if not self.take_other_blocks(request):
            self.reset(request)
            return False
        return True

    def _swap_in(self, request: Request, num_reserved_blocks: int, is_alone: bool) -> bool:
        assert self.swapper is not None
        manager = self.blocks
        # while other requests run, one more block of each group must be free for every row
        num_growing = 0 if is_alone else request.num_open_rows
        growth = [num_growing] * len(manager.groups)
        num_needed = self.swapper.num_blocks(request) + sum(growth)
        if num_needed + num_reserved_blocks > manager.num_free:
            return False
        # first, since a swap-in may write to blocks that queued copies still have to read or write
        manager.flush_copies()
        if not self.swapper.swap_in(request):
            return False
        if manager.can_take(growth):
            return True
        self.swap_out_or_reset(request)
        return False

    def _attach(self, request: Request) -> list[tuple[Sequence, int]]:
        """Attaches open rows to their cached blocks; returns each row with its number of cached
        tokens. After a preemption, several rows may have a common prefix (`num_shared_tokens`) that
        is not fully cached. The first row then computes the prefix for all rows
        (`Request.advance_shared_prefix`), and it counts as cached for the other rows."""
        rows = request.open_sequences
        for sequence in rows:
            self.match(sequence, sequence.keys)
        num_shared_tokens = 0
        if len(rows) > 1:
            num_shared_tokens = self.num_shared_tokens(request, rows)
        rows_and_counts = [(sequence, sequence.num_computed_tokens) for sequence in rows]
        if all(num_computed >= num_shared_tokens for _, num_computed in rows_and_counts):
            return rows_and_counts
        self.reset(request)
        first_row, *other_rows = rows
        request.num_shared_tokens = num_shared_tokens
        self.match(first_row, first_row.keys[: num_shared_tokens + 1])
        rows_and_counts = [(first_row, first_row.num_computed_tokens)]
        rows_and_counts += [(sequence, num_shared_tokens) for sequence in other_rows]
        return rows_and_counts

    def shares_prompt(self, request: Request) -> bool:
        """Whether even recomputed rows share all full blocks before the prompt's last token."""
        return True

    def num_shared_tokens(self, request: Request, rows: list[Sequence]) -> int:
        """Returns the length, in tokens, of the rows' common prefix. If a prompt has inputs besides
        token ids, this is the prompt's length if all rows are longer, otherwise 0. Without such
        inputs, it is the number of tokens in the leading full blocks that are equal in all rows."""
        if request.inputs is not None:
            num_tokens = request.num_prompt_tokens
            return num_tokens if min(row.num_tokens for row in rows) > num_tokens else 0
        tokens = [sequence.token_ids for sequence in rows]
        divergence = min(map(len, tokens)) - 1  # every row computes its last token
        for position, column in enumerate(zip(*tokens)):
            if len(set(column)) > 1:
                divergence = min(position, divergence)
                break
        size = self.blocks.block_size
        return divergence // size * size

    def is_restorable(self, request: Request) -> bool:
        """Whether the request has a single row, with a longer cached prefix in the tier than in the
        pool."""
        rows = request.open_sequences
        tier = self.blocks.tier
        if tier is None or len(rows) > 1:
            return False
        (sequence,) = rows
        return tier.num_restorable_tokens(sequence) > sequence.num_computed_tokens

    def _restore(self, request: Request) -> None:
        """Restores the prefix of the only row from the tier to the pool, if possible, and attaches
        the row to it."""
        (sequence,) = request.open_sequences
        tier = self.blocks.tier
        assert tier is not None
        if tier.restore(sequence):
            sequence.blocks.free()
            self.match(sequence, sequence.keys)

    def match(self, sequence: Sequence, keys: list[Hashable]) -> None:
        """Attaches a row to the longest cached prefix of `keys` that includes all of the prompt's
        media and has at least `min_saved` tokens. If there is none, attaches it to the longest
        cached prefix that ends before the media, if any."""
        request = sequence.request
        sequence.begin(self.blocks)
        if request.drafts_first_token:
            # the last prompt token has a separate step, before which a step must compute a token
            keys = keys[:-1]
        min_tokens = max(request.media_end, self.min_saved)
        if not sequence.match(keys, min_tokens) and request.media_start:
            sequence.match(keys[: request.media_start + 1])

    def limit_tokens(self, request: Request, sequence: Sequence, count: int) -> int:
        """Returns how many of `count` tokens (at least two) a sequence of the request may compute
        in a step, regardless of the step's token budget."""
        num_computed = sequence.num_computed_tokens
        # tokens after a whole prompt wait for the next step
        if sequence.computes_whole_prompt:
            count = min(count, max(1, request.num_prompt_tokens - num_computed))
        # Under a limit in bytes, blocks that leave a window serve only layers with the same window,
        # so a request that did not fit even alone advances block by block.
        can_free_between_chunks = self.can_chunk and self.blocks.has_windows
        if can_free_between_chunks and request.num_tokens_alone >= 0:
            count = min(count, self.blocks.block_size)
        # if the first new token is drafted, the last prompt token has a separate step
        if request.drafts_first_token and count == sequence.num_to_compute:
            return count - 1
        return count

    def can_swap(self, request: Request) -> bool:
        """Whether the request may be swapped out."""
        rows = request.open_sequences
        return self.swapper is not None and all(row.blocks is not NO_BLOCKS for row in rows)

    def swap_out_or_reset(self, request: Request) -> None:
        """Drops the drafts of a preempted request, and swaps out its blocks or frees them. The
        prefix cache may keep full blocks. Blocks computed before the model changed are swapped out
        if possible, in every `mode`."""
        for sequence in request.sequences:
            sequence.commit_draft()
            sequence.register_last()
        rows = request.open_sequences
        if self.can_swap(request):
            assert self.swapper is not None
            mode = self.mode
            num_bytes = 0
            if any(sequence.blocks.is_outdated for sequence in rows):
                # a recompute would use the changed model
                mode = "swap"
            elif mode == "auto":
                num_bytes = self.swapper.num_held_bytes(request)
                num_tokens = sum(sequence.num_computed_tokens for sequence in rows)
                # blocks shared with other requests stay in the pool, where a recompute would find
                # them; a swap-in would need new blocks
                num_rows = len(rows)
                is_shared = any(row.blocks.num_shared_blocks(num_rows) for row in rows)
                choice = "recompute"
                if not is_shared:
                    choice = self.cost_model.choose(num_tokens, num_bytes)
                index = self.agree(PREEMPTION.index(choice))
                mode = PREEMPTION[index]
            if mode == "swap":
                start = time.perf_counter()
                if self.swapper.swap_out(request):
                    self.num_swaps += 1
                    if num_bytes:
                        seconds = time.perf_counter() - start
                        self.cost_model.observe_swap(num_bytes, seconds)
                    for sequence in rows:
                        # keeps the first decode after the swap-in off the scheduler's fast path
                        sequence.blocks.capacity = 0
                    return
        self.reset(request)

    def reset(self, request: Request) -> None:
        """Frees all blocks of a request, in the pool and on the host, so that it is recomputed.
        Reasons: a preemption without a swap; an admission that lacks blocks, finds cached blocks
        outdated, or has the first row compute a shared prefix; new rotary factors or weights
        (`weights_update`); a failed step that admitted the request, may have advanced its states,
        or left bookkeeping half changed (`StepLoop.recover`); the end of a row whose swapped blocks
        a returned cache needs."""
        request.reset()
        self.free_other_blocks(request)
