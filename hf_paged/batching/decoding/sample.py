"""transformers' `_sample` (greedy search and sampling), suspended between two forwards, and
streamers for single rows. The loop runs the forwards and owns the blocks."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterable, Sequence
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
from .scores import (
    BatchableProcessors,
    are_row_wise,
    draw,
    may_mix_rows,
    narrow_processors,
    select_rows,
)


class RowStreamers(BaseStreamer):
    """Sends each row of a `generate` call to a separate streamer, as if the row were alone: first
    the prompt, then the tokens until the row ends, then `end`. Streamers do not get the padding of
    prompts, which the `(prompts, length)` attention mask marks."""

    def __init__(
        self,
        streamers: Sequence[BaseStreamer],
        attention_mask: Tensor | None = None,
    ) -> None:
        self.streamers = list(streamers)
        self.attention_mask = attention_mask
        self._has_prompt = False
        self._ended_rows: set[int] = set()
        # rows that the stopping criteria have ended: `end` follows their next `put`
        self.ending_rows: set[int] = set()

    def put(self, value: Tensor) -> None:
        """Takes prompts `(rows, length)` first, then one token per row, `(rows,)`. Raises
        `ValueError` unless there is one streamer per row."""
        if len(value) != len(self.streamers):
            raise ValueError(
                f"{len(self.streamers)} streamers were passed for {len(value)} rows: pass one per"
                " row"
            )
        for row, streamer in enumerate(self.streamers):
            if row in self._ended_rows:
                continue
            ids = value[row : row + 1]
            if not self._has_prompt and self.attention_mask is not None:
                num_prompts = len(self.attention_mask)
                mask = self.attention_mask[row * num_prompts // len(value)]
                if len(mask) == ids.shape[1]:
                    is_token = mask.to(ids.device) != 0
                    ids = ids[:, is_token]
            streamer.put(ids)
        self._has_prompt = True
        self.end(self.ending_rows)

    def end(self, rows: Iterable[int] | None = None) -> None:
        """Ends the streamers of `rows` (default: all) that have not ended."""
        if rows is None:
            rows = range(len(self.streamers))
        for row in sorted({*rows} - self._ended_rows):
            self._ended_rows.add(row)
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
        self._streamers.ending_rows.update(rows)
        return is_done


class SampleDecoding(Decoding):
    """Greedy search or sampling of rows that advance together. As in `generate`, the caller's
    processors and criteria get the whole batch, and each draw covers all rows, so that a seed gives
    the same tokens. Ended rows leave `open_rows` if the criteria include EOS and no scores or
    logits are returned; otherwise all rows stay open until the last one ends. With EOS, ended rows
    get padding. Raises `ValueError` if EOS can end a row and there is no padding token."""

    def __init__(self, inputs: LoopInputs, streamer: BaseStreamer | None = None):
        super().__init__(inputs, num_returned=len(inputs.input_ids))
        processors = self.logits_processor
        checker = self.stop_checker
        self.streamer = streamer
        self.is_streamed = streamer is not None
        self.do_sample = bool(self.config.do_sample)
        self.max_length = checker.max_length or self.config.max_length
        pad = compat.special_token(self.config, "pad")
        if pad is None and checker.has_eos:
            raise ValueError("rows may end at an EOS token: set `pad_token_id` to pad them")
        self._pad_token_id = 0 if pad is None else int(pad)
        self._end_lengths = [0] * self.num_rows  # length at which the row ended; 0: not ended
        self._keeps_scores = self.scores is not None or self.raw_logits is not None
        self._is_row_wise = are_row_wise(processors, self.num_rows)
        # whether ended rows leave the batch, since nothing reads their scores
        self._can_close_early = not (self._keeps_scores or may_mix_rows(processors))
        package = type(streamer).__module__.partition(".")[0]
        runs_callers_streamer = streamer is not None and package != "transformers"
        self.may_run_model = not self._is_row_wise or bool(checker.callers_criteria)
        self.runs_callers_code = self.may_run_model or runs_callers_streamer
        # whether the processors run only on open rows, since no caller's code reads the others
        self._selects_rows = self._is_row_wise and not self._keeps_scores
        self._open_processors = (self.open_rows, processors)  # rows, and the processors for them
        needs_scores = self.do_sample or self.record_logprobs or processors
        self.chooses_argmax = self._selects_rows and not needs_scores
        has_other_criteria = bool(checker.callers_criteria or checker.stop_strings)
        has_readers = has_other_criteria or streamer is not None
        is_single_row = self.num_rows == 1
        self.is_simple = is_single_row and not has_readers and not self.record_logprobs
        self.accepts_runs = self.chooses_argmax and self.is_simple
        self.batchable: BatchableProcessors | None = None
        if is_single_row and not self._keeps_scores and not checker.callers_criteria:
            self.batchable = BatchableProcessors.of(processors, inputs.input_ids)
        if self.batchable is not None and not self.batchable.length_dependent:
            self.constant_key = (self.batchable.key, self.do_sample)
        # Rows can be split if no caller's code reads the batch, and no row depends on when others
        # end. After a split, sampled rows consume their common random numbers in another order.
        streams_by_row = streamer is None or isinstance(streamer, RowStreamers)
        reads_batch = checker.callers_criteria or not streams_by_row
        ends_independently = checker.has_eos or not checker.stop_strings
        self.can_split = self._selects_rows and not reads_batch and ends_independently

    @property
    def lengths(self) -> list[int]:
        """Length of each row up to its last token, including the prompt and its padding."""
        return [length or self.length for length in self._end_lengths]

    def result(self, cache: Any = None) -> Tensor | GenerateDecoderOnlyOutput:
        """Returns the output of transformers' loop; `cache` is the cache in the output."""
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
        if any(
            is_active(processor, self.length) for is_active, processor in batchable.length_dependent
        ):
            return None
        return batchable.key, self.do_sample

    def process(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the `(open rows, vocab)` logits as float32, and the scores that the processors
        compute from them; records both if the caller requested them. Without `record_logprobs`,
        processors may have written to the returned logits. Raises `TypeError` or `RuntimeError` for
        an invalid result of a processor."""
        rows = self.open_rows
        device = self._ids.device
        logits = logits.to(dtype=torch.float32, device=device, copy=True)
        if not self._selects_rows:
            logits = self._expand_to_all_rows(logits)
        raw = logits
        if self.record_logprobs:
            raw = logits.clone()
        scores = logits
        if self.logits_processor or not self._is_row_wise:
            ids = self.input_ids
            if self._selects_rows:
                ids = select_rows(ids, rows)
                if self._open_processors[0] != rows:
                    narrowed_processors = narrow_processors(
                        self.logits_processor, rows, self.num_rows
                    )
                    self._open_processors = (rows, narrowed_processors)
            _, processors = self._open_processors
            try:
                with self.running_model():
                    scores = processors(ids, logits)
                has_wrong_shape = scores.dim() != 2 or len(scores) != len(ids)
            except Exception as error:
                check_scores(processors, logits, scores, error)
                raise
            if has_wrong_shape:
                raise RuntimeError(
                    f"the logits processors returned scores of shape {tuple(scores.shape)} for"
                    f" logits of shape {tuple(logits.shape)}: they must return one row of scores"
                    " per row of logits"
                )
        if self.scores is not None:
            self.scores += (scores,)
        if self.raw_logits is not None:
            self.raw_logits += (logits,)
        return select_rows(raw, rows), select_rows(scores, rows)

    def draw(self, probs: Tensor) -> Tensor:
        """Draws tokens `(open rows,)` from `(open rows, vocab)` probabilities. As in transformers,
        ended rows also consume random numbers."""
        if self.draft is not None and self.draft.is_drawn:
            return self.draft.sample(probs, self.generator)
        device = probs.device
        probs = self._expand_to_all_rows(probs)
        if self.generator is not None:
            probs = probs.to(self.generator.device)
        drawn_tokens = draw(probs, self.generator)
        return select_rows(drawn_tokens, self.open_rows).to(device)

    def last_tokens(self, row: int, count: int) -> list[int]:
        """Returns the last `count` tokens of a row; all of its tokens if it has fewer."""
        first = max(0, len(self._new_tokens) - count)
        new_tokens = [tokens[row] for tokens in self._new_tokens[first:]]
        num_missing = count - len(new_tokens)
        if not num_missing:
            return new_tokens
        earlier: list[int] = self._ids[row, -num_missing:].tolist()
        return earlier + new_tokens

    def accept(self, chosen_tokens: list[int], records: Sequence[Record] = ()) -> SampledTokens:
        """Appends the chosen tokens to the open rows, evaluates the stopping criteria, and sends
        the tokens to the streamer. `records`: one per token if log-probabilities are recorded,
        otherwise none."""
        rows = self.open_rows
        checker = self.stop_checker
        running_rows = [
            (index, row) for index, row in enumerate(rows) if not self._end_lengths[row]
        ]
        stop_string_rows: Collection[int] = ()
        if checker.stop_strings:
            stop_string_rows = self._find_stop_string_rows(running_rows, chosen_tokens)
        if records:
            for index, row in running_rows:
                self.records[row].append(records[index])
        tokens_by_row = chosen_tokens
        if checker.has_eos and len(running_rows) < self.num_rows:
            tokens_by_row = [self._pad_token_id] * self.num_rows
            for index, row in running_rows:
                tokens_by_row[row] = chosen_tokens[index]
        self._new_tokens.append(tokens_by_row)
        self.length += 1
        if self.batchable is not None:
            self.batchable.pending_tokens.append(tokens_by_row[0])
        tokens = tokens_by_row
        are_hits: list[list[bool]] = []
        if checker.callers_criteria:
            with self.running_model():
                # in transformers' loop, `(rows, 1)` broadcasts: an error where padding follows EOS,
                # and with other criteria, each row ends by those of all rows
                num_others = len(checker.callers_criteria) + len(checker.stop_strings) - 1
                may_be_column = not checker.has_eos and (self.num_rows == 1 or not num_others)
                are_hits = [
                    hits(criterion, self.input_ids, self.scores, may_be_column)
                    for criterion in checker.callers_criteria
                ]
            # a criterion may force a token by writing to the ids
            tokens = self.input_ids[:, -1].tolist()
        ended_rows = []
        for _, row in running_rows:
            hits_stop_string = row in stop_string_rows
            reason = checker.finish_reason(tokens_by_row[row], self.length, hits_stop_string)
            if reason in (None, "length") and any(by_row[row] for by_row in are_hits):
                reason = "criteria"
            if reason is not None:
                self.finish_reasons[row], self._end_lengths[row] = reason, self.length
                ended_rows.append(row)
        finished_rows = self._close_rows(ended_rows)
        if self.streamer is not None:
            self._stream(tokens_by_row, ended_rows)  # as chosen; criteria may have changed `tokens`
        num_ended = len(rows) - len(running_rows)
        return SampledTokens(tokens, None, finished_rows, rows, num_ended=num_ended)

    def _find_stop_string_rows(
        self, running_rows: list[tuple[int, int]], chosen_tokens: list[int]
    ) -> set[int]:
        """Returns the rows whose chosen token completes a stop string. `running_rows` holds, for
        each row that has not ended, the index of its token in `chosen_tokens`, and the row."""
        stop_string_rows: set[int] = set()
        for criterion in self.stop_checker.stop_strings:
            count = criterion.maximum_token_len - 1
            tails = [
                [*self.last_tokens(row, count), chosen_tokens[index]] for index, row in running_rows
            ]
            are_hits = stop_string_hits(criterion, tails)
            stop_string_rows.update(
                row for (_, row), is_hit in zip(running_rows, are_hits) if is_hit
            )
        return stop_string_rows

    def _close_rows(self, ended_rows: list[int]) -> list[int]:
        """Called once `ended_rows` have ended: removes the rows that need no more forwards from
        `open_rows`, and returns them."""
        rows = self.open_rows
        if ended_rows and self.stop_checker.has_eos and self._can_close_early:
            self.open_rows = [row for row in rows if not self._end_lengths[row]]
            return ended_rows
        if ended_rows and all(self._end_lengths):
            self.open_rows = []
            return rows
        return []

    def _stream(self, tokens: list[int], ended_rows: list[int]) -> None:
        """Sends the tokens of all rows to the streamer, tells [`RowStreamers`] which rows have
        ended, and ends the streamer once the decoding is done."""
        assert self.streamer is not None
        if isinstance(self.streamer, RowStreamers):
            self.streamer.ending_rows.update(ended_rows)
        self.streamer.put(torch.tensor(tokens, device="cpu"))
        if self.is_done:
            self.has_ended_streamer = True  # even if its `end` raises
            self.streamer.end()

    @staticmethod
    def accept_simple(batch: Sequence[SampleDecoding], tokens: Sequence[int]) -> list[Result]:
        """Does the same as `accept` for each of these simple decodings (`is_simple`), but faster,
        since most of them only append their token. An error becomes the result of its decoding."""
        results: list[Result] = []
        for decoding, token in zip(batch, tokens):
            checker = decoding.stop_checker
            try:
                length = decoding.length + 1
                may_end = token in checker.eos_ids or length > checker.max_unchecked_length
                if may_end or decoding.draft is not None:
                    results.append(decoding.accept_run([token]))
                    continue
                decoding._new_tokens.append([token])
                decoding.length = length
                if decoding.batchable is not None and decoding.batchable.reads_tokens:
                    decoding.batchable.pending_tokens.append(token)
                results.append(token)
            except BaseException as error:
                results.append(error)
        return results

    @property
    def can_repeat(self) -> bool:
        """Whether an interrupted step can be undone (`rewind`) and repeated: the decoding has a
        single row, no other code has read the step's token, and no seeded generator has drawn
        it."""
        if not self.is_simple or self.draft is not None:
            return False
        if self.do_sample and self.generator is not None:
            return False
        return self.chooses_argmax or self.batchable is not None

    def rewind(self, num_new: int) -> None:
        """Keeps the prompt and `num_new` new tokens, and drops all later tokens. Requires
        `can_repeat`."""
        self.length = self.inputs.input_ids.shape[1] + num_new
        self._ids, self._new_tokens = self.input_ids[:, : self.length].contiguous(), []
        self.finish_reasons, self._end_lengths = [None], [0]
        self.open_rows = [0]
        if self.batchable is not None:  # its `penalty_mask` may be half written
            self.batchable = BatchableProcessors.of(self.logits_processor, self._ids)

    def accept_run(self, chosen_tokens: Sequence[int]) -> SampledTokens:
        """Accepts tokens chosen at consecutive positions: the leading ones that equal the draft's,
        and one more, but none after a token that ends the row. Requires `is_simple`."""
        checker = self.stop_checker
        draft_tokens = [] if self.draft is None else self.draft.tokens
        reason = None
        tokens: list[int] = []
        for token, draft_token in zip(chosen_tokens, [*draft_tokens, None]):
            tokens.append(token)
            reason = checker.finish_reason(token, self.length + len(tokens), False)
            if reason is not None or token != draft_token:
                break
        self._new_tokens += [[token] for token in tokens]
        self.length += len(tokens)
        if self.batchable is not None:
            self.batchable.pending_tokens += tokens
        finished = []
        if reason is not None:
            self.finish_reasons = [reason]
            self._end_lengths = [self.length]
            self.open_rows = []
            finished = [0]
        return SampledTokens(tokens[-1:], None, finished, [0], earlier_tokens=tuple(tokens[:-1]))

    def split(self) -> list[SampleDecoding]:
        """Returns one decoding per row, which continues the row from here, padding included. Raises
        `ValueError` unless `can_split`."""
        if not self.can_split:
            raise ValueError(
                "these rows depend on one another: only decodings with `can_split` can be split"
            )
        parts = []
        for row in range(self.num_rows):
            processors = narrow_processors(self.logits_processor, [row], self.num_rows)
            inputs = replace(
                self.inputs,
                input_ids=self.input_ids[[row]],
                logits_processor=processors,
            )
            streamer = None
            if isinstance(self.streamer, RowStreamers):
                streamer = RowStreamers([self.streamer.streamers[row]])
            part = SampleDecoding(inputs, streamer)
            part._continue_row(self, row)
            parts.append(part)
        return parts

    def _continue_row(self, whole: SampleDecoding, row: int) -> None:
        """Makes this decoding of a single row continue a row of `whole`."""
        self.finish_reasons = [whole.finish_reasons[row]]
        self._end_lengths = [whole._end_lengths[row]]
        self.open_rows = [0] if row in whole.open_rows else []
        self.records = [whole.records[row]]  # the same list, so that `join` need not copy it

    def join(self, parts: Sequence[SampleDecoding]) -> SampleDecoding:
        """Joins the rows of the decodings that `split` returned into this decoding, with padding on
        the right; returns `self`."""
        pad = torch.nn.utils.rnn.pad_sequence
        rows = [part.input_ids[0] for part in parts]
        self._ids = pad(rows, batch_first=True, padding_value=self._pad_token_id)
        self._new_tokens, self.length = [], self._ids.shape[1]
        self.finish_reasons = [part.finish_reasons[0] for part in parts]
        self._end_lengths = [part._end_lengths[0] for part in parts]
        self.open_rows = [row for row, part in enumerate(parts) if part.open_rows]
        return self
