"""The C++ kernels of `kernels.cpp`: built on first use with the user's compiler unless the wheel
contains them, loaded with ctypes. If they cannot be built, or with `HF_PAGED_CPP=0`,
`is_available()` is False and `attention/backends/gather.py` is used."""

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
# size of torch's serialised CPU generator: another size means another algorithm
_STATE_BYTES = 5056
_lock = forks.lock()


def hash_memory(starts: Sequence[int], sizes: Sequence[int]) -> bytes:
    """Returns a 16-byte hash of the content, order and sizes of memory spans: `sizes[i]` bytes from
    address `starts[i]`. Raises `ValueError` for a negative size, or a size without an address."""
    count = len(starts)
    if len(sizes) != count:
        raise ValueError(f"{count} addresses and {len(sizes)} sizes")
    addresses = (ctypes.c_uint64 * count)(*starts)
    num_bytes = (ctypes.c_int64 * count)(*sizes)
    out = (ctypes.c_uint64 * 2)()
    pointers = (ctypes.addressof(array) for array in (addresses, num_bytes, out))
    if kernel("hash")(_HASH_CALL.pack(*pointers, count, torch.get_num_threads())):
        raise ValueError(f"a span has a negative size, or no address: sizes are {list(sizes)}")
    return bytes(out)


def multinomial(probs: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Computes `torch.multinomial(probs, 1, generator=generator).squeeze(1)`, ten times as fast on
    the CPU, with the same draws and generator state, for any float dtype and device. Raises torch's
    `RuntimeError` for probabilities that torch rejects. Calls may overlap in threads; a concurrent
    draw by torch from the same generator may repeat numbers."""
    fits = (
        probs.is_cpu and probs.dtype is torch.float32 and probs.dim() == 2 and probs.is_contiguous()
    )
    if fits and (generator is None or generator.device.type == "cpu") and _agrees():
        drawn = _draw(probs, torch.default_generator if generator is None else generator)
        if drawn is not None:
            return drawn
    return torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)


def _draw(probs: Tensor, generator: torch.Generator) -> Tensor | None:
    """Draws by the kernel; returns `None`, without drawing, for probabilities that torch
    rejects."""
    drawn = torch.empty(len(probs), dtype=torch.int64, device="cpu")
    with _lock:  # the state is read, advanced and written back atomically
        state = generator.get_state()
        if kernel("draw")(
            _DRAW_CALL.pack(probs.data_ptr(), *probs.shape, state.data_ptr(), drawn.data_ptr())
        ):
            return None
        generator.set_state(state)
    return drawn


@functools.cache
def _agrees() -> bool:
    """Whether the kernel is available and draws like this build of torch, whose algorithm is not
    documented."""
    generator = torch.Generator()
    generator.manual_seed(0)
    if not is_available() or generator.get_state().nbytes != _STATE_BYTES:
        return False
    probs = torch.randn((5, 777), generator=generator, device="cpu").mul_(3).softmax(dim=-1)
    other = generator.clone_state()
    for _ in range(3):
        expected = torch.multinomial(probs, num_samples=1, generator=generator).squeeze(1)
        drawn = _draw(probs, other)
        if (
            drawn is None
            or not drawn.equal(expected)
            or not other.get_state().equal(generator.get_state())
        ):
            logger.info("this build of torch draws otherwise than ours: using torch.multinomial")
            return False
    return True
