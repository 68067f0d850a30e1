"""Checks and converts callers' arguments, prompts included; rejects wrong ones by name before memory is allocated."""

from __future__ import annotations

import difflib
import operator
import os
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import TextStreamer

from .. import compat
from ..config import is_whole
from ..model.capability import is_stock

# list[int], 1-D or (1, length) tensor, a tokenizer's output for one text; with a tokenizer also str or chat messages
Prompt = Any


MAX_TOP_LOGPROBS = 1 << 20  # more than any vocabulary; at most the whole vocabulary is returned


@dataclass(frozen=True)
class RequestOptions:
    """Arguments of `PagedEngine.add_request` beside the prompt and its generation config, unchecked."""

    request_id: Any = None
    priority: Any = 0
    logits_processor: Any = None
    stopping_criteria: Any = None
    streamer: Any = None
    adapter: Any = None
    seed: Any = None
    return_logprobs: Any = False
    top_logprobs: Any = 0
    prompt_logprobs: Any = False
    cache_salt: Any = None
    inputs: Any = None
    schema: Any = None
    regex: Any = None
    grammar: Any = None
    assistant_model: Any = None
    assistant_tokenizer: Any = None


def shown(value: Any) -> str:
    """Returns a shortened `repr`, or the type's name if `repr` fails."""
    try:
        return reprlib.repr(value)
    except Exception:  # from the object's `__repr__`, or an integer with too many digits
        return f"a value of type {type(value).__name__}"


def as_whole(name: str, value: Any, low: int, high: int, before: str = "", after: str = "") -> int:
    """Returns `value` as an int. Raises `ValueError` unless it is a whole number from `low` to `high`; the message has
    `before` and `after` around this range."""
    if not is_whole(value) or not low <= value <= high:
        raise ValueError(f"`{name}` is {shown(value)}: it must be {before}a whole number from {low} to {high}{after}")
    return int(value)


def check_generates(model: Any) -> None:
    """Raises `ValueError` unless `model` is a model with a head; also for encoder-decoder models with their own cache
    class, and for models that keep states in their modules."""
    if not callable(getattr(model, "can_generate", None)):
        raise ValueError(
            f"`model` is {shown(model)}: it must be a model, from `AutoModelForCausalLM.from_pretrained` for instance"
        )
    name = type(model).__name__
    if not model.can_generate():
        raise ValueError(
            f"`model` is a {name}, which cannot generate: pass the model with its head, a `...ForCausalLM`"
        )
    if not is_stock(model, compat.PREPARE_CACHE) or not compat.supports_dynamic_cache(model):
        if model.config.is_encoder_decoder:
            raise ValueError(
                f"{name} is an encoder-decoder model with a cache of its own: call `model.generate(..., "
                'cache_implementation="paged")`'
            )
    if any(hasattr(module, "_setup_cache") for module in model.modules()):
        raise ValueError(
            f"{name} keeps states in its modules, outside of any cache, so that its requests cannot run beside one "
            'another: call `model.generate(..., cache_implementation="paged")`'
        )


def check_tokenizer(tokenizer: Any) -> None:
    if isinstance(tokenizer, (str, os.PathLike)):
        raise ValueError(f"`tokenizer` is {shown(tokenizer)}: pass a tokenizer, from `AutoTokenizer.from_pretrained`")


def check_assistant(value: Any) -> None:
    if value is not None and not callable(getattr(value, "can_generate", None)):
        raise ValueError(f"`assistant_model` is {shown(value)}: it must be None or a model")


def check_names(request_id: Any, adapter: Any) -> None:
    try:
        hash(request_id)
    except TypeError:
        raise ValueError(f"`request_id` is {shown(request_id)}: it must be hashable, a string for instance") from None
    if adapter is not None and not isinstance(adapter, (str, os.PathLike)):
        raise ValueError(f"`adapter` is {shown(adapter)}: it must be None or an adapter's name or folder")


