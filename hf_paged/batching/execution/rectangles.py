"""A scheduled batch as rectangles `[rows, query_len]`: rows side by side, padded on the left, as in `generate`."""

from __future__ import annotations

import copy
import inspect
import itertools
import operator
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ... import compat
from ...cache.paged_cache import PagedCache
from ...cache.states import StateStorage, gather_states, num_state_bytes, state_layers
from ...model.self_check import Sides
from ...model.state import ModelState

if TYPE_CHECKING:
    from ...cache.block_manager import SequenceBlocks
    from ..request import Sequence


class Rectangle:
    """
    Rows that went through the model side by side, with what their next step begins with.

    Args:
        blocks (`list[SequenceBlocks]`): What each row holds.
        lengths (`list[int]`): Tokens of each row, without padding.
        token_ids (`torch.Tensor` of shape `(rows, length)`, int64): Padded on the left.
        cache ([`PagedCache`], *optional*): Borrows the rows' tables and has their states; `None` for a model that
            brings a cache of its own.
        inputs (`dict`): What `generate` carries to the next forward: attention mask, position ids, the cache.
    """

    def __init__(
        self,
        blocks: list[SequenceBlocks],
        lengths: list[int],
        token_ids: Tensor,
        cache: PagedCache | None,
        inputs: dict[str, Any],
    ) -> None:
        self.blocks, self.lengths, self.token_ids, self.cache, self.inputs = blocks, lengths, token_ids, cache, inputs

    def precedes(self, blocks: list[SequenceBlocks], lengths: list[int]) -> bool:
        """Whether these rows are its own, in their order, each with one token more."""
        return (
            len(blocks) == len(self.blocks)
            and all(map(operator.is_, self.blocks, blocks))
            and all(before + 1 == now for before, now in zip(self.lengths, lengths))
        )

    def append(self, sequences: Items[Sequence]) -> None:
        """The next token of each row."""
        tokens = [[sequence.token_ids[sequence.num_computed_tokens - 1]] for sequence in sequences]
        self.blocks = [sequence.blocks for sequence in sequences]
        self.lengths = [sequence.num_computed_tokens for sequence in sequences]
        self.token_ids = torch.cat([self.token_ids, self.token_ids.new_tensor(tokens)], dim=1)

    def borrow(self, num_cached: int | None) -> None:
        """The cache reads and writes the rows' tables, whose first `num_cached` columns are computed."""
        if self.cache is not None:
            width = self.token_ids.shape[1]
            self.cache.take(self.blocks, tuple(width - length for length in self.lengths), num_cached)


