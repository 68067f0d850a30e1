"""One limit on the bytes of all pools of a process."""

from __future__ import annotations

import weakref
from typing import Any

from .. import forks
from ..config import is_whole

WAIT_SECONDS = 0.1  # for the locks of a pool that is idle: a look at its figures takes microseconds

PATIENCE = 10.0  # seconds for which a request waits for memory that other models use

_lock = forks.rlock()
_limit: int | None = None  # bytes
# Of every `PagedMemory`; never changed in place, so that one thread may look at it while another makes a memory.
_pools: tuple[weakref.ref[Any], ...] = ()


def budget(num_bytes: int | None) -> None:
    """
    Bounds the bytes that the blocks of all models and caches of this process take together, from now on. A pool that
    needs more than is left takes it from pools that no call uses, of which those unused for longest are given back
    first, then from its own cached prefixes; a request that it still does not fit waits, or raises
    [`OutOfBlocksError`]. Pools that hold more when this is called grow no further, and shrink once they are idle.
    Host memory of swapped requests and of `prefix_tiers` does not count.

    Args:
        num_bytes (`int`, *optional*): At least 1. `None` takes the limit away.

    Raises:
        ValueError: for another number.
    """
    global _limit
    if num_bytes is not None and not (is_whole(num_bytes) and num_bytes > 0):
        raise ValueError(f"the budget is {num_bytes!r}: it must be None or a whole number of at least 1 (bytes)")
    with _lock:
        _limit = None if num_bytes is None else int(num_bytes)
        settle()


def limit(memory: Any = None) -> int | None:
    """The budget in bytes; `None` without one, or where it does not count this pool."""
    return _limit if memory is None or memory.is_bounded else None


def join(memory: Any) -> None:
    """From now on the budget bounds this `PagedMemory`, too."""
    global _pools
    with _lock:
        _pools = (*(ref for ref in _pools if ref() is not None), weakref.ref(memory))


def share(memory: Any) -> int | None:
    """Bytes that this pool can come to hold: all that pools in use do not."""
    total = limit(memory)  # which another thread may change
    return None if total is None else total - sum(pool.charged_bytes for pool in _others(memory) if pool.is_used)


def charge(memory: Any, more: int = 0) -> bool:
    """Notes that this pool, whose lock is held, holds what it does now and `more` bytes. `False`, with nothing noted,
    if that is more than the budget allows once every idle pool is given back."""
    needed = memory.taken_bytes + more
    if limit(memory) is None or needed <= memory.charged_bytes:
        memory.charged_bytes = needed
        return True
    with _lock:
        if not _shrink(needed, memory):
            return False
        memory.charged_bytes = needed
        return True


def note(memory: Any) -> None:
    """What this pool, whose lock is held, holds now."""
    memory.charged_bytes = memory.taken_bytes


def left() -> int | None:
    """Bytes that no pool holds; `None` without a budget."""
    total = _limit
    return None if total is None else max(0, total - sum(pool.charged_bytes for pool in _others(None)))


def make_way(memory: Any) -> None:
    """Gives all idle pools back, for a device on which a pool takes at once what it can come to need."""
    with _lock:
        for pool in _others(memory) if _limit is not None else ():
            if pool.charged_bytes and not pool.is_used:
                _release(pool)


def settle() -> None:
    """Gives idle pools back, as far as all together hold more than the budget."""
    with _lock:
        _shrink(0, None)


def _others(memory: Any) -> list[Any]:
    """All pools but this one, for which a weak proxy may stand."""
    own = None if memory is None else memory.lock
    return [pool for ref in _pools if (pool := ref()) is not None and pool.lock is not own]


def _shrink(needed: int, memory: Any) -> bool:
    """Gives idle pools back until the others hold no more than the budget without `needed` bytes."""
    while (total := _limit) is not None:
        others = _others(memory)
        excess = needed + sum(pool.charged_bytes for pool in others) - total
        if excess <= 0:
            return True
        idle = [pool for pool in others if pool.charged_bytes and not pool.is_used]
        # the one that was used last goes last
        if not any(_release(pool) for pool in sorted(idle, key=lambda pool: float(pool.last_used))):
            return False
    return True


def _release(memory: Any) -> bool:
    outer = memory.outer_lock
    locks: list[Any] = [lock for lock in (outer, memory.lock) if lock is not None]
    taken: list[Any] = []
    try:
        for lock in locks:  # two pools that want each other's wait for neither
            if not lock.acquire(timeout=WAIT_SECONDS):
                return False
            taken.append(lock)
        return bool(memory.release())
    finally:
        for lock in reversed(taken):
            lock.release()
