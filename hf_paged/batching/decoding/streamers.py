"""One streamer for every row of a `generate` call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from transformers import StoppingCriteriaList
from transformers.generation.streamers import BaseStreamer


class RowStreamers(BaseStreamer):
    """
    Gives each row that `generate` returns to a streamer of its own: the row's prompt without padding, where the
    `(prompts, length)` attention mask is zero, its tokens until it ends, and `end` there.
    """

    def __init__(self, streamers: Sequence[BaseStreamer], attention_mask: torch.Tensor | None = None) -> None:
        self.streamers = list(streamers)
        self.attention_mask = attention_mask
        self._ended: set[int] = set()
        self._ending: set[int] = set()

    def put(self, value: torch.Tensor) -> None:
        """Prompts `(rows, length)`, then one token of each row, `(rows,)`. Raises `ValueError` on another number."""
        if len(value) != len(self.streamers):
            raise ValueError(f"{len(self.streamers)} streamers were passed for {len(value)} rows: pass one a row")
        for row, streamer in enumerate(self.streamers):
            if row in self._ended:
                continue
            part = value[row : row + 1]
            if value.dim() == 2 and self.attention_mask is not None:
                mask = self.attention_mask[row * len(self.attention_mask) // len(value)]
                part = part[:, mask.to(part.device) != 0] if len(mask) == part.shape[1] else part
            streamer.put(part)
        self._end(self._ending)

    def note(self, rows: Iterable[int]) -> None:
        """Rows that the criteria ended: the next `put` is their last."""
        self._ending.update(rows)

    def end(self) -> None:
        """Ends the rows that have not ended."""
        self._end(set(range(len(self.streamers))))

    def _end(self, rows: set[int]) -> None:
        for row in sorted(rows - self._ended):
            self._ended.add(row)
            self.streamers[row].end()


class ObservedCriteria(StoppingCriteriaList):
    """The same criteria; `streamers` hears which rows they end."""

    def __init__(self, criteria: StoppingCriteriaList, streamers: RowStreamers) -> None:
        super().__init__(criteria)
        self._streamers = streamers

    def __call__(self, input_ids: torch.Tensor, scores: tuple[torch.Tensor, ...] | None, **kwargs: Any) -> torch.Tensor:
        is_done = super().__call__(input_ids, scores, **kwargs)
        self._streamers.note(is_done.nonzero().flatten().tolist())
        return is_done
