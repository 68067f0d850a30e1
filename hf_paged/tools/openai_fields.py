"""Translates the fields of requests in OpenAI's format to arguments of `PagedEngine.add_request`,
or refuses them with a reason."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ..batching.arguments import as_whole, shown

# the endpoints, named as the arguments of `build_server`
CHAT, COMPLETION, RESPONSE = "chat_handler", "completion_handler", "response_handler"
MAX_CHOICES, MAX_TOP_LOGPROBS = 128, 20  # OpenAI's limits
MAX_TOKENS = 2**31 - 1
MAX_TEMPERATURE = 1e5
# the time to compile a schema grows with the cube of its depth
MAX_SCHEMA_VALUES, MAX_SCHEMA_DEPTH = 2000, 50
MAX_SCHEMA_CHARACTERS = 1 << 16  # as JSON

# `openai_limits.py` has the limits on options that would delay the steps of all requests
MAX_OPTION_VALUES, MAX_OPTION_DEPTH = 4096, 10  # of `generation_config` and `logit_bias`
# of `generation_config`: parsing a longer text would delay streams
MAX_OPTION_CHARACTERS = 1 << 17

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
"""Arguments of `apply_chat_template` that clients may not set. Other arguments are variables of the
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
"""Fields that the app ignores and this package serves, by endpoint."""

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
"""The types of served fields, in Python and in words; numbers are checked separately."""

RANGES = {
    "temperature": (0, MAX_TEMPERATURE),
    "top_p": (0, 1),
    "frequency_penalty": (-2, 2),
}
"""The smallest and largest value of numeric fields."""

_TEXT_PARTS = {"text", "input_text", "output_text"}
_PICTURE_PARTS = _TEXT_PARTS | {"image_url", "input_image", "video_url"}
READABLE_PARTS = {
    "LLM": _TEXT_PARTS,
    "VLM": _PICTURE_PARTS,
    "MULTIMODAL": _PICTURE_PARTS | {"input_audio", "audio_url"},
}
"""The types of message parts that the app passes to the model, by modality. It drops all others."""

