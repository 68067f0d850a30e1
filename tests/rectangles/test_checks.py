"""The check of rows that stay together."""

from __future__ import annotations

import torch

from hf_paged.batching.execution.prompts import prompts_of
from hf_paged.batching.factory import make_runner
from hf_paged.model.trial import Trial
from hf_paged.rectangles.checks import rows_check
from tests.model.test_capability import cache_for, scale
from tests.support import models


def test_the_reason_against_rows_that_leave_their_batch_names_the_batch() -> None:
    model, ids = models.build("llama"), models.token_ids(2, 9)
    scale(model)  # states depend on the other rows
    inputs = {"attention_mask": torch.ones_like(ids), "use_cache": True}
    prompts = prompts_of((ids, inputs), inputs, False)
    reason = rows_check(Trial(model, cache_for(model), make_runner, prompts))
    assert reason is not None and reason.startswith("with only some rows of its batch, its logits")
    assert "standard deviations from those of the whole batch [" in reason
