"""Launch parameters by chip, head dims and dtype: from tables that `benchmarks.tune` writes or,
without an entry there, by a rule. `attention.py` launches the kernels."""

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

# folder of the tables that `benchmarks.tune` writes, one per chip (sm90.json)
FOLDER = Path(__file__).with_name("configs")


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    """Launch parameters of an attention kernel."""

    tile: int  # tokens whose K and V a program loads at a time: a power of two, at least 16
    # maximum number of query rows (queries x heads of a group) per program: a power of two, at
    # least 16
    block_m: int = 16
    num_warps: int = 4
    num_stages: int = 3  # Triton's `num_stages`, the depth of the loop's software pipeline
    # decode only: programs to start per multiprocessor; higher values split rows more finely
    programs_per_sm: int = 2


def split_dim(dim: int, min_size: int = 16) -> tuple[int, int]:
    """Returns the sizes of one or two power-of-two tiles, each at least `min_size`, that cover
    `dim` elements. The second is 0 if two would not be smaller than one: 80 is 64 + 16, 576 is 512
    + 64, 112 is 128 and not 64 + 64."""
    whole = max(min_size, triton.next_power_of_2(dim))
    if dim == whole or whole == min_size:
        return whole, 0
    first = whole // 2
    second = max(min_size, triton.next_power_of_2(dim - first))
    return (first, second) if second < first else (whole, 0)


def strides(tensor: Tensor) -> list[int]:
    """Returns the strides of a tensor, with 0 for dimensions of size 1, whose stride is arbitrary
    and unused. Triton compiles a kernel separately for stride 1, for multiples of 16 and for other
    strides, so arbitrary strides would make it compile needless variants."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Returns the number of streaming multiprocessors (AMD: compute units, Intel: subslices) of a
    GPU; for other devices, the number of an H200."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 132


def dot_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """Returns the dtype to which kernels convert operands of these dtypes for `tl.dot`: the
    smallest supported one that represents all their values."""
    dtype = functools.reduce(torch.promote_types, dtypes)
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)


def as_uint8(blocks: Tensor) -> Tensor:
    """Returns blocks of 8-bit floats viewed as uint8, which every chip and Triton's interpreter
    support; returns other blocks unchanged."""
    return (
        blocks.view(torch.uint8)
        if blocks.is_floating_point() and blocks.element_size() == 1
        else blocks
    )


def chip_name(device: torch.device) -> str:
    """Returns the name of a device's chip, which is also its table's name: `"sm90"`, `"gfx942"`,
    `"xpu"`, or `"none"` if it is not a GPU. For `meta`, for which kernels are only compiled, the
    name of the chip for which Triton's driver compiles."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        return "sm{}{}".format(*torch.cuda.get_device_capability(device))
    if device.type == "meta":
        arch = triton.runtime.driver.active.get_current_target().arch
        return arch if isinstance(arch, str) else f"sm{arch}"
    return "xpu" if device.type == "xpu" else "none"


@functools.cache
def _query_max_shared_bytes(driver: Any, index: Any) -> int:
    return int(driver.utils.get_device_properties(index)["max_shared_mem"])


def max_shared_bytes(device: torch.device) -> int:
    """Returns the maximum number of bytes of shared memory that a thread block may use; for the
    CPU, which has no limit, the number for a chip of compute capability 8.6."""
    if device.type == "cpu":
        return 99 << 10
    driver = triton.runtime.driver.active
    return _query_max_shared_bytes(
        driver, driver.get_current_device() if device.index is None else device.index
    )


def reads_operands_from_shared_memory(chip: str) -> bool:
    """Whether tensor cores read both operands from shared memory (Hopper, and Blackwell in data
    centres), not from registers as on other chips."""
    return chip.startswith(("sm90", "sm10"))


def entry_name(kernel: str, key_dim: int, value_dim: int, dtype: torch.dtype, rows: int) -> str:
    """Returns the name of a table's entry for the kernel `"decode"` or `"prefill"`, the head dims
    of keys and values, the dtype of products, and the number of query rows that share a K/V
    head."""
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
    """Returns the measured config of a kernel (see `entry_name`) for the chip of `device` or, if
    there is none, the default config, fitted to the chip. `value_is_key`: values are the first
    elements of the keys, so that the kernel loads one tile for both."""
    chip = chip_name(device)
    arguments = (key_dim, value_dim, dtype)
    measured_config = _load_table(chip).get(
        entry_name(kernel, *arguments, rows if kernel == "decode" else min(rows, 128))
    )
    if measured_config is not None:
        return measured_config
    make_default = default_decode_config if kernel == "decode" else default_prefill_config
    return fit_config(
        make_default(*arguments, rows, chip),
        kernel,
        *arguments,
        chip,
        max_shared_bytes(device),
        value_is_key,
    )


