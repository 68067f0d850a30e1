"""On a CUDA device: the portable path on device memory gives plain `generate`'s tokens. `python -m
pytest -m gpu`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from tests.support import architectures, models

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("full_precision")]

WRONG = ("different", "error")
MODES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sample": {"do_sample": True, "num_return_sequences": 3},
    "beams": {"num_beams": 4, "num_return_sequences": 2},
    "prompt_lookup": {"prompt_lookup_num_tokens": 3},
}


@pytest.mark.parametrize("mode", sorted(MODES))
@pytest.mark.parametrize("name", ["llama", "mistral", "gemma2", "gpt_oss", "t5"])
def test_parity_on_cuda(name: str, mode: str) -> None:
    model = models.build(name).to("cuda")
    rows = 1 if mode == "prompt_lookup" else 2
    inputs = {key: value[:rows].to("cuda") for key, value in models.prompt(name).items()}
    options = dict(max_new_tokens=20, eos_token_id=None, **MODES[mode])
    torch.manual_seed(0)
    plain = model.generate(**inputs, **options)
    torch.manual_seed(0)
    paged = model.generate(
        **inputs, **options, cache_implementation="paged", cache_config={"block_size": 8}
    )
    assert torch.equal(plain, paged)
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0
    if mode != "prompt_lookup":
        assert hf_paged.last_route(model).in_place


FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MixtralForCausalLM": {},  # experts
    "Gemma3ForCausalLM": {},  # windows
    "Qwen3NextForCausalLM": {},  # linear attention
    "DeepseekV3ForCausalLM": {},  # latents
    "Gemma4ForCausalLM": {"head_dim": 256, "global_head_dim": 512},
    "T5ForConditionalGeneration": {},  # cross attention, a bias of positions
    "BloomForCausalLM": {},  # a bias for each head
    "WhisperForConditionalGeneration": {},  # sound
    "LlavaForConditionalGeneration": {},  # images
}
"""Classes of transformers, with changes to their tiny configs."""


@pytest.mark.parametrize("name", FAMILIES)
def test_families_on_cuda(name: str) -> None:
    result = architectures.check(name, "cuda", **FAMILIES[name])
    wrong = {mode: found for mode, found in result.modes.items() if found.status in WRONG}
    assert result.modes and not wrong, (result.status, result.detail, wrong)


def test_the_pool_lives_on_the_device_and_goes_back() -> None:
    model = models.build("llama").to("cuda")
    cache = hf_paged.PagedCache(model.config, {"block_size": 8})
    with torch.no_grad():
        for length in (5, 100, 300):
            model(torch.randint(3, 100, (2, length), device="cuda"), past_key_values=cache)
    assert cache.layers[0].keys.device.type == "cuda"
    held = torch.cuda.memory_allocated()
    del cache
    assert torch.cuda.memory_allocated() < held
