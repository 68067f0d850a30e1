"""Products with few rows in forwards that run as modules."""

from __future__ import annotations

import contextlib
import copy
import platform
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from hf_paged import PagedEngine
from hf_paged.kernels.cpp import linear as kernel
from hf_paged.kernels.cpp.build import batch_invariant, observer
from hf_paged.kernels.cpp.compiler import cpu_flags
from hf_paged.tape import products
from hf_paged.tape.products import KernelProducts
from tests.support import models

pytestmark = pytest.mark.usefixtures("needs_compiler")


class Calls(list[torch.Size]):
    """The shapes of the products that ours computes, and those that it computes in float32."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.widened: list[torch.Size] = []
        self._patch = monkeypatch.setattr
        self._observe("linear", self)
        self._observe("linear_float32", self.widened)

    def _observe(self, name: str, shapes: list[torch.Size]) -> None:
        original = getattr(products, name)

        def observed(x: torch.Tensor, *others: Any) -> torch.Tensor:
            shapes.append(x.shape)
            return original(x, *others)

        self._patch(products, name, observed)

    def set_native(self, is_native: bool) -> None:
        """Makes PyTorch have products of half precision, or none."""
        for module in (products, kernel):
            self._patch(module, "is_native", lambda dtype: is_native)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    return Calls(monkeypatch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_it_computes_what_pytorch_does(
    dtype: torch.dtype, has_bias: bool, calls: Calls, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many rows in float32 where PyTorch converts each number."""
    layer = nn.Linear(96, 40, bias=has_bias).to(dtype)
    exact = copy.deepcopy(layer).float()

    def check(x: torch.Tensor) -> None:
        with KernelProducts():
            found = layer(x)
        assert found.shape == (*x.shape[:-1], 40) and found.dtype is dtype
        torch.testing.assert_close(found.float(), exact(x.float()), rtol=1e-2, atol=1e-2)

    for shape in ((1, 7, 96), (3, 96), (96,), (2, 3, 1, 96)):
        check(torch.randn(shape).to(dtype))
        check(torch.randn(*shape[:-1], 192).to(dtype)[..., ::2])
    assert len(calls) == 8
    monkeypatch.setattr(kernel, "FLOAT32_ELEMENTS", 96 * 7)
    monkeypatch.setattr(kernel, "MAX_ROWS", dict.fromkeys(kernel.MAX_ROWS, 64))
    for is_native, widened in ((True, []), (False, [(150, 96)])):
        calls.set_native(is_native)
        check(torch.randn(3, 50, 96).to(dtype))
        assert calls.widened == widened and len(calls) == 8


def test_few_dimensions_and_many_rows() -> None:
    """Inputs that `F.linear` refuses are still refused; with many rows, memory is bounded as for
    the weights read."""
    weight = torch.randn(512, 16).to(torch.bfloat16)
    with torch.no_grad(), KernelProducts():
        with pytest.raises(RuntimeError):
            F.linear(torch.tensor(1.0).to(torch.bfloat16), weight)
    x = torch.randn(20000, 16).to(torch.bfloat16)
    torch.testing.assert_close(
        kernel.linear_float32(x, weight), F.linear(x.float(), weight.float()).to(torch.bfloat16)
    )


def test_which_products_pytorch_has() -> None:
    if platform.machine() == "x86_64":
        assert kernel.is_native(torch.bfloat16) is ("avx512bw" in cpu_flags())
    assert kernel.is_native(torch.float32)
    with torch.backends.mkldnn.flags(enabled=False):
        assert (
            not kernel.is_native(torch.bfloat16)
            and kernel.max_rows(torch.bfloat16) == kernel.MAX_ROWS_WITHOUT_NATIVE
        )


@torch.no_grad()
def test_what_it_leaves_to_pytorch(calls: Calls) -> None:
    calls.set_native(True)
    layer, x = nn.Linear(32, 16).bfloat16(), torch.randn(4, 32).bfloat16()
    many = torch.randn(kernel.max_rows(torch.bfloat16) + 1, 32).bfloat16()
    for each, context in (
        (many, contextlib.nullcontext()),
        (x[:0], contextlib.nullcontext()),
        (x, torch.enable_grad()),
        (x, torch.autocast("cpu", torch.bfloat16)),
        (x, setting(observer, lambda *call: None)),
        (x, setting(batch_invariant, True)),
    ):
        with KernelProducts(), context:
            assert layer(each).shape == (len(each), 16)
    with KernelProducts(), pytest.raises(RuntimeError):
        F.linear(x, torch.randn(16, 31).bfloat16())
    with KernelProducts():
        layer.float()(x.float())
    assert calls == []


