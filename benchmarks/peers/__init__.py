"""CPU inference engines as systems of `benchmarks.generate`, each in a separate environment and
process, at the settings that were best for it."""

from __future__ import annotations

import atexit
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
from ctypes.util import find_library
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import machine, report
from benchmarks.models import Shape, build
from benchmarks.systems import Answer, NotAvailable, System
from benchmarks.workloads import Batch, Workload

_HERE = Path(__file__).parent
_ROOT = _HERE.parents[1]


class Engine(NamedTuple):
    """An engine that runs in a separate process."""

    title: str  # name in the tables
    worker: str  # function of `worker.py`
    settings: dict[str, Any] = {}  # for the worker, besides the workload and the weights' dtype


ENGINES = {
    "openvino": Engine("OpenVINO GenAI", "openvino", {"kv": ["bf16", "f16", "f32"]}),
    "openvino_u8": Engine("OpenVINO GenAI, u8 K/V", "openvino", {"kv": ["u8"]}),
    "vllm": Engine("vLLM", "vllm"),
    "vllm_zen": Engine("vLLM, Zen", "vllm"),
    "llamacpp": Engine("llama.cpp", "llamacpp"),
}
TITLES = {name: engine.title for name, engine in ENGINES.items()}


def environment(name: str) -> Path:
    """Path of the Python in a peer's environment: `HF_PAGED_PEER_NAME` names one of your own, such
    as a newer release that the package index does not have; `HF_PAGED_PEERS` the folder where all
    of them are, as `.venv-peer-NAME`. Else `.venv-peer-NAME` of the checkout, which is created with
    the exact versions of `benchmarks/peers/NAME.txt`, from the package index. Raises `NotAvailable`
    if they cannot be installed."""
    wanted = _HERE / f"{name}.txt"
    if not wanted.exists():
        wanted = _HERE / f"{ENGINES[name].worker}.txt"
    if own := os.environ.get(f"HF_PAGED_PEER_{wanted.stem.upper()}"):
        return Path(own)
    shared = os.environ.get("HF_PAGED_PEERS")
    folder = Path(shared or _ROOT) / f".venv-peer-{wanted.stem}"
    python, stamp = folder / "bin" / "python", folder / "installed.txt"
    if shared and python.exists():
        return python
    if shared:
        raise NotAvailable(f"not installed in {folder}")
    if not stamp.exists() or stamp.read_text() != wanted.read_text():
        _run("its packages cannot be installed", sys.executable, "-m", "venv", "--clear", folder)
        install = (python, "-m", "pip", "install", "-q", "--no-deps", "-r", wanted)
        _run("its packages cannot be installed", *install)
        if wanted.stem == "llamacpp":
            _build_llamacpp(python, folder, wanted)
        elif wanted.stem.startswith("vllm"):
            _unpack_tcmalloc(folder)
        stamp.write_text(wanted.read_text())
    return python


def _run(problem: str, *command: Any, cwd: Path | None = None) -> None:
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, cwd=cwd)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [""])[-1]
        raise NotAvailable(f"{problem}: {last[:160]}")


def _build_llamacpp(python: Path, folder: Path, wanted: Path) -> None:
    """Builds llama.cpp's server for this processor, from the sources that xllamacpp's archive has:
    the wheel is built for AVX2, which took twice as long. The comment in the requirements names the
    archive's version."""
    problem, sources = "its server cannot be built", folder / "sources"
    (version,) = [line.split()[-1] for line in wanted.read_text().splitlines() if "sdist" in line]
    options = ("--no-deps", "--no-binary", "xllamacpp", "-d", sources)
    _run(problem, python, "-m", "pip", "download", "-q", *options, version)
    with tarfile.open(next(sources.glob("*.tar.gz"))) as archive:
        archive.extractall(sources, filter="data")
    (tree,) = sources.glob("*/thirdparty/llama.cpp")
    off = [f"-DLLAMA_{name}=OFF" for name in ("OPENSSL", "CURL", "BUILD_TESTS", "BUILD_EXAMPLES")]
    off += ["-DLLAMA_USE_PREBUILT_UI=OFF", "-DBUILD_SHARED_LIBS=OFF"]
    build = folder / "build"
    native = ("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON")
    _run(problem, "cmake", "-B", build, "-S", tree, *native, *off)
    _run(problem, "cmake", "--build", build, "--target", "llama-server", "-j", machine.cores())
    shutil.copy(build / "bin" / "llama-server", folder / "bin")
    shutil.rmtree(build)
    shutil.rmtree(sources)


def _unpack_tcmalloc(folder: Path) -> None:
    """Fetches Debian's tcmalloc into the environment, where there is such a system; the worker says
    if it runs without."""
    if find_library("tcmalloc_minimal") is None and shutil.which("apt-get"):
        options: dict[str, Any] = {"cwd": folder, "capture_output": True}
        subprocess.run(["apt-get", "download", "libtcmalloc-minimal4"], **options)
        for package in folder.glob("libtcmalloc*.deb"):
            subprocess.run(["dpkg", "-x", package.name, "tcmalloc"], **options)


