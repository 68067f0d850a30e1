"""Every code block of README.md and the guide runs as written, with tiny models under the names
that it uses."""

from __future__ import annotations

import copy
import http.client
import http.server
import itertools
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import transformers

import hf_paged
from tests.support import models
from tests.support.architectures import tiny_model

ROOT = Path(__file__).resolve().parents[1]
PAGES = [
    ROOT / "README.md",
    ROOT / "docs" / "index.md",
    *sorted((ROOT / "docs" / "guide").glob("*.md")),
]
FAST = ("README.md", "index.md", "generate.md", "cache.md")  # pages whose blocks run in seconds
CHECKPOINT = "Qwen/Qwen3-0.6B"  # the name in the pages; a tiny model stands under it
CHAT_TEMPLATE = "{% for m in messages %}{{ m['content'] }} {% endfor %}"

# (page, text of a Python block) -> where the block runs instead. The table may only shrink.
RAY = "tests/ecosystem/test_ray.py runs it from the page"
PYTHON_ELSEWHERE = {
    ("scale-out.md", "import ray"): RAY,
    ("scale-out.md", "from ray import serve"): RAY,
    ("scale-out.md", "handle = serve.get_app_handle"): RAY,
    ("scale-out.md", "split_between_processes"): "examples/accelerate_batch.py has it",
    ("scale-out.md", "torch.distributed.get_rank()"): "needs torchrun: tests/ranks/test_ranks.py",
    ("serving.md", "openai.OpenAI"): "needs a server: tests/ecosystem/test_serve.py",
    ("serving.md", "EngineCollector"): "needs prometheus_client: tests/ecosystem/test_metrics.py",
    ("engine.md", "schema="): "needs xgrammar: tests/ecosystem/test_xgrammar.py",
}

# beginning of a command -> why it is not run here. The table may only shrink.
COMMANDS_ELSEWHERE = {
    "python3 -m venv": "an installation: .ci/run",
    "pip install": "an installation: .ci/run",
    "python -m hf_paged run": "starts programs of others: tests/tools/test_run.py, tests/ecosystem",
    "curl": "needs a server: tests/ecosystem/test_ray.py",
    "accelerate launch": "tests/test_examples.py",
    "torchrun": "tests/ranks/test_ranks.py",
    "python examples/": "tests/test_examples.py",
}


class Block(NamedTuple):
    page: Path
    line: int  # of its first line of code
    language: str
    code: str


def blocks(page: Path, *languages: str) -> list[Block]:
    """The fenced blocks of a page in these languages."""
    text = page.read_text()
    matches = re.finditer(r"^( *)```(\w+)\n(.*?)^\1```$", text, re.MULTILINE | re.DOTALL)
    return [
        Block(page, text.count("\n", 0, match.start()) + 2, match[2], match[3])
        for match in matches
        if match[2] in languages
    ]


def runs_elsewhere(block: Block) -> bool:
    return any(block.page.name == page and text in block.code for page, text in PYTHON_ELSEWHERE)


@pytest.fixture
def checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tiny model in the hub's cache, under the name in the pages."""
    folder = tmp_path / "hub" / f"models--{CHECKPOINT.replace('/', '--')}"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("0" * 40)
    models.build("qwen3").save_pretrained(folder / "snapshots" / ("0" * 40))
    chat_tokenizer().save_pretrained(folder / "snapshots" / ("0" * 40))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))


def chat_tokenizer() -> Any:
    tokenizer = models.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def model() -> Any:
    model = models.build("llama")
    model.generation_config.max_new_tokens = 6
    return model


def peft_model() -> Any:
    from peft import LoraConfig, get_peft_model

    first, second = (LoraConfig(target_modules=[name]) for name in ("q_proj", "v_proj"))
    model = get_peft_model(models.build("llama"), first, adapter_name="translate")
    model.add_adapter("summarise", second)
    return model.eval()


def adapter_folder() -> str:
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(models.build("llama"), LoraConfig(target_modules=["q_proj"]))
    model.save_pretrained("adapter")
    return "adapter"


def vision_model() -> Any:
    model = tiny_model(transformers.LlavaForConditionalGeneration)
    model.config.image_token_id = len(models.tokenizer())  # the next one that a tokenizer adds
    return model


def processor(vision: Any) -> Any:
    tokenizer = copy.deepcopy(models.tokenizer())
    tokenizer.add_tokens(["<image>"])
    side = {"height": vision.image_size, "width": vision.image_size}
    pictures = transformers.CLIPImageProcessorPil(
        size={"shortest_edge": vision.image_size}, crop_size=side
    )
    return transformers.LlavaProcessor(
        pictures,
        tokenizer,
        patch_size=vision.patch_size,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
    )


def image() -> Any:
    from PIL import Image

    return Image.new("RGB", (40, 30), "teal")


