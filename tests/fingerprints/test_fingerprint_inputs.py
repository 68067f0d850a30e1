"""Models that a fingerprint cannot read, or only by their parts, and what their calls then keep."""

from __future__ import annotations

import functools
import logging
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree
from transformers.models.llama.modeling_llama import LlamaAttention

from hf_paged import PagedEngine
from hf_paged.fingerprints import state
from tests.support import models
from tests.support.checks import assert_paged_is_plain
from tests.support.rooms import records_on_cpu

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 6}
PROMPT = models.token_ids(1, 34)[0].tolist()
HITS = 32  # tokens in full blocks of 8, short of the last


def plain(model: Any) -> list[int]:
    return model.generate(torch.tensor([PROMPT]), **GREEDY)[0, len(PROMPT) :].tolist()


def paged(engine: PagedEngine) -> tuple[list[int], int]:
    """New tokens, and the number of prompt tokens from the cache."""
    (result,) = engine.generate([PROMPT], GREEDY)
    assert result.error is None, result.error
    engine.check_integrity()
    return result.token_ids, result.num_prefix_hit_tokens


class Sealed(torch.Tensor):
    """A tensor whose content may be anywhere."""


def bound_partial(model: Any) -> None:
    """Like the wrapper that torchao puts on every layer that it quantizes."""
    for layer in model.model.layers:
        linear = layer.mlp.up_proj
        linear.extra_repr = types.MethodType(
            functools.partial(lambda note, self: note, "int8"), linear
        )


def sealed_tensor(model: Any) -> None:
    model.model.layers[0].scales = torch.ones(3).as_subclass(Sealed)


@pytest.mark.parametrize("change", [bound_partial, sealed_tensor])
def test_a_call_does_not_fail_for_what_hangs_on_a_model(change: Callable[[Any], None]) -> None:
    model, other = models.build("llama"), models.build("llama")
    change(model)
    change(other)
    ids = torch.tensor([PROMPT] * 4)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for _ in range(2):
        route = assert_paged_is_plain(model, inputs, GREEDY)
        is_told = any("not recorded" in x and "type Sealed" in x for x in route.slowed_by)
        assert is_told == (change is sealed_tensor and records_on_cpu())
        with PagedEngine(other, {"block_size": 8}) as engine:
            assert paged(engine)[0] == plain(other)


def test_what_cannot_be_read_is_not_kept_and_said_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = models.build("llama")
    sealed_tensor(model)
    with (
        caplog.at_level(logging.WARNING, "hf_paged"),
        PagedEngine(model, {"block_size": 8}) as engine,
    ):
        for _ in range(3):
            assert paged(engine) == (plain(model), 0)
            assert engine.stats().cached_blocks == 0
    told = [
        record.getMessage() for record in caplog.records if "prefix caching" in record.getMessage()
    ]
    assert told == [
        "LlamaForCausalLM runs without prefix caching: changes to it cannot be detected (a"
        " tensor of type Sealed, which has no `__tensor_flatten__`)"
        " [troubleshooting.md#prefix-cache]"
    ]
    del model.model.layers[0].scales
    with PagedEngine(model, {"block_size": 8}) as engine:
        assert [paged(engine)[1] for _ in range(2)] == [0, HITS]


def test_each_reason_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    """Numbers in it, such as those of free memory, make no other reason."""
    model = models.build("llama")
    with caplog.at_level(logging.WARNING, "hf_paged"):
        for _ in range(2):
            for reason in ("a hook", "out of memory: 3.5 MiB free", "out of memory: 17 MiB free"):
                state.warn_uncached(model, ValueError(reason))
        state.warn_uncached(models.build("llama"), "a hook")
    told = [record.getMessage() for record in caplog.records]
    assert [message.split("caching: ")[1].split(" [")[0] for message in told] == [
        "a hook",
        "out of memory: 3.5 MiB free",
        "a hook",
    ]


class Wrapped(torch.Tensor):
    """A tensor that contains another one, like quantized weights."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["inner"], {"bits": 8}

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, kinds: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = _pytree.tree_map_only(cls, lambda x: x.inner, (args, kwargs or {}))
        found = function(*args, **kwargs)
        return Wrapped(found) if function is torch.ops.aten.detach.default else found


def negate(model: Any, patch: pytest.MonkeyPatch) -> None:
    model.model.layers[0].mlp.up_proj.weight.inner.mul_(-1)


def patch_class(model: Any, patch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward

    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        output, *others = original(self, *args, **kwargs)
        return -output, *others

    patch.setattr(LlamaAttention, "forward", forward)


@pytest.mark.parametrize("change", [negate, patch_class])
def test_wrapped_weights_are_read_by_their_parts_and_so_are_patched_classes(
    change: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.build("llama")
    for layer in model.model.layers:
        wrapped = Wrapped(layer.mlp.up_proj.weight.detach())
        layer.mlp.up_proj.weight = nn.Parameter(wrapped, requires_grad=False)
    with PagedEngine(model, {"block_size": 8}) as engine:
        before = plain(model)
        assert [paged(engine) for _ in range(2)] == [(before, 0), (before, HITS)]
        change(model, monkeypatch)
        after = plain(model)
        assert after != before, "the change does nothing: the test is void"
        assert [paged(engine) for _ in range(2)] == [(after, 0), (after, HITS)]
