"""Random users of an engine: its configurations, a bounded catalogue of requests with plain's
tokens, and what must come back."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import random
from typing import Any

from transformers import LogitsProcessor

from hf_paged import OutOfBlocksError, PagedConfig, PagedEngine, RequestOutput, RequestResult
from tests.support import models
from tests.support.engine_helpers import MANY_ENDS, assert_same_as_lone, lone_run, prompts
from tests.support.models import Options, Rows
from tests.support.peft_models import ADAPTERS, active, lora_model
from tests.support.user_code import Processor


@dataclasses.dataclass(frozen=True)
class Kind:
    model: str  # its name in `models.CONFIGS`
    layers: Options  # as few as show what it is: most of a step is overhead
    # blocks for the largest requests of the catalogue, and for a few at a time
    budget: tuple[int, int]
    config: Options = dataclasses.field(default_factory=dict)  # of the engine's memory
    # whether tokens are plain's; else those of a request alone with the same options
    is_exact: bool = True
    has_adapters: bool = True  # what its requests can have, as the next
    has_drafts: bool = True
    is_packed: bool = True  # how its rows run


# else rounding to codes would depend on the batch
_INVARIANT_INT8 = {"kv_dtype": "int8", "batch_invariant": True}
_WIDE = {"num_hidden_layers": 1, "head_dim": 128}  # 16 tokens of a head fill a page
_NO_DRAFTS = {"has_adapters": False, "has_drafts": False, "is_packed": False}
KINDS: dict[str, Kind] = {
    "llama": Kind("llama", {"num_hidden_layers": 1}, (10, 30)),
    "gemma3": Kind(
        "gemma3",
        {"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]},
        (16, 36),
    ),
    "mistral": Kind("mistral", {"num_hidden_layers": 1}, (7, 16)),
    "int8": Kind(
        *("llama", {"num_hidden_layers": 1}, (10, 30), _INVARIANT_INT8),
        **dict(is_exact=False, has_adapters=False),
    ),
    "virtual": Kind("llama", _WIDE, (10, 30), {"storage": "virtual"}),
    "hybrid": Kind("qwen3_next", {}, (14, 36), has_adapters=False, is_packed=False),
    "t5": Kind("t5", {"num_layers": 1}, (16, 36), **_NO_DRAFTS),
    "bart": Kind("bart", {"encoder_layers": 1, "decoder_layers": 1}, (16, 36), **_NO_DRAFTS),
}
MAX_STEPS = 100_000  # until all requests have ended; many times what they take
MAX_PROMPT = 40  # tokens
TIER_BYTES = 400_000  # of files: fewer than a run evicts
CATALOGUE = 120  # requests per kind, each with the adapters drawn for it


@dataclasses.dataclass(frozen=True)
class Run:
    """One engine, or two on one model, under load."""

    seed: int
    number: int
    name: str  # the kind of model and memory
    lora: bool  # there are two adapters, and requests for each of them and for none
    config: PagedConfig
    in_flight: int  # most unfinished requests
    num_engines: int = 1  # that take turns
    # a stand-in for device graphs is used, so that steps are also launched ahead
    captured: bool = False
    tier: bool = False  # evicted prefix blocks go to a folder
    assisted: bool = False  # some have an assistant, or look drafts up in their prompts


def draw_run(seed: int, number: int) -> Run:
    """Draws a run from its number alone. Kinds, preemption methods and adapters rotate, so that few
    runs cover them all."""
    draw = random.Random(f"run {seed} {number}")
    name = list(KINDS)[number % len(KINDS)]
    kind = KINDS[name]
    least, most = kind.budget
    size = 16 if draw.random() < 0.15 or "storage" in kind.config else 8
    max_num_seqs = draw.choice([1, 4, 8, *13 * [256]])
    # with few sequences, only a small pool causes contention
    most = draw.randint(least, most) if max_num_seqs > 8 else least
    num_blocks = draw.choice([least, most, most])
    config = PagedConfig(
        **kind.config,
        speculation="ngram" if kind.has_drafts and draw.random() < 0.25 else None,
        block_size=size,
        num_blocks=max(num_blocks * 8 // size, 4),
        prefix_caching=draw.random() < 0.8,
        max_num_batched_tokens=draw.choice([5, 17, 40, 40, 2048, 2048]),
        max_chunk_tokens=draw.choice([None, None, 4, 11]),
        max_num_seqs=max_num_seqs,
        preemption=("recompute", "swap")[number // len(KINDS) % 2],
    )
    return Run(
        seed,
        number,
        name,
        lora=kind.has_adapters and number % 5 != 4,
        config=config,
        in_flight=draw.choice([12, 16, 24]),
        num_engines=2 if draw.random() < 0.15 else 1,
        captured=draw.random() < 0.15 and kind.is_packed,
        tier=config.prefix_caching and draw.random() < 0.4,
        assisted=kind.has_drafts and draw.random() < 0.3,
    )


# ---------------------------------------------------------------------------------- the catalogue


@dataclasses.dataclass(frozen=True)
class Wanted:
    """A request, and the new tokens of plain `generate` on it alone."""

    prompt: list[int]
    options: Options
    adapter: str | None
    seed: int
    has_processor: bool
    rows: Rows
    fault: type[BaseException] | None = None  # an error of its own code that it may end with

    @property
    def is_beams(self) -> bool:
        """Whether its tokens are settled only at the end."""
        return self.options.get("num_beams", 1) > 1

    @property
    def is_greedy(self) -> bool:
        """Whether drafts change none of its tokens."""
        return not self.is_beams and not self.options["do_sample"]

    @property
    def processors(self) -> list[LogitsProcessor] | None:
        """New instances of its custom processors."""
        return [Processor("no repeats")] if self.has_processor else None

    @property
    def given(self) -> Options:
        """What an engine gets beside prompt and options."""
        return {"seed": self.seed, "adapter": self.adapter, "logits_processor": self.processors}


def draw_options(draw: random.Random, longest: int) -> Options:
    """Arguments for plain `generate`; `longest`: most new tokens."""
    few, many = draw.randint(1, longest // 4), draw.randint(longest * 3 // 8, longest)
    options: Options = {
        "do_sample": False,
        "max_new_tokens": draw.choice([few, *3 * [many]]),
    }
    kinds = "greedy greedy sample sample samples samples beams beams beam_sample"
    kind = draw.choice(kinds.split())
    if kind in ("sample", "samples", "beam_sample"):
        warped = {"temperature": 1.3, "top_k": 30, "top_p": 0.9}
        options |= {"do_sample": True, **draw.choice([{}, warped, {"top_k": 0, "min_p": 0.02}])}
    if kind == "samples":
        options["num_return_sequences"] = draw.randint(2, 4)
    if kind in ("beams", "beam_sample"):
        beams = draw.randint(2, 4)
        options |= {"num_beams": beams, "num_return_sequences": draw.randint(1, beams)}
        options["early_stopping"] = draw.choice([True, False])
        options["length_penalty"] = draw.choice([0.7, 1.0])
    if kind == "beam_sample":  # as many candidates as transformers draws
        options |= {"top_k": 0, "top_p": 1.0, "eos_token_id": MANY_ENDS[:3]}
    elif draw.random() < 0.5:
        options["eos_token_id"] = draw.choice([MANY_ENDS, MANY_ENDS[:4], MANY_ENDS[3]])
    if "eos_token_id" in options and draw.random() < 0.3:
        options["min_new_tokens"] = min(options["max_new_tokens"], draw.randint(2, 9))
    if draw.random() < 0.2:
        options |= {"repetition_penalty": 1.4, "no_repeat_ngram_size": 2}
    if draw.random() < 0.2:
        options["bad_words_ids"] = [[7], [9, 11]]
    if draw.random() < 0.25:  # two letters often span two tokens
        options["stop_strings"] = draw.choice([["ba", "te", "n d"], ["la", "so", "ku", "ri"]])
        if kind not in ("greedy", "sample"):
            # rows that ended without a match continue until all have ended
            options.setdefault("eos_token_id", MANY_ENDS[:4])
    return options


def draw_prompt(draw: random.Random, known: list[Wanted]) -> list[int]:
    """A prompt: random, or with a shared prefix, or with an earlier request and its answer as
    prefix."""
    tail = prompts(draw.randint(1, 12), seed=draw.randrange(30))[0]
    kind = draw.random()
    if kind < 0.6:
        return tail
    if kind < 0.9 or not known:
        return (prompts(16, 24, seed=7)[draw.randrange(2)] + tail)[:MAX_PROMPT]
    first = draw.choice(known)
    turn = [token for token in first.prompt + first.rows[0] if token != models.PAD]
    return (turn + tail)[:MAX_PROMPT]


@functools.cache
def catalogue(
    seed: int, name: str, lora: bool, count: int = CATALOGUE, longest: int = 32
) -> list[Wanted]:
    """Requests of at most `longest` new tokens, with these tokens alone, by a separate model."""
    draw = random.Random(f"catalogue {seed} {name} {lora}")
    model = build(name, lora)
    found: list[Wanted] = []
    while len(found) < count:
        prompt, options = draw_prompt(draw, found), draw_options(draw, longest)
        seed = draw.randrange(100)
        has_processor = draw.random() < 0.05
        # often one prompt for several adapters, which must not share blocks
        names = [*ADAPTERS, None] if draw.random() < 0.2 else ADAPTERS
        adapters = draw.sample(names, draw.randint(1, 3)) if lora else [None]
        for adapter in adapters:
            wanted = Wanted(prompt, options, adapter, seed, has_processor, [])
            arguments = {} if KINDS[name].is_exact else paged(name)
            wanted.rows.extend(plain(model, wanted, **arguments))
            found.append(wanted)
    return found


def build(name: str, lora: bool) -> Any:
    """A new model; the same weights every time."""
    model = models.build(KINDS[name].model, **KINDS[name].layers)
    return lora_model(model, target_modules=["q_proj", "v_proj"]) if lora else model


def build_assistant(name: str) -> Any:
    """A model that drafts: one of this kind with other weights, or, as states cannot go back there,
    a Llama."""
    return models.with_noise(build(name if KINDS[name].is_packed else "llama", False))


def paged(name: str) -> Options:
    """Arguments of a paged `generate` call in memory of this kind."""
    config = {"block_size": models.BLOCK_SIZE, **KINDS[name].config}
    return {"cache_implementation": "paged", "cache_config": config}


def plain(model: Any, wanted: Wanted, **arguments: Any) -> Rows:
    """New tokens of `generate` on this request alone."""
    arguments |= {"tokenizer": models.tokenizer()} if "stop_strings" in wanted.options else {}
    arguments |= {"logits_processor": wanted.processors} if wanted.has_processor else {}
    with active(model, wanted.adapter) if wanted.adapter else contextlib.nullcontext():
        return lone_run(model, wanted.prompt, wanted.options, wanted.seed, **arguments)


# ------------------------------------------------------------------------------ what must come back


class Difference(AssertionError):
    """A request did not get plain's tokens."""


