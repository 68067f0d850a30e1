"""Peak bandwidth and compute of this machine, measured in the same run as the figures compared with
them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from benchmarks import runner
from hf_paged.kernels import cpp

CPU_BYTES, CUDA_BYTES = 1 << 29, 1 << 32  # of the array that is read, much larger than any cache
CPU_MATRIX, CUDA_MATRIX = 2048, 8192  # rows and columns


@dataclass(frozen=True)
class Ceilings:
    """The measured peaks."""

    bandwidth: float  # bytes per second, of the fastest reader
    # operations per second of a square matrix product, by dtype ("bfloat16", "float32")
    flops: dict[str, float]

    def __str__(self) -> str:
        rates = ", ".join(
            f"{rate / 1e12:.3g} TFLOP/s {dtype}" for dtype, rate in self.flops.items()
        )
        return f"measured ceilings: {self.bandwidth / 1e9:.1f} GB/s, {rates}"


def synchronize(device: str | torch.device) -> None:
    """Waits for the device."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _best_seconds(function: Callable[[], object], device: str, repeats: int) -> float:
    def work() -> None:
        function()
        synchronize(device)

    return min(runner.seconds_of(work) for _ in range(repeats + 1))


def bandwidth(device: str, num_bytes: int, repeats: int = 5) -> float:
    """Bytes per second over an array of `num_bytes`, by the fastest reader: a sum, a copy or, on
    the CPU, a hash."""
    source = torch.ones(num_bytes // 4, device=device)
    reading = num_bytes / _best_seconds(lambda: source.sum(), device, repeats)
    half = source[: len(source) // 2]
    target = source[len(source) // 2 :]
    if device == "cpu" and cpp.is_available():
        hashing = _best_seconds(
            lambda: cpp.hash_memory([source.data_ptr()], [num_bytes]), device, repeats
        )
        reading = max(reading, num_bytes / hashing)
    return max(reading, num_bytes / _best_seconds(lambda: target.copy_(half), device, repeats))


def matmul(device: str, dtype: torch.dtype, size: int, repeats: int = 5) -> float:
    """Operations per second of a square product. The right matrix is transposed, as in `nn.Linear`:
    where PyTorch has no bfloat16 instructions, the other layout takes fifty times as long."""
    left = torch.randn(size, size, device=device).to(dtype)
    right = torch.randn(size, size, device=device).to(dtype)
    out = torch.empty_like(left)
    return 2 * size**3 / _best_seconds(lambda: torch.mm(left, right.t(), out=out), device, repeats)


def measure(device: str, quick: bool = False) -> Ceilings:
    """Measures both in a second or two; `quick` uses arrays too small to be exact."""
    cuda = torch.device(device).type == "cuda"
    num_bytes, size = (CUDA_BYTES, CUDA_MATRIX) if cuda else (CPU_BYTES, CPU_MATRIX)
    if quick:
        num_bytes, size = 1 << 26, 512
    rates = {
        str(dtype)[6:]: matmul(device, dtype, size) for dtype in (torch.bfloat16, torch.float32)
    }
    rates["bfloat16"] = max(rates.values())  # bfloat16 products can also be computed in float32
    return Ceilings(bandwidth(device, num_bytes), rates)
