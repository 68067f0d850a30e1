"""Decides how a model may be run: from its modules and config, then by comparing forwards; no list
of model names."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import inspect
import itertools
import types
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from transformers.cache_utils import (
    DynamicCache,
    EncoderDecoderCache,
    LinearAttentionLayer,
)
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
from ..cache.free_memory import is_out_of_memory
from ..cache.layers import (
    EMPTY_LAYERS,
    PagedHybridLayer,
    PagedLayer,
    PagedSlidingWindowLayer,
)
from ..cache.memory import PagedMemory, autocast_dtype
from ..cache.paged_cache import PagedCache
from ..cache.storage import LayerKV
from ..compiled import FUNCTIONS, replaced_forward, running_eagerly
from ..config import PagedConfig
from ..interrupts import is_interrupt, restoring, surely
from ..kernels import forced, uses_triton
from ..plan import StepPlan
from ..threads import step_lock
from ..timing import timed
from ..topics import Topic
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
from .state import unread_names
from .writes import Key, Snapshot, Writes, copied, is_same, judge, noted_writes

Modules = list[tuple[str, nn.Module]]  # of a model, by name

_lock = forks.lock()
_REFUSED, _OPEN, _KNOWN = range(3)  # state of a check in one process: refused, not run yet, done
# Types of module attributes that determine what a forward computes, such as a `forward` that
# replaces the class's.
_TOLD = {
    bool,
    str,
    types.FunctionType,
    types.MethodType,
    functools.partial,
}
_MAX_VERDICTS = 16  # per model, which may switch between training and evaluation mode
_verdicts: weakref.WeakKeyDictionary[PreTrainedModel, dict[Hashable, Any]] = (
    weakref.WeakKeyDictionary()
)


class Layout(NamedTuple):
    """How rows go through a model's forward: packed, or as rectangles if `unsupported_reason` is
    set."""

    unsupported_reason: str | None = None
    # padding changes no result: prompts of different lengths may share a forward; else only those
    # of equal length
    mixed_lengths: bool = True
    # rows of any requests may share a forward; else rows stay with the batch that they began in,
    # and with all that the model's own loop carries (`TOGETHER`)
    side_by_side: bool = True
    continues: bool = False  # a prompt may be computed in chunks, and begin after cached tokens
    # prefill and token-by-token decode give different logits: a recompute splits the tokens as the
    # first run did
    replays: bool = False
    # tokens of a sequence that a table of positions allows; `None`: any number
    max_positions: int | None = None
    # whether forwards that are not packed make that table longer when they need it
    grows_unpacked: bool = False
    # what the layers of its cache store, if rows may join and leave
    layers: tuple[LayerKV, ...] = ()

    @property
    def reason_against_drafts(self) -> str | None:
        """Why a row cannot verify several draft tokens in one forward and roll back rejected
        ones."""
        if self.side_by_side and self.continues:
            return None
        return self.unsupported_reason

    @property
    def reason(self) -> str:
        """The `reason` of a [`Route`] with this layout."""
        if self.unsupported_reason is None:
            return "packed forwards under the engine's scheduler"
        if not self.side_by_side:
            return (
                "rows stay in their original batch under the engine's scheduler:"
                f" {self.unsupported_reason}"
            )
        return (
            f"rows side by side under the engine's scheduler, not packed: {self.unsupported_reason}"
        )


class PromptsVerdict(NamedTuple):
    """Whether decoding may run packed after the model's own forward computed prompts that are more
    than token ids."""

    unsupported_reason: str | None = None
    can_reuse: bool = False  # whether other prompts may use a prompt's cached prefix
    begins_behind_text: bool = False  # whether the model's own forward may begin behind cached text


TOGETHER = Layout(
    mixed_lengths=False,
    side_by_side=False,
    replays=True,
)
Known = dict[Hashable, Any]
"""Verdicts by kind of call, kept by a caller whose weights and configs do not change: with 100
modules `_look` takes 1 ms, `_glance` 0.15 ms."""
# `execution.executor.Runner`
MakeRunner = Callable[[PreTrainedModel, PagedCache, Layout], tuple[BlockManager, Any]]


class ForwardFailedError(Exception):
    """A forward failed in a check. If it `lasts`, later checks would fail as well."""

    lasts = False


def first_line(error: BaseException) -> str:
    """The first line of an error's message, or its type's name."""
    message = str(error).strip()
    lines = message.splitlines()
    if lines:
        return lines[0]
    return type(error).__name__


def choose_layout(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
) -> Layout:
    """The best layout in which each sequence gets the results that it gets alone; `cache`, built
    for the model, stays empty."""
    with step_lock(model):  # steps of other threads with several adapters have hooks on the model
        packed = _find(self_check, "packed", model, cache, make)
        if isinstance(packed, Layout):
            return packed
        layout = _find(side_check, "side by side", model, cache, make)
        if not isinstance(layout, Layout):
            layout = TOGETHER
        if layout is TOGETHER and not model.config.is_encoder_decoder:
            num_positions = max_positions(model, cache, None, make)
            layout = layout._replace(max_positions=num_positions)
    return layout._replace(unsupported_reason=packed)


def note_unpackable(
    model: PreTrainedModel,
    cache: PagedCache,
    reason: str,
) -> None:
    """Notes that a packed forward failed for `reason` although `self_check` had found none: while
    the model stays in this state, `choose_layout` chooses no packed layout."""
    modules = list(model.named_modules())
    key = _key(self_check, None, model, cache, modules)
    verdict = Topic.SELF_CHECK(f"packed, its forward fails: {reason}")
    with _lock:
        verdicts = _verdicts.setdefault(model, {})
        _note(verdicts, key, verdict)


def reason_against_invariance(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
) -> str | None:
    """Why a packed model cannot serve `batch_invariant`; `make` gives runners that compute each row
    as if alone."""
    device = compute_device(model)
    if device.type != "cpu":
        return Topic.BATCH_INVARIANT(f"it is on {device}")
    uses_cpp = cpp.is_available() and forced() in (None, "cpp")
    if not uses_cpp:
        return Topic.BATCH_INVARIANT("the C++ kernels are not used")
    reason = _find(invariance_check, "packed", model, cache, make)
    if isinstance(reason, str):
        return reason
    return None


def reason_against_mixing(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
    modules: tuple[str, ...],
) -> str | None:
    """Why rows with different adapters of these modules cannot share a forward of a packed model;
    `make` gives runners of three rows with different adapters."""
    reason = _find(mixing_check, "packed", model, cache, make, kind=modules)
    if isinstance(reason, str):
        return reason
    return None


def check_prompts(
    model: PreTrainedModel,
    cache: PagedCache,
    prompts: Any,
    make: MakeRunner,
    known: Known | None = None,
) -> PromptsVerdict:
    """Checks `prompts` (`execution.prompts.Prompts`) of a packed model; the verdict holds for all
    prompts with inputs of the same names."""
    kind = (
        prompts.names,
        prompts.axis_counts,
        prompts.hides_tokens,
        prompts.num_text(model.config) > 0,
    )
    verdict = _find(
        prompts_check,
        "packed",
        model,
        cache,
        make,
        prompts,
        kind=kind,
        known=known,
    )
    if isinstance(verdict, PromptsVerdict):
        return verdict
    return PromptsVerdict(verdict)


def how_prompts_merge(
    model: PreTrainedModel,
    cache: PagedCache,
    prompts: Any,
    make: MakeRunner,
    known: Known | None = None,
) -> Hashable | None:
    """A key: prompts of several requests with equal keys may be prefilled in one forward; `None`:
    only alone."""
    likeness = prompts.likeness(model.config)
    if likeness is None:
        return None
    kind = prompts.names, prompts.axis_counts
    verdict = _find(
        merge_check,
        "packed",
        model,
        cache,
        make,
        prompts,
        kind=kind,
        known=known,
    )
    if verdict is True:
        return likeness
    return None


def reason_against_rows(
    model: PreTrainedModel,
    cache: PagedCache,
    prompts: Any,
    make: MakeRunner,
    known: Known | None = None,
) -> str | None:
    """Why rows of these `Prompts` cannot leave their batch, or fork, in the layout `TOGETHER`."""
    types_by_name = sorted(
        (name, str(type(value)))
        for name, value in prompts.model_kwargs.items()
        if value is not None
    )
    kind = (
        tuple(types_by_name),
        len(prompts.paddings) > 1,
        any(prompts.paddings),
        prompts.length > 1,
        prompts.hides_tokens,
    )
    return _find(
        rows_check,
        "together",
        model,
        cache,
        make,
        prompts,
        kind=kind,
        known=known,
    )


def max_positions(
    model: PreTrainedModel,
    cache: PagedCache,
    prompts: Any,
    make: MakeRunner,
    known: Known | None = None,
) -> int | None:
    """`Layout.max_positions` in the layout `TOGETHER`; `prompts`: for a model with an encoder,
    `Prompts` with its outputs."""
    kind: tuple[str, ...] = ()
    if model.config.is_encoder_decoder:
        inputs = prompts.model_kwargs.items()
        given = sorted(name for name, value in inputs if value is not None)
        kind = tuple(given)
    count = _find(
        positions_check,
        "together",
        model,
        cache,
        make,
        prompts,
        kind=kind,
        known=known,
    )
    if isinstance(count, str):
        return None
    return count


def how_rows_join(
    model: PreTrainedModel,
    cache: PagedCache,
    prompts: Any,
    make: MakeRunner,
    known: Known | None = None,
) -> tuple[bool, bool] | None:
    """The result of `join_check` for these `Prompts`; `None` also for caches or inputs that cannot
    be joined."""
    layers = [*cache.layers]
    if cache.cross is not None:
        layers += cache.cross.layers
    kinds = {type(layer) for layer in layers}
    foreign = kinds - {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer}
    inputs = prompts.model_kwargs.items()
    given = {name for name, value in inputs if value is not None}
    of_decoder = given & {"decoder_attention_mask", "decoder_position_ids"}
    if cache.cross is None or foreign or of_decoder:
        return None
    kind = (
        tuple(sorted(given)),
        prompts.length > 1,
        prompts.num_encoder_tokens > 1,
    )
    verdict = _find(
        join_check,
        "together",
        model,
        cache,
        make,
        prompts,
        kind=kind,
        known=known,
    )
    if isinstance(verdict, str):
        return None
    return verdict


def _find(
    check: Callable[..., Any],
    layout: str,
    model: PreTrainedModel,
    cache: PagedCache,
    *others: Any,
    kind: Any = None,
    known: Known | None = None,
) -> Any:
    """The `known` verdict, the first of `_reasons`, or the result of `check`, which runs several
    short forwards once per state of the model and `kind` of call."""
    if known is None:
        return _look(check, layout, model, cache, *others, kind=kind)
    glance = _glance(model)
    before, verdict = known.get((check, kind), (None, None))
    if before != glance:
        verdict = _look(check, layout, model, cache, *others, kind=kind)
        if not isinstance(verdict, str):  # a reason may be temporary
            known[check, kind] = glance, verdict
    return verdict


def _glance(model: PreTrainedModel) -> tuple[Any, ...]:
    """A key that changes with modules, their modes, hooks or forwards: covers less than `_code`,
    and is faster."""
    are_global = (
        bool(torch_module._global_forward_hooks),
        bool(torch_module._global_forward_pre_hooks),
    )
    parts = ((type(x), x.training, replaced_forward(x), vars(x)) for x in model.modules())
    modules = [
        (
            kind.forward,
            is_training,
            forward,
            attributes.get("_hf_hook"),
            tuple(attributes["_forward_hooks"]),  # torch never reuses their keys
            tuple(attributes["_forward_pre_hooks"]),
        )
        for kind, is_training, forward, attributes in parts
    ]
    return are_global, modules


def _look(
    check: Callable[..., Any],
    layout: str,
    model: PreTrainedModel,
    cache: PagedCache,
    *others: Any,
    kind: Any,
) -> Any:
    modules = list(model.named_modules())
    ranks = ranks_of(model)
    reason = next(_reasons(model, cache, modules, layout), None)
    if reason is not None and ranks is None:
        return reason
    key = _key(check, kind, model, cache, modules)
    with _lock:
        known = _verdicts.setdefault(model, {})
        state = _KNOWN if key in known else _OPEN
    if ranks is not None:
        # modules may differ between processes: all processes run the check, or none
        if reason is not None:
            state = _REFUSED
        state = ranks.least(state)
        if state == _REFUSED:
            return reason or Topic.RANKS("another rank cannot use this layout")
    if state == _KNOWN:
        return known[key]
    noting = noted_writes.set([])
    try:
        with step_lock(model), timed("self_check"):
            verdict = check(model, cache, *others)
            _judge_writes(model, verdict, *others[1:])
    except ForwardFailedError as error:
        verdict = Topic.SELF_CHECK(str(error))
        if not error.lasts:  # the cause may be temporary: the next call checks again
            return verdict
    finally:
        noted_writes.reset(noting)
    with _lock:
        key = _key(check, kind, model, cache, modules)
        _note(known, key, verdict)
    return verdict


def _judge_writes(
    model: PreTrainedModel,
    verdict: Any,
    prompts: Any = None,
) -> None:
    """If a check allows that prefixes are shared, finds out whether what its forwards wrote into
    the model matters to later ones (`writes.judge`)."""
    if isinstance(verdict, PromptsVerdict):
        shares = verdict.can_reuse
    else:
        shares = isinstance(verdict, Layout)
    writes = noted_writes.get()
    dtypes = set[torch.dtype | None]()
    if not shares or not writes:
        return

    def compute(given: Writes) -> tuple[Tensor | None, set[Key]]:
        with contextlib.suppress(ForwardFailedError), _forwards(model):
            rows = _test_tokens(model)
            for write in given.values():
                write.table[write.name] = copied(write.after)
            if prompts is None:
                row = rows[:1, : _FIRST + 1]
                logits = _plain_logits(model, row, _FIRST, dtypes)
            else:
                new = rows[0, :1]
                logits = _prompt_logits(model, prompts, new, dtypes)
            overwritten = set[Key]()
            for key, write in given.items():
                value = write.table.get(write.name)
                if not is_same(value, write.after):
                    overwritten.add(key)
            return logits, overwritten
        return None, set()

    judge(model, writes, compute)


def _key(
    check: Callable[..., Any],
    kind: Any,
    model: PreTrainedModel,
    cache: PagedCache,
    modules: Modules,
) -> Hashable:
    layers = [(type(layer), getattr(layer, "sliding_window", None)) for layer in cache.layers]
    return check, kind, tuple(layers), _code(model, modules)


def _note(verdicts: dict[Hashable, Any], key: Hashable, verdict: Any) -> None:
    while key not in verdicts and len(verdicts) >= _MAX_VERDICTS:
        del verdicts[next(iter(verdicts))]
    verdicts[key] = verdict


def _code(model: PreTrainedModel, modules: Modules) -> Hashable:
    """A key for the code of a model's forward and the sizes of its weights, without their values,
    computed in about a millisecond. Holds no model."""
    kinds = tuple((type(module), module.training) for _, module in modules)
    held: list[Any] = []
    for _, module in modules:
        skipped = unread_names(module).union(FUNCTIONS)
        for name, value in vars(module).items():
            if type(value) in _TOLD and name not in skipped:
                held.append(value)
    forwards = (replaced_forward(module) for _, module in modules)
    held += filter(None, forwards)
    for _, module in modules:
        held += hooks_of(module)
    attributes: list[Any] = []
    for value in held:
        if type(value) is bool:
            attributes.append(value)
        else:
            attributes.append(code_of(value))
    bases = (base for kind, _ in kinds for base in kind.__mro__)
    classes = dict.fromkeys(bases)
    members = (member for base in classes for member in vars(base).values())
    functions = [member for member in members if isinstance(member, types.FunctionType)]
    configs = switchable_configs(module for _, module in modules)
    attention = tuple(map(model_attention, configs))
    tensors = (
        x
        for _, module in modules
        for kept in (module._parameters, module._buffers)
        for x in kept.values()
    )
    # a longer table allows more positions
    shapes = tuple(x.shape for x in tensors if x is not None)
    device = compute_device(model)
    precision = model.dtype, autocast_dtype(device), _product_precision(device)
    return (
        kinds,
        tuple(attributes),
        tuple(functions),
        attention,
        shapes,
        precision,
        device,
    )


def is_stock(model: PreTrainedModel, name: str) -> bool:
    """Whether a method of the model is transformers' own, or missing there as well."""
    method = getattr(model, name, None)
    stock = getattr(GenerationMixin, name, None)
    function = getattr(method, "__func__", method)
    stock_function = getattr(stock, "__func__", stock)
    return function is stock_function


