"""Files of prefix blocks: what was written is read back, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import io
import logging
import os
import random
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.tiers.block_files import (
    BlockFile,
    CorruptFileError,
    DiskFolder,
    check_folder,
    to_bytes,
)
from tests.cache.test_swap import LAYOUTS, SIZE, states
from tests.support.missing import forbidden

WEIGHTS, NAME = "0" * 32, "1" * 32 + "-0"


def layers(num_blocks: int = 1, seed: int = 0, size: int = SIZE) -> dict[int, KVBlocks]:
    """One layer of each layout, with random content."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for index, layout in enumerate(LAYOUTS):
        blocks = KVBlocks.allocate(num_blocks, size, *states(layout))
        for tensor in blocks.data:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
        found[index] = blocks
    return found


LIKE = layers()  # what files are read for


def assert_same(found: dict[int, KVBlocks], expected: dict[int, KVBlocks]) -> None:
    assert found.keys() == expected.keys()
    for index, blocks in expected.items():
        (keys, values), (found_keys, found_values) = blocks.pair, found[index].pair
        for (x, dtype), (y, found_dtype) in ((keys, found_keys), (values, found_values)):
            assert torch.equal(x, y) and (x.dtype, dtype) == (y.dtype, found_dtype)


def files(path: Path) -> list[Path]:
    return sorted(each for each in path.rglob("*") if each.is_file())


OPERATIONS = (
    "stat",
    "listdir",
    "scandir",
    "open",
    "read",
    "write",
    "utime",
    "replace",
    "unlink",
    "mkdir",
    "rmdir",
)
ERRORS = ("EIO", "EACCES", "ENOSPC", "ENOENT", "MemoryError")


class FailingFile(io.FileIO):
    """A file whose `read` or `write` fails, after half of the content if it writes."""

    def __init__(self, path: Any, mode: str, operation: str, error: Exception) -> None:
        super().__init__(path, mode.replace("b", ""))
        self.operation, self.error = operation, error

    def read(self, size: int | None = -1) -> Any:
        if self.operation == "read":
            raise self.error
        return super().read(size)

    def write(self, content: Any) -> int:
        if self.operation == "write":
            super().write(bytes(content)[: len(content) // 2])
            raise self.error
        return super().write(content)


def fail_operation(
    patch: pytest.MonkeyPatch, folder: Path, operation: str, name: str
) -> Callable[[], int]:
    """Makes an operation on paths in the folder fail with the error of this name; returns how often
    it has failed."""
    error: Exception = MemoryError()
    if name != "MemoryError":
        error = OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    failed: list[str] = []

    def is_inside(path: Any) -> bool:
        return isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(folder))

    def failing(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any = ".", *args: Any, **kwargs: Any) -> Any:
            if not is_inside(path):
                return function(path, *args, **kwargs)
            failed.append(operation)
            if operation in ("read", "write"):
                return FailingFile(
                    path, args[0] if args else kwargs.get("mode", "r"), operation, error
                )
            raise error

        return call

    module, attribute = (io, "open") if operation in ("open", "read", "write") else (os, operation)
    patch.setattr(module, attribute, failing(getattr(module, attribute)))
    return lambda: len(failed)


def replace_by_file(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.write_text("a file")


def replace_by_loop(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path)


def test_what_is_written_is_read(tmp_path: Path) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 30)
    folder.write(WEIGHTS, NAME, layers())
    assert folder.has(WEIGHTS, NAME) and folder.has(None, NAME) and not folder.has("2" * 32, NAME)
    found = folder.read(WEIGHTS, NAME, LIKE)
    assert found is not None
    assert_same(found, layers())
    (path,) = files(tmp_path)
    with safetensors.safe_open(path, "pt") as file:  # others can read it
        assert file.metadata()["name"] == f"{WEIGHTS}/{NAME}" and "0.0.0" in file.keys()
    assert folder.num_bytes == path.stat().st_size


def test_any_other_byte_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "file"
    content, draw = to_bytes({0: layers(3)}, NAME), random.Random(0)

    def read(changed: bytes) -> tuple[dict[int, KVBlocks], str]:
        path.write_bytes(changed)
        with contextlib.closing(BlockFile(path)) as file:
            return file.read({0: (LIKE, 3)})[0], file.metadata["name"]

    header = 8 + int.from_bytes(content[:8], "little")
    places = [
        *range(8),
        *draw.sample(range(8, header), 300),
        *draw.sample(range(header, len(content)), 100),
    ]
    for place in places:
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        try:
            found, name = read(bytes(changed))
        except CorruptFileError:
            continue
        assert_same(found, layers(3))  # as after padding behind the header
        assert name == NAME
    for length in [0, 7, 8, 100, header - 1, header, header + 1, len(content) - 1]:
        with pytest.raises(CorruptFileError):
            read(content[:length])
    with pytest.raises(CorruptFileError):
        read(content + b"\0")


def test_a_file_by_another_name_is_not_served(tmp_path: Path, caplog: Any) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 30)
    folder.write(WEIGHTS, NAME, layers())
    (path,) = files(tmp_path)
    path.rename(path.with_name(f"{'2' * 32}-0.safetensors"))
    with caplog.at_level(logging.WARNING):
        assert folder.read(WEIGHTS, "2" * 32 + "-0", LIKE) is None
    assert "it is a renamed copy" in caplog.text and not files(tmp_path)


