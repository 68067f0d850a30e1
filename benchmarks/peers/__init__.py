"""CPU inference engines as systems of `benchmarks.generate`, each in a separate environment and
process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.models import Shape, build
from benchmarks.systems import Answer, NotAvailable, System
from benchmarks.workloads import Batch, Workload

TITLES = {"openvino": "OpenVINO GenAI", "vllm": "vLLM", "llamacpp": "llama.cpp"}
_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


def environment(name: str) -> Path:
    """Path of the Python in a peer's environment, `.venv-peer-NAME`. Creates a missing environment
    with the exact versions of `benchmarks/peers/NAME.txt`, from the package index. Raises
    `NotAvailable` if they cannot be installed."""
    folder, wanted = _ROOT / f".venv-peer-{name}", _HERE / f"{name}.txt"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        for command in (
            [sys.executable, "-m", "venv", "--clear", str(folder)],
            [str(python), "-m", "pip", "install", "-q", "--no-deps", "-r", str(wanted)],
        ):
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [""])[-1]
                raise NotAvailable(f"its packages cannot be installed: {last[:160]}")
        stamp.write_text(wanted.read_text())
    return python


class Peer(System):
    """
    An engine that loads the model from files.

    Args:
        name (`str`): One of `TITLES`.
        int8 (`bool`): Whether the engine uses its own 8-bit weights; only OpenVINO makes them from
            these files.
    """

    def __init__(self, name: str, int8: bool = False) -> None:
        self.name, self.int8 = name, int8
        self.is_peer = name == "llamacpp"  # the slow peer: it gets fewer turns
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if workload.options.get("num_beams", 1) > 1:
            raise NotAvailable("skipped: greedy and sampling only")
        if model.device.type != "cpu":
            raise NotAvailable("skipped: runs on the CPU")
        if self.int8 and self.name != "openvino":
            raise NotAvailable("skipped: 8-bit weights are made for OpenVINO only")
        if self._process is None:
            self._start(build(shape, "cpu", torch.bfloat16) if self.int8 else model)
        asked = {"prompts": batch.prompts, "new_tokens": list(batch.new_tokens)}
        asked |= {"rows_per_prompt": workload.rows_per_prompt, "sampled": workload.sampled}
        return Answer(self._ask(json.dumps(asked))["rows"], [])

    def _start(self, model: Any) -> None:
        python, threads = environment(self.name), str(torch.get_num_threads())
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        command = [str(python), str(_HERE / "worker.py"), self.name, self._folder.name, threads]
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self._process = subprocess.Popen(
            [*command, "int8" if self.int8 else ""],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**variables, "OMP_NUM_THREADS": threads},
        )
        self._ask(None)

    def _ask(self, line: str | None) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        if line is not None:
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        if not answer:
            raise RuntimeError(f"its process ended with {self._process.wait()}")
        found: dict[str, Any] = json.loads(answer)
        if "error" in found:
            raise RuntimeError(found["error"])
        return found

    def free(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None
