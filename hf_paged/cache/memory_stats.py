"""`MemoryStats`: the statistics of a memory, as text and as a table. `cache.memory` tracks the
peaks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from .. import rooms
from . import budget
from .block_sizes import Choice
from .groups import group_label

if TYPE_CHECKING:
    from .group_memory import GroupMemory
    from .memory import PagedMemory


class TierCounts(NamedTuple):
    """The statistics of one tier, which keeps evicted prefix blocks in host memory and on disk."""

    host_bytes: int = 0
    disk_bytes: int = 0  # of the files in the folder, as far as this process knows
    num_kept: int = 0  # blocks copied to the tier
    num_restored: int = 0  # blocks copied back from it


@dataclass(frozen=True)
class BlockStats:
    """The statistics of blocks that [`MemoryStats`] and `EngineStats` share."""

    used_blocks: int = 0
    peak_blocks: int = 0
    used_bytes: int = 0
    peak_bytes: int = 0
    cached_blocks: int = 0
    shared_blocks: int = 0
    kv_dtype: str | None = None
    budget_bytes: int | None = None
    tier_host_bytes: int = 0
    tier_disk_bytes: int = 0
    tier_kept_blocks: int = 0
    tier_restored_blocks: int = 0
    block_sizes: dict[str, Choice] = field(default_factory=dict)


@dataclass(frozen=True, repr=False)
class MemoryStats(BlockStats):
    """
    Memory statistics. Peaks and `copied_blocks` count from the memory's creation or last reset.

    Args:
        block_size (`int`): Tokens per block; with `"auto"`, the largest.
        block_sizes (`dict`): With `"auto"`, by the name of each layer group, its `block_size` and
            the `reason` for that size (`cache.block_sizes.Choice`).
        kv_dtype (`str`, *optional*): The dtype of stored keys and values (`PagedConfig.kv_dtype`).
        used_blocks, peak_blocks (`int`): Blocks in use now and at the peak, over all layer groups.
        used_bytes, peak_bytes (`int`): Bytes of blocks in use now and at the peak, over all layers.
        call_bytes (`int`): Bytes of keys and values in use at the peak (in blocks) of the last
            completed `generate` call that no other call on the model overlapped; states of linear
            attention are not counted.
        plain_bytes (`int`): Bytes of keys and values that the `DynamicCache` of plain transformers
            would hold at the end of that call: every row as long as the longest, with padding, and
            one copy for each sample or beam.
        held_bytes (`int`): Bytes of all blocks of the pool: used, cached and free.
        waste (`float`): Share of the slots of used blocks that held no token at the peak.
        copied_blocks (`int`): Blocks copied by copy-on-write.
        cached_blocks (`int`): Blocks that no table holds, kept for the prefix cache until evicted.
        shared_blocks (`int`): Blocks in use that more than one block table holds.
        budget_bytes (`int`, *optional*): Limit set by `hf_paged.budget` for all pools of the
            process together.
        tier_host_bytes (`int`): Bytes of evicted prefix blocks in host memory.
        tier_disk_bytes (`int`): Bytes of the files in the folder of `prefix_tiers`, as far as this
            process knows.
        tier_kept_blocks, tier_restored_blocks (`int`): Blocks copied to the tiers, and restored
            from them.
    """

    block_size: int = 0
    call_bytes: int = 0
    plain_bytes: int = 0
    held_bytes: int = 0
    waste: float = 0.0
    copied_blocks: int = 0

    def __repr__(self) -> str:
        return rooms.render("stats_text", self) or f"MemoryStats({vars(self)})"

    def _repr_html_(self) -> str | None:
        return rooms.render("stats_html", self)


def stats_of(memory: PagedMemory) -> MemoryStats:
    """Returns the current statistics of a memory, whose lock the caller holds."""
    groups = memory.groups.values()
    managers = memory.managers.values()
    tiers = [manager.tier.counts() for manager in managers if manager.tier is not None]
    choices = memory.sizes.chosen.items()
    return MemoryStats(
        block_size=memory.block_size,
        block_sizes={group_label(spec.label): choice for spec, choice in choices},
        kv_dtype=memory.config.kv_dtype,
        used_blocks=memory.num_used,
        peak_blocks=memory.peak_blocks,
        used_bytes=sum(group.pool.num_used * group.storage.block_bytes for group in groups),
        peak_bytes=memory.peak_bytes,
        call_bytes=memory.call_bytes,
        plain_bytes=memory.plain_bytes,
        held_bytes=sum(group.pool_bytes for group in groups),
        waste=memory.waste,
        copied_blocks=memory.num_copied,
        cached_blocks=memory.num_cached,
        shared_blocks=sum(group.pool.num_shared for group in groups if group.spec.is_counted),
        budget_bytes=budget.limit(),
        tier_host_bytes=sum(tier.host_bytes for tier in tiers),
        # all tiers share one folder
        tier_disk_bytes=max((tier.disk_bytes for tier in tiers), default=0),
        tier_kept_blocks=sum(tier.num_kept for tier in tiers),
        tier_restored_blocks=sum(tier.num_restored for tier in tiers),
    )


def share_of_unused_slots(groups: Iterable[GroupMemory]) -> float:
    """Returns the share of the slots in used blocks that hold no token, over all groups that store
    keys and values."""
    num_slots = num_unused = 0
    for group in groups:
        if group.holds_states:
            continue
        unused_by_tail = {
            table.block_ids[-1]: table.num_unused_slots
            for table in group.live_tables(group.memory)
            if table.block_ids
        }
        num_slots += group.pool.num_used * group.block_size
        num_unused += sum(unused_by_tail.values())
    return num_unused / num_slots if num_slots else 0.0
