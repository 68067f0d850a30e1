"""16 rows of models beyond plain decoders: plain `generate` on the padded batch,
`cache_implementation="paged"` and `PagedEngine` on the same prompts, in turns, in two processes,
one after the other.

    python -m benchmarks.side_by_side [--only REGEX] [--quick] [--json PATH]

Two workloads: all rows get 16 new tokens, or between 8 and 256 by row ("stragglers").
"""

from __future__ import annotations

import argparse
import json
import re
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.nn.functional import pad
from tqdm import tqdm
from transformers import StoppingCriteriaList

import hf_paged
from benchmarks.machine import facts
from benchmarks.paired import interval
from benchmarks.systems import StopsAt

_SHARED = dict(
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)
_MROPE = dict(rope_type="default", rope_theta=10000.0)
# name: model class, config arguments other than sizes, and the sizes: tiny and about 100 million
# parameters
SHAPES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        dict(
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_routed_experts=4,
        ),
        dict(hidden_size=64, intermediate_size=128, moe_intermediate_size=32, num_hidden_layers=4)
        | dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=32, kv_lora_rank=32)
        | dict(qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, vocab_size=512),
        dict(
            hidden_size=768, intermediate_size=2048, moe_intermediate_size=512, num_hidden_layers=10
        )
        | dict(num_attention_heads=12, num_key_value_heads=12, q_lora_rank=384, kv_lora_rank=256)
        | dict(qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64, vocab_size=32000),
    ),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        dict(
            num_experts=4,
            num_experts_per_tok=2,
            full_attention_interval=4,
            linear_conv_kernel_dim=4,
        ),
        dict(
            hidden_size=64,
            intermediate_size=128,
            moe_intermediate_size=32,
            shared_expert_intermediate_size=32,
        )
        | dict(
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            vocab_size=512,
        )
        | dict(
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=16,
            linear_value_head_dim=16,
        ),
        dict(
            hidden_size=768,
            intermediate_size=2048,
            moe_intermediate_size=512,
            shared_expert_intermediate_size=512,
        )
        | dict(
            num_hidden_layers=8,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
            vocab_size=32000,
        )
        | dict(
            linear_num_value_heads=12,
            linear_num_key_heads=6,
            linear_key_head_dim=64,
            linear_value_head_dim=64,
        ),
    ),
    "Qwen3.5": (
        "Qwen3_5ForCausalLM",
        dict(linear_conv_kernel_dim=4),
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            vocab_size=512,
        )
        | dict(num_key_value_heads=2, head_dim=16, linear_num_value_heads=4, linear_num_key_heads=2)
        | dict(linear_key_head_dim=16, linear_value_head_dim=16),
        dict(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=10,
            num_attention_heads=12,
            vocab_size=32000,
        )
        | dict(
            num_key_value_heads=4, head_dim=64, linear_num_value_heads=12, linear_num_key_heads=6
        )
        | dict(linear_key_head_dim=64, linear_value_head_dim=64),
    ),
    "NemotronH": (
        "NemotronHForCausalLM",
        dict(n_groups=1, conv_kernel=4, expand=2, chunk_size=64),
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
        )
        | dict(mamba_num_heads=8, mamba_head_dim=16, ssm_state_size=16, vocab_size=512)
        | dict(layers_block_type=["linear_attention", "mlp", "full_attention", "mlp"]),
        dict(
            hidden_size=768,
            intermediate_size=3072,
            num_attention_heads=12,
            num_key_value_heads=4,
            head_dim=64,
        )
        | dict(mamba_num_heads=24, mamba_head_dim=64, ssm_state_size=64, vocab_size=32000)
        | dict(
            layers_block_type=[
                "linear_attention",
                "mlp",
                "linear_attention",
                "mlp",
                "full_attention",
                "mlp",
            ]
            * 2
        ),
    ),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        dict(sliding_window=64),
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            num_attention_heads=4,
            head_dim=16,
        )
        | dict(
            num_key_value_heads=2,
            global_head_dim=32,
            vocab_size=512,
            vocab_size_per_layer_input=512,
        )
        | dict(hidden_size_per_layer_input=16),
        dict(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=10,
            num_attention_heads=12,
            head_dim=64,
        )
        | dict(
            num_key_value_heads=4,
            global_head_dim=128,
            vocab_size=32000,
            vocab_size_per_layer_input=32000,
        )
        | dict(hidden_size_per_layer_input=32),
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        dict(image_token_id=3, video_token_id=4, vision_start_token_id=5, vision_end_token_id=6),
        dict(
            text_config=dict(
                hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4
            )
            | dict(
                num_key_value_heads=2,
                vocab_size=512,
                rope_parameters=_MROPE | dict(mrope_section=[2, 3, 3]),
            ),
            vision_config=dict(
                depth=2, hidden_size=32, num_heads=2, intermediate_size=64, out_hidden_size=64
            )
            | dict(fullatt_block_indexes=[1], window_size=56),
        ),
        dict(
            text_config=dict(
                hidden_size=768,
                intermediate_size=2048,
                num_hidden_layers=10,
                num_attention_heads=12,
            )
            | dict(
                num_key_value_heads=4,
                vocab_size=32000,
                rope_parameters=_MROPE | dict(mrope_section=[8, 12, 12]),
            ),
            vision_config=dict(
                depth=4, hidden_size=256, num_heads=4, intermediate_size=1024, out_hidden_size=768
            )
            | dict(fullatt_block_indexes=[1, 3], window_size=56),
        ),
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        dict(decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None),
        dict(
            d_model=64,
            encoder_layers=2,
            decoder_layers=4,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
        )
        | dict(encoder_ffn_dim=128, decoder_ffn_dim=128, vocab_size=512, max_source_positions=100),
        dict(
            d_model=768,
            encoder_layers=4,
            decoder_layers=6,
            encoder_attention_heads=12,
            decoder_attention_heads=12,
        )
        | dict(
            encoder_ffn_dim=3072, decoder_ffn_dim=3072, vocab_size=32000, max_source_positions=300
        ),
    ),
    "Bamba": (
        "BambaForCausalLM",
        dict(mamba_n_groups=1, mamba_d_conv=4, mamba_expand=2),
        dict(
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=4,
            attn_layer_indices=[2],
            vocab_size=512,
        )
        | dict(
            num_attention_heads=4,
            num_key_value_heads=2,
            mamba_n_heads=8,
            mamba_d_head=16,
            mamba_d_state=16,
        ),
        dict(
            hidden_size=768,
            intermediate_size=2048,
            num_hidden_layers=10,
            attn_layer_indices=[4, 8],
            vocab_size=32000,
        )
        | dict(
            num_attention_heads=12,
            num_key_value_heads=4,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_d_state=64,
        ),
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
        dict(
            hidden_size=64,
            intermediate_size=128,
            intermediate_size_mlp=128,
            num_hidden_layers=4,
            vocab_size=512,
        )
        | dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16),
        dict(
            hidden_size=768,
            intermediate_size=1024,
            intermediate_size_mlp=2048,
            num_hidden_layers=8,
            vocab_size=32000,
        )
        | dict(num_attention_heads=12, num_key_value_heads=4, head_dim=64),
    ),
}
ROWS, TURNS = 16, 8  # turns per process
IMAGE_TOKENS = 4  # of the picture before each prompt, for models that take one
WORKLOADS = {
    "16 new": [16] * ROWS,
    "8..256 new": [8 + round(row * 248 / (ROWS - 1)) for row in range(ROWS)],
}
SYSTEMS = ("plain", "generate", "engine")


