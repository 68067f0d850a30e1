"""Finds the adapters of a `generate` call's rows: the `adapter_names` of PEFT's `generate` or,
inside `use_adapter`, the adapter of that context. PEFT passes the names in hooks on its layers.
Several threads may set such hooks on one model at once, so this module confines each call's hooks
to that call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from ..interrupts import restoring
from ..threads import step_lock
from .peft_models import BASE, Scope, active_adapter, current_scope, use_adapter

# the method of `PeftModel` whose context sets the hooks around each `forward` and `generate`
_HOOKS_CONTEXT = "_enable_peft_forward_hooks"
_NAMES_KEYWORD = "adapter_names"  # keyword with which PEFT passes the rows' adapters to its layers

Hooks = list[tuple[nn.Module, int, Callable[..., Any]]]
"""Hooks that one call has set: the module, the hook's id there, the hook."""


def wrapper_methods(peft_model: Any) -> dict[str, Callable[..., Any]]:
    """Returns the methods that replace methods of the class `PeftModel`, by name. They let the
    hooks of a call with `adapter_names` apply only in the call's context, and remove these hooks
    even after an error."""
    enable = getattr(peft_model, _HOOKS_CONTEXT)

    @functools.wraps(enable)
    def enable_in_context(self: Any, *args: Any, **kwargs: Any) -> Any:
        context = enable(self, *args, **kwargs)
        if kwargs.get(_NAMES_KEYWORD) is None:
            return context
        return _with_names(self.get_base_model(), context)

    return {_HOOKS_CONTEXT: enable_in_context}


@restoring
def _with_names(
    model: nn.Module, peft_context: contextlib.AbstractContextManager[None]
) -> Iterator[None]:
    outer = current_scope.get()
    hooks: Hooks = []
    with contextlib.ExitStack() as stack:
        with step_lock(model):  # no step computes while PEFT's hooks apply in every thread
            stack.enter_context(peft_context)
            names = _confine_hooks(model, hooks)
        stack.callback(_remove_hooks, model, hooks)  # PEFT leaves its hooks after an error
        if outer is not None and outer.model is model and outer.names is None:
            # inside `use_adapter`, PEFT's layers may be disabled, and would then ignore the names
            adapter_names = (name for name in names if name != BASE)
            stack.enter_context(use_adapter(model, next(adapter_names, None)))
        if hooks:
            scope = Scope(model, hooks, names)
            stack.callback(current_scope.reset, current_scope.set(scope))
        yield


def _confine_hooks(model: nn.Module, hooks: Hooks) -> list[str]:
    """Replaces each hook that PEFT has just set by one that applies only while `hooks` is the owner
    of the current scope, and appends it to `hooks`. Returns the names that PEFT passes: one per
    prompt or, if it has repeated them for beams, per row."""
    names: list[str] = []
    for module in model.modules():
        for hook_id, hook in list(module._forward_pre_hooks.items()):
            if isinstance(hook, functools.partial) and _NAMES_KEYWORD in hook.keywords:
                names = list(hook.keywords[_NAMES_KEYWORD])
                confined_hook = _confine_hook(hook, hooks)
                module._forward_pre_hooks[hook_id] = confined_hook
                hooks.append((module, hook_id, confined_hook))
    return names


def _confine_hook(hook: functools.partial[Any], hooks: Hooks) -> Callable[..., Any]:
    @functools.wraps(hook.func)  # so that it counts as PEFT's, not as a hook of user code
    def apply(module: nn.Module, args: Any, kwargs: Any = None) -> Any:
        scope = current_scope.get()
        # torch passes no `kwargs` while another thread removes the hook
        if kwargs is None or scope is None or scope.owner is not hooks:
            return None
        return hook(module, args, kwargs)

    return apply


def _remove_hooks(model: nn.Module, hooks: Hooks) -> None:
    with step_lock(model):
        for module, hook_id, _ in hooks:
            module._forward_pre_hooks.pop(hook_id, None)
            module._forward_pre_hooks_with_kwargs.pop(hook_id, None)
    hooks.clear()  # they refer to this list: the cycle would keep the model alive


@restoring
def row_adapters(model: nn.Module) -> Iterator[list[str] | None]:
    """A context in which no names reach PEFT's layers, which can apply them only to rows of a
    padded batch. Yields the names of the adapters of the running `generate` call: one for all rows,
    one per prompt or, once PEFT has repeated them, one per row. Yields an empty list if the call
    runs inside `use_adapter` but no single adapter is active, and `None` if the call passes no
    names and does not run inside `use_adapter`."""
    scope = current_scope.get()
    if scope is None or scope.model is not model:
        yield None
        return
    names = scope.names
    hooks: Hooks = scope.owner if isinstance(scope.owner, list) else []
    with step_lock(model):  # a step of another thread may switch PEFT's layers
        active = active_adapter(model)  # the code around this call may have activated another one
        if names is None:
            names = [] if active is None else [active]
        elif active == BASE:  # PEFT's layers are disabled, and ignore names
            names = [BASE] * len(names)
        for module, hook_id, _ in hooks:
            module._forward_pre_hooks.pop(hook_id, None)
    reset_token = current_scope.set(None)
    try:
        yield names
    finally:
        current_scope.reset(reset_token)
        with step_lock(model):
            for module, hook_id, hook in hooks:
                module._forward_pre_hooks[hook_id] = hook
