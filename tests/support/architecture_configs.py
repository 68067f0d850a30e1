"""Tiny random models of every generative architecture in transformers: sizes, per-model corrections
and weights.

The rule is generic: take `config_class()`, replace each attribute with a known name by a small
value, keep the rest. `FIXUPS` holds exceptions to that rule, by config class.
"""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 160
PAD, BOS, EOS = 0, 1, 2
SPECIAL = dict(pad_token_id=PAD, bos_token_id=BOS, eos_token_id=EOS, decoder_start_token_id=BOS)
MAX_LAYERS = 6
COUNTS_OF_LAYERS = "num_hidden_layers n_layer n_layers num_layers".split()
HEAD_DIM = 8

# Small values, and the attributes that get them if the config class has an integer default.
SIZES = """
500: encoder_hash_byte_group_vocab
128: max_position_embeddings n_positions n_ctx max_seq_len context_length max_target_positions
    max_encoder_position_embeddings max_text_positions max_decoder_position_embeddings
    original_max_position_embeddings
64: max_source_positions mamba_d_ssm
56: crop_size
48: intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_ff dim_ff dff d_inner
    ffn_hidden_size n_inner dense_intermediate_size intermediate_size_mlp
32: hidden_size d_model n_embd embedding_size emb_dim dim embed_dim word_embed_proj_dim
    embedding_dim lru_width backbone_hidden_size width input_embedding_size output_embedding_size
    attention_hidden_size output_dim out_hidden_size text_hidden_size projection_dim adapter_in_dim
    adapter_out_dim projector_hidden_dim vision_output_dim qformer_hidden_size adapter_input_size
    cross_hidden_size decoder_hidden_size post_conv_out_channels encoder_hidden_size image_size
    audio_hidden_size depthwise_separable_out_channel ext_pw_out_channel hidden_dim
    image_token_embed_dim num_embeddings projection_hidden_size projector_input_dim
    projector_output_dim upsample_groups vision_hidden_size
24: moe_intermediate_size shared_expert_intermediate_size expert_ffn_hidden_size
    shared_intermediate_size moe_shared_expert_intermediate_size shared_experts_intermediate_size
    mlp_hidden_size speech_encoder_intermediate_size t2u_encoder_ffn_dim t2u_decoder_ffn_dim
    feed_forward_size
16: qk_head_dim q_lora_rank kv_lora_rank o_lora_rank num_mel_bins conv_channels codebook_dim
    projector_hidden_size patch_size nemo_conv_channels vector_quantization_hidden_dimension
8: head_dim d_kv d_head dim_head swa_head_dim attention_head_size kv_channels global_head_dim
    cross_head_dim attention_head_dim v_head_dim qk_nope_head_dim qk_rope_head_dim rotary_dim
    linear_key_head_dim linear_value_head_dim linear_head_dim index_head_dim mamba_d_state
    state_size ssm_state_size mamba_d_head mamba_head_dim mamba_headdim mamba_n_heads
    mamba_num_heads chunk_size mamba_chunk_size laurel_rank adapter_rank mamba_dt_rank
    time_step_rank router_hidden_size gated_norm_rank prompt_mid_dim hidden_size_per_layer_input
    d_rel sliding_window sliding_window_size attention_window_size window_size
    attention_chunk_size keep_window_size local_attention attention_window indexer_head_dim
    indexer_budget
4: num_attention_heads n_head num_heads n_heads attention_heads num_query_heads
    decoder_attention_heads encoder_attention_heads swa_num_attention_heads
    num_encoder_attention_heads num_decoder_attention_heads encoder_num_attention_heads
    decoder_num_attention_heads cross_num_attention_heads speech_encoder_attention_heads
    t2u_encoder_attention_heads t2u_decoder_attention_heads linear_num_value_heads linear_num_heads
    num_experts n_routed_experts num_local_experts moe_num_experts index_topk index_topk_blocks
    num_query_tokens vision_soft_tokens_per_image audio_soft_tokens_per_image latent_query_num
    index_kpool mm_tokens_per_image
2: num_key_value_heads num_kv_heads swa_num_key_value_heads num_query_groups
    encoder_num_key_value_heads decoder_num_key_value_heads n_head_kv num_global_key_value_heads
    cross_num_key_value_heads index_n_heads linear_num_key_heads num_hidden_layers n_layer n_layers
    num_layers encoder_layers decoder_layers num_encoder_layers num_decoder_layers depth
    speech_encoder_layers encoder_num_hidden_layers decoder_num_hidden_layers num_blocks
    t2u_encoder_layers t2u_decoder_layers num_layers_per_stack num_experts_per_tok
    num_experts_per_token moe_topk moe_k top_k_experts indexer_compress_ratio indexer_n_heads
1: n_group topk_group num_expert_group n_shared_experts num_shared_experts moe_num_shared_experts
    num_nextn_predict_layers first_k_dense_replace num_dense_layers zero_expert_num n_groups
    mamba_n_groups mamba_ngroups n_mamba_heads num_mem_blocks num_global_layers indexer_kv_heads
"""
SMALL: dict[str, int] = {
    name: int(size)
    for size, names in re.findall(r"^(\d+): ([^:]+)$", SIZES, re.MULTILINE)
    for name in names.split()
}
# Also set if their default is None.
SET_WHEN_NONE = """
sliding_window num_key_value_heads attention_chunk_size n_group topk_group num_experts_per_tok
n_routed_experts n_shared_experts indexer_budget indexer_compress_ratio indexer_head_dim
indexer_kv_heads indexer_n_heads
""".split()
MEDIA_TOKEN = r"(image|video|audio)_token_(id|index)"  # likewise

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
PINPOINTS = [[32, 64], [64, 32]]
PARAKEET = dict(
    **dict(model_type="parakeet_encoder", **TINY, intermediate_size=48, num_mel_bins=16),
    **dict(subsampling_conv_channels=8, projection_hidden_size=32, projection_bias=False),
)

