"""Which PEFT adapter a forward runs with."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import nn

BASE = "__base__"  # PEFT's own name for "no adapter"
_STATE = ("_active_adapter", "_disable_adapters")  # of PEFT's layers


class AdapterError(ValueError):
    def __init__(self, adapter: str, message: str) -> None:
        super().__init__(message)
        self.adapter = adapter


def base_model(model: Any) -> Any:
    """The transformers model inside a PEFT wrapper, or the model itself. Raises `ValueError` for prompt learning."""
    if not hasattr(model, "get_base_model"):
        return model
    for name, config in getattr(model, "peft_config", {}).items():
        if getattr(config, "is_prompt_learning", False):
            raise ValueError(
                f"adapter {name!r} is prompt learning ({type(config).__name__}): its virtual tokens are made by PEFT's "
                'own `generate`. Call `model.generate(..., cache_implementation="paged")` instead of an engine'
            )
    return model.get_base_model()


def check_adapter(model: nn.Module, name: str) -> list[Any]:
    """PEFT's layers in `model`. Raises [`AdapterError`] if forwards cannot run with the adapter `name`."""
    # by what PEFT's BaseTunerLayer and AuxiliaryTrainingWrapper (`modules_to_save`) have; PEFT need not be installed
    layers: list[Any] = [module for module in model.modules() if all(hasattr(module, key) for key in _STATE)]
    held = [(layer, key) for layer in layers for key in layer.adapter_layer_names]
    if name != BASE and not any(name in getattr(layer, key, {}) for layer, key in held):
        names = {known for layer, key in held for known in getattr(layer, key, {}).keys()}
        raise AdapterError(name, f"adapter {name!r} does not exist: the model has {', '.join(sorted(names)) or 'none'}")
    if any(getattr(layer, "merged_adapters", ()) for layer in layers):
        raise AdapterError(
            name, f"adapter {name!r} was asked for, but some are merged into the weights: unmerge them first"
        )
    return layers


@contextlib.contextmanager
def use_adapter(model: nn.Module, name: str | None) -> Iterator[None]:
    """Forwards of `model` run with the adapter `name` (`"__base__"`: with none; `None`: as the model is), or raise
    [`AdapterError`]. Unlike PEFT's `set_adapter` it leaves `requires_grad` alone."""
    if name is None:
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
