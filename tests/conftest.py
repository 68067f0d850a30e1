"""Settings shared by all tests: no network, one torch thread, fixed seeds, and no test leaves a
model changed."""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib.util
import os
import random
import re
import signal
import sys
from collections.abc import Generator, Iterator
from pathlib import Path

# Before transformers or tokenizers is imported: both read these once.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

# Before triton is imported, which torch and transformers do: its kernels then run on CPU tensors,
# in the interpreter. Where there is a GPU they are compiled and the same tests run on it.
if not Path("/dev/nvidiactl").exists() and not Path("/dev/kfd").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import hypothesis
import numpy as np
import pytest
import torch

# Appended, so that an installed hf_paged wins over the checkout while `tests.support` is still
# found.
ROOT = str(Path(__file__).resolve().parents[1])
if ROOT not in sys.path:
    sys.path.append(ROOT)

hypothesis.settings.register_profile(  # tests do not fail on a busy machine
    "tests", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("tests")
# their assertions show both sides, too
pytest.register_assert_rewrite("tests.support")

from tests.support import slow  # noqa: E402  once its folder is found and its assertions are rewritten

SEED = 0


def pytest_configure(config: pytest.Config) -> None:
    # Two cores and many tiny models: threads cost more than they save, and one thread makes sums
    # reproducible.
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before pytest deselects marked tests
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        mark = item.get_closest_marker("slow_cases")
        if mark is not None and slow.is_slow(item.callspec.id, mark.args, **mark.kwargs):  # type: ignore[attr-defined]
            item.add_marker(pytest.mark.slow)
    left = slow.left_to_full(item.nodeid for item in items if item.get_closest_marker("slow"))
    for item in items:
        if item.nodeid in left:
            item.add_marker(pytest.mark.full)
    no_device = None if torch.cuda.is_available() else "no CUDA device"
    for item in items:
        mark = item.get_closest_marker("gpu")
        if mark is not None and (obstacle := mark.kwargs.get("unless", no_device)) is not None:
            item.add_marker(pytest.mark.skip(reason=obstacle))


def pytest_collection_finish() -> None:
    # What imports made stays: each `gc.collect` of a test would look at a million objects.
    gc.collect()
    gc.freeze()


@functools.cache
def _is_taken_away(room: str) -> bool:
    """Whether `tests.support.alone` has taken a room away; not whether a test pretends so."""
    return importlib.util.find_spec(f"hf_paged.{room}") is None


def _missing_room(text: str) -> str | None:
    """The reason for a skip if an error's text names a room of hf_paged that is taken away."""
    from hf_paged.rooms import ROOMS

    match = re.search(r"No module named '(?:hf_paged|tests)\.(\w+)|needs `hf_paged\.(\w+)`", text)
    room = match and (match.group(1) or match.group(2))
    return f"needs the room {room}" if room in ROOMS and _is_taken_away(room) else None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Skips a module of tests that imports a room, or a room's tests, which `tests.support.alone`
    has taken away."""
    report = yield
    if report.failed and (reason := _missing_room(str(report.longrepr))) is not None:
        report.outcome, report.longrepr = "skipped", (str(collector.path), 0, reason)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup(item: pytest.Item) -> Generator[None]:
    """As `pytest_runtest_call`, for fixtures."""
    yield from pytest_runtest_call(item)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Generator[None]:
    """Skips a test that asks for a room which `tests.support.alone` has taken away and fails, with
    the room's error or because a call took another route."""
    asked_for = list[str]()
    with _noting_missing_rooms(asked_for):
        try:
            yield
        except ImportError as error:
            if (reason := _missing_room(str(error))) is None:
                raise
            pytest.skip(reason)
        except (Exception, pytest.fail.Exception):
            if not asked_for:
                raise
            pytest.skip(f"needs the room {asked_for[0]}")


@contextlib.contextmanager
def _noting_missing_rooms(names: list[str]) -> Iterator[None]:
    """If rooms are taken away, adds the names of those that a test asks for to `names`."""
    from hf_paged import rooms

    if not any(map(_is_taken_away, rooms.ROOMS)):
        yield
        return
    missing = rooms.missing

    def noted(name: str, option: str) -> str | None:
        message = missing(name, option)
        if message is not None and _is_taken_away(name):
            names.append(name)
        return message

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rooms, "missing", noted)
        yield


@pytest.fixture
def sigint() -> Iterator[None]:
    """Sets Python's default handler: background processes of a shell inherit one that ignores
    SIGINT."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    assert signal.signal(signal.SIGINT, before) is signal.default_int_handler


@pytest.fixture
def full_precision() -> Iterator[None]:
    """Products and convolutions of float32 numbers on a GPU use float32, not TF32."""
    backends = torch.backends.cuda.matmul, torch.backends.cudnn
    before = [backend.allow_tf32 for backend in backends]
    for backend in backends:
        backend.allow_tf32 = False
    yield
    for backend, allowed in zip(backends, before):
        backend.allow_tf32 = allowed


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest, full_precision: None) -> torch.device:
    """Runs a test on the CPU and, marked `gpu`, on a CUDA device."""
    return torch.device(request.param)


@pytest.fixture(autouse=True)
def fixed_prices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The length of drafts does not follow the times of steps, so that no outcome depends on
    them."""
    if "hf_paged" in sys.modules:
        from tests.support.rooms import fix_prices

        fix_prices(monkeypatch.setattr)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Every test starts from the same random state and must restore grad mode and default dtype."""
    random.seed(SEED)
    np.random.seed(SEED)
    torch.manual_seed(SEED)
    grad, dtype = torch.is_grad_enabled(), torch.get_default_dtype()
    yield
    torch.set_grad_enabled(grad)
    torch.set_default_dtype(dtype)
