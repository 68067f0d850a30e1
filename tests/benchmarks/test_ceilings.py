"""Costs that are computed, against numbers worked out by hand."""

from __future__ import annotations

import pytest
import torch
from transformers import AutoModelForCausalLM

from benchmarks import ceilings, side_by_side
from benchmarks.ceilings import Cost, call_seconds
from benchmarks.models import SHAPES, Shape, build
from benchmarks.systems import latencies

SHAPE = Shape("by hand", "llama", 8, 2, 2, 1, 4, 16, 32)
LIMITS = ceilings.Ceilings(bandwidth=1000.0, flops={"bfloat16": 100_000.0})
COST = Cost(SHAPE, body=400, head=100, itemsize=2)  # 1000 bytes of weights: one second
KV = 2 * 2 * 1 * 4 * 2  # bytes per token: K and V, 2 layers, 1 head of 4, 2 bytes


def test_a_step_reads_weights_and_keys_or_computes():
    # 123 tokens: 2 * (400 * 123 + 100 * 2) operations take 0.988 s, the weights 1 s; then rows of
    # 50 and 75 tokens are read
    seconds = call_seconds(COST, LIMITS, 100_000.0, [49, 74], [2, 2])
    assert seconds == pytest.approx(1.0 + 1.0 + 125 * KV / 1000)
    # 200 tokens through the body, 4 through the head: 2 * (80,000 + 400) operations
    assert call_seconds(COST, LIMITS, 100_000.0, [50] * 4, [1] * 4) == pytest.approx(1.608)


def test_a_call_is_one_prefill_and_the_steps_of_the_rows_that_are_open():
    # prefill of 3 + 5 tokens: 1 s; then rows of 4 and 6 tokens, then of 5 alone: the second row
    # stops after 2 tokens
    seconds = call_seconds(COST, LIMITS, 100_000.0, [3, 5], [3, 2])
    assert seconds == pytest.approx(1.0 + (1.0 + 10 * KV / 1000) + (1.0 + 5 * KV / 1000))
    # prompts that begin alike are computed once and read by every row
    slow = 1000.0  # operations a second, so that the prefill's show
    seconds = call_seconds(COST, LIMITS, slow, [30, 40], [2, 2], rows_per_prompt=3, shared=20)
    prefill = 2 * (400 * 50 + 100 * 6) / slow
    decode = 2 * (400 * 6 + 100 * 6) / slow + 3 * (31 + 41) * KV / 1000
    assert seconds == pytest.approx(prefill + decode)


@pytest.mark.parametrize("tied", [True, False])
def test_cost_of_a_model_leaves_out_what_is_only_looked_up(tied):
    shape = Shape("small", "llama", 16, 1, 2, 1, 8, 32, 64, tied=tied)
    model = build(shape, "cpu", torch.bfloat16)
    total = sum(parameter.numel() for parameter in model.parameters())
    cost = Cost.of(model, shape)
    assert cost.head == 64 * 16 and cost.itemsize == 2
    assert cost.body + cost.head == (total if tied else total - 64 * 16)
    assert model.dtype == torch.bfloat16


def test_parameters_of_the_named_shapes():
    """In billions, as in the models' cards; those of 100M are about that large."""
    cards = {"llama-3.2-1b": 1.24, "llama-3.1-8b": 8.03, "qwen2.5-0.5b": 0.49, "qwen3-0.6b": 0.6}
    with torch.device("meta"):
        for name, expected in cards.items():
            model = AutoModelForCausalLM.from_config(SHAPES[name].config())
            count = sum(parameter.numel() for parameter in model.parameters())
            assert count / 1e9 == pytest.approx(expected, abs=0.006), name
        for name in side_by_side.SHAPES.keys() - side_by_side.FULL:
            model = side_by_side.build(name, is_tiny=False)
            count = sum(parameter.numel() for parameter in model.parameters())
            assert 60e6 < count < 160e6, f"{name}: {count:,} parameters"


def test_latency_figures():
    found = latencies([[1.0, 1.5, 2.5], [3.0]], [0.0, 1.0])
    assert found["TTFT p50, ms"] == pytest.approx(1500)
    assert found["TPOT p99, ms"] == pytest.approx(995)
    assert latencies([[], []], [0.0, 0.0]) == {}


def test_ceilings_are_positive():
    found = ceilings.measure("cpu", quick=True)
    assert found.bandwidth > 1e8 and set(found.flops) == {"bfloat16", "float32"}
    assert min(found.flops.values()) > 1e8
