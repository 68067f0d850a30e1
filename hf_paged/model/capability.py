"""Decides how a model may be run: from its modules and config, then by comparing forwards; no list of model names."""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache, LinearAttentionLayer
from transformers.generation.utils import GenerationMixin

from .. import compat, forks
from ..attention.backends import cpp
from ..attention.latent import wrap_expansions
from ..attention.switch import (
    NAME,
    calls_interface,
    compiled_layers,
    foreign_attention,
    model_attention,
    switchable_configs,
    use_paged_attention,
)
from ..cache.block_manager import NO_BLOCKS, UNCACHED, BlockManager
from ..cache.layers import EMPTY_LAYERS, PagedHybridLayer, PagedLayer, PagedSlidingWindowLayer
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..cache.storage import is_out_of_memory
from ..compiled import FUNCTIONS, replaced_forward, running_eagerly
from ..config import PagedConfig
from ..interrupts import held, let_in, step_lock
from ..kernels import forced
from .forwards import code_of, compute_device, has_foreign_hook, hooks_of
from .own_loop import (
    first_inputs,
    map_tensors,
    next_logits,
    pad_token_id,
    select_rows,
    tensors_of,
    with_cross,
)
from .positions import PositionReads, Table, shorten
from .ranks import ranks_of
from .state import NOTES

Modules = list[tuple[str, nn.Module]]  # of a model, by name

_lock = forks.lock()
_REFUSED, _OPEN, _KNOWN = range(3)  # state of a check in one process: refused, not run yet, done
# Types of module attributes that determine what a forward computes, such as a `forward` that replaces the class's.
_TOLD = {bool, str, types.FunctionType, types.MethodType, functools.partial}
_MAX_VERDICTS = 16  # per model, which may switch between training and evaluation mode
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = weakref.WeakKeyDictionary()


class Layout(NamedTuple):
    """How rows go through a model's forward: packed, or as rectangles if `unsupported_reason` is set."""

    unsupported_reason: str | None = None
    # padding changes no result: prompts of different lengths may share a forward; else only those of equal length
    mixed_lengths: bool = True
    # rows of any requests may share a forward; else rows stay with the batch that they began in, and with all that the
    # model's own loop carries (`TOGETHER`)
    side_by_side: bool = True
    continues: bool = False  # a prompt may be computed in chunks, and begin after cached tokens
    # prefill and token-by-token decode give different logits: a recompute splits the tokens as the first run did
    replays: bool = False
    max_positions: int | None = None  # tokens of a sequence that a table of positions allows; `None`: any number
    grows_unpacked: bool = False  # whether forwards that are not packed make that table longer when they need it

    @property
    def reason_against_drafts(self) -> str | None:
        """Why a row cannot verify several draft tokens in one forward and roll back rejected ones."""
        return None if self.side_by_side and self.continues else self.unsupported_reason

    @property
    def reason(self) -> str:
        """The `reason` of a [`Route`] with this layout."""
        if self.unsupported_reason is None:
            return "packed forwards under the engine's scheduler"
        if not self.side_by_side:
            return f"rows as they began under the engine's scheduler, beside no others: {self.unsupported_reason}"
        return f"rows side by side under the engine's scheduler, not packed: {self.unsupported_reason}"


class PromptsVerdict(NamedTuple):
    """Whether decoding may run packed after the model's own forward computed prompts that are more than token ids."""

    unsupported_reason: str | None = None
    can_reuse: bool = False  # whether other prompts may use a prompt's cached prefix


TOGETHER = Layout(mixed_lengths=False, side_by_side=False, replays=True)
Known = dict[Hashable, Any]
"""Verdicts by kind of call, kept by a caller whose weights and configs do not change: with 100 modules `_look` takes
1 ms, `_glance` 0.15 ms."""
MakeRunner = Callable[[PreTrainedModel, PagedCache, Layout], tuple[BlockManager, Any]]  # `execution.executor.Runner`


class ForwardFailedError(Exception):
    """A forward failed in a check."""


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def choose_layout(model: PreTrainedModel, cache: PagedCache, make: MakeRunner) -> Layout:
    """The best layout in which each sequence gets the results that it gets alone; `cache`, built for the model, stays
    empty."""
    with step_lock(model):  # steps of other threads with several adapters have hooks on the model
        packed = _find(self_check, "packed", model, cache, make)
        if isinstance(packed, Layout):
            return packed
        found = _find(side_check, "side by side", model, cache, make)
        layout = found if isinstance(found, Layout) else TOGETHER
        if layout is TOGETHER and not model.config.is_encoder_decoder:
            layout = layout._replace(max_positions=max_positions(model, cache, None, make))
    return layout._replace(unsupported_reason=packed)


def note_unpackable(model: PreTrainedModel, cache: PagedCache, reason: str) -> None:
    """Notes that a packed forward failed for `reason` although `self_check` had found none: while the model stays in
    this state, `choose_layout` chooses no packed layout."""
    key = _key(self_check, None, model, cache, list(model.named_modules()))
    with _lock:
        _note(_verdicts.setdefault(model, {}), key, f"packed, its forward fails: {reason}")


def reason_against_invariance(model: PreTrainedModel, cache: PagedCache, make: MakeRunner) -> str | None:
    """Why a packed model cannot serve `batch_invariant`; `make` gives runners that compute each row as if alone."""
    if compute_device(model).type != "cpu":
        return f"it is on {compute_device(model)}"
    if not cpp.is_available() or forced() not in (None, "cpp"):
        return "the C++ kernels are not used"
    found = _find(invariance_check, "packed", model, cache, make)
    return found if isinstance(found, str) else None


def reason_against_mixing(
    model: PreTrainedModel, cache: PagedCache, make: MakeRunner, modules: tuple[str, ...]
) -> str | None:
    """Why rows with different adapters of these modules cannot share a forward of a packed model; `make` gives runners
    of three rows with different adapters."""
    found = _find(mixing_check, "packed", model, cache, make, kind=modules)
    return found if isinstance(found, str) else None


