"""Lists of small operations as Triton kernels: the code of each list is generated and compiled once."""

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
from .rows import Instruction, Rows
from .values import Ref

_TILE = 1024  # numbers in a register: a part of a row, or several short rows
_TYPES = {torch.float32: "tl.float32", torch.bfloat16: "tl.bfloat16", torch.float16: "tl.float16"}
_ROUNDED = ("{}", "numbers.to_bfloat16({})", "numbers.to_float16({})")  # by an instruction's dtype number
_BINARY = {"add": "{} + {}", "sub": "{} - {}", "mul": "{} * {}", "div": "tl.div_rn({}, {})"}
_BINARY |= {"maximum": "numbers.maximum({}, {})", "minimum": "numbers.minimum({}, {})"}
_UNARY = {
    **{"neg": "{} * -1.0", "abs": "tl.abs({})", "sqrt": "tl.sqrt_rn({})", "rsqrt": "tl.div_rn(1.0, tl.sqrt_rn({}))"},
    **{"reciprocal": "tl.div_rn(1.0, {})", "square": "{0} * {0}", "exp": "tl.exp({})", "log": "tl.log({})"},
    **{"sin": "tl.sin({})", "cos": "tl.cos({})", "copy": "{}"},
    **{name: f"numbers.{name}({{}})" for name in ("relu", "tanh", "sigmoid", "silu", "gelu", "gelu_tanh")},
}


def launch(rows: Rows, tensor_of: Callable[[Ref], Tensor]) -> None:
    """Runs a list on the tensors that `tensor_of` returns."""
    layouts = [rows.layouts[each.memory] for each in _by_memory(rows.instructions)]
    tensors = [tensor_of(each.ref) for each in layouts]
    strides = [stride for each in layouts for stride in each.strides if stride]
    first, second, third = rows.shape.rows
    num_rows = first * second * third
    block, num_tile_rows = tile_of(rows)
    grid = triton.cdiv(num_rows, num_tile_rows), triton.cdiv(rows.shape.width, block)
    num_warps = min(16, max(1, block * num_tile_rows // 512))
    with torch.accelerator.device_index(tensors[0].device.index):
        # without fused multiply-add: products and sums are rounded separately, as in two operations
        compiled(source(rows))[grid](
            *tensors, *strides, num_rows, second, third, num_warps=num_warps, enable_fp_fusion=False
        )


def tile_of(rows: Rows) -> tuple[int, int]:
    """Columns and rows of a program's tile: whole rows if the list reduces over them."""
    is_whole = any(each.op in ("sum", "mean", "largest") for each in rows.instructions)
    block = triton.next_power_of_2(rows.shape.width)
    block = block if is_whole else min(block, _TILE)
    return block, max(1, _TILE // block)


def source(rows: Rows) -> str:
    """The code of a list. Numbers of rows and strides are arguments, so that layers and other batch sizes share it."""
    block, num_tile_rows = tile_of(rows)
    width = rows.shape.width
    memories = {each.memory: number for number, each in enumerate(_by_memory(rows.instructions))}
    names = [f"data_{number}" for number in memories.values()]
    names += [
        f"stride_{number}_{axis}"
        for memory, number in memories.items()
        for axis, stride in enumerate(rows.layouts[memory].strides)
        if stride
    ]
    lines = [
        f"    row = tl.program_id(0).to(tl.int64) * {num_tile_rows} + tl.arange(0, {num_tile_rows})[:, None]",
        f"    column = tl.program_id(1) * {block} + tl.arange(0, {block})[None, :]",
        "    is_row = row < num_rows",
        f"    inside = is_row & (column < {width})",
        "    third = row % size_2",
        "    second = row // size_2 % size_1",
        "    first = row // size_2 // size_1",
    ]
    lines += [f"    {line}" for each in rows.instructions for line in _lines(rows, each, memories)]
    parameters = ", ".join([*names, "num_rows", "size_1", "size_2"])
    head = "@triton.jit(do_not_specialize=['num_rows', 'size_1', 'size_2'])"
    return "\n".join([head, f"def fused_rows({parameters}):", *lines, ""])


def _by_memory(instructions: list[Instruction]) -> list[Instruction]:
    return list({each.memory: each for each in instructions if each.memory >= 0}.values())


def _lines(rows: Rows, each: Instruction, memories: dict[int, int]) -> list[str]:
    out = f"r{each.out}"
    inputs = [f"r{register}" for register in each.inputs]
    if each.memory >= 0:
        layout, number = rows.layouts[each.memory], memories[each.memory]
        axes = zip(("first", "second", "third"), range(3), layout.strides)
        parts = [f"{name} * stride_{number}_{axis}" for name, axis, stride in axes if stride] or ["row * 0"]
        mask = "is_row"
        if not layout.is_narrow:
            parts.append(f"column.to(tl.int64) * {layout.step}")
            mask = "inside"
        at = f"data_{number} + ({' + '.join(parts)})"
        if each.op == "load":
            return [f"{out} = tl.load({at}, mask={mask}, other=0.0).to(tl.float32)"]
        return [f"tl.store({at}, {inputs[0]}.to({_TYPES[layout.ref.dtype]}), mask={mask})"]
    if each.op in ("sum", "mean"):
        found = f"tl.sum(tl.where(inside, {inputs[0]}, 0.0), axis=1, keep_dims=True)"
        code = f"{found} * {1 / rows.shape.width!r}" if each.op == "mean" else found
    elif each.op == "largest":
        code = f'numbers.largest(tl.where(inside, {inputs[0]}, float("-inf")))'
    elif each.op in _BINARY:
        code = _BINARY[each.op].format(inputs[0], inputs[1] if len(inputs) == 2 else _literal(each.number))
    else:
        code = _UNARY[each.op].format(inputs[0])
    return [f"{out} = {_ROUNDED[each.dtype].format(code)}"]


def _literal(number: float) -> str:
    """Code of a float32 number. Triton would widen literals outside the float32 range, and lose the sign of -0."""
    rounded = torch.tensor(number, dtype=torch.float32, device="cpu")
    bits = int(rounded.view(torch.int32))
    if 1e-37 < abs(float(rounded)) < float("inf") or not bits:
        return repr(float(rounded))
    return f"tl.full((), {bits}, tl.int32).to(tl.float32, bitcast=True)"


@functools.cache
def compiled(code: str) -> Any:
    """Compiles the kernel. Triton reads its source from a file, for which `linecache` gets an entry."""
    name = f"<hf_paged list {hashlib.sha256(code.encode()).hexdigest()[:16]}>"
    linecache.cache[name] = len(code), None, code.splitlines(keepends=True), name
    names: dict[str, Any] = {"triton": triton, "tl": tl, "numbers": numbers, "__name__": __name__}
    exec(compile(code, name, "exec"), names)
    return names["fused_rows"]
