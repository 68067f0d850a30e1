"""Every line fails once: `python -m tests.support.line_faults [--scenario NAME] [--sample N]
[--jobs 2] [--json FILE]`.

A scenario runs under `sys.settrace`, which lists the lines of `hf_paged` that it visits. Then, for
each line, a child process is forked from the warm parent and runs the scenario again, and a fault
happens where that line begins: `MemoryError`, out of memory of a device, `OSError`, or a real
signal whose handler raises. After it the pool is intact, the next calls give plain's tokens, no
token was told twice, and nothing is held. `--sample` draws places and visits. Sites that are not
survived are printed, and end with exit code 1.
"""

from __future__ import annotations

import argparse
import collections
import concurrent.futures
import contextlib
import dataclasses
import gc
import io
import json
import linecache
import multiprocessing
import os
import pickle
import random
import select
import shlex
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import transformers
from transformers import GenerationConfig

import hf_paged
from benchmarks import machine
from tests.support import interrupts, models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_media import media_inputs
from tests.support.checks import model_state
from tests.support.peft_models import ADAPTERS, active, lora_model
from tests.support.prices import fix_prices

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = str(Path(hf_paged.__file__).parent)
HANG_SECONDS = 30.0


def _raise_signal(number: int) -> Callable[[], None]:
    def send() -> None:
        signal.raise_signal(number)

    return send


def _raise(error: type[BaseException], *arguments: object) -> Callable[[], None]:
    def fail() -> None:
        raise error(*arguments)

    return fail


FAULTS: dict[str, Callable[[], None]] = {
    "MemoryError": _raise(MemoryError, "on purpose"),
    "out of memory": _raise(torch.OutOfMemoryError, "CUDA out of memory, on purpose"),
    "OSError": _raise(OSError, 5, "on purpose"),
    "SIGINT": _raise_signal(signal.SIGINT),
    "SIGUSR1": _raise_signal(signal.SIGUSR1),
}
SIGNALS = ("SIGINT", "SIGUSR1")


class Usr1(Exception):
    """What the handler of SIGUSR1 raises, as a cluster's warning of a job's end may."""


def _handle_usr1(signum: int, frame: FrameType | None) -> None:
    raise Usr1


INJECTED = (MemoryError, torch.OutOfMemoryError, OSError, KeyboardInterrupt, Usr1)


# -------------------------------------------------------------------------------------- scenarios


class Assisted(interrupts.Generate):
    """`generate` with a smaller model that drafts."""

    def tokens(self, paged: dict[str, Any]) -> torch.Tensor:
        inputs = {name: value[:1] for name, value in self.inputs.items()}
        torch.manual_seed(3)
        return self.model.generate(
            **inputs, **self.options, assistant_model=models.get_assistant("llama"), **paged
        )


class Recorded(interrupts.Generate):
    """A call of `generate` that is long enough for its steps to be recorded."""

    def __init__(self) -> None:
        super().__init__(models.build("llama"), "greedy")

    def tokens(self, paged: dict[str, Any]) -> torch.Tensor:
        options = {**self.options, "max_new_tokens": 24, "min_new_tokens": 24}
        return self.model.generate(**self.inputs, **options, **paged)


class Images(interrupts.Generate):
    """`generate` with a picture in each row."""

    def __init__(self) -> None:
        self.model, self.options = (
            tiny_model(transformers.LlavaForConditionalGeneration),
            interrupts.GREEDY,
        )
        self.inputs = media_inputs(self.model)["image"]
        self.expected = self.tokens({})


class Adapters(interrupts.Engine):
    """Each request runs with an adapter of its own, or none."""

    def __init__(self) -> None:
        self.adapters = [*ADAPTERS, ADAPTERS[0]]
        super().__init__(lora_model(), "steps")

    def lone(self, prompt: list[int], options: dict[str, Any]) -> list[int]:
        number = self.prompts.index(prompt)
        with active(self.model, self.adapters[number]):
            return super().lone(prompt, options)

    def add(self) -> None:
        for number, (prompt, options) in enumerate(zip(self.prompts, self.options)):
            adapter = self.adapters[number]
            self.engine.add_request(
                prompt, options, request_id=str(number), seed=7, adapter=adapter
            )

    def check(self) -> None:
        self.drain()
        self.add()
        self.drain()


class SavedPrefixes(interrupts.Engine):
    """A prefix is written to a file and read by an engine whose cache is empty."""

    def __init__(self) -> None:
        self.file = Path(tempfile.mkdtemp()) / "prefix.safetensors"
        super().__init__(models.build("llama"), "generate")

    def run(self) -> None:
        self.engine.save_prefix(self.prompts[1], self.file)
        self.engine.reset_prefix_cache()
        self.engine.load_prefix(self.file)
        super().run()


