"""Serving simulated with step costs: static batches, iteration-level batches with reserved memory,
and ours."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.paper.reservation import POLICIES, Buddy
from benchmarks.paper.traces import LONGEST, Trace
from hf_paged.batching.request import Request, Sequence
from hf_paged.batching.scheduling.preemption import Preemption
from hf_paged.batching.scheduling.scheduler import Scheduler
from hf_paged.cache.block_pool import BlockPool
from tests.support.pools import PoolGroup, manager_of

MAX_SEQS, MAX_TOKENS = 256, 2048
BLOCK_SIZE = 16


@dataclass(frozen=True)
class StepCost:
    """Seconds of one step: `max(floor, fixed + per_token * new) + per_link * new + per_context *
    context`.

    Args:
        fixed, floor (`float`): Seconds that do not depend on the tokens; `floor` overlaps with
            computing them.
        per_token (`float`): Seconds per new token, of a prompt or generated.
        per_context (`float`): Seconds to read one token's K/V.
        per_link (`float`): Seconds per new token to exchange data with other devices.
    """

    name: str
    fixed: float
    per_token: float
    per_context: float
    floor: float = 0.0
    per_link: float = 0.0

    def seconds(self, new: int, context: int) -> float:
        """Seconds of a step that computes `new` tokens and reads `context`."""
        work = max(self.floor, self.fixed + self.per_token * new)
        return work + self.per_link * new + self.per_context * context


OPT_13B_KV_BYTES = 2 * 5120 * 40 * 2
"""Bytes per token: keys and values, hidden size, layers, bytes of float16 (arXiv 2309.06180,
section 3)."""
OPT_13B_SLOTS = 15_700
"""K/V slots on an A100 of 40 GB (arXiv 2309.06180, table 1)."""
A100 = StepCost(
    "OPT-13B on an A100, roofline",
    fixed=0.0,
    floor=26e9 / 1.555e12,  # bytes of the weights (table 1) over the data sheet's bandwidth
    per_token=2 * 13e9 / 312e12,  # operations over the data sheet's float16 rate
    per_context=OPT_13B_KV_BYTES / 1.555e12,
)


@dataclass
class Usage:
    """
    Slot-seconds of the whole memory while requests wait for room.

    `used`: the slot holds a token of a running request; `reserved`: it will hold one of the same
    request; `internal`: it belongs to a request that never fills it; `external`: all other slots
    (free, or lost to rounding up).
    """

    used: float = 0.0
    reserved: float = 0.0
    internal: float = 0.0
    external: float = 0.0

    def percent(self) -> dict[str, float]:
        """Shares of the memory; they sum to 100."""
        total = sum(vars(self).values()) or 1.0
        return {name: 100 * part / total for name, part in vars(self).items()}


@dataclass
class Outcome:
    """Result of serving a trace in `num_slots` slots; `normalized_latency` is the mean over
    requests of seconds per output token."""

    num_slots: int
    requests: int = 0
    seconds: float = 0.0  # the clock
    latency: float = 0.0
    row_seconds: float = 0.0
    busy_seconds: float = 0.0
    steps: int = 0
    usage: Usage = field(default_factory=Usage)

    @property
    def rate(self) -> float:
        """Requests per second."""
        return self.requests / self.seconds

    @property
    def rows(self) -> float:
        """Requests per step, averaged over time."""
        return self.row_seconds / self.busy_seconds

    @property
    def normalized_latency(self) -> float:
        return self.latency / self.requests

    def step(
        self, seconds: float, rows: int, held: int, final: int, taken: int, waits: bool
    ) -> None:
        """
        Counts a step of some seconds.

        Args:
            held, final (`int`): Tokens of the running requests now, and at their ends.
            taken (`int`): Their slots.
            waits (`bool`): Whether requests wait for room: only then memory is counted.
        """
        self.seconds += seconds
        self.busy_seconds += seconds
        self.row_seconds += seconds * rows
        self.steps += 1
        if waits:
            self.usage.used += seconds * held
            self.usage.reserved += seconds * (final - held)
            self.usage.internal += seconds * (taken - final)
            self.usage.external += seconds * (self.num_slots - taken)

    def finish(self, trace: Trace, index: int) -> None:
        """Records that a request has ended."""
        self.requests += 1
        self.latency += (self.seconds - trace.arrivals[index]) / trace.outputs[index]


def serve_static(trace: Trace, cost: StepCost, num_slots: int) -> Outcome:
    """Static batches, which run until their last request is done. Every row is padded to the
    widest prompt and the longest output; the batch size is what fits if every row has the longest
    sequence. First come, first served; answers return when the batch ends.
    """
    outcome, first = Outcome(num_slots), 0
    most = min(MAX_SEQS, num_slots // LONGEST)
    while first < len(trace):
        now = outcome.seconds = max(outcome.seconds, trace.arrivals[first])
        end = first + 1
        while end < len(trace) and end - first < most and trace.arrivals[end] <= now:
            end += 1
        rows, waits = end - first, end < len(trace) and trace.arrivals[end] <= now
        pairs = list(zip(trace.prompts[first:end], trace.outputs[first:end]))
        width = max(prompt for prompt, _ in pairs)
        for done in range(max(output for _, output in pairs)):
            alive = [pair for pair in pairs if pair[1] > done]
            held = sum(prompt for prompt, _ in alive) + len(alive) * done
            # the first step computes the prompts
            seconds = cost.seconds(rows if done else rows * width, rows * (width + done))
            final = sum(map(sum, alive))
            outcome.step(seconds, len(alive), held, final, rows * LONGEST, waits)
        for index in range(first, end):
            outcome.finish(trace, index)
        first = end
    return outcome


def serve_reserved(
    trace: Trace, cost: StepCost, num_slots: int, policy: Callable[[int, int], int]
) -> Outcome:
    """Iteration-level batches (Orca, OSDI'22): requests join and leave at every step, first come,
    first served; prompts run beside decodes. `policy` sets the memory reserved on admission, from a
    buddy allocator.
    """
    outcome, buddy = Outcome(num_slots), Buddy(num_slots)
    running: list[tuple[int, int, int]] = []  # end step, request, start of its chunk
    held = reserved = final = head = 0  # tokens held now, reserved, and held at the end
    while head < len(trace) or running:
        if not running:
            outcome.seconds = max(outcome.seconds, trace.arrivals[head])
        decodes = new = len(running)
        waits = False
        while head < len(trace) and trace.arrivals[head] <= outcome.seconds and not waits:
            prompt, output = trace.prompts[head], trace.outputs[head]
            size, admitted = policy(prompt, output), len(running) - decodes
            has_budget = not admitted or new + admitted + prompt <= MAX_TOKENS
            start = buddy.allocate(size) if has_budget and len(running) < MAX_SEQS else None
            waits = start is None
            if start is not None:
                heapq.heappush(running, (outcome.steps + output, head, start))
                new, reserved, final = new + prompt, reserved + size, final + prompt + output
                head += 1
        held += new
        outcome.step(cost.seconds(new, held), len(running), held, final, reserved, waits)
        while running and running[0][0] == outcome.steps:
            _, index, start = heapq.heappop(running)
            prompt, output = trace.prompts[index], trace.outputs[index]
            buddy.release(start, policy(prompt, output))
            reserved, final = reserved - policy(prompt, output), final - prompt - output
            held -= prompt + output - 1  # the last token's K/V are never computed
            outcome.finish(trace, index)
    assert buddy.num_free == num_slots and not (held or reserved or final)
    return outcome


def serve_paged(
    trace: Trace, cost: StepCost, num_slots: int, block_size: int = BLOCK_SIZE
) -> Outcome:
    """Our scheduler and block manager, as the engine runs them; only the forward is left out."""
    outcome, pool = Outcome(num_slots), BlockPool(num_slots // block_size)
    blocks = manager_of([PoolGroup(pool)], block_size, prefix_caching=False)
    scheduler = Scheduler(
        Preemption(blocks), max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS
    )
    queue = scheduler.queue
    head = held = 0
    while head < len(trace) or queue.running or queue.waiting:
        if not (queue.running or queue.waiting):
            outcome.seconds = max(outcome.seconds, trace.arrivals[head])
        while head < len(trace) and trace.arrivals[head] <= outcome.seconds:
            prompt, output = trace.prompts[head], trace.outputs[head]
            scheduler.add(Request(head, [Sequence([0] * prompt)], prompt + output))
            head += 1
        batch = scheduler.schedule()
        scheduler.commit(batch)
        if batch.preempted:  # recompute: their tokens are computed again
            held = sum(table.num_tokens for table in blocks.tables(0))
        else:
            held += batch.num_tokens
        seconds, taken = cost.seconds(batch.num_tokens, held), pool.num_used * block_size
        outcome.step(seconds, len(batch), held, held, taken, bool(queue.waiting))
        for sequence in batch.sequences:
            token_ids = sequence.token_ids
            if sequence.num_computed_tokens == len(token_ids):
                token_ids.append(0)
                request = sequence.request
                if len(token_ids) >= request.max_num_tokens:
                    held -= sequence.num_computed_tokens
                    scheduler.finish(request)
                    outcome.finish(trace, request.request_id)
    return outcome


SYSTEMS = (*POLICIES, "ours")


def serve(system: str, trace: Trace) -> Outcome:
    """Serves the trace in OPT-13B's number of slots, by ours or with a reservation."""
    if system == "ours":
        return serve_paged(trace, A100, OPT_13B_SLOTS)
    return serve_reserved(trace, A100, OPT_13B_SLOTS, POLICIES[system])
