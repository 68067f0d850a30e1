"""A rectangle: rows that are computed in one padded batch, and the inputs that they carry from step
to step. The runner decides which rows share a rectangle."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Hashable
from collections.abc import Sequence as Items
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache
from transformers.utils import ModelOutput

from .. import compat
from ..attention.masks import Columns
from ..batching.execution.prompts import Prompts, empty_blocks
from ..batching.request import Sequence
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import NO_BLOCKS, SequenceBlocks
from ..forks import lazy_property
from ..model.own_loop import (
    cache_parts,
    map_tensors,
    next_inputs,
    padding_mask,
    select_rows,
    tensors_of,
)
from ..model.registry import warn_once
from ..model.values import SCALARS
from ..plan import StepPlan
from ..topics import Topic
from .states import num_state_bytes, state_layers

# Attributes of a layer that `_copy_layers` does not copy, since they belong to the layer's cache.
_NOT_COPIED = {"graph_states", "group", "index", "num_operations", "packed_handles"}
_MASK, _ENCODER_MASK = "decoder_attention_mask", "attention_mask"


@dataclasses.dataclass(eq=False)
class Rectangle:
    """A batch of rows that ran together, with the inputs of their next step. The rows of states,
    and of everything else that `generate`'s loop carries from step to step, are in the same
    order."""

    blocks: list[SequenceBlocks]
    # each row's blocks of the encoder's keys and values; `NO_BLOCKS` without an encoder
    encoded: list[SequenceBlocks]
    width: int  # number of columns: a row's padding and its tokens
    paddings: list[int]  # leading padding columns of each row
    token_ids: Tensor  # (rows, width) int64; fewer columns if the prompts are embeddings
    cache: Any  # borrows the rows' tables; `None` for a model that creates its own cache
    # inputs of the next forward, as `generate` carries them: attention mask, position ids, cache
    inputs: dict[str, Any]
    encoder_width: int = 0  # columns of the encoder output, including padding
    # names of the inputs that do not change from step to step
    constant_names: set[str] = dataclasses.field(default_factory=set)
    # indices of the layers for which the rows' first forward stored no keys and values
    unused_layers: frozenset[int] = frozenset()
    # the range of encoder columns to which each row attends; `None` until a forward or a constant
    # mask shows it
    encoder_columns: list[tuple[int, int]] | None = None
    # each row's index before any `select`
    original_rows: list[int] = dataclasses.field(default_factory=list)
    row_inputs: Any = None  # per-row inputs of the last recorded step (`tape.step_inputs`)

    def __post_init__(self) -> None:
        self.original_rows = self.original_rows or list(range(len(self.blocks)))

    @property
    def state_layers(self) -> list[Any]:
        return state_layers(cache_parts(self.cache)[0])

    @lazy_property
    def row_bytes(self) -> int:
        """Bytes of a row's states, once a forward has computed them."""
        return num_state_bytes(self.state_layers) // len(self.blocks)

    def borrow(self, num_cached: int) -> None:
        """Makes the cache borrow the rows' tables, in which the first `num_cached` columns are
        computed."""
        if self.cache is None:
            return
        cache, *cross_caches = cache_parts(self.cache)
        cache.take(self.blocks, tuple(self.paddings), num_cached, self.unused_layers)
        for cross in cross_caches:
            if not isinstance(cross, PagedCache):
                continue
            width = self.encoder_width
            paddings = tuple(width - length for length in _encoder_lengths(self.encoded))
            cross.take(self.encoded, paddings, width if num_cached else 0)

    def select(self, rows: list[int], cache: Any) -> Rectangle:
        """Returns a rectangle that uses `cache`, and whose row `i` is row `rows[i]` of this one.
        The caller selects the same rows in `cache`, and calls `borrow`."""
        index = torch.tensor(rows, device=self.token_ids.device)
        by_row = {"cache": cache, "token_ids": self.token_ids[index]}
        for name in ("blocks", "encoded", "paddings", "original_rows", "encoder_columns"):
            values = getattr(self, name)
            by_row[name] = values and [values[row] for row in rows]
        is_same_order = by_row["original_rows"] == self.original_rows
        inputs = {}
        for name, value in self.inputs.items():
            if value is self.cache:
                value = cache
            elif not is_same_order or name not in self.constant_names:
                value = select_rows(name, value, index, len(self.blocks))
            inputs[name] = value
        return dataclasses.replace(self, inputs=inputs, **by_row)

    def fork_cache(self, cache: Any) -> Any:
        """Makes the empty `cache` continue from this rectangle's cache. Returns `cache`, or an
        `EncoderDecoderCache` around it if the model made its own cross-attention cache. The caller
        must reorder the returned cache's rows before anything is written to it."""
        paged_cache, *cross_caches = cache_parts(self.cache)
        _copy_layers(paged_cache, cache_parts(cache)[0])
        for cross in cross_caches:
            if not isinstance(cache, EncoderDecoderCache):
                # the model made the cross-attention cache
                cache = EncoderDecoderCache(cache, copy.deepcopy(cross))
            elif isinstance(cross, PagedCache):
                _copy_layers(cross, cache.cross_attention_cache)
            cache.is_updated.update(self.cache.is_updated)
        return cache

    @classmethod
    def join(
        cls,
        sources: Items[tuple[Rectangle, list[int]]],
        cache: Any,
    ) -> Rectangle:
        """Joins rows of several rectangles into one, which uses the empty `cache`. `sources`: pairs
        of a rectangle and the indices of the rows to take from it. The rows are aligned on the
        right."""
        parts = [source.select(rows, cache) for source, rows in sources]
        for part in parts:
            part.inputs.pop(_MASK, None)
        first = parts[0]
        assert all(part.unused_layers == first.unused_layers for part in parts)
        lengths = [part.width - padding for part in parts for padding in part.paddings]
        blocks = [blocks for part in parts for blocks in part.blocks]
        encoded = [blocks for part in parts for blocks in part.encoded]
        width = max(lengths)
        paddings = [width - length for length in lengths]
        ids = [part.token_ids for part in parts]
        ids = join_rows(ids, [part.shape[1] for part in ids], width)
        encoder_width = max(_encoder_lengths(encoded), default=0)
        widths = [part.encoder_width for part in parts]
        has_masks = any(part.inputs.get(_ENCODER_MASK) is not None for part in parts)
        if len(set(widths)) > 1 or has_masks:
            for part in parts:
                if part.inputs.get(_ENCODER_MASK) is None:
                    ones = ids.new_ones((len(part.blocks), part.encoder_width), dtype=torch.long)
                    part.inputs[_ENCODER_MASK] = ones
        inputs = {}
        for name, value in first.inputs.items():
            if value is not cache:
                values = [part.inputs.get(name) for part in parts]
                value = join_rows(values, widths, encoder_width)
            inputs[name] = value
        if any(paddings):  # the mask also has a column for the next token
            inputs[_MASK] = padding_mask(paddings, width + 1, ids.device).long()
        constant_names = set.intersection(*(part.constant_names for part in parts)) - {_MASK}
        if isinstance(cache, EncoderDecoderCache):
            source, _ = sources[0]
            cache.is_updated.update(source.cache.is_updated)
        return cls(
            blocks,
            encoded,
            width,
            paddings,
            ids,
            cache,
            inputs,
            encoder_width,
            constant_names,
            first.unused_layers,
        )

    def append(self, plan: StepPlan) -> None:
        """Appends to each row the token that the plan computes, and sets the rows' blocks to the
        sequences' current ones."""
        blocks = [sequence.blocks for sequence in plan.sequences]
        rows = zip(plan.sequences, plan.starts)
        tokens = [[sequence.token_ids[start]] for sequence, start in rows]
        column = self.token_ids.new_tensor(tokens)
        token_ids = torch.cat([self.token_ids, column], dim=1)
        # assigned last: an exception above must not leave attributes that contradict one another
        self.blocks, self.width, self.token_ids = blocks, self.width + 1, token_ids

    def advance(
        self, model: PreTrainedModel, outputs: Any, is_first: bool, columns: Columns | None = None
    ) -> None:
        """Called after a forward that returned `outputs`: replaces the inputs by those of the next
        step. `is_first`: whether it was the rows' first forward. `columns`: the first and the end
        column of each row's `encoder_columns`, if the forward showed them."""
        inputs = next_inputs(model, outputs, dict(self.inputs))
        if columns is not None:
            self.encoder_columns = list(zip(*columns))
        if is_first:
            if self.cache is not None:
                self._keep_cache(model, inputs)
                paged_cache, *_ = cache_parts(self.cache)
                layers = paged_cache.paged_layers
                # for example layers that attend to images, if no row has an image
                self.unused_layers = frozenset(x.index for x in layers if not x.num_positions)
            for name in compat.PREFILL_INPUTS:
                inputs.pop(name, None)
            items = inputs.items()
            self.constant_names = {name for name, x in items if x is self.inputs.get(name)}
        self.inputs = inputs

    def _keep_cache(self, model: PreTrainedModel, inputs: dict[str, Any]) -> None:
        """Keeps the cache that the first forward returned: the model may have added a
        cross-attention cache. Warns if the model ignored ours and returned another."""
        cache = inputs[compat.cache_name(model)]
        if cache_parts(cache)[0] is cache_parts(self.cache)[0]:
            self.cache = cache
            return
        reason = (
            "ignores the cache that `generate` prepares, so nothing is paged: let its"
            f" `prepare_inputs_for_generation` pass `{compat.OUTPUT_CACHE}` on to its forward"
        )
        warn_once(model, Topic.CACHE(reason))


