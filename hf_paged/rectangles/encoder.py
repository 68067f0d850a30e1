"""Finds the columns of an encoder to which the rows of a forward attend."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..attention.masks import Columns, PagedMask, unpadded_columns


@dataclasses.dataclass(eq=False)
class EncoderColumns:
    """An `attention_observer` that finds the columns of an encoder, `width` in all, to which the
    `num_rows` rows of a forward attend. The forward must have no other attention of as many
    rows over as many keys."""

    num_rows: int
    width: int
    _masks: list[Tensor | None] = dataclasses.field(default_factory=list)  # each mask once

    def __call__(
        self,
        sizes: tuple[int, int, int],
        mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        num_rows, _, num_keys = sizes
        is_of_encoder = (num_rows, num_keys) == (self.num_rows, self.width)
        if is_of_encoder and not any(mask is observed for observed in self._masks):
            self._masks.append(mask)

    def columns(self) -> Columns | None:
        """Returns the range of columns to which each row attends; `None` if a row's columns are not
        contiguous, or differ between queries or layers, if a layer has a bias or a mask per head,
        or if no attention was observed."""
        distinct = {self._columns_of(mask) for mask in self._masks}
        return distinct.pop() if len(distinct) == 1 else None

    def _columns_of(self, mask: Tensor | None) -> Columns | None:
        if mask is None:
            return unpadded_columns(None, self.num_rows, self.width)
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
        last_query = is_visible[:, -1]
        if not torch.equal(is_visible, last_query[:, None].expand_as(is_visible)):
            return None
        return unpadded_columns(last_query.expand(self.num_rows, -1), self.num_rows, self.width)
