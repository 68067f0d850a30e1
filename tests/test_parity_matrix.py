"""`generate(cache_implementation="paged")` gives plain `generate`'s result: every model, every
option.

A cell runs the same option function twice, on plain `generate` and on the paged cache, from the
same seed, and compares all results: tokens, RNG state and recorded calls exactly, scores closely. A
cell that plain refuses must be refused by paged with the same exception type; `REFUSED` names those
cells, so that a mistake in a test cannot pass for a refusal.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from packaging import version
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    GenerationConfig,
    LlamaForCausalLM,
    LogitsProcessor,
    PreTrainedModel,
    StoppingCriteria,
    TextIteratorStreamer,
)
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.utils import ModelOutput

import hf_paged
from hf_paged.rooms import RoomMissingError
from tests.support import models
from tests.support.checks import (
    assert_equal,
    assert_paged_is_plain,
    assert_pool_empty,
    assert_same_tokens,
    model_state,
    plain_run,
)

NEW_TOKENS = 12
SEED = 1
# float32 logits have a standard deviation of about 3; reordered sums differ by about 1e-5
TOLERANCE = 2e-4


@dataclasses.dataclass
class Refusal:
    error: type[BaseException]
    message: str


@dataclasses.dataclass
class Run:
    """One side of a cell: a model, and whether its K/V are in the paged pool."""

    name: str
    paged: bool
    model: PreTrainedModel

    @property
    def encoder_decoder(self) -> bool:
        return models.is_encoder_decoder(self.name)

    @property
    def backend(self) -> dict[str, Any]:
        return copy.deepcopy(models.PAGED) if self.paged else {}

    @property
    def sampling(self) -> dict[str, Any]:
        # Whisper derives do_sample from the temperature, and accepts none for greedy.
        return {"do_sample": True, **({"temperature": 1.0} if self.name == "whisper" else {})}

    def prompt(self, batch_size: int = 3, length: int = 13) -> dict[str, torch.Tensor]:
        return models.prompt(self.name, batch_size, length)

    def generate(self, inputs: Mapping[str, Any], **options: Any) -> Any:
        if "max_length" not in options:
            options.setdefault("max_new_tokens", NEW_TOKENS)
        return self.model.generate(**inputs, **self.backend, **options)

    def new_cache(self) -> Cache:
        """An empty cache to pass as `past_key_values`."""
        config = self.model.config.get_text_config(decoder=True)

        def single() -> Cache:
            return hf_paged.PagedCache(config) if self.paged else DynamicCache(config=config)

        return EncoderDecoderCache(single(), single()) if self.encoder_decoder else single()

    def assistant(self) -> PreTrainedModel:
        """A fresh assistant: assisted decoding changes numbers in its generation config."""
        assistant = models.get_assistant(self.name)
        assistant.generation_config = copy.deepcopy(self.model.generation_config)
        return assistant


@functools.cache
def greedy_tokens(name: str) -> list[list[int]]:
    """Plain greedy output for the standard prompt, without the prompt, `[3, NEW_TOKENS]`."""
    run = Run(name, paged=False, model=models.get(name))
    return run.generate(run.prompt(), do_sample=False)[:, -NEW_TOKENS:].tolist()


@functools.cache
def end_tokens(name: str) -> tuple[int, int]:
    """Two EOS ids at which the rows of the standard prompt end at different lengths under
    greedy."""
    tokens = greedy_tokens(name)

    def length(row: list[int], ends: tuple[int, int]) -> int:
        return next((step for step, token in enumerate(row) if token in ends), NEW_TOKENS)

    pairs = [(a, b) for a in tokens[0][2:7] for b in tokens[1][2:10] + tokens[2][2:10]]

    def quality(ends: tuple[int, int]) -> tuple[int, int]:
        lengths = [length(row, ends) for row in tokens]
        return len(set(lengths)), min(lengths)

    best = max(pairs, key=quality)
    assert quality(best)[0] >= 2, f"{name}: no pair of tokens ends the rows apart: {tokens}"
    return best


# Each token is one of these with a probability of about one in eight, so most samples and beams end
# before the limit.
FREQUENT_ENDS = list(range(20, 36))


ALL = (*models.NAMES, *models.HYBRID)
Option = Callable[[Run], Any]
Inputs = Callable[[Run], dict[str, torch.Tensor]]
OPTIONS: dict[str, Option] = {}


def option(function: Option) -> Option:
    OPTIONS[function.__name__] = function
    return function


class RowBudgets(StoppingCriteria):
    """Stops row `i` after `3 + i % 5` tokens, or after a token of a set; records which rows are
    done."""

    def __init__(self) -> None:
        self.done: torch.Tensor | None = None
        self.start = 0
        self.seen: list[tuple[int, ...]] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        rows, length = input_ids.shape
        if self.done is None:
            self.done, self.start = torch.zeros(rows, dtype=torch.bool), length
        assert len(self.done) == rows, f"the batch changed from {len(self.done)} to {rows} rows"
        self.seen.append(tuple(input_ids.shape))
        budget = 3 + torch.arange(rows) % 5
        self.done = self.done | (length - self.start >= budget) | (input_ids[:, -1] % 11 == 0)
        return self.done.clone()


class Allowed:
    """`prefix_allowed_tokens_fn` whose answer depends on the row and on its last token; records its
    calls."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, list[int]]] = []

    def __call__(self, batch_id: int, input_ids: torch.Tensor) -> list[int]:
        self.seen.append((batch_id, input_ids.tolist()))
        words = models.VOCAB_SIZE - models.FIRST_WORD
        start = 7 * int(input_ids[-1]) + 5 * batch_id
        return [models.FIRST_WORD + (start + k) % words for k in range(6)]


