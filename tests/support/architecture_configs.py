"""Tiny random models of every generative architecture in transformers: sizes, per-model corrections
and weights.

The rule is generic: take `config_class()`, replace each attribute with a known name by a small
value, keep the rest. `FIXUPS` holds exceptions to that rule, by config class.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 160
PAD, BOS, EOS = 0, 1, 2
MAX_LAYERS = 6
HEAD_DIM = 8

# Small values, and the attributes that get them if the config class has an integer default.
SIZES = """
500: encoder_hash_byte_group_vocab
128: max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions
    max_encoder_position_embeddings max_text_positions max_decoder_position_embeddings
    original_max_position_embeddings
64: max_source_positions
48: intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff dim_ff dff d_inner
    ffn_hidden_size n_inner dense_intermediate_size intermediate_size_mlp
32: hidden_size d_model n_embd embedding_size emb_dim dim embed_dim word_embed_proj_dim
    embedding_dim lru_width backbone_hidden_size width input_embedding_size output_embedding_size
    attention_hidden_size output_dim out_hidden_size text_hidden_size projection_dim adapter_in_dim
    adapter_out_dim projector_hidden_dim vision_output_dim qformer_hidden_size adapter_input_size
    cross_hidden_size decoder_hidden_size post_conv_out_channels encoder_hidden_size image_size
24: moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
    shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size
    mlp_hidden_size speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim
    feed_forward_size
16: qk_head_dim q_lora_rank kv_lora_rank o_lora_rank num_mel_bins conv_channels codebook_dim
    projector_hidden_size patch_size
8: head_dim d_kv d_head dim_head swa_head_dim attention_head_size kv_channels global_head_dim
    cross_head_dim attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim
    linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim mamba_d_state
    state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads
    mamba_num_heads chunk_size mamba_chunk_size laurel_rank adapter_rank mamba_dt_rank
    time_step_rank router_hidden_size gated_norm_rank prompt_mid_dim hidden_size_per_layer_input
    d_rel sliding_window sliding_window_size attention_window_size window_size
    attention_chunk_size keep_window_size local_attention
4: num_attention_heads n_head num_heads n_heads attention_heads num_query_heads
    decoder_attention_heads encoder_attention_heads swa_num_attention_heads
    num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads
    decoder_num_attention_heads cross_num_attention_heads speech_encoder_attention_heads
    t2u_encoder_attention_heads t2u_decoder_attention_heads linear_num_value_heads linear_num_heads
    num_experts n_routed_experts num_local_experts moe_num_experts index_topk index_topk_blocks
    num_query_tokens vision_soft_tokens_per_image audio_soft_tokens_per_image latent_query_num
2: num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups
    encoder_num_key_value_heads decoder_num_key_value_heads n_head_kv num_global_key_value_heads
    cross_num_key_value_heads index_n_heads linear_num_key_heads num_hidden_layers n_layer n_layers
    num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers depth
    speech_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_blocks
    t2u_encoder_layers t2u_decoder_layers num_layers_per_stack num_experts_per_tok
    num_experts_per_token moe_topk moe_k top_k_experts
1: n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
    num_nextn_predict_layers first_k_dense_replace num_dense_layers zero_expert_num n_groups
    mamba_n_groups mamba_ngroups n_mamba_heads num_mem_blocks
