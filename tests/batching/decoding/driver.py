"""Runs decodings with the model's forward and without a cache, to test the decoding alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged.batching.decoding.base import Decoding, LogitRows, LoopInputs, Result, SampledTokens
from hf_paged.batching.decoding.beam import BeamDecoding
from hf_paged.batching.decoding.sample import SampleDecoding
from hf_paged.batching.decoding.sampler import sample_step


def logits_of(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor | None = None
) -> torch.Tensor:
    """Logits `(rows, vocab)` after `(rows, length)` ids; `mask` hides left padding."""
    if mask is None:
        mask = torch.ones_like(ids)
    mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    with torch.no_grad():
        return model(
            input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=False
        ).logits[:, -1]


def take_step(decoding: Decoding, logits: torch.Tensor) -> SampledTokens:
    """Takes one step of one decoding. Raises its error."""
    (sampled,) = sample_step([(decoding, LogitRows.of(logits))])
    if isinstance(sampled, int):
        return SampledTokens([sampled], None, finished=[], rows=[0])
    if isinstance(sampled, BaseException):
        raise sampled
    return sampled


def tokens_of(result: Result) -> list[int]:
    """The tokens of a decoding's rows. Raises its error."""
    if isinstance(result, int):
        return [result]
    if isinstance(result, BaseException):
        raise result
    return result.tokens


def drive(
    decoding: Decoding,
    model: PreTrainedModel,
    mask: torch.Tensor | None = None,
    check: Callable[[Decoding, Any], None] | None = None,
) -> Decoding:
    """Runs the decoding to its end."""
    for _ in range(decoding.max_length):
        if decoding.is_done:
            break
        rows, before = decoding.open_rows, decoding.input_ids
        logits = logits_of(model, before[rows], None if mask is None else mask[rows])
        advance = take_step(decoding, logits)
        after = decoding.input_ids
        assert advance.rows == rows and set(advance.finished) <= set(rows)
        assert decoding.open_rows == [row for row in rows if row not in advance.finished]
        assert after[:, -1].tolist() == advance.tokens and after.is_contiguous()
        open_rows = torch.tensor(decoding.open_rows, dtype=torch.long)
        parents = torch.tensor(advance.parents or range(len(before)))
        assert torch.equal(after[open_rows, :-1], before[parents[open_rows]])
        if check is not None:
            check(decoding, advance)
    assert decoding.is_done
    return decoding


@contextmanager
def generate_by_decoding(model: PreTrainedModel, **options: Any) -> Iterator[list[Decoding]]:
    """Within it, `model.generate` only prepares; its loops are replaced by decodings, collected in
    the list."""
    made: list[Decoding] = []
    check, split = options.pop("check", None), options.pop("split", None)
    names = ("logits_processor", "stopping_criteria", "generation_config")

    def inputs(input_ids: Any, arguments: dict[str, Any]) -> LoopInputs:
        return LoopInputs(input_ids, *(arguments[name] for name in names), **options)

    def sample(self: Any, input_ids: Any, streamer: Any = None, **arguments: Any) -> Any:
        decoding = SampleDecoding(inputs(input_ids, arguments), streamer)
        return end(self, decoding, arguments.get("attention_mask"), split)

    def beam_search(self: Any, input_ids: Any, **arguments: Any) -> Any:
        decoding = BeamDecoding(self, inputs(input_ids, arguments))
        return end(self, decoding, arguments.get("attention_mask"))

    def end(model: Any, decoding: Any, mask: Any, split: Any = None) -> Any:
        made.append(decoding)
        run = split(decoding, mask) if split else drive(decoding, model, mask, check)
        return run.result()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model), "_sample", sample)
        patch.setattr(type(model), "_beam_search", beam_search)
        yield made
