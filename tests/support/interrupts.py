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

from tests.support import tools
from tests.support.checks import model_state
from tests.support.scenarios import CASES, RAISED

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


class Victim:
    """A case of one kind."""

    def __init__(self, name: str) -> None:
        self.case = CASES[name]()
        self.error: BaseException | None = None  # kept, as a notebook keeps the last one
        start = time.perf_counter()
        self.case.run()
        self.seconds = time.perf_counter() - start
        self.case.check()
        self.before = model_state(self.case.model)

    def run_entered(self, number: int) -> tuple[int, list[str]]:
        """Runs the case, interrupted as the `number`-th function is entered; returns how many were
        entered, and the stack at the interrupt."""
        count, stack = 0, list[str]()

        def enter(frame: FrameType, event: str, argument: Any) -> None:
            nonlocal count
            if event == "call":
                count += 1
                if count == number:
                    sys.setprofile(None)
                    stack.extend(traceback.format_stack(frame, limit=6))
                    raise KeyboardInterrupt

        before = sys.getprofile()
        sys.setprofile(enter)
        try:
            self.case.run()
        except KeyboardInterrupt as error:
            self.error = error
        finally:
            sys.setprofile(before)
        return count, stack

    @functools.cached_property
    def num_calls(self) -> int:
        count, _ = self.run_entered(0)
        self.case.check()
        return count

    def problem(self) -> str:
        """What is wrong after an interrupt; empty if nothing is."""
        try:
            state = model_state(self.case.model)
            assert state == self.before, f"the model was {self.before} and is {state}"
            self.case.check()
        except Exception:
            torch.set_grad_enabled(True)
            return traceback.format_exc()
        return ""


def attack_by_signal(
    victim: Victim, rng: random.Random, interrupter: Interrupter
) -> tuple[bool, str]:
    """Sends a signal; returns whether it came in time, which, and when. Half of them come uniformly
    over the call, half near its beginning, from 20 microseconds on."""
    delay = rng.uniform(0, victim.seconds)
    if rng.random() >= 0.5:
        delay = 2e-5 * (victim.seconds / 2e-5) ** rng.random()
    number = rng.choice(list(RAISED))
    start = time.perf_counter()
    was_interrupted = interrupter.run(victim.case.run, delay, number)
    if not was_interrupted:
        victim.seconds = 0.8 * victim.seconds + 0.2 * (time.perf_counter() - start)
    return was_interrupted, f"{signal.Signals(number).name} after {delay * 1e6:.0f} us"


def attack_call(victim: Victim, rng: random.Random, interrupter: None) -> tuple[bool, str]:
    """Interrupts as a function is entered; returns whether it was, and where."""
    number = rng.randint(1, victim.num_calls)
    _, stack = victim.run_entered(number)
    return bool(stack), f"call {number} of {victim.num_calls}\n{''.join(stack)}"


def interrupt_often(
    count: int, seed: int, only: str = "", report: Any = print, attack: Any = attack_by_signal
) -> int:
    """Attacks each kind whose name contains `only`, `count` times in total; returns the number of
    failures."""
    names, totals = [name for name in CASES if only in name], Counter[str]()
    with Interrupter() if attack is attack_by_signal else contextlib.nullcontext() as interrupter:
        for place, name in enumerate(names):
            victim, counts = Victim(name), Counter(wrong=0)
            for turn in range(place, count, len(names)):
                is_in_time, how = attack(victim, random.Random(f"{seed}/{turn}"), interrupter)
                counts["interrupted" if is_in_time else "came to their end"] += 1
                if problem := victim.problem():
                    counts["wrong"] += 1
                    report(f"--seed {seed}, interrupt {turn}, {name}, {how}:\n{problem}")
                    victim = Victim(name)
            report(f"{name}: " + ", ".join(f"{n} {what}" for what, n in counts.items()))
            totals += counts
    report(f"{count} interrupts, {totals['interrupted']} in time, {totals['wrong']} wrong")
    return totals["wrong"]


interrupt_calls = functools.partial(interrupt_often, attack=attack_call)


def main() -> int:
    options = {
        "seed": 0,
        "count": (1000, "interrupts"),
        "calls": (False, "as functions are entered"),
    }
    only = "", "kinds whose name contains this"
    arguments = tools.parser(__doc__, **options, only=only).parse_args()
    torch.set_num_threads(1)
    run = interrupt_calls if arguments.calls else interrupt_often
    return int(run(arguments.count, arguments.seed, arguments.only) > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
