"""Stage (a): the machine, and every kernel once against its reference, on odd shapes."""

from __future__ import annotations

import functools
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from typing import Any

import numpy
import torch
from packaging import version

from benchmarks.gpu_day.record import Record, Skipped, first_lines, warnings_logged
from benchmarks.workers import Lost, in_workers
from hf_paged.attention.backends import reference, triton
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels import quantized
from hf_paged.kernels.hashing import hash_portable
from hf_paged.kernels.triton import MAX_QUERIES
from tests.attention.test_backends import TOLERANCE, Call, Case, build
from tests.kernels.triton import test_cascade, test_copy, test_hash, test_lora, test_store
from tests.support.attention import attend
from tests.support.kernels.device import on_device

TRITON = metadata.version("triton")
HALF, SINGLE = torch.bfloat16, torch.float32
LLAMA: dict[str, Any] = dict(heads=32, kv_heads=8, key_dim=128, value_dim=128)
LONG, SHORT = (1000, 777, 0, 1, 64), (70, 3, 0, 33)  # tokens of the rows; long ones are split
# the interpreter takes its time
FAKE: dict[str, Any] = dict(seq_lens=(21, 3, 0), heads=2, kv_heads=1)
SECONDS = 60.0  # of one kernel


def run(record: Record) -> None:
    """A row for each kernel; those that are compiled beside one another take as long as the
    slowest."""
    record.note_machine(**({} if record.is_fake else device_facts()))
    if record.is_fake and not interprets():
        raise Skipped(
            f"Triton {TRITON}'s interpreter does not run with NumPy {numpy.__version__}: take"
            " NumPy 2.3"
        )
    jobs = [(name, record.is_fake) for name in CASES]
    processes = 1 if record.is_fake else len(jobs)
    found = {}
    for (name, _), row in in_workers(check, jobs, processes, SECONDS, record.until):
        found[name] = {"kernel": name, "problem": row.reason} if isinstance(row, Lost) else row
        record.add(**found[name])
    for name in CASES.keys() - found.keys():
        record.add(kernel=name, note="no time left")


def interprets() -> bool:
    """Whether Triton's interpreter works: before 3.7 it converts arrays of one element, which NumPy
    2.4 refuses."""
    return version.parse(TRITON) >= version.parse("3.7") or version.parse(
        numpy.__version__
    ) < version.parse("2.4")


def device_facts() -> dict[str, Any]:
    """The card, its driver, and what the kernels' launch parameters depend on."""
    properties = torch.cuda.get_device_properties(0)
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        driver = subprocess.run(query, capture_output=True, text=True, timeout=10).stdout.split(
            "\n"
        )[0]
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {
        "triton": TRITON,
        "driver": driver,
        "capability": "{}.{}".format(*torch.cuda.get_device_capability()),
        "multiprocessors": properties.multi_processor_count,
        "gpu_gib": round(properties.total_memory / 2**30, 1),
        "shared_bytes": getattr(properties, "shared_memory_per_block_optin", None),
    }


def check(job: tuple[str, bool]) -> dict[str, Any]:
    """Runs one case. A warning is a problem, too: a kernel that fails is replaced by something
    slower."""
    name, is_fake = job
    start = time.monotonic()
    with warnings_logged() as messages:
        try:
            CASES[name](is_fake)
        except (Exception, AssertionError) as error:
            messages.append(first_lines(error, lines=4))
    return {
        "kernel": name,
        "problem": "; ".join(messages),
        "took": round(time.monotonic() - start, 1),
    }


def made(is_fake: bool, **options: Any) -> tuple[Call, Call]:
    """A call, and the same on the device. The host knows the lengths of rows with many queries
    only."""
    call = build(Case(**{"seq_lens": LONG, **options, **(FAKE if is_fake else {})}))
    moved = on_device(call)
    if call.query.shape[2] > MAX_QUERIES:
        moved = replace(moved, step=replace(call.step, block_tables=moved.step.block_tables))
    return call, moved


def attention(is_fake: bool, **options: Any) -> None:
    """Rows of few queries (decodes), or of more (prefill)."""
    call, moved = made(is_fake, **options)
    assert (reason := triton.unsupported_reason(moved.made())) is None, reason
    with torch.no_grad():
        output = attend(triton, *moved.inputs, **moved.options)
    tolerance = TOLERANCE[call.query.dtype]
    torch.testing.assert_close(output.double().cpu(), call.expected, atol=tolerance, rtol=tolerance)


