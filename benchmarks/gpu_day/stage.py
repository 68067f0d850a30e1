"""The process of one stage: `python -m benchmarks.gpu_day.stage JSON`, started by `runner`."""

from __future__ import annotations

import faulthandler
import importlib
import json
import sys
import time
import traceback
from pathlib import Path

from benchmarks.gpu_day.record import CUDA, NO_DEVICE, Record, Skipped, first_lines


def main() -> None:
    """Runs the function of a stage. What it prints goes to the log."""
    told = json.loads(sys.argv[1])
    seconds = told["seconds"]
    faulthandler.enable()
    # the log says where it hangs
    faulthandler.dump_traceback_later(told["start_seconds"] + seconds, exit=True)
    path = Path(told["path"])
    record = Record(path, told["device"], seconds, told["cache"], told["revision"])
    try:
        if told["device"] == CUDA:
            import torch

            if not torch.cuda.is_available():
                raise Skipped(NO_DEVICE)
        module, _, name = told["function"].partition(":")
        function = getattr(importlib.import_module(module), name)
        record.until = time.monotonic() + seconds  # begins after the imports
        faulthandler.dump_traceback_later(seconds + told["grace_seconds"], exit=True)
        function(record)
        status = record.status
    except Skipped as error:
        status = f"skipped: {error}"
    except Exception as error:
        traceback.print_exc()
        status = f"failed: {first_lines(error)}"
    record.write(status=status)


if __name__ == "__main__":
    main()
