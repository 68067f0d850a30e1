"""Which rooms are there, for tests that see more with them; drafts whose lengths do not follow
measured times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hf_paged.kernels import cpp
from hf_paged.rooms import ROOMS, is_installed

needs_all_rooms = pytest.mark.skipif(
    not all(map(is_installed, ROOMS)), reason="looks at all rooms, and some are taken away"
)

KEEPS_PREFIXES = is_installed("fingerprints")
"""Whether prefixes stay cached after a call and after a step of an engine."""
needs_fingerprints = pytest.mark.skipif(not KEEPS_PREFIXES, reason="prefixes do not stay cached")

needs_shared_prefill = pytest.mark.skipif(
    not is_installed("shared_prefill"), reason="in transformers' own loop each row is computed"
)


def records_on_cpu() -> bool:
    """Whether steps on the CPU are recorded."""
    return is_installed("tape") and cpp.is_available()


def fix_prices(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    """From now on, steps are not observed: a draft token's price stays that of the beginning."""
    if is_installed("speculation"):
        from hf_paged.speculation.speculator import Speculator

        replace(Speculator, "note_decode_time", lambda self, num_tokens, seconds: None)
