"""What happens to requests while others, other threads or the engine's owner act on the same
model."""

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

import hf_paged
from hf_paged import OutOfBlocksError, PagedConfig, PagedEngine, RequestResult, last_route
from hf_paged.batching.scheduling.queue import NeverFitsError
from hf_paged.cache.groups import GroupSpec
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import engine_of, lone_run, prompts, run_all
from tests.support.peft_models import lone_with, many
from tests.support.rooms import needs_fingerprints
from tests.test_forks import holds_in_child

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
LONGER = {**GREEDY, "max_new_tokens": 25}
ENDLESS = {**GREEDY, "max_new_tokens": 30, "eos_token_id": None}


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
            in_use = bool(core._pool_thread_ids)
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


# --------------------------------------------------------------- several callers on one model


@pytest.mark.slow
def test_an_adapter_of_one_engine_is_not_seen_by_other_callers() -> None:
    """The active adapter is state of the model, so one forward runs at a time, for any caller."""
    model, (prompt,) = many(2), models.token_ids(1, 40).tolist()
    names = list(model.peft_config)
    plain = {name: lone_with(model, name, prompt, LONGER) for name in names}
    assert plain[names[0]] != plain[names[1]]
    model.set_adapter(names[0])

    def engine(name: str) -> None:
        with PagedEngine(model, {"block_size": 8}) as engine:
            for _ in range(6):
                (result,) = engine.generate([prompt], LONGER, adapter=name)
                assert [result.token_ids] == plain[name], name

    def generate() -> None:
        for _ in range(6):
            assert lone_run(model, prompt, LONGER, **models.PAGED) == plain[names[0]]

    in_threads(lambda: engine(names[1]), lambda: engine(names[0]), generate)
    assert model.active_adapter == names[0]


def test_writing_to_a_returned_cache_leaves_the_prefix_cache_alone() -> None:
    """A full block that is cropped and filled again is copied first: the prefix index holds its old
    tokens."""
    model, inputs = models.build("llama"), models.prompt("llama", 2, 40)
    expected = model.generate(**inputs, **LONGER)
    for _ in range(2):
        output = model.generate(**inputs, **LONGER, **models.PAGED, return_dict_in_generate=True)
        assert torch.equal(expected, output.sequences)
        cache = output.past_key_values
        cache.crop(-(cache.get_seq_length() - 12))  # into the middle of the second block
        with torch.no_grad():
            model(models.token_ids(2, 9, seed=7), past_key_values=cache)
        hf_paged.check_integrity(model)
        del output, cache
        assert torch.equal(expected, model.generate(**inputs, **LONGER, **models.PAGED))


@needs_fingerprints
@pytest.mark.parametrize("first", [True, False])
def test_requests_are_computed_in_the_precision_in_which_they_were_added(first: bool) -> None:
    """Autocast is per thread, and another may take the steps: no request joins others of another
    precision, and none finds their prefixes."""
    model, (prompt,) = models.build("llama"), models.token_ids(1, 40).tolist()
    with PagedEngine(model, {"block_size": 8}) as engine:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=first):
            engine.add_request(prompt, LONGER)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=not first):
            with pytest.raises(ValueError, match="autocast uses"):
                engine.add_request(prompt, LONGER)
            run_all(engine)
            layer = engine.memory.groups[GroupSpec()].storage.layers[0]
            assert layer.values.dtype == (torch.bfloat16 if first else torch.float32)
            for num_hits in (0, 32):
                (result,) = engine.generate([prompt], LONGER)
                assert result.num_prefix_hit_tokens == num_hits
                assert not first or [result.token_ids] == lone_run(model, prompt, LONGER)


# ------------------------------------------------ what a request costs others, before it runs


def test_steps_go_on_while_a_prompt_is_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = copy.deepcopy(models.tokenizer())
    tokenizer.chat_template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    kind, outputs = type(tokenizer), []
    with engine_of(tokenizer=tokenizer) as engine:

        def stepping(method: Any) -> Any:
            """A call lasts until another thread has taken a step."""

            def call(*args: Any, **kwargs: Any) -> Any:
                outputs.extend(in_threads(engine.step)[0])
                return method(*args, **kwargs)

            return call

        for name in ("__call__", "apply_chat_template"):
            monkeypatch.setattr(kind, name, stepping(getattr(kind, name)))
        engine.add_request([5, 6, 7], ENDLESS)
        for prompt in ("once upon", [{"role": "user", "content": "once upon"}]):
            outputs.clear()
            engine.add_request(prompt, ENDLESS)
            assert outputs
        assert len(engine.step()) == 3


def test_a_prompt_that_never_fits_is_refused_without_waiting_for_a_step() -> None:
    long = [5] * 2000
    with engine_of(num_blocks=20) as engine:
        engine.add_request([5, 6, 7], ENDLESS)
        told = "needs 254 blocks of 8 tokens, but at most 20 are available"

        def add() -> None:
            with pytest.raises(OutOfBlocksError, match=told):
                engine.add_request(long, ENDLESS)

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
    options = {**ENDLESS, "max_new_tokens": 1}
    for length in lengths:
        errors = []
        for is_busy in (False, True):
            with engine_of(name, num_blocks=num_blocks) as engine:
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
