"""Results are written to files and read back unchanged; plots are small."""

from __future__ import annotations

import pytest

from benchmarks import readme, report

ROWS = [
    {"case": "1 x 512", "ms": 1.23456, "n": 3, "met": True},
    {"case": "a|b", "problem": "not installed"},
]


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
    assert report.markdown(ROWS, {"case": ""}).split("\n")[2:] == ["| 1 x 512 |", "| a\\|b |"]


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


def test_a_run_that_is_killed_while_writing_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    report.replace_file(path, '{"rows": [1]}')
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.replace_file(path, '{"rows": [2]}')
    assert report.read(path) == {"rows": [1]}


def test_pictures_are_800_pixels_wide_and_small(tmp_path):
    image = pytest.importorskip("PIL.Image")
    figure, axis = report.figure(300, foot="a processor")
    report.grouped_bars(axis, {"plain": {"W1": 1.0, "W2": 1.0}, "ours": {"W2": 2.4}})
    path = report.save(figure, tmp_path / "picture.png")
    assert image.open(path).size == (800, 300)
    assert path.stat().st_size < 100_000


def test_labels_of_bars_and_groups_do_not_collide():
    pytest.importorskip("matplotlib")
    groups = (
        "one prompt of 16 tokens, 64 new",
        "64 prompts of 32 to 256 tokens, 8 to 256 new each",
    )
    values = {f"system {i}": dict.fromkeys(groups, 0.96 + i / 100) for i in range(5)}
    figure, axis = report.figure(300, foot="a processor")
    report.grouped_bars(axis, values, label=lambda value: f"{value:.2f}")
    figure.figure.canvas.draw()
    texts = [text for text in (*axis.texts, *axis.get_yticklabels()) if text.get_text()]
    assert len(texts) == 12
    boxes = [text.get_window_extent() for text in texts]
    assert not [(a, b) for i, a in enumerate(boxes) for b in boxes[:i] if a.overlaps(b)]
    assert all(0 <= box.x0 and box.x1 <= report.WIDTH_PIXELS for box in boxes)


def test_a_caption_names_what_is_known():
    facts = {"cpu": "a CPU", "cores": 2, "revision": "0123456", "date": "2026-01-02 03:04"}
    said = "a model, a CPU, 2 cores, revision 0123456{}, 2026-01-02"
    for tree, more in (
        ("clean", ""),
        ("unknown", " (work tree: unknown)"),
        ("changed during the run", " with uncommitted changes (changed during the run)"),
    ):
        assert report.caption(facts | {"tree": tree}, "a model") == said.format(more)
    assert report.caption({"date": "today"}) == "today" and report.caption({}) == ""


@pytest.mark.slow
def test_pictures_are_drawn_again_from_committed_results(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    data = {name: report.result(name) for name in readme.PICTURES}
    committed = {path.name for path in report.RESULTS.glob("*.png")}
    monkeypatch.setattr(report, "RESULTS", tmp_path)  # where pictures go
    monkeypatch.setattr(readme, "result", data.get)
    assert readme.main(["--pictures"]) == 0
    assert {path.name for path in tmp_path.glob("*.png")} == committed
