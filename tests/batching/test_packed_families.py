"""Kinds of attention in packed steps: each sequence gets the tokens of plain `generate` on it
alone."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version

from hf_paged import PagedConfig, PagedEngine, last_route
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.architecture_media import media_rows
from tests.support.checks import assert_paged_is_plain, assert_pool_empty
from tests.support.engine_helpers import MODES, assert_served_as_lone
from tests.support.forwards import prompts
from tests.support.models import BEFORE_5_18, PAGED, left_padded, put
from tests.support.rooms import needs_fingerprints

CHUNKED = {
    **dict(num_hidden_layers=2, layer_types=["chunked_attention", "full_attention"]),
    **dict(no_rope_layers=[1, 0], moe_layers=[1], attention_chunk_size=11),
}
LONGROPE = {
    **dict(rope_type="longrope", rope_theta=10000.0, original_max_position_embeddings=32),
    **dict(short_factor=[1.0] * 4, long_factor=[1.0 + i for i in range(4)]),
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "chunks": ("Llama4ForCausalLM", CHUNKED),
    # custom attention code: alibi before the mask, after it, in it, and none
    "bloom": ("BloomForCausalLM", {}),
    "mpt": ("MptForCausalLM", {}),
    "falcon alibi": ("FalconForCausalLM", {"alibi": True}),
    "gptj": ("GPTJForCausalLM", {}),
    "latents": ("DeepseekV3ForCausalLM", {}),
    # apart from rotary keys
    "narrow latents": ("DeepseekV3ForCausalLM", {"kv_lora_rank": 8, "qk_rope_head_dim": 8}),
    # queries are scaled by position; in plain rows positions count padding, too
    "scales": ("Llama4ForCausalLM", {**CHUNKED, "floor_scale": 8, "attn_scale": 0.5}),
    # the last layers read others' keys under a slice of the mask, with the last queries alone where
    # logits are picked
    "shared keys": ("Gemma4ForCausalLM", {"num_kv_shared_layers": 2}),
}
# rotary factors of a sequence's own length, from 33 tokens on: one set of them, one that plain goes
# back with, one each
LENGTHS: dict[str, tuple[str, dict[str, Any]]] = {
    "longrope": ("LlamaForCausalLM", {"rope_parameters": LONGROPE, "max_position_embeddings": 64}),
    "phi3": (
        "Phi3ForCausalLM",
        {"rope_parameters": LONGROPE, "original_max_position_embeddings": 32},
    ),
    "dynamic": (
        "LlamaForCausalLM",
        {
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 3.0},
            "max_position_embeddings": 32,
        },
    ),
}
FAMILIES |= LENGTHS
NAMES = sorted(FAMILIES)
CPU = torch.device("cpu")
KINDS = ["bloom", "chunks", "falcon alibi", "latents", *LENGTHS]


@functools.cache
def build(name: str) -> Any:
    kind, changes = FAMILIES[name]
    model = tiny_model(getattr(transformers, kind), **changes)
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.eos_token_id = None
    return model


def skip_where_plain_is_broken(name: str) -> None:
    if name == "phi3" and BEFORE_5_18:
        pytest.skip(
            "before 5.18, plain Phi3 goes on from its last token alone where its RoPE factors"
            " change"
        )


def check(
    name: str,
    texts: list[list[int]],
    modes: list[dict[str, Any]],
    device: torch.device = CPU,
    **config: Any,
) -> Any:
    """Runs all prompts at once in an engine, compares each with its lone run, and returns the
    engine's stats."""
    model = put(build(name), device)
    # a module may have grown with a longer sequence
    reset = functools.partial(model, torch.tensor([[5]], device=device))
    stats = assert_served_as_lone(model, texts, modes, reset, **config)
    assert stats.route.reason.startswith("packed forwards"), stats.route
    return stats


@pytest.mark.slow_cases(
    but=["*-bloom", "*-dynamic", "*-falcon alibi", "*-longrope", "*-mpt", "cuda-*"]
)
@pytest.mark.parametrize("name", NAMES)
def test_chunks_of_prompts_share_steps_with_decodes(name: str, device: torch.device) -> None:
    """Prompts arrive in chunks that end within blocks and within chunks of attention."""
    modes = [MODES[mode] for mode in ("greedy", "penalties", "samples", "beams_eos", "sample")]
    check(name, prompts(7, 34, 16, 22, 10), modes, device, max_num_batched_tokens=11)


