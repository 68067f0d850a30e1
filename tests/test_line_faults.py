"""The net of `tests.support.line_faults`: it tells what a fault left behind, and which places a
scenario visits."""

from __future__ import annotations

import os
import signal

import pytest

from hf_paged.cache.block_pool import BlockPool
from tests.support import line_faults, models
from tests.support.line_faults import Place, Site, choose_sites, run_in_child, visited
from tests.support.scenarios import Case
from tests.support.tools import run_apart


class Blocks(Case):
    """Takes blocks and gives them back; a fault in between is noticed, since none may be used at
    the end."""

    def __init__(self, end: str = "") -> None:
        self.model, self.pool, self.end = models.get("llama"), BlockPool(4), end

    def run(self) -> None:
        self.pool.release(self.pool.allocate(2))

    def check(self) -> None:
        if self.end == "crash":
            os.kill(os.getpid(), signal.SIGKILL)
        while self.end == "hang":
            signal.pause()
        assert self.pool.num_used == 0, "blocks are lost"


def places(case: Case, function: str) -> list[Place]:
    return [place for place in visited(case, opcodes=False) if place[3] == function]


@pytest.mark.slow
@pytest.mark.parametrize("fault", line_faults.FAULTS)
def test_a_fault_that_loses_blocks_is_reported(fault: str) -> None:
    case = Blocks()
    releases, allocates = places(case, "BlockPool.release"), places(case, "BlockPool.allocate")
    outcome, why = run_in_child(case, Site(*releases[0], fault=fault))
    assert outcome == "wrong" and why.startswith("AssertionError: blocks are lost")
    assert run_in_child(case, Site(*allocates[0], fault=fault)) == ("survived", "")
    assert case.pool.num_used == 0, "faults happen in a child"


@pytest.mark.slow
@pytest.mark.parametrize("end", ["hang", "crash"])
def test_a_child_that_does_not_answer_is_reported(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line_faults, "HANG_SECONDS", 0.5 if end == "hang" else 60)
    first, *_ = places(Blocks(), "BlockPool.allocate")
    assert run_in_child(Blocks(end), Site(*first))[0] == end


def test_a_place_that_is_not_visited_is_reported() -> None:
    assert run_in_child(Blocks(), Site("cache/block_pool.py", 1, -1, "")) == ("not reached", "")


def test_each_line_fails_in_the_first_scenario_that_visits_it() -> None:
    visits = visited(Blocks(), opcodes=False)
    more = visits + type(visits)({("more.py", 1, -1, "f"): 3})
    sites = choose_sites(
        {"first": visits, "second": more}, ["MemoryError", "OSError"], sample=0, seed=0
    )
    assert len(sites["first"]) == len(visits) > 10
    assert {site.fault for site in sites["first"]} == {"MemoryError", "OSError"}
    assert sites["second"] == [Site("more.py", 1, -1, "f")]
    later = choose_sites({"first": visits, "engine.step": more}, ["OSError"], 0, 0)["engine.step"]
    assert Site("more.py", 1, -1, "f", visit=2, fault="OSError") in later and len(later) > 1
    drawn = choose_sites({"second": more}, ["OSError"], sample=40, seed=0)["second"]
    assert len(drawn) == 40
    assert all(1 <= x.visit <= more[x.file, x.line, -1, x.function] for x in drawn)


@pytest.mark.slow
@pytest.mark.parametrize("name", line_faults.SCENARIOS)
def test_faults_at_random_bytecodes_are_survived(name: str) -> None:
    """Runs in a process of its own: children are forked from one that has run nothing else."""
    options = ("--scenario", name, "--sample", 22, "--opcodes")
    done = run_apart(".line_faults", *options, timeout=900)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "\n22 faults in " in done.stdout


@pytest.mark.slow_cases(but=["Ledger.append"])
@pytest.mark.parametrize("function", ["StepLoop.sample", "Ledger.append", "Ledger.deliver"])
def test_an_interrupt_at_any_line_of_a_step_loses_no_request(function: str) -> None:
    """The whole net faults each line once, in the first scenario that visits it: a `generate`
    call, whose rows no reader waits for."""
    case = line_faults.SCENARIOS["engine.step"]()
    visits = visited(case, opcodes=False)
    wrong = []
    for place, count in visits.items():
        if place[3] == function:
            outcome, why = run_in_child(case, Site(*place, visit=min(3, count), fault="SIGINT"))
            if outcome != "survived":
                wrong.append(f"line {place[1]}: {outcome}: {why}")
    assert not wrong
