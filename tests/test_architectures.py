"""A sample of `python -m tests.support.architectures`: `"paged"` gives plain `generate`'s
tokens."""

import pytest
import torch
import transformers

from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.architecture_media import takes_media
from tests.support.architectures import TEXT, check, list_architectures

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
    "Qwen2_5_VLForConditionalGeneration",  # rope with three axes; images and videos
    "Gemma3ForConditionalGeneration",  # tokens of an image see one another
    "MllamaForConditionalGeneration",  # images in cross-attention
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
    "LlavaForConditionalGeneration",
    "LlavaNextForConditionalGeneration",  # tiles
    "PaliGemmaForConditionalGeneration",  # a prompt that sees all of itself
    "Idefics3ForConditionalGeneration",
    "InternVLForConditionalGeneration",
    "Qwen3VLForConditionalGeneration",  # features of images in several layers
    "Qwen3_5ForConditionalGeneration",
    "Gemma4ForConditionalGeneration",  # images, videos, sound
    "Qwen2_5OmniThinkerForConditionalGeneration",
    "Florence2ForConditionalGeneration",
    "VoxtralForConditionalGeneration",
]


@pytest.mark.slow_cases(
    "BloomForCausalLM",
    "DeepseekV32ForCausalLM",
    "DeepseekV3ForCausalLM",
    "FalconH1ForCausalLM",
    "GPTNeoForCausalLM",
    "Gemma3ForConditionalGeneration",
    "Gemma3nForCausalLM",
    "Lfm2ForCausalLM",
    "Llama4ForCausalLM",
    "MambaForCausalLM",
    "MllamaForConditionalGeneration",
    "Qwen2_5_VLForConditionalGeneration",
    "Qwen3NextForCausalLM",
    "RecurrentGemmaForCausalLM",
)
@pytest.mark.parametrize(
    "name", [*FAST, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_paged_equals_plain(name: str) -> None:
    if name not in list_architectures():
        pytest.skip("not in this version of transformers")
    result = check(name)
    assert result.status == "equal", result
    assert result.modes["greedy"].status == "equal", result


@pytest.mark.slow_cases("Qwen2VLForConditionalGeneration")
@pytest.mark.parametrize(
    "name", ["LlavaForConditionalGeneration", "Qwen2VLForConditionalGeneration"]
)
def test_the_rows_have_different_pictures_amid_text(name: str) -> None:
    model = tiny_model(getattr(transformers, name))
    inputs = make_inputs(model)
    assert next(iter(inputs)) == "image" and list(inputs)[-1] == "text"
    assert not torch.equal(*inputs["image"]["pixel_values"].chunk(2)[:2])
    ids, mask = inputs["image"]["input_ids"], inputs["image"]["attention_mask"]
    assert mask[0].all() and not mask[1, 0]
    for row, seen in zip(ids == model.config.image_token_id, mask.bool(), strict=True):
        places = row.nonzero().flatten()
        assert seen[places].all() and seen[: places[0]].any() and places[-1] < len(row) - 1


@pytest.mark.slow
@pytest.mark.full
def test_every_class_that_takes_media_gets_them() -> None:
    missing = []
    for name in list_architectures():
        model_class = getattr(transformers, name)
        if takes_media(model_class):
            try:
                model = tiny_model(model_class)
            except ImportError:  # a package is not installed
                continue
            if not any(set(tensors) - {*TEXT} for tensors in make_inputs(model).values()):
                missing.append(name)
    assert not missing
