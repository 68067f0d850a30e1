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
from tests.support.engine_helpers import run_all
from tests.support.forwards import build


@pytest.fixture(autouse=True)
def without_rooms(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(rooms, "is_installed", lambda name: False)
    rooms.room.cache_clear()
    yield
    monkeypatch.undo()
    rooms.room.cache_clear()
    hf_paged.install()  # again with the rooms


def test_virtual_storage() -> None:
    config = models.get("llama").config
    message = r"`storage=VirtualStorage\(.*\)` needs `hf_paged.virtual`"
    with pytest.raises(rooms.RoomMissingError, match=message):
        PagedCache(config, {"storage": "virtual"})
    with pytest.raises(rooms.RoomMissingError, match=message):
        PagedEngine(models.get("llama"), {"storage": "virtual"})


def test_the_names_of_continuous_batching_stay_those_of_transformers() -> None:
    own = ContinuousMixin.generate_batch
    with pytest.raises(rooms.RoomMissingError, match="`continuous_batching` needs"):
        hf_paged.install(continuous_batching=True)
    assert ContinuousMixin.generate_batch is own
    hf_paged.uninstall()
    hf_paged.install()
    assert ContinuousMixin.generate_batch is own


def test_pictures() -> None:
    engine, cache = PagedEngine(models.get("llama")), PagedCache()
    for owner in (engine, cache, cache.stats()):
        assert owner._repr_html_() is None  # notebooks then show this:
        assert type(owner).__name__ in repr(owner)
    for plot in (engine.plot_memory, engine.plot_timeline, cache.plot_memory):
        with pytest.raises(rooms.RoomMissingError, match=r"`plot_.*` needs `hf_paged.tools`"):
            plot()
    with pytest.raises(rooms.RoomMissingError, match=r"`timeline` needs `hf_paged.tools`"):
        engine.timeline.intervals()


@pytest.mark.parametrize("module", ["hf_paged", "hf_paged.inspect"])
def test_commands(module: str) -> None:
    with pytest.raises(rooms.RoomMissingError, match=rf"`.*{module}` needs `hf_paged.tools`"):
        runpy.run_module(module, run_name="__main__")


def test_rectangles(caplog: pytest.LogCaptureFixture) -> None:
    """A call takes the path of plain `generate`, and a warning names the room; an engine raises."""
    model, ids = build("GPTNeoForCausalLM"), models.token_ids(2, 9)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    paged = model.generate(ids, **options, **models.PAGED)
    route = last_route(model)
    assert route is not None and route.road == "hf_loop"
    assert "needs `hf_paged.rectangles`" in route.reason
    (warning,) = (message for message in caplog.messages if "rectangles`" in message)
    assert warning.startswith("GPTNeoForCausalLM runs slower than it could: ")
    assert "needs `hf_paged.rectangles`" in warning and "[troubleshooting.md#rooms]" in warning
    assert paged.equal(model.generate(ids, **options))
    with pytest.raises(rooms.RoomMissingError, match=r"needs `hf_paged.rectangles`"):
        PagedEngine(model, {"capture": False}).add_request(ids[0].tolist())


@pytest.mark.parametrize("missing", [{"media"}, {"media", "rectangles"}])
def test_media(
    missing: set[str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows with images stay together, in rectangles if these are installed; an engine raises."""
    monkeypatch.setattr(
        rooms, "is_installed", lambda room: room not in missing and is_installed(room)
    )
    model = tiny_model(transformers.LlavaForConditionalGeneration)
    inputs = dict(media_inputs(model)["image"])
    options = {"max_new_tokens": 5, "do_sample": False}
    expected = model.generate(**inputs, **options)
    assert expected.equal(model.generate(**inputs, **options, **models.UNRECORDED))
    route = last_route(model)
    assert route is not None and "needs `hf_paged.media`" in route.reason
    assert route.road == ("engine" if rooms.is_installed("rectangles") else "hf_loop")
    (warning,) = (message for message in caplog.messages if "`hf_paged.media`" in message)
    assert "[troubleshooting.md#rooms]" in warning
    row = {name: tensor[:1] for name, tensor in inputs.items()}
    with PagedEngine(model, {"capture": False}) as engine:
        with pytest.raises(rooms.RoomMissingError, match=r"needs `hf_paged.media`"):
            engine.add_request(row)


@pytest.mark.parametrize(
    ("name", "options", "room"),
    [
        ("BloomForCausalLM", {}, "own_attention"),
        ("DeepseekV3ForCausalLM", {}, "latent"),
        ("LlamaForCausalLM", {"num_beams": 3}, "beams"),
    ],
)
def test_calls_of_generate_take_another_path(
    name: str,
    options: dict[str, Any],
    room: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The tokens are plain's; the route and a warning name the room."""
    monkeypatch.setattr(rooms, "is_installed", lambda other: other != room and is_installed(other))
    model = tiny_model(getattr(transformers, name))
    options = {**options, "max_new_tokens": 6, "do_sample": False}
    ids = models.token_ids(2, 7)
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, **models.UNRECORDED), expected)
    route = hf_paged.last_route(model)
    assert route is not None and f"needs `hf_paged.{room}`" in route.reason
    assert f"needs `hf_paged.{room}`" in caplog.text


def test_a_shared_prefill() -> None:
    """Transformers' own loop computes each row of a prompt."""
    model, ids = models.get("llama"), models.token_ids(2, 7)
    options: dict[str, Any] = {"num_beams": 3, "max_new_tokens": 4, "do_sample": False}
    expected = model.generate(ids, **options)
    assert torch.equal(model.generate(ids, **options, **models.UNRECORDED), expected)
    route = last_route(model)
    assert route is not None and route.road == "hf_loop" and not route.prefills_shared


def test_gradients_through_a_cache() -> None:
    """Nothing is stored, and decodes without gradients go on."""
    cache = PagedCache()
    states = torch.randn(1, 1, 9, 4, requires_grad=True)
    message = r"a forward with gradients \(outside `torch.no_grad\(\)`\) needs `hf_paged.gradients`"
    with pytest.raises(rooms.RoomMissingError, match=message):
        cache.update(states, states, 0)
    assert cache.memory.num_used == 0 and cache.get_seq_length() == 0
    with pytest.raises(rooms.RoomMissingError, match=r"`PagedCache.detach` needs"):
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
    monkeypatch.setattr(
        rooms, "is_installed", lambda name: name != "fingerprints" and is_installed(name)
    )
    model, (prompt,) = models.build("llama"), models.token_ids(1, 34).tolist()
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}

    def plain() -> list[int]:
        return model.generate(torch.tensor([prompt]), **options)[0, len(prompt) :].tolist()

    def change() -> None:
        for parameter in model.get_decoder().layers[0].parameters():
            parameter.data.mul_(-1)

    before = plain()
    with PagedEngine(model, {"block_size": 8, "max_num_seqs": 1}) as engine:
        for _ in range(2):
            pair = engine.generate([prompt] * 2, options)
            assert [result.token_ids for result in pair] == [plain()] * 2
            assert [result.num_prefix_hit_tokens for result in pair] == [0, 32]
            change()
        change()
        assert plain() != before, "the change changes nothing: the test is void"
        first = engine.add_request(prompt, {**options, "max_new_tokens": 12})
        engine.step()
        change()  # between two steps
        later = engine.add_request(prompt, options)
        results = run_all(engine)
        assert results[first].error is None and results[later].token_ids == plain()
        assert results[later].num_prefix_hit_tokens == 0
    for _ in range(2):
        ids = model.generate(torch.tensor([prompt]), **options, **models.PAGED)
        route = last_route(model)
        assert route is not None and route.road == "engine" and not route.num_captured_steps
        assert ids[0, len(prompt) :].tolist() == plain()
        change()


def test_a_hook_between_steps_without_fingerprints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are no longer packed once a hook of user code gets their tokens."""
    monkeypatch.setattr(
        rooms, "is_installed", lambda name: name != "fingerprints" and is_installed(name)
    )
    model, shapes = models.build("llama"), list[int]()
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    with PagedEngine(model, {"capture": False}) as engine:
        for prompt in ([5, 6, 7], [8, 9, 10, 11]):
            engine.add_request(prompt, options)
        engine.step()
        hook = model.model.register_forward_hook(
            lambda module, inputs, output: shapes.append(output.last_hidden_state.shape[1])
        )
        while engine.has_unfinished:
            engine.step()
        hook.remove()
    assert set(shapes) == {1}