def check_prompts(
    model: PreTrainedModel, cache: PagedCache, prompts: Any, make: MakeRunner, known: Known | None = None
) -> PromptsVerdict:
    """Checks `prompts` (`execution.prompts.Prompts`) of a packed model; the verdict holds for all prompts with inputs
    of the same names."""
    kind = prompts.names, prompts.axis_counts, prompts.hides_tokens
    found = _find(prompts_check, "packed", model, cache, make, prompts, kind=kind, known=known)
    return found if isinstance(found, PromptsVerdict) else PromptsVerdict(found)


def how_prompts_merge(
    model: PreTrainedModel, cache: PagedCache, prompts: Any, make: MakeRunner, known: Known | None = None
) -> Hashable | None:
    """A key: prompts of several requests with equal keys may be prefilled in one forward; `None`: only alone."""
    likeness = prompts.likeness(model.config)
    if likeness is None:
        return None
    kind = prompts.names, prompts.axis_counts
    can_merge = _find(merge_check, "packed", model, cache, make, prompts, kind=kind, known=known) is True
    return likeness if can_merge else None


def reason_against_rows(
    model: PreTrainedModel, cache: PagedCache, prompts: Any, make: MakeRunner, known: Known | None = None
) -> str | None:
    """Why rows of these `Prompts` cannot leave their batch, or fork, in the layout `TOGETHER`."""
    kinds = tuple(sorted((name, str(type(value))) for name, value in prompts.model_kwargs.items() if value is not None))
    kind = kinds, len(prompts.paddings) > 1, any(prompts.paddings), prompts.length > 1, prompts.hides_tokens
    return _find(rows_check, "together", model, cache, make, prompts, kind=kind, known=known)


def max_positions(
    model: PreTrainedModel, cache: PagedCache, prompts: Any, make: MakeRunner, known: Known | None = None
) -> int | None:
    """`Layout.max_positions` in the layout `TOGETHER`; `prompts`: for a model with an encoder, `Prompts` with its
    outputs."""
    kind: tuple[str, ...] = ()
    if model.config.is_encoder_decoder:
        kind = tuple(sorted(name for name, value in prompts.model_kwargs.items() if value is not None))
    count = _find(positions_check, "together", model, cache, make, prompts, kind=kind, known=known)
    return None if isinstance(count, str) else count


def how_rows_join(
    model: PreTrainedModel, cache: PagedCache, prompts: Any, make: MakeRunner, known: Known | None = None
) -> tuple[bool, bool] | None:
    """The result of `join_check` for these `Prompts`; `None` also for caches or inputs that cannot be joined."""
    layers = [layer for part in (cache, cache.cross) if part is not None for layer in part.layers]
    is_known = not {type(layer) for layer in layers} - {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer}
    given = {name for name, value in prompts.model_kwargs.items() if value is not None}
    if cache.cross is None or not is_known or given & {"decoder_attention_mask", "decoder_position_ids"}:
        return None
    kind = tuple(sorted(given)), prompts.length > 1, prompts.num_encoder_tokens > 1
    found = _find(join_check, "together", model, cache, make, prompts, kind=kind, known=known)
    return None if isinstance(found, str) else found


def _find(
    check: Callable[..., Any],
    layout: str,
    model: PreTrainedModel,
    cache: PagedCache,
    *others: Any,
    kind: Any = None,
    known: Known | None = None,
) -> Any:
    """The `known` verdict, the first of `_reasons`, or the result of `check`, which runs several short forwards once
    per state of the model and `kind` of call."""
    if known is None:
        return _look(check, layout, model, cache, *others, kind=kind)
    glance = _glance(model)
    before, found = known.get((check, kind), (None, None))
    if before != glance:
        found = _look(check, layout, model, cache, *others, kind=kind)
        if not isinstance(found, str):  # a reason may be temporary
            known[check, kind] = glance, found
    return found


def _glance(model: PreTrainedModel) -> tuple[Any, ...]:
    """A key that changes with modules, their modes, hooks or forwards: covers less than `_code`, and is faster."""
    are_global = bool(torch_module._global_forward_hooks), bool(torch_module._global_forward_pre_hooks)
    held = ((type(x), x.training, replaced_forward(x), vars(x)) for x in model.modules())
    names = "_forward_hooks", "_forward_pre_hooks"  # torch never reuses their keys
    return are_global, [
        (kind.forward, is_training, forward, own.get("_hf_hook"), *(tuple(own[name]) for name in names))
        for kind, is_training, forward, own in held
    ]


def _look(
    check: Callable[..., Any], layout: str, model: PreTrainedModel, cache: PagedCache, *others: Any, kind: Any
) -> Any:
    modules, ranks = list(model.named_modules()), ranks_of(model)
    reason = next(_reasons(model, cache, modules, layout), None)
    if reason is not None and ranks is None:
        return reason
    key = _key(check, kind, model, cache, modules)
    with _lock:
        known = _verdicts.setdefault(model, {})
        state = _OPEN if key not in known else _KNOWN
    if ranks is not None:  # modules may differ between processes: all processes run the check, or none
        state = ranks.least(_REFUSED if reason is not None else state)
        if state == _REFUSED:
            return reason or "another of the processes that hold its shards cannot"
    if state == _KNOWN:
        return known[key]
    try:
        with step_lock(model), let_in():
            verdict = check(model, cache, *others)
    except ForwardFailedError as error:  # the cause may be temporary: the next call checks again
        return str(error)
    with _lock:
        _note(known, key, verdict)
    return verdict


