"""Files of prefix blocks: what was written is read back, and nothing else."""

from __future__ import annotations

import contextlib
import errno
import functools
import io
import logging
import os
import random
import shutil

import pytest
import safetensors.torch
import torch

from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.prefix_index import _next_digest, namespace_digest
from hf_paged.tiers import block_files
from hf_paged.tiers.block_files import (
    BlockFile,
    CorruptFileError,
    DiskFolder,
    check_folder,
    to_bytes,
)
from tests.cache.test_swap import LAYOUTS, SIZE, states
from tests.support.checks import in_threads
from tests.support.missing import forbidden
from tests.test_interrupts import TimedOut, alarmed

WEIGHTS, OTHERS, NAME, OTHER = "0" * 32, "3" * 32, "1" * 32 + "-0", "2" * 32 + "-0"


def layers(seed=0, size=SIZE):
    """A block of one layer of each layout, with random content."""
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for index, layout in enumerate(LAYOUTS):
        found[index] = KVBlocks.allocate(1, size, *states(layout))
        for tensor in found[index].data:
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return found


LIKE = layers()  # what files are read for
NUM_BYTES = len(to_bytes({0: LIKE}, f"{WEIGHTS}/{NAME}"))


def assert_same(found, expected):
    assert found is not None and found.keys() == expected.keys()
    for index, blocks in expected.items():
        for (x, dtype), (y, found_dtype) in zip(blocks.pair, found[index].pair):
            assert torch.equal(x, y) and (x.dtype, dtype) == (y.dtype, found_dtype)


def files(path):
    return sorted(each for each in path.rglob("*") if each.is_file())


def opened(path, max_bytes=1 << 30):
    return DiskFolder(str(path), max_bytes)


@pytest.fixture
def folder(tmp_path):
    """A folder of one file."""
    folder = opened(tmp_path)
    folder.write(WEIGHTS, NAME, layers())
    return folder


OPERATIONS = ("stat", "listdir", "scandir", "open", "read", "write", "utime")
OPERATIONS += ("replace", "unlink", "mkdir", "rmdir")
ERRORS = ("EIO", "ESTALE", "EACCES", "ENOSPC", "ENOENT", "MemoryError")


