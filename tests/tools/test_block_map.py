"""The block map's cells, numbers and legend against the states that they show."""

from __future__ import annotations

import io

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
    to_cells,
)
from tests.support import models
from tests.support.missing import take_away

STATES = [0, -1, 1, 2, 3, 4, 7, 8, 100]


def colours(figure: Figure) -> list[list[str]]:
    """Colours of the cells, by group."""
    [ax] = figure.axes
    return [[to_hex(face).upper() for face in each.get_facecolors()] for each in ax.collections]


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for text in figure.axes[0].texts]


def legend(figure: Figure) -> list[str]:
    found = figure.axes[0].get_legend()
    assert found is not None
    return [text.get_text() for text in found.get_texts()]


def test_kinds() -> None:
    labels = [KINDS[kind_index(state)].label for state in STATES]
    assert labels == [
        *("free", "cached", "used by one", "shared by 2 or 3", "shared by 2 or 3"),
        *("shared by 4 to 7", "shared by 4 to 7", "shared by 8 or more", "shared by 8 or more"),
    ]
    assert count_kinds(STATES) == [1, 1, 1, 2, 2, 2]
    assert len({kind.colour for kind in KINDS}) == len(KINDS)


def test_a_cell_of_several_blocks_is_what_most_of_them_are() -> None:
    assert to_cells([1, 1, 0, 0, 0, 1, -1], 3) == [kind_index(1), kind_index(0), kind_index(-1)]


def test_group_labels() -> None:
    keys = (None, 4096, ("self", None), ("self", 8), ("cross", None))
    assert [group_label(key) for key in keys] == [
        *(
            "full attention",
            "window of 4,096 tokens",
            "full attention",
            "window of 8 tokens",
            "cross attention",
        )
    ]


def test_every_block_has_its_colour_and_shared_ones_their_number() -> None:
    figure = plot_block_map({None: STATES})
    assert colours(figure) == [[KINDS[kind_index(state)].colour for state in STATES]]
    assert texts(figure) == ["2", "3", "4", "7", "8", "100"]
    counts = [f"{kind.label}: {count}" for kind, count in zip(KINDS, count_kinds(STATES))]
    assert legend(figure) == counts


def test_groups_lie_under_one_another() -> None:
    figure = plot_block_map({None: [1] * 40, 8: [0] * 5, 16: []}, title=r"$\bad{ groups$")
    assert [len(cells) for cells in colours(figure)] == [40, 5]
    assert texts(figure) == ["full attention: 40 blocks", "window of 8 tokens: 5 blocks"]
    first, second = figure.axes[0].collections
    lowest = max(y for path in first.get_paths() for _, y in path.vertices)
    assert min(y for path in second.get_paths() for _, y in path.vertices) > lowest
    figure.savefig(io.BytesIO())


@pytest.mark.parametrize(
    "num_blocks", [0, 1, 511, 513, 2049, MAX_CELLS, MAX_CELLS + 1, 5 * MAX_CELLS]
)
def test_any_size_fits_800_pixels(num_blocks: int) -> None:
    figure = plot_block_map({None: [0, 1] * (num_blocks // 2) + [1] * (num_blocks % 2)})
    width, height = figure.get_size_inches() * figure.dpi
    assert width == 800 and 80 < height < 900
    drawn = sum(map(len, colours(figure)))
    assert drawn <= MAX_CELLS and (drawn == num_blocks or num_blocks > MAX_CELLS)
    assert legend(figure)[1:3] == [
        f"free: {num_blocks // 2:,}",
        f"used by one: {num_blocks - num_blocks // 2:,}",
    ]


def test_notebooks_show_it_once() -> None:
    figure = plot_block_map({None: STATES})
    assert figure._repr_png_().startswith(b"\x89PNG")
    assert not pyplot.get_fignums()


def test_axes_of_the_callers() -> None:
    figure = Figure()
    left, right = figure.subplots(1, 2)
    assert plot_block_map({None: [0]}, ax=right) is figure
    assert right.collections and not left.collections


def test_of_an_engine() -> None:
    with PagedEngine(models.get("gemma3"), {"block_size": 8, "num_blocks": 64}) as engine:
        assert texts(engine.plot_memory()) == ["no blocks yet"]
        engine.add_request([5] * 30, {"max_new_tokens": 4, "do_sample": False, "num_beams": 3})
        engine.step()
        figure, block_map = engine.plot_memory(), engine.block_map()
        states = [state for states in block_map.values() for state in states]
        assert sum(map(len, colours(figure))) == len(states)
        assert max(states) == 3 and "3" in texts(figure)
        used = engine.stats().used_blocks
        title = figure.axes[0].get_title("left")
        assert title.endswith(f"{used} blocks in use of 64, {64 - len(states)} not allocated")
    assert texts(engine.plot_memory()) == ["no blocks yet"]  # after `free`


def test_of_a_cache() -> None:
    model = models.get("llama")
    cache = PagedCache(model.config, {"block_size": 8})
    model(models.token_ids(2, 20), past_key_values=cache)
    assert colours(cache.plot_memory())[0].count(KINDS[kind_index(1)].colour) == 6
    cache.free()
    assert KINDS[kind_index(1)].colour not in colours(cache.plot_memory())[0]


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    take_away(monkeypatch, "matplotlib")
    with PagedEngine(models.get("llama")) as engine:
        for draw in (engine.plot_memory, engine.plot_timeline):
            with pytest.raises(
                ImportError, match=r'needs matplotlib: pip install "hf_paged\[viz\]"'
            ):
                draw()


def test_a_library_that_is_there_but_broken_is_not_called_missing() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"No module named 'tests\.nothing'"):
        import_matplotlib("tests.nothing.at_all")
