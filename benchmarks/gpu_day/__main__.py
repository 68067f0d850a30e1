"""
The first minutes on a GPU: whether everything works, and how fast.

    python -m benchmarks.gpu_day [--minutes 9] [--out FOLDER] [--only a,c] [--device cuda|fake]

Stages, each in a process with a limit: 0 compiles kernels beside a; a runs every kernel once; b
compares tokens with plain `generate`; c, d and e measure attention, steps and whole calls; f runs
`pytest -m gpu`. The results of a stage are written when it ends, and the summary comes last. Needs
neither a network nor `.git`. With `--device fake` the same code runs on small sizes on the CPU; it
shows that it runs, and its figures say nothing.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.gpu_day.record import CUDA, FAKE
from benchmarks.gpu_day.runner import MINUTES, STAGES, Options, run
from benchmarks.runner import option

MOST_MINUTES = 24 * 60


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = runner.parser_of(__doc__, OPTIONS)
    args = parser.parse_args(argv)
    names = [stage.name for stage in STAGES]
    only = runner.parts(parser, args.only, names) or names
    out = args.out or Path(tempfile.mkdtemp(prefix="gpu_day-"))
    cache = None if args.cache is None else args.cache.resolve()
    for folder in (out, *filter(None, [cache])):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=folder).close()
        except OSError as error:
            parser.error(f"{folder} must be a folder that can be written to: {error}")
    options = Options(args.minutes, out.resolve(), args.device, cache, args.revision)
    return run([stage for stage in STAGES if stage.name in only], options)


def minutes(content: str) -> float:
    """The value of `--minutes`."""
    number = float(content)
    if not 0 < number <= MOST_MINUTES:
        raise argparse.ArgumentTypeError(f"{content} is not between 0 and {MOST_MINUTES}")
    return number


OPTIONS = {
    "--minutes": option("for all stages (%(default)g)", type=minutes, default=MINUTES),
    "--out": option("folder of the results, at most 8 files (a new one)", type=Path),
    "--only": option("stages, for example a,c; without it all", default=""),
    "--device": option(choices=[CUDA, FAKE], default=CUDA),
    "--cache": option("folder of compiled kernels, perhaps carried along", type=Path),
    "--revision": option("of the checkout, where there is no .git", default=""),
}

if __name__ == "__main__":
    raise SystemExit(main())
