"""Which models may run packed; the check leaves no trace."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
)
from torch import nn
from transformers.integrations.neftune import activate_neftune

import hf_paged
from hf_paged import compat
from hf_paged.batching.factory import choose_layout
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.paged_cache import PagedCache
from hf_paged.config import PagedConfig
from hf_paged.kernels import cpp
from hf_paged.model import capability, trial
from hf_paged.model.capability import note_unpackable
from hf_paged.model.structure import reasons_against
from hf_paged.rooms import is_installed
from hf_paged.topics import Topic
from tests.model import test_positions as tables
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import decoder_text
from tests.support.precision import TensorFloats, default_precision


def cache_for(model: Any, **config: Any) -> PagedCache:
    """The model's own cache, layer by layer, as in a call."""
    kwargs: dict[str, Any] = {}
    model._prepare_cache_for_generation(model.generation_config, kwargs, None, 1, 64)
    return PagedCache.from_empty(kwargs[compat.OUTPUT_CACHE], PagedMemory(PagedConfig(**config)))


def reason(model: Any) -> str | None:
    return choose_layout(model, cache_for(model)).unsupported_reason


@pytest.mark.slow_cases("gemma3", "mixtral")
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_decoders_are_packable(name: str) -> None:
    assert reason(models.get(name)) is None


@pytest.mark.parametrize("name", ["llama", "mistral", "mixtral", "gpt_oss", "gemma2"])
def test_half_precision_is_packable(name: str) -> None:
    assert reason(models.build(name).bfloat16()) is None


@pytest.mark.skipif(
    not cpp.is_available(), reason="all products are PyTorch's without the C++ kernels"
)
def test_products_less_precise_than_their_dtype_are_packable_if_torch_is_set_so() -> None:
    model = models.build("llama", num_hidden_layers=1)
    for layer in model.model.layers:  # scores that rounding changes more
        layer.self_attn.q_proj.weight.data *= 3
        layer.self_attn.k_proj.weight.data *= 3
    with default_precision(), TensorFloats():
        assert "standard deviations" in str(reason(model))
        torch.set_float32_matmul_precision("high")
        assert reason(model) is None
        torch.set_float32_matmul_precision("highest")
        assert reason(model) is not None


@pytest.mark.parametrize(
    ("dtype", "precision", "expected"),
    [
        (torch.float32, "highest", None),
        (torch.float32, "high", trial.HALF_TOLERANCE[torch.float16]),
        (torch.float32, "medium", trial.HALF_TOLERANCE[torch.bfloat16]),
        (torch.float16, "medium", trial.HALF_TOLERANCE[torch.float16]),
    ],
)
def test_the_tolerance_is_that_of_the_products(
    dtype: torch.dtype, precision: str, expected: float | None
) -> None:
    with default_precision():
        torch.set_float32_matmul_precision(precision)
        assert trial.half_tolerance({dtype, None}, torch.device("cpu")) == expected


def test_sums_in_float16_are_less_precise() -> None:
    options, gpu = torch.backends.cuda.matmul, torch.device("cuda")
    before = options.allow_fp16_accumulation
    try:
        for sums_in_half, dtype in ((False, torch.float16), (True, torch.bfloat16)):
            options.allow_fp16_accumulation = sums_in_half
            assert trial.half_tolerance({torch.float16}, gpu) == trial.HALF_TOLERANCE[dtype]
    finally:
        options.allow_fp16_accumulation = before


PACKABLE = [
    "BloomForCausalLM",
    "CohereForCausalLM",
    "FalconForCausalLM",
    "GPTJForCausalLM",
    "Gemma3nForCausalLM",
    "GPTNeoXForCausalLM",
    "Llama4ForCausalLM",
]
PACKABLE += ["OPTForCausalLM", "Qwen3MoeForCausalLM"]
REFUSED = {
    "BambaForCausalLM": "LinearAttentionLayer",  # Mamba states and attention
    "BertLMHeadModel": "shows later tokens",
    "FalconH1ForCausalLM": "PagedHybridLayer",
    "GPTNeoForCausalLM": "reads packed keys",  # builds a mask from the batch's columns
    "OpenAIGPTLMHeadModel": "no cache",
    "MambaForCausalLM": "does not know its layers",
}


@pytest.mark.slow_cases("Gemma3nForCausalLM", "OPTForCausalLM")
@pytest.mark.parametrize("name", PACKABLE)
def test_other_decoders_are_packable(name: str) -> None:
    assert reason(tiny_model(getattr(transformers, name))) is None


