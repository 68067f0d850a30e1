"""Launches the next decode step on a GPU while its input tokens are still being copied to the host.
Leaves the forward to the recorder."""

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
"""Takes sequences and their next tokens `(n,)` on the device; returns logits `(n, vocab)`, or
`None` if the step needs the host."""


class Launched(NamedTuple):
    """A step launched on the device, for `n` sequences."""

    logits: Tensor  # (n, vocab)
    # row in `logits`, and the state that the launch assumed: number of tokens, last token, last
    # block of each table
    rows: dict[Sequence, tuple[int, tuple[int, int, list[int]]]]


class GraphRunAhead:
    """Launches the next decode step while its input tokens are still being copied to the host. This
    assumes that every row continues and none joins. If that turns out wrong, the step is computed
    as usual: the launched one only wrote K/V past the sequences' ends."""

    def __init__(self, memory: PagedMemory, scheduler: Scheduler) -> None:
        self._memory = memory
        self._scheduler = scheduler
        self._launched: Launched | None = None

    def clear(self) -> None:
        self._launched = None

    def fetch(
        self,
        ready: list[tuple[Generation, LogitRows]],
        launch: Launch,
    ) -> Fetch | None:
        """Returns a function that copies the tokens of all open rows, `(n,)` in order, to the host
        and meanwhile launches the next step; `None` if a row is not sampled (beams) or has
        drafts."""
        sequences: list[Sequence] = []
        for generation, _ in ready:
            is_sampled = isinstance(generation.decoding, SampleDecoding)
            if not is_sampled or generation.drafter is not None:
                return None
            for row in generation.decoding.open_rows:
                request, index = generation.rows[row]
                sequences.append(request.sequences[index])
        return lambda tokens: self._fetch(sequences, tokens, launch)

    def _fetch(
        self,
        sequences: list[Sequence],
        tokens: Tensor,
        launch: Launch,
    ) -> list[int]:
        wait = _start_copy(tokens)
        # rows that reach their maximum length with these tokens do not continue
        continuing = []
        for row, sequence in enumerate(sequences):
            if sequence.num_tokens + 1 < sequence.request.max_num_tokens:
                continuing.append(row)
        remaining = [sequences[row] for row in continuing]
        logits = None
        with self._memory.changing():  # after an error the sampler goes on without a launch
            num_leaving = len(sequences) - len(continuing)
            is_next = False
            if len(tokens) == len(sequences):
                is_next = self._scheduler.reserve_next(remaining, num_leaving)
        if continuing and is_next:
            try:
                logits = launch(remaining, select_rows(tokens, continuing))
            except Exception as error:  # the step is computed as usual, and raises it again
                if is_interrupt(error):
                    raise
                logger.debug("a step could not be launched ahead", exc_info=True)
        token_ids = wait()
        if logits is not None:
            rows = {}
            for number, row in enumerate(continuing):
                sequence = sequences[row]
                state = (sequence.num_tokens + 1, token_ids[row], _last_blocks(sequence))
                rows[sequence] = (number, state)
            self._launched = Launched(logits, rows)
        return token_ids

    def take(self, plan: StepPlan) -> tuple[Tensor | None, int]:
        """Returns the logits `(n, vocab)` of the first `n` rows of a step, if they were launched
        ahead, and `n`."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None, 0
        rows: list[int] = []
        for sequence, count, num_logits in zip(plan.sequences, plan.counts, plan.num_logits):
            row, assumed = launched.rows.get(sequence, (0, None))
            # the caller's code may have chosen another token, and a preempted sequence may have
            # other blocks
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
    """Starts the copy to the host. The returned function waits for the copy, not for later
    launches, and returns the tokens."""
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
