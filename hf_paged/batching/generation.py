"""Units of work of a step loop: a decoding, the sequences of its rows, and their state between two
steps. The loop and its ledger advance them."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxTimeCriteria

from .. import compat
from ..cache.sequence_blocks import UNCACHED, SequenceBlocks
from ..config import check_cache_salt
from ..interrupts import is_interrupt
from ..model.own_loop import first_row, tensors_of
from ..model.wrappers import resolve_adapter, use_adapter
from ..seams import Drafter
from ..step import numbers_on
from ..threads import step_lock
from .arguments import Assistance, RequestOptions, as_whole, check_streamed_rows
from .decoding.base import Draft
from .decoding.beam import BeamDecoding
from .decoding.prepare import LoopCall, request_decoding
from .decoding.sample import SampleDecoding
from .decoding.scores import PromptLogprobs
from .execution.prompts import Prompts, prompts_of
from .request import Request, Sequence, Status
from .results import RequestOutput, RequestResult, SequenceResult, TextTracker, Timings, decode

_MAX_PRIORITY = 2**31 - 1  # keeps `Request.key` exact as a float

Output = tuple[dict[int, int], str | None]
"""A position's new tokens, by row, and the first row's text."""


@dataclass(eq=False, repr=False)
class Generation:
    """A decoding and the sequences of its rows: a `generate` call, or one request of an engine
    ([`RequestState`])."""

    decoding: Any  # a `Decoding`
    # for each row of the decoding, its request and the sequence's index in it
    rows: list[tuple[Request, int]]
    keep_blocks: bool = False  # keep the blocks of ended rows, for a cache that `generate` returns
    assistance: Assistance | None = None  # set if its only row, or each part's, is drafted for
    # with `keep_blocks`, by ended row: its blocks and how many tokens they hold
    kept_blocks: dict[int, tuple[SequenceBlocks, int]] = field(default_factory=dict)
    parts: list[Generation] = field(default_factory=list)  # after `split`, one a row
    # tokens of the last step, by row; no entry for beams; several if draft tokens were accepted
    new_tokens: list[dict[int, int]] = field(default_factory=list)
    drafter: Drafter | None = None  # drafts for its only row
    # counts of verified drafts, by the names of `RequestResult`
    draft_counts: Counter[str] = field(default_factory=Counter)
    error: Exception | None = None  # the error that ended it early
    is_closed: bool = False  # its rows need no further step
    # whether it has the logits of all open rows, and no tokens yet
    is_sampling: bool = False
    # whether its reader reads the result alone, and the time of the first token is known
    is_quiet: bool = False
    # the generation that this is a part of
    parent: Generation | None = None
    # logits of rows that wait for other rows
    _logits: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_single = len(self.rows) == 1  # its only row waits for no other

    @property
    def requests(self) -> list[Request]:
        return list(dict.fromkeys(request for request, _ in self.rows))

    @property
    def is_done(self) -> bool:
        return self.is_closed or (bool(self.parts) and all(part.is_done for part in self.parts))

    @property
    def can_split(self) -> bool:
        """Whether it has several requests whose rows can advance independently."""
        return (
            len(self.requests) > 1
            and not (self.parts or self.is_sampling)
            and self.decoding.can_split
        )

    def split(self) -> None:
        """Makes a part of each row, which advances independently; moves blocks and logits to the
        parts."""
        parts = []
        for row, decoding in enumerate(self.decoding.split()):
            part = Generation(decoding, [self.rows[row]], self.keep_blocks, self.assistance)
            part.parent, part.is_closed = self, decoding.is_done
            if row in self.kept_blocks:
                part.kept_blocks[0] = self.kept_blocks[row]
            if row in self._logits and not part.is_closed:
                part._logits[0] = self._logits[row]
            parts.append(part)
        # at once: another thread may read `is_done`
        self.kept_blocks, self._logits, self.parts = {}, {}, parts

    def take_logits(self, logits: Tensor | None, index_by_row: dict[int, int]) -> Tensor | None:
        """Takes a step's logits `(n, vocab)`, of row `r` at `index_by_row[r]`. If all open rows
        have logits now, returns these in order, and drops them; else copies those of the rows that
        wait for others, and returns `None`."""
        rows = self.decoding.open_rows
        if self.is_closed or not rows:
            return None
        if logits is not None and not self._logits and len(index_by_row) == len(rows):
            indices = [index_by_row[row] for row in rows]
            first = indices[0]
            end = first + len(indices)
            if indices == list(range(first, end)):
                return logits[first:end]  # a view needs no copy
            return logits[numbers_on(logits.device, indices)]
        for row, index in index_by_row.items():
            assert logits is not None
            self._logits.setdefault(row, logits[index].clone())
        if len(self._logits) < len(rows):
            return None
        stacked = torch.stack([self._logits[row] for row in rows])
        self._logits = {}
        return stacked

    @property
    def can_repeat(self) -> bool:
        """Whether interrupted sampling can be repeated (`rewind`)."""
        if not self.is_single or self.is_closed:
            return False
        return isinstance(self.decoding, SampleDecoding) and self.decoding.can_repeat

    def rewind(self) -> None:
        """Rewinds the decoding to the tokens that the request has, if it `can_repeat`."""
        assert isinstance(self.decoding, SampleDecoding)
        ((request, index),) = self.rows
        num_tokens = len(request.sequences[index].token_ids)
        self.decoding.rewind(num_tokens - request.num_prompt_tokens)

    @property
    def sequence_to_draft(self) -> Sequence | None:
        """The sequence of its only row if the next step computes its last token, which a draft may
        follow, else `None`."""
        ((request, index),) = self.rows
        if request.status is not Status.RUNNING or self.is_sampling:
            return None
        if index >= len(request.sequences):
            return None
        sequence = request.sequences[index]
        if sequence.num_to_compute != 1 or not sequence.num_computed_tokens:
            return None
        return None if sequence.draft else sequence

    def take_draft(self, draft: Draft) -> None:
        """Has the next step verify a draft of its `sequence_to_draft`."""
        ((request, index),) = self.rows
        self.decoding.draft = draft  # before the scheduler sees the tokens
        request.sequences[index].draft = draft.tokens

    def drop_logits(self) -> None:
        """Drops the logits of rows that wait for other rows; these rows are computed again."""
        self._logits = {}

    def close(self) -> None:
        self._logits, self.is_closed = {}, True

    def draft_by(self, drafter: Drafter) -> None:
        """Before its request is queued: has the drafter draft for its only row, until
        `end_drafts`."""
        self.drafter = drafter
        ((request, _),) = self.rows
        request.drafts_first_token, request.namespace = drafter.attach(self)

    def end_drafts(self) -> None:
        if self.drafter is not None:
            self.drafter.detach(self)


class RequestState(Generation):
    """A request of an engine, whose outputs go to `output_queue`. Raises the errors of
    `PagedEngine.add_request`, except those of the prompt, which its caller has raised."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompt_ids: list[int],
        generation_config: Any,
        options: RequestOptions,
        output_queue: deque[RequestOutput] | list[RequestOutput],
        reports_tokens: bool = True,
    ) -> None:
        takes_ids = options.inputs is None and not model.config.is_encoder_decoder
        adapter = resolve_adapter(model, options.adapter, takes_ids)
        check_cache_salt(options.cache_salt)
        priority = as_whole(
            "priority",
            options.priority,
            -_MAX_PRIORITY,
            _MAX_PRIORITY,
            after=", lower runs earlier",
        )
        self.prompt_ids = prompt_ids
        prepare = functools.partial(
            request_decoding, model, prompt_ids, generation_config, options, tokenizer
        )
        decoding, call = prepare()
        for processor in decoding.logits_processor:
            set_stop_tokens = getattr(processor, "set_stop_tokens", None)  # only grammars have it
            if set_stop_tokens is not None:
                set_stop_tokens(compat.special_token(decoding.config, "eos"))
        check_streamed_rows(options.streamer, decoding.num_rows, "ask for one sequence a request")
        # number of prompt tokens (of the decoder, if the model has an encoder)
        self._start = decoding.length
        tokens = decoding.input_ids[0].tolist()
        namespace = (adapter.namespace, options.cache_salt)
        prompts = None if call is None else _prompts_of(model, call)
        # positions passed as embeddings, without token ids
        num_embedded = 0 if prompts is None else prompts.length - len(tokens)
        sequences = [Sequence([0] * num_embedded + tokens)]
        size = decoding.max_length + num_embedded, decoding.num_rows
        self.request = Request(
            options.request_id,
            sequences,
            *size,
            priority,
            namespace,
            adapter.key,
            adapter.num_bytes,
        )
        if options.prompt_logprobs:
            self.request.prompt_logprobs = PromptLogprobs(tokens, int(options.top_logprobs))
            self.request.namespace = UNCACHED  # the whole prompt must be computed
        self._prepare = prepare if call is not None else None
        if prompts is not None:
            self.request.inputs = prompts, 0
        super().__init__(decoding, [(self.request, index) for index in range(decoding.num_rows)])
        self.assistance = Assistance(
            options.assistant_model, tokenizer, options.assistant_tokenizer
        )
        self.request_id, self.output_queue = options.request_id, output_queue
        self.reports_tokens = reports_tokens  # if not, its reader reads the result alone
        callers = options.stopping_criteria or ()
        self.request.clocks = [
            criterion
            for criterion in decoding.stopping_criteria
            if type(criterion) is MaxTimeCriteria and criterion not in callers
        ]
        self._streamer, self._tokenizer = options.streamer, tokenizer
        self._text = None if tokenizer is None else TextTracker(tokenizer)
        self._added_at = time.perf_counter()
        self._first_token_seconds: float | None = None  # seconds, as in `Timings`
        # an interrupt of the tokenizer, raised after the result is output
        self.interrupt: BaseException | None = None
        self.is_reported = False  # whether its reader has its result
        # the length up to which `outputs` has returned tokens of the open rows; its last outputs
        self._reported: tuple[int, list[Output]] = (self._start, [])

    def prepare_again(self, model: PreTrainedModel) -> None:
        """Prepares the inputs again after the weights changed, encoder outputs included."""
        if self._prepare is not None and self.request.inputs is not None:
            call = self._prepare()[1]
            prompts = self.request.inputs[0]
            assert call is not None
            encodes = compat.MEDIA in prompts.model_kwargs
            prompts.model_kwargs = _prompts_of(model, call).model_kwargs
            if encodes:
                self.encode_media(model)

    def encode_media(self, model: PreTrainedModel) -> None:
        """Encodes images and sound before the prefill, as `generate` does: in a shared prefill, an
        error in one request's media would fail all requests."""
        assert self.request.inputs is not None
        prompts = self.request.inputs[0]
        with step_lock(model), use_adapter(model, self.request.adapter), torch.no_grad():
            prompts.model_kwargs = compat.encode_media(model, prompts.model_kwargs)

    def outputs(self) -> list[Output]:
        """Returns the last step's new tokens with their text, in order; nothing if tokens are not
        reported. Sets `error` if the tokenizer raises. A call that was interrupted can be repeated,
        and returns the same."""
        if self._first_token_seconds is None:
            self._first_token_seconds = time.perf_counter() - self._added_at
        if not self.reports_tokens:
            self.is_quiet = True
            return []
        decoding = self.decoding
        if self._reported[0] == decoding.length:
            return self._reported[1]
        if self.new_tokens and not self.is_single:  # drops padding of rows that ended earlier
            lengths, (new,) = decoding.lengths, self.new_tokens
            self.new_tokens = [
                {row: token for row, token in new.items() if lengths[row] == decoding.length}
            ]
        outputs: list[Output]
        if self._text is None:
            outputs = list(zip(self.new_tokens or [{}], itertools.repeat(None)))
        else:
            outputs = self._with_text(self.new_tokens)
        self._reported = decoding.length, outputs
        return outputs

    def remaining_outputs(self, result: RequestResult) -> list[Output]:
        """Returns the tokens of the result that no output has reported, as `outputs` does: a step
        that failed or was cancelled may have accepted some. The last output has the text that was
        held back."""
        if not self.reports_tokens:
            return []
        rows = (
            []
            if isinstance(self.decoding, BeamDecoding)
            else [sequence.token_ids for sequence in result.sequences]
        )
        num_reported = self._reported[0] - self._start
        by_position = [
            {row: tokens[position] for row, tokens in enumerate(rows) if len(tokens) > position}
            for position in range(num_reported, max(map(len, rows), default=0))
        ]
        try:
            *earlier, (tokens, text) = self._with_text(by_position)
            rest = "" if self._text is None else self._text.rest()
            if rest:
                text = (text or "") + rest
            return [*earlier, (tokens, text)]
        except BaseException as raised:
            self._error_of(raised)
            return [(tokens, None) for tokens in by_position] or [({}, None)]

    def _with_text(self, by_position: list[dict[int, int]]) -> list[Output]:
        """Returns the tokens of consecutive positions with their text. An error of the tokenizer
        becomes `error`, unless there is one already; the tokens from there on have no text. An
        interrupt leaves the text tracker unchanged."""
        outputs: list[Output] = []
        tracker = copy.copy(self._text) if len(by_position) > 1 else self._text
        has_ended = self.decoding.finish_reasons[0] is not None
        for num_done, new in enumerate(by_position or [{}], 1):
            text = None
            if tracker is not None and 0 in new:
                is_last = has_ended and not any(0 in later for later in by_position[num_done:])
                try:
                    text = tracker.add([new[0]], last=is_last)
                except Exception as error:
                    if is_interrupt(error):
                        raise
                    self.error = error if self.error is None else self.error
                    tracker = None
            outputs.append((new, text))
        self._text = tracker
        return outputs

    def _error_of(self, raised: BaseException) -> Exception:
        """Returns the error for the result when the tokenizer has `raised`; stores an interrupt in
        `interrupt`."""
        if isinstance(raised, Exception) and not is_interrupt(raised):
            return raised
        self.interrupt = raised
        return RuntimeError(f"interrupted by {raised!r} while its tokens were decoded")

    def result(self, reason: str | None) -> RequestResult:
        """Makes the result; `reason` is `"cancelled"` or `"error"`, or `None` if the request ended
        by itself. Errors raised here go into the result."""
        sequences: list[SequenceResult] = []
        failure: Exception | None = None
        for _ in range(2):  # memory may be short for a moment only
            try:
                sequences, failure = self._sequences(reason)
                break
            except Exception as caught:  # after an interrupt the decoding may be inconsistent
                if is_interrupt(caught):
                    raise
                failure = caught
        has_tokens = any(sequence.token_ids for sequence in sequences)
        if self._first_token_seconds is None and has_tokens:  # chosen in the step that failed
            self._first_token_seconds = time.perf_counter() - self._added_at
        admitted_at, recorded = self.request.admitted_at, self.request.prompt_logprobs
        queued = None if admitted_at is None else admitted_at - self._added_at
        return RequestResult(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            sequences=sequences,
            error=failure if self.error is None else self.error,
            timings=Timings(
                queued, self._first_token_seconds, time.perf_counter() - self._added_at
            ),
            num_prefix_hit_tokens=self.request.num_hit_tokens,
            num_preemptions=self.request.num_preemptions,
            prompt_logprobs=None if recorded is None else recorded.values,
            prompt_top_logprobs=recorded.top if recorded is not None and recorded.num_top else None,
            **self.draft_counts,
        )

    def end_streamer(self) -> None:
        """After the result is output: ends the streamer, unless the decoding has."""
        if self._streamer is not None and not self.decoding.has_ended_streamer:
            try:
                self._streamer.end()
            except Exception as error:
                if is_interrupt(error):
                    raise

    def _sequences(self, reason: str | None) -> tuple[list[SequenceResult], Exception | None]:
        decoding, ids, scores = self.decoding, self.decoding.input_ids, None
        if isinstance(decoding, BeamDecoding):
            if not decoding.is_done:  # no sequence is final
                return [
                    SequenceResult([], reason or "cancelled") for _ in decoding.finish_reasons
                ], None
            if decoding.finish_reasons[0] is None:
                no_beam = RuntimeError(
                    "no beam could end: the scores contain nan, or too few tokens have a finite one"
                )
                return [SequenceResult([], "error") for _ in decoding.finish_reasons], no_beam
            reason = "error"  # for beams that could not end, if others did
            scores = decoding.returned(decoding.beam_scores).tolist()
            ids = decoding.returned(decoding.sequences)
        results: list[SequenceResult] = []
        failure: Exception | None = None
        for i, (length, ended) in enumerate(zip(decoding.lengths, decoding.finish_reasons)):
            token_ids = ids[i, self._start : length].tolist()
            text = None
            if self._tokenizer is not None and failure is None:
                try:
                    text = decode(self._tokenizer, token_ids)
                except BaseException as raised:
                    failure = self._error_of(raised)
            logprobs, top = None, None
            if decoding.record_logprobs:
                logprobs = [pair for pair, _ in decoding.records[i]]
                if decoding.num_top:
                    top = [others for _, others in decoding.records[i]]
            score = None if scores is None else scores[i]
            results.append(
                SequenceResult(
                    token_ids, ended or reason or "cancelled", text, logprobs, score, top
                )
            )
        return results, failure


def _prompts_of(model: PreTrainedModel, call: LoopCall) -> Prompts:
    """Returns a request's single prompt. Raises `ValueError` if its inputs make several different
    prompts."""
    model_kwargs = call.arguments["model_kwargs"]
    unexpanded = call.unexpanded or (call.arguments["input_ids"], model_kwargs)
    prompts = prompts_of(unexpanded, model_kwargs, model.config.is_encoder_decoder)
    if (count := len(prompts.paddings)) > 1:  # repeated by the model's own `generate`
        tensors = tensors_of((prompts.input_ids, prompts.model_kwargs))
        if any(len(x) == count and bool((x != x[:1]).any()) for x in tensors):
            raise ValueError(f"`inputs` make {count} prompts: pass those of one")
        prompts.model_kwargs = first_row(prompts)
        prompts.input_ids = prompts.input_ids[:1]
        prompts.position_ids = prompts.model_kwargs.get("position_ids")
    prompts.paddings = [0]
    return prompts