@pytest.mark.slow_cases("BertLMHeadModel")
@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_mixes_tokens_is_refused(name: str) -> None:
    model = tiny_model(getattr(transformers, name))
    found = (
        choose_layout(model, PagedCache()).unsupported_reason
        if name == "MambaForCausalLM"
        else reason(model)
    )
    assert found is not None and REFUSED[name] in found and "\n" not in found


@pytest.mark.slow_cases("t5")
@pytest.mark.parametrize("name", models.ENCODER_DECODER)
def test_encoders_are_refused(name: str) -> None:
    assert choose_layout(models.get(name), PagedCache()).unsupported_reason == Topic.ENCODER(
        "the model has an encoder"
    )


def test_a_cache_without_known_layers_is_refused() -> None:
    assert "does not know its layers" in str(
        choose_layout(models.get("llama"), PagedCache()).unsupported_reason
    )


def test_a_cache_class_of_the_models_own_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.get("llama")
    arguments = model, cache_for(model), list(model.modules())
    monkeypatch.setattr(compat, "supports_dynamic_cache", lambda model: False)
    reason = Topic.CACHE("it uses a cache class of its own, not a `DynamicCache`")
    for layout in ("side by side", "together"):
        assert list(reasons_against(*arguments, layout)) == [reason]
    assert not list(reasons_against(*arguments, "packed"))


# -- found by inspection -------------------------------------------------------------------------


