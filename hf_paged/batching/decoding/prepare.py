"""Prepares the decoding of one prompt of an engine as `generate` does before its loop."""

from __future__ import annotations

import copy
import sys
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessorList, PreTrainedModel, StoppingCriteriaList

from ... import compat
from ...interrupts import let_in, step_lock
from ...model.capability import is_stock
from ...model.forwards import compute_device
from ..arguments import RequestOptions, as_config, as_list, as_whole, check_logprobs, check_streamer, is_saved
from ..execution.adapters import use_adapter
from .base import LoopInputs
from .beam import BeamDecoding
from .sample import SampleDecoding
from .speculation import Assistance

_ASSISTED = "assisted_generation"
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample", _ASSISTED)
_REPORTS = ("output_attentions", "output_hidden_states")
_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
_NO_OUTPUTS = "is for `generate`: leave it out, and ask for log-probabilities with `return_logprobs=True`"
_SHARED = "is the engine's, whose requests share memory and forwards as its `PagedConfig` decides: leave it out"
# options that an engine cannot serve: their harmless values, and why other values are rejected
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(_REPORTS, ((None, False), "is served by `generate` only: leave it out of the request's config")),
    **dict.fromkeys(_OUTPUTS, ((None, False), _NO_OUTPUTS)),
    "use_cache": ((None, True), _SHARED),
    "cache_implementation": ((None, "paged", "dynamic", "hf_paged"), _SHARED),
    **dict.fromkeys(("cache_config", "prefill_chunk_size", "compile_config"), ((None,), _SHARED)),
}


class LoopCall(NamedTuple):
    """A decoding loop that `generate` would call, with its arguments."""

    method: str  # method name in `GenerationMixin`
    arguments: dict[str, Any]
    unexpanded: tuple[Tensor, dict[str, Any]] | None  # token ids and other model inputs, before rows are repeated


class Capture:
    """Records calls of a model's decoding loops without running them; each returns the ids plus one end token."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.calls: list[LoopCall] = []

    def add(self, call: LoopCall) -> Tensor:
        self.calls.append(call)
        config, ids = call.arguments["generation_config"], call.arguments["input_ids"]
        eos = compat.special_token(config, "eos")
        last = 0 if eos is None else int(eos.flatten()[0])
        return torch.cat([ids, torch.full_like(ids[:, :1], last)], dim=1)


capturing: ContextVar[Capture | None] = ContextVar("hf_paged_capturing", default=None)


def captured_call(model: PreTrainedModel, **arguments: Any) -> LoopCall:
    """Returns the loop call that `model.generate(**arguments)` prepares, with encoder outputs, but with raw images,
    which the first forward encodes. Runs no decoding loop and allocates no paged memory. Raises `generate`'s errors,
    and `ValueError` if `generate` runs more than one loop. For use under the model's `step_lock`."""
    options: dict[str, Any] = {"cache_implementation": "dynamic"}
    if arguments.get("generation_config") is not None:  # transformers then accepts no options beside it
        config = arguments["generation_config"] = copy.deepcopy(arguments["generation_config"])
        config.cache_implementation, options = "dynamic", {}
    capture = Capture(model)
    token = capturing.set(capture)
    try:
        model.generate(**{**arguments, **options})
    except Exception:  # the model's own `generate` may fail on the fake result after the captured call
        if not capture.calls:
            raise
    finally:
        capturing.reset(token)
    if len(capture.calls) != 1:
        raise ValueError(f"`generate` of {type(model).__name__} does more than one decoding loop: call it instead")
    return capture.calls[0]


def request_decoding(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    generation_config: GenerationConfig | Mapping[str, Any] | None,
    options: RequestOptions,
    tokenizer: Any = None,
) -> tuple[SampleDecoding | BeamDecoding, LoopCall | None]:
    """Prepares the decoding of one prompt with the model's own methods; the streamer gets only new tokens. For a model
    with an encoder, or a prompt with inputs beside token ids, also returns the captured loop call. Raises `ValueError`
    for an empty prompt, ids outside the vocabulary, and options that only `generate` serves or that it rejects."""
    generator, streamer = None, options.streamer
    if options.seed is not None:
        seed = as_whole("seed", options.seed, -(2**63), 2**64 - 1, before="None or ")  # as torch does
        generator = torch.Generator(device=compute_device(model)).manual_seed(seed)
    check_streamer(streamer)
    logprobs = options.return_logprobs, check_logprobs(options)
    own = LogitsProcessorList(as_list("logits_processor", options.logits_processor))
    criteria = StoppingCriteriaList(as_list("stopping_criteria", options.stopping_criteria))
    if not is_stock(model, compat.LOOP_CONDITION):
        raise ValueError(
            f"the model has a `{compat.LOOP_CONDITION}` of its own, which says when a whole call ends: call "
            '`model.generate(..., cache_implementation="paged")` instead of an engine'
        )
    if not len(input_ids) and not options.inputs:
        raise ValueError("the prompt is empty: pass at least one token id, the model's BOS token for instance")
    keywords = _keywords(model, generation_config)
    if options.inputs is not None or model.config.is_encoder_decoder:
        call = _captured_request(model, input_ids, keywords, options, own, criteria, tokenizer)
        names = ("input_ids", "logits_processor", "stopping_criteria", "generation_config")
        given = {name: call.arguments[name] for name in names}
        inputs = LoopInputs(**given, generator=generator, record_logprobs=logprobs[0], num_top=logprobs[1])
        if call.method == compat.SAMPLE:
            return SampleDecoding(inputs, streamer), call
        _check_no_streamer(streamer)
        return BeamDecoding(model, inputs), call
    last, low, high = num_embeddings(model) - 1, min(input_ids), max(input_ids)
    if low < 0 or high > last:
        wrong = low if low < 0 else high
        raise ValueError(f"token id {wrong} is outside the vocabulary: ids from 0 to {last} have an embedding")
    ids = torch.tensor([list(input_ids)], dtype=torch.long, device=compute_device(model))
    assisting = {"assistant_model": options.assistant_model, "assistant_tokenizer": options.assistant_tokenizer}
    assisting = {name: value for name, value in assisting.items() if value is not None}
    if "assistant_tokenizer" in assisting and tokenizer is not None:
        assisting["tokenizer"] = tokenizer
    config = _prepared_config(model, ids, keywords, assisting)
    uses_beams = config.num_beams > 1
    if uses_beams:
        _check_no_streamer(streamer)
    rows = ids.repeat_interleave(max(config.num_beams, config.num_return_sequences), dim=0)
    processors = compat.get_logits_processor(
        model, config, ids.shape[1], ids, logits_processor=own, device=ids.device, model_kwargs={}
    )
    criteria = compat.get_stopping_criteria(model, config, criteria, tokenizer)
    inputs = LoopInputs(rows, processors, criteria, config, generator, *logprobs)
    return BeamDecoding(model, inputs) if uses_beams else SampleDecoding(inputs, streamer), None


