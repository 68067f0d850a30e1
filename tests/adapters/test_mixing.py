"""Rows with different LoRA adapters in one forward, both loaded on the model and from folders."""

from __future__ import annotations

import json
import os
import shutil
import threading
from pathlib import Path
from types import SimpleNamespace

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

GREEDY = {"do_sample": False, "max_new_tokens": 16}
SMALL = {"target_modules": ["q_proj", "v_proj"], "r": 4}  # of which two adapters' files are as long
WEIGHTS = "adapter_model.safetensors"


@pytest.fixture(autouse=True)
def soon_recorded(monkeypatch):
    if is_installed("tape"):
        monkeypatch.setattr("hf_paged.tape.misses.MIN_FIXED_MISSES", 8)


def engine_of(model=None, **config):
    """An engine of a model, or of one without adapters."""
    return PagedEngine(model or models.build("llama"), PagedConfig(block_size=8, **config))


def adapters_of(engine):
    return engine._core.get_loop().executor.adapters()


def lone_runs(model, names, texts, options=GREEDY, seed=None):
    return [lone_with(model, name, text, options, seed) for name, text in zip(names, texts)]


def check(expected, results, options=GREEDY):
    for number, (lone, result) in enumerate(zip(expected, results, strict=True)):
        assert_same_as_lone(lone, result, options, f"row {number}")


def assert_served(engine, expected, names, texts, options=GREEDY, **arguments):
    """Asserts that requests with these adapters get the tokens of lone runs; returns the
    results."""
    results = engine.generate(texts, options, adapter=names, **arguments)
    check(expected, results, options)
    assert_drained(engine)
    return results


def counted(engine):
    """Records the rows of each forward from now on."""
    runner, found = engine._core.get_loop().executor.runner, []
    run = runner.run

    def observed(items, *args):
        found.append(len(items))
        return run(items, *args)

    runner.run = observed
    return found


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize("mode", ["greedy", "samples", "beams_eos"])
def test_rows_of_all_kinds_beside_one_another(mode, tmp_path, device):
    """Loaded adapters, folders, the base model and the active adapter in one step; prompts with a
    common prefix."""
    model, texts = many(3, lora_bias=False).to(device), prompts(20, 9)
    folder = saved(model, tmp_path)[2]
    model.delete_adapter("a2")
    whole = many(3, lora_bias=False).to(device)
    before = peft_state(model)
    adapters = {"a0": "a0", "a1": "a1", folder: "a2", "__base__": "__base__", None: "a0"}
    with engine_of(model, max_num_batched_tokens=40) as engine:
        for _ in range(2):
            for i, prompt in enumerate(texts):
                for adapter in adapters:
                    named = {"request_id": f"{adapter} {i}", "adapter": adapter, "seed": i}
                    engine.add_request(prompt, MODES[mode], **named)
            results = {}
            while engine.has_unfinished:
                results |= {o.request_id: o.result for o in engine.step() if o.finished}
                engine.check_integrity()
                assert peft_state(model) == before
            for i, prompt in enumerate(texts):
                for adapter, name in adapters.items():
                    expected, what = (
                        lone_with(whole, name, prompt, MODES[mode], i),
                        f"{adapter} {i}",
                    )
                    assert_same_as_lone(expected, results[what], MODES[mode], what)
        hits = {results[f"{adapter} 0"].num_prefix_hit_tokens for adapter in adapters}
        assert hits == {16}, "prefixes are kept by adapter"
        assert_drained(engine)


def test_an_adapter_that_never_fits_fails_alone(tmp_path):
    targets = ["q_proj", "v_proj", "gate_proj", "down_proj"]
    first, second = saved(many(2, r=64, target_modules=targets), tmp_path)
    (prompt,) = prompts(12)
    with engine_of(num_blocks=6) as engine:
        engine.generate([prompt], GREEDY)
        results = engine.generate([prompt] * 3, GREEDY, adapter=[first, "__base__", second])
        check([lone_run(engine.model, prompt, GREEDY)], results[1:2])
        for result in results[::2]:
            assert isinstance(result.error, hf_paged.OutOfBlocksError), result.error
        assert_drained(engine)


