"""Launch parameters of the prefill kernel by chip, head dims and dtype; see `configs.py`."""

from __future__ import annotations

import dataclasses

import torch

from . import configs


@dataclasses.dataclass(frozen=True)
class PrefillConfig:
    """
    Args:
        block_m (`int`): Query rows (queries x heads of a group) of one program, a power of two of at least 16.
        tile (`int`): Tokens whose K and V are loaded at a time, a power of two of at least 16.
        num_warps (`int`): Warps of a program.
        num_stages (`int`): Tiles that are loaded ahead, the current one included.
    """

    block_m: int
    tile: int
    num_warps: int = 8
    num_stages: int = 3


def prefill_config(
    key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, has_mask: bool, device: torch.device
) -> PrefillConfig:
    """The measured choice for this chip, else `default_prefill_config`; arguments as there."""
    chip = configs.chip(device)
    kernel = "prefill-mask" if has_mask else "prefill"
    entry = configs._tables(chip).get(configs.key(kernel, key_dim, value_dim, dtype, min(rows, 128)))
    if entry is not None:
        return PrefillConfig(**entry)
    return default_prefill_config(key_dim, value_dim, dtype, rows, has_mask, chip)


def default_prefill_config(
    key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, has_mask: bool, chip: str
) -> PrefillConfig:
    """
    Large tiles that compile without spilled registers and fit the shared memory: 99 KiB (compute capabilities 8.6, 8.9
    and 12.0) for heads up to 128, 163 KiB for wider ones. `tests/support/kernels/prefill_cases.py` checks it.

    Args:
        rows (`int`): Most query rows of one row and K/V head.
        has_mask (`bool`): Whether a bias or a tree mask is loaded beside the keys.
        chip (`str`): As `configs.chip` names it.
    """
    widest, is_short = max(key_dim, value_dim), rows <= 64
    if dtype == torch.float32:  # products without tensor cores keep whole tiles in registers
        return PrefillConfig(32 if widest <= 128 else 16, 32 if widest <= 256 else 16, 8, 1)
    if widest > 256:
        return PrefillConfig(32, 16 if has_mask else 32, 8, 2)
    # Hopper's and Blackwell's tensor cores read both factors from shared memory, earlier ones from registers.
    from_shared = chip.startswith(("sm90", "sm10"))
    if has_mask:
        return PrefillConfig(64 if from_shared or widest <= 128 else 32, 32, 8, 2)
    if widest > 128:
        return PrefillConfig(64 if is_short or not from_shared else 128, 32, 8, 3)
    if widest > 64 and not from_shared:
        return PrefillConfig(64, 32, 4, 3) if is_short else PrefillConfig(128, 32, 8, 3)
    return PrefillConfig(64, 64, 4, 3) if is_short else PrefillConfig(128, 64, 8, 3)
