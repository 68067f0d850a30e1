"""Lists of small operations on rows of numbers, each run as one call of `rows.cpp`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .values import DTYPES, Address, Keep, Packed, Ref, values_of

_OPS = (
    "load store add sub mul div maximum minimum neg abs sqrt rsqrt reciprocal square relu exp tanh"
    " sigmoid silu gelu gelu_tanh sin cos log softplus sum mean largest copy"
).split()
REDUCTIONS = frozenset({"sum", "mean", "largest"})  # to one number per row
OPS = {name: number for number, name in enumerate(_OPS)}  # enum RowOp

MEMORY = struct.Struct("Qq3qq")  # struct RowMemory
INSTRUCTION = struct.Struct("6id")  # struct RowInstruction
CALL = struct.Struct("3q5q3Q")  # struct RowsCall


class TensorLayout(NamedTuple):
    """A tensor's strides under a list's rows, as their `Shape`. Narrow tensors have one number per
    row."""

    ref: Ref
    strides: tuple[int, ...]
    is_narrow: bool

    @property
    def key(self) -> Any:
        """Equal for tensors that share their numbers and differ in their sizes."""
        ref = self.ref
        return ref.value, ref.start, ref.dtype, self.strides, self.is_narrow


class Instruction(NamedTuple):
    """A load or store between a register and a memory, or an operation from registers and a number
    to `out`."""

    op: str
    out: int
    inputs: tuple[int, ...] = ()
    memory: TensorLayout | None = None
    dtype: torch.dtype = torch.float32
    number: float = 0.0


Shape = tuple[int, ...]
"""Three dimensions of rows, and the numbers in a row."""


def _of_rows(numbers: Sequence[int], sizes: Sequence[int], missing: int) -> tuple[int, ...] | None:
    """The numbers of the dimensions of rows, which are all but the last that are not of size 1;
    `missing` for those that three lack. `None` if there are more than three."""
    kept = [number for number, size in zip(numbers, sizes[:-1]) if size != 1]
    num_missing = 3 - len(kept)
    if num_missing < 0:
        return None
    return (missing,) * num_missing + tuple(kept)


def shape_of(sizes: tuple[int, ...]) -> Shape | None:
    """The `Shape` of a tensor's sizes; `None` if the rows have more than three dimensions."""
    sizes = sizes or (1,)
    rows = _of_rows(sizes, sizes, 1)
    if rows is None:
        return None
    return (*rows, sizes[-1])


def layout(x: Tensor, ref: Ref, sizes: tuple[int, ...]) -> TensorLayout | None:
    """The layout of a tensor broadcast to `sizes`; `None` if it cannot be."""
    sizes = sizes or (1,)
    try:
        strides = x.expand(sizes).stride()
    except RuntimeError:
        return None
    row_strides = _of_rows(strides, sizes, 0)
    if row_strides is None:
        return None
    is_wide = sizes[-1] != 1
    is_narrow = is_wide and (not x.dim() or x.shape[-1] == 1)
    step = 1
    if is_wide and not is_narrow:
        step = strides[-1]
    return TensorLayout(ref, (*row_strides, step), is_narrow)


