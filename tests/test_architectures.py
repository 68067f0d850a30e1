"""A sample of `python -m tests.support.architectures`: `"paged"` gives plain `generate`'s tokens."""

import pytest

from tests.support.architectures import check, list_architectures

FAST = [
    "Gemma3nForCausalLM",  # layers that share another layer's keys
    "GPTNeoForCausalLM",  # local attention in the model's own code
    "BloomForCausalLM",  # alibi
    "DeepseekV3ForCausalLM",  # latent attention
    "DeepseekV32ForCausalLM",  # indexed attention
    "Llama4ForCausalLM",  # chunked attention
    "MambaForCausalLM",  # no keys at all
    "FalconH1ForCausalLM",  # Mamba and attention in one layer
    "Qwen3NextForCausalLM",  # linear and full attention
    "Lfm2ForCausalLM",  # convolution and attention
    "RecurrentGemmaForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",  # rope with three axes
]
SLOW = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",  # every layer slides
    "Gemma2ForCausalLM",  # softcap, sliding and full layers
    "Gemma3ForCausalLM",
    "GptOssForCausalLM",  # attention sinks
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "OPTForCausalLM",
    "MptForCausalLM",  # alibi
    "FalconForCausalLM",  # one key head
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",  # latent attention
    "Cohere2ForCausalLM",
    "Glm4ForCausalLM",
    "StableLmForCausalLM",
    "Olmo2ForCausalLM",
    "Starcoder2ForCausalLM",
    "GraniteForCausalLM",
    "NemotronForCausalLM",
    "JambaForCausalLM",  # Mamba and attention layers
    "T5ForConditionalGeneration",  # relative position bias
    "BartForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "MBartForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "BlenderbotForConditionalGeneration",
    "WhisperForConditionalGeneration",
]


@pytest.mark.parametrize("name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)])
def test_paged_equals_plain(name: str) -> None:
    if name not in list_architectures():
        pytest.skip("not in this version of transformers")
    result = check(name)
    assert result.status == "equal", result
    assert result.modes["greedy"].status == "equal", result
