"""What preempting a request costs, as measured: computing its tokens again, or copying its blocks out and back."""

from __future__ import annotations


class CostModel:
    """
    Chooses between recompute and swap (PagedAttention, arXiv 2309.06180, section 7.3, compares the two).

    A prefill step takes `a + b * num_tokens` seconds. Recomputed tokens join steps that run anyway, so each costs `b`:
    the slope of a least-squares line through the steps seen, in which a step counts half as much `HALF_LIFE` steps
    later, or the mean time per token where sizes are all equal or noise hides the slope.
    """

    HALF_LIFE = 32

    def __init__(self, bytes_per_second: float) -> None:
        self._given_speed = bytes_per_second  # of a copy between blocks and host memory, until a swap was observed
        self._steps = self._tokens = self._seconds = self._tokens_tokens = self._tokens_seconds = 0.0
        self._swapped_bytes = self._swap_seconds = 0.0
        self._keep = 0.5 ** (1 / self.HALF_LIFE)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step computed `num_tokens` tokens in this time."""
        keep = self._keep
        self._steps = keep * self._steps + 1
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_tokens = keep * self._tokens_tokens + num_tokens * num_tokens
        self._tokens_seconds = keep * self._tokens_seconds + num_tokens * seconds

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        """`num_bytes` were copied, one way, in this time."""
        self._swapped_bytes = self._keep * self._swapped_bytes + num_bytes
        self._swap_seconds = self._keep * self._swap_seconds + seconds

    @property
    def seconds_per_token(self) -> float | None:
        """Of one more token in a prefill step; `None` before any was seen."""
        if not self._tokens:
            return None
        mean = self._seconds / self._tokens
        variance = self._steps * self._tokens_tokens - self._tokens**2
        if variance <= 1e-6 * self._tokens**2:  # all of one size, but for rounding
            return mean
        slope = (self._steps * self._tokens_seconds - self._tokens * self._seconds) / variance
        return slope if 0 < slope < mean else mean

    @property
    def bytes_per_second(self) -> float:
        """Of a copy between blocks and host memory."""
        return self._swapped_bytes / self._swap_seconds if self._swap_seconds > 0 else self._given_speed

    def choose(self, num_tokens: int, num_bytes: int) -> str:
        """`"swap"` if copying `num_bytes` out and back takes less time than `num_tokens` tokens, else `"recompute"`."""
        per_token = self.seconds_per_token or 0.0
        return "swap" if 2 * num_bytes / self.bytes_per_second < num_tokens * per_token else "recompute"
