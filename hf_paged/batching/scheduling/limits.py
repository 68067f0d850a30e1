"""What limits the number of tokens that one sequence computes in a step, beside the budget."""

from __future__ import annotations

from collections.abc import Callable

from ..request import Request, Sequence
from .preemption import Preemption

Limit = Callable[[Request, Sequence, int], int]
"""From a request, its sequence and a number of tokens above 1, the number that may be computed; the
scheduler asks a list of limits, one after the other."""


def limits_of(preemption: Preemption) -> list[Limit]:
    """The limits of a scheduler, the least of which holds."""

    def end_of_prompt(request: Request, sequence: Sequence, count: int) -> int:
        """A prompt that is computed as a whole ends its step."""
        if not sequence.is_whole and not preemption.replays_prompt(request):
            return count
        return min(count, max(1, request.num_prompt_tokens - sequence.num_computed_tokens))

    limits: list[Limit] = [end_of_prompt, _next_stop]
    if preemption.chunks and preemption.blocks.has_windows:

        def one_block(request: Request, sequence: Sequence, count: int) -> int:
            """Under a limit in bytes, blocks that leave a window can be reused only by layers of
            that window: a request that did not fit alone goes on block by block."""
            if request.num_tokens_alone < 0:
                return count
            return min(count, preemption.blocks.block_size)

        limits.append(one_block)
    return [*limits, _before_first_draft]


def _next_stop(request: Request, sequence: Sequence, count: int) -> int:
    """Others may begin where a prefill stops."""
    num_computed = sequence.num_computed_tokens
    for stop in sequence.blocks.stops:
        if stop > num_computed:
            count = min(count, stop - num_computed)
    return count


def _before_first_draft(request: Request, sequence: Sequence, count: int) -> int:
    """The last prompt token has a step of its own if the first new token is drafted."""
    if request.drafts_first and count == sequence.num_to_compute:
        return count - 1
    return count
