"""Translates the fields of OpenAI's requests into arguments of `PagedEngine.add_request`, or
refuses them with a reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..batching.arguments import as_whole, shown

# arguments of `build_server`
CHAT, COMPLETION, RESPONSE = "chat_handler", "completion_handler", "response_handler"
MAX_CHOICES, MAX_TOP_LOGPROBS, MAX_TOKENS = 128, 20, 2**31 - 1  # the first two are OpenAI's limits
MAX_TEMPERATURE = 1e5
# the time to compile a schema grows with the cube of its depth
MAX_SCHEMA_VALUES, MAX_SCHEMA_DEPTH = 2000, 50
MAX_SCHEMA_CHARACTERS = 1 << 16  # as JSON

# `openai_limits.py` has further limits, on options that would delay the steps of all requests.
MAX_OPTION_VALUES, MAX_OPTION_DEPTH = 4096, 10  # in `generation_config` and `logit_bias`
MAX_OPTION_CHARACTERS = 1 << 17  # of `generation_config`: parsing a longer text delays streams

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
"""Arguments of `apply_chat_template` that only the server may set; others are variables of a
template."""

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
"""The type of served fields, in Python and in words, and the range of numbers."""

_TEXT_PARTS = {"text", "input_text", "output_text"}
_PICTURE_PARTS = _TEXT_PARTS | {"image_url", "input_image", "video_url"}
PARTS = {
    "LLM": _TEXT_PARTS,
    "VLM": _PICTURE_PARTS,
    "MULTIMODAL": _PICTURE_PARTS | {"input_audio", "audio_url"},
}
"""By modality: the types of message parts that the app passes to the model; it drops others."""

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
"""Fields that name, store, bill or speed up a request, but change no token of its answer."""

_TOKENS = "max_tokens", "max_completion_tokens", "max_output_tokens"
_PENALTY = (
    "the engine has no such penalty: pass `frequency_penalty`, which raises `repetition_penalty`"
)
_TOOLS = 'a tool is not forced here: pass "auto", and constrain the answer with `response_format`'
_TEXT = "the server answers in text: leave it out"
_STATELESS = "the server keeps no answers: leave it out, and send the whole conversation"
_EFFORT = (
    "the chat template decides: pass `chat_template_kwargs` to /v1/chat/completions, if the"
    " template takes it"
)

REFUSED = {
    "access_programs": "the server has no such programs: leave it out",
    "audio": _TEXT,
    "background": "the server answers while the client waits: leave it out",
    "background_options": "the server answers while the client waits: leave it out",
    "best_of": "all choices are returned: pass `n`",
    "context_management": _STATELESS,
    "conversation": _STATELESS,
    "echo": "the answer holds the new tokens alone: put the prompt before it, on your side",
    "function_call": "pass `tools` and `tool_choice`",
    "functions": "pass `tools`",
    "image": _TEXT,
    "include": "responses hold nothing more: /v1/chat/completions serves `logprobs`",
    "max_tool_calls": "the server runs no tools: count the calls on your side",
    "modalities": _TEXT,
    "moderation": "the server does not judge texts: leave it out",
    "parallel_tool_calls": "the number of calls is the model's: take the first one, on your side",
    "presence_penalty": _PENALTY,
    "previous_response_id": _STATELESS,
    "prompt": "the server stores no prompts: pass `input` and `instructions`",
    "reasoning": _EFFORT,
    "reasoning_effort": _EFFORT,
    "stream_options": "events of /v1/responses have no options: leave it out",
    "top_logprobs": "/v1/chat/completions serves `logprobs` and `top_logprobs`",
    "truncation": "prompts are not cut: send fewer tokens",
    "verbosity": "ask for short or long answers in a message",
    "web_search_options": "the server searches nothing: leave it out",
}
"""The refused fields, and what to do instead."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "best_of": (1,),
    "context_management": ([],),
    "echo": (False,),
    "function_call": ("auto", "none"),
    "functions": ([],),
    "include": ([],),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "presence_penalty": (0,),
    "reasoning": ({},),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
    "verbosity": ("medium",),
}
"""Values of refused fields, beside null, that request nothing and therefore pass."""