def overridden(model: PreTrainedModel, loop: str) -> str | None:
    """The first method that the model overrides and that transformers' `loop` calls, but not the
    engine's; `None` if there is none."""
    for name in compat.REPLACED_METHODS[loop]:
        if not is_stock(model, name):
            return name
    return None


def structural_reason(model: PreTrainedModel, cache: PagedCache) -> str | None:
    """Why the structure of the model, as it is now, rules out packed forwards; `None` if it does
    not."""
    modules = list(model.named_modules())
    return next(_reasons(model, cache, modules, "packed"), None)


def _reasons(
    model: PreTrainedModel,
    cache: PagedCache,
    modules: Modules,
    layout: str,
) -> Iterator[str]:
    """Yields why a `layout` is ruled out: "packed", "side by side" (rows join and leave) or
    "together" (rows leave)."""
    packs = layout == "packed"
    joins = layout != "together"
    if compat.is_pipeline(model):
        yield Topic.DEVICES("its layers are in several processes")
    parameters = inspect.signature(model.forward).parameters
    attends_itself = not calls_interface(module for _, module in modules)
    missing = []
    if not attends_itself and "position_ids" not in parameters:
        # a model's own attention has alibi in its mask
        missing.append("position_ids")
    if compat.cache_name(model) not in parameters:
        missing.append("cache")
    known = {*EMPTY_LAYERS, PagedLayer, PagedSlidingWindowLayer}
    if joins and getattr(model.config, "is_encoder_decoder", False):
        yield Topic.ENCODER("the model has an encoder")
    if packs and missing:
        yield Topic.MODEL_CODE(f"its forward takes no {' and no '.join(missing)}")
    knows_layers = cache.layer_class_to_replicate is None and cache.layers
    if not knows_layers or not (packs or compat.supports_dynamic_cache(model)):
        yield Topic.CACHE("its cache does not know its layers before the first forward")
    if not packs:
        known |= {PagedHybridLayer, LinearAttentionLayer}
    if joins:
        kinds = {type(layer) for layer in cache.layers}
        foreign = sorted(kind.__name__ for kind in kinds - known)
        if foreign:
            names = ", ".join(foreign)
            yield Topic.CACHE(f"its cache has layers that hold more than keys and values: {names}")
    # overrides may pass inputs that the engine does not know, or end the loop at another time
    if joins and not is_stock(model, compat.UPDATE_INPUTS):
        yield Topic.MODEL_CODE(f"it overrides `{compat.UPDATE_INPUTS}`")
    method = overridden(model, compat.SAMPLE)
    if method is not None:
        yield Topic.MODEL_CODE(f"it overrides `{method}`")
    states = [compat.attribute(module, "_setup_cache") for _, module in modules]
    if any(states):
        # forwards of a check would change that state
        yield Topic.CACHE("it keeps states in its modules, outside any cache")
    if "prepare_inputs_for_generation" in vars(model):
        yield Topic.MODEL_CODE("its `prepare_inputs_for_generation` was replaced")
    config = model.config.get_text_config(decoder=True)
    is_loaded_with_ours = compat.attention_of(config) == NAME
    must_switch = packs and not attends_itself and not is_loaded_with_ours
    if must_switch and not switchable_configs(module for _, module in modules):
        yield Topic.MODEL_CODE("its code reads which attention implementation is configured")
    # user functions must see the calls and rows of plain `generate`
    reason = foreign_attention(module for _, module in modules)
    if reason:
        yield reason
    if torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks:
        yield Topic.HOOKS("there are global forward hooks")
    devices = set()
    for name, module in modules:
        if has_foreign_hook(module):  # the hook would see packed tokens
            yield Topic.HOOKS(f"there are forward hooks on {name or 'the model'}")
        tensors = (*module._parameters.values(), *module._buffers.values())
        devices |= {tensor.device for tensor in tensors if tensor is not None}
    # accelerate loads meta weights when they are used, and moves activations between devices
    is_dispatched = any("_hf_hook" in vars(module) for _, module in modules)
    if len(devices) > 1 and not is_dispatched:
        names = ", ".join(sorted(map(str, devices)))
        yield Topic.DEVICES(f"its weights are on several devices: {names}")
    # a token's result must depend neither on other rows of the batch nor on random numbers
    if hasattr(config, "expert_capacity"):
        yield Topic.BATCH("its experts have a capacity for the whole batch")
    if getattr(config, "output_router_logits", False):
        yield Topic.BATCH("`output_router_logits` computes a loss over the whole batch")
    for _, module in modules:
        rope_types: Any = None
        if not packs:
            rope_types = compat.attribute(module, "rope_type")
        if isinstance(rope_types, dict):
            rope_types = rope_types.values()
        else:
            rope_types = [rope_types]
        for rope_type in rope_types:
            if rope_type == "longrope" or "dynamic" in str(rope_type):
                yield Topic.BATCH(
                    f"its rotary embedding ({rope_type}) depends on the longest position"
                    " in the batch"
                )
        if module.training:
            source = _chance(module)
            if source:
                yield Topic.TRAINING(f"it is in training mode with {source}")


