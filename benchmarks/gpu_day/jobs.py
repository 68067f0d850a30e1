"""The rows of stages whose parts run in processes, of which one may crash or hang."""

from __future__ import annotations

import functools
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks import report, runner
from benchmarks.runner import Data, option
from benchmarks.workers import Lost, in_workers

OPTIONS = {
    "--device": runner.DEVICE,
    "--minutes": option("for all (%(default)g)", type=float, default=3.0),
}


def rows_of(
    work: Callable[[Any], list[Data]],
    jobs: Mapping[str, Any],
    processes: int,
    seconds: float,
    until: float,
    keep: Callable[[Data], Any],
    rows: Sequence[Data] = (),
) -> list[Data]:
    """
    These rows and those of all jobs.

    Args:
        work (`Callable`): A function of a module: the rows of a job.
        jobs (`Mapping`): By name, begun in this order.
        processes, seconds, until: See [`in_workers`].
        keep (`Callable`): Gets the rows so far after each job.
    """
    rows, names = list(rows), {job: name for name, job in jobs.items()}
    for job, found in in_workers(
        functools.partial(attempt, work), list(names), processes, seconds, until
    ):
        name = names.pop(job)
        is_lost = isinstance(found, Lost)
        rows += [runner.row_of(name, "a process", found.reason)] if is_lost else found
        keep({"rows": rows})
    return rows + [runner.row_of(name, "a process", note="no time left") for name in names.values()]


def attempt(work: Callable[[Any], list[Data]], job: Any) -> list[Data] | Lost:
    """The rows of a job, or its error."""
    try:
        return work(job)
    except Exception as error:
        traceback.print_exc()
        return Lost(report.failed(error))
