"""Beam search on shared blocks: 8 beams with `generate` and in the engine, beside other requests.

Beams of a prompt share blocks as far as their tokens agree; where two beams part, the block in
which they differ is copied. The script prints the block map in the middle of a run, and exits with
status 1 if a token differs from plain `generate`.

    python examples/beam_search.py [--train-seconds 15] [--quick]
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from typing import Any

import tiny_model  # before transformers: it sets the environment
import torch

import hf_paged

NUM_BEAMS = 8
NUM_RETURNED = 4
MAP_WIDTH = 64  # blocks per line of the map


def compare_generate(model: Any, inputs: Any, options: dict[str, Any]) -> tuple[bool, Any]:
    """Calls `model.generate` with the plain and the paged cache; returns whether they agree, and
    plain's output."""
    plain = model.generate(**inputs, **options, output_scores=True, return_dict_in_generate=True)
    hf_paged.memory_stats(model, reset=True)
    paged = model.generate(**inputs, **options, cache_implementation="paged")
    stats = hf_paged.memory_stats(model)

    contiguous = tiny_model.cache_bytes(plain)
    print(
        f"plain: {contiguous / 1024:,.0f} KiB of keys and values, each beam with its own copy of"
        " the prompt"
    )
    print(
        f"paged: {stats.peak_bytes / 1024:,.0f} KiB at most"
        f" ({stats.peak_bytes / contiguous:.0%}), ",
        end="",
    )
    print(
        f"{stats.peak_blocks} blocks of {stats.block_size} tokens, {stats.copied_blocks} copied on"
        " write"
    )
    return torch.equal(plain.sequences, paged), plain


def print_block_map(engine: hf_paged.PagedEngine) -> None:
    """Prints one character per block: `.` free, `c` cached, else the number of sequences that hold
    it, `+` for 10 or more."""
    states = engine.block_map()[None]  # all layers have full attention
    marks = ["c" if state < 0 else ".123456789+"[min(state, 10)] for state in states]
    for start in range(0, len(marks), MAP_WIDTH):
        print("  " + "".join(marks[start : start + MAP_WIDTH]))
    used = Counter(state for state in states if state > 0)
    held = sum(count * state for state, count in used.items())
    print(f"  {sum(used.values())} blocks in use; without sharing they would be {held}")


def run_engine(
    model: Any, tokenizer: Any, prompts: list[list[int]], options: list[dict[str, Any]]
) -> list[hf_paged.RequestResult]:
    """Runs all requests in one engine; prints its block map in the middle of the run."""
    with hf_paged.PagedEngine(model, tokenizer=tokenizer) as engine:
        ids = [engine.add_request(prompt, kind, seed=0) for prompt, kind in zip(prompts, options)]
        results, num_steps = {}, 0
        while engine.has_unfinished:
            for output in engine.step():
                if output.result is not None:
                    results[output.request_id] = output.result
            num_steps += 1
            if num_steps == options[0]["max_new_tokens"] // 2:
                print_block_map(engine)
        engine.check_integrity()
        stats = engine.stats()
    print(f"  {stats.num_generated_tokens} tokens in {stats.num_steps} steps")
    return [results[request_id] for request_id in ids]


def equals_plain(model: Any, result: hf_paged.RequestResult, options: dict[str, Any]) -> bool:
    """Whether every sequence of the result equals plain `generate`'s on the prompt alone."""
    torch.manual_seed(0)
    prompt = torch.tensor([result.prompt_ids])
    plain = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[
        :, prompt.shape[1] :
    ].tolist()
    # plain pads rows that ended early
    return len(plain) == len(result.sequences) and all(
        row[: len(sequence.token_ids)] == sequence.token_ids
        and set(row[len(sequence.token_ids) :]) <= {model.config.pad_token_id}
        for row, sequence in zip(plain, result.sequences)
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiny_model.add_arguments(parser, seconds=15)
    arguments = parser.parse_args()
    model, tokenizer = tiny_model.from_arguments(arguments)
    length, num_tokens = (100, 12) if arguments.quick else (300, 48)
    prompt = tokenizer(tiny_model.MANUAL["objects"])["input_ids"][:length]
    inputs = {
        "input_ids": torch.tensor([prompt]),
        "attention_mask": torch.ones(1, length, dtype=torch.int64),
    }
    beams = {"num_beams": NUM_BEAMS, "num_return_sequences": NUM_RETURNED, "do_sample": False}
    beams["max_new_tokens"] = num_tokens

    print(
        f"generate: {NUM_BEAMS} beams of a prompt of {length} tokens, {num_tokens} new, the best"
        f" {NUM_RETURNED}\n"
    )
    generate_equal, plain = compare_generate(model, inputs, beams)

    kinds = {
        f"{NUM_BEAMS} beams": beams,
        "4 samples": {
            "do_sample": True,
            "top_k": 50,
            "num_return_sequences": 4,
            "max_new_tokens": num_tokens,
        },
        "greedy": {"max_new_tokens": num_tokens, **tiny_model.GREEDY},
        "3 beams": {
            "num_beams": 3,
            "length_penalty": 2.0,
            "do_sample": False,
            "max_new_tokens": num_tokens,
        },
    }
    prompts = [
        prompt,
        tokenizer(tiny_model.MANUAL["exceptions"])["input_ids"][: length // 2],
        prompt,
        prompt[: length // 3],
    ]
    print(f"\nengine: {', '.join(kinds)} in one batch; its blocks after half of the tokens")
    print("(. free, c cached, else how many sequences hold it, + ten or more)\n")
    results = run_engine(model, tokenizer, prompts, list(kinds.values()))
    engine_equal = [
        equals_plain(model, result, kind) for result, kind in zip(results, kinds.values())
    ]

    print(f"\nthe best {NUM_RETURNED} of {NUM_BEAMS} beams, with their scores")
    scores = plain.sequences_scores.tolist()
    for sequence, score in zip(results[0].sequences, scores):
        print(f"  {sequence.score:.4f} (plain {score:.4f}): {tiny_model.shown(sequence.text, 90)}")
    scores_equal = all(
        abs(one.score - other) < 1e-4 for one, other in zip(results[0].sequences, scores)
    )

    equal = {"generate": generate_equal, **dict(zip(kinds, engine_equal)), "scores": scores_equal}
    print(
        "\nequal to plain generate: "
        + ", ".join(f"{name} {'yes' if same else 'NO'}" for name, same in equal.items())
    )
    return 0 if all(equal.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
