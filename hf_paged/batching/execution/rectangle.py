"""Rows that are computed side by side, and what they carry from step to step."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import EncoderDecoderCache

from ...cache.paged_cache import PagedCache
from ...cache.sequence_blocks import SequenceBlocks
from ...cache.states import state_layers
from ...model.own_loop import cache_parts, join_rows, select_rows
from ...plan import StepPlan

_MASK, _ENCODER_MASK = "decoder_attention_mask", "attention_mask"


@dataclasses.dataclass(eq=False)
class Rectangle:
    """A batch of rows that ran together, with the inputs of their next step. A row's index gives
    the place of its states, and of all else that `generate`'s loop carries from step to step."""

    blocks: list[SequenceBlocks]
    # blocks of each row's encoder keys and values, if there is an encoder
    encoded: list[SequenceBlocks]
    width: int  # columns: tokens of each row, with the padding in front of them
    paddings: list[int]
    token_ids: Tensor  # (rows, width) int64; without columns for embeddings
    cache: Any  # borrows the rows' tables; `None` for a model that makes its cache itself
    # carried to the next forward, as by `generate`: attention mask, position ids, the cache
    inputs: dict[str, Any]
    # names of inputs that are the same in every step
    constants: set[str] = dataclasses.field(default_factory=set)
    row_bytes: int = 0  # of a row's states

    def __post_init__(self) -> None:
        self.origins = list(range(len(self.blocks)))  # each row's index in the first step
        # columns of the encoder output, padding included
        self.encoder_width = max(self._encoder_lengths, default=0)

    @property
    def _encoder_lengths(self) -> list[int]:
        return [blocks.tables[0].num_tokens for blocks in self.encoded if blocks.tables]

    @property
    def state_layers(self) -> list[Any]:
        return state_layers(cache_parts(self.cache)[0])

    def borrow(self, num_cached: int) -> None:
        """Makes the cache use the rows' tables, of whose columns the first `num_cached` are
        computed."""
        if self.cache is None:
            return
        cache, *others = cache_parts(self.cache)
        cache.take(self.blocks, tuple(self.paddings), num_cached)
        for cross in others:
            if not isinstance(cross, PagedCache):
                continue
            width = self.encoder_width
            paddings = tuple(width - length for length in self._encoder_lengths)
            cross.take(self.encoded, paddings, width if num_cached else 0)

    def select(self, rows: list[int]) -> None:
        """Replaces row `i` by row `rows[i]`; the cache must borrow the tables again."""
        index = torch.tensor(rows, device=self.token_ids.device)
        origins = [self.origins[row] for row in rows]
        is_same = origins == self.origins
        for name, value in self.inputs.items():
            is_constant = is_same and name in self.constants
            if value is not self.cache and not is_constant:
                self.inputs[name] = select_rows(name, value, index, len(self.blocks))
        if self.cache is not None:
            self.cache.reorder_cache(index)
        self.token_ids = self.token_ids[index]
        for name in ("blocks", "encoded", "paddings", "origins"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def twin(self, cache: Any) -> Rectangle:
        """Copies the rows onto an empty `cache`, which continues from this one's; nothing may be
        written before a `select`."""
        twin = copy.copy(self)
        if self.cache is None:
            twin.inputs = copy.deepcopy(self.inputs)
            return twin
        paged, *others = cache_parts(self.cache)
        cache_parts(cache)[0].continue_from(paged)
        for cross in others:
            if not isinstance(cache, EncoderDecoderCache):
                # the model made the cross-attention cache
                cache = EncoderDecoderCache(cache, copy.deepcopy(cross))
            elif isinstance(cross, PagedCache):
                cache.cross_attention_cache.continue_from(cross)
            cache.is_updated = dict(self.cache.is_updated)
        twin.cache = cache
        twin.inputs = {}
        for name, value in self.inputs.items():
            twin.inputs[name] = cache if value is self.cache else value
        return twin

    @classmethod
    def join(
        cls,
        parts: Items[tuple[Rectangle, list[int]]],
        cache: Any,
    ) -> Rectangle:
        """Joins rows of several rectangles, aligned on the right, on an empty `cache`."""
        first = parts[0][0]
        device = first.token_ids.device
        lengths = []
        blocks = []
        encoded = []
        selections = []
        for holder, rows in parts:
            for row in rows:
                lengths.append(holder.width - holder.paddings[row])
                blocks.append(holder.blocks[row])
                encoded.append(holder.encoded[row])
            selections.append((holder, torch.tensor(rows, device=device)))
        width = max(lengths)
        paddings = [width - length for length in lengths]
        ids = [holder.token_ids[index] for holder, index in selections]
        ids = join_rows(ids, [part.shape[1] for part in ids], width)
        joined = cls(blocks, encoded, width, paddings, ids, cache, {})
        widths = [holder.encoder_width for holder, _ in parts]
        has_masks = any(holder.inputs.get(_ENCODER_MASK) is not None for holder, _ in parts)
        if len(set(widths)) > 1 or has_masks:
            for holder, _ in parts:
                holder._mask_encoder()
        for name, value in first.inputs.items():
            if value is first.cache:
                joined.inputs[name] = cache
            elif name != _MASK:
                values = []
                for holder, index in selections:
                    carried = holder.inputs.get(name)
                    values.append(select_rows(name, carried, index, len(holder.blocks)))
                joined.inputs[name] = join_rows(values, widths, joined.encoder_width)
        if any(paddings):  # with a column for the next token
            joined.inputs[_MASK] = padding_mask(paddings, width + 1, device).long()
        constants = (holder.constants for holder, _ in parts)
        joined.constants = set.intersection(*constants) - {_MASK}
        if isinstance(cache, EncoderDecoderCache):
            cache.is_updated = dict(first.cache.is_updated)
        return joined

    def _mask_encoder(self) -> None:
        """Adds the mask of encoder tokens that the model may take as given."""
        if self.inputs.get(_ENCODER_MASK) is None:
            self.inputs[_ENCODER_MASK] = torch.ones(
                (len(self.blocks), self.encoder_width),
                dtype=torch.long,
                device=self.token_ids.device,
            )

    def append(self, plan: StepPlan) -> None:
        """Appends the token that the step computes of each sequence to its row, and takes over the
        sequences' blocks."""
        blocks = [sequence.blocks for sequence in plan.sequences]
        columns = zip(plan.sequences, plan.starts, plan.counts)
        tokens = [[sequence.token_ids[start + count - 1]] for sequence, start, count in columns]
        column = self.token_ids.new_tensor(tokens)
        token_ids = torch.cat([self.token_ids, column], dim=1)
        # after what may raise: the rows then still fit together
        self.blocks, self.width, self.token_ids = blocks, self.width + 1, token_ids


def padding_mask(paddings: list[int], width: int, device: torch.device) -> Tensor:
    """Which of `width` columns are no padding, `(rows, width)` bool."""
    columns = torch.arange(width, device=device)
    first_columns = torch.tensor(paddings, device=device)[:, None]
    return columns >= first_columns
