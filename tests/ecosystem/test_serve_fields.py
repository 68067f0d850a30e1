"""Fields of OpenAI's requests to `transformers serve` on the engine: each is served, harmless, or
refused with 400."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

for _package in ("fastapi", "openai", "httpx"):
    pytest.importorskip(_package)

from transformers.cli.serving import chat_completion, completion, response  # noqa: E402

import hf_paged  # noqa: E402
from hf_paged.tools.openai_fields import (  # noqa: E402
    CHAT,
    COMPLETION,
    IGNORED_FIELDS,
    NEUTRAL_VALUES,
    REFUSED_FIELDS,
    RESPONSE,
    SERVED_BY_APP,
    SERVED_HERE,
)

from ..support import models  # noqa: E402
from .served_app import App, plain, save_text_model, served  # noqa: E402

PAGE = Path(hf_paged.__file__).parents[1] / "docs" / "guide" / "serving.md"
MESSAGES = [{"role": "user", "content": "abc"}]
GREEDY: dict[str, Any] = {"temperature": 0, "seed": 3}
# by endpoint: its path, the class of its fields in transformers, which adds some to OpenAI's, and a
# request
ENDPOINTS: dict[str, tuple[str, Any, dict[str, Any]]] = {
    CHAT: (
        "chat/completions",
        chat_completion.TransformersCompletionCreateParamsStreaming,
        {"messages": MESSAGES, "max_tokens": 6, **GREEDY},
    ),
    COMPLETION: (
        "completions",
        completion.TransformersTextCompletionCreateParams,
        {"prompt": "abc ", "max_tokens": 6, **GREEDY},
    ),
    RESPONSE: (
        "responses",
        response.TransformersResponseCreateParamsStreaming,
        {"input": "abc", "max_output_tokens": 6, "stream": False, **GREEDY},
    ),
}
ASKS = {  # a value of each refused field that asks for something
    **{
        "best_of": 3,
        "echo": True,
        "background": True,
        "parallel_tool_calls": False,
        "presence_penalty": 0.5,
    },
    **{
        "truncation": "auto",
        "verbosity": "low",
        "modalities": ["audio"],
        "top_logprobs": 2,
        "max_tool_calls": 1,
    },
    **{
        "include": ["message.output_text.logprobs"],
        "functions": [{"name": "f"}],
        "function_call": {"name": "f"},
    },
    **{
        "reasoning_effort": "low",
        "reasoning": {"effort": "low"},
        "stream_options": {"include_obfuscation": True},
    },
    **{
        "audio": {"voice": "a", "format": "wav"},
        "conversation": "id",
        "previous_response_id": "id",
    },
    **{
        "prompt": {"id": "p"},
        "web_search_options": {"search_context_size": "low"},
        "moderation": {"model": "m"},
    },
    **{
        "access_programs": {"cyber": "standard"},
        "background_options": {"completion_window": "2h"},
        "image": {},
    },
    **{"context_management": [{"type": "compaction"}]},
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("text")
    save_text_model(folder)
    with served(folder, num_blocks=256, page_size=8) as app:
        yield app


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer of any endpoint."""
    if "output" in answer:
        return str(answer["output"][-1]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def fields(endpoint: str) -> set[str]:
    """All fields of the endpoint that the installed openai knows."""
    return set(ENDPOINTS[endpoint][1].__mutable_keys__)


@pytest.mark.parametrize("endpoint", sorted(ENDPOINTS))
def test_every_field_is_served_harmless_or_refused(app: App, endpoint: str) -> None:
    """... and the guide names it."""
    path, _, request = ENDPOINTS[endpoint]
    served_fields = SERVED_BY_APP[endpoint] | SERVED_HERE[endpoint]
    expected = text_of(app.post(path, **request).json())
    page = PAGE.read_text()
    for name in sorted(fields(endpoint)):
        assert f"`{name}`" in page, name
        if name in served_fields:
            continue
        if name in IGNORED_FIELDS:
            answer = app.post(path, **request, **{name: "x"})
            assert answer.status_code == 200 and text_of(answer.json()) == expected, (
                name,
                answer.text,
            )
            continue
        refused = app.post(path, **request, **{name: ASKS[name]})
        assert refused.status_code == 400, name
        message = refused.json()["error"]["message"]
        assert f"`{name}`" in message and REFUSED_FIELDS[name] in message
        for harmless in (None, *NEUTRAL_VALUES.get(name, ())):
            answer = app.post(path, **request, **{name: harmless})
            assert answer.status_code == 200 and text_of(answer.json()) == expected, (
                name,
                harmless,
                answer.text,
            )


def test_fields_unknown_to_openai_are_refused(app: App) -> None:
    answer = app.post(messages=MESSAGES, top_k=5)
    assert answer.status_code == 400 and "`top_k`" in answer.json()["error"]["message"]


# more of them in tests/tools/test_openai_fields.py
WRONG = [
    {"n": 0},
    {"logprobs": 3},
    {"logprobs": True, "top_logprobs": 21},
    {"top_logprobs": 2},
    {"response_format": {"type": "xml"}},
    {"response_format": {"type": "json_schema", "json_schema": {"name": "x"}}},
    {
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "x", "schema": {"type": "nonsense"}},
        }
    },
    {"tool_choice": "required", "tools": []},
    {"stream_options": 3},
    {"temperature": 1e-40},
    {"frequency_penalty": 10**400},
]


