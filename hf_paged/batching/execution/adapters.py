"""Adapters of a forward: a PEFT adapter for all rows, or what each row's adapter adds to linear layers."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import Parameter
from transformers.pytorch_utils import Conv1D

from ...kernels.lora import LoraWeights
from .adapter_shards import is_split, local, local_weights

BASE = "__base__"  # PEFT's own name for "no adapter"
_STATE = ("_active_adapter", "_disable_adapters")  # of PEFT's layers
_NAMES = "adapter_names"  # keyword by which PEFT passes each row's adapter to its layers


class AdapterError(ValueError):
    def __init__(self, adapter: Hashable, message: str) -> None:
        super().__init__(message)
        self.adapter = adapter

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.adapter, str(self))


@dataclass(eq=False)
class Adapter:
    """An adapter whose rows may share a forward with other rows: what it adds to which linear layers."""

    key: tuple[Hashable, int]  # its name and a number; identifies its weights to recorded steps, and is never reused
    parts: dict[nn.Module, LoraWeights]
    read: Callable[[], list[Any]] | None = None  # for one of the model: reads the tensors and options it was made of

    def __post_init__(self) -> None:
        self._made_of = None if self.read is None else self._places()

    def is_current(self) -> bool:
        """Whether the model's tensors and options are still those it was made of."""
        return self.read is None or self._places() == self._made_of

    def is_like(self, other: Adapter) -> bool:
        """Whether both add the same tensors to the same modules."""
        return self.is_current() and self.parts.keys() == other.parts.keys() and self._made_of == other._made_of

    def _places(self) -> list[Any] | None:
        try:
            found = self.read() if self.read is not None else []
        except (AttributeError, KeyError):
            return None
        return [(id(x), x.data_ptr()) if isinstance(x, Tensor) else x for x in found]


def base_model(model: Any) -> Any:
    """The transformers model inside wrappers of `torch.compile` and PEFT, or the model itself. Raises [`AdapterError`],
    a `ValueError`, for adapters that PEFT's own `generate` computes and that cannot be inactive."""
    base = model = getattr(model, "_orig_mod", model)
    if hasattr(model, "get_base_model"):
        base = model.get_base_model()
    elif _is_of_peft(model) and "base_model" in model._modules:
        base = model.base_model.model  # `PeftMixedModel` has no such method
    for name, config in _configs(model).items():
        # prompt learning and X-LoRA have no layers of these names, in which `check_served` sees whether they are active
        if not has_adapter(base, name) and (reason := wrapper_reason(config)) is not None:
            raise AdapterError(name, f"adapter {name!r} {reason}")
    return base


def _configs(model: Any) -> dict[str, Any]:
    return dict(getattr(model, "peft_config", None) or {})  # a copy: another thread may add adapters


def wrapper_reason(config: Any) -> str | None:
    """Why an adapter with this PEFT config is computed by the `generate` of the surrounding `PeftModel`, not by layers
    in the model alone; `None` if it is not."""
    kind, reason = type(config).__name__, None
    if getattr(config, "is_prompt_learning", False):
        reason = f"is prompt learning ({kind}): its virtual tokens are made by PEFT's own `generate`"
    elif is_activated(config):
        reason = f"begins at its `alora_invocation_tokens` ({kind}), which PEFT's own `generate` finds in the prompt"
    else:
        from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

        tuner = PEFT_TYPE_TO_TUNER_MAPPING.get(config.peft_type)
        if hasattr(tuner, "generate"):  # PEFT's tuners leave it to the model, unless they act around it
            reason = f"is computed around the model ({kind}), by PEFT's own `{tuner.__name__}.generate`"
    if reason is None:
        return None
    call = '`peft_model.generate(..., cache_implementation="paged")`'
    return f"{reason}. Call {call} instead of an engine or `generate_batch`"


def is_activated(config: Any) -> bool:
    """Whether this PEFT config is of an activated LoRA (aLoRA), which adds to the tokens from its invocation on."""
    return bool(getattr(config, "alora_invocation_tokens", None))


def has_activated(model: nn.Module) -> bool:
    return any(map(is_activated, _configs(model).values()))


