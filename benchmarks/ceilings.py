"""Peak bandwidth and compute of this machine, measured in the same run as the figures compared with
them, and the lower bound that they give for the time of a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.models import Shape
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


def seconds_of(work: Callable[[], object], device: str | torch.device) -> float:
    """Seconds that a call takes, until the device has finished."""
    start = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - start


def _best_seconds(work: Callable[[], object], device: str, repeats: int) -> float:
    return min(seconds_of(work, device) for _ in range(repeats + 1))


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


@dataclass(frozen=True)
class Cost:
    """The parameters and the K/V that a step reads."""

    shape: Shape  # whose K/V are counted
    body: int  # parameters that every token is multiplied with
    head: int  # parameters that a token is multiplied with for its logits
    itemsize: int  # bytes of a parameter and of an element of K/V

    @classmethod
    def of(cls, model: Any, shape: Shape) -> Cost:
        """Cost of a model. The input embedding is a lookup and counts only if it is also the LM
        head."""
        embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
        # tied weights count once
        total = sum(parameter.numel() for parameter in model.parameters())
        apart = head.numel() if embedding is head else head.numel() + embedding.numel()
        return cls(shape, total - apart, head.numel(), head.element_size())


def call_seconds(
    cost: Cost,
    ceilings: Ceilings,
    flops: float,
    prompts: Sequence[int],
    new_tokens: Sequence[int],
    rows_per_prompt: int = 1,
    shared: int = 0,
) -> float:
    """Returns a lower bound for the seconds of a whole call, which computes all prompts in one
    step, then decodes all open rows together.

    A step of `B` rows reads the weights (`W` bytes) once or computes `2 P B` operations, whichever
    takes longer, then reads each row's K/V: `max(W / BW, 2 P B / FLOPS) + sum(L) kv / BW`.
    Attention FLOPs and everything that is not a matrix product are left out, so a real step takes
    longer. K/V count once per row that reads them: rows that share blocks may beat this bound by
    reading them once. `flops`: operations per second in the model's dtype. `prompts`, `new_tokens`:
    lengths, by prompt. `rows_per_prompt`: samples or beams. `shared`: length of the common prefix
    of all prompts, computed once.
    """
    reading = (cost.body + cost.head) * cost.itemsize / ceilings.bandwidth  # the weights

    def step(tokens: int, lengths: Sequence[int], rows: int) -> float:
        computing = 2 * (cost.body * tokens + cost.head * rows) / flops
        kv = sum(cost.shape.kv_bytes(length, cost.itemsize) for length in lengths)
        return max(reading, computing) + kv / ceilings.bandwidth

    computed = sum(prompts) - shared * (len(prompts) - 1)
    seconds = step(computed, (), len(prompts) * rows_per_prompt)
    for done in range(1, max(new_tokens)):
        pairs = zip(prompts, new_tokens)
        lengths = [p + done for p, new in pairs if done < new for _ in range(rows_per_prompt)]
        seconds += step(len(lengths), lengths, len(lengths))
    return seconds
