"""The figures of README and docs, by one run of one revision.

    python -m benchmarks.all [--minutes 60] [--out FOLDER] [--only whole,rollouts] [--quick]
                             [--peers openvino vllm ...]

Each stage is one of the other benchmarks in a process of its own, most telling first, with a share
of the minutes that its turns are planned with. Its file takes the place of the one in the folder,
`benchmarks/results` (with `--quick` a new one), which `python -m benchmarks.readme` renders;
`all.json` lists the stages, their seconds, and why one failed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks import machine, report, runner
from benchmarks.peers import TITLES, kill_group
from benchmarks.runner import Data, option

ROOT = Path(__file__).resolve().parent.parent
MINUTES, QUICK_MINUTES, LEAST_SECONDS = 60.0, 4.0, 60.0
OVERRUN = 1.4  # times its minutes, after which a stage is ended
NAME = "all"  # of the file that lists the stages
GRACE_SECONDS = 20.0


class Stage(NamedTuple):
    """
    Args:
        minutes (`float`): Of a run of `MINUTES`.
        command (`str`): Module of this package, and its arguments.
        full (`str`): Arguments of a run that is not quick.
        file (`str`): Name of the JSON file.
        peers (`Sequence[str]`): Engines for processors that run beside us.
    """

    name: str
    minutes: float
    command: str
    full: str
    file: str
    peers: Sequence[str] = ()


CALLS, SHAPE = "generate --device cpu --no-peers --no-memory", "cpu-llama-100m"
WHOLE = "generate --device cpu --no-peers --only W1,W2,W3,W4,W5,W6,W9,W10,waste"
SIDE = "side_by_side --processes 0 --only"
STAGES = (
    Stage("whole", 25, WHOLE, "", f"generate-{SHAPE}", tuple(TITLES)),
    Stage(
        "float32",
        5,
        f"{CALLS} --only W1,W2,W3,W4,W5,W6 --dtype float32",
        "--repeats 1",
        f"generate-float32-{SHAPE}",
    ),
    Stage("speculation", 3, "speculation --only W7,W8", "", "speculation-cpu"),
    Stage("rollouts", 4, "grpo", "--turns 5", "grpo-cpu-llama-24m"),
    Stage("trainer", 3, "trainer", "", "trainer-cpu"),
    Stage(
        "encoders",
        4,
        f"{SIDE} '^(T5|BART|Whisper-t).* 16'",
        "--turns 5",
        "side_by_side-encoders-cpu",
    ),
    Stage(
        "hybrids", 5, f"{SIDE} '^(?!T5|BART|Whisper-t).* 16 new$'", "--turns 5", "side_by_side-cpu"
    ),
    Stage("first_call", 2, "first_call", "--turns 3", f"first_call-{SHAPE}"),
    Stage("adapters", 3, "lora", "--turns 5", "lora-cpu"),
    Stage("tiers", 2, "tiers --only prefix", "", "tiers-cpu"),
    Stage("small_pool", 1, "tiers --only W3", "--model llama-24m", "tiers-w3-cpu"),
    Stage(
        "int8",
        1.5,
        f"{CALLS} --only W6 --int8",
        "--repeats 5",
        f"generate-int8-{SHAPE}",
        ("openvino",),
    ),
    Stage(
        "invariant",
        1,
        f"{CALLS} --only W6 --batch-invariant",
        "--repeats 5",
        f"generate-invariant-{SHAPE}",
    ),
)


def command_of(stage: Stage, args: argparse.Namespace, minutes: float, path: Path) -> list[str]:
    module, *arguments = shlex.split(stage.command)
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    if peers := [name for name in stage.peers if name in args.peers]:
        command += ["--peers", *peers]
    full = [*shlex.split(stage.full), "--minutes", f"{minutes:g}"]
    command += ["--quick"] if args.quick else full
    return [*command, "--json", os.path.relpath(path, ROOT)]


def run_stage(stage: Stage, args: argparse.Namespace, left: float) -> Data:
    """Runs a stage for at most `left` seconds; its entry in `all.json`."""
    path = args.out / f"{stage.file}.json"
    path.unlink(missing_ok=True)  # of an earlier run
    minutes = stage.minutes * args.minutes / MINUTES
    found = {"name": stage.name, "file": stage.file, "seconds": 0.0}
    if left < LEAST_SECONDS:
        return found | {"reason": "no time was left"}
    most = min(left, LEAST_SECONDS + OVERRUN * 60 * (QUICK_MINUTES if args.quick else minutes))
    start, reason = time.monotonic(), ""
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            command_of(stage, args, minutes, path),
            cwd=ROOT,
            env={**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # what it starts ends with it
        )
        try:
            status = process.wait(most)
        except subprocess.TimeoutExpired:
            status, reason = 0, f"ended after {most:.0f} s"
            os.killpg(process.pid, signal.SIGINT)  # it ends its peers
            with contextlib.suppress(subprocess.TimeoutExpired, ProcessLookupError):
                process.wait(GRACE_SECONDS)
        finally:
            kill_group(process)
            process.wait()
        log.seek(0)
        lines = [line.strip() for line in log.read().splitlines() if line.strip()]
    if status:
        reason = f"exit status {status}: {lines[-1][:200] if lines else ''}"
    elif not reason and not path.exists():
        reason = "left no file"
    return found | {"seconds": round(time.monotonic() - start, 1), "reason": reason}


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = runner.parser_of(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    names = [stage.name for stage in STAGES]
    args.only = runner.parts(parser, args.only, names) or names
    if args.peers is None:
        args.peers = [] if args.quick else list(TITLES)
    if args.out is None:
        args.out = Path(tempfile.mkdtemp(prefix="all-")) if args.quick else report.RESULTS
    args.out = args.out.resolve()
    return args


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 if a stage failed."""
    args = parse(argv)
    args.out.mkdir(parents=True, exist_ok=True)
    data: dict[str, Any] = {"command": report.command_line(), "facts": machine.facts()}
    data["stages"], end = [], time.monotonic() + 60 * args.minutes
    for stage in [stage for stage in STAGES if stage.name in args.only]:
        entry = run_stage(stage, args, end - time.monotonic())
        data["stages"].append(entry)
        report.replace_file(args.out / f"{NAME}.json", json.dumps(data, indent=1) + "\n")
        print(f"{stage.name}: {entry['seconds']:.0f} s {entry['reason']}".strip(), flush=True)
    print(f"results: {args.out}")
    return int(any(entry["reason"] for entry in data["stages"]))


OPTIONS = {
    "--minutes": option("for all stages (%(default)g)", type=float, default=MINUTES),
    "--out": option("folder of the results", type=Path),
    "--only": option("stages, by commas (all)", default=""),
    "--peers": option(
        "engines for processors (all; none with --quick)", nargs="*", choices=list(TITLES)
    ),
    "--quick": runner.flag("small: only shows that it runs"),
}

if __name__ == "__main__":
    raise SystemExit(main())
