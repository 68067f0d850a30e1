"""
The figures of README.md, docs and benchmarks/README.md, rendered from the committed JSON files between their marks.

    python -m benchmarks.readme [--check]

No figure there is written by hand: `tests/regressions/test_truth.py` renders the text again and compares.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import arrivals, paired, report
from benchmarks.generate_tables import COLUMNS, OURS
from benchmarks.grpo import TARGET
from benchmarks.grpo import table as rollout_table
from benchmarks.linears import TARGET as PRODUCT_TARGET
from benchmarks.linears import TURNS as PRODUCT_TURNS
from benchmarks.linears import table as product_table
from benchmarks.lora import pooled as lora_rows
from benchmarks.paper.article import TABLES as S4_TABLES
from benchmarks.paper.rows import TOLD, TOLD_S1, TOLD_S2
from benchmarks.paper.vattention import TABLES as S1_TABLES
from benchmarks.parallel import COMPUTED, LENGTH, MAX_ROWS
from benchmarks.parallel import pooled as parallel_rows
from benchmarks.peers import TITLES
from benchmarks.report import RESULTS
from benchmarks.side_by_side import table as side_by_side_table
from benchmarks.speculation import STAGES
from benchmarks.speculation import pooled as speculation_rows
from benchmarks.threads import table as thread_table
from benchmarks.virtual import pooled as virtual_rows
from benchmarks.workloads import WORKLOADS

ROOT = Path(__file__).resolve().parent.parent
WHOLE_CALLS, ATTENTION, PAPER = "generate-cpu-llama-100m", "attention-cpu", "paper-cpu"
ARCHITECTURES = "architectures"
THREADS, GRPO, SIDE_BY_SIDE = "threads-cpu-llama-100m", "grpo-cpu-llama-24m", "side_by_side-cpu"
BATCHES = "grpo-cpu-llama-24m-avx2"
SPECULATION = ("speculation-cpu-1", "speculation-cpu-2")
DRAFT_STAGES = "speculation-stages-cpu"
TIERS = ("tiers-cpu-1", "tiers-cpu-2", "tiers-w3-cpu-1", "tiers-w3-cpu-2")
QUANTIZED = ("kv-int8-cpu-1", "kv-int8-cpu-2")
LORA, PARALLEL, VIRTUAL = (tuple(f"{name}-cpu-{run}" for run in (1, 2)) for name in ("lora", "parallel", "virtual"))
LINEARS = ("linears-cpu", "linears-cpu-avx2")
PEERS = ("peers-cpu-llama-100m", "peers-cpu-llama-100m-avx2-w1", "peers-cpu-llama-100m-avx2-w6")
PEERS += ("int8-peers-cpu-llama-100m-avx2-w6",)
INVARIANT = "generate-invariant-cpu-llama-100m-avx2-w6"
STEPS = ("decode_step-cpu", "decode_step-cpu-1x512")
TIMES = ("workload", "system", "turns", "time", "tokens_per_s", "plain_over", "interval", "target")
MORE = ("workload", "system", "equal", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms", "kv_mib")
MORE += ("roofline_share",)
MARGIN = 1.005  # below that two latencies are printed alike

Data = Mapping[str, Any]


def read(name: str, directory: Path = RESULTS) -> dict[str, Any]:
    """The content of a result."""
    return report.read(directory / f"{name}.json")


def read_those(names: Sequence[str], directory: Path = RESULTS) -> list[dict[str, Any]]:
    """The contents of those results that are there."""
    return [read(name, directory) for name in names if (directory / f"{name}.json").exists()]


def picture_of(name: str, said: str) -> list[str]:
    """A picture of a result, if it is there."""
    return [f"![{said}](../benchmarks/results/{name}.png)"] if (RESULTS / f"{name}.png").exists() else []


def flow(text: str) -> str:
    """One paragraph in one line."""
    return " ".join(text.split())


def machine_of(facts: Data) -> str:
    """One line about where and on what a run was made."""
    isa = f" ({facts['isa']}, bfloat16: {facts['bf16']})" if facts.get("bf16") else ""
    return flow(
        f"""{facts["date"]} UTC, revision {facts["revision"]} (work tree: {facts.get("tree", "not recorded")});
        {facts["cpu"]}{isa}, {facts["cores"]} cores, {facts["threads"]} threads, {facts["ram_gib"]} GiB, load
        {facts["load_1min"]} at the start; Python {facts["python"]}, torch {facts["torch"]}, transformers
        {facts["transformers"]}"""
    )


def targets(data: Data) -> list[dict[str, Any]]:
    """Every target of a run of `benchmarks.generate`, met or not."""
    found: list[dict[str, Any]] = []

    def add(what: str, value: Any, turns: Any, target: str) -> None:
        limit, _, outcome = target.strip("()").rpartition(": ")
        found.append({"target": f"{what}, {limit}", "value": value, "turns": turns, "outcome": outcome})

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
    """Systems without figures, and why."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        if "seconds" not in row:
            reasons.setdefault((row["system"], row["time"]), []).append(row["workload"])
    parts = [f"{system} on {', '.join(names)} ({reason})" for (system, reason), names in reasons.items()]
    return f"Without figures: {'; '.join(parts)}." if parts else "Every system ran."


