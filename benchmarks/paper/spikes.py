"""vAttention's spikes: steps that map pages on demand."""

from __future__ import annotations

import argparse
import contextlib
import os
import statistics
import unittest.mock
from collections.abc import Iterator
from typing import Any

import torch

from benchmarks import runner
from benchmarks.models import SHAPES, Shape, build
from benchmarks.paper import VATTENTION, published
from hf_paged import PagedCache, compat
from hf_paged.kernels import BACKEND_VARIABLE

WHY = (
    "calls of the CUDA driver take longer than `mmap`; pages are filled with zeros when first"
    " written to"
)

MANY_HEADS = Shape("12 layers of 8 heads", "llama", 256, 12, 8, 8, 64, 256, 2048)
"""More than a thousand runs of pages for 8 rows, as with models of billions of parameters, in steps
of milliseconds."""


class Decoding:
    """Rows of random K/V that a small random model in float32 decodes in lockstep, in virtual
    memory."""

    def __init__(self, model: Any, shape: Shape, rows: int, length: int) -> None:
        self.model, self.token = model, torch.full((rows, 1), 5)
        self.cache = PagedCache(model.config, {"storage": "virtual"})
        draw, size = torch.Generator().manual_seed(rows), (rows, shape.kv_heads, length)
        for layer in range(shape.layers):
            states = (torch.randn(*size, shape.head_dim, generator=draw) for _ in range(2))
            self.cache.update(*states, layer)

    @torch.no_grad()
    def step(self) -> float:
        """Seconds of a step, through attention that knows nothing of blocks."""
        options = {compat.OUTPUT_CACHE: self.cache, "use_cache": True}
        with unittest.mock.patch.dict(os.environ, {BACKEND_VARIABLE: "gather"}):
            return runner.seconds_of(lambda: self.model(self.token, **options))


@contextlib.contextmanager
def mmaps() -> Iterator[list[int]]:
    """Within it, a list of the sizes of the mappings that are made."""
    from hf_paged.virtual.pages import MemoryFile

    sizes: list[int] = []
    map_pages = MemoryFile.map

    def count(self: Any, address: int, offset: int, size: int) -> None:
        sizes.append(size)
        map_pages(self, address, offset, size)

    with unittest.mock.patch.object(MemoryFile, "map", count):
        yield sizes


def spikes(args: argparse.Namespace) -> Iterator[runner.Case]:
    """vAttention (arXiv 2405.04437), section 6.1.1: time that mapping on demand adds to the steps
    that need more pages. The published figure is from an article about the paper (2025-03-11,
    Korean), one of the documents that this project was asked for in.

    The same: rows grow in lockstep, so all need more pages in the same step. Different: `mmap` on
    Linux, 8 rows of a small random model with enough layers and heads that a step maps more than a
    thousand runs of pages. A row gets its blocks in runs of one more than are mapped ahead, and the
    step always maps the first of a run. The seconds are the median of the steps that call `mmap`
    less that of the others, in the same turn. Earlier results have one more mechanism, the paper's
    thread in the background, which took 77 ms where mapping on demand took 18: it competed with the
    step for CPU cores.
    """
    shape = SHAPES["llama-tiny"] if args.quick else MANY_HEADS
    rows, length, steps = (2, 60, 70) if args.quick else (8, 64, 104)
    model = build(shape)
    model.set_attn_implementation("hf_paged")

    def work(turn: int) -> runner.Turn:
        decoding = Decoding(model, shape, rows, length)
        maps: list[float] = []
        others: list[float] = []
        with mmaps() as calls:
            decoding.step()  # maps the existing blocks
            for _ in range(steps - 1):
                before = len(calls)
                seconds = decoding.step()
                (others if len(calls) == before else maps).append(seconds)
        decoding.cache.reset()
        more = statistics.median(maps) - statistics.median(others) if maps and others else 0.0
        figures = {"median step, ms": 1e3 * statistics.median(maps + others)}
        return runner.Turn(more, figures=figures | {"steps that map": len(maps)})

    columns = published("0.01 s and more", f"{VATTENTION}: S1, not looked up in the paper", WHY)
    case = "steps that map pages, beyond the others"
    yield runner.Case(case, {"mapped on demand": work}, figures=columns)
