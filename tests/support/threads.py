"""
Random calls of `generate` from four threads at once on one model: `python -m tests.support.threads --mixes 200`.

Each call must end as plain `generate` ends alone: with the same tokens, with the exception of its own code, or, in the
main thread, by a real SIGINT, which another process sends. With a budget of blocks `OutOfBlocksError` may end it where
others can hold blocks for good: calls that cannot share a loop, or whose cache is returned. After each mix the pools
are whole and empty, the model is as it was and no loop is left. The exit code is 1 if anything else was seen; every
failure is printed with the numbers that repeat its choices.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import faulthandler
import functools
import gc
import os
import random
import sys
import tempfile
import threading
import time
import traceback
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch
import transformers
from torch import Tensor
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

import hf_paged
from hf_paged import OutOfBlocksError
from hf_paged.batching import shared_loop
from hf_paged.batching.shared_loop import SharedLoop
from hf_paged.generation import install
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.checks import model_state
from tests.support.engine_helpers import build_bloom
from tests.support.interrupts import Case, Interrupter

NUM_THREADS = 4
HANG_SECONDS = 60.0  # a mix takes a second or two
BLOCK_SIZE = 8
TOLERANCE = 1e-3  # of scores, whose standard deviation is above one
NEAR_TIE = 0.5  # in half precision, between the best two scores, where another shape may choose the other token
# how often a model is drawn, and the layer groups that a row takes blocks of, with one for its states
MODELS = {
    "llama": (6, 1),
    "gemma3": (3, 2),
    "bloom": (2, 1),
    "DeepseekV3ForCausalLM": (2, 1),
    "Qwen3NextForCausalLM": (2, 2),
    "BambaForCausalLM": (2, 2),
}
ENDS = list(range(30, 42))


@functools.cache
def get_model(name: str) -> PreTrainedModel:
    if name in models.CONFIGS:
        return models.build(name)
    model: Any = build_bloom() if name == "bloom" else tiny_model(getattr(transformers, name))
    for config in (model.config, model.config.get_text_config(), model.generation_config):
        config.eos_token_id = None
    return model


# ------------------------------------------------------------------------------------------------------ what is drawn


@dataclasses.dataclass(frozen=True)
class Call:
    """One `generate` call; `owner` tells its exceptions from those of others."""

    owner: str
    texts: tuple[tuple[int, int], ...]  # of each row, which text it begins and how many tokens of it
    options: dict[str, Any]
    cache_config: dict[str, Any]
    processor: tuple[str, int] | None  # its kind and a step
    criterion: tuple[str, int] | None
    streamer: tuple[str, int] | None  # its kind and a token
    is_autocast: bool
    is_inference: bool
    seed: int  # of samples
    pause: float  # seconds before it

    @property
    def key(self) -> Any:
        """Calls of other keys run in other loops."""
        config = {name: value for name, value in self.cache_config.items() if name != "cache_salt"}
        return tuple(sorted(config.items())), self.is_autocast, self.is_inference

    def num_needed(self, num_groups: int) -> int:
        """Blocks with which any of its prompts can run to its end."""
        longest = max(length for _, length in self.texts) + self.options["max_new_tokens"]
        rows = max(self.options.get("num_beams", 1), self.options.get("num_return_sequences", 1))
        return rows * num_groups * (longest // BLOCK_SIZE + 1)


@dataclasses.dataclass(frozen=True)
class Mix:
    model: str
    calls: tuple[tuple[Call, ...], ...]  # of each thread
    in_main: bool  # the first thread is the main thread
    interrupted: int | None  # which of its calls
    delay: float  # of the interrupt, in times that the call takes alone

    @property
    def may_run_out(self) -> bool:
        """Whether blocks can be held by what the loop of a call cannot preempt."""
        calls = [call for own in self.calls for call in own]
        keeps = any(call.options.get("return_dict_in_generate") for call in calls)
        return "num_blocks" in calls[0].cache_config and (keeps or len({call.key for call in calls}) > 1)


def draw(seed: int, number: int) -> Mix:
    rng = random.Random(f"{seed}/{number}")
    [model] = rng.choices(list(MODELS), [weight for weight, _ in MODELS.values()])
    common: dict[str, Any] = {"block_size": BLOCK_SIZE, "prefix_caching": rng.random() < 0.5}
    if rng.random() < 0.3:
        common["preemption"] = rng.choice(["recompute", "swap"])
    if rng.random() < 0.2:
        common["max_num_batched_tokens"] = rng.choice([16, 40])
    is_plain = rng.random() < 0.5  # all calls can share forwards, and none keeps blocks
    has_budget = rng.random() < 0.5
    sampler = None if has_budget or rng.random() < 0.5 else rng.randrange(NUM_THREADS)
    calls: list[list[Call]] = []
    for thread in range(NUM_THREADS):
        count = rng.randint(1, 3)
        samples = rng.randrange(count) if thread == sampler else None
        own = [draw_call(rng, f"{thread}/{index}", common, is_plain, samples == index) for index in range(count)]
        calls.append(own)
    if has_budget:
        needed = max(call.num_needed(MODELS[model][1]) for own in calls for call in own)
        budget = {"num_blocks": round(needed * rng.uniform(1.0, 1.5))}
        calls = [
            [dataclasses.replace(call, cache_config=call.cache_config | budget) for call in own] for own in calls
        ]
    in_main = rng.random() < 0.5
    interrupted = rng.randrange(len(calls[0])) if in_main and rng.random() < 0.7 else None
    delay = rng.uniform(0, 5) if rng.random() < 0.7 else 10 ** rng.uniform(-3, 0)
    return Mix(model, tuple(map(tuple, calls)), in_main, interrupted, delay)


def draw_call(rng: random.Random, owner: str, common: dict[str, Any], is_plain: bool, samples: bool) -> Call:
    texts = [(rng.randrange(3), rng.choice([1, 5, 9, 17, 30, 47])) for _ in range(rng.choice([1, 1, 2, 3, 4]))]
    new_tokens = rng.choice([1, 5, 10, 16, 24])
    mode = "sampled" if samples else rng.choices(["greedy", "returned", "beams"], [7, 0.3, 3])[0]
    options: dict[str, Any] = {"max_new_tokens": new_tokens, "do_sample": mode == "sampled"}
    if mode == "beams":
        options["num_beams"] = rng.choice([2, 3])
    if mode == "returned" or (mode != "greedy" and rng.random() < 0.5):
        options["num_return_sequences"] = 2  # which greedy search refuses
    if rng.random() < 0.5:
        options |= {"eos_token_id": ENDS, "pad_token_id": models.PAD}
    config = dict(common)
    if not is_plain:
        if rng.random() < 0.2:
            options["return_dict_in_generate"] = True
        if rng.random() < 0.2:
            config["prefix_caching"] = not config["prefix_caching"]
    if rng.random() < 0.15:
        config["cache_salt"] = rng.choice("ab")
    step = rng.randrange(new_tokens)
    processor = criterion = streamer = None
    if rng.random() < 0.5:
        processor = rng.choices(["bias", "slow", "raises", "watches"], [2, 1, 1, 3])[0], step
    if rng.random() < 0.3:
        criterion = rng.choice(["ends", "raises", "rows"]), step
    if mode == "greedy" and rng.random() < 0.4:
        streamer = rng.choice(["one", "slow", "raises", "by row"]), step + 1
    has_autocast = not is_plain and mode == "greedy" and rng.random() < 0.12
    has_inference = not is_plain and rng.random() < 0.15
    pause = rng.choice([0.0, 0.0, rng.uniform(0, 0.03)])
    rest = has_autocast, has_inference, rng.randrange(1000), pause
    return Call(owner, tuple(texts), options, config, processor, criterion, streamer, *rest)


# ------------------------------------------------------------------------------------------------------ code of callers


class OwnError(RuntimeError):
    """Raised by code that was passed to a call."""


class Processor(LogitsProcessor):
    def __init__(self, call: Call, is_paged: bool) -> None:
        assert call.processor is not None
        self.kind, self.step = call.processor
        self.owner, self.is_paged = call.owner, is_paged
        self.thread = threading.get_ident()
        self.num_calls = 0
        self.shown: list[tuple[Tensor, Tensor, bool]] = []

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        assert threading.get_ident() == self.thread, "called in the thread of another call"
        self.num_calls += 1
        if self.kind == "raises" and self.num_calls > self.step:
            raise OwnError(self.owner)
        if self.kind == "slow" and self.is_paged and self.num_calls > self.step:
            time.sleep(0.01)
        if self.kind == "bias":
            scores[:, 20 + 7 * input_ids.shape[1] % 60] += 3.0
        if self.kind == "watches":
            self.shown.append((input_ids.clone(), scores.clone(), scores.is_inference()))
        return scores


class Criterion(StoppingCriteria):
    def __init__(self, call: Call) -> None:
        assert call.criterion is not None
        self.kind, self.step = call.criterion
        self.owner, self.num_calls = call.owner, 0

    def __call__(self, input_ids: Tensor, scores: Any, **kwargs: Any) -> Tensor:
        self.num_calls += 1
        if self.kind == "raises" and self.num_calls > self.step:
            raise OwnError(self.owner)
        if self.kind == "rows":
            return input_ids[:, -1] % 5 == 0
        return torch.full((len(input_ids),), self.kind == "ends" and self.num_calls > self.step)


class Streamer(BaseStreamer):
    def __init__(self, owner: str, raises_at: int | None = None, slow_at: int | None = None) -> None:
        self.owner, self.raises_at, self.slow_at = owner, raises_at, slow_at
        self.told: list[Any] = []

    def put(self, value: Tensor) -> None:
        if len(self.told) == self.raises_at:
            raise OwnError(self.owner)
        if len(self.told) == self.slow_at:
            time.sleep(0.02 + 0.03 * (len(self.told) % 2))
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


@dataclasses.dataclass
class Outcome:
    tokens: Tensor | None = None
    error: BaseException | None = None
    told: Any = None  # what streamers got
    shown: list[tuple[Tensor, Tensor, bool]] = dataclasses.field(default_factory=list)  # to a processor
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.error is None:
            return f"tokens {None if self.tokens is None else self.tokens.tolist()}"
        return "".join(traceback.format_exception(self.error))


def play(model: PreTrainedModel, call: Call, is_paged: bool, around: Callable[..., Any] | None = None) -> Outcome:
    """`around` runs a function, and may interrupt it."""
    width = max(length for _, length in call.texts)
    rows = [models.token_ids(1, 60, seed=text)[0, :length].clamp(20, 99) for text, length in call.texts]
    ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0), value=models.PAD) for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    arguments: dict[str, Any] = dict(call.options)
    outcome = Outcome()
    processor = streamer = None
    if call.processor is not None:
        processor = Processor(call, is_paged)
        arguments["logits_processor"] = LogitsProcessorList([processor])
    if call.criterion is not None:
        arguments["stopping_criteria"] = StoppingCriteriaList([Criterion(call)])
    if call.streamer is not None:
        kind, at = call.streamer
        make = functools.partial(Streamer, call.owner, slow_at=at if kind == "slow" and is_paged else None)
        if kind != "by row":
            streamer = arguments["streamer"] = make(raises_at=at if kind == "raises" else None)
        elif is_paged:  # transformers knows no streamers by row
            streamer = arguments["streamer"] = [make() for _ in rows]
    if is_paged:
        arguments |= {"cache_implementation": "paged", "cache_config": call.cache_config}

    def run() -> None:
        with ExitStack() as stack:
            if call.is_inference:
                stack.enter_context(torch.inference_mode())
            if call.is_autocast:
                stack.enter_context(torch.autocast("cpu", dtype=torch.bfloat16))
            found = model.generate(ids, attention_mask=mask, **arguments)
            outcome.tokens = found if isinstance(found, Tensor) else found.sequences

    start = time.perf_counter()
    if call.options["do_sample"]:
        torch.manual_seed(call.seed)
    try:
        (around or (lambda function: function()))(run)
    except BaseException as error:
        outcome.error, outcome.tokens = error, None
    outcome.seconds = time.perf_counter() - start
    outcome.shown = [] if processor is None else processor.shown
    if streamer is not None:
        outcome.told = [each.told for each in streamer] if isinstance(streamer, list) else streamer.told
    return outcome


# ------------------------------------------------------------------------------------------------------ comparison


def compare(call: Call, plain: Outcome, paged: Outcome, may_run_out: bool, is_interrupted: bool) -> tuple[str, str]:
    """What became of the paged call, and what is wrong with that."""
    error = paged.error
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", "" if is_interrupted else f"interrupted by another's signal:\n{paged}"
    if isinstance(error, OutOfBlocksError):
        return "out of blocks", "" if may_run_out else f"nothing but its own loop held blocks:\n{paged}"
    if plain.error is not None:
        if type(error) is not type(plain.error):
            return "raised", f"plain raised {plain.error!r}, paged:\n{paged}"
        own = isinstance(error, OwnError) and str(error) != call.owner
        return "raised", f"the error is another call's:\n{paged}" if own else ""
    if error is not None:
        return "raised", f"plain gave tokens, paged:\n{paged}"
    assert plain.tokens is not None and paged.tokens is not None
    if plain.tokens.is_inference() != paged.tokens.is_inference():
        return "equal", f"plain's tokens are an inference tensor: {plain.tokens.is_inference()}"
    if call.is_autocast:
        return "autocast", compare_half(plain, paged)
    if not (plain.tokens.shape == paged.tokens.shape and torch.equal(plain.tokens, paged.tokens)):
        return "equal", f"plain's {plain}\npaged {paged}"
    if call.streamer is not None and call.streamer[0] == "by row":
        return "equal", compare_rows(call, paged)
    if plain.told != paged.told:
        return "equal", f"the streamer was told {paged.told}, by plain {plain.told}"
    return "equal", compare_shown(call, plain, paged)


def compare_shown(call: Call, plain: Outcome, paged: Outcome) -> str:
    """Scores of rows whose end the processor does not see."""
    if "eos_token_id" in call.options or call.options.get("num_beams", 1) > 1:
        return ""
    if len(plain.shown) != len(paged.shown):
        return f"the processor was called {len(paged.shown)} times, by plain {len(plain.shown)} times"
    for step, ((ids, scores, is_inference), (others, found, found_inference)) in enumerate(
        zip(plain.shown, paged.shown)
    ):
        if not torch.equal(ids, others):
            return f"the processor was shown other ids in step {step}"
        if (difference := float((scores - found).abs().max())) > TOLERANCE:
            return f"the processor was shown scores {difference:.1e} from plain's in step {step}"
        if is_inference != found_inference:
            return f"the processor's scores in step {step} are an inference tensor: {found_inference}"
    return ""


def compare_half(plain: Outcome, paged: Outcome) -> str:
    """Up to the first near tie, as far as the scores were watched, which must be of half precision."""
    for step, ((ids, scores, _), (others, found, _)) in enumerate(zip(plain.shown, paged.shown)):
        if not torch.equal(ids, others):
            return f"the processor was shown other ids in step {step}"
        if not torch.equal(found, found.bfloat16().float()):
            return f"the scores of step {step} were not computed in half precision"
        best = scores.topk(2, dim=-1).values
        if float((best[:, 0] - best[:, 1]).min()) < NEAR_TIE:
            break
    return ""


def compare_rows(call: Call, paged: Outcome) -> str:
    assert paged.tokens is not None
    width = max(length for _, length in call.texts)
    for row, (told, (_, length)) in enumerate(zip(paged.told, call.texts)):
        new = paged.tokens[row, width:].tolist()
        if "eos_token_id" in call.options:
            end = next((place for place, token in enumerate(new) if token in ENDS), len(new) - 1)
            new = new[: end + 1]
        found = [token for part in told if part != "end" for each in part for token in flat(each)]
        prompt = paged.tokens[row, width - length : width].tolist()
        # a criterion may end a row before the others
        is_same = found[:length] == prompt and found[length:] == new[: len(found) - length]
        if not is_same or (call.criterion is None and len(found) != length + len(new)) or told.count("end") != 1:
            return f"the streamer of row {row} was told {told}, the tokens are {prompt} {new}"
    return ""


def flat(value: Any) -> list[int]:
    return value if isinstance(value, list) else [value]


# ------------------------------------------------------------------------------------------------------ one mix


class Observer:
    """Counts what the mixes are there to bring about, and knows the memories that they used."""

    def __init__(self) -> None:
        self.counts = Counter[str]()
        self.memories: weakref.WeakSet[Any] = weakref.WeakSet()

    @contextlib.contextmanager
    def installed(self) -> Iterator[None]:
        end_step, memory_for, run = SharedLoop._end_step, install.memory_for, SharedLoop.run

        def counted_end(loop: SharedLoop, ready: Any, failed: Any) -> None:
            owners = {generation.whole or generation for generation, _ in ready}
            self.counts["steps"] += 1
            self.counts["shared steps"] += len(owners) > 1
            self.counts["late callers"] += any(each.is_late for each in list(loop._callers.values()))
            end_step(loop, ready, failed)

        def counted_run(loop: SharedLoop, *args: Any) -> Any:
            before = loop.loop.num_preemptions
            try:
                return run(loop, *args)
            finally:
                self.counts["calls with preemptions"] += loop.loop.num_preemptions > before

        def noted_memory(*args: Any) -> Any:
            memory = memory_for(*args)
            self.memories.add(memory)
            return memory

        SharedLoop._end_step, SharedLoop.run = counted_end, counted_run  # type: ignore[method-assign, assignment]
        install.memory_for = noted_memory
        try:
            yield
        finally:
            SharedLoop._end_step, SharedLoop.run = end_step, run  # type: ignore[method-assign]
            install.memory_for = memory_for


class Job(Case):
    """What `Interrupter.run` interrupts."""

    def __init__(self, function: Callable[[], None]) -> None:
        self.run = function  # type: ignore[method-assign]


class Hang(Exception):
    """The threads of a mix did not come to their end: nothing can be said of what follows."""


def run_mix(mix: Mix, observer: Observer, interrupter: Interrupter | None = None) -> list[str]:
    """What was wrong, in words. Raises `Hang`, with the stacks of all threads."""
    model = get_model(mix.model)
    hf_paged.free(model)
    warm_up(model)
    expected = [[play(model, call, is_paged=False) for call in own] for own in mix.calls]
    before = model_state(model)
    found: list[list[Outcome]] = [[] for _ in mix.calls]
    barrier = threading.Barrier(len(mix.calls))

    def work(thread: int) -> None:
        barrier.wait(HANG_SECONDS)
        for index, call in enumerate(mix.calls[thread]):
            around = None
            if interrupter is not None and (thread, index) == (0, mix.interrupted):
                delay = mix.delay * expected[thread][index].seconds
                around = functools.partial(interrupt, interrupter, delay)
            time.sleep(call.pause)
            found[thread].append(play(model, call, is_paged=True, around=around))

    first = int(mix.in_main)
    threads = [threading.Thread(target=work, args=(each,), daemon=True) for each in range(first, len(mix.calls))]
    clock = threading.Timer(HANG_SECONDS + 10, exit_hung, (mix,))
    clock.daemon = True
    clock.start()
    deadline = time.monotonic() + HANG_SECONDS
    for thread in threads:
        thread.start()
    if mix.in_main:
        work(0)
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    clock.cancel()
    if any(thread.is_alive() for thread in threads):
        raise Hang(f"{stacks()}\n{mix}")
    wrong: list[str] = []
    for thread, (calls, plain, paged) in enumerate(zip(mix.calls, expected, found)):
        if len(paged) != len(calls):
            wrong.append(f"thread {thread} ended after {len(paged)} of {len(calls)} calls")
        for index, (call, one, other) in enumerate(zip(calls, plain, paged)):
            is_interrupted = (thread, index) == (0, mix.interrupted)
            how, problem = compare(call, one, other, mix.may_run_out, is_interrupted)
            observer.counts["calls"] += 1
            observer.counts[how] += 1
            if problem:
                wrong.append(f"{call}: {problem}")
    del expected, found, paged, plain, one, other
    if (state := model_state(model)) != before:
        wrong.append(f"the model was {before} and is {state}")
    wrong += after_mix(model, observer)
    return wrong


def after_mix(model: PreTrainedModel, observer: Observer) -> list[str]:
    wrong = []
    left = {key: shared for loops in shared_loop._loops.values() for key, shared in loops.items()}
    if left:
        wrong.append(f"loops are left: {left}")
    if hf_paged.memory_stats(model).used_blocks:
        gc.collect()  # a returned cache may sit in a reference cycle
    if used := hf_paged.memory_stats(model).used_blocks:
        wrong.append(f"{used} blocks are in use after all calls")
    try:
        hf_paged.check_integrity(model)
        for memory in list(observer.memories):
            memory.check_integrity()
            if memory.num_used:
                wrong.append(f"{memory.num_used} blocks are in use in another memory of the model")
    except AssertionError:
        wrong.append(traceback.format_exc())
    return wrong


def warm_up(model: PreTrainedModel) -> None:
    """The first call checks how the model can be run, with a few forwards."""
    ids = models.token_ids(1, 3)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, **models.PAGED)


def interrupt(interrupter: Interrupter, delay: float, function: Callable[[], None]) -> None:
    if interrupter.run(Job(function), delay):
        raise KeyboardInterrupt


def stacks() -> str:
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


def exit_hung(mix: Mix) -> None:
    """The main thread itself hangs."""
    print(f"HANGS: {mix}\n{stacks()}", file=sys.stderr, flush=True)
    os._exit(1)


def run_mixes(numbers: range, seed: int, report: Callable[[str], None] = print) -> int:
    """Plays them; returns how many went wrong."""
    failed, interrupts = 0, 0
    observer = Observer()
    with observer.installed(), Interrupter() as interrupter:
        for number in numbers:
            mix = draw(seed, number)
            interrupts += mix.interrupted is not None
            where = f"python -m tests.support.threads --seed {seed} --only {number} --repeat 20"
            try:
                wrong = run_mix(mix, observer, interrupter)
            except Hang as hang:
                report(f"mix {number} HANGS: {where}\n{hang}")
                os._exit(1)
            if wrong:
                failed += 1
                report("\n".join([f"mix {number} ({mix.model}) FAILED: {where}", *wrong]))
                hf_paged.free(get_model(mix.model))
                observer.memories.clear()
                shared_loop._loops.clear()
    counts = observer.counts
    report(", ".join(f"{name}: {counts[name]}" for name in sorted(counts)))
    report(f"{len(numbers)} mixes, {counts['calls']} calls, {interrupts} interrupts, {failed} wrong")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mixes", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="MIX", help="this mix alone")
    parser.add_argument("--repeat", type=int, default=1, help="play each that often: threads differ in their timing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    only = arguments.only
    numbers = range(arguments.mixes) if only is None else range(only, only + 1)
    failed = sum(run_mixes(numbers, arguments.seed) for _ in range(arguments.repeat))
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
