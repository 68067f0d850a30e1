"""Inputs of `tests.support.threads`: seeded mixes of `generate` calls, and user code."""

from __future__ import annotations

import dataclasses
import functools
import random
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from transformers import LogitsProcessorList, PreTrainedModel, StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer

from tests.support import models
from tests.support.forwards import fresh
from tests.support.models import Options
from tests.support.user_code import Criterion, OwnError, Processor

NUM_THREADS = 4
BLOCK_SIZE = 8
ENDS = list(range(30, 42))
POISON = models.BOS  # a token outside of all checks

# how often a model is drawn, and the layer groups in which a row takes blocks, plus one for its
# state slot
MODELS = {
    "llama": (6, 1),
    "gemma3": (3, 2),
    "diff_llama": (2, 1),
    "DeepseekV3ForCausalLM": (2, 1),
    "Qwen3NextForCausalLM": (2, 2),
    "BambaForCausalLM": (2, 2),
}


class ForwardError(RuntimeError):
    """Raised by a forward that computes `POISON`."""


class Embedding(nn.Embedding):
    def forward(self, input: Tensor) -> Tensor:
        if bool((input == POISON).any()):
            raise ForwardError("the poison is among the tokens")
        return super().forward(input)


@functools.cache
def get_model(name: str) -> PreTrainedModel:
    model: Any = models.build(name) if name in models.CONFIGS else fresh(name)
    plain = model.get_input_embeddings()
    plain.__class__ = type("Embedding", (Embedding, type(plain)), {})
    with torch.no_grad():
        model.get_output_embeddings().weight[POISON] = 0.0  # never among the best tokens
    return model


