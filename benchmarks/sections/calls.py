"""Whole calls: `benchmarks.generate` beside plain `generate`, other engines and the roofline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks import arrivals, paired, report
from benchmarks.generate_tables import COLUMNS, OURS
from benchmarks.peers import TITLES
from benchmarks.report import Row as Data
from benchmarks.report import flow, machine_of, picture_of
from benchmarks.workloads import WORKLOADS

WHOLE_CALLS = "generate-cpu-llama-100m"
PEERS = ("peers-cpu-llama-100m", "peers-cpu-llama-100m-avx2-w1", "peers-cpu-llama-100m-avx2-w6")
PEERS += ("int8-peers-cpu-llama-100m-avx2-w6",)
INVARIANT = "generate-invariant-cpu-llama-100m-avx2-w6"
TIMES = ("workload", "system", "turns", "time", "tokens_per_s", "plain_over", "interval", "target")
TAILS = ("ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms")
MORE = ("workload", "system", "equal", *TAILS, "kv_mib", "roofline_share")
MARGIN = 1.005  # two latencies closer than this are printed alike


def targets(data: Data) -> list[dict[str, Any]]:
    """All targets of a run of `benchmarks.generate`, met or not."""
    found: list[dict[str, Any]] = []

    def add(what: str, value: Any, turns: Any, target: str) -> None:
        limit, _, outcome = target.strip("()").rpartition(": ")
        line = {"target": f"{what}, {limit}", "value": value, "turns": turns}
        found.append({**line, "outcome": outcome})

    for row in data["rows"]:
        if row.get("target"):
            interval = f" ({row['interval']})" if row.get("interval") else ""
            value = f"{report.text(row['plain_over'])}{interval}"
            add(f"{row['workload']}: plain / {row['system']}", value, row["turns"], row["target"])
    for row in data.get("peers", []):
        what = f"{row['workload']}: {row['peer']} / {row['time over']}"
        add(what, report.text(row["ratio"]), row.get("turns"), row["target"])
    for row in data.get("memory", []):
        value = row["problem"] or f"{report.text(row['value'])} {row['unit']}"
        add(f"{row['what']}, {row['system']}", value, None, row["target"] or ": not met")
    return found


def not_run(rows: Sequence[Data]) -> str:
    """Lists systems without figures, with the reasons."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "seconds" not in row:
            reasons.setdefault((row["system"], row["time"]), []).append(row["workload"])
    parts = [
        f"{system} on {', '.join(names)} ({reason})" for (system, reason), names in reasons.items()
    ]
    return f"Without figures: {'; '.join(parts)}." if parts else "Every system ran."


def slower_tails(rows: Sequence[Data]) -> str:
    """Lists workloads where our p99 is above that of the fastest plain."""
    plain: dict[str, Data] = {}
    for row in rows:
        if row["system"].startswith("plain") and row.get("plain_over") == 1:
            plain[row["workload"]] = row
    found = []
    for row in rows:
        of = plain.get(row["workload"])
        for key in ("ttft_p99_ms", "tpot_p99_ms"):
            if row["system"] in OURS and of and key in row and row[key] > MARGIN * of[key]:
                pair = f"{report.text(row[key])} against {report.text(of[key])} ms"
                found.append(f"{row['workload']} {row['system']} {COLUMNS[key][:8]} {pair}")
    if not found:
        return "No p99 of ours is above plain's."
    return f"Our p99 latencies above plain's: {'; '.join(found)}."


def equality(data: Data) -> str:
    """Explains the share of equal tokens."""
    checks = data.get("float32", [])
    wrong = [" ".join(line) for line in checks if line[2] != "equal"]
    text = (
        f"In float32 on a tiny model {len(checks) - len(wrong)} of {len(checks)} checks give"
        " plain's tokens exactly"
    )
    text += f" (not: {'; '.join(wrong)})." if wrong else "."
    own = [
        f"{row['equal']} ({row['workload']}, {row['system']})"
        for row in data["rows"]
        if row["system"].startswith("plain,") and row.get("equal") not in (None, "", "100%")
    ]
    text += " " + flow(
        """"Equal tokens" is the share of positions at which bfloat16 gives plain generate's token: after the first near
        tie that goes the other way, the texts differ."""
    )
    return text + (f" Plain generate at another batch size: {', '.join(own)}." if own else "")


