"""What callers hand to an engine, in the forms that it may have: prompts, generation configs, other options."""

from __future__ import annotations

import contextlib
import operator
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral
from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig

Prompt = Any  # list[int], 1-D or (1, length) tensor, or str where the engine has a tokenizer


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The token ids of one prompt. Raises `ValueError` for what is none, and for text without a tokenizer."""
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is text: make the engine with `tokenizer=`, or pass token ids")
        prompt = tokenizer(prompt)["input_ids"]
    if isinstance(prompt, Tensor):
        if prompt.dim() == 2 and len(prompt) == 1:
            prompt = prompt[0]
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(
                f"the prompt is a {prompt.dtype} tensor of shape {tuple(prompt.shape)}: pass whole numbers of "
                "shape (length,) or (1, length), one request for each prompt"
            )
        prompt = prompt.tolist()
    try:
        token_ids = [None if isinstance(token, bool) else operator.index(token) for token in prompt]
    except TypeError:  # not a sequence, or not of whole numbers
        token_ids = [None]
    if None in token_ids:
        shown = reprlib.repr(prompt)
        raise ValueError(f"the prompt is {shown}: pass token ids, one list of whole numbers for each request")
    return cast(list[int], token_ids)


def plain_ids(prompt: Prompt) -> list[int]:
    """The token ids of a prompt that was refused, none if they are not plain to see."""
    with contextlib.suppress(Exception):  # whatever a prompt that is none may raise
        return prompt_ids(prompt, None)
    return []


def as_config(value: GenerationConfig | Mapping[str, Any] | None) -> GenerationConfig | None:
    """A request's generation config from what a caller passed; `ValueError` on options that do not exist."""
    if value is None or isinstance(value, GenerationConfig):
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"the generation config is {value!r}: pass a `GenerationConfig` or a dict of its options")
    known = vars(GenerationConfig())
    unknown = sorted(str(name) for name in value if name not in known)
    if unknown:  # transformers would keep them as attributes that nobody reads
        raise ValueError(f"`GenerationConfig` has no options {', '.join(unknown)}")
    return GenerationConfig(**value)


def as_priority(value: Any) -> int:
    """A whole number. Raises `ValueError` for what is none."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ValueError(f"`priority` is {value!r}: it must be a whole number, lower runs earlier")
    return int(value)


def as_list(name: str, value: Any) -> list[Any]:
    """Processors or criteria. Raises `ValueError` for one that is in no list."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{name}` is {reprlib.repr(value)}: pass a list of them")
    return list(value)


def split_prompts(
    prompts: Iterable[Prompt], generation_config: Any, attention_mask: Any
) -> tuple[list[Prompt], list[Any]]:
    """
    The prompts of a call and their generation configs, one each.

    Raises:
        ValueError: for a single prompt, another number of configs, or a mask that does not fit the prompts.
    """
    if isinstance(prompts, str) or (isinstance(prompts, Tensor) and prompts.dim() < 2):
        raise ValueError("pass a list of prompts, or one prompt to `add_request`")
    prompts = list(prompts) if attention_mask is None else _unpadded(prompts, attention_mask)
    configs = generation_config if isinstance(generation_config, (list, tuple)) else [generation_config]
    if len(configs) == 1:
        configs = list(configs) * len(prompts)
    if len(configs) != len(prompts):
        raise ValueError(f"{len(configs)} generation configs were passed for {len(prompts)} prompts")
    return prompts, list(configs)


def _unpadded(prompts: Any, attention_mask: Any) -> list[Prompt]:
    """Rows of a `(rows, length)` tensor without what the mask, of the same shape, hides at their left and right."""
    if not isinstance(prompts, Tensor) or prompts.dim() != 2:
        raise ValueError("`attention_mask` goes with prompts that are one tensor of shape (rows, length): leave it out")
    shown = torch.as_tensor(attention_mask, device=prompts.device) != 0
    if shown.shape != prompts.shape:
        raise ValueError(
            f"the attention mask has the shape {tuple(shown.shape)}, the prompts have {tuple(prompts.shape)}"
        )
    rows = []
    for row, (ids, mask) in enumerate(zip(prompts, shown)):
        places = mask.nonzero().flatten().tolist()
        if places and places[-1] - places[0] >= len(places):
            raise ValueError(f"the attention mask hides tokens inside of row {row}: it may hide padding at its ends")
        rows.append(ids[mask])
    return rows
