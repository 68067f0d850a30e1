"""Runs a scheduled batch as rectangles `[rows, query_len]`, batches padded on the left as in
`generate`."""

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
from ...interrupts import is_interrupt
from ...model.forwards import compute_device
from ...model.layout import Layout
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
from ...plan import StepPlan
from ...topics import Topic
from ..request import Sequence
from .prompts import Prompts, PromptsError, no_blocks
from .runner import Runner, in_order

logger = logging.getLogger(__name__)

_MASK, _ENCODER_MASK = "decoder_attention_mask", "attention_mask"


@dataclasses.dataclass(eq=False)
class Rectangle:
    """A batch of rows that ran together, with the inputs of their next step. A row's index gives
    the place of its states, and of all else that `generate`'s loop carries from step to step."""

    blocks: list[SequenceBlocks]
    # blocks of each row's encoder keys and values, if there is an encoder
    encoded: list[SequenceBlocks]
    lengths: list[int]  # tokens of each row, without padding
    paddings: list[int]  # columns in front of them
    token_ids: Tensor  # (rows, length) int64, padded on the left
    cache: Any  # borrows the rows' tables; `None` for a model that makes its cache itself
    # carried to the next forward, as by `generate`: attention mask, position ids, the cache
    inputs: dict[str, Any]
    origins: list[int] = dataclasses.field(init=False)  # each row's index in the first step
    # names of inputs that are the same in every step
    constants: set[str] = dataclasses.field(init=False)
    row_bytes: int = dataclasses.field(default=0, init=False)  # of a row's states
    # columns of the encoder output, padding included
    encoder_width: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.origins = list(range(len(self.blocks)))
        self.constants = set()
        tables = (table for blocks in self.encoded for table in blocks.tables[:1])
        num_tokens = (table.num_tokens for table in tables)
        self.encoder_width = max(num_tokens, default=0)

    @property
    def state_layers(self) -> list[Any]:
        if self.cache is None:
            return []
        return state_layers(cache_parts(self.cache)[0])

    @property
    def width(self) -> int:
        return self.paddings[0] + self.lengths[0]

    def borrow(self, num_cached: int) -> None:
        """Makes the cache use the rows' tables, of whose columns the first `num_cached` are
        computed."""
        if self.cache is None:
            return
        own, *others = cache_parts(self.cache)
        paddings = tuple(self.paddings)
        own.take(self.blocks, paddings, num_cached)
        for cross in others:
            if not isinstance(cross, PagedCache):
                continue
            width = self.encoder_width
            lengths = [blocks.tables[0].num_tokens for blocks in self.encoded]
            cross_paddings = tuple(width - length for length in lengths)
            num_encoded = width if num_cached else 0
            cross.take(self.encoded, cross_paddings, num_encoded)

    def select(self, rows: list[int]) -> None:
        """Replaces row `i` by row `rows[i]`; the cache must borrow the tables again."""
        device = self.token_ids.device
        count = len(self.blocks)
        index = torch.tensor(rows, device=device)
        origins = [self.origins[row] for row in rows]
        is_same = origins == self.origins
        for name, value in self.inputs.items():
            is_constant = is_same and name in self.constants
            if value is not self.cache and not is_constant:
                self.inputs[name] = select_rows(name, value, index, count)
        if self.cache is not None:
            self.cache.reorder_cache(index)
        self.token_ids = self.token_ids[index]
        for name in ("blocks", "encoded", "lengths", "paddings", "origins"):
            values = getattr(self, name)
            setattr(self, name, [values[row] for row in rows])

    def twin(self, cache: Any) -> Rectangle:
        """Copies the rows onto an empty `cache`, which continues from this one's; nothing may be
        written before a `select`."""
        if self.cache is None:
            inputs = copy.deepcopy(self.inputs)
            twin = dataclasses.replace(self, inputs=inputs)
            return twin._like(self)
        own, *others = cache_parts(self.cache)
        cache_parts(cache)[0].continue_from(own)
        for cross in others:
            if not isinstance(cache, EncoderDecoderCache):
                # the model made the cross-attention cache
                cache = EncoderDecoderCache(cache, copy.deepcopy(cross))
            elif isinstance(cross, PagedCache):
                cache.cross_attention_cache.continue_from(cross)
            cache.is_updated = dict(self.cache.is_updated)
        inputs = {}
        for name, value in self.inputs.items():
            inputs[name] = cache if value is self.cache else value
        twin = dataclasses.replace(self, cache=cache, inputs=inputs)
        return twin._like(self)

    def _like(self, other: Rectangle) -> Rectangle:
        for name in ("origins", "constants", "row_bytes", "encoder_width"):
            setattr(self, name, getattr(other, name))
        return self

    @classmethod
    def join(
        cls,
        parts: Items[tuple[Rectangle, list[int]]],
        cache: Any,
    ) -> Rectangle:
        """Joins rows of several rectangles, aligned on the right, on an empty `cache`."""
        first = parts[0][0]
        lengths = []
        blocks = []
        encoded = []
        for holder, rows in parts:
            for row in rows:
                lengths.append(holder.lengths[row])
                blocks.append(holder.blocks[row])
                encoded.append(holder.encoded[row])
        width = max(lengths)
        device = first.token_ids.device
        paddings = [width - length for length in lengths]
        selections = []
        for holder, rows in parts:
            index = torch.tensor(rows, device=device)
            selections.append((holder, index, len(holder.blocks)))
        ids = [holder.token_ids[index] for holder, index, _ in selections]
        lengths_before = [part.shape[1] for part in ids]
        ids = join_rows(ids, lengths_before, width)
        rectangle = cls(
            blocks,
            encoded,
            lengths,
            paddings,
            ids,
            cache,
            {},
        )
        widths = [holder.encoder_width for holder, _ in parts]
        masks = [holder.inputs.get(_ENCODER_MASK) for holder, _ in parts]
        has_masks = any(mask is not None for mask in masks)
        if len(set(widths)) > 1 or has_masks:
            for (holder, _, count), mask in zip(selections, masks):
                if mask is None:
                    mask = torch.ones(
                        (count, holder.encoder_width),
                        dtype=torch.long,
                        device=device,
                    )
                    holder.inputs[_ENCODER_MASK] = mask
        for name, value in first.inputs.items():
            if value is first.cache:
                rectangle.inputs[name] = cache
            elif name != _MASK:
                values = []
                for holder, index, count in selections:
                    carried = holder.inputs.get(name)
                    values.append(select_rows(name, carried, index, count))
                rectangle.inputs[name] = join_rows(
                    values,
                    widths,
                    rectangle.encoder_width,
                )
        if any(paddings):  # with a column for the next token
            columns = torch.arange(width + 1, device=device)
            first_columns = torch.tensor(paddings, device=device)[:, None]
            rectangle.inputs[_MASK] = (columns >= first_columns).long()
        constants = (holder.constants for holder, _ in parts)
        rectangle.constants = set.intersection(*constants) - {_MASK}
        if isinstance(cache, EncoderDecoderCache):
            cache.is_updated = dict(first.cache.is_updated)
        return rectangle

    def append(self, plan: StepPlan) -> None:
        """Appends the token that the step computes of each sequence to its row, and takes over the
        sequences' blocks."""
        blocks = [sequence.blocks for sequence in plan.sequences]
        lengths = [start + count for start, count in zip(plan.starts, plan.counts)]
        pairs = zip(plan.sequences, lengths)
        tokens = [[sequence.token_ids[end - 1]] for sequence, end in pairs]
        column = self.token_ids.new_tensor(tokens)
        token_ids = torch.cat([self.token_ids, column], dim=1)
        # after what may raise: the rows then still fit together
        self.blocks, self.lengths, self.token_ids = blocks, lengths, token_ids


