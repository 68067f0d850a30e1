"""Beam search, with and without sampling, as in transformers' `_beam_search`, but one step at a
time: `BeamDecoding.step` takes logits, and returns the parents and tokens of the next beams. The
ledger then permutes the beams' block tables. This module is one of hf_paged's optional parts
(`rooms.py`), and imports none of the others."""

from __future__ import annotations

import functools
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedModel, StoppingCriteriaList
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from . import compat
from .batching.decoding.base import (
    Alternatives,
    Decoding,
    LoopInputs,
    SampledTokens,
    stop_string_hits,
)
from .batching.decoding.returned import check_criterion_result, check_scores
from .batching.decoding.scores import are_row_wise, top_tokens, values_at
from .model.structure import is_stock

_PENALTY = -1.0e9  # as in transformers: the score of a beam that must not be chosen


class _SeededDraws(TorchDispatchMode):
    """A mode in which random operations draw from `generator` instead of the global generator. The
    generator must be on the operations' device."""

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
        seeded_func = None
        if arguments.get("generator") is None:
            seeded_func = _seeded_overload(func)
        if seeded_func is None:
            return func(*args, **arguments)
        return seeded_func(*args, **{**arguments, "generator": self._generator})


@functools.cache
def _seeded_overload(func: Any) -> Any:
    """Returns the overload of a random operation that takes a generator besides the operation's
    arguments; `None` if there is none, or if the operation is not random."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    names = {"generator", *_argument_names(func)}
    packet = func.overloadpacket
    overloads = (getattr(packet, name) for name in packet.overloads())
    return next((overload for overload in overloads if _argument_names(overload) == names), None)


def _argument_names(func: Any) -> set[str]:
    return {argument.name for argument in func._schema.arguments}


class BeamDecoding(Decoding):
    """Beam search over a batch of prompts, with the model's helper methods (`compat.BEAM_METHODS`).
    Row `prompt * num_beams + beam` holds a running beam. A prompt's rows leave `open_rows` once its
    result is final. But all rows stay open to the end if `return_dict_in_generate` is set, or if
    the caller's code, or a helper method that the model overrides, may read the batch. The
    constructor raises `ValueError` for `low_memory`."""

    has_beams = True

    def __init__(self, model: PreTrainedModel, inputs: LoopInputs):
        config: Any = inputs.generation_config
        if config.low_memory:
            raise ValueError("`low_memory=True` is not supported by beam search: leave it out")
        self.model: Any = model
        self.num_beams = config.num_beams
        self.max_length = config.max_length
        num_beams = self.num_beams
        num_prompts = self.num_prompts = len(inputs.input_ids) // num_beams
        super().__init__(inputs, num_returned=num_prompts * config.num_return_sequences)
        device = inputs.input_ids.device
        self.prompt_length = self.length
        eos = compat.special_token(config, "eos")
        pad = compat.special_token(config, "pad")
        num_eos = 0 if eos is None else len(eos)
        self.beams_to_keep = max(2, 1 + num_eos) * num_beams
        is_row_wise = are_row_wise(self.logits_processor, self.num_rows)
        self._is_row_wise = is_row_wise and not self.stop_checker.callers_criteria
        # methods that a model overrides may compare prompts, and choose any token
        is_stock_search = all(is_stock(model, name) for name in compat.BEAM_METHODS)
        self.runs_callers_code = not (self._is_row_wise and is_stock_search)
        self.may_run_model = self.runs_callers_code
        returns_dict = config.return_dict_in_generate
        self._can_close_early = is_stock_search and self._is_row_wise and not returns_dict
        # by step: the log-probabilities of each chosen (row, next token) before and after the
        # processors; and the alternatives of each row
        self._records_by_step: list[
            tuple[dict[tuple[int, int], tuple[float, float]], list[Alternatives]]
        ] = []
        # [prompts, beams, max_length]: the running beams; below, `sequences`: the finished beams
        fill_id = -1 if eos is None else int(pad or eos[0])
        shape = (num_prompts, num_beams)
        self.running_sequences = torch.full(
            (*shape, self.max_length),
            fill_id,
            dtype=torch.int64,
            device=device,
        )
        prompt_ids = inputs.input_ids.unflatten(0, shape)
        self.running_sequences[:, :, : self.length] = prompt_ids
        self.sequences = self.running_sequences.clone()
        # the beams of a prompt are equal at first, so only the first one is a candidate
        self.running_scores = torch.zeros(shape, dtype=torch.float32, device=device)
        self.running_scores[:, 1:] = _PENALTY
        self.beam_scores = torch.full(shape, _PENALTY, dtype=torch.float32, device=device)
        self.is_finished = torch.zeros(shape, dtype=torch.bool, device=device)
        self.may_improve = torch.ones((num_prompts, 1), dtype=torch.bool, device=device)
        # [prompts, beams, new tokens]: for each generated token, the row that it continued; -1 for
        # tokens that are not generated yet
        new_tokens = self.running_sequences[:, :, self.length :]
        self.running_indices = torch.full_like(new_tokens, -1, dtype=torch.int32)
        self.beam_indices = self.running_indices.clone()
        candidates = torch.arange(self.beams_to_keep, device=device)
        self._is_top_beam = candidates < num_beams

    @property
    def lengths(self) -> list[int]:
        """Length of each returned sequence, including the prompt and its padding."""
        is_new = self.select_returned(self.beam_indices) >= 0
        num_new = is_new.sum(dim=1)
        return (self.prompt_length + num_new).tolist()

    def select_returned(self, values: Tensor) -> Tensor:
        """Selects the returned sequences from `(prompts, beams, ...)` values, as `(prompts *
        num_return_sequences, ...)`."""
        num_returned = self.config.num_return_sequences
        return values[:, :num_returned].flatten(0, 1)

    def final(self) -> tuple[Tensor, list[float]]:
        """Returns the token ids of the returned sequences, `(n, max_length)`, and their scores."""
        scores: list[float] = self.select_returned(self.beam_scores).tolist()
        return self.select_returned(self.sequences), scores

    def result(self, cache: Any = None) -> Tensor | GenerateBeamDecoderOnlyOutput:
        """Returns what transformers' loop returns; an output object contains `cache`."""
        longest_length = max(self.lengths)
        sequences = self.select_returned(self.sequences)[:, :longest_length]
        if not self.config.return_dict_in_generate:
            return sequences
        sequences_scores = None
        if self.config.output_scores:
            sequences_scores = self.select_returned(self.beam_scores)
        num_new = longest_length - self.prompt_length
        beam_indices = self.select_returned(self.beam_indices)[:, :num_new]
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences,
            sequences_scores=sequences_scores,
            scores=self.scores,
            logits=self.raw_logits,
            beam_indices=beam_indices,
            **{compat.OUTPUT_CACHE: cache},
        )

    def step(self, logits: Tensor) -> SampledTokens:
        """Chooses the next running beams from `(len(open_rows), vocab)` logits of any float dtype,
        and updates the finished beams."""
        rows = self.open_rows
        top_continuations = self._continue(logits)
        sequences = top_continuations["topk_running_sequences"]
        ids = sequences[:, :, : self.length + 1].flatten(0, 1)
        try:
            are_ends = self.stopping_criteria(ids, self.scores)
        except Exception as error:
            _check_criteria(len(ids), error)
            raise
        ends_by_prompt = are_ends.unflatten(0, (self.num_prompts, self.beams_to_keep))
        num_generated = self.length - self.prompt_length
        arguments: Any = dict(
            top_continuations,
            next_token_hits_stopping_criteria=ends_by_prompt,
            num_beams=self.num_beams,
        )
        self.running_sequences, self.running_scores, self.running_indices = compat.running_beams(
            self.model,
            **arguments,
        )
        self.sequences, self.beam_scores, self.beam_indices, self.is_finished = (
            compat.update_finished_beams(
                self.model,
                **arguments,
                **self._finished_beams(),
                sequences=self.sequences,
                beam_indices=self.beam_indices,
                top_num_beam_mask=self._is_top_beam,
            )
        )
        self.length += 1
        # a view, as in transformers: a processor may write to the ids
        self._ids = self.running_sequences[:, :, : self.length].flatten(0, 1)
        # [prompts, 1]: transformers' estimate of whether a running beam can beat a finished one
        self.may_improve = compat.check_early_stop(
            self.model,
            running_beam_scores=self.running_scores,
            max_length=self.max_length,
            **self._finished_beams(),
        )
        state = self.may_improve, self.is_finished, ends_by_prompt
        is_unfinished = compat.beams_are_unfinished(self.model, *state, self.config.early_stopping)
        parents = self.running_indices[..., num_generated].flatten().tolist()
        tokens = self._ids[:, -1].tolist()
        if is_unfinished:
            closed_rows = self._close_final_prompts()
        else:
            closed_rows = self._close_all()
        return SampledTokens(tokens, parents, closed_rows, rows)

    def _continue(self, logits: Tensor) -> dict[str, Tensor]:
        """Chooses `beams_to_keep` continuations of each prompt's beams, as transformers'
        `_beam_search` does. Returns them as arguments of `compat.running_beams` and
        `compat.update_finished_beams`."""
        device = self._ids.device
        logits = logits.to(dtype=torch.float32, device=device, copy=True)
        logits = self._expand_to_all_rows(logits)
        raw_log_probs = logits.log_softmax(dim=-1)
        log_probs = raw_log_probs
        if self.record_logprobs:  # processors may write in place
            log_probs = raw_log_probs.clone()
        try:
            log_probs = self.logits_processor(self._ids, log_probs)
            by_beam = log_probs.unflatten(0, (self.num_prompts, self.num_beams))
        except Exception as error:
            check_scores(self.logits_processor, logits, log_probs, error)
            raise
        if self.raw_logits is not None:
            self.raw_logits += (logits,)
        if self.scores is not None:
            self.scores += (log_probs.clone(),)
        total_scores = by_beam + self.running_scores[:, :, None]
        draw_context: AbstractContextManager[Any] = nullcontext()
        if self.generator is not None:
            draw_context = _SeededDraws(self.generator)
        with draw_context:
            scores, sequences, indices = compat.top_k_continuations(
                self.model,
                total_scores.flatten(1),  # [prompts, beams * vocab]
                running_sequences=self.running_sequences,
                running_beam_indices=self.running_indices,
                cur_len=self.length,
                decoder_prompt_len=self.prompt_length,
                do_sample=self.config.do_sample,
                beams_to_keep=self.beams_to_keep,
                num_beams=self.num_beams,
                batch_size=self.num_prompts,
            )
        if self.record_logprobs:
            num_generated = self.length - self.prompt_length
            rows = indices[:, :, num_generated].flatten().long()
            tokens = sequences[:, :, self.length].flatten()
            before = values_at(raw_log_probs, rows, tokens).tolist()
            after = log_probs[rows, tokens].tolist()
            keys = zip(rows.tolist(), tokens.tolist())
            logprobs_by_choice = dict(zip(keys, zip(before, after)))
            columns = [
                values.tolist()
                for values in top_tokens(raw_log_probs, log_probs, self.num_alternatives)
            ]
            alternatives = [list(zip(*row)) for row in zip(*columns)]
            self._records_by_step.append((logprobs_by_choice, alternatives))
        return dict(
            topk_log_probs=scores,
            topk_running_sequences=sequences,
            topk_running_beam_indices=indices,
        )

    def _finished_beams(self) -> dict[str, Any]:
        """Returns the arguments that describe finished beams to transformers' methods."""
        return dict(
            is_early_stop_heuristic_unsatisfied=self.may_improve,
            beam_scores=self.beam_scores,
            is_sent_finished=self.is_finished,
            cur_len=self.length,
            decoder_prompt_len=self.prompt_length,
            length_penalty=self.config.length_penalty,
            early_stopping=self.config.early_stopping,
        )

    def _close_final_prompts(self) -> list[int]:
        """Closes prompts whose result is final, and returns their rows. A result is final if all of
        its `num_beams` sequences are finished and, unless `early_stopping=True`, no running beam
        can beat them. It stays final: `_update_finished_beams` adds -1e9 to the scores of new
        candidates, and `_check_early_stop_heuristic` never returns true for the prompt again.
        Closed prompts do not prolong the search of the others."""
        if not self._can_close_early:
            return []
        are_finished = self.is_finished.all(dim=1)
        worst_scores = self.beam_scores.amin(dim=1)
        # a sequence whose score includes the penalty of -1e9 can still be replaced
        are_final = are_finished & (worst_scores > _PENALTY / 10)
        if self.config.early_stopping is not True:
            are_final &= ~self.may_improve[:, 0]
        is_final = are_final.tolist()
        num_beams = self.num_beams
        closed_rows = [row for row in self.open_rows if is_final[row // num_beams]]
        if closed_rows:
            remaining_rows = [row for row in self.open_rows if not is_final[row // num_beams]]
            self.may_improve[are_final] = False
            self.running_scores[are_final] = 0.0  # so that they stay finite in later steps
            self.open_rows = remaining_rows
        return closed_rows

    def _close_all(self) -> list[int]:
        """Closes all open rows and returns them. Sets the finish reasons of the returned sequences
        that are finished, and the records of all returned sequences."""
        closed_rows, self.open_rows = self.open_rows, []
        sequences: list[list[int]] = self.select_returned(self.sequences).tolist()
        is_finished = self.select_returned(self.is_finished).tolist()
        for i, length in enumerate(self.lengths):
            if not is_finished[i]:
                continue
            ids = sequences[i][:length]
            criteria = self.stop_checker.stop_strings
            is_hit = any(stop_string_hits(criterion, [ids])[0] for criterion in criteria)
            reason = self.stop_checker.finish_reason(ids[-1], length, is_hit)
            self.finish_reasons[i] = reason or "criteria"
        if self.record_logprobs:
            beam_indices = self.select_returned(self.beam_indices).tolist()
            for i, rows in enumerate(beam_indices):
                tokens = sequences[i][self.prompt_length :]
                for (logprobs_by_choice, alternatives), row, token in zip(
                    self._records_by_step, rows, tokens
                ):
                    if row >= 0:
                        self.records[i].append((logprobs_by_choice[row, token], alternatives[row]))
        return closed_rows


def _check_criteria(num_rows: int, error: Exception) -> None:
    """Calls `check_criterion_result` if transformers' `StoppingCriteriaList` itself raised `error`
    when it used the result of a criterion; otherwise does nothing."""
    innermost = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    list_code = StoppingCriteriaList.__call__.__code__
    if innermost is None or innermost.tb_frame.f_code is not list_code:
        return
    frame_locals = innermost.tb_frame.f_locals
    if "criteria" in frame_locals:
        check_criterion_result(frame_locals["criteria"], NotImplemented, num_rows, error)
