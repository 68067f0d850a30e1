"""Multi-head latent attention (MLA) on latent blocks: projects queries to the latents instead of
expanding these."""

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
from ..cache.storage import KVBlocks
from ..kernels import quantized
from ..step import NotCapturable, StepMetadata
from . import backends
from .backends.reference import AttentionCall
from .switch import is_from_transformers

MAX_ABSORBED_QUERIES = 16
"""Rows of a packed step with up to this many queries absorb the expansion; a row with more is a
prompt, and its latents are expanded once for all its queries."""


class LatentTensor(LazyTensor):
    """Keys or values `(batch, heads, length, dim)` that an MLA layer would expand from its latents.
    Our attention function instead applies the expansion to queries and outputs ("absorption",
    DeepSeek-V2, arXiv 2405.04434, 2.1.2).
    """

    latent: PagedTensor
    rotary: PagedTensor
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    expansion: Callable[[], tuple[Tensor, Tensor]]
    which: int

    @staticmethod
    def __new__(
        cls,
        module: Any,
        latent: PagedTensor,
        rotary: PagedTensor,
        expand: Callable[[Tensor, Tensor], Any],
        expansion: Callable[[], Any],
        which: int,
    ) -> LatentTensor:
        """`which`: 0 for keys, 1 for values, as returned by `expand(latent, rotary)`, and by
        `expansion()` for these latents."""
        batch, _, length, _ = latent.shape
        nope = module.qk_nope_head_dim
        key_dim = nope + module.qk_rope_head_dim
        value_dim = module.v_head_dim
        dims = (key_dim, value_dim)
        weight = module.kv_b_proj.weight
        heads = weight.shape[0] // (nope + value_dim)
        shape = (batch, heads, length, dims[which])
        tensor = Tensor._make_wrapper_subclass(
            cls,
            shape,
            dtype=latent.dtype,
            device=latent.device,
        )
        tensor.latent, tensor.rotary, tensor.which = latent, rotary, which
        tensor.expand, tensor.expansion = expand, expansion
        return tensor

    def dense(self) -> Tensor:
        """The expanded keys or values, contiguous."""
        expanded = self.expansion()[self.which]
        return expanded.contiguous()

    def refuse_write(self) -> None:
        raise RuntimeError(READ_ONLY)

    @property
    def sources(self) -> tuple[PagedTensor, PagedTensor]:
        """The tensors that are expanded."""
        return self.latent, self.rotary

    def is_with(self, value: Tensor) -> bool:
        """Whether these are the keys and `value` the values of the same expansion."""
        return (
            isinstance(value, LatentTensor)
            and value.expansion is self.expansion
            and value.which > self.which
        )

    def absorb(
        self,
        module: nn.Module,
        query: Tensor,
        value: Tensor,
    ) -> tuple[StepMetadata, Tensor, KVBlocks, Callable[[Tensor], Tensor]] | None:
        """Returns the step, queries of width `rank + rope_dim`, the blocks of that width that serve
        as both keys and values, and the function from the output `(batch, query_len, heads, rank +
        rope_dim)` to `(..., value_dim)`. `None` if latents and rotary keys are not adjacent in
        memory, or `value` is of another expansion."""
        layer = self.latent.layer
        rank = self.latent.shape[3]
        rope_dim = self.rotary.shape[3]
        if not self.is_with(value):
            return None
        if layer is not self.rotary.layer:
            return None
        width = layer.tiles[0].shape[3]
        if width != rank + rope_dim:
            return None
        heads = query.shape[1]
        weight = module.kv_b_proj.weight
        nope = module.qk_nope_head_dim
        expanded_dim = nope + module.v_head_dim
        # (heads, nope + value_dim, rank)
        weight = weight.view(heads, expanded_dim, -1)
        keys = weight[:, :nope]
        values = weight[:, nope:]
        # (batch, heads, query_len, rank)
        in_latents = torch.matmul(query[..., :nope], keys)
        rotary = query[..., nope:]
        query = torch.cat([in_latents, rotary], dim=-1)
        return (
            self.latent.step,
            query,
            layer.latents,
            lambda x: torch.einsum("bqhr,hvr->bqhv", x[..., :rank], values),
        )


# -- packed steps --------------------------------------------------------------------------------


def attend_packed(
    module: nn.Module,
    query: Tensor,
    key: LatentTensor,
    value: LatentTensor,
    step: StepMetadata,
    features: Any,
) -> Tensor:
    """Attention of a packed step, `(T, heads, value_dim)`, for queries `(1, heads, T, key_dim)`.
    Leading rows of few queries absorb the expansion. For the other rows, all latents, cached ones
    included, are expanded to blocks of keys and values, for this layer only. `features`: scale,
    softcap and sinks of an `AttentionCall`."""
    near, far, blocks = step.plan(_split)
    num_near = 0
    outputs = []
    if near is not None:
        near_query = query[:, :, : near.num_tokens]
        absorbed = key.absorb(module, near_query, value)
        if absorbed is None:
            near = None
            far, blocks = step.plan(_to_expand, 0)
        else:
            _, near_query, latents, expand = absorbed
            num_near = near.num_tokens
            near_query = near_query[0]
            near_query = near_query.transpose(0, 1)
            call = AttentionCall(near_query, latents, near, *features)
            output = backends.attend(call)
            output = output.unsqueeze(0)
            output = expand(output)
            outputs.append(output[0])
            step.counters.latent += 1
    if far is not None:
        states = []
        for source in key.sources:
            state = quantized.read(source.blocks, blocks, source.dtype)
            state = state.flatten(0, 2)
            states.append(state[None, None])
        keys, values = key.expand(*states)
        keys = keys[0].contiguous()
        values = values[0].contiguous()
        by_blocks = (-1, step.block_size)
        keys = keys.unflatten(1, by_blocks)
        values = values.unflatten(1, by_blocks)
        # (blocks, heads, block_size, dim)
        keys = keys.transpose(0, 1)
        values = values.transpose(0, 1)
        far_query = query[0, :, num_near:]
        far_query = far_query.transpose(0, 1)
        far_blocks = KVBlocks((keys, values), keys, values)
        call = AttentionCall(far_query, far_blocks, far, *features)
        output = backends.attend(call)
        outputs.append(output)
    if len(outputs) == 1:
        return outputs[0]
    return torch.cat(outputs)