def check_logprobs(options: RequestOptions) -> int:
    """Returns the checked number of alternatives (`top_logprobs`)."""
    for name in ("return_logprobs", "prompt_logprobs"):
        if not isinstance(getattr(options, name), bool):
            value = shown(getattr(options, name))
            raise ValueError(f"`{name}` is {value}: it must be True or False; ask for alternatives with `top_logprobs`")
    count = as_whole("top_logprobs", options.top_logprobs, 0, MAX_TOP_LOGPROBS, after=" (alternatives of a token)")
    if count and not (options.return_logprobs or options.prompt_logprobs):
        raise ValueError(f"`top_logprobs` is {count}: it goes with `return_logprobs=True` or `prompt_logprobs=True`")
    return count


def as_list(name: str, value: Any) -> list[Any]:
    """Returns processors or criteria as a list. Raises `ValueError` if `value` is no list of callables."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{name}` is {shown(value)}: pass a list of them")
    for place, each in enumerate(value):
        if not callable(each):
            raise ValueError(f"`{name}` holds {shown(each)} at place {place}: it must be callable")
    return list(value)


def check_streamer(value: Any) -> None:
    if value is not None and not all(callable(getattr(value, method, None)) for method in ("put", "end")):
        raise ValueError(f"`streamer` is {shown(value)}: it must have the methods `put` and `end`")


def check_streamed_rows(streamer: Any, num_rows: int, instead: str) -> None:
    """Raises `ValueError` for several rows with a streamer that takes one; `instead` says what to do."""
    if isinstance(streamer, TextStreamer) and num_rows > 1:
        raise ValueError(
            f"`streamer` is a {type(streamer).__name__}, which takes one row, and there are {num_rows}: {instead}"
        )


def check_ids(value: Any) -> None:
    """Raises `ValueError` for a tensor `(rows, length)` whose dtype is not int64 or int32, or without rows."""
    is_tensor = isinstance(value, Tensor)
    if is_tensor and value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`input_ids` are {value.dtype}: token ids must be torch.int64 or torch.int32")
    if is_tensor and value.dim() == 2 and not len(value):
        raise ValueError(f"`input_ids` have the shape {tuple(value.shape)}: there must be at least one row")


def check_numbers(options: Mapping[str, Any], *, check_range: bool = True) -> None:
    """Raises `ValueError` for options that are not numbers; with `check_range` also for bools and counts below 1."""
    for name in ("num_beams", "num_return_sequences"):
        value = options.get(name)
        is_count = isinstance(value, Integral) and (not check_range or (is_whole(value) and int(value) >= 1))
        if value is not None and not is_count:
            raise ValueError(f"`{name}` is {shown(value)}: it must be a whole number of at least 1")
    # plain `generate` accepts 3.0 as well, and raises for numbers that are too low
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length"):
        if not isinstance(options.get(name), (Real, Tensor, type(None))):
            raise ValueError(f"`{name}` is {shown(options[name])}: it must be a whole number (tokens)")


def as_config(value: GenerationConfig | Mapping[str, Any] | None) -> GenerationConfig | None:
    if value is None:
        return None
    if isinstance(value, GenerationConfig):
        check_numbers(vars(value))
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"the generation config is {shown(value)}: pass a `GenerationConfig` or a dict of its options")
    known = vars(GenerationConfig())
    unknown = [str(name) for name in value if name not in known]
    if unknown:  # transformers would keep them as unused attributes
        raise ValueError(f"`GenerationConfig` has no options {', '.join(sorted(unknown))}{meant(unknown)}")
    check_numbers(value)
    for name in ("num_beams", "num_return_sequences"):
        if (
            name in value and value[name] is None and not is_saved(value)
        ):  # `generate` rejects it as a keyword argument, too
            raise ValueError(f"`{name}` is None: leave it out, or pass a whole number of at least 1")
    return GenerationConfig(**value)


def is_saved(value: Any) -> bool:
    """Whether `value` is the dict of a whole `GenerationConfig` (`to_dict`), in which None means "not set"."""
    return isinstance(value, Mapping) and "transformers_version" in value


def meant(names: Iterable[str]) -> str:
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    found = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.7) for name in sorted(names)}
    hints = [f"`{close[0]}` instead of `{name}`" for name, close in found.items() if close and close[0] != name]
    return f": did you mean {', '.join(hints)}?" if hints else ""


def split_inputs(prompt: Prompt, inputs: Any) -> tuple[Prompt, dict[str, Any] | None]:
    """Returns the prompt and its inputs beside token ids (`None` without any), taken from `inputs` and from `prompt` if
    that is a processor's mapping. Raises `ValueError` for inputs that are not those of one prompt."""
    if inputs is not None and not isinstance(inputs, Mapping):
        raise ValueError(f"`inputs` is {shown(inputs)}: pass a dict of what the model takes beside token ids")
    given = dict(inputs or {})
    if isinstance(prompt, Mapping) and has_inputs(prompt):
        given = {**{name: value for name, value in prompt.items() if name != "input_ids"}, **given}
        prompt = prompt.get("input_ids")
        mask = given.get("attention_mask")
        if prompt is not None and mask is not None:
            if not isinstance(mask, Tensor) or not bool(mask.all()):
                raise ValueError("the attention mask hides tokens: pass a prompt with other inputs without padding")
            del given["attention_mask"]
    options = vars(GenerationConfig())
    if refused := sorted(str(name) for name in given if name in ("input_ids", *compat.CACHE_NAMES) or name in options):
        raise ValueError(f"`inputs` has {', '.join(refused)}: pass what the model takes beside token ids alone")
    return prompt, given or None


