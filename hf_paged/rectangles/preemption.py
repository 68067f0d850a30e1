"""Allocates and frees the blocks of requests that run as rectangles, and decides where their
prefills stop, so that other requests can begin there with the same prefix. (Packed prefills need no
stops: each layer stores all K and V of a step before attention, so other requests can begin after
any block.)"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Hashable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import pairwise
from typing import ClassVar

from ..batching.request import Request, Sequence
from ..batching.scheduling.preemption import Preemption
from ..cache.block_manager import BlockManager
from ..cache.sequence_blocks import NO_BLOCKS, UNCACHED

# The tokens after a cache hit or a stop need a separate forward, whose fixed cost is about that of
# `FORWARD_TOKENS` tokens. So a hit must save at least that many tokens, and so must a stop where
# earlier prompts diverged. A stop where waiting prompts diverge costs two such forwards: one for
# the prompt that stops there, and one for the prompts that begin there. The snapshot at the end of
# a prompt may never be reused, so that stop must be at least `SNAPSHOT_TOKENS` tokens after the
# previous one.
FORWARD_TOKENS, SNAPSHOT_TOKENS = 32, 256


class WaitingPrompts:
    """Counts, for each namespace and prefix of full blocks, the waiting prompts that begin with it.
    A prefix leaves out at least the prompt's last token, whose logits are needed. The time of each
    operation depends on the length of one prompt, not on the number of prompts."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        # by request: hashes of its prefixes of 1, 2, ... blocks; stored, since the request may
        # change before `discard`
        self._prefixes: dict[Request, list[int]] = {}
        self._counts: Counter[int] = Counter()  # number of requests, by hash of a prefix
        # hashes of the prefixes at whose ends the prefills of running requests will stop; the
        # scheduler clears the set before each step
        self.awaited_prefixes: set[int] = set()

    def __len__(self) -> int:
        return len(self._prefixes)

    def add(self, request: Request) -> None:
        """Adds a request whose prompt consists of token ids only."""
        prefixes = [prefix for _, prefix in self._hash_prefixes(request)]
        self._prefixes[request] = prefixes
        self._counts.update(prefixes)

    def discard(self, request: Request) -> None:
        """Removes a request, if it was added."""
        for prefix in self._prefixes.pop(request, ()):
            self._counts[prefix] -= 1
            if not self._counts[prefix]:
                del self._counts[prefix]

    def divergences(self, request: Request) -> list[int]:
        """Returns the numbers of tokens, multiples of the block size, after which other waiting
        prompts diverge from the request's prompt; none if the request was not added."""
        counts = [self._counts[prefix] for prefix in self._prefixes.get(request, ())]
        divergences = []
        for num_blocks, (count, next_count) in enumerate(pairwise([*counts, 1]), 1):
            if next_count < count:
                divergences.append(num_blocks * self._block_size)
        return divergences

    def announce_stops(self, request: Request, stops: Collection[int]) -> None:
        """Records that this step computes tokens of a request whose prefill will stop at each of
        `stops`, which are numbers of tokens."""
        prefixes = self._hash_prefixes(request)
        self.awaited_prefixes.update(prefix for end, prefix in prefixes if end in stops)

    def awaits_prefix(self, request: Request) -> bool:
        """Whether this waiting request can begin at a stop that a running request will reach, in
        this step or a later one."""
        return not self.awaited_prefixes.isdisjoint(self._prefixes.get(request, ()))

    def _hash_prefixes(self, request: Request) -> Iterator[tuple[int, int]]:
        """Yields the length of each prefix of full blocks, and its hash. If the hashes of different
        prefixes collide, a request may wait unnecessarily; its results stay correct."""
        token_ids = request.sequences[0].token_ids
        prefix: Hashable = request.namespace
        size = self._block_size
        for end in range(size, request.num_prompt_tokens, size):
            block = tuple(token_ids[end - size : end])
            prefix = hash((prefix, block))
            yield end, prefix