@pytest.mark.slow
def test_adapter_names_with_several_sequences():
    """PEFT raises there: it applies the prompts' adapter names to rows."""
    model, inputs = many(2), models.padded_prompt("llama", (26, 4, 17))
    names, options = ["a0", "__base__", "a1"], dict(MODES["sample"])
    with pytest.raises(ValueError, match="adapter_names"):
        model.generate(**inputs, adapter_names=names, num_return_sequences=2, **options)
    model = many(2)  # PEFT leaves hooks on a model whose call failed
    rows = {name: value.repeat_interleave(2, 0) for name, value in inputs.items()}
    twice = [name for name in names for _ in range(2)]
    torch.manual_seed(1)
    expected = model.generate(**rows, adapter_names=twice, **options)
    torch.manual_seed(1)
    options |= {"adapter_names": names, "num_return_sequences": 2}
    assert torch.equal(expected, model.generate(**inputs, **options, **models.PAGED))
    assert hf_paged.last_route(model).road == "engine"
    for more in ({"num_return_sequences": 2}, {"return_dict_in_generate": True}):
        options = {**MODES["beams"], **more, "adapter_names": names}
        expected, found = (
            model.generate(**inputs, **options, **paged) for paged in ({}, models.PAGED)
        )
        assert torch.equal(*(getattr(one, "sequences", one) for one in (expected, found)))
    assert not any(module._forward_pre_hooks for module in model.modules())
    hf_paged.check_integrity(model.get_base_model())


# ---- code of callers, which runs the model with the adapter of its rows


@pytest.mark.parametrize("from_folders", [False, True], ids=["own", "folders"])
@pytest.mark.parametrize("mode", ["greedy", "beams"])
def test_guidance_of_a_request_has_its_adapter(mode, from_folders, tmp_path):
    model, texts, names = many(2), prompts(9, 12, 7), ["a0", "a1", "__base__"]
    options = {**MODES[mode], "guidance_scale": 1.4, "max_new_tokens": 6}
    expected = lone_runs(model, names, texts, options)
    if from_folders:
        names, model = [*saved(model, tmp_path), "__base__"], None
    with engine_of(model) as engine:
        assert_served(engine, expected, names, texts, options)


def test_a_criterion_of_a_request_has_its_adapter():
    model, (text,), predicted = many(2), prompts(9), []

    def predict(input_ids, scores, **kwargs):
        logits = model(input_ids=input_ids, use_cache=False).logits
        predicted.append(int(logits[0, -1].argmax()))
        return torch.zeros(len(input_ids), dtype=torch.bool)

    with engine_of(model) as engine:
        expected, more = lone_runs(model, ["a1"], [text]), {"stopping_criteria": [predict]}
        (result,) = assert_served(engine, expected, "a1", [text], **more)
    assert predicted[:-1] == result.token_ids[1:]


@pytest.mark.parametrize("name", ["a0", "__base__"])
def test_guidance_of_a_call_has_the_adapters_of_its_rows(name):
    model, inputs = many(2), models.padded_prompt("llama", (9, 4, 12))
    for names, road in ((["a1", "__base__", name], "hf_loop"), ([name] * 3, "engine")):
        options = {"guidance_scale": 1.4, "max_new_tokens": 6, "adapter_names": names}
        expected = model.generate(**inputs, **options)
        assert torch.equal(expected, model.generate(**inputs, **options, **models.PAGED))
        assert hf_paged.last_route(model).road == road


@pytest.mark.parametrize("guidance_scale", [None, 1.4])
def test_a_streamer_of_an_adapter_may_wait_for_a_thread_that_uses_the_model(guidance_scale):
    model, inputs, results, puts = many(2), models.prompt("llama", 1), [], []

    def generate():
        results.append(model.generate(**inputs, **GREEDY, **models.PAGED))

    def put(token_ids):
        puts.append(token_ids)
        if len(puts) == 3:
            other = threading.Thread(target=generate, daemon=True)
            other.start()
            other.join(timeout=60)
            assert not other.is_alive()

    options = {**GREEDY, "adapter_names": ["a1"], "guidance_scale": guidance_scale}
    waiting = SimpleNamespace(put=put, end=lambda: None)
    found = model.generate(**inputs, **options, **models.PAGED, streamer=waiting)
    assert torch.equal(found, model.generate(**inputs, **options))
    assert torch.equal(results[0], model.generate(**inputs, **GREEDY))
    hf_paged.check_integrity(model.get_base_model())


@pytest.mark.slow_cases("assistant")
@pytest.mark.parametrize("source", ["lookup", "assistant"])
def test_adapter_names_with_drafts(source):
    model, inputs = many(2), models.padded_prompt("llama", (26, 4, 17))
    is_lookup, names = source == "lookup", ["a0", "__base__", "a1"]
    assistant = {"assistant_model": None if is_lookup else models.get_assistant("llama")}
    more = {"prompt_lookup_num_tokens": 4} if is_lookup else assistant
    options = {"do_sample": False, "max_new_tokens": 20, "adapter_names": names}
    expected = model.generate(**inputs, **options)
    assert torch.equal(model.generate(**inputs, **options, **more, **models.PAGED), expected)
    route = hf_paged.last_route(model)
    assert route.road == "engine" and route.num_draft_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("source", ["ngrams", "assistant"])
