"""Jobs in processes: one that crashes or takes too long loses only its current job."""

from __future__ import annotations

import collections
import multiprocessing
import queue
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, NamedTuple, TypeVar

Job = TypeVar("Job")
Result = TypeVar("Result")

START_SECONDS = 120.0  # for a process to import what its work needs


class Lost(NamedTuple):
    """A job that gave no result."""

    reason: str


def in_workers(
    work: Callable[[Job], Result],
    jobs: Sequence[Job],
    processes: int,
    seconds: float,
) -> Iterator[tuple[Job, Result | Lost]]:
    """
    Each job with its result, or with the reason why it has none, in the order in which they end.

    Args:
        work (`Callable`): A function of a module; it must not raise.
        jobs (`Sequence`): Begun in this order.
        processes (`int`): Number of processes.
        seconds (`float`): Most seconds of a job.
    """
    waiting, ended, is_over = collections.deque(jobs), queue.SimpleQueue[Any](), threading.Event()
    workers = [_Worker(work) for _ in range(min(processes, len(jobs)))]

    def serve(worker: _Worker) -> None:
        while waiting and not is_over.is_set():
            try:
                job = waiting.popleft()
            except IndexError:  # another thread took it
                break
            ended.put((job, worker.run(job, seconds)))
        worker.stop()
        ended.put(None)

    threads = [threading.Thread(target=serve, args=(worker,), daemon=True) for worker in workers]
    for thread in threads:
        thread.start()
    try:
        num_open = len(threads)
        while num_open:
            item = ended.get()
            if item is None:
                num_open -= 1
            else:
                yield item
    finally:
        is_over.set()
        for worker in workers:
            worker.stop()


class _Worker:
    """A process that runs jobs; replaced if it dies or takes too long."""

    def __init__(self, work: Callable[[Any], Any]) -> None:
        self._work = work
        self._process: BaseProcess | None = None

    def run(self, job: Any, seconds: float) -> Any:
        try:
            pipe = self._pipe if self._process is not None else self._start()
            pipe.send(job)
            if pipe.poll(seconds):
                return pipe.recv()
            reason = f"no result within {seconds:.0f} s"
        except (EOFError, OSError) as error:
            reason = f"the process died{self._exit_status()} {error}".strip()
        self.stop()
        return Lost(reason)

    def _start(self) -> Connection:
        context = multiprocessing.get_context("spawn")
        self._pipe, other = context.Pipe()
        self._process = context.Process(target=_serve, args=(other, self._work))
        self._process.start()
        other.close()
        if not self._pipe.poll(START_SECONDS):
            raise OSError(f"no start within {START_SECONDS:.0f} s")
        self._pipe.recv()
        return self._pipe

    def _exit_status(self) -> str:
        process = self._process
        if process is None:
            return ""
        process.join(1)
        return "" if process.exitcode is None else f" with exit status {process.exitcode}"

    def stop(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.join(5)


def _serve(pipe: Connection, work: Callable[[Any], Any]) -> None:
    pipe.send(None)  # the imports are done
    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        pipe.send(work(job))
