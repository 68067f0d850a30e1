"""Limits on the options of requests in OpenAI's format. Beyond them, logits would overflow, all
requests would wait, memory would run out, or no token would be allowed. `batching/arguments.py` has
the checks for all requests."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

from ..batching.arguments import check_stop_strings, shown
from ..native.manager_config import find_max_length
from ..native.one_call import EffectiveOptions
from .openai_fields import MAX_CHOICES, RefusedError

# at a lower temperature, or with a higher bias, logits may overflow
MIN_TEMPERATURE, MAX_BIAS = 1e-5, 1e5
# maximum number of biased or banned sequences of several tokens, each of which transformers
# searches for in every step
MAX_SEQUENCES = 256
MAX_BEAM_TOKENS = 1 << 24  # tokens of all candidates of a beam search together
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

NUMERIC_OPTIONS = (
    "max_time",
    "length_penalty",
    "guidance_scale",
    "bias",
    "exponential_decay_length_penalty",
)
"""Further options that are numbers or lists of numbers, whose types transformers does not check."""


def check_option_limits(options: Mapping[str, Any]) -> None:
    """Raises `RefusedError` for options that overflow logits, delay all requests or are invalid."""
    _check_overflows(options)
    watermarking = options.get("watermarking_config") or {}
    if not isinstance(watermarking, Mapping):
        watermarking = vars(watermarking)
    all_options = {**options, **watermarking}
    for name, max_value in MAX_VALUES.items():
        value = all_options.get(name)
        if isinstance(value, (int, float)) and not value <= max_value:
            raise RefusedError(
                f"`{name}` is {shown(value)}: it must be a whole number up to {max_value}"
            )
    for name in NUMERIC_OPTIONS:
        for value in _as_list(all_options.get(name)):
            if not isinstance(value, (int, float, type(None))):
                raise RefusedError(f"`{name}` has the value {shown(value)}: it must be a number")
    biased_sequences = [ids for ids, _ in _biases(options)]
    for sequences in (biased_sequences, _as_list(options.get("bad_words_ids"))):
        num_long = sum(isinstance(ids, (list, tuple)) and len(ids) > 1 for ids in sequences)
        if num_long > MAX_SEQUENCES:
            raise RefusedError(
                f"`sequence_bias` or `bad_words_ids` has {num_long} sequences of several"
                f" tokens: pass at most {MAX_SEQUENCES}"
            )
    stop_strings = options.get("stop_strings")
    if stop_strings is not None:
        try:
            check_stop_strings(stop_strings, "stop")
        except ValueError as error:
            raise RefusedError(str(error)) from None
        if not all(_as_list(stop_strings)):
            raise RefusedError(
                "`stop` contains an empty string, which would end each answer at once: leave it out"
            )


def _check_overflows(options: Mapping[str, Any]) -> None:
    """Raises `RefusedError` for a temperature or a bias with which logits may overflow."""
    temperature = options.get("temperature")
    if isinstance(temperature, (int, float)) and 0 < temperature < MIN_TEMPERATURE:
        raise RefusedError(
            f"`temperature` is {temperature}: it must be 0, for the most probable tokens, or at"
            f" least {MIN_TEMPERATURE:g}"
        )
    for _, bias in _biases(options):
        if isinstance(bias, (int, float)) and not bias <= MAX_BIAS:
            raise RefusedError(
                f"`logit_bias` or `sequence_bias` has the bias {shown(bias)}: it must be a"
                f" number up to {MAX_BIAS:g}"
            )


def _as_list(value: Any) -> list[Any]:
    """Returns the values of an option that may be unset, a single value or a list."""
    if value is None:
        return []
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _biases(options: Mapping[str, Any]) -> list[tuple[Any, Any]]:
    """Returns the sequences of token ids in `sequence_bias`, each with its bias."""
    biases = options.get("sequence_bias") or ()
    return list(biases.items() if isinstance(biases, Mapping) else biases)


def set_max_new_tokens(model: Any, config: Any, num_prompt_tokens: int) -> None:
    """If a request's generation config sets no `max_new_tokens`, sets the value that the engine
    would use: from the model's generation config, `max_length` or the model's positions. The limits
    of this module then apply to this value, and the app reports an answer that reaches it as
    incomplete. Leaves `max_new_tokens` unset if nothing limits the length. Raises `RefusedError` if
    the prompt leaves no token for the answer."""
    effective = EffectiveOptions(model, config)
    config.max_new_tokens = effective.max_new_tokens
    max_length = effective.max_length
    if max_length is None:
        max_length = find_max_length(model)
    if config.max_new_tokens is not None or not isinstance(max_length, int):
        return
    if model.config.is_encoder_decoder:
        num_prompt_tokens = 1  # the decoder's start token
    if num_prompt_tokens >= max_length:
        raise RefusedError(
            f"the prompt has {num_prompt_tokens} tokens, and prompt and answer together may have at"
            f" most {max_length}: shorten the prompt"
        )
    config.max_new_tokens = max_length - num_prompt_tokens


def check_beams(config: Any, options: Mapping[str, Any], num_prompt_tokens: int) -> None:
    """Raises `RefusedError` if beams would take too much memory: beam search allocates the ids of
    all candidates, prompt included, at once for the maximum length."""
    num_beams = options.get("num_beams")
    max_new_tokens = config.max_new_tokens
    if not isinstance(num_beams, int) or num_beams < 2 or not isinstance(max_new_tokens, int):
        return
    eos = config.eos_token_id
    num_eos_ids = 1 if eos is None else len(_as_list(eos))
    num_candidates = num_beams * (1 + num_eos_ids)
    if num_candidates * (num_prompt_tokens + max_new_tokens) > MAX_BEAM_TOKENS:
        raise RefusedError(
            f"`num_beams` is {num_beams} for a prompt of {num_prompt_tokens} tokens and up to"
            f" {max_new_tokens} new tokens: its {num_candidates} candidates may have at most"
            f" {MAX_BEAM_TOKENS} tokens in total. Lower `max_tokens` or `num_beams`"
        )


def check_allows_tokens(model: Any, config: Any, options: Mapping[str, Any]) -> None:
    """Raises `RefusedError` if a request with this generation config, overridden by `options`,
    would allow no first token or fewer tokens than it requires, or names token ids outside the
    vocabulary."""
    min_new_tokens = options.get("min_new_tokens") or 0
    max_new_tokens = config.max_new_tokens
    if max_new_tokens is not None and min_new_tokens > max_new_tokens:
        raise RefusedError(
            f"`min_new_tokens` is {min_new_tokens}, above the limit of {max_new_tokens} new tokens:"
            " lower it, or raise the limit"
        )
    bad_words = options.get("bad_words_ids") or ()
    biases = _biases(options)
    banned_ids = {
        *(options.get("suppress_tokens") or ()),
        *(options.get("begin_suppress_tokens") or ()),
        *(ids[0] for ids in bad_words if len(ids) == 1),
    }
    vocab_size = model.config.get_text_config(decoder=True).vocab_size
    sequences_by_option = {
        "`logit_bias` or `sequence_bias`": [ids for ids, _ in biases],
        "`bad_words_ids`": bad_words,
        "`forced_bos_token_id`": [_as_list(options.get("forced_bos_token_id"))],
        "`forced_eos_token_id`": [_as_list(options.get("forced_eos_token_id"))],
    }
    for name, sequences in sequences_by_option.items():
        for token_id in itertools.chain.from_iterable(sequences):
            if not 0 <= token_id < vocab_size:
                raise RefusedError(
                    f"{name} has the token id {token_id}: the model's ids are 0 to {vocab_size - 1}"
                )
    banned_ids.update(ids[0] for ids, bias in biases if len(ids) == 1 and bias == float("-inf"))
    if min_new_tokens:
        eos = config.eos_token_id
        if eos is None:
            eos = model.generation_config.eos_token_id
        banned_ids.update(_as_list(eos))
    if len(banned_ids) >= vocab_size and banned_ids.issuperset(range(vocab_size)):
        raise RefusedError(
            "`bad_words_ids`, `suppress_tokens`, `begin_suppress_tokens`, `logit_bias` and"
            " `min_new_tokens` together allow no token as the first: allow at least one"
        )