class RectangleRunner(Runner):
    """Runs rows through the model's own preparation of inputs: prompts as a padded batch, then the
    next tokens of all rows together. The caller has switched the model's attention. Padding is not
    stored. Prompts after cached tokens, and drafts, only run with rows of equally many new tokens,
    since padding between would change their states.

    Rows whose layout demands it, and all whose request has `inputs`, stay in the batch they began
    with, and keep what `generate`'s loop carries; when rows leave or fork, the others are selected.
    Rows whose `Prompts` have `joins` continue with others of equal `joins`."""

    has_states = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        states: StateStorage,
        layout: Layout,
    ) -> None:
        self.model = model
        self.memory = cache.memory
        self.counters = cache.counters
        # states are stored by the last table of each sequence
        self.states = states
        self.layout = layout
        self.encoder_blocks: BlockManager | None = None
        if cache.cross is not None:
            self.encoder_blocks = cache.cross.rows.manager
        self._stock = cache
        self._has_cache = compat.supports_dynamic_cache(model)
        self._knows_states = bool(state_layers(cache))
        self.takes_drafts = layout.reason_against_drafts is None
        self._holders: set[Any] = set()  # rectangles whose states are in use

    def rest(self) -> None:
        self._copy_kept_states()
        self._holders = set()

    def run(
        self,
        plan: StepPlan,
        variant: Hashable = None,
    ) -> Tensor:
        self._copy_kept_states()
        parts: list[tuple[list[Any], Tensor]] = []
        for places, begins in self._divide(plan):
            answers = []
            for place in places:
                num_answers = 1 + len(plan.sequences[place].draft)
                answers += [(place, number) for number in range(num_answers)]
            together = plan.select(places)
            if begins:
                logits = self._begin(together)
            else:
                logits = self._continue(together)
            parts.append((answers, logits))
        self._holders = set(self.states.holders())
        logits = in_order(parts)
        answered: list[int] = []
        num_rows = 0
        for sequence, num_logits in zip(plan.sequences, plan.num_logits):
            answered += range(num_rows, num_rows + num_logits)
            num_rows += 1 + len(sequence.draft)
        if len(answered) == num_rows:
            return logits
        return logits[answered]

    def _divide(self, plan: StepPlan) -> list[tuple[list[int], bool]]:
        """Returns the places in `plan` of each forward, and whether they begin a prompt."""
        # items that may share a forward: whether it begins, new tokens, whether some are a draft,
        # place
        prompts: list[tuple[bool, int, bool, int]] = []
        together: dict[tuple[Any, bool], list[int]] = {}
        columns = zip(plan.sequences, plan.starts, plan.counts)
        for place, (sequence, start, count) in enumerate(columns):
            begins = not start and not sequence.draft
            inputs = sequence.request.inputs
            key: Any = place
            if inputs is not None and begins:
                call_prompts = inputs[0]
                key = call_prompts
                if call_prompts.merges is not None:
                    key = call_prompts.merges
            elif inputs is None and self.layout.side_by_side:
                if begins or count > 1:
                    has_draft = bool(sequence.draft)
                    prompts.append((begins, count, has_draft, place))
                    continue
                key = None
            elif not begins and self._has_cache:
                # without our cache, each row runs alone with a copy of the model's
                joins = None
                if inputs is not None:
                    joins = inputs[0].joins
                if joins is None:
                    key, _ = self.states.find(_slot(sequence.blocks))
                else:
                    key = joins, joins.equal_lengths and start
            group = together.setdefault((key, begins), [])
            group.append(place)
        parts: list[tuple[list[int], bool]] = []
        width = 0  # new tokens of the longest prompt in the last part
        last: tuple[bool, int, bool] | None = None
        by_length = operator.itemgetter(0, 1, 2)
        longest_first = sorted(prompts, key=by_length, reverse=True)
        for begins, count, has_draft, place in longest_first:
            kind = (begins, count, has_draft)
            fits = False
            if parts:
                num_rows = len(parts[-1][0]) + 1
                num_tokens = num_rows * width
                fits = num_tokens <= self.memory.config.max_num_batched_tokens
            is_alike = kind == last or (begins and self.layout.mixed_lengths)
            if fits and is_alike:
                parts[-1][0].append(place)
            else:
                parts.append(([place], begins))
                last = kind
                width = count
        for (_, begins), places in together.items():
            parts.append((places, begins))
        return parts

    def _begin(self, plan: StepPlan) -> Tensor:
        """Computes prompts; returns logits `(rows, vocab)` after each row's last token."""
        sequences = plan.sequences
        calls: dict[Prompts, dict[int, Sequence]] = {}
        for sequence in sequences:
            if sequence.request.inputs is not None:
                prompts, row = sequence.request.inputs
                rows_of_call = calls.setdefault(prompts, {})
                rows_of_call[row] = sequence
        if not calls:
            return self._forward(self._lay_out(plan), begins=True)
        begun: list[Sequence] = []
        for rows in calls.values():
            begun += rows.values()
        logits = None
        if len(calls) > 1:
            logits = self._begin_together(calls)
        if logits is None:
            logits = torch.cat(
                [self._begin_alone(prompts, rows) for prompts, rows in calls.items()]
            )
        if begun == sequences:
            return logits
        order = [begun.index(sequence) for sequence in sequences]
        return logits[order]

    def _begin_together(self, calls: dict[Prompts, dict[int, Sequence]]) -> Tensor | None:
        """As `_begin`, in one forward; `None` if it fails: then each call runs alone, so that
        errors stay with it."""
        try:
            parts = []
            for prompts, rows in calls.items():
                rectangle = self._lay_out_prompts(prompts, rows)
                parts.append((rectangle, list(rows)))
            rectangle = Rectangle.join(parts, self._new_cache())
            rectangle.borrow(0)
            return self._forward(rectangle, begins=True)
        except Exception as error:
            if is_interrupt(error):
                raise
            logger.debug("prompts of several requests fail in one forward: %s", error)
            return None

    def _begin_alone(
        self,
        prompts: Prompts,
        own: dict[int, Sequence],
    ) -> Tensor:
        """As `_begin`, for rows of one call. Raises [`PromptsError`]."""
        rows = list(own)
        try:
            rectangle = self._lay_out_prompts(prompts, own)
            logits = self._forward(rectangle, begins=True, rows=rows)
        except Exception as error:
            if is_interrupt(error):
                raise
            raise PromptsError(prompts, error) from error
        if rows == list(range(len(logits))):
            return logits
        return logits[rows]

    def _forward(
        self,
        rectangle: Rectangle,
        begins: bool,
        num_new: int = 1,
        rows: list[int] | None = None,
        num_logits: int = 1,
    ) -> Tensor:
        """Runs a rectangle, of which `rows` continue; returns logits `(rows * num_logits, vocab)`
        of each row's last tokens."""
        before = dict(rectangle.inputs)
        self.has_run_code = True
        with self.products:
            logits, rectangle.inputs = next_logits(
                self.model,
                rectangle.token_ids,
                rectangle.inputs,
                begins,
                num_new,
                num_logits,
            )
        if begins:
            if rectangle.cache is not None:
                cache = rectangle.inputs[compat.cache_name(self.model)]
                # the model may add a cross-attention cache to it, or ignore it and return another
                returned, *_ = cache_parts(cache)
                prepared, *_ = cache_parts(rectangle.cache)
                if returned is prepared:
                    rectangle.cache = cache
                else:
                    warn_once(
                        self.model,
                        Topic.CACHE(
                            "ignores the cache that `generate` prepares, so nothing is paged: let"
                            f" its `prepare_inputs_for_generation` pass `{compat.OUTPUT_CACHE}` on"
                            " to its forward"
                        ),
                    )
            for name in compat.PREFILL_INPUTS:
                rectangle.inputs.pop(name, None)
            constants = set()
            for name, value in rectangle.inputs.items():
                if value is before.get(name):
                    constants.add(name)
            rectangle.constants = constants
        if not rectangle.row_bytes:
            num_bytes = num_state_bytes(rectangle.state_layers)
            rectangle.row_bytes = num_bytes // len(rectangle.blocks)
        if rows is not None and rows != list(range(len(rectangle.blocks))):
            rectangle.select(rows)
            rectangle.borrow(rectangle.width)
        slots = [_slot(blocks) for blocks in rectangle.blocks]
        self.states.put(slots, rectangle, rectangle.row_bytes)
        self._holders.add(rectangle)
        return logits.contiguous()  # the logits of a prompt's other tokens are not kept

    def _continue(self, plan: StepPlan) -> Tensor:
        """Computes equally many more tokens of each row; returns logits `(rows, vocab)`, of drafts
        of `n` tokens `(rows * (n + 1), vocab)`."""
        sequences = plan.sequences
        num_new = plan.counts[0]
        found = [self._find(sequence) for sequence in sequences]
        rectangle = found[0][0]
        rows = [row for _, row in found]
        is_one = False
        if isinstance(rectangle, Rectangle):
            is_one = all(holder is rectangle for holder, _ in found)
        if num_new > 1 or not is_one or self._is_too_wide(rectangle, rows):
            groups = itertools.groupby(found, operator.itemgetter(0))
            sources = []
            for holder, group in groups:
                group_rows = [row for _, row in group]
                sources.append((holder, group_rows))
            if sequences[0].request.inputs is not None:
                rectangle = Rectangle.join(sources, self._new_cache())
                num_cached = rectangle.width
                rectangle.append(plan)
                rectangle.borrow(num_cached)
                return self._forward(rectangle, begins=False)
            rectangle = self._lay_out(plan, num_new)
            if self._knows_states:
                states = [(holder.state_layers, rows) for holder, rows in sources]
                gather_states(rectangle.state_layers, states)
            num_logits = num_new if sequences[0].draft else 1
            return self._forward(
                rectangle,
                begins=False,
                num_new=num_new,
                num_logits=num_logits,
            )
        own_slots = {_slot(sequence.blocks) for sequence in sequences}
        others = self.states.holders()[rectangle] - own_slots
        is_moved = bool(others) or rows != list(range(len(rectangle.blocks)))
        if others:  # other sequences still continue from this rectangle
            rectangle = rectangle.twin(self._new_cache())
        if is_moved and self._has_cache:
            rectangle.select(rows)
        if not is_moved:
            is_moved = rectangle.blocks != [sequence.blocks for sequence in sequences]
        num_cached = rectangle.width
        rectangle.append(plan)
        if is_moved:
            rectangle.borrow(num_cached)
        return self._forward(rectangle, begins=False)

    def _is_too_wide(self, rectangle: Rectangle, rows: list[int]) -> bool:
        """Whether the next column is past the model's positions, which its code may count with the
        padding, and no row needs it: a longer one has left."""
        most = self.layout.max_positions
        if most is None:
            return False
        if not self.layout.side_by_side:
            return False
        if rectangle.width < most:
            return False
        return all(rectangle.paddings[row] for row in rows)

    def _find(self, sequence: Sequence) -> tuple[Any, int]:
        """Returns the rectangle with a sequence's state, and the row in it; `(None, 0)` if the
        model has no states and the sequence starts after cached tokens."""
        try:
            return self.states.find(_slot(sequence.blocks))
        except KeyError:
            if self._knows_states:
                raise
            return None, 0

    def _copy_kept_states(self) -> None:
        with self.memory.lock:
            self.states.copy_kept()

    def _lay_out(
        self,
        plan: StepPlan,
        num_new: int | None = None,
    ) -> Rectangle:
        """Prepares a batch as `generate` does, padded on the left; the last `num_new` columns, or
        all, are new."""
        model = self.model
        device = compute_device(self.model)
        sequences = plan.sequences
        lengths = [start + count for start, count in zip(plan.starts, plan.counts)]
        pad = pad_token_id(model)
        width = max(lengths)
        paddings = [width - length for length in lengths]
        padded = []
        for sequence, length, padding in zip(sequences, lengths, paddings):
            computed = sequence.token_ids[: length - len(sequence.draft)]
            token_ids = [*computed, *sequence.draft]
            padded.append([pad] * padding + token_ids)
        ids = torch.tensor(padded, device=device)
        columns = torch.arange(width, device=device)
        first_columns = torch.tensor(paddings, device=device)[:, None]
        mask = columns >= first_columns
        cache = self._new_cache()
        inputs = first_inputs(model, ids, mask.long(), cache)
        if compat.supports_logits_to_keep(model):
            inputs["logits_to_keep"] = 1
        blocks = [sequence.blocks for sequence in sequences]
        rectangle = Rectangle(
            blocks,
            [sequence.request.encoded for sequence in sequences],
            lengths,
            paddings,
            ids,
            cache,
            inputs,
        )
        num_cached = 0
        if num_new is not None:
            num_cached = width - num_new
        rectangle.borrow(num_cached)
        return rectangle

    def _lay_out_prompts(
        self,
        prompts: Prompts,
        own: dict[int, Sequence],
    ) -> Rectangle:
        """Prepares all rows of a call; only those in `own` are stored."""
        cache = self._new_cache()
        width = prompts.length
        nothing = NO_BLOCKS
        no_encoder = NO_BLOCKS
        if cache is not None:
            own_part, *others = cache_parts(cache)
            nothing = no_blocks(own_part)
            no_encoder = no_blocks(others[0] if others else own_part)
        blocks = []
        encoded = []
        paddings = []
        for row, padding in enumerate(prompts.paddings):
            if row in own:
                sequence = own[row]
                blocks.append(sequence.blocks)
                encoded.append(sequence.request.encoded)
                paddings.append(padding)
            else:
                blocks.append(nothing)
                encoded.append(no_encoder)
                paddings.append(width)
        lengths = [width - padding for padding in paddings]
        inputs = dict(prompts.model_kwargs)
        if cache is not None:
            inputs[compat.cache_name(self.model)] = cache
        rectangle = Rectangle(
            blocks,
            encoded,
            lengths,
            paddings,
            prompts.input_ids,
            cache,
            inputs,
        )
        rectangle.borrow(0)
        return rectangle

    def _new_cache(self) -> Any:
        if not self._has_cache:
            return None
        twin = self._stock.empty_twin(self.memory, self.counters)
        return with_cross(twin)


def _slot(blocks: SequenceBlocks) -> int:
    return blocks.tables[-1].block_ids[0]
