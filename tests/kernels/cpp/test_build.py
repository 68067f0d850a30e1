"""Origin of the C++ kernels: a file that another user could have planted is not loaded."""

from __future__ import annotations

import errno
import logging
import os
import re
import shutil
import signal
import stat
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.compiler import link_flags

OTHER_USER = 12345
TIMED = r"hf_paged: compiled the CPU kernels in \d+\.\d s \[troubleshooting.md#cpp-kernels\]"
FOLDER = "HF_PAGED_CACHE_DIR"
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")


def compile_library(source: Path, path: Path) -> Path:
    """Without optimization, to save time."""
    command = ["c++", "-std=c++17", "-O0", "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real library, compiled once."""
    source = Path(cpp.__file__).with_name("kernels.cpp")
    return compile_library(source, tmp_path_factory.mktemp("built") / "kernels.so")


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A planted library of another user, and the file that it creates if it is loaded."""
    folder = tmp_path_factory.mktemp("planted")
    marker, source = folder / "it ran", folder / "planted.cpp"
    source.write_text(
        "#include <cstdio>\n__attribute__((constructor)) void run() {"
        f' std::fclose(std::fopen("{marker}", "w")); }}\n'
    )
    return compile_library(source, folder / "planted.so"), marker


class Host:
    """A home directory of ours, and a compiler that only copies the library and records its
    calls."""

    def __init__(
        self,
        path: Path,
        prebuilt: Path,
        patch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        self.path, self.patch, self.caplog = path, patch, caplog
        self.folder = path / ".cache" / "hf_paged"  # if no variable names another
        self.compiler = path / "stub-c++"
        self.compiler.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo stub && exit 0\n'
            'while [ "$1" != -o ]; do shift; done\n'
            f'echo "$2" >> "{self.compiler}.runs"\nrm -f "$2"\ncp "{prebuilt}" "$2"\n'
        )
        self.compiler.chmod(0o755)
        for name in ("HF_PAGED_CPP", FOLDER, "XDG_CACHE_HOME"):
            patch.delenv(name, raising=False)
        self.set(CXX=self.compiler, HOME=path)

    def set(self, **variables: str | Path) -> None:
        for name, value in variables.items():
            self.patch.setenv(name, str(value))

    @property
    def runs(self) -> list[Path]:
        """Output paths passed to the compiler."""
        noted = Path(f"{self.compiler}.runs")
        return [Path(line) for line in noted.read_text().splitlines()] if noted.exists() else []

    @property
    def library(self) -> Path:
        """The only file in the folder."""
        (library,) = self.folder.iterdir()
        assert library.suffix == ".so"
        return library

    def use(self, name: str, mode: int = 0o700) -> Path:
        """Names a new folder in the variable."""
        folder = self.path / name
        folder.mkdir(parents=True)
        folder.chmod(mode)
        self.set(**{FOLDER: folder})
        self.folder = folder
        return folder

    def refuses(self, folder: Path, reason: str) -> None:
        """Asserts that the folder is not used, with a warning; the library still works and leaves
        no files."""
        before = sorted(folder.iterdir()) if folder.is_dir() else []
        self.caplog.clear()
        assert load()
        record, compiled = self.caplog.records
        assert re.fullmatch(TIMED, compiled.getMessage())
        message = record.getMessage()
        assert record.levelno == logging.WARNING and reason in message, message
        assert message.startswith("hf_paged: compiling the CPU kernels for this process alone")
        wanted = "to a folder that is yours and that only you can write to"
        assert f"Set HF_PAGED_CACHE_DIR {wanted}" in message
        assert folder not in self.runs[-1].parents and not self.runs[-1].parent.exists()
        assert (sorted(folder.iterdir()) if folder.is_dir() else []) == before


@pytest.fixture
def host(
    prebuilt: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> Host:
    caplog.set_level(logging.INFO, logger=cpp.__name__)
    return Host(tmp_path, prebuilt, monkeypatch, caplog)


def load() -> bool:
    """Loads the kernels as in a fresh process; returns whether they were found."""
    return cpp.build.library.__wrapped__() is not None


def child(function: Callable[[], object]) -> int:
    """Forks a process that calls the function, and exits with 0 if it is true."""
    process = os.fork()
    if process == 0:
        try:
            os._exit(0 if function() else 1)
        finally:
            os._exit(2)
    return process


def ends(process: int) -> int:
    """Exit status; a truncated library may kill a process."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def give_away(path: Path, patch: pytest.MonkeyPatch) -> None:
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
        patch.setattr(os, name, as_other(getattr(os, name)))


# ------------------------------------------------------------------------------------- kept files


def test_the_library_is_built_once_in_a_folder_of_ours_alone_and_says_so(host: Host) -> None:
    before = os.umask(0)
    try:
        assert load()
    finally:
        os.umask(before)
    first, second = host.caplog.records
    assert first.levelno == second.levelno == logging.WARNING
    assert "hf_paged: compiling the CPU kernels, once on this machine ..." in first.getMessage()
    assert re.fullmatch(TIMED, second.getMessage())
    for path in (host.folder.parent, host.folder, host.library):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    (written,) = host.runs
    # built under a name of its own, then renamed
    assert written.parent == host.folder and written != host.library
    host.caplog.clear()
    host.folder.chmod(0o500)  # one that can only be read serves what it holds
    try:
        assert load() and len(host.runs) == 1 and not host.caplog.records
    finally:
        host.folder.chmod(0o700)


def test_processes_wait_for_one_build_and_go_on_where_it_is_killed(host: Host) -> None:
    go, script = host.path / "go", host.compiler.read_text()
    waits = f'\nwhile [ ! -e "{go}" ]; do sleep 0.1; done; rm -f "$2"'
    host.compiler.write_text(script.replace('\nrm -f "$2"', waits))
    process = child(lambda: os.setsid() or load())
    while not host.runs:
        time.sleep(0.01)
    waiting = [child(load) for _ in range(3)]
    os.killpg(process, signal.SIGKILL)
    while len(host.runs) < 2:
        time.sleep(0.01)
    time.sleep(0.5)  # the others would begin, too
    go.touch()
    assert [*map(ends, (process, *waiting))] == [-signal.SIGKILL, 0, 0, 0]
    assert host.library and len(host.runs) == 2
    assert load() and len(host.runs) == 2


DAMAGES: list[Callable[[bytes], bytes]] = [
    lambda content: content[: len(content) // 2],
    lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    lambda content: content + b"\0",
]


def test_a_library_that_is_not_what_was_built_is_built_again(host: Host) -> None:
    assert load()
    library, content = host.library, host.library.read_bytes()
    for number, damage in enumerate(DAMAGES, 2):
        library.unlink()  # this process's mapping stays valid
        library.write_bytes(damage(content))
        library.chmod(0o700)
        assert ends(child(load)) == 0
        assert len(host.runs) == number and library.read_bytes() == content
    host.caplog.clear()
    assert load() and not host.caplog.records


# -------------------------------------------------------------------------------- untrusted files


@pytest.mark.parametrize(
    "how", ["folder", "file", "parent", "link to the folder", "link of theirs", "XDG_CACHE_HOME"]
)
def test_planted_files_do_not_run(host: Host, planted: tuple[Path, Path], how: str) -> None:
    folder = host.use("shared")
    if how == "XDG_CACHE_HOME":
        host.patch.delenv(FOLDER)
        host.set(XDG_CACHE_HOME=folder)
        folder = host.folder = folder / "hf_paged"
    assert load()
    library = host.library
    library.unlink()
    shutil.copy(planted[0], library)
    library.chmod(0o755)
    planted[1].unlink(missing_ok=True)
    given = {"file": library, "parent": host.path}.get(how, folder)
    if how.startswith("link"):
        moved = shutil.move(folder, host.path / "theirs")
        folder.symlink_to(moved)
        given = folder if how == "link of theirs" else moved
    give_away(given, host.patch)
    host.caplog.clear()
    assert load()
    assert not planted[1].exists(), "what another user planted has run"
    records = host.caplog.records
    assert records and all(record.levelno == logging.WARNING for record in records)
    us = f"this process runs as user {os.geteuid()}"
    assert f"belongs to user {OTHER_USER}, and {us}" in host.caplog.text


ABSOLUTE = "{} is {!r}: it must be an absolute path"
REFUSED = [
    # others can enter the folder, or swap it on the way
    *((FOLDER, "{}/mine", mode, "chmod {1} {0}/mine") for mode in (0o777, 0o755, 0o1777, 0o710)),
    (FOLDER, "{}/mine/new", 0o777, "other users can write to {0}/mine: chmod go-w {0}/mine"),
    # it cannot be made
    (FOLDER, "/dev/null/folder", 0o700, "/dev/null"),
    (FOLDER, "/proc/folder", 0o700, "/proc/folder"),
    (FOLDER, "{}/stub-c++", 0o700, "{0}/stub-c++"),
    (FOLDER, "cache", 0o700, ABSOLUTE.format(FOLDER, "cache")),
    ("XDG_CACHE_HOME", "./cache", 0o700, ABSOLUTE.format("XDG_CACHE_HOME", "./cache")),
    ("HOME", "x", 0o700, ABSOLUTE.format("HOME", "x")),
]


@pytest.mark.parametrize(("variable", "value", "mode", "reason"), REFUSED)
def test_a_folder_that_may_not_or_cannot_be_used(
    host: Host, variable: str, value: str, mode: int, reason: str
) -> None:
    """It is named, with what to do, and the library is made for the process alone."""
    host.patch.chdir(host.use("mine", mode))
    host.patch.delenv(FOLDER)
    folder = value.format(host.path)
    host.set(**{variable: folder})
    rights = "700" if mode & 0o1000 or not mode & 0o022 else "go-w"
    host.refuses(Path(folder), reason.format(host.path, rights))
    assert value == "{}/mine/new" or not list(Path().iterdir())


@pytest.mark.parametrize("mode", [0o1777, 0o755], ids=oct)
def test_folders_on_the_way_in_which_no_other_can_rename_ours(host: Host, mode: int) -> None:
    host.use("way/mine").parent.chmod(mode)
    assert load() and host.library


# it can only be read, is full, or has no locks
@pytest.mark.parametrize(
    "error",
    [OSError(errno.EACCES, "why"), OSError(errno.ENOSPC, "why"), NotImplementedError("no locks")],
)
def test_folders_that_cannot_be_locked_are_not_used(host: Host, error: Exception) -> None:
    def fail(self: object) -> None:
        raise error

    host.patch.setattr(cpp.build.FileLock, "_acquire", fail)
    host.refuses(host.use("mine"), str(error))


@pytest.mark.parametrize(
    ("target", "end"), [("../disk/mine", ""), ("{}/disk/mine", ""), ("../disk", "mine")]
)
def test_links_of_ours_are_followed_and_checked(host: Host, target: str, end: str) -> None:
    """Home directories are often links to other disks. Relative, absolute, and of a parent."""
    folder, disk = host.use("disk/mine"), host.path / "disk"
    link = host.path / "links" / "here"
    link.parent.mkdir()
    link.symlink_to(target.format(host.path))
    host.set(**{FOLDER: link / end})
    assert load() and host.library
    disk.chmod(0o777)
    host.refuses(folder, f"other users can write to {disk}: chmod go-w {disk}")


@pytest.mark.parametrize("kind", ["link", "group can write", "pipe", "folder"])
def test_a_file_that_is_not_plainly_ours_is_not_loaded(host: Host, kind: str) -> None:
    assert load()
    library = host.library
    if kind == "group can write":
        library.chmod(0o720)
    else:
        moved = library.rename(host.path / "moved.so")
        make = {"link": lambda: library.symlink_to(moved), "pipe": lambda: os.mkfifo(library)}
        make.get(kind, library.mkdir)()
    host.caplog.clear()
    assert load()
    assert "does not load a library that others could have changed" in host.caplog.text
    assert str(library) in host.caplog.text and len(host.runs) >= 2


def test_a_temporary_folder_that_others_can_swap_is_not_used(host: Host) -> None:
    """Then the portable path serves."""
    temporary = host.use("tmp", 0o777)
    host.patch.setattr("tempfile.tempdir", str(temporary))
    host.set(**{FOLDER: "cache"})
    assert not load() and not host.runs and not list(temporary.iterdir())
    message = host.caplog.records[-1].getMessage()
    assert "runs without its C++ kernels" in message
    assert f"other users can write to {temporary}" in message


# -------------------------------------------------------------------------------------- compilers

FAILS = '#!/bin/sh\n[ "$1" = --version ] && exit 0\nprintf "no \\377 such file" >&2\nexit 1\n'
NONE = (
    "hf_paged runs without its C++ kernels, on the slower portable path: found no C++ compiler"
    " (tried c++, g++, clang++): install one, or set CXX [troubleshooting.md#cpp-kernels]"
)


@pytest.mark.parametrize(
    ("variables", "level", "reason"),
    [
        ({"HF_PAGED_CPP": "0"}, "INFO", "HF_PAGED_CPP=0"),
        ({"CXX": "/bin/false"}, "WARNING", "returned non-zero"),
        # the first call crashed over words in another encoding
        ({}, "WARNING", "slower portable path: {} failed: no \ufffd such file"),
        ({"CXX": "", "PATH": "/nowhere"}, "WARNING", NONE),
    ],
    ids=["switched off", "failing", "words", "no compiler"],
)
def test_absent_with_a_reason_in_the_log(
    host: Host, variables: dict[str, str], level: str, reason: str
) -> None:
    folder = host.use("cache")
    host.compiler.write_text(FAILS)
    host.set(**variables)
    assert not load()
    record = host.caplog.records[-1]
    assert record.levelname == level and not list(folder.iterdir())
    assert reason.format(host.compiler) in record.getMessage()


@pytest.mark.parametrize(
    ("command", "is_c"),
    [("gcc -std=c++17", True), ("cc", True), ("ccache g++ -O2", False), ("clang++-18", False)],
)
def test_a_c_compiler_is_told_to_link_the_cpp_library(command: str, is_c: bool) -> None:
    """PEFT's BOFT leaves `CXX=gcc` behind; the library lacked the C++ library then."""
    assert bool(link_flags(command.split())) == is_c


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")
def test_a_c_compiler_builds_the_library(host: Host) -> None:
    host.set(CXX="gcc -O0")
    assert ends(child(load)) == 0
