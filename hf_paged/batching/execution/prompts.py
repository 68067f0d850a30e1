"""The prompts of a call, with all inputs of the model's own forward beside token ids."""

from __future__ import annotations

import copy
import hashlib
import inspect
import marshal
import operator
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedConfig, PreTrainedModel

from ... import compat
from ...attention.masks import LooksAhead, attention_observer
from ...cache.block_manager import UNCACHED, SequenceBlocks
from ...cache.block_pool import BlockTable
from ...cache.layers import PagedLayer
from ...cache.paged_cache import PagedCache
from ...cache.prefix_index import MARSHAL_VERSION
from ...model.capability import is_stock, stock_cache
from ...model.own_loop import map_tensors, next_logits, tensors_of
from ..request import Request

# Inputs without prompt content, or with one value per token.
_COMMON = {*compat.CACHE_NAMES, "use_cache", "logits_to_keep", "tokenizer", "attention_mask", "position_ids"}
# Parts of the config names of placeholder tokens, which stand for images or other media, or mark them.
_MEDIA = ("image", "video", "audio", "vision", "visual", "speech", "sound", "media", "patch", "frame")


Keys = tuple[list[Hashable], int]
"""A prompt's keys in the prefix cache, by token; the number of tokens up to the last placeholder for other content."""


class PromptsError(Exception):
    """A forward of prompts failed; the step's other work is not affected."""

    def __init__(self, prompts: Prompts, cause: Exception) -> None:
        super().__init__(str(cause))
        self.prompts, self.cause = prompts, cause


class Joins(NamedTuple):
    """Rows of prompts with equal `Joins` may continue in one rectangle."""

    equal_lengths: bool  # whether only rows of equal length may
    shapes: Hashable  # of the inputs, without the dimensions that can be padded


