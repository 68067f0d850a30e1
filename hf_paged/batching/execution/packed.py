"""Runs a step as one packed `[1, sum(query_len)]` forward without padding; after `unpack`, as
padded forwards on the same blocks. Reads the rows' block tables; `Scheduler.commit` advances the
rows."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Callable, Hashable, Iterable
from collections.abc import Sequence as Items
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import compat
from ...attention.switch import calls_interface
from ...cache.paged_cache import PagedCache
from ...model.capability import note_unpackable
from ...model.forwards import compute_device
from ...model.own_loop import padding_mask
from ...model.rope import find_length_rope
from ...model.state import ModelState
from ...model.structure import Structure, reasons_against
from ...plan import StepPlan
from ...rooms import OwnAttentionRoom, TapeRoom, room
from ...seams import ForwardContext, Processes, Recorder
from ...step import StepMetadata, numbers_on, to_device
from ...switches import NOTHING
from ..decoding.scores import PromptLogprobs
from ..request import Sequence
from .inputs import PackedTokens, TableRows, pack, recorded_prompts
from .prompts import find_media
from .runner import LogitsPart, Runner, WholePrompts, concat_in_order

MAX_GATHERED_EXPERT_TOKENS = 64
"""Maximum number of tokens in a forward that copies the expert weights of each token: an estimate
of how many such copies take little memory."""


class PackedRunner(Runner):
    """Runs the model on tokens of many sequences at once. The caller must have switched the model's
    attention. The empty `cache` defines which layers share block tables. `can_mix_lengths`: whether
    decodes of rows of different lengths may share a padded forward after `unpack`. `recorder`
    records steps and replays them. `batch_invariant`: whether a row's logits must have the same
    bits whatever other rows the step has. `processes`: the processes that compute each forward
    together."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        can_mix_lengths: bool = True,
        recorder: Recorder | None = None,
        batch_invariant: bool = False,
        processes: Processes | None = None,
    ) -> None:
        self.model = model
        self.cache = cache
        self.memory = cache.memory
        self.counters = cache.counters
        self.device = compute_device(model)
        self.windows: list[int | None] = [spec.window for spec in cache.groups]
        """Attention window of each layer group, in the order of a sequence's tables."""
        groups = cache.groups.values()
        self._block_sizes = [group.group_memory.block_size for group in groups]
        self._table_rows = [TableRows() for _ in self.windows]
        self.rope = find_length_rope(model, model.modules())
        self.supports_drafts = self.rope is None
        self.recorder = recorder
        # the optional package whose contexts make forwards batch-invariant; `None` without
        # `batch_invariant`
        self._fixed_order_room: TapeRoom | None = None
        self._in_fixed_order: Callable[[], AbstractContextManager[None]] = lambda: NOTHING
        if batch_invariant:
            self._fixed_order_room = room("tape", "`batch_invariant`")
            self._in_fixed_order = self._fixed_order_room.in_fixed_order
        self._can_mix_lengths = can_mix_lengths
        self._processes = processes
        self.store_hidden: Callable[[Tensor], None] | None = None
        self.pack()
        self.begin(None)

    def pack(self) -> None:
        self.is_packed = True

    def keep_hidden(self, store: Callable[[Tensor], None]) -> None:
        """Called between forwards: from now on each forward, except forwards of whole prompts,
        passes the last layer's hidden states, `(1, n, hidden_size)`, to `store`, while the
        cache still holds the forward's `StepMetadata`."""
        self.store_hidden = store

    def unpack(self, reason: str | None) -> str | None:
        leads_processes = self._processes is not None and self._processes.leads
        must_pack = self._fixed_order_room is not None or leads_processes
        if must_pack or not self.is_packed:
            return None
        if reason is not None:
            note_unpackable(self.model, self.cache, reason)
        else:
            # not recorded, since the next choice of a layout finds the same structure
            reason = next(reasons_against(Structure(self.model), self.cache, "packed"), None)
        self.is_packed = reason is None
        return reason

    def begin(self, state: ModelState | None) -> None:
        super().begin(state)
        parameters = inspect.signature(self.model.forward).parameters
        self._takes_logits_to_keep = "logits_to_keep" in parameters
        self._takes_positions = "position_ids" in parameters
        self._cache_name = compat.cache_name(self.model)
        if state is None:
            # the optional package for models that compute attention in their own code, without the
            # attention interface; otherwise `None`
            self._own_attention: OwnAttentionRoom | None = None
            if not calls_interface(self.model.modules()):
                self._own_attention = room("own_attention", "a model's own attention code")
        if state is not None and self.recorder is not None:
            self.recorder.begin(state, self._own_attention is not None)

    def go_idle(self) -> None:
        self._state = None  # it holds the weights

    def run(
        self,
        plan: StepPlan,
        context: ForwardContext | None = None,
    ) -> Tensor:
        with self._in_fixed_order():
            if self.is_packed and not plan.has_inputs:
                return self._run_forward(plan, context)
            prompts, other_indices = self.whole_prompts(plan)
            parts: list[LogitsPart] = []
            for indices in self._group_rows(plan, other_indices):
                logits = self._run_forward(plan.select(indices), context)
                parts.append((indices, logits))
            # last, since prompts may begin after text tokens that these rows compute
            parts += self.run_whole_prompts(prompts, plan)
            return concat_in_order(parts, plan.num_logits)

    def _group_rows(self, plan: StepPlan, indices: list[int]) -> Iterable[list[int]]:
        """Divides rows, given by their indices in the step, among forwards, and returns the indices
        of each forward. In a packed forward, rows with explicit positions have the same number of
        position axes. A padded forward has one row, or rows of one token each; without
        `can_mix_lengths`, these rows have equal lengths. Padded forwards of several tokens come
        first, since they may compute blocks that other rows share."""
        axis_counts: list[int] = []
        for index in indices:
            prompts, row = plan.sequences[index].request.inputs or (None, 0)
            axis_counts.append(0 if prompts is None else prompts.num_axes(row))
        is_uniform = len({*axis_counts} - {0}) < 2
        forwards: dict[Hashable, list[int]] = {}
        for index, num_axes in zip(indices, axis_counts):
            # without axes, positions are 0, 1, 2, ..., which fit any number of axes
            key: Hashable = 0 if is_uniform else num_axes
            if not self.is_packed:
                count = plan.counts[index]
                length = 0 if self._can_mix_lengths else plan.starts[index] + count
                is_alone = count > 1 or num_axes or self.rope is not None
                key = ("row", index) if is_alone else ("length", length)
            forwards.setdefault(key, []).append(index)
        if self.is_packed:
            return forwards.values()
        return sorted(forwards.values(), key=lambda rows: plan.counts[rows[0]] == 1)

    def _run_prompts(self, whole_prompts: list[WholePrompts], plan: StepPlan) -> LogitsPart:
        cache = self.cache.empty_twin(self.memory, self.counters)
        self._count_forward()
        with self._rope_context([]), self.product_context:
            return find_media().run_prompts(self.model, cache, whole_prompts, plan)

    def _run_forward(
        self,
        plan: StepPlan,
        context: ForwardContext | None,
    ) -> Tensor:
        tokens = pack(plan, self._block_sizes, self.rope)
        # a step that returns the logits of all tokens has no prompt tokens to record
        recordings: list[tuple[PromptLogprobs, int, range]] = []
        if len(tokens.last) < len(tokens.token_ids):
            recordings = recorded_prompts(plan)
        replayed_logits = None
        if not recordings:
            replayed_logits = self._replay(tokens, context)
            if replayed_logits is not None and (self.recorder is None or self.recorder.is_checked):
                return replayed_logits
        extra_indices = [index for *_, indices in recordings for index in indices]
        if self._processes is not None:
            names = None if context is None else context.names
            self._processes.announce_step(tokens, extra_indices, names)
        unpacked_plan = None if self.is_packed else plan
        logits = self.compute(tokens, extra_indices, unpacked_plan, context)
        start = len(tokens.last)
        for recording, position, indices in recordings:
            end = start + len(indices)
            recording.record(position, logits[start:end])
            start = end
        logits = logits[: len(tokens.last)]
        if replayed_logits is not None and self.recorder is not None:
            self.recorder.check([(logits, replayed_logits)])
        return logits

    def run_ahead(
        self,
        sequences: Items[Sequence],
        token_ids: Tensor,
        context: ForwardContext | None = None,
    ) -> Tensor | None:
        with self._in_fixed_order():
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
        self.num_captured_steps += logits is not None and self.recorder.is_checked
        return logits

    def compute(
        self,
        tokens: PackedTokens,
        extra_indices: list[int],
        unpacked_plan: StepPlan | None = None,
        context: ForwardContext | None = None,
    ) -> Tensor:
        """Runs the model without a replay; returns the logits `(n, vocab_size)` of the packed
        tokens at `tokens.last`, then at `extra_indices`; if both are empty, of the last token.
        `unpacked_plan`: the step's plan if its rows are not packed; then each row has one token, or
        there is one row."""
        inputs, steps = self._to_device(tokens)
        num_tokens = len(tokens.token_ids)
        logit_indices = None
        host_logit_indices = None
        arguments = {}
        if extra_indices or len(tokens.last) < num_tokens:
            # at least one token, since a head with another library's weights may fail without any
            host_logit_indices = tokens.last + extra_indices or [num_tokens - 1]
            logit_indices = numbers_on(self.device, host_logit_indices)
        if tokens.axes is not None:  # (axes, 1, T), or (1, T)
            axes = inputs[2 + len(tokens.groups) :]
            if len(axes) != 1:
                axes = axes.unsqueeze(1)
            arguments["position_ids"] = axes
        with self._rope_context(tokens.rope_factors), self.product_context:
            return self._forward(
                inputs[0:1],
                inputs[1:2],
                steps,
                logit_indices,
                context,
                host_logit_indices,
                unpacked_plan,
                **arguments,
            )

    def _to_device(self, tokens: PackedTokens) -> tuple[Tensor, list[StepMetadata]]:
        """Returns the inputs `(n, T)` int64, and the `StepMetadata` of each layer group. The rows
        of the inputs are the token ids, the positions, the slots in each layer group, and the
        positions on each axis of `tokens.axes`."""
        buffer = array("q", tokens.token_ids)  # one buffer, so that one copy reaches the device
        buffer.extend(tokens.positions)
        for group in tokens.groups:
            buffer.extend(group.slots)
        for axis in tokens.axes or ():
            buffer.extend(axis)
        host_tensor = torch.frombuffer(buffer, dtype=torch.long)
        rows = host_tensor.view(-1, len(tokens.token_ids))
        inputs = to_device(rows, self.device)
        query_start = tuple(tokens.query_start)
        steps = []
        for group_index, (_, tables, seq_lens, origins, _) in enumerate(tokens.groups):
            tables_on_host = self._table_rows[group_index].tensor(tables)
            step = StepMetadata(
                to_device(tables_on_host, self.device),
                query_start,
                tuple(seq_lens),
                (0,) * len(seq_lens),
                self._block_sizes[group_index],
                window=self.windows[group_index],
                slots=inputs[2 + group_index : 3 + group_index],
                block_ids=tables[: tokens.num_decodes],
                origins=tuple(origins),
                counters=self.counters,
            )
            steps.append(step)
        return inputs, steps

    def _kernel_context(self, num_tokens: int) -> AbstractContextManager[Any]:
        if self._fixed_order_room is not None:
            return self._fixed_order_room.batch_invariant_operations()
        if (
            self.device.type == "cpu"
            or self.model.dtype is torch.bfloat16
            or num_tokens > MAX_GATHERED_EXPERT_TOKENS
        ):
            return NOTHING
        # For few tokens on a GPU, uses the expert products with which `generate` decodes: in dtypes
        # other than bfloat16, grouped products synchronize with the device, so they cannot be
        # recorded.
        expert_context: AbstractContextManager[Any] = compat.optimizing_for_decode(self.model)
        return expert_context

    def _rope_context(self, factors: list[int]) -> AbstractContextManager[None]:
        if self.rope is None:
            return NOTHING
        return self.rope.rotating(factors)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: list[StepMetadata],
        logit_indices: Tensor | None,
        context: ForwardContext | None,
        host_logit_indices: list[int] | None = None,
        unpacked_plan: StepPlan | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Runs the model on token ids and positions, both `(1, n)` int64; returns the logits
        `(k, vocab_size)` of the packed tokens at `logit_indices`, `(k,)` int64 on the device, or of
        all tokens if it is `None`. `host_logit_indices`: the same indices on the host, if the host
        knows them. `unpacked_plan` as in `compute`. `arguments`: further arguments of the model's
        forward."""
        is_one_row = unpacked_plan is None or len(unpacked_plan) == 1
        has_kept_logits = logit_indices is not None and self._takes_logits_to_keep and is_one_row
        if has_kept_logits:
            arguments["logits_to_keep"] = logit_indices
        if self._takes_positions:
            positions_by_row = positions
            if unpacked_plan is not None:
                positions_by_row = positions.view(len(unpacked_plan), -1)
            arguments.setdefault("position_ids", positions_by_row)
        cache = self.cache
        if unpacked_plan is not None:
            token_ids = token_ids.view(len(unpacked_plan), -1)
            cache, mask = self._borrow(unpacked_plan, token_ids.shape[1])
            arguments["attention_mask"] = mask
        elif self._own_attention is not None:
            steps = [self._own_attention.with_key_len(step) for step in steps]
            width = max(step.key_len or 0 for step in steps)
            arguments["attention_mask"] = token_ids.new_ones(1, width)
        num_tokens = token_ids.numel()
        if context is not None:
            head_tokens = host_logit_indices or [] if has_kept_logits else None
            context.begin(num_tokens, head_tokens)
        store_hidden = self.store_hidden
        if store_hidden is not None:
            arguments["output_hidden_states"] = -1  # only the last layer's
        arguments[self._cache_name] = cache
        self._count_forward()
        self.cache.set_packed_steps(steps, positions)
        try:
            with self._kernel_context(num_tokens):
                outputs = self.model(
                    input_ids=token_ids,
                    use_cache=True,
                    return_dict=True,
                    **arguments,
                )
            logits: Tensor = outputs.logits
            if unpacked_plan is None:
                logits = logits[0]
            else:
                logits = logits.flatten(0, 1)
            if store_hidden is not None:
                store_hidden(outputs.hidden_states[-1].reshape(1, num_tokens, -1))
        finally:
            self.cache.set_packed_steps([None] * len(steps))
        # the model may ignore `logits_to_keep`
        if logit_indices is None or (has_kept_logits and len(logits) == len(logit_indices)):
            return logits
        return logits[logit_indices.to(logits.device)]

    def _borrow(
        self,
        plan: StepPlan,
        num_new: int,
    ) -> tuple[PagedCache, Tensor]:
        """Returns a cache that borrows the tables of the plan's rows, padded on the left, and the
        rows' attention mask `(rows, columns)` int64. The step computes the last `num_new`
        columns."""
        lengths = [start + count for start, count in zip(plan.starts, plan.counts)]
        width = max(lengths)
        paddings = [width - length for length in lengths]
        cache = self.cache.empty_twin(self.memory, self.counters)
        blocks = [sequence.blocks for sequence in plan.sequences]
        cache.take(blocks, tuple(paddings), width - num_new)
        return cache, padding_mask(paddings, width, self.device).long()
