"""A `generate` call on the engine: transformers has prepared everything, the engine decodes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ..attention.masks import mask_observer
from ..batching.assembly import packed_core
from ..batching.decoding.beam import BeamDecoding
from ..batching.decoding.sample import SampleDecoding
from ..batching.job import Job
from ..batching.loop import Core
from ..batching.request import Request, Sequence
from ..batching.runner import PackedRunner
from ..cache.block_manager import UNCACHED
from ..cache.paged_cache import PagedCache
from ..config import PagedConfig
from ..interrupts import held
from ..model.capability import packable

# Computing fewer tokens than that takes about as long as reading all weights once, to see whether they changed.
MIN_CACHED_TOKENS = 128
# What transformers passes beside the inputs and the engine has no use for.
_PASSIVE = {"past_key_values", "use_cache", "logits_to_keep", "tokenizer", "attention_mask", "position_ids"}


@dataclass
class GenerateCall:
    """
    What `GenerationMixin._sample` or `_beam_search` was called with.

    Args:
        model ([`PreTrainedModel`]): The model.
        cache ([`PagedCache`]): The empty cache that was built for the call.
        input_ids (`torch.Tensor` of shape `(rows, length)`): Prompts, padded on the left, each `repeats` times.
        repeats (`int`): Samples or beams of a prompt.
        uses_beams (`bool`): Whether `_beam_search` was called.
        model_kwargs (`dict`): What the model's forward would get.
        num_captured_steps (`int`): After `run`: decode steps that were replays of a graph.
    """

    model: PreTrainedModel
    cache: PagedCache
    input_ids: Tensor
    logits_processor: LogitsProcessorList
    stopping_criteria: StoppingCriteriaList
    generation_config: GenerationConfig
    repeats: int
    uses_beams: bool
    model_kwargs: dict[str, Any]
    streamer: Any = None
    synced_gpus: bool = False
    num_captured_steps: int = 0

    def obstacle(self) -> str | None:
        """Why the engine cannot serve the call, or `None` if it can."""
        config = self.generation_config
        if self.synced_gpus:
            return "synced_gpus"
        if config.return_dict_in_generate and (config.output_attentions or config.output_hidden_states):
            return "attentions or hidden states are asked for"
        if not self.model_kwargs.get("use_cache", True):  # transformers' loop then sends all tokens in every step
            return f"use_cache is {self.model_kwargs['use_cache']!r}"
        if config.is_assistant or config.prefill_chunk_size is not None or config.low_memory:
            return "is_assistant, prefill_chunk_size or low_memory is set"
        other = [k for k, v in self.model_kwargs.items() if k not in _PASSIVE and not _says_nothing(v)]
        if other:
            return f"model inputs other than token ids: {', '.join(sorted(other))}"
        keep = self.model_kwargs.get("logits_to_keep")
        if keep is not None and not (isinstance(keep, int) and keep == 1):
            return "logits_to_keep is set"
        return self._layout_obstacle() or packable(self.model, self.cache, PackedRunner)

    def _layout_obstacle(self) -> str | None:
        ids, mask = self.input_ids, self.model_kwargs.get("attention_mask")
        if ids.dim() != 2 or not ids.shape[1]:
            return "there are no token ids"
        if mask is not None:
            if mask.shape != ids.shape:
                return "the attention mask has another shape than the token ids"
            mask = mask != 0
            if bool((mask[:, :-1] & ~mask[:, 1:]).any()) or not bool(mask[:, -1].all()):
                return "the attention mask hides more than padding on the left"
        positions = self.model_kwargs.get("position_ids")
        if positions is not None:
            shown = torch.ones_like(ids, dtype=torch.bool) if mask is None else mask
            expected = shown.long().cumsum(-1) - 1
            if positions.dim() != 2 or positions.shape[1] != ids.shape[1]:
                return "the position ids are not one a token"
            if bool(((positions != expected) & shown).any()):
                return "the position ids do not count a row's tokens"
        for value in (ids, mask):
            if value is not None and self.repeats > 1:
                groups = value.unflatten(0, (-1, self.repeats))
                if not bool((groups == groups[:, :1]).all()):
                    return "the rows of a prompt differ"
        return None

    # -- decoding -------------------------------------------------------------------------------------------------

    def run(self) -> Any:
        """What `_sample` or `_beam_search` would have returned. Raises what they would have raised."""
        with held():
            return self._run()

    def _run(self) -> Any:
        rows = len(self.input_ids)
        core = packed_core(self.model, self.cache, max_num_seqs=rows)
        job, is_settled = self._job(), False
        token = mask_observer.set(None)
        try:
            core.begin(check_weights=self._is_worth_keeping)
            core.open_window()
            core.add(job)
            while not job.is_done:
                for ended in core.step():
                    if ended.error is not None:
                        raise ended.error
                if not is_settled and core.num_generated_tokens:  # the first token does not wait for that
                    core.settle(is_call=True)
                    is_settled = True
            return self._result(core, job)
        finally:
            if not is_settled:
                core.abandon()
            mask_observer.reset(token)
            self.num_captured_steps = core.num_captured_steps
            core.drop(job)
            for request, _ in job.rows:  # no cycle: what the decoding holds goes with it
                request.payload = None

    @property
    def _is_worth_keeping(self) -> bool:
        """Whether the prefix cache could save more time than it takes to see that the weights are what they were."""
        return len(self.input_ids) * self._max_length >= MIN_CACHED_TOKENS

    @property
    def _max_length(self) -> int:
        length: int = self.stopping_criteria.max_length or self.generation_config.max_length
        return length

    def _job(self) -> Job:
        config = self.generation_config
        keep_blocks = bool(config.return_dict_in_generate)
        decoding: Any
        if self.uses_beams:
            decoding = BeamDecoding(
                self.model,
                self.input_ids,
                self.logits_processor,
                self.stopping_criteria,
                config,
            )
        else:
            decoding = SampleDecoding(
                self.input_ids,
                self.logits_processor,
                self.stopping_criteria,
                config,
                streamer=self.streamer,
            )
        paddings = self._paddings()
        # not the memory's config, which calls of other threads may replace meanwhile
        salt = PagedConfig.coerce(config.cache_config).cache_salt
        rows: list[tuple[Request, int]] = []
        for row in range(0, len(self.input_ids), self.repeats):
            prompt = self.input_ids[row, paddings[row] :].tolist()
            request = Request(
                request_id=f"row {row}",
                sequences=[Sequence(prompt)],
                max_num_tokens=self._max_length - paddings[row],
                num_rows=self.repeats,
                namespace=(None, salt) if self._is_worth_keeping else UNCACHED,
            )
            rows += [(request, index) for index in range(self.repeats)]
        return Job(decoding, rows, keep_blocks)

    def _paddings(self) -> list[int]:
        mask = self.model_kwargs.get("attention_mask")
        return [0] * len(self.input_ids) if mask is None else (mask == 0).sum(-1).tolist()

    def _result(self, core: Core, job: Job) -> Any:
        decoding = job.decoding
        if job.parts:
            decoding = decoding.join([part.decoding for part in job.parts])
        if not job.keep_blocks:
            return decoding.result()
        kept = [job.kept[row] if not job.parts else job.parts[row].kept[0] for row in range(len(job.rows))]
        self._fill_cache(core, kept, decoding)
        return decoding.result(past_key_values=self.cache)

    def _fill_cache(self, core: Core, kept: list[tuple[Any, int]], decoding: Any) -> None:
        """
        The cache that is returned, as plain `generate` would leave it: rows that ended early get the keys and values
        of the padding that follows, and the blocks go over to it.
        """
        ids = decoding.input_ids  # (rows, cached tokens + 1)
        length, paddings = ids.shape[1] - 1, self._paddings()
        late: list[tuple[Sequence, int]] = []
        for row, (blocks, count) in enumerate(kept):
            if count < length - paddings[row]:
                sequence = Sequence(ids[row, paddings[row] :].tolist())
                sequence.blocks, sequence.num_computed_tokens = blocks, count
                late.append((sequence, length - paddings[row]))
        core.compute(late)
        with core.memory.lock:
            tables = {
                window: [blocks.tables[i].fork() for blocks, _ in kept] for i, window in enumerate(self.cache.groups)
            }
            self.cache.adopt(tables, tuple(paddings), length)


def _says_nothing(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (dict, list, tuple)) and not value)
