"""Which rooms are there, for tests that see more with them."""

from __future__ import annotations

import pytest

from hf_paged.kernels import cpp
from hf_paged.rooms import ROOMS, is_installed

needs_all_rooms = pytest.mark.skipif(
    not all(map(is_installed, ROOMS)), reason="looks at all rooms, and some are taken away"
)


def records_on_cpu() -> bool:
    """Whether steps on the CPU are recorded."""
    return is_installed("tape") and cpp.is_available()
