"""Runs rows with different adapters in one packed forward: the base layers compute all rows, and
hooks add the product of each row's adapter, which `kernels/lora.py` computes."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from ..batching.execution.inputs import Bounds
from ..batching.execution.runner import concat_in_order
from ..interrupts import restoring, setting
from ..kernels.lora import Deltas, LoraWeights, RecordedDeltas, can_record
from ..plan import StepPlan
from ..seams import ForwardContext
from .peft_models import BASE, NO_ADAPTER, Adapter, Scope, current_scope, use_adapter

Ranges = tuple[tuple[Adapter, int, int], ...]
"""Adapters, each with the range `[start, end)` of packed tokens that have it."""


class NotMixableError(Exception):
    """A module's input has other rows than the packed tokens, so its rows' adapters are unknown."""


class Mix(ForwardContext):
    """The adapters of a packed step's tokens, and the products that they add to modules'
    outputs."""

    def __init__(self, ranges: Ranges, head: nn.Module | None, reads_ranges: bool = False) -> None:
        """`head`: the linear layer that computes logits, if any. `reads_ranges`: whether one
        recorded step can serve all ranges of these adapters (`takes_ranges`)."""
        distinct_adapters = dict.fromkeys(adapter for adapter, *_ in ranges)
        self.adapters = [adapter for adapter in distinct_adapters if adapter is not NO_ADAPTER]
        self._ranges = ranges
        self._head = head
        self._has_one_adapter = len(distinct_adapters) == 1
        self.weights = _weights_of(self.adapters)
        self._num_tokens = 0  # of the forward; tokens after the last range have no adapter
        self._head_tokens: list[int] | None = None
        self._deltas = {module: self._deltas_of(module, ranges) for module in self.weights}
        self.variant: Hashable = key_of(ranges)
        self.names = [(adapter.key[0], start, end) for adapter, start, end in ranges]
        self.is_fixed = not reads_ranges
        # In a recorded step with chunks, the head gets rows whose adapters are unknown, so no
        # adapter may be on the head.
        self.takes_chunks = reads_ranges and head not in self._deltas
        if reads_ranges:
            self.variant = frozenset(adapter.key for adapter in self.adapters)
            self.num_keys = len(self.adapters)
        indexed_weights = itertools.chain.from_iterable(self.weights.values())
        self.tensors = [tensor for _, lora in indexed_weights for tensor in lora.tensors]

    def prepare(self, device: torch.device) -> None:
        """Prepares the products on `device` for steps that are recorded with fixed ranges."""
        like = torch.empty(0, device=device)
        if not self._has_one_adapter:
            for deltas in self._deltas.values():
                deltas.prepare(like)

    def begin(self, num_tokens: int, head_tokens: list[int] | None) -> None:
        self._num_tokens = num_tokens
        self._head_tokens = head_tokens

    def ranges(
        self, keys: Sequence[Hashable], num_decodes: int, num_tokens: int
    ) -> list[tuple[Bounds, Bounds]]:
        if not keys:
            return []
        all_tokens: Ranges = ((self.adapters[0], 0, num_tokens),)
        ranges = all_tokens if self._has_one_adapter else self._ranges
        bounds = {key: [(0, 0), (0, 0)] for key in keys}
        for adapter, start, end in ranges:
            if adapter is NO_ADAPTER:
                continue
            if start < num_decodes:
                bounds[adapter.key][0] = (start, min(end, num_decodes))
            if end > num_decodes:
                bounds[adapter.key][1] = (max(start, num_decodes), end)
        return [(decodes, chunks) for decodes, chunks in bounds.values()]

    def record(self, ranges: Tensor, max_tokens: int, has_chunks: bool) -> RecordedMix:
        if self.is_fixed:
            return RecordedMix((), None, [deltas.table for deltas in self._deltas.values()])
        deltas = dict[nn.Module, RecordedDeltas]()
        for module, weights in self.weights.items():
            if has_chunks:  # two ranges for each adapter
                weights = [(2 * index + i, lora) for index, lora in weights for i in (0, 1)]
            deltas[module] = RecordedDeltas(ranges, max_tokens, weights)
        return RecordedMix([adapter.key for adapter in self.adapters], deltas)

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
        """The forward hook of the modules: adds the products of the rows' adapters to `output`,
        in place. Raises `NotMixableError` if the rows' adapters are unknown."""
        scope = current_scope.get()
        if scope is None or scope.owner is not self:  # the forward of another thread
            return output
        x = args[0]
        x = x.reshape(-1, x.shape[-1])
        out = output.reshape(-1, output.shape[-1])
        recorded_products = recorded_deltas.get()
        deltas: Deltas | RecordedDeltas | None = None
        if recorded_products is not None:
            deltas = recorded_products[module]
        elif self._has_one_adapter:
            deltas = self._deltas_of(module, ((self._ranges[0][0], 0, len(x)),))
        elif self._head_tokens is not None and module is self._head:
            if len(x) == len(self._head_tokens):
                deltas = self._deltas_of(module, self._head_ranges(self._head_tokens))
        elif len(x) == self._num_tokens:
            deltas = self._deltas[module]
        if deltas is None:
            raise NotMixableError(
                f"{type(module).__name__} gets {len(x)} rows in a forward of {self._num_tokens}"
                " tokens"
            )
        deltas.add(out, x)
        return out.view(output.shape)

    def _deltas_of(self, module: nn.Module, ranges: Ranges) -> Deltas:
        parts = []
        for adapter, start, end in ranges:
            if module in adapter.weights:
                parts.append((start, end, adapter.weights[module]))
        return Deltas(parts)

    def _head_ranges(self, tokens: list[int]) -> Ranges:
        adapters: dict[int, Adapter] = {}
        for adapter, start, end in self._ranges:
            adapters.update(dict.fromkeys(range(start, end), adapter))
        return join_ranges((adapters.get(token, NO_ADAPTER), 1) for token in tokens)


