"""Which recorded steps give the results of the model's own forward, by checks that compare the two.
Running both is up to the runner."""

from __future__ import annotations

import logging
import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batching.execution.inputs import PackedTokens
from ..cache.states import StateRows
from ..model.trial import excess_of

logger = logging.getLogger(__name__)


class Checks:
    """The outcomes of the checks of one model's recorded steps, by kind of step.

    A recording gives the forward as many columns as its tables have room for, more than the rows
    have tokens, so code that depends on the number of columns may give other results. One check
    therefore holds for tables of one size, and for rows that are at least as long: with shorter
    rows, the two numbers differ more. A kind that differs once is refused for tables of any
    size."""

    def __init__(self) -> None:
        self._refused = set[Hashable]()
        # by kind and columns of each layer group's tables: the least length of each group's longest
        # row in the checks
        self._least: dict[tuple[Hashable, tuple[int, ...]], list[int]] = {}
        # the kind, table columns and row lengths of the last step, if it is to be checked
        self._pending: tuple[Hashable, tuple[int, ...], list[int]] | None = None
        self.copied_states: Sequence[Any] = ()  # layers with the states that its replay changes

    def clear(self) -> None:
        self._refused.clear()
        self._least.clear()

    def begin_step(self, kind: Hashable) -> bool:
        """Starts a step; returns whether steps of this kind may be replayed."""
        self._pending = None
        self.copied_states = ()
        return kind not in self._refused

    @property
    def is_pending(self) -> bool:
        """Whether the last step is to be checked."""
        return self._pending is not None

    def choose(self, kind: Hashable, widths: tuple[int, ...], tokens: PackedTokens) -> None:
        """Decides whether a replay of this step is to be checked. `widths`: columns of each layer
        group's tables in the recording."""
        ends = (map(operator.add, group.seq_lens, group.origins) for group in tokens.groups)
        lengths = [*map(max, ends)]
        least = self._least.get((kind, widths))
        if least is None or any(map(operator.lt, lengths, least)):
            self._pending = (kind, widths, lengths)

    def copy(self, states: Sequence[Any], num_rows: int) -> Sequence[Any]:
        """Returns layers with copies of the first rows' states, which a replay may change."""
        if states:
            rows = StateRows([(states, list(range(num_rows)))])
            self.copied_states = rows.state_layers
        return self.copied_states

    def compare(self, results: Iterable[tuple[Tensor, Tensor]], dtype: torch.dtype | None) -> None:
        """Ends a check: compares results of the model's own forward, in `dtype`, with those of the
        replay, both `(rows, ...)`."""
        assert self._pending is not None
        kind, widths, lengths = self._pending
        self.begin_step(kind)
        excess = None
        for own, replayed in results:
            pair = own.flatten(1), replayed.flatten(1)
            excess = excess or excess_of(*pair, (own.dtype, dtype))
        if excess is not None:
            self._refused.add(kind)
            logger.info("one kind of steps is not replayed: its results differ by %s", excess)
        least = self._least.setdefault((kind, widths), lengths)
        least[:] = map(min, least, lengths)
