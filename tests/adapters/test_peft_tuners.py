"""Every tuner of PEFT: equal to plain `generate` in an engine and in `generate_batch`, or refused
by name."""

from __future__ import annotations

import dataclasses
import functools
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from packaging.version import Version
from transformers import GenerationConfig
from transformers.integrations.peft import MIN_PEFT_VERSION

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from tests.support import models
from tests.support.engine_helpers import assert_drained, prompts, run_all, tokens_of

peft = pytest.importorskip("peft")
mapping = pytest.importorskip("peft.mapping")
lora = pytest.importorskip("peft.tuners.lora.config")

GREEDY = {"do_sample": False, "max_new_tokens": 6}
CONFIG = PagedConfig(block_size=8)
PROMPT = prompts(13)[0]
TARGETS = ["q_proj", "v_proj", "down_proj"]
ATTENTION = ["q_proj", "v_proj"]
RANK = {"r": 4, "target_modules": TARGETS}

TUNERS = {
    "ADALORA": {"init_r": 4, "target_r": 2, "total_step": 10, "target_modules": TARGETS},
    "ADAMSS": {"r": 8, "num_subspaces": 2, "target_modules": TARGETS},
    "ADAPTION_PROMPT": {"adapter_len": 4, "adapter_layers": 2},
    "BEFT": {"target_modules": ["v_proj"]},
    "BOFT": {"boft_block_size": 4, "target_modules": TARGETS},
    "C3A": {"block_size": 16, "target_modules": ATTENTION},
    "CARTRIDGE": {"num_virtual_tokens": 4},
    "CPT": {"cpt_token_ids": [5, 6, 7], "cpt_mask": [1, 1, 1], "cpt_tokens_type_mask": [1, 2, 2]},
    "FOURIERFT": {"n_frequency": 50, "target_modules": TARGETS},
    "FROD": {"target_modules": TARGETS},
    "GRALORA": {**RANK, "gralora_k": 2},
    "IA3": {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]},
    "LN_TUNING": {"target_modules": ["input_layernorm"]},
    "MULTITASK_PROMPT_TUNING": {"num_virtual_tokens": 4, "num_tasks": 2},
    "OFT": {"oft_block_size": 8, "target_modules": TARGETS},
    "OSF": {"target_modules": TARGETS, "effective_rank": 4},
    "POLY": {**RANK, "n_tasks": 2, "n_skills": 2},
    "PREFIX_TUNING": {"num_virtual_tokens": 4},
    "PROMPT_TUNING": {"num_virtual_tokens": 4},
    "PVERA": {"r": 4, "target_modules": ATTENTION},
    "P_TUNING": {"num_virtual_tokens": 4, "encoder_hidden_size": 16},
    "ROAD": {"group_size": 16, "target_modules": TARGETS},
    "SHADOW": {"r": 4},
    "SUPERTUNING": {"target_modules": TARGETS, "sparsity": 0.5},
    "TINYLORA": {"r": 2, "u": 8, "target_modules": TARGETS},
    "TRAINABLE_TOKENS": {"token_indices": PROMPT, "target_modules": ["embed_tokens"]},
    "UNILORA": {"r": 4, "theta_d_length": 64, "target_modules": TARGETS},
    "VBLORA": {"r": 4, "num_vectors": 16, "vector_length": 16, "target_modules": TARGETS},
    "VERA": {"r": 4, "target_modules": ATTENTION},
    "WAVEFT": {"n_frequency": 50, "target_modules": TARGETS},
    "XLORA": {"hidden_size": 64, "xlora_depth": 1},
}
"""Options of tuners of PEFT for the tiny Llama, where those of LoRA are not theirs."""

REFUSED = {
    *("CARTRIDGE", "CPT", "MULTITASK_PROMPT_TUNING", "PREFIX_TUNING", "PROMPT_TUNING", "P_TUNING"),
    *("POLY", "XLORA"),
}
"""Tuners that are computed by PEFT's own `generate`."""

