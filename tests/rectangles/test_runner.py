"""Models that cannot be packed run as rectangular batches."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hf_paged import PagedConfig, PagedEngine
from hf_paged.rectangles.states import StateSpec
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.checks import assert_paged_is_plain
from tests.support.engine_helpers import (
    MODES,
    Asked,
    assert_drained,
    assert_served_as_lone,
    lone_run,
    run_all,
)
from tests.support.forwards import build, forwards, fresh, prompts
from tests.support.models import BEFORE_5_18

CLASSES = [
    "Qwen3NextForCausalLM",  # linear and full attention
    "BambaForCausalLM",  # Mamba states and full attention
    "DogeForCausalLM",  # a bias from the cached values
    "MambaForCausalLM",  # states only
]
SMALL = PagedConfig(block_size=8)
LENGTHS = (5, 19, 9, 14)


def skip_where_plain_is_broken(name: str) -> None:
    if name == "DogeForCausalLM" and BEFORE_5_18:
        pytest.skip("before 5.18, tokens of plain Doge see later ones unless its prompt is padded")


@pytest.mark.slow_cases("BambaForCausalLM", "DogeForCausalLM")
@pytest.mark.parametrize("name", CLASSES)
def test_requests_that_come_and_go_share_forwards(name: str) -> None:
    skip_where_plain_is_broken(name)
    model = build(name)
    counts = (12, 6, 9, 8)
    texts = prompts(*LENGTHS)
    options = [{"do_sample": False, "max_new_tokens": n, "min_new_tokens": n} for n in counts]
    config = PagedConfig(block_size=8, capture=False)  # a recording runs forwards, too
    with forwards(model) as shapes, PagedEngine(model, config) as engine:
        asked = Asked(engine, texts[:1], options)
        engine.step()
        shapes.clear()  # from the one-time checks of a model
        for i in range(1, 4):  # one more joins in each step; none ends
            asked.add(str(i), texts[i], options[i])
            engine.step()
        results = run_all(engine)
        assert_drained(engine)
        assert engine.route is not None and engine.route.road == "engine"
    assert len(shapes) <= (max(counts) - 1) + 3, f"{len(shapes)} forwards: {shapes}"
    assert (4, 1) in shapes, f"four rows were meant to decode side by side: {shapes}"
    asked.check(results)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("name", CLASSES)
def test_all_modes_in_one_batch(name: str, device: torch.device) -> None:
    skip_where_plain_is_broken(name)
    model = models.put(build(name), device)
    texts = prompts(*range(4, 4 + 3 * len(MODES), 3))
    assert_served_as_lone(model, texts, MODES.values())


@pytest.mark.slow_cases(but=["RobertaForCausalLM-*", "DiffLlamaForCausalLM-*"])
@pytest.mark.parametrize(
    ("name", "num_blocks"),
    [
        ("Qwen3NextForCausalLM", 19),
        ("DiffLlamaForCausalLM", 19),
        # their logits after a prompt differ from those after its tokens one by one
        ("Zamba2ForCausalLM", None),
        ("RobertaForCausalLM", None),
        ("ProphetNetForCausalLM", None),
    ],
)
def test_rows_that_are_preempted_or_interrupted_are_computed_again(
    name: str, num_blocks: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also states that layers updated before an interrupt."""
    model, texts = build(name), prompts(20, 25, 9, 31)
    modes = [MODES[mode] for mode in ("greedy", "samples", "beams", "sample")]
    kinds = torch.nn.LayerNorm | torch.nn.Linear
    last = [module for module in model.modules() if isinstance(module, kinds)][-1]
    calls = 0

    def forward(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == 5:
            raise KeyboardInterrupt
        return type(last).forward(last, *args, **kwargs)

    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=num_blocks)) as engine:
        asked = Asked(engine, texts, modes)
        outputs = engine.step()
        monkeypatch.setattr(last, "forward", forward)
        with pytest.raises(KeyboardInterrupt):
            for _ in range(8):
                outputs += engine.step()
        monkeypatch.undo()
        if num_blocks is None:
            with engine.weights_update("recompute"):
                pass  # as after a preemption
        results = run_all(engine, {o.request_id: o.result for o in outputs if o.result})
        assert engine.stats().num_preemptions > 0, "the budget was meant to be short"
        assert_drained(engine)
    asked.check(results)


