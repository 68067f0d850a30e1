"""Grouping of rows with shared blocks: the savings of every grouping, counted by hand or by brute
force."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from hf_paged.kernels.triton.cascade import CascadeCosts, SharedPrefix, plan_cascade

FREE = CascadeCosts(token_bytes=10, state_bytes=0, rows_per_read=1000)


def test_what_merging_and_starting_cost_is_weighed() -> None:
    tables, seq_lens = [[1, 2], [1, 3]], [8, 8]  # one block of 4 tokens read once less: 40 bytes
    for costs, pays_off in (
        (FREE._replace(overhead_bytes=39), True),
        (FREE._replace(overhead_bytes=40), False),
        (FREE._replace(state_bytes=4), True),  # 2 rows x 2 parts, written and read: 32 bytes
        (FREE._replace(state_bytes=5), False),
        (FREE._replace(state_bytes=4, num_splits=2), False),
        (FREE._replace(rows_per_read=1), False),
    ):
        assert bool(plan_cascade(tables, seq_lens, 4, costs)) is pays_off, costs


def saving(groups: tuple[SharedPrefix, ...], costs: CascadeCosts, block_size: int) -> int:
    total = 0
    for rows, num_blocks in groups:
        reads = -(-len(rows) // costs.rows_per_read)
        total += (len(rows) - reads) * num_blocks * block_size * costs.token_bytes
        total -= 2 * len(rows) * (costs.num_splits + 1) * costs.state_bytes
    return total


def partitions(rows: list[int]) -> list[list[tuple[int, ...]]]:
    if not rows:
        return [[]]
    first, rest = rows[0], rows[1:]
    found = []
    for count in range(len(rest) + 1):
        for others in itertools.combinations(rest, count):
            left = [row for row in rest if row not in others]
            found += [[(first, *others), *more] for more in partitions(left)]
    return found


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    tables=st.lists(st.lists(st.integers(0, 1), min_size=1, max_size=4), min_size=1, max_size=5),
    last=st.integers(1, 4),
    costs=st.sampled_from((FREE, FREE._replace(state_bytes=3), FREE._replace(rows_per_read=2))),
)
def test_groups_are_valid_and_no_tree_of_prefixes_saves_more(
    tables: list[list[int]], last: int, costs: CascadeCosts
) -> None:
    size = 4
    # ids that identify their whole prefix, like blocks of a prefix tree
    tables = [
        [int("1" + "".join(map(str, table[: i + 1]))) for i in range(len(table))]
        for table in tables
    ]
    seq_lens = [(len(table) - 1) * size + last for table in tables]
    groups = plan_cascade(tables, seq_lens, size, costs)
    grouped = [row for group in groups for row in group.rows]
    assert len(grouped) == len(set(grouped))
    for rows, num_blocks in groups:
        assert len(rows) > 1 and num_blocks > 0
        assert len({tuple(tables[row][:num_blocks]) for row in rows}) == 1
        assert all(num_blocks * size < seq_lens[row] for row in rows)

    def shared(rows: tuple[int, ...]) -> int:
        most = min((seq_lens[row] - 1) // size for row in rows)
        return next(
            (n for n in range(most, 0, -1) if len({tuple(tables[row][:n]) for row in rows}) == 1), 0
        )

    best = 0
    for partition in partitions(list(range(len(tables)))):
        prefixes = tuple(
            SharedPrefix(rows, n) for rows in partition if len(rows) > 1 and (n := shared(rows))
        )
        best = max(best, saving(prefixes, costs, size))
    if costs.rows_per_read > 2:
        # with few rows per read, parts of a branch may be cheaper than the whole
        assert saving(groups, costs, size) == best
    else:
        assert 0 <= saving(groups, costs, size) <= best
