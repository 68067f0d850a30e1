"""Chat messages as prompts, and engines loaded by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_paged import PagedEngine
from tests.support.engine_helpers import Asked, lone_run, run_all
from tests.support.models import build, get, token_ids, tokenizer

TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'tool' %}{{ raise_exception('no tools here') }}{%"
    " endif %}{{ m['role'] + ': ' + m['content'] + '\n' }}{% endfor %}{% if add_generation_prompt"
    " %}{{ 'assistant: ' }}{% endif %}"
)
CHAT = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "the memory"}]
OTHER = [{"role": "user", "content": "another"}]
TEXTS = ["system: be brief\nuser: the memory\nassistant: ", "user: another\nassistant: "]
GREEDY = {"max_new_tokens": 6, "do_sample": False}
PROMPT = token_ids(1, 12)[0].tolist()


def _tokenizer(template: str | None = TEMPLATE) -> Any:
    made = copy.deepcopy(tokenizer())
    made.chat_template = template
    return made


def test_messages_go_through_the_template() -> None:
    made = _tokenizer()
    expected = [made(text, add_special_tokens=False)["input_ids"] for text in TEXTS]
    with PagedEngine(get("llama"), tokenizer=made) as engine:
        results = engine.generate([CHAT, tuple(OTHER), expected[0], "text"], GREEDY)
        assert [result.error for result in results] == [None] * 4
        assert [result.prompt_ids for result in results[:2]] == expected
        assert results[0].token_ids == results[2].token_ids
        engine.add_request(OTHER, GREEDY, request_id="one")
        assert run_all(engine)["one"].token_ids == results[1].token_ids
        with pytest.raises(ValueError, match="pass a list of prompts"):
            engine.generate(CHAT, GREEDY)


def test_messages_that_cannot_be_served() -> None:
    picture = [{"role": "user", "content": [{"type": "image"}]}]
    of_a_tool = [{"role": "tool", "content": "x"}]
    for prompt, made, message in [
        (CHAT, None, "is a chat: make the engine with `tokenizer=`"),
        (CHAT, _tokenizer(None), "no chat template: set `tokenizer.chat_template`"),
        ([CHAT[0], {"content": "x"}], _tokenizer(), "message 1 of the chat is .*role"),
        ([CHAT[0], 7], _tokenizer(), "message 1 of the chat is 7"),
        (of_a_tool, _tokenizer(), "does not take these messages: no tools here"),
        (picture, _tokenizer(), "type 'image'.*processor"),
    ]:
        with PagedEngine(get("llama"), tokenizer=made) as engine:
            with pytest.raises(ValueError, match=message):
                engine.add_request(prompt, GREEDY)
            assert not engine.has_unfinished and engine.memory.stats().held_bytes == 0
            (result,) = engine.generate([prompt], GREEDY)
            assert isinstance(result.error, ValueError)


def test_loaded_with_its_tokenizer(tmp_path: Path) -> None:
    build("llama").save_pretrained(tmp_path)
    _tokenizer().save_pretrained(tmp_path)
    given = {"config": {"block_size": 8}, "device_map": "cpu", "dtype": "float32"}
    with PagedEngine.from_pretrained(tmp_path, **given) as engine:
        assert engine.config.block_size == 8 and not engine.model.training
        Asked(engine, [PROMPT], GREEDY).check()
        assert engine.generate([CHAT], GREEDY)[0].text is not None
    with PagedEngine.from_pretrained(str(tmp_path), dtype=torch.bfloat16) as engine:
        assert engine.model.dtype == torch.bfloat16
    for options, error, message in (
        ({"config": {"block_size": 7}}, ValueError, "block_size"),
        ({"tokenizer": str(tmp_path)}, ValueError, "pass a tokenizer"),
        ({}, OSError, "missing"),
    ):
        with pytest.raises(error, match=message):
            PagedEngine.from_pretrained(tmp_path / "missing", **options)
    with pytest.raises(ValueError, match="pass a tokenizer"):
        PagedEngine(get("llama"), tokenizer=tmp_path)


@pytest.mark.parametrize("name", ["t5", "gemma3", "gpt2"])
def test_loaded_as_the_class_that_was_saved(name: str, tmp_path: Path) -> None:
    """Options of custom code are ignored for a class of transformers."""
    model = build(name)
    model.save_pretrained(tmp_path)
    with PagedEngine.from_pretrained(tmp_path, code_revision="main") as engine:
        assert type(engine.model) is type(model) and engine.tokenizer is None
        (result,) = engine.generate([PROMPT], GREEDY)
    assert [result.token_ids] == lone_run(model, PROMPT, GREEDY)


@pytest.mark.parametrize(("name", "target"), [("llama", "q_proj"), ("t5", "q")])
def test_loaded_adapter(name: str, target: str, tmp_path: Path) -> None:
    """Also of a model that is not causal."""
    peft = pytest.importorskip("peft")
    build(name).save_pretrained(tmp_path / "base")
    _tokenizer().save_pretrained(tmp_path / "base")
    base = type(build(name)).from_pretrained(tmp_path / "base")
    lora = peft.LoraConfig(target_modules=[target], init_lora_weights=False)
    model = peft.get_peft_model(base, lora).eval()
    model.save_pretrained(tmp_path / "adapter")
    expected, plain = (lone_run(each, PROMPT, GREEDY)[0] for each in (model, build(name)))
    assert plain != expected
    with PagedEngine.from_pretrained(tmp_path / "adapter") as engine:
        assert engine.tokenizer is not None
        for adapter, tokens in ((None, expected), ("__base__", plain)):
            assert engine.generate([PROMPT], GREEDY, adapter=adapter)[0].token_ids == tokens
