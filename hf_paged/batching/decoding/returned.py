"""Raises errors that name the caller's logits processor or stopping criterion if it returned an
invalid result. Results are checked only after another error, so that steps without errors pay for
no check."""

from __future__ import annotations

import itertools
from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList

from ...interrupts import is_interrupt


def check_scores(processors: Any, logits: Tensor, scores: Any, error: Exception) -> None:
    """Raises `TypeError` if `error` is due to a logits processor that did not return a tensor;
    otherwise does nothing. `error` was raised when the processors ran on the logits `(rows,
    vocab)`, or when their result `scores` was used."""
    members = list(processors) if isinstance(processors, list) else [processors]
    culprits = members[-1:]
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is LogitsProcessorList.__call__.__code__:
            # a processor raised, perhaps because the one before it returned these scores
            scores = frame.f_locals.get("scores")
            failed_processor = frame.f_locals.get("processor")
            pairs = itertools.pairwise(members)
            # several if `failed_processor` is in the list more than once
            culprits = [processor for processor, next_ in pairs if next_ is failed_processor]
            break
        trace = trace.tb_next
    if not culprits or isinstance(scores, Tensor) or is_interrupt(error):
        return
    names = " or ".join(dict.fromkeys(type(culprit).__name__ for culprit in culprits))
    raise TypeError(
        f"the logits processor {names} returned {_describe(scores)}: it must"
        f" return the scores, a tensor of shape {tuple(logits.shape)}, even if it changes them in"
        " place"
    ) from error


def check_criterion_result(criterion: Any, result: Any, num_rows: int, error: Exception) -> None:
    """Raises a `TypeError` that names `criterion`. Called after the use of its `result` has raised
    `error`. Does nothing if the result is valid, since the error then has another cause (such as a
    kernel that failed earlier), or if `error` is an interrupt."""
    is_valid = isinstance(result, bool) or (
        isinstance(result, Tensor) and result.shape in ((), (1,), (num_rows,))
    )
    if is_valid or is_interrupt(error):
        return
    raise TypeError(
        f"the stopping criterion {type(criterion).__name__} returned {_describe(result)}: it"
        f" must return a bool tensor of shape ({num_rows},), one value per row"
    ) from error


def _describe(result: Any) -> str:
    """Returns a description of a result for an error message. `NotImplemented` stands for an
    unknown result."""
    if result is NotImplemented:
        return "an invalid result"
    if isinstance(result, Tensor):
        return f"a tensor of shape {tuple(result.shape)}"
    return "None" if result is None else f"an object of type {type(result).__name__}"
