"""The first minutes on a GPU: whether everything works, and how fast. Stages, each in a process
with a limit: a runs the kernels' tests; b compares tokens with plain `generate`; c, d and e measure
attention and the whole calls of two models; f runs `pytest -m gpu`. A stage writes its rows while
it runs, and the tables of all come last. Needs neither a network nor `.git`. With `--device fake`
the same code runs on small sizes on the CPU; it shows that it runs, and its figures say nothing."""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from benchmarks import report, runner, stages, tables
from benchmarks.runner import option
from benchmarks.stages import NO_TIME, Stage

MINUTES, CUDA, FAKE = 9.0, "cuda", "fake"
NAME = "gpu_day"  # of the file that lists the stages
CONTENDERS = "'contiguous sdpa|ours|ours: int8|HF sdpa|varlen_attn|aten.*'"
HEADS = "llama-3.1-8b .* (64 x 8192|8 x 1024|8 x 512 of 4096|1 x 32768)|qwen3.* 64 x 1024"
ATTENTION = f"attention --contenders {CONTENDERS}"
KERNELS = "--paths 'tests/kernels/triton/test_*.py' 'tests/attention/test_*.py'"
PARITY = "--each --paths tests/test_gpu.py"
ONLY = f"--only '({HEADS}) 16 bf16' --repeats 5"
CALLS = "generate --no-memory --no-peers --only W1,W3,W6"
LLAMA, QWEN = (f"--model {name} --repeats 3" for name in ("llama-3.1-8b", "qwen3-0.6b"))
STAGES = tuple(
    stage._replace(file=f"{NAME}-{stage.name}")
    for stage in (
        Stage("a", 1.5, "gpu_day.suite", KERNELS, title="kernels against their reference"),
        Stage("b", 2.5, "gpu_day.suite", PARITY, title="tokens of plain generate, float32"),
        Stage("c", 1, ATTENTION, ONLY, title="attention alone"),
        Stage("d", 1.7, CALLS, LLAMA, title="whole calls"),
        Stage("e", 1.5, CALLS, QWEN, title="whole calls of a small model"),
        Stage("f", 0, "gpu_day.suite", title="pytest -m gpu"),
    )
)


def variables(stage: Stage, args: argparse.Namespace) -> dict[str, str]:
    """The environment of a stage."""
    found = {"TRITON_INTERPRET": "0", "TOKENIZERS_PARALLELISM": "false"}
    if args.device == FAKE:
        found |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        found["TRITON_INTERPRET"] = str(int(stage.name == "a"))
    elif stage.name != "f":
        found["HF_PAGED_CPP"] = "0"  # its kernels take long to build
    return found | ({"HF_PAGED_REVISION": args.revision} if args.revision else {})


def outcomes(folder: Path) -> Iterator[str]:
    """The machine, the tables of the stages that left rows, and why stages failed."""
    for stage in STAGES:
        path = folder / f"{stage.file}.json"
        if path.exists():
            data = report.read(path)
            facts, rows = data["facts"], tables.pooled([data])
            gpu = f"{facts.get('gpu', 'no GPU')}, driver {facts.get('driver', 'unknown')}"
            yield f"({stage.name}) {stage.title}: {gpu}; {report.machine_of(facts)}"
            yield tables.table(rows)
            yield tables.targets(rows)
    listed = folder / f"{NAME}.json"
    entries = report.read(listed)["stages"] if listed.exists() else []
    yield from (f"- {one['name']}: {one['reason']}" for one in entries if one["reason"])


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = runner.parser_of(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    is_fake, names = args.device == FAKE, [stage.name for stage in STAGES]
    only = runner.parts(parser, args.only, names) or names
    chosen = [
        stage._replace(variables=variables(stage, args)) for stage in STAGES if stage.name in only
    ]
    if not is_fake and not torch.cuda.is_available():
        print(*(f"({stage.name}) {stage.title}: skipped: no device" for stage in chosen), sep="\n")
        return 0
    out = (args.out or Path(tempfile.mkdtemp(prefix="gpu_day-"))).resolve()
    device = ["--device", "cpu" if is_fake else CUDA]
    options = stages.Options(args.minutes, MINUTES, out, is_fake, arguments=device)
    try:
        entries = stages.run(chosen, options, NAME)
    finally:  # also where a signal ends the run
        print(*outcomes(out), sep="\n\n", flush=True)
    return int(any(entry["reason"] not in ("", NO_TIME) for entry in entries))


OPTIONS = {
    "--minutes": option("for all stages (%(default)g)", type=float, default=MINUTES),
    "--out": option("folder of the results, at most 8 files (a new one)", type=Path),
    "--only": option("stages, for example a,c; without it all", default=""),
    "--device": option(choices=[CUDA, FAKE], default=CUDA),
    "--revision": option("of the checkout, where there is no .git", default=""),
}

if __name__ == "__main__":
    raise SystemExit(main())
