"""transformers' `_sample` (greedy search and sampling), suspended between two forwards; streamers
for single rows."""

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
    """Sends each row that `generate` returns to a separate streamer: the prompt without padding (by
    the `(prompts, length)` attention mask), the row's tokens until it ends, then `end`."""

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
        `ValueError` unless there is one streamer a row."""
        if len(value) != len(self.streamers):
            raise ValueError(
                f"{len(self.streamers)} streamers were passed for {len(value)} rows: pass one a row"
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
    """Stopping criteria that also tell `streamers` which rows they end."""

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
            raise ValueError("rows may end at an EOS token: set `pad_token_id` to fill them up")
        self._pad_token_id = 0
        if pad is not None:
            self._pad_token_id = int(pad)
        self._ends = [0] * self.num_rows  # length at which the row ended; 0: it has not
        self._keeps_scores = self.scores is not None or self.raw_logits is not None
        self._runs_known_code = are_row_wise(processors, self.num_rows)
        package = type(streamer).__module__.partition(".")[0]
        is_streamed = streamer is not None and package != "transformers"
        runs_others = bool(checker.others) or is_streamed
        self.runs_callers_code = not self._runs_known_code or runs_others
        # the processors then run only on open rows: no caller's code sees the others
        self._narrows = self._runs_known_code and not self._keeps_scores
        self._narrowed = (self.open_rows, processors)  # rows, and the processors for them
        reads_scores = self.do_sample or self.record_logprobs or processors
        self.takes_maximum = self._narrows and not reads_scores
        has_readers = bool(checker.others or checker.stop_strings)
        looks = has_readers or streamer is not None
        is_alone = self.num_rows == 1
        self.is_simple = is_alone and not looks and not self.record_logprobs
        self.takes_runs = self.takes_maximum and self.is_simple
        self.batchable: BatchableProcessors | None = None
        if is_alone and not self._keeps_scores and not checker.others:
            self.batchable = BatchableProcessors.of(processors, inputs.input_ids)
        if self.batchable is not None and not self.batchable.bound:
            self.constant_key = (self.batchable.key, self.do_sample)
        # no caller's code sees the batch, and no row depends on when others end; sampled rows share
        # one stream of random numbers, which they consume in another order once they are split
        streams_rows = streamer is None or isinstance(streamer, RowStreamers)
        sees_batch = checker.others or not streams_rows
        ends_alone = checker.has_eos or not checker.stop_strings
        self.can_split = self._narrows and not sees_batch and ends_alone

    @property
    def lengths(self) -> list[int]:
        """Length of every row up to its last token, prompt and padding included."""
        return [end or self.length for end in self._ends]

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
        if not self._narrows:
            logits = self._of_all_rows(logits)
        raw = logits
        if self.record_logprobs:
            raw = logits.clone()
        scores = logits
        if self.logits_processor or not self._runs_known_code:
            ids = self.input_ids
            if self._narrows:
                ids = pick(ids, rows)
                if self._narrowed[0] != rows:
                    narrowed = for_rows(self.logits_processor, rows, self.num_rows)
                    self._narrowed = (rows, narrowed)
            _, processors = self._narrowed
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
        """Draws a token for each row of `(open rows, vocab)` probabilities, over all rows as
        transformers does."""
        if self.draft is not None and self.draft.is_drawn:
            return self.draft.sample(probs, self.generator)
        device = probs.device
        probs = self._of_all_rows(probs)
        if self.generator is not None:
            probs = probs.to(self.generator.device)
        drawn = draw(probs, self.generator)
        return pick(drawn, self.open_rows).to(device)

    def tail(self, row: int, count: int) -> list[int]:
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
        going = [(at, row) for at, row in enumerate(rows) if not self._ends[row]]
        stopped = self._at_stop_strings(going, chosen) if checker.stop_strings else ()
        if records:
            for at, row in going:
                self.records[row].append(records[at])
        given = chosen
        if checker.has_eos and len(going) < self.num_rows:
            given = [self._pad_token_id] * self.num_rows
            for at, row in going:
                given[row] = chosen[at]
        self._new.append(given)
        self.length += 1
        if self.batchable is not None:
            self.batchable.unseen.append(given[0])
        tokens = given
        ended: list[list[bool]] = []
        if checker.others:
            ended = [hits(criterion, self.input_ids, self.scores) for criterion in checker.others]
            # some criteria force a token by writing to the ids
            tokens = self.input_ids[:, -1].tolist()
        newly = []
        for _, row in going:
            reason = checker.reason(given[row], self.length, row in stopped)
            if reason in (None, "length") and any(of_rows[row] for of_rows in ended):
                reason = "criteria"
            if reason is not None:
                self.finish_reasons[row], self._ends[row] = reason, self.length
                newly.append(row)
        finished = self._close_rows(newly)
        if self.streamer is not None:
            self._stream(given, newly)  # as chosen, before criteria overwrote them
        return SampledTokens(tokens, None, finished, rows)

    def _at_stop_strings(self, going: list[tuple[int, int]], chosen: list[int]) -> set[int]:
        """Returns the rows that complete a stop string with their tokens `chosen[at]`."""
        stopped: set[int] = set()
        for criterion in self.stop_checker.stop_strings:
            count = criterion.maximum_token_len - 1
            tails = [[*self.tail(row, count), chosen[at]] for at, row in going]
            are_hits = stop_string_hits(criterion, tails)
            stopped.update(row for (_, row), is_hit in zip(going, are_hits) if is_hit)
        return stopped

    def _close_rows(self, newly: list[int]) -> list[int]:
        """Returns the rows that need no more forwards, now that the rows `newly` have ended."""
        rows = self.open_rows
        if newly and self.stop_checker.has_eos and not self._keeps_scores:
            self.open_rows = [row for row in rows if not self._ends[row]]
            return newly
        if newly and all(self._ends):
            self.open_rows = []
            return rows
        return []

    def _stream(self, tokens: list[int], newly: list[int]) -> None:
        assert self.streamer is not None
        if isinstance(self.streamer, RowStreamers):
            self.streamer.ending.update(newly)
        self.streamer.put(torch.tensor(tokens, device="cpu"))
        if self.is_done:
            self.has_ended_streamer = True  # also if its `end` raises
            self.streamer.end()

    @staticmethod
    def accept_each(batch: Sequence[SampleDecoding], tokens: Sequence[int]) -> list[Result]:
        """`accept` of each of these simple decodings, with its token, in one pass. An error becomes
        the result of its decoding."""
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
                    decoding.batchable.unseen.append(token)
                results.append(token)
            except BaseException as error:
                results.append(error)
        return results

    @property
    def can_repeat(self) -> bool:
        """Whether a step that an interrupt ended can be repeated: nobody else has seen its token,
        and no generator has drawn it."""
        if not self.is_simple or self.draft is not None:
            return False
        if self.do_sample and self.generator is not None:
            return False
        return self.takes_maximum or self.batchable is not None

    def take_back(self, num_new: int) -> None:
        """Forgets all tokens behind the prompt and `num_new` new ones, if it `can_repeat`."""
        self.length = self.inputs.input_ids.shape[1] + num_new
        self._ids, self._new = self.input_ids[:, : self.length].contiguous(), []
        self.finish_reasons, self._ends = [None], [0]
        self.open_rows = [0]
        if self.batchable is not None:  # its tensor of seen tokens may be half written
            self.batchable = BatchableProcessors.of(self.logits_processor, self._ids)

    def accept_run(self, chosen: Sequence[int]) -> SampledTokens:
        """Accepts tokens chosen at consecutive positions, like `accept`: as long as they equal the
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
            self.batchable.unseen += tokens
        finished = []
        if reason is not None:
            self.finish_reasons = [reason]
            self._ends = [self.length]
            self.open_rows = []
            finished = [0]
        return SampledTokens(tokens[-1:], None, finished, [0], earlier=tuple(tokens[:-1]))

    def split(self) -> list[SampleDecoding]:
        """Returns one decoding per row that continues from here; each keeps its padding."""
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
            part._ends = [self._ends[row]]
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
        self._ends = [part._ends[0] for part in parts]
        self.open_rows = [row for row, part in enumerate(parts) if part.open_rows]
        return self
