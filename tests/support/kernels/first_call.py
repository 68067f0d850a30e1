"""Counts the kernels that calls of a Llama compile, before the first token and later: `python -m
tests.support.kernels.first_call`.

The calls run on the CPU. A launch only computes the key under which Triton would compile the kernel
(`only_compile`); the reference computes its results. Graphs, which a GPU records from the fourth
decode step on, are left out.
"""

from __future__ import annotations

import argparse
import json
import os
from unittest import mock

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, LogitsProcessor

import hf_paged
from benchmarks.aot import Launch, only_compile
from benchmarks.chips import CHIPS
from hf_paged.attention.backends import reference
from hf_paged.attention.backends import triton as backend
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.store import store_portable
from hf_paged.kernels import VARIABLE, triton
from hf_paged.kernels.triton import store

PROMPTS = (3, 121, 33, 17)
"""Tokens of the prompts of `generate`; odd, so that slices of metadata begin at any address."""
CHUNK, LONG = 37, 301
"""Tokens of a step of an engine, and of its prompts, which are computed in chunks."""


def make_model() -> LlamaForCausalLM:
    """A small Llama with the heads of one of 1 billion parameters."""
    config = LlamaConfig(
        hidden_size=256,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        vocab_size=128,
    )
    torch.manual_seed(0)
    return LlamaForCausalLM(config).to(torch.bfloat16).eval()


class Mark(LogitsProcessor):
    """Notes how many launches there were before the first token was chosen."""

    def __init__(self, launches: list[Launch]) -> None:
        self._launches = launches
        self.num_before: int | None = None

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        if self.num_before is None:
            self.num_before = len(self._launches)
        return scores


def run(launches: list[Launch]) -> int:
    """Runs the calls; returns the number of launches before the first token."""
    model, mark = make_model(), Mark(launches)
    triton._runs_on.__wrapped__(torch.device("cpu"))  # the first use of a GPU stores one token
    width = max(PROMPTS)
    ids = torch.randint(1, 128, (len(PROMPTS), width))
    mask = torch.stack([(torch.arange(width) >= width - length).long() for length in PROMPTS])
    call = {"max_new_tokens": 9, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    model.generate(
        ids, attention_mask=mask, logits_processor=[mark], cache_implementation="paged", **call
    )
    assert hf_paged.last_route(model).road == "engine"
    config = hf_paged.PagedConfig(max_num_batched_tokens=CHUNK)
    with hf_paged.PagedEngine(model, config) as engine:
        engine.generate(
            [ids[0, :1].tolist() * LONG, ids[1].tolist()],
            {"max_new_tokens": 9, "eos_token_id": None},
        )
    assert mark.num_before is not None
    return mark.num_before


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
        mock.patch.dict(os.environ, {VARIABLE: "triton"}),
        mock.patch.object(triton, "is_available", lambda device: True),
        mock.patch.object(backend, "attend", attend),
        mock.patch.object(store, "store", store_states),
        only_compile(CHIPS[chip], is_compiling=False) as launches,
    ):
        num_before = run(launches)
    return {"before": _variants(launches[:num_before]), "all": _variants(launches)}


def _variants(launches: list[Launch]) -> dict[str, int]:
    keys: dict[str, set[str]] = {}
    for launch in launches:
        keys.setdefault(launch.kernel, set()).add(launch.key)
    return {kernel: len(variants) for kernel, variants in sorted(keys.items())}


def main() -> None:
    """Prints the counts as JSON."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--chip", choices=list(CHIPS), default="sm_90")
    print(json.dumps(count(parser.parse_args().chip)))


if __name__ == "__main__":
    main()
