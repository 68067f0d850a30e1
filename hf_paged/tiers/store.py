"""Tiers for evicted prefix blocks: host memory, and files that a thread writes to a folder. The
scheduler decides when blocks are restored."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import logging
import os
import threading
import weakref
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from .. import forks
from ..batching.request import Sequence
from ..cache.block_manager import BlockManager
from ..cache.block_pool import OutOfBlocksError
from ..cache.free_memory import free_bytes
from ..cache.kv_blocks import KVBlocks, empty_states
from ..cache.memory import PagedMemory
from ..cache.memory_stats import TierCounts
from ..cache.prefix_index import Link
from ..cache.sequence_blocks import UNCACHED
from ..cache.swap import HostBlocks, HostLayer, put_back
from ..config import PagedConfig, PrefixTiers
from ..interrupts import is_interrupt
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..threads import attempt, start
from ..topics import Topic
from ..weak_sets import members_of
from .block_files import FORMAT, DiskFolder, Layers, check_folder, num_bytes
from .prefixes import TierError, restore_path

logger = logging.getLogger(__name__)

# blocks that wait to be written or confirmed may take these bytes plus a quarter of the free memory
QUEUE_BYTES = 256 << 20
# bytes of unconfirmed blocks above which the engine computes a fingerprint just to confirm them
PENDING_BYTES = 64 << 20


class _Entry(NamedTuple):
    """The copies of one block in all layers, and the bytes that they take."""

    layers: Layers
    num_bytes: int


_Key = tuple[str, str]  # `PrefixStore.weights_hash`, and the block's `_block_name`


class PrefixStore:
    """The tiers of one memory, for the layer groups of one manager (`seams.Tier`). Copies evicted
    blocks to host memory before they are overwritten. A block is unconfirmed until a fingerprint
    shows which weights computed it. While there are confirmed blocks that the disk tier lacks, a
    thread writes them to disk. Callers of `Tier`'s methods hold the memory's lock."""

    def __init__(
        self,
        model: PreTrainedModel,
        memory: PagedMemory,
        block_manager: BlockManager,
        config: PrefixTiers,
        layout: Layout,
    ) -> None:
        groups = block_manager.groups
        devices = {parameter.device for parameter in model.parameters()} - {torch.device("meta")}
        # on several devices, only the first forward shows which device has a layer's blocks
        device = compute_device(model) if len(devices) < 2 else None
        self.config = config
        self.expected_layers = layout.layers
        self._device = device
        # weak: the writing thread must not keep the memory or its groups alive
        self.memory: PagedMemory = weakref.proxy(memory)
        self._groups = [weakref.proxy(group) for group in groups]
        memory_config = memory.config
        sizes = [group.block_size for group in groups if not group.holds_states]
        block_sizes: list[int] | int = sizes
        if len(set(sizes)) <= 1:
            block_sizes = max(sizes, default=0)
        options = (block_sizes, memory_config.kv_dtype, memory_config.batch_invariant)
        specs = [repr(group.spec) for group in groups]
        self._format_key = FORMAT, options, specs
        expected_layers = self.expected_layers if device is not None else ()
        self._outlines = [
            {
                layer.layer_index: group.storage.outline(*empty_states(layer.formats, "meta"))
                for layer in expected_layers
                if layer.spec == group.spec
            }
            for group in groups
        ]
        self._folder: DiskFolder | None = None
        if config.disk_path is not None:
            self._folder = DiskFolder(os.fspath(config.disk_path), config.disk_bytes)
        self._host_bytes = config.host_bytes
        if device is not None and device.type == "cpu":
            self._host_bytes = 0
        self._lock = forks.rlock()
        self._pending: dict[str, _Entry] = {}  # unconfirmed blocks, by `_block_name`
        # blocks in host memory, in LRU order, most recent last
        self._host_entries: OrderedDict[_Key, _Entry] = OrderedDict()
        # keys of `_host_entries` that are not yet written to disk
        self._unwritten: OrderedDict[_Key, None] = OrderedDict()
        self._num_bytes = {"pending": 0, "host": 0, "unwritten": 0}
        self._thread: threading.Thread | None = None
        self.num_kept = 0  # blocks copied out of the pool
        self.num_restored = 0  # blocks copied back
        self.num_skipped = 0  # blocks evicted without a copy: the queue was full, or copying failed
        self._weights_hash_cache: tuple[Any, str] = (None, "")
        self.warned_errors: set[type] = set()  # types of errors that were already logged
        forks.add_listener(self)
        _stores.add(self)

    @property
    def _disk(self) -> DiskFolder | None:
        """The folder; `None` if there is none, or an error has turned it off."""
        if self._folder is None or self._folder.is_off:
            return None
        return self._folder

    @property
    def _weights_hash(self) -> str | None:
        """A hash of everything besides tokens that determines the content of blocks, the same in
        every process; `None` if the memory has no fingerprint of the weights."""
        fingerprint = self.memory.fingerprint
        if fingerprint is None:
            return None
        groups = range(len(self._groups))
        layers = [sorted(self.layers(group)) for group in groups]
        content = (fingerprint, self._format_key, layers)
        if self._weights_hash_cache[0] != content:
            digest = hashlib.blake2b(repr(content).encode(), digest_size=16)
            self._weights_hash_cache = (content, digest.hexdigest())
        return self._weights_hash_cache[1]

    @property
    def weights_hash(self) -> str:
        """Returns `_weights_hash`. The memory must have a fingerprint."""
        weights_hash = self._weights_hash
        assert weights_hash is not None
        return weights_hash

    def counts(self) -> TierCounts:
        disk = self._disk
        disk_bytes = 0
        if disk is not None:
            disk_bytes = disk.num_bytes
        host_bytes = self._num_bytes["host"] + self._num_bytes["pending"]
        return TierCounts(host_bytes, disk_bytes, self.num_kept, self.num_restored)

    @property
    def wants_confirmation(self) -> bool:
        """Whether unconfirmed blocks take more than `PENDING_BYTES`."""
        return self._num_bytes["pending"] > PENDING_BYTES

    def keep(self, group: int, block_id: int, digest: bytes, is_verified: bool) -> None:
        name = _block_name(group, digest)
        weights_hash = self._weights_hash
        if weights_hash is None or self._groups[group].is_incomplete:
            return
        key = (weights_hash, name)
        with self._lock:
            if self.has(group, digest):
                return
            if self._disk is None and not self._host_bytes:  # there is no tier
                return
            try:
                queued_bytes = self._num_bytes["unwritten"] + self._num_bytes["pending"]
                max_queued_bytes = QUEUE_BYTES + free_bytes(torch.device("cpu")) // 4
                if queued_bytes > max_queued_bytes:
                    self.num_skipped += 1  # writes are slower than evictions
                    return
                layers = self.copy_out(group, [block_id])
            except (MemoryError, OSError, RuntimeError) as error:  # `OSError`: from `psutil`
                if is_interrupt(error):
                    raise
                self.num_skipped += 1
                return
            entry = _Entry(layers, num_bytes(layers))
            self.num_kept += 1
            if is_verified:
                self._add_to_host(key, entry)
            else:
                self._pending[name] = entry
                self._num_bytes["pending"] += entry.num_bytes
        self._start_writer()

    def layers(self, group: int) -> Mapping[int, KVBlocks]:
        """Returns the blocks of a group's layers. Before these are allocated, returns blocks of the
        same shapes without memory, or an empty mapping if the shapes are unknown."""
        allocated_layers: Mapping[int, KVBlocks] = self._groups[group].storage.layers
        return allocated_layers or self._outlines[group]

    def copy_out(self, group: int, block_ids: list[int]) -> Layers:
        """Returns copies of a group's blocks in host memory."""
        layers = self._groups[group].storage.layers
        return {
            index: HostLayer.copy_of(layer, block_ids).blocks for index, layer in layers.items()
        }

    def confirm(self) -> None:
        with self._lock:
            for name, entry in self._pending.items():
                self._add_to_host((self.weights_hash, name), entry)
            self.discard()
        self._start_writer()

    def discard(self) -> None:
        with self._lock:
            self._pending.clear()
            self._num_bytes["pending"] = 0

    def num_restorable_tokens(self, sequence: Sequence) -> int:
        return len(self._path(sequence)) * sequence.blocks.manager.node_size

    def _path(self, sequence: Sequence) -> list[Link]:
        """Returns the path that `SequenceBlocks.match` would attach if the pools also had all
        blocks of this store."""
        manager = sequence.blocks.manager
        namespace = sequence.request.namespace
        if not manager.prefix_caching or namespace is UNCACHED:
            return []
        max_nodes = (sequence.num_tokens - 1) // manager.node_size
        return manager.index.find(sequence.keys, namespace, max_nodes, self.has)

    def restore(self, sequence: Sequence) -> bool:
        try:
            return self._restore(sequence)
        except OutOfBlocksError:
            # the sequence's tokens are computed instead, once there are free blocks
            return False
        except TierError as error:
            # the tokens are computed instead. Other errors are not caught, since a change of blocks
            # may be half done
            if type(error.cause) not in self.warned_errors:
                self.warned_errors.add(type(error.cause))
                message = (
                    "cached blocks could not be restored from a tier, so their tokens are computed"
                    " again: %r"
                )
                logger.warning(Topic.PREFIX_TIERS(message), error.cause)
            return False

    def _restore(self, sequence: Sequence) -> bool:
        manager = sequence.blocks.manager

        def read(group: int, index: int) -> Layers | None:
            return self.read(group, links[index].digest)

        while True:  # ends: `_path` never again finds a block for which `read` returned `None`
            links = self._path(sequence)
            if len(links) * manager.node_size <= sequence.num_computed_tokens:
                return False
            if restore_path(self, manager, links, sequence.request.namespace, read):
                return True

    def has(self, group: int, digest: bytes) -> bool:
        """Whether the store has the group's block with this digest, confirmed or not. Even then,
        `read` may return `None`."""
        name = _block_name(group, digest)
        weights_hash = self._weights_hash
        if not self.layers(group):
            return False
        with self._lock:
            if name in self._pending or (weights_hash, name) in self._host_entries:
                return True
            disk = self._disk
            return disk is not None and disk.has(weights_hash, name)

    def read(self, group: int, digest: bytes) -> Layers | None:
        """Returns the content of a block that the current weights computed; `None` if the block is
        missing, unreadable or unconfirmed. An unconfirmed block is then dropped."""
        name = _block_name(group, digest)
        key = (self.weights_hash, name)
        with self._lock:
            entry = self._host_entries.get(key)
            if entry is not None:
                self._host_entries.move_to_end(key)
                return entry.layers
        disk = self._disk
        layers = None
        if disk is not None:
            layers = disk.read(*key, self.layers(group))
        if layers is None:  # so that `has` returns `False` from now on
            with self._lock:
                entry = self._pending.pop(name, None)
                self._num_bytes["pending"] -= 0 if entry is None else entry.num_bytes
        return layers

    def put_back(self, group: int, contents: list[Layers], block_ids: list[int]) -> None:
        """Writes `contents`, one or more results of `read`, to the blocks `block_ids` of the pool.
        Raises `ValueError` if they do not fit the layers, and `OutOfBlocksError`, `MemoryError` or
        torch's errors if memory runs out."""
        group_memory = self._groups[group]
        layers = contents[0]
        pool_layers = group_memory.storage.layers
        view_arguments = [
            {index: layer.view_arguments for index, layer in content.items()}
            for content in contents
        ]
        formats_differ = any(arguments != view_arguments[0] for arguments in view_arguments)
        has_other_layers = pool_layers and pool_layers.keys() != layers.keys()
        if formats_differ or has_other_layers:
            raise ValueError("the copied blocks differ from the pool's in layers or format")
        host = HostBlocks()
        for index, layer in layers.items():
            block_data = [content[index].data for content in contents]
            data = [torch.cat(tensors) for tensors in zip(*block_data)]
            device = self._device
            if index in pool_layers:
                device = pool_layers[index].keys.device
            assert device is not None
            host[index] = HostLayer(layer.like(data), device)
        put_back(group_memory, host, dict(enumerate(block_ids)))
        self.num_restored += len(block_ids)

    def _add_to_host(self, key: _Key, entry: _Entry) -> None:
        """Adds a confirmed block to host memory, to be written to disk if there is a disk tier."""
        if key in self._host_entries:
            return
        self._host_entries[key] = entry
        self._num_bytes["host"] += entry.num_bytes
        if self._disk is not None:
            self._unwritten[key] = None
            self._num_bytes["unwritten"] += entry.num_bytes
        self._trim()

    def _trim(self) -> None:
        """Evicts blocks from host memory, least recently used first, until they fit `host_bytes`.
        Does not count or evict blocks that are not yet written to disk."""
        excess = self._num_bytes["host"] - self._num_bytes["unwritten"] - self._host_bytes
        if excess <= 0:
            return
        for key in list(self._host_entries):
            if excess <= 0:
                break
            if key not in self._unwritten:
                excess -= self._host_entries[key].num_bytes
                self._num_bytes["host"] -= self._host_entries.pop(key).num_bytes

    def _start_writer(self) -> None:
        thread = self._thread
        if self._unwritten and (thread is None or not thread.is_alive()):
            # not a daemon, so that the interpreter waits until all blocks are written. If no thread
            # can be started, `_write_all` writes them
            self._thread = start(self._write, "hf_paged prefix blocks", daemon=False)

    def _write(self) -> None:
        """Writes blocks to disk until all confirmed blocks are written."""
        while True:
            with self._lock:
                key = next(iter(self._unwritten), None)
                if key is None:
                    self._thread = None
                    return
                entry = self._host_entries[key]
            assert self._folder is not None
            try:
                self._folder.write(*key, entry.layers)
            finally:
                with self._lock:
                    if self._unwritten.pop(key, key) is None:
                        self._num_bytes["unwritten"] -= entry.num_bytes
                    self._trim()

    def wait(self) -> None:
        """Waits until the writing thread, if any, has tried to write every confirmed block."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process: drops the unwritten blocks, which the parent writes, and the
        unconfirmed blocks."""
        self._thread = None
        for key in self._unwritten:
            if key in self._host_entries:
                del self._host_entries[key]
        self._unwritten.clear()
        self.discard()
        self._num_bytes = {
            "pending": 0,
            "host": sum(entry.num_bytes for entry in self._host_entries.values()),
            "unwritten": 0,
        }


