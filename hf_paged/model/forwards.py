"""Finds the hooks and wrappers that libraries and user code add to modules' forwards, the device on
which a model computes, and the number of its input embeddings."""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

_SCALARS = {bool, int, float, str, types.NoneType, torch.dtype}
# Libraries whose hooks treat all tokens alike: they move or cast inputs, set `requires_grad` on
# them, or compute weights.
_LIBRARIES = (
    "accelerate.",
    "peft.",
    "torch.distributed.",
    "torch.nn.utils.",
    "transformers.",
    "trl.",
)


def tensors_of_module(module: nn.Module) -> list[torch.Tensor]:
    """The parameters and buffers of a module, without those of its submodules."""
    tensors = (*module._parameters.values(), *module._buffers.values())
    return [tensor for tensor in tensors if tensor is not None]


def hooks_of(module: nn.Module) -> list[Any]:
    """A module's forward pre-hooks, then its forward hooks, then the hooks that accelerate wraps
    around its forward."""
    attributes = vars(module)
    hook = attributes.get("_hf_hook")
    wrapping_hooks = () if hook is None else getattr(hook, "hooks", (hook,))
    if not (wrapping_hooks or attributes["_forward_pre_hooks"] or attributes["_forward_hooks"]):
        # the usual case
        return []
    return [
        *attributes["_forward_pre_hooks"].values(),
        *attributes["_forward_hooks"].values(),
        *wrapping_hooks,
    ]


def has_foreign_hook(module: nn.Module) -> bool:
    """Whether hooks of user code get the module's inputs or outputs."""
    hooks = hooks_of(module)
    return bool(hooks) and not all(
        str(getattr(hook, "__module__", "")).startswith(_LIBRARIES) for hook in hooks
    )


def behavior_key(function: Any, visited_functions: dict[int, tuple[int, Any]] | None = None) -> Any:
    """A hashable key for the behavior of a function, method, callable object, wrapper or hook: its
    code, the scalars in its closure and defaults or in the attributes of its object, and the keys
    of the callables found there. Two closures of the same code over equal values have equal keys. A
    key keeps code and classes alive."""
    kind = type(function)
    if kind in _SCALARS:
        # the `repr` of a float tells 0.0 from -0.0, and is the same for each nan
        return kind, repr(function) if kind is float else function
    visited_functions = {} if visited_functions is None else visited_functions
    if id(function) in visited_functions:  # some functions have themselves in their closures
        number, _ = visited_functions[id(function)]
        return kind, number
    # kept alive, so that no other object gets its id
    visited_functions[id(function)] = len(visited_functions), function
    head: Any = kind
    parts: Iterable[Any] = ()
    if kind is types.FunctionType:
        head = function.__code__
        cells = gc.get_referents(*(function.__closure__ or ()))  # the cells' values, if set
        defaults = function.__defaults__ or ()
        parts = (*cells, *defaults, function.__kwdefaults__ or {})
    elif kind is types.MethodType:
        parts = function.__func__, getattr(function.__self__, "__dict__", {})
    elif kind is functools.partial:
        parts = function.func, *function.args, function.keywords
    elif kind is types.BuiltinFunctionType:
        parts = (function.__qualname__,)
    elif kind is dict:
        named_values = (
            (name, x) for name, x in function.items() if type(x) in _SCALARS or callable(x)
        )
        parts = (part for name, x in named_values for part in (str(name), x))
    elif callable(function) and not isinstance(function, (nn.Module, type)):
        parts = (getattr(function, "__dict__", {}),)
    return head, *(behavior_key(part, visited_functions) for part in parts)


def compute_device(model: Any) -> torch.device:
    """The device on which the model's forward computes: its weights' device or, if accelerate
    offloads them, the device to which it loads them."""
    device: torch.device = model.device
    if device.type != "meta":
        return device
    hooks = (hook for module in model.modules() for hook in hooks_of(module))
    targets = (getattr(hook, "execution_device", None) for hook in hooks)
    return next((torch.device(target) for target in targets if target is not None), device)


def num_embeddings(model: PreTrainedModel) -> int:
    """Returns the number of rows of the input embedding (token ids must be smaller); `sys.maxsize`
    if it is unknown."""
    try:
        return model.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):
        return sys.maxsize
