"""16 rows of models beyond plain decoders: plain `generate` on the padded batch,
`cache_implementation="paged"` and `PagedEngine` on the same prompts, in turns, in two processes,
one after the other. All rows get 16 new tokens, those of encoder-decoders with 4 beams, too. "tiny"
has 4 layers, "100M" about 100 million parameters, "full" the sizes of the checkpoint that the name
tells. In float32."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from torch.nn.functional import pad

import hf_paged
from benchmarks import runner
from benchmarks.systems import road_of, served

LAYERS, VOCAB = (4, 10), (512, 32000)
"""A tuple is a value of tiny models, and of large ones."""
TEXT = dict(
    hidden_size=(64, 768),
    intermediate_size=(128, 2048),
    num_hidden_layers=LAYERS,
    num_attention_heads=(4, 12),
    num_key_value_heads=(2, 4),
    vocab_size=VOCAB,
)
HEADS = TEXT | dict(head_dim=(16, 64))
LINEAR = dict(
    linear_conv_kernel_dim=4,
    linear_num_value_heads=(4, 12),
    linear_num_key_heads=(2, 6),
    linear_key_head_dim=(16, 64),
    linear_value_head_dim=(16, 64),
)
MAMBA_ATTENTION = ["linear_attention", "mlp"]


def speech(width: int, encoder: Any, decoder: Any, vocab: int, **others: Any) -> dict[str, Any]:
    """What BART's and Whisper's configs have in common: width, layers and vocabulary."""
    found = dict(d_model=(64, width), vocab_size=(512, vocab), decoder_start_token_id=1)
    for side, layers in {"encoder": encoder, "decoder": decoder}.items():
        found |= {f"{side}_layers": layers, f"{side}_attention_heads": (4, width // 64)}
        found |= {f"{side}_ffn_dim": (128, 4 * width)}
    return found | others


WHISPER = dict(suppress_tokens=None, begin_suppress_tokens=None)
# name: model class and config arguments
SHAPES: dict[str, tuple[str, dict[str, Any]]] = {
    "DeepSeek-V3": (
        "DeepseekV3ForCausalLM",
        TEXT
        | dict(
            num_key_value_heads=(4, 12),
            n_group=1,
            topk_group=1,
            num_experts_per_tok=2,
            first_k_dense_replace=1,
            n_routed_experts=4,
            moe_intermediate_size=(32, 512),
            q_lora_rank=(32, 384),
            kv_lora_rank=(32, 256),
            qk_nope_head_dim=(16, 64),
            qk_rope_head_dim=(16, 32),
            v_head_dim=(16, 64),
        ),
    ),
    "Qwen3-Next": (
        "Qwen3NextForCausalLM",
        HEADS
        | LINEAR
        | dict(
            num_hidden_layers=(4, 8),
            num_experts=4,
            num_experts_per_tok=2,
            full_attention_interval=4,
            moe_intermediate_size=(32, 512),
            shared_expert_intermediate_size=(32, 512),
        ),
    ),
    "Qwen3.5": ("Qwen3_5ForCausalLM", HEADS | LINEAR),
    "NemotronH": (
        "NemotronHForCausalLM",
        {key: value for key, value in HEADS.items() if key != "num_hidden_layers"}
        | dict(
            intermediate_size=(128, 3072),
            n_groups=1,
            conv_kernel=4,
            expand=2,
            chunk_size=64,
            mamba_num_heads=(8, 24),
            mamba_head_dim=(16, 64),
            ssm_state_size=(16, 64),
            layers_block_type=(
                [*MAMBA_ATTENTION, "full_attention", "mlp"],
                [*MAMBA_ATTENTION, *MAMBA_ATTENTION, "full_attention", "mlp"] * 2,
            ),
        ),
    ),
    "Gemma 4": (
        "Gemma4ForCausalLM",
        HEADS
        | dict(
            sliding_window=64,
            global_head_dim=(32, 128),
            vocab_size_per_layer_input=VOCAB,
            hidden_size_per_layer_input=(16, 32),
        ),
    ),
    "Qwen2.5-VL": (
        "Qwen2_5_VLForConditionalGeneration",
        dict(
            image_token_id=3,
            video_token_id=4,
            vision_start_token_id=5,
            vision_end_token_id=6,
            text_config=TEXT
            | dict(
                rope_parameters=dict(
                    rope_type="default",
                    rope_theta=10000.0,
                    mrope_section=([2, 3, 3], [8, 12, 12]),
                )
            ),
            vision_config=dict(
                depth=(2, 4),
                hidden_size=(32, 256),
                num_heads=(2, 4),
                intermediate_size=(64, 1024),
                out_hidden_size=(64, 768),
                fullatt_block_indexes=([1], [1, 3]),
                window_size=56,
            ),
        ),
    ),
    "Whisper": (
        "WhisperForConditionalGeneration",
        speech(768, (2, 4), (4, 6), 32000, max_source_positions=(100, 300), **WHISPER),
    ),
    "Bloom": (
        "BloomForCausalLM",
        dict(hidden_size=(64, 768), n_layer=(4, 12), n_head=(4, 12), vocab_size=VOCAB),
    ),
    "Llama 4": (
        "Llama4ForCausalLM",
        HEADS
        | dict(
            num_hidden_layers=(4, 8),
            num_local_experts=2,
            num_experts_per_tok=1,
            attention_chunk_size=64,
            intermediate_size=(128, 1024),
            intermediate_size_mlp=(128, 2048),
        ),
    ),
    "T5-small": (
        "T5ForConditionalGeneration",
        dict(
            decoder_start_token_id=0,
            d_model=(64, 512),
            d_kv=(16, 64),
            d_ff=(128, 2048),
            num_layers=(4, 6),
            num_heads=(4, 8),
            vocab_size=(512, 32128),
        ),
    ),
    "BART-base": (
        "BartForConditionalGeneration",
        speech(768, (4, 6), (4, 6), 50265, forced_eos_token_id=None),
    ),
    "Whisper-tiny": (
        "WhisperForConditionalGeneration",
        speech(384, (2, 4), 4, 51865, max_source_positions=(100, 1500), **WHISPER),
    ),
}
FULL = ("T5-small", "BART-base", "Whisper-tiny")
"""Shapes whose large size is that of the checkpoint."""
COMMON = dict(
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=None,
    tie_word_embeddings=True,
    max_position_embeddings=2048,
)
ROWS = 16
IMAGE_TOKENS = 4  # of the picture before each prompt, for models that take one
WORKLOADS: dict[str, dict[str, Any]] = {"16 new": {}, "16 new, 4 beams": {"num_beams": 4}}
"""Options of `generate`."""


def sized(value: Any, is_tiny: bool) -> Any:
    """Config arguments of a size."""
    if isinstance(value, tuple):
        return value[0 if is_tiny else 1]
    if isinstance(value, dict):
        return {key: sized(each, is_tiny) for key, each in value.items()}
    return value


def build(name: str, is_tiny: bool) -> Any:
    """A float32 model with random weights."""
    cls, arguments = SHAPES[name]
    model_class = getattr(transformers, cls)
    config_class = model_class.config_class
    torch.manual_seed(0)
    return model_class(config_class(**COMMON, **sized(arguments, is_tiny))).eval()


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
            picture = [config.image_token_id] * IMAGE_TOKENS
            picture = [config.vision_start_token_id, *picture, config.vision_end_token_id]
            ids = prompt["input_ids"] = torch.cat([torch.tensor([picture]), ids], dim=1)
            pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            prompt["pixel_values"] = torch.randn(4 * IMAGE_TOKENS, pixels, generator=generator)
            prompt["image_grid_thw"] = torch.tensor([[1, 4, IMAGE_TOKENS]])
            prompt["mm_token_type_ids"] = (ids == config.image_token_id).long()
        prompt["attention_mask"] = torch.ones_like(ids)
        found.append(prompt)
    return found


def batch(model: Any, rows: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """The prompts as one batch, padded at the side where the model's tokenizer does."""
    width = max(row["input_ids"].shape[1] for row in rows) if "input_ids" in rows[0] else 0

    def wide(name: str, value: torch.Tensor) -> torch.Tensor:
        is_text = name in ("input_ids", "attention_mask", "mm_token_type_ids")
        missing = width - value.shape[1] if is_text else 0
        return pad(value, (0, missing) if model.config.is_encoder_decoder else (missing, 0))

    return {name: torch.cat([wide(name, row[name]) for row in rows]) for name in rows[0]}