@pytest.mark.skipif(not is_installed("rectangles"), reason="needs the room rectangles")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_of_the_longest_position_is_packable_but_not_side_by_side(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {
            "short_factor": [1.0] * 8,
            "long_factor": [2.0] * 8,
            "original_max_position_embeddings": 64,
        }
    model = models.build("llama", rope_parameters=rope)
    assert reason(model) is None
    shift(model)  # then no longer packed
    layout = choose_layout(model, cache_for(model))
    assert "standard deviations" in str(layout.unsupported_reason) and not layout.is_side_by_side


@pytest.mark.parametrize("where", ["model", "lm_head", "model.layers.1"])
def test_hooks_are_refused_while_they_are_there(where: str) -> None:
    model = models.build("llama")
    for register in ("register_forward_hook", "register_forward_pre_hook"):
        handle = getattr(model.get_submodule(where), register)(lambda *args: None)
        assert f"hooks on {where}" in str(reason(model))
        handle.remove()
    assert reason(model) is None
    model.get_submodule(where)._hf_hook = object()
    assert f"hooks on {where}" in str(reason(model))


def test_libraries_hooks_are_judged_by_what_they_compute() -> None:
    model = models.build("llama")
    model.enable_input_require_grads()
    torch.nn.utils.spectral_norm(model.lm_head)  # type: ignore[arg-type]
    add_hook_to_module(model.model.norm, SequentialHook(AlignDevicesHook("cpu"), CpuOffload("cpu")))
    assert reason(model) is None

    class Recorder(ModelHook):
        pass

    add_hook_to_module(model.model.norm, Recorder(), append=True)
    assert "hooks on model.norm" in str(reason(model))


def test_noise_on_embeddings_matters_in_training_mode_only() -> None:
    model = models.build("llama")
    activate_neftune(model, 5.0)
    assert reason(model) is None
    assert "training mode with neftune_noise_alpha" in str(reason(model.train()))


def test_transformers_own_idle_hooks_are_no_obstacle() -> None:
    model = models.build("llama")
    model(models.token_ids(1, 3), output_hidden_states=True)
    assert any(module._forward_hooks for module in model.modules())
    assert reason(model) is None


def test_dropout_matters_in_training_mode_only() -> None:
    model = models.build("gpt2")  # dropout 0.1 by default
    assert reason(model) is None
    assert "training mode with dropout" in str(reason(model.train()))
    assert reason(model.eval()) is None
    llama = models.build("llama", attention_dropout=0.5)
    assert "attention_dropout" in str(reason(llama.train()))
    assert reason(models.build("llama").train()) is None  # no dropout
    jitter = models.build("mixtral", router_jitter_noise=0.1)
    assert "jitter" in str(reason(jitter.train()))


def test_router_losses_and_expert_capacity_are_refused() -> None:
    assert "output_router_logits" in str(reason(models.build("mixtral", output_router_logits=True)))
    assert "capacity" in str(reason(models.build("mixtral", expert_capacity=4)))


def test_weights_on_several_devices_are_refused() -> None:
    model = models.build("llama")
    cache = cache_for(model)
    model.model.layers[1].to("meta")
    assert choose_layout(model, cache).unsupported_reason == Topic.DEVICES(
        "its weights are on several devices: cpu, meta"
    )


class OwnInputs(transformers.LlamaForCausalLM):
    shift = 1

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        inputs["input_ids"] = inputs["input_ids"] + self.shift
        return inputs


class OwnFirstInputs(transformers.LlamaForCausalLM):
    @functools.wraps(transformers.LlamaForCausalLM.forward)
    def forward(self, *args: Any, sign: int = 1, **kwargs: Any) -> Any:
        outputs = super().forward(*args, **kwargs)
        outputs.logits = outputs.logits * sign
        return outputs

    def prepare_inputs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        inputs = super().prepare_inputs_for_generation(*args, **kwargs)
        return inputs | {"sign": -1} if kwargs.get("is_first_iteration") else inputs


class OwnUpdate(transformers.LlamaForCausalLM):
    def _update_model_kwargs_for_generation(self, *args: Any, **kwargs: Any) -> Any:
        return super()._update_model_kwargs_for_generation(*args, **kwargs)


def test_own_input_preparation_is_refused_if_it_gives_other_inputs() -> None:
    model = OwnInputs(models.config("llama")).eval()
    models.init_weights(model, 0)
    assert "logits of decode steps" in str(reason(model))
    same = OwnInputs(models.config("llama")).eval()
    models.init_weights(same, 0)
    same.shift = 0
    assert reason(same) is None
    assert "_update_model_kwargs_for_generation" in str(
        reason(OwnUpdate(models.config("llama")).eval())
    )
    replaced = models.build("llama")  # as PEFT does for prompt learning
    replaced.prepare_inputs_for_generation = types.MethodType(
        OwnInputs.prepare_inputs_for_generation, replaced
    )
    assert "was replaced" in str(reason(replaced))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_own_inputs_of_the_first_forward_alone_are_found_out(dtype: torch.dtype) -> None:
    model = OwnFirstInputs(models.config("llama")).eval()
    models.init_weights(model, 0)
    model.to(dtype)
    assert str(reason(model)).startswith(
        "without `prepare_inputs_for_generation`, its first logits are"
    )
    if dtype is torch.float32:
        inputs = {"input_ids": models.token_ids(2, 9), "max_new_tokens": 6, "do_sample": False}
        expected = model.generate(**inputs)
        assert model.generate(**inputs, cache_implementation="paged").equal(expected)
        assert "side by side" in hf_paged.last_route(model).reason


# -- found by running ----------------------------------------------------------------------------


class TokenShift(nn.Module):
    """Adds a little of the previous token, like convolutions: causal, and wrong across
    sequences."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shifted = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return self.inner(hidden) + 0.05 * shifted


class BatchScale(TokenShift):
    """Divides by the largest state in the batch."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) / hidden.abs().max()


class OddPositions(nn.Module):
    """A rotary embedding that counts positions itself."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, torch.arange(hidden.shape[1])[None])


def shift(model: Any) -> None:
    model.model.layers[0].mlp = TokenShift(model.model.layers[0].mlp)


def scale(model: Any) -> None:
    model.model.layers[1].mlp = BatchScale(model.model.layers[1].mlp)


def count(model: Any) -> None:
    model.model.rotary_emb = OddPositions(model.model.rotary_emb)


# bfloat16 rounds away as much as the first two do
FOUND = [
    *((c, torch.float32) for c in (shift, scale, count)),
    *((c, torch.float16) for c in (shift, scale, count)),
]


@pytest.mark.parametrize("change, dtype", [*FOUND, (count, torch.bfloat16)])
def test_a_model_that_mixes_tokens_is_found_out(change: Any, dtype: torch.dtype) -> None:
    model = models.build("llama").to(dtype)
    assert reason(model) is None
    change(model)  # the model object is the same, its modules are not
    assert "standard deviations" in str(reason(model))


def test_steps_of_nothing_but_decodes_are_checked() -> None:
    """All their logits are wanted, so that `logits_to_keep` is left at an integer, by which a model
    may go."""
    model: Any = models.build("llama")
    attention = model.model.layers[0].self_attn
    forward, attend = model.forward, attention.forward
    reads_mask = False

    @functools.wraps(forward)
    def note(*args: Any, **kwargs: Any) -> Any:
        nonlocal reads_mask
        reads_mask = (
            isinstance(kwargs.get("logits_to_keep", 0), int) and kwargs["input_ids"].shape[1] > 1
        )
        return forward(*args, **kwargs)

    def read(*args: Any, **kwargs: Any) -> Any:
        if reads_mask and kwargs["attention_mask"] is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"].clone()
        return attend(*args, **kwargs)

    model.forward, attention.forward = note, read
    assert "the attention mask is a dense tensor" in str(reason(model))


def test_a_forward_that_could_not_be_packed_is_remembered() -> None:
    model: Any = models.build("llama")
    assert reason(model) is None
    note_unpackable(model, cache_for(model), "its mask")
    assert reason(model) == Topic.SELF_CHECK("packed, its forward fails: its mask")
    model.train()
    assert reason(model) is None, "in another mode"
    model.eval()
    assert reason(model) is not None
    handle = model.model.register_forward_hook(lambda *args: None)
    assert "hooks" in str(reason(model))
    handle.remove()
    assert reason(model) == Topic.SELF_CHECK("packed, its forward fails: its mask")


def test_a_replaced_forward_is_judged_by_what_it_computes() -> None:
    model = models.build("llama")
    layer: Any = model.model.layers[0]
    layer.forward = layer.forward  # the class's forward, as accelerate restores it
    layer.mlp.forward = types.MethodType(type(layer.mlp).forward, layer.mlp)
    assert reason(model) is None
    own = layer.mlp.forward
    layer.mlp.forward = lambda hidden: own(hidden) / hidden.abs().max()
    assert "standard deviations" in str(reason(model))
    layer.mlp.forward = lambda hidden: own(hidden) / 2
    assert reason(model) is None
    model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)
    assert "takes no position_ids" in str(reason(model))


@pytest.mark.slow
def test_a_compiled_forward_is_judged_by_what_it_computes() -> None:
    torch._dynamo.reset()
    model = models.build("llama")
    model.model.norm.compile(backend="eager")
    assert reason(model) is None
    torch._dynamo.reset()


def count_checks(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    calls = []
    original = capability.packed_check

    def counting(*args: Any) -> str | None:
        calls.append(args[1:])
        return original(*args)

    monkeypatch.setattr(capability, "packed_check", counting)
    return calls


def test_a_forward_that_is_replaced_is_checked_again_and_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls, model = count_checks(monkeypatch), models.build("llama")
    norm: Any = model.model.norm
    own = norm.forward

    def scaled(twice: bool) -> Any:
        return lambda hidden: own(hidden) * (2 if twice else 1)

    def check(expected: int) -> None:
        for _ in range(2):
            assert reason(model) is None and len(calls) == expected

    check(1)
    norm.forward = scaled(False)
    check(2)
    norm.forward = scaled(False)  # made alike
    check(2)
    norm.forward = scaled(True)
    check(3)
    del norm.forward
    check(3)  # known from the start
    model.enable_input_require_grads()
    check(4)
    model.train()
    check(5)
    model.eval()
    check(4 + 1)


@pytest.mark.slow
def test_a_verdict_keeps_neither_model_nor_forward_alive() -> None:
    model = models.build("llama")
    norm: Any = model.model.norm
    own = norm.forward
    norm.forward = functools.partial(lambda own, module, hidden: own(hidden), own, norm)
    model.generate(models.token_ids(1, 5), max_new_tokens=2, **models.PAGED)
    assert hf_paged.last_route(model).road == "engine"
    gone = weakref.ref(model), weakref.ref(norm)
    del model, norm, own
    gc.collect()
    assert [ref() for ref in gone] == [None, None]


def test_a_forward_that_raises_is_a_reason_of_one_line() -> None:
    model = models.build("llama")

    class Failing(torch.nn.Linear):
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            raise ValueError("no such thing\nand a long story")

    model.lm_head.__class__ = Failing
    assert reason(model) == Topic.SELF_CHECK("its forward fails: no such thing")


def test_the_check_runs_once_per_model_and_again_when_its_modules_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls = count_checks(monkeypatch)
    model = models.build("llama")
    for expected in (1, 1):
        assert reason(model) is None and len(calls) == expected
    peft = pytest.importorskip("peft")
    wrapped = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    ).eval()
    inner = wrapped.get_base_model()
    assert inner is model
    for expected in (2, 2):
        assert reason(model) is None and len(calls) == expected
    wrapped.unload()
    assert reason(model) is None and len(calls) == 2  # as at first
    assert reason(copy.deepcopy(model)) is None and len(calls) == 3


@pytest.mark.parametrize(
    ("name", "owner", "table"), [("gpt2", "", "wpe"), ("opt", "decoder.", "embed_positions")]
)
def test_a_table_of_positions_of_another_size_is_measured_again(
    name: str, owner: str, table: str
) -> None:
    model: Any = tables.build(name)
    positions = model.base_model.get_submodule(owner + table)
    offset = positions.num_embeddings - tables.NUM
    for size in (tables.NUM, 2 * tables.NUM, tables.NUM - 8):
        positions.weight = nn.Parameter(torch.randn(size + offset, positions.embedding_dim))
        ids = models.token_ids(1, tables.NUM - 8, seed=3)
        options = {"do_sample": False, "max_new_tokens": size + 1 - ids.shape[1]}
        expected = model.generate(ids, **options)
        assert choose_layout(model, cache_for(model)).max_positions == size
        assert torch.equal(model.generate(ids, **options, **models.PAGED), expected)


def test_the_check_leaves_no_trace() -> None:
    model = models.build("gemma3")
    model.model.layers[0].eval()
    model.model.layers[1].train()
    # the check needs more, and uses none of it
    cache = cache_for(model, block_size=8, num_blocks=1)
    random_state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    modes = [module.training for module in model.modules()]
    attributes = [dict(vars(module)) for module in model.modules()]
    buffers = [dict(module._buffers) for module in model.modules()]
    implementation = model.config._attn_implementation
    assert choose_layout(model, cache).unsupported_reason is None
    assert torch.equal(torch.get_rng_state(), random_state) and torch.is_grad_enabled()
    assert [module.training for module in model.modules()] == modes
    assert model.config._attn_implementation == implementation
    for module, before, held in zip(model.modules(), attributes, buffers):
        assert vars(module).keys() == before.keys()
        assert all(vars(module)[name] is value for name, value in before.items())
        assert module._buffers.keys() == held.keys() and all(
            module._buffers[k] is v for k, v in held.items()
        )
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert cache.memory.num_used == 0 and not any(
        group.storage.layers for group in cache.memory.groups.values()
    )


class Noting(nn.Module):
    """Sets an attribute, replaces a buffer and draws a random number in every forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.length = hidden.shape[1]
        self.register_buffer("seen", torch.rand(1))
        return self.inner(hidden)


def test_notes_that_a_forward_leaves_are_taken_back() -> None:
    model = models.build("llama")
    mlp = model.model.layers[0].mlp = Noting(model.model.layers[0].mlp)
    seen, state = mlp.seen, torch.get_rng_state()
    assert reason(model) == Topic.SELF_CHECK("its forward draws random numbers")
    assert (
        mlp.seen is seen
        and not hasattr(mlp, "length")
        and torch.equal(torch.get_rng_state(), state)
    )


@pytest.mark.slow
@pytest.mark.skipif(
    models.BEFORE_5_18, reason="plain GIT counts positions twice in decode steps: it is not packed"
)
def test_packed_rows_with_padding_that_plain_counts_stay_together() -> None:
    model = tiny_model(transformers.GitForCausalLM)
    inputs = decoder_text(model.config)
    options = {"do_sample": False, "max_new_tokens": 10, "min_new_tokens": 10}
    for padded in (True, False):
        given = inputs if padded else {name: x[:1] for name, x in inputs.items()}
        expected = model.generate(**given, **options)
        assert torch.equal(
            model.generate(**given, **options, cache_implementation="paged"), expected
        )
        route = hf_paged.last_route(model)
        assert (
            route is not None and route.road == "engine" and ("padding" in route.reason) == padded
        ), route


def test_a_forward_that_draws_random_numbers_runs_as_plain_runs_it() -> None:
    model = models.build("llama")
    norm: Any = model.model.norm
    own = norm.forward
    norm.forward = lambda hidden: own(hidden) + 0.1 * torch.randn_like(hidden)
    ids = models.token_ids(2, 9)
    options = {
        "do_sample": True,
        "num_return_sequences": 2,
        "max_new_tokens": 8,
        "attention_mask": torch.ones_like(ids),
    }
    torch.manual_seed(3)
    expected = model.generate(ids, **options)
    torch.manual_seed(3)
    assert torch.equal(model.generate(ids, **options, cache_implementation="paged"), expected)
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "hf_loop" and "random" in route.reason