class RowBias(LogitsProcessor):
    """Adds a bias that depends on the row and the step; checks and records the batch."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(7)
        self.bias = 2 * torch.randn(5, models.VOCAB_SIZE, generator=generator)
        self.seen: list[torch.Tensor] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        assert scores.shape == (input_ids.shape[0], models.VOCAB_SIZE)
        if self.seen:
            rows, length = self.seen[-1].shape
            assert input_ids.shape == (rows, length + 1)
        self.seen.append(input_ids.clone())
        rows = (torch.arange(input_ids.shape[0]) + input_ids.shape[1]) % len(self.bias)
        return scores + self.bias[rows]


class Recorder(BaseStreamer):
    """Records every call of a streamer, in order."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def put(self, value: torch.Tensor) -> None:
        self.seen.append((tuple(value.shape), value.tolist()))

    def end(self) -> None:
        self.seen.append("end")


WATCHERS: dict[str, Callable[[], Any]] = {
    "logits_processor": RowBias,
    "prefix_allowed_tokens_fn": Allowed,
    "stopping_criteria": RowBudgets,
    "streamer": Recorder,
}
"""Code of callers by the argument that takes it; what it has `seen` is compared, too."""


def call(
    inputs: Inputs = Run.prompt, draws: bool = False, watcher: str = "", **arguments: Any
) -> Option:
    """An option that is one call of `generate`, which draws samples or not. Arguments that are
    functions give the value for a run."""

    def function(run: Run) -> Any:
        given = run.sampling if draws else {"do_sample": False}
        for name, value in arguments.items():
            given[name] = value(run) if callable(value) else copy.deepcopy(value)
        if not watcher:
            return run.generate(inputs(run), **given)
        watching = WATCHERS[watcher]()
        is_listed = watcher in ("logits_processor", "stopping_criteria")
        given[watcher] = [watching] if is_listed else watching
        return run.generate(inputs(run), **given), watching.seen

    return function


def each_of(*options: Option) -> Option:
    return lambda run: [option(run) for option in options]


def rows(batch_size: int, length: int = 13) -> Inputs:
    return lambda run: run.prompt(batch_size, length)


def padded(run: Run) -> dict[str, torch.Tensor]:
    return models.padded_prompt(run.name)


def padded_to(*lengths: int) -> Inputs:
    return lambda run: models.padded_prompt(run.name, lengths)


def one_padded_row(run: Run) -> dict[str, torch.Tensor]:
    return {key: value[1:2] for key, value in padded(run).items()}


def repetitive(run: Run) -> dict[str, torch.Tensor]:
    inputs = run.prompt(1, 40)
    if "input_ids" in inputs:
        inputs["input_ids"] = 4 + inputs["input_ids"] % 4
    return inputs


def embedded(inputs: Inputs, has_ids: bool = False) -> Inputs:
    """The embeddings of the token ids, in place of these or beside them."""

    def made(run: Run) -> dict[str, torch.Tensor]:
        given = inputs(run)
        ids = given["input_ids"] if has_ids else given.pop("input_ids")
        return {"inputs_embeds": run.model.get_input_embeddings()(ids).detach(), **given}

    return made


def with_decoder_prompt(run: Run) -> dict[str, torch.Tensor]:
    """A ragged decoder prompt with an encoder input without padding."""
    ids = models.token_ids(3, 11, seed=5)
    mask = torch.ones_like(ids)
    mask[1, :6] = 0
    ids = ids.masked_fill(mask == 0, models.PAD)
    return {**run.prompt(), "decoder_input_ids": ids, "decoder_attention_mask": mask}


