"""Restores the state that interrupted calls leave changed.

In the main thread, Python may run signal handlers at any call, at any backward jump and at the
start of any function, and the handlers may raise. A step's bookkeeping recovers by itself
(`StepLoop.recover`). Other state that a call changes for a while, such as a model's attention, is
restored by `finally` blocks and contexts. An interrupt that arrives just as such a block or context
begins can prevent the restoration. The [`guarded`] call around the context then ends the open
contexts of [`restoring`] functions, and lets the owners of other state clean up
(`register_for_cleanup`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextvars import ContextVar
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch

from .weak_sets import members_of

P = ParamSpec("P")
T = TypeVar("T")


class _Contexts(threading.local):
    """The `guarded` calls of one thread, and the `restoring` contexts that are open in them."""

    def __init__(self) -> None:
        self.open: list[Generator[Any, None, None]] = []  # in the order in which they were entered
        self.num_calls = 0  # nested `guarded` calls in progress
        # whether a nested call has raised, so that the outermost one must run `_clean_up_owners`
        self.is_cleanup_due = False


_thread_contexts = _Contexts()
# with a separator at the end: other packages' names may begin with these packages' names
_PACKAGE = os.path.join(os.path.dirname(__file__), "")
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_AUTOCAST_DEVICES = ("cpu", "cuda", "mps", "xpu")  # the device types that hf_paged supports
_owners = weakref.WeakSet[Any]()


def register_for_cleanup(owner: Any) -> None:
    """Makes each outermost guarded call end with `owner.clean_up_after_error()` if that call, or a
    guarded call within it, has raised. The thread then has no other call in progress, so the owner
    can drop the state that the thread's calls left in it. The owner is referenced weakly."""
    _owners.add(owner)


class _Restoring(contextlib._GeneratorContextManager[T]):
    """The context manager of a `restoring` function."""

    gen: Any

    def __enter__(self) -> T:
        try:
            if _thread_contexts.num_calls:
                # outside of guarded calls, Python closes the generator when an interrupt makes the
                # caller drop it
                _thread_contexts.open.append(self.gen)
            return super().__enter__()
        except BaseException:
            ensure_done(self._end)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return super().__exit__(*error)
        finally:
            ensure_done(self._end)

    def _end(self) -> None:
        self.gen.close()  # has no effect unless an interrupt kept the generator from ending
        with contextlib.suppress(ValueError):  # entered in another thread, or outside of a call
            _thread_contexts.open.remove(self.gen)


