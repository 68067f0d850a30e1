"""`hf_paged.ray`: Ray Data and Ray Serve over engines in separate processes; tokens equal plain
`generate`'s."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
pytest.importorskip("httpx")
pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
import httpx
import pandas as pd
import pyarrow as pa
import ray
import torch
from ray import serve
from transformers import AutoModelForCausalLM

import hf_paged
from hf_paged.ray import ERROR, LLMPredictor, LLMServer
from tests.support import models
from tests.support.engine_helpers import lone_run, prompts

GREEDY = {"do_sample": False, "max_new_tokens": 10}
SAMPLES = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6}
ENGINE = {"config": {"block_size": 8, "num_blocks": 256}}
ADDED = [
    *(
        "generated_text",
        "generated_tokens",
        "num_input_tokens",
        "num_generated_tokens",
        "finish_reason",
        "sequences",
    ),
    *("prompt_logprobs", "prompt_top_logprobs", ERROR),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A checkpoint like any other."""
    path = str(tmp_path_factory.mktemp("model"))
    models.get("llama").save_pretrained(path)
    tokenizer = copy.deepcopy(models.tokenizer())
    tokenizer.chat_template = (
        "{% for message in messages %}{{ message.role[:1] + message.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    for is_last in (False, False, True):
        try:
            ray.init(
                num_cpus=2,
                include_dashboard=False,
                object_store_memory=150 * 2**20,
                log_to_driver=False,
            )
            break
        except Exception:  # it waits for 30 seconds, which a busy machine may exceed
            if is_last:
                raise
            ray.shutdown()
    context = ray.data.DataContext.get_current()
    context.execution_options.preserve_order, context.enable_progress_bars = True, False
    yield
    ray.shutdown()


def plain(prompt: Any, options: dict[str, Any], seed: int | None = None) -> list[list[int]]:
    return lone_run(models.get("llama"), [int(token) for token in prompt], options, seed)


def tokens_of(row: dict[str, Any]) -> list[list[int]]:
    return [list(map(int, sequence["token_ids"])) for sequence in row["sequences"]]


# ---------------------------------------------------------------------------------------- batches


def as_numpy(columns: dict[str, list[Any]]) -> dict[str, np.ndarray]:
    arrays = {name: np.empty(len(values), dtype=object) for name, values in columns.items()}
    for name, values in columns.items():
        arrays[name][:] = values
    return arrays


def as_pandas(columns: dict[str, list[Any]]) -> pd.DataFrame:
    frame = pd.DataFrame(columns)
    # else a missing value makes all floats
    return frame.astype({"seed": "Int64"}) if "seed" in columns else frame


@pytest.mark.parametrize("form", [as_numpy, as_pandas, pa.table])
def test_batches_in_every_format(folder: str, form: Any) -> None:
    texts = prompts(9, 5, 12, 2100, 7)
    columns = {
        "prompt": [np.array(text) if form is as_numpy else text for text in texts],
        "generation_config": [
            None,
            {"max_new_tokens": 4},
            None,
            None,
            {"do_sample": True, "num_return_sequences": 2},
        ],
        "seed": [None, 1, 2, 3, 2**62],
        "generated_text": ["an", "older", "column", "of", "this name"],
        "kept": [0.5, 1.5, 2.5, 3.5, 4.5],
    }
    predictor = LLMPredictor(folder, GREEDY, engine_kwargs=ENGINE)
    table = predictor(form(columns))
    assert table.column_names == ["prompt", "generation_config", "seed", "kept", *ADDED]
    rows = table.to_pylist()
    assert [row["kept"] for row in rows] == columns["kept"]
    for row, text, own, seed in zip(rows, texts, columns["generation_config"], columns["seed"]):
        if len(text) == 2100:
            assert row[ERROR].startswith("OutOfBlocksError: ") and "num_blocks" in row[ERROR]
            assert (row["generated_text"], row["generated_tokens"], row["finish_reason"]) == (
                None,
                [],
                "error",
            )
            continue
        assert row[ERROR] == ""
        assert tokens_of(row) == plain(text, {**GREEDY, **(own or {})}, seed)
        assert row["generated_tokens"] == tokens_of(row)[0]
        assert row["generated_text"] == models.tokenizer().decode(
            row["generated_tokens"], skip_special_tokens=True
        )
        assert (row["num_input_tokens"], row["num_generated_tokens"]) == (
            len(text),
            len(row["generated_tokens"]),
        )
    predictor.engine.check_integrity()
    assert predictor.engine.stats().used_blocks == 0


def test_batches_that_are_odd(folder: str) -> None:
    predictor = LLMPredictor(
        folder, GREEDY, engine_kwargs=ENGINE, prompt_column="text", row_options=("priority",)
    )
    empty = predictor({"text": np.array([], dtype=object)})
    full = predictor(
        {
            "text": np.array(["bade cifo", "", None], dtype=object),
            "seed": np.array(["not", "read", "!"]),
        }
    )
    assert empty.num_rows == 0 and [empty.schema.field(name).type for name in ADDED] == [
        full.schema.field(name).type for name in ADDED
    ]
    first, *refused = full.to_pylist()
    assert (
        first["generated_tokens"] == plain(models.tokenizer()("bade cifo")["input_ids"], GREEDY)[0]
    )
    assert [row[ERROR].partition(":")[0] for row in refused] == ["ValueError"] * 2
    with pytest.raises(ValueError, match="no `text`: set `prompt_column`"):
        predictor({"prompt": np.array(["a"])})
    wrong = predictor({"text": np.array(["bade"]), "priority": np.array([2**40])}).to_pylist()
    assert "`priority`" in wrong[0][ERROR]
    for config in ({"max_new_token": 3}, "greedy", {"max_new_tokens": "3"}):
        own = LLMPredictor(folder, GREEDY, engine_kwargs=ENGINE)
        row = own(pa.table({"prompt": ["bade"], "generation_config": [config]})).to_pylist()[0]
        assert row[ERROR].startswith("ValueError: "), row


@pytest.mark.parametrize("form", [as_numpy, as_pandas, pa.table])
def test_chats_and_log_probabilities(folder: str, form: Any) -> None:
    user, system = {"role": "user", "content": "bade cifo"}, {"role": "system", "content": "dugi"}
    options = {"return_logprobs": True, "prompt_logprobs": True, "top_logprobs": 2}
    predictor = LLMPredictor(
        folder, GREEDY, engine_kwargs=ENGINE, prompt_column="messages", **options
    )
    rows = predictor(form({"messages": [[user], [system, user]]})).to_pylist()
    for row, text in zip(rows, ["ubade cifo", "sdugiubade cifo"]):
        prompt = models.tokenizer()(text)["input_ids"]
        assert row[ERROR] == "" and row["generated_tokens"] == plain(prompt, GREEDY)[0]
        [expected] = predictor.engine.generate([prompt], GREEDY, **options)
        [sequence] = row["sequences"]
        assert_close([list(both.values()) for both in sequence["logprobs"]], expected.logprobs)
        tops = [[list(top.values()) for top in tops] for tops in sequence["top_logprobs"]]
        assert_close(tops, expected.sequences[0].top_logprobs)
        assert_close(row["prompt_logprobs"], expected.prompt_logprobs)
        tops = [[list(top.values()) for top in tops] for tops in row["prompt_top_logprobs"]]
        assert tops[0] == expected.prompt_top_logprobs[0] == []
        assert_close(tops[1:], expected.prompt_top_logprobs[1:])


def assert_close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(
        np.array(found, dtype=float), np.array(expected, dtype=float), rtol=1e-4
    )


def test_what_cannot_be_a_model(folder: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="made a value of type str"):
        LLMPredictor(lambda: "a model")  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="Unrecognized model"):
        LLMPredictor(str(tmp_path))
    with pytest.raises(ValueError, match="max_new_token"):
        LLMPredictor(folder, {"max_new_token": 3})
    with pytest.raises(TypeError, match="max_new_tokens"):
        LLMPredictor(folder, max_new_tokens=3)


