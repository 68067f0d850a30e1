"""Generate for 500 prompts of different lengths with the batching engine, and compare a sample with
plain `generate`.

Every prompt begins with one of a few passages of Python's manual and has a separate limit. The
engine batches requests as memory allows, computes a common prefix once, and returns the tokens of
plain `generate` on each prompt alone. The script exits with status 1 if a token of the sample
differs.

    python examples/batch_generation.py [--prompts 500] [--train-seconds 15] [--quick]
"""

from __future__ import annotations

import argparse
import random
import sys
from statistics import median
from typing import Any

import tiny_model  # before transformers: it sets the environment
import torch
from transformers import GenerationConfig

import hf_paged

PASSAGES = ("assignment", "class", "exceptions", "function", "import", "objects", "try", "with")
PASSAGE_TOKENS = 96  # common prefix of all prompts about one passage
QUESTION_TOKENS = (4, 160)  # least and most tokens of the rest of a prompt
NEW_TOKENS = (8, 96)
SAMPLE_SIZE = 16  # results compared with plain `generate`


def make_prompts(tokenizer: Any, count: int) -> list[list[int]]:
    """Token ids of `count` prompts: the beginning of a passage, then text from elsewhere in the
    manual."""
    draw = random.Random(0)
    passages = [
        tokenizer(tiny_model.MANUAL[name])["input_ids"][:PASSAGE_TOKENS] for name in PASSAGES
    ]
    manual = tokenizer(" ".join(tiny_model.MANUAL.values()))["input_ids"]
    prompts = []
    for _ in range(count):
        length = draw.randint(*QUESTION_TOKENS)
        start = draw.randrange(len(manual) - length)
        prompts.append(draw.choice(passages) + manual[start : start + length])
    return prompts


def print_stats(stats: hf_paged.EngineStats) -> None:
    share = stats.num_prefix_hit_tokens / stats.num_prompt_tokens
    rows = [
        ("engine.stats()", ""),
        ("requests finished", f"{stats.num_finished:,}"),
        ("prompt tokens", f"{stats.num_prompt_tokens:,}"),
        ("  of them found in the prefix cache", f"{stats.num_prefix_hit_tokens:,} ({share:.0%})"),
        ("new tokens", f"{stats.num_generated_tokens:,}"),
        ("steps", f"{stats.num_steps:,}"),
        ("new tokens per step", f"{stats.num_generated_tokens / stats.num_steps:.0f}"),
        ("seconds in steps", f"{stats.seconds:.1f}"),
        ("new tokens per second", f"{stats.tokens_per_second:,.0f}"),
        ("most blocks in use", f"{stats.peak_blocks:,}"),
        ("most bytes of keys and values", f"{stats.peak_bytes / 2**20:.1f} MiB"),
        ("slots allocated and unused then", f"{stats.waste_percent:.1f}%"),
        ("blocks kept for later prompts", f"{stats.cached_blocks:,}"),
        ("preemptions", f"{stats.num_preemptions:,}"),
    ]
    tiny_model.print_table(rows)


def print_results(results: list[hf_paged.RequestResult]) -> None:
    """Prints the prefix hits, the finish reasons, and a few texts."""
    hits = [result.num_prefix_hit_tokens for result in results]
    first_token = sorted(result.timings.first_token or 0.0 for result in results)
    reasons = [result.finish_reason for result in results]
    counts = ", ".join(f"{reasons.count(reason)} by {reason}" for reason in sorted(set(reasons)))
    print(f"ended: {counts}")
    print(
        f"prefix hits: {sum(hit > 0 for hit in hits)} of {len(hits)} prompts; most tokens of one:"
        f" {max(hits)}"
    )
    print(
        f"first token: after {median(first_token):.2f} s in the middle, {first_token[-1]:.2f} s at"
        " the latest\n"
    )
    for result in results[:3]:
        print(
            f"  {len(result.prompt_ids)} tokens in, {len(result.token_ids)} out:"
            f" {tiny_model.shown(result.text, 90)}"
        )


def num_equal(
    model: Any, results: list[hf_paged.RequestResult], configs: list[GenerationConfig]
) -> int:
    """Number of results whose tokens equal plain `generate`'s on the prompt alone."""
    equal = 0
    for result, config in zip(results, configs):
        prompt = torch.tensor([result.prompt_ids])
        plain = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), generation_config=config
        )
        equal += plain[0, prompt.shape[1] :].tolist() == result.token_ids
    return equal


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--prompts", type=int, default=500, help="how many (default 500; 24 with --quick)"
    )
    tiny_model.add_arguments(parser, seconds=15)
    arguments = parser.parse_args()
    model, tokenizer = tiny_model.from_arguments(arguments)
    prompts = make_prompts(tokenizer, 24 if arguments.quick else arguments.prompts)
    most = 16 if arguments.quick else NEW_TOKENS[1]
    draw = random.Random(1)
    configs = [
        GenerationConfig(
            max_new_tokens=draw.randint(NEW_TOKENS[0], most),
            **tiny_model.GREEDY,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
        for _ in prompts
    ]

    lengths = [len(prompt) for prompt in prompts]
    print(f"{len(prompts)} prompts of {min(lengths)} to {max(lengths)} tokens")
    with hf_paged.PagedEngine(model, {"block_size": 16}, tokenizer=tokenizer) as engine:
        results = engine.generate(prompts, configs, progress=True)
        engine.check_integrity()
        stats = engine.stats()
    print_results(results)
    print()
    print_stats(stats)

    sample = random.Random(2).sample(range(len(prompts)), min(SAMPLE_SIZE, len(prompts)))
    equal = num_equal(model, [results[i] for i in sample], [configs[i] for i in sample])
    print(
        f"\n{equal} of {len(sample)} results drawn at random equal plain `generate` on the prompt"
        " alone"
    )
    failed = [result.error for result in results if result.error is not None]
    return 0 if equal == len(sample) and not failed else 1


if __name__ == "__main__":
    sys.exit(main())
