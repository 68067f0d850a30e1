"""The library of a wheel that a processor gets."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hf_paged.kernels.cpp import build, prebuilt

EVERY = {flag for _, needed in prebuilt.LEVELS.values() for flag in needed.split()}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(prebuilt, "FOLDER", tmp_path)
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "x86_64")
    for level in prebuilt.LEVELS:
        content = level.encode()
        digest = hashlib.sha256(content).hexdigest()[:16]
        name = f"kernels-{level}-{prebuilt._sources_hash()}-{digest}.so"
        (tmp_path / name).write_bytes(content)
    return tmp_path


def level_of(path: Path | None) -> str | None:
    """Of a library of the fixture's."""
    return None if path is None else path.read_text()


@pytest.mark.parametrize(
    ("without", "level"),
    [
        ((), "x86-64-v4-amx"),
        (("amx_tile",), "x86-64-v4-bf16"),
        (("amx_bf16", "avx512_bf16"), "x86-64-v4"),
        (("avx512vl",), "x86-64-v3"),
        (("avx512f", "avx2"), "x86-64-v2"),
        # without it, the processor would run LZCNT as BSR, which gives other results
        (("abm",), "x86-64-v2"),
    ],
)
def test_the_best_level(folder: Path, without: tuple[str, ...], level: str) -> None:
    assert level_of(prebuilt.find(EVERY - set(without))) == level


def test_what_there_is_none_for(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert prebuilt.find({"popcnt"}) is None
    best = prebuilt.find(EVERY)
    assert best is not None
    # from other sources
    best.rename(best.with_name(best.name.replace(prebuilt._sources_hash(), "0123456789abcdef")))
    second = prebuilt.find(EVERY)
    assert second is not None and level_of(second) == "x86-64-v4-bf16"
    second.write_bytes(second.read_bytes()[:-1])  # truncated: loading it would crash the process
    assert level_of(prebuilt.find(EVERY)) == "x86-64-v4"
    monkeypatch.setattr(prebuilt.platform, "machine", lambda: "aarch64")
    assert prebuilt.find(EVERY) is None


def test_a_library_that_does_not_load(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prebuilt, "cpu_flags", lambda: EVERY)
    monkeypatch.setattr(
        build, "_find_compiler_and_key", lambda: (_ for _ in ()).throw(RuntimeError("compiles"))
    )
    with pytest.raises(RuntimeError, match="compiles"):
        build._load()


_RUN = """
import subprocess, sys
from pathlib import Path
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp import build, prebuilt
prebuilt.FOLDER, flags = Path(sys.argv[1]), prebuilt.LEVELS["x86-64-v2"]
prebuilt.LEVELS = {"x86-64-v2": (flags[0] + " -O1", "")}
assert prebuilt.main([]) == 0
build._find_compiler_and_key = None  # nothing is compiled
assert cpp.is_available()
from hf_paged.attention import backends
assert backends.cpp.is_available()
"""


@pytest.mark.slow
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="wheels are Linux's")
def test_a_library_is_built_and_loaded(tmp_path: Path) -> None:
    environment = os.environ | {"HF_PAGED_CACHE_DIR": str(tmp_path / "none")}
    command = [sys.executable, "-c", _RUN, str(tmp_path / "lib")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-2000:]
