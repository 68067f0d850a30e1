"""vAttention's tables: rows contiguous in virtual addresses, against blocks and against contiguous
tensors."""

from __future__ import annotations

import contextlib
import os
import random
import statistics
import time
import unittest.mock
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import DynamicLayer

import hf_paged
from benchmarks import paired, runner
from benchmarks.models import SHAPES, Shape, build
from benchmarks.paper.rows import NONE, READ, TOLD_S1, VATTENTION, Published, Row, Size, ranged
from benchmarks.paper.traces import SHAREGPT, make_trace
from benchmarks.paper.turns import measured, small_shape, timed_row, times_of
from benchmarks.workloads import texts
from hf_paged import PagedCache, VirtualStorage, compat
from hf_paged.config import MIN_BLOCK_SIZE
from hf_paged.kernels import BACKEND_VARIABLE

GIB, MIB = 2**30, 2**20
CHUNK = 256
BATCHES = (1, 8)
BLOCKS, LARGE = "blocks of 16, C++ kernel", "blocks of 128, C++ kernel"
VIRTUAL, RESERVED = "virtual, SDPA in place", "contiguous, reserved"
CONFIGS: dict[str, dict[str, Any]] = {
    BLOCKS: {"block_size": 16},
    LARGE: {"block_size": 128},
    VIRTUAL: {"storage": "virtual"},
}
"""By contender: the config of its `PagedCache`; `RESERVED` has none."""
PAGE_BYTES, GROUP_BYTES = 1 << 12, 1 << 16
"""A page of Linux, and vAttention's least page group (arXiv 2405.04437, section 6.1)."""


def contexts(size: Size) -> tuple[int, ...]:
    return size.context // 2, 4 * size.context


def named(page: int) -> str:
    return f"{page // MIB} MiB" if page >= MIB else f"{page // 1024} KiB"


