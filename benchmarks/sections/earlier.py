"""Results that were measured before the rows of all benchmarks had one form (`runner.rows_of`): each
function reads the JSON of one benchmark and gives such rows. Where a file has no seconds of single
turns, its rows have `ratios`, the base's time over theirs within turns, or `ratio` with `interval`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks import report

Data = dict[str, Any]
THREADS = {
    "plain": "plain, one call after another",
    "plain_threads": "plain in 8 threads",
    "paged": "paged, one call after another",
    "paged_threads": "paged in 8 threads",
    "plain_batch": "plain, one call with all prompts",
}


def groups(names: Sequence[str]) -> list[list[Data]]:
    """The content of JSON files, those of one table together, with rows of today's form."""
    files = [report.result(name) for name in names]
    runs = [[run] for run in files[0]["runs"]] if "runs" in files[0] else [files]
    convert = CONVERT.get(names[0].partition("-")[0])
    return [[_converted(run, convert) for run in group] for group in runs]


def _converted(data: Data, convert: Callable[[Data], Iterator[Data]] | None) -> Data:
    if convert is None or any("system" in row and "over" in row for row in data["rows"]):
        return data
    rows = [{"over": {}, "figures": {}, **row} for row in convert(data)]
    title = data.get("title", "")
    if "bandwidth_gb_s" in data:
        title = f"Path of the kernel: {data['path']}. Read: {data['bandwidth_gb_s']} GB/s."
    elif "dtype" in data:
        title = f"{data['new_tokens']} new tokens, `{data['model']}` in {data['dtype']}"
    return data | {"facts": data.get("facts") or data["machine"], "title": title, "rows": rows}


def _row(case: str, system: str, seconds: list[float], **more: Any) -> Data:
    return {"case": case, "system": system, "seconds": seconds, **more}


def _inverse(ratio: Mapping[str, Any]) -> Data:
    """The estimate of a ratio that was taken the other way round."""
    low, high = ratio["interval"]
    return {"ratio": 1 / ratio["ratio"], "interval": [1 / high, 1 / low]}


def first_call(data: Data) -> Iterator[Data]:
    names = {"self_check": "self-check, s", "build": "kernels, s", "record": "recording, s"}
    for row in data["rows"]:
        case, system = ("compiling" if row["system"] == "compiling" else "first call"), "paged"
        low, high = row["range"]
        seconds = [low, row["first"], high] if row["turns"] > 1 else [row["first"]]
        figures = {name: row[key] for key, name in names.items()} | {"third call, s": row["later"]}
        system = "plain" if row["system"] == "plain" else system
        yield _row(case, system, seconds, turns=row["turns"], figures=figures)


def threads(data: Data) -> Iterator[Data]:
    for row in data["rows"]:
        for key, system in THREADS.items():
            one, target = row[key], 2.5 if key == "paged_threads" else None
            more: Data = {"ratio": one["throughput"], "interval": one["interval"]}
            more |= {"turns": row["turns"], "processes": 2, "equal": one["equal_tokens"]}
            more["over"] = {} if key == "paged" else {THREADS["paged"]: target}
            yield _row(f"{row['model']}, {row['dtype']}", system, [one["seconds"]], **more)


def linears(data: Data) -> Iterator[Data]:
    for row in data["rows"]:
        case = f"{row['model']}, {row['rows']} row{'s' * (row['rows'] > 1)}"
        floor = {"floor, ms": row["floor_ms"]}
        yield _row(case, "torch", [row["torch_ms"] / 1e3], figures=floor, turns=15)
        more = {"ratio": row["ratio"], "interval": row["interval"], "over": {"torch": None}}
        yield _row(case, "ours", [row["ours_ms"] / 1e3], figures=floor, turns=15, **more)


def grpo(data: Data) -> Iterator[Data]:
    seen: set[str] = set()
    for row in data["rows"]:
        size = f"4 steps of {row['prompts']} x 8 x {row['new_tokens']} tokens"
        size += ", again" if size in seen else ""
        seen.add(size)
        for title in ("rollouts", "training"):
            cell, case = row[title], f"{row['model']}, float32, {title}: {size}"
            more: Data = {"turns": row["turns"], "equal": float(row["equal"])}
            yield _row(case, "plain", [cell["plain"]], **more)
            for system, end in {"paged": "", "generate_batch": "_by_batches"}.items():
                if system in cell:
                    more |= {"ratio": cell[f"faster{end}"], "interval": cell[f"interval{end}"]}
                    target = 2.2 if (title, system) == ("rollouts", "paged") else None
                    yield _row(case, system, [cell[system]], over={"plain": target}, **more)


