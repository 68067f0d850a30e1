"""
The next step of decodes is launched while its tokens are still on their way to the host, so that what the host does
between two forwards takes place while the device computes. It is a guess, that every row goes on and none joins; what
turns out otherwise is computed as always. What was launched in vain wrote to slots past the end of sequences only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from ...cache.memory import PagedMemory
from ..decoding.base import Fetch
from ..decoding.sample import SampleDecoding
from ..generation import Generation
from ..request import Sequence
from ..scheduling.scheduler import Scheduler

logger = logging.getLogger(__name__)

Launch = Callable[[list[Sequence], Tensor], Tensor | None]
"""Sequences and their next tokens `(n,)` on the device to logits `(n, vocab)`; `None` where that needs the host."""


class Launched(NamedTuple):
    """A step that runs on the device, for `n` sequences."""

    logits: Tensor  # (n, vocab)
    # its place, and what it is if all went as guessed: its length, its last token, the last block of each table
    rows: dict[Sequence, tuple[int, tuple[int, int, list[int]]]]


class RunAhead:
    """Launches steps before their time, and gives their logits when it has come."""

    def __init__(self, memory: PagedMemory, scheduler: Scheduler) -> None:
        self._memory, self._scheduler = memory, scheduler
        self._launched: Launched | None = None

    def clear(self) -> None:
        """Forgets what was launched."""
        self._launched = None

    def fetch(self, ready: list[tuple[Generation, Tensor]], launch: Launch) -> Fetch | None:
        """
        What brings the tokens of all these generations' rows, `(n,)` in their order, to the host, and launches the next
        step meanwhile; `None` where that is out of the question.
        """
        sequences: list[Sequence] = []
        for generation, _ in ready:
            if not isinstance(generation.decoding, SampleDecoding):
                return None
            for row in generation.decoding.open_rows:
                request, index = generation.rows[row]
                sequences.append(request.sequences[index])
        return lambda tokens: self._fetch(sequences, tokens, launch)

    def _fetch(self, sequences: list[Sequence], tokens: Tensor, launch: Launch) -> list[int]:
        arrived = _send(tokens)
        # rows that cannot but go on, or end by what the token is
        going = [row for row, each in enumerate(sequences) if each.num_tokens + 1 < each.request.max_num_tokens]
        logits = self._launch(sequences, going, tokens, launch)
        found = arrived()
        if logits is not None:
            states = ((sequences[row].num_tokens + 1, found[row], _tails(sequences[row])) for row in going)
            self._launched = Launched(logits, dict(zip([sequences[row] for row in going], enumerate(states))))
        return found

    def _launch(self, sequences: list[Sequence], going: list[int], tokens: Tensor, launch: Launch) -> Tensor | None:
        if not going or len(tokens) != len(sequences):
            return None
        chosen = [sequences[row] for row in going]
        with self._memory.lock:
            if not self._scheduler.reserve_next(chosen, len(sequences) - len(going)):
                return None
        if len(going) < len(sequences):
            tokens = tokens[torch.tensor(going, device=tokens.device)]
        try:
            return launch(chosen, tokens)
        except Exception:  # what is wrong will be found, and told, when the step's time has come
            logger.debug("a step could not be launched ahead", exc_info=True)
            return None

    def take(self, items: list[tuple[Sequence, int]]) -> tuple[Tensor | None, int]:
        """Logits `(n, vocab)` of the first `n` of the scheduled items, which were launched ahead, and `n`."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None, 0
        found: list[int] = []
        for sequence, query_len in items:
            row, guessed = launched.rows.get(sequence, (0, None))
            # a caller's code may have chosen another token; a preempted sequence may have other blocks
            now = len(sequence.token_ids), sequence.token_ids[-1], _tails(sequence)
            if query_len != 1 or sequence.num_to_compute or now != guessed:
                break
            found.append(row)
        if not found:
            return None, 0
        logits = launched.logits
        if found != list(range(len(logits))):
            logits = logits[torch.tensor(found, device=logits.device)]
        return logits, len(found)


def _tails(sequence: Sequence) -> list[int]:
    return [table.block_ids[-1] for table in sequence.blocks.tables]


def _send(tokens: Tensor) -> Callable[[], list[int]]:
    """Starts the copy to the host; what is returned waits for it, and for nothing launched after it."""
    if tokens.device.type != "cuda":
        found: list[int] = tokens.tolist()
        return lambda: found
    with torch.cuda.device(tokens.device):
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True)
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

    def arrived() -> list[int]:
        done.synchronize()
        return list(host.tolist())

    return arrived
