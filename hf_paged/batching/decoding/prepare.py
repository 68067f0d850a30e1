"""What `generate` prepares before its loop, for one prompt of an engine."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ... import compat
from ...model.capability import is_stock
from ...model.forwards import compute_device
from ..arguments import RequestOptions, as_list, as_whole, check_streamer
from .base import LoopInputs
from .beam import BeamDecoding
from .sample import SampleDecoding

_MODES = ("greedy_search", "sample", "beam_search", "beam_sample")
_REPORTS = ("output_attentions", "output_hidden_states")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
_NO_OUTPUTS = "is for `generate`: leave it out, and ask for log-probabilities with `return_logprobs=True`"
_SHARED = "is the engine's, whose requests share memory and forwards as its `PagedConfig` decides: leave it out"
# options that an engine could only ignore: values that ask for nothing, and why others are refused
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(_REPORTS, ((None, False), "is served by `generate` only: leave it out of the request's config")),
    **dict.fromkeys(_OUTPUTS, ((None, False), _NO_OUTPUTS)),
    "use_cache": ((None, True), _SHARED),
    "cache_implementation": ((None, "paged", "dynamic", "hf_paged"), _SHARED),
    **dict.fromkeys(("cache_config", "prefill_chunk_size", "compile_config"), ((None,), _SHARED)),
}


class LoopCall(NamedTuple):
    """What `generate` would call its decoding loop with."""

    method: str  # its name among those of `GenerationMixin`
    arguments: dict[str, Any]
    unexpanded: (
        tuple[Tensor, dict[str, Any]] | None
    )  # token ids and other inputs of the model, before rows were repeated


# The model whose `generate`, in this context, returns a `LoopCall` in place of its result.
capturing: ContextVar[PreTrainedModel | None] = ContextVar("hf_paged_capturing", default=None)


def captured_call(model: PreTrainedModel, **arguments: Any) -> LoopCall:
    """What `model.generate(**arguments)` prepares, encoders' outputs included; no decoding loop runs, and no memory of
    ours is taken. Raises what `generate` raises. For use under the model's `step_lock`."""
    token = capturing.set(model)
    try:
        found: Any = model.generate(**{**arguments, "cache_implementation": "dynamic"})
    finally:
        capturing.reset(token)
    if not isinstance(found, LoopCall):
        raise ValueError(f"`generate` of {type(model).__name__} does more than one decoding loop: call it instead")
    return found


def request_decoding(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    generation_config: GenerationConfig | None,
    options: RequestOptions,
    tokenizer: Any = None,
) -> SampleDecoding | BeamDecoding:
    """The decoding of one prompt, prepared by the model's own methods; the streamer gets new tokens alone. Raises
    `ValueError` for an empty prompt, ids outside the vocabulary, all that only `generate` serves or that it refuses."""
    generator, streamer = None, options.streamer
    if options.seed is not None:
        seed = as_whole("seed", options.seed, -(2**63), 2**64 - 1, before="None or ")  # as torch does
        generator = torch.Generator(device=compute_device(model)).manual_seed(seed)
    check_streamer(streamer)
    own = LogitsProcessorList(as_list("logits_processor", options.logits_processor))
    criteria = StoppingCriteriaList(as_list("stopping_criteria", options.stopping_criteria))
    if not is_stock(model, compat.LOOP_CONDITION):
        raise ValueError(
            f"the model has a `{compat.LOOP_CONDITION}` of its own, which says when a whole call ends: call "
            '`model.generate(..., cache_implementation="paged")` instead of an engine'
        )
    if not len(input_ids):
        raise ValueError("the prompt is empty: pass at least one token id, the model's BOS token for instance")
    last, low, high = num_embeddings(model) - 1, min(input_ids), max(input_ids)
    if low < 0 or high > last:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the vocabulary: ids from 0 to {last} have an embedding")
    ids = torch.tensor([list(input_ids)], dtype=torch.long, device=compute_device(model))
    config = _prepared_config(model, ids, generation_config)
    uses_beams = config.num_beams > 1
    if uses_beams and streamer is not None:
        raise ValueError("a streamer cannot be used with beam search, whose tokens are settled only at the end")
    rows = ids.repeat_interleave(max(config.num_beams, config.num_return_sequences), dim=0)
    processors = compat.get_logits_processor(
        model, config, ids.shape[1], ids, logits_processor=own, device=ids.device, model_kwargs={}
    )
    criteria = compat.get_stopping_criteria(model, config, criteria, tokenizer)
    inputs = LoopInputs(rows, processors, criteria, config, generator, options.return_logprobs)
    return BeamDecoding(model, inputs) if uses_beams else SampleDecoding(inputs, streamer)


def _prepared_config(host: Any, ids: Tensor, generation_config: GenerationConfig | None) -> Any:
    """The config as transformers' loops get it, for `(1, length)` ids. Raises `ValueError` on what cannot be served."""
    own = host.generation_config
    for name, (harmless, why) in _REFUSED.items() if generation_config is not None else ():
        value = getattr(generation_config, name, None)
        if value != getattr(own, name, None) and value not in harmless:
            raise ValueError(f"`{name}` {why} (it is {value!r})")
    default_max, default_min = (
        getattr(own, name) is None and getattr(generation_config, name, None) is None
        for name in ("max_length", "min_length")
    )
    config, _ = compat.prepare_generation_config(host, generation_config)
    mode = config.get_generation_mode()
    if mode.value not in _MODES:
        raise ValueError(f"generation mode {mode.value!r} is not among those of the engine: {', '.join(_MODES)}")
    if config.token_healing:
        raise ValueError("`token_healing` is served by `generate` only: leave it out")
    for name in (*_REPORTS, *_OUTPUTS):  # the model's: they say how `generate` is to answer
        setattr(config, name, False)
    compat.validate_generation_mode(host, mode, config, {})
    compat.prepare_special_tokens(host, config, True, device=ids.device, batch_size=1)
    config = compat.prepare_generated_length(host, config, default_max, default_min, "input_ids", ids.shape[1], ids)
    compat.validate_generated_length(host, config, ids.shape[1], default_max)
    return config


def num_embeddings(model: PreTrainedModel) -> int:
    """Rows of the model's input embedding: the token ids below it can be computed."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):  # it does not tell
        return sys.maxsize
