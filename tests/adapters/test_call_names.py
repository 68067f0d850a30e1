"""Which adapters the rows of a `generate` call have: beside calls of other threads, and in code
that runs with an adapter."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers.generation.utils import GenerationMixin

import hf_paged
from hf_paged import PagedEngine
from tests.support import models
from tests.support.checks import in_threads
from tests.support.peft_models import ADAPTERS, lora_model
from tests.test_faults import Countdown, FailingProcessor, OnPurpose

peft = pytest.importorskip("peft")

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
PROMPT = models.token_ids(1, 17)


def run(model: Any, name: str | None = None, num_rows: int = 1, **options: Any) -> torch.Tensor:
    names = {} if name is None else {"adapter_names": [name] * num_rows}
    ids = PROMPT.repeat(num_rows, 1)
    return model.generate(
        input_ids=ids, attention_mask=torch.ones_like(ids), **GREEDY, **names, **options
    )


def plain(model: Any) -> dict[str | None, torch.Tensor]:
    """The tokens of each adapter, with PEFT alone; `None`: of the active one."""
    found = {name: run(model, name) for name in (None, *ADAPTERS)}
    assert len({str(ids) for ids in found.values()}) == 3, "the adapters do not differ"
    return found


Tuned = tuple[Any, dict[str | None, torch.Tensor]]


@pytest.fixture(scope="module")
def tuned() -> Tuned:
    """A model that tests leave as it was (`assert_clean`), and the tokens of its adapters."""
    model = lora_model()
    return model, plain(model)


def assert_clean(model: Any, expected: dict[str | None, torch.Tensor]) -> None:
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs
    assert torch.equal(run(model), expected[None])
    assert torch.equal(run(model, **models.PAGED), expected[None])
    hf_paged.check_integrity(model)


@contextlib.contextmanager
def pausing(pause: Callable[[], Any]) -> Iterator[None]:
    """Each `generate` call pauses once PEFT has set its hooks."""
    validate = GenerationMixin._validate_model_kwargs

    @functools.wraps(validate)
    def validated(*args: Any, **kwargs: Any) -> Any:
        pause()
        return validate(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_validate_model_kwargs", validated)
        yield


def test_calls_that_begin_together_have_their_own_names(tuned: Tuned) -> None:
    model, expected = tuned
    run(model, **models.PAGED)  # the model is checked here
    barrier = threading.Barrier(len(ADAPTERS))
    with pausing(lambda: barrier.wait(60)):
        found = in_threads(
            *(functools.partial(run, model, name, **models.PAGED) for name in ADAPTERS)
        )
    for name, ids in zip(ADAPTERS, found):
        assert torch.equal(ids, expected[name]), name
    assert hf_paged.last_route(model).road == "engine"
    assert_clean(model, expected)


def test_a_call_that_begins_leaves_the_forwards_of_others_alone(tuned: Tuned) -> None:
    model, expected = tuned
    has_begun, may_go_on = threading.Event(), threading.Event()
    pausing_threads: list[int] = []

    def pause() -> None:
        if threading.get_ident() in pausing_threads:
            has_begun.set()
            assert may_go_on.wait(60)

    def begin() -> torch.Tensor:
        pausing_threads.append(threading.get_ident())
        return run(model, "second", **models.PAGED)

    def others() -> dict[str | None, torch.Tensor]:
        try:
            assert has_begun.wait(60)
            found = {name: run(model, name, **models.PAGED) for name in expected}
            assert hf_paged.last_route(model).road == "engine"
            return found
        finally:
            may_go_on.set()

    with pausing(pause):
        late, found = in_threads(begin, others)
    assert torch.equal(late, expected["second"])
    for name, ids in found.items():
        assert torch.equal(ids, expected[name]), name
    assert_clean(model, expected)


@pytest.mark.parametrize("options", [{}, models.PAGED], ids=["plain", "paged"])
def test_no_hook_stays_after_an_error(options: dict[str, Any], tuned: Tuned) -> None:
    model, expected = tuned
    failing = {"logits_processor": [FailingProcessor(Countdown(2, OnPurpose))]}
    with pytest.raises(OnPurpose):
        run(model, "second", **failing, **options)
    assert_clean(model, expected)


@pytest.mark.slow_cases(but=["first-plain", "second-paged", "second-engine", "__base__-paged"])
@pytest.mark.parametrize("how", ["plain", "paged", "engine"])
@pytest.mark.parametrize("outer", ADAPTERS)
def test_calls_of_a_processor_have_its_rows_adapter_or_their_own(
    outer: str, how: str, tuned: Tuned
) -> None:
    model, expected = tuned
    found: list[tuple[str, torch.Tensor]] = []

    def judge(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not found:
            for options in ({}, models.PAGED):
                found.append((outer, run(model, **options)))
                found.extend((name, run(model, name, **options)) for name in ADAPTERS)
                found.append((outer, run(model, **options)))
            if how != "plain":  # in PEFT's own context, one name is for one row
                found.append((outer, run(model, num_rows=3, **models.PAGED)[2:]))
            with model.disable_adapter():
                found.append(("__base__", run(model, **models.PAGED)))
        return scores

    if how == "engine":
        with PagedEngine(model, {"block_size": 8}) as engine:
            (result,) = engine.generate(
                PROMPT.tolist(), GREEDY, adapter=outer, logits_processor=[judge]
            )
            assert result.error is None
            tokens = torch.tensor([[*result.prompt_ids, *result.token_ids]])
    else:
        options = models.PAGED if how == "paged" else {}
        tokens = run(model, outer, logits_processor=[judge], **options)
    assert torch.equal(tokens, expected[outer])
    for name, ids in found:
        assert torch.equal(ids, expected[name]), name
    assert_clean(model, expected)


def test_rows_of_one_prompt_on_transformers_own_loop() -> None:
    """Their names differ, so they share no prefill."""
    model, names = lora_model(), ["first", "second"]
    options = {**GREEDY, "do_sample": True, "num_return_sequences": 2}
    internals = {"return_dict_in_generate": True, "output_hidden_states": True}
    found = []
    for more in ({}, models.PAGED):
        torch.manual_seed(1)
        output = model.generate(
            input_ids=PROMPT,
            attention_mask=torch.ones_like(PROMPT),
            adapter_names=names,
            **options,
            **internals,
            **more,
        )
        found.append(output.sequences)
    assert torch.equal(*found)
    assert hf_paged.last_route(model).road == "hf_loop"


def test_uninstall_restores_the_context_of_peft() -> None:
    wrapper = peft.PeftModel._enable_peft_forward_hooks
    hf_paged.uninstall()
    try:
        assert peft.PeftModel._enable_peft_forward_hooks is wrapper.__wrapped__
    finally:
        hf_paged.install()
