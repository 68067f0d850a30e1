"""The prompts of a call, computed by the model's own forward: which prompts can share it, and how
its results reach the rows. When a prompt runs is up to the scheduler."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import EncoderDecoderCache

from ... import compat
from ...attention.observers import LookAhead, observing_attention
from ...cache.block_pool import BlockTable
from ...cache.layers import PagedLayer
from ...cache.paged_cache import PagedCache
from ...cache.sequence_blocks import NO_BLOCKS, UNCACHED, SequenceBlocks
from ...model.own_loop import cache_parts, map_tensors, next_logits, tensors_of
from ...model.structure import is_stock
from ...model.trial import stock_cache
from ..request import Request, RowsError, Sequence
from .prompt_inputs import Keys, PromptInputs, is_flag
from .rectangle import Rectangle


class PromptsError(RowsError):
    """A forward of prompts failed; it concerns only their requests."""

    def __init__(self, prompts: Prompts, cause: Exception) -> None:
        super().__init__(str(cause))
        self.prompts = prompts
        self.cause = cause

    def concerns(self, request: Request) -> bool:
        return request.inputs is not None and request.inputs[0] is self.prompts


class JoinKey(NamedTuple):
    """Rows of prompts with equal keys may continue in one rectangle."""

    equal_lengths: bool  # whether only rows of equal length may
    shapes: Hashable  # shapes of the inputs, without the dimensions that can be padded


@dataclass(eq=False)
class Prompts(PromptInputs):
    """The prompts of a call as `generate` prepared them for the first forward: the arguments of the
    model's `prepare_inputs_for_generation`. That forward runs over all rows at once, since images
    and sound cannot be assigned to rows."""

    join_key: JoinKey | None = None  # for rectangles; `None`: the rows join no others
    # prompts of equal keys share one forward; `None`: this one shares none
    merge_key: Hashable | None = None

    def set_join_keys(self, verdict: tuple[bool, bool] | None) -> None:
        """Sets `join_key` and `merge_key`. `verdict`: whether joined rows must have equal lengths,
        and equal encoder lengths; `None`: rows cannot join."""
        shapes: list[Hashable] = []
        flags: list[Any] = []
        has_media = False
        if verdict is None:
            return
        for name in sorted(self.model_kwargs):
            value = self.model_kwargs[name]
            tensors = tensors_of(value)
            if not tensors:
                flags.append((name, value))
            elif name in compat.PREFILL_INPUTS:
                has_media = True
                continue
            for x in tensors:
                if not x.dim() or len(x) != len(self.paddings):
                    return
                is_padded = x.dim() > 1 and x.shape[1] == self.num_encoder_tokens
                shape = x.shape[2:] if is_padded else x.shape[1:]
                shapes.append((name, str(x.dtype), *shape))
        equal_lengths, equal_widths = verdict
        encoder_width = equal_widths and self.num_encoder_tokens
        self.join_key = JoinKey(equal_lengths, (*shapes, encoder_width))
        is_plain = all(is_flag(value) for _, value in flags)
        if is_plain and not has_media and not any(self.paddings):
            self.merge_key = (self.join_key, self.length, *flags)

    def similarity_key(self, config: PreTrainedConfig) -> Hashable | None:
        """Returns a key: prompts with equal keys differ only in text, length and floats, which
        `merge_check` varies. `None` for prompts that must not be merged."""
        content = self.content(config)
        if content is None:
            return None
        # the placeholder tokens of each row, since too many in one prompt must not make up for too
        # few in another
        kind: list[Hashable] = []
        for ids, is_content in zip(self.input_ids, content):
            kind.append(tuple(sorted(ids[is_content].tolist())))
        for name, value in sorted(self._masked.items()):
            if not isinstance(value, Tensor):
                if not is_flag(value):
                    return None
                kind.append((name, value))
            elif _is_per_token(name):
                if value.shape[-2:] != (len(self.paddings), self.length):
                    return None
                kind.append((name, value.dtype, value.dim()))
            else:
                # some models mix rows up if parts of an image are masked, and some drop images that
                # are zero
                is_partial = "mask" in name and not bool(value.all())
                if not value.dim() or is_partial or _has_zero_parts(value):
                    return None
                is_float = value.is_floating_point()
                numbers = None if is_float else tuple(value.flatten().tolist())
                kind.append((name, value.dtype, value.shape, numbers))
        return tuple(kind)

    @property
    def hides_tokens(self) -> bool:
        """Whether the attention mask hides tokens besides padding."""
        mask = self._mask
        shape = (len(self.paddings), self.length)
        if not isinstance(mask, Tensor) or mask.shape != shape:
            return False
        lengths = [self.length - padding for padding in self.paddings]
        return mask.bool().sum(-1).tolist() != lengths

    @property
    def _mask(self) -> Tensor:
        """The attention mask `(rows, length)` int64, by default all ones."""
        mask: Tensor | None = self.model_kwargs.get("attention_mask")
        if mask is not None:
            return mask
        return self.input_ids.new_ones(len(self.paddings), self.length)

    @property
    def _masked(self) -> dict[str, Any]:
        return {**self.model_kwargs, "attention_mask": self._mask}

    def longer(self, token_id: int) -> Prompts:
        """Returns the prompts with one more token each and other images, for a check that merges
        them with these."""
        model_kwargs = dict(self.model_kwargs)
        for name, value in model_kwargs.items():
            if not isinstance(value, Tensor):
                continue
            if value.is_floating_point():
                value = -value
            if _is_per_token(name):
                more = value[..., -1:]
                if name.endswith("position_ids"):
                    more = more + 1
                elif name != "attention_mask":
                    more = more * 0
                value = torch.cat([value, more], dim=-1)
            model_kwargs[name] = value
        ids = functional.pad(self.input_ids, (0, 1), value=token_id)
        return Prompts(ids, model_kwargs, self.paddings)

    def merged(self, others: Items[Prompts], pad_token_id: int) -> Prompts:
        """Merges prompts of equal `merge_key` as if they came from one call: all rows in order,
        padded on the left."""
        parts = (self, *others)
        width = max(part.length for part in parts)

        def padded(values: list[Tensor], padding: int = 0) -> Tensor:
            wide = []
            for value in values:
                missing = width - value.shape[-1]
                wide.append(functional.pad(value, (missing, 0), value=padding))
            return torch.cat(wide, dim=-2)

        inputs = [part._masked for part in parts]
        merged = inputs[0]
        for name, value in merged.items():
            if isinstance(value, Tensor):
                values = [part[name] for part in inputs]
                join = padded if _is_per_token(name) else torch.cat
                merged[name] = join(values)
        ids = padded([part.input_ids for part in parts], pad_token_id)
        paddings = []
        for part in parts:
            shift = width - part.length
            paddings += [shift + padding for padding in part.paddings]
        return Prompts(ids, merged, paddings)

    def lay_out(
        self,
        model: PreTrainedModel,
        cache: PagedCache | EncoderDecoderCache | None,
        rows: dict[int, Sequence],
    ) -> Rectangle:
        """Returns all rows as a rectangle on the empty `cache`, which borrows the tables of the
        sequences in `rows`."""
        inputs = dict(self.model_kwargs)
        no_blocks = no_encoder = NO_BLOCKS
        if cache is not None:
            inputs[compat.cache_name(model)] = cache
            caches = cache_parts(cache)
            no_blocks = _empty_blocks(caches[0])
            no_encoder = _empty_blocks(caches[-1])
        num_rows = len(self.paddings)
        blocks = [no_blocks] * num_rows
        encoded = [no_encoder] * num_rows
        paddings = [self.length] * num_rows
        for row, sequence in rows.items():
            blocks[row] = sequence.blocks
            encoded[row] = sequence.request.encoded
            paddings[row] = self.paddings[row]
        return Rectangle(blocks, encoded, self.length, paddings, self.input_ids, cache, inputs)

    def forward(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        rows: dict[int, Sequence],
        num_cached: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the model's own forward over all rows, and stores K/V of the sequences in `rows` in
        their tables, which have room and which the empty `cache` borrows. A single row may hold
        `num_cached` tokens already. Returns logits `(all rows, vocab_size)`, and which positions
        `(all rows, length)` attended to later ones or lie between them; `None` if that is
        unknown."""
        first = self.paddings[0] + num_cached if num_cached else 0
        observer = LookAhead(self.paddings, self.length, first)
        rectangle = self.lay_out(model, cache, rows)
        rectangle.borrow(first)
        with observing_attention(observer):
            inputs = rectangle.inputs
            logits, _ = next_logits(
                model, self.input_ids, inputs, is_first_step=True, num_cached=first
            )
        layers = (layer for layer in cache.layers if isinstance(layer, PagedLayer))
        counts = [layer.num_positions for layer in layers if layer.num_positions]
        if any(count != self.length for count in counts):
            raise ValueError(f"the model made {counts[0]} keys and values of {self.length} tokens")
        if observer.num_calls < len(counts):
            return logits, None
        return logits, observer.positions()

    def assign(
        self,
        request: Request,
        row: int,
        keys: list[Keys] | None,
        begins_behind_text: bool = False,
    ) -> None:
        """Makes a row the prompt of a request; without `keys` the prefix cache is not used for it.
        `begins_behind_text`: whether the text before the first placeholder is shared with other
        prompts, with or without other content."""
        request.inputs, request.num_encoder_tokens = (self, row), self.num_encoder_tokens
        if keys is None or request.namespace is UNCACHED:
            request.namespace = UNCACHED
        else:
            request.keys, request.num_content, num_text = keys[row]
            request.num_text = num_text if begins_behind_text else 0
            if not request.num_text:
                request.namespace = (request.namespace, self.names)

    def find_positions(self, model: Any) -> None:
        """Sets `position_ids` to those of the model's own preparation or, if it returns none, to
        the columns, which the model then counts itself."""
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
    """Whether an image or patch (the last three axes at most) is all zeros."""
    if not media.is_floating_point():
        return False
    first = max(1, media.dim() - 3)
    parts = media.reshape(-1, media.shape[first:].numel())  # single numbers, for a vector
    return bool((parts == 0).all(-1).any())