class RectangleRunner:
    """
    Runs rows that cannot be packed through the model's own preparation of inputs: prompts as a padded batch, then the
    next tokens of all rows, side by side. Padding is not stored, so rows of any length join at no cost.

    A sequence begins with its prompt, or all of its tokens, and goes on by one token: a state knows nothing between.

    Args:
        model ([`PreTrainedModel`]): A decoder-only model, whose attention is switched by the caller that runs a loop of
            steps.
        cache ([`PagedCache`]): Built for the model and empty: it tells the layers, owns the memory, and counts reads.
        states ([`StateStorage`], *optional*): Of the last table of each sequence, where layers hold states.
        sides ([`Sides`]): Which rows may run side by side.
    """

    can_capture, num_captured_steps = False, 0

    def __init__(self, model: PreTrainedModel, cache: PagedCache, states: StateStorage | None, sides: Sides) -> None:
        self.model, self.memory, self.counters = model, cache.memory, cache.counters
        self.states, self.sides, self.has_states = states, sides, states is not None
        self._last: Rectangle | None = None
        self._holders: set[Rectangle] = set()  # of states in use
        parameters = inspect.signature(model.forward).parameters
        self._takes_positions = "position_ids" in parameters
        self._has_cache = compat.supports_dynamic_cache(model)
        self._cache_name = "cache_params" if "cache_params" in parameters else "past_key_values"

    def begin(self, state: ModelState | None) -> None:
        """Nothing depends on it."""

    def run_ahead(self, sequences: list[Sequence], token_ids: Tensor, adapter: str | None = None) -> None:
        """As [`Runner`]'s: never."""

    def rest(self) -> None:
        """Nothing is in flight any more: forgets all states."""
        self._last, self._holders = None, set()

    @torch.no_grad()
    def run(self, items: Items[tuple[Sequence, int]], adapter: str | None = None) -> Tensor:
        """
        Logits `(n, vocab)` of the sequences that are computed as far as they go, in order; each is computed from its
        beginning, or by one token.
        """
        logits: list[Tensor | None] = [None] * len(items)
        for places, begins in self._divide(items):
            sequences = [items[place][0] for place in places]
            rectangle = self._begin(sequences) if begins else self._continue(sequences)
            for place, found in zip(places, self._forward(rectangle, begins)):
                logits[place] = found
        if self.states is not None:
            self._holders = set(self.states.holders())
        answered = [
            found
            for (sequence, _), found in zip(items, logits)
            if sequence.num_computed_tokens == len(sequence.token_ids)
        ]
        return torch.stack(answered or logits)[: len(answered)]

    # -- which rows go together -------------------------------------------------------------------------------------

    def _divide(self, items: Items[tuple[Sequence, int]]) -> list[tuple[list[int], bool]]:
        """The items of each forward, as places in `items`, and whether they are prompts."""
        prompts = [place for place, (sequence, count) in enumerate(items) if count == sequence.num_computed_tokens]
        started = set(prompts)
        going = [place for place in range(len(items)) if place not in started]
        if not self.sides.rows:
            return [*(([place], True) for place in prompts), *(([place], False) for place in going)]
        prompts.sort(key=lambda place: items[place][1], reverse=True)
        parts: list[tuple[list[int], bool]] = []
        width = 0  # of the last of them, the longest prompt in it
        for place in prompts:
            fits = parts and (len(parts[-1][0]) + 1) * width <= self.memory.config.max_num_batched_tokens
            if fits and (self.sides.prompts or items[place][1] == width):
                parts[-1][0].append(place)
            else:
                parts.append(([place], True))
                width = items[place][1]
        return [*parts, (going, False)] if going else parts

    # -- one forward ------------------------------------------------------------------------------------------------

    def _begin(self, sequences: list[Sequence]) -> Rectangle:
        """Prompts, nothing of which is computed."""
        rectangle = self._lay_out(sequences)
        rectangle.borrow(0)
        return rectangle

    def _continue(self, sequences: list[Sequence]) -> Rectangle:
        """Sequences that go on by one token."""
        blocks = [sequence.blocks for sequence in sequences]
        rectangle = self._last
        if not self.sides.rows:
            rectangle = self._of_row(blocks[0])
            rectangle.append(sequences)
            rectangle.borrow(None)
            return rectangle
        if (
            rectangle is not None
            and rectangle.precedes(blocks, [sequence.num_computed_tokens for sequence in sequences])
            and not self._is_shared(rectangle, blocks)
        ):
            rectangle.append(sequences)
            return rectangle
        rectangle = self._lay_out(sequences)
        if self.states is not None:
            gather_states(state_layers(rectangle.cache), self._sources(blocks))
        rectangle.borrow(rectangle.token_ids.shape[1] - 1)
        return rectangle

    def _forward(self, rectangle: Rectangle, begins: bool) -> Tensor:
        """`(rows, vocab)`: after the last token of each row."""
        model, self._last = self.model, None
        inputs = model.prepare_inputs_for_generation(
            rectangle.token_ids,
            next_sequence_length=rectangle.token_ids.shape[1] if begins else 1,
            is_first_iteration=begins,
            **rectangle.inputs,
        )
        outputs = model(**inputs, return_dict=True)
        rectangle.inputs = compat.update_inputs(model, outputs, rectangle.inputs)
        self._last = rectangle
        if self.states is not None:
            row_bytes = num_state_bytes(state_layers(rectangle.cache)) // len(rectangle.blocks)
            self.states.put([_slot(blocks) for blocks in rectangle.blocks], rectangle, row_bytes)
            self._holders.add(rectangle)
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _lay_out(self, sequences: list[Sequence]) -> Rectangle:
        """As `generate` prepares a batch, padded on the left."""
        model = self.model
        lengths = [sequence.num_computed_tokens for sequence in sequences]
        width, pad = max(lengths), self._pad_token_id
        rows = [[pad] * (width - count) + sequence.token_ids[:count] for sequence, count in zip(sequences, lengths)]
        ids = torch.tensor(rows, device=model.device)
        columns = torch.arange(width, device=model.device)
        first = torch.tensor([width - count for count in lengths], device=model.device)
        inputs: dict[str, Any] = {"use_cache": True, "attention_mask": (columns >= first[:, None]).long()}
        if self._takes_positions:
            inputs["position_ids"] = compat.prepare_position_ids(model, ids, inputs)
        if compat.supports_logits_to_keep(model):
            inputs["logits_to_keep"] = 1
        cache = None
        if self._has_cache:
            stock = DynamicCache(config=model.config.get_text_config(decoder=True))
            cache = inputs[self._cache_name] = PagedCache.from_empty(stock, self.memory, borrows=self.counters)
        return Rectangle([sequence.blocks for sequence in sequences], lengths, ids, cache, inputs)

    @property
    def _pad_token_id(self) -> int:
        """What stands where padding is hidden."""
        found = getattr(self.model.generation_config, "pad_token_id", None)
        return found if isinstance(found, int) and found >= 0 else 0

    # -- states -----------------------------------------------------------------------------------------------------

    def _is_shared(self, rectangle: Rectangle, blocks: list[SequenceBlocks]) -> bool:
        """Whether the states of another sequence than these are in the rectangle."""
        if self.states is None:
            return False
        return bool(self.states.holders().get(rectangle, set()) - set(map(_slot, blocks)))

    def _sources(self, blocks: list[SequenceBlocks]) -> list[tuple[list[Any], list[int]]]:
        """Where the states of these rows are, in order: layers and rows of them."""
        assert self.states is not None
        found = [self.states.find(_slot(each)) for each in blocks]
        return [
            (state_layers(holder.cache), [row for _, row in group])
            for holder, group in itertools.groupby(found, key=operator.itemgetter(0))
        ]

    def _of_row(self, blocks: SequenceBlocks) -> Rectangle:
        """The rectangle of one row by itself; a copy where another sequence goes on from it, too."""
        assert self.states is not None
        held: Rectangle = self.states.find(_slot(blocks))[0]
        if not self._is_shared(held, [blocks]):
            return held
        twin = copy.copy(held)
        twin.inputs = copy.deepcopy(held.inputs)
        twin.cache = twin.inputs.get(self._cache_name) if self._has_cache else None
        return twin


def _slot(blocks: SequenceBlocks) -> int:
    return blocks.tables[-1].block_ids[0]
