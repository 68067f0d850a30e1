"""Where the rows of a step lie in the addresses of a layer, and their parts for the portable
attention."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from ..attention.backends.parts import Member, Part, Parts, geometries_of, part_maker
from ..step import StepMetadata


@dataclass(frozen=True, eq=False)
class Placement:
    slots: list[int]  # per row of a step
    firsts: list[int]  # position in the slot, in tokens, of each row's position 0 in the step


class PlacedRows(NamedTuple):
    """Where the rows of a step can be read. Stays readable while the step and these views live,
    whatever else is mapped meanwhile."""

    placement: Placement
    keys: Tensor  # (slots, heads, max_len, dim); only placed rows may be read
    values: Tensor
    step: StepMetadata

    def parts(self, kv_heads: int) -> Parts:
        parts: Parts = self.step.plan(_plan, kv_heads, self.placement)
        return parts

    def view(self, part: Part) -> tuple[Tensor, Tensor]:
        visible = slice(part.offset, part.offset + part.length)
        return self.keys[part.slots, :, visible], self.values[part.slots, :, visible]


def _plan(step: StepMetadata, kv_heads: int, placement: Placement) -> Parts:
    """The parts of rows that are contiguous in memory: one for rows of one geometry in neighbouring
    slots."""
    geometries, is_complete = geometries_of(step)
    heads = slice(0, kv_heads)
    parts = []
    for geometry, seeing in geometries:
        runs: list[tuple[int, int, list[Member]]] = []
        expected = None
        for row, low in seeing:
            slot = placement.slots[row]
            offset = placement.firsts[row] + low
            if (row, slot, offset) != expected:
                runs.append((slot, offset, []))
            runs[-1][2].append((row, low))
            expected = (row + 1, slot + 1, offset)
        make_part = part_maker(step, geometry, geometries)
        for slot, offset, members in runs:
            row, _ = members[0]
            rows = slice(row, row + len(members))
            slots = slice(slot, slot + len(members))
            parts.append(make_part(rows, tuple(members), heads, offset, slots=slots))
    return tuple(parts), is_complete
