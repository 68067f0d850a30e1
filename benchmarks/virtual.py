"""
Contiguous rows in virtual memory (`storage="virtual"`) against contiguous K/V, and against blocks.

    python -m benchmarks.virtual [--only REGEX] [--turns 15] [--quick] [--json PATH]

Decode steps of whole models with custom attention code, on the same states, over a `PagedCache`
with blocks, one with contiguous rows, and transformers' `DynamicCache`; attention alone of chunks
and decodes on a host without a C++ compiler, relative to SDPA on contiguous tensors; bytes of pages
that rows, samples and beams hold; and cost and gain of each of vAttention's mechanisms in the same
decode steps. Contenders take turns; each ratio is the median over turns, with its 95% interval.
"""

from __future__ import annotations

import argparse
import functools
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import DynamicCache, PreTrainedModel

import hf_paged
from benchmarks import paired
from benchmarks.machine import facts
from benchmarks.report import markdown
from hf_paged import PagedCache, VirtualStorage, compat
from hf_paged.attention.backends import gather
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.step import StepMetadata

COLUMNS = ("what", "case", "ms", "ratio", "interval", "target", "verdict")
BLOCKS, VIRTUAL = "blocks", "virtual"
MECHANISMS: dict[str, dict[str, Any]] = {
    "on demand, nothing kept": {"keep_mappings": False},
    "on demand": {},
    "7 blocks ahead": {"blocks_ahead": 7},
    "page groups of 64 KiB": {"page_bytes": 1 << 16},
}
TARGETS = {"gpt_neo": 0.95, "gptj": 0.95, "bloom": 1.15}


