"""Folders and files that no other user can have made or can change: what is loaded as code must come from there."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH
_MAX_LINKS = 40  # as Linux


def make(folder: Path) -> None:
    """
    Makes sure that a folder is there, is ours and for us alone (mode 700), and that no other user but root can put
    another one in its place: the same rules hold on the way to it as for ssh's keys.

    Args:
        folder (`Path`): An absolute path. What is missing of it is made with mode 700.

    Raises:
        OSError: if it cannot be made, or is not private; the message names the place and what to change.
    """
    user = os.geteuid()
    for place in _way(folder):
        try:
            status = os.lstat(place)
        except FileNotFoundError:
            os.makedirs(place, mode=0o700, exist_ok=True)  # by another process meanwhile
            status = os.lstat(place)
        if status.st_uid not in (0, user):
            raise PermissionError(f"{place} belongs to user {status.st_uid}, and we are user {user}")
        is_open = status.st_mode & _OTHERS_WRITE and not status.st_mode & stat.S_ISVTX
        if is_open and not stat.S_ISLNK(status.st_mode):
            raise PermissionError(f"other users can write to {place}: chmod go-w {place}")
    if not stat.S_ISDIR(status.st_mode):
        raise NotADirectoryError(f"{place} is not a directory")
    if status.st_uid != user:
        raise PermissionError(f"{place} belongs to user {status.st_uid}, and we are user {user}")
    if status.st_mode & 0o077:
        raise PermissionError(f"{place} has mode {stat.S_IMODE(status.st_mode):o}: chmod 700 {place}")


def read(path: Path) -> bytes:
    """The content of a file in a private folder. Raises `OSError` unless it is a plain file of ours alone."""
    # not blocking: a pipe must not make us wait
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    with open(handle, "rb") as file:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode):
            raise PermissionError(f"{path} is not a plain file")
        if status.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {status.st_uid}, and we are user {os.geteuid()}")
        if status.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"other users can write to {path}: chmod go-w {path}")
        return file.read()


def _way(folder: Path) -> Iterator[Path]:
    """Every directory and symbolic link that the system passes on its way from the root to `folder`, which is last."""
    here = Path(folder.anchor)
    yield here
    left = list(reversed(folder.parts[1:]))
    num_links = 0
    while left:
        name = left.pop()
        place = here.parent if name == ".." else here / name
        yield place
        if not place.is_symlink():
            here = place
            continue
        num_links += 1
        if num_links > _MAX_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(folder))
        target = Path(os.readlink(place))
        if target.is_absolute():
            here = Path(target.anchor)
            yield here
        left.extend(reversed(target.parts[1:] if target.is_absolute() else target.parts))