@dataclass(eq=False)
class Prompts:
    """The prompts of a call as `generate` prepared them for the first forward, each once: the arguments of the model's
    `prepare_inputs_for_generation`. That forward runs over all rows at once, since images and sound cannot be assigned
    to rows."""

    input_ids: Tensor
    """`(rows, length)` as transformers' loops get them, one row per prompt; the decoder's if the model has an encoder;
    `(rows, 0)` if there are only `inputs_embeds`."""
    model_kwargs: dict[str, Any]  # without a cache
    paddings: list[int]  # leading columns of each row that are padding
    joins: Joins | None = None  # in rectangles; `None`: they join no others
    merges: Hashable | None = None  # prompts with equal values share one forward; `None`: they share none
    position_ids: Tensor | None = None  # of the first forward, `(rows or 1, length)` or with axes in front
    _axes: list[list[list[int]] | None] | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """Columns of the first forward, padding included."""
        embeds = self.model_kwargs.get("inputs_embeds")
        if self.num_encoder_tokens:  # the embeddings were the encoder's
            embeds = None
        return int((self.input_ids if embeds is None else embeds).shape[1])

    @property
    def num_encoder_tokens(self) -> int:
        """Encoder tokens of each row, padding included; the decoder attends to their keys and values."""
        outputs = self.model_kwargs.get("encoder_outputs")
        return 0 if outputs is None else int(outputs[0].shape[1])

    def set_joins(self, verdict: tuple[bool, bool] | None) -> None:
        """Sets `joins` and `merges`. `verdict`: whether joined rows must have equal lengths, and equal encoder lengths;
        `None`: they cannot join."""
        shapes: list[Hashable] = []
        flags: list[Any] = []
        has_media = False
        for name, value in sorted(self.model_kwargs.items(), key=operator.itemgetter(0)):
            tensors = list(tensors_of(value))
            has_media |= bool(tensors) and name in compat.PREFILL_INPUTS
            flags += [] if tensors else [(name, value)]
            for x in () if name in compat.PREFILL_INPUTS else tensors:
                if not x.dim() or len(x) != len(self.paddings):
                    return
                is_padded = x.dim() > 1 and x.shape[1] == self.num_encoder_tokens
                shapes.append((name, str(x.dtype), *(x.shape[2:] if is_padded else x.shape[1:])))
        if verdict is not None:
            equal_lengths, equal_widths = verdict
            self.joins = Joins(equal_lengths, (*shapes, equal_widths and self.num_encoder_tokens))
            if not has_media and not any(self.paddings) and all(_is_flag(value) for _, value in flags):
                self.merges = (self.joins, self.length, *flags)

    def likeness(self, config: PreTrainedConfig) -> Hashable | None:
        """A key: prompts with equal keys differ only in text, length and floats, which `merge_check` varies. `None` for
        prompts that must not be merged."""
        content = self.content(config)
        if content is None:
            return None
        # the placeholder tokens of each row: too many in one prompt must not make up for too few in another
        kind: list[Hashable] = [
            tuple(sorted(ids[is_content].tolist())) for ids, is_content in zip(self.input_ids, content)
        ]
        for name, value in sorted({**self.model_kwargs, "attention_mask": self._mask}.items()):
            if not isinstance(value, Tensor):
                if not _is_flag(value):
                    return None
                kind.append((name, value))
            elif _is_per_token(name):
                if value.dim() < 2 or value.shape[-2:] != (len(self.paddings), self.length):
                    return None
                kind.append((name, value.dtype, value.dim()))
            else:
                # some models mix rows up where parts of an image are masked, and drop images that are zero
                is_partial = "mask" in name and not bool(value.all())
                if not value.dim() or is_partial or _has_zero_parts(value):
                    return None
                numbers = None if value.is_floating_point() else tuple(value.flatten().tolist())
                kind.append((name, value.dtype, value.shape, numbers))
        return tuple(kind)

    @property
    def hides_tokens(self) -> bool:
        """Whether the attention mask hides more than padding."""
        mask = self._mask
        if not isinstance(mask, Tensor) or mask.shape != (len(self.paddings), self.length):
            return False
        return mask.bool().sum(-1).tolist() != [self.length - padding for padding in self.paddings]

    @property
    def _mask(self) -> Tensor:
        """The attention mask `(rows, length)` int64, all ones if none was given."""
        given: Tensor | None = self.model_kwargs.get("attention_mask")
        return self.input_ids.new_ones(len(self.paddings), self.length) if given is None else given

    def longer(self, token_id: int) -> Prompts:
        """The prompts with one more token each and other images, for a check that merges them with these."""
        given = {
            name: -x if isinstance(x, Tensor) and x.is_floating_point() else x for name, x in self.model_kwargs.items()
        }
        for name in filter(_is_per_token, given):
            if isinstance(x := given[name], Tensor):
                last = x[..., -1:]
                more = last + 1 if name.endswith("position_ids") else last if name == "attention_mask" else last * 0
                given[name] = torch.cat([x, more], dim=-1)
        ids = torch.cat([self.input_ids, torch.full_like(self.input_ids[:, :1], token_id)], dim=1)
        return Prompts(ids, given, self.paddings, position_ids=given.get("position_ids"))

    def merged(self, others: Sequence[Prompts], pad_token_id: int) -> Prompts:
        """Merges prompts of equal `merges` as if from one call: all rows in order, padded on the left."""
        parts = (self, *others)
        width = max(part.length for part in parts)

        def join(name: str, values: list[Tensor], padding: int = 0) -> Tensor:
            is_wide = name == "input_ids" or _is_per_token(name)
            if is_wide:
                values = [functional.pad(x, (width - x.shape[-1], 0), value=padding) for x in values]
            return torch.cat(values, dim=-2 if is_wide else 0)

        given = {
            name: join(name, [part.model_kwargs[name] for part in parts]) if isinstance(value, Tensor) else value
            for name, value in self.model_kwargs.items()
            if name != "attention_mask"
        }
        given["attention_mask"] = join("attention_mask", [part._mask for part in parts])
        ids = join("input_ids", [part.input_ids for part in parts], pad_token_id)
        paddings = [width - part.length + padding for part in parts for padding in part.paddings]
        return Prompts(ids, given, paddings, position_ids=given.get("position_ids"))

    def forward(
        self, model: PreTrainedModel, cache: PagedCache, rows: dict[int, SequenceBlocks]
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the model's own forward over all rows, and stores K/V of the given `rows` in their tables, which have
        room and which the empty `cache` borrows. Returns logits `(all rows, vocab_size)`, and which positions
        `(all rows, length)` saw later ones, or lie between; `None` if that is unknown. Raises [`PromptsError`]."""
        nothing, looks = no_blocks(cache), LooksAhead(self.paddings, self.length)
        paddings = (padding if row in rows else self.length for row, padding in enumerate(self.paddings))
        cache.take([rows.get(row, nothing) for row in range(len(self.paddings))], tuple(paddings), 0)
        token = attention_observer.set(looks)
        try:
            inputs = {**self.model_kwargs, compat.cache_name(model): cache}
            logits, _ = next_logits(model, self.input_ids, inputs, begins=True)
        except Exception as error:
            raise PromptsError(self, error) from error
        finally:
            attention_observer.reset(token)
        layers = [layer for layer in cache.layers if isinstance(layer, PagedLayer) and layer.num_seen]
        if any(layer.num_seen != self.length for layer in layers):
            cause = ValueError(f"the model made {layers[0].num_seen} keys and values of {self.length} tokens")
            raise PromptsError(self, cause)
        return logits, looks.positions() if looks.num_calls >= len(layers) else None

    def give(self, request: Request, row: int, keys: list[Keys] | None) -> None:
        """Makes a row the prompt of a request; without `keys` the prefix cache is not used for it."""
        request.inputs, request.num_encoder_tokens = (self, row), self.num_encoder_tokens
        if keys is None or request.namespace is UNCACHED:
            request.namespace = UNCACHED
        else:
            request.keys, request.num_content = keys[row]
            request.namespace = request.namespace, self.names

    def find_positions(self, model: Any) -> None:
        """Sets `position_ids` by the model's own preparation; if that gives none, the model counts columns."""
        takes_positions = "position_ids" in inspect.signature(model.forward).parameters
        if takes_positions and not is_stock(model, "prepare_inputs_for_generation"):
            inputs = {**self.model_kwargs, compat.cache_name(model): stock_cache(model)}
            first = {"next_sequence_length": self.length, "is_first_iteration": True}
            found = model.prepare_inputs_for_generation(self.input_ids, **first, **inputs).get("position_ids")
            self.position_ids = (
                torch.arange(self.length, device=self.input_ids.device)[None] if found is None else found
            )

    @property
    def axes(self) -> list[list[list[int]] | None]:
        """Each row's positions on each axis; `None` for a row whose positions just count tokens."""
        if self._axes is None:
            self._axes = self._find_axes()
        return self._axes

    def _find_axes(self) -> list[list[list[int]] | None]:
        ids = self.position_ids
        if ids is None:
            return [None] * len(self.input_ids)
        ids = ids if ids.dim() == 3 else ids[None]
        ids = ids.expand(len(ids), len(self.input_ids), self.length)
        counted = torch.arange(self.length, device=ids.device)
        rows = [(ids[:, row, padding:], counted[: self.length - padding]) for row, padding in enumerate(self.paddings)]
        return [None if bool((own == count).all()) else own.tolist() for own, count in rows]

    def num_axes(self, row: int) -> int:
        """Number of position axes of a row; 0 if positions just count tokens."""
        return len(self.axes[row] or ())

    def shift(self, row: int, counts_padding: bool = False) -> int:
        """How many more positions a row's prompt takes than it has tokens; `counts_padding`: its padding takes some
        where the model itself counts columns."""
        axes = self.axes[row]
        if axes is not None:
            return max(max(axis) + 1 - len(axis) for axis in axes)
        return self.paddings[row] if counts_padding and self.position_ids is None else 0

    @property
    def axis_counts(self) -> tuple[int, ...]:
        """The distinct numbers of axes of the rows, sorted."""
        return tuple(sorted({self.num_axes(row) for row in range(len(self.paddings))}))

    def positions(self, row: int, first: int, end: int) -> list[list[int]] | None:
        """Positions of a row's tokens `[first, end)` on each axis, which count on after the prompt; `None` if they just
        count tokens."""
        axes = self.axes[row]
        if axes is None:
            return None
        behind = range(max(first, len(axes[0])) - len(axes[0]) + 1, end - len(axes[0]) + 1)
        return [axis[first:end] + [axis[-1] + count for count in behind] for axis in axes]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs beyond the common ones."""
        given = ((name, value) for name, value in self.model_kwargs.items() if name not in _COMMON)
        return tuple(sorted(name for name, value in given if not is_unset(value)))

    @property
    def _types(self) -> list[Tensor]:
        """Token type inputs, `(rows, length)` each."""
        given = (self.model_kwargs[name] for name in self.names if name.endswith("token_type_ids"))
        return [x for x in given if isinstance(x, Tensor) and x.shape == self.input_ids.shape]

    def content(self, config: PreTrainedConfig) -> Tensor | None:
        """Which tokens `(rows, length)` are placeholders for other content, such as images; `None` if unknown."""
        ids = self.input_ids
        if ids.shape[1] != self.length or self.model_kwargs.get("inputs_embeds") is not None:
            return None
        found = torch.zeros_like(ids, dtype=torch.bool)
        types = self._types
        for each in types:
            found |= each.to(ids.device) != 0
        attributes = {**vars(config.get_text_config(decoder=True)), **vars(config)}
        for name, value in attributes.items():
            is_token = name.endswith(("token_id", "token_index")) and isinstance(value, int)
            if is_token and any(word in name for word in _MEDIA):
                found |= ids == value
        found &= torch.arange(self.length, device=ids.device) >= torch.tensor(self.paddings, device=ids.device)[:, None]
        is_told = bool(found.any()) or len(types) == len(self.names)
        return found if is_told else None

    def keys(self, config: PreTrainedConfig) -> list[Keys] | None:
        """Each row's prefix-cache keys, in the namespace of `names`; a placeholder's key includes a hash of all inputs.
        `None` if the prefix cache cannot be used for these prompts."""
        content = self.content(config)
        if content is None:
            return None
        types, others = self._types, {name: self.model_kwargs[name] for name in self.names}
        others = {name: x for name, x in others.items() if all(x is not each for each in types)}
        # models assign images and sound to placeholder tokens in order, over all rows
        kinds = (self.input_ids, *types)
        placed = [[kind[row, stands].tolist() for kind in kinds] for row, stands in enumerate(content)]
        try:
            digest = _digest([others, placed])
        except TypeError:
            return None
        rows = []
        for row, padding in enumerate(self.paddings):
            ids, stands = self.input_ids[row, padding:].tolist(), content[row, padding:].tolist()
            num_content = len(ids) - stands[::-1].index(True) if any(stands) else 0
            axes = self.axes[row] or []
            columns = [*(each[row, padding:].tolist() for each in types), *axes]
            keys: list[Hashable] = list(ids)
            for i, (token, is_content) in enumerate(zip(ids, stands)):
                # unknown how the inputs affect a row without placeholders
                is_content |= bool(others) and num_content == 0
                if is_content or any(axis[i] != i for axis in axes):
                    keys[i] = token, tuple(column[i] for column in columns), (digest, row) if is_content else None
            rows.append((keys, num_content))
        return rows

    def keys_behind(self, row: int, token_ids: list[int]) -> list[Hashable]:
        """Prefix-cache keys of tokens that follow a row's prompt: as if they were more of its text."""
        axes = self.axes[row]
        if axes is None:
            return list(token_ids)
        first, types = len(axes[0]), (0,) * len(self._types)
        columns = zip(*(self.positions(row, first, first + len(token_ids)) or ()))
        return [
            (token, (*types, *places), None) if any(place != i for place in places) else token
            for i, (token, places) in enumerate(zip(token_ids, columns), first)
        ]


def _has_zero_parts(media: Tensor) -> bool:
    """Whether an image or patch (counted by the first axes) is all zeros."""
    sizes = 1 if media.dim() == 1 else media.shape[max(1, media.dim() - 3) :].numel()
    return media.is_floating_point() and bool((media.reshape(-1, sizes) == 0).all(-1).any())


def _is_flag(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_per_token(name: str) -> bool:
    """Whether an input is `(rows, length)`, perhaps with leading axes."""
    return name in ("attention_mask", "position_ids") or name.endswith("token_type_ids")


def no_blocks(cache: PagedCache) -> SequenceBlocks:
    """Empty tables, for a row that is not stored."""
    groups = (group.blocks for group in cache.groups.values())
    return SequenceBlocks(tuple(BlockTable(group.pool, group.block_size) for group in groups))


def prompts_of(unexpanded: tuple[Tensor, dict[str, Any]], model_kwargs: dict[str, Any], is_decoder: bool) -> Prompts:
    """Makes `Prompts` from `generate`'s inputs before it repeated rows, and its `model_kwargs` for the loop.
    `is_decoder`: for a model with an encoder. Only leading zeros of an attention mask count as padding."""
    ids, given = unexpanded
    given = {name: value for name, value in {**model_kwargs, **given}.items() if name not in compat.CACHE_NAMES}
    given = {name: map_tensors(_without_graph, value) for name, value in given.items()}
    mask = given.get("decoder_attention_mask" if is_decoder else "attention_mask")
    prompts = Prompts(ids, given, [0] * len(ids), position_ids=given.get("position_ids"))
    if isinstance(mask, Tensor) and mask.shape == (len(ids), prompts.length):
        paddings = (mask.cumsum(-1) == 0).sum(-1)
        prompts.paddings = torch.where(paddings == prompts.length, 0, paddings).tolist()
    return prompts


def _without_graph(x: Tensor) -> Tensor:
    """The tensor without its autograd graph, so that it can be copied and keeps nothing else alive."""
    return x.detach() if x.requires_grad else x


def unshared(value: Any) -> Any:
    """Copies nested dicts, not their tensors: `generate` repeats the rows of their entries in place."""
    if not isinstance(value, dict):
        return value
    twin = copy.copy(value)
    for name, part in value.items():
        if isinstance(part, dict):
            twin[name] = unshared(part)
    return twin


def is_unset(value: Any) -> bool:
    return value is None or value is False or (isinstance(value, (dict, list, tuple)) and not value)


def _digest(value: Any) -> bytes:
    """Hashes all tensors and plain values in nested containers, so that no two inputs with equal digests can be
    constructed: a user could otherwise be served another's content. Raises `TypeError` for other objects."""
    tensors: list[Tensor] = []

    def described(value: Any) -> Any:
        if isinstance(value, Tensor):
            if value.layout is not torch.strided or value.is_quantized:
                raise TypeError(f"a tensor of layout {value.layout} and {value.dtype} among the inputs of a model")
            tensors.append(value)
            return "tensor", str(value.dtype), tuple(value.shape)
        if isinstance(value, dict):
            return "dict", [(described(name), described(part)) for name, part in value.items()]
        if isinstance(value, (list, tuple)):
            return "list", [described(part) for part in value]
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"a {type(value).__name__} among the inputs of a model")

    # the form says where each tensor's bytes end, and so precedes them
    digest = hashlib.blake2b(marshal.dumps(described(value), MARSHAL_VERSION), digest_size=32)
    for tensor in tensors:
        content = tensor.detach().resolve_conj().resolve_neg().contiguous().cpu()
        digest.update(content.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()