def _encoder_lengths(encoded: Items[SequenceBlocks]) -> list[int]:
    return [blocks.tables[0].num_tokens for blocks in encoded if blocks.tables]


def join_rows(values: Items[Any], widths: Items[int], width: int) -> Any:
    """Concatenates an input of several batches along rows. `widths` has the number of columns of
    each batch. Tensors with that many columns are first padded with zeros, or cut, to `width`
    columns, both on the left. If the values have no rows, returns the first."""
    first = values[0]
    if isinstance(first, ModelOutput):
        names = [name for name in first if all(name in value for value in values)]
        return type(first)(
            **{name: join_rows([value[name] for value in values], widths, width) for name in names}
        )
    if isinstance(first, (list, tuple)):
        return type(first)(join_rows(parts, widths, width) for parts in zip(*values))
    if not isinstance(first, Tensor) or not first.dim():
        return first
    return torch.cat(
        [
            _align_right(x, width) if x.dim() > 1 and x.shape[1] == old_width else x
            for x, old_width in zip(values, widths)
        ]
    )


def _align_right(x: Tensor, width: int) -> Tensor:
    num_missing = width - x.shape[1]
    if num_missing < 0:
        return x[:, -num_missing:]
    return torch.cat([x.new_zeros((len(x), num_missing, *x.shape[2:])), x], dim=1)


