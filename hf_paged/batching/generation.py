"""`Generation`, the unit of work of a step loop: a decoding, the sequences of its rows, and the
state of both between two steps. The loop and its ledger advance generations."""

from __future__ import annotations

import copy
import functools
import itertools
import time
from collections import Counter, deque
from dataclasses import dataclass, field, replace
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
from .decoding.prepare import LoopCall, request_decoding
from .decoding.scores import PromptLogprobs
from .execution.prompts import Prompts, prompts_of
from .request import Request, Sequence, Status
from .results import RequestOutput, RequestResult, SequenceResult, TextTracker, Timings, decode

_MAX_PRIORITY = 2**31 - 1  # keeps `Request.sort_key` exact as a float


@dataclass(eq=False, repr=False)
class Generation:
    """A decoding and the sequences of its rows: a `generate` call, or one request of an engine
    ([`RequestState`])."""

    decoding: Any  # a `Decoding`
    # by row of the decoding: its request, and the index of its sequence in the request
    rows: list[tuple[Request, int]]
    keep_blocks: bool = False  # whether ended rows keep blocks, for a cache that `generate` returns
    # set if a drafter may draft for its only row or, after `split`, for the row of each part
    assistance: Assistance | None = None
    # with `keep_blocks`, by ended row: its blocks, and the number of tokens in them
    kept_blocks: dict[int, tuple[SequenceBlocks, int]] = field(default_factory=dict)
    parts: list[Generation] = field(default_factory=list)  # after `split`, one per row
    drafter: Drafter | None = None  # attached to its only row (`attach_drafter`)
    # counts of verified drafts and of their tokens, by field of `RequestResult`; parts share it
    draft_counts: Counter[str] = field(default_factory=Counter)
    error: Exception | None = None  # the error that ended it early
    is_closed: bool = False  # whether it has ended: its rows need no further step
    # whether the logits of all open rows are computed, and their tokens are not appended yet
    is_sampling: bool = False
    # whether the loop reports only its end; set once the time of the first token is recorded, if
    # the reader needs only the result
    skips_reports: bool = False
    parent: Generation | None = None  # the generation that was split into this part and others
    # by row, `(vocab,)` logits of rows that wait for other rows
    _logits: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.is_single = len(self.rows) == 1  # its only row never waits for other rows

    @property
    def requests(self) -> list[Request]:
        """The requests of its rows, without duplicates."""
        return list(dict.fromkeys(request for request, _ in self.rows))

    def sequence(self, row: int = 0) -> Sequence:
        """Returns the sequence of a row, which exists once the request's prompt is computed."""
        request, index = self.rows[row]
        return request.sequences[index]

    @property
    def is_done(self) -> bool:
        """Whether the generation is closed, or all of its parts are done."""
        return self.is_closed or (bool(self.parts) and all(part.is_done for part in self.parts))

    @property
    def can_split(self) -> bool:
        """Whether the generation has several requests whose rows can advance independently."""
        if self.parts or self.is_sampling:
            return False
        return self.decoding.can_split and len(self.requests) > 1

    def split(self) -> None:
        """Makes a part for each row, so that the rows advance independently, and moves kept blocks
        and logits to the parts."""
        parts = []
        for row, decoding in enumerate(self.decoding.split()):
            part = Generation(
                decoding,
                [self.rows[row]],
                self.keep_blocks,
                self.assistance,
                draft_counts=self.draft_counts,
                is_closed=decoding.is_done,
                parent=self,
            )
            if row in self.kept_blocks:
                part.kept_blocks[0] = self.kept_blocks[row]
            if row in self._logits and not part.is_closed:
                part._logits[0] = self._logits[row]
            parts.append(part)
        # `parts` is assigned once it is complete, since another thread may read `is_done`
        self.kept_blocks, self._logits, self.parts = {}, {}, parts

    def take_logits(self, logits: Tensor | None, index_by_row: dict[int, int]) -> Tensor | None:
        """Takes a step's logits `(n, vocab)`; row `r` has the logits at index `index_by_row[r]`. If
        all open rows now have logits, returns them in the order of `open_rows`, `(len(open_rows),
        vocab)`, and keeps none. Otherwise keeps copies of the new ones and returns `None`. Also
        returns `None` if no row is open."""
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
        stacked_logits = torch.stack([self._logits[row] for row in rows])
        self._logits = {}
        return stacked_logits

    @property
    def can_repeat(self) -> bool:
        """Whether an interrupted sampling can be undone (`rewind`) and repeated."""
        return not self.is_closed and self.decoding.can_repeat

    def rewind(self) -> None:
        """Drops the decoding's tokens that are not in the request's sequence. Requires
        `can_repeat`."""
        sequence = self.sequence()
        self.decoding.rewind(sequence.num_tokens - sequence.request.num_prompt_tokens)

    @property
    def sequence_to_draft(self) -> Sequence | None:
        """The sequence of its only row, if the next step would compute only the sequence's last
        token and can verify a draft of the tokens after it; otherwise `None`."""
        ((request, index),) = self.rows
        if request.status is not Status.RUNNING or self.is_sampling:
            return None
        if index >= len(request.sequences):
            return None
        sequence = request.sequences[index]
        is_decode = sequence.num_to_compute == 1 and sequence.num_computed_tokens
        return sequence if is_decode and not sequence.draft else None

    def set_draft(self, draft: Draft) -> None:
        """Sets the draft that the next step verifies for its only row. Requires that
        `sequence_to_draft` is not `None`."""
        self.decoding.draft = draft  # first, since the scheduler reads the sequence's draft
        self.sequence().draft = draft.tokens

    def drop_logits(self) -> None:
        """Drops the logits of rows that wait for other rows. The caller makes sure that these rows
        are recomputed."""
        self._logits = {}

    def close(self) -> None:
        """Marks the generation as closed, and drops its logits."""
        self._logits, self.is_closed = {}, True

    def fail(self, error: BaseException) -> None:
        """Sets the error that ends the generation: for an interrupt, a `RuntimeError`."""
        if not isinstance(error, Exception) or is_interrupt(error):
            error = interruption_error(error)
        self.error = error

    def attach_drafter(self, drafter: Drafter) -> None:
        """Makes the drafter draft for the generation's only row, until `detach_drafter`. Called
        before the request is queued."""
        self.drafter = drafter
        ((request, _),) = self.rows
        request.drafts_first_token, request.namespace = drafter.attach(self)

    def detach_drafter(self) -> None:
        if self.drafter is not None:
            self.drafter.detach(self)


