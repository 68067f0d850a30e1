"""Decode steps of whole models with custom attention code, on the same states: over a `PagedCache`
with blocks, one with contiguous rows in virtual memory (`storage="virtual"`), and transformers'
`DynamicCache`. The models are as wide as models of 100 million parameters and more. Attention
alone, mapping and page sizes are among the papers' tables (`benchmarks.paper`)."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

from benchmarks import runner
from hf_paged import PagedCache, compat

BLOCKS, VIRTUAL = "blocks", "virtual"
TARGETS = {"gpt_neo": 1.05, "gptj": 1.05, "bloom": 0.87}


def config_of(name: str, layers: int, width: int, heads: int) -> Any:
    common = {"vocab_size": 1000, "eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    own = {
        "gpt_neo": {"attention_types": [[["global", "local"], layers // 2]]},
        "gptj": {"rotary_dim": width // heads // 2},
        "bloom": {},
    }
    return transformers.AutoConfig.for_model(name, **common, **sizes, **own[name])


@torch.no_grad()
def decode_steps(
    model: PreTrainedModel, cache: Any, ids: torch.Tensor, steps: int
) -> Callable[[int], float]:
    """An arm: seconds of a decode step after the same prompt, which it crops the cache to; warmed
    up."""
    length = ids.shape[1]
    options = {compat.OUTPUT_CACHE: cache, "use_cache": True}
    model(ids, **options)

    @torch.no_grad()
    def work(turn: int) -> float:
        seconds = runner.seconds_of(lambda: [model(ids[:, -1:], **options) for _ in range(steps)])
        cache.crop(length - cache.get_seq_length())
        return seconds / steps

    for turn in range(2):
        work(turn)
    return work


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    rows, length, steps = args.size
    for name, target in TARGETS.items():
        case = f"decode step of {name}, {rows}x{length}"
        if not re.search(args.only, case):
            continue
        torch.manual_seed(0)
        config = config_of(name, *args.shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        ids = torch.randint(3, 1000, (rows, length), generator=torch.Generator().manual_seed(0))
        caches = {"DynamicCache": DynamicCache(config=config)}
        caches |= {kind: PagedCache(config, {"storage": kind}) for kind in (BLOCKS, VIRTUAL)}
        arms = {kind: decode_steps(model, cache, ids, steps) for kind, cache in caches.items()}
        counters = caches[VIRTUAL].counters
        before = counters.gathered
        yield runner.Case(case, arms, {"DynamicCache": {VIRTUAL: target}})
        assert counters.gathered == before, "keys and values were gathered"


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Rows at contiguous addresses",
    results=(("virtual-cpu-1", "virtual-cpu-2"),),
    turns=15,
    only="regular expression on what is measured",
    fixed={"size": (8, 512, 16), "shape": (12, 768, 12)},
    quick={"size": (2, 64, 4), "shape": (2, 64, 4), "turns": 2},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
