"""Rows with different LoRA adapters in one forward, both loaded on the model and from folders."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch

import hf_paged
from hf_paged import PagedConfig, PagedEngine
from hf_paged.adapters import files as adapter_files
from hf_paged.kernels.lora import LoraWeights, add_portable
from hf_paged.rooms import is_installed
from tests.support import models
from tests.support.checks import model_state
from tests.support.engine_helpers import (
    MODES,
    assert_drained,
    assert_same_as_lone,
    lone_run,
    prompts,
    run_all,
)
from tests.support.peft_models import active, lone_with, lora, many, peft_state, saved
from tests.support.rooms import needs_fingerprints
from tests.test_faults import Countdown, OnPurpose, last_block, replaced_forward

peft = pytest.importorskip("peft")

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 16}


@pytest.fixture(autouse=True)
def soon_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    if is_installed("tape"):
        monkeypatch.setattr("hf_paged.tape.graphs.MIN_FIXED_MISSES", 8)


def counted(engine: PagedEngine) -> list[int]:
    """Records the rows of each forward from now on."""
    runner, found = engine._core.get_loop().executor.runner, list[int]()
    run = runner.run

    def observed(items: Any, *args: Any) -> Any:
        found.append(len(items))
        return run(items, *args)

    runner.run = observed  # type: ignore[method-assign]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("from_folders", [False, True], ids=["own", "folders"])
def test_eight_adapters_in_sixteen_forwards(from_folders: bool, tmp_path: Path) -> None:
    model, texts = many(8), prompts(*range(9, 17))
    names = list(model.peft_config)
    expected = [lone_with(model, name, prompt, GREEDY) for name, prompt in zip(names, texts)]
    if from_folders:
        names, model = saved(model, tmp_path), models.build("llama")
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        # creates the pool
        engine.generate(texts[:1], {"do_sample": False, "max_new_tokens": 1}, adapter=names[0])
        before, forwards = engine.stats().num_steps, counted(engine)
        for result, lone, name in zip(
            engine.generate(texts, GREEDY, adapter=names), expected, names
        ):
            assert_same_as_lone(lone, result, GREEDY, name)
        assert len(forwards) == engine.stats().num_steps - before == 16
        assert engine.stats().num_captured_steps > 0
        stats = engine.stats()
        assert (stats.num_adapter_loads, stats.num_adapter_hits) == (
            (8, 1) if from_folders else (0, 0)
        )
        assert_drained(engine)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams_eos"])
def test_rows_of_all_kinds_beside_one_another(
    mode: str, tmp_path: Path, device: torch.device
) -> None:
    """Loaded adapters, folders, the base model and the active adapter in one step; prompts with a
    common prefix."""
    model, texts = many(3, lora_bias=False).to(device), prompts(20, 9)
    folders = saved(model, tmp_path)
    model.delete_adapter("a2")
    whole = many(3, lora_bias=False).to(device)
    before = peft_state(model)
    adapters = {"a0": "a0", "a1": "a1", folders[2]: "a2", "__base__": "__base__", None: "a0"}
    with PagedEngine(model, PagedConfig(block_size=8, max_num_batched_tokens=40)) as engine:
        for _ in range(2):
            for i, prompt in enumerate(texts):
                for adapter in adapters:
                    engine.add_request(
                        prompt, MODES[mode], request_id=f"{adapter} {i}", adapter=adapter, seed=i
                    )
            results: dict[str, Any] = {}
            while engine.has_unfinished:
                results |= {o.request_id: o.result for o in engine.step() if o.finished}
                engine.check_integrity()
                assert peft_state(model) == before
            for i, prompt in enumerate(texts):
                for adapter, name in adapters.items():
                    expected = lone_with(whole, name, prompt, MODES[mode], i)
                    assert_same_as_lone(
                        expected, results[f"{adapter} {i}"], MODES[mode], f"{adapter}, {i}"
                    )
        hits = {adapter: results[f"{adapter} 0"].num_prefix_hit_tokens for adapter in adapters}
        assert set(hits.values()) == {16}, "prefixes are kept by adapter"
        assert_drained(engine)


@pytest.mark.slow_cases("20")
@pytest.mark.parametrize("count", [20, pytest.param(100, marks=pytest.mark.slow)])
def test_many_adapters_with_room_for_eight(count: int, tmp_path: Path) -> None:
    model, prompt = many(count, target_modules=["q_proj", "v_proj"], r=8), prompts(12)[0]
    names = list(model.peft_config)
    expected = {
        name: lone_with(model, name, prompt, {**GREEDY, "max_new_tokens": 3}) for name in names[::9]
    }
    folders = saved(model, tmp_path)
    bare = models.build("llama")
    options = {**GREEDY, "max_new_tokens": 3}
    with PagedEngine(bare, PagedConfig(block_size=8)) as engine:
        engine.generate([prompt], options, adapter=folders[0])
        pages = engine._core.get_loop().executor.adapters().pages
        assert len(pages._adapters) == 1
        own = engine.stats().cached_blocks - len(prompt) // 8
    config = PagedConfig(block_size=8, num_blocks=8 * own + 16)
    with PagedEngine(bare, config) as engine:
        results = engine.generate([prompt] * count, options, adapter=folders)
        again = engine.generate([prompt] * 4, options, adapter=folders[-4:])
        pages = engine._core.get_loop().executor.adapters().pages
        assert len(pages._adapters) <= 9
        stats = engine.stats()
        assert_drained(engine)
    assert stats.num_adapter_loads == count and stats.num_adapter_hits == 4
    assert stats.num_adapter_evictions >= count - 9
    for name, result in zip(names, results):
        assert result.error is None
        if name in expected:
            assert_same_as_lone(expected[name], result, options, name)
    assert [x.token_ids for x in again] == [x.token_ids for x in results[-4:]]


@pytest.mark.slow
def test_preempted_rows_keep_to_their_adapters(tmp_path: Path) -> None:
    model, texts = many(3), prompts(20, 25, 18)
    expected = [lone_with(model, f"a{i}", prompt, GREEDY) for i, prompt in enumerate(texts)]
    folders = saved(model, tmp_path)
    bare = models.build("llama")
    for preemption in ("swap", "recompute"):
        for num_blocks in (14, 18):
            with PagedEngine(
                bare, PagedConfig(block_size=8, num_blocks=num_blocks, preemption=preemption)
            ) as engine:
                results = engine.generate(texts, GREEDY, adapter=folders)
                for lone, result, folder in zip(expected, results, folders):
                    assert_same_as_lone(lone, result, GREEDY, folder)
                assert_drained(engine)


def test_an_adapter_that_never_fits_fails_alone(tmp_path: Path) -> None:
    model, prompt = (
        many(2, r=64, target_modules=["q_proj", "v_proj", "gate_proj", "down_proj"]),
        prompts(12)[0],
    )
    folders, bare = saved(model, tmp_path), models.build("llama")
    expected = lone_run(bare, prompt, GREEDY)
    with PagedEngine(bare, PagedConfig(block_size=8, num_blocks=6)) as engine:
        engine.generate([prompt], GREEDY)
        for i, adapter in enumerate((folders[0], "__base__", folders[1])):
            engine.add_request(prompt, GREEDY, request_id=str(i), adapter=adapter)
        results = run_all(engine)
        assert_same_as_lone(expected, results["1"], GREEDY, "base")
        for i in "02":
            assert isinstance(results[i].error, hf_paged.OutOfBlocksError), results[i].error
        assert_drained(engine)


@pytest.mark.slow
def test_adapter_names_with_several_sequences() -> None:
    """PEFT raises there: it applies the prompts' adapter names to rows."""
    model, inputs = many(2), models.padded_prompt("llama", (26, 4, 17))
    names, options = ["a0", "__base__", "a1"], dict(MODES["sample"])
    with pytest.raises(ValueError, match="adapter_names"):
        model.generate(**inputs, adapter_names=names, num_return_sequences=2, **options)
    model = many(2)  # PEFT leaves hooks on a model whose call failed
    rows = {name: value.repeat_interleave(2, 0) for name, value in inputs.items()}
    torch.manual_seed(1)
    expected = model.generate(
        **rows, adapter_names=[name for name in names for _ in range(2)], **options
    )
    torch.manual_seed(1)
    found = model.generate(
        **inputs, adapter_names=names, num_return_sequences=2, **options, **models.PAGED
    )
    assert torch.equal(expected, found) and hf_paged.last_route(model).road == "engine"
    beams = {**MODES["beams"], "num_return_sequences": 2}
    expected = model.generate(**inputs, adapter_names=names, **beams)
    assert torch.equal(
        expected, model.generate(**inputs, adapter_names=names, **beams, **models.PAGED)
    )
    config = {**MODES["beams"], "return_dict_in_generate": True}
    given = model.generate(**inputs, adapter_names=names, **config, **models.PAGED)
    assert torch.equal(
        given.sequences, model.generate(**inputs, adapter_names=names, **config).sequences
    )
    assert not any(module._forward_pre_hooks for module in model.modules())
    hf_paged.check_integrity(model.get_base_model())


