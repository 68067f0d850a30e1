"""Attention masks that stay symbolic until code reads the numbers, and their effect on each row of
a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)

from ..cache.handles import LazyTensor
from ..step import NotCapturable, NotPackable, StepMetadata

# Called with every mask made in this context: tells a call which leading positions its model treats
# as padding.
mask_observer: ContextVar[Callable[[PagedMask], None] | None] = ContextVar(
    "mask_observer", default=None
)

# Called with each attention of a forward that is not packed: numbers of rows, queries and keys, the
# mask, and whether it is causal without one.
attention_observer: ContextVar[
    Callable[[tuple[int, int, int], Tensor | None, bool], None] | None
] = ContextVar("attention_observer", default=None)

Columns = tuple[tuple[int, ...], tuple[int, ...]]
"""The first positions of each row's range of keys, and the ends."""


class MaskPattern(NamedTuple):
    """A mask function's parameters."""

    causal: bool  # a query sees keys up to its position
    window: int | None = None  # and at most this number of tokens, itself included
    # and only those in its chunk of this length, counted from the row's first real token
    chunk: int | None = None


def parse(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """The pattern of a mask function made by `transformers.masking_utils`, or `None` for any
    other."""
    is_causal = mask_function is causal_mask_function
    if is_causal or mask_function is bidirectional_mask_function:
        return MaskPattern(causal=is_causal)
    match _made_by(mask_function):
        case "and_masks", {"mask_functions": [overlay, other]} if other is causal_mask_function:
            match _made_by(overlay):
                case "sliding_window_overlay", {"sliding_window": window}:
                    return MaskPattern(causal=True, window=window)
                case "chunked_overlay", {"chunk_size": chunk}:
                    return MaskPattern(causal=True, chunk=chunk)
    return None


def _made_by(function: Any) -> tuple[str, dict[str, Any]]:
    """The name of the function in `transformers.masking_utils` that made this one (else `""`), and
    its closure."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return "", {}
    cells = function.__closure__ or ()
    values = [cell.cell_contents for cell in cells]
    maker = function.__qualname__.split(".")[0]
    variables = function.__code__.co_freevars
    return maker, dict(zip(variables, values))


class PagedMask(LazyTensor):
    """The mask `(batch, 1, query_length, kv_length)` of a mask function with a `MaskPattern`. Our
    attention function reads its pattern. A slice that keeps the last queries is symbolic too; other
    operations get the dense mask of the model's own implementation (`model_attention`)."""

    arguments: dict[str, Any]
    model_attention: str
    pattern: MaskPattern
    _made: dict[str, Any]  # cached results

    @staticmethod
    def __new__(cls, arguments: dict[str, Any], model_attention: str) -> PagedMask:
        """`arguments`: what transformers passed to the mask interface."""
        mask_function = arguments.get("mask_function", causal_mask_function)
        pattern = parse(mask_function)
        assert pattern is not None
        shape = (
            arguments["batch_size"],
            1,
            arguments["q_length"],
            arguments["kv_length"],
        )
        if model_attention == "sdpa":
            dtype = torch.bool
        else:
            dtype = arguments.get("dtype", torch.float32)
        device = arguments.get("device", "cpu")
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        mask.arguments, mask.model_attention, mask._made = arguments, model_attention, {}
        mask.pattern = pattern
        return mask

    @classmethod
    def __torch_dispatch__(
        cls,
        func: Any,
        types: Any,
        args: Any = (),
        kwargs: Any = None,
    ) -> Any:
        aten = torch.ops.aten
        if func in (aten.alias.default, aten.slice.Tensor) and not kwargs:
            mask, *range_of = args
            kept = mask._slice(*range_of)
            if kept is not None:
                return kept
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _slice(
        self,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> PagedMask | None:
        """The mask of the indices `start:end:step` on an axis; `None` unless they are all, or the
        last queries."""
        size = self.shape[dim]
        chosen = slice(start, end, step)
        first, last, stride = chosen.indices(size)
        are_last_queries = dim % self.dim() == 2 and first < size
        reaches_end = stride == 1 and last == size
        is_symbolic = first == 0 or are_last_queries
        if not reaches_end or not is_symbolic:
            return None
        arguments = self.arguments
        if first:
            offset = arguments.get("q_offset", 0)
            arguments = {
                **arguments,
                "q_length": size - first,
                "q_offset": offset + first,
            }
        return PagedMask(arguments, self.model_attention)

    def resolve(self, implementation: str) -> Any:
        """Returns the mask of `implementation`'s mask interface for the same arguments (for sdpa it
        may be `None`)."""
        if implementation not in self._made:
            make = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
            self._made[implementation] = make(**self.arguments)
        return self._made[implementation]

    def dense(self) -> Tensor:
        """The dense mask, in the format of the model's own implementation."""
        if "dense" not in self._made:
            arguments = {
                **self.arguments,
                "allow_is_causal_skip": False,
                "allow_is_bidirectional_skip": False,
            }
            implementation = "eager" if self.model_attention == "eager" else "sdpa"
            make = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
            mask = make(**arguments)
            self._made["dense"] = mask.expand(self.shape)
        return self._made["dense"]

    @property
    def visible_columns(self) -> Columns | None:
        """Key positions in the padded batch that the 2D padding mask leaves visible; `None` if it
        leaves holes."""
        if "columns" not in self._made:
            arguments = self.arguments
            end = arguments["kv_length"] + arguments.get("kv_offset", 0)
            padding_mask = arguments.get("attention_mask")
            batch_size = arguments["batch_size"]
            self._made["columns"] = padding_columns(padding_mask, batch_size, end)
        return self._made["columns"]


class LooksAhead:
    """An `attention_observer` of a first forward over rows of `length` columns, or those from
    `first` on if a cache holds the others: finds positions that saw later ones."""

    def __init__(
        self,
        paddings: list[int],
        length: int,
        first: int = 0,
    ) -> None:
        self.paddings = paddings
        self.length = length
        self.first = first
        self.num_calls = 0
        self._masks: list[Tensor | None] = []  # distinct masks that are not just causal

    def __call__(
        self,
        sizes: tuple[int, int, int],
        mask: Tensor | None,
        is_causal: bool,
    ) -> None:
        num_rows, num_queries, num_keys = sizes
        expected_rows = len(self.paddings)
        expected_queries = self.length - self.first
        is_ours = num_rows == expected_rows and num_queries == expected_queries
        fewest_keys = min(num_queries + 1, self.length)
        if not is_ours or not fewest_keys <= num_keys <= self.length:
            return  # in a vision tower
        self.num_calls += 1
        if isinstance(mask, PagedMask):
            is_causal = mask.pattern.causal
        elif mask is not None:
            is_causal = False
        if not is_causal and not any(mask is known for known in self._masks):
            self._masks.append(mask)

    def positions(self) -> Tensor | None:
        """Positions that saw a later one, and all between, `(rows, length)` bool; `None` for masks
        of other sizes."""
        rows = len(self.paddings)
        length = self.length
        paddings = self.paddings
        found = torch.zeros(rows, length, dtype=torch.bool, device="cpu")
        here = torch.arange(self.first, length, device="cpu")
        for mask in self._masks:
            if mask is None:
                return torch.ones_like(found)
            if isinstance(mask, PagedMask):
                mask = mask.dense()
            if mask.dim() != 4:
                return None
            num_queries, num_keys = mask.shape[-2:]
            if num_queries != len(here) or num_keys > length:
                return None
            columns = torch.arange(length - num_keys, length, device="cpu")
            if mask.dtype == torch.bool:
                is_visible = mask
            else:
                least = torch.finfo(mask.dtype).min
                is_visible = mask > least / 2
            seen = is_visible.any(1)
            seen = seen.expand(rows, -1, -1)
            seen = seen.cpu()
            last = (seen * columns).amax(-1)
            # padding may see anything
            first_tokens = torch.tensor(paddings, device="cpu")
            first_tokens = first_tokens[:, None]
            last = last.where(here >= first_tokens, here)
            looks_ahead = last > here
            shape = (rows, length + 1)
            steps = torch.zeros(shape, dtype=torch.long, device="cpu")
            steps[:, self.first : -1] += looks_ahead
            ends = -looks_ahead.long()
            steps = steps.scatter_add(1, last + 1, ends)
            depths = steps.cumsum(1)
            depths = depths[:, :-1]
            found |= depths > 0
        return found


def padding_columns(
    attention_mask: Tensor | None,
    batch_size: int,
    length: int,
) -> Columns | None:
    """The range of ones in the first `length` columns of each row of a `(batch, any)` mask, with
    zeros past its end; `None` if a row is not zeros, ones, zeros."""
    if attention_mask is None:
        firsts = (0,) * batch_size
        ends = (length,) * batch_size
        return firsts, ends
    mask = attention_mask[:, :length]
    mask = mask.bool().cpu()
    if not mask.shape[1]:
        return None
    # a byte per column: searching bytes is faster than a tensor op
    rows = [row.tobytes() for row in mask.numpy()]
    firsts = tuple(max(0, row.find(1)) for row in rows)
    ends = tuple(row.rfind(1) + 1 for row in rows)
    for row, first, end in zip(rows, firsts, ends):
        if end - first != row.count(1):
            return None
    if len(rows) != batch_size:
        return firsts * batch_size, ends * batch_size
    return firsts, ends


# -- a step under a mask, once for all layers ----------------------------------------------------


def packed_step(step: StepMetadata, mask: Tensor | None) -> StepMetadata:
    """Applies the window or chunks of the mask to a packed step. Raises `NotPackable` if the mask
    is not causal, hides other tokens, or shows tokens whose blocks the layer group has freed."""
    if not isinstance(mask, PagedMask):
        what = "None"
        if mask is not None:
            what = "a dense tensor, not just causal with a window or chunks"
        raise NotPackable(f"the attention mask is {what}")
    arguments = mask.arguments
    pattern = mask.pattern
    num_tokens = step.num_tokens
    names = ("batch_size", "q_length", "kv_length", "kv_offset")
    sizes = [arguments.get(name, 0) for name in names]
    if not pattern.causal:
        raise NotPackable("the attention mask shows later tokens")
    if sizes != [1, num_tokens, num_tokens, 0]:
        raise NotPackable(
            f"the attention mask was made for other sizes than 1 x {num_tokens} tokens: {sizes}"
        )
    all_columns = ((0,), (num_tokens,))
    if mask.visible_columns != all_columns:
        raise NotPackable("the attention mask hides tokens")
    most = pattern.window if pattern.chunk is None else pattern.chunk
    if step.window is not None:
        if most is None or most > step.window:
            raise NotPackable(
                f"the mask's window is {most}, but the cache keeps {step.window} tokens"
            )
    cascade = None
    if pattern.window == step.window:  # the window for which the cascade was planned
        cascade = step.cascade
    step = dataclasses.replace(step, window=pattern.window, cascade=cascade)
    if pattern.chunk is None:
        return step
    return _in_chunks(step, pattern.chunk)


def _in_chunks(step: StepMetadata, size: int) -> StepMetadata:
    """Limits a packed step's queries to chunks of `size` positions of their sequence: a row with
    queries in several chunks becomes one row per chunk, on the same block table."""
    if step.lengths is not None:
        if step.query_len != 1:
            raise NotCapturable(
                "queries of one row see several chunks of its tokens, which only the host can count"
            )
        seq_lens, _, _, origins = step.lengths
        assert origins is not None
        positions = origins + seq_lens - 1
        chunks = positions.div(size, rounding_mode="floor")
        starts = chunks * size - origins
        starts = starts.clamp_(min=0)
        lengths = step.lengths._replace(starts=starts)
        return dataclasses.replace(step, lengths=lengths, cascade=None)
    rows = []
    query_start = [0]
    seq_lens = []
    starts = []
    origins = []
    sequences = zip(step.seq_lens, step.origins)
    for row, (seq_len, origin) in enumerate(sequences):
        end = origin + seq_len
        row_start = step.query_start[row]
        row_end = step.query_start[row + 1]
        first = end - (row_end - row_start)
        while first < end:
            begin = first // size * size
            last = min(begin + size, end)
            rows.append(row)
            query_end = query_start[-1] + last - first
            query_start.append(query_end)
            seq_lens.append(last - origin)
            starts.append(max(0, begin - origin))
            origins.append(origin)
            first = last
    tables = step.block_tables
    if len(rows) > step.num_rows:
        index = torch.tensor(rows, device=tables.device)
        tables = tables[index]
    return dataclasses.replace(
        step,
        block_tables=tables,
        query_start=tuple(query_start),
        seq_lens=tuple(seq_lens),
        starts=tuple(starts),
        origins=tuple(origins),
    )


def rectangle_step(
    step: StepMetadata,
    query_len: int,
    mask: Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> tuple[StepMetadata, Tensor | None] | None:
    """Returns a step of rows with equally many queries, and an additive bias (in table
    coordinates), equivalent to `mask`; `None` if only a dense mask is."""
    columns = step.columns
    assert columns is not None
    num_columns = len(columns)
    if not isinstance(mask, PagedMask):
        firsts = tuple(max(columns.start, origin) for origin in step.origins)
        ends = (columns.stop,) * step.num_rows
        if mask is None:
            # without a mask, implementations attend to everything, except that several queries may
            # be causal
            if (is_causal and query_len > 1) or step.has_padding:
                return None
        else:
            if mask.dim() != 4 or mask.shape[3] != num_columns:
                return None
            if mask.shape[2] > 1 and step.has_padding:
                return None
            if mask.dtype == torch.bool:
                mask = torch.where(mask, 0.0, float("-inf"))
        pattern = MaskPattern(causal=False)
        metadata = _build(step, query_len, pattern, (firsts, ends), device)
        if mask is None:
            return metadata, None
        bias = mask.float()
        bias = in_table_coordinates(bias, step)
        return metadata, bias
    arguments = mask.arguments
    pattern = mask.pattern
    sizes = (
        arguments["q_length"],
        arguments["kv_length"],
        arguments.get("kv_offset", 0),
    )
    expected_sizes = (query_len, num_columns, columns.start)
    if sizes != expected_sizes:
        return None
    visible = mask.visible_columns
    if visible is None:
        return None
    _, ends = visible
    # implementations differ in the result of a row that sees nothing
    if 0 in ends or (pattern.chunk is not None and query_len > 1):
        return None
    if pattern.causal:
        offset = arguments.get("q_offset", 0)
        is_last = offset == columns.stop - query_len
        if not is_last or any(end < columns.stop for end in ends):
            return None
    metadata = _build(step, query_len, pattern, visible, device)
    return metadata, None


def in_table_coordinates(bias: Tensor, step: StepMetadata) -> Tensor:
    """Shifts `bias` `(rows or 1, ..., len(columns))` to each row's table coordinates; other columns
    are hidden."""
    assert step.columns is not None
    # a negative one cuts columns off
    shifts = [step.columns.start - origin for origin in step.origins]
    if not any(shifts):
        return bias
    sizes = bias.shape[1:]
    rows = bias.expand(len(shifts), *sizes)
    most = max(shifts)
    shifted = []
    for row, shift in zip(rows, shifts):
        padding = (shift, most - shift)
        row = F.pad(row, padding, value=float("-inf"))
        shifted.append(row)
    return torch.stack(shifted)


def _build(
    step: StepMetadata,
    query_len: int,
    pattern: MaskPattern,
    visible: Columns,
    device: torch.device,
) -> StepMetadata:
    """Applies a pattern and a padding mask to a step. Raises `ValueError` if the mask shows columns
    that were padding when they were cached, and so were not stored."""
    columns = step.columns
    firsts, ends = visible
    assert columns is not None
    if len(firsts) != step.num_rows:
        firsts = firsts * step.num_rows
        ends = ends * step.num_rows
    seq_lens = []
    starts = []
    for origin, first, end in zip(step.origins, firsts, ends):
        if max(first, columns.start) < origin and end > first:
            raise ValueError(
                f"the attention mask shows position {first}, but the first {origin} positions of"
                " that row were padding when they were cached and are not stored: pass a mask that"
                " hides them, as before"
            )
        if pattern.chunk is not None:  # chunks count from the row's first real token
            last_position = max(0, columns.stop - 1 - first)
            first += last_position // pattern.chunk * pattern.chunk
        seq_len = max(0, end - origin)
        first_column = columns.start - origin
        start = max(0, first - origin, first_column)
        seq_lens.append(seq_len)
        starts.append(start)
    tables = step.block_tables.to(device)
    return StepMetadata.rectangle(
        tables,
        seq_lens,
        step.block_size,
        query_len=query_len,
        starts=starts,
        causal=pattern.causal,
        window=pattern.window,
    )
