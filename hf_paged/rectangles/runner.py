"""Runs a step as rectangles `[rows, query_len]`: batches padded on the left, as in `generate`.
Reads block tables, which only the block manager changes."""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from .. import compat
from ..attention.masks import Columns, PagedMask, attention_observer, unpadded_columns
from ..batching.execution.runner import LogitsPart, Runner, WholePrompts, concat_in_order
from ..cache.block_manager import BlockManager
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import SequenceBlocks
from ..interrupts import setting
from ..model.forwards import compute_device
from ..model.own_loop import (
    cache_parts,
    first_inputs,
    pad_token_id,
    padding_mask,
    prepare,
)
from ..model.state import ModelState
from ..plan import StepPlan
from ..seams import ForwardContext, Recorder
from ..switches import NOTHING
from .checks import RectangleLayout
from .preemption import RectanglePreemption
from .rectangle import Rectangle, rectangle_of, with_cross
from .states import StateSpec, StateStorage, gather_states, state_layers


class RectangleRunner(Runner):
    """Runs padded batches, with inputs that the model itself prepares. In each step, prompts with
    inputs besides token ids run first. The caller must have switched the model's attention. Padding
    is not stored. Prompts that begin after cached tokens, and drafts, share a forward only with
    rows that have the same number of new tokens, since padding between a row's tokens would change
    its states.

    Rows stay in their original batch, with the state of `generate`'s loop, if the layout requires
    it or if their request has `inputs`; when rows leave or fork, the rectangle is reduced or
    copied. But rows whose `Prompts` have a `join_key` may join rows with an equal key."""

    has_states = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        states: StateStorage,
        layout: RectangleLayout,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.memory = cache.memory
        self.counters = cache.counters
        # finds a sequence's states by its slot, the first block id in the last of its tables
        self.states = states
        self.layout = layout
        # blocks of the encoders' keys and values
        self.encoder_blocks = None if cache.cross is None else cache.cross.rows.manager
        self.make_preemption = functools.partial(
            RectanglePreemption,
            replays_all_prompts=layout.depends_on_splits,
            encoder_blocks=self.encoder_blocks,
        )
        self._empty_cache = cache
        self._supports_cache = compat.supports_dynamic_cache(model)
        self._has_state_layers = bool(state_layers(cache))
        # the layers that stored K/V in `side_by_side_check`, whose prompts are token ids alone
        used_layers = {layer.layer_index for layer in layout.layers}
        all_layers = {layer.index for layer in cache.paged_layers}
        self._unused_layers = frozenset(all_layers - used_layers if used_layers else ())
        self.supports_drafts = layout.reason_against_drafts is None
        self._rectangle_recorder: Any = None  # as `Recorder.rectangles` returns it
        is_on_host = compute_device(model).type == "cpu"  # elsewhere, reading masks is slow
        if recorder is not None and is_on_host and self._supports_cache:
            self.recorder = recorder
            self._rectangle_recorder = recorder.rectangles(model, cache)
        # rectangles whose states are in use, kept alive here, since `states` refers to them weakly
        self._state_holders: set[Any] = set()

    def begin(self, state: ModelState | None) -> None:
        super().begin(state)
        if self._rectangle_recorder is not None:
            self._rectangle_recorder.begin(state)

    def go_idle(self) -> None:
        self.begin(None)  # the state holds the weights
        self._copy_snapshots()
        self._state_holders = set()

    def run(
        self,
        plan: StepPlan,
        context: ForwardContext | None = None,
    ) -> Tensor:
        self._copy_snapshots()
        prompts, other_indices = self.whole_prompts(plan)
        parts = self.run_whole_prompts(prompts, plan)
        entries = [
            (self._forward_key(plan, index), 1, plan.counts[index], index)
            for index in other_indices
        ]
        for indices in self.divide(entries):
            part = plan.select(indices)
            if _is_first_step(plan, indices[0]):
                rectangle = self._make_rectangle(part)
                logits = self._forward(rectangle, is_first=True)
            else:
                logits = self._continue(part)
            parts.append((indices, logits))
        self._state_holders = set(self.states.holders())
        # forwards also return a row of logits for a sequence for which the plan requests none
        num_returned = [max(1, num_requested) for num_requested in plan.num_logits]
        logits = concat_in_order(parts, num_returned)
        if all(plan.num_logits):
            return logits
        is_requested: list[bool] = []
        for num_requested, count in zip(plan.num_logits, num_returned):
            is_requested += [num_requested > 0] * count
        return logits[is_requested]

    def _forward_key(self, plan: StepPlan, index: int) -> Hashable:
        """Returns a key of a row of the plan; rows with equal keys may share a forward."""
        sequence = plan.sequences[index]
        start = plan.starts[index]
        count = plan.counts[index]
        is_first = _is_first_step(plan, index)
        prompts, _ = sequence.request.inputs or (None, 0)
        if prompts is None and self.layout.is_side_by_side:
            is_any_length = is_first and self.layout.can_mix_lengths
            return is_first, 0 if is_any_length else count, bool(sequence.draft)
        if is_first or not self._supports_cache:  # the row runs alone, with a separate cache
            return index
        holder, _ = self.states.find(_state_slot(sequence.blocks))
        if prompts is None or prompts.join_key is None:
            return holder
        length = prompts.join_key.needs_equal_lengths and start
        return prompts.join_key, length, holder.unused_layers

    def _run_prompts(self, whole_prompts: list[WholePrompts], plan: StepPlan) -> LogitsPart:
        sources = []
        all_indices: list[int] = []
        for prompts, indices in whole_prompts:
            sequences = {row: plan.sequences[index] for row, index in indices.items()}
            rectangle = rectangle_of(prompts, self.model, self._new_cache(), sequences)
            sources.append((rectangle, list(indices)))
            all_indices += indices.values()
        rectangle, rows = sources[0]
        if len(sources) > 1:
            rectangle = Rectangle.join(sources, self._new_cache())
            rows = list(range(len(all_indices)))
        rectangle.borrow(0)
        logits = self._forward(rectangle, is_first=True, rows=rows)
        return all_indices, logits[rows]

    def _forward(
        self,
        rectangle: Rectangle,
        is_first: bool,
        num_new: int = 1,
        rows: list[int] | None = None,
        num_logits: int = 1,
        may_replay: bool = False,
    ) -> Tensor:
        """Runs a forward of all columns of the rectangle if it is the rows' first (`is_first`),
        otherwise of the last `num_new`. Stores the states of `rows` (default: all), from which
        later steps continue. Returns logits `(rectangle rows * num_logits, vocab_size)` of the last
        `num_logits` tokens of each row. `may_replay`: whether a recorded step may be replayed
        instead."""
        prepared = prepare(self.model, rectangle.token_ids, rectangle.inputs, is_first, num_new)
        logits = None
        if may_replay:
            logits = self._replay(rectangle, prepared)
        if logits is None:
            logits = self._compute(rectangle, prepared, num_logits, is_first)[0]
        if rows is not None and rows != list(range(len(rectangle.blocks))):
            rectangle = self._select(rectangle, rows, is_shared=False)
            rectangle.borrow(rectangle.width)
        slots = [_state_slot(blocks) for blocks in rectangle.blocks]
        self.states.put(slots, rectangle, rectangle.row_bytes)
        self._state_holders.add(rectangle)
        return logits.contiguous()  # a view would keep the logits of all prompt tokens alive

    def _compute(
        self,
        rectangle: Rectangle,
        prepared: dict[str, Any],
        num_logits: int = 1,
        is_first: bool = False,
    ) -> tuple[Tensor, Any]:
        """Runs the model's own forward with the `prepared` arguments, and advances the rectangle.
        Returns the logits, as `_forward` does, and the model's outputs."""
        self._count_forward()
        observer = self._encoder_observer(rectangle)
        observer_context = NOTHING if observer is None else setting(attention_observer, observer)
        if num_logits > 1 and "logits_to_keep" in prepared:  # prepared for the last token alone
            prepared["logits_to_keep"] = num_logits
        with self.product_context, observer_context:
            outputs = self.model(**prepared, return_dict=True)
        columns = None if observer is None else observer.columns()
        logits: Tensor = outputs.logits[:, -num_logits:].flatten(0, 1)
        rectangle.advance(self.model, outputs, is_first, columns)
        return logits, outputs

    def _encoder_observer(self, rectangle: Rectangle) -> EncoderColumns | None:
        """Returns an observer of the next forward's attention to the encoder. Returns `None` if
        there is no encoder, if no replay needs the encoder's columns, if they are known, or if the
        rows' own attention has as many keys, so that the two cannot be told apart."""
        width = rectangle.encoder_width
        has_recorder = self._rectangle_recorder is not None
        if not has_recorder or rectangle.encoder_columns is not None or not width:
            return None
        return EncoderColumns(len(rectangle.blocks), width) if width != rectangle.width else None

    def _replay(self, rectangle: Rectangle, prepared: dict[str, Any]) -> Tensor | None:
        """Computes one new token of each row by replaying a recorded step, and advances the
        rectangle; also runs the model until the recording is checked. Returns the logits `(rows,
        vocab_size)`; `None`, with nothing advanced, if no recorded step fits."""
        recorder = self._rectangle_recorder
        if recorder is None:
            return None
        replayed_logits = recorder.run(rectangle, prepared)
        if replayed_logits is None:
            return None
        assert self.recorder is not None
        if not self.recorder.is_checked:
            inputs = rectangle.inputs
            logits, outputs = self._compute(rectangle, prepared)
            recorder.check(rectangle, replayed_logits, logits, inputs, outputs, prepared)
            return logits
        self.num_captured_steps += 1
        cache, *_ = cache_parts(rectangle.cache)
        _note_step(cache, rectangle.width)
        outputs = recorder.outputs(rectangle, prepared)
        rectangle.advance(self.model, outputs, is_first=False)
        return replayed_logits

    def _continue(self, plan: StepPlan) -> Tensor:
        """Computes the next tokens of rows that have computed or cached tokens; each row has the
        same number of new tokens. Returns logits `(rows, vocab_size)`, or
        `(rows * (n + 1), vocab_size)` with drafts of `n` tokens."""
        sequences = plan.sequences
        num_new = plan.counts[0]
        slots = [_state_slot(sequence.blocks) for sequence in sequences]
        groups = itertools.groupby(map(self._find_state, slots), operator.itemgetter(0))
        sources = [(holder, [row for _, row in group]) for holder, group in groups]
        rectangle, rows = sources[0]
        is_one_rectangle = len(sources) == 1 and isinstance(rectangle, Rectangle)
        if num_new > 1 or not is_one_rectangle or self._is_too_wide(rectangle, rows):
            if sequences[0].request.inputs is None:
                rectangle = self._make_rectangle(plan)
                if self._has_state_layers:
                    layers = [(holder.state_layers, rows) for holder, rows in sources]
                    gather_states(rectangle.state_layers, layers)
                num_logits = num_new if sequences[0].draft else 1
                return self._forward(rectangle, False, num_new=num_new, num_logits=num_logits)
            rectangle = Rectangle.join(sources, self._new_cache())
            must_borrow = True
        else:
            # whether other sequences still continue from this rectangle
            is_shared = bool(self.states.holders()[rectangle] - set(slots))
            must_borrow = is_shared or rows != list(range(len(rectangle.blocks)))
            if must_borrow:
                rectangle = self._select(rectangle, rows, is_shared)
            else:
                must_borrow = rectangle.blocks != [sequence.blocks for sequence in sequences]
        num_cached = rectangle.width
        rectangle.append(plan)
        if must_borrow:
            rectangle.borrow(num_cached)
        may_replay = self._rectangle_recorder is not None
        if may_replay:  # recorded steps do not run the modules of adapters
            may_replay = all(sequence.request.adapter is None for sequence in sequences)
        return self._forward(rectangle, is_first=False, may_replay=may_replay)

    def _select(self, rectangle: Rectangle, rows: list[int], is_shared: bool) -> Rectangle:
        """Returns a rectangle of these rows; the caller must call its `borrow`. `is_shared`:
        whether other sequences also continue from the cache, which then stays unchanged."""
        if not self._supports_cache:  # one row, with the model's own cache among the inputs
            return dataclasses.replace(rectangle, inputs=copy.deepcopy(rectangle.inputs))
        cache = rectangle.cache
        if is_shared:
            cache = rectangle.fork_cache(self._new_cache())
        cache.reorder_cache(torch.tensor(rows, device=rectangle.token_ids.device))
        return rectangle.select(rows, cache)

    def _is_too_wide(self, rectangle: Rectangle, rows: list[int]) -> bool:
        """Whether all of `rows` are padded and the next column would be past the model's last
        position, which can happen once the longest row has left. Model code that counts padding as
        positions would then fail, although the tokens of every row still fit."""
        max_positions = self.layout.max_positions
        if max_positions is None or not self.layout.is_side_by_side:
            return False
        if rectangle.width < max_positions:
            return False
        return all(rectangle.paddings[row] for row in rows)

    def _find_state(self, slot: int) -> tuple[Any, int]:
        """Returns the holder of a slot's state (a `Rectangle` or `StateRows`) and the row in the
        holder. Without a holder, as for a sequence that begins after cached tokens, returns
        `(None, 0)`, or raises `KeyError` if the model has state layers."""
        try:
            return self.states.find(slot)
        except KeyError:
            if self._has_state_layers:
                raise
            return None, 0

    def _copy_snapshots(self) -> None:
        with self.memory.lock:
            self.states.copy_snapshots()

    def _make_rectangle(self, plan: StepPlan) -> Rectangle:
        """Returns a rectangle of the plan's rows, with inputs as `generate` prepares them for a
        batch padded on the left."""
        model = self.model
        device = compute_device(model)
        sequences = plan.sequences
        lengths = [start + count for start, count in zip(plan.starts, plan.counts)]
        pad = pad_token_id(model)
        width = max(lengths)
        paddings = [width - length for length in lengths]
        padded_rows = []
        for sequence, length, padding in zip(sequences, lengths, paddings):
            tokens = sequence.token_ids[: length - len(sequence.draft)]
            padded_rows.append([pad] * padding + tokens + sequence.draft)
        ids = torch.tensor(padded_rows, device=device)
        mask = padding_mask(paddings, width, device).long()
        cache = self._new_cache()
        inputs = first_inputs(model, ids, mask, cache)
        if compat.supports_logits_to_keep(model):
            inputs["logits_to_keep"] = 1
        rectangle = Rectangle(
            [sequence.blocks for sequence in sequences],
            [sequence.request.encoded for sequence in sequences],
            width,
            paddings,
            ids,
            cache,
            inputs,
            unused_layers=self._unused_layers,
        )
        rectangle.borrow(width - max(plan.counts))
        return rectangle

    def _new_cache(self) -> Any:
        if not self._supports_cache:
            return None
        cache = self._empty_cache.empty_twin(self.memory, self.counters)
        return with_cross(cache)


