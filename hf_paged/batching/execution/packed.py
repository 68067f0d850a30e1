"""Runs a scheduled batch as one packed `[1, sum(query_len)]` forward without padding."""

from __future__ import annotations

import contextlib
import inspect
import logging
from array import array
from collections.abc import Callable, Hashable, Iterable, Iterator
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import compat
from ...attention.eager import showing_rows
from ...attention.switch import calls_interface
from ...cache.paged_cache import PagedCache
from ...interrupts import restoring
from ...model.capability import note_unpackable
from ...model.forwards import compute_device
from ...model.rope import find_length_rope
from ...model.state import ModelState
from ...model.structure import structural_reason
from ...plan import StepPlan
from ...rooms import TapeRoom, room
from ...seams import ForwardContext, Processes, Recorder
from ...step import StepMetadata, ids_to_device, to_device
from ...switches import NOTHING
from ..decoding.scores import PromptLogprobs
from ..request import Sequence
from .inputs import PackedTokens, TableRows
from .packing import Packing, recorded_prompts
from .runner import Runner, in_order
from .whole_prompts import WholePrompts, sort_places

logger = logging.getLogger(__name__)

MAX_GATHERED_EXPERTS = 64
"""Up to this many tokens, each token's expert weights are copied: an estimate of a small amount of
memory."""


