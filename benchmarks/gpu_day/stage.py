"""The process of one stage."""

from __future__ import annotations

import argparse
import faulthandler
import importlib
import time
import traceback
from pathlib import Path

from benchmarks.gpu_day.record import CUDA, FAKE, NO_DEVICE, Record, Skipped, first_lines


def main() -> None:
    """Runs the function of a stage. What it prints goes to the log."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("function", help="module:function")
    parser.add_argument("path", type=Path, help="the JSON file")
    parser.add_argument("--device", choices=[CUDA, FAKE], required=True)
    parser.add_argument(
        "--seconds",
        type=float,
        required=True,
        help="that the stage should take, without its imports",
    )
    parser.add_argument("--start", type=float, required=True, help="most seconds of its imports")
    parser.add_argument(
        "--grace",
        type=float,
        required=True,
        help="seconds after which it ends itself, beyond these",
    )
    parser.add_argument("--cache", default="")
    parser.add_argument("--revision", default="")
    args = parser.parse_args()
    faulthandler.enable()
    # the log says where it hangs
    faulthandler.dump_traceback_later(args.start + args.seconds, exit=True)
    record = Record(args.path, args.device, args.seconds, args.cache, args.revision)
    try:
        if args.device == CUDA:
            import torch

            if not torch.cuda.is_available():
                raise Skipped(NO_DEVICE)
        module, _, name = args.function.partition(":")
        function = getattr(importlib.import_module(module), name)
        record.until = time.monotonic() + args.seconds  # begins after the imports
        faulthandler.dump_traceback_later(args.seconds + args.grace, exit=True)
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
