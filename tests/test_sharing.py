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
from tests.support.rooms import needs_shared_prefill

PROMPT, NEW = 512, 64
BLOCK_SIZE = 16
PAGED: dict[str, Any] = {
    "cache_implementation": "paged",
    "cache_config": {"block_size": BLOCK_SIZE},
}
UNRECORDED = {**PAGED, "cache_config": {"block_size": BLOCK_SIZE, "capture": False}}
BEAMS: dict[str, Any] = {"num_beams": 8, "num_return_sequences": 8, "do_sample": False}
SAMPLES: dict[str, Any] = {
    "num_return_sequences": 16,
    "do_sample": True,
    "temperature": 1.5,
    "top_k": 0,
}


def contiguous_bytes(model: PreTrainedModel, rows: int, length: int) -> int:
    """Bytes of K/V in a cache of one padded row per sequence."""
    config = model.config
    per_token = (
        config.num_hidden_layers
        * 2
        * config.num_key_value_heads
        * config.head_dim
        * model.dtype.itemsize
    )
    return rows * length * per_token


@contextlib.contextmanager
def counted_tokens() -> Iterator[list[int]]:
    """Tokens of each call of a layer's MLP. Counted in the class: a hook could change the road of
    the call."""
    counts: list[int] = []
    original = LlamaMLP.forward

    def forward(self: LlamaMLP, x: torch.Tensor) -> torch.Tensor:
        counts.append(x.shape[:-1].numel())
        return original(self, x)

    LlamaMLP.forward = forward  # type: ignore[method-assign]
    try:
        yield counts
    finally:
        LlamaMLP.forward = original  # type: ignore[method-assign]


def generate(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], **options: Any
) -> torch.Tensor:
    torch.manual_seed(2)
    return model.generate(**inputs, **options)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rows", "share"),
    [(BEAMS, 8, 0.23), (SAMPLES, 16, 0.18)],
    ids=["8 beams", "16 samples"],
)
def test_rows_of_one_prompt_share_its_blocks(mode: dict[str, Any], rows: int, share: float) -> None:
    model = models.build("llama")
    inputs = models.prompt("llama", 1, PROMPT)
    expected = generate(model, inputs, **mode, max_new_tokens=NEW)
    assert expected.shape == (rows, PROMPT + NEW)
    assert len(set(map(tuple, expected.tolist()))) == rows, (
        "the rows do not differ: the test is void"
    )
    actual = generate(model, inputs, **mode, max_new_tokens=NEW, **PAGED)
    assert torch.equal(expected, actual)
    stats = hf_paged.memory_stats(model)
    whole = contiguous_bytes(model, rows, PROMPT + NEW)
    # At least what the tokens need: the prompt once and, for samples, every row's own tokens.
    least = contiguous_bytes(model, 1, PROMPT + (rows if mode is SAMPLES else 1) * (NEW - 1))
    assert least <= stats.peak_bytes <= share * whole, (
        f"{stats.peak_bytes / whole:.1%} of {whole} bytes, {stats}"
    )
    hf_paged.check_integrity(model)
    assert hf_paged.memory_stats(model).used_blocks == 0


def checked_once(model: Any, counts: list[int]) -> None:
    """The first call of a model, and of one whose class was changed, checks with a few short
    forwards whether it can run packed: these do not count.
    """
    generate(
        model, models.prompt("llama", 1, 3, seed=9), do_sample=False, max_new_tokens=1, **PAGED
    )
    counts.clear()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "rows"), [(BEAMS, 8), (SAMPLES, 16)], ids=["8 beams", "16 samples"]
)
def test_the_prompt_is_computed_once(mode: dict[str, Any], rows: int) -> None:
    model = models.build("llama")
    inputs = models.prompt("llama", 1, PROMPT)
    layers = model.config.num_hidden_layers
    with counted_tokens() as plain:
        generate(model, inputs, **mode, max_new_tokens=NEW)
    assert sum(plain) == layers * rows * (PROMPT + NEW - 1)
    with counted_tokens() as paged:
        checked_once(model, paged)
        generate(model, inputs, **mode, max_new_tokens=NEW, **UNRECORDED)
    assert sum(paged) == layers * (PROMPT + rows * (NEW - 1))
    assert paged[:layers] == [PROMPT] * layers


@pytest.mark.parametrize("mode", [BEAMS, SAMPLES], ids=["beams", "samples"])
def test_several_ragged_prompts_are_each_computed_once(mode: dict[str, Any]) -> None:
    """Prompts are no multiples of the block size: each row that writes to the shared tail block
    copies it once."""
    model = models.build("llama")
    inputs = models.padded_prompt("llama", (75, 20, 49))
    rows = mode["num_return_sequences"]
    expected = generate(model, inputs, **mode, max_new_tokens=20)
    with counted_tokens() as counts:
        checked_once(model, counts)
        actual = generate(model, inputs, **mode, max_new_tokens=20, **PAGED)
    assert torch.equal(expected, actual)
    layers = model.config.num_hidden_layers
    assert sum(counts) <= layers * (3 * 75 + 3 * rows * 19)
    stats = hf_paged.memory_stats(model)
    # Full prompt blocks once, and for each row a tail and 20 tokens more: at most 3 blocks.
    assert stats.peak_blocks <= 75 // 16 + 20 // 16 + 49 // 16 + 3 * rows * 3


