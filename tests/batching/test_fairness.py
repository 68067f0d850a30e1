"""What a request costs before it runs, other requests do not wait for."""

from __future__ import annotations

import threading
from typing import Any

import pytest

import hf_paged
from hf_paged.cache.block_pool import OutOfBlocksError
from tests.support import models

WAIT = 60.0  # seconds: a longer wait is a hang
OPTIONS = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}


class SlowTokenizer:
    """A tokenizer whose calls last until another thread has taken a step of the engine."""

    def __init__(self) -> None:
        self.tokenizer = models.tokenizer()
        self.chat_template = self.tokenizer.chat_template = (
            "{% for message in messages %}{{ message.content }}{% endfor %}"
        )
        self.engine: Any = None
        self.num_outputs: list[int] = []

    def _step(self) -> None:
        outputs: list[Any] = []
        thread = threading.Thread(target=lambda: outputs.extend(self.engine.step()), daemon=True)
        thread.start()
        thread.join(WAIT)
        assert not thread.is_alive(), "steps wait for the tokenizer"
        self.num_outputs.append(len(outputs))

    def __call__(self, text: str, **kwargs: Any) -> Any:
        self._step()
        return self.tokenizer(text, **kwargs)

    def apply_chat_template(self, *args: Any, **kwargs: Any) -> Any:
        self._step()
        return self.tokenizer.apply_chat_template(*args, **kwargs)

    def decode(self, *args: Any, **kwargs: Any) -> Any:
        return self.tokenizer.decode(*args, **kwargs)


@pytest.mark.parametrize(
    "prompt", ["once upon", [{"role": "user", "content": "once upon"}]], ids=["text", "chat"]
)
def test_steps_go_on_while_a_prompt_is_tokenized(prompt: Any) -> None:
    tokenizer = SlowTokenizer()
    with hf_paged.PagedEngine(models.get("llama"), tokenizer=tokenizer) as engine:
        tokenizer.engine = engine
        engine.add_request([5, 6, 7], OPTIONS)
        engine.add_request(prompt, OPTIONS)
        assert tokenizer.num_outputs == [1]  # a token of the first request
        assert len(engine.step()) == 2


def test_a_prompt_that_never_fits_is_refused_without_waiting_for_a_step() -> None:
    long = [5] * 2000
    with hf_paged.PagedEngine(models.get("llama"), {"num_blocks": 20, "block_size": 8}) as engine:
        engine.add_request([5, 6, 7], OPTIONS)
        refusals: list[Any] = []

        def add() -> None:
            try:
                engine.add_request(long, OPTIONS)
            except OutOfBlocksError as error:
                refusals.append(error)

        thread = threading.Thread(target=add, daemon=True)
        with engine._core.lock:  # as in a step
            thread.start()
            thread.join(WAIT)
            assert not thread.is_alive()
        assert "needs 254 blocks of 8 tokens, at most 20 are available" in str(refusals[0])
        engine.check_integrity()


@pytest.mark.parametrize("length", [100, 152, 153, 159, 160, 161])
@pytest.mark.parametrize("name", ["llama", "gemma3", "qwen3_next"])
def test_what_is_refused_early_is_what_add_refuses(name: str, length: int) -> None:
    """... at the limit, with sliding windows and with states."""
    model, options = models.get(name), {**OPTIONS, "max_new_tokens": 1}
    errors = []
    for is_busy in (False, True):
        with hf_paged.PagedEngine(model, {"num_blocks": 20, "block_size": 8}) as engine:
            if is_busy:
                engine.add_request([5, 6, 7], options)
            try:
                engine.add_request([5] * length, options)
                errors.append("")
            except OutOfBlocksError as error:
                errors.append(str(error).partition(" ")[2].partition(" ")[2])
    assert errors[0] == errors[1]


def test_positions_are_refused_early_in_the_same_words() -> None:
    with hf_paged.PagedEngine(models.get("gpt2")) as engine:
        count = engine.model.config.n_positions
        for _ in range(2):
            with pytest.raises(
                IndexError,
                match=rf"takes {count + 1} positions.* holds {count}: shorten the prompt",
            ):
                engine.add_request([5] * (count + 1), OPTIONS)
            engine.add_request([5, 6], OPTIONS)
