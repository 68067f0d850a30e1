"""
Real SIGINTs at random moments of `generate` and the engine: `python -m tests.support.interrupts --count 1000`.

A separate process sends them, so they arrive between any two bytecodes. After each: the pool is intact, no ended call
holds a block, the model is unchanged, and later calls give plain's tokens. The exit code is 1 otherwise; every failure
is printed with the number that repeats its choices (`--seed`).
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import subprocess
import sys
import time
import traceback
from collections import Counter
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
    time.sleep(float(line))
    os.kill(os.getppid(), signal.SIGINT)
    print(flush=True)
"""


class Case:
    """A workload to interrupt repeatedly. `run` is interrupted; `check` returns what is wrong afterwards."""

    model: PreTrainedModel

    def run(self) -> None:
        raise NotImplementedError

    def check(self) -> None:
        raise NotImplementedError


class Generate(Case):
    """`generate` with rows of different lengths."""

    def __init__(self, model: PreTrainedModel, mode: str) -> None:
        self.model, self.options = model, MODES[mode]
        self.inputs = models.padded_prompt("t5" if model.config.is_encoder_decoder else "llama", (11, 4, 9))
        self.expected = self.tokens({})

    def tokens(self, paged: dict[str, Any]) -> torch.Tensor:
        torch.manual_seed(3)
        return self.model.generate(**self.inputs, **self.options, **paged)

    def run(self) -> None:
        self.tokens(models.PAGED)

    def check(self) -> None:
        hf_paged.check_integrity(self.model)
        assert hf_paged.memory_stats(self.model).used_blocks == 0, "a call that is gone holds blocks"
        assert torch.equal(self.tokens(models.PAGED), self.expected), "the next call gives other tokens"
        hf_paged.check_integrity(self.model)
        assert hf_paged.memory_stats(self.model).used_blocks == 0, "the next call leaves blocks"


class Engine(Case):
    """An engine whose requests run by `generate`, `stream`, or steps that continue after the interrupt."""

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
            engine.generate(self.prompts, self.options, seed=7)
        elif self.how == "stream":
            with contextlib.closing(engine.stream(self.prompts, self.options, seed=7)) as stream:
                for _ in stream:
                    pass
        else:
            self.add()
            while engine.has_unfinished:
                outputs += engine.step()

    def check(self) -> None:
        engine = self.engine
        engine.check_integrity()
        if self.how == "steps":
            while engine.has_unfinished:
                self.outputs += engine.step()
                engine.check_integrity()
            results = {o.request_id: o.result for o in self.outputs if o.result is not None}
            self.outputs.clear()
            for number in range(len(results)):  # missing results, due to the interrupt, are the last
                self.compare(number, results[str(number)])
        assert not engine.has_unfinished, "requests are left of a caller that is gone"
        assert engine.stats().used_blocks == 0, "blocks are held without a use"
        for number, result in enumerate(engine.generate(self.prompts, self.options, seed=7)):
            self.compare(number, result)
        engine.check_integrity()
        assert not engine.has_unfinished and engine.stats().used_blocks == 0

    def compare(self, number: int, result: Any) -> None:
        if result.error is not None:
            raise result.error
        assert result.prompt_ids + result.token_ids == self.expected[number], f"request {number} has other tokens"


def make_cases() -> dict[str, Case]:
    """All kinds, with their models."""
    llama, t5, diff_llama = models.build("llama"), models.build("t5"), build_diff_llama()
    cases: dict[str, Case] = {f"generate, {mode}": Generate(llama, mode) for mode in MODES}
    cases |= {f"generate, encoder-decoder, {mode}": Generate(t5, mode) for mode in ("greedy", "beams")}
    cases["generate, in transformers' loop"] = Generate(diff_llama, "greedy")
    cases["engine.generate"] = Engine(llama, "generate")
    cases["engine.stream"] = Engine(llama, "stream")
    cases["engine.step"] = Engine(llama, "steps")
    cases["engine.step, row by row"] = Engine(diff_llama, "steps")
    for preemption in ("recompute", "swap"):
        # storage of pages has larger blocks, which preempt no request
        case = Engine(llama, "steps", num_blocks=9, preemption=preemption, storage="blocks")
        assert case.num_preemptions, "the pool is not small enough"
        cases[f"engine.step, {preemption}"] = case
    return cases


class Interrupter:
    """Sends this process a SIGINT after a delay, which raises `KeyboardInterrupt` in the running code."""

    def __enter__(self) -> Interrupter:
        self._is_armed = False
        self._before = signal.signal(signal.SIGINT, self._handle)
        pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self._sender = subprocess.Popen([sys.executable, "-c", SENDER], **pipes)
        return self

    def __exit__(self, *_: Any) -> None:
        self._sender.communicate()
        signal.signal(signal.SIGINT, self._before)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise KeyboardInterrupt

    def run(self, case: Case, delay: float) -> bool:
        """Returns whether the case was interrupted; if not, it ended before, or a finalizer swallowed the interrupt."""
        stdin, stdout = self._sender.stdin, self._sender.stdout
        assert stdin is not None and stdout is not None
        stdin.write(f"{delay}\n")
        stdin.flush()
        try:
            self._is_armed = True
            case.run()
            interrupted = False
            self._is_armed = False
        except KeyboardInterrupt:
            interrupted = True
        stdout.readline()  # the signal has been sent
        return interrupted


def interrupt_often(count: int, seed: int, only: str = "", report: Any = print) -> int:
    """
    Interrupts all kinds in turn, `count` times in total; returns the number of failures.

    Args:
        only (`str`): Run only kinds whose name contains this.
    """
    cases = {name: case for name, case in make_cases().items() if only in name}
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
                rng.uniform(0, seconds[name]) if rng.random() < 0.5 else 2e-5 * (seconds[name] / 2e-5) ** rng.random()
            )
            start = time.perf_counter()
            was_interrupted = interrupter.run(cases[name], delay)
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
                    f"--seed {seed}, interrupt {turn}, {name}, after {delay * 1e6:.0f} us:\n{traceback.format_exc()}"
                )
                cases[name] = make_cases()[name]
                before[name] = model_state(cases[name].model)
    for name in names:
        report(f"{name}: {interrupted[name]} interrupted, {finished[name]} came to their end, {failed[name]} wrong")
    report(f"{count} interrupts, {sum(interrupted.values())} in time, {sum(failed.values())} wrong")
    return sum(failed.values())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=1000, help="interrupts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="kinds whose name contains this")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    return int(interrupt_often(arguments.count, arguments.seed, arguments.only) > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
