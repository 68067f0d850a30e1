"""Runs a decode step on a device that this machine lacks: tensors with shape and device but without
data.

On the CPU all tensors share a device, so copies between host and device go unnoticed. Here the
weights, the inputs and the blocks of a step are on another device (`meta`, under PyTorch's
`FakeTensorMode`).
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import PretrainedConfig

from hf_paged.attention import backends, masks
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.batching.execution.packed import PackedRunner
from hf_paged.cache import layers
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.rooms import room_if_installed
from hf_paged.step import Cascade, Lengths, StepMetadata
from hf_paged.tape import record
from hf_paged.tape.inputs import StaticInputs
from hf_paged.tape.record import CaptureGuard, HostCreation, HostResultReplay

DEVICE = torch.device("meta")


class NumberMode(FakeTensorMode):
    """Knows the number in a tensor filled with it, so that code can read it, as on a device."""

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().dispatch(func, types, args, kwargs)
        if func is torch.ops.aten.full.default and result.numel() == 1:
            result.constant = torch.tensor(args[1], dtype=result.dtype, device="cpu")
        return result


def record_on_a_device(runner: PackedRunner, inputs: StaticInputs) -> None:
    """Runs the step of `inputs` twice, as `CudaGraphs.capture` does. Raises the errors that a
    capture would raise."""
    fake = NumberMode(allow_non_fake_inputs=True)
    known: dict[int, Tensor] = {}

    def move(tensor: Tensor) -> Tensor:
        if id(tensor) not in known:
            with fake:
                sizes = tensor.shape, tensor.stride()
                known[id(tensor)] = torch.empty_strided(*sizes, dtype=tensor.dtype, device=DEVICE)
        return known[id(tensor)]

    def move_step(step: StepMetadata) -> StepMetadata:
        assert step.lengths is not None
        lengths = Lengths(*(None if x is None else move(x) for x in step.lengths))
        tables, slots, cascade = move(step.block_tables), step.slots, step.cascade
        if cascade is not None:
            cascade = Cascade(
                move_step(cascade.tails), move_step(cascade.prefixes), move(cascade.query_index)
            )
        slots = None if slots is None else move(slots)
        return dataclasses.replace(
            step, block_tables=tables, slots=slots, lengths=lengths, cascade=cascade
        )

    moved = copy.copy(runner)
    moved.model, moved.device = _moved(runner.model, move), DEVICE
    first = CaptureGuard()

    def run() -> None:
        steps = [move_step(step) for step in inputs.steps()]
        kept = None if inputs.logit_indices is None else move(inputs.logit_indices)
        moved._forward(move(inputs.token_ids), move(inputs.positions), steps, kept, None)

    with torch.no_grad(), _without_kernels(runner, move):
        # earlier eager steps may have moved cached tensors to the device
        with contextlib.suppress(Exception), fake:
            run()
        for mode in (first, HostResultReplay(first.host_results)):
            with fake, HostCreation(), mode:
                run()


def _moved(model: Any, move: Any) -> Any:
    """A copy with parameters and buffers on the device and other tensors left in place, like `to`.
    It shares the model's configs, which identify its attention."""
    memo: dict[int, Any] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        is_parameter = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = (
            nn.Parameter(move(tensor), requires_grad=False) if is_parameter else move(tensor)
        )
    for module in model.modules():
        memo |= {
            id(value): value
            for value in vars(module).values()
            if isinstance(value, PretrainedConfig)
        }
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def _without_kernels(runner: PackedRunner, move: Any) -> Any:
    """Replaces kernels: stores nothing; attention returns tensors of the right shape."""

    def attend(call: AttentionCall) -> Tensor:
        return call.query.new_empty(*call.query.shape[:2], call.blocks.values.shape[-1])

    def attend_packed(key: Any, query: Tensor, *arguments: Any) -> Tensor:
        width = key.expansion.module.v_head_dim
        return query.new_empty(query.shape[2], query.shape[1], width)

    def unpadded_columns(mask: Tensor | None, batch_size: int, length: int) -> Any:
        if mask is not None:
            mask.bool().cpu()
        return (0,) * batch_size, (length,) * batch_size

    def forget() -> None:
        for layer in runner.cache.layers:  # cached handles refer to blocks on one device
            if hasattr(layer, "packed_handles"):
                layer.packed_handles.clear()

    of_latents: list[tuple[Any, str, Any]] = []
    if (latent := room_if_installed("latent")) is not None:
        of_latents = [
            (latent.ExpandedTensor, "attend_packed", attend_packed),
            (latent, "can_absorb", lambda module: True),
        ]
    with contextlib.ExitStack() as stack:
        for owner, name, value in [
            *of_latents,
            (backends, "attend", attend),
            (masks, "unpadded_columns", unpadded_columns),
            (record, "_are_equal", lambda a, b: True),  # neither has data
            (KVBlocks, "store", lambda *arguments: None),
            (layers, "store_signature", lambda keys, values: ()),
        ]:
            stack.enter_context(mock.patch.object(owner, name, value))
        for group in runner.cache.groups.values():
            blocks = {
                index: each.like([move(x) for x in each.data])
                for index, each in group.group_memory.storage.layers.items()
            }
            for each in blocks.values():
                each.stores[()] = lambda *arguments: None
            stack.enter_context(mock.patch.object(group.group_memory.storage, "layers", blocks))
        forget()
        try:
            yield
        finally:
            forget()
