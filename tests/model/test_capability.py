"""Which models may run packed; the check leaves no trace."""

from __future__ import annotations

import copy
import functools
import gc
import types
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from accelerate.hooks import AlignDevicesHook, CpuOffload, ModelHook, add_hook_to_module
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
from hf_paged.model.structure import Structure, reasons_against
from hf_paged.rooms import is_installed
from hf_paged.topics import Topic
from tests.model import test_positions as tables
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import decoder_text
from tests.support.checks import assert_paged_is_plain
from tests.support.precision import TensorFloats, default_precision

DIFFERS = "standard deviations"


def cache_for(model: Any, **config: Any) -> PagedCache:
    """The model's own cache, layer by layer, as in a call."""
    kwargs: dict[str, Any] = {}
    model._prepare_cache_for_generation(model.generation_config, kwargs, None, 1, 64)
    return PagedCache.from_empty(kwargs[compat.OUTPUT_CACHE], PagedMemory(PagedConfig(**config)))


def reason(model: Any, cache: PagedCache | None = None) -> str | None:
    cache = cache_for(model) if cache is None else cache
    return choose_layout(model, cache).unsupported_reason


def of_class(kind: type[Any]) -> Any:
    model = kind(models.config("llama")).eval()
    models.init_weights(model, 0)
    return model


# -- found by inspection -------------------------------------------------------------------------


@pytest.mark.slow_cases("gemma3", "mixtral")
@pytest.mark.parametrize("name", models.DECODER_ONLY)
def test_decoders_are_packable(name: str) -> None:
    assert reason(models.get(name)) is None


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss", "gemma2"])
def test_half_precision_is_packable(name: str) -> None:
    assert reason(models.build(name).bfloat16()) is None


PACKABLE = ("Bloom", "Cohere", "Falcon", "GPTJ", "Gemma3n", "GPTNeoX", "Llama4", "OPT", "Qwen3Moe")
REFUSED = {
    "BambaForCausalLM": "LinearAttentionLayer",  # Mamba states and attention
    "BertLMHeadModel": "shows later tokens",
    "FalconH1ForCausalLM": "PagedHybridLayer",
    "GPTNeoForCausalLM": "reads packed keys",  # builds a mask from the batch's columns
    "OpenAIGPTLMHeadModel": "no cache",
    "MambaForCausalLM": "does not know its layers",
}
OTHERS = {**dict.fromkeys((f"{name}ForCausalLM" for name in PACKABLE), ""), **REFUSED}


@pytest.mark.slow_cases("Gemma3nForCausalLM", "OPTForCausalLM", "BertLMHeadModel")
@pytest.mark.parametrize("name", OTHERS)
def test_other_decoders(name: str) -> None:
    """What mixes tokens is refused."""
    model = tiny_model(getattr(transformers, name))
    found = reason(model, PagedCache() if name == "MambaForCausalLM" else None) or ""
    assert OTHERS[name] in found and bool(found) == (name in REFUSED) and "\n" not in found


def test_encoders_several_devices_and_caches_of_ones_own_are_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    encoder = Topic.ENCODER("the model has an encoder")
    assert reason(models.get("bart"), PagedCache()) == encoder
    model = models.build("llama")
    assert "does not know its layers" in str(reason(model, PagedCache()))
    cache = cache_for(model)
    model.model.layers[1].to("meta")
    devices = "its weights are on several devices: cpu, meta"
    assert reason(model, cache) == Topic.DEVICES(devices)
    model = models.get("llama")
    structure = Structure(model)
    monkeypatch.setattr(compat, "supports_dynamic_cache", lambda model: False)
    own = Topic.CACHE("it uses a cache class of its own, not a `DynamicCache`")
    for layout in ("side by side", "together"):
        assert list(reasons_against(structure, cache, layout)) == [own]
    assert not list(reasons_against(structure, cache, "packed"))


# -- the tolerance ---------------------------------------------------------------------------------


@pytest.mark.skipif(
    not cpp.is_available(), reason="all products are PyTorch's without the C++ kernels"
)
def test_products_less_precise_than_their_dtype_are_packable_if_torch_is_set_so() -> None:
    model = models.build("llama", num_hidden_layers=1)
    for layer in model.model.layers:  # scores that rounding changes more
        layer.self_attn.q_proj.weight.data *= 3
        layer.self_attn.k_proj.weight.data *= 3
    with default_precision(), TensorFloats():
        assert DIFFERS in str(reason(model))
        torch.set_float32_matmul_precision("high")
        assert reason(model) is None
        torch.set_float32_matmul_precision("highest")
        assert reason(model) is not None