def own_models(quick: bool, layers: int = 12) -> dict[str, PreTrainedModel]:
    """Models with custom attention code, at the width of models of 100 million parameters and
    more."""
    layers, width, heads = (2, 64, 4) if quick else (layers, 768, 12)
    common = {"vocab_size": 1000, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    neo = {
        "attention_types": [[["global", "local"], layers // 2]],
        "num_layers": layers,
        "num_heads": heads,
    }
    configs = {
        "gpt_neo": transformers.GPTNeoConfig(
            hidden_size=width, max_position_embeddings=2048, **neo, **common
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


def in_turns(works: dict[str, Callable[[], float]], turns: int) -> dict[str, list[float]]:
    """Seconds of each, in turns of rotating order."""
    names = list(works)
    times: dict[str, list[float]] = {name: [] for name in names}
    for turn in range(turns):
        at = turn % len(names)
        for name in names[at:] + names[:at]:
            times[name].append(works[name]())
    return times


def compare(
    what: str, times: dict[str, list[float]], base: str, targets: dict[str, float]
) -> list[dict[str, Any]]:
    """A row for each contender: its time over that of `base` in the same turns."""
    rows = []
    for name, seconds in times.items():
        found = paired.ratios(seconds, times[base])
        ratio, target = statistics.median(found), targets.get(name)
        rows.append(
            {
                "what": what,
                "case": name,
                "ms": round(1e3 * statistics.median(seconds), 3),
                "ratio": round(ratio, 3),
                "interval": paired.span(paired.interval(found)),
                "target": target,
                "verdict": "" if target is None else paired.at_most(ratio, target),
                "seconds": seconds,
            }
        )
    return rows


def stepper(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, steps: int
) -> Callable[[], float]:
    """Seconds per decode step, over some steps after the same prompt; then crops the cache."""
    length = ids.shape[1]
    model(ids, **{compat.OUTPUT_CACHE: cache}, use_cache=True)
    token = ids[:, -1:]

    def work() -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            model(token, **{compat.OUTPUT_CACHE: cache}, use_cache=True)
        seconds = (time.perf_counter() - begin) / steps
        cache.crop(length - cache.get_seq_length())
        return seconds

    for _ in range(2):
        work()
    return work


def decode(turns: int, quick: bool, only: str) -> list[dict[str, Any]]:
    rows, length, steps = (2, 64, 4) if quick else (8, 512, 16)
    found = []
    for name, model in own_models(quick).items():
        what = f"decode step of {name}, {rows}x{length}, over DynamicCache"
        if not re.search(only, what):
            continue
        ids = torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
        caches = {"DynamicCache": DynamicCache(config=model.config)}
        caches |= {kind: PagedCache(model.config, {"storage": kind}) for kind in (BLOCKS, VIRTUAL)}
        works = {kind: stepper(model, cache, ids, steps) for kind, cache in caches.items()}
        counters = caches[VIRTUAL].counters
        before = counters.gathered
        times = in_turns(works, turns)
        assert counters.gathered == before, "keys and values were gathered"
        found += compare(what, times, "DynamicCache", {VIRTUAL: TARGETS[name]})
    return found


# query heads, K/V heads, head dim
SHAPES = {"qwen2.5-0.5b": (14, 2, 64), "llama-3.1-8b": (32, 8, 128)}


def over_layers(function: Callable[[int], torch.Tensor], layers: int) -> float:
    """Seconds per layer."""
    begin = time.perf_counter()
    for layer in range(layers):
        function(layer)
    return (time.perf_counter() - begin) / layers


class Paged:
    """Attention over the blocks of a cache, with one step for all layers, as in a model."""

    def __init__(
        self,
        cache: PagedCache,
        view: StepMetadata,
        storage: Any,
        query: torch.Tensor,
        queries: int,
        keeps_step: bool = False,
    ) -> None:
        self.cache, self.view, self.storage, self.query, self.queries = (
            cache,
            view,
            storage,
            query,
            queries,
        )
        self.fields, self.keeps_step = (
            (view.block_tables, view.seq_lens, view.block_size),
            keeps_step,
        )
        self.step: StepMetadata | None = None

    def __call__(self, layer: int) -> torch.Tensor:
        if self.step is None or (layer == 0 and not self.keeps_step):
            self.step = StepMetadata.rectangle(*self.fields, query_len=self.queries)
        scale = self.query.shape[-1] ** -0.5
        return gather.attend(
            AttentionCall(self.query, self.storage.layers[layer], self.step, scale=scale)
        )


def stages(
    paged: Paged,
    functions: dict[str, Callable[[int], torch.Tensor]],
    product: Callable[..., torch.Tensor],
) -> None:
    """Adds contenders for parts of a step: attention with the step planned before, and `product` of
    its keys and values alone."""
    planned = Paged(
        paged.cache, paged.view, paged.storage, paged.query, paged.queries, keeps_step=True
    )
    planned(0)
    assert planned.step is not None
    seen = []
    for layer in paged.storage.layers.values():
        placed = layer.rows.place(planned.step)
        slots = placed.placement.slots
        seen.append([x[slots[0] : slots[-1] + 1, :, : paged.view.seq_lens[0]] for x in placed[1:]])
    functions["virtual, planned before"] = planned
    functions["virtual, SDPA alone"] = lambda layer: product(*seen[layer])


def attention(turns: int, quick: bool, only: str) -> list[dict[str, Any]]:
    """The portable path, as on a host without a C++ compiler: over blocks, over contiguous rows,
    and SDPA on tensors."""
    cases = [("decode 8x512", 8, 512, 1, 1.0), ("chunks 4x64 of 576", 4, 576, 64, 1.02)]
    cases.append(("chunk 1x256 of 2048", 1, 2048, 256, 1.02))
    found = []
    for shape, (heads, kv_heads, dim) in SHAPES.items():
        for case, rows, length, queries, target in cases:
            what = f"{case}, {shape}, bf16, over contiguous SDPA"
            if not re.search(only, what):
                continue
            layers = 2 if quick else 12
            query = torch.randn(rows, heads, queries, dim, dtype=torch.bfloat16)
            mask = (
                torch.ones(queries, length).tril(length - queries).log().to(query.dtype)
                if queries > 1
                else None
            )
            states = [
                [torch.randn(rows, kv_heads, length, dim).bfloat16() for _ in "kv"]
                for _ in range(layers)
            ]
            packed = query.transpose(1, 2).flatten(0, 1).contiguous()
            functions: dict[str, Callable[[int], torch.Tensor]] = {}

            def product(
                keys: torch.Tensor, values: torch.Tensor, query: Any = query, mask: Any = mask
            ) -> torch.Tensor:
                if query.shape[2] == 1:  # much faster in half precision than with `enable_gqa`
                    grouped = query.unflatten(1, (keys.shape[1], -1)).flatten(2, 3)
                    return F.scaled_dot_product_attention(grouped, keys, values).reshape(
                        query.shape
                    )
                return F.scaled_dot_product_attention(
                    query, keys, values, attn_mask=mask, enable_gqa=True
                )

            def contiguous(
                layer: int, states: Any = states, product: Any = product
            ) -> torch.Tensor:
                return product(*states[layer])

            functions["contiguous"] = contiguous
            for kind in (BLOCKS, VIRTUAL):
                config = hf_paged.PagedConfig(
                    storage=kind, block_size=16 if kind == BLOCKS else 4096 // (2 * dim)
                )
                cache = PagedCache(None, config)
                for layer, (keys, values) in enumerate(states):
                    cache.update(keys, values, layer)
                group = next(iter(cache.groups.values()))
                view = group.view(length, torch.device("cpu"))

                paged = Paged(cache, view, group.blocks.storage, packed, queries)
                functions[kind] = paged
                if kind == VIRTUAL:
                    stages(paged, functions, product)
                expected = contiguous(1).transpose(1, 2).flatten(0, 1).float()
                assert torch.allclose(paged(1).float(), expected, atol=3e-2), (
                    f"{what}: {kind} differs"
                )

            works = {
                name: functools.partial(over_layers, function, layers)
                for name, function in functions.items()
            }
            for work in works.values():
                work()
            found += compare(what, in_turns(works, turns), "contiguous", {VIRTUAL: target})
    return found


def mechanisms(turns: int, quick: bool, only: str) -> list[dict[str, Any]]:
    """Decode steps of a small GPT-Neo, for which all contenders can be mapped at once
    (`pages.Extents`), and calls of `mmap` per step, where rows begin after others that ended."""
    what = "mechanisms, decode steps of gpt_neo of 4 layers, over 'on demand'"
    if not re.search(only, what):
        return []
    model = own_models(quick, layers=4)["gpt_neo"]
    rows, length, steps = (2, 64, 70) if quick else (4, 512, 160)
    ids = torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
    counts: dict[str, list[int]] = {name: [] for name in MECHANISMS}
    from hf_paged.virtual import pages

    calls, own = [0], pages.MemoryFile.map

    def count(self: Any, *args: int) -> None:
        calls[0] += 1
        own(self, *args)

    def work(name: str, cache: PagedCache) -> float:
        model(ids, **{compat.OUTPUT_CACHE: cache}, use_cache=True)
        calls[0], begin = 0, time.perf_counter()
        for _ in range(steps):
            model(ids[:, -1:], **{compat.OUTPUT_CACHE: cache}, use_cache=True)
        seconds = (time.perf_counter() - begin) / steps
        counts[name].append(calls[0])
        cache.reset()
        return seconds

    caches = {
        name: PagedCache(model.config, {"storage": VirtualStorage(**options)})
        for name, options in MECHANISMS.items()
    }
    works = {
        name: (lambda name=name, cache=cache: work(name, cache)) for name, cache in caches.items()
    }
    pages.MemoryFile.map = count  # type: ignore[method-assign]
    try:
        for one in works.values():
            one()
        found = compare(what, in_turns(works, turns), "on demand", {})
    finally:
        pages.MemoryFile.map = own  # type: ignore[method-assign]
    return [
        {**row, "mmaps a step": round(statistics.median(counts[row["case"]]) / steps, 1)}
        for row in found
    ]


def physical(only: str) -> list[dict[str, Any]]:
    """Bytes of pages in memory with all rows present, relative to contiguous rows, and after their
    release."""
    found = []
    for name, rows, new, limit in (("8 beams", 8, 32, 0.25), ("16 samples", 16, 32, 0.20)):
        what = f"bytes of pages, {name} over 500 + {new}, qwen2.5-0.5b heads"
        if not re.search(only, what):
            continue
        cache = PagedCache(None, hf_paged.PagedConfig(storage="virtual", block_size=32))
        for count in [500] + new * [1]:
            states = torch.randn(1 if count > 1 else rows, 2, count, 64).bfloat16()
            for layer in range(4):
                cache.update(states, states, layer)
            if count > 1:
                cache.batch_repeat_interleave(rows)
        storage = next(iter(cache.groups.values())).blocks.storage
        contiguous = rows * (500 + new) * 4 * 2 * 2 * 64 * 2
        share = storage.physical_bytes / contiguous
        held = storage.pages
        cache.reset()
        cache.memory.release()
        found.append(
            {
                "what": what,
                "case": VIRTUAL,
                "ratio": round(share, 3),
                "target": limit,
                "verdict": paired.at_most(share, limit),
                "bytes after": held.physical_bytes(),
            }
        )
    return found


BASES = ("DynamicCache", "contiguous", "on demand")


def pooled(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that combine the turns of several runs of one revision, a process each; a target is met
    if the interval of the ratio reaches it."""
    parts: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for row in (row for run in runs for row in run["rows"]):
        parts.setdefault(row["what"], {}).setdefault(row["case"], []).append(row)
    found = []
    for what, cases in parts.items():
        seconds = {
            case: [one for row in rows for one in row.get("seconds", [])]
            for case, rows in cases.items()
        }
        base = next((case for case in BASES if case in cases), "")
        for case, rows in cases.items():
            if case == base:
                continue
            line: dict[str, Any] = {"what": what, "case": case}
            ratios = paired.ratios(seconds[case], seconds.get(base, []))
            value = statistics.median(ratios) if ratios else rows[0]["ratio"]
            low, high = paired.interval(ratios) or (
                (min(ratios), max(ratios)) if ratios else (value, value)
            )
            if ratios:
                line["turns, processes"] = f"{len(ratios)}, {len(rows)}"
                line["ms"] = 1e3 * statistics.median(seconds[case])
                line["ratio"] = f"{value:.3f} ({low:.3f} to {high:.3f})"
            else:
                line["ratio"] = f"{value:.3f}"
            target = rows[0].get("target")
            line["target"] = "" if target is None else paired.at_most(low, target)
            more = {
                "mmaps a step": "calls of `mmap` a step",
                "bytes after": "bytes when all rows are gone",
            }
            line["more"] = "; ".join(
                f"{rows[0][key]} {title}" for key, title in more.items() if key in rows[0]
            )
            found.append(line)
    return found


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", default="", help="regular expression on what is measured")
    parser.add_argument("--turns", type=int, help="of all contenders (15; 2 with --quick)")
    parser.add_argument("--threads", type=int, help="of PyTorch; as many as it takes without it")
    parser.add_argument(
        "--quick", action="store_true", help="tiny models: only to see that it runs"
    )
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    turns = args.turns or (2 if args.quick else 15)
    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for part in (decode, attention, mechanisms):
            rows += part(turns, args.quick, args.only)
        rows += physical(args.only)
    columns = [*COLUMNS, "mmaps a step", "bytes after"]
    print(markdown(rows, {name: name for name in columns}))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": facts("cpu"), "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
