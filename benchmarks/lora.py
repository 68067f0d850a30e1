"""LoRA adapters: rows with different adapters in one forward, against one forward per adapter, and
against all rows with one adapter.

    python -m benchmarks.lora [--model llama-100m] [--rows 32] [--adapters 8] [--turns 9] [--quick]
                              [--json PATH]

Greedy rows of random text over adapters of random weights, on all linear layers of the decoder, in
float32 on the CPU: as the engine runs them; with one forward per adapter and step, as older
versions did; from folders, where the pool has room for half of the adapters; all rows with one
adapter; all without. All take the same turns, after warm-up turns.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

import hf_paged
from benchmarks import paired, report
from benchmarks.machine import facts
from benchmarks.models import FIRST_WORD, SHAPES, build
from benchmarks.systems import quiet

QUICK = "llama-tiny"
TURNS, WARM_UPS = 9, 2
FASTER, OF_ONE = 3.0, 0.7
"""Targets: throughput over that of one forward per adapter, and over that of a single adapter."""
RANK = 16
TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
MIXED, APART, FOLDERS, ONE, BASE = (
    "together",
    "one adapter a forward",
    "folders, room for half",
    "one adapter",
    "base",
)
PICTURED = {
    MIXED: "all adapters in one forward",
    APART: "one forward per adapter",
    FOLDERS: "from folders, room for half of them",
    ONE: "one adapter for all rows",
    BASE: "no adapter",
}
COLUMNS = {
    "system": "rows",
    "turns": "turns",
    "seconds": "s",
    "tokens_per_second": "tokens/s",
    "forwards": "forwards",
    "loads": "loads a turn",
    "speedup": "throughput over one adapter a forward",
    "share": "of a single adapter's",
    "equal": "tokens as alone",
}


@dataclass
class System:
    """
    An engine and the adapters of its rows.

    Args:
        forwards, loads (`list[int]`): Forwards, and adapters read from files, of each turn.
        rows (`list[list[list[int]]]`): New tokens of each turn.
    """

    engine: hf_paged.PagedEngine
    adapters: list[str]
    seconds: list[float] = field(default_factory=list)
    forwards: list[int] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    rows: list[list[list[int]]] = field(default_factory=list)

    def turn(self, prompts: list[list[int]], new_tokens: int, mixes: bool) -> None:
        runner, count = self.engine._core.get_loop().executor.runner, 0
        run = type(runner).run

        def counted(*args: Any) -> Any:
            nonlocal count
            count += 1
            return run(runner, *args)

        runner.mixes_adapters, runner.run = mixes, counted  # type: ignore[method-assign]
        options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
        before, start = self.engine.stats().num_adapter_loads, time.perf_counter()
        results = self.engine.generate(prompts, options, adapter=self.adapters)
        self.seconds.append(time.perf_counter() - start)
        del runner.run
        self.forwards.append(count)
        self.loads.append(self.engine.stats().num_adapter_loads - before)
        for result in results:
            if result.error is not None:
                raise result.error
        self.rows.append([result.token_ids for result in results])


def adapted(model: Any, count: int) -> Any:
    """The model with `count` adapters, both of whose matrices are random."""
    import peft

    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=RANK, target_modules=TARGETS, task_type="CAUSAL_LM", init_lora_weights=False
    )
    found = peft.get_peft_model(model, config, adapter_name="a0")
    for number in range(1, count):
        found.add_adapter(f"a{number}", config)
    return found.eval()


def texts(rows: int, vocab: int, turn: int, longest: int) -> list[list[int]]:
    words = random.Random(f"lora {turn}")
    lengths = [words.randrange(longest // 4, longest + 1) for _ in range(rows)]
    return [[words.randrange(FIRST_WORD, vocab - 1) for _ in range(length)] for length in lengths]


def room(engine: hf_paged.PagedEngine, folder: str, prompt: list[int]) -> int:
    """Blocks that one adapter takes of the budget."""
    engine.generate([prompt], {"max_new_tokens": 2, "do_sample": False}, adapter=folder)
    pages = engine._core.get_loop().executor.adapters().pages
    assert pages is not None
    (group,) = engine.memory.groups.values()
    return -(-pages.num_bytes // int(group.block_bytes))


def measure(
    name: str, rows: int, count: int, turns: int, warm_ups: int, new_tokens: int, longest: int
) -> dict[str, Any]:
    """Runs turns of all systems in alternating order; compares tokens between systems, and one turn
    with plain `generate`."""
    shape = SHAPES[name]
    model, bare = (
        adapted(build(shape, "cpu", torch.float32), count),
        build(shape, "cpu", torch.float32),
    )
    names = [f"a{row % count}" for row in range(rows)]
    config = hf_paged.PagedConfig(prefix_caching=False)
    with tempfile.TemporaryDirectory() as path, quiet():
        model.save_pretrained(path)
        folders = {name: str(Path(path) / name) for name in model.peft_config}
        with hf_paged.PagedEngine(bare, config) as first:
            own = room(first, folders["a0"], texts(1, shape.vocab, 0, longest)[0])
        prompts = texts(rows, shape.vocab, 0, longest)
        needed = sum(-(-(len(prompt) + new_tokens) // int(config.block_size)) for prompt in prompts)
        small = hf_paged.PagedConfig(
            prefix_caching=False, num_blocks=own * max(1, count // 2) + needed
        )
        systems = {
            MIXED: System(hf_paged.PagedEngine(model, config), names),
            APART: System(hf_paged.PagedEngine(model, config), names),
            FOLDERS: System(hf_paged.PagedEngine(bare, small), [folders[name] for name in names]),
            ONE: System(hf_paged.PagedEngine(model, config), ["a0"] * rows),
            BASE: System(hf_paged.PagedEngine(model, config), ["__base__"] * rows),
        }
        for turn in range(-warm_ups, turns):
            prompts = texts(rows, shape.vocab, turn, longest)
            for system in list(systems)[:: -1 if turn % 2 else 1]:
                systems[system].turn(prompts, new_tokens, mixes=system != APART)
        equal = {name: system.rows == systems[APART].rows for name, system in systems.items()}
        prompts = texts(rows, shape.vocab, turns - 1, longest)
        for adapter, prompt, row in zip(names, prompts, systems[MIXED].rows[-1]):
            model.set_adapter(adapter)
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": new_tokens, "do_sample": False, "eos_token_id": None}
            plain = model.generate(ids, attention_mask=torch.ones_like(ids), **options)
            equal[MIXED] &= plain[0, len(prompt) :].tolist() == row
        for system in systems.values():
            hf_paged.check_integrity(system.engine.model)
            system.engine.free()
    found = {
        name: System(x.engine, [], *(y[warm_ups:] for y in (x.seconds, x.forwards, x.loads)))
        for name, x in systems.items()
    }
    return {
        "rows": [row_of(name, found, equal, rows * new_tokens) for name in found],
        "targets": targets(found),
    }


def row_of(
    name: str, found: dict[str, System], equal: dict[str, bool], num_tokens: int
) -> dict[str, Any]:
    mine = found[name]
    known = name in (MIXED, APART, FOLDERS)
    return {
        "system": name,
        "turns": len(mine.seconds),
        "seconds": statistics.median(mine.seconds),
        "tokens_per_second": num_tokens / statistics.median(mine.seconds),
        "forwards": statistics.median(mine.forwards),
        "loads": statistics.median(mine.loads),
        "speedup": statistics.median(paired.ratios(found[APART].seconds, mine.seconds)),
        "share": statistics.median(paired.ratios(found[ONE].seconds, mine.seconds)),
        "equal": ("yes" if equal[name] else "NO") if known else "",
        "seconds_by_turn": mine.seconds,
    }


def targets(found: dict[str, System]) -> list[str]:
    """Lines below the table: whether each target is met."""
    lines = []
    for other, target, what in (
        (APART, FASTER, "one adapter a forward"),
        (ONE, OF_ONE, "a single adapter"),
    ):
        ratios = paired.ratios(found[other].seconds, found[MIXED].seconds)
        span = paired.span(paired.interval(ratios) or (min(ratios), max(ratios)))
        lines.append(
            f"throughput over {what}: {statistics.median(ratios):.3f} ({span}),"
            f" {paired.verdict(ratios, target)}"
        )
    return lines


def pooled(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows that combine the turns of several runs of one revision, a process each; a target is met
    if the interval of the ratio reaches it."""
    parts: dict[str, list[dict[str, Any]]] = {}
    for row in (row for run in runs for row in run["rows"]):
        parts.setdefault(row["system"], []).append(row)
    seconds = {
        name: [one for row in rows for one in row["seconds_by_turn"]]
        for name, rows in parts.items()
    }
    found = []
    for name, rows in parts.items():
        first = rows[0]
        line: dict[str, Any] = {
            "rows": name,
            "turns, processes": f"{len(seconds[name])}, {len(rows)}",
        }
        median = statistics.median(seconds[name])
        line |= {"s": median, "tokens/s": first["tokens_per_second"] * first["seconds"] / median}
        line |= {"forwards": first["forwards"], "loads a turn": first["loads"]}
        for title, base, target in (
            ("throughput over one adapter a forward", APART, FASTER),
            ("of a single adapter's", ONE, OF_ONE),
        ):
            ratios = paired.ratios(seconds[base], seconds[name])
            span = paired.interval(ratios) or (min(ratios), max(ratios))
            line[title] = f"{statistics.median(ratios):.2f} ({span[0]:.2f} to {span[1]:.2f})"
            if name == MIXED:
                line[title] += f", at least {target:g}: {paired.said(span[1] >= target)}"
        told = {row["equal"] for row in rows} - {""}
        line["tokens as alone"] = ("equal" if told == {"yes"} else "NOT equal") if told else ""
        found.append(line)
    return found


