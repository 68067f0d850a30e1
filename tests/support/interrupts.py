"""
Real signals, whose handlers raise, at random moments of `generate` and the engine:
`python -m tests.support.interrupts --count 1000 [--calls]`.

A separate process sends them, so they arrive between any two bytecodes. With `--calls`, they arrive
as a random function of any package is entered, such as a context's `__exit__`, which then does
nothing. The caller keeps the exception, as a notebook does. After each: the pool is
intact, no ended call holds a block, the model is unchanged, and later calls give plain's tokens.
The exit code is 1 otherwise; every failure is printed with the number that repeats its choices
(`--seed`).
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.checks import model_state
from tests.support.engine_helpers import build_diff_llama

NEW_TOKENS = 6
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
MODES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "sampled": {"do_sample": True, "temperature": 1.0, "max_new_tokens": NEW_TOKENS},
    "beams": {"num_beams": 3, **GREEDY},
}
SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    delay, number = line.split()
    time.sleep(float(delay))
    os.kill(os.getppid(), int(number))
    print(flush=True)
"""


class Requeued(Exception):
    """Of a handler of SIGUSR1, as Slurm sends it before a job's limit."""


RAISED: dict[int, type[BaseException]] = {
    signal.SIGINT: KeyboardInterrupt,
    signal.SIGTERM: SystemExit,
    signal.SIGUSR1: Requeued,
}


