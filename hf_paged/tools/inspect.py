"""Reports the memory of a model's keys and values, the number of sequences that fit on this
machine, the model's route and its kernels.

    python -m hf_paged inspect MODEL [--block-size N|auto] [--dtype DTYPE] [--device DEVICE]
                                     [--length TOKENS] [--kv-dtype DTYPE] [--json]

MODEL is a folder with a config.json, the path of such a file, a model type (llama), a class of
transformers (Qwen2Config, LlamaForCausalLM), or a model of the Hub that is cached on this machine.
The command reads no weights and downloads nothing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import textwrap
import warnings
from collections import Counter
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.utils import logging

from ..cache.block_sizes import BlockSizes, Choice, Costs
from ..cache.free_memory import free_bytes
from ..cache.groups import GroupSpec, group_label
from ..cache.kv_blocks import KVBlocks
from ..config import AUTO, KV_DTYPES, PagedConfig
from ..kernels.costs import find_costs
from ..model.registry import Route
from .figures import format_bytes
from .models import (
    build_model,
    find_kernels,
    find_model,
    find_route,
    measure_blocks,
    saved_generation_config,
    stores_latents,
)


@dataclass(frozen=True)
class Group:
    """A layer group: layers that share block tables."""

    name: str
    kind: str  # "self", or "cross" for the encoder's tokens
    window: int | None  # sliding window in tokens; `None`: full attention
    num_layers: int
    layers: dict[str, int]  # number of layers, by shape of their K/V
    is_latent: bool
    block_size: int  # tokens
    reason: str | None  # why "auto" chose the block size; `None` if it is given
    block_bytes: int  # over all layers of the group
    token_bytes: int
    kernels: dict[str, str]  # attention backend by step; empty if attention gathers blocks

    def num_blocks(self, length: int) -> int:
        """Returns the maximum number of blocks that a sequence holds at once while it grows to
        `length` tokens."""
        return GroupSpec(self.kind, self.window).num_spanned(0, length, 1, 0, self.block_size)


@dataclass(frozen=True)
class Report:
    """A model's paged memory on this machine."""

    model: str
    model_type: str
    num_parameters: int
    weight_bytes: int
    free_bytes: int  # on the device now
    left_bytes: int  # free bytes that remain for blocks after the weights are loaded
    max_positions: int | None
    token_bytes: int  # of a token's K/V over all layers, while it is in every sliding window
    tokens_per_gib: int  # tokens in a GiB of `hf_paged.budget`, host memory or disk
    other_layers: dict[str, int]  # number of cache layers without blocks, by class
    dtype: str
    kv_dtype: str | None  # dtype in which K/V are stored; `None`: in `dtype`
    device: str
    groups: list[Group]
    # for one or two lengths in tokens: the bytes of a sequence of this length, and the numbers of
    # sequences and of their tokens that fit beside the weights
    fits: list[dict[str, int]]
    route: Route

    def to_dict(self) -> dict[str, Any]:
        fields = asdict(self)
        del fields["route"]
        route = self.route
        fields["road"] = {"name": route.road, "reason": route.reason, "in_place": route.in_place}
        return fields


def examine(
    model: str,
    block_size: int | str = PagedConfig.block_size,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    length: int | None = None,
    kv_dtype: str | None = None,
) -> Report:
    """Examines a model without its weights. `model`: a name as in `find_model`. `dtype="auto"` is
    the dtype of the model's config, or float32 if the config has none. `length` defaults to 2,048
    tokens, or to the number of the model's positions if that is less. `kv_dtype` and `block_size`
    are as in `PagedConfig`; `block_size="auto"` chooses sizes for sequences of `length` tokens.
    Raises `ValueError` for invalid arguments."""
    PagedConfig(block_size=block_size, kv_dtype=kv_dtype)
    if length is not None and length < 1:
        raise ValueError(f"`length` is {length}: it must be at least 1 (tokens)")
    config, model_class = find_model(model)
    text_config = config.get_text_config(decoder=True)
    device = torch.device(device)
    if dtype == "auto":
        dtype = config.dtype or text_config.dtype or torch.float32
    if isinstance(dtype, str):
        dtype = getattr(torch, dtype)
    meta_model = build_model(config, model_class, dtype, "meta")
    meta_model.generation_config = saved_generation_config(model) or meta_model.generation_config
    max_positions = getattr(text_config, "max_position_embeddings", None)
    length = length or min(2048, max_positions or 2048)
    costs = Costs(*find_costs(device, dtype, kv_dtype)) if block_size == AUTO else None
    sizes = BlockSizes(costs, [length], block_size=block_size)
    group_blocks, other_layers = measure_blocks(meta_model, sizes.of, kv_dtype)
    route = find_route(meta_model)
    kernel_device = device if route.in_place else None
    groups = [
        _group(meta_model, spec, blocks, kernel_device, sizes.chosen.get(spec))
        for spec, blocks in group_blocks.items()
    ]
    weight_bytes = meta_model.get_memory_footprint()
    free = free_bytes(device)
    left_bytes = max(0, free - weight_bytes)
    token_bytes = sum(group.token_bytes for group in groups)
    fits = []
    for fit_length in dict.fromkeys((length, max_positions or length)):
        sequence_bytes = sum(group.num_blocks(fit_length) * group.block_bytes for group in groups)
        num_sequences = left_bytes // sequence_bytes if sequence_bytes else 0
        fits.append(
            {
                "length": fit_length,
                "sequence_bytes": sequence_bytes,
                "sequences": num_sequences,
                "tokens": num_sequences * fit_length,
            }
        )
    return Report(
        model=model_class.__name__,
        model_type=config.model_type,
        num_parameters=meta_model.num_parameters(),
        weight_bytes=weight_bytes,
        free_bytes=free,
        left_bytes=left_bytes,
        max_positions=max_positions,
        token_bytes=token_bytes,
        tokens_per_gib=(1 << 30) // token_bytes if token_bytes else 0,
        other_layers=other_layers,
        dtype=str(dtype).removeprefix("torch."),
        kv_dtype=kv_dtype,
        device=str(device),
        groups=groups,
        fits=fits,
        route=route,
    )


