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

import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

from tests.support import tools
from tests.support.checks import model_state
from tests.support.scenarios import CASES, RAISED, Case

SENDER = """
import os, signal, sys, time
for line in sys.stdin:
    delay, number = line.split()
    time.sleep(float(delay))
    os.kill(os.getppid(), int(number))
    print(flush=True)
"""


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

    def run(self, work: Callable[[], None], delay: float, number: int = signal.SIGINT) -> bool:
        """Returns whether the work was interrupted; if not, it ended before, or a finalizer
        swallowed the interrupt."""
        stdin, stdout = self._sender.stdin, self._sender.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{delay} {int(number)}\n")
        stdin.flush()
        try:
            self._is_armed = True
            work()
            interrupted = False
            self._is_armed = False
        except tuple(RAISED.values()) as error:
            self.error = error
            interrupted = True
        stdout.readline()  # the signal has been sent
        return interrupted


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


class Victim:
    """A case of one kind, built anew after a failure."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.build()

    def build(self) -> None:
        self.case = CASES[self.name]()
        start = time.perf_counter()
        self.case.run()
        self.seconds = time.perf_counter() - start
        self.case.check()
        self.before = model_state(self.case.model)

    def problem(self) -> str:
        """What is wrong after an interrupt; empty if nothing is."""
        try:
            state = model_state(self.case.model)
            assert state == self.before, f"the model was {self.before} and is {state}"
            self.case.check()
        except Exception:
            text = traceback.format_exc()
            torch.set_grad_enabled(True)
            self.build()
            return text
        return ""


def interrupt_often(count: int, seed: int, only: str = "", report: Any = print) -> int:
    """
    Interrupts each kind by signals, `count` times in total; returns the number of failures.

    Args:
        only (`str`): Run only kinds whose name contains this.
    """
    names = [name for name in CASES if only in name]
    num_in_time = num_wrong = 0
    with Interrupter() as interrupter:
        for place, name in enumerate(names):
            victim, counts = Victim(name), [0, 0]  # that ended before it, that were interrupted
            wrong = 0
            for turn in range(place, count, len(names)):
                rng = random.Random(f"{seed}/{turn}")
                # half of them uniformly over the call, half near its beginning, from 20
                # microseconds on
                delay = (
                    rng.uniform(0, victim.seconds)
                    if rng.random() < 0.5
                    else 2e-5 * (victim.seconds / 2e-5) ** rng.random()
                )
                number = rng.choice(list(RAISED))
                start = time.perf_counter()
                was_interrupted = interrupter.run(victim.case.run, delay, number)
                counts[was_interrupted] += 1
                if not was_interrupted:
                    seconds = time.perf_counter() - start
                    victim.seconds = 0.8 * victim.seconds + 0.2 * seconds
                if problem := victim.problem():
                    wrong += 1
                    report(
                        f"--seed {seed}, interrupt {turn}, {name}, {signal.Signals(number).name}"
                        f" after {delay * 1e6:.0f} us:\n{problem}"
                    )
            ended, interrupted = counts
            report(f"{name}: {interrupted} interrupted, {ended} came to their end, {wrong} wrong")
            num_in_time, num_wrong = num_in_time + interrupted, num_wrong + wrong
    report(f"{count} interrupts, {num_in_time} in time, {num_wrong} wrong")
    return num_wrong


def interrupt_calls(count: int, seed: int, only: str = "", report: Any = print) -> int:
    """Interrupts each kind as functions are entered, `count` times in total; returns the number of
    failures."""
    names = [name for name in CASES if only in name]
    num_wrong = 0
    for place, name in enumerate(names):
        victim, wrong = Victim(name), 0
        num_calls = run_entered(victim.case, 0)[0].count
        victim.case.check()
        for turn in range(place, count, len(names)):
            number = random.Random(f"{seed}/{turn}").randint(1, num_calls)
            # kept, as a notebook keeps the last exception
            entered, _error = run_entered(victim.case, number)
            if problem := victim.problem():
                wrong += 1
                stack = "".join(entered.stack)
                report(f"--seed {seed}, {name}, call {number}:\n{problem}{stack}")
        report(f"{name}: {num_calls} calls, {wrong} wrong")
        num_wrong += wrong
    report(f"{count} interrupts as functions are entered, {num_wrong} wrong")
    return num_wrong


def main() -> int:
    parser = tools.parser(__doc__, seed=0)
    parser.add_argument("--count", type=int, default=1000, help="interrupts")
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    parser.add_argument("--calls", action="store_true", help="as functions are entered")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    run = interrupt_calls if arguments.calls else interrupt_often
    return int(run(arguments.count, arguments.seed, arguments.only) > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
