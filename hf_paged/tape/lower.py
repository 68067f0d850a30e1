"""Lowers a recording to a tape's entries: drops views and constants, fuses small operations into lists, turns products
and lookups into our kernels, and calls the remaining operations as recorded."""

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
_ROUNDS_NUMBERS = {"add", "sub", "maximum", "minimum"}  # round Python numbers to the dtype first; others do not
_REDUCTIONS = {aten.mean.dim: "mean", aten.sum.dim_IntList: "sum", aten.amax.default: "largest"}
_VIEWS_IN_PLACE = {
    *(aten.unsqueeze_.default, aten.squeeze_.default, aten.squeeze_.dim, aten.squeeze_.dims),
    *(aten.transpose_.default, aten.t_.default, aten.swapaxes_.default, aten.as_strided_.default),
}
# Operations that move, choose or compare numbers, or that sum each row separately, in order.
_EXACT = frozenset(
    "empty empty_like empty_strided new_empty new_empty_strided zeros zeros_like new_zeros zero_ ones ones_like "
    "new_ones full full_like new_full fill_ fill scalar_tensor arange linspace clone copy _to_copy copy_ cat stack "
    "repeat index index_select index_put index_put_ _unsafe_index gather scatter scatter_ slice_scatter select_scatter "
    "embedding where masked_fill masked_fill_ constant_pad_nd roll flip tril triu tril_ triu_ topk sort max min amax "
    "amin maximum minimum clamp clamp_min clamp_max clamp_ clamp_min_ clamp_max_ relu relu_ abs neg sign floor ceil "
    "round lift_fresh lift_fresh_copy alias_copy _softmax _log_softmax cumsum histc index_add_ nan_to_num "
    "_local_scalar_dense _unsafe_view _reshape_alias".split()
)
# operations in `_EXACT` that are exact along the last axis only
_ALONG_AN_AXIS = frozenset({"amax", "amin", "cumsum", "max", "min", "sort", "topk", "_softmax", "_log_softmax"})
WITH_OUT = {aten.mm.default: aten.mm.out, aten.addmm.default: aten.addmm.out, aten.bmm.default: aten.bmm.out}


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
        widths = [piece[2].sizes[1] for piece in (self.pieces[0], other.pieces[0])]
        is_alike = max(widths) < MIN_TILE_WIDTH or min(widths) >= MIN_TILE_WIDTH
        return self.x == other.x and self.is_transposed == other.is_transposed and is_alike

    @property
    def reads(self) -> set[int]:
        found = (ref for piece in self.pieces for ref in piece[:2])
        return {ref.value for ref in (self.x, *found) if ref is not None and ref.value is not None}

    @property
    def writes(self) -> set[int]:
        return {out.value for *_, out in self.pieces if out.value is not None}


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
    """The axis of an operation along one axis; for several or all axes, the first (as a negative number)."""
    names = [argument.name for argument in function._schema.arguments]
    place = names.index("dim") if "dim" in names else len(args)
    if place < len(args):
        axis = args[place]
    else:  # the default
        axis = function._schema.arguments[place].default_value if place < len(names) else None
    if isinstance(axis, (list, tuple)):
        axis = axis[0] if len(axis) == 1 else None
    return axis if isinstance(axis, int) else -args[0].dim()


def is_exact(function: Any, args: Any) -> bool:
    """Whether PyTorch's operation is batch-invariant: a row's bits do not depend on the other rows."""
    name = function._schema.name.removeprefix("aten::")
    if name in _ALONG_AN_AXIS and args[0].is_floating_point():
        return _axis(function, args) % max(1, args[0].dim()) == args[0].dim() - 1
    is_product = name in ("mm", "bmm") and args[0].shape[-1] == 1  # nothing is summed
    return name in _EXACT or function in _VIEWS_IN_PLACE or is_product


def tensors_in(x: Any) -> Iterator[Tensor]:
    return (leaf for leaf in tree_flatten(x)[0] if isinstance(leaf, Tensor))


