"""
Peers that `benchmarks.attention` times beside the paged backends.

`missing` says why a peer cannot run here; `prepare` returns a function of the layer with output
`(batch, query_len, heads, head_dim)`. Work needed once for all layers is done in `prepare`, outside
the timing.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import signal
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.functional import scaled_dot_product_attention as sdpa

from benchmarks import runner
from benchmarks.attention_data import Data, Setting
from benchmarks.ceilings import synchronize
from benchmarks.systems import NotAvailable
from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.attention.backends import reference
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.kernels import quantized as quantization

Attention = Callable[[int], Tensor]
CONTIGUOUS = "contiguous sdpa"
INT8 = "ours: int8"


class Peer(ABC):
    """
    Args:
        name (`str`): Name in the table.
        module (`str`): Module that must be importable.
        cuda (`bool`): Whether the peer needs a CUDA device and half precision.
    """

    name = ""
    module = ""
    cuda = False

    def missing(self, setting: Setting) -> str:
        """Why the peer cannot run; empty if it can."""
        with contextlib.suppress(ModuleNotFoundError):  # the parent package is missing
            if not self.module or importlib.util.find_spec(self.module) is not None:
                if self.cuda and setting.device != "cuda":
                    return "skipped: needs a CUDA device"
                return (
                    "skipped: half precision only" if self.cuda and setting.dtype == "fp32" else ""
                )
        return "not installed"

    @abstractmethod
    def prepare(self, data: Data) -> Attention:
        """Returns the attention function of a layer. Raises `NotAvailable`."""

    def expected(self, data: Data) -> Tensor:
        """Expected output of layer 0."""
        return data.expected


class Ours(Peer):
    """One of the paged backends, or the one chosen for a model's call."""

    def __init__(self, name: str) -> None:
        self.name = f"ours: {name}" if name else "ours"
        self.backend = name

    def missing(self, setting: Setting) -> str:
        device = torch.device(setting.device)
        if self.backend == "triton":
            if device.type == "cpu":
                return "skipped: needs a GPU"
            return "" if kernels.triton.is_available(device) else "not available: see the log"
        is_missing = self.backend == "cpp" and not kernels.cpp.is_available()
        return "not available: the kernels could not be built" if is_missing else ""

    def prepare(self, data: Data) -> Attention:
        if not self.backend:
            return lambda layer: data.attend(backends, layer)
        backend = backends.BACKENDS[self.backend]
        if (
            self.backend in ("cpp", "triton")
            and (reason := backend.unsupported_reason(data.calls[0])) is not None
        ):
            raise NotAvailable(f"skipped: {reason}")
        return lambda layer: data.attend(backend, layer)


class Quantized(Peer):
    """The backend chosen with `PagedConfig(kv_dtype="int8")`, over the same K/V, quantized."""

    name = INT8

    def prepare(self, data: Data) -> Attention:
        calls = [call._replace(blocks=quantized(call.blocks)) for call in data.calls]
        if backends.select(calls[0]) is backends.gather:
            raise NotAvailable("skipped: no kernel takes it")
        return lambda layer: data.by_row(backends.attend(calls[layer]))

    def expected(self, data: Data) -> Tensor:
        call = data.calls[0]._replace(blocks=quantized(data.calls[0].blocks))
        return data.by_row(reference.attend(call))


def quantized(blocks: KVBlocks, kv_dtype: str = "int8") -> KVBlocks:
    """The same keys and values in blocks of one byte a number."""
    keys, values = blocks.keys, blocks.values
    found = KVBlocks.allocate(*keys.shape[::2], keys, values, kv_dtype=kv_dtype)
    quantization.write(found.keys, slice(None), keys)
    quantization.write(found.values, slice(None), values)
    return found


class Contiguous(Peer):
    """The ideal without paging: SDPA over padded `[batch, kv_heads, longest, head_dim]`, the
    fastest of four variants: query heads of a group packed along the queries, one head per group at
    a time, `enable_gqa`, and repeated keys.
    """

    name = CONTIGUOUS

    def prepare(self, data: Data) -> Attention:
        case, shape = data.setting.case, data.setting.shape
        batch, group = len(case.seq_lens), shape.heads // shape.kv_heads
        # [batch, kv_heads, group, query_len, head_dim]
        grouped = data.query.unflatten(1, (shape.kv_heads, group))
        causal = case.phase == "prefill" and not case.ragged
        mask = None if causal or (case.query_len == 1 and not case.ragged) else data.visible()
        group_mask = mask if mask is None or case.query_len == 1 else mask.repeat(1, 1, group, 1)
        masked: dict[str, Any] = dict(attn_mask=mask, is_causal=causal, scale=data.scale)

        def packed(layer: int) -> Tensor:
            options = dict(attn_mask=group_mask, scale=data.scale)
            queries = grouped.flatten(2, 3)
            out = sdpa(queries, *data.contiguous[layer], **options)
            out = out.unflatten(2, (group, case.query_len)).permute(0, 3, 1, 2, 4)
            return out.reshape(batch, case.query_len, shape.heads, shape.head_dim)

        def by_head(layer: int) -> Tensor:
            out = data.query.new_empty(batch, case.query_len, shape.kv_heads, group, shape.head_dim)
            for index in range(group):
                queries = grouped[:, :, index]
                part = sdpa(queries, *data.contiguous[layer], **masked)
                out[:, :, :, index] = part.transpose(1, 2)
            return out.flatten(2, 3)

        def gqa(layer: int) -> Tensor:
            options = dict(**masked, enable_gqa=group > 1)
            return sdpa(data.query, *data.contiguous[layer], **options).transpose(1, 2)

        def repeated(layer: int) -> Tensor:
            key, value = (part.repeat_interleave(group, dim=1) for part in data.contiguous[layer])
            return sdpa(data.query, key, value, **masked).transpose(1, 2)

        candidates = [by_head, gqa, repeated] if causal else [packed, by_head, gqa]
        return min(candidates, key=lambda function: _seconds(function, data))