def make_tier(
    model: PreTrainedModel,
    memory: PagedMemory,
    block_manager: BlockManager,
    config: PagedConfig,
    layout: Layout,
) -> tuple[PrefixStore | None, str | None]:
    """Returns a store for blocks that the prefix cache evicts, and `None`: the tier of
    `block_manager` if that has the same config and layers, otherwise a new store. If the blocks
    cannot be stored, returns `None` and the reason. `config.prefix_tiers` must be set."""
    requested_tiers = PrefixTiers.coerce(config.prefix_tiers)
    assert requested_tiers is not None
    reason = reason_against_saving(memory, block_manager)
    if requested_tiers.disk_path is None and compute_device(model).type == "cpu":
        reason = Topic.PREFIX_TIERS(
            "the pool is already in host memory, so only a disk tier helps: set `disk_path`"
        )
    if reason is not None:
        return None, reason
    tier = block_manager.tier
    if isinstance(tier, PrefixStore):
        if tier.config == requested_tiers and tier.expected_layers == layout.layers:
            tier.warned_errors.clear()
            return tier, None
    return PrefixStore(model, memory, block_manager, requested_tiers, layout), None


def reason_against_saving(memory: PagedMemory, block_manager: BlockManager) -> str | None:
    """Returns the reason why cached prefixes cannot be copied out of the pool; `None` if they
    can."""
    if not block_manager.prefix_caching:
        return Topic.PREFIX_TIERS("prompts of this model are not cached")
    if memory.processes is not None:
        return Topic.PREFIX_TIERS("keys and values are split over several processes")
    if block_manager.keeps_states:
        return Topic.PREFIX_TIERS("snapshots of the model's states stay in the pool")
    return None


def check(config: PagedConfig) -> None:
    """Creates the folder of a new pool's disk tier, if the config has one. Raises `OSError` if this
    process cannot use the folder."""
    tiers = PrefixTiers.coerce(config.prefix_tiers)
    if tiers is not None and tiers.disk_path is not None:
        check_folder(os.fspath(tiers.disk_path))


def _block_name(group: int, digest: bytes) -> str:
    return f"{digest.hex()}-{group}"


_stores: weakref.WeakSet[PrefixStore] = weakref.WeakSet()


def _write_all() -> None:
    """At exit, evicts all cached blocks of pools with a disk tier, except pools that stay locked,
    and writes the confirmed blocks to disk."""
    for store in members_of(_stores):
        with contextlib.suppress(ReferenceError):  # the store's memory was freed
            if store._disk is not None:
                with attempt(store.memory.lock, seconds=1) as is_held:
                    if is_held:
                        store.memory.evict_cached()
        store.wait()
        store._write()


atexit.register(_write_all)
