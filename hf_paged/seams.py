"""The seams of the core: the protocols that features implement, and `EngineParts`, which gives an
engine what implements them. No code of a feature stands here."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:  # types of the core alone
    from torch import nn
    from transformers import PreTrainedModel

    from .batching.arguments import RequestOptions
    from .batching.engine_core import EngineCore
    from .batching.execution.inputs import PackedTokens
    from .batching.loop import StepLoop
    from .batching.prompt_forms import Prompt
    from .batching.request import Sequence
    from .cache.block_manager import BlockManager
    from .cache.group_memory import GroupMemory
    from .cache.memory import PagedMemory
    from .config import PagedConfig
    from .model.layout import Layout
    from .model.state import ModelState
    from .plan import StepPlan


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

    def reach(self, blocks: BlockManager, sequence: Sequence) -> int:
        """Returns how many tokens of a sequence `BlockManager.match` would find after
        `restore`."""
        ...

    def restore(self, blocks: BlockManager, sequence: Sequence) -> bool:
        """Registers kept blocks in the pool, for `match` to find, if that gives a longer prefix
        than the sequence has. `False`, with nothing changed, if there are none, or no room, or if
        they cannot be copied. The current weights have been vouched for."""
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
        prompt: Prompt,
        tokenizer: Any,
        compute: Callable[[list[int]], tuple[Hashable, ...]],
        path: Any,
    ) -> int:
        """Writes the full blocks of a prompt to a file, after `compute`, which computes its token
        ids and returns the blocks' namespace; returns how many tokens they hold."""
        ...

    def load(self, core: EngineCore, path: Any) -> int:
        """Loads the blocks of such a file into the prefix cache; returns how many tokens they
        hold."""
        ...


class Processes(Protocol):
    """The processes that compute each forward of a model together, each with a shard of its weights
    and the K/V heads of that shard. Either all make the same calls, or one leads: it schedules and
    samples, and the others do what it tells them."""

    leads: bool

    def least(self, number: int) -> int:
        """Returns the minimum of a number over all processes."""
        ...

    def agree(self, number: int) -> int:
        """Returns the first process's number, where each must decide alike but measures its own
        times."""
        ...

    def fingerprint(self, model: nn.Module, state: ModelState | None) -> bytes | None:
        """`model.state.fingerprint` over the shards of all processes; `None` if one cannot be
        read."""
        ...

    def check(self, plan: StepPlan) -> None:
        """Before a step's forward. Raises `RankLostError` if another process has scheduled other
        tokens."""

    def run(self, tokens: PackedTokens, others: list[int], adapter: Hashable) -> None:
        """Announces the next `PackedRunner.compute`, with this adapter."""

    def forward(self) -> AbstractContextManager[None]:
        """Around a forward of all processes: an error passes through if all of them have one, else
        it becomes a `RankLostError`."""
        ...

    def moved(
        self, move: Callable[..., Any], group: GroupMemory, arguments: tuple[Any, ...], result: Any
    ) -> None:
        """Called after `move(group, *arguments)`, which is `group_memory.mirrored`, returned
        `result`. These, in order, are all changes to the content of blocks except what forwards
        write."""

    def adapters(self, method: str, *arguments: Any) -> None:
        """Has the others call this method of their executor's adapters, before the next forward.
        Raises `AdapterError` if one cannot `"load"`."""


class Leader(Processes, Protocol):
    """What an engine asks of the processes that it leads."""

    def locked(self, lock: Any) -> AbstractContextManager[Any]:
        """Returns a context that holds the engine's lock: an interrupt between the messages of
        processes would leave them waiting for each other."""
        ...

    def check_request(self, options: RequestOptions) -> None:
        """Raises `ValueError` for what an engine over several processes does not serve,
        `RuntimeError` once the engine is closed."""

    def choose_layout(self, choose: Callable[[], Layout]) -> Layout:
        """Calls `factory.choose_layout`, here as `choose`, in all processes. Raises `ValueError`
        for a layout that is not packed."""
        ...

    def make(self, loop: StepLoop) -> None:
        """Has the others make a loop's memory and executor."""

    def begin(self) -> None:
        """Has the others begin work, on the model's current state."""

    def retire(self) -> None:
        """Has the others drop what they have made."""

    def close(self) -> None:
        """Makes `serve_rank` return in the others."""


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. A field that is `None` stands for the part that its config asks
    for."""

    tier: MakeTier | None = None


DEFAULT_PARTS = EngineParts()
