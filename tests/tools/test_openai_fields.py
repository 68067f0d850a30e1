"""OpenAI's fields in the terms of the engine, without a server."""

from __future__ import annotations

import json
from typing import Any

import pytest
from transformers import GenerationConfig

from hf_paged.tools.openai_fields import (
    CHAT,
    COMPLETION,
    IGNORED_FIELDS,
    REFUSED_FIELDS,
    RESPONSE,
    SERVED_BY_APP,
    SERVED_HERE,
    RefusedError,
    check_parts,
    translate,
)
from hf_paged.tools.openai_limits import (
    check_allows_tokens,
    check_beams,
    check_option_limits,
    set_max_new_tokens,
)

from ..support import models


def test_a_field_has_one_treatment() -> None:
    for endpoint, names in SERVED_HERE.items():
        by_app = SERVED_BY_APP[endpoint]
        assert not names & by_app and not (names | by_app) & IGNORED_FIELDS
    assert not IGNORED_FIELDS & set(REFUSED_FIELDS)


def form(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


def config(**options: Any) -> dict[str, str]:
    return {"generation_config": json.dumps(options)}


def test_the_apps_fields_pass_and_the_others_are_translated() -> None:
    asked = {"messages": [], "n": 3, "logprobs": True, "top_logprobs": 2, "user": "x", "stop": None}
    made = translate(CHAT, asked)
    assert made.body == {"messages": []} and made.num_choices == 3
    assert made.options == {"return_logprobs": True, "top_logprobs": 2}
    schema = {"type": "object", "properties": {}}
    assert translate(CHAT, {"response_format": form(schema)}).options == {"schema": schema}
    text = {"format": {**form(schema), "schema": schema}}
    assert translate(RESPONSE, {"text": text}).options == {"schema": schema}
    asked = {"logprobs": 0, "logit_bias": {"7": -3}, "stream_options": {"include_usage": True}}
    made = translate(COMPLETION, asked)
    assert made.options == {"return_logprobs": True, "top_logprobs": 0} and made.should_send_usage
    assert made.generation_options == {"sequence_bias": {(7,): -3}}


def test_a_temperature_asks_for_samples_unless_the_config_decides() -> None:
    assert translate(CHAT, {"temperature": 0.5}).generation_options == {"do_sample": True}
    for greedy in ({"temperature": 0}, {"temperature": 0.5, **config(do_sample=False)}):
        assert translate(CHAT, greedy).generation_options == {}


def test_a_generation_config_may_ask_for_several_sequences() -> None:
    for asked in ({}, {"n": 2}):
        made = translate(CHAT, {**config(do_sample=True, num_return_sequences=2), **asked})
        assert made.num_choices == 2
        assert json.loads(made.body["generation_config"]) == {"do_sample": True}
    assert translate(CHAT, {"n": 3, **config(num_beams=4)}).num_choices == 3
    assert translate(RESPONSE, config(num_return_sequences=1)).num_choices == 1


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


CHAT_REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"presence_penalty": 1}, r"`presence_penalty` is 1: .* `frequency_penalty`"),
    ({"top_k": 1}, "`top_k` is not a field"),
    ({"n": 129}, "`n` is 129: it must be a whole number from 1 to 128"),
    ({"max_tokens": 0}, "`max_tokens` is 0"),
    ({"tool_choice": {"type": "function"}}, r"`tool_choice` .* pass \"auto\""),
    ({"logit_bias": [1]}, r"`logit_bias` is \[1\]: it must be an object"),
    ({"stream": "yes"}, "`stream` is 'yes': it must be true or false"),
    ({"stop": {"a": 1}}, "`stop` is .* a list of texts"),
    ({"model": 3}, "`model` is 3: it must be text"),
    ({"temperature": float("nan")}, "`temperature` is nan: it must be a number from 0"),
    ({"temperature": -1}, "`temperature` is -1"),
    ({"temperature": True}, "`temperature` is True"),
    ({"response_format": []}, r"`response_format` is \[\]: it must be an object"),
    ({"response_format": form({"enum": ["x"] * 2000})}, "more than 2000 values"),
    ({"response_format": form(nested(50))}, "50 levels"),
    ({"response_format": form({"pattern": "a?" * 50_000})}, "schema has 100015 characters"),
    ({"generation_config": "{"}, "Expecting property name"),
    ({"generation_config": "[1]"}, r"`generation_config` is \[1\]: it must be an object"),
    (config(suppress_tokens=[1] * 5001), "more than 4096 values"),
    ({"generation_config": '{"a": ' + "[" * 10 + "]" * 10 + "}"}, "10 levels"),
    ({"generation_config": "[" * 100_000}, "recursion|depth"),
    (config(bad_words_ids=[[5, 6]] * 50_000), r"`generation_config` has \d+ characters"),
    ({"logit_bias": dict.fromkeys(map(str, range(5000)), 1)}, "`logit_bias` has more than 4096"),
    ({"chat_template_kwargs": {"chat_template": "{% for %}"}}, "has chat_template"),
    ({"chat_template_kwargs": {"padding": "x", "max_length": 9}}, "has max_length, padding"),
    ({"n": 1, **config(num_return_sequences=2)}, "`n` is 1 and `num_return_sequences` is 2"),
    (config(num_return_sequences=0), "`num_return_sequences` is 0"),
    (config(num_return_sequences="2"), "`num_return_sequences` is '2'"),
]
REFUSED: list[tuple[str, dict[str, Any], str]] = [
    *((CHAT, body, message) for body, message in CHAT_REFUSED),
    (COMPLETION, {"logprobs": True}, "`logprobs` is True"),
    (COMPLETION, {"logit_bias": [1]}, "`logit_bias` is"),
    (COMPLETION, {"top_p": 10**400}, "`top_p` is .*: it must be a number from 0 to 1"),
    (COMPLETION, {"seed": float("inf")}, "`seed` is inf"),
    (COMPLETION, {"seed": 1.5}, "`seed` is 1.5"),
    (COMPLETION, {"suffix": "\ud800"}, "surrogates not allowed"),
    (RESPONSE, {"text": {"verbosity": "low"}}, r"`text\.verbosity` is 'low'"),
    (RESPONSE, config(num_return_sequences=2), "`num_return_sequences` is 2"),
]


