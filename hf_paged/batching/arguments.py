"""Checks and converts callers' arguments before memory is allocated; the errors name the invalid
argument. `prompt_forms.py` converts prompts."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig
from transformers.generation.streamers import TextStreamer

from .. import compat
from ..config import PagedConfig, is_whole, shown, suggest
from ..model.forwards import compute_device
from ..model.structure import has_states_outside_cache, is_stock
from ..model.wrappers import unwrap_model


class ServedByGenerateError(ValueError):
    """Only the model's own `generate` can serve this model or request."""


MAX_TOP_LOGPROBS = 1 << 20  # more than any vocabulary; at most the whole vocabulary is returned

# limits per request, since each step compares all stop strings of a request while other requests
# wait; a program may raise these limits
MAX_STOP_STRINGS, MAX_STOP_CHARACTERS = 64, 4096


@dataclass(frozen=True)
class RequestOptions:
    """The arguments of `PagedEngine.add_request`, except the prompt and its generation config. They
    may be unchecked."""

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


@dataclass(frozen=True)
class Assistance:
    """Arguments of assisted generation that are not part of the generation config."""

    assistant_model: Any = None  # a smaller `PreTrainedModel`
    tokenizer: Any = None  # of the assisted model; used only if the assistant has a different one
    assistant_tokenizer: Any = None  # of the assistant, if it differs


def option_for_drafts(config: Any, assistant: Any) -> str | None:
    """Returns the name of the option that makes transformers run assisted generation; `None` if no
    such option is set."""
    options = {
        "assistant_model": assistant,
        "prompt_lookup_num_tokens": config.prompt_lookup_num_tokens,
        "assistant_early_exit": config.assistant_early_exit,
        "use_mtp": config.use_mtp or None,
    }
    return next((name for name, value in options.items() if value is not None), None)


def num_requested_tokens(generation_config: Any) -> int:
    """Returns the `max_new_tokens` of a request's config or dict of options; 1 if the option is
    missing or not an int."""
    options = generation_config
    if isinstance(options, GenerationConfig):
        options = vars(options)
    max_new_tokens = options.get("max_new_tokens") if isinstance(options, Mapping) else None
    return max_new_tokens if isinstance(max_new_tokens, int) else 1


def as_whole(name: str, value: Any, low: int, high: int, before: str = "", after: str = "") -> int:
    """Returns `value` as an int. Raises `ValueError` unless it is a whole number from `low` to
    `high`. The message calls the value `name`, and puts `before` and `after` around the range."""
    if not is_whole(value) or not low <= value <= high:
        raise ValueError(
            f"`{name}` is {shown(value)}: it must be {before}a whole number from {low} to"
            f" {high}{after}"
        )
    return int(value)


def reject_engine_arguments(options: Mapping[str, Any]) -> None:
    """Raises `TypeError` for `options`, the unknown keyword arguments of a call to [`PagedEngine`];
    does nothing if there are none."""
    if not options:
        return
    fields = PagedConfig.__annotations__
    misplaced_options = options.keys() & generation_options()
    hint = suggest(options, [*fields, *misplaced_options, "config", "tokenizer"])
    arguments = [f"{name}={shown(value)}" for name, value in options.items() if name in fields]
    remedy = (
        "Memory options go into the config, PagedEngine(model,"
        f" PagedConfig({', '.join(arguments) or 'num_blocks=4096'}))"
    )
    if misplaced_options:
        remedy = (
            'Generation options go with the prompts, engine.generate(prompts, {"max_new_tokens":'
            " 64})"
        )
    raise TypeError(f"`PagedEngine` has no argument {quoted(options)}{hint or '.'} {remedy}")


def reject_request_arguments(names: Iterable[str]) -> None:
    """Raises `TypeError` for `names`, the names of a request's unknown keyword arguments; does
    nothing if there are none."""
    if unknown := list(names):
        hint = suggest(unknown, [*RequestOptions.__annotations__, *generation_options()])
        raise TypeError(
            f"there is no argument {quoted(unknown)}{hint or '.'} Generation options go into"
            ' `generation_config`, such as {"max_new_tokens": 64}'
        )


def quoted(names: Iterable[str]) -> str:
    """Returns the sorted names in backticks, separated by commas."""
    return ", ".join(f"`{name}`" for name in sorted(names))


