"""Bytes of keys and values, from the shapes that a forward without memory hands to its cache."""

from __future__ import annotations

import copy
from collections import Counter, defaultdict
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ..attention.latent import can_absorb
from ..cache.groups import GroupSpec
from ..cache.layers import PagedLayer
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.storage import KVBlocks
from ..config import PagedConfig
from ..model.self_check import first_line
from .pictures import group_label

MAX_BYTES = 4 << 30  # of a model that is run with weights of zero
_LENGTH = 4  # tokens of the forward


@dataclass(frozen=True)
class GroupFootprint:
    """Layers that share block tables: one block of `block_size` tokens of each layer, on the meta device."""

    spec: GroupSpec
    blocks: list[KVBlocks]
    block_size: int
    is_latent: bool  # multi-head latent attention: keys are the latents, values the rotary keys

    @property
    def name(self) -> str:
        """The group in words."""
        return group_label(self.spec.label)

    @property
    def layers(self) -> dict[str, int]:
        """How many layers store keys and values of which shape, in words."""
        return Counter(map(self._shape, self.blocks))

    def _shape(self, layer: KVBlocks) -> str:
        (_, heads, _, key_dim), (_, value_heads, _, value_dim) = layer.keys.shape, layer.values.shape
        if self.is_latent:
            return f"latent of {key_dim}, rotary key of {value_dim}"
        if (heads, key_dim) == (value_heads, value_dim):
            return f"{heads} heads of {key_dim}"
        return f"keys {heads} x {key_dim}, values {value_heads} x {value_dim}"

    @property
    def block_bytes(self) -> int:
        """Bytes of one block over all these layers."""
        return sum(layer.block_bytes for layer in self.blocks)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all these layers."""
        return self.block_bytes // self.block_size

    def num_blocks(self, length: int) -> int:
        """Most blocks that a sequence which grows to `length` tokens holds at a time."""
        return self.spec.num_spanned(0, length, 1, 0, self.block_size)


def measure(model: PreTrainedModel, block_size: int) -> tuple[list[GroupFootprint], dict[str, int]]:
    """
    The layer groups of a model on the meta device, and the layers of its cache that hold something else, by class.
    Raises `ValueError` if the forward fails.
    """
    cache = _forward_cache(model)
    parts: dict[str, DynamicCache] = {"self": cache}
    if isinstance(cache, EncoderDecoderCache):
        parts = {"self": cache.self_attention_cache, "cross": cache.cross_attention_cache}
    groups: defaultdict[GroupSpec, list[KVBlocks]] = defaultdict(list)
    others: Counter[str] = Counter()
    for kind, part in parts.items():
        twin = PagedCache.from_empty(part, PagedMemory(PagedConfig(block_size=block_size)), kind)
        for stock, paged in zip(part.layers, twin.layers):
            if not isinstance(paged, PagedLayer):
                others[type(stock).__name__] += 1
            elif stock.keys is not None:
                states = stock.keys.to("meta"), stock.values.to("meta")
                groups[paged.group.spec].append(KVBlocks.allocate(1, block_size, *states))
    has_latents = any("expand_kv" in vars(type(module)) and can_absorb(module) for module in model.modules())
    found = [
        GroupFootprint(spec, blocks, block_size, has_latents and all(map(_may_be_latent, blocks)))
        for spec, blocks in groups.items()
    ]
    return found, others


def _may_be_latent(layer: KVBlocks) -> bool:
    return layer.keys.shape[1] == 1 and layer.keys.shape[3] != layer.values.shape[3]


def _forward_cache(model: PreTrainedModel) -> DynamicCache | EncoderDecoderCache:
    """The cache after a forward of a copy; where that asks for numbers, of a copy on the CPU with weights of zero."""
    try:
        twin = copy.deepcopy(model)
        try:
            return _run(twin)
        except Exception:  # something asks for numbers, or the configuration contradicts itself
            if model.get_memory_footprint() > MAX_BYTES:
                raise
        twin.to_empty(device="cpu")
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.data.zero_()
        return _run(twin)
    except Exception as error:
        raise ValueError(
            f"the shapes of {type(model).__name__}'s keys and values are not known, since its forward fails with this "
            f"configuration: {first_line(error)}"
        ) from error


def _run(model: PreTrainedModel) -> DynamicCache | EncoderDecoderCache:
    text = model.config.get_text_config(decoder=True)
    for config in (model.config, text):
        config.pad_token_id = None  # some models look for it among the ids, to warn, and ids may be without memory
    cache: DynamicCache | EncoderDecoderCache = DynamicCache(config=text)
    ids = torch.zeros(1, _LENGTH, dtype=torch.long, device=model.device)
    inputs: dict[str, object] = {"input_ids": ids}
    if model.config.is_encoder_decoder:
        cache = EncoderDecoderCache(cache, DynamicCache(config=text))
        width = getattr(model.config, "d_model", None) or model.config.hidden_size
        encoded = torch.zeros(1, _LENGTH, width, dtype=model.dtype, device=model.device)
        inputs = {"decoder_input_ids": ids, "encoder_outputs": BaseModelOutput(last_hidden_state=encoded)}
    if hasattr(model, "set_experts_implementation"):
        model.set_experts_implementation("batched_mm")  # which needs no count of the tokens of an expert
    with torch.no_grad():
        model(**inputs, past_key_values=cache, use_cache=True)
    return cache
