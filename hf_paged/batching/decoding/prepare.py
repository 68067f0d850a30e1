"""Prepares the decoding of an engine's request, as `generate` does before its decoding loop. Runs
no forward of the decoder, and allocates no blocks."""

from __future__ import annotations

import copy
import dataclasses
import pickle
import weakref
from collections.abc import Iterable, Mapping, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)

from ... import compat
from ...config import shown
from ...interrupts import is_interrupt
from ...model.forwards import compute_device
from ...model.structure import is_stock
from ...model.wrappers import use_adapter
from ...rooms import room
from ...threads import step_lock
from ..arguments import (
    RequestOptions,
    ServedByGenerateError,
    as_list,
    as_whole,
    check_generation_config,
    check_logprobs,
    check_stop_strings,
    check_streamer,
    generation_options,
    is_saved_config,
    option_for_drafts,
)
from .base import Decoding, LoopInputs
from .sample import SampleDecoding
from .stop_strings import StopStrings
from .vocabulary import check_vocabulary

Keywords = dict[str, Any]

_ASSISTED = "assisted_generation"
_MODES = ("greedy_search", "sample", "beam_search", "beam_sample", _ASSISTED)
_MODEL_OUTPUTS = ("output_attentions", "output_hidden_states")
_LOOP_OUTPUTS = ("return_dict_in_generate", "output_scores", "output_logits")
_LOOP_OUTPUTS_REASON = (
    "an engine has no such outputs. Leave it out; `return_logprobs=True` asks for log-probabilities"
)
_CONFIG_REASON = (
    "an engine's `PagedConfig` sets the memory and the forwards of all requests. Leave it out"
)
# options that an engine restricts: the values that it accepts, and why it rejects others
_RESTRICTED: dict[str, tuple[tuple[Any, ...], str]] = {
    **dict.fromkeys(
        _MODEL_OUTPUTS, ((None, False), "only `generate` has these outputs. Leave it out")
    ),
    **dict.fromkeys(_LOOP_OUTPUTS, ((None, False), _LOOP_OUTPUTS_REASON)),
    "use_cache": ((None, True), _CONFIG_REASON),
    "cache_implementation": ((None, "paged", "dynamic", "hf_paged"), _CONFIG_REASON),
    **dict.fromkeys(
        ("cache_config", "prefill_chunk_size", "compile_config"), ((None,), _CONFIG_REASON)
    ),
    "is_assistant": (
        (None, False),
        "transformers sets it for the drafts of an assistant. Leave it out",
    ),
}


class LoopCall(NamedTuple):
    """A call of one of transformers' decoding loops, with its arguments."""

    method: str  # name of the loop in `GenerationMixin`
    arguments: Keywords
    # token ids and other model inputs before rows were repeated; `None` if they were not recorded
    unexpanded: tuple[Tensor, Keywords] | None

    def inputs(self, *options: Any) -> LoopInputs:
        """Returns the loop's inputs; `options` are the remaining fields of `LoopInputs`, in
        order."""
        arguments = self.arguments
        return LoopInputs(
            arguments["input_ids"],
            arguments["logits_processor"],
            arguments["stopping_criteria"],
            arguments["generation_config"],
            *options,
        )


@dataclasses.dataclass
class Capture:
    """Records the calls of a model's decoding loops instead of running them. Each of these calls
    returns its ids, each row followed by an EOS token (or by 0 without EOS)."""

    model: PreTrainedModel
    calls: list[LoopCall] = dataclasses.field(default_factory=list)

    def add(self, call: LoopCall) -> Tensor:
        """Records a call, and returns `(rows, length + 1)` ids as its result."""
        self.calls.append(call)
        config = call.arguments["generation_config"]
        ids = call.arguments["input_ids"]
        eos = compat.special_token(config, "eos")
        eos_id = 0 if eos is None else int(eos.flatten()[0])
        return torch.nn.functional.pad(ids, (0, 1), value=eos_id)


# the capture of the current `generate` call, whose decoding loops do not run; `None`: loops run
capturing: ContextVar[Capture | None] = ContextVar("hf_paged_capturing", default=None)


