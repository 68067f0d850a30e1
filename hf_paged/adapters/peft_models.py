"""Adapters of a forward: a PEFT adapter for all rows, or what each row's adapter adds to linear
layers."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from transformers.pytorch_utils import Conv1D

from ..batching.request import Request, RowsError
from ..config import suggest
from ..interrupts import restoring
from ..kernels.lora import LoraWeights
from ..seams import ForwardContext
from ..topics import Topic, TopicError
from .shards import is_split, local, local_weights

BASE = "__base__"  # PEFT's own name for "no adapter"
_STATE = {"_active_adapter", "_disable_adapters"}  # of PEFT's layers
_NAMES = "adapter_names"  # keyword by which PEFT passes each row's adapter to its layers


class AdapterError(RowsError, TopicError, ValueError):
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
    """An adapter whose rows may share a forward with other rows: what it adds to which linear
    layers."""

    # its name and a number; identifies its weights to recorded steps, and is never reused
    key: tuple[Hashable, int]
    parts: dict[nn.Module, LoraWeights]
    # what tensors and options of the model it is made of now; nothing for one in a folder
    read: Callable[[], Any] = tuple

    def __post_init__(self) -> None:
        self.made_of = self.read()

    def is_current(self) -> bool:
        """Whether the model's tensors and options are still those it was made of."""
        return bool(self.read() == self.made_of)


NO_ADAPTER = Adapter((BASE, -1), {})  # the base model alone


def check_wrapped(levels: Sequence[Any]) -> None:
    """Raises [`AdapterError`] for adapters that PEFT's own `generate` computes and that cannot be
    inactive; `levels`: a model and its wrappers, from the outside."""
    configs: dict[str, Any] = {}
    for level in levels:
        configs |= _configs(level)
    for name, config in configs.items():
        # prompt learning and X-LoRA have no layers of these names, in which `check_served` sees
        # whether they are active
        reason = None if has_adapter(levels[-1], name) else wrapper_reason(config)
        if reason is not None:
            raise AdapterError(name, f"adapter {name!r} {reason}")


def _configs(model: Any) -> dict[str, Any]:
    # a copy: another thread may add adapters
    return dict(getattr(model, "peft_config", None) or {})


def wrapper_reason(config: Any) -> str | None:
    """Why an adapter with this PEFT config is computed by the `generate` of the surrounding
    `PeftModel`, not by layers in the model alone; `None` if it is not."""
    kind = type(config).__name__
    if getattr(config, "is_prompt_learning", False):
        reason = (
            f"is prompt learning ({kind}): its virtual tokens are made by PEFT's own `generate`"
        )
    elif _is_activated(config):
        reason = (
            f"begins at its `alora_invocation_tokens` ({kind}), which PEFT's own `generate` finds"
            " in the prompt"
        )
    else:
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
        # PEFT's tuners leave it to the model, unless they act around it
        if not hasattr(tuner, "generate"):
            return None
        reason = f"is computed around the model ({kind}), by PEFT's own `{tuner.__name__}.generate`"
    call = '`peft_model.generate(..., cache_implementation="paged")`'
    return f"{reason}. Call {call} instead of an engine or `generate_batch`"


def _is_activated(config: Any) -> bool:
    """Whether this PEFT config is of an activated LoRA (aLoRA), which adds to the tokens from its
    invocation on."""
    return bool(getattr(config, "alora_invocation_tokens", None))


def has_activated(model: nn.Module) -> bool:
    return any(map(_is_activated, _configs(model).values()))


def check_served(model: nn.Module, name: Hashable) -> None:
    """Raises [`AdapterError`] if layers in the model do not compute what PEFT computes with the
    adapter `name` (`None`: as the model is)."""
    reason = None if name is None else _unswitchable(model)
    if reason is not None:
        raise AdapterError(
            name,
            f"adapter {name!r} cannot be chosen for a request: {reason}. Activate it by"
            " `peft_model.set_adapter`, or disable all, and leave `adapter` out",
        )
    configs = _configs(model)
    reasons = {used: wrapper_reason(config) for used, config in configs.items()}
    if not any(reasons.values()):
        return
    names: Iterable[Any] = [name]
    if name is None:
        names = _active_names(model)
    for used in names:
        if reasons.get(used):
            raise AdapterError(name, f"adapter {used!r} {reasons[used]}")


