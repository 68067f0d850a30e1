"""Lowers a recording to a tape's entries: drops views and constants, fuses small operations into
lists, turns products and lookups into our kernels, and calls the remaining operations as
recorded."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten

from ..kernels.cpp.build import batch_invariant
from ..kernels.cpp.linear import HALVES, MAX_PIECES, MIN_TILE_WIDTH, max_rows
from ..step import NotCapturable
from .record import KernelCall, Launched, Operation, Recorded
from .rows import Layout, Rows, Shape, layout, shape_of
from .values import DTYPES, FLOATS, Ref, Values

aten = torch.ops.aten
_PICK = struct.Struct("3Q5q")  # struct PickCall

_UNARY = {
    aten.neg.default: "neg",
    aten.abs.default: "abs",
    aten.sqrt.default: "sqrt",
    aten.rsqrt.default: "rsqrt",
    aten.reciprocal.default: "reciprocal",
    aten.square.default: "square",
    aten.relu.default: "relu",
    aten.exp.default: "exp",
    aten.tanh.default: "tanh",
    aten.sigmoid.default: "sigmoid",
    aten.silu.default: "silu",
    aten.sin.default: "sin",
    aten.cos.default: "cos",
    aten.log.default: "log",
    aten.clone.default: "copy",
    aten._to_copy.default: "copy",
}
_BINARY = {
    aten.add.Tensor: "add",
    aten.add.Scalar: "add",
    aten.sub.Tensor: "sub",
    aten.sub.Scalar: "sub",
    aten.mul.Tensor: "mul",
    aten.mul.Scalar: "mul",
    aten.div.Tensor: "div",
    aten.div.Scalar: "div",
    aten.maximum.default: "maximum",
    aten.minimum.default: "minimum",
}
_IN_PLACE = {
    aten.add_.Tensor: "add",
    aten.add_.Scalar: "add",
    aten.sub_.Tensor: "sub",
    aten.mul_.Tensor: "mul",
    aten.mul_.Scalar: "mul",
    aten.div_.Tensor: "div",
    aten.div_.Scalar: "div",
}
# round Python numbers to the dtype first; others do not
_ROUNDS_NUMBERS = {"add", "sub", "maximum", "minimum"}
_REDUCTIONS = {
    aten.mean.dim: "mean",
    aten.sum.dim_IntList: "sum",
    aten.amax.default: "largest",
}
_VIEWS_IN_PLACE = {
    aten.unsqueeze_.default,
    aten.squeeze_.default,
    aten.squeeze_.dim,
    aten.squeeze_.dims,
    aten.transpose_.default,
    aten.t_.default,
    aten.swapaxes_.default,
    aten.as_strided_.default,
}
# Operations that move, choose or compare numbers, or that sum each row separately, in order.
_EXACT = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros zero_"
    " ones ones_like new_ones full full_like new_full fill_ fill scalar_tensor arange linspace"
    " clone copy _to_copy copy_ cat stack repeat index index_select index_put index_put_"
    " _unsafe_index gather scatter scatter_ slice_scatter select_scatter embedding where"
    " masked_fill masked_fill_ constant_pad_nd roll flip tril triu tril_ triu_ topk sort max min"
    " amax amin maximum minimum clamp clamp_min clamp_max clamp_ clamp_min_ clamp_max_ relu relu_"
    " abs neg sign floor ceil round lift_fresh lift_fresh_copy alias_copy _softmax _log_softmax"
    " cumsum histc index_add_ nan_to_num _local_scalar_dense _unsafe_view _reshape_alias".split()
)
# operations in `_EXACT` that are exact along the last axis only
_ALONG_AN_AXIS = frozenset(
    {
        "amax",
        "amin",
        "cumsum",
        "max",
        "min",
        "sort",
        "topk",
        "_softmax",
        "_log_softmax",
    }
)
WITH_OUT = {
    aten.mm.default: aten.mm.out,
    aten.addmm.default: aten.addmm.out,
    aten.bmm.default: aten.bmm.out,
}


@dataclass(eq=False)
class Kernel:
    """A call of a C++ function: its packed struct, still without addresses."""

    name: str
    packed: bytes
    refs: dict[int, Ref]  # by byte offset in the struct
    reads: set[int]
    writes: set[int]


@dataclass(eq=False)
class Linear:
    """`y = x W^T + b` for pieces that share `x`."""

    x: Ref
    is_transposed: bool
    pieces: list[tuple[Ref, Ref | None, Ref]]  # weight, bias, output

    def joins(self, other: Linear) -> bool:
        """Whether one call computes both with the same result as two calls."""
        _, _, out = self.pieces[0]
        _, _, other_out = other.pieces[0]
        widths = out.sizes[1], other_out.sizes[1]
        are_narrow = max(widths) < MIN_TILE_WIDTH
        are_wide = min(widths) >= MIN_TILE_WIDTH
        return (
            self.x == other.x
            and self.is_transposed == other.is_transposed
            and (are_narrow or are_wide)
        )

    @property
    def reads(self) -> set[int]:
        inputs: list[Ref | None] = [self.x]
        for weight, bias, _ in self.pieces:
            inputs += (weight, bias)
        refs = (ref for ref in inputs if ref is not None)
        return {ref.value for ref in refs if ref.value is not None}

    @property
    def writes(self) -> set[int]:
        outputs = (out for *_, out in self.pieces)
        return {out.value for out in outputs if out.value is not None}


@dataclass(eq=False)
class Call:
    """A PyTorch operation, with [`Ref`]s as tensors."""

    function: Any
    args: list[Any]
    tree: Any
    found: list[Ref | None]
    reads: set[int]
    writes: set[int]


@dataclass(eq=False)
class Launch:
    """A launch of a Triton kernel, with [`Ref`]s as tensors."""

    kernel: Any
    grid: tuple[int, ...]
    args: list[Any]
    tree: Any
    reads: set[int]
    writes: set[int]


Entry = Rows | Kernel | Linear | Call | Launch


def _axis(function: Any, args: Any) -> int:
    """The axis of an operation along one axis; for several or all axes, the first (as a negative
    number)."""
    arguments = function._schema.arguments
    names = [argument.name for argument in arguments]
    if "dim" in names:
        position = names.index("dim")
    else:
        position = len(args)
    if position < len(args):
        axis = args[position]
    elif position < len(names):  # the default
        axis = arguments[position].default_value
    else:
        axis = None
    if isinstance(axis, (list, tuple)):
        if len(axis) == 1:
            axis = axis[0]
        else:
            axis = None
    if isinstance(axis, int):
        return axis
    return -args[0].dim()


def is_exact(function: Any, args: Any) -> bool:
    """Whether PyTorch's operation is batch-invariant: a row's bits do not depend on the other
    rows."""
    name = function._schema.name.removeprefix("aten::")
    if name in _ALONG_AN_AXIS and args[0].is_floating_point():
        num_axes = args[0].dim()
        last_axis = num_axes - 1
        axis = _axis(function, args) % max(1, num_axes)
        return axis == last_axis
    is_product = False
    if name in ("mm", "bmm"):
        is_product = args[0].shape[-1] == 1  # nothing is summed
    return name in _EXACT or function in _VIEWS_IN_PLACE or is_product


def tensors_in(x: Any) -> Iterator[Tensor]:
    leaves, _ = tree_flatten(x)
    return (leaf for leaf in leaves if isinstance(leaf, Tensor))


@dataclass
class Lowering:
    """Lowers a recording on `device`. `is_kept`: whether an outside tensor's owner keeps it alive
    at its address. Only with `has_kernels` are there C++ kernels for products and lookups, and
    reductions over rows of any width."""

    is_kept: Callable[[Tensor], bool]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    has_kernels: bool = True
    values: Values = field(default_factory=Values)
    entries: list[Entry] = field(default_factory=list)
    # addresses of storages written before the last operation
    changed_outside: set[int] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)  # addresses of all written storages
    constants: set[int] = field(default_factory=set)  # addresses of storages that no entry writes

    def run(self, operations: list[Recorded]) -> list[Entry]:
        changed = set(_changed(operations))
        # the last one writes results, which are not read again
        without_last = operations[:-1]
        self.changed = changed
        self.changed_outside = set(_changed(without_last))
        for operation in operations:
            if isinstance(operation, KernelCall):
                self._kernel(operation)
                continue
            if isinstance(operation, Launched):
                self._launch(operation)
                continue
            function = operation.function
            given = (operation.args, operation.kwargs)
            inputs = list(tensors_in(given))
            results = list(tensors_in(operation.found))
            known = {_storage(tensor) for tensor in inputs}
            is_view_in_place = function in _VIEWS_IN_PLACE
            is_mutable = function._schema.is_mutable and not is_view_in_place
            if not is_mutable:
                are_views = all(_storage(tensor) in known for tensor in results)
                if are_views:
                    continue  # views
            made = {_storage(tensor) for tensor in results}
            is_empty = "empty" in function.name()
            is_fixed = not (is_mutable or is_empty or made & changed)
            if is_fixed and known <= self.constants:
                self.constants |= made
                self.values.constants += results
                continue
            for tensor in results:
                if _storage(tensor) not in known:
                    self.values.add(tensor)
            if is_empty:
                continue
            self._hold(inputs)
            if not self._lower(operation):
                self._call(operation, inputs, results)
        self._join_linears()
        self._join_rows()
        self._drop_stores()
        self._place_results()
        return self.entries

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if self.values.number(tensor) is not None:
                continue
            storage = _storage(tensor)
            stays = storage not in self.changed and (
                storage in self.constants or self.is_kept(tensor)
            )
            if not stays:
                self.values.held.append(tensor)
            if storage in self.changed_outside:
                self.values.add_outside(tensor)

    # -- operations -------------------------------------------------------------------------------

    def _lower(self, each: Operation) -> bool:
        function = each.function
        args = each.args
        kwargs = each.kwargs
        result = each.found
        if function in _UNARY:
            op = _UNARY[function]
            return self._compute(op, args[:1], result)
        alpha = kwargs.get("alpha", 1)
        has_alpha = alpha != 1 or len(args) > 2
        if function in _BINARY and not has_alpha:
            op = _BINARY[function]
            return self._compute(op, args, result)
        if function in _IN_PLACE and not has_alpha:
            op = _IN_PLACE[function]
            target = args[0]
            return self._compute(op, args, target, in_place=True)
        if function is aten.copy_.default:
            target = args[0]
            source = args[1:2]
            return self._compute("copy", source, target, in_place=True)
        if function is aten.gelu.default:
            is_tanh = kwargs.get("approximate") == "tanh"
            op = "gelu_tanh" if is_tanh else "gelu"
            return self._compute(op, args[:1], result)
        has_softplus = self.has_kernels and len(args) == 1
        if function is aten.softplus.default and has_softplus:
            return self._compute("softplus", args, result)
        if function is aten.pow.Tensor_Scalar and args[1] in (2, 3):
            power = int(args[1])
            return self._power(args[0], power, result)
        if function in _REDUCTIONS:
            op = _REDUCTIONS[function]
            return self._reduce(op, each)
        if function is aten.native_layer_norm.default:
            return self._layer_norm(result, *args)
        if function is aten.cat.default:
            return self._cat(each)
        if not self.has_kernels:
            return False
        if function is aten.embedding.default:
            table = args[0]
            numbers = args[1]
            return self._pick(table, numbers, result)
        if function is aten.mm.default:
            x = args[0]
            weight = args[1]
            return self._linear(x, weight, None, result)
        if function is aten.addmm.default:
            is_scaled = any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta"))
            if not is_scaled:
                bias = args[0]
                x = args[1]
                weight = args[2]
                return self._linear(x, weight, bias, result)
        return False

    def _rows(self, sizes: tuple[int, ...], layouts: list[Layout | None]) -> Rows | None:
        """The list for an operation over rows of `sizes`: the last entry if it fits, else a new
        one; `None` if the shapes do not fit a list."""
        shape = shape_of(sizes)
        if shape is None:
            return None
        if any(source is None for source in layouts):
            return None
        if self.entries:
            last = self.entries[-1]
            if isinstance(last, Rows) and last.shape == shape:
                inputs = [x for x in layouts if x is not None]
                if last.takes(inputs):
                    return last
        rows = Rows(shape)
        self.entries.append(rows)
        return rows

    def _sizes(self, found: Tensor) -> tuple[int, ...]:
        """The sizes of a result's list: the result's, or the last list's if the result has one
        number per row of it."""
        sizes = tuple(found.shape)
        if not sizes or sizes[-1] != 1 or not self.entries:
            return sizes
        last = self.entries[-1]
        if not isinstance(last, Rows):
            return sizes
        width = last.shape.width
        if width > 1:
            whole = *sizes[:-1], width
            if shape_of(whole) == last.shape:
                return whole
        return sizes

    def _compute(
        self,
        op: str,
        args: tuple[Any, ...],
        found: Tensor,
        in_place: bool = False,
    ) -> bool:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if (
            found.dtype not in FLOATS
            or not found.numel()
            or not tensors
            or not isinstance(args[0], Tensor)
        ):
            return False
        dtypes = DTYPES if op == "copy" else FLOATS
        operands = (*tensors, found)
        if any(x.device != self.device for x in operands):
            return False
        if any(x.dtype not in dtypes for x in operands):
            return False
        if in_place:
            # before sizes are chosen: each part of a row must not change the row's single number
            # again
            self._end_rows()
        sizes = self._sizes(found)
        refs = [self.values.ref(x) for x in tensors]
        target_ref = self.values.ref(found)
        layouts = [layout(ref, sizes) for ref in refs]
        target = layout(target_ref, sizes)
        rows = self._rows(sizes, layouts)
        if rows is None or target is None:
            return False
        number = 0.0
        if len(args) == 2 and not isinstance(args[1], Tensor):
            number = float(args[1])
        registers = [rows.read(source) for source in layouts if source is not None]
        if op in _ROUNDS_NUMBERS:
            rounded = torch.tensor(number, dtype=found.dtype, device="cpu")
            number = float(rounded)
            for index, x in enumerate(tensors):
                if x.dim() == 0 and x.dtype is not found.dtype:
                    register = registers[index]
                    is_narrow = bool(rows.narrow[register])
                    registers[index] = rows.compute("copy", found.dtype, is_narrow, register)
        are_narrow = all(rows.narrow[register] for register in registers)
        if are_narrow != target.is_narrow:
            return False  # numbers per row that would have to fill whole rows
        a, b = (*registers, -1)[:2]
        result = rows.compute(op, found.dtype, target.is_narrow, a, b, number)
        rows.write(target, result)
        if in_place:
            self._end_rows()
        return True

    def _end_rows(self) -> None:
        """Makes the next operation read memory again instead of registers."""
        no_rows = Shape((0, 0, 0), 0)
        self.entries.append(Rows(no_rows))

    def _power(self, x: Tensor, power: int, found: Tensor) -> bool:
        if power == 2:
            return self._compute("square", (x,), found)
        if x.dtype not in FLOATS or x.dtype is not found.dtype:
            return False
        sizes = self._sizes(found)
        source_ref = self.values.ref(x)
        target_ref = self.values.ref(found)
        source = layout(source_ref, sizes)
        target = layout(target_ref, sizes)
        rows = self._rows(sizes, [source])
        if rows is None or source is None or target is None:
            return False
        is_narrow = target.is_narrow
        if source.is_narrow != is_narrow:
            return False
        a = rows.read(source)
        square = rows.compute("square", torch.float32, is_narrow, a)
        cube = rows.compute("mul", found.dtype, is_narrow, square, a)
        rows.write(target, cube)
        return True

    def _reduce(self, op: str, each: Operation) -> bool:
        x = each.args[0]
        dims = None
        if len(each.args) > 1:
            dims = each.args[1]
        found: Tensor = each.found
        if (
            not self._is_float(x)
            or found.dtype not in FLOATS
            or not isinstance(dims, (list, tuple))
        ):
            return False
        num_axes = x.dim()
        if num_axes == 0:
            return False
        width = x.shape[-1]
        if not self.has_kernels and width > MAX_REDUCED_WIDTH:
            return False
        axes = [dim % num_axes for dim in dims]
        is_last_axis = axes == [num_axes - 1]
        if not is_last_axis or width == 1 or not x.numel():
            return False
        result = found
        if found.dim() != num_axes:
            result = found.unsqueeze(-1)
        sizes = tuple(x.shape)
        source_ref = self.values.ref(x)
        target_ref = self.values.ref(result)
        source = layout(source_ref, sizes)
        target = layout(target_ref, sizes)
        rows = self._rows(sizes, [source])
        if rows is None or source is None or target is None:
            return False
        if source.is_narrow:
            return False
        register = rows.read(source)
        reduced = rows.compute(op, found.dtype, True, register)
        rows.write(target, reduced)
        return True

    def _layer_norm(
        self,
        found: Any,
        x: Tensor,
        shape: Any,
        weight: Any,
        bias: Any,
        eps: float,
    ) -> bool:
        out = found[0]
        if (
            len(shape) != 1
            or not self._is_float(x)
            or out.dtype not in FLOATS
            or not x.numel()
            or x.shape[-1] == 1
        ):
            return False
        width = x.shape[-1]
        if not self.has_kernels and width > MAX_REDUCED_WIDTH:
            return False
        sizes = tuple(x.shape)
        inputs = [y for y in (x, weight, bias) if y is not None]
        refs = [self.values.ref(y) for y in inputs]
        target_ref = self.values.ref(out)
        layouts = [layout(ref, sizes) for ref in refs]
        target = layout(target_ref, sizes)
        rows = self._rows(sizes, layouts)
        if rows is None or target is None:
            return False
        if any(source is None or source.is_narrow for source in layouts):
            return False
        single = torch.float32
        registers = [rows.read(source) for source in layouts if source is not None]
        a, *scales = registers
        mean = rows.compute("mean", single, True, a)
        centred = rows.compute("sub", single, False, a, mean)
        square = rows.compute("square", single, False, centred)
        variance = rows.compute("mean", single, True, square)
        shifted = rows.compute("add", single, True, variance, number=eps)
        factor = rows.compute("rsqrt", single, True, shifted)
        dtype = single if scales else out.dtype
        made = rows.compute("mul", dtype, False, centred, factor)
        if weight is not None:
            dtype = out.dtype if bias is None else single
            made = rows.compute("mul", dtype, False, made, scales[0])
        if bias is not None:
            made = rows.compute("add", out.dtype, False, made, scales[-1])
        rows.write(target, made)
        return True

    def _cat(self, each: Operation) -> bool:
        parts = each.args[0]
        axis = 0
        if len(each.args) > 1:
            axis = each.args[1]
        found: Tensor = each.found
        for part in parts:
            if (
                not self._is_float(part)
                or part.dim() != found.dim()
                or part.dtype is not found.dtype
            ):
                return False
        start = 0
        for part in parts:
            length = part.shape[axis]
            if part.numel():
                target = found.narrow(axis, start, length)
                if not self._compute("copy", (part,), target):
                    return False  # the call made instead writes all parts again
            start += length
        return True

    def _pick(self, table: Tensor, numbers: Tensor, found: Tensor) -> bool:
        fits = (
            numbers.dtype is torch.int64
            and numbers.is_contiguous()
            and table.dim() == 2
            and table.stride(1) == 1
        )
        if (
            not fits
            or not found.is_contiguous()
            or not found.numel()
            or self.values.number(table) is not None
        ):
            return False
        size = table.element_size()
        num_rows, width = table.shape
        row_bytes = width * size
        stride_bytes = table.stride(0) * size
        packed = _PICK.pack(
            0,
            0,
            0,
            numbers.numel(),
            num_rows,
            row_bytes,
            stride_bytes,
            row_bytes,
        )
        pointers = {0: table, 8: numbers, 16: found}
        refs = {offset: self.values.ref(x) for offset, x in pointers.items()}
        self._add("pick", packed, refs, reads=(0, 8), writes=(16,))
        return True

    def _linear(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        found: Tensor,
    ) -> bool:
        """Lowers a product; `weight` is `(depth, width)`, as the operation takes it."""
        is_ours = batch_invariant.get()
        if not is_ours and x.dtype in HALVES:
            is_ours = x.shape[0] <= max_rows(x.dtype)
        if (
            not is_ours
            or x.dtype not in FLOATS
            or not found.numel()
            or self.values.number(weight) is not None
        ):
            return False
        if weight.dtype is not x.dtype:
            return False
        if x.stride(1) != 1 or found.stride(1) != 1:
            return False
        if bias is not None:
            is_row = bias.dim() == 1 and bias.is_contiguous()
            if not is_row or bias.shape[0] != found.shape[1]:
                return False
        depth_stride, width_stride = weight.stride()
        if depth_stride == 1 and width_stride >= weight.shape[0]:
            is_transposed = False
            stored = weight.t()
        elif width_stride == 1:
            is_transposed = True
            stored = weight
        else:
            return False
        weight_ref = self.values.ref(stored)
        bias_ref = None
        if bias is not None:
            bias_ref = self.values.ref(bias)
        out_ref = self.values.ref(found)
        x_ref = self.values.ref(x)
        piece = (weight_ref, bias_ref, out_ref)
        product = Linear(x_ref, is_transposed, [piece])
        self.entries.append(product)
        return True

    def _is_float(self, x: Any) -> bool:
        return (
            isinstance(x, Tensor)
            and x.device == self.device
            and x.layout is torch.strided
            and x.dtype in FLOATS
        )

    def _add(
        self,
        name: str,
        packed: bytes,
        refs: dict[int, Ref],
        reads: Iterable[int],
        writes: Iterable[int],
    ) -> None:
        values_read = {refs[offset].value for offset in reads}
        values_written = {refs[offset].value for offset in writes}
        values_read -= {None}
        values_written -= {None}
        entry = Kernel(name, packed, refs, values_read, values_written)  # type: ignore[arg-type]
        self.entries.append(entry)

    def _kernel(self, call: KernelCall) -> None:
        tensors = (*call.reads.values(), *call.writes.values())
        self._hold(tensors)
        pointers = call.reads | call.writes
        refs = {offset: self.values.ref(tensor) for offset, tensor in pointers.items()}
        self._add(call.name, call.packed, refs, call.reads, call.writes)

    def _launch(self, each: Launched) -> None:
        given = (each.args, each.kwargs)
        leaves, tree = tree_flatten(given)
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._hold(tensors)
        args = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                leaf = self.values.ref(leaf)
            args.append(leaf)
        reads = {self.values.number(tensor) for tensor in tensors}
        writes = {self.values.number(tensor) for tensor in each.writes}
        reads -= {None}
        writes -= {None}
        entry = Launch(each.kernel, each.grid, args, tree, reads, writes)  # type: ignore[arg-type]
        self.entries.append(entry)

    def _call(self, each: Operation, inputs: list[Tensor], found: list[Tensor]) -> None:
        given = (each.args, each.kwargs)
        leaves, tree = tree_flatten(given)
        args = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                leaf = self.values.ref(leaf)
            args.append(leaf)
        function = each.function
        computes = any(tensor.is_floating_point() for tensor in found)
        if batch_invariant.get() and computes and not is_exact(function, each.args):
            raise NotCapturable(
                f"no kernel computes {function} with rows that do not depend on one another"
            )
        outputs: list[Ref | None] = []
        results, _ = tree_flatten(each.found)
        for leaf in results:
            ref = None
            if isinstance(leaf, Tensor):
                ref = self.values.ref(leaf)
            outputs.append(ref)
        reads = {self.values.number(tensor) for tensor in inputs}
        writes = {self.values.number(tensor) for tensor in found}
        reads -= {None}
        writes -= {None}
        if function._schema.is_mutable:
            writes |= reads
            outputs = []
        entry = Call(function, args, tree, outputs, reads, writes)  # type: ignore[arg-type]
        self.entries.append(entry)

    # -- the whole tape ---------------------------------------------------------------------------

    def _join_linears(self) -> None:
        """Moves products of one `x` up to the first of them, if nothing between writes what they
        read."""
        kept: list[Entry] = []
        for entry in self.entries:
            if isinstance(entry, Linear) and self._joins(entry, kept):
                continue
            kept.append(entry)
        self.entries = kept

    @staticmethod
    def _joins(entry: Linear, before: list[Entry]) -> bool:
        for other in reversed(before):
            if isinstance(other, Linear) and other.joins(entry):
                if len(other.pieces) < MAX_PIECES:
                    other.pieces += entry.pieces
                    return True
                return False
            if other.writes & entry.reads:
                return False
        return False

    def _join_rows(self) -> None:
        """Joins lists over rows of one shape, if the entries between allow one of them to move."""
        kept: list[Entry] = []
        for entry in self.entries:
            if not isinstance(entry, Rows):
                kept.append(entry)
            elif entry.instructions and not self._joins_rows(entry, kept):
                kept.append(entry)
        self.entries = kept

    @staticmethod
    def _joins_rows(entry: Rows, before: list[Entry]) -> bool:
        between: list[Entry] = []
        end = len(before)
        for place in range(end - 1, max(-1, end - _REACH), -1):
            other = before[place]
            if isinstance(other, Rows) and other.shape == entry.shape and other.can_absorb(entry):
                entry_waits = any(_depend(entry, sooner) for sooner in between)
                if not entry_waits:
                    other.absorb(entry)
                    return True
                others_wait = any(_depend(later, other) for later in between)
                if not others_wait:
                    del before[place]
                    other.absorb(entry)
                    before.append(other)
                    return True
            between.append(other)
        return False

    def _drop_stores(self) -> None:
        self.entries = [
            entry for entry in self.entries if not isinstance(entry, Rows) or entry.instructions
        ]
        readers: dict[int, set[int]] = {}
        for place, entry in enumerate(self.entries):
            for value in entry.reads:
                readers.setdefault(value, set()).add(place)
        for place, entry in enumerate(self.entries):
            if not isinstance(entry, Rows):
                continue
            needed = entry.reads | self.values.fixed.keys()
            for value in entry.writes:
                other_readers = readers.get(value, set()) - {place}
                if other_readers:
                    needed.add(value)
            entry.drop_stores(needed)
        self.entries = [
            entry for entry in self.entries if not isinstance(entry, Rows) or entry.instructions
        ]

    def _place_results(self) -> None:
        """Computes a value that is only copied outside directly at its target."""
        if not self.entries:
            return
        *others, last = self.entries
        if not isinstance(last, Rows):
            return
        copied = last.copied
        if copied is None:
            return
        source, target = copied
        value = source.value
        touching = [entry for entry in others if value in entry.reads | entry.writes]
        if len(touching) != 1:
            return
        (maker,) = touching
        span = 1
        for size, stride in zip(source.sizes, source.strides):
            span += (size - 1) * stride
        itemsize = source.dtype.itemsize
        span_bytes = span * itemsize
        content_bytes = math.prod(source.sizes) * itemsize
        nbytes = self.values.sizes[value or 0]
        is_whole = span_bytes == nbytes == content_bytes
        is_only_made = value not in maker.reads
        if is_whole and is_only_made and not isinstance(maker, Call):
            self.values.fixed[value or 0] = target.start
            self.entries.pop()

    def spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last entry that uses each value."""
        spans: dict[int, tuple[int, int]] = {}
        for place, entry in enumerate(self.entries):
            for value in entry.reads | entry.writes:
                first, _ = spans.get(value, (place, place))
                spans[value] = first, place
        return spans