def test_states_go_with_the_last_request() -> None:
    """However it ends."""
    with PagedEngine(build("Qwen3NextForCausalLM"), SMALL) as engine:
        for is_cancelled in (True, False):
            stream = engine.stream(prompts(9, 9), MODES["greedy"])
            names = {next(stream).request_id for _ in range(2)}
            states = engine.memory.group(StateSpec()).storage
            assert states.holders()
            for name in names if is_cancelled else ():
                engine.cancel(name)
            stream.close()
            assert not [ref for ref, _ in states._rows.values() if ref() is not None]
            run_all(engine)
            assert_drained(engine)


def test_a_model_that_stores_tokens_of_its_own_leaves_the_pool_intact() -> None:
    """XLM appends a mask token to every step, so the cache holds more tokens than the request."""
    model = tiny_model(transformers.XLMWithLMHeadModel)
    with PagedEngine(model, SMALL) as engine:
        asked = Asked(engine, prompts(5, 9), [MODES["greedy"]] * 2)
        results: dict[str, Any] = {}
        while len(results) < 2:
            results.update({o.request_id: o.result for o in engine.step() if o.result})
            engine.check_integrity()
    asked.check(results)


class Cacheless(transformers.LlamaForCausalLM):
    """Passes no cache on, as custom code does that knows the cache by a name of another version of
    transformers."""

    def prepare_inputs_for_generation(
        self, input_ids: torch.Tensor, attention_mask: Any = None, **inputs: Any
    ) -> dict[str, Any]:
        return {"input_ids": input_ids, "attention_mask": attention_mask, "use_cache": True}

    def forward(self, **inputs: Any) -> Any:  # takes no positions by name, so it is not packed
        return super().forward(**inputs)


@pytest.mark.parametrize("mode", ["greedy", "beams", "samples"])
def test_a_model_that_ignores_its_cache_gives_its_own_tokens(
    mode: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = Cacheless(models.config("llama")).eval()
    models.init_weights(model, 0)
    assert_paged_is_plain(model, models.prompt("llama"), {**MODES[mode], "pad_token_id": 0})
    assert ["ignores the cache" in message for message in caplog.messages].count(True) == 1


def test_layers_that_only_another_call_has_used_stay_empty() -> None:
    """Such as those that attend to an image, which then have blocks, for rows without one."""
    model = build("MllamaForConditionalGeneration")
    inputs = make_inputs(model, seed=0)
    options = {"max_new_tokens": 16, "min_new_tokens": 16, "do_sample": False, "num_beams": 3}
    model.generate(**inputs["image"], **options, **models.PAGED)
    for _ in range(2):
        assert_paged_is_plain(model, inputs["text"], options)


def with_open_gates() -> Any:
    """A model some of whose layers attend to an image alone, and are used without one, too, if they
    hold keys."""
    model = fresh("MllamaForCausalLM")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("attn_gate"):
                parameter.fill_(1.0)
    return model


def test_layers_that_cached_tokens_have_not_used_stay_empty() -> None:
    """The image's keys and values are in blocks that the text's block tables also name."""
    model = with_open_gates()
    generator = torch.Generator().manual_seed(0)
    image = 3 * torch.randn(4, 45, model.config.hidden_size, generator=generator)
    options = {"max_new_tokens": 16, "min_new_tokens": 16}
    [text] = prompts(48)
    rows = torch.tensor([text[:40]] * 4)
    model.generate(rows, cross_attention_states=image, **options, **models.PAGED)
    for length in (32, 34, 33, 37):  # the first one is cached
        inputs = {"input_ids": torch.tensor([text[:length]])}
        for num_beams in (1, 3):
            assert_paged_is_plain(model, inputs, {**options, "num_beams": num_beams})


def test_layers_that_loaded_tokens_have_not_used_stay_empty(tmp_path: Path) -> None:
    """... although no prompt of token ids has begun in this engine."""
    model, [text] = with_open_gates(), prompts(48)
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12}
    expected = lone_run(model, text, options)
    with PagedEngine(model) as engine:
        engine.save_prefix(text[:32], tmp_path / "prefix")
    with PagedEngine(model) as engine:
        engine.load_prefix(tmp_path / "prefix")
        (layer,) = engine._core.memory.layers()  # the other has blocks after an image
        width = model.config.hidden_size // model.config.num_attention_heads
        keys = torch.ones(1, model.config.num_key_value_heads, 1, width)
        engine._core.memory.groups[layer.spec].storage.make(1, keys, keys)
        (result,) = engine.generate([text], options)
        assert [list(result.token_ids)] == expected and engine.stats().num_prefix_hit_tokens == 32
