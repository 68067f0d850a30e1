"""The longest gap between two tokens of a stream while other clients of the server do their worst.
Starts `transformers serve` on the engine (extra `serve` and `transformers[serving]`), with a folder
of prefix tiers whose files cannot be read or written (EIO) from the first turn on. In each turn
four clients stream, alone, or while one client for each entry of `ATTACKS` sends requests one after
another. A turn's figure is the longest time between two events of a stream."""

from __future__ import annotations

import argparse
import contextlib
import errno
import itertools
import json
import os
import random
import string
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import runner
from benchmarks.peers.worker import free_port, start, wait_until_up

STREAMS = 4
ALONE, BESIDE = "streams alone", "beside hostile requests"
MOST_SECONDS, MOST_SLOW = 0.5, 0.05  # a gap, and the share of runs that may have a longer one
ROOT = Path(__file__).resolve().parents[1]
EIO, TIER = "HF_PAGED_EIO", "hf_paged-tier"
"""A file: while it exists, the files in the folder of tiers cannot be read or written."""
NUM_BLOCKS = 2048
FIRST = 5  # events of a stream before decoding has begun

Body = dict[str, Any]


def _chat(content: str, **options: Any) -> tuple[str, Body]:
    messages = [{"role": "user", "content": content}]
    return "chat/completions", {"messages": messages, "max_tokens": 8, "temperature": 0, **options}


def _complete(prompt: str) -> tuple[str, Body]:
    return "completions", {"prompt": prompt, "max_tokens": 8}


DRAW = random.Random(0)


def word() -> str:
    return "".join(DRAW.choices(string.ascii_lowercase, k=8))


def deep(levels: int) -> Any:
    return [deep(levels - 1)] if levels else {}


WORDS = [word() for _ in range(8)]
STOPS = ["a" * 4033, *"abcdefghi" * 7]
BAD_WORDS = json.dumps({"bad_words_ids": [[5, 6]] * 50_000})
BEAMS = json.dumps({"num_beams": 100})
BIASES = {str(token): token % 3 for token in range(2000)}
ATTACKS: dict[str, Callable[[], tuple[str, Body]]] = {
    "stop strings of 30,000 characters": lambda: _chat(word(), stop="a" * 30_000),
    "stop strings of 4,096 characters": lambda: _chat(word(), stop=STOPS),
    "prompts of 1 MB": lambda: _complete(f"{word()} " * 111_111),
    "messages of 10 MB": lambda: _chat(f"{word()} " * 1_111_111),
    "prompts that fit": lambda: _complete(f"{DRAW.choice(WORDS)} " * 1500),
    "biases": lambda: _chat(word(), logit_bias=BIASES),
    "bad words": lambda: _chat(word(), generation_config=BAD_WORDS),
    "many beams": lambda: _chat(word(), max_tokens=10**9, generation_config=BEAMS),
    "deep bodies": lambda: _chat(word(), tools=deep(500)),
    "many choices": lambda: _chat(word(), n=32, temperature=1),
    "tiny requests": lambda: _chat(word(), max_tokens=1),
}


def serve(arguments: list[str]) -> None:
    """Runs `transformers ARGUMENTS` with files that fail while the file `EIO` exists."""

    def failing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Path, *args: Any) -> Any:
            if TIER in str(path) and os.path.exists(os.environ[EIO]):
                raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
            return real(path, *args)

        return call

    Path.read_bytes = failing(Path.read_bytes)  # type: ignore[method-assign]
    Path.write_bytes = failing(Path.write_bytes)  # type: ignore[method-assign]
    from transformers.cli.transformers import main

    sys.argv = ["transformers", *arguments]
    main()


def save_model(folder: Path, name: str) -> None:
    """Saves a model with random weights, and a tokenizer of characters whose other tokens only the
    model writes."""
    from benchmarks.models import SHAPES, build
    from tests.ecosystem.served_app import TEMPLATE, characters

    tokenizer = characters(SHAPES[name].vocab)
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    build(SHAPES[name]).save_pretrained(folder)


class Server(NamedTuple):
    """`transformers serve` in a process."""

    url: str
    model: str

    def request(self, path: str, body: Body) -> urllib.request.Request:
        content = json.dumps({"model": self.model, **body}).encode()
        header = {"Content-Type": "application/json"}
        return urllib.request.Request(f"{self.url}/v1/{path}", content, header)


