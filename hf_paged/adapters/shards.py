"""Finds this process's shards of the LoRA weights of sharded layers. PEFT splits these weights in
`peft.tuners.lora.model.add_lora_tp_hooks_dtensor`, and this module splits them in the same way.
`kernels/lora.py` sums products over the processes."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.lora import LoraWeights

# styles of layers whose inputs and outputs are whole in every process
_REPLICATED = {None, "colwise_gather_output", "colwise_rep", "rowwise_rep", "rowwise_split_input"}
_COLWISE = {"colwise", "packed_colwise"}
_ROWWISE = {"rowwise"}


def is_dtensor(tensor: Any) -> bool:
    """Whether a tensor is a `DTensor`."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "to_local")


def to_local(tensor: Any) -> Any:
    """Returns this process's shard of a `DTensor`, the same object in every call. Returns any other
    tensor, and `None`, unchanged."""
    if not is_dtensor(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()


def local_weights(
    a: Any,
    b: Any,
    bias: Any,
    scaling: float,
) -> LoraWeights | None:
    """Returns this process's shard of the weights of a PEFT layer, with the factor `scaling`;
    `None` if the weights are not split as PEFT splits them."""
    group = None
    for tensor, dim in ((a, 1), (b, 0), (bias, 0)):
        if not is_dtensor(tensor):
            continue
        placements = tensor.placements
        if all(placement.is_replicate() for placement in placements):
            continue
        if len(placements) != 1 or not placements[0].is_shard(dim):
            return None
        if tensor is a:
            group = tensor.device_mesh.get_group()
    return LoraWeights(a, b, bias, scaling, group).map(to_local)


def local_shard(
    model: nn.Module,
    name: str,
    module: nn.Module,
    lora: LoraWeights,
) -> LoraWeights:
    """Returns this process's shard of the whole weights `lora` for the linear layer `module`, whose
    name in the model without adapters is `name`. Raises `ValueError` if adapters cannot be split
    like this layer."""
    weight: Any = module.weight
    style = None
    if is_dtensor(weight):
        style = _shard_style(model, name)
    if style in _REPLICATED:
        return lora
    styles = _COLWISE | _ROWWISE
    if not isinstance(module, nn.Linear) or style not in styles:
        raise ValueError(
            f"{name} ({type(module).__name__}) is split over processes in the style {style!r}, in"
            " which adapters cannot be split"
        )

    def shard_of(whole: Tensor) -> Tensor:
        from torch.distributed.tensor import distribute_tensor

        split = distribute_tensor(
            whole.detach(),
            weight.device_mesh,
            weight.placements,
            src_data_rank=None,
        )
        shard: Tensor = to_local(split).to(
            whole.device,
            copy=True,
            memory_format=torch.contiguous_format,
        )
        return shard

    if style in _ROWWISE:
        return lora._replace(a=shard_of(lora.a), group=weight.device_mesh.get_group())
    bias = None if lora.bias is None else shard_of(lora.bias)
    return lora._replace(b=shard_of(lora.b), bias=bias)


def _shard_style(model: Any, name: str) -> str | None:
    """Returns transformers' name of the style in which `from_pretrained` sharded the weights of the
    module `name`, such as `"colwise"`; `None` if it did not shard them."""
    plan = getattr(model, "tp_plan", None) or {}
    pattern = re.sub(r"\.\d+(?=\.|$)", ".*", name)
    return plan.get(pattern)
