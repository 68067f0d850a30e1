"""Finds the reasons against a layout in a model's structure: its methods, modules, hooks and
config. It runs no forwards: `checks` does."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence

from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

from .. import compat, rooms
from ..attention.switch import (
    NAME,
    calls_interface,
    foreign_attention,
    have_latents,
    switchable_configs,
)
from ..cache.layers import (
    EMPTY_LAYERS,
    PagedHybridLayer,
    PagedHybridSlidingWindowLayer,
    PagedLayer,
    PagedSlidingWindowLayer,
)
from ..cache.paged_cache import PagedCache
from ..forks import lazy_property
from ..topics import Topic
from .forwards import has_foreign_hook, tensors_of_module
from .rope import length_types

Modules = Sequence[nn.Module]  # all modules of a model

KV_LAYERS = {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer}
"""Cache layers that hold nothing but keys and values."""
_STATE_LAYERS = {PagedHybridLayer, PagedHybridSlidingWindowLayer, LinearAttentionLayer}
# substrings of the names of attributes that hold a rate of dropout or noise
_RATE_NAMES = ("dropout", "drop_path", "layerdrop", "jitter", "noise")


class Structure:
    """The facts about a model on which the reasons against layouts depend: its modules, and whether
    its own code computes attention. They are valid only while the model does not change."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.modules: Modules = list(model.modules())

    @lazy_property
    def has_own_attention(self) -> bool:
        """Whether no attention layer calls the attention interface."""
        return not calls_interface(self.modules)


def has_states_outside_cache(modules: Iterable[nn.Module]) -> bool:
    """Whether `modules` keep states outside any cache."""
    return any(compat.attribute(module, "_setup_cache") for module in modules)


def reasons_against(structure: Structure, cache: PagedCache, layout_name: str) -> Iterator[str]:
    """Yields the reasons against a layout: "packed", "side by side" (rows join and leave) or
    "together" (rows only leave)."""
    is_packed = layout_name == "packed"
    can_join = layout_name != "together"
    yield from _input_reasons(structure, cache, is_packed, can_join)
    yield from _code_reasons(structure, is_packed, can_join)
    yield from hook_reasons(structure.model, structure.modules)
    yield from row_reasons(structure.model, structure.modules, is_packed)


def _input_reasons(
    structure: Structure, cache: PagedCache, is_packed: bool, can_join: bool
) -> Iterator[str]:
    """Yields reasons from how a forward is called: its arguments, its cache and its processes."""
    model = structure.model
    if compat.is_pipeline(model):
        yield Topic.DEVICES("its layers are in several processes")
    if can_join and model.config.is_encoder_decoder:
        yield Topic.ENCODER("the model has an encoder")
    if is_packed:
        parameters = inspect.signature(model.forward).parameters
        missing_arguments = []
        if not structure.has_own_attention and "position_ids" not in parameters:
            # not required of a model with its own attention code: without `position_ids` (ALiBi),
            # it takes positions from the mask
            missing_arguments.append("position_ids")
        if not any(name in parameters for name in compat.CACHE_NAMES):
            missing_arguments.append("cache")
        if missing_arguments:
            missing_names = " and no ".join(missing_arguments)
            yield Topic.MODEL_CODE(f"its forward takes no {missing_names}")
    if cache.layer_class_to_replicate is not None or not cache.layers:
        yield Topic.CACHE("its cache does not know its layers before the first forward")
    elif not is_packed and not compat.supports_dynamic_cache(model):
        yield Topic.CACHE("it uses a cache class of its own, not a `DynamicCache`")
    if can_join:
        unsupported_layers = {type(layer) for layer in cache.layers} - KV_LAYERS
        if not is_packed:
            unsupported_layers -= _STATE_LAYERS
        if unsupported_layers:
            names = ", ".join(sorted(layer_type.__name__ for layer_type in unsupported_layers))
            yield Topic.CACHE(f"its cache has layers that hold more than keys and values: {names}")