"""
SMALL: dict[str, int] = {
    name: int(size)
    for size, names in re.findall(r"^(\d+): ([^:]+)$", SIZES, re.MULTILINE)
    for name in names.split()
}
# Also set if their default is None.
SET_WHEN_NONE = {"sliding_window", "num_key_value_heads", "attention_chunk_size"}

LINEAR_AND_FULL = ["linear_attention", "full_attention"] * 2
SLIDING_AND_FULL = ["sliding_attention", "full_attention"] * 2
ZAMBA_LAYERS = ["linear_attention", "hybrid"] * 2 + ["linear_attention"]
TINY = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4)
MLA_HEADS = dict(
    **dict(num_attention_heads=4, num_key_value_heads=4, q_lora_rank=16, kv_lora_rank=16),
    **dict(head_dim=16, qk_nope_head_dim=8, qk_rope_head_dim=8, v_head_dim=8),
)
ROPE = {"rope_type": "default", "rope_theta": 1e4}
MROPE = {**ROPE, "mrope_section": [2, 1, 1]}
INDEXER = dict(indexer_n_heads=2, indexer_kv_heads=1, indexer_head_dim=8, indexer_budget=8)
VQVAE = dict(base_channels=32, channel_multiplier=[1, 1], num_res_blocks=1, hidden_size=32)
PINPOINTS = [[32, 64], [64, 32]]
CROSS = {"decoder": {"is_decoder": True, "add_cross_attention": True}}
PARAKEET = dict(
    **dict(model_type="parakeet_encoder", **TINY, intermediate_size=48, num_mel_bins=16),
    **dict(subsampling_conv_channels=8, projection_hidden_size=32, projection_bias=False),
)

FIXUPS: dict[str, dict[str, Any]] = {}
"""By config class name; "__default__" leaves the attribute to the class."""


def fix(classes: str, **values: Any) -> None:
    """Sets attributes of the configs of these classes, which are named without "Config"."""
    for name in classes.split():
        FIXUPS[f"{name}Config"] = values


# attention: kinds of layers, heads, rope
fix("Bamba", attn_layer_indices=[1], num_hidden_layers=3)
fix(
    "CohereCompassText",
    num_hidden_layers=4,
    layer_types=SLIDING_AND_FULL,
    rope_parameters={kind: dict(ROPE) for kind in SLIDING_AND_FULL[:2]},
)
fix("DbrxAttention", kv_n_heads=2, rope_theta=10000.0, clip_qkv=8.0)
fix(
    "Dots3NoteText",
    head_dim=16,
    num_hidden_layers=4,
    mlp_layer_types=["dense"] + ["sparse"] * 3,
    layer_types=["indexed_attention", "sliding_attention"] * 2,
    per_layer_config={i: {**MLA_HEADS, "sliding_window": 8} for i in (1, 3)},
)
fix("Dots3NoteVision", mlp_layer_types=["dense", "dense"], head_dim=8)
fix("FalconH1", mamba_d_ssm=64)
fix(
    "Gemma3nText",
    **dict(num_hidden_layers=4, layer_types=SLIDING_AND_FULL, num_kv_shared_layers=2),
    **dict(intermediate_size=[48] * 4, activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0]),
)
fix(
    "Gemma4Text Gemma4UnifiedText DiffusionGemmaText",
    num_hidden_layers=4,
    layer_types=SLIDING_AND_FULL,
    global_head_dim=16,
)
fix("Glm5NextText", index_topk=8, index_kpool=4)
fix("GraniteMoeHybrid", num_hidden_layers=4, layer_types=LINEAR_AND_FULL)
fix("HrmText", num_layers_per_stack="__default__")
fix("HunYuanDenseV1 HunYuanMoEV1 Ministral", head_dim=8)
fix("Jamba", num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1)
fix("LED", attention_window=8)
fix("Lfm2 Lfm2Moe", num_hidden_layers=3, layer_types=["conv", "full_attention", "conv"])
fix("Mamba2", num_heads=8)
fix("Mistral4", head_dim="__default__")
fix("MllamaText", num_hidden_layers=3, cross_attention_layers=[1])
fix("Moonshine", encoder_num_key_value_heads=4, decoder_num_key_value_heads=4)
fix("MoonshineStreaming MoonshineStreamingEncoder", num_key_value_heads=4)
fix("Nemotron3DiarizationAudio Nemotron3_5TranscribeAsrAudio", num_key_value_heads=4)
fix("Nemotron3_5TranscribeWordTimestamp", num_key_value_heads=4)
fix(
    "Glm4vText GlmOcrText HunYuanVLText PaddleOCRText Qwen2VLText Qwen2_5_VLText Qwen2_5OmniText",
    head_dim=8,
    rope_parameters=MROPE,
)
fix("Ernie4_5_VLMoeText", head_dim=8, rope_parameters={**MROPE, "mrope_section": [1, 1, 2]})
fix("Glm4vMoeText", head_dim=16, rope_parameters={**MROPE, "partial_rotary_factor": 0.5})
fix("Qwen4ExpText", indexer_compress_ratio=2, **INDEXER)
fix("RecurrentGemma", num_hidden_layers=3)
fix("Reformer", is_decoder=True, axial_pos_embds_dim=[16, 16], axial_pos_shape=[8, 16])
fix("xLSTM", hidden_size=128, embedding_dim=128)
fix(
    "Zamba",
    **dict(num_hidden_layers=5, layers_block_type=ZAMBA_LAYERS, num_key_value_heads=4),
    **dict(attention_hidden_size=64, attention_head_dim=16),
)
fix(
    "Zamba2",
    **dict(num_hidden_layers=5, layers_block_type=ZAMBA_LAYERS, num_key_value_heads=4),
    **dict(attention_hidden_size="__default__", attention_head_dim="__default__"),
    **dict(num_query_groups="__default__", n_mamba_heads=8),
)

# experts
fix("DbrxFFN", moe_top_k=2)
fix(
    "DeepseekOcr2Text",
    mlp_layer_types=["dense", "sparse"],
    num_experts_per_tok=2,
    n_group=1,
    topk_group=1,
)
fix("DeepseekV2", num_experts_per_tok=2, n_group=1, topk_group=1, first_k_dense_replace=1)
fix(
    "Dots1",
    **dict(n_routed_experts=4, num_experts_per_tok=2, n_shared_experts=1),
    **dict(first_k_dense_replace=1, max_window_layers=1, layer_types=SLIDING_AND_FULL[:2]),
)
fix("Qwen3OmniMoeTalkerText", shared_expert_intermediate_size=24)

# images: tokens, sizes, deep features
fix("Aria", projector_patch_to_query_dict={4: 3})
fix("Blip2 InstructBlip", image_token_index=155)
fix("InstructBlipVideo", video_token_index=155)
fix(
    "Chameleon",
    vocabulary_map={
        "<image>": 159,
        **{f"IMGIMG{'ABCDEFGH'[i // 10]}{'ABCDEFGHIJ'[i % 10]}Z": 112 + i for i in range(32)},
    },
)
fix("ChameleonVQVAE", **VQVAE, num_embeddings=32, latent_channels=32, resolution=16)
fix("CohereCompassVision Qwen3VLVision Qwen3VLMoeVision", deepstack_visual_indexes=[0, 1])
fix("Qwen3OmniMoeVisionEncoder", deepstack_visual_indexes=[0, 1])
fix("DeepseekOcr2SamVision", downsample_channels=[32, 32], output_channels=32)
fix("UnlimitedOcrSamVision", downsample_channels=[32, 32], output_channels=32, image_size=128)
fix(
    "Emu3",
    vocabulary_map={
        **{"<image>": 159, "<|extra_200|>": 158},
        **{f"<|visual token {i:06}|>": 112 + i for i in range(32)},
    },
)
fix("Emu3VQVAE", **VQVAE, codebook_size=32)
fix("Exaone4_5_Vision Qwen2_5_VLVision Qwen2_5OmniVisionEncoder", window_size=56)
fix(
    "Florence2Vision",
    depths=[1] * 4,
    embed_dim=[8, 16, 16, 32],
    num_heads=[2] * 4,
    num_groups=[2] * 4,
)
fix("Gemma3", mm_tokens_per_image=4)
fix("T5Gemma2Encoder", mm_tokens_per_image=4, eoi_token_index=157)
fix(
    "Gemma4",
    vision_config=dict(
        **dict(model_type="gemma4_vision", **TINY, intermediate_size=48, head_dim=8),
        **dict(num_key_value_heads=4, pooling_kernel_size=2, position_embedding_size=16),
    ),
    audio_config=dict(
        **dict(model_type="gemma4_audio", **TINY, subsampling_conv_channels=[16, 8]),
        **dict(output_proj_dims=32, num_mel_bins=16),
    ),
)
fix(
    "Gemma4Unified",
    vision_config=dict(
        **dict(model_type="gemma4_unified_vision", patch_size=8, pooling_kernel_size=2),
        **dict(mm_embed_dim=32, mm_posemb_size=16, output_proj_dims=32),
    ),
    audio_config=dict(model_type="gemma4_unified_audio", audio_embed_dim=32),
)
fix("GotOcr2Vision", image_size=128)
fix("GraniteDoclingVision", image_size=128, deepstack_visual_indexes=[0, 1])
fix(
    "Granite4Vision",
    **dict(deepstack_layer_map=[(0, 0), (1, 1)], spatial_target_layers=[0, 1, 0, 1]),
    **dict(downsample_rate="1/2", vision_config={"hidden_size": 64}),
    image_grid_pinpoints=PINPOINTS,
)
fix("InternVLVision QianfanOCRVision Molmo2Vision", image_size=[56, 56])
fix("JanusVQVAE", **VQVAE, num_embeddings=32, image_token_embed_dim=32, latent_channels=32)
fix("Kimi_K25", projection_hidden_size=32)
fix("Llama4Vision", intermediate_size=128, projector_input_dim=32, projector_output_dim=32)
fix("LlavaNext LlavaNextVideo LlavaOnevision", image_grid_pinpoints=PINPOINTS)
fix("MiniCPMOcr MiniCPMV4_6 MiniCPMV4_7", image_token_id=159, video_token_id=158)
fix("MllamaVision", intermediate_layers_indices=[0, 1], vision_output_dim=96, num_global_layers=1)
fix("Molmo2", image_patch_id=150)
fix("Molmo2Adapter", vision_feature_layer=[-1, -2])
fix("MuseGlimmer MuseSpark", out_hidden_size=128)
fix(
    "NemotronH_Omni_Reasoning_V3_",
    **dict(vision_config={"video_temporal_patch_size": 2}, vision_hidden_size=32),
    **dict(projector_hidden_size=32, audio_config=PARAKEET),
    **dict(image_token_id=159, video_token_id=158, audio_token_id=157),
)
fix("Phi4MultimodalVision", image_size=56, crop_size=56)
fix("Pix2StructText", hidden_size=32)
fix("Qwen2_5OmniThinker Qwen3OmniMoeThinker", vision_start_token_id=150)
fix("SamVision", global_attn_indexes=[0, 1])
fix("Step3p7Vision", image_size=112)
fix("VipLlava", vision_feature_layer=[-2, -1])
fix("VisionEncoderDecoder SpeechEncoderDecoder", **CROSS)

# sound
fix("FunAsrNanoAdaptor", intermediate_size=8)
fix(
    "GraniteSpeechEncoder GraniteSpeechPlusEncoder",
    hidden_dim=32,
    output_dim=42,
)
fix("GraniteSpeech GraniteSpeechPlus", downsample_rate=8)
fix("Mimi", upsample_groups=32, codebook_size=32, vector_quantization_hidden_dimension=16)
fix("Nemotron3DiarizationHead", audio_hidden_size=32)
fix(
    "Phi4MultimodalAudio",
    **dict(audio_token_id=158, nemo_conv_channels=16, ext_pw_out_channel=32),
    depthwise_separable_out_channel=32,
)
fix("Pop2Piano", composer_vocab_size=1)
fix("Qwen3OmniMoe", enable_audio_output=False)
fix("VibeVoiceAcousticTokenizerEncoder", num_filters=2, depths=[1] * 7)
fix("VibeVoiceSemanticTokenizerEncoder", num_filters=2, depths=[1] * 7)
fix("Voxtral", audio_token_id=159)
fix("VoxtralEncoder GlmAsrEncoder", intermediate_size=128)
fix("Whisper", begin_suppress_tokens=[], suppress_tokens=[])


def tiny_config(config_class: type[PretrainedConfig], **overrides: Any) -> PretrainedConfig:
    """A config of `config_class` whose model has a few thousand parameters."""
    return config_class(**{**tiny_arguments(config_class), **overrides})


def tiny_arguments(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Keyword arguments for `config_class` that make known attributes small, nested configs
    included."""
    fixup = FIXUPS.get(config_class.__name__, {})
    default = config_class()
    arguments = {**_small_numbers(default), **_per_layer_lists(default), **_token_ids(default)}
    if getattr(default, "use_cache", None) is False:
        arguments["use_cache"] = True
    if "kv_lora_rank" in arguments:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    if sections := _mrope_sections(default, arguments.get("head_dim", HEAD_DIM)):
        arguments["rope_parameters"] = sections
    for name in getattr(config_class, "sub_configs", {}) or {}:
        nested = getattr(default, name, None)
        if isinstance(nested, PretrainedConfig):
            arguments[name] = {**tiny_arguments(type(nested)), "model_type": nested.model_type}
    for name, value in fixup.items():
        nested = isinstance(value, dict) and isinstance(arguments.get(name), dict)
        arguments[name] = {**arguments[name], **value} if nested else value
    return {name: value for name, value in arguments.items() if value != "__default__"}


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    names = (
        {field.name for field in dataclasses.fields(config)}
        if dataclasses.is_dataclass(config)
        else set()
    )
    attribute_map = getattr(config, "attribute_map", {}) or {}
    names |= {name for name in vars(config) if not name.startswith("_")}
    # A heterogeneous config refuses to read an attribute that varies by layer: `FIXUPS` sets those.
    return {name: vars(config).get(name) for name in names if name not in attribute_map}


