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

import collections
import concurrent.futures
import dataclasses
import functools
import gc
import itertools
import json
import linecache
import multiprocessing
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch

import hf_paged
from benchmarks import machine, report
from tests.support import tools
from tests.support.checks import model_state
from tests.support.rooms import fix_prices
from tests.support.scenarios import RAISED, SCENARIOS, Case, Requeued

PACKAGE = str(Path(hf_paged.__file__).parent)
HANG_SECONDS = 30.0
SCENARIO_SECONDS = 900.0  # of a run whose every line or bytecode is counted


def _raise(error: type[BaseException], *arguments: object) -> None:
    raise error(*arguments)


FAULTS: dict[str, Callable[[], None]] = {
    "MemoryError": lambda: _raise(MemoryError, "on purpose"),
    "SIGINT": lambda: signal.raise_signal(signal.SIGINT),
    "SIGUSR1": lambda: signal.raise_signal(signal.SIGUSR1),
    "out of memory": lambda: _raise(torch.OutOfMemoryError, "CUDA out of memory, on purpose"),
    "OSError": lambda: _raise(OSError, 5, "on purpose"),
}
SIGNALS = ("SIGINT", "SIGUSR1")
INJECTED = (MemoryError, torch.OutOfMemoryError, OSError, KeyboardInterrupt, Requeued)


def _handle(signum: int, frame: FrameType | None) -> None:
    raise RAISED[signum]


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


def visited(case: Case, opcodes: bool) -> collections.Counter[Place]:
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


def _play(case: Case, site: Site) -> str:
    """In the child: runs the case with the fault and checks what it leaves. Returns an outcome."""

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
    signal.signal(signal.SIGUSR1, _handle)
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


def run_in_child(case: Case, site: Site) -> tuple[str, str]:
    """Forks, and returns the child's outcome and, unless it survived, what went wrong."""
    outcome, result = tools.in_child(functools.partial(_play, case, site), HANG_SECONDS)
    return (result, "") if outcome == "ended" else (outcome, result)


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
            visit = functools.partial(_draw_visit, counts=counts, rng=rng)
            chosen[name] = [Site(*x, visit=visit(x), fault=rng.choice(faults)) for x in drawn]
        else:
            new = [(place, 1) for place in places if place not in before]
            if name.startswith("engine"):
                later = [x for x in places if x not in before_in_engine and counts[x] > 1]
                # of a `with`, only the first visit is certainly an entry
                new += [(x, counts[x] // 2 + 1) for x in later if not _is_with(x)]
                before_in_engine.update(places)
            pairs = zip(new, itertools.cycle(faults))
            chosen[name] = [Site(*place, visit=n, fault=fault) for (place, n), fault in pairs]
        before.update(places)
    return chosen


def _build(name: str) -> Case:
    torch.set_num_threads(1)
    fix_prices()  # so that each run visits the same lines
    case = SCENARIOS[name]()
    case.injected = INJECTED
    for _ in range(2):
        case.run()
        case.check()
    gc.collect()
    gc.freeze()
    return case


def list_sites(name: str, opcodes: bool) -> collections.Counter[Place]:
    """In a process of its own: how often the scenario visits each place in a forked child, where
    faults happen later: a child begins without the memory and the recorded steps of its parent."""
    case = _build(name)
    outcome, visits = tools.in_child(lambda: list(visited(case, opcodes).items()), SCENARIO_SECONDS)
    assert outcome == "ended", f"{name}: {outcome}: {visits}"
    return collections.Counter({tuple(place): count for place, count in visits})


def run_scenario(name: str, sites: list[Site]) -> dict[str, Any]:
    """In a process of its own: counts of outcomes of faults at these sites, and all that were not
    survived."""
    case = _build(name)
    outcomes, failures = collections.Counter[str](), {}
    for site in sites:
        outcome, why = run_in_child(case, site)
        outcomes[outcome] += 1
        if outcome not in ("survived", "not reached"):
            function = f"{site.file} {site.function}"
            failures[str(site)] = {"function": function, "outcome": outcome, "why": why}
    return {"outcomes": dict(outcomes), "failures": failures}


def main() -> int:
    parser = tools.parser(
        __doc__,
        seed=0,
        jobs=1,
        scenario=("", "with this name, or those that contain it"),
        fault=(",".join(FAULTS), "of FAULTS, with commas"),
        sample=(0, "draws by scenario, not every line"),
        opcodes=(False, "places are bytecodes; with --sample"),
        json=Path,
    )
    args = parser.parse_args()
    exact = args.scenario in SCENARIOS
    names = [args.scenario] if exact else [name for name in SCENARIOS if args.scenario in name]
    start = time.perf_counter()
    results = dict[str, dict[str, Any]]()
    content = {"command": report.command_line(), "facts": machine.facts()}
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
            counts = {"places": len(visits[name]), "visits": sum(visits[name].values())}
            results[name] = result | counts
            told = ", ".join(f"{count} {what}" for what, count in counts.items())
            print(f"{name}: {told}, {result['outcomes']}", flush=True)
            for site, failure in result["failures"].items():
                print(f"  {site}: {failure['outcome']}: {failure['why']}", flush=True)
            if args.json:
                content["scenarios"] = {name: results[name] for name in names if name in results}
                args.json.write_text(json.dumps(content, indent=1) + "\n")
    num_faults = sum(sum(result["outcomes"].values()) for result in results.values())
    print(f"{num_faults} faults in {time.perf_counter() - start:.0f} s")
    return int(any(result["failures"] for result in results.values()))


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
