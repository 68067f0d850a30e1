"""An engine in a separate process and environment: `python worker.py NAME DIRECTORY THREADS
SETTINGS`. First says that it is `ready`, with its `settings` in words; then reads a batch as one
line of JSON and answers with one line: `rows`, the new tokens of each row, or `error`. Imports
nothing of this project."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

Batch = dict[str, Any]  # prompts, new_tokens (of each prompt), rows_per_prompt, sampled, num_beams
Run = Callable[[Batch], list[list[int]]]
NO_TOKEN = 1  # stop token for engines that require one; they are told to ignore it
PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Has Linux kill this process, stopped or not, when the one that started it ends."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def start(command: list[Any], **options: Any) -> subprocess.Popen[bytes]:
    """A server that ends with this process; by default, what it prints goes to stderr."""
    options = {"stdout": 2, "preexec_fn": die_with_parent, **options}
    return subprocess.Popen([*map(str, command)], **options)


def first_accepted(make: Callable[[str], Any], choices: list[str]) -> tuple[str, Any]:
    """The first choice that `make` takes, and what it returns; raises the last one's error."""
    for choice in choices[:-1]:
        try:
            return choice, make(choice)
        except RuntimeError:  # the processor has no instructions for it
            continue
    return choices[-1], make(choices[-1])


def openvino(directory: Path, threads: int, settings: dict[str, Any]) -> tuple[Run, str]:
    """OpenVINO GenAI's continuous batching with its prefix cache, on a model converted by
    optimum-intel."""
    import numpy as np
    import openvino
    import openvino_genai
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        directory, export=True, load_in_8bit=settings["int8"]
    )
    model.save_pretrained(directory / "openvino")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.enable_prefix_caching = True

    def make(kv: str) -> Any:
        options = {"INFERENCE_NUM_THREADS": threads, "KV_CACHE_PRECISION": kv}
        if settings["dtype"] == "float32":  # else what the processor is fastest in
            options["INFERENCE_PRECISION_HINT"] = "f32"
        arguments = str(directory / "openvino"), scheduler, "CPU", options
        return openvino_genai.ContinuousBatchingPipeline(*arguments)

    kv, pipeline = first_accepted(make, settings["kv"])

    def run(batch: Batch) -> list[list[int]]:
        is_shared = len({tuple(prompt[:64]) for prompt in batch["prompts"]}) == 1
        configs = [
            openvino_genai.GenerationConfig(
                max_new_tokens=length,
                ignore_eos=True,
                eos_token_id=NO_TOKEN,
                do_sample=batch["sampled"],
                num_beams=batch["num_beams"],
                num_return_sequences=batch["rows_per_prompt"],
            )
            for length in batch["new_tokens"]
        ]
        # The cache serves requests that are added after a prefix was computed: the first fills it.
        handles = []
        for prompt, config in zip(batch["prompts"], configs):
            ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
            handles.append(pipeline.add_request(len(handles), ids, config))
            while is_shared and not handles[0].can_read():
                pipeline.step()
        while pipeline.has_non_finished_requests():
            pipeline.step()
        count = batch["rows_per_prompt"]
        answers = [handle.read_all() for handle in handles]
        return [list(row.generated_ids) for answer in answers for row in answer[:count]]

    return run, f"{openvino_genai.__version__}, prefix cache, {kv} K/V"


