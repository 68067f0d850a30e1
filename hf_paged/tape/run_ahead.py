"""Launches the next decode step on a GPU while its input tokens are still being copied to the host.
The recorder replays the step."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ..batching.decoding.base import Fetch, LogitRows
from ..batching.decoding.sample import SampleDecoding
from ..batching.decoding.scores import select_rows
from ..batching.generation import Generation
from ..batching.request import Sequence
from ..batching.scheduling.scheduler import Scheduler
from ..cache.memory import PagedMemory
from ..interrupts import is_interrupt
from ..plan import StepPlan
from ..step import numbers_on

logger = logging.getLogger(__name__)

Launch = Callable[[list[Sequence], Tensor], Tensor | None]
"""Launches a decode step of sequences, from their next tokens `(n,)` on the device. Returns logits
`(n, vocab_size)`, or `None` if the step cannot be launched."""

AssumedState = tuple[int, int, list[int]]
"""The state of a sequence in which a launched step is valid: its number of tokens, its last token,
and the last block of each table."""


class LaunchedStep(NamedTuple):
    """A step launched on the device, for `n` sequences."""

    logits: Tensor  # (n, vocab_size)
    rows: dict[Sequence, tuple[int, AssumedState]]  # the row in `logits`, and the assumed state


class GraphRunAhead:
    """Launches the next decode step while its input tokens are still being copied to the host,
    assuming that no row joins, and that rows leave only at their maximum length. The logits of rows
    that leave earlier are not used. The first row that has joined or is not in its assumed state,
    and all rows after it, are computed as usual. This is safe because the launched step has only
    written K/V past the ends of sequences."""

    def __init__(self, memory: PagedMemory, scheduler: Scheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._launched: LaunchedStep | None = None

    def clear(self) -> None:
        """Drops the launched step."""
        self._launched = None

    def fetch(
        self,
        ready: list[tuple[Generation, LogitRows]],
        launch: Launch,
    ) -> Fetch | None:
        """As `RunAhead.fetch`: returns a function that copies tokens to the host and meanwhile
        launches the next step; `None` if a generation has a drafter, or a decoding other than
        `SampleDecoding`."""
        sequences: list[Sequence] = []
        for generation, _ in ready:
            is_sampled = isinstance(generation.decoding, SampleDecoding)
            if not is_sampled or generation.drafter is not None:
                return None
            for row in generation.decoding.open_rows:
                sequences.append(generation.sequence(row))
        return lambda tokens: self._fetch_and_launch(sequences, tokens, launch)

    def _fetch_and_launch(
        self,
        sequences: list[Sequence],
        tokens: Tensor,
        launch: Launch,
    ) -> list[int]:
        """Copies `tokens` `(n,)`, the new tokens of `sequences`, to the host and returns them;
        meanwhile launches the next step of the sequences that continue."""
        wait = _start_copy(tokens)
        # rows that reach their maximum length with these tokens do not continue
        continuing_rows = []
        for row, sequence in enumerate(sequences):
            if sequence.num_tokens + 1 < sequence.request.max_num_tokens:
                continuing_rows.append(row)
        continuing = [sequences[row] for row in continuing_rows]
        logits = None
        with self._memory.changing():
            num_leaving = len(sequences) - len(continuing)
            can_launch = False
            if len(tokens) == len(sequences):
                can_launch = self._scheduler.reserve_next(continuing, num_leaving)
        if continuing and can_launch:
            try:
                logits = launch(continuing, select_rows(tokens, continuing_rows))
            except (
                Exception
            ) as error:  # the step is computed as usual, and may raise the error again
                if is_interrupt(error):
                    raise
                logger.debug("a step could not be launched ahead", exc_info=True)
        token_ids = wait()
        if logits is not None:
            rows = {}
            for logits_row, row in enumerate(continuing_rows):
                sequence = sequences[row]
                state = (sequence.num_tokens + 1, token_ids[row], _last_blocks(sequence))
                rows[sequence] = (logits_row, state)
            self._launched = LaunchedStep(logits, rows)
        return token_ids

    def take(self, plan: StepPlan) -> tuple[Tensor | None, int]:
        """Returns the logits `(n, vocab_size)` of those leading rows of a step that were launched
        ahead and are in their assumed states, and their number `n`; `(None, 0)` if there are none.
        Drops the launched step."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None, 0
        rows: list[int] = []
        for sequence, count, num_logits in zip(plan.sequences, plan.counts, plan.num_logits):
            row, assumed = launched.rows.get(sequence, (0, None))
            # the caller's code may have replaced the token, and a preempted sequence may have new
            # blocks
            token_ids = sequence.token_ids
            state = (len(token_ids), token_ids[-1], _last_blocks(sequence))
            is_decode = count == 1 == num_logits
            if not is_decode or state != assumed:
                break
            rows.append(row)
        if not rows:
            return None, 0
        logits = launched.logits
        if rows != list(range(len(logits))):
            logits = logits[numbers_on(logits.device, rows)]
        return logits, len(rows)


def _last_blocks(sequence: Sequence) -> list[int]:
    return [table.block_ids[-1] for table in sequence.blocks.tables]


def _start_copy(tokens: Tensor) -> Callable[[], list[int]]:
    """Starts to copy tokens to the host. Returns a function that waits for the copy, but not for
    work launched later, and returns the tokens."""
    if tokens.device.type != "cuda":
        on_host: list[int] = tokens.tolist()
        return lambda: on_host
    with torch.cuda.device(tokens.device):
        host = torch.empty(
            tokens.shape,
            dtype=tokens.dtype,
            pin_memory=True,
            device="cpu",
        )
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

    def wait() -> list[int]:
        done.synchronize()
        return list(host.tolist())

    return wait
