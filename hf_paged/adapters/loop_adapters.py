"""The adapters of a loop's requests: loads and drops their weights, and finds the rows that can
share a forward. The scheduler decides which requests run."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batching.execution.executor import Executor
from ..batching.execution.runner import LogitsPart, concat_in_order
from ..batching.request import Request
from ..cache.block_manager import BlockManager
from ..cache.free_memory import is_out_of_memory
from ..cache.paged_cache import PagedCache
from ..interrupts import is_interrupt
from ..kernels.lora import LoraWeights
from ..model.capability import Capability
from ..model.checks import batched_and_single_logits
from ..model.layout import Layout
from ..model.trial import MakeRunner, Trial, sample_tokens
from ..plan import StepPlan
from ..seams import ForwardContext
from ..topics import Topic
from .files import AdapterFile, AdapterStore, linear_shape
from .mixing import (
    Mix,
    NotMixableError,
    Ranges,
    head_of,
    mixing,
    run_mixed,
    takes_ranges,
)
from .pages import AdapterPages
from .peft_models import (
    BASE,
    NO_ADAPTER,
    Adapter,
    AdapterError,
    active_adapter,
    check_adapter,
    check_unmerged,
    find_adapter,
    peft_layers,
    use_adapter,
)
from .shards import local_shard

MAX_MIXES = 64  # cached mixes, which recorded and later steps use again
MAX_PREFETCH_REQUESTS = 16  # waiting requests whose adapters may be loaded before their admission


class LoopAdapters:
    """The adapters of a loop's requests: adapters that PEFT has added to the model, by name, and
    adapters in folders, whose weights are charged to the loop's pool. Implements `seams.Adapters`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        make_runner: MakeRunner,
        blocks: BlockManager,
    ) -> None:
        self._model = model
        self._cache = cache
        self._make_runner = make_runner
        self._processes = cache.memory.processes
        self.store = AdapterStore(model)
        # weak, since a cycle would keep the pages alive longer than their loop
        self.pages = AdapterPages(blocks, weakref.WeakMethod(self.forget))
        # files of the last `prefetch`, unless `forget_model` has dropped them
        self._prefetched: list[Hashable] = []
        self._model_adapters: dict[str, Adapter] = {}  # by name
        # names of `_model_adapters` that were read since the last `forget_model`
        self._checked_names: set[str] = set()
        self._numbers = itertools.count()  # in `Adapter.key`
        # By modules, the reason why adapters on them cannot be mixed; `None` if they can. Even a
        # lack of memory counts as a reason until `forget_model`: checking again in every step would
        # cost more than separate forwards.
        self._verdicts: dict[frozenset[nn.Module], str | None] = {}
        # neither cached function may refer to this object, since a cycle would keep it alive
        self._takes_ranges = functools.lru_cache(MAX_MIXES)(takes_ranges)
        make_mix = functools.partial(_make_mix, model, self._takes_ranges)
        self._mix_of = functools.lru_cache(MAX_MIXES)(make_mix)  # of consecutive token ranges

    def counts(self) -> dict[str, int]:
        return {
            "num_adapter_hits": self.pages.num_hits,
            "num_adapter_loads": self.store.num_loads,
            "num_adapter_evictions": self.pages.num_evictions,
        }

    def admit(self, request: Request, allocate_blocks: Callable[[], bool]) -> bool:
        is_admitted = False
        try:
            if self.pages.pin(request.adapter, request.adapter_bytes, request):
                is_admitted = allocate_blocks()
        finally:
            if not is_admitted:
                self.release(request)
        if is_admitted:
            is_first = request.first_step_started_at is None  # false after a preemption
            self.pages.record_admission(request.adapter, is_first)
        return is_admitted

    def release(self, request: Request) -> None:
        self.pages.unpin(request.adapter, request)

    def prefetch(self, waiting: Sequence[Request]) -> None:
        """Of the adapters of the next requests, starts to load those that are not in the pool."""
        next_requests = waiting[:MAX_PREFETCH_REQUESTS]
        adapter_files = dict.fromkeys(
            request.adapter for request in next_requests if request.adapter_bytes
        )
        files = [file for file in adapter_files if file not in self.pages]
        if files != self._prefetched:
            self._prefetched = files
            self.load_ahead(files)

    def load_ahead(self, files: list[Any]) -> None:
        """Calls `AdapterStore.prefetch` in all processes."""
        if self._processes is not None:
            self._processes.call_adapters("load_ahead", files)
        self.store.prefetch(files)

    def using(self, adapter: Hashable) -> contextlib.AbstractContextManager[ForwardContext | None]:
        if not isinstance(adapter, AdapterFile):
            return use_adapter(self._model, adapter)
        self._check_unmerged(adapter)
        return mixing(self._model, self._mix_of(((self.load(adapter), 0, 0),)))

    def context_of(self, names: Any) -> contextlib.AbstractContextManager[ForwardContext | None]:
        """A context that recreates another process's `ForwardContext` from its `names`. Raises
        [`AdapterError`] if an adapter is missing, or cannot be loaded or mixed."""
        if not isinstance(names, list):
            check_adapter(self._model, names)
            return self.using(names)
        ranges: list[tuple[Adapter, int, int]] = []
        for name, start, end in names:
            adapter = self._find_adapter(name)
            if isinstance(adapter, str):
                raise AdapterError(name, adapter)
            ranges.append((adapter, start, end))
        return mixing(self._model, self._mix_of(tuple(ranges)))

    def run(self, plan: StepPlan, executor: Executor) -> Tensor:
        """Runs one forward for all rows that can be mixed, then one forward per adapter for the
        remaining rows."""
        row_names = [sequence.request.adapter for sequence in plan.sequences]
        names = dict.fromkeys(row_names)
        if len(names) == 1:
            return self._run_one_adapter(row_names[0], plan, executor)
        parts: list[LogitsPart] = []
        separate_rows = list(range(len(plan)))
        if executor.runner.is_packed:
            mixable = self._get_mixable(names, executor.slowed_by)
            rows = [
                row
                for row, sequence in enumerate(plan.sequences)
                if row_names[row] in mixable and sequence.request.inputs is None
            ]
            row_adapters = [mixable[row_names[row]] for row in rows]
            if len(set(row_adapters)) > 1:
                compute = functools.partial(executor.compute, executor.runner.run)
                mixed_plan = plan.select(rows)
                try:
                    logits = run_mixed(self._model, compute, mixed_plan, row_adapters, self._mix_of)
                    parts.append((rows, logits))
                    separate_rows = sorted(set(separate_rows) - set(rows))
                except NotMixableError as error:
                    reason = Topic.ADAPTERS(str(error))
                    self._verdicts[_modules_of(mixable.values())] = reason
                    executor.slowed_by.add(reason)
        for name in sorted({row_names[row] for row in separate_rows}, key=str):
            rows = [row for row in separate_rows if row_names[row] == name]
            logits = self._run_one_adapter(name, plan.select(rows), executor)
            parts.append((rows, logits))
        return concat_in_order(parts, plan.num_logits)

    def _run_one_adapter(self, adapter: Hashable, plan: StepPlan, executor: Executor) -> Tensor:
        with self.using(adapter) as context:
            return executor.compute(executor.runner.run, plan, context)

    def forget_model(self) -> None:
        """Drops the state that depends on the model, which may have changed: verdicts, mixes,
        prefetched weights, and weights for modules that are gone. The model's adapters are read
        again before their next use."""
        if self._processes is not None:
            self._processes.call_adapters("forget_model")
        self._checked_names.clear()
        if self._model_adapters:  # keeps no weights of deleted adapters
            layers = peft_layers(self._model)
            self._model_adapters = {
                name: adapter
                for name, adapter in self._model_adapters.items()
                if any(name in getattr(layer, "lora_A", ()) for layer in layers)
            }
        self._verdicts.clear()
        self._forget_mixes()
        self._prefetched = []
        self.store.forget_stale(set(self._model.modules()))

    def forget(self, file: AdapterFile) -> None:
        """Drops the weights of an adapter that the pool has evicted."""
        if self._processes is not None:
            self._processes.call_adapters("forget", file)
        self.store.forget(file)
        self._forget_mixes()

    def _forget_mixes(self) -> None:
        self._mix_of.cache_clear()
        self._takes_ranges.cache_clear()

    def _check_unmerged(self, adapter: Hashable) -> None:
        name = adapter.path if isinstance(adapter, AdapterFile) else adapter
        check_unmerged(peft_layers(self._model), adapter, name)

    def _get_mixable(self, names: Iterable[Hashable], reasons: set[str]) -> dict[Hashable, Adapter]:
        """Returns, by name, the adapters whose rows can share a forward; none if fewer than two
        can. `names`: the adapters of a step. Adds to `reasons` why the others cannot. Raises the
        errors of `_find_adapter`, and [`AdapterError`] if adapters are merged into the weights."""
        names = list(names)
        first_name = next(name for name in names if name is not None)
        self._check_unmerged(first_name)
        adapters: dict[Hashable, Adapter] = {}
        for name in names:
            adapter = self._find_adapter(name)
            if isinstance(adapter, str):
                reasons.add(Topic.ADAPTERS(adapter))
            else:
                adapters[name] = adapter
        if len(adapters) < 2:
            return {}
        modules = _modules_of(adapters.values())
        if modules not in self._verdicts:
            named_modules = self._model.named_modules()
            module_names = [name for name, module in named_modules if module in modules]
            self._verdicts[modules] = self.check_mixing(tuple(module_names))
        reason = self._verdicts[modules]
        if reason is not None:
            reasons.add(reason)
            return {}
        return adapters

    def load(self, file: AdapterFile) -> Adapter:
        """Returns the adapter; loads its weights first if needed, in all processes that hold shards
        of the model. Raises [`AdapterError`] if one of them cannot load the weights."""
        is_new = file not in self.store
        adapter = self.store.get(file)
        if is_new and self._processes is not None:
            try:
                failure = self._processes.call_adapters("load", file)
                if failure is not None:
                    raise AdapterError(
                        file,
                        f"the adapter in {file.path!r} cannot be loaded {failure}",
                    )
            except BaseException:
                self.store.forget(file)
                raise
        return adapter

    def _find_adapter(self, name: Hashable) -> Adapter | str:
        """Returns the adapter of a request (`None`: the model's active one), or the reason why its
        rows need a separate forward. Raises the errors of `load` and `find_adapter`."""
        if isinstance(name, AdapterFile):
            return self.load(name)
        if name is None:
            name = active_adapter(self._model)
        if not isinstance(name, str):
            return "no single adapter is active in all layers"
        if name == BASE:
            return NO_ADAPTER
        previous = self._model_adapters.get(name)
        if previous is not None and name in self._checked_names and previous.is_current():
            return previous
        adapter = find_adapter(self._model, name, (name, next(self._numbers)))
        if isinstance(adapter, str):
            return adapter
        if previous is not None and previous.state == adapter.state:
            # steps recorded with the previous object stay valid
            adapter = dataclasses.replace(adapter, key=previous.key)
        self._model_adapters[name] = adapter
        self._checked_names.add(name)
        return adapter

    def check_mixing(self, module_names: tuple[str, ...]) -> str | None:
        """Checks in short forwards whether rows with different adapters on these modules get the
        same results together as alone. Returns why they do not, or why that cannot be checked;
        `None` if they do."""
        if self._processes is not None:
            self._processes.call_adapters("check_mixing", module_names)
        try:
            adapters = [_random_adapter(self._model, module_names, rank) for rank in (3, 2)]
        except ValueError as error:  # adapters cannot be sharded like one of the layers
            return Topic.ADAPTERS(str(error))
        adapters.append(NO_ADAPTER)

        def make_mixed_runner(
            model: PreTrainedModel, cache: PagedCache, layout: Layout
        ) -> tuple[BlockManager, Any]:
            block_manager, runner = self._make_runner(model, cache, layout)
            make_mix = functools.partial(Mix, head=head_of(model))

            def run(plan: StepPlan) -> Tensor:
                row_adapters = [adapters[sequence.request.row] for sequence in plan.sequences]
                return run_mixed(model, runner.run, plan, row_adapters, make_mix)

            return block_manager, SimpleNamespace(run=run)

        try:
            capability = Capability(self._model, self._cache, make_mixed_runner)
            return capability.verdict(_mixing_check, "packed", call_kind=module_names)
        except Exception as error:
            if is_interrupt(error) or not is_out_of_memory(error):
                raise
            return Topic.ADAPTERS(
                "too little memory is free to check whether rows with different adapters can share"
                " a forward"
            )


