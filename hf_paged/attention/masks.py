"""Attention masks that stay symbolic until code reads the numbers, and their effect on each row of a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, bidirectional_mask_function, causal_mask_function

from ..cache.handles import LazyTensor
from ..step import NotCapturable, NotPackable, StepMetadata

# Called with every mask made in this context: tells a call which leading positions its model treats as padding.
mask_observer: ContextVar[Callable[[PagedMask], None] | None] = ContextVar("mask_observer", default=None)

# Called when a model's own function computes attention: numbers of rows, queries and keys, the mask, and whether it is
# causal without one.
attention_observer: ContextVar[Callable[[tuple[int, int, int], Tensor | None, bool], None] | None] = ContextVar(
    "attention_observer", default=None
)

Columns = tuple[tuple[int, ...], tuple[int, ...]]
"""The first positions of each row's range of keys, and the ends."""


class MaskPattern(NamedTuple):
    """A mask function's parameters."""

    causal: bool  # a query sees keys up to its position
    window: int | None = None  # and at most this number of tokens, itself included
    chunk: int | None = None  # and only those in its chunk of this length, counted from the row's first real token


def parse(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """The pattern of a mask function made by `transformers.masking_utils`, or `None` for any other."""
    if mask_function is causal_mask_function or mask_function is bidirectional_mask_function:
        return MaskPattern(causal=mask_function is causal_mask_function)
    match _made_by(mask_function):
        case "and_masks", {"mask_functions": [overlay, other]} if other is causal_mask_function:
            match _made_by(overlay):
                case "sliding_window_overlay", {"sliding_window": window}:
                    return MaskPattern(causal=True, window=window)
                case "chunked_overlay", {"chunk_size": chunk}:
                    return MaskPattern(causal=True, chunk=chunk)
    return None


def _made_by(function: Any) -> tuple[str, dict[str, Any]]:
    """The name of the function in `transformers.masking_utils` that made this one (else `""`), and its closure."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return "", {}
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__qualname__.split(".")[0], dict(zip(function.__code__.co_freevars, values))


class PagedMask(LazyTensor):
    """The mask `(batch, 1, query_length, kv_length)` of a mask function with a `MaskPattern`. Our attention function
    reads its pattern. A slice that keeps the last queries is symbolic too; other operations get the dense mask of the
    model's own implementation (`model_attention`)."""

    arguments: dict[str, Any]
    model_attention: str
    pattern: MaskPattern
    _made: dict[str, Any]  # cached results

    @staticmethod
    def __new__(cls, arguments: dict[str, Any], model_attention: str) -> PagedMask:
        """`arguments`: what transformers passed to the mask interface."""
        pattern = parse(arguments.get("mask_function", causal_mask_function))
        assert pattern is not None
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        dtype = torch.bool if model_attention == "sdpa" else arguments.get("dtype", torch.float32)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=arguments.get("device", "cpu"))
        mask.arguments, mask.model_attention, mask._made = arguments, model_attention, {}
        mask.pattern = pattern
        return mask

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.ops.aten.alias.default, torch.ops.aten.slice.Tensor) and not kwargs:
            mask, *range_of = args
            if (kept := mask._slice(*range_of)) is not None:
                return kept
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _slice(self, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1) -> PagedMask | None:
        """The mask of the indices `start:end:step` on an axis; `None` unless they are all, or the last queries."""
        size = self.shape[dim]
        first, last, stride = slice(start, end, step).indices(size)
        are_last_queries = dim % self.dim() == 2 and first < size
        if stride != 1 or last != size or not (first == 0 or are_last_queries):
            return None
        arguments = self.arguments
        if first:
            arguments = {**arguments, "q_length": size - first, "q_offset": arguments.get("q_offset", 0) + first}
        return PagedMask(arguments, self.model_attention)

    def resolve(self, implementation: str) -> Any:
        """Returns the mask of `implementation`'s mask interface for the same arguments (for sdpa it may be `None`)."""
        if implementation not in self._made:
            self._made[implementation] = ALL_MASK_ATTENTION_FUNCTIONS[implementation](**self.arguments)
        return self._made[implementation]

    def dense(self) -> Tensor:
        """The dense mask, in the format of the model's own implementation."""
        if "dense" not in self._made:
            arguments = {**self.arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            make = ALL_MASK_ATTENTION_FUNCTIONS["eager" if self.model_attention == "eager" else "sdpa"]
            self._made["dense"] = make(**arguments).expand(self.shape)
        return self._made["dense"]

    @property
    def visible_columns(self) -> Columns | None:
        """Key positions in the padded batch that the 2D padding mask leaves visible; `None` if it leaves holes."""
        if "columns" not in self._made:
            arguments = self.arguments
            end = arguments["kv_length"] + arguments.get("kv_offset", 0)
            self._made["columns"] = padding_columns(arguments.get("attention_mask"), arguments["batch_size"], end)
        return self._made["columns"]


class LooksAhead:
    """An `attention_observer` of a first forward over rows of `length` columns: finds positions that saw later ones."""

    def __init__(self, paddings: list[int], length: int) -> None:
        self.paddings, self.length = paddings, length
        self.num_calls = 0
        self._masks: list[Tensor | None] = []  # distinct masks that are not just causal

    def __call__(self, sizes: tuple[int, int, int], mask: Tensor | None, is_causal: bool) -> None:
        if sizes != (len(self.paddings), self.length, self.length):
            return  # in a vision tower
        self.num_calls += 1
        if isinstance(mask, PagedMask):
            is_causal = mask.pattern.causal
        elif mask is not None:
            is_causal = False
        if not is_causal and not any(mask is known for known in self._masks):
            self._masks.append(mask)

    def positions(self) -> Tensor | None:
        """Positions that saw a later one, and all between, `(rows, length)` bool; `None` for masks of other sizes."""
        rows, length, paddings = len(self.paddings), self.length, self.paddings
        found = torch.zeros(rows, length, dtype=torch.bool, device="cpu")
        here = torch.arange(length, device="cpu")
        for mask in self._masks:
            if mask is None:
                return torch.ones_like(found)
            mask = mask.dense() if isinstance(mask, PagedMask) else mask
            if mask.dim() != 4 or mask.shape[-2:] != (length, length):
                return None
            is_visible = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
            seen = is_visible.any(1).expand(rows, -1, -1).cpu()
            last = (seen * here).amax(-1)
            last = last.where(here >= torch.tensor(paddings, device="cpu")[:, None], here)  # padding may see anything
            steps = torch.zeros(rows, length + 1, dtype=torch.long, device="cpu")
            steps[:, :-1] += last > here
            found |= steps.scatter_add(1, last + 1, -(last > here).long()).cumsum(1)[:, :-1] > 0
        return found


def padding_columns(attention_mask: Tensor | None, batch_size: int, length: int) -> Columns | None:
    """The range of ones in the first `length` columns of each row of a `(batch, any)` mask, with zeros past its end;
    `None` if a row is not zeros, ones, zeros."""
    if attention_mask is None:
        return (0,) * batch_size, (length,) * batch_size
    mask = attention_mask[:, :length].bool().cpu()
    if not mask.shape[1]:
        return None
    rows = [row.tobytes() for row in mask.numpy()]  # a byte per column: searching bytes is faster than a tensor op
    firsts = tuple(max(0, row.find(1)) for row in rows)
    ends = tuple(row.rfind(1) + 1 for row in rows)
    if any(end - first != row.count(1) for row, first, end in zip(rows, firsts, ends)):
        return None
    return (firsts, ends) if len(rows) == batch_size else (firsts * batch_size, ends * batch_size)


# -- a step under a mask, once for all layers -----------------------------------------------------------------------


def packed_step(step: StepMetadata, mask: Tensor | None) -> StepMetadata:
    """Applies the window or chunks of the mask to a packed step. Raises `NotPackable` if the mask is not causal, hides
    other tokens, or shows tokens whose blocks the layer group has freed."""
    if not isinstance(mask, PagedMask):
        what = "None" if mask is None else "a dense tensor, not just causal with a window or chunks"
        raise NotPackable(f"the attention mask is {what}")
    arguments, pattern = mask.arguments, mask.pattern
    sizes = [arguments.get(name, 0) for name in ("batch_size", "q_length", "kv_length", "kv_offset")]
    if not pattern.causal:
        raise NotPackable("the attention mask shows later tokens")
    if sizes != [1, step.num_tokens, step.num_tokens, 0]:
        raise NotPackable(f"the attention mask was made for other sizes than 1 x {step.num_tokens} tokens: {sizes}")
    if mask.visible_columns != ((0,), (step.num_tokens,)):
        raise NotPackable("the attention mask hides tokens")
    most = pattern.window if pattern.chunk is None else pattern.chunk
    if step.window is not None and (most is None or most > step.window):
        raise NotPackable(f"the mask's window is {most}, but the cache keeps {step.window} tokens")
    same = pattern.window == step.window  # the window for which the cascade was planned
    step = dataclasses.replace(step, window=pattern.window, cascade=step.cascade if same else None)
    return step if pattern.chunk is None else _in_chunks(step, pattern.chunk)


def _in_chunks(step: StepMetadata, size: int) -> StepMetadata:
    """Limits a packed step's queries to chunks of `size` positions of their sequence: a row with queries in several
    chunks becomes one row per chunk, on the same block table."""
    if step.lengths is not None:
        if step.query_len != 1:
            raise NotCapturable("queries of one row see several chunks of its tokens, which only the host can count")
        seq_lens, _, _, origins = step.lengths
        assert origins is not None
        starts = ((origins + seq_lens - 1).div(size, rounding_mode="floor") * size - origins).clamp_(min=0)
        return dataclasses.replace(step, lengths=step.lengths._replace(starts=starts), cascade=None)
    rows, query_start, seq_lens, starts, origins = [], [0], [], [], []
    for row, (seq_len, origin) in enumerate(zip(step.seq_lens, step.origins)):
        end = origin + seq_len
        first = end - (step.query_start[row + 1] - step.query_start[row])
        while first < end:
            begin = first // size * size
            last = min(begin + size, end)
            rows.append(row)
            query_start.append(query_start[-1] + last - first)
            seq_lens.append(last - origin)
            starts.append(max(0, begin - origin))
            origins.append(origin)
            first = last
    tables = step.block_tables
    if len(rows) > step.num_rows:
        tables = tables[torch.tensor(rows, device=tables.device)]
    return dataclasses.replace(
        step,
        block_tables=tables,
        query_start=tuple(query_start),
        seq_lens=tuple(seq_lens),
        starts=tuple(starts),
        origins=tuple(origins),
    )


def rectangle_step(
    step: StepMetadata, query_len: int, mask: Tensor | None, is_causal: bool, device: torch.device
) -> tuple[StepMetadata, Tensor | None] | None:
    """Returns a step of rows with equally many queries, and an additive bias (in table coordinates), equivalent to
    `mask`; `None` if only a dense mask is."""
    columns = step.columns
    assert columns is not None
    if not isinstance(mask, PagedMask):
        seen = tuple(max(columns.start, origin) for origin in step.origins), (columns.stop,) * step.num_rows
        if mask is None:
            # without a mask, implementations attend to everything, except that several queries may be causal
            if (is_causal and query_len > 1) or step.has_padding:
                return None
        elif mask.dim() != 4 or mask.shape[3] != len(columns) or (mask.shape[2] > 1 and step.has_padding):
            return None
        elif mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf"))
        metadata = _build(step, query_len, MaskPattern(causal=False), seen, device)
        return metadata, None if mask is None else in_table_coordinates(mask.float(), step)
    arguments, pattern = mask.arguments, mask.pattern
    sizes = (arguments["q_length"], arguments["kv_length"], arguments.get("kv_offset", 0))
    if sizes != (query_len, len(columns), columns.start):
        return None
    visible = mask.visible_columns
    # implementations differ in the result of a row that sees nothing
    if visible is None or 0 in visible[1] or (pattern.chunk is not None and query_len > 1):
        return None
    is_last = arguments.get("q_offset", 0) == columns.stop - query_len
    if pattern.causal and not (is_last and all(end >= columns.stop for end in visible[1])):
        return None
    return _build(step, query_len, pattern, visible, device), None


def in_table_coordinates(bias: Tensor, step: StepMetadata) -> Tensor:
    """Shifts `bias` `(rows or 1, ..., len(columns))` to each row's table coordinates; other columns are hidden."""
    assert step.columns is not None
    shifts = [step.columns.start - origin for origin in step.origins]  # a negative one cuts columns off
    if not any(shifts):
        return bias
    rows, most = bias.expand(len(shifts), *bias.shape[1:]), max(shifts)
    return torch.stack([F.pad(row, (at, most - at), value=float("-inf")) for row, at in zip(rows, shifts)])


def _build(
    step: StepMetadata, query_len: int, pattern: MaskPattern, visible: Columns, device: torch.device
) -> StepMetadata:
    """Applies a pattern and a padding mask to a step. Raises `ValueError` if the mask shows columns that were padding
    when they were cached, and so were not stored."""
    columns, (firsts, ends) = step.columns, visible
    assert columns is not None
    if len(firsts) != step.num_rows:
        firsts, ends = firsts * step.num_rows, ends * step.num_rows
    seq_lens, starts = [], []
    for origin, first, end in zip(step.origins, firsts, ends):
        if max(first, columns.start) < origin and end > first:
            raise ValueError(
                f"the attention mask shows position {first}, but the first {origin} positions of that row were "
                "padding when they were cached and are not stored: pass a mask that hides them, as before"
            )
        if pattern.chunk is not None:  # chunks count from the row's first real token
            first += max(0, columns.stop - 1 - first) // pattern.chunk * pattern.chunk
        seq_lens.append(max(0, end - origin))
        starts.append(max(0, first - origin, columns.start - origin))
    tables, sees = step.block_tables.to(device), {"causal": pattern.causal, "window": pattern.window}
    return StepMetadata.rectangle(tables, seq_lens, step.block_size, query_len=query_len, starts=starts, **sees)
