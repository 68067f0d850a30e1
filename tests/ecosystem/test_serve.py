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
from .conftest import TIME_LIMIT, free_port, wait_for  # noqa: E402
from .served_app import TEMPLATE, save_text_model, served  # noqa: E402

ROOT = Path(hf_paged.__file__).parents[1]
PROMPTS = [f"{models.corpus()[i % len(models.corpus())]} {i}" for i in range(32)]
NUM_BLOCKS = 512


class Server:
    """A server process with one model, and clients for it."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.folder, self.url = str(folder), f"http://127.0.0.1:{self.port}"
        run = f"-m hf_paged run --engine --set num_blocks={NUM_BLOCKS} --set block_size=8"
        serve = f"transformers serve {folder} --device cpu --host 127.0.0.1 --port {self.port}"
        offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": str(folder / "empty")}
        self.log = (folder / "log.txt").open("w+")
        self.process = subprocess.Popen(
            [sys.executable, *run.split(), *serve.split()],
            cwd=ROOT,
            env={**os.environ, **offline, "OMP_NUM_THREADS": "1"},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )
        self.client = openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", timeout=TIME_LIMIT, max_retries=0
        )
        self.wait_for(lambda: self.process.poll() is not None or self.is_healthy())
        assert self.process.poll() is None, self.told()

    def told(self) -> str:
        self.log.seek(0)
        return self.log.read()

    def wait_for(self, is_true: Callable[[], Any]) -> None:
        wait_for(is_true, self.told)

    def is_healthy(self) -> bool:
        with contextlib.suppress(httpx.TransportError):
            return httpx.get(f"{self.url}/health").status_code == 200
        return False

    def metrics(self) -> dict[str, float]:
        """Values by name without our prefix, and by use for metrics of blocks."""
        text = httpx.get(f"{self.url}/metrics", timeout=TIME_LIMIT).text
        return {
            sample.name.removeprefix("hf_paged_") + sample.labels.get("use", ""): sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        }

    def held(self) -> float:
        """Blocks in use, and requests."""
        now = self.metrics()
        blocks = now["kv_cache_blocksone_sequence"] + now["kv_cache_blocksshared"]
        return blocks + now["num_requests_running"] + now["num_requests_waiting"]

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
            told = self.told()
            assert "Finished server process" in told and "Traceback" not in told, told
        finally:
            self.process.kill()
            self.log.close()


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served")
    tokenizer = models.tokenizer()
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(folder)
    models.build("llama").save_pretrained(folder)
    server = Server(folder)
    yield server
    server.close()


def plain(server: Server, prompt: str, **options: Any) -> str:
    """The text of plain `generate`."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(server.folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(server.folder)
    inputs = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}],
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
    )
    options = {"max_new_tokens": 12, "do_sample": False, **options}
    with torch.no_grad():
        ids = model.generate(**inputs, **options, tokenizer=tokenizer)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_chat_and_completions(server: Server) -> None:
    """... equal `generate`'s text, at once and streamed."""
    answer, expected = server.chat(PROMPTS[0]), plain(server, PROMPTS[0])
    assert answer.choices[0].message.content == expected
    assert answer.choices[0].finish_reason == "length" and answer.usage.completion_tokens == 12
    pieces = [chunk.choices[0] for chunk in server.chat(PROMPTS[0], stream=True) if chunk.choices]
    assert "".join(piece.delta.content or "" for piece in pieces) == expected
    assert len(pieces) > 4 and pieces[-1].finish_reason == "length"
    completion = server.client.completions.create(
        model=server.folder, prompt=PROMPTS[1] + " ", max_tokens=12, temperature=0
    )
    assert completion.choices[0].text == plain(server, PROMPTS[1])
    # listed, without a cache of the hub
    assert server.folder in [model.id for model in server.client.models.list().data]


def test_each_request_has_its_own_options(server: Server) -> None:
    """The first one's options do not affect the others, and a seed belongs to its request."""
    sampled = {"temperature": 0.9, "top_p": 0.9}
    torch.manual_seed(7)
    expected = plain(server, PROMPTS[2], do_sample=True, **sampled)
    greedy = plain(server, PROMPTS[2])
    with ThreadPoolExecutor(6) as pool:
        seeded = [pool.submit(server.answer, PROMPTS[2], seed=7, **sampled) for _ in range(3)]
        others = [pool.submit(server.answer, PROMPTS[2], seed=i, **sampled) for i in range(2)]
        assert pool.submit(server.answer, PROMPTS[2]).result() == greedy
        assert [each.result() for each in seeded] == [expected] * 3
        assert all(each.result() not in (expected, greedy) for each in others)
    penalised = plain(server, PROMPTS[2], repetition_penalty=1.9)
    assert server.answer(PROMPTS[2], frequency_penalty=0.9) == penalised != greedy
    stop = [greedy.split()[2]]
    stopped = plain(server, PROMPTS[2], stop_strings=stop)
    assert server.answer(PROMPTS[2], stop=stop) == stopped != greedy


BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}


def test_malformed_requests_are_refused(server: Server) -> None:
    url = f"{server.url}/v1/chat/completions"
    answers = [httpx.post(url, content=b"{no json", timeout=TIME_LIMIT)]
    for change in (
        {"messages": None},
        {"messages": "text"},
        {"nonsense": 1},
        {"max_tokens": 10**9},  # more blocks than there are
        {"model": "another"},
    ):
        body = {"model": server.folder, **BODY, **change}
        answers.append(httpx.post(url, json=body, timeout=TIME_LIMIT))
    for answer in answers:
        assert 400 <= answer.status_code < 500, answer.text
        assert "Traceback" not in answer.text and len(answer.text) > 20
    with pytest.raises(openai.BadRequestError, match=r"`presence_penalty` is 0\.5"):
        server.chat(PROMPTS[0], presence_penalty=0.5)
    assert server.is_healthy() and server.answer(PROMPTS[0]) and server.held() == 0


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


@pytest.mark.parametrize("is_streamed", [True, False])
def test_a_client_that_is_gone_frees_its_blocks(server: Server, is_streamed: bool) -> None:
    server.answer(PROMPTS[0])
    before = server.metrics()
    with contextlib.ExitStack() as client:
        if is_streamed:
            stream = client.enter_context(server.chat(PROMPTS[3], stream=True, max_tokens=3000))
            for _ in range(5):
                next(stream)
        else:
            body = json.dumps({"model": server.folder, **BODY, "max_tokens": 3000}).encode()
            head = "POST /v1/chat/completions HTTP/1.1\r\nHost: a\r\n"
            head += f"Content-Length: {len(body)}\r\nContent-Type: application/json\r\n\r\n"
            connection = socket.create_connection(("127.0.0.1", server.port))
            client.enter_context(connection).sendall(head.encode() + body)
        server.wait_for(lambda: server.held() > 1)
    server.wait_for(lambda: server.held() == 0)
    now = server.metrics()
    assert now["requests_finished_total"] == before["requests_finished_total"] + 1
    # it did not run to its end
    assert 0 < now["generation_tokens_total"] - before["generation_tokens_total"] < 3000
    assert now["kv_cache_max_blocks"] == NUM_BLOCKS
    assert server.is_healthy() and server.answer(PROMPTS[0])


def test_many_at_once_get_what_each_gets_alone(server: Server) -> None:
    """Though all clients send one id."""

    def ask(prompt: str) -> str:
        return server.answer(prompt, extra_headers={"x-request-id": "mine"})

    alone = [server.answer(prompt) for prompt in PROMPTS]
    assert alone[:2] == [plain(server, prompt) for prompt in PROMPTS[:2]]
    with ThreadPoolExecutor(len(PROMPTS)) as pool:
        assert list(pool.map(ask, PROMPTS)) == alone
    assert len(set(alone)) > 16 and server.held() == 0


@pytest.mark.slow
def test_a_thousand_requests_of_which_some_are_dropped(server: Server) -> None:
    """No blocks, requests, threads, open files or process memory beyond the pool are left of
    them."""
    process = pytest.importorskip("psutil").Process(server.process.pid)
    expected = [server.answer(prompt, max_tokens=8) for prompt in PROMPTS]
    wrong: list[int] = []

    def ask(i: int) -> None:
        prompt, text = PROMPTS[i % len(PROMPTS)], ""
        if i % 20 == 7:  # dropped
            with server.chat(prompt, stream=True, max_tokens=500) as stream:
                for _ in range(i % 5):
                    next(stream)
            return
        if i % 2:
            for piece in server.chat(prompt, stream=True, max_tokens=8):
                text += piece.choices[0].delta.content or ""
        else:
            text = server.answer(prompt, max_tokens=8)
        if text != expected[i % len(PROMPTS)]:
            wrong.append(i)

    def held() -> tuple[int, int]:
        return process.num_threads(), process.num_fds()

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(ask, range(100)))
        server.wait_for(lambda: server.held() == 0)
        threads, files = held()
        memory = process.memory_info().rss
        before = server.metrics()["requests_finished_total"]
        list(pool.map(ask, range(1000)))
        server.wait_for(lambda: server.held() == 0)
    assert not wrong
    assert server.metrics()["requests_finished_total"] == before + 1000
    server.wait_for(lambda: held() <= (threads + 2, files + 2))
    assert process.memory_info().rss - memory < 64 << 20
    assert threading.active_count() < 64
