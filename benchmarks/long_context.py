"""One long prompt: plain `generate`, `cache_implementation="paged"` and `PagedEngine`, in turns.
Tokens, seconds of prefill and of each new token, and bytes of keys and values.

    python -m benchmarks.long_context [--tokens 32768] [--turns 5] [--quick] [--json PATH]
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

import hf_paged
from benchmarks import runner
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

    def generate(count: int, **options: Any) -> list[int]:
        tokens = model.generate(ids, max_new_tokens=count, do_sample=False, **options)
        return tokens[0, num_tokens:].tolist()

    def serve(count: int) -> list[int]:
        options = {"max_new_tokens": count, "do_sample": False}
        return engine.generate([ids[0].tolist()], options)[0].token_ids

    systems: dict[str, Callable[[int], list[int]]] = {
        "plain": generate,
        "generate": lambda count: generate(count, **paged),
        "engine": serve,
    }
    cache = DynamicCache(config=model.config)
    expected = generate(new_tokens, **{compat.OUTPUT_CACHE: cache})
    # also a warm-up
    equal = {
        name: name == "plain" or call(new_tokens) == expected for name, call in systems.items()
    }
    held = {
        "plain": sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers),
        "generate": hf_paged.memory_stats(model).peak_bytes,
        "engine": engine.stats().peak_bytes,
    }

    def both(name: str) -> tuple[float, float]:
        """Seconds of a call for one token, and of one for all."""
        first = runner.seconds_of(lambda: systems[name](1))
        return first, runner.seconds_of(lambda: systems[name](new_tokens))

    arms = {name: (lambda turn, name=name: both(name)) for name in systems}
    rows = []
    for name, times in runner.take_turns(arms, turns).items():
        told = "yes" if equal[name] else "NO"
        row = {"system": name, "equal": told, "kv_mib": held[name] / 2**20}
        if turns:
            rest = statistics.median(every - one for one, every in times)
            row["prefill_s"] = round(statistics.median(one for one, _ in times), 3)
            row["ms_per_token"] = round(1e3 * rest / (new_tokens - 1), 2)
        rows.append(row)
    engine.free()
    return rows


def show(data: dict[str, Any]) -> list[str]:
    sizes = f"{data['tokens']} tokens, {NEW_TOKENS} new, {LAYERS} layers, float32"
    table = markdown(data["rows"], {name: name for name in COLUMNS})
    return [f"{sizes}, medians of {data['turns']} turns", table]


main = runner.Benchmark(
    __doc__,
    lambda args: {
        "tokens": args.tokens,
        "turns": args.turns,
        "rows": run(args.tokens, args.turns),
    },
    show,
    options={"--tokens": runner.option("of the prompt", type=int, default=32768)},
    turns=5,
    quick={"tokens": 512, "turns": 1},
    facts="facts",
).main

if __name__ == "__main__":
    raise SystemExit(main())
