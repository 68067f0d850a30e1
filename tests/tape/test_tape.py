"""Tapes give the results of the recorded forward, on other inputs, too."""

from __future__ import annotations

import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb
from transformers.pytorch_utils import Conv1D

from hf_paged.kernels.cpp import linear
from hf_paged.kernels.cpp.build import kernel
from hf_paged.step import NotCapturable
from hf_paged.tape.buffers import Arena, Buffers
from hf_paged.tape.entries import TorchOp
from hf_paged.tape.rows import CALL as ROWS_CALL
from hf_paged.tape.rows import INSTRUCTION, MEMORY, OP_NUMBERS
from hf_paged.tape.tape import Tape
from tests.support.kernel_fuzz import OPERATIONS
from tests.support.precision import default_precision

pytestmark = pytest.mark.usefixtures("needs_compiler")

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CLOSE = {torch.float32: 2e-6, torch.bfloat16: 1.6e-2, torch.float16: 2e-3}


class CountingTape(Tape):
    """Counts the operations of PyTorch that a replay calls."""

    num_calls = 0

    def _bind(self, entry: TorchOp) -> Callable[[], None]:
        self.num_calls += 1
        return super()._bind(entry)


def check(
    function: Callable[..., Any], *inputs: Tensor, exact: bool = False, calls: int | None = None
) -> Any:
    """Records the function on these inputs and compares it on others in the same memory."""
    found: list[Tensor] = []

    def results(*given: Tensor) -> tuple[Tensor, ...]:
        made = function(*given)
        return made if isinstance(made, tuple) else (made,)

    def run() -> None:
        made = results(*inputs)
        if not found:
            found.extend(x.clone() for x in made)
        for mine, its in zip(found, made):
            mine.copy_(its)

    with torch.no_grad():
        before = [x.clone() for x in inputs]
        run()  # allocates the results
        tape: Any = CountingTape.record(run, lambda tensor: False)
        generator = torch.Generator().manual_seed(5)
        for turn in range(3):
            for x, first in zip(inputs, before):
                if x.is_floating_point():
                    drawn = torch.randn(x.shape, generator=generator) * (1 + turn)
                    x.copy_(first if turn == 2 else drawn)
            expected = results(*(x.clone() for x in inputs))
            for x in found:
                x.fill_(7)
            tape.replay()
            for x, y in zip(found, expected):
                tolerance = 0 if exact else CLOSE.get(x.dtype, 0)
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance, equal_nan=True)
    if calls is not None:
        assert tape.num_calls == calls, "operations were called that kernels of ours should compute"
    return tape