class FailingFile(io.FileIO):
    """A file whose `read` or `write` fails, after half of the content if it writes."""

    def read(self, size=-1):
        raise self.error

    def write(self, content):
        super().write(bytes(content)[: len(content) // 2])
        raise self.error


def fail_operation(patch, folder, operation, name):
    """Makes an operation on paths in the folder fail with the error of this name; returns the list
    of these paths."""
    error = MemoryError()
    if name != "MemoryError":
        error = OSError(getattr(errno, name), os.strerror(getattr(errno, name)))
    modes, failed = {"read": "rb", "write": "wb"}, []
    module, attribute = (io, "open") if operation in ("open", *modes) else (os, operation)
    function = getattr(module, attribute)

    def call(path=".", *args, **kwargs):
        mode = args[0] if args else kwargs.get("mode", "r")
        is_inside = isinstance(path, (str, os.PathLike)) and os.fspath(path).startswith(str(folder))
        if not is_inside or modes.get(operation, mode) != mode:
            return function(path, *args, **kwargs)
        failed.append(path)
        if operation not in modes:
            raise error
        file = FailingFile(path, mode.replace("b", ""))
        file.error = error
        return file

    patch.setattr(module, attribute, call)
    return failed


def replace_by_file(path):
    path.rename(path.with_name("moved"))
    path.write_text("a file")


def replace_by_loop(path):
    path.rename(path.with_name("moved"))
    path.symlink_to(path)


def test_what_is_written_is_read(folder, tmp_path):
    assert folder.has(WEIGHTS, NAME) and folder.has(None, NAME) and not folder.has(OTHERS, NAME)
    assert_same(folder.read(WEIGHTS, NAME, LIKE), layers())
    (path,) = files(tmp_path)
    with safetensors.safe_open(path, "pt") as file:  # others can read it
        assert file.metadata()["name"] == f"{WEIGHTS}/{NAME}" and "0.0.0" in file.keys()
    assert folder.num_bytes == path.stat().st_size == NUM_BYTES


def test_any_other_byte_is_noticed(tmp_path):
    path, draw = tmp_path / "file", random.Random(0)
    content = to_bytes({0: layers()}, NAME)
    header = 8 + int.from_bytes(content[:8], "little")
    places = [*range(8), *draw.sample(range(8, header), 300)]
    for place in [*places, *draw.sample(range(header, len(content)), 100)]:
        changed = bytearray(content)
        changed[place] ^= 1 << draw.randrange(8)
        path.write_bytes(changed)
        with contextlib.suppress(CorruptFileError), contextlib.closing(BlockFile(path)) as file:
            # as after padding behind the header
            assert_same(file.read({0: (LIKE, 1)})[0], layers())
            assert file.metadata["name"] == NAME


def truncate(path):
    path.write_bytes(path.read_bytes()[:-5])


def rename(path):
    path.write_bytes(path.read_bytes().replace(NAME.encode(), OTHER.encode()))


def replace_by_fifo(path):
    """Which is not waited for."""
    if not hasattr(os, "mkfifo"):
        pytest.skip("the system has no FIFOs")
    path.unlink()
    os.mkfifo(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (truncate, "it has "),
        (rename, "it is a renamed copy"),
        (replace_by_fifo, "it is not a regular file"),
    ],
)
def test_a_file_of_other_content_is_dropped_and_can_be_written_again(
    change, reason, folder, tmp_path, caplog
):
    (path,) = files(tmp_path)
    change(path)
    with caplog.at_level(logging.WARNING):
        assert in_threads(lambda: folder.read(WEIGHTS, NAME, LIKE)) == [None]
    assert f"{path} is dropped, so its tokens are computed: {reason}" in caplog.text
    assert not path.exists() and not folder.has(WEIGHTS, NAME)
    folder.write(WEIGHTS, NAME, layers())
    assert_same(folder.read(WEIGHTS, NAME, LIKE), layers())


def test_a_file_that_could_not_be_read_is_read_once_it_is_written_anew(
    folder, tmp_path, monkeypatch, caplog
):
    """By another process; files of other weights are not blamed, and one that another process
    deletes is not remembered."""
    ours = opened(tmp_path)
    folder.write(OTHERS, NAME, layers())
    with monkeypatch.context() as patch:
        fail_operation(patch, tmp_path, "open", "EACCES")
        assert ours.read(WEIGHTS, NAME, LIKE) is None
    assert not ours.has(WEIGHTS, NAME) and ours.has(OTHERS, NAME) and ours.has(None, NAME)
    assert ours.read(OTHERS, NAME, LIKE) is not None
    next(tmp_path.rglob(f"*{OTHERS}/*")).unlink()
    assert not ours.has(None, NAME)
    folder.write(WEIGHTS, NAME, layers())
    assert ours.has(WEIGHTS, NAME) and ours.has(None, NAME)
    assert ours.read(WEIGHTS, NAME, LIKE) is not None
    caplog.clear()
    (path,) = files(tmp_path)
    path.unlink()
    assert folder.read(WEIGHTS, NAME, LIKE) is None
    assert not folder.has(WEIGHTS, NAME) and not folder._unreadable and not caplog.records


def test_what_was_used_longest_ago_goes_first(tmp_path):
    """What another process writes counts."""
    folders = [opened(tmp_path, 10 * NUM_BYTES) for _ in range(2)]
    for number in range(24):
        folders[number % 2].write(WEIGHTS, f"{number:032x}-0", layers())
        (path,) = tmp_path.rglob(f"{number:032x}-0.safetensors")
        os.utime(path, (1000 + number, 1000 + number))
        assert min(number, 5) <= len(files(tmp_path)) <= 10
        if number == 5:  # the first is now used later than the others
            assert folders[0].read(WEIGHTS, f"{0:032x}-0", LIKE) is not None
    held = [folders[0].has(WEIGHTS, f"{number:032x}-0") for number in (0, 1, 23)]
    assert held == [True, False, True]


def test_a_folder_that_was_deleted_is_created_again(tmp_path, monkeypatch, caplog):
    """With its last file, or by another process."""
    write, paths = block_files.write_private, []

    def write_private(path, content):
        if not paths:
            shutil.rmtree(path.parent)
        paths.append(path)
        write(path, content)

    folder = opened(tmp_path, NUM_BYTES + NUM_BYTES // 20)
    for name in (OTHER, NAME):
        folder.write(WEIGHTS, name, layers())
    assert [path.stem for path in files(tmp_path)] == [NAME]
    monkeypatch.setattr(block_files, "write_private", write_private)
    folder.write(WEIGHTS, OTHER, layers())
    assert files(tmp_path) == [paths[-1]] and len(paths) == 2 and not caplog.records


def test_only_files_of_blocks_are_deleted(tmp_path, caplog):
    """No model in a folder with a similar name, nor behind a link; and not all files, for a file
    that never fits."""
    folder, elsewhere = tmp_path / "tier", tmp_path / "elsewhere"
    ours, similar = folder / f"hf_paged-{WEIGHTS}", folder / "hf_paged-tiny"
    kept = [similar / "model.safetensors", ours / "model.safetensors", similar / "download.part"]
    kept += [elsewhere / f"{NAME}.safetensors", folder / "mine.txt"]
    for path in kept:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(bytes(10 * NUM_BYTES))
        os.utime(path, (0, 0))
    (folder / f"hf_paged-{OTHERS}").symlink_to(elsewhere)
    (ours / f"{OTHERS}-0.safetensors").symlink_to(kept[0])
    tier = opened(folder, 3 * NUM_BYTES)
    for number in range(6):
        tier.write(WEIGHTS, f"{number:032x}-0", layers())
    assert all(path.stat().st_size == 10 * NUM_BYTES for path in kept)
    before = files(folder)
    assert sum(path.stat().st_size == NUM_BYTES for path in before) == 2
    with caplog.at_level(logging.WARNING):
        opened(folder, 100).write(WEIGHTS, NAME, layers())
    assert files(folder) == before and "does not fit in `disk_bytes` (100)" in caplog.text


@pytest.mark.parametrize("name", ERRORS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_no_file_operation_raises(operation, name, folder, tmp_path, caplog, monkeypatch):
    with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
        failed = fail_operation(patch, tmp_path, operation, name)
        for _ in range(3):
            folder.has(WEIGHTS, NAME)
            folder.has(None, OTHER)
            read = folder.read(WEIGHTS, NAME, LIKE)
            assert read is not None or not folder.has(WEIGHTS, NAME), "looked up for ever"
            folder.write(WEIGHTS, OTHER, layers())
    told = [record.getMessage() for record in caplog.records]
    assert len(told) <= 2, "one warning that it cannot be read, one that it cannot be written"
    assert all(str(tmp_path) in message for message in told)
    assert not list(tmp_path.rglob("*.part")) or operation == "unlink"
    if name in ("EIO", "ESTALE") and operation in ("stat", "read", "listdir"):
        assert folder.is_off and len(failed) == 1, "it was used after it failed"
        assert os.strerror(getattr(errno, name)) in told[0] and "create a new engine" in told[0]
        assert not folder.has(WEIGHTS, NAME)
    if operation == "write":
        assert "no prefix blocks are written" in told[0]
        assert ("; it is full: " in told[0]) == (name == "ENOSPC")
        folder.write(WEIGHTS, OTHER, layers())
        assert not folder.has(WEIGHTS, OTHER), "it waits"
    folder._retry_at = 0.0
    folder.write(WEIGHTS, OTHER, layers())
    assert folder.is_off or folder.has(WEIGHTS, OTHER)
    # an error of the system must not delete a file
    assert_same(opened(tmp_path).read(WEIGHTS, NAME, LIKE), layers())


def test_folders_of_other_weights_may_be_another_users(tmp_path, caplog):
    tmp_path.chmod(0o755)
    folder = opened(tmp_path)
    folder.write(OTHERS, NAME, layers())
    with contextlib.ExitStack() as stack, caplog.at_level(logging.WARNING):
        for parent in tmp_path.parents:
            if not parent.stat().st_mode & 0o001:  # pytest's folders are closed to others
                stack.callback(parent.chmod, parent.stat().st_mode)
                parent.chmod(0o755)
        stack.enter_context(forbidden(tmp_path / f"hf_paged-{OTHERS}"))
        assert not folder.has(None, NAME) and not folder.has(WEIGHTS, NAME)
    assert not folder.is_off and not caplog.records


@pytest.mark.parametrize("kind", ["file", "below a file", "loop", "forbidden", "below forbidden"])
def test_a_folder_that_cannot_be_used_is_named(kind, tmp_path):
    base = tmp_path / "tier"
    base.mkdir()
    path = base / "folder" if "below" in kind else base
    change = forbidden if "forbidden" in kind else replace_by_file
    message = r"`disk_path` of `prefix_tiers`.*Set another path"
    with (replace_by_loop if kind == "loop" else change)(base) or contextlib.nullcontext():
        with pytest.raises(OSError, match=message) as raised:
            check_folder(str(path))
    assert raised.value.filename == str(path) and raised.value.errno is not None


def test_a_partial_file_of_a_killed_process_is_deleted_in_time(folder, tmp_path):
    old, new = (tmp_path / f"hf_paged-{WEIGHTS}" / f"{NAME}.{n:032x}.part" for n in range(2))
    for part in (old, new):
        part.write_bytes(b"")
    os.utime(old, (0, 0))
    opened(tmp_path).write(WEIGHTS, OTHER, layers())
    assert not old.exists() and new.exists()


@pytest.mark.usefixtures("sigint")
def test_a_timeout_is_no_error_of_the_folder(tmp_path, monkeypatch):
    folder = opened(tmp_path)
    with alarmed() as ring:
        for name in ("_is_regular", "_version"):
            monkeypatch.setattr(block_files, name, lambda path: ring())
        for call in (folder.has, functools.partial(folder.read, layers={})):
            with pytest.raises(TimedOut):
                call("weights", "name")
    assert not folder.is_off and not folder._unreadable


def test_hashes_tell_tokens_namespaces_and_their_order():
    found = set()
    names = [None, (None, None), (None, "None"), ("a", None), (None, "a"), (None, "a", False)]
    for namespace in names:
        first = namespace_digest(namespace)
        one, other = _next_digest(first, (1, 2)), _next_digest(first, (2, 1))
        found |= {first, one, other, _next_digest(one, (2, 1)), _next_digest(other, (1, 2))}
    assert len(found) == 30
    assert _next_digest(namespace_digest(None), (object(),)) == b""
