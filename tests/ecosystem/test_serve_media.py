"""Images in requests to `transformers serve`: on the engine, as plain `generate` on the processor's
output."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

for _package in ("fastapi", "openai", "httpx", "PIL"):
    pytest.importorskip(_package)

import transformers  # noqa: E402

from .served_app import App, picture, plain, save_media_model, served  # noqa: E402


@pytest.fixture(scope="module")
def app(tmp_path_factory: pytest.TempPathFactory) -> Iterator[App]:
    folder = tmp_path_factory.mktemp("media")
    save_media_model(folder)
    with served(folder, num_blocks=256, page_size=8) as app:
        yield app


QUESTION = {"type": "text", "text": "what is it, and what is behind it?"}


def content(seed: int) -> list[dict[str, Any]]:
    return [{"type": "image_url", "image_url": {"url": picture(seed)}}, QUESTION]


def messages(*parts: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]


def expected(app: App, seed: int, **options: Any) -> str:
    """The text of plain `generate`."""
    model = transformers.LlavaForConditionalGeneration.from_pretrained(app.model)
    processor = transformers.AutoProcessor.from_pretrained(app.model)
    inputs = processor.apply_chat_template(
        messages({"type": "image", "url": picture(seed)}, QUESTION),
        add_generation_prompt=True,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
    )
    return str(processor.decode(plain(model, dict(inputs), **options), skip_special_tokens=True))


def text_of(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def test_pictures_are_served_on_the_engine(app: App) -> None:
    texts = [text_of(app.chat(content(seed))) for seed in (1, 2)]
    assert texts == [expected(app, seed) for seed in (1, 2)] and texts[0] != texts[1]
    before = app.engine.stats()
    assert before.num_finished >= 2 and before.route.road == "engine"
    assert text_of(app.chat(content(1))) == texts[0]
    assert app.engine.stats().num_prefix_hit_tokens > before.num_prefix_hit_tokens
    name = f'hf_paged_requests_finished_total{{model_name="{app.model}"}}'
    assert f"{name} {float(app.engine.stats().num_finished)}" in app.client.get("/metrics").text
    with ThreadPoolExecutor(4) as pool:  # beside a request without a picture
        futures = [pool.submit(app.chat, content(seed), max_tokens=12) for seed in (1, 2, 3)]
        words = pool.submit(app.chat, [{"type": "text", "text": "only words"}], max_tokens=12)
        texts = [text_of(future.result()) for future in futures]
    assert texts == [expected(app, seed, max_new_tokens=12) for seed in (1, 2, 3)]
    assert len(text_of(words.result())) > 0
    app.engine.check_integrity()


def test_a_picture_with_choices_logprobs_and_a_stream(app: App) -> None:
    answer = app.chat(content(1), n=2, logprobs=True, temperature=0.9, seed=4)
    torch.manual_seed(4)
    sampled = {"do_sample": True, "temperature": 0.9, "num_return_sequences": 2}
    assert text_of(answer) == expected(app, 1, **sampled)
    assert all(choice["logprobs"]["content"] for choice in answer["choices"])
    body = {"messages": messages(*content(2)), "temperature": 0, "max_tokens": 6}
    streamed = app.post(stream=True, **body).text
    chunks = [json.loads(line.removeprefix("data: ")) for line in streamed.split("\n\n") if line]
    pieces = [chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks]
    assert "".join(pieces) == expected(app, 2)


def test_refusals_of_requests_with_pictures(app: App, tmp_path: Path) -> None:
    words = tmp_path / "words.png"
    words.write_text("no picture")
    bodies: list[dict[str, Any]] = [
        {"messages": messages(*content(1)), **options}
        for options in ({"max_tokens": 10**9}, {"seed": 2**70}, {"max_tokens": 0})
    ]
    for url in ("data:image/png;base64,AAAA", "http://127.0.0.1:9/x.png", str(words), 3):
        bodies.append({"messages": messages({"type": "image_url", "image_url": {"url": url}})})
    for body in bodies:
        for stream in (False, True):
            answer = app.post(**body, stream=stream)
            assert answer.status_code == 400 and answer.json()["error"]["message"], body
    assert text_of(app.chat(content(1))) == expected(app, 1)


@pytest.mark.parametrize("stream", [False, True])
def test_a_model_that_only_generate_serves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stream: bool
) -> None:
    """... is served by `generate`, and `n` is refused."""
    own = transformers.LlavaForConditionalGeneration.generate

    def twice(self: Any, *args: Any, **kwargs: Any) -> Any:
        streamer = kwargs.pop("streamer", None)
        own(self, *args, **kwargs)
        return own(self, *args, **kwargs, **({} if streamer is None else {"streamer": streamer}))

    monkeypatch.setattr(transformers.LlavaForConditionalGeneration, "generate", twice)
    save_media_model(tmp_path)
    with served(tmp_path) as app:
        body = {"messages": messages(*content(1)), "temperature": 0}
        answer = app.post(stream=stream, max_tokens=6, **body)
        assert answer.status_code == 200, answer.text
        if not stream:
            assert text_of(answer.json()) == expected(app, 1)
        refused = app.post(n=2, **body)
        assert refused.status_code == 400 and "`generate`" in refused.json()["error"]["message"]
        assert app.engine.stats().num_finished == 0