def tensor(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_a_tape_knows_the_storages_that_it_reads_or_writes() -> None:
    """Also those to which it writes in place, and those of views; but not of what it computes."""
    read, viewed, written, unread = (tensor(3, 8, seed=seed) for seed in range(4))

    def run(x: Tensor) -> Tensor:
        written.add_(x)
        assert unread.shape == x.shape
        return (x * read + viewed.t()[:, 0].sum()).relu()

    x = tensor(3, 8, seed=4)
    tape = Tape.record(lambda: x.copy_(run(x)), lambda tensor: True)
    known = [tensor.untyped_storage().data_ptr() in tape.storages for tensor in (read, viewed)]
    assert known == [True, True]
    assert written.untyped_storage().data_ptr() in tape.storages
    assert unread.untyped_storage().data_ptr() not in tape.storages
    assert len(tape.storages) == 4


UNARY = (
    *OPERATIONS,
    *(ACT2FN["gelu_new"], ACT2FN["relu2"], lambda x: x**3, lambda x: 1.0 - x),
    lambda x: x / x.abs().sum(-1, keepdim=True),
)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("number", range(len(UNARY)))
def test_operations_on_one_tensor(number: int, dtype: torch.dtype) -> None:
    for shape in ((1, 1, 64), (3, 5), (1, 7, 33), (2, 3, 4, 17), (1, 1, 1)):
        check(UNARY[number], tensor(*shape, dtype=dtype))
    check(UNARY[number], tensor(6, 4, 10, dtype=dtype).transpose(0, 1))
    check(UNARY[number], tensor(6, 10, dtype=dtype).t())


@pytest.mark.parametrize("dtypes", list(itertools.product(DTYPES[:2], DTYPES[:2])), ids=str)
def test_operations_on_two_tensors(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    others = [(2, 3, 8), (8,), (2, 1, 8), (2, 3, 1), ()]
    for left, right in (((2, 3, 8), other) for other in others):
        a, b = tensor(*left, dtype=dtypes[0]), tensor(*right, dtype=dtypes[1], seed=1)
        check(lambda a, b: (a + b, a - b, a * b, a / b), a, b, exact=True, calls=0)
        check(lambda a, b: (a * b + b) * a, a, b, exact=True, calls=0)


def test_special_numbers() -> None:
    x = torch.linspace(-88.5, -86.5, 33).view(3, 11)  # whose exponentials are denormal
    check(lambda x: (x.exp().reciprocal(), x.exp() * (-x).exp(), x.exp().log()), x, calls=0)
    x = torch.tensor([[1.0, -2.0, 0.0, -0.0]])
    for number in (-0.0, 1e39, -1e39, 1e-40, 1e-300, float("inf"), 0.1):
        check(
            lambda x, n=number: (x * n, x / n, x + n, x - n, -x),
            x,
            exact=True,
        )
    inf, nan = torch.inf, torch.nan
    x = torch.tensor([[nan, 1.0, -1.0], [2.0, inf, 0.0], [30.0, -30.0, -inf]])
    check(lambda x: (x.clone(), x.relu(), x.tanh(), x.sigmoid()), x)
    check(lambda x: x.amax(-1, keepdim=True) + x, x)


@pytest.mark.parametrize("width", [64, 2048])
def test_one_number_a_row_in_place(width: int) -> None:
    """No part of a row may change the number that all of its parts share."""

    def scale(x: Tensor) -> Tensor:
        factor = x.pow(2).mean(-1, keepdim=True)
        factor.add_(1.0)
        factor.mul_(2.0)
        return x * factor

    check(scale, tensor(2, width))
    check(lambda x: x * x[:, :1].clone().mul_(2.0).add_(1.0), tensor(2, width))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norms(dtype: torch.dtype, rows: int) -> None:
    for make in (LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm, lambda n: nn.LayerNorm(n, bias=False)):
        norm = make(96).to(dtype)
        norm.weight.data = tensor(96, seed=3).to(dtype)
        check(norm, tensor(1, rows, 96, dtype=dtype), calls=0)
    check(LlamaRMSNorm(16).to(dtype), tensor(1, rows, 4, 16, dtype=dtype), calls=0)  # of each head
    check(nn.LayerNorm(96, elementwise_affine=False), tensor(1, rows, 96), calls=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_rotary_embeddings(dtype: torch.dtype, rows: int) -> None:
    def rotate(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        heads = (z.view(1, rows, -1, 16).transpose(1, 2) for z in (x, y))
        return apply_rotary_pos_emb(*heads, cos, sin)

    sizes = enumerate((64, 32, 16, 16))
    inputs = [tensor(1, rows, size, dtype=dtype, seed=seed) for seed, size in sizes]
    check(rotate, *inputs, exact=True, calls=0)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 17, 300])
def test_products(dtype: torch.dtype, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "cpu_vendor", lambda: "GenuineIntel")
    layers = nn.Linear(48, 96), nn.Linear(48, 96, bias=False), Conv1D(48, 96)
    gate, up, down = (layer.to(dtype) for layer in layers)
    down.weight.data = tensor(96, 48, seed=2).to(dtype) * 0.1
    tape = check(lambda x: down(F.silu(gate(x)) * up(x)), tensor(1, rows, 48, dtype=dtype))
    count = tape.num_calls, tape.kernel_names.count("linear")  # gate and up are one call
    if dtype is torch.float32:  # Conv1D is left to PyTorch
        assert count == ((1, 1) if rows <= 4 else (3, 0))
    else:
        assert count == ((0, 2) if rows <= 256 else (3, 0))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 64, 65])