IGNORED_FIELDS = {
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

_TOKEN_LIMITS = "max_tokens", "max_completion_tokens", "max_output_tokens"
_PENALTY = (
    "the engine has no such penalty: pass `frequency_penalty`, which raises `repetition_penalty`"
)
_TOOLS = (
    'the server cannot force a tool call: pass "auto", and constrain the answer with'
    " `response_format`"
)
_TEXT = "the server answers in text only: leave it out"
_STATELESS = "the server stores no answers: leave it out, and send the whole conversation"
_EFFORT = (
    "it depends on the chat template: if the template has a variable for it, pass"
    " `chat_template_kwargs` to /v1/chat/completions"
)

REFUSED_FIELDS = {
    "access_programs": "the server has no access programs: leave it out",
    "audio": _TEXT,
    "background": "the server answers while the client waits: leave it out",
    "background_options": "the server answers while the client waits: leave it out",
    "best_of": "all choices are returned: pass `n`",
    "context_management": _STATELESS,
    "conversation": _STATELESS,
    "echo": "the answer has only the new text: put the prompt before it in your code",
    "function_call": "pass `tools` and `tool_choice`",
    "functions": "pass `tools`",
    "image": _TEXT,
    "include": "responses include nothing more: /v1/chat/completions serves `logprobs`",
    "max_tool_calls": "the server runs no tools: count the calls in your code",
    "modalities": _TEXT,
    "moderation": "the server does not moderate texts: leave it out",
    "parallel_tool_calls": "the model chooses the number of calls: use only the first one",
    "presence_penalty": _PENALTY,
    "previous_response_id": _STATELESS,
    "prompt": "the server stores no prompts: send the text itself, as a message",
    "reasoning": _EFFORT,
    "reasoning_effort": _EFFORT,
    "stream_options": "/v1/responses has no options for its events: leave it out",
    "top_logprobs": "only /v1/chat/completions serves `top_logprobs`: use it instead",
    "truncation": "the server does not truncate prompts: send fewer tokens",
    "verbosity": "ask for short or long answers in a message",
    "web_search_options": "the server does not search the web: leave it out",
}
"""The refused fields, each with the reason or the remedy."""

NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
"""Values of refused fields that are accepted, as null is, because they request nothing."""


class RefusedError(Exception):
    """A request is invalid or cannot be served. The answer to it has status 400."""


@dataclass
class Translation:
    """A request's fields, as arguments for the app and for the engine."""

    body: dict[str, Any]  # the fields that the app reads
    num_choices: int = 1
    # options of the generation config, in addition to those that the app sets
    generation_options: dict[str, Any] = field(default_factory=dict)
    options: dict[str, Any] = field(default_factory=dict)  # arguments of `PagedEngine.add_request`
    should_send_usage: bool = False  # whether a stream ends with a chunk of usage without choices


def translate(endpoint: str, body: Mapping[str, Any]) -> Translation:
    """Translates the body of a request. `endpoint`: a key of `SERVED_HERE`. Raises `RefusedError`
    for fields and values that are not served."""
    requested = {name: value for name, value in body.items() if value is not None}
    _check_served(endpoint, requested)
    try:
        _check_values(requested)
        return _make_translation(endpoint, requested)
    except (RecursionError, TypeError, ValueError) as error:
        raise RefusedError(str(error)) from None


def _check_served(endpoint: str, requested: Mapping[str, Any]) -> None:
    served_fields = SERVED_BY_APP[endpoint] | SERVED_HERE[endpoint] | IGNORED_FIELDS
    for name in requested.keys() - served_fields:
        if name not in REFUSED_FIELDS:
            raise RefusedError(f"`{name}` is not a field that the server supports: leave it out")
        if requested[name] not in NEUTRAL_VALUES.get(name, ()):
            raise RefusedError(f"`{name}` is {shown(requested[name])}: {REFUSED_FIELDS[name]}")


def _check_values(requested: Mapping[str, Any]) -> None:
    for name, (types, description) in TYPES.items():
        if name in requested and not isinstance(requested[name], types):
            raise RefusedError(f"`{name}` is {shown(requested[name])}: it must be {description}")
    for name, (low, high) in RANGES.items():
        value = requested.get(name, low)
        is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not is_number or not low <= value <= high:
            raise RefusedError(
                f"`{name}` is {shown(value)}: it must be a number from {low:g} to {high:g}"
            )
    for name in _TOKEN_LIMITS:
        as_whole(name, requested.get(name, 1), 1, MAX_TOKENS, after=" (tokens)")
    as_whole("seed", requested.get("seed", 0), -(2**63), 2**64 - 1)
    requested.get("suffix", "").encode()  # raises `UnicodeEncodeError` for half a surrogate pair


def _make_translation(endpoint: str, requested: dict[str, Any]) -> Translation:
    served_by_app = SERVED_BY_APP[endpoint]
    app_fields = {name: value for name, value in requested.items() if name in served_by_app}
    generation_options: dict[str, Any] = {}
    config = _parse_generation_config(app_fields)
    _check_size("`logit_bias`", requested.get("logit_bias"), MAX_OPTION_VALUES, MAX_OPTION_DEPTH)
    template_arguments = app_fields.get("chat_template_kwargs", {})
    refused_names = TEMPLATE_ARGUMENTS & template_arguments.keys()
    if refused_names:
        names = ", ".join(sorted(refused_names))
        raise RefusedError(
            f"`chat_template_kwargs` has {names}: pass only the template's variables"
        )
    if app_fields.get("stop") == []:
        del app_fields["stop"]
    # the app sets only the temperature, which greedy decoding would ignore
    if app_fields.get("temperature", 0) > 0 and "do_sample" not in config:
        generation_options["do_sample"] = True
    num_sequences = config.pop("num_return_sequences", None)
    num_choices = _count_choices(endpoint, requested, num_sequences)
    if num_sequences is not None:
        # without `num_return_sequences`, since the app answers each choice separately
        app_fields["generation_config"] = json.dumps(config)
    if endpoint == COMPLETION and "logit_bias" in requested:
        sequence_bias = {(int(token),): bias for token, bias in requested["logit_bias"].items()}
        generation_options["sequence_bias"] = sequence_bias
    options: dict[str, Any] = {}
    should_send_usage = False
    if endpoint != RESPONSE:
        options = _logprobs_options(endpoint, requested)
        stream_options = requested.get("stream_options", {})
        should_send_usage = bool(stream_options.get("include_usage"))
    schema = _find_schema(endpoint, requested)
    if schema is not None:
        options["schema"] = schema
    tool_choice = requested.get("tool_choice", "auto")
    if endpoint != COMPLETION and tool_choice != "auto":
        if tool_choice != "none":
            raise RefusedError(f"`tool_choice` is {shown(tool_choice)}: {_TOOLS}")
        app_fields.pop("tools", None)
    return Translation(app_fields, num_choices, generation_options, options, should_send_usage)


def _parse_generation_config(app_fields: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options in the field `generation_config`."""
    text = app_fields.get("generation_config") or "{}"
    _check_length("`generation_config`", text, MAX_OPTION_CHARACTERS)
    config = json.loads(text)
    if not isinstance(config, dict):
        raise RefusedError(
            f"`generation_config` is {shown(config)}: it must be an object, as JSON text"
        )
    _check_size("`generation_config`", config, MAX_OPTION_VALUES, MAX_OPTION_DEPTH)
    return config


def _count_choices(endpoint: str, requested: Mapping[str, Any], num_sequences: Any) -> int:
    """Returns the number of choices. If both `n` and `num_return_sequences` in `generation_config`
    set it, they must agree."""
    n = as_whole("n", requested.get("n", 1), 1, MAX_CHOICES, after=" (choices)")
    if num_sequences is None:
        return n
    limit = 1 if endpoint == RESPONSE else MAX_CHOICES
    num_choices = as_whole("num_return_sequences", num_sequences, 1, limit, after=" (choices)")
    if requested.get("n", num_choices) != num_choices:
        raise RefusedError(
            f"`n` is {n} and `num_return_sequences` is {num_choices}: leave one of them out"
        )
    return num_choices


def _logprobs_options(endpoint: str, requested: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the engine's options for the requested log-probabilities."""
    name = "top_logprobs"
    unit = " (alternatives)"
    has_logprobs = requested.get("logprobs", False)
    if endpoint == COMPLETION:  # here `logprobs` is the number of alternatives
        name = "logprobs"
        unit = " (alternatives per token)"
        has_logprobs = name in requested
    num_alternatives = as_whole(name, requested.get(name, 0), 0, MAX_TOP_LOGPROBS, after=unit)
    if not isinstance(has_logprobs, bool):
        raise RefusedError(
            f"`logprobs` is {shown(has_logprobs)}: it must be true or false; pass the number of"
            " alternatives as `top_logprobs`"
        )
    if num_alternatives and not has_logprobs:
        raise RefusedError(
            f"`top_logprobs` is {num_alternatives}, but `logprobs` is not true: pass"
            " `logprobs: true`"
        )
    if not has_logprobs:
        return {}
    return {"return_logprobs": True, "top_logprobs": num_alternatives}


def _find_schema(endpoint: str, requested: Mapping[str, Any]) -> Any:
    """Returns the JSON schema that the answer must follow, or `None`."""

    def get_object(key: str) -> Mapping[str, Any]:
        value = field_value.get(key) or {}
        if not isinstance(value, Mapping):
            raise RefusedError(f"`{key}` is {shown(value)}: it must be an object")
        return value

    field_name = "response_format" if endpoint == CHAT else "text"
    field_value = answer_format = requested.get(field_name, {})
    if endpoint == RESPONSE:
        verbosity = field_value.get("verbosity", "medium")
        if verbosity != "medium":
            instead = REFUSED_FIELDS["verbosity"]
            raise RefusedError(f"`text.verbosity` is {shown(verbosity)}: {instead}")
        answer_format = get_object("format")
    format_type = answer_format.get("type", "text")
    if format_type == "text":
        return None
    if format_type == "json_object":
        return {"type": "object"}
    if format_type != "json_schema":
        raise RefusedError(
            f'the type of `{field_name}` is {shown(format_type)}: it must be "text", "json_object"'
            ' or "json_schema"'
        )
    if endpoint == CHAT:
        answer_format = get_object("json_schema")
    schema = answer_format.get("schema")
    if not isinstance(schema, Mapping):
        raise RefusedError(
            f"the `schema` in `{field_name}` is {shown(schema)}: it must be a JSON schema, which is"
            " an object"
        )
    _check_size("the JSON schema", schema, MAX_SCHEMA_VALUES, MAX_SCHEMA_DEPTH)
    _check_length("the JSON schema", json.dumps(schema), MAX_SCHEMA_CHARACTERS)
    return schema


def _check_length(name: str, text: str, max_characters: int) -> None:
    if len(text) > max_characters:
        raise RefusedError(
            f"{name} has {len(text)} characters: it may have at most {max_characters}"
        )


def _check_size(name: str, value: Any, max_values: int, max_levels: int) -> None:
    """Raises `RefusedError` for a JSON value with more than `max_values` values, itself included,
    or more than `max_levels` levels."""
    level = [value]
    num_values = 0
    num_levels = 0
    while level:
        num_values += len(level)
        num_levels += 1
        if num_values > max_values or num_levels > max_levels:
            raise RefusedError(
                f"{name} has more than {max_values} values or {max_levels} levels: shorten it"
            )
        next_level: list[Any] = []
        for item in level:
            if isinstance(item, dict):
                next_level += item.values()
            elif isinstance(item, list):
                next_level += item
        level = next_level


def check_parts(modality: str, body: Mapping[str, Any]) -> None:
    """Raises `RefusedError` for messages with parts that a model of this modality cannot read."""
    messages = body.get("messages") or body.get("input")
    readable_types = READABLE_PARTS.get(modality, set())
    if not readable_types or not isinstance(messages, list):
        return
    for message in messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        if not isinstance(content, list):
            continue
        for part in content:
            part_type = part.get("type") if isinstance(part, Mapping) else None
            if isinstance(part_type, str) and part_type not in readable_types:
                raise RefusedError(
                    f"a message has a part of type {shown(part_type)}, but this model reads only"
                    f" {', '.join(sorted(readable_types))}: leave it out, or use another model"
                )
