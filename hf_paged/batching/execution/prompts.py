"""The prompts of a call, with all that the model's own forward takes of them beside token ids."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

CACHE_NAMES = ("past_key_values", "cache_params")  # of a model's inputs


@dataclass(eq=False)
class Prompts:
    """The prompts of a call as `generate` prepared them for the first forward, each once: what the model's own
    `prepare_inputs_for_generation` takes. Its forward runs over all rows at once, since images and sound cannot be told
    apart by rows."""

    input_ids: Tensor
    """`(rows, length)` as transformers' loops get them, one row a prompt; the decoder's where the model has an encoder;
    `(rows, 0)` where there are only `inputs_embeds`."""
    model_kwargs: dict[str, Any]  # without a cache
    paddings: list[int]  # leading columns of each row that are padding

    @property
    def length(self) -> int:
        """Columns of the first forward, padding included."""
        embeds = self.model_kwargs.get("inputs_embeds")
        if self.num_encoder_tokens:  # which those were
            embeds = None
        return int((self.input_ids if embeds is None else embeds).shape[1])

    @property
    def num_encoder_tokens(self) -> int:
        """Of each row, padding included, whose keys and values the rows attend to."""
        outputs = self.model_kwargs.get("encoder_outputs")
        return 0 if outputs is None else int(outputs[0].shape[1])


def prompts_of(unexpanded: tuple[Tensor, dict[str, Any]], model_kwargs: dict[str, Any], is_decoder: bool) -> Prompts:
    """Of what `generate` had before it repeated rows, and of what it made of that for its loop. `is_decoder`: of a
    model with an encoder. What else than padding on the left an attention mask hides is its own."""
    ids, given = unexpanded
    given = {name: value for name, value in {**model_kwargs, **given}.items() if name not in CACHE_NAMES}
    mask = given.get("decoder_attention_mask" if is_decoder else "attention_mask")
    prompts = Prompts(ids, given, [0] * len(ids))
    if isinstance(mask, Tensor) and mask.shape == (len(ids), prompts.length):
        paddings = (mask.cumsum(-1) == 0).sum(-1)
        prompts.paddings = torch.where(paddings == prompts.length, 0, paddings).tolist()
    return prompts


def unshared(value: Any) -> Any:
    """The same tensors in other dicts: `generate` repeats the rows of what these hold in place."""
    if not isinstance(value, dict):
        return value
    twin = copy.copy(value)
    for name, part in value.items():
        if isinstance(part, dict):
            twin[name] = unshared(part)
    return twin
