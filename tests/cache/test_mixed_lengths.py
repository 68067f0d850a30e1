"""Any order of operations on caches against the `DynamicCache` that they replace, with layers of
different shapes and numbers of tokens, such as cross attention beside self attention."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, Gemma3TextConfig

from hf_paged import PagedCache
from hf_paged.cache.block_pool import BlockTable
from hf_paged.cache.group_memory import GroupMemory
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.layer_group import LayerGroup
from tests.support import models

Shape = tuple[int, int]  # heads, dim
KEYS: Shape = (2, 4)
SHAPES = ((KEYS, KEYS), ((1, 16), (1, 4)), (KEYS, (4, 8)))  # of keys and values of layers
FAULTS = (
    (GroupMemory, "ensure_free"),
    (BlockTable, "append"),
    (LayerGroup, "_make_step"),
    (KVBlocks, "store"),
    (GroupMemory, "copy_blocks"),  # also where a cache is not empty
)
WINDOWS = Gemma3TextConfig(
    num_hidden_layers=2, sliding_window=8, layer_types=["sliding_attention"] * 2
)


def states(
    rows: int, tokens: int, generator: torch.Generator, shapes: Sequence[Shape] = (KEYS, KEYS)
) -> list[Tensor]:
    return [torch.randn(rows, heads, tokens, dim, generator=generator) for heads, dim in shapes]


def assert_equal(plain: DynamicCache, paged: PagedCache, what: str) -> None:
    paged.check_integrity()
    for index, (mine, theirs) in enumerate(zip(plain.layers, paged.layers)):
        for name in ("keys", "values"):
            expected, found = getattr(mine, name), getattr(theirs, name)
            assert torch.equal(expected, found.clone()), f"{name} of layer {index} after {what}"


def play(
    seed: int,
    num_operations: int,
    paged: PagedCache,
    shapes: Sequence[Sequence[Shape]] = SHAPES,
    config: Any = None,
    device: str = "cpu",
) -> None:
    """Random operations on an empty cache, and on copies of it, and updates that fail and are
    repeated. What was shown stays as it was."""
    choose, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    pairs: list[Any] = [(DynamicCache(config=config), paged)]
    shown: list[tuple[Tensor, Tensor]] = []
    for number in range(num_operations):
        place = choose.randrange(len(pairs))
        plain, paged = pairs[place]
        shortest = min((layer.get_seq_length() for layer in plain.layers), default=0)
        rows = plain.layers[0].keys.shape[0] if number and shortest else 3
        kinds = ["update"] * 2 + ["rows", "repeat", "crop", "copy", "pickle", "show", "reset"]
        what = choose.choice(kinds) if number and shortest else "reset"
        if what == "reset":
            paged.reset()
            plain = DynamicCache(config=config)  # the stock `reset` of 5.17 keeps the length
        if what in ("reset", "update"):
            # layers with windows go on together
            indices = [choose.randrange(len(shapes))]
            if what == "reset" or config is not None:
                indices = list(range(len(shapes)))
            length = choose.choice([1, 1, 2, 6, 80])
            for index in indices:
                if what == "reset" and config is None:
                    length = choose.choice([3, 8, 11, 21, 150])
                new = [x.to(device) for x in states(rows, length, generator, shapes[index])]
                plain.update(*new, index)
                fault = choose.choice(FAULTS if paged.is_empty else FAULTS[-1:])
                try:
                    with mock.patch.object(*fault, side_effect=RuntimeError("on purpose")):
                        paged.update(*new, index)
                except RuntimeError as error:
                    assert str(error) == "on purpose"
                    paged.check_integrity()
                    paged.update(*new, index)
        elif what == "rows":
            chosen = [choose.randrange(rows) for _ in range(choose.choice([rows, 2, 4]))]
            for cache in (plain, paged):
                cache.batch_select_indices(torch.tensor(chosen, device=device))
        elif what == "repeat" and rows < 5:
            for cache in (plain, paged):
                cache.batch_repeat_interleave(2)
        elif what == "crop" and config is None and shortest > 2:
            for cache in (plain, paged):
                cache.crop(-2)
        elif what in ("copy", "pickle"):
            twin = copy.deepcopy(paged) if what == "copy" else pickle.loads(pickle.dumps(paged))
            pairs = [*pairs[-3:], (copy.deepcopy(plain), twin)]
        elif what == "show":
            index = choose.randrange(len(shapes))
            keys, expected = paged.layers[index].keys, plain.layers[index].keys.clone()
            shown = [*shown[-3:], (keys, expected), (keys.read()[:, :, :], expected)]
        if what == "reset":
            pairs[place] = plain, paged
        for pair in pairs:
            assert_equal(*pair, what)
        for found, expected in shown:
            assert torch.equal(found + 0, expected), f"what was shown changed after {what}"


@pytest.mark.slow_cases("*-4", "*-5", "*-6", "*-7")
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("windowed", [False, True])
def test_any_order_of_operations(windowed: bool, seed: int) -> None:
    config, shapes = (WINDOWS, [(KEYS, KEYS)] * 2) if windowed else (None, SHAPES)
    play(seed, 60, PagedCache(config, {"block_size": 8}), shapes, config)


def filled(
    lengths: tuple[int, ...], rows: int = 2, config: Any = None
) -> tuple[DynamicCache, PagedCache, torch.Generator]:
    plain, paged = DynamicCache(config=config), PagedCache(config, {"block_size": 8})
    generator = torch.Generator().manual_seed(0)
    for index, length in enumerate(lengths):
        new = states(rows, length, generator)
        for cache in (plain, paged):
            cache.update(*new, index)
    assert_equal(plain, paged, "the first update")
    return plain, paged, generator


@pytest.mark.parametrize("lengths", [(5, 40), (20, 20), (40, 39)], ids=str)
def test_a_layer_behind_another_sees_its_window(lengths: tuple[int, int]) -> None:
    plain, paged, generator = filled(lengths, config=WINDOWS)
    for _ in range(3):
        new = states(2, 1, generator)
        for cache in (plain, paged):
            cache.update(*new, 0)
        assert_equal(plain, paged, "an update of the first layer")


def test_a_layer_whose_window_was_given_back_is_refused() -> None:
    """Its keys were not stored, and zeros were used in their place."""
    with pytest.raises(
        ValueError, match=r"8 tokens up to token 5, .* first 32 .* another layer .* holds 40"
    ):
        filled((40, 5), config=WINDOWS)
    _, paged, generator = filled((8, 8), config=WINDOWS)
    for _ in range(20):
        paged.update(*states(2, 1, generator), 0)
    message = (
        "a layer attends to 8 tokens up to token 8, but the first 16 were freed, since another"
        " layer .* holds 28"
    )
    with pytest.raises(ValueError, match=message):
        paged.update(*states(2, 1, generator), 1)
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
