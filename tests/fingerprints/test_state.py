"""Looks at a model: what they see that a fingerprint may not, and what they accept."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from transformers import TextIteratorStreamer

from hf_paged.kernels import cpp
from hf_paged.model.writes import Write, note_write
from tests.batching.test_changing_models import SIMPLE
from tests.fingerprints.test_fingerprint import FACTORS, Small, watched
from tests.fingerprints.test_fingerprint_inputs import Wrapped
from tests.support import models

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}


class Slotted:
    __slots__ = ("factor",)


def rename(model: Any) -> None:
    model.later = vars(model).pop("view")  # the last attribute


LOOKS: dict[str, Callable[[Any], Any]] = {
    "renamed": rename,
    "renamed key": lambda m: m.names.update(b=m.names.pop("a")),
    "strides": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data.t()),
    "size": lambda m: setattr(m.linear.weight, "data", m.linear.weight.data[:-1]),
    "slot": lambda m: setattr(m.slotted, "factor", 2.0),
    "class of a module": lambda m: setattr(m.activation, "__class__", nn.SiLU),
    "attribute of a class": lambda m: setattr(Small, "factor", 2.0),
    "global": lambda m: FACTORS.__setitem__("now", FACTORS["now"] + 1),
    "mode": lambda m: m.linear.train(not m.linear.training),
    "first hook of a module": lambda m: m.activation.register_forward_hook(print),
    "first module of a module": lambda m: setattr(m.activation, "more", nn.ReLU()),
    "list": lambda m: m.unlisted.reverse(),
}


@pytest.fixture
def small() -> Iterator[Any]:
    model: Any = Small()
    model.unlisted.append(nn.ReLU())
    model.slotted = Slotted()
    model.slotted.factor = 1.0
    model.view = vars(model).pop("view")
    yield model
    if "factor" in vars(Small):
        del Small.factor


@pytest.mark.parametrize("name", LOOKS)
def test_a_look_sees_what_a_fingerprint_may_not(name: str, small: Any) -> None:
    state = watched(small)
    LOOKS[name](small)
    assert not state.is_same()


def replace_part(weights: list[Any]) -> None:
    weights[0].inner = -weights[0].inner


@pytest.mark.parametrize(
    "change",
    [replace_part, lambda weights: torch.utils.swap_tensors(*weights)],
    ids=["replaced", "swapped"],
)
def test_a_look_sees_other_parts_of_a_tensor_subclass(change: Callable[[Any], Any]) -> None:
    """As of quantized weights; `Module.to` and `load_state_dict` may swap tensors."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for layer in model:
        layer.weight = nn.Parameter(Wrapped(layer.weight.detach()), requires_grad=False)
    state = watched(model)
    change([layer.weight for layer in model])
    state.mark_unchecked()
    assert not state.is_in_place() and not state.is_same()


@pytest.mark.parametrize("is_in_place", [False, True])
def test_what_a_forward_wrote_is_accepted_unless_it_replaced_a_tensor(
    small: Any, is_in_place: bool
) -> None:
    """... that a forward reads, or overwrites in place."""
    hidden = small.hidden
    write = Write(small, small._buffers, "hidden", hidden, hidden, True, is_in_place)
    note_write(small, write, is_read=False)
    state = watched(small)
    hidden.add_(1)
    state.accept()
    assert state.is_same()
    small.scale = 2.0
    assert not state.is_same()
    state.accept()
    assert state.is_same()
    small.hidden = hidden.clone()
    state.accept()
    assert state.is_same() is state.is_in_place() is not is_in_place
    small.hidden = hidden
    state.accept()
    assert state.is_same()
    small.kept = small.kept.clone()
    state.accept()
    assert not state.is_same() and not state.is_in_place()


def test_a_model_that_was_changed_and_changed_back_is_like_itself(small: Any) -> None:
    state = watched(small)
    small.scale = 2.0
    assert not watched(small).is_like(state)
    small.scale = float("1")
    assert watched(small).is_like(state)
    with torch.no_grad():
        small.linear.weight.mul_(1)
    assert not watched(small).is_like(state), "its tensors were written to"


@pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler: nothing is recorded")
def test_a_thread_that_takes_the_text_of_a_streamer_may_replace_weights() -> None:
    found = []
    for options in ({}, models.PAGED):
        model = models.build("llama")
        streamer: Any = TextIteratorStreamer(models.tokenizer(), timeout=60)
        put, texts = streamer.text_queue.put, []

        def take(text: Any, timeout: Any = None, model: Any = model) -> None:
            texts.append(text)  # noqa: B023
            if len(texts) == 6:  # noqa: B023
                SIMPLE["weight"](model)
            put(text)  # noqa: B023

        streamer.text_queue.put = take
        arguments = {**models.prompt("llama", 1, 9), **GREEDY, "streamer": streamer}
        found.append(model.generate(**arguments, **options))
        assert len(texts) > 6
    found.append(models.build("llama").generate(**models.prompt("llama", 1, 9), **GREEDY))
    assert torch.equal(*found[:2]) and not torch.equal(*found[1:])