def has_inputs(prompt: Mapping[str, Any]) -> bool:
    """Whether a processor's output holds more than token ids and their mask."""
    return any(name not in ("input_ids", "attention_mask") and value is not None for name, value in prompt.items())


def is_chat(prompt: Prompt) -> bool:
    """Whether a prompt is a list of chat messages. Raises `ValueError` if only some of them have a role."""
    if not isinstance(prompt, (list, tuple)) or (prompt and isinstance(prompt[0], int)):  # usually token ids
        return False
    roles = [isinstance(message, Mapping) and isinstance(message.get("role"), str) for message in prompt]
    if any(roles) and not all(roles):
        place = roles.index(False)
        raise ValueError(f"message {place} of the chat is {shown(prompt[place])}: pass a dict with its `role`, as text")
    return any(roles)


def _chat_ids(messages: Any, tokenizer: Any) -> Any:
    if tokenizer is None:
        raise ValueError("the prompt is a chat: make the engine with `tokenizer=`, or pass token ids")
    if getattr(tokenizer, "chat_template", "its own") is None or not hasattr(tokenizer, "apply_chat_template"):
        raise ValueError(
            "the prompt is a chat, and the tokenizer has no chat template: set `tokenizer.chat_template`, or pass text"
        )
    for part in (
        part for message in messages if isinstance(message.get("content"), list) for part in message["content"]
    ):
        if isinstance(part, Mapping) and part.get("type") != "text":
            raise ValueError(
                f"a message of the chat holds content of type {shown(part.get('type'))}, which no tokenizer reads: "
                "pass what `processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, "
                'return_dict=True, return_tensors="pt")` returns'
            )
    try:
        return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    except Exception as error:  # raised by the jinja2 template
        raise ValueError(f"the tokenizer's chat template does not take these messages: {error}") from error


def prompt_ids(prompt: Prompt, tokenizer: Any) -> list[int]:
    """Returns the token ids of one prompt. Raises `ValueError` for anything else, and for text without a tokenizer."""
    if isinstance(prompt, Mapping):
        rows = _mapped(prompt)[0]
        if len(rows) != 1:
            raise ValueError(f"the prompt is a mapping with {len(rows)} rows of `input_ids`: pass one for each request")
        prompt = rows[0]
    if isinstance(prompt, str):
        if tokenizer is None:
            raise ValueError("the prompt is text: make the engine with `tokenizer=`, or pass token ids")
        prompt = tokenizer(prompt)["input_ids"]
    elif is_chat(prompt):
        prompt = _chat_ids(prompt, tokenizer)
    if isinstance(prompt, Tensor):
        if prompt.dim() == 2 and len(prompt) == 1:
            prompt = prompt[0]
        if prompt.dim() != 1 or prompt.is_floating_point():
            raise ValueError(
                f"the prompt is a {prompt.dtype} tensor of shape {tuple(prompt.shape)}: pass whole numbers of "
                "shape (length,) or (1, length), one request for each prompt"
            )
        prompt = prompt.tolist()
    nothing: Any = None
    try:
        return [operator.index(nothing if isinstance(token, bool) else token) for token in prompt]
    except TypeError:  # not iterable, or not whole numbers
        what = reprlib.repr(prompt)
        raise ValueError(f"the prompt is {what}: pass token ids, one list of whole numbers for each request") from None


