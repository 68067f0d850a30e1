"""What `tests.support.architectures` found of each class of transformers, by family and by road."""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping

from benchmarks.report import Row as Data
from benchmarks.report import markdown, revision_of

MEDIA = ("image", "video", "audio")


def counted(values: Iterable[str]) -> str:
    """How often each value occurs, the most frequent first."""
    counts = collections.Counter(values).most_common()
    return ", ".join(f"{value} {count}" for value, count in counts)


def overview(rows: list[Data]) -> str:
    """Counts by family."""
    header = ["family", "classes", "served by plain `generate`", "equal", "on the engine"]
    header += ["blocks read in place", "of them MLA latents", "given images, video or sound"]
    header += ["on the engine with these", "on the engine with text alone"]
    lines = list[Data]()
    for family in [*dict.fromkeys(row["family"] for row in rows), "all"]:
        members = [row for row in rows if family in (row["family"], "all")]
        served = [row for row in members if row["modes"]]
        given = [row for row in served if row["medium"] != "text"]
        alone = [row["modes"]["text"] for row in given if "text" in row["modes"]]
        counts = [
            *(len(members), len(served), sum(row["status"] == "equal" for row in members)),
            sum(row["road"] == "engine" for row in served),
            *(sum(bool(row[flag]) for row in served) for flag in ("in_place", "latent")),
            *(len(given), sum(row["road"] == "engine" for row in given)),
            sum(mode["road"] == "engine" for mode in alone),
        ]
        lines.append(dict(zip(header, [family, *counts])))
    return markdown(lines)


def class_lists(rows: list[Data]) -> str:
    """The classes by road of the call, and why some do not run on the engine."""
    served = [row for row in rows if row["modes"]]
    others = [row for row in served if row["road"] != "engine"]
    groups = {
        "on the engine": [row for row in served if row["road"] == "engine"],
        "not built tiny, or not served by plain `generate`": [r for r in rows if not r["modes"]],
    }
    lists = [
        f"**{title}**: {', '.join(row['name'] for row in group)}."
        for title, group in groups.items()
        if group
    ]
    paged_loop = "paged cache under the model's own decoding loop; not on the engine: "
    reasons = [row["reason"].removeprefix(paged_loop) for row in others]
    lists.append(f"**not on the engine**, {len(others)} classes:")
    lists.append(
        "\n".join(
            f"- {row['name']}: {reason or 'its `generate` is its own'}"
            for row, reason in zip(others, reasons)
        )
    )
    return "\n\n".join(lists)


def architectures(data: Data, not_given: Mapping[str, str]) -> str:
    """The section of docs/guide/compatibility.md; `not_given`: classes whose media are left out,
    and why."""
    rows, facts = data["results"], data["facts"]
    unequal = [row for row in rows if row["status"] in ("different", "error")]
    given = []
    for row in rows:
        media = [name for name in (row["medium"], *row["modes"]) if name in MEDIA]
        if row["modes"] and media:
            given.append(f"{row['name']} ({', '.join(media)})")
    modes = [(name, mode) for row in rows for name, mode in row["modes"].items()]
    requests = counted(mode["status"] for name, mode in modes if name.endswith(" requests"))
    left_out = "; ".join(f"{name}: {reason}" for name, reason in not_given.items())
    different = ", ".join(f"{row['name']} ({row['status']})" for row in unequal)
    lines = [
        f"transformers {facts['transformers']}, {facts['date']}, {revision_of(facts)},"
        f" `{data['command']}`",
        "(greedy with left padding and its logits, 3 beams, sampling with `num_return_sequences`):",
        *("", overview(rows)),
        *(["", f"Not equal: {different}."] if unequal else []),
        "",
        "Where a class takes images, video or sound, the two prompts have different ones, with"
        " text before and behind,",
        "and the columns count its first medium; each other one, and text alone, is checked"
        " with a greedy call.",
        f"As three requests of a `PagedEngine`: {requests}.",
        f"Decode steps are recorded and replayed for {sum(row['replayed'] > 0 for row in rows)}"
        " classes.",
        *("", "<details><summary>The classes</summary>", ""),
        *(f"**given images, video or sound**: {', '.join(given)}.", ""),
        *(f"**not given what they take**: {left_out}.", ""),
        *(class_lists(rows), "", "</details>"),
    ]
    return "\n".join(lines)
