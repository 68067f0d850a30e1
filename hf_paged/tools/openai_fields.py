"""Fields of OpenAI's requests: their translation into arguments of `PagedEngine.add_request`, or
why one is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..batching.arguments import as_whole, check_stop_strings, shown

# arguments of `build_server`
CHAT, COMPLETION, RESPONSE = "chat_handler", "completion_handler", "response_handler"
MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_TOKENS = 128, 20, 2**31 - 1  # the first two are OpenAI's limits
# logits divided by less, or with more, may overflow
LEAST_TEMPERATURE, MAX_TEMPERATURE, MAX_BIAS = 1e-5, 1e5, 1e5
# the time to compile grows with the cube of the depth
MAX_SCHEMA_VALUES, MAX_SCHEMA_DEPTH = 2000, 50
MAX_SCHEMA_CHARACTERS = 1 << 16  # as JSON

# Options that each step of all requests waits for, or that take memory at once:
MAX_OPTION_VALUES, MAX_OPTION_DEPTH = 4096, 10  # in `generation_config` and `logit_bias`
MAX_OPTION_CHARACTERS = 1 << 17  # of `generation_config`: reading a longer text holds up streams
MAX_SEQUENCES = 256  # of several tokens, biased or banned: transformers looks for one after another
MAX_BEAM_TOKENS = 1 << 24  # of all beams and their candidates
MOST = {
    "num_beams": MAX_CHOICES,
    "max_matching_ngram_size": 32,
    "prompt_lookup_num_tokens": 128,
    "num_assistant_tokens": 128,
    "context_history_size": 1 << 16,
    "sampling_table_size": 1 << 20,
    "context_width": 32,
    "ngram_len": 32,
}
"""Options of a generation config that are numbers, and those of its `watermarking_config`: the
largest value."""
NUMBERS = "max_time", "length_penalty", "guidance_scale", "bias", "exponential_decay_length_penalty"
"""Further options that are numbers, or lists of them: transformers does not check them before it
computes with them."""

TEMPLATE_ARGUMENTS = {
    "conversation",
    "tools",
    "chat_template",
    "add_generation_prompt",
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "tokenizer_kwargs",
    "processor_kwargs",
    "text_kwargs",
    "images_kwargs",
    "videos_kwargs",
    "audio_kwargs",
    "common_kwargs",
}
"""Arguments of `apply_chat_template` that are the server's, and not variables of a template."""

_COMMON = {"model", "stream", "temperature", "top_p", "seed", "generation_config"}
SERVED_BY_APP = {
    CHAT: _COMMON
    | {
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "frequency_penalty",
        "logit_bias",
        "stop",
        "tools",
        "chat_template_kwargs",
    },
    COMPLETION: _COMMON | {"prompt", "max_tokens", "frequency_penalty", "stop", "suffix"},
    RESPONSE: _COMMON | {"input", "instructions", "max_output_tokens", "tools"},
}
"""Fields that the app of `transformers serve` reads, by endpoint."""

SERVED_HERE = {
    CHAT: {"n", "logprobs", "top_logprobs", "response_format", "stream_options", "tool_choice"},
    COMPLETION: {"n", "logprobs", "logit_bias", "stream_options"},
    RESPONSE: {"text", "tool_choice"},
}
"""Fields that the app ignores and the engine serves."""

TYPES: dict[str, tuple[Any, str]] = {
    "chat_template_kwargs": (dict, "an object"),
    "generation_config": (str, "JSON as text"),
    "instructions": (str, "text"),
    "logit_bias": (dict, "an object"),
    "messages": (list, "a list of messages"),
    "model": (str, "text"),
    "response_format": (dict, "an object"),
    "stop": ((str, list), "text, or a list of texts"),
    "stream": (bool, "true or false"),
    "stream_options": (dict, "an object"),
    "suffix": (str, "text"),
    "text": (dict, "an object"),
    "tools": (list, "a list of tools"),
}
RANGES = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
}
"""Of fields that are served: the type, in Python and in words; the range of numbers."""

_TEXT_PARTS = {"text", "input_text", "output_text"}
_PICTURE_PARTS = _TEXT_PARTS | {"image_url", "input_image", "video_url"}
PARTS = {
    "LLM": _TEXT_PARTS,
    "VLM": _PICTURE_PARTS,
    "MULTIMODAL": _PICTURE_PARTS | {"input_audio", "audio_url"},
}
"""By modality: the types of messages' parts that the app passes to the model; it drops others."""

