"""Limits the bytes of all pools of a process together, and frees idle pools. Each `PagedMemory`
reports its own bytes."""

from __future__ import annotations

import operator
import weakref
from typing import Any

from .. import forks
from ..config import is_whole
from ..threads import attempt
from ..weak_sets import members_of

# seconds to wait for an idle pool's lock: threads that only read the pool's figures hold the lock
# for less time
WAIT_SECONDS = 0.1

PATIENCE = 10.0  # seconds for which a request waits for memory that other models use

_lock = forks.rlock()
_limit: int | None = None  # bytes
_pools = weakref.WeakSet[Any]()  # all memories that the budget limits


def budget(num_bytes: int | None) -> None:
    """Limits the total bytes of the blocks of all models and caches of this process, from now on. A
    pool that needs more than remains frees idle pools, least recently used first, and evicts its
    cached prefixes; a request that still does not fit waits, or raises [`OutOfBlocksError`]. While
    the pools exceed the limit, they do not grow, and are freed once idle. Host memory of swapped
    requests and of `prefix_tiers` does not count.

    Args:
        num_bytes (`int`, *optional*): At least 1. `None` removes the limit.

    Raises:
        ValueError: for any other number.
    """
    global _limit
    if num_bytes is not None and not (is_whole(num_bytes) and num_bytes > 0):
        raise ValueError(
            f"the budget is {num_bytes!r}: it must be None or a whole number of bytes, at least 1,"
            " such as 8 << 30"
        )
    with _lock:
        _limit = None if num_bytes is None else int(num_bytes)
        enforce()


def limit(memory: Any = None) -> int | None:
    """Returns the budget in bytes; `None` without a budget, or if `memory` is exempt from it."""
    if memory is None or memory.is_bounded:
        return _limit
    return None


def join(memory: Any) -> None:
    """Adds this `PagedMemory` to the pools that the budget limits."""
    _pools.add(memory)


def bytes_of_others(memory: Any) -> int:
    """Returns the bytes of all other pools that are in use."""
    return sum(pool.charged_bytes for pool in _other_pools(memory) if pool.is_used)


def charge(memory: Any, more_bytes: int = 0) -> bool:
    """Charges this pool, whose lock the caller holds, for its current bytes plus `more_bytes`.
    Returns `False`, with nothing charged, if they do not fit in the budget alongside other pools,
    even after idle pools are freed."""
    needed_bytes = memory.occupied_bytes + more_bytes
    if limit(memory) is None or needed_bytes <= memory.charged_bytes:
        memory.charged_bytes = needed_bytes
        return True
    with _lock:
        if not _free_until_fits(needed_bytes, memory):
            return False
        memory.charged_bytes = needed_bytes
        return True


def num_uncharged_bytes() -> int | None:
    """Returns the bytes of the budget that are charged to no pool; `None` without a budget."""
    total = _limit
    if total is None:
        return None
    charged_bytes = sum(pool.charged_bytes for pool in _other_pools(None))
    return max(0, total - charged_bytes)


def release_idle(memory: Any) -> None:
    """Under a budget, frees all idle pools except this one. Called before this pool allocates a
    layer, so that the layer gets all of its reserved blocks at once if the budget allows."""
    with _lock:
        if _limit is None:
            return
        for pool in _idle_pools(_other_pools(memory)):
            release(pool)


def enforce() -> None:
    """Frees idle pools, least recently used first, while all pools together exceed the budget."""
    with _lock:
        _free_until_fits(0, None)


def _other_pools(memory: Any) -> list[Any]:
    """Returns all live pools except `memory` (which may be a weak proxy, or `None`)."""
    lock = None if memory is None else memory.lock
    return [pool for pool in members_of(_pools) if pool.lock is not lock]


def _idle_pools(pools: list[Any]) -> list[Any]:
    """Returns the pools that hold memory and no used block, least recently used first."""
    idle_pools = [pool for pool in pools if pool.charged_bytes and not pool.is_used]
    return sorted(idle_pools, key=operator.attrgetter("last_used"))


def _free_until_fits(needed_bytes: int, memory: Any) -> bool:
    """Frees idle pools until `needed_bytes` of `memory` fit in the budget alongside other pools.
    Returns whether they fit."""
    while (total := _limit) is not None:
        other_pools = _other_pools(memory)
        charged_bytes = sum(pool.charged_bytes for pool in other_pools)
        excess = needed_bytes + charged_bytes - total
        if excess <= 0:
            return True
        if not any(release(pool) for pool in _idle_pools(other_pools)):
            return False
    return True


def release(memory: Any) -> bool:
    """Frees a pool unless it is in use or locked; returns whether it did."""
    # with timeouts, since two threads that each hold a pool's lock may each try to free the other's
    # pool
    with attempt(memory.outer_lock or memory.lock, WAIT_SECONDS) as is_outer_held:
        if not is_outer_held:
            return False
        with attempt(memory.lock, WAIT_SECONDS) as is_held:
            return is_held and memory.release()