PROMPTS = ["once upon a time", "the page table", "a block of keys and values"]
STAND_INS: dict[str, Callable[[Any], Any]] = {
    "model": lambda names: model(),
    "small_model": lambda names: models.build("llama", seed=1),
    "peft_model": lambda names: peft_model(),
    "adapter_folder": lambda names: adapter_folder(),
    "tokenizer": lambda names: chat_tokenizer(),
    "prompts": lambda names: [*PROMPTS],
    "prompt": lambda names: PROMPTS[0],
    "vision_model": lambda names: vision_model(),
    "processor": lambda names: processor(names["vision_model"].config.vision_config),
    "image": lambda names: image(),
    "inputs": lambda names: names["tokenizer"](PROMPTS, return_tensors="pt", padding=True),
    "first_turn": lambda names: names["tokenizer"](PROMPTS[:1], return_tensors="pt"),
    "second_turn": lambda names: {
        "input_ids": torch.cat([names["answer"], names["first_turn"]["input_ids"]], dim=1)
    },
    "generation_config": lambda names: transformers.GenerationConfig(max_new_tokens=6),
    "configs": lambda names: [{"max_new_tokens": count} for count in (2, 4, 6)],
    "seeds": lambda names: [0, 1, 2],
    "optimizer": lambda names: torch.optim.SGD(names["model"].parameters(), lr=0.0),
    "steering": lambda names: torch.zeros(names["model"].config.num_hidden_layers, 1),
    "dataset": lambda names: [{"input_ids": [5, 6, 7, 8], "labels": [5, 6, 7, 8]}] * 2,
    "compute_metrics": lambda names: lambda prediction: {"rows": len(prediction.predictions)},
    "port": lambda names: 0,  # any free one
}


class Names(dict[str, Any]):
    """Names that the pages use without making them, each made when it is first used."""

    def __missing__(self, name: str) -> Any:
        self[name] = STAND_INS[name](self)
        return self[name]


@pytest.fixture
def one_request(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """Lets `serve_forever` answer one request and return; what the server said."""
    answers: list[bytes] = []

    def ask(port: int) -> None:
        connection = http.client.HTTPConnection("localhost", port, timeout=60)
        connection.request("POST", "/", body="once upon a time")
        answers.append(connection.getresponse().read())

    def serve_one(server: http.server.HTTPServer) -> None:
        client = threading.Thread(target=ask, args=(server.server_address[1],))
        client.start()
        server.handle_request()
        client.join()
        server.server_close()

    monkeypatch.setattr(http.server.ThreadingHTTPServer, "serve_forever", serve_one)
    return answers


@pytest.mark.parametrize(
    "page",
    [page if page.name in FAST else pytest.param(page, marks=pytest.mark.slow) for page in PAGES],
    ids=lambda page: page.name,
)
def test_python_blocks_run_as_written(
    page: Path,
    checkpoint: None,
    one_request: list[bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if page.name == "cache.md" and models.BEFORE_5_24:
        pytest.skip(
            "written for transformers 5.24, where the argument `past_key_values` became `cache`"
        )
    monkeypatch.chdir(tmp_path)
    names = Names({"__name__": "__main__"})
    try:
        for block in blocks(page, "python"):
            if not runs_elsewhere(block):
                code = "\n" * (block.line - 1) + block.code  # tracebacks show the page's lines
                exec(compile(code, str(page), "exec"), names)
    finally:
        hf_paged.uninstall()
        hf_paged.install()
        for value in names.values():
            if isinstance(value, hf_paged.PagedEngine):
                value.free()
        hf_paged.budget(None)
    assert "serve_forever" not in page.read_text() or any(one_request)


def commands(page: Path) -> list[str]:
    """The commands in a page's shell blocks, without comments and continuation lines."""
    lines = "".join(block.code for block in blocks(page, "sh")).replace("\\\n", " ").splitlines()
    return [
        command
        for line in lines
        if (command := line.partition("  #")[0].strip()) and not command.startswith("#")
    ]


def test_shell_blocks_name_commands_that_exist() -> None:
    for command in itertools.chain(*map(commands, PAGES)):
        if any(command.startswith(beginning) for beginning in COMMANDS_ELSEWHERE):
            continue
        words = shlex.split(command)
        assert words[:2] == ["python", "-m"], (
            f"{command!r}: run it here, or say in COMMANDS_ELSEWHERE where it runs"
        )
        path = Path(ROOT, *words[2].split("."))
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), command


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_inspect_commands_run_as_written(page: Path) -> None:
    for command in commands(page):
        if re.match(r"python -m hf_paged(\.| )inspect", command) and "MODEL" not in command:
            words = [sys.executable, *shlex.split(command)[1:]]
            subprocess.run(words, check=True, cwd=ROOT, capture_output=True)


def test_no_reason_outlives_its_block() -> None:
    python = [block for page in PAGES for block in blocks(page, "python")]
    for page, text in PYTHON_ELSEWHERE:
        assert any(block.page.name == page and text in block.code for block in python), (page, text)
    shell = [command for page in PAGES for command in commands(page)]
    for beginning in COMMANDS_ELSEWHERE:
        assert any(command.startswith(beginning) for command in shell), beginning


def test_every_block_names_its_language() -> None:
    for page in PAGES:
        openings = re.findall(r"^ *```(.*)$", page.read_text(), re.MULTILINE)[::2]
        assert set(openings) <= {"python", "sh"}, page.name
