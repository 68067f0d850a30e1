"""Options of rooms that are not there raise; calls that ask for none of them do not notice."""

from __future__ import annotations

import runpy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import transformers
from transformers.generation.continuous_batching import ContinuousMixin

import hf_paged
from hf_paged import PagedCache, PagedEngine, last_route, rooms
from hf_paged.rooms import is_installed
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_media import media_inputs
from tests.support.engine_helpers import lone_run, run_all
from tests.support.forwards import build

IDS = models.token_ids(2, 7)
GREEDY = {"max_new_tokens": 6, "do_sample": False}


@pytest.fixture(autouse=True)
def without_rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rooms, "is_installed", lambda name: False)
    rooms.room.cache_clear()
    yield
    monkeypatch.undo()
    rooms.room.cache_clear()
    hf_paged.install()  # again with the rooms


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Takes away these rooms alone."""
    monkeypatch.setattr(
        rooms, "is_installed", lambda name: name not in names and is_installed(name)
    )


def refused(message: str) -> Any:
    return pytest.raises(rooms.RoomMissingError, match=message)


def test_virtual_storage() -> None:
    message = r"`storage=VirtualStorage\(.*\)` needs `hf_paged.virtual`"
    with refused(message):
        PagedCache(models.get("llama").config, {"storage": "virtual"})
    with refused(message):
        PagedEngine(models.get("llama"), {"storage": "virtual"})


def test_the_names_of_continuous_batching_stay_those_of_transformers() -> None:
    own = ContinuousMixin.generate_batch
    with refused("`continuous_batching` needs"):
        hf_paged.install(continuous_batching=True)
    assert ContinuousMixin.generate_batch is own
    hf_paged.uninstall()
    hf_paged.install()
    assert ContinuousMixin.generate_batch is own


def test_pictures_and_commands() -> None:
    engine, cache = PagedEngine(models.get("llama")), PagedCache()
    for owner in (engine, cache, cache.stats()):
        assert owner._repr_html_() is None  # notebooks then show this:
        assert type(owner).__name__ in repr(owner)
    for plot in (engine.plot_memory, engine.plot_timeline, cache.plot_memory):
        with refused(r"`plot_.*` needs `hf_paged.tools`"):
            plot()
    with refused(r"`timeline` needs `hf_paged.tools`"):
        engine.timeline.intervals()
    for module in ("hf_paged", "hf_paged.inspect"):
        with refused(rf"`.*{module}` needs `hf_paged.tools`"):
            runpy.run_module(module, run_name="__main__")


@pytest.mark.parametrize(
    ("name", "options", "missing", "road"),
    [
        ("GPTNeoForCausalLM", {}, ["rectangles", *rooms.ROOMS], "hf_loop"),
        ("BloomForCausalLM", {}, ["own_attention"], None),
        ("DeepseekV3ForCausalLM", {}, ["latent"], None),
        ("LlamaForCausalLM", {"num_beams": 3}, ["beams"], None),
        # rows with images stay together, in rectangles if these are installed
        ("LlavaForConditionalGeneration", {}, ["media"], "engine"),
        ("LlavaForConditionalGeneration", {}, ["media", "rectangles"], "hf_loop"),
    ],
)
def test_calls_of_generate_take_another_path(
    name: str,
    options: dict[str, Any],
    missing: list[str],
    road: str | None,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are plain's; the route and a warning name the room; an engine raises."""
    without(monkeypatch, *missing)
    room = missing[0]
    own_code = name == "GPTNeoForCausalLM"
    model = build(name) if own_code else tiny_model(getattr(transformers, name))
    inputs = {"input_ids": IDS}
    if name.startswith("Llava"):
        inputs = dict(media_inputs(model)["image"])
    expected = model.generate(**inputs, **GREEDY, **options)
    found = model.generate(**inputs, **GREEDY, **options, **models.UNRECORDED)
    assert torch.equal(found, expected)
    route = last_route(model)
    assert route is not None and f"needs `hf_paged.{room}`" in route.reason
    assert road is None or route.road == (road if is_installed("rectangles") else "hf_loop")
    (warning,) = (message for message in caplog.messages if f"`hf_paged.{room}`" in message)
    if road is not None:
        assert "[troubleshooting.md#rooms]" in warning
        row = {name: tensor[:1] for name, tensor in inputs.items()}
        with PagedEngine(model, {"capture": False}) as engine:
            with refused(f"needs `hf_paged.{room}`"):
                engine.add_request(row if len(row) > 1 else IDS[0].tolist())


