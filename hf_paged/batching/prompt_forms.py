"""The forms in which callers pass prompts, converted to token ids and the inputs beside them. It
checks forms, not lengths or the vocabulary."""

from __future__ import annotations

import itertools
import operator
import reprlib
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from .. import compat
from ..config import is_whole, shown
from ..model.own_loop import mismatched_rows
from .arguments import quoted

# list[int], 1-D or (1, length) tensor, a tokenizer's output for one text; with a tokenizer also str
# or chat messages
Prompt = Any


def split_inputs(prompt: Prompt, inputs: Any) -> tuple[Prompt, dict[str, Any] | None]:
    """Returns the prompt and its inputs beside token ids (`None` without any), taken from `inputs`
    and, if `prompt` is a processor's mapping, from it. Raises `ValueError` unless the inputs are
    those of one prompt."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ValueError(
            f"`inputs` is {shown(inputs)}: pass a dict of the model's inputs beside token ids"
        )
    model_inputs = dict(inputs or {})
    if isinstance(prompt, Mapping) and has_inputs(prompt):
        others = {name: value for name, value in prompt.items() if name != "input_ids"}
        model_inputs = {**others, **model_inputs}
        prompt = prompt.get("input_ids")
        mask = model_inputs.get("attention_mask")
        if prompt is not None and mask is not None:
            are_tensors = isinstance(mask, Tensor) and isinstance(prompt, Tensor)
            if are_tensors and mask.shape != prompt.shape:
                raise ValueError(
                    f"`attention_mask` has the shape {tuple(mask.shape)} and `input_ids`"
                    f" {tuple(prompt.shape)}: pass both as the processor returned them"
                )
            if not isinstance(mask, Tensor) or not bool(mask.all()):
                raise ValueError(
                    "the attention mask hides tokens: pass a prompt with images or sound without"
                    " padding"
                )
            del model_inputs["attention_mask"]
    excluded = {"input_ids", *compat.CACHE_NAMES, *vars(GenerationConfig())}
    refused = sorted(map(str, excluded & model_inputs.keys()))
    if refused:
        raise ValueError(
            f"`inputs` has {', '.join(refused)}: pass only model inputs beside token ids there, and"
            " options in `generation_config`"
        )
    mismatch = mismatched_rows(model_inputs, 1)
    if mismatch is not None:
        raise ValueError(f"`inputs` are not those of one prompt: {mismatch}")
    return prompt, model_inputs or None


def has_inputs(prompt: Mapping[str, Any]) -> bool:
    """Whether a processor's output holds more than token ids and their mask."""
    return any(
        name not in ("input_ids", "attention_mask") and value is not None
        for name, value in prompt.items()
    )


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a list of chat messages. Raises `ValueError` if only some of them have a
    role."""
    if not isinstance(prompt, (list, tuple)) or (prompt and isinstance(prompt[0], int)):
        # usually token ids
        return False
    roles = [
        isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in prompt
    ]
    if any(roles) and not all(roles):
        index = roles.index(False)
        raise ValueError(
            f"message {index} of the chat is {shown(prompt[index])}: pass a dict with its `role`,"
            " as text"
        )
    return any(roles)


def _chat_ids(messages: Any, tokenizer: Any) -> Any:
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
                " tokenizer reads: pass what `processor.apply_chat_template(messages,"
                " add_generation_prompt=True, tokenize=True, return_dict=True,"
                ' return_tensors="pt")` returns'
            )
    try:
        return tokenizer.apply_chat_template(
            messages, add_generation_prompt=True, tokenize=True, return_dict=False
        )
    except Exception as error:  # raised by the jinja2 template
        raise ValueError(
            f"the tokenizer's chat template does not take these messages: {error}"
        ) from error


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Returns the token ids of one prompt. Raises `ValueError` for anything else, and for text
    without a tokenizer."""
    if isinstance(prompt, Mapping):
        rows = _mapping_ids(prompt)[0]
        if len(rows) != 1:
            raise ValueError(
                f"the prompt has {len(rows)} rows of `input_ids`, and a request takes one: call "
                "`engine.generate(inputs)`, or `add_request` with each"
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
    invalid: Any = None
    if isinstance(prompt, (bytes, bytearray)):  # their items are whole numbers, too
        raise ValueError(
            f"the prompt is {reprlib.repr(prompt)}: decode it, and pass text or token ids"
        )
    try:
        return [operator.index(invalid if isinstance(token, bool) else token) for token in prompt]
    except TypeError:  # not iterable, or not whole numbers
        finding = f"the prompt is {reprlib.repr(prompt)}"
        if isinstance(prompt, (list, tuple)) and all(
            isinstance(part, (str, list, tuple, Tensor)) for part in prompt
        ):
            finding += (
                f", which are {len(prompt)} prompts, and a request has one: call"
                " `engine.generate(prompts)`, or"
            )
            raise ValueError(f"{finding} `add_request` with each") from None
        raise ValueError(
            f"{finding}: pass token ids, one list of whole numbers for each request"
        ) from None


def _is_single(prompts: Any) -> bool:
    """Whether `prompts` is a single prompt: neither a list of prompts nor a mapping."""
    if isinstance(prompts, Tensor):
        return prompts.dim() < 2
    if isinstance(prompts, (list, tuple)) and prompts and is_whole(prompts[0]):
        return True
    return isinstance(prompts, str) or is_chat(prompts)


def split_prompts(
    prompts: Iterable[Prompt] | Mapping[str, Any], generation_config: Any, attention_mask: Any
) -> list[tuple[Prompt, Any]]:
    """Returns the prompts of `PagedEngine.generate`, each with its generation config. Raises
    `generate`'s errors."""
    is_one = _is_single(prompts)
    if attention_mask is not None and not is_one:
        if not isinstance(prompts, Tensor) or prompts.dim() != 2:
            raise ValueError(
                "`attention_mask` goes with one tensor of shape (rows, length); a mapping holds"
                " its own"
            )
        prompts = {"input_ids": prompts, "attention_mask": attention_mask}
    if isinstance(prompts, Mapping) and has_inputs(prompts):
        ids = prompts.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
            raise ValueError(
                "the mapping of prompts has inputs beside `input_ids` and `attention_mask`, whose"
                " rows are unknown: pass a list of such mappings, one per prompt, with `input_ids`"
                " of shape (1, length)"
            )
        prompts = [prompts]
    elif isinstance(prompts, Mapping):
        prompts, is_one = _mapping_ids(prompts)
    if is_one:
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
            f"{len(configs)} generation configs were passed for {len(prompts)} prompts: pass one,"
            " or one for each"
        )
    return list(zip(prompts, configs))


