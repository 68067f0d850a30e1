"""Chooses the layout in which a model runs, first by its modules and config (`structure`), then by
comparing forwards (`checks`). There is no list of model names."""

from __future__ import annotations

import functools
import itertools
import types
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from .. import forks
from ..attention.backends import cpp
from ..attention.switch import model_attention, switchable_configs
from ..cache.memory import autocast_dtype
from ..cache.paged_cache import PagedCache
from ..compiled import FUNCTION_ATTRIBUTES, replaced_forward
from ..kernels import forced_backend
from ..rooms import RectanglesRoom, room_if_installed
from ..threads import step_lock
from ..timing import timed
from ..topics import Topic
from .checks import (
    classify_writes,
    invariance_check,
    packed_check,
)
from .forwards import behavior_key, compute_device, hooks_of, tensors_of_module
from .layout import Layout
from .sharding import processes_of
from .structure import Modules, Structure, reasons_against
from .trial import ForwardFailedError, MakeRunner, Trial, product_precision
from .writes import notes_of

_lock = forks.lock()
# States of a check in one process. If several processes hold the model, the lowest of their states
# decides.
_RULED_OUT, _PENDING, _DONE = range(3)
# `_code_key` includes the module attributes of these types, since such attributes, for example an
# activation function, determine what a forward computes. (It adds a replaced `forward` separately.)
_KEYED_TYPES = {bool, str, types.FunctionType, types.MethodType, functools.partial}
_MAX_VERDICTS = 16  # per model, which may switch between training and evaluation mode
_verdicts = weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]]()

Verdicts = dict[Hashable, Any]
"""Maps a check and a kind of call to the model's `_quick_key` at the time of the check, and to the
verdict. A caller may keep this dict while weights and configs do not change, which saves time: for
a model of 100 modules, a look-up takes 0.15 ms, and `_find_verdict` 1 ms."""


class Capability:
    """Checks how rows may share the model's forwards. `cache` was built for the model, and stays
    empty. `make_runner` makes the runners of the checks. If the caller passes `verdicts`, looks up
    and stores verdicts in them. Otherwise reads the model's structure only once, so the object must
    not be used for more than one call."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        make_runner: MakeRunner,
        verdicts: Verdicts | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self._make_runner = make_runner
        self._caller_verdicts = verdicts
        # the model's structure and its `_code_key`, kept by an object that serves one call: reading
        # them takes a millisecond
        self._structure: Structure | None = None
        self._code_key: Hashable = None

    def choose_layout(self) -> Layout:
        """Returns the best layout in which each sequence gets the results that it gets alone. If
        rows cannot be packed and the optional package `rectangles` is not installed, returns a
        layout that has only an `unsupported_reason`."""
        verdict = self.verdict(packed_check, "packed")
        if isinstance(verdict, Layout):
            return verdict
        rectangles: RectanglesRoom | None = room_if_installed("rectangles")
        if rectangles is None:
            return Layout(verdict)
        return rectangles.choose_layout(self, verdict)

    def reason_against_invariance(self) -> str | None:
        """Returns why a model that runs packed cannot be served with `batch_invariant`; `None` if
        it can. `make_runner` must make batch-invariant runners."""
        device = compute_device(self.model)
        if device.type != "cpu":
            return Topic.BATCH_INVARIANT(f"it is on {device}")
        uses_cpp = cpp.is_available() and forced_backend() in (None, "cpp")
        if not uses_cpp:
            return Topic.BATCH_INVARIANT("the C++ kernels are not used")
        return self.verdict(invariance_check, "packed")

    def verdict(
        self,
        check: Callable[[Trial], Any],
        layout_name: str,
        prompts: Any = None,
        call_kind: Any = None,
    ) -> Any:
        """Returns the verdict in the caller's `verdicts`, if it is still valid. Otherwise returns
        the first reason that `structure.reasons_against` finds for the layout of this name or, if
        it finds none, the result of `check`. A check runs several short forwards on `prompts` or on
        random tokens, so its result is cached by `call_kind` and the model's `_code_key`. If a
        forward fails, returns a reason that says so."""
        with step_lock(self.model):  # steps of other threads may add hooks for adapters
            verdicts = self._caller_verdicts
            if verdicts is None:
                return self._find_verdict(check, layout_name, prompts, call_kind)
            quick_key = _quick_key(self.model)
            old_key, verdict = verdicts.get((check, call_kind), (None, None))
            if old_key != quick_key:
                verdict = self._find_verdict(check, layout_name, prompts, call_kind)
                if not isinstance(verdict, str):  # a reason may be temporary
                    verdicts[check, call_kind] = quick_key, verdict
            return verdict

    def _find_verdict(
        self, check: Callable[[Trial], Any], layout_name: str, prompts: Any, call_kind: Any
    ) -> Any:
        model = self.model
        cache = self.cache
        processes = processes_of(model)
        if self._structure is None or self._caller_verdicts is not None:
            self._structure, self._code_key = Structure(model), None
        structure = self._structure
        reason = next(reasons_against(structure, cache, layout_name), None)
        if reason is not None and processes is None:
            return reason
        if self._code_key is None:
            self._code_key = _code_key(model, cache, structure.modules)
        key = check, call_kind, self._code_key
        with _lock:
            verdicts = _verdicts.setdefault(model, {})
            verdict = verdicts.get(key)
            state = _DONE if key in verdicts else _PENDING
        if processes is not None:
            # modules may differ between processes, but all processes must run the check, or none
            if reason is not None:
                state = _RULED_OUT
            state = processes.minimum(state)
            if state == _RULED_OUT:
                return reason or Topic.RANKS("another rank cannot use this layout")
        if state == _DONE:
            return verdict
        try:
            with timed("self_check"):
                trial = Trial(model, cache, self._make_runner, prompts)
                verdict = check(trial)
                # writes of forwards matter only if the verdict lets requests share prefixes
                if isinstance(verdict, Layout) or getattr(verdict, "can_reuse", False):
                    classify_writes(trial)
        except ForwardFailedError as error:
            verdict = Topic.SELF_CHECK(str(error))
            if not error.is_permanent:  # the cause may be temporary: the next call checks again
                return verdict
        # a new key: keys leave out write-only attributes, and `classify_writes` may just have
        # noted some
        self._code_key = _code_key(model, cache, structure.modules)
        _store_verdict(model, (check, call_kind, self._code_key), verdict)
        return verdict


def note_unpackable(model: PreTrainedModel, cache: PagedCache, reason: str) -> None:
    """Records why packed forwards of the model fail although `packed_check` has passed. While the
    model's `_code_key` stays the same, `choose_layout` chooses no packed layout."""
    key = packed_check, None, _code_key(model, cache, list(model.modules()))
    _store_verdict(model, key, Topic.SELF_CHECK(f"packed, its forward fails: {reason}"))


