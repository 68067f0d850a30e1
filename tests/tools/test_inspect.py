"""The inspector's predictions for a model without weights, against the model's actual behaviour."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import hf_paged
from hf_paged.cache.free_memory import free_bytes
from hf_paged.tools.inspect import examine, main
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.engine_helpers import get_mamba


def saved(folder: Path, name: str, **overrides: Any) -> str:
    config = models.config(name, **overrides)
    config.architectures = [models.CONFIGS[name][0]]
    config.save_pretrained(folder)
    return str(folder)


@pytest.mark.slow_cases("bart", "t5", "whisper")
@pytest.mark.parametrize(
    "name", ["llama", "gemma3", "gpt2", "t5", "bart", "whisper", "mixtral", *models.HYBRID]
)
def test_against_a_call_of_generate(name: str, tmp_path: Path) -> None:
    """Of 13 + 8 tokens."""
    path = saved(tmp_path, name)
    report = examine(path, block_size=models.BLOCK_SIZE, dtype=torch.float32, length=13 + 7)
    model = models.build(name)
    inputs = models.prompt(name, batch_size=1)
    model.generate(**inputs, max_new_tokens=8, do_sample=False, **models.PAGED)
    stats, route = hf_paged.memory_stats(model), hf_paged.last_route(model)
    assert route is not None
    assert (report.route.road, report.route.in_place) == (route.road, route.in_place)
    if name in models.HYBRID:
        assert route.reason in report.route.reason
    elif not models.is_encoder_decoder(name):  # encoder outputs have different lengths
        assert sum(group.num_blocks(13 + 7) for group in report.groups) == stats.peak_blocks
        assert report.fits[0]["sequence_bytes"] == stats.peak_bytes
    assert report.model == models.CONFIGS[name][0]
    assert report.num_parameters == model.num_parameters()
    for group in report.groups:
        assert group.kernels and set(group.kernels.values()) <= {"cpp", "gather", "reference"}


def test_llama(tmp_path: Path) -> None:
    path = saved(tmp_path, "llama")
    report = examine(path, block_size=16, dtype=torch.bfloat16, length=100)
    [group] = report.groups
    assert (group.kind, group.window, group.num_layers) == ("self", None, 2)
    assert group.layers == {"2 heads of 16": 2}
    # layers, K and V, heads, dim, bytes
    assert group.token_bytes == report.token_bytes == 2 * 2 * 2 * 16 * 2
    assert group.block_bytes == 16 * group.token_bytes
    assert [fit["length"] for fit in report.fits] == [100, 2048] and group.num_blocks(100) == 7
    assert report.fits[0]["sequences"] == report.left_bytes // (7 * group.block_bytes)
    assert report.left_bytes == report.free_bytes - report.weight_bytes
    assert abs(report.free_bytes - free_bytes(torch.device("cpu"))) < 2 << 30


def test_sliding_windows_are_a_group_that_stops_growing(tmp_path: Path) -> None:
    report = examine(saved(tmp_path, "gemma3"), block_size=8)
    window, full = sorted(report.groups, key=lambda group: group.window is None)
    assert (window.window, window.num_layers, full.window, full.num_layers) == (8, 2, None, 1)
    assert window.num_blocks(1000) == window.num_blocks(100) == 2
    assert full.num_blocks(1000) == 125


def test_latents_and_states(tmp_path: Path) -> None:
    config = tiny_model(transformers.DeepseekV3ForCausalLM).config
    config.save_pretrained(tmp_path / "latents")
    report = examine(str(tmp_path / "latents"), dtype=torch.float32)
    [group] = report.groups
    rank, rotary, layers = config.kv_lora_rank, config.qk_rope_head_dim, config.num_hidden_layers
    assert group.is_latent
    assert group.layers == {f"latent of {rank}, rotary key of {rotary}": layers}
    assert group.token_bytes == layers * (rank + rotary) * 4
    assert report.route.road == "engine" and report.route.in_place
    assert "packed forwards" in report.route.reason
    assert group.name == "full attention" and list(group.kernels) == ["decode", "prefill chunk"]
    get_mamba().config.save_pretrained(tmp_path / "states")
    report = examine(str(tmp_path / "states"), length=100)
    assert not report.groups and report.other_layers == {"LinearAttentionLayer": 2}
    assert report.fits[0]["sequences"] == 0 and report.route.road == "engine"


def test_the_saved_generation_config_decides_over_the_models(tmp_path: Path) -> None:
    """A trainer saves `use_cache=False`, which held while it trained, in the model's alone."""
    path = saved(tmp_path, "llama", use_cache=False)
    assert examine(path).route.road == "plain"
    transformers.GenerationConfig(use_cache=True).save_pretrained(path)
    assert examine(path).route.road == "engine"


