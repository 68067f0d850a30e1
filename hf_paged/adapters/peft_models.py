"""The PEFT adapters of a model: activates an adapter for a forward, reads the LoRA weights that it
adds to linear layers, and finds why it needs a separate forward or PEFT's own `generate`. Imports
PEFT only once a model has adapters."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from transformers.pytorch_utils import Conv1D

from ..batching.request import Request, RowsError
from ..config import suggest
from ..interrupts import restoring
from ..kernels.lora import LoraWeights
from ..seams import ForwardContext
from ..topics import Topic, TopicError
from .shards import is_dtensor, local_weights, to_local

BASE = "__base__"  # PEFT's name for "no adapter"
_STATE_ATTRIBUTES = {"_active_adapter", "_disable_adapters"}  # of PEFT's layers


class AdapterError(RowsError, TopicError, ValueError):
    """An adapter cannot be served. In a step, the error ends only requests with this adapter."""

    topic = Topic.ADAPTERS

    def __init__(self, adapter: Hashable, message: str) -> None:
        super().__init__(message)
        self.adapter = adapter

    def concerns(self, request: Request) -> bool:
        return request.adapter == self.adapter

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.adapter, str(self))


@dataclass(eq=False)
class Adapter:
    """An adapter with plain LoRA weights, so its rows may share a forward with other rows."""

    # name and number, never reused; identifies the weights in recorded steps
    key: tuple[Hashable, int]
    weights: dict[nn.Module, LoraWeights]  # by linear layer of the base model
    # returns the identities of the adapter's current tensors and options in the model; `()` for an
    # adapter in a folder, whose weights do not change
    read_state: Callable[[], Any] = tuple

    def __post_init__(self) -> None:
        self.state = self.read_state()

    def is_current(self) -> bool:
        """Whether the model still has the tensors and options from which the adapter was read."""
        return bool(self.read_state() == self.state)


NO_ADAPTER = Adapter((BASE, -1), {})  # the base model alone


def check_wrapped(levels: Sequence[Any]) -> None:
    """Raises [`AdapterError`] if a wrapper has an adapter that is always active and that only
    PEFT's own `generate` can compute. `levels`: the wrappers, outermost first, then the model."""
    configs: dict[str, Any] = {}
    for level in levels:
        configs |= _configs(level)
    for name, config in configs.items():
        # An adapter with layers may be inactive, so it is left to `check_served`, which reads the
        # layers. Prompt learning and X-LoRA have no layers, and are always active.
        reason = None if has_adapter(levels[-1], name) else wrapper_reason(config)
        if reason is not None:
            raise AdapterError(name, f"adapter {name!r} {reason}")


def _configs(model: Any) -> dict[str, Any]:
    # copied, since another thread may add adapters
    return dict(getattr(model, "peft_config", None) or {})


def wrapper_reason(config: Any) -> str | None:
    """Returns why only the `generate` of the surrounding `PeftModel` can compute an adapter with
    this PEFT config, as a predicate (`"is ..."`); `None` if layers in the model compute it."""
    config_type = type(config).__name__
    if getattr(config, "is_prompt_learning", False):
        reason = (
            f"is prompt learning ({config_type}): PEFT's own `generate` creates its virtual tokens"
        )
    elif _is_activated(config):
        reason = (
            f"begins at its `alora_invocation_tokens` ({config_type}), which PEFT's own `generate`"
            " finds in the prompt"
        )
    else:
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
        # tuners that act only inside the model define no `generate`
        if not hasattr(tuner, "generate"):
            return None
        reason = f"acts around the model ({config_type}), in PEFT's own `{tuner.__name__}.generate`"
    call = '`peft_model.generate(..., cache_implementation="paged")`'
    return f"{reason}. Call {call} instead of an engine or `generate_batch`"


def _is_activated(config: Any) -> bool:
    """Whether this is the PEFT config of an activated LoRA (aLoRA), which changes only the tokens
    from its invocation on."""
    return bool(getattr(config, "alora_invocation_tokens", None))


def has_activated_lora(model: nn.Module) -> bool:
    """Whether the model has an activated LoRA (`_is_activated`)."""
    return any(map(_is_activated, _configs(model).values()))


def check_served(model: nn.Module, name: Hashable) -> None:
    """Raises [`AdapterError`] unless PEFT's layers in the model can switch to the adapter `name`
    and compute it or, if `name` is `None`, compute the active adapters."""
    reason = None if name is None else _unswitchable_reason(model)
    if reason is not None:
        raise AdapterError(
            name,
            f"adapter {name!r} cannot be chosen for a request: {reason}. Activate it with"
            " `peft_model.set_adapter`, or disable all adapters, and leave `adapter` out",
        )
    configs = _configs(model)
    reasons = {adapter_name: wrapper_reason(config) for adapter_name, config in configs.items()}
    if not any(reasons.values()):
        return
    names: Iterable[Any] = [name]
    if name is None:
        names = _active_names(model)
    for active_name in names:
        if reasons.get(active_name):
            raise AdapterError(name, f"adapter {active_name!r} {reasons[active_name]}")


