"""`python -m benchmarks.attention --quick` prints its table; peers are checked before they are
timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention, attention_data, report, runner
from benchmarks.attention_data import Case, Setting
from benchmarks.attention_peers import (
    CONTIGUOUS,
    INT8,
    Contiguous,
    Flex,
    Peer,
    Transformers,
    peers,
    time_limit,
)
from benchmarks.ceilings import Ceilings
from benchmarks.models import SHAPES
from hf_paged import kernels

FLOPS = {"bfloat16": 1e12}


@pytest.mark.slow
def test_quick_prints_and_writes_every_phase_and_peer(tmp_path, capsys):
    attention.main(["--quick", "--json", str(tmp_path / "found.json")])
    printed, rows = capsys.readouterr().out, report.read(tmp_path / "found.json")["rows"]
    assert "| contiguous sdpa / it |" in printed and "GB/s" in printed
    assert "Measured ceilings" in printed
    contenders = {row["system"] for row in rows}
    names = {"ours", "HF sdpa", "HF eager", "flex_attention"}
    assert contenders >= {CONTIGUOUS, *names, "varlen_attn"}
    assert contenders >= {f"ours: {name}" for name in kernels.BACKEND_NAMES}
    for phase in ("decode", "chunk", "prefill"):
        of_phase = [row for row in rows if f" {phase} " in row["case"]]
        assert {row["system"] for row in of_phase} == contenders  # none is left out silently
        timed = {row["system"] for row in of_phase if all(row["seconds"]) and row["seconds"]}
        assert timed >= {CONTIGUOUS, "ours", INT8, "ours: reference", "ours: gather"}
        assert timed >= {"HF sdpa", "HF eager"}
    assert not [row for row in rows if row.get("problem", "").startswith("failed")]


def test_a_missing_peer_is_not_installed(monkeypatch):
    setting = attention_data.settings("cpu", quick=True)[0]
    (absent,) = (peer for peer in peers(quick=True, flex_seconds=0) if peer.name == "varlen_attn")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert absent.missing(setting) == "not installed"


class Wrong(Peer):
    name = "wrong"

    def prepare(self, data):
        return lambda layer: torch.zeros(data.query.transpose(1, 2).shape)


class Broken(Peer):
    name = "broken"

    def prepare(self, data):
        raise RuntimeError("no kernel image\nand more")


def test_a_peer_that_differs_or_fails_is_listed_and_not_timed():
    setting, limits = attention_data.settings("cpu", quick=True)[0], Ceilings(1e12, FLOPS)
    case = attention.case_of(setting, [Wrong(), Broken(), Contiguous()], limits, True, 0.001)
    rows = {row["system"]: row for row in runner.rows_of_case(case, 1)}
    assert [name for name, row in rows.items() if row["seconds"]] == [CONTIGUOUS]
    said = "failed: ArithmeticError: differs from the reference by"
    assert rows["wrong"]["problem"].startswith(said)
    assert rows["broken"]["problem"] == "failed: RuntimeError: no kernel image"


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
@pytest.mark.parametrize(
    "peer", [Contiguous(), Transformers("sdpa"), Transformers("eager")], ids=lambda p: p.name
)
@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_peers_give_the_references_numbers(case, peer, dtype):
    data = attention_data.make(Setting(SHAPES["llama-tiny"], case, 8, dtype, "cpu"), quick=True)
    attention.prepared(peer, data)  # raises if they differ


def test_bytes_and_operations_of_a_case():
    case = Case("by hand", "chunk", (5, 6), 2)  # queries see 4 and 5, and 5 and 6 tokens
    assert case.pairs == 4 + 5 + 5 + 6
    # 4 query heads, 2 K/V heads, head dim 32
    setting = Setting(SHAPES["llama-tiny"], case, 16, "bf16", "cpu")
    assert setting.flops == 4 * 4 * 32 * 20
    assert setting.num_bytes == 2 * 32 * (2 * 11 * 2 + 2 * 2 * 2 * 4)


def test_figures_are_those_of_a_layer():
    setting = attention_data.settings("cpu", quick=True)[0]
    limits = Ceilings(1e12, FLOPS)
    case = attention.case_of(setting, [Contiguous(), Wrong()], limits, True, 0.001)
    ours, wrong = runner.rows_of_case(case, 2)
    (seconds, *_), figures = ours["seconds"], ours["figures"]
    assert wrong["problem"].startswith("failed: ArithmeticError") and seconds > 0
    share = figures["of bandwidth, %"] / figures["of matmul, %"]
    assert share == pytest.approx(setting.num_bytes / setting.flops)


def test_compiling_that_takes_too_long_is_given_up_for_the_run(monkeypatch):
    monkeypatch.setattr(
        torch, "compile", lambda *_, **__: lambda *_, **__: __import__("time").sleep(5)
    )
    flex = Flex(0.05)
    data = attention_data.make(attention_data.settings("cpu", quick=True)[0], quick=True)
    with pytest.raises(TimeoutError, match="took more than"):
        attention.prepared(flex, data)
    assert flex.missing(data.setting) == "failed: compiling took more than 0.05 s"
    with time_limit(10):
        pass  # the alarm is off again
