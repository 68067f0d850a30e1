"""Rounds the sizes of steps up to a small set of values, so that a few recorded steps serve all
sizes. The recorder decides which steps it records."""

from __future__ import annotations

MIN_CHUNK_TOKENS = 16


def bucket(num_rows: int) -> int:
    """Returns the number of rows of the recorded step that serves `num_rows` rows: 1, 2, 4, then
    multiples of 8; above 128 rows multiples of 16, above 256 of 32, and so on."""
    if num_rows <= 8:
        return 1 << (num_rows - 1).bit_length()
    power = 1 << ((num_rows - 1).bit_length() - 4)
    step = max(8, power)
    return -(-num_rows // step) * step


def power_of_two(minimum: int, number: int) -> int:
    """Returns `number` rounded up to a power of two, but at least `minimum`."""
    return max(minimum, 1 << (number - 1).bit_length())


def chunk_bucket(num_tokens: int) -> int:
    """Returns the number of chunk tokens of the recorded step that serves `num_tokens` of them: 16,
    24, 32, 48, 64, 96, and so on."""
    size = power_of_two(MIN_CHUNK_TOKENS, num_tokens)
    smaller = size * 3 // 4
    if size > MIN_CHUNK_TOKENS and num_tokens <= smaller:
        return smaller
    return size


def draft_bucket(num_rows: int) -> int:
    """Returns the number of rows of the recorded step that serves `num_rows` rows, drafts included:
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, and so on. These are fewer sizes than `bucket` returns,
    since the number of draft tokens varies from step to step."""
    if num_rows <= MIN_CHUNK_TOKENS:
        return bucket(num_rows)
    return chunk_bucket(num_rows)
