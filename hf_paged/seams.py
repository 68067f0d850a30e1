"""The seams of the core: the protocols that features implement, and `EngineParts`, which gives an
engine what implements them. No code of a feature stands here."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from .attention.backends.parts import Part, Parts
    from .cache.block_pool import BlockPool
    from .cache.free_memory import Reservation
    from .cache.groups import GroupSpec
    from .cache.storage import KVBlocks
    from .config import PagedConfig
    from .step import StepMetadata


# -- memory of blocks ----------------------------------------------------------------------------


class Storage(Protocol):
    """The memory behind the blocks of one layer group. A pool gives out their ids."""

    pool: BlockPool  # of this storage, which says in what order blocks are taken
    layers: dict[int, Any]  # the `KVBlocks` of each layer that was made, by index

    @property
    def block_bytes(self) -> int:
        """Bytes of a block over all layers."""

    @property
    def nbytes(self) -> int:
        """Allocated bytes, of used and unused blocks."""

    @property
    def most_bytes(self) -> int | None:
        """Bytes that the pool's blocks take at most; `None`: no less than `block_bytes` each."""

    @property
    def num_rows(self) -> int:
        """Blocks for which every layer has allocated memory."""

    @property
    def is_elastic(self) -> bool:
        """Whether blocks take no memory until first used."""

    @property
    def growth_step(self) -> int:
        """Blocks by which a pool without a limit grows at least, where they take no memory until
        first used; 0: by as many as the memory chooses."""

    def reserve(self, reservation: Reservation, drops: bool) -> None:
        """Sets the sizes of layers made or grown from now on. With `drops`, allowed only while no
        block is used or cached, drops smaller layers."""

    def outline(self, keys: Tensor, values: Tensor) -> KVBlocks:
        """Returns a block of a layer with K/V like these, `(batch, heads, n, dim)`, on the meta
        device."""

    def make(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Allocates layer `index`, for K/V like these, and returns its blocks. Raises
        `MemoryError`, or `RuntimeError` of torch."""

    def promote(self, index: int, keys: Tensor, values: Tensor) -> KVBlocks:
        """Converts layer `index` to dtypes that hold both the stored and the new K/V, and returns
        its blocks. Raises `ValueError` if heads, dims or device differ."""

    def grow(self, num_blocks: int, most: int) -> None:
        """Makes room for `num_blocks` blocks in every layer, or for up to `most`. Raises as
        `make`."""

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copies block `source` to block `target` in every layer, for each pair; all are read
        before one is written."""

    def clear(self) -> None:
        """Frees all memory. No table may hold a block."""


class StorageFactory(Protocol):
    """Makes the storage of a layer group, with an empty pool."""

    def __call__(
        self,
        config: PagedConfig,
        spec: GroupSpec,
        block_size: int,
        before_move: Callable[[], None],
    ) -> Storage:
        """`before_move`: for a storage to call before blocks get other addresses."""


class MappedRows(Protocol):
    """The rows of a layer as strided tensors, beside its blocks (`KVBlocks.rows`)."""

    def place(self, step: StepMetadata) -> PlacedRows | None:
        """Returns where the rows of a step can be read; `None`: only in blocks."""

    def lend(self, step: StepMetadata, is_value: bool) -> Tensor | None:
        """Returns all `step.columns` of every row as a view `(rows, heads, len(columns), dim)` for
        the model's own code, with zeros for padding; `None` if no single view covers the rows."""

    def stop_lending(self) -> None:
        """Makes `lend` return `None` from now on: the model's code needs contiguous tensors."""

    def settle(self) -> None:
        """Preserves lent views that are still alive. Call before writing to blocks."""


class PlacedRows(Protocol):
    """The rows of a step, readable while the step and these views live."""

    def parts(self, kv_heads: int) -> Parts:
        """Returns the parts of the step for the portable attention."""

    def view(self, part: Part) -> tuple[Tensor, Tensor]:
        """Returns the keys and values of a part, each `(rows, kv_heads, length, dim)`."""


class VirtualRoom(Protocol):
    """`hf_paged.virtual`."""

    make_storage: StorageFactory

    def fit_blocks(
        self, config: PagedConfig, model_config: Any, device: torch.device
    ) -> PagedConfig:
        """Raises the block size to whole pages. Raises `ValueError` if pages cannot be mapped."""


class ToolsRoom(Protocol):
    """`hf_paged.tools`: texts, HTML for notebooks, figures of matplotlib, without which `plot_*`
    raise `ImportError`."""

    engine_html: Callable[[Any], str]  # of an engine
    cache_html: Callable[[Any], str]  # of a `PagedCache`
    stats_text: Callable[[Any], str]  # of a `MemoryStats`
    stats_html: Callable[[Any], str]
    plot_engine: Callable[[Any, Any], Any]  # the blocks of an engine, on axes
    plot_cache: Callable[[Any, Any], Any]
    plot_intervals: Callable[..., Any]


class NativeRoom(Protocol):
    """`hf_paged.native`."""

    replacements: Mapping[str, Callable[..., Any]]  # of methods of transformers' `ContinuousMixin`
    through_wrapper: Mapping[str, Callable[..., Any]]  # methods for PEFT's wrappers of models

    def set_default(self, config: PagedConfig) -> None:
        """Sets the config of managers that are given none."""

    def destroy_kept(self) -> None:
        """Destroys the managers that models keep for a next session."""


# -- what an engine is built from ----------------------------------------------------------------


@dataclass(frozen=True)
class EngineParts:
    """What an engine is built from. A field that is `None` stands for the part that its config asks
    for."""

    storage: StorageFactory | None = None


DEFAULT_PARTS = EngineParts()
