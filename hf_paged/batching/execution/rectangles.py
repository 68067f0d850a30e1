"""Runs a scheduled batch as rectangles `[rows, query_len]`, batches padded on the left as in `generate`."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import logging
import operator
from collections.abc import Hashable
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from ... import compat
from ...cache.block_manager import NO_BLOCKS, BlockManager, SequenceBlocks
from ...cache.paged_cache import PagedCache
from ...cache.states import StateStorage, gather_states, num_state_bytes, state_layers
from ...interrupts import held
from ...model.capability import Layout
from ...model.forwards import compute_device
from ...model.own_loop import (
    cache_parts,
    first_inputs,
    join_rows,
    next_logits,
    pad_token_id,
    select_rows,
    with_cross,
)
from ...model.registry import warn_once
from ..request import Sequence
from .prompts import Prompts, PromptsError, no_blocks
from .runner import Runner, in_order

logger = logging.getLogger(__name__)

_MASK, _ENCODER_MASK = "decoder_attention_mask", "attention_mask"


@dataclasses.dataclass(eq=False)
class Rectangle:
    """A batch of rows that ran together, with the inputs of their next step. A row's index gives the place of its
    states, and of all else that `generate`'s loop carries from step to step."""

    blocks: list[SequenceBlocks]
    encoded: list[SequenceBlocks]  # blocks of each row's encoder keys and values, if there is an encoder
    lengths: list[int]  # tokens of each row, without padding
    paddings: list[int]  # columns in front of them
    token_ids: Tensor  # (rows, length) int64, padded on the left
    cache: Any  # borrows the rows' tables; `None` for a model that makes its cache itself
    inputs: dict[str, Any]  # carried to the next forward, as by `generate`: attention mask, position ids, the cache
    origins: list[int] = dataclasses.field(init=False)  # each row's index in the first step
    constants: set[str] = dataclasses.field(init=False)  # names of inputs that are the same in every step
    row_bytes: int = dataclasses.field(default=0, init=False)  # of a row's states
    encoder_width: int = dataclasses.field(init=False)  # columns of the encoder output, padding included

    def __post_init__(self) -> None:
        self.origins, self.constants = list(range(len(self.blocks))), set()
        self.encoder_width = max((table.num_tokens for each in self.encoded for table in each.tables[:1]), default=0)

    @property
    def state_layers(self) -> list[Any]:
        return [] if self.cache is None else state_layers(cache_parts(self.cache)[0])

    @property
    def width(self) -> int:
        return self.paddings[0] + self.lengths[0]

    def borrow(self, num_cached: int) -> None:
        """Makes the cache use the rows' tables, of whose columns the first `num_cached` are computed."""
        if self.cache is None:
            return
        own, *others = cache_parts(self.cache)
        own.take(self.blocks, tuple(self.paddings), num_cached)
        for cross in others:
            if isinstance(cross, PagedCache):
                width, lengths = self.encoder_width, [blocks.tables[0].num_tokens for blocks in self.encoded]
                cross.take(self.encoded, tuple(width - length for length in lengths), width if num_cached else 0)

    def select(self, rows: list[int]) -> None:
        """Replaces row `i` by row `rows[i]`; the cache must borrow the tables again."""
        device, count = self.token_ids.device, len(self.blocks)
        index = torch.tensor(rows, device=device)
        is_same = [self.origins[row] for row in rows] == self.origins
        for name, value in self.inputs.items():
            if value is not self.cache and not (is_same and name in self.constants):
                self.inputs[name] = select_rows(name, value, index, count)
        if self.cache is not None:
            self.cache.reorder_cache(index)
        self.token_ids = self.token_ids[index]
        for name in ("blocks", "encoded", "lengths", "paddings", "origins"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def twin(self, cache: Any) -> Rectangle:
        """Copies the rows onto an empty `cache`, which continues from this one's; nothing may be written before a
        `select`."""
        if self.cache is None:
            return dataclasses.replace(self, inputs=copy.deepcopy(self.inputs))._like(self)
        own, *others = cache_parts(self.cache)
        cache_parts(cache)[0].continue_from(own)
        for cross in others:
            if not isinstance(cache, EncoderDecoderCache):  # the model made the cross-attention cache
                cache = EncoderDecoderCache(cache, copy.deepcopy(cross))
            elif isinstance(cross, PagedCache):
                cache.cross_attention_cache.continue_from(cross)
            cache.is_updated = dict(self.cache.is_updated)
        inputs = {name: cache if value is self.cache else value for name, value in self.inputs.items()}
        return dataclasses.replace(self, cache=cache, inputs=inputs)._like(self)

    def _like(self, other: Rectangle) -> Rectangle:
        for name in ("origins", "constants", "row_bytes", "encoder_width"):
            setattr(self, name, getattr(other, name))
        return self

    @classmethod
    def join(cls, parts: Items[tuple[Rectangle, list[int]]], cache: Any) -> Rectangle:
        """Joins rows of several rectangles, aligned on the right, on an empty `cache`."""
        first = parts[0][0]
        lengths = [holder.lengths[row] for holder, rows in parts for row in rows]
        width, device = max(lengths), first.token_ids.device
        paddings = [width - length for length in lengths]
        blocks, encoded = (
            [values(holder)[row] for holder, rows in parts for row in rows]
            for values in (operator.attrgetter("blocks"), operator.attrgetter("encoded"))
        )
        selections = [(holder, torch.tensor(rows, device=device), len(holder.blocks)) for holder, rows in parts]
        ids = [holder.token_ids[index] for holder, index, _ in selections]
        ids = join_rows(ids, [x.shape[1] for x in ids], width)
        rectangle = cls(blocks, encoded, lengths, paddings, ids, cache, {})
        widths = [holder.encoder_width for holder, _ in parts]
        masks = [holder.inputs.get(_ENCODER_MASK) for holder, _ in parts]
        if len(set(widths)) > 1 or any(mask is not None for mask in masks):
            for (holder, _, count), mask in zip(selections, masks):
                if mask is None:
                    mask = torch.ones((count, holder.encoder_width), dtype=torch.long, device=device)
                    holder.inputs[_ENCODER_MASK] = mask
        for name, value in first.inputs.items():
            if value is first.cache:
                rectangle.inputs[name] = cache
            elif name != _MASK:
                values = [
                    select_rows(name, holder.inputs.get(name), index, count) for holder, index, count in selections
                ]
                rectangle.inputs[name] = join_rows(values, widths, rectangle.encoder_width)
        if any(paddings):  # with a column for the next token
            columns = torch.arange(width + 1, device=device)
            rectangle.inputs[_MASK] = (columns >= torch.tensor(paddings, device=device)[:, None]).long()
        rectangle.constants = set.intersection(*(holder.constants for holder, _ in parts)) - {_MASK}
        if isinstance(cache, EncoderDecoderCache):
            cache.is_updated = dict(first.cache.is_updated)
        return rectangle

    def append(self, sequences: Items[Sequence]) -> None:
        """Appends the last computed token of each sequence to its row, and takes over the sequences' blocks."""
        self.blocks = [sequence.blocks for sequence in sequences]
        self.lengths = [sequence.num_computed_tokens for sequence in sequences]
        tokens = [[sequence.token_ids[end - 1]] for sequence, end in zip(sequences, self.lengths)]
        self.token_ids = torch.cat([self.token_ids, self.token_ids.new_tensor(tokens)], dim=1)


class RectangleRunner(Runner):
    """Runs rows through the model's own preparation of inputs: prompts as a padded batch, then the next tokens of all
    rows together. The caller has switched the model's attention. Padding is not stored. Prompts after cached tokens,
    and drafts, only run with rows of equally many new tokens, since padding between would change their states.

    Rows whose layout demands it, and all whose request has `inputs`, stay in the batch they began with, and keep what
    `generate`'s loop carries; when rows leave or fork, the others are selected. Rows whose `Prompts` have `joins`
    continue with others of equal `joins`."""

    has_states = True

    def __init__(self, model: PreTrainedModel, cache: PagedCache, states: StateStorage, layout: Layout) -> None:
        self.model, self.memory, self.counters = model, cache.memory, cache.counters
        self.states, self.layout = states, layout  # states are stored by the last table of each sequence
        self.encoder_blocks: BlockManager | None = None if cache.cross is None else cache.cross.rows.manager
        self._stock, self._has_cache = cache, compat.supports_dynamic_cache(model)
        self._knows_states = bool(state_layers(cache))
        self.takes_drafts = layout.reason_against_drafts is None
        self._holders: set[Any] = set()  # rectangles whose states are in use

    def rest(self) -> None:
        self._copy_kept_states()
        self._holders = set()

    @torch.no_grad()
    def run(self, items: Items[tuple[Sequence, int]], variant: Hashable = None) -> Tensor:
        self._copy_kept_states()
        parts: list[tuple[list[Any], Tensor]] = []
        for places, begins in self._divide(items):
            sequences, num_new = [items[place][0] for place in places], items[places[0]][1]
            own = [(place, number) for place in places for number in range(1 + len(items[place][0].draft))]
            parts.append((own, self._begin(sequences) if begins else self._continue(sequences, num_new)))
        self._holders = set(self.states.holders())
        logits = in_order(parts)
        of_rows = [sequence for sequence, _ in items for _ in range(1 + len(sequence.draft))]
        answered = [row for row, each in enumerate(of_rows) if each.num_computed_tokens == len(each.token_ids)]
        return logits if len(answered) == len(of_rows) else logits[answered]

    def _divide(self, items: Items[tuple[Sequence, int]]) -> list[tuple[list[int], bool]]:
        """Returns the places in `items` of each forward, and whether they begin a prompt."""
        # items that may share a forward: whether it begins, new tokens, whether some are a draft, place
        prompts: list[tuple[bool, int, bool, int]] = []
        together: dict[tuple[Any, bool], list[int]] = {}
        for place, (sequence, count) in enumerate(items):
            begins = not sequence.draft and count == sequence.num_computed_tokens
            inputs = sequence.request.inputs
            key: Any = place
            if inputs is not None and begins:
                key = inputs[0] if inputs[0].merges is None else inputs[0].merges
            elif inputs is None and self.layout.side_by_side:
                if begins or count > 1:
                    prompts.append((begins, count, bool(sequence.draft), place))
                    continue
                key = None
            elif not begins and self._has_cache:  # without our cache, each row runs alone with a copy of the model's
                joins = None if inputs is None else inputs[0].joins
                if joins is None:
                    key = self.states.find(_slot(sequence.blocks))[0]
                else:
                    key = joins, joins.equal_lengths and sequence.num_computed_tokens
            together.setdefault((key, begins), []).append(place)
        parts: list[tuple[list[int], bool]] = []
        width = 0  # new tokens of the longest prompt in the last part
        last: tuple[bool, int, bool] | None = None
        for begins, count, has_draft, place in sorted(prompts, key=operator.itemgetter(0, 1, 2), reverse=True):
            own = begins, count, has_draft
            fits = parts and (len(parts[-1][0]) + 1) * width <= self.memory.config.max_num_batched_tokens
            if fits and (own == last or (begins and self.layout.mixed_lengths)):
                parts[-1][0].append(place)
            else:
                parts.append(([place], begins))
                last, width = own, count
        return parts + [(places, begins) for (_, begins), places in together.items()]

    def _begin(self, sequences: list[Sequence]) -> Tensor:
        """Computes prompts; returns logits `(rows, vocab)` after each row's last token."""
        calls: dict[Prompts, dict[int, Sequence]] = {}
        for sequence in sequences:
            if sequence.request.inputs is not None:
                prompts, row = sequence.request.inputs
                calls.setdefault(prompts, {})[row] = sequence
        if not calls:
            return self._forward(self._lay_out(sequences), begins=True)
        begun = [sequence for own in calls.values() for sequence in own.values()]
        logits = self._begin_together(calls) if len(calls) > 1 else None
        if logits is None:
            logits = torch.cat([self._begin_alone(prompts, own) for prompts, own in calls.items()])
        return logits if begun == sequences else logits[[begun.index(sequence) for sequence in sequences]]

    def _begin_together(self, calls: dict[Prompts, dict[int, Sequence]]) -> Tensor | None:
        """As `_begin`, in one forward; `None` if it fails: then each call runs alone, so that errors stay with it."""
        try:
            parts = [(self._lay_out_prompts(prompts, own), list(own)) for prompts, own in calls.items()]
            rectangle = Rectangle.join(parts, self._new_cache())
            rectangle.borrow(0)
            return self._forward(rectangle, begins=True)
        except Exception as error:
            logger.debug("prompts of several requests fail in one forward: %s", error)
            return None

    def _begin_alone(self, prompts: Prompts, own: dict[int, Sequence]) -> Tensor:
        """As `_begin`, for rows of one call. Raises [`PromptsError`]."""
        rows = list(own)
        try:
            logits = self._forward(self._lay_out_prompts(prompts, own), begins=True, rows=rows)
        except Exception as error:
            raise PromptsError(prompts, error) from error
        return logits if rows == list(range(len(logits))) else logits[rows]

    def _forward(
        self,
        rectangle: Rectangle,
        begins: bool,
        num_new: int = 1,
        rows: list[int] | None = None,
        num_logits: int = 1,
    ) -> Tensor:
        """Runs a rectangle, of which `rows` continue; returns logits `(rows * num_logits, vocab)` of each row's last
        tokens."""
        before = dict(rectangle.inputs)
        with self.products:
            logits, rectangle.inputs = next_logits(
                self.model, rectangle.token_ids, rectangle.inputs, begins, num_new, num_logits
            )
        if begins:
            if rectangle.cache is not None:
                cache = rectangle.inputs[compat.cache_name(self.model)]
                # the model may add a cross-attention cache to it, or ignore it and return another
                if cache_parts(cache)[0] is cache_parts(rectangle.cache)[0]:
                    rectangle.cache = cache
                else:
                    warn_once(
                        self.model,
                        "ignores the cache that `generate` prepares, so nothing is paged: let its "
                        f"`prepare_inputs_for_generation` pass `{compat.OUTPUT_CACHE}` on to its forward",
                    )
            for name in compat.PREFILL_INPUTS:
                rectangle.inputs.pop(name, None)
            rectangle.constants = {name for name, value in rectangle.inputs.items() if value is before.get(name)}
        if not rectangle.row_bytes:
            rectangle.row_bytes = num_state_bytes(rectangle.state_layers) // len(rectangle.blocks)
        if rows is not None and rows != list(range(len(rectangle.blocks))):
            rectangle.select(rows)
            rectangle.borrow(rectangle.width)
        self.states.put([_slot(blocks) for blocks in rectangle.blocks], rectangle, rectangle.row_bytes)
        self._holders.add(rectangle)
        return logits.contiguous()  # the logits of a prompt's other tokens are not kept

    def _continue(self, sequences: list[Sequence], num_new: int) -> Tensor:
        """Computes `num_new` more tokens of each row; returns logits `(rows, vocab)`, of drafts
        `(rows * num_new, vocab)`."""
        found = [self._find(sequence) for sequence in sequences]
        rectangle, rows = found[0][0], [row for _, row in found]
        is_one = isinstance(rectangle, Rectangle) and all(holder is rectangle for holder, _ in found)
        if num_new > 1 or not is_one or self._is_too_wide(rectangle, rows):
            groups = itertools.groupby(found, operator.itemgetter(0))
            sources = [(holder, [row for _, row in group]) for holder, group in groups]
            if sequences[0].request.inputs is not None:
                rectangle = Rectangle.join(sources, self._new_cache())
                num_cached = rectangle.width
                rectangle.append(sequences)
                rectangle.borrow(num_cached)
                return self._forward(rectangle, begins=False)
            rectangle = self._lay_out(sequences, num_new)
            if self._knows_states:
                gather_states(rectangle.state_layers, [(holder.state_layers, rows) for holder, rows in sources])
            num_logits = num_new if sequences[0].draft else 1
            return self._forward(rectangle, begins=False, num_new=num_new, num_logits=num_logits)
        others = self.states.holders()[rectangle] - {_slot(sequence.blocks) for sequence in sequences}
        is_moved = bool(others) or rows != list(range(len(rectangle.blocks)))
        if others:  # other sequences still continue from this rectangle
            rectangle = rectangle.twin(self._new_cache())
        if is_moved and self._has_cache:
            rectangle.select(rows)
        is_moved = is_moved or rectangle.blocks != [sequence.blocks for sequence in sequences]
        num_cached = rectangle.width
        rectangle.append(sequences)
        if is_moved:
            rectangle.borrow(num_cached)
        return self._forward(rectangle, begins=False)

    def _is_too_wide(self, rectangle: Rectangle, rows: list[int]) -> bool:
        """Whether the next column is past the model's positions, which its code may count with the padding, and no row
        needs it: a longer one has left."""
        most = self.layout.max_positions
        if most is None or not self.layout.side_by_side or rectangle.width < most:
            return False
        return all(rectangle.paddings[row] for row in rows)

    def _find(self, sequence: Sequence) -> tuple[Any, int]:
        """Returns the rectangle with a sequence's state, and the row in it; `(None, 0)` if the model has no states and
        the sequence starts after cached tokens."""
        try:
            return self.states.find(_slot(sequence.blocks))
        except KeyError:
            if self._knows_states:
                raise
            return None, 0

    def _copy_kept_states(self) -> None:
        with held(), self.memory.lock:
            self.states.copy_kept()

    def _lay_out(self, sequences: list[Sequence], num_new: int | None = None) -> Rectangle:
        """Prepares a batch as `generate` does, padded on the left; the last `num_new` columns, or all, are new."""
        model, device = self.model, compute_device(self.model)
        lengths = [sequence.num_computed_tokens + len(sequence.draft) for sequence in sequences]
        pad = pad_token_id(model)
        width, paddings = max(lengths), [max(lengths) - count for count in lengths]
        ids = torch.tensor(
            [
                [pad] * padding + [*each.token_ids[: each.num_computed_tokens], *each.draft]
                for each, padding in zip(sequences, paddings)
            ],
            device=device,
        )
        mask = torch.arange(width, device=device) >= torch.tensor(paddings, device=device)[:, None]
        cache = self._new_cache()
        inputs = first_inputs(model, ids, mask.long(), cache)
        if compat.supports_logits_to_keep(model):
            inputs["logits_to_keep"] = 1
        blocks = [sequence.blocks for sequence in sequences]
        rectangle = Rectangle(
            blocks, [each.request.encoded for each in sequences], lengths, paddings, ids, cache, inputs
        )
        rectangle.borrow(0 if num_new is None else width - num_new)
        return rectangle

    def _lay_out_prompts(self, prompts: Prompts, own: dict[int, Sequence]) -> Rectangle:
        """Prepares all rows of a call; only those in `own` are stored."""
        cache, width = self._new_cache(), prompts.length
        rows = range(len(prompts.paddings))
        parts = (cache_parts(cache) * 2)[:2] if cache is not None else []
        nothing, no_encoder = map(no_blocks, parts) if parts else (NO_BLOCKS, NO_BLOCKS)
        blocks = [own[row].blocks if row in own else nothing for row in rows]
        encoded = [own[row].request.encoded if row in own else no_encoder for row in rows]
        paddings = [prompts.paddings[row] if row in own else width for row in rows]
        lengths = [width - padding for padding in paddings]
        inputs = dict(prompts.model_kwargs)
        if cache is not None:
            inputs[compat.cache_name(self.model)] = cache
        rectangle = Rectangle(blocks, encoded, lengths, paddings, prompts.input_ids, cache, inputs)
        rectangle.borrow(0)
        return rectangle

    def _new_cache(self) -> Any:
        return with_cross(self._stock.empty_twin(self.memory, self.counters)) if self._has_cache else None


def _slot(blocks: SequenceBlocks) -> int:
    return blocks.tables[-1].block_ids[0]