_REACH = 6  # `_join_rows` looks back this far, in entries
MAX_REDUCED_WIDTH = 16384  # widest rows that one program on a device reduces


def _depend(later: Entry, sooner: Entry) -> bool:
    """Whether the order of two entries matters."""
    reads = later.reads
    writes = later.writes
    if reads & sooner.writes or writes & sooner.reads:
        return True
    return bool(writes & sooner.writes)


def _storage(tensor: Tensor) -> int:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise NotCapturable(f"{type(tensor).__name__} has no memory of its own")
    return tensor.untyped_storage().data_ptr()


def _changed(operations: list[Recorded]) -> Iterator[int]:
    """Addresses of storages that operations write after their creation."""
    for operation in operations:
        if isinstance(operation, KernelCall):
            yield from map(_storage, operation.writes.values())
        elif isinstance(operation, Launched):
            yield from map(_storage, operation.writes)
        else:
            schema = operation.function._schema
            if not schema.is_mutable or operation.function in _VIEWS_IN_PLACE:
                continue
            arguments = schema.arguments
            for argument, value in zip(arguments, operation.args):
                alias = argument.alias_info
                if alias is not None and alias.is_write:
                    yield from map(_storage, tensors_in(value))
            for argument in arguments[len(operation.args) :]:
                if argument.name not in operation.kwargs:
                    continue
                alias = argument.alias_info
                if alias is not None and alias.is_write:
                    value = operation.kwargs[argument.name]
                    yield from map(_storage, tensors_in(value))
