"""Rows with different adapters in one packed forward: base products once, plus what each row's
adapter adds."""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batching.execution.inputs import Bounds
from ..batching.execution.runner import Runner, in_order
from ..cache.block_manager import BlockManager
from ..cache.free_memory import is_out_of_memory
from ..cache.paged_cache import PagedCache
from ..interrupts import is_interrupt, restoring
from ..kernels.lora import Deltas, LoraWeights, RecordedDeltas, can_record
from ..model import capability
from ..model.layout import Layout
from ..model.trial import MakeRunner
from ..plan import StepPlan
from ..topics import Topic
from .files import AdapterFile, AdapterStore, linear_shape
from .pages import AdapterPages
from .peft_models import (
    BASE,
    NO_ADAPTER,
    Adapter,
    AdapterError,
    active_adapter,
    check_adapter,
    find_adapter,
    use_adapter,
)
from .shards import NotSplitError, own_part

MAX_MIXES = 64  # kept mixes, for recorded and later steps


Ranges = list[tuple[Adapter, int, int]]
"""The adapter of packed tokens `[start, end)`."""


class NotMixableError(Exception):
    """A module gets other rows than the packed tokens in order, so their adapters are unknown."""


class Mix:
    """The adapters of a packed step's tokens, and what they add to which modules."""

    def __init__(self, ranges: Ranges, head: nn.Module | None) -> None:
        self.key = _key(ranges)
        distinct = dict.fromkeys(adapter for adapter, *_ in ranges)
        self.adapters = [adapter for adapter in distinct if adapter is not NO_ADAPTER]
        self._ranges = ranges
        self._head = head
        self._is_one = len(distinct) == 1
        self.modules = list(self._weights())
        self.num_tokens = 0  # of the forward; tokens after the last range have no adapter
        # tokens whose logits are wanted, if the head gets only these
        self.kept: list[int] | None = None
        self._deltas = {module: self._over(module, ranges) for module in self.modules}
        self.can_record = False  # whether a recorded step with these adapters serves any ranges

    @property
    def names(self) -> list[tuple[Hashable, int, int]]:
        """Its ranges with adapter names, for another process (`Adapters.mix_named`)."""
        return [(adapter.key[0], start, end) for adapter, start, end in self._ranges]

    def prepare(self, device: torch.device) -> None:
        """Prepares for steps that are recorded with fixed ranges."""
        like = torch.empty(0, device=device)
        if not self._is_one:
            for deltas in self._deltas.values():
                deltas.prepare(like)

    def takes_ranges(self, device: torch.device) -> bool:
        """Whether a recorded step can read its ranges on the device."""
        weights = self._weights().values()
        return bool(weights) and all(
            can_record([lora for _, lora in parts], device) for parts in weights
        )

    def _weights(self) -> dict[nn.Module, list[tuple[int, LoraWeights]]]:
        """By module, the numbers of its adapters and their weights."""
        weights: dict[nn.Module, list[tuple[int, LoraWeights]]] = {}
        for number, adapter in enumerate(self.adapters):
            for module, lora in adapter.parts.items():
                weights.setdefault(module, []).append((number, lora))
        return weights

    @property
    def tensors(self) -> list[Tensor]:
        """The adapter weights that a recorded step reads."""
        weights = (lora for adapter in self.adapters for lora in adapter.parts.values())
        return [tensor for lora in weights for tensor in lora.tensors]

    @property
    def variant(self) -> Hashable:
        """Identifies the adapters in the keys of recorded steps."""
        if not self.can_record:
            return self.key
        return frozenset(adapter.key for adapter in self.adapters)

    def ranges(
        self, adapters: Items[Hashable], num_decodes: int, num_tokens: int
    ) -> list[tuple[Bounds, Bounds]]:
        """Returns the packed tokens of each of these adapters, given by key: its range of decodes,
        and of others."""
        whole: Ranges = [(self.adapters[0], 0, num_tokens)]
        ranges = whole if self._is_one else self._ranges
        bounds = {key: [(0, 0), (0, 0)] for key in adapters}
        for adapter, start, end in ranges:
            if adapter is NO_ADAPTER:
                continue
            if start < num_decodes:
                bounds[adapter.key][0] = (start, min(end, num_decodes))
            if end > num_decodes:
                bounds[adapter.key][1] = (max(start, num_decodes), end)
        return [(decodes, others) for decodes, others in bounds.values()]

    def record(
        self, ranges: Tensor, most: int, has_others: bool
    ) -> dict[nn.Module, RecordedDeltas]:
        """What is added, by module, in a recorded step of up to `most` tokens. The step reads
        `ranges` `(n, 2)` on the device: two for each of `adapters`, as `Mix.ranges` returns them,
        or one if all tokens are decodes."""
        deltas = dict[nn.Module, RecordedDeltas]()
        for module, weights in self._weights().items():
            if has_others:
                weights = [(2 * number + i, lora) for number, lora in weights for i in (0, 1)]
            deltas[module] = RecordedDeltas(ranges, most, weights)
        return deltas

    @property
    def tables(self) -> list[Any]:
        """Tensors that a recorded step reads, and must keep alive."""
        return [deltas.table for deltas in self._deltas.values()]

    @property
    def adds_to_head(self) -> bool:
        return self._head in self._deltas

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """A forward hook of the modules."""
        if mixed.get() is not self:  # a forward in another thread
            return output
        x = args[0]
        x = x.reshape(-1, x.shape[-1])
        out = output.reshape(-1, output.shape[-1])
        step = recorded.get()
        deltas: Deltas | RecordedDeltas | None = None
        if step is not None:
            deltas = step[module]
        elif self._is_one:
            deltas = self._over(module, [(self._ranges[0][0], 0, len(x))])
        elif self.kept is not None and module is self._head:
            if len(x) == len(self.kept):
                deltas = self._over(module, self._kept_ranges(self.kept))
        elif len(x) == self.num_tokens:
            deltas = self._deltas[module]
        if deltas is None:
            raise NotMixableError(
                f"{type(module).__name__} gets {len(x)} rows in a forward of {self.num_tokens}"
                " tokens"
            )
        deltas.add(out, x)
        return out.view(output.shape)

    def _over(self, module: nn.Module, ranges: Ranges) -> Deltas:
        parts = []
        for adapter, start, end in ranges:
            if module in adapter.parts:
                parts.append((start, end, adapter.parts[module]))
        return Deltas(parts)

    def _kept_ranges(self, tokens: list[int]) -> Ranges:
        adapters: dict[int, Adapter] = {}
        for adapter, start, end in self._ranges:
            adapters.update(dict.fromkeys(range(start, end), adapter))
        return joined((adapters.get(token, NO_ADAPTER), 1) for token in tokens)


