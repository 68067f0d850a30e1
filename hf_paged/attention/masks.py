"""Attention masks that stay symbolic until code reads the numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)

from ..cache.handles import LazyTensor

# Told of every mask made in this context: how a call learns which leading positions its model treats as padding.
mask_observer: ContextVar[Callable[[PagedMask], None] | None] = ContextVar("mask_observer", default=None)

Columns = tuple[tuple[int, ...], tuple[int, ...]]
"""Of each row the first and the end of a range of key positions."""


class MaskPattern(NamedTuple):
    """A mask function in words."""

    causal: bool  # a query sees keys up to its own position
    window: int | None = None  # and at most this number of tokens, itself included
    chunk: int | None = None  # and only those of its own chunk of this length, counted from the row's first real token


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
    """The function of `transformers.masking_utils` that made this one, and what it closes over; `""` if none did."""
    if getattr(function, "__module__", None) != "transformers.masking_utils":
        return "", {}
    values = [cell.cell_contents for cell in function.__closure__ or ()]
    return function.__qualname__.split(".")[0], dict(zip(function.__code__.co_freevars, values))


class PagedMask(LazyTensor):
    """
    The mask `(batch, 1, query_length, kv_length)` that a mask function describes. Our attention function reads the
    description; any other operation gets what the model's own implementation (`model_attention`) would be given.
    """

    arguments: dict[str, Any]
    model_attention: str
    pattern: MaskPattern | None
    _made: dict[str, Any]  # what was asked for once

    @staticmethod
    def __new__(cls, arguments: dict[str, Any], model_attention: str) -> PagedMask:
        """`arguments`: what transformers passed to the mask interface."""
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        dtype = torch.bool if model_attention == "sdpa" else arguments.get("dtype", torch.float32)
        mask = Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=arguments.get("device", "cpu"))
        mask.arguments, mask.model_attention, mask._made = arguments, model_attention, {}
        mask.pattern = parse(arguments.get("mask_function", causal_mask_function))
        return mask

    def resolve(self, implementation: str) -> Any:
        """What the mask interface of `implementation` makes of the same arguments (for sdpa that may be `None`)."""
        if implementation not in self._made:
            self._made[implementation] = ALL_MASK_ATTENTION_FUNCTIONS[implementation](**self.arguments)
        return self._made[implementation]

    def dense(self) -> Tensor:
        """The numbers, in the dense format of the model's own implementation."""
        if "dense" not in self._made:
            arguments = {**self.arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            make = ALL_MASK_ATTENTION_FUNCTIONS["eager" if self.model_attention == "eager" else "sdpa"]
            self._made["dense"] = make(**arguments).expand(self.shape)
        found: Tensor = self._made["dense"]
        return found

    def visible_columns(self) -> Columns | None:
        """Key positions in the padded batch that the 2D padding mask leaves visible; `None` if it leaves holes."""
        if "columns" not in self._made:
            arguments = self.arguments
            end = arguments["kv_length"] + arguments.get("kv_offset", 0)
            self._made["columns"] = padding_columns(arguments.get("attention_mask"), arguments["batch_size"], end)
        found: Columns | None = self._made["columns"]
        return found


def padding_columns(attention_mask: Tensor | None, batch_size: int, length: int) -> Columns | None:
    """
    The range of ones in each row of a 2D mask, or `None` if a row is not zeros, ones, zeros.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, mask_length)`, *optional*): Nonzero where a key may be seen.
        length (`int`): Key positions; the mask counts as zero past its end and is cut there.
    """
    if attention_mask is None:
        return (0,) * batch_size, (length,) * batch_size
    mask = attention_mask[:, :length].to(torch.uint8).bool().cpu()
    if not mask.shape[1]:
        return None
    rows = [row.tobytes() for row in mask.numpy()]  # a byte a column: a search of bytes takes less than one operation
    firsts = tuple(max(0, row.find(1)) for row in rows)
    ends = tuple(row.rfind(1) + 1 for row in rows)
    if any(end - first != row.count(1) for row, first, end in zip(rows, firsts, ends)):
        return None
    return (firsts, ends) if len(rows) == batch_size else (firsts * batch_size, ends * batch_size)
