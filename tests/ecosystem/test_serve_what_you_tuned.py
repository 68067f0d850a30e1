"""docs/guide/serve-what-you-tuned.md as it stands: its Python in order, its servers, its request,
with a tiny model."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

for _package in ("datasets", "fastapi", "peft", "trl", "uvicorn"):
    pytest.importorskip(_package)

import safetensors.torch  # noqa: E402
import torch  # noqa: E402
from peft import AutoPeftModelForCausalLM  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

import hf_paged  # noqa: E402

from ..support import models  # noqa: E402
from .conftest import TIME_LIMIT, free_port, wait_for  # noqa: E402
from .served_app import TEMPLATE  # noqa: E402

ROOT = Path(hf_paged.__file__).parents[1]
PAGE = Path(__file__).resolve().parents[2] / "docs" / "guide" / "serve-what-you-tuned.md"
BASE, ADAPTER = "Qwen/Qwen3-0.6B", Path("adapters", "blocks", "adapter_model.safetensors")


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)


def commands() -> list[str]:
    """Commands of the page, one a line."""
    lines = "\n".join(blocks("sh")).replace("\\\n", " ").splitlines()
    return [line for line in lines if line.strip()]


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """Runs the page's Python in an empty folder, which stays the current one; yields its names."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("page"))
        tokenizer = models.tokenizer()
        patch.setattr(tokenizer, "chat_template", TEMPLATE)
        tokenizer.save_pretrained(BASE)
        models.build("llama").save_pretrained(BASE)
        names: dict[str, Any] = {}
        for number, block in enumerate(blocks("python")):
            exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
            if ADAPTER.exists() and "results" not in names:
                # a few steps hardly move it: its answers shall differ
                weights = safetensors.torch.load_file(ADAPTER)
                for key in weights:
                    weights[key] *= 1e4 if "lora_B" in key else 1
                safetensors.torch.save_file(weights, ADAPTER, metadata={"format": "pt"})
        yield names


def plain(model: Any, page: dict[str, Any], folder: str = BASE) -> str:
    """The answer of plain `generate`."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer.apply_chat_template(
        page["question"], add_generation_prompt=True, return_dict=True, return_tensors="pt"
    )
    with torch.no_grad():
        ids = model.eval().generate(**inputs, max_new_tokens=32, do_sample=False)
    return str(tokenizer.decode(ids[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))


def test_each_request_gets_the_answer_of_its_adapter(page: dict[str, Any]) -> None:
    adapted, base = (result.text for result in page["results"])
    assert base == plain(AutoModelForCausalLM.from_pretrained(BASE), page)
    assert adapted == plain(AutoPeftModelForCausalLM.from_pretrained("adapters/blocks"), page)
    assert adapted != base


@pytest.mark.parametrize("folder", ["tuned", pytest.param("merged", marks=pytest.mark.slow)])
def test_the_server_answers_as_plain_generate(page: dict[str, Any], folder: str) -> None:
    """Other commands of the page install what this environment has."""
    if shutil.which("curl") is None:
        pytest.skip("no curl, which the page uses")
    others = [line for line in commands() if "serve" not in line.split()]
    install, ask = others
    assert install == 'pip install "hf_paged[serve]" "transformers[serving]"'
    (start,) = [line for line in commands() if line.endswith(f"serve {folder}")]
    port = free_port()
    python, *arguments = shlex.split(start)
    assert python == "python"
    search = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    with open(f"{folder}.log", "w+") as log:
        server = subprocess.Popen(
            [sys.executable, *arguments, "--device", "cpu", "--port", str(port)],
            env={**os.environ, "PYTHONPATH": search, "OMP_NUM_THREADS": "1"},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            health = ["curl", "-sf", f"localhost:{port}/health"]
            wait_for(
                lambda: not subprocess.run(health, capture_output=True).returncode,
                lambda: Path(log.name).read_text(),
            )
            ask = ask.replace("localhost:8000", f"localhost:{port}")
            ask = ask.replace('"tuned"', json.dumps(folder))
            answer = subprocess.run(
                ["bash", "-c", ask], capture_output=True, text=True, timeout=TIME_LIMIT
            )
        finally:
            server.terminate()
            server.wait(TIME_LIMIT)
    content = json.loads(answer.stdout)["choices"][0]["message"]["content"]
    assert content == plain(AutoModelForCausalLM.from_pretrained(folder), page, folder)