def _small_numbers(config: PretrainedConfig) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in _fields(config).items():
        if name.endswith("vocab_size"):
            found[name] = min(value, VOCAB_SIZE) if isinstance(value, int) else None
        elif name not in SMALL or isinstance(value, bool):
            continue
        elif isinstance(value, int) and value > 0:
            found[name] = min(value, SMALL[name])
        elif value is None and name in SET_WHEN_NONE:
            found[name] = SMALL[name]
    return {name: value for name, value in found.items() if value is not None}


def _per_layer_lists(config: PretrainedConfig) -> dict[str, Any]:
    """Lists with one entry per layer, cut to the fewest layers in which every distinct entry
    occurs."""
    count = getattr(config, "num_hidden_layers", None)
    fields = _fields(config)
    if not isinstance(count, int) or count < 2:
        return {}
    lists = {
        name: value
        for name, value in fields.items()
        if isinstance(value, (list, tuple)) and len(value) == count
    }
    if not lists:
        return {}
    chosen: list[int] = []
    seen: set[tuple[str, str]] = set()
    for index in range(count):
        new = {(name, str(values[index])) for name, values in lists.items()} - seen
        if new and len(chosen) < MAX_LAYERS:
            seen |= new
            chosen.append(index)
    if len(chosen) < 2:
        chosen = sorted({*chosen, count - 1})
    layers_name = next(
        (n for n in ("num_hidden_layers", "n_layer", "n_layers", "num_layers") if n in fields), None
    )
    if layers_name is None:
        return {}
    return {
        layers_name: len(chosen),
        **{name: [values[i] for i in chosen] for name, values in lists.items()},
    }


