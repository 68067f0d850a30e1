"""Checks whether recorded steps give the results of the model's own forward, and remembers the
outcomes. The runner runs the step and the forward."""

from __future__ import annotations

import operator
from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from ..batching.execution.inputs import PackedTokens
from ..model.trial import significant_difference
from .recorders import unrecorded

# number of futile calls after which the pattern of `Checks.needs_state` starts again
RETRY_PERIOD = 64


class Checks:
    """The outcomes of the checks of one model's recorded steps, by kind of step.

    In a recording, the forward gets as many columns as the block tables can hold tokens. The rows
    may have fewer, and code that depends on the number of columns may then give different results.
    So a check is valid only for tables of the checked size, and for steps whose longest row is at
    least as long as the longest row of the checked step: in steps with shorter rows, the forward
    gets more columns without a token. A kind whose results differ once is refused for tables of any
    size."""

    def __init__(self) -> None:
        self._refused = dict[Hashable, str]()  # reasons against replays, by kind
        # by kind and number of columns of each layer group's tables: for each group, the length of
        # the longest row, in the checked step where it was shortest. Lengths include padding and
        # dropped blocks.
        self._min_lengths: dict[tuple[Hashable, tuple[int, ...]], list[int]] = {}
        # by the names of a step's tensors: the inputs that its forward returns unchanged as outputs
        # (`step_inputs.PassedInputs`)
        self.passed_inputs: dict[Hashable, dict[str, Any]] = {}
        # consecutive calls of `needs_state` while no step could be recorded
        self._num_futile_calls = 0
        # the kind, table columns and row lengths of the last step, if it must be checked
        self.pending: tuple[Hashable, tuple[int, ...], list[int]] | None = None
        # layers with copies of the rows' states, for the replay of that step
        self.copied_states: Sequence[Any] = ()

    def clear(self) -> None:
        self._refused.clear()
        self._min_lengths.clear()
        self.passed_inputs.clear()

    def needs_state(self, unsupported_reason: str | None, slowed_by: set[str]) -> bool:
        """As `Recorder.needs_state`. `unsupported_reason`: why no step can be recorded, or `None`.
        If there is a reason, or if all checked kinds of steps are refused, the call is futile. Of
        consecutive futile calls, returns `True` in the 1st, 2nd, 4th, ..., 64th, then again in the
        65th, 66th, 68th, ...; in the others, adds the reason to `slowed_by`."""
        reason = unsupported_reason
        checked = {kind for kind, _ in self._min_lengths}
        if reason is None and checked and checked.issubset(self._refused):
            reason = next(iter(self._refused.values()))
        if reason is None:
            self._num_futile_calls = 0
            return True
        self._num_futile_calls += 1
        number = self._num_futile_calls % RETRY_PERIOD
        is_due = number & (number - 1) == 0
        if not is_due:
            slowed_by.add(unrecorded(reason))
        return is_due

    def begin_step(self, kind: Hashable) -> str | None:
        """Starts a step. Returns why steps of this kind are not replayed, or `None`."""
        self.pending = None
        self.copied_states = ()
        return self._refused.get(kind)

    def choose(self, kind: Hashable, widths: tuple[int, ...], tokens: PackedTokens) -> None:
        """Sets `pending` if a replay of this step must be checked. `widths`: columns of each layer
        group's tables in the recording."""
        ends = (map(operator.add, group.seq_lens, group.origins) for group in tokens.groups)
        lengths = [*map(max, ends)]
        min_lengths = self._min_lengths.get((kind, widths))
        if min_lengths is None or any(map(operator.lt, lengths, min_lengths)):
            self.pending = (kind, widths, lengths)

    def copy(self, layers: Sequence[Any], num_rows: int) -> Sequence[Any]:
        """Returns layers that hold copies of the states of the first `num_rows` rows of `layers`,
        for a replay to change; empty if `layers` is empty."""
        if layers:
            from ..rectangles.states import StateRows

            rows = StateRows([(layers, list(range(num_rows)))])
            self.copied_states = rows.state_layers
        return self.copied_states

    def compare(
        self,
        results: Iterable[tuple[Tensor, Tensor]],
        dtype: torch.dtype | None,
        reason: str | None = None,
    ) -> None:
        """Ends a check: compares pairs of results `(rows, ...)` from the model's own forward and
        from the replay, and refuses the kind if a pair differs by more than rounding in its dtype
        or in `dtype`, or if there is a `reason` against it."""
        assert self.pending is not None
        kind, widths, lengths = self.pending
        self.begin_step(kind)
        difference = None
        for expected, replayed in results:
            pair = expected.flatten(1), replayed.flatten(1)
            difference = difference or significant_difference(*pair, (expected.dtype, dtype))
        if difference is not None:
            reason = f"their results differ by {difference} from those of the model's own forward"
        if reason is not None:
            self._refused[kind] = reason
        min_lengths = self._min_lengths.setdefault((kind, widths), lengths)
        min_lengths[:] = map(min, min_lengths, lengths)
