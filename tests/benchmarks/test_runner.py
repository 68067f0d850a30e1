"""Turns, their statistics, and the tables of their rows."""

from __future__ import annotations

import time

import pytest

from benchmarks import paired, report, runner, tables


def counted(found):
    return {name: len(turns) for name, turns in found.items()}


def test_turns_alternate_and_end_in_time():
    calls = []
    arms = runner.each(lambda turn, name: calls.append((name, turn)) or 1.0, ["a", "b"])
    case = runner.Case("in time", arms)
    assert counted(runner.take_turns(case, 3, 1)) == {"a": 3, "b": 3}
    forwards = [[("a", turn), ("b", turn)] for turn in range(-1, 3)]
    assert calls == forwards[0][::-1] + forwards[1] + forwards[2][::-1] + forwards[3]
    found = runner.take_turns(case._replace(fewest=2, until=0.0, first=8), 4, 1)
    assert counted(found) == {"a": 2, "b": 2} and calls[-2:] == [("b", 9), ("a", 9)]
    calls.clear()
    runner.take_turns(case._replace(until=0.0, end=0.0), 2, 5)
    assert [turn for name, turn in calls if name == "a"] == [-5, 0]


def test_a_slow_turn_ends_a_case_that_the_minutes_have_no_second_one_for():
    def work(turn, name):
        time.sleep(0.2 if name == "plain" and turn >= 0 else 0.001)
        return 1.0

    case = runner.Case("slow", runner.each(work, ["plain", "ours"]), fewest=3)
    found = runner.take_turns(case._replace(end=time.perf_counter() + 0.3), 3, 1)
    assert counted(found) == {"plain": 1, "ours": 1}
    case = case._replace(once=("plain",), end=time.perf_counter() + 0.3)  # counts no longer
    assert len(runner.take_turns(case, 3, 1)["ours"]) == 3


def test_after_a_turn_the_fastest_setting_of_a_system_goes_on_alone():
    seconds = {"plain": 9.0, "a, u8": 2.0, "a": 1.0, "b": 3.0, "b, fast": "skipped: not here"}
    arms = runner.each(lambda turn, name: seconds[name], list(seconds))
    case = runner.Case("settings", arms, settings=[["a, u8", "a"], ["b", "b, fast"]])
    counts = {"plain": 3, "a, u8": 1, "a": 3, "b": 3, "b, fast": 1}
    assert counted(runner.take_turns(case, 3, 1)) == counts


def test_cases_take_the_place_of_older_ones():
    def run(number, **rows):
        rows = [{"case": case, "seconds": [seconds]} for case, seconds in rows.items()]
        return {"facts": number, "rows": rows}

    runs = runner.added(runner.added([], run(1, a=1.0, b=1.0)), run(2, b=2.0))
    assert runs == [run(1, a=1.0), run(2, b=2.0)]
    assert runner.added(runs, run(3, a=3.0)) == [run(2, b=2.0), run(3, a=3.0)]


def test_interval_of_the_median():
    assert paired.ratios([4.0, 9.0, 1.0], [2.0, 3.0]) == [2.0, 3.0], "of turns that both ran"
    assert paired.interval([1.0, 2.0, 3.0, 4.0]) is None
    assert paired.interval([2.0] * 5) == (2.0, 2.0)
    values = [1.0 + 0.01 * index for index in range(21)]
    low, high = paired.interval(values)
    # the median of 21 lies between the 6th and the 16th smallest with a probability of 97.3%
    # (binomial), of 92.2% between the 7th and the 15th
    assert 1.05 <= low <= 1.06 and 1.14 <= high <= 1.15
    assert paired.estimate([1.0]).text(2) == "1.00"
    assert paired.estimate([1.0, 2.0]).text(1) == "1.5 (1.0 to 2.0)"


@pytest.mark.parametrize(
    ("values", "target", "is_met"),
    [
        ([1.2, 1.4, 1.5], 1.3, True),
        ([1.2, 1.2, 1.5], 1.3, False),  # too few turns for an interval: the median decides
        ([0.99] * 15, 1 / paired.NOT_SLOWER, True),
        ([0.96] * 15, 1 / paired.NOT_SLOWER, False),
        ([0.96] * 8 + [0.99] * 8, 1 / paired.NOT_SLOWER, True),  # the interval reaches across
    ],
)
def test_targets_are_reached_by_intervals(values, target, is_met):
    assert paired.estimate(values).reaches(target) == is_met


def rows_of(case, **seconds):
    targets = {"plain": {"ours": 2.0}, "generate_batch": {"ours": 6.0}}
    rows = []
    for name, turns in seconds.items():
        row = runner.row_of(case, name.replace("_batch_", ", batch "), n=1)
        over = {base: of.get(name) for base, of in targets.items()}
        rows.append(row | {"seconds": turns, "over": over, "equal": 0.5})
    return rows


def test_turns_of_a_second_process_are_added_to_those_of_the_first():
    first = rows_of("W6", plain=[2.0, 2.0, 3.0], ours=[1.0])
    second = rows_of("W6", ours=[2.0, 3.0])
    _, row = tables.pooled([{"rows": first}, {"rows": [second[0] | {"equal": 0.0}]}])
    assert (row["seconds"], row["processes"], row["equal"]) == ([1.0, 2.0, 3.0], 2, 0.25)


def test_tables_compare_with_the_fastest_plain_and_judge_ours_only():
    seconds = {"plain_batch_16": [9.0], "plain_batch_32": [4.0]}
    rows = rows_of("W2", **seconds, ours=[2.0], generate_batch=[20.0])
    ratios = {
        (row["system"], base): (ratio.value, target)
        for row, base, ratio, target in tables.comparisons(rows)
    }
    assert ratios["plain, batch 16", "plain"] == (4 / 9, None)
    assert ratios["ours", "plain"] == (2.0, 2.0) and ratios["generate_batch", "plain"][0] == 0.2
    assert ratios["ours", "generate_batch"] == (10.0, 6.0)
    assert ("plain, batch 32", "plain") not in ratios
    assert tables.targets(rows) == "Targets: 2 of 2 are met."
    ours = tables.pooled([{"rows": rows}] * 2)[2] | {"limits": {"n": 0.5}}
    said = "Targets: 0 of 1 are met; not met: W2, ours: n 1, not at most 0.5."
    assert tables.targets([ours]) == said
    line = tables.table([*rows[:2], ours, rows[3]]).splitlines()[4]
    assert line == (
        "| W2 | ours | 2, 2 | 2 | 2.00, at least 2: met | 10.00, at least 6: met | 50% equal |"
        " 1, at most 0.5: not met |"
    )


def test_markdown_puts_numbers_to_the_right():
    rows = [{"case": "a|b", "ms": 1.23456, "met": True}, {"problem": "none", "ms": 123456.7}]
    assert report.markdown(rows).splitlines() == [
        "| case | ms | met | problem |",
        "|---|--:|---|---|",
        "| a\\|b | 1.235 | yes |  |",
        "|  | 123457 |  | none |",
    ]
    assert report.markdown(rows, {"ms": "time, ms"}).splitlines()[0] == "| time, ms |"


def test_a_run_that_is_killed_while_writing_leaves_the_former_file(tmp_path, monkeypatch):
    path = tmp_path / "table.json"
    report.replace_file(path, '{"rows": [1]}')
    monkeypatch.setattr("pathlib.Path.replace", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        report.replace_file(path, '{"rows": [2]}')
    assert report.read(path) == {"rows": [1]}