@dataclass(eq=False)
class RectanglePreemption(Preemption):
    """The [`Preemption`] of requests that run as rectangles. The base class documents the
    methods."""

    can_chunk: ClassVar[bool] = False
    # whether `replays_prompt` is true for all requests
    replays_all_prompts: bool = False
    # for a model with an encoder: allocates the blocks of the encoder's keys and values
    encoder_blocks: BlockManager | None = None

    def __post_init__(self) -> None:
        self.min_saved = FORWARD_TOKENS
        self.forget_waiting()

    def replays_prompt(self, request: Request) -> bool:
        """Whether a recompute runs the prompt as a whole and the later tokens one by one, as they
        were first computed."""
        return self.replays_all_prompts or request.inputs is not None

    def note_waiting(self, request: Request) -> None:
        if self._may_stop(request):
            self._waiting_prompts.add(request)

    def note_removed(self, request: Request) -> None:
        self._waiting_prompts.discard(request)

    def forget_waiting(self) -> None:
        # the waiting requests that may share parts of their prefills
        self._waiting_prompts = WaitingPrompts(self.blocks.block_size)
        self.awaited_prefixes = self._waiting_prompts.awaited_prefixes

    def announce_stops(self, request: Request, stops: list[int]) -> None:
        self._waiting_prompts.announce_stops(request, stops)

    def awaits_prefix(self, request: Request) -> bool:
        return self._waiting_prompts.awaits_prefix(request)

    def num_other_blocks(self, request: Request) -> int:
        if self.encoder_blocks is None:
            return 0
        return -(-request.num_encoder_tokens // self.encoder_blocks.block_size)

    def take_other_blocks(self, request: Request) -> bool:
        if self.encoder_blocks is None or not request.num_encoder_tokens:
            return True
        request.encoded = self.encoder_blocks.new()
        return request.encoded.append(request.num_encoder_tokens)

    def free_other_blocks(self, request: Request) -> None:
        request.encoded.free()
        request.encoded = NO_BLOCKS

    def _may_stop(self, request: Request) -> bool:
        """Whether the request's first prefill may stop where other requests can begin."""
        if not self.blocks.prefix_caching or request.namespace is UNCACHED:
            return False
        if request.num_preemptions:
            return False
        return not self.replays_prompt(request)

    def shares_prompt(self, request: Request) -> bool:
        return self.replays_prompt(request)

    def num_shared_tokens(self, request: Request, rows: list[Sequence]) -> int:
        if not self.replays_prompt(request):
            return 0
        # each row needs logits: a row without further tokens computes the prompt itself
        num_tokens = request.num_prompt_tokens
        return num_tokens if min(row.num_tokens for row in rows) > num_tokens else 0

    def is_restorable(self, request: Request) -> bool:
        return not self.replays_prompt(request) and super().is_restorable(request)

    def can_swap(self, request: Request) -> bool:
        # a request that replays its prompt cannot continue from swapped blocks
        return not self.replays_prompt(request) and super().can_swap(request)

    def match(self, sequence: Sequence, keys: list[Hashable]) -> None:
        if self.replays_prompt(sequence.request):
            sequence.begin(self.blocks)
            return
        super().match(sequence, keys)
        sequence.blocks.stops = self._stops(sequence)

    def _stops(self, sequence: Sequence) -> tuple[int, ...]:
        """Returns the numbers of tokens after which the sequence's prefill stops, so that other
        requests can begin there. The prefill stops where waiting prompts diverge from this one. If
        states need snapshots, it also stops where earlier prompts diverged (as in SGLang for hybrid
        models), and after the sequence's last full block."""
        request = sequence.request
        size = self.blocks.block_size
        num_computed = sequence.num_computed_tokens
        if not self._may_stop(request):
            return ()
        min_distances: dict[int, int] = {}  # by stop: tokens after the previous stop
        if self.blocks.keeps_states:
            last_stop = (sequence.num_tokens - 1) // size * size
            min_distances[last_stop] = SNAPSHOT_TOKENS
        divergences = self._waiting_prompts.divergences(request)
        min_distances |= dict.fromkeys(divergences, 2 * FORWARD_TOKENS)
        if self.blocks.keeps_states:
            num_indexed = num_matching(self.blocks, sequence.keys, request.namespace)
            min_distances[num_indexed] = FORWARD_TOKENS
        stops: list[int] = []
        for stop, min_distance in sorted(min_distances.items()):
            previous_stop = max(num_computed, *stops, 0)
            if stop - previous_stop >= min_distance:
                stops.append(stop)
        return tuple(stops)

    def limit_tokens(self, request: Request, sequence: Sequence, count: int) -> int:
        num_computed = sequence.num_computed_tokens
        if self.replays_prompt(request):  # after the prompt, each token has a separate step
            count = min(count, max(1, request.num_prompt_tokens - num_computed))
        # other requests may begin where a prefill stops
        for stop in sequence.blocks.stops:
            if stop > num_computed:
                count = min(count, stop - num_computed)
        return super().limit_tokens(request, sequence, count)


def num_matching(manager: BlockManager, token_ids: Items[Hashable], namespace: Hashable) -> int:
    """Returns how many tokens `SequenceBlocks.match` would attach if no snapshot of states were
    missing."""
    max_nodes = (len(token_ids) - 1) // manager.node_size
    links = manager.index.find(token_ids, namespace, max_nodes, ignored_group=manager.state_group)
    return len(links) * manager.node_size
