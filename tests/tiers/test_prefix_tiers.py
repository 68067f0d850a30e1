"""Prefixes evicted from the pool and loaded again: tokens equal plain's, and K/V of other weights
are never used."""

from __future__ import annotations

import contextlib
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path
from unittest import mock

import pytest
import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

import hf_paged
from hf_paged import PagedEngine
from hf_paged.model import registry
from hf_paged.tiers import block_files
from hf_paged.tiers import store as tiers
from tests.support import models
from tests.support.engine_helpers import assert_drained, lone_run, prompts, run_all, tokens_of
from tests.support.latents import build_deepseek
from tests.support.missing import forbidden
from tests.test_forks import holds_in_child
from tests.tiers.test_block_files import (
    replace_by_file,
    replace_by_loop,
)

GREEDY = {"do_sample": False, "max_new_tokens": 6}
SIZE = models.BLOCK_SIZE
NAMES = ("mistral", "gemma2", "gpt_oss", "mla")


def build(name):
    return build_deepseek() if name == "mla" else models.build(name)


def config(path, **others):
    return {"block_size": SIZE, "prefix_tiers": {"disk_path": str(path)}, **others}


def store_of(memory):
    """The tier of the only pool that has one; `None` if none has."""
    held = [manager.tier for manager in memory.managers.values()]
    return next((tier for tier in held if isinstance(tier, tiers.PrefixStore)), None)


def blocks_on_disk(path):
    return sorted(each for each in path.rglob("*.safetensors") if each.is_file())


def run(engine, prompt, **options):
    """New tokens, and the number of prompt tokens found."""
    (result,) = engine.generate([prompt], GREEDY, **options)
    assert result.error is None, result.error
    return result.token_ids, result.num_prefix_hit_tokens


def plain(engine, text):
    return lone_run(engine.model, text, GREEDY)[0]


def save_all(engine):
    """Writes all cached blocks to disk and empties the pool."""
    store = engine._core.loop.blocks.tier
    engine.free()
    store.wait()


def evict_all(engine):
    """Writes all cached blocks to disk; the pool and its tier stay."""
    engine.memory.evict_cached()
    engine._core.loop.blocks.tier.wait()


@pytest.fixture(autouse=True)
def no_thread_is_left():
    yield
    gc.collect()
    end = time.monotonic() + 10
    while any("prefix blocks" in thread.name for thread in threading.enumerate()):
        assert time.monotonic() < end, "a thread still writes"
        time.sleep(0.01)


@pytest.fixture
def engine(tmp_path):
    """An engine of llama whose tier is in `tmp_path`."""
    with PagedEngine(build("llama"), config(tmp_path)) as engine:
        yield engine


