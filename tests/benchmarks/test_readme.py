"""What the pages say of the results, and which results they refuse: damaged ones, those of several
revisions, and those older than the code that they measure."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from benchmarks import machine, readme, report
from benchmarks.all import STAGES
from benchmarks.sections import overview, targets

ROOT = readme.ROOT


@pytest.fixture
def change(tmp_path, monkeypatch):
    """Changes the content of a file, in a copy of the committed results."""
    folder = tmp_path / "results"
    shutil.copytree(report.RESULTS, folder)
    monkeypatch.setattr(report, "RESULTS", folder)

    def change(name, edit):
        path = folder / f"{name}.json"
        data = json.loads(path.read_text())
        edit(data)
        path.write_text(json.dumps(data))

    return change


def rows_of(data, case):
    return {row["system"]: row for row in data["rows"] if row["case"] == case}


def said(capsys, argument, status):
    """The lines that the command prints."""
    assert readme.main([argument] if argument else []) == status
    return "".join(capsys.readouterr()).splitlines()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"facts": {', "not JSON: Expecting property name"),
        (b"\xff\xfe", "not JSON: "),
        (b'{"rows": [NaN]}', "not JSON: NaN is not a number"),
        (b"[]", "a list, not an object of JSON"),
        (b"{}", "failed: KeyError: 'facts'"),
        (b'{"facts": {"revision": "HEAD"}}', "revision 'HEAD' is not the hash of a commit"),
        (b'{"facts": {"revision": "0123456++"}}', "revision '0123456++' is not the hash"),
    ],
)
def test_a_damaged_file_is_named(content, message, change, monkeypatch, capsys):
    page = ROOT / "README.md"
    monkeypatch.setattr(readme, "SECTIONS", {page: readme.SECTIONS[page]})
    (report.RESULTS / f"{overview.WHOLE}.json").write_bytes(content)
    for argument in ("--check", "--fresh", "--pictures"):
        (line,) = said(capsys, argument, 2)
        assert f"{overview.WHOLE}.json: {message}" in line


def test_an_entry_that_is_missing_is_named_with_its_section(change):
    change(overview.WHOLE, lambda data: data["rows"][0].pop("seconds"))
    with pytest.raises(report.Damaged, match=r"README\.md, section gain: failed: KeyError: 'sec"):
        readme.render(ROOT / "README.md")
    change(overview.WHOLE, lambda data: data["rows"].clear())
    with pytest.raises(report.Damaged, match="has not both plain's and our times of W2"):
        readme.render(ROOT / "README.md")


def test_pages_are_written_all_or_none(tmp_path, monkeypatch, capsys):
    """Neither a page that cannot be rendered nor one that cannot be written leaves a traceback."""
    first, last = tmp_path / "first.md", tmp_path / "last.md"
    old = "<!-- a:begin -->\n<!-- a:end -->"
    for page in (first, last):
        page.write_text(old)
    pages = {first: {"a": lambda: "new"}, last: {"a": lambda: [][0]}}
    monkeypatch.setattr(readme, "SECTIONS", pages)
    assert "last.md, section a: failed: IndexError" in said(capsys, "", 2)[0]
    assert first.read_text() == old
    for wrong in (old[18:], old[:18], old + old, "<!-- a:end -->\n<!-- a:begin -->\n"):
        last.write_text(wrong)
        (line,) = said(capsys, "", 2)
        assert "last.md has not once <!-- a:begin --> and below it" in line
    last.write_text(old)
    pages[last]["a"] = lambda: "new"
    assert "first.md: differs from the results" in said(capsys, "--check", 1)[0]
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    (line,) = said(capsys, "", 2)
    assert line.endswith("first.md: failed: PermissionError: no")


@pytest.mark.slow
def test_the_picture_is_drawn_again_from_committed_results(tmp_path, monkeypatch):
    image = pytest.importorskip("PIL.Image")
    pytest.importorskip("matplotlib")
    data, committed = report.result(overview.WHOLE), list(report.RESULTS.glob("*.png"))
    monkeypatch.setattr(report, "RESULTS", tmp_path)  # where pictures go
    monkeypatch.setattr(readme, "result", lambda name: data)
    assert readme.main(["--pictures"]) == 0
    (drawn,) = tmp_path.glob("*.png")
    assert [drawn.name] == [path.name for path in committed]
    assert image.open(drawn).size[0] == 800 and drawn.stat().st_size < 100_000


# ---- what the pages say


def test_pages_tell_apart_an_engine_that_was_not_measured(change):
    def edit(data):
        for name in overview.TITLES.values():
            rows_of(data, "W5")[name].update(seconds=[], problem="not installed")

    change(overview.WHOLE, edit)
    table, _, text = overview.headline().partition("\n\n")
    (row,) = [line for line in table.splitlines() if line.startswith("| W5 ")]
    assert row.endswith("| not measured |  |")
    for page in (text, overview.overview()):
        assert "No other engine was measured in W5." in page


def test_stages_that_did_not_run_are_neither_complete_nor_met(change):
    assert overview.missing().endswith(f", {len(overview.FILES)} stages, all complete.")
    change("all", lambda data: data["stages"].pop())
    assert overview.missing().endswith(" stages; not complete: invariant (not run).")
    change(overview.FILES["other_dtype"], lambda data: data["rows"].clear())
    assert overview.in_other_dtype() == "" and "In bfloat16" not in overview.headline()
    (report.RESULTS / f"{overview.FILES['trainer']}.json").unlink()
    assert f"| {targets.TRAINER} | plain `generate` | 1.00 | not measured |" in targets.missed()


def test_pages_say_that_a_work_tree_had_changes(change):
    def edit(data):
        for run in data.get("runs", [data]):
            run["facts"] |= {"tree": "changed: step.py", "revision": "0123456+"}

    for path in report.RESULTS.glob("*.json"):
        change(path.stem, edit)
    names = ("README", "ROADMAP", "benchmarks/README", "docs/benchmarks", "docs/figures/features")
    for name in (*names, "docs/guide/compatibility", "docs/guide/other-engines"):
        text = readme.render(ROOT / f"{name}.md")
        changed = "revision 0123456 with uncommitted changes (changed: step.py)"
        assert text.count(changed) == text.count("revision 0123456") > 0, name


def test_the_roadmap_has_our_time_over_the_others(change):
    """Files have seconds of each system."""

    def edit(data):
        w1, w2, w3 = (rows_of(data, name) for name in ("W1", "W2", "W3"))
        for row in [*w1.values(), *w2.values()]:
            row["seconds"] = [8.0] * len(row["seconds"])
        w1["ours"]["seconds"], w1["vLLM"]["seconds"] = [1.0] * 5, [2.0] * 5
        w2["ours"]["seconds"], w2["llama.cpp"]["seconds"] = [3.0] * 5, [2.0] * 5
        for name in set(w3) - {"plain", "ours", "engine"}:
            w3[name].update(seconds=[], problem="not installed")

    change(overview.WHOLE, edit)
    met, _, table = targets.missed().partition("\n\n")
    w1, w2, w3 = (overview.TITLE_OF[name] for name in ("W1", "W2", "W3"))
    assert f"{w1} beside {targets.BEST} (0.50)" in met and w1 not in table
    assert f"| {w2} | {targets.BEST} | 1.00 | 1.50 (llama.cpp) |" in table
    assert f"| {w3} | {targets.BEST} | 1.00 | not measured |" in table


def test_every_target_of_the_roadmap_is_measured_and_shown():
    met, _, table = targets.missed().partition("\n\n")
    assert all(list(targets.measured(target)) for target in targets.TARGETS)
    assert "not measured" not in table
    most = {(one.stage, one.cases, one.other): one.most for one in targets.TARGETS}
    shares = {"W1": 1, "W2": 1, "W3": 1, "W4": 0.9, "W5": 0.4, "W6": 1, "W9": 1, "W10": 1}
    assert {name: most["whole", name, targets.BEST] for name in shares} == shares
    for target in targets.TARGETS:
        title = target.title or overview.TITLE_OF[target.cases]
        other = overview.NAMES.get(target.other, target.other)
        row = f"| {title} | {other} | {target.most:.2f} |"
        assert (row in table) != (f"{title} beside {other} (" in met)
        assert target.lever


def test_models_other_than_the_pages_are_named():
    """The first page and the roadmap begin with the model of the whole calls."""
    model = re.compile(r"(?:llama|qwen)[\d.]*-[\d.]+[mb]")
    (own,) = model.findall(report.result(overview.WHOLE)["title"])
    sentences = [(stage, ".*", title) for stage, title, *_ in overview.FEATURES]
    sentences += [(one.stage, one.cases, one.title) for one in targets.TARGETS]
    for stage, cases, sentence in sentences:
        data = report.result(overview.FILES[stage])
        meant = [row["case"] for row in data["rows"] if re.fullmatch(cases, row["case"])]
        models = set(model.findall(" ".join([data.get("title", ""), *meant])))
        assert set(model.findall(sentence)) == models - {own}, sentence


def test_the_first_page_says_where_an_engine_is_slower(change):
    tiny, full = "BART-base, tiny, 16 new", "BART-base, full, 16 new"
    row = "| the same on a `PagedEngine` | plain `generate` | 10 | {} | {} |"
    cases = {one["case"] for one in report.result(overview.FILES["encoders"])["rows"]}
    row = row.replace("10", str(len(cases)))

    def edit(data):
        for row in data["rows"]:
            row["seconds"] = [2.0] * 5
        for case, seconds in slow.items():
            rows_of(data, case)["engine"]["seconds"] = [seconds] * 5

    slow = {tiny: 4.0, full: 10.0}
    change(overview.FILES["encoders"], edit)
    assert row.format("0.20 to 1.00", 2) in overview.overview()
    slow[full] = 1.0
    change(overview.FILES["encoders"], edit)
    assert row.format("0.50 to 2.00", 1) in overview.features()


# ---- revisions


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes files of results, with a list of all stages, in a checkout of its own; no page is
    rendered."""
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(machine, "__file__", str(tmp_path / "benchmarks" / "machine.py"))
    monkeypatch.setattr(report, "RESULTS", results)
    monkeypatch.setattr(readme, "SECTIONS", {})

    def write(revision, *names, tree="clean", threads=2, command="", without="", reason=""):
        entries = [
            {"name": stage.name, "file": stage.file, "reason": reason}
            for stage in STAGES
            if stage.name != without
        ]
        facts = {"revision": revision, "tree": tree, "cpu": "A", "cores": 2, "threads": threads}
        content = {"command": command, "facts": facts, "stages": entries}
        for name in names or ("all", *(stage.file for stage in STAGES)):
            (results / f"{name}.json").write_text(json.dumps(content))

    return write


