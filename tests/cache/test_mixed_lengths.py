"""Layers of one cache with different numbers of tokens, such as cross attention beside self
attention."""

from __future__ import annotations

import copy
import pickle
import random
from typing import Any

import pytest
import torch
from transformers import (
    DynamicCache,
    Gemma3TextConfig,
    MllamaConfig,
    MllamaForConditionalGeneration,
)

import hf_paged
from hf_paged import PagedCache
from tests.support import models

HEADS, DIM = 2, 4
CROSS_TOKENS = 10  # of `image_inputs`: 2 tiles of 2 x 2 patches and a class token


def states(rows: int, tokens: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (rows, HEADS, tokens, DIM)
    return torch.randn(shape, generator=generator), torch.randn(shape, generator=generator)


def assert_equal(plain: DynamicCache, paged: PagedCache, what: str) -> None:
    paged.check_integrity()
    for index, (mine, theirs) in enumerate(zip(plain.layers, paged.layers)):
        for name in ("keys", "values"):
            expected, found = getattr(mine, name), getattr(theirs, name)
            assert torch.equal(expected, found.clone()), f"{name} of layer {index} after {what}"


def filled(
    lengths: tuple[int, ...], rows: int = 2
) -> tuple[DynamicCache, PagedCache, torch.Generator]:
    plain, paged, generator = (
        DynamicCache(),
        PagedCache(paged_config={"block_size": 8}),
        torch.Generator(),
    )
    generator.manual_seed(0)
    for index, length in enumerate(lengths):
        new = states(rows, length, generator)
        for cache in (plain, paged):
            cache.update(*new, index)
    assert_equal(plain, paged, "the first update")
    return plain, paged, generator


@pytest.mark.parametrize("lengths", [(5, 40), (40, 5), (5, 5, 41)], ids=str)
def test_rows_that_share_a_block_write_to_their_own(lengths: tuple[int, ...]) -> None:
    plain, paged, generator = filled(lengths)
    new = states(2, 1, generator)
    for cache in (plain, paged):
        cache.reorder_cache(torch.tensor([0, 0]))
        for index, length in enumerate(lengths):
            if length == 5:
                cache.update(*new, index)
    assert_equal(plain, paged, "an update of rows that were one")


def test_a_deep_copy_is_not_written_to() -> None:
    plain, paged, generator = filled((5, 40))
    twins = copy.deepcopy(plain), copy.deepcopy(paged)
    for pair in (twins, (plain, paged)):
        new = states(2, 1, generator)
        for cache in pair:
            cache.update(*new, 0)
    assert_equal(*twins, "a write to what it was copied from")
    assert_equal(plain, paged, "a write to its copy")


def test_a_copy_made_between_two_layers_of_a_step() -> None:
    plain, paged, generator = filled((5, 5))
    first, second, other = (states(2, 1, generator) for _ in range(3))
    for cache in (plain, paged):
        cache.update(*first, 0)
    twins = copy.deepcopy(plain), copy.deepcopy(paged)
    for cache in twins:
        cache.update(*other, 1)
    for cache in (plain, paged):
        cache.update(*second, 1)
    assert_equal(plain, paged, "its own step")
    assert_equal(*twins, "the copy's step")


@pytest.mark.parametrize("lengths", [(5, 5), (5, 40)], ids=["even", "mixed"])
def test_keys_shown_before_a_write_stay_after_the_copy_has_their_block(
    lengths: tuple[int, ...],
) -> None:
    _, paged, generator = filled(lengths)
    for index in range(2):  # large enough: storage that grows would leave old keys in place
        paged.update(*states(2, 100, generator), index)
    paged.crop(-100)
    shown = paged.layers[0].keys
    expected = paged.layers[0].keys.clone()
    twin = copy.deepcopy(paged)
    paged.update(*states(2, 1, generator), 0)
    twin.crop(-3)
    twin.update(*states(2, 3, generator), 0)
    assert torch.equal(shown, expected)


def test_crop_takes_as_many_tokens_of_every_layer() -> None:
    plain, paged, generator = filled((5, 40))
    new = states(2, 3, generator)
    for cache in (plain, paged):
        cache.crop(-2)
    assert_equal(plain, paged, "crop")
    for cache in (plain, paged):
        cache.update(*new, 0)
        cache.update(*new, 1)
    assert_equal(plain, paged, "an update after crop")


@pytest.mark.parametrize("seed", range(8))
def test_random_operations_on_layers_of_different_lengths(seed: int) -> None:
    choose = random.Random(seed)
    plain, paged, generator = filled(tuple(choose.choice([3, 8, 11, 21]) for _ in range(3)), rows=3)
    pairs = [(plain, paged)]
    for _ in range(25):
        plain, paged = choose.choice(pairs)
        rows = plain.layers[0].keys.shape[0]
        what = choose.choice(["update", "update", "rows", "crop", "copy", "pickle"])
        if what == "update":
            new, index = states(rows, choose.choice([1, 1, 2, 6]), generator), choose.randrange(3)
            for cache in (plain, paged):
                cache.update(*new, index)
        elif what == "rows":
            indices = torch.tensor(
                [choose.randrange(rows) for _ in range(choose.choice([rows, 2, 4]))]
            )
            for cache in (plain, paged):
                cache.batch_select_indices(indices)
        elif what == "crop" and min(layer.get_seq_length() for layer in plain.layers) > 2:
            count = choose.choice([1, 2])
            for cache in (plain, paged):
                cache.crop(-count)
        elif what == "copy":
            pairs.append((copy.deepcopy(plain), copy.deepcopy(paged)))
        elif what == "pickle":
            pairs[pairs.index((plain, paged))] = (
                copy.deepcopy(plain),
                pickle.loads(pickle.dumps(paged)),
            )
        for pair in pairs:
            assert_equal(*pair, what)


def windowed(lengths: tuple[int, int]) -> tuple[DynamicCache, PagedCache]:
    """Two layers with a window of 8 that got these tokens at once."""
    config = Gemma3TextConfig(
        num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention"] * 2
    )
    plain, paged, generator = (
        DynamicCache(config=config),
        PagedCache(config, {"block_size": 8}),
        torch.Generator(),
    )
    for index, length in enumerate(lengths):
        new = states(2, length, generator.manual_seed(index))
        for cache in (plain, paged):
            cache.update(*new, index)
    return plain, paged


@pytest.mark.parametrize("lengths", [(5, 40), (20, 20), (40, 39)], ids=str)
def test_a_layer_behind_another_sees_its_window(lengths: tuple[int, int]) -> None:
    plain, paged = windowed(lengths)
    assert_equal(plain, paged, "the first update")
    for seed in range(3):
        new = states(2, 1, torch.Generator().manual_seed(seed))
        for cache in (plain, paged):
            cache.update(*new, 0)
        assert_equal(plain, paged, "an update of the first layer")


def test_a_layer_whose_window_was_given_back_is_refused() -> None:
    """Its keys were not stored, and zeros were used in their place."""
    with pytest.raises(
        ValueError, match=r"8 tokens up to token 5, .* first 32 .* another layer .* holds 40"
    ):
        windowed((40, 5))
    _, paged = windowed((8, 8))
    for seed in range(20):
        paged.update(*states(2, 1, torch.Generator().manual_seed(seed)), 0)
    message = (
        "a layer attends to 8 tokens up to token 8, but the first 16 were freed, since another"
        " layer .* holds 28"
    )
    with pytest.raises(ValueError, match=message):
        paged.update(*states(2, 1, torch.Generator()), 1)
    with pytest.raises(ValueError, match=message):
        _ = paged.layers[1].keys
    paged.check_integrity()


@pytest.mark.parametrize("operation", ["crop", "reset", "reorder_cache", "batch_repeat_interleave"])
def test_a_layer_that_an_operation_left_out_is_refused(operation: str) -> None:
    """Such a layer showed blocks that others had freed, and foreign memory."""
    _, paged, generator = filled((20, 20))
    argument = {
        "crop": (-12,),
        "reorder_cache": (torch.tensor([1, 1]),),
        "batch_repeat_interleave": (2,),
    }
    getattr(paged.layers[1], operation)(*argument.get(operation, ()))
    message = (
        "layer 0 missed an operation on rows or lengths that other layers of the cache have run"
    )
    with pytest.raises(RuntimeError, match=message):
        paged.update(*states(2, 1, generator), 0)
    with pytest.raises(RuntimeError, match=message):
        _ = paged.layers[0].keys
    paged.check_integrity()
    paged.reset()
    assert paged.stats().used_blocks == 0
    new = states(2, 3, generator)
    paged.update(*new, 0)
    assert torch.equal(paged.layers[0].keys, new[0])


def test_a_refused_operation_leaves_the_layers_together() -> None:
    plain, paged, _ = filled((5, 5), rows=3)
    for wrong, message in (
        (torch.tensor([0, 3]), r"there are no rows \[3\]: the cache holds rows 0 to 2"),
        (
            torch.tensor([True, False]),
            r"the mask of rows has the shape \(2,\), but the cache has 3 rows: .* of shape \(3,\)",
        ),
        (
            torch.tensor([0.0, 1.0]),
            r"row indices must be a vector of int32 or int64, not torch.float32 of shape \(2,\)",
        ),
        (torch.tensor([1, 0, 1], dtype=torch.uint8), r"not torch.uint8 of shape \(3,\)"),
        (torch.tensor([[0, 1]]), r"not torch.int64 of shape \(1, 2\)"),
        (torch.tensor(1), r"not torch.int64 of shape \(\)"),
    ):
        with pytest.raises(IndexError, match=message):
            paged.batch_select_indices(wrong)
        assert_equal(plain, paged, f"the refused {wrong}")
    with pytest.raises(RuntimeError, match="non-negative"):
        paged.batch_repeat_interleave(-1)
    for cache in (plain, paged):
        cache.batch_repeat_interleave(torch.tensor([2, 0, 1]))
    assert_equal(plain, paged, "repeats of each row")


def image_model() -> Any:
    text: dict[str, Any] = dict(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        cross_attention_layers=[1, 3],
        max_position_embeddings=256,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
    )
    vision: dict[str, Any] = dict(
        hidden_size=32,
        image_size=32,
        patch_size=16,
        intermediate_size=48,
        num_hidden_layers=2,
        num_global_layers=1,
        attention_heads=4,
        vision_output_dim=96,
        intermediate_layers_indices=[0, 1],
        max_num_tiles=2,
        supported_aspect_ratios=[[1, 1], [1, 2], [2, 1]],
    )
    torch.manual_seed(0)
    config = MllamaConfig(vision_config=vision, text_config=text, image_token_index=127)
    model = MllamaForConditionalGeneration(config).eval()
    for name, parameter in model.named_parameters():
        if "gate" in name:
            parameter.data.fill_(1.0)  # gates are closed at first: the image would have no effect
        elif parameter.dim() > 1:
            parameter.data.mul_(8)
    return model


def image_inputs(length: int, padding: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    ids = torch.randint(3, 120, (2, length))
    mask = torch.ones_like(ids)
    ids[0, :padding] = mask[0, :padding] = 0
    return dict(
        input_ids=ids,
        attention_mask=mask,
        pixel_values=torch.randn(2, 1, 2, 3, 32, 32),
        aspect_ratio_ids=torch.full((2, 1), 2),
        aspect_ratio_mask=torch.ones(2, 1, 2, dtype=torch.long),
        cross_attention_mask=torch.ones(2, length, 1, 2, dtype=torch.long),
    )


@pytest.mark.slow_cases(but=["more-*"])
@pytest.mark.parametrize("padding", [0, 3], ids=["even", "padded"])
@pytest.mark.parametrize("length", [7, CROSS_TOKENS, 13], ids=["fewer", "as-many", "more"])
def test_mllama_gives_plain_tokens(length: int, padding: int) -> None:
    model = image_model()
    for options in ({}, {"num_beams": 3, "num_return_sequences": 2}):
        calls: list[torch.Tensor] = []
        for paged in ({}, {"cache_implementation": "paged", "cache_config": {"block_size": 8}}):
            calls.append(
                model.generate(
                    **image_inputs(length, padding),
                    max_new_tokens=12,
                    do_sample=False,
                    **options,
                    **paged,
                )
            )
        assert torch.equal(*calls), f"{options}: {calls}"
    hf_paged.check_integrity(model)


@pytest.mark.slow_cases("bart-options1")
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_a_row_whose_text_is_all_padding(name: str, options: dict[str, Any]) -> None:
    """Like a batch filled up with empty texts: T5 then attends to all positions equally."""
    model, inputs = models.build(name), models.prompt(name, length=20)
    inputs["attention_mask"][0] = 0
    options = {**options, "do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, **models.PAGED), expected)
