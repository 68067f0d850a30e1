"""Stage (b): `generate("paged")` gives plain `generate`'s tokens in float32, most telling first: a
family in a process, of which one may crash or hang."""

from __future__ import annotations

import argparse
import time
import traceback
from typing import Any

import torch
import transformers

from benchmarks import report, runner
from benchmarks.runner import Data, option
from benchmarks.workers import Lost, in_workers
from tests.support import architectures

OPTIONS = {
    "--device": runner.DEVICE,
    "--minutes": option("for all (%(default)g)", type=float, default=3.0),
}
SECONDS = 120.0  # of one family
CUDA_PROCESSES, CPU_PROCESSES = 8, 2  # most of the time goes into compiling
RIGHT = ("equal", "not served", "refused")
Job = tuple[str, str, bool]  # family, device, quick

FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {},
    "MixtralForCausalLM": {},  # experts
    "Gemma3ForCausalLM": {},  # windows
    "Qwen3NextForCausalLM": {},  # linear attention
    "DeepseekV3ForCausalLM": {},  # latents
    "Gemma4ForCausalLM": {"head_dim": 256, "global_head_dim": 512},
    "T5ForConditionalGeneration": {},  # cross attention, a bias of positions
    "BloomForCausalLM": {},  # a bias for each head
    "WhisperForConditionalGeneration": {},  # sound
    "LlavaForConditionalGeneration": {},  # images
}
"""Classes of transformers, with changes to their tiny configs."""


def check(job: Job) -> list[Data] | Lost:
    """A row for each mode of `tests.support.architectures` of a family on a device, or its
    error."""
    name, device, is_quick = job
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    transformers.logging.set_verbosity_error()
    modes = ("greedy",) if is_quick else tuple(architectures.MODES)
    try:
        result = architectures.check(name, device, modes, **FAMILIES[name])
    except Exception as error:
        traceback.print_exc()
        return Lost(report.failed(error))
    if not result.modes:
        return [runner.row_of(name, "none", f"{result.status}: {result.detail}")]
    rows = []
    for mode, found in result.modes.items():
        problem = "" if found.status in RIGHT else f"{found.status}: {found.detail}"
        row = runner.row_of(name, mode, problem, road=found.road, status=found.status)
        if found.status in ("equal", "different"):
            row["equal"] = float(found.status == "equal")
        rows.append(row)
    more = {"in place": result.in_place, "replayed": result.replayed, "reason": result.reason}
    rows[0]["figures"] |= more
    return rows


def measure(args: argparse.Namespace, keep: Any) -> Data:
    """The rows of all families; those that no time was left for say so."""
    until, rows = time.monotonic() + 60 * args.minutes, list[Data]()
    jobs: list[Job] = [(name, args.device, args.quick) for name in FAMILIES]
    late = {job[0] for job in jobs}
    processes = CPU_PROCESSES if args.device == "cpu" else CUDA_PROCESSES
    for (name, *_), found in in_workers(check, jobs, processes, SECONDS, until):
        late.remove(name)
        is_lost = isinstance(found, Lost)
        rows += [runner.row_of(name, "a process", found.reason)] if is_lost else found
        keep({"rows": rows})
    notes = [runner.row_of(name, "a process", note="no time left") for name in sorted(late)]
    return {"rows": rows + notes}


main = runner.Benchmark(__doc__, measure=measure, options=OPTIONS, is_wrong=runner.fails()).main

if __name__ == "__main__":
    raise SystemExit(main())
