"""A call's prompts that have inputs besides token ids, or whose rows stay together. The scheduler
decides when a prompt runs; the optional packages `media` and `rectangles` compute it."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from collections.abc import Sequence as Items
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ... import compat
from ...cache.block_pool import BlockTable
from ...cache.paged_cache import PagedCache
from ...cache.sequence_blocks import SequenceBlocks
from ...model.own_loop import map_tensors
from ...rooms import MediaRoom, room
from ..request import Request, RowsError, Sequence

# inputs that add no content to the token ids: options, caches, masks and positions
COMMON_INPUTS = {
    *compat.CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "tokenizer",
    "attention_mask",
    "position_ids",
}


class PromptsError(RowsError):
    """A forward of `prompts` failed. The error ends only the requests of these prompts."""

    def __init__(self, prompts: Prompts, cause: Exception) -> None:
        super().__init__(str(cause))
        self.prompts = prompts
        self.cause = cause

    def concerns(self, request: Request) -> bool:
        return request.inputs is not None and request.inputs[0] is self.prompts


class EncoderUse(NamedTuple):
    """How a model's forwards use the outputs of its encoder."""

    states: int = 0  # index of the output from which the decoder computes keys and values
    is_written: bool = False  # whether forwards write to the outputs


DEFAULT_ENCODER_USE = EncoderUse()


@dataclass(eq=False)
class Prompts:
    """The prompts of a call, one row per prompt even if several sequences continue it: the
    arguments of the model's `prepare_inputs_for_generation`, as `generate` prepared them for the
    first forward. One forward computes all rows, since nothing says which images and audio belong
    to which row."""

    input_ids: Tensor
    """`(rows, length)` int64 or int32, as transformers' loops get them: the decoder's if the model
    has an encoder; `(rows, 0)` if there are only `inputs_embeds`."""
    model_kwargs: dict[str, Any]  # without a cache
    paddings: list[int]  # leading padding columns of each row
    # (rows or 1, length), or with an axis dimension in front; `None`: 0, 1, 2, ... in each row
    position_ids: Tensor | None = field(init=False)
    # set by the optional package `rectangles`: these rows may join other rows with an equal key;
    # `None`: they join no rows
    join_key: Any = None
    # prompts with equal keys may share a forward; `None`: these prompts share no forward
    merge_key: Hashable | None = None
    encoder_use: EncoderUse = DEFAULT_ENCODER_USE

    def __post_init__(self) -> None:
        self.position_ids = self.model_kwargs.get("position_ids")

    @property
    def length(self) -> int:
        """Columns of the first forward, including padding."""
        embeds = self.model_kwargs.get("inputs_embeds")
        # a model with an encoder passes the embeddings to the encoder
        if embeds is None or self.num_encoder_tokens:
            return int(self.input_ids.shape[1])
        return int(embeds.shape[1])

    @property
    def num_encoder_tokens(self) -> int:
        """Encoder tokens per row, including padding, whose keys and values the decoder reads; 0
        without an encoder."""
        outputs = self.model_kwargs.get("encoder_outputs")
        if outputs is None:
            return 0
        return int(outputs[self.encoder_use.states].shape[1])

    def position_shift(self, row: int, counts_padding: bool = False) -> int:
        """Returns how many more positions a row's prompt takes than it has tokens: its largest
        position plus one, minus its number of tokens. `counts_padding`: whether the model, if it
        gets no `position_ids`, also counts padding."""
        padding = self.paddings[row]
        ids = self.position_ids
        if ids is None:
            return padding if counts_padding else 0
        positions = ids[..., row % ids.shape[-2], padding:]
        return int(positions.max()) + 1 + padding - self.length

    def keys(self, config: PreTrainedConfig) -> Items[tuple[list[Hashable], int, int]] | None:
        """Returns the argument `keys` of `Request.set_inputs`; `None` if the prompts do not use the
        prefix cache."""
        return None

    @property
    def hides_tokens(self) -> bool:
        """Whether the attention mask hides tokens other than padding; false for a mask that is not
        `(rows, length)`."""
        mask = self.model_kwargs.get("attention_mask")
        shape = (len(self.paddings), self.length)
        if not isinstance(mask, Tensor) or mask.shape != shape:
            return False
        lengths = [self.length - padding for padding in self.paddings]
        return mask.bool().sum(-1).tolist() != lengths

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


def uncommon_names(model_kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Returns the sorted names of the inputs that have a value and are not in `COMMON_INPUTS`."""
    names = []
    for name in sorted(model_kwargs.keys() - COMMON_INPUTS):
        value = model_kwargs[name]
        is_empty = isinstance(value, (dict, list, tuple)) and not value
        if value is not None and not is_empty:
            names.append(name)
    return tuple(names)


def find_media() -> MediaRoom:
    """Returns the optional package `media`. Raises `RoomMissingError` if it is not installed."""
    media: MediaRoom = room("media", "packing prompts of more than token ids")
    return media


def empty_blocks(cache: PagedCache) -> SequenceBlocks:
    """Returns empty block tables, for a row whose K/V are not stored."""
    groups = [group.group_memory for group in cache.groups.values()]
    return SequenceBlocks(tuple(BlockTable(group.pool, group.block_size) for group in groups))


def prompts_of(
    unexpanded: tuple[Tensor, dict[str, Any]],
    model_kwargs: dict[str, Any],
    has_encoder: bool,
) -> Prompts:
    """Makes `Prompts` from `unexpanded`, the inputs of `generate` before it repeats rows, and from
    the `model_kwargs` that it prepared for its loop. `has_encoder`: whether the model has an
    encoder, so that these are the decoder's prompts. Only leading zeros of an attention mask count
    as padding, and only in rows that also have ones."""
    ids, inputs = unexpanded
    inputs = {
        # detached from their graph, so that they can be deep-copied and keep no other tensors alive
        name: map_tensors(lambda x: x.detach() if x.requires_grad else x, value)
        for name, value in {**model_kwargs, **inputs}.items()
        if name not in compat.CACHE_NAMES
    }
    mask = inputs.get("decoder_attention_mask" if has_encoder else "attention_mask")
    prompts = Prompts(ids, inputs, [0] * len(ids))
    if isinstance(mask, Tensor) and mask.shape == (len(ids), prompts.length):
        paddings = (mask.cumsum(-1) == 0).sum(-1)
        is_empty = paddings == prompts.length
        prompts = replace(prompts, paddings=torch.where(is_empty, 0, paddings).tolist())
    return prompts


def copy_nested_dicts(value: Any) -> Any:
    """Copies a dict and the dicts in it, but not their tensors, since `generate` repeats the rows
    of a dict's tensors by replacing its entries. Returns any other value unchanged."""
    if not isinstance(value, dict):
        return value
    copied_dict = copy.copy(value)
    for name, part in value.items():
        copied_dict[name] = copy_nested_dicts(part)
    return copied_dict
