"""Origin of the C++ kernels: a file that another user could have planted is not loaded."""

from __future__ import annotations

import errno
import functools
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_paged.kernels import cpp

OTHER_USER = 12345
TIMED = r"hf_paged: compiled the CPU kernels in \d+\.\d s \[troubleshooting.md#cpp-kernels\]"
SOURCES = Path(cpp.__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real library, compiled once, without optimization to save time."""
    path = tmp_path_factory.mktemp("prebuilt") / "kernels.so"
    command = [
        "c++",
        "-std=c++17",
        "-O0",
        "-shared",
        "-fPIC",
        str(SOURCES / "kernels.cpp"),
        "-o",
        str(path),
    ]
    subprocess.run(command, check=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A planted library of another user, and the file that it creates if it is loaded."""
    folder = tmp_path_factory.mktemp("planted")
    marker = folder / "it ran"
    source = folder / "planted.cpp"
    source.write_text(
        "#include <cstdio>\n__attribute__((constructor)) void run() {"
        f' std::fclose(std::fopen("{marker}", "w")); }}\n'
    )
    path = folder / "planted.so"
    subprocess.run(
        ["c++", "-shared", "-fPIC", str(source), "-o", str(path)], check=True, timeout=300
    )
    return path, marker


@pytest.fixture
def compiler(prebuilt: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compiler that only copies the library, and records its calls."""
    path = tmp_path / "stub-c++"
    path.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo stub && exit 0\n'
        'while [ "$1" != -o ]; do shift; done\n'
        f'echo "$2" >> "{path}.runs"\nrm -f "$2"\ncp "{prebuilt}" "$2"\n'
    )
    path.chmod(0o755)
    monkeypatch.setenv("CXX", str(path))
    for name in ("HF_PAGED_CPP", "HF_PAGED_CACHE_DIR", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return path


def runs(compiler: Path) -> list[Path]:
    """Output paths passed to the compiler."""
    noted = Path(f"{compiler}.runs")
    return [Path(line) for line in noted.read_text().splitlines()] if noted.exists() else []


def load() -> bool:
    """Loads the kernels as in a fresh process; returns whether they were found."""
    return cpp.build.library.__wrapped__() is not None


def in_child(function: Callable[[], object]) -> int:
    """Exit status of a forked process that calls the function: 0 if true; a truncated library may
    kill it."""
    process = os.fork()
    if process == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def give_away(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes the path belong to another user; without root, fakes the system's answer."""
    if os.geteuid() == 0:
        os.chown(path, OTHER_USER, OTHER_USER, follow_symlinks=False)
        return
    number = os.lstat(path).st_ino

    def as_other(function: Callable[..., os.stat_result]) -> Callable[..., os.stat_result]:
        def told(*args: object, **options: object) -> os.stat_result:
            status = function(*args, **options)
            if status.st_ino != number:
                return status
            return os.stat_result((*status[:4], OTHER_USER, *status[5:]))

        return told

    for name in ("stat", "lstat", "fstat"):
        monkeypatch.setattr(os, name, as_other(getattr(os, name)))


def kept(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.so"))


# ------------------------------------------------------------------------------------- kept files


@pytest.mark.slow
def test_the_library_is_kept_in_a_folder_of_ours_alone(compiler: Path, tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        assert load()
    finally:
        os.umask(before)
    folder = tmp_path / ".cache" / "hf_paged"
    (library,) = folder.iterdir()
    for path in (folder.parent, folder, library):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    (written,) = runs(compiler)
    assert written.parent == folder and written != library, (
        "built under a name of its own, then renamed"
    )
    assert load() and len(runs(compiler)) == 1, "compiled again"


def slow_down(compiler: Path, seconds: float) -> None:
    """Makes the compiler take this long after it has noted its call."""
    compiler.write_text(
        compiler.read_text().replace('\nrm -f "$2"', f'\nsleep {seconds}; rm -f "$2"')
    )


@pytest.mark.slow
def test_processes_that_build_at_once_compile_once(compiler: Path, tmp_path: Path) -> None:
    slow_down(compiler, 0.3)
    processes = []
    start = time.monotonic() + 0.2
    for _ in range(4):
        if (process := os.fork()) == 0:
            while time.monotonic() < start:
                pass
            os._exit(0 if load() else 1)
        processes.append(process)
    assert [os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) for process in processes] == [
        0
    ] * 4
    assert (
        len(kept(tmp_path / ".cache" / "hf_paged"))
        == len(list((tmp_path / ".cache" / "hf_paged").iterdir()))
        == 1
    )
    assert len(runs(compiler)) == 1
    assert load() and len(runs(compiler)) == 1


def test_a_build_that_was_killed_holds_up_no_other_and_leaves_nothing(
    compiler: Path, tmp_path: Path
) -> None:
    slow_down(compiler, 60)
    if (process := os.fork()) == 0:
        os.setsid()
        os._exit(0 if load() else 1)
    while not runs(compiler):
        time.sleep(0.01)
    folder = tmp_path / ".cache" / "hf_paged"
    waiting = os.fork()
    if waiting == 0:
        compiler.write_text(compiler.read_text().replace("sleep 60", "sleep 0"))
        os._exit(0 if load() else 1)
    time.sleep(0.1)
    os.killpg(process, signal.SIGKILL)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == -signal.SIGKILL
    assert os.waitstatus_to_exitcode(os.waitpid(waiting, 0)[1]) == 0
    assert (
        len(runs(compiler)) == 2
        and kept(folder) == list(folder.iterdir())
        and len(kept(folder)) == 1
    )


def test_a_folder_that_can_only_be_read_serves_what_it_holds(
    compiler: Path, tmp_path: Path
) -> None:
    assert load()
    folder = tmp_path / ".cache" / "hf_paged"
    folder.chmod(0o500)
    try:
        assert load() and len(runs(compiler)) == 1
    finally:
        folder.chmod(0o700)


@pytest.mark.parametrize(
    "error", [errno.EACCES, errno.ENOSPC, errno.ENOSYS], ids=errno.errorcode.get
)
def test_a_folder_that_cannot_be_locked_leaves_a_library_for_the_process(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    error: int,
) -> None:
    """Because it can only be read, or is full, or because its file system has no locks."""
    folder = tmp_path / "mine"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(folder))
    raised = (
        NotImplementedError("no locks") if error == errno.ENOSYS else OSError(error, "on purpose")
    )

    def fail(self: object) -> None:
        raise raised

    monkeypatch.setattr(cpp.build.FileLock, "_acquire", fail)
    refused(caplog, compiler, folder, str(raised))


@pytest.mark.parametrize(
    "damage", ["cut short", "empty", "one byte", "appended", "zeros at the end"]
)
def test_a_library_that_is_not_what_was_built_is_built_again(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    assert load()
    (library,) = kept(tmp_path / ".cache" / "hf_paged")
    content = library.read_bytes()
    changed = {
        "cut short": content[: len(content) // 2],
        "empty": b"",
        "one byte": content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
        "appended": content + b"\0",
        "zeros at the end": content[:-4096] + bytes(4096),
    }[damage]
    library.unlink()  # this process's mapping stays valid
    library.write_bytes(changed)
    library.chmod(0o700)
    assert in_child(load) == 0
    assert len(runs(compiler)) == 2 and library.read_bytes() == content
    caplog.clear()
    assert load() and not caplog.records


# -------------------------------------------------------------------------------- untrusted files


def refused(caplog: pytest.LogCaptureFixture, compiler: Path, folder: Path, reason: str) -> None:
    """The folder is not used, with a warning; the library still works and leaves no files."""
    before = sorted(folder.iterdir()) if folder.is_dir() else []
    with caplog.at_level(logging.INFO, logger=cpp.__name__):
        assert load()
    record, compiled = caplog.records
    assert re.fullmatch(TIMED, compiled.getMessage())
    assert record.levelno == logging.WARNING
    message = record.getMessage()
    assert message.startswith("hf_paged: compiling the CPU kernels for this process alone"), message
    assert reason in message, message
    assert (
        "Set HF_PAGED_CACHE_DIR to a folder that is yours and that only you can write to" in message
    )
    assert folder not in runs(compiler)[-1].parents
    assert not runs(compiler)[-1].parent.exists()
    assert (sorted(folder.iterdir()) if folder.is_dir() else []) == before


@pytest.mark.parametrize("variable", ["HF_PAGED_CACHE_DIR", "XDG_CACHE_HOME"])
@pytest.mark.parametrize(
    "how", ["folder", "file", "folder and file", "parent", "link to the folder", "link of theirs"]
)
def test_what_another_user_planted_does_not_run(
    compiler: Path,
    planted: tuple[Path, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    how: str,
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir(mode=0o700)
    folder = shared if variable == "HF_PAGED_CACHE_DIR" else shared / "hf_paged"
    monkeypatch.setenv(variable, str(shared))
    assert load()
    (library,) = kept(folder)
    library.unlink()
    shutil.copy(planted[0], library)
    library.chmod(0o755)
    planted[1].unlink(missing_ok=True)
    if how.startswith("link"):
        moved = tmp_path / "theirs"
        shutil.move(folder, moved)
        folder.symlink_to(moved)
        give_away(folder if how == "link of theirs" else moved, monkeypatch)
    if "folder" in how and not how.startswith("link"):
        give_away(folder, monkeypatch)
    if "file" in how:
        give_away(library, monkeypatch)
    if how == "parent":
        give_away(tmp_path, monkeypatch)
    caplog.clear()
    assert load()
    assert not planted[1].exists(), "what another user planted has run"
    assert all(record.levelno == logging.WARNING for record in caplog.records) and caplog.records
    assert (
        f"belongs to user {OTHER_USER}, and this process runs as user {os.geteuid()}" in caplog.text
    )


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o755, 0o1777, 0o710], ids=oct)
def test_a_folder_that_others_can_enter_is_refused(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: int,
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    folder.chmod(mode)
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(folder))
    sticky_or_closed = mode & 0o1000 or not mode & 0o022
    refused(caplog, compiler, folder, f"chmod {'700' if sticky_or_closed else 'go-w'} {folder}")
    folder.chmod(0o700)
    assert load() and len(kept(folder)) == 1


@pytest.mark.parametrize(
    ("mode", "is_private"), [(0o777, False), (0o775, False), (0o1777, True), (0o755, True)], ids=str
)
def test_no_other_user_can_swap_a_folder_on_the_way(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    mode: int,
    is_private: bool,
) -> None:
    way = tmp_path / "way"
    folder = way / "between" / "mine"
    folder.mkdir(parents=True, mode=0o700)
    way.chmod(mode)
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(folder))
    if is_private:
        assert load() and len(kept(folder)) == 1
    else:
        refused(caplog, compiler, folder, f"other users can write to {way}: chmod go-w {way}")


@pytest.mark.parametrize("kind", ["relative", "absolute", "of a parent"])
def test_a_link_of_ours_is_followed_and_where_it_leads_is_checked(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
) -> None:
    """Home directories are often links to other disks."""
    disk = tmp_path / "disk"
    (disk / "mine").mkdir(parents=True)
    (disk / "mine").chmod(0o700)
    (tmp_path / "links").mkdir()
    link = tmp_path / "links" / "here"
    target = {
        "relative": Path("..", "disk", "mine"),
        "absolute": disk / "mine",
        "of a parent": Path("..", "disk"),
    }[kind]
    link.symlink_to(target)
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(link / "mine" if kind == "of a parent" else link))
    assert load() and len(kept(disk / "mine")) == 1
    disk.chmod(0o777)
    caplog.clear()
    refused(caplog, compiler, disk / "mine", f"other users can write to {disk}: chmod go-w {disk}")


@pytest.mark.parametrize("kind", ["link", "group can write", "pipe", "folder"])
def test_a_file_that_is_not_plainly_ours_is_not_loaded(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    assert load()
    (library,) = kept(tmp_path / ".cache" / "hf_paged")
    if kind == "group can write":
        library.chmod(0o720)
    else:
        moved = library.rename(tmp_path / "moved.so")
        if kind == "link":
            library.symlink_to(moved)
        elif kind == "pipe":
            os.mkfifo(library)
        else:
            library.mkdir()
    caplog.clear()
    assert load()
    assert (
        "does not load a library that others could have changed" in caplog.text
        and str(library) in caplog.text
    )
    assert len(runs(compiler)) >= 2


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HF_PAGED_CACHE_DIR", "cache"), ("XDG_CACHE_HOME", "./cache"), ("HOME", "home")],
)
def test_a_relative_folder_is_refused(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    variable: str,
    value: str,
) -> None:
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    monkeypatch.setenv(variable, value)
    refused(
        caplog,
        compiler,
        tmp_path / "elsewhere",
        f"{variable} is {value!r}: it must be an absolute path",
    )


@pytest.mark.parametrize("place", ["/dev/null/folder", "/proc/folder", "a file"])
def test_a_folder_that_cannot_be_made_leaves_a_library_for_the_process(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    place: str,
) -> None:
    folder = Path(place)
    if place == "a file":
        folder = tmp_path / "file"
        folder.write_bytes(b"")
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(folder))
    refused(caplog, compiler, folder, str(folder.parent if place == "/dev/null/folder" else folder))


def test_a_temporary_folder_that_others_can_swap_is_not_used(
    compiler: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Then the portable path serves."""
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    temporary.chmod(0o777)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", "cache")
    assert not load()
    assert not runs(compiler)
    assert "runs without its C++ kernels" in caplog.records[-1].getMessage()
    assert f"other users can write to {temporary}" in caplog.records[-1].getMessage()
    assert not list(temporary.iterdir())


# --------------------------------------------------------------------------------------- messages


def test_the_first_call_says_that_it_compiles(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert load()
    records = caplog.records
    assert [record.levelno for record in records] == [logging.WARNING] * 2
    assert (
        "hf_paged: compiling the CPU kernels, once on this machine ..." in records[0].getMessage()
    )
    assert re.fullmatch(TIMED, records[1].getMessage())
    caplog.clear()
    assert load() and not caplog.records


def test_a_warning_says_that_no_compiler_was_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("HF_PAGED_CPP", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not load()
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        record.getMessage()
        == "hf_paged runs without its C++ kernels, on the slower portable path: found no C++"
        " compiler (tried c++, g++, clang++): install one, or set CXX"
        " [troubleshooting.md#cpp-kernels]"
    )


def test_a_compilers_words_may_be_in_any_encoding(
    compiler: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The first call crashed; the portable path must serve."""
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && exit 0\nprintf "no \\377 such file" >&2\nexit 1\n'
    )
    assert not load()
    assert (
        f"slower portable path: {compiler} failed: no \ufffd such file"
        in caplog.records[-1].getMessage()
    )
    assert not list((tmp_path / ".cache" / "hf_paged").iterdir())


@pytest.mark.skipif(
    os.geteuid() != 0
    or not all(folder.stat().st_mode & 1 for folder in (SOURCES, *SOURCES.parents)),
    reason="only root can become another user, and that one must be able to read the sources",
)
def test_another_user_than_root(compiler: Path, prebuilt: Path) -> None:
    """A user with a home directory keeps the library there; in root's home, it is made per
    process."""
    with tempfile.TemporaryDirectory() as name:
        base = Path(name)
        base.chmod(0o755)
        copy = shutil.copy(prebuilt, base)
        stub = base / "c++"
        stub.write_text(
            compiler.read_text().replace(str(prebuilt), copy).replace(str(compiler), str(stub))
        )
        stub.chmod(0o755)
        Path(f"{stub}.runs").touch()
        Path(f"{stub}.runs").chmod(0o666)
        homes = [base / "roots", base / "theirs"]
        for home in homes:
            home.mkdir()
        os.chown(homes[1], OTHER_USER, OTHER_USER)

        def as_other(home: Path) -> bool:
            os.setgroups([])
            os.setgid(OTHER_USER)
            os.setuid(OTHER_USER)
            os.environ.update(HOME=str(home), CXX=str(stub))
            return load()

        for home, count in ((homes[0], 1), (homes[1], 2), (homes[1], 2), (homes[0], 3)):
            assert in_child(functools.partial(as_other, home)) == 0
            assert len(runs(stub)) == count
        assert not list(homes[0].iterdir())
        assert len(kept(homes[1] / ".cache" / "hf_paged")) == 1
        for path in homes[1].rglob("*"):
            assert path.stat().st_uid == OTHER_USER
