"""Kernel cost of reading K/V through a block table."""

from __future__ import annotations

import statistics
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks import paired, runner
from benchmarks.models import SHAPES, Shape
from benchmarks.paper.rows import PAPER, READ, TOLD, Row, Size, ranged
from hf_paged.attention import backends
from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.config import MIN_BLOCK_SIZE
from hf_paged.step import StepMetadata

ROWS = 8
BLOCKS = tuple(size for size in (4, 8, 16, 32, 64, 128, 256) if size >= MIN_BLOCK_SIZE)
LAYERS = 8


def _step(tables: Tensor, context: int, block: int) -> StepMetadata:
    return StepMetadata.rectangle(tables, (context,) * tables.shape[0], block)


def _call(
    query: Tensor, pool: Tensor, step: StepMetadata, kv_heads: int, scale: float
) -> AttentionCall:
    """Attention call for queries `[rows, heads, 1, head_dim]`."""
    return AttentionCall(
        query[:, :, 0], KVBlocks((pool,), pool[:, :kv_heads], pool[:, kv_heads:]), step, scale
    )


def contenders(shape: Shape, context: int) -> dict[str, Callable[[int], Tensor]]:
    """Decode attention of `ROWS` rows over the same K/V in several layouts: functions of the layer
    that return `[rows, 1, heads, head_dim]`.
    """
    draw = torch.Generator().manual_seed(0)
    head_dim = shape.head_dim
    query = torch.randn(ROWS, shape.heads, 1, head_dim, generator=draw).bfloat16()
    both = [
        torch.randn(ROWS, 2 * shape.kv_heads, context, head_dim, generator=draw).bfloat16()
        for _ in range(LAYERS)
    ]
    scale = head_dim**-0.5

    def paged(pools: list[Tensor], step: StepMetadata) -> Callable[[int], Tensor]:
        calls = [_call(query, pool, step, shape.kv_heads, scale) for pool in pools]
        return lambda layer: backends.attend(calls[layer]).unsqueeze(1)

    def contiguous(layer: int) -> Tensor:
        keys, values = both[layer][:, : shape.kv_heads], both[layer][:, shape.kv_heads :]
        packed = query.reshape(ROWS, shape.kv_heads, -1, head_dim)
        out = F.scaled_dot_product_attention(packed, keys, values, scale=scale)
        return out.reshape(ROWS, shape.heads, 1, head_dim).transpose(1, 2)

    whole = torch.arange(ROWS, dtype=torch.int32)[:, None]
    found: dict[str, Callable[[int], Tensor]] = {
        "one block a row": paged(both, _step(whole, context, context)),
        "sdpa": contiguous,
    }
    for block in BLOCKS:
        count = context // block
        if not count:
            continue
        cut = [
            # [rows * count, 2 kv, ...]
            layer.unflatten(2, (count, block)).transpose(1, 2).flatten(0, 1).contiguous()
            for layer in both
        ]
        order = torch.randperm(ROWS * count, generator=draw)
        shuffled = [torch.empty_like(pool) for pool in cut]
        for target, source in zip(shuffled, cut):
            target[order] = source
        consecutive = torch.arange(ROWS * count, dtype=torch.int32).view(ROWS, count)
        found[f"blocks of {block} in order"] = paged(cut, _step(consecutive, context, block))
        found[f"blocks of {block}"] = paged(
            shuffled, _step(order.int().view(ROWS, count), context, block)
        )
    _check(found, both[0], query, shape, scale, context)
    return found


def _check(
    found: dict[str, Callable[[int], Tensor]],
    both: Tensor,
    query: Tensor,
    shape: Shape,
    scale: float,
    context: int,
) -> None:
    """Raises unless every contender matches the reference."""
    whole = _step(torch.arange(ROWS, dtype=torch.int32)[:, None], context, context)
    expected = reference.attend(_call(query, both, whole, shape.kv_heads, scale)).unsqueeze(1)
    for name, function in found.items():
        try:
            torch.testing.assert_close(function(0), expected, atol=2e-2, rtol=2e-2)
        except AssertionError as error:
            raise AssertionError(f"{name} differs from the reference: {error}") from None


@torch.no_grad()
def seconds_of(size: Size, turns: int) -> dict[str, list[float]]:
    """Seconds per layer by contender; each turn reverses the order of the turn before."""
    functions = contenders(SHAPES[size.shape], size.context)
    works = {
        name: lambda function=function: list(map(function, range(LAYERS)))
        for name, function in functions.items()
    }
    seconds = runner.take_turns(runner.timed(works), turns, warm_ups=1)
    return {name: [one / LAYERS for one in mine] for name, mine in seconds.items()}


def overhead(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), section 7.1 and figure 18a: a decode kernel that reads
    blocks against one that reads contiguous K/V. "Under 3 %" is S4's.

    The same: one decode step's attention, rows of one length. Different: the paper's baseline is
    another kernel (FasterTransformer's) on an A100; ours is our kernel on this CPU over the same
    bytes with one block per row, and PyTorch's SDPA over contiguous tensors. Contenders take turns,
    each over several layers of a separate copy, so that processor caches hold little of the data;
    every other turn reverses the order. Each figure is the median of the ratios within turns, with
    minimum and maximum. Blocks are in random order unless stated otherwise.
    """
    seconds = seconds_of(size, 3 * size.repeats)
    medians = {name: statistics.median(taken) for name, taken in seconds.items()}
    rows = []
    for name in seconds:
        if not name.startswith("blocks"):
            continue
        block = int(name.split()[2])
        for base in ("one block a row", "sdpa"):
            is_main = block == 16 and not name.endswith("order")
            if not is_main and (base == "sdpa" or (name.endswith("order") and block != 16)):
                continue
            published, source = _PUBLISHED[base] if is_main else ("", "")
            what = "contiguous SDPA" if base == "sdpa" else "our kernel over contiguous rows"
            details = {"ms": 1e3 * medians[name], "base_ms": 1e3 * medians[base]}
            details |= {"block_size": block, "base": base}
            why = _WHY[base] if is_main else ""
            over = [100 * (ratio - 1) for ratio in paired.ratios(seconds[name], seconds[base])]
            details |= {"turns": len(over), "interval": paired.interval(over), "over_percent": over}
            ours = f"{ranged(over, '.3g')}, {len(over)} turns"
            title = f"{name}, {size.context} tokens a row, over {what}"
            rows.append(Row(title, published, ours, "%", source, why, details))
    return rows


_PUBLISHED = {
    "sdpa": ("20 to 26", f"{PAPER}, section 7.1 ({READ})"),
    "one block a row": ("under 3", TOLD),
}
_WHY = {
    "sdpa": (
        "another kernel on other hardware: below 0, ours is the faster one; what blocks cost is the"
        " row above"
    ),
    "one block a row": (
        "the kernel looks a block up once for all of its tokens, which lie side by side for each"
        " head"
    ),
}
