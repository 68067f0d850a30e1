"""Counts the variants of each kernel that mixed steps of one model compile: `python -m
tests.support.kernels.variants`.

Triton compiles a kernel once per key: types, constants, and specialisations, namely whether an
address or a number is a multiple of 16, and whether a number is 1. Here launchers are called with
CPU tensors, whose addresses are real, and only the keys are computed: nothing is compiled or run.
"""

from __future__ import annotations

import functools
import itertools
import json
import random
from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from hf_paged.attention.backends import triton as backend
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels.triton import attention_kernel, lora, merge, store
from hf_paged.step import Lengths, StepMetadata
from tests.support import tools
from tests.support.kernels.chips import CHIPS
from tests.support.kernels.compiling import Launch, only_compile

HEADS, KV_HEADS, DIM, BLOCK_SIZE, NUM_BLOCKS = 32, 8, 128, 16, 64
STEPS = 200
CHIP = dict(choices=list(CHIPS), default="sm_90")  # an option
KERNELS = (
    attention_kernel.attention_kernel,
    merge.merge_kernel,
    store._store_kernel,
    lora._shrink_kernel,
    lora._expand_kernel,
)


def _ints(
    offset: int, *shape: int, dtype: torch.dtype = torch.int32, device: str = "cpu"
) -> Tensor:
    """Metadata that begins `offset` elements into a larger buffer."""
    size = offset + torch.Size(shape).numel()
    return torch.empty(size, dtype=dtype, device=device)[offset:].view(shape)


def mixed_steps(device: str = "cpu") -> Iterator[StepMetadata]:
    """Decodes of any row count, as in recorded steps, rows of 2 to 16 queries, and packed steps of
    decodes and chunks; tables that grow; metadata at every offset of four bytes."""
    draw = random.Random(0)
    ints = functools.partial(_ints, device=device)
    for index in range(STEPS):
        width, offset = 4 + index // 2, index % 4
        lengths, seq_lens = None, list[int]()
        if index % 5 == 0:
            rows = draw.randrange(1, 5)
            seq_lens = queries = [draw.randrange(2, 17)] * rows
        elif index % 2:
            queries = [1] * draw.choice((1, 2, 3, 8, 31, 32, 33, 100, 255, 256))
            lengths = Lengths(*(ints((offset + i) % 4, len(queries)) for i in range(2)))
        else:
            chunks = [draw.choice((1, 2, 17, 63, 64, 500)) for _ in range(draw.randrange(1, 5))]
            queries = [1] * draw.randrange(1, 40) + chunks
            seq_lens = [max(count, draw.randrange(width * BLOCK_SIZE)) for count in queries]
        yield StepMetadata(
            block_tables=ints(offset, len(queries), width),
            query_start=(0, *itertools.accumulate(queries)),
            seq_lens=tuple(seq_lens),
            starts=(0,) * len(seq_lens),
            block_size=BLOCK_SIZE,
            slots=ints(offset % 2, 1, sum(queries), dtype=torch.int64),
            lengths=lengths,
        )


def run(step: StepMetadata, blocks: Tensor, heads: int = HEADS) -> None:
    """Runs the store and the attention of a layer, and the products of an adapter."""
    device = str(blocks.device)
    half = {"dtype": torch.bfloat16, "device": device}
    tokens = step.num_tokens
    # layout of one fused projection
    states = torch.empty(1, tokens, 2 * KV_HEADS, DIM, **half).transpose(1, 2)
    keys, values = blocks.chunk(2, dim=1)
    store.store(states[:, :KV_HEADS], states[:, KV_HEADS:], keys, values, step.slots)
    query = torch.empty(tokens, heads, DIM, **half)
    both = KVBlocks((keys, values), keys, values)
    backend.attend(AttentionCall(query, both, step, scale=DIM**-0.5))
    parts = _ints(0, 1, 5, dtype=torch.int64, device=device)
    ranges = _ints(tokens % 2, 1, 2, dtype=torch.int64, device=device)
    scales = torch.empty(1, device=device)
    table = lora.LoraTable(parts, ranges, scales, torch.bfloat16, rank=16, max_rows=tokens)
    lora.add_deltas(query[:, 0], query[:, 1], table)


def count(steps: Iterator[StepMetadata], chip: str) -> dict[str, int]:
    """Variants by kernel. Attention counts as three: one query per row, equally many (few) queries
    per row, and others."""
    blocks = torch.empty(NUM_BLOCKS, 2 * KV_HEADS, BLOCK_SIZE, DIM, dtype=torch.bfloat16)
    with only_compile(CHIPS[chip], is_compiling=False) as launches:
        for step in steps:
            run(step, blocks)
    return variants(launches, kind)


def kind(launch: Launch) -> str:
    """A launch's kernel, of attention with the rows that it is for."""
    if not launch.options.get("BY_LENGTH"):
        return launch.kernel
    return launch.kernel + (" of one query" if launch.options["ONE_QUERY"] else " of few")


def variants(launches: Iterable[Launch], name: Callable[[Launch], str]) -> dict[str, int]:
    keys: dict[str, set[str]] = {}
    for launch in launches:
        keys.setdefault(name(launch), set()).add(launch.key)
    return {name: len(found) for name, found in sorted(keys.items())}


def specialize_on_all() -> None:
    """Removes the kernels' specialisation exceptions, as if none were declared."""
    for kernel in KERNELS:
        for parameter in kernel.params:
            parameter.do_not_specialize = parameter.do_not_specialize_on_alignment = False
        kernel.device_caches.clear()


def main() -> None:
    parser = tools.parser(__doc__, chip=CHIP, specialize=(False, "on all arguments"))
    options = parser.parse_args()
    if options.specialize:
        specialize_on_all()
    print(json.dumps(count(mixed_steps(), options.chip)))


if __name__ == "__main__":
    main()
