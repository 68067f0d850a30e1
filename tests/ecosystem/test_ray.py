"""`hf_paged.ray`: Ray Data and Ray Serve over engines in separate processes; tokens equal plain
`generate`'s."""

from __future__ import annotations

import asyncio
import copy
import json
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
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
from tests.ecosystem.conftest import free_port, wait_for
from tests.support import models
from tests.support.engine_helpers import lone_run, prompts

GREEDY = {"do_sample": False, "max_new_tokens": 10}
SAMPLES = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 6}
ENGINE = {"config": {"block_size": 8, "num_blocks": 256}}
ADDED = [
    *("generated_text", "generated_tokens", "num_input_tokens", "num_generated_tokens"),
    *("finish_reason", "sequences", "prompt_logprobs", "prompt_top_logprobs", ERROR),
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


@pytest.fixture(scope="module")
def make(folder: str) -> Callable[..., LLMPredictor]:
    return lambda **options: LLMPredictor(folder, GREEDY, engine_kwargs=ENGINE, **options)


def plain(prompt: Any, options: dict[str, Any] = GREEDY, seed: int | None = None) -> models.Rows:
    if isinstance(prompt, str):
        prompt = models.tokenizer()(prompt)["input_ids"]
    return lone_run(models.get("llama"), [int(token) for token in prompt], options, seed)


def assert_row(row: dict[str, Any], given: dict[str, Any]) -> None:
    """That a row has the tokens that plain `generate` gives for its prompt, options and seed."""
    assert row[ERROR] == "", row
    tokens = [list(map(int, sequence["token_ids"])) for sequence in row["sequences"]]
    options = {**GREEDY, **(given["generation_config"] or {})}
    assert tokens == plain(given["prompt"], options, given["seed"])
    assert list(row["generated_tokens"]) == tokens[0]
    decoded = models.tokenizer().decode(tokens[0], skip_special_tokens=True)
    assert row["generated_text"] == (decoded if row["generated_text"] is not None else None)
    assert row["num_input_tokens"] == len(given["prompt"])
    assert row["num_generated_tokens"] == len(tokens[0])


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
def test_batches_in_every_format(make: Any, form: Any) -> None:
    two = {"do_sample": True, "num_return_sequences": 2}
    columns: dict[str, list[Any]] = {
        "prompt": prompts(9, 5, 12, 2100, 7),
        "generation_config": [None, {"max_new_tokens": 4}, None, None, two],
        "seed": [None, 1, 2, 3, 2**62],
        "generated_text": ["an", "older", "column", "of", "this name"],
        "kept": [0.5, 1.5, 2.5, 3.5, 4.5],
    }
    given = [dict(zip(columns, values)) for values in zip(*columns.values())]
    if form is as_numpy:
        columns["prompt"] = [np.array(prompt) for prompt in columns["prompt"]]
    predictor = make()
    table = predictor(form(columns))
    assert table.column_names == ["prompt", "generation_config", "seed", "kept", *ADDED]
    rows = table.to_pylist()
    assert [row["kept"] for row in rows] == columns["kept"]
    refused = rows.pop(3)
    given.pop(3)
    assert refused[ERROR].startswith("OutOfBlocksError: ") and "num_blocks" in refused[ERROR]
    assert (refused["generated_text"], refused["generated_tokens"]) == (None, [])
    assert refused["finish_reason"] == "error"
    for row, own in zip(rows, given, strict=True):
        assert_row(row, own)
        assert row["generated_text"] is not None
    predictor.engine.check_integrity()
    assert predictor.engine.stats().used_blocks == 0


def test_batches_that_are_odd(make: Any) -> None:
    predictor = make(prompt_column="text", row_options=("priority",))
    empty = predictor({"text": np.array([], dtype=object)})
    texts = np.array(["bade cifo", "", None], dtype=object)
    full = predictor({"text": texts, "seed": np.array(["not", "read", "!"])})
    assert empty.num_rows == 0
    for name in ADDED:
        assert empty.schema.field(name).type == full.schema.field(name).type
    first, *refused = full.to_pylist()
    assert first["generated_tokens"] == plain("bade cifo")[0]
    assert [row[ERROR].partition(":")[0] for row in refused] == ["ValueError"] * 2
    with pytest.raises(ValueError, match="no `text`: set `prompt_column`"):
        predictor({"prompt": np.array(["a"])})
    wrong = predictor({"text": np.array(["bade"]), "priority": np.array([2**40])}).to_pylist()
    assert "`priority`" in wrong[0][ERROR]
    for config in ({"max_new_token": 3}, "greedy", {"max_new_tokens": "3"}):
        row = make()(pa.table({"prompt": ["bade"], "generation_config": [config]})).to_pylist()[0]
        assert row[ERROR].startswith("ValueError: "), row


@pytest.mark.parametrize("form", [as_numpy, as_pandas, pa.table])
def test_chats_and_log_probabilities(make: Any, form: Any) -> None:
    user, system = {"role": "user", "content": "bade cifo"}, {"role": "system", "content": "dugi"}
    options = {"return_logprobs": True, "prompt_logprobs": True, "top_logprobs": 2}
    predictor = make(prompt_column="messages", **options)
    rows = predictor(form({"messages": [[user], [system, user]]})).to_pylist()
    for row, text in zip(rows, ["ubade cifo", "sdugiubade cifo"]):
        assert row[ERROR] == "" and row["generated_tokens"] == plain(text)[0]
        prompt = models.tokenizer()(text)["input_ids"]
        [expected] = predictor.engine.generate([prompt], GREEDY, **options)
        [sequence] = row["sequences"]
        assert_close(values(sequence["logprobs"]), expected.logprobs)
        assert_close(map(values, sequence["top_logprobs"]), expected.sequences[0].top_logprobs)
        assert_close(row["prompt_logprobs"], expected.prompt_logprobs)
        first, *tops = map(values, row["prompt_top_logprobs"])
        assert first == expected.prompt_top_logprobs[0] == []
        assert_close(tops, expected.prompt_top_logprobs[1:])


def values(records: list[dict[str, Any]]) -> list[list[Any]]:
    return [list(record.values()) for record in records]


def assert_close(found: Any, expected: Any) -> None:
    numbers = (np.array(list(numbers), dtype=float) for numbers in (found, expected))
    np.testing.assert_allclose(*numbers, rtol=1e-4)


def objects(*values: Any) -> np.ndarray:
    return as_numpy({"values": list(values)})["values"]


def test_chats_in_batches_of_numpy(make: Any) -> None:
    """NumPy and pandas hold lists as arrays: the messages of a chat, the parts of a message, an
    option's values."""
    chat = [{"role": "user", "content": "bade"}, {"role": "user", "content": "cifo"}]
    parts = [{"role": "user", "content": objects({"type": "text", "text": "badeucifo"})}]
    predictor = make()
    content = "{{ m.content if m.content is string else m.content[0].text }}"
    template = "{% for m in messages %}{{ m.role[:1] }}" + content + "{% endfor %}"
    predictor.engine.tokenizer.chat_template = template
    [first] = plain("ubadeucifo")
    configs = objects({"eos_token_id": np.array([first[1], 5])}, None)
    batch = {"prompt": objects(objects(*chat), objects(*parts)), "generation_config": configs}
    rows = predictor(batch).to_pylist()
    assert [row[ERROR] for row in rows] == ["", ""]
    assert [row["generated_tokens"] for row in rows] == [first[:2], first]


def test_one_seed_for_all_rows_does_not_depend_on_their_places(folder: str) -> None:
    predictor = LLMPredictor(folder, {**GREEDY, "do_sample": True}, engine_kwargs=ENGINE, seed=3)
    first, second = predictor({"prompt": objects([5, 6], [5, 6])}).to_pylist()
    assert first["generated_tokens"] == second["generated_tokens"]


def test_what_cannot_be_a_model(folder: str, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="made an object of type str"):
        LLMPredictor(lambda: "a model")  # type: ignore[arg-type,return-value]
    with pytest.raises(ValueError, match="Unrecognized model"):
        LLMPredictor(str(tmp_path))
    with pytest.raises(ValueError, match="max_new_token"):
        LLMPredictor(folder, {"max_new_token": 3})
    with pytest.raises(TypeError, match="max_new_tokens"):
        LLMPredictor(folder, max_new_tokens=3)
    with pytest.raises(Exception, match="cannot generate"):
        LLMPredictor(lambda: hf_paged.PagedEngine(models.build("t5").get_encoder()))


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


def test_what_the_model_cannot_take_is_the_clients_fault() -> None:
    """Status 400 for a prompt that is longer than the model's table of positions."""
    server = LLMServer(lambda: hf_paged.PagedEngine(models.get("gpt2")))

    def ask(body: dict[str, Any]) -> tuple[int, Any]:
        async def read() -> dict[str, Any]:
            return body

        response = asyncio.run(server(SimpleNamespace(json=read)))
        return response.status_code, json.loads(response.body)

    config = {"generation_config": {"max_new_tokens": 2}}
    assert ask({"prompt": [5, 6, 7], **config})[0] == 200
    for body, told in (
        ({"prompt": [models.VOCAB_SIZE]}, "128"),
        ({"prompt": [5] * 300}, "positions"),
        ({}, "no `prompt`"),
    ):
        code, answer = ask({**body, **config})
        assert code == 400 and told in answer["error"]


# --------------------------------------------------------------------------------------- Ray Data


def test_map_batches(folder: str, make: Any, cluster: None) -> None:
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
    for found in (ds.take_all(), make()(pa.Table.from_pylist(rows)).to_pylist()):
        for row, given in zip(found, rows, strict=True):
            assert_row(row, given)


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

    rows = [
        {"id": i, "prompt": text, "seed": i, "generation_config": SAMPLES if i % 3 else {}}
        for i, text in enumerate(prompts(*(3 + i % 20 for i in range(200))))
    ]
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
        assert_row(row, given)


# -------------------------------------------------------------------------------------- Ray Serve


@pytest.fixture(scope="module")
def replica(folder: str, cluster: None) -> Iterator[Any]:
    serve.start(http_options={"host": "127.0.0.1", "port": PORT})
    deployment = serve.deployment(
        LLMServer, max_ongoing_requests=64, ray_actor_options={"num_cpus": 1}
    )
    yield serve.run(deployment.bind(folder, GREEDY, engine_kwargs=ENGINE))
    serve.shutdown()


PORT = free_port()
URL = f"http://127.0.0.1:{PORT}"


def post(body: Any, **options: Any) -> httpx.Response:
    return httpx.post(URL, **{"json": body, "timeout": 60, **options})


@pytest.mark.slow
def test_serve(replica: Any) -> None:
    """Through a handle and over HTTP: streamed, whole, 8 at once, and refused."""
    texts = prompts(*range(4, 12))
    outputs = list(replica.options(stream=True).generate.remote(texts[0], {"max_new_tokens": 5}))
    assert [output.new_tokens[0] for output in outputs] == plain(texts[0])[0][:5]
    assert outputs[-1].finished and not outputs[0].finished

    async def ask(client: httpx.AsyncClient, text: list[int]) -> list[int]:
        events = []
        async with client.stream("POST", URL, json={"prompt": text, "stream": True}) as response:
            assert response.headers["content-type"].startswith("text/event-stream")
            async for line in response.aiter_lines():
                events += [json.loads(line.removeprefix("data: "))] if line else []
        whole = events[-1]["result"]["sequences"][0]["text"]
        assert "".join(event["text"] for event in events) == whole
        return [event["new_tokens"]["0"] for event in events]

    async def at_once() -> list[list[int]]:
        async with httpx.AsyncClient(timeout=60) as client:
            return await asyncio.gather(*(ask(client, text) for text in texts))

    assert asyncio.run(at_once()) == [plain(text)[0] for text in texts]
    answer = post({"prompt": texts[1], "generation_config": SAMPLES, "seed": 7}).json()
    found = [sequence["token_ids"] for sequence in answer["sequences"]]
    assert found == plain(texts[1], {**GREEDY, **SAMPLES}, 7) and answer["error"] is None
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
        response = post(refused)
        assert response.status_code == 400 and response.json()["error"], (refused, response.text)
    assert post(None, json=None, content=b"{").status_code == 400


@pytest.mark.slow
def test_serve_ends_what_is_not_read(replica: Any) -> None:
    config = {"max_new_tokens": 2000}
    body = {"prompt": [5, 6, 7], "generation_config": config}

    def stats() -> hf_paged.EngineStats:
        return replica.stats.remote().result()

    def wait_until_idle() -> None:
        wait_for(lambda: not stats().num_running and not stats().used_blocks)

    with httpx.stream("POST", URL, json={**body, "stream": True}, timeout=60) as response:
        lines = response.iter_lines()  # closing the iterator closes the response
        assert next(lines).startswith("data: ")
        assert stats().num_running == 1
    wait_until_idle()
    outputs = replica.options(stream=True).generate.remote(body["prompt"], config)
    next(iter(outputs))
    outputs.cancel()
    wait_until_idle()
    generated = stats().num_generated_tokens
    with pytest.raises(httpx.ReadTimeout):
        post(body, timeout=0.3)
    wait_for(lambda: stats().num_generated_tokens > generated)
    wait_until_idle()
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
def test_the_guide(
    folder: str, cluster: None, request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its pages on Ray Data and on Ray Serve."""
    names: dict[str, Any] = {}
    exec(blocks_of_the_guide("Ray Data", folder), names)
    lines, tokenizer = capsys.readouterr().out.splitlines(), models.tokenizer()
    for seed, (line, prompt) in enumerate(zip(lines, names["prompts"], strict=True)):
        [tokens] = plain(prompt, {"max_new_tokens": 64, "do_sample": True}, seed)
        assert line == f"{seed} {tokenizer.decode(tokens, skip_special_tokens=True)} "
    request.getfixturevalue("replica")
    exec(blocks_of_the_guide("Ray Serve", folder), {})
    [tokens] = plain("uHello", {"max_new_tokens": 64, "do_sample": False})
    assert tokenizer.decode(tokens, skip_special_tokens=True) in capsys.readouterr().out