def _chance(module: nn.Module) -> str | None:
    """Names the source of random numbers of a module in training mode; `None` if it has none."""
    if isinstance(module, nn.modules.dropout._DropoutNd):
        if module.p > 0:
            return "dropout"
        return None
    words = ("dropout", "drop_path", "layerdrop", "jitter", "noise")
    for name, value in vars(module).items():
        is_rate = any(word in name for word in words)
        is_random = is_rate and isinstance(value, (int, float)) and value > 0
        if is_random:
            return name
    return None


# -- checks: a few short forwards on random tokens, packed and side by side, compared with plain -

# In standard deviations of the logits. Half precision rounds differently with every shape, by about
# a fifth of these values, and a router may then choose another expert for a token or two: there
# half of the tokens must be close.
TOLERANCE = 1e-3
HALF_TOLERANCE = {
    torch.bfloat16: 5e-2,
    torch.float16: 1e-2,
}
# Half precision with as many bits as torch's options leave to operands of float32 products.
_ROUNDED = {
    "tf32": torch.float16,
    "bf16": torch.bfloat16,
}


def _product_precision(device: torch.device) -> tuple[str, bool]:
    """Torch's options for products on `device`: of float32, and whether those of float16 are summed
    in float16."""
    backend: Any = torch.backends.cuda
    if device.type in ("cpu", "xpu"):
        backend = torch.backends.mkldnn
    of_float32 = backend.matmul.fp32_precision
    sums_in_half = False
    if device.type == "cuda":
        sums_in_half = backend.matmul.allow_fp16_accumulation
    return of_float32, sums_in_half