def slower_tails(rows: Sequence[Data]) -> str:
    """Where a p99 of ours is above that of the fastest plain."""
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
    return f"p99 latencies of ours above plain's: {'; '.join(found)}." if found else "No p99 of ours is above plain's."


def equality(data: Data) -> str:
    """What the share of equal tokens says."""
    checks = data.get("float32", [])
    wrong = [" ".join(line) for line in checks if line[2] != "equal"]
    text = f"In float32 on a tiny model {len(checks) - len(wrong)} of {len(checks)} checks give plain's tokens exactly"
    text += f" (not: {'; '.join(wrong)})." if wrong else "."
    own = [
        f"{row['equal']} ({row['workload']}, {row['system']})"
        for row in data["rows"]
        if row["system"].startswith("plain,") and row.get("equal") not in (None, "", "100%")
    ]
    text += " " + flow(
        """"Equal tokens" is the share of tokens that bfloat16 gives at the same place as plain generate: a text goes on
        otherwise after its first near tie that falls the other way."""
    )
    return text + (f" Plain generate at another batch size: {', '.join(own)}." if own else "")


def ahead_of_ours(rows: Sequence[Data]) -> str:
    """Columns of the arrivals in which another system is ahead of the engine."""
    columns = {key: arrivals.COLUMNS[key] for key in arrivals.COLUMNS if key.startswith(("ttft", "tpot", "normalized"))}
    engine = {row["rate"]: row for row in rows if row["system"] == "engine"}
    found: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        ours = engine.get(row["rate"], {})
        for key, title in columns.items():
            if row["system"] != "engine" and key in row and key in ours and ours[key] > MARGIN * row[key]:
                found.setdefault((row["system"], title.removesuffix(", ms")), []).append(report.text(row["rate"]))
    parts = [f"{system} in {title} at {', '.join(rates)} requests/s" for (system, title), rates in found.items()]
    return f"Ahead of the engine: {'; '.join(parts)}." if parts else "No other system is ahead of the engine."