class Refused(Exception):
    """The request's body is invalid, or the request cannot be served. The answer has status 400."""


@dataclass
class Translation:
    """A request's fields as arguments of the engine."""

    body: dict[str, Any]  # the fields for the app
    num_choices: int = 1
    # options of its generation config, beside those that the app sets
    generation: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of `PagedEngine.add_request`
    includes_usage: bool = False  # whether the stream ends with a chunk that has only the usage


def translate(endpoint: str, body: Mapping[str, Any]) -> Translation:
    """Translates the body of a request to `endpoint`, a key of `SERVED_HERE`. Raises `Refused` for
    fields and values that are not served."""
    requested = {name: value for name, value in body.items() if value is not None}
    _check_served(endpoint, requested)
    try:
        _check_values(requested)
        return _translation(endpoint, requested)
    except (RecursionError, TypeError, ValueError) as error:
        raise Refused(str(error)) from None


def _check_served(endpoint: str, requested: Mapping[str, Any]) -> None:
    served = SERVED_BY_APP[endpoint] | SERVED_HERE[endpoint] | HARMLESS
    for name in requested.keys() - served:
        if name not in REFUSED:
            raise Refused(f"`{name}` is not among the fields that are served: leave it out")
        if requested[name] not in NEUTRAL.get(name, ()):
            raise Refused(f"`{name}` is {shown(requested[name])}: {REFUSED[name]}")


def _check_values(requested: Mapping[str, Any]) -> None:
    for name, (kind, words) in TYPES.items():
        if name in requested and not isinstance(requested[name], kind):
            raise Refused(f"`{name}` is {shown(requested[name])}: it must be {words}")
    for name, (low, high) in RANGES.items():
        value = requested.get(name, low)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise Refused(
                f"`{name}` is {shown(value)}: it must be a number from {low:g} to {high:g}"
            )
    for name in _TOKENS:
        as_whole(name, requested.get(name, 1), 1, MAX_TOKENS, after=" (tokens)")
    as_whole("seed", requested.get("seed", 0), -(2**63), 2**64 - 1)
    requested.get("suffix", "").encode()  # raises `UnicodeEncodeError` for half a surrogate pair


def _translation(endpoint: str, requested: dict[str, Any]) -> Translation:
    served_by_app = SERVED_BY_APP[endpoint]
    to_app = {name: value for name, value in requested.items() if name in served_by_app}
    translation = Translation(to_app)
    config = _generation_config(to_app)
    _check_size("`logit_bias`", requested.get("logit_bias"), MAX_OPTION_VALUES, MAX_OPTION_DEPTH)
    template_arguments = to_app.get("chat_template_kwargs", {})
    refused = TEMPLATE_ARGUMENTS & template_arguments.keys()
    if refused:
        names = ", ".join(sorted(refused))
        raise Refused(f"`chat_template_kwargs` holds {names}: pass only the template's variables")
    if to_app.get("stop") == []:
        del to_app["stop"]
    # the app sets only the temperature, which greedy decoding would ignore
    if to_app.get("temperature", 0) > 0 and "do_sample" not in config:
        translation.generation["do_sample"] = True
    num_sequences = config.pop("num_return_sequences", None)
    translation.num_choices = _num_choices(endpoint, requested, num_sequences)
    if num_sequences is not None:  # the app answers each choice separately
        to_app["generation_config"] = json.dumps(config)
    if endpoint == COMPLETION and "logit_bias" in requested:
        sequence_bias = {(int(token),): bias for token, bias in requested["logit_bias"].items()}
        translation.generation["sequence_bias"] = sequence_bias
    if endpoint != RESPONSE:
        translation.options |= _logprobs(endpoint, requested)
        stream_options = requested.get("stream_options", {})
        translation.includes_usage = bool(stream_options.get("include_usage"))
    schema = _schema(endpoint, requested)
    if schema is not None:
        translation.options["schema"] = schema
    tool_choice = requested.get("tool_choice", "auto")
    if endpoint != COMPLETION and tool_choice != "auto":
        if tool_choice != "none":
            raise Refused(f"`tool_choice` is {shown(tool_choice)}: {_TOOLS}")
        to_app.pop("tools", None)
    return translation