def test_rows_that_draft_share_forwards(source):
    model, names = many(3), ["a0", "a1", "a2", "__base__"]
    texts = [(prompt * 4)[: 3 * len(prompt) + 2] for prompt in prompts(12, 17, 9, 14)]
    is_assistant, options = source == "assistant", {**GREEDY, "max_new_tokens": 30}
    more = {"assistant_model": models.get_assistant("llama")} if is_assistant else {}
    expected = lone_runs(model, names, texts, options)
    with engine_of(model, speculation=None if is_assistant else "ngram") as engine:
        forwards = counted(engine)
        for _ in range(2):  # the second time with cached prefixes, and recorded steps
            assert_served(engine, expected, names, texts, options, **more)
        stats = engine.stats()
        assert stats.num_accepted_tokens > 0 and len(forwards) == stats.num_steps


# ---- separate forwards


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"use_dora": True},
        {"modules_to_save": ["lm_head"], "target_modules": ["q_proj"]},
        {"target_modules": ["embed_tokens", "q_proj"]},
    ],
    ids=["use_dora", "modules_to_save", "embedding"],
)
def test_what_is_not_plain_lora_goes_in_forwards_of_its_own(options):
    model, texts = many(2, target_modules=["q_proj", "down_proj"]), prompts(12) * 3
    model.add_adapter("odd", lora(**options))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save.odd" in name:
                parameter.copy_(parameter.flip(0))
    names = ["a0", "odd", "a1"]
    with engine_of(model) as engine:
        forwards = counted(engine)
        assert_served(engine, lone_runs(model, names, texts), names, texts)
        assert sorted(set(forwards)) == [1, 2] and len(forwards) == 32
        reasons = [reason for reason in engine.route.slowed_by if "'odd'" in reason]
        assert len(reasons) == 1, "the route says so"


@pytest.mark.slow_cases("mixtral")
@pytest.mark.parametrize(
    ("name", "targets"),
    [("gpt2", ["c_attn", "c_proj"]), ("mixtral", ["q_proj", "v_proj", "o_proj"])],
    ids=["gpt2", "mixtral"],
)
def test_other_families(name, targets):
    """`Conv1D`; experts, which reorder their tokens."""
    model, texts = many(3, name, target_modules=targets), prompts(14, 9, 11)
    with engine_of(model) as engine:
        forwards, names = counted(engine), list(model.peft_config)
        assert_served(engine, lone_runs(model, names, texts), names, texts)
        assert len(forwards) == 16


def test_modules_that_get_other_rows_are_found_out():
    """A layer that computes some of the tokens, reordered, like experts."""
    model, texts = many(2, target_modules=["down_proj"]), prompts(14, 9)
    block = model.get_base_model().model.layers[0].mlp
    plain = type(block).forward

    def routed(x):
        order = x[0, :, 0].argsort()
        out = torch.empty_like(x)
        out[:, order] = plain(block, x[:, order])
        return out

    block.forward = routed
    with engine_of(model) as engine:
        forwards, names = counted(engine), ["a0", "a1"]
        assert_served(engine, lone_runs(model, names, texts), names, texts)
        assert set(forwards) == {1}


@pytest.mark.slow
def test_the_active_adapter_is_one_of_them():
    """Rows without an adapter name use the active one; several active adapters run in separate
    forwards."""
    model, texts = many(2), prompts(12) * 3
    with engine_of(model) as engine, active(model, "a1"):
        forwards, names = counted(engine), [None, "a0", "__base__"]
        expected = lone_runs(model, ["a1", *names[1:]], texts)
        assert_served(engine, expected, names, texts)
        assert set(forwards) == {3}
    model.base_model.set_adapter(["a0", "a1"])
    with engine_of(model) as engine:
        expected = lone_run(model, texts[0], GREEDY)
        results = engine.generate(texts[:2], GREEDY, adapter=[None, "a0"])
        check([expected], results[:1])


# ---- folders


