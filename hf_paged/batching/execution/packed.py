"""Runs a scheduled batch as one packed `[1, sum(query_len)]` forward without padding."""

from __future__ import annotations

import contextlib
import inspect
import logging
import operator
from array import array
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from typing import Any, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ... import compat
from ...attention.eager import showing_rows
from ...attention.switch import calls_interface
from ...cache.block_manager import UNCACHED
from ...cache.hidden_states import HiddenStates
from ...cache.paged_cache import PagedCache
from ...model.capability import note_unpackable
from ...model.forwards import compute_device
from ...model.own_loop import pad_token_id
from ...model.rope import find_length_rope
from ...model.state import ModelState
from ...model.structure import structural_reason
from ...plan import StepPlan
from ...step import StepMetadata, to_device
from ...switches import NOTHING
from ...tape.invariant import by_kernels, in_fixed_order
from ..decoding.scores import PromptLogprobs
from ..request import Sequence
from .graphs import step_graphs
from .inputs import GroupTokens, PackedTokens, TableRows
from .mixing import mixed
from .prompts import Prompts, PromptsError
from .runner import Runner, in_order

logger = logging.getLogger(__name__)

MAX_GATHERED_EXPERTS = 64
"""Up to this many tokens, each token's expert weights are copied: an estimate of a small amount of
memory."""

_BLOCK_IDS = operator.attrgetter("block_ids")

Wholes = list[tuple[Prompts, dict[int, int]]]
"""Prompts that the model's own forward computes as a whole, with the batch place of each row that
is wanted."""


class Mirror(Protocol):
    def run(
        self,
        tokens: PackedTokens,
        others: list[int],
        adapter: Hashable,
    ) -> None:
        """Announces the next `PackedRunner.compute`, with this adapter."""