@pytest.mark.slow_cases("12")
@pytest.mark.parametrize("rows", [1, 4, 12])
def test_waste_on_ragged_prompts(rows: int) -> None:
    """Left padding uses no blocks; only the last block of a row has unused slots."""
    model = models.build("llama")
    generator = torch.Generator().manual_seed(3)
    lengths = tuple(torch.randint(256, 1025, (rows,), generator=generator).tolist())
    inputs = models.padded_prompt("llama", lengths)
    new = 24
    expected = generate(model, inputs, do_sample=False, max_new_tokens=new)
    actual = generate(model, inputs, do_sample=False, max_new_tokens=new, **PAGED)
    assert torch.equal(expected, actual)
    stats = hf_paged.memory_stats(model)
    assert 0 <= stats.waste < 0.04, stats
    # The same measured from outside: slots allocated at the peak against tokens that have K/V
    # there.
    stored = sum(length + new - 1 for length in lengths)
    allocated = stats.peak_blocks * BLOCK_SIZE
    assert stored <= allocated, stats
    assert 1 - stored / allocated < 0.04, f"{allocated} slots for {stored} tokens"


def test_stats_count_what_is_held() -> None:
    """A returned cache holds its blocks until it is collected; `reset` restarts the peak
    counters."""
    model, inputs = models.build("llama"), models.prompt("llama", 2, 40)
    empty = hf_paged.memory_stats(model)
    assert (empty.used_blocks, empty.peak_blocks, empty.peak_bytes) == (0, 0, 0)
    output = generate(
        model, inputs, do_sample=False, max_new_tokens=9, return_dict_in_generate=True, **PAGED
    )
    held = hf_paged.memory_stats(model)
    assert held.used_blocks == 2 * 3, held  # 48 tokens of each row
    assert held.peak_blocks == 2 * 3, held
    assert held.peak_bytes == contiguous_bytes(model, 2, 48), held
    hf_paged.check_integrity(model)
    del output
    after = hf_paged.memory_stats(model, reset=True)
    assert (after.used_blocks, after.peak_blocks) == (0, 6), after
    assert hf_paged.memory_stats(model).peak_blocks == 0
    generate(model, models.prompt("llama", 1, 10), do_sample=False, max_new_tokens=3, **PAGED)
    assert hf_paged.memory_stats(model).peak_blocks == 1


@pytest.mark.parametrize("name", models.SLIDING)
def test_sliding_layers_give_blocks_back(name: str) -> None:
    """A row of 200 tokens with a window of 8 holds a few blocks of the sliding layers, not 25."""
    model = models.build(name)
    config = model.config
    inputs = models.prompt(name, 2, 150)
    expected = generate(model, inputs, do_sample=False, max_new_tokens=50)
    options: dict[str, Any] = {
        "do_sample": False,
        "max_new_tokens": 50,
        "return_dict_in_generate": True,
    }
    output = generate(model, inputs, **options, **models.PAGED)  # type: ignore[assignment]
    assert torch.equal(expected, output.sequences)
    stats = hf_paged.memory_stats(model)
    types = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
    full = types.count("full_attention")
    per_layer = contiguous_bytes(model, 2, 1) // config.num_hidden_layers
    held_bytes = full * per_layer * 200 + (len(types) - full) * per_layer * 3 * models.BLOCK_SIZE
    assert 0 < stats.used_bytes <= held_bytes, f"{stats} holds more than {held_bytes} bytes"


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_beams_share_the_encoder_keys_and_values(name: str) -> None:
    model = models.build(name)
    inputs = models.prompt(name, 1, 96)
    expected = generate(model, inputs, num_beams=8, do_sample=False, max_new_tokens=8)
    actual = generate(model, inputs, num_beams=8, do_sample=False, max_new_tokens=8, **models.PAGED)
    assert torch.equal(expected, actual)
    layers = model.config.num_decoder_layers if name == "t5" else model.config.decoder_layers
    token = layers * 2 * 64 * model.dtype.itemsize
    # 96 tokens of the encoder once, and 8 rows of one block each for the decoder.
    assert hf_paged.memory_stats(model).peak_bytes <= (96 + 8 * models.BLOCK_SIZE) * token


@needs_shared_prefill
def test_a_passed_empty_cache_shares_the_prefill_too() -> None:
    model = models.build("llama")
    prompt = models.prompt("llama", 1, 40)
    cache = hf_paged.PagedCache(model.config, {"block_size": 8})
    options = dict(num_return_sequences=8, do_sample=True, max_new_tokens=3, eos_token_id=None)
    torch.manual_seed(0)
    plain = model.generate(**prompt, **options)
    torch.manual_seed(0)
    paged = model.generate(**prompt, **options, past_key_values=cache)
    assert torch.equal(plain, paged)
    assert hf_paged.last_route(model).prefills_shared
    assert cache.stats().used_blocks == 5 + 8, (
        "five blocks of the prompt for all, one more for each row"
    )
    cache.check_integrity()


def test_a_global_hook_sees_all_rows_of_the_prefill() -> None:
    model, inputs, rows = models.build("llama"), models.prompt("llama", 2), []
    handle = torch.nn.modules.module.register_module_forward_hook(
        lambda module, _, output: rows.append(len(output)) if module is model.lm_head else None
    )
    try:
        for mode in ({}, models.PAGED):
            generate(model, inputs, num_beams=3, do_sample=False, max_new_tokens=3, **mode)
    finally:
        handle.remove()
    assert rows == [6] * 6