@dataclass
class Lowering:
    """Lowers a recording on `device`. `is_kept`: whether an outside tensor's owner keeps it alive at its address. Only
    with `has_kernels` are there C++ kernels for products and lookups, and reductions over rows of any width."""

    is_kept: Callable[[Tensor], bool]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    has_kernels: bool = True
    values: Values = field(default_factory=Values)
    entries: list[Entry] = field(default_factory=list)
    changed_outside: set[int] = field(default_factory=set)  # addresses of storages written before the last operation
    changed: set[int] = field(default_factory=set)  # addresses of all written storages
    constants: set[int] = field(default_factory=set)  # addresses of storages that no entry writes

    def run(self, operations: list[Recorded]) -> list[Entry]:
        changed = self.changed = set(_changed(operations))
        self.changed_outside = set(_changed(operations[:-1]))  # the last one writes results, which are not read again
        for each in operations:
            if isinstance(each, KernelCall):
                self._kernel(each)
                continue
            if isinstance(each, Launched):
                self._launch(each)
                continue
            inputs, found = list(tensors_in((each.args, each.kwargs))), list(tensors_in(each.found))
            known = {_storage(tensor) for tensor in inputs}
            is_mutable = each.function._schema.is_mutable and each.function not in _VIEWS_IN_PLACE
            if not is_mutable and all(_storage(tensor) in known for tensor in found):
                continue  # views
            made = {_storage(tensor) for tensor in found}
            is_empty = "empty" in each.function.name()
            if not (is_mutable or is_empty or made & changed) and known <= self.constants:
                self.constants |= made
                self.values.constants += found
                continue
            for tensor in found:
                if _storage(tensor) not in known:
                    self.values.add(tensor)
            if is_empty:
                continue
            self._hold(inputs)
            if not self._lower(each):
                self._call(each, inputs, found)
        self._join_linears()
        self._join_rows()
        self._drop_stores()
        self._place_results()
        return self.entries

    def _hold(self, tensors: Iterable[Tensor]) -> None:
        for tensor in tensors:
            if self.values.number(tensor) is None:
                storage = _storage(tensor)
                if storage in self.changed or not (storage in self.constants or self.is_kept(tensor)):
                    self.values.held.append(tensor)
                if _storage(tensor) in self.changed_outside:
                    self.values.add_outside(tensor)

    # -- operations --------------------------------------------------------------------------------------------------

    def _lower(self, each: Operation) -> bool:
        function, args, kwargs = each.function, each.args, each.kwargs
        if function in _UNARY:
            return self._compute(_UNARY[function], args[:1], each.found)
        has_alpha = kwargs.get("alpha", 1) != 1 or len(args) > 2
        if function in _BINARY and not has_alpha:
            return self._compute(_BINARY[function], args, each.found)
        if function in _IN_PLACE and not has_alpha:
            return self._compute(_IN_PLACE[function], args, args[0], in_place=True)
        if function is aten.copy_.default:
            return self._compute("copy", args[1:2], args[0], in_place=True)
        if function is aten.gelu.default:
            return self._compute("gelu_tanh" if kwargs.get("approximate") == "tanh" else "gelu", args[:1], each.found)
        if function is aten.softplus.default and len(args) == 1 and self.has_kernels:
            return self._compute("softplus", args, each.found)
        if function is aten.pow.Tensor_Scalar and args[1] in (2, 3):
            return self._power(args[0], int(args[1]), each.found)
        if function in _REDUCTIONS:
            return self._reduce(_REDUCTIONS[function], each)
        if function is aten.native_layer_norm.default:
            return self._layer_norm(each.found, *args)
        if function is aten.cat.default:
            return self._cat(each)
        if not self.has_kernels:
            return False
        if function is aten.embedding.default:
            return self._pick(args[0], args[1], each.found)
        if function is aten.mm.default:
            return self._linear(args[0], args[1], None, each.found)
        if function is aten.addmm.default and not any(kwargs.get(name, 1) != 1 for name in ("alpha", "beta")):
            return self._linear(args[1], args[2], args[0], each.found)
        return False

    def _rows(self, sizes: tuple[int, ...], layouts: list[Layout | None]) -> Rows | None:
        """The list for an operation over rows of `sizes`: the last entry if it fits, else a new one; `None` if the
        shapes do not fit a list."""
        shape = shape_of(sizes)
        if shape is None or any(each is None for each in layouts):
            return None
        last = self.entries[-1] if self.entries else None
        if not (isinstance(last, Rows) and last.shape == shape and last.takes([x for x in layouts if x is not None])):
            last = Rows(shape)
            self.entries.append(last)
        return last

    def _sizes(self, found: Tensor) -> tuple[int, ...]:
        """The sizes of a result's list: the result's, or the last list's if the result has one number per row of it."""
        sizes = tuple(found.shape)
        last = self.entries[-1] if self.entries else None
        if sizes and sizes[-1] == 1 and isinstance(last, Rows) and last.shape.width > 1:
            whole = *sizes[:-1], last.shape.width
            if shape_of(whole) == last.shape:
                return whole
        return sizes

    def _compute(self, op: str, args: tuple[Any, ...], found: Tensor, in_place: bool = False) -> bool:
        tensors = [x for x in args if isinstance(x, Tensor)]
        if found.dtype not in FLOATS or not found.numel() or not tensors or not isinstance(args[0], Tensor):
            return False
        if any(x.device != self.device for x in (*tensors, found)):
            return False
        if any(x.dtype not in (DTYPES if op == "copy" else FLOATS) for x in (*tensors, found)):
            return False
        if in_place:  # before sizes are chosen: each part of a row must not change the row's single number again
            self._end_rows()
        sizes = self._sizes(found)
        layouts = [layout(self.values.ref(x), sizes) for x in tensors]
        target = layout(self.values.ref(found), sizes)
        rows = self._rows(sizes, layouts)
        if rows is None or target is None:
            return False
        number = float(args[1]) if len(args) == 2 and not isinstance(args[1], Tensor) else 0.0
        registers = [rows.read(each) for each in layouts if each is not None]
        if op in _ROUNDS_NUMBERS:
            number = float(torch.tensor(number, dtype=found.dtype, device="cpu"))
            registers = [
                rows.compute("copy", found.dtype, bool(rows.narrow[register]), register)
                if x.dim() == 0 and x.dtype is not found.dtype
                else register
                for x, register in zip(tensors, registers)
            ]
        if all(rows.narrow[each] for each in registers) != target.is_narrow:
            return False  # numbers per row that would have to fill whole rows
        a, b = (*registers, -1)[:2]
        rows.write(target, rows.compute(op, found.dtype, target.is_narrow, a, b, number))
        if in_place:
            self._end_rows()
        return True

    def _end_rows(self) -> None:
        """Makes the next operation read memory again instead of registers."""
        self.entries.append(Rows(Shape((0, 0, 0), 0)))

    def _power(self, x: Tensor, power: int, found: Tensor) -> bool:
        if power == 2:
            return self._compute("square", (x,), found)
        if x.dtype not in FLOATS or x.dtype is not found.dtype:
            return False
        sizes = self._sizes(found)
        source, target = layout(self.values.ref(x), sizes), layout(self.values.ref(found), sizes)
        rows = self._rows(sizes, [source])
        if rows is None or source is None or target is None or source.is_narrow != target.is_narrow:
            return False
        a = rows.read(source)
        square = rows.compute("square", torch.float32, target.is_narrow, a)
        rows.write(target, rows.compute("mul", found.dtype, target.is_narrow, square, a))
        return True

    def _reduce(self, op: str, each: Operation) -> bool:
        x, dims = each.args[0], each.args[1] if len(each.args) > 1 else None
        found: Tensor = each.found
        if not self._is_float(x) or found.dtype not in FLOATS or not isinstance(dims, (list, tuple)):
            return False
        if x.dim() == 0 or not (self.has_kernels or x.shape[-1] <= MAX_REDUCED_WIDTH):
            return False
        if [dim % x.dim() for dim in dims] != [x.dim() - 1] or x.shape[-1] == 1 or not x.numel():
            return False
        keeps = found if found.dim() == x.dim() else found.unsqueeze(-1)
        sizes = tuple(x.shape)
        source, target = layout(self.values.ref(x), sizes), layout(self.values.ref(keeps), sizes)
        rows = self._rows(sizes, [source])
        if rows is None or source is None or target is None or source.is_narrow:
            return False
        rows.write(target, rows.compute(op, found.dtype, True, rows.read(source)))
        return True

    def _layer_norm(self, found: Any, x: Tensor, shape: Any, weight: Any, bias: Any, eps: float) -> bool:
        out = found[0]
        if len(shape) != 1 or not self._is_float(x) or out.dtype not in FLOATS or not x.numel() or x.shape[-1] == 1:
            return False
        if not self.has_kernels and x.shape[-1] > MAX_REDUCED_WIDTH:
            return False
        sizes = tuple(x.shape)
        others = [y for y in (weight, bias) if y is not None]
        layouts = [layout(self.values.ref(y), sizes) for y in (x, *others)]
        target = layout(self.values.ref(out), sizes)
        rows = self._rows(sizes, layouts)
        if rows is None or target is None or any(each is None or each.is_narrow for each in layouts):
            return False
        single = torch.float32
        a, *scales = (rows.read(each) for each in layouts if each is not None)
        mean = rows.compute("mean", single, True, a)
        centred = rows.compute("sub", single, False, a, mean)
        variance = rows.compute("mean", single, True, rows.compute("square", single, False, centred))
        factor = rows.compute("rsqrt", single, True, rows.compute("add", single, True, variance, number=eps))
        made = rows.compute("mul", out.dtype if not scales else single, False, centred, factor)
        if weight is not None:
            made = rows.compute("mul", single if bias is not None else out.dtype, False, made, scales[0])
        if bias is not None:
            made = rows.compute("add", out.dtype, False, made, scales[-1])
        rows.write(target, made)
        return True

    def _cat(self, each: Operation) -> bool:
        parts, axis = each.args[0], each.args[1] if len(each.args) > 1 else 0
        found: Tensor = each.found
        if any(not self._is_float(x) or x.dim() != found.dim() or x.dtype is not found.dtype for x in parts):
            return False
        start = 0
        for part in parts:
            if part.numel() and not self._compute("copy", (part,), found.narrow(axis, start, part.shape[axis])):
                return False  # the call made instead writes all parts again
            start += part.shape[axis]
        return True

    def _pick(self, table: Tensor, numbers: Tensor, found: Tensor) -> bool:
        fits = numbers.dtype is torch.int64 and numbers.is_contiguous() and table.dim() == 2 and table.stride(1) == 1
        if not fits or not found.is_contiguous() or not found.numel() or self.values.number(table) is not None:
            return False
        size = table.element_size()
        counts = numbers.numel(), table.shape[0], table.shape[1] * size
        packed = _PICK.pack(0, 0, 0, *counts, table.stride(0) * size, table.shape[1] * size)
        refs = {place: self.values.ref(x) for place, x in ((0, table), (8, numbers), (16, found))}
        self._add("pick", packed, refs, (0, 8), (16,))
        return True

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, found: Tensor) -> bool:
        """Lowers a product; `weight` is `(depth, width)`, as the operation takes it."""
        is_ours = batch_invariant.get() or (x.dtype in HALVES and x.shape[0] <= max_rows(x.dtype))
        if not is_ours or x.dtype not in FLOATS or not found.numel() or self.values.number(weight) is not None:
            return False
        if weight.dtype is not x.dtype or x.stride(1) != 1 or found.stride(1) != 1:
            return False
        if bias is not None and (bias.dim() != 1 or not bias.is_contiguous() or bias.shape[0] != found.shape[1]):
            return False
        if weight.stride(0) == 1 and (weight.stride(1) >= weight.shape[0]):
            is_transposed, own = False, weight.t()
        elif weight.stride(1) == 1:
            is_transposed, own = True, weight
        else:
            return False
        refs = self.values.ref(own), None if bias is None else self.values.ref(bias), self.values.ref(found)
        self.entries.append(Linear(self.values.ref(x), is_transposed, [refs]))
        return True

    def _is_float(self, x: Any) -> bool:
        is_plain = isinstance(x, Tensor) and x.device == self.device and x.layout is torch.strided
        return is_plain and x.dtype in FLOATS

    def _add(self, name: str, packed: bytes, refs: dict[int, Ref], reads: Iterable[int], writes: Iterable[int]) -> None:
        touched = [{refs[place].value for place in places} - {None} for places in (reads, writes)]
        self.entries.append(Kernel(name, packed, refs, *touched))  # type: ignore[arg-type]

    def _kernel(self, call: KernelCall) -> None:
        self._hold((*call.reads.values(), *call.writes.values()))
        refs = {place: self.values.ref(tensor) for place, tensor in (call.reads | call.writes).items()}
        self._add(call.name, call.packed, refs, call.reads, call.writes)

    def _launch(self, each: Launched) -> None:
        leaves, tree = tree_flatten((each.args, each.kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        self._hold(tensors)
        args = [self.values.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        touched = [{self.values.number(x) for x in group} - {None} for group in (tensors, each.writes)]
        self.entries.append(Launch(each.kernel, each.grid, args, tree, *touched))  # type: ignore[arg-type]

    def _call(self, each: Operation, inputs: list[Tensor], found: list[Tensor]) -> None:
        leaves, tree = tree_flatten((each.args, each.kwargs))
        args = [self.values.ref(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        function = each.function
        computes = any(tensor.is_floating_point() for tensor in found)
        if batch_invariant.get() and computes and not is_exact(function, each.args):
            raise NotCapturable(f"no kernel computes {function} with rows that do not depend on one another")
        outputs: list[Ref | None] = [
            self.values.ref(leaf) if isinstance(leaf, Tensor) else None for leaf in tree_flatten(each.found)[0]
        ]
        touched = [{self.values.number(tensor) for tensor in tensors} - {None} for tensors in (inputs, found)]
        if function._schema.is_mutable:
            touched[1] |= touched[0]
            outputs = []
        self.entries.append(Call(function, args, tree, outputs, *touched))  # type: ignore[arg-type]

    # -- the whole tape ----------------------------------------------------------------------------------------------

    def _join_linears(self) -> None:
        """Moves products of one `x` up to the first of them, if nothing between writes what they read."""
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
        for place in range(len(before) - 1, max(-1, len(before) - _REACH), -1):
            other = before[place]
            if isinstance(other, Rows) and other.shape == entry.shape and other.can_absorb(entry):
                if not any(_depend(entry, each) for each in between):
                    other.absorb(entry)
                    return True
                if not any(_depend(each, other) for each in between):
                    del before[place]
                    other.absorb(entry)
                    before.append(other)
                    return True
            between.append(other)
        return False

    def _drop_stores(self) -> None:
        self.entries = [entry for entry in self.entries if not isinstance(entry, Rows) or entry.instructions]
        readers: dict[int, set[int]] = {}
        for place, entry in enumerate(self.entries):
            for value in entry.reads:
                readers.setdefault(value, set()).add(place)
        for place, entry in enumerate(self.entries):
            if isinstance(entry, Rows):
                own = entry.reads | self.values.fixed.keys()
                entry.drop_stores({x for x in entry.writes if x in own or readers.get(x, set()) - {place}})
        self.entries = [entry for entry in self.entries if not isinstance(entry, Rows) or entry.instructions]

    def _place_results(self) -> None:
        """Computes a value that is only copied outside directly at its target."""
        if not self.entries or not isinstance(last := self.entries[-1], Rows) or (copied := last.copied) is None:
            return
        source, target = copied
        touching = [each for each in self.entries[:-1] if source.value in each.reads | each.writes]
        span = 1 + sum((size - 1) * stride for size, stride in zip(source.sizes, source.strides))
        nbytes = self.values.sizes[source.value or 0]
        is_whole = span * source.dtype.itemsize == nbytes == math.prod(source.sizes) * source.dtype.itemsize
        is_only_made = len(touching) == 1 and source.value not in touching[0].reads
        if is_whole and is_only_made and not isinstance(touching[0], Call):
            self.values.fixed[source.value or 0] = target.start
            self.entries.pop()

    def spans(self) -> dict[int, tuple[int, int]]:
        """The first and the last entry that uses each value."""
        found: dict[int, tuple[int, int]] = {}
        for place, entry in enumerate(self.entries):
            for value in entry.reads | entry.writes:
                found[value] = found.get(value, (place, place))[0], place
        return found


_REACH = 6  # `_join_rows` looks back this far, in entries
MAX_REDUCED_WIDTH = 16384  # widest rows that one program on a device reduces


def _depend(later: Entry, sooner: Entry) -> bool:
    """Whether the order of two entries matters."""
    reads, writes = later.reads, later.writes
    return bool(reads & sooner.writes or writes & sooner.reads or writes & sooner.writes)


def _storage(tensor: Tensor) -> int:
    if type(tensor) not in (Tensor, torch.nn.Parameter):
        raise NotCapturable(f"{type(tensor).__name__} has no memory of its own")
    return tensor.untyped_storage().data_ptr()


def _changed(operations: list[Recorded]) -> Iterator[int]:
    """Addresses of storages that operations write after their creation."""
    for each in operations:
        if isinstance(each, KernelCall):
            yield from map(_storage, each.writes.values())
        elif isinstance(each, Launched):
            yield from map(_storage, each.writes)
        elif each.function._schema.is_mutable and each.function not in _VIEWS_IN_PLACE:
            for argument, value in zip(each.function._schema.arguments, each.args):
                if argument.alias_info is not None and argument.alias_info.is_write:
                    yield from map(_storage, tensors_in(value))
            for argument in each.function._schema.arguments[len(each.args) :]:
                if argument.name in each.kwargs and argument.alias_info is not None and argument.alias_info.is_write:
                    yield from map(_storage, tensors_in(each.kwargs[argument.name]))
