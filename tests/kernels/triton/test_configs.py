"""The choice of launch parameters: the tables that `benchmarks/tune.py` writes, and the rule
without a table."""

from __future__ import annotations

import functools
import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import runner, tune
from hf_paged.attention.backends import reference
from hf_paged.kernels.triton import configs
from hf_paged.kernels.triton.configs import LaunchConfig, find_config
from tests.support.kernels.chips import CHIPS
from tests.support.kernels.device import DEVICE, available


def test_the_chips_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    load = functools.cache(configs._load_table.__wrapped__)
    monkeypatch.setattr(configs, "_load_table", load)
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(configs, "chip_name", lambda device: "sm90")
    name, path = "decode/128x128/bfloat16/m16", tmp_path / "sm90.json"
    measured = LaunchConfig(tile=128, num_warps=8, num_stages=2, programs_per_sm=3)
    rule = configs.default_decode_config(128, 128, torch.bfloat16, 4)
    assert rule != measured

    def find(dtype: torch.dtype = torch.bfloat16) -> LaunchConfig:
        configs._load_table.cache_clear()
        return find_config("decode", 128, 128, dtype, 4, torch.device("cpu"))

    assert find() == rule
    tune.write(path, {"gpu": "NVIDIA H200"}, name, measured, {"best_us": 1.0})
    assert find() == measured and find(torch.float16) == rule
    assert json.loads(path.read_text())["measured"][name]["gpu"]


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_tiles_fit_the_shared_memory_of_the_chip(name: str) -> None:
    chip, limit = name.replace("sm_", "sm"), CHIPS[name].block_shared
    for kernel, dim, dtype, rows in itertools.product(
        ("decode", "prefill"),
        (8, 64, 80, 100, 128, 256, 512),
        (torch.bfloat16, torch.float32),
        (1, 7, 32, 4096),
    ):
        config = getattr(configs, f"default_{kernel}_config")(dim, dim, dtype, rows, chip)
        arguments = kernel, dim, dim, dtype, chip
        fitted = configs.fit_config(config, *arguments, limit)
        assert configs.shared_bytes(fitted, *arguments) <= limit
        if configs.shared_bytes(config, *arguments) <= limit:
            assert fitted == config
        for value in (fitted.tile, fitted.block_m, fitted.num_warps):
            assert value & (value - 1) == 0
        assert min(fitted.tile, fitted.block_m) >= 16 and fitted.num_stages >= 1


def test_wide_heads_take_smaller_tiles_on_chips_with_less_shared_memory() -> None:
    """148,496 bytes of a decode over heads of 512 fit chips of 8.0, but not 8.6, 8.9 and 12.0."""
    heads, latents = (512, 512, torch.bfloat16), (576, 512, torch.bfloat16)
    config = configs.default_decode_config(*heads, 4, "sm80")
    assert 148_496 <= configs.shared_bytes(config, "decode", *heads, "sm80") <= 150_000

    def fitted(chip: str, sizes: Any, **options: Any) -> LaunchConfig:
        limit = CHIPS[chip.replace("sm", "sm_")].block_shared
        return configs.fit_config(config, "decode", *sizes, chip, limit, **options)

    assert fitted("sm80", heads) == fitted("sm86", latents, value_is_key=True) == config
    smaller = fitted("sm86", heads)
    assert (smaller.tile, smaller.num_stages) == (config.tile // 2, config.num_stages)


def test_tune_leaves_out_what_is_wrong_or_does_not_fit() -> None:
    default = LaunchConfig(tile=64)
    options = list(tune.candidates("decode", default))
    assert options[0] == default and len(set(options)) == len(options)
    wrong, too_large, best = map(str, options[1:4])

    def time_of(turn: int, name: str) -> float | str:
        if name == too_large:
            raise RuntimeError("out of resource: shared memory")
        return {wrong: "wrong", best: 2e-6}.get(name, 3e-6)

    arms = runner.each(time_of, map(str, options))
    chosen, figures = tune.fastest("decode", {n: runner.guarded(a) for n, a in arms.items()})
    assert (chosen, figures["best_us"], figures["default_us"]) == (best, 2.0, 3.0)
    why = "failed: RuntimeError: out of resource: shared memory"
    assert figures["left out"] == {wrong: "wrong", too_large: why}
    with pytest.raises(RuntimeError, match="no candidate"):
        tune.fastest("decode", {wrong: arms[wrong]})


@available
def test_tune_compares_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed function computes what the reference does: a configuration of each kernel, at sizes
    for this machine."""
    monkeypatch.setitem(tune.HEADS, 16, (4, 2, 16, 16))
    torch.manual_seed(0)
    for kind, queries, config in (
        ("decode", 1, LaunchConfig(tile=16)),
        ("prefill", 5, LaunchConfig(16, 16, 4, 1)),
    ):
        (call,) = tune.random_calls(16, torch.float32, (2, queries, 40), DEVICE)
        found = tune.launch(kind, call, config)
        torch.testing.assert_close(found, reference.attend(call), atol=2e-5, rtol=2e-5)


def test_tune_knows_the_entries_that_prefill_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device, dtype, found = torch.device("cpu"), torch.bfloat16, LaunchConfig(16, 32)
    asked: list[str] = []
    monkeypatch.setattr(configs, "_load_table", lambda chip: dict.fromkeys(asked, found))
    for dim, (heads, kv_heads, *dims) in tune.HEADS.items():
        asked[:] = [task.key for task in tune.tasks_of("prefill", dim, dtype, "none")]
        assert len(asked) == len(set(asked)) >= 1
        for rows in (4096, 8 * heads // kv_heads, 16 * heads // kv_heads):
            is_known = configs.entry_name("prefill", *dims, dtype, min(rows, 128)) in asked
            assert (find_config("prefill", *dims, dtype, rows, device) == found) == is_known
            assert is_known or rows < 4096
