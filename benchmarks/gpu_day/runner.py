"""The stages of a run, in the order of what they tell; runs each in a process with a limit, and
keeps what it finds."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu_day.record import FAKE
from benchmarks.gpu_day.summary import summary
from benchmarks.report import replace_file

ROOT = Path(__file__).resolve().parents[2]
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals that end a run
RESERVE_SECONDS = 4.0  # for the summary
LOG_CHARACTERS = 3000  # of a stage's output, kept in its file
TIMEOUT = "Timeout ("  # in the log of a stage that ended itself, before the stacks of its threads


MINUTES = 9.0
"""Length of the run that the stages' seconds are of."""


@dataclass(frozen=True)
class Stage:
    """
    Args:
        function (`str`): As `module:function`; it takes a [`Record`].
        seconds (`float`): Its part of a run of `MINUTES` minutes, without the imports; 0: all that
            is left.
        is_beside (`bool`): Whether it runs beside the stages after it, up to the first that
            `is_timed`.
        is_timed (`bool`): Whether it measures time, so that nothing else may run.
        is_interpreted (`bool`): Whether its kernels run in Triton's interpreter where there is no
            GPU.
        has_cpp (`bool`): Whether it also uses the C++ kernels on a machine with a GPU. They take
            long to build.
    """

    name: str
    title: str
    function: str
    seconds: float
    is_beside: bool = False
    is_timed: bool = False
    is_interpreted: bool = False
    has_cpp: bool = False


STAGES = (
    Stage("0", "kernels compiled ahead", "benchmarks.gpu_day.compiling:run", 90, is_beside=True),
    Stage(
        "a",
        "every kernel once, against its reference",
        "benchmarks.gpu_day.kernels:run",
        30,
        is_interpreted=True,
    ),
    Stage("b", "tokens equal to plain generate's, float32", "benchmarks.gpu_day.parity:run", 150),
    Stage("c", "attention alone", "benchmarks.gpu_day.attention:run", 40, is_timed=True),
    Stage("d", "steps of random models", "benchmarks.gpu_day.steps:run", 80, is_timed=True),
    Stage("e", "whole calls", "benchmarks.gpu_day.calls:run", 100, is_timed=True),
    Stage("f", "pytest -m gpu", "benchmarks.gpu_day.suite:run", 0, has_cpp=True),
)


@dataclass(frozen=True)
class Options:
    """
    Args:
        minutes (`float`): For all stages; scales their limits.
        out (`Path`): Folder of the results.
        device (`str`): "cuda" or "fake".
        cache (`Path`, *optional*): Folder of compiled kernels; `None`: Triton's own.
        revision (`str`): Of the checkout, where there is no `.git` to tell.
        start_seconds (`float`): For the imports of a stage, on a disk that has read none of them
            yet.
        grace_seconds (`float`): By which a stage may overrun.
        least_seconds (`float`): Of a stage in a short run.
    """

    minutes: float
    out: Path
    device: str
    cache: Path | None = None
    revision: str = ""
    start_seconds: float = 40.0
    grace_seconds: float = 10.0
    least_seconds: float = 25.0

    def path(self, stage: Stage) -> Path:
        """The file of a stage's results."""
        return self.out / f"gpu_day-{stage.name}.json"