def whole_calls(data: Data) -> str:
    """The section about `benchmarks.generate`."""
    rows = [row for row in data["rows"] if "seconds" in row]
    titles = data.get("workloads") or {name: workload.title for name, workload in WORKLOADS.items()}
    judged = targets(data)
    missed = [row for row in judged if row["outcome"] != "met"]
    limits = data["ceilings"]
    apart = {row["workload"]: row["processes"] for row in rows if row.get("processes", 1) > 1}
    shared = "; ".join(f"those of {name} ran in {count} processes" for name, count in apart.items())
    flops = ", ".join(f"{rate / 1e12:.3g} TFLOP/s {dtype}" for dtype, rate in limits["flops"].items())
    served = data.get("arrivals", [])
    requests = next((row["requests"] for row in served if row.get("requests")), None)
    parts = [
        flow(
            f"""**Whole calls** on a random model (`{data["model"]["name"]}`) in bfloat16: one run of
            `{data["command"]}`, {machine_of(data["facts"])}. Measured ceilings: {limits["bandwidth"] / 1e9:.1f} GB/s,
            {flops}."""
        ),
        "\n".join(f"- {name}: {title}" for name, title in titles.items()),
        flow(
            f"""Here "ours" is `generate(cache_implementation="paged")`, "engine" is `PagedEngine`, `generate_batch` is
            transformers' continuous batching, at its defaults and tuned by a short search. "plain / it" is the median
            over the turns of plain's time over the system's in the same turn, with the 95% bootstrap interval of that
            median where there are {paired.FEWEST} turns or more. A target is met if the median reaches it. W6 asks for
            "not slower": with {paired.ENOUGH} turns or more, the interval of our time over plain's must not lie wholly
            above {paired.NOT_SLOWER}. Turns alternate in order{f"; {shared}" if shared else ""}."""
        ),
        report.markdown(rows, {key: COLUMNS[key] for key in TIMES}),
        f"![Speed of whole calls over plain generate, by workload](../benchmarks/results/{WHOLE_CALLS}.png)",
        flow(
            """The same turns: latencies are each turn's percentiles, medians over the turns; beams have none, since
            their tokens are settled at the end."""
        ),
        report.markdown(rows, {key: COLUMNS[key] for key in MORE}),
        f"{slower_tails(rows)} {equality(data)}",
        flow(f"""{not_run(data["rows"])} Engines made for processors are below, in a run of their own."""),
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
                f"""**Requests that arrive**: {count} of an eighth of ShareGPT's mean lengths, Poisson arrivals at
                shares of what the engine serves when all wait; plain takes what has arrived, at most
                {arrivals.MAX_BATCH} at a time. Normalized latency is a request's time from arrival to
                end over its new tokens."""
            ),
            report.markdown(served, arrivals.COLUMNS),
            ahead_of_ours(served),
        ]
    problems = "; ".join(data.get("problems", []))
    return "\n\n".join(parts + ([f"Failed in this run: {problems}."] if problems else []))


def processors(runs: Sequence[Data]) -> str:
    """Engines made for processors beside ours."""
    said = flow(
        f"""**Engines made for processors** on the same weights (`{runs[0]["model"]["name"]}`, bfloat16; with `--int8`
        8-bit weights, torchao's for plain and ours, their own for the others) and prompts. Each runs in a process and
        an environment of its own, in the versions of `benchmarks/peers/*.txt`, at its defaults, on as many threads.
        Seconds, medians over the turns, and their ratios: above 1 the best of them is faster than ours. llama.cpp gets
        one turn, in W6, too."""
    )
    return "\n\n".join([said, *map(_beside_engines, runs)])


def _beside_engines(data: Data) -> str:
    """The table of one run."""
    found: dict[str, dict[str, Data]] = {}
    for row in data["rows"]:
        if "seconds" in row and not row["system"].startswith("plain, "):
            found.setdefault(row["workload"], {})[row["system"]] = row
    names, rows = list(TITLES.values()), []
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
    columns = ["workload", "turns", "plain", "ours", "engine", *names, "best", "ours / best", "engine / best"]
    limits = data["ceilings"]
    said = flow(
        f"""`{data["command"]}`, {machine_of(data["facts"])}. Measured ceilings: {limits["bandwidth"] / 1e9:.1f} GB/s,
        {limits["flops"]["bfloat16"] / 1e12:.3g} TFLOP/s bfloat16:"""
    )
    problems = not_run(data["rows"])
    return "\n\n".join([said, report.markdown(rows, {name: name for name in columns}), problems])


def stages(runs: Sequence[Data]) -> str:
    """Where the time of calls goes, as far as their tokens tell."""
    rows = []
    for data in runs:
        for row in data["rows"]:
            if row["system"] in ("plain", *OURS) and "ttft_p99_ms" in row:
                seconds, share = statistics.median(row["seconds"]), float(row["roofline_share"].rstrip("%")) / 100
                first, floor = row["ttft_p99_ms"] / 1000, share * seconds
                line = {"CPU": data["facts"]["isa"], "workload": row["workload"], "system": row["system"]}
                line |= {"seconds": seconds, "until all first tokens": first, "after them": seconds - first}
                rows.append(line | {"roofline": floor})
    said = flow(
        """**Where the time goes** in those runs: seconds until the first token of the last row (prompts, and what
        decodes beside them), after it, and what the roofline gives the whole call (weights read once a step, products
        at the best measured rate). W6 aims at 1.5 times the roofline:"""
    )
    return f"{said}\n\n{report.markdown(rows)}"


