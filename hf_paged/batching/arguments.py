"""What callers pass beside prompts: each value is taken, or refused by name before anything is allocated."""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Mapping
from numbers import Integral, Real
from typing import Any

import torch
from transformers import GenerationConfig
from transformers.generation.streamers import TextStreamer

MAX_PRIORITY = 2**31 - 1  # so that a priority times `AGING`, plus a count of arrivals, is exact as a float
_SEEDS = (-(2**63), 2**64 - 1)  # what torch takes
_COUNTS = ("num_beams", "num_return_sequences")
_LENGTHS = ("max_new_tokens", "max_length", "min_new_tokens", "min_length")


def shown(value: Any) -> str:
    """`repr`, cut short; of what cannot be shown, its type."""
    try:
        return reprlib.repr(value)
    except Exception:  # an object's own, or an integer of too many digits
        return f"a value of type {type(value).__name__}"


def is_whole(value: Any) -> bool:
    """Whether a value is a whole number, of Python or numpy."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_priority(value: Any) -> int:
    """A whole number. Raises `ValueError` for what is none, or too large."""
    if not is_whole(value) or abs(value) > MAX_PRIORITY:
        raise ValueError(
            f"`priority` is {shown(value)}: it must be a whole number from {-MAX_PRIORITY} to {MAX_PRIORITY}, lower "
            "runs earlier"
        )
    return int(value)


def as_seed(value: Any) -> int | None:
    """A whole number that torch takes, or `None`. Raises `ValueError` for anything else."""
    if value is None:
        return None
    low, high = _SEEDS
    if not is_whole(value) or not low <= value <= high:
        raise ValueError(f"`seed` is {shown(value)}: it must be None or a whole number from {low} to {high}")
    return int(value)


def check_generates(model: Any) -> None:
    """Raises `ValueError` for what is no model, or has no head, an encoder, or states in its modules."""
    if not callable(getattr(model, "can_generate", None)):
        raise ValueError(
            f"`model` is {shown(model)}: it must be a model, from `AutoModelForCausalLM.from_pretrained` for instance"
        )
    name = type(model).__name__
    if not model.can_generate():
        raise ValueError(
            f"`model` is a {name}, which cannot generate: pass the model with its head, a `...ForCausalLM`"
        )
    if getattr(model.config, "is_encoder_decoder", False):
        raise ValueError(
            f'{name} is an encoder-decoder model: call `model.generate(..., cache_implementation="paged")`; the engine '
            "takes decoder-only models"
        )
    if any(hasattr(module, "_setup_cache") for module in model.modules()):
        raise ValueError(
            f"{name} keeps states in its modules, outside of any cache, so that its requests cannot run beside one "
            'another: call `model.generate(..., cache_implementation="paged")`'
        )


def check_names(request_id: Any, adapter: Any) -> None:
    """Raises `ValueError` for a request id that is not hashable, and an adapter that is no name."""
    try:
        hash(request_id)
    except TypeError:
        raise ValueError(f"`request_id` is {shown(request_id)}: it must be hashable, a string for instance") from None
    if adapter is not None and not isinstance(adapter, str):
        raise ValueError(f"`adapter` is {shown(adapter)}: it must be None or the name of an adapter, a string")


def as_list(name: str, value: Any) -> list[Any]:
    """Processors or criteria. Raises `ValueError` for one that is in no list, and for what cannot be called."""
    if value is None:
        return []
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"`{name}` is {shown(value)}: pass a list of them")
    for place, each in enumerate(value):
        if not callable(each):
            raise ValueError(f"`{name}` holds {shown(each)} at place {place}: it must be callable")
    return list(value)


def check_streamer(value: Any) -> None:
    """Raises `ValueError` for what is no streamer, unless it is `None`."""
    if value is not None and not all(callable(getattr(value, method, None)) for method in ("put", "end")):
        raise ValueError(f"`streamer` is {shown(value)}: it must have the methods `put` and `end`")


def check_streamed_rows(streamer: Any, num_rows: int, instead: str) -> None:
    """Raises `ValueError` if a streamer of one row is to get several; `instead` says what to do."""
    if isinstance(streamer, TextStreamer) and num_rows > 1:
        raise ValueError(
            f"`streamer` is a {type(streamer).__name__}, which takes one row, and there are {num_rows}: {instead}"
        )


def check_ids(value: Any) -> None:
    """Raises `ValueError` for a tensor `(rows, length)` of what are no token ids, or of no rows."""
    if not isinstance(value, torch.Tensor):
        return
    if value.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"`input_ids` are {value.dtype}: token ids must be torch.int64 or torch.int32")
    if value.dim() == 2 and not len(value):
        raise ValueError(f"`input_ids` have the shape {tuple(value.shape)}: there must be at least one row")


def check_numbers(options: Mapping[str, Any], *, check_range: bool = True) -> None:
    """
    Raises `ValueError` for generation options that count or measure and are no numbers, and with `check_range` for
    counts that are bools or below 1 (`generate` leaves these to transformers, which takes True, and raises errors of
    its own type).
    """
    for name in _COUNTS:
        value = options.get(name)
        if value is not None and (
            not isinstance(value, Integral) or (check_range and (not is_whole(value) or value < 1))
        ):
            raise ValueError(f"`{name}` is {shown(value)}: it must be a whole number of at least 1")
    # plain `generate` takes 3.0 as well, and has an error of its own for numbers that are too low
    for name in _LENGTHS:
        value = options.get(name)
        if value is not None and not isinstance(value, (Real, torch.Tensor)):
            raise ValueError(f"`{name}` is {shown(value)}: it must be a whole number (tokens)")


def as_config(value: GenerationConfig | Mapping[str, Any] | None) -> GenerationConfig | None:
    """
    A request's generation config from what a caller passed. Raises `ValueError` on options that do not exist, and on
    values that are no numbers where these must be.
    """
    if value is None:
        return None
    if isinstance(value, GenerationConfig):
        check_numbers(vars(value))
        return value
    if not isinstance(value, Mapping):
        raise ValueError(f"the generation config is {shown(value)}: pass a `GenerationConfig` or a dict of its options")
    known = vars(GenerationConfig())
    unknown = [str(name) for name in value if name not in known]
    if unknown:  # transformers would keep them as attributes without a use
        raise ValueError(f"`GenerationConfig` has no options {', '.join(sorted(unknown))}{meant(unknown)}")
    check_numbers(value)
    return GenerationConfig(**value)


def meant(names: Iterable[str]) -> str:
    """A hint for names that are close to those of generation options."""
    known = [name for name in vars(GenerationConfig()) if not name.startswith("_")]
    found = {name: difflib.get_close_matches(name, known, n=1, cutoff=0.7) for name in sorted(names)}
    hints = [f"`{close[0]}` instead of `{name}`" for name, close in found.items() if close and close[0] != name]
    return f": did you mean {', '.join(hints)}?" if hints else ""
