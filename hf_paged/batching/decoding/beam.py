"""transformers' `_beam_search` (with and without sampling), suspended between two forwards."""

from __future__ import annotations

import contextlib
import functools
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel
from transformers.generation.utils import GenerateBeamDecoderOnlyOutput

from ... import compat
from .base import Alternatives, Decoding, LoopInputs, SampledTokens, stop_string_hits
from .scores import are_row_wise, values_at

_NEVER = -1.0e9  # transformers adds this to the score of a beam that must not be chosen


class _DrawsFrom(TorchDispatchMode):
    """Makes operations draw from a generator, on the generator's device, where they would draw from the global one."""

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self._generator = generator

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        draw = _takes_generator(func) if given.get("generator") is None else None
        if draw is None:
            return func(*args, **given)
        device = self._generator.device
        inputs, options = tree_map_only(Tensor, lambda x: x.to(device), (args, given))
        if given.get("device") is not None:
            options["device"] = device
        drawn = draw(*inputs, **{**options, "generator": self._generator})
        shown = args[0] if args and isinstance(args[0], Tensor) else None
        if shown is not None and func._schema.is_mutable:
            return shown if shown is inputs[0] else shown.copy_(drawn)
        return drawn.to(given.get("device") if shown is None else shown.device)


@functools.cache
def _takes_generator(func: Any) -> Any:
    """Returns the overload of a random operation that takes a generator; `None` for other operations."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return None
    names = {argument.name for argument in func._schema.arguments} | {"generator"}
    overloads = (getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())
    return next((x for x in overloads if {argument.name for argument in x._schema.arguments} == names), None)


class BeamDecoding(Decoding):
    """Beam search over a batch of prompts, with the model's own helper methods. Row `prompt * num_beams + beam` is a
    running beam. Rows of a prompt whose result is final leave `open_rows`, unless a caller's code sees the batch."""

    def __init__(self, model: PreTrainedModel, inputs: LoopInputs):
        config: Any = inputs.generation_config
        if config.low_memory:
            raise ValueError("`low_memory=True` is not supported by beam search: leave it out")
        self.model: Any = model
        self.num_beams, self.max_length = config.num_beams, config.max_length
        prompts = self.num_prompts = len(inputs.input_ids) // self.num_beams
        super().__init__(inputs, num_returned=prompts * config.num_return_sequences)
        beams, device, self.prompt_length = self.num_beams, inputs.input_ids.device, self.length
        eos, pad = (compat.special_token(config, name) for name in ("eos", "pad"))
        self.beams_to_keep = max(2, 1 + (0 if eos is None else len(eos))) * beams
        self._runs_known_code = are_row_wise(self.logits_processor, self.num_rows) and not self.stop_checker.others
        self._may_close = self._runs_known_code and not config.return_dict_in_generate
        # for each step, by (row, next token): the token's two log-probabilities
        self._history: list[dict[tuple[int, int], tuple[float, float]]] = []
        self._top_history: list[list[Alternatives]] = []  # for each step, by row
        # running beams and finished ones, [prompts, beams, max_length]
        fill = int(pad or eos[0]) if eos is not None else -1
        self.running = torch.full((prompts, beams, self.max_length), fill, dtype=torch.int64, device=device)
        self.running[:, :, : self.length] = inputs.input_ids.unflatten(0, (prompts, beams))
        self.sequences = self.running.clone()
        # at first all beams of a prompt are equal: only the first one is a candidate
        self.running_scores = torch.zeros((prompts, beams), device=device)
        self.running_scores[:, 1:] = _NEVER
        self.beam_scores = torch.full((prompts, beams), _NEVER, device=device)
        self.is_finished = torch.zeros((prompts, beams), dtype=torch.bool, device=device)
        self.may_improve = torch.ones((prompts, 1), dtype=torch.bool, device=device)
        # the row that each generated token continued, [prompts, beams, new tokens]
        self.running_indices = torch.full_like(self.running[:, :, self.length :], -1, dtype=torch.int32)
        self.beam_indices = self.running_indices.clone()
        self._top_beams = torch.arange(self.beams_to_keep, device=device) < beams

    @property
    def lengths(self) -> list[int]:
        return (self.prompt_length + (self.returned(self.beam_indices) >= 0).sum(dim=1)).tolist()

    def returned(self, of_beams: Tensor) -> Tensor:
        """Selects the returned beams of `(prompts, beams, ...)`, as `(prompts * num_return_sequences, ...)`."""
        return of_beams[:, : self.config.num_return_sequences].flatten(0, 1)

    def result(self, cache: Any = None) -> Tensor | GenerateBeamDecoderOnlyOutput:
        longest = max(self.lengths)
        sequences = self.returned(self.sequences)[:, :longest]
        if not self.config.return_dict_in_generate:
            return sequences
        return GenerateBeamDecoderOnlyOutput(
            sequences=sequences,
            sequences_scores=self.returned(self.beam_scores) if self.config.output_scores else None,
            scores=self.scores,
            logits=self.raw_logits,
            beam_indices=self.returned(self.beam_indices)[:, : longest - self.prompt_length],
            **{compat.OUTPUT_CACHE: cache},
        )

    def step(self, logits: Tensor) -> SampledTokens:
        """Chooses the next running beams from `(len(open_rows), vocab)` logits of any float dtype."""
        rows = self.open_rows
        with self._callers_code():
            best = self._continue(logits)
            ids = best["topk_running_sequences"][:, :, : self.length + 1].flatten(0, 1)
            ends = self.stopping_criteria(ids, self.scores).unflatten(0, (self.num_prompts, self.beams_to_keep))
        continued: Any = dict(best, next_token_hits_stopping_criteria=ends, num_beams=self.num_beams)
        self.running, self.running_scores, self.running_indices = compat.running_beams(self.model, **continued)
        self.sequences, self.beam_scores, self.beam_indices, self.is_finished = compat.update_finished_beams(
            self.model,
            **continued,
            **self._finished_beams(),
            sequences=self.sequences,
            beam_indices=self.beam_indices,
            top_num_beam_mask=self._top_beams,
        )
        self.length += 1
        self._ids = self.running[:, :, : self.length].flatten(0, 1).contiguous()
        # whether a running beam may still beat a finished one, by transformers' estimate, [prompts, 1]
        self.may_improve = compat.check_early_stop(
            self.model, running_beam_scores=self.running_scores, max_length=self.max_length, **self._finished_beams()
        )
        state = self.may_improve, self.is_finished, ends
        goes_on = compat.beams_are_unfinished(self.model, *state, self.config.early_stopping)
        parents = self.running_indices[..., self.length - 1 - self.prompt_length].flatten().tolist()
        tokens = self._ids[:, -1].tolist()
        finished = self._close_settled() if goes_on else self._finish()
        return SampledTokens(tokens, parents, finished, rows)

    def _continue(self, logits: Tensor) -> dict[str, Tensor]:
        """Chooses `beams_to_keep` continuations of each prompt's beams, as transformers' `_beam_search` does."""
        logits = self._of_all_rows(logits.to(dtype=torch.float32, device=self._ids.device, copy=True))
        raw = torch.nn.functional.log_softmax(logits, dim=-1)
        log_probs = self.logits_processor(self._ids, raw.clone() if self.record_logprobs else raw)
        if self.raw_logits is not None:
            self.raw_logits += (logits,)
        if self.scores is not None:
            self.scores += (log_probs.clone(),)
        totals = log_probs.unflatten(0, (self.num_prompts, self.num_beams)) + self.running_scores[:, :, None]
        with contextlib.nullcontext() if self.generator is None else _DrawsFrom(self.generator):
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
            rows = indices[:, :, self.length - self.prompt_length].flatten().long()
            tokens = sequences[:, :, self.length].flatten()
            pairs = zip(values_at(raw, rows, tokens).tolist(), log_probs[rows, tokens].tolist())
            self._history.append(dict(zip(zip(rows.tolist(), tokens.tolist()), pairs)))
            self._top_history.append(self._alternatives(raw, log_probs))
        return dict(topk_log_probs=scores, topk_running_sequences=sequences, topk_running_beam_indices=indices)

    def _alternatives(self, raw: Tensor, log_probs: Tensor) -> list[Alternatives]:
        best, ids = raw.topk(min(self.num_top, raw.shape[1]), dim=-1)
        processed = values_at(log_probs, torch.arange(len(ids), device=ids.device)[:, None], ids)
        return [list(zip(*row)) for row in zip(ids.tolist(), best.tolist(), processed.tolist())]

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

    def _close_settled(self) -> list[int]:
        """Closes prompts whose result is final, and returns their rows: `num_beams` sequences are finished and, unless
        `early_stopping=True`, none can improve. Both conditions persist: `_update_finished_beams` adds -1e9 to new
        candidates, and `_check_early_stop_heuristic` never takes its answer back. Closed prompts do not keep the others
        running."""
        if not self._may_close:
            return []
        settled = self.is_finished.all(dim=1) & (self.beam_scores.amin(dim=1) > _NEVER / 10)
        if self.config.early_stopping is not True:
            settled &= ~self.may_improve[:, 0]
        is_settled = settled.tolist()
        closing = [row for row in self.open_rows if is_settled[row // self.num_beams]]
        if closing:
            self.may_improve[settled] = False
            self.running_scores[settled] = 0.0  # keeps them finite in later steps
            self.open_rows = [row for row in self.open_rows if not is_settled[row // self.num_beams]]
        return closing

    def _finish(self) -> list[int]:
        finished, self.open_rows = self.open_rows, []
        sequences: list[list[int]] = self.returned(self.sequences).tolist()
        is_finished = self.returned(self.is_finished).tolist()
        for i, length in enumerate(self.lengths):
            if is_finished[i]:
                tail = sequences[i][:length]
                hit = any(stop_string_hits(criterion, [tail])[0] for criterion in self.stop_checker.stop_strings)
                self.finish_reasons[i] = self.stop_checker.reason(tail[-1], length, hit) or "criteria"
        if self.record_logprobs:
            for i, rows in enumerate(self.returned(self.beam_indices).tolist()):
                new = zip(self._history, rows, sequences[i][self.prompt_length :])
                self.logprobs[i] = [step[row, token] for step, row, token in new if row >= 0]
                self.top_logprobs[i] = [step[row] for step, row in zip(self._top_history, rows) if row >= 0]
        return finished
