"""Attention masks that stay symbolic until code reads their values, and their conversion to steps
with the same effect, which the backends compute without a dense mask."""

from __future__ import annotations

import dataclasses
import itertools
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
from ..forks import lazy_property
from ..step import KeysReadError, NotCapturable, NotPackable, StepMetadata

# The function that `interface.paged_mask` calls with every symbolic mask. With it, a `generate`
# call learns which leading positions its model treats as padding.
mask_observer: ContextVar[Callable[[PagedMask], None] | None] = ContextVar(
    "mask_observer", default=None
)

Observer = Callable[[tuple[int, int, int], Tensor | None, bool], None]
"""Called in every call of our attention function outside packed steps, with the numbers of rows,
queries and keys, the mask, and whether attention without a mask is causal. Does not change the
result."""

attention_observer: ContextVar[Observer | None] = ContextVar("attention_observer", default=None)

Columns = tuple[tuple[int, ...], tuple[int, ...]]
"""A range of columns for each row, as two tuples: the ranges' first columns, and their ends."""


class MaskPattern(NamedTuple):
    """The parameters of a mask function."""

    causal: bool  # a query sees only keys up to its position
    window: int | None = None  # a query sees at most this many tokens, including itself
    # a query sees only its chunk of this many tokens, counted from the row's first real token
    chunk: int | None = None