def half_tolerance(
    dtypes: Iterable[torch.dtype | None],
    device: torch.device,
) -> float | None:
    """The tolerance of logits computed in `dtypes` on `device`; `None` if all products have
    float32's precision."""
    of_float32, sums_in_half = _product_precision(device)
    computed = set(dtypes)
    if torch.float32 in computed:
        computed.add(_ROUNDED.get(of_float32))
    if torch.float16 in computed and sums_in_half:
        computed.add(torch.bfloat16)
    tolerances = (HALF_TOLERANCE[dtype] for dtype in computed if dtype in HALF_TOLERANCE)
    return max(tolerances, default=None)


# checks use a separate memory: the model's may be bounded and full
# blocks of the usual size, so that a GPU compiles kernels once for the checks and the calls
_CONFIG = PagedConfig(
    block_size=16,
    kv_dtype=None,
    storage="blocks",
)
# tokens of each of the three sequences; above the block size, and the windows of a test's model
_LENGTH = 22
# prompt tokens of the first two sequences
_FIRST = 8
_SECOND = 9
# tokens of the third's first chunk, of its prompt without chunks
_CHUNK = 18
_THIRD = 13
# `hf_paged.budget` does not count it: a check that runs out of memory would say that the model
# cannot be packed
_scratch_memory = functools.partial(PagedMemory, _CONFIG, is_bounded=False)
# tokens of a prompt, and of steps behind it, that show which tables are read
_NUM_PROBED = 4
_NUM_STEPS = 3
# prompt lengths; steps of (row, query_len)
CheckedSteps = tuple[tuple[int, ...], tuple[tuple[tuple[int, int], ...], ...]]
# Prompts side by side; decodes beside a chunk after cached tokens; nothing but decodes, of which
# all logits are wanted.
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
# Prompts in two chunks; the second ones of equal length run side by side: shorter than a
# convolution's kernel, and longer.
_CONTINUING_STEPS = (
    ((0, _FIRST), (2, 12), (1, 4)),
    ((0, 3), (2, 3), (1, 6)),
)
# A short and a long row; a row that joins them; one that has left.
_SIDE_STEPS = (
    ((0, _FIRST), (2, _THIRD)),
    ((0, 1), (2, 1)),
    ((1, _SECOND), (0, 1), (2, 1)),
    ((1, 1), (0, 1)),
)


def self_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
) -> Layout | str:
    """Compares packed steps with plain forwards, of whole sequences and of decode steps: the packed
    `Layout`, or why they differ. Raises `ForwardFailedError` if a plain forward fails;
    out-of-memory errors pass through."""
    dtypes = {model.dtype}
    with _forwards(model):
        rows = _test_tokens(model)
        output = model(
            input_ids=rows,
            use_cache=False,
            return_dict=True,
        )
        whole = output.logits
        decoded_rows = rows[:, : _FIRST + 2]
        decoded = _plain_logits(model, decoded_rows, _FIRST, dtypes)
        padded_rows = rows[:, [0, 0, *range(_FIRST + 1)]]
        padded = _plain_logits(model, padded_rows, _FIRST + 2, dtypes, padding=2)
    memory = _scratch_memory()
    plan = (_FIRST, _SECOND, _LENGTH), _PACKED_STEPS
    try:
        packed = _step_logits(model, make, Layout(), rows, plan, memory)
    except ForwardFailedError as error:
        return Topic.SELF_CHECK(f"packed, {error}")
    alone = torch.stack([whole[row, end - 1] for row, end in _PACKED_ENDS])
    in_steps = torch.stack(
        [
            decoded[0, 1],
            decoded[1, 2],
            decoded[0, 2],
        ]
    )
    difference = functools.partial(_difference, dtypes, cache)
    in_any_step = difference(alone, packed, "logits")
    in_decodes = difference(in_steps, packed[[2, 3, 5]], "logits of decode steps")
    reason = in_any_step or in_decodes
    if reason is None:
        # the model's `prepare_inputs_for_generation` may give a first forward other inputs
        first_decoded = decoded[:, 0]
        first_whole = whole[:, _FIRST - 1]
        reason = difference(first_decoded, first_whole, "first logits")
    # the model may count padding among positions
    unpadded = decoded[:, :2].flatten(0, 1)
    from_padding = difference(unpadded, padded.flatten(0, 1), "logits")
    mixed_lengths = from_padding is None
    if reason is not None:
        return reason
    fixed, growing = _num_positions(model)
    if not rows.is_cpu and uses_triton(rows):
        run_kernels(model, cache, make)
    grows = growing is not None and (fixed is None or growing < fixed)
    most = growing if grows else fixed
    return Layout(
        mixed_lengths=mixed_lengths,
        max_positions=most,
        grows_unpacked=grows,
        layers=memory.layers(),
    )


def run_kernels(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
) -> None:
    """Computes a packed prompt and a decode step in blocks of the size and dtype that `cache` has,
    unless the checks have the same: kernels that cannot run are then known before a request needs
    them (`kernels.triton.launch`)."""
    config = cache.memory.config
    like = dataclasses.replace(
        _CONFIG,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        storage=config.storage,
    )
    if like == _CONFIG:
        return
    memory = PagedMemory(like, is_bounded=False, sizes=cache.memory.sizes)
    end = _LENGTH - 1
    prefill = ((0, end),)
    decode = ((0, 1),)
    plan = (end,), (prefill, decode)
    try:
        rows = _test_tokens(model)
        _step_logits(model, make, Layout(), rows, plan, memory)
    except Exception as error:
        if is_interrupt(error):
            raise
        # there may be no memory for large blocks, which requests then wait for
        is_expected = isinstance(error, ForwardFailedError) or is_out_of_memory(error)
        if not is_expected:
            raise


def invariance_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
) -> str | None:
    """Why the logits of a step are not bitwise equal to those of each row alone, or prefill to
    decode; `None` if they are. Raises as `self_check`."""
    layout = self_check(model, cache, make)
    if isinstance(layout, str):
        return layout
    with _forwards(model):
        rows = _test_tokens(model)
    end = _FIRST + 2
    prefill = ((0, end),)
    plan = (end, _SECOND, _LENGTH), (prefill,)
    at_once = _step_logits(model, make, Layout(), rows, plan)
    together, alone = _together_and_alone(model, make, rows)
    is_invariant = torch.equal(together, alone)
    if is_invariant:
        decoded = alone[_PACKED_ENDS.index((0, end))]
        is_invariant = torch.equal(at_once[0], decoded)
    if not is_invariant:
        return Topic.BATCH_INVARIANT("its forward does not compute every row by itself")
    return None