def test_a_large_model_takes_no_memory_and_its_road_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hf_paged.tools.models.MAX_CHECK_BYTES", 0)
    report = examine("LlamaConfig", dtype=torch.float16)
    assert report.num_parameters > 6e9 and report.weight_bytes >= 2 * report.num_parameters
    assert report.token_bytes == 32 * 2 * 32 * 128 * 2
    assert report.route.road == "undecided" and "large" in report.route.reason
    for name in ("gpt2", "GPT2Config", "GPT2LMHeadModel"):
        assert examine(name).model == "GPT2LMHeadModel"


@pytest.mark.slow
def test_a_model_with_fewer_layers_is_checked_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved(tmp_path, "gemma3", num_hidden_layers=24, layer_types=None)
    size = examine(path, dtype=torch.float32).weight_bytes
    monkeypatch.setattr("hf_paged.tools.models.MAX_CHECK_BYTES", size // 2)
    report = examine(path, dtype=torch.float32)
    assert report.route.road == "engine" and "fewer layers" in report.route.reason


@pytest.mark.slow_cases("-*", "nobody/nothing-*")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama", r"'lama' is not a path here.*Similar names: .*llama.*model type"),
        ("nobody/nothing", "is not a path here.*Nothing is downloaded"),
        ("LlamaModel", "does not generate: use LlamaForCausalLM"),
        ("bert_japanese", "not a path here"),
        ("ViTConfig", "no class for ViTConfig that generates"),
        ("does-not-exist.json", "is not a path here"),
        ("DeepseekV2Config", "its forward fails"),  # a number is missing in its default config
    ],
)
def test_what_names_no_model(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(ValueError, match=message):
        examine(name)
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith("python -m hf_paged inspect: ")


def test_folders_that_hold_no_model_and_bad_numbers(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without a config\.json"):
        examine(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ValueError, match="cannot read the configuration"):
        examine(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read the configuration"):
        examine(str(tmp_path / "config.json"))
    for option, message in ({"block_size": 12}, "power of two"), ({"length": 0}, "at least 1"):
        with pytest.raises(ValueError, match=message):
            examine("gpt2", **option)  # type: ignore[arg-type]


# -- the command ---------------------------------------------------------------------------------


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The dtype is the configuration's unless it is given."""

    def told(name: str, *options: str) -> Any:
        assert main([saved(tmp_path / name, name, dtype="bfloat16"), "--json", *options]) == 0
        return json.loads(capsys.readouterr().out)

    windows = told("gemma3", "--block-size", "8")
    assert windows["model"] == "Gemma3ForCausalLM" and windows["dtype"] == "bfloat16"
    names = [group["name"] for group in windows["groups"]]
    assert names == [f"window of {models.WINDOW} tokens", "full attention"]
    assert windows["groups"][0]["kernels"]["decode"] in ("cpp", "gather")
    assert windows["fits"][0]["tokens"] == windows["fits"][0]["sequences"] * 2048
    assert windows["road"]["name"] == "engine"
    plain, int8 = told("llama"), told("llama", "--kv-dtype", "int8")
    assert int8["kv_dtype"] == "int8" and plain["kv_dtype"] is None
    assert int8["token_bytes"] == plain["token_bytes"] * (16 + 4) // (2 * 16)
    assert int8["groups"][0]["kernels"] == plain["groups"][0]["kernels"]
    assert told("llama", "--dtype", "float32")["token_bytes"] == 2 * plain["token_bytes"]


@pytest.mark.parametrize("name", ["gemma3", "t5"])
def test_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--length", "100", "--device", "cpu", "--dtype", "bfloat16"]
    assert main([saved(tmp_path, name), *options, "--kv-dtype", "fp8_e4m3"]) == 0
    printed = capsys.readouterr().out
    parts = ("per token", "100 tokens", "Route", "Kernels", "decode: ", "stored as fp8_e4m3")
    for part in (models.CONFIGS[name][0], *parts):
        assert part in printed
    assert ("cross attention" in printed) == ("encoder" in printed) == (name == "t5")
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_a_device_that_is_not_here(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt2", "--device", device])
    assert f"'{device}' is not available: this machine has cpu" in capsys.readouterr().err


@pytest.mark.slow
def test_block_sizes_that_are_left_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, dtype = saved(tmp_path, "gemma3"), torch.float32
    times = {4: 1.4, 8: 1.2, 16: 1.1, 32: 1.05, 64: 1.02, 128: 1.0}
    monkeypatch.setattr(
        "hf_paged.tools.inspect.find_costs", lambda device, dtype, kv_dtype: (times, "made up")
    )
    for length, size in ((40, 8), (300, 32)):
        report = examine(path, block_size="auto", dtype=dtype, length=length)
        sizes = {group.window: group.block_size for group in report.groups}
        assert sizes == {None: size, models.WINDOW: 4}
        reason = f"1 sequences of {length} tokens on average; made up"
        assert all(reason in str(group.reason) for group in report.groups)
    assert {group.reason for group in examine(path, dtype=dtype).groups} == {None}
    assert main([path, "--block-size", "auto", "--length", "300", "--dtype", "float32"]) == 0
    assert "32 tokens per block: loses 5.1% of memory" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main([path, "--block-size", "large"])
    assert "--block-size" in capsys.readouterr().err