def check_generates(model: Any) -> None:
    """Raises `ValueError` unless `model` is a model with a language-modeling head and loaded
    weights, and `ServedByGenerateError` for an encoder-decoder model with its own cache class, or
    for a model that keeps states in its modules."""
    if isinstance(model, type) or not callable(getattr(model, "can_generate", None)):
        remedy = "it must be a model, from `AutoModelForCausalLM.from_pretrained` for instance"
        if isinstance(model, (str, os.PathLike)):
            remedy = f"call `PagedEngine.from_pretrained({shown(model)})`, or pass a loaded model"
        elif callable(getattr(getattr(model, "model", None), "can_generate", None)):
            remedy = "pass its `.model`"
        raise ValueError(f"`model` is {shown(model)}: {remedy}")
    class_name = type(model).__name__
    check_weights(model)
    if not model.can_generate():
        raise ValueError(
            f"`model` is of type {class_name}, which cannot generate: pass the model with its head,"
            " a `...ForCausalLM`"
        )
    if not is_stock(model, compat.PREPARE_CACHE) or not compat.supports_dynamic_cache(model):
        if model.config.is_encoder_decoder:
            raise ServedByGenerateError(
                f"{class_name} is an encoder-decoder model with its own cache class: call"
                ' `model.generate(..., cache_implementation="paged")`'
            )
    if has_states_outside_cache(model.modules()):
        raise ServedByGenerateError(
            f"{class_name} keeps states in its modules, outside any cache, so its requests cannot"
            ' run side by side: call `model.generate(..., cache_implementation="paged")`'
        )


def check_weights(model: Any) -> None:
    """Raises `ValueError` for a model on the meta device."""
    if compute_device(model).type == "meta":
        raise ValueError(
            f"the weights of {type(model).__name__} are on the meta device, which holds no data:"
            " load them with `from_pretrained`"
        )


def check_path(name_or_path: Any) -> None:
    """Raises `ValueError` unless `name_or_path` is a string or a path, and `FileNotFoundError` if
    it does not exist and cannot be a name on the Hub, since it starts with `/`, `.` or `~`."""
    if not isinstance(name_or_path, (str, os.PathLike)):
        raise ValueError(
            f"`name_or_path` is {shown(name_or_path)}: pass a name or a folder, or call"
            " `PagedEngine(model)`"
        )
    path = os.fspath(name_or_path)
    if path.startswith((os.sep, ".", "~")) and not os.path.exists(path):
        raise FileNotFoundError(
            f"there is no folder {path!r}: pass the folder of a saved model, or a name on the Hub"
        )


def reject_tokenizer_as_config(config: Any) -> None:
    """Raises `ValueError` for a tokenizer passed as an engine's config."""
    if callable(getattr(config, "decode", None)):
        raise ValueError(
            f"`config` is of type {type(config).__name__}: pass a tokenizer as the"
            " keyword argument `PagedEngine(model, tokenizer=tokenizer)`"
        )


def check_tokenizer(tokenizer: Any) -> None:
    """Raises `ValueError` unless `tokenizer` is `None` or has a `decode` method."""
    if tokenizer is not None and not callable(getattr(tokenizer, "decode", None)):
        raise ValueError(
            f"`tokenizer` is {shown(tokenizer)}: pass a tokenizer, from"
            " `AutoTokenizer.from_pretrained`"
        )


def check_assistant(value: Any, tokenizer: Any = None) -> None:
    """Raises `ValueError` unless `value` is `None` or a model, and for an assistant's `tokenizer`
    without an assistant."""
    if value is not None and not callable(getattr(value, "can_generate", None)):
        raise ValueError(f"`assistant_model` is {shown(value)}: it must be None or a model")
    if value is None and tokenizer is not None:
        raise ValueError(
            "`assistant_tokenizer` goes with an `assistant_model`: pass one, or leave out the"
            " tokenizer"
        )