_OTHER_PROCESS = """
import json, sys, torch
torch.set_num_threads(1)
from tests.tiers.test_prefix_tiers import GREEDY, PagedEngine, build, config
name, path, prompt = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
engine = PagedEngine(build(name), config(path))
(result,) = engine.generate([prompt], GREEDY)
engine.check_integrity()
print(json.dumps([result.token_ids, result.num_prefix_hit_tokens]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "length"), [("llama", 2003), *((name, 100) for name in NAMES)])
def test_another_process_finds_all_full_blocks(name, length, tmp_path):
    """Engines that are not freed write when their process ends."""
    (prompt,) = prompts(length)
    expected = lone_run(build(name), prompt, GREEDY)[0]
    command = [sys.executable, "-c", _OTHER_PROCESS, name, str(tmp_path), json.dumps(prompt)]
    options = {"capture_output": True, "text": True, "timeout": 120}
    for num_hits in (0, length // SIZE * SIZE):
        env = {**os.environ, "PYTHONHASHSEED": str(num_hits)}
        done = subprocess.run(command, cwd=Path(__file__).parents[2], env=env, **options)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout.splitlines()[-1]) == [expected, num_hits]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", *NAMES])
def test_an_emptied_pool_finds_what_it_gave_up(name, tmp_path):
    model, (prompt, other) = build(name), prompts(75, 60)
    cut = [*prompt[:40], *other]
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, prompt)
        for text in (prompt, cut, prompt[:41], [*prompt, *other]):
            save_all(engine)
            tokens, num_hits = run(engine, text)
            engine.check_integrity()
            assert tokens == plain(engine, text)
            # a window keeps only the blocks before the end
            least = 72 if text[:72] == prompt[:72] else 40 if name in ("llama", "mla") else 0
            assert num_hits >= least
        assert engine.stats().used_blocks == 0


@pytest.mark.slow
@pytest.mark.parametrize("kv_dtype", ["int8", "fp8_e4m3"])
@pytest.mark.parametrize("name", ["llama", "mla"])
def test_quantized_blocks_come_back_as_they_were(name, kv_dtype, tmp_path):
    """Codes and scales are saved; blocks of another `kv_dtype` are not found, and a saved prefix is
    refused."""
    model, (prompt,), path = build(name), prompts(75), tmp_path / "prefix.safetensors"
    with PagedEngine(model, config(tmp_path / "tier", kv_dtype=kv_dtype)) as engine:
        expected, _ = run(engine, prompt)
        engine.save_prefix(prompt, path)
        save_all(engine)
        assert run(engine, prompt) == (expected, 72)
    with PagedEngine(model, {"block_size": SIZE, "kv_dtype": kv_dtype}) as engine:
        assert engine.load_prefix(path) == 72 and run(engine, prompt) == (expected, 72)
    with PagedEngine(model, config(tmp_path / "tier")) as engine:
        assert run(engine, prompt) == (plain(engine, prompt), 0)
        with pytest.raises(ValueError, match="kv_dtype"):
            engine.load_prefix(path)


@pytest.mark.slow
def test_engines_and_calls_find_each_others(tmp_path):
    """Blocks that a call leaves are also found after its pool is rebuilt for another config."""
    model, texts = build("llama"), prompts(160, 150)

    def call(text, options):
        paged = {"cache_implementation": "paged", "cache_config": options}
        return model.generate(torch.tensor([text]), **GREEDY, **paged)[0, len(text) :].tolist()

    with PagedEngine(model, config(tmp_path)) as engine:
        expected = run(engine, texts[0])[0]
        store = store_of(engine.memory)
    store.wait()
    assert call(texts[0], config(tmp_path)) == expected
    assert hf_paged.memory_stats(model).tier_restored_blocks == 159 // SIZE
    expected = call(texts[1], config(tmp_path))
    store = store_of(registry._memories[model][1])
    call(texts[1], {"block_size": 2 * SIZE})
    store.wait()
    with PagedEngine(model, config(tmp_path)) as engine:
        assert run(engine, texts[1]) == (expected, 144)


@pytest.mark.slow
def test_what_the_last_step_computed_is_kept_too(engine, tmp_path):
    """In steps of one's own, each a window by itself, and where one step is all there is; a forked
    child finds it."""
    prompt, other = prompts(70, 70)
    engine.add_request(prompt, GREEDY)
    run_all(engine)
    save_all(engine)
    assert len(blocks_on_disk(tmp_path)) == 75 // SIZE
    assert run(engine, prompt)[1] == 64
    engine.generate([other], {**GREEDY, "max_new_tokens": 1})
    save_all(engine)
    expected = plain(engine, other), 64
    assert holds_in_child(lambda: run(engine, other) == expected)
    assert run(engine, other) == expected


@pytest.mark.slow
def test_other_weights_and_other_tenants_find_nothing(engine, tmp_path):
    (prompt,) = prompts(70)
    run(engine, prompt, prompt_logprobs=True)
    save_all(engine)
    assert not blocks_on_disk(tmp_path), "what is never cached was written"
    run(engine, prompt, cache_salt="one")
    save_all(engine)
    hits = [run(engine, prompt, cache_salt=salt)[1] for salt in ("other", None, "one")]
    assert hits == [0, 0, 64]
    weight = engine.model.model.layers[0].self_attn.k_proj.weight
    before = weight.detach().clone()
    for change, num_hits in (
        (lambda: weight.data[3, 5].add_(0.5), 0),
        (lambda: None, 64),
        (lambda: weight.data.copy_(before), 64),
    ):
        save_all(engine)
        change()
        assert run(engine, prompt) == (plain(engine, prompt), num_hits)
    assert len(list(tmp_path.iterdir())) == 2


@pytest.mark.slow
def test_a_change_that_only_a_fingerprint_sees_is_not_written(tmp_path):
    """Between two steps of one request: its later blocks belong to no single version of the
    weights."""
    model, (prompt, other) = build("llama"), prompts(40, 30)
    weight = model.model.layers[1].self_attn.k_proj.weight
    before = weight.detach().clone()
    with PagedEngine(model, config(tmp_path, max_num_batched_tokens=16, capture=False)) as engine:
        engine.add_request(other, {**GREEDY, "max_new_tokens": 2})
        run_all(engine)  # there is a fingerprint
        engine.add_request(prompt, {**GREEDY, "max_new_tokens": 30})
        engine.step()
        weight.detach().numpy()[7, 9] += 2.0  # changes neither a version nor an address
        run_all(engine)
        save_all(engine)
        weight.data.copy_(before)
        for text in (prompt, other):
            assert run(engine, text)[0] == plain(engine, text)


@pytest.mark.slow
@pytest.mark.parametrize("moves", [False, True])
def test_evicted_blocks_wait_for_a_fingerprint(moves, tmp_path):
    """Blocks evicted while a request runs are written once the weights are checked, and dropped if
    they changed."""
    model = build("llama")
    with PagedEngine(model, config(tmp_path, num_blocks=26, capture=False)) as engine:
        for text, count in zip(prompts(80, 80, 80), (6, 60, 6)):
            engine.add_request(text, {**GREEDY, "max_new_tokens": count})
        while not ((store := store_of(engine.memory)) and store._pending):
            assert engine.has_unfinished, "nothing was evicted"
            engine.step()
        assert not store._host_entries and not blocks_on_disk(tmp_path)
        if moves:
            model.lm_head.weight.detach().numpy()[0, 0] += 1.0
        run_all(engine)
        store.wait()
        assert not store._pending and bool(blocks_on_disk(tmp_path)) is not moves


@pytest.mark.slow
def test_why_a_model_or_a_pool_has_no_tiers(tmp_path):
    (prompt,), states = prompts(20), "snapshots of the model's states"
    hybrid = PagedEngine(build("qwen3_next"), config(tmp_path))
    run(hybrid, prompt)
    assert states in str(hybrid.route)
    with pytest.raises(ValueError, match=f"cannot be saved or loaded: .*{states}"):
        hybrid.save_prefix(prompt, tmp_path / "file")
    host = {"block_size": SIZE, "prefix_tiers": {"host_bytes": 1 << 20}}
    on_cpu = PagedEngine(build("llama"), host)
    run(on_cpu, prompt)
    assert "the pool is already in host memory, so only a disk tier helps" in str(on_cpu.route)


# ---- a folder that cannot be used


def raising(error):
    def fail(*args):
        raise error

    return fail


def no_memory(path):
    return mock.patch.object(tiers, "free_bytes", raising(MemoryError()))


@pytest.mark.slow
@pytest.mark.parametrize(
    "change", [replace_by_file, replace_by_loop, shutil.rmtree, forbidden, no_memory]
)
def test_requests_go_on_without_a_folder(change, tmp_path, caplog):
    """In steps, restored or not, and nothing is lost; a removed folder is made again."""
    model, texts, path = models.get("llama"), prompts(60, 50), tmp_path / "tier"
    expected = [lone_run(model, text, GREEDY) for text in texts]
    caplog.set_level(logging.WARNING, "hf_paged")
    with PagedEngine(model, config(path, num_blocks=20)) as engine:
        run(engine, texts[0])
        evict_all(engine)
        engine.add_request(texts[1], GREEDY)
        engine.step()  # in the middle of a request
        with change(path) or contextlib.nullcontext():
            assert [run_all(engine).popitem()[1].token_ids] == expected[1]
            for _ in range(2):
                assert tokens_of(engine.generate(texts, GREEDY)) == expected
                assert_drained(engine)
                evict_all(engine)
        assert bool(blocks_on_disk(path)) == (not path.is_file() and not path.is_symlink())
        assert bool(caplog.records) == (change not in (shutil.rmtree, no_memory))
        assert len(caplog.records) <= 2, "it cannot be read, and it cannot be written"
        path.unlink() if not path.is_dir() else None
        save_all(engine)
        assert tokens_of(engine.generate(texts[:1], GREEDY)) == expected[:1]


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("read", MemoryError("none")),
        ("put_back", RuntimeError("torch")),
        ("put_back", ValueError("other")),
    ],
)
def test_what_a_tier_cannot_copy_is_computed_instead(method, error, engine, caplog, monkeypatch):
    (prompt,) = prompts(70)
    expected = run(engine, prompt)[0]
    evict_all(engine)
    monkeypatch.setattr(tiers.PrefixStore, method, raising(error))
    with caplog.at_level(logging.WARNING, "hf_paged"):
        assert run(engine, prompt) == (expected, 0)
    assert "could not be restored" in caplog.text and repr(error) in caplog.text
    assert_drained(engine)


@pytest.mark.slow
def test_a_folder_that_cannot_be_used_is_refused_at_first(tmp_path):
    from hf_paged.native.continuous_batching import PagedBatchingManager

    model, path, ids = build("llama"), tmp_path / "tier", torch.tensor(prompts(20))
    paged = {"cache_implementation": "paged", "cache_config": config(path)}
    path.write_text("a file")
    for call in (
        lambda: PagedEngine(model, config(path)),
        lambda: model.generate(ids, **GREEDY, **paged),
        lambda: PagedBatchingManager(model, GenerationConfig(**paged), ContinuousBatchingConfig()),
    ):
        with pytest.raises(OSError, match=f"`disk_path`.*{path}"):
            call()
        assert hf_paged.memory_stats(model).held_bytes == 0
    paged["cache_config"] = {"block_size": SIZE}
    assert torch.equal(model.generate(ids, **GREEDY, **paged), model.generate(ids, **GREEDY))


# ---- saved prefixes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "salt"), [("llama", None), ("llama", "one"), ("gemma2", None), ("mla", None)]
)
def test_a_saved_prefix_is_loaded_for_its_tenant(name, salt, tmp_path):
    prompt, rest = prompts(50, 20)
    path, text = tmp_path / "prefix.safetensors", [*prompt, *rest]
    with PagedEngine(build(name), {"block_size": SIZE}) as engine:
        assert engine.save_prefix(prompt, path, cache_salt=salt) == 48
        assert_drained(engine)
    with PagedEngine(build(name), {"block_size": SIZE}) as engine:
        assert engine.load_prefix(path) == 48
        assert engine.load_prefix(str(path)) == 48  # already loaded
        assert_drained(engine)
        for other, num_hits in (("tenant" if salt is None else None, 0), (salt, 48)):
            assert run(engine, text, cache_salt=other) == (plain(engine, text), num_hits)
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.slow
def test_what_cannot_be_saved_or_loaded(tmp_path):
    model, (prompt,) = build("llama"), prompts(50)
    path = tmp_path / "prefix"

    def refuses_to_load(options, error, message):
        with PagedEngine(model, {"block_size": SIZE, **options}) as engine:
            with pytest.raises(error, match=message):
                engine.load_prefix(path)
            assert_drained(engine)

    with PagedEngine(model, {"block_size": SIZE}) as engine:
        for text, place, error, message in (
            (prompt, tmp_path / "no" / "file", FileNotFoundError, str(tmp_path / "no")),
            (prompt, tmp_path, IsADirectoryError, str(tmp_path)),
            (prompt[:5], path, ValueError, "5 tokens, but only .* blocks of 8 tokens can be saved"),
        ):
            assert engine.stats().num_steps == 0, "it was computed before it was refused"
            with pytest.raises(error, match=message):
                engine.save_prefix(text, place)
        assert not list(tmp_path.iterdir())
        engine.save_prefix(prompt, path)
    content = path.read_bytes()
    path.unlink()
    refuses_to_load({}, FileNotFoundError, str(path))
    path.write_bytes(content)
    refuses_to_load({"block_size": 2 * SIZE}, ValueError, "`block_size`")
    refuses_to_load({"prefix_caching": False}, ValueError, "prompts of this model are not cached")
    refuses_to_load({"num_blocks": 5}, hf_paged.OutOfBlocksError, "6 blocks")
    with PagedEngine(model, {"block_size": SIZE, "num_blocks": 5}) as engine:
        with pytest.raises(hf_paged.OutOfBlocksError):
            engine.save_prefix(prompt, path)
        assert_drained(engine)
    with torch.no_grad():
        model.model.embed_tokens.weight[5, 5] += 1
    message = "does not match the current state of this LlamaForCausalLM"
    refuses_to_load({}, ValueError, message)


@pytest.mark.slow
def test_an_engine_that_keeps_no_idle_pool(tmp_path):
    """It saves; it explains why it cannot load, unless tiers keep evicted blocks or a request
    runs."""
    model, (prompt,) = build("llama"), prompts(50)
    path, options = tmp_path / "prefix", {"block_size": SIZE, "idle_release_seconds": 0}
    with PagedEngine(model, options) as engine:
        assert engine.save_prefix(prompt, path) == 48
        assert engine.memory.stats().held_bytes == 0
        with pytest.raises(ValueError, match="`idle_release_seconds` is 0"):
            engine.load_prefix(path)
        engine.add_request(prompt[:5], {**GREEDY, "max_new_tokens": 30})
        engine.step()
        assert engine.save_prefix(prompt, path) == engine.load_prefix(path) == 48
        assert run(engine, prompt)[1] == 48
        run_all(engine)
        assert engine.memory.stats().held_bytes == 0
    with PagedEngine(model, config(tmp_path / "tier", idle_release_seconds=0)) as engine:
        assert engine.load_prefix(path) == 48
        assert engine.memory.stats().held_bytes == 0
        assert run(engine, prompt)[1] == 48


# ---- host memory, and a slow disk


def host_tier(engine, num_bytes, path):
    """The tier of a pool on another device, below a pool on this one."""
    core, blocks = engine._core, engine._core.loop.blocks
    wanted = hf_paged.PrefixTiers(path, host_bytes=num_bytes)
    store = tiers.PrefixStore(core.model, engine.memory, blocks, wanted, core.layout)
    store._host_bytes = num_bytes
    blocks.set_tier(store)
    return store


@pytest.mark.slow
@pytest.mark.parametrize("with_disk", [False, True])
def test_blocks_stay_in_host_memory_up_to_its_limit(with_disk, tmp_path):
    model, texts = build("gemma2"), prompts(90, 70)
    with PagedEngine(model, {"block_size": SIZE, "num_blocks": 60}) as engine:
        run(engine, texts[0])
        block = engine._core.loop.blocks.groups[0].block_bytes
        store = host_tier(engine, 30 * block, str(tmp_path) if with_disk else None)
        for turn, text in enumerate([*texts * 3, *prompts(100, 110, 120, seed=7)]):
            tokens, num_hits = run(engine, text)
            assert tokens == plain(engine, text)
            assert num_hits or not 2 <= turn < 6, f"turn {turn}"
            engine.memory.evict_cached()
            store.wait()
            assert 0 < store.counts().host_bytes <= 30 * block
            assert bool(blocks_on_disk(tmp_path)) is with_disk
        assert store.num_restored and store.counts().host_bytes > 25 * block
        assert_drained(engine)


@pytest.mark.slow
def test_nothing_waits_for_a_slow_disk(tmp_path, monkeypatch):
    """A pool that is freed goes while its blocks are written; where they fill the memory, some are
    skipped."""
    gate, write = threading.Event(), block_files.DiskFolder.write
    monkeypatch.setattr(
        block_files.DiskFolder, "write", lambda *given: gate.wait(30) and write(*given)
    )
    model, texts = build("llama"), prompts(90, 90, 90)
    with PagedEngine(model, config(tmp_path / "freed")) as engine:
        run(engine, texts[0])
        manager = engine._core.loop.blocks
        blocks, store = weakref.ref(manager.groups[0].storage.layers[0]), manager.tier
        del manager
        engine.free()
        gc.collect()
        assert blocks() is None and not blocks_on_disk(tmp_path)
        gate.set()
        store.wait()
        assert blocks_on_disk(tmp_path)
    gate.clear()
    monkeypatch.setattr(tiers, "QUEUE_BYTES", 0)
    monkeypatch.setattr(tiers, "free_bytes", lambda device: 40_000)
    with PagedEngine(model, config(tmp_path / "skipped", num_blocks=60)) as engine:
        for text in texts:
            assert run(engine, text)[0] == plain(engine, text)
            engine.memory.evict_cached()
        store = store_of(engine.memory)
        assert store.num_skipped and store.counts().host_bytes < 40_000
        gate.set()
        store.wait()
        assert len(blocks_on_disk(tmp_path / "skipped")) == store.num_kept
