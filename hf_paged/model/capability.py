"""How a model may be run: found out from what it is made of, then from what it computes; no list of names."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

from .. import forks
from ..attention.switch import NAME, foreign_attention, model_attention, switchable_configs
from ..cache.layers import PagedHybridLayer, PagedLayer, PagedSlidingWindowLayer
from ..cache.memory import autocast_dtype
from ..cache.packed import EMPTY_LAYERS
from ..cache.paged_cache import PagedCache
from ..interrupts import let_in
from ..locks import step_lock
from .self_check import (
    PREPARE,
    ForwardFailedError,
    MakeRectangles,
    MakeRunner,
    Sides,
    input_check,
    self_check,
    side_check,
)

LOOP_CONDITION = "_has_unfinished_sequences"
# Where these are not transformers' own, a forward may get inputs that the engine does not know of, or the loop end at
# another time.
STOCK_METHODS = ("_update_model_kwargs_for_generation", "_prefill", LOOP_CONDITION)

_lock = forks.lock()
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, str | None]] = weakref.WeakKeyDictionary()
_sides: weakref.WeakKeyDictionary[PreTrainedModel, tuple[Any, Sides]] = weakref.WeakKeyDictionary()


class Parts(NamedTuple):
    """What a model is made of at this moment. Modules may change at any time, so every call reads it again."""

    modules: list[tuple[str, nn.Module]]
    configs: list[PreTrainedConfig]  # that a call switches to our attention


def _parts(model: PreTrainedModel) -> Parts:
    modules = list(model.named_modules())
    return Parts(modules, switchable_configs(module for _, module in modules))


def packable(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRunner) -> str | None:
    """
    Why a packed forward through `model` would not give each sequence what it gets alone, in one line; `None` if it
    does.

    Args:
        cache ([`PagedCache`]): One built for the model that holds nothing; it is only looked at.
        make_runner (`Callable`): What runs packed steps, `batching.runner.PackedRunner`.
    """
    parts = _parts(model)
    if reason := _visible_obstacle(model, cache, parts):
        return reason
    # what is above is cheap and may change at any time; what follows costs seven short forwards, so it is done once
    layers = tuple(getattr(layer, "sliding_window", None) for layer in cache.layers)
    key = (_fingerprint(model, parts), layers)
    with _lock:
        found = _verdicts.get(model)
    if found is None or found[0] != key:
        try:
            with step_lock(model), let_in():
                found = (key, input_check(model, cache) or self_check(model, cache, make_runner))
        except ForwardFailedError as error:  # it may have been something passing: the next call checks again
            return str(error)
        with _lock:
            _verdicts[model] = found
    return found[1]


def side_by_side(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRectangles) -> Sides:
    """
    Which rows of `model` give side by side what each gives alone.

    Args:
        cache ([`PagedCache`]): One built for the model that holds nothing; it is only looked at.
        make_runner (`Callable`): Makes what runs them, `batching.assembly.make_rectangles`.
    """
    parts = _parts(model)
    checks = (_wrong_layers, _own_methods, _watched, _spread_out, _mixes_tokens)
    if any(check(model, cache, parts) for check in checks):
        return Sides(prompts=False, rows=False)
    key = (_fingerprint(model, parts), tuple(map(type, cache.layers)))
    with _lock:
        found = _sides.get(model)
    if found is None or found[0] != key:
        try:
            with step_lock(model), let_in():
                found = (key, side_check(model, cache, make_runner))
        except ForwardFailedError:  # it may have been something passing: the next call checks again
            return Sides(prompts=False, rows=False)
        with _lock:
            _sides[model] = found
    return found[1]


def visible_obstacle(model: PreTrainedModel, cache: PagedCache) -> str | None:
    """The part of `packable` that only looks at what the model is made of, on whatever device."""
    return _visible_obstacle(model, cache, _parts(model))


def _visible_obstacle(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    for check in (_wrong_kind, _wrong_cache, _wrong_methods, _watched, _spread_out, _mixes_tokens):
        if reason := check(model, cache, parts):
            return reason
    return None


def _fingerprint(model: PreTrainedModel, parts: Parts) -> tuple[Any, ...]:
    """
    Changes when a module is replaced or added (an adapter), a function of a module's class is replaced, a module's
    attribute that is a bool or a string is another, or attention, dtype, device or mode is.
    """
    modules = tuple((type(module), module.training) for _, module in parts.modules)
    switches = tuple(each for _, module in parts.modules for each in vars(module).values() if type(each) in (bool, str))
    classes = dict.fromkeys(base for kind, _ in modules for base in kind.__mro__)
    functions = tuple(each for base in classes for each in vars(base).values() if isinstance(each, FunctionType))
    implementations = tuple(model_attention(config) for config in parts.configs)
    autocast = autocast_dtype(model.device)
    prepare = getattr(type(model), PREPARE)
    return modules, switches, functions, implementations, model.dtype, autocast, model.device, prepare


# -- what the model is made of ------------------------------------------------------------------------------------


def _wrong_kind(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model has an encoder"
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in parameters]
    return f"its forward takes no {' and no '.join(missing)}" if missing else None


def _wrong_cache(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    if cache.layer_class_to_replicate is not None or not cache.layers:
        return "its cache does not know its layers before the first forward"
    foreign = {type(layer) for layer in cache.layers if not isinstance(layer, EMPTY_LAYERS)}
    foreign -= {PagedLayer, PagedSlidingWindowLayer}
    if foreign:
        names = ", ".join(sorted(layer.__name__ for layer in foreign))
        return f"its cache has layers that hold more than keys and values: {names}"
    return None


def is_stock(model: PreTrainedModel, name: str) -> bool:
    """Whether a method of the model is transformers' own."""
    return getattr(getattr(model, name, None), "__func__", None) is getattr(GenerationMixin, name)


