"""An engine in a separate process and environment: `python worker.py NAME DIRECTORY THREADS
[int8]`. Reads a batch as one line of JSON and answers with one line: `rows`, the new tokens of each
row, or `error`. Imports nothing of this project."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Batch = dict[str, Any]  # prompts, new_tokens (of each prompt), rows_per_prompt, sampled
Run = Callable[[Batch], list[list[int]]]
NO_TOKEN = 1  # stop token for engines that require one; they are told to ignore it


def openvino(directory: Path, threads: int, int8: bool) -> Run:
    """OpenVINO GenAI's continuous batching with default settings, on a model converted by
    optimum-intel."""
    import numpy as np
    import openvino
    import openvino_genai
    from optimum.intel import OVModelForCausalLM

    converted = directory / "openvino"
    OVModelForCausalLM.from_pretrained(directory, export=True, load_in_8bit=int8).save_pretrained(
        converted
    )
    scheduler = openvino_genai.SchedulerConfig()
    options = {"INFERENCE_NUM_THREADS": threads}
    pipeline = openvino_genai.ContinuousBatchingPipeline(str(converted), scheduler, "CPU", options)

    def run(batch: Batch) -> list[list[int]]:
        configs = [
            openvino_genai.GenerationConfig(
                max_new_tokens=length,
                ignore_eos=True,
                eos_token_id=NO_TOKEN,
                do_sample=batch["sampled"],
                num_return_sequences=batch["rows_per_prompt"],
            )
            for length in batch["new_tokens"]
        ]
        ids = [np.array([prompt], dtype=np.int64) for prompt in batch["prompts"]]
        answers = pipeline.generate(list(map(openvino.Tensor, ids)), configs)
        return [list(row) for answer in answers for row in answer.m_generation_ids]

    return run


def vllm(directory: Path, threads: int, int8: bool) -> Run:
    """vLLM's offline `LLM` without a tokenizer, compiled by default."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")  # GiB
    from vllm import LLM, SamplingParams

    llm = LLM(
        str(directory),
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=4096,
        disable_log_stats=True,
    )

    def run(batch: Batch) -> list[list[int]]:
        params = [
            SamplingParams(
                n=batch["rows_per_prompt"],
                temperature=1.0 if batch["sampled"] else 0.0,
                max_tokens=length,
                ignore_eos=True,
                detokenize=False,
            )
            for length in batch["new_tokens"]
        ]
        prompts = [{"prompt_token_ids": prompt} for prompt in batch["prompts"]]
        answers = llm.generate(prompts, params, use_tqdm=False)
        return [list(row.token_ids) for answer in answers for row in answer.outputs]

    return run


def llamacpp(directory: Path, threads: int, int8: bool) -> Run:
    """llama.cpp's server with 32 slots, built by xllamacpp, on a Llama written as GGUF in
    bfloat16."""
    import re
    from concurrent.futures import ThreadPoolExecutor

    import xllamacpp

    params = xllamacpp.CommonParams()
    params.model.path = str(_write_gguf(directory))
    params.n_parallel, params.n_ctx, params.warmup = 32, 32 * 1024, False
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(params)

    def one(prompt: list[int], length: int, seed: int, sampled: bool) -> list[int]:
        asked = {"prompt": prompt, "max_tokens": length, "seed": seed}
        asked |= {"ignore_eos": True, "cache_prompt": True}
        asked |= {"temperature": 1.0 if sampled else 0.0, "top_k": 0 if sampled else 1}
        answer = server.handle_completions(asked)
        return [int(number) for number in re.findall(r"t(\d+)", answer["choices"][0]["text"])]

    def run(batch: Batch) -> list[list[int]]:
        copies = range(batch["rows_per_prompt"])
        pairs, sampled = zip(batch["prompts"], batch["new_tokens"]), batch["sampled"]
        rows = [(prompt, length, copy, sampled) for prompt, length in pairs for copy in copies]
        with ThreadPoolExecutor(max(1, len(rows))) as pool:
            return list(pool.map(lambda row: one(*row), rows))

    return run


def _write_gguf(directory: Path) -> Path:
    """Writes a Llama's weights and shape: queries and keys in llama.cpp's rotary order, and tokens
    whose text is their number."""
    import gguf
    import numpy as np

    config = json.loads((directory / "config.json").read_text())
    if config["model_type"] != "llama":
        raise ValueError(f"no GGUF is written of {config['model_type']}")
    path = directory / "model.gguf"
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_rope_freq_base(rope.get("rope_theta", config.get("rope_theta", 10000.0)))
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    count = config["vocab_size"]
    writer.add_tokenizer_model("llama")  # a server without a vocabulary refuses requests
    writer.add_token_list([f"t{number}" for number in range(count)])
    writer.add_token_types([gguf.TokenType.NORMAL] * count)
    writer.add_token_scores([0.0] * count)
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_BF16)
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names["self_attn.o_proj"] = "attn_output"
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in _bfloat16_tensors(directory / "model.safetensors"):
        stem = name.removesuffix(".weight")
        if stem in whole:
            new = whole[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            new = f"blk.{layer}.{names[part]}"
        if part_heads := {"attn_q": heads, "attn_k": kv_heads}.get(new.rpartition(".")[2]):
            halves = tensor.reshape(part_heads, 2, head_dim // 2, -1)
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if tensor.ndim == 1:
            writer.add_tensor(f"{new}.weight", (tensor.astype(np.uint32) << 16).view(np.float32))
        else:
            data = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(f"{new}.weight", data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _bfloat16_tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Names and bits (`uint16`) of the tensors in a safetensors file, whose JSON header follows its
    length."""
    import numpy as np

    content = np.memmap(path, np.uint8, "r")
    start = 8 + int(content[:8].view(np.uint64)[0])
    for name, told in json.loads(content[8:start].tobytes()).items():
        if name != "__metadata__":
            if told["dtype"] != "BF16":
                raise ValueError(f"{name} is {told['dtype']}")
            low, high = told["data_offsets"]
            bits = content[start + low : start + high].copy().view(np.uint16)
            yield name, bits.reshape(told["shape"])


def main() -> None:
    name, directory, threads, *kind = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # library output goes to stderr

    def tell(**answer: Any) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    try:
        start = {"openvino": openvino, "vllm": vllm, "llamacpp": llamacpp}[name]
        run = start(Path(directory), int(threads), kind == ["int8"])
    except Exception as error:  # shown in the benchmark's table
        return tell(error=f"{type(error).__name__}: {error}")
    tell(ready=True)
    for line in sys.stdin:
        try:
            tell(rows=run(json.loads(line)))
        except Exception as error:
            tell(error=f"{type(error).__name__}: {error}")


if __name__ == "__main__":
    main()
