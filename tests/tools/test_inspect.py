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
from hf_paged.tools.inspect import Report, examine, main
from tests.support import models

DEEPSEEK: dict[str, Any] = {
    **{"vocab_size": 128, "hidden_size": 64, "intermediate_size": 96, "moe_intermediate_size": 32},
    **{
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
    },
    **{"num_experts_per_tok": 2, "n_group": 2, "topk_group": 1, "first_k_dense_replace": 1},
    **{
        "kv_lora_rank": 24,
        "q_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
    },
}


def saved(
    tmp_path: Path, config: transformers.PreTrainedConfig, architecture: str | None = None
) -> str:
    if architecture is not None:
        config.architectures = [architecture]
    config.save_pretrained(tmp_path)
    return str(tmp_path)


def saved_test_model(tmp_path: Path, name: str) -> str:
    return saved(tmp_path, models.config(name), models.CONFIGS[name][0])


def generated(name: str) -> tuple[hf_paged.MemoryStats, hf_paged.Route]:
    """Memory and route after a call of 13 + 8 tokens."""
    model = models.build(name)
    model.generate(
        **models.prompt(name, batch_size=1), max_new_tokens=8, do_sample=False, **models.PAGED
    )
    route = hf_paged.last_route(model)
    assert route is not None
    return hf_paged.memory_stats(model), route


