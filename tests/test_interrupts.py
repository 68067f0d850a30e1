"""Steps are atomic: an interrupt at any moment leaves pool, model and engine intact."""

from __future__ import annotations

import _signal
import _weakrefset
import ast
import contextlib
import dis
import functools
import itertools
import linecache
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import FrameType, FunctionType, SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch.overrides import TorchFunctionMode
from torch.utils import _python_dispatch
from torch.utils._python_dispatch import TorchDispatchMode

import hf_paged
from hf_paged import PagedConfig, PagedEngine, config, forks, interrupts, threads
from hf_paged.attention import switch
from hf_paged.batching import engine_core, prompt_forms, streams
from hf_paged.batching.decoding import prepare, sample, sampler
from hf_paged.batching.engine_core import EngineCore
from hf_paged.batching.ledger import Ledger
from hf_paged.cache import free_memory, handles
from hf_paged.fingerprints.state import StateReading
from hf_paged.kernels.cpp import build
from hf_paged.kernels.triton import launch
from hf_paged.model import writes
from hf_paged.rooms import ROOMS, is_installed
from hf_paged.switches import Switches
from tests.support import models
from tests.support.engine_helpers import assert_drained, run_all
from tests.support.interrupts import interrupt_calls, interrupt_often
from tests.support.rooms import needs_all_rooms, records_on_cpu
from tests.support.scenarios import CASES, MODES, Engine, Generate

OURS = str(Path(hf_paged.__file__).parent)
GREEDY = MODES["greedy"]

pytestmark = pytest.mark.usefixtures("sigint")


@contextlib.contextmanager
def tracing(trace: Any) -> Iterator[None]:
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


@contextlib.contextmanager
def handling(number: int, handler: Any) -> Iterator[None]:
    before = signal.signal(number, handler)
    try:
        yield
    finally:
        signal.signal(number, before)