def test_a_device_that_is_lost_is_no_row_s_fault(folder: str) -> None:
    """The job ends, and a replica is replaced, since every other row would fail like the first."""

    def lose(*_: Any) -> None:
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    predictor, server = (
        cls(folder, GREEDY, engine_kwargs=ENGINE) for cls in (LLMPredictor, LLMServer)
    )
    server.check_health()
    for worker in (predictor, server):
        worker.engine.model.model.norm.register_forward_pre_hook(lose)
    with pytest.raises(torch.AcceleratorError):
        predictor({"prompt": np.array(["bade"])})

    async def ask() -> Any:
        return [output async for output in server.generate("bade")]

    assert asyncio.run(ask())[-1].result.error is not None
    with pytest.raises(torch.AcceleratorError):
        server.check_health()


# --------------------------------------------------------------------------------------- Ray Data


def test_map_batches(folder: str, cluster: None) -> None:
    """8 prompts, greedy and sampled: the same rows for any batch size."""
    rows = [
        {"prompt": text, "seed": i, "generation_config": SAMPLES if i % 2 else {"num_beams": 2}}
        for i, text in enumerate(prompts(*range(4, 12)))
    ]
    ds = ray.data.from_items(rows, override_num_blocks=3).map_batches(
        LLMPredictor,
        fn_constructor_args=(folder, GREEDY),
        fn_constructor_kwargs={"engine_kwargs": ENGINE},
        concurrency=1,
        batch_size=3,
        batch_format="pyarrow",
    )
    here = LLMPredictor(folder, GREEDY, engine_kwargs=ENGINE)(
        pa.Table.from_pylist(rows)
    ).to_pylist()
    for first, second, row in zip(ds.take_all(), here, rows, strict=True):
        assert first[ERROR] == second[ERROR] == ""
        options = {**GREEDY, **row["generation_config"]}
        assert tokens_of(first) == tokens_of(second) == plain(row["prompt"], options, row["seed"])


