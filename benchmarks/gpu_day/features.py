"""Calls of stage (b) on a tiny Llama: each compares a part of the package with plain `generate`."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch

import hf_paged
from tests.support import models
from tests.support.architectures import difference
from tests.support.graph_helpers import use_fake_graphs
from tests.support.quantized import round_caches

GREEDY = {"do_sample": False, "max_new_tokens": 60}  # enough steps to record
EQUAL_SHARE = 0.9  # of tokens over int8 blocks, where a device may round a code otherwise


class Job(NamedTuple):
    """A family of models, or one of `FEATURES`."""

    name: str
    device: str

    @property
    def is_fake(self) -> bool:
        return self.device == "cpu"


def compare(
    model: Any, inputs: dict[str, Any], options: dict[str, Any], **config: Any
) -> dict[str, Any]:
    """Plain against paged `generate`, with one seed."""
    torch.manual_seed(0)
    expected = model.generate(**inputs, **options)
    torch.manual_seed(0)
    paged = {"cache_implementation": "paged", "cache_config": {"block_size": 8, **config}}
    return row_of(model, difference(expected, model.generate(**inputs, **options, **paged)))


def row_of(model: Any, found: str) -> dict[str, Any]:
    """The row of a call that ended with this difference."""
    hf_paged.check_integrity(model)
    route = hf_paged.last_route(model)
    row: dict[str, Any] = {"equal": not found, "first": found, "problem": found}
    if route is not None:
        row |= {
            "road": route.road,
            "in_place": route.in_place,
            "replayed": route.num_captured_steps,
        }
        row |= {"slowed_by": " / ".join(route.slowed_by), "accepted": route.num_accepted_tokens}
    return row


def llama(job: Job, rows: int = 3) -> tuple[Any, dict[str, Any]]:
    """The model and left-padded prompts."""
    lengths = (13, 4, 9)[:rows]
    inputs = {
        name: tensor.to(job.device)
        for name, tensor in models.padded_prompt("llama", lengths).items()
    }
    return models.build("llama").to(job.device), inputs


@contextlib.contextmanager
def graphs(job: Job) -> Iterator[None]:
    """Graphs of the device, or their stand-in, which runs each recorded step on tensors of another
    device, too."""
    with pytest.MonkeyPatch.context() as patch:
        if job.is_fake:
            use_fake_graphs(patch).has_device = True
        yield


def with_graphs(job: Job) -> dict[str, Any]:
    model, inputs = llama(job)
    with graphs(job):
        row = compare(model, inputs, GREEDY)
        hf_paged.free(model)  # its graphs may be of the stand-in
    return row | (
        {} if row["replayed"] > 40 else {"problem": f"only {row['replayed']} steps were replayed"}
    )


def without_graphs(job: Job) -> dict[str, Any]:
    row = compare(*llama(job), GREEDY, capture=False)
    return row | ({"problem": "steps were replayed"} if row["replayed"] else {})


def called(job: Job, rows: int = 3, **options: Any) -> dict[str, Any]:
    """A call with other options than greedy ones."""
    return compare(*llama(job, rows), {**GREEDY, **options})


def assisted(job: Job) -> dict[str, Any]:
    return called(job, rows=1, assistant_model=models.get_assistant("llama").to(job.device))


def int8(job: Job) -> dict[str, Any]:
    """Keys and values of one byte a number, against plain caches that round theirs."""
    model, inputs = llama(job)
    config = {"block_size": 8, "kv_dtype": "int8"}
    found = model.generate(**inputs, **GREEDY, cache_implementation="paged", cache_config=config)
    row = row_of(model, "")
    with pytest.MonkeyPatch.context() as patch:
        round_caches(patch, "int8")
        expected = model.generate(**inputs, **GREEDY)
    first, share = difference(expected, found), float((expected == found).float().mean())
    return row | {
        "equal": not first,
        "first": first,
        "share": share,
        "problem": first if share < EQUAL_SHARE else "",
    }


def threads(job: Job) -> dict[str, Any]:
    """Two threads call `generate` on one model at once."""
    model, inputs = llama(job)
    calls = [{name: tensor[row : row + 1] for name, tensor in inputs.items()} for row in (0, 2)]
    calls[1] = {name: tensor[:, 4:] for name, tensor in calls[1].items()}
    expected = [model.generate(**call, **GREEDY) for call in calls]
    found: list[Any] = [None, None]

    def work(number: int) -> None:
        try:
            for _ in range(3):
                found[number] = model.generate(**calls[number], **GREEDY, **models.PAGED)
        except Exception as error:
            found[number] = error

    both = [threading.Thread(target=work, args=(number,)) for number in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    for result in found:
        if isinstance(result, Exception):
            raise result
    return row_of(model, "; ".join(filter(None, map(difference, expected, found))))


FEATURES: dict[str, Callable[[Job], dict[str, Any]]] = {
    "graphs": with_graphs,
    "graphs off": without_graphs,
    "int8": int8,
    "assisted": assisted,
    "prompt lookup": functools.partial(called, rows=1, prompt_lookup_num_tokens=3),
    "two threads": threads,
}
