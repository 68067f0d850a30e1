"""What code of the caller sees of the rows of a call."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    StoppingCriteriaList,
)
from transformers.generation.logits_process import WhisperTimeStampLogitsProcessor
from transformers.generation.stopping_criteria import EosTokenCriteria

from hf_paged.batching.decoding.base import LoopInputs
from hf_paged.batching.decoding.sample import RowStreamers, SampleDecoding
from tests.support import models
from tests.support.checks import assert_paged_is_plain, generate_both
from tests.support.engine_helpers import Recorder


class Contrast(LogitsProcessor):
    """Moves each row away from the mean of all rows."""

    def __call__(self, input_ids: Any, scores: torch.Tensor) -> torch.Tensor:
        return 3 * scores - 2 * scores.mean(0)


@pytest.mark.parametrize("name", ["llama", "t5"])
@pytest.mark.parametrize("options", [{"do_sample": False}, {"do_sample": True}], ids=str)
def test_processors_get_the_scores_of_rows_that_have_ended(
    name: str, options: dict[str, Any]
) -> None:
    model, inputs = models.get(name), models.prompt(name, 3)
    options = {**options, "max_new_tokens": 24, "logits_processor": [Contrast()]}
    tokens, _ = generate_both(model, inputs, {**options, "eos_token_id": None})
    ends = {"pad_token_id": 0, "eos_token_id": int(tokens[1, -20])}  # of a row, early
    assert_paged_is_plain(model, inputs, {**options, **ends})


def grammar() -> LogitsProcessor:
    module = pytest.importorskip("hf_paged.grammar")
    kind = module.GrammarProcessor
    return kind.__new__(kind)  # whose matchers need another package


def whisper_timestamps() -> LogitsProcessor:
    config: Any = GenerationConfig(eos_token_id=2)
    config.no_timestamps_token_id = 50
    return WhisperTimeStampLogitsProcessor(config, begin_index=1)


@pytest.mark.parametrize(
    ("make", "open_rows"), [(grammar, [1]), (whisper_timestamps, [1]), (Contrast, [0, 1])]
)
def test_ended_rows_leave_unless_a_processor_may_read_them(make: Any, open_rows: list[int]) -> None:
    config: Any = GenerationConfig(max_length=20)
    config._pad_token_tensor = torch.tensor(0)
    code = LogitsProcessorList([make()]), StoppingCriteriaList([EosTokenCriteria(2)])
    decoding = SampleDecoding(LoopInputs(torch.tensor([[5], [6]]), *code, config))
    decoding.accept([2, 7])
    assert decoding.open_rows == open_rows


def test_a_streamer_of_a_row_gets_chunks_as_long_as_its_prompt_whole() -> None:
    streamer = Recorder()
    streamers = RowStreamers([streamer], torch.tensor([[0, 0, 1]]))
    streamers.put(torch.tensor([[7, 8, 9]]))
    streamers.put(torch.tensor([[4, 5, 6]]))
    assert [torch.tensor(value).flatten().tolist() for value in streamer.values] == [[9], [4, 5, 6]]
