"""Errors that name a caller's logits processor or stopping criterion which returned something
wrong. They are made only once another error has been raised: no step pays for a check."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

from ...interrupts import is_interrupt


def check_scores(processors: Any, logits: Tensor, scores: Any, error: Exception) -> None:
    """Raises `TypeError` if a processor returned no tensor, and that is why running them on the
    logits `(rows, vocab)`, or using the scores that they gave, raised this error."""
    listed = list(processors) if isinstance(processors, list) else [processors]
    culprit = listed[-1] if listed else None
    trace = error.__traceback__
    while trace is not None:
        frame = trace.tb_frame
        if frame.f_code is LogitsProcessorList.__call__.__code__:
            # the processor that got these scores from the one before it
            scores = frame.f_locals.get("scores")
            raising = frame.f_locals.get("processor")
            pairs = zip([None, *listed], listed)
            culprit = next((before for before, after in pairs if after is raising), None)
            break
        trace = trace.tb_next
    if culprit is None or isinstance(scores, Tensor) or is_interrupt(error):
        return
    raise TypeError(
        f"the logits processor {type(culprit).__name__} returned {_described(scores)}: it must"
        f" return the scores, a tensor of shape {tuple(logits.shape)}, also if it changes them in"
        " place"
    ) from error


def check_hits(criterion: Any, are_hits: Any, num_rows: int, error: Exception) -> None:
    """Raises `TypeError` for what a criterion returned, which raised this error when it was
    used."""
    if is_interrupt(error):
        return
    raise TypeError(
        f"the stopping criterion {type(criterion).__name__} returned {_described(are_hits)}: it"
        f" must return a bool tensor of shape ({num_rows},), one value a row"
    ) from error


def check_listed(num_rows: int, error: Exception) -> None:
    """As `check_hits`, if transformers' list of criteria raised this error itself."""
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None or last.tb_frame.f_code is not StoppingCriteriaList.__call__.__code__:
        return
    local = last.tb_frame.f_locals
    if "criteria" in local:
        check_hits(local["criteria"], NotImplemented, num_rows, error)


def _described(returned: Any) -> str:
    if returned is NotImplemented:  # not known
        return "no such tensor"
    if isinstance(returned, Tensor):
        return f"a tensor of shape {tuple(returned.shape)}"
    return "None" if returned is None else f"a {type(returned).__name__}"
