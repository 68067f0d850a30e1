"""The check of rows that stay together, and what it finds out about their encoder."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch

from hf_paged.batching.execution.prompts import EncoderUse, Prompts, prompts_of
from hf_paged.batching.factory import make_runner
from hf_paged.model.own_loop import tensors_of
from hf_paged.model.trial import Trial
from hf_paged.rectangles.checks import _encoder_use, rows_check
from hf_paged.rectangles.rectangle import rectangle_of
from tests.model.test_capability import cache_for, scale
from tests.support import models


def test_the_reason_against_rows_that_leave_their_batch_names_the_batch() -> None:
    model, ids = models.build("llama"), models.token_ids(2, 9)
    scale(model)  # states depend on the other rows
    inputs = {"attention_mask": torch.ones_like(ids), "use_cache": True}
    prompts = prompts_of((ids, inputs), inputs, False)
    reason = rows_check(Trial(model, cache_for(model), make_runner, prompts))
    assert isinstance(reason, str) and reason.startswith(
        "with only some rows of its batch, its logits"
    )
    assert "standard deviations from those of the whole batch [" in reason


@pytest.mark.parametrize(
    ("written", "num_attended", "expected"),
    [
        ((), 0, EncoderUse(0, False)),
        ((), 7, EncoderUse(1, False)),
        (("encoder_outputs",), 9, EncoderUse(0, True)),
        (("encoder_outputs", "scale"), 9, "its forward writes to its inputs"),
        ((), 8, "attends to a different number of tokens"),
    ],
)
def test_how_forwards_use_the_outputs_of_the_encoder(
    written: tuple[str, ...], num_attended: int, expected: EncoderUse | str
) -> None:
    outputs = {
        "encoder_outputs": (torch.ones(2, 9, 4), torch.ones(2, 7, 6)),
        "scale": torch.ones(2, 7, 1),
    }
    before = Prompts(torch.ones(2, 1, dtype=torch.long), outputs, [0, 0])
    after = copy.deepcopy(before)
    for name in written:
        tensors_of(after.model_kwargs[name])[0].add_(1)
    use = _encoder_use(before, after, num_attended)
    if isinstance(expected, str):
        assert isinstance(use, str) and expected in use
        return
    assert use == expected
    rectangle = rectangle_of(replace(before, encoder_use=expected), models.get("t5"), None, {})
    assert rectangle.encoder_width == (num_attended or 9)
    is_shared = rectangle.inputs["encoder_outputs"] is outputs["encoder_outputs"]
    assert is_shared != expected.is_written, "a forward's writes would change the prompts"
