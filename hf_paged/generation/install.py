"""The entry point: `install` patches transformers so that `cache_implementation="paged"` works in `generate`."""

from __future__ import annotations

import contextlib
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
from ..batching.arguments import as_list, check_ids, check_numbers, check_streamed_rows, check_streamer, shown
from ..batching.decoding.prepare import LoopCall, capturing
from ..batching.decoding.sample import ObservedCriteria, RowStreamers
from ..batching.factory import not_invariant
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..config import PagedConfig
from ..interrupts import held, let_in
from ..model.forwards import has_foreign_hook
from ..model.own_loop import cache_parts
from ..model.ranks import ranks_of
from ..model.registry import memory_for, warn_once
from . import continuous_batching as _continuous_batching
from . import manager_config
from .after_import import after_import, forget_import
from .call import Call, batch_of, current, first_rows, prepared, rows_per_prompt

REQUESTED = ("paged", NAME)
VARIABLE = "HF_PAGED_INSTALL"  # environment variable: options of `install` that the import uses

_lock = forks.lock()
_is_default = False  # calls that name no cache are paged


# -- replacements of GenerationMixin methods: functions of the original method and its arguments -------------------


def _generate(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
    requested = _option("cache_implementation", model, config, kwargs)
    asks = requested in REQUESTED
    if asks:
        _check_arguments(model, config, args, kwargs)
        cache_config = PagedConfig.coerce(_option("cache_config", model, config, kwargs))
        if kwargs.get("cache_config") is not None:
            kwargs["cache_config"] = cache_config.to_dict()
        if kwargs.get("cache_implementation") == "paged":
            # for "paged", transformers would hand the call to its continuous batching before any preparation
            kwargs["cache_implementation"] = NAME
        if isinstance(kwargs.get("streamer"), (list, tuple)):
            kwargs["streamer"] = RowStreamers(kwargs["streamer"], kwargs.get("attention_mask"))
    elif requested is None and not _is_default and _option("cache_config", model, config, kwargs) is not None:
        warn_once(
            model,
            "got a `cache_config` and no `cache_implementation`: transformers' own cache is used, and the config has "
            'no effect. Add cache_implementation="paged", or leave `cache_config` out',
        )
    prepared.set(None)
    _wrap_overrides(type(model))
    run = _run_untraced if asks or _is_default else _run
    return run(original, model, args, kwargs, asks)


def _run(original: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], asks: bool) -> Any:
    call = Call(model)
    if asks:
        call.ask(
            f"{type(model).__name__} prepares its cache in a way of its own",
            "Use a model that generates as transformers does",
        )
    with held(), call.running(), let_in():
        return original(model, *args, **kwargs)


_run_untraced = torch.compiler.disable(_run)  # a compiled function may call `generate`


