"""A request whose adapter cannot be loaded, beside others."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

from hf_paged import PagedConfig, PagedEngine
from tests.batching.test_unfinished_requests import GREEDY
from tests.support import models
from tests.support.engine_helpers import assert_drained, prompts
from tests.support.peft_models import many, saved


def test_an_adapter_that_cannot_be_loaded_keeps_no_other_from_its_place(tmp_path: Path) -> None:
    wrong = saved(many(1, "gpt2", target_modules=["c_attn"]), tmp_path / "gpt2")[0]
    right = saved(many(2), tmp_path / "llama")
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        results = engine.generate(prompts(12, 12, 12), GREEDY, adapter=[wrong, *right])
        assert "cannot be loaded" in str(results[0].error)
        assert [result.error for result in results[1:]] == [None, None]
        assert_drained(engine)
        for copied in (
            pickle.loads(pickle.dumps(results[0].error)),
            copy.deepcopy(results[0].error),
        ):
            assert type(copied) is type(results[0].error) and str(copied) == str(results[0].error)
