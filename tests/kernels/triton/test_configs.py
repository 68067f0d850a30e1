"""The choice of launch parameters: the tables that `benchmarks/tune.py` writes, and the rule
without a table."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from benchmarks import tune
from benchmarks.chips import CHIPS
from hf_paged.attention.backends import reference
from hf_paged.kernels.triton import configs
from hf_paged.kernels.triton.configs import LaunchConfig, find_config
from tests.support.kernels.device import DEVICE, available


def test_the_table_of_the_chip_comes_before_the_rule(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(configs, "FOLDER", tmp_path)
    monkeypatch.setattr(configs, "chip_name", lambda device: "sm90")
    configs._load_table.cache_clear()
    arguments = (128, 128, torch.bfloat16, 4, torch.device("cpu"))
    rule = configs.default_decode_config(*arguments[:4])
    assert configs.find_config("decode", *arguments) == rule
    measured = LaunchConfig(tile=128, num_warps=8, num_stages=2, programs_per_sm=3)
    tune.write(
        tmp_path / "sm90.json",
        {"gpu": "NVIDIA H200"},
        "decode/128x128/bfloat16/m16",
        measured,
        {"best_us": 1.0},
    )
    configs._load_table.cache_clear()
    try:
        assert configs.find_config("decode", *arguments) == measured != rule
        assert (
            configs.find_config("decode", 128, 128, torch.float16, 4, torch.device("cpu")) == rule
        )
    finally:
        configs._load_table.cache_clear()
    assert json.loads((tmp_path / "sm90.json").read_text())["measured"][
        "decode/128x128/bfloat16/m16"
    ]["gpu"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dim", [8, 64, 100, 256, 576])
@pytest.mark.parametrize("rows", [1, 7, 128])
def test_the_rule_gives_powers_of_two(dim: int, rows: int, dtype: torch.dtype) -> None:
    config = configs.default_decode_config(dim, dim, dtype, rows)
    for value in (config.tile, config.block_m, config.num_warps):
        assert value & (value - 1) == 0
    assert config.tile >= 16 and config.block_m >= 16


@pytest.mark.parametrize("name", sorted(CHIPS))
def test_tiles_fit_the_shared_memory_of_the_chip(name: str) -> None:
    chip, limit = name.replace("sm_", "sm"), CHIPS[name].block_shared
    for kernel, dim, dtype, rows in itertools.product(
        ("decode", "prefill"),
        (64, 80, 128, 256, 512),
        (torch.bfloat16, torch.float32),
        (1, 32, 4096),
    ):
        default = (
            configs.default_decode_config if kernel == "decode" else configs.default_prefill_config
        )
        config = default(dim, dim, dtype, rows, chip)
        fitted = configs.fit_config(config, kernel, dim, dim, dtype, chip, limit)
        assert configs.shared_bytes(fitted, kernel, dim, dim, dtype, chip) <= limit
        if configs.shared_bytes(config, kernel, dim, dim, dtype, chip) <= limit:
            assert fitted == config
        assert fitted.tile >= 16 and fitted.num_stages >= 1


def test_wide_heads_take_smaller_tiles_on_chips_with_less_shared_memory() -> None:
    """148,496 bytes of a decode over heads of 512 fit chips of 8.0, but not 8.6, 8.9 and 12.0."""
    heads = 512, 512, torch.bfloat16
    config = configs.default_decode_config(*heads, 4, "sm80")
    assert 148_496 <= configs.shared_bytes(config, "decode", *heads, "sm80") <= 150_000
    assert (
        configs.fit_config(config, "decode", *heads, "sm80", CHIPS["sm_80"].block_shared) == config
    )
    smaller = configs.fit_config(config, "decode", *heads, "sm86", CHIPS["sm_86"].block_shared)
    assert (smaller.tile, smaller.num_stages) == (config.tile // 2, config.num_stages)
    latents = 576, 512, torch.bfloat16
    assert (
        configs.fit_config(
            config, "decode", *latents, "sm86", CHIPS["sm_86"].block_shared, value_is_key=True
        )
        == config
    )


def test_tune_leaves_out_what_is_wrong_or_does_not_fit() -> None:
    default = LaunchConfig(tile=64)
    options = list(tune.decode_candidates(default))
    assert options[0] == default and len(set(options)) == len(options)
    fast_but_wrong, too_large, best = options[1], options[2], options[3]

    def time_us(config: LaunchConfig) -> float:
        if config == too_large:
            raise RuntimeError("out of resource: shared memory")
        return {fast_but_wrong: 1.0, best: 2.0}.get(config, 3.0)

    chosen, times = tune.choose(iter(options), lambda config: config != fast_but_wrong, time_us)
    assert chosen == best and too_large not in times and fast_but_wrong not in times
    with pytest.raises(RuntimeError, match="no candidate"):
        tune.choose(iter(options), lambda config: False, time_us)


@available
def test_tune_compares_with_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    """The timed function computes what the reference does: a configuration of each kernel, at sizes
    for this machine."""
    monkeypatch.setitem(tune.SHAPES, 16, (4, 2, 16, 16))
    torch.manual_seed(0)
    for kind, queries, config in (
        ("decode", 1, LaunchConfig(tile=16)),
        ("prefill", 5, LaunchConfig(16, 16, 4, 1)),
    ):
        call = tune.call_of(16, torch.float32, (2, queries, 40), DEVICE)
        found = tune.launch(kind, call, config)
        torch.testing.assert_close(found, reference.attend(call), atol=2e-5, rtol=2e-5)


def test_tune_knows_the_entries_that_prefill_looks_up(monkeypatch: pytest.MonkeyPatch) -> None:
    device, asked = torch.device("cpu"), []
    monkeypatch.setattr(
        configs, "_load_table", lambda chip: {key: LaunchConfig(16, 32) for key in asked}
    )
    for dim, (heads, kv_heads, key_dim, value_dim) in tune.SHAPES.items():
        asked[:] = [task.key for task in tune.prefill_tasks(dim, torch.bfloat16, "none")]
        assert len(asked) == len(set(asked)) >= 1
        for rows in (4096, 8 * heads // kv_heads, 16 * heads // kv_heads):
            config = find_config("prefill", key_dim, value_dim, torch.bfloat16, rows, device)
            is_known = (
                configs.entry_name("prefill", key_dim, value_dim, torch.bfloat16, min(rows, 128))
                in asked
            )
            assert (config == LaunchConfig(16, 32)) == is_known
            assert is_known or rows < 4096


def test_tune_says_that_it_needs_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr("sys.argv", ["benchmarks.tune"])
    with pytest.raises(SystemExit, match="on a CUDA device, and there is none here"):
        tune.main()
