"""README's table and the first page of the figures: what a person reads before the tables."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks import all as whole_run
from benchmarks import paired, report, tables
from benchmarks.peers import TITLES
from benchmarks.report import Row, flow
from benchmarks.runner import Data
from benchmarks.workloads import ALL, WORKLOADS

FILES = {stage.name: stage.file for stage in whole_run.STAGES}
WHOLE = FILES["whole"]
PLAIN = "plain", "plain in threads"  # the second of W9
AT_BEST = "of plain's settings (batch size, threads) the fastest counts"
TITLE_OF = {name: f"{name} ({workload.title})" for name, workload in ALL.items()}


class Beside(NamedTuple):
    """One workload: ours beside plain `generate` and the fastest other engine."""

    name: str
    speed: paired.Estimate  # plain's time over ours
    share: float  # our peak bytes of K/V over plain's
    engine: str = ""  # name of the fastest other engine; empty if none ran
    over_engine: paired.Estimate | None = None  # its time over ours


def beside(rows: list[Data]) -> Iterator[Beside]:
    """Yields the workloads W1 to W10 that were run, in order."""
    for name in ALL:
        plain, ours = fastest(rows, name, PLAIN), tables.base_of(rows, name, "ours")
        if plain is None or ours is None:
            continue
        share = ours["figures"]["K/V, MiB"] / plain["figures"]["K/V, MiB"]
        workload = Beside(name, tables.ratio_of(plain, ours), share)
        if best := fastest(rows, name, TITLES.values()):
            ratio = tables.ratio_of(best, ours)
            workload = workload._replace(engine=best["system"], over_engine=ratio)
        yield workload


def fastest(rows: list[Data], case: str, systems: Iterable[str]) -> Data | None:
    """The row of the fastest of these systems; `None` if none ran."""
    ran = [row for system in systems if (row := tables.base_of(rows, case, system))]
    return min(ran, key=lambda row: statistics.median(row["seconds"]), default=None)


def processor(facts: Row) -> str:
    """The processor of a run as a reader knows it."""
    return f"{facts['cores']} cores ({facts['cpu'].replace('(R)', '')})"


def hardware(data: Mapping[str, Any]) -> str:
    """The model, the hardware, the day and the revision of a run."""
    facts, model = data["facts"], data["title"].partition(". ")[0]
    parts = model, processor(facts), facts["date"].split()[0], report.revision_of(facts)
    return ", ".join(parts)


def dtype_of(data: Mapping[str, Any]) -> str:
    """The dtype of a run's weights."""
    return "bfloat16" if "bfloat16)" in data["title"].partition(". ")[0] else "float32"


def headline() -> str:
    """The six rows of README, and those that are lost."""
    data = report.result(WHOLE)
    workloads = [one for one in beside(data["rows"]) if one.name in WORKLOADS]
    rows = [
        {
            "one call of `generate`": TITLE_OF[one.name],
            "plain's time / paged": one.speed.text(2),
            "paged memory / plain's": f"{one.share:.0%}",
            "fastest other engine": one.engine or "not measured",
            "its time / paged": one.over_engine.text(2) if one.over_engine else "",
        }
        for one in workloads
    ]
    repeated = (
        f"python -m benchmarks.generate --device cpu --no-peers --only W6 --dtype {dtype_of(data)}"
    )
    said = f"""Above 1, the paged call is faster. {losses(workloads)} {in_other_dtype()} Medians over turns with their 95% intervals, or their
        range below {paired.FEWEST} turns; {AT_BEST}. `{data["command"]}`: {hardware(data)}. Memory: peak bytes of keys and
        values. `{repeated}` repeats a row (`W1` to `W6`) beside plain alone, in the environment of
        [the benchmarks](benchmarks/README.md); `--peers`, as above, installs the other engines and adds them."""
    return f"{report.markdown(rows)}\n\n{flow(said)}"


def in_other_dtype() -> str:
    """The sentence on the same calls in the dtype that the six rows are not in."""
    speeds = [one.speed for one in beside(rows_of("other_dtype")) if one.name in WORKLOADS]
    if not speeds:
        return ""
    data = report.result(FILES["other_dtype"])
    dtype, facts = dtype_of(data), data["facts"]
    without = dtype == "bfloat16" and facts["bf16"] == "no instructions"
    why = ", for which this processor has no instructions" if without else ""
    return f"In {dtype}{why}, plain's time is {span(speeds)} times ours."