FIXUPS: dict[str, dict[str, Any]] = {}
"""By config class name; "__default__" leaves the attribute to the class."""


def fix(classes: str, **values: Any) -> None:
    """Sets attributes of the configs of these classes, which are named without "Config"."""
    for name in classes.split():
        FIXUPS.setdefault(f"{name}Config", {}).update(values)


# attention: kinds of layers, heads, rope
fix(
    "CohereCompassText Gemma3nText Gemma4Text Gemma4UnifiedText DiffusionGemmaText",
    num_hidden_layers=4,
    layer_types=SLIDING_AND_FULL,
)
fix("GraniteMoeHybrid", num_hidden_layers=4, layer_types=LINEAR_AND_FULL)
fix("Lfm2 Lfm2Moe RecurrentGemma", num_hidden_layers=3)
fix("Lfm2 Lfm2Moe", layer_types=["conv", "full_attention", "conv"])
fix("Zamba Zamba2", num_hidden_layers=5, layers_block_type=ZAMBA_LAYERS)
fix("Zamba", attention_hidden_size=64)
fix("Zamba2", attention_hidden_size="__default__", n_mamba_heads=8)
fix("CohereCompassText", rope_parameters={kind: dict(ROPE) for kind in SLIDING_AND_FULL[:2]})
fix("Gemma4Text Gemma4UnifiedText DiffusionGemmaText", global_head_dim=16)
fix("Gemma3nText", num_kv_shared_layers=2, intermediate_size=[48] * 4)
fix("Gemma3nText", activation_sparsity_pattern=[0.5, 0.0, 0.0, 0.0])
fix("Bamba", attn_layer_indices=[1])
fix("DbrxAttention", rope_theta=10000.0, clip_qkv=8.0)
fix(
    "Dots3NoteText",
    num_hidden_layers=4,
    mlp_layer_types=["dense"] + ["sparse"] * 3,
    layer_types=["indexed_attention", "sliding_attention"] * 2,
    per_layer_config={i: {**MLA_HEADS, "sliding_window": 8} for i in (1, 3)},
)
fix("HrmText", num_layers_per_stack="__default__")
fix("Jamba", attn_layer_offset=1)
fix("Mamba2", num_heads=8)
fix("Mistral4", head_dim="__default__")
fix("MllamaText", cross_attention_layers=[1])
fix("Moonshine", encoder_num_key_value_heads=4)
fix(
    "MoonshineStreaming Nemotron3DiarizationAudio Nemotron3_5TranscribeAsrAudio",
    num_key_value_heads=4,
)
fix(
    "HunYuanDenseV1 HunYuanMoEV1 Ministral Glm4vText GlmOcrText HunYuanVLText Qwen2VLText"
    " Qwen2_5_VLText Qwen2_5OmniText Ernie4_5_VLMoeText",
    head_dim=8,
)
fix(
    "Glm4vText GlmOcrText HunYuanVLText PaddleOCRText Qwen2VLText Qwen2_5_VLText Qwen2_5OmniText",
    rope_parameters=MROPE,
)
fix("Ernie4_5_VLMoeText", rope_parameters={**MROPE, "mrope_section": [1, 1, 2]})
fix("Glm4vMoeText", head_dim=16, rope_parameters={**MROPE, "partial_rotary_factor": 0.5})
fix("Reformer", is_decoder=True, axial_pos_embds_dim=[16, 16])
fix("xLSTM", hidden_size=128, embedding_dim=128)