def _is_first_step(plan: StepPlan, index: int) -> bool:
    return not plan.starts[index] and not plan.sequences[index].draft


def _state_slot(blocks: SequenceBlocks) -> int:
    return blocks.tables[-1].block_ids[0]


def make_runner(
    model: PreTrainedModel,
    cache: PagedCache,
    layout: RectangleLayout,
    recorder: Recorder | None = None,
) -> tuple[BlockManager, RectangleRunner]:
    """Implements `rooms.RectanglesRoom.make_runner`."""
    # each sequence also has a slot for its states, even if the model has none: the slot stands for
    # everything that one step passes to the next
    state_spec = StateSpec(is_empty=not state_layers(cache))
    block_manager = cache.memory.manager([*cache.groups, state_spec])
    state_storage: Any = cache.memory.group(state_spec).storage
    return block_manager, RectangleRunner(model, cache, state_storage, layout, recorder)


def _note_step(cache: PagedCache, length: int) -> None:
    """Records in `cache` that a replay stored the tokens of every row up to `length` positions,
    including padding."""
    for group in cache.groups.values():
        group.set_rows(group.paddings, length)
    for layer in cache.paged_layers:
        if layer.num_positions:  # others are unused
            layer.num_positions = length


@dataclasses.dataclass(eq=False)
class EncoderColumns:
    """An `attention_observer` that finds the columns of an encoder, `width` in total, to which the
    `num_rows` rows of a forward attend. No other attention of the forward may have the same numbers
    of rows and keys."""

    num_rows: int
    width: int
    _masks: dict[int, Tensor | None] = dataclasses.field(default_factory=dict)  # by `id`

    def __call__(
        self,
        sizes: tuple[int, int, int],
        mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        num_rows, _, num_keys = sizes
        if (num_rows, num_keys) == (self.num_rows, self.width):
            self._masks[id(mask)] = mask

    def columns(self) -> Columns | None:
        """Returns the range of columns to which each row attends; `None` if a row's columns are not
        contiguous, or differ between queries or layers, if a layer has a bias or a mask per head,
        or if no attention was observed."""
        distinct = set(map(self._columns_of, self._masks.values()))
        return distinct.pop() if len(distinct) == 1 else None

    def _columns_of(self, mask: Tensor | None) -> Columns | None:
        if mask is None:
            return unpadded_columns(None, self.num_rows, self.width)
        if isinstance(mask, PagedMask):
            return None if mask.pattern.causal else mask.unpadded_columns
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
