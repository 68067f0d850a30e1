"""Checks the token ids of a request's prompt against the model's embeddings, before memory is
allocated: a lookup outside of an embedding fails on the CPU, and ends the process's use of a
GPU."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ..execution.prompt_inputs import MEDIA_WORDS, uncommon_names


def num_embeddings(model: PreTrainedModel) -> int:
    """Returns the number of rows of the input embedding (token ids must be smaller); `sys.maxsize`
    if it is unknown."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):
        return sys.maxsize


def check_vocabulary(
    model: PreTrainedModel, input_ids: Sequence[int], inputs: Mapping[str, Any] | None
) -> None:
    """Raises `ValueError` if a prompt has token ids, or an encoder's model `decoder_input_ids`,
    outside the vocabulary. Beside media such as images, accepts the ids that the model's config
    names as their placeholders, and any ids if the model's class is not transformers' own, whose
    code may know others."""
    inputs = inputs or {}
    has_encoder = model.config.is_encoder_decoder
    # without embeddings or an encoder's outputs, which are read in place of the ids
    are_read = inputs.get("inputs_embeds") is None and inputs.get("encoder_outputs") is None
    if len(input_ids) and are_read:
        size = _size_of(model, "get_encoder") if has_encoder else _full_size(model)
        _check(model, input_ids, size, inputs)
    decoder_ids = inputs.get("decoder_input_ids")
    if has_encoder and isinstance(decoder_ids, Tensor) and decoder_ids.numel():
        _check(model, decoder_ids.flatten().tolist(), _size_of(model, "get_decoder"), inputs)


def _check(
    model: PreTrainedModel, ids: Sequence[int], size: int | None, inputs: Mapping[str, Any]
) -> None:
    """Raises `ValueError` for ids that are neither below `size` nor placeholders. `None`: there is
    no table of ids."""
    lowest = min(ids)
    highest = max(ids)
    if size is None or (lowest >= 0 and highest < size):
        return
    if uncommon_names(dict(inputs)):
        if not type(model).__module__.startswith("transformers."):
            return
        accepted = set(_placeholder_ids(model.config))
        ids = [token for token in ids if token not in accepted]
        lowest = min(ids, default=0)
        highest = max(ids, default=0)
    if lowest < 0 or highest >= size:
        invalid = lowest if lowest < 0 else highest
        raise ValueError(
            f"token id {invalid} is outside the vocabulary: ids from 0 to {size - 1} have an"
            " embedding"
        )


def _full_size(model: PreTrainedModel) -> int:
    """Returns `num_embeddings` and the rows of an additional embedding, such as Idefics has for
    its placeholders."""
    try:
        table = model.get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return sys.maxsize
    return num_embeddings(model) + getattr(table, "num_additional_embeddings", 0)


def _size_of(model: Any, getter: str) -> int | None:
    """Returns the number of embeddings of the encoder or decoder that a method of the model
    returns; `None` if it has no table of token ids, but embeds audio for instance."""
    try:
        table = getattr(model, getter)().get_input_embeddings()
    except (AttributeError, NotImplementedError):
        return None
    return table.num_embeddings if isinstance(table, nn.Embedding) else None


def _placeholder_ids(config: PreTrainedConfig) -> Iterator[int]:
    """Yields the ids that a config, or a config in it, names as tokens of images or other media."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from _placeholder_ids(value)
        elif ("token_id" in name or "token_index" in name) and any(
            word in name for word in MEDIA_WORDS
        ):
            for token in value if isinstance(value, (list, tuple)) else [value]:
                if isinstance(token, int):
                    yield token