def run(stages: Sequence[Stage], options: Options) -> int:
    """Runs `stages`, prints the summary, and returns the exit status: 0 if each is "ok" or
    "skipped"."""
    options.out.mkdir(parents=True, exist_ok=True)
    for stage in stages:
        options.path(stage).unlink(missing_ok=True)  # of an earlier run
    end = time.monotonic() + 60 * options.minutes - RESERVE_SECONDS
    running: list[Running] = []
    results: dict[str, dict[str, Any]] = {}

    def finish(process: Running) -> None:
        results[process.stage.name] = process.finish()
        running.remove(process)  # only now: if a signal ends the wait, the stage is ended below
        print(
            f"{process.stage.name}: {results[process.stage.name]['status']}",
            file=sys.stderr,
            flush=True,
        )

    # The results are kept then, too. Under `nohup` the loss of the terminal ends nothing.
    ending = [number for number in ENDING if signal.getsignal(number) != signal.SIG_IGN]
    handlers = {
        number: signal.signal(number, lambda number, _: sys.exit(128 + number)) for number in ending
    }
    try:
        for stage in stages:
            if stage.is_timed:
                for process in list(running):
                    finish(process)
            left = end - time.monotonic()
            planned = (
                max(options.least_seconds, stage.seconds * options.minutes / MINUTES)
                if stage.seconds
                else left
            )
            if left < options.least_seconds:
                results[stage.name] = {
                    "status": "skipped: no time left",
                    "title": stage.title,
                    "rows": [],
                }
                continue
            running.append(Running(stage, options, planned, left))
            if not stage.is_beside:
                finish(running[-1])
        for process in list(running):
            finish(process)
    finally:
        for number in ending:
            signal.signal(number, signal.SIG_IGN)  # once is enough
        for process in running:
            process.kill()
            results[process.stage.name] = process.finish()
        text = summary(
            {stage.name: results[stage.name] for stage in stages if stage.name in results}
        )
        replace_if_possible(options.out / "gpu_day-summary.txt", text)
        print(text, flush=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    return int(
        any(not result["status"].startswith(("ok", "skipped")) for result in results.values())
    )


def replace_if_possible(path: Path, content: str) -> None:
    """Writes a file, or says why it cannot, as on a full disk: what is printed is then all that
    remains."""
    try:
        replace_file(path, content)
    except OSError as error:
        print(f"{path}: {error}", file=sys.stderr, flush=True)


class Running:
    """The process of a stage that was started."""

    def __init__(self, stage: Stage, options: Options, seconds: float, left: float) -> None:
        self.stage = stage
        self._path = options.path(stage)
        self._log = tempfile.TemporaryFile()
        most = options.start_seconds + seconds + options.grace_seconds
        self._start, self._limit = time.monotonic(), min(most, left)
        told = {
            "function": stage.function,
            "path": str(self._path),
            "device": options.device,
            "seconds": min(seconds, left),
            "start_seconds": options.start_seconds,
            "grace_seconds": options.grace_seconds,
            "cache": str(options.cache or ""),
            "revision": options.revision,
        }
        command = [sys.executable, "-m", "benchmarks.gpu_day.stage", json.dumps(told)]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=self._log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # its own processes end with it
            cwd=ROOT,
            env=environment(stage, options),
        )

    def finish(self) -> dict[str, Any]:
        """Waits for the end, at most until the limit; writes and returns the results."""
        try:
            status = self._process.wait(max(0.0, self._start + self._limit - time.monotonic()))
        except subprocess.TimeoutExpired:
            status = None
        seconds = time.monotonic() - self._start
        self.kill()
        end = self._log.seek(0, os.SEEK_END)
        self._log.seek(max(0, end - 4 * LOG_CHARACTERS))  # a character has at most 4 bytes
        log = self._log.read().decode(errors="replace")[-LOG_CHARACTERS:]
        self._log.close()
        data = self._written()
        if status is None or (status and TIMEOUT in log):
            data["status"] = f"timed out after {seconds:.0f} s"
        elif status:
            data["status"] = f"crashed: exit status {status}"
        data.setdefault("status", "failed: no results")
        data |= {"title": self.stage.title, "seconds": round(seconds, 1), "log": log}
        replace_if_possible(self._path, json.dumps(data, indent=1) + "\n")
        return data

    def _written(self) -> dict[str, Any]:
        for part in self._path.parent.glob(f"{self._path.name}.*"):
            part.unlink()  # of a write that was cut off
        try:
            data: dict[str, Any] = json.loads(self._path.read_text())
        except (OSError, ValueError):
            data = {"facts": {}, "rows": []}
        return data

    def kill(self) -> None:
        """Ends the process and all that it started."""
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait(5)
        except (ProcessLookupError, PermissionError, subprocess.TimeoutExpired):
            # a driver may hold it
            pass


def environment(stage: Stage, options: Options) -> dict[str, str]:
    """The environment of a stage: this checkout is imported, nothing is downloaded."""
    values = dict(os.environ)
    values["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [values.get("PYTHONPATH")])])
    values |= {"PYTHONUNBUFFERED": "1", "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    values["TRITON_INTERPRET"] = "0"
    if options.device == FAKE:
        values |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        values["TRITON_INTERPRET"] = str(int(stage.is_interpreted))
    elif not stage.has_cpp:
        values["HF_PAGED_CPP"] = "0"
    if options.cache is not None:
        values["TRITON_CACHE_DIR"] = str(options.cache)
    return values
