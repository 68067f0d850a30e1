"""`python -m hf_paged run --engine transformers serve`: a server on loopback, queried by the
`openai` client."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

openai = pytest.importorskip("openai")
for _package in ("fastapi", "httpx", "uvicorn", "prometheus_client"):
    pytest.importorskip(_package)

import httpx  # noqa: E402
import torch  # noqa: E402
import transformers  # noqa: E402
from prometheus_client.parser import text_string_to_metric_families  # noqa: E402
from transformers.cli.serving import chat_completion  # noqa: E402

import hf_paged  # noqa: E402
from hf_paged.tools import serving  # noqa: E402

from ..support import models  # noqa: E402
from .served_app import TEMPLATE, save_text_model, served  # noqa: E402

ROOT = Path(hf_paged.__file__).parents[1]
PROMPTS = [f"{models.corpus()[i % len(models.corpus())]} {i}" for i in range(32)]
TIME_LIMIT = 300  # seconds, for busy machines
NUM_BLOCKS = 512


class Server:
    """A server process with one model, and clients for it."""

    def __init__(self, folder: Path, *options: str) -> None:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", 0))
            port = taken.getsockname()[1]
        self.folder, self.url = str(folder), f"http://127.0.0.1:{port}"
        run = (
            "-m",
            "hf_paged",
            "run",
            "--engine",
            "--set",
            f"num_blocks={NUM_BLOCKS}",
            "--set",
            "block_size=8",
        )
        serve = (
            "transformers",
            "serve",
            self.folder,
            "--device",
            "cpu",
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
        )
        self.log = (folder / "log.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *run, *options, *serve],
            cwd=ROOT,
            env={
                **os.environ,
                "HF_HUB_OFFLINE": "1",
                "HF_HOME": str(folder / "empty"),
                "OMP_NUM_THREADS": "1",
            },
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=TIME_LIMIT, max_retries=0
        )
        wait_for(lambda: self.process.poll() is not None or self.is_healthy(), self.told)
        assert self.process.poll() is None, self.told()

    def told(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health").status_code == 200
        return False

    def metrics(self) -> dict[str, float]:
        """Values by name, and by use for metrics of blocks."""
        text = httpx.get(f"{self.url}/metrics", timeout=TIME_LIMIT).text
        samples = [
            sample for family in text_string_to_metric_families(text) for sample in family.samples
        ]
        return {sample.name + sample.labels.get("use", ""): sample.value for sample in samples}

    def blocks_held(self) -> float:
        now = self.metrics()
        names = "hf_paged_kv_cache_blocksone_sequence", "hf_paged_kv_cache_blocksshared"
        return sum(
            now[name]
            for name in (*names, "hf_paged_num_requests_running", "hf_paged_num_requests_waiting")
        )

    def chat(self, prompt: str, **options: Any) -> Any:
        options = {"max_tokens": 12, "temperature": 0, **options}
        messages = [{"role": "user", "content": prompt}]
        return self.client.chat.completions.create(model=self.folder, messages=messages, **options)

    def answer(self, prompt: str, **options: Any) -> str:
        return str(self.chat(prompt, **options).choices[0].message.content)

    def close(self) -> None:
        """Interrupts the server like Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        try:
            self.process.wait(TIME_LIMIT)
            assert "Finished server process" in self.told() and "Traceback" not in self.told(), (
                self.told()
            )
        finally:
            self.process.kill()
            self.log.close()


def wait_for(is_true: Callable[[], Any], told: Callable[[], str]) -> None:
    end = time.monotonic() + TIME_LIMIT
    while not is_true():
        assert time.monotonic() < end, told()
        time.sleep(0.1)


def save(folder: Path, **config: Any) -> Any:
    """A model in a folder, with its tokenizer and a chat template."""
    tokenizer = models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    model = models.build("llama", **config)
    model.save_pretrained(folder)
    return model


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    save(folder)
    server = Server(folder)
    yield server
    server.close()