def _unswitchable_reason(model: nn.Module) -> str | None:
    """Returns why switching PEFT's layers does not suffice to replace the active adapter; `None` if
    that suffices."""
    modules = [model]
    while modules:
        module = modules.pop()
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in hooks:
            owner = getattr(hook, "__self__", None)
            if _is_from_peft(owner):
                return f"{type(owner).__name__} computes the active adapter in hooks"
        if not _is_from_peft(module):
            modules.extend(module.children())
        elif not _is_layer(module):
            return f"{type(module).__name__} has no adapters by name"
    return None


def _is_from_peft(value: Any) -> bool:
    return isinstance(value, nn.Module) and type(value).__module__.split(".")[0] == "peft"


def _is_layer(module: nn.Module) -> bool:
    # recognized without importing PEFT, by the attributes of its BaseTunerLayer and
    # AuxiliaryTrainingWrapper (`modules_to_save`)
    return all(hasattr(module, key) for key in _STATE_ATTRIBUTES)


def peft_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_layer(module)]


def _layer_has_adapter(layer: Any, name: str) -> bool:
    return any(name in getattr(layer, key, {}) for key in layer.adapter_layer_names)


def has_adapter(model: nn.Module, name: str) -> bool:
    if name == BASE:
        return True
    return any(_layer_has_adapter(layer, name) for layer in peft_layers(model))


def check_adapter(model: nn.Module, name: str) -> list[Any]:
    """Returns PEFT's layers in `model`. Raises [`AdapterError`] if the adapter `name` does not
    exist, or if adapters are merged into the weights."""
    layers = peft_layers(model)
    if name != BASE and not any(_layer_has_adapter(layer, name) for layer in layers):
        names = set[str]()
        for layer in layers:
            for key in layer.adapter_layer_names:
                names.update(getattr(layer, key, {}))
        loaded_names = ", ".join(sorted(names)) or "none"
        message = (
            f"adapter {name!r} does not exist: the model has {loaded_names}, and there is no such"
            f" folder{suggest([name], names)}"
        )
        if os.path.isdir(name):
            message = (
                f"the folder {name!r} has no adapter_config.json, which PEFT's `save_pretrained`"
                " writes: pass the folder that contains it"
            )
        raise AdapterError(name, message)
    check_unmerged(layers, name, name)
    return layers


def check_unmerged(layers: Iterable[Any], adapter: Hashable, name: Hashable) -> None:
    """Raises [`AdapterError`] for requests with `adapter`, called `name` in the message, if
    adapters are merged into the weights of PEFT's `layers`."""
    if any(getattr(layer, "merged_adapters", ()) for layer in layers):
        raise AdapterError(
            adapter,
            f"adapter {name!r} was requested, but adapters are merged into the weights: unmerge"
            " them first",
        )


class Scope(NamedTuple):
    """Which adapters apply to forwards of `model` in this context, and so in this thread."""

    model: nn.Module
    # whose hooks on the model's modules apply: a `Mix`, or the hooks of a call of PEFT's `generate`
    owner: Any = None
    # the adapters of that call's prompts or rows; `None`: all rows have the active one
    names: list[str] | None = None


current_scope: ContextVar[Scope | None] = ContextVar("hf_paged_adapters", default=None)


class NamedContext(ForwardContext):
    """The context of forwards whose rows all run with one adapter of the model."""

    def __init__(self, name: str) -> None:
        self.variant = self.names = name


@restoring
def use_adapter(model: nn.Module, name: Hashable) -> Iterator[NamedContext | None]:
    """A context in which forwards of `model` run with its adapter `name`, without adapters if that
    is `"__base__"`, or with the active ones if `name` is not a string. Raises the errors of
    `check_adapter`. Unlike PEFT's `set_adapter`, it does not change `requires_grad`. Sets
    `current_scope`."""
    if not isinstance(name, str):
        yield None
        return
    layers = check_adapter(model, name)
    saved_states = []
    for layer in layers:
        attributes = vars(layer)
        state = {key: attributes[key] for key in _STATE_ATTRIBUTES if key in attributes}
        saved_states.append((layer, state))
    reset_token = current_scope.set(Scope(model))
    try:
        for layer in layers:
            layer._disable_adapters = name == BASE
            if name != BASE:
                layer._active_adapter = [name]
        yield NamedContext(name)
    finally:
        for layer, state in saved_states:
            for key in _STATE_ATTRIBUTES - state.keys():
                vars(layer).pop(key, None)
            # `update` keeps the attributes' order, which is compared to detect changes of the model
            vars(layer).update(state)
        current_scope.reset(reset_token)


