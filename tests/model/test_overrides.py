"""Methods of transformers' decoding loops that a model overrides: such a call runs transformers'
loop."""

from __future__ import annotations

from typing import Any

import pytest

import hf_paged
from hf_paged import PagedEngine, compat
from tests.support import models
from tests.support.checks import assert_paged_is_plain

OPTIONS: dict[str, dict[str, Any]] = {
    compat.SAMPLE: {"do_sample": False},
    compat.BEAM_SEARCH: {"num_beams": 3, "do_sample": False},
    compat.ASSISTED_DECODING: {"prompt_lookup_num_tokens": 3, "do_sample": False},
}
# the first loop that calls each method: a later one may call it for prefills in chunks only
LOOPS = {name: loop for loop, names in reversed(compat.REPLACED_METHODS.items()) for name in names}


def override(model: Any, name: str, where: str) -> list[str]:
    """Makes `name` a method of the class or the instance that does the same and counts its
    calls."""
    calls: list[str] = []
    stock = getattr(model, name, None)

    def own(*args: Any, **kwargs: Any) -> Any:
        calls.append(name)
        if stock is not None:
            return stock(*args, **kwargs)
        cache, beams = args  # `_reorder_cache`, which only some models have
        cache.reorder_cache(beams)
        return cache

    if where == "class":
        model.__class__ = type("Own", (type(model),), {name: staticmethod(own)})
    else:
        setattr(model, name, own)
    return calls


def test_the_methods_are_those_that_the_engine_does_not_call() -> None:
    assert {"_prefill", "_has_unfinished_sequences", "_flatten_beam_dim"} <= LOOPS.keys()
    assert {"_unflatten_beam_dim", "_reorder_cache", "_get_candidate_generator"} <= LOOPS.keys()
    called = {*compat.BEAM_METHODS, compat.UPDATE_INPUTS, "prepare_inputs_for_generation"}
    assert not called & LOOPS.keys()


@pytest.mark.parametrize("where", ["class", "instance"])
@pytest.mark.parametrize("name", sorted(LOOPS))
def test_an_override_is_called(name: str, where: str) -> None:
    """In its own loop; others stay the engine's."""
    options = {"max_new_tokens": 4, **OPTIONS[LOOPS[name]]}
    model, inputs = models.build("llama", num_hidden_layers=1), models.prompt("llama", 1, 9)
    calls = override(model, name, where)
    model.generate(**inputs, **options)
    count = len(calls)
    route = assert_paged_is_plain(model, inputs, options)
    assert count and len(calls) == 3 * count
    assert route.road == "hf_loop" and f"it overrides `{name}`" in route.reason
    with PagedEngine(model) as engine, pytest.raises(ValueError, match=f"overrides `{name}`"):
        engine.add_request([5, 6, 7], options)
    if LOOPS[name] == compat.BEAM_SEARCH:
        model.generate(**inputs, max_new_tokens=2, do_sample=False, **models.PAGED)
        assert hf_paged.last_route(model).road == "engine"


@pytest.mark.parametrize("loop", [compat.SAMPLE, compat.BEAM_SEARCH])
def test_an_engine_refuses_a_loop_of_the_models_own(loop: str) -> None:
    model = models.build("llama", num_hidden_layers=1)
    override(model, loop, "class")
    with PagedEngine(model) as engine, pytest.raises(ValueError, match=f"overrides `{loop}`"):
        engine.add_request([5, 6, 7], {"max_new_tokens": 2, **OPTIONS[loop]})
