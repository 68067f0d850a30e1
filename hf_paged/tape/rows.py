"""Small operations on rows of numbers as one list for `rows.cpp`."""

from __future__ import annotations

import struct
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .values import DTYPES, FLOATS, Ref

_OPS = (
    "load store add sub mul div maximum minimum neg abs sqrt rsqrt reciprocal square relu exp tanh sigmoid silu gelu "
    "gelu_tanh sin cos log softplus sum mean largest copy"
).split()
OPS = {name: number for number, name in enumerate(_OPS)}  # enum RowOp

MEMORY = struct.Struct("Qq3qq")  # struct RowMemory
INSTRUCTION = struct.Struct("6id")  # struct RowInstruction
CALL = struct.Struct("3q5q3Q")  # struct RowsCall


class Layout(NamedTuple):
    """How a tensor lies under rows: its strides along their three dimensions and along a row; narrow ones have one
    number a row."""

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
    """`None` where there are more than three dimensions of rows."""
    rows = [size for size in sizes[:-1] if size != 1]
    if len(rows) > 3:
        return None
    first, second, third = [1] * (3 - len(rows)) + rows
    return Shape((first, second, third), sizes[-1] if sizes else 1)


def layout(ref: Ref, sizes: tuple[int, ...]) -> Layout | None:
    """Of a tensor that is broadcast to `sizes`; `None` if it cannot be."""
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
    """Instructions over rows of one shape. What one stores and another needs stays in a register."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.instructions: list[tuple[str, int, int, int, int, float]] = []  # op, out, a, b, dtype, number
        self.layouts: list[Layout] = []  # of memories
        self.narrow: list[int] = []  # of registers
        self.known: dict[Any, int] = {}  # registers by what they hold
        self.written: set[int] = set()  # values
        self.stores: list[Layout] = []

    # -- building ----------------------------------------------------------------------------------------------------

    def takes(self, layouts: list[Layout]) -> bool:
        """Whether what is read is not in memory that this list writes, in another layout."""
        return all(each.key in self.known or each.ref.value not in self.written for each in layouts)

    def register(self, is_narrow: bool) -> int:
        self.narrow.append(is_narrow)
        return len(self.narrow) - 1

    def read(self, each: Layout) -> int:
        if each.key not in self.known:
            self.known[each.key] = register = self.register(each.is_narrow)
            self.layouts.append(each)
            self.instructions.append(("load", register, register, len(self.layouts) - 1, 0, 0.0))
        return self.known[each.key]

    def compute(self, op: str, dtype: torch.dtype, is_narrow: bool, a: int, b: int = -1, number: float = 0.0) -> int:
        out = self.register(is_narrow)
        self.instructions.append((op, out, a, b, DTYPES[dtype], number))
        return out

    def write(self, each: Layout, register: int) -> None:
        self.layouts.append(each)
        self.instructions.append(("store", register, register, len(self.layouts) - 1, 0, 0.0))
        self.known[each.key] = register
        if each.ref.value is not None:
            self.written.add(each.ref.value)
        self.stores.append(each)

    def can_absorb(self, other: Rows) -> bool:
        """Whether what the other list reads is in memory that this one does not write, or in a register; and whether it
        writes nothing that this one touches."""
        reads = [other.layouts[b] for op, _, _, b, *_ in other.instructions if op == "load"]
        if any(each.ref.value is None for each in (*self.stores, *other.stores)):
            return False  # memory that is not the tape's: what else is there is not known
        return self.takes(reads) and not other.writes & (self.reads | self.writes)

    @property
    def copied(self) -> tuple[Ref, Ref] | None:
        """A value and the memory outside of the tape that this list does nothing but copy it to."""
        if [op for op, *_ in self.instructions] != ["load", "copy", "store"]:
            return None
        source, target = (self.layouts[self.instructions[place][3]] for place in (0, 2))
        fits = source.strides == target.strides and source.step == target.step and source.ref.dtype is target.ref.dtype
        is_out = source.ref.value is not None and target.ref.value is None and source.ref.start == 0
        return (source.ref, target.ref) if fits and is_out and not source.is_narrow else None

    def absorb(self, other: Rows) -> None:
        """Its instructions come behind these."""
        found: dict[int, int] = {}
        for op, out, a, b, dtype, number in other.instructions:
            if op == "load":
                found[out] = self.read(other.layouts[b])
            elif op == "store":
                self.write(other.layouts[b], found[a])
            else:
                found[out] = self.register(bool(other.narrow[out]))
                self.instructions.append((op, found[out], found[a], found.get(b, -1), dtype, number))

    # -- of the tape -------------------------------------------------------------------------------------------------

    @property
    def reads(self) -> set[int]:
        return self._touched("load")

    @property
    def writes(self) -> set[int]:
        return self._touched("store")

    def _touched(self, op: str) -> set[int]:
        refs = (self.layouts[b].ref for name, _, _, b, *_ in self.instructions if name == op)
        return {ref.value for ref in refs if ref.value is not None}

    def drop_stores(self, needed: set[int]) -> None:
        """Of values that nothing else reads."""
        self.instructions = [
            each
            for each in self.instructions
            if each[0] != "store" or (value := self.layouts[each[3]].ref.value) is None or value in needed
        ]
        self._drop_unused()

    def _drop_unused(self) -> None:
        used: set[int] = set()
        kept = []
        for each in reversed(self.instructions):
            op, out, a, b, *_ = each
            if op == "store" or out in used:
                kept.append(each)
                if op != "load":
                    used |= {a} | ({b} if op != "store" and b >= 0 else set())
        self.instructions = kept[::-1]

    def pack(self, address: Any, num_threads: int) -> tuple[bytes, list[bytes]]:
        """The call, whose last three fields are to be the addresses of the parts beside it."""
        used = [each[3] for each in self.instructions if each[0] in ("load", "store")]
        number = {memory: place for place, memory in enumerate(dict.fromkeys(used))}
        registers, narrow = self._renumbered()
        memories = b"".join(
            MEMORY.pack(address(each.ref), DTYPES[each.ref.dtype], *each.strides, each.step)
            for each in map(self.layouts.__getitem__, number)
        )
        instructions = b"".join(
            INSTRUCTION.pack(
                OPS[op],
                registers[out],
                registers[a],
                number[b] if op in ("load", "store") else registers.get(b, -1),
                dtype,
                0,
                value,
            )
            for op, out, a, b, dtype, value in self.instructions
        )
        packed_narrow = struct.pack(f"{len(narrow)}i", *narrow)
        sizes = *self.shape.rows, self.shape.width
        counts = num_threads, len(number), len(self.instructions), len(narrow)
        return CALL.pack(*sizes, *counts, 0, 0, 0), [memories, instructions, packed_narrow]

    def _renumbered(self) -> tuple[dict[int, int], list[int]]:
        """Places for registers that are used, those that are not needed any more given to others."""
        last: dict[int, int] = {}
        for place, (op, out, a, b, *_) in enumerate(self.instructions):
            for each in {out, a} | ({b} if op not in ("load", "store") and b >= 0 else set()):
                last[each] = place
        free: dict[bool, list[int]] = {False: [], True: []}
        found: dict[int, int] = {}
        narrow: list[int] = []
        for place, (op, out, a, b, *_) in enumerate(self.instructions):
            used = {a} | ({b} if op not in ("load", "store") and b >= 0 else set())
            if out not in found:
                kind = bool(self.narrow[out])
                if not free[kind]:
                    narrow.append(kind)
                    free[kind].append(len(narrow) - 1)
                found[out] = free[kind].pop()
            for each in used | {out}:
                if last[each] == place:
                    free[bool(self.narrow[each])].append(found[each])
        return found, narrow


def is_float(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cpu and x.dtype in FLOATS and x.layout is torch.strided
