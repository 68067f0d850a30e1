"""Lowers a recording to a tape's entries: drops views and constants, fuses elementwise operations
and reductions of rows into lists (`rows.py`), replaces products and lookups by our kernels, and
keeps the remaining operations as calls of PyTorch. `passes.py` makes changes across entries."""

from __future__ import annotations

import struct
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map_only

from ..cache.handles import written_tensors
from ..kernels.cpp.build import batch_invariant
from ..kernels.cpp.linear import max_rows
from ..step import NotCapturable
from .buffers import DTYPE_NUMBERS, FLOAT_DTYPE_NUMBERS, Buffers, buffer_ids_of
from .codes import CodedWeights
from .entries import Entry, KernelEntry, Linear, LinearPiece, ModuleCall, TorchOp
from .exact import is_along_last_axis, is_batch_invariant, is_view_in_place
from .live import LiveRefused
from .passes import simplify
from .record import ContentReadError, KernelCall, LiveCall, Operation, Recorded, tensors_in
from .rows import RowOps, TensorLayout, layout, shape_of

_PICK = struct.Struct("3Q5q")  # struct PickCall

# names of row operations, by PyTorch's names
_UNARY_NAMES = (
    "neg abs sqrt rsqrt reciprocal square relu exp tanh sigmoid silu sin cos log gelu"
    " softplus".split()
)
_UNARY = {f"aten::{name}": name for name in _UNARY_NAMES}
_UNARY |= dict.fromkeys(("aten::clone", "aten::_to_copy", "aten::copy_"), "copy")
_OVERLOADS = (".Tensor", ".Scalar", "_.Tensor", "_.Scalar")
_BINARY = {
    f"aten::{name}{overload}": name
    for name in ("add", "sub", "mul", "div")
    for overload in _OVERLOADS
}
_BINARY |= {"aten::maximum": "maximum", "aten::minimum": "minimum"}
_REDUCTIONS = {
    "aten::mean.dim": "mean",
    "aten::sum.dim_IntList": "sum",
    "aten::amax": "largest",
}
_POWERS = {2: "square", 3: "cube"}
# operations that round a Python number to the output's dtype before they use it
_ROUNDS_NUMBERS = {"add", "sub", "maximum", "minimum"}