@pytest.mark.parametrize("from_folders", [False, True], ids=["own", "folders"])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_code_of_a_request_runs_the_model_with_its_adapter(
    mode: str, from_folders: bool, tmp_path: Path
) -> None:
    """Guidance runs the model beside each step."""
    model, texts = many(2), prompts(9, 12, 7)
    names, options = ["a0", "a1", "__base__"], {**MODES[mode], "guidance_scale": 1.4}
    options |= {"max_new_tokens": 6}
    expected = [lone_with(model, name, prompt, options) for name, prompt in zip(names, texts)]
    if from_folders:
        names, model = [*saved(model, tmp_path), "__base__"], models.build("llama")
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        for result, lone, name in zip(
            engine.generate(texts, options, adapter=names), expected, names
        ):
            assert_same_as_lone(lone, result, options, name)
        assert_drained(engine)


def test_a_criterion_of_a_request_runs_the_model_with_its_adapter() -> None:
    model, (text,), predicted = many(2), prompts(9), list[int]()

    def predict(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        logits = model(input_ids=input_ids, use_cache=False).logits
        predicted.append(int(logits[0, -1].argmax()))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        (result,) = engine.generate([text], GREEDY, adapter="a1", stopping_criteria=[predict])
        assert_drained(engine)
    assert_same_as_lone(lone_with(model, "a1", text, GREEDY), result, GREEDY, "a1")
    assert predicted[:-1] == result.token_ids[1:]


@pytest.mark.parametrize("name", ["a0", "__base__"])
def test_code_of_a_call_runs_the_model_with_the_adapters_of_its_rows(name: str) -> None:
    model, inputs = many(2), models.padded_prompt("llama", (9, 4, 12))
    for names, road in ((["a1", "__base__", name], "hf_loop"), ([name] * 3, "engine")):
        options = {"guidance_scale": 1.4, "max_new_tokens": 6, "adapter_names": names}
        expected = model.generate(**inputs, **options)
        assert torch.equal(expected, model.generate(**inputs, **options, **models.PAGED))
        assert hf_paged.last_route(model).road == road


@pytest.mark.parametrize("guidance_scale", [None, 1.4])
def test_a_streamer_of_an_adapter_may_wait_for_a_thread_that_uses_the_model(
    guidance_scale: float | None,
) -> None:
    class Waiting:
        num_put = 0

        def put(self, token_ids: torch.Tensor) -> None:
            self.num_put += 1
            if self.num_put == 3:
                other.start()
                other.join(timeout=60)
                assert not other.is_alive()

        def end(self) -> None:
            pass

    model, inputs, results = many(2), models.prompt("llama", 1), list[torch.Tensor]()
    other = threading.Thread(
        target=lambda: results.append(model.generate(**inputs, **GREEDY, **models.PAGED)),
        daemon=True,
    )
    options = {**GREEDY, "adapter_names": ["a1"], "guidance_scale": guidance_scale}
    found = model.generate(**inputs, **options, **models.PAGED, streamer=Waiting())
    assert torch.equal(found, model.generate(**inputs, **options))
    assert torch.equal(results[0], model.generate(**inputs, **GREEDY))
    hf_paged.check_integrity(model.get_base_model())


# -- rows that draft -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["greedy", "sample"])
@pytest.mark.parametrize("source", ["ngrams", "assistant"])
def test_rows_that_draft(source: str, mode: str) -> None:
    model, texts = (
        many(3),
        [(prompt * 4)[: 3 * len(prompt) + 2] for prompt in prompts(12, 17, 9, 14)],
    )
    options = {"do_sample": mode == "sample", "max_new_tokens": 30}
    names = ["a0", "a1", "a2", "__base__"]
    more: dict[str, Any] = (
        {"assistant_model": models.get_assistant("llama")} if source == "assistant" else {}
    )
    # without room for an assistant's draft, its row draws differently
    budget: dict[str, Any] = {} if more else {"max_num_batched_tokens": 40}
    config = PagedConfig(block_size=8, speculation=None if more else "ngram", **budget)
    with PagedEngine(model, config) as engine:
        forwards = counted(engine)
        for _ in range(2):  # the second time with cached prefixes, and recorded steps
            results = engine.generate(texts, options, adapter=names, seed=[1] * len(texts), **more)
            for name, prompt, result in zip(names, texts, results):
                if mode == "greedy" or not more:  # an assistant draws in place of the model
                    assert_same_as_lone(
                        lone_with(model, name, prompt, options, 1), result, options, name
                    )
            engine.check_integrity()
        stats = engine.stats()
        assert stats.num_accepted_tokens > 0 and len(forwards) == stats.num_steps
        if mode == "sample" and more:
            with PagedEngine(model, config) as other:
                for name, prompt, result in zip(names, texts, results):
                    (alone,) = other.generate([prompt], options, adapter=name, seed=1, **more)
                    assert alone.token_ids == result.token_ids
        assert_drained(engine)


@pytest.mark.slow_cases("assistant")
@pytest.mark.parametrize(
    "more",
    [{"prompt_lookup_num_tokens": 4}, {"assistant_model": None}],
    ids=["lookup", "assistant"],
)
def test_adapter_names_with_drafts(more: dict[str, Any]) -> None:
    model, names = many(2), ["a0", "__base__", "a1"]
    if "assistant_model" in more:
        more = {"assistant_model": models.get_assistant("llama")}
    inputs = models.padded_prompt("llama", (26, 4, 17))
    options = {"do_sample": False, "max_new_tokens": 20, "adapter_names": names}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, **more, **models.PAGED), expected)
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine" and route.num_draft_tokens > 0


