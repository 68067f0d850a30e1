"""Speculative decoding of a loop's rows: chooses each row's source of drafts, and drafts before
each step. The loop runs the steps."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Items
from typing import Any

from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.stopping_criteria import (
    EosTokenCriteria,
    MaxLengthCriteria,
    StopStringCriteria,
)

from .. import compat
from ..batching.arguments import Assistance, option_for_drafts
from ..batching.decoding.base import Draft
from ..batching.decoding.sample import SampleDecoding
from ..batching.decoding.scores import are_row_wise
from ..batching.execution.buckets import draft_bucket
from ..batching.execution.packed import PackedRunner
from ..batching.execution.runner import Runner
from ..batching.factory import UNLIMITED_BLOCKS, make_runner, max_chunk_tokens
from ..batching.generation import Generation
from ..batching.request import Request, Sequence
from ..batching.scheduling.scheduler import Scheduler
from ..cache.block_manager import BlockManager
from ..cache.free_memory import commits_when_touched
from ..cache.memory import PagedMemory
from ..cache.prefix_index import namespace_digest
from ..cache.sequence_blocks import UNCACHED
from ..config import PagedConfig
from ..forks import lazy_property
from ..generation.candidate import Candidate
from ..interrupts import is_interrupt
from ..model.capability import Capability
from ..model.forwards import compute_device
from ..model.rope import find_length_rope
from ..model.structure import overridden
from ..topics import Topic
from .assistant import Assistant, AssistantRow, assistant_cache, can_batch_rows
from .mtp import HiddenNamespace, MtpHeads, reason_against_mtp, uses_mtp
from .sources import CandidateSource, DraftLength, NgramIndex, NgramSource, Source, StepCosts

DraftRow = tuple[Generation, Source, Sequence, int]
"""A row that may draft in this step, and the number of tokens to draft (0 until that is chosen)."""


def reasons_against_call(call: Candidate, assistance: Assistance) -> Iterator[str]:
    """Yields the reasons why the engine cannot draft for the rows of a `generate` call with
    assisted decoding. The caller reports the first."""
    model = call.model
    config = call.config
    num_rows = len(call.paddings)
    is_single_row = num_rows == 1
    returns_scores = config.return_dict_in_generate and (
        config.output_scores or config.output_logits
    )
    layout_reason = call.layout.reason_against_drafts
    reasons = {
        Topic.RANKS("each rank would choose draft lengths by its own clock"): (
            compat.shard_ranks(model) is not None
        ),
        Topic.ASSISTED("a single row is sampled or streamed, so transformers' own loop drafts"): (
            is_single_row and (config.do_sample or call.streamer is not None)
        ),
        # for example guidance, whose own cache would lack the rejected drafts
        Topic.ASSISTED(
            "a processor that may keep state must see rejected drafts, as in transformers' own loop"
        ): is_single_row and not are_row_wise(call.inputs.logits_processor, num_rows),
        Topic.ASSISTED("transformers' own loop checks a criterion only after each draft"): (
            is_single_row and not _can_end_within_drafts(call, assistance)
        ),
        Topic.ASSISTED("`output_scores` or `output_logits` is set"): returns_scores,
        str(layout_reason): layout_reason is not None,
        Topic.INPUTS("prompts are more than token ids"): call.prompts is not None,
        Topic.ASSISTED("rotary factors depend on a row's length"): (
            find_length_rope(model, model.modules()) is not None
        ),
    }
    yield from itertools.compress(reasons, reasons.values())
    if not is_single_row and not SampleDecoding(call.inputs, call.streamer).can_split:
        yield Topic.ASSISTED("a processor or criterion of the caller sees all rows at once")
    yield from filter(None, [reason_against(model, config, assistance)])


def _can_end_within_drafts(call: Candidate, assistance: Assistance) -> bool:
    """Whether transformers' loop ends a row wherever the call's criteria end it, even within a
    draft. That loop applies only the config's maximum length and EOS tokens to each token. The
    config's stop strings also count if a model drafts, since transformers refuses such calls."""
    config = call.config
    eos = compat.special_token(config, "eos")
    is_lookup = assistance.assistant_model is None and config.assistant_early_exit is None
    is_refused = config.stop_strings is not None and not is_lookup
    for criterion in call.inputs.stopping_criteria:
        kind = type(criterion)
        if kind is MaxLengthCriteria:
            is_applied = criterion.max_length >= config.max_length
        elif kind is StopStringCriteria:
            is_applied = is_refused
        else:
            is_applied = kind is EosTokenCriteria and criterion.eos_token_id is eos
        if not is_applied:
            return False
    return True


