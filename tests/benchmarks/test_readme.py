"""What the pages say of the results, and what is said of results that are damaged."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from benchmarks import compiled, readme, report
from benchmarks.sections import overview, targets

ROOT = readme.ROOT
Data = dict[str, Any]
Change = Callable[[str, Callable[[Data], Any]], None]


@pytest.fixture
def change(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Change:
    """Changes the content of a file, in a copy of the committed results."""
    folder = tmp_path / "results"
    shutil.copytree(report.RESULTS, folder)
    monkeypatch.setattr(report, "RESULTS", folder)

    def change(name: str, edit: Callable[[Data], Any]) -> None:
        path = folder / f"{name}.json"
        data = json.loads(path.read_text())
        edit(data)
        path.write_text(json.dumps(data))

    return change


def rows_of(data: Data, case: str) -> dict[str, Data]:
    return {row["system"]: row for row in data["rows"] if row["case"] == case}


@pytest.mark.parametrize(
    "content, said",
    [
        ('{"facts": {', "not JSON: Expecting property name"),
        (b"\xff\xfe", "not JSON: "),
        ('{"rows": [NaN]}', "not JSON: NaN is not a number"),
        ('{"rows": [-Infinity]}', "not JSON: -Infinity is not a number"),
        ("[]", "a list, not an object of JSON"),
        ("null", "a NoneType, not an object of JSON"),
        ("{}", "no entry 'facts' beside these: none"),
        ('{"facts": 3}', "'facts' is 3, not a dict"),
    ],
)
@pytest.mark.parametrize("argument", ["--check", "--fresh", "--pictures"])
def test_a_damaged_file_is_named(
    content: str | bytes,
    said: str,
    argument: str,
    change: Change,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = ROOT / "README.md"
    monkeypatch.setattr(readme, "SECTIONS", {page: readme.SECTIONS[page]})
    path = report.RESULTS / f"{overview.WHOLE}.json"
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    assert readme.main([argument]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{overview.WHOLE}.json: {said}" in line


@pytest.mark.parametrize(
    "edit, said",
    [
        (lambda data: data["rows"][0].pop("seconds"), "no entry 'seconds' beside these: 'case', "),
        (lambda data: data["rows"][0].update(seconds=1.0), "'seconds' is 1.0, not a list"),
        (lambda data: data["facts"].pop("date"), "no entry 'date'"),
        (lambda data: data.pop("title"), "no entry 'title'"),
        (lambda data: data.update(rows={}), "'rows' is {}, not a list"),
        (lambda data: data["rows"].clear(), "has not both plain's and our times of W2"),
        (lambda data: data["rows"][0].update(seconds=["fast"]), "failed: TypeError: "),
        (lambda data: data["rows"][0]["figures"].pop("K/V, MiB"), "no entry 'K/V, MiB'"),
    ],
)
def test_an_entry_that_is_missing_is_named_with_its_file(
    edit: Callable[[Data], Any], said: str, change: Change
) -> None:
    change(overview.WHOLE, edit)
    with pytest.raises(report.Damaged, match=f"{overview.WHOLE}.json: ") as caught:
        readme.render(ROOT / "README.md")
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "old, new",
    [
        ("<!-- targets:begin -->\n", ""),
        ("<!-- targets:end -->", ""),
        ("<!-- targets:end -->", "<!-- targets:end -->\n<!-- targets:begin -->\n"),
        ("# Roadmap", "<!-- targets:end -->"),
    ],
)
def test_a_mark_that_is_missing_is_named_with_its_page(
    old: str,
    new: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    page = tmp_path / "ROADMAP.md"
    text = (ROOT / "ROADMAP.md").read_text()
    assert old in text
    page.write_text(text.replace(old, new, 1))
    monkeypatch.setattr(readme, "SECTIONS", {page: readme.SECTIONS[ROOT / "ROADMAP.md"]})
    for arguments in (["--check"], []):
        assert readme.main(arguments) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert "ROADMAP.md has not once <!-- targets:begin --> and below it" in line
    page.unlink()
    assert readme.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "ROADMAP.md: failed: FileNotFoundError" in line


def test_pages_are_written_all_or_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither a page that cannot be rendered nor one that cannot be written leaves a traceback."""
    first, last = tmp_path / "first.md", tmp_path / "last.md"
    old = "<!-- a:begin -->\n<!-- a:end -->"
    for page in (first, last):
        page.write_text(old)
    pages: Any = {first: {"a": lambda: "new"}, last: {"a": lambda: [][0]}}
    monkeypatch.setattr(readme, "SECTIONS", pages)
    assert readme.main([]) == 2
    assert "last.md, section a: failed: IndexError" in capsys.readouterr().err
    assert first.read_text() == old
    pages[last]["a"] = lambda: "new"
    monkeypatch.setattr(Path, "write_text", lambda *_: (_ for _ in ()).throw(PermissionError("no")))
    assert readme.main([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.endswith("first.md: failed: PermissionError: no")


def test_pictures_are_not_drawn_where_nothing_shall_be_written(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(readme, "draw", lambda: pytest.fail("pictures were drawn"))
    for other in ("--check", "--fresh"):
        with pytest.raises(SystemExit) as caught:
            readme.main(["--pictures", other])
        assert caught.value.code == 2 and "not allowed with --check" in capsys.readouterr().err


def test_pages_tell_apart_an_engine_that_was_not_measured(change: Change) -> None:
    def edit(data: Data) -> None:
        for name in overview.TITLES.values():
            rows_of(data, "W5")[name].update(seconds=[], problem="not installed")

    change(overview.WHOLE, edit)
    table, _, text = overview.headline().partition("\n\n")
    (row,) = [line for line in table.splitlines() if line.startswith("| W5 ")]
    assert row.endswith("| not measured |  |")
    assert "No other engine was measured in W5." in text
    assert "No other engine was measured in W5." in overview.overview()


def test_stages_that_did_not_run_are_not_called_complete(change: Change) -> None:
    assert overview.missing().endswith(f", {len(overview.FILES)} stages, all complete.")
    change("all", lambda data: data["stages"].pop())
    assert overview.missing().endswith(" stages; not complete: invariant (not run).")


def test_a_stage_without_a_case_says_nothing(change: Change) -> None:
    change(overview.FILES["other_dtype"], lambda data: data["rows"].clear())
    assert overview.in_other_dtype() == "" and "In bfloat16" not in overview.headline()


def test_a_benchmark_does_not_add_to_a_damaged_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "compiled.json"
    path.write_text("{")
    assert compiled.BENCHMARK.keeps and compiled.main(["--json", str(path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "compiled.json: not JSON: " in line and path.read_text() == "{"


def test_pages_say_that_a_work_tree_had_changes(change: Change) -> None:
    def edit(data: Data) -> None:
        for run in data.get("runs", [data]):
            run["facts"] |= {"tree": "changed: step.py", "revision": "0123456+"}

    for path in report.RESULTS.glob("*.json"):
        change(path.stem, edit)
    pages = [ROOT / name for name in ("README.md", "ROADMAP.md", "benchmarks/README.md")]
    pages += [ROOT / "docs" / "benchmarks.md", ROOT / "docs" / "figures" / "features.md"]
    pages += [ROOT / "docs" / "guide" / f"{name}.md" for name in ("compatibility", "other-engines")]
    for page in pages:
        text = readme.render(page)
        changed = "revision 0123456 with uncommitted changes (changed: step.py)"
        assert text.count(changed) == text.count("revision 0123456") > 0, page


def test_the_roadmap_has_our_time_over_the_others(change: Change) -> None:
    """Files have seconds of each system."""

    def edit(data: Data) -> None:
        w1, w2, w3 = (rows_of(data, name) for name in ("W1", "W2", "W3"))
        for row in [*w1.values(), *w2.values()]:
            row["seconds"] = [8.0] * len(row["seconds"])
        w1["ours"]["seconds"] = [1.0] * 5
        w1["vLLM"]["seconds"] = [2.0] * 5
        w2["ours"]["seconds"] = [3.0] * 5
        w2["llama.cpp"]["seconds"] = [2.0] * 5
        for name in set(w3) - {"plain", "ours", "engine"}:
            w3[name].update(seconds=[], problem="not installed")

    change(overview.WHOLE, edit)
    met, _, table = targets.missed().partition("\n\n")
    w1, w2, w3 = (overview.TITLE_OF[name] for name in ("W1", "W2", "W3"))
    assert f"{w1} beside {targets.BEST} (0.50)" in met and w1 not in table
    assert f"| {w2} | {targets.BEST} | 1.00 | 1.50 (llama.cpp) |" in table
    assert f"| {w3} | {targets.BEST} | 1.00 | not measured |" in table


def test_every_target_of_the_roadmap_is_measured_and_shown() -> None:
    met, _, table = targets.missed().partition("\n\n")
    assert all(list(targets.measured(target)) for target in targets.TARGETS)
    assert "not measured" not in table
    most = {(one.stage, one.cases, one.other): one.most for one in targets.TARGETS}
    shares = {"W1": 1, "W2": 1, "W3": 1, "W4": 0.9, "W5": 0.4, "W6": 1, "W9": 1, "W10": 1}
    assert {name: most["whole", name, targets.BEST] for name in shares} == shares
    for target in targets.TARGETS:
        title = target.title or overview.TITLE_OF[target.cases]
        other = targets.NAMES.get(target.other, target.other)
        row = f"| {title} | {other} | {target.most:.2f} |"
        assert (row in table) != (f"{title} beside {other} (" in met)
        assert target.lever


def test_plain_counts_at_its_fastest_setting(change: Change) -> None:
    """Threads that each call plain `generate` may outrun one call after another."""

    def edit(data: Data) -> None:
        rows = rows_of(data, "W9")
        for name, seconds, held in (("plain", 4.0, 1.0), ("plain in threads", 3.0, 8.0)):
            rows[name] |= {"seconds": [seconds] * 4}
            rows[name]["figures"] |= {"K/V, MiB": held}
        rows["ours"] |= {"seconds": [2.0] * 4}
        rows["ours"]["figures"] |= {"K/V, MiB": 4.0}

    change(overview.WHOLE, edit)
    (w9,) = [
        one for one in overview.beside(report.result(overview.WHOLE)["rows"]) if one.name == "W9"
    ]
    assert (w9.speed.value, w9.share) == (1.5, 0.5)
    assert f"| {overview.ALL['W9'].title} | 3 | 2 |" in readme.engines_section()


def test_models_other_than_the_pages_are_named() -> None:
    """The first page and the roadmap begin with the model of the whole calls."""
    model = re.compile(r"(?:llama|qwen)[\d.]*-[\d.]+[mb]")
    (own,) = model.findall(report.result(overview.WHOLE)["title"])
    said = [(stage, ".*", sentence) for stage, _, _, sentence in overview.SENTENCES]
    said += [(one.stage, one.cases, one.title) for one in targets.TARGETS]
    for stage, cases, sentence in said:
        data = report.result(overview.FILES[stage])
        meant = [row["case"] for row in data["rows"] if re.fullmatch(cases, row["case"])]
        models = set(model.findall(" ".join([data.get("title", ""), *meant])))
        assert set(model.findall(sentence)) == models - {own}, sentence


def test_a_stage_that_did_not_run_is_not_a_target_that_is_met(change: Change) -> None:
    (report.RESULTS / f"{overview.FILES['trainer']}.json").unlink()
    assert f"| {targets.TRAINER} | plain `generate` | 1.00 | not measured |" in targets.missed()


def test_the_first_page_says_where_an_engine_is_slower(change: Change) -> None:
    name = overview.FILES["encoders"]
    tiny, full = "BART-base, tiny, 16 new", "BART-base, full, 16 new"

    def edit(data: Data) -> None:
        for row in data["rows"]:
            row["seconds"] = [2.0] * 5
        for case, seconds in ((tiny, 4.0), (full, slow)):
            rows_of(data, case)["engine"]["seconds"] = [seconds] * 5

    slow = 1.0
    change(name, edit)
    said = "; a `PagedEngine` is slower than plain in {} of them{}: 0.{} of plain's speed. "
    assert said.format(1, ", all of tiny models", "50") in overview.overview()
    slow = 10.0
    change(name, edit)
    assert said.format(2, "", "20 to 0.50") in overview.overview()
    change(name, lambda data: [row.update(seconds=[2.0]) for row in data["rows"]])
    assert overview.on_engines("encoders") == "."
