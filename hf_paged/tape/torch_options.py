"""The global options and modes of torch that affect a forward but not a replay. `graphs.py` drops
graphs when options change, and replays none while a mode is active."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._device import DeviceContext

from ..cache.memory import autocast_dtype
from ..kernels.cpp.build import batch_invariant

# Global options of torch that decide which kernels a forward launches: attributes of `torch`, and
# functions that return an option. The settings per backend and operation reflect the options that
# they inherit and the legacy options (`set_float32_matmul_precision`, `allow_tf32`). The legacy
# options are left out: reading them raises an error once code has used a setting per backend.
_OPTIONS = (
    "backends.cuda.matmul.fp32_precision"
    " backends.cudnn.conv.fp32_precision backends.cudnn.rnn.fp32_precision"
    " backends.mkldnn.matmul.fp32_precision backends.mkldnn.conv.fp32_precision"
    " backends.mkldnn.rnn.fp32_precision"
    " backends.cuda.matmul.allow_fp16_reduced_precision_reduction"
    " backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k"
    " backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
    " backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k"
    " backends.cuda.matmul.allow_fp16_accumulation backends.cuda.preferred_blas_library"
    " backends.cuda.flash_sdp_enabled backends.cuda.mem_efficient_sdp_enabled"
    " backends.cuda.math_sdp_enabled backends.cuda.cudnn_sdp_enabled"
    " backends.cuda.fp16_bf16_reduction_math_sdp_allowed"
    " backends.cudnn.enabled backends.cudnn.benchmark backends.cudnn.deterministic"
    " backends.mkldnn.enabled backends.mkldnn.deterministic backends.mha.get_fastpath_enabled"
    " backends.opt_einsum.enabled backends.opt_einsum.strategy"
    " are_deterministic_algorithms_enabled get_default_device get_default_dtype get_num_threads"
).split()


def torch_options() -> tuple[Any, ...]:
    """Returns the values of torch's global options on which a recorded step depends; `None` for
    options that this version of torch lacks."""
    return tuple(map(_option, _OPTIONS))


def step_options(device: torch.device, model: nn.Module | None) -> tuple[Any, ...]:
    """Returns what may differ between the steps of a call: whether the model is in training mode,
    the dtype of autocast, batch invariance, and some of torch's options."""
    return (
        getattr(model, "training", False),
        autocast_dtype(device),
        batch_invariant.get(),
        torch.get_default_dtype(),
        torch.get_num_threads(),
        torch._C._get_deterministic_algorithms(),
        torch._C._get_fp32_precision_getter("cuda", "matmul"),
        torch._C._get_fp32_precision_getter("mkldnn", "matmul"),
    )


def _option(name: str) -> Any:
    value: Any = torch
    for part in name.split("."):
        value = getattr(value, part, None)
    if callable(value):
        return value()
    return value


def active_mode() -> str | None:
    """Returns the class name of an active mode of this thread; `None` if there is none. A mode
    intercepts the operations of a forward, but not those of a replay. Ignores the mode of
    `torch.set_default_device`, which only changes where tensors are created."""
    stacks = (
        (torch._C._len_torch_function_stack(), torch._C._get_function_stack_at),
        (torch._C._len_torch_dispatch_stack(), torch._C._get_dispatch_stack_at),
    )
    for length, mode_at in stacks:
        for index in range(length):
            mode_type = type(mode_at(index))
            if mode_type is not DeviceContext:
                return mode_type.__name__
    return None


def reason_against_replays(untracked_reason: str | None) -> str | None:
    """Returns why a step must run eagerly: because a replay would bypass an active mode or might
    miss changes of the model; `None` if a replay is allowed. `untracked_reason`: why a replay might
    miss changes; `None` if it cannot."""
    mode = active_mode()
    return untracked_reason if mode is None else f"a replay would bypass the active `{mode}`"