UNNAMED = {"ADAPTION_PROMPT", "SHADOW"}
"""Tuners whose active adapter is served, and none by name."""

ONE_ADAPTER = {"ADALORA"}
"""Tuners that PEFT gives no second adapter to train."""

VARIANTS = {
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


IS_OLD = Version(peft.__version__) < Version(MIN_PEFT_VERSION)  # than transformers asks for


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    """Restored after a test: BOFT leaves the compilers that it chose when it cannot build."""
    for name in ("CC", "CXX"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


@pytest.fixture
def native_names():
    hf_paged.install(continuous_batching={"block_size": 8})
    yield
    hf_paged.uninstall()
    hf_paged.install()


def lora_config(**options):
    return peft.LoraConfig(task_type="CAUSAL_LM", **RANK, **options)


def activated_config(**options):
    return lora_config(alora_invocation_tokens=PROMPT[5:8], **options)


@functools.cache
def expert_folders(parent):
    """Two LoRA adapters for one model, by name."""
    folders = {name: str(parent / name) for name in ("0", "1")}
    for name, folder in folders.items():
        torch.manual_seed(int(name) + 10)
        config = lora_config(init_lora_weights=False)
        peft.get_peft_model(models.build("llama"), config).save_pretrained(folder)
    return folders


def draw_weights(model, seed):
    """Changes the weights of the active adapter, some of which PEFT begins with zero."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.7)
    return model.eval()


def config_of(name, folder):
    if name == "activated":
        return activated_config()
    if name == "ADAMSS":
        pytest.importorskip("sklearn")
    options = {"adapters": expert_folders(folder)} if name == "XLORA" else {}
    config_class = mapping.PEFT_TYPE_TO_CONFIG_MAPPING[peft.PeftType(name)]
    return config_class(task_type="CAUSAL_LM", **TUNERS.get(name, RANK), **options)


def tuned(config):
    torch.manual_seed(3)
    base = models.build("llama")
    base.config.use_cache = not isinstance(config, peft.XLoraConfig)  # it asks for that
    return draw_weights(peft.get_peft_model(base, config), 5)


def tokens(model, **options):
    """New tokens of `generate`."""
    ids = torch.tensor([PROMPT])
    found = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY, **options)
    return found[0, len(PROMPT) :].tolist()


@functools.cache
def base_tokens():
    return tokens(models.build("llama"))


def batch_tokens(model, **options):
    config = GenerationConfig(**{**GREEDY, **options})
    (output,) = model.generate_batch([PROMPT], generation_config=config).values()
    assert output.error is None, output.error
    return output.generated_tokens


def engine_tokens(model, *adapters):
    """New tokens of one engine's requests with these adapters. Raises the first error of a
    request."""
    with PagedEngine(model, CONFIG) as engine:
        results = engine.generate([PROMPT] * len(adapters), GREEDY, adapter=list(adapters))
        found = [rows[0] for rows in tokens_of(results)]
        assert_drained(engine)
    return found


def assert_served(model, expected):
    assert engine_tokens(model, None) == [expected]
    assert batch_tokens(model) == expected


def assert_refused(model, config, adapter="default"):
    kind = rf"adapter '{adapter}' .*\({type(config).__name__}\)"
    message = rf"{kind}.*PEFT's own `.*generate`.*Call `peft_model.generate"
    for refused in (
        lambda: engine_tokens(model, None),
        lambda: batch_tokens(model),
        lambda: batch_tokens(model, do_sample=True),  # rows of one call
    ):
        with pytest.raises(ValueError, match=message):
            refused()


@pytest.mark.slow_cases(but=["ADAMSS", "SHIRA", *sorted(REFUSED)])
@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize("name", [kind.value for kind in mapping.PEFT_TYPE_TO_CONFIG_MAPPING])
def test_a_tuner_is_served_or_refused(name, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    config = config_of(name, folder)
    model = tuned(config)
    task = {"task_ids": torch.tensor([1])} if name in ("POLY", "MULTITASK_PROMPT_TUNING") else {}
    first = tokens(model, **task)
    # an older PEFT passes its prefixes under a name that this transformers ignores, with and
    # without us
    is_ignored = name in ("CARTRIDGE", "PREFIX_TUNING") and IS_OLD
    assert is_ignored or first != base_tokens(), "the adapter does nothing"
    assert tokens(model, **task, **models.PAGED) == first
    if name in REFUSED:
        assert_refused(model, config)
        return
    assert batch_tokens(model) == first
    expected = {None: first, "default": first, "__base__": base_tokens()}
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
        message = rf"'{adapter}' cannot be chosen for a request: \w+ .*set_adapter"
        with pytest.raises(ValueError, match=message):
            engine_tokens(model, adapter)
    for adapter in ("default", "second"):
        model.set_adapter(adapter)
        assert engine_tokens(model, None) == [expected[adapter]]


FIELDS = dataclasses.fields(peft.LoraConfig)


@pytest.mark.slow_cases(but=["alora_invocation_tokens", "kasa_config", "velora_config"])
@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize(
    "variant", [field.name for field in FIELDS if field.metadata.get("is_lora_variant")]
)
def test_a_variant_of_lora_is_served_or_refused(variant, tmp_path):
    assert variant in VARIANTS, "PEFT has a new variant of LoRA: add its options"
    config = lora_config(**VARIANTS[variant]())
    if variant == "arrow_config":
        arrow = lora.ArrowConfig(top_k=1, router_temperature=1.0)
        folders = list(expert_folders(tmp_path).values())
        model = peft.create_arrow_model(models.build("llama"), folders, arrow).eval()
    else:
        model = tuned(config)
    expected = tokens(model)
    assert expected != base_tokens(), "the adapter does nothing"
    assert tokens(model, **models.PAGED) == expected
    if variant == "alora_invocation_tokens":
        assert_refused(model, config)
    else:
        assert_served(model, expected)


# ---- activated LoRA


def activated_beside_plain():
    """A model with a plain LoRA adapter, which is active, and an activated one."""
    torch.manual_seed(0)
    config = lora_config(init_lora_weights=False)
    model = peft.get_peft_model(models.build("llama"), config, adapter_name="plain")
    model.add_adapter("activated", activated_config(init_lora_weights=False))
    return model.eval()


@pytest.mark.slow
def test_other_adapters_beside_an_activated_one_are_served():
    model = activated_beside_plain()
    expected = tokens(model)
    for active in ("plain", "activated"):
        model.set_adapter(active)
        assert engine_tokens(model, "plain", "__base__") == [expected, base_tokens()]
        with pytest.raises(ValueError, match="'activated' begins at its"):
            engine_tokens(model, "activated")
    with model.disable_adapter():
        assert engine_tokens(model, None) == [base_tokens()]


@pytest.mark.slow
@pytest.mark.parametrize("num_beams", [1, 3])
def test_requests_end_when_an_activated_adapter_becomes_active(num_beams):
    model = activated_beside_plain()
    expected = tokens(model, num_beams=num_beams)
    with PagedEngine(model, CONFIG) as engine:
        for name in (None, "plain"):
            options = {**GREEDY, "num_beams": num_beams}
            engine.add_request(PROMPT, options, request_id=str(name), adapter=name)
        engine.step()
        model.set_adapter("activated")
        results = run_all(engine)
        assert_drained(engine)
        assert "'activated' begins at its" in str(results["None"].error)
        assert results["plain"].token_ids == expected
        model.set_adapter("plain")
        assert engine.generate([PROMPT], options)[0].token_ids == expected


def test_names_of_rows_with_an_activated_adapter():
    model, names = activated_beside_plain(), ["plain", "activated", "__base__"]
    options = {"input_ids": torch.tensor([PROMPT] * 3), "adapter_names": names, **GREEDY}
    expected = model.generate(**options)
    assert len({str(row) for row in expected.tolist()}) == 3
    assert torch.equal(expected, model.generate(**options, **models.PAGED))


# ---- other ways to adapt a model


@pytest.mark.parametrize("name", ["XLORA", "PREFIX_TUNING", "POLY", "activated"])
def test_a_folder_of_a_refused_adapter(name, tmp_path):
    """The base model alone would compute other tokens."""
    config, folder = config_of(name, tmp_path), str(tmp_path / "saved")
    tuned(config).save_pretrained(folder)
    message = rf"the adapter in .*\({type(config).__name__}\).*PEFT's own"
    with PagedEngine(models.build("llama"), CONFIG) as engine:
        with pytest.raises(ValueError, match=message):
            engine.add_request(PROMPT, GREEDY, adapter=folder)


@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize("name", ["injected", "activated", "XLORA"])
def test_a_model_that_holds_a_refused_adapter(name, tmp_path):
    """Without the wrapper, plain `generate` gives the base model's tokens: an engine says so."""
    if name == "injected":
        config = activated_config()
        model = draw_weights(peft.inject_adapter_in_model(config, models.build("llama")), 5)
    else:
        config = config_of(name, tmp_path)
        model = tuned(config).get_base_model()
    if name != "XLORA":
        assert tokens(model, **models.PAGED) == tokens(model) == base_tokens()
        assert engine_tokens(model, "__base__") == [base_tokens()]
    assert_refused(model, config)


@pytest.mark.slow_cases("LOHA")
@pytest.mark.usefixtures("native_names")
@pytest.mark.parametrize("name", ["LORA", "LOHA", "IA3"])
def test_a_model_with_injected_layers(name, tmp_path):
    config = config_of(name, tmp_path)
    model = draw_weights(peft.inject_adapter_in_model(config, models.build("llama")), 5)
    expected = tokens(model)
    assert expected != base_tokens()
    assert_served(model, expected)
    assert engine_tokens(model, "default", "__base__") == [expected, base_tokens()]


@pytest.mark.slow
@pytest.mark.usefixtures("native_names")
def test_a_model_of_mixed_tuners(tmp_path):
    config, base = config_of("LORA", tmp_path), models.build("llama")
    model = draw_weights(peft.get_peft_model(base, config, adapter_name="lora", mixed=True), 5)
    lora_alone = tokens(model)
    model.add_adapter("loha", config_of("LOHA", tmp_path))
    model.set_adapter(["lora", "loha"])
    expected = tokens(draw_weights(model, 4))
    assert len({str(found) for found in (expected, lora_alone, base_tokens())}) == 3
    assert tokens(model, **models.PAGED) == expected
    assert_served(model, expected)
    model.set_adapter(["loha"])
    loha_alone = tokens(model)
    assert engine_tokens(model, "loha", "__base__") == [loha_alone, base_tokens()]


# ---- names of continuous batching on `PeftModel`


def test_the_names_are_added_and_removed():
    names = {"init_continuous_batching", "continuous_batching_context_manager", "generate_batch"}
    assert not names & vars(peft.PeftModel).keys()
    hf_paged.install(continuous_batching=True)
    try:
        assert names <= vars(peft.PeftModel).keys()
        model = peft.get_peft_model(models.build("llama"), config_of("PROMPT_TUNING", Path()))
        for call in (
            model.init_continuous_batching,
            lambda: model.continuous_batching_context_manager().__enter__(),
            lambda: model.generate_batch([PROMPT]),
        ):
            with pytest.raises(ValueError, match="'default' is prompt learning"):
                call()
    finally:
        hf_paged.uninstall()
        hf_paged.install()
    assert not names & vars(peft.PeftModel).keys()


@pytest.mark.slow
def test_peft_may_be_imported_after_the_names_are_installed():
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
