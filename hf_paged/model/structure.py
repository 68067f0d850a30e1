"""Finds the reasons against a layout in a model's structure: its methods, modules, hooks and
config. It runs no forward: `checks` does."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

from .. import compat
from ..attention.switch import NAME, calls_interface, foreign_attention, switchable_configs
from ..cache.layers import EMPTY_LAYERS, PagedHybridLayer, PagedLayer, PagedSlidingWindowLayer
from ..cache.paged_cache import PagedCache
from ..topics import Topic
from .forwards import has_foreign_hook, tensors_of_module
from .rope import length_types

Modules = Sequence[nn.Module]  # all of a model

KV_LAYERS = {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer}
"""Cache layers that hold keys and values alone."""
_STATE_LAYERS = {PagedHybridLayer, LinearAttentionLayer}
_RATES = ("dropout", "drop_path", "layerdrop", "jitter", "noise")


def structural_reason(model: PreTrainedModel, cache: PagedCache) -> str | None:
    """Why the model's present structure rules out packed forwards; `None` if it does not."""
    return next(reasons(model, cache, list(model.modules()), "packed"), None)


def reasons(
    model: PreTrainedModel, cache: PagedCache, modules: Modules, layout: str
) -> Iterator[str]:
    """Yields the reasons against a `layout`: "packed", "side by side" (rows join and leave) or
    "together" (rows leave)."""
    packs = layout == "packed"
    joins = layout != "together"
    attends_itself = not calls_interface(modules)
    yield from _of_inputs(model, cache, packs, joins, attends_itself)
    yield from _of_code(model, modules, packs, joins, attends_itself)
    yield from reasons_of_rows(model, modules, packs)


def reasons_of_rows(model: PreTrainedModel, modules: Modules, packs: bool = True) -> Iterator[str]:
    """Yields why rows of one forward may get other results than each row alone."""
    yield from _of_hooks(model, modules)
    yield from _of_rows(model, modules, packs)


def _of_inputs(
    model: PreTrainedModel, cache: PagedCache, packs: bool, joins: bool, attends_itself: bool
) -> Iterator[str]:
    """Reasons in the arguments of a forward, the cache among them."""
    if compat.is_pipeline(model):
        yield Topic.DEVICES("its layers are in several processes")
    parameters = inspect.signature(model.forward).parameters
    missing = []
    if not attends_itself and "position_ids" not in parameters:
        # a model's own attention code takes ALiBi positions from its mask
        missing.append("position_ids")
    if compat.cache_name(model) not in parameters:
        missing.append("cache")
    if joins and getattr(model.config, "is_encoder_decoder", False):
        yield Topic.ENCODER("the model has an encoder")
    if packs and missing:
        yield Topic.MODEL_CODE(f"its forward takes no {' and no '.join(missing)}")
    knows_layers = cache.layer_class_to_replicate is None and cache.layers
    if not knows_layers or not (packs or compat.supports_dynamic_cache(model)):
        yield Topic.CACHE("its cache does not know its layers before the first forward")
    if joins:
        foreign = {type(layer) for layer in cache.layers} - KV_LAYERS
        if not packs:
            foreign -= _STATE_LAYERS
        if foreign:
            names = ", ".join(sorted(kind.__name__ for kind in foreign))
            yield Topic.CACHE(f"its cache has layers that hold more than keys and values: {names}")


def _of_code(
    model: PreTrainedModel, modules: Modules, packs: bool, joins: bool, attends_itself: bool
) -> Iterator[str]:
    """Reasons in methods that override transformers', and in the code of attention."""
    # overrides may pass inputs that the engine does not support, or end the loop at another time
    if joins and not is_stock(model, compat.UPDATE_INPUTS):
        yield Topic.MODEL_CODE(f"it overrides `{compat.UPDATE_INPUTS}`")
    method = overridden(model, compat.SAMPLE)
    if method is not None:
        yield Topic.MODEL_CODE(f"it overrides `{method}`")
    if any(compat.attribute(module, "_setup_cache") for module in modules):
        # a check's forwards would change those states
        yield Topic.CACHE("it keeps states in its modules, outside any cache")
    if "prepare_inputs_for_generation" in vars(model):
        yield Topic.MODEL_CODE("its `prepare_inputs_for_generation` was replaced")
    config = model.config.get_text_config(decoder=True)
    is_loaded_with_ours = compat.attention_of(config) == NAME
    must_switch = packs and not attends_itself and not is_loaded_with_ours
    if must_switch and not switchable_configs(modules):
        yield Topic.MODEL_CODE("its code reads which attention implementation is configured")
    # user functions must see the calls and rows of plain `generate`
    reason = foreign_attention(modules)
    if reason:
        yield reason


def _of_hooks(model: PreTrainedModel, modules: Modules) -> Iterator[str]:
    """Reasons in the hooks on modules, and in the devices of their weights."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        yield Topic.HOOKS("there are global forward hooks")
    for module in modules:
        if has_foreign_hook(module):  # the hook would see packed tokens
            name = next(name for name, part in model.named_modules() if part is module)
            yield Topic.HOOKS(f"there are forward hooks on {name or 'the model'}")
    devices = {tensor.device for module in modules for tensor in tensors_of_module(module)}
    # accelerate loads meta weights before their use, and moves activations between devices
    is_dispatched = any("_hf_hook" in vars(module) for module in modules)
    if len(devices) > 1 and not is_dispatched:
        names = ", ".join(sorted(map(str, devices)))
        yield Topic.DEVICES(f"its weights are on several devices: {names}")


def _of_rows(model: PreTrainedModel, modules: Modules, packs: bool) -> Iterator[str]:
    """Reasons why a token's result depends on other rows of the batch or on random numbers."""
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity"):
        yield Topic.BATCH("its experts have a capacity for the whole batch")
    if getattr(config, "output_router_logits", False):
        yield Topic.BATCH("`output_router_logits` computes a loss over the whole batch")
    for module in modules:
        for _, rope_type in () if packs else length_types(module):
            yield Topic.BATCH(
                f"its rotary embedding ({rope_type}) depends on the longest position in the batch"
            )
        if module.training:
            source = _random_source(module)
            if source:
                yield Topic.TRAINING(f"it is in training mode with {source}")


def _random_source(module: nn.Module) -> str | None:
    """Names the reason why a module in training mode draws random numbers; `None` if it draws
    none."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p > 0 else None
    for name, value in vars(module).items():
        is_rate = any(word in name for word in _RATES)
        if is_rate and isinstance(value, (int, float)) and value > 0:
            return name
    return None


def is_stock(model: PreTrainedModel, name: str) -> bool:
    """Whether the model does not override a method of transformers, or has no such method."""
    method = getattr(model, name, None)
    stock = getattr(GenerationMixin, name, None)
    return getattr(method, "__func__", method) is getattr(stock, "__func__", stock)


def overridden(model: PreTrainedModel, loop: str) -> str | None:
    """The first overridden method that transformers' `loop` calls and the engine's does not; `None`
    if there is none."""
    names = compat.REPLACED_METHODS[loop]
    return next((name for name in names if not is_stock(model, name)), None)
