"""Plain caches that round K/V like quantized blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from hf_paged.kernels import quantized


def round_states(states: Tensor, kv_dtype: str) -> Tensor:
    codes, scales = quantized.quantize(states, quantized.DTYPES[kv_dtype])
    return (codes.float() * scales.unsqueeze(-1)).to(states.dtype)


def round_caches(patch: pytest.MonkeyPatch, kv_dtype: str, shows_fresh: bool = False) -> None:
    """Patches plain caches to round K/V from now on; a latent and its rotary key share a scale.
    With `shows_fresh` the first forward of a layer sees its states unrounded, as when it attends to
    them directly."""
    for cls in (DynamicLayer, DynamicSlidingWindowLayer):
        original = vars(cls)["update"]

        def update(
            self: Any, keys: Tensor, values: Tensor, *args: Any, own: Any = original, **options: Any
        ) -> Any:
            fresh, begins = (keys, values), not self.is_initialized or not self.keys.numel()
            if keys.shape[1] == values.shape[1] == 1 and keys.shape[3] != values.shape[3]:
                both = round_states(torch.cat((keys, values), -1), kv_dtype)
                keys, values = both.split([keys.shape[3], values.shape[3]], dim=-1)
            else:
                keys, values = round_states(keys, kv_dtype), round_states(values, kv_dtype)
            shown: tuple[Tensor, Tensor] = own(self, keys, values, *args, **options)
            return fresh if shows_fresh and begins else shown

        patch.setattr(cls, "update", update)
