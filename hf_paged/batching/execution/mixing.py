"""Rows with different adapters in one packed forward: base products once, plus what each row's adapter adds."""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from contextvars import ContextVar
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...cache.adapter_pages import AdapterPages
from ...cache.block_manager import BlockManager
from ...cache.paged_cache import PagedCache
from ...cache.storage import is_out_of_memory
from ...kernels.lora import Deltas, LoraWeights, RecordedDeltas, can_record
from ...model import capability
from ...model.capability import Layout, MakeRunner
from ..request import Sequence
from .adapter_files import AdapterFile, AdapterStore, linear_shape
from .adapter_shards import NotSplitError, own_part
from .adapters import BASE, Adapter, AdapterError, active_adapter, check_adapter, find_adapter, use_adapter
from .inputs import Bounds
from .runner import Runner, in_order, rows_of_logits

MAX_MIXES = 64  # kept mixes, for recorded and later steps


Ranges = list[tuple[Adapter | None, int, int]]
"""The adapter of packed tokens `[start, end)`; `None`: the base model."""


class Mirror(Protocol):
    """Repeats what is done with adapters in the other processes."""

    def check_mixing(self, names: tuple[str, ...]) -> None:
        """`Adapters.check` of these modules comes next."""

    def load_adapter(self, file: AdapterFile) -> None:
        """Raises [`AdapterError`] if a process cannot load it."""

    def prefetch_adapters(self, files: list[AdapterFile]) -> None: ...

    def forget_adapter(self, file: AdapterFile) -> None: ...

    def forget_model(self) -> None: ...


class NotMixableError(Exception):
    """A module gets other rows than the packed tokens in order, so their adapters are unknown."""


class Mix:
    """The adapters of a packed step's tokens, and what they add to which modules."""

    def __init__(self, ranges: Ranges, head: nn.Module | None) -> None:
        self.key = tuple((None if adapter is None else adapter.key, *bounds) for adapter, *bounds in ranges)
        self.adapters = list({id(each): each for each, *_ in ranges if each is not None}.values())
        self._ranges, self._head = ranges, head
        self._is_one = len({id(adapter) for adapter, *_ in ranges}) == 1
        self.modules = list(dict.fromkeys(module for each in self.adapters for module in each.parts))
        self.num_tokens = 0  # of the forward; tokens after the last range have no adapter
        self.kept: list[int] | None = None  # tokens whose logits are wanted, if the head gets only these
        self._deltas = {module: Deltas(self._parts(module, ranges)) for module in self.modules}
        self.can_record = False  # whether a recorded step with these adapters serves any ranges

    @property
    def names(self) -> list[tuple[Hashable, int, int]]:
        """Its ranges with adapter names, for another process (`Adapters.mix_named`)."""
        return [(BASE if adapter is None else adapter.key[0], start, end) for adapter, start, end in self._ranges]

    def prepare(self, device: torch.device) -> None:
        """Prepares for steps that are recorded with fixed ranges."""
        like = torch.empty(0, device=device)
        for deltas in self._deltas.values() if not self._is_one else ():
            deltas.prepare(like)

    def takes_ranges(self, device: torch.device) -> bool:
        """Whether a recorded step can read its ranges on the device."""
        weights = [[each.parts[x] for each in self.adapters if x in each.parts] for x in self.modules]
        return bool(weights) and all(can_record(each, device) for each in weights)

    @property
    def tensors(self) -> list[Tensor]:
        """The adapter weights that a recorded step reads."""
        return [x for each in self.adapters for lora in each.parts.values() for x in lora.tensors]

    @property
    def variant(self) -> Hashable:
        """Identifies the adapters in the keys of recorded steps."""
        return frozenset(each.key for each in self.adapters) if self.can_record else self.key

    def ranges(self, adapters: Items[Hashable], num_decodes: int, num_tokens: int) -> list[tuple[Bounds, Bounds]]:
        """Returns the packed tokens of each of these adapters, given by key: its range of decodes, and of others."""
        whole = [(self.adapters[0], 0, num_tokens)]
        found = {key: [(0, 0), (0, 0)] for key in adapters}
        for adapter, start, end in whole if self._is_one else self._ranges:
            if adapter is not None and start < num_decodes:
                found[adapter.key][0] = start, min(end, num_decodes)
            if adapter is not None and end > num_decodes:
                found[adapter.key][1] = max(start, num_decodes), end
        return [(decodes, others) for decodes, others in found.values()]

    def record(self, ranges: Tensor, most: int, has_others: bool) -> dict[nn.Module, RecordedDeltas]:
        """What is added, by module, in a recorded step of up to `most` tokens. The step reads `ranges` `(n, 2)` on the
        device: two for each of `adapters`, as `Mix.ranges` returns them, or one if all tokens are decodes."""
        found = dict[nn.Module, RecordedDeltas]()
        for module in self.modules:
            weights = [
                (number, each.parts[module]) for number, each in enumerate(self.adapters) if module in each.parts
            ]
            if has_others:
                weights = [(2 * number + kind, lora) for number, lora in weights for kind in range(2)]
            found[module] = RecordedDeltas(ranges, most, weights)
        return found

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
        x = args[0].reshape(-1, args[0].shape[-1])
        out = output.reshape(-1, output.shape[-1])
        self._deltas_of(module, len(x)).add(out, x)
        return out.view(output.shape)

    def _deltas_of(self, module: nn.Module, num_rows: int) -> Deltas | RecordedDeltas:
        if (step := recorded.get()) is not None:
            return step[module]
        if self._is_one:
            adapter = self._ranges[0][0]
            lora = None if adapter is None else adapter.parts.get(module)
            return Deltas([] if lora is None else [(0, num_rows, lora)])
        if self.kept is not None and module is self._head:
            if num_rows == len(self.kept):
                return Deltas(self._parts(module, self._kept_ranges()))
        elif num_rows == self.num_tokens:
            return self._deltas[module]
        raise NotMixableError(f"{type(module).__name__} gets {num_rows} rows in a forward of {self.num_tokens} tokens")

    def _parts(self, module: nn.Module, ranges: Ranges) -> list[tuple[int, int, LoraWeights]]:
        found = ((adapter, start, end) for adapter, start, end in ranges if adapter is not None)
        return [(start, end, each.parts[module]) for each, start, end in found if module in each.parts]

    def _kept_ranges(self) -> Ranges:
        def of(token: int) -> Adapter | None:
            return next((adapter for adapter, start, end in self._ranges if start <= token < end), None)

        return joined((of(token), 1) for token in self.kept or ())


