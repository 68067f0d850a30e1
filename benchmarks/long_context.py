"""One long prompt: plain `generate`, `cache_implementation="paged"` and `PagedEngine`, in turns.
Tokens, seconds of prefill and of each new token, and bytes of keys and values.

    python -m benchmarks.long_context [--tokens 32768] [--turns 5] [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_paged
from benchmarks.machine import facts
from benchmarks.report import markdown
from hf_paged import compat

NEW_TOKENS, LAYERS = 16, 4
COLUMNS = ("system", "equal", "prefill_s", "ms_per_token", "kv_mib")


def build(num_tokens: int) -> LlamaForCausalLM:
    """A random model of four layers in float32."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=num_tokens + NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval()


def run(num_tokens: int, turns: int, new_tokens: int = NEW_TOKENS) -> list[dict[str, Any]]:
    """One row per system; without turns nothing is timed."""
    model = build(num_tokens)
    ids = torch.randint(3, 512, (1, num_tokens), generator=torch.Generator().manual_seed(1))
    engine = hf_paged.PagedEngine(model, {"prefix_caching": False})
    paged = {"cache_implementation": "paged", "cache_config": {"prefix_caching": False}}

    def options(count: int) -> dict[str, Any]:
        return {"max_new_tokens": count, "do_sample": False}

    systems: dict[str, Callable[[int], list[int]]] = {
        "plain": lambda count: model.generate(ids, **options(count))[0, num_tokens:].tolist(),
        "generate": lambda count: model.generate(ids, **options(count), **paged)[
            0, num_tokens:
        ].tolist(),
        "engine": lambda count: engine.generate([ids[0].tolist()], options(count))[0].token_ids,
    }
    cache = DynamicCache(config=model.config)
    expected = model.generate(ids, **options(new_tokens), **{compat.OUTPUT_CACHE: cache})[
        0, num_tokens:
    ].tolist()
    # also a warm-up
    equal = {
        name: name == "plain" or call(new_tokens) == expected for name, call in systems.items()
    }
    held = {"plain": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)}
    held["generate"], held["engine"] = (
        hf_paged.memory_stats(model).peak_bytes,
        engine.stats().peak_bytes,
    )
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in systems}
    for turn in range(turns):
        for name in list(systems) if turn % 2 else reversed(list(systems)):
            start = time.perf_counter()
            systems[name](1)
            first = time.perf_counter()
            systems[name](new_tokens)
            seconds[name].append((first - start, time.perf_counter() - first))
    engine.free()
    rows = []
    for name, times in seconds.items():
        row = {
            "system": name,
            "equal": "yes" if equal[name] else "NO",
            "kv_mib": held[name] / 2**20,
        }
        if turns:
            rest = statistics.median(every - one for one, every in times)
            row["prefill_s"] = round(statistics.median(one for one, _ in times), 3)
            row["ms_per_token"] = round(1e3 * rest / (new_tokens - 1), 2)
        rows.append(row)
    return rows


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if tokens differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tokens", type=int, default=32768, help="of the prompt")
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument(
        "--quick", action="store_true", help="512 tokens, one turn: shows that it runs"
    )
    parser.add_argument("--json", help="also write the rows here")
    arguments = parser.parse_args(argv)
    num_tokens, turns = (512, 1) if arguments.quick else (arguments.tokens, arguments.turns)
    machine = facts()
    rows = run(num_tokens, turns)
    print(
        f"{num_tokens} tokens, {NEW_TOKENS} new, {LAYERS} layers, float32, medians of {turns}"
        " turns\n"
    )
    print(markdown(rows, {name: name for name in COLUMNS}))
    if arguments.json:
        with open(arguments.json, "w") as file:
            json.dump(
                {"facts": machine, "tokens": num_tokens, "turns": turns, "rows": rows},
                file,
                indent=1,
            )
            file.write("\n")
    return int(any(row["equal"] != "yes" for row in rows))


if __name__ == "__main__":
    raise SystemExit(main())