@pytest.mark.parametrize("change", WRONG, ids=str)
@pytest.mark.parametrize("stream", [False, True])
def test_values_that_are_not_served_are_refused(
    app: App, change: dict[str, Any], stream: bool
) -> None:
    # as JSON of Python
    body = json.dumps({"model": app.model, "messages": MESSAGES, "stream": stream, **change})
    answer = app.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert any(f"`{name}`" in message for name in (*change, "schema"))


EVERY = list(range(models.VOCAB_SIZE))
NO_TOKEN = {
    "none": {"max_tokens": 0},
    "suppressed": {"generation_config": json.dumps({"suppress_tokens": EVERY})},
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", sorted(NO_TOKEN))
def test_options_that_allow_no_token_are_refused(app: App, name: str, stream: bool) -> None:
    options = {"max_tokens": 6, **NO_TOKEN[name]}
    for temperature in (0, 1):
        answer = app.post(messages=MESSAGES, stream=stream, temperature=temperature, **options)
        assert answer.status_code == 400, answer.text
        assert len(answer.json()["error"]["message"]) > 20
    app.engine.check_integrity()
    assert app.chat()["usage"]["completion_tokens"] == 6


def test_a_bias_without_end_that_leaves_no_token_is_refused(app: App) -> None:
    """JSON of Python has infinities, which a client may send."""
    body = {"model": app.model, "messages": MESSAGES, "max_tokens": 3}
    form = {"headers": {"content-type": "application/json"}}
    biases = {str(token): float("-inf") for token in range(models.VOCAB_SIZE)}
    answer = app.client.post(
        "/v1/chat/completions", content=json.dumps({**body, "logit_bias": biases}), **form
    )
    assert answer.status_code == 400 and "allow no token" in answer.text
    del biases["40"]
    answer = app.client.post(
        "/v1/chat/completions", content=json.dumps({**body, "logit_bias": biases}), **form
    )
    tokenizer = app.engine.tokenizer
    assert text_of(answer.json()) == tokenizer.decode([40]) * 3


def prompt(app: App, text: str = "abc ") -> list[int]:
    return list(app.engine.tokenizer(text)["input_ids"])


def decoded(app: App, ids: list[int]) -> str:
    return str(app.engine.tokenizer.decode(ids, skip_special_tokens=True))


SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 12, "max_tokens": 8}


