"""Server processes and what waits for them."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from typing import Any

TIME_LIMIT = 300  # seconds, for busy machines


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


def wait_for(get: Callable[[], Any], told: Callable[[], str] = lambda: "it never came") -> Any:
    """Calls `get` until it returns something true, which is returned."""
    end = time.monotonic() + TIME_LIMIT
    while not (found := get()):
        assert time.monotonic() < end, told()
        time.sleep(0.1)
    return found
