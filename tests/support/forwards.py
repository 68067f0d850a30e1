"""Tiny models of any class, prompts for them, and the shapes of their forwards."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from tests.support import models
from tests.support.architecture_configs import tiny_model


@functools.cache
def build(name: str) -> Any:
    """The session's model of this class, which a test must not change."""
    return models.shared(fresh(name))


def fresh(name: str) -> Any:
    model = tiny_model(getattr(transformers, name))
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.eos_token_id = None
    return model


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(3)
    return [torch.randint(20, 100, (length,), generator=generator).tolist() for length in lengths]


@contextmanager
def forwards(model: PreTrainedModel) -> Iterator[list[tuple[int, int]]]:
    """Records the shape of the token ids in each forward."""
    shapes: list[tuple[int, int]] = []
    cls, original = type(model), type(model).forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", args[0] if args else None)
        shapes.append(tuple(ids.shape))
        return original(self, *args, **kwargs)

    cls.forward = forward  # type: ignore[method-assign]
    try:
        yield shapes
    finally:
        cls.forward = original  # type: ignore[method-assign]


def shapes_of(model: Any, inputs: dict[str, Any], options: dict[str, Any]) -> tuple[Any, Any]:
    """The output of a paged call, and the shape of the token ids in each of its forwards."""
    options = {**options, **models.UNRECORDED}  # a replay calls no forward
    model.generate(**inputs, **options)
    with forwards(model) as shapes:
        model.generate(**inputs, **options)  # the replaced forward is checked
        shapes.clear()
        return model.generate(**inputs, **options), shapes