@dataclass(eq=False)
class RecordedMix:
    """The adapters of a recorded step."""

    keys: Sequence[Hashable]
    # by module, the adapters' products for ranges that the step reads on the device; `None` if its
    # ranges are fixed
    deltas: dict[nn.Module, RecordedDeltas] | None
    tables: Any = None  # with fixed ranges: the tensors that the step reads, to keep them alive

    def reading(self) -> contextlib.AbstractContextManager[None]:
        return setting(recorded_deltas, self.deltas)


def _weights_of(adapters: Iterable[Adapter]) -> dict[nn.Module, list[tuple[int, LoraWeights]]]:
    """Returns, by module, the weights of adapters on it, each with the adapter's index."""
    weights: dict[nn.Module, list[tuple[int, LoraWeights]]] = {}
    for index, adapter in enumerate(adapters):
        for module, lora in adapter.weights.items():
            weights.setdefault(module, []).append((index, lora))
    return weights


def takes_ranges(adapters: Iterable[Adapter], device: torch.device) -> bool:
    """Whether a recorded step can read the ranges of these adapters on the device."""
    weights = _weights_of(adapters).values()
    return bool(weights) and all(
        can_record([lora for _, lora in indexed_weights], device) for indexed_weights in weights
    )


def key_of(ranges: Ranges) -> tuple[Any, ...]:
    return tuple((adapter.key, start, end) for adapter, start, end in ranges)


recorded_deltas: ContextVar[dict[nn.Module, RecordedDeltas] | None] = ContextVar(
    "hf_paged_recorded", default=None
)
"""While a step is recorded: its `RecordedMix.deltas`, which the hooks of [`Mix`] use."""


def join_ranges(adapter_counts: Iterable[tuple[Adapter, int]]) -> Ranges:
    """Returns the ranges of consecutive tokens with the same adapter. `adapter_counts`:
    adapters, each with the number of the next tokens that have it."""
    ranges: list[tuple[Adapter, int, int]] = []
    end = 0
    for adapter, count in adapter_counts:
        start = end
        end += count
        if ranges and ranges[-1][0] is adapter:
            _, start, _ = ranges.pop()
        ranges.append((adapter, start, end))
    return tuple(ranges)


@restoring
def mixing(model: nn.Module, mix: Mix) -> Iterator[Mix]:
    """A context in which packed forwards of this thread run with `mix`: PEFT's layers compute no
    adapter, and hooks add the products of the mix. Raises the errors of `use_adapter`."""
    with use_adapter(model, BASE), contextlib.ExitStack() as stack:
        stack.callback(current_scope.reset, current_scope.set(Scope(model, mix)))
        for module in mix.weights:
            stack.callback(module.register_forward_hook(mix).remove)
        yield mix


def run_mixed(
    model: PreTrainedModel,
    run: Callable[[StepPlan, Mix], Tensor],
    plan: StepPlan,
    adapters: list[Adapter],
    make_mix: Callable[[Ranges], Mix],
) -> Tensor:
    """Calls `run` for one packed forward of the plan's rows; `adapters[i]` is the adapter of row
    `i`. Returns logits as `Runner.run` does. Raises the `NotMixableError` of [`Mix`]."""
    # rows are sorted by adapter, so that steps with the same number of rows for each adapter share
    # a recorded step
    adapter_keys = {
        adapter: (adapter is not NO_ADAPTER, str(adapter.key)) for adapter in set(adapters)
    }

    def sort_key(row: int) -> tuple[bool, tuple[bool, str]]:
        is_decode = plan.counts[row] == 1 or bool(plan.sequences[row].draft)
        return not is_decode, adapter_keys[adapters[row]]

    order = sorted(range(len(plan)), key=sort_key)
    mix = make_mix(join_ranges([(adapters[row], plan.counts[row]) for row in order]))
    with mixing(model, mix):
        logits = run(plan.select(order), mix)
    return concat_in_order([(order, logits)], plan.num_logits)


def head_of(model: PreTrainedModel) -> nn.Module | None:
    """Returns the linear layer that computes logits, without PEFT's layer around it; `None` if
    there is none."""
    head = model.get_output_embeddings()
    return getattr(head, "base_layer", head)
