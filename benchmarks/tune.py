"""Launch parameters of the Triton kernels for this machine's GPU: `python -m benchmarks.tune`.

Compares every candidate with `attention/backends/reference.py`, then times it in a CUDA graph on
K/V that no cache holds. The winners go to `hf_paged/kernels/triton/configs/<chip>.json`, which the
kernels read; commit it. `--block-sizes` measures the cost of each block size instead, on the CPU,
too (`benchmarks.block_costs`).
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
import statistics
import sys
from collections.abc import Callable, Hashable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch

from benchmarks import block_costs
from benchmarks.attention_data import random_calls
from benchmarks.machine import devices, facts
from benchmarks.runner import flag, option, parser_of
from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.kernels import costs
from hf_paged.kernels.triton import configs
from hf_paged.kernels.triton.configs import LaunchConfig

Config = TypeVar("Config", bound=Hashable)

SHAPES = {  # query heads, K/V heads, key dim, value dim
    64: (32, 8, 64, 64),
    80: (32, 32, 80, 80),
    96: (32, 32, 96, 96),
    128: (32, 8, 128, 128),
    192: (16, 16, 192, 128),
    256: (16, 8, 256, 256),
    512: (16, 2, 512, 512),
    576: (16, 1, 576, 512),
}
"""Heads of a model with this key dim, by key dim."""

LOADS = {
    "decode": {"batch": (64, 1, 4096), "long": (1, 1, 32768)},
    "prefill": {"prompt": (1, 8192, 8192), "chunks": (4, 512, 4096)},
    "short": {"speculated": (32, 8, 2048), "tails": (8, 16, 8192)},
}
"""Rows, queries and tokens per row of the timed problems; the geometric mean of the times
decides."""

TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


def launch(kind: str, call: AttentionCall, config: LaunchConfig | None = None) -> torch.Tensor:
    """Output of the "decode" or the "prefill" kernel; without `config` the kernel chooses."""
    from hf_paged.kernels.triton import attention

    kernels = {"decode": attention.decode_attention, "prefill": attention.prefill_attention}
    inputs = call.query, call.blocks.keys, call.blocks.values, call.step
    return kernels[kind](*inputs, scale=call.scale, config=config)


def call_of(
    dim: int, dtype: torch.dtype, load: tuple[int, int, int], device: torch.device
) -> AttentionCall:
    """Attention with the heads of this key dim: rows, queries and tokens of each row."""
    return random_calls(SHAPES[dim], dtype, load, device)[0]


def candidates(default: LaunchConfig, others: Iterable[LaunchConfig]) -> list[LaunchConfig]:
    """The default first, then the alternatives."""
    return list(dict.fromkeys([default, *others]))


def decode_candidates(default: LaunchConfig) -> list[LaunchConfig]:
    grid = itertools.product((16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4, 6))
    return candidates(
        default, (LaunchConfig(tile, default.block_m, *sizes) for tile, *sizes in grid)
    )


def prefill_candidates(default: LaunchConfig) -> list[LaunchConfig]:
    grid = itertools.product((16, 32, 64, 128), (16, 32, 64, 128), (4, 8), (1, 2, 3, 4))
    return candidates(default, (LaunchConfig(tile, rows, *sizes) for rows, tile, *sizes in grid))


def choose(
    options: Iterator[Config],
    is_right: Callable[[Config], bool],
    time_us: Callable[[Config], float],
) -> tuple[Config, dict[Config, float]]:
    """The fastest correct candidate, and the time of each. Candidates that do not fit the chip are
    left out."""
    times: dict[Config, float] = {}
    for config in options:
        try:
            if not is_right(config):
                print(
                    f"  {config} gives other numbers than the reference: left out", file=sys.stderr
                )
                continue
            times[config] = time_us(config)
        except Exception as error:  # OutOfResources or a compiler error: the reason is Triton's
            print(f"  {config}: {type(error).__name__}", file=sys.stderr)
    if not times:
        raise RuntimeError("no candidate ran and gave the reference's numbers")
    return min(times, key=lambda config: times[config]), times


class Task(NamedTuple):
    """One table entry to determine."""

    key: str
    dim: int
    dtype: torch.dtype
    loads: dict[str, tuple[int, int, int]]
    options: list[LaunchConfig]  # the default first
    kind: str


def decode_tasks(dim: int, dtype: torch.dtype, chip: str) -> list[Task]:
    """Entries that decodes of these heads look up."""
    heads, kv_heads, key_dim, value_dim = SHAPES[dim]
    group = heads // kv_heads
    options = decode_candidates(
        configs.default_decode_config(key_dim, value_dim, dtype, group, chip)
    )
    key = configs.entry_name("decode", key_dim, value_dim, dtype, group)
    return [Task(key, dim, dtype, LOADS["decode"], options, "decode")]


def prefill_tasks(dim: int, dtype: torch.dtype, chip: str) -> list[Task]:
    """Entries that long chunks look up, and chunks that fill less than a tile."""
    heads, kv_heads, key_dim, value_dim = SHAPES[dim]
    tasks: dict[str, Task] = {}
    for name in ("prefill", "short"):
        loads = LOADS[name]
        rows = heads // kv_heads * max(queries for _, queries, _ in loads.values())
        key = configs.entry_name("prefill", key_dim, value_dim, dtype, min(rows, 128))
        if key not in tasks:
            # else enough query heads share a K/V head for short chunks to fill tiles, too
            options = prefill_candidates(
                configs.default_prefill_config(key_dim, value_dim, dtype, rows, chip)
            )
            tasks[key] = Task(key, dim, dtype, loads, options, "prefill")
    return list(tasks.values())


SECONDS = 240.0
"""Of `--block-sizes`, about."""
TASKS = {"decode": decode_tasks, "prefill": prefill_tasks}


def tune(task: Task, device: torch.device) -> tuple[LaunchConfig, dict[str, Any]]:
    """The best configuration, and the microseconds of the best and of the default."""
    from triton.testing import do_bench_cudagraph

    calls = [call_of(task.dim, task.dtype, load, device) for load in task.loads.values()]
    most = max(queries for _, queries, _ in task.loads.values())
    small = call_of(task.dim, task.dtype, (3, min(70, most), 700), device)  # odd lengths
    expected, tolerance = reference.attend(small).float(), TOLERANCE[task.dtype]

    def is_right(config: LaunchConfig) -> bool:
        found = launch(task.kind, small, config).float()
        return torch.allclose(found, expected, atol=tolerance, rtol=tolerance)

    def time_us(config: LaunchConfig) -> float:
        times = [
            do_bench_cudagraph(lambda call=call: launch(task.kind, call, config)) * 1000
            for call in calls
        ]
        return statistics.geometric_mean(times)

    best, times = choose(iter(task.options), is_right, time_us)
    default_us = times.get(task.options[0], math.nan)
    return best, {
        "best_us": round(times[best], 2),
        "default_us": round(default_us, 2),
        "loads": task.loads,
    }


def write(path: Path, chip: dict[str, Any], key: str, config: Any, figures: dict[str, Any]) -> None:
    """Adds an entry to the table of a chip, with the origin of its figures."""
    table = json.loads(path.read_text()) if path.exists() else {"configs": {}, "measured": {}}
    table["configs"][key] = dataclasses.asdict(config)
    table["measured"][key] = {**figures, "command": " ".join(sys.argv[1:]), **chip}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


OPTIONS = {
    "--dims": option(type=int, nargs="+", choices=sorted(SHAPES), default=[64, 128, 256]),
    "--dtypes": option(nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16"]),
    "--quick": flag("two candidates of each entry: shows that it runs"),
    "--block-sizes": flag("a table of what block sizes cost instead"),
    "--device": option("of --block-sizes (%(default)s)", choices=devices(), default=devices()[-1]),
}


def main() -> None:
    """Tunes and writes the table."""
    options = parser_of(__doc__.splitlines()[0], OPTIONS).parse_args()
    if options.block_sizes:
        block_costs.main(options.device, SECONDS, options.quick, costs.FOLDER)
        return
    shapes = list(itertools.product(TASKS, options.dims, options.dtypes))
    most = 2 if options.quick else None
    if not torch.cuda.is_available():
        raise SystemExit(
            "benchmarks.tune measures kernels on a CUDA device, and there is none here"
        )
    device = torch.device("cuda", torch.cuda.current_device())
    chip = configs.chip_name(device)
    for kernel, dim, name in shapes:
        for task in TASKS[kernel](dim, getattr(torch, name), chip):
            best, figures = tune(task._replace(options=task.options[:most]), device)
            write(configs.FOLDER / f"{chip}.json", facts("cuda"), task.key, best, figures)
            print(f"{task.key}: {best} {figures}", flush=True)


if __name__ == "__main__":
    main()