def test_the_tolerance_is_that_of_the_products(monkeypatch: pytest.MonkeyPatch) -> None:
    half, bfloat16 = (trial.HALF_TOLERANCE[x] for x in (torch.float16, torch.bfloat16))
    with default_precision():
        for dtype, precision, expected in (
            (torch.float32, "highest", None),
            (torch.float32, "high", half),
            (torch.float32, "medium", bfloat16),
            (torch.float16, "medium", half),
        ):
            torch.set_float32_matmul_precision(precision)
            assert trial.half_tolerance({dtype, None}, torch.device("cpu")) == expected
    options = torch.backends.cuda.matmul
    before = options.allow_fp16_accumulation
    try:
        for sums_in_half, expected in ((False, half), (True, bfloat16)):
            options.allow_fp16_accumulation = sums_in_half
            assert trial.half_tolerance({torch.float16}, torch.device("cuda")) == expected
    finally:
        options.allow_fp16_accumulation = before


# -- inputs of the model's own ---------------------------------------------------------------------


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
    model = of_class(OwnInputs)
    assert "logits of decode steps" in str(reason(model))
    model = of_class(OwnInputs)
    model.shift = 0
    assert reason(model) is None
    assert "_update_model_kwargs_for_generation" in str(reason(of_class(OwnUpdate)))
    replaced = models.build("llama")  # as PEFT does for prompt learning
    own = types.MethodType(OwnInputs.prepare_inputs_for_generation, replaced)
    replaced.prepare_inputs_for_generation = own
    assert "was replaced" in str(reason(replaced))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_own_inputs_of_the_first_forward_alone_are_found_out(dtype: torch.dtype) -> None:
    model = of_class(OwnFirstInputs).to(dtype)
    without = "without `prepare_inputs_for_generation`, its first logits are"
    assert str(reason(model)).startswith(without)
    if dtype is torch.float32:
        options = {"max_new_tokens": 6, "do_sample": False}
        route = assert_paged_is_plain(model, {"input_ids": models.token_ids(2, 9)}, options)
        assert "side by side" in route.reason


# -- found by running ----------------------------------------------------------------------------


class Wrapped(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner


class TokenShift(Wrapped):
    """Adds a little of the previous token, like convolutions: causal, and wrong across
    sequences."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        shifted = torch.cat([torch.zeros_like(hidden[:, :1]), hidden[:, :-1]], dim=1)
        return self.inner(hidden) + 0.05 * shifted


class BatchScale(Wrapped):
    """Divides by the largest state in the batch."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) / hidden.abs().max()


class OddPositions(Wrapped):
    """A rotary embedding that counts positions itself."""

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> Any:
        return self.inner(hidden, torch.arange(hidden.shape[1])[None])


def shift(model: Any) -> None:
    model.model.layers[0].mlp = TokenShift(model.model.layers[0].mlp)


def scale(model: Any) -> None:
    model.model.layers[1].mlp = BatchScale(model.model.layers[1].mlp)


def count(model: Any) -> None:
    model.model.rotary_emb = OddPositions(model.model.rotary_emb)


class Failing(nn.Linear):
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise ValueError("no such thing\nand a long story")


def nothing(*args: Any) -> None: ...


def add_hooks(model: Any, *hooks: ModelHook) -> None:
    for hook in hooks:
        add_hook_to_module(model.model.norm, hook, append=True)


def replaced(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Any], None]:
    """Changes what a layer's MLP returns."""

    def replace(model: Any) -> None:
        mlp = model.model.layers[0].mlp
        own = mlp.forward
        mlp.forward = lambda hidden: own(hidden) / change(hidden)

    return replace


def restored(model: Any) -> None:
    """Sets the class's forward, as accelerate does."""
    layer = model.model.layers[0]
    layer.forward = layer.forward
    layer.mlp.forward = types.MethodType(type(layer.mlp).forward, layer.mlp)


def plain_forward(model: Any) -> None:
    model.forward = lambda *args, **kwargs: type(model).forward(model, *args, **kwargs)


def noise(model: Any) -> None:
    activate_neftune(model, 5.0)


