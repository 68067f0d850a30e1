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

OTHER_USER = 12345
TIMED = r"hf_paged: compiled the CPU kernels in \d+\.\d s \[troubleshooting.md#cpp-kernels\]"
FOLDER = "HF_PAGED_CACHE_DIR"
SOURCES = Path(cpp.__file__).parent
pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")


def compile_library(source: Path, path: Path) -> Path:
    """Without optimization, to save time."""
    command = ["c++", "-std=c++17", "-O0", "-shared", "-fPIC", str(source), "-o", str(path)]
    subprocess.run(command, check=True, timeout=300)
    return path


@pytest.fixture(scope="module")
def prebuilt(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real library, compiled once."""
    return compile_library(SOURCES / "kernels.cpp", tmp_path_factory.mktemp("built") / "kernels.so")


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
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        self.path, self.monkeypatch, self.caplog = path, monkeypatch, caplog
        self.folder = path / ".cache" / "hf_paged"  # if no variable names another
        self.compiler = path / "stub-c++"
        self.compiler.write_text(
            '#!/bin/sh\n[ "$1" = --version ] && echo stub && exit 0\n'
            'while [ "$1" != -o ]; do shift; done\n'
            f'echo "$2" >> "{self.compiler}.runs"\nrm -f "$2"\ncp "{prebuilt}" "$2"\n'
        )
        self.compiler.chmod(0o755)
        for name in ("HF_PAGED_CPP", FOLDER, "XDG_CACHE_HOME"):
            monkeypatch.delenv(name, raising=False)
        self.set(CXX=self.compiler, HOME=path)

    def set(self, **variables: str | Path) -> None:
        for name, value in variables.items():
            self.monkeypatch.setenv(name, str(value))

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

    def slow_down(self, seconds: float) -> None:
        """Makes the compiler take this long after it has noted its call."""
        script = self.compiler.read_text()
        self.compiler.write_text(script.replace('\nrm -f "$2"', f'\nsleep {seconds}; rm -f "$2"'))

    def refuses(self, folder: Path, reason: str) -> None:
        """Asserts that the folder is not used, with a warning; the library still works and leaves
        no files."""
        before = sorted(folder.iterdir()) if folder.is_dir() else []
        self.caplog.clear()
        with self.caplog.at_level(logging.INFO, logger=cpp.__name__):
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


# ------------------------------------------------------------------------------------- kept files


def test_the_library_is_kept_in_a_folder_of_ours_alone(host: Host) -> None:
    before = os.umask(0)
    try:
        assert load()
    finally:
        os.umask(before)
    for path in (host.folder.parent, host.folder, host.library):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    (written,) = host.runs
    assert written.parent == host.folder, "built under a name of its own, then renamed"
    assert written != host.library
    host.folder.chmod(0o500)  # one that can only be read serves what it holds
    try:
        assert load() and len(host.runs) == 1, "compiled again"
    finally:
        host.folder.chmod(0o700)


@pytest.mark.slow
def test_processes_that_build_at_once_compile_once(host: Host) -> None:
    host.slow_down(0.3)
    start = time.monotonic() + 0.2

    def wait() -> bool:
        while time.monotonic() < start:
            pass
        return load()

    assert [ends(process) for process in [child(wait) for _ in range(4)]] == [0] * 4
    assert host.library and len(host.runs) == 1
    assert load() and len(host.runs) == 1


def test_a_build_that_was_killed_holds_up_no_other_and_leaves_nothing(host: Host) -> None:
    host.slow_down(60)
    process = child(lambda: os.setsid() or load())
    while not host.runs:
        time.sleep(0.01)
    host.compiler.write_text(host.compiler.read_text().replace("sleep 60", "sleep 0"))
    waiting = child(load)
    time.sleep(0.1)
    os.killpg(process, signal.SIGKILL)
    assert (ends(process), ends(waiting)) == (-signal.SIGKILL, 0)
    assert host.library and len(host.runs) == 2


DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "cut short": lambda content: content[: len(content) // 2],
    "empty": lambda content: b"",
    "one byte": lambda content: content[:-9] + bytes([content[-9] ^ 1]) + content[-8:],
    "appended": lambda content: content + b"\0",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_library_that_is_not_what_was_built_is_built_again(host: Host, damage: str) -> None:
    assert load()
    library, content = host.library, host.library.read_bytes()
    library.unlink()  # this process's mapping stays valid
    library.write_bytes(DAMAGES[damage](content))
    library.chmod(0o700)
    assert ends(child(load)) == 0
    assert len(host.runs) == 2 and library.read_bytes() == content
    host.caplog.clear()
    assert load() and not host.caplog.records


# -------------------------------------------------------------------------------- untrusted files


@pytest.mark.parametrize(
    ("variable", "how"),
    [
        *(
            (FOLDER, how)
            for how in ("folder", "file", "parent", "link to the folder", "link of theirs")
        ),
        ("XDG_CACHE_HOME", "folder"),
    ],
)
def test_what_another_user_planted_does_not_run(
    host: Host, planted: tuple[Path, Path], variable: str, how: str
) -> None:
    folder = host.use("shared")
    if variable != FOLDER:
        host.monkeypatch.delenv(FOLDER)
        host.set(**{variable: folder})
        folder = host.folder = folder / "hf_paged"
    assert load()
    library = host.library
    library.unlink()
    shutil.copy(planted[0], library)
    library.chmod(0o755)
    planted[1].unlink(missing_ok=True)
    given = {"folder": folder, "file": library, "parent": host.path}.get(how, folder)
    if how.startswith("link"):
        moved = shutil.move(folder, host.path / "theirs")
        folder.symlink_to(moved)
        given = folder if how == "link of theirs" else moved
    give_away(given, host.monkeypatch)
    host.caplog.clear()
    assert load()
    assert not planted[1].exists(), "what another user planted has run"
    records = host.caplog.records
    assert records and all(record.levelno == logging.WARNING for record in records)
    us = f"this process runs as user {os.geteuid()}"
    assert f"belongs to user {OTHER_USER}, and {us}" in host.caplog.text


@pytest.mark.parametrize(
    ("variable", "value", "mode", "reason"),
    [
        # others can enter the folder
        *(
            (FOLDER, "{}/mine", mode, "chmod {1} {0}/mine")
            for mode in (0o777, 0o755, 0o1777, 0o710)
        ),
        # or swap it on the way
        (FOLDER, "{}/mine/new", 0o777, "other users can write to {0}/mine: chmod go-w {0}/mine"),
        # it cannot be made
        (FOLDER, "/dev/null/folder", 0o700, "/dev/null"),
        (FOLDER, "/proc/folder", 0o700, "/proc/folder"),
        (FOLDER, "{}/stub-c++", 0o700, "{0}/stub-c++"),
        *(
            (variable, value, 0o700, f"{variable} is {value!r}: it must be an absolute path")
            for variable, value in ((FOLDER, "cache"), ("XDG_CACHE_HOME", "./cache"), ("HOME", "x"))
        ),
    ],
)
def test_a_folder_that_may_not_or_cannot_be_used(
    host: Host, variable: str, value: str, mode: int, reason: str
) -> None:
    """It is named, with what to do, and the library is made for the process alone."""
    host.monkeypatch.chdir(host.use("mine", mode))
    host.monkeypatch.delenv(FOLDER)
    folder = value.format(host.path)
    host.set(**{variable: folder})
    rights = "700" if mode & 0o1000 or not mode & 0o022 else "go-w"
    host.refuses(Path(folder), reason.format(host.path, rights))
    assert value == "{}/mine/new" or not list(Path().iterdir())


@pytest.mark.parametrize("mode", [0o1777, 0o755], ids=oct)
def test_a_folder_on_the_way_in_which_no_other_can_rename_ours_is_no_obstacle(
    host: Host, mode: int
) -> None:
    host.use("way/mine").parent.chmod(mode)
    assert load() and host.library


@pytest.mark.parametrize(
    "error", [errno.EACCES, errno.ENOSPC, errno.ENOSYS], ids=errno.errorcode.get
)
def test_a_folder_that_cannot_be_locked_leaves_a_library_for_the_process(
    host: Host, error: int
) -> None:
    """Because it can only be read, or is full, or because its file system has no locks."""
    raised = NotImplementedError("no locks") if error == errno.ENOSYS else OSError(error, "why")
    host.monkeypatch.setattr(cpp.build.FileLock, "_acquire", raising(raised))
    host.refuses(host.use("mine"), str(raised))


def raising(error: Exception) -> Callable[[object], None]:
    def fail(self: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize(
    ("target", "end"), [("../disk/mine", ""), ("{}/disk/mine", ""), ("../disk", "mine")]
)
def test_a_link_of_ours_is_followed_and_where_it_leads_is_checked(
    host: Host, target: str, end: str
) -> None:
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
    host.monkeypatch.setattr("tempfile.tempdir", str(temporary))
    host.set(**{FOLDER: "cache"})
    assert not load() and not host.runs and not list(temporary.iterdir())
    message = host.caplog.records[-1].getMessage()
    assert "runs without its C++ kernels" in message
    assert f"other users can write to {temporary}" in message


# --------------------------------------------------------------------------------------- messages


def test_the_first_call_says_that_it_compiles(host: Host) -> None:
    assert load()
    first, second = host.caplog.records
    assert first.levelno == second.levelno == logging.WARNING
    assert "hf_paged: compiling the CPU kernels, once on this machine ..." in first.getMessage()
    assert re.fullmatch(TIMED, second.getMessage())
    host.caplog.clear()
    assert load() and not host.caplog.records


FAILS = '#!/bin/sh\n[ "$1" = --version ] && exit 0\nprintf "no \\377 such file" >&2\nexit 1\n'


@pytest.mark.parametrize(
    ("variables", "level", "reason"),
    [
        ({"HF_PAGED_CPP": "0"}, "INFO", "HF_PAGED_CPP=0"),
        ({"CXX": "/bin/false"}, "WARNING", "returned non-zero"),
        # the first call crashed over words in another encoding
        ({}, "WARNING", "slower portable path: {} failed: no \ufffd such file"),
        (
            {"CXX": "", "PATH": "/nowhere"},
            "WARNING",
            "hf_paged runs without its C++ kernels, on the slower portable path: found no C++"
            " compiler (tried c++, g++, clang++): install one, or set CXX"
            " [troubleshooting.md#cpp-kernels]",
        ),
    ],
    ids=["switched off", "failing", "words", "no compiler"],
)
def test_absent_with_a_reason_in_the_log(
    host: Host, variables: dict[str, str], level: str, reason: str
) -> None:
    folder = host.use("cache")
    host.compiler.write_text(FAILS)
    host.set(**variables)
    with host.caplog.at_level("INFO", logger=cpp.__name__):
        assert not load()
    record = host.caplog.records[-1]
    assert record.levelname == level and not list(folder.iterdir())
    assert reason.format(host.compiler) in record.getMessage()
