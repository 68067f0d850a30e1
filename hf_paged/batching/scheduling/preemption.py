"""Allocates, swaps and frees the blocks of whole requests, with a cost model. Plain Python: no tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...cache.block_manager import NO_BLOCKS, UNCACHED, BlockManager
from ...cache.block_pool import OutOfBlocksError
from ...config import PREEMPTION
from ..request import Request, Sequence

if TYPE_CHECKING:  # not imported at run time: it uses tensors
    from ...cache.swap import BlockSwapper


logger = logging.getLogger(__name__)


class CostModel:
    """Chooses between recompute and swap (PagedAttention, arXiv 2309.06180, section 7.3). Seconds per token and bytes
    per second are means in which the weight of an observation halves every `HALF_LIFE` observations; seconds per token
    include a step's fixed cost."""

    HALF_LIFE = 32

    def __init__(self, bytes_per_second: float = 10e9) -> None:
        self._given_speed = bytes_per_second  # between pool and host memory; an estimate until a swap is observed
        self._prefills = self._swaps = 0.0, 0.0  # (tokens, seconds) and (bytes, seconds)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        self._prefills = self._with(self._prefills, num_tokens, seconds)

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        self._swaps = self._with(self._swaps, num_bytes, seconds)

    def _with(self, sums: tuple[float, float], amount: int, seconds: float) -> tuple[float, float]:
        keep = 0.5 ** (1 / self.HALF_LIFE)
        return keep * sums[0] + amount, keep * sums[1] + seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Seconds per prefill token; `None` before any was observed."""
        tokens, seconds = self._prefills
        return seconds / tokens if tokens else None

    @property
    def bytes_per_second(self) -> float:
        num_bytes, seconds = self._swaps
        return num_bytes / seconds if seconds > 0 else self._given_speed

    def choose(self, num_tokens: int, num_bytes: int) -> str:
        """`"swap"` if copying `num_bytes` out and back takes less time than `num_tokens` tokens, else `"recompute"`."""
        per_token = self.seconds_per_token or 0.0
        return "swap" if 2 * num_bytes / self.bytes_per_second < num_tokens * per_token else "recompute"


# In rectangles, the tokens behind a cache hit or a snapshot need a separate forward, which takes about as long as
# `FORWARD_TOKENS` tokens: a hit must save at least that many, and so must a snapshot where other prompts diverged. The
# snapshot at the end of a prompt may never be reused: it must be `SNAPSHOT_TOKENS` past the previous one.
FORWARD_TOKENS, SNAPSHOT_TOKENS = 32, 256


@dataclass(eq=False)
class Preemption:
    """Allocates and frees the blocks of all sequences of a request together, so that shared blocks stay shared."""

    blocks: BlockManager
    preempt: str = "recompute"  # or "swap", or "auto": as `cost` chooses
    swapper: BlockSwapper | None = None  # without one, everything is recomputed
    # returns whether cached blocks from before this window are still valid (`BlockManager.needs_vouching`); if not, it
    # has dropped them
    vouch: Callable[[], bool] | None = None
    chunks: bool = True  # whether a sequence may be computed in chunks; else as a whole, then token by token
    replays: bool = False  # without chunks: whether `replays_prompt` holds for all requests
    encoder_blocks: BlockManager | None = None  # for a model with an encoder: the blocks of its output
    cost: CostModel | None = None  # learns from times of prefills and swaps
    # for processes that must schedule alike but measure different times: returns the first process's value
    agree: Callable[[int], int] = int
    num_swaps: int = 0  # requests swapped out
    _told: set[type] = field(default_factory=set, init=False)  # errors of tiers that a warning has named

    def replays_prompt(self, request: Request) -> bool:
        """Whether recomputation runs the prompt as a whole again, and then token by token."""
        return not self.chunks and (self.replays or request.inputs is not None)

    def check_fits(self, request: Request, num_lent: int = 0) -> None:
        """Raises `OutOfBlocksError` if the request could not finish even with all blocks, `num_lent` included."""
        size, rows = self.blocks.block_size, request.num_rows
        # recomputed rows share all full blocks before the prompt's last token
        shares = rows > 1 and (self.chunks or self.replays_prompt(request))
        shared = (request.num_prompt_tokens - 1) // size * size if shares else 0
        longest = max(1, request.max_num_tokens - 1, *(len(sequence.token_ids) for sequence in request.sequences))
        common = self.blocks.num_spanned(0, shared, 1)
        own = self.blocks.num_spanned(shared, longest, 1)
        needs = [together + rows * alone for together, alone in zip(common, own)]
        needed, total = sum(needs) + self._num_encoder_blocks(request), self.blocks.num_total + num_lent
        for group, group_needs in zip(self.blocks.groups, needs):
            if not group.can_grow and group_needs > group.pool.num_blocks:
                needed, total = group_needs, group.pool.num_blocks
        if needed > total:
            raise OutOfBlocksError(
                f"request {request.request_id!r} needs {needed} blocks of {self.blocks.size_text} tokens, at most "
                f"{total} can be had: "
                "raise `num_blocks`, `memory_fraction` or `hf_paged.budget`, or lower `max_new_tokens`, the prompt "
                "length or the number of sequences"
            )

    def bring_in(self, request: Request, chunk: int, reserve: int, is_alone: bool) -> bool:
        """Swaps a waiting request in, or gives its rows their cached blocks, if there is room for all that it has to
        compute, at most `chunk` tokens at a time, with `reserve` blocks left; returns whether it did. While no other
        request runs (`is_alone`), a request that cannot be swapped in is recomputed: there will never be more room."""
        manager = self.blocks
        if request.is_swapped:
            if self._swap_in(request, reserve, is_alone):
                return True
            if not is_alone:
                return False
            self.forget(request)
        reserve += self._num_encoder_blocks(request)
        if reserve >= manager.num_free:
            return False
        needs = [0] * len(manager.groups)
        for sequence, first in self._attach(request):
            skips = not first and request.inputs is not None and sequence.num_tokens == request.num_prompt_tokens
            more = manager.num_spanned(first, sequence.num_tokens, 1 if skips else chunk, sequence.blocks)
            needs = [sum(pair) for pair in zip(needs, more)]
        has_room = manager.has_room(needs, reserve)
        try:
            is_restorable = has_room and self._is_restorable(request)
            may_be_old = has_room and any(manager.needs_vouching(sequence.blocks) for sequence in request.sequences)
            may_be_old |= is_restorable
            is_served = has_room and (not may_be_old or self.vouch is None or self.vouch())
        except BaseException:
            self.forget(request)
            raise
        if not is_served:
            self.forget(request)
            # `vouch` has dropped the old blocks: try again without them
            return has_room and self.bring_in(request, chunk, reserve, is_alone)
        if is_restorable:
            self._restore(request)
        if request.num_encoder_tokens:
            assert self.encoder_blocks is not None
            request.encoded = self.encoder_blocks.new()
            if not self.encoder_blocks.append(request.encoded, request.num_encoder_tokens):
                self.forget(request)
                return False
        if not request.num_preemptions and request.sequences[0].num_tokens == request.num_prompt_tokens:
            request.num_hit_tokens = sum(sequence.num_computed_tokens for sequence in request.sequences)
        return True

    def _num_encoder_blocks(self, request: Request) -> int:
        return 0 if self.encoder_blocks is None else -(-request.num_encoder_tokens // self.encoder_blocks.block_size)

    def _swap_in(self, request: Request, reserve: int, is_alone: bool) -> bool:
        assert self.swapper is not None
        manager = self.blocks
        # beside other requests, every row must have room for one more block
        growth = [0 if is_alone else request.num_open_rows] * len(manager.groups)
        if self.swapper.num_blocks(request) + sum(growth) + reserve > manager.num_free:
            return False
        manager.flush_copies()  # the targets of queued copies may be handed out again
        try:
            self.swapper.swap_in(request)
        except OutOfBlocksError:
            return False
        if manager.has_room(growth):
            return True
        self.send_out(request)
        return False

    def _attach(self, request: Request) -> list[tuple[Sequence, int]]:
        """Gives open rows their cached blocks; returns each row with its number of cached or shared tokens. The common
        beginning of all rows (with `replays`, the prompt) is shared again: if it is not cached, the first row computes
        it (`num_until_shared`)."""
        manager, rows, size = self.blocks, request.open_sequences, self.blocks.block_size
        for sequence in rows:
            sequence.blocks = manager.new()
            sequence.num_computed_tokens = self._match(sequence, sequence.keys)
            if not request.num_preemptions:
                sequence.blocks.stops = self._stops(sequence)
        shared = 0  # tokens in full blocks common to all rows, excluding the last token of the shortest
        if len(rows) > 1 and self.replays_prompt(request):
            shared = request.num_prompt_tokens
        elif len(rows) > 1 and request.inputs is not None:
            shared = request.num_prompt_tokens if min(row.num_tokens for row in rows) > request.num_prompt_tokens else 0
        elif len(rows) > 1 and self.chunks:
            tokens = [sequence.token_ids for sequence in rows]
            last = min(map(len, tokens)) - 1
            parting = next((place for place, column in enumerate(zip(*tokens)) if len(set(column)) > 1), last)
            shared = min(parting, last) // size * size
        if all(sequence.num_computed_tokens >= shared for sequence in rows):
            return [(sequence, sequence.num_computed_tokens) for sequence in rows]
        self.forget(request)
        first, request.num_shared_tokens = rows[0], shared
        first.blocks = manager.new()
        first.num_computed_tokens = self._match(first, first.keys[: shared + 1])
        return [(first, first.num_computed_tokens), *((sequence, shared) for sequence in rows[1:])]

    def _is_restorable(self, request: Request) -> bool:
        """Whether the request has one row, and the tier below the pool holds a longer prefix of it than the pool."""
        if self.blocks.tier is None or len(request.open_sequences) > 1 or self.replays_prompt(request):
            return False
        (sequence,) = request.open_sequences
        links = self.blocks.restorable(sequence.keys, request.namespace)
        return self.blocks.num_tokens(links) > sequence.num_computed_tokens

    def _restore(self, request: Request) -> None:
        """Copies that prefix from the tier into newly allocated blocks of the row, as after a swap."""
        (sequence,) = request.open_sequences
        try:
            found = self.blocks.restore(sequence.keys, request.namespace, sequence.num_computed_tokens)
        except OutOfBlocksError:  # under `hf_paged.budget`: it is computed instead, when there is room
            return
        except (MemoryError, RuntimeError, ValueError) as error:  # no memory, or other layers: it is computed instead
            if type(error) not in self._told:
                self._told.add(type(error))
                logger.warning("prefix blocks are not brought back, and their tokens are computed: %r", error)
            return
        if found:
            stops = sequence.blocks.stops
            self.blocks.free(sequence.blocks)
            sequence.blocks = self.blocks.new()
            sequence.num_computed_tokens = self._match(sequence, sequence.keys)
            sequence.blocks.stops = stops

    def _match(self, sequence: Sequence, keys: list[Hashable]) -> int:
        request = sequence.request
        if self.replays_prompt(request):
            return 0
        if request.drafts_first:  # leaves a token for the step before the last token's
            keys = keys[:-1]
        least = max(request.num_content, 0 if self.chunks else FORWARD_TOKENS)
        return self.blocks.match(sequence.blocks, keys, request.namespace, least)

    def _stops(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the positions for snapshots of its states: where other prompts diverged from this one, so that later
        prompts can reuse the common part (as SGLang does for hybrid models), and after its last full block."""
        request, size, stops = sequence.request, self.blocks.block_size, []
        if not self.blocks.keeps_states or request.namespace is UNCACHED or self.replays_prompt(request):
            return ()
        known = self.blocks.num_known(sequence.keys, request.namespace)
        if known - sequence.num_computed_tokens >= FORWARD_TOKENS:
            stops.append(known)
        last = (sequence.num_tokens - 1) // size * size
        if last - max(sequence.num_computed_tokens, *stops, 0) >= SNAPSHOT_TOKENS:
            stops.append(last)
        return tuple(stops)

    def num_until_shared(self, request: Request, sequence: Sequence) -> int:
        """Returns how many tokens `sequence` may compute before the rows of its request diverge; once the first row
        has computed the shared ones, forks its blocks for the others."""
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
        """Swaps out the blocks of a preempted request, or frees them; the prefix cache may keep full blocks."""
        for sequence in request.sequences:
            self._register(sequence)
        rows = request.open_sequences
        # a request that replays its prompt needs more than the content of its blocks
        can_swap = not self.replays_prompt(request) and all(sequence.blocks is not NO_BLOCKS for sequence in rows)
        if self.swapper is not None and can_swap:
            how, num_bytes = self.preempt, 0
            if self.cost is not None:
                num_bytes = self.swapper.num_held_bytes(request)
                num_tokens = sum(sequence.num_computed_tokens for sequence in rows)
                # blocks shared with others stay in the pool and are found again; swapped copies would need new blocks
                is_shared = any(self.blocks.num_shared(sequence.blocks, len(rows)) for sequence in rows)
                choice = "recompute" if is_shared else self.cost.choose(num_tokens, num_bytes)
                how = PREEMPTION[self.agree(PREEMPTION.index(choice))]
            if how == "swap":
                self.blocks.flush_copies()
                start = time.perf_counter()
                if self.swapper.swap_out(request):
                    self.num_swaps += 1
                    if self.cost is not None and num_bytes:
                        self.cost.observe_swap(num_bytes, time.perf_counter() - start)
                    for sequence in rows:
                        sequence.blocks.capacity = 0  # after swap-in the first write must take the slow path
                    return
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Frees all blocks of a request, in the pool and on the host, and resets its computed tokens."""
        for sequence in request.sequences:
            self._free(sequence)
        self._free_encoder_blocks(request)
        request.num_shared_tokens = 0

    def end_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its blocks, in the pool and on the host; the prefix cache keeps full blocks."""
        if sequence.swapped is None:
            self._register(sequence)
        sequence.is_finished = True
        self.blocks.end(sequence.blocks)
        self._free(sequence)
        if not sequence.request.open_sequences:
            self._free_encoder_blocks(sequence.request)

    def _register(self, sequence: Sequence) -> None:
        sequence.blocks.stops = ()  # no further step would copy the state
        self.blocks.register(sequence.blocks, sequence.keys, sequence.num_computed_tokens, sequence.request.namespace)

    def _free_encoder_blocks(self, request: Request) -> None:
        if self.encoder_blocks is not None:
            self.encoder_blocks.free(request.encoded)
        request.encoded = NO_BLOCKS

    def _free(self, sequence: Sequence) -> None:
        for blocks in (sequence.blocks, sequence.before_draft):
            self.blocks.free(blocks)
        sequence.blocks = sequence.before_draft = NO_BLOCKS
        sequence.num_computed_tokens, sequence.swapped = 0, None
