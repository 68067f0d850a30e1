"""Two tiny trained models, whose text does not repeat like that of random weights."""

from __future__ import annotations

import functools
import itertools
import random
from pathlib import Path

import torch
import transformers
from filelock import FileLock
from transformers import GenerationConfig, PreTrainedModel

from tests.support import models

NAMES = ("llama", "qwen3_next")
NUM_STEPS = 150
BATCH_SIZE, LENGTH = 16, 48  # rows; tokens, fewer than in three sentences
LEARNING_RATE = 6e-3


def train(name: str) -> PreTrainedModel:
    """Trains on shuffled sentences of `models.corpus`, `[BATCH_SIZE, LENGTH]` tokens per step; eval
    mode at the end."""
    torch.manual_seed(0)
    draw = random.Random(0)
    sentences = [models.tokenizer()(sentence).input_ids for sentence in models.corpus()]
    model = transformers.AutoModelForCausalLM.from_config(
        models.config(name), dtype=torch.float32
    ).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=NUM_STEPS)
    for _ in range(NUM_STEPS):
        rows = [itertools.chain(*draw.sample(sentences, 3)) for _ in range(BATCH_SIZE)]
        ids = torch.tensor([list(itertools.islice(row, LENGTH)) for row in rows])
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
    model.generation_config = GenerationConfig(pad_token_id=models.PAD, bos_token_id=models.BOS)
    return model.eval()


@functools.cache
def load(name: str, folder: Path) -> PreTrainedModel:
    """The session's shared model from `folder`; the first of several processes trains and saves
    it."""
    with FileLock(folder / f"{name}.lock"):
        if not (folder / name / "model.safetensors").exists():
            train(name).save_pretrained(folder / name)
    return transformers.AutoModelForCausalLM.from_pretrained(folder / name).eval()