def _generation_config(to_app: Mapping[str, Any]) -> dict[str, Any]:
    """The options in the field `generation_config`."""
    text = to_app.get("generation_config") or "{}"
    _check_length("`generation_config`", text, MAX_OPTION_CHARACTERS)
    config = json.loads(text)
    if not isinstance(config, dict):
        raise Refused(f"`generation_config` is {shown(config)}: it must be an object, as JSON text")
    _check_size("`generation_config`", config, MAX_OPTION_VALUES, MAX_OPTION_DEPTH)
    return config


def _num_choices(endpoint: str, requested: Mapping[str, Any], num_sequences: Any) -> int:
    """The number of choices: `n`, or `num_return_sequences` of `generation_config`."""
    count = as_whole("n", requested.get("n", 1), 1, MAX_CHOICES, after=" (choices)")
    if num_sequences is None:
        return count
    limit = 1 if endpoint == RESPONSE else MAX_CHOICES
    sequences = as_whole("num_return_sequences", num_sequences, 1, limit, after=" (choices)")
    if requested.get("n", sequences) != sequences:
        raise Refused(f"`n` is {count} and `num_return_sequences` is {sequences}: leave one out")
    return sequences


def _logprobs(endpoint: str, requested: Mapping[str, Any]) -> dict[str, Any]:
    name = "top_logprobs"
    unit = " (alternatives)"
    has_logprobs = requested.get("logprobs", False)
    if endpoint == COMPLETION:  # a number of alternatives
        name = "logprobs"
        unit = " (alternatives of a token)"
        has_logprobs = name in requested
    count = as_whole(name, requested.get(name, 0), 0, MAX_TOP_LOGPROBS, after=unit)
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


def _schema(endpoint: str, requested: Mapping[str, Any]) -> Any:
    """The JSON schema that the answer must follow; `None` without one."""

    def part(name: str) -> Mapping[str, Any]:
        value = outer.get(name) or {}
        if not isinstance(value, Mapping):
            raise Refused(f"`{name}` is {shown(value)}: it must be an object")
        return value

    name = "response_format" if endpoint == CHAT else "text"
    outer = form = requested.get(name, {})
    if endpoint == RESPONSE:
        verbosity = outer.get("verbosity", "medium")
        if verbosity != "medium":
            raise Refused(f"`text.verbosity` is {shown(verbosity)}: {REFUSED['verbosity']}")
        form = part("format")
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
    if endpoint == CHAT:
        form = part("json_schema")
    schema = form.get("schema")
    if not isinstance(schema, Mapping):
        raise Refused(
            f"the `schema` in `{name}` is {shown(schema)}: it must be a JSON schema, an object"
        )
    _check_size("the JSON schema", schema, MAX_SCHEMA_VALUES, MAX_SCHEMA_DEPTH)
    _check_length("the JSON schema", json.dumps(schema), MAX_SCHEMA_CHARACTERS)
    return schema


def _check_length(name: str, text: str, max_characters: int) -> None:
    if len(text) > max_characters:
        raise Refused(f"{name} has {len(text)} characters: it may have at most {max_characters}")


def _check_size(name: str, value: Any, max_values: int, max_levels: int) -> None:
    """Raises `Refused` for a JSON value with more values or levels."""
    level = [value]
    num_values = 0
    depth = 0
    while level:
        num_values += len(level)
        depth += 1
        if num_values > max_values or depth > max_levels:
            raise Refused(
                f"{name} has more than {max_values} values or {max_levels} levels: shorten it"
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
    readable = PARTS.get(modality, set())
    if not readable or not isinstance(messages, list):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for part in content:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(kind, str) and kind not in readable:
                raise Refused(
                    f"a message has a part of type {shown(kind)}, and this model reads"
                    f" {', '.join(sorted(readable))}: leave it out, or ask another model"
                )
