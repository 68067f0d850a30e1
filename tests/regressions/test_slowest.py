"""`tests/slow.txt` names existing tests, and no more than a plain run must leave out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from hf_paged import rooms
from hf_paged.rooms import ROOMS
from tests.support import slowest

REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.virtual.test_pages" name="test_a[x-&lt;y&gt;]" time="1.5" />
<testcase classname="tests.test_step" name="test_b" time="0.25" />
<testcase classname="tests.test_load.TestEngine" name="runTest" time="0.25" />
<testcase classname="tests.test_step" name="test_c" time="3" />
</testsuite></testsuites>"""


@pytest.mark.parametrize("path", sorted({name.partition("::")[0] for name in slowest.read()}))
def test_tests_that_are_listed_are_there(path: str) -> None:
    room = path.split("/")[1]
    if room in ROOMS:
        rooms.require(room, "the list")
    names = {name.partition("::")[2] for name in slowest.read() if name.startswith(f"{path}::")}
    defined = re.findall(
        r"^(?:(?:async )?def )?([tT]est\w+)(?:\(| = )",
        (slowest.ROOT / path).read_text(),
        re.MULTILINE,
    )
    assert {re.split(r"\[|::", name)[0] for name in names} <= {*defined}


def test_the_slowest_are_chosen(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    times = slowest.times_of(report)
    a, b, c = (
        "tests/virtual/test_pages.py::test_a[x-<y>]",
        "tests/test_step.py::test_b",
        "tests/test_step.py::test_c",
    )
    assert times == {a: 1.5, b: 0.25, c: 3.0, "tests/test_load.py::TestEngine::runTest": 0.25}
    assert slowest.choose(times, 5) == []
    assert slowest.choose(times, 4) == [c]
    assert slowest.choose(times, 0.5) == [c, a]


def test_an_eighth_of_slow_tests_is_kept() -> None:
    grid = [
        f"tests/virtual/test_pages.py::test_cell[{row}-{column}]"
        for row in range(8)
        for column in range(4)
    ]
    left = slowest.left_to_full(grid)
    assert left < {*grid} and len(left) == 28
    assert len({name[-2] for name in {*grid} - left}) > 1, (
        "an order of the grid's own would leave columns out"
    )
    alone = [f"tests/test_load.py::test_{number}" for number in range(800)]
    assert 80 <= len({*alone} - slowest.left_to_full(alone)) <= 120
