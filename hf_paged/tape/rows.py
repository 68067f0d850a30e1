"""Lists of small operations on rows of numbers, each run as one call of `rows.cpp`."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from .values import DTYPES, Ref

_OPS = (
    "load store add sub mul div maximum minimum neg abs sqrt rsqrt reciprocal square relu exp tanh"
    " sigmoid silu gelu gelu_tanh sin cos log softplus sum mean largest copy"
).split()
OPS = {name: number for number, name in enumerate(_OPS)}  # enum RowOp

MEMORY = struct.Struct("Qq3qq")  # struct RowMemory
INSTRUCTION = struct.Struct("6id")  # struct RowInstruction
CALL = struct.Struct("3q5q3Q")  # struct RowsCall


class Instruction(NamedTuple):
    """A load or store between a register and a memory, or an operation from registers and a number
    to `out`."""

    op: str
    out: int
    inputs: tuple[int, ...] = ()
    memory: int = -1
    dtype: int = 0
    number: float = 0.0


class Layout(NamedTuple):
    """A tensor's strides under a list's rows: along their three dimensions (`strides`) and along a
    row (`step`). Narrow tensors have one number per row."""

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
    missing = 3 - len(rows)
    if missing < 0:
        return None
    first, second, third = [1] * missing + rows
    width = 1
    if sizes:
        width = sizes[-1]
    return Shape((first, second, third), width)


def layout(ref: Ref, sizes: tuple[int, ...]) -> Layout | None:
    """The layout of a tensor broadcast to `sizes`; `None` if it cannot be."""
    missing = len(sizes) - len(ref.sizes)
    if missing < 0:
        return None
    strides = [0] * missing + list(ref.strides)
    ref_sizes = [1] * missing + list(ref.sizes)
    pairs = zip(ref_sizes, sizes)
    for axis, (size, wanted) in enumerate(pairs):
        if size == wanted:
            continue
        if size != 1:
            return None
        strides[axis] = 0
    rows = []
    for stride, size in zip(strides[:-1], sizes[:-1]):
        if size != 1:
            rows.append(stride)
    missing_rows = 3 - len(rows)
    if missing_rows < 0:
        return None
    first, second, third = [0] * missing_rows + rows
    width = 1
    if sizes:
        width = sizes[-1]
    has_one_number = not ref_sizes or ref_sizes[-1] == 1
    is_narrow = width != 1 and has_one_number
    step = 1
    if strides and width != 1 and not is_narrow:
        step = strides[-1]
    return Layout(ref, (first, second, third), step, is_narrow)


class Rows:
    """Instructions over rows of one shape. A stored value stays in a register for later
    instructions."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.instructions: list[Instruction] = []
        self.layouts: list[Layout] = []  # by memory
        self.narrow: list[int] = []  # by register
        self.known: dict[Any, int] = {}  # registers by the layout key of their content
        self.written: set[int] = set()  # values
        self.stores: list[Layout] = []

    # -- building ---------------------------------------------------------------------------------

    def takes(self, layouts: list[Layout]) -> bool:
        """Whether reads of `layouts` fit: none may read memory that this list writes, except in the
        same layout."""
        for each in layouts:
            if each.key in self.known:
                continue
            if each.ref.value in self.written:
                return False
        return True

    def register(self, is_narrow: bool) -> int:
        self.narrow.append(is_narrow)
        return len(self.narrow) - 1

    def read(self, each: Layout) -> int:
        key = each.key
        if key not in self.known:
            memory = len(self.layouts)
            register = self.register(each.is_narrow)
            self.known[key] = register
            self.layouts.append(each)
            self.instructions.append(Instruction("load", register, memory=memory))
        return self.known[key]

    def compute(
        self,
        op: str,
        dtype: torch.dtype,
        is_narrow: bool,
        a: int,
        b: int = -1,
        number: float = 0.0,
    ) -> int:
        inputs = (a,) if b < 0 else (a, b)
        dtype_number = DTYPES[dtype]
        out = self.register(is_narrow)
        self.instructions.append(Instruction(op, out, inputs, dtype=dtype_number, number=number))
        return out

    def write(self, each: Layout, register: int) -> None:
        key = each.key
        value = each.ref.value
        memory = len(self.layouts)
        store = Instruction("store", register, (register,), memory)
        self.layouts.append(each)
        self.instructions.append(store)
        self.known[key] = register
        if value is not None:
            self.written.add(value)
        self.stores.append(each)

    def can_absorb(self, other: Rows) -> bool:
        """Whether `other` reads only registers or memory that this list does not write, and writes
        nothing that this one reads or writes."""
        loads = [each for each in other.instructions if each.op == "load"]
        reads = [other.layouts[load.memory] for load in loads]
        for each in (*self.stores, *other.stores):
            if each.ref.value is None:
                return False  # memory outside the tape, which other tensors may share
        if not self.takes(reads):
            return False
        touched = self.reads | self.writes
        return not other.writes & touched

    @property
    def copied(self) -> tuple[Ref, Ref] | None:
        """For a list that only copies a value to memory outside the tape: the value's ref, and the
        target's."""
        ops = [each.op for each in self.instructions]
        if ops != ["load", "copy", "store"]:
            return None
        load, _, store = self.instructions
        source = self.layouts[load.memory]
        target = self.layouts[store.memory]
        fits = (
            source.strides == target.strides
            and source.step == target.step
            and source.ref.dtype is target.ref.dtype
        )
        read = source.ref
        written = target.ref
        is_out = read.value is not None and written.value is None
        is_whole = read.start == 0 and not source.is_narrow
        if fits and is_out and is_whole:
            return read, written
        return None

    def absorb(self, other: Rows) -> None:
        """Appends the other list's instructions."""
        registers: dict[int, int] = {}
        for each in other.instructions:
            if each.op == "load":
                source = other.layouts[each.memory]
                registers[each.out] = self.read(source)
            elif each.op == "store":
                target = other.layouts[each.memory]
                self.write(target, registers[each.out])
            else:
                inputs = tuple(registers[register] for register in each.inputs)
                is_narrow = bool(other.narrow[each.out])
                out = self.register(is_narrow)
                registers[each.out] = out
                self.instructions.append(each._replace(out=out, inputs=inputs))

    # -- of the tape ------------------------------------------------------------------------------

    @property
    def reads(self) -> set[int]:
        return self._touched("load")

    @property
    def writes(self) -> set[int]:
        return self._touched("store")

    def _touched(self, op: str) -> set[int]:
        accesses = (each for each in self.instructions if each.op == op)
        refs = (self.layouts[access.memory].ref for access in accesses)
        return {ref.value for ref in refs if ref.value is not None}

    def drop_stores(self, needed: set[int]) -> None:
        """Drops stores to values not in `needed`, and then instructions without a use."""
        kept = []
        for each in self.instructions:
            if each.op == "store":
                target = self.layouts[each.memory]
                value = target.ref.value
                if value is not None and value not in needed:
                    continue
            kept.append(each)
        self.instructions = kept
        self._drop_unused()

    def _drop_unused(self) -> None:
        used: set[int] = set()
        kept = []
        for each in reversed(self.instructions):
            if each.op == "store" or each.out in used:
                kept.append(each)
                used |= set(each.inputs)
        self.instructions = kept[::-1]

    def pack(
        self,
        address: Callable[[Ref], int],
        num_threads: int,
    ) -> tuple[bytes, list[bytes]]:
        """Returns the packed call and three parts, whose addresses go into the call's last three
        fields."""
        accesses = (each for each in self.instructions if each.memory >= 0)
        used = dict.fromkeys(access.memory for access in accesses)
        numbers = {memory: number for number, memory in enumerate(used)}
        registers, narrow = self._renumbered()
        memories = b""
        for memory in numbers:
            each = self.layouts[memory]
            dtype = DTYPES[each.ref.dtype]
            start = address(each.ref)
            memories += MEMORY.pack(start, dtype, *each.strides, each.step)
        instructions = b""
        for instruction in self.instructions:
            instructions += self._pack(instruction, registers, numbers)
        packed_narrow = struct.pack(f"{len(narrow)}i", *narrow)
        call = CALL.pack(
            *self.shape.rows,
            self.shape.width,
            num_threads,
            len(numbers),
            len(self.instructions),
            len(narrow),
            0,
            0,
            0,
        )
        return call, [memories, instructions, packed_narrow]

    @staticmethod
    def _pack(
        each: Instruction,
        registers: dict[int, int],
        number: dict[int, int],
    ) -> bytes:
        op = OPS[each.op]
        out = registers[each.out]
        if each.memory >= 0:
            a = out
            b = number[each.memory]
        else:
            inputs = [registers[register] for register in each.inputs]
            a, b = (*inputs, -1)[:2]
        return INSTRUCTION.pack(op, out, a, b, each.dtype, 0, each.number)

    def _renumbered(self) -> tuple[dict[int, int], list[int]]:
        """Renumbers the used registers, reusing those that are no longer needed."""
        last: dict[int, int] = {}
        for place, each in enumerate(self.instructions):
            registers = (each.out, *each.inputs)
            last |= dict.fromkeys(registers, place)
        free: dict[bool, list[int]] = {False: [], True: []}
        found: dict[int, int] = {}
        narrow: list[int] = []
        for place, each in enumerate(self.instructions):
            if each.out not in found:
                kind = bool(self.narrow[each.out])
                unused = free[kind]
                if not unused:
                    number = len(narrow)
                    narrow.append(kind)
                    unused.append(number)
                found[each.out] = unused.pop()
            for register in {each.out, *each.inputs}:
                if last[register] == place:
                    kind = bool(self.narrow[register])
                    free[kind].append(found[register])
        return found, narrow
