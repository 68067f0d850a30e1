"""The encoder tokens to which the rows of a rectangle's decode step attend. A recorded step reads
them through block tables, so the tokens to which a row attends must be consecutive. If the model's
own code instead computes its attention mask from the mask of the encoder's input, the step reads
the input mask from a buffer, as it reads states."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from ..attention.masks import PagedMask, unpadded_columns
from ..step import KeysReadError, StepMetadata

if TYPE_CHECKING:
    from ..rectangles.rectangle import Rectangle

MASK = "attention_mask"  # of an encoder's input, as an argument of the model


def encoder_lengths(rectangle: Rectangle) -> list[int]:
    """Returns the number of stored encoder tokens of each row."""
    return [blocks.tables[0].num_tokens for blocks in rectangle.encoded]


def reads_mask(rectangle: Rectangle, inputs: Mapping[str, Any], reads_keys: bool) -> bool:
    """Whether a recorded step must read the mask of the encoder's input in `inputs`. It need not if
    the mask has one column per encoder token. Otherwise (for instance, if the mask is one of
    frames), the model's own code computes the mask of tokens from it, and the step must read it,
    unless the rectangle's `encoder_columns` are known and the mask is the same as before.
    `reads_keys`: as in `StepGraphs`; if false, the step need not read a mask that hides nothing."""
    mask = inputs.get(MASK)
    if mask is None or _is_token_mask(mask, rectangle):
        return False
    if rectangle.encoder_columns is not None and not _is_replaced(mask, rectangle):
        return False
    return reads_keys or not bool((mask == 1).all())


def _is_token_mask(mask: Tensor, rectangle: Rectangle) -> bool:
    return mask.shape == (len(rectangle.blocks), rectangle.encoder_width)


def _is_replaced(mask: Any, rectangle: Rectangle) -> bool:
    """Whether a step's mask differs from the mask in its rectangle's inputs, since the model's code
    that prepares steps may hide different tokens in each."""
    carried = rectangle.inputs.get(MASK)
    if mask is carried or not (isinstance(mask, Tensor) and isinstance(carried, Tensor)):
        return False
    return mask.shape != carried.shape or not torch.equal(mask, carried)


def visible_ranges(
    rectangle: Rectangle, inputs: Mapping[str, Any], is_mask_read: bool
) -> list[tuple[int, int]] | None:
    """Returns the range `(start, end)` of stored encoder tokens to which each row attends; `None`
    if a row attends to no tokens, or to tokens that are not consecutive. `is_mask_read`: the result
    of `reads_mask`; if true, the ranges contain all stored tokens. Sets the rectangle's
    `encoder_columns` if the mask is the same in every step."""
    lengths = encoder_lengths(rectangle)
    columns = rectangle.encoder_columns
    mask = inputs.get(MASK)
    is_replaced = _is_replaced(mask, rectangle)
    if columns is None or is_replaced:  # the model's own code attends to the encoder
        if mask is None or is_mask_read or not _is_token_mask(mask, rectangle):
            return [(0, length) for length in lengths]
        is_binary = bool(((mask == 0) | (mask == 1)).all())
        bounds = unpadded_columns(mask, *mask.shape) if is_binary else None
        if bounds is None:
            return None
        columns = list(zip(*bounds))
        if MASK in rectangle.constant_names and not is_replaced:
            rectangle.encoder_columns = columns
    ranges = []
    for length, (first, end) in zip(lengths, columns):
        origin = rectangle.encoder_width - length
        visible = range(max(0, first - origin), end - origin)
        if not visible:
            return None
        ranges.append((visible.start, visible.stop))
    return ranges


def refuse_masked_handles(mask: PagedMask) -> None:
    """A `mask_observer` of recorded steps that get an encoder's mask: attention by block tables
    would ignore it. Raises `KeysReadError` for such a mask, so that keys are gathered."""
    if not mask.pattern.causal and mask.arguments.get("attention_mask") is not None:
        raise KeysReadError("an attention mask is computed from the mask of the encoder's input")


def visible_columns(step: StepMetadata) -> Tensor:
    """Returns a mask `(n, columns)` int64 of a recorded step: 1 for the columns that a row has
    stored and attends to, 0 for the others."""
    assert step.columns is not None and step.lengths is not None
    lengths = step.lengths
    assert lengths.origins is not None
    columns = torch.arange(len(step.columns), device=lengths.origins.device)
    positions = columns - lengths.origins[:, None]
    are_visible = positions >= lengths.starts[:, None]
    return (are_visible & (positions < lengths.seq_lens[:, None])).long()


def placeholder_outputs(outputs: Any, num_rows: int, num_columns: int) -> ModelOutput:
    """Returns encoder outputs of the class of `outputs` with tensors `(num_rows, num_columns, dim)`
    of arbitrary content, which no recorded operation reads, since the encoder's keys and values are
    stored."""
    if not isinstance(outputs, ModelOutput):
        outputs = BaseModelOutput(last_hidden_state=outputs[0])
    placeholders = {
        name: x.new_empty(num_rows, num_columns, x.shape[-1])
        for name, x in outputs.items()
        if isinstance(x, Tensor) and x.dim() == 3
    }
    return type(outputs)(**placeholders)
