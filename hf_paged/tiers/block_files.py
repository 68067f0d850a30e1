"""Blocks as safetensors files: their format and hash, and a folder of limited size for them.
`store.py` and `saved_prefixes.py` decide which blocks are written, and when."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import math
import os
import re
import stat
import time
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from ..cache.kv_blocks import KVBlocks
from ..config import shown
from ..interrupts import is_interrupt
from ..topics import Topic

logger = logging.getLogger(__name__)

FORMAT = "hf_paged prefix 1"
FOLDER_PREFIX, SUFFIX = "hf_paged-", ".safetensors"
_TIER_FILE = re.compile(
    r"hf_paged-[0-9a-f]{32}/[0-9a-f]{32}-\d+(\.safetensors|\.[0-9a-f]{32}\.part)"
)
"""Only files whose names match are ever deleted from a tier's folder: other folders in it, such as
a model's, may have names that begin with the same prefix."""
MAX_HEADER_BYTES = 100_000_000  # as in safetensors
RETRY_SECONDS = 60.0  # seconds without writes after a failed write
_ABANDONED_SECONDS = 600.0  # from this age on, a partial file counts as left by a killed process
# errors from opening one file that say nothing about the other files of the folder
_ONE_FILE_ERRNOS = {
    *(errno.EACCES, errno.EPERM, errno.EISDIR, errno.ENOTDIR, errno.ENOENT),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
}

Layers = dict[int, KVBlocks]
"""Copies of a group's blocks in host memory, by layer index: the same blocks of every layer."""
ExpectedBlocks = dict[int, tuple[Mapping[int, KVBlocks], int]]
"""What a file must contain, by group: for each layer index, any blocks with the shapes and dtypes
of the file's blocks; and the number of blocks that the file has per layer."""


class CorruptFileError(ValueError):
    """A file is not a block file, is damaged, or does not contain the expected blocks."""


def num_bytes(layers: Layers) -> int:
    """Returns the bytes that all blocks of these layers take."""
    return sum(blocks.num_blocks * blocks.block_bytes for blocks in layers.values())


def to_bytes(layers_by_group: dict[int, Layers], name: str, **extra_metadata: str) -> bytes:
    """Serializes the blocks of some groups, `layers_by_group`, as a safetensors file: one tensor
    `{group}.{layer}.{part}` of shape `(num_blocks, ...)` for each tensor of `KVBlocks.data`, and
    metadata with a hash of all tensors and the other metadata."""
    tensors = {}
    layer_arguments = {}
    for group, layers in layers_by_group.items():
        for index, blocks in layers.items():
            layer_arguments[f"{group}.{index}"] = json_arguments(blocks)
            for part, tensor in enumerate(blocks.data):
                tensors[f"{group}.{index}.{part}"] = tensor.contiguous()
    metadata = {
        "format": FORMAT,
        "name": name,
        "layers": json.dumps(layer_arguments),
        **extra_metadata,
    }
    with_hash = metadata | {"hash": _hash(tensors, metadata)}
    return safetensors.torch.save(tensors, with_hash)


def _metadata(header: bytes) -> dict[str, str]:
    with parsing():
        metadata: dict[str, str] = json.loads(header)["__metadata__"]
        if metadata["format"] != FORMAT:
            raise CorruptFileError(f"its format is {shown(metadata['format'])}, not {FORMAT!r}")
        if not {"name", "layers", "hash"} <= metadata.keys():
            raise CorruptFileError("its metadata lacks a name, layers or a hash")
        return metadata


@contextlib.contextmanager
def parsing() -> Iterator[None]:
    """Raises [`CorruptFileError`] in place of any error except `MemoryError` and interrupts:
    untrusted bytes may make parsers raise anything."""
    try:
        yield
    except (CorruptFileError, MemoryError):
        raise
    except Exception as error:
        if is_interrupt(error):
            raise
        raise CorruptFileError(f"it cannot be read: {type(error).__name__}: {error}") from error