class SignalAt:
    """A trace function that raises a signal before the `n`-th executed line of hf_paged."""

    def __init__(self, n: int, number: int) -> None:
        self.n, self.number, self.count = n, number, 0

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        return self.line if frame.f_code.co_filename.startswith(OURS) else None

    def line(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            self.count += 1
            # Python looks for signals after calls and jumps, and a `with` around these sees the
            # exception; where it is left, which is its own line again, none can come
            text = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
            if self.count >= self.n and not text.lstrip().startswith("with "):
                sys.settrace(None)
                signal.raise_signal(self.number)
        return self.line


@pytest.fixture
def engine() -> Iterator[PagedEngine]:
    with PagedEngine(models.build("llama"), {"block_size": 8}) as engine:
        yield engine
        assert_drained(engine)


def interrupted(original: Callable[..., Any], number: int) -> Callable[..., Any]:
    """The function, with a signal as it ends for the `number`-th time."""
    numbers = itertools.count(1)

    def function(*args: Any) -> Any:
        result = original(*args)
        if next(numbers) == number:
            signal.raise_signal(signal.SIGINT)
        return result

    return function


def keep_scores(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    return scores


@pytest.mark.slow
@pytest.mark.parametrize(("attack", "seed"), [(interrupt_often, 11), (interrupt_calls, 5)])
def test_interrupts_at_random(attack: Any, seed: int) -> None:
    """Real signals, and interrupts as any function is entered."""
    told: list[str] = []
    assert not attack(36, seed=seed, report=told.append), "\n".join(told)


def test_an_interrupt_of_a_requests_own_code_ends_that_request_alone(engine: PagedEngine) -> None:
    prompts, results = ([5, 6, 7], [8, 9], [10]), dict[str, Any]()
    expected = engine.generate(prompts, GREEDY)
    for number, prompt in enumerate(prompts):
        own = {"logits_processor": [interrupted(keep_scores, 3)]} if number == 1 else {}
        engine.add_request(prompt, GREEDY, request_id=str(number), **own)
    with pytest.raises(KeyboardInterrupt):
        run_all(engine, results)
    run_all(engine, results)
    assert "KeyboardInterrupt" in str(results["1"].error)
    for number in (0, 2):
        assert results[str(number)].error is None
        assert results[str(number)].token_ids == expected[number].token_ids


@pytest.mark.parametrize("place", ["argmax", "_fetch", "accept", "append"])
def test_an_interrupt_of_our_own_sampling_costs_requests_without_callers_code_nothing(
    place: str, engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Except the one whose token is just being counted."""
    owner: Any = {"append": Ledger, "accept": sampler.SampledBatch}.get(place, sampler)
    prompts, results = [[5, 6, 7], [8, 9], [10], [11, 12, 13, 14]], dict[str, Any]()
    options = [GREEDY, GREEDY, {**GREEDY, "repetition_penalty": 1.3}, GREEDY]
    expected = engine.generate(prompts, options)
    for number, (prompt, own) in enumerate(zip(prompts, options)):
        engine.add_request(prompt, own, request_id=str(number))
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, place, interrupted(getattr(owner, place), 6))
        run_all(engine, results)
    run_all(engine, results)
    errors = [name for name in results if results[name].error is not None]
    assert len(errors) == (place == "append")
    for number, result in enumerate(expected):
        if str(number) not in errors:
            assert results[str(number)].token_ids == result.token_ids


@pytest.mark.parametrize(
    ("owner", "name"),
    [(EngineCore, "_queue_step_outputs"), (engine_core, "RequestOutput")],
    ids=["told", "made"],
)
def test_an_interrupt_beside_an_output_tells_no_token_twice_and_loses_no_result(
    owner: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a token has been told, and as outputs and results are made."""
    case, original, calls = Engine(models.build("llama"), "steps"), getattr(owner, name), 0

    def often_interrupted(*args: Any) -> Any:
        nonlocal calls
        calls += 1
        made = original(*args)
        if calls % 7 == 3:
            signal.raise_signal(signal.SIGINT)
        return made

    monkeypatch.setattr(owner, name, often_interrupted)
    case.add()
    while case.engine.has_unfinished:
        with contextlib.suppress(KeyboardInterrupt):
            case.outputs += case.engine.step()
    monkeypatch.undo()
    assert len({each.request_id for each in case.outputs if each.finished}) == len(case.prompts)
    case.check()


def test_the_blocks_of_a_returned_cache_are_freed_where_an_interrupt_keeps_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By frames of transformers, which make the output that holds it."""
    model, kept = models.build("llama"), []

    def output(**fields: Any) -> Any:
        assert hf_paged.memory_stats(model).used_blocks
        raise KeyboardInterrupt

    monkeypatch.setattr(sample, "GenerateDecoderOnlyOutput", output)
    for options in ({}, {"num_return_sequences": 2, "do_sample": True}):
        options = {**options, **models.PAGED, "return_dict_in_generate": True}
        with pytest.raises(KeyboardInterrupt) as caught:
            model.generate(models.token_ids(1, 9), max_new_tokens=4, **options)
        kept.append(caught.value)
        hf_paged.check_integrity(model)
        assert hf_paged.memory_stats(model).used_blocks == 0


needs_recording = pytest.mark.skipif(not records_on_cpu(), reason="no step is recorded")


@pytest.mark.parametrize(
    ("context", "function", "number"),
    [
        (functools.partial(torch.autocast, "cpu", torch.bfloat16), torch.autocast.__exit__, 1),
        (torch.inference_mode, torch.inference_mode.__exit__, 1),
        pytest.param(contextlib.nullcontext, torch.autocast.__exit__, 1, marks=needs_recording),
        pytest.param(contextlib.nullcontext, TorchFunctionMode.__exit__, 1, marks=needs_recording),
        pytest.param(contextlib.nullcontext, TorchDispatchMode.__exit__, 5, marks=needs_recording),
        (contextlib.nullcontext, _python_dispatch._pop_mode, 1),
    ],
    ids=["autocast", "inference", "no autocast", "function mode", "dispatch mode", "popped"],
)
def test_contexts_of_torch_that_an_interrupt_kept_from_ending_are_ended(
    context: Any, function: Any, number: int
) -> None:
    def state() -> tuple[Any, ...]:
        torch.autocast_increment_nesting()
        devices = [(torch.is_autocast_enabled(x), torch.get_autocast_dtype(x)) for x in AUTOCAST]
        depth, is_cached = torch.autocast_decrement_nesting(), torch.is_autocast_cache_enabled()
        return depth, is_cached, devices, interrupts.num_modes(), torch.is_inference_mode_enabled()

    model, kept, numbers = models.build("llama"), [], itertools.count(1)

    def enter(frame: FrameType, event: str, argument: Any) -> None:
        if event == "call" and frame.f_code is function.__code__ and next(numbers) == number:
            sys.setprofile(None)
            raise KeyboardInterrupt

    profiling = sys.getprofile()
    with context():
        before = state()
        sys.setprofile(enter)
        try:
            with pytest.raises(KeyboardInterrupt) as caught:
                options = {"max_new_tokens": 24, "do_sample": False, **models.PAGED}
                model.generate(models.token_ids(1, 9), **options)
        finally:
            sys.setprofile(profiling)
        kept.append(caught.value)
        assert state() == before


AUTOCAST = ("cpu", "cuda", "mps", "xpu")


@pytest.mark.parametrize("device", AUTOCAST)
def test_what_an_interrupt_left_changed_is_restored(device: str) -> None:
    """Autocast of each device, torch's gradient mode, and a context of ours."""
    before = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    other_dtype = torch.float16 if before[1] == torch.bfloat16 else torch.bfloat16
    seen: list[str] = []

    @interrupts.restoring
    def switched() -> Iterator[None]:
        seen.append("switched")
        try:
            yield
        finally:
            seen.append("back")

    @interrupts.guarded
    def call() -> None:
        context = switched()
        context.__enter__()
        torch.set_autocast_enabled(device, not before[0])
        torch.set_autocast_dtype(device, other_dtype)
        torch._C._set_grad_enabled(False)
        raise KeyboardInterrupt  # before `context.__exit__` is called

    try:
        with pytest.raises(KeyboardInterrupt):
            call()
        assert (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) == before
        assert seen == ["switched", "back"] and torch.is_grad_enabled()
    finally:
        torch.set_autocast_enabled(device, before[0])
        torch.set_autocast_dtype(device, before[1])


def raises_interrupt(*args: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("outer", [models.PAGED, {}], ids=["in a paged call", "in a plain call"])
def test_a_call_whose_code_caught_an_interrupt_of_another_call_ends_that_one(
    outer: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The other call is interrupted as it restores the model."""
    model, prompt, kept = models.build("llama"), models.token_ids(1, 9), []
    expected = model.generate(prompt, **GREEDY)

    def nests(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if not kept:
            with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
                patch.setattr(Switches, "leave", raises_interrupt)
                model.generate(prompt, **GREEDY, **models.PAGED)
            kept.append(caught.value)
        return scores

    found = model.generate(prompt, **GREEDY, **outer, logits_processor=[nests])
    assert kept and torch.equal(found, expected)
    assert not switch._switches.entries
    assert hf_paged.memory_stats(model).used_blocks == 0


def is_free(lock: threading.RLock) -> bool:
    if not lock.acquire(timeout=1):
        return False
    lock.release()
    return True


def test_an_interrupt_of_a_cache_or_of_a_saved_prefix_keeps_no_lock(
    engine: PagedEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Outside of `generate` and steps, too."""
    prompt, file = list(range(30)), tmp_path / "prefix.safetensors"
    engine.generate([prompt], GREEDY)
    cache = hf_paged.PagedCache(engine.model.config)
    for lock, call in (
        (cache.memory.lock, lambda: engine.model(models.token_ids(1, 9), past_key_values=cache)),
        (engine.memory.lock, engine.reset_prefix_cache),
        (engine._core.inner_lock, lambda: engine.save_prefix(prompt, file)),
    ):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(interrupts._Restoring, "__exit__", raises_interrupt)
            call()
        assert not interrupts._thread_contexts.open
        with ThreadPoolExecutor(1) as pool:
            assert pool.submit(is_free, lock).result()
    assert not engine._core._pool_thread_ids


class Nowhere(Exception):
    pass


def nowhere(signum: int, frame: FrameType | None) -> None:
    raise Nowhere


def test_a_handler_that_raises_another_error_at_any_line_leaves_everything_whole() -> None:
    case = Generate(models.build("llama"), "greedy")
    case.run()
    with handling(signal.SIGALRM, nowhere):
        for n in (40, 400, 1100, 1500, 2100):
            with tracing(SignalAt(n, signal.SIGALRM)), pytest.raises(Nowhere):
                case.run()
            case.check()


@pytest.mark.slow
def test_a_signal_handler_may_look_at_models_and_free_them_at_any_moment() -> None:
    """Before the first run of each line of `registry.py`."""
    model, other = models.build("llama"), models.build("llama")
    case, lines, ended = Generate(model, "greedy"), set[int](), threading.Event()
    Generate(other, "greedy").run()

    def look(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line" and frame.f_lineno not in lines:
            lines.add(frame.f_lineno)
            hf_paged.memory_stats(model), hf_paged.last_route(model), hf_paged.free(other)
        return look if frame.f_code.co_filename == f"{OURS}/model/registry.py" else None

    def run() -> None:
        with tracing(look):
            case.run()
        ended.set()

    threading.Thread(target=run, daemon=True).start()
    assert ended.wait(30), "it waits for a lock that it holds itself"
    assert len(lines) > 10
    case.check()


class Blocks:
    """A streamer whose `end` is interrupted while it waits."""

    goes_on_waiting = False

    def put(self, value: torch.Tensor) -> None:
        pass

    def end(self) -> None:
        signal.raise_signal(signal.SIGINT)
        self.goes_on_waiting = True


def fails(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    raise ValueError("of a processor")


@pytest.mark.parametrize("how", ["cancelled", "failed", "closed"])
def test_an_interrupt_reaches_a_streamer_that_is_ended(how: str, engine: PagedEngine) -> None:
    results, streamer = dict[str, Any](), Blocks()
    given: dict[str, Any] = {"request_id": "own", "streamer": streamer}
    (expected,) = engine.generate([[8, 9]], GREEDY)
    engine.add_request([8, 9], GREEDY, request_id="other")
    if how == "closed":
        stream = engine.stream([[5, 6, 7]], GREEDY, **given)
        next(stream)
        with pytest.raises(KeyboardInterrupt):
            stream.close()
    else:
        own = {"logits_processor": [fails]} if how == "failed" else {}
        engine.add_request([5, 6, 7], GREEDY, **given, **own)
        with pytest.raises(KeyboardInterrupt):
            results.update((o.request_id, o.result) for o in engine.step() if o.result is not None)
            engine.cancel("own")
    run_all(engine, results)
    assert not streamer.goes_on_waiting
    assert results["other"].token_ids == expected.token_ids
    if how == "cancelled":
        assert results["own"].finish_reason == "cancelled"
    if how == "failed":
        assert str(results["own"].error) == "of a processor"


@pytest.mark.slow_cases("generate, encoder-decoder, beams", "engine.step, swap")
@pytest.mark.parametrize(
    "name",
    ["generate, greedy", "engine.step", "generate, encoder-decoder, beams", "engine.step, swap"],
)
def test_no_signal_handler_is_set(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by calls nor by engines, whose steps preempt, swap and are recorded."""
    numbers: list[Any] = []
    with monkeypatch.context() as patch:
        for module in (signal, _signal):
            patch.setattr(module, "signal", lambda *arguments: numbers.append(arguments))
        case = CASES[name]()
        case.run()
        case.check()
    assert not numbers


def nowhere_once(signum: int, frame: FrameType | None) -> None:
    signal.signal(signum, signal.SIG_DFL)
    raise Nowhere


# of a package whose folder's name begins with that of hf_paged's
nowhere_beside = FunctionType(
    nowhere_once.__code__.replace(co_filename=f"{OURS}_jobs/handlers.py"), globals()
)


def nowhere_for(name: str, signum: int, frame: FrameType | None) -> None:
    del frame
    raise Nowhere


class Handles:
    def __call__(self, signum: int, frame: FrameType | None) -> None:
        nowhere(signum, None)


def test_errors_of_handlers_are_interrupts_and_others_are_not() -> None:
    def caught(raises: Callable[[], object]) -> BaseException:
        with pytest.raises(BaseException) as caught:
            raises()
        return caught.value

    partial = functools.partial(nowhere_for, "a job")
    handles = Handles()
    for handler in (nowhere, nowhere_once, nowhere_beside, partial, handles, handles.__call__):
        with handling(signal.SIGUSR1, handler):
            assert interrupts.is_interrupt(caught(lambda: signal.raise_signal(signal.SIGUSR1)))
            assert interrupts.is_interrupt(caught(lambda: signal.raise_signal(signal.SIGINT)))
            assert not interrupts.is_interrupt(caught(lambda: [][0]))


class TimedOut(TimeoutError):
    """As `signal.alarm`'s handlers raise it: an `OSError`."""


@contextlib.contextmanager
def alarmed() -> Iterator[Callable[[], None]]:
    """Yields what raises `TimedOut` from a handler."""

    def handle(signum: int, frame: FrameType | None) -> None:
        raise TimedOut

    with handling(signal.SIGALRM, handle):
        yield lambda: signal.raise_signal(signal.SIGALRM)


def test_an_error_of_a_handler_is_raised_where_tokens_of_several_kinds_are_brought_to_the_host(
    engine: PagedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, original = dict[str, Any](), sampler._fetch
    options = {"greedy": GREEDY, "sampled": MODES["sampled"]}
    expected = engine.generate([[5, 6, 7]] * 2, list(options.values()), seed=[3, 3])
    for name, own in options.items():
        engine.add_request([5, 6, 7], own, request_id=name, seed=3)
    engine.step()
    with alarmed() as ring:

        def fetch(*args: Any) -> Any:
            monkeypatch.undo()
            ring()
            return original(*args)

        monkeypatch.setattr(sampler, "_fetch", fetch)
        with pytest.raises(TimedOut):
            engine.step()
    run_all(engine, results)
    assert results["greedy"].token_ids == expected[0].token_ids
    assert "TimedOut" in str(results["sampled"].error)


def nodes() -> Iterator[tuple[str, ast.AST]]:
    for path in Path(OURS).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            yield str(path.relative_to(OURS)), node


def test_with_takes_locks_and_no_conditions() -> None:
    """`Condition.__enter__` and `__exit__` are Python code: a signal whose handler raises there
    leaves the lock taken, and other threads wait for ever."""
    conditions, taken = set[str](), set[str]()  # names, whose files may differ
    for _, node in nodes():
        if isinstance(node, ast.Assign) and "Condition(" in ast.unparse(node.value):
            conditions |= {ast.unparse(target).split(".")[-1] for target in node.targets}
        if isinstance(node, ast.With):
            taken |= {ast.unparse(item.context_expr).split(".")[-1] for item in node.items}
    assert not conditions & taken
    assert len(conditions) > (3 if all(map(is_installed, ROOMS)) else 1)


class SignalAtCheck:
    """A trace function that raises a signal at the `n`-th moment at which Python looks for signals
    in the code of these files: after a bytecode that calls, jumps back or begins a function."""

    CHECKS = {dis.opmap[name] for name in ("CALL", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "RESUME")}
    OTHERS = {dis.opmap[name] for name in ("RETURN_VALUE", "PUSH_EXC_INFO")}

    def __init__(self, n: int, files: tuple[str, ...]) -> None:
        self.n, self.files, self.count = n, files, 0
        self.last = dict[FrameType, int]()  # bytecode that a frame ran last

    def __call__(self, frame: FrameType, event: str, argument: Any) -> Any:
        if not frame.f_code.co_filename.startswith(self.files):
            return None
        frame.f_trace_opcodes = True
        return self.opcode

    def opcode(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode":
            last, code = self.last.get(frame), frame.f_code.co_code[frame.f_lasti]
            self.last[frame] = code
            # a signal after a call is an error of the call: `try: return call()` sees it, but not
            # an error of the return; after a call that raises, Python looks for no signal
            self.count += last in self.CHECKS and code not in self.OTHERS
            if self.count >= self.n:
                sys.settrace(None)
                signal.raise_signal(signal.SIGINT)
        return self.opcode


@pytest.mark.skipif(sys.version_info[:2] != (3, 11), reason="other bytecodes look for signals")
@pytest.mark.parametrize("is_taken", [False, True], ids=["free", "held by another thread"])
def test_an_interrupt_leaves_no_attempted_lock_held(is_taken: bool) -> None:
    lock, is_ready, stop = threading.RLock(), threading.Event(), threading.Event()

    def attempt() -> bool:
        """Whether it was interrupted."""
        before = sys.gettrace()
        sys.settrace(SignalAtCheck(n, (OURS, contextlib.__file__)))
        try:
            with threads.attempt(lock) as is_held:
                assert is_held is not is_taken
        except KeyboardInterrupt:
            return True
        finally:
            sys.settrace(before)
        return False

    def hold() -> None:
        with lock:
            is_ready.set()
            stop.wait()

    holder = threading.Thread(target=hold)
    if is_taken:
        holder.start()
        is_ready.wait()
    try:
        for n in itertools.count(1):
            if not attempt():
                break
            assert not lock._is_owned(), n  # type: ignore[attr-defined]
            assert sys.exc_info()[1] is None, "the thread handles an error in later tests"
    finally:
        stop.set()
    assert n > 10
    if is_taken:
        holder.join()


@needs_all_rooms
def test_no_lock_is_acquired_outside_of_with_and_attempt() -> None:
    """A signal that arrives between `lock.acquire()` and a `try` leaves the lock held."""
    calls = {
        f"{path}: {ast.unparse(node)}"
        for path, node in nodes()
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("lock.acquire")
    }
    assert calls == {
        "forks.py: lock.acquire(blocking=False)",  # in a new child process
        "ranks/signals.py: self._lock.acquire(timeout=0.05)",  # while signals are deferred
        "threads.py: lock.acquire()",  # of a condition, by its holder
        "threads.py: lock.acquire(blocking=False)",  # in the `with` of an ended thread
        "threads.py: lock.acquire(timeout=seconds)",  # `attempt`
    }


class Replaced(RuntimeError):
    """The error that code raises in place of one that it has caught."""


def replace_from_none(raises: Callable[[], object]) -> None:
    try:
        raises()
    except BaseException:
        raise Replaced from None  # as Triton's code generator does


def replace_from_cause(raises: Callable[[], object]) -> None:
    cause = None
    try:
        raises()
    except BaseException as error:
        cause = error
    raise Replaced from cause


def replace_twice(raises: Callable[[], object]) -> None:
    try:
        replace_from_none(raises)
    except Replaced as error:
        raise Replaced from error


def interrupt_by_keyboard() -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("replace", [replace_from_none, replace_from_cause, replace_twice])
def test_the_interrupt_that_an_error_replaces_is_found(replace: Callable[..., None]) -> None:
    with alarmed() as ring:
        for raises, kind in ((ring, TimedOut), (interrupt_by_keyboard, KeyboardInterrupt)):
            with pytest.raises(Replaced) as caught:
                replace(raises)
            assert type(launch.interrupt_of(caught.value)) is kind
            # the code that raised it may have dealt with the interrupt
            assert not interrupts.is_interrupt(caught.value)


def test_an_error_that_replaces_no_interrupt_is_none() -> None:
    class PanicException(BaseException):
        """As a Rust library raises it."""

    def panic() -> None:
        raise PanicException

    with pytest.raises(Replaced) as caught:
        replace_twice(panic)
    assert launch.interrupt_of(caught.value) is None
    # a call in a handler of an interrupt: the context of its errors is the interrupt
    with alarmed() as ring:
        try:
            ring()
        except TimedOut:
            try:
                replace_twice(lambda: [][0])
            except Replaced as error:
                assert error.__context__ is not None
                assert launch.interrupt_of(error) is None


class Stopped(TimeoutError, RuntimeError):
    """An error of a handler, of the types that most code handles."""


class Rings:
    """An object of the caller whose every method is interrupted."""

    def __init__(self, ring: Callable[[], None]) -> None:
        self.ring = ring

    def __repr__(self) -> str:
        self.ring()
        return ""

    def __reduce__(self) -> str:
        return repr(self)

    def __iter__(self) -> Iterator[Any]:
        repr(self)
        return iter(())

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: repr(self)


class RingsInList(list[int]):
    ring: Callable[[], None]

    def __iter__(self) -> Iterator[int]:
        self.ring()
        return iter(())


def ring_in_repr(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    # `reprlib` itself swallows errors of objects
    patch.setattr(config.reprlib, "repr", lambda value: ring())
    config.shown(5)


def ring_in_capture(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    class Model:
        def generate(self, **arguments: Any) -> None:
            capture = prepare.capturing.get()
            assert capture is not None
            capture.calls.append(prepare.LoopCall("", {}, None))
            ring()

    model: Any = Model()
    prepare.capture_call(model)


def ring_in_elements(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    value = RingsInList()
    value.ring = ring
    writes._elements(value)


def ring_in_source(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    with patch.context() as inner:
        inner.setattr(switch.inspect, "getsource", lambda code: ring())
        with pytest.raises(Stopped):
            switch._tree(RingsInList)
    assert switch._tree(RingsInList) is not None  # the lack of a tree was not cached
    ring()


def ring_in_weights_state(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    reading: Any = object.__new__(StateReading)
    reading._owners, reading._iterated, reading._globals = [], [Rings(ring)], []
    reading.read_values()


def ring_in_prompt(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        patch.setattr(streams, "prompt_ids", lambda *args: ring())
        engine.generate([[]], GREEDY)  # cannot be added


def ring_in_pending(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    from hf_paged.native import pending

    patch.setattr(pending, "prompt_ids", lambda *args: ring())
    make_config: Any = None
    pending.PendingRequest(["0"], [5], make_config, None, False, False, None, {}, None)


def ring_in_grammar(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    from hf_paged import grammar

    patch.setattr(grammar, "_xgrammar", lambda: SimpleNamespace(TokenizerInfo=Rings(ring)))
    grammar.GrammarCompiler()._compiler_for(None, 9)


def ring_in_adapter(function: str, ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("peft")
    from hf_paged.adapters import files

    patch.setattr(files, "_read_config", lambda path: ring())
    file: Any = SimpleNamespace(path="adapter")
    if function == "read":
        files.read_adapter_file("adapter")
    else:
        files.load_adapter(torch.nn.Linear(2, 2), file)


def ring_in_config(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    from hf_paged.tools import models as tool_models

    model = models.build("llama")
    patch.setattr(tool_models.compat, "from_config", lambda *args, **kwargs: ring())
    tool_models._forward_caches(model)


def ring_in_loading(function: str, ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    from transformers.integrations import peft

    from hf_paged.tools import loading

    if function == "model":
        patch.setattr(peft, "maybe_load_adapters", lambda *args: ring())
        loading.load_model("a name")
    else:
        load = transformers.AutoTokenizer
        patch.setattr(load, "from_pretrained", lambda *args, **kwargs: ring())
        loading.load_tokenizer("a name", SimpleNamespace(name_or_path="a name"))


def ring_in_find(function: str, ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    from hf_paged.tools import models as tool_models

    for kind in (transformers.AutoConfig, transformers.GenerationConfig):
        patch.setattr(kind, "from_pretrained", lambda *args, **kwargs: ring())
    getattr(tool_models, function)("a name")


def ring_in_folder(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    from hf_paged.tiers import block_files

    patch.setattr(block_files, "_make_private", lambda folder: ring())
    block_files.check_folder("folder")


def ring_in_build(function: str, ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(build.ctypes, "CDLL", lambda path: ring())
    patch.setattr(build, "_read_private", lambda path: ring())
    patch.setattr(build.prebuilt, "find", lambda: Path("library.so"))
    patch.setattr(build, "_find_compiler_and_key", lambda: pytest.fail("it would be compiled"))
    folder: Any = SimpleNamespace(glob=lambda pattern: [Path("library.so")])
    if function == "load":
        build._load()
    else:
        build._find_library(folder, "key")


def ring_in_libc(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    patch.setattr(free_memory.ctypes, "CDLL", lambda path: ring())
    free_memory._libc_function.__wrapped__("malloc_trim")


def ring_in_copy(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    snapshot: Any = object.__new__(writes.Snapshot)
    snapshot._copies = []
    snapshot._try_copy(Rings(ring))


def ring_in_handle(ring: Callable[[], None], patch: pytest.MonkeyPatch) -> None:
    cache = hf_paged.PagedCache(paged_config={"block_size": 8})
    for _ in range(2):
        keys, _ = cache.update(*2 * [torch.ones(1, 2, 3, 16)], 0)
    original, rings = handles.PagedTensor.dense, [ring]

    def dense(handle: Any) -> torch.Tensor:
        if rings:
            rings.pop()()
        return original(handle)

    patch.setattr(handles.PagedTensor, "dense", dense)
    patch.setattr(keys.layer, "rows", object())  # as in rows at contiguous addresses
    patch.setattr(handles.PagedTensor, "make_contiguous", lambda handle: True)
    torch.neg(keys)


def chat(tokenizer: Any) -> None:
    prompt_forms.prompt_ids([{"role": "user", "content": "text"}], tokenizer)


SWALLOWED: dict[str, Callable[[Callable[[], None], pytest.MonkeyPatch], object]] = {
    "an argument is shown": ring_in_repr,
    "a config is pickled": lambda ring, patch: prepare._pickled(Rings(ring)),
    "a chat": lambda ring, patch: chat(Rings(ring)),
    "a prepared call": ring_in_capture,
    "elements of a container": ring_in_elements,
    "source code": ring_in_source,
    "values of a model": ring_in_weights_state,
    "a prompt that cannot be added": ring_in_prompt,
    "a library is loaded": functools.partial(ring_in_build, "load"),
    "a library is read": functools.partial(ring_in_build, "read"),
    "the C library": ring_in_libc,
    "a copy of a tensor": ring_in_copy,
    "an operation on keys": ring_in_handle,
}
IN_ROOMS: dict[str, Callable[[Callable[[], None], pytest.MonkeyPatch], object]] = {
    "a pending request": ring_in_pending,
    "a grammar": ring_in_grammar,
    "an adapter is read": functools.partial(ring_in_adapter, "read"),
    "an adapter is loaded": functools.partial(ring_in_adapter, "load"),
    "a model of a tool": ring_in_config,
    "a model's config": functools.partial(ring_in_loading, "model"),
    "a config is found": functools.partial(ring_in_find, "find_model"),
    "a generation config": functools.partial(ring_in_find, "saved_generation_config"),
    "a folder of blocks": ring_in_folder,
    "a tokenizer": functools.partial(ring_in_loading, "tokenizer"),
}


@pytest.mark.parametrize(
    "case", [*SWALLOWED, *(pytest.param(name, marks=needs_all_rooms) for name in IN_ROOMS)]
)
def test_an_interrupt_passes_code_that_handles_any_error(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise Stopped

    def ring() -> None:
        if signal.getsignal(signal.SIGALRM) is stop:  # not later, when pytest shows an object
            signal.raise_signal(signal.SIGALRM)

    before = signal.signal(signal.SIGALRM, stop)
    try:
        with pytest.raises(Stopped):
            {**SWALLOWED, **IN_ROOMS}[case](ring, monkeypatch)
    finally:
        signal.signal(signal.SIGALRM, before)


@needs_all_rooms
def test_all_code_that_handles_any_error_looks_for_interrupts() -> None:
    """Except for code that no signal handler interrupts, or whose caller gets the error."""
    unaware = set[str]()
    for path in Path(OURS).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ExceptHandler) and node.type is not None:
                body = ast.unparse(node)
                is_broad = "Exception" in map(ast.unparse, ast.walk(node.type))
                raises_all = body.endswith("raise") and "return" not in body and "if" not in body
                is_aware = any(
                    name in body for name in ("is_interrupt", "interrupt_of", "is_forward_failure")
                )
                if is_broad and not is_aware and not raises_all:
                    unaware.add(path.relative_to(OURS).as_posix())
    assert unaware == {
        "cache/idle.py",  # in a thread
        "forks.py",  # during `os.fork`, which raises no errors
        "native/manager_thread.py",  # in the engine's thread
        "native/pending.py",  # `end`: in the engine's thread
        "tools/openai_answers.py",  # raised in the reading task
        "tools/served_request.py",  # raised by `get`
    }


@pytest.mark.parametrize("name", ["owners", "listeners"])
def test_other_threads_may_add_to_sets_that_are_being_read(name: str) -> None:
    """Other threads ran between the lines of `WeakSet.__iter__`."""
    num_done = 0

    class Member:
        def done(self) -> None:
            nonlocal num_done
            num_done += 1

        clean_up_after_error = before_fork = done

    register, run = {
        "owners": (interrupts.register_for_cleanup, interrupts._clean_up_owners),
        "listeners": (forks.add_listener, functools.partial(forks._notify, "before_fork")),
    }[name]
    members = [Member(), Member()]
    others = list[Member]()
    for member in members:
        register(member)

    def other_thread(frame: FrameType, event: str, argument: Any) -> Any:
        if frame.f_code.co_filename == _weakrefset.__file__:
            others.append(Member())
            register(others[-1])
        return other_thread

    before = sys.gettrace()
    sys.settrace(other_thread)
    try:
        run()
    finally:
        sys.settrace(before)
    assert num_done >= len(members)
