"""Runs a scheduled batch as one packed `[1, sum(query_len)]` forward without padding. It advances
no row, and reads the rows' block tables as they are."""

from __future__ import annotations

import inspect
import logging
from array import array
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import compat
from ...attention.eager import with_key_len
from ...attention.switch import calls_interface
from ...cache.paged_cache import PagedCache
from ...cache.sequence_blocks import UNCACHED
from ...model.capability import note_unpackable
from ...model.forwards import compute_device
from ...model.own_loop import pad_token_id
from ...model.rope import find_length_rope
from ...model.state import ModelState
from ...model.structure import structural_reason
from ...plan import StepPlan
from ...rooms import TapeRoom, room
from ...seams import ForwardContext, Processes, Recorder
from ...step import StepMetadata, numbers_on, to_device
from ...switches import NOTHING
from ..decoding.scores import PromptLogprobs
from ..request import Sequence
from .inputs import PackedTokens, TableRows, pack, recorded_prompts
from .rectangle import padding_mask
from .runner import LogitsPart, Runner, WholePrompts, in_order, num_cached

logger = logging.getLogger(__name__)

MAX_GATHERED_EXPERTS = 64
"""Up to this many tokens, each token's expert weights are copied, which is estimated to take little
memory."""


class PackedRunner(Runner):
    """Runs the model on tokens of many sequences at once, as replays of `recorder` where possible.
    The caller has switched the model's attention. The empty `cache` defines which layers share
    block tables. `mixed_lengths`: whether rows of different lengths may be padded once they are not
    packed any more (`unpack`). `is_invariant`: whether a row's bits must not depend on the other
    rows. `processes`: the processes that compute each forward together."""

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
        self.memory = cache.memory
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
        """Between forwards: from now on each forward passes its tokens' last hidden states `(1, n,
        hidden_size)` to `store`, while the cache's layers hold the forward's slots."""
        self.store_hidden = store

    def unpack(self, reason: str | None = None) -> str | None:
        is_led = self._processes is not None and self._processes.leads
        must_pack = self._invariant is not None or is_led
        if must_pack or not self.is_packed:
            return None
        if reason is None:
            reason = structural_reason(self.model, self.cache)
        if reason is not None:
            note_unpackable(self.model, self.cache, reason)
            self.is_packed = False
        return reason

    def begin(self, state: ModelState | None) -> None:
        """Starts work on a model that stays in this state. Without a state no step is a replay."""
        self._state = state
        parameters = inspect.signature(self.model.forward).parameters
        self._picks_logits = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = compat.cache_name(self.model)
        if state is None:
            # for models with their own attention code
            self._shows_rows = not calls_interface(self.model.modules())
        if state is not None and self.recorder is not None:
            self.recorder.begin(state, self._shows_rows)

    def go_idle(self) -> None:
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
        parts, others = self.run_whole_prompts(plan)
        for indices in self._divide(plan, others):
            logits = self._run_packed(plan.select(indices), context)
            parts.append((indices, logits))
        return in_order(parts, plan.num_logits)

    def _divide(self, plan: StepPlan, indices: list[int]) -> Iterable[list[int]]:
        """Divides rows, by their indices in the step, into forwards of rows with equally many
        position axes; if rows are not packed, into forwards of rows with one token each, or of one
        row."""
        axis_counts: list[int] = []
        for index in indices:
            prompts, row = plan.sequences[index].request.inputs or (None, 0)
            axis_counts.append(0 if prompts is None else prompts.num_axes(row))
        is_uniform = len({*axis_counts} - {0}) < 2
        forwards: dict[Hashable, list[int]] = {}
        for index, num_axes in zip(indices, axis_counts):
            # positions that count tokens are the same on any number of axes
            kind: Hashable = 0 if is_uniform else num_axes
            if not self.is_packed:
                count = plan.counts[index]
                length = 0 if self._mixed_lengths else plan.starts[index] + count
                is_alone = count > 1 or num_axes or self.rope is not None
                kind = ("row", index) if is_alone else ("length", length)
            forwards.setdefault(kind, []).append(index)
        return forwards.values()

    def _run_prompts(self, groups: list[WholePrompts], plan: StepPlan) -> LogitsPart:
        index_by_row: dict[int, int] = {}
        num_rows = 0
        for prompts, indices in groups:
            for row, index in indices.items():
                index_by_row[num_rows + row] = index
            num_rows += len(prompts.paddings)
        prompts, *others = [prompts for prompts, _ in groups]
        if others:
            prompts = prompts.merged(others, pad_token_id(self.model))
        sequences = {row: plan.sequences[index] for row, index in index_by_row.items()}
        cache = self.cache.empty_twin(self.memory, self.counters)
        with self._rotating([]), self.products:
            num_computed = num_cached(index_by_row, plan)
            logits, looks_ahead = prompts.forward(self.model, cache, sequences, num_computed)
        content = prompts.content(self.model.config)
        # the prefix cache may share K/V only if the key covers all tokens that they depend on: text
        # tokens must not attend to later ones
        for row, sequence in sequences.items():
            text = None if content is None else ~content[row].cpu()
            if looks_ahead is None or text is None or bool((looks_ahead[row] & text).any()):
                sequence.request.namespace = UNCACHED
        with_logits = {row: index for row, index in index_by_row.items() if plan.num_logits[index]}
        return list(with_logits.values()), logits[list(with_logits)]

    def _run_packed(
        self,
        plan: StepPlan,
        context: ForwardContext | None,
    ) -> Tensor:
        tokens = pack(plan, self._block_sizes, self.rope)
        # decodes compute no prompt tokens whose log-probabilities are recorded
        recordings: list[tuple[PromptLogprobs, int, range]] = []
        if len(tokens.last) < len(tokens.token_ids):
            recordings = recorded_prompts(plan)
        replayed = None
        if not recordings:
            replayed = self._replay(tokens, context)
            if replayed is not None and self._is_checked:
                return replayed
        extra = [token for *_, prompt_tokens in recordings for token in prompt_tokens]
        if self._processes is not None:
            names = None
            if context is not None:
                names = context.names
            self._processes.run(tokens, extra, names)
        rows = None
        if not self.is_packed:
            rows = plan
        logits = self.compute(tokens, extra, rows, context)
        end = len(tokens.last)
        for recording, position, prompt_tokens in recordings:
            stop = end + len(prompt_tokens)
            recording.record(position, logits[end:stop])
            end = stop
        logits = logits[: len(tokens.last)]
        if replayed is not None and self.recorder is not None:
            self.recorder.check([(logits, replayed)])
        return logits

    def run_ahead(
        self,
        sequences: Items[Sequence],
        token_ids: Tensor,
        context: ForwardContext | None = None,
    ) -> Tensor | None:
        in_order = NOTHING if self._invariant is None else self._invariant.in_fixed_order()
        with in_order:
            plan = StepPlan.of([(sequence, 1) for sequence in sequences])
            tokens = pack(plan, self._block_sizes, self.rope, is_ahead=True)
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
        self.num_captured_steps += logits is not None and self._is_checked
        return logits

    @property
    def _is_checked(self) -> bool:
        return self.recorder is not None and self.recorder.is_checked

    def compute(
        self,
        tokens: PackedTokens,
        extra: list[int],
        rows: StepPlan | None = None,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Runs the model without a graph; returns logits of `tokens.last`, then of the packed
        tokens `extra`. `rows`: the step if its rows are not packed; then each has one token, or
        there is one row."""
        inputs, steps = self._to_device(tokens)
        num_tokens = len(tokens.token_ids)
        kept = None
        logit_tokens = None
        arguments = {}
        if extra or len(tokens.last) < num_tokens:
            # at least one token: a head with another library's weights may fail on none
            logit_tokens = tokens.last + extra or [num_tokens - 1]
            kept = numbers_on(self.device, logit_tokens)
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
                logit_tokens,
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

    def _kernels(self, num_tokens: int) -> AbstractContextManager[Any]:
        if self._invariant is not None:
            return self._invariant.batch_invariant_operations()
        if (
            self.device.type == "cpu"
            or self.model.dtype is torch.bfloat16
            or num_tokens > MAX_GATHERED_EXPERTS
        ):
            return NOTHING
        # few tokens on a device get the expert products that `generate` uses for decodes: in dtypes
        # other than bfloat16, grouped products wait for the device, and cannot be recorded
        experts: AbstractContextManager[Any] = compat.optimizing_for_decode(self.model)
        return experts

    def _rotating(self, factors: list[int]) -> AbstractContextManager[None]:
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
        logit_tokens: list[int] | None = None,
        rows: StepPlan | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Runs the model on token ids and positions, both `(1, n)` int64; returns logits `(kept,
        vocab_size)` of the tokens `kept` `(kept,)` int64, or of all. `logit_tokens`: `kept` on the
        host. `rows` as in `compute`."""
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
            steps = [with_key_len(step) for step in steps]
            width = max(step.key_len or 0 for step in steps)
            arguments["attention_mask"] = token_ids.new_ones(1, width)
        num_tokens = token_ids.numel()
        if context is not None:
            picked = logit_tokens or [] if picks_logits else None
            context.begin(num_tokens, picked)
        store_hidden = self.store_hidden
        if store_hidden is not None:
            arguments["output_hidden_states"] = -1  # the last alone
        arguments[self._cache_name] = cache
        self.num_forwards += 1
        if self._state is not None:
            self._state.mark_unverified()
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
        """Returns a cache that borrows the tables of these rows, padded on the left, of which the
        last `num_new` tokens are not computed, and the attention mask `(rows, columns)` int64."""
        lengths = [start + count for start, count in zip(rows.starts, rows.counts)]
        width = max(lengths)
        paddings = [width - length for length in lengths]
        cache = self.cache.empty_twin(self.memory, self.counters)
        blocks = [sequence.blocks for sequence in rows.sequences]
        cache.take(blocks, tuple(paddings), width - num_new)
        return cache, padding_mask(paddings, width, self.device).long()
