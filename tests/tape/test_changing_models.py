"""What was recorded is kept while a model gets equal values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_paged import last_route
from hf_paged.kernels import cpp
from tests.batching.test_changing_models import GREEDY, prompt
from tests.support import models

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="no C++ compiler: nothing is recorded"
)


def test_equal_values_set_again_keep_what_was_recorded() -> None:
    model: Any = models.build("llama")
    scaling = model.model.layers[0].self_attn.scaling

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for layer in model.model.layers:
            layer.self_attn.scaling = scaling * 2 / 2
        return scores

    expected = model.generate(**prompt(), **GREEDY)
    found = model.generate(**prompt(), **GREEDY, **models.PAGED, logits_processor=[process])
    assert torch.equal(found, expected) and last_route(model).num_captured_steps > 20  # type: ignore[union-attr]