def _together_and_alone(
    model: PreTrainedModel,
    make: MakeRunner,
    rows: Tensor,
) -> tuple[Tensor, Tensor]:
    """Logits of `_PACKED_STEPS`, and of each row in steps of its own, `(len(_PACKED_ENDS),
    vocab_size)` each."""
    prompts = (_FIRST, _SECOND, _LENGTH)
    logits: dict[tuple[int, int], Tensor] = {}
    for row, prompt in enumerate(prompts):
        ends = [end for number, end in _PACKED_ENDS if number == row]
        prefill = ((row, prompt),)
        decodes = [((row, 1),)] * (len(ends) - 1)
        plan: CheckedSteps = prompts, (prefill, *decodes)
        of_row = _step_logits(model, make, Layout(), rows, plan)
        for end, computed in zip(ends, of_row):
            logits[row, end] = computed
    plan = prompts, _PACKED_STEPS
    together = _step_logits(model, make, Layout(), rows, plan)
    alone = torch.stack([logits[row_and_end] for row_and_end in _PACKED_ENDS])
    return together, alone


def mixing_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
) -> str | None:
    """Why rows in a step have other logits than alone; `None` if they agree. Raises as
    `self_check`."""
    with _forwards(model):
        rows = _test_tokens(model)
    together, alone = _together_and_alone(model, make, rows)
    return _difference(
        {model.dtype},
        cache,
        alone,
        together,
        "logits",
        "with several adapters in a forward",
    )


def side_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
) -> Layout:
    """Compares rows side by side, joining and leaving, with plain forwards. Raises as
    `self_check`."""
    dtypes = {model.dtype}
    with _forwards(model):
        rows = _test_tokens(model)
        # end of each row's prompt, and of its continuation
        ends = (
            (_FIRST, 11),
            (_SECOND, 10),
            (_THIRD, 15),
        )
        plain = functools.partial(_plain_logits, model, dtypes=dtypes)
        alone = [rows[i : i + 1, :end] for i, (_, end) in enumerate(ends)]
        in_steps = []
        for row, (prompt, _) in zip(alone, ends):
            logits = plain(row, prompt)
            in_steps.append(logits[0])
        short, middle, long = in_steps
        at_once = []
        for row, (_, end) in zip(alone, ends):
            logits = plain(row, end)
            at_once.append(logits[0, 0])
    decoded = torch.stack([short[-1], middle[-1], long[-1]])
    difference = _difference(dtypes, cache, decoded, torch.stack(at_once), "logits")
    replays = difference is not None
    order = (
        *(short[0], long[0]),
        *(short[1], long[1]),
        *(middle[0], short[2], long[2]),
        *(middle[1], short[3]),
    )

    def continues(layout: Layout) -> bool:
        plan = (11, 10, 15), _CONTINUING_STEPS
        with contextlib.suppress(ForwardFailedError):
            computed = _step_logits(model, make, layout, rows, plan)
            expected = torch.stack([at_once[0], at_once[2], at_once[1]])
            return _difference(dtypes, cache, expected, computed, "logits") is None
        return False

    can_continue = not replays and compat.supports_dynamic_cache(model)
    plan = (_FIRST, _SECOND, _THIRD), _SIDE_STEPS
    for mixed_lengths in (True, False):
        layout = Layout("not packed", mixed_lengths, replays=replays)
        memory = _scratch_memory()
        with contextlib.suppress(ForwardFailedError):
            computed = _step_logits(model, make, layout, rows, plan, memory)
            expected = torch.stack(order)
            if _difference(dtypes, cache, expected, computed, "logits") is None:
                can_continue = can_continue and continues(layout)
                most, _ = _num_positions(model)
                return layout._replace(
                    continues=can_continue,
                    max_positions=most,
                    layers=memory.layers(),
                )
    return TOGETHER


def rows_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
    prompts: Any,
) -> str | None:
    """Compares rows of `Prompts`, some of which leave or fork, with the whole batch in the model's
    own loop: why they differ, or `None`. Raises as `self_check`."""
    memory = _scratch_memory()
    num_rows = len(prompts.paddings)
    order = sorted(range(num_rows), key=prompts.paddings.__getitem__)
    a, b = order[-1], order[0]  # rows with the most padding and with the least
    plain: list[Tensor] = []
    prompts, others = copy.deepcopy(prompts), copy.deepcopy(prompts)
    with _forwards(model), use_paged_attention(switchable_configs(model.modules())):
        ids = prompts.input_ids
        twin = cache.empty_twin(memory)
        cache_name = compat.cache_name(model)
        inputs = {**others.model_kwargs, cache_name: with_cross(twin)}
        for step in range(3):
            logits, inputs = next_logits(model, ids, inputs, begins=not step)
            plain.append(logits)
            new = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
    if twin.cross is not None:
        num_attended = twin.cross.get_seq_length()
        if num_attended not in (0, prompts.num_encoder_tokens):
            return Topic.ENCODER(
                "its decoder attends to another number of tokens than its encoder returns"
            )
    after = tensors_of(others.model_kwargs)
    before = tensors_of(prompts.model_kwargs)
    for x, y in zip(after, before):
        is_kept = (x == y) | (x != x)
        if not bool(is_kept.all()):
            return Topic.MODEL_CODE("its forward writes to its inputs")
    layout = TOGETHER._replace(unsupported_reason="rows leave")
    made = make(model, cache.empty_twin(memory), layout)
    own = _OwnRows(model, made)
    rows = []
    for row in range(num_rows):
        new_tokens = ids[row, -3:].tolist()
        rows.append(own.add(prompts, row, new_tokens))
    try:
        all_rows = own.run(*rows)
        blocks = own.manager.fork(rows[b].blocks)
        fork = SimpleNamespace(**{**vars(rows[b]), "blocks": blocks})
        forked = own.run(rows[b], fork)
        if a != b:
            alone = own.run(rows[a])
        else:
            alone = plain[1][[a]]
        fork_alone = own.run(fork)
    except ForwardFailedError as error:
        return Topic.SELF_CHECK(f"without all rows of its batch, {error}")
    computed = torch.cat([all_rows, forked, alone, fork_alone])
    at_first, at_second, at_third = plain
    expected = torch.cat([at_first, at_second[[b, b, a]], at_third[[b]]])
    dtypes = {
        model.dtype,
        autocast_dtype(compute_device(model)),
        *(getattr(layer, "dtype", None) for layer in twin.layers),
    }
    return _difference(
        dtypes,
        cache,
        expected,
        computed,
        "logits",
        how="without all rows of its batch",
    )


