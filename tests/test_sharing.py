"""Savings of paging: rows expanded from one prompt share its blocks and its prefill; blocks have
little waste."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaMLP

import hf_paged
from tests.support import models
from tests.support.checks import assert_paged_is_plain, generate_both
from tests.support.rooms import needs_shared_prefill

PROMPT, NEW = 512, 64
BLOCK_SIZE = 16
PAGED: dict[str, Any] = {"cache_implementation": "paged", "cache_config": {"block_size": 16}}
UNRECORDED = {**PAGED, "cache_config": {"block_size": 16, "capture": False}}
GREEDY: dict[str, Any] = {"do_sample": False}
BEAMS: dict[str, Any] = {**GREEDY, "num_beams": 8, "num_return_sequences": 8}
SAMPLES: dict[str, Any] = {
    **dict(num_return_sequences=16, do_sample=True, temperature=1.5, top_k=0),
}


def contiguous_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """Bytes of K/V in a cache of one padded row per sequence."""
    config = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    return rows * length * numbers * model.dtype.itemsize


@contextlib.contextmanager
def counted_tokens() -> Iterator[list[int]]:
    """Tokens of each call of a layer's MLP. Counted in the class: a hook could change the road of
    the call."""
    counts: list[int] = []
    original = LlamaMLP.forward

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        counts.append(x.shape[:-1].numel())
        return original(self, x)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LlamaMLP, "forward", forward)
        yield counts


def checked_once(model: Any, counts: list[int]) -> None:
    """The first call of a model, and of one whose class was changed, checks with a few short
    forwards whether it can run packed: these do not count."""
    model.generate(**models.prompt("llama", 1, 3, seed=9), **GREEDY, max_new_tokens=1, **PAGED)
    counts.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rows", "share"),
    [(BEAMS, 8, 0.23), (SAMPLES, 16, 0.18)],
    ids=["8 beams", "16 samples"],
)
def test_rows_of_one_prompt_share_its_blocks_and_its_prefill(
    mode: dict[str, Any], rows: int, share: float
) -> None:
    model, inputs = models.build("llama"), models.prompt("llama", 1, PROMPT)
    layers, options = model.config.num_hidden_layers, {**mode, "max_new_tokens": NEW}
    expected, actual = generate_both(model, inputs, options, PAGED)
    assert expected.shape == (rows, PROMPT + NEW) and torch.equal(expected, actual)
    assert len(set(map(tuple, expected.tolist()))) == rows, "the rows do not differ"
    stats = hf_paged.memory_stats(model)
    whole = contiguous_bytes(model, rows, PROMPT + NEW)
    # At least what the tokens need: the prompt once and, for samples, every row's own tokens.
    least = contiguous_bytes(model, 1, PROMPT + (rows if mode is SAMPLES else 1) * (NEW - 1))
    assert least <= stats.peak_bytes <= share * whole, stats
    with counted_tokens() as counts:
        model.generate(**inputs, **options)
        assert sum(counts) == layers * rows * (PROMPT + NEW - 1)
        fresh = models.build("llama")
        checked_once(fresh, counts)
        fresh.generate(**inputs, **options, **UNRECORDED)
    assert sum(counts) == layers * (PROMPT + rows * (NEW - 1))
    assert counts[:layers] == [PROMPT] * layers


@pytest.mark.parametrize("mode", [BEAMS, SAMPLES], ids=["beams", "samples"])
def test_several_ragged_prompts_are_each_computed_once(mode: dict[str, Any]) -> None:
    """Prompts are no multiples of the block size: each row that writes to the shared tail block
    copies it once."""
    model, inputs = models.build("llama"), models.padded_prompt("llama", (75, 20, 49))
    rows, options = mode["num_return_sequences"], {**mode, "max_new_tokens": 20}
    with counted_tokens() as counts:
        checked_once(model, counts)
        torch.manual_seed(3)
        unrecorded = {**PAGED["cache_config"], "capture": False}  # a recording runs forwards, too
        actual = model.generate(**inputs, **options, **{**PAGED, "cache_config": unrecorded})
    assert sum(counts) <= model.config.num_hidden_layers * (3 * 75 + 3 * rows * 19)
    # Full prompt blocks once, and for each row a tail and 20 tokens more: at most 3 blocks.
    peak = hf_paged.memory_stats(model).peak_blocks
    assert peak <= 75 // 16 + 20 // 16 + 49 // 16 + 3 * rows * 3
    torch.manual_seed(3)
    assert torch.equal(actual, model.generate(**inputs, **options))


@pytest.mark.slow_cases("12")
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_waste_on_ragged_prompts(rows: int) -> None:
    """Left padding uses no blocks; only the last block of a row has unused slots."""
    model, generator = models.build("llama"), torch.Generator().manual_seed(3)
    lengths = torch.randint(256, 1025, (rows,), generator=generator).tolist()
    inputs = models.padded_prompt("llama", tuple(lengths))
    assert_paged_is_plain(model, inputs, {**GREEDY, "max_new_tokens": 24}, PAGED)
    stats = hf_paged.memory_stats(model)
    # The same measured from outside: slots allocated at the peak against tokens that have K/V
    # there.
    stored, allocated = sum(lengths) + 23 * rows, stats.peak_blocks * BLOCK_SIZE
    assert 0 <= stats.waste < 0.04 and stored <= allocated, stats
    assert 1 - stored / allocated < 0.04, f"{allocated} slots for {stored} tokens"


def test_stats_count_what_is_held() -> None:
    """A returned cache holds its blocks until it is collected; `reset` restarts the peak
    counters."""
    model, inputs = models.build("llama"), models.prompt("llama", 2, 40)

    def counts() -> tuple[int, ...]:
        stats = hf_paged.memory_stats(model)
        return stats.used_blocks, stats.peak_blocks, stats.peak_bytes

    assert counts() == (0, 0, 0)
    options = {**GREEDY, **PAGED, "return_dict_in_generate": True}
    output = model.generate(**inputs, **options, max_new_tokens=9)
    # 48 tokens of each row
    assert counts() == (6, 6, contiguous_bytes(model, 2, 48))
    hf_paged.check_integrity(model)
    del output
    assert counts()[:2] == (0, 6)
    hf_paged.memory_stats(model, reset=True)
    assert counts()[1] == 0
    model.generate(**models.prompt("llama", 1, 10), **options, max_new_tokens=3)
    assert counts()[1] == 1


@pytest.mark.parametrize("name", models.SLIDING)
def test_sliding_layers_give_blocks_back(name: str) -> None:
    """A row of 200 tokens with a window of 8 holds a few blocks of the sliding layers, not 25."""
    model = models.build(name)
    options = {**GREEDY, "max_new_tokens": 50, "return_dict_in_generate": True}
    expected, output = generate_both(model, models.prompt(name, 2, 150), options)
    assert torch.equal(expected.sequences, output.sequences)
    num_layers = model.config.num_hidden_layers
    types = getattr(model.config, "layer_types", None) or ["sliding_attention"] * num_layers
    full = types.count("full_attention")
    per_layer = contiguous_bytes(model, 2, 1) // num_layers
    most = full * per_layer * 200 + (len(types) - full) * per_layer * 3 * models.BLOCK_SIZE
    assert 0 < hf_paged.memory_stats(model).used_bytes <= most


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_beams_share_the_encoder_keys_and_values(name: str) -> None:
    model = models.build(name)
    options = {**GREEDY, "num_beams": 8, "max_new_tokens": 8}
    assert_paged_is_plain(model, models.prompt(name, 1, 96), options)
    layers = model.config.num_decoder_layers if name == "t5" else model.config.decoder_layers
    token = layers * 2 * 64 * model.dtype.itemsize
    # 96 tokens of the encoder once, and 8 rows of one block each for the decoder.
    assert hf_paged.memory_stats(model).peak_bytes <= (96 + 8 * models.BLOCK_SIZE) * token


@needs_shared_prefill
def test_a_passed_empty_cache_shares_the_prefill_too() -> None:
    model, prompt = models.get("llama"), models.prompt("llama", 1, 40)
    cache = hf_paged.PagedCache(model.config, {"block_size": 8})
    options = dict(num_return_sequences=8, do_sample=True, max_new_tokens=3, eos_token_id=None)
    assert torch.equal(*generate_both(model, prompt, options, {"past_key_values": cache}))
    assert hf_paged.last_route(model).prefills_shared
    # five blocks of the prompt for all, one more for each row
    assert cache.stats().used_blocks == 5 + 8
    cache.check_integrity()


def test_a_global_hook_sees_all_rows_of_the_prefill() -> None:
    model, inputs, rows = models.build("llama"), models.prompt("llama", 2), []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: rows.append(len(output)) if module is model.lm_head else None
    )
    try:
        generate_both(model, inputs, {**GREEDY, "num_beams": 3, "max_new_tokens": 3})
    finally:
        handle.remove()
    assert rows == [6] * 6
