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
from ...interrupts import is_interrupt
from ...model.own_loop import map_tensors, next_logits, tensors_of
from ...model.structure import is_stock
from ...model.trial import stock_cache
from ..request import Request

# Inputs without prompt content, or with one value per token.
_COMMON = {
    *compat.CACHE_NAMES,
    "use_cache",
    "logits_to_keep",
    "tokenizer",
    "attention_mask",
    "position_ids",
}
# Parts of the config names of placeholder tokens, which stand for images or other media, or mark
# them.
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
    placeholder for other content, and of those before the first."""

    tokens: list[Hashable]
    num_content: int
    num_text: int


class PromptsError(Exception):
    """A forward of prompts failed; the step's other work is not affected."""

    def __init__(self, prompts: Prompts, cause: Exception) -> None:
        super().__init__(str(cause))
        self.prompts = prompts
        self.cause = cause


class Joins(NamedTuple):
    """Rows of prompts with equal `Joins` may continue in one rectangle."""

    equal_lengths: bool  # whether only rows of equal length may
    shapes: Hashable  # of the inputs, without the dimensions that can be padded


@dataclass(eq=False)
class Prompts:
    """The prompts of a call as `generate` prepared them for the first forward, each once: the
    arguments of the model's `prepare_inputs_for_generation`. That forward runs over all rows at
    once, since images and sound cannot be assigned to rows."""

    input_ids: Tensor
    """`(rows, length)` as transformers' loops get them, one row per prompt; the decoder's if the
    model has an encoder; `(rows, 0)` if there are only `inputs_embeds`."""
    model_kwargs: dict[str, Any]  # without a cache
    paddings: list[int]  # leading columns of each row that are padding
    joins: Joins | None = None  # in rectangles; `None`: they join no others
    # prompts with equal values share one forward; `None`: they share none
    merges: Hashable | None = None
    # of the first forward, `(rows or 1, length)` or with axes in front
    position_ids: Tensor | None = None
    _axes: list[list[list[int]] | None] | None = field(default=None, init=False)

    @property
    def length(self) -> int:
        """Columns of the first forward, padding included."""
        embeds = self.model_kwargs.get("inputs_embeds")
        # with an encoder, the embeddings were the encoder's
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

    def set_joins(self, verdict: tuple[bool, bool] | None) -> None:
        """Sets `joins` and `merges`. `verdict`: whether joined rows must have equal lengths, and
        equal encoder lengths; `None`: they cannot join."""
        shapes: list[Hashable] = []
        flags: list[Any] = []
        has_media = False
        by_name = sorted(self.model_kwargs.items(), key=operator.itemgetter(0))
        for name, value in by_name:
            tensors = list(tensors_of(value))
            is_media = name in compat.PREFILL_INPUTS
            if not tensors:
                flags.append((name, value))
            elif is_media:
                has_media = True
            if is_media:
                continue
            for x in tensors:
                if not x.dim():
                    return
                if len(x) != len(self.paddings):
                    return
                is_padded = x.dim() > 1 and x.shape[1] == self.num_encoder_tokens
                first_fixed = 2 if is_padded else 1
                shape = x.shape[first_fixed:]
                shapes.append((name, str(x.dtype), *shape))
        if verdict is not None:
            equal_lengths, equal_widths = verdict
            encoder_width = equal_widths and self.num_encoder_tokens
            self.joins = Joins(equal_lengths, (*shapes, encoder_width))
            if has_media or any(self.paddings):
                return
            if all(_is_flag(value) for _, value in flags):
                self.merges = (self.joins, self.length, *flags)

    def likeness(self, config: PreTrainedConfig) -> Hashable | None:
        """A key: prompts with equal keys differ only in text, length and floats, which
        `merge_check` varies. `None` for prompts that must not be merged."""
        content = self.content(config)
        if content is None:
            return None
        # the placeholder tokens of each row: too many in one prompt must not make up for too few in
        # another
        kind: list[Hashable] = []
        for ids, is_content in zip(self.input_ids, content):
            placeholders = ids[is_content].tolist()
            kind.append(tuple(sorted(placeholders)))
        given = {**self.model_kwargs, "attention_mask": self._mask}
        for name, value in sorted(given.items()):
            if not isinstance(value, Tensor):
                if not _is_flag(value):
                    return None
                kind.append((name, value))
            elif _is_per_token(name):
                if value.dim() < 2:
                    return None
                if value.shape[-2:] != (len(self.paddings), self.length):
                    return None
                kind.append((name, value.dtype, value.dim()))
            else:
                # some models mix rows up where parts of an image are masked, and drop images that
                # are zero
                is_partial = "mask" in name and not bool(value.all())
                if not value.dim() or is_partial or _has_zero_parts(value):
                    return None
                numbers = None
                if not value.is_floating_point():
                    numbers = tuple(value.flatten().tolist())
                kind.append((name, value.dtype, value.shape, numbers))
        return tuple(kind)

    @property
    def hides_tokens(self) -> bool:
        """Whether the attention mask hides more than padding."""
        mask = self._mask
        if not isinstance(mask, Tensor):
            return False
        if mask.shape != (len(self.paddings), self.length):
            return False
        num_shown = mask.bool().sum(-1)
        lengths = [self.length - padding for padding in self.paddings]
        return num_shown.tolist() != lengths

    @property
    def _mask(self) -> Tensor:
        """The attention mask `(rows, length)` int64, all ones if none was given."""
        given: Tensor | None = self.model_kwargs.get("attention_mask")
        if given is not None:
            return given
        return self.input_ids.new_ones(len(self.paddings), self.length)

    def longer(self, token_id: int) -> Prompts:
        """The prompts with one more token each and other images, for a check that merges them with
        these."""
        given = dict(self.model_kwargs)
        for name, value in given.items():
            if isinstance(value, Tensor) and value.is_floating_point():
                given[name] = -value
        for name in filter(_is_per_token, given):
            value = given[name]
            if not isinstance(value, Tensor):
                continue
            last = value[..., -1:]
            if name.endswith("position_ids"):
                more = last + 1
            elif name == "attention_mask":
                more = last
            else:
                more = last * 0
            longer = torch.cat([value, more], dim=-1)
            given[name] = longer
        column = torch.full_like(self.input_ids[:, :1], token_id)
        ids = torch.cat([self.input_ids, column], dim=1)
        position_ids = given.get("position_ids")
        return Prompts(
            ids,
            given,
            self.paddings,
            position_ids=position_ids,
        )

    def merged(self, others: Sequence[Prompts], pad_token_id: int) -> Prompts:
        """Merges prompts of equal `merges` as if from one call: all rows in order, padded on the
        left."""
        parts = (self, *others)
        width = max(part.length for part in parts)

        def join(name: str, values: list[Tensor], padding: int = 0) -> Tensor:
            is_wide = name == "input_ids" or _is_per_token(name)
            if is_wide:
                padded = []
                for value in values:
                    missing = width - value.shape[-1]
                    wide = functional.pad(value, (missing, 0), value=padding)
                    padded.append(wide)
                return torch.cat(padded, dim=-2)
            return torch.cat(values, dim=0)

        given = {}
        for name, value in self.model_kwargs.items():
            if name == "attention_mask":
                continue
            if isinstance(value, Tensor):
                values = [part.model_kwargs[name] for part in parts]
                value = join(name, values)
            given[name] = value
        masks = [part._mask for part in parts]
        given["attention_mask"] = join("attention_mask", masks)
        all_ids = [part.input_ids for part in parts]
        ids = join("input_ids", all_ids, pad_token_id)
        paddings = []
        for part in parts:
            shift = width - part.length
            paddings += [shift + padding for padding in part.paddings]
        position_ids = given.get("position_ids")
        return Prompts(
            ids,
            given,
            paddings,
            position_ids=position_ids,
        )

    def forward(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        rows: dict[int, SequenceBlocks],
        num_cached: int = 0,
    ) -> tuple[Tensor, Tensor | None]:
        """Runs the model's own forward over all rows, and stores K/V of the given `rows` in their
        tables, which have room and which the empty `cache` borrows. A single row may hold
        `num_cached` tokens already. Returns logits `(all rows, vocab_size)`, and which positions
        `(all rows, length)` saw later ones, or lie between; `None` if that is unknown. Raises
        [`PromptsError`]."""
        first = 0
        if num_cached:
            first = self.paddings[0] + num_cached
        nothing = no_blocks(cache)
        looks = LooksAhead(self.paddings, self.length, first)
        blocks = []
        paddings = []
        for row, padding in enumerate(self.paddings):
            blocks.append(rows.get(row, nothing))
            paddings.append(padding if row in rows else self.length)
        cache.take(blocks, tuple(paddings), first)
        token = attention_observer.set(looks)
        try:
            cache_name = compat.cache_name(model)
            inputs = {**self.model_kwargs, cache_name: cache}
            logits, _ = next_logits(
                model,
                self.input_ids,
                inputs,
                begins=True,
                num_cached=first,
            )
        except Exception as error:
            if is_interrupt(error):
                raise
            raise PromptsError(self, error) from error
        finally:
            attention_observer.reset(token)
        layers = []
        for layer in cache.layers:
            if isinstance(layer, PagedLayer) and layer.num_seen:
                layers.append(layer)
        if any(layer.num_seen != self.length for layer in layers):
            cause = ValueError(
                f"the model made {layers[0].num_seen} keys and values of {self.length} tokens"
            )
            raise PromptsError(self, cause)
        if looks.num_calls < len(layers):
            return logits, None
        return logits, looks.positions()

    def give(
        self,
        request: Request,
        row: int,
        keys: list[Keys] | None,
        begins_behind_text: bool = False,
    ) -> None:
        """Makes a row the prompt of a request; without `keys` the prefix cache is not used for it.
        `begins_behind_text`: the text before the first placeholder is shared with other prompts,
        with or without other content."""
        request.inputs, request.num_encoder_tokens = (self, row), self.num_encoder_tokens
        if keys is None or request.namespace is UNCACHED:
            request.namespace = UNCACHED
        else:
            request.keys, request.num_content, num_text = keys[row]
            request.num_text = num_text if begins_behind_text else 0
            if not request.num_text:
                request.namespace = (request.namespace, self.names)

    def find_positions(self, model: Any) -> None:
        """Sets `position_ids` by the model's own preparation; if that gives none, the model counts
        columns."""
        parameters = inspect.signature(model.forward).parameters
        if "position_ids" not in parameters:
            return
        if is_stock(model, "prepare_inputs_for_generation"):
            return
        cache_name = compat.cache_name(model)
        inputs = {**self.model_kwargs, cache_name: stock_cache(model)}
        prepared = model.prepare_inputs_for_generation(
            self.input_ids,
            next_sequence_length=self.length,
            is_first_iteration=True,
            **inputs,
        )
        position_ids = prepared.get("position_ids")
        if position_ids is None:
            columns = torch.arange(self.length, device=self.input_ids.device)
            position_ids = columns[None]
        self.position_ids = position_ids

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
        if ids.dim() != 3:
            ids = ids[None]
        num_axes = len(ids)
        ids = ids.expand(num_axes, len(self.input_ids), self.length)
        counted = torch.arange(self.length, device=ids.device)
        rows: list[list[list[int]] | None] = []
        for row, padding in enumerate(self.paddings):
            axes = ids[:, row, padding:]
            is_counted = axes == counted[: self.length - padding]
            if bool(is_counted.all()):
                rows.append(None)
            else:
                rows.append(axes.tolist())
        return rows

    def num_axes(self, row: int) -> int:
        """Number of position axes of a row; 0 if positions just count tokens."""
        return len(self.axes[row] or ())

    def shift(self, row: int, counts_padding: bool = False) -> int:
        """How many more positions a row's prompt takes than it has tokens; `counts_padding`: its
        padding takes some where the model itself counts columns."""
        axes = self.axes[row]
        if axes is not None:
            shifts = (max(axis) + 1 - len(axis) for axis in axes)
            return max(shifts)
        if counts_padding and self.position_ids is None:
            return self.paddings[row]
        return 0

    @property
    def axis_counts(self) -> tuple[int, ...]:
        """The distinct numbers of axes of the rows, sorted."""
        rows = range(len(self.paddings))
        counts = {self.num_axes(row) for row in rows}
        return tuple(sorted(counts))

    def positions(
        self,
        row: int,
        first: int,
        end: int,
    ) -> list[list[int]] | None:
        """Positions of a row's tokens `[first, end)` on each axis, which count on after the prompt;
        `None` if they just count tokens."""
        axes = self.axes[row]
        if axes is None:
            return None
        length = len(axes[0])
        first_behind = max(first, length)
        behind = range(first_behind - length + 1, end - length + 1)
        positions = []
        for axis in axes:
            last = axis[-1]
            counted = [last + count for count in behind]
            positions.append(axis[first:end] + counted)
        return positions

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the inputs beyond the common ones."""
        names = []
        for name, value in self.model_kwargs.items():
            if name not in _COMMON and not is_unset(value):
                names.append(name)
        return tuple(sorted(names))

    @property
    def _types(self) -> list[Tensor]:
        """Token type inputs, `(rows, length)` each."""
        types = []
        for name in self.names:
            value = self.model_kwargs[name]
            if not name.endswith("token_type_ids") or not isinstance(value, Tensor):
                continue
            if value.shape == self.input_ids.shape:
                types.append(value)
        return types

    def content(self, config: PreTrainedConfig) -> Tensor | None:
        """Which tokens `(rows, length)` are placeholders for other content, such as images; `None`
        if unknown."""
        ids = self.input_ids
        if ids.shape[1] != self.length:
            return None
        if self.model_kwargs.get("inputs_embeds") is not None:
            return None
        found = torch.zeros_like(ids, dtype=torch.bool)
        types = self._types
        for token_types in types:
            found |= token_types.to(ids.device) != 0
        text_config = config.get_text_config(decoder=True)
        attributes = {**vars(text_config), **vars(config)}
        for name, value in attributes.items():
            if not name.endswith(("token_id", "token_index")):
                continue
            if not isinstance(value, int):
                continue
            if any(word in name for word in _MEDIA):
                found |= ids == value
        columns = torch.arange(self.length, device=ids.device)
        first_columns = torch.tensor(self.paddings, device=ids.device)[:, None]
        found &= columns >= first_columns
        if bool(found.any()):
            return found
        is_told = len(types) == len(self.names)
        return found if is_told else None

    def num_text(self, config: PreTrainedConfig) -> int:
        """Number of tokens before the first placeholder of a single row; 0 for several rows, or if
        it is unknown."""
        content = None
        if len(self.paddings) == 1:
            content = self.content(config)
        if content is None:
            return 0
        placeholders = content[0].nonzero()
        places = placeholders[:1, 0].tolist()
        if not places:
            return 0
        return places[0] - self.paddings[0]

    def keys(self, config: PreTrainedConfig) -> list[Keys] | None:
        """Each row's prefix-cache keys, in the namespace of `names`; a placeholder's key includes a
        hash of all inputs. `None` if the prefix cache cannot be used for these prompts."""
        content = self.content(config)
        if content is None:
            return None
        types = self._types
        others = {}
        for name in self.names:
            value = self.model_kwargs[name]
            if all(value is not token_types for token_types in types):
                others[name] = value
        # models assign images and sound to placeholder tokens in order, over all rows
        kinds = (self.input_ids, *types)
        placed = []
        for row, stands in enumerate(content):
            row_content = [kind[row, stands].tolist() for kind in kinds]
            placed.append(row_content)
        try:
            digest = _digest([others, placed])
        except TypeError:
            return None
        rows = list[Keys]()
        num_text = self.num_text(config)
        for row, padding in enumerate(self.paddings):
            ids = self.input_ids[row, padding:].tolist()
            stands = content[row, padding:].tolist()
            num_content = 0
            if any(stands):
                num_behind = stands[::-1].index(True)
                num_content = len(ids) - num_behind
            axes = self.axes[row] or []
            columns: list[list[int]] = []
            for token_types in types:
                columns.append(token_types[row, padding:].tolist())
            columns += axes
            keys: list[Hashable] = list(ids)
            tokens = zip(ids, stands)
            for i, (token, is_content) in enumerate(tokens):
                # unknown how the inputs affect a row without placeholders
                is_content |= bool(others) and num_content == 0
                if is_content or any(axis[i] != i for axis in axes):
                    values = tuple(column[i] for column in columns)
                    source = (digest, row) if is_content else None
                    keys[i] = (token, values, source)
            rows.append(Keys(keys, num_content, num_text))
        return rows

    def keys_behind(self, row: int, token_ids: list[int]) -> list[Hashable]:
        """Prefix-cache keys of tokens that follow a row's prompt: as if they were more of its
        text."""
        axes = self.axes[row]
        if axes is None:
            return list(token_ids)
        first = len(axes[0])
        end = first + len(token_ids)
        types = (0,) * len(self._types)
        positions_behind = self.positions(row, first, end) or ()
        columns = zip(*positions_behind)
        tokens = zip(token_ids, columns)
        keys: list[Hashable] = []
        for i, (token, positions) in enumerate(tokens, first):
            if any(position != i for position in positions):
                values = (*types, *positions)
                keys.append((token, values, None))
            else:
                keys.append(token)
        return keys


def _has_zero_parts(media: Tensor) -> bool:
    """Whether an image or patch (counted by the first axes) is all zeros."""
    sizes = 1
    if media.dim() > 1:
        first = max(1, media.dim() - 3)
        sizes = media.shape[first:].numel()
    if not media.is_floating_point():
        return False
    parts = media.reshape(-1, sizes)
    is_zero = (parts == 0).all(-1)
    return bool(is_zero.any())


def _is_flag(value: Any) -> bool:
    return value is None or type(value) in (bool, int, float, str)


def _is_per_token(name: str) -> bool:
    """Whether an input is `(rows, length)`, perhaps with leading axes."""
    if name in ("attention_mask", "position_ids"):
        return True
    return name.endswith("token_type_ids")


def no_blocks(cache: PagedCache) -> SequenceBlocks:
    """Empty tables, for a row that is not stored."""
    tables = []
    for group in cache.groups.values():
        blocks = group.blocks
        tables.append(BlockTable(blocks.pool, blocks.block_size))
    return SequenceBlocks(tuple(tables))


def prompts_of(
    unexpanded: tuple[Tensor, dict[str, Any]],
    model_kwargs: dict[str, Any],
    is_decoder: bool,
) -> Prompts:
    """Makes `Prompts` from `generate`'s inputs before it repeated rows, and its `model_kwargs` for
    the loop. `is_decoder`: for a model with an encoder. Only leading zeros of an attention mask
    count as padding."""
    ids, given = unexpanded
    merged = {**model_kwargs, **given}
    given = {}
    for name, value in merged.items():
        if name not in compat.CACHE_NAMES:
            given[name] = map_tensors(_without_graph, value)
    mask = given.get("decoder_attention_mask" if is_decoder else "attention_mask")
    prompts = Prompts(
        ids,
        given,
        [0] * len(ids),
        position_ids=given.get("position_ids"),
    )
    if not isinstance(mask, Tensor):
        return prompts
    if mask.shape == (len(ids), prompts.length):
        is_leading = mask.cumsum(-1) == 0
        paddings = is_leading.sum(-1)
        is_empty = paddings == prompts.length
        counted = torch.where(is_empty, 0, paddings)
        prompts.paddings = counted.tolist()
    return prompts


def _without_graph(x: Tensor) -> Tensor:
    """The tensor without its autograd graph, so that it can be copied and keeps nothing else
    alive."""
    return x.detach() if x.requires_grad else x


def unshared(value: Any) -> Any:
    """Copies nested dicts, not their tensors: `generate` repeats the rows of their entries in
    place."""
    if not isinstance(value, dict):
        return value
    twin = copy.copy(value)
    for name, part in value.items():
        if isinstance(part, dict):
            twin[name] = unshared(part)
    return twin


def is_unset(value: Any) -> bool:
    if value is None or value is False:
        return True
    return isinstance(value, (dict, list, tuple)) and not value


def _digest(value: Any) -> bytes:
    """Hashes all tensors and plain values in nested containers, so that no two inputs with equal
    digests can be constructed: a user could otherwise be served another's content. Raises
    `TypeError` for other objects."""
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
        if value is None or type(value) in (bool, int, float, str):
            return value
        raise TypeError(f"a {type(value).__name__} among the inputs of a model")

    # the form says where each tensor's bytes end, and so precedes them
    form = marshal.dumps(described(value), MARSHAL_VERSION)
    digest = hashlib.blake2b(form, digest_size=32)
    for tensor in tensors:
        resolved = tensor.detach().resolve_conj().resolve_neg()
        content = resolved.contiguous().cpu()
        as_bytes = content.reshape(-1).view(torch.uint8)
        digest.update(as_bytes.numpy())
    return digest.digest()
