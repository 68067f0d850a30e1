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
from typing import Any

import torch
from transformers.utils import logging

from ...config import PagedConfig
from ..pictures.figures import require
from ..pictures.html import format_bytes
from .report import Report, examine

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
ROADS = {
    "engine": "the engine",
    "hf_loop": "transformers' own loop",
    "plain": "plain, without blocks",
    "undecided": "the engine or transformers' own loop",
}


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

    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--block-size", type=int, default=PagedConfig.block_size, help="tokens in a block (%(default)s)"
    )
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: what the configuration says")
    parser.add_argument("--device", type=device, default=devices[-1], help="whose memory (%(default)s)")
    parser.add_argument("--length", type=int, help="tokens of the sequences that are to fit (2048, or fewer)")
    parser.add_argument("--json", action="store_true", help="print JSON, for which rich is not needed")
    options = vars(parser.parse_args(arguments))
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    as_json = options.pop("json")
    try:
        if not as_json:
            require("rich")
        report = examine(options.pop("model"), **{**options, "dtype": DTYPES.get(options["dtype"])})
        if as_json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            print_report(report)
    except (ImportError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def print_report(report: Report) -> None:
    """Prints tables with rich. Raises `ImportError` without it."""
    console, escape = require("rich.console").Console(), require("rich.markup").escape
    dtype = str(report.dtype).removeprefix("torch.")
    console.print(f"[bold]{escape(report.model)}[/] ({escape(report.model_type)}), {dtype}, on {report.device}")
    console.print(f"{report.num_parameters:,} parameters, {format_bytes(report.weight_bytes)} of weights")
    if report.groups:
        console.print(_group_table(report))
    else:
        console.print("It keeps no keys and values in blocks.")
    for name, count in report.other_layers.items():
        console.print(f"{count} layers hold a state of their own, not in blocks ({escape(name)}).")
    if report.groups:
        console.print(_fit_table(report))
    if any(group.kind == "cross" for group in report.groups):
        console.print("The encoder's output is taken to be as long as the sequence.")
    console.print(f"[bold]Road[/] {ROADS[report.road.name]}: {escape(report.road.reason)}")
    for name, kernels in report.road.kernels.items():
        chosen = ", ".join(f"{what}: {backend}" for what, backend in kernels.items())
        console.print(f"[bold]Kernels[/] {escape(name)}: {chosen}")


def _table(title: str, *columns: str) -> Any:
    table = require("rich.table").Table(
        title=title, title_justify="left", title_style="bold", box=require("rich.box").SIMPLE_HEAD
    )
    for place, column in enumerate(columns):
        table.add_column(column, justify="right" if place else "left")
    return table


def _group_table(report: Report) -> Any:
    """What the layers store."""
    title = f"Keys and values, blocks of {report.groups[0].block_size} tokens"
    table = _table(title, "layers", "each stores", "a token", "a block")
    rows = [
        (f"{each.num_layers} with {each.name}", each.shapes, each.token_bytes, each.block_bytes)
        for each in report.groups
    ]
    if len(rows) > 1:
        rows.append(("all", "", report.token_bytes, sum(group.block_bytes for group in report.groups)))
    for name, shapes, token_bytes, block_bytes in rows:
        table.add_row(name, shapes, format_bytes(token_bytes), format_bytes(block_bytes))
    return table


def _fit_table(report: Report) -> Any:
    """What fits this machine."""
    free, left = format_bytes(report.free_bytes), format_bytes(report.left_bytes)
    title = f"What fits: {free} are free, {left} beside the weights"
    if report.weight_bytes > report.free_bytes:
        title = f"Nothing fits: {free} are free, the weights alone take {format_bytes(report.weight_bytes)}"
    table = _table(title, "sequences of", "blocks of one", "bytes of one", "sequences", "tokens")
    for length in report.lengths:
        blocks = sum(group.num_blocks(length) for group in report.groups)
        count, one = report.num_sequences(length), format_bytes(report.sequence_bytes(length))
        table.add_row(f"{length:,} tokens", f"{blocks:,}", one, f"{count:,}", f"{count * length:,}")
    return table
