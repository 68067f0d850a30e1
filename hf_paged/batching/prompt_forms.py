"""Converts prompts, which callers pass in several forms, to token ids and other model inputs.
Checks the form of prompts, but not their length or vocabulary."""

from __future__ import annotations

import itertools
import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig

from .. import compat
from ..config import is_whole, shown
from ..interrupts import is_interrupt
from ..model.own_loop import map_tensors, mismatched_rows
from .arguments import quoted

# a list[int], a tensor of shape (length,) or (1, length), or the output of a tokenizer or processor
# for one text; with a tokenizer, also a str or chat messages
Prompt = Any


def split_inputs(
    prompt: Prompt, inputs: Any, has_encoder: bool = False
) -> tuple[Prompt, dict[str, Any] | None]:
    """Separates a prompt from its model inputs besides token ids: `inputs` and, if `prompt` is the
    output of a processor, those entries of `prompt` that `inputs` lacks. Returns prompt and inputs,
    either of which may be `None`. `has_encoder`: whether the ids are an encoder's, whose mask may
    hide tokens. Raises `ValueError` for names that are not model inputs, for a mask that hides
    tokens although it must not, and for inputs of several prompts."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ValueError(
            f"`inputs` is {shown(inputs)}: pass a dict of the model's inputs besides token ids"
        )
    model_inputs = dict(inputs or {})
    if isinstance(prompt, Mapping) and has_inputs(prompt):
        prompt_inputs = {name: value for name, value in prompt.items() if name != "input_ids"}
        model_inputs = {**prompt_inputs, **model_inputs}
        prompt = prompt.get("input_ids")
        mask = model_inputs.get("attention_mask")
        if prompt is not None and mask is not None:
            model_inputs["attention_mask"] = _row_mask(mask, prompt, has_encoder)
    elif isinstance(prompt, Mapping) and (has_encoder or model_inputs):
        has_mask = prompt.get("attention_mask") is not None
        prompt = prompt_ids(prompt, None)  # without padding
        if has_mask and prompt:
            model_inputs.setdefault("attention_mask", torch.ones(1, len(prompt), dtype=torch.long))
    disallowed_names = {"input_ids", *compat.CACHE_NAMES, *vars(GenerationConfig())}
    disallowed_inputs = sorted(map(str, disallowed_names & model_inputs.keys()))
    if disallowed_inputs:
        raise ValueError(
            f"the prompt's inputs have {', '.join(disallowed_inputs)}: pass only model inputs"
            " besides token ids there, and options in `generation_config`"
        )
    mismatch = mismatched_rows(model_inputs, 1)
    if mismatch is not None:
        raise ValueError(f"a request takes one prompt, but {mismatch}")
    # copied, since the caller may write to the tensors before the request runs
    return prompt, map_tensors(Tensor.clone, model_inputs) or None


def _row_mask(mask: Any, ids: Any, has_encoder: bool) -> Tensor:
    """Returns the attention mask, `(1, length)`, of a prompt with inputs besides token ids. Keeps
    even a mask of ones: without a mask, a model may make its own, which may hide pad tokens inside
    the prompt, or cover only the tokens and not the patches of an image. Raises `ValueError` for a
    mask that is not a tensor, has another shape than the ids or, unless `has_encoder`, hides
    tokens."""
    are_tensors = isinstance(mask, Tensor) and isinstance(ids, Tensor)
    if are_tensors and mask.shape != ids.shape:
        raise ValueError(
            f"`attention_mask` has the shape {tuple(mask.shape)} and `input_ids`"
            f" {tuple(ids.shape)}: pass both as the processor returned them"
        )
    if not isinstance(mask, Tensor) or not (has_encoder or bool(mask.all())):
        raise ValueError(
            "the attention mask is not a tensor of ones: pass a prompt with images or audio as"
            " tensors, without padding"
        )
    return mask[None] if mask.dim() == 1 else mask


def has_inputs(prompt: Mapping[str, Any]) -> bool:
    """Whether a processor's output holds model inputs besides token ids and their mask."""
    return any(
        name not in ("input_ids", "attention_mask") and value is not None
        for name, value in prompt.items()
    )


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a list of chat messages. Raises `ValueError` if only some of its items
    are messages with a role."""
    if not isinstance(prompt, (list, tuple)) or (prompt and isinstance(prompt[0], int)):
        return False
    have_roles = [
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in prompt
    ]
    if any(have_roles) and not all(have_roles):
        index = have_roles.index(False)
        raise ValueError(
            f"message {index} of the chat is {shown(prompt[index])}: pass a dict whose `role` is"
            " text"
        )
    return any(have_roles)


def _chat_ids(messages: Any, tokenizer: Any) -> Any:
    """Returns the token ids of chat messages, rendered with the tokenizer's template. Raises
    `ValueError` if the tokenizer cannot render them."""
    if tokenizer is None:
        raise ValueError(
            "the prompt is a chat: make the engine with `tokenizer=`, or pass token ids"
        )
    if getattr(tokenizer, "chat_template", "its own") is None or not hasattr(
        tokenizer, "apply_chat_template"
    ):
        raise ValueError(
            "the prompt is a chat, and the tokenizer has no chat template: set"
            " `tokenizer.chat_template`, or pass text"
        )
    contents = [message.get("content") for message in messages]
    for part in itertools.chain(*(content for content in contents if isinstance(content, list))):
        if isinstance(part, Mapping) and part.get("type") != "text":
            raise ValueError(
                f"a message of the chat holds content of type {shown(part.get('type'))}, which no"
                " tokenizer reads: pass the output of `processor.apply_chat_template(messages,"
                " add_generation_prompt=True, tokenize=True, return_dict=True,"
                ' return_tensors="pt")`'
            )
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # raised by the jinja2 template
        if is_interrupt(error):
            raise
        raise ValueError(
            f"the tokenizer's chat template does not take these messages: {error}"
        ) from error


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Returns the token ids of a prompt in any of its forms (`Prompt`). Raises `ValueError` for
    other values, for several prompts, and for text or a chat without a tokenizer."""
    if isinstance(prompt, Mapping):
        rows = _mapping_ids(prompt)[0]
        if len(rows) != 1:
            raise ValueError(
                f"the prompt has {len(rows)} rows of `input_ids`, and a request takes one: call"
                " `engine.generate(inputs)`, or `add_request` with each"
            )
        prompt = rows[0]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError(
                "the prompt is text: make the engine with `tokenizer=`, or pass token ids"
            )
        prompt = tokenizer(prompt)["input_ids"]
    elif is_chat(prompt):
        prompt = _chat_ids(prompt, tokenizer)
    if isinstance(prompt, Tensor):
        if prompt.dim() == 2 and len(prompt) == 1:
            prompt = prompt[0]
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(
                f"the prompt is a {prompt.dtype} tensor of shape {tuple(prompt.shape)}: pass whole"
                " numbers of shape (length,) or (1, length), one request for each prompt"
            )
        prompt = prompt.tolist()
    not_an_index: Any = None  # for which `operator.index` raises `TypeError`
    if isinstance(prompt, (bytes, bytearray)):  # their items are whole numbers, but not token ids
        raise ValueError(
            f"the prompt is {reprlib.repr(prompt)}: decode it, and pass text or token ids"
        )
    try:
        return [
            operator.index(not_an_index if isinstance(token, bool) else token) for token in prompt
        ]
    except TypeError:  # not iterable, or not whole numbers
        problem = f"the prompt is {reprlib.repr(prompt)}"
        if isinstance(prompt, (list, tuple)) and all(
            isinstance(part, (str, list, tuple, Tensor)) for part in prompt
        ):
            problem += (
                f", a list of {len(prompt)} prompts, and a request has one: call"
                " `engine.generate(prompts)`, or"
            )
            raise ValueError(f"{problem} `add_request` with each") from None
        raise ValueError(
            f"{problem}: pass token ids, one list of whole numbers for each request"
        ) from None