mixed: ContextVar[Mix | None] = ContextVar("hf_paged_mixed", default=None)
"""The mix of this thread's forwards; `None` if all rows run with one adapter of the model."""


recorded: ContextVar[dict[nn.Module, RecordedDeltas] | None] = ContextVar("hf_paged_recorded", default=None)
"""While a step is recorded: what adapters add, by module, for the ranges read on the device."""


def joined(counts: Iterable[tuple[Adapter | None, int]]) -> Ranges:
    """Joins neighbours with the same adapter to one range."""
    found: Ranges = []
    for adapter, count in counts:
        start = found[-1][2] if found else 0
        if found and found[-1][0] is adapter:
            found[-1] = adapter, found[-1][1], start + count
        else:
            found.append((adapter, start, start + count))
    return found


@contextlib.contextmanager
def mixing(model: nn.Module, mix: Mix) -> Iterator[None]:
    """Within it, packed forwards of this thread run with `mix`. Hooks and PEFT's layers are restored afterwards."""
    with use_adapter(model, BASE), contextlib.ExitStack() as stack:
        stack.callback(mixed.reset, mixed.set(mix))
        for module in mix.modules:
            stack.callback(module.register_forward_hook(mix).remove)
        yield


class Adapters:
    """The adapters of an executor's forwards: those of the model, by name, and those in folders."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, make: MakeRunner, pages: AdapterPages) -> None:
        self._model, self._cache, self._make, self.pages = model, cache, make, pages
        self.store = AdapterStore(model)
        forget = weakref.WeakMethod(self._forget)  # no cycle, so that they are freed with their executor
        pages.on_evict = lambda file: None if (told := forget()) is None else told(file)
        self._own: dict[str, Adapter] = {}  # by name
        self._seen: set[str] = set()  # names of `_own` that were read again since the model may have changed
        self._numbers = itertools.count()
        self.mirror: Mirror | None = None
        self._verdicts: dict[frozenset[nn.Module], str | None] = {}
        self._mixes: OrderedDict[Hashable, Mix] = OrderedDict()
        self._recordable: dict[frozenset[Hashable], bool] = {}  # by adapters: whether a recorded step serves all ranges
        self.refusals: set[str] = set()  # why rows with adapters needed separate forwards

    def forget_model(self) -> None:
        """Drops what depends on the model, which may have changed."""
        if self.mirror is not None:
            self.mirror.forget_model()
        self._seen, self._verdicts = set(), {}
        self._mixes.clear()
        self._recordable.clear()
        self.store.forget_others(set(self._model.modules()))

    def _forget(self, file: AdapterFile) -> None:
        """After the pool has evicted an adapter: drops its weights."""
        if self.mirror is not None:
            self.mirror.forget_adapter(file)
        self.store.forget(file)
        for key, mix in list(self._mixes.items()):
            if any(adapter.key[0] == file for adapter in mix.adapters):
                self._mixes.pop(key, None)

    def _check_unmerged(self, name: Hashable) -> None:
        try:
            check_adapter(self._model, BASE)
        except AdapterError as error:
            raise AdapterError(name, str(error)) from None

    def together(self, names: Iterable[Hashable]) -> dict[Hashable, Adapter | None]:
        """Returns, by name, the adapters of a step whose rows can share a forward, `None` for the base model; empty if
        fewer than two can. Raises [`AdapterError`]."""
        names = list(names)
        self._check_unmerged(next(name for name in names if name is not None))
        found: dict[Hashable, Adapter | None] = {}
        for name in names:
            adapter = self._find(name)
            if isinstance(adapter, str):
                self.refusals.add(adapter)
            else:
                found[name] = adapter
        if len(found) < 2:
            return {}
        modules = frozenset(module for adapter in found.values() if adapter is not None for module in adapter.parts)
        if modules not in self._verdicts:
            self._verdicts[modules] = self.check(
                tuple(name for name, module in self._model.named_modules() if module in modules)
            )
        if (reason := self._verdicts[modules]) is not None:
            self.refusals.add(reason)
            return {}
        return found

    def refuse(self, adapters: Iterable[Adapter | None], reason: str) -> None:
        """Notes that these adapters cannot be mixed, after a forward raised `NotMixableError`."""
        modules = frozenset(module for adapter in adapters if adapter is not None for module in adapter.parts)
        self._verdicts[modules] = reason
        self.refusals.add(reason)

    def prefetch(self, files: list[AdapterFile]) -> None:
        """Starts to load the adapters of the requests that are admitted next."""
        if self.mirror is not None and files:
            self.mirror.prefetch_adapters(files)
        self.store.prefetch(files)

    def load(self, file: AdapterFile) -> Adapter:
        """Loads its weights, in all processes that hold shards of the model. Raises [`AdapterError`]."""
        if self.mirror is None or file in self.store:
            return self.store.get(file)
        found = self.store.get(file)
        try:
            self.mirror.load_adapter(file)
        except BaseException:
            self.store.forget(file)
            raise
        return found

    def mix_named(self, ranges: Items[tuple[Hashable, int, int]]) -> Mix:
        """As `mix`, from names (`Mix.names`) that may come from another process. Raises [`AdapterError`]."""
        found: Ranges = []
        for name, start, end in ranges:
            adapter = None if name == BASE else self._find(name)
            if isinstance(adapter, str):
                raise AdapterError(name, adapter)
            found.append((adapter, start, end))
        return self.mix(found)

    def _find(self, name: Hashable) -> Adapter | str | None:
        if isinstance(name, AdapterFile):
            return self.load(name)
        own = active_adapter(self._model) if name is None else name
        if not isinstance(own, str):
            return "several adapters are active at a time"
        if own == BASE:
            return None
        known = self._own.get(own)
        if known is not None and own in self._seen and known.is_current():
            return known
        found = find_adapter(self._model, own, (own, next(self._numbers)))
        if isinstance(found, str):
            return found
        if known is None or not known.is_like(found):  # else steps recorded with the known one stay valid
            known = self._own[own] = found
        self._seen.add(own)
        return known

    def mix(self, ranges: Ranges) -> Mix:
        """The mix of consecutive token ranges; an earlier step's, if it is kept."""
        key = tuple((None if adapter is None else adapter.key, *bounds) for adapter, *bounds in ranges)
        known = self._mixes.pop(key, None)
        if known is None:
            known = Mix(ranges, head_of(self._model))
            every, device = frozenset(each.key for each in known.adapters), self._model.device
            if every not in self._recordable:
                self._recordable[every] = known.takes_ranges(device)
            known.can_record = self._recordable[every]
            if not known.can_record:
                known.prepare(device)
        self._mixes[key] = known
        while len(self._mixes) > MAX_MIXES:
            self._mixes.popitem(last=False)
        return known

    def alone(self, file: AdapterFile) -> Mix:
        """The mix of all rows with one adapter from a folder."""
        self._check_unmerged(file)
        return self.mix([(self.load(file), 0, 0)])

    def check(self, names: tuple[str, ...]) -> str | None:
        """Checks in short forwards that rows with different adapters on these modules get the same results as alone.
        Returns why they do not, or `None`."""
        if self.mirror is not None:
            self.mirror.check_mixing(names)
        try:
            adapters = [*(_random_adapter(self._model, names, rank) for rank in (3, 2)), None]
        except NotSplitError as error:
            return str(error)

        def make(model: PreTrainedModel, cache: PagedCache, layout: Layout) -> tuple[BlockManager, Any]:
            blocks, runner = self._make(model, cache, layout)
            return blocks, _CheckRunner(model, runner, adapters)

        try:
            return capability.reason_against_mixing(self._model, self._cache, make, names)
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            return "there is no memory to check that they can be in one forward"