def capture_call(model: PreTrainedModel, **arguments: Any) -> LoopCall:
    """Returns the loop call that `model.generate(**arguments)` prepares. Its arguments contain the
    encoder's outputs, if any; images for a decoder-only model are not encoded yet
    (`compat.encode_media`). Runs no loop and allocates no paged memory. Raises the errors of
    `generate` from before its first loop, and `ServedByGenerateError` if `generate` does not call
    exactly one loop. The caller holds the model's `step_lock`."""
    arguments = _with_option(arguments, "cache_implementation", "dynamic")
    capture = Capture(model)
    token = capturing.set(capture)
    try:
        model.generate(**arguments)
    except Exception as error:
        # a model's own `generate` may fail on the fake result after the captured call
        if not capture.calls or is_interrupt(error):
            raise
    finally:
        capturing.reset(token)
    num_loops = len(capture.calls)
    if num_loops != 1:
        raise ServedByGenerateError(
            f"`generate` of {type(model).__name__} runs {num_loops or 'none'} of transformers'"
            " decoding loops for this prompt, and an engine's request needs exactly one: call"
            ' `model.generate(..., cache_implementation="paged")`'
        )
    return capture.calls[0]


def _with_option(keywords: Keywords, name: str, value: Any) -> Keywords:
    """Returns the keyword arguments of `generate` with an option set: in a copy of the generation
    config, if there is one, since transformers does not accept both a config and options."""
    config = keywords.get("generation_config")
    if config is None:
        return {**keywords, name: value}
    config = copy.copy(config)
    setattr(config, name, value)
    return {**keywords, "generation_config": config}


def request_decoding(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    generation_config: GenerationConfig | Mapping[str, Any] | None,
    options: RequestOptions,
    tokenizer: Any = None,
) -> tuple[Decoding, LoopCall | None]:
    """Returns the decoding of one prompt, prepared with the model's own methods, and the captured
    loop call, which is `None` unless the model has an encoder or the prompt has inputs besides
    token ids. The decoding sends only new tokens to the streamer. Raises `ValueError` for an empty
    prompt, for ids outside the vocabulary (`check_vocabulary`), and for options that are invalid or
    that only `generate` serves."""
    generator = None
    if options.seed is not None:
        # the range of `torch.manual_seed`
        seed = as_whole(
            "seed",
            options.seed,
            -(2**63),
            2**64 - 1,
            before="None or ",
        )
        generator = torch.Generator(device=compute_device(model))
        generator.manual_seed(seed)
    check_streamer(options.streamer)
    num_alternatives = check_logprobs(options)
    processors = as_list("logits_processor", options.logits_processor)
    criteria = as_list("stopping_criteria", options.stopping_criteria)
    options = dataclasses.replace(
        options,
        logits_processor=LogitsProcessorList(processors),
        stopping_criteria=StoppingCriteriaList(criteria),
    )
    if not len(input_ids) and not options.inputs:
        raise ValueError(
            "the prompt is empty: pass at least one token id, the model's BOS token for instance"
        )
    keywords = _generate_keywords(model, generation_config)
    stop_strings = _option_value(keywords, "stop_strings")
    if stop_strings is not None:
        check_stop_strings(stop_strings)
        if tokenizer is None:
            raise ValueError(
                f"`stop_strings` is {shown(stop_strings)}, which needs a tokenizer: make the engine"
                " with `tokenizer=`"
            )
    check_vocabulary(model, input_ids, options.inputs)
    has_only_ids = options.inputs is None and not model.config.is_encoder_decoder
    prepare = _prepare_request_call if has_only_ids else _capture_request_call
    call = prepare(model, input_ids, keywords, options, tokenizer)
    inputs = call.inputs(generator, options.return_logprobs, num_alternatives)
    decoding: Decoding
    if call.method == compat.SAMPLE:
        decoding = SampleDecoding(inputs, options.streamer)
    else:
        if options.streamer is not None:
            raise ValueError(
                "a streamer does not work with beam search, whose tokens are final only at the end:"
                " leave the streamer out"
            )
        decoding = room("beams", "`num_beams`").BeamDecoding(model, inputs)
    return decoding, None if has_only_ids else call


