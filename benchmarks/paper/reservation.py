"""Memory reserved for a request on admission, as in systems before paging."""

from __future__ import annotations

from benchmarks.paper.traces import LONGEST


def power_of_two(number: int) -> int:
    """The least power of two not below `number`."""
    return 1 << (number - 1).bit_length()


def reserve_max(prompt: int, output: int) -> int:
    """Slots for the model's longest sequence."""
    return LONGEST


def reserve_pow2(prompt: int, output: int) -> int:
    """Slots for the prompt and for the output rounded up to a power of two: at most twice what the
    output needs."""
    return min(LONGEST, prompt + power_of_two(output))


def reserve_oracle(prompt: int, output: int) -> int:
    """Slots for the exact prompt and output."""
    return prompt + output


POLICIES = {"Max": reserve_max, "Pow2": reserve_pow2, "Oracle": reserve_oracle}
"""Orca (Max), (Pow2) and (Oracle) in the PagedAttention paper; arXiv 2309.06180, section 6.1."""


class Buddy:
    """The buddy allocator (Knuth, The Art of Computer Programming, volume 1, section 2.5) over
    `num_slots` slots, in power-of-two chunks. Splits `num_slots` that is no power of two into
    several such regions, largest first.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = self.num_free = num_slots
        self._free: dict[int, set[int]] = {
            1 << order: set() for order in range(num_slots.bit_length())
        }
        self._regions: list[tuple[int, int]] = []
        start = 0
        for order in reversed(range(num_slots.bit_length())):
            size = 1 << order
            if num_slots & size:
                self._free[size].add(start)
                self._regions.append((start, size))
                start += size

    def allocate(self, num_slots: int) -> int | None:
        """Start of a chunk of `power_of_two(num_slots)` slots; `None` if no free chunk is large
        enough."""
        size = wanted = power_of_two(num_slots)
        while size in self._free and not self._free[size]:
            size *= 2
        if size not in self._free:
            return None
        start = self._free[size].pop()
        while size > wanted:
            size //= 2
            self._free[size].add(start + size)
        self.num_free -= wanted
        return start

    def release(self, start: int, num_slots: int) -> None:
        """Frees the chunk returned by `allocate(num_slots)` and merges it with its free buddies."""
        size = power_of_two(num_slots)
        self.num_free += size
        first, whole = next(
            region for region in self._regions if region[0] <= start < region[0] + region[1]
        )
        while size < whole:
            buddy = first + ((start - first) ^ size)
            if buddy not in self._free[size]:
                break
            self._free[size].remove(buddy)
            start, size = min(start, buddy), 2 * size
        self._free[size].add(start)
