"""What preempting a request costs, as measured: computing its tokens again, or copying its blocks out and back."""

from __future__ import annotations


class CostModel:
    """
    Chooses between recompute and swap (PagedAttention, arXiv 2309.06180, section 7.3, compares the two), by the same
    observations always the same.

    A prefill step takes `a + b * num_tokens` seconds: `a` is paid for reading the weights, however few tokens there
    are, and recomputed tokens join steps that run anyway, so they cost `b` each. `b` is the slope of a least-squares
    line through the steps seen, in which a step counts half as much `HALF_LIFE` steps later; while all steps were of
    one size, or noise hides the slope, it is the mean time per token, which is more.

    Args:
        bytes_per_second (`float`): Speed of a copy between blocks and host memory, until a swap was observed.
    """

    HALF_LIFE = 32

    def __init__(self, bytes_per_second: float) -> None:
        if not bytes_per_second > 0:
            raise ValueError(f"`bytes_per_second` is {bytes_per_second}: it must be above 0")
        self._given_speed = bytes_per_second
        self._steps = self._tokens = self._seconds = self._tokens_tokens = self._tokens_seconds = 0.0
        self._swapped_bytes = self._swap_seconds = 0.0
        self._keep = 0.5 ** (1 / self.HALF_LIFE)

    def observe_prefill(self, num_tokens: int, seconds: float) -> None:
        """A step that computed `num_tokens` tokens took so long."""
        keep = self._keep
        self._steps = keep * self._steps + 1
        self._tokens = keep * self._tokens + num_tokens
        self._seconds = keep * self._seconds + seconds
        self._tokens_tokens = keep * self._tokens_tokens + num_tokens * num_tokens
        self._tokens_seconds = keep * self._tokens_seconds + num_tokens * seconds

    def observe_swap(self, num_bytes: int, seconds: float) -> None:
        """A copy of `num_bytes`, one way, took so long."""
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
        """Speed of a copy between blocks and host memory."""
        return self._swapped_bytes / self._swap_seconds if self._swap_seconds > 0 else self._given_speed

    def choose(self, num_tokens: int, num_bytes: int) -> str:
        """
        `"recompute"` or `"swap"`, whichever is sooner done for a request whose `num_tokens` tokens would be computed
        again, or whose `num_bytes` bytes of blocks be copied out and back. `"recompute"` while no prefill was seen.
        """
        per_token = self.seconds_per_token
        if per_token is None:
            return "recompute"
        return "swap" if 2 * num_bytes / self.bytes_per_second < num_tokens * per_token else "recompute"
