"""Blocks as safetensors files: their format and hash, and a folder of limited size for them."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import logging
import os
import re
import stat
import time
import uuid
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from .storage import KVBlocks
from .swap import HostLayer

logger = logging.getLogger(__name__)

FORMAT = "hf_paged prefix 1"
FOLDER, SUFFIX = "hf_paged-", ".safetensors"
_OWN = re.compile(r"hf_paged-[0-9a-f]{32}/[0-9a-f]{32}-\d+(\.safetensors|\.[0-9a-f]{32}\.part)")
"""Only these files in a tier's folder are ever deleted: the name of another folder, say a model's, may begin alike."""
RETRY_SECONDS = 60.0  # after which a write is tried again once one has failed
_ABANDONED_SECONDS = 600.0  # after which a partial file counts as left by a killed process
# errors in opening a file that say nothing about the folder's other files
_OF_ONE_FILE = {
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOENT),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}

Layers = dict[int, HostLayer]
"""Host copies of one group's blocks by layer index, the same number of blocks in each layer."""


class Corrupt(ValueError):
    """A file does not have the content that was written."""


def num_bytes(layers: Layers) -> int:
    return sum(tensor.nbytes for layer in layers.values() for tensor in layer.blocks.data)


def to_bytes(parts: dict[int, Layers], name: str, **others: str) -> bytes:
    """Serializes the blocks of some groups as a safetensors file: one tensor `{group}.{layer}.{part}` of shape
    `(num_blocks, ...)` for each of `KVBlocks.data`, and a hash over everything."""
    tensors = {
        f"{group}.{index}.{part}": tensor.contiguous()
        for group, layers in parts.items()
        for index, layer in layers.items()
        for part, tensor in enumerate(layer.blocks.data)
    }
    forms = {f"{g}.{index}": form_of(layer.blocks) for g, layers in parts.items() for index, layer in layers.items()}
    metadata = {"format": FORMAT, "name": name, "layers": json.dumps(forms), **others}
    return safetensors.torch.save(tensors, metadata | {"hash": _hash(tensors, metadata)})


def from_bytes(content: bytes) -> tuple[dict[int, Layers], dict[str, str]]:
    """Inverse of `to_bytes`: returns the blocks, on the CPU, and the metadata with the name. Raises [`Corrupt`]."""
    try:
        metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
        if metadata["format"] != FORMAT:
            raise Corrupt(f"its format is {metadata['format']!r}, not {FORMAT!r}")
        tensors = safetensors.torch.load(content)
        if metadata.pop("hash") != _hash(tensors, metadata):
            raise Corrupt("its content is not what its hash says")
        parts: dict[int, Layers] = {}
        for place, (heads, key_dim, dtypes, codes) in json.loads(metadata["layers"]).items():
            group, index = map(int, place.split("."))
            data: list[Tensor] = []
            while (tensor := tensors.get(f"{place}.{len(data)}")) is not None:
                data.append(tensor)
            key_dtype, value_dtype = map(_dtype, dtypes)
            of_codes = None if codes is None else (int(codes[0]), _dtype(codes[1]))
            blocks = KVBlocks.view(tuple(data), heads, key_dim, (key_dtype, value_dtype), of_codes)
            parts.setdefault(group, {})[index] = HostLayer(blocks, torch.device("cpu"))
        return parts, metadata
    except (Corrupt, MemoryError):
        raise
    except Exception as error:  # corrupt bytes may raise anything in the parsers
        raise Corrupt(f"it cannot be read: {type(error).__name__}: {error}") from error


def form_of(blocks: KVBlocks) -> list[Any]:
    """Returns `KVBlocks.form`, which describes blocks without their tensors, as JSON values."""
    heads, key_dim, dtypes, codes = blocks.form
    names = [_name(dtype) for dtype in dtypes]
    return [heads, key_dim, names, None if codes is None else [codes[0], _name(codes[1])]]


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise Corrupt(f"{name} is no dtype")
    return found


