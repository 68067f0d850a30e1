"""Bytes of keys and values, from the shapes that a forward without memory hands to its cache."""

from __future__ import annotations

import contextlib
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, EncoderDecoderCache
from transformers.modeling_outputs import BaseModelOutput

from ...attention.latent import can_absorb
from ...cache.groups import GroupSpec
from ...cache.layers import PagedLayer
from ...cache.memory import PagedMemory
from ...cache.paged_cache import PagedCache
from ...cache.storage import KVBlocks
from ...config import PagedConfig
from ...model.self_check import first_line
from ..pictures.kinds import group_label

MAX_BYTES = 4 << 30  # of a model that is run with weights of zero
_LENGTH = 4  # tokens of the forward


@dataclass(frozen=True)
class GroupFootprint:
    """
    Layers that share block tables.

    Args:
        kind (`str`): `"self"`, or `"cross"`, whose tokens are those of the encoder.
        window (`int`, *optional*): Tokens that its layers look back; `None`: all.
        layers (`dict[str, int]`): How many layers store keys and values of which shape, in words.
        is_latent (`bool`): They store the latents of multi-head latent attention.
        block_size (`int`): Tokens in a block.
        block_bytes (`int`): Bytes of one block over all these layers.
        states (`tuple[tuple[torch.Tensor, torch.Tensor], ...]`): Of every layer keys and values like those that it
            stores, `(1, heads, n, dim)` on the meta device.
    """

    kind: str
    window: int | None
    layers: dict[str, int]
    is_latent: bool
    block_size: int
    block_bytes: int
    states: tuple[tuple[torch.Tensor, torch.Tensor], ...]

    @property
    def name(self) -> str:
        """The group in words."""
        return group_label((self.kind, self.window))

    @property
    def shapes(self) -> str:
        """`layers` in one line."""
        alone = len(self.layers) == 1
        return ", ".join(shape if alone else f"{count} x {shape}" for shape, count in self.layers.items())

    @property
    def num_layers(self) -> int:
        """Layers of the group."""
        return len(self.states)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all these layers."""
        return self.block_bytes // self.block_size

    def num_blocks(self, length: int) -> int:
        """Most blocks that a sequence which grows to `length` tokens holds at a time."""
        return GroupSpec(self.kind, self.window).num_spanned(0, length, 1, 0, self.block_size)


def measure(model: PreTrainedModel, block_size: int) -> tuple[list[GroupFootprint], dict[str, int]]:
    """
    The layer groups of a model on the meta device, and the layers of its cache that hold something else, by class: from
    one forward of a few tokens; where that asks for numbers, from one of the same model with weights of zero.

    Raises:
        ValueError: if the forward fails.
    """
    try:
        cache = _run(model)
    except Exception as error:  # something asks for numbers, or the configuration contradicts itself
        cache = _run_zeros(model, error)
    parts = [("self", cache)]
    if isinstance(cache, EncoderDecoderCache):
        parts = [("self", cache.self_attention_cache), ("cross", cache.cross_attention_cache)]
    has_latents = any("expand_kv" in vars(type(module)) and can_absorb(module) for module in model.modules())
    groups: dict[tuple[str, int | None], list[tuple[torch.Tensor, torch.Tensor]]] = {}
    others: Counter[str] = Counter()
    for kind, part in parts:
        twin = PagedCache.from_empty(part, PagedMemory(PagedConfig(block_size=block_size)))
        for stock, paged in zip(part.layers, twin.layers):
            if not isinstance(paged, PagedLayer):
                others[type(stock).__name__] += 1
            elif stock.keys is not None:
                states = stock.keys.to("meta"), stock.values.to("meta")
                groups.setdefault((kind, paged.group.spec.window), []).append(states)
    return [_group(*key, layers, block_size, has_latents) for key, layers in groups.items()], dict(others)


def _run(model: PreTrainedModel) -> DynamicCache | EncoderDecoderCache:
    """The cache after a forward."""
    text = model.config.get_text_config(decoder=True)
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
    with torch.no_grad(), _without_padding_id(model):
        model(**inputs, past_key_values=cache, use_cache=True)
    return cache


def _run_zeros(model: PreTrainedModel, reason: Exception) -> DynamicCache | EncoderDecoderCache:
    """The cache after a forward on the CPU with weights of zero. Raises `ValueError` if that fails or is too large."""
    try:
        if model.get_memory_footprint() > MAX_BYTES:
            raise reason
        twin = copy.deepcopy(model).to_empty(device="cpu")
        for tensor in (*twin.parameters(), *twin.buffers()):
            tensor.data.zero_()
        return _run(twin)
    except Exception as error:
        raise ValueError(
            f"the shapes of {type(model).__name__}'s keys and values are not known, since its forward fails with this "
            f"configuration: {first_line(error)}"
        ) from error


@contextlib.contextmanager
def _without_padding_id(model: PreTrainedModel) -> Iterator[None]:
    """Some models look for padding among the ids, to warn of it, which ids without memory cannot answer."""
    configs = (model.config, model.config.get_text_config(decoder=True))
    before = [getattr(config, "pad_token_id", None) for config in configs]
    try:
        for config in configs:
            config.pad_token_id = None
        yield
    finally:
        for config, value in zip(configs, before):
            config.pad_token_id = value


def _group(
    kind: str,
    window: int | None,
    states: list[tuple[torch.Tensor, torch.Tensor]],
    block_size: int,
    has_latents: bool,
) -> GroupFootprint:
    blocks = [KVBlocks.allocate(1, block_size, keys, values) for keys, values in states]
    is_latent = has_latents and all(_is_latent(layer) for layer in blocks)
    shapes = Counter(_shape(layer, is_latent) for layer in blocks)
    num_bytes = sum(layer.block_bytes for layer in blocks)
    return GroupFootprint(kind, window, dict(shapes), is_latent, block_size, num_bytes, tuple(states))


def _is_latent(layer: KVBlocks) -> bool:
    return layer.keys.shape[1] == 1 and layer.keys.shape[3] != layer.values.shape[3]


def _shape(layer: KVBlocks, is_latent: bool) -> str:
    (_, heads, _, key_dim), value_dim = layer.keys.shape, layer.values.shape[3]
    if is_latent:
        return f"latent of {key_dim}, rotary key of {value_dim}"
    value_heads = layer.values.shape[1]
    if (heads, key_dim) == (value_heads, value_dim):
        return f"{heads} heads of {key_dim}"
    return f"keys {heads} x {key_dim}, values {value_heads} x {value_dim}"
