"""Every kernel compiled for chips that this machine lacks: no spilled registers, shared memory
within the limit, and the instructions that make it fast."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from collections import Counter

import pytest

from tests.support.kernels.aot import compile_cases, run_apart
from tests.support.kernels.chips import CHIPS, TENSOR_COLUMNS
from tests.support.kernels.compiling import Compiled

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or importlib.util.find_spec("triton") is None,
    reason="no Triton to compile with",
)


WIDE = {"_store_kernel": ("LDG.128", "STG.128")}
WIDE |= dict.fromkeys(("attention_kernel", "merge_kernel"), ("LDG.128",))


@pytest.fixture(scope="module")
def compiled() -> list[Compiled]:
    return compile_cases()


@pytest.mark.slow
@pytest.mark.full
def test_kernels_fit_their_chips_and_are_fast(compiled: list[Compiled]) -> None:
    """In decodes, K/V are copied to shared memory asynchronously (LDGSTS), half-precision products
    use the tensor cores, and the main loop is short. Arguments whose address is not specialised
    must not narrow the loads of queries, keys, values and parts."""
    own = {"_store_kernel", "attention_kernel", "merge_kernel", "_hash_kernel", "_copy_kernel"}
    assert {*own, "_shrink_kernel", "_expand_kernel"} <= {row.kernel for row in compiled}
    assert {row.chip for row in compiled} == set(CHIPS)
    assert not [(row.case, row.kernel, row.chip, row.problems) for row in compiled if row.problems]
    kinds, chips = Counter[str](), set[str]()
    for row in compiled:
        if row.kernel == "attention_kernel" and row.case.startswith("decode"):
            if "fp32" not in row.case and row.chip.startswith("sm"):
                kinds["half"] += 1
                assert row.instructions.get("LDGSTS.128", 0) > 0, row
                assert {"HMMA", "HGMMA", "UTCHMMA"} & row.instructions.keys(), row
            if row.case == "decode-d128-bf16":
                chips.add(row.chip)
                assert row.tile == 64 and (0 < row.loop <= 490 or not row.chip.startswith("sm")), (
                    row
                )
        if row.chip == "sm_90" and "d128-bf16" in row.case and row.kernel in WIDE:
            kinds[row.kernel] += 1
            assert all(row.instructions.get(name) for name in WIDE[row.kernel]), row
    assert kinds["half"] and chips == set(CHIPS) and WIDE.keys() <= kinds.keys()


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
    assert found["_store_kernel"] > 1 and found["attention_kernel"] > 10
    assert found["attention_kernel of one query"] > 10


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
    sizes = 0, 0, CHIPS["sm_90"].block_shared, 64, 484
    fits = Compiled("case", "kernel", "sm_90", 4, 3, 128, *sizes, {})
    assert fits.problems == []
    spilled = Compiled("case", "kernel", "sm_80", 4, 3, 255, 16, 8, most + 1, 0, 0, {}, ("HGMMA",))
    assert spilled.problems == [
        "spills: 16 bytes of stack, 8 of registers",
        "needs 166913 bytes of shared memory, a block has 166912",
        "has no HGMMA",
    ]
    wide = dataclasses.replace(fits, chip="sm_100", shared=0, tensor_columns=TENSOR_COLUMNS + 1)
    assert wide.problems == ["needs 513 columns of tensor memory, a multiprocessor has 512"]
