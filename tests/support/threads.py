"""Random calls of `generate` from four threads at once on one model: `python -m
tests.support.threads --mixes 200`.

Each call must end like plain `generate` alone: with the same tokens, with the exception of its user
code, or, in the main thread, by a real SIGINT from another process. With a budget of blocks,
`OutOfBlocksError` may end it where other calls keep blocks: ended rows of a returned cache. After
each mix the pools are intact and empty, the model is unchanged and no loop is left. The exit code
is 1 otherwise; every failure is printed with the numbers that repeat its choices.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import os
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged import OutOfBlocksError
from hf_paged.generation import install
from hf_paged.overlap import SharedLoop, _loops
from tests.support import models, tools
from tests.support.checks import assert_pool_empty, model_state
from tests.support.interrupts import Interrupter
from tests.support.thread_mixes import ENDS, Call, Mix, Outcome, draw, get_model, play
from tests.support.user_code import OwnError

HANG_SECONDS = 60.0  # a mix takes a second or two
TOLERANCE = 1e-3  # of scores, whose standard deviation is above one
# in half precision, between the best two scores: another shape may choose the other token
NEAR_TIE = 0.5


def compare(
    call: Call, plain: Outcome, paged: Outcome, may_run_out: bool, is_interrupted: bool
) -> tuple[str, str]:
    """Outcome of the paged call, and an error if it is wrong."""
    error = paged.error
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "" if is_interrupted else f"interrupted by another's signal:\n{paged}"
    if isinstance(error, OutOfBlocksError):
        return "out of blocks", "" if may_run_out else f"no call kept the blocks:\n{paged}"
    if plain.error is not None:
        if type(error) is not type(plain.error):
            return "raised", f"plain raised {plain.error!r}, paged:\n{paged}"
        own = isinstance(error, OwnError) and str(error) != call.owner
        return "raised", f"the error is another call's:\n{paged}" if own else ""
    if error is not None:
        return "raised", f"plain gave tokens, paged:\n{paged}"
    assert plain.tokens is not None and paged.tokens is not None
    if plain.tokens.is_inference() != paged.tokens.is_inference():
        return "equal", f"plain's tokens are an inference tensor: {plain.tokens.is_inference()}"
    if call.is_autocast:
        return "autocast", compare_half(plain, paged)
    if not (plain.tokens.shape == paged.tokens.shape and torch.equal(plain.tokens, paged.tokens)):
        return "equal", f"plain's {plain}\npaged {paged}"
    if call.streamer is not None and call.streamer[0] == "by row":
        return "equal", compare_rows(call, paged)
    if plain.told != paged.told:
        return "equal", f"the streamer was told {paged.told}, by plain {plain.told}"
    return "equal", compare_shown(call, plain, paged)


def compare_shown(call: Call, plain: Outcome, paged: Outcome) -> str:
    """Compares scores of rows whose end the processor does not see."""
    if "eos_token_id" in call.options or call.options.get("num_beams", 1) > 1:
        return ""
    if len(plain.shown) != len(paged.shown):
        return f"the processor was called {len(paged.shown)}, by plain {len(plain.shown)} times"
    for step, (one, other) in enumerate(zip(plain.shown, paged.shown)):
        (ids, scores, is_inference), (others, found, found_inference) = one, other
        if not torch.equal(ids, others):
            return f"the processor was shown other ids in step {step}"
        if (difference := float((scores - found).abs().max())) > TOLERANCE:
            return f"the processor was shown scores {difference:.1e} from plain's in step {step}"
        if is_inference != found_inference:
            return f"scores in step {step} are an inference tensor: {found_inference}"
    return ""


def compare_half(plain: Outcome, paged: Outcome) -> str:
    """Compares tokens up to the first near tie among the watched scores, which must be in half
    precision."""
    for step, ((ids, scores, _), (others, found, _)) in enumerate(zip(plain.shown, paged.shown)):
        if not torch.equal(ids, others):
            return f"the processor was shown other ids in step {step}"
        if not torch.equal(found, found.bfloat16().float()):
            return f"the scores of step {step} were not computed in half precision"
        best, second = scores.topk(2, dim=-1).values.T
        if float((best - second).min()) < NEAR_TIE:
            break
    return ""


def compare_rows(call: Call, paged: Outcome) -> str:
    assert paged.tokens is not None
    width = max(length for _, length in call.texts)
    for row, (told, (_, length)) in enumerate(zip(paged.told, call.texts)):
        new = paged.tokens[row, width:].tolist()
        if "eos_token_id" in call.options:
            end = next((place for place, token in enumerate(new) if token in ENDS), len(new) - 1)
            new = new[: end + 1]
        found = [token for part in told if part != "end" for each in part for token in flat(each)]
        prompt = paged.tokens[row, width - length : width].tolist()
        # a criterion may end a row earlier
        is_same = found[:length] == prompt and found[length:] == new[: len(found) - length]
        is_whole = call.criterion is not None or len(found) == length + len(new)
        if not (is_same and is_whole and told.count("end") == 1):
            return f"the streamer of row {row} was told {told}, the tokens are {prompt} {new}"
    return ""


def flat(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


# ---------------------------------------------------------------------------------------- one mix


class Observer:
    """Counts the events that the mixes should cause, and collects the memories in use."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.memories: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        end_step, memory_for, run = SharedLoop._end_step, install.memory_for, SharedLoop.run

        def counted_end(loop: SharedLoop, ready: Any) -> None:
            owners = {generation.parent or generation for generation, _ in ready}
            late = any(caller.is_late for caller in list(loop._callers.values()))
            self.counts.update({"steps": 1, "shared steps": len(owners) > 1, "late callers": late})
            end_step(loop, ready)

        def counted_run(loop: SharedLoop, *args: Any) -> Any:
            before = loop.loop.scheduler.preemption.num_preemptions
            try:
                return run(loop, *args)
            finally:
                self.counts["calls with preemptions"] += (
                    loop.loop.scheduler.preemption.num_preemptions > before
                )

        def noted_memory(*args: Any) -> Any:
            self.memories.add(memory := memory_for(*args))
            return memory

        with (
            mock.patch.multiple(SharedLoop, _end_step=counted_end, run=counted_run),
            mock.patch.object(install, "memory_for", noted_memory),
        ):
            yield


