"""Launch parameters by chip, head dims and dtype: from measured tables if there are any, else by a rule."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path

import torch
import triton
import triton.language as tl
from torch import Tensor

FOLDER = Path(__file__).with_name("configs")  # tables that `benchmarks.tune` writes, one per chip (sm90.json)


@dataclasses.dataclass(frozen=True)
class LaunchConfig:
    tile: int  # tokens whose K and V are loaded at a time; like block_m a power of two, at least 16
    block_m: int = 16  # most query rows (queries x heads of a group) per program
    num_warps: int = 4
    num_stages: int = 3  # depth of the loop's software pipeline, as Triton counts
    programs_per_sm: int = 2  # decode only: target programs per multiprocessor; higher values split rows more finely


def split_dim(dim: int, smallest: int = 16) -> tuple[int, int]:
    """Sizes of one or two power-of-two tiles, each at least `smallest`, that cover `dim` elements; the second is 0 if
    two would not be smaller than one: 80 is 64 + 16, 576 is 512 + 64, 112 is 128 and not 64 + 64."""
    whole = max(smallest, triton.next_power_of_2(dim))
    if dim == whole or whole == smallest:
        return whole, 0
    rest = max(smallest, triton.next_power_of_2(dim - whole // 2))
    return (whole // 2, rest) if rest < whole // 2 else (whole, 0)


def strides(tensor: Tensor) -> list[int]:
    """Strides of a tensor, 0 for dimensions with one element, whose stride is arbitrary and unused: kernels are
    compiled separately for stride 1, multiples of 16 and others."""
    return [0 if size == 1 else stride for size, stride in zip(tensor.shape, tensor.stride())]


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """The number of streaming multiprocessors (compute units) of a GPU; for other devices that of an H200."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).multi_processor_count)
    if device.type == "xpu":
        return int(torch.xpu.get_device_properties(device).gpu_subslice_count)
    return 132


def dot_dtype(*dtypes: torch.dtype) -> tl.dtype:
    """The dtype to which operands of these dtypes are converted for `tl.dot`; it holds all their values."""
    dtype = functools.reduce(torch.promote_types, dtypes)
    return {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}.get(dtype, tl.float32)


def as_numbers(blocks: Tensor) -> Tensor:
    """Blocks as passed to kernels: 8-bit floats viewed as bytes, which every chip and Triton's interpreter support."""
    return blocks.view(torch.uint8) if blocks.is_floating_point() and blocks.element_size() == 1 else blocks


def chip(device: torch.device) -> str:
    """Names the table of a device: `"sm90"`, `"gfx942"`, `"xpu"`, or `"none"` if it is no GPU."""
    if device.type == "cuda":
        if torch.version.hip is not None:
            return str(torch.cuda.get_device_properties(device).gcnArchName).split(":")[0]
        return "sm{}{}".format(*torch.cuda.get_device_capability(device))
    if device.type == "meta":  # nothing runs; kernels are compiled for the driver's target
        arch = triton.runtime.driver.active.get_current_target().arch
        return arch if isinstance(arch, str) else f"sm{arch}"
    return "xpu" if device.type == "xpu" else "none"


def key(kernel: str, key_dim: int, value_dim: int, dtype: torch.dtype, rows: int) -> str:
    """Names an entry of a table; `rows`: query rows that share a K/V head."""
    block_m = max(16, triton.next_power_of_2(rows))
    return f"{kernel}/{key_dim}x{value_dim}/{str(dtype).removeprefix('torch.')}/m{block_m}"


def find_config(
    kernel: str, key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, device: torch.device
) -> LaunchConfig:
    """The measured config of the kernel `"decode"` or `"prefill"` for this chip, else the default one."""
    name, arguments = chip(device), (key_dim, value_dim, dtype)
    found = _tables(name).get(key(kernel, *arguments, rows if kernel == "decode" else min(rows, 128)))
    if found is None and kernel == "decode":
        found, widest = default_decode_config(*arguments, rows), max(key_dim, value_dim)
        is_amd = name.startswith("gfx")
        if (is_amd and widest > 256 and found.block_m > 16) or (name.startswith("sm8") and found.block_m > 32):
            found = dataclasses.replace(found, tile=found.tile // 2)  # avoids register spills
        if is_amd:  # 64 KiB of shared memory
            found = dataclasses.replace(found, num_stages=2)
    return found or default_prefill_config(*arguments, rows, name)


def default_decode_config(key_dim: int, value_dim: int, dtype: torch.dtype, rows: int) -> LaunchConfig:
    """Tiles of about 32 KiB of K and V together, the next one in flight while one is used: a multiprocessor of an H200
    needs about 26 KiB in flight (4.8 TB/s, 700 ns). Block ids are prefetched too, so two tiles take five stages. The
    accumulators of wide heads fill the registers. All fit the 99 KiB of shared memory of chips 8.6, 8.9 and 12.0."""
    widest, block_m = max(key_dim, value_dim), max(16, triton.next_power_of_2(rows))
    if dtype == torch.float32:  # products without tensor cores keep whole tiles in registers
        return LaunchConfig(32 if widest <= 64 else 16, 16, num_warps=4 if widest <= 256 else 8, num_stages=2)
    if widest > 256:
        return LaunchConfig(32, min(block_m, 32), 8, num_stages=5 if block_m == 16 else 3, programs_per_sm=1)
    if widest > 128:
        return LaunchConfig(32, min(block_m, 32), 4, num_stages=5)
    tile = 128 if widest <= 64 and block_m <= 32 else 64
    return LaunchConfig(tile, min(block_m, 64), 4, num_stages=5 if block_m <= 32 else 3)


def default_prefill_config(key_dim: int, value_dim: int, dtype: torch.dtype, rows: int, chip: str) -> LaunchConfig:
    """Large tiles that compile without register spills and fit the shared memory: 99 KiB for heads up to 128, 163 KiB
    for wider ones; 64 KiB on AMD chips. `rows`: most query rows of one row and K/V head."""
    widest, is_short = max(key_dim, value_dim), rows <= 64
    if dtype == torch.float32:  # products without tensor cores keep whole tiles in registers
        return LaunchConfig(32 if widest <= 256 else 16, 32 if widest <= 128 else 16, 8, 1)
    if widest > 256:
        return LaunchConfig(16 if chip.startswith("gfx") else 32, 32, 8, 2)
    # Tensor cores of Hopper and Blackwell read both operands from shared memory, earlier ones from registers.
    from_shared = chip.startswith(("sm90", "sm10"))
    if widest > 128:
        return LaunchConfig(32, 64 if is_short or not from_shared else 128, 8, 3)
    tile = 64 if from_shared or widest <= 64 else 32
    return LaunchConfig(tile, 64, 4, 3) if is_short else LaunchConfig(tile, 128, 8, 3)


@functools.cache
def _tables(name: str) -> dict[str, LaunchConfig]:
    path = FOLDER / f"{name}.json"
    table = json.loads(path.read_text())["configs"] if path.exists() else {}
    return {key: LaunchConfig(**entry) for key, entry in table.items()}
