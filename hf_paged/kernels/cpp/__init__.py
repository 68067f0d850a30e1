"""The C++ kernels: built on first use with the user's compiler, unless the wheel contains them, and
loaded with ctypes. If they cannot be built or loaded, or with `HF_PAGED_CPP=0`, `is_available()` is
False and PyTorch computes their results (attention: `attention/backends/gather.py`). This module
calls the kernels that hash memory and draw tokens."""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from ... import forks
from .build import is_available, kernel, logger

_HASH_CALL = struct.Struct("3Q2q")  # struct HashCall
_DRAW_CALL = struct.Struct("Q2q2Q")  # struct DrawCall
# bytes of the state of torch's CPU generator; the kernel supports no other size
_STATE_BYTES = 5056
_lock = forks.lock()


def hash_memory(starts: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Returns a 16-byte hash of the content, order and sizes of memory spans: span `i` has
    `sizes[i]` bytes from address `starts[i]` on. Raises `ValueError` for a negative size, for
    address 0 with a positive size, and if there are not as many addresses as sizes."""
    count = len(starts)
    if len(sizes) != count:
        raise ValueError(f"{count} addresses but {len(sizes)} sizes: pass one size per address")
    addresses = (ctypes.c_uint64 * count)(*starts)
    num_bytes = (ctypes.c_int64 * count)(*sizes)
    out = (ctypes.c_uint64 * 2)()
    pointers = (ctypes.addressof(array) for array in (addresses, num_bytes, out))
    if kernel("hash")(_HASH_CALL.pack(*pointers, count, torch.get_num_threads())):
        raise ValueError(
            "a span has a negative size, or address 0 with a positive size: the spans (address,"
            f" size) are {list(zip(starts, sizes))}"
        )
    return bytes(out)


def multinomial(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Returns `torch.multinomial(probs, 1, generator=generator).squeeze(1)`: the same `(n,)` int64,
    with the same change of the generator's state, for `probs` `(n, vocab)` of any float dtype and
    device. For contiguous float32 on the CPU, the draws come from a kernel that is about ten times
    as fast, unless torch's algorithm has changed (`_draws_like_torch`). Raises torch's
    `RuntimeError` for probabilities that torch rejects. Threads may call this function at the same
    time. If torch's own operations draw from the same generator meanwhile, they may draw the same
    numbers as this function."""
    is_supported = (
        probs.is_cpu and probs.dtype is torch.float32 and probs.dim() == 2 and probs.is_contiguous()
    )
    on_cpu = generator is None or generator.device.type == "cpu"
    if is_supported and on_cpu and _draws_like_torch():
        tokens = _draw(probs, torch.default_generator if generator is None else generator)
        if tokens is not None:
            return tokens
    return torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)


def _draw(probs: Tensor, generator: torch.Generator) -> Tensor | None:
    """Returns the kernel's draws. For probabilities that torch rejects, returns `None` and draws
    nothing."""
    tokens = torch.empty(len(probs), dtype=torch.int64, device="cpu")
    with _lock:  # the state is read, advanced and written back atomically
        state = generator.get_state()
        if kernel("draw")(
            _DRAW_CALL.pack(probs.data_ptr(), *probs.shape, state.data_ptr(), tokens.data_ptr())
        ):
            return None
        generator.set_state(state)
    return tokens


@functools.cache
def _draws_like_torch() -> bool:
    """Whether the kernel is available and draws the same tokens as this build of torch, whose
    algorithm is undocumented."""
    generator = torch.Generator()
    generator.manual_seed(0)
    if not is_available() or generator.get_state().nbytes != _STATE_BYTES:
        return False
    # the kernel reads float32, whatever torch's default dtype is
    probs = torch.randn((5, 777), generator=generator, dtype=torch.float32, device="cpu")
    probs = probs.mul_(3).softmax(dim=-1)
    kernel_generator = generator.clone_state()
    for _ in range(3):
        expected_tokens = torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)
        tokens = _draw(probs, kernel_generator)
        if (
            tokens is None
            or not tokens.equal(expected_tokens)
            or not kernel_generator.get_state().equal(generator.get_state())
        ):
            logger.info(
                "the C++ kernel does not draw like this build of torch: using torch.multinomial"
            )
            return False
    return True