def _is_single(prompts: Any) -> bool:
    """Whether `prompts` is a single prompt: text, token ids or a chat, but not a mapping."""
    if isinstance(prompts, Tensor):
        return prompts.dim() < 2
    if isinstance(prompts, (list, tuple)) and prompts and is_whole(prompts[0]):
        return True
    return isinstance(prompts, str) or is_chat(prompts)


def split_prompts(
    prompts: Iterable[Prompt] | Mapping[str, Any], generation_config: Any, attention_mask: Any
) -> list[tuple[Prompt, Any]]:
    """Returns the prompts of `PagedEngine.generate`, each with its generation config. Raises the
    `ValueError` of `PagedEngine.generate` for these three arguments."""
    is_single = _is_single(prompts)
    if attention_mask is not None and not is_single:
        if not isinstance(prompts, Tensor) or prompts.dim() != 2:
            raise ValueError(
                "`attention_mask` needs `prompts` as a tensor of shape (rows, length); a mapping"
                " holds its own mask"
            )
        prompts = {"input_ids": prompts, "attention_mask": attention_mask}
    if isinstance(prompts, Mapping) and has_inputs(prompts):
        ids = prompts.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
            raise ValueError(
                "the mapping of prompts has inputs besides `input_ids` and `attention_mask`, and it"
                " is unknown which of their rows belong to which prompt: pass a list of such"
                " mappings, one per prompt, with `input_ids` of shape (1, length)"
            )
        prompts = [prompts]
    elif isinstance(prompts, Mapping):
        has_mask = prompts.get("attention_mask") is not None
        prompts, is_single = _mapping_ids(prompts)
        if has_mask and not is_single:
            prompts = [{"input_ids": [ids], "attention_mask": [[1] * len(ids)]} for ids in prompts]
    if is_single:
        raise ValueError(
            f"{reprlib.repr(prompts)} is one prompt: pass a list of prompts, or call `add_request`"
        )
    if not isinstance(prompts, Iterable):
        raise ValueError(f"`prompts` is {shown(prompts)}: pass a list of prompts")
    prompts = list(prompts)
    configs = generation_config
    if not isinstance(configs, (list, tuple)):
        configs = [configs]
    if len(configs) == 1:
        configs = list(configs) * len(prompts)
    if len(configs) != len(prompts):
        raise ValueError(
            f"{len(configs)} generation configs were passed for {len(prompts)} prompts: pass one"
            " for all, or one per prompt"
        )
    return list(zip(prompts, configs))