def with_cross(cache: PagedCache) -> PagedCache | EncoderDecoderCache:
    """Returns the cache to pass to the model's forward: `cache`, with its cross-attention cache if
    it has one."""
    return cache if cache.cross is None else EncoderDecoderCache(cache, cache.cross)


class JoinKey(NamedTuple):
    """A key of `Prompts`: rows may continue in one rectangle if their prompts have equal keys."""

    needs_equal_lengths: bool  # whether these rows must also have equal lengths
    # names, dtypes and shapes of the input tensors, without the axis of rows and without an axis
    # that can be padded; names and values of the other inputs; then the number of encoder tokens,
    # or `False` if it may differ
    inputs: Hashable


def with_join_keys(prompts: Prompts, requirements: tuple[bool, bool] | None) -> Prompts:
    """Returns the prompts with a `join_key` if their rows can join others and, if they can also
    share their first forward with other prompts, with a `merge_key`. `requirements`: as returned by
    `capability.join_requirements`."""
    join_key = None if requirements is None else _join_key(prompts, *requirements)
    merge_key = None
    has_media = any(prompts.model_kwargs.get(name) is not None for name in compat.PREFILL_INPUTS)
    if join_key is not None and not has_media and not any(prompts.paddings):
        merge_key = (join_key, prompts.length)
    return dataclasses.replace(prompts, join_key=join_key, merge_key=merge_key)


def _join_key(
    prompts: Prompts, needs_equal_lengths: bool, needs_equal_encoders: bool
) -> JoinKey | None:
    """Returns the key of prompts whose inputs allow their rows to join others; otherwise `None`."""
    shapes: list[Hashable] = []
    options: list[Any] = []
    for name in sorted(prompts.model_kwargs):
        value = prompts.model_kwargs[name]
        tensors = tensors_of(value)
        if not tensors:
            options.append((name, value))
        elif name in compat.PREFILL_INPUTS:
            continue
        for tensor in tensors:
            if not tensor.dim() or len(tensor) != len(prompts.paddings):
                return None
            can_pad = tensor.dim() > 1 and tensor.shape[1] == prompts.num_encoder_tokens
            shape = tensor.shape[2:] if can_pad else tensor.shape[1:]
            shapes.append((name, str(tensor.dtype), *shape))
    if not all(type(value) in SCALARS for _, value in options):
        return None
    num_encoded = needs_equal_encoders and prompts.num_encoder_tokens
    return JoinKey(needs_equal_lengths, (*shapes, *options, num_encoded))


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
    if prompts.encoder_use.is_written:
        inputs["encoder_outputs"] = map_tensors(Tensor.clone, inputs["encoder_outputs"])
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
    width = prompts.num_encoder_tokens
    return Rectangle(blocks, encoded, prompts.length, paddings, ids, cache, inputs, width)


def _copy_layers(cache: PagedCache, empty: PagedCache) -> None:
    """Copies the attributes of the layers of `cache`, except blocks, to the same layers of `empty`.
    The two caches then share tensors, which must not be written to in place before an operation on
    rows replaces them."""
    while len(empty.layers) < len(cache.layers):
        empty.layers.append(empty.layer_class_to_replicate())
    for source, target in zip(cache.layers, empty.layers):
        for name, value in vars(source).items():
            if name not in _NOT_COPIED:
                if isinstance(value, (dict, list)):
                    value = copy.copy(value)
                vars(target)[name] = value