@pytest.mark.parametrize(
    ("endpoint", "body", "message"), REFUSED, ids=lambda value: str(value)[:60]
)
def test_what_is_not_served_is_refused(endpoint: str, body: dict[str, Any], message: str) -> None:
    with pytest.raises(RefusedError, match=message):
        translate(endpoint, body)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": 1e-40}, "`temperature` is 1e-40"),
        ({"sequence_bias": {(1,): float("nan")}}, "`sequence_bias` has the bias nan"),
        ({"sequence_bias": {(1,): float("inf")}}, "`sequence_bias` has the bias inf"),
        ({"sequence_bias": [[[5], 3e38]]}, r"`sequence_bias` has the bias 3e\+38"),
        ({"stop_strings": "a" * 4097}, "`stop` has 4097 characters"),
        ({"stop_strings": ["a"] * 65}, "`stop` has 65 strings"),
        ({"stop_strings": ["end", ""]}, "`stop` contains an empty string"),
        ({"stop_strings": ""}, "`stop` contains an empty string"),
        ({"num_beams": 129}, "`num_beams` is 129: it must be a whole number up to 128"),
        ({"max_matching_ngram_size": 33}, "`max_matching_ngram_size` is 33"),
        ({"prompt_lookup_num_tokens": 129}, "`prompt_lookup_num_tokens` is 129"),
        ({"watermarking_config": {"context_history_size": 10**9}}, "`context_history_size` is 1"),
        ({"bad_words_ids": [[1, 2]] * 257}, "257 sequences of several tokens"),
        ({"sequence_bias": {(1, i): 1.0 for i in range(257)}}, "257 sequences of several tokens"),
        ({"sequence_bias": [[[1, i], 1.0] for i in range(257)]}, "257 sequences of several tokens"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_extreme_options_are_refused(options: dict[str, Any], message: str) -> None:
    check_option_limits(
        {
            "temperature": 1e-5,
            "sequence_bias": {(1,): float("-inf")},
            "stop_strings": ["a" * 4033, *"b" * 63],
            "bad_words_ids": [[1, 2]] * 256 + [[3]] * 3000,
            "num_beams": 128,
        }
    )
    with pytest.raises(RefusedError, match=message):
        check_option_limits(options)


def test_beams_that_take_much_memory_are_refused() -> None:
    config = GenerationConfig(max_new_tokens=1 << 16, eos_token_id=[2, 3, 4])
    for options in ({"num_beams": 64}, {"num_beams": 1}, {}):
        check_beams(config, options, 0)
    for num_beams, num_prompt_tokens in ((65, 0), (64, 1)):
        counts = f"is {num_beams} for a prompt of {num_prompt_tokens} tokens and up to 65536 new"
        with pytest.raises(RefusedError, match=f"{counts} tokens: .* candidates .* `max_tokens`"):
            check_beams(config, {"num_beams": num_beams}, num_prompt_tokens)


@pytest.mark.parametrize(
    "of_model, of_request, expected",
    [
        ({}, {"max_new_tokens": 3, "max_length": 50}, 3),
        ({}, {"max_length": 50}, 40),
        ({}, {}, 2048 - 10),
        ({"max_length": 30}, {}, 20),
        ({"max_new_tokens": 7}, {"max_length": 50}, 7),
        ({}, {"max_length": 10}, None),
        ({}, {"max_length": 0}, None),
    ],
)
def test_a_request_without_max_new_tokens_gets_the_engines_limit(
    of_model: dict[str, int], of_request: dict[str, int], expected: int | None
) -> None:
    """Or is refused where its prompt of 10 tokens leaves no room."""
    model = models.build("llama")
    model.generation_config.update(**of_model)
    config = GenerationConfig()
    vars(config).update(of_request)
    if expected is None:
        message = rf"has 10 tokens, and prompt .* at most {of_request['max_length']}:"
        with pytest.raises(RefusedError, match=message):
            set_max_new_tokens(model, config, num_prompt_tokens=10)
        return
    set_max_new_tokens(model, config, num_prompt_tokens=10)
    assert config.max_new_tokens == expected


def test_parts_that_a_model_does_not_read_are_refused() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "image_url"}]
    for name in ("messages", "input"):
        body = {name: [{"role": "user", "content": parts}]}
        check_parts("VLM", body)
        with pytest.raises(RefusedError, match="a part of type 'image_url'"):
            check_parts("LLM", body)


def test_options_that_allow_no_token() -> None:
    model, every = models.get("llama"), list(range(models.VOCAB_SIZE))
    config = GenerationConfig(max_new_tokens=4, eos_token_id=2)
    for options in (
        {"min_new_tokens": 4, "suppress_tokens": every[3:]},
        {"bad_words_ids": [[token] for token in every[1:]] + [[0, 1]]},
    ):
        check_allows_tokens(model, config, options)
    infinite = {(token,): float("-inf") for token in every[2:]}
    for options in (
        {"min_new_tokens": 5},
        {"sequence_bias": {(models.VOCAB_SIZE,): 1.0}},
        {"sequence_bias": [[[5, -1], 1.0]]},
        {"suppress_tokens": every},
        {"suppress_tokens": every[:9], "bad_words_ids": [[token] for token in every[9:]]},
        {"begin_suppress_tokens": every[:2], "sequence_bias": infinite},
        {"min_new_tokens": 1, "suppress_tokens": [token for token in every if token != 2]},
    ):
        with pytest.raises(RefusedError):
            check_allows_tokens(model, config, options)
