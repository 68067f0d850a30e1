"""Weights that change between calls are never combined with older cached K/V; unchanged weights use
the cache."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
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
from tests.support.rooms import KEEPS_PREFIXES, needs_fingerprints, records_on_cpu

# with the prompts, enough tokens to be kept
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 17}
LENGTHS = (26, 20, 17)
# tokens in full blocks of 8, short of each prompt's last token
HITS = (24 + 16 + 16) * KEEPS_PREFIXES


@contextlib.contextmanager
def counted_tokens(model: Any) -> Iterator[list[int]]:
    """Counts tokens of every forward, in the first layer without a hook."""
    norm = next(
        module
        for name, module in model.named_modules()
        if name.endswith("layers.0.input_layernorm")
    )
    original, counts = type(norm).forward, []

    def forward(self: torch.nn.Module, hidden: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if self is norm:
            counts.append(hidden.shape[:-1].numel())
        return original(self, hidden, *args, **kwargs)

    type(norm).forward = forward
    try:
        yield counts
    finally:
        type(norm).forward = original


class Generate:
    """Through `generate`: hits are prompt tokens that no forward computed."""

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor]) -> None:
        self.model, self.inputs = model, inputs

    def __call__(self) -> tuple[torch.Tensor, int]:
        inner = (
            self.model if isinstance(self.model, PreTrainedModel) else self.model.get_base_model()
        )
        with counted_tokens(self.model) as counts:
            # forwards of the check whether a model can run packed do not belong to the call
            empty = empty_cache(inner, PagedMemory(PagedConfig(**models.PAGED["cache_config"])))
            assert choose_layout(inner, empty).unsupported_reason is None
            counts.clear()
            tokens = self.model.generate(**self.inputs, **GREEDY, **models.UNRECORDED)
        new = len(self.inputs["input_ids"]) * (GREEDY["max_new_tokens"] - 1)
        return tokens[:, max(LENGTHS) :], sum(LENGTHS) + new - sum(counts)


class Engine:
    """Through one `PagedEngine`, which counts the hits."""

    def __init__(self, model: Any, inputs: dict[str, torch.Tensor]) -> None:
        self.engine = PagedEngine(model, {"block_size": models.BLOCK_SIZE})
        self.prompts = [
            row[mask.bool()].tolist()
            for row, mask in zip(inputs["input_ids"], inputs["attention_mask"])
        ]

    def __call__(self) -> tuple[torch.Tensor, int]:
        before = self.engine.stats().num_prefix_hit_tokens
        results = self.engine.generate(self.prompts, GREEDY)
        for result in results:
            assert result.error is None, result.error
        self.engine.check_integrity()
        hits = self.engine.stats().num_prefix_hit_tokens - before
        return torch.tensor([result.token_ids for result in results]), hits


DOORS = {"generate": Generate, "engine": Engine}


class Watch:
    """One model behind a uniform interface: results of a call, and its use of the cache."""

    def __init__(self, door: str, model: Any) -> None:
        self.model, self.inputs = model, models.padded_prompt("llama", LENGTHS)
        self.call = DOORS[door](model, self.inputs)

    def plain(self) -> torch.Tensor:
        return self.model.generate(**self.inputs, **GREEDY)[:, max(LENGTHS) :]

    def expect(self, hits: int, what: str) -> torch.Tensor:
        """Asserts that tokens are plain's, `hits` of them from the cache."""
        expected = self.plain()
        tokens, found = self.call()
        assert torch.equal(tokens, expected), f"{what}\nplain\n{expected}\npaged\n{tokens}"
        assert found == hits, f"{what}: {found} tokens came from the cache"
        return tokens


# --------------------------------------------------------------------------------------- training


def train_step(model: Any, optimizer: torch.optim.Optimizer, seed: int) -> None:
    ids = models.token_ids(2, 16, seed=50 + seed)
    model(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_train_eval_train(door: str) -> None:
    """Ten optimizer steps, a call before, between and after, in train and in eval mode."""
    model = models.build("llama")
    watch, steps = Watch(door, model), torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    seen = [watch.expect(0, "before")]
    watch.expect(HITS, "before, again")
    for step in range(10):
        model.train()
        train_step(model, steps, step)
        model.train(step % 2 == 1)
        seen.append(watch.expect(0, f"after step {step}"))
        watch.expect(HITS, f"after step {step}, again")
    num_changes = sum(not torch.equal(a, b) for a, b in itertools.pairwise(seen))
    assert num_changes >= 5, "training changes nothing: the test is void"


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_train_and_eval_keep_the_cache(door: str) -> None:
    model = models.build("llama")
    watch = Watch(door, model)
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


# -------------------------------------------------------------------------- writes to the weights


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


@pytest.mark.slow_cases(but=["engine-data_add", "engine-in_place_without_grad", "engine-load"])
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("door", DOORS)
def test_a_write_to_the_weights(door: str, write: Callable[[PreTrainedModel], None]) -> None:
    model = models.build("llama")
    watch = Watch(door, model)
    before = watch.expect(0, "before")
    watch.expect(HITS, "unchanged")
    write(model)
    after = watch.expect(0, "after the write")
    assert not torch.equal(before, after), "the write changes nothing: the test is void"
    watch.expect(HITS, "unchanged again")


@pytest.mark.slow_cases(but=["data_add", "in_place_without_grad"])
@pytest.mark.parametrize("write", WRITES)
def test_recorded_steps_see_every_write(write: Callable[[PreTrainedModel], None]) -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama", LENGTHS)
    options = {**GREEDY, "max_new_tokens": 40}
    before = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, **models.PAGED), before)
    assert last_route(model).num_captured_steps > 0 or not records_on_cpu()
    write(model)
    after = model.generate(**inputs, **options)
    for _ in range(2):
        assert torch.equal(model.generate(**inputs, **options, **models.PAGED), after)
    assert not torch.equal(before, after), "the write changes nothing: the test is void"


