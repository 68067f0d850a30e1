"""Attention masks that stay symbolic until code reads the numbers."""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_map_only
from transformers.masking_utils import (
    ALL_MASK_ATTENTION_FUNCTIONS,
    bidirectional_mask_function,
    causal_mask_function,
)

DENSE_FORMATS = ("sdpa", "eager")

# Told of every mask made in this context: how a call learns which leading positions its model treats as padding.
mask_observer: ContextVar[Callable[[PagedMask], None] | None] = ContextVar("mask_observer", default=None)


@dataclass(frozen=True)
class MaskPattern:
    """
    A mask function in words.

    Args:
        causal (`bool`): A query sees keys up to its own position.
        window (`int`, *optional*): ... and at most this number of tokens, itself included.
        chunk (`int`, *optional*): ... and only those of its own chunk of this length, counted from the row's
            first real token.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None


def parse(mask_function: Callable[..., Any]) -> MaskPattern | None:
    """The pattern of a mask function made by `transformers.masking_utils`, or `None` for any other."""
    if mask_function is causal_mask_function:
        return MaskPattern(causal=True)
    if mask_function is bidirectional_mask_function:
        return MaskPattern(causal=False)
    if not _made_by(mask_function, "and_masks"):
        return None
    parts = _closure(mask_function).get("mask_functions", ())
    if len(parts) != 2 or parts[1] is not causal_mask_function:
        return None
    overlay = parts[0]
    if _made_by(overlay, "sliding_window_overlay"):
        return MaskPattern(causal=True, window=_closure(overlay)["sliding_window"])
    if _made_by(overlay, "chunked_overlay"):
        return MaskPattern(causal=True, chunk=_closure(overlay)["chunk_size"])
    return None


def _made_by(function: Any, factory: str) -> bool:
    return (
        getattr(function, "__module__", None) == "transformers.masking_utils"
        and getattr(function, "__qualname__", "").split(".")[0] == factory
    )


def _closure(function: Any) -> dict[str, Any]:
    cells = function.__closure__ or ()
    return {name: cell.cell_contents for name, cell in zip(function.__code__.co_freevars, cells)}


class PagedMask(torch.Tensor):
    """
    The mask `(batch, 1, query_length, kv_length)` that a mask function describes.

    Our attention function reads the description; any other operation materialises what the model's own attention
    implementation (`model_attention`) would have been given.
    """

    arguments: dict[str, Any]
    model_attention: str
    pattern: MaskPattern | None
    _resolved: dict[str, Any]
    _dense: torch.Tensor | None
    _columns: list[tuple[tuple[int, ...], tuple[int, ...]] | None]  # what `visible_columns` returns, once it was asked

    @staticmethod
    def __new__(cls, arguments: dict[str, Any], model_attention: str) -> PagedMask:
        """`arguments`: what transformers passed to the mask interface."""
        shape = (arguments["batch_size"], 1, arguments["q_length"], arguments["kv_length"])
        dtype = torch.bool if model_attention == "sdpa" else arguments.get("dtype", torch.float32)
        mask = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=arguments.get("device", "cpu"))
        mask.arguments, mask.model_attention, mask._resolved = arguments, model_attention, {}
        mask._dense, mask._columns = None, []
        mask.pattern = parse(arguments.get("mask_function", causal_mask_function))
        return mask

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def resolve(self, implementation: str) -> Any:
        """What the mask interface of `implementation` makes of the same arguments (for sdpa that may be `None`)."""
        if implementation not in self._resolved:
            function = ALL_MASK_ATTENTION_FUNCTIONS[implementation]
            self._resolved[implementation] = function(**self.arguments)
        return self._resolved[implementation]

    def dense(self) -> torch.Tensor:
        """The numbers, in the dense format of the model's own implementation."""
        if self._dense is None:
            arguments = {**self.arguments, "allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
            dense_format = self.model_attention if self.model_attention in DENSE_FORMATS else "sdpa"
            self._dense = ALL_MASK_ATTENTION_FUNCTIONS[dense_format](**arguments).expand(self.shape)
        return self._dense

    def visible_columns(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """
        For each row, the half-open range of key positions that the 2D padding mask leaves visible, counted in the
        padded batch; `None` if it leaves holes.
        """
        if not self._columns:
            arguments = self.arguments
            end = arguments["kv_length"] + arguments.get("kv_offset", 0)
            self._columns.append(padding_columns(arguments.get("attention_mask"), arguments["batch_size"], end))
        return self._columns[0]

    def __repr__(self, *, tensor_contents: Any = None) -> str:
        return f"PagedMask(shape={tuple(self.shape)}, pattern={self.pattern}, model_attention={self.model_attention!r})"

    __torch_function__ = torch._C._disabled_torch_function_impl

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = tree_map_only(PagedMask, PagedMask.dense, (args, kwargs or {}))
        return func(*args, **kwargs)


def padding_columns(
    attention_mask: torch.Tensor | None, batch_size: int, length: int
) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
    """
    The half-open range of ones in each row of a 2D mask, if each row is zeros, ones, zeros.

    Args:
        attention_mask (`torch.Tensor` of shape `(batch, mask_length)`, *optional*): Nonzero where a key may be seen.
        batch_size (`int`): Rows.
        length (`int`): Key positions; the mask counts as zero past its end and is cut there.

    Returns:
        First visible and first no longer visible position of each row, or `None` if a row has a hole.
    """
    if attention_mask is None:
        return (0,) * batch_size, (length,) * batch_size
    mask = attention_mask[:, :length].to(torch.uint8)
    if not mask.shape[1]:
        return None
    if mask.shape[0] != batch_size:
        mask = mask.expand(batch_size, -1)
    first = mask.argmax(1)
    count = (mask != 0).sum(1)
    # the ones are one run exactly if the last of them sits at its end
    last = mask.shape[1] - 1 - mask.flip(1).argmax(1)
    if not bool(((last == first + count - 1) | (count == 0)).all()):
        return None
    return tuple(first.tolist()), tuple((first + count).tolist())
