"""Build, load and fallback of the C++ kernels; `test_backends.py` tests their results."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from hf_paged import kernels
from hf_paged.attention import backends
from hf_paged.cache.store import choose_store
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.compiler import link_flags
from tests.attention.test_backends import Case, build, check
from tests.support.attention import attend

ROOT = Path(__file__).resolve().parents[3]
built = pytest.mark.skipif(not cpp.is_available(), reason="no compiler")


@pytest.mark.slow_cases("sinks-2")
@built
@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("sinks", [False, True], ids=["plain", "sinks"])
def test_split_rows_merge(threads: int, sinks: bool) -> None:
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(threads)
        for window, bias in ((None, None), (300, (0, 1, 2))):
            case = Case(
                seq_lens=(3000, 40, 700),
                queries=2,
                heads=2,
                kv_heads=1,
                sinks=sinks,
                window=window,
                bias=bias,
            )
            check(case, "cpp")
    finally:
        torch.set_num_threads(before)


@built
def test_cpp_refuses_what_would_read_outside_the_pool() -> None:
    call = build(Case())
    long = replace(call.step, seq_lens=(1000,) * 3)
    with pytest.raises(IndexError, match="too few blocks for seq_lens"):
        replace(call, step=long).run("cpp")
    wrong = replace(call.step, block_tables=call.step.block_tables + 100)
    with pytest.raises(IndexError, match="outside the pool of 16 blocks"):
        replace(call, step=wrong).run("cpp")
    with pytest.raises(IndexError, match="bias covers 9 positions"):
        replace(call, options={**call.options, "bias": torch.zeros(9)}).run("cpp")


@pytest.mark.parametrize(
    ("variable", "value", "level", "reason"),
    [
        ("HF_PAGED_CPP", "0", "INFO", "HF_PAGED_CPP=0"),
        ("CXX", "/bin/false", "WARNING", "returned non-zero"),
        (
            "CXX",
            "no-such-compiler",
            "WARNING",
            "found no C\\+\\+ compiler \\(tried no-such-compiler\\)",
        ),
    ],
    ids=["switched-off", "failing-compiler", "no-compiler"],
)
def test_absent_with_a_reason_in_the_log(
    variable: str,
    value: str,
    level: str,
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    for name in ("HF_PAGED_CPP", "CXX"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv(variable, value)
    with caplog.at_level("INFO", logger=cpp.__name__):
        assert cpp.build.library.__wrapped__() is None
    (record,) = caplog.records
    assert record.levelname == level
    assert re.search(reason, record.getMessage())
    assert not list(tmp_path.iterdir())


def test_portable_path_serves_where_the_build_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text(
        '#!/bin/sh\n[ "$1" = --version ] && echo 1.0 && exit 0\necho no such flag >&2\nexit 1\n'
    )
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv(kernels.VARIABLE, raising=False)
    library = cpp.build.library.__wrapped__()
    assert library is None
    monkeypatch.setattr(cpp.build, "library", lambda: library)
    call = build(Case())
    out = attend(backends, *call.inputs, **call.options)
    torch.testing.assert_close(out.double(), call.expected, atol=2e-5, rtol=2e-5)
    keys = torch.ones(1, 2, 1, 64)
    slots = torch.tensor([[3]])
    choose_store(keys, keys, call.key_blocks, call.value_blocks, slots)(keys, keys, slots)
    assert (call.key_blocks[0, :, 3] == 1).all()
    monkeypatch.setenv(kernels.VARIABLE, "cpp")
    with pytest.raises(RuntimeError, match="could not be built or loaded"):
        backends.select(build(Case()).made())


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no compiler")
@pytest.mark.slow
def test_a_c_compiler_builds_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PEFT's BOFT leaves `CXX=gcc` behind; the library lacked the C++ library then."""
    monkeypatch.setenv("CXX", "gcc -O0")
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(tmp_path))
    command = [sys.executable, "-c", "from hf_paged.kernels import cpp; print(cpp.is_available())"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ, capture_output=True, text=True)
    assert done.stdout.strip() == "True", done.stderr


@pytest.mark.parametrize(
    ("command", "is_c"),
    [("gcc -std=c++17", True), ("cc", True), ("ccache g++ -O2", False), ("clang++-18", False)],
)
def test_options_do_not_make_a_c_compiler_one_of_cpp(command: str, is_c: bool) -> None:
    assert bool(link_flags(command.split())) == is_c


@pytest.mark.skipif(shutil.which("c++") is None, reason="no compiler")
@pytest.mark.slow
def test_processes_build_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "quick-c++"  # our compiler without optimization, to save time
    compiler.write_text('#!/bin/sh\nexec c++ "$@" -O0\n')
    compiler.chmod(0o755)
    cache = tmp_path / "cache"
    monkeypatch.setenv("CXX", str(compiler))
    monkeypatch.setenv("HF_PAGED_CACHE_DIR", str(cache))
    command = [sys.executable, "-c", "from hf_paged.kernels import cpp; print(cpp.is_available())"]
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=os.environ, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [process.communicate(timeout=300)[0].strip() for process in processes] == [
        "True",
        "True",
    ]
    (library,) = cache.iterdir()
    library.write_bytes(b"damaged")
    assert cpp.build.library.__wrapped__() is not None
    assert list(cache.iterdir()) == [library]
