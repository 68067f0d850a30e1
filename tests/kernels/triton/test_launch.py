"""Kernels that cannot be compiled or launched: PyTorch computes the same in their place, and one
warning says so."""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import functools
import logging
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import hf_paged
from hf_paged import PagedConfig, PagedEngine, kernels
from hf_paged.attention import backends
from hf_paged.batching.factory import empty_cache, make_runner
from hf_paged.cache.kv_blocks import choose_store
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.storage import BlockCopier
from hf_paged.kernels import hashing, lora
from hf_paged.kernels.triton import cascade as cascade_plans
from hf_paged.kernels.triton import launch
from hf_paged.model.checks import warm_up_kernels
from hf_paged.model.trial import Trial
from hf_paged.step import NotCapturable
from tests.attention.test_backends import Case, build
from tests.kernels.triton import test_cascade, test_lora
from tests.support import models
from tests.support.kernels.device import DEVICE, available

pytestmark = [
    available,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="errors are injected in the interpreter"),
]


def errors() -> dict[str, Exception]:
    from triton.compiler.errors import CompilationError
    from triton.runtime.errors import OutOfResources, PTXASError

    return {
        "resources": OutOfResources(148496, 101376, "shared memory"),
        "compiler": CompilationError("x = 1", ast.parse("x").body[0], "must be of rank 2"),
        "assembler": PTXASError("Internal Triton PTX codegen error"),
        "driver": RuntimeError("Triton Error [CUDA]: invalid argument"),
    }


