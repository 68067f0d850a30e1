"""Runs a scheduled batch as rectangles `[rows, query_len]`: batches padded on the left as in
`generate`. Block tables are left to the block manager."""

from __future__ import annotations

import copy
import itertools
import operator
from collections.abc import Hashable
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import ModelOutput

from ... import compat
from ...attention.observers import EncoderColumns, observing_attention
from ...cache.paged_cache import PagedCache
from ...cache.sequence_blocks import SequenceBlocks
from ...cache.states import StateStorage, gather_states, num_state_bytes, state_layers
from ...model.forwards import compute_device
from ...model.layout import Layout
from ...model.own_loop import (
    cache_parts,
    first_inputs,
    next_inputs,
    pad_token_id,
    prepare,
    with_cross,
)
from ...model.registry import warn_once
from ...model.state import ModelState
from ...plan import StepPlan
from ...seams import ForwardContext, Recorder, RectangleRecorder
from ...switches import NOTHING
from ...topics import Topic
from .rectangle import Rectangle, padding_mask
from .runner import LogitsPart, Runner, WholePrompts, in_order


class RectangleRunner(Runner):
    """Runs rows through the model's own preparation of inputs: prompts as a padded batch, then the
    next tokens of all rows together. The caller has switched the model's attention. Padding is not
    stored. Prompts after cached tokens, and drafts, run only with rows of equally many new tokens,
    since padding between the tokens would change their states.

    Rows whose layout requires it, and rows whose request has `inputs`, stay in the batch they began
    in, and keep the state of `generate`'s loop; when rows leave or fork, the others are selected.
    Rows whose `Prompts` have a `join_key` continue with rows of equal `join_key`."""

    has_states = True

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        states: StateStorage,
        layout: Layout,
        recorder: Recorder | None = None,
    ) -> None:
        self.model = model
        self.memory = cache.memory
        self.counters = cache.counters
        # states are stored under the first block id of each sequence's last table
        self.states = states
        self.layout = layout
        if cache.cross is not None:
            self.encoder_blocks = cache.cross.rows.manager
        self._stock = cache
        self._has_cache = compat.supports_dynamic_cache(model)
        self._knows_states = bool(state_layers(cache))
        self.supports_drafts = layout.reason_against_drafts is None
        self._replays: RectangleRecorder | None = None
        is_on_host = compute_device(model).type == "cpu"  # where reading masks waits for nothing
        if recorder is not None and is_on_host and self._has_cache:
            self.recorder = recorder
            self._replays = recorder.rectangles(model, cache)
        self._holders: set[Any] = set()  # rectangles whose states are in use

    def begin(self, state: ModelState | None) -> None:
        if self._replays is not None:
            self._replays.begin(state)

    def go_idle(self) -> None:
        self.begin(None)  # the state holds the weights
        self._copy_kept_states()
        self._holders = set()

    def run(
        self,
        plan: StepPlan,
        context: ForwardContext | None = None,
    ) -> Tensor:
        self._copy_kept_states()
        parts, others = self.run_whole_prompts(plan)
        rows = [(self._kind(plan, index), 1, plan.counts[index], index) for index in others]
        for indices in self.divide(rows):
            part = plan.select(indices)
            if _begins(plan, indices[0]):
                logits = self._forward(self._lay_out(part), begins=True)
            else:
                logits = self._continue(part)
            parts.append((indices, logits))
        self._holders = set(self.states.holders())
        # one row of logits also for sequences whose logits the plan does not ask for
        num_rows = [max(1, number) for number in plan.num_logits]
        logits = in_order(parts, num_rows)
        if all(plan.num_logits):
            return logits
        counted = zip(plan.num_logits, num_rows)
        return logits[[number > 0 for number, count in counted for _ in range(count)]]

    def _kind(self, plan: StepPlan, index: int) -> Hashable:
        """Returns the kind of a row; rows of one kind share a forward."""
        sequence = plan.sequences[index]
        start = plan.starts[index]
        count = plan.counts[index]
        begins = _begins(plan, index)
        prompts, _ = sequence.request.inputs or (None, 0)
        if prompts is None and self.layout.is_side_by_side:
            is_any_length = begins and self.layout.can_mix_lengths
            return begins, 0 if is_any_length else count, bool(sequence.draft)
        if begins or not self._has_cache:  # the row runs alone, with its own copy of the cache
            return index
        if prompts is None or prompts.join_key is None:
            holder, _ = self.states.find(_slot(sequence.blocks))
            return holder
        return prompts.join_key, prompts.join_key.equal_lengths and start

    def _run_prompts(self, groups: list[WholePrompts], plan: StepPlan) -> LogitsPart:
        sources = []
        all_indices: list[int] = []
        for prompts, indices in groups:
            sequences = {row: plan.sequences[index] for row, index in indices.items()}
            rectangle = prompts.make_rectangle(self.model, self._new_cache(), sequences)
            sources.append((rectangle, list(indices)))
            all_indices += indices.values()
        rectangle, rows = sources[0]
        if len(sources) > 1:
            rectangle = Rectangle.join(sources, self._new_cache())
            rows = list(range(len(all_indices)))
        rectangle.borrow(0)
        logits = self._forward(rectangle, begins=True, rows=rows)
        return all_indices, logits[rows]

    def _forward(
        self,
        rectangle: Rectangle,
        begins: bool,
        num_new: int = 1,
        rows: list[int] | None = None,
        num_logits: int = 1,
        may_replay: bool = False,
    ) -> Tensor:
        """Runs a rectangle, of which `rows` continue; returns logits `(rows * num_logits, vocab)`
        of each row's last tokens."""
        before = dict(rectangle.inputs)
        prepared = prepare(self.model, rectangle.token_ids, rectangle.inputs, begins, num_new)
        logits = None
        if may_replay:
            logits = self._replay(rectangle, prepared)
        if logits is None:
            logits = self._compute(rectangle, prepared, num_logits)
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
            after = rectangle.inputs.items()
            rectangle.constants = {name for name, value in after if value is before.get(name)}
        if not rectangle.row_bytes:
            rectangle.row_bytes = num_state_bytes(rectangle.state_layers) // len(rectangle.blocks)
        if rows is not None and rows != list(range(len(rectangle.blocks))):
            rectangle = self._select(rectangle, rows, is_shared=False)
            rectangle.borrow(rectangle.width)
        slots = [_slot(blocks) for blocks in rectangle.blocks]
        self.states.put(slots, rectangle, rectangle.row_bytes)
        self._holders.add(rectangle)
        return logits.contiguous()  # a copy, which does not keep the prompt's other logits alive

    def _compute(
        self, rectangle: Rectangle, prepared: dict[str, Any], num_logits: int = 1
    ) -> Tensor:
        """Runs the model's own forward on these arguments; returns logits as `_forward` does, and
        carries the rectangle's inputs on."""
        self.num_forwards += 1
        observer = self._encoder_observer(rectangle)
        observing = NOTHING if observer is None else observing_attention(observer)
        if num_logits > 1 and "logits_to_keep" in prepared:  # the model may have set it
            prepared["logits_to_keep"] = num_logits
        with self.products, observing:
            outputs = self.model(**prepared, return_dict=True)
        if observer is not None and (columns := observer.columns()) is not None:
            rectangle.encoder_columns = list(zip(*columns))
        logits: Tensor = outputs.logits[:, -num_logits:].flatten(0, 1)
        rectangle.inputs = next_inputs(self.model, outputs, rectangle.inputs)
        return logits

    def _encoder_observer(self, rectangle: Rectangle) -> EncoderColumns | None:
        """The observer of the next forward's attention to the encoder, if replays need to know its
        columns, and attention to the rows' own tokens has another number of keys."""
        width = rectangle.encoder_width
        if self._replays is None or rectangle.encoder_columns is not None or not width:
            return None
        return EncoderColumns(len(rectangle.blocks), width) if width != rectangle.width else None

    def _replay(self, rectangle: Rectangle, prepared: dict[str, Any]) -> Tensor | None:
        """As `_compute`, of one new token a row, as a replay; `None` if no recorded step serves
        it."""
        replays = self._replays
        if replays is None:
            return None
        replayed = replays.run(rectangle, prepared)
        if replayed is None:
            return None
        if not replays.is_checked:
            logits = self._compute(rectangle, prepared)
            replays.check(rectangle, replayed, logits)
            return logits
        self.num_captured_steps += 1
        cache, *_ = cache_parts(rectangle.cache)
        cache.note_step(rectangle.width)
        outputs = ModelOutput({compat.OUTPUT_CACHE: rectangle.cache})
        rectangle.inputs = next_inputs(self.model, outputs, rectangle.inputs)
        return replayed

    def _continue(self, plan: StepPlan) -> Tensor:
        """Computes equally many more tokens of each row; returns logits `(rows, vocab)`, with
        drafts of `n` tokens `(rows * (n + 1), vocab)`."""
        sequences = plan.sequences
        num_new = plan.counts[0]
        slots = [_slot(sequence.blocks) for sequence in sequences]
        groups = itertools.groupby(map(self._find, slots), operator.itemgetter(0))
        sources = [(holder, [row for _, row in group]) for holder, group in groups]
        rectangle, rows = sources[0]
        is_one = len(sources) == 1 and isinstance(rectangle, Rectangle)
        if num_new > 1 or not is_one or self._is_too_wide(rectangle, rows):
            if sequences[0].request.inputs is None:
                rectangle = self._lay_out(plan)
                if self._knows_states:
                    layers = [(holder.state_layers, rows) for holder, rows in sources]
                    gather_states(rectangle.state_layers, layers)
                num_logits = num_new if sequences[0].draft else 1
                return self._forward(rectangle, False, num_new=num_new, num_logits=num_logits)
            rectangle = Rectangle.join(sources, self._new_cache())
            is_moved = True
        else:
            # whether other sequences still continue from this rectangle
            is_shared = bool(self.states.holders()[rectangle] - set(slots))
            is_moved = is_shared or rows != list(range(len(rectangle.blocks)))
            if is_moved:
                rectangle = self._select(rectangle, rows, is_shared)
            else:
                is_moved = rectangle.blocks != [sequence.blocks for sequence in sequences]
        num_cached = rectangle.width
        rectangle.append(plan)
        if is_moved:
            rectangle.borrow(num_cached)
        may_replay = self._replays is not None
        if may_replay:  # the modules of a row's adapter are not those that were recorded
            may_replay = all(sequence.request.adapter is None for sequence in sequences)
        return self._forward(rectangle, begins=False, may_replay=may_replay)

    def _select(self, rectangle: Rectangle, rows: list[int], is_shared: bool) -> Rectangle:
        """Returns these rows of a rectangle, which other sequences continue from as well if it
        `is_shared`; the cache must borrow the tables again."""
        if not self._has_cache:  # the model's own cache is among the inputs
            copied = copy.copy(rectangle)
            copied.inputs = copy.deepcopy(rectangle.inputs)
            return copied
        cache = rectangle.cache
        if is_shared:
            cache = rectangle.fork_cache(self._new_cache())
        cache.reorder_cache(torch.tensor(rows, device=rectangle.token_ids.device))
        return rectangle.select(rows, cache)

    def _is_too_wide(self, rectangle: Rectangle, rows: list[int]) -> bool:
        """Whether the next column is past the model's positions, which its code may count with the
        padding, although no row needs that column, since a longer row has left."""
        most = self.layout.max_positions
        if most is None or not self.layout.is_side_by_side or rectangle.width < most:
            return False
        return all(rectangle.paddings[row] for row in rows)

    def _find(self, slot: int) -> tuple[Any, int]:
        """Returns the rectangle that holds the state of a slot, and the row in it; `(None, 0)` if
        the model has no states and the sequence starts after cached tokens."""
        try:
            return self.states.find(slot)
        except KeyError:
            if self._knows_states:
                raise
            return None, 0

    def _copy_kept_states(self) -> None:
        with self.memory.lock:
            self.states.copy_snapshots()

    def _lay_out(self, plan: StepPlan) -> Rectangle:
        """Prepares a batch as `generate` does, padded on the left."""
        model = self.model
        device = compute_device(model)
        sequences = plan.sequences
        lengths = [start + count for start, count in zip(plan.starts, plan.counts)]
        pad = pad_token_id(model)
        width = max(lengths)
        paddings = [width - length for length in lengths]
        padded = []
        for sequence, length, padding in zip(sequences, lengths, paddings):
            computed = sequence.token_ids[: length - len(sequence.draft)]
            padded.append([pad] * padding + computed + sequence.draft)
        ids = torch.tensor(padded, device=device)
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
        )
        rectangle.borrow(width - max(plan.counts))
        return rectangle

    def _new_cache(self) -> Any:
        if not self._has_cache:
            return None
        twin = self._stock.empty_twin(self.memory, self.counters)
        return with_cross(twin)


def _begins(plan: StepPlan, index: int) -> bool:
    return not plan.starts[index] and not plan.sequences[index].draft


def _slot(blocks: SequenceBlocks) -> int:
    return blocks.tables[-1].block_ids[0]
