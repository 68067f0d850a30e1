"""Which rows of prompts may continue in one rectangle."""

from __future__ import annotations

import torch

from hf_paged.batching.execution.prompts import Prompts
from hf_paged.rectangles.rectangle import set_join_keys


def test_prompts_that_cannot_join_share_no_forward_whatever_was_set_before() -> None:
    prompts = Prompts(torch.ones(1, 4, dtype=torch.long), {"use_cache": True}, [0])
    set_join_keys(prompts, (False, False))
    assert prompts.join_key is not None and prompts.merge_key is not None
    set_join_keys(prompts, None)
    assert prompts.join_key is None and prompts.merge_key is None