def _mapping_ids(inputs: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """Returns the ids of each text in a tokenizer's output, without padding, and whether the output
    is a flat list, for a single text. Raises `ValueError` for invalid ids or masks."""
    if "input_ids" not in inputs:
        raise ValueError(
            f"the mapping of prompts has no `input_ids`, only {quoted(map(str, inputs))}: tokenize"
            " the texts"
        )
    ids = _as_lists("input_ids", inputs["input_ids"])
    is_single = bool(ids) and not isinstance(ids[0], (list, tuple))
    ids = [ids] if is_single else ids
    if inputs.get("attention_mask") is None:
        return ids, is_single
    masks = _as_lists("attention_mask", inputs["attention_mask"])
    masks = [masks] if is_single else masks
    are_lists = all(isinstance(mask, (list, tuple)) for mask in masks)
    if not are_lists or list(map(len, masks)) != list(map(len, ids)):
        raise ValueError(
            "the lengths of the attention mask differ from those of `input_ids`: pass both as the"
            " tokenizer returned them"
        )
    prompts = []
    for row, mask in enumerate(masks):
        columns = [column for column, is_token in enumerate(mask) if is_token]
        if columns and columns[-1] - columns[0] >= len(columns):
            raise ValueError(
                f"the attention mask hides tokens inside row {row}: it may only hide padding at the"
                " ends"
            )
        prompts.append([ids[row][column] for column in columns])
    return prompts, is_single


def _as_lists(name: str, value: Any) -> list[Any]:
    """Converts an array, or a list of arrays, to (nested) lists. Raises `ValueError` for other
    values of the mapping's entry `name`."""

    def as_list(array: Any) -> Any:
        return array.tolist() if hasattr(array, "tolist") else array

    value = as_list(value)
    if not isinstance(value, (list, tuple)):
        raise ValueError(
            f"`{name}` of the mapping of prompts is {reprlib.repr(value)}: pass lists or a tensor"
        )
    return list(map(as_list, value))