def make_engine(folder: str) -> hf_paged.PagedEngine:
    return hf_paged.PagedEngine(AutoModelForCausalLM.from_pretrained(folder), **ENGINE)


@pytest.mark.slow
def test_a_killed_worker_loses_no_row(folder: str, cluster: None, tmp_path: Path) -> None:
    """200 prompts, two actors, one of which dies in the middle of a batch."""
    died = tmp_path / "died"

    class Dying(LLMPredictor):
        def __call__(self, batch: pa.Table) -> Any:
            if 100 in batch["id"].to_pylist() and not died.exists():
                died.write_text(str(os.getpid()))
                threading.Timer(0.02, os.kill, (os.getpid(), signal.SIGKILL)).start()
                super().__call__(batch)
                time.sleep(60)
            return super().__call__(batch)

    texts = prompts(*(3 + i % 20 for i in range(200)))
    rows = [
        {"id": i, "prompt": text, "seed": i, "generation_config": SAMPLES}
        for i, text in enumerate(texts)
    ]
    for row in rows[::3]:
        row["generation_config"] = {}
    ds = ray.data.from_items(rows, override_num_blocks=20).map_batches(
        Dying,
        fn_constructor_args=(lambda: make_engine(folder), GREEDY),
        compute=ray.data.ActorPoolStrategy(  # two batches of an actor share the steps of its engine
            size=2, max_concurrent_calls_per_actor=2, enable_true_multi_threading=True
        ),
        batch_size=10,
        batch_format="pyarrow",
    )
    found = ds.take_all()
    assert not Path("/proc", died.read_text()).exists()
    assert [row["id"] for row in found] == list(range(200))
    for row, given in zip(found, rows):
        options = {**GREEDY, **given["generation_config"]}
        assert row[ERROR] == "" and tokens_of(row) == plain(
            given["prompt"], options, given["seed"]
        ), row


@pytest.mark.slow
def test_a_model_that_is_refused_says_so(cluster: None) -> None:
    def broken() -> hf_paged.PagedEngine:
        return hf_paged.PagedEngine(models.build("t5").get_encoder())

    ds = ray.data.from_items([{"prompt": [5, 6]}]).map_batches(
        LLMPredictor, fn_constructor_args=(broken,)
    )
    with pytest.raises(Exception, match="cannot generate"):
        ds.take_all()


# -------------------------------------------------------------------------------------- Ray Serve


@pytest.fixture(scope="module")
def replica(folder: str, cluster: None) -> Iterator[Any]:
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    deployment = serve.deployment(
        LLMServer, max_ongoing_requests=64, ray_actor_options={"num_cpus": 1}
    )
    yield serve.run(deployment.bind(folder, GREEDY, engine_kwargs=ENGINE))
    serve.shutdown()


with socket.create_server(("127.0.0.1", 0)) as listener:
    PORT = listener.getsockname()[1]
URL = f"http://127.0.0.1:{PORT}"
LONG = {"prompt": [5, 6, 7], "generation_config": {"max_new_tokens": 2000}, "stream": True}


def wait_for(is_true: Any, what: str) -> None:
    end = time.monotonic() + 30
    while not is_true():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.mark.slow
