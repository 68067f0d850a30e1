"""Tiny real models and a tiny real tokenizer, built from configs with fixed random weights.

Weights are drawn so that logits are well spread (standard deviation about 3 over 128 tokens):
rounding never decides a greedy choice or a beam, and a token changes if attention reads one wrong
key.
"""

from __future__ import annotations

import copy
import functools
import string
import tempfile
from typing import Any

import torch
import transformers
from packaging import version
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from tokenizers.trainers import BpeTrainer
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerFast

Options = dict[str, Any]  # keyword arguments
Rows = list[list[int]]  # tokens of each row

VOCAB_SIZE = 128
PAD, BOS, EOS = 0, 1, 2
FIRST_WORD = 4  # ids below are special
WINDOW = 8  # tokens; every test goes well past it
BLOCK_SIZE = 8  # tokens; small, so that a short test uses several blocks
BEFORE_5_24 = version.parse(transformers.__version__) < version.parse("5.24")
BEFORE_5_18 = version.parse(transformers.__version__) < version.parse("5.18")
_BLOCKS = {"block_size": BLOCK_SIZE}
PAGED: Options = {"cache_implementation": "paged", "cache_config": _BLOCKS}
# by the modules' own forwards, without replays
UNRECORDED: Options = {**PAGED, "cache_config": {**_BLOCKS, "capture": False}}

_TOKENS = {
    "vocab_size": VOCAB_SIZE,
    "tie_word_embeddings": False,  # a tied random model repeats its last token forever
    "pad_token_id": PAD,
    "bos_token_id": BOS,
}
_DECODER = {
    **_TOKENS,
    **dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4),
    **dict(num_key_value_heads=2, max_position_embeddings=2048, eos_token_id=None),
}
_LLAMA = {**_DECODER, "head_dim": 16}
_WINDOWS = {**_LLAMA, "sliding_window": WINDOW}
_GEMMA = {**_WINDOWS, "query_pre_attn_scalar": 16}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROPE = {"rope_type": "default", "rope_theta": 10000.0}
_SEQ2SEQ = {**_TOKENS, "eos_token_id": EOS}
_BART = {
    **_SEQ2SEQ,
    **dict(d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4),
    **dict(decoder_attention_heads=4, encoder_ffn_dim=96, decoder_ffn_dim=96, dropout=0.0),
    **dict(decoder_start_token_id=BOS, forced_eos_token_id=None),
}