def invariance(data: Data) -> str:
    """What `batch_invariant` costs."""
    columns = {key: COLUMNS[key] for key in ("workload", "system", "time", "turns", "ttft_p50_ms", "tpot_p50_ms")}
    said = flow(
        f"""**The same bits in any batch** (`PagedConfig(batch_invariant=True)`) beside the engine without it,
        `{data["command"]}`, {machine_of(data["facts"])}:"""
    )
    return f"{said}\n\n{report.markdown(data['rows'], columns)}"


def attention(data: Data) -> str:
    """The excerpt of `benchmarks.attention`."""
    titles = {"qwen2.5-0.5b": "Qwen2.5-0.5B", "llama-3.1-8b": "Llama-3.1-8B"}
    found: dict[tuple[str, str, str], dict[str, Data]] = {}
    for row in data["rows"]:
        if row["heads"] in titles and (row["block_size"], row["dtype"]) == (16, "bf16"):
            found.setdefault((row["heads"], row["phase"], row["case"]), {})[row["contender"]] = row
    rows = []
    for (heads, phase, case), by_name in found.items():
        line: dict[str, Any] = {"heads of": titles[heads], "phase": phase, "rows x tokens": case}
        for name, title in (("contiguous sdpa", "contiguous SDPA, µs"), ("ours", "ours, µs")):
            line[title] = round(statistics.median(by_name[name]["us"]))
        line["ours / contiguous"] = f"{by_name['ours']['over_contiguous']:.2f}"
        for name in ("HF sdpa", "HF eager", "flex_attention"):
            over = by_name.get(name, {}).get("over_contiguous")
            line[name] = "" if over is None else f"{over:.2f}"
        rows.append(line)
    said = flow(
        f"""**Attention alone** over a model's worth of layers, `{data["command"]}`, {machine_of(data["facts"])};
        medians in microseconds a layer. "Contiguous" is SDPA over contiguous keys and values at its best, the ideal
        without paging; the last four columns are times over it, so that above 1 is slower than the ideal:"""
    )
    more = flow(
        f"""More shapes, block sizes, the portable path and float32:
        [{ATTENTION}.md](../benchmarks/results/{ATTENTION}.md) and [a picture](../benchmarks/results/{ATTENTION}.png).
        Target of chunks and prompts: at most 1.02."""
    )
    return f"{said}\n\n{report.markdown(rows)}\n\n{more}"


def threads(data: Data) -> str:
    """The table of `benchmarks.threads`."""
    said = flow(
        f"""**Threads**: 8 threads, each of which calls `generate` with one prompt of 8 to 64 tokens for
        {data["rows"][0]["new_tokens"]} more, against the same calls one after another,
        `python -m benchmarks.threads`, {machine_of(data["machine"])}; {data["rows"][0]["turns"]} turns in two
        processes, medians, 95% intervals. The target in bfloat16 is 2.5 times the throughput of one call after
        another:"""
    )
    return f"{said}\n\n{thread_table(data['rows'])}"


def products(data: Data) -> str:
    """The table of `benchmarks.linears`."""
    said = flow(
        f"""**Products of few rows**: the linear layers of one decode step in bfloat16, one by one, by `F.linear`
        and by the C++ kernel that reads the weights in place (path: {data["path"]}), `python -m benchmarks.linears`,
        {machine_of(data["machine"])}; {PRODUCT_TURNS} turns, medians, 95% intervals. The floor is the weights over
        the best streaming read of the run, {data["bandwidth_gb_s"]} GB/s. Targets: {PRODUCT_TARGET} up to 64 rows with
        AMX, 1.05 up to 32 without. Steps leave more than 256 rows with AMX, more than 64 without, to PyTorch; where
        it has no products of bfloat16, those of more than 128 rows are computed in float32 instead:"""
    )
    return f"{said}\n\n{product_table(data['rows'])}"


