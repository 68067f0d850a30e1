"""What a multiprocessor of a GPU has, and how many blocks of a kernel it holds at a time. Needs no GPU."""

from __future__ import annotations

import dataclasses
from typing import Any

LANE_REGISTERS, REGISTER_UNIT, SCHEDULERS = 512, 8, 4
"""32-bit registers that a scheduler has for each lane of its warps, given out in units; schedulers of a multiprocessor.
CUDA programming guide, table of limits; AMD's guide to CDNA 3, sec. 3.6 and 4.2: the same figures."""


@dataclasses.dataclass(frozen=True)
class Chip:
    """
    Args:
        name (`str`): Such as `sm_90` or `gfx942`.
        arch (`int` or `str`): As in Triton's `GPUTarget`.
        warp_size (`int`): Lanes of a warp.
        block_shared (`int`): Bytes of shared memory that one block may use.
        shared (`int`): Bytes that all blocks of a multiprocessor have together.
        reserved (`int`): Bytes that each block takes beside those that it uses.
        scheduler_warps (`int`): Most warps of a scheduler.
        blocks (`int`): Most blocks of a multiprocessor.
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
        How many blocks one multiprocessor holds, and what keeps it from holding more.

        Args:
            registers (`int`): Of a thread, 1 at least.
            shared (`int`): Bytes of shared memory of a block.
            num_warps (`int`): Of a block.
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
        Chip("sm_90", 90),
        Chip("sm_100", 100),
        Chip("gfx942", "gfx942", 64, block_shared=65536, shared=65536, reserved=0, scheduler_warps=8, blocks=16),
    )
}
