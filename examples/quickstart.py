"""Train a small Llama on Python's own manual, then generate with the plain and with the paged cache and compare.

Everything runs on the CPU and nothing is downloaded: the text is `pydoc_data.topics`, the reference manual that
`help()` prints. The script exits with status 1 if one token of the paged runs differs from plain `generate`.

    python examples/quickstart.py [--train-seconds 40]
"""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that spin while they wait make a step many times slower where other programs want the same cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import math
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils.logging import disable_progress_bar

import hf_paged

VOCAB_SIZE = 2048
TRAIN_LENGTH = 256  # tokens of one training row
TRAIN_BATCH = 2  # rows of one training step
REPEATS = 3  # timed runs of each call, plain and paged in turn

RAGGED_PROMPTS = [
    "The with statement",
    "An exception is raised at the point where the error is",
    "A class definition is an executable statement. The inheritance list usually gives",
    "When a name is used in a code block, it is resolved using the nearest enclosing scope. The set of all such scopes "
    "visible to a code block is called the",
]
SAMPLE_PROMPT = topics["exceptions"][:1000]
BEAM_PROMPT = topics["objects"][:1600]


@dataclass(frozen=True)
class Comparison:
    """One row of the table: the same call with the plain and with the paged cache."""

    name: str
    plain_seconds: float
    paged_seconds: float
    paged_bytes: int  # most bytes of K/V blocks in use at one time
    contiguous_bytes: int  # bytes of K/V in plain's own cache when the call ended
    equal: bool


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer, trained on the manual; it pads on the left, as generation needs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(topics.values(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> LlamaForCausalLM:
    """A Llama of 3.7 million parameters with grouped-query attention."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the embeddings, AdamW for the rest: faster than AdamW alone at so few steps."""
    matrices = [p for name, p in model.named_parameters() if p.ndim == 2 and "embed" not in name]
    others = [p for name, p in model.named_parameters() if p.ndim != 2 or "embed" in name]
    return [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95)),
    ]


def train(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, seconds: float) -> None:
    """Next-token training on random windows of the manual for `seconds`; the learning rate follows the clock."""
    tokens = torch.tensor(
        [token for topic in topics.values() for token in [*tokenizer(topic)["input_ids"], tokenizer.eos_token_id]]
    )  # [num_tokens]
    parameters = sum(parameter.numel() for parameter in model.parameters())
    print(f"Llama, {parameters / 1e6:.1f} million parameters; {len(tokens):,} tokens of the Python manual")

    optimizers = build_optimizers(model)
    peak_rates = [optimizer.defaults["lr"] for optimizer in optimizers]
    generator = torch.Generator().manual_seed(0)
    model.train()
    start = time.perf_counter()
    steps, elapsed = 0, 0.0
    with tqdm(
        total=round(seconds), desc="training", bar_format="{desc}: {percentage:3.0f}%|{bar:30}| {postfix}"
    ) as bar:
        while elapsed < seconds:
            steps += 1
            scale = min(1.0, steps / 20) * (0.525 + 0.475 * math.cos(math.pi * elapsed / seconds))
            for optimizer, rate in zip(optimizers, peak_rates):
                optimizer.param_groups[0]["lr"] = rate * scale
            offsets = torch.randint(len(tokens) - TRAIN_LENGTH, (TRAIN_BATCH, 1), generator=generator)
            batch = tokens[offsets + torch.arange(TRAIN_LENGTH)]  # [TRAIN_BATCH, TRAIN_LENGTH]
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            elapsed = time.perf_counter() - start
            bar.n = min(elapsed, bar.total)
            bar.set_postfix_str(f"{elapsed:.0f} s, step {steps}, loss {loss.item():.2f}", refresh=False)
            bar.update(0)
    model.eval()


