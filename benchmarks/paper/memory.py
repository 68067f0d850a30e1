"""Share of the K/V memory that holds tokens: reservation against paging."""

from __future__ import annotations

import statistics
from functools import lru_cache
from typing import Any

from benchmarks.paper.rows import PAPER, READ, TOLD, Row, Size, ranged
from benchmarks.paper.serving import BLOCK_SIZE, OPT_13B_SLOTS, SYSTEMS, Outcome, serve
from benchmarks.paper.traces import LONGEST, SHAREGPT, SIGMA, SIGMAS, make_trace

FIGURE_2 = {
    "Max": (20.4, 13.3, 57.3, 8.9),
    "Pow2": (26.8, 17.9, 13.6, 41.6),
    "Oracle": (38.2, 25.2, 0.0, 36.6),
}
"""Token states, reservation, internal and external fragmentation (plus others), in percent; arXiv
2309.06180."""
FIGURE_13A = {"Max": 7.00, "Pow2": 9.81, "Oracle": 13.62, "ours": 30.42}
"""Average number of running requests."""
PAGED_USED = 96.3
SPREAD = "the spread of the lengths is ours, since the paper gives only their means"


@lru_cache(maxsize=1)
def outcomes(requests: int, seeds: int) -> dict[tuple[str, float], list[Outcome]]:
    """Outcomes by system and spread, of one trace per seed; all requests wait from the start."""
    found: dict[tuple[str, float], list[Outcome]] = {}
    for sigma in SIGMAS:
        for seed in range(seeds):
            trace = make_trace(SHAREGPT, requests, seed=seed, sigma=sigma)
            for name in SYSTEMS:
                found.setdefault((name, sigma), []).append(serve(name, trace))
    return found


def _traces(size: Size) -> dict[tuple[str, float], list[Outcome]]:
    return outcomes(max(60, size.short // 4), size.seeds)


def _shares(found: dict[Any, list[Outcome]], name: str) -> dict[float, list[dict[str, float]]]:
    """Shares of the memory in each trace, by spread."""
    return {sigma: [one.usage.percent() for one in found[name, sigma]] for sigma in SIGMAS}


def _by_spread(values: dict[float, list[float]]) -> str:
    """Median and range at `SIGMA`, and the medians at the other spreads."""
    others = ", ".join(
        f"{statistics.median(values[one]):.1f} at spread {one:g}" for one in SIGMAS if one != SIGMA
    )
    return f"{ranged(values[SIGMA], '.1f')}; {others}"


def waste(size: Size) -> list[Row]:
    """PagedAttention (arXiv 2309.06180), figure 2 and section 6.2: shares of the memory while
    requests wait for room.

    The same: OPT-13B's 15.7K slots, the data set's mean lengths, the three reservations with a
    buddy allocator, blocks of 16. Different: log-normal lengths instead of the data set; their
    spread is a free parameter, so medians and ranges are over several seeds at spread 1, with the
    medians at 0.5 and 1.5 beside them; step costs come from a roofline and only weight the steps;
    all requests wait from the start, so memory is always short. Ours is the engine's scheduler and
    block manager.
    """
    found = _traces(size)
    rows, empty = [], []
    for name in SYSTEMS:
        shares = _shares(found, name)
        parts = {
            part: statistics.median(one[part] for one in shares[SIGMA]) for part in shares[SIGMA][0]
        }
        used = _by_spread({sigma: [one["used"] for one in of] for sigma, of in shares.items()})
        more = ", ".join(f"{parts[part]:.1f} {part}" for part in list(parts)[1:])
        if name == "ours":
            free = "free blocks, among them the 1 % that admission leaves to running requests"
            why = f"{SPREAD}; {free}, are external"
            published, title = f"{PAGED_USED} used", "ours"
        else:
            why, title = _WHY_MAX if name == "Max" else SPREAD, f"Orca ({name})"
            names = ("used", "reserved", "internal", "external")
            published = ", ".join(f"{share} {part}" for share, part in zip(FIGURE_2[name], names))
            empty += [100 - one["used"] for one in shares[SIGMA]]
        source = f"{PAPER}, figure 2 ({READ})"
        shown = f"used {used}; {more}"
        title = f"memory by use, {title}"
        rows.append(Row(title, shown, "% of the memory", published, source, why, parts))
    source = f"{PAPER}, figure 2 ({READ}: 61.8 to 79.6)"
    name = "memory that holds no token, best and worst reservation"
    shown = f"{min(empty):.1f} to {max(empty):.1f}"
    rows.append(Row(name, shown, "% of the memory", "60 to 80", source, SPREAD))
    wasted = {
        sigma: [100 * one["internal"] / (one["used"] + one["internal"]) for one in of]
        for sigma, of in _shares(found, "ours").items()
    }
    source = f"{PAPER}, figure 2 ({READ}: 100 - {PAGED_USED})"
    why = "" if max(wasted[SIGMA]) < 4 else SPREAD
    name = f"slots allocated and empty, ours, blocks of {BLOCK_SIZE}"
    rows.append(Row(name, _by_spread(wasted), "% of the blocks in use", "under 4", source, why))
    return rows


_WHY_MAX = (
    f"{SPREAD}: with a longer tail, running requests are longer ones, which fill more of their 2048"
    " slots"
)


def batch_size(size: Size) -> list[Row]:
    """Running requests in OPT-13B's 15.7K slots: PagedAttention (arXiv 2309.06180), figure 13a;
    and the ratio of ours to each system's, beside S4's figures for an unnamed model on an A100 of
    40 GB: 12 with FasterTransformer, 16 with Orca (reservation not stated), 48 with vLLM. The paper
    has none of the three.

    The same: slots, mean lengths, reservations. Different: log-normal lengths of a free spread, as
    in `waste`; memory is always short, while the paper's trace has 2 requests per second.
    """
    found = _traces(size)
    rows = []
    for name in SYSTEMS:
        shown = name if name == "ours" else f"Orca ({name})"
        ours = _by_spread({sigma: [one.rows for one in found[name, sigma]] for sigma in SIGMAS})
        fit = OPT_13B_SLOTS // LONGEST
        why = f"arithmetic: {fit} sequences of {LONGEST} fit; the last ones do not fill the batch"
        why = why if name == "Max" else SPREAD
        published, source = f"{FIGURE_13A[name]:.2f}", f"{PAPER}, figure 13a ({READ})"
        title = f"batch size in {OPT_13B_SLOTS} slots, {shown}"
        rows.append(Row(title, ours, "requests", published, source, why))
    said = {
        "Max": ("FasterTransformer, which reserves the longest sequence", "4 (48 over 12)"),
        "Pow2": ("Orca (Pow2)", "3 (48 over 16)"),
        "Oracle": ("Orca (Oracle)", "3 (48 over 16)"),
    }
    for name, (title, published) in said.items():
        times = {
            s: [a.rows / b.rows for a, b in zip(found["ours", s], found[name, s])] for s in SIGMAS
        }
        why = (
            f"S4 says neither model nor lengths{'' if name == 'Max' else ', nor how Orca reserves'}"
        )
        title = f"batch size, ours over {title}"
        rows.append(Row(title, _by_spread(times), "times", published, TOLD, why))
    return rows
