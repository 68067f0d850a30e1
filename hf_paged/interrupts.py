"""Restores the state that interrupted calls leave changed.

Python runs signal handlers between any two bytecodes of the main thread, and they may raise. A
step's bookkeeping recovers by itself (`StepLoop.recover`). Other state that a call changes for a
while, such as a model's attention, is restored in `finally` blocks and contexts. An interrupt that
arrives just as one of these begins prevents the restoring: then the [`guarded`] call around it ends
the contexts that are [`restoring`], and makes owners of other state end the calls that left it
there (`ends_with_calls`).
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


class _Contexts(threading.local):
    """Of one thread: the `restoring` contexts that it has entered in `guarded` calls and not left,
    in order; the number of such calls that it is in; whether a nested one of these has raised."""

    def __init__(self) -> None:
        self.open: list[Generator[Any, None, None]] = []
        self.num_calls = 0
        self.is_ending_due = False  # whether the outermost call must run `_end_calls`


_contexts = _Contexts()
_PACKAGE = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)
_AUTOCAST_DEVICES = ("cpu", "cuda")
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def ends_with_calls(owner: Any) -> None:
    """Makes an outermost guarded call that raises, or in which another call raised, call
    `owner.end_calls()` at its end: no call of this thread then goes on, so the owner can drop the
    state that they left there."""
    _owners.add(owner)


class _Restoring(contextlib._GeneratorContextManager[T]):
    gen: Any

    def __enter__(self) -> T:
        try:
            if _contexts.num_calls:
                # else it is a caller's own, which is ended where an interrupt has that drop it
                _contexts.open.append(self.gen)
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
        self.gen.close()  # if an interrupt has kept it from its end
        with contextlib.suppress(ValueError):  # another thread entered it, and this one ends it
            _contexts.open.remove(self.gen)


def restoring(
    function: Callable[P, Iterator[T]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """As `contextlib.contextmanager`, for a context that restores the state that it changes."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractContextManager[T]:
        generator: Any = function
        return _Restoring(generator, args, kwargs)

    return make


def guarded(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a call that raises end the contexts that an interrupt has prevented from ending, and
    restore torch's gradient mode, modes and autocast, whose own contexts are Python as well."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        depth = len(_contexts.open)
        restore_torch = _torch_state()
        _contexts.num_calls += 1
        try:
            result = function(*args, **kwargs)
            if _contexts.is_ending_due and _contexts.num_calls == 1:
                ensure_done(_end_calls)
            return result
        except BaseException as error:
            ensure_done(lambda: _restore_state(depth, restore_torch))
            if is_interrupt(error):
                _clear_frames(error)
            raise
        finally:
            _contexts.num_calls -= 1

    return call


def num_modes() -> tuple[int, int]:
    """The numbers of torch's active function modes and dispatch modes."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def end_modes(num_before: tuple[int, int]) -> None:
    """Ends the modes that were entered since `num_modes()` was `num_before`."""
    num_functions, num_dispatched = num_before
    while torch._C._len_torch_function_stack() > num_functions:
        torch._C._pop_torch_function_stack()
    while (number := torch._C._len_torch_dispatch_stack()) > num_dispatched:
        mode = torch._C._get_dispatch_stack_at(number - 1)
        with contextlib.suppress(IndexError):  # it has begun to end
            mode.__exit__(None, None, None)
        if torch._C._len_torch_dispatch_stack() == number:
            torch._C._pop_torch_dispatch_stack(None)


def _torch_state() -> Callable[[], None]:
    """Returns a function that restores torch's present gradient mode, modes and autocast."""
    has_gradients = torch.is_grad_enabled()
    modes = num_modes()
    # `map` calls both functions in one bytecode: an interrupt between them would leave autocast
    # nested one level deeper
    starts, ends = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    _, depth = map(next, (iter(starts, None), iter(ends, None)))
    caches = torch.is_autocast_cache_enabled()
    casts = []
    for device in _AUTOCAST_DEVICES:
        is_enabled = torch.is_autocast_enabled(device)
        casts.append((device, is_enabled, torch.get_autocast_dtype(device)))

    def restore() -> None:
        torch._C._set_grad_enabled(has_gradients)
        end_modes(modes)
        torch.autocast_increment_nesting()
        while torch.autocast_decrement_nesting() > depth:
            pass
        if depth == 0:
            torch.clear_autocast_cache()
        torch.set_autocast_cache_enabled(caches)
        for device, is_enabled, dtype in casts:
            torch.set_autocast_enabled(device, is_enabled)
            torch.set_autocast_dtype(device, dtype)

    return restore


def _restore_state(depth: int, restore_torch: Callable[[], None]) -> None:
    try:
        while len(_contexts.open) > depth:
            _contexts.open[-1].close()
            _contexts.open.pop()
        if _contexts.num_calls == 1:
            _end_calls()
        else:  # the caller may catch the error and go on
            _contexts.is_ending_due = True
    finally:
        restore_torch()


def _end_calls() -> None:
    for owner in list(_owners):
        owner.end_calls()
    _contexts.is_ending_due = False


def _clear_frames(error: BaseException) -> None:
    """Clears our frames and torch's in a traceback, which a notebook keeps: ours hold blocks that
    no sequence has got yet, and torch's frames of inference mode hold the mode."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith((_PACKAGE, _TORCH)):
            with contextlib.suppress(RuntimeError):  # the frame of the guarded call itself
                trace.tb_frame.clear()
        trace = trace.tb_next


def ensure_done(undo: Callable[[], object]) -> None:
    """Calls `undo`, which must be idempotent, and calls it again if an interrupt ends it."""
    try:
        undo()
    except BaseException:
        undo()
        raise


def is_interrupt(error: BaseException) -> bool:
    """Whether an error must reach the caller instead of being handled as an error of the code that
    runs: it is no `Exception`, or a signal handler raised it."""
    if not isinstance(error, Exception):
        return True
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    interrupted: FrameType | None = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in codes or (
            interrupted is not None and _received_frame(frame, interrupted)
        ):
            return True
        interrupted, trace = frame, trace.tb_next
    return False


def _code_of(handler: Any) -> CodeType | None:
    while isinstance(handler, functools.partial):
        handler = handler.func
    handler = getattr(handler, "__func__", handler)
    code = getattr(handler, "__code__", None)
    if code is None and callable(handler):
        code = getattr(type(handler).__call__, "__code__", None)
    return code


def _received_frame(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a frame got the frame that it interrupted as an argument, as signal handlers do. (A
    handler may have set another one before it raises, so its code alone does not tell.)"""
    code = frame.f_code
    if code.co_filename.startswith(_PACKAGE):
        return False
    names = code.co_varnames[: code.co_argcount]
    return any(frame.f_locals.get(name) is interrupted for name in names)
