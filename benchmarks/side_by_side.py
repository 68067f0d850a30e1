"""
16 rows of models that cannot be packed: plain `generate` on the padded batch, `cache_implementation="paged"` and
`PagedEngine` on the same prompts, in turns.

    python -m benchmarks.side_by_side [--only REGEX] [--quick] [--json PATH]
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
import transformers
from tqdm import tqdm

import hf_paged
from benchmarks.machine import facts
from benchmarks.paired import interval

_SHARED = dict(
    pad_token_id=0, bos_token_id=1, eos_token_id=None, tie_word_embeddings=True, max_position_embeddings=2048
)
# name: model class, arguments of its config that are no sizes, and the sizes tiny and of about 100 million parameters
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        dict(n_group=1, topk_group=1, num_experts_per_tok=2, first_k_dense_replace=1, n_routed_experts=4),
        dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4)
        | dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32)
        | dict(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, vocab_size=512),
        dict(hidden_size=768, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=10)
        | dict(num_attention_heads=12, num_key_value_heads=12, q_lora_rank=384, kv_lora_rank=256)
        | dict(qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, vocab_size=32000),
    ),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        dict(num_experts=4, num_experts_per_tok=2, full_attention_interval=4, linear_conv_kernel_dim=4),
        dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=32, shared_expert_intermediate_size=32)
        | dict(num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16, vocab_size=512)
        | dict(linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=16, linear_value_head_dim=16),
        dict(hidden_size=768, intermediate_size=2048, moe_intermediate_size=512, shared_expert_intermediate_size=512)
        | dict(num_hidden_layers=8, num_attention_heads=12, num_key_value_heads=4, head_dim=64, vocab_size=32000)
        | dict(linear_num_value_heads=12, linear_num_key_heads=6, linear_key_head_dim=64, linear_value_head_dim=64),
    ),
    "Bamba": (
        "BambaForCausalLM",
        dict(mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2),
        dict(hidden_size=64, intermediate_size=128, num_hidden_layers=4, attn_layer_indices=[2], vocab_size=512)
        | dict(num_attention_heads=4, num_key_value_heads=2, mamba_n_heads=8, mamba_d_head=16, mamba_d_state=16),
        dict(hidden_size=768, intermediate_size=2048, num_hidden_layers=10, attn_layer_indices=[4, 8], vocab_size=32000)
        | dict(num_attention_heads=12, num_key_value_heads=4, mamba_n_heads=24, mamba_d_head=64, mamba_d_state=64),
    ),
    "Bloom": (
        "BloomForCausalLM",
        {},
        dict(hidden_size=64, n_layer=4, n_head=4, vocab_size=512),
        dict(hidden_size=768, n_layer=12, n_head=12, vocab_size=32000),
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        dict(num_local_experts=2, num_experts_per_tok=1, attention_chunk_size=64),
        dict(hidden_size=64, intermediate_size=128, intermediate_size_mlp=128, num_hidden_layers=4, vocab_size=512)
        | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
        dict(hidden_size=768, intermediate_size=1024, intermediate_size_mlp=2048, num_hidden_layers=8, vocab_size=32000)
        | dict(num_attention_heads=12, num_key_value_heads=4, head_dim=64),
    ),
}
ROWS, TURNS = 16, 15


def build(name: str, is_tiny: bool) -> Any:
    """A model of random weights in float32."""
    cls, fixed, tiny, large = SHAPES[name]
    model_class = getattr(transformers, cls)
    config_class = model_class.config_class
    torch.manual_seed(0)
    return model_class(config_class(**_SHARED, **fixed, **(tiny if is_tiny else large))).eval()


def prompts(vocab_size: int) -> list[list[int]]:
    """Of 16 different lengths up to 64 tokens."""
    generator = torch.Generator().manual_seed(0)
    lengths = [4 * (i + 1) for i in range(ROWS)]
    return [torch.randint(3, vocab_size, (length,), generator=generator).tolist() for length in lengths]


def run(name: str, is_tiny: bool, turns: int, new_tokens: int) -> dict[str, Any]:
    """One row of the table."""
    model = build(name, is_tiny)
    texts = prompts(model.config.get_text_config().vocab_size)
    width = max(map(len, texts))
    ids = torch.tensor([[0] * (width - len(text)) + text for text in texts])
    mask = torch.tensor([[0] * (width - len(text)) + [1] * len(text) for text in texts])
    options = dict(max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False)
    engine = hf_paged.PagedEngine(model)
    expected = model.generate(ids, attention_mask=mask, **options)[:, width:].tolist()
    systems: dict[str, Callable[[], list[list[int]]]] = {
        "plain": lambda: model.generate(ids, attention_mask=mask, **options)[:, width:].tolist(),
        "generate": lambda: model.generate(ids, attention_mask=mask, **options, cache_implementation="paged")[
            :, width:
        ].tolist(),
        "engine": lambda: [result.token_ids for result in engine.generate(texts, options)],
    }
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    equal = {system: call() == expected for system, call in systems.items()}  # and warm
    for turn in range(turns):
        for system in list(systems) if turn % 2 else reversed(list(systems)):
            start = time.perf_counter()
            systems[system]()
            seconds[system].append(time.perf_counter() - start)
    row: dict[str, Any] = {
        "model": name,
        "size": "tiny" if is_tiny else "100M",
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "plain_ms": round(1e3 * statistics.median(seconds["plain"]), 1),
    }
    for system in ("generate", "engine"):
        ratios = [ours / plain for ours, plain in zip(seconds[system], seconds["plain"])]
        found = [round(bound, 3) for bound in interval(ratios) or (min(ratios), max(ratios))]
        row[system] = {"ratio": round(statistics.median(ratios), 3), "interval": found, "equal": equal[system]}
    engine.free()
    route = hf_paged.last_route(model)
    row["route"] = "" if route is None else route.reason
    return row


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        "| model | size | plain ms | generate / plain | engine / plain | tokens equal |",
        "|---|---|--:|--:|--:|---|",
    ]
    for row in rows:
        cells = [f"**{row[s]['ratio']}** ({row[s]['interval'][0]} to {row[s]['interval'][1]})" for s in _OURS]
        equal = ", ".join(f"{system} {'yes' if row[system]['equal'] else 'no'}" for system in _OURS)
        lines.append(f"| {row['model']} | {row['size']} | {row['plain_ms']} | {' | '.join(cells)} | {equal} |")
    return "\n".join(lines)


_OURS = ("generate", "engine")


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="regular expression on the model's name and size")
    parser.add_argument("--quick", action="store_true", help="tiny models, few tokens and turns")
    parser.add_argument("--json", help="also write the results here")
    args = parser.parse_args(argv)
    cases = [(name, is_tiny) for is_tiny in ((True,) if args.quick else (True, False)) for name in SHAPES]
    cases = [case for case in cases if re.search(args.only, f"{case[0]} {'tiny' if case[1] else '100M'}")]
    found = facts()
    turns, new_tokens = (2, 4) if args.quick else (TURNS, 32)
    rows = [run(name, is_tiny, turns, new_tokens) for name, is_tiny in tqdm(cases)]
    print(table(rows))
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"machine": found, "rows": rows}, file, indent=1)


if __name__ == "__main__":
    main()