def checked_options(options: RequestOptions, default_salt: str | None) -> RequestOptions:
    """Returns the options with the adapter as a string, the assistant without wrappers, and
    `default_salt` if they have no cache salt. Raises `ValueError` for an invalid id, adapter or
    assistant."""
    try:
        hash(options.request_id)
    except TypeError:
        raise ValueError(
            f"`request_id` is {shown(options.request_id)}: it must be hashable, a string for"
            " instance"
        ) from None
    adapter = options.adapter
    if adapter is not None:
        if not isinstance(adapter, (str, os.PathLike)):
            raise ValueError(
                f"`adapter` is {shown(adapter)}: it must be None or an adapter's name or folder"
            )
        adapter = os.fspath(adapter)
    check_assistant(options.assistant_model, options.assistant_tokenizer)
    return replace(
        options,
        adapter=adapter,
        cache_salt=default_salt if options.cache_salt is None else options.cache_salt,
        assistant_model=unwrap_model(options.assistant_model),
    )


def check_logprobs(options: RequestOptions) -> int:
    """Checks the options for log-probabilities, and returns `top_logprobs` as an int. Raises
    `ValueError` for invalid values, and for alternatives without log-probabilities."""
    for name in ("return_logprobs", "prompt_logprobs"):
        if not isinstance(getattr(options, name), bool):
            value = shown(getattr(options, name))
            raise ValueError(
                f"`{name}` is {value}: it must be True or False; `top_logprobs` requests"
                " alternatives"
            )
    count = as_whole(
        "top_logprobs",
        options.top_logprobs,
        0,
        MAX_TOP_LOGPROBS,
        after=" (alternatives per token)",
    )
    if count and not (options.return_logprobs or options.prompt_logprobs):
        raise ValueError(
            f"`top_logprobs` is {count}: it needs `return_logprobs=True` or `prompt_logprobs=True`"
        )
    return count