def test_products_with_weights_of_8_bits(dtype: torch.dtype, rows: int) -> None:
    """As in torchao: the weight is converted, and scales multiply the product. The conversion is
    dropped where a kernel reads the codes; a conversion that something else reads is kept."""
    generator = torch.Generator().manual_seed(1)
    gate, up, down = (
        torch.randint(-128, 128, size, dtype=torch.int8, generator=generator)
        for size in ((96, 48), (96, 48), (33, 96))
    )
    scales = [tensor(len(codes), seed=3).to(dtype) * 1e-3 for codes in (gate, up, down)]

    def multiply(x: Tensor, codes: Tensor, scale: Tensor) -> Tensor:
        return x.mm(codes.t().to(x.dtype)) * scale

    def mlp(x: Tensor) -> Tensor:
        hidden = multiply(x, gate, scales[0]) * multiply(x, up, scales[1])
        return multiply(hidden, down, scales[2])

    x = tensor(rows, 48, dtype=dtype)
    tape = check(mlp, x, calls=0 if rows <= 64 else 6)
    assert tape.kernel_names.count("linear") == (2 if rows <= 64 else 0)  # gate and up are one call

    def reads_the_floats(x: Tensor) -> tuple[Tensor, Tensor]:
        floats = gate.t().to(x.dtype)
        return x.mm(floats) * 2e-3, floats * 2

    check(reads_the_floats, x, calls=1 if rows <= 64 else 2)
    square = gate[:48]

    def is_transposed(x: Tensor) -> tuple[Tensor, Tensor]:
        narrow = square.t().to(x.dtype)[:, 1:7]
        return x.mm(square.to(x.dtype)) * 2e-3, x.mm(narrow) * 2e-3

    check(is_transposed, x, calls=2 if rows <= 64 else 4)

    def is_written_to(x: Tensor) -> Tensor:
        return x.mm(gate.t().to(x.dtype).mul_(2e-3))

    tape = check(is_written_to, x)
    assert "linear" not in tape.kernel_names


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5, 65])
def test_products_with_weights_in_groups(dtype: torch.dtype, rows: int) -> None:
    """As in torchao: `(codes - zeros) * scales`, with scales of the model's dtype or in float32."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-8, 8, (40, 96), dtype=torch.int8, generator=generator)
    x, bias, num_calls = tensor(rows, 96, dtype=dtype), tensor(40, seed=2).to(dtype), 0

    def product(x: Tensor, zeros: Tensor | None, scales: Tensor) -> Tensor:
        length = 96 // scales.shape[1]
        in_groups = (40, length) if length == 96 else (40, -1, length)
        floats = codes.view(*in_groups).to(dtype, copy=True)
        if zeros is not None:
            floats = floats - zeros.view(*in_groups[:-1], 1).to(dtype)
        weight = (floats * scales.view(*in_groups[:-1], 1)).view(40, 96)
        return F.linear(x, weight.to(dtype), bias)

    read = itertools.product((96, 32, 16), (False, True), {dtype, torch.float32})
    for length, has_zeros, scale_dtype in (*read, (48, True, dtype), (8, True, dtype)):
        shape = 40, 96 // length
        zeros = torch.randint(-8, 8, shape, dtype=torch.int8, generator=generator)
        scales = (torch.rand(shape, generator=generator) * 0.02).to(scale_dtype)
        given = dict(zeros=zeros if has_zeros else None, scales=scales)
        is_read = length in (96, 32, 16) and rows <= 64  # in groups that the kernel reads
        tape = check(functools.partial(product, **given), x, calls=0 if is_read else None)
        assert is_read or "linear" not in tape.kernel_names
        num_calls += tape.kernel_names.count("linear")
    assert (num_calls > 0) is (rows <= 64)


@pytest.mark.parametrize("rounded", [torch.bfloat16, torch.float16], ids=str)
def test_products_with_weights_of_8_bits_that_were_rounded(rounded: torch.dtype) -> None:
    """The kernel takes no weights that a forward rounds to less than the product's precision."""
    generator = torch.Generator().manual_seed(1)
    codes = torch.randint(-128, 128, (40, 3, 32), dtype=torch.int8, generator=generator)
    scales = torch.rand(40, 3, 1, generator=generator) * 1e-3

    def product(x: Tensor, scales: Tensor) -> Tensor:
        weight = (codes.to(rounded) * scales).view(40, 96)
        return F.linear(x, weight.to(rounded).to(x.dtype))

    for dtype, is_read in ((torch.float32, False), (rounded, True)):
        for given in (scales, scales.to(rounded)):
            tape = check(functools.partial(product, scales=given), tensor(5, 96, dtype=dtype))
            assert ("linear" in tape.kernel_names) is is_read