def _said(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _hash(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    digest = hashlib.blake2b(repr(sorted(metadata.items())).encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_folder(path: str) -> None:
    """Creates a tier's folder if it is missing. Raises `OSError` if it cannot be created, listed or entered."""
    try:
        os.makedirs(path, exist_ok=True)
        with os.scandir(path):
            os.stat(os.path.join(path, os.curdir))
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno is not None else str(error)
        message = (
            f"`disk_path` of `prefix_tiers` is no folder that this process can use: {reason}. Give another path, or "
            "let this process create, list and enter it"
        )
        raise OSError(error.errno, message, path) from error


class DiskFolder:
    """A folder of files with at most `max_bytes`, which other processes may use, too: scans the directory rather than
    keep an index, and deletes the least recently used files first. Errors are logged once per kind, and are misses.
    After an error of the folder itself it is off: no file is looked up, read or written any more."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path, self.max_bytes = Path(path), max_bytes
        self.is_off = False
        self.num_bytes: int | None = None  # as far as this process knows; `None` before the first scan
        self._told: set[str] = set()
        self._lost: set[str] = set()  # files that cannot be read, nor deleted
        self._num_written = 0  # bytes since the last scan
        self._retry_at = 0.0  # `time.monotonic` before which no file is written

    def has(self, weights: str | None, name: str) -> bool:
        """Whether the file exists; without `weights`, for any weights."""
        if self.is_off or name in self._lost:
            return False
        try:
            if weights is not None:
                return stat.S_ISREG(os.stat(self._file(weights, name)).st_mode)
            # the folders of other weights may be another user's: `isfile` takes an error for a miss
            folders = [self.path / folder for folder in os.listdir(self.path) if folder.startswith(FOLDER)]
            return any(os.path.isfile(folder / f"{name}{SUFFIX}") for folder in folders)
        except (FileNotFoundError, NotADirectoryError, MemoryError):
            return False
        except OSError as error:
            self._turn_off(error)
            return False

    def read(self, weights: str, name: str) -> dict[int, Layers] | None:
        """Returns the blocks in a file; `None` if it cannot be read: from then on `has` returns `False` for it."""
        if self.is_off:
            return None
        path = self._file(weights, name)
        try:
            if not stat.S_ISREG(os.stat(path).st_mode):  # opening a FIFO would wait for a writer
                raise Corrupt("it is no regular file")
            parts, metadata = from_bytes(path.read_bytes())
            if metadata["name"] != f"{weights}/{name}":
                raise Corrupt(f"it is {metadata['name']} by another name")
        except (OSError, MemoryError) as error:
            self._lost.add(name)
            if isinstance(error, OSError) and error.errno not in _OF_ONE_FILE:
                self._turn_off(error)
            elif not isinstance(error, (FileNotFoundError, NotADirectoryError)):  # else it has just been deleted
                self._warn("read", f"{path} cannot be read, its tokens are computed: {_said(error)}")
            return None
        except Corrupt as error:
            self._lost.add(name)
            self._warn("corrupt", f"{path} is dropped, and its tokens are computed: {error}")
            with contextlib.suppress(OSError):
                path.unlink()
                self._lost.discard(name)
            return None
        with contextlib.suppress(OSError, MemoryError):
            os.utime(path)  # for LRU order
        return parts

    def write(self, weights: str, name: str, parts: dict[int, Layers]) -> None:
        if self.is_off or time.monotonic() < self._retry_at:
            return
        path = self._file(weights, name)
        part = path.with_name(f"{name}.{uuid.uuid4().hex}.part")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            content = to_bytes(parts, f"{weights}/{name}")
            if len(content) > self.max_bytes:  # deleting others would not help
                self._warn(
                    "small", f"`disk_bytes` ({self.max_bytes:,}) has no room for a block of {len(content):,} bytes"
                )
                return
            if self.num_bytes is None or self._num_written + len(content) > self.max_bytes // 32:  # others write, too
                self._look()
            assert self.num_bytes is not None
            if self.num_bytes + len(content) > self.max_bytes:
                self._trim(len(content))
            if self.num_bytes + len(content) > self.max_bytes:
                raise OSError(f"`disk_bytes` is {self.max_bytes:,}, and no files can be deleted")
            part.write_bytes(content)
            part.replace(path)  # atomic
            self._lost.discard(name)
            self.num_bytes += len(content)
            self._num_written += len(content)
        except Exception as error:  # no such folder, no permission, no space, no memory
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            self._retry_at = time.monotonic() + RETRY_SECONDS
            full = "; it is full" if getattr(error, "errno", None) == errno.ENOSPC else ""
            self._warn(
                "write",
                f"no prefix blocks are written to {self.path} for {RETRY_SECONDS:.0f} seconds{full}: {_said(error)}. "
                "Then it is tried again: free space there, let this process write there, or give another `disk_path`",
            )

    def _file(self, weights: str, name: str) -> Path:
        return self.path / f"{FOLDER}{weights}" / f"{name}{SUFFIX}"

    def _files(self) -> list[tuple[float, int, Path]]:
        """Returns (last use, bytes, path) of each file, oldest first; deletes partial files of killed processes."""
        found = []
        for path in self.path.glob(f"{FOLDER}*/*"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                is_own = stat.S_ISREG(status.st_mode) and not path.parent.is_symlink()
                if not is_own or not _OWN.fullmatch(f"{path.parent.name}/{path.name}"):
                    continue
                if path.suffix == SUFFIX:
                    found.append((status.st_mtime, status.st_size, path))
                elif status.st_mtime < time.time() - _ABANDONED_SECONDS:
                    path.unlink()
        return sorted(found)

    def _look(self) -> list[tuple[float, int, Path]]:
        files = self._files()
        self.num_bytes, self._num_written = sum(size for _, size, _ in files), 0
        return files

    def _trim(self, needed: int) -> None:
        """Deletes files until `needed` bytes and a tenth of `max_bytes` are free."""
        files = self._look()
        assert self.num_bytes is not None
        for _, size, path in files:
            if self.num_bytes + needed <= 0.9 * self.max_bytes:
                break
            with contextlib.suppress(OSError):
                path.unlink()
                self.num_bytes -= size
        for folder in {path.parent for _, _, path in files}:
            with contextlib.suppress(OSError):
                folder.rmdir()  # fails unless empty

    def _turn_off(self, error: OSError) -> None:
        self.is_off = True
        self._warn(
            "off",
            f"the disk tier of prefix blocks in {self.path} is off, and requests go on without it: {_said(error)}. "
            "Repair the folder, or give another `disk_path`; then make a new engine, or call `hf_paged.free(model)`",
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._told:
            self._told.add(kind)
            logger.warning(message)