def as_list(name: str, value: Any) -> list[Any]:
    """Returns processors or criteria as a new list, empty for `None`. Raises `ValueError` unless
    `value` is `None`, or a list or tuple of callables."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{name}` is {shown(value)}: pass a list")
    for index, item in enumerate(value):
        if not callable(item):
            raise ValueError(f"`{name}` holds {shown(item)} at index {index}: it must be callable")
    return list(value)


def check_stop_strings(value: Any, name: str = "stop_strings") -> None:
    """Raises `ValueError` unless `value` is a string or a non-empty list or tuple of strings, and
    for more than `MAX_STOP_STRINGS` strings or, in total, `MAX_STOP_CHARACTERS` characters."""
    strings = [value] if isinstance(value, str) else value
    is_list = isinstance(strings, (list, tuple)) and bool(strings)
    if not is_list or not all(isinstance(text, str) for text in strings):
        raise ValueError(
            f"`{name}` is {shown(value)}: it must be a string, or a non-empty list of strings"
        )
    if len(strings) > MAX_STOP_STRINGS:
        raise ValueError(
            f"`{name}` has {len(strings)} strings: a request may have at most"
            f" {MAX_STOP_STRINGS} (`MAX_STOP_STRINGS` in `{__name__}`)"
        )
    length = sum(map(len, strings))
    if length > MAX_STOP_CHARACTERS:
        raise ValueError(
            f"`{name}` has {length} characters: a request may have at most {MAX_STOP_CHARACTERS} in"
            f" total (`MAX_STOP_CHARACTERS` in `{__name__}`)"
        )


def check_streamer(value: Any) -> None:
    """Raises `ValueError` unless `value` is `None` or has the methods `put` and `end`."""
    methods = [getattr(value, name, None) for name in ("put", "end")]
    if value is not None and not all(map(callable, methods)):
        raise ValueError(f"`streamer` is {shown(value)}: it must have the methods `put` and `end`")


def check_streamed_rows(streamer: Any, num_rows: int, remedy: str) -> None:
    """Raises `ValueError` if `streamer` takes only one row and there are more; the message ends
    with `remedy`."""
    put = getattr(streamer, "put", None)
    if getattr(put, "__func__", None) is TextStreamer.put and num_rows > 1:
        raise ValueError(
            f"`streamer` is of type {type(streamer).__name__}, which takes one row, and there are"
            f" {num_rows}: {remedy}"
        )


def check_ids(value: Any, mask: Any, is_whole_prompt: bool) -> None:
    """Raises `ValueError` unless `value` is `None` or an int64 or int32 tensor `(rows, length,
    ...)` with at least one row. If no cached tokens or embeddings precede the ids
    (`is_whole_prompt`), each row needs at least one id. If the ids and `mask` are both 2-D, their
    shapes must be equal."""
    if value is None:
        return
    if not isinstance(value, Tensor):
        raise ValueError(
            f"`input_ids` are {shown(value)}: pass a tensor of token ids, for example "
            '`model.generate(**tokenizer(texts, padding=True, return_tensors="pt"), ...)`'
        )
    shape = tuple(value.shape)
    if value.dtype not in (torch.int64, torch.int32):
        raise ValueError(
            f"`input_ids` are {value.dtype}: token ids must be torch.int64 or torch.int32"
        )
    if value.dim() < 2 or not len(value):
        raise ValueError(
            f"`input_ids` have the shape {shape}: it must be (rows, length), with at least one row"
        )
    if is_whole_prompt and not shape[1]:
        raise ValueError(
            f"`input_ids` have the shape {shape}: each row needs at least one token, such as BOS"
        )
    if isinstance(mask, Tensor) and mask.dim() == value.dim() == 2 and mask.shape != value.shape:
        raise ValueError(
            f"`attention_mask` has the shape {tuple(mask.shape)} and `input_ids` {shape}: pass both"
            " as the tokenizer returned them"
        )


def check_numbers(options: Mapping[str, Any], *, check_range: bool = True) -> None:
    """Raises `ValueError` unless `num_beams` and `num_return_sequences` are integers or `None`, and
    the limits on tokens are numbers, tensors or `None`. With `check_range`, `num_beams` and
    `num_return_sequences` must also be at least 1, and must not be bools."""
    for name in ("num_beams", "num_return_sequences"):
        value = options.get(name)
        if value is None:
            continue
        is_count = isinstance(value, Integral)
        if check_range:
            is_count = is_whole(value) and int(value) >= 1
        if not is_count:
            raise ValueError(f"`{name}` is {shown(value)}: it must be a whole number of at least 1")
    # `generate` also accepts 3.0 for these, and itself raises for numbers that are too low
    for name in ("max_new_tokens", "max_length", "min_new_tokens", "min_length"):
        if not isinstance(options.get(name), (Real, Tensor, type(None))):
            raise ValueError(
                f"`{name}` is {shown(options[name])}: it must be a whole number (tokens)"
            )


def check_generation_config(value: Any) -> None:
    """Raises `ValueError` unless `value` is `None`, a `GenerationConfig` or a dict of its options.
    Most values of options are validated later, together with the model's defaults, when a request
    is prepared."""
    if value is None:
        return
    if isinstance(value, GenerationConfig):
        check_numbers(vars(value))
        return
    if not isinstance(value, Mapping):
        raise ValueError(
            f"the generation config is {shown(value)}: pass a `GenerationConfig` or a dict of its"
            " options"
        )
    defaults = vars(GenerationConfig())
    unknown = [str(name) for name in value if name not in defaults]
    if unknown:  # transformers would keep them as unused attributes
        hint = suggest(unknown, generation_options())
        if memory_options := PagedConfig.__annotations__.keys() & unknown:
            hint = (
                ": memory options go into the engine's config, such as"
                f" PagedConfig({min(memory_options)}=...)"
            )
        elif request_options := RequestOptions.__annotations__.keys() & unknown:
            hint = f": pass it outside the config, as the argument `{min(request_options)}=`"
        raise ValueError(f"`GenerationConfig` has no option {quoted(unknown)}{hint}")
    check_numbers(value)
    for name in ("num_beams", "num_return_sequences"):
        # `generate` also rejects `None` as a keyword argument
        if value.get(name, 1) is None and not is_saved_config(value):
            raise ValueError(
                f"`{name}` is None: leave it out, or pass a whole number of at least 1"
            )


def is_saved_config(value: Any) -> bool:
    """Whether `value` is a dict from `GenerationConfig.to_dict`, in which `None` means "not
    set"."""
    return isinstance(value, Mapping) and "transformers_version" in value


def generation_options() -> list[str]:
    """Returns the names of the options of `GenerationConfig`."""
    return [name for name in vars(GenerationConfig()) if not name.startswith("_")]
