"""The results of a stage, on disk as soon as they are known."""

from __future__ import annotations

import contextlib
import json
import logging
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.report import replace_file

CUDA, FAKE = "cuda", "fake"
NO_DEVICE = "no device"


class Skipped(Exception):
    """The stage does not run here, for the reason given."""


class Record:
    """The results of a stage. Each row is written at once, so that a stage that is killed leaves
    the rows before.

    Args:
        path (`Path`): The JSON file.
        device (`str`): "cuda", or "fake": the same code on small sizes on the CPU.
        seconds (`float`): Time that the stage should take.
    """

    def __init__(
        self, path: Path, device: str, seconds: float, cache: str = "", revision: str = ""
    ) -> None:
        self.path, self.device, self.cache, self._revision = path, device, cache, revision
        self.until = time.monotonic() + seconds
        self.facts: dict[str, Any] = {}
        self.rows: list[dict[str, Any]] = []

    @property
    def is_fake(self) -> bool:
        return self.device == FAKE

    @property
    def torch_device(self) -> str:
        return "cpu" if self.is_fake else "cuda"

    @property
    def left(self) -> float:
        """Seconds until the stage should end."""
        return self.until - time.monotonic()

    def note_machine(self, **facts: Any) -> None:
        """Records machine and software, and further facts."""
        from benchmarks import machine

        self.facts = {**machine.facts(self.torch_device), **facts}
        if self._revision:
            self.facts["revision"] = self._revision
        self.write()

    def add(self, **row: Any) -> None:
        """Adds a row; with a `problem` that is not empty the stage counts as failed."""
        self.rows.append(row)
        self.write()

    @contextlib.contextmanager
    def guard(self, **row: Any) -> Iterator[None]:
        """Around one part of a stage: an error that ends it becomes a row, and the stage goes
        on."""
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.add(**row, problem=first_lines(error))

    @property
    def status(self) -> str:
        """What the rows say of the stage: "ok", or how many of them have a problem."""
        problems = sum(bool(row.get("problem")) for row in self.rows)
        return (
            f"failed: {problems} of {len(self.rows)}"
            if problems
            else "ok"
            if self.rows
            else "failed: no results"
        )

    def write(self, **ending: Any) -> None:
        data = {"facts": self.facts, "rows": self.rows, **ending}
        replace_file(self.path, json.dumps(data, indent=1, default=str) + "\n")


def first_lines(error: BaseException, lines: int = 3) -> str:
    """Type and first lines of an error, and where it was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    told = [line.strip()[:160] for line in str(error).splitlines() if line.strip()][:lines]
    return f"{type(error).__name__}: {' / '.join(told)}{where}"


@contextlib.contextmanager
def warnings_logged() -> Iterator[list[str]]:
    """Collects the warnings that the package logs, such as why a kernel is not used."""
    messages: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            messages.append(record.getMessage()[:300])

    handler, logger = Handler(logging.WARNING), logging.getLogger("hf_paged")
    logger.addHandler(handler)
    try:
        yield messages
    finally:
        logger.removeHandler(handler)
