"""Decides how a model may be run: from its modules and config, then by comparing forwards; no list
of model names."""

from __future__ import annotations

import functools
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
from ..compiled import FUNCTIONS, replaced_forward
from ..kernels import forced
from ..threads import step_lock
from ..timing import timed
from ..topics import Topic
from .checks import (
    invariance_check,
    join_check,
    judge_writes,
    merge_check,
    mixing_check,
    positions_check,
    prompts_check,
    rows_check,
    self_check,
    side_check,
)
from .forwards import code_of, compute_device, hooks_of, tensors_of_module
from .layout import TOGETHER, Layout, PromptsVerdict
from .sharding import processes_of
from .structure import KV_LAYERS, Modules, reasons
from .trial import ForwardFailedError, MakeRunner, Trial, product_precision
from .writes import notes_of

_lock = forks.lock()
_REFUSED, _OPEN, _KNOWN = range(3)  # state of a check in one process: refused, not run yet, done
# Types of module attributes that determine what a forward computes, such as a `forward` that
# replaces the class's.
_TOLD = {bool, str, types.FunctionType, types.MethodType, functools.partial}
_MAX_VERDICTS = 16  # per model, which may switch between training and evaluation mode
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = (
    weakref.WeakKeyDictionary()
)

Known = dict[Hashable, Any]
"""Verdicts by kind of call, kept by a caller whose weights and configs do not change: with 100
modules `_look` takes 1 ms, `_glance` 0.15 ms."""


