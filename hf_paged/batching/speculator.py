"""Speculative decoding of a loop's rows: chooses each row's source of drafts, and drafts before
each step."""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable
from typing import Any

from transformers import PreTrainedModel

from .. import compat, forks
from ..cache.block_manager import UNCACHED
from ..cache.prefix_index import namespace_digest
from ..interrupts import is_interrupt
from ..model.forwards import compute_device
from .decoding.sample import SampleDecoding
from .decoding.speculation import (
    MAX_DRAFT,
    Assistance,
    Draft,
    DraftLength,
    Generated,
    NgramIndex,
    Ngrams,
    Speculation,
    StepCosts,
)
from .execution.assistant import Assistant, AssistantRow
from .execution.graph_keys import draft_bucket
from .execution.mtp import HiddenNamespace, MtpHeads, MtpRow
from .generation import Generation
from .request import Sequence, Status

Fail = Callable[[Generation, Exception], None]


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
        self._assistants: dict[int, Assistant] = {}  # those that have rows
        # guards `_assistants`: other threads' rows end while a row is added
        self._lock = forks.lock()

    def attach(self, generation: Generation) -> None:
        """Gives a generation of one row the source of drafts that its config and its caller ask
        for, if any."""
        decoding = generation.decoding
        assistance = generation.assistance
        if assistance is None or not isinstance(decoding, SampleDecoding):
            return
        if len(generation.rows) != 1 or generation.is_done:
            return
        config = decoding.config
        generator = decoding.generator
        if assistance.is_asked_for(config):
            # sampled rows use transformers' fixed draft lengths: a seed then gives the same tokens,
            # whatever the steps' times
            adapts = not decoding.do_sample
            source: Any
            by_heads = assistance.by_heads(config)
            if by_heads:
                heads = self._heads()
                ((request, _),) = generation.rows
                namespace = request.namespace
                is_hidden = isinstance(namespace, HiddenNamespace)
                if namespace is not UNCACHED and not is_hidden:
                    request.namespace = HiddenNamespace(namespace)
                source = MtpRow(heads, decoding)
                most = heads.depth
                with self._lock:
                    self._assistants[id(heads)] = heads
            elif assistance.is_joint and config.assistant_early_exit is None:
                model = assistance.model
                known = self._assistants.get(id(model))
                assistant = known or self._make_assistant(model)
                source = AssistantRow(assistant, decoding)
                with self._lock:  # its last row may have removed it meanwhile
                    self._assistants[id(model)] = assistant
                most = source.max_draft
            else:
                source, most = self._generated(decoding, assistance)
                adapts |= config.prompt_lookup_num_tokens is not None
            length = DraftLength(most) if adapts else None
            generation.speculation = Speculation(source, most, length, generator)
            generation.rows[0][0].drafts_first = not adapts and not by_heads
        elif assistance.ngrams:
            ((request, _),) = generation.rows
            namespace = request.namespace
            if namespace is UNCACHED:  # shares its n-grams with no other request
                namespace = ("alone", next(self._numbers))
            digest = namespace_digest(namespace)
            source = Ngrams(self._index, request.num_prompt_tokens, digest)
            length = DraftLength(MAX_DRAFT)
            generation.speculation = Speculation(source, MAX_DRAFT, length, generator)
        else:
            return
        self._rows[generation] = generation.speculation

    def _generated(self, decoding: SampleDecoding, assistance: Assistance) -> tuple[Generated, int]:
        """Makes transformers' candidate generator for one row; returns it with its maximal draft
        length."""
        config = decoding.config
        num_lookup_tokens = config.prompt_lookup_num_tokens
        is_lookup = num_lookup_tokens is not None
        generator = compat.candidate_generator(
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
        most = num_lookup_tokens if is_lookup else decoding.max_length
        draws = None
        if decoding.do_sample and not is_lookup:
            draws = decoding.generator
        device = compute_device(self.model)
        source = Generated(generator, device, decoding.do_sample, draws)
        return source, most

    def detach(self, generation: Generation) -> None:
        speculation = self._rows.pop(generation, None)
        if speculation is not None:
            self._ended = _added(self._ended, speculation)
            speculation.source.close()
            with self._lock:
                assistants = self._assistants.items()
                self._assistants = {key: value for key, value in assistants if value.rows}

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of verified drafts, of tokens in them, and of accepted tokens."""
        rows = list(self._rows.values())
        return functools.reduce(_added, rows, self._ended)

    def reclaim(self) -> bool:
        """Frees the blocks of all assistants; returns whether there were any."""
        assistants = list(self._assistants.values())
        num_reclaimed = sum(assistant.reclaim() for assistant in assistants)
        return num_reclaimed > 0

    def change_weights(self) -> None:
        for assistant in list(self._assistants.values()):
            assistant.change_weights()

    def _give(
        self,
        speculation: Speculation,
        sequence: Sequence,
        draft: Draft | None,
        num_embeddings: int,
    ) -> None:
        if draft is not None:  # an assistant may draft tokens for which the model has no embedding
            for position, token in enumerate(draft.tokens):
                if token >= num_embeddings:
                    draft.forget(position)
                    break
        sequence.draft = speculation.take(draft, self._step)

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
        ready: list[tuple[Generation, Speculation, Sequence]] = []
        for generation, speculation in rows:
            if speculation.wake_at > step:
                continue
            waiting = _waiting_row(generation)
            if waiting is not None:
                ready.append((generation, speculation, waiting))
        if not ready:
            return
        price_alone = self.costs.price(num_rows)
        together: dict[Assistant, list[tuple[Generation, Speculation, Sequence, int]]] = {}
        for generation, speculation, sequence in ready:
            source = speculation.source
            request = sequence.request
            num_tokens = sequence.num_tokens
            if isinstance(source, MtpRow) and num_tokens <= request.num_prompt_tokens:
                continue  # as in transformers, these heads draft only after the first new token
            price = price_alone
            most = speculation.most
            if isinstance(source, AssistantRow):
                price = self.costs.price(num_rows, source.assistant.seconds_a_token)
                most = min(source.most, source.assistant.most(sequence))
            room = request.max_num_tokens - num_tokens - 1
            wanted = speculation.num_wanted(price, step)
            count = min(wanted, most, room)
            if count <= 0:
                continue
            if isinstance(source, AssistantRow):
                members = together.setdefault(source.assistant, [])
                members.append((generation, speculation, sequence, count))
                continue
            try:
                draft = source.propose(sequence.token_ids, count)
                self._give(speculation, sequence, draft, num_embeddings)
            except Exception as error:
                if is_interrupt(error):
                    raise
                fail(generation, error)
        groups = list(together.items())
        while groups:
            assistant, members = groups.pop()
            try:
                asked: list[Any] = []
                for _, speculation, sequence, count in members:
                    asked.append((speculation.source, sequence, count))
                drafts = assistant.propose(asked)
            except Exception as error:
                if is_interrupt(error):
                    raise
                middle = len(members) // 2
                if middle:  # in halves, so that only rows end for which the assistant fails alone
                    halves = members[:middle], members[middle:]
                    groups += [(assistant, half) for half in halves]
                else:
                    fail(members[0][0], error)
                continue
            for (_, speculation, sequence, _), draft in zip(members, drafts):
                self._give(speculation, sequence, draft, num_embeddings)
        adapting: list[list[int]] = []
        num_fixed = 0
        for _, speculation, sequence in ready:
            if speculation.length is None:
                num_fixed += len(sequence.draft)
            elif sequence.draft:
                adapting.append(sequence.draft)
        _fit(adapting, num_rows + num_fixed)


def _added(counts: tuple[int, int, int], row: Speculation) -> tuple[int, int, int]:
    drafts, proposed, accepted = counts
    drafts += row.num_drafts
    proposed += row.num_proposed
    accepted += row.num_accepted
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


def _fit(drafts: list[list[int]], num_rows: int) -> None:
    """Shortens drafts if the step's size (`num_rows` plus draft tokens) is at least as close to the
    captured size below as to the captured size that it would be padded to: padding is computed,
    too."""
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
