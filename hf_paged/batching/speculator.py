"""Speculative decoding of a loop's rows: chooses each row's source of drafts, and drafts before each step."""

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
from .execution.graphs import draft_bucket
from .execution.mtp import HiddenNamespace, MtpHeads, MtpRow
from .generation import Generation
from .request import Sequence, Status

Fail = Callable[[Generation, Exception], None]


class Speculator:
    """Drafts tokens for the rows of one loop. `make_assistant` makes the assistant for a model with the same tokens,
    `heads` the model's own multi-token prediction heads."""

    def __init__(
        self,
        model: PreTrainedModel,
        make_assistant: Callable[[PreTrainedModel], Assistant],
        heads: Callable[[], MtpHeads],
    ) -> None:
        self.model, self._make_assistant, self._heads = model, make_assistant, heads
        self._ended = (0, 0, 0)  # `counts` of ended rows
        self.costs = StepCosts()
        self._step = 0
        self._index = NgramIndex()
        self._numbers = itertools.count()
        self._rows: dict[Generation, Speculation] = {}
        self._assistants: dict[int, Assistant] = {}  # those that have rows
        self._lock = forks.lock()  # guards `_assistants`: other threads' rows end while a row is added

    def attach(self, generation: Generation) -> None:
        """Gives a generation of one row the source of drafts that its config and its caller ask for, if any."""
        decoding, assistance = generation.decoding, generation.assistance
        if assistance is None or not isinstance(decoding, SampleDecoding) or len(generation.rows) != 1:
            return
        if generation.is_done:
            return
        config, generator = decoding.config, decoding.generator
        if assistance.is_asked_for(config):
            # sampled rows use transformers' fixed draft lengths: a seed then gives the same tokens, whatever the
            # steps' times
            adapts = not decoding.do_sample
            source: Any
            by_heads = assistance.by_heads(config)
            if by_heads:
                heads = self._heads()
                ((request, _),) = generation.rows
                if request.namespace is not UNCACHED and not isinstance(request.namespace, HiddenNamespace):
                    request.namespace = HiddenNamespace(request.namespace)
                source, most = MtpRow(heads, decoding), heads.depth
                with self._lock:
                    self._assistants[id(heads)] = heads
            elif assistance.is_joint and config.assistant_early_exit is None:
                assistant = self._assistants.get(id(assistance.model)) or self._make_assistant(assistance.model)
                source = AssistantRow(assistant, decoding)
                with self._lock:  # its last row may have removed it meanwhile
                    self._assistants[id(assistance.model)] = assistant
                most = source.max_draft
            else:
                source, most = self._generated(decoding, assistance)
                adapts |= config.prompt_lookup_num_tokens is not None
            generation.speculation = Speculation(source, most, DraftLength(most) if adapts else None, generator)
            generation.rows[0][0].drafts_first = not adapts and not by_heads
        elif assistance.ngrams:
            ((request, _),) = generation.rows
            own = request.namespace is UNCACHED  # shares its n-grams with no other request
            namespace = namespace_digest(("alone", next(self._numbers)) if own else request.namespace)
            source = Ngrams(self._index, request.num_prompt_tokens, namespace)
            generation.speculation = Speculation(source, MAX_DRAFT, DraftLength(MAX_DRAFT), generator)
        else:
            return
        self._rows[generation] = generation.speculation

    def _generated(self, decoding: SampleDecoding, assistance: Assistance) -> tuple[Generated, int]:
        """Makes transformers' candidate generator for one row; returns it with its maximal draft length."""
        config, is_lookup = decoding.config, decoding.config.prompt_lookup_num_tokens is not None
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
        most = config.prompt_lookup_num_tokens if is_lookup else decoding.max_length
        draws = decoding.generator if decoding.do_sample and not is_lookup else None
        return Generated(generator, compute_device(self.model), decoding.do_sample, draws), most

    def detach(self, generation: Generation) -> None:
        speculation = self._rows.pop(generation, None)
        if speculation is not None:
            self._ended = _added(self._ended, speculation)
            speculation.source.close()
            with self._lock:
                self._assistants = {key: found for key, found in self._assistants.items() if found.rows}

    def counts(self) -> tuple[int, int, int]:
        """Returns the numbers of verified drafts, of tokens in them, and of accepted tokens."""
        return functools.reduce(_added, list(self._rows.values()), self._ended)

    def reclaim(self) -> bool:
        """Frees the blocks of all assistants; returns whether there were any."""
        return sum(assistant.reclaim() for assistant in list(self._assistants.values())) > 0

    @property
    def num_lent(self) -> int:
        """Number of blocks that `reclaim` would free."""
        return sum(assistant.blocks.num_used for assistant in list(self._assistants.values()))

    def change_weights(self) -> None:
        for assistant in list(self._assistants.values()):
            assistant.change_weights()

    def _give(self, speculation: Speculation, sequence: Sequence, draft: Draft | None, num_embeddings: int) -> None:
        if draft is not None:  # an assistant may draft tokens for which the model has no embedding
            known = next((place for place, token in enumerate(draft.tokens) if token >= num_embeddings), None)
            if known is not None:
                draft.forget(known)
        sequence.draft = speculation.take(draft, self._step)

    def is_due(self) -> bool:
        """Begins a step; returns whether any row drafts in it."""
        self._step += 1
        step = self._step
        return any(row.wake_at <= step for row in list(self._rows.values()))

    def propose(self, num_embeddings: int, num_rows: int, fail: Fail) -> None:
        """Drafts, before a step of `num_rows` rows, for those that run and have one token to compute. If a source
        raises, `fail` ends its rows."""
        rows = list(self._rows.items())  # a copy: other threads' calls add rows
        awake = [row for row in rows if row[1].wake_at <= self._step]
        ready = [(*row, sequence) for row in awake if (sequence := _waiting_row(row[0])) is not None]
        if not ready:
            return
        price_alone = self.costs.price(num_rows)
        together: dict[Assistant, list[tuple[Generation, Speculation, Sequence, int]]] = {}
        for generation, speculation, sequence in ready:
            source = speculation.source
            if isinstance(source, MtpRow) and sequence.num_tokens <= sequence.request.num_prompt_tokens:
                continue  # as in transformers, these heads draft only after the first new token
            price, most = price_alone, speculation.most
            if isinstance(source, AssistantRow):
                price = self.costs.price(num_rows, source.assistant.seconds_a_token)
                most = min(source.most, source.assistant.most(sequence))
            room = sequence.request.max_num_tokens - sequence.num_tokens - 1
            count = min(speculation.num_wanted(price, self._step), most, room)
            if count <= 0:
                continue
            if isinstance(source, AssistantRow):
                together.setdefault(source.assistant, []).append((generation, speculation, sequence, count))
                continue
            try:
                self._give(speculation, sequence, source.propose(sequence.token_ids, count), num_embeddings)
            except Exception as error:
                fail(generation, error)
        groups = list(together.items())
        while groups:
            assistant, members = groups.pop()
            try:
                drafts = assistant.propose([(each.source, row, n) for _, each, row, n in members])
            except Exception as error:
                middle = len(members) // 2
                if middle:  # in halves, so that only rows end for which the assistant fails alone
                    groups += (assistant, members[:middle]), (assistant, members[middle:])
                else:
                    fail(members[0][0], error)
                continue
            for (_, speculation, sequence, _), draft in zip(members, drafts):
                self._give(speculation, sequence, draft, num_embeddings)
        adapting = [sequence.draft for _, row, sequence in ready if sequence.draft and row.length is not None]
        fixed = sum(len(sequence.draft) for _, row, sequence in ready if row.length is None)
        _fit(adapting, num_rows + fixed)