def _key(ranges: Ranges) -> tuple[Any, ...]:
    return tuple((adapter.key, start, end) for adapter, start, end in ranges)


mixed: ContextVar[Mix | None] = ContextVar("hf_paged_mixed", default=None)
"""The mix of this thread's forwards; `None` if all rows run with one adapter of the model."""


recorded: ContextVar[dict[nn.Module, RecordedDeltas] | None] = ContextVar(
    "hf_paged_recorded", default=None
)
"""While a step is recorded: what adapters add, by module, for the ranges read on the device."""


def joined(counts: Iterable[tuple[Adapter, int]]) -> Ranges:
    """Joins neighbours with the same adapter to one range."""
    ranges: Ranges = []
    end = 0
    for adapter, count in counts:
        start = end
        end += count
        if ranges and ranges[-1][0] is adapter:
            _, start, _ = ranges.pop()
        ranges.append((adapter, start, end))
    return ranges


@restoring
def mixing(model: nn.Module, mix: Mix) -> Iterator[None]:
    """Within it, packed forwards of this thread run with `mix`. Hooks and PEFT's layers are
    restored afterwards."""
    with use_adapter(model, BASE), contextlib.ExitStack() as stack:
        stack.callback(mixed.reset, mixed.set(mix))
        for module in mix.modules:
            stack.callback(module.register_forward_hook(mix).remove)
        yield


