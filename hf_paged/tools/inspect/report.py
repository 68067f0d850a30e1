"""All that is found out about a model, as data and as tables."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ...cache.storage import free_bytes
from ...config import PagedConfig
from ..pictures.figures import require
from ..pictures.html import format_bytes
from .footprint import Footprint, measure
from .models import build, find_model, num_bytes
from .road import Road, find_road, label

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
    footprint: Footprint
    road: Road

    @property
    def left_bytes(self) -> int:
        """Free bytes that the weights leave to blocks."""
        return max(0, self.free_bytes - self.weight_bytes)

    def num_sequences(self, length: int) -> int:
        """Number of sequences of `length` tokens whose blocks fit beside the weights."""
        num_bytes = self.footprint.sequence_bytes(length)
        return self.left_bytes // num_bytes if num_bytes else 0

    def to_dict(self) -> dict[str, Any]:
        """What `--json` prints: bytes, tokens and names."""
        return {
            "model": self.model,
            "model_type": self.model_type,
            "dtype": str(self.dtype).removeprefix("torch."),
            "device": str(self.device),
            "num_parameters": self.num_parameters,
            "weight_bytes": self.weight_bytes,
            "free_bytes": self.free_bytes,
            "left_bytes": self.left_bytes,
            "max_positions": self.max_positions,
            "token_bytes": self.footprint.token_bytes,
            "groups": [
                {
                    "name": label(group),
                    "kind": group.kind,
                    "window": group.window,
                    "num_layers": group.num_layers,
                    "layers": group.layers,
                    "is_latent": group.is_latent,
                    "block_size": group.block_size,
                    "block_bytes": group.block_bytes,
                    "token_bytes": group.token_bytes,
                    "kernels": self.road.kernels.get(label(group), {}),
                }
                for group in self.footprint.groups
            ],
            "other_layers": self.footprint.other_layers,
            "fits": [
                {
                    "length": length,
                    "sequence_bytes": self.footprint.sequence_bytes(length),
                    "sequences": self.num_sequences(length),
                    "tokens": self.num_sequences(length) * length,
                }
                for length in self.lengths
            ],
            "road": {"name": self.road.name, "reason": self.road.reason, "in_place": self.road.in_place},
        }


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
    footprint = measure(model, block_size)
    max_positions = getattr(text, "max_position_embeddings", None)
    if length is None:
        length = min(DEFAULT_LENGTH, max_positions or DEFAULT_LENGTH)
    lengths = (length, max_positions) if max_positions and max_positions != length else (length,)
    return Report(
        model=cls.__name__,
        model_type=config.model_type,
        dtype=dtype,
        device=device,
        num_parameters=model.num_parameters(),
        weight_bytes=num_bytes(model),
        free_bytes=free_bytes(device),
        max_positions=max_positions,
        lengths=lengths,
        footprint=footprint,
        road=find_road(model, footprint, device),
    )


def print_report(report: Report) -> None:
    """Prints tables with rich. Raises `ImportError` without it."""
    box, table = require("rich.box"), require("rich.table")
    console = require("rich.console").Console()
    escape = require("rich.markup").escape
    block_size = report.footprint.groups[0].block_size if report.footprint.groups else 0

    def new_table(title: str, *columns: str) -> Any:
        made = table.Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
        for place, column in enumerate(columns):
            made.add_column(column, justify="left" if place < 1 else "right")
        return made

    dtype = str(report.dtype).removeprefix("torch.")
    console.print(f"[bold]{escape(report.model)}[/] ({escape(report.model_type)}), {dtype}, on {report.device}")
    console.print(f"{report.num_parameters:,} parameters, {format_bytes(report.weight_bytes)} of weights")

    if report.footprint.groups:
        groups = new_table(
            f"Keys and values, blocks of {block_size} tokens", "layers", "each stores", "a token", "a block"
        )
        for group in report.footprint.groups:
            shapes = ", ".join(
                shape if count == group.num_layers else f"{count} x {shape}" for shape, count in group.layers.items()
            )
            groups.add_row(
                f"{group.num_layers} with {label(group)}",
                shapes,
                format_bytes(group.token_bytes),
                format_bytes(group.block_bytes),
            )
        if len(report.footprint.groups) > 1:
            total = sum(group.block_bytes for group in report.footprint.groups)
            groups.add_row("all", "", format_bytes(report.footprint.token_bytes), format_bytes(total))
        console.print(groups)
    else:
        console.print("It keeps no keys and values in blocks.")
    for name, count in report.footprint.other_layers.items():
        console.print(f"{count} layers hold a state of their own, not in blocks ({escape(name)}).")

    if report.footprint.groups:
        print_fit(console, new_table, report)
    print_road(console, escape, report)


def print_fit(console: Any, new_table: Any, report: Report) -> None:
    """What fits this machine."""
    free, left = format_bytes(report.free_bytes), format_bytes(report.left_bytes)
    title = f"What fits: {free} are free, {left} beside the weights"
    if report.weight_bytes > report.free_bytes:
        title = f"Nothing fits: {free} are free, the weights alone take {format_bytes(report.weight_bytes)}"
    fits = new_table(title, "sequences of", "blocks of one", "bytes of one", "sequences", "tokens")
    for length in report.lengths:
        blocks = sum(group.num_blocks(length) for group in report.footprint.groups)
        count = report.num_sequences(length)
        one = format_bytes(report.footprint.sequence_bytes(length))
        fits.add_row(f"{length:,} tokens", f"{blocks:,}", one, f"{count:,}", f"{count * length:,}")
    console.print(fits)
    if any(group.kind == "cross" for group in report.footprint.groups):
        console.print("The encoder's output is taken to be as long as the sequence.")


def print_road(console: Any, escape: Any, report: Report) -> None:
    """The road and the kernels."""
    names = {
        "engine": "the engine",
        "hf_loop": "transformers' own loop",
        "plain": "plain, without blocks",
        "undecided": "the engine or transformers' own loop",
    }
    console.print(f"[bold]Road[/] {names[report.road.name]}: {escape(report.road.reason)}")
    for group, kernels in report.road.kernels.items():
        chosen = ", ".join(f"{what}: {backend}" for what, backend in kernels.items())
        console.print(f"[bold]Kernels[/] {escape(group)}: {chosen}")
