"""Lists of fused elementwise operations and row reductions; one call of `rows.cpp` runs a list.
`lower.py` and `passes.py` decide which operations are fused."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .buffers import DTYPE_NUMBERS, AddressOf, PackedCall, StoreBytes, TensorRef, buffer_ids_of

_OP_NAMES = (
    "load store add sub mul div maximum minimum neg abs sqrt rsqrt reciprocal square relu exp tanh"
    " sigmoid silu gelu gelu_tanh sin cos log softplus sum mean largest copy"
).split()
REDUCTIONS = frozenset({"sum", "mean", "largest"})  # to one number per row
OP_NUMBERS = {name: number for number, name in enumerate(_OP_NAMES)}  # enum RowOp

MEMORY = struct.Struct("Qq3qq")  # struct RowMemory
INSTRUCTION = struct.Struct("6id")  # struct RowInstruction
CALL = struct.Struct("3q5q3Q")  # struct RowsCall


class TensorLayout(NamedTuple):
    """How a list of row operations accesses a tensor: by strides in elements, one for each
    dimension of the list's `Shape`. A narrow tensor has one number per row."""

    ref: TensorRef
    strides: tuple[int, ...]
    is_narrow: bool

    @property
    def key(self) -> Any:
        """A key that is equal for layouts that access the same numbers, even in tensors of
        different sizes."""
        ref = self.ref
        return ref.buffer_id, ref.offset, ref.dtype, self.strides, self.is_narrow


class Instruction(NamedTuple):
    """A load or store between memory and the register `out`, or an operation on registers and
    optionally a scalar, whose result is rounded to `dtype` and written to the register `out`."""

    op: str
    out: int
    inputs: tuple[int, ...] = ()
    memory: TensorLayout | None = None
    dtype: torch.dtype = torch.float32
    number: float = 0.0


Shape = tuple[int, ...]
"""Four sizes: three leading dimensions, whose product is the number of rows, and a row's length."""


def _pad_dims(values: Sequence[int], sizes: Sequence[int], padding: int) -> tuple[int, ...] | None:
    """Returns the values of the leading dimensions (all but the last), without those of size 1, and
    with `padding` in front of them so that there are three; `None` if more than three remain."""
    selected = [value for value, size in zip(values, sizes[:-1]) if size != 1]
    num_padding = 3 - len(selected)
    if num_padding < 0:
        return None
    return (padding,) * num_padding + tuple(selected)


def shape_of(sizes: tuple[int, ...]) -> Shape | None:
    """Returns the `Shape` for a tensor's sizes; `None` if more than three leading dimensions are
    larger than 1."""
    sizes = sizes or (1,)
    row_sizes = _pad_dims(sizes, sizes, 1)
    if row_sizes is None:
        return None
    return (*row_sizes, sizes[-1])


def layout(x: Tensor, ref: TensorRef, sizes: tuple[int, ...]) -> TensorLayout | None:
    """Returns the layout of a tensor that is broadcast to `sizes`; `None` if it cannot be, or if
    more than three leading dimensions are larger than 1."""
    sizes = sizes or (1,)
    try:
        strides = x.expand(sizes).stride()
    except RuntimeError:
        return None
    row_strides = _pad_dims(strides, sizes, 0)
    if row_strides is None:
        return None
    is_wide = sizes[-1] != 1
    is_narrow = is_wide and (not x.dim() or x.shape[-1] == 1)
    element_stride = 1
    if is_wide and not is_narrow:
        element_stride = strides[-1]
    return TensorLayout(ref, (*row_strides, element_stride), is_narrow)