def build(name: str, is_tiny: bool) -> Any:
    """A float32 model with random weights."""
    cls, fixed, tiny, large = SHAPES[name]
    model_class = getattr(transformers, cls)
    config_class = model_class.config_class
    torch.manual_seed(0)
    return model_class(config_class(**_SHARED, **fixed, **(tiny if is_tiny else large))).eval()


def prompts(model: Any, turn: int = 0) -> list[dict[str, torch.Tensor]]:
    """16 prompts as a processor returns them, a row each: 16 different lengths up to 64 tokens,
    after a picture if the model takes one; or sound. Each turn has new prompts, so that prefix
    caches miss."""
    config, generator = model.config, torch.Generator().manual_seed(turn)
    if model.main_input_name == "input_features":
        shape = (1, config.num_mel_bins, 2 * config.max_source_positions)
        return [{"input_features": torch.randn(shape, generator=generator)} for _ in range(ROWS)]
    vocab, vision = config.get_text_config().vocab_size, getattr(config, "vision_config", None)
    found = []
    for row in range(ROWS):
        ids = torch.randint(8, vocab - 1, (1, 4 * (row + 1)), generator=generator)
        prompt = {"input_ids": ids}
        if vision is not None:
            picture = (
                [config.vision_start_token_id]
                + [config.image_token_id] * IMAGE_TOKENS
                + [config.vision_end_token_id]
            )
            ids = prompt["input_ids"] = torch.cat([torch.tensor([picture]), ids], dim=1)
            pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            prompt["pixel_values"] = torch.randn(4 * IMAGE_TOKENS, pixels, generator=generator)
            prompt["image_grid_thw"] = torch.tensor([[1, 4, IMAGE_TOKENS]])
            prompt["mm_token_type_ids"] = (ids == config.image_token_id).long()
        prompt["attention_mask"] = torch.ones_like(ids)
        found.append(prompt)
    return found


