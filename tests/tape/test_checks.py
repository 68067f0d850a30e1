"""Models whose code depends on the number of columns that it gets, or on values of masks: a replay
gives plain's tokens, or there is none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from transformers import PreTrainedModel
from transformers.models.bloom.modeling_bloom import BloomAttention
from transformers.models.roformer.modeling_roformer import RoFormerSelfAttention

from hf_paged import check_integrity
from tests.support.architecture_configs import spread_weights, tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.tape.test_rectangles import assert_recorded, build, generate, route_of

FACTOR = 3.0


def assert_same_samples(model: PreTrainedModel, inputs: dict[str, Any], num_tokens: int) -> None:
    """Compares samples, which a small difference of logits changes, with plain's. Code that changes
    with the number of keys would give prefixes other keys and values, too."""
    options = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens, "do_sample": True}
    expected = generate(model, inputs, False, **options)
    cache_config = {"block_size": 8, "prefix_caching": False}
    output = generate(model, inputs, True, **options, cache_config=cache_config)
    assert torch.equal(output, expected)
    check_integrity(model)


@pytest.mark.slow_cases("40")
@pytest.mark.parametrize("window", [40, 100])  # within the first graph's tables, and the second's
def test_a_window_of_the_models_own_code(window: int) -> None:
    """GPT-Neo takes the window from the end of the keys that it gets."""
    config = transformers.GPTNeoConfig(
        vocab_size=160,
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        attention_types=[[["global", "local"], 1]],
        window_size=window,
        max_position_embeddings=300,
        intermediate_size=48,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.GPTNeoForCausalLM(config).eval()
    spread_weights(model, 0)
    ids = torch.randint(5, 150, (2, 11), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[1, :5] = 0
    for num_tokens in (20, 20, 140, 140, 20):
        assert_same_samples(model, {"input_ids": ids, "attention_mask": mask}, num_tokens)


class LongerRoFormer(RoFormerSelfAttention):
    least: int

    def forward(self, hidden_states: Any, attention_mask: Any = None, **kwargs: Any) -> Any:
        output, *others = super().forward(hidden_states, attention_mask, **kwargs)
        num_keys = 0 if attention_mask is None else attention_mask.shape[-1]
        return (output * (FACTOR if num_keys > self.least else 1.0), *others)


class LongerBloom(BloomAttention):
    least: int

    def forward(self, hidden_states: Any, residual: Any, alibi: Any, *args: Any, **kw: Any) -> Any:
        output, *others = super().forward(hidden_states, residual, alibi, *args, **kw)
        return (output * (FACTOR if alibi.shape[-1] > self.least else 1.0), *others)


@pytest.mark.slow_cases("*-False")
@pytest.mark.parametrize("is_short_first", [False, True])
@pytest.mark.parametrize(
    ("name", "least"),
    [("BloomForCausalLM", 50), ("BloomForCausalLM", 90), ("RoFormerForCausalLM", 90)],
)
def test_code_that_changes_with_the_number_of_keys(
    name: str, least: int, is_short_first: bool
) -> None:
    """A rectangle, and a packed step; the change is within the first graph's tables or within the
    second's."""
    model: Any = tiny_model(getattr(transformers, name))
    model.generation_config.eos_token_id = None
    new_class: Any = LongerBloom if name.startswith("Bloom") else LongerRoFormer
    for module in model.modules():
        if type(module) in new_class.__mro__[1:2]:
            module.__class__ = new_class
            module.least = least
    ids = torch.randint(5, 100, (2, 60), generator=torch.Generator().manual_seed(0))
    lengths = [(60, 50), (60, 50), (10, 50), (10, 90)]
    for prompt_length, num_tokens in sorted(lengths) if is_short_first else lengths:
        mask = torch.ones(2, prompt_length, dtype=torch.long)
        mask[1, :3] = 0
        inputs = {"input_ids": ids[:, :prompt_length], "attention_mask": mask}
        assert_same_samples(model, inputs, num_tokens)
        assert route_of(model).road == "engine"


class SoftBart(transformers.BartForConditionalGeneration):
    """Takes weights of its encoder's tokens in place of a mask."""

    def forward(self, input_ids: Any = None, attention_mask: Any = None, **kwargs: Any) -> Any:
        if attention_mask is not None:
            attention_mask = torch.log(attention_mask.float())[:, None, None, :]
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)


def soft_bart() -> Any:
    stock = build("BartForConditionalGeneration")
    model = SoftBart(stock.config).eval()
    model.load_state_dict(stock.state_dict())
    model.generation_config = stock.generation_config
    return model


def test_a_bias_of_the_encoders_columns_is_not_lost() -> None:
    model = soft_bart()
    inputs = next(iter(make_inputs(build("BartForConditionalGeneration"), 1).values()))
    weights = torch.ones(inputs["attention_mask"].shape)
    for weight in (1.0, 1.0, 0.3, 0.05, 0.001):
        weights[:, ::2] = weight
        assert_same_samples(model, {**inputs, "attention_mask": weights.clone()}, 24)


def test_arguments_that_a_subclass_passes_on_are_those_of_its_base() -> None:
    """BART's decoder counts the cache's tokens unless it gets a mask."""
    model = soft_bart()
    inputs = next(iter(make_inputs(build("BartForConditionalGeneration"), 1).values()))
    inputs["attention_mask"] = torch.ones(inputs["attention_mask"].shape)
    for _ in range(2):
        assert_same_samples(model, inputs, 24)
    assert_recorded(model, 20)