def _added(counts: tuple[int, int, int], row: Speculation) -> tuple[int, int, int]:
    drafts, proposed, accepted = counts
    return drafts + row.num_drafts, proposed + row.num_proposed, accepted + row.num_accepted


def _waiting_row(generation: Generation) -> Sequence | None:
    """Returns the row's sequence if the next step computes its last token, else `None`."""
    ((request, index),) = generation.rows
    if request.status is not Status.RUNNING or generation.is_sampling or index >= len(request.sequences):
        return None
    sequence = request.sequences[index]
    return sequence if sequence.num_to_compute == 1 and sequence.num_computed_tokens and not sequence.draft else None


def _fit(drafts: list[list[int]], num_rows: int) -> None:
    """Shortens drafts if the step's size (`num_rows` plus draft tokens) is at least as close to the captured size below
    as to the captured size that it would be padded to: padding is computed, too."""
    total = num_rows + sum(map(len, drafts))
    below = max((size for size in map(draft_bucket, range(num_rows, total + 1)) if size <= total), default=num_rows)
    excess = total - max(below, num_rows)
    if excess > draft_bucket(total) - total:
        return
    longest = [(-len(draft), place) for place, draft in enumerate(drafts)]
    heapq.heapify(longest)
    for _ in range(excess):  # the last candidates are the least likely
        length, place = longest[0]
        drafts[place].pop()
        heapq.heapreplace(longest, (length + 1, place))
