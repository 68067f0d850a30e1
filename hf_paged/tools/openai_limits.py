"""Limits on the options of OpenAI's requests: beyond these, logits overflow, all requests wait,
memory runs out, or no token is allowed. `batching/arguments.py` checks the options of any
request."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..batching.arguments import check_stop_strings, shown
from .openai_fields import MAX_CHOICES, Refused

# logits that are divided by less, or get a higher bias, may overflow
MIN_TEMPERATURE, MAX_BIAS = 1e-5, 1e5
# biased or banned sequences of several tokens, for which transformers searches one after another
MAX_SEQUENCES = 256
MAX_BEAM_TOKENS = 1 << 24  # of all beams and their candidates
MAX_VALUES = {
    "num_beams": MAX_CHOICES,
    "max_matching_ngram_size": 32,
    "prompt_lookup_num_tokens": 128,
    "num_assistant_tokens": 128,
    "context_history_size": 1 << 16,
    "sampling_table_size": 1 << 20,
    "context_width": 32,
    "ngram_len": 32,
}
"""The maximum of numeric options of a generation config and of its `watermarking_config`."""
NUMBERS = "max_time", "length_penalty", "guidance_scale", "bias", "exponential_decay_length_penalty"
"""Further options that are numbers or lists of numbers, which transformers does not check before it
computes with them."""


def check_extremes(options: Mapping[str, Any]) -> None:
    """Raises `Refused` for options that make logits overflow, or all requests wait."""
    _check_overflows(options)
    mark = options.get("watermarking_config") or {}
    if not isinstance(mark, Mapping):
        mark = vars(mark)
    numbers = {**options, **mark}
    for name, limit in MAX_VALUES.items():
        value = numbers.get(name)
        if isinstance(value, (int, float)) and not value <= limit:
            raise Refused(f"`{name}` is {shown(value)}: it must be a whole number up to {limit}")
    for name in NUMBERS:
        for part in _listed(numbers.get(name)):
            if not isinstance(part, (int, float, type(None))):
                raise Refused(f"`{name}` holds {shown(part)}: it must be a number")
    biased = [ids for ids, _ in _biases(options)]
    for sequences in (biased, _listed(options.get("bad_words_ids"))):
        num_long = sum(isinstance(ids, (list, tuple)) and len(ids) > 1 for ids in sequences)
        if num_long > MAX_SEQUENCES:
            raise Refused(
                f"`sequence_bias` or `bad_words_ids` has {num_long} sequences of several"
                f" tokens: pass at most {MAX_SEQUENCES}"
            )
    stops = options.get("stop_strings")
    if stops is not None:
        try:
            check_stop_strings(stops, "stop")
        except ValueError as error:
            raise Refused(str(error)) from None
        if not all(_listed(stops)):
            raise Refused("`stop` holds an empty text, which is found at once: leave it out")


def _check_overflows(options: Mapping[str, Any]) -> None:
    temperature = options.get("temperature")
    if isinstance(temperature, (int, float)) and 0 < temperature < MIN_TEMPERATURE:
        raise Refused(
            f"`temperature` is {temperature}: it must be 0, for the most probable tokens, or from"
            f" {MIN_TEMPERATURE:g}"
        )
    for _, bias in _biases(options):
        if isinstance(bias, (int, float)) and not bias <= MAX_BIAS:
            raise Refused(
                f"`logit_bias` holds {shown(bias)}: a bias must be a number up to {MAX_BIAS:g}"
            )


def _listed(value: Any) -> list[Any]:
    """The values of an option that may be unset, a single value or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _biases(options: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Sequences of tokens, with their biases."""
    biases = options.get("sequence_bias") or ()
    return list(biases.items() if isinstance(biases, Mapping) else biases)


def check_beams(config: Any, options: Mapping[str, Any]) -> None:
    """Raises `Refused` if beams would take too much memory, which is allocated at once for all
    their tokens and candidates."""
    beams = options.get("num_beams")
    num_tokens = config.max_new_tokens
    if not isinstance(beams, int) or beams < 2 or not isinstance(num_tokens, int):
        return
    ends = config.eos_token_id
    num_ends = 1 if ends is None else len(_listed(ends))
    num_candidates = beams * (1 + num_ends)
    if num_candidates * num_tokens > MAX_BEAM_TOKENS:
        raise Refused(
            f"`num_beams` is {beams} for {num_tokens} new tokens, with {num_candidates} candidates"
            f" a step: candidates and tokens together may be at most {MAX_BEAM_TOKENS}. Lower"
            " `max_tokens` or `num_beams`"
        )


def check_allows_tokens(model: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Raises `Refused` if a request with this generation config, and these options over it, allows
    no first token, or fewer tokens than it requires."""
    min_tokens = options.get("min_new_tokens") or 0
    num_tokens = config.max_new_tokens
    if num_tokens is not None and min_tokens > num_tokens:
        raise Refused(
            f"`min_new_tokens` is {min_tokens}, above the limit of {num_tokens} new tokens: lower"
            " it, or raise the limit"
        )
    bad_words = options.get("bad_words_ids") or ()
    biases = _biases(options)
    banned = {
        *(options.get("suppress_tokens") or ()),
        *(options.get("begin_suppress_tokens") or ()),
        *(ids[0] for ids in bad_words if len(ids) == 1),
    }
    size = model.config.get_text_config(decoder=True).vocab_size
    named = {
        "logit_bias": [ids for ids, _ in biases],
        "bad_words_ids": bad_words,
        "forced_bos_token_id": [_listed(options.get("forced_bos_token_id"))],
        "forced_eos_token_id": [_listed(options.get("forced_eos_token_id"))],
    }
    for name, sequences in named.items():
        for token in itertools.chain.from_iterable(sequences):
            if not 0 <= token < size:
                raise Refused(
                    f"`{name}` names the token {token}: the model's tokens are 0 to {size - 1}"
                )
    banned.update(ids[0] for ids, bias in biases if len(ids) == 1 and bias == float("-inf"))
    if min_tokens:
        ends = config.eos_token_id
        if ends is None:
            ends = model.generation_config.eos_token_id
        banned.update(_listed(ends))
    if len(banned) >= size and banned.issuperset(range(size)):
        raise Refused(
            "`bad_words_ids`, `suppress_tokens`, `logit_bias` and `min_new_tokens` together allow"
            " no token: allow one"
        )
