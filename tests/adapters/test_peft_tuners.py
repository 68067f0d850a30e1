"""Every tuner of PEFT: equal to plain `generate` in an engine and in `generate_batch`, or refused
by name."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from transformers import GenerationConfig
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.engine_helpers import assert_drained, prompts, run_all

peft = pytest.importorskip("peft")
mapping = pytest.importorskip("peft.mapping")
lora = pytest.importorskip("peft.tuners.lora.config")

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
CONFIG = PagedConfig(block_size=8)
PROMPT = prompts(13)[0]
TARGETS = ["q_proj", "v_proj", "down_proj"]
ATTENTION = ["q_proj", "v_proj"]
RANK = {"r": 4, "target_modules": TARGETS}

TUNERS: dict[str, dict[str, Any]] = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": TARGETS},
    "ADAMSS": {"r": 8, "num_subspaces": 2, "target_modules": TARGETS},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "BEFT": {"target_modules": ["v_proj"]},
    "BOFT": {"boft_block_size": 4, "target_modules": TARGETS},
    "C3A": {"block_size": 16, "target_modules": ATTENTION},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "CPT": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 2]},
    "DEFT": RANK,
    "DELORA": RANK,
    "FOURIERFT": {"n_frequency": 50, "target_modules": TARGETS},
    "FROD": {"target_modules": TARGETS},
    "GLORA": RANK,
    "GRALORA": {**RANK, "gralora_k": 2},
    "HIRA": RANK,
    "HRA": RANK,
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LILY": RANK,
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "LOHA": RANK,
    "LOKR": RANK,
    "LORA": RANK,
    "MISS": RANK,
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "OFT": {"oft_block_size": 8, "target_modules": TARGETS},
    "OSF": {"target_modules": TARGETS, "effective_rank": 4},
    "PEANUT": RANK,
    "POLY": {**RANK, "n_tasks": 2, "n_skills": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "PSOFT": RANK,
    "PVERA": {"r": 4, "target_modules": ATTENTION},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "RANDLORA": RANK,
    "ROAD": {"group_size": 16, "target_modules": TARGETS},
    "SHADOW": {"r": 4},
    "SHIRA": RANK,
    "SUPERTUNING": {"target_modules": TARGETS, "sparsity": 0.5},
    "TINYLORA": {"r": 2, "u": 8, "target_modules": TARGETS},
    "TRAINABLE_TOKENS": {"token_indices": PROMPT, "target_modules": ["embed_tokens"]},
    "UNILORA": {"r": 4, "theta_d_length": 64, "target_modules": TARGETS},
    "VBLORA": {"r": 4, "num_vectors": 16, "vector_length": 16, "target_modules": TARGETS},
    "VERA": {"r": 4, "target_modules": ATTENTION},
    "WAVEFT": {"n_frequency": 50, "target_modules": TARGETS},
    "XLORA": {"hidden_size": 64, "xlora_depth": 1},
}
"""Options of each tuner of PEFT, for the tiny Llama."""

REFUSED = {
    *("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"),
    *("POLY", "XLORA"),
}
"""Tuners that are computed by PEFT's own `generate`."""

UNNAMED = {"ADAPTION_PROMPT", "SHADOW"}
"""Tuners whose active adapter is served, and none by name."""

ONE_ADAPTER = {"ADALORA"}
"""Tuners that PEFT gives no second adapter to train."""

VARIANTS: dict[str, Callable[[], dict[str, Any]]] = {
    "alora_invocation_tokens": lambda: {"alora_invocation_tokens": PROMPT[5:8]},
    "arrow_config": dict,  # `peft.create_arrow_model` makes its config
    "kasa_config": lambda: {"kasa_config": lora.KasaConfig()},
    "monteclora_config": lambda: {"monteclora_config": lora.MontecloraConfig()},
    "use_bdlora": lambda: {
        "use_bdlora": lora.BdLoraConfig(
            nblocks=2, target_modules_bd_a=["down_proj"], target_modules_bd_b=["q_proj", "v_proj"]
        )
    },
    "use_dora": lambda: {"use_dora": True},
    "velora_config": lambda: {"velora_config": lora.VeloraConfig()},
}
"""Options of each variant of LoRA, by the field of its config that asks for it."""


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Restored after a test: BOFT leaves the compilers that it chose when it cannot build."""
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": 8})
    yield
    hf_paged.uninstall()
    hf_paged.install()


@functools.cache
def expert_folders(parent: Path) -> dict[str, str]:
    """Two LoRA adapters for one model, by name."""
    folders = {}
    for name in ("0", "1"):
        torch.manual_seed(int(name) + 10)
        config = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **RANK)
        folders[name] = str(parent / name)
        peft.get_peft_model(models.build("llama"), config).save_pretrained(folders[name])
    return folders


def draw_weights(model: Any, seed: int) -> None:
    """Changes the weights of the active adapter, some of which PEFT begins with zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.7)
    model.eval()