@dataclasses.dataclass(frozen=True)
class Call:
    """One `generate` call; `owner` tells its exceptions from other calls'."""

    owner: str
    texts: tuple[tuple[int, int], ...]  # per row: index of a text, and the number of its tokens
    options: Options
    cache_config: Options
    processor: tuple[str, int] | None  # kind and step
    criterion: tuple[str, int] | None
    streamer: tuple[str, int] | None  # kind and token
    is_autocast: bool
    is_inference: bool
    is_poisoned: bool  # its first prompt cannot be computed
    seed: int  # of samples
    pause: float  # seconds before the call

    def num_needed(self, num_groups: int) -> int:
        """Blocks that suffice for any of its prompts to run to its end."""
        longest = max(length for _, length in self.texts) + self.options["max_new_tokens"]
        rows = max(self.options.get("num_beams", 1), self.options.get("num_return_sequences", 1))
        return rows * num_groups * (longest // BLOCK_SIZE + 1)


@dataclasses.dataclass(frozen=True)
class Mix:
    model: str
    calls: tuple[tuple[Call, ...], ...]  # of each thread
    in_main: bool  # the first thread is the main thread
    interrupted: int | None  # index of the interrupted call
    delay: float  # of the interrupt, as a multiple of the call's time alone
    switch_seconds: float = 0.005  # `sys.setswitchinterval`

    @property
    def may_run_out(self) -> bool:
        """Whether a call may keep blocks that it cannot give up: ended rows of a returned cache."""
        calls = [call for own in self.calls for call in own]
        keeps = any(call.options.get("return_dict_in_generate") for call in calls)
        return keeps and "num_blocks" in calls[0].cache_config


def draw(seed: int, number: int) -> Mix:
    rng = random.Random(f"{seed}/{number}")
    [model] = rng.choices(list(MODELS), [weight for weight, _ in MODELS.values()])
    common: Options = {"block_size": BLOCK_SIZE, "prefix_caching": rng.random() < 0.5}
    if rng.random() < 0.3:
        common["preemption"] = rng.choice(["recompute", "swap"])
    if rng.random() < 0.2:
        common["max_num_batched_tokens"] = rng.choice([16, 40])
    is_plain = rng.random() < 0.5  # all calls can share forwards, and none keeps blocks
    has_budget = rng.random() < 0.5
    sampler = None if has_budget or rng.random() < 0.5 else rng.randrange(NUM_THREADS)
    poisoned = rng.randrange(NUM_THREADS) if rng.random() < 0.15 else None
    calls: list[list[Call]] = []
    for thread in range(NUM_THREADS):
        count = rng.randint(1, 3)
        samples = rng.randrange(count) if thread == sampler else None
        own = [
            draw_call(rng, f"{thread}/{index}", common, is_plain, samples == index)
            for index in range(count)
        ]
        if sampler is not None:
            # the check of how the model can run, repeated for another dtype, restores torch's
            # random state, even if another thread has drawn meanwhile
            own = [replace(call, is_autocast=False) for call in own]
        if thread == poisoned:
            own[0] = replace(own[0], is_poisoned=True)
        calls.append(own)
    if has_budget:
        needed = max(call.num_needed(MODELS[model][1]) for own in calls for call in own)
        common = {"num_blocks": round(needed * rng.uniform(1.0, 1.5))}
        for own in calls:
            own[:] = [replace(call, cache_config=call.cache_config | common) for call in own]
    in_main = rng.random() < 0.5
    interrupted = rng.randrange(len(calls[0])) if in_main and rng.random() < 0.7 else None
    delay = rng.uniform(0, 5) if rng.random() < 0.7 else 10 ** rng.uniform(-3, 0)
    switch_seconds = rng.choice([0.005, 5e-4, 2e-5])
    return Mix(model, tuple(map(tuple, calls)), in_main, interrupted, delay, switch_seconds)


def draw_call(
    rng: random.Random, owner: str, common: Options, is_plain: bool, samples: bool
) -> Call:
    lengths, num_rows = [1, 5, 9, 17, 30, 47], rng.choice([1, 1, 2, 3, 4])
    texts = [(rng.randrange(3), rng.choice(lengths)) for _ in range(num_rows)]
    new_tokens = rng.choice([1, 5, 10, 16, 24])
    mode = "sampled" if samples else rng.choices(["greedy", "returned", "beams"], [7, 0.3, 3])[0]
    options: Options = {"max_new_tokens": new_tokens, "do_sample": mode == "sampled"}
    if mode == "beams":
        options["num_beams"] = rng.choice([2, 3])
    if mode == "returned" or (mode != "greedy" and rng.random() < 0.5):
        options["num_return_sequences"] = 2  # greedy search refuses this
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
    rest = has_autocast, has_inference, False, rng.randrange(1000), pause
    return Call(owner, tuple(texts), options, config, processor, criterion, streamer, *rest)


# -------------------------------------------------------------------------------- code of callers


class Streamer(BaseStreamer):
    """Notes what it is told, with kinds as in `tests.support.user_code`."""

    def __init__(self, kind: str, at: int, owner: str) -> None:
        self.kind, self.at, self.owner = kind, at, owner
        self.told: list[Any] = []

    def put(self, value: Tensor) -> None:
        if len(self.told) == self.at:
            if self.kind == "raises":
                raise OwnError(self.owner)
            if self.kind == "slow":
                time.sleep(0.02 + 0.03 * (self.at % 2))
        self.told.append(value.tolist())

    def end(self) -> None:
        self.told.append("end")


@dataclasses.dataclass
class Outcome:
    tokens: Tensor | None = None
    error: BaseException | None = None
    told: Any = None  # tokens passed to streamers
    # passed to a processor
    shown: list[tuple[Tensor, Tensor, bool]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        if self.error is None:
            return f"tokens {None if self.tokens is None else self.tokens.tolist()}"
        return "".join(traceback.format_exception(self.error))


def play(
    model: PreTrainedModel, call: Call, is_paged: bool, around: Callable[..., Any] | None = None
) -> Outcome:
    """Runs a call. `around` runs a function, and may interrupt it."""
    rows = [
        models.token_ids(1, 60, seed=text)[0, :length].clamp(20, 99).tolist()
        for text, length in call.texts
    ]
    if call.is_poisoned:
        rows[0][-1] = POISON
    inputs = models.left_padded(rows)
    arguments: Options = dict(call.options)
    outcome = Outcome()
    processor = streamer = None
    if call.processor is not None:
        processor = Processor(*call.processor, call.owner, is_paged)
        arguments["logits_processor"] = LogitsProcessorList([processor])
    if call.criterion is not None:
        criterion = Criterion(*call.criterion, call.owner)
        arguments["stopping_criteria"] = StoppingCriteriaList([criterion])
    if call.streamer is not None:
        streamers = [Streamer(*call.streamer, call.owner) for _ in rows]
        if call.streamer[0] != "by row":
            streamer = arguments["streamer"] = streamers[0]
        elif is_paged:  # transformers has no per-row streamers
            streamer = arguments["streamer"] = streamers
    if is_paged:
        arguments |= {"cache_implementation": "paged", "cache_config": call.cache_config}

    def generate() -> None:
        found = model.generate(**inputs, **arguments)
        outcome.tokens = found if isinstance(found, Tensor) else found.sequences

    start = time.perf_counter()
    if call.options["do_sample"]:
        torch.manual_seed(call.seed)
    autocast = torch.autocast("cpu", dtype=torch.bfloat16)
    try:
        with torch.inference_mode() if call.is_inference else nullcontext():
            with autocast if call.is_autocast else nullcontext():
                # an interrupt while torch's contexts are entered or left breaks them
                (around or (lambda function: function()))(generate)
    except BaseException as error:
        outcome.error, outcome.tokens = error, None
    outcome.seconds = time.perf_counter() - start
    outcome.shown = [] if processor is None else processor.shown
    if streamer is not None:
        is_by_row = isinstance(streamer, list)
        outcome.told = [each.told for each in streamer] if is_by_row else streamer.told
    return outcome
