"""Serving simulated with step costs: static batches, iteration-level batches with reserved memory,
and ours."""

from __future__ import annotations

import heapq
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks.paper.reservation import Buddy
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

    def work(self, new: int) -> float:
        """Seconds of a step without reading K/V."""
        return max(self.floor, self.fixed + self.per_token * new) + self.per_link * new

    def seconds(self, new: int, context: int) -> float:
        """Seconds of a step that computes `new` tokens and reads `context`."""
        return self.work(new) + self.per_context * context


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
    seconds: float = 0.0

    def add(self, seconds: float, used: float, final: int, taken: int, num_slots: int) -> None:
        """
        Counts some seconds.

        Args:
            used (`float`): Slot-seconds that held tokens.
            final, taken (`int`): Tokens of the running requests at their ends, and their slots.
        """
        self.used += used
        self.reserved += seconds * final - used
        self.internal += seconds * (taken - final)
        self.external += seconds * (num_slots - taken)
        self.seconds += seconds

    def percent(self) -> dict[str, float]:
        """Shares of the memory; they sum to 100."""
        parts = {name: getattr(self, name) for name in ("used", "reserved", "internal", "external")}
        total = sum(parts.values()) or 1.0
        return {name: 100 * part / total for name, part in parts.items()}


@dataclass
class Outcome:
    """Result of serving a trace; `normalized_latency` is the mean over requests of seconds per
    output token. Of ours also `tokens`, those scheduled, and `scheduling`, the CPU seconds that
    this took."""

    requests: int = 0
    seconds: float = 0.0
    latency: float = 0.0
    row_seconds: float = 0.0
    busy_seconds: float = 0.0
    steps: int = 0
    preemptions: int = 0
    tokens: int = 0
    scheduling: float = 0.0
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

    def finish(self, seconds_since_arrival: float, output: int) -> None:
        """Records that a request has ended."""
        self.requests += 1
        self.latency += seconds_since_arrival / output


def sum_of_products(steps: int, a: float, da: float, b: float, db: float) -> float:
    """Sum of `(a + j * da) * (b + j * db)` for `j` from 1 to `steps`."""
    ones, squares = steps * (steps + 1) / 2, steps * (steps + 1) * (2 * steps + 1) / 6
    return steps * a * b + (a * db + b * da) * ones + da * db * squares