def save_and_reload(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast) -> tuple[Any, Any]:
    """Through safetensors on disk and back, so that what generates below is a checkpoint like any other."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        size = (Path(folder) / "model.safetensors").stat().st_size
        print(f"saved and reloaded: model.safetensors, {size / 2**20:.1f} MiB\n")
        return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)


def cache_bytes(past_key_values: Any) -> int:
    """Bytes of the keys and values that a plain cache holds."""
    return sum(tensor.nbytes for layer in past_key_values.layers for tensor in (layer.keys, layer.values))


def compare(name: str, model: Any, inputs: Any, **options: Any) -> tuple[Comparison, torch.Tensor]:
    """
    Makes one `generate` call both ways: a warm-up of each, then `REPEATS` timed runs of each in turn.

    Returns:
        `tuple[Comparison, torch.Tensor]`: The figures, and the paged call's tokens of shape `(rows, length)`, int64.
    """

    def call(**extra: Any) -> tuple[Any, float]:
        torch.manual_seed(0)  # plain and paged draw the same samples
        start = time.perf_counter()
        output = model.generate(**inputs, **options, **extra)
        return output, time.perf_counter() - start

    plain, _ = call(return_dict_in_generate=True)
    contiguous_bytes = cache_bytes(plain.past_key_values)
    call(cache_implementation="paged")
    hf_paged.memory_stats(model, reset=True)

    plain_seconds, paged_seconds, equal = [], [], True
    for _ in range(REPEATS):
        plain_tokens, seconds = call()
        plain_seconds.append(seconds)
        paged_tokens, seconds = call(cache_implementation="paged")
        paged_seconds.append(seconds)
        equal = equal and torch.equal(plain_tokens, paged_tokens)
    paged_bytes = hf_paged.memory_stats(model).peak_bytes
    return (
        Comparison(name, median(plain_seconds), median(paged_seconds), paged_bytes, contiguous_bytes, equal),
        paged_tokens,
    )


def print_table(comparisons: list[Comparison]) -> None:
    header = ("call", "plain s", "paged s", "contiguous KiB", "paged KiB", "paged/contiguous", "tokens equal")
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
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    for row in [header, tuple("-" * width for width in widths), *rows]:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join([row[0].ljust(widths[0]), *numbers]))
    print(f"\nseconds: median of {REPEATS}, plain and paged in turn; KiB: keys and values only, paged at its peak")


def print_text(title: str, tokenizer: Any, tokens: torch.Tensor, prompt_length: int) -> None:
    """Prints the end of the prompt and the new text of the first rows of `tokens`, of shape `(rows, length)`, int64."""
    print(f"--- {title}")
    for row in tokens[:3]:
        parts = (
            tokenizer.decode(part, skip_special_tokens=True) for part in (row[:prompt_length], row[prompt_length:])
        )
        prompt, text = (" ".join(part.split()) for part in parts)
        print(f"  ...{prompt[-40:]} >>> {text[:160]}")
    print()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--train-seconds", type=float, default=40.0, help="wall time of the training (default 40)")
    arguments = parser.parse_args()
    disable_progress_bar()  # of saving and loading; the training has its own

    tokenizer = train_tokenizer()
    model = build_model(tokenizer)
    train(model, tokenizer, arguments.train_seconds)
    model, tokenizer = save_and_reload(model, tokenizer)

    calls = [
        ("greedy, 4 ragged prompts", RAGGED_PROMPTS, {"do_sample": False}),
        ("8 samples of one prompt", [SAMPLE_PROMPT], {"do_sample": True, "top_k": 50, "num_return_sequences": 8}),
        ("6 beams of one prompt", [BEAM_PROMPT], {"do_sample": False, "num_beams": 6}),
    ]
    comparisons = []
    for name, prompts, options in calls:
        inputs = tokenizer(prompts, return_tensors="pt", padding=True, return_token_type_ids=False)
        prompt_length = inputs["input_ids"].shape[1]
        comparison, tokens = compare(name, model, inputs, min_new_tokens=24, max_new_tokens=64, **options)
        comparisons.append(comparison)
        print_text(f"{name} ({prompt_length} tokens with padding)", tokenizer, tokens, prompt_length)
    print_table(comparisons)
    return 0 if all(comparison.equal for comparison in comparisons) else 1


if __name__ == "__main__":
    sys.exit(main())
