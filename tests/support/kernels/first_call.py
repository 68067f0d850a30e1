"""Counts the kernels that calls of a Llama compile, before the first token and later: `python -m
tests.support.kernels.first_call`.

The calls run on the CPU. A launch only computes the key under which Triton would compile the kernel
(`only_compile`); the reference computes its results. Graphs, which a GPU records from the fourth
decode step on, are left out.
"""

from __future__ import annotations

import json
import os
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import hf_paged
from hf_paged.attention.backends import reference
from hf_paged.attention.backends import triton as backend
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import store_portable
from hf_paged.kernels import BACKEND_VARIABLE, triton
from hf_paged.kernels.triton import store
from tests.support import models, tools
from tests.support.kernels.chips import CHIPS
from tests.support.kernels.compiling import Launch, only_compile
from tests.support.kernels.variants import CHIP, variants

PROMPTS = (3, 121, 33, 17)
"""Tokens of the prompts of `generate`; odd, so that slices of metadata begin at any address."""
CHUNK, LONG = 37, 301
"""Tokens of a step of an engine, and of its prompts, which are computed in chunks."""


def run(launches: list[Launch]) -> int:
    """Runs the calls; returns the number of launches before the first token."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 64}
    # with the heads of one of 1 billion parameters
    model: Any = models.build("llama", hidden_size=256, **heads).to(torch.bfloat16)
    counts: list[int] = []  # of launches, as each token is chosen

    def note(input_ids: Tensor, scores: Tensor) -> Tensor:
        counts.append(len(launches))
        return scores

    triton._runs_on.__wrapped__(torch.device("cpu"))  # the first use of a GPU stores one token
    inputs = models.padded_prompt("llama", PROMPTS)
    call = {"max_new_tokens": 9, "do_sample": False, "cache_implementation": "paged"}
    model.generate(**inputs, logits_processor=[note], **call)
    assert hf_paged.last_route(model).road == "engine"
    config = hf_paged.PagedConfig(max_num_batched_tokens=CHUNK)
    with hf_paged.PagedEngine(model, config) as engine:
        prompts = models.token_ids(2, LONG).tolist()
        engine.generate([prompts[0], prompts[1][: max(PROMPTS)]], {"max_new_tokens": 9})
    return counts[0]


def count(chip: str) -> dict[str, dict[str, int]]:
    """Variants of each kernel that are compiled `before` the first token, and by `all` calls."""
    attend_by_kernels, store_by_kernel = backend.attend, store.store

    def attend(call: AttentionCall) -> Tensor:
        attend_by_kernels(call)
        return reference.attend(call)

    def store_states(*arguments: Tensor) -> None:
        store_by_kernel(*arguments)
        store_portable(*arguments)

    with (
        mock.patch.dict(os.environ, {BACKEND_VARIABLE: "triton"}),
        mock.patch.object(triton, "is_available", lambda device: True),
        mock.patch.object(backend, "attend", attend),
        mock.patch.object(store, "store", store_states),
        only_compile(CHIPS[chip], is_compiling=False) as launches,
    ):
        num_before = run(launches)
    counted = {"before": launches[:num_before], "all": launches}
    return {name: variants(some, lambda launch: launch.kernel) for name, some in counted.items()}


def main() -> None:
    print(json.dumps(count(tools.parser(__doc__, chip=CHIP).parse_args().chip)))


if __name__ == "__main__":
    main()
