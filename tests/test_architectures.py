"""A sample of `python -m tests.support.architectures`: `"paged"` gives plain `generate`'s
tokens."""

import pytest
import torch
import transformers

from tests.support import speeds
from tests.support.architecture_configs import tiny_model
from tests.support.architecture_inputs import make_inputs
from tests.support.architecture_media import takes_media
from tests.support.architectures import TEXT, check, list_architectures

# by what is special
NAMES = {
    "full attention": "Llama Qwen3 Phi3 GPTJ GPTNeoX OPT Glm4 StableLm Olmo2 Starcoder2 Granite"
    " Nemotron Cohere2",
    "experts": "Mixtral Qwen3Moe",
    "sliding, chunked or local attention, softcaps, sinks": "Mistral Gemma2 Gemma3 GptOss Llama4"
    " GPTNeo",
    "keys of another layer, one key head, alibi": "Gemma3n Falcon Bloom Mpt",
    "latent and indexed attention": "DeepseekV2 DeepseekV3 DeepseekV32",
    "states": "Mamba FalconH1 Jamba Qwen3Next Lfm2 RecurrentGemma",
}
SEQ2SEQ = "T5 Bart Pegasus MBart M2M100 Blenderbot Whisper"
MEDIA = (
    "Llava LlavaNext PaliGemma Idefics3 InternVL Qwen2_5_VL Qwen3VL Qwen3_5 Gemma3 Gemma4 Mllama"
    " Qwen2_5OmniThinker Florence2 Voxtral"
)
CLASSES = [
    "GPT2LMHeadModel",
    *(f"{name}ForCausalLM" for names in NAMES.values() for name in names.split()),
    *(f"{name}ForConditionalGeneration" for name in f"{SEQ2SEQ} {MEDIA}".split()),
]


@pytest.mark.slow
@pytest.mark.parametrize("name", CLASSES)
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


@pytest.mark.parametrize(
    "name", ["MiniCPMV4_7ForConditionalGeneration", "UnlimitedOcrForConditionalGeneration"]
)
def test_the_rows_of_a_larger_batch_have_pictures(name: str) -> None:
    """Patches of all rows in one sequence; lists of numbers."""
    if name not in list_architectures():
        pytest.skip("not in this version of transformers")
    model = tiny_model(getattr(transformers, name))
    medium, inputs = speeds.inputs_of(model, 4)
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=3, min_new_tokens=3)
    assert medium == "image" and tokens.shape == (4, inputs["input_ids"].shape[1] + 3)


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
