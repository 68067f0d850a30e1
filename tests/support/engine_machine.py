"""
A state machine over the whole engine, with plain `generate` as its model:

    python -m tests.support.engine_machine --examples 2000 [--seed 0]

Rules add and cancel requests, take steps, change weights, modes and caches, call `generate` in
between and let memory run out once. After each rule the pools are intact, the streamed tokens are
the first ones of plain `generate` on that request alone, and an engine without requests holds no
block. A finished request has all of plain's tokens.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import functools
import os
import sys
import tempfile
import threading
import time
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import pytest
import torch
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

import hf_paged
from hf_paged import OutOfBlocksError, PagedConfig, PagedEngine, PrefixTiers
from tests.support import load_cases, models, tools
from tests.support.checks import assert_pool_empty, model_state
from tests.support.engine_helpers import MANY_ENDS, assert_drained, assert_same_as_lone, prompts
from tests.support.load_cases import KINDS, Requests, Wanted
from tests.support.peft_models import ADAPTERS, peft_state
from tests.support.prices import fix_prices
from tests.test_faults import Countdown, FailingProcessor, OnPurpose, failing_allocation

# name, lora
MODELS = [("llama", False), ("llama", True), ("gemma3", False), ("gemma3", True), ("hybrid", False)]
STEPS = 25  # rules of an example
MAX_STEPS_TO_DRAIN = 2000

_GREEDY, _ENDING = {"do_sample": False}, {"eos_token_id": MANY_ENDS}
OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {**_GREEDY, "max_new_tokens": 12},
    "greedy_eos": {**_GREEDY, **_ENDING, "max_new_tokens": 12},
    "sample": {"do_sample": True, "max_new_tokens": 9},
    "samples": {"do_sample": True, "max_new_tokens": 7, "num_return_sequences": 3, **_ENDING},
    "beams": {**_GREEDY, "max_new_tokens": 8, "num_beams": 3},
    "beams_eos": {
        **dict(**_GREEDY, max_new_tokens=9, num_beams=3, num_return_sequences=2),
        **dict(**_ENDING, early_stopping=True),
    },
}
_FRONT, _TAIL = prompts(16, 9, seed=7)
PROMPTS = [
    _TAIL[:3],
    [*_FRONT, *_TAIL[:2]],
    [*_FRONT, *_TAIL[2:]],
    _FRONT[:10],
    4 * _TAIL[:4],
    prompts(27, seed=8)[0],
]

NAMES = st.sampled_from(sorted(OPTIONS))
TEXTS = st.integers(0, len(PROMPTS) - 1)
SEEDS = st.integers(0, 1)
ADAPTER = st.sampled_from([None, *ADAPTERS])

get_twin = functools.cache(load_cases.build)  # models for plain `generate`, which examples share
_rows: dict[Any, list[list[int]]] = {}  # plain's new tokens, by request and changes of the weights


@torch.no_grad()
def change(model: Any, which: str) -> None:
    """Changes weights in place, exactly undone by the same change."""
    if which == "adapter":
        for name, parameter in model.named_parameters():
            if ".lora_B.first." in name:
                parameter.neg_()
        return
    embeddings = model.get_input_embeddings().weight
    (embeddings if which == "all" else embeddings[:, :4]).neg_()


class EngineMachine(RuleBasedStateMachine):
    """One engine and its user."""

    seen: collections.Counter[str] = collections.Counter()  # events of all examples

    @initialize(
        kind=st.sampled_from(MODELS),
        size=st.sampled_from([None, 0, 1]),
        batched=st.sampled_from([11, 40, 2048]),
        chunk=st.sampled_from([None, 4]),
        preemption=st.sampled_from(["recompute", "swap"]),
        speculation=st.sampled_from([None, "ngram"]),
        has_tier=st.booleans(),
        capture=st.booleans(),
    )
    def start(
        self,
        kind: tuple[str, bool],
        size: int | None,
        batched: int,
        chunk: int | None,
        preemption: str,
        speculation: str | None,
        has_tier: bool,
        capture: bool,
    ) -> None:
        self.name, self.has_lora = kind
        self.twin = get_twin(*kind)
        self.model = copy.deepcopy(self.twin)
        self.state = self.get_state()
        folder = self.folder.enter_context(tempfile.TemporaryDirectory()) if has_tier else None
        self.engine = PagedEngine(
            self.model,
            PagedConfig(
                block_size=models.BLOCK_SIZE,
                num_blocks=None if size is None else KINDS[self.name].budget[size],
                max_num_batched_tokens=batched,
                max_chunk_tokens=chunk,
                preemption=preemption,
                speculation=speculation,
                capture=capture,
                prefix_tiers=PrefixTiers(folder) if has_tier else None,
            ),
        )

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None  # `PagedEngine` once an example has started
        self.folder = contextlib.ExitStack()
        self.changes: set[str] = set()
        self.requests = Requests(self.seen)
        self.num_requests = 0
        self.last: tuple[Any, ...] | None = None  # arguments of the last `add`
        self.seen["examples"] += 1

    # -- requests ---------------------------------------------------------------------------------

    def wanted(self, text: int, name: str, seed: int, adapter: str | None, is_turn: bool) -> Wanted:
        """A request with plain's tokens for the current weights; `is_turn`: its prompt goes on
        after an answer."""
        prompt, adapter = PROMPTS[text], adapter if self.has_lora else None
        if is_turn:
            (row,) = self.plain_rows(prompt, "greedy", seed, adapter)
            prompt = [*prompt, *row[:10], 5, 6]
        rows = self.plain_rows(prompt, name, seed, adapter)
        return Wanted(prompt, OPTIONS[name], adapter, seed, False, rows)

    def plain_rows(
        self, prompt: list[int], name: str, seed: int, adapter: str | None
    ) -> list[list[int]]:
        key = (self.name, self.has_lora, frozenset(self.changes), tuple(prompt), name, adapter)
        key = (*key, seed if OPTIONS[name]["do_sample"] else None)
        if key not in _rows:
            wanted = Wanted(prompt, OPTIONS[name], adapter, seed, False, [])
            _rows[key] = load_cases.plain(self.twin, wanted)
        return _rows[key]

    def add_request(
        self, wanted: Wanted, priority: int = 0, countdown: Countdown | None = None
    ) -> None:
        request_id = f"r{self.num_requests}"
        try:
            self.engine.add_request(
                wanted.prompt,
                wanted.options,
                request_id=request_id,
                seed=wanted.seed,
                adapter=wanted.adapter,
                priority=priority,
                logits_processor=None if countdown is None else [FailingProcessor(countdown)],
            )
        except OutOfBlocksError:
            assert self.engine.config.num_blocks is not None
            self.seen["too large"] += 1
            return
        self.num_requests += 1
        self.requests.add(request_id, wanted)
        if countdown is not None:
            self.requests.faulty[request_id] = OnPurpose

    @rule(
        text=TEXTS,
        name=NAMES,
        seed=SEEDS,
        adapter=ADAPTER,
        is_turn=st.booleans(),
        priority=st.sampled_from([0, 0, -1]),
    )
    def add(
        self, text: int, name: str, seed: int, adapter: str | None, is_turn: bool, priority: int
    ) -> None:
        self.last = text, name, seed, adapter, is_turn
        self.add_request(self.wanted(*self.last), priority)

    @precondition(lambda self: self.last is not None)
    @rule()
    def add_again(self) -> None:
        """The last request again, whose prefix and tokens may be known."""
        self.add_request(self.wanted(*self.last))

    @rule(text=TEXTS, name=NAMES, adapter=ADAPTER, call=st.integers(1, 6))
    def add_faulty(self, text: int, name: str, adapter: str | None, call: int) -> None:
        """A request whose processor raises at one of its calls."""
        wanted = self.wanted(text, name, 0, adapter, False)
        self.add_request(wanted, countdown=Countdown(call, OnPurpose))

    @property
    def running(self) -> list[str]:
        return sorted(set(self.requests.open) - self.requests.cancelled)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(self.running))
        try:
            self.engine.cancel(request_id)
        except ValueError:  # it ended in a step of `engine.generate`
            self.step_once()
            assert request_id not in self.requests.open, f"{request_id} cannot be cancelled"
            return
        self.requests.cancelled.add(request_id)

    @rule(text=TEXTS, name=NAMES, adapter=ADAPTER, is_turn=st.booleans())
    def generate_with_engine(
        self, text: int, name: str, adapter: str | None, is_turn: bool
    ) -> None:
        """`engine.generate`, whose steps also run the other requests."""
        wanted = self.wanted(text, name, 0, adapter, is_turn)
        (result,) = self.engine.generate(
            [wanted.prompt], wanted.options, seed=0, adapter=wanted.adapter
        )
        if isinstance(result.error, OutOfBlocksError) and "at most" in str(result.error):
            self.seen["too large"] += 1
            return
        assert_same_as_lone(wanted.rows, result, wanted.options, "`engine.generate`")
        self.seen["calls of the engine"] += 1

    @rule(text=TEXTS, name=NAMES, seed=SEEDS, adapter=ADAPTER, is_turn=st.booleans())
    def generate(self, text: int, name: str, seed: int, adapter: str | None, is_turn: bool) -> None:
        """`model.generate` with the model's own pool."""
        wanted = self.wanted(text, name, seed, adapter, is_turn)
        rows = load_cases.plain(self.model, wanted, **load_cases.paged(self.name))
        assert rows == wanted.rows, "`generate` gives other tokens than plain"
        self.seen["calls"] += 1

    # -- steps ------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.step_once()

    def step_once(self) -> None:
        for output in self.engine.step():
            self.requests.read(output)
        self.seen["steps"] += 1

    @rule()
    def drain(self) -> None:
        for _ in range(MAX_STEPS_TO_DRAIN):
            if not self.engine.has_unfinished:
                break
            self.step_once()
        assert not self.requests.open, f"no result of {sorted(self.requests.open)}"

    @rule(call=st.integers(1, 4), count=st.integers(1, 5))
    def step_with_fault(self, call: int, count: int) -> None:
        """An allocation of a step raises: the next step repeats that step, and no request ends."""
        try:
            with failing_allocation(Countdown(call, MemoryError)):
                self.step(count)
        except MemoryError:
            self.seen["failed steps"] += 1
            self.check()
            self.step_once()

    @rule(text=TEXTS, name=NAMES, call=st.integers(1, 6))
    def generate_with_fault(self, text: int, name: str, call: int) -> None:
        """An allocation of a `generate` call raises."""
        wanted = self.wanted(text, name, 0, None, False)
        try:
            with failing_allocation(Countdown(call, MemoryError)):
                rows = load_cases.plain(self.model, wanted, **load_cases.paged(self.name))
        except MemoryError:
            self.seen["failed calls"] += 1
        else:
            assert rows == wanted.rows, "`generate` gives other tokens than plain"

    # -- what changes between steps ---------------------------------------------------------------

    def change_both(self, which: str) -> None:
        change(self.model, which)
        change(self.twin, which)
        self.changes ^= {which}

    @rule(which=st.sampled_from(["all", "few", "adapter"]))
    def change_weights(self, which: str) -> None:
        """Without unfinished requests: later ones get the new weights' tokens."""
        if which == "adapter" and not self.has_lora:
            which = "all"
        self.drain()
        self.change_both(which)
        self.seen["changed weights"] += 1

    @rule(
        policy=st.sampled_from(["recompute", "keep"]),
        which=st.sampled_from(["all", "few"]),
        text=TEXTS,
        name=NAMES,
    )
    def update_and_undo(self, policy: str, which: str, text: int, name: str) -> None:
        """A call within `weights_update` gets the new weights' tokens; unfinished requests the old
        ones'."""
        with self.engine.weights_update(policy):
            self.change_both(which)
            self.generate(text, name, 0, None, False)
            self.change_both(which)

    @rule(mode=st.booleans())
    def set_mode(self, mode: bool) -> None:
        self.model.train(mode)
        self.state = self.state | {"training": self.get_state()["training"]}

    @rule(text=TEXTS, name=NAMES)
    def pause(self, text: int, name: str) -> None:
        with self.engine.pause():
            with pytest.raises(RuntimeError, match="paused by this thread"):
                self.engine.step()
            self.add_request(self.wanted(text, name, 0, None, False))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @rule()
    def free_model(self) -> None:
        hf_paged.free(self.model)

    @precondition(lambda self: self.num_requests > 2)
    @rule()
    def free_engine(self) -> None:
        self.note_tier()
        self.engine.free()
        self.requests.cancelled |= set(self.requests.open)
        self.seen["engines freed"] += 1

    # -- invariants -------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        if self.engine is None:  # before `start`
            return
        self.engine.check_integrity()
        assert_pool_empty(self.model)
        left = sorted(self.requests.open)
        assert self.engine.has_unfinished or not left, f"{left} are lost"
        state = self.get_state()
        changed = [name for name in state if state[name] != self.state[name]]
        assert not changed, f"the model is not as it was: {changed}"
        if not self.engine.has_unfinished:
            assert_drained(self.engine)

    def note_tier(self) -> None:
        self.seen["restored blocks"] += self.engine.stats().tier_restored_blocks

    def get_state(self) -> dict[str, Any]:
        return peft_state(self.model) if self.has_lora else model_state(self.model)

    def teardown(self) -> None:
        if self.engine is None:
            return
        try:
            self.drain()
            self.check()
            self.note_tier()
        finally:
            self.engine.free()
            hf_paged.free(self.model)
            for which in sorted(self.changes):
                change(self.twin, which)
            for thread in threading.enumerate():
                if thread.name == "hf_paged prefix blocks":
                    thread.join()  # before its folder goes
            self.folder.close()