def encoded(run: Run) -> dict[str, Any]:
    inputs = run.prompt()
    with torch.no_grad():
        outputs = run.model.get_encoder()(**inputs)
    rest = {"attention_mask": inputs["attention_mask"]} if "attention_mask" in inputs else {}
    return {"encoder_outputs": outputs, **rest}


def two_ends(run: Run) -> list[int]:
    return list(end_tokens(run.name))


def length_of_nine_more(run: Run) -> int:
    return models.prompt_width(run.name, run.prompt()) + 9


def stops(run: Run) -> list[str]:
    """A token of the first row's text, and a string that starts and ends inside two tokens of the
    second row's."""
    first, second, _ = greedy_tokens(run.name)
    decode = models.tokenizer().decode
    return [decode(first[2:3]), decode(second[3:5])[1:]]


ENDS = {"eos_token_id": FREQUENT_ENDS}
# Prompts and text of few words, so that n-grams repeat and some drafts are accepted.
FEW_WORDS = {"suppress_tokens": [0, *range(8, models.VOCAB_SIZE)], "max_new_tokens": 20}
LOOKUP = {"prompt_lookup_num_tokens": 3, **FEW_WORDS}
ASSISTED = {"assistant_model": Run.assistant}
STOPS = {"stop_strings": stops, "tokenizer": lambda run: models.tokenizer()}
RETURNED = {"return_dict_in_generate": True}
DICT = {**RETURNED, "output_scores": True, "output_logits": True}
STATES = {**RETURNED, "output_hidden_states": True, "output_attentions": True}
GUIDED = {"guidance_scale": 1.5}
NEGATIVE = models.token_ids(3, 6, seed=3)
EDGES = (models.BLOCK_SIZE - 1, models.BLOCK_SIZE, models.BLOCK_SIZE + 1)
EARLY = {"num_beams": 3, **ENDS}

