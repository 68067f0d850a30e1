"""Finds functions that `torch.compile` put in place of modules' code, and runs the original ones
during a forward."""

from __future__ import annotations

import contextlib
import types
from collections.abc import Sequence
from typing import Any

from torch import nn

from .switches import NOTHING, Switches, Switching

# Attributes of a module that hold the function to call: torch's, and accelerate's original one
# below a hook.
FUNCTIONS = ("forward", "_compiled_call_impl", "_old_forward")
_ORIGINAL = "_torchdynamo_orig_callable"
_UNSET: Any = object()


def uncompiled(function: Any) -> Any:
    """The function that `torch.compile` wrapped, a method of the same object; `function` itself if
    `torch.compile` did not make it. A caller's wrapper around a compiled function has its
    attributes (`functools.wraps`), and stays."""
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
    """Whether compiled code runs in a call of the module, apart from its submodules."""
    held = vars(module)
    functions = [held[name] for name in FUNCTIONS if name in held]
    # the class of a traced module has none
    functions.append(getattr(type(module), "forward", None))
    return any(hasattr(function, _ORIGINAL) for function in functions)


def is_switched(module: nn.Module) -> bool:
    """Whether the module is one for which `running_eagerly` is in effect."""
    return id(module) in _switches.held


def replaced_forward(module: nn.Module) -> Any:
    """The function that stands for the forward of the module's class; `None` if there is none, or
    only one that was compiled of the class's."""
    function = vars(module).get("forward")
    if function is None:
        return None
    function = uncompiled(function)
    if not isinstance(function, types.MethodType) or function.__self__ is not module:
        return function
    is_of_class = function.__func__ is uncompiled(getattr(type(module), "forward", None))
    return None if is_of_class else function


def _switching(module: nn.Module) -> Switching:
    held = vars(module)
    # by attribute, the value that the module holds, or `_UNSET`, and the one that runs its own code
    saved: dict[str, tuple[Any, Any]] = {}
    for name in FUNCTIONS:
        function = getattr(module, name, None)
        original = uncompiled(function)
        if original is not function:
            saved[name] = held.get(name, _UNSET), original

    def switch() -> None:
        for name, (before, original) in saved.items():
            if held.get(name, _UNSET) is before:
                # else switched already, or set by a caller's code since
                held[name] = original

    def restore() -> None:
        for before, original in saved.values():
            # none if a caller's code has set another one; another name if accelerate's hook was
            # added or removed meanwhile
            for name in [name for name in FUNCTIONS if held.get(name) is original]:
                if before is not _UNSET:
                    held[name] = before
                elif name in saved:
                    del held[name]

    return switch, restore


_switches: Switches[nn.Module] = Switches(_switching)


def running_eagerly(modules: Sequence[nn.Module]) -> contextlib.AbstractContextManager[None]:
    """Within it, `modules` run their own code in place of what `torch.compile` made of it, in every
    thread."""
    return _switches.switched(modules) if modules else NOTHING
