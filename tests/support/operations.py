"""Counts operations of PyTorch that a device launches kernels or copies for."""

from __future__ import annotations

from collections import Counter
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

# beside views: they change a tensor's description, or allocate
_WITHOUT_LAUNCH = {"_unsafe_view", "empty", "empty_like", "new_empty", "promote_types"}
_WITHOUT_LAUNCH |= {"transpose_", "unsqueeze_"}


class Operations(TorchDispatchMode):
    """Counts by name the operations of the code inside, without those that launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if not func.is_view and name not in _WITHOUT_LAUNCH:
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))
