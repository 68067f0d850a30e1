"""What an interrupt leaves behind is put right where it arrives.

Python runs signal handlers between any two bytecodes of the main thread, and they may raise. A
step's bookkeeping recovers by itself (`StepLoop.recover`). What else a call changes for a while,
such as a model's attention, it puts back in `finally` blocks and contexts. An interrupt that is
raised just as one of them begins keeps it from its work: then the call around them, which is
[`guarded`], ends contexts that are [`restoring`], and has owners of other things drop what the
call left there (`ends_with_calls`).
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
    """Of a thread: the `restoring` contexts that it has entered in `guarded` calls and not left, in
    order, the number of such calls that it is in, and whether a nested one has raised."""

    def __init__(self) -> None:
        self.open: list[Generator[Any, None, None]] = []
        self.num_calls = 0
        self.is_ending_due = False  # what it left with owners is to be ended with the outermost


_contexts = _Contexts()
_OURS = os.path.dirname(__file__)
_TORCH = os.path.dirname(torch.__file__)
_CASTING = ("cpu", "cuda")  # devices with autocast
_owners: weakref.WeakSet[Any] = weakref.WeakSet()


def ends_with_calls(owner: Any) -> None:
    """Makes a call of no other that raises, or in which another raised, call `owner.end_calls()` at
    its end: what calls of this thread have left there is of none that goes on."""
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
            surely(self._end)
            raise

    def __exit__(self, *error: Any) -> bool | None:
        try:
            return super().__exit__(*error)
        finally:
            surely(self._end)

    def _end(self) -> None:
        self.gen.close()  # if an interrupt has kept it from its end
        with contextlib.suppress(ValueError):  # another thread's, as of a generator that it ends
            _contexts.open.remove(self.gen)


def restoring(
    function: Callable[P, Iterator[T]],
) -> Callable[P, contextlib.AbstractContextManager[T]]:
    """As `contextlib.contextmanager`, for a context that puts back what it changes."""

    @functools.wraps(function)
    def make(*args: P.args, **kwargs: P.kwargs) -> contextlib.AbstractContextManager[T]:
        generator: Any = function
        return _Restoring(generator, args, kwargs)

    return make


def guarded(function: Callable[P, T]) -> Callable[P, T]:
    """Makes a call that raises end the contexts which an interrupt has kept from ending, and put
    back torch's gradient mode, modes and autocast, whose own contexts are Python as well."""

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        depth = len(_contexts.open)
        restore_torch = _torch_state()
        _contexts.num_calls += 1
        try:
            result = function(*args, **kwargs)
            if _contexts.is_ending_due and _contexts.num_calls == 1:
                surely(_end_calls)
            return result
        except BaseException as error:
            surely(lambda: _put_back(depth, restore_torch))
            if is_interrupt(error):
                _let_go(error)
            raise
        finally:
            _contexts.num_calls -= 1

    return call


def num_modes() -> tuple[int, int]:
    """The numbers of torch's function and dispatch modes that are on."""
    return torch._C._len_torch_function_stack(), torch._C._len_torch_dispatch_stack()


def end_modes(before: tuple[int, int]) -> None:
    """Ends the modes behind `num_modes()` of before, which an interrupt has kept from ending."""
    num_functions, num_dispatched = before
    while torch._C._len_torch_function_stack() > num_functions:
        torch._C._pop_torch_function_stack()
    while (number := torch._C._len_torch_dispatch_stack()) > num_dispatched:
        mode = torch._C._get_dispatch_stack_at(number - 1)
        with contextlib.suppress(IndexError):  # if it had begun to end
            mode.__exit__(None, None, None)
        if torch._C._len_torch_dispatch_stack() == number:
            torch._C._pop_torch_dispatch_stack(None)


def _torch_state() -> Callable[[], None]:
    """Returns what puts back torch's gradient mode, modes and autocast as they are now."""
    has_gradients = torch.is_grad_enabled()
    modes = num_modes()
    # one step of Python's: an interrupt between the two functions would leave it one deeper
    starts, ends = torch.autocast_increment_nesting, torch.autocast_decrement_nesting
    _, depth = map(next, (iter(starts, None), iter(ends, None)))
    caches = torch.is_autocast_cache_enabled()
    casts = []
    for device in _CASTING:
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


def _put_back(depth: int, restore_torch: Callable[[], None]) -> None:
    try:
        while len(_contexts.open) > depth:
            _contexts.open[-1].close()
            _contexts.open.pop()
        if _contexts.num_calls == 1:
            _end_calls()
        else:  # its caller may go on
            _contexts.is_ending_due = True
    finally:
        restore_torch()


def _end_calls() -> None:
    for owner in list(_owners):
        owner.end_calls()
    _contexts.is_ending_due = False


def _let_go(error: BaseException) -> None:
    """Clears our frames of a traceback, which a notebook keeps: they hold blocks that were on their
    way to a sequence. And torch's: those of inference mode hold the mode."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename.startswith((_OURS, _TORCH)):
            with contextlib.suppress(RuntimeError):  # the frame of the guarded call itself
                trace.tb_frame.clear()
        trace = trace.tb_next


def surely(undo: Callable[[], object]) -> None:
    """Calls `undo`, and again if an interrupt ends it: it must be right to call it twice."""
    try:
        undo()
    except BaseException:
        undo()
        raise


def is_interrupt(error: BaseException) -> bool:
    """Whether an error is for the caller, and not to be handled as one of the code that runs: it is
    no `Exception`, or a signal's handler raised it."""
    if not isinstance(error, Exception):
        return True
    codes = {_code_of(signal.getsignal(number)) for number in signal.valid_signals()} - {None}
    trace = error.__traceback__
    interrupted: FrameType | None = None
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code in codes or (interrupted is not None and _got(frame, interrupted)):
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


def _got(frame: FrameType, interrupted: FrameType) -> bool:
    """Whether a frame was called with the frame that it interrupted, as handlers are: one that
    raises may have set another handler before."""
    code = frame.f_code
    if code.co_filename.startswith(_OURS):
        return False
    names = code.co_varnames[: code.co_argcount]
    return any(frame.f_locals.get(name) is interrupted for name in names)