class User:
    """The user of an engine, who compares what comes back."""

    def __init__(self, kind: str, engine: PagedEngine, seen: collections.Counter[str]) -> None:
        self.kind, self.engine = kind, engine
        self.seen = seen  # counts of events
        self.open: dict[str, Wanted] = {}  # unfinished requests
        self.streamed: dict[str, dict[int, list[int]]] = {}
        self.cancelled: set[str] = set()
        self.num_steps = self.num_requests = 0

    def add(self, wanted: Wanted, request_id: str = "", **options: Any) -> bool:
        """Adds a request, unless it can never fit."""
        request_id = request_id or f"r{self.num_requests}"
        given = wanted.options | options.pop("lookup", {})
        options = {"request_id": request_id, **wanted.given, **options}
        try:
            self.engine.add_request(wanted.prompt, given, **options)
        except OutOfBlocksError:  # raised at once, final
            assert self.engine.config.num_blocks is not None
            self.seen["too large"] += 1
            return False
        self.num_requests += 1
        self.open[request_id], self.streamed[request_id] = wanted, {}
        return True

    def step(self) -> None:
        for output in self.engine.step():
            self.read(output)
        self.num_steps += 1
        self.seen["steps"] += 1

    def drain(self) -> None:
        for _ in range(MAX_STEPS):
            if not self.engine.has_unfinished:
                break
            self.step()
        assert not self.open, f"no result of {sorted(self.open)}"

    def cancel(self, request_id: str) -> None:
        self.engine.cancel(request_id)
        self.cancelled.add(request_id)

    def free(self) -> None:
        self.engine.free()
        self.cancelled |= set(self.open)
        self.seen["engines freed"] += 1

    def generate(self, model: Any, wanted: Wanted) -> None:
        """A `generate` call on the engine's model, with blocks of its own."""
        rows = plain(model, wanted, **paged(self.kind))
        self.seen["calls"] += 1
        if rows != wanted.rows:
            raise Difference(f"`generate` of {wanted}: {rows}")

    def read(self, output: RequestOutput) -> None:
        """Compares new tokens with plain's, and the result once it is complete."""
        request_id, result = output.request_id, output.result
        wanted, streamed = self.open[request_id], self.streamed[request_id]
        for row, token in output.new_tokens.items():
            streamed.setdefault(row, []).append(token)
        for row, tokens in streamed.items():
            if tokens != wanted.rows[row][: len(tokens)]:
                raise Difference(f"request {request_id}: streamed {tokens} of {wanted}")
        if result is not None:
            del self.open[request_id], self.streamed[request_id]
            self._note(wanted, result)
            try:
                self._check(request_id, wanted, streamed, result)
            except AssertionError as error:
                raise Difference(str(error)) from result.error

    def _check(
        self, request_id: str, wanted: Wanted, streamed: dict[int, list[int]], result: RequestResult
    ) -> None:
        what, rows = f"request {request_id}, {wanted}", [x.token_ids for x in result.sequences]
        if not wanted.is_beams:
            tokens = {row: row_tokens for row, row_tokens in enumerate(rows) if row_tokens}
            assert streamed == tokens, f"{what}: streamed {streamed}, result {tokens}"
        if wanted.fault is not None and isinstance(result.error, wanted.fault):
            self.seen["own code raised"] += 1
        elif request_id in self.cancelled:
            self.cancelled.remove(request_id)
            self.seen["cancelled"] += 1
            self.seen["cancelled after a preemption"] += bool(result.num_preemptions)
            assert result.error is None, f"{what}: {result.error!r}"
            starts = [row[: len(tokens)] for row, tokens in zip(wanted.rows, rows)]
            assert starts == rows, f"cancelled {what}: {rows}"
        else:
            assert_same_as_lone(wanted.rows, result, wanted.options, what)
            self.seen["finished"] += 1

    def _note(self, wanted: Wanted, result: RequestResult) -> None:
        reasons = {sequence.finish_reason for sequence in result.sequences}
        is_beams, num_preemptions = wanted.is_beams, result.num_preemptions
        counts = {
            "results": 1,
            "beams": is_beams,
            "samples": len(wanted.rows) > 1 and not is_beams,
            "preempted beams": is_beams and num_preemptions > 0,
            "stop strings": "stop_string" in reasons,
            "preemptions": num_preemptions,
            "prefix-hit tokens": result.num_prefix_hit_tokens,
            "drafts accepted": result.num_accepted_tokens,
        }
        self.seen.update(counts)