def reason_against(model: PreTrainedModel, config: Any, assistance: Assistance) -> str | None:
    """Returns why the engine cannot draft for rows with this generation config, whatever their
    layout; `None` if it can."""
    assistant = assistance.assistant_model
    method = overridden(model, compat.ASSISTED_DECODING)
    if method is not None:
        return Topic.ASSISTED(f"it overrides `{method}`")
    if config.speculation_type is not None:
        return Topic.ASSISTED("`speculation_type` drafts from hidden states, for one row per call")
    if config.assistant_ensemble_weight is not None:
        return Topic.ASSISTED("`assistant_ensemble_weight` changes which drafts are accepted")
    if uses_mtp(config):
        return reason_against_mtp(model)
    if assistant is None:
        return None
    if type(assistant).__name__.startswith(compat.TARGET_CACHE_ASSISTANTS):
        return Topic.ASSISTED("the assistant reads the target's keys and values")
    if assistant.config.is_encoder_decoder:
        return Topic.ASSISTED("the assistant has an encoder")
    if not can_batch_rows(assistance, config):
        return None
    cache = assistant_cache(assistant, PagedMemory(PagedConfig()))
    layout = Capability(assistant, cache, make_runner).choose_layout()
    if layout.unsupported_reason is None:
        return None
    return Topic.ASSISTED(f"the assistant: {layout.unsupported_reason}")


