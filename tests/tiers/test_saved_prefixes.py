"""Saved prefixes that are not what a model saved: each is refused before anything is allocated, and
nothing breaks."""

from __future__ import annotations

import itertools
import os
import stat
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from hf_paged import PagedEngine
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import assert_drained, lone_run, prompts
from tests.tiers import crafted
from tests.tiers.test_prefix_tiers import (
    GREEDY,
    SIZE,
    blocks_on_disk,
    build,
    config,
    evict_all,
    run,
    save_all,
)

REFUSED = (
    "is not a complete saved prefix|is a block of a tier's folder|was computed by another model"
)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("saved") / "prefix"
    with PagedEngine(models.get("llama"), {"block_size": SIZE}) as engine:
        engine.save_prefix(prompts(50)[0], path)
    return path.read_bytes()


def engine_before(is_fresh: bool, **options: Any) -> PagedEngine:
    """An engine without layers, or with those that a request has made."""
    engine = PagedEngine(models.get("llama"), {"block_size": SIZE, **options})
    if not is_fresh:
        run(engine, prompts(20, seed=5)[0])
    return engine


def assert_refused(engine: PagedEngine, path: Path, what: str) -> None:
    before = engine.memory.stats().held_bytes
    try:
        engine.load_prefix(path)
    except ValueError as error:
        assert any(text in str(error) for text in REFUSED.split("|")), f"{what}: {error!r}"
    else:
        raise AssertionError(f"{what} was loaded")
    assert engine.memory.stats().held_bytes == before, what
    engine.check_integrity()


def assert_works(engine: PagedEngine, path: Path, content: bytes) -> None:
    """The real file is loaded, and requests get plain's tokens."""
    (prompt,) = prompts(50)
    path.write_bytes(content)
    engine.reset_prefix_cache()
    assert engine.load_prefix(path) == 48
    assert run(engine, prompt) == (lone_run(engine.model, prompt, GREEDY)[0], 48)
    assert_drained(engine)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize(
    "kinds", [crafted.SEALED, crafted.IDS, crafted.RAW], ids=["sealed", "ids", "raw"]
)
def test_a_file_with_other_content_is_refused(
    kinds: crafted.Changes, is_fresh: bool, saved: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "prefix"
    with engine_before(is_fresh) as engine:
        for name, change in kinds.items():
            path.write_bytes(change(saved))
            assert_refused(engine, path, name)
        assert_works(engine, path, saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
@pytest.mark.parametrize("kind", ["directory", "FIFO", "device", "sparse"])
def test_what_is_no_file_of_its_size_is_not_read(kind: str, saved: bytes, tmp_path: Path) -> None:
    """A FIFO is not waited for, and a large file is not read."""
    path = tmp_path / kind
    crafted.put(kind, path)
    with engine_before(True) as engine:
        tracemalloc.start()
        in_threads(lambda: assert_refused(engine, path, kind))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < 50 << 20
        if kind == "sparse":  # with the header of a real file
            path.write_bytes(saved)
            os.truncate(path, 10 << 30)
            assert_refused(engine, path, kind)
        assert_works(engine, tmp_path / "prefix", saved)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_only_the_owner_reads_files(mask: int, tmp_path: Path) -> None:
    (prompt,) = prompts(50)
    mine = tmp_path / "mine"
    mine.mkdir()
    mine.chmod(0o755)
    before = os.umask(mask)
    try:
        with PagedEngine(models.get("llama"), config(mine / "new" / "tier")) as engine:
            engine.save_prefix(prompt, mine / "prefix")
            evict_all(engine)
            engine.save_prefix(prompt, mine / "prefix")  # replaced
    finally:
        os.umask(before)
    assert len(blocks_on_disk(mine)) == 6 and stat.S_IMODE(mine.stat().st_mode) == 0o755
    modes = {each.lstat().st_mode for each in mine.rglob("*")}
    assert modes == {stat.S_IFDIR | 0o700, stat.S_IFREG | 0o600}


@pytest.mark.slow
def test_a_tier_drops_files_with_other_content(tmp_path: Path, caplog: Any) -> None:
    """In a new process, whose pool has no layers yet; one warning, and the blocks are computed."""
    (prompt,), model = prompts(50), models.get("llama")
    expected = lone_run(model, prompt, GREEDY)[0]
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt)
        evict_all(engine)
    contents = {path: path.read_bytes() for path in blocks_on_disk(tmp_path)}
    changes = crafted.SEALED | crafted.RAW
    for name, (path, content) in zip(changes, itertools.cycle(contents.items())):
        path.write_bytes(changes[name](content))
        caplog.clear()
        with PagedEngine(model, config(tmp_path)) as engine:
            tokens, num_hits = run(engine, prompt)
            assert tokens == expected and num_hits < 48, name
            assert_drained(engine)
            (record,) = caplog.records
            assert "is dropped, so its tokens are computed" in record.getMessage()
            evict_all(engine)
        assert crafted.opened(path.read_bytes())[1] == crafted.opened(content)[1], (
            "it was not written again"
        )


def test_a_model_of_another_dtype_keeps_its_files(tmp_path: Path, caplog: Any) -> None:
    """An engine restores blocks of the new dtype before any layer is allocated."""
    model, (prompt,) = build("llama"), prompts(50)
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt)
        model.double()
        expected = run(engine, prompt)[0]
        save_all(engine)
        assert run(engine, prompt) == (expected, 48)
        assert not [record for record in caplog.records if "is dropped" in record.getMessage()]