def parse_mask(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """Returns the pattern of a causal, sliding-window, chunked or bidirectional mask function of
    `transformers.masking_utils`; `None` for any other."""
    is_causal = mask_function is causal_mask_function
    if is_causal or mask_function is bidirectional_mask_function:
        return MaskPattern(causal=is_causal)
    match _maker_of(mask_function):
        case "and_masks", {"mask_functions": [overlay, other]} if other is causal_mask_function:
            match _maker_of(overlay):
                case "sliding_window_overlay", {"sliding_window": window}:
                    return MaskPattern(causal=True, window=window)
                case "chunked_overlay", {"chunk_size": chunk}:
                    return MaskPattern(causal=True, chunk=chunk)
    return None


def _maker_of(function: Any) -> tuple[str, dict[str, Any]]:
    """For a function of `transformers.masking_utils`, returns the name of the top-level function
    that contains its definition (or its own name, if it is top-level), and the values in its
    closure, by name. For functions of other modules, returns `""` and no values."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return "", {}
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    maker = function.__qualname__.split(".")[0]
    return maker, dict(zip(function.__code__.co_freevars, values))


# options that make mask interfaces return a mask even if it hides nothing
_NO_SKIP = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}


class PagedMask(LazyTensor):
    """The symbolic mask `(batch, 1, query_length, kv_length)` of a mask function whose pattern is
    known; our attention function reads the pattern. A slice of the last queries is also symbolic.
    Other operations get a dense mask in the format of the model's own implementation
    (`model_attention`)."""

    arguments: dict[str, Any]
    model_attention: str
    pattern: MaskPattern
    _resolved: dict[object, Any]  # results of `resolve`, by its arguments

    @staticmethod
    def __new__(
        cls,
        arguments: dict[str, Any],
        model_attention: str,
        pattern: MaskPattern,
    ) -> PagedMask:
        """`arguments`: the arguments that transformers passed to the mask interface, including a
        mask function of this pattern."""
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        dtype = arguments.get("dtype", torch.float32)
        if model_attention != "eager":  # `dense` then returns a mask of `sdpa`
            dtype = torch.bool
        device = arguments.get("device", "cpu")
        self = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=device)
        self.arguments, self.model_attention, self._resolved = arguments, model_attention, {}
        self.pattern = pattern
        return self

    def symbolic(self, func: Any, args: Any, kwargs: Any) -> Any:
        aten = torch.ops.aten
        mask_slice = None
        if func in (aten.alias.default, aten.slice.Tensor) and not kwargs:
            mask_slice = self._slice(*args[1:])
        return NotImplemented if mask_slice is None else mask_slice

    def _slice(
        self,
        dim: int = 0,
        start: int | None = None,
        end: int | None = None,
        step: int = 1,
    ) -> PagedMask | None:
        """Returns the mask of the indices `start:end:step` on an axis; `None` unless these are all
        indices, or the last queries."""
        size = self.shape[dim]
        first, last, stride = slice(start, end, step).indices(size)
        are_last_queries = dim % self.dim() == 2 and first < size
        is_symbolic = first == 0 or are_last_queries
        if not is_symbolic or (last, stride) != (size, 1):
            return None
        arguments = self.arguments
        if first:
            offset = arguments.get("q_offset", 0) + first
            arguments = {**arguments, "q_length": size - first, "q_offset": offset}
        return PagedMask(arguments, self.model_attention, self.pattern)

    def resolve(self, implementation: str, **options: bool) -> Any:
        """Returns the mask that the mask interface of `implementation` makes from the same
        arguments and these options; `None` if that implementation needs no mask."""
        if implementation == "eager" and not self.arguments.get("allow_is_bidirectional_skip"):
            options = _NO_SKIP  # the eager interface never skips a causal mask
        key = (implementation, *options.items())
        if key not in self._resolved:
            make_mask = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
            self._resolved[key] = make_mask(**{**self.arguments, **options})
        return self._resolved[key]

    def dense(self) -> Tensor:
        """Returns the dense mask, in the format of the model's own implementation, or of `sdpa` if
        that implementation has no dense masks."""
        implementation = "eager" if self.model_attention == "eager" else "sdpa"
        mask: Tensor = self.resolve(implementation, **_NO_SKIP)
        return mask.expand(self.shape)

    @lazy_property
    def unpadded_columns(self) -> Columns | None:
        """The columns of the padded batch that the 2D padding mask shows, as the function
        `unpadded_columns` returns them; `None` if they are not contiguous in each row, or if the
        2D mask has no columns."""
        arguments = self.arguments
        return unpadded_columns(
            arguments.get("attention_mask"),
            arguments["batch_size"],
            arguments["kv_length"] + arguments.get("kv_offset", 0),
        )


def unpadded_columns(
    attention_mask: Tensor | None,
    batch_size: int,
    length: int,
) -> Columns | None:
    """Returns the range of ones in the first `length` columns of each row of a mask `(batch or 1,
    any length)`; columns that the mask lacks count as zeros. Without a mask, returns whole rows.
    Returns `None` if the ones of a row are not contiguous, or if the mask has no columns."""
    if attention_mask is None:
        return (0,) * batch_size, (length,) * batch_size
    mask = attention_mask[:, :length].bool().cpu()
    if not mask.shape[1]:
        return None
    # one byte per column, since searching bytes is faster than tensor operations
    rows = [row.tobytes() for row in mask.numpy()]
    firsts = tuple(max(0, row.find(1)) for row in rows)
    ends = tuple(row.rfind(1) + 1 for row in rows)
    for row, first, end in zip(rows, firsts, ends):
        if end - first != row.count(1):
            return None
    if len(rows) != batch_size:
        return firsts * batch_size, ends * batch_size
    return firsts, ends


# A step under a mask, computed once for all layers


def packed_step(step: StepMetadata, mask: Tensor | None) -> StepMetadata:
    """Returns a packed step with the mask's window or chunks. Raises `NotPackable` unless the mask
    is a causal `PagedMask` of exactly the step's tokens, without padding, and shows no token whose
    block may have been freed. Raises `NotCapturable` if the mask has chunks and a recorded step may
    have several queries per row."""
    if mask is None:
        raise NotPackable("the attention mask is None")
    if not isinstance(mask, PagedMask):
        raise NotPackable(
            "the attention mask is a dense tensor, not one of transformers' causal masks (with or"
            " without a window or chunks)"
        )
    pattern = mask.pattern
    num_tokens = step.num_tokens
    if not pattern.causal:
        raise NotPackable("the attention mask shows later tokens")
    offset = mask.arguments.get("kv_offset", 0)
    if mask.shape != (1, 1, num_tokens, num_tokens) or offset:
        raise NotPackable(
            f"the attention mask was not made for {num_tokens} tokens in one row: its shape is"
            f" {tuple(mask.shape)}, and its first key is {offset}"
        )
    if mask.unpadded_columns != ((0,), (num_tokens,)):
        raise NotPackable("the attention mask marks some tokens as padding")
    max_visible = pattern.window if pattern.chunk is None else pattern.chunk
    if step.window is not None and (max_visible is None or max_visible > step.window):
        raise NotPackable(
            f"the mask shows {max_visible or 'all earlier'} tokens, but the cache keeps"
            f" {step.window}"
        )
    cascade = None
    if pattern.window == step.window:  # a cascade is planned for the step's window
        cascade = step.cascade
    step = dataclasses.replace(step, window=pattern.window, cascade=cascade)
    if pattern.chunk is None:
        return step
    return _in_chunks(step, pattern.chunk)


def _in_chunks(step: StepMetadata, chunk_size: int) -> StepMetadata:
    """Returns a packed step whose queries see only their chunk of `chunk_size` positions of the
    sequence: a row with queries in several chunks becomes one row per chunk, with the same table.
    Raises `NotCapturable` if a recorded step may have several queries per row."""
    if step.lengths is not None:
        if step.query_len != 1:
            raise NotCapturable(
                "a row may have queries in several chunks of its tokens, and only the host can"
                " split such a row"
            )
        seq_lens, _, _, origins = step.lengths
        assert origins is not None
        positions = origins + seq_lens - 1
        chunks = positions.div(chunk_size, rounding_mode="floor")
        starts = (chunks * chunk_size - origins).clamp_(min=0)
        lengths = step.lengths._replace(starts=starts)
        return dataclasses.replace(step, lengths=lengths, cascade=None)
    rows = []
    query_start = [0]
    seq_lens = []
    starts = []
    sequences = zip(step.seq_lens, step.origins, itertools.pairwise(step.query_start))
    for row, (seq_len, origin, (row_start, row_end)) in enumerate(sequences):
        end = origin + seq_len
        first = end - (row_end - row_start)
        while first < end:
            chunk_start = first // chunk_size * chunk_size
            chunk_end = min(chunk_start + chunk_size, end)
            rows.append(row)
            query_start.append(query_start[-1] + chunk_end - first)
            seq_lens.append(chunk_end - origin)
            starts.append(max(0, chunk_start - origin))
            first = chunk_end
    tables = step.block_tables
    block_ids = step.block_ids
    if len(rows) > step.num_rows:
        tables = tables[torch.tensor(rows, device=tables.device)]
        block_ids = ()  # the split may add leading one-query rows, which `block_ids` would lack
    return dataclasses.replace(
        step,
        block_tables=tables,
        block_ids=block_ids,
        query_start=tuple(query_start),
        seq_lens=tuple(seq_lens),
        starts=tuple(starts),
        origins=tuple(step.origins[row] for row in rows),
    )


def rectangle_step(
    step: StepMetadata,
    query_len: int,
    mask: Tensor | None,
    is_causal: bool,
    device: torch.device,
) -> tuple[StepMetadata, Tensor | None] | None:
    """Returns a step with `query_len` queries in each row, and an additive bias in table
    coordinates (`in_table_coordinates`) or `None`, which together have the effect of `mask`. If
    only a dense mask has that effect, returns `None` instead of the pair. Raises `NotCapturable` if
    the mask of a recorded step is dense or may hide tokens that the layer keeps, and `ValueError`
    if `mask` shows padding that was not stored. `is_causal`: whether attention without a mask is
    causal."""
    columns = step.columns
    assert columns is not None
    if step.lengths is not None:
        return _recorded_step(step, mask), None
    if isinstance(mask, PagedMask):
        visible = _checked_columns(mask, columns, query_len)
        if visible is None:
            return None
        return _step_from_columns(step, query_len, mask.pattern, visible, device), None
    bias = None
    if mask is None:
        # without a mask, implementations attend to all keys, or causally if `is_causal` and there
        # are several queries
        if (is_causal and query_len > 1) or step.has_padding:
            return None
    else:
        if mask.dim() != 4 or mask.shape[3] != len(columns):
            return None
        if mask.shape[2] > 1 and step.has_padding:
            return None
        if mask.dtype == torch.bool:
            mask = torch.where(mask, 0.0, float("-inf"))
        bias = in_table_coordinates(mask.float(), step)
    stored_columns = (step.origins, (columns.stop,) * step.num_rows)
    pattern = MaskPattern(causal=False)
    return _step_from_columns(step, query_len, pattern, stored_columns, device), bias


def _recorded_step(step: StepMetadata, mask: Tensor | None) -> StepMetadata:
    """Returns `step`, a recorded step in which the only query of each row sees all of the row's
    tokens that the layer keeps. Raises `NotCapturable` if the mask is dense or may hide some of
    these tokens."""
    if mask is None:
        return step
    if not isinstance(mask, PagedMask):
        raise KeysReadError("the attention mask is a dense tensor")
    if mask.pattern.chunk is not None:
        raise NotCapturable("the attention mask has chunks")
    # a causal mask without a window hides none of the tokens that the layer keeps
    if mask.pattern.causal and mask.pattern.window not in (None, step.window):
        raise NotCapturable(
            f"the mask shows {mask.pattern.window} tokens, but the cache keeps"
            f" {step.window or 'all earlier'}"
        )
    return step


def _checked_columns(mask: PagedMask, columns: range, query_len: int) -> Columns | None:
    """Returns the `unpadded_columns` of a symbolic mask for a step with these `columns`; the caller
    applies the mask's pattern to them. Returns `None` if the mask has other sizes, if its effect is
    not a range of columns per row, or if implementations differ in its effect."""
    arguments = mask.arguments
    pattern = mask.pattern
    sizes = (*mask.shape[2:], arguments.get("kv_offset", 0))
    if sizes != (query_len, len(columns), columns.start):
        return None
    visible = mask.unpadded_columns
    if visible is None:
        return None
    _, ends = visible
    # for a row that sees no keys, the results of implementations differ
    if 0 in ends or (pattern.chunk is not None and query_len > 1):
        return None
    if pattern.causal:
        are_last_queries = arguments.get("q_offset", 0) == columns.stop - query_len
        if not are_last_queries or min(ends) < columns.stop:
            return None
    return visible


def in_table_coordinates(bias: Tensor, step: StepMetadata) -> Tensor:
    """Returns `bias`, `(rows or 1, ..., len(columns))`, shifted to each row's table coordinates:
    its last axis then counts the tokens in the row's block table. `-inf` hides positions that are
    no columns of `bias`."""
    assert step.columns is not None
    # a negative shift cuts columns off
    shifts = [step.columns.start - origin for origin in step.origins]
    if not any(shifts):
        return bias
    rows = zip(bias.expand(len(shifts), *bias.shape[1:]), shifts)
    max_shift = max(shifts)
    shifted_rows = [
        F.pad(row, (shift, max_shift - shift), value=float("-inf")) for row, shift in rows
    ]
    return torch.stack(shifted_rows)


def _step_from_columns(
    step: StepMetadata,
    query_len: int,
    pattern: MaskPattern,
    visible: Columns,
    device: torch.device,
) -> StepMetadata:
    """Returns a step whose rows see the `visible` columns under a pattern. Raises `ValueError` if
    these include columns that were padding in an earlier step, and so were not stored."""
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
                f"the attention mask shows position {first} of a row, but the row's first {origin}"
                " positions were padding in an earlier step and were not stored: pass a mask that"
                " hides them, as before"
            )
        if pattern.chunk is not None:  # chunks count from the row's first real token
            last_position = max(0, columns.stop - 1 - first)
            first += last_position // pattern.chunk * pattern.chunk
        seq_lens.append(max(0, end - origin))
        starts.append(max(0, first - origin, columns.start - origin))
    return StepMetadata.rectangle(
        step.block_tables.to(device),
        seq_lens,
        step.block_size,
        query_len=query_len,
        starts=starts,
        causal=pattern.causal,
        window=pattern.window,
    )
