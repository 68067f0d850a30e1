"""Stages for tests, which end in all ways. Imports little, so that they start at once: `python -m
tests.benchmarks.failing_stages NAME ... PATH`."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from benchmarks import report


def works(add):
    add(what="first")


def crashes(add):
    works(add)
    sys.stdout.buffer.write(b"\xff\xf0" * 100_000)
    sys.stdout.flush()
    os.kill(os.getpid(), signal.SIGSEGV)


def hangs(add):
    works(add)
    add(child=subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3600)"]).pid)
    time.sleep(3600)


def raises(add):
    raise ValueError("out of luck")


def is_silent(add):
    print("nothing")


def main(name, path):
    """Runs a stage; the rows that it adds are in the file at once."""
    rows = []

    def add(**row):
        rows.append(row)
        report.replace_file(path, json.dumps({"rows": rows}))

    globals()[name](add)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[-1]))
