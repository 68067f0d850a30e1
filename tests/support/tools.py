"""What the programs of this folder share: their options, their processes and their clocks."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import io
import json
import logging
import os
import re
import select
import signal
import subprocess
import sys
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from tests.support.workers import in_workers

ROOT = Path(__file__).resolve().parents[2]

Job = TypeVar("Job")


MEANINGS = {
    "seed": "of all random choices",
    "jobs": "processes",
    "only": "this number alone, in this process",
    "json": "also write the results here",
}


def parser(text: str | None, **options: Any) -> argparse.ArgumentParser:
    """A parser that shows a module's docstring as it stands. `options`: their defaults (a type for
    None, False for a flag), with their meaning if `MEANINGS` has another; or all as a dict."""
    parser = argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, given in options.items():
        if not isinstance(given, dict):
            default, meaning = given if isinstance(given, tuple) else (given, MEANINGS.get(name))
            given = {"help": meaning}
            if default is False:
                given["action"] = "store_true"
            elif isinstance(default, type):
                given["type"] = default
            else:
                given |= {"type": type(default), "default": default}
        parser.add_argument(f"--{name.replace('_', '-')}", **given)
    return parser


def module(name: str, *arguments: object, python: str = sys.executable) -> list[str]:
    """The command that runs a module, ours if the name begins with a dot."""
    name = f"tests.support{name}" if name.startswith(".") else name
    return [python, "-m", name, *map(str, arguments)]


def run_apart(name: str, *arguments: object, timeout: float | None = None, **variables: str) -> Any:
    """Runs a module in a process with one thread; returns it, ended, with its output as text.
    `variables`: more of its environment."""
    return subprocess.run(
        module(name, *arguments),
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | variables,
        capture_output=True,
        text=True,
        timeout=timeout,
    )


UNITS = (
    "passed failed skipped error errors deselected classes equal cases mixes calls runs steps"
    " preemptions interrupts wrong reports faults"
).split()
COUNT = re.compile(rf"\b([\d,]*\d) ({'|'.join(UNITS)})\b")


def run_counted(command: Sequence[str], **options: Any) -> tuple[int, Counter[str]]:
    """Runs a command and shows its output; returns its exit code and the counts in the last line
    that has any."""
    counts = Counter[str]()
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    options = {"cwd": ROOT, "text": True, "errors": "replace", **pipes, **options}
    with subprocess.Popen(command, **options) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            found = {unit: int(count.replace(",", "")) for count, unit in COUNT.findall(line)}
            counts = Counter(found) or counts
    return process.returncode, counts


def quieten() -> None:
    """One thread, for reproducible sums, and no warnings of transformers."""
    import torch
    from transformers.utils.logging import disable_progress_bar

    torch.set_num_threads(1)
    logging.disable(logging.WARNING)
    disable_progress_bar()
    warnings.simplefilter("ignore")


def attempts(
    attempt: Callable[[Job], Any], jobs: Sequence[Job], processes: int, seconds: float
) -> Iterator[tuple[Job, Any]]:
    """Each job with its result, as `in_workers` yields them; in this process if there is one
    job, so that a debugger sees it."""
    if len(jobs) == 1:
        yield jobs[0], attempt(jobs[0])
    else:
        yield from in_workers(attempt, jobs, processes, seconds)


def swept(
    work: Callable[[Job], Any], jobs: Sequence[Job], processes: int, seconds: float
) -> Iterator[tuple[Job, Any]]:
    """Each job with its result, as `in_workers` yields them; shows how far it is."""
    for number, (job, result) in enumerate(in_workers(work, jobs, processes, seconds), 1):
        print(f"\r{number}/{len(jobs)} {job!s:60.60}", end="", file=sys.stderr, flush=True)
        yield job, result
    print(file=sys.stderr)


def write_results(path: Path, head: dict[str, Any], results: Iterable[Any]) -> None:
    """Writes JSON with a line for each of the results, which are dataclasses."""
    lines = ",\n".join(json.dumps(dataclasses.asdict(result)) for result in results)
    path.write_text(f'{json.dumps(head)[:-1]}, "results": [\n{lines}\n]}}\n')


@contextlib.contextmanager
def quietly() -> Iterator[None]:
    """As `quieten`, and nothing of what some models print."""
    quieten()
    with contextlib.redirect_stdout(io.StringIO()):
        yield


def in_child(work: Callable[[], Any], seconds: float) -> tuple[str, Any]:
    """
    Forks this process for `work`. Returns "ended" with its result, which JSON can hold; else
    "wrong", "hang" or "crash", with the reason. The child ends without its handlers of `atexit`.
    """
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(read)
        with contextlib.suppress(BaseException):
            sys.stderr = sys.stdout = io.StringIO()
            try:
                outcome = "ended", work()
            except BaseException as error:
                outcome = "wrong", describe(error, 3)
            with os.fdopen(write, "w") as pipe:
                json.dump(outcome, pipe)
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        is_ready = bool(select.select([pipe], [], [], seconds)[0])
        if not is_ready:
            os.kill(child, signal.SIGKILL)
        text = pipe.read() if is_ready else ""
    status = os.waitpid(child, 0)[1]
    if text:
        outcome, result = json.loads(text)
        return outcome, result
    if not is_ready:
        return "hang", f"{seconds:g} s"
    ended_by = f"signal {os.WTERMSIG(status)}" if os.WIFSIGNALED(status) else f"exit {status >> 8}"
    return "crash", ended_by


def describe(error: BaseException, num_frames: int = 1) -> str:
    """One line: type, message, and where it was raised, innermost last."""
    frames = traceback.extract_tb(error.__traceback__)[-num_frames:]
    places = ", ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in frames)
    text = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
    return f"{text} ({places})" if places else text


def repeat(name: str, **options: object) -> str:
    """The command that repeats one attempt of a program of this folder."""
    given = [f"--{key.replace('_', '-')} {value}" for key, value in options.items() if value != ""]
    return " ".join([f"python -m tests.support.{name}", *given])
