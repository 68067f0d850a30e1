"""Every figure in the documentation comes from a committed result."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import hf_paged
from benchmarks import generate, machine, paired, readme, report, runner, tables
from benchmarks.sections import overview
from benchmarks.workloads import ALL, WORKLOADS
from hf_paged import PagedConfig
from tests.support.rooms import needs_all_rooms

ROOT = readme.ROOT
# constants of the package that the text names
CONSTANTS = ("MIN_CACHED_TOKENS", "LINE", "MAX_CHUNK_TOKENS", "MAX_NEW_REQUESTS")
PAGES = [
    ROOT / "README.md",
    ROOT / "ROADMAP.md",
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
    *sorted((ROOT / "docs" / "figures").glob("*.md")),
]
# the paper, the licence, a file mode, transformers, nothing, statuses of HTTP, Ray Serve's default,
# the version to come
CITED = {"2023", "2309.06180", "2.0", "700", "5.17", "5.18", "5.23", "5.24", "0", "400", "500", "5"}
CITED |= {"1.0"}


def prose(text: str, marks: list[str]) -> str:
    """The text without rendered sections, code and link targets."""
    for mark in marks:
        start, end = readme.between(text, mark)
        text = text[:start] + text[end:]
    text = re.sub(r"```.*?```|^\d+\. ", "", text, flags=re.DOTALL | re.MULTILINE)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", text))


@pytest.mark.parametrize(
    "path", readme.SECTIONS, ids=lambda path: path.relative_to(ROOT).as_posix()
)
def test_figures_between_the_marks_are_those_of_the_results(path):
    text = path.read_text()
    assert readme.render(path) == text, "run python -m benchmarks.readme"
    for mark in readme.SECTIONS[path]:
        start, end = readme.between(text, mark)
        assert re.search(r"\d", text[start:end]), f"nothing is rendered at {mark}"


@needs_all_rooms
def test_numbers_elsewhere_in_the_text_have_a_source():
    project = (ROOT / "pyproject.toml").read_text()
    script = (ROOT / "examples" / "batch_generation.py").read_text()
    workflow = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    code = "\n".join(file.read_text() for file in (ROOT / "hf_paged").rglob("*.py"))
    defaults = [field.default for field in dataclasses.fields(PagedConfig)]
    sources = {
        *(re.search(rf"^{name} = (\d+)", code, re.MULTILINE)[1] for name in CONSTANTS),
        *(f"{x:g}" for x in defaults if isinstance(x, int | float)),
        re.search(r'requires-python = ">=([\d.]+)"', project)[1],
        *re.findall(r'"(3\.\d+)"', workflow),
        re.search(r'"--prompts", type=int, default=(\d+)', script)[1],
    }
    for path in PAGES:
        text = prose(path.read_text(), list(readme.SECTIONS.get(path, ())))
        numbers = {*re.findall(r"(?<![\w.])\d[\d.,]*(?<![.,])(?!\w)", text)}
        unknown = sorted(numbers - sources - CITED)
        assert not unknown, f"{path}: {unknown}: render from a result, or name the source here"


def test_the_docs_show_the_version_of_the_package():
    pytest.importorskip("mkdocs")
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    foot = hooks.on_config(SimpleNamespace()).copyright
    assert f"hf_paged {hf_paged.__version__}," in foot
    assert f"![version: {hf_paged.__version__}]" in (ROOT / "README.md").read_text()


def headings(path: Path) -> set[str]:
    """The anchors of a page's headings, and those it sets itself."""
    text = path.read_text()
    titles = re.findall(r"^#+ (.*)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    slugs = {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    return slugs | set(re.findall(r'<a id="([^"]+)"', text))


def test_links_of_the_checkout_lead_somewhere():
    pages = ("README.md", "CONTRIBUTING.md", "ROADMAP.md", "SECURITY.md")
    for name in (*pages, "benchmarks/README.md", "tests/README.md"):
        path = ROOT / name
        for target, _, anchor in re.findall(r"\]\(([^)#\s:]*)(#([^)\s]+))?\)", path.read_text()):
            linked = path.parent / target if target else path
            assert linked.exists(), f"{name} links to {target}"
            assert not anchor or anchor in headings(linked), f"{name} links to {target}#{anchor}"


@needs_all_rooms
def test_the_tables_of_tests_name_all_tests_and_tools_and_no_others():
    text, tests = (ROOT / "tests" / "README.md").read_text(), ROOT / "tests"
    modules = [name.replace(".", "/") for name in re.findall(r"python -m (tests\.[\w.]+)", text)]
    named = {*re.findall(r"`(tests/[\w/.]+)`", text), *(f"{module}.py" for module in modules)}
    assert not [name for name in named if not (ROOT / name).exists()]
    folders = [path for path in tests.iterdir() if (path / "__init__.py").exists()]
    programs = (tests / "support").rglob("*.py")
    programs = [path for path in programs if "__main__" in path.read_text()]
    there = {*tests.glob("test_*.py"), *folders, *programs}
    assert not {str(path.relative_to(ROOT)) for path in there} - named


def test_whole_calls_are_one_run_of_one_clean_revision():
    data = report.result(readme.WHOLE)
    assert data["facts"].get("tree", machine.CLEAN) == machine.CLEAN
    assert re.fullmatch("[0-9a-f]{7,40}", data["facts"]["revision"])
    command = "python (-X faulthandler )?-m benchmarks.generate --device cpu "
    assert re.match(command, data["command"])
    assert "--quick" not in data["command"]
    shown = "\n".join(generate.BENCHMARK.shown([data]))
    for row in data["rows"]:
        if row["case"].endswith(generate.EXACT):  # checks of tokens, which are counted
            continue
        for value in row["figures"].values():
            assert report.text(value) in shown
        assert row.get("problem", "") in shown
        if row["seconds"]:
            assert f"| {row['case']} | {row['system']} | {len(row['seconds'])}, " in shown
    assert tables.targets(data["rows"]) in shown


def test_the_first_pages_are_short():
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    text = (ROOT / "docs" / "benchmarks.md").read_text()
    start, end = readme.between(text, "benchmarks")
    shown = text[start:end]
    assert shown.count("![") <= 3 and len(shown) < 3500
    assert len(re.findall(r"[.;](?=\s)", re.sub(r"!\[.*", "", shown))) <= 16


def row_of(case: str, system: str, *seconds: float, **more: Any) -> dict[str, Any]:
    row = {"case": case, "system": system, "seconds": [*seconds], "over": {}, "figures": {}}
    return row | more


def test_the_six_rows_say_where_they_are_lost():
    def row(case: str, system: str, seconds: float, held: float = 1.0) -> dict[str, Any]:
        return row_of(case, system, *[seconds] * 5, figures={"K/V, MiB": held})

    rows = [row("W1", "plain", 4.0), row("W1", "ours", 2.0, 0.5), row("W1", "vLLM", 1.0)]
    rows += [row("W1", "llama.cpp", 3.0), row("W6", "plain", 1.0), row("W6", "ours", 1.25, 1.5)]
    first, second = overview.beside(rows)
    assert (first.speed.value, first.share, first.engine) == (2.0, 0.5, "vLLM")
    assert first.over_engine.value == 0.5 and second.over_engine is None
    said = overview.losses([first, second])
    assert "slower than plain `generate` in W6; more memory than plain `generate` in W6" in said
    assert "slower than another engine in W1 (vLLM, 2.00 times its time)" in said
    assert said.endswith(". No other engine was measured in W6.")
    assert overview.losses([first._replace(over_engine=first.speed)]) == "It loses nowhere."
    (data, shown) = report.result(readme.WHOLE), overview.headline()
    rows = [one for one in overview.beside(data["rows"]) if one.name in WORKLOADS]
    assert len(rows) == 6
    for one in rows:
        assert one.speed.text(2) in shown and f"{one.share:.0%}" in shown


def test_the_readme_says_beside_which_engines_it_is_behind():
    """Sentences of "When to use it, and when not", which are written by hand."""
    rows = report.result(readme.WHOLE)["rows"]

    def ratios(title: str) -> dict[str, paired.Estimate]:
        """By workload, the engine's time over ours."""
        pairs = {name: [tables.base_of(rows, name, one) for one in (title, "ours")] for name in ALL}
        return {name: tables.ratio_of(*pair) for name, pair in pairs.items() if all(pair)}

    said = report.flow((ROOT / "README.md").read_text())
    assert "OpenVINO GenAI, vLLM** on CPUs: as fast or a little faster with many prompts" in said
    assert "faster with several threads; slower with samples, beams and one prompt." in said
    for title in ("OpenVINO GenAI", "vLLM"):
        of_engine = ratios(title)
        assert all(0.9 < of_engine[name].value < 1.05 for name in ("W1", "W2", "W3"))
        assert of_engine["W9"].value < 0.9
        assert all(of_engine[name].value > 1.1 for name in ("W4", "W5", "W6"))
    assert "and is often faster with a single prompt" in said
    assert ratios("llama.cpp")["W6"].high < 1


def test_what_is_missed_or_worse_is_shown():
    slow, late = {"TTFT p99, ms": 9.0, "TPOT p99, ms": 3.0}, {"TPOT p99, ms": 77.0}
    waste = {"figures": {generate.WASTE: 5.0}, "limits": {generate.WASTE: 4.0}}
    rows = [
        row_of("W1", "plain", 2.0, figures=slow),
        row_of("W1", "ours", 4.0, figures=late, equal=0.25, over={"plain": 2.0}),
        row_of("W1", "vLLM", problem="not installed"),
        row_of("waste", "engine", 1.0, **waste),
        row_of("W1" + generate.EXACT, "ours", 1.0, equal=0.9),
    ]
    facts = {**machine.facts(), "tree": "changed: a.py", "revision": "0123456+"}
    shown = "\n".join(generate.BENCHMARK.shown([{"facts": facts, "rows": rows}]))
    assert "Targets: 0 of 2 are met; not met: W1: plain / ours 0.5, not at least 2; " in shown
    assert "waste, engine: waste, % 5, not at most 4." in shown and "| 25% equal |" in shown
    assert "plain in TPOT p99, ms of W1 (ours), 3 against 77" in shown
    assert "vLLM (not installed) on W1" in shown and "0 of 1 checks" in shown
    assert "revision 0123456 with uncommitted changes (changed: a.py)" in shown


def test_a_changed_work_tree_is_not_called_clean(tmp_path, monkeypatch):
    def git(*arguments: str) -> None:
        command = ["git", "-c", "user.name=a", "-c", "user.email=a@b", *arguments]
        subprocess.run(command, cwd=tmp_path, check=True)

    def state(folder: Path = tmp_path) -> tuple[str, str]:
        monkeypatch.setattr(machine, "__file__", str(folder / "benchmarks" / "machine.py"))
        return machine.tree(), machine.revision()

    folder = tmp_path / "benchmarks" / "results"
    folder.mkdir(parents=True)
    (tmp_path / "code.py").write_text("1")
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "first")
    _, revision = state()
    (folder / "new.json").write_text("{}")  # written by the run itself
    assert state() == ("clean", revision) and "+" not in revision
    (tmp_path / "code.py").write_text("2")
    assert state() == ("changed: code.py", revision + "+")
    (tmp_path / "code.py").write_text("1")
    (tmp_path / "more.py").write_text("")
    assert (
        state() == ("changed: more.py", revision + "+") == (state()[0], machine.facts()["revision"])
    )
    assert state(Path(tmp_path.anchor)) == ("unknown", "unknown")
    inner = tmp_path / "copy"  # without git, in the checkout of another project
    (inner / "benchmarks").mkdir(parents=True)
    assert state(inner) == ("unknown", "unknown")


def test_a_run_that_ends_early_leaves_its_cases(tmp_path):
    def cases(args: Any) -> Iterator[runner.Case]:
        yield runner.Case("first", {"ours": lambda turn: 1.0})
        raise RuntimeError("out of luck")

    path = tmp_path / "found.json"
    with pytest.raises(RuntimeError, match="out of luck"):
        runner.Benchmark("A test.", cases, turns=1).main(["--json", str(path)])
    assert [row["case"] for row in report.read(path)["rows"]] == ["first"]
