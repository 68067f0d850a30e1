"""How a model may be run: found out from what it is made of, then from what it computes; no list of names."""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Hashable
from typing import Any, TypeVar, cast

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

from .. import compat, forks
from ..attention.switch import NAME, foreign_attention
from ..cache.layers import PagedHybridLayer, PagedLayer, PagedSlidingWindowLayer
from ..cache.packed import EMPTY_LAYERS
from ..cache.paged_cache import PagedCache
from ..interrupts import let_in
from ..locks import step_lock
from .self_check import (
    NO_SIDES,
    PREPARE,
    ForwardFailedError,
    MakeRectangles,
    MakeRunner,
    Sides,
    input_check,
    self_check,
    side_check,
)
from .state import ModelState
from .walk import only_looks

Check = Callable[[PreTrainedModel, PagedCache, ModelState], str | None]
Verdict = TypeVar("Verdict")

# Where these are not transformers' own, a forward may get inputs that the engine does not know of, or the loop end at
# another time.
STOCK_METHODS = (compat.UPDATE_INPUTS, compat.PREFILL, compat.LOOP_CONDITION)

_lock = forks.lock()
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[str, tuple[Hashable, Any]]] = weakref.WeakKeyDictionary()


def packable(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRunner) -> str | None:
    """
    Why a packed forward through `model` would not give each sequence what it gets alone, in one line; `None` if it
    does.

    Args:
        cache ([`PagedCache`]): One built for the model that holds nothing; it is only looked at.
        make_runner (`Callable`): What runs packed steps, `batching.execution.packed.PackedRunner`.
    """
    state = ModelState(model)
    if reason := _visible_reason(_PACKED, model, cache, state):
        return reason
    key = state.code(), tuple(getattr(layer, "sliding_window", None) for layer in cache.layers)
    try:
        return _computed(
            "packed", model, key, lambda: input_check(model, cache) or self_check(model, cache, make_runner)
        )
    except ForwardFailedError as error:
        return str(error)


def side_by_side(model: PreTrainedModel, cache: PagedCache, make_runner: MakeRectangles) -> Sides:
    """
    Which rows of `model` give side by side what each gives alone.

    Args:
        cache ([`PagedCache`]): One built for the model that holds nothing; it is only looked at.
        make_runner (`Callable`): Makes what runs them, `batching.factory.make_rectangles`.
    """
    state = ModelState(model)
    if _visible_reason(_SIDE_BY_SIDE, model, cache, state):
        return NO_SIDES
    key = state.code(), tuple(map(type, cache.layers))
    try:
        return _computed("side by side", model, key, lambda: side_check(model, cache, make_runner))
    except ForwardFailedError:
        return NO_SIDES


def _visible_reason(
    checks: tuple[Check, ...], model: PreTrainedModel, cache: PagedCache, state: ModelState
) -> str | None:
    return next(filter(None, (check(model, cache, state) for check in checks)), None)


def _computed(name: str, model: PreTrainedModel, key: Hashable, check: Callable[[], Verdict]) -> Verdict:
    """
    What several short forwards tell, once for a model that is what `key` says. Raises `ForwardFailedError` for what
    may be something passing: the next call checks again.
    """
    with _lock:
        known, verdict = _verdicts.setdefault(model, {}).get(name, (None, None))
    if known != key:
        with step_lock(model), let_in():
            verdict = check()
        with _lock:
            _verdicts[model][name] = key, verdict
    return cast(Verdict, verdict)


# -- what the model is made of ------------------------------------------------------------------------------------


def _wrong_kind(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    if getattr(model.config, "is_encoder_decoder", False):
        return "the model has an encoder"
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in parameters]
    return f"its forward takes no {' and no '.join(missing)}" if missing else None


def _wrong_cache(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
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


def _wrong_layers(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    """Rows join and leave: each layer must be one whose rows can be told apart."""
    if cache.layer_class_to_replicate is not None or not compat.supports_dynamic_cache(model):
        return "its cache does not know its layers before the first forward"
    known = (*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer, PagedHybridLayer, LinearAttentionLayer)
    foreign = {type(layer).__name__ for layer in cache.layers if type(layer) not in known}
    return f"its cache has layers of its own: {', '.join(sorted(foreign))}" if foreign or not cache.layers else None


def _own_methods(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    for name in STOCK_METHODS:
        if not is_stock(model, name):
            return f"it has a `{name}` of its own"
    return f"its `{PREPARE}` was replaced" if PREPARE in vars(model) else None


def _wrong_methods(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    if reason := _own_methods(model, cache, state):
        return reason
    loaded_with_ours = compat.attention_of(model.config.get_text_config(decoder=True)) == NAME
    if not state.configs and not loaded_with_ours:
        return "its attention does not go through the attention interface"
    return _foreign(model, cache, state)


def _foreign(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    """Functions of the user's own are called as often as plain calls them, with the rows that it would give them."""
    return foreign_attention(module for _, module in state.modules)


def _watched(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    """Hooks would see packed tokens where they expect rows."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        return "there are global forward hooks"
    for name, module in state.modules:
        if module._compiled_call_impl is not None or "forward" in vars(module):
            return f"the forward of {name or 'the model'} is compiled or replaced"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if hasattr(module, "_hf_hook") or not all(map(only_looks, hooks)):
            return f"there are forward hooks on {name or 'the model'}"
    return None


def _spread_out(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    devices = {
        tensor.device
        for _, module in state.modules
        for tensor in (*module._parameters.values(), *module._buffers.values())
        if tensor is not None
    }
    return f"its weights are on several devices: {', '.join(sorted(map(str, devices)))}" if len(devices) > 1 else None


def _mixes_tokens(model: PreTrainedModel, cache: PagedCache, state: ModelState) -> str | None:
    """What one token gets must not depend on which others are in the batch, nor on chance."""
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity"):
        return "its experts have a capacity for the whole batch"
    if getattr(config, "output_router_logits", False):
        return "`output_router_logits` computes a loss over the whole batch"
    for _, module in state.modules:
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


_PACKED: tuple[Check, ...] = (_wrong_kind, _wrong_cache, _wrong_methods, _watched, _spread_out, _mixes_tokens)
_SIDE_BY_SIDE: tuple[Check, ...] = (_wrong_layers, _own_methods, _foreign, _watched, _spread_out, _mixes_tokens)
