"""Observers of attention in forwards that are not packed: which positions attended to later ones,
and which columns of an encoder rows attend to. They change no attention."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextvars import ContextVar

import torch
from torch import Tensor

from ..interrupts import restoring
from .masks import Columns, PagedMask, padding_columns

# Called with each attention of a forward that is not packed: the numbers of rows, queries and keys,
# the mask, and whether attention without a mask is causal.
attention_observer: ContextVar[
    Callable[[tuple[int, int, int], Tensor | None, bool], None] | None
] = ContextVar("attention_observer", default=None)


@dataclasses.dataclass(eq=False)
class LookAhead:
    """An `attention_observer` that finds positions which attended to later ones, in a first forward
    over rows of `length` columns, or over those from `first` on if a cache holds the others."""

    paddings: list[int]
    length: int
    first: int = 0
    num_calls: int = 0
    # distinct masks that are not just causal
    _masks: list[Tensor | None] = dataclasses.field(default_factory=list)

    def __call__(
        self,
        sizes: tuple[int, int, int],
        mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        *others, num_keys = sizes
        num_queries = self.length - self.first
        fewest_keys = min(num_queries + 1, self.length)
        is_ours = others == [len(self.paddings), num_queries]
        if not is_ours or not fewest_keys <= num_keys <= self.length:
            return  # such as attention in a vision tower
        self.num_calls += 1
        if isinstance(mask, PagedMask):
            is_causal = mask.pattern.causal
        elif mask is not None:
            is_causal = False
        if not is_causal and not any(mask is other for other in self._masks):
            self._masks.append(mask)

    def positions(self) -> Tensor | None:
        """Returns the positions that saw a later one, and all in between, `(rows, length)` bool;
        `None` for masks of other sizes."""
        rows = len(self.paddings)
        length = self.length
        ahead = torch.zeros(rows, length, dtype=torch.bool, device="cpu")
        here = torch.arange(self.first, length, device="cpu")
        first_tokens = torch.tensor(self.paddings, device="cpu")[:, None]
        for mask in self._masks:
            if mask is None:
                return torch.ones_like(ahead)
            if isinstance(mask, PagedMask):
                mask = mask.dense()
            if mask.dim() != 4:
                return None
            num_queries, num_keys = mask.shape[-2:]
            if num_queries != len(here) or num_keys > length:
                return None
            columns = torch.arange(length - num_keys, length, device="cpu")
            if mask.dtype != torch.bool:
                mask = mask > torch.finfo(mask.dtype).min / 2
            is_visible = mask.any(1).expand(rows, -1, -1).cpu()
            last = (is_visible * columns).amax(-1)
            # padding may see any position
            last = last.where(here >= first_tokens, here)
            reach = last.cummax(1).values  # the last position that this or an earlier one saw
            ahead[:, self.first :] |= reach > here
            ahead[:, self.first + 1 :] |= reach[:, :-1] == here[1:]
        return ahead


@dataclasses.dataclass(eq=False)
class EncoderColumns:
    """An `attention_observer` that finds which of an encoder's columns, `width` of them, the
    `num_rows` rows of a forward attend to. Attention over as many keys of another kind must not
    occur in the forward."""

    num_rows: int
    width: int
    # distinct masks
    _masks: list[Tensor | None] = dataclasses.field(default_factory=list)

    def __call__(
        self,
        sizes: tuple[int, int, int],
        mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        num_rows, _, num_keys = sizes
        is_ours = (num_rows, num_keys) == (self.num_rows, self.width)
        if is_ours and not any(mask is other for other in self._masks):
            self._masks.append(mask)

    def columns(self) -> Columns | None:
        """Returns the columns that all rows' queries see; `None` if these are not contiguous,
        differ from layer to layer, have a bias, or no attention has been observed."""
        distinct = {self._columns_of(mask) for mask in self._masks}
        return distinct.pop() if len(distinct) == 1 else None

    def _columns_of(self, mask: Tensor | None) -> Columns | None:
        if mask is None:
            return padding_columns(None, self.num_rows, self.width)
        if isinstance(mask, PagedMask):
            return None if mask.pattern.causal else mask.visible_columns
        if mask.dim() != 4 or mask.shape[1] != 1:
            return None
        is_visible = mask[:, 0]
        if mask.dtype != torch.bool:
            bias = is_visible
            is_visible = bias == 0
            if not torch.equal(is_visible, bias > torch.finfo(bias.dtype).min / 2):
                return None
        last = is_visible[:, -1]
        if not torch.equal(is_visible, last[:, None].expand_as(is_visible)):
            return None
        return padding_columns(last.expand(self.num_rows, -1), self.num_rows, self.width)


@restoring
def observing_attention(
    observer: Callable[[tuple[int, int, int], Tensor | None, bool], None],
) -> Iterator[None]:
    """A context with this `attention_observer`."""
    token = attention_observer.set(observer)
    try:
        yield
    finally:
        attention_observer.reset(token)