def test_serve(replica: Any) -> None:
    """Through a handle and over HTTP: streamed, whole, 8 at once, refused, and abandoned
    half-way."""
    texts = prompts(*range(4, 12))
    outputs = list(replica.options(stream=True).generate.remote(texts[0], {"max_new_tokens": 5}))
    assert [output.new_tokens[0] for output in outputs] == plain(
        texts[0], {**GREEDY, "max_new_tokens": 5}
    )[0]
    assert outputs[-1].finished and not outputs[0].finished

    async def ask(client: httpx.AsyncClient, text: list[int]) -> list[int]:
        events = []
        async with client.stream("POST", URL, json={"prompt": text, "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                events += [json.loads(line.removeprefix("data: "))] if line else []
        assert (
            "".join(event["text"] for event in events)
            == events[-1]["result"]["sequences"][0]["text"]
        )
        return [event["new_tokens"]["0"] for event in events]

    async def at_once() -> list[list[int]]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(ask(client, text) for text in texts))

    assert asyncio.run(at_once()) == [plain(text, GREEDY)[0] for text in texts]

    body = {"prompt": texts[1], "generation_config": SAMPLES, "seed": 7}
    answer = httpx.post(URL, json=body, timeout=60)
    found = [sequence["token_ids"] for sequence in answer.json()["sequences"]]
    assert found == plain(texts[1], {**GREEDY, **SAMPLES}, 7) and answer.json()["error"] is None
    for refused in (
        {"prompt": []},
        {"prompt": 2100 * [5]},
        {"prompt": [5], "generation_config": {"max_new_token": 3}},
        {"prompt": [5], "generation_config": [{}], "stream": True},
        {"prompt": [5], "cache_salt": "another's"},
        {"prompt": [5], "stream": "no"},
        {"prompt": [5], "seed": [1, 2]},
        {},
        [],
    ):
        answer = httpx.post(URL, json=refused, timeout=60)
        assert answer.status_code == 400 and answer.json()["error"], (refused, answer.text)
    assert httpx.post(URL, content=b"{", timeout=60).status_code == 400


@pytest.mark.slow
def test_serve_ends_what_is_not_read(replica: Any) -> None:
    def stats() -> hf_paged.EngineStats:
        return replica.stats.remote().result()

    with httpx.stream("POST", URL, json=LONG, timeout=60) as response:
        lines = response.iter_lines()  # closing the iterator closes the response
        assert next(lines).startswith("data: ")
        assert stats().num_running == 1
    wait_for(
        lambda: stats().num_running == stats().used_blocks == 0,
        "a dropped client's request goes on",
    )
    outputs = replica.options(stream=True).generate.remote(
        LONG["prompt"], LONG["generation_config"]
    )
    next(iter(outputs))
    outputs.cancel()
    wait_for(lambda: stats().num_running == stats().used_blocks == 0, "a cancelled request goes on")
    generated = stats().num_generated_tokens
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(URL, json={**LONG, "stream": False}, timeout=0.3)
    wait_for(
        lambda: stats().num_generated_tokens > generated and stats().used_blocks == 0, "it goes on"
    )
    assert stats().num_generated_tokens < generated + 2000


# -------------------------------------------------------------------------------------- the guide


def blocks_of_the_guide(heading: str, folder: str) -> str:
    """The Python code below a heading of the page, for the tiny model on the CPU."""
    page = Path(__file__, "../../../docs/guide/scale-out.md").resolve().read_text(encoding="utf-8")
    _, _, section = page.partition(f"\n## {heading}\n")
    code = "\n".join(re.findall(r"```python\n(.*?)```", section.partition("\n## ")[0], re.DOTALL))
    assert code.count("Qwen/Qwen3-0.6B") == 1 == code.count("num_gpus")
    return code.replace("Qwen/Qwen3-0.6B", folder).replace("num_gpus", "num_cpus")


@pytest.mark.slow
def test_the_guide_on_ray_data(
    folder: str, cluster: None, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, Any] = {}
    exec(blocks_of_the_guide("Ray Data", folder), names)
    lines = capsys.readouterr().out.splitlines()
    tokenizer = models.tokenizer()
    for seed, (line, prompt) in enumerate(zip(lines, names["prompts"], strict=True)):
        [tokens] = plain(
            tokenizer(prompt)["input_ids"], {"max_new_tokens": 64, "do_sample": True}, seed
        )
        assert line == f"{seed} {tokenizer.decode(tokens, skip_special_tokens=True)} "


@pytest.mark.slow
def test_the_guide_on_ray_serve(
    folder: str, replica: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    exec(blocks_of_the_guide("Ray Serve", folder), {})
    [tokens] = plain(
        models.tokenizer()("uHello")["input_ids"], {"max_new_tokens": 64, "do_sample": False}
    )
    assert models.tokenizer().decode(tokens, skip_special_tokens=True) in capsys.readouterr().out
