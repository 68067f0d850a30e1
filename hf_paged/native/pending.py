"""An unfinished request of a continuous-batching manager, and the conversion of its outputs to
transformers' `GenerationOutput`."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..batching.prompt_forms import prompt_ids
from ..batching.results import RequestOutput, RequestResult
from ..interrupts import is_interrupt
from ..topics import Topic

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class PendingRequest:
    """An unfinished request of a manager: its arguments for the engine, and its tokens so far. Each
    of its sequences is a row."""

    output_ids: list[str]  # by row; the last one is the request's id
    prompt: Any
    # called in the engine's thread, where an error ends only this request
    make_config: Callable[[], GenerationConfig]
    seed: int | None
    is_streaming: bool
    has_timestamps: bool
    tokenizer: Any  # for stop strings; if `None`, the engine's
    options: Mapping[str, Any]  # further arguments of `PagedEngine.add_request`
    # called in the engine's thread, before the last outputs are delivered
    on_result: Callable[[RequestResult], None] | None
    created_at: float = field(default_factory=time.perf_counter)  # seconds of `perf_counter`
    # `perf_counter` time of the first output; once the request has ended, of its admission;
    # -1 before the first output
    started_at: float = -1.0

    def __post_init__(self) -> None:
        # tokens so far, by row of the engine's request
        self.tokens = defaultdict[int, list[int]](list)
        # the `time.perf_counter()` of each of these tokens, by row of the engine's request
        self.times = defaultdict[int, list[float]](list)
        try:
            self.prompt_ids = prompt_ids(self.prompt, None)
        except Exception as error:  # the engine reports the error
            if is_interrupt(error):
                raise
            self.prompt_ids = []

    def add(self, output: RequestOutput) -> list[GenerationOutput]:
        """Adds the engine's output of a step, and returns the outputs to deliver."""
        now = time.perf_counter()
        if self.started_at < 0:
            self.started_at = now
        for row, token in output.new_tokens.items():
            self.tokens[row].append(token)
            self.times[row].append(now)
        if output.result is not None:
            return self.end(output.result)
        if not self.is_streaming:
            return []
        num_rows = len(self.output_ids)
        rows = [row for row in range(num_rows) if self._engine_row(row) in output.new_tokens]
        return [self._make_output(row, RequestStatus.DECODING) for row in rows]

    def fail(self, error: Exception) -> list[GenerationOutput]:
        """Ends the request with an error; returns its last outputs, with the tokens so far."""
        return self.end(RequestResult(self.output_ids[-1], [], error=error))

    def end(self, result: RequestResult) -> list[GenerationOutput]:
        """Ends the request with a result; calls `on_result` and returns its last outputs."""
        if self.on_result is not None:
            try:
                self.on_result(result)
            except Exception as error:  # the outputs must still be delivered
                message = Topic.CONTINUOUS_BATCHING("`on_result` raised for request %r")
                logger.error(message, self.output_ids[-1], exc_info=error)
        now = time.perf_counter()
        final_error = result.error
        if final_error is None and result.finish_reason == "cancelled":
            final_error = RuntimeError("the request was cancelled")
        if result.timings.queued is not None:
            self.started_at = self.created_at + result.timings.queued
        status = RequestStatus.FINISHED if final_error is None else RequestStatus.FAILED
        outputs = []
        for row in range(len(self.output_ids)):
            changes: dict[str, Any] = {"lifespan": (self.started_at, now)}
            if final_error is not None:
                changes["error"] = str(final_error)
            # the result's tokens, since a beam search has none before it ends; if all rows are
            # equal, the result has only one sequence
            sequences = result.sequences[: row + 1]
            if sequences:
                changes["generated_tokens"] = list(sequences[-1].token_ids)
                changes["logprobs"] = [processed for _, processed in sequences[-1].logprobs or ()]
            outputs.append(replace(self._make_output(row, status), **changes))
        return outputs

    def _engine_row(self, row: int) -> int:
        """Returns the row of the engine's request that holds the tokens of `row`. The engine has
        only row 0 if all rows would be equal (greedy search)."""
        return row if row in self.tokens else 0

    def _make_output(self, row: int, status: RequestStatus) -> GenerationOutput:
        engine_row = self._engine_row(row)
        return GenerationOutput(
            self.output_ids[row],
            prompt_ids=self.prompt_ids,
            generated_tokens=list(self.tokens[engine_row]),
            status=status,
            created_time=self.created_at,
            lifespan=(self.started_at, -1),
            timestamps=list(self.times[engine_row]) if self.has_timestamps else None,
        )


def make_output_ids(request_id: str, num_sequences: int) -> list[str]:
    """Returns the ids of a request's outputs, by row; the last one is the request's id."""
    child_ids = [f"{request_id}__child#{i}" for i in range(num_sequences - 1)]
    return [*child_ids, request_id]