def samples(app: App, text: str, count: int) -> list[str]:
    """Samples of plain `generate`, as `SAMPLED` draws them."""
    torch.manual_seed(12)
    options = {
        "do_sample": True,
        "temperature": 0.9,
        "max_new_tokens": 8,
        "num_return_sequences": count,
    }
    inputs = torch.tensor([prompt(app, text)])
    with torch.no_grad():
        rows = app.engine.model.generate(inputs, **options)[:, inputs.shape[1] :]
    return [decoded(app, [token for token in row if token != models.PAD]) for row in rows.tolist()]


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_an_answer_that_max_length_ends_is_incomplete(
    app: App, endpoint: str, is_stream: bool
) -> None:
    path, _, request = ENDPOINTS[endpoint]
    config = json.dumps({"max_length": 12, "pad_token_id": models.PAD})
    body = {**request, "max_tokens": None, "generation_config": config, "stream": is_stream}
    answer = app.post(path, **body)
    events = [answer.text]
    if is_stream:
        events = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for event in events for choice in json.loads(event)["choices"]]
    assert [choice["finish_reason"] for choice in choices if choice.get("finish_reason")] == [
        "length"
    ]


def test_choices_are_the_sequences_of_one_request(app: App) -> None:
    app.chat()
    text = "the same beginning for all choices, " * 8
    finished = app.engine.stats().num_finished
    answer = app.chat(text, n=4, **SAMPLED)
    expected = samples(app, text + " ", 4)
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3] and len(
        set(expected)
    ) == 4
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    length = len(prompt(app, text + " "))
    assert answer["usage"] == {
        "prompt_tokens": length,
        "completion_tokens": 32,
        "total_tokens": length + 32,
    }
    stats = app.engine.stats()
    assert stats.num_finished == finished + 1
    size = app.engine.config.block_size
    assert stats.peak_blocks < 2 * length // size  # four prompts would take twice as many


def test_choices_of_a_greedy_request_are_equal(app: App) -> None:
    answer = app.chat(n=3)
    assert (
        len({choice["message"]["content"] for choice in answer["choices"]}) == 1
        and len(answer["choices"]) == 3
    )


def test_choices_of_completions(app: App) -> None:
    app.chat()
    answer = app.post("completions", prompt="abc ", n=2, **SAMPLED).json()
    assert [choice["text"] for choice in answer["choices"]] == samples(app, "abc ", 2)


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


@pytest.mark.parametrize("includes_usage", [False, True])
def test_choices_are_streamed_beside_one_another(app: App, includes_usage: bool) -> None:
    app.chat()
    options = {"stream": True, "stream_options": {"include_usage": includes_usage}}
    found = events(app.post(messages=MESSAGES, n=3, **SAMPLED, **options))
    texts, reasons = ["", "", ""], dict[int, str]()
    for event in found:
        for choice in event["choices"]:
            texts[choice["index"]] += choice["delta"].get("content") or ""
            if choice.get("finish_reason"):
                reasons[choice["index"]] = choice["finish_reason"]
    assert texts == samples(app, "abc ", 3) and reasons == dict.fromkeys(range(3), "length")
    assert [event["usage"]["completion_tokens"] for event in found if "usage" in event] == [24]
    assert bool(found[-1]["choices"]) is not includes_usage and "usage" in found[-1]


def test_logprobs_are_the_models(app: App) -> None:
    content = app.chat(logprobs=True, top_logprobs=3)["choices"][0]["logprobs"]["content"]
    ids = prompt(app)
    new = plain(app.engine.model, ids)
    with torch.no_grad():
        logits = app.engine.model(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert [entry["token"] for entry in content] == [
        app.engine.tokenizer.decode([token]) for token in new
    ]
    for entry, token, row in zip(content, new, expected):
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        best = row.topk(3).values.tolist()
        assert [other["logprob"] for other in entry["top_logprobs"]] == pytest.approx(
            best, abs=1e-4
        )
    without = app.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in without] == [[]] * 6
    assert "logprobs" not in app.chat()["choices"][0]
    streamed = events(
        app.post(
            messages=MESSAGES,
            stream=True,
            logprobs=True,
            top_logprobs=3,
            max_tokens=6,
            temperature=0,
        )
    )
    assert streamed[-1]["choices"][0]["logprobs"]["content"] == content