def draw(data: Mapping[str, Any], path: Path) -> Path:
    """Tokens per second of every system; a line where both targets of mixed rows are met."""
    speeds = {row["system"]: row["tokens_per_second"] for row in data["rows"]}
    drawing, axis = report.figure(320, report.caption(data["facts"], data["title"]))
    bars = axis.barh(range(len(speeds)), list(speeds.values()), 0.7)
    axis.bar_label(bars, fmt="%.0f", label_type="center", color="white")
    axis.set_yticks(range(len(speeds)), [PICTURED[name] for name in speeds], fontsize=9)
    axis.invert_yaxis()
    axis.grid(visible=False, axis="y")
    least, row = max(FASTER * speeds[APART], OF_ONE * speeds[ONE]), list(speeds).index(MIXED)
    said = f"targets: {FASTER:g} times the next bar,\n  {OF_ONE:g} of one adapter for all rows"
    axis.vlines(least, row - 0.42, row + 0.42, colors="black", linestyles="dashed")
    axis.text(least, row, f"  {said}", fontsize=8, va="center", in_layout=False)
    axis.set_xlabel("tokens per second")
    axis.set_title(
        "Rows with different LoRA adapters in one forward, and their alternatives",
        fontsize=10,
        loc="left",
    )
    return report.save(drawing, path)


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns 1 if tokens differ."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=sorted(SHAPES), default="llama-100m", help="the shape")
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--adapters", type=int, default=8)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a small shape, few tokens, one turn: shows that it runs",
    )
    parser.add_argument("--json", help="also write the results here, and a picture beside them")
    args = parser.parse_args(argv)
    name, turns, warm_ups, new_tokens, longest = args.model, args.turns, WARM_UPS, 64, 32
    if args.quick:
        name, turns, warm_ups, new_tokens, longest = QUICK, 1, 1, 8, 32
    machine = facts()
    found = measure(name, args.rows, args.adapters, turns, warm_ups, new_tokens, longest)
    title = (
        f"{args.rows} rows over {args.adapters} adapters of rank {RANK}, {new_tokens} new tokens"
        f" each, {name}, float32"
    )
    print(f"{title}; {machine['cpu']}, load {machine['load_1min']}\n")
    print(report.markdown(found["rows"], COLUMNS), *found["targets"], sep="\n")
    if args.json:
        path = Path(args.json)
        data = {"facts": machine, "model": name, "title": title, **found}
        path.write_text(json.dumps(data, indent=1) + "\n")
        report.plot(lambda: draw(data, path.with_suffix(".png")))
    return int(any(row["equal"] == "NO" for row in found["rows"]))


if __name__ == "__main__":
    raise SystemExit(main())