# -- separate forwards ---------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["use_dora", "modules_to_save", "embedding"])
def test_what_is_not_plain_lora_goes_in_forwards_of_its_own(kind: str) -> None:
    options: dict[str, Any] = {
        "use_dora": {"use_dora": True},
        "modules_to_save": {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
        "embedding": {"target_modules": ["embed_tokens", "q_proj"]},
    }[kind]
    model, prompt = many(2, target_modules=["q_proj", "down_proj"]), prompts(12)[0]
    model.add_adapter("odd", lora(**options))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            if "modules_to_save.odd" in parameter_name:
                parameter.copy_(parameter.flip(0))
    names = ["a0", "odd", "a1"]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        forwards = counted(engine)
        results = engine.generate([prompt] * 3, GREEDY, adapter=names)
        assert sorted(set(forwards)) == [1, 2] and len(forwards) == 32
        reasons = [reason for reason in engine.route.slowed_by if "'odd'" in reason]
        assert len(reasons) == 1, "the route says so"
    for name, result in zip(names, results):
        assert_same_as_lone(lone_with(model, name, prompt, GREEDY), result, GREEDY, name)


@pytest.mark.slow_cases("mixtral")
@pytest.mark.parametrize("name", ["gpt2", "mixtral"])
def test_other_families(name: str) -> None:
    """`Conv1D`; experts, which reorder their tokens."""
    targets = {"gpt2": ["c_attn", "c_proj"], "mixtral": ["q_proj", "v_proj", "o_proj"]}[name]
    model, texts = many(3, name, target_modules=targets), prompts(14, 9, 11)
    names = ["a0", "a1", "a2"]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        forwards = counted(engine)
        results = engine.generate(texts, GREEDY, adapter=names)
        assert len(forwards) == 16
    for adapter, prompt, result in zip(names, texts, results):
        assert_same_as_lone(lone_with(model, adapter, prompt, GREEDY), result, GREEDY, adapter)


def test_modules_that_get_other_rows_are_found_out() -> None:
    """A layer that computes some of the tokens, reordered, like experts."""
    model, texts = many(2, target_modules=["down_proj"]), prompts(14, 9)
    block = model.get_base_model().model.layers[0].mlp
    plain = type(block).forward

    def routed(x: torch.Tensor) -> torch.Tensor:
        order = x[0, :, 0].argsort()
        out = torch.empty_like(x)
        out[:, order] = plain(block, x[:, order])
        return out

    block.forward = routed
    expected = [lone_with(model, name, prompt, GREEDY) for name, prompt in zip(("a0", "a1"), texts)]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        forwards = counted(engine)
        results = engine.generate(texts, GREEDY, adapter=["a0", "a1"])
        assert set(forwards) == {1}
    for lone, result in zip(expected, results):
        assert_same_as_lone(lone, result, GREEDY, "routed")


# -- folders -------------------------------------------------------------------------------------


def test_a_folder_that_is_not_served_is_refused_at_once(tmp_path: Path) -> None:
    model, prompt = many(1), prompts(12)[0]
    (good,) = saved(model, tmp_path)
    model.add_adapter("odd", lora(use_dora=True))
    model.save_pretrained(tmp_path, selected_adapters=["odd"], save_embedding_layers=False)
    bare = models.build("llama")
    with PagedEngine(bare, PagedConfig(block_size=8)) as engine:
        with pytest.raises(ValueError, match=r"`use_dora`.*load_adapter"):
            engine.add_request(prompt, GREEDY, adapter=tmp_path / "odd")
        with pytest.raises(ValueError, match="does not exist: the model has none"):
            engine.add_request(prompt, GREEDY, adapter=str(tmp_path / "nowhere"))
        os.truncate(Path(good) / "adapter_model.safetensors", 40)
        with pytest.raises(ValueError, match="cannot be read"):
            engine.add_request(prompt, GREEDY, adapter=good)
        assert not engine.has_unfinished and not engine.memory.is_used


def test_a_folder_that_changes(tmp_path: Path) -> None:
    """Old prefixes are not served; a request that named the former content fails alone."""
    model, prompt = many(2, target_modules=["q_proj", "v_proj"], r=4), prompts(20)[0]
    first, second = saved(model, tmp_path)
    bare = models.build("llama")
    with PagedEngine(bare, PagedConfig(block_size=8, max_num_seqs=1)) as engine:
        engine.generate([prompt], GREEDY, adapter=first)
        engine.add_request(prompt, GREEDY, request_id="base", adapter="__base__")
        engine.step()
        waiting = tmp_path / "copy"
        shutil.copytree(second, waiting)
        engine.add_request(prompt, GREEDY, request_id="late", adapter=waiting)
        for loading in list(engine._core.get_loop().executor.adapters().store._loading.values()):  # type: ignore[union-attr]
            loading.thread.join()
        config = waiting / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 77}))
        for name in ("adapter_config.json", "adapter_model.safetensors"):
            shutil.copy(Path(second) / name, Path(first) / name)
        results = run_all(engine)
        assert results["base"].error is None and "have changed" in str(results["late"].error)
        (result,) = engine.generate([prompt], GREEDY, adapter=first)
        assert result.num_prefix_hit_tokens == 0
        assert_same_as_lone(lone_with(model, "a1", prompt, GREEDY), result, GREEDY, "changed")
        assert_drained(engine)