OPTIONS |= {
    "greedy": call(),
    "greedy_one_row": call(rows(1)),
    "greedy_long": call(rows(2, 70), max_new_tokens=24),
    "greedy_block_edges": each_of(*(call(rows(1, n), max_new_tokens=9) for n in EDGES)),
    "greedy_eos_list": call(eos_token_id=two_ends),
    "sample": call(draws=True),
    "sample_eos": call(draws=True, **ENDS),
    "beams": call(num_beams=4),
    "beams_eos": call(num_beams=4, **ENDS),
    "beams_early_stopping": each_of(
        call(rows(2), **EARLY, early_stopping=True, length_penalty=0.5),
        call(rows(2), **EARLY, early_stopping="never", length_penalty=2.0),
    ),
    "beams_long": call(rows(2, 45), num_beams=4, max_new_tokens=24),
    "beam_sample": call(draws=True, num_beams=4, **ENDS),
    "return_sequences_sample": call(draws=True, num_return_sequences=3),
    "return_sequences_eos": call(rows(2), draws=True, num_return_sequences=4, **ENDS),
    "return_sequences_beams": call(num_beams=4, num_return_sequences=3),
    "prompt_lookup": call(repetitive, **LOOKUP),
    "prompt_lookup_sample": call(repetitive, draws=True, max_matching_ngram_size=1, **LOOKUP),
    "assistant_model": call(rows(1), **ASSISTED, max_new_tokens=20),
    "assistant_model_sample": call(rows(1), draws=True, **ASSISTED, max_new_tokens=20),
    "assistant_model_padded": call(one_padded_row, **ASSISTED),
    "left_padding": call(padded),
    # whole blocks of padding in front of some rows
    "left_padding_over_blocks": call(padded_to(40, 3, 17, 8)),
    "left_padding_eos": call(padded, **ENDS),
    "left_padding_sample": call(padded, draws=True),
    "left_padding_beams": call(padded, num_beams=4),
    "left_padding_return_sequences": call(padded, draws=True, num_return_sequences=3),
    "decoder_prompt": call(with_decoder_prompt),
    "encoder_outputs": call(encoded, num_beams=2),
    "stopping_criteria": call(watcher="stopping_criteria"),
    "stopping_criteria_eos": call(
        draws=True, watcher="stopping_criteria", num_return_sequences=2, **ENDS
    ),
    "stopping_criteria_beams": call(watcher="stopping_criteria", num_beams=3),
    "stop_strings": call(**STOPS),
    "stop_strings_eos": call(**STOPS, **ENDS),
    "prefix_allowed_tokens": call(watcher="prefix_allowed_tokens_fn"),
    "prefix_allowed_tokens_beams": call(watcher="prefix_allowed_tokens_fn", num_beams=3),
    "custom_processor_beams": call(
        rows(2), watcher="logits_processor", num_beams=3, num_return_sequences=2
    ),
    "custom_processor_return_sequences": call(
        rows(2), draws=True, watcher="logits_processor", num_return_sequences=3, **ENDS
    ),
    "streamer": call(rows(1), watcher="streamer"),
    "streamer_batch": call(watcher="streamer", eos_token_id=two_ends),
    "streamer_assistant": call(rows(1), watcher="streamer", **ASSISTED),
    "dict_greedy": call(eos_token_id=two_ends, **DICT),
    "dict_sample": call(
        draws=True, num_return_sequences=2, top_k=20, repetition_penalty=1.3, **ENDS, **DICT
    ),
    "dict_padded": call(padded, **ENDS, **DICT),
    "dict_beams": call(num_beams=4, num_return_sequences=2, **DICT),
    "dict_beam_sample": call(draws=True, num_beams=3, **DICT),
    "dict_assistant": call(rows(1), **ASSISTED, **DICT),
    "output_states": call(padded, **STATES),
    "output_states_beams": call(rows(2), num_beams=3, **STATES),
    # without attentions the model keeps its default attention
    "output_hidden_states": call(**RETURNED, output_hidden_states=True),
    "eager_model": call(padded, num_beams=2),
    "max_length": call(max_length=length_of_nine_more),
    "max_length_beams": call(max_length=length_of_nine_more, num_beams=3),
    # a limit that is never reached, and one that ends the call after one token
    "max_time": each_of(*(call(max_time=limit) for limit in (600.0, 1e-9))),
    "guidance_scale": call(**GUIDED),
    "guidance_scale_negative_prompt": call(
        **GUIDED,
        negative_prompt_ids=NEGATIVE,
        negative_prompt_attention_mask=torch.ones_like(NEGATIVE),
    ),
    "inputs_embeds": call(embedded(padded)),
    "inputs_embeds_beams": call(embedded(Run.prompt), num_beams=3),
    "inputs_embeds_and_ids": call(
        embedded(Run.prompt, has_ids=True), draws=True, num_return_sequences=2
    ),
    "use_cache_false": call(padded, use_cache=False),
    "use_cache_false_beams": call(use_cache=False, num_beams=3),
    "prefill_chunk_size": call(padded_to(21, 4, 13), prefill_chunk_size=5),
    "prefill_chunk_size_beams": call(rows(2, 21), prefill_chunk_size=8, num_beams=3),
}


@option
def custom_processor(run: Run) -> Any:
    """Rows that ended also stay in the batch that a processor sees, in their place."""
    output, batches = call(padded, watcher="logits_processor", **ENDS)(run)
    width = batches[0].shape[1]
    for batch in batches:
        assert torch.equal(batch[:, :width], batches[0]), "the prompt moved inside the batch"
    return output, batches


@option
def streamer_text(run: Run) -> Any:
    text = TextIteratorStreamer(models.tokenizer(), skip_prompt=True, timeout=10)
    output = run.generate(run.prompt(1), streamer=text, do_sample=False)
    return output, list(text)


@option
def custom_generate(run: Run) -> Any:
    def loop(model: PreTrainedModel, input_ids: torch.Tensor, **arguments: Any) -> Any:
        return type(model)._sample(model, input_ids, **arguments)

    return run.generate(run.prompt(), custom_generate=loop, do_sample=False)


@option
def returned_cache_continues(run: Run) -> Any:
    """The cache in a returned dict has contents, and a second call continues from it."""
    inputs = run.prompt()
    first = run.generate(inputs, do_sample=False, return_dict_in_generate=True)
    cache = first.past_key_values
    held = cache.get_seq_length()
    own = cache.self_attention_cache if run.encoder_decoder else cache
    contents = [
        (layer.keys + 0, layer.values + 0)
        for layer in own.layers
        if hasattr(layer, "keys") and not getattr(layer, "is_sliding", False)
    ]
    ids = torch.cat([first.sequences, models.token_ids(3, 4, seed=9)], dim=1)
    if run.encoder_decoder:
        rest = {**inputs, "decoder_input_ids": ids}
    else:
        rest = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    second = run.model.generate(
        **rest, past_key_values=cache, do_sample=False, max_new_tokens=NEW_TOKENS
    )
    return first.sequences, held, contents, second