class NativeManager(interrupts.Case):
    """transformers' continuous batching, which our thread serves."""

    def __init__(self) -> None:
        self.model = models.build("llama")
        self.prompts = [models.token_ids(1, n, seed=n)[0].tolist() for n in (9, 14, 5)]
        self.options = GenerationConfig(**interrupts.GREEDY, eos_token_id=-1)
        self.expected = [self.lone(prompt) for prompt in self.prompts]
        hf_paged.install(continuous_batching=True)

    def lone(self, prompt: list[int]) -> list[int]:
        ids = torch.tensor([prompt])
        return self.model.generate(ids, generation_config=self.options)[0, len(prompt) :].tolist()

    def tokens(self) -> list[list[int]]:
        answers = self.model.generate_batch(
            self.prompts, generation_config=self.options, progress_bar=False
        )
        return [answer.generated_tokens for answer in answers.values()]

    def run(self) -> None:
        # ends the thread that serves, so that the next one is traced from its beginning
        hf_paged.free(self.model)
        self.tokens()

    def check(self) -> None:
        assert self.tokens() == self.expected, "the next call gives other tokens"
        hf_paged.check_integrity(self.model)
        assert hf_paged.memory_stats(self.model).used_blocks == 0, (
            "a call that is gone holds blocks"
        )


def _engine(name: str, **config: Any) -> Callable[[], interrupts.Case]:
    return lambda: interrupts.Engine(models.build(name), "steps", **config)


SCENARIOS: dict[str, Callable[[], interrupts.Case]] = {
    **interrupts.CASES,
    "generate, recorded": Recorded,
    "generate, assisted": lambda: Assisted(models.build("llama"), "greedy"),
    "generate, images": Images,
    "generate, hybrid": lambda: interrupts.Generate(models.build("qwen3_next"), "greedy"),
    "engine.step, adapters": Adapters,
    "engine.step, hybrid": _engine("qwen3_next"),
    "engine.step, windows": _engine("gemma3", num_blocks=24),
    "engine.step, drafts": _engine("llama", speculation="ngram"),
    "engine.step, int8": _engine("llama", kv_dtype="int8"),
    "engine.step, virtual storage": _engine("llama", storage="virtual"),
    "engine.step, tiers": lambda: _engine("llama", num_blocks=9, prefix_tiers=tempfile.mkdtemp())(),
    "saved prefixes": SavedPrefixes,
    "native manager": NativeManager,
}


# ------------------------------------------------------------------------------------------ sites


@dataclasses.dataclass(frozen=True, order=True)
class Site:
    """Where a fault happens: at the `visit`-th time (from 1) that the line begins, or one of its
    bytecodes."""

    file: str  # within the package
    line: int
    opcode: int  # offset of a bytecode; -1: where the line begins
    function: str
    visit: int = 1
    fault: str = "MemoryError"

    def __str__(self) -> str:
        opcode = f"+{self.opcode}" if self.opcode >= 0 else ""
        return f"{self.file}:{self.line}{opcode}#{self.visit} {self.function} {self.fault}"


class Tracer:
    """Calls `at` with the file, line, bytecode and function of what begins in the package, also in
    new threads; with `function`, its file and name, only in that one, so that the rest runs at full
    speed."""

    def __init__(
        self,
        at: Callable[[str, int, int, str], None],
        opcodes: bool,
        function: tuple[str, str] | None = None,
    ) -> None:
        self._at, self._opcodes, self._function = at, opcodes, function
        self._files: dict[CodeType, str] = {}

    def __enter__(self) -> None:
        threading.settrace(self._call)
        sys.settrace(self._call)

    def __exit__(self, *_: object) -> None:
        sys.settrace(None)
        threading.settrace(None)  # type: ignore[arg-type]

    def _call(self, frame: FrameType, event: str, arg: object) -> Any:
        code = frame.f_code
        file = self._files.get(code)
        if file is None:
            name = code.co_filename
            file = name[len(PACKAGE) + 1 :] if name.startswith(PACKAGE) else ""
            if self._function is not None and (file, code.co_qualname) != self._function:
                file = ""
            self._files[code] = file
        if not file:
            return None
        frame.f_trace_opcodes = self._opcodes
        return self._line

    def _line(self, frame: FrameType, event: str, arg: object) -> Any:
        if event in ("line", "opcode") and frame.f_lineno is not None:
            # the compiler's own bytecodes have no line
            offset = frame.f_lasti if event == "opcode" else -1
            self._at(self._files[frame.f_code], frame.f_lineno, offset, frame.f_code.co_qualname)
        return self._line


