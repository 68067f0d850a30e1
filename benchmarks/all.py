"""The figures of README and docs, by one run of one revision. Calls are timed in bfloat16, some of
them once more in float32; on a processor without instructions for bfloat16 it is the other way
round, since plain `generate` is not at its best there. Each stage is one of the other benchmarks in
a process of its own, most telling first, with a share of the minutes that its turns are planned
with. Its file takes the place of the one in the folder, `benchmarks/results` (with `--quick` a new
one), which `python -m benchmarks.readme` renders; `all.json` lists the stages, their seconds, and
why one failed; with `--only`, it keeps the other stages of the same revision."""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import machine, report, runner, stages
from benchmarks.peers import TITLES
from benchmarks.runner import option
from benchmarks.stages import Stage

MINUTES = 60.0
NAME = "all"  # of the file that lists the stages

HAS_BF16 = bool(machine.bf16_instructions())
DTYPE, OTHER_DTYPE = ("bfloat16", "float32") if HAS_BF16 else ("float32", "bfloat16")
CALLS, SHAPE = "generate --device cpu --no-peers --no-memory", "cpu-llama-100m"
WHOLE = "generate --device cpu --no-peers --only W1,W2,W3,W4,W5,W6,W9,W10,waste"
SIDE = "side_by_side --processes 0 --only"
STAGES = (
    Stage("whole", 22, f"{WHOLE} --dtype {DTYPE}", "", f"generate-{SHAPE}", tuple(TITLES)),
    Stage(
        "other_dtype",
        14,  # 25 minutes of plain without bfloat16 instructions
        f"{CALLS} --only W1,W2,W3,W4,W5,W6 --dtype {OTHER_DTYPE}",
        "--repeats 1",
        f"generate-other-dtype-{SHAPE}",
    ),
    Stage("speculation", 1, "speculation --only W7,W8", "", "speculation-cpu"),
    Stage("rollouts", 5, "grpo", "--turns 3", "grpo-cpu-llama-24m"),
    Stage("trainer", 2.5, "trainer", "", "trainer-cpu"),
    Stage(
        "encoders",
        3,
        f"{SIDE} '^(T5|BART|Whisper-t).* 16'",
        "--turns 5",
        "side_by_side-encoders-cpu",
    ),
    Stage(
        "hybrids",
        3.5,
        f"{SIDE} '^(?!T5|BART|Whisper-t).* 16 new$'",
        "--turns 5",
        "side_by_side-cpu",
    ),
    Stage("first_call", 1.5, f"first_call --dtype {DTYPE}", "--turns 3", f"first_call-{SHAPE}"),
    Stage("adapters", 1.5, "lora", "--turns 5", "lora-cpu"),
    Stage("tiers", 1.5, "tiers --only prefix", "", "tiers-cpu"),
    Stage("small_pool", 1, "tiers --only W3", "--model llama-24m", "tiers-w3-cpu"),
    Stage(
        "int8",
        2.5,
        f"{CALLS} --only W6 --dtype {DTYPE} --int8",
        "--repeats 5",
        f"generate-int8-{SHAPE}",
        ("openvino",),
    ),
    Stage(
        "invariant",
        1,
        f"{CALLS} --only W6 --dtype {DTYPE} --batch-invariant",
        "--repeats 5",
        f"generate-invariant-{SHAPE}",
    ),
)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = runner.parser_of(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    names = [stage.name for stage in STAGES]
    args.only = runner.parts(parser, args.only, names) or names
    if not 0 < args.minutes < math.inf:
        parser.error(f"argument --minutes: must be positive and finite, not {args.minutes:g}")
    if args.peers is None:
        args.peers = [] if args.quick else list(TITLES)
    if args.out is None:
        args.out = Path(tempfile.mkdtemp(prefix="all-")) if args.quick else report.RESULTS
    runner.writable(parser, "--out", args.out)
    return args


def options_of(args: argparse.Namespace) -> stages.Options:
    return stages.Options(args.minutes, MINUTES, args.out.resolve(), args.quick, args.peers)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; the exit status is 1 if a stage failed or another run writes to the
    folder, 2 if there is a list of stages that cannot be read, 130 after Ctrl-C."""
    args = parse(argv)
    chosen = [stage for stage in STAGES if stage.name in args.only]
    try:
        entries = stages.run(chosen, options_of(args), NAME)
    except report.Damaged as error:
        print(error, file=sys.stderr)
        return 2
    print(f"results: {args.out}")
    return int(any(entry["reason"] for entry in entries))


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