# experts
fix("DeepseekOcr2Text", mlp_layer_types=["dense", "sparse"])
fix("DeepseekV2 Dots1", first_k_dense_replace=1)
fix("Dots1", max_window_layers=1, layer_types=SLIDING_AND_FULL[:2])
fix("Qwen3OmniMoeTalkerText", shared_expert_intermediate_size=24)

# images: tokens, sizes, deep features
fix("Aria", projector_patch_to_query_dict={4: 3})
fix(
    "Chameleon",
    vocabulary_map={
        "<image>": 159,
        **{f"IMGIMG{'ABCDEFGH'[i // 10]}{'ABCDEFGHIJ'[i % 10]}Z": 112 + i for i in range(32)},
    },
)
fix("ChameleonVQVAE Emu3VQVAE JanusVQVAE", base_channels=32, channel_multiplier=[1, 1])
fix("ChameleonVQVAE Emu3VQVAE JanusVQVAE", num_res_blocks=1, hidden_size=32)
fix("ChameleonVQVAE JanusVQVAE", latent_channels=32)
fix("ChameleonVQVAE", resolution=16)
fix("Emu3VQVAE Mimi", codebook_size=32)
fix(
    "CohereCompassVision Qwen3VLVision Qwen3VLMoeVision Qwen3OmniMoeVisionEncoder"
    " GraniteDoclingVision",
    deepstack_visual_indexes=[0, 1],
)
fix("DeepseekOcr2SamVision UnlimitedOcrSamVision", downsample_channels=[32, 32], output_channels=32)
fix("UnlimitedOcrSamVision GotOcr2Vision GraniteDoclingVision", image_size=128)
fix(
    "Emu3",
    vocabulary_map={
        **{"<image>": 159, "<|extra_200|>": 158},
        **{f"<|visual token {i:06}|>": 112 + i for i in range(32)},
    },
)
fix("Exaone4_5_Vision Qwen2_5_VLVision Qwen2_5OmniVisionEncoder", window_size=56)
fix(
    "Florence2Vision",
    depths=[1] * 4,
    embed_dim=[8, 16, 16, 32],
    num_heads=[2] * 4,
    num_groups=[2] * 4,
)
fix("T5Gemma2Encoder", eoi_token_index=157)
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
fix(
    "Granite4Vision",
    **dict(deepstack_layer_map=[(0, 0), (1, 1)], spatial_target_layers=[0, 1, 0, 1]),
    **dict(downsample_rate="1/2", vision_config={"hidden_size": 64}),
    image_grid_pinpoints=PINPOINTS,
)
fix("InternVLVision QianfanOCRVision Molmo2Vision", image_size=[56, 56])
fix("LlavaNext LlavaNextVideo LlavaOnevision", image_grid_pinpoints=PINPOINTS)
fix("MllamaVision", intermediate_layers_indices=[0, 1], vision_output_dim=96)
fix("Molmo2", image_patch_id=150)
fix("Molmo2Adapter", vision_feature_layer=[-1, -2])
fix("MuseGlimmer MuseSpark", out_hidden_size=128)
fix(
    "NemotronH_Omni_Reasoning_V3_",
    vision_config={"video_temporal_patch_size": 2},
    projector_hidden_size=32,
    audio_config=PARAKEET,
)
fix("Phi4MultimodalVision", image_size=56)
fix("Pix2StructText", hidden_size=32)
fix("Qwen2_5OmniThinker Qwen3OmniMoeThinker", vision_start_token_id=150)
fix("SamVision", global_attn_indexes=[0, 1])
fix("Step3p7Vision", image_size=112)
fix("VipLlava", vision_feature_layer=[-2, -1])
fix(
    "VisionEncoderDecoder SpeechEncoderDecoder",
    decoder={"is_decoder": True, "add_cross_attention": True},
)

# sound
fix("FunAsrNanoAdaptor", intermediate_size=8)
fix("GraniteSpeechEncoder GraniteSpeechPlusEncoder", output_dim=42)
fix("GraniteSpeech GraniteSpeechPlus", downsample_rate=8)
fix("Phi4MultimodalAudio", audio_token_id=158)
fix("Pop2Piano", composer_vocab_size=1)
fix("Qwen3OmniMoe", enable_audio_output=False)
fix(
    "VibeVoiceAcousticTokenizerEncoder VibeVoiceSemanticTokenizerEncoder",
    num_filters=2,
    depths=[1] * 7,
)
fix("VoxtralEncoder GlmAsrEncoder Llama4Vision", intermediate_size=128)
fix("Whisper", begin_suppress_tokens=[], suppress_tokens=[])


