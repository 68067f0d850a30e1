"""AOT cases of fused sequences of small operations, as in layers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_paged.tape import fused
from hf_paged.tape.device import DeviceTape
from hf_paged.tape.rows import Rows
from tests.support.kernels.aot import AotCase

ROWS = 3


def _compile(function: Callable[..., Any], *sizes: tuple[int, ...], dtype: torch.dtype) -> None:
    """Compiles the sequences traced from a function of tensors of these sizes."""
    inputs = [torch.randn(size).to(dtype) for size in sizes]

    def compute() -> tuple[Tensor, ...]:
        found = function(*inputs)
        return found if isinstance(found, tuple) else (found,)

    def run() -> None:
        for kept, found in zip(results, compute()):
            kept.copy_(found)

    with torch.no_grad():
        results = compute()
        tape = DeviceTape.record(run, torch.device("cpu"))
    lists = [entry for entry in tape.entries if isinstance(entry, Rows)]
    assert lists
    for rows in lists:
        fused.launch(
            rows,
            lambda ref: torch.empty_strided(ref.sizes, ref.strides, dtype=ref.dtype, device="meta"),
        )


def _norm(kind: type[nn.Module], width: int, dtype: torch.dtype) -> None:
    norm: Any = kind(width).to(dtype)
    _compile(lambda x, y: norm(x + y), (1, ROWS, width), (1, ROWS, width), dtype=dtype)


def _rotate(dtype: torch.dtype) -> None:
    def rotate(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> Any:
        heads = (states.view(1, ROWS, -1, 128).transpose(1, 2) for states in (x, y))
        return apply_rotary_pos_emb(*heads, cos, sin)

    _compile(rotate, (1, ROWS, 4096), (1, ROWS, 1024), (1, ROWS, 128), (1, ROWS, 128), dtype=dtype)


def _activate(function: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
    _compile(lambda gate, up: function(gate) * up, (ROWS, 14336), (ROWS, 14336), dtype=dtype)


def _cap(dtype: torch.dtype) -> None:
    _compile(lambda x: torch.tanh(x / 30.0) * 30.0, (ROWS, 256000), dtype=dtype)


HALF, SINGLE = torch.bfloat16, torch.float32
ONE = ("sm_90",)  # lists of operations that compile alike on every chip
CASES = [
    AotCase("fused-rmsnorm-4096-bf16", functools.partial(_norm, LlamaRMSNorm, 4096, HALF)),
    AotCase("fused-rmsnorm-16384-fp32", functools.partial(_norm, LlamaRMSNorm, 16384, SINGLE), ONE),
    AotCase("fused-gemma-2304-bf16", functools.partial(_norm, GemmaRMSNorm, 2304, HALF), ONE),
    AotCase(
        "fused-layernorm-768-fp16", functools.partial(_norm, nn.LayerNorm, 768, torch.float16), ONE
    ),
    AotCase("fused-rope-d128-bf16", functools.partial(_rotate, HALF)),
    AotCase("fused-silu-14336-bf16", functools.partial(_activate, F.silu, HALF)),
    AotCase("fused-gelu-14336-bf16", functools.partial(_activate, F.gelu, HALF), ONE),
    AotCase("fused-tanh-256000-bf16", functools.partial(_cap, HALF)),
]