class RowOps:
    """A list of instructions over rows of one shape. Stored numbers also stay in their register,
    which later instructions can read."""

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.instructions: list[Instruction] = []
        self.are_narrow: list[bool] = []  # by register: whether it has one number per row
        self._registers: dict[Any, int] = {}  # by `TensorLayout.key` of their content

    def accesses(self, *ops: str) -> list[TensorLayout]:
        """Returns the memory that loads and stores access, in order; with `ops` ("load", "store"),
        only the memory that these access."""
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

    def can_read(self, layouts: list[TensorLayout]) -> bool:
        """Whether this list can read `layouts`: each is in a register, or not in a buffer that the
        list writes to."""
        written = self.writes
        return all(x.key in self._registers or x.ref.buffer_id not in written for x in layouts)

    def _new_register(self, is_narrow: bool) -> int:
        self.are_narrow.append(is_narrow)
        return len(self.are_narrow) - 1

    def read(self, source: TensorLayout) -> int:
        """Returns the register with the tensor's numbers; adds a load if no register has them."""
        key = source.key
        if key not in self._registers:
            register = self._new_register(source.is_narrow)
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
        """Adds an operation on registers; returns the register of its result."""
        is_narrow = op in REDUCTIONS or all(self.are_narrow[register] for register in inputs)
        out = self._new_register(is_narrow)
        self.instructions.append(Instruction(op, out, inputs, dtype=dtype, number=number))
        return out

    def write(self, target: TensorLayout, register: int) -> None:
        self.instructions.append(Instruction("store", register, (register,), target))
        self._registers[target.key] = register

    def can_absorb(self, later: RowOps) -> bool:
        """Whether `later` has rows of the same shape, can read its inputs from this list's
        registers or from memory that this list does not write to, and writes to no buffer that
        this list uses. False if either list stores to memory outside the buffers."""
        stores = (*self.accesses("store"), *later.accesses("store"))
        if any(target.ref.buffer_id is None for target in stores):
            return False  # memory outside the buffers may overlap with any tensor
        if self.shape != later.shape or not self.can_read(later.accesses("load")):
            return False
        used = self.reads | self.writes
        return not later.writes & used

    def absorb(self, later: RowOps) -> None:
        """Appends the instructions of `later`."""
        registers: dict[int, int] = {}  # of this list, by those of `later`
        for op, out, inputs, memory, dtype, number in later.instructions:
            if memory is None:
                sources = (registers[register] for register in inputs)
                registers[out] = self.compute(op, *sources, dtype=dtype, number=number)
            elif op == "load":
                registers[out] = self.read(memory)
            else:
                self.write(memory, registers[out])

    # -- for the tape -----------------------------------------------------------------------------

    def drop_stores(self, needed: set[int]) -> None:
        """Drops stores to buffers whose ids are not in `needed`, then instructions whose results
        are unused."""
        used: set[int] = set()  # registers
        used_instructions = []  # in reverse order
        for instruction in reversed(self.instructions):
            is_used = instruction.out in used
            if instruction.op == "store" and instruction.memory is not None:
                buffer_id = instruction.memory.ref.buffer_id
                is_used = buffer_id is None or buffer_id in needed
            if is_used:
                used_instructions.append(instruction)
                used.update(instruction.inputs)
        self.instructions = used_instructions[::-1]

    def pack(self, address: AddressOf, store: StoreBytes) -> PackedCall:
        registers, are_narrow = self._allocate_registers()
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
                dtype_id = DTYPE_NUMBERS[memory.ref.dtype]
                memories += MEMORY.pack(start, dtype_id, *memory.strides)
            fields = OP_NUMBERS[op], registers[out], a, b, DTYPE_NUMBERS[dtype], 0
            instructions += INSTRUCTION.pack(*fields, number)
        packed_narrow = struct.pack(f"{len(are_narrow)}i", *are_narrow)
        call = CALL.pack(
            *self.shape,
            torch.get_num_threads(),
            num_memories,
            len(self.instructions),
            len(are_narrow),
            store(memories),
            store(instructions),
            store(packed_narrow),
        )
        return "rows", call

    def _allocate_registers(self) -> tuple[dict[int, int], list[bool]]:
        """Renumbers registers, so that those whose content is no longer needed are reused. Returns
        the new number of each old register, and whether each new register is narrow."""
        # by old register: index of the last instruction that uses it
        last_uses: dict[int, int] = {}
        for index, instruction in enumerate(self.instructions):
            registers = (instruction.out, *instruction.inputs)
            last_uses |= dict.fromkeys(registers, index)
        free: dict[bool, list[int]] = {False: [], True: []}  # new registers, by `is_narrow`
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
                if last_uses[register] == index:
                    free[self.are_narrow[register]].append(numbers[register])
        return numbers, are_narrow
