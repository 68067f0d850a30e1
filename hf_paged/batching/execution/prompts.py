"""The prompts of a call, which the model's own forward computes: which of them can share a forward,
and how its results reach the rows. The scheduler decides when a prompt runs."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ... import compat
from ...attention.observers import LookAhead, observing_attention
from ...cache.block_pool import BlockTable
from ...cache.layers import PagedLayer
from ...cache.paged_cache import PagedCache
from ...cache.sequence_blocks import SequenceBlocks
from ...model.own_loop import map_tensors, next_logits
from ...model.structure import is_stock
from ...model.trial import stock_cache
from ..request import Request, RowsError, Sequence
from .prompt_inputs import PromptInputs, is_plain_value


class PromptsError(RowsError):
    """A forward of `prompts` failed. The error ends only the requests of these prompts."""

    def __init__(self, prompts: Prompts, cause: Exception) -> None:
        super().__init__(str(cause))
        self.prompts = prompts
        self.cause = cause

    def concerns(self, request: Request) -> bool:
        return request.inputs is not None and request.inputs[0] is self.prompts


@dataclass(eq=False)
class Prompts(PromptInputs):
    """The prompts of a call: the arguments of the model's `prepare_inputs_for_generation`, as
    `generate` prepared them for the first forward. One forward computes all rows, since nothing
    says which images and audio belong to which row."""

    # the key, set by the room `rectangles`, of other rows that these rows may join; `None`: none
    join_key: Any = None
    # prompts with equal keys may share a forward; `None`: these prompts share none with others
    merge_key: Hashable | None = None

    def similarity_key(self, config: PreTrainedConfig) -> Hashable | None:
        """Returns a key that is equal for prompts that differ only in text, in length and in the
        values of floating-point inputs, all of which `merge_check` varies; `None` for prompts that
        must not be merged."""
        placeholder_mask = self.placeholder_mask(config)
        if placeholder_mask is None:
            return None
        # includes each row's placeholders, so that surplus ones in one prompt cannot make up for
        # missing ones in another
        key: list[Hashable] = []
        for ids, is_placeholder in zip(self.input_ids, placeholder_mask):
            key.append(tuple(sorted(ids[is_placeholder].tolist())))
        for name, value in sorted(self._kwargs_with_mask.items()):
            if not isinstance(value, Tensor):
                if not is_plain_value(value):
                    return None
                key.append((name, value))
            elif _is_per_token(name):
                if value.shape[-2:] != (len(self.paddings), self.length):
                    return None
                key.append((name, value.dtype, value.dim()))
            else:
                # some models confuse rows if parts of an image are masked, and some drop images
                # that are all zeros
                is_partial = "mask" in name and not bool(value.all())
                if not value.dim() or is_partial or _has_zero_parts(value):
                    return None
                is_float = value.is_floating_point()
                numbers = None if is_float else tuple(value.flatten().tolist())
                key.append((name, value.dtype, value.shape, numbers))
        return tuple(key)

    @property
    def hides_tokens(self) -> bool:
        """Whether the attention mask hides tokens other than padding; false for a mask that is not
        `(rows, length)`."""
        mask = self._attention_mask
        shape = (len(self.paddings), self.length)
        if not isinstance(mask, Tensor) or mask.shape != shape:
            return False
        lengths = [self.length - padding for padding in self.paddings]
        return mask.bool().sum(-1).tolist() != lengths

    @property
    def _attention_mask(self) -> Tensor:
        """The attention mask of the inputs or, if they have none, `(rows, length)` ones."""
        mask: Tensor | None = self.model_kwargs.get("attention_mask")
        if mask is not None:
            return mask
        return self.input_ids.new_ones(len(self.paddings), self.length)

    @property
    def _kwargs_with_mask(self) -> dict[str, Any]:
        return {**self.model_kwargs, "attention_mask": self._attention_mask}

    def varied(self, token_id: int) -> Prompts:
        """Returns these prompts with the token `token_id` appended to each row, and with negated
        floating-point inputs, such as images. `merge_check` merges them with the original
        prompts."""
        model_kwargs = dict(self.model_kwargs)
        for name, value in model_kwargs.items():
            if not isinstance(value, Tensor):
                continue
            if value.is_floating_point():
                value = -value
            if _is_per_token(name):
                column = value[..., -1:]
                if name.endswith("position_ids"):
                    column = column + 1
                elif name != "attention_mask":
                    column = column * 0
                value = torch.cat([value, column], dim=-1)
            model_kwargs[name] = value
        ids = functional.pad(self.input_ids, (0, 1), value=token_id)
        return Prompts(ids, model_kwargs, self.paddings)

    def merged(self, others: Items[Prompts], pad_token_id: int) -> Prompts:
        """Returns the rows of these prompts and of `others`, in order, as if one call had prepared
        them: padded on the left to the longest."""
        parts = (self, *others)
        width = max(part.length for part in parts)

        def pad_and_join(tensors: list[Tensor], pad_value: int = 0) -> Tensor:
            padded = []
            for tensor in tensors:
                missing = width - tensor.shape[-1]
                padded.append(functional.pad(tensor, (missing, 0), value=pad_value))
            return torch.cat(padded, dim=-2)

        inputs = [part._kwargs_with_mask for part in parts]
        merged = inputs[0]
        for name, value in merged.items():
            if isinstance(value, Tensor):
                values = [part[name] for part in inputs]
                join = pad_and_join if _is_per_token(name) else torch.cat
                merged[name] = join(values)
        ids = pad_and_join([part.input_ids for part in parts], pad_token_id)
        paddings = []
        for part in parts:
            shift = width - part.length
            paddings += [shift + padding for padding in part.paddings]
        return Prompts(ids, merged, paddings)

    def rows(
        self, sequences: dict[int, Sequence], no_blocks: SequenceBlocks
    ) -> tuple[list[SequenceBlocks], list[int]]:
        """Returns each row's blocks and number of leading padding columns. Rows without a sequence
        have `no_blocks`, and consist of padding alone."""
        num_rows = len(self.paddings)
        blocks = [no_blocks] * num_rows
        paddings = [self.length] * num_rows
        for row, sequence in sequences.items():
            blocks[row] = sequence.blocks
            paddings[row] = self.paddings[row]
        return blocks, paddings

    def forward(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        sequences: dict[int, Sequence],
        num_cached: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the model's own forward over all rows. The empty `cache` stores the keys and values
        of `sequences`, by row, in their tables, which must have space for them. If there is a
        single row, its first `num_cached` tokens may be stored already. Returns logits `(all rows,
        vocab_size)`, and the bool mask `(all rows, length)` of `LookAhead.look_ahead_mask`, or
        `None` if it is unknown. Raises `ValueError` if the model does not store `length` tokens per
        row, padding included."""
        num_skipped = self.paddings[0] + num_cached if num_cached else 0
        observer = LookAhead(self.paddings, self.length, num_skipped)
        blocks, paddings = self.rows(sequences, empty_blocks(cache))
        cache.take(blocks, tuple(paddings), num_skipped)
        inputs = {**self.model_kwargs, compat.cache_name(model): cache}
        with observing_attention(observer):
            logits, _ = next_logits(
                model, self.input_ids, inputs, is_first_step=True, num_cached=num_skipped
            )
        layers = (layer for layer in cache.layers if isinstance(layer, PagedLayer))
        counts = [layer.num_positions for layer in layers if layer.num_positions]
        for count in counts:
            if count != self.length:
                raise ValueError(
                    f"the model stored keys and values of {count} tokens per row, not of"
                    f" {self.length}"
                )
        if observer.num_calls < len(counts):
            return logits, None
        return logits, observer.look_ahead_mask()

    def prepare_positions(self, model: Any) -> None:
        """Sets `position_ids` to those that the model's own preparation returns or, if it returns
        none, to the columns, which the model then uses as positions. Does nothing for a model that
        takes no `position_ids`, or that uses transformers' preparation."""
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        if not takes_positions or is_stock(model, "prepare_inputs_for_generation"):
            return
        inputs = {**self.model_kwargs, compat.cache_name(model): stock_cache(model)}
        prepared = model.prepare_inputs_for_generation(
            self.input_ids,
            next_sequence_length=self.length,
            is_first_iteration=True,
            **inputs,
        )
        self.position_ids = prepared.get("position_ids")
        if self.position_ids is None:
            columns = torch.arange(self.length, device=self.input_ids.device)
            self.position_ids = columns[None]


