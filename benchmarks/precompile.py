"""Compiles the candidates of `benchmarks.tune` into Triton's cache without a GPU; a machine with
the GPU then only measures.

Triton looks up compiled kernels by source, types, constants, options and its version.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import torch

from benchmarks import tune
from benchmarks.aot import in_processes, only_compile, require_compiler
from benchmarks.chips import CHIPS
from hf_paged.kernels.triton.configs import LaunchConfig


class Job(NamedTuple):
    chip: str
    kernel: str  # a key of `tune.TASKS`
    dim: int
    dtype: str
    task: int  # index among the tasks of this kernel, head dim and dtype
    option: int  # index among the candidates of the task


def _tasks(chip: str, kernel: str, dim: int, dtype: str) -> list[tune.Task]:
    return tune.TASKS[kernel](dim, getattr(torch, dtype), chip.replace("sm_", "sm"))


def jobs(chip: str, shapes: Sequence[tuple[str, int, str]], most: int | None = None) -> list[Job]:
    """One job per candidate of a task, at most `most`. Candidates that differ only in programs per
    multiprocessor, which is not compiled in, share a job."""
    found = []
    for kernel, dim, dtype in shapes:
        for number, task in enumerate(_tasks(chip, kernel, dim, dtype)):
            first: dict[LaunchConfig, int] = {}
            for i, config in enumerate(task.options):
                first.setdefault(dataclasses.replace(config, programs_per_sm=1), i)
            found += [Job(chip, kernel, dim, dtype, number, i) for i in list(first.values())[:most]]
    return found


def _compile(job: Job) -> str:
    """Compiles all that measuring a candidate runs; returns the error, or an empty string."""
    device = torch.device("meta")
    task = _tasks(job.chip, job.kernel, job.dim, job.dtype)[job.task]
    config = task.options[job.option]
    try:
        with only_compile(CHIPS[job.chip]):
            for problem in (task.problem(device), *task.problems(device)):
                task.run(problem, config)
    except Exception as error:  # a compiler error: the candidate is left out on a GPU, too
        return f"{task.key} {config}: {type(error).__name__}"
    return ""


def precompile(
    chip: str, shapes: Sequence[tuple[str, int, str]], processes: int, most: int | None = None
) -> str:
    """
    Compiles the candidates; returns a line with their number.

    Args:
        chip (`str`): One of `CHIPS`.
        shapes (`Sequence[tuple[str, int, str]]`): Kernel, head dimension and dtype of each table
            entry.
        processes (`int`): Number of parallel compilers.
        most (`int`, *optional*): Most candidates per entry; `None`: all.
    """
    require_compiler()
    work, failed, start = jobs(chip, shapes, most), 0, time.perf_counter()
    for number, problem in enumerate(in_processes(_compile, work, processes), start=1):
        failed += bool(problem)
        print(f"{number} of {len(work)} {problem}".strip(), file=sys.stderr, flush=True)
    seconds = time.perf_counter() - start
    return f"{len(work) - failed} of {len(work)} candidates compiled for {chip} in {seconds:.0f} s"