class PackedRunner(Runner):
    """Runs the model on tokens of many sequences at once, as replays of graphs where possible. The
    caller has switched the model's attention. `cache`, empty, tells which layers share block
    tables. `mixed_lengths`: whether rows of different lengths may be padded, once they are not
    packed any more (`unpack`)."""

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        mixed_lengths: bool = True,
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
        self._graphs = step_graphs(model, cache)
        self.can_capture = self._graphs is not None
        self.is_invariant = False  # whether a row's bits do not depend on the other rows
        self._mixed_lengths = mixed_lengths
        self.is_packed = self.mixes_adapters = True
        self.mirror: Mirror | None = None  # repeats each step in other processes
        # stores the last hidden state of each computed token
        self.hidden: HiddenStates | None = None
        self.pack()
        self.begin(None)

    def pack(self) -> None:
        runs_ahead = False
        if self._graphs is not None:
            runs_ahead = self._graphs.runs_ahead
        if not self.is_packed:
            self.is_packed = self.mixes_adapters = True
        self.can_run_ahead = runs_ahead

    def reason_against_packing(self) -> str | None:
        if not self.is_packed:
            return None
        return structural_reason(self.model, self.cache)

    def unpack(self, reason: str) -> bool:
        must_pack = self.is_invariant or self.mirror is not None
        if must_pack or not self.is_packed:
            return False
        note_unpackable(self.model, self.cache, reason)
        self.is_packed = self.mixes_adapters = self.can_run_ahead = False
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
        if state is not None and self._graphs is not None:
            self._graphs.begin(state)

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        if self._graphs is None:
            return NOTHING
        return self._graphs.in_order()

    def rest(self) -> None:
        self._state = None  # it holds the weights

    def run(
        self,
        plan: StepPlan,
        variant: Hashable = None,
    ) -> Tensor:
        if not self.is_invariant:
            return self._run(plan, variant)
        with in_fixed_order():
            return self._run(plan, variant)

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        if self.is_invariant:
            return in_fixed_order()
        return NOTHING

    def _run(
        self,
        plan: StepPlan,
        variant: Hashable,
    ) -> Tensor:
        if self.is_packed and not plan.has_inputs:
            return self._run_packed(plan, variant)
        # place by row, for each forward over whole prompts
        wholes: dict[tuple[Prompts, int], dict[int, int]] = {}
        packed: dict[int, list[int]] = {}  # places by number of position axes
        for place, (sequence, num_cached) in enumerate(zip(plan.sequences, plan.starts)):
            prompts, row = sequence.request.inputs or (None, 0)
            if prompts is not None and num_cached <= sequence.request.num_text:
                turn = 0
                for (other, _), other_rows in wholes.items():
                    if other is prompts and row in other_rows:
                        turn += 1
                places_by_row = wholes.setdefault((prompts, turn), {})
                places_by_row[row] = place
            else:
                num_axes = 0
                if prompts is not None:
                    num_axes = prompts.num_axes(row)
                places = packed.setdefault(num_axes, [])
                places.append(place)
        parts = []
        answers = plan.rows_of_logits()
        calls = [(prompts, rows) for (prompts, _), rows in wholes.items()]
        for together in self._divide(calls, plan):
            for places, logits in self._run_wholes(together, plan):
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
            logits = self._run_packed(plan.select(places), variant)
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

    def _divide(
        self,
        wholes: Wholes,
        plan: StepPlan,
    ) -> list[Wholes]:
        """Groups prompts into forwards of at most `max_num_batched_tokens`, those behind cached
        tokens alone."""
        found: list[Wholes] = []
        last: dict[Hashable, Wholes] = {}
        longest_first = sorted(wholes, key=lambda whole: -whole[0].length)
        for prompts, rows in longest_first:
            merges = None
            if not _num_cached(rows, plan):
                merges = prompts.merges
            others = last.get(merges)
            num_rows = len(prompts.paddings)
            for other, _ in others or ():
                num_rows += len(other.paddings)
            max_tokens = self.cache.memory.config.max_num_batched_tokens
            fits = False
            if merges is not None and others is not None:
                fits = num_rows * others[0][0].length <= max_tokens
            if others is None or not fits:
                found.append([])
                others = last[merges] = found[-1]
            others.append((prompts, rows))
        return found

    def _run_wholes(
        self,
        wholes: Wholes,
        plan: StepPlan,
    ) -> list[tuple[list[int], Tensor]]:
        """Runs one forward, or one for each `Prompts` if that fails, so that errors stay with their
        prompts. Returns places with their logits."""
        if len(wholes) > 1:
            all_rows: dict[int, int] = {}
            num_rows = 0
            for prompts, rows in wholes:
                for row, place in rows.items():
                    all_rows[num_rows + row] = place
                num_rows += len(prompts.paddings)
            try:
                (first, _), *others = wholes
                partners = [prompts for prompts, _ in others]
                together = first.merged(partners, pad_token_id(self.model))
                return [self._run_whole(together, all_rows, plan)]
            except PromptsError as error:
                logger.debug("prompts of several requests fail in one forward: %s", error)
        answers = []
        for prompts, rows in wholes:
            answers.append(self._run_whole(prompts, rows, plan))
        return answers

    def _run_whole(
        self,
        prompts: Prompts,
        rows: dict[int, int],
        plan: StepPlan,
    ) -> tuple[list[int], Tensor]:
        """Computes `rows` of prompts, given with their places in `plan`, by the model's own
        forward; returns places and their logits."""
        blocks = {row: plan.sequences[place].blocks for row, place in rows.items()}
        cache = self.cache.empty_twin(self.cache.memory, self.counters)
        with self._rotating([]), self.products:
            num_cached = _num_cached(rows, plan)
            logits, ahead = prompts.forward(self.model, cache, blocks, num_cached)
        content = None
        if ahead is not None:
            content = prompts.content(self.model.config)
        for row, place in rows.items():
            # the prefix cache may only share K/V whose key covers all that the token has seen
            is_covered = False
            if ahead is not None and content is not None:
                uncovered = ahead[row] & ~content[row].cpu()
                is_covered = not bool(uncovered.any())
            if not is_covered:
                plan.sequences[place].request.namespace = UNCACHED
        answered = {row: place for row, place in rows.items() if plan.num_logits[place]}
        return list(answered.values()), logits[list(answered)]

    def _run_packed(
        self,
        plan: StepPlan,
        variant: Hashable,
    ) -> Tensor:
        tokens = self._lay_out(plan)
        # decodes compute no prompt tokens whose log-probabilities are recorded
        wanted: list[tuple[PromptLogprobs, int, range]] = []
        if len(tokens.last) < len(tokens.token_ids):
            wanted = _recorded(plan)
        replayed = None
        if not wanted:
            replayed = self._replay(tokens, variant)
        if replayed is not None:
            return replayed
        others: list[int] = []
        for _, _, places in wanted:
            others += places
        if self.mirror is not None:
            self.mirror.run(tokens, others, variant)
        rows = None
        if not self.is_packed:
            rows = plan
        logits = self.compute(tokens, others, rows)
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
        variant: Hashable = None,
    ) -> Tensor | None:
        with self._in_order():
            plan = StepPlan.of([(sequence, 1) for sequence in sequences])
            tokens = self._lay_out(plan, is_ahead=True)
            return self._replay(tokens, variant, token_ids)

    def _replay(
        self,
        tokens: PackedTokens,
        variant: Hashable,
        token_ids: Tensor | None = None,
    ) -> Tensor | None:
        is_plain = not tokens.rope_factors and tokens.axes is None
        is_recordable = self.is_packed and is_plain
        if self._graphs is None or self._state is None:
            return None
        if not is_recordable or not self._state.is_in_place():
            return None
        mix = mixed.get()
        if mix is not None and tokens.num_decodes < len(tokens.token_ids):
            # only the recorded step knows which rows the head gets, or where chunks lie in it
            if mix.adds_to_head or not mix.can_record:
                return None
        keeps_hidden = self.hidden is not None
        logits = self._graphs.run(
            tokens,
            variant,
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
            on_host = torch.tensor(wanted, dtype=torch.long, device="cpu")
            kept = to_device(on_host, self.device)
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
        mix = mixed.get()
        if mix is not None:
            mix.num_tokens = num_tokens
            # in a recorded step only the device knows them
            mix.kept = wanted or [] if picks_logits else None
        kept_states = self.hidden
        if kept_states is not None:
            arguments["output_hidden_states"] = -1  # the last alone
        arguments[self._cache_name] = cache
        self.has_run_code = True
        if self._state is not None:
            self._state.doubt()
        self.cache.begin(steps, positions)
        try:
            if self.is_invariant:
                kernels: contextlib.AbstractContextManager[Any] = by_kernels()
            else:
                kernels = self._experts(num_tokens)
            with kernels:
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
            if kept_states is not None:
                last_states = outputs.hidden_states[-1]
                packed_states = last_states.reshape(1, num_tokens, -1)
                kept_states.store(packed_states)
        finally:
            self.cache.begin([None] * len(steps))
        if kept is None:
            return logits
        # the model may ignore `logits_to_keep`
        if picks_logits and len(logits) == len(kept):
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

    def _lay_out(
        self,
        plan: StepPlan,
        is_ahead: bool = False,
    ) -> PackedTokens:
        """Lays out a packed step. `is_ahead`: the tokens are on the device only, one of each
        row."""
        # leading rows of one token each, whose columns need no look at each row
        num_plain = plan.num_decodes
        if plan.has_drafts or self.rope is not None:
            num_plain = 0
        num_rows = len(plan.sequences)
        positions = list(plan.starts[:num_plain])
        if is_ahead:
            token_ids = [0] * num_plain
        else:
            plain = zip(plan.sequences, positions)
            token_ids = [sequence.token_ids[position] for sequence, position in plain]
        last = [row for row in range(num_plain) if plan.num_logits[row]]
        query_start = list(range(num_plain + 1))
        factors: list[int] = []
        num_decodes = num_plain
        for row in range(num_plain, num_rows):
            sequence = plan.sequences[row]
            start = plan.starts[row]
            count = plan.counts[row]
            draft = sequence.draft
            end = start + count
            first = len(token_ids)
            if num_decodes == first and (draft or count == 1):  # only leading ones
                num_decodes += count
            if is_ahead:
                token_ids += [0] * count
            else:
                token_ids += sequence.token_ids[start : end - len(draft)]
                token_ids += draft
            positions += range(start, end)
            if draft:  # rows of one token each
                query_start += range(first + 1, first + count)
            query_start.append(first + count)
            last += range(first + count - plan.num_logits[row], first + count)
            if self.rope is not None:
                factors += self.rope.token_factors(
                    start,
                    end,
                    sequence.request.num_prompt_tokens,
                    max(end, len(sequence.token_ids)),
                )
        if self.rope is not None and self.rope.is_fresh:
            if not any(factors):
                factors = []
        groups = []
        for number in range(len(self.windows)):
            groups.append(self._lay_out_group(plan, number, num_plain))
        return PackedTokens(
            token_ids,
            positions,
            last,
            query_start,
            num_decodes,
            groups,
            factors,
            _axes(plan, positions) if plan.has_inputs else None,
            plan.has_drafts,
        )

    def _lay_out_group(
        self,
        plan: StepPlan,
        number: int,
        num_plain: int,
    ) -> GroupTokens:
        size = self._block_sizes[number]
        held = [sequence.blocks.tables[number] for sequence in plan.sequences]
        plain = held[:num_plain]
        origins = [table.num_dropped * size for table in plain]
        tables = list(map(_BLOCK_IDS, plain))
        indices = list(map(operator.sub, plan.starts, origins))
        slots = [ids[index // size] * size + index % size for ids, index in zip(tables, indices)]
        seq_lens = list(map((1).__add__, indices))
        for row in range(num_plain, len(held)):
            table = held[row]
            count = plan.counts[row]
            origin = table.num_dropped * size
            first = plan.starts[row] - origin
            slots += table.slots(first, first + count)
            if plan.sequences[row].draft:  # rows of one token each
                num_rows = count
                seq_lens += range(first + 1, first + 1 + count)
            else:
                num_rows = 1
                seq_lens.append(first + count)
            tables += [table.block_ids] * num_rows
            origins += [origin] * num_rows
        return GroupTokens(
            slots,
            tables,
            seq_lens,
            origins,
        )


def _recorded(plan: StepPlan) -> list[tuple[PromptLogprobs, int, range]]:
    """Returns, for each prompt whose log-probabilities are recorded: the recording, the position of
    the first token computed now, and the packed tokens that a prompt token follows."""
    recordings = []
    first = 0
    for sequence, start, num_tokens in zip(plan.sequences, plan.starts, plan.counts):
        recording = sequence.request.prompt_logprobs
        if recording is not None:
            # a draft is not among the computed tokens
            count = recording.num_wanted(start, start + num_tokens - len(sequence.draft))
            if count:
                tokens = range(first, first + count)
                recordings.append((recording, start, tokens))
        first += num_tokens
    return recordings


def _num_cached(rows: dict[int, int], plan: StepPlan) -> int:
    """Tokens in front of those that a forward over whole prompts computes: 0 for several rows."""
    return min(plan.starts[place] for place in rows.values())


def _axes(plan: StepPlan, positions: list[int]) -> list[list[int]] | None:
    """Makes `PackedTokens.axes`; sequences with several axes must have equally many."""
    axes_by_start: dict[int, list[list[int]]] = {}  # by the first packed position
    first = 0
    for sequence, start, count in zip(plan.sequences, plan.starts, plan.counts):
        if sequence.request.inputs is not None:
            prompts, row = sequence.request.inputs
            row_axes = prompts.positions(row, start, start + count)
            if row_axes is not None:
                axes_by_start[first] = row_axes
        first += count
    if not axes_by_start:
        return None
    num_axes = max(map(len, axes_by_start.values()))
    axes = [positions.copy() for _ in range(num_axes)]
    for start, row_axes in axes_by_start.items():
        for axis, values in zip(axes, row_axes):
            axis[start : start + len(values)] = values
    return axes