def losses(workloads: Iterable[Beside]) -> str:
    """Returns the sentence that says in which workloads the paged call is behind, and in which no
    other engine was measured."""
    slower, larger, behind, alone = [], [], [], []
    for one in workloads:
        alone += [] if one.engine else [one.name]
        slower += [one.name] if one.speed.value < 1 else []
        larger += [one.name] if one.share > 1 else []
        if one.over_engine is not None and one.over_engine.value < 1:
            behind.append(
                f"{one.name} ({one.engine}, {1 / one.over_engine.value:.2f} times its time)"
            )
    parts = [f"slower than plain `generate` in {', '.join(slower)}"] if slower else []
    parts += [f"more memory than plain `generate` in {', '.join(larger)}"] if larger else []
    parts += [f"slower than another engine in {', '.join(behind)}"] if behind else []
    said = f"**Where it loses**: {'; '.join(parts)}." if parts else "It loses nowhere."
    return f"{said} No other engine was measured in {', '.join(alone)}." if alone else said


def rows_of(stage: str) -> list[Data]:
    """The rows of a stage; none if it has not run."""
    if not report.exists(FILES[stage]):
        return []
    data = report.result(FILES[stage])
    return [row for run in data.get("runs", [data]) for row in run["rows"]]


def ratios(stage: str, base: str, system: str) -> dict[str, paired.Estimate]:
    """By case, the base's time over the system's, of a stage."""
    return {
        row["case"]: ratio
        for row, other, ratio, _ in tables.comparisons(rows_of(stage))
        if other == base and row["system"].startswith(system)
    }


def span(estimates: Iterable[paired.Estimate]) -> str:
    """Least and greatest ratio."""
    values = [one.value for one in estimates]
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


NAMES = {
    "plain": "plain `generate`",
    "off": "the same without drafts",
    "computed": "computing it",
}
"""Of systems that ours are compared with."""
FEATURES = (
    ("rollouts", "rollouts of TRL's GRPO, `llama-24m`", "paged", "plain"),
    ("trainer", "`Seq2SeqTrainer`'s evaluations, T5-small and `llama-24m`", "paged", "plain"),
    ("encoders", "T5, BART and Whisper", "generate", "plain"),
    ("encoders", "the same on a `PagedEngine`", "engine", "plain"),
    ("hybrids", "other architectures, hybrids among them", "generate", "plain"),
    ("hybrids", "the same on a `PagedEngine`", "engine", "plain"),
    ("speculation", "edits of a text by a tiny model, drafts by n-grams", "n-grams", "off"),
    ("adapters", "rows over several adapters", "together", "one adapter a forward"),
    ("tiers", "first token of `qwen2.5-0.5b`, its prompt on disk", "disk", "computed"),
)
"""A stage, what it shows, our system and the one that it is compared with."""


def features() -> str:
    """The table of what is not in the whole calls."""
    rows = []
    for stage, title, system, base in FEATURES:
        if speeds := list(ratios(stage, base, system).values()):
            slower = [speed for speed in speeds if speed.value < 1]
            row = {"what": title, "beside": NAMES.get(base, base), "cases": len(speeds)}
            row["its time / ours"] = span(speeds)
            rows.append(row | {"cases where ours is slower": len(slower)})
    return report.markdown(rows)


def overview() -> str:
    """The first page: whole calls, the picture, and the features."""
    data = report.result(WHOLE)
    workloads = list(beside(data["rows"]))
    least, most = (end(workloads, key=lambda one: one.share) for end in (min, max))
    first = f"""On {hardware(data)}, plain `generate` takes {span(one.speed for one in workloads)} times as long as a
        paged call, whose keys and values take {least.share:.0%} ({least.name}) to
        {most.share:.0%} ({most.name}) of its memory; {AT_BEST}."""
    said = f"{flow(first)} {losses(workloads)}"
    name, shown = f"{WHOLE}-memory.png", "Memory of keys and values beside plain generate's"
    picture = f"![{shown}](../benchmarks/results/{name})"
    return "\n\n".join([said, picture, features(), missing()])


def missing() -> str:
    """Stages that the last run failed in, or has not run."""
    if not report.exists(whole_run.NAME):
        return "These figures are of several runs, before `python -m benchmarks.all`."
    run = report.result(whole_run.NAME)
    reasons = {one["name"]: one["reason"] for one in run["stages"]}
    names = [stage.name for stage in whole_run.STAGES if reasons.get(stage.name, "not run")]
    failed = [f"{name} ({reasons.get(name, 'not run')})" for name in names]
    said = f"`{run['command']}`, {len(whole_run.STAGES)} stages"
    if "repeated" in run:
        said += f", some of them by `{run['repeated']}`"
    return f"{said}; not complete: {'; '.join(failed)}." if failed else f"{said}, all complete."
