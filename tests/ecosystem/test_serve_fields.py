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
SAMPLED: dict[str, Any] = {"temperature": 0.9, "seed": 12, "max_tokens": 8}
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
# a value of each refused field that asks for something
ASKS: dict[str, Any] = {
    **{"best_of": 3, "echo": True, "background": True, "parallel_tool_calls": False},
    **{"presence_penalty": 0.5, "truncation": "auto", "verbosity": "low", "modalities": ["audio"]},
    **{"top_logprobs": 2, "max_tool_calls": 1, "include": ["message.output_text.logprobs"]},
    **{"functions": [{"name": "f"}], "function_call": {"name": "f"}, "reasoning_effort": "low"},
    **{"reasoning": {"effort": "low"}, "stream_options": {"include_obfuscation": True}},
    **{"audio": {"voice": "a", "format": "wav"}, "conversation": "id", "prompt": {"id": "p"}},
    **{"previous_response_id": "id", "web_search_options": {"search_context_size": "low"}},
    **{"moderation": {"model": "m"}, "access_programs": {"cyber": "standard"}, "image": {}},
    **{"background_options": {"completion_window": "2h"}},
    **{"context_management": [{"type": "compaction"}]},
}


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("text")
    save_text_model(folder)
    with served(folder, num_blocks=256, page_size=8) as app:
        app.chat()
        yield app


def text_of(answer: dict[str, Any]) -> str:
    """The text of an answer of any endpoint."""
    if "output" in answer:
        return str(answer["output"][-1]["content"][0]["text"])
    choice = answer["choices"][0]
    return str(choice["text"] if "text" in choice else choice["message"]["content"])


def events(answer: Any) -> list[dict[str, Any]]:
    assert answer.status_code == 200, answer.text
    return [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n") if line]


def prompt(app: App, text: str = "abc ") -> list[int]:
    return list(app.engine.tokenizer(text)["input_ids"])


def samples(app: App, text: str, count: int) -> list[str]:
    """Samples of plain `generate`, as `SAMPLED` draws them."""
    torch.manual_seed(12)
    options = {"do_sample": True, "temperature": 0.9, "max_new_tokens": 8}
    inputs = torch.tensor([prompt(app, text)])
    with torch.no_grad():
        rows = app.engine.model.generate(inputs, **options, num_return_sequences=count)
    return app.engine.tokenizer.batch_decode(rows[:, inputs.shape[1] :], skip_special_tokens=True)


def refusal(app: App, **body: Any) -> str:
    """Of a body as Python's JSON, which has infinities and halves of surrogate pairs."""
    content = json.dumps({"model": app.model, "messages": MESSAGES, **body})
    form = {"content-type": "application/json"}
    answer = app.client.post("/v1/chat/completions", content=content, headers=form)
    assert answer.status_code == 400, answer.text
    return str(answer.json()["error"]["message"])


# -- which are served ----------------------------------------------------------------------------


@pytest.mark.parametrize("endpoint", sorted(ENDPOINTS))
def test_every_field_is_served_harmless_or_refused(app: App, endpoint: str) -> None:
    """... and the guide names it."""
    path, fields, request = ENDPOINTS[endpoint]
    expected = text_of(app.post(path, **request).json())
    page = PAGE.read_text()
    for name in sorted(fields.__mutable_keys__):
        assert f"`{name}`" in page, name
        if name in SERVED_BY_APP[endpoint] | SERVED_HERE[endpoint]:
            continue
        harmless = [None, *NEUTRAL_VALUES.get(name, ())]
        if name in IGNORED_FIELDS:
            harmless = ["x"]
        else:
            refused = app.post(path, **request, **{name: ASKS[name]})
            assert refused.status_code == 400, name
            message = refused.json()["error"]["message"]
            assert f"`{name}`" in message and REFUSED_FIELDS[name] in message
        for value in harmless:
            answer = app.post(path, **request, **{name: value})
            assert answer.status_code == 200, (name, value, answer.text)
            assert text_of(answer.json()) == expected, (name, value)


EVERY = list(range(models.VOCAB_SIZE))


def config(**options: Any) -> dict[str, str]:
    return {"generation_config": json.dumps(options)}


# more of them in tests/tools/test_openai_fields.py
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("body", "told"),
    [
        ({"top_k": 5}, "`top_k`"),
        ({"n": 0}, "`n`"),
        ({"logprobs": True, "top_logprobs": 21}, "`top_logprobs`"),
        ({"response_format": {"type": "xml"}}, "`response_format`"),
        ({"frequency_penalty": 10**400}, "`frequency_penalty`"),
        ({"temperature": 1e-40}, "`temperature`"),
        ({"tool_choice": "required", "tools": []}, "`tool_choice`"),
        ({"max_tokens": 0}, "`max_tokens`"),
        (config(suppress_tokens=EVERY), "allow no token"),
        ({"logit_bias": {str(token): float("-inf") for token in EVERY}}, "allow no token"),
        ({"model": "\ud800"}, "\\ud800"),
        ({"model": "/tmp/nothing"}, "/tmp/nothing"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "'image_url'"),
        # errors while tokens are chosen
        (config(max_time="a"), "`max_time`"),
        (config(num_beams=2, length_penalty="a"), "`length_penalty`"),
        (config(guidance_scale="a"), "`guidance_scale`"),
        (config(exponential_decay_length_penalty=[2, "a"], eos_token_id=7), "`exponential_decay"),
        (config(watermarking_config={"greenlist_ratio": 0.25, "bias": "a"}), "`bias`"),
        (config(bad_words_ids=[[models.VOCAB_SIZE]]), "`bad_words_ids`"),
        (config(forced_eos_token_id=models.VOCAB_SIZE), "`forced_eos_token_id`"),
        (config(is_assistant=True), "`is_assistant`"),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_is_not_served_is_refused(
    app: App, body: dict[str, Any], told: str, stream: bool
) -> None:
    assert told in refusal(app, **{"max_tokens": 3, "stream": stream, **body})
    app.engine.check_integrity()


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('no system role') }}", "{{ 1 / 0 }}", "{% if"]
)
def test_messages_that_the_template_does_not_take_are_refused(
    app: App, template: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app.engine.tokenizer, "chat_template", template)
    assert "Error: " in refusal(app)


