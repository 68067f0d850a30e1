"""Stage (b): `generate("paged")` gives plain `generate`'s tokens in float32, most telling first."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from benchmarks.gpu_day.features import FEATURES, Job
from benchmarks.gpu_day.record import Record, first_lines, warnings_logged
from benchmarks.workers import Lost, in_workers
from tests.support import architectures

SECONDS = 120.0  # of one family
CUDA_PROCESSES, FAKE_PROCESSES = 8, 2  # most of the time goes into compiling

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


def run(record: Record) -> None:
    """Rows for each mode of each family, and one for each feature."""
    record.note_machine()
    names = ["LlamaForCausalLM", *FEATURES, *FAMILIES]
    jobs = [Job(name, record.torch_device) for name in dict.fromkeys(names)]
    processes = FAKE_PROCESSES if record.is_fake else CUDA_PROCESSES
    started = set()
    for job, rows in in_workers(check, jobs, processes, SECONDS, record.until):
        started.add(job)
        for row in [{"what": job.name, "problem": rows.reason}] if isinstance(rows, Lost) else rows:
            record.add(**row)
    for job in jobs:
        if job not in started:
            record.add(what=job.name, note="no time left")


def check(job: Job) -> list[dict[str, Any]]:
    """The rows of one job. It never raises."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    transformers.logging.set_verbosity_error()
    start = time.monotonic()
    with warnings_logged() as messages:
        try:
            rows = [FEATURES[job.name](job)] if job.name in FEATURES else check_family(job)
        except Exception as error:
            rows = [{"problem": first_lines(error)}]
    rows = [{"what": job.name, **row} for row in rows]
    rows[0] |= {
        "warnings": " / ".join(dict.fromkeys(messages)),
        "took": round(time.monotonic() - start, 1),
    }
    return rows


def check_family(job: Job) -> list[dict[str, Any]]:
    """A row for each mode of `tests.support.architectures`, on this device."""
    modes = ("greedy",) if job.is_fake else tuple(architectures.MODES)
    result = architectures.check(job.name, job.device, modes, **FAMILIES[job.name])
    rows = [
        {
            "mode": name,
            "equal": mode.status == "equal",
            "first": mode.detail,
            "road": mode.road,
            "problem": ""
            if mode.status in ("equal", "not served", "refused")
            else f"{mode.status}: {mode.detail}",
        }
        for name, mode in result.modes.items()
    ]
    if not rows:
        return [{"equal": False, "problem": f"{result.status}: {result.detail}"}]
    rows[0] |= {"in_place": result.in_place, "replayed": result.replayed, "reason": result.reason}
    return rows