@option
def passed_cache_continues(run: Run) -> Any:
    """Three turns of a conversation of ragged rows over one cache of the user."""
    inputs = models.padded_prompt(run.name)
    cache = run.new_cache()
    turns = []
    for turn in range(3):
        greedy = dict(do_sample=False, max_new_tokens=7)
        output = run.model.generate(**inputs, past_key_values=cache, **greedy)
        turns.append((output, cache.get_seq_length()))
        more = models.token_ids(3, 5, seed=20 + turn)
        ids = torch.cat([output, more], dim=1)
        if run.encoder_decoder:
            mask = inputs.get("decoder_attention_mask")
            inputs["decoder_input_ids"] = ids
            key = "decoder_attention_mask"
        else:
            mask, key = inputs["attention_mask"], "attention_mask"
            inputs["input_ids"] = ids
        if mask is not None:
            inputs[key] = torch.cat([mask, mask.new_ones(3, ids.shape[1] - mask.shape[1])], dim=1)
    return turns


@option
def passed_cache_beams(run: Run) -> Any:
    """Beams reorder a cache that the user passed."""
    cache = run.new_cache()
    beams = dict(num_beams=3, num_return_sequences=3, do_sample=False, max_new_tokens=NEW_TOKENS)
    output = run.model.generate(**run.prompt(2), past_key_values=cache, **beams)
    return output, cache.get_seq_length()


def step_inputs(run: Run, encoded: Any, tokens: torch.Tensor, cache: Cache) -> dict[str, Any]:
    given = {"past_key_values": cache, "use_cache": True}
    if run.encoder_decoder:
        return {"encoder_outputs": encoded, "decoder_input_ids": tokens, **given}
    return {"input_ids": tokens, **given}


@option
@torch.no_grad()
def token_by_token(run: Run) -> Any:
    """`model(...)` with a cache, no generate: a prompt, single tokens, then several tokens at
    once."""
    cache = run.new_cache()
    encoded = run.model.get_encoder()(**run.prompt()) if run.encoder_decoder else None
    tokens = models.token_ids(3, 13)
    logits = []
    for step in range(12):
        output = run.model(**step_inputs(run, encoded, tokens, cache))
        assert output.past_key_values is cache
        logits.append(output.logits)
        tokens = output.logits[:, -1:].argmax(-1)
        if step == 9:
            tokens = models.token_ids(3, 3, seed=step)
    return logits, cache.get_seq_length()


@option
@torch.no_grad()
def cache_operations(run: Run) -> Any:
    """Operations of beam search, assisted decoding and users on a cache between two steps."""
    cache = run.new_cache()
    encoded = run.model.get_encoder()(**run.prompt()) if run.encoder_decoder else None
    logits = []
    rows = 3

    def step(tokens: torch.Tensor) -> None:
        nonlocal encoded
        if encoded is not None and encoded.last_hidden_state.shape[0] != len(tokens):
            encoded = type(encoded)(
                last_hidden_state=encoded.last_hidden_state[:1].expand(len(tokens), -1, -1)
            )
        logits.append(run.model(**step_inputs(run, encoded, tokens, cache)).logits)

    step(models.token_ids(rows, 6))
    cache.batch_repeat_interleave(2)
    step(models.token_ids(2 * rows, 1, seed=1))
    cache.reorder_cache(torch.tensor([1, 1, 0, 5, 4, 2]))
    step(models.token_ids(2 * rows, 1, seed=2))
    cache.batch_select_indices(torch.tensor([4, 0, 3]))
    step(models.token_ids(rows, 1, seed=3))
    cache.activate_past_recording()
    step(models.token_ids(rows, 5, seed=4))
    cache.crop(-3)
    logits.append(cache.get_seq_length())
    step(models.token_ids(rows, 2, seed=5))
    if run.paged:
        cache.reset()
        assert cache.get_seq_length() == 0
    else:
        # the expected reset state (before 5.23, plain zeroes states and keeps their length)
        cache = run.new_cache()
    step(models.token_ids(2, 4, seed=6))
    return logits