Place = tuple[str, int, int, str]


def visited(case: interrupts.Case, opcodes: bool) -> collections.Counter[Place]:
    """How often each line, and each bytecode with `opcodes`, is visited in a run; in the order of
    first visits."""
    visits: collections.Counter[Place] = collections.Counter()

    def count(*place: Any) -> None:
        visits[place] += 1

    with Tracer(count, opcodes):
        case.run()
    case.check()
    return visits


def _tells_of_fault(error: BaseException | None) -> bool:
    """Whether an error is the fault, or names it as its cause."""
    return error is not None and (isinstance(error, INJECTED) or _tells_of_fault(error.__cause__))


def _play(case: interrupts.Case, site: Site) -> str:
    """In the child: runs the case with the fault and checks what it leaves. Returns an outcome, and
    why."""

    def at(file: str, line: int, opcode: int, function: str) -> None:
        nonlocal left
        if line == site.line and opcode == site.opcode and file == site.file:
            left -= 1
            if left == 0:
                sys.settrace(None)
                fault = site.fault
                if threading.current_thread() is not threading.main_thread() and fault in SIGNALS:
                    fault = "MemoryError"  # Python runs handlers in the main thread only
                FAULTS[fault]()

    left = site.visit
    before = model_state(case.model)
    signal.signal(signal.SIGUSR1, _handle_usr1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with Tracer(at, site.opcode >= 0, (site.file, site.function)):
            case.run()
    except BaseException as error:
        if not _tells_of_fault(error):
            raise
        # frames of an ended call would hold what it held
        error.__traceback__ = error.__cause__ = None
        del error
    if left > 0:
        return "not reached"
    gc.collect()
    state = model_state(case.model)
    assert state == before, f"the model was {before} and is {state}"
    case.check()
    hf_paged.free(case.model)
    return "survived"


def run_in_child(case: interrupts.Case, site: Site) -> tuple[str, str]:
    """Forks, and returns the child's outcome and, unless it survived, what went wrong."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with contextlib.suppress(BaseException):
            sys.stderr = sys.stdout = io.StringIO()
            try:
                outcome, why = _play(case, site), ""
            except BaseException as error:
                last = traceback.extract_tb(error.__traceback__)[-3:]
                where = ", ".join(f"{Path(entry.filename).name}:{entry.lineno}" for entry in last)
                outcome, why = "wrong", f"{type(error).__name__}: {str(error)[:300]} ({where})"
            os.write(write, json.dumps([outcome, why]).encode())
        os._exit(0)
    os.close(write)
    ready, _, _ = select.select([read], [], [], HANG_SECONDS)
    if not ready:
        os.kill(child, signal.SIGKILL)
    text = os.read(read, 1 << 16) if ready else b""
    os.close(read)
    _, status = os.waitpid(child, 0)
    if not ready:
        return "hang", f"{HANG_SECONDS:g} s"
    if not text:
        return "crash", f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(
            status
        ) else f"exit {status >> 8}"
    outcome, why = json.loads(text)
    return outcome, why


def _is_with(place: Place) -> bool:
    return linecache.getline(f"{PACKAGE}/{place[0]}", place[1]).lstrip().startswith("with ")


def _draw_visit(place: Place, counts: collections.Counter[Place], rng: random.Random) -> int:
    """A visit of a place. A block's exit begins the line of its `with` again, where an exception
    would skip `__exit__`, too: only the first visit is certainly an entry."""
    visit = rng.randint(1, min(counts[place], 50))
    return 1 if _is_with(place) else visit


def choose_sites(
    visits: dict[str, collections.Counter[Place]], faults: list[str], sample: int, seed: int
) -> dict[str, list[Site]]:
    """Sites of each scenario: the first visit of each line that no earlier scenario visits, and in
    the first scenario of an engine also the middle one of its visits, each with the next fault; or
    `sample` draws of a scenario's places, visits and faults."""
    rng, chosen, before = random.Random(seed), {}, set[Place]()
    before_in_engine = set[Place]()  # requests of an engine wait where rows of a call do not
    for name, counts in visits.items():
        # the bytecodes that leave a `with` block: where an exception comes between them, Python
        # skips `__exit__`
        places = [place for place in counts if place[2] < 0 or not _is_with(place)]
        if sample:
            drawn = [rng.choice(places) for _ in range(sample)]
            chosen[name] = [
                Site(*place, visit=_draw_visit(place, counts, rng), fault=rng.choice(faults))
                for place in drawn
            ]
        else:
            new = [(place, 1) for place in places if place not in before]
            if name.startswith("engine"):
                later = [
                    place
                    for place in places
                    if place not in before_in_engine and not _is_with(place)  # `_draw_visit`
                ]
                new += [(place, counts[place] // 2 + 1) for place in later if counts[place] > 1]
                before_in_engine.update(places)
            chosen[name] = [
                Site(*place, visit=visit, fault=faults[number % len(faults)])
                for number, (place, visit) in enumerate(new)
            ]
        before.update(places)
    return chosen


def _build(name: str) -> interrupts.Case:
    torch.set_num_threads(1)
    fix_prices()  # so that each run visits the same lines
    case = SCENARIOS[name]()
    case.injected = INJECTED
    for _ in range(2):
        case.run()
        case.check()
    return case


def list_sites(name: str, opcodes: bool) -> collections.Counter[Place]:
    """In a process of its own: how often the scenario visits each place in a forked child, where
    faults happen later: a child begins without the memory and the recorded steps of its parent."""
    case = _build(name)
    gc.collect()
    gc.freeze()
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with contextlib.suppress(BaseException), os.fdopen(write, "wb") as pipe:
            pickle.dump(visited(case, opcodes), pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        visits: collections.Counter[Place] = pickle.load(pipe)
    os.waitpid(child, 0)
    return visits


def run_scenario(name: str, sites: list[Site]) -> dict[str, Any]:
    """In a process of its own: counts of outcomes of faults at these sites, and all that were not
    survived."""
    case = _build(name)
    gc.collect()
    gc.freeze()
    outcomes, failures = collections.Counter[str](), {}
    for site in sites:
        outcome, why = run_in_child(case, site)
        outcomes[outcome] += 1
        if outcome not in ("survived", "not reached"):
            failures[str(site)] = {
                "function": f"{site.file} {site.function}",
                "outcome": outcome,
                "why": why,
            }
    return {"outcomes": dict(outcomes), "failures": failures}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--scenario", default="", help="the one with this name, or those that contain it"
    )
    parser.add_argument(
        "--fault",
        default="MemoryError,SIGINT,SIGUSR1,out of memory,OSError",
        help="of FAULTS, with commas",
    )
    parser.add_argument(
        "--sample", type=int, default=0, help="draws for each scenario, in place of every line"
    )
    parser.add_argument(
        "--opcodes", action="store_true", help="places are bytecodes, not lines; needs --sample"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    parser.add_argument("--json", type=Path, help="write the outcomes to this file")
    args = parser.parse_args()
    exact = args.scenario in SCENARIOS
    names = [args.scenario] if exact else [name for name in SCENARIOS if args.scenario in name]
    start = time.perf_counter()
    results = dict[str, dict[str, Any]]()
    num_failures = 0
    facts = machine.facts()
    context = multiprocessing.get_context("forkserver")
    # Each process then starts with PyTorch, transformers and these imported.
    context.set_forkserver_preload(
        ["tests.support.peft_models", "tests.support.architecture_media"]
    )
    with concurrent.futures.ProcessPoolExecutor(args.jobs, context, max_tasks_per_child=1) as pool:
        visits = dict(zip(names, pool.map(list_sites, names, [args.opcodes] * len(names))))
        sites = choose_sites(visits, args.fault.split(","), args.sample, args.seed)
        runs = {pool.submit(run_scenario, name, sites[name]): name for name in names}
        for run in concurrent.futures.as_completed(runs):
            name, result = runs[run], run.result()
            result |= {"places": len(visits[name]), "visits": sum(visits[name].values())}
            results[name] = result
            print(
                f"{name}: {result['places']} places, {result['visits']} visits,"
                f" {result['outcomes']}",
                flush=True,
            )
            for site, failure in result["failures"].items():
                num_failures += 1
                print(f"  {site}: {failure['outcome']}: {failure['why']}", flush=True)
            if args.json:
                scenarios = {name: results[name] for name in names if name in results}
                content = {
                    "command": shlex.join(
                        ["python", "-m", "tests.support.line_faults", *sys.argv[1:]]
                    ),
                    "facts": facts,
                    "scenarios": scenarios,
                }
                args.json.write_text(json.dumps(content, indent=1) + "\n")
    print(
        f"{sum(sum(r['outcomes'].values()) for r in results.values())} faults in"
        f" {time.perf_counter() - start:.0f} s"
    )
    return int(num_failures > 0)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