def ahead_of_ours(rows: Sequence[Data]) -> str:
    """Lists columns of the arrivals in which another system is ahead of the engine."""
    latencies = [key for key in arrivals.COLUMNS if key.startswith(("ttft", "tpot", "normalized"))]
    engine = {row["rate"]: row for row in rows if row["system"] == "engine"}
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        ours = engine.get(row["rate"], {})
        for key in latencies:
            is_known = row["system"] != "engine" and key in row and key in ours
            if is_known and ours[key] > MARGIN * row[key]:
                title = arrivals.COLUMNS[key].removesuffix(", ms")
                found.setdefault((row["system"], title), []).append(report.text(row["rate"]))
    if not found:
        return "No other system is ahead of the engine."
    parts = [
        f"{system} in {title} at {', '.join(rates)} requests/s"
        for (system, title), rates in found.items()
    ]
    return f"Ahead of the engine: {'; '.join(parts)}."


def whole_calls(data: Data) -> str:
    """The section about `benchmarks.generate`."""
    rows = [row for row in data["rows"] if "seconds" in row]
    judged = targets(data)
    missed = [row for row in judged if row["outcome"] != "met"]
    limits = data["ceilings"]
    apart = {row["workload"]: row["processes"] for row in rows if row.get("processes", 1) > 1}
    shared = "; ".join(f"those of {name} ran in {count} processes" for name, count in apart.items())
    flops = ", ".join(
        f"{rate / 1e12:.3g} TFLOP/s {dtype}" for dtype, rate in limits["flops"].items()
    )
    served = data.get("arrivals", [])
    requests = next((row["requests"] for row in served if row.get("requests")), None)
    parts = [
        flow(
            f"""**Whole calls** on a random model (`{data["model"]["name"]}`) in bfloat16: one run of
            `{data["command"]}`, {machine_of(data["facts"])}. Measured ceilings: {limits["bandwidth"] / 1e9:.1f} GB/s,
            {flops}."""
        ),
        "\n".join(f"- {name}: {workload.title}" for name, workload in WORKLOADS.items()),
        flow(
            f"""Here "ours" is `generate(cache_implementation="paged")`, "engine" is `PagedEngine`, `generate_batch` is
            transformers' continuous batching, at its defaults and tuned by a short search. "plain / it" is the median
            over the turns of plain's time over the system's in the same turn, with the 95% bootstrap interval of that
            median where there are {paired.FEWEST} turns or more. A target is met if the median reaches it. W6 asks for
            "not slower": with {paired.ENOUGH} turns or more, the interval of our time over plain's must not lie wholly
            above {paired.NOT_SLOWER}. Turns alternate in order{f"; {shared}" if shared else ""}."""
        ),
        report.markdown(rows, {key: COLUMNS[key] for key in TIMES}),
        *picture_of(WHOLE_CALLS, "Speed of whole calls over plain generate, by workload"),
        *picture_of(f"{WHOLE_CALLS}-memory", "Memory of keys and values beside plain generate's"),
        flow(
            """The same turns: latencies are medians, over the turns, of each turn's percentiles. Beams have none, since
            their tokens are decided at the end."""
        ),
        report.markdown(rows, {key: COLUMNS[key] for key in MORE}),
        f"{slower_tails(rows)} {equality(data)}",
        flow(f"""{not_run(data["rows"])} Other CPU engines follow below, in separate runs."""),
        flow(
            f"""**Targets** of this run: {len(judged) - len(missed)} of {len(judged)} are met, {len(missed)} are not.
            "a / b" is a's time over b's."""
        ),
        report.markdown(judged),
    ]
    if served:
        count = f"{requests} requests" if requests else "requests"
        parts += [
            flow(
                f"""**Requests that arrive**: {count} with an eighth of ShareGPT's mean lengths, in Poisson arrivals at
                shares of the rate that the engine reaches when all requests are waiting; plain batches the requests
                that have arrived, at most {arrivals.MAX_BATCH} at a time. Normalized latency is a request's time from
                arrival to end, divided by its new tokens."""
            ),
            report.markdown(served, arrivals.COLUMNS),
            *picture_of(f"{WHOLE_CALLS}-latency", "Latency by the rate of arrivals"),
            ahead_of_ours(served),
        ]
    problems = "; ".join(data.get("problems", []))
    return "\n\n".join(parts + ([f"Failed in this run: {problems}."] if problems else []))