@dataclass
class Lowering:
    """Lowers one recording. `is_persistent` returns whether a tensor that existed before the
    recording stays alive, at its address, as long as the tape."""

    is_persistent: Callable[[Tensor], bool]
    buffers: Buffers = field(default_factory=Buffers)
    entries: list[Entry] = field(default_factory=list)
    # addresses of the storages outside the arena that operations read or write
    storages: set[int] = field(default_factory=set)
    # addresses of the storages to which an operation writes, other than the one that creates them
    _written: set[int] = field(default_factory=set)
    # the same for all operations but the last
    _written_before_last: set[int] = field(default_factory=set)
    _constants: set[int] = field(default_factory=set)  # addresses of storages with constant content

    def __post_init__(self) -> None:
        self._coded_weights = CodedWeights(
            lambda tensor: self.buffers.id_of(tensor) is None,
            lambda tensor: _storage_address(tensor) in self._written,
        )

    def run(self, operations: list[Recorded]) -> list[Entry]:
        """Returns the entries that compute `operations`. Raises `NotCapturable` if one of them
        cannot be replayed."""
        # the last operation writes the results, which no operation reads
        self._written_before_last = set(_written_addresses(operations[:-1]))
        self._written = self._written_before_last.union(_written_addresses(operations[-1:]))
        for operation in operations:
            if isinstance(operation, KernelCall):
                self._add_kernel(operation)
            elif isinstance(operation, LiveCall):
                self._add_module(operation)
            else:
                self._add_operation(operation)
        return simplify(self.entries, self.buffers)

    def _add_operation(self, operation: Operation) -> None:
        function = operation.function
        inputs = tensors_in((operation.args, operation.kwargs))
        results = tensors_in(operation.result)
        sources = {_storage_address(tensor) for tensor in inputs}
        targets = {_storage_address(tensor) for tensor in results}
        is_mutable = function._schema.is_mutable and not is_view_in_place(function)
        if function.name() == "aten::lift_fresh":  # a new tensor of Python numbers
            if targets & self._written:
                raise NotCapturable("its forward writes to a tensor made of Python numbers")
            self._constants |= targets
            self.buffers.retained_tensors += results
            return
        if not is_mutable and targets <= sources:
            return  # views
        is_empty = "empty" in function.name()
        is_written_once = not (is_mutable or is_empty or targets & self._written)
        if is_written_once and sources <= self._constants:
            self._constants |= targets
            self.buffers.retained_tensors += results
            return
        for tensor in results:
            if _storage_address(tensor) not in sources:
                self.buffers.add(tensor)
        if is_empty:
            return
        self._retain(inputs)
        # batch-invariant products read the floats, as they do without a tape, since the kernel sums
        # products with codes in another order
        if not batch_invariant.get():
            self._coded_weights.note(operation)
        if not self._lower(operation):
            self._add_torch_op(operation)

    def _retain(self, tensors: Iterable[Tensor]) -> None:
        """Keeps each tensor without a buffer alive for the tape, unless it is constant or
        persistent and no operation writes to it. Adds a fixed buffer for such a tensor if an
        operation before the last writes to it."""
        for tensor in tensors:
            if self.buffers.id_of(tensor) is not None:
                continue
            address = _storage_address(tensor)
            self.storages.add(address)
            is_stable = address not in self._written and (
                address in self._constants or self.is_persistent(tensor)
            )
            if not is_stable:
                self.buffers.retained_tensors.append(tensor)
            if address in self._written_before_last:
                self.buffers.add_fixed(tensor)

    # -- row operations ---------------------------------------------------------------------------

    def _lower(self, operation: Operation) -> bool:
        """Adds the operation as row operations, as a matrix product or as a call of a kernel.
        Returns whether that was possible."""
        function, args, kwargs, result = operation
        name = function.name()
        if name in _METHODS:
            return _METHODS[name](self, operation)
        op = _UNARY.get(name)
        operands = args[:1]
        if name in _BINARY:
            has_alpha = len(args) > 2 or kwargs.get("alpha", 1) != 1
            op = None if has_alpha else _BINARY[name]
            operands = args
        elif name == "aten::copy_":
            operands = args[1:2]
        elif name == "aten::pow.Tensor_Scalar":
            op = _POWERS.get(args[1])
        elif name == "aten::gelu" and kwargs.get("approximate") == "tanh":
            op = "gelu_tanh"
        elif name == "aten::softplus" and len(args) > 1:
            op = None
        return op is not None and self._compute(op, operands, result, function._schema.is_mutable)

    def _prepare(
        self,
        sizes: tuple[int, ...],
        inputs: Sequence[Tensor | None],
        output: Tensor,
        dtypes: Iterable[torch.dtype] = FLOAT_DTYPE_NUMBERS,
    ) -> tuple[RowOps, list[int], TensorLayout] | None:
        """Prepares an operation whose tensors are broadcast to `sizes`. Returns the list that the
        operation joins (the last entry if possible, otherwise a new one), the registers of the
        inputs that are not `None`, and the layout of the output; `None` if row operations cannot
        compute it."""
        tensors = [x for x in (*inputs, output) if x is not None]
        if output.dtype not in FLOAT_DTYPE_NUMBERS or not output.numel():
            return None
        if not all(x.is_cpu and x.dtype in dtypes for x in tensors):
            return None
        shape = shape_of(sizes)
        layouts = [layout(x, self.buffers.ref(x), sizes) for x in tensors]
        valid_layouts = [x for x in layouts if x is not None]
        if shape is None or len(valid_layouts) < len(tensors):
            return None
        *sources, target = valid_layouts
        rows = self._last_row_ops()
        if rows is None or rows.shape != shape or not rows.can_read(sources):
            rows = RowOps(shape)
            self.entries.append(rows)
        return rows, [rows.read(source) for source in sources], target

    def _last_row_ops(self) -> RowOps | None:
        """The last entry if it is a list of row operations; otherwise `None`."""
        if self.entries:
            last = self.entries[-1]
            if isinstance(last, RowOps):
                return last
        return None

    def _end_row_ops(self) -> None:
        """Adds an empty list, which no operation can join, so that the next operation reads memory
        instead of registers."""
        no_rows = (0, 0, 0, 0)
        self.entries.append(RowOps(no_rows))

    def _sizes(self, output: Tensor) -> tuple[int, ...]:
        """Returns the `sizes` for `_prepare` of an operation with this output: those of the output
        or, if the output has one number for each row of the last list, those of that list."""
        sizes = tuple(output.shape)
        last = self._last_row_ops()
        if last is not None and sizes and sizes[-1] == 1:
            wide_sizes = *sizes[:-1], last.shape[-1]
            if shape_of(wide_sizes) == last.shape:
                return wide_sizes
        return sizes

    def _compute(
        self,
        op: str,
        args: tuple[Any, ...],
        output: Tensor,
        is_in_place: bool = False,
    ) -> bool:
        """Adds an elementwise operation on `args`: a tensor and perhaps another tensor or a number.
        Returns whether that was possible."""
        tensors = tensors_in(args)
        if not tensors or tensors[0] is not args[0]:
            return False
        if is_in_place:
            # C++ runs a list for one block of rows after another, so the last list, which may read
            # this memory by other strides, must not write to it. (Ending the list first also keeps
            # `_sizes` below from returning its sizes.)
            self._end_row_ops()
        dtypes = DTYPE_NUMBERS if op == "copy" else FLOAT_DTYPE_NUMBERS
        prepared = self._prepare(self._sizes(output), tensors, output, dtypes)
        if prepared is None:
            return False
        rows, registers, target = prepared
        dtype = output.dtype
        number = 0.0
        if len(tensors) < len(args):
            number = float(args[1])
        if op in _ROUNDS_NUMBERS:
            number = float(torch.tensor(number, dtype=dtype, device="cpu"))
            for index, x in enumerate(tensors):
                if x.dim() == 0 and x.dtype is not dtype:
                    register = registers[index]
                    registers[index] = rows.compute("copy", register, dtype=dtype)
        if all(rows.are_narrow[register] for register in registers) != target.is_narrow:
            return False  # one number per row cannot be stored as a whole row, nor the reverse
        if op == "cube":
            square = rows.compute("square", *registers)
            registers.insert(0, square)
            op = "mul"
        result = rows.compute(op, *registers, dtype=dtype, number=number)
        rows.write(target, result)
        if is_in_place:
            self._end_row_ops()
        return True

    def _can_reduce(self, x: Tensor) -> bool:
        """Whether row operations can reduce the last axis of `x`."""
        return x.dim() > 0 and x.shape[-1] > 1

    def _reduce(self, operation: Operation) -> bool:
        function, args, kwargs, result = operation
        x = args[0]
        if not self._can_reduce(x) or not is_along_last_axis(function, args, kwargs):
            return False
        if result.dim() != x.dim():
            result = result.unsqueeze(-1)
        prepared = self._prepare(x.shape, [x], result)
        if prepared is None:
            return False
        rows, registers, target = prepared
        op = _REDUCTIONS[function.name()]
        reduced = rows.compute(op, *registers, dtype=result.dtype)
        rows.write(target, reduced)
        return True

    def _layer_norm(self, operation: Operation) -> bool:
        x, shape, weight, bias, eps = operation.args
        out = operation.result[0]
        if len(shape) != 1 or not self._can_reduce(x):
            return False
        prepared = self._prepare(x.shape, [x, weight, bias], out)
        if prepared is None:
            return False
        rows, (x_register, *parameters), target = prepared
        mean = rows.compute("mean", x_register)
        centred = rows.compute("sub", x_register, mean)
        square = rows.compute("square", centred)
        variance = rows.compute("mean", square)
        shifted = rows.compute("add", variance, number=eps)
        factor = rows.compute("rsqrt", shifted)
        dtype = torch.float32 if parameters else out.dtype
        result = rows.compute("mul", centred, factor, dtype=dtype)
        if weight is not None:
            dtype = out.dtype if bias is None else torch.float32
            result = rows.compute("mul", result, parameters[0], dtype=dtype)
        if bias is not None:
            result = rows.compute("add", result, parameters[-1], dtype=out.dtype)
        rows.write(target, result)
        return True

    def _cat(self, operation: Operation) -> bool:
        parts, *axes = operation.args
        axis = axes[0] if axes else 0
        result: Tensor = operation.result
        if any(x.dim() != result.dim() or x.dtype is not result.dtype for x in parts):
            return False
        start = 0
        for part in parts:
            length = part.shape[axis]
            if part.numel():
                target = result.narrow(axis, start, length)
                if not self._compute("copy", (part,), target):
                    return False  # a PyTorch call then writes all parts, even those already copied
            start += length
        return True

    # -- kernels and PyTorch's operations ---------------------------------------------------------

    def _lookup(self, operation: Operation) -> bool:
        table, indices, *_ = operation.args
        result: Tensor = operation.result
        is_supported = (
            indices.dtype is torch.int64
            and indices.is_contiguous()
            and table.dim() == 2
            and table.stride(1) == 1
            and result.is_contiguous()
            and result.numel()
        )
        if not is_supported or self.buffers.id_of(table) is not None:
            return False
        itemsize = table.element_size()
        num_rows, width = table.shape
        row_bytes = width * itemsize
        stride_bytes = table.stride(0) * itemsize
        sizes = indices.numel(), num_rows, row_bytes, stride_bytes, row_bytes
        packed = _PICK.pack(0, 0, 0, *sizes)
        self._add_kernel(KernelCall("pick", packed, {0: table, 8: indices}, {16: result}))
        return True

    def _linear(self, operation: Operation) -> bool:
        """Lowers `mm(x, weight)` or `addmm(bias, x, weight)`; `weight` is `(depth, width)`."""
        *biases, x, weight = operation.args
        coded = self._coded_weights.find(weight)
        if coded is not None:
            weight = coded.codes.t()
        result: Tensor = operation.result
        is_scaled = any(operation.kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
        if is_scaled or x.dtype not in FLOAT_DTYPE_NUMBERS or not result.numel():
            return False
        is_stored = self.buffers.id_of(weight) is None
        if not is_stored or (coded is None and weight.dtype is not x.dtype):
            return False
        if x.stride(1) != 1 or result.stride(1) != 1:
            return False
        for bias in biases:
            if not bias.is_contiguous() or bias.shape != result.shape[1:]:
                return False
        depth_stride, width_stride = weight.stride()
        is_transposed = depth_stride != 1 or width_stride < weight.shape[0]
        if is_transposed and (width_stride != 1 or coded is not None):
            return False
        row_limit = max_rows(x.dtype, is_transposed, coded is not None)
        if x.shape[0] > row_limit and not batch_invariant.get():
            return False
        stored = weight if is_transposed else weight.t()
        bias = biases[0] if biases else None
        zeros_and_scales = () if coded is None else (coded.zeros, coded.scales)
        piece = LinearPiece(*self._refs((stored, bias, result, *zeros_and_scales)))
        self.entries.append(Linear(self.buffers.ref(x), is_transposed, [piece]))
        return True

    def _add_kernel(self, call: KernelCall) -> None:
        self._retain(tensors_in((call.reads, call.writes)))
        inputs = self._refs(call.reads)
        outputs = self._refs(call.writes)
        reads = buffer_ids_of(inputs.values())
        writes = buffer_ids_of(outputs.values())
        self.entries.append(KernelEntry(call.name, call.packed, inputs | outputs, reads, writes))

    def _add_module(self, call: LiveCall) -> None:
        if batch_invariant.get():
            raise ContentReadError(type(call.module).__name__)
        try:
            are_persistent = all(map(self.is_persistent, call.reads))
        except NotCapturable:
            are_persistent = False
        if not are_persistent:
            raise LiveRefused(
                type(call.module), "reads a tensor that is neither its argument nor the model's"
            )
        arguments = call.args, call.kwargs
        for tensor in tensors_in(call.result):
            self.buffers.add(tensor)
        inputs = [*tensors_in(arguments), *call.reads, *call.states]
        self._retain(inputs)
        is_sequence = isinstance(call.result, (tuple, list))
        results = self._refs([*call.result] if is_sequence else [call.result])
        reads = buffer_ids_of(self._refs(inputs))
        writes = buffer_ids_of([*results, *self._refs(call.states)])
        module = weakref.ref(call.module)
        references = self._refs(arguments)
        result_type = type(call.result)
        self.entries.append(ModuleCall(module, references, results, result_type, reads, writes))

    def _refs(self, x: Any) -> Any:
        """Replaces the tensors in `x` by `TensorRef`s."""
        return tree_map_only(Tensor, self.buffers.ref, x)

    def _add_torch_op(self, operation: Operation) -> None:
        function = operation.function
        results = tensors_in(operation.result)
        has_floats = any(tensor.is_floating_point() for tensor in results)
        if (
            batch_invariant.get()
            and has_floats
            and not is_batch_invariant(function, operation.args, operation.kwargs)
        ):
            raise NotCapturable(
                f"{function} has no batch-invariant kernel: its rows may depend on one another"
            )
        arguments = self._refs((operation.args, operation.kwargs))
        outputs = tree_leaves(self._refs(operation.result))
        reads = buffer_ids_of(tree_leaves(arguments))
        writes = buffer_ids_of(outputs)
        if function._schema.is_mutable:
            writes |= reads
            outputs = []
        self.entries.append(TorchOp(function, arguments, outputs, reads, writes))


# by PyTorch's names: methods that add an operation, and return whether that was possible
_METHODS: dict[str, Callable[[Lowering, Operation], bool]] = {
    "aten::native_layer_norm": Lowering._layer_norm,
    "aten::cat": Lowering._cat,
    **dict.fromkeys(_REDUCTIONS, Lowering._reduce),
    "aten::embedding": Lowering._lookup,
    "aten::mm": Lowering._linear,
    "aten::addmm": Lowering._linear,
}


def _storage_address(tensor: Tensor) -> int:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise NotCapturable(
            f"its forward uses a tensor of type {type(tensor).__name__}, not a plain one"
        )
    return tensor.untyped_storage().data_ptr()


def _written_addresses(operations: list[Recorded]) -> Iterator[int]:
    """Yields the addresses of the storages that operations write to, except for new results."""
    for operation in operations:
        tensors: Iterable[Tensor] = ()
        if isinstance(operation, KernelCall):
            tensors = operation.writes.values()
        elif isinstance(operation, LiveCall):
            tensors = operation.states
        elif not is_view_in_place(operation.function):
            tensors = written_tensors(operation.function, operation.args, operation.kwargs)
        yield from map(_storage_address, tensors)