def rollouts(data: Data) -> str:
    """The table of `benchmarks.grpo`."""
    row = data["rows"][0]
    said = flow(
        f"""**Rollouts**: TRL's `GRPOTrainer` with a random model in float32, prompts of up to {row["length"]} tokens,
        `python -m benchmarks.grpo`, {machine_of(data["machine"])}; {row["turns"]} turns, medians, 95%
        intervals. The target for the rollouts is {TARGET} times the speed of plain ones, by `generate_batch` at most
        1.2 times their time:"""
    )
    return f"{said}\n\n{rollout_table(data['rows'])}"


def speculation(runs: Sequence[Data]) -> str:
    """The table of `benchmarks.speculation`."""
    evens = [note for data in runs for note in data["notes"] if "break-even" in note]
    said = flow(
        f"""**Several tokens a step**: `PagedEngine` with `speculation="ngram"`, or with assistants, over the same
        engine without, float32, `python -m benchmarks.speculation`, {machine_of(runs[0]["machine"])}; alternating turns
        of {len(runs)} runs, 95% intervals. The models are trained by the benchmark; texts are held out. A target is met
        where the interval reaches it. {" ".join(f"{note}." for note in evens)}"""
    )
    return f"{said}\n\n{report.markdown(speculation_rows(runs))}"


def draft_stages(data: Data) -> str:
    """Where the time goes that an assistant takes."""
    said = flow(
        f"""**Where the time of the assistant of a tenth goes** (8 rows, `python -m benchmarks.speculation --only
        stages`, {machine_of(data["machine"])}, medians of turns). A step of the target with candidates computes more
        tokens than one without, and takes longer in proportion where arithmetic is the bound:"""
    )
    return f"{said}\n\n{report.markdown(data['stages'], STAGES)}"


def tiers(runs: Sequence[Data]) -> str:
    """The table of `benchmarks.tiers`, of the turns of all runs."""
    groups: dict[tuple[str, str, str], list[Data]] = {}
    for run in runs:
        for row in run["rows"]:
            groups.setdefault((run["model"], row["what"], run["facts"]["revision"]), []).append(row)
    rows = []
    for (model, what, revision), parts in groups.items():
        ratios = [ratio for part in parts for ratio in part["ratios"]]
        span = paired.interval(ratios) or (min(ratios), max(ratios))
        limit = 5.0 if what.startswith("first token") else 1.0
        rows.append(
            {
                "model": model,
                "what": what,
                "revision": revision,
                "turns, processes": f"{len(ratios)}, {len(parts)}",
                "from the disk, s": statistics.median(part["disk_s"] for part in parts),
                "computed, s": statistics.median(part["computed_s"] for part in parts),
                "computed / from the disk": f"{statistics.median(ratios):.2f} ({span[0]:.2f} to {span[1]:.2f})",
                "tokens, blocks found": "equal, all" if all(part["equal"] == "yes" for part in parts) else "NOT equal",
                "target": f"at least {limit:g}: {paired.said(span[1] >= limit)}",
            }
        )
    said = flow(
        f"""**Prefixes from the disk** (`prefix_tiers`), against computing them, float32, `python -m benchmarks.tiers`,
        {machine_of(runs[0]["facts"])}; alternating turns, 95% intervals. A target is met where the interval reaches
        it:"""
    )
    return f"{said}\n\n{report.markdown(rows)}"