def test_a_mix_of_revisions_or_machines_and_a_quick_run_are_refused(write, capsys):
    assert said(capsys, "--check", 0) == [], "no run of benchmarks.all"
    write("0123456")
    write("0123456", "lora-cpu")  # repeated alone
    assert said(capsys, "--check", 0) == []
    write("89abcde", "lora-cpu", "tiers-cpu")
    (line,) = said(capsys, "--check", 1)
    assert "all.json, generate-cpu-llama-100m.json" in line
    assert line.endswith("of revision 0123456; lora-cpu.json, tiers-cpu.json of revision 89abcde")
    assert said(capsys, "--fresh", 1)[0] == line
    write("0123456")
    (report.RESULTS / "lora-cpu.json").unlink()
    (line,) = said(capsys, "--check", 1)
    assert line == "all.json lists the stage adapters as complete; lora-cpu.json is missing"
    write("0123456", "lora-cpu", threads=1)
    write("0123456", "tiers-cpu", command="python -m benchmarks.tiers --quick")
    machines, quick = said(capsys, "--check", 1)
    assert machines.startswith("files of benchmarks.all are of several machines: all.json, ")
    assert machines.endswith("of machine A, 2, 2; lora-cpu.json of machine A, 2, 1")
    assert quick == "tiers-cpu.json is of a quick run, which says nothing"