# -- what they mean ------------------------------------------------------------------------------


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("endpoint", [CHAT, COMPLETION])
def test_an_answer_that_max_length_ends_is_incomplete(
    app: App, endpoint: str, is_stream: bool
) -> None:
    path, _, request = ENDPOINTS[endpoint]
    length = config(max_length=12, pad_token_id=models.PAD)
    answer = app.post(path, **{**request, "max_tokens": None, **length, "stream": is_stream})
    lines = [answer.text]
    if is_stream:
        lines = [line[6:] for line in answer.text.split("\n\n") if line.startswith("data: {")]
    choices = [choice for line in lines for choice in json.loads(line)["choices"]]
    reasons = [choice["finish_reason"] for choice in choices if choice.get("finish_reason")]
    assert reasons == ["length"]


def test_choices_are_the_sequences_of_one_request(app: App) -> None:
    text = "the same beginning for all choices, " * 8
    finished = app.engine.stats().num_finished
    answer = app.chat(text, n=4, **SAMPLED)
    expected = samples(app, text + " ", 4)
    assert [choice["message"]["content"] for choice in answer["choices"]] == expected
    assert len(set(expected)) == 4
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3]
    assert {choice["finish_reason"] for choice in answer["choices"]} == {"length"}
    length = len(prompt(app, text + " "))
    usage = {"prompt_tokens": length, "completion_tokens": 32, "total_tokens": length + 32}
    assert answer["usage"] == usage
    stats = app.engine.stats()
    assert stats.num_finished == finished + 1
    # four prompts would take twice as many
    assert stats.peak_blocks < 2 * length // app.engine.config.block_size
    greedy = [choice["message"]["content"] for choice in app.chat(n=3)["choices"]]
    assert greedy == [text_of(app.chat())] * 3
    answer = app.post("completions", prompt="abc ", n=2, **SAMPLED).json()
    assert [choice["text"] for choice in answer["choices"]] == samples(app, "abc ", 2)


