"""
Contiguous rows in virtual memory (`storage="virtual"`) against contiguous K/V, and against blocks.

    python -m benchmarks.virtual [--only REGEX] [--turns 15] [--quick] [--json PATH]

Decode steps of whole models with custom attention code, on the same states, over a `PagedCache`
with blocks, one with contiguous rows, and transformers' `DynamicCache`; attention alone of chunks
and decodes on a host without a C++ compiler, relative to SDPA on contiguous tensors; bytes of pages
that rows, samples and beams hold; and cost and gain of each of vAttention's mechanisms in the same
decode steps. Contenders take turns; each ratio is the median over turns, with its 95% interval.
A target is met where the interval reaches it.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import re
import unittest.mock
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache, PreTrainedModel

import hf_paged
from benchmarks import runner
from hf_paged import PagedCache, VirtualStorage, compat
from hf_paged.attention.backends import gather
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.step import StepMetadata

BLOCKS, VIRTUAL = "blocks", "virtual"
MECHANISMS: dict[str, dict[str, Any]] = {
    "on demand, nothing kept": {"keep_mappings": False},
    "on demand": {},
    "7 blocks ahead": {"blocks_ahead": 7},
    "page groups of 64 KiB": {"page_bytes": 1 << 16},
}
TARGETS = {"gpt_neo": 1.05, "gptj": 1.05, "bloom": 0.87}


def own_models(quick: bool, layers: int = 12) -> dict[str, PreTrainedModel]:
    """Models with custom attention code, at the width of models of 100 million parameters and
    more."""
    layers, width, heads = (2, 64, 4) if quick else (layers, 768, 12)
    common = {"vocab_size": 1000, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    configs = {
        "gpt_neo": transformers.GPTNeoConfig(
            attention_types=[[["global", "local"], layers // 2]],
            hidden_size=width,
            num_layers=layers,
            num_heads=heads,
            max_position_embeddings=2048,
            **common,
        ),
        "gptj": transformers.GPTJConfig(
            n_embd=width,
            n_layer=layers,
            n_head=heads,
            rotary_dim=width // heads // 2,
            n_positions=2048,
            **common,
        ),
        "bloom": transformers.BloomConfig(
            hidden_size=width, n_layer=layers, n_head=heads, **common
        ),
    }
    torch.manual_seed(0)
    make = transformers.AutoModelForCausalLM.from_config
    return {name: make(config, dtype=torch.float32).eval() for name, config in configs.items()}


def steps_seconds(model: PreTrainedModel, cache: Any, token: torch.Tensor, steps: int) -> float:
    """Seconds per decode step over some steps."""

    def work() -> None:
        for _ in range(steps):
            model(token, **{compat.OUTPUT_CACHE: cache}, use_cache=True)

    return runner.seconds_of(work) / steps


def stepper(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, steps: int
) -> Callable[[int], float]:
    """An arm of decode steps after the same prompt, which it crops the cache to; warmed up."""
    length = ids.shape[1]
    model(ids, **{compat.OUTPUT_CACHE: cache}, use_cache=True)

    def work(turn: int) -> float:
        seconds = steps_seconds(model, cache, ids[:, -1:], steps)
        cache.crop(length - cache.get_seq_length())
        return seconds

    for turn in range(2):
        work(turn)
    return work


def decode(args: argparse.Namespace) -> Iterator[runner.Case]:
    rows, length, steps = (2, 64, 4) if args.quick else (8, 512, 16)
    for name, model in own_models(args.quick).items():
        what = f"decode step of {name}, {rows}x{length}"
        if not re.search(args.only, what):
            continue
        ids = torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
        caches = {"DynamicCache": DynamicCache(config=model.config)}
        caches |= {kind: PagedCache(model.config, {"storage": kind}) for kind in (BLOCKS, VIRTUAL)}
        arms = {kind: stepper(model, cache, ids, steps) for kind, cache in caches.items()}
        counters = caches[VIRTUAL].counters
        before = counters.gathered
        yield runner.Case(what, arms, {"DynamicCache": {VIRTUAL: TARGETS[name]}})
        assert counters.gathered == before, "keys and values were gathered"


# query heads, K/V heads, head dim
SHAPES = {"qwen2.5-0.5b": (14, 2, 64), "llama-3.1-8b": (32, 8, 128)}


CASES = (
    # rows, tokens of a row, queries of a row, and the target
    ("decode 8x512", 8, 512, 1, 1.0),
    ("chunks 4x64 of 576", 4, 576, 64, 0.98),
    ("chunk 1x256 of 2048", 1, 2048, 256, 0.98),
)


class Paged:
    """Attention over the blocks of a cache, with one step for all layers, as in a model."""

    def __init__(
        self, states: Any, config: hf_paged.PagedConfig, query: torch.Tensor, queries: int
    ) -> None:
        cache = PagedCache(None, config)
        for layer, (keys, values) in enumerate(states):
            cache.update(keys, values, layer)
        group = next(iter(cache.groups.values()))
        self.view = group.view(states[0][0].shape[2], torch.device("cpu"))
        self.storage, self.query, self.queries = group.blocks.storage, query, queries
        self.cache, self.step = cache, self.plan()

    def plan(self) -> StepMetadata:
        fields = self.view.block_tables, self.view.seq_lens, self.view.block_size
        return StepMetadata.rectangle(*fields, query_len=self.queries)

    def planned(self, layer: int) -> torch.Tensor:
        """Attention of a layer with the step planned before."""
        scale = self.query.shape[-1] ** -0.5
        blocks = self.storage.layers[layer]
        return gather.attend(AttentionCall(self.query, blocks, self.step, scale=scale))

    def __call__(self, layer: int) -> torch.Tensor:
        if layer == 0:
            self.step = self.plan()
        return self.planned(layer)

    def seen(self) -> list[list[torch.Tensor]]:
        """Keys and values of each layer, as the kernel finds them."""
        found = []
        for layer in self.storage.layers.values():
            placed = layer.rows.place(self.step)
            slots = placed.placement.slots
            rows = slice(slots[0], slots[-1] + 1)
            both = placed.keys, placed.values
            found.append([states[rows, :, : self.view.seq_lens[0]] for states in both])
        return found


def attend(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """SDPA of the last queries, at its best on contiguous tensors."""
    queries, length = query.shape[2], keys.shape[2]
    if queries == 1:  # much faster in half precision than with `enable_gqa`
        grouped = query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
        return F.scaled_dot_product_attention(grouped, keys, values).reshape(query.shape)
    mask = masks(queries, length)
    return F.scaled_dot_product_attention(query, keys, values, attn_mask=mask, enable_gqa=True)


@functools.cache
def masks(queries: int, length: int) -> torch.Tensor:
    return torch.ones(queries, length).tril(length - queries).log().bfloat16()


def attention(args: argparse.Namespace) -> Iterator[runner.Case]:
    """The portable path, as on a host without a C++ compiler: over blocks, over contiguous rows,
    and SDPA on tensors; of contiguous rows also with the step planned before, and SDPA alone. Times
    are of all layers."""
    for (shape, (heads, kv_heads, dim)), case in itertools.product(SHAPES.items(), CASES):
        name, rows, length, queries, target = case
        what = f"{name}, {shape}, bf16"
        if not re.search(args.only, what):
            continue
        layers = range(2 if args.quick else 12)
        query = torch.randn(rows, heads, queries, dim, dtype=torch.bfloat16)
        sizes = rows, kv_heads, length, dim
        states = [[torch.randn(sizes).bfloat16() for _ in "kv"] for _ in layers]
        packed = query.transpose(1, 2).flatten(0, 1).contiguous()
        configs = {
            BLOCKS: hf_paged.PagedConfig(storage=BLOCKS, block_size=16),
            VIRTUAL: hf_paged.PagedConfig(storage=VIRTUAL, block_size=4096 // (2 * dim)),
        }
        paged = {kind: Paged(states, config, packed, queries) for kind, config in configs.items()}
        seen = paged[VIRTUAL].seen()
        functions: dict[str, Callable[[int], Any]] = {
            "contiguous": functools.partial(attend_layer, query, states),
            **paged,
            "virtual, planned before": paged[VIRTUAL].planned,
            "virtual, SDPA alone": functools.partial(attend_layer, query, seen),
        }
        expected = functions["contiguous"](1).transpose(1, 2).flatten(0, 1).float()
        for kind, mine in paged.items():
            close = torch.allclose(mine(1).float(), expected, atol=3e-2)
            assert close, f"{what}: {kind} differs"
        works = {
            name: functools.partial(walk, function, layers) for name, function in functions.items()
        }
        yield runner.Case(what, runner.timed(works), {"contiguous": {VIRTUAL: target}})


def attend_layer(query: torch.Tensor, states: Any, layer: int) -> torch.Tensor:
    return attend(query, *states[layer])


def walk(function: Callable[[int], Any], layers: range) -> None:
    """Calls a function of the layer for all layers, as a model does."""
    for layer in layers:
        function(layer)


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


def mechanisms(args: argparse.Namespace) -> Iterator[runner.Case]:
    """Decode steps of a small GPT-Neo, for which all contenders can be mapped at once
    (`pages.Extents`), and calls of `mmap` per step, where rows begin after others that ended."""
    what = "mechanisms, decode steps of gpt_neo of 4 layers"
    if not re.search(args.only, what):
        return
    model = own_models(args.quick, layers=4)["gpt_neo"]
    rows, length, steps = (2, 64, 70) if args.quick else (4, 512, 160)
    ids = torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(0))

    def arm(options: dict[str, Any]) -> Callable[[int], runner.Turn]:
        cache = PagedCache(model.config, {"storage": VirtualStorage(**options)})

        def work(turn: int) -> runner.Turn:
            model(ids, **{compat.OUTPUT_CACHE: cache}, use_cache=True)
            calls.clear()
            seconds = steps_seconds(model, cache, ids[:, -1:], steps)
            cache.reset()
            return runner.Turn(seconds, figures={"mmaps a step": round(len(calls) / steps, 1)})

        return work

    arms = {name: arm(options) for name, options in MECHANISMS.items()}
    with mmaps() as calls:
        yield runner.Case(what, arms, {"on demand": {}})


def physical(args: argparse.Namespace) -> Iterator[runner.Case]:
    """Bytes of pages in memory with all rows present, relative to contiguous rows, and after their
    release."""
    for name, rows, new, limit in (("8 beams", 8, 32, 0.25), ("16 samples", 16, 32, 0.20)):
        what = f"bytes of pages, {name} over 500 + {new}, qwen2.5-0.5b heads"
        if re.search(args.only, what):
            share, after = pages_of(rows, new)
            figures = {"of contiguous bytes": share, "at most": limit}
            figures["bytes when all rows are gone"] = after
            arms = {VIRTUAL: lambda turn: runner.Turn(0.0)}
            yield runner.Case(what, arms, turns=1, figures=figures)


def pages_of(rows: int, new: int) -> tuple[float, int]:
    cache = PagedCache(None, hf_paged.PagedConfig(storage="virtual", block_size=32))
    for count in [500] + new * [1]:
        states = torch.randn(1 if count > 1 else rows, 2, count, 64).bfloat16()
        for layer in range(4):
            cache.update(states, states, layer)
        if count > 1:
            cache.batch_repeat_interleave(rows)
    storage = next(iter(cache.groups.values())).blocks.storage
    share, held = storage.physical_bytes / (rows * (500 + new) * 4 * 2 * 2 * 64 * 2), storage.pages
    cache.reset()
    cache.memory.release()
    return round(share, 3), held.physical_bytes()


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    with torch.no_grad():
        for part in (decode, attention, mechanisms, physical):
            yield from part(args)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Rows at contiguous addresses",
    results=(("virtual-cpu-1", "virtual-cpu-2"),),
    options={"--threads": runner.THREADS},
    turns=15,
    only="regular expression on what is measured",
    quick={"turns": 2},
)
main = BENCHMARK.main

if __name__ == "__main__":
    raise SystemExit(main())