def _unswitchable(model: nn.Module) -> str | None:
    """Why the active adapter cannot be replaced in PEFT's layers alone."""
    modules = [model]
    while modules:
        module = modules.pop()
        hooks = (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
        for hook in hooks:
            owner = getattr(hook, "__self__", None)
            if _is_of_peft(owner):
                return f"{type(owner).__name__} computes the active one in hooks"
        if not _is_of_peft(module):
            modules.extend(module.children())
        elif not _is_layer(module):
            return f"{type(module).__name__} has no adapters by name"
    return None


def _is_of_peft(part: Any) -> bool:
    return isinstance(part, nn.Module) and type(part).__module__.split(".")[0] == "peft"


def _is_layer(module: nn.Module) -> bool:
    # by attributes of PEFT's BaseTunerLayer and AuxiliaryTrainingWrapper (`modules_to_save`),
    # without importing PEFT
    return all(hasattr(module, key) for key in _STATE)


def peft_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_layer(module)]


def _has(layer: Any, name: str) -> bool:
    return any(name in getattr(layer, key, {}) for key in layer.adapter_layer_names)


def has_adapter(model: nn.Module, name: str) -> bool:
    if name == BASE:
        return True
    return any(_has(layer, name) for layer in peft_layers(model))


def check_adapter(model: nn.Module, name: str) -> list[Any]:
    """PEFT's layers in `model`. Raises [`AdapterError`] if forwards cannot run with the adapter
    `name`."""
    layers = peft_layers(model)
    if name != BASE and not any(_has(layer, name) for layer in layers):
        names = set[str]()
        for layer in layers:
            for key in layer.adapter_layer_names:
                names.update(getattr(layer, key, {}))
        loaded = ", ".join(sorted(names)) or "none"
        message = (
            f"adapter {name!r} does not exist: the model has {loaded}, and there is no such"
            f" folder{suggest([name], names)}"
        )
        if os.path.isdir(name):
            message = (
                f"the folder {name!r} has no adapter_config.json, which PEFT's `save_pretrained`"
                " writes: pass the folder that holds it"
            )
        raise AdapterError(name, message)
    if any(getattr(layer, "merged_adapters", ()) for layer in layers):
        raise AdapterError(
            name,
            f"adapter {name!r} was requested, but adapters are merged into the weights: unmerge"
            " them first",
        )
    return layers


class NamedContext(ForwardContext):
    """All rows run with one adapter of the model."""

    def __init__(self, name: str) -> None:
        self.variant = self.names = name


@restoring
def use_adapter(model: nn.Module, name: Hashable) -> Iterator[NamedContext | None]:
    """Within it, forwards of `model` run with its adapter `name` (`"__base__"`: with none; `None`,
    or no string: as the model is). Raises [`AdapterError`]. Unlike PEFT's `set_adapter` it leaves
    `requires_grad` alone."""
    if not isinstance(name, str):
        yield None
        return
    layers = check_adapter(model, name)
    saved = []
    for layer in layers:
        attributes = vars(layer)
        state = {key: attributes[key] for key in _STATE if key in attributes}
        saved.append((layer, state))
    try:
        for layer in layers:
            layer._disable_adapters = name == BASE
            if name != BASE:
                layer._active_adapter = [name]
        yield NamedContext(name)
    finally:
        for layer, state in saved:
            for key in _STATE - state.keys():
                vars(layer).pop(key, None)
            # keeps the order of attributes, by which changes of the model are found
            vars(layer).update(state)


def active_adapter(model: nn.Module) -> str | None:
    """The name of the active adapter, `"__base__"` for none; `None` for several."""
    are_disabled = {bool(layer._disable_adapters) for layer in peft_layers(model)}
    if False not in are_disabled:
        return BASE
    active = _active_names(model)
    if len(active) != 1 or True in are_disabled:
        return None
    return active.pop()


def _active_names(model: nn.Module) -> set[str]:
    """The names of the active adapters, including those that have no layer."""
    active = set[str]()
    for layer in peft_layers(model):
        if layer._disable_adapters:
            continue
        names = layer._active_adapter
        active.update([names] if isinstance(names, str) else names)
    return active


