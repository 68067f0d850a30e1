"""A small Llama, trained on Python's own manual in seconds: the model of every example. Nothing is
downloaded."""

from __future__ import annotations

import os

os.environ["HF_HUB_OFFLINE"] = "1"
# Threads that spin while waiting slow a step down many times when other programs need the same
# cores.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import argparse
import math
import tempfile
import time
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tqdm import tqdm
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

MANUAL = {  # by topic: its text on one line, without tables and the lines below titles
    name: " ".join(
        word
        for line in text.splitlines()
        if line.lstrip()[:1] not in "+|" and line.strip("*=-")
        for word in line.split()
    )
    for name, text in topics.items()
}
# The topics that the model learns: few, so that within a minute it reads each a dozen times. The
# tokenizer learns them, too, until each of their words is a token: so the model spells its words
# right.
LEARNED = (
    "exceptions",
    "objects",
    "class",
    "with",
    "naming",
    "raise",
    "try",
    "function",
    "execmodel",
)
VOCAB_SIZE = 4096  # at most: these topics have fewer tokens
TRAIN_LENGTH = 256  # tokens of one training row
TRAIN_BATCH = 2  # rows of one training step

LLAMA = dict(
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=4,
    num_attention_heads=8,
    num_key_value_heads=4,
)  # 3.7 million parameters with grouped-query attention
# A barely trained small model would repeat one token whatever its K/V are. With wide random weights
# and untied output embeddings, each token depends on all earlier ones.
QUICK_LLAMA = dict(
    hidden_size=128,
    intermediate_size=256,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    initializer_range=0.3,
    tie_word_embeddings=False,
)
QUICK_STEPS = 2
GREEDY = dict(do_sample=False, no_repeat_ngram_size=2)  # otherwise so small a model repeats itself


def add_arguments(parser: argparse.ArgumentParser, seconds: float) -> None:
    """Adds `--train-seconds`, with its default, and `--quick`."""
    parser.add_argument(
        "--train-seconds",
        type=float,
        default=seconds,
        help=f"wall time of the training (default {seconds:g})",
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a smaller model, not trained, and little work: to see that all runs",
    )


def from_arguments(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """The model and the tokenizer that the command line asks for; prints a description."""
    return trained_model(arguments.train_seconds, quick=arguments.quick, verbose=True)


def trained_model(
    seconds: float = 15.0, steps: int | None = None, *, quick: bool = False, verbose: bool = False
) -> tuple[Any, Any]:
    """
    Trains a model and its tokenizer, then loads them from disk like any other checkpoint.

    Args:
        seconds (`float`): Wall time of the training.
        steps (`int`, *optional*): Train for this many steps instead.
        quick (`bool`): Train a smaller model for `QUICK_STEPS` steps.
        verbose (`bool`): Print progress and show a progress bar.
    """
    disable_progress_bar()  # of saving and loading
    tokenizer = train_tokenizer()
    model = build_model(tokenizer, **(QUICK_LLAMA if quick else LLAMA))
    train(model, tokenizer, seconds, QUICK_STEPS if quick else steps, verbose)
    return save_and_reload(model, tokenizer, verbose)


def train_tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer of the words in the learned topics; pads on the left, as
    generation needs."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([MANUAL[name] for name in LEARNED], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        eos_token="<eos>",
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
    )


def build_model(tokenizer: PreTrainedTokenizerFast, **options: Any) -> LlamaForCausalLM:
    """A Llama with random weights; `options` are those of `LlamaConfig`."""
    torch.manual_seed(0)
    config = dict(
        vocab_size=len(tokenizer),
        max_position_embeddings=1024,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(LlamaConfig(**{**config, **options}))


def build_optimizers(model: LlamaForCausalLM) -> list[torch.optim.Optimizer]:
    """Muon for the matrices between the embeddings, AdamW for the rest: better than AdamW alone
    after few steps. Muon computes in bfloat16, in which processors without AVX-512 take seconds a
    step: there, AdamW alone."""
    if "AVX512" not in torch.backends.cpu.get_cpu_capability():
        return [torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))]
    matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
    known = {id(p) for p in matrices}
    others = [p for p in model.parameters() if id(p) not in known]
    return [
        torch.optim.Muon(matrices, lr=1e-2, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, lr=5e-3, betas=(0.9, 0.95)),
    ]


def train(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    seconds: float,
    max_steps: int | None = None,
    verbose: bool = True,
) -> None:
    """Next-token training on random windows of the manual for `seconds`, or for `max_steps` steps;
    the learning rate follows the completed share.
    """
    tokens = torch.tensor(
        [
            token
            for name in LEARNED
            for token in [*tokenizer(MANUAL[name])["input_ids"], tokenizer.eos_token_id]
        ]
    )  # [num_tokens]
    if verbose:
        parameters = sum(parameter.numel() for parameter in model.parameters())
        print(
            f"Llama, {parameters / 1e6:.1f} million parameters; {len(tokens):,} tokens of the"
            " Python manual"
        )

    optimizers = build_optimizers(model)
    peak_rates = [optimizer.defaults["lr"] for optimizer in optimizers]
    generator = torch.Generator().manual_seed(0)
    model.train()
    start = time.perf_counter()
    steps, done = 0, 0.0
    bar_format = "{desc}: {percentage:3.0f}%|{bar:30}| {postfix}"
    with tqdm(total=100, desc="training", bar_format=bar_format, disable=not verbose) as bar:
        while done < 1:
            steps += 1
            scale = min(1.0, steps / 20) * (0.525 + 0.475 * math.cos(math.pi * done))
            for optimizer, rate in zip(optimizers, peak_rates):
                optimizer.param_groups[0]["lr"] = rate * scale
            offsets = torch.randint(
                len(tokens) - TRAIN_LENGTH, (TRAIN_BATCH, 1), generator=generator
            )
            batch = tokens[offsets + torch.arange(TRAIN_LENGTH)]  # [TRAIN_BATCH, TRAIN_LENGTH]
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            elapsed = time.perf_counter() - start
            done = elapsed / seconds if max_steps is None else steps / max_steps
            bar.n = round(min(done, 1) * 100)
            bar.set_postfix_str(
                f"{elapsed:.0f} s, step {steps}, loss {loss.item():.2f}", refresh=False
            )
            bar.update(0)
    model.eval()


def save_and_reload(
    model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, verbose: bool = True
) -> tuple[Any, Any]:
    """Saves with safetensors and loads again, so that the model is a checkpoint like any other."""
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        size = (Path(folder) / "model.safetensors").stat().st_size
        if verbose:
            print(f"saved and reloaded: model.safetensors, {size / 2**20:.1f} MiB\n")
        return AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(
            folder
        )


def cache_bytes(output: Any) -> int:
    """Bytes of K/V in the plain cache that `generate` returned with its output."""
    # the name up to transformers 5.23
    cache = output.cache if "cache" in output else output.past_key_values
    return sum(tensor.nbytes for layer in cache.layers for tensor in (layer.keys, layer.values))


def print_table(rows: list[tuple[str, ...]]) -> None:
    """Prints rows of cells below the first row, the header; all columns but the first are
    right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in [rows[0], tuple("-" * width for width in widths), *rows[1:]]:
        numbers = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:])]
        print("  ".join([row[0].ljust(widths[0]), *numbers]).rstrip())


def shown(text: str, width: int) -> str:
    """The text on one line of at most `width` characters."""
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 3] + "..."
