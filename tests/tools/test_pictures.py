"""Block maps and timelines against the states and intervals that they show."""

from __future__ import annotations

import io
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from matplotlib import pyplot
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

from hf_paged import PagedCache, PagedEngine
from hf_paged.cache.groups import group_label
from hf_paged.tools.pictures import (
    KINDS,
    MAX_CELLS,
    count_kinds,
    import_matplotlib,
    kind_index,
    plot_block_map,
    plot_intervals,
    to_cells,
)
from hf_paged.tools.timeline import Activity, Interval, Verification
from tests.support import models
from tests.support.engine_helpers import engine_of, prompts
from tests.support.missing import take_away

STATES = [0, -1, 1, 2, 3, 4, 7, 8, 100]
GREEDY = {"do_sample": False, "max_new_tokens": 25}


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure: Figure) -> list[str]:
    found = figure.axes[0].get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


# -- blocks --------------------------------------------------------------------------------------


def colours(figure: Figure) -> list[list[str]]:
    """Colours of the cells, by group."""
    [ax] = figure.axes
    return [[to_hex(face).upper() for face in each.get_facecolors()] for each in ax.collections]


def test_kinds_of_blocks_and_groups() -> None:
    labels = [KINDS[kind_index(state)].label for state in STATES]
    assert labels == [
        *("free", "cached", "used by one", "shared by 2 or 3", "shared by 2 or 3"),
        *("shared by 4 to 7", "shared by 4 to 7", "shared by 8 or more", "shared by 8 or more"),
    ]
    assert count_kinds(STATES) == [1, 1, 1, 2, 2, 2]
    assert len({kind.colour for kind in KINDS}) == len(KINDS)
    # a cell of several blocks is what most of them are
    assert to_cells([1, 1, 0, 0, 0, 1, -1], 3) == [kind_index(1), kind_index(0), kind_index(-1)]
    keys = (None, 4096, ("self", 8), ("cross", None), ("assistant 1", 8))
    assert list(map(group_label, keys)) == [
        *("full attention", "window of 4,096 tokens"),
        *("window of 8 tokens", "cross attention", "assistant 1, window of 8 tokens"),
    ]


def test_every_block_has_its_colour_and_shared_ones_their_number() -> None:
    figure = plot_block_map({None: STATES})
    assert colours(figure) == [[KINDS[kind_index(state)].colour for state in STATES]]
    assert texts(figure) == ["2", "3", "4", "7", "8", "100"]
    counts = [f"{kind.label}: {count}" for kind, count in zip(KINDS, count_kinds(STATES))]
    assert legend(figure) == counts
    # notebooks show it once
    assert figure._repr_png_().startswith(b"\x89PNG") and not pyplot.get_fignums()
    own = Figure()
    left, right = own.subplots(1, 2)
    assert plot_block_map({None: [0]}, ax=right) is own
    assert right.collections and not left.collections


def test_groups_lie_under_one_another() -> None:
    figure = plot_block_map({None: [1] * 40, 8: [0] * 5, 16: []}, title=r"$\bad{ groups$")
    assert [len(cells) for cells in colours(figure)] == [40, 5]
    assert texts(figure) == ["full attention: 40 blocks", "window of 8 tokens: 5 blocks"]
    first, second = figure.axes[0].collections
    lowest = max(y for path in first.get_paths() for _, y in path.vertices)
    assert min(y for path in second.get_paths() for _, y in path.vertices) > lowest
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize("num_blocks", [0, 1, 511, 513, 2049, MAX_CELLS, MAX_CELLS + 1])
def test_any_size_fits_800_pixels(num_blocks: int) -> None:
    free = num_blocks // 2
    figure = plot_block_map({None: [0, 1] * free + [1] * (num_blocks % 2)})
    width, height = figure.get_size_inches() * figure.dpi
    assert width == 800 and 80 < height < 900
    drawn = sum(map(len, colours(figure)))
    assert drawn <= MAX_CELLS and (drawn == num_blocks or num_blocks > MAX_CELLS)
    assert legend(figure)[1:3] == [f"free: {free:,}", f"used by one: {num_blocks - free:,}"]


