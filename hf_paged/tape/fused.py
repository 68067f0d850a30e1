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
from .rows import REDUCTIONS, Instruction, Layout, Rows
from .values import Ref

_TILE = 1024  # numbers in a register: a part of a row, or several short rows
_TYPES = {
    torch.float32: "tl.float32",
    torch.bfloat16: "tl.bfloat16",
    torch.float16: "tl.float16",
}
_ROUNDED = {
    torch.float32: "{}",
    torch.bfloat16: "numbers.to_bfloat16({})",
    torch.float16: "numbers.to_float16({})",
}
# of operations that Triton has; the others are functions of `numbers`
_CODE = {
    "add": "{} + {}",
    "sub": "{} - {}",
    "mul": "{} * {}",
    "div": "tl.div_rn({}, {})",
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
}


def launch(rows: Rows, tensor_of: Callable[[Ref], Tensor]) -> None:
    """Runs a list on the tensors that `tensor_of` returns. Raises `LaunchFailedError`."""
    layouts = rows.accesses()
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
    is_whole = any(each.op in REDUCTIONS for each in rows.instructions)
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
    layouts = rows.accesses()
    names = [f"data_{number}" for number in range(len(layouts))]
    for number, layout in enumerate(layouts):
        names += [f"stride_{number}_{axis}" for axis, stride in enumerate(layout.strides) if stride]
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
    number = 0
    for each in rows.instructions:
        if each.memory is None:
            lines.append(f"    r{each.out} = {_computation(each, width)}")
        else:
            lines.append(f"    {_access(each, each.memory, number)}")
            number += 1
    names += ["num_rows", "size_1", "size_2"]
    parameters = ", ".join(names)
    head = "@triton.jit(do_not_specialize=['num_rows', 'size_1', 'size_2'])"
    return "\n".join([head, f"def fused_rows({parameters}):", *lines, ""])


def _access(each: Instruction, layout: Layout, number: int) -> str:
    """The code of a load or store of the tensor with this number."""
    parts = []
    for axis, name in enumerate(("first", "second", "third")):
        if layout.strides[axis]:
            parts.append(f"{name} * stride_{number}_{axis}")
    if not parts:
        parts.append("row * 0")
    mask = "is_row"
    if not layout.is_narrow:
        parts.append(f"column.to(tl.int64) * {layout.step}")
        mask = "inside"
    at = f"data_{number} + ({' + '.join(parts)})"
    if each.op == "load":
        return f"r{each.out} = tl.load({at}, mask={mask}, other=0.0).to(tl.float32)"
    return f"tl.store({at}, r{each.out}.to({_TYPES[layout.ref.dtype]}), mask={mask})"


def _computation(each: Instruction, width: int) -> str:
    operands = [f"r{register}" for register in each.inputs]
    if each.op in ("sum", "mean"):
        code = f"tl.sum(tl.where(inside, {operands[0]}, 0.0), axis=1, keep_dims=True)"
        if each.op == "mean":
            code += f" * {1 / width!r}"
    elif each.op == "largest":
        code = f'numbers.largest(tl.where(inside, {operands[0]}, float("-inf")))'
    elif each.op in _CODE:
        # the last one is that of an operation on one register and a number
        code = _CODE[each.op].format(*operands, _literal(each.number))
    else:
        code = f"numbers.{each.op}({', '.join(operands)})"
    return _ROUNDED[each.dtype].format(code)


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