def _prepare_request_call(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    keywords: Keywords,
    options: RequestOptions,
    tokenizer: Any,
) -> LoopCall:
    """Returns the loop call that `generate` would make for a prompt of token ids. Does not call
    `generate`."""
    ids = _ids_tensor(model, input_ids)
    assistant_options: Keywords = {}
    if options.assistant_model is not None:
        assistant_options["assistant_model"] = options.assistant_model
    if options.assistant_tokenizer is not None:
        assistant_options["assistant_tokenizer"] = options.assistant_tokenizer
        if tokenizer is not None:
            assistant_options["tokenizer"] = tokenizer
    config = _loop_config(model, ids, keywords, assistant_options)
    method = compat.BEAM_SEARCH if config.num_beams > 1 else compat.SAMPLE
    _check_stock(model, (method, *compat.REPLACED_METHODS[method]))
    processors = compat.get_logits_processor(
        model,
        config,
        ids.shape[1],
        ids,
        logits_processor=options.logits_processor,
        device=ids.device,
        model_kwargs={},
    )
    criteria = options.stopping_criteria
    if config.stop_strings is not None and tokenizer is not None:
        criteria.append(StopStrings(tokenizer, config.stop_strings))
        config.stop_strings = None
    num_rows = max(config.num_beams, config.num_return_sequences)
    arguments = {
        "input_ids": ids.repeat_interleave(num_rows, dim=0),
        "logits_processor": processors,
        "stopping_criteria": compat.get_stopping_criteria(model, config, criteria, tokenizer),
        "generation_config": config,
    }
    return LoopCall(method, arguments, None)


def _ids_tensor(model: PreTrainedModel, input_ids: Sequence[int]) -> Tensor:
    """Returns the token ids as `(1, length)` int64 on the model's device."""
    return torch.tensor([list(input_ids)], dtype=torch.long, device=compute_device(model))


def _capture_request_call(
    model: PreTrainedModel,
    input_ids: Sequence[int],
    keywords: Keywords,
    options: RequestOptions,
    tokenizer: Any,
) -> LoopCall:
    """Returns the loop call that `generate` makes (`capture_call`), for a model with an encoder or
    a prompt with inputs besides, or instead of, token ids."""
    device = compute_device(model)
    arguments: Keywords = {}
    for name, value in (options.inputs or {}).items():
        arguments[name] = value.to(device) if isinstance(value, Tensor) else value
    if len(input_ids):
        arguments["input_ids"] = _ids_tensor(model, input_ids)
    stop_strings = _option_value(keywords, "stop_strings")
    if stop_strings is not None:
        has_config = keywords["generation_config"] is not None
        if has_config and model.generation_config.stop_strings is not None:
            # leave them in the config: if it had none, `generate` would use the model's strings
            arguments["tokenizer"] = tokenizer
        else:
            options.stopping_criteria.append(StopStrings(tokenizer, stop_strings))
            keywords = _with_option(keywords, "stop_strings", None)
    with step_lock(model), use_adapter(model, options.adapter):
        call = capture_call(
            model,
            **arguments,
            **keywords,
            logits_processor=options.logits_processor,
            stopping_criteria=options.stopping_criteria,
        )
    config = call.arguments["generation_config"]
    _checked_mode(config)
    if getattr(config, "return_timestamps", False):
        raise ValueError(
            "`return_timestamps` runs several decoding loops, and an engine's request has one loop:"
            ' call `model.generate(..., cache_implementation="paged")`'
        )
    _check_stock(model, compat.REPLACED_METHODS[call.method])
    return call


def _check_stock(model: PreTrainedModel, methods: Iterable[str]) -> None:
    """Raises `ServedByGenerateError` if the model overrides one of these methods."""
    for method in methods:
        if not is_stock(model, method):
            raise ServedByGenerateError(
                f"{type(model).__name__} overrides `{method}`, which an engine does not call: call "
                '`model.generate(..., cache_implementation="paged")` instead'
            )


def _generate_keywords(
    model: Any,
    generation_config: GenerationConfig | Mapping[str, Any] | None,
) -> Keywords:
    """Returns the generation config as keyword arguments of `generate`. The options of a dict
    become arguments, even if they are `None`, since a missing option gets its default; but `None`
    is left out for options in `_RESTRICTED`, and for all options of a saved config
    (`is_saved_config`). Raises `ValueError` for options that an engine does not support."""
    check_generation_config(generation_config)
    keywords: Keywords = {"generation_config": generation_config}
    defaults = model.generation_config
    if isinstance(generation_config, Mapping):
        options = dict(generation_config)
        if is_saved_config(options):
            names = generation_options()
            options = {name: options[name] for name in names if options.get(name) is not None}
        elif options.get("max_length", 0) is None:
            if options.get("max_new_tokens", defaults.max_new_tokens) is None:
                raise ValueError("`max_length` is None: leave it out, or set `max_new_tokens`")
        keywords = {"generation_config": None, **options}
    if generation_config is not None:
        for name, (accepted_values, reason) in _RESTRICTED.items():
            value = _option_value(keywords, name)
            default = getattr(defaults, name, None)
            if value != default and value not in accepted_values:
                raise ValueError(f"`{name}` is {shown(value)}: {reason}")
    return {
        name: value
        for name, value in keywords.items()
        if value is not None or name not in _RESTRICTED
    }


