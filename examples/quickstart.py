"""Train a small Llama on Python's own manual, then generate with the plain and with the paged cache
and compare.

Everything runs on the CPU and nothing is downloaded: the text is `pydoc_data.topics`, the reference
manual that `help()` prints. The script exits with status 1 if a token of the paged runs differs
from plain `generate`.

    python examples/quickstart.py [--train-seconds 60] [--quick]
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from statistics import median
from typing import Any

import tiny_model  # before transformers: it sets the environment
import torch
from tqdm import tqdm

import hf_paged

# so small a model spells badly without
SAMPLED = {"do_sample": True, "temperature": 0.7, "top_k": 20}
REPEATS = 3  # timed runs of each call, plain and paged taking turns

RAGGED_PROMPTS = [
    "The with statement",
    "An exception is raised at the point where the error is",
    "A class definition is an executable statement. The inheritance list usually gives",
    (
        "When a name is used in a code block, it is resolved using the nearest enclosing scope. The"
        " set of all such scopes visible to a code block is called the"
    ),
]
SAMPLE_PROMPT, BEAM_PROMPT = (
    tiny_model.MANUAL[topic][:length].rpartition(" ")[0]
    for topic, length in (("exceptions", 1000), ("objects", 1600))
)


@dataclass(frozen=True)
class Comparison:
    """One row of the table: the same call with the plain and with the paged cache."""

    name: str
    plain_seconds: float
    paged_seconds: float
    paged_bytes: int  # peak bytes of K/V blocks in use
    contiguous_bytes: int  # bytes of K/V in plain's cache at the end of the call
    equal: bool


def compare(
    name: str, model: Any, inputs: Any, repeats: int, progress: Any, **options: Any
) -> tuple[Comparison, torch.Tensor]:
    """Makes a `generate` call both ways: a warm-up of each, then `repeats` timed runs of each, in
    turns. `progress` is the bar that counts them.

    Returns:
        `tuple[Comparison, torch.Tensor]`: The figures, and the paged call's tokens of shape `(rows,
            length)`, int64.
    """

    def call(**extra: Any) -> tuple[Any, float]:
        torch.manual_seed(0)  # plain and paged draw the same samples
        start = time.perf_counter()
        output = model.generate(**inputs, **options, **extra)
        seconds = time.perf_counter() - start
        progress.update(1)
        return output, seconds

    plain, _ = call(return_dict_in_generate=True)
    contiguous_bytes = tiny_model.cache_bytes(plain)
    call(cache_implementation="paged")
    hf_paged.memory_stats(model, reset=True)

    plain_seconds, paged_seconds, equal = [], [], True
    for _ in range(repeats):
        plain_tokens, seconds = call()
        plain_seconds.append(seconds)
        paged_tokens, seconds = call(cache_implementation="paged")
        paged_seconds.append(seconds)
        equal = equal and torch.equal(plain_tokens, paged_tokens)
    paged_bytes = hf_paged.memory_stats(model).peak_bytes
    return (
        Comparison(
            name, median(plain_seconds), median(paged_seconds), paged_bytes, contiguous_bytes, equal
        ),
        paged_tokens,
    )


def print_comparisons(comparisons: list[Comparison], repeats: int) -> None:
    header = (
        "call",
        "plain s",
        "paged s",
        "contiguous KiB",
        "paged KiB",
        "paged/contiguous",
        "tokens equal",
    )
    rows = [
        (
            item.name,
            f"{item.plain_seconds:.2f}",
            f"{item.paged_seconds:.2f}",
            f"{item.contiguous_bytes / 1024:,.0f}",
            f"{item.paged_bytes / 1024:,.0f}",
            f"{item.paged_bytes / item.contiguous_bytes:.0%}",
            "yes" if item.equal else "NO",
        )
        for item in comparisons
    ]
    tiny_model.print_table([header, *rows])
    print(
        f"\nseconds: median of {repeats}, plain and paged in turn; KiB: keys and values only, paged"
        " at its peak"
    )


def won(comparisons: list[Comparison]) -> str:
    """One sentence that sums up the table."""
    if not all(item.equal for item in comparisons):
        return "Some tokens differ from those of plain generate, which is a bug: please report it."
    plain_seconds = sum(item.plain_seconds for item in comparisons)
    paged_seconds = sum(item.paged_seconds for item in comparisons)
    share = sum(item.paged_bytes for item in comparisons) / sum(
        item.contiguous_bytes for item in comparisons
    )
    return (
        f"The paged cache gave the same tokens in {paged_seconds:.2f} s instead of"
        f" {plain_seconds:.2f} s, and stored the keys and values of these {len(comparisons)} calls"
        f" in {share:.0%} of the memory."
    )


def print_text(title: str, tokenizer: Any, tokens: torch.Tensor, prompt_length: int) -> None:
    """Prints the end of the prompt and the new text of the first rows of `tokens`, of shape `(rows,
    length)`, int64."""
    print(f"--- {title}")
    for row in tokens[:3]:
        parts = (
            tokenizer.decode(part, skip_special_tokens=True)
            for part in (row[:prompt_length], row[prompt_length:])
        )
        prompt, text = (" ".join(part.split()) for part in parts)
        print(f"  ...{prompt[-40:]} >>> {text[:160]}")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiny_model.add_arguments(parser, seconds=60)
    arguments = parser.parse_args()
    model, tokenizer = tiny_model.from_arguments(arguments)
    repeats, num_tokens = (1, 8) if arguments.quick else (REPEATS, 64)

    calls = [
        ("greedy, 4 ragged prompts", RAGGED_PROMPTS, tiny_model.GREEDY),
        ("8 samples of one prompt", [SAMPLE_PROMPT], {**SAMPLED, "num_return_sequences": 8}),
        ("6 beams of one prompt", [BEAM_PROMPT], {"do_sample": False, "num_beams": 6}),
    ]
    comparisons, texts = [], []
    total = len(calls) * 2 * (1 + repeats)
    with tqdm(
        total=total,
        desc="generating",
        bar_format="{desc}: {percentage:3.0f}%|{bar:30}| {n} of {total} calls",
    ) as bar:
        for name, prompts, options in calls:
            inputs = tokenizer(prompts, return_tensors="pt", padding=True)
            prompt_length = inputs["input_ids"].shape[1]
            limits = {"min_new_tokens": min(24, num_tokens), "max_new_tokens": num_tokens}
            comparison, tokens = compare(name, model, inputs, repeats, bar, **limits, **options)
            comparisons.append(comparison)
            texts.append((f"{name} ({prompt_length} tokens with padding)", tokens, prompt_length))
    print()
    for title, tokens, prompt_length in texts:
        print_text(title, tokenizer, tokens, prompt_length)
    print_comparisons(comparisons, repeats)
    print(f"\n{won(comparisons)}")
    return 0 if all(comparison.equal for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
