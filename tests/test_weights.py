"""Weights that change between calls are never combined with older cached K/V; unchanged weights use
the cache."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from hf_paged import PagedConfig, PagedEngine, last_route
from hf_paged.batching.factory import choose_layout, empty_cache
from hf_paged.cache.groups import FULL_ATTENTION
from hf_paged.cache.memory import PagedMemory
from hf_paged.model.weights import WeightsGuard
from tests.support import models
from tests.support.engine_helpers import tokens_of
from tests.support.rooms import KEEPS_PREFIXES, needs_fingerprints, records_on_cpu

# with the prompts, enough tokens to be kept
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 17}
LENGTHS = (26, 20, 17)
INPUTS = models.padded_prompt("llama", LENGTHS)
# tokens in full blocks of 8, short of each prompt's last token
HITS = (24 + 16 + 16) * KEEPS_PREFIXES


class Generate:
    """Through `generate`: hits are prompt tokens that no forward computed, counted in the first
    layer without a hook."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self) -> tuple[torch.Tensor, int]:
        is_plain = isinstance(self.model, PreTrainedModel)
        inner = self.model if is_plain else self.model.get_base_model()
        norm, counts = inner.model.layers[0].input_layernorm, []
        original = type(norm).forward

        def forward(self: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
            if self is norm:
                counts.append(hidden.shape[:-1].numel())
            return original(self, hidden)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(type(norm), "forward", forward)
            # forwards of the check whether a model can run packed do not belong to the call
            empty = empty_cache(inner, PagedMemory(PagedConfig(**models.PAGED["cache_config"])))
            assert choose_layout(inner, empty).unsupported_reason is None
            counts.clear()
            tokens = self.model.generate(**INPUTS, **GREEDY, **models.UNRECORDED)
        new = len(LENGTHS) * (GREEDY["max_new_tokens"] - 1)
        return tokens[:, max(LENGTHS) :], sum(LENGTHS) + new - sum(counts)


class Engine:
    """Through one `PagedEngine`, which counts the hits."""

    def __init__(self, model: Any) -> None:
        self.engine = PagedEngine(model, {"block_size": models.BLOCK_SIZE})

    def __call__(self) -> tuple[torch.Tensor, int]:
        before = self.engine.stats().num_prefix_hit_tokens
        prompts = [ids[mask.bool()].tolist() for ids, mask in zip(*INPUTS.values())]
        rows = tokens_of(self.engine.generate(prompts, GREEDY))
        self.engine.check_integrity()
        hits = self.engine.stats().num_prefix_hit_tokens - before
        return torch.tensor([row for (row,) in rows]), hits


DOORS = {"generate": Generate, "engine": Engine}


class Watch:
    """A model, called through these doors."""

    def __init__(self, model: Any, *doors: str) -> None:
        self.model, self.calls = model, {door: DOORS[door](model) for door in doors}

    def expect(self, hits: int, what: str) -> torch.Tensor:
        """Asserts that tokens are plain's, `hits` of them from the cache."""
        expected: torch.Tensor = self.model.generate(**INPUTS, **GREEDY)[:, max(LENGTHS) :]
        for door, call in self.calls.items():
            tokens, found = call()
            shown = f"{what}, {door}\nplain\n{expected}\npaged\n{tokens}"
            assert torch.equal(tokens, expected), shown
            assert found == hits, f"{what}, {door}: {found} tokens came from the cache"
        return expected

    def expect_changed(self, what: str) -> torch.Tensor:
        """No token comes from the cache, then all; returns the tokens."""
        tokens = self.expect(0, what)
        self.expect(HITS, f"{what}, again")
        return tokens


def train_step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = models.token_ids(2, 16, seed=50 + seed)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("trains_adapter", [False, True])
def test_train_eval_train(door: str, trains_adapter: bool) -> None:
    """Ten optimizer steps, a call before, between and after, in train and in eval mode."""
    model = lora_model() if trains_adapter else models.build("llama")
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    rate = 5e-2 if trains_adapter else 3e-3
    watch, optimizer = Watch(model, door), torch.optim.AdamW(trained, lr=rate, fused=True)
    seen = [watch.expect_changed("before")]
    for step in range(3 if trains_adapter else 10):
        model.train()
        train_step(model, optimizer, step)
        model.train(step % 2 == 1 and not trains_adapter)
        seen.append(watch.expect_changed(f"after step {step}"))
    changes = [not torch.equal(a, b) for a, b in itertools.pairwise(seen)]
    assert sum(changes) >= (1 if trains_adapter else 5), "training changes nothing"


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_train_and_eval_keep_the_cache(door: str) -> None:
    model = models.build("llama")
    watch = Watch(model, door)
    watch.expect(0, "eval")
    for training in (True, False, True, True, False):
        model.train(training)
        watch.expect(HITS, f"training: {training}")
    model.requires_grad_(False)
    watch.expect(HITS, "frozen")
    ids = models.token_ids(1, 5)
    model.requires_grad_(True)
    model(input_ids=ids, labels=ids).loss.backward()  # gradients, but no step
    watch.expect(HITS, "after a backward")


def test_dropout_in_train_mode_leaves_nothing_to_serve() -> None:
    """Blocks computed with dropout differ from those of eval mode."""
    model = models.build("gpt2", resid_pdrop=0.5, embd_pdrop=0.5, attn_pdrop=0.0)
    prompt = models.token_ids(1, 30)[0].tolist()
    with PagedEngine(model, {"block_size": 8}) as engine:
        engine.generate([prompt[:9]], GREEDY)
        model.train()
        noisy = engine.generate([prompt], GREEDY)[0]
        assert noisy.error is None
        model.eval()
        expected = model.generate(torch.tensor([prompt]), **GREEDY)[0, 30:].tolist()
        result = engine.generate([prompt], GREEDY)[0]
    assert noisy.token_ids != expected, "dropout changes nothing: the test is void"
    assert result.token_ids == expected and result.num_prefix_hit_tokens == 0


def value_projection(model: PreTrainedModel) -> torch.nn.Parameter:
    return model.get_decoder().layers[0].self_attn.v_proj.weight


def load(model: PreTrainedModel) -> None:
    model.load_state_dict(models.build("llama", seed=5).state_dict())


def data_add(model: PreTrainedModel) -> None:
    value_projection(model).data += 0.5


def numpy_write(model: PreTrainedModel) -> None:
    value_projection(model).detach().numpy()[:8] *= -1.0


def in_place_without_grad(model: PreTrainedModel) -> None:
    with torch.no_grad():
        value_projection(model).mul_(-1)


def attribute(model: PreTrainedModel) -> None:
    for layer in model.get_decoder().layers:
        layer.self_attn.scaling *= 0.5


WRITES = [load, data_add, numpy_write, in_place_without_grad, attribute]
"""Of the kinds that the tests in `tests/fingerprints` have."""


@pytest.mark.slow_cases(but=["data_add", "in_place_without_grad", "load"])
@pytest.mark.parametrize("write", WRITES)
def test_a_write_to_the_weights(write: Callable[[PreTrainedModel], None]) -> None:
    """Weights that come back are right, too."""
    model = models.build("llama")
    watch = Watch(model, *DOORS)
    before = watch.expect_changed("before")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    write(model)
    after = watch.expect_changed("after the write")
    assert not torch.equal(before, after), "the write changes nothing: the test is void"
    if write is not attribute:
        model.load_state_dict(kept)
        assert torch.equal(watch.expect(0, "as before"), before)


@pytest.mark.slow_cases(but=["data_add", "in_place_without_grad"])
@pytest.mark.parametrize("write", WRITES)
def test_recorded_steps_see_every_write(write: Callable[[PreTrainedModel], None]) -> None:
    model, options = models.build("llama"), {**GREEDY, "max_new_tokens": 40}
    before = model.generate(**INPUTS, **options)
    assert torch.equal(model.generate(**INPUTS, **options, **models.PAGED), before)
    assert last_route(model).num_captured_steps > 0 or not records_on_cpu()
    write(model)
    after = model.generate(**INPUTS, **options)
    for _ in range(2):
        assert torch.equal(model.generate(**INPUTS, **options, **models.PAGED), after)
    assert not torch.equal(before, after), "the write changes nothing: the test is void"


def lora_model() -> Any:
    return pytest.importorskip("tests.support.peft_models").lora_model()


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_adapters(door: str) -> None:
    """Switching, disabling, merging, unmerging and changing an adapter each make another model."""
    model = lora_model()
    watch = Watch(model, door)
    first = watch.expect_changed("first")
    model.set_adapter("second")
    second = watch.expect_changed("second")
    with model.disable_adapter():
        bare = watch.expect_changed("disabled")
    assert not torch.equal(first, second), "the adapters do the same: the test is void"
    assert not torch.equal(second, bare), "the adapter does nothing: the test is void"
    assert torch.equal(watch.expect(0, "enabled"), second)
    model.merge_adapter()
    watch.expect_changed("merged")
    model.unmerge_adapter()
    watch.expect(0, "unmerged")
    model.set_adapter("first")
    watch.expect(0, "first once more")
    for name, parameter in model.named_parameters():
        if "lora_B.first" in name:
            parameter.data.mul_(-1)
    watch.expect_changed("first, changed")


@needs_fingerprints
def test_a_change_that_one_layout_finds_is_one_for_the_others() -> None:
    """Packed and rectangular calls have separate managers on one memory, with a single
    fingerprint."""
    from hf_paged.rectangles.states import StateSpec

    model, memory = models.build("llama"), PagedMemory(PagedConfig(block_size=8))
    packed = memory.manager([FULL_ATTENTION])
    rectangles = memory.manager([FULL_ATTENTION, StateSpec(is_empty=True)])
    guards = [WeightsGuard(model, memory, blocks) for blocks in (packed, rectangles)]

    def begin(guard: WeightsGuard) -> None:
        guard.begin(True, None)
        guard.begin_span()
        guard.verify()

    begin(guards[0])
    blocks, tokens = packed.new(), list(range(16))
    assert blocks.append(16)
    blocks.register(tokens, 16, None)
    blocks.free()
    begin(guards[1])
    assert packed.index.find(tokens, None, 2), "the weights are the same"
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    begin(guards[1])
    begin(guards[0])
    assert not packed.index.find(tokens, None, 2)