def latents(is_fake: bool) -> None:
    """Multi-head latent attention: the values are the first 512 elements of the keys."""
    call, moved = made(
        is_fake, seq_lens=SHORT, heads=16, kv_heads=1, key_dim=576, value_dim=576, dtype=HALF
    )
    call, moved = (replace(one, value_blocks=one.key_blocks[..., :512]) for one in (call, moved))
    with torch.no_grad():
        output = attend(triton, *moved.inputs, **moved.options)
        wide = [
            x.double().nan_to_num(0.0) for x in (call.query, call.key_blocks, call.value_blocks)
        ]
        expected = attend(reference, *wide, call.step, **call.options)
    torch.testing.assert_close(output.double().cpu(), expected, atol=2e-2, rtol=2e-2)


def int8(is_fake: bool, queries: int = 1) -> None:
    """Blocks of one byte a number, against float32 blocks of the same numbers."""
    call, moved = made(is_fake, seq_lens=SHORT, queries=queries, dtype=HALF, **LLAMA)
    keys, values = (blocks.nan_to_num(0.0) for blocks in (moved.key_blocks, moved.value_blocks))
    blocks = KVBlocks.allocate(len(keys), keys.shape[2], keys, values, kv_dtype="int8")
    quantized.write(blocks.keys, slice(None), keys)
    quantized.write(blocks.values, slice(None), values)
    plain = [
        quantized.read(x, slice(None), torch.float32).cpu() for x in (blocks.keys, blocks.values)
    ]
    with torch.no_grad():
        output = triton.attend(moved.made()._replace(blocks=blocks))
        expected = reference.attend(
            call.made()._replace(blocks=KVBlocks((), *plain), query=call.made().query.float())
        )
    torch.testing.assert_close(output.float().cpu(), expected, atol=8e-2, rtol=8e-2)


def hashing(is_fake: bool) -> None:
    from hf_paged.kernels.triton.hash import hash_all

    tensors = [test_hash.placed(content, offset=1) for content in test_hash.contents()]
    assert hash_all(tensors).tolist() == [hash_portable(tensor).tolist() for tensor in tensors]


RANGES = [(2, 21, 4), (21, 22, 17), (25, 43, 8)]
STORE: dict[str, Any] = dict(
    heads=3, key_dim=40, value_dim=9, block=16, transposed=False, slot_dtype=torch.int64
)
CASES: dict[str, Callable[[bool], None]] = {
    "decode d128 bf16, split and merged": functools.partial(attention, dtype=HALF, **LLAMA),
    "prefill d128 bf16": functools.partial(
        attention, queries=40, seq_lens=(1000, 777, 64), dtype=HALF, **LLAMA
    ),
    "store": lambda _: test_store.test_stores_what_the_plain_one_stores(
        source=HALF, target=HALF, **STORE
    ),
    "decode d64 float32, window, sinks": functools.partial(attention, window=50, sinks=True),
    "prefill d64 float32, starts": functools.partial(
        attention, queries=33, seq_lens=(300, 257), dtype=SINGLE
    ),
    "cascade": lambda _: test_cascade.test_shared_prefixes_give_what_plain_decode_gives(
        HALF, False, 3
    ),
    "copy": lambda _: test_copy.test_copies_what_the_plain_one_copies(test_copy.UNALIGNED, HALF, 1),
    "hash": hashing,
    "lora": lambda _: test_lora.test_adds_what_plain_products_add(RANGES, HALF),
    "decode d128 int8": int8,
    "prefill d128 int8": functools.partial(int8, queries=20),
    "latents 576/512": latents,
    "decode d512 bf16": functools.partial(
        attention, heads=4, kv_heads=2, key_dim=512, value_dim=512, dtype=HALF
    ),
    "prefill d512 bf16": functools.partial(
        attention,
        queries=40,
        seq_lens=(300, 64),
        heads=4,
        kv_heads=2,
        key_dim=512,
        value_dim=512,
        dtype=HALF,
    ),
    "decode d80 fp16, softcap, bias": functools.partial(
        attention,
        softcap=30.0,
        bias=(0, 1, 2),
        queries=3,
        key_dim=80,
        value_dim=80,
        dtype=torch.float16,
    ),
}
"""By kernel, those first on which most depends."""