def check_served(model: nn.Module, name: Hashable) -> None:
    """Raises [`AdapterError`] if layers in the model do not compute what PEFT computes with the adapter `name` (`None`:
    as the model is)."""
    if name is not None and (reason := _unswitchable(model)) is not None:
        raise AdapterError(
            name,
            f"adapter {name!r} cannot be chosen for a request: {reason}. Activate it by `peft_model.set_adapter`, or "
            "disable all, and leave `adapter` out",
        )
    reasons = {known: wrapper_reason(config) for known, config in _configs(model).items()}
    reasons = {known: reason for known, reason in reasons.items() if reason is not None}
    if not reasons:
        return
    for known in _active_names(model) if name is None else [name]:
        if known in reasons:
            raise AdapterError(name, f"adapter {known!r} {reasons[known]}")


def _unswitchable(model: nn.Module) -> str | None:
    """Why the active adapter cannot be replaced in PEFT's layers alone."""
    modules = [model]
    while modules:
        module = modules.pop()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            owner = getattr(hook, "__self__", None)
            if _is_of_peft(owner):
                return f"{type(owner).__name__} computes the active one in hooks"
        if not _is_of_peft(module):
            modules.extend(module.children())
        elif not _is_layer(module):
            return f"{type(module).__name__} has no adapters by name"
    return None


def _is_of_peft(part: Any) -> bool:
    return isinstance(part, nn.Module) and type(part).__module__.partition(".")[0] == "peft"


def _is_layer(module: nn.Module) -> bool:
    # by attributes of PEFT's BaseTunerLayer and AuxiliaryTrainingWrapper (`modules_to_save`), without importing PEFT
    return all(hasattr(module, key) for key in _STATE)


def peft_layers(model: nn.Module) -> list[Any]:
    return [module for module in model.modules() if _is_layer(module)]


def _has(layer: Any, name: str) -> bool:
    return any(name in getattr(layer, key, {}) for key in layer.adapter_layer_names)


def has_adapter(model: nn.Module, name: str) -> bool:
    return name == BASE or any(_has(layer, name) for layer in peft_layers(model))


def check_adapter(model: nn.Module, name: str) -> list[Any]:
    """PEFT's layers in `model`. Raises [`AdapterError`] if forwards cannot run with the adapter `name`."""
    layers = peft_layers(model)
    if name != BASE and not any(_has(layer, name) for layer in layers):
        names = {known for layer in layers for key in layer.adapter_layer_names for known in getattr(layer, key, {})}
        raise AdapterError(name, f"adapter {name!r} does not exist: the model has {', '.join(sorted(names)) or 'none'}")
    if any(getattr(layer, "merged_adapters", ()) for layer in layers):
        raise AdapterError(
            name, f"adapter {name!r} was asked for, but some are merged into the weights: unmerge them first"
        )
    return layers


