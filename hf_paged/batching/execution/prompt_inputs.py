"""What the prompts of a call hold: their tokens, positions and other content, and their keys in the
prefix cache. It runs no forward and looks nothing up."""

from __future__ import annotations

import functools
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
from .rectangle import padding_mask

# inputs without prompt content, or with one value per token
COMMON_INPUTS = {
    *compat.CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "tokenizer",
    "attention_mask",
    "position_ids",
}
# words in the config's names of placeholder tokens, which stand for images or other media, or mark
# them
_MEDIA = (
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


class Keys(NamedTuple):
    """A prompt's keys in the prefix cache, by token; the number of tokens up to the last
    placeholder for other content, and of the tokens before the first placeholder."""

    tokens: list[Hashable]
    num_content: int
    num_text: int


@dataclass(eq=False)
class PromptInputs:
    """The inputs of the model's first forward over the prompts of a call, without repeated
    prompts."""

    input_ids: Tensor
    """`(rows, length)` as transformers' loops get them, one row per prompt; the decoder's if the
    model has an encoder; `(rows, 0)` if there are only `inputs_embeds`."""
    model_kwargs: dict[str, Any]  # without a cache
    paddings: list[int]  # leading columns of each row that are padding
    # `(rows or 1, length)` or with axes in front
    position_ids: Tensor | None = field(init=False)

    def __post_init__(self) -> None:
        self.position_ids = self.model_kwargs.get("position_ids")

    @property
    def length(self) -> int:
        """Columns of the first forward, padding included."""
        embeds = self.model_kwargs.get("inputs_embeds")
        # a model with an encoder passes the embeddings to it
        if embeds is None or self.num_encoder_tokens:
            return int(self.input_ids.shape[1])
        return int(embeds.shape[1])

    @property
    def num_encoder_tokens(self) -> int:
        """Encoder tokens of each row, padding included; the decoder attends to their keys and
        values."""
        outputs = self.model_kwargs.get("encoder_outputs")
        if outputs is None:
            return 0
        return int(outputs[0].shape[1])

    @functools.cached_property
    def axes(self) -> list[list[list[int]] | None]:
        """Each row's positions on each axis; `None` for a row whose positions count its tokens."""
        ids = self.position_ids
        if ids is None:
            return [None] * len(self.input_ids)
        if ids.dim() != 3:
            ids = ids[None]
        ids = ids.expand(-1, len(self.input_ids), self.length)
        counted = torch.arange(self.length, device=ids.device)
        rows: list[list[list[int]] | None] = []
        for row, padding in enumerate(self.paddings):
            axes = ids[:, row, padding:]
            is_counted = axes == counted[: self.length - padding]
            rows.append(None if bool(is_counted.all()) else axes.tolist())
        return rows

    def num_axes(self, row: int) -> int:
        """Returns the number of position axes of a row; 0 if positions count tokens."""
        return len(self.axes[row] or ())

    def shift(self, row: int, counts_padding: bool = False) -> int:
        """Returns how many more positions a row's prompt takes than it has tokens;
        `counts_padding`: its padding takes some if the model itself counts columns."""
        axes = self.axes[row]
        if axes is not None:
            return max(max(axis) + 1 - len(axis) for axis in axes)
        if counts_padding and self.position_ids is None:
            return self.paddings[row]
        return 0

    @property
    def axis_counts(self) -> tuple[int, ...]:
        """The distinct numbers of axes of the rows, sorted."""
        return tuple(sorted({len(axes or ()) for axes in self.axes}))

    def positions(
        self,
        row: int,
        first: int,
        end: int,
    ) -> list[list[int]] | None:
        """Returns the positions of a row's tokens `[first, end)` on each axis, which count on after
        the prompt, as floats if the model's are floats; `None` if positions count tokens."""
        axes = self.axes[row]
        if axes is None:
            return None
        length = len(axes[0])
        num_counted = end - max(first, length)
        positions = []
        for axis in axes:
            start = axis[-1] + 1 + max(first - length, 0)
            counted = [start + number for number in range(num_counted)]
            positions.append([*axis[first:end], *counted])
        return positions

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs beyond the common ones."""
        return other_names(self.model_kwargs)

    @property
    def _types(self) -> dict[str, Tensor]:
        """Token type inputs, `(rows, length)` each, by name."""
        types = {}
        for name in self.names:
            value = self.model_kwargs[name]
            is_types = name.endswith("token_type_ids") and isinstance(value, Tensor)
            if is_types and value.shape == self.input_ids.shape:
                types[name] = value
        return types

    def content(self, config: PreTrainedConfig) -> Tensor | None:
        """Returns which tokens `(rows, length)` are placeholders for other content, such as images;
        `None` if that is unknown."""
        ids = self.input_ids
        if ids.shape[1] != self.length or self.model_kwargs.get("inputs_embeds") is not None:
            return None
        content = torch.zeros_like(ids, dtype=torch.bool)
        types = self._types
        for token_types in types.values():
            content |= token_types.to(ids.device) != 0
        attributes = {**vars(config.get_text_config(decoder=True)), **vars(config)}
        for name, value in attributes.items():
            is_token = name.endswith(("token_id", "token_index")) and isinstance(value, int)
            if is_token and any(word in name for word in _MEDIA):
                content |= ids == value
        content &= padding_mask(self.paddings, self.length, ids.device)
        # without placeholders, inputs other than token types may belong to any token
        is_unknown = not bool(content.any()) and len(types) != len(self.names)
        return None if is_unknown else content

    def num_text(self, config: PreTrainedConfig) -> int:
        """Returns the number of tokens before the first placeholder of a single row; 0 for several
        rows, or if it is unknown."""
        content = self.content(config) if len(self.paddings) == 1 else None
        if content is None or not bool(content.any()):
            return 0
        return int(content[0].nonzero()[0, 0]) - self.paddings[0]

    def keys(self, config: PreTrainedConfig) -> list[Keys] | None:
        """Returns each row's prefix-cache keys, in the namespace of `names`; a placeholder's key
        includes a hash of all inputs. `None` if the prefix cache cannot be used for these
        prompts."""
        content = self.content(config)
        if content is None:
            return None
        types = self._types
        others = {name: self.model_kwargs[name] for name in self.names if name not in types}
        # models assign images and sound to placeholder tokens in order, over all rows
        kinds = (self.input_ids, *types.values())
        placeholders = []
        for row, are_content in enumerate(content):
            placeholders.append([kind[row, are_content].tolist() for kind in kinds])
        try:
            digest = _digest([others, placeholders])
        except TypeError:
            return None
        rows = list[Keys]()
        num_text = self.num_text(config)
        for row, padding in enumerate(self.paddings):
            ids = self.input_ids[row, padding:].tolist()
            are_content = content[row, padding:].tolist()
            num_content = 0
            if any(are_content):
                num_content = len(ids) - are_content[::-1].index(True)
            axes = self.axes[row] or []
            columns = [token_types[row, padding:].tolist() for token_types in types.values()]
            columns += axes
            keys: list[Hashable] = list(ids)
            for i, (token, is_content) in enumerate(zip(ids, are_content)):
                # the inputs may affect any token of a row without placeholders
                is_content |= bool(others) and num_content == 0
                if is_content or any(axis[i] != i for axis in axes):
                    source = (digest, row) if is_content else None
                    keys[i] = (token, tuple(column[i] for column in columns), source)
            rows.append(Keys(keys, num_content, num_text))
        return rows

    def keys_after(self, row: int, token_ids: list[int]) -> list[Hashable]:
        """Returns the prefix-cache keys of tokens that follow a row's prompt, as if they were more
        of its text."""
        axes = self.axes[row]
        if axes is None:
            return list(token_ids)
        first = len(axes[0])
        if all(axis[-1] + 1 == first for axis in axes):
            return list(token_ids)
        types = [0] * len(self._types)
        following = self.positions(row, first, first + len(token_ids)) or ()
        columns = zip(token_ids, *following)
        return [(token, (*types, *positions), None) for token, *positions in columns]


def other_names(model_kwargs: dict[str, Any]) -> tuple[str, ...]:
    """Returns the sorted names of the inputs that are set, beyond the common ones."""
    names = []
    for name in sorted(model_kwargs.keys() - COMMON_INPUTS):
        value = model_kwargs[name]
        is_empty = isinstance(value, (dict, list, tuple)) and not value
        if value is not None and value is not False and not is_empty:
            names.append(name)
    return tuple(names)


def is_flag(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _digest(value: Any) -> bytes:
    """Hashes all tensors and plain values in nested containers, cryptographically: whoever could
    construct two inputs of equal digests could be served another user's content. Raises `TypeError`
    for other objects."""
    tensors: list[Tensor] = []

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(
                    f"a tensor of layout {value.layout} and {value.dtype} among the inputs of a"
                    " model"
                )
            tensors.append(value)
            return "tensor", str(value.dtype), tuple(value.shape)
        if isinstance(value, dict):
            parts = []
            for name, part in value.items():
                parts.append((described(name), described(part)))
            return "dict", parts
        if isinstance(value, (list, tuple)):
            return "list", [described(part) for part in value]
        if is_flag(value):
            return value
        raise TypeError(f"a {type(value).__name__} among the inputs of a model")

    # the form comes first, since it defines where each tensor's bytes end
    form = marshal.dumps(described(value), MARSHAL_VERSION)
    digest = hashlib.blake2b(form, digest_size=32)
    for tensor in tensors:
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        digest.update(content.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()