IDS = models.token_ids(1, 3)
CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "hook": (lambda m: m.model.register_forward_hook(nothing), "hooks on model"),
    "hook before": (lambda m: m.lm_head.register_forward_pre_hook(nothing), "hooks on lm_head"),
    "hook of accelerate": (lambda m: setattr(m.lm_head, "_hf_hook", 1), "hooks on lm_head"),
    "hook of one's own": (lambda m: add_hooks(m, type("Own", (ModelHook,), {})()), "model.norm"),
    "hooks that move": (lambda m: add_hooks(m, AlignDevicesHook("cpu"), CpuOffload("cpu")), ""),
    "idle hooks": (lambda m: m(IDS, output_hidden_states=True), ""),
    "gradients of inputs": (lambda m: m.enable_input_require_grads(), ""),
    "spectral norm": (lambda m: torch.nn.utils.spectral_norm(m.lm_head), ""),
    "training": (lambda m: m.train(), ""),
    "noise": (noise, ""),
    "noise in training": (lambda m: noise(m.train()), "training mode with neftune_noise_alpha"),
    "previous tokens": (shift, DIFFERS),
    "other rows": (scale, DIFFERS),
    "its own positions": (count, DIFFERS),
    "a forward that is its own": (restored, ""),
    "a forward that scales": (replaced(lambda hidden: 2), ""),
    "a forward of other rows": (replaced(lambda hidden: hidden.abs().max()), DIFFERS),
    "a forward without names": (plain_forward, "takes no position_ids"),
    "a forward that raises": (
        lambda m: setattr(m.lm_head, "__class__", Failing),
        Topic.SELF_CHECK("its forward fails: no such thing"),
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_judged_by_what_it_computes(name: str) -> None:
    model = models.build("llama")
    assert reason(model) is None
    change, expected = CHANGES[name]
    change(model)  # the model object is the same, its modules are not
    found = reason(model)
    assert expected in str(found) and (found is None) == (not expected)


# bfloat16 rounds away as much as the first two do
HALF = [(shift, torch.float16), (scale, torch.float16), (count, torch.bfloat16)]


@pytest.mark.parametrize("change, dtype", HALF)
def test_a_model_that_mixes_tokens_is_found_out(change: Any, dtype: torch.dtype) -> None:
    model = models.build("llama").to(dtype)
    change(model)
    assert DIFFERS in str(reason(model))


def test_dropout_matters_in_training_mode_only_and_experts_always() -> None:
    model = models.build("gpt2")  # dropout 0.1 by default
    assert reason(model) is None
    assert "training mode with dropout" in str(reason(model.train()))
    for name, options, named in (
        ("llama", {"attention_dropout": 0.5}, "attention_dropout"),
        ("mixtral", {"router_jitter_noise": 0.1}, "jitter"),
        ("mixtral", {"output_router_logits": True}, "output_router_logits"),
        ("mixtral", {"expert_capacity": 4}, "capacity"),
    ):
        assert named in str(reason(models.build(name, **options).train()))


@pytest.mark.skipif(not is_installed("rectangles"), reason="needs the room rectangles")
@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_rope_of_the_longest_position_is_packable_but_not_side_by_side(kind: str) -> None:
    rope: dict[str, Any] = {"rope_type": kind, "rope_theta": 10000.0, "factor": 2.0}
    if kind == "longrope":
        rope |= {"short_factor": [1.0] * 8, "long_factor": [2.0] * 8}
        rope["original_max_position_embeddings"] = 64
    model = models.build("llama", rope_parameters=rope)
    assert reason(model) is None
    shift(model)  # then no longer packed
    layout = choose_layout(model, cache_for(model))
    assert DIFFERS in str(layout.unsupported_reason) and not layout.is_side_by_side


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
        keeps_all = isinstance(kwargs.get("logits_to_keep", 0), int)
        reads_mask = keeps_all and kwargs["input_ids"].shape[1] > 1
        return forward(*args, **kwargs)

    def read(*args: Any, **kwargs: Any) -> Any:
        if reads_mask and kwargs["attention_mask"] is not None:
            kwargs["attention_mask"] = kwargs["attention_mask"].clone()
        return attend(*args, **kwargs)

    model.forward, attention.forward = note, read
    assert "the attention mask is a dense tensor" in str(reason(model))


def test_a_forward_that_draws_random_numbers_runs_as_plain_runs_it() -> None:
    model = models.build("llama")
    norm: Any = model.model.norm
    own = norm.forward
    norm.forward = lambda hidden: own(hidden) + 0.1 * torch.randn_like(hidden)
    ids, state = models.token_ids(2, 9), torch.get_rng_state()
    assert reason(model) == Topic.SELF_CHECK("its forward draws random numbers")
    assert torch.equal(torch.get_rng_state(), state)
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 8}
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    route = assert_paged_is_plain(model, inputs, options)
    assert route.road == "hf_loop" and "random" in route.reason