BIAS = [[[17], -4.0], [[40, 41], 5.0], [[8], 3.0]]
DRAW = {"do_sample": True}
PROCESSORS: dict[str, dict[str, Any]] = {
    "repetition_penalty": {"repetition_penalty": 1.8},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "min_new_tokens": {"min_new_tokens": 8, **ENDS},
    "min_length": {"min_length": 18, **ENDS},
    "bad_words_ids": {"bad_words_ids": [[10], [42], [18, 42], [99], [83]]},
    "forced_bos_token_id": {"forced_bos_token_id": 33},
    "forced_eos_token_id": {"forced_eos_token_id": 50},
    "suppress_tokens": {"suppress_tokens": list(range(60, 110))},
    "begin_suppress_tokens": {"begin_suppress_tokens": list(range(3, 90))},
    "exponential_decay_length_penalty": {
        "exponential_decay_length_penalty": (3, 1.6),
        "eos_token_id": 50,
    },
    "sequence_bias": {"sequence_bias": BIAS},
    "remove_invalid_values": {"remove_invalid_values": True},
    "temperature": {**DRAW, "temperature": 0.6},
    "top_k": {**DRAW, "top_k": 5},
    "top_p": {**DRAW, "top_p": 0.7, "top_k": 0},
    "typical_p": {**DRAW, "typical_p": 0.6},
    "min_p": {**DRAW, "min_p": 0.1},
    "top_h": {**DRAW, "top_h": 0.5},
    "epsilon_cutoff": {**DRAW, "epsilon_cutoff": 0.02},
    "eta_cutoff": {**DRAW, "eta_cutoff": 0.02},
    "renormalize_logits": {"renormalize_logits": True, **DRAW, "top_k": 7, **DICT},
    "processors_together": {
        **dict(**DRAW, **ENDS, num_return_sequences=2, temperature=0.8, top_k=30, top_p=0.95),
        **dict(repetition_penalty=1.2, no_repeat_ngram_size=3, min_new_tokens=4),
    },
    "processors_beams": {
        **dict(**ENDS, num_beams=3, repetition_penalty=1.3, no_repeat_ngram_size=2),
        **dict(min_new_tokens=5, bad_words_ids=[[10], [18, 42]], renormalize_logits=True),
    },
}


OPTIONS |= {
    name: call(draws=given.get("do_sample", False), **given) for name, given in PROCESSORS.items()
}
TEXT = tuple(name for name in models.NAMES if name != "whisper")  # audio has no input embeddings
MODELS_OF: dict[str, Sequence[str]] = {
    **dict.fromkeys(("decoder_prompt", "encoder_outputs"), models.ENCODER_DECODER),
    **dict.fromkeys(("inputs_embeds", "inputs_embeds_beams", "inputs_embeds_and_ids"), TEXT),
    "cache_operations": models.NAMES,  # plain cannot repeat states
}
# Options whose K/V are not in the model's pool: no cache at all, or a cache of the user.
NO_POOL = {
    *("use_cache_false", "use_cache_false_beams", "token_by_token", "cache_operations"),
    *("passed_cache_continues", "passed_cache_beams"),
}
# Options that run on the model loaded with eager attention.
EAGER = {"output_states", "output_states_beams", "eager_model"}

# Options that plain `generate` refuses, determined by running it.
REFUSED = {
    ("whisper", "assistant_model_padded"),  # ValueError: a decoder prompt with an assistant
    # AttributeError: Whisper loses rows when it splits its segments
    ("whisper", "left_padding_return_sequences"),
    # ValueError: the unconditional forward gets no encoder input, or tokens for audio
    *itertools.product(("t5", "whisper"), ("guidance_scale", "guidance_scale_negative_prompt")),
    *itertools.product(("t5", "bart"), ("inputs_embeds_and_ids",)),  # ValueError: one of the two
    # TypeError: Whisper's encoder input is passed twice
    *itertools.product(("whisper",), ("prefill_chunk_size", "prefill_chunk_size_beams")),
    # RuntimeError: Whisper counts a prompt shorter than its cache
    ("whisper", "passed_cache_continues"),
    # ValueError: no assisted generation with states
    *(("qwen3_next", cell) for cell in OPTIONS if "assistant" in cell or "lookup" in cell),
}


def fails_in_older_versions(name: str, cell: str, refusal: Refusal) -> bool:
    """Before 5.23, plain fails when it rolls back its sliding-window cache (seen on 5.17)."""
    old = version.parse(transformers.__version__) < version.parse("5.23")
    rolled_back = "assistant" in cell or cell == "cache_operations"
    is_rollback = name in models.SLIDING and rolled_back
    return old and is_rollback and "must match the size of tensor" in refusal.message


def outcome(function: Option, run: Run) -> Any:
    """The option's result with the final RNG state, or its exception."""
    torch.manual_seed(SEED)
    try:
        result = function(run)
    except (AssertionError, RoomMissingError):  # an option's own check, not a refusal
        raise
    except Exception as error:
        return Refusal(type(error), str(error))
    return result, torch.get_rng_state()