class ReservedLayer(DynamicLayer):
    """Contiguous K/V in memory reserved for the longest sequence."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        self.longest = longest

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            rows, heads, _, dim = key_states.shape
            self.room = [
                x.new_empty(rows, heads, self.longest, dim) for x in (key_states, value_states)
            ]
        first = self.get_seq_length()
        end = first + key_states.shape[2]
        for room, states in zip(self.room, (key_states, value_states)):
            room[:, :, first:end] = states
        self.keys, self.values = (room[:, :, :end] for room in self.room)
        return self.keys, self.values


class Forwards:
    """Forwards of a small random model in float32 over the caches of contenders."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.plain, self.paged = (build(shape) for _ in range(2))
        self.paged.set_attn_implementation("hf_paged")

    def cache(self, name: str, longest: int) -> Any:
        """An empty cache, for at most `longest` tokens."""
        if name == RESERVED:
            return Cache(layers=[ReservedLayer(longest) for _ in range(self.shape.layers)])
        return PagedCache(self.paged.config, CONFIGS[name])

    @torch.no_grad()
    def run(self, name: str, cache: Any, parts: Sequence[Tensor]) -> tuple[float, Tensor]:
        """Seconds of a forward of each part after the one before, and the last logits."""
        model = self.plain if name == RESERVED else self.paged
        forced = {BACKEND_VARIABLE: "gather" if name == VIRTUAL else ""}  # "": the library chooses
        options = {compat.OUTPUT_CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        with unittest.mock.patch.dict(os.environ, forced):
            seconds, found = runner.clocked(lambda: [model(part, **options) for part in parts])
        return seconds, found[-1].logits


def prefill_cases(size: Size) -> Iterator[runner.Case]:
    """Times to the first token of one prompt, by context length."""
    forwards = Forwards(small_shape(size, 2))
    for context in contexts(size):
        (prompt,) = texts(random.Random(context), [context], forwards.shape.vocab)
        parts = torch.tensor([prompt]).split(CHUNK, dim=1)

        def work(turn: int, name: str, parts: Any = parts, longest: int = context) -> runner.Turn:
            cache = forwards.cache(name, longest)
            seconds, logits = forwards.run(name, cache, parts)
            cache.reset()
            return runner.Turn(seconds, [logits.argmax(-1).flatten().tolist()])

        names = RESERVED, BLOCKS, VIRTUAL
        yield runner.Case(str(context), runner.each(work, names))


def prefill(size: Size) -> list[Row]:
    """
    vAttention (arXiv 2405.04437), section 7.1: prefill over context lengths, in chunks.

    The same: one prompt at a time, in chunks; a kernel written for blocks, and one without paging
    support (PyTorch's SDPA), over rows contiguous in virtual addresses and over contiguous tensors.
    Different: a CPU; two layers of a small random model in float32, so that turns of long prompts
    take seconds; contexts of thousands of tokens, not up to 192 thousand. Times are of the forwards
    until the first token; over contiguous tensors transformers repeats the K/V of grouped heads
    under a mask.
    """
    shortest, longest = map(str, contexts(size))
    unchanged = f"{VATTENTION}, abstract: kernels unchanged ({READ})"
    at_most = "1.1 at 16K; at most 3.92 (FlashAttention), 1.45 (FlashInfer)"
    source = f"{VATTENTION}, abstract ({READ}); 16K: S1"
    published = {
        (BLOCKS, shortest): Published("about 1 at some thousand tokens", TOLD_S1, _WHY_PREFILL),
        (BLOCKS, longest): Published(at_most, source, _WHY_PREFILL),
        (RESERVED, longest): Published("1", unchanged, _WHY_RESERVED),
    }
    rows = []
    for context, found in measured(prefill_cases, size).items():
        title, bases = f"prompt of {context} tokens: throughput", (BLOCKS, RESERVED)
        rows += compared(title, found, bases, context, published, size, ".0f")
    return rows


def compared(
    title: str,
    found: Mapping[str, runner.Data],
    bases: Sequence[str],
    case: str,
    published: Mapping[tuple[str, str], Published],
    size: Size,
    digits: str,
) -> list[Row]:
    """
    Throughput of `VIRTUAL` in one case, over that of each base.

    Args:
        case (`str`): Number of tokens of a measurement.
        published (`Mapping`): By base and case.
    """
    times, rows = times_of(found), []
    speed = {name: int(case) / statistics.median(seconds) for name, seconds in times.items()}
    for base in bases:
        rates = f"; {speed[VIRTUAL]:{digits}} over {speed[base]:{digits}} tokens/s"
        ratios, name = paired.ratios(times[base], times[VIRTUAL]), f"{title} of {VIRTUAL}"
        told = published.get((base, case), NONE)
        rows.append(timed_row(f"{name}, over {base}", ratios, size, told, rates))
    return rows


_WHY_PREFILL = (
    "the paged kernel there is FlashAttention's of 2024 on a GPU; here it is a CPU kernel that was"
    " made for blocks, and the unmodified one is PyTorch's"
)
_WHY_RESERVED = "transformers repeats keys of grouped heads under a mask"


def filled(cache: Any, states: list[tuple[Tensor, Tensor]]) -> Any:
    """A cache that holds these K/V of each layer, `[rows, heads, tokens, dim]`."""
    for layer, (keys, values) in enumerate(states):
        cache.update(keys, values, layer)
    return cache


def random_states(shape: Shape, rows: int, length: int) -> list[tuple[Tensor, Tensor]]:
    draw = torch.Generator().manual_seed(rows)
    size = rows, shape.kv_heads, length, shape.head_dim
    return [
        (torch.randn(size, generator=draw), torch.randn(size, generator=draw))
        for _ in range(shape.layers)
    ]


def decode_cases(size: Size) -> Iterator[runner.Case]:
    """Times of a decode step, by rows."""
    forwards, steps = Forwards(small_shape(size, 4)), 8 if size.turns > 1 else 2
    context = contexts(size)[-1]
    for rows in BATCHES:
        states = random_states(forwards.shape, rows, context)
        longest = context + steps * (size.turns + 1)
        names = BLOCKS, LARGE, VIRTUAL, RESERVED
        caches = {name: filled(forwards.cache(name, longest), states) for name in names}
        tokens, logits = [torch.full((rows, 1), 5)] * steps, dict[str, Tensor]()

        def work(
            turn: int, name: str, tokens: Any = tokens, caches: Any = caches, out: Any = logits
        ) -> float:
            # every cache grows by the same number of tokens in each turn
            seconds, out[name] = forwards.run(name, caches[name], tokens)
            return seconds / steps

        yield runner.Case(str(rows), runner.each(work, names))
        for name, found in logits.items():
            near = dict(atol=1e-3, rtol=1e-3, msg=f"{name} differs")
            torch.testing.assert_close(found, logits[RESERVED], **near)
        if caches[VIRTUAL].counters.gathered:
            raise RuntimeError("keys and values of rows side by side were gathered")


def decode(size: Size) -> list[Row]:
    """vAttention (arXiv 2405.04437), section 7.2 and figure 9: decode over the number of rows, all
    with one long context.

    The same: all rows have the same context, long enough to dominate a step's reads; a kernel
    written for blocks, with small and with large ones, against one without paging support.
    Different: a CPU, 4 layers of a small random model in float32, random K/V; forwards of the
    model, not recorded.
    """
    shape, context = small_shape(size, 4), contexts(size)[-1]
    abstract = f"{VATTENTION}, abstract"
    kernel, other = "(vLLM's kernel, Yi-6B)", "about 1 (FlashAttention's paged kernel)"
    source = f"{abstract} ({READ}); batch: S1"
    published = {
        (BLOCKS, "1"): Published(f"1.3 {kernel}", TOLD_S1, _WHY_DECODE),
        (BLOCKS, "8"): Published(f"1.97 {kernel}", source, _WHY_DECODE),
        (LARGE, "8"): Published(other, TOLD_S1, _WHY_DECODE),
        (RESERVED, "8"): Published("1", f"{abstract}: kernels unchanged ({READ})"),
    }
    rows = []
    for batch, found in measured(decode_cases, size).items():
        title, bases = f"{batch} rows of {context} tokens", (BLOCKS, LARGE, RESERVED)
        rows += compared(f"{title}: decode throughput", found, bases, batch, published, size, ".1f")
    seconds = statistics.median(found[VIRTUAL]["seconds"])
    needed = int(batch) / seconds * shape.kv_bytes(1, 4) / 1e6
    why = (
        f"{shape.layers} layers of {shape.kv_heads} heads; the paper's models have more of both and"
        " run on a GPU"
    )
    name = f"bytes that {batch} rows grow by while they decode"
    return [*rows, Row(name, needed, "MB/s", "some hundred", TOLD_S1, why)]


_WHY_DECODE = (
    "there the paged kernel is one for a GPU that reads blocks slower than FlashAttention reads"
    " rows; here it is a CPU kernel that was made for blocks"
)


def map_seconds(page: int, total: int) -> float:
    """Seconds to map `total` bytes in groups of `page`, one call each, at reserved addresses, and
    to write once to each Linux page in them, which allocates the page."""
    from hf_paged.virtual import pages

    mapper = pages.pages_for(torch.device("cpu"), page)
    offset, addresses = mapper.extend(total), mapper.reserve(total)
    start = time.perf_counter()
    for at in range(0, total, page):
        mapper.map(addresses.address + at, offset + at, page)
    addresses.tensor(torch.uint8)[::PAGE_BYTES] = 1
    return time.perf_counter() - start


def allocated_bytes(size: Size) -> int:
    return size.context * 1024 * 256


def allocation_cases(size: Size) -> Iterator[runner.Case]:
    yield runner.Case(
        "allocation", {"groups": lambda turn: map_seconds(GROUP_BYTES, allocated_bytes(size))}
    )


def allocation(size: Size) -> list[Row]:
    """
    vAttention (arXiv 2405.04437), section 7.3: time to map page groups.

    The same: one call per group, one thread, addresses reserved before. Different: pages of a
    memory file and `mmap` on Linux, which allocates a page at the first write, not when it is
    mapped. So the first write to each page of 4 KiB is part of the time.
    """
    total = allocated_bytes(size)
    seconds = measured(allocation_cases, size)["allocation"]["groups"]["seconds"]
    rates = ranged([total / one / 1e9 for one in seconds], ".3g")
    groups = ranged([total // GROUP_BYTES / one for one in seconds], ".3g")
    published = Published("up to 7.6 (size not said)", TOLD_S1, _WHY_ZEROS)
    title = f"groups of {named(GROUP_BYTES)}, mapped and written to once"
    return [Row(title, f"{rates}; {groups} groups/s", "GB/s", *published, seconds)]


_WHY_ZEROS = "host memory, which the system fills with zeros; there the driver of an A100"
HEADS = {"Yi-6B": (32, 4, 128), "Llama-3-8B": (32, 8, 128), "Yi-34B": (60, 8, 128)}
"""Layers, K/V heads, head dim, from the models' configurations."""
WASTED = {1 << 16: "4 to 15", 1 << 18: "16 to 60", 1 << 21: "up to 240"}
"""Most wasted megabytes per request, over three models."""


def wasted_bytes(page: int, heads: int, dim: int, lengths: list[int]) -> tuple[int, int, int, int]:
    """For rows of one layer in bfloat16: tokens per block, bytes that the tokens need, bytes of
    pages written to, and bytes of whole blocks.
    """
    from hf_paged.virtual.storage import fit_blocks

    model = Shape("", "llama", 8 * dim, 1, heads, heads, dim, 8, 8).config()
    config = fit_blocks(
        hf_paged.PagedConfig(storage=VirtualStorage(page_bytes=page), block_size=MIN_BLOCK_SIZE),
        *(model, torch.device("cpu")),
    )
    tokens = config.block_size
    needed = held = whole = 0
    for length in lengths:
        cache = PagedCache(model, config)
        states = torch.zeros(1, heads, length, dim, dtype=torch.bfloat16)
        cache.update(states, states, 0)
        (group,) = cache.groups.values()
        needed += 2 * states.nbytes
        held += group.group_memory.storage.nbytes
        whole += -(-length // tokens) * tokens * 2 * states.nbytes // length
    return tokens, needed, held, whole


def page_sizes(size: Size) -> list[Row]:
    """vAttention (arXiv 2405.04437), section 7.4 and table 8: tokens per page group, and the
    largest waste of a request.

    The same: heads and layers of the paper's models, in 16 bits. Different: our blocks are whole
    page groups of one head's keys or, if such a group has more than 256 tokens, of all heads' K/V
    together, so that other group sizes make the same block. Linux allocates a page at its first
    write, so the bytes of rows are counted in pages of 4 KiB for every group size: by the system
    (`st_blocks`), for lengths like ShareGPT's. Beside them, bytes in whole groups, as with a driver
    that cannot map part of a group.
    """
    trace = make_trace(SHAREGPT, max(4, min(48, size.short // 200)))
    lengths = [prompt + output for prompt, output in zip(trace.prompts, trace.outputs)]
    rows = []
    for page, most_there in WASTED.items():
        for name, (layers, heads, dim) in HEADS.items():
            tokens, needed, held, whole = wasted_bytes(page, heads, dim, lengths)
            most = (tokens - 1) * 2 * heads * dim * 2 * layers
            shares = [100 * (1 - needed / taken) for taken in (held, whole)]
            source = f"{VATTENTION}, section 7.4, three models ({READ})"
            source = TOLD_S1 if page == 1 << 21 else source
            published = Published(f"{most_there} MB at most", source, _WHY_GROUPS)
            group = f"groups of {named(page)}, heads of {name}"
            title = f"{group}: most that a request's blocks waste, and shares"
            parts = f"{shares[0]:.1f}% of the pages, {shares[1]:.1f}% of whole blocks"
            ours, unit = f"{most / MIB:.3g} MiB at most; {parts}", f"with {tokens} tokens a block"
            rows.append(Row(title, ours, unit, *published))
    return rows


_WHY_GROUPS = (
    "a group is one layer's keys or values there, here of one head, or of keys and values together"
)


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
    states, token = random_states(forwards.shape, rows, length), torch.full((rows, 1), 5)

    def work(turn: int) -> runner.Turn:
        cache, seconds = filled(forwards.cache(VIRTUAL, length + steps), states), []
        maps: list[float] = []
        others: list[float] = []
        with mmaps() as calls:
            forwards.run(VIRTUAL, cache, [token])  # maps the existing blocks
            for _ in range(steps - 1):
                before = len(calls)
                seconds.append(forwards.run(VIRTUAL, cache, [token])[0])
                (others if len(calls) == before else maps).append(seconds[-1])
        cache.reset()
        more = statistics.median(maps) - statistics.median(others) if maps and others else 0.0
        figures = {"median": statistics.median(seconds), "largest": max(seconds)}
        return runner.Turn(more, figures=figures | {"maps": len(maps), "steps": len(seconds)})

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


_WHY_SPIKES = (
    "calls of the CUDA driver take longer than `mmap`; pages are filled with zeros when first"
    " written to"
)

TABLES: dict[str, Callable[[Size], list[Row]]] = {
    "prefill": prefill,
    "decode": decode,
    "allocation": allocation,
    "page_sizes": page_sizes,
    "spikes": spikes,
}
