"""Multi-head latent attention (MLA) on latent blocks: projects queries to the latents instead of
expanding the latents."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from ..cache.handles import READ_ONLY, LazyTensor, PagedTensor
from ..cache.kv_blocks import KVBlocks
from ..kernels import quantized
from ..step import NotCapturable, StepMetadata
from . import backends
from .backends.reference import AttentionCall
from .switch import is_from_transformers

MAX_ABSORBED_QUERIES = 16
"""Rows of a packed step with up to this many queries absorb the expansion. A row with more is a
prompt, whose latents are expanded once for all its queries."""


@dataclasses.dataclass(eq=False)
class Expansion:
    """The keys and values that the layer `module` would expand from its latents, by `expand`."""

    module: Any
    latent: PagedTensor
    rotary: PagedTensor
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]

    @functools.cached_property
    def states(self) -> tuple[Tensor, Tensor]:
        return self.expand(self.latent, self.rotary)


class LatentTensor(LazyTensor):
    """Keys or values `(batch, heads, length, dim)` that an MLA layer would expand from its latents.
    Our attention function instead applies the expansion to queries and outputs ("absorption",
    DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """

    step: StepMetadata
    expansion: Expansion
    which: int

    @staticmethod
    def __new__(cls, expansion: Expansion, which: int) -> LatentTensor:
        """`which`: 0 for keys, 1 for values, as in `expansion.states`."""
        module = expansion.module
        latent = expansion.latent
        batch, _, length, _ = latent.shape
        nope = module.qk_nope_head_dim
        value_dim = module.v_head_dim
        dims = (nope + module.qk_rope_head_dim, value_dim)
        heads = module.kv_b_proj.weight.shape[0] // (nope + value_dim)
        tensor = Tensor._make_wrapper_subclass(
            cls,
            (batch, heads, length, dims[which]),
            dtype=latent.dtype,
            device=latent.device,
        )
        tensor.step = latent.step
        tensor.expansion = expansion
        tensor.which = which
        return tensor

    def dense(self) -> Tensor:
        """Returns the expanded keys or values, contiguous."""
        return self.expansion.states[self.which].contiguous()

    def refuse_write(self) -> None:
        raise RuntimeError(READ_ONLY)

    def pairs_with(self, value: Tensor) -> bool:
        """Whether these keys and `value` come from the same expansion."""
        return (
            isinstance(value, LatentTensor)
            and value.expansion is self.expansion
            and value.which > self.which
        )

    def absorb(
        self, query: Tensor, value: Tensor
    ) -> tuple[Tensor, KVBlocks, Callable[[Tensor], Tensor]] | None:
        """Returns queries of width `rank + rope_dim`, blocks of that width that serve as both keys
        and values, and the function that maps the output `(batch, query_len, heads, rank +
        rope_dim)` to `(..., value_dim)`. `None` if latents and rotary keys are not adjacent in
        memory, or `value` comes from another expansion."""
        module = self.expansion.module
        latent = self.expansion.latent
        rotary = self.expansion.rotary
        layer = latent.layer
        rank = latent.shape[3]
        rope_dim = rotary.shape[3]
        if not self.pairs_with(value) or layer is not rotary.layer:
            return None
        if layer.tiles[0].shape[3] != rank + rope_dim:
            return None
        nope = module.qk_nope_head_dim
        # (heads, nope + value_dim, rank)
        weight = module.kv_b_proj.weight.view(query.shape[1], nope + module.v_head_dim, -1)
        values = weight[:, nope:]
        # (batch, heads, query_len, rank)
        in_latents = torch.matmul(query[..., :nope], weight[:, :nope])
        query = torch.cat([in_latents, query[..., nope:]], dim=-1)

        def expand(x: Tensor) -> Tensor:
            self.step.counters.latent += 1
            return torch.einsum("bqhr,hvr->bqhv", x[..., :rank], values)

        return query, layer.latents, expand


# -- packed steps --------------------------------------------------------------------------------


def attend_packed(
    query: Tensor,
    key: LatentTensor,
    value: Tensor,
    step: StepMetadata,
    features: Any,
) -> Tensor:
    """Attention of a packed step, `(T, heads, value_dim)`, for queries `(1, heads, T, key_dim)`.
    Leading rows of few queries absorb the expansion. For the other rows, all latents, including
    cached ones, are expanded into blocks of keys and values, for this layer only. `features`:
    scale, softcap and sinks of an `AttentionCall`."""
    near, far = step.plan(StepMetadata.split, MAX_ABSORBED_QUERIES)
    num_near = 0
    outputs = []
    if near is not None:
        absorbed = key.absorb(query[:, :, : near.num_tokens], value)
        if absorbed is None:
            far = step
        else:
            near_query, latents, expand = absorbed
            num_near = near.num_tokens
            call = AttentionCall(near_query[0].transpose(0, 1), latents, near, *features)
            output = backends.attend(call).unsqueeze(0)
            outputs.append(expand(output)[0])
    if far is not None:
        expansion = key.expansion
        rows, blocks = far.plan(_to_expand)
        states = []
        for source in (expansion.latent, expansion.rotary):
            state = quantized.read(source.blocks, blocks, source.dtype)
            states.append(state.flatten(0, 2)[None, None])
        expanded = []
        for x in expansion.expand(*states):
            x = x[0].contiguous().unflatten(1, (-1, step.block_size))
            expanded.append(x.transpose(0, 1))  # (blocks, heads, block_size, dim)
        far_query = query[0, :, num_near:].transpose(0, 1)
        far_blocks = KVBlocks(tuple(expanded), *expanded)
        call = AttentionCall(far_query, far_blocks, rows, *features)
        outputs.append(backends.attend(call))
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def _to_expand(step: StepMetadata) -> tuple[StepMetadata, Tensor]:
    """Returns the step with tables that number new blocks row by row, and the ids of the original
    blocks."""
    if step.lengths is not None:
        raise NotCapturable(
            "latents of many queries are expanded, as many as their rows have tokens"
        )
    size = step.block_size
    counts = [-(-seq_len // size) for seq_len in step.seq_lens]
    blocks = torch.cat([table[:count] for table, count in zip(step.block_tables, counts)])
    device = blocks.device
    begins = list(itertools.accumulate(counts[:-1], initial=0))
    firsts = torch.tensor(begins, dtype=torch.int32, device=device)
    columns = torch.arange(max(counts), dtype=torch.int32, device=device)
    tables = firsts[:, None] + columns
    return dataclasses.replace(step, block_tables=tables, block_ids=()), blocks


# -- the models' own expansion -------------------------------------------------------------------


def can_absorb(module: nn.Module) -> bool:
    """Whether the layer's expansion is one plain matrix product, which can be absorbed."""
    projection: Any = getattr(module, "kv_b_proj", None)
    if type(projection) is not nn.Linear:
        return False
    hooks = (
        projection._forward_hooks,
        projection._forward_pre_hooks,
        torch_module._global_forward_hooks,
        torch_module._global_forward_pre_hooks,
    )
    dims = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return (
        type(projection.weight) is nn.Parameter  # not quantized
        and projection.bias is None
        and "forward" not in vars(projection)
        and not any(hooks)  # hooks see inputs and outputs, which absorption does not compute
        and all(hasattr(module, dim) for dim in dims)
    )


_wrapped: dict[type, Callable[..., Any]] = {}


def wrap_expansions(modules: Iterable[nn.Module]) -> None:
    """Makes `expand_kv(latent, rotary)` of the modules' classes lazy for handles, if its code is
    transformers' own. `unwrap_expansions` undoes this."""
    classes = {type(module) for module in modules}
    for cls in classes:
        original = vars(cls).get("expand_kv")
        if cls in _wrapped or original is None:
            continue
        if is_from_transformers(original):
            _wrapped[cls], cls.expand_kv = original, _lazy(original)


def _lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(
        self: Any,
        kv_nope: Tensor,
        k_rot: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_pair = isinstance(kv_nope, PagedTensor) and isinstance(k_rot, PagedTensor)
        is_read = is_pair and (kv_nope.fresh is None or kv_nope.step.columns is None)
        is_lazy = is_read and not args and not kwargs
        if not is_lazy or not can_absorb(self) or torch.is_grad_enabled():
            return original(self, kv_nope, k_rot, *args, **kwargs)
        expand = functools.partial(original, self)
        expansion = Expansion(self, kv_nope, k_rot, expand)
        return LatentTensor(expansion, 0), LatentTensor(expansion, 1)

    return expand_kv


def unwrap_expansions() -> None:
    """Restores every `expand_kv` that `wrap_expansions` replaced, unless other code has replaced it
    since."""
    while _wrapped:
        cls, original = _wrapped.popitem()
        if getattr(vars(cls)["expand_kv"], "__wrapped__", None) is original:
            cls.expand_kv = original  # type: ignore[attr-defined]