class _OwnRows:
    """Rows of `Prompts` on a runner of rectangles with a separate memory."""

    def __init__(
        self,
        model: PreTrainedModel,
        made: tuple[BlockManager, Any],
    ) -> None:
        self.model = model
        self.manager, self.runner = made

    def add(self, prompts: Any, row: int, new: list[int]) -> SimpleNamespace:
        """A sequence that starts with the prompt of `row` and continues with the tokens `new`."""
        encoders = self.runner.encoder_blocks
        encoded = NO_BLOCKS
        if encoders is not None:
            encoded = encoders.new()
            encoders.append(encoded, prompts.num_encoder_tokens)
        length = prompts.length - prompts.paddings[row]
        request = SimpleNamespace(
            inputs=(prompts, row),
            encoded=encoded,
            length=length,
            tokens=[0] * length + new,
        )
        return SimpleNamespace(
            draft=[],
            num_computed_tokens=0,
            token_ids=[],
            blocks=self.manager.new(),
            request=request,
        )

    def run(self, *sequences: Any) -> Tensor:
        """Logits of one step: the prompt of each sequence, or one more token. `_forwards` restores
        modules after each step, as if another call had run in between."""
        counts = []
        for sequence in sequences:
            if sequence.num_computed_tokens:
                counts.append(1)
            else:
                counts.append(sequence.request.length)
        step = list(zip(sequences, counts))
        with (
            _forwards(self.model),
            use_paged_attention(switchable_configs(self.model.modules())),
        ):
            for sequence, count in step:
                self.manager.append(sequence.blocks, count)
                end = sequence.num_computed_tokens + count
                sequence.token_ids = sequence.request.tokens[:end]
            self.manager.flush_copies()
            return _computed(self.runner, step)


def join_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
    prompts: Any,
) -> tuple[bool, bool] | None:
    """Compares rows of two prompts side by side with each alone. Returns whether their lengths, and
    those of their encoders, must be equal; `None` if the rows may not join. Raises as
    `self_check`."""
    width = prompts.num_encoder_tokens
    device = prompts.input_ids.device
    row = torch.zeros(1, dtype=torch.long, device=device)
    first = copy.deepcopy(prompts)
    like = copy.deepcopy(prompts)
    shorter = copy.deepcopy(prompts)
    ends = (
        (first, width),
        (like, width),
        (shorter, max(1, width - 3)),
    )
    for single, end in ends:
        sign = 1 if single is first else -1

        def shorten(x: Tensor, end: int = end, sign: int = sign) -> Tensor:
            if x.is_floating_point():
                # makes the two prompts differ: swapped rows are noticed
                x = sign * x
            if x.dim() > 1 and x.shape[1] == width:
                return x[:, :end]
            return x

        num_rows = len(single.paddings)
        inputs = single.model_kwargs.items()
        given = {name: select_rows(name, x, row, num_rows) for name, x in inputs}
        single.model_kwargs = map_tensors(shorten, given)
        single.input_ids, single.paddings = single.input_ids[:1], single.paddings[:1]
    tokens = _test_tokens(model)
    new = tokens[0, :3].tolist()

    def compute(second: Any, verdict: tuple[bool, bool], joins: bool) -> Tensor:
        """Logits of both rows, which begin together; then one gets a token more unless lengths must
        be equal."""
        for single in (first, second):
            single.joins = None
            single.set_joins(verdict if joins else None)
        layout = TOGETHER._replace(unsupported_reason="rows join")
        twin = cache.empty_twin(_scratch_memory())
        own = _OwnRows(model, make(model, twin, layout))
        a = own.add(first, 0, new)
        b = own.add(second, 0, new[::-1])
        logits = [own.run(a, b)]
        if not verdict[0]:
            logits.append(own.run(a))
        logits.append(own.run(a, b))
        logits.append(own.run(a, b))
        return torch.cat(logits)

    dtypes = {model.dtype, autocast_dtype(compute_device(model))}
    encoders_must_be_equal = [True]
    if width > 1:
        encoders_must_be_equal = [False, True]
    for verdict in itertools.product((False, True), encoders_must_be_equal):
        second = like if verdict[1] else shorter
        with contextlib.suppress(ForwardFailedError):
            alone = compute(second, verdict, joins=False)
            joined = compute(second, verdict, joins=True)
            if first.joins is None:
                continue
            if _difference(dtypes, cache, alone, joined, "logits") is None:
                return verdict
    return None


def positions_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
    prompts: Any,
) -> int | None:
    """How many tokens a table of positions allows in a row; of a model with an encoder, one of
    `Prompts`."""
    given = {}
    if model.config.is_encoder_decoder:
        device = prompts.input_ids.device
        row = torch.zeros(1, dtype=torch.long, device=device)
        num_rows = len(prompts.paddings)
        inputs = copy.deepcopy(prompts.model_kwargs)
        given = {
            name: select_rows(name, value, row, num_rows)
            for name, value in inputs.items()
            if "decoder_" not in name
        }
    fixed, _ = _num_positions(model, given)
    return fixed


def _num_positions(
    model: PreTrainedModel,
    given: dict[str, Any] | None = None,
) -> tuple[int | None, int | None]:
    """Returns how many positions the model's tables hold: those that end, and those that its
    forward makes longer when needed; `None` without any, or if a forward fails. `given`: inputs of
    a model with an encoder. A table is an axis of which each step reads one place, the one that
    follows that of the step before."""

    def compute(size: int = 0, length: int = 0) -> set[Table]:
        """Decodes tokens, with buffers of `size` cut to `length`; returns the tables."""
        with _forwards(model):
            if size and not shorten(model, size, length):
                raise IndexError("the table is no buffer")
            columns = [0] * (_NUM_PROBED + _NUM_STEPS)
            tokens = _test_tokens(model)
            ids = tokens[:1, columns]
            cache: Any = None
            if compat.supports_dynamic_cache(model):
                cache = stock_cache(model)
            if given and cache is not None:
                cache = EncoderDecoderCache(cache, stock_cache(model))
            prompt = ids[:, :_NUM_PROBED]
            mask = torch.ones_like(prompt)
            inputs = first_inputs(model, prompt, mask, cache)
            if given:
                del inputs["attention_mask"]  # it would be the encoder's
                inputs |= given
            tables_by_step: list[set[Table]] = []
            for end in range(_NUM_PROBED, ids.shape[1] + 1):
                # a slice of the model's own code would be read as a table
                tokens = ids[:, :end].clone()
                begins = end == _NUM_PROBED
                with PositionReads(end - 1, model) as reads:
                    _, inputs = next_logits(model, tokens, inputs, begins=begins)
                tables_by_step.append(reads.tables)
            return set.intersection(*tables_by_step[1:])

    def grows(table: Table) -> bool:
        if not table.is_parameter:
            with contextlib.suppress(ForwardFailedError):
                num_needed = _NUM_PROBED + _NUM_STEPS
                compute(table.size, table.offset + num_needed - 1)
                return True
        return False

    try:
        tables = compute()
    except ForwardFailedError:
        return None, None
    growing = {table for table in tables if grows(table)}
    fixed = (table.size - table.offset for table in tables - growing)
    longer = (table.size - table.offset for table in growing)
    num_fixed = min(fixed, default=None)
    num_longer = min(longer, default=None)
    return num_fixed, num_longer


