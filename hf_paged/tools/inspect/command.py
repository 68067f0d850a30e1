"""Bytes of keys and values, what fits this machine, the road and the kernels that a model would take.

    python -m hf_paged.inspect MODEL [--block-size N] [--dtype DTYPE] [--device DEVICE] [--length TOKENS] [--json]

MODEL is a folder with a config.json or such a file, a model type (llama), or a class of transformers (Qwen2Config,
LlamaForCausalLM). No weights are read and nothing is downloaded.
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings

import torch
from transformers.utils import logging

from ...config import PagedConfig
from ..pictures.figures import require
from .report import examine, print_report

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def main(arguments: list[str] | None = None) -> int:
    """Prints the report and returns 0, or what is wrong and returns 2."""
    parser = argparse.ArgumentParser(
        prog="python -m hf_paged.inspect", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", metavar="MODEL")
    parser.add_argument(
        "--block-size", type=int, default=PagedConfig.block_size, help="tokens in a block (%(default)s)"
    )
    parser.add_argument("--dtype", choices=["auto", *DTYPES], default="auto", help="auto: what the configuration says")
    parser.add_argument("--device", type=_device, default=_default_device(), help="whose memory (%(default)s)")
    parser.add_argument("--length", type=int, help="tokens of the sequences that are to fit (2048, or fewer)")
    parser.add_argument("--json", action="store_true", help="print JSON, for which rich is not needed")
    options = parser.parse_args(arguments)
    warnings.simplefilter("ignore")
    logging.set_verbosity_error()
    try:
        if not options.json:
            require("rich")
        report = examine(
            options.model,
            block_size=options.block_size,
            dtype=DTYPES.get(options.dtype),
            device=options.device,
            length=options.length,
        )
        if options.json:
            print(json.dumps(report.to_dict(), indent=2))
        else:
            print_report(report)
    except (ImportError, ValueError) as error:
        print(f"{parser.prog}: {error}", file=sys.stderr)
        return 2
    return 0


def _devices() -> list[str]:
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return ["cpu"] if accelerator is None else ["cpu", accelerator.type]


def _default_device() -> torch.device:
    return torch.device(_devices()[-1])


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except RuntimeError:
        device = None
    if device is None or device.type not in _devices():
        raise argparse.ArgumentTypeError(f"{name!r} is not here: this machine has {', '.join(_devices())}")
    return device
