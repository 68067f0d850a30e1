"""GPUs that Triton kernels are compiled for. Needs none of them."""

from __future__ import annotations

import dataclasses
from typing import Any

TENSOR_COLUMNS = 512
"""Columns of tensor memory of a multiprocessor (PTX ISA, sec. "Tensor Memory"): Triton launches no
kernel with more."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """
    Args:
        name (`str`): Such as `sm_90` or `gfx942`.
        arch (`int` or `str`): As in Triton's `GPUTarget`.
        warp_size (`int`): Lanes per warp.
        block_shared (`int`): Most bytes of shared memory per block.
    """

    name: str
    arch: int | str
    warp_size: int = 32
    block_shared: int = 232448

    @property
    def is_amd(self) -> bool:
        return isinstance(self.arch, str)

    def target(self) -> Any:
        """Triton's `GPUTarget`."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip" if self.is_amd else "cuda", self.arch, self.warp_size)


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", 80, block_shared=166912),
        Chip("sm_86", 86, block_shared=101376),
        Chip("sm_89", 89, block_shared=101376),
        Chip("sm_90", 90),
        Chip("sm_100", 100),
        Chip("sm_120", 120, block_shared=101376),
        Chip("gfx942", "gfx942", 64, 65536),
    )
}
"""Shared memory per block: CUDA programming guide, table "Technical specifications per compute
capability", for 8.0, 8.6, 8.9, 9.0, 10.0 and 12.0; AMD's guide to CDNA 3."""