def test_logprobs_of_completions(app: App) -> None:
    content = app.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    options = {"prompt": "abc ", "temperature": 0, "max_tokens": 6}
    found = app.post("completions", logprobs=2, **options).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [entry["token"] for entry in content]
    assert found["token_logprobs"] == pytest.approx(
        [entry["logprob"] for entry in content], abs=1e-4
    )
    for top, entry in zip(found["top_logprobs"], content):
        assert set(top) == {entry["token"], *(other["token"] for other in entry["top_logprobs"])}
    lengths = [len(token) for token in found["tokens"]]
    assert found["text_offset"] == [sum(lengths[:place]) for place in range(6)]
    alone = app.post("completions", logprobs=0, **options).json()["choices"][0]["logprobs"]
    assert [list(top) for top in alone["top_logprobs"]] == [[token] for token in alone["tokens"]]


def test_choices_have_their_own_logprobs(app: App) -> None:
    choices = app.chat(n=2, logprobs=True, **SAMPLED)["choices"]
    for choice in choices:
        content = choice["logprobs"]["content"]
        assert "".join(entry["token"] for entry in content) == choice["message"]["content"]
    assert choices[0]["logprobs"] != choices[1]["logprobs"]


def test_a_logit_bias_of_completions_and_chats(app: App) -> None:
    app.chat()
    ids = prompt(app)
    expected = decoded(app, plain(app.engine.model, ids, sequence_bias=[[[50], 40.0]]))
    for bias in (40.0, 40):
        assert app.chat(logit_bias={"50": bias})["choices"][0]["message"]["content"] == expected
        answer = app.post(
            "completions", prompt="abc ", temperature=0, max_tokens=6, logit_bias={"50": bias}
        )
        assert text_of(answer.json()) == expected != text_of(app.chat())


def test_a_temperature_draws_samples_from_a_greedy_model(app: App) -> None:
    app.chat()
    assert not app.engine.model.generation_config.do_sample
    sampled = text_of(app.chat(**SAMPLED))
    assert [sampled] == samples(app, "abc ", 1) and sampled != text_of(app.chat(max_tokens=8))
    config = json.dumps({"do_sample": False})
    assert text_of(app.chat(**SAMPLED, generation_config=config)) == text_of(app.chat(max_tokens=8))


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}


NO_SPACE = json.dumps(
    {"suppress_tokens": [4, 99], "eos_token_id": models.EOS}
)  # JSON may have spaces without end, and the model is random


def test_answers_follow_a_json_schema(app: App) -> None:
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}
    options: dict[str, Any] = {
        "response_format": form,
        "max_tokens": 60,
        "generation_config": NO_SPACE,
    }
    answers = [app.chat(**options), app.chat(**{**options, "n": 2, "temperature": 1, "seed": 2})]
    found = [
        json.loads(choice["message"]["content"])
        for answer in answers
        for choice in answer["choices"]
    ]
    assert len(found) == 3 and all(
        set(each) == {"ok", "size"} and isinstance(each["ok"], bool) for each in found
    )
    streamed = events(app.post(messages=MESSAGES, stream=True, temperature=0, **options))
    texts = [
        choice["delta"].get("content") or "" for event in streamed for choice in event["choices"]
    ]
    assert "".join(texts) == text_of(answers[0])
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    request = {**ENDPOINTS[RESPONSE][2], "max_output_tokens": 60, "generation_config": NO_SPACE}
    assert set(json.loads(text_of(app.post("responses", text=text, **request).json()))) == {
        "ok",
        "size",
    }


def test_a_schema_that_no_text_can_follow_is_refused(app: App) -> None:
    pytest.importorskip("xgrammar")
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"const": "\u00e9"}}}
    refused = app.post(messages=MESSAGES, response_format=form, generation_config=NO_SPACE)
    assert (
        refused.status_code == 400
        and "no token continues the text" in refused.json()["error"]["message"]
    )
    refused = app.post(messages=MESSAGES, response_format=form)
    assert refused.status_code == 400 and "EOS" in refused.json()["error"]["message"]


def test_answers_that_are_any_json_object(app: App) -> None:
    pytest.importorskip("xgrammar")
    assert text_of(
        app.chat(response_format={"type": "json_object"}, generation_config=NO_SPACE)
    ).startswith("{")
    assert text_of(app.chat(response_format={"type": "text"})) == text_of(app.chat())