def test_a_folder_that_is_not_served_is_refused_at_once(tmp_path):
    model, (prompt,) = many(1), prompts(12)
    (folder,) = saved(model, tmp_path)
    model.add_adapter("odd", lora(use_dora=True))
    model.save_pretrained(tmp_path, selected_adapters=["odd"], save_embedding_layers=False)
    path = Path(folder) / WEIGHTS
    weights = safetensors.torch.load_file(path)
    key, *others = sorted(weights)
    rest = {name: weights[name] for name in others}
    files = {
        "needs a rank of at least 1": {**rest, key: weights[key][:0].clone()},
        "is missing some LoRA weights": rest,
        "no weights": {},
    }
    with engine_of() as engine:

        def refused(adapter, message):
            with pytest.raises(ValueError, match=message):
                engine.add_request(prompt, GREEDY, adapter=adapter)
            assert not engine.has_unfinished and not engine.memory.is_used

        refused(tmp_path / "odd", r"`use_dora`.*load_adapter")
        refused(str(tmp_path / "nowhere"), "does not exist: the model has none")
        for message, content in files.items():
            safetensors.torch.save_file(content, path)
            refused(folder, f"cannot be read: .*{message}")
        os.truncate(path, 40)
        refused(folder, "cannot be read")
        path.rename(path.with_suffix(".bin"))  # of pickles
        refused(folder, "cannot be read: .*has no")


def test_a_folder_that_changes(tmp_path):
    """Old prefixes are not served; a request that named the former content fails alone."""
    model, (prompt,) = many(2, **SMALL), prompts(20)
    first, second = saved(model, tmp_path)
    with engine_of(max_num_seqs=1) as engine:
        engine.generate([prompt], GREEDY, adapter=first)
        engine.add_request(prompt, GREEDY, request_id="base", adapter="__base__")
        engine.step()
        waiting = shutil.copytree(second, tmp_path / "copy")
        engine.add_request(prompt, GREEDY, request_id="late", adapter=waiting)
        for loading in list(adapters_of(engine).store._prefetches.values()):
            loading.thread.join()
        config = waiting / "adapter_config.json"
        config.write_text(json.dumps({**json.loads(config.read_text()), "lora_alpha": 77}))
        for name in ("adapter_config.json", WEIGHTS):
            shutil.copy(Path(second) / name, Path(first) / name)
        results = run_all(engine)
        assert results["base"].error is None and "have changed" in str(results["late"].error)
        expected = lone_runs(model, ["a1"], [prompt])
        (result,) = assert_served(engine, expected, first, [prompt])
        assert result.num_prefix_hit_tokens == 0


def files_of(model, folder):
    return [Path(name) / WEIGHTS for name in saved(model, folder)]


@needs_fingerprints
def test_a_folder_that_gets_other_weights_of_the_same_size_and_time(tmp_path):
    """As from archives and images of containers whose times are all set to one."""
    (prompt,), (file, other) = prompts(20), files_of(many(2, **SMALL), tmp_path)
    with engine_of() as engine:

        def generate(folder):
            (result,) = engine.generate([prompt], GREEDY, adapter=folder)
            return result.token_ids, bool(result.num_prefix_hit_tokens)

        before, stat = generate(file.parent), file.stat()
        assert other.stat().st_size == stat.st_size
        file.write_bytes(other.read_bytes())
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        after = generate(file.parent)
        assert after == generate(shutil.copytree(file.parent, tmp_path / "copy"))
        assert after[0] != before[0] and not after[1]
        file.touch()
        assert generate(file.parent) == (after[0], True)


def test_a_file_that_is_written_twice_within_a_tick_of_the_clock(tmp_path, monkeypatch):
    """The second time it has all times and the size of the first."""
    first, second = files_of(many(2, **SMALL), tmp_path)
    stat = first.stat()
    times = {"st_ctime_ns": 2**62, "st_mtime_ns": 2**62}  # a clock ahead of ours: never before now
    same = {name: getattr(stat, name) for name in ("st_dev", "st_ino", "st_size")}
    frozen = SimpleNamespace(path=os.path, stat=lambda path: SimpleNamespace(**times, **same))
    monkeypatch.setattr(adapter_files, "os", frozen)
    before = adapter_files._version(str(first.parent))
    first.write_bytes(second.read_bytes())
    assert adapter_files._version(str(first.parent)) != before


def test_a_file_that_is_written_to_while_a_request_runs(tmp_path):
    """safetensors returns tensors mapped from the file."""
    model, texts = many(2, **SMALL), prompts(20)
    first, second = files_of(model, tmp_path)
    with engine_of() as engine:
        engine.add_request(texts[0], GREEDY, adapter=first.parent)
        for _ in range(3):
            engine.step()
        with first.open("r+b") as file:
            file.write(second.read_bytes())
        check(lone_runs(model, ["a0"], texts), run_all(engine).values())


