"""LoRA weights of layers that are sharded over several processes: this process's shard, split as
PEFT does (`peft.tuners.lora.model.add_lora_tp_hooks_dtensor`)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import compat
from ..kernels.lora import LoraWeights

# styles of layers whose whole inputs and outputs are in every process
_WHOLE = {None, "colwise_gather_output", "colwise_rep", "rowwise_rep", "rowwise_split_input"}
_GIVES_A_PART = {"colwise", "packed_colwise"}
_TAKES_A_PART = {"rowwise"}


def is_split(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def local(tensor: Any) -> Any:
    """This process's shard of a tensor, the same object each time; a tensor that is not split, or
    `None`, as it is."""
    if not is_split(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_weights(
    a: Any,
    b: Any,
    bias: Any,
    scaling: float,
) -> LoraWeights | None:
    """This process's shard of the weights of a PEFT layer; `None` if they are split in another way
    than PEFT's."""
    group = None
    for tensor, dim in ((a, 1), (b, 0), (bias, 0)):
        if not is_split(tensor):
            continue
        placements = tensor.placements
        if all(placement.is_replicate() for placement in placements):
            continue
        if len(placements) != 1 or not placements[0].is_shard(dim):
            return None
        if tensor is a:
            group = tensor.device_mesh.get_group()
    return LoraWeights(a, b, bias, scaling, group).map(local)


def own_part(
    model: nn.Module,
    name: str,
    module: nn.Module,
    lora: LoraWeights,
) -> LoraWeights:
    """This process's shard of whole weights for a linear layer; `name` is its name in the model
    without adapters. Raises `ValueError` if the layer is split as adapters are not."""
    weight: Any = module.weight
    style = None
    if is_split(weight):
        style = compat.shard_style(model, name)
    if style in _WHOLE:
        return lora
    styles = _GIVES_A_PART | _TAKES_A_PART
    if not isinstance(module, nn.Linear) or style not in styles:
        raise ValueError(
            f"{name} is split over processes in a way that adapters are not ({style!r})"
        )

    def part(whole: Tensor) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        split = distribute_tensor(
            whole.detach(),
            weight.device_mesh,
            weight.placements,
            src_data_rank=None,
        )
        shard: Tensor = local(split).to(
            whole.device,
            copy=True,
            memory_format=torch.contiguous_format,
        )
        return shard

    if style in _TAKES_A_PART:
        return lora._replace(a=part(lora.a), group=weight.device_mesh.get_group())
    bias = None if lora.bias is None else part(lora.bias)
    return lora._replace(b=part(lora.b), bias=bias)
