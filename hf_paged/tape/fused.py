"""Lists of small operations as Triton kernels: the code of each list is generated and compiled
once."""

from __future__ import annotations

import functools
import hashlib
import linecache
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..kernels.triton import numbers
from ..kernels.triton.launch import launch as launch_kernel
from .rows import Instruction, Rows
from .values import Ref

_TILE = 1024  # numbers in a register: a part of a row, or several short rows
_TYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}
# by an instruction's dtype number
_ROUNDED = ("{}", "numbers.to_bfloat16({})", "numbers.to_float16({})")
_BINARY = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "tl.div_rn({}, {})",
    "maximum": "numbers.maximum({}, {})",
    "minimum": "numbers.minimum({}, {})",
}
_UNARY = {
    "neg": "{} * -1.0",
    "abs": "tl.abs({})",
    "sqrt": "tl.sqrt_rn({})",
    "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({}))",
    "reciprocal": "tl.div_rn(1.0, {})",
    "square": "{0} * {0}",
    "exp": "tl.exp({})",
    "log": "tl.log({})",
    "sin": "tl.sin({})",
    "cos": "tl.cos({})",
    "copy": "{}",
    "relu": "numbers.relu({})",
    "tanh": "numbers.tanh({})",
    "sigmoid": "numbers.sigmoid({})",
    "silu": "numbers.silu({})",
    "gelu": "numbers.gelu({})",
    "gelu_tanh": "numbers.gelu_tanh({})",
}


def launch(rows: Rows, tensor_of: Callable[[Ref], Tensor]) -> None:
    """Runs a list on the tensors that `tensor_of` returns. Raises `LaunchFailedError`."""
    accesses = _by_memory(rows.instructions)
    layouts = [rows.layouts[each.memory] for each in accesses]
    tensors = [tensor_of(each.ref) for each in layouts]
    strides = [stride for each in layouts for stride in each.strides if stride]
    first, second, third = rows.shape.rows
    num_rows = first * second * third
    block, num_tile_rows = tile_of(rows)
    num_row_tiles = triton.cdiv(num_rows, num_tile_rows)
    num_column_tiles = triton.cdiv(rows.shape.width, block)
    grid = num_row_tiles, num_column_tiles
    tile_size = block * num_tile_rows
    num_warps = min(16, max(1, tile_size // 512))
    kernel = compiled(source(rows))
    launch_kernel(
        kernel,
        grid,
        *tensors,
        *strides,
        num_rows,
        second,
        third,
        num_warps=num_warps,
        # without fused multiply-add: products and sums are rounded separately, as in two operations
        enable_fp_fusion=False,
        writes=tensors,
    )


def tile_of(rows: Rows) -> tuple[int, int]:
    """Columns and rows of a program's tile: whole rows if the list reduces over them."""
    is_whole = any(each.op in ("sum", "mean", "largest") for each in rows.instructions)
    block = triton.next_power_of_2(rows.shape.width)
    if not is_whole:
        block = min(block, _TILE)
    num_rows = max(1, _TILE // block)
    return block, num_rows


def source(rows: Rows) -> str:
    """The code of a list. Numbers of rows and strides are arguments, so that layers and other batch
    sizes share it."""
    block, num_tile_rows = tile_of(rows)
    width = rows.shape.width
    accesses = _by_memory(rows.instructions)
    memories = {each.memory: number for number, each in enumerate(accesses)}
    names = [f"data_{number}" for number in memories.values()]
    for memory, number in memories.items():
        strides = rows.layouts[memory].strides
        names += [f"stride_{number}_{axis}" for axis, stride in enumerate(strides) if stride]
    lines = [
        (
            f"    row = tl.program_id(0).to(tl.int64) * {num_tile_rows} + tl.arange(0,"
            f" {num_tile_rows})[:, None]"
        ),
        f"    column = tl.program_id(1) * {block} + tl.arange(0, {block})[None, :]",
        "    is_row = row < num_rows",
        f"    inside = is_row & (column < {width})",
        "    third = row % size_2",
        "    second = row // size_2 % size_1",
        "    first = row // size_2 // size_1",
    ]
    for each in rows.instructions:
        lines += [f"    {line}" for line in _lines(rows, each, memories)]
    names += ["num_rows", "size_1", "size_2"]
    parameters = ", ".join(names)
    head = "@triton.jit(do_not_specialize=['num_rows', 'size_1', 'size_2'])"
    return "\n".join([head, f"def fused_rows({parameters}):", *lines, ""])


def _by_memory(instructions: list[Instruction]) -> list[Instruction]:
    accesses = {each.memory: each for each in instructions if each.memory >= 0}
    return list(accesses.values())


def _lines(rows: Rows, each: Instruction, memories: dict[int, int]) -> list[str]:
    out = f"r{each.out}"
    inputs = [f"r{register}" for register in each.inputs]
    if each.memory >= 0:
        layout = rows.layouts[each.memory]
        number = memories[each.memory]
        names = ("first", "second", "third")
        parts = []
        for axis, (name, stride) in enumerate(zip(names, layout.strides)):
            if stride:
                parts.append(f"{name} * stride_{number}_{axis}")
        if not parts:
            parts.append("row * 0")
        mask = "is_row"
        if not layout.is_narrow:
            parts.append(f"column.to(tl.int64) * {layout.step}")
            mask = "inside"
        at = f"data_{number} + ({' + '.join(parts)})"
        if each.op == "load":
            return [f"{out} = tl.load({at}, mask={mask}, other=0.0).to(tl.float32)"]
        dtype = _TYPES[layout.ref.dtype]
        return [f"tl.store({at}, {inputs[0]}.to({dtype}), mask={mask})"]
    if each.op in ("sum", "mean"):
        code = f"tl.sum(tl.where(inside, {inputs[0]}, 0.0), axis=1, keep_dims=True)"
        if each.op == "mean":
            code += f" * {1 / rows.shape.width!r}"
    elif each.op == "largest":
        code = f'numbers.largest(tl.where(inside, {inputs[0]}, float("-inf")))'
    elif each.op in _BINARY:
        template = _BINARY[each.op]
        if len(inputs) == 2:
            operand = inputs[1]
        else:
            operand = _literal(each.number)
        code = template.format(inputs[0], operand)
    else:
        template = _UNARY[each.op]
        code = template.format(inputs[0])
    rounded = _ROUNDED[each.dtype].format(code)
    return [f"{out} = {rounded}"]


def _literal(number: float) -> str:
    """Code of a float32 number. Triton would widen literals outside the float32 range, and lose the
    sign of -0."""
    rounded = torch.tensor(number, dtype=torch.float32, device="cpu")
    bits = int(rounded.view(torch.int32))
    value = float(rounded)
    is_normal = 1e-37 < abs(value) < float("inf")
    if is_normal or not bits:
        return repr(value)
    return f"tl.full((), {bits}, tl.int32).to(tl.float32, bitcast=True)"


@functools.cache
def compiled(code: str) -> Any:
    """Compiles the kernel. Triton reads its source from a file, for which `linecache` gets an
    entry."""
    digest = hashlib.sha256(code.encode()).hexdigest()
    name = f"<hf_paged list {digest[:16]}>"
    lines = code.splitlines(keepends=True)
    names: dict[str, Any] = {
        "triton": triton,
        "tl": tl,
        "numbers": numbers,
        "__name__": __name__,
    }
    linecache.cache[name] = len(code), None, lines, name
    exec(compile(code, name, "exec"), names)
    return names["fused_rows"]
