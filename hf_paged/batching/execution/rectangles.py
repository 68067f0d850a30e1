"""A scheduled batch as rectangles `[rows, query_len]`: rows side by side, padded on the left, as in `generate`."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import operator
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ... import compat
from ...cache.block_manager import SequenceBlocks
from ...cache.paged_cache import PagedCache
from ...cache.states import StateStorage, gather_states, num_state_bytes, state_layers
from ...model.capability import Layout, first_inputs, next_logits
from ...model.forwards import compute_device
from ..request import Sequence
from .executor import Runner, in_order


@dataclasses.dataclass(eq=False)
class Rectangle:
    """Rows that went through the model side by side, with what their next step begins with."""

    blocks: list[SequenceBlocks]
    lengths: list[int]  # tokens of each row, without padding
    token_ids: Tensor  # (rows, length) int64, padded on the left
    cache: PagedCache | None  # with the rows' tables and states; none for a model that brings a cache of its own
    inputs: dict[str, Any]  # what `generate` carries to the next forward: attention mask, position ids, the cache
    row_bytes: int = 0  # of the states of a row

    def append(self, sequences: Items[Sequence]) -> None:
        self.blocks = [sequence.blocks for sequence in sequences]
        self.lengths = [sequence.num_computed_tokens for sequence in sequences]
        tokens = [[sequence.token_ids[end - 1]] for sequence, end in zip(sequences, self.lengths)]
        self.token_ids = torch.cat([self.token_ids, self.token_ids.new_tensor(tokens)], dim=1)

    def borrow(self, num_cached: int | None) -> None:
        """The cache reads and writes the rows' tables, whose first `num_cached` columns are computed."""
        if self.cache is not None:
            width = self.token_ids.shape[1]
            self.cache.take(self.blocks, tuple(width - length for length in self.lengths), num_cached)


class RectangleRunner(Runner):
    """Runs rows of a decoder-only model through its own preparation of inputs, with its attention switched by the
    caller: prompts as a padded batch, then the next tokens of all rows, side by side. Padding is not stored."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, states: StateStorage | None, layout: Layout) -> None:
        self.model, self.memory, self.counters = model, cache.memory, cache.counters
        self.states, self.layout = states, layout  # states: of the last table of each sequence
        self.has_states = states is not None
        self._last: Rectangle | None = None
        self._holders: set[Rectangle] = set()  # of states in use

    def rest(self) -> None:
        self._last, self._holders = None, set()

    @torch.no_grad()
    def run(self, items: Items[tuple[Sequence, int]], adapter: str | None = None) -> Tensor:
        parts = [(at, self._forward([items[i][0] for i in at], begins)) for at, begins in self._divide(items)]
        if self.states is not None:
            self._holders = set(self.states.holders())
        logits = in_order(parts)
        answered = [i for i, (each, _) in enumerate(items) if each.num_computed_tokens == len(each.token_ids)]
        return logits if len(answered) == len(items) else logits[answered]

    def _divide(self, items: Items[tuple[Sequence, int]]) -> list[tuple[list[int], bool]]:
        """The places in `items` of each forward, and whether they are prompts."""
        begins = [count == sequence.num_computed_tokens for sequence, count in items]
        prompts = [place for place, is_prompt in enumerate(begins) if is_prompt]
        going = [place for place, is_prompt in enumerate(begins) if not is_prompt]
        if not self.layout.side_by_side:
            return [([place], begins[place]) for place in prompts + going]
        parts: list[tuple[list[int], bool]] = []
        width = 0  # tokens of the longest prompt in the last part
        for place in sorted(prompts, key=lambda place: items[place][1], reverse=True):
            fits = parts and (len(parts[-1][0]) + 1) * width <= self.memory.config.max_num_batched_tokens
            if fits and (self.layout.mixed_lengths or items[place][1] == width):
                parts[-1][0].append(place)
            else:
                parts.append(([place], True))
                width = items[place][1]
        return [*parts, (going, False)] if going else parts

    def _forward(self, sequences: list[Sequence], begins: bool) -> Tensor:
        """`(rows, vocab)`: after the last token of each row."""
        rectangle = self._lay_out(sequences) if begins else self._continue(sequences)
        self._last = None
        logits, rectangle.inputs = next_logits(self.model, rectangle.token_ids, rectangle.inputs, begins)
        self._last = rectangle
        if self.states is not None:
            if not rectangle.row_bytes:
                rectangle.row_bytes = num_state_bytes(state_layers(rectangle.cache)) // len(rectangle.blocks)
            self.states.put([_slot(blocks) for blocks in rectangle.blocks], rectangle, rectangle.row_bytes)
            self._holders.add(rectangle)
        return logits.contiguous()  # the logits of a prompt's other tokens are not kept

    def _continue(self, sequences: list[Sequence]) -> Rectangle:
        blocks, last = [sequence.blocks for sequence in sequences], self._last
        if not self.layout.side_by_side:
            assert self.states is not None
            held: Rectangle = self.states.find(_slot(blocks[0]))[0]
            if self._is_shared(held, blocks):  # another sequence goes on from it, too
                inputs, cache = copy.deepcopy((held.inputs, held.cache))
                held = dataclasses.replace(held, inputs=inputs, cache=cache)
            held.append(sequences)
            held.borrow(None)
            return held
        if (
            last is not None
            and last.blocks == blocks  # its own rows in their order, each with one token more
            and all(before + 1 == each.num_computed_tokens for before, each in zip(last.lengths, sequences))
            and not self._is_shared(last, blocks)
        ):
            last.append(sequences)
            return last
        rectangle = self._lay_out(sequences, num_new=1)
        if self.states is not None:
            found = itertools.groupby([self.states.find(_slot(each)) for each in blocks], operator.itemgetter(0))
            sources = [(state_layers(holder.cache), [row for _, row in group]) for holder, group in found]
            gather_states(state_layers(rectangle.cache), sources)
        return rectangle

    def _lay_out(self, sequences: list[Sequence], num_new: int | None = None) -> Rectangle:
        """As `generate` prepares a batch, padded on the left, of which the last `num_new` columns, or all, are new."""
        model, device = self.model, compute_device(self.model)
        lengths = [sequence.num_computed_tokens for sequence in sequences]
        pad = getattr(model.generation_config, "pad_token_id", None)
        pad = pad if isinstance(pad, int) and pad >= 0 else 0  # any id: the mask hides it
        width, paddings = max(lengths), [max(lengths) - count for count in lengths]
        ids = torch.tensor(
            [[pad] * padding + each.token_ids[: width - padding] for each, padding in zip(sequences, paddings)],
            device=device,
        )
        mask = torch.arange(width, device=device) >= torch.tensor(paddings, device=device)[:, None]
        cache = None
        if compat.supports_dynamic_cache(model):
            stock = DynamicCache(config=model.config.get_text_config(decoder=True))
            cache = PagedCache.from_empty(stock, self.memory, borrows=self.counters)
        inputs = first_inputs(model, ids, mask.long(), cache)
        if compat.supports_logits_to_keep(model):
            inputs["logits_to_keep"] = 1
        rectangle = Rectangle([sequence.blocks for sequence in sequences], lengths, ids, cache, inputs)
        rectangle.borrow(0 if num_new is None else width - num_new)
        return rectangle

    def _is_shared(self, rectangle: Rectangle, blocks: list[SequenceBlocks]) -> bool:
        """Whether the states of another sequence than these are in the rectangle."""
        return self.states is not None and not self.states.holders().get(rectangle, set()) <= set(map(_slot, blocks))


def _slot(blocks: SequenceBlocks) -> int:
    return blocks.tables[-1].block_ids[0]
