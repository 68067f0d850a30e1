"""Which PEFT adapter a forward runs with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

BASE = "__base__"  # PEFT's own name for "no adapter"


def base_model(model: Any) -> Any:
    """
    The transformers model inside a PEFT wrapper, or the model itself.

    Raises:
        ValueError: for prompt learning (prefix tuning, prompt tuning), whose inputs only PEFT's own `generate` makes.
    """
    if not hasattr(model, "get_base_model"):
        return model
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} is prompt learning ({type(config).__name__}): its virtual tokens are made by PEFT's "
                'own `generate`. Call `model.generate(..., cache_implementation="paged")` instead of an engine'
            )
    return model.get_base_model()


def _tuner_layers(model: nn.Module) -> list[Any]:
    # by what PEFT's BaseTunerLayer and AuxiliaryTrainingWrapper (`modules_to_save`) have; PEFT need not be installed
    own = ("_active_adapter", "_disable_adapters")
    return [module for module in model.modules() if all(hasattr(module, name) for name in own)]


def adapter_names(model: nn.Module) -> frozenset[str]:
    """Names of the adapters that the model's layers hold."""
    names: set[str] = set()
    for layer in _tuner_layers(model):
        for attribute in layer.adapter_layer_names:
            names.update(getattr(layer, attribute, {}).keys())
    return frozenset(names)


def check_adapter(model: nn.Module, name: str) -> None:
    """Raises `ValueError` if forwards of `model` cannot run with the adapter `name`."""
    names = adapter_names(model)
    if name != BASE and name not in names:
        raise ValueError(f"adapter {name!r} does not exist: the model has {', '.join(sorted(names)) or 'none'}")
    _check_unmerged(_tuner_layers(model), name)


def _check_unmerged(layers: list[Any], name: str) -> None:
    if any(getattr(layer, "merged_adapters", ()) for layer in layers):
        raise ValueError(f"adapter {name!r} was asked for, but some are merged into the weights: unmerge them first")


@contextlib.contextmanager
def use_adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """
    Within it, forwards of `model` run with the adapter `name` (`"__base__"`: with none; `None`: as the model is).

    Unlike PEFT's `set_adapter` it leaves `requires_grad` alone.
    """
    if name is None:
        yield
        return
    layers = _tuner_layers(model)
    _check_unmerged(layers, name)
    own = ("_active_adapter", "_disable_adapters")
    saved = [(layer, {key: vars(layer)[key] for key in own if key in vars(layer)}) for layer in layers]
    try:
        for layer in layers:
            layer._disable_adapters = name == BASE
            if name != BASE:
                layer._active_adapter = [name]
        yield
    finally:
        for layer, state in saved:
            for key in own:
                vars(layer).pop(key, None)
            vars(layer).update(state)