def split_prompts(
    prompts: Iterable[Prompt] | Mapping[str, Any], generation_config: Any, attention_mask: Any
) -> list[tuple[Prompt, Any]]:
    """Returns the prompts of `PagedEngine.generate`, each with its generation config. Raises `generate`'s errors."""
    is_one = isinstance(prompts, str) or (isinstance(prompts, Tensor) and prompts.dim() < 2) or is_chat(prompts)
    if attention_mask is not None and not is_one:
        if not isinstance(prompts, Tensor) or prompts.dim() != 2:
            raise ValueError("`attention_mask` goes with one tensor of shape (rows, length); a mapping holds its own")
        prompts = {"input_ids": prompts, "attention_mask": attention_mask}
    if isinstance(prompts, Mapping) and has_inputs(prompts):
        ids = prompts.get("input_ids")
        if not isinstance(ids, Tensor) or ids.dim() != 2 or len(ids) != 1:
            raise ValueError(
                "the mapping of prompts has inputs beside `input_ids` and `attention_mask`, whose rows are not known: "
                "pass a list of such mappings, one a prompt, with `input_ids` of shape (1, length)"
            )
        prompts = [prompts]
    elif isinstance(prompts, Mapping):
        prompts, is_one = _mapped(prompts)
    if is_one:
        raise ValueError("pass a list of prompts, or one prompt to `add_request`")
    prompts = list(prompts)
    configs = generation_config if isinstance(generation_config, (list, tuple)) else [generation_config]
    if len(configs) == 1:
        configs = list(configs) * len(prompts)
    if len(configs) != len(prompts):
        raise ValueError(f"{len(configs)} generation configs were passed for {len(prompts)} prompts")
    return list(zip(prompts, configs))


def _unpadded(rows: list[Any], masks: list[Any]) -> list[Prompt]:
    prompts = []
    for row, (ids, mask) in enumerate(zip(rows, masks)):
        places = [place for place, is_token in enumerate(mask) if is_token]
        if places and places[-1] - places[0] >= len(places):
            raise ValueError(f"the attention mask hides tokens inside of row {row}: it may hide padding at its ends")
        prompts.append([ids[place] for place in places])
    return prompts


def _mapped(inputs: Mapping[str, Any]) -> tuple[list[Prompt], bool]:
    """Returns, from a tokenizer's output, the unpadded ids of every text, and whether it was a single text."""
    if "input_ids" not in inputs:
        raise ValueError("the mapping of prompts has no `input_ids`")
    ids = _listed("input_ids", inputs["input_ids"])
    is_one = bool(ids) and not isinstance(ids[0], (list, tuple))
    ids = [ids] if is_one else ids
    if inputs.get("attention_mask") is None:
        return ids, is_one
    masks = _listed("attention_mask", inputs["attention_mask"])
    masks = [masks] if is_one else masks
    if any(not isinstance(mask, (list, tuple)) for mask in masks) or [*map(len, masks)] != [*map(len, ids)]:
        raise ValueError("the attention mask has other lengths than `input_ids`: pass both as the tokenizer made them")
    return _unpadded(ids, masks), is_one


def _listed(name: str, value: Any) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{name}` of the mapping of prompts is {reprlib.repr(value)}: pass lists or a tensor")
    return [each.tolist() if hasattr(each, "tolist") else each for each in value]
