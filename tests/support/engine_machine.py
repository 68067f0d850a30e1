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
from dataclasses import replace
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
from tests.support.engine_helpers import assert_drained, assert_same_as_lone
from tests.support.load_cases import KINDS, User, Wanted
from tests.support.peft_models import peft_state
from tests.support.rooms import fix_prices
from tests.support.user_code import OwnError, Processor
from tests.test_faults import Countdown, failing_allocation

# name, lora
MODELS = [("llama", False), ("llama", True), ("gemma3", False), ("gemma3", True), ("hybrid", False)]
STEPS = 25  # rules of an example

NUM_ASKS, LONGEST = 24, 12  # requests of a model, and the most new tokens of one
ASKS = st.integers(0, NUM_ASKS - 1)
CONFIGS = st.fixed_dictionaries(
    dict(
        max_num_batched_tokens=st.sampled_from([11, 40, 2048]),
        max_chunk_tokens=st.sampled_from([None, 4]),
        preemption=st.sampled_from(["recompute", "swap"]),
        speculation=st.sampled_from([None, "ngram"]),
        capture=st.booleans(),
    )
)

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
        has_tier=st.booleans(),
        config=CONFIGS,
    )
    def start(
        self, kind: tuple[str, bool], size: int | None, has_tier: bool, config: dict[str, Any]
    ) -> None:
        self.name, self.has_lora = kind
        self.twin = get_twin(*kind)
        self.model = copy.deepcopy(self.twin)
        self.state = self.get_state()
        if has_tier:
            folder = self.folder.enter_context(tempfile.TemporaryDirectory())
            config = {**config, "prefix_tiers": PrefixTiers(folder)}
        num_blocks = None if size is None else KINDS[self.name].budget[size]
        config = {**config, "block_size": models.BLOCK_SIZE, "num_blocks": num_blocks}
        self.engine = PagedEngine(self.model, PagedConfig(**config), tokenizer=models.tokenizer())
        self.user = User(self.name, self.engine, self.seen)

    def __init__(self) -> None:
        super().__init__()
        self.engine: Any = None  # `PagedEngine` once an example has started
        self.folder = contextlib.ExitStack()
        self.changes: set[str] = set()
        self.last: int | None = None  # of the last `add`
        self.seen["examples"] += 1

    # -- requests ---------------------------------------------------------------------------------

    def wanted(self, ask: int, has_adapter: bool = True, **changes: Any) -> Wanted:
        """A request with plain's tokens for the current weights."""
        known = load_cases.catalogue(0, self.name, self.has_lora, NUM_ASKS, LONGEST)
        wanted = known[ask] if has_adapter else replace(known[ask], adapter=None)
        key = self.name, self.has_lora, frozenset(self.changes), ask, wanted.adapter
        if key not in _rows:
            _rows[key] = load_cases.plain(self.twin, wanted)
        return replace(wanted, rows=_rows[key], **changes)

    @rule(ask=ASKS, priority=st.sampled_from([0, 0, -1]))
    def add(self, ask: int, priority: int) -> None:
        self.last = ask
        self.user.add(self.wanted(ask), priority=priority)

    @precondition(lambda self: self.last is not None)
    @rule()
    def add_again(self) -> None:
        """The last request again, whose prefix and tokens may be known."""
        self.user.add(self.wanted(self.last))

    @rule(ask=ASKS, call=st.integers(1, 6))
    def add_faulty(self, ask: int, call: int) -> None:
        """A request whose processor raises at one of its calls."""
        wanted, failing = self.wanted(ask, fault=OwnError), Processor("raises", call - 1)
        self.user.add(wanted, logits_processor=[*(wanted.processors or ()), failing])

    @property
    def running(self) -> list[str]:
        return sorted(set(self.user.open) - self.user.cancelled)

    @precondition(lambda self: self.running)
    @rule(data=st.data())
    def cancel(self, data: Any) -> None:
        request_id = data.draw(st.sampled_from(self.running))
        try:
            self.user.cancel(request_id)
        except ValueError:  # it ended in a step of `engine.generate`
            self.user.step()
            assert request_id not in self.user.open, f"{request_id} cannot be cancelled"

    @rule(ask=ASKS)
    def generate_with_engine(self, ask: int) -> None:
        """`engine.generate`, whose steps also run the other requests."""
        wanted = self.wanted(ask)
        (result,) = self.engine.generate([wanted.prompt], wanted.options, **wanted.given)
        if isinstance(result.error, OutOfBlocksError) and "at most" in str(result.error):
            self.seen["too large"] += 1
            return
        assert_same_as_lone(wanted.rows, result, wanted.options, "`engine.generate`")
        self.seen["calls of the engine"] += 1

    @rule(ask=ASKS)
    def generate(self, ask: int) -> None:
        """`model.generate` with the model's own pool."""
        self.user.generate(self.model, self.wanted(ask))

    # -- steps ------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 6))
    def step(self, count: int) -> None:
        for _ in range(count):
            self.user.step()

    @rule()
    def drain(self) -> None:
        self.user.drain()

    @rule(call=st.integers(1, 4), count=st.integers(1, 5))
    def step_with_fault(self, call: int, count: int) -> None:
        """An allocation of a step raises: the next step repeats that step, and no request ends."""
        try:
            with failing_allocation(Countdown(call, MemoryError)):
                self.step(count)
        except MemoryError:
            self.seen["failed steps"] += 1
            self.check()
            self.user.step()

    @rule(ask=ASKS, call=st.integers(1, 6))
    def generate_with_fault(self, ask: int, call: int) -> None:
        wanted = self.wanted(ask, has_adapter=False)
        try:
            with failing_allocation(Countdown(call, MemoryError)):
                self.user.generate(self.model, wanted)
        except MemoryError:
            self.seen["failed calls"] += 1

    # -- what changes between steps ---------------------------------------------------------------

    def change_both(self, which: str) -> None:
        change(self.model, which)
        change(self.twin, which)
        self.changes ^= {which}

    @rule(which=st.sampled_from(["all", "few", "adapter"]))
    def handle_weight_change(self, which: str) -> None:
        """Without unfinished requests: later ones get the new weights' tokens."""
        if which == "adapter" and not self.has_lora:
            which = "all"
        self.drain()
        self.change_both(which)
        self.seen["changed weights"] += 1

    @rule(
        policy=st.sampled_from(["recompute", "keep"]),
        which=st.sampled_from(["all", "few"]),
        ask=ASKS,
    )
    def update_and_undo(self, policy: str, which: str, ask: int) -> None:
        """A call within `weights_update` gets the new weights' tokens; unfinished requests the old
        ones'."""
        with self.engine.weights_update(policy):
            self.change_both(which)
            self.user.generate(self.model, self.wanted(ask, has_adapter=False))
            self.change_both(which)

    @rule(mode=st.booleans())
    def set_mode(self, mode: bool) -> None:
        self.model.train(mode)
        self.state = self.state | {"training": self.get_state()["training"]}

    @rule(ask=ASKS)
    def pause(self, ask: int) -> None:
        with self.engine.pause():
            with pytest.raises(RuntimeError, match="paused by this thread"):
                self.engine.step()
            self.user.add(self.wanted(ask, has_adapter=False))

    @rule()
    def reset_prefix_cache(self) -> None:
        self.engine.reset_prefix_cache()

    @rule()
    def free_model(self) -> None:
        hf_paged.free(self.model)

    @precondition(lambda self: self.user.num_requests > 2)
    @rule()
    def free_engine(self) -> None:
        self.note_tier()
        self.user.free()

    # -- invariants -------------------------------------------------------------------------------

    @invariant()
    def check(self) -> None:
        if self.engine is None:  # before `start`
            return
        self.engine.check_integrity()
        assert_pool_empty(self.model)
        left = sorted(self.user.open)
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
    args = tools.parser(__doc__, seed=0, examples=2000).parse_args()
    tools.quieten()
    fix_prices()
    start = time.perf_counter()
    seen = run(args.examples, seed=args.seed)
    for name, count in sorted(seen.items()):
        print(f"{name:30}{count:>12,}")
    seconds = time.perf_counter() - start
    print(f"{seen['examples']:,} cases, {seen['steps']:,} steps, 0 failed, {seconds:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
