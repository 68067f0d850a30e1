"""Products with few rows in forwards that run as modules."""

from __future__ import annotations

import contextlib
import platform
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode
from transformers.pytorch_utils import Conv1D

from hf_paged import PagedEngine
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp import linear as kernel
from hf_paged.kernels.cpp.build import batch_invariant, observer
from hf_paged.kernels.cpp.compiler import cpu_flags
from hf_paged.tape import products
from hf_paged.tape.products import KernelProducts, kernel_products
from tests.support import models

pytestmark = pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.Size]:
    """Records the shapes of the products that ours computes."""
    found: list[torch.Size] = []

    def linear(x: torch.Tensor, *others: Any) -> torch.Tensor:
        found.append(x.shape)
        return original(x, *others)

    original = products.linear
    monkeypatch.setattr(products, "linear", linear)
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_it_computes_what_pytorch_does(
    dtype: torch.dtype, has_bias: bool, calls: list[torch.Size]
) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(96, 40, bias=has_bias).to(dtype)
    for shape in ((1, 7, 96), (3, 96), (96,), (2, 3, 1, 96)):
        for x in (torch.randn(shape).to(dtype), torch.randn(*shape[:-1], 192).to(dtype)[..., ::2]):
            expected = F.linear(
                x.float(), layer.weight.float(), layer.bias.float() if has_bias else None
            )
            with KernelProducts():
                found = layer(x)
            assert found.shape == expected.shape and found.dtype is dtype
            torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)
    assert len(calls) == 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("has_bias", [False, True])
