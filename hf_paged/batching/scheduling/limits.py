"""What limits the number of tokens that one sequence computes in a step, beside the budget."""

from __future__ import annotations

from ..request import Request, Sequence
from .preemption import Preemption


def limited(preemption: Preemption, request: Request, sequence: Sequence, count: int) -> int:
    """Returns how many of `count` tokens, above 1, a sequence of the request may compute."""
    num_computed = sequence.num_computed_tokens
    # a prompt that is computed as a whole ends its step
    if sequence.is_whole or preemption.replays_prompt(request):
        count = min(count, max(1, request.num_prompt_tokens - num_computed))
    # others may begin where a prefill stops
    for stop in sequence.blocks.stops:
        if stop > num_computed:
            count = min(count, stop - num_computed)
    # Under a limit in bytes, blocks that leave a window can be reused only by layers of that
    # window: a request that did not fit alone goes on block by block.
    is_windowed = preemption.chunks and preemption.blocks.has_windows
    if is_windowed and request.num_tokens_alone >= 0:
        count = min(count, preemption.blocks.block_size)
    # the last prompt token has a step of its own if the first new token is drafted
    if request.drafts_first and count == sequence.num_to_compute:
        return count - 1
    return count
