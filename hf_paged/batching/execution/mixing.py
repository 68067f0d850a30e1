"""Rows with different adapters in one packed forward: the base's products once, and to each row what its own adds."""

from __future__ import annotations

import contextlib
import itertools
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Iterator
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ...cache.adapter_pages import AdapterPages
from ...cache.block_manager import BlockManager
from ...cache.paged_cache import PagedCache
from ...cache.storage import is_out_of_memory
from ...kernels.lora import Deltas, LoraWeights
from ...model import capability
from ...model.capability import Layout, MakeRunner
from ..request import Sequence
from .adapter_files import AdapterFile, AdapterStore, linear_shape
from .adapters import BASE, Adapter, AdapterError, active_adapter, check_adapter, find_adapter, use_adapter
from .runner import Runner, in_order, rows_of_logits

MAX_MIXES = 64  # that are kept for recorded steps and for the next


class NotMixableError(Exception):
    """A module gets other rows than the packed tokens in their order, and it is not known whose they are."""


class Mix:
    """Which tokens of a packed step have which adapter, and what that adds to which modules."""

    def __init__(self, ranges: list[tuple[Adapter | None, int, int]], head: nn.Module | None) -> None:
        self.key = tuple((None if adapter is None else adapter.key, *bounds) for adapter, *bounds in ranges)
        self.adapters = list({id(each): each for each, *_ in ranges if each is not None}.values())
        self._ranges, self._head = ranges, head
        self._is_one = len({id(adapter) for adapter, *_ in ranges}) == 1
        self.modules = list(dict.fromkeys(module for each in self.adapters for module in each.parts))
        self.num_tokens = 0  # of the forward, of which those behind the last range have no adapter
        self.kept: list[int] | None = None  # tokens whose logits are wanted, if the head gets these alone
        self._deltas = {module: Deltas(self._parts(module, ranges)) for module in self.modules}

    def prepare(self, device: torch.device) -> None:
        like = torch.empty(0, device=device)
        for deltas in self._deltas.values() if not self._is_one else ():
            deltas.prepare(like)

    @property
    def tensors(self) -> list[Tensor]:
        """Those that a recorded step reads, whose memory is not the model's."""
        return [x for each in self.adapters for lora in each.parts.values() for x in lora.tensors]

    @property
    def tables(self) -> list[Any]:
        """What a recorded step reads, and needs to keep."""
        return [deltas.table for deltas in self._deltas.values()]

    @property
    def adds_to_head(self) -> bool:
        return self._head in self._deltas

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """A forward hook of the modules."""
        if mixed.get() is not self:  # a forward of another thread's
            return output
        x = args[0].reshape(-1, args[0].shape[-1])
        out = output.reshape(-1, output.shape[-1])
        self._deltas_of(module, len(x)).add(out, x)
        return out.view(output.shape)

    def _deltas_of(self, module: nn.Module, num_rows: int) -> Deltas:
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

    def _parts(
        self, module: nn.Module, ranges: list[tuple[Adapter | None, int, int]]
    ) -> list[tuple[int, int, LoraWeights]]:
        found = ((adapter, start, end) for adapter, start, end in ranges if adapter is not None)
        return [(start, end, each.parts[module]) for each, start, end in found if module in each.parts]

    def _kept_ranges(self) -> list[tuple[Adapter | None, int, int]]:
        def of(token: int) -> Adapter | None:
            return next((adapter for adapter, start, end in self._ranges if start <= token < end), None)

        return joined((of(token), 1) for token in self.kept or ())


mixed: ContextVar[Mix | None] = ContextVar("hf_paged_mixed", default=None)
"""What the forwards of this thread run with, where that is not an adapter of the model's own for all."""


def joined(counts: Iterable[tuple[Adapter | None, int]]) -> list[tuple[Adapter | None, int, int]]:
    """Neighbours with one adapter as one range."""
    found: list[tuple[Adapter | None, int, int]] = []
    for adapter, count in counts:
        start = found[-1][2] if found else 0
        if found and found[-1][0] is adapter:
            found[-1] = adapter, found[-1][1], start + count
        else:
            found.append((adapter, start, start + count))
    return found


@contextlib.contextmanager
def mixing(model: nn.Module, mix: Mix) -> Iterator[None]:
    """Packed forwards of this thread get what their rows' adapters add. Hooks and PEFT's layers are then as before."""
    with use_adapter(model, BASE), contextlib.ExitStack() as stack:
        stack.callback(mixed.reset, mixed.set(mix))
        for module in mix.modules:
            stack.callback(module.register_forward_hook(mix).remove)
        yield


