"""Lists of small operations on rows of numbers, each of which runs as one call of `rows.cpp`.
Leaves which operations join a list to `lower.py` and `passes.py`."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .buffers import DTYPES, AddressOf, KeepBytes, PackedCall, TensorRef, buffer_ids_of

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
    """The strides by which a list reads or writes a tensor, in the dimensions of its `Shape`.
    Narrow tensors have one number per row."""

    ref: TensorRef
    strides: tuple[int, ...]
    is_narrow: bool

    @property
    def key(self) -> Any:
        """Equal for tensors with the same numbers, whatever their sizes."""
        ref = self.ref
        return ref.buffer_id, ref.offset, ref.dtype, self.strides, self.is_narrow


class Instruction(NamedTuple):
    """A load or store between a register and memory, or an operation on registers and a number,
    whose result goes to the register `out`."""

    op: str
    out: int
    inputs: tuple[int, ...] = ()
    memory: TensorLayout | None = None
    dtype: torch.dtype = torch.float32
    number: float = 0.0


Shape = tuple[int, ...]
"""The sizes of three dimensions of rows, and the numbers per row."""


def _of_rows(numbers: Sequence[int], sizes: Sequence[int], missing: int) -> tuple[int, ...] | None:
    """Selects the numbers of the dimensions of rows, all but the last that are not of size 1, and
    pads them to three with `missing` in front; `None` if there are more than three."""
    selected = [number for number, size in zip(numbers, sizes[:-1]) if size != 1]
    num_missing = 3 - len(selected)
    if num_missing < 0:
        return None
    return (missing,) * num_missing + tuple(selected)


def shape_of(sizes: tuple[int, ...]) -> Shape | None:
    """Returns the `Shape` for a tensor's sizes; `None` if the rows have more than three
    dimensions."""
    sizes = sizes or (1,)
    rows = _of_rows(sizes, sizes, 1)
    if rows is None:
        return None
    return (*rows, sizes[-1])


def layout(x: Tensor, ref: TensorRef, sizes: tuple[int, ...]) -> TensorLayout | None:
    """Returns the layout of a tensor broadcast to `sizes`; `None` if it cannot be broadcast, or has
    too many dimensions."""
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
    """Instructions over rows of one shape. A stored value also stays in a register, which later
    instructions read."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.instructions: list[Instruction] = []
        self.are_narrow: list[bool] = []  # registers
        self._registers: dict[Any, int] = {}  # by the layout key of their content

    def accesses(self, *ops: str) -> list[TensorLayout]:
        """Returns the tensors of loads and stores, or only of `ops`, in order."""
        return [
            instruction.memory
            for instruction in self.instructions
            if instruction.memory is not None and (not ops or instruction.op in ops)
        ]

    @property
    def reads(self) -> set[int]:
        return buffer_ids_of(layout.ref for layout in self.accesses("load"))

    @property
    def writes(self) -> set[int]:
        return buffer_ids_of(layout.ref for layout in self.accesses("store"))

    # -- building ---------------------------------------------------------------------------------

    def takes(self, layouts: list[TensorLayout]) -> bool:
        """Whether this list can read `layouts`: none may be in memory that the list writes, except
        in the same layout."""
        written = self.writes
        return all(x.key in self._registers or x.ref.buffer_id not in written for x in layouts)

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
        does not write, and writes no memory that this list reads or writes."""
        stores = (*self.accesses("store"), *other.accesses("store"))
        if any(target.ref.buffer_id is None for target in stores):
            return False  # other tensors may share memory outside the tape
        if self.shape != other.shape or not self.takes(other.accesses("load")):
            return False
        touched = self.reads | self.writes
        return not other.writes & touched

    def absorb(self, other: Rows) -> None:
        """Appends the instructions of `other`."""
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
        """Drops stores to buffers that are not in `needed`, and then instructions whose results are
        not used."""
        used: set[int] = set()
        backwards = []
        for instruction in reversed(self.instructions):
            is_used = instruction.out in used
            if instruction.op == "store" and instruction.memory is not None:
                buffer_id = instruction.memory.ref.buffer_id
                is_used = buffer_id is None or buffer_id in needed
            if is_used:
                backwards.append(instruction)
                used.update(instruction.inputs)
        self.instructions = backwards[::-1]

    def pack(self, address: AddressOf, keep: KeepBytes) -> PackedCall:
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
        """Renumbers the registers in use, and reuses those that are no longer needed."""
        last: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            registers = (instruction.out, *instruction.inputs)
            last |= dict.fromkeys(registers, index)
        free: dict[bool, list[int]] = {False: [], True: []}
        numbers: dict[int, int] = {}
        are_narrow: list[bool] = []
        for index, instruction in enumerate(self.instructions):
            if instruction.out not in numbers:
                is_narrow = self.are_narrow[instruction.out]
                unused = free[is_narrow]
                if not unused:
                    unused.append(len(are_narrow))
                    are_narrow.append(is_narrow)
                numbers[instruction.out] = unused.pop()
            for register in {instruction.out, *instruction.inputs}:
                if last[register] == index:
                    free[self.are_narrow[register]].append(numbers[register])
        return numbers, are_narrow