def test_a_corrupt_file_goes_and_can_be_written_again(tmp_path: Path, caplog: Any) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 30)
    folder.write(WEIGHTS, NAME, layers())
    (path,) = files(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    with caplog.at_level(logging.WARNING):
        assert folder.read(WEIGHTS, NAME, LIKE) is None
    assert str(path) in caplog.text and not folder.has(WEIGHTS, NAME) and not files(tmp_path)
    folder.write(WEIGHTS, NAME, layers())
    assert folder.read(WEIGHTS, NAME, LIKE) is not None


def test_a_file_that_another_process_writes_anew_is_read(tmp_path: Path, monkeypatch: Any) -> None:
    ours, theirs = (DiskFolder(str(tmp_path), 1 << 30) for _ in range(2))
    theirs.write(WEIGHTS, NAME, layers())
    with monkeypatch.context() as patch:
        fail_operation(patch, tmp_path, "open", "EACCES")
        assert ours.read(WEIGHTS, NAME, LIKE) is None
    assert not ours.has(WEIGHTS, NAME) and not ours.has(None, NAME)
    theirs.write(WEIGHTS, NAME, layers())
    assert ours.has(WEIGHTS, NAME) and ours.has(None, NAME)
    assert ours.read(WEIGHTS, NAME, LIKE) is not None


def test_a_file_is_not_blamed_for_one_of_other_weights(tmp_path: Path, monkeypatch: Any) -> None:
    folder, others = DiskFolder(str(tmp_path), 1 << 30), "3" * 32
    for weights in (WEIGHTS, others):
        folder.write(weights, NAME, layers())
    with monkeypatch.context() as patch:
        fail_operation(patch, tmp_path, "open", "EACCES")
        assert folder.read(WEIGHTS, NAME, LIKE) is None
    assert not folder.has(WEIGHTS, NAME)
    assert folder.has(others, NAME) and folder.has(None, NAME)
    assert folder.read(others, NAME, LIKE) is not None


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
def test_a_fifo_in_the_place_of_a_file_is_not_waited_for(tmp_path: Path, caplog: Any) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 30)
    others = "3" * 32
    folder.write(others, NAME, layers())
    (tmp_path / f"hf_paged-{WEIGHTS}").mkdir()
    os.mkfifo(tmp_path / f"hf_paged-{WEIGHTS}" / f"{NAME}.safetensors")
    assert folder.has(None, NAME) and not folder.has(WEIGHTS, NAME)
    found: list[Any] = []
    reader = threading.Thread(
        target=lambda: found.append(folder.read(WEIGHTS, NAME, LIKE)), daemon=True
    )
    with caplog.at_level(logging.WARNING):
        reader.start()
        reader.join(30)
    assert (
        found == [None]
        and "is dropped" in caplog.text
        and folder.read(others, NAME, LIKE) is not None
    )


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    size = len(to_bytes({0: layers()}, f"{WEIGHTS}/{NAME}"))
    folder = DiskFolder(str(tmp_path), 10 * size)
    names = [f"{number:032x}-0" for number in range(12)]
    (tmp_path / "mine.txt").write_text("a user's own")
    for number, name in enumerate(names):
        folder.write(WEIGHTS, name, layers())
        path = tmp_path / f"hf_paged-{WEIGHTS}" / f"{name}.safetensors"
        if path.exists():
            os.utime(path, (1000 + number, 1000 + number))
        if number == 5:
            assert (
                folder.read(WEIGHTS, names[0], LIKE) is not None
            )  # now used later than the others
    held = [path for path in files(tmp_path) if path.suffix == ".safetensors"]
    assert 5 <= len(held) <= 10 and sum(path.stat().st_size for path in held) <= 10 * size
    assert (
        folder.has(WEIGHTS, names[0])
        and folder.has(WEIGHTS, names[11])
        and not folder.has(WEIGHTS, names[1])
    )
    assert (tmp_path / "mine.txt").exists()