@needs_fingerprints
def test_a_folder_that_gets_other_weights_of_the_same_size_and_time(tmp_path: Path) -> None:
    """As from archives and images of containers whose times are all set to one."""
    model, prompt = many(2, target_modules=["q_proj", "v_proj"], r=4), prompts(20)[0]
    first, second = (Path(folder) for folder in saved(model, tmp_path))
    file, other = first / "adapter_model.safetensors", second / "adapter_model.safetensors"
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        (before,) = engine.generate([prompt], GREEDY, adapter=first)
        stat = file.stat()
        assert other.stat().st_size == stat.st_size
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        (after,) = engine.generate([prompt], GREEDY, adapter=first)
        (expected,) = engine.generate(
            [prompt], GREEDY, adapter=shutil.copytree(first, tmp_path / "copy")
        )
        assert after.token_ids == expected.token_ids != before.token_ids
        assert not after.num_prefix_hit_tokens
        file.touch()
        (again,) = engine.generate([prompt], GREEDY, adapter=first)
        assert again.token_ids == expected.token_ids and again.num_prefix_hit_tokens


def test_a_file_that_is_written_twice_within_a_tick_of_the_clock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second time it has all times and the size of the first."""
    model = many(2, target_modules=["q_proj", "v_proj"], r=4)
    first, second = (
        Path(folder) / "adapter_model.safetensors" for folder in saved(model, tmp_path)
    )
    stat = first.stat()
    times = {"st_ctime_ns": 2**62, "st_mtime_ns": 2**62}  # a clock ahead of ours: never before now
    same = {name: getattr(stat, name) for name in ("st_dev", "st_ino", "st_size")}
    frozen = SimpleNamespace(path=os.path, stat=lambda path: SimpleNamespace(**times, **same))
    monkeypatch.setattr(adapter_files, "os", frozen)
    before = adapter_files._version(str(first.parent))
    first.write_bytes(second.read_bytes())
    assert adapter_files._version(str(first.parent)) != before


def test_a_file_that_is_written_to_while_a_request_runs(tmp_path: Path) -> None:
    """safetensors returns tensors mapped from the file."""
    model, prompt = many(2, target_modules=["q_proj", "v_proj"], r=4), prompts(20)[0]
    first, second = (
        Path(folder) / "adapter_model.safetensors" for folder in saved(model, tmp_path)
    )
    expected = lone_with(model, "a0", prompt, GREEDY)
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        request_id = engine.add_request(prompt, GREEDY, adapter=first.parent)
        for _ in range(3):
            engine.step()
        with first.open("r+b") as file:
            file.write(second.read_bytes())
        assert_same_as_lone(expected, run_all(engine)[request_id], GREEDY, "a0")


@pytest.mark.parametrize("kind", ["empty", "half", "none", "pickled"])
def test_weights_that_are_not_whole_are_refused_at_once(kind: str, tmp_path: Path) -> None:
    model, prompt = many(1), prompts(12)[0]
    (folder,) = saved(model, tmp_path)
    path = Path(folder) / "adapter_model.safetensors"
    weights = safetensors.torch.load_file(path)
    key = sorted(weights)[0]
    if kind == "pickled":
        path.rename(path.with_suffix(".bin"))
    else:
        rest = {name: weight for name, weight in weights.items() if name != key}
        changed = {"empty": {**rest, key: weights[key][:0].clone()}, "half": rest, "none": {}}
        safetensors.torch.save_file(changed[kind], path)
    said = {
        "empty": "needs a rank of at least 1",
        "half": "is missing some LoRA weights",
        "none": "no weights",
        "pickled": "has no",
    }
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8)) as engine:
        with pytest.raises(ValueError, match=f"cannot be read: .*{said[kind]}"):
            engine.add_request(prompt, GREEDY, adapter=folder)
        assert not engine.has_unfinished and not engine.memory.is_used


def test_weights_are_loaded_before_their_turn(tmp_path: Path) -> None:
    model, texts = many(3), prompts(12, 13, 14)
    folders, bare = saved(model, tmp_path), models.build("llama")
    state = model_state(bare)
    with PagedEngine(bare, PagedConfig(block_size=8, max_num_seqs=1)) as engine:
        for folder, prompt in zip(folders, texts):
            engine.add_request(prompt, GREEDY, adapter=folder)
        engine.step()
        store = engine._core.get_loop().executor.adapters().store  # type: ignore[union-attr]
        assert {file.path for file in store._loading} == {
            os.path.realpath(folder) for folder in folders[1:]
        }
        results = run_all(engine)
        assert all(result.error is None for result in results.values()) and store.num_loads == 3
        assert_drained(engine)
    assert not [
        thread for thread in threading.enumerate() if thread.daemon and "adapter" in thread.name
    ]
    assert model_state(bare) == state


def test_a_failed_load_is_not_counted(tmp_path: Path) -> None:
    (folder,) = saved(many(1), tmp_path)
    bare = models.build("llama")
    file = adapter_files.read_adapter_file(folder)
    (Path(folder) / "adapter_model.safetensors").unlink()
    store = adapter_files.AdapterStore(bare)
    with pytest.raises(ValueError, match="cannot be loaded"):
        store.get(file)
    assert store.num_loads == 0


def test_weights_are_loaded_on_demand_where_no_thread_can_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(thread: threading.Thread) -> None:
        assert thread.name.startswith("hf_paged adapter a")
        raise RuntimeError("can't start new thread")

    model, texts = many(3), prompts(12, 13, 14)
    expected = [lone_with(model, f"a{number}", text, GREEDY) for number, text in enumerate(texts)]
    folders = saved(model, tmp_path)
    monkeypatch.setattr(threading.Thread, "start", fail)
    with PagedEngine(models.build("llama"), PagedConfig(block_size=8, max_num_seqs=1)) as engine:
        results = engine.generate(texts, GREEDY, adapter=folders)
        for folder, lone, result in zip(folders, expected, results):
            assert_same_as_lone(lone, result, GREEDY, folder)
        assert_drained(engine)
        monkeypatch.undo()


@pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])
def test_a_fault_in_a_mixed_forward(error: type[BaseException], tmp_path: Path) -> None:
    model, texts = many(3), prompts(12, 13, 14)
    expected = [lone_with(model, f"a{i}", prompt, GREEDY) for i, prompt in enumerate(texts)]
    folders, bare = saved(model, tmp_path), models.build("llama")
    before = model_state(bare)
    with PagedEngine(bare, PagedConfig(block_size=8, capture=False)) as engine:
        countdown, results = Countdown(14, error), dict[str, Any]()
        for i, (folder, prompt) in enumerate(zip(folders, texts)):
            engine.add_request(prompt, GREEDY, request_id=str(i), adapter=folder)
        with replaced_forward(last_block(bare), countdown):
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    run_all(engine, results)
            run_all(engine, results)
        assert countdown.left <= 0 and model_state(bare) == before
        assert not any(module._forward_hooks for module in bare.modules())
        for i, lone in enumerate(expected):
            assert_same_as_lone(lone, results[str(i)], GREEDY, str(i))
        assert_drained(engine)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_adapters_beside_it() -> None:
    """Bit for bit, if the base's products are invariant, too."""
    model, texts = many(3), prompts(9, 9, 9)
    config = PagedConfig(block_size=8, batch_invariant=True, prefix_caching=False)
    logprobs = []
    for names in (["a0", "a1", "a2"], ["a0", "a2", "__base__"], ["a0", "a0", "a1"]):
        with PagedEngine(model, config) as engine:
            (result, *_) = engine.generate(texts, GREEDY, adapter=names, return_logprobs=True)
            logprobs.append(result.sequences[0].logprobs)
    assert logprobs[0] == logprobs[1] == logprobs[2]