# name -> (model class, arguments of its config)
CONFIGS: dict[str, tuple[str, Options]] = {
    "llama": ("LlamaForCausalLM", _LLAMA),
    "qwen3": ("Qwen3ForCausalLM", _LLAMA),
    "mistral": ("MistralForCausalLM", _WINDOWS),
    # on transformers 5.17 the default, SDPA, drops the softcap
    "gemma2": ("Gemma2ForCausalLM", {**_GEMMA, "attn_implementation": "eager"}),
    "gemma3": (
        "Gemma3ForCausalLM",
        {
            **_GEMMA,
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
        },
    ),
    "gpt_oss": (
        "GptOssForCausalLM",
        {
            **_WINDOWS,
            **_EXPERTS,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": _ROPE,
        },
    ),
    "phi3": ("Phi3ForCausalLM", _DECODER),
    "gpt2": (
        "GPT2LMHeadModel",
        {**_TOKENS, **dict(n_positions=256, n_embd=64, n_layer=2, n_head=4, eos_token_id=None)},
    ),
    "mixtral": ("MixtralForCausalLM", {**_LLAMA, **_EXPERTS}),
    "qwen3_next": (
        "Qwen3NextForCausalLM",
        {
            **_LLAMA,
            **dict(linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=16),
            **dict(linear_value_head_dim=16, mlp_only_layers=[0, 1]),
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "diff_llama": ("DiffLlamaForCausalLM", _DECODER),
    "t5": (
        "T5ForConditionalGeneration",
        {
            **_SEQ2SEQ,
            **dict(d_model=64, d_kv=16, d_ff=96, num_layers=2, num_heads=4, dropout_rate=0.0),
            **dict(relative_attention_num_buckets=8, relative_attention_max_distance=16),
            "decoder_start_token_id": PAD,
        },
    ),
    "bart": ("BartForConditionalGeneration", {**_BART, "max_position_embeddings": 256}),
    "whisper": (
        "WhisperForConditionalGeneration",
        {
            **_BART,
            **dict(num_mel_bins=8, max_source_positions=20, max_target_positions=128),
            **dict(suppress_tokens=None, begin_suppress_tokens=None),
        },
    ),
}
HYBRID = ("qwen3_next",)  # linear and full attention
ROW_BY_ROW = ("diff_llama",)  # whose code splits the cached values of a batch in two
NAMES = tuple(name for name in CONFIGS if name not in (*HYBRID, *ROW_BY_ROW))
ENCODER_DECODER = ("t5", "bart", "whisper")
DECODER_ONLY = tuple(name for name in NAMES if name not in ENCODER_DECODER)
SLIDING = ("mistral", "gemma2", "gemma3", "gpt_oss")


def is_encoder_decoder(name: str) -> bool:
    return name in ENCODER_DECODER


def config(name: str, **overrides: Any) -> transformers.PreTrainedConfig:
    model_class, arguments = CONFIGS[name]
    return getattr(transformers, model_class).config_class(**{**arguments, **overrides})


# Chosen so that greedy text does not fall into a loop.
_SEEDS = {"qwen3": 3, "diff_llama": 1, "t5": 1, "bart": 14, "whisper": 9}


def build(name: str, seed: int | None = None, **overrides: Any) -> PreTrainedModel:
    """A new model, never shared, for tests that modify it. float32, eval mode, on the CPU."""
    model = getattr(transformers, CONFIGS[name][0])(config(name, **overrides))
    init_weights(model, _SEEDS.get(name, 0) if seed is None else seed)
    model.generation_config = GenerationConfig(
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=None,
        decoder_start_token_id=getattr(model.config, "decoder_start_token_id", None),
        use_cache=True,
    )
    if name == "whisper":
        model.generation_config.max_initial_timestamp_index = None
        model.generation_config.is_multilingual = False
        model.generation_config.return_timestamps = False
    return model.float().eval()


@torch.no_grad()
def init_weights(model: torch.nn.Module, seed: int) -> None:
    """Redraws every parameter so that activations keep unit scale, attention is peaked and logits
    are spread."""
    generator = torch.Generator().manual_seed(seed)

    def draw(parameter: torch.Tensor, std: float, mean: float = 0.0) -> None:
        parameter.copy_(torch.randn(parameter.shape, generator=generator) * std + mean)

    kind = model.config.model_type
    # T5 ties input and output embeddings whatever its config says; smaller embeddings keep the
    # logits in range.
    tied = model.get_output_embeddings().weight if model.config.tie_word_embeddings else None
    for name, parameter in model.named_parameters():
        owner = name.rpartition(".")[0]
        leaf = owner.rpartition(".")[2]
        if "norm" in name or leaf in ("ln_1", "ln_2", "ln_f"):
            # Gemma multiplies by (1 + weight), and so does Qwen3-Next outside of its linear layers.
            is_shifted = kind == "qwen3_next" and "linear_attn" not in name
            zero_centred = name.endswith("bias") or "gemma" in kind or is_shifted
            draw(parameter, 0.1, 0.0 if zero_centred else 1.0)
        elif parameter.ndim < 2:
            draw(parameter, 1.0 if name.endswith("sinks") else 0.1)
        elif name.startswith(("lm_head", "proj_out")):
            draw(parameter, 3.0 / parameter.shape[1] ** 0.5)
        elif isinstance(model.get_submodule(owner), torch.nn.Embedding):
            draw(parameter, 0.35 if parameter is tied else 1.0)
        else:
            # Experts are stored [experts, in, out]; GPT-2's Conv1D is [in, out]; Linear is [out,
            # in].
            is_in_out = parameter.ndim == 3 or leaf.startswith("c_")
            fan_in = parameter.shape[-2] if is_in_out else parameter[0].numel()
            gain = 1.5 if leaf in ("q", "k", "q_proj", "k_proj", "qkv_proj", "c_attn") else 1.2
            if kind == "t5" and leaf in ("q", "k"):
                gain = 1.0  # T5 does not divide scores by sqrt(head_dim)
            # The decoder's own text must weigh as much as the audio or text that it attends to.
            if name.startswith(("decoder.", "model.decoder.")):
                if owner.endswith(("SelfAttention.o", "self_attn.out_proj")):
                    gain = 3.0
                elif owner.endswith(("EncDecAttention.o", "encoder_attn.out_proj")):
                    gain = 0.7
            draw(parameter, gain / fan_in**0.5)


_SHARED: dict[int, PreTrainedModel] = {}


@functools.cache
def get(name: str) -> PreTrainedModel:
    """The session's shared model of this name, loaded from safetensors. Tests must not change
    it."""
    return _reloaded(build(name), CONFIGS[name][1].get("attn_implementation"))


@functools.cache
def get_eager(name: str) -> PreTrainedModel:
    """The same weights with eager attention, which can return attention weights."""
    return _reloaded(get(name), "eager")


def _reloaded(model: PreTrainedModel, implementation: str | None) -> PreTrainedModel:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(folder)
        return shared(
            type(model).from_pretrained(folder, attn_implementation=implementation).eval()
        )


def shared(model: PreTrainedModel) -> PreTrainedModel:
    """The same model, which tests must not change from now on."""
    _SHARED[id(model)] = model
    return model


def is_shared(model: PreTrainedModel) -> bool:
    """Whether it is one of the session's shared models."""
    return id(model) in _SHARED


def put(value: Any, device: torch.device) -> Any:
    """Inputs on the device, or a model there: the model itself on the CPU, else a copy, since tests
    share models."""
    if isinstance(value, torch.nn.Module):
        return value if device.type == "cpu" else copy.deepcopy(value).to(device)
    return {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in value.items()}


@functools.cache
def get_assistant(name: str) -> PreTrainedModel:
    """The same model with noise on its weights: its drafts are accepted often, not always."""
    return with_noise(copy.deepcopy(get(name)))


def with_noise(model: PreTrainedModel) -> PreTrainedModel:
    """Changes each weight by about a tenth."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def corpus() -> list[str]:
    """Sentences of made-up words, the same on every machine."""
    syllables = [first + last for first in "bcdfghklmnprstvwz" for last in "aeiou"]
    ends = ("", "x", "", "y", "", "j", "", "q")
    words = [
        syllables[7 * k % 85] + syllables[(11 * k * k + 3) % 85] + ends[k % 8] for k in range(400)
    ]
    return [" ".join(words[start : start + 8]) for start in range(0, len(words), 8)]


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """BPE over `corpus`, with the models' exact vocabulary; pads on the left."""
    model = Tokenizer(BPE(unk_token="<unk>"))
    model.pre_tokenizer = pre_tokenizers.Metaspace()
    model.decoder = decoders.Metaspace()
    trainer = BpeTrainer(
        vocab_size=VOCAB_SIZE,
        special_tokens=["<pad>", "<s>", "</s>", "<unk>"],
        initial_alphabet=[*string.ascii_lowercase, "\N{LOWER ONE EIGHTH BLOCK}"],
        show_progress=False,
    )
    model.train_from_iterator(corpus(), trainer)
    assert model.get_vocab_size() == VOCAB_SIZE
    special = dict(pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    options = dict(padding_side="left", clean_up_tokenization_spaces=False)
    return PreTrainedTokenizerFast(tokenizer_object=model, **special, **options)


def token_ids(batch_size: int, length: int, seed: int = 0) -> torch.Tensor:
    """Words without special tokens, `[batch_size, length]` int64."""
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(FIRST_WORD, VOCAB_SIZE, (batch_size, length), generator=generator)


def prompt(
    name: str, batch_size: int = 3, length: int = 13, seed: int = 0
) -> dict[str, torch.Tensor]:
    """Inputs of `generate` without padding."""
    if name == "whisper":
        cfg, generator = config(name), torch.Generator().manual_seed(200 + seed)
        shape = (batch_size, cfg.num_mel_bins, 2 * cfg.max_source_positions)
        return {"input_features": torch.randn(shape, generator=generator)}
    ids = token_ids(batch_size, length, seed)
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def padded_prompt(
    name: str, lengths: tuple[int, ...] = (13, 4, 9), seed: int = 0
) -> dict[str, torch.Tensor]:
    """Inputs of `generate` with several lengths in tokens, left-padded. Audio has one length: there
    the decoder's prompt is ragged."""
    rows = token_ids(len(lengths), max(lengths), seed).tolist()
    inputs = left_padded([row[len(row) - length :] for row, length in zip(rows, lengths)])
    if name != "whisper":
        return inputs
    decoder = {f"decoder_{key}": x for key, x in inputs.items()}
    return {**prompt(name, len(lengths), seed=seed), **decoder}


def left_padded(rows: Rows) -> dict[str, torch.Tensor]:
    """Rows of tokens as inputs of `generate`, `(rows, width)` each."""
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask}


def prompt_width(name: str, inputs: dict[str, torch.Tensor]) -> int:
    """Number of prompt tokens in the returned sequences."""
    if is_encoder_decoder(name):
        return inputs["decoder_input_ids"].shape[1] if "decoder_input_ids" in inputs else 1
    return inputs["input_ids"].shape[1]