class Adapters:
    """The adapters of an executor's forwards: those of the model, by name, and those in folders."""

    def __init__(
        self, model: PreTrainedModel, cache: PagedCache, make: MakeRunner, pages: AdapterPages
    ) -> None:
        self._model = model
        self._cache = cache
        self._make = make
        self.store = AdapterStore(model)
        # no cycle, so that they are freed with their executor
        itself = weakref.ref(self)

        def on_evict(file: Any) -> None:
            adapters = itself()
            if adapters is not None:
                adapters.forget(file)

        pages.on_evict = on_evict
        self._own: dict[str, Adapter] = {}  # by name
        # names of `_own` that were read again since the model may have changed
        self._seen: set[str] = set()
        self._numbers = itertools.count()
        self._processes = cache.memory.processes
        self._verdicts: dict[frozenset[nn.Module], str | None] = {}
        self._mixes: OrderedDict[Hashable, Mix] = OrderedDict()
        # by adapters: whether a recorded step serves all ranges
        self._recordable: dict[frozenset[Hashable], bool] = {}
        self.refusals: set[str] = set()  # why rows with adapters needed separate forwards

    def forget_model(self) -> None:
        """Drops what depends on the model, which may have changed."""
        if self._processes is not None:
            self._processes.adapters("forget_model")
        self._seen.clear()
        self._verdicts.clear()
        self._mixes.clear()
        self._recordable.clear()
        self.store.forget_others(set(self._model.modules()))

    def forget(self, file: AdapterFile) -> None:
        """After the pool has evicted an adapter: drops its weights."""
        if self._processes is not None:
            self._processes.adapters("forget", file)
        self.store.forget(file)
        for key, mix in list(self._mixes.items()):
            if file in [adapter.key[0] for adapter in mix.adapters]:
                self._mixes.pop(key, None)

    def _check_unmerged(self, name: Hashable) -> None:
        try:
            check_adapter(self._model, BASE)
        except AdapterError as error:
            raise AdapterError(name, str(error)) from None

    def together(self, names: Iterable[Hashable]) -> dict[Hashable, Adapter]:
        """Returns, by name, the adapters of a step whose rows can share a forward; empty if fewer
        than two can. Raises [`AdapterError`]."""
        names = list(names)
        first_name = next(name for name in names if name is not None)
        self._check_unmerged(first_name)
        adapters: dict[Hashable, Adapter] = {}
        for name in names:
            adapter = self._find(name)
            if isinstance(adapter, str):
                self.refusals.add(Topic.ADAPTERS(adapter))
            else:
                adapters[name] = adapter
        if len(adapters) < 2:
            return {}
        modules = _modules_of(adapters.values())
        if modules not in self._verdicts:
            named = self._model.named_modules()
            module_names = [module_name for module_name, module in named if module in modules]
            self._verdicts[modules] = self.check(tuple(module_names))
        reason = self._verdicts[modules]
        if reason is not None:
            self.refusals.add(reason)
            return {}
        return adapters

    def refuse(self, adapters: Iterable[Adapter], reason: str) -> None:
        """Notes that these adapters cannot be mixed, after a forward raised `NotMixableError`."""
        refusal = Topic.ADAPTERS(reason)
        self._verdicts[_modules_of(adapters)] = refusal
        self.refusals.add(refusal)

    def prefetch(self, files: list[AdapterFile]) -> None:
        """Starts to load the adapters of the requests that are admitted next."""
        if self._processes is not None and files:
            self._processes.adapters("prefetch", files)
        self.store.prefetch(files)

    def load(self, file: AdapterFile) -> Adapter:
        """Loads its weights, in all processes that hold shards of the model. Raises
        [`AdapterError`]."""
        is_new = file not in self.store
        adapter = self.store.get(file)
        if is_new and self._processes is not None:
            try:
                self._processes.adapters("load", file)
            except BaseException:
                self.store.forget(file)
                raise
        return adapter

    def mix_named(self, ranges: Items[tuple[Hashable, int, int]]) -> Mix:
        """As `mix`, from names (`Mix.names`) that may come from another process. Raises
        [`AdapterError`]."""
        adapters: Ranges = []
        for name, start, end in ranges:
            adapter = self._find(name)
            if isinstance(adapter, str):
                raise AdapterError(name, adapter)
            adapters.append((adapter, start, end))
        return self.mix(adapters)

    def _find(self, name: Hashable) -> Adapter | str:
        if isinstance(name, AdapterFile):
            return self.load(name)
        if name is None:
            name = active_adapter(self._model)
        if not isinstance(name, str):
            return "several adapters are active at a time"
        if name == BASE:
            return NO_ADAPTER
        earlier = self._own.get(name)
        if earlier is not None and name in self._seen and earlier.is_current():
            return earlier
        adapter = find_adapter(self._model, name, (name, next(self._numbers)))
        if isinstance(adapter, str):
            return adapter
        if earlier is not None and earlier.is_like(adapter):
            adapter = earlier  # steps recorded with it stay valid
        self._own[name] = adapter
        self._seen.add(name)
        return adapter

    def mix(self, ranges: Ranges) -> Mix:
        """The mix of consecutive token ranges; an earlier step's, if it is kept."""
        key = _key(ranges)
        mix = self._mixes.pop(key, None)
        if mix is None:
            mix = Mix(ranges, head_of(self._model))
            keys = frozenset(adapter.key for adapter in mix.adapters)
            device = self._model.device
            if keys not in self._recordable:
                self._recordable[keys] = mix.takes_ranges(device)
            mix.can_record = self._recordable[keys]
            if not mix.can_record:
                mix.prepare(device)
        self._mixes[key] = mix
        while len(self._mixes) > MAX_MIXES:
            self._mixes.popitem(last=False)
        return mix

    def alone(self, file: AdapterFile) -> Mix:
        """The mix of all rows with one adapter from a folder."""
        self._check_unmerged(file)
        return self.mix([(self.load(file), 0, 0)])

    def check(self, names: tuple[str, ...]) -> str | None:
        """Checks in short forwards that rows with different adapters on these modules get the same
        results as alone. Returns why they do not, or `None`."""
        if self._processes is not None:
            self._processes.adapters("check", names)
        try:
            adapters = [*(_random_adapter(self._model, names, rank) for rank in (3, 2)), NO_ADAPTER]
        except NotSplitError as error:
            return str(error)

        def make(
            model: PreTrainedModel, cache: PagedCache, layout: Layout
        ) -> tuple[BlockManager, Any]:
            blocks, runner = self._make(model, cache, layout)
            return blocks, _CheckRunner(model, runner, adapters)

        try:
            return capability.reason_against_mixing(self._model, self._cache, make, names)
        except Exception as error:
            if is_interrupt(error) or not is_out_of_memory(error):
                raise
            return "there is no memory to check that they can share a forward"


