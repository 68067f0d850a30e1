"""transformers' `_beam_search`, with and without sampling, suspended between two forwards. It takes
logits and returns each beam's parent; the ledger moves blocks between the beams."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from ... import compat
from ...model.structure import is_stock
from .base import Alternatives, Decoding, LoopInputs, SampledTokens, stop_string_hits
from .returned import check_listed, check_scores
from .scores import are_row_wise, top_tokens, values_at

_NEVER = -1.0e9  # transformers adds this to the score of a beam that must not be chosen


class _DrawsFrom(TorchDispatchMode):
    """Makes operations that would draw from the global generator draw from this one, which is on
    their device."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        arguments = kwargs or {}
        draw = None
        if arguments.get("generator") is None:
            draw = _seeded_overload(func)
        if draw is None:
            return func(*args, **arguments)
        return draw(*args, **{**arguments, "generator": self._generator})


@functools.cache
def _seeded_overload(func: Any) -> Any:
    """Returns the overload of a random operation that takes a generator; `None` for other
    operations."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    names = {argument.name for argument in func._schema.arguments}
    names.add("generator")
    packet = func.overloadpacket
    for overload_name in packet.overloads():
        overload = getattr(packet, overload_name)
        overload_names = {argument.name for argument in overload._schema.arguments}
        if overload_names == names:
            return overload
    return None


class BeamDecoding(Decoding):
    """Beam search over a batch of prompts, with the model's own helper methods. Row `prompt *
    num_beams + beam` is a running beam. Rows of a prompt whose result is final leave `open_rows`,
    unless a caller's code sees the batch."""

    def __init__(self, model: PreTrainedModel, inputs: LoopInputs):
        config: Any = inputs.generation_config
        if config.low_memory:
            raise ValueError("`low_memory=True` is not supported by beam search: leave it out")
        self.model: Any = model
        self.num_beams = config.num_beams
        self.max_length = config.max_length
        beams = self.num_beams
        prompts = self.num_prompts = len(inputs.input_ids) // beams
        super().__init__(inputs, num_returned=prompts * config.num_return_sequences)
        device = inputs.input_ids.device
        self.prompt_length = self.length
        eos = compat.special_token(config, "eos")
        pad = compat.special_token(config, "pad")
        num_eos = 0
        if eos is not None:
            num_eos = len(eos)
        self.beams_to_keep = max(2, 1 + num_eos) * beams
        is_row_wise = are_row_wise(self.logits_processor, self.num_rows)
        self._runs_stock_code = is_row_wise and not self.stop_checker.callers_criteria
        # other search methods may compare prompts, and choose any token
        is_stock_search = all(is_stock(model, name) for name in compat.BEAM_METHODS)
        self.runs_callers_code = not (self._runs_stock_code and is_stock_search)
        returns_dict = config.return_dict_in_generate
        self._may_close = is_stock_search and self._runs_stock_code and not returns_dict
        # by step: log-probabilities by row and the token that follows it; each row's alternatives
        self._history: list[
            tuple[dict[tuple[int, int], tuple[float, float]], list[Alternatives]]
        ] = []
        # running beams and finished ones, [prompts, beams, max_length]
        fill = -1
        if eos is not None:
            fill = int(pad or eos[0])
        shape = (prompts, beams)
        self.running = torch.full(
            (*shape, self.max_length),
            fill,
            dtype=torch.int64,
            device=device,
        )
        prompt_ids = inputs.input_ids.unflatten(0, shape)
        self.running[:, :, : self.length] = prompt_ids
        self.sequences = self.running.clone()
        # at first all beams of a prompt are equal: only the first one is a candidate
        self.running_scores = torch.zeros(shape, device=device)
        self.running_scores[:, 1:] = _NEVER
        self.beam_scores = torch.full(shape, _NEVER, device=device)
        self.is_finished = torch.zeros(shape, dtype=torch.bool, device=device)
        self.may_improve = torch.ones((prompts, 1), dtype=torch.bool, device=device)
        # the row that each generated token continued, [prompts, beams, new tokens]
        new_tokens = self.running[:, :, self.length :]
        self.running_indices = torch.full_like(new_tokens, -1, dtype=torch.int32)
        self.beam_indices = self.running_indices.clone()
        kept = torch.arange(self.beams_to_keep, device=device)
        self._top_beams = kept < beams

    @property
    def lengths(self) -> list[int]:
        is_new = self.returned(self.beam_indices) >= 0
        num_new = is_new.sum(dim=1)
        return (self.prompt_length + num_new).tolist()

    def returned(self, of_beams: Tensor) -> Tensor:
        """Selects the returned beams of `(prompts, beams, ...)`, as `(prompts *
        num_return_sequences, ...)`."""
        count = self.config.num_return_sequences
        return of_beams[:, :count].flatten(0, 1)

    def result(self, cache: Any = None) -> Tensor | GenerateBeamDecoderOnlyOutput:
        longest = max(self.lengths)
        sequences = self.returned(self.sequences)[:, :longest]
        if not self.config.return_dict_in_generate:
            return sequences
        sequences_scores = None
        if self.config.output_scores:
            sequences_scores = self.returned(self.beam_scores)
        num_new = longest - self.prompt_length
        beam_indices = self.returned(self.beam_indices)[:, :num_new]
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences,
            sequences_scores=sequences_scores,
            scores=self.scores,
            logits=self.raw_logits,
            beam_indices=beam_indices,
            **{compat.OUTPUT_CACHE: cache},
        )

    def step(self, logits: Tensor) -> SampledTokens:
        """Chooses the next running beams from `(len(open_rows), vocab)` logits of any float
        dtype."""
        rows = self.open_rows
        best = self._continue(logits)
        sequences = best["topk_running_sequences"]
        continuations = sequences[:, :, : self.length + 1]
        ids = continuations.flatten(0, 1)
        try:
            are_ends = self.stopping_criteria(ids, self.scores)
        except Exception as error:
            check_listed(len(ids), error)
            raise
        ends = are_ends.unflatten(0, (self.num_prompts, self.beams_to_keep))
        step = self.length - self.prompt_length
        continued: Any = dict(
            best,
            next_token_hits_stopping_criteria=ends,
            num_beams=self.num_beams,
        )
        self.running, self.running_scores, self.running_indices = compat.running_beams(
            self.model,
            **continued,
        )
        self.sequences, self.beam_scores, self.beam_indices, self.is_finished = (
            compat.update_finished_beams(
                self.model,
                **continued,
                **self._finished_beams(),
                sequences=self.sequences,
                beam_indices=self.beam_indices,
                top_num_beam_mask=self._top_beams,
            )
        )
        self.length += 1
        self._ids = self.running[:, :, : self.length].flatten(0, 1).contiguous()
        # [prompts, 1]: whether a running beam may still beat a finished one, by transformers'
        # estimate
        self.may_improve = compat.check_early_stop(
            self.model,
            running_beam_scores=self.running_scores,
            max_length=self.max_length,
            **self._finished_beams(),
        )
        state = self.may_improve, self.is_finished, ends
        goes_on = compat.beams_are_unfinished(self.model, *state, self.config.early_stopping)
        parents = self.running_indices[..., step].flatten().tolist()
        tokens = self._ids[:, -1].tolist()
        if goes_on:
            finished = self._close_final()
        else:
            finished = self._finish()
        return SampledTokens(tokens, parents, finished, rows)

    def _continue(self, logits: Tensor) -> dict[str, Tensor]:
        """Chooses `beams_to_keep` continuations of each prompt's beams, as transformers'
        `_beam_search` does."""
        device = self._ids.device
        logits = logits.to(dtype=torch.float32, device=device, copy=True)
        logits = self._of_all_rows(logits)
        raw = logits.log_softmax(dim=-1)
        unprocessed = raw
        if self.record_logprobs:  # processors may write in place
            unprocessed = raw.clone()
        log_probs = unprocessed
        try:
            log_probs = self.logits_processor(self._ids, unprocessed)
            by_beam = log_probs.unflatten(0, (self.num_prompts, self.num_beams))
        except Exception as error:
            check_scores(self.logits_processor, logits, log_probs, error)
            raise
        if self.raw_logits is not None:
            self.raw_logits += (logits,)
        if self.scores is not None:
            self.scores += (log_probs.clone(),)
        totals = by_beam + self.running_scores[:, :, None]
        drawing: AbstractContextManager[Any] = nullcontext()
        if self.generator is not None:
            drawing = _DrawsFrom(self.generator)
        with drawing:
            scores, sequences, indices = compat.top_k_continuations(
                self.model,
                totals.flatten(1),  # [prompts, beams * vocab]
                running_sequences=self.running,
                running_beam_indices=self.running_indices,
                cur_len=self.length,
                decoder_prompt_len=self.prompt_length,
                do_sample=self.config.do_sample,
                beams_to_keep=self.beams_to_keep,
                num_beams=self.num_beams,
                batch_size=self.num_prompts,
            )
        if self.record_logprobs:
            step = self.length - self.prompt_length
            rows = indices[:, :, step].flatten().long()
            tokens = sequences[:, :, self.length].flatten()
            before = values_at(raw, rows, tokens).tolist()
            after = log_probs[rows, tokens].tolist()
            keys = zip(rows.tolist(), tokens.tolist())
            pairs = dict(zip(keys, zip(before, after)))
            best = [values.tolist() for values in top_tokens(raw, log_probs, self.num_top)]
            alternatives = [list(zip(*row)) for row in zip(*best)]
            self._history.append((pairs, alternatives))
        return dict(
            topk_log_probs=scores,
            topk_running_sequences=sequences,
            topk_running_beam_indices=indices,
        )

    def _finished_beams(self) -> dict[str, Any]:
        return dict(
            is_early_stop_heuristic_unsatisfied=self.may_improve,
            beam_scores=self.beam_scores,
            is_sent_finished=self.is_finished,
            cur_len=self.length,
            decoder_prompt_len=self.prompt_length,
            length_penalty=self.config.length_penalty,
            early_stopping=self.config.early_stopping,
        )

    def _close_final(self) -> list[int]:
        """Closes prompts whose result is final, and returns their rows: `num_beams` sequences are
        finished and, unless `early_stopping=True`, none can improve. Both conditions persist:
        `_update_finished_beams` adds -1e9 to new candidates, and `_check_early_stop_heuristic`
        never turns true again. Closed prompts do not keep the others running."""
        if not self._may_close:
            return []
        are_finished = self.is_finished.all(dim=1)
        least = self.beam_scores.amin(dim=1)
        are_final = are_finished & (least > _NEVER / 10)
        if self.config.early_stopping is not True:
            are_final &= ~self.may_improve[:, 0]
        is_final = are_final.tolist()
        num_beams = self.num_beams
        closing = [row for row in self.open_rows if is_final[row // num_beams]]
        if closing:
            remaining = [row for row in self.open_rows if not is_final[row // num_beams]]
            self.may_improve[are_final] = False
            self.running_scores[are_final] = 0.0  # keeps them finite in later steps
            self.open_rows = remaining
        return closing

    def _finish(self) -> list[int]:
        finished, self.open_rows = self.open_rows, []
        sequences: list[list[int]] = self.returned(self.sequences).tolist()
        is_finished = self.returned(self.is_finished).tolist()
        for i, length in enumerate(self.lengths):
            if not is_finished[i]:
                continue
            tail = sequences[i][:length]
            strings = self.stop_checker.stop_strings
            hit = any(stop_string_hits(criterion, [tail])[0] for criterion in strings)
            reason = self.stop_checker.reason(tail[-1], length, hit)
            self.finish_reasons[i] = reason or "criteria"
        if self.record_logprobs:
            beam_indices = self.returned(self.beam_indices).tolist()
            for i, rows in enumerate(beam_indices):
                tokens = sequences[i][self.prompt_length :]
                for (pairs, alternatives), row, token in zip(self._history, rows, tokens):
                    if row >= 0:
                        self.records[i].append((pairs[row, token], alternatives[row]))
        return finished