class Speculator:
    """The drafter ([`hf_paged.seams.Drafter`]) of a loop: chooses each row's source of drafts, and
    which rows draft together."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        memory: PagedMemory,
        runner: Runner,
        scheduler: Scheduler,
        make_runner: Callable[..., tuple[BlockManager, Runner]],
    ) -> None:
        self.model = model
        self._make_runner = make_runner
        self._config = config
        self._memory = memory
        self._runner = runner
        self._scheduler = scheduler
        self.costs = StepCosts()
        self._step = 0  # number of the current step
        self._index = NgramIndex()
        self._uncached_numbers = itertools.count()
        self.rows: dict[Generation, Source] = {}

    def attach(self, generation: Generation) -> tuple[bool, Hashable]:
        """Implements `Drafter.attach`: creates the source of drafts that the row's generation
        config and `assistance` select; by default, n-grams."""
        ((request, _),) = generation.rows
        decoding = generation.decoding
        assistance = generation.assistance
        assert assistance is not None
        config = decoding.config
        namespace = request.namespace
        # Sampled rows use transformers' draft lengths, since their tokens depend on these lengths.
        # With adaptive lengths, tokens would depend on the times of steps.
        has_adaptive_length = not decoding.do_sample
        drafts_first_token = False
        source: Source
        if option_for_drafts(config, assistance.assistant_model) is None:
            source = self._ngram_source(request)
            has_adaptive_length = True
        elif uses_mtp(config):
            if namespace is not UNCACHED and not isinstance(namespace, HiddenNamespace):
                namespace = HiddenNamespace(namespace)
            source = AssistantRow(self._heads, decoding)
        else:
            if can_batch_rows(assistance, config):
                source = AssistantRow(self._assistant_of(assistance.assistant_model), decoding)
            else:
                source = self._candidate_source(decoding, assistance)
                has_adaptive_length |= config.prompt_lookup_num_tokens is not None
            drafts_first_token = not has_adaptive_length
        source.adaptive_length = DraftLength() if has_adaptive_length else None
        self.rows[generation] = source
        return drafts_first_token, namespace

    @lazy_property
    def _heads(self) -> MtpHeads:
        assert isinstance(self._runner, PackedRunner)
        return MtpHeads(self._runner, self._scheduler)

    def _assistant_of(self, model: PreTrainedModel) -> Assistant:
        """Returns the assistant with this model; creates it if no row has it yet."""
        for assistant in self._assistants:
            if assistant.model is model:
                return assistant
        config = self._config
        cache = assistant_cache(model, self._memory)
        layout = Capability(model, cache, make_runner).choose_layout()
        blocks_and_runner = self._make_runner(model, cache, layout)
        if commits_when_touched(compute_device(model)):
            # reserves all memory at once: growing it would copy blocks and discard recordings
            cache.reserve(config.num_blocks or UNLIMITED_BLOCKS, config.max_num_seqs)
        max_tokens = self._scheduler.max_num_batched_tokens
        max_tokens = min(max_tokens, max_chunk_tokens(self.model, config) or max_tokens)
        return Assistant(
            model, cache, blocks_and_runner, self._scheduler, max_tokens, layout.max_positions
        )

    @property
    def _assistants(self) -> list[Assistant]:
        """The assistants that have rows."""
        # from a copy, since another thread may end a row meanwhile
        assistants = [source.assistant for source in list(self.rows.values())]
        return [assistant for assistant in dict.fromkeys(assistants) if assistant is not None]

    def _ngram_source(self, request: Request) -> NgramSource:
        namespace = request.namespace
        if namespace is UNCACHED:  # a new namespace: the request shares its n-grams with no other
            namespace = ("uncached", next(self._uncached_numbers))
        digest = namespace_digest(namespace)
        return NgramSource(self._index, request.num_prompt_tokens, digest)

    def _candidate_source(
        self, decoding: SampleDecoding, assistance: Assistance
    ) -> CandidateSource:
        """Returns a source that drafts for one row with transformers' candidate generator."""
        config = decoding.config
        num_lookup_tokens = config.prompt_lookup_num_tokens
        is_lookup = num_lookup_tokens is not None
        processors = LogitsProcessorList(
            processor
            for processor in decoding.logits_processor
            # leaves out a grammar's processor, which must read the target's tokens in order
            if not hasattr(processor, "set_stop_tokens")
        )
        strategy = compat.candidate_generator(
            self.model,
            generation_config=config,
            input_ids=decoding.input_ids,
            inputs_tensor=decoding.input_ids,
            logits_processor=None if is_lookup else processors,
            model_kwargs={"use_cache": True},
            assistant_model=assistance.assistant_model,
            target_tokenizer=assistance.tokenizer,
            assistant_tokenizer=assistance.assistant_tokenizer,
        )
        limit = num_lookup_tokens if is_lookup else decoding.max_length
        return CandidateSource(
            strategy, limit, compute_device(self.model), decoding.do_sample, decoding.generator
        )

    def detach(self, generation: Generation) -> None:
        source = self.rows.pop(generation, None)
        if source is not None:
            source.close()

    def note_verified(
        self, generation: Generation, num_draft_tokens: int, num_accepted: int
    ) -> None:
        source = self.rows.get(generation)
        if source is not None:
            if source.adaptive_length is not None:
                source.adaptive_length.observe(num_draft_tokens, num_accepted)
            source.observe(generation.sequence().token_ids, num_accepted)

    def note_decode_time(self, num_tokens: int, seconds: float) -> None:
        self.costs.observe(num_tokens, seconds)

    def reclaim(self) -> bool:
        """Frees the blocks of all assistants; returns whether there were any."""
        num_reclaimed = sum(assistant.reclaim() for assistant in self._assistants)
        return num_reclaimed > 0

    def handle_weight_change(self) -> None:
        for assistant in self._assistants:
            assistant.handle_weight_change()

    def propose(
        self, num_embeddings: int, num_rows: int
    ) -> list[tuple[Generation, Draft | Exception]]:
        """Implements `Drafter.propose`. Returns the error of a row whose source raises one."""
        self._step += 1
        step = self._step
        candidates: list[DraftRow] = []
        for generation, source in list(self.rows.items()):  # calls of other threads may add rows
            if source.resume_step > step:
                continue
            sequence = generation.sequence_to_draft
            if sequence is not None:
                candidates.append((generation, source, sequence, 0))
        if not candidates:
            return []
        drafts: dict[Generation, Draft] = {}
        errors: list[tuple[Generation, Draft | Exception]] = []
        groups = self._group_rows(candidates, num_rows)
        while groups:
            rows = groups.pop()
            try:
                for (generation, source, _, _), proposed_draft in zip(rows, _draft_rows(rows)):
                    draft = source.prepare(proposed_draft, step, num_embeddings)
                    if draft is not None:
                        drafts[generation] = draft
            except Exception as error:
                if is_interrupt(error):
                    raise
                middle = len(rows) // 2
                if middle:  # halve the group, so that only rows that cause the error end
                    groups += [rows[:middle], rows[middle:]]
                else:
                    errors.append((rows[0][0], error))
        source_drafts = [
            (source, drafts[generation].tokens)
            for generation, source, *_ in candidates
            if generation in drafts
        ]
        _shorten_drafts(source_drafts, num_rows)
        return [*errors, *drafts.items()]

    def _group_rows(self, candidates: list[DraftRow], num_rows: int) -> list[list[DraftRow]]:
        """Returns the rows that draft, with the numbers of tokens to draft, in groups that draft
        together: the rows of one assistant, or one row without an assistant. The last group drafts
        first."""
        price_without_assistant = self.costs.price(num_rows)
        single_rows: list[list[DraftRow]] = []
        rows_by_assistant: dict[Assistant, list[DraftRow]] = {}
        for generation, source, sequence, _ in candidates:
            assistant = source.assistant
            price = price_without_assistant
            max_tokens = source.max_tokens
            if assistant is not None:
                price = self.costs.price(num_rows, assistant.seconds_per_token)
                max_tokens = assistant.max_draft_tokens(source, sequence)
            max_tokens = min(max_tokens, sequence.max_draft_tokens)
            if max_tokens <= 0:
                continue
            count = source.num_to_draft(price, max_tokens, self._step)
            if not count:
                continue
            row = (generation, source, sequence, count)
            if assistant is None:
                single_rows.append([row])
            else:
                rows_by_assistant.setdefault(assistant, []).append(row)
        return [*rows_by_assistant.values(), *reversed(single_rows)]


