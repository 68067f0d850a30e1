"""Whether cached blocks were computed with the weights of now: when that is looked at, and what a change drops."""

from __future__ import annotations

import operator
import random
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from ..cache.block_manager import BlockManager
from ..cache.memory import PagedMemory
from .fingerprint import fingerprint

LINE = 64  # bytes


class WeightSample:
    """
    What of a model's weights can be looked at in microseconds, as it was when this was made: which modules and tensors
    there are, their versions and addresses, which adapters are active, and, on the CPU, one cache line of each tensor
    at a place that chance has chosen. Of writes that move neither version nor address it sees those to whole tensors
    (an optimizer's, a merge's), and may miss those to a few elements.

    It holds the memory of the tensors that it has read.
    """

    def __init__(self, model: nn.Module) -> None:
        modules = list(model.modules())
        self._children_of = [module._modules for module in modules if module._modules]
        self._tensors_of = [held for module in modules for held in (module._parameters, module._buffers) if held]
        own = ("_active_adapter", "_disable_adapters", "merged_adapters")  # of PEFT's layers
        self._adapters_of = [vars(m) for m in modules if any(name in vars(m) for name in own)]
        self._children, self._tensors = self._read_parts()
        parts = [part for tensor in self._tensors if tensor is not None for part in _parts(tensor)]
        self._counted = [part for part in parts if not part.is_inference()]
        self._placed = [part for part in parts if part.layout is torch.strided]
        chance = random.Random(0)
        self._lines = [_line(part, chance) for part in self._placed if part.device.type == "cpu" and part.nbytes]
        self._content = self._read_content()

    def is_same(self) -> bool:
        """Whether all of that is what it was."""
        children, tensors = self._read_parts()
        for now, before in ((children, self._children), (tensors, self._tensors)):
            if len(now) != len(before) or not all(map(operator.is_, now, before)):
                return False
        return self._read_content() == self._content

    def _read_parts(self) -> tuple[list[Any], list[Any]]:
        return (
            [child for held in self._children_of for child in held.values()],
            [tensor for held in self._tensors_of for tensor in held.values()],
        )

    def _read_content(self) -> tuple[Any, ...]:
        adapters = [
            (str(held.get("_active_adapter")), held.get("_disable_adapters"), str(held.get("merged_adapters")))
            for held in self._adapters_of
        ]
        versions, places = [x._version for x in self._counted], list(map(Tensor.data_ptr, self._placed))
        return versions, places, adapters, b"".join(self._lines)


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    """The tensor, or those that one of a subclass consists of, as far as it tells."""
    if type(tensor) in (Tensor, nn.Parameter):
        yield tensor
    elif hasattr(tensor, "__tensor_flatten__"):
        for name in tensor.__tensor_flatten__()[0]:
            yield from _parts(getattr(tensor, name))


def _line(tensor: Tensor, chance: random.Random) -> memoryview:
    """Up to `LINE` bytes of the tensor's memory, which stays where it is as long as they are held."""
    storage, start = tensor.untyped_storage(), tensor.storage_offset() * tensor.element_size()
    size = min(tensor.nbytes, storage.nbytes() - start)  # expanded tensors hold less than they have
    first = start + chance.randrange(max(1, size - LINE + 1))
    found = torch.empty(0, dtype=torch.uint8).set_(storage, first, (min(LINE, start + size - first),))
    return memoryview(found.numpy())


class WeightsGuard:
    """
    Sees to it that the prefix cache serves only what the model of now has computed.

    Code of the user's, which may change the model, runs between *windows*: a call of `generate`, a call of an engine's,
    one step. Blocks of earlier windows are served in a window once its fingerprint of the model (`vouch`) is that of
    the memory. Before a window ends (`settle`), what it computed gets its fingerprint: that of the memory, which is
    taken again or, where a window is a single step, vouched for by a `WeightSample` that is what it was when the
    fingerprint was taken. What has none is forgotten as soon as one is taken.

    Args:
        model (`nn.Module`): Held.
        memory ([`PagedMemory`]): Its lock guards `blocks`; it holds the fingerprint.
        blocks ([`BlockManager`]): Of the memory.

    Attributes:
        num_changes (`int`): How often the model was found to be another than before.
    """

    def __init__(self, model: nn.Module, memory: PagedMemory, blocks: BlockManager) -> None:
        self._model, self._memory, self._blocks = model, memory, blocks
        self._is_on = False
        self._autocast: torch.dtype | None = None
        self._sample: WeightSample | None = None
        self.num_changes = 0

    @property
    def is_on(self) -> bool:
        """Whether anything is served or kept at all."""
        return self._is_on and self._blocks.prefix_caching

    def begin(self, is_on: bool, autocast: torch.dtype | None) -> None:
        """
        Work begins, with nothing in flight.

        Args:
            is_on (`bool`): Whether it uses the prefix cache.
            autocast (`torch.dtype`, *optional*): What its forwards compute in, if that is not the model's own.
        """
        self._is_on, self._autocast, self._sample = is_on, autocast, None
        if is_on:
            self._blocks.prefix_caching = self._memory.config.prefix_caching

    def rest(self) -> None:
        """Nothing is in flight any more."""
        self._sample = None

    def open(self) -> None:
        """A window begins: other code may have run since the last."""
        if not self.is_on:
            return
        with self._memory.lock:
            self._blocks.begin_window()
        if self._sample is not None and not self._sample.is_same():
            self._forget()

    def vouch(self) -> bool:
        """
        Whether blocks of earlier windows may be served in this, by one fingerprint a window. If not, none are left.
        """
        return self._blocks.is_vouched_for or self._compare()

    def settle(self, is_call: bool) -> None:
        """
        What this window has computed gets its fingerprint. If it is a whole call (`is_call`), this may happen before
        its end; else it is one step.
        """
        if not self.is_on:
            return
        try:
            is_needed = is_call or self._sample is None
            if self._memory.fingerprint is None or (is_needed and not self._blocks.is_vouched_for):
                self._compare()
            if not is_call and self._sample is None and self.is_on:
                self._sample = WeightSample(self._model)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """The window ended before `settle`: if nothing else vouches for what it computed, that is forgotten."""
        if self.is_on and self._sample is None and not self._blocks.is_vouched_for:
            self._memory.fingerprint = None

    def change(self) -> None:
        """The model is another from here on."""
        with self._memory.lock:
            self._blocks.begin_window()
        self._forget()

    def _compare(self) -> bool:
        weights = fingerprint(self._model)
        now = None if weights is None else (weights, self._autocast)
        with self._memory.lock:
            before = self._memory.fingerprint
            if now is None or now != before:
                self._forget()
            if now is None:
                self._blocks.drop_cached()
                self._blocks.prefix_caching = False
            self._memory.fingerprint = now
            self._blocks.vouch()
        return now is not None and now == before

    def _forget(self) -> None:
        self._sample = None
        with self._memory.lock:
            self.num_changes += self._memory.fingerprint is not None
            self._blocks.forget_before_window()
            self._memory.fingerprint = None