def _has_zero_parts(media: Tensor) -> bool:
    """Whether a part of the media, such as an image or a patch, is all zeros. A part spans the last
    three dimensions, but never the first dimension of the tensor."""
    if not media.is_floating_point():
        return False
    first = max(1, media.dim() - 3)
    parts = media.reshape(-1, media.shape[first:].numel())  # of a vector: its numbers
    return bool((parts == 0).all(-1).any())


def _is_per_token(name: str) -> bool:
    """Whether the input `name` has a value per token: `(..., rows, length)`."""
    return name in ("attention_mask", "position_ids") or name.endswith("token_type_ids")


def empty_blocks(cache: PagedCache) -> SequenceBlocks:
    """Returns empty tables, for a row that is not stored."""
    groups = [group.blocks for group in cache.groups.values()]
    return SequenceBlocks(tuple(BlockTable(group.pool, group.block_size) for group in groups))


def prompts_of(
    unexpanded: tuple[Tensor, dict[str, Any]],
    model_kwargs: dict[str, Any],
    is_decoder: bool,
) -> Prompts:
    """Makes `Prompts` from `unexpanded`, the inputs of `generate` before it repeats rows, and from
    the `model_kwargs` that it prepared for its loop. `is_decoder`: whether the model has an
    encoder, so that these are the decoder's prompts. Only leading zeros of an attention mask count
    as padding, and only in rows that also have ones."""
    ids, inputs = unexpanded
    inputs = {
        name: map_tensors(_without_graph, value)
        for name, value in {**model_kwargs, **inputs}.items()
        if name not in compat.CACHE_NAMES
    }
    mask = inputs.get("decoder_attention_mask" if is_decoder else "attention_mask")
    prompts = Prompts(ids, inputs, [0] * len(ids))
    if isinstance(mask, Tensor) and mask.shape == (len(ids), prompts.length):
        paddings = (mask.cumsum(-1) == 0).sum(-1)
        is_empty = paddings == prompts.length
        prompts = replace(prompts, paddings=torch.where(is_empty, 0, paddings).tolist())
    return prompts


def _without_graph(tensor: Tensor) -> Tensor:
    """Returns the tensor without its autograd graph, so that it can be deep-copied and does not
    keep other tensors alive."""
    return tensor.detach() if tensor.requires_grad else tensor


def copy_nested_dicts(value: Any) -> Any:
    """Copies a dict and the dicts in it, but not their tensors, since `generate` repeats the rows
    of a dict's tensors by replacing its entries. Returns any other value unchanged."""
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)
    for name, part in value.items():
        if isinstance(part, dict):
            copied[name] = copy_nested_dicts(part)
    return copied