def test_which_products_in_float32_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, most in (("AuthenticAMD", 64), ("GenuineIntel", 4), ("", 0)):
        monkeypatch.setattr(linear, "cpu_vendor", functools.partial(str, vendor))
        assert linear.max_rows(torch.float32) == most
        assert linear.max_rows(torch.float32, is_transposed=True) == 0
        assert linear.max_rows(torch.float32, has_codes=True) == 64
        assert linear.max_rows(torch.float32, is_transposed=True, has_codes=True) == 0
        with default_precision():
            torch.set_float32_matmul_precision("medium")
            assert linear.max_rows(torch.float32) == 0
            assert linear.max_rows(torch.float32, has_codes=True) == 0


def test_a_list_that_loads_from_no_memory_is_refused() -> None:
    numbers, registers = torch.ones(4), ctypes.c_int32(0)
    memories = ctypes.create_string_buffer(2 * MEMORY.pack(numbers.data_ptr(), 0, 0, 0, 0, 1))
    for number, error in ((0, 0), (1, 4), (-1, 4)):
        instruction = ctypes.create_string_buffer(
            INSTRUCTION.pack(OP_NUMBERS["load"], 0, 0, number, 0, 0, 0.0)
        )
        starts = (
            ctypes.addressof(memories) + MEMORY.size,
            ctypes.addressof(instruction),
            ctypes.addressof(registers),
        )
        assert kernel("rows")(ROWS_CALL.pack(1, 1, 1, 4, 1, 1, 1, 1, *starts)) == error


def _in_place(x: Tensor) -> tuple[Tensor, Tensor]:
    y = x * 2
    z = y + 1
    y.add_(x)
    y.mul_(3.0)
    w = torch.zeros(6, 12)
    w[1:4] = y
    w[0].copy_(z[0])
    return y * z, w


def _another_layout(x: Tensor) -> Tensor:
    y = (x + 1).view(4, 9)
    z = y.t() * 2
    return (z.t() + y).view(2, 18) * (y + 3).view(2, 18)


def _parts_and_wholes(x: Tensor) -> Tensor:
    a, b, c = x.chunk(3, dim=-1)
    y = torch.cat([b * 2, -a, c], dim=-1)
    z = torch.cat([y, x], dim=0)
    return z[..., 2:9] + z[..., :7]


def _constants(x: Tensor) -> Tensor:
    steps = torch.arange(12, dtype=torch.float32) / 8
    return x * steps + torch.tensor(0.5) + torch.full((12,), 2.0)


def _scalars(x: Tensor) -> Tensor:
    return torch.ops.aten.add.Scalar(x, 2, 3) + torch.ops.aten.sub.Tensor(x, x * 2, alpha=3)


