"""The papers' figures: exact bookkeeping of the simulations, and the rows of every part."""

from __future__ import annotations

import os

import pytest
import torch

import hf_paged
from benchmarks import report
from benchmarks.models import SHAPES, build
from benchmarks.paper import __main__ as command
from benchmarks.paper import simulation, spikes
from benchmarks.paper.traces import SHAREGPT, make_trace
from hf_paged.cache.block_pool import BlockPool
from hf_paged.virtual.pages import MemoryFile
from tests.support.pools import PoolGroup, manager_of

mapped = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="no memory files")


def test_memory_is_counted_in_the_steps_in_which_requests_wait():
    # 7 blocks: the first two requests take 5, then 6, and the third waits until one ends
    steps = list(simulation.serve([(32, 4), (33, 2), (40, 5)], num_slots=7 * 16))
    assert steps[0] == (2, 65, 5 * 16)
    assert {step.rows for step in steps} == {2} and len(steps) == 2
    assert steps[1].held == 67 and steps[1].taken == 6 * 16
    steps = list(simulation.serve(make_trace(SHAREGPT, 300)))
    assert all(step.held <= step.taken <= simulation.OPT_13B_SLOTS for step in steps)
    assert simulation.used_percent(steps) > 90 and simulation.empty_percent(steps) < 4


@pytest.mark.parametrize(("count", "prompt", "output"), [(4, 19, 40), (3, 32, 17)])
def test_grown_samples_take_the_blocks_that_the_engine_takes(count, prompt, output):
    manager = manager_of([PoolGroup(BlockPool(100))], 16, prefix_caching=False)
    # the last token's K and V are never computed
    _, _, peak = simulation.grow(manager, count, prompt, output - 1)
    assert manager.groups[0].pool.num_used == 0
    options = {"do_sample": True, "num_return_sequences": count, "max_new_tokens": output}
    model = build(SHAPES["llama-tiny"], "cpu", torch.bfloat16)
    with hf_paged.PagedEngine(model, {"prefix_caching": False}) as engine:
        engine.generate([list(range(5, 5 + prompt))], {**options, "eos_token_id": None})
        assert engine.stats().peak_blocks == peak
    for asked, message in (((4, 20, 20), "4 samples"), ((1, 64, 1), "a prompt of 64")):
        manager = manager_of([PoolGroup(BlockPool(3))], 16, prefix_caching=False)
        with pytest.raises(ValueError, match=f"no room for {message}"):
            simulation.grow(manager, *asked)


@mapped
def test_mappings_are_counted():
    own, shape = MemoryFile.map, SHAPES["llama-tiny"]
    model = build(shape)
    model.set_attn_implementation("hf_paged")
    with spikes.mmaps() as sizes:
        spikes.Decoding(model, shape, 1, 40).step()
    assert sizes and MemoryFile.map is own


@pytest.mark.slow_cases("preempted", "spikes")
@pytest.mark.parametrize("name", command.PARTS)
def test_every_part_prints_its_rows(name, tmp_path, capsys):
    if name == "spikes" and not hasattr(os, "memfd_create"):
        pytest.skip("no memory files")
    path = tmp_path / "paper.json"
    assert command.BENCHMARK.main(["--quick", "--only", name, "--json", str(path)]) == 0
    (run,), printed = report.read(path)["runs"], capsys.readouterr().out
    for row in run["rows"]:
        assert row["case"] in printed and row["figures"]["published"] in printed
        assert "arXiv" in row["figures"]["published in"]
        assert any(row["seconds"]) or row["figures"]["ours"] in printed


def test_a_run_keeps_other_parts(tmp_path, capsys):
    path = tmp_path / "paper.json"
    for name in ("sharing", "batch_size", "batch_size"):
        command.BENCHMARK.main(["--quick", "--only", name, "--json", str(path)])
    first, second = report.read(path)["runs"]
    assert first["rows"][0]["case"].startswith("blocks saved by sharing, 2 samples")
    assert len(second["rows"]) == 1
    for part in ("at spread 0.5", "at spread 1.5", ".."):
        assert part in second["rows"][0]["figures"]["ours"]
    path.write_text("{")
    assert command.BENCHMARK.main(["--quick", "--only", "sharing", "--json", str(path)]) == 2
    assert path.read_text() == "{", "it adds nothing to a damaged file"