def _split(
    step: StepMetadata,
) -> tuple[StepMetadata | None, StepMetadata | None, Tensor | None]:
    """Splits off the leading rows of few queries; returns these, and the rest with its blocks as
    from `_to_expand`."""
    bounds = itertools.pairwise(step.query_start)
    count = step.num_rows
    for row, (start, end) in enumerate(bounds):
        if end - start > MAX_ABSORBED_QUERIES:
            count = row
            break
    if count == step.num_rows:
        return step, None, None
    near = None
    if count:
        near = step.rows(0, count)
    far, blocks = _to_expand(step, count)
    return near, far, blocks


def _to_expand(step: StepMetadata, first: int) -> tuple[StepMetadata, Tensor]:
    """Returns rows from `first` on, with tables that number new blocks row by row, and the original
    blocks' ids."""
    if step.lengths is not None:
        raise NotCapturable(
            "latents of many queries are expanded, as many as their rows have tokens"
        )
    rows = step.rows(first, step.num_rows)
    size = step.block_size
    counts = [-(-seq_len // size) for seq_len in rows.seq_lens]
    row_tables = zip(rows.block_tables, counts)
    row_blocks = [table[:count] for table, count in row_tables]
    blocks = torch.cat(row_blocks)
    device = blocks.device
    begins = list(itertools.accumulate(counts[:-1], initial=0))
    tables = torch.tensor(begins, dtype=torch.int32, device=device)
    tables = tables[:, None]
    most = max(counts)
    columns = torch.arange(most, dtype=torch.int32, device=device)
    tables = tables + columns
    rows = dataclasses.replace(rows, block_tables=tables, block_ids=())
    return rows, blocks


# -- the models' own expansion -------------------------------------------------------------------


def can_absorb(module: nn.Module) -> bool:
    """Whether the layer's expansion is one plain matrix, so that it can be absorbed."""
    projection: Any = getattr(module, "kv_b_proj", None)
    dims = (
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "v_head_dim",
    )
    return (
        type(projection) is nn.Linear
        and type(projection.weight) is nn.Parameter  # not quantized
        and projection.bias is None
        and "forward" not in vars(projection)
        and not is_hooked(projection)
        and all(hasattr(module, dim) for dim in dims)
    )


def is_hooked(module: nn.Module) -> bool:
    """Whether forward hooks, on the module or global, see its inputs or outputs."""
    own = module._forward_hooks or module._forward_pre_hooks
    shared = torch_module._global_forward_hooks or torch_module._global_forward_pre_hooks
    return bool(own or shared)


_wrapped: dict[type, Callable[..., Any]] = {}


def wrap_expansions(modules: Iterable[nn.Module]) -> None:
    """Makes `expand_kv(latent, rotary)` of the modules' classes lazy for handles, if it is
    transformers' code. `unwrap_expansions` undoes it."""
    classes = {type(module) for module in modules}
    for cls in classes:
        own = vars(cls).get("expand_kv")
        if cls in _wrapped or own is None:
            continue
        if is_from_transformers(own):
            _wrapped[cls], cls.expand_kv = own, _lazy(own)


def _lazy(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(
        self: Any,
        kv_nope: Tensor,
        k_rot: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        lazy = isinstance(kv_nope, PagedTensor) and isinstance(k_rot, PagedTensor)
        lazy = lazy and (kv_nope.fresh is None or kv_nope.step.columns is None)
        if args or kwargs:
            lazy = False
        if not lazy or not can_absorb(self) or torch.is_grad_enabled():
            return original(self, kv_nope, k_rot, *args, **kwargs)
        expand = functools.partial(original, self)
        expansion = functools.cache(lambda: expand(kv_nope, k_rot))
        key = LatentTensor(self, kv_nope, k_rot, expand, expansion, 0)
        value = LatentTensor(self, kv_nope, k_rot, expand, expansion, 1)
        return key, value

    return expand_kv


def unwrap_expansions() -> None:
    """Restores every `expand_kv` that `wrap_expansions` replaced, unless other code has replaced it
    since."""
    while _wrapped:
        cls, original = _wrapped.popitem()
        if getattr(vars(cls)["expand_kv"], "__wrapped__", None) is original:
            cls.expand_kv = original  # type: ignore[attr-defined]
