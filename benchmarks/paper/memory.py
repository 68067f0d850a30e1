"""How much of the memory for keys and values holds any: reservation against paging."""

from __future__ import annotations

from benchmarks.paper.measured import A100, OPT_13B_SLOTS
from benchmarks.paper.reservation import POLICIES
from benchmarks.paper.rows import PAPER, READ, TOLD, Row, Size
from benchmarks.paper.serving import BLOCK_SIZE, Outcome, serve_paged, serve_reserved
from benchmarks.paper.traces import LONGEST, SHAREGPT, make_trace

FIGURE_2 = {"Max": (20.4, 13.3, 57.3, 8.9), "Pow2": (26.8, 17.9, 13.6, 41.6), "Oracle": (38.2, 25.2, 0.0, 36.6)}
"""Token states, reservation, internal and external fragmentation (and others), in percent; arXiv 2309.06180."""
PAGED_USED = 96.3
SPREAD = "the spread of the lengths is ours, since the paper gives only their means"


def waste(size: Size) -> list[Row]:
    """
    PagedAttention (arXiv 2309.06180), figure 2 and section 6.2: shares of the memory while requests wait for room.

    The same: OPT-13B's 15.7K slots, the data set's mean lengths, the three reservations with a buddy allocator, blocks
    of 16. Different: log-normal lengths instead of the data set; steps cost what a roofline says, which only weighs the
    steps; all requests wait from the start, so that memory is always short. Ours is the scheduler and the block manager
    of the engine.
    """
    trace = make_trace(SHAREGPT, size.short)
    rows = []
    for name, policy in POLICIES.items():
        outcome = serve_reserved(trace, A100, OPT_13B_SLOTS, policy, name)
        shares = outcome.usage.percent()
        used, reserved, internal, external = FIGURE_2[name]
        published = f"{used} used, {reserved} reserved, {internal} internal, {external} external"
        rows.append(
            Row(
                f"memory by use, Orca ({name})",
                published,
                _shares(shares),
                "% of the memory",
                f"{PAPER}, figure 2 ({READ})",
                _WHY[name],
                shares,
            )
        )
    empty = [100 - row.details["used"] for row in rows if row.details]
    rows.append(
        Row(
            "memory that holds no token, best and worst reservation",
            "60 to 80",
            f"{min(empty):.1f} to {max(empty):.1f}",
            "% of the memory",
            f"{PAPER}, figure 2 ({READ}: 61.8 to 79.6)",
            SPREAD,
        )
    )
    outcome = serve_paged(trace, A100, OPT_13B_SLOTS)
    shares = outcome.usage.percent()
    why = f"{SPREAD}; free blocks, among them the 1 % that admission leaves to running requests, count as external"
    source = f"{PAPER}, figure 2 ({READ})"
    rows.append(
        Row("memory by use, ours", f"{PAGED_USED} used", _shares(shares), "% of the memory", source, why, shares)
    )
    wasted = 100 * shares["internal"] / (shares["used"] + shares["internal"])
    rows.append(
        Row(
            f"slots allocated and empty, ours, blocks of {BLOCK_SIZE}",
            "under 4",
            wasted,
            "% of the blocks in use",
            f"{PAPER}, figure 2 ({READ}: 100 - {PAGED_USED})",
            "" if wasted < 4 else SPREAD,
        )
    )
    return rows


_WHY = {
    "Max": f"{SPREAD}: with a longer tail, running requests are longer ones, which fill more of their 2048 slots",
    "Pow2": SPREAD,
    "Oracle": SPREAD,
}


def _shares(percent: dict[str, float]) -> str:
    return ", ".join(f"{share:.1f} {name}" for name, share in percent.items())


FIXED_SLOTS = 12 * LONGEST


def batch_size(size: Size) -> list[Row]:
    """
    Requests that run at a time in a fixed memory.

    First a memory of 24,576 slots, which is 12 of the longest sequences: 12 against 16 against 48 is the published
    figure as it was told; 24,576 is also 16 times 1,536 and 48 times 512, so 48 stands for sequences of 512 slots, and
    which reservation 16 stands for is our reading. Then PagedAttention (arXiv 2309.06180), figure 13a, in OPT-13B's
    15.7K slots. The same: slots, mean lengths, reservations. Different: log-normal lengths; memory is always short,
    while the paper's trace has 2 requests a second.
    """
    trace = make_trace(SHAREGPT, size.short)
    rows = []
    for slots, published, source in (
        (FIXED_SLOTS, {"Max": "12", "Pow2": "16", "ours": "48"}, TOLD),
        (
            OPT_13B_SLOTS,
            {"Max": "7.00", "Pow2": "9.81", "Oracle": "13.62", "ours": "30.42"},
            f"{PAPER}, figure 13a ({READ})",
        ),
    ):
        outcomes: dict[str, Outcome] = {
            name: serve_reserved(trace, A100, slots, policy, name) for name, policy in POLICIES.items()
        }
        outcomes["ours"] = serve_paged(trace, A100, slots)
        for name, outcome in outcomes.items():
            known = published.get(name, "")
            shown = name if name == "ours" else f"Orca ({name})"
            why = _why_batch(outcome, source) if known else ""
            details = {"slots": slots, "system": name, "preemptions": outcome.preemptions}
            rows.append(
                Row(f"batch size in {slots} slots, {shown}", known, outcome.rows, "requests", source, why, details)
            )
    return rows


def _why_batch(outcome: Outcome, source: str) -> str:
    if outcome.system == "Max":
        return "the batch is not full while the last requests of the trace finish"
    if source == TOLD and outcome.system == "ours":
        held = outcome.usage.percent()["used"] / 100 * outcome.num_slots / outcome.rows
        return f"long requests run longer, so that a running one holds {held:.0f} tokens on average; 48 is for 512"
    return SPREAD