def active_adapter(model: nn.Module) -> str | None:
    """Returns the name of the active adapter: `"__base__"` if all layers are disabled, `None` if
    only some are, or if not exactly one adapter is active."""
    are_disabled = {bool(layer._disable_adapters) for layer in peft_layers(model)}
    if False not in are_disabled:
        return BASE
    active = _active_names(model)
    if len(active) != 1 or True in are_disabled:
        return None
    return active.pop()


def _active_names(model: nn.Module) -> set[str]:
    """Returns the names of the active adapters, including those without layers."""
    active = set[str]()
    for layer in peft_layers(model):
        if layer._disable_adapters:
            continue
        names = layer._active_adapter
        active.update([names] if isinstance(names, str) else names)
    return active


def unmixable_reason(module: nn.Module) -> str | None:
    """Returns why our LoRA products cannot be added to this module of the base model, as a
    predicate (`"is ..."`); `None` if they can."""
    if type(module) not in (nn.Linear, Conv1D):
        return f"is not a plain linear layer ({type(module).__name__})"
    weight: Any = module.weight
    is_plain = type(weight) in (Tensor, Parameter) or is_dtensor(weight)
    if not is_plain or not weight.is_floating_point() or weight.is_meta:
        return f"has quantized or meta weights ({type(weight).__name__}, {weight.dtype})"
    return None


def find_adapter(
    model: nn.Module,
    name: str,
    key: tuple[str, int],
) -> Adapter | str:
    """Returns the adapter `name` of the model, read from PEFT's layers, or why its rows need a
    separate forward. Raises the errors of `check_adapter`, and [`AdapterError`] if the adapter does
    not fit a split layer."""
    weights_by_module: dict[nn.Module, LoraWeights] = {}
    sources: list[tuple[Any, nn.Module]] = []
    for layer in check_adapter(model, name):
        if not _layer_has_adapter(layer, name):
            continue
        has_lora = name in getattr(layer, "lora_A", {})
        if not has_lora or name in getattr(layer, "lora_variant", {name}):
            return f"adapter {name!r} is not plain LoRA, in {type(layer).__name__}"
        base = layer.base_layer
        # layers for other libraries (bitsandbytes, torchao) come from other Python modules
        is_peft_layer = type(layer).__module__ == "peft.tuners.lora.layer"
        if not is_peft_layer or unmixable_reason(base) is not None:
            return (
                f"adapter {name!r} is on a layer of type {type(base).__name__}, which is not a"
                " plain linear layer or has quantized or meta weights"
            )
        dropout = layer.lora_dropout[name]
        if dropout.training and getattr(dropout, "p", 0) > 0:
            return f"adapter {name!r} has dropout, and the model is in training mode"
        if base in weights_by_module:
            return f"adapter {name!r} has two layers on one module"
        a, b, bias = _tensors(layer, name)
        weights = local_weights(a, b, bias, layer.scaling[name])
        if weights is None:
            return (
                f"the weights of adapter {name!r} are not split over processes in the way in which"
                " PEFT splits them"
            )
        shape = tuple(base.weight.shape[::-1])
        if is_dtensor(base.weight) and (a.shape[1], b.shape[0]) != shape:
            raise AdapterError(
                name,
                f"adapter {name!r} cannot be computed: PEFT created its weights for {a.shape[1]}"
                f" inputs and {b.shape[0]} outputs, but the layer, which is split over processes,"
                f" has {shape[0]} and {shape[1]}. Leave that layer out of `target_modules`, or pass"
                " the adapter's folder as `adapter` instead of loading it with PEFT",
            )
        sources.append((layer, base))
        weights_by_module[base] = weights
    tensors = (tensor for lora in weights_by_module.values() for tensor in lora.tensors)
    if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
        return f"the weights of adapter {name!r} are not plain tensors"

    return Adapter(key, weights_by_module, functools.partial(_state_of, sources, name))


def _state_of(sources: list[tuple[Any, nn.Module]], name: str) -> list[Any] | None:
    """Returns an adapter's state: the options and the identities of tensors of PEFT's layers and of
    their base layers; `None` if one of these no longer exists."""
    state: list[Any] = []
    try:
        for layer, base in sources:
            state += [
                id(layer.base_layer),
                layer.scaling[name],
                layer.lora_dropout[name].training,
            ]
            for tensor in map(to_local, (base.weight, *_tensors(layer, name))):
                state.append(None if tensor is None else (id(tensor), tensor.data_ptr()))
    except (AttributeError, KeyError):
        return None
    return state


def _tensors(layer: Any, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    a = layer.lora_A[name]
    b = layer.lora_B[name]
    return a.weight, b.weight, b.bias
