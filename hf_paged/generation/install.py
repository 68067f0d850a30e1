"""The entry: what a `generate` call with `cache_implementation="paged"` becomes."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.generation.utils import GenerationMixin

from .. import compat, forks
from ..attention import interface
from ..attention.latent import unwrap_expansions
from ..attention.switch import NAME
from ..batching.arguments import as_list, check_ids, check_numbers, check_streamed_rows, check_streamer, shown
from ..batching.decoding.streamers import ObservedCriteria, RowStreamers
from ..cache.paged_cache import PagedCache
from ..config import PagedConfig
from ..interrupts import held, let_in
from ..model.registry import memory_for
from .batch import batch_of
from .call import CACHE_NAMES, Call, current, prepared, rows_per_prompt
from .sharing import prefill_once

REQUESTED = ("paged", NAME)


_lock = forks.lock()


# -- the wrapped methods of GenerationMixin -----------------------------------------------------------------------


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        if _requested(self, config, kwargs):
            _check_arguments(self, config, args, kwargs)
            kwargs = _with_validated_config(self, config, kwargs)
            if isinstance(kwargs.get("streamer"), (list, tuple)):
                kwargs["streamer"] = RowStreamers(kwargs["streamer"], kwargs.get("attention_mask"))
        prepared.set(None)
        with held(), Call(self).running(), let_in():
            return original(self, *args, **kwargs)

    return generate


def _check_arguments(
    model: Any, config: GenerationConfig | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> None:
    """Raises `ValueError` on what would fail once memory is taken, or with an error that names no argument."""
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
        configs = (config, getattr(model, "generation_config", None))
        own = (getattr(each, "num_return_sequences", None) for each in configs)
        repeats = next(filter(None, (kwargs.get("num_return_sequences"), *own)), 1)
        check_streamed_rows(streamer, len(ids) * repeats, "pass a list of streamers, one a row")


def _wrap_decoding(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def decode(self: Any, *args: Any, **kwargs: Any) -> Any:
        call = prepared.get()
        context: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if call is not None and call.model is self:
            prepared.set(None)
            context = call.running()
        else:
            call = current.get()
        with held(), context:
            if call is not None and call.model is self and call.built:
                arguments = inspect.signature(original).bind(self, *args, **kwargs).arguments
                batch = batch_of(call, original.__name__, arguments)
                if batch is not None:
                    return batch.run()
                streamer = arguments.get("streamer")
                if isinstance(streamer, RowStreamers):
                    kwargs["stopping_criteria"] = ObservedCriteria(arguments["stopping_criteria"], streamer)
            with let_in():
                return original(self, *args, **kwargs)

    return decode


def _requested(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> bool:
    """Whether the keyword, the config passed or the model's own config asks for paged, in this order."""
    for value in (
        kwargs.get("cache_implementation"),
        getattr(config, "cache_implementation", None),
        getattr(getattr(model, "generation_config", None), "cache_implementation", None),
    ):
        if value is not None:
            return value in REQUESTED
    return False


def _with_validated_config(model: Any, config: GenerationConfig | None, kwargs: dict[str, Any]) -> dict[str, Any]:
    kwargs = dict(kwargs)
    given = kwargs.get("cache_config")
    if given is None:
        own = getattr(model, "generation_config", None)
        given = next((c.cache_config for c in (config, own) if c is not None and c.cache_config is not None), None)
    checked = PagedConfig.coerce(given)
    if kwargs.get("cache_config") is not None:
        kwargs["cache_config"] = checked.to_dict()
    if kwargs.get("cache_implementation") == "paged":
        # under its own name, transformers would hand the call to its continuous batching before any preparation
        kwargs["cache_implementation"] = NAME
    return kwargs


