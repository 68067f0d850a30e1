"""transformers' `_sample` (greedy search and sampling), stopped between two forwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.logits_process import LogitsProcessorList
from transformers.generation.stopping_criteria import StoppingCriteriaList
from transformers.generation.utils import GenerateDecoderOnlyOutput

from ...interrupts import let_in
from ...kernels import cpp
from .base import Decoding, Fetch, Logprobs, SampledTokens, StopChecker, argmax, values_at
from .processors import BatchableProcessors, are_row_wise, for_rows


class SampleDecoding(Decoding):
    """
    Greedy search or sampling of a batch of rows that advance together.

    Processors and criteria see the whole `(rows, cur_len)` batch in fixed order and draws are taken over all rows, so
    one seed gives the tokens of `generate`. Rows that ended leave `open_rows` when the criteria include EOS; without,
    transformers keeps appending tokens to them until all rows have ended, and so does this. Where scores or logits are
    kept they stay as well, followed by padding, since transformers returns what it computes of that.

    Args:
        input_ids (`torch.Tensor` of shape `(rows, length)`): Prompts, int64 or int32, padded on the left.
        logits_processor, stopping_criteria, generation_config: As `GenerationMixin._sample` receives them.
        streamer (*optional*): Gets `(rows,)` tokens each step, and `end`.
        generator (`torch.Generator`, *optional*): Draws from it; else from torch's global one.
        row_streamers (*optional*): For each row a streamer or `None`: its tokens, `(1,)` each, until it ends; `end`.
        record_logprobs (`bool`): Fill `logprobs`.

    Raises:
        ValueError: if rows may end early and there is no token to pad them with.
    """

    def __init__(
        self,
        input_ids: torch.Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        *,
        streamer: Any = None,
        generator: torch.Generator | None = None,
        row_streamers: Sequence[Any] | None = None,
        record_logprobs: bool = False,
    ):
        config: Any = generation_config
        self.num_rows, self.length = input_ids.shape
        self.logits_processor, self.stopping_criteria = logits_processor, stopping_criteria
        self.generation_config = config
        self.streamer, self.generator, self.record_logprobs = streamer, generator, record_logprobs
        self.row_streamers: list[Any] = [None] * self.num_rows if row_streamers is None else list(row_streamers)
        if len(self.row_streamers) != self.num_rows:
            raise ValueError(f"{len(self.row_streamers)} streamers were passed for {self.num_rows} rows")
        self.stop_checker = StopChecker(stopping_criteria)
        self.max_length = config.max_length if self.stop_checker.max_length is None else self.stop_checker.max_length
        pad = config._pad_token_tensor
        if pad is None and self.stop_checker.has_eos:
            raise ValueError("rows may end at an EOS token: set `pad_token_id`, which fills them up")
        self.pad_token_id = None if pad is None else int(pad)
        self.do_sample = bool(config.do_sample)
        keeps = config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if keeps and config.output_scores else None
        self.raw_logits: tuple[torch.Tensor, ...] | None = () if keeps and config.output_logits else None

        self.open_rows = list(range(self.num_rows))
        self.finish_reasons: list[str | None] = [None] * self.num_rows
        self._ends = [0] * self.num_rows  # length at which the row ended
        self.logprobs: list[Logprobs] = [[] for _ in range(self.num_rows)]
        self._ids = input_ids
        self._new: list[list[int]] = []  # tokens of every row for each step that `_ids` does not hold yet
        self._filler: torch.Tensor | None = None  # [rows, vocab]: last logits of rows that left
        self._keeps_scores = self.scores is not None or self.raw_logits is not None
        self._runs_known_code = are_row_wise(logits_processor, self.num_rows)
        # the processors then run on open rows alone: no code sees the others
        self._narrows = self._runs_known_code and not self._keeps_scores
        self._narrowed: tuple[list[int], LogitsProcessorList] | None = None
        by_itself = self.num_rows == 1 and not self._keeps_scores and self.stop_checker.is_row_wise
        self.batchable = BatchableProcessors.of(logits_processor, input_ids) if by_itself else None

    # -- what the engine reads ------------------------------------------------------------------------------------

    @property
    def input_ids(self) -> torch.Tensor:
        """`(rows, cur_len)` int64 (prompts as they came), contiguous; a later step makes a new tensor."""
        if self._new:
            columns = torch.tensor(self._new, dtype=torch.long, device=self._ids.device).t()
            self._ids = torch.cat([self._ids, columns], dim=-1)  # int64 from the first token on, as transformers' are
            self._new = []
        return self._ids

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row up to its own last, prompt and padding included."""
        return [end or self.length for end in self._ends]

    def result(self, past_key_values: Any = None) -> torch.Tensor | GenerateDecoderOnlyOutput:
        """What `_sample` returns."""
        if not self.generation_config.return_dict_in_generate:
            return self.input_ids
        return GenerateDecoderOnlyOutput(
            sequences=self.input_ids, scores=self.scores, logits=self.raw_logits, past_key_values=past_key_values
        )

    # -- one step -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def advance(self, logits: torch.Tensor, fetch: Fetch = torch.Tensor.tolist) -> SampledTokens:
        """Takes `(len(open_rows), vocab)` logits to the next token of every row, which `fetch` brings to the host."""
        if len(logits) != len(self.open_rows) or not self.open_rows:
            raise ValueError(f"logits of {len(self.open_rows)} open rows are needed, got {len(logits)}")
        advance = self.accept(self._choose(logits, fetch))
        if advance.finished and self.open_rows and not self._narrows:
            if self._filler is None:
                shape = (self.num_rows, logits.shape[-1])
                self._filler = torch.zeros(shape, dtype=torch.float32, device=self._ids.device)
            places = [advance.rows.index(row) for row in advance.finished]
            self._filler[advance.finished] = logits[places].to(dtype=torch.float32, device=self._ids.device)
        return advance

    def accept(self, chosen: list[int], stop_string: bool | None = None) -> SampledTokens:
        """
        Appends a token to every open row, asks the criteria and feeds the streamers.

        Args:
            chosen (`list[int]`): One token for each of `open_rows`.
            stop_string (`bool`, *optional*): Of a single row: what the criterion for stop strings says, if known.
        """
        rows, tokens = self.open_rows, chosen
        if self.stop_checker.has_eos and any(self._ends):
            assert self.pad_token_id is not None
            tokens = [self.pad_token_id] * self.num_rows
            for row, token in zip(rows, chosen):
                if not self._ends[row]:
                    tokens[row] = token
        self._new.append(tokens)
        self.length += 1
        if self.batchable is not None and self.batchable.needs_seen:
            self.batchable.note(tokens[0])
        newly: list[int] = []
        if stop_string is None and self.stop_checker.others:
            with nullcontext() if self.stop_checker.is_row_wise else let_in(waiting=False):
                reasons = self.stop_checker.reasons(tokens, self.length, lambda: self.input_ids, self.scores)
            tokens = self.input_ids[:, -1].tolist()  # some criteria force a token by writing to the ids
            newly = [row for row in rows if reasons[row] is not None and not self._ends[row]]
            for row in newly:
                self.finish_reasons[row] = reasons[row]
        else:
            for row in rows:
                reason = self.stop_checker.reason(tokens[row], self.length)
                if stop_string and reason in (None, "length"):
                    reason = "stop_string"
                if reason is not None and not self._ends[row]:
                    self.finish_reasons[row] = reason
                    newly.append(row)
        return self._close(rows, tokens, newly)

    def _close(self, rows: list[int], tokens: list[int], newly: list[int]) -> SampledTokens:
        streamed = [row for row in rows if self.row_streamers[row] is not None and not self._ends[row]]
        for row in newly:
            self._ends[row] = self.length
        finished: list[int] = []
        if newly and self.stop_checker.has_eos and not self._keeps_scores:
            finished = newly
            self.open_rows = [row for row in rows if not self._ends[row]]
        elif newly and all(self._ends):
            finished, self.open_rows = rows, []
        if self.streamer is not None or streamed:
            with let_in(waiting=False):
                self._stream(tokens, streamed)
        return SampledTokens(tokens, None, finished, rows)

    def _stream(self, tokens: list[int], rows: list[int]) -> None:
        if self.streamer is not None:
            self.streamer.put(torch.tensor(tokens))
            if self.is_done:
                self.streamer.end()
        for row in rows:
            self.row_streamers[row].put(torch.tensor([tokens[row]]))
            if self._ends[row]:
                self.row_streamers[row].end()

    def _choose(self, logits: torch.Tensor, fetch: Fetch) -> list[int]:
        """One token for each open row."""
        rows = self.open_rows
        nothing_to_do = self._narrows and not self.logits_processor and not self.record_logprobs
        if nothing_to_do and not self.do_sample:
            return fetch(argmax(logits))
        logits = logits.to(dtype=torch.float32, device=self._ids.device, copy=True)
        processors = self.logits_processor
        at = rows  # where the open rows are in `logits` and `scores`
        if len(rows) < self.num_rows:
            if self._narrows:
                at, processors = list(range(len(rows))), self._processors_of(rows)
            else:
                assert self._filler is not None
                logits = self._filler.index_copy(0, torch.tensor(rows, device=logits.device), logits)
        before = logits.clone() if self.record_logprobs and processors else logits
        scores = logits
        if processors or not self._narrows:
            ids = self.input_ids if len(scores) == self.num_rows else self.input_ids[rows]
            if self._runs_known_code:
                scores = processors(ids, scores)
            else:
                with let_in(waiting=False):
                    scores = processors(ids, scores)
                if len(scores) != len(ids):
                    raise RuntimeError(f"the logits processors made scores of {len(scores)} rows from {len(ids)} rows")
        if self.scores is not None:
            self.scores += (scores,)
        if self.raw_logits is not None:
            self.raw_logits += (logits,)
        chosen = self._draw(scores, at) if self.do_sample else _pick(argmax(scores), at)
        if self.record_logprobs:
            self._record(rows, chosen, before[at], scores[at])
        return fetch(chosen)

    def _processors_of(self, rows: list[int]) -> LogitsProcessorList:
        if self._narrowed is None or self._narrowed[0] != rows:
            self._narrowed = (rows, for_rows(self.logits_processor, rows, self.num_rows))
        return self._narrowed[1]

    def _draw(self, scores: torch.Tensor, at: list[int]) -> torch.Tensor:
        """Draws over all rows, as transformers does; rows that ended take part with any probabilities at all."""
        probs = torch.nn.functional.softmax(scores, dim=-1)
        if len(at) < self.num_rows:
            every = torch.full((self.num_rows, probs.shape[-1]), 1.0, device=probs.device)
            every[self.open_rows] = probs[at]
            probs = every
        if self.generator is not None:
            probs = probs.to(self.generator.device)
        drawn = cpp.multinomial(probs, self.generator)
        return _pick(drawn, self.open_rows).to(scores.device)

    def _record(self, rows: list[int], chosen: torch.Tensor, raw: torch.Tensor, scores: torch.Tensor) -> None:
        for row, own, processed in zip(rows, logprobs_of(raw, chosen), logprobs_of(scores, chosen)):
            if not self._ends[row]:
                self.logprobs[row].append((own, processed))

    def tail(self, count: int) -> list[int]:
        """The last `count` tokens of a single row, or as many as it has."""
        if len(self._new) >= count:
            return [tokens[0] for tokens in self._new[len(self._new) - count :]]
        old = self._ids[0, -(count - len(self._new)) :].tolist()
        return old + [tokens[0] for tokens in self._new]

    # -- rows that go on one by one -------------------------------------------------------------------------------

    @property
    def can_split(self) -> bool:
        """
        Whether rows may go on one by one: no code of a caller's own sees the batch, and nothing of a row depends on
        when others end. Draws come from one stream of random numbers whose order then is another.
        """
        if self.streamer is not None or self._keeps_scores or not are_row_wise(self.logits_processor, self.num_rows):
            return False
        return self.stop_checker.is_row_wise and (self.stop_checker.has_eos or self.stop_checker.ends_all_at_once)

    def split(self) -> list[SampleDecoding]:
        """One decoding a row, carrying on from here; each keeps its padding."""
        if not self.can_split:
            raise ValueError("these rows depend on one another: only `can_split` decodings can be split")
        ids = self.input_ids
        parts = []
        for row in range(self.num_rows):
            part = SampleDecoding(
                ids[row : row + 1].contiguous(),
                for_rows(self.logits_processor, [row], self.num_rows),
                self.stopping_criteria,
                self.generation_config,
                generator=self.generator,
                row_streamers=[self.row_streamers[row]],
                record_logprobs=self.record_logprobs,
            )
            part.finish_reasons, part._ends = [self.finish_reasons[row]], [self._ends[row]]
            part.open_rows = [0] if row in self.open_rows else []
            part.logprobs = [self.logprobs[row]]
            parts.append(part)
        return parts

    def join(self, parts: Sequence[SampleDecoding]) -> SampleDecoding:
        """Takes the rows back from the decodings that `split` returned, and returns itself."""
        self.length = max(part.length for part in parts)
        rows = []
        for part in parts:
            missing = self.length - part.length
            rows.append(torch.nn.functional.pad(part.input_ids, (0, missing), value=self.pad_token_id or 0))
        self._ids, self._new = torch.cat(rows), []
        self.finish_reasons = [part.finish_reasons[0] for part in parts]
        self._ends = [part._ends[0] for part in parts]
        self.logprobs = [part.logprobs[0] for part in parts]
        self.open_rows = [row for row, part in enumerate(parts) if part.open_rows]
        return self


def _pick(tokens: torch.Tensor, rows: list[int]) -> torch.Tensor:
    """`tokens[rows]`, which waits for the device, unless it is all of them in order."""
    return tokens if len(rows) == len(tokens) else tokens[rows]


def logprobs_of(scores: torch.Tensor, tokens: torch.Tensor) -> list[float]:
    """Log-probabilities of one token a row under `(rows, vocab)` scores."""
    rows = torch.arange(len(scores), device=scores.device)
    return (values_at(scores, rows, tokens.to(scores.device)) - scores.logsumexp(dim=-1)).tolist()
