"""Stage (b): `generate("paged")` gives plain `generate`'s tokens in float32, most telling first."""

from __future__ import annotations

import argparse
import time
from typing import Any

import torch
import transformers

from benchmarks import runner
from benchmarks.gpu_day import jobs
from benchmarks.runner import Data
from tests.support import architectures

SECONDS = 120.0  # of one family
CUDA_PROCESSES, CPU_PROCESSES = 8, 2  # most of the time goes into compiling
RIGHT = ("equal", "not served", "refused")

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


def check(job: tuple[str, str, bool]) -> list[Data]:
    """A row for each mode of `tests.support.architectures` of a family on a device."""
    name, device, is_quick = job
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    transformers.logging.set_verbosity_error()
    modes = ("greedy",) if is_quick else tuple(architectures.MODES)
    result = architectures.check(name, device, modes, **FAMILIES[name])
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
    until = time.monotonic() + 60 * args.minutes
    named = {name: (name, args.device, args.quick) for name in FAMILIES}
    processes = CPU_PROCESSES if args.device == "cpu" else CUDA_PROCESSES
    return {"rows": jobs.rows_of(check, named, processes, SECONDS, until, keep)}


main = runner.Benchmark(
    __doc__, measure=measure, options=jobs.OPTIONS, is_wrong=runner.fails()
).main

if __name__ == "__main__":
    raise SystemExit(main())