def test_each_part_is_a_product_of_its_own() -> None:
    draw = torch.Generator().manual_seed(0)
    x, out = torch.randn(6, 8, generator=draw), torch.zeros(6, 5)
    loras = [
        LoraWeights(
            torch.randn(r, 8, generator=draw), torch.randn(5, r, generator=draw), bias, 0.5 * r
        )
        for r, bias in ((2, None), (3, torch.randn(5, generator=draw)))
    ]
    add_portable(out, x, [(1, 3, loras[0]), (3, 6, loras[1])])
    for rows, lora_weights in (((1, 3), loras[0]), ((3, 6), loras[1])):
        a, b, bias, scaling, _ = lora_weights
        expected = (x[slice(*rows)] @ a.T @ b.T + (0 if bias is None else bias)) * scaling
        assert torch.allclose(out[slice(*rows)], expected, atol=1e-5)
    assert not out[0].any()


@pytest.mark.slow
def test_the_active_adapter_is_one_of_them() -> None:
    """Rows without an adapter name use the active one; several active adapters run in separate
    forwards."""
    model, prompt = many(2), prompts(12)[0]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine, active(model, "a1"):
        expected = lone_run(model, prompt, GREEDY)
        forwards = counted(engine)
        results = engine.generate([prompt] * 3, GREEDY, adapter=[None, "a0", "__base__"])
        assert set(forwards) == {3}
        assert_same_as_lone(expected, results[0], GREEDY, "active")
        assert_same_as_lone(lone_with(model, "a0", prompt, GREEDY), results[1], GREEDY, "a0")
    model.base_model.set_adapter(["a0", "a1"])
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        expected = lone_run(model, prompt, GREEDY)
        results = engine.generate([prompt] * 2, GREEDY, adapter=[None, "a0"])
        assert_same_as_lone(expected, results[0], GREEDY, "both")


def test_a_saved_prefix_has_its_folder(tmp_path: Path) -> None:
    model, (prompt,) = many(2, lora_bias=False), prompts(20)
    folder, path = saved(model, tmp_path)[1], tmp_path / "prefix"
    with PagedEngine(model, PagedConfig(block_size=8, num_blocks=60)) as engine:
        assert engine.save_prefix(prompt, path, adapter=folder) == 16
        engine.reset_prefix_cache()
        assert engine.load_prefix(path) == 16
        for adapter, num_hits in (("a1", 0), (folder, 16)):
            assert (
                engine.generate([prompt], GREEDY, adapter=adapter)[0].num_prefix_hit_tokens
                == num_hits
            )
        assert_drained(engine)


def test_the_blocks_of_an_adapter_evict_none_of_its_first_request(tmp_path: Path) -> None:
    model, (prompt,) = many(2, lora_bias=False), prompts(20)
    folder = saved(model, tmp_path)[1]
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        assert engine.save_prefix(prompt, tmp_path / "prefix", adapter=folder) == 16