def test_a_schema_without_xgrammar_is_refused(app: App, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "xgrammar", None)  # as if it were not installed
    monkeypatch.setattr(app.engine._core.grammars, "_compiler", None)
    answer = app.post(messages=MESSAGES, response_format={"type": "json_object"})
    assert (
        answer.status_code == 400
        and 'pip install "hf_paged[structured]"' in answer.json()["error"]["message"]
    )


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{{ 1 / 0 }}", "{% if"]
)
def test_messages_that_the_template_does_not_take_are_refused(
    app: App, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    app.chat()
    monkeypatch.setattr(app.engine.tokenizer, "chat_template", template)
    answer = app.post(messages=MESSAGES)
    assert answer.status_code == 400 and "Error: " in answer.json()["error"]["message"]


def test_a_model_that_does_not_exist_is_refused(app: App, tmp_path: Path) -> None:
    answer = app.post(model=str(tmp_path / "nothing"), messages=MESSAGES)
    assert answer.status_code == 400 and str(tmp_path) in answer.json()["error"]["message"]


def test_a_refusal_may_quote_half_a_surrogate_pair(app: App) -> None:
    body = json.dumps({"model": "\ud800", "messages": MESSAGES})
    answer = app.client.post(
        "/v1/chat/completions", content=body, headers={"content-type": "application/json"}
    )
    assert answer.status_code == 400 and "\\ud800" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "option",
    [
        {"max_time": "a"},
        {"num_beams": 2, "length_penalty": "a"},
        {"guidance_scale": "a"},
        {"exponential_decay_length_penalty": [2, "a"], "eos_token_id": 7},
        {"watermarking_config": {"greenlist_ratio": 0.25, "bias": "a"}},
        {"bad_words_ids": [[models.VOCAB_SIZE]]},
        {"forced_eos_token_id": models.VOCAB_SIZE},
        {"is_assistant": True},
    ],
    ids=str,
)
def test_options_that_fail_while_tokens_are_chosen_are_refused(
    app: App, option: dict[str, Any], stream: bool
) -> None:
    answer = app.post(
        messages=MESSAGES, max_tokens=3, stream=stream, generation_config=json.dumps(option)
    )
    assert answer.status_code == 400, answer.text
    assert any(f"`{name}`" in answer.json()["error"]["message"] for name in (*option, "bias"))


def test_a_picture_for_a_model_of_text_is_refused(app: App) -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": "data:,"}},
        {"type": "text", "text": "what is it?"},
    ]
    answer = app.post(messages=[{"role": "user", "content": parts}])
    assert (
        answer.status_code == 400
        and "part of type 'image_url'" in answer.json()["error"]["message"]
    )


def test_a_tool_choice_of_none_hides_the_tools(app: App, tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = "{% for tool in tools or [] %}<tool>{% endfor %}{{ messages[0]['content'] }} "
    save_text_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    with served(tmp_path) as other:
        lengths = [
            other.chat(tools=tools, **choice)["usage"]["prompt_tokens"]
            for choice in ({}, {"tool_choice": "auto"}, {"tool_choice": "none"})
        ]
        assert lengths == [10, 10, 4] and other.chat()["usage"]["prompt_tokens"] == 4


def test_prefixes_are_shared_only_within_a_salt(app: App) -> None:
    text = "a prompt that several tenants send, " * 3
    hits = []
    for salt in (None, None, "one", "one", "two", None):
        before = app.chat("x") and app.engine.stats().num_prefix_hit_tokens
        app.chat(text, headers=None if salt is None else {"x-cache-salt": salt})
        hits.append(app.engine.stats().num_prefix_hit_tokens - before > 0)
    assert hits == [False, True, False, True, False, True]
    two = [("x-cache-salt", "three"), ("x-cache-salt", "one")]
    before = app.engine.stats().num_prefix_hit_tokens
    app.chat(text, headers=two)
    # a second header makes nobody another tenant
    assert app.engine.stats().num_prefix_hit_tokens == before
    refused = app.post(messages=MESSAGES, headers={"x-cache-salt": ""})
    assert refused.status_code == 400 and "cache_salt" in refused.text