def quantized(runs: Sequence[Data]) -> str:
    """The rows of `benchmarks.attention` for `kv_dtype="int8"`, of the turns of all runs."""
    times: dict[tuple[Any, ...], dict[str, list[float]]] = {}
    for run in runs:
        for row in run["rows"]:
            if row["contender"] in ("ours", "ours: int8") and "us" in row:
                setting = row["heads"], row["case"], row["block_size"], row["dtype"]
                times.setdefault(setting, {}).setdefault(row["contender"], []).extend(row["us"])
    rows = []
    for (heads, case, block, dtype), found in times.items():
        ratios = paired.ratios(found["ours: int8"], found["ours"])
        span = paired.interval(ratios) or (min(ratios), max(ratios))
        rows.append(
            {
                "heads": heads,
                "rows x tokens": case,
                "block": block,
                "blocks of the dtype": dtype,
                "their time, µs": statistics.median(found["ours"]),
                "int8, µs": statistics.median(found["ours: int8"]),
                "int8 / theirs": f"{statistics.median(ratios):.2f} ({span[0]:.2f} to {span[1]:.2f})",
                "turns": len(ratios),
                "target": paired.at_most(span[0], 0.8),
            }
        )
    said = flow(
        f"""**Attention of decodes over int8 blocks** (`kv_dtype="int8"`), a layer, `{runs[0]["command"]}`,
        {machine_of(runs[0]["facts"])}; turns of {len(runs)} processes, 95% intervals. A target is met where the
        interval reaches it:"""
    )
    return f"{said}\n\n{report.markdown(rows)}"


def lora(runs: Sequence[Data]) -> str:
    """The table of `benchmarks.lora`, of the turns of all runs; nothing without any."""
    if not runs:
        return ""
    said = flow(
        f"""**Adapters**: {runs[0]["title"]}, `PagedEngine`, greedy, `python -m benchmarks.lora`,
        {machine_of(runs[0]["facts"])}; turns of {len(runs)} processes in which all take their turn, 95% intervals. A
        target is met where the interval reaches it:"""
    )
    picture = picture_of(LORA[0], "Tokens a second with adapters, in one forward and apart")
    return "\n\n".join([said, report.markdown(lora_rows(runs)), *picture])


def virtual(runs: Sequence[Data]) -> str:
    """The table of `benchmarks.virtual`, of the turns of all runs; nothing without any."""
    if not runs:
        return ""
    said = flow(
        f"""**Rows side by side in addresses** (`storage="virtual"`, vAttention): times over the base that each line
        names, and bytes over contiguous ones, `python -m benchmarks.virtual`, {machine_of(runs[0]["machine"])}; turns
        of {len(runs)} processes in which all take their turn, 95% intervals. A target is met where the interval reaches
        it:"""
    )
    return f"{said}\n\n{report.markdown(virtual_rows(runs))}"


def parallel(runs: Sequence[Data]) -> str:
    """The tables of `benchmarks.parallel`; nothing without a run."""
    if not runs:
        return ""
    first = runs[0]
    said = flow(
        f"""**Shards over processes** (`tp_plan="auto"`, gloo) that share the cores of one machine, `{first["model"]}`,
        float32, `python -m benchmarks.parallel`, {machine_of(first["facts"])}; medians of the turns, with the least and
        the greatest, and the memory that each process holds:"""
    )
    more = flow(
        f"""The second table of `benchmarks.parallel`, **computed from data sheets, not measured** (A100 of 80 GB, rows
        of {LENGTH} tokens, at most {MAX_ROWS}; the ratio is the throughput over that of as many GPUs on their own):"""
    )
    computed = report.markdown(first["computed"], {name: name.replace("_", " ") for name in COMPUTED})
    picture = picture_of(PARALLEL[0], "Computed: tokens a second of 7B to 65B over GPUs")
    return "\n\n".join([said, report.markdown(parallel_rows(runs)), more, computed, *picture])


def side_by_side(data: Data) -> str:
    """The tables of `benchmarks.side_by_side`, one for each run."""
    parts = [
        flow(
            """**More than plain decoders**: 16 prompts of different lengths, behind pictures or of sound where the
            model takes them, `python -m benchmarks.side_by_side`: medians of turns in two processes and 95% intervals
            of our time over that of plain `generate` on the padded batch. A target is met where the interval reaches
            it."""
        )
    ]
    for run in data["runs"]:
        turns = " or ".join(map(str, sorted({row["turns"] for row in run["rows"]})))
        parts += [f"{machine_of(run['machine'])}; {turns} turns:", side_by_side_table(run["rows"])]
    return "\n\n".join(parts)


