"""Units of work of a step loop: a decoding, the sequences of its rows, and their state between two steps."""

from __future__ import annotations

import contextlib
import functools
import time
from collections import deque
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation.stopping_criteria import MaxTimeCriteria

from .. import compat
from ..cache.block_manager import UNCACHED, SequenceBlocks
from ..config import check_cache_salt
from ..interrupts import let_in, step_lock
from ..model.own_loop import select_rows, tensors_of
from ..step import to_device
from .arguments import Prompt, RequestOptions, as_whole, check_streamed_rows, prompt_ids, split_inputs
from .decoding.beam import BeamDecoding
from .decoding.grammar import GrammarProcessor
from .decoding.prepare import LoopCall, request_decoding
from .decoding.scores import PromptLogprobs
from .decoding.speculation import Assistance, Speculation
from .execution.adapter_files import AdapterFile, adapter_namespace, resolve_adapter
from .execution.adapters import use_adapter
from .execution.prompts import Prompts, prompts_of
from .request import Request, Sequence
from .results import RequestOutput, RequestResult, SequenceResult, TextTracker, Timings, decode

_MAX_PRIORITY = 2**31 - 1  # keeps `arrivals + priority * AGING` exact as a float


@dataclass(eq=False, repr=False)
class Generation:
    """A decoding and the sequences of its rows: a `generate` call, or one request of an engine ([`RequestState`])."""

    decoding: Any  # a `Decoding`
    rows: list[tuple[Request, int]]  # for each row of the decoding, its request and the sequence's index in it
    keep_blocks: bool = False  # keep the blocks of ended rows, for a cache that `generate` returns
    assistance: Assistance | None = None  # the source of drafts, if each row advances by itself
    # with `keep_blocks`, by ended row: its blocks and how many tokens they hold
    kept: dict[int, tuple[SequenceBlocks, int]] = field(default_factory=dict, init=False)
    parts: list[Generation] = field(default_factory=list, init=False)  # after `split`, one a row
    # of the last step, by row; no entry for beams; several entries if a draft was accepted
    new_tokens: list[dict[int, int]] = field(default_factory=list, init=False)
    speculation: Speculation | None = field(default=None, init=False)  # drafts for its only row
    error: Exception | None = field(default=None, init=False)  # the error that ended it early
    is_closed: bool = field(default=False, init=False)  # its rows need no further step
    is_sampling: bool = field(default=False, init=False)  # it has the logits of all open rows, and no tokens yet
    whole: Generation | None = field(default=None, init=False)  # the generation that this is a part of
    _logits: dict[int, Tensor] = field(default_factory=dict, init=False)  # of rows that wait for other rows

    @property
    def requests(self) -> list[Request]:
        return list(dict.fromkeys(request for request, _ in self.rows))

    @property
    def is_done(self) -> bool:
        return self.is_closed or (bool(self.parts) and all(part.is_done for part in self.parts))

    @property
    def can_split(self) -> bool:
        """Whether it has several requests whose rows can advance independently."""
        return len(self.requests) > 1 and not (self.parts or self.is_sampling) and self.decoding.can_split

    def split(self) -> None:
        """Makes each row one of `parts`, which advance independently; moves blocks and logits to them."""
        parts = []
        for row, decoding in enumerate(self.decoding.split()):
            part = Generation(decoding, [self.rows[row]], self.keep_blocks, self.assistance)
            part.whole, part.is_closed = self, decoding.is_done
            if row in self.kept:
                part.kept[0] = self.kept[row]
            if row in self._logits and not part.is_closed:
                part._logits[0] = self._logits[row]
            parts.append(part)
        self.kept, self._logits, self.parts = {}, {}, parts  # at once: another thread may read `is_done`

    def add_logits(self, logits: Tensor, places: dict[int, int]) -> Tensor | None:
        """Takes logits `(n, vocab)`, with row `r` at `places[r]`, and returns as `take_logits`. Copies logits of rows
        that wait for other rows."""
        rows = self.decoding.open_rows
        if self._logits or len(places) != len(rows):
            for row, place in places.items():
                self._logits.setdefault(row, logits[place].clone())
            return self.take_logits()
        wanted = [places[row] for row in rows]
        first, end = wanted[0], wanted[0] + len(wanted)
        if wanted == list(range(first, end)):
            return logits[first:end]  # a view needs no copy
        return logits[to_device(torch.tensor(wanted, device="cpu"), logits.device)]

    def take_logits(self) -> Tensor | None:
        """Returns the logits of all open rows, in order, and forgets them; `None` if some are missing."""
        rows = self.decoding.open_rows
        if not rows or len(self._logits) < len(rows):
            return None
        logits = torch.stack([self._logits[row] for row in rows])
        self._logits = {}
        return logits

    def forget_logits(self) -> None:
        """Drops the logits of rows that wait for other rows; those rows are computed again."""
        self._logits = {}

    def close(self) -> None:
        self._logits, self.is_closed = {}, True