def _seconds(function: Attention, data: Data) -> float:
    def call(layer: int) -> None:
        function(layer)
        synchronize(data.query.device)

    return min(runner.seconds_of(functools.partial(call, layer)) for layer in (0, 1, 0, 1))


class Transformers(Peer):
    """The attention function of a Llama with a contiguous cache, "sdpa" or "eager", with the mask
    that it gets."""

    def __init__(self, implementation: str) -> None:
        self.name, self.implementation = f"HF {implementation}", implementation

    def prepare(self, data: Data) -> Attention:
        from transformers.integrations.sdpa_attention import sdpa_attention_forward
        from transformers.models.llama.modeling_llama import eager_attention_forward

        case, shape = data.setting.case, data.setting.shape
        eager = self.implementation == "eager"
        function: Any = eager_attention_forward if eager else sdpa_attention_forward
        module = SimpleNamespace(
            num_key_value_groups=shape.heads // shape.kv_heads,
            is_causal=True,
            training=False,
            layer_idx=0,
        )
        mask: Tensor | None = data.visible()
        if eager:
            lowest = torch.finfo(data.query.dtype).min
            mask = torch.zeros_like(mask, dtype=data.query.dtype).masked_fill(~mask, lowest)
        elif not case.ragged and case.phase != "chunk":
            mask = None
        return lambda layer: function(
            module, data.query, *data.contiguous[layer], mask, scaling=data.scale
        )[0]


class Flex(Peer):
    """Compiled `flex_attention` over the padded keys; dropped for the rest of the run once
    compiling takes too long."""

    name = "flex_attention"

    def __init__(self, seconds: float) -> None:
        self.limit, self.gave_up = seconds, ""

    def missing(self, setting: Setting) -> str:
        if not self.limit:
            return "skipped: compiles for longer than a quick run takes"
        return self.gave_up

    def prepare(self, data: Data) -> Attention:
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        case, shape = data.setting.case, data.setting.shape
        offsets = data.step.on_device.seq_lens.long() - case.query_len

        def sees(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return key <= query + offsets[batch]

        mask = create_block_mask(
            sees, len(case.seq_lens), None, case.query_len, case.longest, device=data.setting.device
        )
        compiled = torch.compile(flex_attention, dynamic=False)
        options = dict(block_mask=mask, scale=data.scale, enable_gqa=shape.heads != shape.kv_heads)
        try:
            with time_limit(self.limit):
                compiled(data.query, *data.contiguous[0], **options)
        except TimeoutError:
            self.gave_up = f"failed: compiling took more than {self.limit:g} s"
            raise
        return lambda layer: compiled(data.query, *data.contiguous[layer], **options).transpose(
            1, 2
        )


class Varlen(Peer):
    """torch's `varlen_attn` with a block table, over the same blocks as ours."""

    name, module, cuda = "varlen_attn", "torch.nn.attention.varlen", True

    def prepare(self, data: Data) -> Attention:
        from torch.nn.attention.varlen import varlen_attn

        case, query = data.setting.case, data.packed
        starts = _starts([case.query_len] * len(case.seq_lens), query.device)
        options: dict[str, Any] = dict(scale=data.scale, window_size=(-1, 0), enable_gqa=True)
        options |= dict(seqused_k=data.step.on_device.seq_lens, block_table=data.step.block_tables)

        def call(layer: int) -> Tensor:
            key, value = (part.transpose(1, 2) for part in data.blocks[layer])
            sizes = case.query_len, case.longest
            return data.by_row(varlen_attn(query, key, value, starts, None, *sizes, **options))

        return call


class AtenFlash(Peer):
    """torch's FlashAttention over one contiguous slot per row, with the lengths on the device."""

    name, cuda = "aten flash, contiguous", True

    def prepare(self, data: Data) -> Attention:
        case, query = data.setting.case, data.packed
        batch = len(case.seq_lens)
        rows, slots = (
            _starts([size] * batch, query.device) for size in (case.query_len, case.longest)
        )
        options = dict(scale=data.scale, seqused_k=data.step.on_device.seq_lens)
        sizes = (rows, slots, case.query_len, case.longest, 0.0, case.query_len > 1, False)
        # [layers, 2, batch * longest, kv_heads, D]
        contiguous = data.padded.transpose(3, 4).contiguous().flatten(2, 3)

        flash = torch.ops.aten._flash_attention_forward
        return lambda layer: data.by_row(flash(query, *contiguous[layer], *sizes, **options)[0])


def _starts(counts: list[int], device: torch.device) -> Tensor:
    """`[0, counts[0], counts[0] + counts[1], ...]`, int32."""
    return pad(torch.tensor(counts).cumsum(0), (1, 0)).int().to(device)


@contextlib.contextmanager
def time_limit(seconds: float) -> Iterator[None]:
    """Raises `TimeoutError` in the main thread after `seconds`."""

    def stop(*_: Any) -> None:
        raise TimeoutError(f"took more than {seconds:g} s")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def peers(quick: bool, flex_seconds: float) -> list[Peer]:
    """All peers: the contiguous ideal, ours, then the others."""
    ours = [Ours(""), *(Ours(name) for name in backends.BACKENDS), Quantized()]
    rest = [Flex(0 if quick else flex_seconds), Varlen(), AtenFlash()]
    return [Contiguous(), *ours, Transformers("sdpa"), Transformers("eager"), *rest]
