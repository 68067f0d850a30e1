"""What happens to an unfinished request while others, other threads or the engine's owner act on
the same model."""

from __future__ import annotations

import copy
import os
import pickle
import threading
import time
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hf_paged import OutOfBlocksError, PagedConfig, PagedEngine, RequestResult, last_route
from hf_paged.batching.scheduling.queue import NeverFitsError
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import engine_of, lone_run, prompts, run_all
from tests.support.peft_models import many
from tests.test_forks import holds_in_child

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}


@pytest.mark.parametrize("length", [1, 6])
def test_log_probabilities_of_a_prompt_whose_request_drafts_beside_a_prefill(length: int) -> None:
    assistant = copy.deepcopy(models.get("llama"))
    assistant.generation_config.assistant_confidence_threshold = 0.0

    def result(**options: Any) -> RequestResult:
        with engine_of(max_chunk_tokens=4) as engine:
            first = engine.add_request(prompts(length)[0], GREEDY, prompt_logprobs=True, **options)
            engine.step()
            engine.add_request(prompts(60)[0], GREEDY)
            return run_all(engine)[first]

    plain, drafted = result(), result(assistant_model=assistant)
    assert drafted.num_drafts and drafted.token_ids == plain.token_ids
    assert drafted.prompt_logprobs[0] is plain.prompt_logprobs[0] is None
    assert len(drafted.prompt_logprobs) == length
    assert drafted.prompt_logprobs[1:] == pytest.approx(plain.prompt_logprobs[1:], abs=1e-4)


def test_the_error_of_a_request_that_never_fits_can_be_copied() -> None:
    error = NeverFitsError(SimpleNamespace(), "needs 12 blocks")  # type: ignore[arg-type]
    for copied in (pickle.loads(pickle.dumps(error)), copy.deepcopy(error)):
        assert type(copied) is OutOfBlocksError and str(copied) == str(error)


def test_rows_that_wait_for_others_get_tokens_of_the_new_weights() -> None:
    model, after, prompt = models.build("llama"), models.build("llama", seed=5), prompts(13)[0]
    options = {"do_sample": True, "num_return_sequences": 3, "max_new_tokens": 8, "top_k": 1}
    with PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=2)) as engine:
        name = engine.add_request(prompt, options, seed=0)
        state = engine._core.requests[name]
        while not (len(state.request.sequences) == 3 and state._logits):
            engine.step()
        known = [sequence.token_ids[len(prompt) :] for sequence in state.request.sequences]
        with engine.weights_update("recompute"):
            model.load_state_dict(after.state_dict())
        rows = [sequence.token_ids for sequence in run_all(engine)[name].sequences]
    assert rows == [
        row + lone_run(after, prompt + row, {**GREEDY, "max_new_tokens": 8 - len(row)})[0]
        for row in known
    ]


@pytest.mark.parametrize("storage", ["blocks", "virtual"])
def test_an_update_of_the_weights_may_bring_more_tokens(storage: str) -> None:
    """Unfinished requests may choose these, as a call that begins now may."""
    model, prompt = models.build("llama"), prompts(13)[0]
    with PagedEngine(model, PagedConfig(block_size=8, storage=storage)) as engine:
        request = engine.add_request(prompt, GREEDY)
        for _ in range(3):
            engine.step()
        known = [*engine._core.requests[request].request.sequences[0].token_ids]
        with engine.weights_update("recompute"), torch.no_grad():
            model.resize_token_embeddings(256)
            weights = torch.randn(256, model.config.hidden_size)
            model.lm_head.weight.copy_(weights)
            model.model.embed_tokens.weight.copy_(weights.flip(0))
        result = run_all(engine)[request]
        left = {**GREEDY, "max_new_tokens": 12 - len(known) + len(prompt)}
        (expected,) = lone_run(model, known, left)
        assert max(expected) >= 128 and result.token_ids == known[len(prompt) :] + expected


def test_a_pool_that_is_kept_keeps_its_block_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    with engine_of(block_size="auto") as engine:
        engine.generate(prompts(9), GREEDY)
        core = engine._core
        loop = core.get_loop()
        monkeypatch.setattr(type(core.memory), "better_sizes", lambda memory: memory.sizes)
        with core.keeping_pool():
            assert core.get_loop() is loop
        assert core.get_loop() is not loop


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_child_process_keeps_the_pool_only_for_the_thread_that_forked() -> None:
    with engine_of(idle_release_seconds=0) as engine, ExitStack() as kept:
        core = engine._core

        def leaves_the_context() -> bool:
            in_use = bool(core._pool_user_ids)
            kept.close()
            return in_use and not engine.memory.occupied_bytes

        is_over, is_open = threading.Event(), threading.Event()

        def keep_elsewhere() -> None:
            with core.keeping_pool():
                is_open.set()
                is_over.wait(60)

        other = threading.Thread(target=keep_elsewhere)
        other.start()
        assert is_open.wait(60)
        engine.generate(prompts(9), GREEDY)
        assert engine.memory.occupied_bytes
        try:
            kept.enter_context(core.keeping_pool())
            assert holds_in_child(leaves_the_context)
        finally:
            is_over.set()
            other.join()


@pytest.mark.slow
def test_steps_with_several_adapters_are_no_hooks_to_calls_of_other_threads() -> None:
    model = many(3, lora_bias=False)
    model.set_adapter("a0")
    base, prompt = model.get_base_model(), prompts(12)[0]
    expected = lone_run(base, prompt, GREEDY)

    def call() -> None:
        for _ in range(12):
            assert lone_run(base, prompt, GREEDY, **models.PAGED) == expected
            assert last_route(base).reason.startswith("packed forwards")

    with PagedEngine(model, PagedConfig(block_size=8, capture=False)) as engine:

        def serve() -> None:
            for _ in range(40):
                engine.generate(prompts(5, 9), GREEDY, adapter=["a1", "a2"])

        in_threads(serve, call)


def test_an_idle_pool_is_freed_after_a_request_was_refused() -> None:
    with engine_of(num_blocks=20, idle_release_seconds=0.1) as engine:
        engine.generate(prompts(40), GREEDY)
        with pytest.raises(OutOfBlocksError):
            engine.add_request(prompts(400)[0], GREEDY)
        end = time.monotonic() + 30
        while engine.memory.stats().held_bytes and time.monotonic() < end:
            time.sleep(0.05)
        assert not engine.memory.stats().held_bytes
