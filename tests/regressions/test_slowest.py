"""`tests/slow.txt` names existing tests, and no more than a plain run must leave out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support import slowest

REPORT = """<testsuites><testsuite name="pytest">
<testcase classname="tests.cache.test_pages" name="test_a[x-&lt;y&gt;]" time="1.5" />
<testcase classname="tests.test_step" name="test_b" time="0.25" />
<testcase classname="tests.test_step" name="test_c" time="3" />
</testsuite></testsuites>"""


@pytest.mark.parametrize("path", sorted({name.partition("::")[0] for name in slowest.read()}))
def test_tests_that_are_listed_are_there(path: str) -> None:
    names = {name.partition("::")[2] for name in slowest.read() if name.startswith(f"{path}::")}
    defined = set(re.findall(r"^(?:async )?def (test_\w+)\(", (slowest.ROOT / path).read_text(), re.MULTILINE))
    assert {name.partition("[")[0] for name in names} <= defined


def test_the_slowest_are_chosen(tmp_path: Path) -> None:
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    times = slowest.times_of(report)
    assert times == {
        "tests/cache/test_pages.py::test_a[x-<y>]": 1.5,
        "tests/test_step.py::test_b": 0.25,
        "tests/test_step.py::test_c": 3.0,
    }
    assert slowest.choose(times, 5) == []
    assert slowest.choose(times, 4) == ["tests/test_step.py::test_c"]
    assert slowest.choose(times, 0.25) == ["tests/cache/test_pages.py::test_a[x-<y>]", "tests/test_step.py::test_c"]
