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
from transformers import GenerationConfig

import hf_paged
from hf_paged import PagedConfig, PagedEngine, PrefixTiers
from tests.support import models
from tests.support.engine_helpers import lone_run, prompts, run_all, tokens_of
from tests.support.models import Rows
from tests.support.scenarios import GREEDY

SECONDS = 60
USER = 54321  # root has no limit of threads
PROMPTS = prompts(40, 33)


def generate(model: Any, folder: Path) -> Rows:
    paged = {"cache_implementation": "paged", "cache_config": {"idle_release_seconds": 0.1}}
    return [lone_run(model, prompt, GREEDY, **paged)[0] for prompt in PROMPTS]


def run_engine(engine: PagedEngine) -> Rows:
    return [rows[0] for rows in tokens_of(engine.generate(PROMPTS, GREEDY))]


def engine_generate(model: Any, folder: Path) -> Rows:
    return run_engine(PagedEngine(model, PagedConfig(block_size=8)))


def steps_with_tiers(model: Any, folder: Path) -> Rows:
    """Evicts all cached blocks to the tiers between two runs of the requests."""
    tiers = PrefixTiers(host_bytes=1 << 20, disk_path=folder / "tier")
    engine = PagedEngine(model, PagedConfig(block_size=8, prefix_caching=True, prefix_tiers=tiers))
    runs = []
    for _ in range(2):
        for number, prompt in enumerate(PROMPTS):
            engine.add_request(prompt, GREEDY, request_id=str(number))
        results = run_all(engine)
        runs.append([rows[0] for rows in tokens_of(results[name] for name in sorted(results))])
        engine.free()
    assert runs[0] == runs[1]
    return runs[1]


def generate_batch(model: Any, folder: Path) -> Rows:
    hf_paged.install(continuous_batching=True)
    outputs = model.generate_batch(PROMPTS, GenerationConfig(**GREEDY))
    for output in outputs.values():
        if output.error is not None:
            raise RuntimeError(output.error)
    return [output.generated_tokens for output in outputs.values()]


def saved_prefix(model: Any, folder: Path) -> Rows:
    config = PagedConfig(block_size=8, prefix_caching=True)
    with PagedEngine(model, config) as engine:
        engine.save_prefix(PROMPTS[0], folder / "prefix")
    with PagedEngine(model, config) as engine:
        engine.load_prefix(folder / "prefix")
        return run_engine(engine)


ENTRY_POINTS: dict[str, Callable[[Any, Path], Rows]] = {
    function.__name__: function
    for function in (generate, engine_generate, steps_with_tiers, generate_batch, saved_prefix)
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
        size = psutil.Process().memory_info().vms + (int(number) << 20)
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    else:
        size = min(set(range(4096)).difference(map(int, os.listdir("/proc/self/fd")))) + int(number)
        resource.setrlimit(resource.RLIMIT_NOFILE, (size, size))


def run(name: str, text: str, model: Any, expected: Rows, folder: Path) -> int:
    """Runs an entry point at a limit; the process then ends as a script does, through the handlers
    of `atexit`."""
    try:
        limit(text)
        tokens = ENTRY_POINTS[name](model, folder)
        outcome = "tokens" if tokens == expected else f"wrong: {tokens}, not {expected}"
    except Exception as error:
        lines = traceback.format_exception_only(error)
        outcome = f"raised {lines[-1].strip()[:200]}"
    print(f"{text}, {name}: {outcome}", flush=True)
    return int(outcome.startswith("wrong"))


def main(folder: str, *limits: str) -> int:
    torch.set_num_threads(1)
    model: Any = models.build("llama")
    expected = [lone_run(model, prompt, GREEDY)[0] for prompt in PROMPTS]
    num_failed = 0
    for text in limits:
        for name in ENTRY_POINTS:
            path = tempfile.mkdtemp(dir=folder)
            os.chmod(path, 0o777)
            child = os.fork()
            if not child:
                signal.alarm(SECONDS)
                return run(name, text, model, expected, Path(path))
            status = os.waitpid(child, 0)[1]
            if os.WIFSIGNALED(status):
                print(f"{text}, {name}: wrong: ended by signal {os.WTERMSIG(status)}", flush=True)
            num_failed += status != 0
    return num_failed


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main(*sys.argv[1:]))
