"""Every kernel compiled for chips that are not here: no spilled registers, no more shared memory than there is, and
the instructions that make it fast."""

from __future__ import annotations

import importlib.util
import sys

import pytest

from tests.support.kernels.aot import SHARED_LIMIT, Compiled, compile_cases

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        sys.platform != "linux" or importlib.util.find_spec("triton") is None, reason="no Triton to compile with"
    ),
]


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return compile_cases()


def test_fits_its_chip(compiled: list[Compiled]) -> None:
    kernels = {row.kernel for row in compiled}
    assert {"_store_kernel", "attention_kernel", "merge_kernel", "_hash_kernel", "_copy_kernel"} <= kernels
    assert {row.capability for row in compiled} == set(SHARED_LIMIT)
    problems = [f"{row.case} {row.kernel} sm_{row.capability}: {'; '.join(row.problems)}" for row in compiled]
    assert not [problem for problem, row in zip(problems, compiled) if row.problems]


def test_decode_loads_tiles_ahead(compiled: list[Compiled]) -> None:
    """Keys and values go to shared memory asynchronously (LDGSTS), and half-precision products to the tensor cores."""
    rows = [
        row
        for row in compiled
        if row.kernel == "attention_kernel" and row.case.startswith("decode") and "fp32" not in row.case
    ]
    assert rows
    for row in rows:
        assert row.instructions.get("LDGSTS", 0) > 0, row
        assert {"HMMA", "HGMMA", "UTCHMMA"} & row.instructions.keys(), row


def test_decode_fits_smaller_chips(compiled: list[Compiled]) -> None:
    """Chips of 8.6, 8.9 and 12.0 have 99 KiB for a block."""
    assert not [
        row
        for row in compiled
        if row.kernel == "attention_kernel" and row.case.startswith("decode") and row.shared > 99 * 1024
    ]


def test_a_problem_is_seen() -> None:
    fits = Compiled("case", "kernel", 90, 4, 3, 128, 0, 0, SHARED_LIMIT[90], {}, ())
    assert fits.problems == []
    spilled = Compiled("case", "kernel", 80, 4, 3, 255, 16, 8, SHARED_LIMIT[80] + 1, {}, ("HGMMA",))
    assert spilled.problems == [
        "spills: 16 bytes of stack, 8 of local memory",
        "needs 166913 bytes of shared memory, a block has 166912",
        "has no HGMMA",
    ]
