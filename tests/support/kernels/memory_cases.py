"""AOT cases of the kernels that hash tensors and copy blocks."""

from __future__ import annotations

import torch

from hf_paged.kernels.triton.copy import copy_blocks, describe
from hf_paged.kernels.triton.hash import hash_all
from tests.support.kernels.aot import AotCase


def _hash() -> None:
    hash_all(
        [torch.empty(size, dtype=torch.bfloat16, device="meta") for size in (4096 * 4096, 4097)]
    )


def _copy(dim: int) -> None:
    places = describe([torch.empty(100, 3, 5, dim, dtype=torch.int8, device="meta")] * 3)
    table, pairs = torch.empty(2, 3, 2, dtype=torch.int64, device="meta")
    copy_blocks(places, table, pairs)


CASES = [
    AotCase("hash", _hash),
    AotCase("copy-words", lambda: _copy(128)),
    AotCase("copy-bytes", lambda: _copy(3)),
]