def check_options(model: PreTrainedModel, generation_config: Any) -> None:
    """Raises `ValueError` for options that are invalid with the model's defaults."""
    keywords = _generate_keywords(model, generation_config)
    compat.prepare_generation_config(model, **keywords)


def _option_value(keywords: Keywords, name: str) -> Any:
    """Returns the value of an option, from the keyword arguments or their generation config; `None`
    if it is not set."""
    config_value = getattr(keywords["generation_config"], name, None)
    return keywords.get(name, config_value)


def _checked_mode(config: Any, assistant: Any = None) -> Any:
    """Returns transformers' generation mode; in `config`, turns off outputs that only `generate`
    returns. Raises `ValueError` for modes and options that an engine does not support."""
    mode = config.get_generation_mode(assistant)
    if mode.value not in _MODES:
        raise ValueError(
            f"the options ask for {mode.value!r}, but an engine supports only"
            f" {', '.join(_MODES)}: change the options, or call `generate`"
        )
    option = option_for_drafts(config, assistant)
    if option is not None and mode.value != _ASSISTED:
        raise ValueError(
            f"`{option}` works only with greedy search or sampling, not with beams: set `num_beams`"
            f" to 1, or leave `{option}` out"
        )
    if config.token_healing:
        raise ValueError("an engine has no `token_healing`: leave it out, or call `generate`")
    for name in (*_MODEL_OUTPUTS, *_LOOP_OUTPUTS):
        # the model's generation config may have turned this output on
        setattr(config, name, False)
    return mode


# by model, then by its pickled configs and options: prepared configs, pickled, in LRU order
_config_cache: weakref.WeakKeyDictionary[PreTrainedModel, dict[bytes | None, bytes]]
_config_cache = weakref.WeakKeyDictionary()
_MAX_CACHED_CONFIGS = 64


def _cached_config(model: Any, keywords: Keywords) -> GenerationConfig:
    """Returns the config that transformers prepares from these options; the caller may change it.
    Since transformers copies and checks about seventy attributes twice, prepared configs are
    cached: later requests with the same options get copies, as long as the model's configs are
    unchanged. The keys are pickled bytes, since transformers' checks depend on types, but
    `True == 1 == 1.0`."""
    configs = (model.generation_config, keywords["generation_config"])
    # the options of a subclass may depend on more than its attributes
    are_plain = all(config is None or type(config) is GenerationConfig for config in configs)
    key = None
    if are_plain and is_stock(model, compat.PREPARE_CONFIG):
        key = _pickled((keywords, model.config, model.generation_config))
    configs_of_model = _config_cache.setdefault(model, {})
    pickled_config = configs_of_model.pop(key, None)
    config: GenerationConfig
    if pickled_config is None:
        config, _ = compat.prepare_generation_config(model, **keywords)
        pickled_config = _pickled(config)
        if key is None or pickled_config is None:
            return config
    configs_of_model[key] = pickled_config
    while len(configs_of_model) > _MAX_CACHED_CONFIGS:
        configs_of_model.pop(next(iter(configs_of_model)), None)
    config = pickle.loads(pickled_config)
    return config


def _pickled(value: Any) -> bytes | None:
    """Returns the pickled value; `None` if it cannot be pickled."""
    try:
        return pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # objects in `value` may raise any error
        if is_interrupt(error):
            raise
        return None


def _loop_config(
    model: Any,
    ids: Tensor,
    keywords: Keywords,
    assistant_options: Keywords,
) -> Any:
    """Returns the config with which `generate` would call its loop for `(1, length)` ids. Raises
    `ValueError` for options that an engine does not support, and the errors of transformers'
    validation."""
    defaults = model.generation_config
    has_default_max = defaults.max_length is None and _option_value(keywords, "max_length") is None
    has_default_min = defaults.min_length is None and _option_value(keywords, "min_length") is None
    config = _cached_config(model, keywords)
    mode = _checked_mode(config, assistant_options.get("assistant_model"))
    compat.validate_generation_mode(model, mode, config, assistant_options)
    compat.prepare_special_tokens(model, config, True, device=ids.device, batch_size=1)
    length = ids.shape[1]
    config = compat.prepare_generated_length(
        model,
        config,
        has_default_max,
        has_default_min,
        "input_ids",
        length,
        ids,
    )
    compat.validate_generated_length(model, config, length, has_default_max)
    return config
