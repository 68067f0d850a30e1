"""Kernel cost of reading K/V through a block table."""

from __future__ import annotations

import torch

from benchmarks import attention, attention_data, paired, runner
from benchmarks.attention_data import Setting, even
from benchmarks.attention_peers import CONTIGUOUS, Attention
from benchmarks.models import SHAPES, Shape
from benchmarks.paper.rows import PAPER, READ, TOLD, Published, Row, Size, ranged

ROWS = 8
LAYERS = 8


def contenders(shape: Shape, context: int) -> dict[str, Attention]:
    """Decode attention of `ROWS` rows in several layouts, each compared with the reference:
    functions of the layer."""
    case = even(ROWS, context)
    layouts = {"sdpa": context, "one block a row": context}
    layouts["blocks of 16"] = 16
    found = {}
    for name, block in layouts.items():
        data = attention_data.make(Setting(shape, case, block, "bf16", "cpu"), layers=LAYERS)
        found[name] = attention.prepared(CONTIGUOUS if name == "sdpa" else "ours", data)
    return found


def arms(size: Size) -> dict[str, runner.Arm]:
    """Seconds per layer by contender."""

    @torch.no_grad()
    def work(turn: int, function: Attention) -> float:
        return runner.seconds_of(lambda: [function(layer) for layer in range(LAYERS)]) / LAYERS

    return runner.each(work, contenders(SHAPES[size.shape], size.context))


def overhead(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), section 7.1 and figure 18a: a decode kernel that reads
    blocks against one that reads contiguous K/V. "Under 3 %" is S4's.

    The same: one decode step's attention, rows of one length. Different: the paper's baseline is
    another kernel (FasterTransformer's) on an A100; ours is our kernel on this CPU over the same
    bytes with one block per row, and PyTorch's SDPA over contiguous tensors. Contenders take turns,
    each over several layers of a separate copy, so that processor caches hold little of the data;
    every other turn reverses the order. Each figure is the median of the ratios within turns, with
    minimum and maximum. Blocks are in random order.
    """
    found = runner.rows_of_case(runner.Case("overhead", arms(size)), 3 * size.repeats)
    seconds = {row["system"]: row["seconds"] for row in found}
    rows = []
    for base, published in PUBLISHED.items():
        what = "contiguous SDPA" if base == "sdpa" else "our kernel over contiguous rows"
        over = [
            100 * (ratio - 1) for ratio in paired.ratios(seconds["blocks of 16"], seconds[base])
        ]
        ours = f"{ranged(over, '.3g')}, {len(over)} turns"
        title = f"blocks of 16, {size.context} tokens a row, over {what}"
        rows.append(Row(title, ours, "%", *published, over))
    return rows


PUBLISHED = {
    "sdpa": Published(
        "20 to 26",
        f"{PAPER}, section 7.1 ({READ})",
        "another kernel on other hardware: below 0, ours is the faster one; what blocks cost is the"
        " row above",
    ),
    "one block a row": Published(
        "under 3",
        TOLD,
        "the kernel looks a block up once for all of its tokens, which lie side by side for each"
        " head",
    ),
}