class Capability:
    """How the rows of a model may go through its forwards, decided by checks. `cache`, built for
    the model, stays empty; `make` gives the runners of the checks. `known`: verdicts that a caller
    keeps."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        make: MakeRunner,
        known: Known | None = None,
    ) -> None:
        self._model = model
        self._cache = cache
        self._make = make
        self._known = known

    def choose_layout(self) -> Layout:
        """The best layout in which each sequence gets the results that it gets alone."""
        model = self._model
        with step_lock(model):  # steps of other threads with several adapters have hooks on it
            packed = self._find(self_check, "packed")
            if isinstance(packed, Layout):
                return packed
            layout = self._find(side_check, "side by side")
            if not isinstance(layout, Layout):
                layout = TOGETHER
            if layout is TOGETHER and not model.config.is_encoder_decoder:
                layout = layout._replace(max_positions=self.max_positions())
        return layout._replace(unsupported_reason=packed)

    def reason_against_invariance(self) -> str | None:
        """Why a packed model cannot serve `batch_invariant`; the runners compute each row as if
        alone."""
        device = compute_device(self._model)
        if device.type != "cpu":
            return Topic.BATCH_INVARIANT(f"it is on {device}")
        uses_cpp = cpp.is_available() and forced() in (None, "cpp")
        if not uses_cpp:
            return Topic.BATCH_INVARIANT("the C++ kernels are not used")
        return self._find(invariance_check, "packed")

    def reason_against_mixing(self, modules: tuple[str, ...]) -> str | None:
        """Why rows with different adapters of these modules cannot share a forward of a packed
        model; the runners are of three rows with different adapters."""
        return self._find(mixing_check, "packed", kind=modules)

    def check_prompts(self, prompts: Any) -> PromptsVerdict:
        """Checks `prompts` (`execution.prompts.Prompts`) of a packed model; the verdict holds for
        all prompts with inputs of the same names."""
        has_text = prompts.num_text(self._model.config) > 0
        kind = prompts.names, prompts.axis_counts, prompts.hides_tokens, has_text
        verdict = self._find(prompts_check, "packed", prompts, kind)
        if isinstance(verdict, PromptsVerdict):
            return verdict
        return PromptsVerdict(verdict)

    def how_prompts_merge(self, prompts: Any) -> Hashable | None:
        """A key: prompts of several requests with equal keys may be prefilled in one forward;
        `None`: only alone."""
        likeness = prompts.similarity_key(self._model.config)
        if likeness is None:
            return None
        kind = prompts.names, prompts.axis_counts
        verdict = self._find(merge_check, "packed", prompts, kind)
        return likeness if verdict is True else None

    def reason_against_rows(self, prompts: Any) -> str | None:
        """Why rows of these `Prompts` cannot leave their batch, or fork, in the layout
        `TOGETHER`."""
        kind = (
            tuple((name, str(type(prompts.model_kwargs[name]))) for name in _given(prompts)),
            len(prompts.paddings) > 1,
            any(prompts.paddings),
            prompts.length > 1,
            prompts.hides_tokens,
        )
        return self._find(rows_check, "together", prompts, kind)

    def max_positions(self, prompts: Any = None) -> int | None:
        """`Layout.max_positions` in the layout `TOGETHER`; `prompts`: for a model with an encoder,
        `Prompts` with its outputs."""
        kind = _given(prompts) if self._model.config.is_encoder_decoder else ()
        count = self._find(positions_check, "together", prompts, kind)
        return None if isinstance(count, str) else count

    def how_rows_join(self, prompts: Any) -> tuple[bool, bool] | None:
        """The result of `join_check` for these `Prompts`; `None` also for caches or inputs that
        cannot be joined."""
        cache = self._cache
        if cache.cross is None:
            return None
        given = _given(prompts)
        foreign = {type(layer) for layer in (*cache.layers, *cache.cross.layers)} - KV_LAYERS
        if foreign or not {"decoder_attention_mask", "decoder_position_ids"}.isdisjoint(given):
            return None
        kind = given, prompts.length > 1, prompts.num_encoder_tokens > 1
        verdict = self._find(join_check, "together", prompts, kind)
        return None if isinstance(verdict, str) else verdict

    def _find(
        self,
        check: Callable[[Trial], Any],
        layout: str,
        prompts: Any = None,
        kind: Any = None,
    ) -> Any:
        """The `known` verdict, the first of `structure.reasons`, or the result of `check`, which
        runs several short forwards once per state of the model and `kind` of call."""
        known = self._known
        if known is None:
            return self._look(check, layout, prompts, kind)
        glance = _glance(self._model)
        before, verdict = known.get((check, kind), (None, None))
        if before != glance:
            verdict = self._look(check, layout, prompts, kind)
            if not isinstance(verdict, str):  # a reason may be temporary
                known[check, kind] = glance, verdict
        return verdict

    def _look(self, check: Callable[[Trial], Any], layout: str, prompts: Any, kind: Any) -> Any:
        model = self._model
        cache = self._cache
        modules = list(model.modules())
        processes = processes_of(model)
        reason = next(reasons(model, cache, modules, layout), None)
        if reason is not None and processes is None:
            return reason
        key = _key(check, kind, model, cache, modules)
        with _lock:
            verdicts = _verdicts.setdefault(model, {})
            state = _KNOWN if key in verdicts else _OPEN
        if processes is not None:
            # modules may differ between processes: all processes run the check, or none
            if reason is not None:
                state = _REFUSED
            state = processes.least(state)
            if state == _REFUSED:
                return reason or Topic.RANKS("another rank cannot use this layout")
        if state == _KNOWN:
            return verdicts[key]
        try:
            with step_lock(model), timed("self_check"):
                trial = Trial(model, cache, self._make, prompts)
                verdict = check(trial)
                # whether it allows that prefixes are shared
                if isinstance(verdict, Layout) or getattr(verdict, "can_reuse", False):
                    judge_writes(trial)
        except ForwardFailedError as error:
            verdict = Topic.SELF_CHECK(str(error))
            if not error.lasts:  # the cause may be temporary: the next call checks again
                return verdict
        _note(model, _key(check, kind, model, cache, modules), verdict)
        return verdict


def note_unpackable(model: PreTrainedModel, cache: PagedCache, reason: str) -> None:
    """Notes that a packed forward failed for `reason` although `self_check` had found none: while
    the model stays in this state, `choose_layout` chooses no packed layout."""
    key = _key(self_check, None, model, cache, list(model.modules()))
    _note(model, key, Topic.SELF_CHECK(f"packed, its forward fails: {reason}"))


def _given(prompts: Any) -> tuple[str, ...]:
    """The sorted names of the inputs of `Prompts`."""
    inputs = prompts.model_kwargs.items()
    return tuple(sorted(name for name, value in inputs if value is not None))


def _glance(model: PreTrainedModel) -> tuple[Any, ...]:
    """A key that changes with modules, their modes, hooks or forwards: covers less than `_code`,
    and is faster."""
    are_global = (
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
    return are_global, modules


def _key(
    check: Callable[..., Any],
    kind: Any,
    model: PreTrainedModel,
    cache: PagedCache,
    modules: Modules,
) -> Hashable:
    layers = [(type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers]
    return check, kind, tuple(layers), _code(model, modules)


def _note(model: PreTrainedModel, key: Hashable, verdict: Any) -> None:
    with _lock:
        verdicts = _verdicts.setdefault(model, {})
        while key not in verdicts and len(verdicts) >= _MAX_VERDICTS:
            del verdicts[next(iter(verdicts))]
        verdicts[key] = verdict


def _code(model: PreTrainedModel, modules: Modules) -> Hashable:
    """A key for the code of a model's forward and the sizes of its weights, without their values,
    computed in about a millisecond. Holds no model."""
    kinds = tuple((type(module), module.training) for module in modules)
    held: list[Any] = []
    shapes: list[torch.Size] = []  # a longer table allows more positions
    unread = notes_of(model).unread
    for module in modules:
        skipped = {*FUNCTIONS, *unread.get(module, ())}
        for name, value in vars(module).items():
            if type(value) in _TOLD and name not in skipped:
                held.append(value)
        held += (replaced_forward(module), *hooks_of(module))
        shapes += [tensor.shape for tensor in tensors_of_module(module)]
    bases = dict.fromkeys(base for kind, _ in kinds for base in kind.__mro__)
    members = (member for base in bases for member in vars(base).values())
    functions = tuple(member for member in members if isinstance(member, types.FunctionType))
    configs = switchable_configs(modules)
    device = compute_device(model)
    return (
        kinds,
        tuple(map(code_of, held)),
        functions,
        tuple(map(model_attention, configs)),
        tuple(shapes),
        (model.dtype, autocast_dtype(device), product_precision(device)),
        device,
    )
