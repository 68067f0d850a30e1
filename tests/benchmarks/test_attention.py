"""`python -m benchmarks.attention --quick` prints its table; peers are checked before they are
timed."""

from __future__ import annotations

import pytest
import torch

from benchmarks import attention, attention_data, report
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


@pytest.fixture(scope="module")
def quick(tmp_path_factory):
    """Rows and files of one quick run."""
    directory = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        lines: list[str] = []
        patch.setattr("builtins.print", lambda *args, **_: lines.append(" ".join(map(str, args))))
        attention.main(["--quick", "--results", str(directory)])
    return "\n".join(lines), directory


@pytest.mark.slow
def test_quick_prints_and_writes_every_phase_and_peer(quick):
    printed, directory = quick
    rows = report.read(directory / "attention-cpu.json")["rows"]
    assert (
        "| heads of | phase |" in printed and "GB/s" in printed and "measured ceilings" in printed
    )
    assert (directory / "attention-cpu.md").exists()
    contenders = {row["contender"] for row in rows}
    assert contenders >= {
        CONTIGUOUS,
        "ours",
        "HF sdpa",
        "HF eager",
        "flex_attention",
        "flash-attn",
        "FlashInfer",
    }
    assert contenders >= {"varlen_attn", *(f"ours: {name}" for name in kernels.NAMES)}
    for phase in ("decode", "chunk", "prefill"):
        of_phase = [row for row in rows if row["phase"] == phase]
        assert {row["contender"] for row in of_phase} == contenders  # none is left out silently
        timed = {row["contender"] for row in of_phase if "us" in row}
        assert timed >= {
            CONTIGUOUS,
            "ours",
            INT8,
            "ours: reference",
            "ours: gather",
            "HF sdpa",
            "HF eager",
        }
    assert not [row for row in rows if row["time"].startswith("failed")]
    assert all(row["over_ours"] > 0 for row in rows if row["contender"] == INT8)


def test_a_missing_peer_is_not_installed(monkeypatch):
    setting = attention_data.settings("cpu", quick=True)[0]
    absent = [
        peer
        for peer in peers(quick=True, flex_seconds=0)
        if peer.name in ("flash-attn", "FlashInfer")
    ]
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert [peer.missing(setting) for peer in absent] == ["not installed"] * 2


class Wrong(Peer):
    name = "wrong"

    def prepare(self, data):
        return lambda layer: torch.zeros(data.query.transpose(1, 2).shape)


class Broken(Peer):
    name = "broken"

    def prepare(self, data):
        raise RuntimeError("no kernel image\nand more")


def test_a_peer_that_differs_or_fails_is_listed_and_not_timed():
    data = attention_data.make(attention_data.settings("cpu", quick=True)[0], quick=True)
    functions, problems = attention.admit([Wrong(), Broken(), Contiguous()], data)
    assert list(functions) == [CONTIGUOUS]
    assert problems["wrong"].startswith("failed: ArithmeticError: differs from the reference by")
    assert problems["broken"] == "failed: RuntimeError: no kernel image"


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
    functions, problems = attention.admit([peer], data)
    assert list(functions) == [peer.name], problems


def test_bytes_and_operations_of_a_case():
    case = Case("by hand", "chunk", (5, 6), 2)  # queries see 4 and 5, and 5 and 6 tokens
    assert case.pairs == 4 + 5 + 5 + 6
    # 4 query heads, 2 K/V heads, head dim 32
    setting = Setting(SHAPES["llama-tiny"], case, 16, "bf16", "cpu")
    assert setting.flops == 4 * 4 * 32 * 20
    assert setting.num_bytes == 2 * 32 * (2 * 11 * 2 + 2 * 2 * 2 * 4)


def test_ratios_are_medians_over_turns():
    setting = Setting(SHAPES["llama-tiny"], Case("1 x 8", "decode", (8,)), 16, "bf16", "cpu")
    times = {CONTIGUOUS: [1.0, 2.0, 4.0], "ours": [0.5, 2.0, 1.0]}
    limits = Ceilings(2.0 * setting.num_bytes, {"bfloat16": 4.0 * setting.flops})
    rows = attention.rows_of(setting, times, {"flash-attn": "not installed"}, limits)
    assert [row.get("over_contiguous") for row in rows] == [1.0, 0.5, None]
    assert [row.get("ours_over") for row in rows] == [0.5, 1.0, None]
    assert (rows[0]["bandwidth_share"], rows[0]["matmul_share"]) == ("25%", "12%")
    assert rows[2]["time"] == "not installed"


def test_compiling_that_takes_too_long_is_given_up_for_the_run(monkeypatch):
    monkeypatch.setattr(
        torch, "compile", lambda *_, **__: lambda *_, **__: __import__("time").sleep(5)
    )
    flex = Flex(0.05)
    data = attention_data.make(attention_data.settings("cpu", quick=True)[0], quick=True)
    _, problems = attention.admit([flex], data)
    assert problems["flex_attention"] == "failed: TimeoutError: took more than 0.05 s"
    assert flex.missing(data.setting) == "failed: compiling took more than 0.05 s"
    with time_limit(10):
        pass  # the alarm is off again


@pytest.mark.parametrize("argument, valid", [("--device", "cpu"), ("--phase", "prefill")])
def test_bad_arguments_name_the_valid_ones(argument, valid, capsys):
    with pytest.raises(SystemExit):
        attention.main([argument, "nonsense"])
    message = capsys.readouterr().err
    assert "nonsense" in message and valid in message