class Rows:
    """Instructions over rows of one shape. A stored value stays in a register for later
    instructions."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.instructions: list[Instruction] = []
        self.are_narrow: list[bool] = []  # registers
        self._registers: dict[Any, int] = {}  # by the layout key of their content

    def accesses(self, *ops: str) -> list[TensorLayout]:
        """The tensors of loads and stores, or of those of `ops`, in order."""
        return [
            each.memory
            for each in self.instructions
            if each.memory is not None and (not ops or each.op in ops)
        ]

    @property
    def reads(self) -> set[int]:
        return values_of(layout.ref for layout in self.accesses("load"))

    @property
    def writes(self) -> set[int]:
        return values_of(layout.ref for layout in self.accesses("store"))

    # -- building ---------------------------------------------------------------------------------

    def takes(self, layouts: list[TensorLayout]) -> bool:
        """Whether reads of `layouts` fit: none may read memory that this list writes, except in the
        same layout."""
        written = self.writes
        return all(x.key in self._registers or x.ref.value not in written for x in layouts)

    def _register(self, is_narrow: bool) -> int:
        self.are_narrow.append(is_narrow)
        return len(self.are_narrow) - 1

    def read(self, source: TensorLayout) -> int:
        key = source.key
        if key not in self._registers:
            register = self._register(source.is_narrow)
            self._registers[key] = register
            self.instructions.append(Instruction("load", register, memory=source))
        return self._registers[key]

    def compute(
        self,
        op: str,
        *inputs: int,
        dtype: torch.dtype = torch.float32,
        number: float = 0.0,
    ) -> int:
        are_narrow = all(self.are_narrow[register] for register in inputs)
        out = self._register(are_narrow or op in REDUCTIONS)
        self.instructions.append(Instruction(op, out, inputs, dtype=dtype, number=number))
        return out

    def write(self, target: TensorLayout, register: int) -> None:
        self.instructions.append(Instruction("store", register, (register,), target))
        self._registers[target.key] = register

    def can_absorb(self, other: Rows) -> bool:
        """Whether `other` has rows of the same shape, reads only registers or memory that this list
        does not write, and writes nothing that this one reads or writes."""
        stores = (*self.accesses("store"), *other.accesses("store"))
        if any(target.ref.value is None for target in stores):
            return False  # memory outside the tape, which other tensors may share
        if self.shape != other.shape or not self.takes(other.accesses("load")):
            return False
        touched = self.reads | self.writes
        return not other.writes & touched

    def absorb(self, other: Rows) -> None:
        """Appends the other list's instructions."""
        registers: dict[int, int] = {}
        for op, out, inputs, memory, dtype, number in other.instructions:
            if memory is None:
                sources = (registers[register] for register in inputs)
                registers[out] = self.compute(op, *sources, dtype=dtype, number=number)
            elif op == "load":
                registers[out] = self.read(memory)
            else:
                self.write(memory, registers[out])

    # -- of the tape ------------------------------------------------------------------------------

    def drop_stores(self, needed: set[int]) -> None:
        """Drops stores to values not in `needed`, and then instructions without a use."""
        used: set[int] = set()
        kept = []
        for each in reversed(self.instructions):
            is_used = each.out in used
            if each.op == "store" and each.memory is not None:
                value = each.memory.ref.value
                is_used = value is None or value in needed
            if is_used:
                kept.append(each)
                used.update(each.inputs)
        self.instructions = kept[::-1]

    def pack(self, address: Address, keep: Keep) -> Packed:
        registers, are_narrow = self._renumbered()
        num_memories = 0
        memories = b""
        instructions = b""
        for op, out, inputs, memory, dtype, number in self.instructions:
            if memory is None:
                operands = [registers[register] for register in inputs]
                a, b = (*operands, -1)[:2]
            else:
                a = registers[out]
                b = num_memories
                num_memories += 1
                start = address(memory.ref)
                kind = DTYPES[memory.ref.dtype]
                memories += MEMORY.pack(start, kind, *memory.strides)
            numbers = OPS[op], registers[out], a, b, DTYPES[dtype], 0
            instructions += INSTRUCTION.pack(*numbers, number)
        packed_narrow = struct.pack(f"{len(are_narrow)}i", *are_narrow)
        call = CALL.pack(
            *self.shape,
            torch.get_num_threads(),
            num_memories,
            len(self.instructions),
            len(are_narrow),
            keep(memories),
            keep(instructions),
            keep(packed_narrow),
        )
        return "rows", call

    def _renumbered(self) -> tuple[dict[int, int], list[bool]]:
        """Renumbers the used registers, reusing those that are no longer needed."""
        last: dict[int, int] = {}
        for index, each in enumerate(self.instructions):
            registers = (each.out, *each.inputs)
            last |= dict.fromkeys(registers, index)
        free: dict[bool, list[int]] = {False: [], True: []}
        numbers: dict[int, int] = {}
        are_narrow: list[bool] = []
        for index, each in enumerate(self.instructions):
            if each.out not in numbers:
                is_narrow = self.are_narrow[each.out]
                unused = free[is_narrow]
                if not unused:
                    unused.append(len(are_narrow))
                    are_narrow.append(is_narrow)
                numbers[each.out] = unused.pop()
            for register in {each.out, *each.inputs}:
                if last[register] == index:
                    free[self.are_narrow[register]].append(numbers[register])
        return numbers, are_narrow