def prompts_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
    prompts: Any,
) -> PromptsVerdict:
    """Compares prompts that the model's own forward computes, and packed decode steps after them,
    with plain forwards; then recomputes each prompt's end packed, after its tokens for other
    content, and a single prompt by the model's own forward behind its first text, which a packed
    step computed without the other content. Raises as `self_check`."""
    dtypes = set[torch.dtype | None]()
    new = _test_tokens(model)[0, :2]  # stand for generated tokens
    with _forwards(model):
        plain = _prompt_logits(model, prompts, new, dtypes)
    with _forwards(model, by_engine=True):
        wrap_expansions(model.modules())
        manager, runner = make(model, _scratch(model), Layout())
        if runner.rope is not None:
            return PromptsVerdict(
                Topic.BATCH("its rotary embedding depends on the longest position of a prompt")
            )
        ends = [prompts.length - padding for padding in prompts.paddings]
        rows = _PromptRows(manager, runner, prompts, new)
        with use_paged_attention(switchable_configs(model.modules())):
            steps = []
            for count in range(3):
                step_ends = [end + count for end in ends]
                steps.append(rows.compute(step_ends))
            packed = torch.stack(steps)
            reason = _difference(
                dtypes,
                cache,
                plain.flatten(0, 1),
                packed.flatten(0, 1),
                "logits after a prompt",
            )
            keys = prompts.keys(model.config)
            firsts: list[int] = []
            can_reuse = False
            if reason is None and keys is not None:
                firsts = [max(1, key.num_content) for key in keys]
                can_reuse = all(first < end for first, end in zip(firsts, ends))
            if can_reuse:
                can_reuse = all(
                    table.first_token <= group.spec.first_visible(first)
                    for sequence, first in zip(rows.sequences, firsts)
                    for group, table in zip(manager.groups, sequence.blocks.tables)
                )
            if can_reuse:
                for sequence, first in zip(rows.sequences, firsts):
                    manager.truncate(sequence.blocks, first)
                    sequence.num_computed_tokens = first
                recomputed = rows.compute(ends)
                difference = _difference(dtypes, cache, plain[0], recomputed, "logits")
                can_reuse = difference is None
        rows.free()
    begins_behind_text = False
    num_text = 0
    if can_reuse:
        num_text = prompts.num_text(model.config)
    if num_text:
        with contextlib.suppress(ForwardFailedError), _forwards(model, by_engine=True):
            manager, runner = make(model, _scratch(model), Layout())
            rows = _PromptRows(manager, runner, prompts, new)
            with use_paged_attention(switchable_configs(model.modules())):
                rows.compute_text(num_text)
                steps = []
                for count in range(2):
                    end = ends[0] + count
                    steps.append(rows.compute([end]))
                behind = torch.stack(steps)
            difference = _difference(
                dtypes,
                cache,
                plain[:2, 0],
                behind[:, 0],
                "logits",
            )
            begins_behind_text = difference is None
            rows.free()
    return PromptsVerdict(reason, can_reuse, begins_behind_text)


def merge_check(
    model: PreTrainedModel,
    cache: PagedCache,
    make: MakeRunner,
    prompts: Any,
) -> bool:
    """Compares one forward of prompts and of longer ones with other images, and a packed decode
    step after it, with plain forwards of each."""
    new = _test_tokens(model)[0, :2]
    dtypes = set[torch.dtype | None]()
    later_new = new[1:]
    longer = prompts.longer(int(new[0]))
    parts = prompts, longer
    try:
        with _forwards(model):
            logits = [_prompt_logits(model, part, later_new, dtypes) for part in parts]
            plain = torch.cat(logits, dim=1)
        with _forwards(model):
            together = prompts.merged((longer,), pad_token_id(model))
            longer.find_positions(model)
            together.find_positions(model)
            axes = [*prompts.axes, *longer.axes]
            if together.axes != axes:
                return False  # padding counts among its positions
            manager, runner = make(model, _scratch(model), Layout())
            rows = _PromptRows(manager, runner, together, later_new)
            ends = [together.length - padding for padding in together.paddings]
            with use_paged_attention(switchable_configs(model.modules())):
                steps = []
                for count in range(2):
                    step_ends = [end + count for end in ends]
                    steps.append(rows.compute(step_ends))
                packed = torch.stack(steps)
            rows.free()
        difference = _difference(
            dtypes,
            cache,
            plain.flatten(0, 1),
            packed.flatten(0, 1),
            "logits",
        )
        return difference is None
    except Exception as error:  # memory may suffice for each alone
        is_expected = isinstance(error, ForwardFailedError) or is_out_of_memory(error)
        if not is_expected:
            raise
        return False


def _prompt_logits(
    model: PreTrainedModel,
    prompts: Any,
    new: Tensor,
    dtypes: set[torch.dtype | None],
) -> Tensor:
    """Plain logits `(1 + n, rows, vocab_size)`: after the prompts and after each of the tokens
    `new` `(n,)`."""
    logits = []
    cache_name = compat.cache_name(model)
    cache = _observed_cache(model, dtypes)
    inputs = {**prompts.model_kwargs, cache_name: cache}
    num_rows = len(prompts.input_ids)
    for count in range(len(new) + 1):
        decoded = new[:count].expand(num_rows, -1)
        ids = torch.cat([prompts.input_ids, decoded], dim=1)
        step_logits, inputs = next_logits(model, ids, inputs, begins=not count)
        logits.append(step_logits)
    return torch.stack(logits)


class _PromptRows:
    """Rows of `Prompts` followed by the tokens `new`, on a runner of packed steps."""

    def __init__(
        self,
        manager: BlockManager,
        runner: Any,
        prompts: Any,
        new: Tensor,
    ) -> None:
        self._manager = manager
        self._runner = runner
        self.sequences = list[Any]()
        for row, padding in enumerate(prompts.paddings):
            end = prompts.length - padding
            sequence = _sequence(manager, end, (prompts, row))
            token_ids = prompts.input_ids[row, padding:].tolist()
            if not token_ids:
                token_ids = [0] * end
            sequence.request.tokens = [*token_ids, *new.tolist()]
            self.sequences.append(sequence)

    def compute_text(self, end: int) -> None:
        """Computes the first tokens of a single row as a prompt of token ids."""
        (sequence,) = self.sequences
        request = sequence.request
        inputs, request.inputs = request.inputs, None
        self.compute([end])
        request.inputs, request.num_text = inputs, end

    def compute(self, ends: list[int]) -> Tensor:
        """Logits `(rows, vocab_size)` of a step that computes each row up to its entry in
        `ends`."""
        step = []
        for sequence, end in zip(self.sequences, ends):
            count = end - sequence.num_computed_tokens
            step.append((sequence, count))
        for sequence, count in step:
            start = sequence.num_computed_tokens
            self._manager.append(
                sequence.blocks,
                count,
                skips=not start,
            )
            sequence.token_ids = sequence.request.tokens[: start + count]
        return _computed(self._runner, step)

    def free(self) -> None:
        for sequence in self.sequences:
            self._manager.free(sequence.blocks)


@restoring
def _forwards(
    model: PreTrainedModel,
    by_engine: bool = False,
) -> Iterator[None]:
    """Takes back what forwards write into modules, and the random state; layers with a cache run
    without compiled code, as in steps. `by_engine`: these are forwards of the engine, and not plain
    ones. Raises `ForwardFailedError` for any error but out of memory, for a forward that draws
    random numbers, and for one whose writes cannot be taken back."""
    device = compute_device(model)
    devices: list[torch.device] = []
    if device.type not in ("cpu", "meta"):
        devices.append(device)
    device_type = device.type if devices else "cuda"
    rng = torch.random.fork_rng(devices, device_type=device_type)
    with (
        rng,
        torch.no_grad(),
        running_eagerly(compiled_layers(model.modules())),
    ):
        snapshot = Snapshot(model)
        drawn = _random_states(devices)
        try:
            yield
            has_drawn = snapshot.has_drawn
            if not has_drawn:
                states = _random_states(devices)
                has_drawn = not all(map(torch.equal, drawn, states))
            if has_drawn:
                # rows of one prompt would share the draws
                raise RuntimeError("it draws random numbers")
        except Exception as error:
            if is_interrupt(error):
                raise
            if is_out_of_memory(error):
                raise
            raise ForwardFailedError(f"its forward fails: {first_line(error)}") from error
        finally:
            surely(functools.partial(snapshot.restore, by_engine))
        num_bytes = snapshot.num_lost_bytes
        if num_bytes:
            failure = ForwardFailedError(
                f"its forward writes to {num_bytes} bytes of buffers, too many to copy"
            )
            failure.lasts = True
            raise failure