class RequestState(Generation):
    """A request of an engine, whose outputs go to `outbox`. Raises the errors of `PagedEngine.add_request`."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Any,
        prompt: Prompt,
        generation_config: Any,
        options: RequestOptions,
        outbox: deque[RequestOutput] | list[RequestOutput],
    ) -> None:
        adapter = resolve_adapter(model, options.adapter)
        check_cache_salt(options.cache_salt)
        priority = as_whole("priority", options.priority, -_MAX_PRIORITY, _MAX_PRIORITY, after=", lower runs earlier")
        prompt, inputs = split_inputs(prompt, options.inputs)
        options = replace(options, inputs=inputs)
        takes_ids = inputs is None and not model.config.is_encoder_decoder
        if isinstance(adapter, AdapterFile) and not takes_ids:
            raise ValueError(
                f"`adapter` {adapter.path!r} is loaded on demand, which serves prompts of token ids alone: load it "
                "with PEFT's `model.load_adapter(folder, name)`, and pass the name"
            )
        self.prompt_ids = [] if prompt is None and inputs is not None else prompt_ids(prompt, tokenizer)
        prepare = functools.partial(request_decoding, model, self.prompt_ids, generation_config, options, tokenizer)
        decoding, call = prepare()
        for processor in decoding.logits_processor:
            if isinstance(processor, GrammarProcessor):
                processor.set_stop_tokens(compat.special_token(decoding.config, "eos"))
        check_streamed_rows(options.streamer, decoding.num_rows, "ask for one sequence a request")
        self._start = decoding.length  # number of prompt tokens (of the decoder, if the model has an encoder)
        tokens, namespace = decoding.input_ids[0].tolist(), (adapter_namespace(adapter), options.cache_salt)
        prompts = None if call is None else _prompts_of(model, call)
        num_unseen = 0 if prompts is None else prompts.length - len(tokens)  # positions given as embeddings
        sequences = [Sequence([0] * num_unseen + tokens)]
        size = decoding.max_length + num_unseen, decoding.num_rows
        self.request = Request(options.request_id, sequences, *size, priority, namespace, adapter)
        if isinstance(adapter, AdapterFile):
            self.request.adapter_bytes = adapter.num_bytes
        if options.prompt_logprobs:
            self.request.prompt_logprobs = PromptLogprobs(tokens, int(options.top_logprobs))
            self.request.namespace = UNCACHED  # the whole prompt must be computed
        self._prepare = prepare if call is not None else None
        if prompts is not None:
            self.request.inputs, self.request.num_encoder_tokens = (prompts, 0), prompts.num_encoder_tokens
        super().__init__(decoding, [(self.request, index) for index in range(decoding.num_rows)])
        self.assistance = Assistance(options.assistant_model, tokenizer, options.assistant_tokenizer)
        self.request_id, self.outbox = options.request_id, outbox
        # the criteria of `max_time`, whose clock starts with the step that first runs the request
        own = options.stopping_criteria or ()
        self.limits = [c for c in decoding.stopping_criteria if type(c) is MaxTimeCriteria and c not in own]
        self._streamer, self._tokenizer = options.streamer, tokenizer
        self._text = None if tokenizer is None else TextTracker(tokenizer)
        self._added = time.perf_counter()
        self._first_token: float | None = None  # seconds, as in `Timings`

    def prepare_again(self, model: PreTrainedModel) -> None:
        """Prepares the inputs again after the weights changed, encoder outputs included."""
        if self._prepare is not None and self.request.inputs is not None:
            call, prompts = self._prepare()[1], self.request.inputs[0]
            assert call is not None
            encodes = compat.MEDIA in prompts.model_kwargs
            prompts.model_kwargs = _prompts_of(model, call).model_kwargs
            if encodes:
                self.encode_media(model)

    def encode_media(self, model: PreTrainedModel) -> None:
        """Encodes images and sound before the prefill, as `generate` does: in a shared forward, an error in one
        request's media would fail all."""
        assert self.request.inputs is not None
        prompts = self.request.inputs[0]
        with step_lock(model), let_in(), use_adapter(model, self.request.adapter), torch.no_grad():
            prompts.model_kwargs = compat.encode_media(model, prompts.model_kwargs)

    def outputs(self) -> list[tuple[dict[int, int], str | None]]:
        """Returns the last step's new tokens with their text, in order; no tokens after an error. Sets `error` if the
        tokenizer raises."""
        if self.error is not None:
            return [({}, None)]  # `new_tokens` is from an earlier step
        if self.is_done:
            self._streamer = None  # the decoding has ended it
        if self._first_token is None:
            self._first_token = time.perf_counter() - self._added
        decoding, found = self.decoding, list[tuple[dict[int, int], str | None]]()
        if len(self.rows) > 1 and self.new_tokens:  # drops padding of rows that ended earlier
            lengths, (new,) = decoding.lengths, self.new_tokens
            self.new_tokens = [{row: token for row, token in new.items() if lengths[row] == decoding.length}]
        for place, new in enumerate(self.new_tokens or [{}], 1):
            text = None
            if self._text is not None and 0 in new:
                is_last = place == len(self.new_tokens) and decoding.finish_reasons[0] is not None
                try:
                    text = self._text.add([new[0]], last=is_last)
                except Exception as failure:
                    self.error = failure
                    return [*found, (new, None)]
            found.append((new, text))
        return found

    def result(self, reason: str | None) -> RequestResult:
        """Makes the result; `reason` is `"cancelled"` or `"error"`, or `None` if the request ended by itself. Errors
        raised here go into the result."""
        sequences: list[SequenceResult] = []
        try:
            sequences, failure = self._sequences(reason)
        except Exception as caught:  # after an interrupt the decoding may be inconsistent
            failure = caught
        admitted_at, recorded = self.request.admitted_at, self.request.prompt_logprobs
        queued = None if admitted_at is None else admitted_at - self._added
        return RequestResult(
            request_id=self.request_id,
            prompt_ids=self.prompt_ids,
            sequences=sequences,
            error=failure if self.error is None else self.error,
            timings=Timings(queued, self._first_token, time.perf_counter() - self._added),
            num_prefix_hit_tokens=self.request.num_hit_tokens,
            num_preemptions=self.request.num_preemptions,
            prompt_logprobs=None if recorded is None else recorded.values,
            prompt_top_logprobs=recorded.top if recorded is not None and recorded.num_top else None,
            num_drafts=0 if self.speculation is None else self.speculation.num_drafts,
            num_draft_tokens=0 if self.speculation is None else self.speculation.num_proposed,
            num_accepted_tokens=0 if self.speculation is None else self.speculation.num_accepted,
        )

    def end_streamer(self) -> None:
        """Ends the streamer after the result is output, unless the decoding has ended it."""
        if self._streamer is not None:
            with contextlib.suppress(Exception), let_in(waiting=False):
                self._streamer.end()

    def _sequences(self, reason: str | None) -> tuple[list[SequenceResult], Exception | None]:
        decoding, ids, scores = self.decoding, self.decoding.input_ids, None
        if isinstance(decoding, BeamDecoding):
            if not decoding.is_done:  # no sequence is final
                return [SequenceResult([], reason or "cancelled") for _ in decoding.finish_reasons], None
            if decoding.finish_reasons[0] is None:
                nothing = RuntimeError("no beam could end: the scores contain nan, or too few tokens have a finite one")
                return [SequenceResult([], "error") for _ in decoding.finish_reasons], nothing
            reason = "error"  # for beams that could not end, if others did
            scores, ids = decoding.returned(decoding.beam_scores).tolist(), decoding.returned(decoding.sequences)
        results: list[SequenceResult] = []
        failure: Exception | None = None
        for i, (length, ended) in enumerate(zip(decoding.lengths, decoding.finish_reasons)):
            token_ids, text = ids[i, self._start : length].tolist(), None
            if self._tokenizer is not None and failure is None:
                try:
                    text = decode(self._tokenizer, token_ids)
                except Exception as caught:
                    failure = caught
            logprobs = decoding.logprobs[i] if decoding.record_logprobs else None
            score = None if scores is None else scores[i]
            top = decoding.top_logprobs[i] if decoding.record_logprobs and decoding.num_top else None
            results.append(SequenceResult(token_ids, ended or reason or "cancelled", text, logprobs, score, top))
        return results, failure


def _prompts_of(model: PreTrainedModel, call: LoopCall) -> Prompts:
    """Returns a request's single prompt. Raises `ValueError` if its inputs make several different prompts."""
    given = call.arguments["model_kwargs"]
    unexpanded = call.unexpanded or (call.arguments["input_ids"], given)
    prompts = prompts_of(unexpanded, given, model.config.is_encoder_decoder)
    if (count := len(prompts.paddings)) > 1:  # repeated by the model's own `generate`
        given = tensors_of((prompts.input_ids, prompts.model_kwargs))
        if any(len(x) == count and bool((x != x[:1]).any()) for x in given):
            raise ValueError(f"`inputs` make {count} prompts: pass those of one")
        row = torch.zeros(1, dtype=torch.long, device=prompts.input_ids.device)
        prompts.input_ids = prompts.input_ids[:1]
        prompts.model_kwargs = {name: select_rows(name, x, row, count) for name, x in prompts.model_kwargs.items()}
        prompts.position_ids = prompts.model_kwargs.get("position_ids")
    prompts.paddings = [0]
    return prompts