def tiny_config(config_class: type[PretrainedConfig], **overrides: Any) -> PretrainedConfig:
    """A config of `config_class` whose model has a few thousand parameters."""
    return config_class(**{**tiny_arguments(config_class), **overrides})


def tiny_arguments(config_class: type[PretrainedConfig]) -> dict[str, Any]:
    """Keyword arguments for `config_class` that make known attributes small, nested configs
    included."""
    default = config_class()
    fields = _fields(default)
    arguments = {**_small_numbers(fields), **_per_layer_lists(fields), **_token_ids(fields)}
    if fields.get("use_cache") is False:
        arguments["use_cache"] = True
    if "kv_lora_rank" in arguments:
        arguments["num_key_value_heads"] = arguments["num_attention_heads"]
    rope = getattr(default, "rope_parameters", None)
    if isinstance(rope, dict) and "mrope_section" in rope:  # cut to the small head
        dims = arguments.get("head_dim", HEAD_DIM) * rope.get("partial_rotary_factor", 1.0)
        rest = int(dims) // 2 // 3
        sections = [int(dims) // 2 - 2 * rest, rest, rest]
        arguments["rope_parameters"] = {**rope, "mrope_section": sections}
    for name in getattr(config_class, "sub_configs", {}) or {}:
        nested = getattr(default, name, None)
        if isinstance(nested, PretrainedConfig):
            arguments[name] = {**tiny_arguments(type(nested)), "model_type": nested.model_type}
    for name, value in FIXUPS.get(config_class.__name__, {}).items():
        nested = isinstance(value, dict) and isinstance(arguments.get(name), dict)
        arguments[name] = {**arguments[name], **value} if nested else value
    return {name: value for name, value in arguments.items() if value != "__default__"}


def _fields(config: PretrainedConfig) -> dict[str, Any]:
    # A heterogeneous config refuses to read an attribute that varies by layer: `FIXUPS` sets those.
    fields = {**dict.fromkeys(getattr(config, "__dataclass_fields__", ())), **vars(config)}
    aliases = getattr(config, "attribute_map", None) or {}
    return {name: x for name, x in fields.items() if name[0] != "_" and name not in aliases}


def _small_numbers(fields: dict[str, Any]) -> dict[str, int]:
    found = {}
    for name, value in fields.items():
        most = VOCAB_SIZE if name.endswith("vocab_size") else SMALL.get(name)
        if most is None:
            continue
        if type(value) is int and value > 0:
            found[name] = min(value, most)
        elif value is None and name in SET_WHEN_NONE:
            found[name] = most
    return found


def _per_layer_lists(fields: dict[str, Any]) -> dict[str, Any]:
    """Lists with one entry per layer, cut to the fewest layers in which every distinct entry
    occurs."""
    name_of_count = next((name for name in COUNTS_OF_LAYERS if name in fields), None)
    count = fields.get(name_of_count)
    lists = {
        name: x for name, x in fields.items() if isinstance(x, list | tuple) and len(x) == count
    }
    if not lists or count < 2:
        return {}
    chosen, seen = [], set()
    for index in range(count):
        entries = {(name, str(values[index])) for name, values in lists.items()}
        if not entries <= seen and len(chosen) < MAX_LAYERS:
            seen |= entries
            chosen.append(index)
    if len(chosen) < 2:
        chosen = sorted({*chosen, count - 1})
    cut = {name: [values[index] for index in chosen] for name, values in lists.items()}
    return {name_of_count: len(chosen), **cut}


def _token_ids(fields: dict[str, Any]) -> dict[str, int]:
    """Special tokens inside the small vocabulary; placeholders of other modalities are at its end,
    outside of prompts."""
    found = {"pad_token_id": PAD} if "pad_token_id" in fields else {}
    placeholders = iter(range(VOCAB_SIZE - 1, 0, -1))
    for name, value in sorted(fields.items()):
        if name in SPECIAL:
            if value is not None:
                found[name] = SPECIAL[name]
        elif name.endswith(("_token_id", "_token_index")) and (
            type(value) is int or (value is None and re.fullmatch(MEDIA_TOKEN, name))
        ):
            found[name] = next(placeholders)
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
