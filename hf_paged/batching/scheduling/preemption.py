"""Allocates, swaps and frees the blocks of whole requests, with a cost model that chooses between
swap and recompute. Plain Python: no tensors; the scheduler chooses the requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ...cache.block_manager import BlockManager
from ...cache.block_pool import OutOfBlocksError
from ...cache.sequence_blocks import NO_BLOCKS, UNCACHED
from ...config import PREEMPTION
from ..request import Request, Sequence
from .waiting_prompts import WaitingPrompts

if TYPE_CHECKING:  # not imported at run time: it uses tensors
    from ...cache.swap import BlockSwapper


logger = logging.getLogger(__name__)


class CostModel:
    """Chooses between recompute and swap (PagedAttention, arXiv 2309.06180, section 7.3). Seconds
    per token and bytes per second are means in which the weight of an observation halves every
    `HALF_LIFE` observations; seconds per token include a step's fixed cost."""

    HALF_LIFE = 32

    def __init__(self, bytes_per_second: float = 10e9) -> None:
        # between pool and host memory, until a swap is observed
        self._assumed_speed = bytes_per_second
        self._prefills = self._swaps = 0.0, 0.0  # (tokens, seconds) and (bytes, seconds)

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
    def seconds_per_token(self) -> float | None:
        """Seconds per prefill token; `None` before any was observed."""
        tokens, seconds = self._prefills
        if not tokens:
            return None
        return seconds / tokens

    @property
    def bytes_per_second(self) -> float:
        num_bytes, seconds = self._swaps
        if seconds > 0:
            return num_bytes / seconds
        return self._assumed_speed

    def choose(self, num_tokens: int, num_bytes: int) -> str:
        """Returns `"swap"` if copying `num_bytes` out and back takes less time than computing
        `num_tokens` tokens, else `"recompute"`."""
        per_token = self.seconds_per_token or 0.0
        seconds = 2 * num_bytes / self.bytes_per_second
        if seconds < num_tokens * per_token:
            return "swap"
        return "recompute"


# In rectangles, the tokens after a cache hit or a snapshot need a separate forward, which takes
# about as long as `FORWARD_TOKENS` tokens: a hit must save at least that many, and so must a
# snapshot where other prompts diverged. The snapshot at the end of a prompt may never be reused: it
# must be `SNAPSHOT_TOKENS` past the previous one. Where waiting prompts diverge, both the first
# one, which stops there, and the others, which begin there, need such a forward.
FORWARD_TOKENS, SNAPSHOT_TOKENS = 32, 256