def vllm(directory: Path, threads: int, settings: dict[str, Any]) -> tuple[Run, str]:
    """vLLM's offline `LLM`, compiled by default. Its beams need a tokenizer."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    import vllm as package
    from vllm.sampling_params import BeamSearchParams

    write_tokenizer(directory)
    dtype = settings["dtype"]
    llm = package.LLM(str(directory), dtype=dtype, max_model_len=8192, disable_log_stats=True)

    def run(batch: Batch) -> list[list[int]]:
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        if batch["num_beams"] > 1:
            params = BeamSearchParams(
                beam_width=batch["num_beams"], max_tokens=max(batch["new_tokens"]), ignore_eos=True
            )
            answers = llm.beam_search(prompts, params)
            pairs = zip(batch["prompts"], answers)
            return [list(answer.sequences[0].tokens)[len(prompt) :] for prompt, answer in pairs]
        params = [
            package.SamplingParams(
                n=batch["rows_per_prompt"],
                temperature=1.0 if batch["sampled"] else 0.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
            )
            for length in batch["new_tokens"]
        ]
        answers = llm.generate(prompts, params, use_tqdm=False)
        return [list(row.token_ids) for answer in answers for row in answer.outputs]

    maps = Path("/proc/self/maps").read_text()
    names = {"libtcmalloc": "tcmalloc", "libiomp5": "Intel's OpenMP", "zentorch": "zentorch"}
    told = [f"{'with' if name in maps else 'without'} {title}" for name, title in names.items()]
    return run, ", ".join([package.__version__, *told])


def write_tokenizer(directory: Path) -> None:
    """A tokenizer of one word for each token."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    size = json.loads((directory / "config.json").read_text())["vocab_size"]
    words = Tokenizer(models.WordLevel({f"t{i}": i for i in range(size)}, unk_token="t1"))
    eos = f"t{NO_TOKEN}"
    PreTrainedTokenizerFast(tokenizer_object=words, eos_token=eos).save_pretrained(directory)


def llamacpp(directory: Path, threads: int, settings: dict[str, Any]) -> tuple[Run, str]:
    """llama.cpp's server, built for this processor, on a Llama written as GGUF."""
    from gguf_of_llama import write_gguf

    slots = settings["slots"]
    port = free_port()
    address = f"http://127.0.0.1:{port}"
    command = [Path(sys.prefix) / "bin" / "llama-server", "--model", write_gguf(directory)]
    command += ["--host", "127.0.0.1", "--port", port, "--no-ui"]
    command += ["--parallel", slots, "--ctx-size", slots * settings["slot_tokens"], "--no-warmup"]
    command += ["--cache-type-k", "f16", "--cache-type-v", "f16"]
    command += ["--threads", threads, "--threads-batch", threads]
    server = start(command)
    wait_until_up(server, address)

    def one(prompt: list[int], length: int, seed: int, sampled: bool) -> list[int]:
        asked = {"prompt": prompt, "n_predict": length, "seed": seed, "return_tokens": True}
        asked |= {"ignore_eos": True, "cache_prompt": True}
        asked |= {"temperature": 1.0 if sampled else 0.0, "top_k": 0 if sampled else 1}
        request = urllib.request.Request(f"{address}/completion", json.dumps(asked).encode())
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["tokens"]

    def run(batch: Batch) -> list[list[int]]:
        copies = range(batch["rows_per_prompt"])
        pairs, sampled = zip(batch["prompts"], batch["new_tokens"]), batch["sampled"]
        rows = [(prompt, length, copy, sampled) for prompt, length in pairs for copy in copies]
        with ThreadPoolExecutor(max(1, len(rows))) as pool:
            return list(pool.map(lambda row: one(*row), rows))

    return run, f"built for this processor, {slots} slots, f16 K/V"


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


def wait_until_up(server: subprocess.Popen[Any], address: str) -> None:
    """Returns when the server answers; raises `RuntimeError` if its process ends before."""
    while server.poll() is None:
        with contextlib.suppress(OSError):
            with urllib.request.urlopen(f"{address}/health"):
                return
        time.sleep(0.2)
    raise RuntimeError(f"the server ended with {server.returncode}")


def main() -> None:
    die_with_parent()
    name, directory, threads, *settings = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library output goes to stderr

    def tell(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        load = {"openvino": openvino, "vllm": vllm, "llamacpp": llamacpp}[name]
        run, told = load(Path(directory), int(threads), json.loads(*settings))
    except Exception as error:  # shown in the benchmark's table
        return tell(error=f"{type(error).__name__}: {error}")
    tell(ready=True, settings=told)
    for line in sys.stdin:
        try:
            tell(rows=run(json.loads(line)))
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