def _captured_request(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    keywords: dict[str, Any],
    options: RequestOptions,
    own: LogitsProcessorList,
    criteria: StoppingCriteriaList,
    tokenizer: Any,
) -> LoopCall:
    """Captures the loop call of a prompt with inputs beside token ids; there may be no token ids."""
    given = {name: _on(compute_device(model), value) for name, value in (options.inputs or {}).items()}
    if len(input_ids):
        given["input_ids"] = torch.tensor([list(input_ids)], dtype=torch.long, device=compute_device(model))
    if tokenizer is not None and _given(keywords, "stop_strings") is not None:
        given["tokenizer"] = tokenizer
    with step_lock(model), let_in(), use_adapter(model, options.adapter):
        call = captured_call(model, **given, **keywords, logits_processor=own, stopping_criteria=criteria)
    config = call.arguments["generation_config"]
    _check_mode(config)
    if getattr(config, "return_timestamps", False):
        raise ValueError(
            "`return_timestamps` is served by `generate` only: the tokens decide how many decoding loops a sound takes"
        )
    for name in (*_REPORTS, *_OUTPUTS):
        setattr(config, name, False)
    return call


def _on(device: torch.device, value: Any) -> Any:
    return value.to(device) if isinstance(value, Tensor) else value


def _check_no_streamer(streamer: Any) -> None:
    if streamer is not None:
        raise ValueError("a streamer cannot be used with beam search, whose tokens are settled only at the end")


def _keywords(host: Any, generation_config: GenerationConfig | Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns the generation config as keyword arguments of `generate`, where None in a dict differs from a missing
    option. Raises `ValueError` for options that cannot be served."""
    keywords: dict[str, Any] = {"generation_config": as_config(generation_config)}
    own = host.generation_config
    for name, (harmless, why) in _REFUSED.items() if generation_config is not None else ():
        value = _given(keywords, name)
        if value != getattr(own, name, None) and value not in harmless:
            raise ValueError(f"`{name}` {why} (it is {value!r})")
    if not isinstance(generation_config, Mapping) or is_saved(generation_config):
        return keywords
    if generation_config.get("max_length", 0) is None:
        if generation_config.get("max_new_tokens", own.max_new_tokens) is None:
            raise ValueError("`max_length` is None: leave it out, or pass `max_new_tokens` as well")
    options = {name: each for name, each in generation_config.items() if each is not None or name not in _REFUSED}
    return {"generation_config": None, **options}


def _given(keywords: dict[str, Any], name: str) -> Any:
    return keywords.get(name, getattr(keywords["generation_config"], name, None))


def _check_mode(config: Any, assistance: Assistance | None = None) -> Any:
    assistance = assistance or Assistance()
    mode = config.get_generation_mode(assistance.model)
    if mode.value not in _MODES:
        raise ValueError(f"generation mode {mode.value!r} is not among those of the engine: {', '.join(_MODES)}")
    if assistance.is_asked_for(config) and mode.value != _ASSISTED:
        raise ValueError(
            "candidates of an assistant or of the prompt are for greedy search and sampling: leave out beams"
        )
    if config.token_healing:
        raise ValueError("`token_healing` is served by `generate` only: leave it out")
    return mode


def _prepared_config(host: Any, ids: Tensor, keywords: dict[str, Any], assisting: dict[str, Any]) -> Any:
    """Returns the config that transformers' loops would get for `(1, length)` ids. Raises `ValueError` for options that
    cannot be served."""
    own = host.generation_config
    default_max, default_min = (
        getattr(own, name) is None and _given(keywords, name) is None for name in ("max_length", "min_length")
    )
    config, _ = compat.prepare_generation_config(host, **keywords)
    mode = _check_mode(config, Assistance(assisting.get("assistant_model")))
    for name in (*_REPORTS, *_OUTPUTS):  # the model's defaults: they concern only the output of `generate`
        setattr(config, name, False)
    compat.validate_generation_mode(host, mode, config, assisting)
    compat.prepare_special_tokens(host, config, True, device=ids.device, batch_size=1)
    config = compat.prepare_generated_length(host, config, default_max, default_min, "input_ids", ids.shape[1], ids)
    compat.validate_generated_length(host, config, ids.shape[1], default_max)
    return config


def num_embeddings(model: PreTrainedModel) -> int:
    """Returns the number of rows of the input embedding; valid token ids are below it."""
    try:
        return int(model.get_input_embeddings().weight.shape[0])
    except (AttributeError, NotImplementedError):  # unknown
        return sys.maxsize