@contextlib.contextmanager
def use_adapter(model: nn.Module, name: Hashable) -> Iterator[None]:
    """Within it, forwards of `model` run with its adapter `name` (`"__base__"`: with none; `None`, or no string: as the
    model is). Raises [`AdapterError`]. Unlike PEFT's `set_adapter` it leaves `requires_grad` alone."""
    if not isinstance(name, str):
        yield
        return
    layers = check_adapter(model, name)
    saved = [(layer, {key: vars(layer)[key] for key in _STATE if key in vars(layer)}) for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = name == BASE
            if name != BASE:
                layer._active_adapter = [name]
        yield
    finally:
        for layer, state in saved:
            for key in _STATE:
                vars(layer).pop(key, None)
            vars(layer).update(state)


def active_adapter(model: nn.Module) -> str | None:
    """The name of the active adapter, `"__base__"` for none; `None` for several."""
    layers = peft_layers(model)
    if all(layer._disable_adapters for layer in layers):
        return BASE
    active = _active_names(model)
    return active.pop() if len(active) == 1 and not any(layer._disable_adapters for layer in layers) else None


def _active_names(model: nn.Module) -> set[str]:
    """The names of the active adapters, including those that have no layer."""
    held = (layer._active_adapter for layer in peft_layers(model) if not layer._disable_adapters)
    return {name for names in held for name in ([names] if isinstance(names, str) else names)}


def unmixable_layer(module: nn.Module) -> str | None:
    """Why an adapter's addition to this module of the base model cannot be computed here; `None` if it can."""
    if type(module) not in (nn.Linear, Conv1D):
        return f"is no plain linear layer ({type(module).__name__})"
    weight: Any = module.weight
    is_plain = type(weight) in (Tensor, Parameter) or is_split(weight)
    if not is_plain or not weight.is_floating_point() or weight.is_meta:
        return f"has quantized weights, or such as lie elsewhere ({type(weight).__name__}, {weight.dtype})"
    return None


def find_adapter(model: nn.Module, name: str, key: tuple[str, int]) -> Adapter | str:
    """Reads an adapter of the model, or returns why its rows need a separate forward. Raises [`AdapterError`]."""
    parts: dict[nn.Module, LoraWeights] = {}
    sources: list[tuple[Any, nn.Module]] = []
    for layer in check_adapter(model, name):
        if not _has(layer, name):
            continue
        if name not in getattr(layer, "lora_A", {}) or name in getattr(layer, "lora_variant", {name}):
            return f"adapter {name!r} is not of plain LoRA alone, in {type(layer).__name__}"
        base = layer.base_layer
        # layers for other libraries (bitsandbytes, torchao) come from other Python modules
        if type(layer).__module__ != "peft.tuners.lora.layer" or unmixable_layer(base) is not None:
            return f"the base of adapter {name!r} is quantized, or no plain linear layer, in {type(base).__name__}"
        dropout = layer.lora_dropout[name]
        if dropout.training and getattr(dropout, "p", 0) > 0:
            return f"adapter {name!r} has dropout, and the model is in training mode"
        if base in parts:
            return f"adapter {name!r} has two layers on one module"
        weights = local_weights(*_tensors(layer, name), layer.scaling[name])
        if weights is None:
            return f"the weights of adapter {name!r} are split over processes in a way of their own"
        a, b, _ = _tensors(layer, name)
        if is_split(base.weight) and (a.shape[1], b.shape[0]) != tuple(base.weight.shape[::-1]):
            raise AdapterError(
                name,
                f"adapter {name!r} cannot be computed: PEFT has made its weights for {b.shape[0]} of the "
                f"{base.weight.shape[0]} numbers that a layer gives, which is split over processes. Leave that layer "
                "out of `target_modules`, or name the adapter's folder as `adapter` in place of loading it with PEFT",
            )
        sources.append((layer, base))
        parts[base] = weights
    if any(type(x) not in (Tensor, Parameter) for part in parts.values() for x in part.tensors):
        return f"the weights of adapter {name!r} are no plain tensors"

    def read() -> list[Any]:
        found: list[Any] = []
        for layer, base in sources:
            found += [layer.base_layer is base, layer.scaling[name], layer.lora_dropout[name].training]
            found += map(local, (base.weight, *_tensors(layer, name)))
        return found

    return Adapter(key, parts, read)


def _tensors(layer: Any, name: str) -> tuple[Tensor, Tensor, Tensor | None]:
    a, b = layer.lora_A[name], layer.lora_B[name]
    return a.weight, b.weight, b.bias


# -- `adapter_names` of PEFT's `generate` ----------------------------------------------------------------------------


def _names_hooks(model: nn.Module) -> Iterator[tuple[nn.Module, int, Any]]:
    for module in model.modules():
        for number, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, functools.partial) and _NAMES in hook.keywords:
                yield module, number, hook


def adapter_names(model: nn.Module) -> list[str] | None:
    """The adapter names of the rows of the running `generate` call, as PEFT got them; `None` if it got none."""
    found = [list(hook.keywords[_NAMES]) for _, _, hook in _names_hooks(model)]
    return found[-1] if found else None  # after a failed call PEFT leaves its hooks, before those of the next call


@contextlib.contextmanager
def without_adapter_names(model: nn.Module) -> Iterator[None]:
    """Within it, PEFT's layers do not get `adapter_names`, which they can only apply to rows of a padded batch."""
    found = list(_names_hooks(model))
    for module, number, _ in found:
        del module._forward_pre_hooks[number]
    try:
        yield
    finally:
        for module, number, hook in found:
            module._forward_pre_hooks[number] = hook
