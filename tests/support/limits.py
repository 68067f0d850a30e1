"""Entry points in processes that may have few threads, little memory or few files: `python -m
tests.support.limits FOLDER LIMIT ...`, with a limit such as `threads`, `memory 8` (MiB) or `files
2`.

Each entry point runs in a child process of its own, forked before its first call. It prints
"tokens", or the error that was raised; "wrong", a signal that ended it, and `SECONDS` without an
end are failures.
"""

from __future__ import annotations

import _thread
import contextlib
import gc
import os
import resource
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch

from hf_paged import PrefixTiers
from hf_paged.cache.free_memory import trim
from tests.support import models, scenarios
from tests.support.scenarios import GREEDY as GREEDY
from tests.support.scenarios import SCENARIOS, Case

SECONDS = 60
USER = 54321  # root has no limit of threads


class Generate(scenarios.Generate):
    """The pool is released soon after the call, by a thread."""

    paged = {**models.PAGED, "cache_config": {"idle_release_seconds": 0.1}}


class Tiers(scenarios.Engine):
    """Evicts all cached blocks to the tiers between two runs of the requests."""

    def __init__(self) -> None:
        tiers = PrefixTiers(host_bytes=1 << 20, disk_path=tempfile.mkdtemp())
        super().__init__(models.build("llama"), "steps", prefix_tiers=tiers)

    def check(self) -> None:
        self.drain()
        self.engine.free()
        super().check()


ENTRY_POINTS: dict[str, Callable[[], Case]] = {
    "generate": lambda: Generate(models.build("llama"), "greedy"),
    "engine_generate": SCENARIOS["engine.generate"],
    "steps_with_tiers": Tiers,
    "generate_batch": SCENARIOS["native manager"],
    "saved_prefix": SCENARIOS["saved prefixes"],
}


def refuse_threads(*_: Any) -> Any:
    raise RuntimeError("can't start new thread")


def limit(text: str) -> None:
    """Sets a limit for this process, just above what it uses now."""
    kind, number = (*text.split(), "0")[:2]
    if kind == "threads" and hasattr(os, "setuid") and not os.getuid():
        with contextlib.suppress(OSError):
            os.setgid(USER)
            os.setuid(USER)
    if kind == "threads":
        resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
        try:
            _thread.start_new_thread(int, ())
        except RuntimeError:
            return
        # the limit does not bind this user
        for name in ("_start_new_thread", "_start_joinable_thread"):
            if hasattr(threading, name):
                setattr(threading, name, refuse_threads)
    elif kind == "memory":
        gc.collect()
        trim()
        size = psutil.Process().memory_info().vms + (int(number) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    else:
        size = min(set(range(4096)).difference(map(int, os.listdir("/proc/self/fd")))) + int(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (size, size))


def run(name: str, text: str, case: Case) -> int:
    """Runs an entry point at a limit; the process then ends as a script does, through the handlers
    of `atexit`."""
    outcome = "tokens"
    try:
        limit(text)
        case.run()
        case.check()
    except Exception as error:
        lines = traceback.format_exception_only(error)
        how = "wrong:" if isinstance(error, AssertionError) else "raised"
        outcome = f"{how} {lines[-1].strip()[:200]}"
    print(f"{text}, {name}: {outcome}", flush=True)
    return int(outcome.startswith("wrong"))


def main(folder: str, *limits: str) -> int:
    torch.set_num_threads(1)
    tempfile.tempdir = folder
    num_failed = 0
    for text in limits:
        for name, build in ENTRY_POINTS.items():
            case = build()
            for path in Path(folder).rglob("*"):
                path.chmod(0o777)
            child = os.fork()
            if not child:
                signal.alarm(SECONDS)
                return run(name, text, case)
            status = os.waitpid(child, 0)[1]
            if os.WIFSIGNALED(status):
                print(f"{text}, {name}: wrong: ended by signal {os.WTERMSIG(status)}", flush=True)
            num_failed += status != 0
    return num_failed


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(*sys.argv[1:]))