def assert_same(expected: Any, actual: Any, where: str) -> None:
    """Compares integers, strings and structure exactly, floating point closely. `where` names the
    place in the message."""
    if isinstance(expected, Refusal) or isinstance(actual, Refusal):
        assert isinstance(actual, Refusal), f"{where}: plain raises {expected}, paged is served"
        assert isinstance(expected, Refusal), f"{where}: plain is served, paged raises {actual}"
        assert actual.error is expected.error, f"{where}: plain {expected}, paged {actual}"
    elif isinstance(expected, ModelOutput):
        assert_same_output(expected, actual, where)
    elif isinstance(expected, torch.Tensor):
        assert isinstance(actual, torch.Tensor), f"{where}: a tensor became {type(actual)}"
        assert_same_tensor(expected, actual, where)
    elif isinstance(expected, Cache):
        assert isinstance(actual, Cache), f"{where}: a cache became {type(actual)}"
        # 5.17 returns a 0-d tensor after assisted decoding
        lengths = int(expected.get_seq_length()), int(actual.get_seq_length())
        assert_equal(*lengths, f"{where}.get_seq_length()")
    elif isinstance(expected, (list, tuple)):
        assert_equal(type(expected), type(actual), where)
        assert_equal(len(expected), len(actual), f"{where}: items")
        for index, (left, right) in enumerate(zip(expected, actual, strict=True)):
            assert_same(left, right, f"{where}[{index}]")
    else:
        assert_equal(expected, actual, where)


def assert_same_tensor(expected: torch.Tensor, actual: torch.Tensor, where: str) -> None:
    assert_equal(expected.dtype, actual.dtype, where)
    assert_equal(expected.device, actual.device, where)
    if not expected.is_floating_point():
        assert_same_tokens(expected, actual, where)
    else:
        torch.testing.assert_close(
            actual,
            expected,
            atol=TOLERANCE,
            rtol=TOLERANCE,
            equal_nan=True,
            msg=lambda text: f"{where}: {text}",
        )


def assert_same_output(expected: ModelOutput, actual: ModelOutput, where: str) -> None:
    assert_equal(type(expected), type(actual), where)
    assert_equal(list(expected), list(actual), f"{where}: fields")
    assert_same(expected["sequences"], actual["sequences"], f"{where}.sequences")
    for field in expected:
        left, right = expected[field], actual[field]
        if field in ("scores", "logits") and "beam_indices" not in expected:
            assert_same_scores(left, right, expected["sequences"], f"{where}.{field}")
        else:
            assert_same(left, right, f"{where}.{field}")


def assert_same_scores(
    expected: tuple[torch.Tensor, ...],
    actual: tuple[torch.Tensor, ...],
    sequences: torch.Tensor,
    where: str,
) -> None:
    """Compares step by step the rows that have not ended; later values continue padding."""
    assert_equal(len(expected), len(actual), f"{where}: steps")
    width = sequences.shape[1] - len(expected)
    # trailing padding follows the end
    ends = [int((row != models.PAD).nonzero()[-1]) + 1 for row in sequences]
    for step, (left, right) in enumerate(zip(expected, actual, strict=True)):
        assert_equal(left.shape, right.shape, f"{where}[{step}]")
        open_rows = [row for row, end in enumerate(ends) if width + step < end]
        assert_same_tensor(left[open_rows], right[open_rows], f"{where}[{step}]")


CELLS = [(name, cell) for cell in OPTIONS for name in MODELS_OF.get(cell, ALL)]
WHOLE = "llama"
KINDS = ("gpt_oss", "qwen3_next", "t5")
"""A plain run has every cell of `WHOLE`. Each option also runs on one of `KINDS` in turn (experts,
windows and sinks; states beside keys and values; cross attention and position biases), and every
third on one of all others; all other cells are slow."""


