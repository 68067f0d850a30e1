"""Speculative decoding of a loop's rows: chooses each row's source of drafts, and drafts before
each step."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable
from collections.abc import Sequence as Items

from transformers import PreTrainedModel

from .. import compat
from ..batching.decoding.sample import SampleDecoding
from ..batching.execution.buckets import draft_bucket
from ..batching.generation import Generation
from ..batching.request import Request, Sequence, Status
from ..cache.block_manager import UNCACHED
from ..cache.prefix_index import namespace_digest
from ..interrupts import is_interrupt
from ..model.forwards import compute_device
from .assistant import Assistant, AssistantRow
from .mtp import HiddenNamespace, MtpHeads
from .sources import (
    Assistance,
    Draft,
    DraftLength,
    Generated,
    NgramIndex,
    Ngrams,
    Source,
    Speculation,
    StepCosts,
)

Fail = Callable[[Generation, Exception], None]


Row = tuple[Generation, Speculation, Sequence, int]
"""A row that drafts in this step, and the number of tokens to draft."""


class Speculator:
    """Drafts tokens for the rows of one loop. `make_assistant` makes the assistant for a model with
    the same tokens, `heads` the model's own multi-token prediction heads."""

    def __init__(
        self,
        model: PreTrainedModel,
        make_assistant: Callable[[PreTrainedModel], Assistant],
        heads: Callable[[], MtpHeads],
    ) -> None:
        self.model = model
        self._make_assistant = make_assistant
        self._heads = heads
        self._ended = (0, 0, 0)  # `counts` of ended rows
        self.costs = StepCosts()
        self._step = 0
        self._index = NgramIndex()
        self._numbers = itertools.count()
        self._rows: dict[Generation, Speculation] = {}

    def attach(self, generation: Generation) -> None:
        """Gives a generation of one row the source of drafts that its config and its caller ask
        for, if any."""
        decoding = generation.decoding
        assistance = generation.assistance
        if assistance is None or not isinstance(decoding, SampleDecoding):
            return
        if len(generation.rows) != 1 or generation.is_done:
            return
        ((request, _),) = generation.rows
        config = decoding.config
        source: Source
        if assistance.is_asked_for(config):
            # sampled rows use transformers' fixed draft lengths: a seed then gives the same tokens,
            # whatever the steps' times
            adapts = not decoding.do_sample
            by_heads = assistance.by_heads(config)
            if by_heads:
                source = self._by_heads(request, decoding)
            elif assistance.is_joint and config.assistant_early_exit is None:
                source = AssistantRow(self._assistant_of(assistance.model), decoding)
            else:
                source = self._generated(decoding, assistance)
                adapts |= config.prompt_lookup_num_tokens is not None
            request.drafts_first = not adapts and not by_heads
        elif assistance.ngrams:
            source = self._ngrams(request)
            adapts = True
        else:
            return
        length = DraftLength() if adapts else None
        generation.speculation = Speculation(source, length, decoding.generator)
        self._rows[generation] = generation.speculation

    def _by_heads(self, request: Request, decoding: SampleDecoding) -> AssistantRow:
        heads = self._heads()
        namespace = request.namespace
        is_hidden = isinstance(namespace, HiddenNamespace)
        if namespace is not UNCACHED and not is_hidden:
            request.namespace = HiddenNamespace(namespace)
        return AssistantRow(heads, decoding)

    def _assistant_of(self, model: PreTrainedModel) -> Assistant:
        for assistant in self._assistants:
            if assistant.model is model:
                return assistant
        return self._make_assistant(model)

    @property
    def _assistants(self) -> list[Assistant]:
        """Those that have rows. A row of another thread may end meanwhile."""
        drafters = [row.source.drafter for row in list(self._rows.values())]
        return [drafter for drafter in dict.fromkeys(drafters) if drafter is not None]

    def _ngrams(self, request: Request) -> Ngrams:
        namespace = request.namespace
        if namespace is UNCACHED:  # shares its n-grams with no other request
            namespace = ("alone", next(self._numbers))
        digest = namespace_digest(namespace)
        return Ngrams(self._index, request.num_prompt_tokens, digest)

    def _generated(self, decoding: SampleDecoding, assistance: Assistance) -> Generated:
        """Makes transformers' candidate generator for one row."""
        config = decoding.config
        num_lookup_tokens = config.prompt_lookup_num_tokens
        is_lookup = num_lookup_tokens is not None
        strategy = compat.candidate_generator(
            self.model,
            generation_config=config,
            input_ids=decoding.input_ids,
            inputs_tensor=decoding.input_ids,
            logits_processor=None if is_lookup else decoding.logits_processor,
            model_kwargs={"use_cache": True},
            assistant_model=assistance.model,
            target_tokenizer=assistance.tokenizer,
            assistant_tokenizer=assistance.assistant_tokenizer,
        )
        limit = num_lookup_tokens if is_lookup else decoding.max_length
        draws = None
        if decoding.do_sample and not is_lookup:
            draws = decoding.generator
        device = compute_device(self.model)
        return Generated(strategy, limit, device, decoding.do_sample, draws)

    def detach(self, generation: Generation) -> None:
        speculation = self._rows.pop(generation, None)
        if speculation is not None:
            self._ended = _total([self._ended, speculation.counts])
            speculation.source.close()

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of verified drafts, of tokens in them, and of accepted tokens."""
        rows = list(self._rows.values())
        return _total([self._ended, *(row.counts for row in rows)])

    def reclaim(self) -> bool:
        """Frees the blocks of all assistants; returns whether there were any."""
        num_reclaimed = sum(assistant.reclaim() for assistant in self._assistants)
        return num_reclaimed > 0

    def change_weights(self) -> None:
        for assistant in self._assistants:
            assistant.change_weights()

    def is_due(self) -> bool:
        """Begins a step; returns whether any row drafts in it."""
        self._step += 1
        step = self._step
        rows = self._rows
        return bool(rows) and any(row.wake_at <= step for row in list(rows.values()))

    def propose(self, num_embeddings: int, num_rows: int, fail: Fail) -> None:
        """Drafts, before a step of `num_rows` rows, for those that run and have one token to
        compute. If a source raises, `fail` ends its rows."""
        rows = list(self._rows.items())  # a copy: other threads' calls add rows
        step = self._step
        ready: list[Row] = []
        for generation, speculation in rows:
            if speculation.wake_at > step:
                continue
            sequence = _waiting_row(generation)
            if sequence is not None:
                ready.append((generation, speculation, sequence, 0))
        if not ready:
            return
        groups = self._groups(ready, num_rows)
        while groups:
            members = groups.pop()
            try:
                for (_, speculation, sequence, _), draft in zip(members, _drafts(members)):
                    sequence.draft = speculation.take(draft, step, num_embeddings)
            except Exception as error:
                if is_interrupt(error):
                    raise
                middle = len(members) // 2
                if middle:  # in halves, so that only rows end for which the assistant fails alone
                    groups += [members[:middle], members[middle:]]
                else:
                    fail(members[0][0], error)
        _fit(ready, num_rows)

    def _groups(self, ready: list[Row], num_rows: int) -> list[list[Row]]:
        """Groups rows that draft together; the last group is the first to draft."""
        price_alone = self.costs.price(num_rows)
        alone: list[list[Row]] = []
        together: dict[Assistant, list[Row]] = {}
        for generation, speculation, sequence, _ in ready:
            source = speculation.source
            drafter = source.drafter
            price = price_alone
            most = source.limit
            if drafter is not None:
                price = self.costs.price(num_rows, drafter.seconds_a_token)
                most = drafter.most(source, sequence)
            room = sequence.request.max_num_tokens - sequence.num_tokens - 1
            most = min(most, room)
            if most <= 0:
                continue
            count = speculation.num_wanted(price, most, self._step)
            if not count:
                continue
            row = (generation, speculation, sequence, count)
            if drafter is None:
                alone.append([row])
            else:
                together.setdefault(drafter, []).append(row)
        return [*together.values(), *reversed(alone)]


def _drafts(rows: list[Row]) -> Items[Draft | None]:
    """Drafts for rows of one assistant, or for a row whose source has none."""
    _, speculation, sequence, count = rows[0]
    source = speculation.source
    if source.drafter is None:
        return [source.propose(sequence.token_ids, count)]
    wanted = [(row.source, sequence, count) for _, row, sequence, count in rows]
    drafts: Items[Draft | None] = source.drafter.propose(wanted)
    return drafts


def _total(counts: Items[tuple[int, int, int]]) -> tuple[int, int, int]:
    drafts, proposed, accepted = map(sum, zip(*counts))
    return drafts, proposed, accepted


def _waiting_row(generation: Generation) -> Sequence | None:
    """Returns the row's sequence if the next step computes its last token, else `None`."""
    ((request, index),) = generation.rows
    if request.status is not Status.RUNNING or generation.is_sampling:
        return None
    if index >= len(request.sequences):
        return None
    sequence = request.sequences[index]
    if sequence.num_to_compute != 1 or not sequence.num_computed_tokens:
        return None
    return None if sequence.draft else sequence


def _fit(rows: list[Row], num_rows: int) -> None:
    """Shortens drafts whose lengths adapt if the step's size (`num_rows` plus draft tokens) is at
    least as close to the captured size below as to the captured size that it would be padded to:
    padding is computed, too."""
    drafts: list[list[int]] = []
    for _, speculation, sequence, _ in rows:
        if speculation.length is None:
            num_rows += len(sequence.draft)
        elif sequence.draft:
            drafts.append(sequence.draft)
    total = num_rows + sum(map(len, drafts))
    sizes = map(draft_bucket, range(num_rows, total + 1))
    below = max((size for size in sizes if size <= total), default=num_rows)
    excess = total - max(below, num_rows)
    if excess > draft_bucket(total) - total:
        return
    longest = [(-len(draft), row) for row, draft in enumerate(drafts)]
    heapq.heapify(longest)
    for _ in range(excess):  # the last candidates are the least likely
        length, row = longest[0]
        drafts[row].pop()
        heapq.heapreplace(longest, (length + 1, row))