@pytest.mark.slow_cases("*-swap", "falcon alibi-*", "latents-*", "longrope-*", "phi3-*")
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
@pytest.mark.parametrize("name", KINDS)
def test_preempted_requests_go_on(name: str, preemption: Any) -> None:
    skip_where_plain_is_broken(name)
    samples = {"do_sample": True, "max_new_tokens": 14, "num_return_sequences": 3}
    modes = [MODES["greedy"], samples, MODES["beams"], MODES["sample"]]
    num_blocks = {"chunks": 19, "phi3": 9}.get(name, 12)
    texts = prompts(20, 25, 9, 31)
    stats = check(name, texts, modes, num_blocks=num_blocks, preemption=preemption)
    assert stats.num_preemptions > 0, "the budget was meant to be short"


# a window has dropped them
@needs_fingerprints
@pytest.mark.slow_cases(but=["bloom", "chunks", "dynamic", "falcon alibi"])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "shared keys"])
def test_prefixes_are_found_again(name: str) -> None:
    skip_where_plain_is_broken(name)
    (prefix,), options = prompts(29), MODES["greedy"]
    texts = [prefix, [*prefix[:21], *prompts(7)[0]], [*prefix, *prompts(16)[0]], prefix]
    stats = check(name, texts, [options] * 4, max_num_seqs=1)
    # a long prompt has different keys
    assert stats.num_prefix_hit_tokens >= (16 if name in LENGTHS else 32)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in {"scales", *LENGTHS}])
def test_ragged_rows_of_a_generate_call(name: str) -> None:
    inputs = left_padded(prompts(5, 19, 9, 14))
    options = {**MODES["beams_eos"], "pad_token_id": 0}  # the chunks above are greedy, too
    route = assert_paged_is_plain(build(name), inputs, options)
    assert route.reason.startswith("packed forwards"), route


@pytest.mark.parametrize("mode", ["greedy", "beams_eos"])
@pytest.mark.parametrize("name", sorted(LENGTHS))
def test_rows_whose_longest_decides_the_rotary_factors(name: str, mode: str) -> None:
    """Plain `generate` applies the longest row's factors to all rows: such calls run in the model's
    own loop."""
    model = build(name)
    own_loop = "hf_loop" if name == "dynamic" else "engine"
    for lengths, num_new, road in (
        ((5, 19), 13, "engine"),
        ((30, 6), 8, "hf_loop"),
        ((40, 6), 5, "hf_loop"),
        ((40, 34), 5, own_loop),
    ):
        inputs = left_padded(prompts(*lengths))
        options = {**MODES[mode], "pad_token_id": 0, "max_new_tokens": num_new}
        outputs = []
        for paged in ({}, PAGED):
            model(torch.tensor([[5]]))  # a module may have grown with a longer sequence
            outputs.append(model.generate(**inputs, **options, **paged))
        assert torch.equal(*outputs), (lengths, last_route(model))
        assert last_route(model).road == road
        assert_pool_empty(model)


def test_drafts_over_layers_with_shared_keys() -> None:
    options = {"do_sample": False, "max_new_tokens": 40, "pad_token_id": 0}
    inputs = {"input_ids": torch.tensor(prompts(6)).repeat(1, 4)}
    options["prompt_lookup_num_tokens"] = 3
    route = assert_paged_is_plain(build("shared keys"), inputs, options)
    assert route.reason.startswith("packed forwards")


@pytest.mark.slow
@pytest.mark.skipif(
    Version(transformers.__version__) < Version("5.18"), reason="its tower fails on these pictures"
)
@pytest.mark.parametrize("sees", [None, "vision"])
def test_media_of_a_model_with_shared_keys(sees: str | None) -> None:
    """Also where the tokens of a picture see one another, for which transformers makes the mask
    with `torch.vmap`."""
    changes = {"num_kv_shared_layers": 2, "use_bidirectional_attention": sees}
    model = tiny_model(transformers.Gemma4ForConditionalGeneration, **changes)
    options = {"do_sample": False, "max_new_tokens": 8, "eos_token_id": None}
    for medium, inputs in make_inputs(model).items():
        mode = {**options, "num_beams": 3 if medium == "image" else 1}
        route = assert_paged_is_plain(model, inputs, mode)
        assert route.reason.startswith("packed forwards"), medium
    requests = [
        {name: x for name, x in row.items() if name != "attention_mask"}
        for row in media_rows(model)["image"]
    ]
    lone = [
        model.generate(**row, **options)[0, row["input_ids"].shape[1] :].tolist()
        for row in requests
    ]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        assert [result.token_ids for result in engine.generate(requests, options)] == lone