class Adapters:
    """The adapters of an executor's forwards: the model's own, by name, and those of folders."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, make: MakeRunner, pages: AdapterPages) -> None:
        self._model, self._cache, self._make, self.pages = model, cache, make, pages
        self.store = AdapterStore(model)
        pages.on_evict = self._forget
        self._own: dict[str, Adapter] = {}  # by name
        self._seen: set[str] = set()  # of these, those that were looked for since the model may have changed
        self._numbers = itertools.count()
        self._verdicts: dict[frozenset[nn.Module], str | None] = {}
        self._mixes: OrderedDict[Hashable, Mix] = OrderedDict()
        self.refusals: set[str] = set()  # why rows with adapters went in forwards of their own

    def forget_model(self) -> None:
        """It may be another from here on."""
        self._seen, self._verdicts = set(), {}
        self._mixes.clear()
        self.store.forget_others(set(self._model.modules()))

    def _forget(self, file: AdapterFile) -> None:
        """It has lost its place: nothing keeps its weights."""
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
        """Of adapters of a step those whose rows can be in one forward, `None` for the base model; none, if that is
        but one. Raises [`AdapterError`]."""
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
            self._verdicts[modules] = self._check(modules)
        if (reason := self._verdicts[modules]) is not None:
            self.refusals.add(reason)
            return {}
        return found

    def refuse(self, adapters: Iterable[Adapter | None], reason: str) -> None:
        """A forward of these failed as `NotMixableError` says."""
        modules = frozenset(module for adapter in adapters if adapter is not None for module in adapter.parts)
        self._verdicts[modules] = reason
        self.refusals.add(reason)

    def _find(self, name: Hashable) -> Adapter | str | None:
        if isinstance(name, AdapterFile):
            return self.store.get(name)
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
        if known is None or not known.is_like(found):  # else recorded steps that know it are as good as before
            known = self._own[own] = found
        self._seen.add(own)
        return known

    def mix(self, ranges: list[tuple[Adapter | None, int, int]]) -> Mix:
        """Of ranges of tokens, in their order; the same that a step before had, if it is kept."""
        key = tuple((None if adapter is None else adapter.key, *bounds) for adapter, *bounds in ranges)
        known = self._mixes.pop(key, None)
        if known is None:
            known = Mix(ranges, head_of(self._model))
            known.prepare(self._model.device)
        self._mixes[key] = known
        while len(self._mixes) > MAX_MIXES:
            self._mixes.popitem(last=False)
        return known

    def alone(self, file: AdapterFile) -> Mix:
        """All rows with one adapter that is not the model's."""
        self._check_unmerged(file)
        return Mix([(self.store.get(file), 0, 0)], None)

    def _check(self, modules: frozenset[nn.Module]) -> str | None:
        """Whether rows with different adapters of these modules get what each gets alone, in short forwards."""
        names = tuple(name for name, module in self._model.named_modules() if module in modules)

        def make(model: PreTrainedModel, cache: PagedCache, layout: Layout) -> tuple[BlockManager, Any]:
            blocks, runner = self._make(model, cache, layout)
            return blocks, _CheckRunner(model, runner, [*(_random_adapter(modules, rank) for rank in (3, 2)), None])

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
    mix_of: Callable[[list[tuple[Adapter | None, int, int]]], Mix],
) -> Tensor:
    """[`Runner`]'s logits of items in one packed forward, each with its own of the adapters `found`."""
    places: dict[int, int] = {}  # adapters in the order met
    numbers = [places.setdefault(id(adapter), len(places)) for adapter in found]
    decodes = [query_len == 1 or bool(sequence.draft) for sequence, query_len in items]
    order = sorted(range(len(items)), key=lambda place: (not decodes[place], numbers[place]))
    rows = rows_of_logits(items)
    mix = mix_of(joined((found[place], items[place][1]) for place in order))
    with mixing(model, mix):
        logits = runner.run([items[place] for place in order], mix.key)
    return in_order([([row for place in order for row in rows[place]], logits)])


class _CheckRunner:
    """A runner of `capability`'s checks, for rows with these adapters."""

    def __init__(self, model: PreTrainedModel, runner: Runner, adapters: list[Adapter | None]) -> None:
        self._model, self._runner, self._adapters = model, runner, adapters

    def run(self, items: list[tuple[Any, int]]) -> Tensor:
        found = [self._adapters[sequence.request.row] for sequence, _ in items]
        head = head_of(self._model)
        return run_mixed(self._model, self._runner, items, found, lambda ranges: Mix(ranges, head))


def _random_adapter(modules: Iterable[nn.Module], rank: int) -> Adapter:
    generator, parts = torch.Generator().manual_seed(rank), dict[nn.Module, LoraWeights]()

    def draw(*sizes: int) -> Tensor:
        numbers = torch.randn(*sizes, generator=generator, device="cpu") * sizes[1] ** -0.5
        return numbers.to(weight.device, weight.dtype)

    for module in modules:
        weight: Any = module.weight
        width, depth = linear_shape(module)
        parts[module] = LoraWeights(draw(rank, depth), draw(width, rank), None, 0.5)
    return Adapter(("check", rank), parts)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """The linear layer that gives logits."""
    head = model.get_output_embeddings()
    return getattr(head, "base_layer", head)
