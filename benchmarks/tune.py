"""Launch parameters of the Triton kernels for this machine's GPU: `python -m benchmarks.tune`.
Compares every candidate with `attention/backends/reference.py`, then times it in a CUDA graph on
K/V that no cache holds. The winners go to `hf_paged/kernels/triton/configs/<chip>.json`, which the
kernels read; commit it. `--block-sizes` measures the cost of each block size instead, on the CPU,
too (`benchmarks.block_costs`)."""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import block_costs, runner
from benchmarks.attention_data import HEADS, TOLERANCE, random_calls
from benchmarks.machine import devices, facts
from benchmarks.runner import flag, option
from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.kernels import costs
from hf_paged.kernels.triton import configs
from hf_paged.kernels.triton.configs import LaunchConfig

LOADS = {
    "decode": [{"batch": (64, 1, 4096), "long": (1, 1, 32768)}],
    "prefill": [
        {"prompt": (1, 8192, 8192), "chunks": (4, 512, 4096)},
        {"speculated": (32, 8, 2048), "tails": (8, 16, 8192)},
    ],
}
"""By kernel, rows, queries and tokens per row of the timed problems of each entry; the geometric
mean of the times decides."""
DEFAULTS = {"decode": configs.default_decode_config, "prefill": configs.default_prefill_config}
TILES = (16, 32, 64, 128)
GRIDS = {
    "decode": {
        "tile": TILES,
        "num_warps": (2, 4, 8),
        "num_stages": (2, 3, 4, 5),
        "programs_per_sm": (1, 2, 3, 4, 6),
    },
    "prefill": {
        "block_m": TILES,
        "tile": TILES,
        "num_warps": (4, 8),
        "num_stages": (1, 2, 3, 4),
    },
}
"""By kernel, the launch parameters to try."""


def launch(kind: str, call: AttentionCall, config: LaunchConfig | None = None) -> torch.Tensor:
    """Output of the "decode" or the "prefill" kernel; without `config` the kernel chooses."""
    from hf_paged.kernels.triton import attention

    kernels = {"decode": attention.decode_attention, "prefill": attention.prefill_attention}
    inputs = call.query, call.blocks.keys, call.blocks.values, call.step
    return kernels[kind](*inputs, scale=call.scale, config=config)


def candidates(kind: str, default: LaunchConfig) -> list[LaunchConfig]:
    """The default first, then the alternatives."""
    sizes = itertools.product(*GRIDS[kind].values())
    others = (dataclasses.replace(default, **dict(zip(GRIDS[kind], values))) for values in sizes)
    return list(dict.fromkeys([default, *others]))


class Task(NamedTuple):
    """One table entry to determine."""

    key: str
    dim: int
    dtype: torch.dtype
    loads: dict[str, tuple[int, int, int]]
    options: list[LaunchConfig]  # the default first
    kind: str


def tasks_of(kind: str, dim: int, dtype: torch.dtype, chip: str) -> list[Task]:
    """Entries that these heads look up: of decodes, or of long chunks and of chunks that fill less
    than a tile."""
    heads, kv_heads, key_dim, value_dim = HEADS[dim]
    tasks: dict[str, Task] = {}
    for loads in LOADS[kind]:
        rows = heads // kv_heads * max(queries for _, queries, _ in loads.values())
        key = configs.entry_name(kind, key_dim, value_dim, dtype, min(rows, 128))
        if key not in tasks:
            # else enough query heads share a K/V head for short chunks to fill tiles, too
            options = candidates(kind, DEFAULTS[kind](key_dim, value_dim, dtype, rows, chip))
            tasks[key] = Task(key, dim, dtype, loads, options, kind)
    return list(tasks.values())


def arms_of(task: Task, device: torch.device) -> dict[str, runner.Arm]:
    """By configuration, its seconds: the geometric mean over loads. One whose numbers differ from
    the reference says so."""
    from triton.testing import do_bench_cudagraph

    calls = [random_calls(task.dim, task.dtype, load, device)[0] for load in task.loads.values()]
    most = max(queries for _, queries, _ in task.loads.values())
    odd = (3, min(70, most), 700)  # lengths
    (small,) = random_calls(task.dim, task.dtype, odd, device)
    expected, tolerance = reference.attend(small).float(), TOLERANCE[task.dtype]

    def work(turn: int, config: LaunchConfig) -> float | str:
        found = launch(task.kind, small, config).float()
        if not torch.allclose(found, expected, atol=tolerance, rtol=tolerance):
            return "gives other numbers than the reference"
        times = [
            do_bench_cudagraph(lambda call=call: launch(task.kind, call, config)) for call in calls
        ]
        return statistics.geometric_mean(times) / 1000

    arms = runner.each(work, {str(config): config for config in task.options})
    return {name: runner.guarded(arm) for name, arm in arms.items()}


def fastest(key: str, arms: dict[str, runner.Arm]) -> tuple[str, dict[str, Any]]:
    """The name of the fastest arm, and the microseconds of the best and of the default, which is
    the first. Those that do not fit the chip or are wrong are left out, with their reason."""
    rows = runner.rows_of_case(runner.Case(key, arms), 1, warm_ups=0)
    times = {row["system"]: 1e6 * row["seconds"][0] for row in rows if row["seconds"]}
    if not times:
        raise RuntimeError(f"{key}: no candidate ran and gave the reference's numbers")
    best = min(times, key=times.__getitem__)
    figures = {"best_us": times[best], "default_us": times.get(next(iter(arms)), math.nan)}
    problems = {row["system"]: row["problem"] for row in rows if "problem" in row}
    return best, {name: round(us, 2) for name, us in figures.items()} | {"left out": problems}


def write(path: Path, chip: dict[str, Any], key: str, config: Any, figures: dict[str, Any]) -> None:
    """Adds an entry to the table of a chip, with the origin of its figures."""
    table = json.loads(path.read_text()) if path.exists() else {"configs": {}, "measured": {}}
    table["configs"][key] = dataclasses.asdict(config)
    table["measured"][key] = {**figures, "command": " ".join(sys.argv[1:]), **chip}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


def measure(args: argparse.Namespace, keep: Any) -> runner.Data:
    """Tunes and writes the table; a row for each entry."""
    if args.block_sizes:
        return {"rows": block_costs.write(args.device, args.seconds, args.quick, costs.FOLDER)}
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.tune measures kernels on a CUDA device, and there is none here"
        )
    device, rows = torch.device("cuda", torch.cuda.current_device()), list[runner.Data]()
    chip = configs.chip_name(device)
    for kind, dim, name in itertools.product(LOADS, args.dims, args.dtypes):
        for task in tasks_of(kind, dim, getattr(torch, name), chip):
            task = task._replace(options=task.options[: args.most])
            best, figures = fastest(task.key, arms_of(task, device))
            (config,) = (one for one in task.options if str(one) == best)
            figures["loads"] = task.loads
            write(configs.FOLDER / f"{chip}.json", facts("cuda"), task.key, config, figures)
            rows.append(runner.row_of(task.key, best, **figures))
            keep({"rows": rows})
    return {"rows": rows}


BENCHMARK = runner.Benchmark(
    __doc__,
    measure=measure,
    options={
        "--dims": option(type=int, nargs="+", choices=sorted(HEADS), default=[64, 128, 256]),
        "--dtypes": option(
            nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16"]
        ),
        "--block-sizes": flag("a table of what block sizes cost instead"),
        "--device": option(
            "of --block-sizes (%(default)s)", choices=devices(), default=devices()[-1]
        ),
    },
    fixed={"most": None, "seconds": 240.0},
    quick={"most": 2},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
