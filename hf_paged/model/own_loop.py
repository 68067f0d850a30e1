"""One step of a model in transformers' decoding loop, and the inputs that the loop carries from
step to step."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, EncoderDecoderCache
from transformers.utils import ModelOutput

from .. import compat


def pad_token_id(model: Any) -> int:
    """The token id for left padding: the generation config's or, if it has none, 0; any id will do,
    since the mask hides padding."""
    pad = getattr(model.generation_config, "pad_token_id", None)
    return pad if isinstance(pad, int) and pad >= 0 else 0


def first_inputs(model: Any, ids: Tensor, mask: Tensor, cache: Cache | None) -> dict[str, Any]:
    """The model inputs from which `generate` prepares the first forward; `ids` and `mask` are
    `(rows, length)`."""
    inputs: dict[str, Any] = {"use_cache": True, "attention_mask": mask}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = compat.prepare_position_ids(model, ids, inputs)
    if cache is not None:
        inputs[compat.cache_name(model)] = cache
    return inputs


def next_logits(
    model: Any,
    ids: Tensor,
    inputs: dict[str, Any],
    is_first_step: bool,
    num_cached: int = 0,
) -> tuple[Tensor, dict[str, Any]]:
    """Runs one step. Returns the logits `(rows, vocab_size)` after the last token of `ids` `(rows,
    length)`, and the inputs of the next step. The other arguments are as in `prepare`."""
    prepared = prepare(model, ids, inputs, is_first_step, num_cached=num_cached)
    outputs = model(**prepared, return_dict=True)
    return outputs.logits[:, -1], next_inputs(model, outputs, inputs)


def prepare(
    model: Any,
    ids: Tensor,
    inputs: dict[str, Any],
    is_first_step: bool,
    num_new: int = 1,
    num_cached: int = 0,
) -> dict[str, Any]:
    """Returns the arguments of the model's forward. In the rows' first step, all tokens of `ids`
    `(rows, length)` but the first `num_cached` are new; in later steps, the last `num_new`."""
    has_encoder = model.config.is_encoder_decoder
    embeds = inputs.get("inputs_embeds")
    tokens = embeds if is_first_step and embeds is not None and not has_encoder else ids
    count = tokens.shape[1] - num_cached if is_first_step else num_new
    return model.prepare_inputs_for_generation(
        ids, next_sequence_length=count, is_first_iteration=is_first_step, **inputs
    )


def next_inputs(model: Any, outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    """Returns the inputs from which `prepare` prepares the step after this one."""
    has_encoder = model.config.is_encoder_decoder
    return compat.update_inputs(model, outputs, inputs, is_encoder_decoder=has_encoder)


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """Returns an input of a model with `function` applied to all tensors in it."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, dict):
        mapped_values = {name: map_tensors(function, part) for name, part in value.items()}
        return type(value)(**mapped_values) if isinstance(value, ModelOutput) else mapped_values
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(function, part) for part in value)
    return value


def tensors_of(value: Any) -> list[Tensor]:
    """All tensors in an input of a model, or in several."""
    if isinstance(value, Tensor):
        return [value]
    if not isinstance(value, (dict, list, tuple)):
        return []
    parts = value.values() if isinstance(value, dict) else value
    return [tensor for part in parts for tensor in tensors_of(part)]


# In every model, the batch is the first dimension of these inputs. (Position ids with several axes
# have the batch as their second dimension.)
ROW_INPUTS = {
    "attention_mask",
    "encoder_outputs",
    "inputs_embeds",
    "position_ids",
    "token_type_ids",
    "decoder_attention_mask",
    "decoder_input_ids",
    "decoder_position_ids",
}


def mismatched_rows(inputs: Mapping[str, Any], num_rows: int) -> str | None:
    """Returns the start of a message about an input whose number of rows is neither 1 nor
    `num_rows`; `None` if there is no such input."""
    for name in sorted(ROW_INPUTS & inputs.keys()):
        value = inputs[name]
        if isinstance(value, Tensor) and value.dim():
            count = value.shape[max(0, value.dim() - 2) if name.endswith("position_ids") else 0]
            if count not in (1, num_rows):
                return f"`{name}` has {count} rows"
    return None


def select_rows(name: str, value: Any, rows: Tensor, num_rows: int) -> Any:
    """Selects `rows` `(n,)` from the input or output `name` of a batch of `num_rows` rows. Tensors
    whose batch axis does not have that size are returned whole."""

    def select(x: Tensor) -> Tensor:
        axis = 0  # of the batch: transformers repeats rows along it
        if name.endswith("position_ids") and x.dim() == 3:
            axis = 1
        elif name.endswith("hidden_states"):
            # (..., rows, length, width): Gemma3n has axes before the rows
            axis = max(0, x.dim() - 3)
        if x.dim() > axis and x.shape[axis] == num_rows:
            return x.index_select(axis, rows.to(x.device))
        return x

    return map_tensors(select, value)


def first_row(prompts: Any) -> dict[str, Any]:
    """Returns the `model_kwargs` of the first row of `Prompts`."""
    row = torch.zeros(1, dtype=torch.long, device=prompts.input_ids.device)
    num_rows = len(prompts.paddings)
    inputs = prompts.model_kwargs.items()
    return {name: select_rows(name, value, row, num_rows) for name, value in inputs}


def cache_parts(cache: Any) -> list[Any]:
    """The caches of an `EncoderDecoderCache`, or the cache itself."""
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def padding_mask(paddings: list[int], width: int, device: torch.device) -> Tensor:
    """Returns a mask `(rows, width)` bool that is false in each row's leading padding."""
    columns = torch.arange(width, device=device)
    first_columns = torch.tensor(paddings, device=device)[:, None]
    return columns >= first_columns
