"""What the paged memory would be for a model, as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...cache.storage import free_bytes
from ...config import PagedConfig
from .footprint import GroupFootprint, measure
from .models import build, find_model
from .road import Road, find_road

DEFAULT_LENGTH = 2048  # tokens


@dataclass(frozen=True)
class Report:
    """
    A model's paged memory on this machine.

    Args:
        model, model_type (`str`): The class, and the type of its configuration.
        dtype (`torch.dtype`), device (`torch.device`): As asked for.
        num_parameters, weight_bytes, free_bytes (`int`): Of the whole model in that dtype; free on the device now.
        max_positions (`int`, *optional*): Tokens that the configuration allows.
        lengths (`tuple[int, ...]`): Lengths of sequences to report, in tokens.
        groups (`list[GroupFootprint]`): Its layer groups.
        other_layers (`dict[str, int]`): Layers of its cache that hold something else, by class.
        road ([`Road`]): How a call would go.
    """

    model: str
    model_type: str
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    weight_bytes: int
    free_bytes: int
    max_positions: int | None
    lengths: tuple[int, ...]
    groups: list[GroupFootprint]
    other_layers: dict[str, int]
    road: Road

    @property
    def left_bytes(self) -> int:
        """Free bytes that the weights leave to blocks."""
        return max(0, self.free_bytes - self.weight_bytes)

    @property
    def token_bytes(self) -> int:
        """Bytes of one token over all layers, before any window has passed it."""
        return sum(group.token_bytes for group in self.groups)

    def sequence_bytes(self, length: int) -> int:
        """Bytes of the blocks of one sequence of `length` tokens; an encoder's output is taken to be as long."""
        return sum(group.num_blocks(length) * group.block_bytes for group in self.groups)

    def num_sequences(self, length: int) -> int:
        """Number of sequences of `length` tokens whose blocks fit beside the weights."""
        num_bytes = self.sequence_bytes(length)
        return self.left_bytes // num_bytes if num_bytes else 0

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: bytes, tokens and names."""
        own = ("model", "model_type", "num_parameters", "weight_bytes", "free_bytes", "left_bytes", "max_positions")
        of_group = ("name", "kind", "window", "num_layers", "layers", "is_latent", "block_size", "block_bytes")
        return {
            **_picked(self, *own, "token_bytes", "other_layers"),
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "groups": [
                {**_picked(group, *of_group, "token_bytes"), "kernels": self.road.kernels.get(group.name, {})}
                for group in self.groups
            ],
            "fits": [
                {
                    "length": length,
                    "sequence_bytes": self.sequence_bytes(length),
                    "sequences": self.num_sequences(length),
                    "tokens": self.num_sequences(length) * length,
                }
                for length in self.lengths
            ],
            "road": _picked(self.road, "name", "reason", "in_place"),
        }


def _picked(item: object, *names: str) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


def examine(
    name: str,
    *,
    block_size: int = PagedConfig.block_size,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    length: int | None = None,
) -> Report:
    """
    Looks at a model without its weights, on the meta device.

    Args:
        name (`str`): As in `find_model`.
        block_size (`int`): Tokens in a block.
        dtype (`torch.dtype`, *optional*): Of weights, keys and values; by default what the configuration says, else
            float32.
        device (`torch.device` or `str`): Whose free memory and kernels to report.
        length (`int`, *optional*): Tokens of the sequences that are to fit; by default 2,048, or as many as the model
            has positions if these are fewer.

    Raises:
        ValueError: for a name that stands for no model, a block size that is not allowed, or a length below 1.
    """
    PagedConfig(block_size=block_size)
    if length is not None and length < 1:
        raise ValueError(f"`length` is {length}: it must be at least 1 (tokens)")
    config, cls = find_model(name)
    text, device = config.get_text_config(decoder=True), torch.device(device)
    found = dtype or config.dtype or text.dtype or torch.float32
    dtype = getattr(torch, found) if isinstance(found, str) else found
    model = build(config, cls, dtype, "meta")
    groups, other_layers = measure(model, block_size)
    max_positions = getattr(text, "max_position_embeddings", None)
    if length is None:
        length = min(DEFAULT_LENGTH, max_positions or DEFAULT_LENGTH)
    return Report(
        model=cls.__name__,
        model_type=config.model_type,
        dtype=dtype,
        device=device,
        num_parameters=model.num_parameters(),
        weight_bytes=model.get_memory_footprint(),
        free_bytes=free_bytes(device),
        max_positions=max_positions,
        lengths=(length, max_positions) if max_positions and max_positions != length else (length,),
        groups=groups,
        other_layers=other_layers,
        road=find_road(model, groups, device),
    )