class BlockFile:
    """An open file of blocks. Its content is not trusted: the data after the header is read only if
    the file has the size of the expected blocks."""

    def __init__(self, path: Path) -> None:
        """Raises `OSError` if the file cannot be opened or read, and [`CorruptFileError`] if it is
        not a regular file with a header of our format."""
        self._file = io.open(path, "rb", opener=_open_regular)  # noqa: UP020
        try:
            self._num_bytes = os.fstat(self._file.fileno()).st_size
            length = int.from_bytes(self._file.read(8), "little")
            if length > min(self._num_bytes, MAX_HEADER_BYTES):
                raise CorruptFileError(f"its header would have {length:,} bytes")
            self.metadata = _metadata(self._file.read(length))
            self._header_bytes = 8 + length
        except BaseException:
            self.close()
            raise

    def read(self, expected: ExpectedBlocks) -> dict[int, Layers]:
        """Returns the blocks, on the CPU, by group. Raises [`CorruptFileError`] unless they match
        `expected` and the file's hash, and `OSError` if the file cannot be read."""
        expected_bytes = self._header_bytes
        layer_arguments = {}
        expected_tensors = {}
        for group, (layers, count) in expected.items():
            for index, blocks in layers.items():
                layer_arguments[f"{group}.{index}"] = json_arguments(blocks)
                for part, tensor in enumerate(blocks.data):
                    shape = (count, *tensor.shape[1:])
                    expected_tensors[f"{group}.{index}.{part}"] = (tensor.dtype, shape)
                    expected_bytes += math.prod(shape) * tensor.itemsize
        if expected_bytes != self._num_bytes:
            raise CorruptFileError(
                f"it has {self._num_bytes:,} bytes, but these blocks of this model take"
                f" {expected_bytes:,}"
            )
        self._file.seek(0)
        content = self._file.read(expected_bytes)
        with parsing():
            tensors = safetensors.torch.load(content)
            metadata = dict(self.metadata)
            if metadata.pop("hash") != _hash(tensors, metadata):
                raise CorruptFileError("its content does not match its hash")
            file_tensors = {
                name: (tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()
            }
            if (
                file_tensors != expected_tensors
                or json.loads(metadata["layers"]) != layer_arguments
            ):
                raise CorruptFileError("its blocks do not match this model's layers")
        layers_by_group: dict[int, Layers] = {}
        for group, (layers, _) in expected.items():
            layers_by_group[group] = {}
            for index, blocks in layers.items():
                part_indices = range(len(blocks.data))
                data = [tensors[f"{group}.{index}.{part}"] for part in part_indices]
                layers_by_group[group][index] = blocks.like(data)
        return layers_by_group

    def close(self) -> None:
        self._file.close()


def _open_regular(path: str, flags: int) -> int:
    """Opens a file without blocking, even if it is a FIFO. Raises [`CorruptFileError`] unless it is
    a regular file."""
    nonblock = getattr(os, "O_NONBLOCK", 0)
    descriptor = os.open(path, flags | nonblock)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise CorruptFileError("it is not a regular file")
    return descriptor


def write_private(path: Path, content: bytes) -> None:
    """Writes a file that only its owner can read and write, whatever the umask. Replaces an
    existing file atomically."""
    partial_path = path.with_name(f"{path.stem}.{uuid.uuid4().hex}.part")
    try:
        partial_path.touch(0o600, exist_ok=False)
        partial_path.chmod(0o600)  # the umask may have removed the owner's rights
        partial_path.write_bytes(content)
        partial_path.replace(path)
    finally:
        with contextlib.suppress(OSError):
            partial_path.unlink()


def _write_in_new_folder(path: Path, content: bytes) -> None:
    """Creates the folder of a file if it is missing, then calls `write_private`."""
    _make_private(path.parent)
    try:
        write_private(path, content)
    except FileNotFoundError:  # another process has just deleted the folder, which was empty
        _make_private(path.parent)
        write_private(path, content)


def _make_private(folder: Path) -> None:
    """Creates a folder and its missing parents, so that only their owner can access them. Existing
    folders keep their modes."""
    if os.path.isdir(folder):
        return
    parents = reversed(folder.parents)
    for path in (*parents, folder):
        if not os.path.isdir(path):
            with contextlib.suppress(FileExistsError):  # another process has just created it
                path.mkdir(0o700)
                path.chmod(0o700)  # the umask may have removed the owner's rights


def json_arguments(blocks: KVBlocks) -> list[Any]:
    """Returns `KVBlocks.view_arguments` as JSON values."""
    heads, key_dim, dtypes, code_format = blocks.view_arguments
    code_values = None
    if code_format is not None:
        block_size, codes_dtype = code_format
        code_values = [block_size, _dtype_name(codes_dtype)]
    return [heads, key_dim, list(map(_dtype_name, dtypes)), code_values]


def _dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _is_regular(path: Path) -> bool:
    """Whether the path is a regular file, not a symbolic link: this package never writes links.
    Raises `OSError` if there is no such path."""
    status = os.stat(path, follow_symlinks=False)
    return stat.S_ISREG(status.st_mode)


def _version(path: Path) -> tuple[int, ...]:
    """Returns numbers that change when the file at the path is written again. Raises `OSError`."""
    status = os.stat(path, follow_symlinks=False)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _describe(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"


def _hash(tensors: dict[str, Tensor], metadata: dict[str, str]) -> str:
    """Returns the hash of tensors and metadata, in hexadecimal."""
    text = repr(sorted(metadata.items()))
    digest = hashlib.blake2b(text.encode(), digest_size=16)
    for name, tensor in sorted(tensors.items()):
        description = f"{name} {tensor.dtype} {tuple(tensor.shape)}"
        digest.update(description.encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def check_folder(path: str) -> None:
    """Creates a tier's folder if it is missing. Raises `OSError` if it cannot be created, listed or
    entered."""
    try:
        _make_private(Path(path))
        with os.scandir(path):
            os.stat(os.path.join(path, os.curdir))
    except OSError as error:
        if is_interrupt(error):
            raise
        if error.errno is not None:
            reason = os.strerror(error.errno)
        else:
            reason = str(error)
        message = (
            f"this process cannot use the folder `disk_path` of `prefix_tiers`: {reason}."
            " Set another path, or let this process create, list and enter the folder"
        )
        raise OSError(error.errno, message, path) from error


class DiskFolder:
    """A folder of files of at most `max_bytes` in total. Other processes may use the same folder,
    so this class scans it instead of keeping an index. Deletes the least recently used files first.
    Logs each kind of error once, and treats files that cannot be read as missing. If the folder
    itself fails, sets `is_off`: from then on, no file is looked up, read or written."""

    def __init__(self, path: str, max_bytes: int) -> None:
        self.path = Path(path)
        self.max_bytes = max_bytes
        self.is_off = False
        self.num_bytes = 0  # of all complete files, as far as this process knows
        self._warned_kinds: set[str] = set()  # kinds of errors that were already logged
        # files that could not be read, with their `_version` at that time
        self._unreadable: dict[Path, tuple[int, ...]] = {}
        # bytes written by this process since the last scan; infinity before the first scan
        self._num_bytes_written: float = math.inf
        self._retry_at = 0.0  # `time.monotonic` before which no file is written

    def has(self, weights_hash: str | None, name: str) -> bool:
        """Whether a block's file exists and has not proved unreadable. `weights_hash=None`: for any
        weights."""
        if self.is_off:
            return False
        try:
            if weights_hash is not None:
                path = self._file_path(weights_hash, name)
                return _is_regular(path) and not self._is_unreadable(path)
            # `isfile` treats errors as misses: folders of other weights may be another user's
            entries = os.listdir(self.path)
            folders = [self.path / entry for entry in entries if entry.startswith(FOLDER_PREFIX)]
            paths = (folder / f"{name}{SUFFIX}" for folder in folders)
            return any(os.path.isfile(path) and not self._is_unreadable(path) for path in paths)
        except (FileNotFoundError, NotADirectoryError, MemoryError):
            return False
        except OSError as error:
            if is_interrupt(error):
                raise
            self._turn_off(error)
            return False

    def read(
        self,
        weights_hash: str,
        name: str,
        layers: Mapping[int, KVBlocks],
    ) -> Layers | None:
        """Returns the content of a block's file, as blocks like `layers`. Returns `None` if the
        file cannot be read or has other content. Deletes a file with other content. After a
        failure, `has` returns `False` until the file is written again."""
        if self.is_off:
            return None
        path = self._file_path(weights_hash, name)
        version: tuple[int, ...] = ()
        try:
            version = _version(path)
            if not _is_regular(path):
                raise CorruptFileError("it is not a regular file")
            with contextlib.closing(BlockFile(path)) as file:
                written_name = file.metadata["name"]
                if written_name != f"{weights_hash}/{name}":
                    raise CorruptFileError(f"it is a renamed copy of {shown(written_name)}")
                layers_by_group = file.read({0: (layers, 1)})
        except (OSError, MemoryError) as error:
            if is_interrupt(error):
                raise
            if version:  # otherwise there may be no file, which `has` notices without this entry
                self._unreadable[path] = version
            if isinstance(error, OSError) and error.errno not in _ONE_FILE_ERRNOS:
                self._turn_off(error)
            elif not isinstance(error, (FileNotFoundError, NotADirectoryError)):
                # a missing file is no error: another process has deleted it
                self._warn(
                    "read", f"{path} cannot be read, so its tokens are computed: {_describe(error)}"
                )
            return None
        except CorruptFileError as error:
            self._unreadable[path] = version
            self._warn("corrupt", f"{path} is dropped, so its tokens are computed: {error}")
            with contextlib.suppress(OSError):
                path.unlink()
                self._unreadable.pop(path, None)
            return None
        with contextlib.suppress(OSError, MemoryError):
            os.utime(path)  # for LRU order
        return layers_by_group[0]

    def write(self, weights_hash: str, name: str, layers: Layers) -> None:
        """Writes a block to its file, and deletes other files if space is needed. Logs errors
        instead of raising them; after an error, writes nothing for `RETRY_SECONDS`."""
        if self.is_off or time.monotonic() < self._retry_at:
            return
        path = self._file_path(weights_hash, name)
        try:
            content = to_bytes({0: layers}, f"{weights_hash}/{name}")
            if len(content) > self.max_bytes:  # deleting other files does not help
                self._warn(
                    "small",
                    f"a block of {len(content):,} bytes does not fit in `disk_bytes`"
                    f" ({self.max_bytes:,}): raise it",
                )
                return
            # often enough to notice the writes of other processes
            if self._num_bytes_written + len(content) > self.max_bytes // 32:
                self._scan()
            if self.num_bytes + len(content) > self.max_bytes:
                self._trim(len(content))
            if self.num_bytes + len(content) > self.max_bytes:
                raise OSError(
                    f"`disk_bytes` ({self.max_bytes:,}) is used up, and no file can be deleted"
                )
            _write_in_new_folder(path, content)
            self._unreadable.pop(path, None)
            self.num_bytes += len(content)
            self._num_bytes_written += len(content)
        except Exception as error:  # no such folder, no permission, no space, no memory
            if is_interrupt(error):
                raise
            is_full = getattr(error, "errno", None) == errno.ENOSPC
            full_note = "; it is full" if is_full else ""
            self._retry_at = time.monotonic() + RETRY_SECONDS
            self._warn(
                "write",
                f"no prefix blocks are written to {self.path} for {RETRY_SECONDS:.0f}"
                f" seconds{full_note}: {_describe(error)}. Before the next attempt, free space"
                " there, let this process write there, or set another `disk_path`",
            )

    def _is_unreadable(self, path: Path) -> bool:
        """Whether this file could not be read, and has not been written again since."""
        if path not in self._unreadable:
            return False
        try:
            return _version(path) == self._unreadable[path]
        except OSError:
            return True

    def _file_path(self, weights_hash: str, name: str) -> Path:
        return self.path / f"{FOLDER_PREFIX}{weights_hash}" / f"{name}{SUFFIX}"

    def _scan(self) -> list[tuple[float, int, Path]]:
        """Updates `num_bytes` from all complete files, and deletes partial files of killed
        processes. Returns `(last use, bytes, path)` of each complete file, least recently used
        first; the last use is in seconds since the epoch."""
        files = []
        for path in self.path.glob(f"{FOLDER_PREFIX}*/*"):
            with contextlib.suppress(OSError):
                status = path.lstat()
                is_regular = stat.S_ISREG(status.st_mode)
                if not is_regular or path.parent.is_symlink():
                    continue
                if not _TIER_FILE.fullmatch(f"{path.parent.name}/{path.name}"):
                    continue
                if path.suffix == SUFFIX:
                    files.append((status.st_mtime, status.st_size, path))
                elif status.st_mtime < time.time() - _ABANDONED_SECONDS:
                    path.unlink()
        self.num_bytes = sum(size for _, size, _ in files)
        self._num_bytes_written = 0
        return sorted(files)

    def _trim(self, needed_bytes: int) -> None:
        """Deletes the least recently used files until `needed_bytes` and a tenth of `max_bytes` are
        free, and folders that become empty."""
        files = self._scan()
        for _, size, path in files:
            if self.num_bytes + needed_bytes <= 0.9 * self.max_bytes:
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
            f"the disk tier of prefix blocks in {self.path} is off, and requests continue without"
            f" it: {_describe(error)}. Repair the folder or set another `disk_path`; then create a"
            " new engine, or call `hf_paged.free(model)`",
        )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned_kinds:
            self._warned_kinds.add(kind)
            logger.warning(Topic.PREFIX_TIERS(message))
