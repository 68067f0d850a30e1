"""Launch parameters by chip, head dims and dtype, from measured tables if there are any, else by a
rule. Launches nothing."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

# tables that `benchmarks.tune` writes, one per chip (sm90.json)
FOLDER = Path(__file__).with_name("configs")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    tile: int  # tokens whose K and V are loaded at a time; like block_m a power of two, at least 16
    block_m: int = 16  # most query rows (queries x heads of a group) per program
    num_warps: int = 4
    num_stages: int = 3  # depth of the loop's software pipeline, as Triton counts
    # decode only: target programs per multiprocessor; higher values split rows more finely
    programs_per_sm: int = 2


def split_dim(dim: int, smallest: int = 16) -> tuple[int, int]:
    """Returns the sizes of one or two power-of-two tiles, each at least `smallest`, that cover
    `dim` elements. The second is 0 if two would not be smaller than one: 80 is 64 + 16, 576 is 512
    + 64, 112 is 128 and not 64 + 64."""
    whole = max(smallest, triton.next_power_of_2(dim))
    if dim == whole or whole == smallest:
        return whole, 0
    rest = max(smallest, triton.next_power_of_2(dim - whole // 2))
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


def strides(tensor: Tensor) -> list[int]:
    """Returns the strides of a tensor, with 0 for dimensions of one element, whose stride is
    arbitrary and unused: kernels are compiled separately for stride 1, multiples of 16 and
    others."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors (compute units) of a GPU; for other devices
    that of an H200."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 132


def dot_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """Returns the dtype to which operands of these dtypes are converted for `tl.dot`; it represents
    all their values."""
    dtype = functools.reduce(torch.promote_types, dtypes)
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)


def as_uint8(blocks: Tensor) -> Tensor:
    """Returns blocks as kernels take them: 8-bit floats viewed as bytes, which every chip and
    Triton's interpreter support."""
    return (
        blocks.view(torch.uint8)
        if blocks.is_floating_point() and blocks.element_size() == 1
        else blocks
    )


def chip(device: torch.device) -> str:
    """Returns the name of a device's table: `"sm90"`, `"gfx942"`, `"xpu"`, or `"none"` if it is not
    a GPU."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        return "sm{}{}".format(*torch.cuda.get_device_capability(device))
    if device.type == "meta":  # nothing runs; kernels are compiled for the driver's target
        arch = triton.runtime.driver.active.get_current_target().arch
        return arch if isinstance(arch, str) else f"sm{arch}"
    return "xpu" if device.type == "xpu" else "none"


@functools.cache
def _block_shared(driver: Any, index: Any) -> int:
    return int(driver.utils.get_device_properties(index)["max_shared_mem"])


def block_shared(device: torch.device) -> int:
    """Returns the most bytes of shared memory that a block may have; on the CPU, which has no
    limit, those of chips of compute capability 8.6."""
    if device.type == "cpu":
        return 99 << 10
    driver = triton.runtime.driver.active
    return _block_shared(
        driver, driver.get_current_device() if device.index is None else device.index
    )


def reads_shared(chip: str) -> bool:
    """Whether tensor cores read both operands from shared memory (Hopper, and Blackwell in data
    centres); those of other chips read registers."""
    return chip.startswith(("sm90", "sm10"))


def key(kernel: str, key_dim: int, value_dim: int, dtype: torch.dtype, rows: int) -> str:
    """Returns the name of a table's entry. `rows`: query rows that share a K/V head."""
    block_m = max(16, triton.next_power_of_2(rows))
    return f"{kernel}/{key_dim}x{value_dim}/{str(dtype).removeprefix('torch.')}/m{block_m}"


def find_config(
    kernel: str,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    rows: int,
    device: torch.device,
    value_is_key: bool = False,
) -> LaunchConfig:
    """Returns the measured config of the kernel `"decode"` or `"prefill"` for this chip, else the
    default one. `value_is_key`: values are the first elements of the keys, so that the kernel loads
    one tile for both."""
    name = chip(device)
    arguments = (key_dim, value_dim, dtype)
    measured = _tables(name).get(
        key(kernel, *arguments, rows if kernel == "decode" else min(rows, 128))
    )
    if measured is not None:
        return measured
    default = default_decode_config if kernel == "decode" else default_prefill_config
    return fit(
        default(*arguments, rows, name),
        kernel,
        *arguments,
        name,
        block_shared(device),
        value_is_key,
    )


