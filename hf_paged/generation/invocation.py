"""`Invocation`: a call of a transformers method that hf_paged has replaced."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..forks import lazy_property

Method = Callable[..., Any]


@dataclass
class Invocation:
    """A call of a method that `install` has replaced: the original method and the arguments."""

    original: Method
    model: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, function: Method | None = None) -> Any:
        """Runs the original method, or another function, with the arguments."""
        return (function or self.original)(self.model, *self.args, **self.kwargs)

    @lazy_property
    def bound(self) -> inspect.BoundArguments:
        return inspect.signature(self.original).bind(self.model, *self.args, **self.kwargs)

    def value_of(self, variable: ContextVar[Any]) -> Any:
        """Returns the value of `variable` if that value's `model` is the model of this call;
        otherwise `None`."""
        value = variable.get()
        return value if value is not None and value.model is self.model else None

    def name_arguments(self) -> None:
        """In a call of `generate`, makes all positional arguments but the first, `inputs`, keyword
        arguments."""
        values = self.args[1:]
        if values:
            names = list(inspect.signature(self.original).parameters)[2:-1]
            named = dict(zip(names, values))
            # otherwise the call raises an error
            if len(named) == len(values) and named.keys().isdisjoint(self.kwargs):
                self.args, self.kwargs = self.args[:1], {**self.kwargs, **named}

    @property
    def generation_config(self) -> Any:
        """The argument `generation_config`, if this is a call of `generate`; `None` if it is not
        passed."""
        return self.kwargs.get("generation_config")

    def option(self, name: str) -> Any:
        """Returns the value of an option of `generate`; `None` if it is not set. The first of these
        that sets the option decides: a keyword argument, even `None`; `generation_config`; the
        model's own generation config."""
        if name in self.kwargs:
            return self.kwargs[name]
        model_config = getattr(self.model, "generation_config", None)
        for source in (self.generation_config, model_config):
            value = getattr(source, name, None)
            if value is not None:
                return value
        return None


def wrapper_of(original: Method, replacement: Callable[[Invocation], Any]) -> Method:
    """Wraps a method and, inside its decorators (`no_grad`, `deprecate_kwarg`), the undecorated
    function, so that a caller who unwraps `generate` also gets a wrapper."""

    @functools.wraps(original)
    def wrapper(self: Any, *args: Any, **kwargs: Any) -> Any:
        return replacement(Invocation(original, self, args, kwargs))

    if hasattr(original, "__wrapped__"):
        wrapper.__wrapped__ = wrapper_of(original.__wrapped__, replacement)
    else:
        wrapper.__signature__ = inspect.signature(original)  # type: ignore[attr-defined]
        del wrapper.__wrapped__
    return wrapper


def method_of(owner: type, name: str) -> Method:
    """Returns a method of a class as a function that takes the model first, even if the method is
    static, as `_expand_inputs_for_generation` is in transformers 5.17."""
    function: Method = getattr(owner, name)

    def without_model(model: Any, /, *args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    return without_model if is_static else function