@torch.no_grad()
def test_many_rows_are_computed_in_float32_where_pytorch_converts_each_number(
    dtype: torch.dtype, has_bias: bool, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernel, "FLOAT32_ELEMENTS", 96 * 7)
    layer = nn.Linear(96, 40, bias=has_bias).to(dtype)
    x = torch.randn(3, 50, 96).to(dtype)
    expected = F.linear(x.float(), layer.weight.float(), layer.bias.float() if has_bias else None)
    widened: list[int] = []

    def observed(x: torch.Tensor, *others: Any) -> torch.Tensor:
        widened.append(len(x))
        return kernel.linear_float32(x, *others)

    monkeypatch.setattr(products, "linear_float32", observed)
    monkeypatch.setattr(kernel, "MAX_ROWS", dict.fromkeys(kernel.MAX_ROWS, 64))
    for is_native in (True, False):
        for module in (products, kernel):
            monkeypatch.setattr(module, "is_native", lambda dtype, found=is_native: found)
        with KernelProducts():
            found = layer(x)
        assert widened == ([] if is_native else [150]) and calls == []
        torch.testing.assert_close(found.float(), expected, rtol=1e-2, atol=1e-2)


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
def test_what_it_leaves_to_pytorch(
    calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (products, kernel):
        monkeypatch.setattr(module, "is_native", lambda dtype: True)
    layer, x = nn.Linear(32, 16).bfloat16(), torch.randn(4, 32).bfloat16()
    left: list[tuple[nn.Module, torch.Tensor, contextlib.AbstractContextManager[Any]]] = [
        (nn.Linear(32, 16), torch.randn(4, 32), contextlib.nullcontext()),
        (
            layer,
            torch.randn(kernel.max_rows(torch.bfloat16) + 1, 32).bfloat16(),
            contextlib.nullcontext(),
        ),
        (layer, torch.randn(0, 32).bfloat16(), contextlib.nullcontext()),
        (layer, x, torch.enable_grad()),
        (layer, x, torch.autocast("cpu", torch.bfloat16)),
    ]
    for module, each, context in left:
        with KernelProducts(), context:
            assert module(each).shape == (len(each), 16)
    for variable, value in ((observer, lambda *call: None), (batch_invariant, True)):
        token = variable.set(value)  # type: ignore[arg-type]
        try:
            with KernelProducts():
                layer(x)
        finally:
            variable.reset(token)  # type: ignore[arg-type]
    with KernelProducts(), pytest.raises(RuntimeError):
        F.linear(x, torch.randn(16, 31).bfloat16())
    assert calls == []


@pytest.mark.parametrize("rows", [1, 5, 128, 140])
@torch.no_grad()
def test_conv1d_where_pytorch_converts_each_number(
    rows: int, calls: list[torch.Size], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x = Conv1D(40, 96).bfloat16(), torch.randn(1, rows, 96).bfloat16()
    expected = layer.float()(x.float())
    layer.bfloat16()
    for is_native, count in ((True, 0), (False, int(rows <= 128))):
        for module in (products, kernel):
            monkeypatch.setattr(module, "is_native", lambda dtype, found=is_native: found)
        with KernelProducts():
            torch.testing.assert_close(layer(x).float(), expected, rtol=1e-2, atol=1e-2)
        assert len(calls) == count
    with KernelProducts():  # other ways to call it
        found = torch.addmm(layer.bias, x[0], layer.weight, alpha=2.0, beta=0.0)
        torch.addmm(layer.bias, mat1=x[0], mat2=layer.weight)
    assert found.shape == (rows, 40) and len(calls) == count


@torch.no_grad()
def test_tensors_whose_numbers_are_not_where_they_seem(calls: list[torch.Size]) -> None:
    x, weight, bias = (torch.randn(shape).bfloat16() for shape in ((4, 32), (16, 32), (32,)))
    for each in (
        (torch._neg_view(x), weight),
        (x, torch._neg_view(weight)),
        (x.to_sparse(), weight),
        (x, weight, bias[:1]),
        (x, weight, bias[:16].view(1, 16)),
        (x, weight, bias[0]),
        (x, weight, bias[::2]),
        (x.t()[:1].t(), weight[:, :1]),
        (x[:1].t()[:1].t(), weight[:1].t()[:1].t()),
    ):
        expected = F.linear(*each)
        with KernelProducts():
            assert torch.equal(F.linear(*each), expected)
    assert calls == []


def _compiled(function: Any) -> Any:
    return torch.compile(function, backend="eager", fullgraph=True)


@pytest.mark.slow_cases("compile")
@pytest.mark.parametrize(
    "transform",
    [
        torch.func.vmap,
        torch.func.functionalize,
        _compiled,
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,))[1],
        lambda f: torch.jit.trace(f, torch.ones(4, 32).bfloat16()),
        lambda f: make_fx(f)(torch.ones(4, 32).bfloat16()),
    ],
    ids=["vmap", "functionalize", "compile", "jvp", "jit", "make_fx"],
)
@torch.no_grad()
def test_what_transforms_and_traces_see(transform: Any, calls: list[torch.Size]) -> None:
    layer, x = (
        nn.Linear(32, 16, bias=False).bfloat16().requires_grad_(False),
        torch.randn(4, 32).bfloat16(),
    )
    with KernelProducts():
        found = transform(lambda x: F.linear(x, layer.weight))
        found = found(x)
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


@pytest.mark.slow
def test_models_that_get_it() -> None:
    model = models.build("llama")
    assert not isinstance(kernel_products(model.modules()), KernelProducts)  # float32
    model = model.bfloat16()
    assert isinstance(kernel_products(model.modules()), KernelProducts)
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp)
    assert not isinstance(kernel_products(model.modules()), KernelProducts)


def test_prompts_of_an_engine(calls: list[torch.Size]) -> None:
    model = models.build("llama").bfloat16()
    with PagedEngine(model, {"capture": False}) as engine:
        result = engine.generate([[5, 6, 7, 8]], {"max_new_tokens": 3, "do_sample": False})[0]
    assert (
        result.error is None
        and {len(shape) for shape in calls} == {2}
        and {4, 1} <= {rows for rows, _ in calls}
    )
