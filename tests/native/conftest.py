"""transformers' names, served by our engine, and managers."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from transformers import GenerationConfig

import hf_paged
from tests.support import models

GREEDY = {"max_new_tokens": 8, "do_sample": False}
WAIT = 30.0  # seconds: a longer wait is a hang


@pytest.fixture(autouse=True)
def native_names() -> Iterator[None]:
    hf_paged.install(continuous_batching={"block_size": models.BLOCK_SIZE})
    try:
        yield
    finally:
        hf_paged.uninstall()
        hf_paged.install()
    gc.collect()  # managers that are gone
    deadline = time.monotonic() + WAIT
    while left := [x.name for x in threading.enumerate() if x.name.startswith("hf_paged-")]:
        assert time.monotonic() < deadline, f"threads are left behind: {left}"
        time.sleep(0.01)


@pytest.fixture
def model() -> Any:
    """The shared one, which a test must not change."""
    return models.get("llama")


@pytest.fixture
def manager(model: Any) -> Iterator[Any]:
    """One that runs until the test ends."""
    with model.continuous_batching_context_manager(GenerationConfig(**GREEDY)) as running:
        yield running