def plain(folder: str, prompt: str, **options: Any) -> str:
    """The text of plain `generate`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    messages = [{"role": "user", "content": prompt}]
    inputs = tokenizer.apply_chat_template(
        messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    with torch.no_grad():
        ids = model.generate(**inputs, **options, tokenizer=tokenizer)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_chat_and_completions(server: Server) -> None:
    """... equal `generate`'s text, at once and streamed."""
    answer = server.chat(PROMPTS[0])
    expected = plain(server.folder, PROMPTS[0])
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 12
    pieces = [chunk.choices[0] for chunk in server.chat(PROMPTS[0], stream=True) if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == expected
    assert len(pieces) > 4 and pieces[-1].finish_reason == "length"
    completion = server.client.completions.create(
        model=server.folder, prompt=PROMPTS[1] + " ", max_tokens=12, temperature=0
    )
    assert completion.choices[0].text == plain(server.folder, PROMPTS[1])


def test_each_request_has_its_own_options(server: Server) -> None:
    """The first one's options do not affect the others, and a seed belongs to its request."""
    sampled = {
        "temperature": 0.9,
        "top_p": 0.9,
        "extra_body": {"generation_config": '{"do_sample": true}'},
    }
    torch.manual_seed(7)
    expected = plain(server.folder, PROMPTS[2], do_sample=True, temperature=0.9, top_p=0.9)
    greedy = plain(server.folder, PROMPTS[2])
    with ThreadPoolExecutor(6) as pool:
        seeded = [pool.submit(server.answer, PROMPTS[2], seed=7, **sampled) for _ in range(3)]
        others = [pool.submit(server.answer, PROMPTS[2], seed=i, **sampled) for i in range(2)]
        assert pool.submit(server.answer, PROMPTS[2]).result() == greedy
        assert [each.result() for each in seeded] == [expected] * 3
        assert all(each.result() not in (expected, greedy) for each in others)
    penalised = plain(server.folder, PROMPTS[2], repetition_penalty=1.9)
    assert server.answer(PROMPTS[2], frequency_penalty=0.9) == penalised != greedy
    stop = greedy.split()[2]
    assert (
        server.answer(PROMPTS[2], stop=[stop])
        == plain(server.folder, PROMPTS[2], stop_strings=[stop])
        != greedy
    )


BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
MALFORMED = [
    {"messages": None},
    {"messages": "text"},
    {"nonsense": 1},
    {"max_tokens": 10**9},  # more blocks than there are
    {"model": "another"},
]


@pytest.mark.parametrize("change", [*MALFORMED, None], ids=str)
def test_malformed_requests_are_refused(server: Server, change: dict[str, Any] | None) -> None:
    body: Any = b"{no json" if change is None else None
    fields = None if change is None else {"model": server.folder, **BODY, **change}
    answer = httpx.post(
        f"{server.url}/v1/chat/completions", content=body, json=fields, timeout=TIME_LIMIT
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert "Traceback" not in answer.text and len(answer.text) > 20
    assert server.is_healthy() and server.answer(PROMPTS[0]) and server.blocks_held() == 0


def test_only_the_bodys_errors_are_the_clients(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """... and errors of the app pass on to the server, which answers 500 and logs them."""
    save_text_model(tmp_path)

    def broken(*args: Any, **kwargs: Any) -> Any:
        raise KeyError("a bug")

    with served(tmp_path) as app:
        assert app.post(**BODY).status_code == 200
        assert app.post(**{**BODY, "messages": None}).status_code == 400
        # before 5.24
        lists = "list_models" if hasattr(app.manager, "list_models") else "get_gen_models"
        monkeypatch.setattr(app.manager, lists, broken)
        with pytest.raises(KeyError, match="a bug"):
            app.client.get("/v1/models")
        # after the request was served
        monkeypatch.setattr(chat_completion, "CompletionUsage", broken)
        with pytest.raises(KeyError, match="a bug"):
            app.post(**BODY)
        load = functools.partial(serving._load, broken)
        monkeypatch.setattr(app.manager, "load_model_and_processor", load)
        with pytest.raises(KeyError, match="a bug"):
            app.post(**{**BODY, "messages": None})


def test_clients_that_send_one_id_get_their_own_answers(server: Server) -> None:
    def ask(prompt: str) -> str:
        return server.answer(prompt, extra_headers={"x-request-id": "mine"})

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, PROMPTS[:4]))
    assert answers == [plain(server.folder, prompt) for prompt in PROMPTS[:4]]


def test_a_client_that_is_gone_frees_its_blocks(server: Server) -> None:
    stream = iter(server.chat(PROMPTS[3], stream=True, max_tokens=3000))
    for _ in range(5):
        next(stream)
    finished = server.metrics()["hf_paged_requests_finished_total"]
    assert server.blocks_held() > 1
    stream.close()
    wait_for(lambda: server.blocks_held() == 0, server.told)
    now = server.metrics()
    assert now["hf_paged_requests_finished_total"] == finished + 1
    assert now["hf_paged_kv_cache_max_blocks"] == NUM_BLOCKS


def test_a_client_that_leaves_without_a_stream_ends_its_request(server: Server) -> None:
    before = server.metrics()
    body = json.dumps(
        {"model": server.folder, "messages": BODY["messages"], "max_tokens": 4000}
    ).encode()
    head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\nContent-Length: {len(body)}\r\n"
    port = int(server.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.sendall(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
        wait_for(lambda: server.blocks_held() > 1, server.told)
    wait_for(lambda: server.blocks_held() == 0, server.told)
    now = server.metrics()
    assert now["hf_paged_requests_finished_total"] == before["hf_paged_requests_finished_total"] + 1
    tokens = "hf_paged_generation_tokens_total"
    assert 0 < now[tokens] - before[tokens] < 4000  # it did not run to its end
    assert server.is_healthy() and server.answer(PROMPTS[0])


def test_models_are_listed_without_a_hub_cache(server: Server) -> None:
    server.answer(PROMPTS[0])
    assert server.folder in [model.id for model in server.client.models.list().data]


def test_choices_and_logprobs_of_the_openai_client(server: Server) -> None:
    options: dict[str, Any] = {
        "n": 3,
        "logprobs": True,
        "top_logprobs": 2,
        "temperature": 0.9,
        "seed": 5,
    }
    answer = server.chat(PROMPTS[0], **options)
    texts = [choice.message.content for choice in answer.choices]
    assert len(set(texts)) == 3 and answer.usage.completion_tokens == 36
    for choice in answer.choices:
        assert (
            len(choice.logprobs.content) == 12 and len(choice.logprobs.content[0].top_logprobs) == 2
        )
    pieces, logprobs = ["", "", ""], [0, 0, 0]
    for chunk in server.chat(
        PROMPTS[0], stream=True, stream_options={"include_usage": True}, **options
    ):
        for each in chunk.choices:
            pieces[each.index] += each.delta.content or ""
            logprobs[each.index] += len(each.logprobs.content) if each.logprobs is not None else 0
    assert pieces == texts and logprobs == [12] * 3 and chunk.usage.completion_tokens == 36
    completion = server.client.completions.create(
        model=server.folder, prompt=PROMPTS[1], logprobs=2, n=2, max_tokens=4
    )
    assert [len(choice.logprobs.tokens) for choice in completion.choices] == [4, 4]
    config = {
        "generation_config": '{"do_sample": true, "num_return_sequences": 2, "max_new_tokens": 4}'
    }
    assert len(server.chat(PROMPTS[0], extra_body=config).choices) == 2
    with pytest.raises(openai.BadRequestError, match=r"`presence_penalty` is 0\.5"):
        server.chat(PROMPTS[0], presence_penalty=0.5)


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    alone = [server.answer(prompt) for prompt in PROMPTS]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(server.answer, PROMPTS)) == alone
    assert len(set(alone)) > 16 and server.blocks_held() == 0


@pytest.mark.slow
def test_throughput(tmp_path: Path) -> None:
    """32 concurrent requests take at most a third of the time of sequential ones: a model of 100
    million parameters in bfloat16, whose weights are read once per step."""
    sizes = {
        "hidden_size": 768,
        "intermediate_size": 2048,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
    }
    model = models.build("llama", **sizes, head_dim=64, num_key_value_heads=12, vocab_size=16384)
    save(tmp_path)
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    server = Server(tmp_path)

    def seconds(num_clients: int) -> float:
        began = time.monotonic()
        with ThreadPoolExecutor(num_clients) as pool:
            list(pool.map(lambda prompt: server.answer(prompt, max_tokens=32), PROMPTS))
        return time.monotonic() - began

    try:
        seconds(32)  # steps are recorded
        one_by_one, at_once = seconds(1), seconds(32)
    finally:
        server.close()
    assert one_by_one >= 3 * at_once, (one_by_one, at_once)


@pytest.mark.slow
def test_a_thousand_requests_of_which_some_are_dropped(server: Server) -> None:
    """No blocks, requests, threads, open files or process memory beyond the pool are left of
    them."""
    psutil = pytest.importorskip("psutil")
    process = psutil.Process(server.process.pid)
    expected = [server.answer(prompt, max_tokens=8) for prompt in PROMPTS]
    wrong: list[int] = []

    def ask(i: int) -> None:
        prompt = PROMPTS[i % len(PROMPTS)]
        if i % 20 == 7:  # dropped
            with contextlib.closing(
                iter(server.chat(prompt, stream=True, max_tokens=500))
            ) as stream:
                for _ in range(i % 5):
                    next(stream)
        elif i % 2:
            pieces = server.chat(prompt, stream=True, max_tokens=8)
            if (
                "".join(piece.choices[0].delta.content or "" for piece in pieces)
                != expected[i % len(PROMPTS)]
            ):
                wrong.append(i)
        elif server.answer(prompt, max_tokens=8) != expected[i % len(PROMPTS)]:
            wrong.append(i)

    def held() -> tuple[int, int]:
        return process.num_threads(), process.num_fds()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(100)))
        wait_for(lambda: server.blocks_held() == 0, server.told)
        threads, files = held()
        memory = process.memory_info().rss
        before = server.metrics()["hf_paged_requests_finished_total"]
        list(pool.map(ask, range(1000)))
        wait_for(lambda: server.blocks_held() == 0, server.told)
    assert not wrong
    assert server.metrics()["hf_paged_requests_finished_total"] == before + 1000
    wait_for(lambda: held() <= (threads + 2, files + 2), lambda: f"{held()} after {threads, files}")
    assert process.memory_info().rss - memory < 64 << 20
    assert threading.active_count() < 64