def fit(
    config: LaunchConfig,
    kernel: str,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chip: str,
    limit: int,
    value_is_key: bool = False,
) -> LaunchConfig:
    """Returns the config with fewer stages or smaller tiles, so that a block takes at most `limit`
    bytes of shared memory. Decodes are bound by memory, so they keep their stages; other steps are
    bound by compute, so they keep their tile as long as possible.
    """
    while shared_bytes(config, kernel, key_dim, value_dim, dtype, chip, value_is_key) > limit:
        if config.tile > 16 and (kernel == "decode" or config.num_stages <= 2):
            config = dataclasses.replace(config, tile=config.tile // 2)
        elif config.num_stages > 1:
            config = dataclasses.replace(config, num_stages=config.num_stages - 1)
        else:
            break
    return config


def shared_bytes(
    config: LaunchConfig,
    kernel: str,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chip: str,
    value_is_key: bool = False,
) -> int:
    """Returns the most bytes of shared memory that a block of the kernel takes: queries, weights,
    and the tiles of keys and values that the loop's pipeline holds."""
    is_decode = kernel == "decode"
    keys = sum(split_dim(key_dim))
    values = (
        sum(split_dim(value_dim, 32)) if is_decode else max(16, triton.next_power_of_2(value_dim))
    )
    tile = max(keys, values) if value_is_key or config.num_stages == 1 else keys + values
    # Block ids take half of a decode's stages. Without a pipeline the tile of values replaces that
    # of keys.
    depth = max(1, (config.num_stages - 1) // 2 if is_decode else config.num_stages - 1)
    queries = 0 if chip.startswith("gfx") else keys  # AMD's tensor cores read them from registers
    numbers = config.block_m * (queries + config.tile) + depth * config.tile * tile
    return numbers * dtype.itemsize + 1024  # block ids, barriers, and scratch of reductions


def default_decode_config(
    key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, chip: str = "none"
) -> LaunchConfig:
    """Returns a config with tiles of about 32 KiB of K and V together, the next one in flight while
    one is used: a multiprocessor of an H200 needs about 26 KiB in flight (4.8 TB/s, 700 ns). Block
    ids are prefetched, too, so two tiles take five stages. The accumulators of wide heads fill the
    registers."""
    widest = max(key_dim, value_dim)
    block_m = max(16, triton.next_power_of_2(rows))
    is_amd = chip.startswith("gfx")
    # AMD: eight warps have 256 registers a lane, which would spill
    num_warps = 4 if is_amd or widest <= 256 else 8
    if dtype == torch.float32:  # products without tensor cores keep whole tiles in registers
        config = LaunchConfig(32 if widest <= 64 else 16, 16, num_warps, num_stages=2)
    elif widest > 256:
        stages = 5 if block_m == 16 else 3
        config = LaunchConfig(32, min(block_m, 32), num_warps, num_stages=stages, programs_per_sm=1)
    elif widest > 128:
        config = LaunchConfig(32, min(block_m, 32), 4, num_stages=5)
    else:
        tile = 128 if widest <= 64 and block_m <= 32 else 64
        config = LaunchConfig(tile, min(block_m, 64), 4, num_stages=5 if block_m <= 32 else 3)
    is_large = (
        (widest > 256 and config.block_m > 16)
        if is_amd
        else (not reads_shared(chip) and config.block_m > 32)
    )
    if is_large:
        config = dataclasses.replace(config, tile=config.tile // 2)  # avoids register spills
    return dataclasses.replace(config, num_stages=2) if is_amd else config


def default_prefill_config(
    key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, chip: str
) -> LaunchConfig:
    """Returns a config with large tiles that compile without register spills. `rows`: the most
    query rows of one row and K/V head."""
    widest = max(key_dim, value_dim)
    is_short = rows <= 64
    if dtype == torch.float32:  # products without tensor cores keep whole tiles in registers
        # masks take registers, too
        is_padded = any(dim & (dim - 1) for dim in (key_dim, value_dim))
        if widest > 256:
            # two stages: with one, registers are spilled so that two blocks fit on a multiprocessor
            return LaunchConfig(16, 16, 4 if chip.startswith("gfx") else 8, 2)
        return LaunchConfig(32, 16 if is_padded or widest > 128 else 32, 8, 1)
    if widest > 256:
        return LaunchConfig(32, 32, 8, 2)
    if widest > 128:
        return LaunchConfig(32, 128 if reads_shared(chip) and not is_short else 64, 8, 3)
    tile = 64 if reads_shared(chip) or widest <= 64 else 32
    return LaunchConfig(tile, 64, 4, 3) if is_short else LaunchConfig(tile, 128, 8, 3)


@functools.cache
def _tables(name: str) -> dict[str, LaunchConfig]:
    path = FOLDER / f"{name}.json"
    table = json.loads(path.read_text())["configs"] if path.exists() else {}
    return {key: LaunchConfig(**entry) for key, entry in table.items()}
