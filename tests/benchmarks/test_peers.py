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
from benchmarks.workloads import WORKLOADS
from tests.benchmarks.test_stages import ends

ROOT, SHAPE = Path(peers.__file__).parent, SHAPES["llama-tiny"]
WORKLOAD = WORKLOADS["W1"].scaled(0.1, 0.05)
BATCH = WORKLOAD.batch(0, SHAPE.vocab)
ECHO = """
import json, sys
print(json.dumps({"ready": True, "settings": sys.argv[4]}), flush=True)
for line in sys.stdin:
    asked = json.loads(line)
    pairs = zip(asked["prompts"], asked["new_tokens"])
    print(json.dumps({"rows": [prompt[:1] * length for prompt, length in pairs]}), flush=True)
"""


@pytest.fixture
def ask(tmp_path, monkeypatch):
    """Asks a peer, all of which are a program in this environment."""
    monkeypatch.setattr(peers, "_HERE", tmp_path)
    monkeypatch.setattr(peers, "environment", lambda name: Path(sys.executable))

    def ask(peer, program=ECHO, model=None):
        (tmp_path / "worker.py").write_text(program)
        return peer(model or build(SHAPE, "cpu", torch.bfloat16), SHAPE, WORKLOAD, BATCH).rows

    return ask


@pytest.mark.parametrize("name", peers.TITLES)
def test_every_peer_has_exact_versions(name):
    worker = peers.ENGINES[name].worker
    path = ROOT / f"{name}.txt"
    path = path if path.exists() else ROOT / f"{worker}.txt"
    lines = [line for line in path.read_text().splitlines() if line[0] not in "#-"]
    assert lines and all(line.count("==") == 1 for line in lines)
    command = [sys.executable, str(ROOT / "worker.py"), worker, "/nowhere", "1", "{}"]
    done = subprocess.run(command, capture_output=True, text=True, input="", timeout=60)
    answer = json.loads(done.stdout)
    assert done.returncode == 0 and list(answer) == ["error"] and "Error" in answer["error"]


def test_a_worker_answers_in_its_own_process(ask):
    peer = peers.Peer("vllm")
    for _ in range(2):
        expected = [prompt[:1] * new for prompt, new in zip(BATCH.prompts, BATCH.new_tokens)]
        assert ask(peer) == expected
    assert json.loads(peer.settings)["dtype"] == "bfloat16"
    peer.free()
    assert peer._process is None and peer._folder is None
    with pytest.raises(RuntimeError, match="its process ended with 3"):
        ask(peers.Peer("vllm"), "raise SystemExit(3)")


def test_an_engine_says_why_it_does_not_run(monkeypatch):
    told = {"vendor_id": "GenuineIntel", "flags": "avx512f"}
    monkeypatch.setattr(peers.machine, "told", told.__getitem__)
    assert peers.Peer("vllm_zen").reason("cpu", 1) == "skipped: made for AMD's Zen with AVX512"
    told["vendor_id"] = "AuthenticAMD"
    assert not peers.Peer("vllm_zen").reason("cpu", 8)
    assert peers.Peer("openvino").reason("cuda", 1) == "skipped: runs on the CPU"
    assert peers.Peer("llamacpp").reason("cpu", 8) == "skipped: it has no beams"
    assert "8-bit weights" in peers.Peer("vllm", int8=True).reason("cpu", 1)
    monkeypatch.setenv("HF_PAGED_PEER_VLLM", "/opt/vllm/bin/python")
    assert peers.environment("vllm") == Path("/opt/vllm/bin/python")


def test_a_peer_makes_its_own_8_bit_weights(ask):
    model, peer = model_of(SHAPE, "cpu", int8=True), peers.Peer("openvino", int8=True)
    assert type(model.model.layers[0].mlp.up_proj.weight.data) is not torch.Tensor
    assert ask(peer, model=model) and json.loads(peer.settings)["int8"]
    peer.free()
    systems = [systems_for(WORKLOAD)[name] for name in ("ours", "plain")]
    ours, plain = (system(model, SHAPE, WORKLOAD, BATCH).rows for system in systems)
    assert ours == plain


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
def test_a_stopped_worker_and_its_server_end_with_the_run(number):
    command = [sys.executable, "-c", RUN, SERVER, str(ROOT)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as run:
        children = run.stdout.readline().split()
        run.send_signal(number)
    assert len(children) == 2
    for child in children:
        ends(int(child))


def test_keys_and_values_have_a_type_that_the_processor_has():
    def make(kind):
        if kind in refused:
            raise RuntimeError(f"{kind} is refused")
        return f"a pipeline of {kind}"

    choices, refused = peers.ENGINES["openvino"].settings["kv"], set()
    assert worker.first_accepted(make, choices) == ("bf16", "a pipeline of bf16")
    refused.add("bf16")
    assert worker.first_accepted(make, choices) == ("f16", "a pipeline of f16")
    refused.update(choices)
    with pytest.raises(RuntimeError, match="f32 is refused"):
        worker.first_accepted(make, choices)