def test_blocks_of_an_engine_and_of_a_cache() -> None:
    with engine_of("gemma3", num_blocks=64) as engine:
        assert texts(engine.plot_memory()) == ["no blocks yet"]
        engine.add_request([5] * 30, {**GREEDY, "num_beams": 3})
        engine.step()
        figure, block_map = engine.plot_memory(), engine.block_map()
        states = [state for states in block_map.values() for state in states]
        assert sum(map(len, colours(figure))) == len(states)
        assert max(states) == 3 and "3" in texts(figure)
        used = engine.stats().used_blocks
        title = figure.axes[0].get_title("left")
        assert title.endswith(f"{used} blocks in use of 64, {64 - len(states)} not allocated")
    assert texts(engine.plot_memory()) == ["no blocks yet"]  # after `free`
    model, colour = models.get("llama"), KINDS[kind_index(1)].colour
    cache = PagedCache(model.config, {"block_size": 8})
    model(models.token_ids(2, 20), past_key_values=cache)
    assert colours(cache.plot_memory())[0].count(colour) == 6
    cache.free()
    assert colour not in colours(cache.plot_memory())[0]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that is there but broken is not called missing."""
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tests\.nothing'"):
        import_matplotlib("tests.nothing.at_all")
    take_away(monkeypatch, "matplotlib")
    with PagedEngine(models.get("llama")) as engine:
        for draw in (engine.plot_memory, engine.plot_timeline):
            with pytest.raises(ImportError, match=r'matplotlib: pip install "hf_paged\[viz\]"'):
                draw()


# -- requests over steps -------------------------------------------------------------------------

A = Activity
WAITING, DECODE, SWAPPED, PREFILL = "#BBBBBB", "#0072B2", "#CC79A7", "#E69F00"


def interval(
    number: int, activity: Activity, first: int, end: int, is_last: bool = False, name: str = ""
) -> Interval:
    name = name or f"request {number}"
    return Interval(number, name, activity, first, end, 10 + 0.5 * first, 10 + 0.5 * end, is_last)


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


def boxes(figure: Figure, colour: str) -> list[tuple[float, float, float, float]]:
    """Left, right, bottom and height of every box of that colour; rows grow downwards."""
    found = []
    for collection in figure.axes[0].collections:
        if to_hex(collection.get_facecolor()[0]).upper() == colour:
            for path in collection.get_paths():
                (left, low), (right, high) = path.vertices.min(0), path.vertices.max(0)
                box = (left, right, high, high - low)
                found.append(tuple(round(float(x), 6) for x in box))
    return found


def bars(figure: Figure, colour: str) -> list[tuple[float, float, float]]:
    """Left, right and row of every bar of that colour."""
    return [
        (left, right, round(bottom - height / 2, 6))
        for left, right, bottom, height in boxes(figure, colour)
    ]


def marks(figure: Figure) -> list[tuple[float, float]]:
    [line] = figure.axes[0].lines
    return [(float(x), float(y)) for x, y in line.get_xydata()]


def labels(figure: Figure) -> list[str]:
    return [tick.get_text() for tick in figure.axes[0].get_yticklabels()]


def test_steps_and_seconds() -> None:
    figure = plot_intervals(INTERVALS)
    assert bars(figure, DECODE) == [(4, 9, 0), (11, 15, 0)]
    assert bars(figure, SWAPPED) == [(9, 11, 0)]
    assert bars(figure, WAITING) == [(3, 7, 1)]  # no bars of zero length
    assert bars(figure, PREFILL) == [(2, 4, 0), (9, 10, 1)]
    assert marks(figure) == [(15, 0)]
    assert labels(figure) == ["request 0", "request 1"]
    names = ["prefill", "recompute", "decode", "waiting", "preempted", "swapped out", "ended"]
    assert legend(figure) == names
    assert figure.get_size_inches()[0] * figure.dpi == 800
    # bars of computed steps are wider, and recomputed ones are hatched
    wide, narrow = (boxes(figure, colour)[0][3] for colour in (DECODE, SWAPPED))
    assert [box[3] for box in boxes(figure, PREFILL)] == [wide, wide] and wide > narrow
    hatched = [x.get_hatch() for x in figure.axes[0].collections if x.get_hatch()]
    assert hatched == ["//////"]
    seconds = plot_intervals(INTERVALS, "seconds")  # since the first shown
    assert bars(seconds, DECODE) == [(1, 3.5, 0), (4.5, 6.5, 0)]
    assert seconds.axes[0].get_xlabel() == "seconds"
    assert bars(plot_intervals(INTERVALS, "seconds", max_requests=1), WAITING) == [(0, 2, 0)]


def test_drafts_are_columns_in_the_bar_of_their_request() -> None:
    drafts = [
        Verification(0, 5, 12.5, 12.75, 8, 2),
        Verification(0, 12, 16, 16.5, 4, 4),
        Verification(1, 9, 14, 14.5, 1, 0),
    ]
    drafted, accepted = "#F0E442", "#009E73"
    figure = plot_intervals(INTERVALS, verifications=drafts)
    first, second, third = (5, 6, 0.38), (12, 13, 0.38), (9, 10, 1.38)
    assert boxes(figure, drafted) == [(*first, 0.76), (*second, 0.38), (*third, 0.095)]
    assert boxes(figure, accepted) == [(*first, 0.19), (*second, 0.38), (*third, 0)]
    assert legend(figure)[-3:] == ["drafted: 13", "accepted: 6", "ended"]
    seconds = plot_intervals(INTERVALS, "seconds", verifications=drafts[:2])
    assert boxes(seconds, drafted) == [(1.5, 1.75, 0.38, 0.76), (5, 5.5, 0.38, 0.38)]
    figure.savefig(io.BytesIO())


def test_the_last_requests_and_names_as_they_are() -> None:
    names = [rf"$\bad{{{number}$" for number in range(50)]
    many = [interval(i, A.DECODE, i, i + 3, name=name) for i, name in enumerate(names)]
    figure = plot_intervals(many, max_requests=10)
    assert labels(figure) == names[-10:]
    assert figure.axes[0].get_ylabel() == "the last 10 of 50 requests"
    figure.savefig(io.BytesIO())  # a name is never parsed as a formula
    long = plot_intervals([interval(0, A.DECODE, 0, 1, name="x" * 100)])
    assert len(labels(long)[0]) == 16
    for count in (0, 1, 40, 400):
        many = [interval(i, A.DECODE, i, i + 9) for i in range(count)]
        figure = plot_intervals(many, max_requests=1000)
        assert figure.get_size_inches()[1] * figure.dpi < 1200
    arguments: dict[str, Any]
    for arguments in ({"unit": "hours"}, {"max_requests": 0}):
        [name] = arguments
        with pytest.raises(ValueError, match=f"`{name}` is .*must be"):
            plot_intervals(INTERVALS, **arguments)


def test_requests_of_an_engine() -> None:
    with engine_of(num_blocks=20, preemption="swap") as engine:
        assert labels(engine.plot_timeline()) == []
        engine.generate(prompts(40, 24, 33, 5, 60), GREEDY)
        axes = Figure().subplots()
        assert engine.plot_timeline("seconds", ax=axes) is axes.figure
    figure = engine.plot_timeline()  # after `free`
    assert labels(figure) == [f"request-{number}" for number in range(5)]
    assert len(marks(figure)) == 5
    assert bars(figure, SWAPPED) and bars(figure, DECODE)
    with engine_of() as engine:
        engine.generate(prompts(9), GREEDY, assistant_model=models.get_assistant("llama"))
        stats, html = engine.stats(), engine._repr_html_()
        assert len(boxes(engine.plot_timeline(), "#F0E442")) == stats.num_drafts > 0
    assert f"{stats.num_draft_tokens}, {stats.num_accepted_tokens}</td>" in html
