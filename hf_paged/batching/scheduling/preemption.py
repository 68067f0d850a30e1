"""Allocates, swaps and frees the blocks of whole requests, which the scheduler chooses. In mode
"auto", a cost model chooses between swap and recompute. Plain Python: no tensors."""

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
    """Chooses between recompute and swap (PagedAttention, arXiv 2309.06180, section 7.3) from
    average seconds per token and bytes per second. The weight of an observation halves every
    `HALF_LIFE` observations. Seconds per token include a step's fixed cost."""

    HALF_LIFE = 32

    def __init__(self, bytes_per_second: float = 10e9) -> None:
        """`bytes_per_second`: speed of copies between the pool and host memory, assumed until a
        swap is observed."""
        self._assumed_bytes_per_second = bytes_per_second
        # weighted sums of (tokens, seconds) and of (bytes, seconds)
        self._prefills = self._swaps = 0.0, 0.0

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
        """Seconds per prefill token; `None` before the first observation."""
        tokens, seconds = self._prefills
        if not tokens:
            return None
        return seconds / tokens

    @property
    def bytes_per_second(self) -> float:
        num_bytes, seconds = self._swaps
        if seconds > 0:
            return num_bytes / seconds
        return self._assumed_bytes_per_second

    def choose(self, num_tokens: int, num_bytes: int) -> str:
        """Returns `"swap"` if copying `num_bytes` out and back is estimated to take less time than
        computing `num_tokens` tokens, otherwise `"recompute"`."""
        seconds_per_token = self.seconds_per_token or 0.0
        swap_seconds = 2 * num_bytes / self.bytes_per_second
        if swap_seconds < num_tokens * seconds_per_token:
            return "swap"
        return "recompute"


# In rectangles, the tokens after a cache hit or a stop need a separate forward, whose fixed cost is
# about that of `FORWARD_TOKENS` tokens. So a hit must save at least that many tokens, and so must a
# stop where earlier prompts diverged. A stop where waiting prompts diverge costs two such forwards:
# one for the prompt that stops there, and one for those that begin there. The snapshot at the end
# of a prompt may never be reused, so that stop must be at least `SNAPSHOT_TOKENS` tokens after the
# previous one.
FORWARD_TOKENS, SNAPSHOT_TOKENS = 32, 256