@pytest.mark.parametrize("door", DOORS)
def test_weights_that_come_back_are_right_too(door: str) -> None:
    model = models.build("llama")
    watch = Watch(door, model)
    before = watch.expect(0, "before")
    kept = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    data_add(model)
    watch.expect(0, "changed")
    model.load_state_dict(kept)
    assert torch.equal(watch.expect(0, "as before"), before)


@pytest.mark.slow
def test_one_write_is_seen_through_both_doors() -> None:
    model = models.build("llama")
    engine, generate = Watch("engine", model), Watch("generate", model)
    for round_, write in enumerate((None, data_add, numpy_write)):
        if write is not None:
            write(model)
        for watch in (engine, generate):
            watch.expect(0, f"round {round_}")
            watch.expect(HITS, f"round {round_}, again")


# --------------------------------------------------------------------------------------- adapters


def lora_model() -> Any:
    return pytest.importorskip("tests.support.peft_models").lora_model()


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_adapters(door: str) -> None:
    """Switching, disabling, merging, unmerging and training an adapter each make another model."""
    model = lora_model()
    watch = Watch(door, model)
    first = watch.expect(0, "first")
    watch.expect(HITS, "first, again")
    model.set_adapter("second")
    second = watch.expect(0, "second")
    assert not torch.equal(first, second), "the adapters do the same: the test is void"
    watch.expect(HITS, "second, again")
    with model.disable_adapter():
        bare = watch.expect(0, "disabled")
        watch.expect(HITS, "disabled, again")
    assert not torch.equal(second, bare), "the adapter does nothing: the test is void"
    assert torch.equal(watch.expect(0, "enabled"), second)
    model.merge_adapter()
    watch.expect(0, "merged")
    watch.expect(HITS, "merged, again")
    model.unmerge_adapter()
    watch.expect(0, "unmerged")
    model.set_adapter("first")
    watch.expect(0, "first once more")
    for name, parameter in model.named_parameters():
        if "lora_B.first" in name:
            parameter.data.mul_(-1)
    watch.expect(0, "first, changed")
    watch.expect(HITS, "first, changed, again")


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_training_an_adapter(door: str) -> None:
    model = lora_model()
    watch = Watch(door, model)
    optimizer = torch.optim.AdamW(
        [p for p in model.parameters() if p.requires_grad], lr=5e-2, fused=True
    )
    seen = [watch.expect(0, "before")]
    for step in range(3):
        train_step(model.train(), optimizer, step)
        model.eval()
        seen.append(watch.expect(0, f"after step {step}"))
        watch.expect(HITS, f"after step {step}, again")
    assert not torch.equal(seen[0], seen[-1]), "training changes nothing: the test is void"


@needs_fingerprints
def test_a_change_that_one_layout_finds_is_one_for_the_others() -> None:
    """Packed and rectangular calls have separate managers on one memory, with a single
    fingerprint."""
    model, memory = models.build("llama"), PagedMemory(PagedConfig(block_size=8))
    from hf_paged.rectangles.states import StateSpec

    packed, rectangles = (
        memory.manager([FULL_ATTENTION]),
        memory.manager([FULL_ATTENTION, StateSpec(is_empty=True)]),
    )
    guards = [WeightsGuard(model, memory, blocks) for blocks in (packed, rectangles)]

    def begin(guard: WeightsGuard) -> None:
        guard.begin(True, None)
        guard.begin_period()
        guard.verify()

    begin(guards[0])
    blocks, tokens = packed.new(), list(range(16))
    assert packed.append(blocks, 16)
    packed.register(blocks, tokens, 16, None)
    packed.free(blocks)
    begin(guards[1])
    assert packed.index.find(tokens, None, 2), "the weights are the same"
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1
    begin(guards[1])
    begin(guards[0])
    assert not packed.index.find(tokens, None, 2)
