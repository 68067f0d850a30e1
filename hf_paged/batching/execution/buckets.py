"""Sizes of steps, rounded up to few values, so that few recorded steps serve many. Which steps are
recorded is up to the recorder."""

from __future__ import annotations

MIN_CHUNK_TOKENS = 16


def bucket(num_rows: int) -> int:
    """Returns the rows of the graph for `num_rows`: 1, 2, 4, 8, then in steps of 8, from 128 on in
    steps of 1/8 to 1/16 of the rows."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    power = 1 << ((num_rows - 1).bit_length() - 4)
    step = max(8, power)
    return -(-num_rows // step) * step


def power_of_two(least: int, number: int) -> int:
    """Returns the least power of two from `number` on; at least `least`."""
    return max(least, 1 << (number - 1).bit_length())


def chunk_bucket(num_tokens: int) -> int:
    """Returns the chunk tokens of the graph for `num_tokens`: 16, 24, 32, 48, 64, 96, ..."""
    size = power_of_two(MIN_CHUNK_TOKENS, num_tokens)
    smaller = size * 3 // 4
    if size > MIN_CHUNK_TOKENS and num_tokens <= smaller:
        return smaller
    return size


def draft_bucket(num_rows: int) -> int:
    """Returns the rows of the graph for `num_rows` with drafts, whose number changes in every step:
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, ..."""
    if num_rows <= MIN_CHUNK_TOKENS:
        return bucket(num_rows)
    return chunk_bucket(num_rows)
