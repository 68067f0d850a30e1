"""Prefix blocks below the pool: in host memory, and on disk as safetensors files that name what they depend on."""

from __future__ import annotations

import atexit
import contextlib
import errno
import hashlib
import json
import logging
import os
import threading
import time
import uuid
import weakref
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import safetensors.torch
import torch
from torch import Tensor

from .. import forks
from ..config import PrefixTiers
from .memory import GroupMemory, PagedMemory
from .storage import KVBlocks, free_bytes
from .swap import HostLayer

logger = logging.getLogger(__name__)

FORMAT = "hf_paged prefix 1"
FOLDER, SUFFIX = "hf_paged-", ".safetensors"  # nothing else in a tier's folder is ever touched
QUEUE_BYTES = 256 << 20  # that wait to be written, at least, however little memory is free
PENDING_BYTES = 64 << 20  # that wait for a fingerprint before one is taken for them alone
RETRY_SECONDS = 60.0  # after which a disk that took no file is tried again
_ABANDONED_SECONDS = 600.0  # after which a part of a file is what a killed process left

Layers = dict[int, HostLayer]
"""By layer of the model the blocks of one group, each of the same number, in host memory."""


class Corrupt(ValueError):
    """A file that is not what was written."""


def num_bytes(layers: Layers) -> int:
    return sum(tensor.nbytes for layer in layers.values() for tensor in layer.blocks.data)


def to_bytes(parts: dict[int, Layers], name: str, **others: str) -> bytes:
    """A safetensors file of the blocks of some groups: a tensor `{group}.{layer}.{part}` of shape `(num_blocks, ...)`
    for each of `KVBlocks.data`, with a hash over all of it."""
    tensors = {
        f"{group}.{index}.{part}": tensor.contiguous()
        for group, layers in parts.items()
        for index, layer in layers.items()
        for part, tensor in enumerate(layer.blocks.data)
    }
    forms = {f"{g}.{index}": _form(layer.blocks) for g, layers in parts.items() for index, layer in layers.items()}
    metadata = {"format": FORMAT, "name": name, "layers": json.dumps(forms), **others}
    return safetensors.torch.save(tensors, metadata | {"hash": _hash(tensors, metadata)})


def from_bytes(content: bytes) -> tuple[dict[int, Layers], dict[str, str]]:
    """What `to_bytes` was given, the metadata with the name; layers are where the blocks are to go, or on the CPU.
    Raises [`Corrupt`]."""
    try:
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise Corrupt(f"its format is {metadata['format']!r}, not {FORMAT!r}")
        tensors = safetensors.torch.load(content)
        if metadata.pop("hash") != _hash(tensors, metadata):
            raise Corrupt("its content is not what its hash says")
        parts: dict[int, Layers] = {}
        for place, (heads, key_dim, *dtypes) in json.loads(metadata["layers"]).items():
            group, index = map(int, place.split("."))
            data: list[Tensor] = []
            while (tensor := tensors.get(f"{place}.{len(data)}")) is not None:
                data.append(tensor)
            key_dtype, value_dtype = (getattr(torch, dtype) for dtype in dtypes)
            if not isinstance(key_dtype, torch.dtype) or not isinstance(value_dtype, torch.dtype):
                raise Corrupt(f"its dtypes are {dtypes}")
            blocks = KVBlocks.view(tuple(data), heads, key_dim, (key_dtype, value_dtype))
            parts.setdefault(group, {})[index] = HostLayer(blocks, torch.device("cpu"))
        return parts, metadata
    except Corrupt:
        raise
    except Exception as error:  # whatever bytes may do to what reads them
        raise Corrupt(f"it cannot be read: {type(error).__name__}: {error}") from error


def _form(blocks: KVBlocks) -> list[Any]:
    """What blocks are beside their tensors."""
    dtypes = (str(dtype).removeprefix("torch.") for dtype in blocks.dtypes)
    return [blocks.keys.shape[1], blocks.keys.shape[3], *dtypes]


