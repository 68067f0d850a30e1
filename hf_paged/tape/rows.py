"""Lists of small operations on rows of numbers, each run as one call of `rows.cpp`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .values import DTYPES, Ref

_OPS = (
    "load store add sub mul div maximum minimum neg abs sqrt rsqrt reciprocal square relu exp tanh sigmoid silu gelu "
    "gelu_tanh sin cos log softplus sum mean largest copy"
).split()
OPS = {name: number for number, name in enumerate(_OPS)}  # enum RowOp

MEMORY = struct.Struct("Qq3qq")  # struct RowMemory
INSTRUCTION = struct.Struct("6id")  # struct RowInstruction
CALL = struct.Struct("3q5q3Q")  # struct RowsCall


class Instruction(NamedTuple):
    """A load or store between a register and a memory, or an operation from registers and a number to `out`."""

    op: str
    out: int
    inputs: tuple[int, ...] = ()
    memory: int = -1
    dtype: int = 0
    number: float = 0.0


class Layout(NamedTuple):
    """A tensor's strides under a list's rows: along their three dimensions (`strides`) and along a row (`step`). Narrow
    tensors have one number per row."""

    ref: Ref
    strides: tuple[int, int, int]
    step: int
    is_narrow: bool

    @property
    def key(self) -> Any:
        return self.ref.place, self.strides, self.step, self.is_narrow


class Shape(NamedTuple):
    """Up to three dimensions of rows, and the numbers in a row."""

    rows: tuple[int, int, int]
    width: int


def shape_of(sizes: tuple[int, ...]) -> Shape | None:
    """The `Shape` of a tensor's sizes; `None` if the rows have more than three dimensions."""
    rows = [size for size in sizes[:-1] if size != 1]
    if len(rows) > 3:
        return None
    first, second, third = [1] * (3 - len(rows)) + rows
    return Shape((first, second, third), sizes[-1] if sizes else 1)


def layout(ref: Ref, sizes: tuple[int, ...]) -> Layout | None:
    """The layout of a tensor broadcast to `sizes`; `None` if it cannot be."""
    missing = len(sizes) - len(ref.sizes)
    if missing < 0:
        return None
    strides = [0] * missing + list(ref.strides)
    own = [1] * missing + list(ref.sizes)
    for axis, (size, wanted) in enumerate(zip(own, sizes)):
        if size != wanted:
            if size != 1:
                return None
            strides[axis] = 0
    rows = [stride for stride, size in zip(strides[:-1], sizes[:-1]) if size != 1]
    if len(rows) > 3:
        return None
    first, second, third = [0] * (3 - len(rows)) + rows
    width = sizes[-1] if sizes else 1
    is_narrow = width != 1 and (not own or own[-1] == 1)
    step = strides[-1] if strides and width != 1 and not is_narrow else 1
    return Layout(ref, (first, second, third), step, is_narrow)