@pytest.mark.parametrize(
    ("name", "owner", "table"), [("gpt2", "", "wpe"), ("opt", "decoder.", "embed_positions")]
)
def test_tables_of_positions_of_other_sizes(name: str, owner: str, table: str) -> None:
    model: Any = tables.build(name)
    positions = model.base_model.get_submodule(owner + table)
    offset = positions.num_embeddings - tables.NUM
    inputs = {"input_ids": models.token_ids(1, tables.NUM - 8, seed=3)}
    for size in (tables.NUM, 2 * tables.NUM, tables.NUM - 8):
        positions.weight = nn.Parameter(torch.randn(size + offset, positions.embedding_dim))
        assert choose_layout(model, cache_for(model)).max_positions == size
        count = size + 1 - (tables.NUM - 8)
        assert_paged_is_plain(model, inputs, {"do_sample": False, "max_new_tokens": count})


# -- verdicts --------------------------------------------------------------------------------------


def test_a_forward_that_could_not_be_packed_is_remembered() -> None:
    model: Any = models.build("llama")
    assert reason(model) is None
    note_unpackable(model, cache_for(model), "its mask")
    unpackable = Topic.SELF_CHECK("packed, its forward fails: its mask")
    assert reason(model) == unpackable
    assert reason(model.train()) is None, "in another mode"
    assert reason(model.eval()) == unpackable
    handle = model.model.register_forward_hook(lambda *args: None)
    assert "hooks" in str(reason(model))
    handle.remove()
    assert reason(model) == unpackable


def test_a_model_is_checked_once_and_again_when_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    calls, original = [], capability.packed_check

    def counting(*args: Any) -> Any:
        calls.append(args[1:])
        return original(*args)

    monkeypatch.setattr(capability, "packed_check", counting)
    model = models.build("llama")
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
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False)
    wrapped = peft.get_peft_model(model, lora).eval()
    assert wrapped.get_base_model() is model
    check(4)
    wrapped.unload()
    check(4)  # as at first
    model.enable_input_require_grads()
    check(5)
    model.train()
    check(6)
    model.eval()
    check(6)
    assert reason(copy.deepcopy(model)) is None and len(calls) == 7


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


def test_the_check_leaves_no_trace() -> None:
    """`test_writes.py` has models whose forwards write."""
    model = models.build("gemma3")
    model.model.layers[0].eval()
    model.model.layers[1].train()
    # the check needs more, and uses none of it
    cache = cache_for(model, block_size=8, num_blocks=1)
    random_state, weights = torch.get_rng_state(), copy.deepcopy(model.state_dict())
    held = [{**vars(module), **module._buffers} for module in model.modules()]
    implementation = model.config._attn_implementation
    assert reason(model, cache) is None
    assert torch.equal(torch.get_rng_state(), random_state) and torch.is_grad_enabled()
    assert model.config._attn_implementation == implementation
    for module, before in zip(model.modules(), held):
        after = {**vars(module), **module._buffers}
        assert after.keys() == before.keys()
        assert all(after[name] is value for name, value in before.items())
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    groups = cache.memory.groups.values()
    assert cache.memory.num_used == 0 and not any(group.storage.layers for group in groups)


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


def test_a_call_reads_the_structure_of_its_model_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model(transformers.CpmAntForCausalLM)  # in its own loop, after checks of 3 layouts
    options: dict[str, Any] = {"max_new_tokens": 2, "cache_implementation": "paged"}
    model.generate(torch.arange(4)[None] + 1, **options)
    structures = []

    class Counted(Structure):
        def __init__(self, model: Any) -> None:
            super().__init__(model)
            structures.append(model)

    monkeypatch.setattr(capability, "Structure", Counted)
    model.generate(torch.arange(4)[None] + 1, **options)
    assert structures == [model]
