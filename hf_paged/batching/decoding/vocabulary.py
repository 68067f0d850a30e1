"""Checks the token ids of a request's prompt against the model's embeddings, before memory is
allocated: a lookup outside an embedding raises an error on the CPU, and makes a GPU unusable for
the process."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...model.forwards import num_embeddings
from ..execution.prompts import uncommon_names

# words in the config's names for tokens that stand for media, or that mark their start or end
MEDIA_WORDS = "image video audio vision visual speech sound media patch frame".split()


def check_vocabulary(
    model: PreTrainedModel, input_ids: Sequence[int], inputs: Mapping[str, Any] | None
) -> None:
    """Raises `ValueError` if token ids of a prompt, or `decoder_input_ids` of a model with an
    encoder, are outside the vocabulary. In prompts with further inputs, such as images, accepts the
    ids that the model's config names as placeholders of media, and any ids if the model's class is
    not transformers' own, since its code may define other placeholders."""
    inputs = inputs or {}
    has_encoder = model.config.is_encoder_decoder
    # embeddings and encoder outputs are read in place of the ids
    reads_ids = inputs.get("inputs_embeds") is None and inputs.get("encoder_outputs") is None
    if len(input_ids) and reads_ids:
        size: int | None
        if has_encoder:
            size = _num_embeddings_of(model, "get_encoder")
        else:
            size = num_embeddings(model)
            if size < sys.maxsize:  # Idefics has an additional embedding for its placeholders
                table = model.get_input_embeddings()
                size += getattr(table, "num_additional_embeddings", 0)
        _check_ids(model, input_ids, size, inputs)
    decoder_ids = inputs.get("decoder_input_ids")
    if has_encoder and isinstance(decoder_ids, Tensor) and decoder_ids.numel():
        size = _num_embeddings_of(model, "get_decoder")
        _check_ids(model, decoder_ids.flatten().tolist(), size, inputs)


def _check_ids(
    model: PreTrainedModel, ids: Sequence[int], size: int | None, inputs: Mapping[str, Any]
) -> None:
    """Raises `ValueError` for ids outside `range(size)`, except those that `check_vocabulary`
    accepts. `size` is `None` if there is no table of ids; all ids are then accepted."""
    lowest = min(ids)
    highest = max(ids)
    if size is None or (lowest >= 0 and highest < size):
        return
    if uncommon_names(dict(inputs)):
        if not type(model).__module__.startswith("transformers."):
            return
        accepted_ids = set(_placeholder_ids(model.config))
        ids = [token for token in ids if token not in accepted_ids]
        lowest = min(ids, default=0)
        highest = max(ids, default=0)
    if lowest < 0 or highest >= size:
        invalid = lowest if lowest < 0 else highest
        raise ValueError(
            f"token id {invalid} is outside the vocabulary: ids from 0 to {size - 1} have an"
            " embedding"
        )


def _num_embeddings_of(model: Any, getter: str) -> int | None:
    """Returns the number of embeddings of the encoder or decoder that the model's method `getter`
    returns; `None` if that module has no table of token ids, but embeds audio for instance."""
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