def speculation(data: Data) -> Iterator[Data]:
    seen: set[str] = set()
    for row in data["rows"]:
        limit, share = row.get("limit"), 100 * row["accepted"] / max(1, row["proposed"])
        figures = {"acceptance, %": share, "accepted a row and step": row["per_step"]}
        equal = float(row["equal"] and row["plain"])
        more: Data = {"turns": row["turns"], "equal": equal}
        if row["case"] not in seen:
            seen.add(row["case"])
            yield _row(row["case"], "off", [row["off_s"]], **more)
        more["ratios"] = [1 / ratio for ratio in row["ratios"]]
        more |= {"over": {"off": limit and 1 / limit}, "figures": figures}
        yield _row(row["case"], row["speculation"], [row["on_s"]], **more)
    systems: dict[str, dict[str, float]] = {}
    for row in data.get("stages", ()):
        system, _, stage = row["stage"].partition(": ")
        systems.setdefault(system, {})[f"{stage}, s"] = row["seconds"]
    for system, stages in systems.items():
        yield _row("time by stage", system, [stages.pop("whole, s")], figures=stages)


def tiers(data: Data) -> Iterator[Data]:
    for row in data["rows"]:
        case, target = f"{data['model']}, {row['what']}", 5.0 if "first" in row["what"] else 1.0
        more: Data = {"turns": len(row["ratios"]), "equal": float(row["equal"] == "yes")}
        yield _row(case, "computed", [row["computed_s"]], **more)
        more |= {"ratios": row["ratios"], "figures": {"prompt tokens found": row["found"]}}
        yield _row(case, "disk", [row["disk_s"]], over={"computed": target}, **more)


def lora(data: Data) -> Iterator[Data]:
    targets = {"one adapter a forward": 3.0, "one adapter": 0.7}
    for row in data["rows"]:
        over = {
            base: target if row["system"] == "together" else None
            for base, target in targets.items()
            if base != row["system"]
        }
        figures = {"forwards": row["forwards"], "adapters loaded": row["loads"]}
        more = {"equal": float(row["equal"] == "yes")} if row["equal"] else {}
        seconds = row["seconds_by_turn"]
        yield _row(data["title"], row["system"], seconds, over=over, figures=figures, **more)


def parallel(data: Data) -> Iterator[Data]:
    size = f"{data['prompts']} prompts, {data['new_tokens']} new tokens each"
    for row in data["rows"]:
        figures = {"K/V of each process, MiB": row["kv_bytes"] / 2**20}
        more = {"figures": figures, "equal": float(row["equal"] == "yes")}
        system = f"{row['processes']} process{'es' * (row['processes'] > 1)}"
        yield _row(f"{data['model']}, float32, {size}", system, row["seconds_by_turn"], **more)


def virtual(data: Data) -> Iterator[Data]:
    bases = ("DynamicCache", "contiguous", "on demand")
    for row in data["rows"]:
        case, _, base = row["what"].partition(", over ")
        base = {"contiguous SDPA": "contiguous"}.get(base, base.strip("'"))
        if "seconds" in row:
            figures = {"mmaps a step": row["mmaps a step"]} if "mmaps a step" in row else {}
            over = {base: row["target"] and 1 / row["target"]} if row["case"] not in bases else {}
            yield _row(case, row["case"], row["seconds"], over=over, figures=figures)
        else:
            figures = {"of contiguous bytes": row["ratio"], "at most": row["target"]}
            figures["bytes when all rows are gone"] = row["bytes after"]
            yield _row(case, row["case"], [], figures=figures)


def side_by_side(data: Data) -> Iterator[Data]:
    for row in data["rows"]:
        case = f"{row['model']}, {row['size']}, {row['workload']}"
        more = {"turns": row["turns"], "processes": 2}
        yield _row(case, "plain", [row["plain_ms"] / 1e3], **more)
        is_ragged = row["workload"].startswith("8..256")
        target = 1.3 if is_ragged else 0.91 if row["size"] == "tiny" else 1.0
        for system in ("generate", "engine"):
            one = row[system]
            equal = {"equal": float(one["equal"]), "over": {"plain": target}}
            yield _row(case, system, [], **more, **equal, **_inverse(one))


CONVERT: dict[str, Callable[[Data], Iterator[Data]]] = {
    convert.__name__: convert
    for convert in (
        first_call,
        threads,
        linears,
        grpo,
        speculation,
        tiers,
        lora,
        parallel,
        virtual,
        side_by_side,
    )
}
