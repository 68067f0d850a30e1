"""Engines in separate processes: their inputs, and the results of their failures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from benchmarks import peers
from benchmarks.generate import model_of, systems_for
from benchmarks.models import SHAPES, build
from benchmarks.peers import worker
from benchmarks.systems import NotAvailable
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.test_stages import ends

ROOT = Path(peers.__file__).parent
ECHO = """
import json, sys
print(json.dumps({"ready": True, "settings": "an echo"}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    copies = range(asked["rows_per_prompt"])
    pairs = zip(asked["prompts"], asked["new_tokens"])
    print(json.dumps({"rows": [prompt[:1] * length for prompt, length in pairs for _ in copies]}), flush=True)
"""


def replace_workers(text: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All engines are this program, in this environment."""
    (folder / "worker.py").write_text(text)
    monkeypatch.setattr(peers, "_HERE", folder)
    monkeypatch.setattr(peers, "environment", lambda name: Path(sys.executable))


@pytest.mark.parametrize("name", peers.TITLES)
def test_every_peer_has_exact_versions(name: str) -> None:
    worker = peers.ENGINES[name].worker
    path = ROOT / f"{name}.txt"
    path = path if path.exists() else ROOT / f"{worker}.txt"
    lines = [line for line in path.read_text().splitlines() if line[0] not in "#-"]
    assert lines and all(line.count("==") == 1 for line in lines)
    done = subprocess.run(
        [sys.executable, str(ROOT / "worker.py"), worker, "/nowhere", "1", "{}"],
        capture_output=True,
        text=True,
        input="",
        timeout=60,
    )
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and list(answer) == ["error"] and "Error" in answer["error"]


def test_a_worker_answers_in_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace_workers(ECHO, tmp_path, monkeypatch)
    shape, workload = SHAPES["llama-tiny"], WORKLOADS["W1"].scaled(0.1, 0.1)
    model, batch = build(shape, "cpu", torch.bfloat16), workload.batch(0, shape.vocab)
    system = systems_for(workload, [peers.Peer("vllm")])["vLLM"]
    for _ in range(2):
        rows = system(model, shape, workload, batch).rows
        assert rows == [prompt[:1] * new for prompt, new in zip(batch.prompts, batch.new_tokens)]
    system.free()
    assert isinstance(system, peers.Peer) and system._process is None and system._folder is None
    assert system.settings == "an echo"
    with pytest.raises(NotAvailable, match="it has no beams"):
        peers.Peer("llamacpp")(model, shape, WORKLOADS["W5"], batch)


def test_an_engine_says_why_it_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"vendor_id": "GenuineIntel", "flags": "avx512f"}
    monkeypatch.setattr(peers.machine, "told", told.__getitem__)
    assert peers.Peer("vllm_zen").reason("cpu", 1) == "skipped: made for AMD's Zen with AVX512"
    told["vendor_id"] = "AuthenticAMD"
    assert not peers.Peer("vllm_zen").reason("cpu", 8)
    assert peers.Peer("openvino").reason("cuda", 1) == "skipped: runs on the CPU"
    monkeypatch.setenv("HF_PAGED_PEER_VLLM", "/opt/vllm/bin/python")
    assert peers.environment("vllm") == Path("/opt/vllm/bin/python")


def test_a_peer_makes_its_own_8_bit_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checks = "import sys\nassert 'int8\": true' in sys.argv[4]\n"
    replace_workers(checks + ECHO, tmp_path, monkeypatch)
    shape, workload = SHAPES["llama-tiny"], WORKLOADS["W1"].scaled(0.1, 0.05)
    model, batch = model_of(shape, "cpu", int8=True), workload.batch(0, shape.vocab)
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor
    systems = systems_for(workload, [peers.Peer(name, int8=True) for name in ("openvino", "vllm")])
    rows = systems["OpenVINO GenAI"](model, shape, workload, batch).rows
    assert rows == [prompt[:1] * length for prompt, length in zip(batch.prompts, batch.new_tokens)]
    systems["OpenVINO GenAI"].free()
    with pytest.raises(NotAvailable, match="8-bit weights"):
        systems["vLLM"](model, shape, workload, batch)
    assert (
        systems["ours"](model, shape, workload, batch).rows
        == systems["plain"](model, shape, workload, batch).rows
    )


@pytest.mark.slow
def test_the_engine_once_more_with_rows_that_do_not_feel_their_neighbours() -> None:
    shape, workload = SHAPES["llama-tiny"], WORKLOADS["W1"].scaled(0.1, 0.05)
    model, batch = model_of(shape, "cpu", int8=False), workload.batch(0, shape.vocab)
    systems = systems_for(workload, invariant=True)
    assert list(systems) == ["plain", "ours", "engine", "engine, batch_invariant"]
    rows = systems["engine, batch_invariant"](model, shape, workload, batch).rows
    assert [len(row) for row in rows] == batch.new_tokens
    systems["engine, batch_invariant"].free()


def test_an_engine_that_dies_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    replace_workers("raise SystemExit(3)", tmp_path, monkeypatch)
    shape, workload = SHAPES["llama-tiny"], WORKLOADS["W1"].scaled(0.1, 0.1)
    with pytest.raises(RuntimeError, match="its process ended with 3"):
        peers.Peer("vllm")(
            build(shape, "cpu", torch.bfloat16), shape, workload, workload.batch(0, shape.vocab)
        )


@pytest.mark.slow
@pytest.mark.full
def test_packages_that_cannot_be_had(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "vllm.txt").write_text("no-such-package-of-anyone==0.0.0\n")
    monkeypatch.setattr(peers, "_HERE", tmp_path)
    monkeypatch.setattr(peers, "_ROOT", tmp_path)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(NotAvailable, match="its packages cannot be installed"):
        peers.environment("vllm")


SERVER = """
import sys
sys.path.insert(0, sys.argv.pop(1))
import worker
worker.llamacpp = lambda *_: (None, str(worker.start(["sleep", "600"]).pid))
worker.main()
"""
RUN = """
import json, os, signal, subprocess, sys, time
command = [sys.executable, "-c", *sys.argv[1:], "llamacpp", "/nowhere", "1", "{}"]
options = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "start_new_session": True}
worker = subprocess.Popen(command, **options)
told = json.loads(worker.stdout.readline())
os.killpg(worker.pid, signal.SIGSTOP)
print(worker.pid, told["settings"], flush=True)
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="prctl is Linux's")
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_stopped_worker_and_its_server_end_with_the_run(number: int) -> None:
    command = [sys.executable, "-c", RUN, SERVER, str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        assert run.stdout is not None
        children = run.stdout.readline().split()
        run.send_signal(number)
    assert len(children) == 2
    for child in children:
        ends(int(child))


def test_keys_and_values_have_a_type_that_the_processor_has() -> None:
    def make(kind: str) -> str:
        if kind in refused:
            raise RuntimeError(f"{kind} is refused")
        return f"a pipeline of {kind}"

    choices, refused = peers.ENGINES["openvino"].settings["kv"], set[str]()
    assert worker.first_accepted(make, choices) == ("bf16", "a pipeline of bf16")
    refused.add("bf16")
    assert worker.first_accepted(make, choices) == ("f16", "a pipeline of f16")
    refused.update(choices)
    with pytest.raises(RuntimeError, match="f32 is refused"):
        worker.first_accepted(make, choices)