class PackedRunner(Runner):
    """Runs the model on tokens of many sequences at once, as replays of `recorder` where possible.
    The caller has switched the model's attention. `cache`, empty, tells which layers share block
    tables. `mixed_lengths`: whether rows of different lengths may be padded, once they are not
    packed any more (`unpack`). `is_invariant`: whether a row's bits must not depend on the other
    rows. `processes`: those that compute each forward together."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        mixed_lengths: bool = True,
        recorder: Recorder | None = None,
        is_invariant: bool = False,
        processes: Processes | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.counters = cache.counters
        self.device = compute_device(model)
        self.windows: list[int | None] = [spec.window for spec in cache.groups]
        """Attention window of each layer group; `tables[i]` of a sequence's blocks belongs to group
        `i`."""
        groups = cache.groups.values()
        self._block_sizes = [group.blocks.block_size for group in groups]
        self._rows = [TableRows() for _ in self.windows]
        self.rope = find_length_rope(model, model.modules())
        self.takes_drafts = self.rope is None
        self._packing = Packing(self._block_sizes, self.rope)
        self.recorder = recorder
        self._invariant: TapeRoom | None = None
        if is_invariant:
            self._invariant = room("tape", "`batch_invariant`")
        self._mixed_lengths = mixed_lengths
        self._processes = processes
        self.store_hidden: Callable[[Tensor], None] | None = None
        self.pack()
        self.begin(None)

    def pack(self) -> None:
        self.is_packed = True

    def keep_hidden(self, store: Callable[[Tensor], None]) -> None:
        """Between forwards: from now on, each passes its tokens' last hidden states `(1, n,
        hidden_size)` to `store` while the cache's layers have its slots."""
        self.store_hidden = store

    def reason_against_packing(self) -> str | None:
        if not self.is_packed:
            return None
        return structural_reason(self.model, self.cache)

    def unpack(self, reason: str) -> bool:
        is_led = self._processes is not None and self._processes.leads
        must_pack = self._invariant is not None or is_led
        if must_pack or not self.is_packed:
            return False
        note_unpackable(self.model, self.cache, reason)
        self.is_packed = False
        return True

    def begin(self, state: ModelState | None) -> None:
        """Starts work on a model that stays in this state. Without one, as at first, no step is a
        replay."""
        self._state = state
        parameters = inspect.signature(self.model.forward).parameters
        self._picks_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = compat.cache_name(self.model)
        if state is None:
            # for models with their own attention code
            self._shows_rows = not calls_interface(self.model.modules())
        if state is not None and self.recorder is not None:
            self.recorder.begin(state)

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        if self.recorder is None:
            return NOTHING
        return self.recorder.in_order()

    def rest(self) -> None:
        self._state = None  # it holds the weights

    def run(
        self,
        plan: StepPlan,
        context: ForwardContext | None = None,
    ) -> Tensor:
        if self._invariant is None:
            return self._run(plan, context)
        with self._invariant.in_fixed_order():
            return self._run(plan, context)

    def _run(
        self,
        plan: StepPlan,
        context: ForwardContext | None,
    ) -> Tensor:
        if self.is_packed and not plan.has_inputs:
            return self._run_packed(plan, context)
        wholes, packed = sort_places(plan)
        # kept, it would be a cycle, which would keep the model and its memory alive
        whole_prompts = WholePrompts(self.model, self.cache, self._around_prompts)
        parts = []
        answers = plan.rows_of_logits()
        for together in whole_prompts.divide(wholes, plan):
            for places, logits in whole_prompts.run(together, plan):
                starts = [answers[place].start for place in places]
                parts.append((starts, logits))
        if len(packed) == 2 and 0 in packed:
            # positions that count tokens are the same on any number of axes
            num_axes = max(packed)
            places = packed[0] + packed[num_axes]
            packed = {num_axes: sorted(places)}
        forwards: Iterable[list[int]] = packed.values()
        if not self.is_packed:
            forwards = self._side_by_side(plan, packed)
        for places in forwards:
            logits = self._run_packed(plan.select(places), context)
            rows_of_places: list[int] = []
            for place in places:
                rows_of_places += answers[place]
            parts.append((rows_of_places, logits))
        return in_order(parts)

    def _side_by_side(
        self,
        plan: StepPlan,
        packed: dict[int, list[int]],
    ) -> Iterable[list[int]]:
        """Divides the places of `packed` into forwards of rows with one token each, or of one
        row."""
        groups: dict[Hashable, list[int]] = {}
        for num_axes, places in packed.items():
            for place in places:
                count = plan.counts[place]
                is_alone = count > 1 or num_axes or self.rope is not None
                length = 0 if self._mixed_lengths else plan.starts[place] + count
                key: Hashable = ("length", length)
                if is_alone:
                    key = ("row", place)
                group = groups.setdefault(key, [])
                group.append(place)
        return groups.values()

    def _run_packed(
        self,
        plan: StepPlan,
        context: ForwardContext | None,
    ) -> Tensor:
        tokens = self._packing.pack(plan)
        # decodes compute no prompt tokens whose log-probabilities are recorded
        wanted: list[tuple[PromptLogprobs, int, range]] = []
        if len(tokens.last) < len(tokens.token_ids):
            wanted = recorded_prompts(plan)
        replayed = None
        if not wanted:
            replayed = self._replay(tokens, context)
        if replayed is not None:
            return replayed
        others: list[int] = []
        for _, _, places in wanted:
            others += places
        if self._processes is not None:
            names = None
            if context is not None:
                names = context.names
            self._processes.run(tokens, others, names)
        rows = None
        if not self.is_packed:
            rows = plan
        logits = self.compute(tokens, others, rows, context)
        end = len(tokens.last)
        for recording, position, places in wanted:
            stop = end + len(places)
            recording.record(position, logits[end:stop])
            end = stop
        return logits[: len(tokens.last)]

    def run_ahead(
        self,
        sequences: Items[Sequence],
        token_ids: Tensor,
        context: ForwardContext | None = None,
    ) -> Tensor | None:
        in_order = NOTHING if self._invariant is None else self._invariant.in_fixed_order()
        with in_order:
            plan = StepPlan.of([(sequence, 1) for sequence in sequences])
            tokens = self._packing.pack(plan, is_ahead=True)
            return self._replay(tokens, context, token_ids)

    def _replay(
        self,
        tokens: PackedTokens,
        context: ForwardContext | None,
        token_ids: Tensor | None = None,
    ) -> Tensor | None:
        if self.recorder is None or self._state is None or not self.is_packed:
            return None
        if not self._state.is_in_place():
            return None
        keeps_hidden = self.store_hidden is not None
        logits = self.recorder.run(
            tokens,
            context,
            self._forward,
            token_ids,
            keeps_hidden,
        )
        self.num_captured_steps += logits is not None
        return logits

    def compute(
        self,
        tokens: PackedTokens,
        others: list[int],
        rows: StepPlan | None = None,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Runs the model without a graph; returns logits of `tokens.last`, then of the packed
        tokens `others`. If `rows` are given, these are not packed: each has one token, or there is
        one row."""
        inputs, steps = self._to_device(tokens)
        num_tokens = len(tokens.token_ids)
        kept = None
        wanted = None
        arguments = {}
        if others or len(tokens.last) < num_tokens:
            # at least one row: a head with another library's weights may fail on none
            wanted = tokens.last + others or [num_tokens - 1]
            kept = ids_to_device(wanted, self.device)
        if tokens.axes is not None:  # (axes, 1, T), or (1, T)
            axes = inputs[2 + len(tokens.groups) :]
            if len(axes) != 1:
                axes = axes.unsqueeze(1)
            arguments["position_ids"] = axes
        with self._rotating(tokens.rope_factors), self.products:
            return self._forward(
                inputs[0:1],
                inputs[1:2],
                steps,
                kept,
                context,
                wanted,
                rows,
                **arguments,
            )

    def _to_device(self, tokens: PackedTokens) -> tuple[Tensor, list[StepMetadata]]:
        """Returns `(n, T)` int64 (token ids, positions, slots in each group, positions on each
        axis) and each group's step."""
        buffer = array("q", tokens.token_ids)  # one buffer, for a single copy to the device
        buffer.extend(tokens.positions)
        for group in tokens.groups:
            buffer.extend(group.slots)
        for axis in tokens.axes or ():
            buffer.extend(axis)
        on_host = torch.frombuffer(buffer, dtype=torch.long)
        rows = on_host.view(-1, len(tokens.token_ids))
        inputs = to_device(rows, self.device)
        query_start = tuple(tokens.query_start)
        steps = []
        for number, (_, tables, seq_lens, origins) in enumerate(tokens.groups):
            on_host = self._rows[number].tensor(tables)
            step = StepMetadata(
                to_device(on_host, self.device),
                query_start,
                tuple(seq_lens),
                (0,) * len(seq_lens),
                self._block_sizes[number],
                window=self.windows[number],
                slots=inputs[2 + number : 3 + number],
                block_ids=tables[: tokens.num_decodes],
                origins=tuple(origins),
                counters=self.counters,
            )
            steps.append(step)
        return inputs, steps

    def _kernels(self, num_tokens: int) -> contextlib.AbstractContextManager[Any]:
        if self._invariant is not None:
            return self._invariant.by_kernels()
        return self._experts(num_tokens)

    def _experts(self, num_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Around a forward of few tokens on a device: uses the expert products that `generate` uses
        for decodes. In other dtypes than bfloat16, grouped expert products wait for the device, and
        cannot be recorded."""
        if (
            self.device.type == "cpu"
            or self.model.dtype is torch.bfloat16
            or num_tokens > MAX_GATHERED_EXPERTS
        ):
            return NOTHING
        context: contextlib.AbstractContextManager[None] = compat.with_experts_of_decodes(
            self.model
        )
        return context

    @restoring
    def _around_prompts(self) -> Iterator[None]:
        with self._rotating([]), self.products:
            yield

    def _rotating(self, factors: list[int]) -> contextlib.AbstractContextManager[None]:
        if self.rope is None:
            return NOTHING
        return self.rope.rotating(factors)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: list[StepMetadata],
        kept: Tensor | None,
        context: ForwardContext | None,
        wanted: list[int] | None = None,
        rows: StepPlan | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Runs the model on token ids and positions, both `(1, n)` int64; returns logits `(kept,
        vocab_size)` of the tokens `kept` `(kept,)` int64, or of all. `wanted`: `kept` on the host.
        `rows` as in `compute`."""
        is_one_row = rows is None or len(rows) == 1
        picks_logits = kept is not None and self._picks_logits and is_one_row
        if picks_logits:
            arguments["logits_to_keep"] = kept
        if self._takes_positions:
            by_row = positions
            if rows is not None:
                by_row = positions.view(len(rows), -1)
            arguments.setdefault("position_ids", by_row)
        cache = self.cache
        if rows is not None:
            token_ids = token_ids.view(len(rows), -1)
            cache, mask = self._borrow(rows, token_ids.shape[1])
            arguments["attention_mask"] = mask
        elif self._shows_rows:
            steps = [showing_rows(step) for step in steps]
            width = max(step.key_len or 0 for step in steps)
            arguments["attention_mask"] = token_ids.new_ones(1, width)
        num_tokens = token_ids.numel()
        if context is not None:
            picked = wanted or [] if picks_logits else None
            context.begin(num_tokens, picked)
        store_hidden = self.store_hidden
        if store_hidden is not None:
            arguments["output_hidden_states"] = -1  # the last alone
        arguments[self._cache_name] = cache
        self.num_forwards += 1
        if self._state is not None:
            self._state.doubt()
        self.cache.begin(steps, positions)
        try:
            with self._kernels(num_tokens):
                outputs = self.model(
                    input_ids=token_ids,
                    use_cache=True,
                    return_dict=True,
                    **arguments,
                )
            logits: Tensor = outputs.logits
            if rows is None:
                logits = logits[0]
            else:
                logits = logits.flatten(0, 1)
            if store_hidden is not None:
                store_hidden(outputs.hidden_states[-1].reshape(1, num_tokens, -1))
        finally:
            self.cache.begin([None] * len(steps))
        # the model may ignore `logits_to_keep`
        if kept is None or (picks_logits and len(logits) == len(kept)):
            return logits
        return logits[kept.to(logits.device)]

    def _borrow(
        self,
        rows: StepPlan,
        num_new: int,
    ) -> tuple[PagedCache, Tensor]:
        """Returns a cache with the tables of these rows, padded on the left, whose last `num_new`
        tokens are not computed, and the attention mask `(rows, columns)` int64."""
        lengths = [start + count for start, count in zip(rows.starts, rows.counts)]
        width = max(lengths)
        paddings = [width - length for length in lengths]
        cache = self.cache.empty_twin(self.cache.memory, self.counters)
        blocks = [sequence.blocks for sequence in rows.sequences]
        cache.take(blocks, tuple(paddings), width - num_new)
        columns = torch.arange(width, device=self.device)
        first_columns = torch.tensor(paddings, device=self.device)[:, None]
        return cache, (columns >= first_columns).long()