@pytest.mark.parametrize("includes_usage", [False, True])
def test_choices_are_streamed_beside_one_another(app: App, includes_usage: bool) -> None:
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
    ids, tokenizer = prompt(app), app.engine.tokenizer
    new = plain(app.engine.model, ids)
    with torch.no_grad():
        logits = app.engine.model(torch.tensor([ids + new])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1)
    assert [entry["token"] for entry in content] == [tokenizer.decode([token]) for token in new]
    for entry, token, row in zip(content, new, expected):
        assert entry["logprob"] == pytest.approx(row[token].item(), abs=1e-4)
        assert bytes(entry["bytes"]).decode() == entry["token"]
        best = [other["logprob"] for other in entry["top_logprobs"]]
        assert best == pytest.approx(row.topk(3).values.tolist(), abs=1e-4)
    without = app.chat(logprobs=True)["choices"][0]["logprobs"]["content"]
    assert [entry["top_logprobs"] for entry in without] == [[]] * 6
    assert "logprobs" not in app.chat()["choices"][0]
    options = {"messages": MESSAGES, "max_tokens": 6, "temperature": 0, "stream": True}
    streamed = events(app.post(logprobs=True, top_logprobs=3, **options))
    assert streamed[-1]["choices"][0]["logprobs"]["content"] == content
    choices = app.chat(n=2, logprobs=True, **SAMPLED)["choices"]
    for choice in choices:
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert "".join(tokens) == choice["message"]["content"]
    assert choices[0]["logprobs"] != choices[1]["logprobs"]


def test_logprobs_of_completions(app: App) -> None:
    content = app.chat(logprobs=True, top_logprobs=2)["choices"][0]["logprobs"]["content"]
    options = {"prompt": "abc ", "temperature": 0, "max_tokens": 6}
    found = app.post("completions", logprobs=2, **options).json()["choices"][0]["logprobs"]
    assert found["tokens"] == [entry["token"] for entry in content]
    logprobs = [entry["logprob"] for entry in content]
    assert found["token_logprobs"] == pytest.approx(logprobs, abs=1e-4)
    for top, entry in zip(found["top_logprobs"], content):
        assert set(top) == {entry["token"], *(other["token"] for other in entry["top_logprobs"])}
    alone = app.post("completions", logprobs=0, **options).json()["choices"][0]["logprobs"]
    assert [list(top) for top in alone["top_logprobs"]] == [[token] for token in alone["tokens"]]


def test_a_logit_bias_and_a_temperature(app: App) -> None:
    """Of completions and chats; a temperature draws samples from a greedy model."""
    tokenizer, model = app.engine.tokenizer, app.engine.model
    biased = tokenizer.decode(plain(model, prompt(app), sequence_bias=[[[50], 40.0]]))
    assert text_of(app.chat(logit_bias={"50": 40})) == biased != text_of(app.chat())
    options = {"prompt": "abc ", "temperature": 0, "max_tokens": 6}
    answer = app.post("completions", logit_bias={"50": 40.0}, **options)
    assert text_of(answer.json()) == biased
    only = {str(token): float("-inf") for token in EVERY if token != 40}
    body = {"model": app.model, "messages": MESSAGES, "max_tokens": 3, "logit_bias": only}
    form = {"headers": {"content-type": "application/json"}}
    answer = app.client.post("/v1/chat/completions", content=json.dumps(body), **form)
    assert text_of(answer.json()) == tokenizer.decode([40]) * 3
    assert not model.generation_config.do_sample
    greedy, sampled = text_of(app.chat(max_tokens=8)), text_of(app.chat(**SAMPLED))
    assert [sampled] == samples(app, "abc ", 1) and sampled != greedy
    assert text_of(app.chat(**SAMPLED, **config(do_sample=False))) == greedy