def _is_per_token(name: str) -> bool:
    """Whether an input is `(rows, length)`, perhaps with leading axes."""
    return name in ("attention_mask", "position_ids") or name.endswith("token_type_ids")


def _empty_blocks(cache: PagedCache) -> SequenceBlocks:
    """Returns empty tables, for a row that is not stored."""
    groups = [group.blocks for group in cache.groups.values()]
    return SequenceBlocks(tuple(BlockTable(group.pool, group.block_size) for group in groups))


def prompts_of(
    unexpanded: tuple[Tensor, dict[str, Any]],
    model_kwargs: dict[str, Any],
    is_decoder: bool,
) -> Prompts:
    """Makes `Prompts` from `generate`'s inputs before it repeats rows (`unexpanded`), and its
    `model_kwargs` for the loop. `is_decoder`: the model has an encoder, and these are the decoder's
    prompts. Only leading zeros of an attention mask count as padding."""
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
        prompts.paddings = torch.where(is_empty, 0, paddings).tolist()
    return prompts


def _without_graph(x: Tensor) -> Tensor:
    """Returns the tensor without its autograd graph, so that it can be copied and keeps no other
    tensors alive."""
    return x.detach() if x.requires_grad else x


def unshared(value: Any) -> Any:
    """Copies nested dicts, but not their tensors, since `generate` repeats the rows of their
    entries in place."""
    if not isinstance(value, dict):
        return value
    copied = copy.copy(value)
    for name, part in value.items():
        if isinstance(part, dict):
            copied[name] = unshared(part)
    return copied
