"""The door: what a `generate` call with `cache_implementation="paged"` becomes."""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
import weakref
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache, EncoderDecoderCache
from transformers.generation import configuration_utils
from transformers.generation.utils import GenerationMixin
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .attention import interface
from .attention.latent import unwrap_expansions, wrap_expansion
from .attention.masks import PagedMask, mask_observer
from .attention.switch import NAME, use_paged_attention
from .cache.memory import MemoryStats, PagedMemory
from .cache.paged_cache import PagedCache
from .config import PagedConfig
from .sharing import prefill_once

logger = logging.getLogger(__name__)

REQUESTED = ("paged", NAME)
CACHE_NAMES = ("past_key_values", "cache_params")


@dataclass(frozen=True)
class Route:
    """
    How the last `generate` call of a model went.

    Args:
        road (`str`): `"hf_loop"`: transformers' decoding loop on a paged cache; `"plain"`: without one.
        reason (`str`): Why this road.
        in_place (`bool`): Every decode step read its keys and values through block tables, gathering none.
        latent (`bool`): ... and did so on the latents of multi-head latent attention.
        prefills_shared (`bool`): Rows expanded from one prompt were computed once.
    """

    road: str
    reason: str
    in_place: bool = False
    latent: bool = False
    prefills_shared: bool = False


class _Call:
    """What one `generate` call has built and switched, to be undone when it ends."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.stack = contextlib.ExitStack()
        self.built: list[PagedCache] = []
        self.caches: list[PagedCache] = []
        self.repeats = 1
        self.road, self.reason = "plain", "cache_implementation is not 'paged'"
        self.is_switched = False
        self.prefills_shared = False

    def use(self, caches: list[PagedCache]) -> None:
        """Attention of the model reads `caches` in place from here on."""
        self.caches += caches
        if self.is_switched:
            return
        self.is_switched = True
        for module in self.model.modules():
            if "expand_kv" in vars(type(module)):
                wrap_expansion(type(module))
        self.stack.enter_context(use_paged_attention(self.model))
        token = mask_observer.set(self.observe)
        self.stack.callback(mask_observer.reset, token)

    def observe(self, mask: PagedMask) -> None:
        """The model's own causal mask says which leading positions are padding: those need not be stored."""
        if mask.pattern is None or not mask.pattern.causal or mask.arguments.get("q_offset", 0) != 0:
            return
        columns = mask.visible_columns()
        if columns is None or any(end != mask.arguments["kv_length"] for end in columns[1]):
            return
        for cache in self.built:
            if cache.kind == "self" and cache.is_empty:
                cache.expect_padding(columns[0])

    def route(self) -> Route:
        counters = [cache.counters for cache in self.caches]
        in_place = sum(c.in_place for c in counters)
        return Route(
            self.road,
            self.reason,
            in_place=in_place > 0 and not any(c.gathered for c in counters),
            latent=any(c.latent for c in counters),
            prefills_shared=self.prefills_shared,
        )


_current: ContextVar[_Call | None] = ContextVar("hf_paged_call", default=None)
_lock = threading.Lock()
_memories: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, PagedMemory]] = weakref.WeakKeyDictionary()
_routes: weakref.WeakKeyDictionary[PreTrainedModel, Route] = weakref.WeakKeyDictionary()


def _memory_for(model: PreTrainedModel, config: PagedConfig) -> PagedMemory:
    """The memory that hangs on `model`, made anew when block size, budget, dtype or device are not what they were."""
    key = (config, model.dtype, model.device)
    with _lock:
        found = _memories.get(model)
        if found is None or found[0] != key:
            found = _memories[model] = (key, PagedMemory(config))
        return found[1]


# -- the wrapped methods of GenerationMixin -----------------------------------------------------------------------


