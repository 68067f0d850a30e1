"""Tiers for evicted prefix blocks: host memory, and files that a thread writes to a folder."""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import threading
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch

from .. import forks
from ..config import PrefixTiers
from .block_files import FORMAT, DiskFolder, Layers, check_folder, form_of, num_bytes
from .memory import GroupMemory, PagedMemory
from .storage import free_bytes
from .swap import HostBlocks, HostLayer, put_back

QUEUE_BYTES = 256 << 20  # that may wait to be written or confirmed even if little memory is free
PENDING_BYTES = 64 << 20  # of unconfirmed blocks above which a fingerprint is taken just to confirm them


class _Entry(NamedTuple):
    layers: Layers
    num_bytes: int


_Key = tuple[str, str]  # hash of weights and options; hash of tokens with the group


class PrefixStore:
    """The tiers of one memory, for the groups of one manager (`block_manager.Tier`). Evicted blocks are copied to host
    memory at once, before they are overwritten; a thread, alive while there is something to write, writes them to disk.
    Methods of `Tier` are called with the memory's lock held."""

    def __init__(
        self,
        config: PrefixTiers,
        memory: PagedMemory,
        groups: Sequence[GroupMemory],
        device: torch.device | None,
    ) -> None:
        """`device`: that of layers not allocated yet; `None` if it is not known."""
        self.config, self._device = config, device
        # weak: the writing thread must not keep the memory or its groups alive
        self._memory: PagedMemory = weakref.proxy(memory)
        self._groups = [weakref.proxy(group) for group in groups]
        given = memory.config
        sizes = [group.block_size for group in groups if not group.holds_states]
        options = sizes if len(set(sizes)) > 1 else max(sizes, default=0), given.kv_dtype, given.batch_invariant
        self._form = FORMAT, options, [repr(group.spec) for group in groups]
        self._folder = None if config.disk_path is None else DiskFolder(config.disk_path, config.disk_bytes)
        self._host_bytes = 0 if device is not None and device.type == "cpu" else config.host_bytes
        self._lock = forks.rlock()
        self._pending: dict[str, _Entry] = {}  # blocks whose weights are unconfirmed
        self._held: OrderedDict[_Key, _Entry] = OrderedDict()  # in host memory, in LRU order, most recent last
        self._unwritten: OrderedDict[_Key, None] = OrderedDict()  # keys of `_held` still to be written to disk
        self._sizes = {"pending": 0, "held": 0, "unwritten": 0}
        self._thread: threading.Thread | None = None
        self.num_kept = self.num_restored = self.num_skipped = 0  # blocks
        self._known: tuple[Any, str] = (None, "")
        forks.in_child(self)
        _stores.add(self)

    @property
    def _disk(self) -> DiskFolder | None:
        """The folder; `None` without one, and once it is off."""
        return None if self._folder is None or self._folder.is_off else self._folder

    @property
    def _weights(self) -> str | None:
        """Hash of what blocks depend on besides tokens, the same in every process; `None` without a fingerprint."""
        fingerprint = self._memory.fingerprint
        if fingerprint is None:
            return None
        if self._known[0] != fingerprint:
            found = hashlib.blake2b(repr((fingerprint, self._form)).encode(), digest_size=16)
            self._known = fingerprint, found.hexdigest()
        return self._known[1]

    @property
    def weights(self) -> str:
        """`_weights`, after a fingerprint was taken."""
        weights = self._weights
        assert weights is not None
        return weights

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that the tier holds now."""
        return self._sizes["held"] + self._sizes["pending"]

    @property
    def disk_bytes(self) -> int:
        """Bytes of all files in the folder, as far as this process knows."""
        disk = self._disk
        return 0 if disk is None else disk.num_bytes or 0

    @property
    def wants_confirmation(self) -> bool:
        """Whether more than `PENDING_BYTES` are unconfirmed."""
        return self._sizes["pending"] > PENDING_BYTES

    def keep(self, group: int, block_id: int, digest: bytes, is_vouched_for: bool) -> None:
        name, weights = _name(group, digest), self._weights
        if weights is None or self._groups[group].is_incomplete:
            return
        with self._lock:
            if name in self._pending or (weights, name) in self._held:
                return
            disk = self._disk
            if disk is not None and disk.has(weights, name):
                return
            if self._disk is None and not self._host_bytes:  # nothing would keep it
                return
            try:
                num_queued = self._sizes["unwritten"] + self._sizes["pending"]
                if num_queued > QUEUE_BYTES + free_bytes(torch.device("cpu")) // 4:
                    self.num_skipped += 1  # the disk is slower than evictions
                    return
                layers = self.copy_out(group, [block_id])
            except (MemoryError, OSError, RuntimeError):  # of `psutil` and of torch
                self.num_skipped += 1
                return
            entry = _Entry(layers, num_bytes(layers))
            self.num_kept += 1
            if is_vouched_for:
                self._hold((weights, name), entry)
            else:
                self._pending[name] = entry
                self._sizes["pending"] += entry.num_bytes

    def copy_out(self, group: int, block_ids: list[int]) -> Layers:
        layers = self._groups[group].storage.layers
        return {index: HostLayer.copy_of(layer, block_ids) for index, layer in layers.items()}

    def confirm(self) -> None:
        with self._lock:
            for name, entry in self._pending.items():
                self._hold((self.weights, name), entry)
            self.discard()

    def discard(self) -> None:
        with self._lock:
            self._pending.clear()
            self._sizes["pending"] = 0

    def has(self, group: int, digest: bytes) -> bool:
        name, weights = _name(group, digest), self._weights
        if self._device is None and not self._groups[group].storage.layers:
            return False
        with self._lock:
            if name in self._pending or (weights, name) in self._held:
                return True
            disk = self._disk
            return disk is not None and disk.has(weights, name)

    def read(self, group: int, digest: bytes) -> Any:
        name, key = _name(group, digest), (self.weights, _name(group, digest))
        with self._lock:
            entry = self._held.get(key)
            if entry is not None:
                self._held.move_to_end(key)
                return entry.layers
        disk = self._disk
        parts = None if disk is None else disk.read(self.weights, name)
        if parts is None:  # make `has` return `False` from now on
            with self._lock:
                lost = self._pending.pop(name, None)
                self._sizes["pending"] -= 0 if lost is None else lost.num_bytes
            return None
        return parts[0]

    def put_back(self, group: int, contents: list[Any], block_ids: list[int]) -> None:
        memory, layers = self._groups[group], contents[0]
        held = memory.storage.layers
        forms = [{index: form_of(layer.blocks) for index, layer in each.items()} for each in contents]
        if any(form != forms[0] for form in forms) or (held and held.keys() != layers.keys()):
            raise ValueError("the blocks are not those of these layers")
        memory.expect(sum(layer.blocks.block_bytes for layer in layers.values()))
        host = HostBlocks()
        for index, layer in layers.items():
            data = [each[index].blocks.data for each in contents]
            blocks = layer.blocks.like([torch.cat(parts) for parts in zip(*data)])
            device = held[index].keys.device if index in held else self._device
            assert device is not None
            host[index] = HostLayer(blocks, device)
        put_back(memory, host, dict(enumerate(block_ids)))
        self.num_restored += len(block_ids)

    def _hold(self, key: _Key, entry: _Entry) -> None:
        if key in self._held:
            return
        self._held[key] = entry
        self._sizes["held"] += entry.num_bytes
        if self._disk is not None:
            self._unwritten[key] = None
            self._sizes["unwritten"] += entry.num_bytes
            self._begin_writing()
        self._trim()

    def _trim(self) -> None:
        """Evicts written blocks, in LRU order, until host memory, without unwritten blocks, is within its limit."""
        over = self._sizes["held"] - self._sizes["unwritten"] - self._host_bytes
        for key in list(self._held) if over > 0 else ():
            if over <= 0:
                break
            if key not in self._unwritten:
                over -= self._held[key].num_bytes
                self._sizes["held"] -= self._held.pop(key).num_bytes

    def _begin_writing(self) -> None:
        if self._thread is None or not self._thread.is_alive():
            # not a daemon: the interpreter waits until all is written
            thread = threading.Thread(target=self._write, name="hf_paged prefix blocks")
            with contextlib.suppress(RuntimeError):  # interpreter shutdown: `_keep_all` writes
                thread.start()
                self._thread = thread

    def _write(self) -> None:
        while self._write_one():
            pass

    def _write_one(self) -> bool:
        with self._lock:
            key = next(iter(self._unwritten), None)
            if key is None:
                self._thread = None
                return False
            entry = self._held[key]
        assert self._folder is not None
        try:
            self._folder.write(*key, {0: entry.layers})
        finally:
            with self._lock:
                if self._unwritten.pop(key, key) is None:
                    self._sizes["unwritten"] -= entry.num_bytes
                self._trim()
        return True

    def wait(self) -> None:
        """Waits until all evicted blocks are on disk, or failed to be written."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process: drops unwritten blocks, which the parent writes, and unconfirmed ones."""
        self._thread = None
        for key in self._unwritten:
            if key in self._held:
                del self._held[key]
        self._unwritten.clear()
        self.discard()
        self._sizes = {"pending": 0, "held": sum(each.num_bytes for each in self._held.values()), "unwritten": 0}


def check_tiers(config: PrefixTiers | None) -> None:
    """Creates the folder of a new pool's disk tier. Raises `OSError` if this process cannot use it."""
    if config is not None and config.disk_path is not None:
        check_folder(config.disk_path)


def _name(group: int, digest: bytes) -> str:
    return f"{digest.hex()}-{group}"


_stores: weakref.WeakSet[PrefixStore] = weakref.WeakSet()


def stores_of(memory: PagedMemory) -> Iterable[PrefixStore]:
    """Returns the prefix stores of a memory."""
    tiers = (manager.tier for manager in list(memory.managers.values()))
    return [tier for tier in tiers if isinstance(tier, PrefixStore)]


def _keep_all() -> None:
    """Writes all cached blocks to disk when the process ends."""
    for store in list(_stores):
        with contextlib.suppress(ReferenceError):  # its memory was freed
            lock = store._memory.lock
            if store._disk is not None and lock.acquire(timeout=1):
                try:
                    store._memory.give_up_cached()
                finally:
                    lock.release()
        store.wait()
        store._write()


atexit.register(_keep_all)