SCHEMA = {
    "type": "object",
    "properties": {"ok": {"type": "boolean"}, "size": {"enum": ["s", "m"]}},
    "required": ["ok", "size"],
    "additionalProperties": False,
}
# JSON may have spaces without end, and the model is random
NO_SPACE = config(suppress_tokens=[4, 99], eos_token_id=models.EOS)


def schema_form(schema: Any) -> dict[str, Any]:
    json_schema = {"name": "x", "schema": schema, "strict": True}
    return {"response_format": {"type": "json_schema", "json_schema": json_schema}}


def test_answers_follow_a_json_schema(app: App) -> None:
    pytest.importorskip("xgrammar")
    options: dict[str, Any] = {**schema_form(SCHEMA), "max_tokens": 60, **NO_SPACE}
    answers = [app.chat(**options), app.chat(**{**options, "n": 2, "temperature": 1, "seed": 2})]
    texts = [choice["message"]["content"] for answer in answers for choice in answer["choices"]]
    text = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA}}
    request = {**ENDPOINTS[RESPONSE][2], "max_output_tokens": 60, **NO_SPACE}
    texts.append(text_of(app.post("responses", text=text, **request).json()))
    assert len(texts) == 4
    for found in map(json.loads, texts):
        assert set(found) == {"ok", "size"} and isinstance(found["ok"], bool)
    streamed = events(app.post(messages=MESSAGES, stream=True, temperature=0, **options))
    pieces = [
        choice["delta"].get("content") or "" for event in streamed for choice in event["choices"]
    ]
    assert "".join(pieces) == texts[0]
    form = {"response_format": {"type": "json_object"}}
    assert text_of(app.chat(**form, **NO_SPACE)).startswith("{")
    assert text_of(app.chat(response_format={"type": "text"})) == text_of(app.chat())


def test_schemas_that_cannot_be_served_are_refused(
    app: App, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("xgrammar")
    # no text can follow it
    assert "no token continues the text" in refusal(app, **schema_form({"const": "é"}), **NO_SPACE)
    assert "EOS" in refusal(app, **schema_form({"const": "é"}))
    assert "`schema`" in refusal(app, **schema_form({"type": "nonsense"}))
    monkeypatch.setitem(sys.modules, "xgrammar", None)  # as if it were not installed
    monkeypatch.setattr(app.engine._core.grammars, "_compiler", None)
    told = refusal(app, response_format={"type": "json_object"})
    assert 'pip install "hf_paged[structured]"' in told


def test_a_tool_choice_of_none_hides_the_tools(tmp_path: Path) -> None:
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    template = "{% for tool in tools or [] %}<tool>{% endfor %}{{ messages[0]['content'] }} "
    save_text_model(tmp_path)
    (tmp_path / "chat_template.jinja").write_text(template)
    asked = [{"tools": tools, **choice} for choice in ({}, {"tool_choice": "auto"})]
    with served(tmp_path) as other:
        lengths = [
            other.chat(**options)["usage"]["prompt_tokens"]
            for options in (*asked, {"tools": tools, "tool_choice": "none"}, {})
        ]
    assert lengths == [10, 10, 4, 4]


def test_prefixes_are_shared_only_within_a_salt(app: App) -> None:
    text = "a prompt that several tenants send, " * 3
    hits = []
    # a second header makes nobody another tenant
    two = [("x-cache-salt", "three"), ("x-cache-salt", "one")]
    for salt in (None, None, "one", "one", "two", None, two):
        before = app.chat("x") and app.engine.stats().num_prefix_hit_tokens
        app.chat(text, headers={"x-cache-salt": salt} if isinstance(salt, str) else salt)
        hits.append(app.engine.stats().num_prefix_hit_tokens - before > 0)
    assert hits == [False, True, False, True, False, True, False]
    refused = app.post(messages=MESSAGES, headers={"x-cache-salt": ""})
    assert refused.status_code == 400 and "cache_salt" in refused.text