def test_another_process_that_writes_counts(tmp_path: Path) -> None:
    size = len(to_bytes({0: layers()}, f"{WEIGHTS}/{NAME}"))
    ours, theirs = (DiskFolder(str(tmp_path), 20 * size) for _ in range(2))
    for number in range(60):
        (ours, theirs)[number % 2].write(WEIGHTS, f"{number:032x}-0", layers())
        assert sum(path.stat().st_size for path in files(tmp_path)) <= 20 * size


def test_a_block_that_is_larger_than_the_tier(tmp_path: Path, caplog: Any) -> None:
    folder = DiskFolder(str(tmp_path), 100)
    with caplog.at_level(logging.WARNING):
        folder.write(WEIGHTS, NAME, layers())
    assert not files(tmp_path) and "does not fit in `disk_bytes` (100)" in caplog.text


def test_only_files_of_blocks_are_deleted(tmp_path: Path) -> None:
    """No model in a folder with a similar name, nor behind a link; and not all files, for a file
    that never fits."""
    size = len(to_bytes({0: layers()}, f"{WEIGHTS}/{NAME}"))
    folder, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    kept = [
        folder / "hf_paged-tiny" / "model.safetensors",
        folder / f"hf_paged-{WEIGHTS}" / "model.safetensors",
    ]
    kept += [elsewhere / f"{NAME}.safetensors", folder / "hf_paged-tiny" / "download.part"]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10 * size))
        os.utime(path, (0, 0))
    (folder / f"hf_paged-{'2' * 32}").symlink_to(elsewhere)
    (folder / f"hf_paged-{WEIGHTS}" / f"{'3' * 32}-0.safetensors").symlink_to(kept[0])
    tier = DiskFolder(str(folder), 3 * size)
    for number in range(6):
        tier.write(WEIGHTS, f"{number:032x}-0", layers())
    assert all(path.stat().st_size == 10 * size for path in kept)
    before = files(folder)
    assert sum(path.stat().st_size == size for path in before) == 2
    DiskFolder(str(folder), size // 2).write(WEIGHTS, NAME, layers())
    assert files(folder) == before


def test_a_file_for_which_there_is_no_memory_stays(tmp_path: Path, monkeypatch: Any) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 30)
    folder.write(WEIGHTS, NAME, layers())

    def fail(content: bytes) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(safetensors.torch, "load", fail)
        assert folder.read(WEIGHTS, NAME, LIKE) is None
    assert (
        len(files(tmp_path)) == 1
        and DiskFolder(str(tmp_path), 1 << 30).read(WEIGHTS, NAME, LIKE) is not None
    )


