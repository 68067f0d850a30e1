"""Resources of a GPU multiprocessor, and how many blocks of a kernel fit on it at a time. Needs no
GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

LANE_REGISTERS, REGISTER_UNIT, SCHEDULERS = 512, 8, 4
"""32-bit registers of a scheduler per lane, the allocation unit, and schedulers per multiprocessor.
CUDA programming guide, table of limits; AMD's guide to CDNA 3, sec. 3.6 and 4.2: the same
figures."""

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
        shared (`int`): Bytes of shared memory per multiprocessor.
        reserved (`int`): Bytes that each block takes on top of its use.
        scheduler_warps (`int`): Most warps per scheduler.
        blocks (`int`): Most blocks per multiprocessor.
    """

    name: str
    arch: int | str
    warp_size: int = 32
    block_shared: int = 232448
    shared: int = 233472
    reserved: int = 1024
    scheduler_warps: int = 16
    blocks: int = 32

    @property
    def is_amd(self) -> bool:
        return isinstance(self.arch, str)

    def target(self) -> Any:
        """Triton's `GPUTarget`."""
        from triton.backends.compiler import GPUTarget

        return GPUTarget("hip" if self.is_amd else "cuda", self.arch, self.warp_size)

    def residency(self, registers: int, shared: int, num_warps: int) -> tuple[int, str]:
        """
        How many blocks fit on one multiprocessor, and the resource that limits them.

        Args:
            registers (`int`): Per thread, at least 1.
            shared (`int`): Bytes of shared memory per block.
            num_warps (`int`): Warps per block.
        """
        taken = -(-registers // REGISTER_UNIT) * REGISTER_UNIT
        most = {
            "registers": SCHEDULERS * (LANE_REGISTERS // taken) // num_warps,
            "shared memory": self.shared // max(1, shared + self.reserved),
            "warps": SCHEDULERS * self.scheduler_warps // num_warps,
            "blocks": self.blocks,
        }
        limit = min(most, key=lambda name: most[name])
        return most[limit], limit


CHIPS = {
    chip.name: chip
    for chip in (
        Chip("sm_80", 80, block_shared=166912, shared=167936),
        Chip("sm_86", 86, block_shared=101376, shared=102400, scheduler_warps=12, blocks=16),
        Chip("sm_89", 89, block_shared=101376, shared=102400, scheduler_warps=12, blocks=24),
        Chip("sm_90", 90),
        Chip("sm_100", 100),
        Chip("sm_120", 120, block_shared=101376, shared=102400, scheduler_warps=12, blocks=24),
        Chip("gfx942", "gfx942", 64, 65536, 65536, reserved=0, scheduler_warps=8, blocks=16),
    )
}
"""Chips that kernels are compiled for. CUDA programming guide, table "Technical specifications per
compute capability": shared memory per block and multiprocessor, resident warps and blocks, for 8.0,
8.6, 8.9, 9.0, 10.0 and 12.0 (CUDA 13's `cuda_occupancy.h` has the same blocks). Each of them has
65,536 registers a multiprocessor, at most 255 a thread. AMD: guide to CDNA 3."""
