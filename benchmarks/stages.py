"""Stages of a run: processes with limits, one benchmark each, which write a JSON file each."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from benchmarks import machine, report
from benchmarks.peers import kill_group

ROOT, PACKAGE = Path(__file__).resolve().parent.parent, "benchmarks"
QUICK_MINUTES, START_SECONDS, LEAST_SECONDS, GRACE_SECONDS = 4.0, 60.0, 25.0, 10.0
OVERRUN = 1.4  # times its minutes, after which a stage is ended
LOG_CHARACTERS = 3000  # of a stage's output, kept in its entry
NO_TIME, NOT_ENDED = "no time was left", "the run ended before it"


class Stage(NamedTuple):
    """A benchmark that runs in a process of its own."""

    name: str
    minutes: float  # of a run of `Options.of` minutes; 0: all that is left
    command: str  # module of this package, and its arguments
    full: str = ""  # arguments of a run that is not quick
    file: str = ""  # name of the JSON file
    peers: Sequence[str] = ()  # engines for processors that run beside us
    title: str = ""  # what it shows
    variables: Mapping[str, str] = {}  # of its environment


@dataclass(frozen=True)
class Options:
    """How to run stages."""

    minutes: float  # length of the run
    of: float  # length of the run that stages' minutes are part of
    out: Path  # folder of the files
    quick: bool = False  # whether the stages are small and only show that they run
    peers: Sequence[str] = ()  # the stages' peers that run
    arguments: Sequence[str] = ()  # of every stage

    def command(self, stage: Stage, minutes: float) -> list[str]:
        module, *arguments = shlex.split(stage.command)
        command = [sys.executable, "-X", "faulthandler", "-m", f"{PACKAGE}.{module}", *arguments]
        if peers := [name for name in stage.peers if name in self.peers]:
            command += ["--peers", *peers]
        command += ["--quick"] if self.quick else shlex.split(stage.full)
        path = os.path.relpath(self.out / f"{stage.file}.json", ROOT)
        return [*command, *self.arguments, "--minutes", f"{minutes:g}", "--json", path]


def run_stage(stage: Stage, options: Options, left: float) -> dict[str, Any]:
    """Runs a stage, for at most `left` seconds; returns its entry in the list of stages."""
    minutes = max(stage.minutes * options.minutes / options.of or left / 60, LEAST_SECONDS / 60)
    planned = max(minutes, QUICK_MINUTES) if options.quick else minutes
    seconds = min(left, START_SECONDS + OVERRUN * 60 * planned)
    own = {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", **stage.variables}
    start, reason, status = time.monotonic(), "", 0
    with tempfile.TemporaryFile() as file:
        process = subprocess.Popen(
            options.command(stage, minutes),
            cwd=ROOT,
            env={**os.environ, **own},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it starts ends with it
        )
        try:
            status = process.wait(seconds)
        except subprocess.TimeoutExpired:
            reason = f"ended after {seconds:.0f} s"
            for number in (signal.SIGINT, signal.SIGABRT):  # the log says where it was
                with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                    os.killpg(process.pid, number)
                    process.wait(GRACE_SECONDS)
        finally:
            kill_group(process)
            with contextlib.suppress(subprocess.TimeoutExpired):  # a driver may hold it
                process.wait(GRACE_SECONDS)
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - 4 * LOG_CHARACTERS))  # a character has at most 4 bytes
        log = file.read().decode(errors="replace")[-LOG_CHARACTERS:]
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    if status:
        reason = f"exit status {status}: {lines[-1][:200] if lines else ''}"
    elif not reason and not (options.out / f"{stage.file}.json").exists():
        reason = "left no file"
    return entry_of(stage, reason, round(time.monotonic() - start, 1), log)


def entry_of(stage: Stage, reason: str, seconds: float = 0.0, log: str = "") -> dict[str, Any]:
    """What a list of stages tells of one; `reason`: why it failed."""
    entry = {"name": stage.name, "file": stage.file, "seconds": seconds, "reason": reason}
    return entry | ({"log": log} if reason else {})


@contextlib.contextmanager
def ended_by_signals() -> Iterator[None]:
    """Within it, Ctrl-C, a lost terminal and `kill` raise `SystemExit`, so that stages end, too;
    what is ended so is not interrupted again. Under `nohup` the loss of the terminal ends
    nothing."""
    numbers = [
        number
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        if signal.getsignal(number) != signal.SIG_IGN
    ]

    def end(number: int, _: Any) -> NoReturn:
        for other in numbers:
            signal.signal(other, signal.SIG_IGN)
        said = "the list of stages keeps those that are complete"
        name = signal.Signals(number).name
        print(f"interrupted by {name}: {said}", file=sys.stderr, flush=True)
        sys.exit(128 + number)

    before = {number: signal.signal(number, end) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(stages: Sequence[Stage], options: Options, name: str) -> list[dict[str, Any]]:
    """Runs the stages; returns their entries, which are also in the JSON file of this name, with
    the machine's facts. Stages of an earlier run of the same revision stay in that file until they
    are repeated. Before a stage runs, raises `report.Damaged` if that file is not such a list, and
    ends the process if another run writes to the folder."""
    options.out.mkdir(parents=True, exist_ok=True)
    with ended_by_signals(), alone(options.out):
        return _run(stages, options, name)


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Within it, no other run writes to the folder; the lock ends with the process."""
    lock = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            sys.exit(f"another run writes to {folder}")
        except OSError:
            pass  # a file system without locks
        yield
    finally:
        os.close(lock)


def _run(stages: Sequence[Stage], options: Options, name: str) -> list[dict[str, Any]]:
    end = time.monotonic() + 60 * options.minutes
    own: dict[str, Any] = {"command": report.command_line(), "facts": machine.facts()}
    path = options.out / f"{name}.json"
    others: dict[str, dict[str, Any]] = {}
    with report.reading(os.path.relpath(path)):
        earlier = report.read(path) if path.exists() else None
        if earlier and earlier["facts"]["revision"] == own["facts"]["revision"]:
            others = {entry["name"]: entry for entry in earlier["stages"]}
    print(report.machine_of(own["facts"]), file=sys.stderr, flush=True)
    entries = list[dict[str, Any]]()

    def write(*started: dict[str, Any]) -> None:
        for entry in started:
            others.pop(entry["name"], None)
        data = own | {"stages": [*others.values(), *entries, *started]}
        if earlier and others:
            data |= {"command": earlier["command"], "repeated": own["command"]}
        report.replace_file(path, json.dumps(data, indent=1) + "\n")

    def add(entry: dict[str, Any]) -> None:
        entries.append(entry)
        write()
        said = f"{entry['name']}: {entry['seconds']:.0f} s {entry['reason']}"
        print(said.strip(), file=sys.stderr, flush=True)

    for stage in stages:
        write(entry_of(stage, NOT_ENDED))  # of an ended run, the list tells that
        (options.out / f"{stage.file}.json").unlink(missing_ok=True)  # of an earlier run
        left = end - time.monotonic()
        if left < LEAST_SECONDS:
            add(entry_of(stage, NO_TIME))
        else:
            add(run_stage(stage, options, left))
    return entries
