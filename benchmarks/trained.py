"""A model that a benchmark trains within a few minutes, on synthetic texts: an editor, which copies
the text of its prompt and replaces some words."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.models import FIRST_WORD, PAD, Shape

BEGIN, EDIT = 1, 2  # first token of a prompt, and last token of an editor's prompt
TEXT_LENGTH = 96  # words in a text to edit
OLD_WORDS = 32  # one word in 32 is replaced
STEPS, ROWS, RATE = 250, 16, 4e-3
"""Of the training: steps, texts per step, peak learning rate."""

EDITOR = Shape("editor-tiny", "qwen2", 128, 2, 4, 4, 32, 256, 256)


def edit(draw: random.Random, vocab: int, length: int = TEXT_LENGTH) -> tuple[list[int], list[int]]:
    """A prompt with a text of random words, and its answer: the text with each old word replaced by
    the new one."""
    text = [draw.randrange(FIRST_WORD, vocab - 1) for _ in range(length)]
    answer = [word + 1 if word % OLD_WORDS == FIRST_WORD else word for word in text]
    return [BEGIN, *text, EDIT], answer


def train(steps: int) -> Any:
    """An editor in float32, trained from random weights with AdamW on answers alone."""
    torch.manual_seed(0)
    draw = random.Random(f"{EDITOR.name} learns")
    config = EDITOR.config()
    config.initializer_range = EDITOR.hidden**-0.5
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).train()
    optimizer = torch.optim.AdamW(model.parameters(), RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, RATE, total_steps=steps, pct_start=0.1
    )
    for _ in tqdm(range(steps), desc=f"{EDITOR.name} learns", disable=None):
        texts = [edit(draw, EDITOR.vocab) for _ in range(ROWS)]
        ids = torch.tensor([prompt + answer for prompt, answer in texts])
        labels = ids.clone()
        labels[:, : TEXT_LENGTH + 2] = -100
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


def editor(folder: Path, steps: int = STEPS) -> Any:
    """Trains a model to edit texts of random words, saves it, and returns it as loaded from its
    files."""
    train(steps).save_pretrained(folder)
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
