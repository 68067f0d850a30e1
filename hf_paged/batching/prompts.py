"""The prompts that callers hand to an engine, in the forms that these may have."""

from __future__ import annotations

import contextlib
import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor

# list[int], 1-D or (1, length) tensor, str where the engine has a tokenizer, or what a tokenizer makes of one text
Prompt = Any


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """The token ids of one prompt. Raises `ValueError` for what is none, and for text without a tokenizer."""
    if isinstance(prompt, Mapping):
        rows = _mapped(prompt)[0]
        if len(rows) != 1:
            raise ValueError(f"the prompt is a mapping with {len(rows)} rows of `input_ids`: pass one for each request")
        prompt = rows[0]
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


def split_prompts(
    prompts: Iterable[Prompt] | Mapping[str, Any], generation_config: Any, attention_mask: Any
) -> tuple[list[Prompt], list[Any]]:
    """
    The prompts of a call and their generation configs, one each.

    Raises:
        ValueError: for a single prompt, another number of configs, a mask that does not fit the prompts, or a mapping
            with other keys than `input_ids` and `attention_mask`.
    """
    is_one = isinstance(prompts, str) or (isinstance(prompts, Tensor) and prompts.dim() < 2)
    if isinstance(prompts, Mapping):
        if attention_mask is not None:
            raise ValueError("`attention_mask` goes with prompts that are a tensor: put it into the mapping")
        prompts, is_one = _mapped(prompts)
    if is_one:
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
    return [ids[_shown_of(row, mask)] for row, (ids, mask) in enumerate(zip(prompts, shown))]


def _shown_of(row: int, mask: Tensor) -> Tensor:
    """`(length,)` bool, checked: it may hide tokens at its ends."""
    places = mask.nonzero().flatten().tolist()
    if places and places[-1] - places[0] >= len(places):
        raise ValueError(f"the attention mask hides tokens inside of row {row}: it may hide padding at its ends")
    return mask


def _mapped(inputs: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """What a tokenizer returns: the ids of every text without padding, and whether it was a single text."""
    unknown = sorted(str(name) for name in inputs if name not in ("input_ids", "attention_mask"))
    if unknown or "input_ids" not in inputs:
        found = f"has {', '.join(f'`{name}`' for name in unknown)}" if unknown else "has no `input_ids`"
        raise ValueError(
            f"the mapping of prompts {found}: an engine takes `input_ids` and `attention_mask`; other inputs of a "
            "model are served by `generate`"
        )
    ids, masks = (_listed(name, inputs.get(name)) for name in ("input_ids", "attention_mask"))
    if ids is None:
        raise ValueError("`input_ids` of the mapping of prompts is None: pass token ids")
    is_one = bool(ids) and not isinstance(ids[0], (list, tuple))
    if is_one:
        ids, masks = [ids], None if masks is None else [masks]
    if masks is None:
        return ids, is_one
    if [len(mask) for mask in masks] != [len(tokens) for tokens in ids]:
        raise ValueError("the attention mask has other lengths than `input_ids`: pass both as the tokenizer made them")
    shown = [_shown_of(row, torch.tensor(mask, dtype=torch.long) != 0) for row, mask in enumerate(masks)]
    return [[token for token, seen in zip(*pair) if seen] for pair in zip(ids, shown)], is_one


def _listed(name: str, value: Any) -> list[Any] | None:
    """Lists in place of tensors and arrays."""
    if value is None:
        return None
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{name}` of the mapping of prompts is {reprlib.repr(value)}: pass lists or a tensor")
    return [each.tolist() if hasattr(each, "tolist") else each for each in value]