def batch(rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The prompts as one left-padded batch."""
    width = max(row["input_ids"].shape[1] for row in rows) if "input_ids" in rows[0] else 0

    def wide(name: str, value: torch.Tensor) -> torch.Tensor:
        is_text = name in ("input_ids", "attention_mask", "mm_token_type_ids")
        return pad(value, (width - value.shape[1], 0)) if is_text else value

    return {name: torch.cat([wide(name, row[name]) for row in rows]) for name in rows[0]}


def measure(name: str, is_tiny: bool, workload: str, turns: int, scale: float) -> dict[str, Any]:
    """Measures in this process: seconds of each system per turn, whether its tokens are plain's,
    and the route."""
    model = build(name, is_tiny)
    rows = prompts(model)
    inputs = batch(rows)  # both change in each turn
    lengths = [max(2, round(scale * length)) for length in WORKLOADS[workload]]
    width = inputs["input_ids"].shape[1] if "input_ids" in inputs else 1
    # ends no row, but makes `generate` pad finished rows
    never = model.config.get_text_config().vocab_size - 1
    options: dict[str, Any] = dict(
        max_new_tokens=max(lengths), do_sample=False, eos_token_id=never, suppress_tokens=[never]
    )
    engine = hf_paged.PagedEngine(model)

    def generate(**paged: Any) -> list[list[int]]:
        criteria = StoppingCriteriaList(
            [StopsAt(width, lengths, model.device)] if len(set(lengths)) > 1 else []
        )
        found = model.generate(**inputs, **options, **paged, stopping_criteria=criteria).tolist()
        return [row[-max(lengths) :][:length] for row, length in zip(found, lengths)]

    def serve() -> list[list[int]]:
        names = []
        for row, length in zip(rows, lengths):
            others = {
                key: value
                for key, value in row.items()
                if key not in ("input_ids", "attention_mask")
            }
            ids = row["input_ids"][0].tolist() if "input_ids" in row else None
            names.append(
                engine.add_request(ids, options | {"max_new_tokens": length}, inputs=others or None)
            )
        found = {}
        while len(found) < len(names):
            found.update(
                {output.request_id: output.result for output in engine.step() if output.finished}
            )
        return [found[name].token_ids for name in names]

    systems: dict[str, Callable[[], list[list[int]]]] = {
        "plain": generate,
        "generate": lambda: generate(cache_implementation="paged"),
        "engine": serve,
    }
    expected = generate()
    equal = {"plain": True}
    for system in SYSTEMS[1:]:
        equal[system] = systems[system]() == expected  # also a warm-up
        route = hf_paged.last_route(model)
        equal[f"{system}_road"] = f"{route.road}: {route.reason}" if route else ""
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    for turn in range(turns):
        rows = prompts(model, turn + 1)
        inputs = batch(rows)
        for system in list(systems) if turn % 2 else reversed(list(systems)):
            start = time.perf_counter()
            systems[system]()
            seconds[system].append(time.perf_counter() - start)
    engine.free()
    hf_paged.check_integrity(model)
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"seconds": seconds, "equal": equal, "parameters": parameters}


def run(name: str, is_tiny: bool, workload: str, is_quick: bool) -> dict[str, Any]:
    """One row of the table."""
    found = [measure(name, is_tiny, workload, 1, 0.1)] if is_quick else []
    for _ in range(0 if is_quick else 2):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found.append(process.submit(measure, name, is_tiny, workload, TURNS, 1.0).result())
    seconds = {system: [x for each in found for x in each["seconds"][system]] for system in SYSTEMS}
    row: dict[str, Any] = {
        "model": name,
        "size": "tiny" if is_tiny else "100M",
        "workload": workload,
    }
    row |= {"parameters": found[0]["parameters"], "turns": len(seconds["plain"])}
    row["plain_ms"] = round(1e3 * statistics.median(seconds["plain"]), 1)
    for system in _OURS:
        ratios = [ours / plain for ours, plain in zip(seconds[system], seconds["plain"])]
        bounds = [round(bound, 3) for bound in interval(ratios) or (min(ratios), max(ratios))]
        equal = all(each["equal"][system] for each in found)
        row[system] = {
            "ratio": round(statistics.median(ratios), 3),
            "interval": bounds,
            "equal": equal,
        }
        row[system]["road"] = found[0]["equal"][f"{system}_road"]
    return row


def target(row: dict[str, Any]) -> float:
    """Largest acceptable share of plain's time; met if the interval reaches it."""
    if len(set(WORKLOADS[row["workload"]])) > 1:
        return 0.77  # 1.3 times faster
    return 1.1 if row["size"] == "tiny" else 1.0


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    lines = [
        (
            "| model | size | new tokens | plain ms | generate / plain | engine / plain | target |"
            " tokens equal |"
        ),
        "|---|---|---|--:|--:|--:|---|---|",
    ]
    for row in rows:
        cells = [
            f"**{row[s]['ratio']}** ({row[s]['interval'][0]} to {row[s]['interval'][1]})"
            for s in _OURS
        ]
        equal = ", ".join(f"{system} {'yes' if row[system]['equal'] else 'no'}" for system in _OURS)
        head = (
            f"{row['model']} | {row['size']} | {row['workload'].removesuffix(' new')} |"
            f" {row['plain_ms']}"
        )
        limit = target(row)
        missed = [system for system in _OURS if row[system]["interval"][0] > limit]
        outcome = f"{limit}: {'not met: ' + ', '.join(missed) if missed else 'met'}"
        lines.append(f"| {head} | {' | '.join(cells)} | {outcome} | {equal} |")
    return "\n".join(lines)


_OURS = ("generate", "engine")


def added(runs: list[dict[str, Any]], run: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs plus `run`, whose rows replace older ones; running all of them takes hours."""
    new = {_case(row) for row in run["rows"]}
    kept = [{**old, "rows": [row for row in old["rows"] if _case(row) not in new]} for old in runs]
    return [old for old in kept if old["rows"]] + [run]


def _case(row: dict[str, Any]) -> tuple[str, ...]:
    return row["model"], row["size"], row["workload"]


def main(argv: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--only", default="", help="regular expression on the model's name, size and workload"
    )
    parser.add_argument("--quick", action="store_true", help="tiny models, few tokens and turns")
    parser.add_argument("--json", help="also add the results to those in this file")
    args = parser.parse_args(argv)
    sizes = (True,) if args.quick else (True, False)
    cases = [
        (name, is_tiny, workload) for is_tiny in sizes for workload in WORKLOADS for name in SHAPES
    ]
    cases = [
        case
        for case in cases
        if re.search(args.only, f"{case[0]} {'tiny' if case[1] else '100M'} {case[2]}")
    ]
    found = facts()
    rows = [run(*case, args.quick) for case in tqdm(cases)]
    print(table(rows))
    if args.json:
        path = Path(args.json)
        runs = json.loads(path.read_text())["runs"] if path.exists() else []
        path.write_text(
            json.dumps({"runs": added(runs, {"machine": found, "rows": rows})}, indent=1)
        )


if __name__ == "__main__":
    main()