def size_of(name: str, is_tiny: bool) -> str:
    return "tiny" if is_tiny else "full" if name in FULL else "100M"


def case_of(
    args: argparse.Namespace, name: str, is_tiny: bool, workload: str
) -> Iterator[runner.Case]:
    """Plain `generate`, the paged one and the engine on one model and one workload."""
    model = build(name, is_tiny)
    rows = prompts(model)
    inputs = batch(model, rows)  # both change in each turn, so that prefix caches miss
    never = model.config.get_text_config().vocab_size - 1  # ends no row
    options: dict[str, Any] = dict(
        max_new_tokens=args.new_tokens,
        do_sample=False,
        eos_token_id=never,
        suppress_tokens=[never],
        **WORKLOADS[workload],
    )
    engine = hf_paged.PagedEngine(model)

    def generate(**paged: Any) -> list[list[int]]:
        return model.generate(**inputs, **options, **paged)[:, -args.new_tokens :].tolist()

    def serve() -> list[list[int]]:
        return [result.token_ids for result in served(engine, rows, options)[1]]

    systems: dict[str, Callable[[], list[list[int]]]] = {
        "plain": generate,
        "generate": lambda: generate(cache_implementation="paged"),
        "engine": serve,
    }

    def timed(turn: int, system: str) -> runner.Turn:
        nonlocal rows, inputs
        rows = prompts(model, turn + 1)
        inputs = batch(model, rows)
        seconds, tokens = runner.clocked(systems[system])
        return runner.Turn(seconds, tokens, {"route": road_of(model)})

    size, target = size_of(name, is_tiny), 1 / 1.1 if is_tiny else 1.0
    over = {"plain": dict.fromkeys(("generate", "engine"), target)}
    yield runner.Case(f"{name}, {size}, {workload}", runner.each(timed, list(systems)), over)
    engine.free()
    hf_paged.check_integrity(model)


def cases(args: argparse.Namespace) -> Iterator[runner.Case]:
    for is_tiny in args.sizes:
        for workload in WORKLOADS:
            for name, (cls, _) in SHAPES.items():
                has_beams = cls.endswith("ForConditionalGeneration") and name != "Qwen2.5-VL"
                if workload.endswith("beams") and not has_beams:
                    continue
                if re.search(args.only, f"{name} {size_of(name, is_tiny)} {workload}"):
                    yield from case_of(args, name, is_tiny, workload)


BENCHMARK = runner.Benchmark(
    __doc__,
    cases,
    title="Beyond plain decoders",
    results=(("side_by_side-cpu",), ("side_by_side-encoders-cpu",)),
    only="regular expression on the model's name, size and workload",
    options={"--processes": runner.option("one after the other", type=int, default=2)},
    turns=8,
    fixed={"sizes": (True, False), "new_tokens": 16},
    quick={"sizes": (True,), "turns": 1, "processes": 0, "new_tokens": 2},
)

if __name__ == "__main__":
    raise SystemExit(BENCHMARK.main())