def paper(data: Data) -> str:
    """The excerpt of `benchmarks.paper`."""
    tables = ("waste", "batch_size")
    rows = [row for row in data["rows"] if row["table"] in tables]
    made = "; ".join(dict.fromkeys(machine_of(data["runs"][name]["facts"]) for name in tables))
    said = flow(
        f"""**The papers' tables** on our own system, `{data["command"]}`: simulated with the engine's own scheduler and
        block manager, so that the machine hardly matters ({made}). Medians and ranges over seeds; the spread of the
        lengths' logarithms is a constant that the paper does not give. "{TOLD}": the figure is from a document that
        this project was asked for in, an article on the paper, and the paper does not have it. Every row, and why it
        differs:
        [{PAPER}.md](../benchmarks/results/{PAPER}.md)."""
    )
    columns = {"name": "what", "published": "published", "ours": "ours", "unit": "unit", "source": "published in"}
    picture = (
        f"![Memory by use: reservation against blocks, published and here](../benchmarks/results/{PAPER}-waste.png)"
    )
    return f"{said}\n\n{report.markdown(rows, columns)}\n\n{picture}"


def paper_turns(data: Data) -> list[str]:
    """The tables of S1 and of S4 in `benchmarks.paper`, as far as they were run: rows that have a published figure."""
    columns = {"name": "what", "published": "published", "ours": "ours", "unit": "unit", "source": "published in"}
    columns |= {"why": "what differs"}
    parts = []
    for names, picture, title in (
        (
            S1_TABLES,
            "vattention",
            f"""**vAttention's tables** (arXiv 2405.04437) on our own system: rows side by side in addresses
            (`storage="virtual"`) that code which knows nothing of blocks reads in place, beside blocks with the kernel
            that was made for them, and contiguous tensors. "{TOLD_S1}": the figure is from a document that this project
            was asked for in, an article on that paper.""",
        ),
        (
            S4_TABLES,
            "s4",
            f"""**S4's tables**, an article on the PagedAttention paper, and the figure of S2 for beams
            ("{TOLD_S2}"). What is called computed was not measured: a roofline gives the steps' times.""",
        ),
    ):
        rows = [row for row in data["rows"] if row["table"] in names and row["published"]]
        if not rows:
            continue
        there = [name for name in names if name in data["runs"]]
        made = "; ".join(dict.fromkeys(machine_of(data["runs"][name]["facts"]) for name in there))
        said = flow(
            f"""{title} `{data["command"]} --only {" ".join(there)}` ({made}); medians, 95% intervals over turns of two
            processes. All rows: [{PAPER}.md](../benchmarks/results/{PAPER}.md)."""
        )
        drawn = picture_of(f"{PAPER}-{picture}", "The same as a picture")
        parts.append("\n\n".join([said, report.markdown(rows, columns), *drawn]))
    return parts


def headline_section() -> str:
    """Of README.md: speed and memory in one table."""
    data = read(WHOLE_CALLS)
    facts, titles = data["facts"], data["workloads"]
    peaks = {
        row["what"].split()[0]: f"{row['value']:.0f}%"
        for row in data["memory"]
        if "peak" in row["what"] and row["system"] == "ours" and not row["problem"]
    }
    rows = [
        {
            "call": titles[row["workload"]],
            "plain's time / ours": report.text(row["plain_over"]),
            "peak of K/V bytes, ours / plain's": peaks.get(row["workload"], ""),
        }
        for row in data["rows"]
        if row["system"] == "ours" and "plain_over" in row
    ]
    said = flow(
        f"""A random `{data["model"]["name"]}` in bfloat16 on {facts["cores"]} cores ({facts["cpu"]}),
        `{data["command"]}`, revision {facts["revision"]}:"""
    )
    return f"{said}\n\n{report.markdown(rows)}"


