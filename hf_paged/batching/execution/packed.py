"""Runs a scheduled batch as one packed `[1, sum(query_len)]` forward without padding."""

from __future__ import annotations

import contextlib
import inspect
import logging
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
from ...step import StepMetadata, to_device
from ...tape.invariant import by_kernels, in_fixed_order
from ..decoding.scores import PromptLogprobs
from ..request import Sequence
from .graphs import step_graphs
from .inputs import GroupTokens, PackedTokens, TableRows
from .mixing import mixed
from .prompts import Prompts, PromptsError
from .runner import Runner, in_order, rows_of_logits

logger = logging.getLogger(__name__)

MAX_GATHERED_EXPERTS = 64
"""Up to this many tokens, each token's expert weights are copied: an estimate of a small amount of memory."""

Wholes = list[tuple[Prompts, dict[int, int]]]
"""Prompts that the model's own forward computes as a whole, with the batch place of each row that is wanted."""


class Mirror(Protocol):
    def run(self, tokens: PackedTokens, others: list[int], adapter: Hashable) -> None:
        """Announces the next `PackedRunner.compute`, with this adapter."""


class PackedRunner(Runner):
    """Runs the model on tokens of many sequences at once, as replays of graphs where possible. The caller has switched
    the model's attention. `cache`, empty, tells which layers share block tables. `mixed_lengths`: whether rows of
    different lengths may be padded, once they are not packed any more (`unpack`)."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, mixed_lengths: bool = True) -> None:
        self.model, self.cache, self.counters = model, cache, cache.counters
        self.device = compute_device(model)
        self.windows: list[int | None] = [spec.window for spec in cache.groups]
        """Attention window of each layer group; `tables[i]` of a sequence's blocks belongs to group `i`."""
        self._block_sizes = [group.blocks.block_size for group in cache.groups.values()]
        self._rows = [TableRows() for _ in self.windows]
        self.rope = find_length_rope(model, model.modules())
        self.takes_drafts = self.rope is None
        self._graphs = step_graphs(model, cache)
        self.can_capture = self._graphs is not None
        self.is_invariant = False  # whether a row's bits do not depend on the other rows
        self._mixed_lengths = mixed_lengths
        self.is_packed = self.mixes_adapters = True
        self.mirror: Mirror | None = None  # repeats each step in other processes
        self.hidden: HiddenStates | None = None  # stores the last hidden state of each computed token
        self.pack()
        self.begin(None)

    def pack(self) -> None:
        if not self.is_packed:
            self.is_packed = self.mixes_adapters = True
        self.can_run_ahead = self._graphs is not None and self._graphs.runs_ahead

    def unpack(self, reason: str) -> bool:
        if self.is_invariant or self.mirror is not None or not self.is_packed:
            return False
        note_unpackable(self.model, self.cache, reason)
        self.is_packed = self.mixes_adapters = self.can_run_ahead = False
        return True

    def begin(self, state: ModelState | None) -> None:
        """Starts work on a model that stays in this state. Without one, as at first, no step is a replay."""
        self._is_known, self._state = state is not None, state
        if state is not None and self._graphs is not None:
            state.hold()
        parameters = inspect.signature(self.model.forward).parameters
        self._picks_logits, self._takes_positions = "logits_to_keep" in parameters, "position_ids" in parameters
        self._cache_name = compat.cache_name(self.model)
        if state is None:
            self._shows_rows = not calls_interface(self.model.modules())  # for models with their own attention code
        if state is not None and self._graphs is not None:
            self._graphs.begin(state)

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self._graphs is None else self._graphs.in_order()

    def rest(self) -> None:
        self._state = None  # it holds the weights

    @torch.no_grad()
    def run(self, items: Items[tuple[Sequence, int]], variant: Hashable = None) -> Tensor:
        with self._in_order():
            return self._run(items, variant)

    def _in_order(self) -> contextlib.AbstractContextManager[None]:
        return in_fixed_order() if self.is_invariant else contextlib.nullcontext()

    def _run(self, items: Items[tuple[Sequence, int]], variant: Hashable) -> Tensor:
        if self.is_packed and all(sequence.request.inputs is None for sequence, _ in items):
            return self._run_packed(items, variant)
        wholes: dict[tuple[Prompts, int], dict[int, int]] = {}  # place by row, for each forward over whole prompts
        packed: dict[int, list[int]] = {}  # places by number of position axes
        for place, (sequence, query_len) in enumerate(items):
            prompts, row = sequence.request.inputs or (None, 0)
            if prompts is not None and query_len == sequence.num_computed_tokens:
                turn = sum(row in rows for (other, _), rows in wholes.items() if other is prompts)
                wholes.setdefault((prompts, turn), {})[row] = place
            else:
                packed.setdefault(0 if prompts is None else prompts.num_axes(row), []).append(place)
        parts, answers = [], rows_of_logits(items)
        for together in self._divide([(prompts, rows) for (prompts, _), rows in wholes.items()]):
            for places, logits in self._run_wholes(together, items):
                parts.append(([answers[place].start for place in places], logits))
        if len(packed) == 2 and 0 in packed:  # positions that count tokens are the same on any number of axes
            packed = {max(packed): sorted(packed[0] + packed[max(packed)])}
        for places in packed.values() if self.is_packed else self._side_by_side(items, packed):
            logits = self._run_packed([items[place] for place in places], variant)
            parts.append(([row for place in places for row in answers[place]], logits))
        return in_order(parts)

    def _side_by_side(self, items: Items[tuple[Sequence, int]], packed: dict[int, list[int]]) -> Iterable[list[int]]:
        """Divides the places of `packed` into forwards of rows with one token each, or of one row."""
        groups: dict[Hashable, list[int]] = {}
        for num_axes, places in packed.items():
            for place in places:
                sequence, query_len = items[place]
                is_alone = query_len > 1 or num_axes or self.rope is not None
                length = 0 if self._mixed_lengths else sequence.num_computed_tokens
                groups.setdefault(("row", place) if is_alone else ("length", length), []).append(place)
        return groups.values()

    def _divide(self, wholes: Wholes) -> list[Wholes]:
        """Groups prompts into forwards of at most `max_num_batched_tokens` each."""
        found: list[Wholes] = []
        last: dict[Hashable, Wholes] = {}
        for prompts, rows in sorted(wholes, key=lambda whole: -whole[0].length):
            others = last.get(prompts.merges)
            num_rows = sum(len(other.paddings) for other, _ in others or ()) + len(prompts.paddings)
            max_tokens = self.cache.memory.config.max_num_batched_tokens
            if prompts.merges is None or others is None or num_rows * others[0][0].length > max_tokens:
                found.append([])
                others = last[prompts.merges] = found[-1]
            others.append((prompts, rows))
        return found

    def _run_wholes(self, wholes: Wholes, items: Items[tuple[Sequence, int]]) -> list[tuple[list[int], Tensor]]:
        """Runs one forward, or one for each `Prompts` if that fails, so that errors stay with their prompts. Returns
        places with their logits."""
        if len(wholes) > 1:
            all_rows: dict[int, int] = {}
            num_rows = 0
            for prompts, rows in wholes:
                all_rows |= {num_rows + row: place for row, place in rows.items()}
                num_rows += len(prompts.paddings)
            try:
                (first, _), *others = wholes
                together = first.merged([prompts for prompts, _ in others], pad_token_id(self.model))
                return [self._run_whole(together, all_rows, items)]
            except PromptsError as error:
                logger.debug("prompts of several requests fail in one forward: %s", error)
        return [self._run_whole(prompts, rows, items) for prompts, rows in wholes]

    def _run_whole(
        self, prompts: Prompts, rows: dict[int, int], items: Items[tuple[Sequence, int]]
    ) -> tuple[list[int], Tensor]:
        """Computes `rows` of prompts, given with their places in `items`, by the model's own forward; returns places
        and their logits."""
        blocks = {row: items[place][0].blocks for row, place in rows.items()}
        cache = self.cache.empty_twin(self.cache.memory, self.counters)
        with self._rotating([]), self.products:
            logits, ahead = prompts.forward(self.model, cache, blocks)
        content = None if ahead is None else prompts.content(self.model.config)
        for row, place in rows.items():
            # the prefix cache may only share K/V whose key covers all that the token has seen
            if ahead is None or content is None or bool((ahead[row] & ~content[row].cpu()).any()):
                items[place][0].request.namespace = UNCACHED
        answered = {row: place for row, place in rows.items() if _is_answered(items[place][0])}
        return list(answered.values()), logits[list(answered)]

    def _run_packed(self, items: Items[tuple[Sequence, int]], variant: Hashable) -> Tensor:
        tokens = self._lay_out(items)
        # decodes compute no prompt tokens whose log-probabilities are recorded
        wanted = _recorded(items) if len(tokens.last) < len(tokens.token_ids) else []
        replayed = None if wanted else self._replay(tokens, variant)
        if replayed is not None:
            return replayed
        others = [place for _, _, places in wanted for place in places]
        if self.mirror is not None:
            self.mirror.run(tokens, others, variant)
        rows = None if self.is_packed else [sequence for sequence, _ in items]
        logits = self.compute(tokens, others, rows)
        end = len(tokens.last)
        for recording, position, places in wanted:
            recording.record(position, logits[end : end + len(places)])
            end += len(places)
        return logits[: len(tokens.last)]

    @torch.no_grad()
    def run_ahead(self, sequences: Items[Sequence], token_ids: Tensor, variant: Hashable = None) -> Tensor | None:
        with self._in_order():
            return self._replay(self._lay_out([(sequence, 1) for sequence in sequences], ahead=1), variant, token_ids)

    def _replay(self, tokens: PackedTokens, variant: Hashable, token_ids: Tensor | None = None) -> Tensor | None:
        if self._is_known and self._state is not None and not self._state.is_in_place():
            self._is_known = False  # the caller's code, which chooses tokens, has changed the model
        is_recordable = self.is_packed and not tokens.rope_factors and tokens.axes is None
        if self._graphs is None or not self._is_known or not is_recordable:
            return None
        mix = mixed.get()
        if mix is not None and tokens.num_decodes < len(tokens.token_ids) and (mix.adds_to_head or not mix.can_record):
            return None  # only the recorded step knows which rows the head gets, or where chunks lie in it
        keeps_hidden = self.hidden is not None
        logits = self._graphs.run(tokens, variant, self._forward, token_ids, keeps_hidden)
        self.num_captured_steps += logits is not None
        return logits

    def compute(self, tokens: PackedTokens, others: list[int], rows: Items[Sequence] | None = None) -> Tensor:
        """Runs the model without a graph; returns logits of `tokens.last`, then of the packed tokens `others`. If
        `rows` are given, these are not packed: each has one token, or there is one row."""
        inputs, steps = self._to_device(tokens)
        kept, wanted, arguments = None, None, {}
        if others or len(tokens.last) < len(tokens.token_ids):
            # at least one row: a head with another library's weights may fail on none
            wanted = tokens.last + others or [len(tokens.token_ids) - 1]
            kept = to_device(torch.tensor(wanted, dtype=torch.long, device="cpu"), self.device)
        if tokens.axes is not None:  # (axes, 1, T), or (1, T)
            own = inputs[2 + len(tokens.groups) :]
            arguments["position_ids"] = own if len(own) == 1 else own.unsqueeze(1)
        with self._rotating(tokens.rope_factors), self.products:
            return self._forward(inputs[0:1], inputs[1:2], steps, kept, wanted, rows, **arguments)

    def _to_device(self, tokens: PackedTokens) -> tuple[Tensor, list[StepMetadata]]:
        """Returns `(n, T)` int64 (token ids, positions, slots in each group, positions on each axis) and each group's
        step."""
        buffer = array("q", tokens.token_ids)  # one buffer, for a single copy to the device
        buffer.extend(tokens.positions)
        for group in tokens.groups:
            buffer.extend(group.slots)
        for axis in tokens.axes or ():
            buffer.extend(axis)
        inputs = to_device(torch.frombuffer(buffer, dtype=torch.long).view(-1, len(tokens.token_ids)), self.device)
        query_start = tuple(tokens.query_start)
        steps = [
            StepMetadata(
                to_device(self._rows[number].tensor(tables), self.device),
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
            for number, (_, tables, seq_lens, origins) in enumerate(tokens.groups)
        ]
        return inputs, steps

    def _experts(self, num_tokens: int) -> contextlib.AbstractContextManager[None]:
        """Around a forward of few tokens on a device: uses the expert products that `generate` uses for decodes. In
        other dtypes than bfloat16, grouped expert products wait for the device, and cannot be recorded."""
        if self.device.type == "cpu" or self.model.dtype is torch.bfloat16 or num_tokens > MAX_GATHERED_EXPERTS:
            return contextlib.nullcontext()
        context: contextlib.AbstractContextManager[None] = compat.with_experts_of_decodes(self.model)
        return context

    def _rotating(self, factors: list[int]) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext() if self.rope is None else self.rope.rotating(factors)

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: list[StepMetadata],
        kept: Tensor | None,
        wanted: list[int] | None = None,
        rows: Items[Sequence] | None = None,
        **arguments: Any,
    ) -> Tensor:
        """Runs the model on token ids and positions, both `(1, n)` int64; returns logits `(kept, vocab_size)` of the
        tokens `kept` `(kept,)` int64, or of all. `wanted`: `kept` on the host. `rows` as in `compute`."""
        picks_logits = kept is not None and self._picks_logits and (rows is None or len(rows) == 1)
        if picks_logits:
            arguments["logits_to_keep"] = kept
        if self._takes_positions:
            arguments.setdefault("position_ids", positions if rows is None else positions.view(len(rows), -1))
        cache = self.cache
        if rows is not None:
            token_ids = token_ids.view(len(rows), -1)
            cache, arguments["attention_mask"] = self._borrow(rows, token_ids.shape[1])
        elif self._shows_rows:
            steps = [showing_rows(step) for step in steps]
            arguments["attention_mask"] = token_ids.new_ones(1, max(step.key_len or 0 for step in steps))
        if (mix := mixed.get()) is not None:
            mix.num_tokens = token_ids.numel()
            # in a recorded step only the device knows them
            mix.kept = wanted or [] if picks_logits else None
        if (kept_states := self.hidden) is not None:
            arguments["output_hidden_states"] = -1  # the last alone
        arguments[self._cache_name] = cache
        self.cache.begin(steps, positions)
        try:
            with by_kernels() if self.is_invariant else self._experts(token_ids.numel()):
                outputs = self.model(
                    input_ids=token_ids,
                    use_cache=True,
                    return_dict=True,
                    **arguments,
                )
            logits: Tensor = outputs.logits[0] if rows is None else outputs.logits.flatten(0, 1)
            if kept_states is not None:
                kept_states.store(outputs.hidden_states[-1].reshape(1, token_ids.numel(), -1))
        finally:
            self.cache.begin([None] * len(steps))
        # the model may ignore `logits_to_keep`
        if kept is None or (picks_logits and len(logits) == len(kept)):
            return logits
        return logits[kept.to(logits.device)]

    def _borrow(self, rows: Items[Sequence], num_new: int) -> tuple[PagedCache, Tensor]:
        """Returns a cache with the tables of these rows, padded on the left, whose last `num_new` tokens are not
        computed, and the attention mask `(rows, columns)` int64."""
        lengths = [sequence.num_computed_tokens + len(sequence.draft) for sequence in rows]
        width = max(lengths)
        paddings = [width - length for length in lengths]
        cache = self.cache.empty_twin(self.cache.memory, self.counters)
        cache.take([sequence.blocks for sequence in rows], tuple(paddings), width - num_new)
        columns = torch.arange(width, device=self.device)
        return cache, (columns >= torch.tensor(paddings, device=self.device)[:, None]).long()

    def _lay_out(self, items: Items[tuple[Sequence, int]], ahead: int = 0) -> PackedTokens:
        """Lays out a packed step. `ahead`: tokens of each sequence that this step adds beyond `num_computed_tokens`."""
        token_ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        factors: list[int] = []
        query_start = [0]
        num_decodes = 0
        for sequence, query_len in items:
            end, ids = sequence.num_computed_tokens, sequence.token_ids
            if draft := sequence.draft:  # rows of one token each
                start = len(token_ids)
                num_decodes += query_len if num_decodes == start else 0
                token_ids += [ids[end - 1], *draft]
                positions += range(end - 1, end + len(draft))
                query_start += range(start + 1, start + 1 + query_len)
                last += range(start, start + query_len)
                continue
            if query_len == 1:
                num_decodes += num_decodes == len(token_ids)  # only leading ones
                token_ids.append(ids[end - 1])
                positions.append(end - 1 + ahead)
            else:
                token_ids += ids[end - query_len : end]
                positions += range(end - query_len, end)
            query_start.append(len(token_ids))
            if self.rope is not None:
                known = end + ahead, sequence.request.num_prompt_tokens, len(ids) + ahead
                factors += self.rope.token_factors(end + ahead - query_len, *known)
            if end == len(ids):
                last.append(len(token_ids) - 1)
        groups = [self._lay_out_group(items, number, ahead) for number in range(len(self.windows))]
        if self.rope is not None and self.rope.is_fresh and not any(factors):
            factors = []
        has_inputs = any(sequence.request.inputs is not None for sequence, _ in items)
        axes = _axes(items, positions, ahead) if has_inputs else None
        has_drafts = any(sequence.draft for sequence, _ in items)
        return PackedTokens(token_ids, positions, last, query_start, num_decodes, groups, factors, axes, has_drafts)

    def _lay_out_group(self, items: Items[tuple[Sequence, int]], number: int, ahead: int) -> GroupTokens:
        size = self._block_sizes[number]
        slots: list[int] = []
        tables: list[list[int]] = []
        seq_lens: list[int] = []
        origins: list[int] = []
        for sequence, query_len in items:
            table = sequence.blocks.tables[number]
            block_ids = table.block_ids
            origins.append(table.num_dropped * size)
            seq_len = sequence.num_computed_tokens + ahead - origins[-1]
            if sequence.draft:
                slots += table.slots(seq_len - 1, seq_len - 1 + query_len)
                tables += [block_ids] * query_len
                seq_lens += range(seq_len, seq_len + query_len)
                origins += origins[-1:] * (query_len - 1)
                continue
            if query_len == 1:
                slots.append(block_ids[(seq_len - 1) // size] * size + (seq_len - 1) % size)
            else:
                slots += table.slots(seq_len - query_len, seq_len)
            tables.append(block_ids)
            seq_lens.append(seq_len)
        return GroupTokens(slots, tables, seq_lens, origins)


def _recorded(items: Items[tuple[Sequence, int]]) -> list[tuple[PromptLogprobs, int, range]]:
    """Returns, for each prompt whose log-probabilities are recorded: the recording, the position of the first token
    computed now, and the packed tokens that a prompt token follows."""
    found, start = [], 0
    for sequence, query_len in items:
        recording, end = sequence.request.prompt_logprobs, sequence.num_computed_tokens
        first = end - (query_len - len(sequence.draft))  # a draft is not among the computed tokens
        if recording is not None and (count := recording.num_wanted(first, end)):
            found.append((recording, first, range(start, start + count)))
        start += query_len
    return found


def _is_answered(sequence: Sequence) -> bool:
    return sequence.num_computed_tokens == len(sequence.token_ids)


def _axes(items: Items[tuple[Sequence, int]], positions: list[int], ahead: int) -> list[list[int]] | None:
    """Makes `PackedTokens.axes`; sequences with several axes must have equally many."""
    own: dict[int, list[list[int]]] = {}  # by the first packed position
    start = 0
    for sequence, query_len in items:
        if sequence.request.inputs is not None:
            prompts, row = sequence.request.inputs
            end = sequence.num_computed_tokens + ahead
            if (found := prompts.positions(row, end - query_len, end)) is not None:
                own[start] = found
        start += query_len
    if not own:
        return None
    axes = [positions.copy() for _ in range(max(map(len, own.values())))]
    for start, found in own.items():
        for axis, values in zip(axes, found):
            axis[start : start + len(values)] = values
    return axes
