"""
Load test: engines with few blocks serve a random mixture of requests for a long time, in float32.

    python -m tests.support.load --steps 100000 [--seed 0] [--run-steps 2500] [--jobs 1]
                                 [--first RUN] [--only RUN]

Requests arrive at random, with adapters, beams, samples, stop strings, drafts and priorities; some
are cancelled, and sometimes all are. Models have windows, states or encoders; blocks are quantized,
mapped or evicted to files. Each request gets the tokens of plain `generate` on that request alone.
After each step the streamed tokens are checked and the pools' integrity holds; at the end no block
is in use, and no thread, file handle or memory is lost. A failure line says how to repeat its run.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import os
import random
import sys
import tempfile
import threading
import time
import traceback
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import psutil
import pytest

import hf_paged
from hf_paged import PagedEngine, PrefixTiers
from hf_paged.cache.free_memory import trim
from hf_paged.plan import StepPlan
from tests.support import load_cases, models, tools
from tests.support.engine_helpers import assert_drained
from tests.support.load_cases import KINDS, Difference, Run, User, Wanted
from tests.support.workers import Lost

RUN_STEPS = 2500
CHECKED_STEPS = 500  # of an engine, with integrity checks after each; later after every 5th
MAX_STEPS_OF_A_REQUEST = 4000  # from arrival on; many times what any request takes
HANG_SECONDS = 3600.0  # of a run
PREEMPTIONS = 0.05  # least share of steps with preemption for a meaningful run
GROWTH = 200 << 20  # most bytes of a process's memory that runs may add once each kind has run
SERVICES = ("hf_paged idle pools", "hf_paged mappings")  # threads that a process keeps, one of each
LOOKUP = {"prompt_lookup_num_tokens": 4}


class Client(User):
    """Sends requests of the catalogue at random."""

    def __init__(
        self, run: Run, model: Any, assistant: Any, known: list[Wanted], draw: random.Random
    ) -> None:
        engine = PagedEngine(model, run.config, tokenizer=models.tokenizer())
        super().__init__(run.name, engine, collections.Counter())
        self.run, self.known, self.draw = run, known, draw
        self.model, self.assistant = model, assistant
        self.arrivals: dict[str, int] = {}  # steps
        self.too_large: set[int] = set()
        self.level = 0

    def act_and_step(self) -> None:
        """One round: the client's actions, a step of the engine, then the invariants."""
        self._act()
        while not self.engine.has_unfinished:
            self.add_any()
        self.step()
        if self.num_steps <= CHECKED_STEPS or self.num_steps % 5 == 0:
            self.engine.check_integrity()
        if self.num_steps % 256 == 0:
            for request_id in self.open:
                steps = self.num_steps - self.arrivals[request_id]
                assert steps < MAX_STEPS_OF_A_REQUEST, f"request {request_id} starves"

    def end(self) -> None:
        """Steps until all requests have ended; asserts that nothing of them is left."""
        self.drain()
        assert_drained(self.engine)
        self.engine.reset_prefix_cache()
        states = [state for pool in self.engine.block_map().values() for state in pool]
        assert not any(states), f"blocks are left: {states}"
        stats, memory = self.engine.stats(), self.engine.memory.stats()
        ended = stats.num_finished
        assert ended == self.num_requests, f"{ended} of {self.num_requests} requests ended"
        counts = {
            "swaps": stats.num_swaps,
            "recomputes": stats.num_preemptions - stats.num_swaps,
            "tokens": stats.num_generated_tokens,
            "captured steps": stats.num_captured_steps,
            "blocks to files": memory.tier_kept_blocks,
            "blocks from files": memory.tier_restored_blocks,
        }
        self.seen.update(counts)

    def _act(self) -> None:
        draw = self.draw
        if self.num_steps % 64 == 0:  # 0: open requests continue alone
            self.level = draw.choice([0, self.run.in_flight // 4, *3 * [self.run.in_flight]])
        for _ in range(2):
            if len(self.open) < self.level and draw.random() < 0.6:
                self.add_any()
        chance = draw.random()
        if chance < 0.012 and self.open:
            self.cancel_any(again=draw.random() < 0.3)
        elif chance > 0.9995:
            self.free()
        elif chance > 0.999:
            self.engine.reset_prefix_cache()
        elif chance > 0.998:
            self.generate(self.model, draw.choice(self.known))

    def add_any(self, request_id: str = "") -> None:
        number = self.draw.randrange(len(self.known))
        if number in self.too_large:
            return
        wanted = self.known[number]
        request_id = request_id or f"{number}-{self.num_requests}"
        assistant, lookup = None, {}
        if self.run.assisted and wanted.is_greedy:
            assistant, lookup = self.draw.choice([(None, {}), (self.assistant, {}), (None, LOOKUP)])
        is_added = self.add(
            wanted,
            request_id,
            priority=self.draw.choice([0, 0, 0, 0, -1, 1]),
            return_logprobs=self.draw.random() < 0.1,
            assistant_model=assistant,
            lookup=lookup,
        )
        if not is_added:
            self.too_large.add(number)
            return
        if self.num_requests == 1:
            count_chunks(self.engine, self.seen)
        self.arrivals[request_id] = self.num_steps

    def cancel_any(self, again: bool) -> None:
        """Cancels a request in any state; `again`: another request reuses its id at once."""
        request_id = self.draw.choice(list(self.open))
        self.cancel(request_id)
        self.engine.check_integrity()
        if again:
            self.step()
            self.add_any(request_id)


def count_chunks(engine: PagedEngine, seen: collections.Counter[str]) -> None:
    """Counts chunks of prompts that do not reach the prompt's end."""
    if engine._core.loop is None:
        return
    runner = engine._core.loop.executor.runner
    run = runner.run

    def counted(plan: StepPlan, adapter: str | None) -> Any:
        columns = zip(plan.counts, plan.num_logits)
        seen["chunks"] += sum(count > 1 and not num_logits for count, num_logits in columns)
        seen["mixed steps"] += plan.counts[0] == 1 and plan.counts[-1] > 1
        return run(plan, adapter)

    runner.run = counted  # type: ignore[method-assign]


# ------------------------------------------------------------------------------------ the command


def resources() -> collections.Counter[str]:
    """The threads of this process by name, without those that write files and end, and its open
    files."""
    gc.collect()
    for thread in threading.enumerate():
        if thread.name == "hf_paged prefix blocks":
            thread.join()
    found = collections.Counter(f"thread {thread.name}" for thread in threading.enumerate())
    for name in SERVICES:
        del found[f"thread {name}"]
    found["open files"] = psutil.Process().num_fds()
    return found


def play(
    run: Run, num_steps: int, num_requests: int = load_cases.CATALOGUE
) -> tuple[collections.Counter[str], str]:
    """Plays the run. Returns counts of events, and an error with the command that repeats it."""
    known = load_cases.catalogue(run.seed, run.name, run.lora, num_requests)
    before = resources()
    seen, failure = _play(run, num_steps, known)
    lost = resources() - before
    if lost and not failure:
        failure = _failed(run, num_steps, f"at the end, lost {dict(lost)}")
    seen["failures"] += bool(failure)
    return seen, failure


def _failed(run: Run, num_steps: int, what: str) -> str:
    """Says what happened in a run, and how to repeat it."""
    repeat = tools.repeat("load", seed=run.seed, only=run.number, run_steps=num_steps)
    return f"run {run.number}, {what}: {repeat}\n  {run}"


def _play(run: Run, num_steps: int, known: list[Wanted]) -> tuple[collections.Counter[str], str]:
    model = load_cases.build(run.name, run.lora)
    assistant = load_cases.build_assistant(run.name) if run.assisted else None
    draw = random.Random(f"load {run.seed} {run.number}")
    seen: collections.Counter[str] = collections.Counter()
    clients: list[Client] = []
    failure = ""
    start = time.perf_counter()
    with contextlib.ExitStack() as stack:
        if run.tier:
            folder = stack.enter_context(tempfile.TemporaryDirectory())
            tiers = PrefixTiers(folder, disk_bytes=load_cases.TIER_BYTES)
            config = dataclasses.replace(run.config, prefix_tiers=tiers)
            run = dataclasses.replace(run, config=config)
        if run.captured:
            from tests.support.graph_helpers import use_fake_graphs

            use_fake_graphs(stack.enter_context(pytest.MonkeyPatch.context()))
        clients += [Client(run, model, assistant, known, draw) for _ in range(run.num_engines)]
        try:
            while sum(client.num_steps for client in clients) < num_steps:
                draw.choice(clients).act_and_step()
            for client in clients:
                client.end()
            hf_paged.check_integrity(model)
        except Exception as error:
            steps = sum(client.num_steps for client in clients)
            kind = "difference" if isinstance(error, Difference) else type(error).__name__
            trace = "" if isinstance(error, AssertionError) else traceback.format_exc(limit=-6)
            failure = f"{_failed(run, num_steps, f'step {steps}, {kind}')}\n  {error}\n{trace}"
        for client in clients:
            seen += client.seen
            seen["requests"] += client.num_requests
            client.engine.free()
        hf_paged.free(model)
        resources()  # files are written before their folder goes
    seen["milliseconds"] += round(1000 * (time.perf_counter() - start))
    clients.clear()  # also in closures
    return seen, failure


def summary(seen: collections.Counter[str]) -> str:
    seconds = seen["milliseconds"] / 1000
    lines = [f"{name:30}{seen[name]:>12,}" for name in seen if name != "milliseconds"]
    rate = seen["steps"] / seconds if seconds else 0.0
    lines += [f"{'seconds':30}{seconds:>12.1f}", f"{'steps a second':30}{rate:>12.1f}"]
    return "\n".join(lines)


_bytes: list[int] = []  # of this process, after each run


def attempt(seed: int, num_steps: int, number: int) -> tuple[collections.Counter[str], str]:
    tools.quieten()
    run = load_cases.draw_run(seed, number)
    seen, failure = play(run, num_steps)
    trim()
    _bytes.append(psutil.Process().memory_info().rss)
    growth = _bytes[-1] - max(_bytes[: len(KINDS)])
    if growth > GROWTH and not failure:
        what = f"after {len(_bytes)} runs, {growth:,} bytes more than after the first ones"
        failure = _failed(run, num_steps, what)
        seen["failures"] += 1
    return seen, failure


def main() -> int:
    parser = tools.parser(
        __doc__,
        seed=0,
        jobs=1,
        only=int,
        steps=(100_000, "of all runs together"),
        run_steps=(RUN_STEPS, "of one configuration"),
        first=(0, "run to begin with"),
    )
    args = parser.parse_args()
    start = time.perf_counter()
    seen: collections.Counter[str] = collections.Counter()
    count = -(-args.steps // args.run_steps)
    numbers = range(args.first, args.first + count) if args.only is None else [args.only]
    work = functools.partial(attempt, args.seed, args.run_steps)
    for number, result in tools.attempts(work, numbers, args.jobs, HANG_SECONDS):
        if isinstance(result, Lost):
            run = load_cases.draw_run(args.seed, number)
            failure = _failed(run, args.run_steps, result.reason)
            result = {"failures": 1}, failure
        found, failure = result
        seen.update(found, runs=1)
        preemptions = seen["recomputes"] + seen["swaps"]
        counts = f"{seen['runs']} runs, {seen['steps']:,} steps, {preemptions:,} preemptions"
        print(failure or counts, flush=True)
    print(summary(seen))
    seconds = time.perf_counter() - start
    print(f"{counts}, {seen['failures']} failed, {seconds:.0f} s with plain's tokens")
    is_enough = preemptions >= PREEMPTIONS * seen["steps"] or args.only is not None
    if not is_enough:
        print(f"too few preemptions: {PREEMPTIONS:.0%} of the steps are asked for")
    return int(bool(seen["failures"]) or not is_enough)


if __name__ == "__main__":
    sys.exit(main())