def test_a_full_disk_is_told_once_and_tried_again(
    tmp_path: Path, caplog: Any, monkeypatch: Any
) -> None:
    folder, write = DiskFolder(str(tmp_path), 1 << 30), Path.write_bytes

    def half(path: Path, content: bytes) -> int:
        write(path, content[: len(content) // 2])
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", half)
    with caplog.at_level(logging.WARNING):
        for number in range(3):
            folder.write(WEIGHTS, f"{number:032x}-0", layers())
    assert not files(tmp_path)
    assert len(caplog.records) == 1 and "it is full" in caplog.text and str(tmp_path) in caplog.text
    monkeypatch.undo()
    folder.write(WEIGHTS, NAME, layers())
    assert not folder.has(WEIGHTS, NAME), "it waits"
    folder._retry_at = 0.0
    folder.write(WEIGHTS, NAME, layers())
    assert folder.has(WEIGHTS, NAME)


def test_a_folder_that_cannot_be_made(tmp_path: Path, caplog: Any) -> None:
    (tmp_path / "file").write_text("")
    folder = DiskFolder(str(tmp_path / "file" / "folder"), 1 << 30)
    assert not folder.has(WEIGHTS, NAME) and not folder.has(None, NAME)
    with caplog.at_level(logging.WARNING):
        folder.write(WEIGHTS, NAME, layers())
        assert folder.read(WEIGHTS, NAME, LIKE) is None
    assert "no prefix blocks are written" in caplog.text


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_file_operation_raises(
    operation: str, name: str, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 30)
    folder.write(WEIGHTS, NAME, layers())
    other = "2" * 32 + "-0"
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        fail_operation(patch, tmp_path, operation, name)
        for _ in range(3):
            folder.has(WEIGHTS, NAME)
            folder.has(None, other)
            read = folder.read(WEIGHTS, NAME, LIKE)
            assert read is not None or not folder.has(WEIGHTS, NAME), (
                "it would be looked up for ever"
            )
            folder.write(WEIGHTS, other, layers())
    assert len(caplog.records) <= 2, (
        "one warning that it cannot be read, one that it cannot be written"
    )
    assert all(str(tmp_path) in record.getMessage() for record in caplog.records)
    assert not [path for path in files(tmp_path) if path.suffix == ".part"] or operation == "unlink"
    folder._retry_at = 0.0
    folder.write(WEIGHTS, other, layers())
    assert folder.is_off or folder.has(WEIGHTS, other)
    again = DiskFolder(str(tmp_path), 1 << 30).read(WEIGHTS, NAME, LIKE)
    assert again is not None, "an error of the system must not delete a file"
    assert_same(again, layers())


@pytest.mark.parametrize("operation", ["stat", "read", "listdir"])
@pytest.mark.parametrize("name", ["EIO", "ESTALE"])
def test_a_folder_that_fails_is_off_from_then_on(
    operation: str, name: str, tmp_path: Path, caplog: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = DiskFolder(str(tmp_path), 1 << 30)
    folder.write(WEIGHTS, NAME, layers())
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        num_failed = fail_operation(patch, tmp_path, operation, name)
        for _ in range(3):
            assert (
                not folder.has(None if operation == "listdir" else WEIGHTS, NAME)
                or operation == "read"
            )
            assert folder.read(WEIGHTS, NAME, LIKE) is None
            folder.write(WEIGHTS, NAME, layers())
        assert num_failed() == 1
    (record,) = caplog.records
    message = record.getMessage()
    assert (
        str(tmp_path) in message
        and os.strerror(getattr(errno, name)) in message
        and "create a new engine" in message
    )
    assert not folder.has(WEIGHTS, NAME) and folder.read(WEIGHTS, NAME, LIKE) is None
    assert DiskFolder(str(tmp_path), 1 << 30).has(WEIGHTS, NAME)


def test_a_folder_of_another_user_is_off(tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "tier"
    folder, other = (DiskFolder(str(path), 1 << 30) for _ in range(2))
    folder.write(WEIGHTS, NAME, layers())
    with forbidden(path), caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not folder.has(WEIGHTS, NAME) and folder.read(WEIGHTS, NAME, LIKE) is None
            assert not other.has(None, NAME)
            folder.write(WEIGHTS, NAME, layers())
    assert [record.getMessage().count("Permission denied") for record in caplog.records] == [1, 1]


def test_folders_of_other_weights_may_be_another_users(tmp_path: Path, caplog: Any) -> None:
    tmp_path.chmod(0o755)
    theirs = tmp_path / f"hf_paged-{'2' * 32}"
    DiskFolder(str(tmp_path), 1 << 30).write("2" * 32, NAME, layers())
    folder = DiskFolder(str(tmp_path), 1 << 30)
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        for parent in tmp_path.parents:
            if not parent.stat().st_mode & 0o001:  # pytest's folders are closed to others
                stack.callback(parent.chmod, parent.stat().st_mode)
                parent.chmod(0o755)
        stack.enter_context(forbidden(theirs))
        assert not folder.has(None, NAME) and not folder.has(WEIGHTS, NAME)
    assert not folder.is_off and not caplog.records


@pytest.mark.parametrize("change", [replace_by_file, replace_by_loop, shutil.rmtree])
def test_a_folder_that_is_gone(change: Any, tmp_path: Path, caplog: Any) -> None:
    path = tmp_path / "tier"
    folder = DiskFolder(str(path), 1 << 30)
    folder.write(WEIGHTS, NAME, layers())
    change(path)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            assert not folder.has(WEIGHTS, NAME) and not folder.has(None, NAME)
            assert folder.read(WEIGHTS, NAME, LIKE) is None
        folder.write(WEIGHTS, NAME, layers())
    assert len(caplog.records) == (path.is_file() or path.is_symlink())
    assert folder.has(WEIGHTS, NAME) == path.is_dir()  # made again if only removed


def test_a_file_that_exceeds_a_limit_of_the_process(tmp_path: Path, caplog: Any) -> None:
    """The system itself refuses to write a whole file."""
    folder, limits = DiskFolder(str(tmp_path), 1 << 30), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        folder.write(WEIGHTS, NAME, layers())
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert not files(tmp_path) and not folder.has(WEIGHTS, NAME)
    assert "File too large" in caplog.text and "disk_path" in caplog.text


@pytest.mark.parametrize("kind", ["file", "below a file", "loop", "forbidden", "below forbidden"])
def test_a_folder_that_cannot_be_used_is_named(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "tier"
    if kind == "loop":
        path.symlink_to(path)
    elif "forbidden" in kind:
        path.mkdir()
    else:
        path.write_text("a file")
    path = path / "folder" if "below" in kind else path
    with contextlib.ExitStack() as stack:
        if "forbidden" in kind:
            stack.enter_context(forbidden(tmp_path / "tier"))
        with pytest.raises(
            OSError, match=r"`disk_path` of `prefix_tiers`.*Set another path"
        ) as raised:
            check_folder(str(path))
    assert raised.value.filename == str(path) and raised.value.errno is not None


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
def test_a_process_that_is_killed_while_it_writes(tmp_path: Path) -> None:
    """Files are whole or absent, and partial ones are deleted in time."""
    draw = random.Random(0)
    for turn in range(5):
        child = os.fork()
        if not child:
            try:
                folder = DiskFolder(str(tmp_path), 1 << 30)
                for number in range(1 << 30):
                    folder.write(
                        WEIGHTS,
                        f"{number % 50:032x}-0",
                        layers(seed=number % 50, size=64 * SIZE),
                    )
            finally:
                os._exit(1)
        time.sleep(0.05 + 0.1 * draw.random())
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        folder = DiskFolder(str(tmp_path), 1 << 30)
        for path in files(tmp_path):
            if path.suffix == ".safetensors":
                with contextlib.closing(BlockFile(path)) as file:
                    file.read({0: (layers(size=64 * SIZE), 1)})
        for number in range(50):
            name = f"{number:032x}-0"
            found = folder.read(WEIGHTS, name, layers(size=64 * SIZE))
            if found is not None:
                assert_same(found, layers(seed=number, size=64 * SIZE))
            else:
                assert not folder.has(WEIGHTS, name), f"turn {turn}: a file that is not whole"
    assert any(path.suffix == ".safetensors" for path in files(tmp_path))
    part = tmp_path / f"hf_paged-{WEIGHTS}" / f"{NAME}.{0:032x}.part"
    part.write_bytes(b"")
    os.utime(part, (0, 0))
    DiskFolder(str(tmp_path), 1 << 30).write(WEIGHTS, NAME, layers())
    assert not part.exists()


def test_hashes_tell_tokens_namespaces_and_their_order() -> None:
    from hf_paged.cache.prefix_index import _next_digest, namespace_digest

    found = set()
    for namespace in (
        None,
        (None, None),
        (None, "None"),
        ("a", None),
        (None, "a"),
        (None, "a", False),
    ):
        first = namespace_digest(namespace)
        one, other = _next_digest(first, (1, 2)), _next_digest(first, (2, 1))
        found |= {first, one, other, _next_digest(one, (2, 1)), _next_digest(other, (1, 2))}
    assert len(found) == 30
    assert _next_digest(namespace_digest(None), (object(),)) == b""
