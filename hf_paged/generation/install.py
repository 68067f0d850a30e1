"""The entry point: `install` patches transformers so that `cache_implementation="paged"` works in
`generate`."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import os
from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch.nn.modules import module as torch_module
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation.continuous_batching import ContinuousMixin
from transformers.generation.utils import GenerationMixin

from .. import compat, forks
from ..attention import interface
from ..attention.latent import unwrap_expansions
from ..attention.switch import NAME
from ..batching.arguments import (
    as_list,
    check_assistant,
    check_ids,
    check_numbers,
    check_streamed_rows,
    check_streamer,
    check_weights,
)
from ..batching.decoding.prepare import LoopCall, capturing
from ..batching.decoding.sample import ObservedCriteria, RowStreamers
from ..batching.factory import not_invariant
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..config import INSTALL_VARIABLE, PagedConfig, shown
from ..interrupts import guarded
from ..model.forwards import has_foreign_hook
from ..model.own_loop import ROW_INPUTS, cache_parts, mismatched_rows
from ..model.rank_signals import deferring
from ..model.ranks import ranks_of
from ..model.registry import memory_for, warn_once
from ..topics import Topic
from . import continuous_batching as _continuous_batching
from . import manager_config
from .after_import import after_import, forget_import
from .call import Call, batch_of, current, first_rows, prepared, rows_per_prompt

REQUESTED = ("paged", NAME)

_lock = forks.lock()
_is_default = False  # calls that name no cache are paged


# -- replacements of GenerationMixin methods: functions of the original method and its arguments -


def _generate(
    original: Callable[..., Any],
    model: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    positional = None
    if len(args) > 1:
        positional = args[1]
    config = kwargs.get("generation_config", positional)
    requested = _option("cache_implementation", model, config, kwargs)
    asks = requested in REQUESTED
    if asks:
        _check_arguments(model, config, args, kwargs)
        given_config = _option("cache_config", model, config, kwargs)
        cache_config = PagedConfig.coerce(given_config)
        if kwargs.get("cache_config") is not None:
            kwargs["cache_config"] = cache_config.to_dict()
        if kwargs.get("cache_implementation") == "paged":
            # for "paged", transformers would hand the call to its continuous batching before any
            # preparation
            kwargs["cache_implementation"] = NAME
        streamer = kwargs.get("streamer")
        if isinstance(streamer, (list, tuple)):
            kwargs["streamer"] = RowStreamers(streamer, kwargs.get("attention_mask"))
    elif requested is None and not _is_default:
        if _option("cache_config", model, config, kwargs) is not None:
            warn_once(
                model,
                Topic.NOT_PAGED(
                    "got a `cache_config` without a `cache_implementation`, so transformers' own"
                    " cache is used and the config has no effect: add"
                    ' cache_implementation="paged", or leave `cache_config` out'
                ),
            )
    if not asks and isinstance(requested, str):
        close = difflib.get_close_matches(requested.lower(), REQUESTED, n=1)
        if close:
            raise ValueError(f"`cache_implementation` is {requested!r}: did you mean {close[0]!r}?")
    prepared.set(None)
    _wrap_overrides(type(model))
    run = _run_untraced if asks or _is_default else _run
    return run(original, model, args, kwargs, asks)


@guarded
def _run(
    original: Callable[..., Any],
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    asks: bool,
) -> Any:
    call = Call(model)
    if asks:
        call.ask(
            f"{type(model).__name__} prepares its cache itself",
            "Use a model that generates as transformers does",
        )
    with call.running():
        return original(model, *args, **kwargs)


_run_untraced = torch.compiler.disable(_run)  # a compiled function may call `generate`


def _check_arguments(
    model: Any,
    config: GenerationConfig | None,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Raises `ValueError` early for arguments that would fail after allocation, or with an error
    that names none."""
    check_weights(model)
    misplaced = kwargs.keys() & PagedConfig.__annotations__.keys()
    if misplaced:
        pairs = [f'"{name}": {shown(kwargs[name])}' for name in sorted(misplaced)]
        given = ", ".join(pairs)
        raise TypeError(
            f"the paged cache takes these options in its config: pass cache_config={{{given}}}"
        )
    positional = None
    if args:
        positional = args[0]
    inputs = kwargs.get("inputs", positional)
    ids = kwargs.get("input_ids", inputs)
    if isinstance(ids, Mapping):
        raise ValueError(
            "`inputs` is a mapping, as tokenizers return it: unpack it, `model.generate(**inputs,"
            " ...)`"
        )
    # transformers renames the first
    cache_names = dict.fromkeys(("past_key_values", *compat.CACHE_NAMES))
    main_input = getattr(model, "main_input_name", None)
    if main_input == "input_ids" and not model.config.is_encoder_decoder:
        others = ("inputs_embeds", *cache_names)
        is_alone = all(kwargs.get(name) is None for name in others)
        mask = None
        if is_alone:
            mask = kwargs.get("attention_mask")
        check_ids(ids, mask, is_alone)
    for name in cache_names:
        cache = kwargs.get(name)
        if isinstance(cache, (str, Mapping, PagedConfig)):
            raise ValueError(
                f"`{name}` is {shown(cache)}: pass a cache, such as `PagedCache(model.config)`;"
                " options go into `cache_config`"
            )
    check_assistant(kwargs.get("assistant_model"))
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(
            f"`generation_config` is {shown(config)}: pass a `GenerationConfig`, or the options as"
            " keyword arguments"
        )
    options: dict[str, Any] = {}
    if config is not None:
        options = vars(config)
    check_numbers({**options, **kwargs}, check_range=False)
    for name in ("logits_processor", "stopping_criteria"):
        as_list(name, kwargs.get(name))
    streamer = kwargs.get("streamer")
    if isinstance(streamer, (list, tuple)):
        for row_streamer in streamer:
            check_streamer(row_streamer)
    else:
        check_streamer(streamer)
    if streamer is not None and isinstance(ids, torch.Tensor):
        repeats = _option("num_return_sequences", model, config, kwargs) or 1
        check_streamed_rows(streamer, len(ids) * repeats, "pass a list of streamers, one a row")