def _key(check: Callable[..., Any], kind: Any, model: PreTrainedModel, cache: PagedCache, modules: Modules) -> Hashable:
    layers = tuple((type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers)
    return check, kind, layers, _code(model, modules)


def _note(verdicts: dict[Hashable, Any], key: Hashable, verdict: Any) -> None:
    while key not in verdicts and len(verdicts) >= _MAX_VERDICTS:
        del verdicts[next(iter(verdicts))]
    verdicts[key] = verdict


def _code(model: PreTrainedModel, modules: Modules) -> Hashable:
    """A key for the code of a model's forward and the sizes of its weights, without their values, computed in about a
    millisecond. Holds no model."""
    kinds = tuple((type(module), module.training) for _, module in modules)
    held = [
        x for _, module in modules for name, x in vars(module).items() if type(x) in _TOLD and name not in FUNCTIONS
    ]
    held += filter(None, (replaced_forward(module) for _, module in modules))
    held += [hook for _, module in modules for hook in hooks_of(module)]
    attributes = tuple(x if type(x) is bool else code_of(x) for x in held)
    classes = dict.fromkeys(base for kind, _ in kinds for base in kind.__mro__)
    functions = tuple(x for base in classes for x in vars(base).values() if isinstance(x, types.FunctionType))
    attention = tuple(map(model_attention, switchable_configs(module for _, module in modules)))
    tensors = (x for _, module in modules for kept in (module._parameters, module._buffers) for x in kept.values())
    shapes = tuple(x.shape for x in tensors if x is not None)  # a longer table allows more positions
    device = compute_device(model)
    return kinds, attributes, functions, attention, shapes, model.dtype, autocast_dtype(device), device


def is_stock(model: PreTrainedModel, name: str) -> bool:
    """Whether a method of the model is transformers' own."""
    return getattr(getattr(model, name, None), "__func__", None) is getattr(GenerationMixin, name)


def _reasons(model: PreTrainedModel, cache: PagedCache, modules: Modules, layout: str) -> Iterator[str]:
    """Yields why a `layout` is ruled out: "packed", "side by side" (rows join and leave) or "together" (rows leave)."""
    packs, joins = layout == "packed", layout != "together"
    if compat.is_pipeline(model):
        yield "its layers are in several processes"
    parameters = inspect.signature(model.forward).parameters
    attends_itself = not calls_interface(module for _, module in modules)
    missing = []
    if not attends_itself and "position_ids" not in parameters:  # a model's own attention has alibi in its mask
        missing.append("position_ids")
    if compat.cache_name(model) not in parameters:
        missing.append("cache")
    known = {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer}
    if joins and getattr(model.config, "is_encoder_decoder", False):
        yield "the model has an encoder"
    if packs and missing:
        yield f"its forward takes no {' and no '.join(missing)}"
    knows_layers = cache.layer_class_to_replicate is None and cache.layers
    if not knows_layers or not (packs or compat.supports_dynamic_cache(model)):
        yield "its cache does not know its layers before the first forward"
    if not packs:
        known |= {PagedHybridLayer, LinearAttentionLayer}
    if joins and (foreign := {type(layer) for layer in cache.layers} - known):
        names = ", ".join(sorted(layer.__name__ for layer in foreign))
        yield f"its cache has layers that hold more than keys and values: {names}"
    # overrides may pass inputs that the engine does not know, or end the loop at another time
    for name in (compat.UPDATE_INPUTS, compat.PREFILL, compat.LOOP_CONDITION):
        if not is_stock(model, name) and (joins or name != compat.UPDATE_INPUTS):
            yield f"it has a `{name}` of its own"
    if any(hasattr(module, "_setup_cache") for _, module in modules):  # forwards of a check would change that state
        yield "it keeps states in its modules, outside of any cache"
    if "prepare_inputs_for_generation" in vars(model):
        yield "its `prepare_inputs_for_generation` was replaced"
    is_loaded_with_ours = compat.attention_of(model.config.get_text_config(decoder=True)) == NAME
    if packs and not (attends_itself or is_loaded_with_ours or switchable_configs(module for _, module in modules)):
        yield "its code asks which attention it is configured with"
    # user functions must see the calls and rows of plain `generate`
    if reason := foreign_attention(module for _, module in modules):
        yield reason
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        yield "there are global forward hooks"
    devices = set()
    for name, module in modules:
        if has_foreign_hook(module):  # the hook would see packed tokens
            yield f"there are forward hooks on {name or 'the model'}"
        devices |= {x.device for x in (*module._parameters.values(), *module._buffers.values()) if x is not None}
    # accelerate loads meta weights when they are used, and moves activations between devices
    is_dispatched = any("_hf_hook" in vars(module) for _, module in modules)
    if len(devices) > 1 and not is_dispatched:
        yield f"its weights are on several devices: {', '.join(sorted(map(str, devices)))}"
    # a token's result must depend neither on other rows of the batch nor on random numbers
    config = model.config.get_text_config(decoder=True)
    if hasattr(config, "expert_capacity"):
        yield "its experts have a capacity for the whole batch"
    if getattr(config, "output_router_logits", False):
        yield "`output_router_logits` computes a loss over the whole batch"
    for _, module in modules:
        kinds = None if packs else getattr(module, "rope_type", None)
        for kind in kinds.values() if isinstance(kinds, dict) else [kinds]:
            if kind == "longrope" or "dynamic" in str(kind):
                yield f"its rotary embedding ({kind}) depends on the longest position in the batch"
        if module.training and (source := _chance(module)):
            yield f"it is in training mode with {source}"


def _chance(module: nn.Module) -> str | None:
    """Names the source of random numbers of a module in training mode; `None` if it has none."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        return "dropout" if module.p > 0 else None
    for name, value in vars(module).items():
        random = any(word in name for word in ("dropout", "drop_path", "layerdrop", "jitter", "noise"))
        if random and isinstance(value, (int, float)) and value > 0:
            return name
    return None


# -- checks: a few short forwards on random tokens, packed and side by side, compared with plain -------------------

# In standard deviations of the logits. Half precision rounds differently with every shape, by about a fifth of these
# values, and a router may then choose another expert for a token or two: there half of the tokens must be close.
TOLERANCE, HALF_TOLERANCE = 1e-3, {torch.bfloat16: 5e-2, torch.float16: 1e-2}

# checks use a separate memory: the model's may be bounded and full
_CONFIG = PagedConfig(block_size=8, kv_dtype=None, storage="blocks")
_LENGTH = 22  # tokens of each of the three sequences; above the windows and block size of a test's model
_FIRST, _SECOND = 8, 9  # prompt tokens of the first two sequences
_CHUNK, _THIRD = 18, 13  # tokens of the third's first chunk, of its prompt without chunks
# `hf_paged.budget` does not count it: a check that runs out of memory would say that the model cannot be packed
_scratch_memory = functools.partial(PagedMemory, _CONFIG, is_bounded=False)
_NUM_PROBED, _NUM_STEPS = 4, 3  # tokens of a prompt, and of steps behind it, that show which tables are read
StepPlan = tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...]]  # prompt lengths; steps of (row, query_len)
# Prompts side by side; decodes beside a chunk after cached tokens; nothing but decodes, of which all logits are wanted.
_PACKED_STEPS = (
    ((0, _FIRST), (1, _SECOND), (2, _CHUNK)),
    ((0, 1), (1, 1), (2, _LENGTH - _CHUNK)),
    ((0, 1), (1, 1)),
)
_PACKED_ENDS = (
    *((0, _FIRST), (1, _SECOND)),
    *((0, _FIRST + 1), (1, _SECOND + 1), (2, _LENGTH)),
    *((0, _FIRST + 2), (1, _SECOND + 2)),
)
"""The row of each of these steps' logits, and the number of tokens that precede them."""
# Prompts in two chunks; the second ones of equal length run side by side: shorter than a convolution's kernel, and
# longer.
_CONTINUING_STEPS = ((0, _FIRST), (2, 12), (1, 4)), ((0, 3), (2, 3), (1, 6))
# A short and a long row; a row that joins them; one that has left.
_SIDE_STEPS = ((0, _FIRST), (2, _THIRD)), ((0, 1), (2, 1)), ((1, _SECOND), (0, 1), (2, 1)), ((1, 1), (0, 1))


def self_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner) -> Layout | str:
    """Compares packed steps with plain forwards, of whole sequences and of decode steps: the packed `Layout`, or why
    they differ. Raises `ForwardFailedError` if a plain forward fails; out-of-memory errors pass through."""
    dtypes = {model.dtype}
    with _forwards(model):
        rows = _test_tokens(model)
        whole = model(input_ids=rows, use_cache=False, return_dict=True).logits
        decoded = _plain_logits(model, rows[:, : _FIRST + 2], _FIRST, dtypes)
        padded = _plain_logits(model, rows[:, [0, 0, *range(_FIRST + 2)]], _FIRST + 2, dtypes, padding=2)
    try:
        found = _step_logits(model, make, Layout(), rows, ((_FIRST, _SECOND, _LENGTH), _PACKED_STEPS))
    except ForwardFailedError as error:
        return f"packed, {error}"
    alone = torch.stack([whole[row, end - 1] for row, end in _PACKED_ENDS])
    in_steps = torch.stack([decoded[0, 1], decoded[1, 2], decoded[0, 2]])
    difference = functools.partial(_difference, dtypes, cache)
    in_any_step = difference(alone, found, "logits")
    in_decodes = difference(in_steps, found[[2, 3, 5]], "logits of decode steps")
    # the model's `prepare_inputs_for_generation` may give a first forward other inputs
    reason = in_any_step or in_decodes or difference(decoded[:, 0], whole[:, _FIRST - 1], "first logits")
    # the model may count padding among positions
    mixed_lengths = difference(decoded.flatten(0, 1), padded.flatten(0, 1), "logits") is None
    if reason is not None:
        return reason
    fixed, growing = _num_positions(model)
    grows = growing is not None and (fixed is None or growing < fixed)
    return Layout(mixed_lengths=mixed_lengths, max_positions=growing if grows else fixed, grows_unpacked=grows)


