"""The inputs of a call's prompts: tokens, positions, images and other content, and the keys under
which the prefix cache knows their tokens. Runs no forward, and reads no cache."""

from __future__ import annotations

import hashlib
import marshal
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from ... import compat
from ...cache.prefix_index import MARSHAL_VERSION
from ...forks import lazy_property
from ...model.own_loop import padding_mask

# inputs without content: options, caches, and those with one value per token
COMMON_INPUTS = {
    *compat.CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "tokenizer",
    "attention_mask",
    "position_ids",
}
# words in the config's names for tokens that stand for media, or that mark their start or end
MEDIA_WORDS = (
    "image",
    "video",
    "audio",
    "vision",
    "visual",
    "speech",
    "sound",
    "media",
    "patch",
    "frame",
)


class PromptKeys(NamedTuple):
    """A prompt's keys in the prefix cache. Placeholders are tokens that stand for other content."""

    token_keys: list[Hashable]  # one per token
    num_content: int  # tokens up to and including the last placeholder; 0 without placeholders
    num_text: int  # as `PromptInputs.num_text` returns it


@dataclass(eq=False)
class PromptInputs:
    """The inputs of the model's first forward over a call's prompts, one row per distinct
    prompt."""

    input_ids: Tensor
    """`(rows, length)` int64, as transformers' loops get them: the decoder's if the model has an
    encoder; `(rows, 0)` if there are only `inputs_embeds`."""
    model_kwargs: dict[str, Any]  # without a cache
    paddings: list[int]  # leading padding columns of each row
    # (rows or 1, length), or with an axis dimension in front; `None`: 0, 1, 2, ... in each row
    position_ids: Tensor | None = field(init=False)

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
        return int(outputs[0].shape[1])

    @lazy_property
    def axes(self) -> list[list[list[int]] | None]:
        """Each row's positions, by axis and token; `None` for a row with positions 0, 1, 2, ... on
        all axes."""
        ids = self.position_ids
        if ids is None:
            return [None] * len(self.input_ids)
        if ids.dim() != 3:
            ids = ids[None]
        ids = ids.expand(-1, len(self.input_ids), self.length)
        default_positions = torch.arange(self.length, device=ids.device)
        axes_by_row: list[list[list[int]] | None] = []
        for row, padding in enumerate(self.paddings):
            axes = ids[:, row, padding:]
            is_default = axes == default_positions[: self.length - padding]
            axes_by_row.append(None if bool(is_default.all()) else axes.tolist())
        return axes_by_row

    def num_axes(self, row: int) -> int:
        """Returns the number of position axes of a row; 0 if its positions are 0, 1, 2, ..."""
        return len(self.axes[row] or ())

    def position_shift(self, row: int, counts_padding: bool = False) -> int:
        """Returns how many more positions a row's prompt takes than it has tokens: its largest
        position plus one, minus its number of tokens. `counts_padding`: whether the model, if it
        gets no `position_ids`, also counts padding."""
        axes = self.axes[row]
        if axes is not None:
            return max(max(axis) + 1 - len(axis) for axis in axes)
        if counts_padding and self.position_ids is None:
            return self.paddings[row]
        return 0

    @property
    def axis_counts(self) -> tuple[int, ...]:
        """The distinct values of `num_axes`, sorted."""
        return tuple(sorted({len(axes or ()) for axes in self.axes}))

    def positions(
        self,
        row: int,
        first: int,
        end: int,
    ) -> list[list[int]] | None:
        """Returns the positions of a row's tokens `[first, end)`, by axis and token; they increase
        by one after the prompt, and are floats if the model's are. Returns `None` if the row's
        positions are 0, 1, 2, ... on all axes."""
        axes = self.axes[row]
        if axes is None:
            return None
        length = len(axes[0])
        num_following = end - max(first, length)
        positions = []
        for axis in axes:
            start = axis[-1] + 1 + max(first - length, 0)
            following = [start + offset for offset in range(num_following)]
            positions.append([*axis[first:end], *following])
        return positions

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs that are not in `COMMON_INPUTS`."""
        return uncommon_names(self.model_kwargs)

    @property
    def _token_types(self) -> dict[str, Tensor]:
        """Token type inputs by name, each `(rows, length)`."""
        token_types = {}
        for name in self.names:
            value = self.model_kwargs[name]
            has_types = name.endswith("token_type_ids") and isinstance(value, Tensor)
            if has_types and value.shape == self.input_ids.shape:
                token_types[name] = value
        return token_types

    def placeholder_mask(self, config: PreTrainedConfig) -> Tensor | None:
        """Returns a mask `(rows, length)` bool of the placeholder tokens, which stand for images or
        other content; `None` if it is unknown which tokens these are."""
        ids = self.input_ids
        if ids.shape[1] != self.length or self.model_kwargs.get("inputs_embeds") is not None:
            return None
        is_placeholder = torch.zeros_like(ids, dtype=torch.bool)
        token_types = self._token_types
        for type_ids in token_types.values():
            is_placeholder |= type_ids.to(ids.device) != 0
        attributes = {**vars(config.get_text_config(decoder=True)), **vars(config)}
        for name, value in attributes.items():
            is_token = name.endswith(("token_id", "token_index")) and isinstance(value, int)
            if is_token and any(word in name for word in MEDIA_WORDS):
                is_placeholder |= ids == value
        is_placeholder &= padding_mask(self.paddings, self.length, ids.device)
        # without placeholders, inputs other than token types may belong to any token
        is_unknown = not bool(is_placeholder.any()) and len(token_types) != len(self.names)
        return None if is_unknown else is_placeholder

    def num_text(self, config: PreTrainedConfig) -> int:
        """Returns the number of tokens before the first placeholder; 0 if there are several rows or
        no placeholders, or if the placeholders are unknown."""
        mask = self.placeholder_mask(config) if len(self.paddings) == 1 else None
        if mask is None or not bool(mask.any()):
            return 0
        return int(mask[0].nonzero()[0, 0]) - self.paddings[0]

    def keys(self, config: PreTrainedConfig) -> list[PromptKeys] | None:
        """Returns each row's prefix-cache keys; `Request.set_inputs` chooses their namespace. A
        placeholder's key includes a hash of all media and placeholders of the call. `None` if the
        prefix cache cannot be used for these prompts."""
        mask = self.placeholder_mask(config)
        if mask is None:
            return None
        token_types = self._token_types
        media = {name: self.model_kwargs[name] for name in self.names if name not in token_types}
        # over all rows, since models assign images and audio to the rows' placeholders in order
        values_by_token = (self.input_ids, *token_types.values())
        placeholders = []
        for row, is_placeholder in enumerate(mask):
            row_values = [values[row, is_placeholder].tolist() for values in values_by_token]
            placeholders.append(row_values)
        try:
            digest = _digest([media, placeholders])
        except TypeError:
            return None
        keys_by_row = list[PromptKeys]()
        num_text = self.num_text(config)
        for row, padding in enumerate(self.paddings):
            ids = self.input_ids[row, padding:].tolist()
            is_placeholder = mask[row, padding:].tolist()
            num_content = 0
            if any(is_placeholder):
                num_content = len(ids) - is_placeholder[::-1].index(True)
            axes = self.axes[row] or []
            columns = [type_ids[row, padding:].tolist() for type_ids in token_types.values()]
            columns += axes
            keys: list[Hashable] = list(ids)
            for i, (token, has_content) in enumerate(zip(ids, is_placeholder)):
                # without placeholders, media may affect any token of the row
                has_content |= bool(media) and num_content == 0
                if has_content or any(axis[i] != i for axis in axes):
                    source = (digest, row) if has_content else None
                    keys[i] = (token, tuple(column[i] for column in columns), source)
            keys_by_row.append(PromptKeys(keys, num_content, num_text))
        return keys_by_row

    def keys_after(self, row: int, token_ids: list[int]) -> list[Hashable]:
        """Returns the prefix-cache keys of tokens that follow a row's prompt; they equal the keys
        that these tokens would have as text at the end of the prompt."""
        axes = self.axes[row]
        if axes is None:
            return list(token_ids)
        first = len(axes[0])
        if all(axis[-1] + 1 == first for axis in axes):
            return list(token_ids)
        text_types = [0] * len(self._token_types)
        positions_by_axis = self.positions(row, first, first + len(token_ids)) or ()
        columns = zip(token_ids, *positions_by_axis)
        return [(token, (*text_types, *positions), None) for token, *positions in columns]


def uncommon_names(model_kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Returns the sorted names of the inputs that have a value and are not in `COMMON_INPUTS`."""
    names = []
    for name in sorted(model_kwargs.keys() - COMMON_INPUTS):
        value = model_kwargs[name]
        is_empty = isinstance(value, (dict, list, tuple)) and not value
        if value is not None and value is not False and not is_empty:
            names.append(name)
    return tuple(names)


def is_plain_value(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _digest(value: Any) -> bytes:
    """Returns a cryptographic hash (32 bytes) of the tensors and plain values in nested containers.
    It must resist collisions: an input constructed to have the digest of another user's input would
    be served that user's cached content. Raises `TypeError` for other objects, and for sparse and
    quantized tensors."""
    tensors: list[Tensor] = []

    def describe(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(
                    f"cannot hash a model input with layout {value.layout} and dtype {value.dtype}"
                )
            tensors.append(value)
            return "tensor", str(value.dtype), tuple(value.shape)
        if isinstance(value, dict):
            parts = []
            for name, part in value.items():
                parts.append((describe(name), describe(part)))
            return "dict", parts
        if isinstance(value, (list, tuple)):
            return "list", [describe(part) for part in value]
        if is_plain_value(value):
            return value
        raise TypeError(f"cannot hash a model input of type {type(value).__name__}")

    # hashed first, since it defines where each tensor's bytes end
    structure = marshal.dumps(describe(value), MARSHAL_VERSION)
    digest = hashlib.blake2b(structure, digest_size=32)
    for tensor in tensors:
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        digest.update(content.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()