@pytest.mark.parametrize("can_start", [True, False], ids=["threads", "no thread"])
def test_weights_are_loaded_before_their_turn(can_start, tmp_path, monkeypatch):
    """On demand where no thread can start."""

    def fail(thread):
        assert thread.name.startswith("hf_paged adapter a")
        raise RuntimeError("can't start new thread")

    model, texts = many(3), prompts(12, 13, 14)
    expected, folders = lone_runs(model, model.peft_config, texts), saved(model, tmp_path)
    with engine_of(max_num_seqs=1) as engine, monkeypatch.context() as patch:
        state = model_state(engine.model)
        if not can_start:
            patch.setattr(threading.Thread, "start", fail)
        for folder, text in zip(folders, texts):
            engine.add_request(text, GREEDY, request_id=folder, adapter=folder)
        engine.step()
        store = adapters_of(engine).store
        ahead = {os.path.realpath(folder) for folder in folders[1:]} if can_start else set()
        assert {file.path for file in store._prefetches} == ahead
        results = run_all(engine)
        check(expected, [results[folder] for folder in folders])
        assert store.num_loads == 3 and model_state(engine.model) == state
        assert_drained(engine)
    threads = [thread for thread in threading.enumerate() if thread.daemon]
    assert not [thread for thread in threads if "adapter" in thread.name]


@pytest.mark.parametrize("error", [OnPurpose, KeyboardInterrupt])
def test_a_fault_in_a_mixed_forward(error, tmp_path):
    model, texts = many(3), prompts(12, 13, 14)
    expected, folders = lone_runs(model, model.peft_config, texts), saved(model, tmp_path)
    with engine_of(capture=False) as engine:
        bare, countdown, results = engine.model, Countdown(14, error), {}
        before = model_state(bare)
        for folder, prompt in zip(folders, texts):
            engine.add_request(prompt, GREEDY, request_id=folder, adapter=folder)
        with replaced_forward(last_block(bare), countdown):
            if error is KeyboardInterrupt:
                with pytest.raises(KeyboardInterrupt):
                    run_all(engine, results)
            run_all(engine, results)
        assert countdown.left <= 0 and model_state(bare) == before
        assert not any(module._forward_hooks for module in bare.modules())
        check(expected, [results[folder] for folder in folders])
        assert_drained(engine)


@pytest.mark.slow
def test_a_row_does_not_depend_on_the_adapters_beside_it():
    """Bit for bit, if the base's products are invariant, too."""
    model, texts, logprobs = many(3), prompts(9, 9, 9), []
    for names in (["a0", "a1", "a2"], ["a0", "a2", "__base__"], ["a0", "a0", "a1"]):
        with engine_of(model, batch_invariant=True, prefix_caching=False) as engine:
            (result, *_) = engine.generate(texts, GREEDY, adapter=names, return_logprobs=True)
            logprobs.append(result.sequences[0].logprobs)
    assert logprobs[0] == logprobs[1] == logprobs[2]


def test_each_part_is_a_product_of_its_own():
    draw = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=draw)

    x, out = random(6, 8), torch.zeros(6, 5)
    first = LoraWeights(random(2, 8), random(5, 2), None, 1.0)
    second = LoraWeights(random(3, 8), random(5, 3), random(5), 1.5)
    parts = [(1, 3, first), (3, 6, second)]
    add_portable(out, x, parts)
    for start, end, (a, b, bias, scaling, _) in parts:
        expected = (x[start:end] @ a.T @ b.T + (0 if bias is None else bias)) * scaling
        assert torch.allclose(out[start:end], expected, atol=1e-5)
    assert not out[0].any()


def test_a_saved_prefix_has_its_folder(tmp_path):
    """Whose blocks evict none of it, also in a pool that grows."""
    model, (prompt,) = many(2, lora_bias=False), prompts(20)
    folder, path = saved(model, tmp_path)[1], tmp_path / "prefix"
    with engine_of(model) as engine:
        assert engine.save_prefix(prompt, path, adapter=folder) == 16
    with engine_of(model, num_blocks=60) as engine:
        assert engine.save_prefix(prompt, path, adapter=folder) == 16
        engine.reset_prefix_cache()
        assert engine.load_prefix(path) == 16
        for adapter, num_hits in (("a1", 0), (folder, 16)):
            (result,) = engine.generate([prompt], GREEDY, adapter=adapter)
            assert result.num_prefix_hit_tokens == num_hits
        assert_drained(engine)