def _mapping_ids(inputs: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """Returns the unpadded ids of every text in a tokenizer's output, and whether it holds a single
    text."""
    if "input_ids" not in inputs:
        raise ValueError(
            f"the mapping of prompts has no `input_ids`, only {quoted(map(str, inputs))}: tokenize"
            " the texts"
        )
    ids = _as_lists("input_ids", inputs["input_ids"])
    is_one = bool(ids) and not isinstance(ids[0], (list, tuple))
    ids = [ids] if is_one else ids
    if inputs.get("attention_mask") is None:
        return ids, is_one
    masks = _as_lists("attention_mask", inputs["attention_mask"])
    masks = [masks] if is_one else masks
    are_lists = all(isinstance(mask, (list, tuple)) for mask in masks)
    if not are_lists or list(map(len, masks)) != list(map(len, ids)):
        raise ValueError(
            "the attention mask has other lengths than `input_ids`: pass both as the tokenizer"
            " returned them"
        )
    prompts = []
    for row, mask in enumerate(masks):
        columns = [column for column, is_token in enumerate(mask) if is_token]
        if columns and columns[-1] - columns[0] >= len(columns):
            raise ValueError(
                f"the attention mask hides tokens inside of row {row}: it may hide padding at its"
                " ends"
            )
        prompts.append([ids[row][column] for column in columns])
    return prompts, is_one


def _as_lists(name: str, value: Any) -> list[Any]:
    def as_list(array: Any) -> Any:
        return array.tolist() if hasattr(array, "tolist") else array

    value = as_list(value)
    if not isinstance(value, (list, tuple)):
        raise ValueError(
            f"`{name}` of the mapping of prompts is {reprlib.repr(value)}: pass lists or a tensor"
        )
    return list(map(as_list, value))