def run(
    num_examples: int, num_steps: int = STEPS, seed: int | None = None, shrinks: bool = True
) -> collections.Counter[str]:
    """Plays examples, always the same ones for a seed; returns counts of events. Raises the error
    of the first example that fails, which `shrinks` makes shorter."""
    EngineMachine.seen.clear()
    machine = EngineMachine if seed is None else hypothesis.seed(seed)(EngineMachine)
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=num_examples,
            stateful_step_count=num_steps,
            deadline=None,
            database=None,
            derandomize=seed is None,
            print_blob=True,
            report_multiple_bugs=False,
            phases=[Phase.generate, *[Phase.shrink] * shrinks],
            suppress_health_check=list(HealthCheck),
        ),
    )
    return EngineMachine.seen


def main() -> int:
    parser = tools.parser(__doc__, seed=0)
    parser.add_argument("--examples", type=int, default=2000)
    args = parser.parse_args()
    tools.quieten()
    fix_prices()
    start = time.perf_counter()
    seen = run(args.examples, seed=args.seed)
    for name, count in sorted(seen.items()):
        print(f"{name:30}{count:>12,}")
    print(
        f"{seen['examples']:,} cases, {seen['steps']:,} steps, 0 failed,"
        f" {time.perf_counter() - start:.0f} s"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