@dataclass(eq=False)
class Preemption:
    """Allocates and frees the blocks of all sequences of a request together, so that shared blocks
    stay shared."""

    blocks: BlockManager
    mode: str = "recompute"  # or "swap", or "auto": as `cost` chooses
    swapper: BlockSwapper | None = None  # without one, everything is recomputed
    # returns whether cached blocks from before this span are still valid
    # (`Epochs.needs_verification`); if not, it has dropped them
    verify: Callable[[], bool] | None = None
    # whether a sequence may be computed in chunks; if not, as a whole and then token by token
    chunks: bool = True
    replays: bool = False  # without chunks: whether `replays_prompt` holds for all requests
    # for a model with an encoder: the blocks of its output
    encoder_blocks: BlockManager | None = None
    cost: CostModel | None = None  # learns from the times of prefills and swaps
    # returns the first process's value, for processes that must schedule alike but measure
    # different times
    agree: Callable[[int], int] = int
    num_swaps: int = 0  # requests swapped out
    # the requests of the scheduler's queue that may share a prefill
    waiting: WaitingPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.forget_waiting()

    def forget_waiting(self) -> None:
        self.waiting = WaitingPrompts(self.blocks.block_size)

    def replays_prompt(self, request: Request) -> bool:
        """Whether recomputation runs the prompt as a whole again, then token by token."""
        if self.chunks:
            return False
        return self.replays or request.inputs is not None

    def may_stop(self, request: Request) -> bool:
        """Whether its first prefill may stop where other requests can begin. If sequences are
        computed in chunks, others can begin anywhere, since each layer stores all K and V of a step
        before attention."""
        if not self.blocks.prefix_caching or request.namespace is UNCACHED:
            return False
        if self.chunks or request.num_preemptions:
            return False
        return not self.replays_prompt(request)

    def check_fits(self, request: Request) -> None:
        """Raises `OutOfBlocksError` if the request could not finish even if it had the memory to
        itself."""
        needed = self.num_needed(request)
        total = self.blocks.num_total
        if needed > total:
            raise OutOfBlocksError(
                f"request {request.request_id!r} needs {needed} blocks of {self.blocks.size_text}"
                f" tokens, at most {total} are available: raise `num_blocks`, `memory_fraction` or"
                " `hf_paged.budget`, or lower `max_new_tokens`, the prompt length or the number of"
                " sequences"
            )

    def num_needed(self, request: Request) -> int:
        """Returns the most blocks that the request holds at once."""
        needs = self._needs(request)
        return sum(needs) + self._num_encoder_blocks(request)

    def _needs(self, request: Request) -> list[int]:
        """Returns the most blocks of each group that the request holds at once."""
        size = self.blocks.block_size
        rows = request.num_rows
        # recomputed rows share all full blocks before the prompt's last token
        shared = 0
        if rows > 1 and (self.chunks or self.replays_prompt(request)):
            shared = (request.num_prompt_tokens - 1) // size * size
        longest = max(1, request.max_num_tokens - 1)
        for sequence in request.sequences:
            longest = max(longest, len(sequence.token_ids))
        common = self.blocks.num_spanned(0, shared, 1)
        unshared = self.blocks.num_spanned(shared, longest, 1)
        pairs = zip(common, unshared)
        return [together + rows * alone for together, alone in pairs]

    def admit(
        self,
        request: Request,
        chunk: int,
        reserve: int,
        is_alone: bool,
    ) -> bool:
        """Swaps a waiting request in, or attaches its rows to their cached blocks, if the pool has
        room for all tokens that it has to compute, at most `chunk` at a time, with `reserve` blocks
        left; returns whether it did. While no other request runs (`is_alone`), a request that
        cannot be swapped in is recomputed: there will never be more room. If this raises, the
        request's tables may be half changed."""
        manager = self.blocks
        if request.is_swapped:
            if self._swap_in(request, reserve, is_alone):
                return True
            if not is_alone:
                return False
            self.reset(request)
        # new names, since a retry needs the arguments
        reserved = reserve + self._num_encoder_blocks(request)
        longest = chunk
        if reserved >= manager.num_free:
            return False
        needs = [0] * len(manager.groups)
        num_prompt_tokens = request.num_prompt_tokens
        for sequence, first in self._attach(request):
            num_tokens = sequence.num_tokens
            is_prompt = num_tokens == num_prompt_tokens
            skips = not first and request.inputs is not None and is_prompt
            if first and sequence.computes_whole_prompt:
                longest = num_prompt_tokens
            step = 1 if skips else longest
            more = manager.num_spanned(first, num_tokens, step, sequence.blocks)
            needs = [sum(pair) for pair in zip(needs, more)]
        if not manager.can_take(needs, reserved):
            self.reset(request)
            return False
        is_restorable = self._is_restorable(request)
        may_be_outdated = is_restorable or any(
            manager.epochs.needs_verification(sequence.blocks) for sequence in request.sequences
        )
        if may_be_outdated and self.verify is not None and not self.verify():
            self.reset(request)
            # `verify` has dropped the old blocks: retry without them
            return self.admit(request, chunk, reserve, is_alone)
        if is_restorable:
            self._restore(request)
        if request.num_encoder_tokens and not self._take_encoder_blocks(request):
            self.reset(request)
            return False
        num_tokens = request.sequences[0].num_tokens
        if not request.num_preemptions and num_tokens == num_prompt_tokens:
            computed = (sequence.num_computed_tokens for sequence in request.sequences)
            request.num_hit_tokens = sum(computed)
        return True

    def _take_encoder_blocks(self, request: Request) -> bool:
        assert self.encoder_blocks is not None
        request.encoded = self.encoder_blocks.new()
        return self.encoder_blocks.append(request.encoded, request.num_encoder_tokens)

    def _num_encoder_blocks(self, request: Request) -> int:
        if self.encoder_blocks is None:
            return 0
        return -(-request.num_encoder_tokens // self.encoder_blocks.block_size)

    def _swap_in(self, request: Request, reserve: int, is_alone: bool) -> bool:
        assert self.swapper is not None
        manager = self.blocks
        # beside other requests, every row must have room for one more block
        num_growing = 0 if is_alone else request.num_open_rows
        growth = [num_growing] * len(manager.groups)
        num_needed = self.swapper.num_blocks(request) + sum(growth)
        if num_needed + reserve > manager.num_free:
            return False
        manager.flush_copies()  # the targets of queued copies may be allocated again
        if not self.swapper.swap_in(request):
            return False
        if manager.can_take(growth):
            return True
        self.swap_out_or_free(request)
        return False

    def _attach(self, request: Request) -> list[tuple[Sequence, int]]:
        """Attaches open rows to their cached blocks; returns each row with its number of cached or
        shared tokens. All rows share their common prefix (with `replays`, the prompt) again: if it
        is not cached, the first row computes it (`num_until_shared`)."""
        manager = self.blocks
        size = manager.block_size
        rows = request.open_sequences
        num_prompt_tokens = request.num_prompt_tokens
        for sequence in rows:
            self._match(sequence, sequence.keys)
        # tokens in full blocks common to all rows, excluding the last token of the shortest
        shared = 0
        if len(rows) > 1:
            if self.replays_prompt(request):
                shared = num_prompt_tokens
            elif request.inputs is not None:
                shortest = min(row.num_tokens for row in rows)
                if shortest > num_prompt_tokens:
                    shared = num_prompt_tokens
            elif self.chunks:
                tokens = [sequence.token_ids for sequence in rows]
                divergence = min(map(len, tokens)) - 1
                for position, column in enumerate(zip(*tokens)):
                    if len(set(column)) > 1:
                        divergence = min(position, divergence)
                        break
                shared = divergence // size * size
        attached = [(sequence, sequence.num_computed_tokens) for sequence in rows]
        if all(num_computed >= shared for _, num_computed in attached):
            return attached
        self.reset(request)
        first, *others = rows
        request.num_shared_tokens = shared
        self._match(first, first.keys[: shared + 1])
        attached = [(first, first.num_computed_tokens)]
        attached += [(sequence, shared) for sequence in others]
        return attached

    def _is_restorable(self, request: Request) -> bool:
        """Whether the request has one row, and the tier below the pool holds a longer prefix of it
        than the pool."""
        rows = request.open_sequences
        tier = self.blocks.tier
        if tier is None or len(rows) > 1:
            return False
        if self.replays_prompt(request):
            return False
        (sequence,) = rows
        return tier.reach(self.blocks, sequence) > sequence.num_computed_tokens

    def _restore(self, request: Request) -> None:
        """Copies the tier's prefix into newly allocated blocks of the row, as a swap-in does."""
        (sequence,) = request.open_sequences
        tier = self.blocks.tier
        assert tier is not None
        if tier.restore(self.blocks, sequence):
            self.blocks.free(sequence.blocks)
            self._match(sequence, sequence.keys)

    def _match(self, sequence: Sequence, keys: list[Hashable]) -> None:
        """Attaches a row to the longest cached prefix of `keys`, and sets its stops."""
        request = sequence.request
        sequence.blocks = self.blocks.new()
        sequence.num_computed_tokens = 0
        if self.replays_prompt(request):
            return
        if request.drafts_first_token:  # leaves a token for the step before that of the last token
            keys = keys[:-1]
        min_saved = 0 if self.chunks else FORWARD_TOKENS
        min_matched = max(request.num_content, min_saved)
        namespace = request.namespace
        num_matched = self.blocks.match(sequence.blocks, keys, namespace, min_matched)
        if not num_matched and request.num_text:
            text_keys = keys[: request.num_text + 1]
            num_matched = self.blocks.match(sequence.blocks, text_keys, namespace)
        sequence.num_computed_tokens = num_matched
        sequence.blocks.stops = self._stops(sequence)

    def _stops(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the positions where its prefill stops, so that others can begin there: where
        waiting prompts diverge from this one and, for snapshots of states, where earlier prompts
        diverged (as SGLang does for hybrid models) and after its last full block."""
        request = sequence.request
        size = self.blocks.block_size
        num_computed = sequence.num_computed_tokens
        if not self.may_stop(request):
            return ()
        min_saved: dict[int, int] = {}  # by stop, the number of tokens that it must save
        if self.blocks.keeps_states:
            last = (sequence.num_tokens - 1) // size * size
            min_saved[last] = SNAPSHOT_TOKENS
        divergences = self.waiting.divergences(request)
        min_saved |= dict.fromkeys(divergences, 2 * FORWARD_TOKENS)
        if self.blocks.keeps_states:
            num_indexed = self.blocks.num_matching(sequence.keys, request.namespace)
            min_saved[num_indexed] = FORWARD_TOKENS
        stops: list[int] = []
        for stop, num_tokens in sorted(min_saved.items()):
            previous = max(num_computed, *stops, 0)
            if stop - previous >= num_tokens:
                stops.append(stop)
        return tuple(stops)

    def num_until_shared(self, request: Request, sequence: Sequence) -> int:
        """Returns how many tokens `sequence` may compute before the rows of its request diverge;
        once the first row has computed the shared ones, forks its blocks for the others."""
        rows = request.open_sequences
        shared = request.num_shared_tokens
        if sequence is not rows[0]:
            return 0
        if sequence.num_computed_tokens < shared:
            return shared - sequence.num_computed_tokens
        for other in rows[1:]:
            other.blocks, other.num_computed_tokens = self.blocks.fork(sequence.blocks), shared
        request.num_shared_tokens = 0
        return sequence.num_to_compute

    def limit(self, request: Request, sequence: Sequence, count: int) -> int:
        """Returns how many of `count` tokens (more than one) a sequence of the request may compute
        in a step, apart from the step's budget."""
        num_computed = sequence.num_computed_tokens
        # a prompt that is computed as a whole ends its step
        if sequence.computes_whole_prompt or self.replays_prompt(request):
            count = min(count, max(1, request.num_prompt_tokens - num_computed))
        # other requests may begin where a prefill stops
        for stop in sequence.blocks.stops:
            if stop > num_computed:
                count = min(count, stop - num_computed)
        # Under a limit in bytes, blocks that leave a window can be reused only by layers of that
        # window: a request that did not fit alone advances block by block.
        is_windowed = self.chunks and self.blocks.has_windows
        if is_windowed and request.num_tokens_alone >= 0:
            count = min(count, self.blocks.block_size)
        # the last prompt token has a step of its own if the first new token is drafted
        if request.drafts_first_token and count == sequence.num_to_compute:
            return count - 1
        return count

    def swap_out_or_free(self, request: Request) -> None:
        """Swaps out the blocks of a preempted request, or frees them; the prefix cache may keep
        full blocks. Blocks from before a change of the model are swapped out if possible."""
        for sequence in request.sequences:
            self._register(sequence)
        rows = request.open_sequences
        # the content of its blocks is not enough for a request that replays its prompt
        can_swap = not self.replays_prompt(request) and all(
            sequence.blocks is not NO_BLOCKS for sequence in rows
        )
        if self.swapper is not None and can_swap:
            mode = self.mode
            num_bytes = 0
            if any(self.blocks.epochs.is_outdated(sequence.blocks) for sequence in rows):
                # recomputed tokens would get keys and values of the changed model
                mode = "swap"
            elif self.cost is not None:
                num_bytes = self.swapper.num_held_bytes(request)
                num_tokens = sum(sequence.num_computed_tokens for sequence in rows)
                # blocks shared with others stay in the pool and are matched again; swapped copies
                # would need new blocks
                num_rows = len(rows)
                is_shared = any(self.blocks.num_shared(row.blocks, num_rows) for row in rows)
                choice = "recompute"
                if not is_shared:
                    choice = self.cost.choose(num_tokens, num_bytes)
                index = self.agree(PREEMPTION.index(choice))
                mode = PREEMPTION[index]
            if mode == "swap":
                start = time.perf_counter()
                if self.swapper.swap_out(request):
                    self.num_swaps += 1
                    if self.cost is not None and num_bytes:
                        seconds = time.perf_counter() - start
                        self.cost.observe_swap(num_bytes, seconds)
                    for sequence in rows:
                        # the first append after the swap-in must take the slow path
                        sequence.blocks.capacity = 0
                    return
        self.reset(request)

    def reset(self, request: Request) -> None:
        """Frees all blocks of a request, in the pool and on the host, and resets its computed
        tokens: it is recomputed. Reasons: a preemption that does not swap; a swapped request that
        does not fit while alone; other rotary factors or weights (`weights_update`); a failed step
        with states, or split bookkeeping (`StepLoop.recover`)."""
        for sequence in request.sequences:
            self._free(sequence)
        self._free_encoder_blocks(request)
        request.num_shared_tokens = 0

    def end_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its blocks, in the pool and on the host; the prefix cache keeps
        full blocks."""
        if sequence.swapped is None:
            self._register(sequence)
        sequence.is_finished = True
        self.blocks.end(sequence.blocks)
        self._free(sequence)
        if not sequence.request.open_sequences:
            self._free_encoder_blocks(sequence.request)

    def _register(self, sequence: Sequence) -> None:
        sequence.blocks.stops = ()  # no later step copies the state
        self.blocks.register(
            sequence.blocks,
            sequence.keys,
            sequence.num_computed_tokens,
            sequence.request.namespace,
        )

    def _free_encoder_blocks(self, request: Request) -> None:
        if self.encoder_blocks is not None:
            self.encoder_blocks.free(request.encoded)
        request.encoded = NO_BLOCKS

    def _free(self, sequence: Sequence) -> None:
        for blocks in (sequence.blocks, sequence.before_draft):
            self.blocks.free(blocks)
        sequence.blocks = sequence.before_draft = NO_BLOCKS
        sequence.num_computed_tokens, sequence.swapped = 0, None