class Hang(Exception):
    """The threads of a mix did not end; later results would be meaningless."""


def run_mix(mix: Mix, observer: Observer, interrupter: Interrupter | None = None) -> list[str]:
    """Runs a mix; returns error messages. Raises `Hang`, with the stacks of all threads."""
    model = get_model(mix.model)
    hf_paged.free(model)
    warm_up(model)
    before = model_state(model)
    wrong = play_mix(mix, model, observer, interrupter)
    if (state := model_state(model)) != before:
        wrong.append(f"the model was {before} and is {state}")
    return wrong + after_mix(model, observer)


def play_mix(
    mix: Mix, model: PreTrainedModel, observer: Observer, interrupter: Interrupter | None
) -> list[str]:
    expected = [[play(model, call, is_paged=False) for call in own] for own in mix.calls]
    found: list[list[Outcome]] = [[] for _ in mix.calls]
    barrier = threading.Barrier(len(mix.calls))

    def work(thread: int) -> None:
        barrier.wait(HANG_SECONDS)
        for index, call in enumerate(mix.calls[thread]):
            around = None
            if interrupter is not None and (thread, index) == (0, mix.interrupted):
                delay = mix.delay * expected[thread][index].seconds
                around = functools.partial(interrupt, interrupter, delay)
            time.sleep(call.pause)
            found[thread].append(play(model, call, is_paged=True, around=around))

    others = range(int(mix.in_main), len(mix.calls))
    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in others]
    clock = threading.Timer(HANG_SECONDS + 10, exit_hung, (mix,))
    clock.daemon = True
    clock.start()
    deadline, switch_seconds = time.monotonic() + HANG_SECONDS, sys.getswitchinterval()
    sys.setswitchinterval(mix.switch_seconds)
    try:
        for thread in threads:
            thread.start()
        if mix.in_main:
            work(0)
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
    finally:
        clock.cancel()
        sys.setswitchinterval(switch_seconds)
    if any(thread.is_alive() for thread in threads):
        raise Hang(f"{stacks()}\n{mix}")
    wrong: list[str] = []
    for number, (calls, plain, paged) in enumerate(zip(mix.calls, expected, found)):
        if len(paged) != len(calls):
            wrong.append(f"thread {number} ended after {len(paged)} of {len(calls)} calls")
        for index, (call, one, other) in enumerate(zip(calls, plain, paged)):
            is_interrupted = (number, index) == (0, mix.interrupted)
            how, problem = compare(call, one, other, mix.may_run_out, is_interrupted)
            observer.counts["calls"] += 1
            observer.counts[how] += 1
            if problem:
                wrong.append(f"{call}: {problem}")
    return wrong


