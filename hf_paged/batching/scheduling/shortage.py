"""The errors of a step that can schedule nothing for lack of blocks."""

from __future__ import annotations

import sys
from typing import Any

from ...cache.block_manager import BlockManager
from ...cache.block_pool import OutOfBlocksError
from ..request import Request


class NeverFits(OutOfBlocksError):
    """`request` needs more blocks than there are, and no other request holds any."""

    def __init__(self, request: Request, message: str) -> None:
        super().__init__(message)
        self.request = request

    def __reduce__(self) -> tuple[Any, ...]:
        return OutOfBlocksError, (str(self),)  # a copy needs no request, which holds blocks


def out_of_blocks(
    request: Request,
    manager: BlockManager,
    num_waiting: int,
    num_running: int,
) -> OutOfBlocksError:
    """Makes the error for a step that could schedule nothing for lack of blocks for `request`:
    `NeverFits` if no other holds any."""
    total = "any number of"
    if manager.num_total < sys.maxsize:
        total = f"{manager.num_free} of {manager.num_total}"
    shortage = (
        f"nothing can be scheduled: request {request.request_id!r} needs more blocks,"
        f" {num_waiting} requests wait, {num_running} run, {total} blocks are available. "
    )
    if num_running or manager.supply.is_used:
        return OutOfBlocksError(
            shortage + "Others hold blocks: free their caches, or raise `num_blocks`"
        )
    if manager.supply.num_withheld:
        return OutOfBlocksError(
            shortage
            + "Other models hold the rest of `hf_paged.budget`: end their requests, or raise it"
        )
    return NeverFits(
        request,
        shortage
        + "No other holds blocks: raise `num_blocks`, `memory_fraction` or `hf_paged.budget`,"
        " free memory, or lower `max_new_tokens`, the prompt length or the number of sequences",
    )
