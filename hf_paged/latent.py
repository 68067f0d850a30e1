"""Multi-head latent attention (MLA) on blocks of latents. The queries of rows with few queries are
projected into the latent space; for other rows, the latents are expanded to keys and values. This
module is one of hf_paged's optional parts (`rooms.LatentRoom`), and imports none of the others."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .attention import backends
from .attention.backends.reference import AttentionCall
from .attention.switch import is_from_transformers
from .cache.handles import READ_ONLY, LatentTensor, PagedTensor
from .cache.kv_blocks import KVBlocks
from .forks import lazy_property
from .kernels import quantized
from .step import NotCapturable, NotPackable, StepMetadata

MAX_ABSORBED_QUERIES = 16
"""In a packed step, leading rows with at most this many queries absorb the expansion into their
queries. From the first row with more queries on (a chunk of a prompt, for example), each row's
latents are expanded once for all of its queries."""


@dataclasses.dataclass(eq=False)
class Expansion:
    """The keys and values that an MLA layer would expand from its latents."""

    module: Any  # the layer
    latent: PagedTensor  # (batch, 1, length, rank)
    rotary: PagedTensor  # rotary keys, (batch, 1, length, rope_dim)
    expand: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]  # the layer's own code

    @lazy_property
    def keys_and_values(self) -> tuple[Tensor, Tensor]:
        return self.expand(self.latent, self.rotary)


class ExpandedTensor(LatentTensor):
    """Keys or values `(batch, heads, length, dim)` that an MLA layer would expand from its latents.
    For rows with few queries, our attention function instead applies the expansion to queries and
    outputs ("absorption", DeepSeek-V2, arXiv 2405.04434, section 2.1.2).
    """

    expansion: Expansion
    index: int

    @staticmethod
    def __new__(cls, expansion: Expansion, index: int) -> ExpandedTensor:
        """`index`: 0 for keys, 1 for values, as in `expansion.keys_and_values`."""
        module = expansion.module
        latent = expansion.latent
        batch, _, length, _ = latent.shape
        nope_dim = module.qk_nope_head_dim
        value_dim = module.v_head_dim
        dims = (nope_dim + module.qk_rope_head_dim, value_dim)
        heads = module.kv_b_proj.weight.shape[0] // (nope_dim + value_dim)
        self = Tensor._make_wrapper_subclass(
            cls,
            (batch, heads, length, dims[index]),
            dtype=latent.dtype,
            device=latent.device,
        )
        self.step = latent.step
        self.expansion = expansion
        self.index = index
        return self

    def dense(self) -> Tensor:
        """Returns the expanded keys or values, contiguous."""
        return self.expansion.keys_and_values[self.index].contiguous()

    def refuse_write(self) -> None:
        raise RuntimeError(READ_ONLY)

    def pairs_with(self, value: Tensor) -> bool:
        """Whether these are the keys, and `value` the values, of one expansion."""
        return (
            isinstance(value, ExpandedTensor)
            and value.expansion is self.expansion
            and value.index > self.index
        )

    def absorb(
        self, query: Tensor, value: Tensor
    ) -> tuple[Tensor, KVBlocks, Callable[[Tensor], Tensor]] | None:
        """Returns an equivalent attention over latents: its queries `(batch, heads, query_len, rank
        + rope_dim)`, blocks of the same width that serve as both keys and values, and the function
        that maps its output `(batch, query_len, heads, rank + rope_dim)` to `(..., value_dim)`.
        Returns `None` if latents and rotary keys are not adjacent in memory, or if `value` comes
        from another expansion."""
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
        nope_dim = module.qk_nope_head_dim
        # (heads, nope_dim + value_dim, rank)
        weight = module.kv_b_proj.weight.view(query.shape[1], nope_dim + module.v_head_dim, -1)
        value_weight = weight[:, nope_dim:]
        # (batch, heads, query_len, rank)
        latent_query = torch.matmul(query[..., :nope_dim], weight[:, :nope_dim])
        query = torch.cat([latent_query, query[..., nope_dim:]], dim=-1)

        def expand(output: Tensor) -> Tensor:
            self.step.counters.latent += 1
            return torch.einsum("bqhr,hvr->bqhv", output[..., :rank], value_weight)

        return query, layer.latents, expand

    def attend_packed(
        self, query: Tensor, value: Tensor, step: StepMetadata, features: tuple[Any, ...]
    ) -> Tensor:
        """Implements `LatentTensor.attend_packed`. The leading rows with few queries absorb the
        expansion, if `absorb` allows it. For the other rows, expands all latents, including cached
        ones, into temporary blocks of keys and values. Raises `NotPackable` if `value` comes from
        another expansion, and `NotCapturable` if latents of a recorded step must be expanded."""
        if not self.pairs_with(value):
            raise NotPackable("keys and values come from different latents")
        short_rows, long_rows = step.plan(StepMetadata.split, MAX_ABSORBED_QUERIES)
        num_absorbed = 0
        outputs = []
        if short_rows is not None:
            absorbed_attention = self.absorb(query[:, :, : short_rows.num_tokens], value)
            if absorbed_attention is None:
                long_rows = step
            else:
                absorbed_query, latent_blocks, expand = absorbed_attention
                num_absorbed = short_rows.num_tokens
                short_query = absorbed_query[0].transpose(0, 1)
                call = AttentionCall(short_query, latent_blocks, short_rows, *features)
                output = backends.attend(call).unsqueeze(0)
                outputs.append(expand(output)[0])
        if long_rows is not None:
            expansion = self.expansion
            rows, block_ids = long_rows.plan(_expanded_tables)
            dense_latents = []
            for source in (expansion.latent, expansion.rotary):
                latents = quantized.read(source.blocks, block_ids, source.dtype)
                dense_latents.append(latents.flatten(0, 2)[None, None])
            tiles = []
            for states in expansion.expand(*dense_latents):  # keys, then values
                states = states[0].contiguous().unflatten(1, (-1, step.block_size))
                tiles.append(states.transpose(0, 1))  # (blocks, heads, block_size, dim)
            long_query = query[0, :, num_absorbed:].transpose(0, 1)
            expanded_blocks = KVBlocks(tuple(tiles), *tiles)
            call = AttentionCall(long_query, expanded_blocks, rows, *features)
            outputs.append(backends.attend(call))
        if len(outputs) == 1:
            return outputs[0]
        return torch.cat(outputs)


def _expanded_tables(step: StepMetadata) -> tuple[StepMetadata, Tensor]:
    """Returns the step with block tables for the expanded blocks, and the ids of the blocks to
    expand. Block `i` of the result expands the `i`-th of these ids, row by row. Raises
    `NotCapturable` if only the device knows the lengths."""
    if step.lengths is not None:
        raise NotCapturable(
            "the latents of rows with many queries are expanded, and the number of latents depends"
            " on the rows' lengths"
        )
    size = step.block_size
    counts = [-(-seq_len // size) for seq_len in step.seq_lens]
    block_ids = torch.cat([table[:count] for table, count in zip(step.block_tables, counts)])
    device = block_ids.device
    first_ids = list(itertools.accumulate(counts[:-1], initial=0))
    first_column = torch.tensor(first_ids, dtype=torch.int32, device=device)[:, None]
    columns = torch.arange(max(counts), dtype=torch.int32, device=device)
    tables = first_column + columns
    return dataclasses.replace(step, block_tables=tables, block_ids=()), block_ids


# The models' own expansion


def can_absorb(module: nn.Module) -> bool:
    """Whether the layer's `kv_b_proj` is a plain matrix product, which `ExpandedTensor.absorb` can
    apply to queries and outputs."""
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
        and not any(hooks)  # hooks get inputs and outputs, which absorption does not compute
        and all(hasattr(module, dim) for dim in dims)
    )


_originals: dict[type, Callable[..., Any]] = {}  # by class: the `expand_kv` that was replaced


def wrap_expansions(modules: Iterable[nn.Module]) -> None:
    """Replaces the method `expand_kv(latent, rotary)` of the modules' classes where it is
    transformers' own code. The new method returns `ExpandedTensor`s if both arguments are handles
    whose tokens are all in blocks, if `can_absorb` is true for the layer and if gradients are
    disabled; otherwise it calls the original. `unwrap_expansions` undoes the replacement."""
    classes = {type(module) for module in modules}
    for cls in classes - _originals.keys():
        original = vars(cls).get("expand_kv")
        if original is not None and is_from_transformers(original):
            _originals[cls], cls.expand_kv = original, _wrap(original)


def _wrap(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def expand_kv(
        self: Any,
        kv_nope: Tensor,
        k_rot: Tensor,
        *args: Any,
        **kwargs: Any,
    ) -> Any:
        is_pair = isinstance(kv_nope, PagedTensor) and isinstance(k_rot, PagedTensor)
        reads_blocks = is_pair and (kv_nope.fresh is None or kv_nope.step.columns is None)
        can_defer = reads_blocks and not args and not kwargs
        if not can_defer or not can_absorb(self) or torch.is_grad_enabled():
            return original(self, kv_nope, k_rot, *args, **kwargs)
        expand = functools.partial(original, self)
        expansion = Expansion(self, kv_nope, k_rot, expand)
        return ExpandedTensor(expansion, 0), ExpandedTensor(expansion, 1)

    return expand_kv


def unwrap_expansions() -> None:
    """Restores every `expand_kv` that `wrap_expansions` replaced, unless other code has replaced or
    deleted it since."""
    while _originals:
        cls, original = _originals.popitem()
        if getattr(vars(cls).get("expand_kv"), "__wrapped__", None) is original:
            cls.expand_kv = original  # type: ignore[attr-defined]
