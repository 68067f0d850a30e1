"""Finds modules whose code `torch.compile` has replaced, and makes them run their original code for
a forward. `attention/switch.py` chooses the modules."""

from __future__ import annotations

import contextlib
import functools
import itertools
import types
from collections.abc import Callable, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import nn

from .switches import NOTHING, Switches, Switching

P = ParamSpec("P")
T = TypeVar("T")

# Attributes whose functions a call of the module runs: two of torch's, and accelerate's
# `_old_forward`, which holds the function that accelerate's hook wraps.
FUNCTION_ATTRIBUTES = ("forward", "_compiled_call_impl", "_old_forward")
_ORIGINAL = "_torchdynamo_orig_callable"
_UNSET: Any = object()


def untraced(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function that Dynamo must not trace. The wrapper of `torch.compiler.disable` does
    the same, but slows every call."""
    disabled_function = torch.compiler.disable(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        if torch.compiler.is_dynamo_compiling():
            return disabled_function(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def uncompiled(function: Any) -> Any:
    """Returns the function that `torch.compile` wrapped, as a method of the same object if
    `function` is a method; `function` itself if `torch.compile` did not make it. A caller's own
    wrapper of a compiled function is also returned unchanged, although `functools.wraps` gives it
    that function's attributes."""
    if isinstance(function, types.MethodType):
        inner = uncompiled(function.__func__)
        return (
            function if inner is function.__func__ else types.MethodType(inner, function.__self__)
        )
    while isinstance(function, types.FunctionType) and hasattr(function, _ORIGINAL):
        if function.__globals__.get("__name__") != "torch._dynamo.eval_frame":
            break
        function = getattr(function, _ORIGINAL)
    return function


def is_compiled(module: nn.Module) -> bool:
    """Whether the module's own code, without that of its submodules, is compiled."""
    own_functions = map(vars(module).get, FUNCTION_ATTRIBUTES)
    # the class of a traced module has no `forward`
    class_forward = getattr(type(module), "forward", None)
    functions = (*own_functions, class_forward)
    return any(map(hasattr, functions, itertools.repeat(_ORIGINAL)))


def is_switched(module: nn.Module) -> bool:
    """Whether a `running_eagerly` context of the module is open."""
    return id(module) in _switches.entries


def replaced_forward(module: nn.Module) -> Any:
    """Returns the function that replaces the `forward` of the module's class; `None` if there is
    none, or if it is the class's own `forward`, compiled or not."""
    function = vars(module).get("forward")
    if function is None:
        return None
    function = uncompiled(function)
    if not isinstance(function, types.MethodType) or function.__self__ is not module:
        return function
    is_of_class = function.__func__ is uncompiled(getattr(type(module), "forward", None))
    return None if is_of_class else function


def _switching(module: nn.Module) -> Switching:
    """Returns two functions: the first makes the module run its original code, the second makes it
    run its compiled code again."""
    attributes = vars(module)
    # by attribute: the module's value or `_UNSET`, and the original function
    saved_attributes: dict[str, tuple[Any, Any]] = {}
    for name in FUNCTION_ATTRIBUTES:
        function = getattr(module, name, None)
        original = uncompiled(function)
        if original is not function:
            saved_attributes[name] = attributes.get(name, _UNSET), original

    def switch() -> None:
        for name, (before, original) in saved_attributes.items():
            if attributes.get(name, _UNSET) is before:
                # otherwise the attribute is switched already, or a caller's code has set it since
                attributes[name] = original

    def restore() -> None:
        for before, original in saved_attributes.values():
            # no attribute holds `original` if a caller's code has set another function; another
            # attribute holds it if accelerate's hook was added or removed in the meantime
            for name in [name for name in FUNCTION_ATTRIBUTES if attributes.get(name) is original]:
                if before is not _UNSET:
                    attributes[name] = before
                elif name in saved_attributes:
                    del attributes[name]

    return switch, restore


_switches: Switches[nn.Module] = Switches(_switching)


def running_eagerly(modules: Sequence[nn.Module]) -> contextlib.AbstractContextManager[None]:
    """A context in which `modules` run their original code instead of compiled code, in every
    thread."""
    return _switches.switched(modules) if modules else NOTHING