def _code_reasons(structure: Structure, is_packed: bool, can_join: bool) -> Iterator[str]:
    """Yields reasons from the model's code: its overrides of methods of `GenerationMixin`, states
    outside the cache, and the functions that compute attention."""
    model = structure.model
    has_own_attention = structure.has_own_attention
    # an override may pass inputs that the engine does not support, or end the loop at another step
    if can_join and not is_stock(model, compat.UPDATE_INPUTS):
        yield Topic.MODEL_CODE(f"it overrides `{compat.UPDATE_INPUTS}`")
    method = overridden(model, compat.SAMPLE)
    if method is not None:
        yield Topic.MODEL_CODE(f"it overrides `{method}`")
    if has_states_outside_cache(structure.modules):
        # a check's forwards would change these states
        yield Topic.CACHE("it keeps states in its modules, outside any cache")
    if "prepare_inputs_for_generation" in vars(model):
        yield Topic.MODEL_CODE("its `prepare_inputs_for_generation` was replaced")
    config = model.config.get_text_config(decoder=True)
    is_configured = compat.attention_of(config) == NAME
    must_switch = is_packed and not has_own_attention and not is_configured
    needs_package = {"latent": have_latents(structure.modules), "own_attention": has_own_attention}
    for name, is_needed in needs_package.items():
        message = rooms.missing(name, "its attention") if is_packed and is_needed else None
        if message:
            yield Topic.MODEL_CODE(message)
    if must_switch and not switchable_configs(structure.modules):
        yield Topic.MODEL_CODE("its attention layers have no `config` that selects their function")
    # users' attention functions must get the same calls and rows as in plain `generate`
    foreign_reason = foreign_attention(structure.modules)
    if foreign_reason:
        yield foreign_reason


def hook_reasons(model: PreTrainedModel, modules: Modules) -> Iterator[str]:
    """Yields reasons from the hooks on modules, and from the devices of their weights."""
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        yield Topic.HOOKS("there are global forward hooks")
    for module in modules:
        if has_foreign_hook(module):  # the hook would also get tokens of other rows
            name = next(name for name, part in model.named_modules() if part is module)
            yield Topic.HOOKS(f"there are forward hooks on {name or 'the model'}")
    devices = {tensor.device for module in modules for tensor in tensors_of_module(module)}
    # accelerate's hooks load offloaded weights, and move activations between devices
    is_dispatched = any("_hf_hook" in vars(module) for module in modules)
    if len(devices) > 1 and not is_dispatched:
        names = ", ".join(sorted(map(str, devices)))
        yield Topic.DEVICES(f"its weights are on several devices: {names}")


def row_reasons(model: PreTrainedModel, modules: Modules, is_packed: bool) -> Iterator[str]:
    """Yields reasons why a result depends on other rows of the batch or on random numbers."""
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity"):
        yield Topic.BATCH("its experts have a capacity for the whole batch")
    if getattr(config, "output_router_logits", False):
        yield Topic.BATCH("`output_router_logits` computes a loss over the whole batch")
    for module in modules:
        for _, rope_type in () if is_packed else length_types(module):
            yield Topic.BATCH(
                f"its rotary embedding ({rope_type}) depends on the largest position in the batch"
            )
        if module.training:
            source = _random_source(module)
            if source:
                yield Topic.TRAINING(f"it is in training mode with {source}")


def _random_source(module: nn.Module) -> str | None:
    """Returns why a module draws random numbers in training mode: "dropout", or the name of the
    attribute with the rate, such as `layerdrop`; `None` if no rate is above 0."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p > 0 else None
    for name, value in vars(module).items():
        is_rate = any(word in name for word in _RATE_NAMES)
        if is_rate and isinstance(value, (int, float)) and value > 0:
            return name
    return None


def is_stock(model: PreTrainedModel, name: str) -> bool:
    """Whether the model inherits the method `name` from `GenerationMixin`, or neither has it. False
    for overrides, even in transformers' own models."""
    method = getattr(model, name, None)
    stock = getattr(GenerationMixin, name, None)
    return getattr(method, "__func__", method) is getattr(stock, "__func__", stock)


def overridden(model: PreTrainedModel, loop: str) -> str | None:
    """Returns the name of the first of these methods that the model overrides: transformers'
    decoding loop `loop`, and the methods that it calls and the engine's loop does not. Returns
    `None` if the model overrides none. An override of `loop` counts even if it calls the original,
    since it may then read the cache, which the engine leaves empty."""
    names = (loop, *compat.REPLACED_METHODS[loop])
    return next((name for name in names if not is_stock(model, name)), None)
