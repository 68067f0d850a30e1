"""Results are written to files and read back unchanged; plots are small, and a missing plot has a reason."""

from __future__ import annotations

import sys

import pytest

from benchmarks import machine, report

ROWS = [{"case": "1 x 512", "ms": 1.23456, "n": 3, "met": True}, {"case": "a|b", "problem": "not installed"}]


def test_markdown_has_every_key_and_puts_numbers_to_the_right():
    assert report.markdown(ROWS).split("\n") == [
        "| case | ms | n | met | problem |",
        "|---|--:|--:|---|---|",
        "| 1 x 512 | 1.235 | 3 | yes |  |",
        "| a\\|b |  |  |  | not installed |",
    ]


def test_markdown_of_chosen_columns():
    table = report.markdown(ROWS, {"ms": "time, ms", "case": "rows x tokens"})
    assert table.split("\n")[0] == "| time, ms | rows x tokens |"
    assert report.markdown(ROWS, ["case"]).split("\n")[2:] == ["| 1 x 512 |", "| a\\|b |"]


@pytest.mark.parametrize(
    "value, expected",
    [
        (None, ""),
        (True, "yes"),
        (12, "12"),
        (0.0, "0"),
        (0.000123456, "0.0001235"),
        (123456.7, "123457"),
        (2e9, "2e+09"),
    ],
)
def test_cells(value, expected):
    assert report.text(value) == expected


def test_round_trip(tmp_path):
    facts = machine.facts()
    paths = report.write(
        "table", facts, ROWS, directory=tmp_path / "new", columns=["case", "ms"], notes="As seen.", extra={"more": [1]}
    )
    data = report.read(paths[0])
    assert data["facts"] == facts and data["rows"] == ROWS and data["more"] == [1]
    page = paths[1].read_text()
    assert page.startswith(f"`{data['command']}`, {facts['date']}\n")
    assert f"torch {facts['torch']}" in page and "| 1 x 512 | 1.235 |" in page and page.endswith("As seen.\n")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["table.json", "table.md"]


def test_a_run_that_is_killed_while_writing_leaves_the_former_file(tmp_path, monkeypatch):
    path, _ = report.write("table", {}, ROWS, directory=tmp_path)
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.write("table", {}, [], directory=tmp_path)
    assert report.read(path)["rows"] == ROWS


def test_pictures_are_800_pixels_wide_and_small(tmp_path):
    image = pytest.importorskip("PIL.Image")
    figure, axes = report.figure(300, ncols=2)
    report.grouped_bars(axes[0], {"plain": {"W1": 1.0, "W2": 1.0}, "ours": {"W2": 2.4}})
    axes[1].plot([1, 10, 100], [1, 10, 100])
    axes[1].set_yscale("log")
    report.log_ticks(axes[1].yaxis)
    path = report.save(figure, tmp_path / "picture.png")
    assert image.open(path).size == (800, 300)
    assert path.stat().st_size < 100_000


def test_without_matplotlib_there_is_a_reason_and_no_picture(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert report.plot(lambda: report.save(report.figure()[0], "never.png")) is None
    assert 'pip install "hf_paged[bench]"' in capsys.readouterr().err
