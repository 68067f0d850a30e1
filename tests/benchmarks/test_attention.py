"""`python -m benchmarks.attention --quick` prints its table; peers are checked before they are
timed, and so are the block sizes of `benchmarks.tune --block-sizes`."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest
import torch

from benchmarks import attention, attention_data, attention_peers, block_costs, report, runner
from benchmarks.attention_data import Case, Setting
from benchmarks.attention_peers import CONTIGUOUS, INT8
from benchmarks.ceilings import Ceilings
from benchmarks.models import SHAPES
from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.config import KV_DTYPES
from hf_paged.kernels import costs

TINY = SHAPES["llama-tiny"]


@pytest.mark.slow
def test_quick_prints_and_writes_every_phase_and_peer(tmp_path, capsys):
    attention.BENCHMARK.main(["--quick", "--json", str(tmp_path / "found.json")])
    printed, rows = capsys.readouterr().out, report.read(tmp_path / "found.json")["rows"]
    assert "| contiguous sdpa / it |" in printed and "Measured ceilings" in printed
    contenders = {row["system"] for row in rows}
    ours = {"ours", *(f"ours: {name}" for name in kernels.BACKEND_NAMES)}
    assert contenders >= ours | {CONTIGUOUS, "HF sdpa", "varlen_attn"}
    for phase in ("decode", "chunk", "prefill"):
        of_phase = [row for row in rows if f" {phase} " in row["case"]]
        assert {row["system"] for row in of_phase} == contenders  # none is left out silently
        timed = {row["system"] for row in of_phase if all(row["seconds"]) and row["seconds"]}
        assert timed >= {CONTIGUOUS, "ours", INT8, "ours: reference", "ours: gather", "HF sdpa"}
    assert not [row for row in rows if row.get("problem", "").startswith("failed")]


def test_a_peer_that_differs_or_fails_is_listed_and_not_timed(monkeypatch):
    def broken(data):
        raise RuntimeError("no kernel image\nand more")

    def wrong(data):
        return lambda layer: torch.zeros(data.query.transpose(1, 2).shape)

    setting, limits = attention_data.settings("cpu", quick=True)[0], Ceilings(1e12, {"bfloat16": 1})
    for prepare in (wrong, broken):
        monkeypatch.setitem(attention_peers.PEERS, prepare.__name__, prepare)
    names = [CONTIGUOUS, "wrong", "broken", "varlen_attn"]
    case = attention.case_of(setting, names, limits, True, 0.001)
    rows = {row["system"]: row for row in runner.rows_of_case(case, 1)}
    assert [name for name, row in rows.items() if row["seconds"]] == [CONTIGUOUS]
    said = "failed: ArithmeticError: differs from the reference by"
    assert rows["wrong"]["problem"].startswith(said)
    assert rows["broken"]["problem"] == "failed: RuntimeError: no kernel image"
    assert rows["varlen_attn"]["problem"] == "skipped: needs a CUDA device"
    figures = rows[CONTIGUOUS]["figures"]
    share = figures["of bandwidth, %"] / figures["of matmul, %"]
    assert share == pytest.approx(setting.num_bytes / 1e12 / setting.flops)


@pytest.mark.parametrize(
    "case",
    [
        Case("ragged decode", "decode", (5, 33, 17)),
        Case("ragged chunk", "chunk", (40, 70, 55), 12),
        Case("chunk", "chunk", (48, 48), 7),
        Case("prefill", "prefill", (31, 31), 31),
    ],
    ids=lambda case: case.name,
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_peers_give_the_references_numbers(case, dtype):
    data = attention_data.make(Setting(TINY, case, 8, dtype, "cpu"), quick=True)
    for name in (CONTIGUOUS, "HF sdpa"):
        attention.prepared(name, data)  # raises if they differ


def test_bytes_and_operations_of_a_case():
    case = Case("by hand", "chunk", (5, 6), 2)  # queries see 4 and 5, and 5 and 6 tokens
    assert case.pairs == 4 + 5 + 5 + 6
    # 4 query heads, 2 K/V heads, head dim 32
    setting = Setting(TINY, case, 16, "bf16", "cpu")
    assert setting.flops == 4 * 4 * 32 * 20
    assert setting.num_bytes == 2 * 32 * (2 * 11 * 2 + 2 * 2 * 2 * 4)


def test_a_run_writes_a_table_that_is_read(monkeypatch, tmp_path):
    monkeypatch.setattr(block_costs, "SIZES", [4, 16])
    rows = block_costs.write("cpu", 1, True, tmp_path)
    assert rows and all(row["figures"]["16"] == 1.0 and row["figures"]["4"] > 0 for row in rows)
    monkeypatch.setattr(costs, "FOLDER", tmp_path)
    times, source = costs.find_costs(torch.device("cpu"), torch.float32)
    assert list(times) == [4, 16] and all(time > 0 for time in times.values())
    assert source.endswith(f"/float32 on {costs.machine_name(torch.device('cpu'))}")
    (path,) = tmp_path.iterdir()
    measured = json.loads(path.read_text())["measured"]
    assert {"cpu", "revision", "command", "seconds"} <= measured.keys()


@pytest.mark.parametrize("stored", ["float32", *KV_DTYPES])
def test_block_sizes_that_are_timed_are_right(stored):
    calls = block_costs.calls_of(stored, 64, 4, (2, 3, 21, 2), "cpu")
    block_costs.check(calls, backends.gather, stored)
    attend, blocks = backends.reference.attend, calls[1].blocks
    wrong = SimpleNamespace(attend=lambda call: attend(call._replace(blocks=blocks)))
    with pytest.raises(RuntimeError, match="other numbers than the reference"):
        block_costs.check(calls, wrong, stored)
