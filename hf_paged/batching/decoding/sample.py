"""transformers' `_sample` (greedy search and sampling), suspended between two forwards, and
streamers for single rows. It takes logits, and leaves forwards and blocks to the loop."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from transformers.generation import BaseStreamer, GenerateDecoderOnlyOutput, StoppingCriteriaList

from ... import compat
from .base import (
    Decoding,
    LoopInputs,
    Record,
    Result,
    SampledTokens,
    hits,
    stop_string_hits,
)
from .returned import check_scores
from .scores import BatchableProcessors, are_row_wise, draw, for_rows, pick


class RowStreamers(BaseStreamer):
    """Sends each row that `generate` returns to a streamer of its own: the prompt without padding
    (by the `(prompts, length)` attention mask), the row's tokens until it ends, then `end`."""

    def __init__(
        self,
        streamers: Sequence[BaseStreamer],
        attention_mask: Tensor | None = None,
    ) -> None:
        self.streamers = list(streamers)
        self.attention_mask = attention_mask
        self._ended: set[int] = set()
        # rows that the criteria have ended: the next `put` is their last
        self.ending: set[int] = set()

    def put(self, value: Tensor) -> None:
        """Takes prompts `(rows, length)`, then one token of each row, `(rows,)`. Raises
        `ValueError` unless there is one streamer per row."""
        if len(value) != len(self.streamers):
            raise ValueError(
                f"{len(self.streamers)} streamers were passed for {len(value)} rows: pass one per"
                " row"
            )
        for row, streamer in enumerate(self.streamers):
            if row in self._ended:
                continue
            part = value[row : row + 1]
            if value.dim() == 2 and self.attention_mask is not None:
                num_prompts = len(self.attention_mask)
                mask = self.attention_mask[row * num_prompts // len(value)]
                if len(mask) == part.shape[1]:
                    is_token = mask.to(part.device) != 0
                    part = part[:, is_token]
            streamer.put(part)
        self.end(self.ending)

    def end(self, rows: Iterable[int] | None = None) -> None:
        """Ends the streamers of `rows` (default: all) that have not ended."""
        if rows is None:
            rows = range(len(self.streamers))
        for row in sorted({*rows} - self._ended):
            self._ended.add(row)
            self.streamers[row].end()


class ObservedCriteria(StoppingCriteriaList):
    """Stopping criteria that also mark the rows they end in `streamers`."""

    def __init__(self, criteria: StoppingCriteriaList, streamers: RowStreamers) -> None:
        super().__init__(criteria)
        self._streamers = streamers

    def __call__(
        self,
        input_ids: Tensor,
        scores: tuple[Tensor, ...] | None,
        **kwargs: Any,
    ) -> Tensor:
        is_done = super().__call__(input_ids, scores, **kwargs)
        rows = is_done.nonzero().flatten().tolist()
        self._streamers.ending.update(rows)
        return is_done


class SampleDecoding(Decoding):
    """Greedy search or sampling of rows that advance together: processors and criteria see the
    whole batch, and tokens are drawn over all rows, so that one seed gives `generate`'s tokens. If
    the criteria include EOS, ended rows leave `open_rows`, or get padding if scores are kept.
    Raises `ValueError` if there is no padding token for them."""

    def __init__(self, inputs: LoopInputs, streamer: BaseStreamer | None = None):
        super().__init__(inputs, num_returned=len(inputs.input_ids))
        processors = self.logits_processor
        checker = self.stop_checker
        self.streamer = streamer
        self.is_streamed = streamer is not None
        self.do_sample = bool(self.config.do_sample)
        if checker.max_length is None:
            self.max_length = self.config.max_length
        else:
            self.max_length = checker.max_length
        pad = compat.special_token(self.config, "pad")
        if pad is None and checker.has_eos:
            raise ValueError("rows may end at an EOS token: set `pad_token_id` to pad them")
        self._pad_token_id = 0
        if pad is not None:
            self._pad_token_id = int(pad)
        self._end_lengths = [0] * self.num_rows  # length at which the row ended; 0: it has not
        self._keeps_scores = self.scores is not None or self.raw_logits is not None
        self._runs_stock_code = are_row_wise(processors, self.num_rows)
        package = type(streamer).__module__.partition(".")[0]
        is_streamed = streamer is not None and package != "transformers"
        runs_callers = bool(checker.callers_criteria) or is_streamed
        self.runs_callers_code = not self._runs_stock_code or runs_callers
        # no caller's code sees the rows that ended, so the processors run on open rows alone
        self._selects_rows = self._runs_stock_code and not self._keeps_scores
        self._open_processors = (self.open_rows, processors)  # rows, and the processors for them
        reads_scores = self.do_sample or self.record_logprobs or processors
        self.chooses_argmax = self._selects_rows and not reads_scores
        has_readers = bool(checker.callers_criteria or checker.stop_strings)
        is_read = has_readers or streamer is not None
        is_alone = self.num_rows == 1
        self.is_simple = is_alone and not is_read and not self.record_logprobs
        self.accepts_runs = self.chooses_argmax and self.is_simple
        self.batchable: BatchableProcessors | None = None
        if is_alone and not self._keeps_scores and not checker.callers_criteria:
            self.batchable = BatchableProcessors.of(processors, inputs.input_ids)
        if self.batchable is not None and not self.batchable.bound:
            self.constant_key = (self.batchable.key, self.do_sample)
        # no caller's code sees the batch, and no row depends on when others end. (Sampled rows
        # share one stream of random numbers, which they consume in another order once split.)
        streams_rows = streamer is None or isinstance(streamer, RowStreamers)
        sees_batch = checker.callers_criteria or not streams_rows
        ends_alone = checker.has_eos or not checker.stop_strings
        self.can_split = self._selects_rows and not sees_batch and ends_alone

    @property
    def lengths(self) -> list[int]:
        """Length of every row up to its last token, prompt and padding included."""
        return [end or self.length for end in self._end_lengths]

    def result(self, cache: Any = None) -> Tensor | GenerateDecoderOnlyOutput:
        if not self.config.return_dict_in_generate:
            return self.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=self.input_ids,
            scores=self.scores,
            logits=self.raw_logits,
            **{compat.OUTPUT_CACHE: cache},
        )

    @property
    def batch_key(self) -> Hashable | None:
        batchable = self.batchable
        is_drawn = self.draft is not None and self.draft.is_drawn
        if batchable is None or is_drawn:
            return None
        if any(acts(processor, self.length) for acts, processor in batchable.bound):
            return None
        return batchable.key, self.do_sample

    def process(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the `(open rows, vocab)` logits as float32, and the scores after the
        processors."""
        rows = self.open_rows
        device = self._ids.device
        logits = logits.to(dtype=torch.float32, device=device, copy=True)
        if not self._selects_rows:
            logits = self._of_all_rows(logits)
        raw = logits
        if self.record_logprobs:
            raw = logits.clone()
        scores = logits
        if self.logits_processor or not self._runs_stock_code:
            ids = self.input_ids
            if self._selects_rows:
                ids = pick(ids, rows)
                if self._open_processors[0] != rows:
                    narrowed = for_rows(self.logits_processor, rows, self.num_rows)
                    self._open_processors = (rows, narrowed)
            _, processors = self._open_processors
            try:
                scores = processors(ids, logits)
                is_wrong = scores.dim() != 2 or len(scores) != len(ids)
            except Exception as error:
                check_scores(processors, logits, scores, error)
                raise
            if is_wrong:
                raise RuntimeError(
                    f"the logits processors returned scores {tuple(scores.shape)} for logits"
                    f" {tuple(logits.shape)}"
                )
        if self.scores is not None:
            self.scores += (scores,)
        if self.raw_logits is not None:
            self.raw_logits += (logits,)
        return pick(raw, rows), pick(scores, rows)

    def draw(self, probs: Tensor) -> Tensor:
        """Draws a token for each row of `(open rows, vocab)` probabilities; like transformers,
        draws for the ended rows as well."""
        if self.draft is not None and self.draft.is_drawn:
            return self.draft.sample(probs, self.generator)
        device = probs.device
        probs = self._of_all_rows(probs)
        if self.generator is not None:
            probs = probs.to(self.generator.device)
        drawn = draw(probs, self.generator)
        return pick(drawn, self.open_rows).to(device)

    def tail(self, row: int, count: int) -> list[int]:
        """Returns the last `count` tokens of a row, all if it has fewer."""
        first = max(0, len(self._new) - count)
        new = [tokens[row] for tokens in self._new[first:]]
        missing = count - len(new)
        if not missing:
            return new
        earlier: list[int] = self._ids[row, -missing:].tolist()
        return earlier + new

    def accept(self, chosen: list[int], records: Sequence[Record] = ()) -> SampledTokens:
        """Appends a token to every open row."""
        rows = self.open_rows
        checker = self.stop_checker
        running = [(index, row) for index, row in enumerate(rows) if not self._end_lengths[row]]
        stopped = self._at_stop_strings(running, chosen) if checker.stop_strings else ()
        if records:
            for index, row in running:
                self.records[row].append(records[index])
        tokens_by_row = chosen
        if checker.has_eos and len(running) < self.num_rows:
            tokens_by_row = [self._pad_token_id] * self.num_rows
            for index, row in running:
                tokens_by_row[row] = chosen[index]
        self._new.append(tokens_by_row)
        self.length += 1
        if self.batchable is not None:
            self.batchable.pending_tokens.append(tokens_by_row[0])
        tokens = tokens_by_row
        are_hits: list[list[bool]] = []
        if checker.callers_criteria:
            are_hits = [
                hits(other, self.input_ids, self.scores) for other in checker.callers_criteria
            ]
            # some criteria force a token by writing to the ids
            tokens = self.input_ids[:, -1].tolist()
        ended = []
        for _, row in running:
            reason = checker.reason(tokens_by_row[row], self.length, row in stopped)
            if reason in (None, "length") and any(by_row[row] for by_row in are_hits):
                reason = "criteria"
            if reason is not None:
                self.finish_reasons[row], self._end_lengths[row] = reason, self.length
                ended.append(row)
        finished = self._close_rows(ended)
        if self.streamer is not None:
            self._stream(tokens_by_row, ended)  # as chosen, before criteria overwrote them
        return SampledTokens(tokens, None, finished, rows)

    def _at_stop_strings(self, running: list[tuple[int, int]], chosen: list[int]) -> set[int]:
        """Returns the rows whose token completes a stop string. `running`: for each row that runs,
        the index of its token in `chosen`, and the row."""
        stopped: set[int] = set()
        for criterion in self.stop_checker.stop_strings:
            count = criterion.maximum_token_len - 1
            tails = [[*self.tail(row, count), chosen[index]] for index, row in running]
            are_hits = stop_string_hits(criterion, tails)
            stopped.update(row for (_, row), is_hit in zip(running, are_hits) if is_hit)
        return stopped

    def _close_rows(self, ended: list[int]) -> list[int]:
        """Returns the rows that need no more forwards once the rows `ended` have ended."""
        rows = self.open_rows
        if ended and self.stop_checker.has_eos and not self._keeps_scores:
            self.open_rows = [row for row in rows if not self._end_lengths[row]]
            return ended
        if ended and all(self._end_lengths):
            self.open_rows = []
            return rows
        return []

    def _stream(self, tokens: list[int], ended: list[int]) -> None:
        assert self.streamer is not None
        if isinstance(self.streamer, RowStreamers):
            self.streamer.ending.update(ended)
        self.streamer.put(torch.tensor(tokens, device="cpu"))
        if self.is_done:
            self.has_ended_streamer = True  # also if its `end` raises
            self.streamer.end()

    @staticmethod
    def accept_simple(batch: Sequence[SampleDecoding], tokens: Sequence[int]) -> list[Result]:
        """Has each of these simple decodings `accept` its token, in one pass. An error becomes the
        result of its decoding."""
        results: list[Result] = []
        for decoding, token in zip(batch, tokens):
            checker = decoding.stop_checker
            try:
                length = decoding.length + 1
                may_end = token in checker.eos_ids or length > checker.free_length
                if may_end or decoding.draft is not None:
                    results.append(decoding.accept_run([token]))
                    continue
                decoding._new.append([token])
                decoding.length = length
                if decoding.batchable is not None and decoding.batchable.reads_tokens:
                    decoding.batchable.pending_tokens.append(token)
                results.append(token)
            except BaseException as error:
                results.append(error)
        return results

    @property
    def can_repeat(self) -> bool:
        """Whether an interrupted step can be repeated: no other code has seen its token, and no
        seeded generator has drawn it."""
        if not self.is_simple or self.draft is not None:
            return False
        if self.do_sample and self.generator is not None:
            return False
        return self.chooses_argmax or self.batchable is not None

    def rewind(self, num_new: int) -> None:
        """Drops all tokens after the prompt and `num_new` new ones, if it `can_repeat`."""
        self.length = self.inputs.input_ids.shape[1] + num_new
        self._ids, self._new = self.input_ids[:, : self.length].contiguous(), []
        self.finish_reasons, self._end_lengths = [None], [0]
        self.open_rows = [0]
        if self.batchable is not None:  # its tensor of penalized tokens may be half written
            self.batchable = BatchableProcessors.of(self.logits_processor, self._ids)

    def accept_run(self, chosen: Sequence[int]) -> SampledTokens:
        """Accepts tokens chosen at consecutive positions, like `accept`: those that equal the
        draft's, and one more, up to the first that ends the only row (`is_simple`)."""
        checker = self.stop_checker
        drafted = [] if self.draft is None else self.draft.tokens
        reason = None
        tokens: list[int] = []
        for token, guess in zip(chosen, [*drafted, None]):
            tokens.append(token)
            reason = checker.reason(token, self.length + len(tokens), False)
            if reason is not None or token != guess:
                break
        self._new += [[token] for token in tokens]
        self.length += len(tokens)
        if self.batchable is not None:
            self.batchable.pending_tokens += tokens
        finished = []
        if reason is not None:
            self.finish_reasons = [reason]
            self._end_lengths = [self.length]
            self.open_rows = []
            finished = [0]
        return SampledTokens(tokens[-1:], None, finished, [0], earlier=tuple(tokens[:-1]))

    def split(self) -> list[SampleDecoding]:
        """Returns one decoding per row, which continues the row from here; each keeps its
        padding."""
        if not self.can_split:
            raise ValueError(
                "these rows depend on one another: only `can_split` decodings can be split"
            )
        parts = []
        for row in range(self.num_rows):
            processors = for_rows(self.logits_processor, [row], self.num_rows)
            inputs = replace(
                self.inputs,
                input_ids=self.input_ids[[row]],
                logits_processor=processors,
            )
            streamer = None
            if isinstance(self.streamer, RowStreamers):
                streamer = RowStreamers([self.streamer.streamers[row]])
            part = SampleDecoding(inputs, streamer)
            part.finish_reasons = [self.finish_reasons[row]]
            part._end_lengths = [self._end_lengths[row]]
            part.open_rows = [0] if row in self.open_rows else []
            part.records = [self.records[row]]  # the same list
            parts.append(part)
        return parts

    def join(self, parts: Sequence[SampleDecoding]) -> SampleDecoding:
        """Takes the rows back from the decodings that `split` returned; returns `self`."""
        pad = torch.nn.utils.rnn.pad_sequence
        rows = [part.input_ids[0] for part in parts]
        self._ids = pad(rows, batch_first=True, padding_value=self._pad_token_id)
        self._new, self.length = [], self._ids.shape[1]
        self.finish_reasons = [part.finish_reasons[0] for part in parts]
        self._end_lengths = [part._end_lengths[0] for part in parts]
        self.open_rows = [row for row, part in enumerate(parts) if part.open_rows]
        return self