def is_fast(name: str, cell: str) -> bool:
    turn, able = list(OPTIONS).index(cell), MODELS_OF.get(cell, ALL)
    kinds = [kind for kind in KINDS if kind in able]
    others = [other for other in able if other not in (WHOLE, *KINDS)]
    is_third = turn % 3 == 0 and name == others[turn // 3 % len(others)]
    return is_third or name in (WHOLE, kinds[turn % len(kinds)])


def test_a_plain_run_has_every_model_and_option() -> None:
    fast = [(name, cell) for name, cell in CELLS if is_fast(name, cell)]
    assert {name for name, _ in fast} == set(ALL)
    assert {cell for _, cell in fast} == set(OPTIONS)
    assert {cell for name, cell in fast if name in KINDS} == set(OPTIONS)


@pytest.mark.slow_cases("t5-eager_model")
@pytest.mark.parametrize(
    ("name", "cell"),
    [
        pytest.param(*pair, marks=[] if is_fast(*pair) else pytest.mark.slow, id="-".join(pair))
        for pair in CELLS
    ],
)
def test_parity(name: str, cell: str) -> None:
    function = OPTIONS[cell]
    model = models.get_eager(name) if cell in EAGER else models.get(name)
    expected = outcome(function, Run(name, paged=False, model=model))
    refused = isinstance(expected, Refusal)
    broken = isinstance(expected, Refusal) and fails_in_older_versions(name, cell, expected)
    assert refused == ((name, cell) in REFUSED or broken), f"plain: {expected}"

    before = model_state(model)
    hf_paged.memory_stats(model, reset=True)
    actual = outcome(function, Run(name, paged=True, model=model))
    if not broken:  # paged may serve calls on which an older plain breaks
        assert_same(expected, actual, cell)
    assert model_state(model) == before
    if not refused and cell not in NO_POOL:
        assert hf_paged.memory_stats(model).peak_blocks > 0, "the call did not use the paged pool"
    del expected, actual
    assert_pool_empty(model)


@pytest.mark.parametrize("name", ALL)
def test_attention_reads_the_blocks_in_place(name: str) -> None:
    # Before 5.23, Gemma 2's sdpa drops its softcap; that sdpa is called, not imitated.
    model = models.get_eager(name) if name == "gemma2" else models.get(name)
    Run(name, paged=True, model=model).generate(models.padded_prompt(name), do_sample=False)
    route = hf_paged.last_route(model)
    assert route.in_place and route.road != "plain", route


MODES: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "beams": {"num_beams": 3, "do_sample": False},
    "samples": {"do_sample": True, "num_return_sequences": 3},
}
CACHE_CONFIGS: dict[str, Any] = {
    "default": {},
    "dict": {"block_size": 8},
    "dict_num_blocks": {"block_size": 8, "num_blocks": 128},
    "dict_memory_fraction": {"memory_fraction": 0.1},
    "PagedConfig": hf_paged.PagedConfig(block_size=8),
    "PagedConfig_num_blocks": hf_paged.PagedConfig(block_size=32, num_blocks=64),
}
ENTRIES = ("keyword", "generation_config", "model", "saved")


@pytest.mark.parametrize(
    ("entry", "cache_config", "mode"),
    [
        (entry, cache_config, list(MODES)[turn % len(MODES)])
        for first, entry in enumerate(ENTRIES)
        for turn, cache_config in enumerate(CACHE_CONFIGS, first)
    ],
)
def test_every_entry_point_leads_to_the_same_tokens(
    entry: str, cache_config: str, mode: str, tmp_path: Path
) -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (13, 4, 21))
    paged: dict[str, Any] = {"cache_implementation": "paged"}
    if CACHE_CONFIGS[cache_config]:
        paged["cache_config"] = copy.deepcopy(CACHE_CONFIGS[cache_config])
    options = {**MODES[mode], "max_new_tokens": NEW_TOKENS}
    expected = plain_run(model, inputs, options, SEED)
    config = GenerationConfig(**paged, **options, pad_token_id=models.PAD)
    before = config.to_dict()
    if entry == "keyword":
        options |= paged
    elif entry == "generation_config":
        options = {"generation_config": config}
    elif entry == "model":
        model = copy.deepcopy(model)
        for name, value in paged.items():
            setattr(model.generation_config, name, value)
    else:
        model, options = copy.deepcopy(model), {}
        model.generation_config = config
        model.save_pretrained(tmp_path)
        model = LlamaForCausalLM.from_pretrained(tmp_path)
        assert model.generation_config.cache_implementation == "paged"
    hf_paged.memory_stats(model, reset=True)
    torch.manual_seed(SEED)
    assert_same(expected, model.generate(**inputs, **options), f"{entry}, {mode}, {cache_config}")
    assert hf_paged.memory_stats(model).peak_blocks > 0
    assert config.to_dict() == before
    json.loads(config.to_json_string())  # what saving writes
    assert_pool_empty(model)


def test_every_block_size() -> None:
    model, inputs = models.get("llama"), models.padded_prompt("llama", (37, 4, 65))
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS}
    for block_size in (4, 8, 16, 32, 64, 128, 256, "auto"):
        paged = {"cache_implementation": "paged", "cache_config": {"block_size": block_size}}
        assert_paged_is_plain(model, inputs, options, paged)