HARMLESS = {
    "user",
    "safety_identifier",
    "metadata",
    "store",
    "service_tier",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
}
"""Fields that name, store, bill or speed up a request, and change no token of its answer."""

_TOKENS = "max_tokens", "max_completion_tokens", "max_output_tokens"
_PENALTY = (
    "the engine has no such penalty: pass `frequency_penalty`, which raises `repetition_penalty`"
)
_TOOLS = 'a tool is not forced here: pass "auto", and constrain the answer with `response_format`'
_TEXT = "the server answers in text: leave it out"
_KEPT = "the server keeps no answers: leave it out, and send the whole conversation"
_EFFORT = (
    "the chat template decides: pass `chat_template_kwargs` to /v1/chat/completions, if the"
    " template takes it"
)

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((), "the server has no such programs: leave it out"),
    "audio": ((), _TEXT),
    "background": ((False,), "the server answers while the client waits: leave it out"),
    "background_options": ((), "the server answers while the client waits: leave it out"),
    "best_of": ((1,), "all choices are returned: pass `n`"),
    "context_management": (([],), _KEPT),
    "conversation": ((), _KEPT),
    "echo": (
        (False,),
        "the answer holds the new tokens alone: put the prompt before it, on your side",
    ),
    "function_call": (("auto", "none"), "pass `tools` and `tool_choice`"),
    "functions": (([],), "pass `tools`"),
    "image": ((), _TEXT),
    "include": (([],), "responses hold nothing more: /v1/chat/completions serves `logprobs`"),
    "max_tool_calls": ((), "the server runs no tools: count the calls on your side"),
    "modalities": ((["text"],), _TEXT),
    "moderation": ((), "the server does not judge texts: leave it out"),
    "parallel_tool_calls": (
        (True,),
        "the number of calls is the model's: take the first one, on your side",
    ),
    "presence_penalty": ((0,), _PENALTY),
    "previous_response_id": ((), _KEPT),
    "prompt": ((), "the server stores no prompts: pass `input` and `instructions`"),
    "reasoning": (({},), _EFFORT),
    "reasoning_effort": ((), _EFFORT),
    "stream_options": (
        ({}, {"include_obfuscation": False}),
        "events of /v1/responses have no options: leave it out",
    ),
    "top_logprobs": ((0,), "/v1/chat/completions serves `logprobs` and `top_logprobs`"),
    "truncation": (("disabled",), "prompts are not cut: send fewer tokens"),
    "verbosity": (("medium",), "ask for short or long answers in a message"),
    "web_search_options": ((), "the server searches nothing: leave it out"),
}
"""By field: the values, beside null, that ask for nothing; what to do in place of any other
value."""


class Refused(Exception):
    """The request's body is invalid, or the request cannot be served; answered with status 400."""


@dataclass
class Translation:
    """A request's fields, in the terms of the engine."""

    body: dict[str, Any]  # the fields for the app
    num_choices: int = 1
    # options of its generation config, beside the app's
    generation: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of `PagedEngine.add_request`
    includes_usage: bool = False  # the stream ends with a chunk that holds the usage alone


def translate(endpoint: str, body: Mapping[str, Any]) -> Translation:
    """Translates the body of a request to `endpoint`, a key of `SERVED_HERE`. Raises `Refused` for
    fields and values that are not served."""
    asked = {name: value for name, value in body.items() if value is not None}
    _check_served(endpoint, asked)
    _check_values(asked)
    try:
        return _translation(endpoint, asked)
    except (RecursionError, TypeError, ValueError) as error:
        raise Refused(str(error)) from None


def _check_served(endpoint: str, asked: Mapping[str, Any]) -> None:
    served = SERVED_BY_APP[endpoint] | SERVED_HERE[endpoint] | HARMLESS
    for name in asked.keys() - served:
        if name not in REFUSED:
            raise Refused(f"`{name}` is not among the fields that are served: leave it out")
        harmless, remedy = REFUSED[name]
        if asked[name] not in harmless:
            raise Refused(f"`{name}` is {shown(asked[name])}: {remedy}")


def _check_values(asked: Mapping[str, Any]) -> None:
    for name, (kind, words) in TYPES.items():
        if name in asked and not isinstance(asked[name], kind):
            raise Refused(f"`{name}` is {shown(asked[name])}: it must be {words}")
    for name, (low, high) in RANGES.items():
        value = asked.get(name, low)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise Refused(
                f"`{name}` is {shown(value)}: it must be a number from {low:g} to {high:g}"
            )


