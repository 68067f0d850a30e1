"""Notebook output: well-formed, user text escaped, no external library or network access."""

from __future__ import annotations

import subprocess
import sys
from xml.etree import ElementTree

import pytest

from hf_paged import PagedCache, PagedEngine, memory_stats
from hf_paged.tools.figures import format_bytes
from hf_paged.tools.pictures import COLUMNS, KINDS, MAX_ROWS, memory_html
from tests.support import models
from tests.support.engine_helpers import engine_of
from tests.support.rooms import needs_fingerprints


def parsed(html: str) -> ElementTree.Element:
    return ElementTree.fromstring(html)  # raises unless it is well-formed


def figures(html: str) -> dict[str, str]:
    rows = [[cell.text or "" for cell in row] for row in parsed(html).iter("tr")]
    return dict(rows)


def num_squares(html: str) -> dict[str, int]:
    """Number of squares in the strips, without the legend, by colour."""
    found: dict[str, int] = {}
    for svg in parsed(html).iter("svg"):
        if svg.get("role") == "img":
            for path in svg.iter("path"):
                colour, count = path.attrib["fill"], path.attrib["d"].count("M")
                found[colour] = found.get(colour, 0) + count
    return found


def test_text_is_never_read_as_html() -> None:
    bad = "<script>alert('&amp;')</script>\""
    html = memory_html(bad, {bad: bad}, {None: [1]})
    assert "<script" not in html
    assert parsed(html).find("b").text == bad  # type: ignore[union-attr]
    assert figures(html) == {bad: bad}
    # it takes the colour of the page
    assert not any(part in html for part in ("color:", "background", "http", "<style"))
    model = models.build("llama")
    model.__class__ = type("<img src=x onerror=alert(1)>", (type(model),), {})
    assert "<img" not in PagedEngine(model)._repr_html_()


def test_every_block_is_in_the_strip() -> None:
    html = memory_html("", {}, {None: [0, -1, 1, 1, 2, 5, 9], 8: [1]})
    assert num_squares(html) == {
        **{"#808080": 1, KINDS[0].colour: 1, KINDS[2].colour: 3},
        **{KINDS[3].colour: 1, KINDS[4].colour: 1, KINDS[5].colour: 1},
    }
    assert "full attention: 7 blocks" in html and "window of 8 tokens: 1 blocks" in html
    html = memory_html("", {}, {None: [0, 1, 2, -1] * 100_000})  # large pools stay small
    assert len(html) < 200_000
    assert sum(num_squares(html).values()) <= COLUMNS * MAX_ROWS
    assert "400,000 blocks, 521 per cell" in html


REQUESTS, BLOCKS = "requests running, waiting, ended", "blocks used, at the peak"


def test_of_an_engine_and_of_a_cache() -> None:
    engine = engine_of("gemma3", num_blocks=64)
    assert figures(engine._repr_html_())[REQUESTS] == "0, 0, 0"
    engine.add_request([5] * 30, {"max_new_tokens": 4})
    engine.step()
    html, stats = engine._repr_html_(), engine.stats()
    assert figures(html)[REQUESTS] == "1, 0, 0"
    assert figures(html)[BLOCKS] == f"{stats.used_blocks}, {stats.peak_blocks} (of 64)"
    assert num_squares(html)[KINDS[2].colour] == stats.used_blocks
    engine.free()
    assert figures(engine._repr_html_())[REQUESTS] == "0, 0, 1"
    assert not num_squares(engine._repr_html_())
    model = models.get("llama")
    cache = PagedCache(model.config, {"block_size": 8})
    parsed(cache._repr_html_())
    model(models.token_ids(2, 20), past_key_values=cache)
    html = cache._repr_html_()
    assert figures(html)[BLOCKS] == "6, 6"
    assert num_squares(html)[KINDS[2].colour] == 6
    cache.free()
    assert figures(cache._repr_html_())[BLOCKS] == "0, 6"
    parsed(PagedCache()._repr_html_())


@needs_fingerprints
def test_the_hit_rate_of_an_engine_is_that_of_the_requests_in_its_batch() -> None:
    engine, prompt = engine_of(max_num_seqs=2), list(range(5, 38))
    engine.generate([prompt], {"max_new_tokens": 1})
    for _ in range(4):
        engine.add_request(prompt, {"max_new_tokens": 8})
    engine.step()
    rows = figures(engine._repr_html_())
    assert rows[REQUESTS] == "2, 2, 1"
    assert rows["prompt tokens found in the cache"] == "64 (65%)"  # 2 * 32 of 3 * 33
    engine.free()


def test_of_memory_stats() -> None:
    model = models.build("llama")
    assert "last call" not in memory_stats(model)._repr_html_()
    options = {"max_new_tokens": 4, "do_sample": False, "num_beams": 2}
    model.generate(**models.prompt("llama", 4, 16), **options, **models.PAGED)
    stats = memory_stats(model)
    shown, share = figures(stats._repr_html_()), stats.call_bytes / stats.plain_bytes
    peak = shown["last call: keys and values at the peak"]
    assert share < 0.9 and peak.endswith(f"({share:.0%} of plain `generate`)")
    assert shown["last call: cache of plain `generate`"] == format_bytes(stats.plain_bytes)
    text = str(stats)
    assert all(label in text and value in text for label, value in shown.items())
    assert max(map(len, text.split("\n"))) < 80


def test_bytes() -> None:
    values = (0, 1023, 1024, 1536, 102_400, 1 << 20, 5 << 40, 5 << 50)
    assert [format_bytes(value) for value in values] == [
        *("0 bytes", "1023 bytes", "1 KiB", "1.5 KiB", "100 KiB", "1 MiB", "5 TiB", "5120 TiB")
    ]


@pytest.mark.slow
def test_importing_the_package_loads_no_drawing_library() -> None:
    code = "import sys, hf_paged; print({'matplotlib'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