def benchmarks_section() -> str:
    """Of docs/benchmarks.md."""
    parts = [
        flow(
            """Every figure from here to the end of this section is rendered by `python -m benchmarks.readme` from the
            JSON files in `benchmarks/results`; a test compares the two."""
        ),
        whole_calls(read(WHOLE_CALLS)),
        processors(list(map(read, PEERS))),
        stages([read(name) for name in PEERS if "int8" not in name]),
        invariance(read(INVARIANT)),
        threads(read(THREADS)),
        *(products(read(name)) for name in LINEARS),
        rollouts(read(GRPO)),
        rollouts(read(BATCHES)),
        speculation([read(name) for name in SPECULATION]),
        draft_stages(read(DRAFT_STAGES)),
        tiers([read(name) for name in TIERS]),
        quantized([read(name) for name in QUANTIZED]),
        lora(read_those(LORA)),
        parallel(read_those(PARALLEL)),
        virtual(read_those(VIRTUAL)),
        side_by_side(read(SIDE_BY_SIDE)),
        paper(read(PAPER)),
        *paper_turns(read(PAPER)),
        attention(read(ATTENTION)),
    ]
    return "\n\n".join(filter(None, parts))


def architectures_section() -> str:
    """Of docs/guide/compatibility.md."""
    from tests.support.architectures import section

    return section(read(ARCHITECTURES))


def results_section() -> str:
    """Of benchmarks/README.md."""
    names = {
        WHOLE_CALLS: "whole calls, arrivals, memory",
        ATTENTION: "attention alone",
        PAPER: "the papers' tables (each table has a run of its own, listed below them)",
    }
    lines = []
    for name, title in names.items():
        data = read(name)
        files = f"[table](results/{name}.md), [JSON](results/{name}.json)"
        lines.append(f"- {title}: `{data['command']}`, {machine_of(data['facts'])}; {files}")
    facts = read(ARCHITECTURES)["facts"]
    lines.append(
        f"- every architecture against plain `generate`: `{read(ARCHITECTURES)['command']}`, {machine_of(facts)}; "
        f"[JSON](results/{ARCHITECTURES}.json)"
    )
    for name in STEPS:
        facts = read(name)["machine"]
        lines.append(
            f"- one decode step through transformers' own loop, before there was an engine: {facts['date']}, revision "
            f"{facts['revision']}, {facts['cpu']}; [JSON](results/{name}.json)"
        )
    return "\n".join(lines)


def workloads_section() -> str:
    """Of benchmarks/README.md, from the code that runs them."""
    lines = [f"- {name}: {workload.title}" for name, workload in WORKLOADS.items()]
    shares = ", ".join(f"{share:g}" for share in arrivals.SHARES)
    lines.append(
        f"- arrivals: ShareGPT-like lengths (on a CPU an eighth of them), Poisson, at {shares} of the rate that the "
        f"engine serves when all wait; plain takes what has arrived, at most {arrivals.MAX_BATCH} prompts at a time"
    )
    return "\n".join(lines)


SECTIONS: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"headline": headline_section},
    ROOT / "docs" / "benchmarks.md": {"benchmarks": benchmarks_section},
    ROOT / "docs" / "guide" / "compatibility.md": {"architectures": architectures_section},
    ROOT / "benchmarks" / "README.md": {"workloads": workloads_section, "results": results_section},
}


def between(text: str, mark: str) -> tuple[int, int]:
    """Where the text between two marks begins and ends. Raises `ValueError` without them."""
    begin, end = f"<!-- {mark}:begin -->\n", f"<!-- {mark}:end -->"
    return text.index(begin) + len(begin), text.index(end)


def render(path: Path) -> str:
    """The file as it should be."""
    text = path.read_text()
    for mark, make in SECTIONS[path].items():
        start, end = between(text, mark)
        text = text[:start] + make() + "\n" + text[end:]
    return text


def main(argv: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; fail if a file is not what it should be")
    check = parser.parse_args(argv).check
    status = 0
    for path in SECTIONS:
        text, name = render(path), os.path.relpath(path)
        if text == path.read_text():
            print(f"{name}: as the results say")
        elif check:
            print(f"{name}: differs from the results; run python -m benchmarks.readme")
            status = 1
        else:
            path.write_text(text)
            print(f"{name}: rendered from the results")
    return status


if __name__ == "__main__":
    raise SystemExit(main())