def run_mixed(
    model: PreTrainedModel,
    runner: Runner,
    items: list[tuple[Sequence, int]],
    found: list[Adapter | None],
    mix_of: Callable[[Ranges], Mix],
) -> Tensor:
    """As [`Runner`]'s `run`, in one packed forward; `found` has each item's adapter."""
    # sorted by adapter, so that steps with equally many rows of each adapter share a recorded step
    every = sorted({id(x): x for x in found}.values(), key=lambda x: "" if x is None else str(x.key))
    places = {id(adapter): number for number, adapter in enumerate(every)}
    numbers = [places[id(adapter)] for adapter in found]
    decodes = [query_len == 1 or bool(sequence.draft) for sequence, query_len in items]
    order = sorted(range(len(items)), key=lambda place: (not decodes[place], numbers[place]))
    rows = rows_of_logits(items)
    mix = mix_of(joined((found[place], items[place][1]) for place in order))
    with mixing(model, mix):
        logits = runner.run([items[place] for place in order], mix.variant)
    return in_order([([row for place in order for row in rows[place]], logits)])


class _CheckRunner:
    """A runner for the checks in `capability`; row `i` has the `i`-th adapter."""

    def __init__(self, model: PreTrainedModel, runner: Runner, adapters: list[Adapter | None]) -> None:
        self._model, self._runner, self._adapters = model, runner, adapters

    def run(self, items: list[tuple[Any, int]]) -> Tensor:
        found = [self._adapters[sequence.request.row] for sequence, _ in items]
        head = head_of(self._model)
        return run_mixed(self._model, self._runner, items, found, lambda ranges: Mix(ranges, head))


def _random_adapter(model: PreTrainedModel, names: Iterable[str], rank: int) -> Adapter:
    """A random adapter on these modules, the same in every process."""
    generator, parts = torch.Generator().manual_seed(rank), dict[nn.Module, LoraWeights]()

    def draw(*sizes: int) -> Tensor:
        numbers = torch.randn(*sizes, generator=generator, device="cpu") * sizes[1] ** -0.5
        return numbers.to(weight.device, weight.dtype)

    for name in names:
        module = model.get_submodule(name)
        weight: Any = module.weight
        width, depth = linear_shape(module)
        whole = LoraWeights(draw(rank, depth), draw(width, rank), None, 0.5)
        parts[module] = own_part(model, name.removesuffix(".base_layer"), module, whole)
    return Adapter(("check", rank), parts)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The linear layer that gives logits."""
    head = model.get_output_embeddings()
    return getattr(head, "base_layer", head)
