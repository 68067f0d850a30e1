"""The bars of the picture against the intervals that they show."""

from __future__ import annotations

import io
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from hf_paged import PagedEngine
from hf_paged.tools.pictures import plot_intervals
from hf_paged.tools.timeline import Activity, Interval, Verification
from tests.support import models
from tests.support.engine_helpers import prompts

A = Activity
DECODE, SWAPPED = "#0072B2", "#CC79A7"


def interval(
    number: int, activity: Activity, first: int, end: int, is_last: bool = False
) -> Interval:
    return Interval(
        number, f"request {number}", activity, first, end, 10 + 0.5 * first, 10 + 0.5 * end, is_last
    )


INTERVALS = [
    interval(0, A.WAITING, 2, 2),
    interval(0, A.PREFILL, 2, 4),
    interval(0, A.DECODE, 4, 9),
    interval(0, A.SWAPPED, 9, 11),
    interval(0, A.DECODE, 11, 15, is_last=True),
    interval(1, A.WAITING, 3, 7),
    interval(1, A.PREEMPTED, 7, 9),
    interval(1, A.RECOMPUTE, 9, 10),
]


def bars(figure: Figure, colour: str) -> list[tuple[float, float, float]]:
    """Left, right and row of every bar of that colour."""
    found = []
    for collection in figure.axes[0].collections:
        if to_hex(collection.get_facecolor()[0]).upper() == colour:
            for path in collection.get_paths():
                (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
                found.append((round(left, 6), round(right, 6), round((low + high) / 2, 6)))
    return found


def marks(figure: Figure) -> list[tuple[float, float]]:
    [line] = figure.axes[0].lines
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def labels(figure: Figure) -> list[str]:
    return [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def test_steps() -> None:
    figure = plot_intervals(INTERVALS)
    assert bars(figure, DECODE) == [(4, 9, 0), (11, 15, 0)]
    assert bars(figure, SWAPPED) == [(9, 11, 0)]
    assert bars(figure, "#BBBBBB") == [(3, 7, 1)]  # no bars of zero length
    assert bars(figure, "#E69F00") == [(2, 4, 0), (9, 10, 1)]
    assert marks(figure) == [(15, 0)]
    assert labels(figure) == ["request 0", "request 1"]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend == [
        "prefill",
        "recompute",
        "decode",
        "waiting",
        "preempted",
        "swapped out",
        "ended",
    ]
    assert figure.get_size_inches()[0] * figure.dpi == 800


def columns(figure: Figure, colour: str) -> list[tuple[float, float, float, float]]:
    """Left, right, bottom and height of every column of that colour."""
    found = []
    for collection in figure.axes[0].collections:
        if to_hex(collection.get_facecolor()[0]).upper() == colour:
            for path in collection.get_paths():
                (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
                found.append(
                    (float(left), float(right), round(float(high), 6), round(float(high - low), 6))
                )
    return found


def test_drafts_are_columns_in_the_bar_of_their_request() -> None:
    drafts = [
        Verification(0, 5, 12.5, 12.75, 8, 2),
        Verification(0, 12, 16, 16.5, 4, 4),
        Verification(1, 9, 14, 14.5, 1, 0),
    ]
    figure = plot_intervals(INTERVALS, verifications=drafts)
    assert columns(figure, "#F0E442") == [
        (5, 6, 0.38, 0.76),
        (12, 13, 0.38, 0.38),
        (9, 10, 1.38, 0.095),
    ]
    assert columns(figure, "#009E73") == [
        (5, 6, 0.38, 0.19),
        (12, 13, 0.38, 0.38),
        (9, 10, 1.38, 0),
    ]
    legend = [text.get_text() for text in figure.axes[0].get_legend().get_texts()]
    assert legend[-3:] == ["drafted: 13", "accepted: 6", "ended"]
    seconds = plot_intervals(INTERVALS, "seconds", verifications=drafts[:2])
    assert columns(seconds, "#F0E442") == [(1.5, 1.75, 0.38, 0.76), (5, 5.5, 0.38, 0.38)]
    figure.savefig(io.BytesIO())


def test_seconds_count_from_the_first_shown() -> None:
    figure = plot_intervals(INTERVALS, "seconds")
    assert bars(figure, DECODE) == [(1, 3.5, 0), (4.5, 6.5, 0)]
    assert figure.axes[0].get_xlabel() == "seconds"
    assert bars(plot_intervals(INTERVALS, "seconds", max_requests=1), "#BBBBBB") == [(0, 2, 0)]


def test_what_computes_is_wider_than_what_waits_and_a_recompute_is_hatched() -> None:
    figure = plot_intervals(INTERVALS)
    heights = {}
    for collection in figure.axes[0].collections:
        vertices = collection.get_paths()[0].vertices
        heights[to_hex(collection.get_facecolor()[0]).upper(), collection.get_hatch()] = round(
            vertices[:, 1].max() - vertices[:, 1].min(), 6
        )
    assert len(heights) == 6
    assert (
        heights[DECODE, None]
        == heights["#E69F00", None]
        == heights["#E69F00", "//////"]
        > heights[SWAPPED, None]
    )


def test_the_last_requests_and_names_as_they_are() -> None:
    many = [
        interval(number, A.DECODE, number, number + 3)._replace(request_id=rf"$\bad{{{number}$")
        for number in range(50)
    ]
    figure = plot_intervals(many, max_requests=10)
    assert labels(figure) == [rf"$\bad{{{number}$" for number in range(40, 50)]
    assert figure.axes[0].get_ylabel() == "the last 10 of 50 requests"
    figure.savefig(io.BytesIO())  # a name is never parsed as a formula
    long = plot_intervals([interval(0, A.DECODE, 0, 1)._replace(request_id="x" * 100)])
    assert len(labels(long)[0]) == 16


@pytest.mark.slow_cases("400")
@pytest.mark.parametrize("count", [0, 1, 40, 400])
def test_any_number_of_requests_fits(count: int) -> None:
    figure = plot_intervals(
        [interval(i, A.DECODE, i, i + 9) for i in range(count)], max_requests=1000
    )
    figure.savefig(io.BytesIO())
    assert figure.get_size_inches()[1] * figure.dpi < 1200


@pytest.mark.parametrize("arguments", [{"unit": "hours"}, {"max_requests": 0}])
def test_bad_arguments(arguments: dict[str, Any]) -> None:
    [name] = arguments
    with pytest.raises(ValueError, match=f"`{name}` is .*must be"):
        plot_intervals(INTERVALS, **arguments)


def test_of_an_engine() -> None:
    config = {"block_size": 8, "num_blocks": 20, "preemption": "swap"}
    with PagedEngine(models.get("llama"), config) as engine:
        assert labels(engine.plot_timeline()) == []
        engine.generate(prompts(40, 24, 33, 5, 60), {"do_sample": False, "max_new_tokens": 25})
        axes = Figure().subplots()
        assert engine.plot_timeline("seconds", ax=axes) is axes.figure
    figure = engine.plot_timeline()  # after `free`
    assert labels(figure) == [f"request-{number}" for number in range(5)]
    assert len(marks(figure)) == 5
    assert bars(figure, SWAPPED) and bars(figure, DECODE)


def test_of_an_engine_that_speculates() -> None:
    options = {"do_sample": False, "max_new_tokens": 20}
    with PagedEngine(models.get("llama")) as engine:
        engine.generate(prompts(9), options, assistant_model=models.get_assistant("llama"))
        stats, html = engine.stats(), engine._repr_html_()
        assert len(columns(engine.plot_timeline(), "#F0E442")) == stats.num_drafts > 0
    assert f"{stats.num_draft_tokens}, {stats.num_accepted_tokens}</td>" in html
