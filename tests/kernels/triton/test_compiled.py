"""Every kernel compiled for chips that this machine lacks: no spilled registers, shared memory
within the limit, and the instructions that make it fast."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from benchmarks.aot import Compiled
from benchmarks.binaries import main_loop, parse_amdgcn, parse_sass
from benchmarks.chips import CHIPS, TENSOR_COLUMNS
from tests.support.kernels.aot import compile_cases, run_apart

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("triton") is None,
    reason="no Triton to compile with",
)


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return compile_cases()


@pytest.mark.slow
@pytest.mark.full
def test_fits_its_chip(compiled: list[Compiled]) -> None:
    kernels = {row.kernel for row in compiled}
    own = ("_store_kernel", "attention_kernel", "merge_kernel", "_hash_kernel", "_copy_kernel")
    assert {*own, "_shrink_kernel", "_expand_kernel"} <= kernels
    assert {row.chip for row in compiled} == set(CHIPS)
    problems = [
        f"{row.case} {row.kernel} {row.chip}: {'; '.join(row.problems)}" for row in compiled
    ]
    assert not [problem for problem, row in zip(problems, compiled) if row.problems]


@pytest.mark.slow
@pytest.mark.full
def test_decodes_are_fast(compiled: list[Compiled]) -> None:
    """K/V are copied to shared memory asynchronously (LDGSTS), half-precision products use the
    tensor cores, and the main loop is short."""
    decodes = [
        row
        for row in compiled
        if row.kernel == "attention_kernel" and row.case.startswith("decode")
    ]
    rows = [row for row in decodes if "fp32" not in row.case and row.chip.startswith("sm")]
    assert rows
    for row in rows:
        assert row.instructions.get("LDGSTS.128", 0) > 0, row
        assert {"HMMA", "HGMMA", "UTCHMMA"} & row.instructions.keys(), row
    rows = [row for row in decodes if row.case == "decode-d128-bf16"]
    assert {row.chip for row in rows} == set(CHIPS)
    for row in rows:
        assert row.tile == 64 and (row.loop <= 490 or not row.chip.startswith("sm")), row


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("kernel", ["_store_kernel", "attention_kernel", "merge_kernel"])
def test_loads_and_stores_are_wide(kernel: str, compiled: list[Compiled]) -> None:
    """Arguments whose address is not specialised must not narrow the loads of queries, keys, values
    and parts."""
    names = ("LDG.128", "STG.128") if kernel == "_store_kernel" else ("LDG.128",)
    rows = [
        row
        for row in compiled
        if row.kernel == kernel and "d128-bf16" in row.case and row.chip == "sm_90"
    ]
    assert rows
    for row in rows:
        assert all(row.instructions.get(name) for name in names), row


@pytest.mark.slow
@pytest.mark.parametrize("chip", ["sm_90", "gfx942"])
def test_mixed_steps_compile_few_variants(chip: str) -> None:
    """200 steps of decodes with any row count, and of chunks, with metadata at any address."""
    found = run_apart(".kernels.variants", "--chip", chip)
    most = {"_store_kernel": 1, "_shrink_kernel": 1, "_expand_kernel": 1}
    most |= {"merge_kernel": 3, "attention_kernel of one query": 3}
    # few queries fill 16, 32 or 64 rows of a tile, chunks half of one or more; both are split or
    # not
    most |= {"attention_kernel of few": 6, "attention_kernel": 4}
    assert found.keys() == most.keys()
    assert all(found[kernel] <= most[kernel] for kernel in most), found


@pytest.mark.slow
def test_more_variants_would_be_seen() -> None:
    found = run_apart(".kernels.variants", "--specialize")
    assert (
        found["_store_kernel"] > 1
        and found["attention_kernel of one query"] > 10
        and found["attention_kernel"] > 10
    )


@pytest.mark.slow
def test_a_generate_compiles_few_kernels_before_its_first_token() -> None:
    """The self-check, prompts of odd lengths, decodes, and then the chunks of an engine."""
    found = run_apart(".kernels.first_call")
    # stores: the trial on a new device, and the model's; attention: long and short chunks, unsplit
    # and split decodes
    assert found["before"] == {"_store_kernel": 2, "attention_kernel": 3}
    assert found["all"] == {"_store_kernel": 2, "attention_kernel": 4, "merge_kernel": 1}


def test_a_problem_is_seen() -> None:
    most = CHIPS["sm_80"].block_shared
    fits = Compiled(
        "case", "kernel", "sm_90", 4, 3, 128, 0, 0, CHIPS["sm_90"].block_shared, 64, 484, {}
    )
    assert fits.problems == [] and fits.residency == (1, "shared memory") and fits.per_token == 30.2
    spilled = Compiled("case", "kernel", "sm_80", 4, 3, 255, 16, 8, most + 1, 0, 0, {}, ("HGMMA",))
    assert spilled.problems == [
        "spills: 16 bytes of stack, 8 of registers",
        "needs 166913 bytes of shared memory, a block has 166912",
        "has no HGMMA",
    ]
    wide = Compiled(
        "case", "kernel", "sm_100", 4, 3, 128, 0, 0, 0, 0, 0, {}, tensor_columns=TENSOR_COLUMNS + 1
    )
    assert wide.problems == ["needs 513 columns of tensor memory, a multiprocessor has 512"]


@pytest.mark.parametrize(
    ("chip", "registers", "shared", "warps", "expected"),
    [
        ("sm_90", 128, 72192, 4, (3, "shared memory")),
        ("sm_90", 80, 12928, 4, (6, "registers")),
        ("sm_90", 24, 0, 4, (16, "warps")),
        ("gfx942", 128, 32768, 4, (2, "shared memory")),
        ("sm_86", 16, 0, 1, (16, "blocks")),
        ("sm_120", 32, 49152, 4, (2, "shared memory")),
    ],
)
def test_residency(
    chip: str, registers: int, shared: int, warps: int, expected: tuple[int, str]
) -> None:
    """Resident blocks of a multiprocessor and the limiting resource: figures of the occupancy
    calculators."""
    assert CHIPS[chip].residency(registers, shared, warps) == expected


def test_the_main_loop_is_found() -> None:
    """Code after the program's end that jumps back, or a trap that jumps to itself, is no loop."""
    lines = [
        "S2R R0 ;",
        "IADD R1, R0 ;",
        "@P0 BRA 0x10 ;",
        "BRA.DIV ~URZ, 0x60 ;",
        "@!UP0 BRA 0x10 ;",
        "EXIT ;",
    ]
    lines += ["WARPSYNC R2 ;", "BRA 0x30 ;", "BRA 0x80 ;"]
    code = parse_sass(
        "\n".join(
            f"        /*{16 * i:04x}*/     {line}     /* 0x0 */" for i, line in enumerate(lines)
        )
    )
    assert [instruction.text for instruction in code][2] == "@P0 BRA 0x10" and main_loop(code) == 4
    text = (
        "k:\n.LBB0_1:  ; loop\n\tv_add_u32 v0, v1\n\t; a comment\n\ts_cbranch_scc0"
        " .LBB0_1\n\ts_endpgm\n\t.section x"
    )
    code = parse_amdgcn(text)
    assert len(code) == 3 and main_loop(code) == 2