@contextlib.contextmanager
def served(folder: Path) -> Iterator[Server]:
    """The model in a folder, served within the context."""
    port = free_port()
    command = [sys.executable, "-m", "hf_paged", "run", "--engine"]
    command += ["--set", f"num_blocks={NUM_BLOCKS}"]
    command += ["--set", f"prefix_tiers={str(folder / TIER)!r}"]
    command += [__file__, "--serve", "serve", folder, "--device", "cpu"]
    command += ["--host", "127.0.0.1", "--port", port]
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    switches = {EIO: str(folder / EIO), "HF_HUB_OFFLINE": "1", "PYTHONPATH": paths}
    with (folder / "log.txt").open("w") as log:
        process = start(
            command, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **switches}
        )
    try:
        address = f"http://127.0.0.1:{port}"
        try:
            wait_until_up(process, address)
        except RuntimeError as error:
            raise RuntimeError((folder / "log.txt").read_text()) from error
        yield Server(address, str(folder))
    finally:
        process.terminate()
        try:
            process.wait(30)
        finally:
            process.kill()


def answer(request: urllib.request.Request) -> Any:
    try:
        return urllib.request.urlopen(request, timeout=120)
    except urllib.error.HTTPError as error:  # an answer, too
        return error


def longest_gap(server: Server, seed: int, seconds: float, names: list[str]) -> runner.Turn:
    """The longest gap of the streams of one run, the number of their events, and the answers by
    status."""
    # made before: this process measures the streams, too
    requests = {name: [server.request(*ATTACKS[name]()) for _ in range(4)] for name in names}
    is_over, ready, statuses = threading.Event(), threading.Semaphore(0), Counter[int]()

    def stream(number: int) -> list[float]:
        """The times of the events with tokens."""
        times: list[float] = []
        story = _chat(f"a story about {number} ", max_tokens=4000, stream=True)
        with answer(server.request(*story)) as events:
            for line in events:
                if line.startswith(b"data:") and b'"content"' in line:
                    times.append(time.perf_counter())
                    if len(times) == FIRST:
                        ready.release()
                    if is_over.is_set():  # after the gap in which the run ended
                        break
        if len(times) < FIRST:
            ready.release()
        return times[FIRST - 1 :]

    def attack(name: str) -> None:
        for request in itertools.cycle(requests[name]):
            if is_over.is_set():
                break
            with answer(request) as found:
                found.read()
            statuses[found.status] += 1

    with ThreadPoolExecutor(STREAMS + len(names)) as pool:
        streams = [pool.submit(stream, seed * STREAMS + place) for place in range(STREAMS)]
        for _ in streams:
            ready.acquire()
        for name in names:
            pool.submit(attack, name)
        time.sleep(seconds)
        is_over.set()
    times = [one.result() for one in streams]
    gaps = [after - before for mine in times for before, after in itertools.pairwise(mine)]
    told = ", ".join(f"{count} of {status}" for status, count in sorted(statuses.items()))
    return runner.Turn(
        max(gaps, default=0.0), figures={"events": sum(map(len, times)), "answers": told}
    )


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), args.model)
        with served(Path(folder)) as server:
            seeds = itertools.count()

            def gap(turn: int, names: list[str]) -> runner.Turn:
                return longest_gap(server, next(seeds), args.seconds, names)

            gap(-1, [])  # records steps
            gap(-1, ["prompts that fit"])  # leaves files
            Path(folder, EIO).touch()
            yield runner.Case("longest gap", runner.each(gap, {ALONE: [], BESIDE: args.only}))


def slow(data: runner.Data) -> int:
    """Number of runs beside others with a gap that is too long."""
    (row,) = (row for row in data["rows"] if row["system"] == BESIDE)
    return sum(seconds > MOST_SECONDS for seconds in row["seconds"])


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    notes=lambda rows: [f"gaps above {MOST_SECONDS} s beside others: {slow({'rows': rows})}"],
    options={
        "--seconds": runner.option(type=float, default=6.0),
        "--model": runner.MODEL | {"default": "llama-24m"},
        "--only": runner.option(nargs="*", default=list(ATTACKS), choices=list(ATTACKS)),
    },
    turns=20,
    fixed={"warm_ups": 0},
    quick={"turns": 1, "seconds": 2.0, "model": "llama-tiny"},
    is_wrong=lambda data: slow(data) > MOST_SLOW * len(data["rows"][-1]["seconds"]),
)

if __name__ == "__main__":
    if sys.argv[1:2] == ["--serve"]:
        serve(sys.argv[2:])
    else:
        raise SystemExit(BENCHMARK.main())
