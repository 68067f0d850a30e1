"""An unfinished request of a continuous-batching manager, and its outputs in transformers' form."""

from __future__ import annotations

import logging
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from transformers import GenerationConfig
from transformers.generation.continuous_batching import RequestStatus
from transformers.generation.continuous_batching.requests import GenerationOutput

from ..batching.prompt_forms import prompt_ids
from ..batching.results import RequestOutput, RequestResult
from ..topics import Topic

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class Pending:
    """An unfinished request of a manager; `names` are the ids of its outputs, `names[-1]` is the
    engine's id."""

    names: list[str]
    prompt: Any
    # called in the engine's thread: its errors end this request
    make_config: Callable[[], GenerationConfig]
    seed: int | None
    is_streaming: bool
    records_times: bool
    tokenizer: Any  # for stop strings; the engine's if None
    options: Mapping[str, Any]  # further arguments of `PagedEngine.add_request`
    # called in the engine's thread, before its last outputs
    on_result: Callable[[RequestResult], None] | None
    created: float = field(default_factory=time.perf_counter)
    started: float = -1.0

    def __post_init__(self) -> None:
        # of the tokens generated so far, by row of the engine's request
        self.tokens = defaultdict[int, list[int]](list)
        self.times = defaultdict[int, list[float]](list)
        try:
            self.prompt_ids = prompt_ids(self.prompt, None)
        except Exception:  # the engine reports the error
            self.prompt_ids = []

    def add(self, output: RequestOutput) -> list[GenerationOutput]:
        """Records a step's output and returns the outputs to deliver."""
        now = time.perf_counter()
        if self.started < 0:
            self.started = now
        for row, token in output.new_tokens.items():
            self.tokens[row].append(token)
            self.times[row].append(now)
        if output.result is not None:
            return self.end(output.result)
        if not self.is_streaming:
            return []
        rows = [row for row in range(len(self.names)) if self._row(row) in output.new_tokens]
        return [self._output(row, RequestStatus.DECODING) for row in rows]

    def fail(self, error: Exception) -> list[GenerationOutput]:
        """Returns the last outputs, with the tokens so far."""
        return self.end(RequestResult(self.names[-1], [], error=error))

    def end(self, result: RequestResult) -> list[GenerationOutput]:
        """Returns the last outputs."""
        if self.on_result is not None:
            try:
                self.on_result(result)
            except Exception as caught:  # the outputs must still be delivered
                logger.error(Topic.CONTINUOUS_BATCHING("`on_result` raised"), exc_info=caught)
        now = time.perf_counter()
        error = result.error
        if error is None and result.finish_reason == "cancelled":
            error = RuntimeError("the request was cancelled")
        if result.timings.queued is not None:
            self.started = self.created + result.timings.queued
        status = RequestStatus.FINISHED if error is None else RequestStatus.FAILED
        outputs = []
        for row in range(len(self.names)):
            output = self._output(row, status)
            output.error = None if error is None else str(error)
            output.lifespan = (self.started, now)
            # an engine computes one row where all would be equal; only now are beams' tokens final
            sequences = result.sequences[: row + 1]
            if sequences:
                output.generated_tokens = list(sequences[-1].token_ids)
                output.logprobs = [processed for _, processed in sequences[-1].logprobs or ()]
            outputs.append(output)
        return outputs

    def _row(self, row: int) -> int:
        """The row of the engine's request, which has only row 0 where all rows would be equal
        (greedy search)."""
        return row if row in self.tokens else 0

    def _output(self, row: int, status: RequestStatus) -> GenerationOutput:
        engine_row = self._row(row)
        return GenerationOutput(
            self.names[row],
            prompt_ids=self.prompt_ids,
            generated_tokens=list(self.tokens[engine_row]),
            status=status,
            created_time=self.created,
            lifespan=(self.started, -1),
            timestamps=list(self.times[engine_row]) if self.records_times else None,
        )


def output_names(request_id: str, num_sequences: int) -> list[str]:
    """The ids of a request's outputs, by row."""
    further = [f"{request_id}__child#{i}" for i in range(num_sequences - 1)]
    return [*further, request_id]