def _group(
    model: PreTrainedModel,
    spec: GroupSpec,
    blocks: list[KVBlocks],
    device: torch.device | None,
    choice: Choice | None,
) -> Group:
    is_latent = stores_latents(model, blocks)
    block_size = blocks[0].keys.shape[2]
    block_bytes = sum(layer.block_bytes for layer in blocks)
    shapes = Counter(_shape(layer, is_latent) for layer in blocks)
    return Group(
        name=group_label(spec.label),
        kind=spec.kind,
        window=spec.window,
        num_layers=len(blocks),
        layers=dict(shapes),
        is_latent=is_latent,
        block_size=block_size,
        reason=None if choice is None else choice.reason,
        block_bytes=block_bytes,
        token_bytes=block_bytes // block_size,
        kernels=find_kernels(blocks[0], spec.window, is_latent, device)
        if device is not None
        else {},
    )


def _shape(layer: KVBlocks, is_latent: bool) -> str:
    _, heads, _, key_dim = layer.keys.shape
    _, value_heads, _, value_dim = layer.values.shape
    if is_latent:
        return f"latent of {key_dim}, rotary key of {value_dim}"
    if (heads, key_dim) == (value_heads, value_dim):
        return f"{heads} heads of {key_dim}"
    return f"keys {heads} x {key_dim}, values {value_heads} x {value_dim}"


def print_report(report: Report) -> None:
    """Prints the report as text, in lines of at most 80 columns."""
    groups = report.groups
    storage = ""
    if report.kv_dtype is not None:
        storage = f", stored as {report.kv_dtype} with one scale per token and head"
    lines = [
        f"{report.model} ({report.model_type}), {report.dtype}, on {report.device}",
        f"{report.num_parameters:,} parameters, {format_bytes(report.weight_bytes)} of weights",
        f"Keys and values{storage}:" if groups else "No layer keeps keys and values in blocks.",
    ]
    for group in groups:
        shapes = ", ".join(f"{count} x {shape}" for shape, count in group.layers.items())
        lines.append(f"  {group.num_layers} layers with {group.name}: {shapes}")
        block = f"{format_bytes(group.block_bytes)} per block of {group.block_size} tokens"
        lines.append(f"    {format_bytes(group.token_bytes)} per token, {block}")
        if group.reason is not None:
            lines.append(f"    {group.block_size} tokens per block: {group.reason}")
    if len(groups) > 1:
        lines.append(f"  all layers: {format_bytes(report.token_bytes)} per token")
    for name, num_layers in report.other_layers.items():
        lines.append(f"{num_layers} layers hold a state outside of blocks ({name}).")
    if groups:
        free_text = format_bytes(report.free_bytes)
        left_text = format_bytes(report.left_bytes)
        lines.append(f"Memory: {free_text} free. The weights leave {left_text} for:")
        for fit in report.fits:
            length = fit["length"]
            num_blocks = sum(group.num_blocks(length) for group in groups)
            lines.append(
                f"  {fit['sequences']:,} sequences of {length:,} tokens, {fit['tokens']:,}"
                " tokens in all"
            )
            lines.append(f"    each {num_blocks:,} blocks, {format_bytes(fit['sequence_bytes'])}")
        lines.append(
            f"A GiB of `hf_paged.budget`, or of `prefix_tiers`, holds {report.tokens_per_gib:,}"
            " tokens"
        )
    if any(group.kind == "cross" for group in groups):
        lines.append("The encoder's output is assumed to be as long as the sequence.")
    lines.append(f"Route: {report.route.road}: {report.route.reason}")
    if report.route.in_place:
        for group in groups:
            backends = ", ".join(f"{step}: {backend}" for step, backend in group.kernels.items())
            lines.append(f"Kernels, {group.name}: {backends}")
    wrapped_lines = [textwrap.fill(line, 80, subsequent_indent="    ") for line in lines]
    print("\n".join(wrapped_lines))


def main(arguments: list[str] | None = None) -> int:
    """Prints the report and returns 0, or prints the error and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_paged inspect",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    devices = ["cpu"]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is not None:
        devices.append(accelerator.type)

    def device(name: str) -> torch.device:
        with contextlib.suppress(RuntimeError):  # not a device name
            if torch.device(name).type in devices:
                return torch.device(name)
        raise argparse.ArgumentTypeError(
            f"device {name!r} is not available: this machine has {', '.join(devices)}"
        )

    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--block-size",
        type=lambda text: text if text == AUTO else int(text),
        default=PagedConfig.block_size,
        help="tokens, or auto: the best size for sequences of --length (default: %(default)s)",
    )
    parser.add_argument(
        "--dtype", choices=dtypes, default="auto", help="auto: the dtype of the configuration"
    )
    parser.add_argument(
        "--device",
        type=device,
        default=devices[-1],
        help="the device whose memory and kernels are reported (default: %(default)s)",
    )
    parser.add_argument(
        "--length",
        type=int,
        help="tokens of each sequence (default: 2048, or the model's positions if these are fewer)",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        help="the dtype in which keys and values are stored (default: the model's)",
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    try:
        report = examine(**options)
        if as_json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            print_report(report)
    except (ImportError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0
