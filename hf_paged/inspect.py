"""Bytes of keys and values, what fits this machine, the road and the kernels that a model would take.

    python -m hf_paged.inspect MODEL [--block-size N] [--dtype DTYPE] [--device DEVICE] [--length TOKENS] [--json]

MODEL is a folder with a config.json or such a file, a model type (llama), or a class of transformers (Qwen2Config,
LlamaForCausalLM). No weights are read and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import warnings
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers.utils import logging

from .cache.storage import free_bytes
from .config import PagedConfig
from .tools.footprint import GroupFootprint, measure
from .tools.models import build, find_model
from .tools.pictures import format_bytes, require
from .tools.road import Road, find_road

DEFAULT_LENGTH = 2048  # tokens
ROADS = {
    "engine": "the engine",
    "hf_loop": "transformers' own loop",
    "plain": "plain, without blocks",
    "undecided": "the engine or transformers' own loop",
}


@dataclass(frozen=True)
class Report:
    """A model's paged memory on this machine."""

    model: str
    model_type: str
    dtype: torch.dtype
    device: torch.device
    num_parameters: int
    weight_bytes: int
    free_bytes: int  # on the device now
    max_positions: int | None
    lengths: tuple[int, ...]  # of sequences to report, in tokens
    groups: list[GroupFootprint]
    other_layers: dict[str, int]  # of its cache, which hold something else, by class
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
        of_group = ("layers", "is_latent", "block_size", "block_bytes", "token_bytes")
        return {
            **{name: getattr(self, name) for name in (*own, "token_bytes", "other_layers")},
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "groups": [
                {
                    "name": group.name,
                    **asdict(group.spec),
                    "num_layers": len(group.blocks),
                    **{name: getattr(group, name) for name in of_group},
                    "kernels": self.road.kernels.get(group.name, {}),
                }
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
            "road": {"name": self.road.name, "reason": self.road.reason, "in_place": self.road.in_place},
        }


def examine(
    model: str,
    block_size: int = PagedConfig.block_size,
    dtype: torch.dtype | str = "auto",
    device: torch.device | str = "cpu",
    length: int | None = None,
) -> Report:
    """
    Looks at a model without its weights: `model` as in `find_model`, the free memory and the kernels of `device`. A
    `dtype` that is `"auto"` is what the configuration says, else float32; `length` is 2,048 tokens, or the model's
    positions if these are fewer, unless given. Raises `ValueError` for what is not allowed or stands for no model.
    """
    PagedConfig(block_size=block_size)
    if length is not None and length < 1:
        raise ValueError(f"`length` is {length}: it must be at least 1 (tokens)")
    config, cls = find_model(model)
    text, device = config.get_text_config(decoder=True), torch.device(device)
    if dtype == "auto":
        dtype = config.dtype or text.dtype or torch.float32
    dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    built = build(config, cls, dtype, "meta")
    groups, other_layers = measure(built, block_size)
    max_positions = getattr(text, "max_position_embeddings", None)
    length = length or min(DEFAULT_LENGTH, max_positions or DEFAULT_LENGTH)
    return Report(
        model=cls.__name__,
        model_type=config.model_type,
        dtype=dtype,
        device=device,
        num_parameters=built.num_parameters(),
        weight_bytes=built.get_memory_footprint(),
        free_bytes=free_bytes(device),
        max_positions=max_positions,
        lengths=(length, max_positions) if max_positions and max_positions != length else (length,),
        groups=groups,
        other_layers=other_layers,
        road=find_road(built, groups, device),
    )


def print_report(report: Report) -> None:
    """Prints tables with rich. Raises `ImportError` without it."""
    console, escape = require("rich.console").Console(), require("rich.markup").escape
    dtype, groups = str(report.dtype).removeprefix("torch."), report.groups
    console.print(f"[bold]{escape(report.model)}[/] ({escape(report.model_type)}), {dtype}, on {report.device}")
    console.print(f"{report.num_parameters:,} parameters, {format_bytes(report.weight_bytes)} of weights")
    if groups:
        stored = [_stored(group) for group in groups]
        if len(groups) > 1:
            block_bytes = sum(group.block_bytes for group in groups)
            stored.append(("all", "", format_bytes(report.token_bytes), format_bytes(block_bytes)))
        title = f"Keys and values, blocks of {groups[0].block_size} tokens"
        console.print(_table(title, ("layers", "each stores", "a token", "a block"), stored))
    else:
        console.print("It keeps no keys and values in blocks.")
    for name, count in report.other_layers.items():
        console.print(f"{count} layers hold a state of their own, not in blocks ({escape(name)}).")
    if groups:
        free, weights = format_bytes(report.free_bytes), format_bytes(report.weight_bytes)
        title = f"What fits: {free} are free, {format_bytes(report.left_bytes)} beside the weights"
        if report.weight_bytes > report.free_bytes:
            title = f"Nothing fits: {free} are free, the weights alone take {weights}"
        columns = ("sequences of", "blocks of one", "bytes of one", "sequences", "tokens")
        console.print(_table(title, columns, [_fit(report, length) for length in report.lengths]))
    if any(group.spec.kind == "cross" for group in groups):
        console.print("The encoder's output is taken to be as long as the sequence.")
    console.print(f"[bold]Road[/] {ROADS[report.road.name]}: {escape(report.road.reason)}")
    for name, kernels in report.road.kernels.items():
        chosen = ", ".join(f"{what}: {backend}" for what, backend in kernels.items())
        console.print(f"[bold]Kernels[/] {escape(name)}: {chosen}")


def _stored(group: GroupFootprint) -> tuple[str, ...]:
    """What a group's layers store, a row of the table."""
    layers = group.layers
    shapes = ", ".join(shape if len(layers) == 1 else f"{count} x {shape}" for shape, count in layers.items())
    name = f"{len(group.blocks)} with {group.name}"
    return name, shapes, format_bytes(group.token_bytes), format_bytes(group.block_bytes)


def _fit(report: Report, length: int) -> tuple[str, ...]:
    """How many sequences of a length fit this machine, a row of the table."""
    blocks = sum(group.num_blocks(length) for group in report.groups)
    count, one = report.num_sequences(length), format_bytes(report.sequence_bytes(length))
    return f"{length:,} tokens", f"{blocks:,}", one, f"{count:,}", f"{count * length:,}"


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[str]]) -> Any:
    box = require("rich.box").SIMPLE_HEAD
    table = require("rich.table").Table(title=title, title_justify="left", title_style="bold", box=box)
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    for row in rows:
        table.add_row(*row)
    return table


def main(arguments: list[str] | None = None) -> int:
    """Prints the report and returns 0, or what is wrong and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_paged.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    devices = ["cpu"] if accelerator is None else ["cpu", accelerator.type]

    def device(name: str) -> torch.device:
        with contextlib.suppress(RuntimeError):  # no device's name
            if torch.device(name).type in devices:
                return torch.device(name)
        raise argparse.ArgumentTypeError(f"{name!r} is not here: this machine has {', '.join(devices)}")

    dtypes = ("auto", "float32", "bfloat16", "float16")
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--block-size", type=int, default=PagedConfig.block_size, help="tokens in a block (%(default)s)"
    )
    parser.add_argument("--dtype", choices=dtypes, default="auto", help="auto: what the configuration says")
    parser.add_argument("--device", type=device, default=devices[-1], help="whose memory (%(default)s)")
    parser.add_argument("--length", type=int, help="tokens of the sequences that are to fit (2048, or fewer)")
    parser.add_argument("--json", action="store_true", help="print JSON, for which rich is not needed")
    options = vars(parser.parse_args(arguments))
    as_json = options.pop("json")
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    try:
        if not as_json:
            require("rich")
        report = examine(**options)
        if as_json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            print_report(report)
    except (ImportError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