@dataclass(eq=False)
class Preemption:
    """Allocates, swaps and frees the blocks of all sequences of a request together, so that shared
    blocks stay shared."""

    blocks: BlockManager
    mode: str = "recompute"  # or "swap", or "auto", in which `cost_model` chooses
    swapper: BlockSwapper | None = None  # `None`: every preempted request is recomputed
    # returns whether blocks cached before this period (`Epochs.begin_period`) are still valid, and
    # drops them if not; called before a request uses some of these blocks, or blocks of the tier
    verify: Callable[[], bool] | None = None
    # whether a sequence may be computed in chunks; if not, only its stops split its prefill
    can_chunk: bool = True
    # if sequences cannot be chunked: whether `replays_prompt` is true for all requests
    replays_all_prompts: bool = False
    # for a model with an encoder: allocates blocks for the encoder's output
    encoder_blocks: BlockManager | None = None
    cost_model: CostModel | None = None  # for mode "auto"; learns from times of prefills and swaps
    # returns the first process's value: processes must schedule alike, but measure different times
    agree: Callable[[int], int] = int
    num_preemptions: int = 0
    num_swaps: int = 0  # how often a request was swapped out
    # the waiting requests that may share parts of their prefills
    waiting_prompts: WaitingPrompts = field(init=False)

    def __post_init__(self) -> None:
        self.forget_waiting()

    def forget_waiting(self) -> None:
        self.waiting_prompts = WaitingPrompts(self.blocks.block_size)

    def replays_prompt(self, request: Request) -> bool:
        """Whether a recompute runs the prompt as a whole and the later tokens one by one, as they
        were first computed."""
        if self.can_chunk:
            return False
        return self.replays_all_prompts or request.inputs is not None

    def may_stop(self, request: Request) -> bool:
        """Whether the request's first prefill may stop where other requests can begin. Chunked
        sequences need no stops: others can begin after any of their blocks, since each layer stores
        all K and V of a step before attention."""
        if not self.blocks.prefix_caching or request.namespace is UNCACHED:
            return False
        if self.can_chunk or request.num_preemptions:
            return False
        return not self.replays_prompt(request)

    def check_fits(self, request: Request) -> None:
        """Raises `OutOfBlocksError` if the request could not finish even alone in the memory."""
        needed = self.num_needed(request)
        total = self.blocks.num_total
        if needed > total:
            raise OutOfBlocksError(
                f"request {request.request_id!r} needs {needed} blocks of {self.blocks.size_text}"
                f" tokens, but at most {total} are available: raise `num_blocks`,"
                " `memory_fraction` or `hf_paged.budget`, or lower `max_new_tokens`, the prompt"
                " length or the number of sequences"
            )

    def num_needed(self, request: Request) -> int:
        """Returns the number of blocks with which the request can finish alone in the memory, even
        if layers with windows then compute its tokens in chunks of one."""
        needs = self._needs_by_group(request)
        return sum(needs) + self._num_encoder_blocks(request)

    def _needs_by_group(self, request: Request) -> list[int]:
        """Returns `num_needed` by layer group, without the blocks of the encoder's output."""
        size = self.blocks.block_size
        num_rows = request.num_rows
        # even recomputed rows share all full blocks before the prompt's last token
        num_shared = 0
        if num_rows > 1 and (self.can_chunk or self.replays_prompt(request)):
            num_shared = (request.num_prompt_tokens - 1) // size * size
        longest = max(1, request.max_num_tokens - 1)  # the last token is not computed
        for sequence in request.sequences:
            longest = max(longest, len(sequence.token_ids))
        common = self.blocks.num_spanned(0, num_shared, 1)
        separate = self.blocks.num_spanned(num_shared, longest, 1)
        pairs = zip(common, separate)
        return [num_common + num_rows * num_separate for num_common, num_separate in pairs]

    def admit(
        self,
        request: Request,
        max_chunk_tokens: int,
        num_reserved_blocks: int,
        is_alone: bool,
    ) -> bool:
        """Swaps a waiting request in, or attaches its rows to their cached blocks. Returns `False`
        if the free blocks, except `num_reserved_blocks` of them, do not suffice for the swap-in or
        for all tokens that the request has to compute, in chunks of at most `max_chunk_tokens`.
        While no other request runs (`is_alone`), a request that cannot be swapped in is recomputed,
        since no more blocks will become free. After an exception the request's tables may be partly
        changed."""
        manager = self.blocks
        if request.is_swapped:
            if self._swap_in(request, num_reserved_blocks, is_alone):
                return True
            if not is_alone:
                return False
            self.reset(request)
        # new variables, since a retry needs the original arguments
        num_reserved = num_reserved_blocks + self._num_encoder_blocks(request)
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
            additional = manager.num_spanned(num_cached, num_tokens, chunk, sequence.blocks)
            needs = [sum(pair) for pair in zip(needs, additional)]
        if not manager.can_take(needs, num_reserved):
            self.reset(request)
            return False
        is_restorable = self._is_restorable(request)
        may_be_outdated = is_restorable or any(
            manager.epochs.needs_verification(sequence.blocks) for sequence in request.sequences
        )
        if may_be_outdated and self.verify is not None and not self.verify():
            self.reset(request)
            # retry without the outdated blocks, which `verify` has dropped
            return self.admit(request, max_chunk_tokens, num_reserved_blocks, is_alone)
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

    def _swap_in(self, request: Request, num_reserved_blocks: int, is_alone: bool) -> bool:
        assert self.swapper is not None
        manager = self.blocks
        # beside other requests, one more block of each group must be free for every row
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
        self.swap_out_or_free(request)
        return False

    def _attach(self, request: Request) -> list[tuple[Sequence, int]]:
        """Attaches open rows to their cached blocks; returns each row with its number of cached or
        shared tokens. If there are several rows, as after a preemption, and not all of their common
        prefix is cached, the first row computes the prefix for all (`num_before_fork`). The common
        prefix is the prompt if the prompt is replayed, or has inputs besides token ids and all rows
        are longer. Without such inputs, if rows can be chunked, the common prefix is the full
        blocks of tokens that are equal in all rows."""
        manager = self.blocks
        size = manager.block_size
        rows = request.open_sequences
        num_prompt_tokens = request.num_prompt_tokens
        for sequence in rows:
            self._match(sequence, sequence.keys)
        num_shared = 0
        if len(rows) > 1:
            if self.replays_prompt(request):
                num_shared = num_prompt_tokens
            elif request.inputs is not None:
                shortest = min(row.num_tokens for row in rows)
                if shortest > num_prompt_tokens:
                    num_shared = num_prompt_tokens
            elif self.can_chunk:
                tokens = [sequence.token_ids for sequence in rows]
                divergence = min(map(len, tokens)) - 1  # every row computes its last token
                for position, column in enumerate(zip(*tokens)):
                    if len(set(column)) > 1:
                        divergence = min(position, divergence)
                        break
                num_shared = divergence // size * size
        attached = [(sequence, sequence.num_computed_tokens) for sequence in rows]
        if all(num_computed >= num_shared for _, num_computed in attached):
            return attached
        self.reset(request)
        first_row, *other_rows = rows
        request.num_shared_tokens = num_shared
        self._match(first_row, first_row.keys[: num_shared + 1])
        attached = [(first_row, first_row.num_computed_tokens)]
        attached += [(sequence, num_shared) for sequence in other_rows]
        return attached

    def _is_restorable(self, request: Request) -> bool:
        """Whether the request has a single row, does not replay its prompt, and has a longer cached
        prefix in the tier than in the pool."""
        rows = request.open_sequences
        tier = self.blocks.tier
        if tier is None or len(rows) > 1:
            return False
        if self.replays_prompt(request):
            return False
        (sequence,) = rows
        return tier.reach(self.blocks, sequence) > sequence.num_computed_tokens

    def _restore(self, request: Request) -> None:
        """Restores the prefix of the only row from the tier to the pool, if possible, and attaches
        the row to it."""
        (sequence,) = request.open_sequences
        tier = self.blocks.tier
        assert tier is not None
        if tier.restore(self.blocks, sequence):
            self.blocks.free(sequence.blocks)
            self._match(sequence, sequence.keys)

    def _match(self, sequence: Sequence, keys: list[Hashable]) -> None:
        """Attaches a row to the longest reusable cached prefix of `keys`, and sets its stops."""
        request = sequence.request
        sequence.blocks = self.blocks.new()
        sequence.num_computed_tokens = 0
        if self.replays_prompt(request):
            return
        if request.drafts_first_token:
            # the last prompt token has a separate step, before which a step must compute a token
            keys = keys[:-1]
        min_saved = 0 if self.can_chunk else FORWARD_TOKENS
        min_matched = max(request.num_content, min_saved)
        namespace = request.namespace
        num_matched = self.blocks.match(sequence.blocks, keys, namespace, min_matched)
        if not num_matched and request.num_text:
            text_keys = keys[: request.num_text + 1]
            num_matched = self.blocks.match(sequence.blocks, text_keys, namespace)
        sequence.num_computed_tokens = num_matched
        sequence.blocks.stops = self._stops(sequence)

    def _stops(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the numbers of tokens after which the sequence's prefill stops, so that other
        requests can begin there: where waiting prompts diverge from this one and, if states need
        snapshots, where earlier prompts diverged (as in SGLang for hybrid models) and after the
        sequence's last full block."""
        request = sequence.request
        size = self.blocks.block_size
        num_computed = sequence.num_computed_tokens
        if not self.may_stop(request):
            return ()
        min_distances: dict[int, int] = {}  # by stop: tokens after the previous stop
        if self.blocks.keeps_states:
            last_stop = (sequence.num_tokens - 1) // size * size
            min_distances[last_stop] = SNAPSHOT_TOKENS
        divergences = self.waiting_prompts.divergences(request)
        min_distances |= dict.fromkeys(divergences, 2 * FORWARD_TOKENS)
        if self.blocks.keeps_states:
            num_indexed = self.blocks.num_matching(sequence.keys, request.namespace)
            min_distances[num_indexed] = FORWARD_TOKENS
        stops: list[int] = []
        for stop, min_distance in sorted(min_distances.items()):
            previous = max(num_computed, *stops, 0)
            if stop - previous >= min_distance:
                stops.append(stop)
        return tuple(stops)

    def num_before_fork(self, request: Request, sequence: Sequence) -> int:
        """Returns how many tokens a sequence of a request with `num_shared_tokens` may compute now:
        for the first row, the number of missing shared tokens; for the others, 0. Once no shared
        token is missing, forks the first row's blocks for the others, and returns the number of the
        first row's remaining tokens."""
        rows = request.open_sequences
        num_shared = request.num_shared_tokens
        if sequence is not rows[0]:
            return 0
        if sequence.num_computed_tokens < num_shared:
            return num_shared - sequence.num_computed_tokens
        for row in rows[1:]:
            row.blocks = self.blocks.fork(sequence.blocks)
            row.num_computed_tokens = num_shared
        request.num_shared_tokens = 0
        return sequence.num_to_compute

    def limit_tokens(self, request: Request, sequence: Sequence, count: int) -> int:
        """Returns how many of `count` tokens (more than one) a sequence of the request may compute
        in a step, regardless of the step's token budget."""
        num_computed = sequence.num_computed_tokens
        # tokens after a whole prompt wait for the next step; after a replayed prompt, each has a
        # separate step
        if sequence.computes_whole_prompt or self.replays_prompt(request):
            count = min(count, max(1, request.num_prompt_tokens - num_computed))
        # other requests may begin where a prefill stops
        for stop in sequence.blocks.stops:
            if stop > num_computed:
                count = min(count, stop - num_computed)
        # Under a limit in bytes, blocks that leave a window serve only layers with the same window,
        # so a request that did not fit even alone advances block by block.
        can_free_between_chunks = self.can_chunk and self.blocks.has_windows
        if can_free_between_chunks and request.num_tokens_alone >= 0:
            count = min(count, self.blocks.block_size)
        # if the first new token is drafted, the last prompt token has a separate step
        if request.drafts_first_token and count == sequence.num_to_compute:
            return count - 1
        return count

    def swap_out_or_free(self, request: Request) -> None:
        """Swaps out the blocks of a preempted request, or frees them; the prefix cache may keep
        full blocks. Blocks computed before the model changed are swapped out if possible."""
        for sequence in request.sequences:
            self._register(sequence)
        rows = request.open_sequences
        # a request that replays its prompt cannot continue from swapped blocks
        can_swap = not self.replays_prompt(request) and all(
            sequence.blocks is not NO_BLOCKS for sequence in rows
        )
        if self.swapper is not None and can_swap:
            mode = self.mode
            num_bytes = 0
            if any(self.blocks.epochs.is_outdated(sequence.blocks) for sequence in rows):
                # a recompute would use the changed model
                mode = "swap"
            elif self.cost_model is not None:
                num_bytes = self.swapper.num_held_bytes(request)
                num_tokens = sum(sequence.num_computed_tokens for sequence in rows)
                # blocks shared with other requests stay in the pool, where a recompute would find
                # them; a swap-in would need new blocks
                num_rows = len(rows)
                is_shared = any(self.blocks.num_shared(row.blocks, num_rows) for row in rows)
                choice = "recompute"
                if not is_shared:
                    choice = self.cost_model.choose(num_tokens, num_bytes)
                index = self.agree(PREEMPTION.index(choice))
                mode = PREEMPTION[index]
            if mode == "swap":
                start = time.perf_counter()
                if self.swapper.swap_out(request):
                    self.num_swaps += 1
                    if self.cost_model is not None and num_bytes:
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
        for sequence in request.sequences:
            self._free(sequence)
        self._free_encoder_blocks(request)
        request.num_shared_tokens = 0

    def end_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence and frees its blocks, in the pool and on the host. The prefix cache may
        keep full blocks that are in the pool."""
        if sequence.swapped is None:
            self._register(sequence)
        sequence.is_finished = True
        self.blocks.end(sequence.blocks)
        self._free(sequence)
        if not sequence.request.open_sequences:
            self._free_encoder_blocks(sequence.request)

    def _register(self, sequence: Sequence) -> None:
        sequence.blocks.stops = ()  # no snapshot at a stop: no later step would copy the state
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
