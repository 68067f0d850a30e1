"""Multi-head latent attention on the latent blocks: queries go to the latents, not latents to keys and values."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..cache.handles import LazyTensor, PagedTensor
from ..cache.storage import KVBlocks
from ..step import StepMetadata
from .switch import is_from_transformers


class LatentTensor(LazyTensor):
    """Keys or values `(batch, heads, length, dim)` that an MLA layer would expand from its latents. Our attention
    function multiplies the expansion into queries and outputs ("absorption", DeepSeek-V2, arXiv 2405.04434, 2.1.2)."""

    latent: PagedTensor
    rotary: PagedTensor
    expansion: Callable[[], tuple[Tensor, Tensor]]
    which: int

    @staticmethod
    def __new__(
        cls, module: Any, latent: PagedTensor, rotary: PagedTensor, expansion: Callable[[], Any], which: int
    ) -> LatentTensor:
        """`which`: 0 for the keys, 1 for the values that `expansion()` returns."""
        batch, _, length, _ = latent.shape
        dims = (module.qk_nope_head_dim + module.qk_rope_head_dim, module.v_head_dim)
        heads = module.kv_b_proj.weight.shape[0] // (module.qk_nope_head_dim + module.v_head_dim)
        shape = (batch, heads, length, dims[which])
        tensor = Tensor._make_wrapper_subclass(cls, shape, dtype=latent.dtype, device=latent.device)
        tensor.latent, tensor.rotary, tensor.expansion, tensor.which = latent, rotary, expansion, which
        return tensor

    def dense(self) -> Tensor:
        """The expanded keys or values, contiguous."""
        return self.expansion()[self.which].contiguous()

    def absorb(
        self, module: nn.Module, query: Tensor, value: Tensor
    ) -> tuple[StepMetadata, Tensor, KVBlocks, Callable[[Tensor], Tensor]] | None:
        """Instead of the expanded keys and values: the step, queries of width `rank + rope_dim`, the blocks of that
        width that serve as both, and the function that takes the output `(batch, query_len, heads, rank + rope_dim)` to
        `(..., value_dim)`. `None` if latents and rotary keys do not lie side by side, or `value` is none of theirs."""
        layer, rank = self.latent.layer, self.latent.shape[3]
        if not isinstance(value, LatentTensor) or value.expansion is not self.expansion or value.which <= self.which:
            return None
        if layer is not self.rotary.layer or layer.data[0].shape[3] != rank + self.rotary.shape[3]:
            return None
        weight, nope = module.kv_b_proj.weight, module.qk_nope_head_dim
        weight = weight.view(query.shape[1], nope + module.v_head_dim, -1)  # (heads, nope + value_dim, rank)
        in_latents = torch.matmul(query[..., :nope], weight[:, :nope])  # (batch, heads, query_len, rank)
        query = torch.cat([in_latents, query[..., nope:]], dim=-1)
        values = weight[:, nope:]
        return self.latent.step, query, layer.latents, lambda x: torch.einsum("bqhr,hvr->bqhv", x[..., :rank], values)


def can_absorb(module: nn.Module) -> bool:
    """Whether the layer's expansion is one plain matrix that we may multiply elsewhere."""
    projection: Any = getattr(module, "kv_b_proj", None)
    return (
        type(projection) is nn.Linear
        and type(projection.weight) is nn.Parameter  # none that is quantized
        and projection.bias is None
        and "forward" not in vars(projection)
        and not is_hooked(projection)
        and all(hasattr(module, name) for name in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether forward hooks, its own or those of all modules, see its inputs or outputs."""
    own = module._forward_hooks or module._forward_pre_hooks
    return bool(own or torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks)


_wrapped: dict[type, Callable[..., Any]] = {}


def wrap_expansions(modules: Iterable[nn.Module]) -> None:
    """Makes `expand_kv(latent, rotary)` of the modules' classes lazy for handles, where it is transformers' own: there
    all are one. Undone by `unwrap_expansions`."""
    for cls in {type(module) for module in modules}:
        own = vars(cls).get("expand_kv")
        if cls not in _wrapped and own is not None and is_from_transformers(own):
            _wrapped[cls], cls.expand_kv = own, _lazy(own)


def _lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(self: Any, kv_nope: Tensor, k_rot: Tensor, *args: Any, **kwargs: Any) -> Any:
        lazy = isinstance(kv_nope, PagedTensor) and isinstance(k_rot, PagedTensor) and kv_nope.fresh is None
        if not lazy or args or kwargs or not can_absorb(self) or torch.is_grad_enabled():
            return original(self, kv_nope, k_rot, *args, **kwargs)
        expansion = functools.cache(lambda: original(self, kv_nope, k_rot))
        return tuple(LatentTensor(self, kv_nope, k_rot, expansion, which) for which in (0, 1))

    return expand_kv


def unwrap_expansions() -> None:
    """Puts back every `expand_kv` that `wrap_expansions` replaced, and others have not."""
    while _wrapped:
        cls, original = _wrapped.popitem()
        if getattr(vars(cls)["expand_kv"], "__wrapped__", None) is original:
            cls.expand_kv = original  # type: ignore[attr-defined]
