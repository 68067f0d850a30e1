"""The figures (statistics) of a memory and of an engine as texts. `pictures.py` lays them out."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..cache.memory_stats import BlockStats, MemoryStats


def memory_figures(stats: MemoryStats) -> dict[str, str]:
    """Returns the figures of a `MemoryStats` as texts, by label."""
    figures = {}
    if stats.plain_bytes:
        share = f"{stats.call_bytes / stats.plain_bytes:.0%}"
        figures["last call: keys and values at the peak"] = (
            f"{format_bytes(stats.call_bytes)} ({share} of plain `generate`)"
        )
        figures["last call: cache of plain `generate`"] = format_bytes(stats.plain_bytes)
    pool_figures = {
        "bytes held by the pool": format_bytes(stats.held_bytes),
        "blocks cached for later prompts": f"{stats.cached_blocks:,}",
    }
    return figures | common_figures(stats) | pool_figures


def common_figures(stats: BlockStats, limit_text: str = "") -> dict[str, str]:
    """Returns the figures that a memory and an engine share. `limit_text` is appended to the block
    counts."""
    figures = {
        "blocks used, at the peak": f"{stats.used_blocks:,}, {stats.peak_blocks:,}{limit_text}",
        "blocks that several sequences share": f"{stats.shared_blocks:,}",
        "bytes used, at the peak": (
            f"{format_bytes(stats.used_bytes)}, {format_bytes(stats.peak_bytes)}"
        ),
    }
    if stats.kv_dtype is not None:
        figures["keys and values stored as"] = stats.kv_dtype
    if stats.budget_bytes is not None:
        figures["budget of all pools"] = format_bytes(stats.budget_bytes)
    if stats.tier_kept_blocks or stats.tier_restored_blocks:
        counts = f"{stats.tier_kept_blocks:,}, {stats.tier_restored_blocks:,}"
        figures["blocks copied to the tiers, restored"] = counts
        host_bytes = format_bytes(stats.tier_host_bytes)
        disk_bytes = format_bytes(stats.tier_disk_bytes)
        figures["bytes in host memory, on disk"] = f"{host_bytes}, {disk_bytes}"
    return figures


def format_bytes(num_bytes: float) -> str:
    """Returns a number of bytes as text, in binary units and with about three digits."""
    value = float(num_bytes)
    unit = "bytes"
    for larger_unit in ("KiB", "MiB", "GiB", "TiB"):
        if value >= 1024:
            value = value / 1024
            unit = larger_unit
    if unit == "bytes" or value >= 100:
        return f"{value:.0f} {unit}"
    return f"{value:.3g} {unit}"