class Launches:
    """Counts of launches by kernel, failed ones included; the error that a launch raises, from its
    kernel and the number of launches before; keyword arguments of all launches; names of kernels
    about which a warning was logged, with its reasons."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.fail: Callable[[str, int], Exception | None] = lambda name, number: None
        self.constants: list[dict[str, Any]] = []
        self.warnings: list[str] = []
        self.reasons: list[str] = []

    def note_warning(self, text: str, kernel: str, reason: str = "") -> None:
        self.warnings.append(kernel)
        self.reasons.append(reason)

    def fails(self, kernel: str, error: str = "resources", first: int = 0) -> None:
        """Makes launches of this kernel fail from the `first` on."""
        self.fail = lambda name, number: (
            errors()[error] if name == kernel and number >= first else None
        )


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    """Forces the kernels and observes their launches; no failure is known at the start, nor
    later."""
    from triton.runtime.interpreter import InterpretedFunction

    found, run = Launches(), InterpretedFunction.run

    def observed(self: Any, *args: Any, **kwargs: Any) -> Any:
        number = found.counts[self.__name__]
        found.counts[self.__name__] += 1
        found.constants.append(kwargs)
        if (error := found.fail(self.__name__, number)) is not None:
            raise error
        return run(self, *args, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", observed)
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    monkeypatch.setattr(launch, "_failed_variants", set())
    monkeypatch.setattr(launch, "_logged_kernels", set())
    warn = functools.partial(Launches.note_warning, found)
    monkeypatch.setattr(launch.logger, "warning", warn)
    return found


# Each computes something in its public way, by kernels if these are forced.


def attends(**case: Any) -> Callable[[], Tensor]:
    return lambda: backends.attend(build(Case(**case, key_dim=16, value_dim=16)).made())


split_decode = attends(seq_lens=(258, 5), heads=1, kv_heads=1, block=128)


def cascade() -> Tensor:
    query, keys, values, step = test_cascade.build(test_cascade.ROWS[:3], torch.float32)
    call = test_cascade.call(query, keys, values, step, scale=0.3)
    plan = cascade_plans.find_cascade(step, test_cascade.FREE)
    return backends.attend(call._replace(step=dataclasses.replace(step, cascade=plan)))


def store(heads: int = 3) -> Tensor:
    states, slots = torch.randn(2, heads, 4, 8), torch.tensor([[0, 9, -1, 3], [4, 5, 6, 23]])
    pool = torch.zeros(3, 2 * heads, 8, 8)
    inputs = (states, -states, *pool.chunk(2, dim=1), slots)
    choose_store(*inputs)(states, -states, slots)
    return pool


def copy() -> Tensor:
    tensors = [torch.randn(5, 2, 3), torch.randn(5, 4)]
    BlockCopier().copy(tensors, [(0, 2), (1, 4)])
    return torch.cat([x.flatten() for x in tensors])


def hashes() -> Tensor:
    return hashing._hash_on_device([torch.randn(7), torch.arange(3000)])


def adapters() -> Tensor:
    x, out = torch.randn(5, test_lora.DEPTH), torch.randn(5, test_lora.WIDTH)
    lora.Deltas(test_lora.parts([(0, 3, 4), (3, 5, 17)], torch.float32)).add(out, x)
    return out


# and the kernel whose launch fails
OPERATIONS: dict[str, tuple[Callable[[], Tensor], str]] = {
    "decode": (attends(seq_lens=(33, 1, 40), heads=4, softcap=2.0), "attention_kernel"),
    "prefill": (attends(seq_lens=(20, 33), queries=20, heads=4, window=9), "attention_kernel"),
    "split decode": (split_decode, "attention_kernel"),
    "cascade": (cascade, "attention_kernel"),
    "store": (store, "_store_kernel"),
    "copy": (copy, "_copy_kernel"),
    "hash": (hashes, "_hash_kernel"),
    "shrink": (adapters, "_shrink_kernel"),
    "expand": (adapters, "_expand_kernel"),
    "merge of a split decode": (split_decode, "merge_kernel"),
    "merge of a cascade": (cascade, "merge_kernel"),
}


def of_pytorch(function: Callable[[], Tensor]) -> Tensor:
    """The same without the kernels."""
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.delenv(kernels.BACKEND_VARIABLE)
        torch.manual_seed(0)
        return function()


ERRORS = ("resources", "compiler", "assembler", "driver")
# in a short run each operation with one error, except those whose other kernels take long
SHORT = [f"{name}-{ERRORS[-i % 4]}" for i, name in enumerate(OPERATIONS) if "of" not in name]
SHORT += ["merge of a split decode-driver"]


@pytest.mark.slow_cases(but=SHORT)
@pytest.mark.parametrize("error", ERRORS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_a_kernel_that_fails_is_replaced(operation: str, error: str, launches: Launches) -> None:
    function, kernel = OPERATIONS[operation]
    expected = of_pytorch(function)
    assert not launches.counts
    launches.fails(kernel, error)
    for _ in range(2):
        torch.manual_seed(0)
        with torch.no_grad():
            torch.testing.assert_close(function(), expected, atol=2e-5, rtol=2e-5)
    assert launches.counts[kernel] == 1 and launches.warnings == [kernel]
    if operation == "store":  # other kernels and shapes are still launched
        copy()
        launches.fail = lambda name, number: None
        store(heads=2)
        assert launches.counts == {"_store_kernel": 2, "_copy_kernel": 1}


@pytest.mark.parametrize(("text", "last"), [("", 1), (", {} bytes are free", 9)])
def test_without_memory_it_is_tried_again(text: str, last: int, launches: Launches) -> None:
    """Such as with one error for each shape that it is compiled for."""
    message = f"Triton Error [CUDA]: out of memory{text}"
    launches.fail = lambda name, number: (
        RuntimeError(message.format(number)) if number <= last else None
    )
    expected = of_pytorch(store)
    for _ in range(3):
        torch.manual_seed(0)
        assert torch.equal(store(), expected)
    assert launches.counts["_store_kernel"] == 3 and launches.warnings == ["_store_kernel"]


def test_recorded_adapters_have_nothing_in_place_of_their_kernels(launches: Launches) -> None:
    launches.fails("_expand_kernel", "driver")
    weights = [each for *_, each in test_lora.parts([(0, 2, 4)], torch.float32)]
    deltas = lora.RecordedDeltas(torch.tensor([[0, 2]]), 2, list(enumerate(weights)))
    with pytest.raises(NotCapturable, match="a LoRA kernel could not be launched"):
        deltas.add(torch.zeros(2, test_lora.WIDTH), torch.zeros(2, test_lora.DEPTH))


def test_errors_of_the_kernels_own_code_are_raised(launches: Launches) -> None:
    from triton.runtime.errors import InterpreterError

    for error in (InterpreterError("IndexError"), TypeError("an argument is missing")):
        launches.fail = lambda name, number, error=error: error  # type: ignore[misc]
        with pytest.raises(type(error)):
            store()
    assert not launches.warnings
    lost = RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered")
    assert launch.is_recoverable(lost, DEVICE)
    assert not launch.is_recoverable(lost, torch.device("meta"))  # which cannot be synchronized


def test_compiling_is_logged_from_two_seconds_on(caplog: pytest.LogCaptureFixture) -> None:
    log = launch.CompileLog()
    with caplog.at_level(logging.INFO, logger=launch.__name__):
        log.note("decode", 1.5)
        log.note("decode", 9.0)  # waits for the device
        assert not caplog.messages
        log.note("prefill", 1.0)
        log.note("store", 0.3)
    assert caplog.messages == [
        "compiled kernels in 2.5 s (variants: 2); later processes find them in Triton's cache"
    ]


# -- whole calls ---------------------------------------------------------------------------------

FAILING = ("attention_kernel", "merge_kernel", "_store_kernel", "_copy_kernel", "_hash_kernel")


@pytest.mark.slow_cases(but=["0"])
@pytest.mark.parametrize("first", [0, 4, 9])
def test_generate_with_kernels_that_fail_midway(first: int, launches: Launches) -> None:
    """Each kernel fails from its `first`-th launch on, with another error each time."""
    model = models.build("llama")
    inputs = models.padded_prompt("llama", (13, 4, 9))
    options: dict[str, Any] = {"max_new_tokens": 3 + first // 2, "num_beams": 1 + first // 4}
    plain = model.generate(**inputs, **options)
    kinds = list(errors().values())
    launches.fail = lambda name, number: kinds[number % len(kinds)] if number >= first else None
    for _ in range(1 + (first > 0)):
        assert torch.equal(plain, model.generate(**inputs, **options, **models.PAGED))
    hf_paged.check_integrity(model)
    route = hf_paged.last_route(model)
    assert route is not None and route.reason.startswith("packed forwards")
    assert {"attention_kernel", "_store_kernel"} <= set(launches.warnings) <= set(FAILING)


def test_kernels_are_tried_at_a_models_sizes(launches: Launches) -> None:
    model = models.build("llama", num_hidden_layers=1)
    launches.fail = lambda name, number: errors()["resources"]
    for config, count in ((PagedConfig(), 0), (PagedConfig(block_size=32, kv_dtype="int8"), 3)):
        warm_up_kernels(Trial(model, empty_cache(model, PagedMemory(config)), make_runner))
        # a store, a prompt and a decode step, if the check has other blocks
        assert launches.counts.total() == count
    assert sorted(launches.warnings) == ["_store_kernel", "attention_kernel"]
    assert all(
        found["BLOCK_SIZE"] == 32 and found["CODE_DTYPE"] == 1 for found in launches.constants
    )


@pytest.mark.slow
@pytest.mark.parametrize("kernel", ["attention_kernel", "_store_kernel"])
def test_a_recording_that_fails_leaves_the_step_to_the_engine(
    kernel: str, launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support.graph_helpers import assert_as_lone, job, results, use_fake_graphs

    backend, model = use_fake_graphs(monkeypatch), models.build("llama", num_hidden_layers=1)
    capture, jobs = backend.capture, [job(5, 6)]

    def observed(*args: Any) -> Any:
        launches.fails(kernel)
        try:
            return capture(*args)
        finally:
            launches.fails("")

    monkeypatch.setattr(backend, "capture", observed)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        found = results(engine, jobs)
        assert not engine.stats().num_captured_steps and not backend.graphs
    monkeypatch.undo()
    assert_as_lone(model, jobs, found)
    assert launches.warnings == [kernel]


class TimedOut(TimeoutError):
    """As handlers of `signal.alarm` raise it."""


@contextlib.contextmanager
def alarmed() -> Iterator[Callable[[], None]]:
    """Yields a function that raises `TimedOut` from a signal handler."""

    def handle(signum: int, frame: object) -> None:
        raise TimedOut

    before = signal.signal(signal.SIGALRM, handle)
    try:
        yield lambda: signal.raise_signal(signal.SIGALRM)
    finally:
        signal.signal(signal.SIGALRM, before)


def test_an_interrupt_that_the_compiler_replaces_is_raised(launches: Launches) -> None:
    with alarmed() as ring:

        def compile_kernel(name: str, number: int) -> None:
            try:
                ring()
            except Exception:
                raise errors()["compiler"] from None  # as Triton's code generator does

        launches.fail = compile_kernel
        with pytest.raises(TimedOut):
            store()
    assert not launch._failed_variants and not launches.warnings


def test_an_interrupt_while_the_device_is_checked_is_raised(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with alarmed() as ring:
        monkeypatch.setattr(torch.accelerator, "synchronize", lambda device: ring())
        with pytest.raises(TimedOut):
            launch.is_recoverable(RuntimeError(), torch.device("meta"))


def test_a_kernel_that_lacks_memory_is_launched_again_whichever_line_says_so(
    launches: Launches,
) -> None:
    message = "CUDA error: out of memory\nCompile with `TORCH_USE_CUDA_DSA` to enable assertions.\n"
    launches.fail = lambda name, number: RuntimeError(message)
    store()
    assert not launch._failed_variants
    assert launches.reasons == ["RuntimeError: CUDA error: out of memory"]