def test_a_shared_prefill() -> None:
    """Transformers' own loop computes each row of a prompt."""
    model, options = models.get("llama"), {**GREEDY, "num_beams": 3}
    expected = model.generate(IDS, **options)
    assert torch.equal(model.generate(IDS, **options, **models.UNRECORDED), expected)
    route = last_route(model)
    assert route is not None and route.road == "hf_loop" and not route.prefills_shared


def test_gradients_through_a_cache() -> None:
    """Nothing is stored, and decodes without gradients go on."""
    cache, states = PagedCache(), torch.randn(1, 1, 9, 4, requires_grad=True)
    with refused(
        r"a forward with gradients \(outside `torch.no_grad\(\)`\) needs `hf_paged.gradients`"
    ):
        cache.update(states, states, 0)
    assert cache.memory.num_used == 0 and cache.get_seq_length() == 0
    with refused(r"`PagedCache.detach` needs"):
        cache.detach()
    with torch.no_grad():
        keys, _ = cache.update(states, states, 0)
        assert torch.equal(keys + 0, states)
    cache.check_integrity()


def test_beams_of_a_request() -> None:
    with PagedEngine(models.get("llama"), {"capture": False}) as engine:
        (result,) = engine.generate([[5, 6, 7]], {"num_beams": 2, "max_new_tokens": 3})
    assert isinstance(result.error, rooms.RoomMissingError)
    assert "`num_beams` needs `hf_paged.beams`" in str(result.error)


def test_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefixes are shared within a call of an engine and dropped after it. Tokens are plain's after
    each change, and no step is replayed."""
    without(monkeypatch, "fingerprints")
    model, (prompt,) = models.build("llama"), models.token_ids(1, 34).tolist()

    def plain() -> list[int]:
        return lone_run(model, prompt, GREEDY)[0]

    def change() -> None:
        for parameter in model.get_decoder().layers[0].parameters():
            parameter.data.mul_(-1)

    before = plain()
    with PagedEngine(model, {"block_size": 8, "max_num_seqs": 1}) as engine:
        for _ in range(2):
            pair = engine.generate([prompt] * 2, GREEDY)
            assert [result.token_ids for result in pair] == [plain()] * 2
            assert [result.num_prefix_hit_tokens for result in pair] == [0, 32]
            change()
        change()
        assert plain() != before, "the change changes nothing: the test is void"
        first = engine.add_request(prompt, {**GREEDY, "max_new_tokens": 12})
        engine.step()
        change()  # between two steps
        later = engine.add_request(prompt, GREEDY)
        results = run_all(engine)
        assert results[first].error is None and results[later].token_ids == plain()
        assert results[later].num_prefix_hit_tokens == 0
    for _ in range(2):
        ids = model.generate(torch.tensor([prompt]), **GREEDY, **models.PAGED)
        route = last_route(model)
        assert route is not None and route.road == "engine" and not route.num_captured_steps
        assert ids[0, len(prompt) :].tolist() == plain()
        change()


def test_a_hook_between_steps_without_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are no longer packed once a hook of user code gets their tokens."""
    without(monkeypatch, "fingerprints")
    model, lengths = models.build("llama"), list[int]()
    with PagedEngine(model, {"capture": False}) as engine:
        for prompt in ([5, 6, 7], [8, 9, 10, 11]):
            engine.add_request(prompt, GREEDY)
        engine.step()
        hook = model.model.register_forward_hook(
            lambda module, inputs, output: lengths.append(output.last_hidden_state.shape[1])
        )
        run_all(engine)
        hook.remove()
    assert set(lengths) == {1}