def restoring(
    function: Callable[P, Iterator[T]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """Like `contextlib.contextmanager`, for contexts that restore the state that they change: the
    [`guarded`] call around such a context ends it if an interrupt has kept it from ending."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractContextManager[T]:
        return _Restoring(function, args, kwargs)  # type: ignore[arg-type]

    return make


@restoring
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """A context in which a context variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


def guarded(function: Callable[P, T]) -> Callable[P, T]:
    """Decorates a function. A call that raises ends the [`restoring`] contexts that an interrupt
    has kept from ending. It also restores torch's gradient mode, function and dispatch modes, and
    autocast, since an interrupt can keep torch's contexts from ending, too. The outermost call
    then lets the owners of other state clean up (`register_for_cleanup`)."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        num_open = len(_thread_contexts.open)
        restore_torch = _torch_restorer()
        _thread_contexts.num_calls += 1
        try:
            result = function(*args, **kwargs)
            if _thread_contexts.is_cleanup_due and _thread_contexts.num_calls == 1:
                ensure_done(_clean_up_owners)
            return result
        except BaseException as error:
            ensure_done(lambda: _restore_state(num_open, restore_torch))
            if is_interrupt(error):
                _clear_frames(error)
            raise
        finally:
            _thread_contexts.num_calls -= 1

    return call


def num_modes() -> tuple[int, int]:
    """Returns the numbers of torch's active function modes and dispatch modes."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def end_modes(num_before: tuple[int, int]) -> None:
    """Ends the modes that were entered since `num_modes()` was `num_before`."""
    num_function_modes, num_dispatch_modes = num_before
    while torch._C._len_torch_function_stack() > num_function_modes:
        torch._C._pop_torch_function_stack()
    while (num_active := torch._C._len_torch_dispatch_stack()) > num_dispatch_modes:
        mode = torch._C._get_dispatch_stack_at(num_active - 1)
        with contextlib.suppress(IndexError):  # if an interrupt ended an `__exit__` halfway
            mode.__exit__(None, None, None)
        if torch._C._len_torch_dispatch_stack() == num_active:
            torch._C._pop_torch_dispatch_stack(None)


def _torch_restorer() -> Callable[[], None]:
    """Returns a function that restores torch's current gradient mode, function and dispatch modes,
    and autocast."""
    has_gradients = torch.is_grad_enabled()
    num_before = num_modes()
    # unpacking a `map` calls both functions in one bytecode, so no interrupt can arrive between
    # them and leave autocast nested one level deeper
    increment, decrement = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    _, depth = map(next, (iter(increment, None), iter(decrement, None)))
    is_cache_enabled = torch.is_autocast_cache_enabled()
    autocasts = []
    for device in _AUTOCAST_DEVICES:
        is_enabled = torch.is_autocast_enabled(device)
        autocasts.append((device, is_enabled, torch.get_autocast_dtype(device)))

    def restore() -> None:
        torch._C._set_grad_enabled(has_gradients)
        end_modes(num_before)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > depth:
            pass
        if depth == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(is_cache_enabled)
        for device, is_enabled, dtype in autocasts:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)

    return restore


def _restore_state(num_open: int, restore_torch: Callable[[], None]) -> None:
    try:
        while len(_thread_contexts.open) > num_open:
            _thread_contexts.open[-1].close()
            _thread_contexts.open.pop()
        if _thread_contexts.num_calls == 1:
            _clean_up_owners()
        else:  # code between this call and the outermost one may catch the error
            _thread_contexts.is_cleanup_due = True
    finally:
        restore_torch()


def _clean_up_owners() -> None:
    for owner in members_of(_owners):
        owner.clean_up_after_error()
    _thread_contexts.is_cleanup_due = False


def _clear_frames(error: BaseException) -> None:
    """Clears the frames of hf_paged and torch in a traceback, which a notebook may keep. Our frames
    may hold blocks that belong to no sequence yet, and torch's frames may keep its inference mode
    active."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
            with contextlib.suppress(RuntimeError):  # the guarded call's own frame still runs
                trace.tb_frame.clear()
        trace = trace.tb_next


def ensure_done(undo: Callable[[], object]) -> None:
    """Calls `undo`, which must be idempotent. If an interrupt or another error ends it, calls it
    once more, then raises that error."""
    try:
        undo()
    except BaseException:
        undo()
        raise


def is_interrupt(error: BaseException) -> bool:
    """Whether an error must reach the caller instead of being handled as a failure of the running
    code: it is not an `Exception`, or a signal handler raised it."""
    return not isinstance(error, Exception) or is_from_handler(error)


def is_from_handler(error: BaseException) -> bool:
    """Whether an error's traceback passes through a signal handler."""
    handlers = map(signal.getsignal, signal.valid_signals())
    handler_codes = set(map(_code_of, handlers)) - {None}
    trace = error.__traceback__
    interrupted_frame: FrameType | None = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in handler_codes or (
            interrupted_frame is not None and _received_frame(frame, interrupted_frame)
        ):
            return True
        interrupted_frame, trace = frame, trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code


def _received_frame(frame: FrameType, interrupted_frame: FrameType) -> bool:
    """Whether a frame outside hf_paged got the interrupted frame as an argument, as signal handlers
    do. (Comparing the frame's code with the current handlers' code would not suffice: a handler may
    install another handler before it raises.)"""
    code = frame.f_code
    if code.co_filename.startswith(_PACKAGE):
        return False
    names = code.co_varnames[: code.co_argcount]
    return any(frame.f_locals.get(name) is interrupted_frame for name in names)