def run_mixed(
    model: PreTrainedModel,
    runner: Runner,
    plan: StepPlan,
    adapters: list[Adapter],
    mix_of: Callable[[Ranges], Mix],
) -> Tensor:
    """As [`Runner`]'s `run`, in one packed forward; `adapters` has each row's."""
    # sorted by adapter, so that steps with equally many rows of each adapter share a recorded step
    distinct = sorted(
        dict.fromkeys(adapters),
        key=lambda adapter: (adapter is not NO_ADAPTER, str(adapter.key)),
    )
    numbers = {adapter: number for number, adapter in enumerate(distinct)}
    ranked = []
    for place, (sequence, count) in enumerate(zip(plan.sequences, plan.counts)):
        is_decode = count == 1 or bool(sequence.draft)
        ranked.append((not is_decode, numbers[adapters[place]], place))
    order = [place for *_, place in sorted(ranked)]
    rows = plan.rows_of_logits()
    mix = mix_of(joined([(adapters[place], plan.counts[place]) for place in order]))
    with mixing(model, mix):
        logits = runner.run(plan.select(order), mix.variant)
    answers: list[int] = []
    for place in order:
        answers += rows[place]
    return in_order([(answers, logits)])


@dataclass(eq=False)
class _CheckRunner:
    """A runner for the checks in `capability`; row `i` has the `i`-th adapter."""

    model: PreTrainedModel
    runner: Runner
    adapters: list[Adapter]

    def run(self, plan: StepPlan) -> Tensor:
        adapters = [self.adapters[sequence.request.row] for sequence in plan.sequences]
        mix_of = functools.partial(Mix, head=head_of(self.model))
        return run_mixed(self.model, self.runner, plan, adapters, mix_of)


def _random_adapter(model: PreTrainedModel, names: Iterable[str], rank: int) -> Adapter:
    """A random adapter on these modules, the same in every process."""
    generator = torch.Generator().manual_seed(rank)
    parts = dict[nn.Module, LoraWeights]()

    def draw(*sizes: int) -> Tensor:
        numbers = torch.randn(*sizes, generator=generator, device="cpu")
        scaled = numbers * sizes[1] ** -0.5
        return scaled.to(weight.device, weight.dtype)

    for name in names:
        module = model.get_submodule(name)
        weight: Any = module.weight
        width, depth = linear_shape(module)
        whole = LoraWeights(draw(rank, depth), draw(width, rank), None, 0.5)
        base_name = name.removesuffix(".base_layer")
        parts[module] = own_part(model, base_name, module, whole)
    return Adapter(("check", rank), parts)


def _modules_of(adapters: Iterable[Adapter]) -> frozenset[nn.Module]:
    return frozenset[nn.Module]().union(*[adapter.parts for adapter in adapters])


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The linear layer that gives logits."""
    head = model.get_output_embeddings()
    return getattr(head, "base_layer", head)