def processors(runs: Sequence[Data]) -> str:
    """CPU inference engines beside ours."""
    said = flow(
        f"""**Other CPU engines** on the same weights (`{runs[0]["model"]["name"]}`, bfloat16; with `--int8` 8-bit
        weights, torchao's for plain and ours, their own for the others) and the same prompts. Each runs in a separate
        process and environment, in the versions of `benchmarks/peers/*.txt`, with as many threads. A run that names no
        settings had the engines' defaults: OpenVINO without its prefix cache, vLLM without tcmalloc, the AVX2 build of
        llama.cpp, no beams. The tables show median seconds over the turns, and their ratios: above 1, the best of these
        engines is faster than ours. llama.cpp gets one turn, also in W6."""
    )
    return "\n\n".join([said, *map(_beside_engines, runs)])


def by_workload(data: Data) -> dict[str, dict[str, Data]]:
    """Rows with figures by workload and system; plain at its best batch size."""
    found: dict[str, dict[str, Data]] = {}
    for row in data["rows"]:
        if "seconds" in row and (row["plain_over"] == 1 or not row["system"].startswith("plain")):
            found.setdefault(row["workload"], {})[row["system"].partition(", batch")[0]] = row
    return found


def seconds_table(data: Data) -> str:
    """Median seconds of plain, ours and the other CPU engines; workloads in words."""
    names = {"plain": "plain `generate`", "ours": "hf_paged"}
    ran = {row["system"] for row in data["rows"]}
    names |= {name: name for name in TITLES.values() if name in ran}
    rows = []
    for workload, systems in by_workload(data).items():
        row = {"call": WORKLOADS[workload].title}
        row |= dict.fromkeys(names.values(), "not measured")
        for name, title in names.items():
            if name in systems:
                row[title] = f"{statistics.median(systems[name]['seconds']):.3g}"
        rows.append(row)
    return report.markdown(rows, {title: title for title in ("call", *names.values())})


def _beside_engines(data: Data) -> str:
    """Table of one run."""
    found = by_workload(data)
    ran = {row["system"]: row.get("settings") for row in data["rows"]}
    names, rows = [name for name in TITLES.values() if name in ran], []
    for workload, systems in found.items():
        line: dict[str, Any] = {"workload": workload, "turns": len(systems["ours"]["seconds"])}
        for name in ("plain", "ours", "engine", *names):
            if name in systems:
                line[name] = statistics.median(systems[name]["seconds"])
        peers = [name for name in names if name in line]
        if peers:
            best = min(peers, key=lambda name: line[name])
            line |= {f"{name} / best": line[name] / line[best] for name in ("ours", "engine")}
            line["best"] = best
        rows.append(line)
    columns = ["workload", "turns", "plain", "ours", "engine", *names]
    columns += ["best", "ours / best", "engine / best"]
    limits = data["ceilings"]
    said = flow(
        f"""`{data["command"]}`, {machine_of(data["facts"])}. Measured ceilings: {limits["bandwidth"] / 1e9:.1f} GB/s,
        {limits["flops"]["bfloat16"] / 1e12:.3g} TFLOP/s bfloat16:"""
    )
    more = not_run(data["rows"])
    if told := "; ".join(f"{name} {ran[name]}" for name in names if ran[name]):
        more += f" Settings: {told}."
    return "\n\n".join([said, report.markdown(rows, {name: name for name in columns}), more])


def stages(runs: Sequence[Data]) -> str:
    """Time of the stages of calls, as far as token timestamps tell."""
    rows = []
    for data in runs:
        for row in data["rows"]:
            if row["system"] in ("plain", *OURS) and "ttft_p99_ms" in row:
                seconds, first = statistics.median(row["seconds"]), row["ttft_p99_ms"] / 1000
                share = float(row["roofline_share"].rstrip("%")) / 100
                line = {"CPU": data["facts"]["isa"], "workload": row["workload"]}
                line |= {"system": row["system"], "seconds": seconds}
                line |= {"until all first tokens": first, "after them": seconds - first}
                rows.append(line | {"roofline": share * seconds})
    said = flow(
        """**Where the time goes** in those runs: seconds until the last row's first token (prompts, and the rows
        that decode beside them), seconds after it, and the roofline of the whole call (weights read once per step,
        products at the best measured rate). W6's target is 1.5 times the roofline:"""
    )
    return f"{said}\n\n{report.markdown(rows)}"


def invariance(data: Data) -> str:
    """Cost of `batch_invariant`."""
    shown = ("workload", "system", "time", "turns", "ttft_p50_ms", "tpot_p50_ms")
    columns = {key: COLUMNS[key] for key in shown}
    said = flow(
        f"""**The same bits in any batch** (`PagedConfig(batch_invariant=True)`), against the engine without it,
        `{data["command"]}`, {machine_of(data["facts"])}:"""
    )
    return f"{said}\n\n{report.markdown(data['rows'], columns)}"
