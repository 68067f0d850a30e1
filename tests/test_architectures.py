"""A sample of `python -m tests.support.architectures`: `"paged"` gives plain `generate`'s tokens."""

import pytest

from tests.support.architectures import check, list_architectures

SAMPLE = [
    "LlamaForCausalLM",
    "Qwen3ForCausalLM",
    "MistralForCausalLM",  # every layer slides
    "Gemma2ForCausalLM",  # softcap, sliding and full layers
    "Gemma3ForCausalLM",
    "Gemma3nForCausalLM",  # layers that share another layer's keys
    "GptOssForCausalLM",  # attention sinks
    "Phi3ForCausalLM",
    "GPT2LMHeadModel",
    "GPTJForCausalLM",
    "GPTNeoXForCausalLM",
    "GPTNeoForCausalLM",  # local attention in the model's own code
    "OPTForCausalLM",
    "BloomForCausalLM",  # alibi
    "MptForCausalLM",  # alibi
    "FalconForCausalLM",  # one key head
    "MixtralForCausalLM",
    "Qwen3MoeForCausalLM",
    "DeepseekV2ForCausalLM",  # latent attention
    "DeepseekV3ForCausalLM",
    "DeepseekV32ForCausalLM",  # indexed attention
    "Llama4ForCausalLM",  # chunked attention
    "Cohere2ForCausalLM",
    "Glm4ForCausalLM",
    "StableLmForCausalLM",
    "Olmo2ForCausalLM",
    "Starcoder2ForCausalLM",
    "GraniteForCausalLM",
    "NemotronForCausalLM",
    "MambaForCausalLM",  # no keys at all
    "JambaForCausalLM",  # Mamba and attention layers
    "FalconH1ForCausalLM",  # both in one layer
    "Qwen3NextForCausalLM",  # linear and full attention
    "Lfm2ForCausalLM",  # convolution and attention
    "RecurrentGemmaForCausalLM",
    "Qwen2_5_VLForConditionalGeneration",  # rope with three axes
    "T5ForConditionalGeneration",  # relative position bias
    "BartForConditionalGeneration",
    "PegasusForConditionalGeneration",
    "MBartForConditionalGeneration",
    "M2M100ForConditionalGeneration",
    "BlenderbotForConditionalGeneration",
    "WhisperForConditionalGeneration",
]


@pytest.mark.parametrize("name", SAMPLE)
def test_paged_equals_plain(name: str) -> None:
    if name not in list_architectures():
        pytest.skip("not in this version of transformers")
    result = check(name)
    assert result.status == "equal", result
    assert result.modes["greedy"].status == "equal", result
