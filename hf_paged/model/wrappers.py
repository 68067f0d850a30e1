"""Finds the model inside wrappers, and imports the optional package `adapters` for models and
requests that need it."""

from __future__ import annotations

import sys
from collections.abc import Hashable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn

from ..rooms import AdaptersRoom, ResolvedAdapter, room
from ..switches import NOTHING


def adapters_room_for(model: Any, adapter: Hashable = None) -> AdaptersRoom | None:
    """Returns the optional package `adapters` if a request names an `adapter` or if PEFT has added
    adapters to the model; otherwise `None`. Raises `RoomMissingError` if the package is needed but
    not installed."""
    if adapter is None and not getattr(model, "peft_config", None):
        return None
    return room("adapters", "a PEFT adapter, in `adapter` or on the model,")


def resolve_adapter(model: Any, name: str | None, has_only_ids: bool = True) -> ResolvedAdapter:
    """Like `AdaptersRoom.resolve_adapter`, but returns an empty [`ResolvedAdapter`] if neither the
    request nor the model has an adapter."""
    adapters = adapters_room_for(model, name)
    if adapters is None:
        return ResolvedAdapter()
    return adapters.resolve_adapter(model, name, has_only_ids)


def use_adapter(model: Any, name: Hashable) -> AbstractContextManager[Any]:
    """Like `AdaptersRoom.use_adapter`, but does nothing if the name is `None`."""
    adapters = adapters_room_for(None, name)
    if adapters is None:
        return NOTHING
    return adapters.use_adapter(model, name)


def unwrap_model(model: Any) -> Any:
    """The transformers model inside wrappers of `torch.compile`, PEFT and data parallelism, or the
    model itself. Raises `ValueError` for a model sharded by FSDP, and for adapters that only PEFT's
    own `generate` can apply and that cannot be disabled."""
    levels = [model]
    while (inner := _inner_model(levels[-1])) is not None:
        levels.append(inner)
    packages = (adapters_room_for(level) for level in levels)
    adapters = next(filter(None, packages), None)
    if adapters is not None:
        adapters.check_wrapped(levels)
    return levels[-1]


def _inner_model(model: Any) -> Any:
    """The model inside a wrapper; `None` if `model` is not a wrapper."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    fsdp_types = () if fsdp is None else (fsdp.FullyShardedDataParallel, fsdp.FSDPModule)
    is_module = isinstance(model, nn.Module)
    if is_module and any(isinstance(module, fsdp_types) for module in model.modules()):
        raise ValueError(
            f"the model of type {type(model).__name__} is sharded by FSDP: all processes must run"
            " its forwards together, but an engine runs forwards in one process. Call"
            ' `model.generate(..., cache_implementation="paged", synced_gpus=True)` in each process'
        )
    original = getattr(model, "_orig_mod", None)  # of a compiled module
    if original is not None:
        return original
    if isinstance(model, (nn.DataParallel, nn.parallel.DistributedDataParallel)):
        return model.module
    if hasattr(model, "get_base_model"):
        return model.get_base_model()
    # PEFT's `PeftMixedModel` has no `get_base_model`
    is_from_peft = is_module and type(model).__module__.split(".")[0] == "peft"
    if is_from_peft and "base_model" in model._modules:
        return model.base_model.model
    return None