def _draft_rows(rows: list[DraftRow]) -> Items[Draft | None]:
    """Returns drafts for the rows of one group, in order."""
    _, source, sequence, count = rows[0]
    if source.assistant is None:
        return [source.propose(sequence.token_ids, count)]
    drafts: Items[Draft | None] = source.assistant.propose([row[1:] for row in rows])
    return drafts


def _shorten_drafts(drafts: list[tuple[Source, list[int]]], num_rows: int) -> None:
    """Shortens drafts of adaptive length until the step has the next smaller recorded size, unless
    the next larger size is closer. The step would be padded to that size, and padding costs as much
    as tokens. A step's size is `num_rows` plus the number of all draft tokens."""
    adaptive_drafts: list[list[int]] = []
    for source, tokens in drafts:
        if source.adaptive_length is None:
            num_rows += len(tokens)
        else:
            adaptive_drafts.append(tokens)
    total = num_rows + sum(map(len, adaptive_drafts))
    sizes = map(draft_bucket, range(num_rows, total + 1))
    smaller_size = max((size for size in sizes if size <= total), default=num_rows)
    excess = total - max(smaller_size, num_rows)
    if excess > draft_bucket(total) - total:
        return
    longest = [(-len(tokens), index) for index, tokens in enumerate(adaptive_drafts)]
    heapq.heapify(longest)
    for _ in range(excess):  # the last tokens of the longest drafts are least likely to be accepted
        negative_length, index = longest[0]
        adaptive_drafts[index].pop()
        heapq.heapreplace(longest, (negative_length + 1, index))