class Case:
    """A workload to interrupt repeatedly. `run` is interrupted; `check` returns what is wrong
    afterwards."""

    model: PreTrainedModel
    # errors that a request of the interrupted run may end with
    injected: tuple[type[BaseException], ...] = (Requeued,)

    def run(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError


class Generate(Case):
    """`generate` with rows of different lengths."""

    def __init__(self, model: PreTrainedModel, mode: str) -> None:
        self.model, self.options = model, MODES[mode]
        self.inputs = models.padded_prompt(
            "t5" if model.config.is_encoder_decoder else "llama", (11, 4, 9)
        )
        self.expected = self.tokens({})

    def tokens(self, paged: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(3)
        return self.model.generate(**self.inputs, **self.options, **paged)

    def run(self) -> None:
        self.tokens(models.PAGED)

    def check(self) -> None:
        hf_paged.check_integrity(self.model)
        assert hf_paged.memory_stats(self.model).used_blocks == 0, (
            "a call that is gone holds blocks"
        )
        assert torch.equal(self.tokens(models.PAGED), self.expected), (
            "the next call gives other tokens"
        )
        hf_paged.check_integrity(self.model)
        assert hf_paged.memory_stats(self.model).used_blocks == 0, "the next call leaves blocks"


class Engine(Case):
    """An engine whose requests run by `generate`, `stream`, or steps that continue after the
    interrupt."""

    def __init__(self, model: PreTrainedModel, how: str, **config: Any) -> None:
        self.model, self.how = model, how
        self.engine = PagedEngine(model, PagedConfig(block_size=8, **config))
        self.prompts = [models.token_ids(1, n, seed=n)[0].tolist() for n in (9, 14, 5, 20)]
        self.options = [GREEDY, {**GREEDY, "num_beams": 2}, MODES["sampled"], GREEDY]
        self.expected = [self.lone(*pair) for pair in zip(self.prompts, self.options)]
        self.outputs: list[Any] = []
        self.run()
        self.check()
        self.num_preemptions = self.engine.stats().num_preemptions

    def lone(self, prompt: list[int], options: dict[str, Any]) -> list[int]:
        torch.manual_seed(7)
        ids = torch.tensor([prompt])
        return self.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[0].tolist()

    def add(self) -> None:
        for number, (prompt, options) in enumerate(zip(self.prompts, self.options)):
            self.engine.add_request(prompt, options, request_id=str(number), seed=7)

    def run(self) -> None:
        engine, outputs = self.engine, self.outputs
        if self.how == "generate":
            engine.generate(self.prompts, self.options, seed=[7] * len(self.prompts))
        elif self.how == "stream":
            with contextlib.closing(
                engine.stream(self.prompts, self.options, seed=[7] * len(self.prompts))
            ) as stream:
                for _ in stream:
                    pass
        else:
            self.add()
            while engine.has_unfinished:
                outputs += engine.step()

    def drain(self) -> None:
        """Runs the requests that are left, and checks the results of all. Those that an interrupt
        kept from being added are the last ones; one whose token was being chosen may have ended
        with an error."""
        engine = self.engine
        while engine.has_unfinished:
            self.outputs += engine.step()
            engine.check_integrity()
        results = {o.request_id: o.result for o in self.outputs if o.result is not None}
        assert sum(o.result is not None for o in self.outputs) == len(results), (
            "a result was told twice"
        )
        told: dict[str, list[int]] = {name: [] for name in results}
        for output in self.outputs:
            told[output.request_id] += output.new_tokens.values()
        self.outputs.clear()
        for number in range(len(results)):
            result = results[str(number)]
            tokens = told[str(number)]  # none of beams, whose tokens are final only at the end
            assert tokens == result.token_ids[: len(tokens)], "a token was told twice"
            if not (
                isinstance(result.error, self.injected)
                or str(result.error).startswith("interrupted by")
            ):
                assert tokens in ([], result.token_ids), "a token was not told"
                self.compare(number, result)

    def check(self) -> None:
        engine = self.engine
        engine.check_integrity()
        if self.how == "steps":
            self.drain()
        assert not engine.has_unfinished, "requests are left of a caller that is gone"
        assert engine.stats().used_blocks == 0, "blocks are held without a use"
        for number, result in enumerate(
            engine.generate(self.prompts, self.options, seed=[7] * len(self.prompts))
        ):
            self.compare(number, result)
        engine.check_integrity()
        assert not engine.has_unfinished and engine.stats().used_blocks == 0

    def compare(self, number: int, result: Any) -> None:
        if result.error is not None:
            raise result.error
        assert result.prompt_ids + result.token_ids == self.expected[number], (
            f"request {number} has other tokens"
        )


def build_engine_in_a_tight_pool(preemption: str) -> Engine:
    # storage of pages has larger blocks, which preempt no request
    case = Engine(
        models.build("llama"), "steps", num_blocks=9, preemption=preemption, storage="blocks"
    )
    assert case.num_preemptions, "the pool is not small enough"
    return case


# kind -> what builds it, with its model
CASES: dict[str, Callable[[], Case]] = {
    **{
        f"generate, {mode}": functools.partial(
            lambda mode: Generate(models.build("llama"), mode), mode
        )
        for mode in MODES
    },
    "generate, encoder-decoder, greedy": lambda: Generate(models.build("t5"), "greedy"),
    "generate, encoder-decoder, beams": lambda: Generate(models.build("t5"), "beams"),
    "generate, in transformers' loop": lambda: Generate(build_diff_llama(), "greedy"),
    "engine.generate": lambda: Engine(models.build("llama"), "generate"),
    "engine.stream": lambda: Engine(models.build("llama"), "stream"),
    "engine.step": lambda: Engine(models.build("llama"), "steps"),
    "engine.step, row by row": lambda: Engine(build_diff_llama(), "steps"),
    "engine.step, recompute": lambda: build_engine_in_a_tight_pool("recompute"),
    "engine.step, swap": lambda: build_engine_in_a_tight_pool("swap"),
}


class Interrupter:
    """Sends this process a signal after a delay, whose handler raises its error of `RAISED` in the
    running code."""

    def __enter__(self) -> Interrupter:
        self._is_armed = False
        self.error: BaseException | None = None  # kept, as a notebook keeps the last one
        self._before = {number: signal.signal(number, self._handle) for number in RAISED}
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._sender = subprocess.Popen([sys.executable, "-c", SENDER], **pipes)
        return self

    def __exit__(self, *_: Any) -> None:
        self._sender.communicate()
        for number, handler in self._before.items():
            assert signal.signal(number, handler) == self._handle, "the handler was not put back"

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise RAISED[signum]

    def run(self, case: Case, delay: float, number: int = signal.SIGINT) -> bool:
        """Returns whether the case was interrupted; if not, it ended before, or a finalizer
        swallowed the interrupt."""
        stdin, stdout = self._sender.stdin, self._sender.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{delay} {int(number)}\n")
        stdin.flush()
        try:
            self._is_armed = True
            case.run()
            interrupted = False
            self._is_armed = False
        except tuple(RAISED.values()) as error:
            self.error = error
            interrupted = True
        stdout.readline()  # the signal has been sent
        return interrupted


def interrupt_often(count: int, seed: int, only: str = "", report: Any = print) -> int:
    """
    Interrupts all kinds in turn, `count` times in total; returns the number of failures.

    Args:
        only (`str`): Run only kinds whose name contains this.
    """
    cases = {name: make() for name, make in CASES.items() if only in name}
    before = {name: model_state(case.model) for name, case in cases.items()}
    seconds: dict[str, float] = {}
    for name, case in cases.items():
        start = time.perf_counter()
        case.run()
        seconds[name] = time.perf_counter() - start
        case.check()
    interrupted, finished, failed = Counter[str](), Counter[str](), Counter[str]()
    names = list(cases)
    with Interrupter() as interrupter:
        for turn in range(count):
            name = names[turn % len(names)]
            rng = random.Random(f"{seed}/{turn}")
            # half of them uniformly over the call, half near its beginning, from 20 microseconds on
            delay = (
                rng.uniform(0, seconds[name])
                if rng.random() < 0.5
                else 2e-5 * (seconds[name] / 2e-5) ** rng.random()
            )
            number = rng.choice(list(RAISED))
            start = time.perf_counter()
            was_interrupted = interrupter.run(cases[name], delay, number)
            (interrupted if was_interrupted else finished)[name] += 1
            if not was_interrupted:
                seconds[name] = 0.8 * seconds[name] + 0.2 * (time.perf_counter() - start)
            try:
                state = model_state(cases[name].model)
                assert state == before[name], f"the model was {before[name]} and is {state}"
                cases[name].check()
            except Exception:
                failed[name] += 1
                report(
                    f"--seed {seed}, interrupt {turn}, {name}, {signal.Signals(number).name} after "
                    f"{delay * 1e6:.0f} us:\n{traceback.format_exc()}"
                )
                cases[name] = CASES[name]()
                before[name] = model_state(cases[name].model)
    for name in names:
        report(
            f"{name}: {interrupted[name]} interrupted, {finished[name]} came to their end,"
            f" {failed[name]} wrong"
        )
    report(f"{count} interrupts, {sum(interrupted.values())} in time, {sum(failed.values())} wrong")
    return sum(failed.values())


class Entered:
    """A profile function that raises a signal as the `number`-th function is entered."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.count = 0
        self.stack: list[str] = []

    def __call__(self, frame: FrameType, event: str, argument: Any) -> None:
        if event != "call":
            return
        self.count += 1
        if self.count == self.number:
            sys.setprofile(None)
            self.stack = traceback.format_stack(frame, limit=6)
            raise KeyboardInterrupt


def run_entered(case: Case, number: int) -> tuple[Entered, BaseException | None]:
    """Runs the case, interrupted as the `number`-th function is entered; returns how far it came
    and the exception."""
    entered, error = Entered(number), None
    before = sys.getprofile()
    sys.setprofile(entered)
    try:
        case.run()
    except KeyboardInterrupt as caught:
        error = caught
    finally:
        sys.setprofile(before)
    return entered, error


def interrupt_calls(count: int, seed: int, only: str = "", report: Any = print) -> int:
    """Interrupts each kind as functions are entered, `count` times in total; returns the number of
    failures."""
    names = [name for name in CASES if only in name]
    num_failed = 0
    for place, name in enumerate(names):
        case = CASES[name]()
        case.run()
        case.check()
        before = model_state(case.model)
        num_calls = run_entered(case, 0)[0].count
        case.check()
        failed = 0
        for turn in range(place, count, len(names)):
            number = random.Random(f"{seed}/{turn}").randint(1, num_calls)
            # kept, as a notebook keeps the last exception
            entered, _error = run_entered(case, number)
            try:
                state = model_state(case.model)
                assert state == before, f"the model was {before} and is {state}"
                case.check()
            except Exception:
                failed += 1
                stack = "".join(entered.stack)
                report(f"--seed {seed}, {name}, call {number}:\n{traceback.format_exc()}{stack}")
                torch.set_grad_enabled(True)
                case = CASES[name]()
                case.run()
                before = model_state(case.model)
        report(f"{name}: {num_calls} calls, {failed} wrong")
        num_failed += failed
    report(f"{count} interrupts as functions are entered, {num_failed} wrong")
    return num_failed


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=1000, help="interrupts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--calls", action="store_true", help="as functions are entered")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = interrupt_calls if arguments.calls else interrupt_often
    return int(run(arguments.count, arguments.seed, arguments.only) > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
