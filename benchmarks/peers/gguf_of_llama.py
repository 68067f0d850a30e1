"""Writes a Llama as GGUF, for llama.cpp."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def write_gguf(directory: Path) -> Path:
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
    names = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
    names |= {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
    names |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("gate", "up", "down")}
    names["self_attn.o_proj"] = "attn_output"
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    for name, tensor in _tensors(directory / "model.safetensors"):
        stem = name.removesuffix(".weight")
        if stem in whole:
            new = whole[stem]
        else:
            _, _, layer, part = stem.split(".", 3)
            new = f"blk.{layer}.{names[part]}"
        if part_heads := {"attn_q": heads, "attn_k": kv_heads}.get(new.rpartition(".")[2]):
            halves = tensor.reshape(part_heads, 2, head_dim // 2, -1)
            tensor = halves.swapaxes(1, 2).reshape(tensor.shape)
        if tensor.dtype == np.float32:
            writer.add_tensor(f"{new}.weight", np.ascontiguousarray(tensor))
        elif tensor.ndim == 1:
            writer.add_tensor(f"{new}.weight", (tensor.astype(np.uint32) << 16).view(np.float32))
        else:
            data = np.ascontiguousarray(tensor).view(np.uint8)
            writer.add_tensor(f"{new}.weight", data, raw_dtype=gguf.GGMLQuantizationType.BF16)
    kinds = gguf.LlamaFileType
    writer.add_file_type(kinds.ALL_F32 if tensor.dtype == np.float32 else kinds.MOSTLY_BF16)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _tensors(path: Path) -> Iterator[tuple[str, Any]]:
    """Names and numbers (`float32`, or the bits of bfloat16 as `uint16`) of the tensors in a
    safetensors file, whose JSON header follows its length."""
    import numpy as np

    types = {"F32": np.float32, "BF16": np.uint16}
    content = np.memmap(path, np.uint8, "r")
    start = 8 + int(content[:8].view(np.uint64)[0])
    for name, told in json.loads(content[8:start].tobytes()).items():
        if name != "__metadata__":
            if told["dtype"] not in types:
                raise ValueError(f"{name} is {told['dtype']}")
            low, high = told["data_offsets"]
            numbers = content[start + low : start + high].copy().view(types[told["dtype"]])
            yield name, numbers.reshape(told["shape"])
