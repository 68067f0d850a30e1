"""Drafts whose lengths do not follow measured times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hf_paged.speculation import speculator
from hf_paged.speculation.sources import StepCosts


class FixedCosts(StepCosts):
    """Has no observations: a draft token's price stays that of the beginning."""

    def observe(self, num_tokens: int, seconds: float) -> None:
        pass


def fix_prices(replace: Callable[[Any, str, Any], None] = setattr) -> None:
    replace(speculator, "StepCosts", FixedCosts)
