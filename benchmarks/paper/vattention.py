"""vAttention's tables: rows contiguous in virtual addresses, against blocks."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import unittest.mock
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks import paired, runner
from benchmarks.models import SHAPES, Shape, build
from benchmarks.paper.rows import (
    READ,
    TOLD_S1,
    VATTENTION,
    Published,
    Row,
    Size,
    measured,
    small_shape,
    timed_row,
)
from benchmarks.workloads import texts
from hf_paged import PagedCache, compat
from hf_paged.kernels import BACKEND_VARIABLE

CHUNK = 256
BATCHES = (1, 8)
BLOCKS, VIRTUAL = "blocks of 16, C++ kernel", "virtual, SDPA in place"
CONFIGS: dict[str, dict[str, Any]] = {BLOCKS: {"block_size": 16}, VIRTUAL: {"storage": "virtual"}}
"""By contender: the config of its `PagedCache`."""
_WHY_PREFILL = (
    "the paged kernel there is FlashAttention's of 2024 on a GPU; here it is a CPU kernel that was"
    " made for blocks, and the unmodified one is PyTorch's"
)
_WHY_DECODE = (
    "there the paged kernel is one for a GPU that reads blocks slower than FlashAttention reads"
    " rows; here it is a CPU kernel that was made for blocks"
)
_WHY_SPIKES = (
    "calls of the CUDA driver take longer than `mmap`; pages are filled with zeros when first"
    " written to"
)


def contexts(size: Size) -> tuple[int, ...]:
    return size.context // 2, 4 * size.context


class Forwards:
    """Forwards of a small random model in float32 over the caches of contenders."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.model = shape, build(shape)
        self.model.set_attn_implementation("hf_paged")

    def cache(self, name: str) -> PagedCache:
        """An empty cache."""
        return PagedCache(self.model.config, CONFIGS[name])

    @torch.no_grad()
    def run(self, name: str, cache: Any, parts: Sequence[Tensor]) -> tuple[float, Tensor]:
        """Seconds of a forward of each part after the one before, and the last logits."""
        forced = {BACKEND_VARIABLE: "gather" if name == VIRTUAL else ""}  # "": the library chooses
        options = {compat.OUTPUT_CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        with unittest.mock.patch.dict(os.environ, forced):
            seconds, found = runner.clocked(lambda: [self.model(one, **options) for one in parts])
        return seconds, found[-1].logits


def compared(
    cases: Callable[[Size], Iterator[runner.Case]],
    size: Size,
    title: str,
    published: dict[str, Published],
) -> list[Row]:
    """
    Throughput of `VIRTUAL` over that of `BLOCKS` in each case, which a number of tokens names.

    Args:
        title (`str`): With a place for that number.
        published (`dict`): By that number.
    """
    rows = []
    for count, found in measured(cases, size).items():
        blocks, virtual = (found[name]["seconds"] for name in CONFIGS)
        speeds = [int(count) / statistics.median(seconds) for seconds in (virtual, blocks)]
        rates = "; {:.5g} over {:.5g} tokens/s".format(*speeds)
        name = f"{title.format(count)} throughput of {VIRTUAL}, over {BLOCKS}"
        ratios = paired.ratios(blocks, virtual)
        rows.append(timed_row(name, ratios, size, published.get(count, Published()), rates))
    return rows


def prefill_cases(size: Size) -> Iterator[runner.Case]:
    """Times to the first token of one prompt, by context length."""
    forwards = Forwards(small_shape(size, 2))
    for context in contexts(size):
        (prompt,) = texts(random.Random(context), [context], forwards.shape.vocab)
        parts = torch.tensor([prompt]).split(CHUNK, dim=1)

        def work(turn: int, name: str, parts: Any = parts) -> runner.Turn:
            cache = forwards.cache(name)
            seconds, logits = forwards.run(name, cache, parts)
            cache.reset()
            return runner.Turn(seconds, [logits.argmax(-1).flatten().tolist()])

        yield runner.Case(str(context), runner.each(work, list(CONFIGS)))


def prefill(size: Size) -> list[Row]:
    """
    vAttention (arXiv 2405.04437), section 7.1: prefill over context lengths, in chunks.

    The same: one prompt at a time, in chunks; a kernel written for blocks, and one without paging
    support (PyTorch's SDPA), over rows contiguous in virtual addresses. Different: a CPU; two
    layers of a small random model in float32, so that turns of long prompts take seconds; contexts
    of thousands of tokens, not up to 192 thousand. Times are of the forwards until the first token.
    """
    shortest, longest = map(str, contexts(size))
    at_most = "1.1 at 16K; at most 3.92 (FlashAttention), 1.45 (FlashInfer)"
    source = f"{VATTENTION}, abstract ({READ}); 16K: S1"
    published = {
        shortest: Published("about 1 at some thousand tokens", TOLD_S1, _WHY_PREFILL),
        longest: Published(at_most, source, _WHY_PREFILL),
    }
    return compared(prefill_cases, size, "prompt of {} tokens:", published)


def filled(cache: Any, shape: Shape, rows: int, length: int) -> Any:
    """A cache that holds random K/V of each layer, `[rows, heads, length, dim]`."""
    draw = torch.Generator().manual_seed(rows)
    size = rows, shape.kv_heads, length, shape.head_dim
    for layer in range(shape.layers):
        states = (torch.randn(size, generator=draw) for _ in range(2))
        cache.update(*states, layer)
    return cache


def decode_cases(size: Size) -> Iterator[runner.Case]:
    """Times of a decode step, by rows."""
    forwards, steps = Forwards(small_shape(size, 4)), 8 if size.turns > 1 else 2
    for rows in BATCHES:
        sizes = forwards.shape, rows, contexts(size)[-1]
        caches = {name: filled(forwards.cache(name), *sizes) for name in CONFIGS}
        tokens, logits = [torch.full((rows, 1), 5)] * steps, dict[str, Tensor]()

        def work(
            turn: int, name: str, tokens: Any = tokens, caches: Any = caches, out: Any = logits
        ) -> float:
            # every cache grows by the same number of tokens in each turn
            seconds, out[name] = forwards.run(name, caches[name], tokens)
            return seconds / steps

        yield runner.Case(str(rows), runner.each(work, list(CONFIGS)))
        torch.testing.assert_close(logits[VIRTUAL], logits[BLOCKS], atol=1e-3, rtol=1e-3)
        if caches[VIRTUAL].counters.gathered:
            raise RuntimeError("keys and values of rows side by side were gathered")


def decode(size: Size) -> list[Row]:
    """vAttention (arXiv 2405.04437), section 7.2 and figure 9: decode over the number of rows, all
    with one long context.

    The same: all rows have the same context, long enough to dominate a step's reads; a kernel
    written for blocks against one without paging support. Different: a CPU, 4 layers of a small
    random model in float32, random K/V; forwards of the model, not recorded.
    """
    kernel, source = "(vLLM's kernel, Yi-6B)", f"{VATTENTION}, abstract ({READ}); batch: S1"
    published = {
        "1": Published(f"1.3 {kernel}", TOLD_S1, _WHY_DECODE),
        "8": Published(f"1.97 {kernel}", source, _WHY_DECODE),
    }
    title = f"{{}} rows of {contexts(size)[-1]} tokens: decode"
    return compared(decode_cases, size, title, published)


MANY_HEADS = Shape("12 layers of 8 heads", "llama", 256, 12, 8, 8, 64, 256, 2048)
"""More than a thousand runs of pages for 8 rows, as with models of billions of parameters, in steps
of milliseconds."""


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


def spike_cases(size: Size) -> Iterator[runner.Case]:
    """The median of the steps that map less that of the others."""
    forwards = Forwards(MANY_HEADS if size.turns > 1 else SHAPES["llama-tiny"])
    rows, length, steps = (8, 64, 104) if size.turns > 1 else (2, 60, 70)
    token = torch.full((rows, 1), 5)

    def work(turn: int) -> runner.Turn:
        cache = filled(forwards.cache(VIRTUAL), forwards.shape, rows, length)
        maps: list[float] = []
        others: list[float] = []
        with mmaps() as calls:
            forwards.run(VIRTUAL, cache, [token])  # maps the existing blocks
            for _ in range(steps - 1):
                before = len(calls)
                seconds = forwards.run(VIRTUAL, cache, [token])[0]
                (others if len(calls) == before else maps).append(seconds)
        cache.reset()
        more = statistics.median(maps) - statistics.median(others) if maps and others else 0.0
        figures = {"median": statistics.median(maps + others), "largest": max(maps + others)}
        return runner.Turn(more, figures=figures | {"maps": len(maps), "steps": steps - 1})

    yield runner.Case("spikes", {VIRTUAL: work})


def spikes(size: Size) -> list[Row]:
    """vAttention (arXiv 2405.04437), section 6.1.1: time that mapping on demand adds to the steps
    that need more pages.

    The same: rows grow in lockstep, so all need more pages in the same step. Different: `mmap` on
    Linux, 8 rows of a small random model with enough layers and heads that a step maps more than a
    thousand runs of pages. A row gets its blocks in runs of one more than are mapped ahead, and the
    step always maps the first of a run. "Beyond the others" is the median of the steps that call
    `mmap` less that of the others, in the same turn. Earlier results have one more mechanism, the
    paper's thread in the background, which took 77 ms where mapping on demand took 18: it competed
    with the step for CPU cores.
    """
    row = measured(spike_cases, size)["spikes"][VIRTUAL]
    published = Published("10 and more", TOLD_S1, _WHY_SPIKES)
    figures, more = row["figures"], [1e3 * one for one in row["seconds"]]
    step = f"; median step {1e3 * figures['median']:.2f} ms"
    most = f"largest of a turn {1e3 * figures['largest']:.3g} ms"
    maps = f"{figures['maps']:g} steps of {figures['steps']:g} map"
    title = "steps that map, beyond the others: virtual, mapped on demand"
    return [timed_row(title, more, size, published, f"{step}, {most}; {maps}", "ms")]
