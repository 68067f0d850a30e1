"""Chats on a loaded engine: messages in, several sampled answers out, with the log-probability of
each token.

The model and its tokenizer, with a chat template, are saved to a folder;
`PagedEngine.from_pretrained` loads both. The script exits with status 1 if a token differs from
plain `generate` on the template's text.

    python examples/chats.py [--train-seconds 15] [--quick]
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
from typing import Any

import tiny_model  # before transformers: it sets the environment
import torch

import hf_paged

TEMPLATE = (
    "{% for message in messages %}{{ message['role'] + ': ' + message['content'] + '\n' }}{% endfor"
    " %}{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
)
SYSTEM = {
    "role": "system",
    "content": "You are Python's manual. Say what is asked, in one sentence.",
}
QUESTIONS = ("What does the with statement do?", "When is an exception raised?", "What is a class?")
TOP = 3  # alternatives shown per token


def is_plain(
    engine: hf_paged.PagedEngine,
    chat: list[dict[str, str]],
    result: Any,
    options: dict[str, Any],
    seed: int,
) -> bool:
    """Whether the answers equal plain `generate`'s on the template's text."""
    ids = engine.tokenizer.apply_chat_template(
        chat, add_generation_prompt=True, return_tensors="pt", return_dict=False
    )
    torch.manual_seed(seed)
    plain = engine.model.generate(ids, attention_mask=torch.ones_like(ids), **options)[
        :, ids.shape[1] :
    ]
    found = [sequence.token_ids for sequence in result.sequences]
    return all(row[: len(tokens)].tolist() == tokens for row, tokens in zip(plain, found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    tiny_model.add_arguments(parser, seconds=15)
    model, tokenizer = tiny_model.from_arguments(arguments := parser.parse_args())
    options = {
        "max_new_tokens": 12 if arguments.quick else 32,
        "do_sample": True,
        "top_k": 20,
        "num_return_sequences": 2,
    }
    chats = [[SYSTEM, {"role": "user", "content": question}] for question in QUESTIONS]
    with tempfile.TemporaryDirectory() as folder:
        tokenizer.chat_template = TEMPLATE
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        engine = hf_paged.PagedEngine.from_pretrained(
            folder, config={"block_size": 8}, dtype="float32"
        )
    with engine:
        results = engine.generate(chats, options, seed=0, return_logprobs=True, top_logprobs=TOP)
        later = engine.generate(chats, options, seed=0)
        equal = [
            is_plain(engine, chat, result, options, seed)
            for seed, (chat, result) in enumerate(zip(chats, results))
        ]

    for question, result in zip(QUESTIONS, results):
        print(f"\n{question}")
        for sequence in result.sequences:
            print(f"  {tiny_model.shown(sequence.text, 90)}")
        (raw, _), top = result.logprobs[0], result.sequences[0].top_logprobs[0]
        others = ", ".join(
            f"{engine.tokenizer.decode([token])!r} {math.exp(own):.0%}" for token, own, _ in top
        )
        print(f"  its first token had {math.exp(raw):.1%}; the best were {others}")
    hits = sum(result.num_prefix_hit_tokens for result in later)
    print(f"\nasked again, {hits} tokens of the chats were found in the prefix cache")
    print(f"equal to plain generate: {', '.join('yes' if each else 'NO' for each in equal)}")
    return 0 if all(equal) and hits else 1


if __name__ == "__main__":
    sys.exit(main())