def _option(
    name: str,
    model: Any,
    config: GenerationConfig | None,
    kwargs: dict[str, Any],
) -> Any:
    """An option's value from the keyword, which may unset it, the config passed or the model's
    config, in this order; `None` if unset."""
    if name in kwargs:
        return kwargs[name]
    model_config = getattr(model, "generation_config", None)
    for source in (config, model_config):
        value = getattr(source, name, None)
        if value is not None:
            return value
    return None


def _prepare_cache(
    original: Callable[..., Any],
    model: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    capture = capturing.get()
    if capture is not None and capture.model is model:
        return None  # no loop will use it
    signature = inspect.signature(original)
    bound = signature.bind(model, *args, **kwargs)
    arguments = bound.arguments
    generation_config = arguments["generation_config"]
    model_kwargs = arguments["model_kwargs"]
    call = current.get()
    passed = any(model_kwargs.get(name) is not None for name in compat.CACHE_NAMES)
    chosen = generation_config.cache_implementation
    is_unset = chosen is None and not passed
    uses_cache = generation_config.use_cache is not False
    is_default = _is_default and is_unset and uses_cache
    requested = chosen in REQUESTED or is_default
    config = None
    if requested:
        config = PagedConfig.coerce(generation_config.cache_config)
        # not "dynamic": assistants copy this config, and transformers refuses that value for them
        generation_config.cache_implementation = None
    result = original(model, *args, **kwargs)
    with deferring(model):
        if call is None or call.model is not model:
            call = Call(model)
            prepared.set(call)
        if config is not None and not passed:
            length = arguments.get("max_cache_length") or 0
            num_prompts = arguments.get("batch_size") or 1
            num_rows = num_prompts * rows_per_prompt(generation_config)
            if call.is_running:
                ranks = ranks_of(model)
                if ranks is not None:
                    call.stack.enter_context(ranks.alone())
            lengths: list[int] = []
            if length:
                lengths = [length] * num_rows
            call.memory = memory = memory_for(model, config, lengths)
            if call.is_running:
                memory.begin_call(call)
            is_assistant = generation_config.is_assistant
            _swap(memory, length, num_rows, model_kwargs, is_assistant)
        caches: list[PagedCache] = []
        for name in compat.CACHE_NAMES:
            parts = cache_parts(model_kwargs.get(name))
            caches += [part for part in parts if isinstance(part, PagedCache)]
        if caches:
            call.use(caches, generation_config, is_built=not passed)
        elif requested:
            reason, remedy = _why_not_paged(model, passed, generation_config, model_kwargs)
            call.ask(reason, remedy)
        is_invariant = config is not None and config.batch_invariant
        if is_invariant and not call.built:
            raise not_invariant(model, call.reason)
    return result


def _why_not_paged(
    model: Any,
    passed: bool,
    config: GenerationConfig,
    model_kwargs: dict[str, Any],
) -> tuple[str, str]:
    """Why a call that asked for a paged cache has none, and what to change."""
    if passed:
        return "the caller's own cache is used", "Pass no cache, or a `hf_paged.PagedCache`"
    if config.use_cache is False:
        return "use_cache is False", "Leave `use_cache=False` out"
    has_cache = any(model_kwargs.get(name) is not None for name in compat.CACHE_NAMES)
    if has_cache or not compat.supports_dynamic_cache(model):
        return "the model has a cache of its own", "Use a model whose cache is a `DynamicCache`"
    return (
        f"transformers {transformers.__version__} made no cache that hf_paged can see",
        "Install a version of transformers that this hf_paged supports",
    )


def _swap(
    memory: PagedMemory,
    length: int,
    num_rows: int,
    model_kwargs: dict[str, Any],
    is_assistant: bool,
) -> None:
    """Replaces each `DynamicCache` that the model just built by a `PagedCache`, for rows of up to
    `length` tokens."""

    def paged(cache: Any, kind: str) -> Any:
        if type(cache) is not DynamicCache:
            return cache
        twin = PagedCache.from_empty(cache, memory, kind)
        if kind == "self":
            blocks_per_row = length // memory.block_size + 1
            twin.reserve(num_rows * blocks_per_row, num_rows)
        if is_assistant:
            twin.activate_past_recording()
        return twin

    for name in compat.CACHE_NAMES:
        cache = model_kwargs.get(name)
        if isinstance(cache, EncoderDecoderCache):
            cache.self_attention_cache = paged(cache.self_attention_cache, "self")
            cache.cross_attention_cache = paged(cache.cross_attention_cache, "cross")
        elif cache is not None:
            model_kwargs[name] = paged(cache, "self")


def _prefill(
    original: Callable[..., Any],
    model: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Computes rows that were expanded from one prompt once, where that gives the same results."""
    call = current.get()
    signature = inspect.signature(original)
    bound = signature.bind(model, *args, **kwargs)
    first = None
    given = bound.arguments
    # chunked prefill is left to the original
    is_whole = given["generation_config"].prefill_chunk_size is None
    if call is not None and call.model is model and call.caches:
        if call.repeats > 1 and is_whole:
            input_ids = given["input_ids"]
            model_kwargs = given["model_kwargs"]
            if mismatched_rows(model_kwargs, len(input_ids)) is None:
                first = _of_first_rows(input_ids, model_kwargs, call.repeats)
    if call is None or first is None or not _rows_are_independent(model):
        return original(model, *args, **kwargs)
    ids, inputs = first
    given["input_ids"] = ids
    given["model_kwargs"] = inputs
    outputs = original(*bound.args, **bound.kwargs)
    # the model may have created one
    caches = [value for value in outputs.values() if isinstance(value, Cache)]
    if not caches:
        caches = [value for value in inputs.values() if isinstance(value, Cache)]
    num_prompts = len(ids)
    repeats = call.repeats
    for cache in caches:
        # every cache layer can reorder its rows, which includes repeating one
        prompts = torch.arange(num_prompts, device=ids.device)
        cache.reorder_cache(prompts.repeat_interleave(repeats))
    for name, value in outputs.items():
        if not isinstance(value, Cache):
            are_states = name.endswith("hidden_states")
            outputs[name] = _repeat(value, num_prompts, repeats, are_states)
    call.details["prefills_shared"] = True
    return outputs


def _of_first_rows(
    input_ids: torch.Tensor,
    model_kwargs: dict[str, Any],
    repeats: int,
) -> tuple[torch.Tensor, dict[str, Any]] | None:
    """The inputs of every `repeats`-th row; `None` if the rows between differ or something is
    cached."""
    ids = first_rows(input_ids, repeats)
    inputs = dict(model_kwargs)
    for name, value in model_kwargs.items():
        if isinstance(value, Cache):
            for part in cache_parts(value):
                if not isinstance(part, PagedCache) or not part.is_empty:
                    return None
            continue
        is_scalar = isinstance(value, (bool, int, float, str))
        if value is not None and not is_scalar:
            # scalars have no rows
            if name not in ROW_INPUTS:
                return None
            if name.endswith("position_ids") and value.dim() != 2:
                return None
            rows = first_rows(value, repeats)
            if rows is None:
                return None
            inputs[name] = rows
    return None if ids is None else (ids, inputs)


def _rows_are_independent(model: Any) -> bool:
    """Whether rows do not affect one another: no dropout, batch-wide experts, user code or per-row
    module state."""
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity"):
        return False
    if getattr(config, "output_router_logits", False):
        return False
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    for module in model.modules():
        if module.training or has_foreign_hook(module):
            return False
        if "forward" in vars(module) or compat.attribute(module, "_setup_cache"):
            return False
    return True


def _repeat(value: Any, rows: int, repeats: int, are_states: bool) -> Any:
    """Repeats an output's rows. Hidden states, `(..., rows, length, width)`, may have an axis in
    front (Gemma3n)."""
    if isinstance(value, tuple):
        return tuple(_repeat(part, rows, repeats, are_states) for part in value)
    if not isinstance(value, torch.Tensor) or not value.dim():
        return value
    axis = 0
    if are_states:
        axis = max(0, value.dim() - 3)
    if value.shape[axis] != rows:
        return value
    return value.repeat_interleave(repeats, dim=axis)


def _expand_inputs(
    original: Callable[..., Any],
    model: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = current.get()
    if call is not None and call.model is model:
        inputs = dict(kwargs)
        inputs.pop("expand_size", None)
        inputs.pop("is_encoder_decoder", None)
        input_ids = inputs.pop("input_ids", None)
        call.note_inputs(input_ids, inputs)
        expanded = original(model, *args, **kwargs)
        if compat.ENCODE_MEDIA is None and not model.config.is_encoder_decoder:
            _, repeated = expanded
            call.swaps_pictures |= _swaps_pictures(kwargs, repeated)
        return expanded
    return original(model, *args, **kwargs)


def _swaps_pictures(given: dict[str, Any], inputs: dict[str, Any]) -> bool:
    """Whether the expansion repeated each image by itself although rows have several images, as
    transformers 5.17 does: `[A, A, B, B]` for two rows of which each has the images `[A, B]`."""
    size = given.get("expand_size", 1)
    rows = given.get("input_ids")
    if size == 1 or not isinstance(rows, torch.Tensor):
        return False
    for name, value in given.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            continue
        expanded = inputs.get(name)
        if len(value) == len(rows) or not isinstance(expanded, torch.Tensor):
            continue
        one_by_one = value.repeat_interleave(size, dim=0)
        if torch.equal(expanded, one_by_one):
            return True
    return False


@guarded
def _decode(
    original: Callable[..., Any],
    model: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    call = current.get()
    capture = capturing.get()
    if capture is not None and capture.model is model:
        signature = inspect.signature(original)
        bound = signature.bind(model, *args, **kwargs)
        arguments = bound.arguments
        unexpanded = None if call is None else call.unexpanded
        loop_call = LoopCall(original.__name__, arguments, unexpanded)
        return capture.add(loop_call)
    call = prepared.get()
    running: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if call is not None and call.model is model:
        prepared.set(None)
        running = call.running()
    else:
        call = current.get()
    with running:
        if call is not None and call.model is model and call.built:
            signature = inspect.signature(original)
            bound = signature.bind(model, *args, **kwargs)
            arguments = bound.arguments
            with deferring(model):
                batch = batch_of(call, original.__name__, arguments)
                if batch:
                    return batch.run()
            streamer = arguments.get("streamer")
            if isinstance(streamer, RowStreamers):
                criteria = arguments["stopping_criteria"]
                kwargs["stopping_criteria"] = ObservedCriteria(criteria, streamer)
            call.claim_blocks(
                arguments["input_ids"],
                arguments["generation_config"],
                arguments.get("model_kwargs", {}),
            )
        return original(model, *args, **kwargs)


def _encode_media(
    original: Callable[..., Any],
    model: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    capture = capturing.get()
    if capture is None or capture.model is not model:
        return original(model, *args, **kwargs)
    if model.config.is_encoder_decoder:
        return original(model, *args, **kwargs)
    signature = inspect.signature(original)
    bound = signature.bind(model, *args, **kwargs)
    arguments = bound.arguments
    return arguments["model_kwargs"]


def _warn_of_padding(
    original: Callable[..., Any],
    model: Any,
    /,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Skips the warning in our steps, which have a mask or no padding: the check waits for the
    device."""
    if compat.attention_of(model.config) == NAME:
        return None
    return original(model, *args, **kwargs)


_REPLACEMENTS: dict[str, Callable[..., Any]] = {
    "generate": _generate,
    **({} if compat.ENCODE_MEDIA is None else {compat.ENCODE_MEDIA: _encode_media}),
    compat.EXPAND_INPUTS: _expand_inputs,
    compat.PREPARE_CACHE: _prepare_cache,
    compat.PREFILL: _prefill,
    compat.SAMPLE: _decode,
    compat.BEAM_SEARCH: _decode,
    compat.ASSISTED_DECODING: _decode,
    compat.WARN_OF_PADDING: _warn_of_padding,
}
_installed: dict[tuple[type, str], tuple[Callable[..., Any] | None, Callable[..., Any]]] = {}
"""By class and name of each replaced method: the original, if there was one, and the wrapper that
replaced it."""


def _wrapper(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method, and what its decorators (`no_grad`, `deprecate_kwarg`) wrap: a caller who
    takes `generate` out of them gets ours."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(original, self, *args, **kwargs)

    if hasattr(original, "__wrapped__"):
        wrapper.__wrapped__ = _wrapper(original.__wrapped__, replacement)
    else:
        wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        del wrapper.__wrapped__
    return wrapper


def _method(owner: type, name: str) -> Callable[..., Any]:
    """A method of a class as a function that takes the model first; transformers 5.17 has a static
    method."""
    function: Callable[..., Any] = getattr(owner, name)
    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    if not is_static:
        return function

    def method(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    first = inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY)
    parameters = [first, *signature.parameters.values()]
    method.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return method


def _replace(
    owner: type,
    name: str,
    replacement: Callable[..., Any] | None = None,
) -> None:
    """For use within `_lock`."""
    method = _method(owner, name)
    wrapper = _wrapper(method, replacement or _REPLACEMENTS[name])
    original = inspect.getattr_static(owner, name)
    _installed[owner, name] = (original, wrapper)
    setattr(owner, name, wrapper)


def _add_to_peft(module: Any) -> None:
    """Adds the names of continuous batching to `PeftModel`, which passes them on to the model
    inside."""
    owner = module.PeftModel
    with _lock:
        for name in (
            "init_continuous_batching",
            "continuous_batching_context_manager",
            "generate_batch",
        ):
            is_replaced = (ContinuousMixin, name) in _installed
            if is_replaced and (owner, name) not in _installed:
                wrapper = _continuous_batching.through_wrapper(name)
                original = vars(owner).get(name)
                _installed[owner, name] = (original, wrapper)
                setattr(owner, name, wrapper)


def _wrap_overrides(model_class: type) -> None:
    """Wraps the input expansion of classes that override it (Qwen2-VL on transformers 5.17), to
    note their inputs."""
    name = compat.EXPAND_INPUTS
    owner = next(base for base in model_class.__mro__ if name in vars(base))
    if (owner, name) not in _installed:
        with _lock:
            if _installed and (owner, name) not in _installed:
                _replace(owner, name)


def install(
    continuous_batching: bool | PagedConfig | Mapping[str, Any] = False,
    *,
    by_default: bool = False,
) -> None:
    """Makes `cache_implementation="paged"` and `attn_implementation="hf_paged"` work. Idempotent;
    run by the import, with the options that the environment variable HF_PAGED_INSTALL names
    (`python -m hf_paged run` writes it).

    Args:
        continuous_batching (`bool`, [`PagedConfig`] or `dict`): Also run `generate_batch`,
            `init_continuous_batching` and `continuous_batching_context_manager` of all models on a
            [`PagedEngine`]; a config passed here is their default. A later call without this option
            changes nothing of it.
        by_default (`bool`): Also make `generate` paged where neither the call nor a configuration
            names a `cache_implementation`, and no cache is passed. A later call without this option
            changes nothing of it.
    """
    global _is_default
    with _lock:
        if not _installed:
            interface.register()
            compat.allow_cache_implementation(NAME, True)
            for name in _REPLACEMENTS:
                owner: type = GenerationMixin
                if name == compat.WARN_OF_PADDING:
                    owner = PreTrainedModel
                _replace(owner, name)
        _is_default |= by_default
        if continuous_batching is not False:
            given = None if continuous_batching is True else continuous_batching
            config = PagedConfig.coerce(given, "continuous_batching")
            manager_config.set_default(config)
            for name, replacement in _continuous_batching.REPLACEMENTS.items():
                if (ContinuousMixin, name) not in _installed:
                    _replace(ContinuousMixin, name, replacement)
    if continuous_batching is not False:
        after_import("peft.peft_model", _add_to_peft)


def install_of_environment() -> None:
    """Runs `install` with the options that HF_PAGED_INSTALL names. Raises `ValueError` for unknown
    names."""
    allowed = inspect.signature(install).parameters.keys()
    text = os.environ.get(INSTALL_VARIABLE, "")
    names = [name for name in text.split(",") if name]
    unknown = [name for name in names if name not in allowed]
    if unknown:
        raise ValueError(
            f"{INSTALL_VARIABLE} names {unknown}: it must be names among {', '.join(allowed)}, with"
            " commas"
        )
    install(**dict.fromkeys(names, True))


def uninstall() -> None:
    """Undoes `install`, except for running calls. Raises `RuntimeError`, before any change, if
    another library has wrapped a method since."""
    global _is_default
    with _lock:
        for (owner, name), (_, wrapper) in _installed.items():
            if getattr(owner, name) is not wrapper:
                message = (
                    f"`{owner.__name__}.{name}` was replaced after hf_paged was installed: undo"
                    " that first"
                )
                raise RuntimeError(message)
        _is_default = False
        forget_import(_add_to_peft)
        _continuous_batching.destroy_kept()
        while _installed:
            (owner, name), (original, _) = _installed.popitem()
            if original is None:
                delattr(owner, name)
            else:
                setattr(owner, name, original)
        compat.allow_cache_implementation(NAME, False)
        interface.forget()
        unwrap_expansions()