def config_of(name: str, folder: Path) -> Any:
    if name not in TUNERS:
        pytest.fail(
            f"PEFT has a new tuner: add options of {name} to TUNERS, and see how an engine"
            " serves it"
        )
    if name == "ADAMSS":
        pytest.importorskip("sklearn")
    options = {"adapters": expert_folders(folder)} if name == "XLORA" else {}
    config_class = mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(name)]
    return config_class(task_type="CAUSAL_LM", **TUNERS[name], **options)


def tuned(config: Any) -> Any:
    torch.manual_seed(3)
    base = models.build("llama")
    base.config.use_cache = not isinstance(config, peft.XLoraConfig)  # it asks for that
    model = peft.get_peft_model(base, config)
    draw_weights(model, 5)
    return model


def tokens(model: Any, **options: Any) -> list[int]:
    """New tokens of `generate`."""
    ids = torch.tensor([PROMPT])
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)
    return found[0, len(PROMPT) :].tolist()


@functools.cache
def base_tokens() -> list[int]:
    return tokens(models.build("llama"))


def batch_tokens(model: Any, **options: Any) -> list[int]:
    (output,) = model.generate_batch(
        [PROMPT], generation_config=GenerationConfig(**GREEDY, **options)
    ).values()
    assert output.error is None, output.error
    return output.generated_tokens


def engine_tokens(model: Any, *adapters: str | None) -> list[list[int]]:
    """New tokens of one engine's requests with these adapters. Raises the first error of a
    request."""
    with PagedEngine(model, CONFIG) as engine:
        results = engine.generate([PROMPT] * len(adapters), GREEDY, adapter=list(adapters))
        for result in results:
            if result.error is not None:
                raise result.error
        assert_drained(engine)
    return [result.sequences[0].token_ids for result in results]


def assert_served(model: Any, expected: list[int]) -> None:
    assert engine_tokens(model, None) == [expected]
    assert batch_tokens(model) == expected