def fit_config(
    config: LaunchConfig,
    kernel: str,
    key_dim: int,
    value_dim: int,
    dtype: torch.dtype,
    chip: str,
    max_bytes: int,
    value_is_key: bool = False,
) -> LaunchConfig:
    """Returns the config with fewer stages or smaller tiles, so that a thread block uses at most
    `max_bytes` of shared memory, if possible. Decodes are bound by memory, so their tile shrinks
    before they lose stages; prefills are bound by compute, so they lose stages, down to two, before
    their tile shrinks."""
    while shared_bytes(config, kernel, key_dim, value_dim, dtype, chip, value_is_key) > max_bytes:
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
    """Returns an upper bound on the bytes of shared memory in which a thread block of the kernel
    stores queries, softmax weights, and the tiles of keys and values in the loop's pipeline."""
    is_decode = kernel == "decode"
    key_width = sum(split_dim(key_dim))
    value_width = (
        sum(split_dim(value_dim, 32)) if is_decode else max(16, triton.next_power_of_2(value_dim))
    )
    # Without a pipeline, the tile of values replaces that of keys.
    is_one_tile = value_is_key or config.num_stages == 1
    token_width = max(key_width, value_width) if is_one_tile else key_width + value_width
    # Block ids take half of a decode's stages.
    depth = max(1, (config.num_stages - 1) // 2 if is_decode else config.num_stages - 1)
    # AMD's tensor cores read queries from registers
    query_width = 0 if chip.startswith("gfx") else key_width
    num_elements = config.block_m * (query_width + config.tile) + depth * config.tile * token_width
    return num_elements * dtype.itemsize + 1024  # block ids, barriers, scratch memory of reductions


def default_decode_config(
    key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, chip: str = "none"
) -> LaunchConfig:
    """Returns the config of decodes for which none was measured. A tile of K and V takes about 32
    KiB, and the next tile loads while one is used: a multiprocessor of an H200 needs about 25 KiB
    in flight (4.8 TB/s for 700 ns, over 132 multiprocessors). Block ids are also prefetched, so two
    tiles take five stages. Wide heads, whose accumulators fill the registers, get smaller tiles of
    queries."""
    max_dim = max(key_dim, value_dim)
    block_m = max(16, triton.next_power_of_2(rows))
    is_amd = chip.startswith("gfx")
    # with eight warps, a lane of AMD's chips has only 256 registers, so the compiler would spill
    # some of them
    num_warps = 4 if is_amd or max_dim <= 256 else 8
    if dtype == torch.float32:  # products without tensor cores hold whole tiles in registers
        config = LaunchConfig(32 if max_dim <= 64 else 16, 16, num_warps, num_stages=2)
    elif max_dim > 256:
        stages = 5 if block_m == 16 else 3
        config = LaunchConfig(32, min(block_m, 32), num_warps, num_stages=stages, programs_per_sm=1)
    elif max_dim > 128:
        config = LaunchConfig(32, min(block_m, 32), 4, num_stages=5)
    else:
        tile = 128 if max_dim <= 64 and block_m <= 32 else 64
        config = LaunchConfig(tile, min(block_m, 64), 4, num_stages=5 if block_m <= 32 else 3)
    would_spill = (
        (max_dim > 256 and config.block_m > 16)
        if is_amd
        else (not reads_operands_from_shared_memory(chip) and config.block_m > 32)
    )
    if would_spill:
        config = dataclasses.replace(config, tile=config.tile // 2)
    return dataclasses.replace(config, num_stages=2) if is_amd else config


def default_prefill_config(
    key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, chip: str
) -> LaunchConfig:
    """Returns the config of prefills for which none was measured, with the largest tiles that
    compile without register spills. `rows`: the number of query rows (queries x heads of a group)
    of the sequence with the most queries in the step."""
    max_dim = max(key_dim, value_dim)
    is_short = rows <= 64
    reads_shared_memory = reads_operands_from_shared_memory(chip)
    if dtype == torch.float32:  # products without tensor cores hold whole tiles in registers
        # dims that are not powers of two need masks, which also take registers
        is_padded = any(dim & (dim - 1) for dim in (key_dim, value_dim))
        if max_dim > 256:
            # with one stage, the compiler would spill registers to fit two blocks on a
            # multiprocessor
            return LaunchConfig(16, 16, 4 if chip.startswith("gfx") else 8, 2)
        return LaunchConfig(32, 16 if is_padded or max_dim > 128 else 32, 8, 1)
    if max_dim > 256:
        return LaunchConfig(32, 32, 8, 2)
    if max_dim > 128:
        return LaunchConfig(32, 128 if reads_shared_memory and not is_short else 64, 8, 3)
    tile = 64 if reads_shared_memory or max_dim <= 64 else 32
    return LaunchConfig(tile, 64, 4, 3) if is_short else LaunchConfig(tile, 128, 8, 3)


@functools.cache
def _load_table(chip: str) -> dict[str, LaunchConfig]:
    path = FOLDER / f"{chip}.json"
    table = json.loads(path.read_text())["configs"] if path.exists() else {}
    return {entry: LaunchConfig(**arguments) for entry, arguments in table.items()}