def _translation(endpoint: str, asked: dict[str, Any]) -> Translation:
    served_by_app = SERVED_BY_APP[endpoint]
    to_app = {name: value for name, value in asked.items() if name in served_by_app}
    made = Translation(to_app)
    text = to_app.get("generation_config") or "{}"
    if len(text) > MAX_OPTION_CHARACTERS:
        raise Refused(
            f"`generation_config` has {len(text)} characters: it may have at most"
            f" {MAX_OPTION_CHARACTERS}"
        )
    config = json.loads(text)
    if not isinstance(config, dict):
        raise Refused(f"`generation_config` is {shown(config)}: it must be an object, as JSON text")
    biases = asked.get("logit_bias")
    _check_size("`generation_config`", config, MAX_OPTION_VALUES, MAX_OPTION_DEPTH)
    _check_size("`logit_bias`", biases, MAX_OPTION_VALUES, MAX_OPTION_DEPTH)
    template_arguments = to_app.get("chat_template_kwargs", {})
    refused = TEMPLATE_ARGUMENTS & template_arguments.keys()
    if refused:
        names = ", ".join(sorted(refused))
        raise Refused(f"`chat_template_kwargs` holds {names}: pass only the template's variables")
    for name in _TOKENS:
        if name in to_app:
            as_whole(name, to_app[name], 1, MAX_TOKENS, after=" (tokens)")
    to_app.get("suffix", "").encode()  # raises `UnicodeEncodeError` for half a surrogate pair
    if "seed" in to_app:
        as_whole("seed", to_app["seed"], -(2**63), 2**64 - 1)
    if to_app.get("stop") == []:
        del to_app["stop"]
    if _is_sampled(to_app, config):
        made.generation["do_sample"] = True
    num_sequences = config.pop("num_return_sequences", None)
    made.num_choices = _num_choices(endpoint, asked, num_sequences)
    if num_sequences is not None:  # the app answers for each choice by itself
        to_app["generation_config"] = json.dumps(config)
    if endpoint == COMPLETION and "logit_bias" in asked:
        sequence_bias = {(int(token),): bias for token, bias in asked["logit_bias"].items()}
        made.generation["sequence_bias"] = sequence_bias
    if endpoint != RESPONSE:
        made.options |= _logprobs(endpoint, asked)
        stream_options = asked.get("stream_options", {})
        made.includes_usage = bool(stream_options.get("include_usage"))
    schema = _schema(endpoint, asked)
    if schema is not None:
        _check_size("the JSON schema", schema, MAX_SCHEMA_VALUES, MAX_SCHEMA_DEPTH)
        length = len(json.dumps(schema))
        if length > MAX_SCHEMA_CHARACTERS:
            raise Refused(
                f"the JSON schema has {length} characters: it may have at most"
                f" {MAX_SCHEMA_CHARACTERS}"
            )
        made.options["schema"] = schema
    tool_choice = asked.get("tool_choice", "auto")
    if endpoint != COMPLETION and tool_choice != "auto":
        if tool_choice != "none":
            raise Refused(f"`tool_choice` is {shown(tool_choice)}: {_TOOLS}")
        to_app.pop("tools", None)
    return made


