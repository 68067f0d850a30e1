"""Which PEFT adapter a forward runs with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

BASE = "__base__"  # PEFT's own name for "no adapter"


class AdapterError(ValueError):
    """Forwards cannot run with this adapter."""

    def __init__(self, adapter: str, message: str) -> None:
        super().__init__(message)
        self.adapter = adapter


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


def _held_by(layer: Any) -> Iterator[Any]:
    """What a layer keeps by the names of adapters."""
    for attribute in layer.adapter_layer_names:
        yield getattr(layer, attribute, {})


def check_adapter(model: nn.Module, name: str) -> None:
    """Raises `ValueError` if forwards of `model` cannot run with the adapter `name`."""
    _check_layers(_tuner_layers(model), name)


def _check_layers(layers: list[Any], name: str) -> None:
    if name != BASE and not any(name in held for layer in layers for held in _held_by(layer)):
        names = {known for layer in layers for held in _held_by(layer) for known in held.keys()}
        raise AdapterError(name, f"adapter {name!r} does not exist: the model has {', '.join(sorted(names)) or 'none'}")
    if any(getattr(layer, "merged_adapters", ()) for layer in layers):
        raise AdapterError(
            name, f"adapter {name!r} was asked for, but some are merged into the weights: unmerge them first"
        )


@contextlib.contextmanager
def use_adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """
    Within it, forwards of `model` run with the adapter `name` (`"__base__"`: with none; `None`: as the model is).

    Unlike PEFT's `set_adapter` it leaves `requires_grad` alone. Raises `AdapterError` if they cannot, since PEFT's
    layers pass over names that they do not know.
    """
    if name is None:
        yield
        return
    layers = _tuner_layers(model)
    _check_layers(layers, name)
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
