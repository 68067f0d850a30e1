"""What a request costs before it runs, other requests do not wait for."""

from __future__ import annotations

import copy
from typing import Any

import pytest

import hf_paged
from hf_paged.cache.block_pool import OutOfBlocksError
from tests.support import models
from tests.support.checks import in_threads

OPTIONS = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}


def test_steps_go_on_while_a_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = copy.deepcopy(models.tokenizer())
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    kind, outputs = type(tokenizer), []
    with hf_paged.PagedEngine(models.get("llama"), tokenizer=tokenizer) as engine:

        def stepping(method: Any) -> Any:
            """A call lasts until another thread has taken a step."""

            def call(*args: Any, **kwargs: Any) -> Any:
                outputs.extend(in_threads(engine.step)[0])
                return method(*args, **kwargs)

            return call

        for name in ("__call__", "apply_chat_template"):
            monkeypatch.setattr(kind, name, stepping(getattr(kind, name)))
        engine.add_request([5, 6, 7], OPTIONS)
        for prompt in ("once upon", [{"role": "user", "content": "once upon"}]):
            outputs.clear()
            engine.add_request(prompt, OPTIONS)
            assert outputs
        assert len(engine.step()) == 3


def test_a_prompt_that_never_fits_is_refused_without_waiting_for_a_step() -> None:
    long = [5] * 2000
    with hf_paged.PagedEngine(models.get("llama"), {"num_blocks": 20, "block_size": 8}) as engine:
        engine.add_request([5, 6, 7], OPTIONS)
        told = "needs 254 blocks of 8 tokens, but at most 20 are available"

        def add() -> None:
            with pytest.raises(OutOfBlocksError, match=told):
                engine.add_request(long, OPTIONS)

        with engine._core.lock:  # as in a step
            in_threads(add)
        engine.check_integrity()


@pytest.mark.parametrize(
    ("name", "num_blocks", "lengths"),
    [
        ("llama", 20, (152, 153, 160, 161)),
        ("gemma3", 20, (152, 153, 160, 161)),
        ("qwen3_next", 20, (152, 153, 160, 161)),
        ("gpt2", 100, (256, 257)),
    ],
)
def test_what_is_refused_early_is_what_add_refuses(
    name: str, num_blocks: int, lengths: tuple[int, ...]
) -> None:
    """... at the limit, with sliding windows, with states and with a table of positions."""
    config, options = {"num_blocks": num_blocks, "block_size": 8}, {**OPTIONS, "max_new_tokens": 1}
    for length in lengths:
        errors = []
        for is_busy in (False, True):
            with hf_paged.PagedEngine(models.get(name), config) as engine:
                if is_busy:
                    engine.add_request([5, 6, 7], options)
                try:
                    engine.add_request([5] * length, options, request_id="long")
                    errors.append("")
                except (OutOfBlocksError, IndexError) as error:
                    errors.append(str(error))
        assert errors[0] == errors[1]
        if name == "gpt2":
            told = "takes 257 positions, and the model's table of positions holds 256: shorten"
            assert (told in errors[0]) == (length == 257) == bool(errors[0])