def _mixing_check(trial: Trial) -> str | None:
    """Returns how the logits of rows with different adapters in one step differ from each row's
    logits alone; `None` if they agree. Raises `ForwardFailedError` if a forward fails."""
    batched_logits, single_logits = batched_and_single_logits(trial, sample_tokens(trial.model))
    return trial.difference(
        single_logits, batched_logits, condition="with several adapters in a forward"
    )


def _make_mix(
    model: PreTrainedModel,
    takes_ranges: Callable[[frozenset[Adapter], torch.device], bool],
    ranges: Ranges,
) -> Mix:
    adapters = frozenset(adapter for adapter, *_ in ranges) - {NO_ADAPTER}
    mix = Mix(ranges, head_of(model), takes_ranges(adapters, model.device))
    if mix.is_fixed:
        mix.prepare(model.device)
    return mix


def _random_adapter(model: PreTrainedModel, module_names: Iterable[str], rank: int) -> Adapter:
    """Returns a random adapter on the modules of these names, the same in every process. Raises
    `ValueError` if adapters cannot be sharded like one of the modules."""
    generator = torch.Generator().manual_seed(rank)
    weights = dict[nn.Module, LoraWeights]()

    def draw(*sizes: int) -> Tensor:
        unscaled = torch.randn(*sizes, generator=generator, device="cpu")
        scaled = unscaled * sizes[1] ** -0.5
        return scaled.to(weight.device, weight.dtype)

    for name in module_names:
        module = model.get_submodule(name)
        weight: Any = module.weight
        width, depth = linear_shape(module)
        whole_weights = LoraWeights(draw(rank, depth), draw(width, rank), None, 0.5)
        base_name = name.removesuffix(".base_layer")
        weights[module] = local_shard(model, base_name, module, whole_weights)
    return Adapter(("check", rank), weights)


def _modules_of(adapters: Iterable[Adapter]) -> frozenset[nn.Module]:
    return frozenset[nn.Module]().union(*[adapter.weights for adapter in adapters])