def after_mix(model: PreTrainedModel, observer: Observer) -> list[str]:
    wrong = []
    left = {key: shared for loops in _loops.values() for key, shared in loops.items()}
    if left:
        wrong.append(f"loops are left: {left}")
    if torch.is_autocast_enabled("cpu") or torch.is_inference_mode_enabled():
        wrong.append("this thread is left in half precision or inference mode")
    try:
        assert_pool_empty(model, "all calls")
        for memory in list(observer.memories):
            memory.check_integrity()
            if memory.num_used:
                wrong.append(f"{memory.num_used} blocks are in use in another memory of the model")
    except AssertionError:
        wrong.append(traceback.format_exc())
    return wrong


def warm_up(model: PreTrainedModel) -> None:
    """Makes a first call, which checks how the model can run, with a few forwards."""
    inputs = models.prompt("llama", 1, 3)
    model.generate(**inputs, max_new_tokens=1, do_sample=False, **models.PAGED)


def interrupt(interrupter: Interrupter, delay: float, function: Callable[[], None]) -> None:
    errors: list[Exception] = []

    def caught() -> None:
        try:
            function()
        except Exception as error:
            errors.append(error)

    if interrupter.run(caught, delay):
        raise KeyboardInterrupt
    if errors:
        raise errors[0]


def stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def exit_hung(mix: Mix) -> None:
    """Called if the main thread itself hangs."""
    print(f"HANGS: {mix}\n{stacks()}", file=sys.stderr, flush=True)
    os._exit(1)


def run_mixes(numbers: Sequence[int], seed: int) -> int:
    failed, interrupts = 0, 0
    observer = Observer()
    with observer.installed(), Interrupter() as interrupter:
        for number in numbers:
            mix = draw(seed, number)
            interrupts += mix.interrupted is not None
            repeat = tools.repeat("threads", seed=seed, only=number, repeat=20)
            try:
                wrong = run_mix(mix, observer, interrupter)
            except Hang as hang:
                print(f"mix {number} HANGS: {repeat}\n{hang}", flush=True)
                os._exit(1)
            if wrong:
                failed += 1
                print("\n".join([f"mix {number} ({mix.model}) FAILED: {repeat}", *wrong]))
                hf_paged.free(get_model(mix.model))
                observer.memories.clear()
                _loops.clear()
    counts = observer.counts
    print(", ".join(f"{name}: {counts[name]}" for name in sorted(counts)))
    calls = counts["calls"]
    print(f"{len(numbers)} mixes, {calls} calls, {interrupts} interrupts, {failed} wrong")
    return failed


def main() -> int:
    repeat = 1, "of each: threads differ in timing"
    parser = tools.parser(__doc__, seed=0, only=int, mixes=200, repeat=repeat)
    arguments = parser.parse_args()
    tools.quieten()
    only = arguments.only
    numbers = range(arguments.mixes) if only is None else range(only, only + 1)
    failed = sum(run_mixes(numbers, arguments.seed) for _ in range(arguments.repeat))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
