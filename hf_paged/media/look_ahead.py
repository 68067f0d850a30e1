"""Finds the positions of prompts that attend to later positions."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from ..attention.masks import PagedMask


@dataclasses.dataclass(eq=False)
class LookAhead:
    """An observer (`attention.masks`) of a forward over prompts, which are rows of `length`
    columns: finds the positions that attended to later ones. The forward computes the columns from
    `first_column` on; a cache holds the earlier ones."""

    paddings: list[int]  # number of leading padding columns of each row
    length: int
    first_column: int = 0
    num_calls: int = 0  # attention calls over the prompts' own tokens
    # by `id`, the masks of those attention calls that are not causal; `None`: a call without a mask
    _masks: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)

    def __call__(
        self,
        sizes: tuple[int, int, int],
        mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        num_rows, num_queries, num_keys = sizes
        num_new = self.length - self.first_column
        min_keys = min(num_new + 1, self.length)
        has_prompt_shape = (num_rows, num_queries) == (len(self.paddings), num_new)
        if not has_prompt_shape or not min_keys <= num_keys <= self.length:
            return  # attention to something else, for instance in a vision tower
        self.num_calls += 1
        if isinstance(mask, PagedMask):
            is_causal = mask.pattern.causal
        elif mask is not None:
            is_causal = False
        if not is_causal:
            self._masks[id(mask)] = mask

    def look_ahead_mask(self) -> Tensor | None:
        """Returns a bool mask `(rows, length)` that marks each position that attended to a later
        one, that later position, and all positions between the two. Returns `None` if an attention
        mask has an unsupported shape."""
        num_rows = len(self.paddings)
        length = self.length
        looks_ahead = torch.zeros(num_rows, length, dtype=torch.bool, device="cpu")
        first = self.first_column
        queries = torch.arange(first, length, device="cpu")
        first_tokens = torch.tensor(self.paddings, device="cpu")[:, None]
        for mask in self._masks.values():
            if mask is None:
                return torch.ones_like(looks_ahead)
            if isinstance(mask, PagedMask):
                mask = mask.dense()
            if mask.dim() != 4:
                return None
            num_queries, num_keys = mask.shape[-2:]
            if num_queries != len(queries) or num_keys > length:
                return None
            columns = torch.arange(length - num_keys, length, device="cpu")
            if mask.dtype != torch.bool:
                mask = mask > torch.finfo(mask.dtype).min / 2
            is_visible = mask.any(1).expand(num_rows, -1, -1).cpu()
            last_key = (is_visible * columns).amax(-1)
            # padding may attend to any position
            last_key = last_key.where(queries >= first_tokens, queries)
            # the last position to which this query or an earlier one attends
            reach = last_key.cummax(1).values
            looks_ahead[:, first:] |= reach > queries
            looks_ahead[:, first + 1 :] |= reach[:, :-1] == queries[1:]
        return looks_ahead