def _wrap_generate(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config", args[1] if len(args) > 1 else None)
        if _requested(self, config, kwargs):
            kwargs = _with_validated_config(self, config, kwargs)
        call = _Call(self)
        token = _current.set(call)
        try:
            with call.stack:
                result = original(self, *args, **kwargs)
        except BaseException:
            # a traceback keeps the frames alive that hold these caches: do not wait for it
            for cache in call.built:
                cache.free()
            raise
        finally:
            _current.reset(token)
            _routes[self] = call.route()
            logger.debug("%s.generate: %s", type(self).__name__, _routes[self])
        return result

    return generate


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
        given = next((c.cache_config for c in (config, own) if getattr(c, "cache_config", None) is not None), None)
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
        call = _current.get()
        requested = generation_config.cache_implementation in REQUESTED
        config = PagedConfig.coerce(generation_config.cache_config) if requested else None
        passed = {id(model_kwargs.get(name)) for name in CACHE_NAMES if model_kwargs.get(name) is not None}
        if requested:
            # not "dynamic": assistants copy this config, and transformers refuses that value for them
            generation_config.cache_implementation = None
        result = original(self, generation_config, model_kwargs, *args, **kwargs)
        if call is None or call.model is not self:
            call = None
        if passed:
            caches = [cache for name in CACHE_NAMES for cache in _paged_parts(model_kwargs.get(name))]
            if call is not None and caches and not generation_config.output_attentions:
                call.use(caches)
            if call is not None and (caches or requested):
                call.road = "hf_loop" if caches else "plain"
                call.reason = f"the caller's {'PagedCache' if caches else 'own cache'} is used"
        elif config is not None:
            built = _swap(self, config, generation_config, model_kwargs, args, kwargs)
            if call is not None:
                _record(call, built, generation_config)
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
) -> list[PagedCache]:
    """Puts a `PagedCache` for each `DynamicCache` that the model just built, and returns them."""
    memory = _memory_for(model, config)
    names = ("generation_mode", "batch_size", "max_cache_length")
    values = {**dict(zip(names, args)), **kwargs}
    repeats = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
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
    return [part for name in CACHE_NAMES for part in _paged_parts(model_kwargs.get(name))]


def _record(call: _Call, built: list[PagedCache], generation_config: GenerationConfig) -> None:
    if not built:
        call.reason = "use_cache is False" if generation_config.use_cache is False else "the model has a cache of its own"
        return
    call.built += built
    call.repeats = max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
    call.road, call.reason = "hf_loop", "paged cache under the model's own decoding loop"
    if generation_config.output_attentions:
        call.caches += built
        call.reason += "; keys and values are gathered, since only the model's own attention returns its weights"
    else:
        call.use(built)


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

        call = _current.get()
        if call is not None and call.model is self and call.built:
            outputs = prefill_once(prefill, self, input_ids, model_kwargs, call.repeats)
            if outputs is not None:
                call.prefills_shared = True
                return outputs
        return prefill(input_ids, model_kwargs)

    return _prefill


# -- public -------------------------------------------------------------------------------------------------------

_WRAPPERS = {
    "generate": _wrap_generate,
    "_prepare_cache_for_generation": _wrap_prepare_cache,
    "_prefill": _wrap_prefill,
}
_installed: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {}


def install() -> None:
    """Makes `cache_implementation="paged"` and `attn_implementation="hf_paged"` work. Idempotent; run by the import."""
    with _lock:
        if _installed:
            return
        interface.register()
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS += (NAME,)
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
                raise RuntimeError(f"`GenerationMixin.{name}` was replaced after hf_paged was installed: undo that first")
        while _installed:
            name, (original, _) = _installed.popitem()
            setattr(GenerationMixin, name, original)
        known = configuration_utils.ALL_CACHE_IMPLEMENTATIONS
        configuration_utils.ALL_CACHE_IMPLEMENTATIONS = tuple(value for value in known if value != NAME)
        for functions in (ALL_ATTENTION_FUNCTIONS, ALL_MASK_ATTENTION_FUNCTIONS):
            functions._global_mapping.pop(NAME, None)
        unwrap_expansions()


def _memories_of(model: Any) -> list[PagedMemory]:
    """Memories of a model and, for wrappers such as PEFT's, of the models inside it."""
    with _lock:
        modules = [module for module in model.modules() if module in _memories]
        return [_memories[module][1] for module in modules]


def free(model: Any) -> None:
    """Gives every byte of the model's pool back. Caches that a caller still holds keep theirs until they are collected."""
    with _lock:
        for module in [module for module in model.modules() if module in _memories]:
            del _memories[module]


def last_route(model: Any) -> Route | None:
    """How the model's last `generate` call went and why, or `None` before the first."""
    routes = [_routes[module] for module in model.modules() if module in _routes]
    return routes[0] if routes else None


def memory_stats(model: Any, reset: bool = False) -> MemoryStats:
    """
    What the model's pool holds.

    Args:
        reset (`bool`, defaults to `False`): Count the peaks anew from now on; the figures returned are those before.
    """
    memories = _memories_of(model)
    if not memories:
        return MemoryStats()
    stats = memories[0].stats()
    if reset:
        memories[0].reset_peak()
    return stats


def check_integrity(model: Any) -> None:
    """Raises `AssertionError` unless the model's pool agrees with the block tables that are alive."""
    for memory in _memories_of(model):
        memory.check_integrity()
