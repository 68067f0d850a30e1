"""Prompts that the model's own forward computes and that packed steps continue. `MediaPrompts`
finds the tokens that stand for images or other content, the positions, the keys in the prefix
index, and which prompts can share a forward."""

from __future__ import annotations

import hashlib
import inspect
import marshal
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from .. import compat
from ..attention.masks import attention_observer
from ..batching import request
from ..batching.decoding.vocabulary import MEDIA_WORDS
from ..batching.execution.prompts import Prompts, empty_blocks, uncommon_names
from ..cache.paged_cache import PagedCache
from ..cache.prefix_index import MARSHAL_VERSION
from ..forks import lazy_property
from ..interrupts import setting
from ..model.own_loop import next_logits, padding_mask
from ..model.structure import is_stock
from ..model.trial import stock_cache
from ..model.values import SCALARS, package_of
from .look_ahead import LookAhead


class PromptKeys(NamedTuple):
    """A prompt's keys in the prefix cache. Placeholders are tokens that stand for other content."""

    token_keys: list[Hashable]  # one per token
    media_end: int  # tokens up to and including the last placeholder; 0 without placeholders
    media_start: int  # tokens of text after which the model's own forward can begin; 0: none


@dataclass(eq=False)
class MediaPrompts(Prompts):
    """`Prompts` of a model that runs packed."""

    # as in `checks.PromptsVerdict`, once the prompts are checked
    can_reuse: bool = True
    can_begin_after_text: bool = True

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
        """Returns the positions of a row's tokens `[first, end)`, by axis and token. After the
        prompt, they increase by one on each axis. They are floats if the model's positions are.
        Returns `None` if the row's positions are 0, 1, 2, ... on all axes."""
        axes = self.axes[row]
        if axes is None:
            return None
        length = len(axes[0])
        num_following = end - max(first, length)
        positions = []
        for axis in axes:
            start = axis[-1] + 1 + max(first - length, 0)
            later_positions = [start + offset for offset in range(num_following)]
            positions.append([*axis[first:end], *later_positions])
        return positions

    @property
    def names(self) -> tuple[str, ...]:
        """Sorted names of the inputs that have a value and are not in `COMMON_INPUTS`."""
        return uncommon_names(self.model_kwargs)

    @property
    def decode_inputs(self) -> dict[str, Any]:
        """The inputs in `names` that transformers also passes to decode steps, so the logits of
        these steps may depend on them."""
        inputs = {}
        for name in self.names:
            # transformers extends `mm_token_type_ids` by zeros
            if name not in compat.PREFILL_INPUTS and name != "mm_token_type_ids":
                inputs[name] = self.model_kwargs[name]
        return inputs

    def user_inputs(self, model: PreTrainedModel) -> set[str]:
        """Returns the names of the `decode_inputs` that are not parameters of a transformers
        `forward` in the model's class or its bases. Only user code knows what such an input does:
        some of its values may change all tokens of a prompt, and others none."""
        parameter_names = {"token_type_ids"}  # its non-zero types mark placeholders
        for cls in type(model).__mro__:
            forward = inspect.unwrap(vars(cls).get("forward", object))
            if package_of(getattr(forward, "__module__", "")) == "transformers":
                parameter_names |= inspect.signature(forward).parameters.keys()
        return self.decode_inputs.keys() - parameter_names

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

    def media_start(self, config: PreTrainedConfig) -> int:
        """Returns the number of tokens before the first placeholder; 0 if there are several rows or
        no placeholders, or if the placeholders are unknown."""
        mask = self.placeholder_mask(config) if len(self.paddings) == 1 else None
        if mask is None or not bool(mask.any()):
            return 0
        return int(mask[0].nonzero()[0, 0]) - self.paddings[0]

    def keys(self, config: PreTrainedConfig) -> Sequence[PromptKeys] | None:
        """Returns each row's prefix-cache keys; `Request.set_inputs` chooses their namespace. A
        placeholder's key includes the row's index and a hash of all media and placeholders of the
        call, so it equals only keys from a call with the same media and placeholders. Returns
        `None` if these prompts cannot use the prefix cache."""
        mask = self.placeholder_mask(config) if self.can_reuse else None
        if mask is None:
            return None
        token_types = self._token_types
        media = {name: self.model_kwargs[name] for name in self.names if name not in token_types}
        # over all rows, since models assign images and audio to the rows' placeholders in order
        values_by_token = (self.input_ids, *token_types.values())
        placeholders = [
            [values[row, is_placeholder].tolist() for values in values_by_token]
            for row, is_placeholder in enumerate(mask)
        ]
        try:
            digest = digest_of([media, placeholders])
        except TypeError:
            return None
        keys_by_row = list[PromptKeys]()
        media_start = self.media_start(config) if self.can_begin_after_text else 0
        for row, padding in enumerate(self.paddings):
            ids = self.input_ids[row, padding:].tolist()
            is_placeholder = mask[row, padding:].tolist()
            media_end = 0
            if any(is_placeholder):
                media_end = len(ids) - is_placeholder[::-1].index(True)
            axes = self.axes[row] or []
            columns = [type_ids[row, padding:].tolist() for type_ids in token_types.values()]
            columns += axes
            keys: list[Hashable] = list(ids)
            for i, (token, has_content) in enumerate(zip(ids, is_placeholder)):
                # without placeholders, media may affect any token of the row
                has_content |= bool(media) and media_end == 0
                if has_content or any(axis[i] != i for axis in axes):
                    source = (digest, row) if has_content else None
                    keys[i] = (token, tuple(column[i] for column in columns), source)
            keys_by_row.append(PromptKeys(keys, media_end, media_start))
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

    def similarity_key(self, config: PreTrainedConfig) -> Hashable | None:
        """Returns a key that prompts share if they differ only in text, length and the values of
        floating-point inputs (`merge_check` varies all three); `None` for prompts that must not be
        merged."""
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
                if type(value) not in SCALARS:
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
    def _kwargs_with_mask(self) -> dict[str, Any]:
        """The `model_kwargs`. If they have no attention mask, includes a mask `(rows, length)` of
        ones."""
        mask = self.model_kwargs.get("attention_mask")
        if mask is None:
            mask = self.input_ids.new_ones(len(self.paddings), self.length)
        return {**self.model_kwargs, "attention_mask": mask}

    def varied(self, token_id: int) -> MediaPrompts:
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
        return MediaPrompts(ids, model_kwargs, self.paddings)

    def merged(self, others: Sequence[MediaPrompts], pad_token_id: int) -> MediaPrompts:
        """Returns the rows of these prompts and of `others`, in order, as if one call had prepared
        them: padded on the left to the longest."""
        parts = (self, *others)
        width = max(part.length for part in parts)

        def pad_and_join(tensors: list[Tensor], pad_value: int = 0) -> Tensor:
            padded_tensors = [
                functional.pad(tensor, (width - tensor.shape[-1], 0), value=pad_value)
                for tensor in tensors
            ]
            return torch.cat(padded_tensors, dim=-2)

        inputs = [part._kwargs_with_mask for part in parts]
        merged_inputs = inputs[0]
        for name, value in merged_inputs.items():
            if isinstance(value, Tensor):
                values = [part[name] for part in inputs]
                join = pad_and_join if _is_per_token(name) else torch.cat
                merged_inputs[name] = join(values)
        ids = pad_and_join([part.input_ids for part in parts], pad_token_id)
        paddings = []
        for part in parts:
            shift = width - part.length
            paddings += [shift + padding for padding in part.paddings]
        return MediaPrompts(ids, merged_inputs, paddings)

    def forward(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        sequences: dict[int, request.Sequence],
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
        with setting(attention_observer, observer):
            logits, _ = next_logits(
                model, self.input_ids, inputs, is_first_step=True, num_cached=num_skipped
            )
        counts = [layer.num_positions for layer in cache.paged_layers if layer.num_positions]
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
        """Sets `position_ids` to those that the model's own `prepare_inputs_for_generation` returns
        or, if it returns none, to the column indices, which the model then uses as positions. Does
        nothing for a model that takes no `position_ids`, or that does not override this method."""
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
    parts = media.reshape(-1, media.shape[first:].numel())  # the parts of a vector are its elements
    return bool((parts == 0).all(-1).any())


def _is_per_token(name: str) -> bool:
    """Whether the input `name` has a value per token: `(..., rows, length)`."""
    return name in ("attention_mask", "position_ids") or name.endswith("token_type_ids")


def digest_of(value: Any) -> bytes:
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
            return "dict", [(describe(name), describe(part)) for name, part in value.items()]
        if isinstance(value, (list, tuple)):
            return "list", [describe(part) for part in value]
        if type(value) in SCALARS:
            return value
        raise TypeError(f"cannot hash a model input of type {type(value).__name__}")

    # hashed first, since it defines where each tensor's bytes end
    structure = marshal.dumps(describe(value), MARSHAL_VERSION)
    hasher = hashlib.blake2b(structure, digest_size=32)
    for tensor in tensors:
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        hasher.update(content.reshape(-1).view(torch.uint8).numpy())
    return hasher.digest()
