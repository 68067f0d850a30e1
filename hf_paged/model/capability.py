"""How a model may be run: found out from what it is made of, then from what it computes; no list of names."""

from __future__ import annotations

import inspect
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from typing import Any

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

from .. import compat, forks
from ..attention.switch import NAME, foreign_attention, model_attention, switchable_configs
from ..cache.layers import EMPTY_LAYERS, PagedHybridLayer, PagedLayer, PagedSlidingWindowLayer
from ..cache.memory import autocast_dtype
from ..cache.paged_cache import PagedCache
from ..interrupts import let_in, step_lock
from .self_check import ONE_BY_ONE, ForwardFailedError, Layout, MakeRectangles, MakeRunner, self_check, side_check
from .state import is_idle_hook

Modules = list[tuple[str, nn.Module]]  # of a model, by name
_Reasons = Callable[[PreTrainedModel, PagedCache, Modules], Iterator[str]]

_lock = forks.lock()
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[Any, tuple[Hashable, Any]]] = weakref.WeakKeyDictionary()


def choose_layout(
    model: PreTrainedModel, cache: PagedCache, make_packed: MakeRunner, make_rectangles: MakeRectangles
) -> Layout:
    """
    The best layout in which `model` gives each sequence what it gets alone; `cache`, built for it and empty, is only
    looked at. What runs the layouts is made by the other two, as `batching.factory` has them.
    """
    reason = _find(self_check, _packed_reasons, model, cache, make_packed)
    if reason is None:
        return Layout()
    found = _find(side_check, _side_reasons, model, cache, make_rectangles)
    return (found if isinstance(found, Layout) else ONE_BY_ONE)._replace(unsupported_reason=reason)


def _find(check: Callable[..., Any], reasons: _Reasons, model: PreTrainedModel, cache: PagedCache, make: Any) -> Any:
    """A reason why not, or else what `check` tells by several short forwards, once for a model that is what it is."""
    modules = list(model.named_modules())
    if reason := next(reasons(model, cache, modules), None):
        return reason
    layers = tuple((type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers)
    key = layers, _code(model, modules)
    with _lock:
        known, verdict = _verdicts.setdefault(model, {}).get(check, (None, None))
    if known != key:
        try:
            with step_lock(model), let_in():
                verdict = check(model, cache, make)
        except ForwardFailedError as error:  # it may be something passing: the next call checks again
            return str(error)
        with _lock:
            _verdicts[model][check] = key, verdict
    return verdict


def _code(model: PreTrainedModel, modules: Modules) -> Hashable:
    """
    What a forward computes but for the numbers in it, as far as it can be told in a millisecond. Another when a module
    is replaced or added (an adapter), a function of a module's class is replaced, a module's attribute that is a bool
    or a string is another, or attention, dtype, autocast, device or mode is.
    """
    kinds = tuple((type(module), module.training) for _, module in modules)
    switches = tuple(x for _, module in modules for x in vars(module).values() if type(x) in (bool, str))
    classes = dict.fromkeys(base for kind, _ in kinds for base in kind.__mro__)
    functions = tuple(x for base in classes for x in vars(base).values() if isinstance(x, types.FunctionType))
    attention = tuple(map(model_attention, switchable_configs(module for _, module in modules)))
    return kinds, switches, functions, attention, model.dtype, autocast_dtype(model.device), model.device


# -- what the model is made of ------------------------------------------------------------------------------------


def _packed_reasons(model: PreTrainedModel, cache: PagedCache, modules: Modules) -> Iterator[str]:
    if getattr(model.config, "is_encoder_decoder", False):
        yield "the model has an encoder"
    parameters = inspect.signature(model.forward).parameters
    missing = [name for name in ("position_ids", "past_key_values") if name not in parameters]
    if missing:
        yield f"its forward takes no {' and no '.join(missing)}"
    if cache.layer_class_to_replicate is not None or not cache.layers:
        yield "its cache does not know its layers before the first forward"
    foreign = {type(layer) for layer in cache.layers} - {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer}
    if foreign:
        names = ", ".join(sorted(layer.__name__ for layer in foreign))
        yield f"its cache has layers that hold more than keys and values: {names}"
    yield from _reasons_of_methods(model)
    is_loaded_with_ours = compat.attention_of(model.config.get_text_config(decoder=True)) == NAME
    if not is_loaded_with_ours and not switchable_configs(module for _, module in modules):
        yield "its attention does not go through the attention interface"
    yield from _reasons_of_modules(model, modules)


def _side_reasons(model: PreTrainedModel, cache: PagedCache, modules: Modules) -> Iterator[str]:
    """Rows join and leave: each layer must be one whose rows can be told apart."""
    if cache.layer_class_to_replicate is not None or not cache.layers or not compat.supports_dynamic_cache(model):
        yield "its cache does not know its layers before the first forward"
    known = {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer, PagedHybridLayer, LinearAttentionLayer}
    if not known.issuperset(map(type, cache.layers)):
        yield "its cache has layers of its own"
    yield from _reasons_of_methods(model)
    yield from _reasons_of_modules(model, modules)


def is_stock(model: PreTrainedModel, name: str) -> bool:
    """Whether a method of the model is transformers' own."""
    return getattr(getattr(model, name, None), "__func__", None) is getattr(GenerationMixin, name)


def _reasons_of_methods(model: PreTrainedModel) -> Iterator[str]:
    """A forward may get inputs that the engine does not know of, or the loop end at another time."""
    for name in (compat.UPDATE_INPUTS, compat.PREFILL, compat.LOOP_CONDITION):
        if not is_stock(model, name):
            yield f"it has a `{name}` of its own"
    if "prepare_inputs_for_generation" in vars(model):
        yield "its `prepare_inputs_for_generation` was replaced"


def _reasons_of_modules(model: PreTrainedModel, modules: Modules) -> Iterator[str]:
    # functions of the user's own are called as often as plain calls them, with the rows that it would give them
    if reason := foreign_attention(module for _, module in modules):
        yield reason
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        yield "there are global forward hooks"
    devices = set()
    for name, module in modules:
        if module._compiled_call_impl is not None or "forward" in vars(module):
            yield f"the forward of {name or 'the model'} is compiled or replaced"
        hooks = [*module._forward_hooks.values(), *module._forward_pre_hooks.values()]
        if hasattr(module, "_hf_hook") or not all(map(is_idle_hook, hooks)):  # they would see packed tokens
            yield f"there are forward hooks on {name or 'the model'}"
        devices |= {x.device for x in (*module._parameters.values(), *module._buffers.values()) if x is not None}
    if len(devices) > 1:
        yield f"its weights are on several devices: {', '.join(sorted(map(str, devices)))}"
    # what one token gets must not depend on which others are in the batch, nor on chance
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity"):
        yield "its experts have a capacity for the whole batch"
    if getattr(config, "output_router_logits", False):
        yield "`output_router_logits` computes a loss over the whole batch"
    for _, module in modules:
        kinds = getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind == "longrope" or "dynamic" in str(kind):
                yield f"its rotary embedding ({kind}) depends on the longest position in the batch"
        if module.training and (source := _chance(module)):
            yield f"it is in training mode with {source}"


def _chance(module: nn.Module) -> str | None:
    """What of a module in training mode draws random numbers."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p > 0 else None
    for name, value in vars(module).items():
        random = any(word in name for word in ("dropout", "drop_path", "layerdrop", "jitter"))
        if random and isinstance(value, (int, float)) and value > 0:
            return name
    return None