def assert_refused(model: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        engine_tokens(model, None)
    with pytest.raises(ValueError, match=message):
        batch_tokens(model)
    with pytest.raises(ValueError, match=message):  # rows of one call
        model.generate_batch(
            [PROMPT], generation_config=GenerationConfig(do_sample=True, max_new_tokens=2)
        )


def refusal(config: Any, adapter: str = "default") -> str:
    return (
        rf"adapter '{adapter}' .*\({type(config).__name__}\).*PEFT's own `.*generate`.*Call"
        r" `peft_model.generate"
    )


IS_OLD = Version(peft.__version__) < Version(MIN_PEFT_VERSION)  # than transformers asks for


@pytest.mark.slow_cases(
    but=[
        "ADAMSS",
        "CARTRIDGE",
        "CPT",
        "MULTITASK_PROMPT_TUNING",
        "POLY",
        "PREFIX_TUNING",
        "PROMPT_TUNING",
        "P_TUNING",
        "SHIRA",
        "XLORA",
    ]
)
@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize("name", [kind.value for kind in mapping.PEFT_TYPE_TO_CONFIG_MAPPING])
def test_a_tuner_is_served_or_refused(name: str, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.getbasetemp()
    config = config_of(name, folder)
    model = tuned(config)
    task = {"task_ids": torch.tensor([1])} if name in ("POLY", "MULTITASK_PROMPT_TUNING") else {}
    first = tokens(model, **task)
    # an older PEFT passes its prefixes under a name that this transformers ignores, with and
    # without us
    is_ignored = name in ("CARTRIDGE", "PREFIX_TUNING") and IS_OLD
    assert is_ignored or first != base_tokens(), (
        "the adapter does nothing: the test would show nothing"
    )
    assert tokens(model, **task, **models.PAGED) == first
    if name in REFUSED:
        assert_refused(model, refusal(config))
        return
    assert batch_tokens(model) == first
    expected: dict[str | None, list[int]] = {
        None: first,
        "default": first,
        "__base__": base_tokens(),
    }
    if name not in ONE_ADAPTER:
        model.add_adapter("second", config_of(name, folder))
        model.set_adapter("second")
        draw_weights(model, 4)
        expected["second"] = tokens(model)
        assert expected["second"] not in (first, base_tokens())
        model.set_adapter("default")
    if name not in UNNAMED:
        assert engine_tokens(model, *expected) == list(expected.values())
        return
    for adapter in ("default", "__base__", "second"):
        with pytest.raises(
            ValueError, match=rf"'{adapter}' cannot be chosen for a request: \w+ .*set_adapter"
        ):
            engine_tokens(model, adapter)
    for adapter in ("default", "second"):
        model.set_adapter(adapter)
        assert engine_tokens(model, None) == [expected[adapter]]


@pytest.mark.slow_cases(but=["alora_invocation_tokens", "kasa_config", "velora_config"])
@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize(
    "variant",
    [
        field.name
        for field in dataclasses.fields(peft.LoraConfig)
        if field.metadata.get("is_lora_variant")
    ],
)
def test_a_variant_of_lora_is_served_or_refused(variant: str, tmp_path: Path) -> None:
    if variant not in VARIANTS:
        pytest.fail(f"PEFT has a new variant of LoRA: add options of {variant} to VARIANTS")
    config = peft.LoraConfig(task_type="CAUSAL_LM", **RANK, **VARIANTS[variant]())
    if variant == "arrow_config":
        arrow = lora.ArrowConfig(top_k=1, router_temperature=1.0)
        model = peft.create_arrow_model(
            models.build("llama"), list(expert_folders(tmp_path).values()), arrow
        ).eval()
    else:
        model = tuned(config)
    expected = tokens(model)
    assert expected != base_tokens(), "the adapter does nothing: the test would show nothing"
    assert tokens(model, **models.PAGED) == expected
    if variant == "alora_invocation_tokens":
        assert_refused(model, refusal(config))
    else:
        assert_served(model, expected)


# --------------------------------------------------------------------------------- activated LoRA


def activated_beside_plain() -> Any:
    """A model with a plain LoRA adapter, which is active, and an activated one."""
    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "init_lora_weights": False, **RANK}
    model = peft.get_peft_model(
        models.build("llama"), peft.LoraConfig(**options), adapter_name="plain"
    )
    model.add_adapter("activated", peft.LoraConfig(alora_invocation_tokens=PROMPT[5:8], **options))
    return model.eval()


@pytest.mark.slow
def test_other_adapters_beside_an_activated_one_are_served() -> None:
    model = activated_beside_plain()
    expected = tokens(model)
    for active in ("plain", "activated"):
        model.set_adapter(active)
        assert engine_tokens(model, "plain", "__base__") == [expected, base_tokens()]
        with (
            PagedEngine(model, CONFIG) as engine,
            pytest.raises(ValueError, match="'activated' begins at its"),
        ):
            engine.add_request(PROMPT, GREEDY, adapter="activated")
    with model.disable_adapter():
        assert engine_tokens(model, None) == [base_tokens()]


@pytest.mark.slow
def test_requests_end_when_an_activated_adapter_becomes_active() -> None:
    model = activated_beside_plain()
    expected = tokens(model)
    with PagedEngine(model, CONFIG) as engine:
        engine.add_request(PROMPT, GREEDY, request_id="active")
        engine.add_request(PROMPT, GREEDY, request_id="plain", adapter="plain")
        engine.step()
        model.set_adapter("activated")
        results = run_all(engine)
        assert_drained(engine)
        model.set_adapter("plain")
        for name in ("0", "1"):
            engine.add_request(PROMPT, {**GREEDY, "num_beams": 3}, request_id=name)
        engine.step()
        model.set_adapter("activated")
        results |= run_all(engine)
        assert_drained(engine)
        model.set_adapter("plain")
        again = engine.generate([PROMPT], GREEDY)[0]
    assert all(
        "'activated' begins at its" in str(results[name].error) for name in ("active", "0", "1")
    )
    assert results["plain"].sequences[0].token_ids == again.sequences[0].token_ids == expected


def test_names_of_rows_with_an_activated_adapter() -> None:
    model, ids = activated_beside_plain(), torch.tensor([PROMPT] * 3)
    names = ["plain", "activated", "__base__"]
    expected = model.generate(input_ids=ids, adapter_names=names, **GREEDY)
    assert len({str(row) for row in expected.tolist()}) == 3
    assert torch.equal(
        expected, model.generate(input_ids=ids, adapter_names=names, **GREEDY, **models.PAGED)
    )


# -------------------------------------------------------------------- other ways to adapt a model


@pytest.mark.parametrize("name", ["XLORA", "PREFIX_TUNING", "POLY", "activated"])
def test_a_folder_of_a_refused_adapter(name: str, tmp_path: Path) -> None:
    """The base model alone would compute other tokens."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=PROMPT[5:8], **RANK)
    if name != "activated":
        config = config_of(name, tmp_path)
    folder = str(tmp_path / "saved")
    tuned(config).save_pretrained(folder)
    with PagedEngine(models.build("llama"), CONFIG) as engine:
        with pytest.raises(
            ValueError, match=rf"the adapter in .*\({type(config).__name__}\).*PEFT's own"
        ):
            engine.add_request(PROMPT, GREEDY, adapter=folder)


def test_a_model_loaded_with_an_activated_adapter(tmp_path: Path) -> None:
    models.build("llama").save_pretrained(tmp_path / "base")
    config = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=PROMPT[5:8], **RANK)
    model = tuned(config)
    model.peft_config["default"].base_model_name_or_path = str(tmp_path / "base")
    model.save_pretrained(tmp_path / "adapter")
    with PagedEngine.from_pretrained(tmp_path / "adapter", config=CONFIG) as engine:
        with pytest.raises(ValueError, match=refusal(config)):
            engine.add_request(PROMPT, GREEDY)


@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize("injects", [True, False])
def test_a_model_that_holds_an_activated_adapter(injects: bool) -> None:
    """Without the wrapper, plain `generate` gives the base model's tokens: an engine says so."""
    config = peft.LoraConfig(task_type="CAUSAL_LM", alora_invocation_tokens=PROMPT[5:8], **RANK)
    if injects:
        model = peft.inject_adapter_in_model(config, models.build("llama")).eval()
        draw_weights(model, 5)
    else:
        model = tuned(config).get_base_model()
    assert tokens(model, **models.PAGED) == tokens(model) == base_tokens()
    assert_refused(model, refusal(config))
    assert engine_tokens(model, "__base__") == [base_tokens()]


@pytest.mark.slow_cases("LOHA")
@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize("name", ["LORA", "LOHA", "IA3"])
def test_a_model_with_injected_layers(name: str, tmp_path: Path) -> None:
    model = peft.inject_adapter_in_model(config_of(name, tmp_path), models.build("llama"))
    draw_weights(model, 5)
    expected = tokens(model)
    assert expected != base_tokens()
    assert_served(model, expected)
    assert engine_tokens(model, "default", "__base__") == [expected, base_tokens()]


@pytest.mark.usefixtures("native_names")
def test_the_model_inside_x_lora_is_refused(tmp_path: Path) -> None:
    config = config_of("XLORA", tmp_path)
    assert_refused(tuned(config).get_base_model(), refusal(config))


@pytest.mark.slow
@pytest.mark.usefixtures("native_names")
def test_a_model_of_mixed_tuners(tmp_path: Path) -> None:
    model = peft.get_peft_model(
        models.build("llama"), config_of("LORA", tmp_path), adapter_name="lora", mixed=True
    )
    draw_weights(model, 5)
    lora_alone = tokens(model)
    model.add_adapter("loha", config_of("LOHA", tmp_path))
    model.set_adapter(["lora", "loha"])
    draw_weights(model, 4)
    expected = tokens(model)
    assert len({str(found) for found in (expected, lora_alone, base_tokens())}) == 3
    assert tokens(model, **models.PAGED) == expected
    assert_served(model, expected)
    with PagedEngine(model, CONFIG) as engine:
        engine.generate([PROMPT], GREEDY)
        assert engine.route.road == "engine"
    model.set_adapter(["loha"])
    loha_alone = tokens(model)
    assert engine_tokens(model, "loha", "__base__") == [loha_alone, base_tokens()]


# ---------------------------------------------------- names of continuous batching on `PeftModel`


def test_the_names_are_added_and_removed() -> None:
    names = ("init_continuous_batching", "continuous_batching_context_manager", "generate_batch")
    assert not any(name in vars(peft.PeftModel) for name in names)
    hf_paged.install(continuous_batching=True)
    try:
        assert all(name in vars(peft.PeftModel) for name in names)
        model = peft.get_peft_model(models.build("llama"), config_of("PROMPT_TUNING", Path()))
        calls: list[Callable[[], Any]] = [
            model.init_continuous_batching,
            lambda: model.continuous_batching_context_manager().__enter__(),
            lambda: model.generate_batch([PROMPT]),
        ]
        for call in calls:
            with pytest.raises(ValueError, match="'default' is prompt learning"):
                call()
    finally:
        hf_paged.uninstall()
        hf_paged.install()
    assert not any(name in vars(peft.PeftModel) for name in names)


@pytest.mark.slow
def test_peft_may_be_imported_after_the_names_are_installed() -> None:
    code = """
        import sys
        import hf_paged

        hf_paged.install(continuous_batching=True)
        assert "peft" not in sys.modules, "it takes seconds to import"
        import peft

        assert "generate_batch" in vars(peft.PeftModel)
        assert hasattr(peft.PeftModel._enable_peft_forward_hooks.__wrapped__, "__wrapped__")
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=300)