def serve_static(trace: Trace, cost: StepCost, num_slots: int) -> Outcome:
    """Static batches, which run until their last request is done. Every row is padded to the
    widest prompt and the longest output; the batch size is what fits if every row has the longest
    sequence. First come, first served; answers return when the batch ends.
    """
    outcome = Outcome()
    usage = outcome.usage
    most = min(MAX_SEQS, num_slots // LONGEST)
    first, now = 0, 0.0
    while first < len(trace):
        now = max(now, trace.arrivals[first])
        end = first + 1
        while end < len(trace) and end - first < most and trace.arrivals[end] <= now:
            end += 1
        rows, is_full = end - first, end < len(trace) and trace.arrivals[end] <= now
        prompts, outputs = trace.prompts[first:end], trace.outputs[first:end]
        width, longest = max(prompts), max(outputs)
        started, done = now, 0
        alive = sorted(zip(outputs, prompts))
        while alive:  # one iteration per end of a row
            until = alive[0][0]
            step_da = cost.per_context * rows
            step_a = cost.work(rows) + step_da * (width + done - 1)
            held = sum(prompt for _, prompt in alive) + len(alive) * (done - 1)
            steps = until - done
            used = sum_of_products(steps, step_a, step_da, held, len(alive))
            seconds = sum_of_products(steps, step_a, step_da, 1, 0)
            if not done:  # the first step computes the prompts
                extra = cost.work(rows * width) - cost.work(rows)
                used, seconds = used + extra * (held + len(alive)), seconds + extra
            if is_full:
                final = sum(prompt + output for output, prompt in alive)
                usage.add(seconds, used, final, rows * LONGEST, num_slots)
            now += seconds
            outcome.row_seconds += seconds * len(alive)
            done = until
            alive = [row for row in alive if row[0] > until]
        outcome.busy_seconds += now - started
        outcome.steps += longest
        for index in range(first, end):
            outcome.finish(now - trace.arrivals[index], trace.outputs[index])
        first = end
    outcome.seconds = now
    return outcome


def serve_reserved(
    trace: Trace, cost: StepCost, num_slots: int, policy: Callable[[int, int], int]
) -> Outcome:
    """Iteration-level batches (Orca, OSDI'22): requests join and leave at every step, first come,
    first served; prompts run beside decodes. `policy` sets the memory reserved on admission, from a
    buddy allocator.
    """
    outcome = Outcome()
    usage = outcome.usage
    buddy = Buddy(num_slots)
    running: list[tuple[int, int, int]] = []  # end step, request, start of its chunk
    step = held = reserved = final = 0  # tokens held now, reserved, and held at the end
    head, now, count = 0, 0.0, len(trace)
    while head < count or running:
        if not running:
            now = max(now, trace.arrivals[head])
        prompt_tokens = admitted = 0
        waits = False
        while head < count and trace.arrivals[head] <= now:
            prompt, output = trace.prompts[head], trace.outputs[head]
            size = policy(prompt, output)
            has_budget = not admitted or prompt_tokens + prompt + len(running) <= MAX_TOKENS
            start = buddy.allocate(size) if has_budget and len(running) < MAX_SEQS else None
            if start is None:
                waits = True
                break
            heapq.heappush(running, (step + output, head, start))
            prompt_tokens, admitted = prompt_tokens + prompt, admitted + 1
            reserved, final = reserved + size, final + prompt + output
            head += 1
        rows = len(running)
        decodes = rows - admitted
        if admitted:
            steps, growth = 1, prompt_tokens + decodes
        else:
            steps, growth = running[0][0] - step, rows
            if head < count and not waits:
                steps = min(steps, _steps_until(trace.arrivals[head] - now, cost, rows, held))
        a, da = cost.work(growth) + cost.per_context * held, cost.per_context * growth
        seconds = sum_of_products(steps, a, da, 1, 0)
        if waits:
            used = sum_of_products(steps, a, da, held, growth)
            usage.add(seconds, used, final, reserved, num_slots)
        now, step, held = now + seconds, step + steps, held + steps * growth
        outcome.steps += steps
        outcome.row_seconds += seconds * rows
        outcome.busy_seconds += seconds
        while running and running[0][0] == step:
            _, index, start = heapq.heappop(running)
            prompt, output = trace.prompts[index], trace.outputs[index]
            size = policy(prompt, output)
            buddy.release(start, size)
            reserved, final = reserved - size, final - prompt - output
            held -= prompt + output - 1  # the last token's K/V are never computed
            outcome.finish(now - trace.arrivals[index], output)
    assert buddy.num_free == num_slots and not (held or reserved or final)
    outcome.seconds = now
    return outcome


def _steps_until(seconds: float, cost: StepCost, rows: int, held: int) -> int:
    """Decode steps of `rows` rows that begin within `seconds`; at least 1."""
    a, slope = cost.work(rows) + cost.per_context * held, cost.per_context * rows / 2
    if slope == 0:
        return max(1, math.ceil(seconds / a))
    b = a + slope  # k * a + slope * k * (k + 1) = seconds
    return max(1, math.ceil((math.sqrt(b * b + 4 * slope * seconds) - b) / (2 * slope)))


def serve_paged(
    trace: Trace,
    cost: StepCost,
    num_slots: int,
    block_size: int = BLOCK_SIZE,
    most_tokens: float = math.inf,
) -> Outcome:
    """Our scheduler and block manager, as the engine runs them; only the forward is left out. Ends
    early once `most_tokens` tokens are scheduled."""
    outcome = Outcome()
    usage = outcome.usage
    pool = BlockPool(num_slots // block_size)
    blocks = manager_of([PoolGroup(pool)], block_size, prefix_caching=False)
    scheduler = Scheduler(
        Preemption(blocks), max_num_batched_tokens=MAX_TOKENS, max_num_seqs=MAX_SEQS
    )
    head, now, count, held = 0, 0.0, len(trace), 0
    while outcome.tokens < most_tokens and (head < count or scheduler.has_unfinished):
        if not scheduler.has_unfinished:
            now = max(now, trace.arrivals[head])
        while head < count and trace.arrivals[head] <= now:
            prompt, output = trace.prompts[head], trace.outputs[head]
            scheduler.add(Request(head, [Sequence([0] * prompt)], prompt + output))
            head += 1
        start = time.process_time()
        batch = scheduler.schedule()
        scheduler.commit(batch)
        new = batch.num_tokens
        outcome.tokens += new
        if batch.preempted:  # recompute: their tokens are computed again
            held = sum(table.num_tokens for table in blocks.tables(0))
            outcome.preemptions += len(batch.preempted)
        else:
            held += new
        seconds = cost.seconds(new, held)
        now += seconds
        outcome.steps += 1
        outcome.row_seconds += seconds * len(batch)
        outcome.busy_seconds += seconds
        if scheduler.num_waiting:
            usage.add(seconds, seconds * held, held, pool.num_used * block_size, num_slots)
        for sequence in batch.sequences:
            token_ids = sequence.token_ids
            if sequence.num_computed_tokens == len(token_ids):
                token_ids.append(0)
                request = sequence.request
                if len(token_ids) >= request.max_num_tokens:
                    held -= sequence.num_computed_tokens
                    index = request.request_id
                    scheduler.finish(request)
                    outcome.finish(now - trace.arrivals[index], trace.outputs[index])
        outcome.scheduling += time.process_time() - start
    outcome.seconds = now
    return outcome
