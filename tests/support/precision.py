"""Settings of torch that choose how products of float32 are computed, their restoration, and such
products."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

Setter = Callable[[], None]


def _set(owner: object, value: str) -> Setter:
    return lambda: setattr(owner, "fp32_precision", value)


BY_BACKEND: dict[str, Setter] = {
    "all": _set(torch.backends, "tf32"),  # as `TrainingArguments(tf32=True)` does
    "cuda.matmul": _set(torch.backends.cuda.matmul, "tf32"),
    "cudnn": _set(torch.backends.cudnn, "tf32"),
    "cudnn.conv": _set(torch.backends.cudnn.conv, "ieee"),
    "cudnn.rnn": _set(torch.backends.cudnn.rnn, "ieee"),
    "mkldnn.matmul": _set(torch.backends.mkldnn.matmul, "bf16"),
    "mkldnn.conv": _set(torch.backends.mkldnn.conv, "bf16"),
    "mkldnn.rnn": _set(torch.backends.mkldnn.rnn, "bf16"),
}
LEGACY: dict[str, Setter] = {
    "high": lambda: torch.set_float32_matmul_precision("high"),
    "medium": lambda: torch.set_float32_matmul_precision("medium"),
    "allow_tf32": lambda: setattr(torch.backends.cuda.matmul, "allow_tf32", True),
}


@contextlib.contextmanager
def default_precision() -> Iterator[None]:
    """Sets torch's defaults at the start and at the end."""
    _reset()
    try:
        yield
    finally:
        _reset()
        assert torch.get_float32_matmul_precision() == "highest"


def _reset() -> None:
    # writes the settings by backend, so it comes first
    torch.set_float32_matmul_precision("highest")
    backends = torch.backends
    for owner in (backends, backends.cudnn, backends.cuda.matmul, backends.mkldnn.matmul):
        _set(owner, "none")()
    for owner in (backends.mkldnn.conv, backends.mkldnn.rnn):
        _set(owner, "none")()
    for owner in (backends.cudnn.conv, backends.cudnn.rnn):
        _set(owner, "tf32")()


class TensorFloats(TorchFunctionMode):
    """Rounds float32 operands of PyTorch's products, and not of our kernels, to the 10 bits of
    TF32."""

    PRODUCTS = (F.linear, torch.matmul, Tensor.matmul, Tensor.__matmul__)
    PRODUCTS += (F.scaled_dot_product_attention,)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in self.PRODUCTS:
            args = [self._rounded(x) if type(x) in (Tensor, nn.Parameter) else x for x in args]
        return func(*args, **(kwargs or {}))

    @staticmethod
    def _rounded(x: Tensor) -> Tensor:
        if x.dtype != torch.float32:
            return x
        bits = x.contiguous().view(torch.int32)
        return ((bits + 0x1000) & ~0x1FFF).view(torch.float32)