def _wrong_layers(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    """Rows join and leave: each layer must be one whose rows can be told apart."""
    if cache.layer_class_to_replicate is not None or not model._supports_default_dynamic_cache():
        return "its cache does not know its layers before the first forward"
    known = (*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer, PagedHybridLayer, LinearAttentionLayer)
    foreign = {type(layer).__name__ for layer in cache.layers if type(layer) not in known}
    return f"its cache has layers of its own: {', '.join(sorted(foreign))}" if foreign or not cache.layers else None


def _own_methods(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    for name in STOCK_METHODS:
        if not is_stock(model, name):
            return f"it has a `{name}` of its own"
    return f"its `{PREPARE}` was replaced" if PREPARE in vars(model) else None


def _wrong_methods(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    if reason := _own_methods(model, cache, parts):
        return reason
    loaded_with_ours = model.config.get_text_config(decoder=True)._attn_implementation_internal == NAME
    if not parts.configs and not loaded_with_ours:
        return "its attention does not go through the attention interface"
    return foreign_attention(module for _, module in parts.modules)


def _watched(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    """Hooks would see packed tokens where they expect rows."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "there are global forward hooks"
    for name, module in parts.modules:
        if module._compiled_call_impl is not None or "forward" in vars(module):
            return f"the forward of {name or 'the model'} is compiled or replaced"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if hasattr(module, "_hf_hook") or not all(map(_is_capturing_hook, hooks)):
            return f"there are forward hooks on {name or 'the model'}"
    return None


def _is_capturing_hook(hook: Callable[..., Any]) -> bool:
    """transformers' own, left on the modules after a call with `output_hidden_states`; idle in calls without."""
    return getattr(hook, "__module__", "") == "transformers.utils.output_capturing"


def _spread_out(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    devices = {
        tensor.device
        for _, module in parts.modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    return f"its weights are on several devices: {', '.join(sorted(map(str, devices)))}" if len(devices) > 1 else None


def _mixes_tokens(model: PreTrainedModel, cache: PagedCache, parts: Parts) -> str | None:
    """What one token gets must not depend on which others are in the batch, nor on chance."""
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity"):
        return "its experts have a capacity for the whole batch"
    if getattr(config, "output_router_logits", False):
        return "`output_router_logits` computes a loss over the whole batch"
    for _, module in parts.modules:
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind == "longrope" or "dynamic" in str(kind):
                return f"its rotary embedding ({kind}) depends on the longest position in the batch"
        if module.training and (source := _chance(module)):
            return f"it is in training mode with {source}"
    return None


def _chance(module: nn.Module) -> str | None:
    """What of a module in training mode draws random numbers."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p > 0 else None
    for name, value in vars(module).items():
        random = any(word in name for word in ("dropout", "drop_path", "layerdrop", "jitter"))
        if random and isinstance(value, (int, float)) and value > 0:
            return name
    return None