def unmixable_layer(module: nn.Module) -> str | None:
    """Why an adapter's addition to this module of the base model cannot be computed here; `None` if
    it can."""
    if type(module) not in (nn.Linear, Conv1D):
        return f"is not a plain linear layer ({type(module).__name__})"
    weight: Any = module.weight
    is_plain = type(weight) in (Tensor, Parameter) or is_split(weight)
    if not is_plain or not weight.is_floating_point() or weight.is_meta:
        return f"has quantized or meta weights ({type(weight).__name__}, {weight.dtype})"
    return None


def find_adapter(
    model: nn.Module,
    name: str,
    key: tuple[str, int],
) -> Adapter | str:
    """Reads an adapter of the model, or returns why its rows need a separate forward. Raises
    [`AdapterError`]."""
    parts: dict[nn.Module, LoraWeights] = {}
    sources: list[tuple[Any, nn.Module]] = []
    for layer in check_adapter(model, name):
        if not _has(layer, name):
            continue
        is_plain = name in getattr(layer, "lora_A", {})
        if not is_plain or name in getattr(layer, "lora_variant", {name}):
            return f"adapter {name!r} has more than plain LoRA, in {type(layer).__name__}"
        base = layer.base_layer
        # layers for other libraries (bitsandbytes, torchao) come from other Python modules
        is_known = type(layer).__module__ == "peft.tuners.lora.layer"
        if not is_known or unmixable_layer(base) is not None:
            return (
                f"the base of adapter {name!r} is quantized, or not a plain linear layer, in"
                f" {type(base).__name__}"
            )
        dropout = layer.lora_dropout[name]
        if dropout.training and getattr(dropout, "p", 0) > 0:
            return f"adapter {name!r} has dropout, and the model is in training mode"
        if base in parts:
            return f"adapter {name!r} has two layers on one module"
        a, b, bias = _tensors(layer, name)
        weights = local_weights(a, b, bias, layer.scaling[name])
        if weights is None:
            return (
                f"the weights of adapter {name!r} are split over processes in another way than"
                " their layer"
            )
        shape = tuple(base.weight.shape[::-1])
        if is_split(base.weight) and (a.shape[1], b.shape[0]) != shape:
            raise AdapterError(
                name,
                f"adapter {name!r} cannot be computed: PEFT has made its weights for {b.shape[0]}"
                f" of the {base.weight.shape[0]} numbers that a layer gives, which is split over"
                " processes. Leave that layer out of `target_modules`, or name the adapter's"
                " folder as `adapter` in place of loading it with PEFT",
            )
        sources.append((layer, base))
        parts[base] = weights
    tensors = (tensor for part in parts.values() for tensor in part.tensors)
    if any(type(tensor) not in (Tensor, Parameter) for tensor in tensors):
        return f"the weights of adapter {name!r} are not plain tensors"

    return Adapter(key, parts, functools.partial(_state_of, sources, name))


def _state_of(sources: list[tuple[Any, nn.Module]], name: str) -> list[Any] | None:
    """What an adapter is made of: options and tensors of PEFT's layers on their base layers."""
    state: list[Any] = []
    try:
        for layer, base in sources:
            state += [
                id(layer.base_layer),
                layer.scaling[name],
                layer.lora_dropout[name].training,
            ]
            for tensor in map(local, (base.weight, *_tensors(layer, name))):
                state.append(None if tensor is None else (id(tensor), tensor.data_ptr()))
    except (AttributeError, KeyError):
        return None
    return state


def _tensors(layer: Any, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    a = layer.lora_A[name]
    b = layer.lora_B[name]
    return a.weight, b.weight, b.bias


def _names_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, int, Any]]:
    for module in model.modules():
        hooks = list(module._forward_pre_hooks.items())
        for number, hook in hooks:
            if isinstance(hook, functools.partial) and _NAMES in hook.keywords:
                yield module, number, hook


@restoring
def row_adapters(model: nn.Module) -> Iterator[list[str] | None]:
    """Within it, PEFT's layers do not get `adapter_names`, which they can only apply to rows of a
    padded batch. Enters with the names of the running `generate` call's rows, as PEFT got them;
    `None` if it got none."""
    removed = list(_names_hooks(model))
    names = None
    # after a failed call PEFT leaves its hooks, before those of the next call
    for _, _, hook in removed:
        names = list(hook.keywords[_NAMES])
    for module, number, _ in removed:
        del module._forward_pre_hooks[number]
    try:
        yield names
    finally:
        for module, number, hook in removed:
            module._forward_pre_hooks[number] = hook