@pytest.mark.parametrize(
    ("function", "calls"),
    [
        (_in_place, None),
        (_another_layout, None),
        (_parts_and_wholes, 0),
        (_constants, 0),
        (_scalars, None),
    ],
)
@pytest.mark.parametrize("is_inference", [False, True])
def test_memory(function: Callable[..., Any], calls: int | None, is_inference: bool) -> None:
    """What is written in place, is read in another layout or in parts, or is made once."""
    with torch.inference_mode(is_inference):
        check(function, tensor(3, 12), exact=function is not _scalars, calls=calls)


def test_an_empty_view_of_a_buffer_has_no_address() -> None:
    """Such as the values of a model that stores none: some kernels take their address, too."""
    buffers = Buffers()
    x = tensor(3, 12)
    buffers.add(x)
    arena = Arena(buffers, {0: (0, 0)})
    assert arena.address(buffers.ref(x[:, 12:])) == 0
    assert arena.tensor(buffers.ref(x[:, 12:])).shape == (3, 0)
    assert arena.address(buffers.ref(x[1:])) == arena.address(buffers.ref(x)) + x[0].nbytes


def test_buffers_share_memory() -> None:
    def function(x: Tensor) -> Tensor:
        for _ in range(20):
            x = x.softmax(-1) * 3
        return x

    tape = check(function, tensor(64, 256))
    assert tape._arena._memory.nbytes <= 4 * 64 * 256 * 4 + 64


REFUSED: dict[str, Callable[[Tensor], Any]] = {
    "mask": lambda x: x[x > 0],
    "item": lambda x: x * x.sum().item(),
    "dropout": F.dropout,
    "nonzero": lambda x: x.nonzero() * 1.0,
    "tolist": lambda x: x + x.tolist()[0][0],
    "numpy": lambda x: x + torch.from_numpy(x.numpy() * 2),
    "conj": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 4, 2)).conj()),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_run_again(name: str) -> None:
    with pytest.raises(NotCapturable):
        Tape.record(lambda: REFUSED[name](tensor(4, 8)) and None, lambda tensor: False)


@pytest.mark.parametrize(
    "between", [lambda z: z, lambda z: z.softmax(-1)], ids=["nothing", "a call"]
)
def test_what_is_written_outside_is_read_in_its_order(between: Callable[[Tensor], Tensor]) -> None:
    x, kept, found = tensor(4, 8), torch.ones(4, 8), torch.zeros(4, 8)

    def run() -> None:
        z = x * kept
        kept.add_(between(x + 1))
        found.copy_(z + kept)

    with torch.no_grad():
        run()
        tape = Tape.record(run, lambda tensor: False)
        for turn in range(3):
            x.copy_(tensor(4, 8, seed=turn))
            before = kept.clone()
            tape.replay()
            after, replayed = kept.clone(), found.clone()
            kept.copy_(before)
            run()
            torch.testing.assert_close(replayed, found)
            torch.testing.assert_close(after, kept)


def test_values_that_suit_any_number_of_masked_elements() -> None:
    value = tensor(3, seed=1)

    def written(x: Tensor) -> tuple[Tensor, ...]:
        rows, row, columns = x.clone(), x.clone(), x.clone()
        rows[x[:, 0] > 0] = value
        row[x[:, 0] > 0] = value[None]
        columns[:, x[0] > 0] = value[:1]
        return rows, row, columns

    check(written, tensor(5, 3), exact=True)


def test_a_constant_mask_selects_the_same_number_of_elements_each_time() -> None:
    def selected(x: Tensor) -> Tensor:
        doubled = torch.zeros_like(x)
        for kind in range(3):  # no row is of the last kind
            is_of_kind = torch.arange(5) % 2 == kind
            doubled[is_of_kind] = x[is_of_kind] @ torch.eye(3) * (kind + 1)
        return doubled

    check(selected, tensor(5, 3))
