"""The seams of the core: the protocols that features implement, and `EngineParts`, which gives an
engine what implements them. No code of a feature stands here."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # types of the core alone
    from transformers import PreTrainedModel

    from .batching.engine_core import EngineCore
    from .cache.block_manager import BlockManager
    from .cache.memory import PagedMemory
    from .config import PagedConfig
    from .model.layout import Layout


class TierCounts(NamedTuple):
    """Figures of a tier, for `memory_stats`: bytes that it holds now, and blocks so far."""

    host_bytes: int = 0
    disk_bytes: int = 0  # of the folder, as far as this process knows
    num_kept: int = 0
    num_restored: int = 0


class Tier(Protocol):
    """Keeps the content of blocks that the prefix cache of one block manager evicts. Its methods
    are called with the memory's lock held."""

    def keep(self, group: int, block_id: int, digest: bytes, is_vouched_for: bool) -> None:
        """Keeps a block that is being evicted, by its digest (`prefix_index.Link`). If not vouched
        for, it is served only after `confirm`."""

    def reach(
        self, blocks: BlockManager, token_ids: Sequence[Hashable], namespace: Hashable
    ) -> int:
        """Returns how many tokens `BlockManager.match` would find after `restore`."""
        ...

    def restore(
        self,
        blocks: BlockManager,
        token_ids: Sequence[Hashable],
        namespace: Hashable,
        num_tokens: int,
    ) -> bool:
        """Registers kept blocks in the pool, for `match` to find, if that gives a prefix longer
        than `num_tokens`. `False`, with nothing changed, if there are none, or no room, or if they
        cannot be copied. The current weights have been vouched for."""
        ...

    @property
    def wants_confirmation(self) -> bool:
        """Whether many kept bytes are not vouched for."""
        ...

    def confirm(self) -> None:
        """Marks all kept blocks as computed with the last fingerprinted weights."""

    def discard(self) -> None:
        """Drops kept blocks that are not vouched for."""

    def counts(self) -> TierCounts: ...


class MakeTier(Protocol):
    def __call__(
        self,
        model: PreTrainedModel,
        memory: PagedMemory,
        blocks: BlockManager,
        config: PagedConfig,
        layout: Layout,
    ) -> tuple[Tier | None, str | None]:
        """Returns the tier for a new loop on these blocks, perhaps an earlier one, or `None` and
        why they have none."""
        ...


class TiersRoom(Protocol):
    """The module `hf_paged.tiers`."""

    make_tier: MakeTier

    def check(self, config: PagedConfig) -> None:
        """Raises `OSError` if the folder of `config.prefix_tiers` cannot be used."""

    def save(
        self,
        core: EngineCore,
        token_ids: list[int],
        compute: Callable[[], tuple[Hashable, ...]],
        path: Any,
    ) -> int:
        """Writes the full blocks of a prompt to a file, after `compute`, which computes them and
        returns their namespace; returns how many tokens they hold."""
        ...

    def load(self, core: EngineCore, path: Any) -> int:
        """Loads the blocks of such a file into the prefix cache; returns how many tokens they
        hold."""
        ...


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. A field that is `None` stands for the part that its config asks
    for."""

    tier: MakeTier | None = None


DEFAULT_PARTS = EngineParts()
