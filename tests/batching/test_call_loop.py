"""`generate` calls without the room `overlap`: each runs in a separate loop, also beside others."""

from __future__ import annotations

import functools
import gc
import os
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

import hf_paged
from hf_paged import rooms
from hf_paged.rooms import is_installed
from tests.support import models
from tests.support.checks import assert_pool_empty, in_threads

STEPS = 10
KEPT = {"return_dict_in_generate": True}


@pytest.fixture(autouse=True)
def without_overlap(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(
        rooms, "is_installed", lambda name: name != "overlap" and is_installed(name)
    )
    rooms.room.cache_clear()
    yield
    rooms.room.cache_clear()


def at_token(number: int, action: Callable[[], Any]) -> Callable[..., torch.Tensor]:
    """A processor that runs `action` when it chooses new token `number`, counted from 0."""
    numbers = iter(range(1000))

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if next(numbers) == number:
            action()
        return scores

    return process


def generate(model: PreTrainedModel, number: int, *processors: Any, **options: Any) -> torch.Tensor:
    ids = models.token_ids(1, 9 + 5 * number, seed=number)
    counts = {"max_new_tokens": STEPS, "min_new_tokens": STEPS, "pad_token_id": 0}
    given = {"do_sample": False, **counts, "logits_processor": list(processors), **options}
    found = model.generate(ids, attention_mask=torch.ones_like(ids), **given)
    return found if isinstance(found, torch.Tensor) else found.sequences


def paged(
    model: PreTrainedModel, number: int, *processors: Any, blocks: Any = None, **options: Any
) -> torch.Tensor:
    config = {"block_size": 8, "num_blocks": blocks}
    options |= {"cache_implementation": "paged", "cache_config": config}
    return generate(model, number, *processors, **options)


def assert_same(model: PreTrainedModel, expected: list[Any], found: list[Any]) -> None:
    assert all(torch.equal(*pair) for pair in zip(expected, found, strict=True))
    assert_pool_empty(model)


@pytest.mark.parametrize(
    "options", [{}, {"num_return_sequences": 3, "do_sample": True}, {"num_beams": 3}, KEPT]
)
def test_a_call_alone(options: dict[str, Any]) -> None:
    model, found = models.build("llama"), []
    for run in (generate, paged):
        torch.manual_seed(3)
        found.append([run(model, number, **options) for number in (0, 2)])
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine"
    assert_same(model, *found)


@pytest.mark.parametrize("blocks", [None, 8], ids=["all fit", "few blocks"])
@pytest.mark.parametrize("options", [{}, KEPT], ids=["freed rows", "kept rows"])
def test_calls_of_threads_get_the_tokens_of_each_alone(
    options: dict[str, Any], blocks: int | None
) -> None:
    model = models.build("llama")
    expected = [generate(model, number) for number in range(5)]
    jobs = [functools.partial(paged, model, n, blocks=blocks, **options) for n in range(5)]
    for _ in range(2):
        assert_same(model, expected, in_threads(*jobs))


def test_a_call_within_a_processor_and_a_call_of_another_thread_for_which_it_waits() -> None:
    model, inner = models.build("llama"), []

    def here() -> None:
        inner.append(paged(model, 1))

    def there() -> None:
        inner.extend(in_threads(functools.partial(paged, model, 2)))

    outer = paged(model, 0, at_token(2, here), at_token(4, there))
    assert_same(model, [generate(model, number) for number in range(3)], [outer, *inner])


def test_an_exception_ends_its_call_alone() -> None:
    """Of a caller's own code, or of a forward."""
    model = models.build("llama")
    expected = [generate(model, number) for number in (0, 2)]

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError("on purpose")

    def failing() -> None:
        with pytest.raises(MemoryError, match="on purpose"):
            paged(model, 1, at_token(4, fail))

    _, *found = in_threads(failing, *(functools.partial(paged, model, n) for n in (0, 2)))
    assert_same(model, expected, found)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(model.model.layers[0].mlp), "forward", fail)
        with pytest.raises(MemoryError, match="on purpose"):
            paged(model, 0)
    assert_same(model, expected[:1], [paged(model, 0)])


def test_blocks_that_no_call_gives_back() -> None:
    model = models.build("llama")
    config = {"block_size": 8, "num_blocks": 8}
    given = {"cache_implementation": "paged", "cache_config": config, "max_new_tokens": STEPS}
    kept = model.generate(models.token_ids(1, 30), do_sample=False, **given, **KEPT)
    with pytest.raises(hf_paged.OutOfBlocksError, match="hold blocks"):
        paged(model, 4, blocks=8)
    del kept
    gc.collect()
    assert_same(model, [generate(model, 4)], [paged(model, 4, blocks=8)])


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_call_goes_on_in_a_child_process_with_the_blocks_of_other_threads() -> None:
    """It needs all blocks, of which the call of another thread holds two."""
    model, holds, ended = models.build("llama"), threading.Event(), threading.Event()
    longer = {"max_new_tokens": 30, "min_new_tokens": 30}
    expected = [generate(model, 0), generate(model, 4, **longer)]
    children: list[int] = []

    def wait() -> None:
        holds.set()
        assert ended.wait(60)

    def fork() -> None:
        assert holds.wait(60)
        children.append(os.fork())
        if children[0]:
            children.append(os.waitstatus_to_exitcode(os.waitpid(children[0], 0)[1]))
            ended.set()

    def forking() -> torch.Tensor:
        try:
            torch.set_num_threads(1)  # a child has no other threads of OpenMP
            found = paged(model, 4, at_token(2, fork), blocks=8, **longer)
            if children[0] == 0:
                os._exit(0 if torch.equal(found, expected[1]) else 1)
            return found
        finally:
            if children[:1] == [0]:
                os._exit(2)

    found = in_threads(lambda: paged(model, 0, at_token(3, wait), blocks=8), forking)
    assert children[1] == 0
    assert_same(model, expected, found)