def _mrope_sections(config: PretrainedConfig, head_dim: int) -> dict[str, Any] | None:
    """Rope parameters with multimodal sections cut to the small head; None without sections."""
    rope = getattr(config, "rope_parameters", None)
    if not isinstance(rope, dict) or "mrope_section" not in rope:
        return None
    half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
    rest = half // 3
    return {**rope, "mrope_section": [half - 2 * rest, rest, rest]}


def _token_ids(config: PretrainedConfig) -> dict[str, Any]:
    """Special tokens inside the small vocabulary; placeholders of other modalities are at its end,
    outside of prompts."""
    found: dict[str, Any] = {}
    placeholder = VOCAB_SIZE - 1
    fixed = {
        "pad_token_id": PAD,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
        "decoder_start_token_id": BOS,
    }
    for name, value in sorted(_fields(config).items()):
        if name in fixed:
            if value is not None or name == "pad_token_id":
                found[name] = fixed[name]
        elif (
            isinstance(value, int)
            and not isinstance(value, bool)
            and name.endswith(("_token_id", "_token_index"))
        ):
            found[name] = placeholder
            placeholder -= 1
    return found


def spread_weights(model: PreTrainedModel, seed: int) -> None:
    """Unties the output and redraws the matrices so that attention looks at many positions and
    logits are well separated.

    The usual initialisation (std 0.02) gives nearly equal logits: rounding would decide the argmax.
    """
    generator = torch.Generator().manual_seed(seed)
    head = model.get_output_embeddings()
    if hasattr(head, "weight"):
        # a tied head mostly repeats the last token, whatever the cache holds
        head.weight = nn.Parameter(head.weight.detach().clone())
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            last = name.rsplit(".", 1)[-1]
            if not parameter.is_floating_point() or last in ("A_log", "D", "dt_bias"):
                continue
            if parameter.ndim >= 2:
                std = 0.5 if id(parameter) in embeddings else 1.3 * parameter[0].numel() ** -0.5
                parameter.normal_(0.0, std, generator=generator)
            elif parameter.numel() == 1 and not parameter.any():
                parameter.fill_(0.5)  # a gate that is closed before training
            elif last == "bias":
                parameter.normal_(0.0, 0.1, generator=generator)
        for name, buffer in model.named_buffers():
            if name.endswith("codebook.embed_sum"):
                # zero before training: every sound would have one code
                buffer.normal_(generator=generator)


def tiny_model(
    model_class: type[PreTrainedModel], seed: int = 0, **changes: Any
) -> PreTrainedModel:
    """A tiny float32 `model_class` in eval mode with well separated logits; `changes` apply to its
    decoder's config."""
    torch.manual_seed(seed)
    config = tiny_config(model_class.config_class)
    for name, value in changes.items():
        setattr(config.get_text_config(decoder=True), name, value)
    model = model_class(config).float().eval()
    spread_weights(model, seed)
    generation = getattr(model, "generation_config", None)
    if generation is not None:
        wanted = {"pad_token_id": PAD, "bos_token_id": BOS}
        if model.config.is_encoder_decoder or hasattr(model, "build_delay_pattern_mask"):
            wanted["decoder_start_token_id"] = BOS
        for token, value in wanted.items():
            if getattr(generation, token) is None:
                setattr(generation, token, value)
        generation.composer_to_feature_token = {"composer1": 1}  # Pop2Piano
    if hasattr(model, "speaker_map"):
        model.speaker_map = {"Chelsie": {}}
    if hasattr(model, "set_default_language"):
        model.set_default_language("en_XX")
    return model
