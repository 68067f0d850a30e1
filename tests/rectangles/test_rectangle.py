"""Which rows of prompts may continue in one rectangle."""

from __future__ import annotations

import torch

from hf_paged.batching.execution.prompts import Prompts
from hf_paged.rectangles.rectangle import with_join_keys


def test_prompts_that_cannot_join_share_no_forward_whatever_keys_they_had() -> None:
    prompts = Prompts(torch.ones(1, 4, dtype=torch.long), {"use_cache": True}, [0])
    keyed = with_join_keys(prompts, (False, False))
    assert keyed.join_key is not None and keyed.merge_key is not None
    unkeyed = with_join_keys(keyed, None)
    assert unkeyed.join_key is None and unkeyed.merge_key is None