def preloaded(folder: Path) -> list[str]:
    """What vLLM's guide preloads: tcmalloc and Intel's OpenMP, of the environment or the system."""
    tcmalloc = next(
        folder.glob("tcmalloc/**/libtcmalloc_minimal.so.4"), find_library("tcmalloc_minimal")
    )
    openmp = next(folder.glob("lib/libiomp5.so"), None)
    return [str(one) for one in (tcmalloc, openmp) if one]


class Peer(System):
    """One of `ENGINES`, which loads the model from files. `int8`: whether the engine uses its own
    8-bit weights; only OpenVINO makes them from these files."""

    def __init__(self, name: str, int8: bool = False) -> None:
        self.name, self.int8, self.settings = name, int8, ""
        self.is_peer = name == "llamacpp"  # the slow peer: it gets fewer turns
        self._of: dict[str, Any] = {}
        self._problem = ""  # of its start: it is not tried again
        self._process: subprocess.Popen[str] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    def reason(self, device: str, num_beams: int) -> str:
        """Why the engine does not run; empty if it does."""
        if num_beams > 1 and self.name == "llamacpp":
            return "skipped: it has no beams"
        if device != "cpu":
            return "skipped: runs on the CPU"
        if self.int8 and ENGINES[self.name].worker != "openvino":
            return "skipped: 8-bit weights are made for OpenVINO only"
        is_zen = machine.told("vendor_id") == "AuthenticAMD" and "avx512f" in machine.told("flags")
        if self.name == "vllm_zen" and not is_zen:
            return "skipped: made for AMD's Zen with AVX512"
        return ""

    def __call__(self, model: Any, shape: Shape, workload: Workload, batch: Batch) -> Answer:
        if reason := self.reason(model.device.type, workload.num_beams):
            raise NotAvailable(reason)
        dtype = str(model.dtype).removeprefix("torch.")
        of = {"int8": self.int8, "shape": shape.name, "dtype": dtype}
        if self.name == "llamacpp":
            of |= slots_of(workload)
        if self._problem:
            raise NotAvailable(self._problem)
        if self._process is None or self._of != of:
            self.free()
            try:
                self._start(build(shape, "cpu", model.dtype) if self.int8 else model, of)
            except Exception as error:
                is_known = isinstance(error, NotAvailable)
                self._problem = str(error) if is_known else report.failed(error)
                raise
            self._of = of
        asked = {"prompts": batch.prompts, "new_tokens": list(batch.new_tokens)}
        asked |= {"rows_per_prompt": workload.rows_per_prompt, "sampled": workload.sampled}
        asked |= {"num_beams": workload.num_beams}
        return Answer(self._ask(json.dumps(asked))["rows"], [])

    def _start(self, model: Any, of: dict[str, Any]) -> None:
        python, threads = environment(self.name), str(torch.get_num_threads())
        worker, settings = ENGINES[self.name][1:]
        self._folder = tempfile.TemporaryDirectory()
        model.save_pretrained(self._folder.name)
        command = [str(python), str(_HERE / "worker.py"), worker, self._folder.name, threads]
        variables = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        if worker == "vllm":
            variables["LD_PRELOAD"] = os.pathsep.join(preloaded(python.parents[1]))
        self._process = subprocess.Popen(
            [*command, json.dumps(settings | of)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**variables, "OMP_NUM_THREADS": threads},
            start_new_session=True,  # what it starts ends with it
        )
        atexit.register(self.free)  # where the run is interrupted
        self.settings = str(self._ask(None).get("settings", ""))

    def _ask(self, line: str | None) -> dict[str, Any]:
        assert self._process is not None
        assert self._process.stdin is not None and self._process.stdout is not None
        os.killpg(self._process.pid, signal.SIGCONT)
        if line is not None:
            print(line, file=self._process.stdin, flush=True)
        answer = self._process.stdout.readline()
        ended = "" if answer else f"its process ended with {self._process.wait()}"
        found: dict[str, Any] = {"error": ended} if ended else json.loads(answer)
        if "error" in found:
            self.free()  # the next workload starts it again
            raise RuntimeError(found["error"])
        os.killpg(self._process.pid, signal.SIGSTOP)  # until its next turn
        return found

    def free(self) -> None:
        if self._process is not None:
            kill_group(self._process)
            self._process.communicate()
        if self._folder is not None:
            self._folder.cleanup()
        self._process = self._folder = None
        self._of = {}


def slots_of(workload: Workload) -> dict[str, int]:
    """llama.cpp's: few compute a shared prefix less often, and a long prompt needs a large one."""
    if workload.name == "W10":  # of its warm-up, too, which is shorter
        return {"slots": 1, "slot_tokens": 8192}
    is_shared = bool(workload.prefix) or workload.rows_per_prompt > 1
    return {"slots": 8 if is_shared else 32, "slot_tokens": 1024}


def kill_group(process: subprocess.Popen[str]) -> None:
    """Ends a process that leads a session, and all that it started."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        process.kill()