@contextlib.contextmanager
def setting(variable: Any, value: Any) -> Iterator[None]:
    token = variable.set(value)
    yield
    variable.reset(token)


@pytest.mark.parametrize("rows", [5, 128, 140])
@torch.no_grad()
def test_conv1d_where_pytorch_converts_each_number(rows: int, calls: Calls) -> None:
    layer, x = Conv1D(40, 96).bfloat16(), torch.randn(1, rows, 96).bfloat16()
    expected = copy.deepcopy(layer).float()(x.float())
    for is_native, count in ((True, 0), (False, int(rows <= 128))):
        calls.set_native(is_native)
        with KernelProducts():
            torch.testing.assert_close(layer(x).float(), expected, rtol=1e-2, atol=1e-2)
        assert len(calls) == count
    with KernelProducts():  # other ways to call it
        torch.addmm(layer.bias, x[0], layer.weight, alpha=2.0, beta=0.0)
        torch.addmm(layer.bias, mat1=x[0], mat2=layer.weight)
    assert len(calls) == count


@torch.no_grad()
def test_tensors_whose_numbers_are_not_where_they_seem(calls: Calls) -> None:
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((4, 32), (16, 32), (32,)))
    for each in (
        (torch._neg_view(x), weight),
        (x, torch._neg_view(weight)),
        (x.to_sparse(), weight),
        *((x, weight, b) for b in (bias[:1], bias[:16].view(1, 16), bias[0], bias[::2])),
        (x.t()[:1].t(), weight[:, :1]),
        (x[:1].t()[:1].t(), weight[:1].t()[:1].t()),
    ):
        expected = F.linear(*each)
        with KernelProducts():
            assert torch.equal(F.linear(*each), expected)
    assert calls == []


@pytest.mark.slow_cases("compile")
@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        torch.func.functionalize,
        lambda f: torch.compile(f, backend="eager", fullgraph=True),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.jit.trace(f, torch.ones(4, 32).bfloat16()),
        lambda f: make_fx(f)(torch.ones(4, 32).bfloat16()),
    ],
    ids=["vmap", "functionalize", "compile", "jvp", "jit", "make_fx"],
)
@torch.no_grad()
def test_what_transforms_and_traces_see(transform: Any, calls: Calls) -> None:
    layer, x = nn.Linear(32, 16, bias=False).bfloat16(), torch.randn(4, 32).bfloat16()
    layer.requires_grad_(False)
    with KernelProducts():
        found = transform(lambda x: F.linear(x, layer.weight))(x)
    torch.testing.assert_close(found, layer(x))
    calls.clear()
    with KernelProducts(), FlopCounterMode(display=False) as counter:
        layer(x)
    assert counter.get_total_flops() == 2 * 4 * 32 * 16 and calls == []


def test_a_traced_module_in_a_model() -> None:
    model, inputs = models.build("llama"), models.padded_prompt("llama", (9, 5))
    mlp = model.model.layers[0].mlp
    with torch.no_grad():
        mlp.up_proj = torch.jit.trace(mlp.up_proj, torch.randn(1, 3, mlp.up_proj.in_features))
    options: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
    assert torch.equal(
        model.generate(**inputs, **options, **models.PAGED), model.generate(**inputs, **options)
    )


@pytest.mark.parametrize("is_compiled", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_prompts_of_an_engine(is_compiled: bool, calls: Calls) -> None:
    """Not in a model with compiled parts."""
    model = models.build("llama").bfloat16()
    if is_compiled:
        model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, backend="eager")
    with PagedEngine(model, {"capture": False}) as engine:
        result = engine.generate([[5, 6, 7, 8]], {"max_new_tokens": 3, "do_sample": False})[0]
    assert result.error is None and (not calls) == is_compiled
    assert is_compiled or {4, 1} <= {rows for rows, _ in calls}