def _check_arguments(
    model: Any, config: GenerationConfig | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises `ValueError` early for arguments that would fail after allocation, or with an error that names none."""
    ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
    if getattr(model, "main_input_name", None) == "input_ids" and not model.config.is_encoder_decoder:
        check_ids(ids)
    if config is not None and not isinstance(config, GenerationConfig):
        raise ValueError(f"`generation_config` is {shown(config)}: it must be a `GenerationConfig` or None")
    options = {} if config is None else vars(config)
    check_numbers({**options, **kwargs}, check_range=False)
    for name in ("logits_processor", "stopping_criteria"):
        as_list(name, kwargs.get(name))
    streamer = kwargs.get("streamer")
    for each in streamer if isinstance(streamer, (list, tuple)) else [streamer]:
        check_streamer(each)
    if streamer is not None and isinstance(ids, torch.Tensor):
        repeats = _option("num_return_sequences", model, config, kwargs) or 1
        check_streamed_rows(streamer, len(ids) * repeats, "pass a list of streamers, one a row")


def _option(name: str, model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> Any:
    """An option's value from the keyword, which may unset it, the config passed or the model's config, in this order;
    `None` if unset."""
    if name in kwargs:
        return kwargs[name]
    values = (getattr(source, name, None) for source in (config, getattr(model, "generation_config", None)))
    return next((value for value in values if value is not None), None)


def _prepare_cache(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    if (capture := capturing.get()) is not None and capture.model is model:
        return None  # no loop will use it
    arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
    generation_config, model_kwargs = arguments["generation_config"], arguments["model_kwargs"]
    call = current.get()
    passed = any(model_kwargs.get(name) is not None for name in compat.CACHE_NAMES)
    chosen = generation_config.cache_implementation
    is_default = _is_default and chosen is None and not passed and generation_config.use_cache is not False
    requested = chosen in REQUESTED or is_default
    config = PagedConfig.coerce(generation_config.cache_config) if requested else None
    if requested:
        # not "dynamic": assistants copy this config, and transformers refuses that value for them
        generation_config.cache_implementation = None
    result = original(model, *args, **kwargs)
    with held():
        if call is None or call.model is not model:
            call = Call(model)
            prepared.set(call)
        if config is not None and not passed:
            length = arguments.get("max_cache_length") or 0
            num_rows = (arguments.get("batch_size") or 1) * rows_per_prompt(generation_config)
            if call.is_running and (ranks := ranks_of(model)) is not None:
                call.stack.enter_context(ranks.alone())
            call.memory = memory = memory_for(model, config, [length] * num_rows if length else [])
            is_assistant = generation_config.is_assistant
            _swap(memory, length, num_rows, model_kwargs, is_assistant)
        parts = (part for name in compat.CACHE_NAMES for part in cache_parts(model_kwargs.get(name)))
        if caches := [part for part in parts if isinstance(part, PagedCache)]:
            call.use(caches, generation_config, is_built=not passed)
        elif requested:
            call.ask(*_why_not_paged(model, passed, generation_config, model_kwargs))
        if config is not None and config.batch_invariant and not call.built:
            raise not_invariant(model, call.reason)
    return result


def _why_not_paged(model: Any, passed: bool, config: GenerationConfig, model_kwargs: dict[str, Any]) -> tuple[str, str]:
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


def _swap(memory: PagedMemory, length: int, num_rows: int, model_kwargs: dict[str, Any], is_assistant: bool) -> None:
    """Replaces each `DynamicCache` that the model just built by a `PagedCache`, for rows of up to `length` tokens."""

    def paged(cache: Any, kind: str) -> Any:
        if type(cache) is not DynamicCache:
            return cache
        twin = PagedCache.from_empty(cache, memory, kind)
        if kind == "self":
            twin.reserve(num_rows * (length // memory.block_size + 1), num_rows)
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


def _prefill(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Computes rows that were expanded from one prompt once, where that gives the same results."""
    call, bound, first = current.get(), inspect.signature(original).bind(model, *args, **kwargs), None
    given = bound.arguments
    is_whole = given["generation_config"].prefill_chunk_size is None  # chunked prefill is left to the original
    if call is not None and call.model is model and call.caches and call.repeats > 1 and is_whole:
        first = _of_first_rows(given["input_ids"], given["model_kwargs"], call.repeats)
    if call is None or first is None or not _rows_are_independent(model):
        return original(model, *args, **kwargs)
    given["input_ids"], given["model_kwargs"] = ids, inputs = first
    outputs = original(*bound.args, **bound.kwargs)
    caches = [value for value in outputs.values() if isinstance(value, Cache)]  # the model may have created one
    for cache in caches or [value for value in inputs.values() if isinstance(value, Cache)]:
        # every cache layer can reorder its rows, which includes repeating one
        cache.reorder_cache(torch.arange(len(ids), device=ids.device).repeat_interleave(call.repeats))
    for name, value in outputs.items():
        if not isinstance(value, Cache):
            outputs[name] = _repeat(value, len(ids), call.repeats)
    call.details["prefills_shared"] = True
    return outputs


# Inputs whose rows are their first dimension in every model.
_ROW_INPUTS = {"attention_mask", "encoder_outputs", "inputs_embeds", "position_ids", "token_type_ids"}
_ROW_INPUTS |= {"decoder_attention_mask", "decoder_input_ids", "decoder_position_ids"}


def _of_first_rows(
    input_ids: torch.Tensor, model_kwargs: dict[str, Any], repeats: int
) -> tuple[torch.Tensor, dict[str, Any]] | None:
    """The inputs of every `repeats`-th row; `None` if the rows between differ or something is cached."""
    ids, inputs = first_rows(input_ids, repeats), dict(model_kwargs)
    for name, value in model_kwargs.items():
        if isinstance(value, Cache):
            if not all(isinstance(part, PagedCache) and part.is_empty for part in cache_parts(value)):
                return None
        elif value is not None and not isinstance(value, (bool, int, float, str)):  # scalars have no rows
            if name not in _ROW_INPUTS or (name.endswith("position_ids") and value.dim() != 2):
                return None
            inputs[name] = first_rows(value, repeats)
            if inputs[name] is None:
                return None
    return None if ids is None else (ids, inputs)


def _rows_are_independent(model: Any) -> bool:
    """Whether rows do not affect one another: no dropout, batch-wide experts, user code or per-row module state."""
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity") or getattr(config, "output_router_logits", False):
        return False
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return False
    return not any(
        module.training or has_foreign_hook(module) or "forward" in vars(module) or hasattr(module, "_setup_cache")
        for module in model.modules()
    )


def _repeat(value: Any, rows: int, repeats: int) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == rows:
        return value.repeat_interleave(repeats, dim=0)
    return tuple(_repeat(part, rows, repeats) for part in value) if isinstance(value, tuple) else value


def _expand_inputs(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    call = current.get()
    if call is not None and call.model is model:
        inputs = {name: value for name, value in kwargs.items() if name not in ("expand_size", "is_encoder_decoder")}
        call.note_inputs(inputs.pop("input_ids", None), inputs)
        expanded = original(model, *args, **kwargs)
        if compat.ENCODE_MEDIA is None and not model.config.is_encoder_decoder:
            call.swaps_pictures |= _swaps_pictures(kwargs, *expanded)
        return expanded
    return original(model, *args, **kwargs)


def _swaps_pictures(given: dict[str, Any], input_ids: Any, inputs: dict[str, Any]) -> bool:
    """Whether the expansion repeated each image by itself although rows have several images, as transformers 5.17 does:
    `[A, A, B, B]` for two rows of which each has the images `[A, B]`."""
    size, rows = given.get("expand_size", 1), given.get("input_ids")
    if size == 1 or not isinstance(rows, torch.Tensor):
        return False
    pairs = ((x, inputs.get(name)) for name, x in given.items() if isinstance(x, torch.Tensor) and x.dim())
    return any(
        len(x) != len(rows) and isinstance(now, torch.Tensor) and torch.equal(now, x.repeat_interleave(size, dim=0))
        for x, now in pairs
    )


def _decode(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    call = current.get()
    if (capture := capturing.get()) is not None and capture.model is model:
        arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
        return capture.add(LoopCall(original.__name__, arguments, None if call is None else call.unexpanded))
    call = prepared.get()
    running: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    if call is not None and call.model is model:
        prepared.set(None)
        running = call.running()
    else:
        call = current.get()
    with held(), running:
        if call is not None and call.model is model and call.built:
            arguments = inspect.signature(original).bind(model, *args, **kwargs).arguments
            if batch := batch_of(call, original.__name__, arguments):
                return batch.run()
            if isinstance(streamer := arguments.get("streamer"), RowStreamers):
                kwargs["stopping_criteria"] = ObservedCriteria(arguments["stopping_criteria"], streamer)
        with let_in():
            return original(model, *args, **kwargs)


def _encode_media(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    capture = capturing.get()
    if capture is None or capture.model is not model or model.config.is_encoder_decoder:
        return original(model, *args, **kwargs)
    return inspect.signature(original).bind(model, *args, **kwargs).arguments["model_kwargs"]


def _warn_of_padding(original: Callable[..., Any], model: Any, /, *args: Any, **kwargs: Any) -> Any:
    """Skips the warning in our steps, which have a mask or no padding: the check waits for the device."""
    return None if compat.attention_of(model.config) == NAME else original(model, *args, **kwargs)


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
"""By class and name of each replaced method: the original, if there was one, and the wrapper that replaced it."""


def _wrapper(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps a method, and what its decorators (`no_grad`, `deprecate_kwarg`) wrap: a caller who takes `generate` out of
    them gets ours."""

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
    """A method of a class as a function that takes the model first; transformers 5.17 has a static method."""
    found: Callable[..., Any] = getattr(owner, name)
    if not isinstance(inspect.getattr_static(owner, name), staticmethod):
        return found

    def method(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        return found(*args, **kwargs)

    own = inspect.signature(found)
    first = inspect.Parameter("model", inspect.Parameter.POSITIONAL_ONLY)
    method.__signature__ = own.replace(parameters=[first, *own.parameters.values()])  # type: ignore[attr-defined]
    return method


def _replace(owner: type, name: str, replacement: Callable[..., Any] | None = None) -> None:
    """For use within `_lock`."""
    wrapper = _wrapper(_method(owner, name), replacement or _REPLACEMENTS[name])
    _installed[owner, name] = (inspect.getattr_static(owner, name), wrapper)
    setattr(owner, name, wrapper)


def _add_to_peft(module: Any) -> None:
    """Adds the names of continuous batching to `PeftModel`, which passes them on to the model inside."""
    owner = module.PeftModel
    with _lock:
        for name in ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch"):
            if (ContinuousMixin, name) in _installed and (owner, name) not in _installed:
                wrapper = _continuous_batching.through_wrapper(name)
                _installed[owner, name] = (vars(owner).get(name), wrapper)
                setattr(owner, name, wrapper)


def _wrap_overrides(model_class: type) -> None:
    """Wraps the input expansion of classes that override it (Qwen2-VL on transformers 5.17), to note their inputs."""
    name = compat.EXPAND_INPUTS
    owner = next(each for each in model_class.__mro__ if name in vars(each))
    if (owner, name) not in _installed:
        with _lock:
            if _installed and (owner, name) not in _installed:
                _replace(owner, name)


def install(continuous_batching: bool | PagedConfig | Mapping[str, Any] = False, *, by_default: bool = False) -> None:
    """
    Makes `cache_implementation="paged"` and `attn_implementation="hf_paged"` work. Idempotent; run by the import, with
    the options that the environment variable HF_PAGED_INSTALL names (`python -m hf_paged run` writes it).

    Args:
        continuous_batching (`bool`, [`PagedConfig`] or `dict`): Also run `generate_batch`, `init_continuous_batching`
            and `continuous_batching_context_manager` of all models on a [`PagedEngine`]; a config passed here is their
            default. A later call without this option changes nothing of it.
        by_default (`bool`): Also make `generate` paged where neither the call nor a configuration names a
            `cache_implementation`, and no cache is passed. A later call without this option changes nothing of it.
    """
    global _is_default
    with _lock:
        if not _installed:
            interface.register()
            compat.allow_cache_implementation(NAME, True)
            for name in _REPLACEMENTS:
                _replace(PreTrainedModel if name == compat.WARN_OF_PADDING else GenerationMixin, name)
        _is_default |= by_default
        if continuous_batching is not False:
            manager_config.set_default(PagedConfig.coerce(None if continuous_batching is True else continuous_batching))
            for name, replacement in _continuous_batching.REPLACEMENTS.items():
                if (ContinuousMixin, name) not in _installed:
                    _replace(ContinuousMixin, name, replacement)
    if continuous_batching is not False:
        after_import("peft.peft_model", _add_to_peft)


def install_of_environment() -> None:
    """Runs `install` with the options that HF_PAGED_INSTALL names. Raises `ValueError` for unknown names."""
    allowed = inspect.signature(install).parameters.keys()
    names = [name for name in os.environ.get(VARIABLE, "").split(",") if name]
    if unknown := [name for name in names if name not in allowed]:
        raise ValueError(f"{VARIABLE} names {unknown}: it must be names among {', '.join(allowed)}, with commas")
    install(**dict.fromkeys(names, True))


def uninstall() -> None:
    """Undoes `install`. Raises `RuntimeError`, before any change, if another library has wrapped a method since."""
    global _is_default
    with _lock:
        for (owner, name), (_, wrapper) in _installed.items():
            if getattr(owner, name) is not wrapper:
                message = f"`{owner.__name__}.{name}` was replaced after hf_paged was installed: undo that first"
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
        compat.forget_attention(NAME)
        unwrap_expansions()