class RequestState(Generation):
    """An engine's request. Its outputs go to `output_queue`. The constructor raises the errors of
    `PagedEngine.add_request` for the generation config and the options; the caller has checked the
    form of the prompt."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompt_ids: list[int],
        generation_config: Any,
        options: RequestOptions,
        output_queue: deque[RequestOutput] | list[RequestOutput],
        reports_tokens: bool,
    ) -> None:
        has_only_ids = options.inputs is None and not model.config.is_encoder_decoder
        adapter = resolve_adapter(model, options.adapter, has_only_ids)
        check_cache_salt(options.cache_salt)
        priority = as_whole(
            "priority",
            options.priority,
            -_MAX_PRIORITY,
            _MAX_PRIORITY,
            after=" (lower runs earlier)",
        )
        self.prompt_ids = prompt_ids
        prepare = functools.partial(
            request_decoding, model, prompt_ids, generation_config, options, tokenizer
        )
        decoding, call = prepare()
        for processor in decoding.logits_processor:
            # only the processors of grammars have this method
            set_stop_tokens = getattr(processor, "set_stop_tokens", None)
            if set_stop_tokens is not None:
                set_stop_tokens(compat.special_token(decoding.config, "eos"), decoding.has_beams)
        check_streamed_rows(options.streamer, decoding.num_rows, "ask for one sequence per request")
        # number of prompt tokens with ids; if the model has an encoder, of the decoder's prompt
        self._prompt_length = decoding.length
        tokens = decoding.input_ids[0].tolist()
        prompts = None if call is None else _single_prompt(model, call)
        # number of prompt positions that are passed as embeddings, without token ids
        num_embedded = 0 if prompts is None else prompts.length - len(tokens)
        prompt_logprobs = None
        if options.prompt_logprobs:
            prompt_logprobs = PromptLogprobs(tokens, int(options.top_logprobs))
        callers_criteria = options.stopping_criteria or ()
        self.request = Request(
            options.request_id,
            [Sequence([0] * num_embedded + tokens)],
            decoding.max_length + num_embedded,
            decoding.num_rows,
            priority,
            # for log-probabilities, the whole prompt must be computed
            UNCACHED if options.prompt_logprobs else (adapter.namespace, options.cache_salt),
            adapter.key,
            adapter.num_bytes,
            inputs=None if prompts is None else (prompts, 0),
            time_criteria=[
                criterion
                for criterion in decoding.stopping_criteria
                if type(criterion) is MaxTimeCriteria and criterion not in callers_criteria
            ],
            prompt_logprobs=prompt_logprobs,
        )
        self._prepare = prepare
        super().__init__(decoding, [(self.request, index) for index in range(decoding.num_rows)])
        self.assistance = Assistance(
            options.assistant_model, tokenizer, options.assistant_tokenizer
        )
        self.request_id, self.output_queue = options.request_id, output_queue
        self.reports_tokens = reports_tokens  # if false, only the result is reported
        self._streamer, self._tokenizer = options.streamer, tokenizer
        self._added_at = time.perf_counter()
        self._first_token_seconds: float | None = None  # as in `Timings.first_token`
        # an interrupt that came while the tokenizer decoded the result; `EngineCore.end` raises it
        # after queueing the result
        self.interrupt: BaseException | None = None
        self.is_reported = False  # whether its result is in `output_queue`
        # the decoding's length at the last call of `outputs`, the outputs that it returned, and the
        # text tracker after them (`None` without text); one tuple, so that an interrupt leaves all
        # three unchanged or none
        tracker = None if tokenizer is None else TextTracker(tokenizer)
        self._last_report: tuple[int, list[RequestOutput], TextTracker | None]
        self._last_report = self._prompt_length, [], tracker

    def prepare_again(self, model: PreTrainedModel) -> None:
        """Prepares the prompt's inputs again, including encoder outputs, after the weights
        changed."""
        if self.request.inputs is not None:
            prompts = self.request.inputs[0]
            _, call = self._prepare()
            assert call is not None
            has_encoded_media = compat.MEDIA in prompts.model_kwargs
            prompts.model_kwargs = _single_prompt(model, call).model_kwargs
            if has_encoded_media:
                self.encode_media(model)

    def encode_media(self, model: PreTrainedModel) -> None:
        """Encodes the prompt's images and videos, if `generate` does so before the model's first
        forward. Called before the prefill, so that the caller gets the errors of the encoders."""
        assert self.request.inputs is not None
        prompts = self.request.inputs[0]
        with step_lock(model), use_adapter(model, self.request.adapter), torch.no_grad():
            prompts.model_kwargs = compat.encode_media(model, prompts.model_kwargs)

    def outputs(self) -> list[RequestOutput]:
        """Returns outputs, in order, of the tokens that no earlier output has reported, with their
        text; an empty list if tokens are not reported. Sets `error` if the tokenizer raises.
        Repeated calls in a step, even after an interrupted call, return the same outputs."""
        if self._first_token_seconds is None:
            self._first_token_seconds = time.perf_counter() - self._added_at
        if not self.reports_tokens:
            self.skips_reports = True
            return []
        decoding = self.decoding
        num_reported, outputs, tracker = self._last_report
        if num_reported == decoding.length:
            return outputs
        sequences = self.request.sequences
        if tracker is None and self.is_single:  # as below, but with few Python calls
            outputs = []
            for token in sequences[0].token_ids[num_reported - decoding.length :]:
                outputs.append(RequestOutput(self.request_id, {0: token}))
        else:
            sequences = [] if decoding.has_beams else sequences
            num_embedded = self.request.num_prompt_tokens - self._prompt_length
            first = num_embedded + num_reported
            token_rows = []
            for sequence, length in zip(sequences, decoding.lengths):
                token_rows.append(sequence.token_ids[first : num_embedded + length])
            is_last = decoding.finish_reasons[0] is not None
            outputs, tracker = self._with_text(_by_position(token_rows), is_last)
        self._last_report = decoding.length, outputs, tracker
        return outputs

    def remaining_outputs(self, result: RequestResult) -> list[RequestOutput]:
        """Returns outputs of the result's tokens that no output has reported: there may be some if
        a step failed, or if the request was cancelled during a step. The last output includes the
        text that the text tracker has held back. If the tokenizer raises, the remaining tokens have
        no text, and the result, which already exists, does not get the error. After an interrupt,
        which is stored in `interrupt`, no token has text."""
        if not self.reports_tokens:
            return []
        sequences = [] if self.decoding.has_beams else result.sequences
        num_reported = self._last_report[0] - self._prompt_length
        tokens_by_position = _by_position(
            [sequence.token_ids[num_reported:] for sequence in sequences]
        )
        try:
            return self._with_text(tokens_by_position, is_last=True)[0]
        except BaseException as error:
            self._result_error(error)
            return [RequestOutput(self.request_id, tokens) for tokens in tokens_by_position]

    def _with_text(
        self, tokens_by_position: list[dict[int, int]], is_last: bool
    ) -> tuple[list[RequestOutput], TextTracker | None]:
        """Returns an output for each of these consecutive positions, with its tokens and text, and
        the text tracker after them. With `is_last`, the last output gets the text that the tracker
        has held back. If the tokenizer raises, sets `error`, unless it is already set; the
        remaining outputs then have no text, and the tracker is `None`."""
        outputs = [RequestOutput(self.request_id, tokens) for tokens in tokens_by_position or [{}]]
        tracker = copy.copy(self._last_report[2])
        if tracker is None:
            return outputs, None
        try:
            for output in outputs:
                if 0 in output.new_tokens:
                    output.text = tracker.add([output.new_tokens[0]])
            if is_last and (held_text := tracker.flush()):
                outputs[-1].text = (outputs[-1].text or "") + held_text
        except Exception as error:
            if is_interrupt(error):
                raise
            self.error = error if self.error is None else self.error
            tracker = None
        return outputs, tracker

    def _result_error(self, error: BaseException) -> Exception:
        """Returns the error that the result holds after the tokenizer raised `error`: a
        `RuntimeError` for an interrupt, which is stored in `interrupt`; otherwise `error`."""
        if isinstance(error, Exception) and not is_interrupt(error):
            return error
        self.interrupt = error
        return RuntimeError(
            f"interrupted by {error!r} while the request's tokens were being decoded"
        )

    def result(self, reason: str) -> RequestResult:
        """Returns the result. `reason`, `"cancelled"` or `"error"`, is the finish reason of
        sequences that have none. An error that occurs here becomes the result's error, unless
        `error` is set. An interrupt of the tokenizer is stored in `interrupt`; other interrupts are
        raised."""
        sequences: list[SequenceResult] = []
        failure: Exception | None = None
        for _ in range(2):  # a lack of memory may be momentary
            try:
                sequences, failure = self._sequence_results(reason)
                break
            except Exception as error:  # from a decoding that an interrupt left broken, for example
                if is_interrupt(error):
                    raise
                failure = error
        has_tokens = any(sequence.token_ids for sequence in sequences)
        if self._first_token_seconds is None and has_tokens:  # a failed step sampled the first one
            self._first_token_seconds = time.perf_counter() - self._added_at
        admitted_at, logprobs = self.request.first_step_started_at, self.request.prompt_logprobs
        queued_seconds = None if admitted_at is None else admitted_at - self._added_at
        return RequestResult(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            sequences=sequences,
            error=failure if self.error is None else self.error,
            timings=Timings(
                queued_seconds, self._first_token_seconds, time.perf_counter() - self._added_at
            ),
            num_prefix_hit_tokens=self.request.num_hit_tokens,
            num_preemptions=self.request.num_preemptions,
            prompt_logprobs=None if logprobs is None else logprobs.values,
            prompt_top_logprobs=logprobs.alternatives
            if logprobs is not None and logprobs.num_alternatives
            else None,
            **self.draft_counts,
        )

    def end_streamer(self) -> None:
        """Ends the streamer, unless the decoding has ended it. Ignores its errors, but raises
        interrupts. Called after the result is queued."""
        if self._streamer is not None and not self.decoding.has_ended_streamer:
            try:
                self._streamer.end()
            except Exception as error:
                if is_interrupt(error):
                    raise

    def _sequence_results(self, reason: str) -> tuple[list[SequenceResult], Exception | None]:
        """Returns the results of the sequences, and an error if beam search finished no sequence or
        the tokenizer raised. `reason` as in `result`."""
        decoding, ids, scores = self.decoding, self.decoding.input_ids, None
        if decoding.has_beams:
            if not decoding.is_done:  # no beam is final
                return [SequenceResult([], reason) for _ in decoding.finish_reasons], None
            if decoding.finish_reasons[0] is None:
                no_beam_error = RuntimeError(
                    "no beam could end: the scores contain nan, or too few tokens have a finite"
                    " score"
                )
                return [SequenceResult([], "error") for _ in decoding.finish_reasons], no_beam_error
            reason = "error"  # for beams that could not end although others did
            ids, scores = decoding.final()
        results: list[SequenceResult] = []
        failure: Exception | None = None
        ends = zip(decoding.lengths, decoding.finish_reasons)
        for index, (length, finish_reason) in enumerate(ends):
            token_ids = ids[index, self._prompt_length : length].tolist()
            text = None
            if self._tokenizer is not None and failure is None:
                try:
                    text = decode(self._tokenizer, token_ids)
                except BaseException as error:
                    failure = self._result_error(error)
            logprobs, top_logprobs = None, None
            if decoding.record_logprobs:
                logprobs = [pair for pair, _ in decoding.records[index]]
                if decoding.num_alternatives:
                    top_logprobs = [alternatives for _, alternatives in decoding.records[index]]
            score = None if scores is None else scores[index]
            results.append(
                SequenceResult(
                    token_ids, finish_reason or reason, text, logprobs, score, top_logprobs
                )
            )
        return results, failure


def _by_position(token_rows: list[list[int]]) -> list[dict[int, int]]:
    """Returns, for each position, a dict from each row that has a token there to the token."""
    return [
        {row: token for row, token in enumerate(column) if token is not None}
        for column in itertools.zip_longest(*token_rows)
    ]


def interruption_error(cause: BaseException) -> RuntimeError:
    """Returns the error for a generation whose sampling was stopped by `cause`."""
    return RuntimeError(f"interrupted by {cause!r} while the request's next token was being chosen")


def _single_prompt(model: PreTrainedModel, call: LoopCall) -> Prompts:
    """Returns the single prompt of a request. Raises `ValueError` if the inputs hold several
    different prompts."""
    model_kwargs = call.arguments["model_kwargs"]
    unexpanded = call.unexpanded or (call.arguments["input_ids"], model_kwargs)
    prompts = prompts_of(unexpanded, model_kwargs, model.config.is_encoder_decoder)
    input_ids, inputs = prompts.input_ids, prompts.model_kwargs
    if (num_prompts := len(prompts.paddings)) > 1:  # a model's own `generate` may repeat a prompt
        tensors = tensors_of((prompts.input_ids, prompts.model_kwargs))
        if any(
            len(tensor) == num_prompts and bool((tensor != tensor[:1]).any()) for tensor in tensors
        ):
            raise ValueError(
                f"a request takes one prompt, but its inputs hold {num_prompts}: pass the inputs of"
                " one prompt"
            )
        input_ids, inputs = input_ids[:1], first_row(prompts)
    return replace(prompts, input_ids=input_ids, model_kwargs=inputs, paddings=[0])
