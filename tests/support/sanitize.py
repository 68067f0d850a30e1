"""The C++ library under the compiler's sanitizers: `python -m tests.support.sanitize [address
undefined thread]`.

Builds the library with each sanitizer, by a compiler command that `CXX` names, in a folder of its
own; then runs the tests that call the library and random calls through each entry point
(`tests.support.kernel_fuzz`). A known error must be reported first, so that a library without the
sanitizer does not pass. Prints the reports; the exit code is 1 if there are any, or if a test or a
call fails. With `thread`, calls come from two threads at once, and the library's own threads are
std::threads (`omp_threads.cpp`), since ThreadSanitizer does not see what GNU OpenMP waits for.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from tests.support import tools
from tests.support.tools import ROOT

OPENMP = Path(__file__).with_name("omp_threads.cpp")
TESTS = [
    f"tests/{path}"
    for path in (
        *("kernels/cpp/test_attention.py", "kernels/cpp/test_draws.py"),
        *("kernels/cpp/test_gather.py", "kernels/test_hashing.py", "kernels/test_linear.py"),
        *("kernels/test_quantized.py", "tape", "attention/test_backends.py"),
        *("attention/test_quantized.py", "attention/test_malformed_arguments.py"),
    )
]


class Sanitizer(NamedTuple):
    flags: str  # of the compiler
    # libraries that must be loaded first; C++'s own, so that its exceptions are seen
    preload: tuple[str, ...]
    variable: str
    options: str
    report: str  # regular expression of the beginning of a report
    ignored: tuple[str, ...] = ()  # suppressions


SANITIZERS = {
    "address": Sanitizer(
        "-fsanitize=address -fsanitize-recover=address",
        ("libasan.so", "libstdc++.so"),
        "ASAN_OPTIONS",
        # Python frees little at its exit
        "detect_leaks=0:halt_on_error=0:allocator_may_return_null=1",
        r"ERROR: AddressSanitizer",
    ),
    "undefined": Sanitizer(
        "-fsanitize=undefined", (), "UBSAN_OPTIONS", "print_stacktrace=1", r"runtime error:"
    ),
    "thread": Sanitizer(
        f"-fsanitize=thread {shlex.quote(str(OPENMP))}",
        ("libtsan.so", "libstdc++.so"),
        "TSAN_OPTIONS",
        "exitcode=0",
        r"WARNING: ThreadSanitizer",
        (
            "race:libtorch_cpu.so",  # PyTorch's own threads are GNU OpenMP's
            # glibc frees what a finished thread kept in thread-local memory as a new thread takes
            # over its stack; the kernel orders the two, which ThreadSanitizer does not see
            "race:_dl_deallocate_tls",
        ),
    ),
}


def obstacle(name: str) -> str | None:
    """Why a sanitizer cannot run here; `None` if it can."""
    if sys.platform != "linux" or shutil.which("g++") is None:
        return "the sanitizers need g++ on Linux"
    libraries = SANITIZERS[name].preload
    missing = [library for library in libraries if not _library(library).is_absolute()]
    return f"g++ has no {', '.join(missing)}" if missing else None


def _library(name: str) -> Path:
    command = ["g++", f"-print-file-name={name}"]
    return Path(subprocess.run(command, capture_output=True, text=True).stdout.strip())


class Run:
    """Commands whose library has a sanitizer, which writes its reports to files of `folder`."""

    def __init__(self, name: str, folder: Path) -> None:
        self._sanitizer, self._folder = SANITIZERS[name], folder
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        compiler = folder / "g++"
        # quick to build, each access is kept
        flags = f"-O0 -g1 -fno-omit-frame-pointer {self._sanitizer.flags}"
        call = f'exec {shutil.which("g++")} "$@" {flags}'
        compiler.write_text(f"#!/bin/sh\nunset LD_PRELOAD\n{call}\n")
        compiler.chmod(0o700)
        self._environment = os.environ | {
            "CXX": str(compiler),
            "HF_PAGED_CACHE_DIR": str(folder / "library"),
            "OMP_NUM_THREADS": "1",
            "LD_PRELOAD": " ".join(str(_library(library)) for library in self._sanitizer.preload),
        }
        for other in ("HF_PAGED_CPP", "PYTEST_XDIST_WORKER", "PYTEST_ADDOPTS"):
            self._environment.pop(other, None)

    def __call__(self, title: str, *command: object) -> tuple[int, list[str]]:
        """Runs Python with these arguments; returns its exit code and the reports."""
        log = self._folder / re.sub(r"\W", "-", title)
        for old in self._folder.glob(f"{log.name}.*"):
            old.unlink()
        options = f"{self._sanitizer.options}:log_path={log}"
        if self._sanitizer.ignored:
            ignored = self._folder / "ignored"
            ignored.write_text("".join(f"{pattern}\n" for pattern in self._sanitizer.ignored))
            options += f":suppressions={ignored}"
        environment = self._environment | {self._sanitizer.variable: options}
        program = [sys.executable, *map(str, command)]
        code = subprocess.run(program, cwd=ROOT, env=environment).returncode
        logs = sorted(self._folder.glob(f"{log.name}.*"))
        text = "".join(path.read_text(errors="replace") for path in logs)
        beginnings = re.finditer(rf"^.*{self._sanitizer.report}", text, re.MULTILINE)
        starts = [beginning.start() for beginning in beginnings]
        return code, [text[start:end] for start, end in zip(starts, [*starts[1:], None])]


def commands(name: str, calls: int, seed: int, with_tests: bool) -> dict[str, list[object]]:
    """The arguments of Python that must give no report, by title."""
    half, fuzz = calls // 2, ["-m", "tests.support.kernel_fuzz", "--seed", seed, "--calls"]
    found: dict[str, list[object]] = {"random calls": [*fuzz, calls]}
    if name == "thread":
        alone = [*fuzz, calls - half, "--threads", 3]
        found = {"of two threads": [*fuzz, half, "--jobs", 2], "with three threads each": alone}
    if with_tests:
        options = ["-q", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
        found["tests"] = ["-m", "pytest", *options, *TESTS]
    return found


def check(
    name: str, folder: Path, calls: int, seed: int = 0, with_tests: bool = True
) -> tuple[int, int]:
    """Runs all under a sanitizer; returns the numbers of reports and of commands that failed."""
    run = Run(name, folder)
    start = time.monotonic()
    code, known = run("known error", "-m", "tests.support.sanitize", "--err", name)
    if not known:
        why = "the library has no sanitizer"
        print(f"{name}: a known error was not reported (exit code {code}): {why}")
        return 0, 1
    print(f"{name}: built, {time.monotonic() - start:.0f} s", flush=True)
    reports, failed = list[str](), 0
    for title, command in commands(name, calls, seed, with_tests).items():
        start = time.monotonic()
        code, found = run(title, *command)
        reports += found
        failed += code != 0
        ended = f"exit code {code}, {len(found)} reports, {time.monotonic() - start:.0f} s"
        print(f"{name}, {title}: {ended}", flush=True)
    for report in reports[:5]:
        print(report[:4000])
    return len(reports), failed


def err(name: str) -> None:
    """An error in a call of the library that the sanitizer must report."""
    import torch

    from hf_paged.kernels.cpp.build import kernel

    count = 1 if name != "thread" else 1 << 16
    table, numbers = torch.zeros(count + 8, 4), torch.zeros(count + 1, dtype=torch.int64)
    out = torch.empty(count, 4)
    if name == "address":  # a row more than there is place for
        count += 1
    address = numbers.data_ptr() + (1 if name == "undefined" else 0)  # numbers must be aligned
    sizes = (count, len(table), 16, 16, 16)
    call = struct.pack("3Q5q", table.data_ptr(), address, out.data_ptr(), *sizes)
    num_threads = 2 if name == "thread" else 1
    threads = [threading.Thread(target=kernel("pick"), args=(call,)) for _ in range(num_threads)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def main(argv: Sequence[str] | None = None) -> int:
    known = f"{', '.join(SANITIZERS)}; without any, all"
    parser = tools.parser(
        __doc__,
        seed=0,
        calls=(10_000, "through each entry point"),
        folder=(str, "keeps the libraries for the next run of these sources"),
        no_tests=(False, "random calls only"),
        err=dict(choices=list(SANITIZERS), help=argparse.SUPPRESS),
    )
    parser.add_argument("names", nargs="*", metavar="SANITIZER", help=known)
    options = parser.parse_args(argv)
    if options.err:
        err(options.err)
        return 0
    names = options.names or list(SANITIZERS)
    if unknown := set(names) - set(SANITIZERS):
        parser.error(f"unknown sanitizers: {', '.join(sorted(unknown))}; there are {known}")
    reports = failed = 0
    for name in names:
        if (reason := obstacle(name)) is not None:
            print(f"{name}: {reason}")
            failed += 1
            continue
        with tempfile.TemporaryDirectory(prefix="sanitize-") as temporary:
            folder = Path(options.folder or temporary).absolute() / name
            found, wrong = check(name, folder, options.calls, options.seed, not options.no_tests)
        reports, failed = reports + found, failed + wrong
    from hf_paged.kernels.cpp.build import KERNEL_NAMES

    num_calls = options.calls * len(KERNEL_NAMES) * len(names)
    print(f"{num_calls:,} calls, {reports} reports, {failed} failed")
    return int(bool(reports or failed))


if __name__ == "__main__":
    sys.exit(main())