def _quick_key(model: PreTrainedModel) -> tuple[Any, ...]:
    """Returns a key of the modules' modes, hooks and forward functions, and of whether there are
    global hooks. It is faster to compute than `_code_key`."""
    has_global_hooks = (
        bool(torch_module._global_forward_hooks),
        bool(torch_module._global_forward_pre_hooks),
    )
    modules = [
        (
            type(module).forward,
            module.training,
            replaced_forward(module),
            tuple(hooks_of(module)),
        )
        for module in model.modules()
    ]
    return has_global_hooks, modules


def _store_verdict(model: PreTrainedModel, key: Hashable, verdict: Any) -> None:
    with _lock:
        verdicts = _verdicts.setdefault(model, {})
        verdicts[key] = verdict
        if len(verdicts) > _MAX_VERDICTS:
            del verdicts[next(iter(verdicts))]


def _code_key(model: PreTrainedModel, cache: PagedCache, modules: Modules) -> Hashable:
    """Returns a key of the code of a model's forward, the layers of its cache, the shapes of its
    weights, and the dtypes, precision and device with which it computes, but not of the weights'
    values. Takes about a millisecond. The key keeps no model alive."""
    module_types = tuple((type(module), module.training) for module in modules)
    attributes = []
    # verdicts depend on shapes: a longer table has more positions
    shapes: list[torch.Size] = []
    write_only = notes_of(model).write_only
    for module in modules:
        skipped_names = {*FUNCTION_ATTRIBUTES, *write_only.get(module, ())}
        for name, value in vars(module).items():
            if type(value) in _KEYED_TYPES and name not in skipped_names:
                attributes.append(value)
        attributes += (replaced_forward(module), *hooks_of(module))
        shapes += [tensor.shape for tensor in tensors_of_module(module)]
    bases = dict.fromkeys(base for module_type, _ in module_types for base in module_type.__mro__)
    members = itertools.chain.from_iterable(vars(base).values() for base in bases)
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    configs = switchable_configs(modules)
    device = compute_device(model)
    return (
        cache.layer_kinds,
        module_types,
        tuple(map(behavior_key, attributes)),
        tuple(functions),
        tuple(map(model_attention, configs)),
        tuple(shapes),
        (model.dtype, autocast_dtype(device), product_precision(device)),
        device,
    )
