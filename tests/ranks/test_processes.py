"""What the processes of a sharded model have to agree on before they start."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import transformers

from hf_paged.ranks.processes import sharded_heads
from tests.model.test_heterogeneous import build

pytestmark = pytest.mark.skipif(
    not hasattr(transformers, "Dots3NoteForCausalLM"), reason="this version has no such model"
)


def test_heads_are_shared_among_processes_if_each_layers_are() -> None:
    plan = {"layers.*.self_attn.k_proj": "colwise"}
    model = SimpleNamespace(config=build().config, tp_plan=plan, tp_size=4)
    assert sharded_heads(model) == (2, 4)  # 4 and 2 heads