def test_quantized_keys_and_values(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = saved_test_model(tmp_path, "llama")
    plain = examine(path, dtype=torch.bfloat16)
    assert main([path, "--dtype", "bfloat16", "--kv-dtype", "int8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["kv_dtype"] == "int8" and plain.kv_dtype is None
    assert found["token_bytes"] == plain.token_bytes * (16 + 4) // (2 * 16)
    assert found["groups"][0]["kernels"] == plain.groups[0].kernels
    assert main([path, "--dtype", "bfloat16", "--kv-dtype", "fp8_e4m3"]) == 0
    assert "stored as fp8_e4m3" in capsys.readouterr().out


@pytest.mark.slow_cases("bart", "t5", "whisper")
@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt2", "t5", "bart", "whisper", "mixtral"])
def test_against_a_call_of_generate(name: str, tmp_path: Path) -> None:
    path = saved_test_model(tmp_path, name)
    report = examine(path, block_size=models.BLOCK_SIZE, dtype=torch.float32, length=13 + 7)
    stats, route = generated(name)
    assert report.route.road == route.road
    assert report.route.in_place == route.in_place
    if not models.is_encoder_decoder(name):  # encoder outputs have different lengths
        blocks = sum(group.num_blocks(13 + 7) for group in report.groups)
        assert blocks == stats.peak_blocks
        assert report.fits[0]["sequence_bytes"] == stats.peak_bytes
    assert report.model == models.CONFIGS[name][0]
    assert report.num_parameters == models.build(name).num_parameters()
    for group in report.groups:
        assert group.kernels and set(group.kernels.values()) <= {"cpp", "gather", "reference"}


def test_the_saved_generation_config_decides_over_the_models(tmp_path: Path) -> None:
    """A trainer saves `use_cache=False`, which held while it trained, in the model's alone."""
    config = models.config("llama")
    config.use_cache = False
    path = saved(tmp_path, config, "LlamaForCausalLM")
    assert examine(path).route.road == "plain"
    transformers.GenerationConfig(use_cache=True).save_pretrained(path)
    assert examine(path).route.road == "engine"


def test_llama(tmp_path: Path) -> None:
    report = examine(
        saved_test_model(tmp_path, "llama"), block_size=16, dtype=torch.bfloat16, length=100
    )
    [group] = report.groups
    assert (group.kind, group.window, group.num_layers) == ("self", None, 2)
    assert group.layers == {"2 heads of 16": 2}
    # layers, K and V, heads, dim, bytes
    assert group.token_bytes == report.token_bytes == 2 * 2 * 2 * 16 * 2
    assert group.block_bytes == 16 * group.token_bytes
    assert [fit["length"] for fit in report.fits] == [100, 2048] and group.num_blocks(100) == 7
    assert report.fits[0]["sequences"] == report.left_bytes // (7 * group.block_bytes)


def test_sliding_windows_are_a_group_that_stops_growing(tmp_path: Path) -> None:
    report = examine(saved_test_model(tmp_path, "gemma3"), block_size=8)
    by_window = {group.window: group for group in report.groups}
    assert set(by_window) == {None, models.WINDOW}
    assert (by_window[None].num_layers, by_window[models.WINDOW].num_layers) == (1, 2)
    assert (
        by_window[models.WINDOW].num_blocks(1000) == by_window[models.WINDOW].num_blocks(100) == 2
    )
    assert by_window[None].num_blocks(1000) == 125


def test_latents(tmp_path: Path) -> None:
    report = examine(
        saved(tmp_path, transformers.DeepseekV3Config(**DEEPSEEK)), dtype=torch.float32
    )
    [group] = report.groups
    assert group.is_latent and group.layers == {"latent of 24, rotary key of 8": 3}
    assert group.token_bytes == 3 * (24 + 8) * 4
    assert (
        report.route.road == "engine"
        and report.route.in_place
        and "packed forwards" in report.route.reason
    )
    assert group.name == "full attention" and list(group.kernels) == ["decode", "prefill chunk"]


def test_encoder_decoders_have_cross_attention(tmp_path: Path) -> None:
    report = examine(saved_test_model(tmp_path, "t5"), dtype=torch.float32)
    assert [group.kind for group in report.groups] == ["self", "cross"]
    assert report.route.road == "engine" and "encoder" in report.route.reason


def test_states_that_are_not_in_blocks(tmp_path: Path) -> None:
    config = transformers.MambaConfig(
        vocab_size=128, hidden_size=32, state_size=8, num_hidden_layers=2
    )
    report = examine(saved(tmp_path, config), length=100)
    assert not report.groups and report.other_layers == {"LinearAttentionLayer": 2}
    assert report.fits[0]["sequences"] == 0 and report.route.road == "engine"


@pytest.mark.parametrize("name", models.HYBRID)
def test_rows_side_by_side(name: str, tmp_path: Path) -> None:
    report = examine(
        saved_test_model(tmp_path, name), block_size=models.BLOCK_SIZE, dtype=torch.float32
    )
    _, route = generated(name)
    assert (report.route.road, report.route.in_place) == (route.road, route.in_place)
    assert route.reason in report.route.reason


def test_a_large_model_takes_no_memory_and_its_road_is_not_guessed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hf_paged.tools.models.MAX_CHECK_BYTES", 0)
    report = examine("LlamaConfig", dtype=torch.float16)
    assert report.num_parameters > 6e9 and report.weight_bytes >= 2 * report.num_parameters
    assert report.token_bytes == 32 * 2 * 32 * 128 * 2
    assert report.route.road == "undecided" and "large" in report.route.reason


@pytest.mark.slow
def test_a_model_with_fewer_layers_is_checked_instead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = models.config("gemma3", num_hidden_layers=24, layer_types=None)
    name = saved(tmp_path, config, "Gemma3ForCausalLM")
    size = examine(name, dtype=torch.float32).weight_bytes
    monkeypatch.setattr("hf_paged.tools.models.MAX_CHECK_BYTES", size // 2)
    report = examine(name, dtype=torch.float32)
    assert report.route.road == "engine" and "fewer layers" in report.route.reason


def test_dtype_is_the_configurations_unless_given(tmp_path: Path) -> None:
    config = models.config("llama")
    config.dtype = torch.bfloat16
    name = saved(tmp_path, config)
    assert examine(name).dtype == "bfloat16"
    assert examine(name, dtype=torch.float32).token_bytes == 2 * examine(name).token_bytes


@pytest.mark.parametrize("name", ["gpt2", "GPT2Config", "GPT2LMHeadModel"])
def test_names(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hf_paged.tools.models.MAX_CHECK_BYTES", 0)
    assert examine(name).model == "GPT2LMHeadModel"


@pytest.mark.slow_cases("-*", "nobody/nothing-*")
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lama", r"'lama' is not a path here.*Similar names: .*llama.*model type"),
        ("nobody/nothing", "is not a path here.*Nothing is downloaded"),
        ("LlamaModel", "does not generate: use LlamaForCausalLM"),
        ("bert_japanese", "not a path here"),
        ("ViTConfig", "no class for ViTConfig that generates"),
        ("", "is not a path here"),
        ("DeepseekV2Config", "its forward fails"),  # a number is missing in its default config
    ],
)
def test_what_names_no_model(name: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    if not name:
        name = "does-not-exist.json"
    with pytest.raises(ValueError, match=message):
        examine(name)
    assert main([name]) == 2
    assert capsys.readouterr().err.startswith("python -m hf_paged inspect: ")


def test_folders_that_hold_no_model(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"without a config\.json"):
        examine(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(ValueError, match="cannot read the configuration"):
        examine(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match="cannot read the configuration"):
        examine(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("option", "message"), [({"block_size": 12}, "power of two"), ({"length": 0}, "at least 1")]
)
def test_bad_numbers(option: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        examine("gpt2", **option)  # type: ignore[arg-type]


# -- the command ---------------------------------------------------------------------------------


def test_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                saved_test_model(tmp_path, "gemma3"),
                "--json",
                "--block-size",
                "8",
                "--dtype",
                "bfloat16",
            ]
        )
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "Gemma3ForCausalLM" and found["dtype"] == "bfloat16"
    assert [group["name"] for group in found["groups"]] == [
        f"window of {models.WINDOW} tokens",
        "full attention",
    ]
    assert found["groups"][0]["kernels"]["decode"] in ("cpp", "gather")
    assert found["fits"][0]["tokens"] == found["fits"][0]["sequences"] * 2048
    assert found["road"]["name"] == "engine"


@pytest.mark.parametrize("name", ["gemma3", "t5"])
def test_text(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([saved_test_model(tmp_path, name), "--length", "100", "--device", "cpu"]) == 0
    printed = capsys.readouterr().out
    for part in (
        models.CONFIGS[name][0],
        "per token",
        "100 tokens",
        "Route",
        "Kernels",
        "decode: ",
    ):
        assert part in printed
    assert ("cross attention" in printed) == (name == "t5")
    assert max(map(len, printed.splitlines())) <= 80


@pytest.mark.parametrize("device", ["nonsense", "meta"])
def test_a_device_that_is_not_here(device: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["gpt2", "--device", device])
    assert f"'{device}' is not available: this machine has cpu" in capsys.readouterr().err


def test_free_memory_is_the_machines(tmp_path: Path) -> None:
    report: Report = examine(saved_test_model(tmp_path, "llama"))
    assert abs(report.free_bytes - free_bytes(torch.device("cpu"))) < 2 << 30
    assert report.left_bytes == report.free_bytes - report.weight_bytes


@pytest.mark.slow
def test_block_sizes_that_are_left_to_us(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, dtype = saved_test_model(tmp_path, "gemma3"), torch.float32
    times = {4: 1.4, 8: 1.2, 16: 1.1, 32: 1.05, 64: 1.02, 128: 1.0}
    monkeypatch.setattr(
        "hf_paged.tools.inspect.find_costs", lambda device, dtype, kv_dtype: (times, "made up")
    )
    for length, size in ((40, 8), (300, 32)):
        report = examine(path, block_size="auto", dtype=dtype, length=length)
        assert {group.window: group.block_size for group in report.groups} == {
            None: size,
            models.WINDOW: 4,
        }
        assert all(
            f"1 sequences of {length} tokens on average; made up" in str(group.reason)
            for group in report.groups
        )
    assert {group.reason for group in examine(path, dtype=dtype).groups} == {None}
    assert main([path, "--block-size", "auto", "--length", "300", "--dtype", "float32"]) == 0
    assert "32 tokens per block: loses 5.1% of memory" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(SystemExit):
        main([path, "--block-size", "large"])
    assert "--block-size" in capsys.readouterr().err