def _random_states(devices: list[torch.device]) -> list[Tensor]:
    states = [torch.get_rng_state()]
    for device in devices:
        device_module = torch.get_device_module(device)
        states.append(device_module.get_rng_state(device))
    return states


class _ObservedCache(DynamicCache):
    """Collects in `dtypes` the dtypes that a forward computes in when it caches: it may turn on
    autocast by itself."""

    dtypes: set[torch.dtype | None]

    def _observed(name: str) -> Callable[..., Any]:
        def method(self: _ObservedCache, *args: Any, **kwargs: Any) -> Any:
            values = (*args, *kwargs.values())
            for x in values:
                if isinstance(x, Tensor) and x.is_floating_point():
                    self.dtypes |= {x.dtype, autocast_dtype(x.device)}
            stock_method = getattr(DynamicCache, name)
            return stock_method(self, *args, **kwargs)

        return method

    update, update_conv_state, update_recurrent_state = map(
        _observed,
        ("update", "update_conv_state", "update_recurrent_state"),
    )


def _observed_cache(
    model: PreTrainedModel,
    dtypes: set[torch.dtype | None],
) -> _ObservedCache:
    config = model.config.get_text_config(decoder=True)
    cache = _ObservedCache(config=config)
    cache.dtypes = dtypes
    return cache


def _plain_logits(
    model: Any,
    rows: Tensor,
    prompt: int,
    dtypes: set[torch.dtype | None],
    padding: int = 0,
) -> Tensor:
    """Plain logits `(rows, n, vocab_size)`: after the first `prompt` tokens of rows, of which the
    first `padding` are masked, and after each later token. Adds the dtypes of the computation to
    `dtypes`."""
    ids = rows[:, :prompt]
    cache = _observed_cache(model, dtypes)
    mask = torch.ones_like(ids)
    mask[:, :padding] = 0
    inputs = first_inputs(model, ids, mask, cache)
    logits = []
    for length in range(prompt, rows.shape[1] + 1):
        ids = rows[:, :length]
        begins = length == prompt
        step_logits, inputs = next_logits(model, ids, inputs, begins=begins)
        logits.append(step_logits)
    return torch.stack(logits, dim=1)


def _sequence(
    manager: BlockManager,
    num_prompt_tokens: int,
    inputs: Any = None,
) -> Any:
    request = SimpleNamespace(
        inputs=inputs,
        encoded=NO_BLOCKS,
        namespace=UNCACHED,
        num_prompt_tokens=num_prompt_tokens,
        num_text=0,
        prompt_logprobs=None,
    )
    return SimpleNamespace(
        num_computed_tokens=0,
        token_ids=[],
        draft=[],
        blocks=manager.new(),
        request=request,
    )


def _computed(runner: Any, rows: list[tuple[Any, int]]) -> Tensor:
    """Logits of a step that computes so many more tokens of each sequence."""
    logits: Tensor = runner.run(StepPlan.of(rows))
    for sequence, count in rows:
        sequence.num_computed_tokens += count
    return logits


def _scratch(
    model: PreTrainedModel,
    memory: PagedMemory | None = None,
) -> PagedCache:
    config = model.config.get_text_config(decoder=True)
    return PagedCache(config, memory=memory or _scratch_memory())


def stock_cache(model: PreTrainedModel) -> DynamicCache:
    config = model.config.get_text_config(decoder=True)
    return DynamicCache(config=config)


def _step_logits(
    model: PreTrainedModel,
    make: MakeRunner,
    layout: Layout,
    rows: Tensor,
    plan: CheckedSteps,
    memory: PagedMemory | None = None,
) -> Tensor:
    """Logits `(n, vocab_size)` that `Runner.run` returns for all steps of a plan, in `memory` or
    one made for them."""
    prompts, steps = plan
    tokens = rows.tolist()
    is_packed = layout.unsupported_reason is None
    logits = []
    with _forwards(model, by_engine=True):
        wrap_expansions(model.modules())
        manager, runner = make(model, _scratch(model, memory), layout)
        sequences = [_sequence(manager, prompt) for prompt in prompts]
        for number, sequence in enumerate(sequences):
            sequence.request.row = number
        with use_paged_attention(switchable_configs(model.modules())):
            for step in steps:
                scheduled = [(sequences[row], query_len) for row, query_len in step]
                for row, query_len in step:
                    sequence = sequences[row]
                    manager.append(sequence.blocks, query_len, skips=not is_packed)
                    end = sequence.num_computed_tokens + query_len
                    sequence.token_ids = tokens[row][: max(prompts[row], end)]
                logits.append(_computed(runner, scheduled))
        for sequence in sequences:
            manager.free(sequence.blocks)
        return torch.cat(logits)


def _difference(
    dtypes: set[torch.dtype | None],
    cache: PagedCache,
    plain: Tensor,
    packed: Tensor,
    what: str,
    how: str = "packed",
) -> str | None:
    """Says how far logits `(n, vocab_size)`, computed in `dtypes`, differ if that exceeds the
    tolerance, else `None`; NaN and infinities must be at the same places."""
    finite = plain.isfinite()
    plain = plain.float()
    packed = packed.float()
    gap = torch.full((len(plain),), float("inf"), device=plain.device)
    if torch.equal(finite, packed.isfinite()):
        # root mean square of each row, in standard deviations
        errors = torch.where(finite, plain - packed, 0.0)
        root_mean_square = errors.square().mean(1).sqrt()
        deviation = plain[finite].std().clamp_min(1e-6)
        gap = root_mean_square / deviation
    computed = {dtype for dtype in dtypes if dtype is not None}
    stored = {spec.storage_dtype(dtype) for spec in cache.groups for dtype in computed}
    computed |= stored
    half = half_tolerance(computed, plain.device)
    if half is None:
        worst = float(gap.max())
    else:
        median = gap.sort().values[len(gap) // 2]
        worst = float(median)
    if not worst <= (half or TOLERANCE):  # also true for NaN
        return Topic.SELF_CHECK(
            f"{how}, its {what} are {worst:.1e} standard deviations from those of a sequence alone"
        )
    return None


def _test_tokens(model: PreTrainedModel) -> Tensor:
    """Token ids `(3, _LENGTH)` int64, no special tokens among them."""
    config = model.config.get_text_config(decoder=True)
    attributes = {**vars(model.config), **vars(config)}
    values = (value for name, value in attributes.items() if name.endswith("token_id"))
    special = {value for value in values if isinstance(value, int)}
    num_embeddings = model.get_input_embeddings().weight.shape[0]
    vocab_size = min(num_embeddings, getattr(config, "vocab_size", 1 << 30))
    num_tried = min(vocab_size, 4096)
    usable = [token for token in range(num_tried) if token not in special]
    generator = torch.Generator().manual_seed(0)
    chosen = torch.randint(
        len(usable),
        (3, _LENGTH),
        generator=generator,
        device="cpu",
    )
    usable_ids = torch.tensor(usable, device="cpu")
    tokens = usable_ids[chosen]
    return tokens.to(compute_device(model))