def invariance_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner) -> str | None:
    """Why the logits of a step are not bitwise equal to those of each row alone, or prefill to decode; `None` if they
    are. Raises as `self_check`."""
    found = self_check(model, cache, make)
    if isinstance(found, str):
        return found
    with _forwards(model):
        rows = _test_tokens(model)
    end = _FIRST + 2
    at_once = _step_logits(model, make, Layout(), rows, ((end, _SECOND, _LENGTH), (((0, end),),)))
    together, alone = _together_and_alone(model, make, rows)
    if not torch.equal(together, alone) or not torch.equal(at_once[0], alone[_PACKED_ENDS.index((0, end))]):
        return "some of what its forward computes is not done row by row"
    return None


def _together_and_alone(model: PreTrainedModel, make: MakeRunner, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Logits of `_PACKED_STEPS`, and of each row in steps of its own, `(len(_PACKED_ENDS), vocab_size)` each."""
    prompts = (_FIRST, _SECOND, _LENGTH)
    logits: dict[tuple[int, int], Tensor] = {}
    for row, prompt in enumerate(prompts):
        ends = [end for number, end in _PACKED_ENDS if number == row]
        steps = ((row, prompt),), *([((row, 1),)] * (len(ends) - 1))
        of_row = _step_logits(model, make, Layout(), rows, (prompts, steps))
        logits |= {(row, end): computed for end, computed in zip(ends, of_row)}
    together = _step_logits(model, make, Layout(), rows, (prompts, _PACKED_STEPS))
    return together, torch.stack([logits[place] for place in _PACKED_ENDS])


def mixing_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner) -> str | None:
    """Why rows in a step have other logits than alone; `None` if they agree. Raises as `self_check`."""
    with _forwards(model):
        rows = _test_tokens(model)
    together, alone = _together_and_alone(model, make, rows)
    return _difference({model.dtype}, cache, alone, together, "logits", "with several adapters in a forward")


def side_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner) -> Layout:
    """Compares rows side by side, joining and leaving, with plain forwards. Raises as `self_check`."""
    dtypes = {model.dtype}
    with _forwards(model):
        rows = _test_tokens(model)
        ends = ((_FIRST, 11), (_SECOND, 10), (_THIRD, 15))  # end of each row's prompt, and of its continuation
        plain = functools.partial(_plain_logits, model, dtypes=dtypes)
        short, middle, long = (plain(rows[i : i + 1, :end], n)[0] for i, (n, end) in enumerate(ends))
        at_once = [plain(rows[i : i + 1, :end], end)[0, 0] for i, (_, end) in enumerate(ends)]
    decoded = torch.stack([short[-1], middle[-1], long[-1]])
    replays = _difference(dtypes, cache, decoded, torch.stack(at_once), "logits") is not None
    order = short[0], long[0], short[1], long[1], middle[0], short[2], long[2], middle[1], short[3]

    def continues(layout: Layout) -> bool:
        with contextlib.suppress(ForwardFailedError):
            found = _step_logits(model, make, layout, rows, ((11, 10, 15), _CONTINUING_STEPS))
            expected = torch.stack([at_once[0], at_once[2], at_once[1]])
            return _difference(dtypes, cache, expected, found, "logits") is None
        return False

    can_continue = not replays and compat.supports_dynamic_cache(model)
    for mixed_lengths in (True, False):
        layout = Layout("not packed", mixed_lengths, replays=replays)
        with contextlib.suppress(ForwardFailedError):
            found = _step_logits(model, make, layout, rows, ((_FIRST, _SECOND, _THIRD), _SIDE_STEPS))
            if _difference(dtypes, cache, torch.stack(order), found, "logits") is None:
                can_continue = can_continue and continues(layout)
                return layout._replace(continues=can_continue, max_positions=_num_positions(model)[0])
    return TOGETHER


def rows_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner, prompts: Any) -> str | None:
    """Compares rows of `Prompts`, some of which leave or fork, with the whole batch in the model's own loop: why they
    differ, or `None`. Raises as `self_check`."""
    memory, order = (
        _scratch_memory(),
        sorted(range(len(prompts.paddings)), key=prompts.paddings.__getitem__),
    )
    a, b = order[-1], order[0]  # rows with the most padding and with the least
    plain: list[Tensor] = []
    prompts, others = copy.deepcopy(prompts), copy.deepcopy(prompts)
    with _forwards(model), use_paged_attention(switchable_configs(model.modules())):
        ids = prompts.input_ids
        twin = cache.empty_twin(memory)
        inputs = {**others.model_kwargs, compat.cache_name(model): with_cross(twin)}
        for step in range(3):
            logits, inputs = next_logits(model, ids, inputs, begins=not step)
            plain.append(logits)
            ids = torch.cat([ids, logits.argmax(-1, keepdim=True)], dim=1)
    if twin.cross is not None and twin.cross.get_seq_length() not in (0, prompts.num_encoder_tokens):
        return "its decoder does not attend to one token for each of its encoder's output"
    pairs = zip(tensors_of(others.model_kwargs), tensors_of(prompts.model_kwargs))
    if not all(bool(((x == y) | (x != x)).all()) for x, y in pairs):
        return "its forward writes to its inputs"
    own = _OwnRows(model, make(model, cache.empty_twin(memory), TOGETHER._replace(unsupported_reason="rows leave")))
    rows = [own.add(prompts, row, ids[row, -3:].tolist()) for row in range(len(prompts.paddings))]
    try:
        found = [own.run(*rows)]
        fork = SimpleNamespace(**{**vars(rows[b]), "blocks": own.manager.fork(rows[b].blocks)})
        found += [own.run(rows[b], fork), own.run(rows[a]) if a != b else plain[1][[a]], own.run(fork)]
    except ForwardFailedError as error:
        return f"without all rows of its batch, {error}"
    expected = torch.cat([plain[0], plain[1][[b, b, a]], plain[2][[b]]])
    dtypes = {
        model.dtype,
        autocast_dtype(compute_device(model)),
        *(getattr(layer, "dtype", None) for layer in twin.layers),
    }
    return _difference(dtypes, cache, expected, torch.cat(found), "logits", how="without all rows of its batch")


class _OwnRows:
    """Rows of `Prompts` on a runner of rectangles with a separate memory."""

    def __init__(self, model: PreTrainedModel, made: tuple[BlockManager, Any]) -> None:
        self.model, (self.manager, self.runner) = model, made

    def add(self, prompts: Any, row: int, new: list[int]) -> SimpleNamespace:
        """A sequence that starts with the prompt of `row` and continues with the tokens `new`."""
        encoders, encoded = self.runner.encoder_blocks, NO_BLOCKS
        if encoders is not None:
            encoded = encoders.new()
            encoders.append(encoded, prompts.num_encoder_tokens)
        length = prompts.length - prompts.paddings[row]
        request = SimpleNamespace(inputs=(prompts, row), encoded=encoded, length=length, tokens=[0] * length + new)
        return SimpleNamespace(draft=[], num_computed_tokens=0, blocks=self.manager.new(), request=request)

    def run(self, *sequences: Any) -> Tensor:
        """Logits of one step: the prompt of each sequence, or one more token. `_forwards` restores modules after each
        step, as if another call had run in between."""
        counts = [1 if each.num_computed_tokens else each.request.length for each in sequences]
        with _forwards(self.model), use_paged_attention(switchable_configs(self.model.modules())):
            for sequence, query_len in zip(sequences, counts):
                self.manager.append(sequence.blocks, query_len)
                sequence.num_computed_tokens += query_len
                sequence.token_ids = sequence.request.tokens[: sequence.num_computed_tokens]
            self.manager.flush_copies()
            logits: Tensor = self.runner.run(list(zip(sequences, counts)))
            return logits


def join_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner, prompts: Any) -> tuple[bool, bool] | None:
    """Compares rows of two prompts side by side with each alone. Returns whether their lengths, and those of their
    encoders, must be equal; `None` if the rows may not join. Raises as `self_check`."""
    width, row = prompts.num_encoder_tokens, torch.zeros(1, dtype=torch.long, device=prompts.input_ids.device)
    first, like, shorter = (copy.deepcopy(prompts) for _ in range(3))
    for each, end in ((first, width), (like, width), (shorter, max(1, width - 3))):

        def shorten(x: Tensor, end: int = end, sign: int = 1 if each is first else -1) -> Tensor:
            x = sign * x if x.is_floating_point() else x  # makes the two prompts differ: swapped rows are noticed
            return x[:, :end] if x.dim() > 1 and x.shape[1] == width else x

        given = {name: select_rows(name, x, row, len(each.paddings)) for name, x in each.model_kwargs.items()}
        each.model_kwargs = map_tensors(shorten, given)
        each.input_ids, each.paddings = each.input_ids[:1], each.paddings[:1]
    new = _test_tokens(model)[0, :3].tolist()

    def compute(second: Any, verdict: tuple[bool, bool], joins: bool) -> Tensor:
        """Logits of both rows, which begin together; then one gets a token more unless lengths must be equal."""
        for each in (first, second):
            each.joins = None
            each.set_joins(verdict if joins else None)
        slots = TOGETHER._replace(unsupported_reason="rows join")
        own = _OwnRows(model, make(model, cache.empty_twin(_scratch_memory()), slots))
        a, b = own.add(first, 0, new), own.add(second, 0, new[::-1])
        begun = [own.run(a, b), *([] if verdict[0] else [own.run(a)])]
        return torch.cat([*begun, own.run(a, b), own.run(a, b)])

    dtypes = {model.dtype, autocast_dtype(compute_device(model))}
    for verdict in itertools.product((False, True), (False, True) if width > 1 else (True,)):
        second = like if verdict[1] else shorter
        with contextlib.suppress(ForwardFailedError):
            alone, joined = (compute(second, verdict, joins) for joins in (False, True))
            if first.joins is not None and _difference(dtypes, cache, alone, joined, "logits") is None:
                return verdict
    return None


def positions_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner, prompts: Any) -> int | None:
    """How many tokens a table of positions allows in a row; of a model with an encoder, one of `Prompts`."""
    given = {}
    if model.config.is_encoder_decoder:
        row = torch.zeros(1, dtype=torch.long, device=prompts.input_ids.device)
        named = copy.deepcopy(prompts.model_kwargs).items()
        given = {name: select_rows(name, x, row, len(prompts.paddings)) for name, x in named if "decoder_" not in name}
    return _num_positions(model, given)[0]


def _num_positions(model: PreTrainedModel, given: dict[str, Any] | None = None) -> tuple[int | None, int | None]:
    """Returns how many positions the model's tables hold: those that end, and those that its forward makes longer when
    needed; `None` without any, or if a forward fails. `given`: inputs of a model with an encoder. A table is an axis of
    which each step reads one place, the one that follows that of the step before."""

    def compute(size: int = 0, length: int = 0) -> set[Table]:
        """Decodes tokens, with buffers of `size` cut to `length`; returns the tables."""
        with _forwards(model):
            if size and not shorten(model, size, length):
                raise IndexError("the table is no buffer")
            ids = _test_tokens(model)[:1, [0] * (_NUM_PROBED + _NUM_STEPS)]
            cache: Any = stock_cache(model) if compat.supports_dynamic_cache(model) else None
            if given and cache is not None:
                cache = EncoderDecoderCache(cache, stock_cache(model))
            inputs = first_inputs(model, ids[:, :_NUM_PROBED], torch.ones_like(ids[:, :_NUM_PROBED]), cache)
            if given:
                del inputs["attention_mask"]  # it would be the encoder's
                inputs |= given
            found: list[set[Table]] = []
            for end in range(_NUM_PROBED, ids.shape[1] + 1):
                tokens = ids[:, :end].clone()  # a slice of the model's own code would be read as a table
                with PositionReads(end - 1, model) as reads:
                    _, inputs = next_logits(model, tokens, inputs, begins=end == _NUM_PROBED)
                found.append(reads.tables)
            return set.intersection(*found[1:])

    def grows(table: Table) -> bool:
        if not table.is_parameter:
            with contextlib.suppress(ForwardFailedError):
                compute(table.size, table.offset + _NUM_PROBED + _NUM_STEPS - 1)
                return True
        return False

    try:
        tables = compute()
    except ForwardFailedError:
        return None, None
    growing = {table for table in tables if grows(table)}
    counts = ({table.size - table.offset for table in group} for group in (tables - growing, growing))
    fixed, longer = (min(each, default=None) for each in counts)
    return fixed, longer


def prompts_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner, prompts: Any) -> PromptsVerdict:
    """Compares prompts that the model's own forward computes, and packed decode steps after them, with plain forwards;
    then recomputes each prompt's end packed, after its tokens for other content. Raises as `self_check`."""
    dtypes = set[torch.dtype | None]()
    new = _test_tokens(model)[0, :2]  # stand for generated tokens
    plain = _prompt_logits(model, prompts, new, dtypes)
    with _forwards(model):
        wrap_expansions(model.modules())
        manager, runner = make(model, _scratch(model), Layout())
        if runner.rope is not None:
            return PromptsVerdict("its rotary embedding depends on the longest position of a prompt")
        ends = [prompts.length - padding for padding in prompts.paddings]
        rows = _PromptRows(manager, runner, prompts, new)
        with held(), use_paged_attention(switchable_configs(model.modules())), let_in():
            packed = torch.stack([rows.compute([end + count for end in ends]) for count in range(3)])
            reason = _difference(dtypes, cache, plain.flatten(0, 1), packed.flatten(0, 1), "logits behind a prompt")
            keys, can_reuse = prompts.keys(model.config), False
            if reason is None and keys is not None:
                firsts = [max(1, num_content) for _, num_content in keys]
                can_reuse = all(first < end for first, end in zip(firsts, ends)) and all(
                    table.first_token <= group.spec.first_visible(first)
                    for sequence, first in zip(rows.sequences, firsts)
                    for group, table in zip(manager.groups, sequence.blocks.tables)
                )
            if can_reuse:
                for sequence, first in zip(rows.sequences, firsts):
                    manager.truncate(sequence.blocks, first)
                    sequence.num_computed_tokens = first
                can_reuse = _difference(dtypes, cache, plain[0], rows.compute(ends), "logits") is None
        rows.free()
    return PromptsVerdict(reason, can_reuse)


def merge_check(model: PreTrainedModel, cache: PagedCache, make: MakeRunner, prompts: Any) -> bool:
    """Compares one forward of prompts and of longer ones with other images, and a packed decode step after it, with
    plain forwards of each."""
    new, dtypes = _test_tokens(model)[0, :2], set[torch.dtype | None]()
    parts = prompts, prompts.longer(int(new[0]))
    try:
        plain = torch.cat([_prompt_logits(model, part, new[1:], dtypes) for part in parts], dim=1)
        with _forwards(model):
            together = parts[0].merged(parts[1:], pad_token_id(model))
            for each in (parts[1], together):
                each.find_positions(model)
            if together.axes != [axes for part in parts for axes in part.axes]:
                return False  # padding counts among its positions
            runner = make(model, _scratch(model), Layout())
            rows = _PromptRows(*runner, together, new[1:])
            ends = [together.length - padding for padding in together.paddings]
            with held(), use_paged_attention(switchable_configs(model.modules())), let_in():
                packed = torch.stack([rows.compute([end + count for end in ends]) for count in range(2)])
            rows.free()
        return _difference(dtypes, cache, plain.flatten(0, 1), packed.flatten(0, 1), "logits") is None
    except Exception as error:  # memory may suffice for each alone
        if not (isinstance(error, ForwardFailedError) or is_out_of_memory(error)):
            raise
        return False


def _prompt_logits(model: PreTrainedModel, prompts: Any, new: Tensor, dtypes: set[torch.dtype | None]) -> Tensor:
    """Plain logits `(1 + n, rows, vocab_size)`: after the prompts and after each of the tokens `new` `(n,)`."""
    logits = []
    with _forwards(model):
        inputs = {**prompts.model_kwargs, compat.cache_name(model): _observed_cache(model, dtypes)}
        for count in range(len(new) + 1):
            ids = torch.cat([prompts.input_ids, new[:count].expand(len(prompts.input_ids), -1)], dim=1)
            found, inputs = next_logits(model, ids, inputs, begins=not count)
            logits.append(found)
    return torch.stack(logits)


class _PromptRows:
    """Rows of `Prompts` followed by the tokens `new`, on a runner of packed steps."""

    def __init__(self, manager: BlockManager, runner: Any, prompts: Any, new: Tensor) -> None:
        self._manager, self._runner, self.sequences = manager, runner, list[Any]()
        for row, padding in enumerate(prompts.paddings):
            end = prompts.length - padding
            sequence = _sequence(manager, end, (prompts, row))
            sequence.request.tokens = [*(prompts.input_ids[row, padding:].tolist() or [0] * end), *new.tolist()]
            self.sequences.append(sequence)

    def compute(self, ends: list[int]) -> Tensor:
        """Logits `(rows, vocab_size)` of a step that computes each row up to its entry in `ends`."""
        counts = [end - sequence.num_computed_tokens for end, sequence in zip(ends, self.sequences)]
        for sequence, count in zip(self.sequences, counts):
            self._manager.append(sequence.blocks, count, skips=not sequence.num_computed_tokens)
            sequence.num_computed_tokens += count
            sequence.token_ids = sequence.request.tokens[: sequence.num_computed_tokens]
        logits: Tensor = self._runner.run(list(zip(self.sequences, counts)))
        return logits

    def free(self) -> None:
        for sequence in self.sequences:
            self._manager.free(sequence.blocks)


@contextlib.contextmanager
def _forwards(model: PreTrainedModel) -> Iterator[None]:
    """Restores attributes that forwards set on modules, and the random state; layers with a cache run without compiled
    code, as in steps. Raises `ForwardFailedError` for any error
    but out of memory, and for a forward that draws random numbers."""
    device = compute_device(model)
    devices = [] if device.type in ("cpu", "meta") else [device]
    rng = torch.random.fork_rng(devices, device_type=device.type if devices else "cuda")
    with held(), rng, torch.no_grad(), running_eagerly(compiled_layers(model.modules())):
        held_by = (x for module in model.modules() for x in (vars(module), module._buffers))
        # attributes of a traced or scripted module are no dicts, and its code sets none
        before = [(attributes, dict(attributes)) for attributes in held_by if isinstance(attributes, dict)]
        drawn = _random_states(devices)
        try:
            with let_in():
                yield
            if not all(map(torch.equal, drawn, _random_states(devices))):  # rows of one prompt would share the draws
                raise RuntimeError("it draws random numbers")
        except Exception as error:
            if is_out_of_memory(error):
                raise
            raise ForwardFailedError(f"its forward fails: {first_line(error)}") from error
        finally:
            for now, known in before:
                kept = {name: x for name, x in now.items() if name in NOTES}
                for name in now.keys() - known.keys():
                    del now[name]
                now.update({**known, **kept})


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    return [torch.get_rng_state(), *(torch.get_device_module(device).get_rng_state(device) for device in devices)]


class _ObservedCache(DynamicCache):
    """Collects in `dtypes` the dtypes that a forward computes in when it caches: it may turn on autocast by itself."""

    dtypes: set[torch.dtype | None]

    def _observed(name: str) -> Callable[..., Any]:
        def method(self: _ObservedCache, *args: Any, **kwargs: Any) -> Any:
            for x in (*args, *kwargs.values()):
                if isinstance(x, Tensor) and x.is_floating_point():
                    self.dtypes |= {x.dtype, autocast_dtype(x.device)}
            return getattr(DynamicCache, name)(self, *args, **kwargs)

        return method

    update, update_conv_state, update_recurrent_state = map(
        _observed, ("update", "update_conv_state", "update_recurrent_state")
    )


def _observed_cache(model: PreTrainedModel, dtypes: set[torch.dtype | None]) -> _ObservedCache:
    cache = _ObservedCache(config=model.config.get_text_config(decoder=True))
    cache.dtypes = dtypes
    return cache


def _plain_logits(model: Any, rows: Tensor, prompt: int, dtypes: set[torch.dtype | None], padding: int = 0) -> Tensor:
    """Plain logits `(rows, n, vocab_size)`: after the first `prompt` tokens of rows, of which the first `padding` are
    masked, and after each later token. Adds the dtypes of the computation to `dtypes`."""
    ids, cache = rows[:, :prompt], _observed_cache(model, dtypes)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    inputs = first_inputs(model, ids, mask, cache)
    logits = []
    for length in range(prompt, rows.shape[1] + 1):
        found, inputs = next_logits(model, rows[:, :length], inputs, begins=length == prompt)
        logits.append(found)
    return torch.stack(logits, dim=1)


def _sequence(manager: BlockManager, num_prompt_tokens: int, inputs: Any = None) -> Any:
    request = SimpleNamespace(
        inputs=inputs, encoded=NO_BLOCKS, namespace=UNCACHED, num_prompt_tokens=num_prompt_tokens, prompt_logprobs=None
    )
    return SimpleNamespace(num_computed_tokens=0, token_ids=[], draft=[], blocks=manager.new(), request=request)


def _scratch(model: PreTrainedModel) -> PagedCache:
    return PagedCache(model.config.get_text_config(decoder=True), memory=_scratch_memory())


def stock_cache(model: PreTrainedModel) -> DynamicCache:
    return DynamicCache(config=model.config.get_text_config(decoder=True))


def _step_logits(model: PreTrainedModel, make: MakeRunner, layout: Layout, rows: Tensor, plan: StepPlan) -> Tensor:
    """Logits `(n, vocab_size)` that `Runner.run` returns for all steps of a plan."""
    prompts, steps = plan
    tokens, is_packed, logits = rows.tolist(), layout.unsupported_reason is None, []
    with _forwards(model):
        wrap_expansions(model.modules())
        manager, runner = make(model, _scratch(model), layout)
        sequences = [_sequence(manager, prompt) for prompt in prompts]
        for number, sequence in enumerate(sequences):
            sequence.request.row = number
        with held(), use_paged_attention(switchable_configs(model.modules())), let_in():
            for step in steps:
                for row, query_len in step:
                    sequence = sequences[row]
                    manager.append(sequence.blocks, query_len, skips=not is_packed)
                    sequence.num_computed_tokens += query_len
                    sequence.token_ids = tokens[row][: max(prompts[row], sequence.num_computed_tokens)]
                logits.append(runner.run([(sequences[row], query_len) for row, query_len in step]))
        for sequence in sequences:
            manager.free(sequence.blocks)
        return torch.cat(logits)


def _difference(
    dtypes: set[torch.dtype | None], cache: PagedCache, plain: Tensor, packed: Tensor, what: str, how: str = "packed"
) -> str | None:
    """Says how far logits `(n, vocab_size)`, computed in `dtypes`, differ if that exceeds the tolerance, else `None`;
    NaN and infinities must be at the same places."""
    plain, packed, finite = plain.float(), packed.float(), plain.isfinite()
    gap = torch.full((len(plain),), float("inf"), device=plain.device)
    if torch.equal(finite, packed.isfinite()):  # root mean square of each row, in standard deviations
        gap = torch.where(finite, plain - packed, 0.0).square().mean(1).sqrt() / plain[finite].std().clamp_min(1e-6)
    computed = {dtype for dtype in dtypes if dtype is not None}
    computed |= {spec.storage_dtype(dtype) for spec in cache.groups for dtype in computed}
    half = max((HALF_TOLERANCE[dtype] for dtype in computed if dtype in HALF_TOLERANCE), default=None)
    worst = float(gap.max() if half is None else gap.sort().values[len(gap) // 2])
    if not worst <= (half or TOLERANCE):  # also true for NaN
        return f"{how}, its {what} are {worst:.1e} standard deviations from those of a sequence alone"
    return None


def _test_tokens(model: PreTrainedModel) -> Tensor:
    """Token ids `(3, _LENGTH)` int64, no special tokens among them."""
    config = model.config.get_text_config(decoder=True)
    values = (value for name, value in {**vars(model.config), **vars(config)}.items() if name.endswith("token_id"))
    special = {value for value in values if isinstance(value, int)}
    vocab_size = min(model.get_input_embeddings().weight.shape[0], getattr(config, "vocab_size", 1 << 30))
    usable = [token for token in range(min(vocab_size, 4096)) if token not in special]
    chosen = torch.randint(len(usable), (3, _LENGTH), generator=torch.Generator().manual_seed(0), device="cpu")
    return torch.tensor(usable, device="cpu")[chosen].to(compute_device(model))
