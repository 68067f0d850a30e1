"""How the blocks of a whole request come and go, and what that costs. Plain Python: no tensors."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...cache.block_manager import NO_BLOCKS, UNCACHED, BlockManager
from ...cache.block_pool import OutOfBlocksError
from ...config import PREEMPTION
from ..request import Request, Sequence

if TYPE_CHECKING:  # it has tensors
    from ...cache.swap import BlockSwapper


logger = logging.getLogger(__name__)


class CostModel:
    """Chooses between recompute and swap (PagedAttention, arXiv 2309.06180, section 7.3). Seconds per token and bytes
    per second are means in which an observation counts half as much `HALF_LIFE` observations later; the former include
    what a step costs whatever its size."""

    HALF_LIFE = 32

    def __init__(self, bytes_per_second: float = 10e9) -> None:
        self._given_speed = bytes_per_second  # between blocks and host memory, a guess until a swap was observed
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
        """Of a prefill; `None` before any was seen."""
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


# In rectangles, what follows a hit or a snapshot is a forward of its own, which takes about as long as so many tokens:
# so many must be saved, or be so by the next prompt where others were seen to begin like this one. A snapshot that may
# never serve is taken where that is a small part of the prompt.
FORWARD_TOKENS, SNAPSHOT_TOKENS = 32, 256


@dataclass(eq=False)
class Preemption:
    """Takes and gives back blocks for all sequences of a request together, so that what they share stays shared."""

    blocks: BlockManager
    preempt: str = "recompute"  # or "swap", or "auto": as `cost` chooses
    swapper: BlockSwapper | None = None  # without one, everything is recomputed
    # whether blocks of before this window may be served (`BlockManager.needs_vouching`); if not, it has dropped them
    vouch: Callable[[], bool] | None = None
    chunks: bool = True  # whether a sequence may be computed in chunks; else as a whole, then token by token
    replays: bool = False  # without chunks: whether all requests do as `replays_prompt` says
    encoder_blocks: BlockManager | None = None  # gives the requests of a model with an encoder those of its output
    cost: CostModel | None = None  # is told how long prefills and swaps take
    agree: Callable[[int], int] = int  # of processes that schedule alike, and have measured other times: the first's
    num_swaps: int = 0  # requests whose blocks went to host memory

    def replays_prompt(self, request: Request) -> bool:
        """Whether its prompt is computed as a whole, also when computed again, and then token by token."""
        return not self.chunks and (self.replays or request.inputs is not None)

    def check_fits(self, request: Request, num_lent: int = 0) -> None:
        """Raises `OutOfBlocksError` if the request could not finish even if it had all blocks for itself, and those
        that are lent."""
        size, rows = self.blocks.block_size, request.num_rows
        # rows that are recomputed share all full blocks short of a prompt's last token
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
        """Swaps a waiting request in, or lets its rows begin with cached blocks, if there is room for all that it has
        to compute, at most `chunk` tokens at a time, with `reserve` blocks left. While no other request runs
        (`is_alone`), one that cannot be swapped in is recomputed, since there will never be more room."""
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
            # `vouch` has dropped the old blocks, of packed sequences
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
        # beside others, every row must be able to go on
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
        """Gives open rows what the prefix cache has of them; returns with each the tokens that it starts with. What all
        rows begin with is shared again: if it is not cached, the first row computes it (`num_until_shared`); with
        `replays`, that is the prompt."""
        manager, rows, size = self.blocks, request.open_sequences, self.blocks.block_size
        for sequence in rows:
            sequence.blocks = manager.new()
            sequence.num_computed_tokens = self._match(sequence, sequence.keys)
            if not request.num_preemptions:
                sequence.blocks.stops = self._stops(sequence)
        shared = 0  # whole blocks that all rows begin with, short of the last token of the shortest
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
        """Whether the tier below the pool has more of what its one row begins with than the row was given."""
        if self.blocks.tier is None or len(request.open_sequences) > 1 or self.replays_prompt(request):
            return False
        (sequence,) = request.open_sequences
        links = self.blocks.restorable(sequence.keys, request.namespace)
        return self.blocks.num_tokens(links) > sequence.num_computed_tokens

    def _restore(self, request: Request) -> None:
        """Lets its row begin with that, in blocks that are taken for it, as those of a request that was swapped out."""
        (sequence,) = request.open_sequences
        try:
            found = self.blocks.restore(sequence.keys, request.namespace, sequence.num_computed_tokens)
        except OutOfBlocksError:  # under `hf_paged.budget`: then it is computed, when there is room
            return
        except (MemoryError, RuntimeError, ValueError) as error:  # no memory, or other layers: it is computed
            logger.warning("prefix blocks are not brought back, and their tokens are computed: %s", error)
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
        if request.drafts_first:  # a step computes what is in front of the last token
            keys = keys[:-1]
        least = max(request.num_content, 0 if self.chunks else FORWARD_TOKENS)
        return self.blocks.match(sequence.blocks, keys, request.namespace, least)

    def _stops(self, sequence: Sequence) -> tuple[int, ...]:
        """Where snapshots of its states are taken: where other prompts parted from this one, so that the next need not
        compute what they share (as SGLang does for hybrid models), and behind its last full block."""
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
        for sequence in request.sequences:
            self._register(sequence)
        rows = request.open_sequences
        # what replays its prompt begins with more than what is in its blocks
        can_swap = not self.replays_prompt(request) and all(sequence.blocks is not NO_BLOCKS for sequence in rows)
        if self.swapper is not None and can_swap:
            how, num_bytes = self.preempt, 0
            if self.cost is not None:
                num_bytes = self.swapper.num_held_bytes(request)
                num_tokens = sum(sequence.num_computed_tokens for sequence in rows)
                # what others hold stays, and is found again; a copy of it would take blocks of its own
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
                        sequence.blocks.capacity = 0  # what comes back is looked at before it is written to
                    return
        self.forget(request)

    def forget(self, request: Request) -> None:
        """Gives up what is held of a request, here and on the host: nothing counts as computed any more."""
        for sequence in request.sequences:
            self._free(sequence)
        self._free_encoder_blocks(request)
        request.num_shared_tokens = 0

    def end_sequence(self, sequence: Sequence) -> None:
        """Ends a sequence and gives up what is held of it, here and on the host; the prefix cache keeps full blocks."""
        if sequence.swapped is None:
            self._register(sequence)
        sequence.is_finished = True
        self.blocks.end(sequence.blocks)
        self._free(sequence)
        if not sequence.request.open_sequences:
            self._free_encoder_blocks(sequence.request)

    def _register(self, sequence: Sequence) -> None:
        sequence.blocks.stops = ()  # no step of it follows, which would copy the state
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
