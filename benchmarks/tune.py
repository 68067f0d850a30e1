"""Launch parameters of the Triton kernels for the GPU at hand: `python -m benchmarks.tune`.

Every candidate is first compared with `attention/reference.py`, then timed in a CUDA graph on K and V that no cache
holds. The winners go to `hf_paged/attention/kernels/configs/<chip>.json`, which the kernels read; commit it.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import facts
from hf_paged.attention import reference
from hf_paged.attention.kernels import configs
from hf_paged.attention.kernels.configs import DecodeConfig
from hf_paged.attention.metadata import AttentionMetadata

SHAPES = {  # query heads, K/V heads, key dim, value dim
    64: (32, 8, 64, 64),
    80: (32, 32, 80, 80),
    96: (32, 32, 96, 96),
    128: (32, 8, 128, 128),
    192: (16, 16, 192, 128),
    256: (16, 8, 256, 256),
    576: (16, 1, 576, 512),
}
"""By key dim, the heads of a model that has it."""

LOADS = {"batch": (64, 4096), "long": (1, 32768)}
"""Rows and tokens of each that a choice is timed on; the geometric mean decides."""

BLOCK_SIZE = 16
TOLERANCE = {torch.float32: 2e-5, torch.float16: 5e-3, torch.bfloat16: 3e-2}


@dataclasses.dataclass(frozen=True)
class Problem:
    """A decode of `rows` rows of `seq_len` tokens each."""

    query: torch.Tensor
    key_blocks: torch.Tensor
    value_blocks: torch.Tensor
    metadata: AttentionMetadata

    @classmethod
    def make(cls, dim: int, dtype: torch.dtype, rows: int, seq_len: int, device: torch.device) -> Problem:
        """Random states in blocks that lie in random order."""
        heads, kv_heads, key_dim, value_dim = SHAPES[dim]
        per_row = -(-seq_len // BLOCK_SIZE)

        def random(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, dtype=dtype, device=device)

        if kv_heads == 1:  # latents: the values are the first elements of the keys
            keys = random(rows * per_row, 1, BLOCK_SIZE, key_dim)
            values = keys[..., :value_dim]
        elif key_dim == value_dim:
            keys, values = random(rows * per_row, 2 * kv_heads, BLOCK_SIZE, key_dim).chunk(2, dim=1)
        else:
            both = random(rows * per_row, kv_heads, BLOCK_SIZE, key_dim + value_dim)
            keys, values = both.split([key_dim, value_dim], dim=3)
        tables = torch.randperm(rows * per_row, device=device).view(rows, per_row).int()
        lengths = torch.full((rows,), seq_len, dtype=torch.int32, device=device)
        starts = torch.zeros_like(lengths)
        hosts = (seq_len,) * rows, (0,) * rows
        metadata = AttentionMetadata(tables, lengths, starts, *hosts, query_len=1, block_size=BLOCK_SIZE)
        return cls(random(rows, heads, 1, key_dim), keys, values, metadata)

    def run(self, function: Callable[..., torch.Tensor], **options: Any) -> torch.Tensor:
        """Calls a backend's `paged_attention`."""
        scale = self.query.shape[-1] ** -0.5
        return function(self.query, self.key_blocks, self.value_blocks, self.metadata, scale=scale, **options)


def candidates(default: DecodeConfig) -> Iterator[DecodeConfig]:
    """The default first, then what may be better."""
    yield default
    for tile, warps, stages, programs in itertools.product((16, 32, 64, 128), (2, 4, 8), (2, 3, 4, 5), (1, 2, 3, 4)):
        config = DecodeConfig(tile, default.block_m, warps, stages, programs)
        if config != default:
            yield config


def choose(
    options: Iterator[DecodeConfig], is_right: Callable[[DecodeConfig], bool], time_us: Callable[[DecodeConfig], float]
) -> tuple[DecodeConfig, dict[DecodeConfig, float]]:
    """The fastest of those that are right, and the time of each. What does not fit the chip is left out."""
    times: dict[DecodeConfig, float] = {}
    for config in options:
        try:
            if not is_right(config):
                print(f"  {config} gives other numbers than the reference: left out", file=sys.stderr)
                continue
            times[config] = time_us(config)
        except Exception as error:  # OutOfResources, or a compiler that gives up: the reason is Triton's
            print(f"  {config}: {type(error).__name__}", file=sys.stderr)
    if not times:
        raise RuntimeError("no candidate ran and gave the reference's numbers")
    return min(times, key=lambda config: times[config]), times


def tune_decode(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[str, DecodeConfig, dict[str, float]]:
    """The table's key, the best configuration, and its and the default's microseconds."""
    from triton.testing import do_bench_cudagraph

    from hf_paged.attention.kernels.decode import paged_attention

    heads, kv_heads, key_dim, value_dim = SHAPES[dim]
    group = heads // kv_heads
    default = configs.default_decode_config(key_dim, value_dim, dtype, group)
    small = Problem.make(dim, dtype, 3, 700, device)
    expected = small.run(reference.paged_attention).float()
    loads = [Problem.make(dim, dtype, rows, seq_len, device) for rows, seq_len in LOADS.values()]

    def is_right(config: DecodeConfig) -> bool:
        found = small.run(paged_attention, config=config).float()
        return torch.allclose(found, expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])

    def time_us(config: DecodeConfig) -> float:
        times = [do_bench_cudagraph(lambda p=p: p.run(paged_attention, config=config)) * 1000 for p in loads]
        return math.exp(sum(map(math.log, times)) / len(times))

    best, times = choose(candidates(default), is_right, time_us)
    figures = {"best_us": round(times[best], 2), "default_us": round(times.get(default, math.nan), 2)}
    return configs.key("decode", key_dim, value_dim, dtype, group), best, figures


def write(path: Path, chip: dict[str, Any], key: str, config: DecodeConfig, figures: dict[str, float]) -> None:
    """Adds an entry to the table of a chip, with where its figures come from."""
    table = json.loads(path.read_text()) if path.exists() else {"configs": {}, "measured": {}}
    table["configs"][key] = dataclasses.asdict(config)
    table["measured"][key] = {**figures, "loads": LOADS, "command": " ".join(sys.argv[1:]), **chip}
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(table, indent=2, sort_keys=True) + "\n")


def main() -> None:
    """Tunes and writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dims", type=int, nargs="+", choices=sorted(SHAPES), default=[64, 128, 256])
    parser.add_argument("--dtypes", nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16"])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.tune measures kernels on a CUDA device, and there is none here")
    device = torch.device("cuda", torch.cuda.current_device())
    path = configs.FOLDER / f"{configs.chip(device)}.json"
    for dim, name in itertools.product(options.dims, options.dtypes):
        key, best, figures = tune_decode(dim, getattr(torch, name), device)
        write(path, facts("cuda"), key, best, figures)
        print(f"{key}: {best} {figures}", flush=True)


if __name__ == "__main__":
    main()