def _is_sampled(body: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """Whether the temperature asks for samples; the app only sets it, and a greedy model would not
    read it."""
    temperature = body.get("temperature")
    is_positive = isinstance(temperature, (int, float)) and temperature > 0
    return is_positive and "do_sample" not in config


def _num_choices(endpoint: str, asked: Mapping[str, Any], num_sequences: Any) -> int:
    """The number of choices: `n`, or `num_return_sequences` of `generation_config`."""
    count = as_whole("n", asked.get("n", 1), 1, MAX_CHOICES, after=" (choices)")
    if num_sequences is None:
        return count
    most = 1 if endpoint == RESPONSE else MAX_CHOICES
    sequences = as_whole("num_return_sequences", num_sequences, 1, most, after=" (choices)")
    if asked.get("n", sequences) != sequences:
        raise Refused(f"`n` is {count} and `num_return_sequences` is {sequences}: leave one out")
    return sequences


def _mapping(asked: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = asked.get(name) or {}
    if not isinstance(value, Mapping):
        raise Refused(f"`{name}` is {shown(value)}: it must be an object")
    return value


def _logprobs(endpoint: str, asked: Mapping[str, Any]) -> dict[str, Any]:
    if endpoint == COMPLETION:  # a number of alternatives
        if "logprobs" not in asked:
            return {}
        count = as_whole(
            "logprobs",
            asked["logprobs"],
            0,
            MAX_TOP_LOGPROBS,
            after=" (alternatives of a token)",
        )
        return {"return_logprobs": True, "top_logprobs": count}
    count = as_whole(
        "top_logprobs",
        asked.get("top_logprobs", 0),
        0,
        MAX_TOP_LOGPROBS,
        after=" (alternatives)",
    )
    has_logprobs = asked.get("logprobs", False)
    if not isinstance(has_logprobs, bool):
        raise Refused(
            f"`logprobs` is {shown(has_logprobs)}: it must be true or false; `top_logprobs` is the"
            " number"
        )
    if count and not has_logprobs:
        raise Refused(f"`top_logprobs` is {count}: it goes with `logprobs`, which must be true")
    if not has_logprobs:
        return {}
    return {"return_logprobs": True, "top_logprobs": count}


def _schema(endpoint: str, asked: Mapping[str, Any]) -> Any:
    """The JSON schema that the answer must follow; `None` without one."""
    name = "response_format" if endpoint == CHAT else "text"
    form: Any = _mapping(asked, name)
    if name == "text":
        verbosity = form.get("verbosity", "medium")
        if verbosity != "medium":
            _, remedy = REFUSED["verbosity"]
            raise Refused(f"`text.verbosity` is {shown(verbosity)}: {remedy}")
        form = _mapping(form, "format")
    kind = form.get("type", "text")
    if kind == "text":
        return None
    if kind == "json_object":
        return {"type": "object"}
    if kind != "json_schema":
        raise Refused(
            f'the type of `{name}` is {shown(kind)}: it must be "text", "json_object" or'
            ' "json_schema"'
        )
    if name == "response_format":
        form = _mapping(form, "json_schema")
    schema = form.get("schema")
    if not isinstance(schema, Mapping):
        raise Refused(
            f"the `schema` in `{name}` is {shown(schema)}: it must be a JSON schema, an object"
        )
    return dict(schema)


def _check_size(what: str, value: Any, most_values: int, most_levels: int) -> None:
    """Raises `Refused` for a JSON value with more values or levels."""
    level = [value]
    num_values = 0
    depth = 0
    while level:
        num_values = num_values + len(level)
        depth = depth + 1
        if num_values > most_values or depth > most_levels:
            raise Refused(
                f"{what} has more than {most_values} values or {most_levels} levels: shorten it"
            )
        next_level: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                next_level += value.values()
            elif isinstance(value, list):
                next_level += value
        level = next_level


def check_parts(modality: str, body: Mapping[str, Any]) -> None:
    """Raises `Refused` for messages with parts that a model of this modality does not read."""
    messages = body.get("messages") or body.get("input")
    read = PARTS.get(modality, set())
    if not read or not isinstance(messages, list):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind not in read:
                raise Refused(
                    f"a message has a part of type {shown(kind)}, and this model reads"
                    f" {', '.join(sorted(read))}: leave it out, or ask another model"
                )


def check_extremes(options: Mapping[str, Any]) -> None:
    """Raises `Refused` for options with which logits overflow, or which would make all requests
    wait."""
    temperature = options.get("temperature")
    if isinstance(temperature, (int, float)) and 0 < temperature < LEAST_TEMPERATURE:
        raise Refused(
            f"`temperature` is {temperature}: it must be 0, for the most probable tokens, or from"
            f" {LEAST_TEMPERATURE:g}"
        )
    biases = options.get("sequence_bias")
    bias_values = biases.values() if isinstance(biases, Mapping) else ()
    for bias in bias_values:
        if isinstance(bias, (int, float)) and not bias <= MAX_BIAS:
            raise Refused(
                f"`logit_bias` holds {shown(bias)}: a bias must be a number up to {MAX_BIAS:g}"
            )
    mark = options.get("watermarking_config") or {}
    if not isinstance(mark, Mapping):
        mark = vars(mark)
    numbers = {**options, **mark}
    for name, most in MOST.items():
        value = numbers.get(name)
        if isinstance(value, (int, float)) and not value <= most:
            raise Refused(f"`{name}` is {shown(value)}: it must be a whole number up to {most}")
    for name in NUMBERS:
        value = numbers.get(name)
        parts = value if isinstance(value, (list, tuple)) else [value]
        for part in parts:
            if not isinstance(part, (int, float, type(None))):
                raise Refused(f"`{name}` holds {shown(part)}: it must be a number")
    pairs = biases or ()
    if isinstance(biases, Mapping):
        pairs = list(biases.items())
    firsts = [pair[0] for pair in pairs if isinstance(pair, (list, tuple)) and pair]
    bad_words = options.get("bad_words_ids") or ()
    for sequences in (firsts, bad_words):
        lists = [ids for ids in sequences if isinstance(ids, (list, tuple))]
        several = [ids for ids in lists if len(ids) > 1]
        if len(several) > MAX_SEQUENCES:
            raise Refused(
                f"`sequence_bias` or `bad_words_ids` has {len(several)} sequences of several"
                f" tokens: pass at most {MAX_SEQUENCES}"
            )
    stops = options.get("stop_strings")
    if stops is not None:
        try:
            check_stop_strings(stops, "stop")
        except ValueError as error:
            raise Refused(str(error)) from None
        texts = [stops] if isinstance(stops, str) else stops
        if not all(texts):
            raise Refused("`stop` holds an empty text, which is found at once: leave it out")


def check_beams(config: Any, options: Mapping[str, Any]) -> None:
    """Raises `Refused` if beams would take much memory: it is reserved for all their tokens and
    candidates at once."""
    beams = options.get("num_beams")
    num_tokens = config.max_new_tokens
    ends = config.eos_token_id
    if not isinstance(beams, int) or beams < 2 or not isinstance(num_tokens, int):
        return
    num_ends = len(ends) if isinstance(ends, (list, tuple)) else 1
    num_candidates = beams * (1 + num_ends)
    if num_candidates * num_tokens > MAX_BEAM_TOKENS:
        raise Refused(
            f"`num_beams` is {beams} for {num_tokens} new tokens, with {num_candidates} candidates"
            f" a step: candidates and tokens together may be at most {MAX_BEAM_TOKENS}. Lower"
            " `max_tokens` or `num_beams`"
        )


def check_allows_tokens(model: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Raises `Refused` if a request with this generation config, and these options over it, can
    have no first token, or not as many tokens as it must have."""
    least = options.get("min_new_tokens") or 0
    num_tokens = config.max_new_tokens
    if num_tokens is not None and least > num_tokens:
        raise Refused(
            f"`min_new_tokens` is {least}, above the limit of {num_tokens} new tokens: lower it, or"
            " raise that"
        )
    suppressed = options.get("suppress_tokens") or ()
    suppressed_first = options.get("begin_suppress_tokens") or ()
    bad_words = options.get("bad_words_ids") or ()
    banned = {*suppressed, *suppressed_first}
    banned.update(ids[0] for ids in bad_words if len(ids) == 1)
    biases = options.get("sequence_bias") or {}
    pairs = biases.items() if isinstance(biases, Mapping) else biases
    size = model.config.get_text_config(decoder=True).vocab_size
    named = {
        "logit_bias": [ids for ids, _ in pairs],
        "bad_words_ids": bad_words,
    }
    for name in ("forced_bos_token_id", "forced_eos_token_id"):
        ids = options.get(name)
        if ids is None:
            ids = []
        elif not isinstance(ids, (list, tuple)):
            ids = [ids]
        named[name] = [ids]
    for name, sequences in named.items():
        tokens = [token for ids in sequences for token in ids]
        unknown = [token for token in tokens if not 0 <= token < size]
        if unknown:
            raise Refused(
                f"`{name}` names the token {unknown[0]}: the model's tokens are 0 to {size - 1}"
            )
    banned.update(ids[0] for ids, bias in pairs if len(ids) == 1 and bias == float("-inf"))
    if least:
        ends = config.eos_token_id
        if ends is None:
            ends = model.generation_config.eos_token_id
        if isinstance(ends, int):
            ends = [ends]
        banned.update(ends or ())
    if len(banned) >= size and banned.issuperset(range(size)):
        raise Refused(
            "`bad_words_ids`, `suppress_tokens`, `logit_bias` and `min_new_tokens` together allow"
            " no token: allow one"
        )
