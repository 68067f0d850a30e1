"""PEFT models in `generate`: the adapters of a call's rows, beside calls of other threads, and in
code that runs with an adapter."""

from __future__ import annotations

import contextlib
import functools
import threading

import pytest
import torch
from transformers.generation.utils import GenerationMixin

import hf_paged
from hf_paged import PagedEngine
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import MODES
from tests.support.peft_models import ADAPTERS, active, lora_model, peft
from tests.test_faults import Countdown, FailingProcessor, OnPurpose

GREEDY = {"do_sample": False, "max_new_tokens": 8, "pad_token_id": 0}
PROMPT = models.token_ids(1, 17)


def run(model, name=None, num_rows=1, **options):
    names = {} if name is None else {"adapter_names": [name] * num_rows}
    ids = PROMPT.repeat(num_rows, 1)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return model.generate(**inputs, **GREEDY, **names, **options)


@pytest.fixture(scope="module")
def tuned():
    """A model that tests leave as it was (`assert_clean`), and the tokens of its adapters with PEFT
    alone; `None`: of the active one."""
    model = lora_model()
    expected = {name: run(model, name) for name in (None, *ADAPTERS)}
    assert len({str(ids) for ids in expected.values()}) == 3, "the adapters do not differ"
    return model, expected


def assert_clean(model, expected):
    for module in model.modules():
        assert not module._forward_pre_hooks and not module._forward_pre_hooks_with_kwargs
    assert torch.equal(run(model), expected[None])
    assert torch.equal(run(model, **models.PAGED), expected[None])
    hf_paged.check_integrity(model)


def assert_paged_is_plain(model, inputs, options):
    """The tokens of both, with the same draws."""
    found = []
    for paged in ({}, models.PAGED):
        torch.manual_seed(1)
        found.append(model.generate(**inputs, **options, **paged))
    assert torch.equal(*found)


@pytest.mark.slow_cases(but=["*-__base__-*", "*-greedy", "cuda-*"])
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams_eos"])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_generate(mode, adapter, device):
    model = lora_model().to(device)
    inputs = models.put(models.padded_prompt("llama", (26, 4, 17)), device)
    with active(model, adapter):
        for _ in range(2):  # again with cached blocks
            assert_paged_is_plain(model, inputs, MODES[mode])
            assert hf_paged.last_route(model).road == "engine"
    hf_paged.check_integrity(model)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams"])
def test_adapter_names_in_a_batch(mode, device):
    model, options = lora_model().to(device), dict(MODES[mode])
    inputs = models.put(models.padded_prompt("llama", (26, 4, 17, 17)), device)
    if mode == "samples":  # PEFT repeats the names for beams only
        options.pop("num_return_sequences")
    names = ["first", "__base__", "second", "first"]
    # rows keep their prompts and swap adapters: no cached block may be reused; afterwards the model
    # is as before, and its cache clean
    for more in ({"adapter_names": names}, {"adapter_names": names[::-1]}, {}):
        assert_paged_is_plain(model, inputs, options | more)
    hf_paged.check_integrity(model)


@contextlib.contextmanager
def pausing(pause):
    """Each `generate` call pauses once PEFT has set its hooks."""
    validate = GenerationMixin._validate_model_kwargs

    @functools.wraps(validate)
    def validated(*args, **kwargs):
        pause()
        return validate(*args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(GenerationMixin, "_validate_model_kwargs", validated)
        yield


def test_calls_that_begin_together_have_their_own_names(tuned):
    model, expected = tuned
    run(model, **models.PAGED)  # the model is checked here
    barrier = threading.Barrier(len(ADAPTERS))
    calls = [functools.partial(run, model, name, **models.PAGED) for name in ADAPTERS]
    with pausing(lambda: barrier.wait(60)):
        found = in_threads(*calls)
    for name, ids in zip(ADAPTERS, found):
        assert torch.equal(ids, expected[name]), name
    assert hf_paged.last_route(model).road == "engine"
    assert_clean(model, expected)


def test_a_call_that_begins_leaves_the_forwards_of_others_alone(tuned):
    model, expected = tuned
    has_begun, may_go_on, late = threading.Event(), threading.Event(), []

    def pause():
        if threading.get_ident() in late:
            has_begun.set()
            assert may_go_on.wait(60)

    def begin():
        late.append(threading.get_ident())
        return run(model, "second", **models.PAGED)

    def others():
        try:
            assert has_begun.wait(60)
            return {name: run(model, name, **models.PAGED) for name in expected}
        finally:
            may_go_on.set()

    with pausing(pause):
        ids, found = in_threads(begin, others)
    assert torch.equal(ids, expected["second"])
    for name, ids in found.items():
        assert torch.equal(ids, expected[name]), name
    assert hf_paged.last_route(model).road == "engine"
    assert_clean(model, expected)


@pytest.mark.parametrize("options", [{}, models.PAGED], ids=["plain", "paged"])
def test_no_hook_stays_after_an_error(options, tuned):
    model, expected = tuned
    failing = {"logits_processor": [FailingProcessor(Countdown(2, OnPurpose))]}
    with pytest.raises(OnPurpose):
        run(model, "second", **failing, **options)
    assert_clean(model, expected)


@pytest.mark.slow_cases(but=["first-plain", "second-paged", "second-engine", "__base__-paged"])
@pytest.mark.parametrize("how", ["plain", "paged", "engine"])
@pytest.mark.parametrize("outer", ADAPTERS)
def test_calls_of_a_processor_have_its_rows_adapter_or_their_own(outer, how, tuned):
    model, expected = tuned
    found = []

    def judge(ids, scores):
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
            prompt, code = PROMPT.tolist(), {"logits_processor": [judge]}
            (result,) = engine.generate(prompt, GREEDY, adapter=outer, **code)
            assert result.error is None
            tokens = torch.tensor([[*result.prompt_ids, *result.token_ids]])
    else:
        options = models.PAGED if how == "paged" else {}
        tokens = run(model, outer, logits_processor=[judge], **options)
    assert torch.equal(tokens, expected[outer])
    for name, ids in found:
        assert torch.equal(ids, expected[name]), name
    assert_clean(model, expected)


def test_rows_of_one_prompt_on_transformers_own_loop():
    """Their names differ, so they share no prefill."""
    model, found = lora_model(), []
    options = {"adapter_names": ["first", "second"], "do_sample": True, "num_return_sequences": 2}
    options |= {"return_dict_in_generate": True, "output_hidden_states": True, "max_new_tokens": 8}
    for more in ({}, models.PAGED):
        torch.manual_seed(1)
        output = model.generate(
            input_ids=PROMPT, attention_mask=torch.ones_like(PROMPT), **options, **more
        )
        found.append(output.sequences)
    assert torch.equal(*found)
    assert hf_paged.last_route(model).road == "hf_loop"


def test_uninstall_restores_the_context_of_peft():
    wrapper = peft.PeftModel._enable_peft_forward_hooks
    hf_paged.uninstall()
    try:
        assert peft.PeftModel._enable_peft_forward_hooks is wrapper.__wrapped__
    finally:
        hf_paged.install()