def test_figures_older_than_a_kernel_are_not_released(write, tmp_path, capsys):
    def git(*arguments):
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    def commit(name, text=""):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        git("add", name)
        git("commit", "-q", "-m", name)
        return git("rev-parse", "--short", "HEAD")

    git("init", "-q")
    kernels, step = "hf_paged/kernels/__init__.py", "hf_paged/batching/__init__.py"
    first = commit(kernels)
    assert said(capsys, "--fresh", 1) == ["there is no run of benchmarks.all"]
    write(first)
    commit("docs/index.md")
    commit(kernels, '"""Kernels."""  # in C++ and Triton\n')
    assert said(capsys, "--fresh", 0) == []
    last = commit(step, "step = 1\n")
    (line,) = said(capsys, "--fresh", 1)  # once for all files
    assert "all.json, " in line and line.endswith(f" of revision {first}: changed since: {step}")
    write(last)
    assert said(capsys, "--fresh", 0) == []
    new = "hf_paged/tape/__init__.py"
    for name in (step, new):  # not committed
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("step = 2\n")
        (line,) = said(capsys, "--fresh", 1)
        assert line.endswith(f" of revision {last}: changed since: {name}")
        (tmp_path / name).unlink()
        git("checkout", "-q", ".")
    for files, message in (
        ({"tree": "changed: step.py"}, "not of a clean work tree (changed: step.py)"),
        ({"without": "adapters"}, "all.json has no stage adapters"),
        ({"reason": "ended after 9 s"}, f"stage {STAGES[0].name}: ended after 9 s"),
    ):
        write(last, **files)
        assert any(line.endswith(message) for line in said(capsys, "--fresh", 1))
    write("0123456789abcdef")
    (line,) = said(capsys, "--fresh", 1)
    assert ": git has no such commit here (not committed, a shallow clone, or no git)" in line