def _wrap_prepare_cache(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prepare_cache_for_generation(
        self: Any, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any
    ) -> Any:
        call = current.get()
        requested = generation_config.cache_implementation in REQUESTED
        config = PagedConfig.coerce(generation_config.cache_config) if requested else None
        passed = any(model_kwargs.get(name) is not None for name in CACHE_NAMES)
        if requested:
            # not "dynamic": assistants copy this config, and transformers refuses that value for them
            generation_config.cache_implementation = None
        result = original(self, generation_config, model_kwargs, *args, **kwargs)
        with held():
            if call is None or call.model is not self:
                call = Call(self)
                prepared.set(call)
            if config is not None and not passed:
                _swap(self, config, generation_config, model_kwargs, args, kwargs)
            caches = [part for name in CACHE_NAMES for part in _paged_parts(model_kwargs.get(name))]
            if caches:
                call.use(caches, generation_config, is_built=not passed)
            elif passed and requested:
                call.reason = "the caller's own cache is used"
            elif requested:
                call.reason = (
                    "use_cache is False" if generation_config.use_cache is False else "the model has a cache of its own"
                )
        return result

    return _prepare_cache_for_generation


def _paged_parts(cache: Any) -> list[PagedCache]:
    if isinstance(cache, EncoderDecoderCache):
        return [*_paged_parts(cache.self_attention_cache), *_paged_parts(cache.cross_attention_cache)]
    return [cache] if isinstance(cache, PagedCache) else []


def _swap(
    model: Any,
    config: PagedConfig,
    generation_config: GenerationConfig,
    model_kwargs: dict[str, Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    """Puts a `PagedCache` for each `DynamicCache` that the model just built."""
    memory = memory_for(model, config)
    names = ("generation_mode", "batch_size", "max_cache_length")
    values = {**dict(zip(names, args)), **kwargs}
    repeats = rows_per_prompt(generation_config)
    tokens = values.get("max_cache_length") or 0
    num_blocks = (values.get("batch_size") or 1) * repeats * (tokens // config.block_size + 1)

    def paged(cache: Any, kind: str) -> Any:
        if type(cache) is not DynamicCache:
            return cache
        twin = PagedCache.from_empty(cache, memory, kind)
        if kind == "self":
            twin.reserve(num_blocks)
        if generation_config.is_assistant:
            twin.activate_past_recording()
        return twin

    for name in CACHE_NAMES:
        cache = model_kwargs.get(name)
        if isinstance(cache, EncoderDecoderCache):
            cache.self_attention_cache = paged(cache.self_attention_cache, "self")
            cache.cross_attention_cache = paged(cache.cross_attention_cache, "cross")
        elif cache is not None:
            model_kwargs[name] = paged(cache, "self")


def _wrap_prefill(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def _prefill(
        self: Any,
        input_ids: torch.Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, Any],
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        def prefill(ids: torch.Tensor, inputs: dict[str, Any]) -> Any:
            return original(self, ids, generation_config, inputs, *args, **kwargs)

        call = current.get()
        if call is not None and call.model is self and call.caches:
            outputs = prefill_once(prefill, self, input_ids, model_kwargs, call.repeats)
            if outputs is not None:
                call.prefills_shared = True
                return outputs
        return prefill(input_ids, model_kwargs)

    return _prefill


# -- public -------------------------------------------------------------------------------------------------------

_WRAPPERS = {
    "generate": _wrap_generate,
    compat.PREPARE_CACHE: _wrap_prepare_cache,
    compat.PREFILL: _wrap_prefill,
    compat.SAMPLE: _wrap_decoding,
    compat.BEAM_SEARCH: _wrap_decoding,
    compat.ASSISTED_DECODING: _wrap_decoding,
}
_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install() -> None:
    """Makes `cache_implementation="paged"` and `attn_implementation="hf_paged"` work. Idempotent; run by the import."""
    with _lock:
        if _installed:
            return
        interface.register()
        compat.add_cache_implementation(NAME)
        for name, wrap in _WRAPPERS.items():
            original = getattr(GenerationMixin, name)
            wrapper = wrap(original)
            _installed[name] = (original, wrapper)
            setattr(GenerationMixin, name, wrapper)


def uninstall() -> None:
    """
    Undoes `install`. Raises `RuntimeError`, having changed nothing, if another library has wrapped `generate` since.
    """
    with _lock:
        for name, (_, wrapper) in _installed.items():
            if getattr(GenerationMixin, name) is not wrapper:
                raise RuntimeError(
                    f"`GenerationMixin.{name}` was replaced after hf_paged was installed: undo that first"
                )
        while _installed:
            name, (original, _) = _installed.popitem()
            setattr(GenerationMixin, name, original)
        compat.remove_cache_implementation(NAME)
        compat.forget_attention(NAME)
        unwrap_expansions()
