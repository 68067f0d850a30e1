"""Prompts in rectangles: the rectangle of a call's prompts, and which rows of several calls may
continue in one rectangle."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from .. import compat
from ..batching.execution.prompt_inputs import is_plain_value
from ..batching.execution.prompts import Prompts, empty_blocks
from ..batching.request import Sequence
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import NO_BLOCKS
from ..model.own_loop import cache_parts, tensors_of
from .rectangle import Rectangle


class JoinKey(NamedTuple):
    """A key of prompts. Rows of prompts with equal keys may continue in one rectangle."""

    needs_equal_lengths: bool  # whether these rows must also have equal lengths
    # dtypes and shapes of the inputs, without rows and without columns that can be padded; then the
    # number of encoder tokens if it must be equal
    shapes: Hashable


def set_join_keys(prompts: Prompts, requirements: tuple[bool, bool] | None) -> None:
    """Sets the `join_key` of the prompts if their rows can join others and, if the prompts can also
    share a forward, their `merge_key`. `requirements`: whether joined rows must have equal lengths,
    and equal encoder lengths; `None`: rows cannot join (`capability.join_requirements`)."""
    shapes: list[Hashable] = []
    options: list[Any] = []
    has_media = False
    if requirements is None:
        return
    for name in sorted(prompts.model_kwargs):
        value = prompts.model_kwargs[name]
        tensors = tensors_of(value)
        if not tensors:
            options.append((name, value))
        elif name in compat.PREFILL_INPUTS:
            has_media = True
            continue
        for tensor in tensors:
            if not tensor.dim() or len(tensor) != len(prompts.paddings):
                return
            can_pad = tensor.dim() > 1 and tensor.shape[1] == prompts.num_encoder_tokens
            shape = tensor.shape[2:] if can_pad else tensor.shape[1:]
            shapes.append((name, str(tensor.dtype), *shape))
    needs_equal_lengths, needs_equal_encoders = requirements
    encoder_length = needs_equal_encoders and prompts.num_encoder_tokens
    prompts.join_key = JoinKey(needs_equal_lengths, (*shapes, encoder_length))
    can_compare = all(is_plain_value(value) for _, value in options)
    if can_compare and not has_media and not any(prompts.paddings):
        prompts.merge_key = (prompts.join_key, prompts.length, *options)


def rectangle_of(
    prompts: Prompts,
    model: PreTrainedModel,
    cache: PagedCache | EncoderDecoderCache | None,
    sequences: dict[int, Sequence],
) -> Rectangle:
    """Returns a rectangle of all rows of the prompts on the empty `cache` (`None` for a model that
    creates its own), with the blocks of `sequences`, by row. Rows without a sequence have no
    blocks, and consist of padding alone."""
    inputs = dict(prompts.model_kwargs)
    no_blocks = no_encoder_blocks = NO_BLOCKS
    if cache is not None:
        inputs[compat.cache_name(model)] = cache
        caches = cache_parts(cache)
        no_blocks = empty_blocks(caches[0])
        no_encoder_blocks = empty_blocks(caches[-1])
    blocks, paddings = prompts.rows(sequences, no_blocks)
    encoded = [no_encoder_blocks] * len(paddings)
    for row, sequence in sequences.items():
        encoded[row] = sequence.request.encoded
    ids = prompts.input_ids
    return Rectangle(blocks, encoded, prompts.length, paddings, ids, cache, inputs)
