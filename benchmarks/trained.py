"""Models that a benchmark trains within a few minutes, on synthetic texts: an editor, which copies
the text of its prompt and replaces some words, and language models of several sizes for one
language.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.models import FIRST_WORD, PAD, Shape

BEGIN, EDIT = 1, 2  # first token of a prompt, and last token of an editor's prompt
TEXT_LENGTH = 96  # words in a text to edit
OLD_WORDS = 32  # one word in 32 is replaced
EDITOR_STEPS, SPEAKER_STEPS = 250, 120
NUM_SENTENCES, SENTENCE_LENGTH, LANGUAGE_LENGTH = 64, (6, 14), 64

EDITOR = Shape("editor-tiny", "qwen2", 128, 2, 4, 4, 32, 256, 256)
TARGET = Shape("language-25m", "llama", 512, 8, 8, 4, 64, 1536, 512)
ASSISTANTS = (
    Shape("language-1m", "llama", 256, 1, 4, 2, 64, 1024, 512),
    Shape("language-2.5m", "llama", 256, 3, 4, 2, 64, 768, 512),
    Shape("language-6m", "llama", 384, 4, 6, 2, 64, 1024, 512),
    Shape("language-13m", "llama", 512, 4, 8, 4, 64, 1536, 512),
)


def edit(draw: random.Random, vocab: int, length: int = TEXT_LENGTH) -> tuple[list[int], list[int]]:
    """A prompt with a text of random words, and its answer: the text with each old word replaced by
    the new one."""
    text = [draw.randrange(FIRST_WORD, vocab - 1) for _ in range(length)]
    answer = [word + 1 if word % OLD_WORDS == FIRST_WORD else word for word in text]
    return [BEGIN, *text, EDIT], answer


def sentences(vocab: int) -> list[list[int]]:
    """All sentences of a language; several share words."""
    draw = random.Random("sentences")
    return [
        [draw.randrange(FIRST_WORD, vocab - 1) for _ in range(draw.randint(*SENTENCE_LENGTH))]
        for _ in range(NUM_SENTENCES)
    ]


def language(draw: random.Random, vocab: int, length: int = LANGUAGE_LENGTH) -> list[int]:
    """A text of the language: its sentences in random order."""
    known, text = sentences(vocab), [BEGIN]
    while len(text) < length:
        text += draw.choice(known)
    return text[:length]


def train(
    shape: Shape,
    text: Callable[[random.Random], list[int]],
    *,
    first: int,
    rows: int,
    steps: int,
    rate: float,
) -> Any:
    """
    Trains a float32 model from random weights with AdamW.

    Args:
        text: Draws a text; all texts have one length.
        first (`int`): Tokens before this one are excluded from the loss.
        rows, steps (`int`): Texts per step, and steps.
        rate (`float`): Peak learning rate.
    """
    torch.manual_seed(0)
    draw = random.Random(f"{shape.name} learns")
    config = shape.config()
    config.initializer_range = shape.hidden**-0.5
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), rate, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, rate, total_steps=steps, pct_start=0.1
    )
    for _ in tqdm(range(steps), desc=f"{shape.name} learns", disable=None):
        ids = torch.tensor([text(draw) for _ in range(rows)])
        labels = ids.clone()
        labels[:, :first] = -100
        loss = model(input_ids=ids, labels=labels, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.generation_config = GenerationConfig(
        pad_token_id=PAD, bos_token_id=BEGIN, eos_token_id=None
    )
    return model


def load(folder: Path) -> Any:
    """Loads the trained model, in float32 and eval mode."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def saved(model: Any, path: Path) -> Any:
    """The model as loaded from its files."""
    model.save_pretrained(path)
    return load(path)


def editor(shape: Shape, folder: Path, steps: int) -> Any:
    """Trains a model to edit texts of random words."""
    sizes = dict(first=TEXT_LENGTH + 2, rows=16, steps=steps, rate=4e-3)
    model = train(shape, lambda draw: [*chain(*edit(draw, shape.vocab))], **sizes)  # type: ignore[arg-type]
    return saved(model, folder / shape.name)


def speaker(shape: Shape, folder: Path, steps: int) -> Any:
    """Trains a model on the language of its vocabulary; all sizes see the same number of texts."""
    sizes = dict(first=1, rows=8, steps=steps, rate=0.5 / shape.hidden)
    model = train(shape, lambda draw: language(draw, shape.vocab), **sizes)  # type: ignore[arg-type]
    return saved(model, folder / shape.name)