def _hash(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.blake2b(repr(sorted(metadata.items())).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


class DiskFolder:
    """Files of at most `max_bytes` in a folder that other processes may use, too: what is there is asked of the system,
    and the files that were used longest ago go first. What goes wrong is logged, once a kind, and is as a miss."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path, self.max_bytes = Path(path), max_bytes
        self.num_bytes: int | None = None  # as far as this process knows; `None` before it has looked
        self._told: set[str] = set()
        self._lost: set[str] = set()  # what cannot be read, nor deleted
        self._num_written = 0  # bytes, since it has looked
        self._retry_at = 0.0  # by `time.monotonic`: no file is written before

    def has(self, weights: str | None, name: str) -> bool:
        """Without `weights`: of any."""
        if name in self._lost:
            return False
        if weights is not None:
            return self._file(weights, name).exists()
        with contextlib.suppress(OSError):
            return any((folder / f"{name}{SUFFIX}").exists() for folder in self.path.glob(f"{FOLDER}*"))
        return False

    def read(self, weights: str, name: str) -> dict[int, Layers] | None:
        path = self._file(weights, name)
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except (OSError, MemoryError) as error:
            self._lost.add(name)
            self._warn("read", f"{path} cannot be read, its tokens are computed: {error}")
            return None
        try:
            parts, metadata = from_bytes(content)
            if metadata["name"] != f"{weights}/{name}":
                raise Corrupt(f"it is {metadata['name']} by another name")
        except Corrupt as error:
            self._lost.add(name)
            self._warn("corrupt", f"{path} is dropped, and its tokens are computed: {error}")
            with contextlib.suppress(OSError):
                path.unlink()
                self._lost.discard(name)
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # used now
        return parts

    def write(self, weights: str, name: str, parts: dict[int, Layers]) -> None:
        if time.monotonic() < self._retry_at:
            return
        path = self._file(weights, name)
        part = path.with_name(f"{name}.{uuid.uuid4().hex}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = to_bytes(parts, f"{weights}/{name}")
            if self.num_bytes is None or self._num_written + len(content) > self.max_bytes // 32:  # others write, too
                self._look()
            assert self.num_bytes is not None
            if self.num_bytes + len(content) > self.max_bytes:
                self._trim(len(content))
            if self.num_bytes + len(content) > self.max_bytes:
                self._warn(
                    "small", f"`disk_bytes` ({self.max_bytes:,}) has no room for a block of {len(content):,} bytes"
                )
                return
            part.write_bytes(content)
            part.replace(path)  # whole, or not there
            self._lost.discard(name)
            self.num_bytes += len(content)
            self._num_written += len(content)
        except Exception as error:  # no such folder, no right to write, no space, no memory
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            full = "; it is full" if getattr(error, "errno", None) == errno.ENOSPC else ""
            self._warn(
                "write", f"no prefix blocks are written to {self.path} for {RETRY_SECONDS:.0f} seconds{full}: {error}"
            )

    def _file(self, weights: str, name: str) -> Path:
        return self.path / f"{FOLDER}{weights}" / f"{name}{SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """When each was last used, and its bytes; parts that killed processes left are deleted."""
        found = []
        for path in self.path.glob(f"{FOLDER}*/*"):
            with contextlib.suppress(OSError):
                status = path.stat()
                if path.suffix == SUFFIX:
                    found.append((status.st_mtime, status.st_size, path))
                elif path.suffix == ".part" and status.st_mtime < time.time() - _ABANDONED_SECONDS:
                    path.unlink()
        return sorted(found)

    def _look(self) -> list[tuple[float, int, Path]]:
        files = self._files()
        self.num_bytes, self._num_written = sum(size for _, size, _ in files), 0
        return files

    def _trim(self, needed: int) -> None:
        """Deletes files until `needed` bytes, and a tenth of all, are free."""
        files = self._look()
        assert self.num_bytes is not None
        for _, size, path in files:
            if self.num_bytes + needed <= 0.9 * self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                self.num_bytes -= size
        for folder in self.path.glob(f"{FOLDER}*"):
            with contextlib.suppress(OSError):
                folder.rmdir()  # which are empty

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(message)


class _Entry(NamedTuple):
    layers: Layers
    num_bytes: int


_Key = tuple[str, str]  # the weights and what else blocks depend on; the tokens and the group


class PrefixStore:
    """The tiers below the pool of one memory, for the groups of one manager (`block_manager.Tier`). What a pool gives
    up is copied to host memory at once, before others write to it; a thread, alive while there is something to write,
    puts it on disk. Methods of `Tier` are called with the memory's lock held."""

    def __init__(
        self,
        config: PrefixTiers,
        memory: PagedMemory,
        groups: Sequence[GroupMemory],
        device: torch.device | None,
        form: Any,
    ) -> None:
        """`device`: where layers are that no forward has made yet; `None` if that is not known. `form`: what else
        blocks depend on, whose `repr` is the same in every process."""
        self.config, self._device = config, device
        self._memory: PagedMemory = weakref.proxy(memory)
        self._groups = list(groups)
        self._form = FORMAT, memory.config.block_size, [repr(group.spec) for group in groups], form
        self._disk = None if config.disk_path is None else DiskFolder(config.disk_path, config.disk_bytes)
        self._host_bytes = 0 if device is not None and device.type == "cpu" else config.host_bytes
        self._lock = forks.rlock()
        self._pending: dict[str, _Entry] = {}  # of weights that are still to be looked at
        self._held: OrderedDict[_Key, _Entry] = OrderedDict()  # in host memory, those used last behind
        self._unwritten: OrderedDict[_Key, None] = OrderedDict()  # of these: what is to go to disk
        self._sizes = {"pending": 0, "held": 0, "unwritten": 0}
        self._thread: threading.Thread | None = None
        self.num_kept = self.num_restored = self.num_skipped = 0  # blocks
        self._known: tuple[Any, str] = (None, "")
        forks.in_child(self)
        _stores.add(self)

    @property
    def _weights(self) -> str | None:
        """What blocks depend on beside tokens, as far as it is known."""
        fingerprint = self._memory.fingerprint
        if fingerprint is None:
            return None
        if self._known[0] != fingerprint:
            found = hashlib.blake2b(repr((fingerprint, self._form)).encode(), digest_size=16)
            self._known = fingerprint, found.hexdigest()
        return self._known[1]

    @property
    def weights(self) -> str:
        """... once a fingerprint was taken."""
        weights = self._weights
        assert weights is not None
        return weights

    @property
    def host_bytes(self) -> int:
        """Of host memory that the tier holds now."""
        return self._sizes["held"] + self._sizes["pending"]

    @property
    def disk_bytes(self) -> int:
        """Of all files in the folder, as far as this process knows."""
        return 0 if self._disk is None else self._disk.num_bytes or 0

    @property
    def wants_confirmation(self) -> bool:
        """Whether much waits for a fingerprint."""
        return self._sizes["pending"] > PENDING_BYTES

    def keep(self, group: int, block_id: int, digest: bytes, is_vouched_for: bool) -> None:
        name, weights = _name(group, digest), self._weights
        if weights is None or self._groups[group].is_incomplete:
            return
        with self._lock:
            if name in self._pending or (weights, name) in self._held:
                return
            if self._disk is not None and self._disk.has(weights, name):
                return
            if self._sizes["unwritten"] + self._sizes["pending"] > QUEUE_BYTES + free_bytes(torch.device("cpu")) // 4:
                self.num_skipped += 1  # the disk is slower than what comes
                return
            try:
                layers = self.copy_out(group, [block_id])
            except (MemoryError, RuntimeError):  # torch raises the latter
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
            return self._disk is not None and self._disk.has(weights, name)

    def read(self, group: int, digest: bytes) -> Any:
        name, key = _name(group, digest), (self.weights, _name(group, digest))
        with self._lock:
            entry = self._held.get(key)
            if entry is not None:
                self._held.move_to_end(key)
                return entry.layers
        parts = None if self._disk is None else self._disk.read(self.weights, name)
        if parts is None:  # `has` says no from now on
            with self._lock:
                lost = self._pending.pop(name, None)
                self._sizes["pending"] -= 0 if lost is None else lost.num_bytes
            return None
        return parts[0]

    def put_back(self, group: int, contents: list[Any], block_ids: list[int]) -> None:
        memory, layers = self._groups[group], contents[0]
        held = memory.storage.layers
        forms = [{index: _form(layer.blocks) for index, layer in each.items()} for each in contents]
        if any(form != forms[0] for form in forms) or (held and held.keys() != layers.keys()):
            raise ValueError("the blocks are not those of these layers")
        memory.expect(sum(layer.blocks.block_bytes for layer in layers.values()))
        for index, layer in layers.items():
            data = [each[index].blocks.data for each in contents]
            blocks = layer.blocks.like([torch.cat(parts) for parts in zip(*data)])
            device = held[index].keys.device if index in held else self._device
            assert device is not None
            HostLayer(blocks, device).put_back(memory.storage, index, dict(enumerate(block_ids)))
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
        """Host memory within its limit, but for what is still to be written."""
        over = self._sizes["held"] - self._sizes["unwritten"] - self._host_bytes
        for key in list(self._held) if over > 0 else ():
            if over <= 0:
                break
            if key not in self._unwritten:
                over -= self._held[key].num_bytes
                self._sizes["held"] -= self._held.pop(key).num_bytes

    def _begin_writing(self) -> None:
        if self._thread is None:
            # no daemon: the interpreter waits for what is left to write
            thread = threading.Thread(target=self._write, name="hf_paged prefix blocks")
            with contextlib.suppress(RuntimeError):  # the interpreter ends: `_keep_all` writes
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
        assert self._disk is not None
        try:
            self._disk.write(*key, {0: entry.layers})
        finally:
            with self._lock:
                if self._unwritten.pop(key, key) is None:
                    self._sizes["unwritten"] -= entry.num_bytes
                self._trim()
        return True

    def wait(self) -> None:
        """Until all that was given up is on disk, or cannot be written there."""
        thread = self._thread
        if thread is not None:
            thread.join()

    def after_fork(self, freed: set[Any]) -> None:
        """In a child process: what waits to be written the parent writes."""
        self._thread = None
        for key in self._unwritten:
            if key in self._held:
                del self._held[key]
        self._unwritten.clear()
        self.discard()
        self._sizes = {"pending": 0, "held": sum(each.num_bytes for each in self._held.values()), "unwritten": 0}


def _name(group: int, digest: bytes) -> str:
    return f"{digest.hex()}-{group}"


_stores: weakref.WeakSet[PrefixStore] = weakref.WeakSet()


def stores_of(memory: PagedMemory) -> Iterable[PrefixStore]:
    """The tiers below a memory."""
    tiers = (manager.tier for manager in list(memory.managers.values()))
    return [tier for tier in tiers if isinstance(tier, PrefixStore)]


def _keep_all() -> None:
    """What is cached when the process ends goes to disk."""
    for store in list(_stores):
        with contextlib.suppress(ReferenceError):  # its memory is gone
            lock = store._memory.lock
            if store._disk is not None and lock.acquire(timeout=1):
                try:
                    store._memory.give_up_cached()
                finally:
                    lock.release()
        store.wait()
        store._write()


atexit.register(_keep_all)