class Rows:
    """Instructions over rows of one shape. A stored value stays in a register for later instructions."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.instructions: list[Instruction] = []
        self.layouts: list[Layout] = []  # by memory
        self.narrow: list[int] = []  # by register
        self.known: dict[Any, int] = {}  # registers by the layout key of their content
        self.written: set[int] = set()  # values
        self.stores: list[Layout] = []

    # -- building ----------------------------------------------------------------------------------------------------

    def takes(self, layouts: list[Layout]) -> bool:
        """Whether reads of `layouts` fit: none may read memory that this list writes, except in the same layout."""
        return all(each.key in self.known or each.ref.value not in self.written for each in layouts)

    def register(self, is_narrow: bool) -> int:
        self.narrow.append(is_narrow)
        return len(self.narrow) - 1

    def read(self, each: Layout) -> int:
        if each.key not in self.known:
            self.known[each.key] = register = self.register(each.is_narrow)
            self.layouts.append(each)
            self.instructions.append(Instruction("load", register, memory=len(self.layouts) - 1))
        return self.known[each.key]

    def compute(self, op: str, dtype: torch.dtype, is_narrow: bool, a: int, b: int = -1, number: float = 0.0) -> int:
        out = self.register(is_narrow)
        inputs = (a,) if b < 0 else (a, b)
        self.instructions.append(Instruction(op, out, inputs, dtype=DTYPES[dtype], number=number))
        return out

    def write(self, each: Layout, register: int) -> None:
        self.layouts.append(each)
        self.instructions.append(Instruction("store", register, (register,), len(self.layouts) - 1))
        self.known[each.key] = register
        if each.ref.value is not None:
            self.written.add(each.ref.value)
        self.stores.append(each)

    def can_absorb(self, other: Rows) -> bool:
        """Whether `other` reads only registers or memory that this list does not write, and writes nothing that this
        one reads or writes."""
        reads = [other.layouts[each.memory] for each in other.instructions if each.op == "load"]
        if any(each.ref.value is None for each in (*self.stores, *other.stores)):
            return False  # memory outside the tape, which other tensors may share
        return self.takes(reads) and not other.writes & (self.reads | self.writes)

    @property
    def copied(self) -> tuple[Ref, Ref] | None:
        """For a list that only copies a value to memory outside the tape: the value's ref, and the target's."""
        if [each.op for each in self.instructions] != ["load", "copy", "store"]:
            return None
        source, target = (self.layouts[self.instructions[place].memory] for place in (0, 2))
        fits = source.strides == target.strides and source.step == target.step and source.ref.dtype is target.ref.dtype
        is_out = source.ref.value is not None and target.ref.value is None and source.ref.start == 0
        return (source.ref, target.ref) if fits and is_out and not source.is_narrow else None

    def absorb(self, other: Rows) -> None:
        """Appends the other list's instructions."""
        found: dict[int, int] = {}
        for each in other.instructions:
            if each.op == "load":
                found[each.out] = self.read(other.layouts[each.memory])
            elif each.op == "store":
                self.write(other.layouts[each.memory], found[each.out])
            else:
                found[each.out] = self.register(bool(other.narrow[each.out]))
                inputs = tuple(found[register] for register in each.inputs)
                self.instructions.append(each._replace(out=found[each.out], inputs=inputs))

    # -- of the tape -------------------------------------------------------------------------------------------------

    @property
    def reads(self) -> set[int]:
        return self._touched("load")

    @property
    def writes(self) -> set[int]:
        return self._touched("store")

    def _touched(self, op: str) -> set[int]:
        refs = (self.layouts[each.memory].ref for each in self.instructions if each.op == op)
        return {ref.value for ref in refs if ref.value is not None}

    def drop_stores(self, needed: set[int]) -> None:
        """Drops stores to values not in `needed`, and then instructions without a use."""
        self.instructions = [
            each
            for each in self.instructions
            if each.op != "store" or (value := self.layouts[each.memory].ref.value) is None or value in needed
        ]
        self._drop_unused()

    def _drop_unused(self) -> None:
        used: set[int] = set()
        kept = []
        for each in reversed(self.instructions):
            if each.op == "store" or each.out in used:
                kept.append(each)
                used |= set(each.inputs)
        self.instructions = kept[::-1]

    def pack(self, address: Callable[[Ref], int], num_threads: int) -> tuple[bytes, list[bytes]]:
        """Returns the packed call and three parts, whose addresses go into the call's last three fields."""
        used = dict.fromkeys(each.memory for each in self.instructions if each.memory >= 0)
        number = {memory: place for place, memory in enumerate(used)}
        registers, narrow = self._renumbered()
        memories = b"".join(
            MEMORY.pack(address(each.ref), DTYPES[each.ref.dtype], *each.strides, each.step)
            for each in map(self.layouts.__getitem__, number)
        )
        instructions = b"".join(self._pack(each, registers, number) for each in self.instructions)
        packed_narrow = struct.pack(f"{len(narrow)}i", *narrow)
        sizes = *self.shape.rows, self.shape.width
        counts = num_threads, len(number), len(self.instructions), len(narrow)
        return CALL.pack(*sizes, *counts, 0, 0, 0), [memories, instructions, packed_narrow]

    @staticmethod
    def _pack(each: Instruction, registers: dict[int, int], number: dict[int, int]) -> bytes:
        out = registers[each.out]
        if each.memory >= 0:
            a, b = out, number[each.memory]
        else:
            a, b = (*(registers[register] for register in each.inputs), -1)[:2]
        return INSTRUCTION.pack(OPS[each.op], out, a, b, each.dtype, 0, each.number)

    def _renumbered(self) -> tuple[dict[int, int], list[int]]:
        """Renumbers the used registers, reusing those that are no longer needed."""
        last: dict[int, int] = {}
        for place, each in enumerate(self.instructions):
            last |= dict.fromkeys((each.out, *each.inputs), place)
        free: dict[bool, list[int]] = {False: [], True: []}
        found: dict[int, int] = {}
        narrow: list[int] = []
        for place, each in enumerate(self.instructions):
            if each.out not in found:
                kind = bool(self.narrow[each.out])
                if not free[kind]:
                    narrow.append(kind)
                    free[kind].append(len(narrow) - 1)
                found[each.out] = free[kind].pop()
            for register in {each.out, *each.inputs}:
                if last[register] == place:
                    free[bool(self.narrow[register])].append(found[register])
        return found, narrow
