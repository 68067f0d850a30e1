"""How many tokens a model's table of positions allows, found by what its forward reads."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import transformers
from transformers import GenerationConfig, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

import hf_paged
from hf_paged.model.positions import PositionReads, PositionTable, num_positions, shorten
from hf_paged.model.state import fingerprint
from hf_paged.model.trial import Trial
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.checks import model_state
from tests.support.rooms import records_on_cpu

NUM = 32  # positions
_IDS = dict(vocab_size=models.VOCAB_SIZE, pad_token_id=models.PAD, bos_token_id=models.BOS)
_GPT: dict[str, Any] = dict(n_positions=NUM, n_embd=48, n_layer=2, n_head=4)
_WIDTHS = dict(max_position_embeddings=NUM, hidden_size=48, intermediate_size=64)
_BERT: dict[str, Any] = dict(**_WIDTHS, num_hidden_layers=2, num_attention_heads=4)
_DECODER = dict(decoder_layers=2, decoder_attention_heads=4, decoder_ffn_dim=64)
_ENCODER = dict(encoder_layers=2, encoder_attention_heads=4, encoder_ffn_dim=64)
_BART: dict[str, Any] = dict(max_position_embeddings=NUM, d_model=48, **_DECODER, **_ENCODER)
_ONE_STACK = dict(is_decoder=True, is_encoder_decoder=False)
_NEO = dict(hidden_size=48, num_layers=2, num_heads=4, window_size=8)
_LAYERS = dict(attention_types=[[["global", "local"], 1]], max_position_embeddings=NUM)
_MPT = dict(max_seq_len=NUM, d_model=48, n_layers=2, n_heads=4)
_XGLM = dict(max_position_embeddings=NUM, d_model=48, num_layers=2, attention_heads=4, ffn_dim=64)
_SEQ2SEQ = dict(eos_token_id=models.EOS, decoder_start_token_id=models.BOS)
_AUDIO = dict(max_target_positions=NUM, max_source_positions=16, num_mel_bins=8)
_T5 = dict(d_model=48, d_kv=8, d_ff=64, num_layers=2, num_heads=4)

# name -> config class, model class, config arguments; tables of NUM positions that end
LEARNED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _GPT),
    "opt": ("OPTConfig", "OPTForCausalLM", {**_BERT, "word_embed_proj_dim": 48, "ffn_dim": 64}),
    "gptj": ("GPTJConfig", "GPTJForCausalLM", {**_GPT, "rotary_dim": 4}),
    # nothing is left of a head behind the rotated part
    "gptj_whole_heads": ("GPTJConfig", "GPTJForCausalLM", {**_GPT, "rotary_dim": 12}),
    "codegen": ("CodeGenConfig", "CodeGenForCausalLM", {**_GPT, "n_ctx": NUM, "rotary_dim": 4}),
    "gpt_neo": ("GPTNeoConfig", "GPTNeoForCausalLM", {**_NEO, **_LAYERS}),
    "big_code": ("GPTBigCodeConfig", "GPTBigCodeForCausalLM", _GPT),
    "biogpt": ("BioGptConfig", "BioGptForCausalLM", _BERT),
    "mpt": ("MptConfig", "MptForCausalLM", _MPT),
    "openai": ("OpenAIGPTConfig", "OpenAIGPTLMHeadModel", _GPT),
    "ctrl": ("CTRLConfig", "CTRLLMHeadModel", {**_GPT, "dff": 64}),
    "bert": ("BertConfig", "BertLMHeadModel", {**_BERT, "is_decoder": True}),
    "bart_decoder": ("BartConfig", "BartForCausalLM", {**_BART, **_ONE_STACK}),
}
UNLIMITED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _BERT),
    "bloom": ("BloomConfig", "BloomForCausalLM", {"hidden_size": 48, "n_layer": 2, "n_head": 4}),
    "falcon": ("FalconConfig", "FalconForCausalLM", {**_BERT, "alibi": True}),
    "xglm": ("XGLMConfig", "XGLMForCausalLM", _XGLM),  # its table grows
}
ENCODERS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "bart": ("BartConfig", "BartForConditionalGeneration", {**_BART, **_SEQ2SEQ}),
    "marian": ("MarianConfig", "MarianMTModel", {**_BART, **_SEQ2SEQ}),
    "whisper": (
        "WhisperConfig",
        "WhisperForConditionalGeneration",
        {**_BART, **_SEQ2SEQ, **_AUDIO},
    ),
    "m2m": ("M2M100Config", "M2M100ForConditionalGeneration", {**_BART, **_SEQ2SEQ}),
    "t5": ("T5Config", "T5ForConditionalGeneration", {**_T5, **_SEQ2SEQ}),
}


def build(name: str) -> PreTrainedModel:
    config, kind, arguments = {**LEARNED, **UNLIMITED, **ENCODERS}[name]
    given = {**_IDS, "eos_token_id": None, **arguments}
    model = getattr(transformers, kind)(getattr(transformers, config)(**given))
    models.init_weights(model, 3)
    model.generation_config = GenerationConfig(
        pad_token_id=models.PAD,
        bos_token_id=models.BOS,
        decoder_start_token_id=models.BOS,
        use_cache=True,
    )
    return model.float().eval()


@functools.cache
def get(name: str) -> PreTrainedModel:
    """The session's model of this name. Tests must not change it."""
    return models.shared(build(name))


@pytest.mark.parametrize("name", [*LEARNED, *UNLIMITED])
def test_a_table_of_positions_is_found_by_what_is_read(name: str) -> None:
    model = get(name)
    before = model_state(model)
    buffers = {key: value.clone() for key, value in model.named_buffers()}
    expected = NUM if name in LEARNED else None, NUM if name == "xglm" else None
    assert num_positions(Trial(model, None, None)) == expected
    assert model_state(model) == before
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())


@pytest.mark.parametrize("name", ENCODERS)
def test_a_table_of_positions_of_a_decoder_behind_an_encoder(name: str) -> None:
    encoded = BaseModelOutput(last_hidden_state=torch.randn(1, 16, 48))
    found = num_positions(Trial(get(name), None, None), {"encoder_outputs": encoded})
    assert found[0] == (None if name in ("m2m", "t5") else NUM)


@pytest.mark.parametrize(
    "name", ["GitForCausalLM", "Gemma4UnifiedForConditionalGeneration", "Qwen4ExpForCausalLM"]
)
def test_masks_and_chosen_tokens_are_no_tables(name: str) -> None:
    """They are indexed by positions, too, or cut there."""
    model = tiny_model(getattr(transformers, name))
    most = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    assert num_positions(Trial(model, None, None))[0] in (None, most)


def test_a_model_that_fails_has_no_table() -> None:
    """Fewer positions than the check computes: the forward's own error is raised later."""
    config = transformers.GPT2Config(**{**_IDS, **_GPT, "n_positions": 5})
    trial = Trial(transformers.GPT2LMHeadModel(config).eval(), None, None)
    assert num_positions(trial) == (None, None)


def test_each_way_to_read_one_place() -> None:
    model, place = torch.nn.Module(), torch.tensor([[5]])
    weight = model.weight = torch.nn.Parameter(torch.randn(9, 2))
    table = model.table = torch.randn(1, 9, 2)
    computed = table + 1
    reads = {
        "embedding": lambda: torch.nn.functional.embedding(place, weight),
        "index": lambda: weight[place],
        "select": lambda: weight.index_select(0, place[0]),
        "gather": lambda: table.gather(1, place[..., None].expand(1, 1, 2)),
        "slice": lambda: table[:, 5:6],
        "beginning": lambda: table[:, :6],
        "end": lambda: table[:, 9 - 6 :],
        "last": lambda: table[:, -6:],
    }
    for name, read in reads.items():
        with PositionReads(3, model) as found:
            read()
        is_parameter = name in ("embedding", "index", "select")
        assert PositionTable(9, 2, is_parameter) in found.tables, name
    place.fill_(9)
    message = "index 9 is read from an axis of size 9"
    for name in ("embedding", "index", "select", "gather"):
        with pytest.raises(IndexError, match=message), PositionReads(3, model):
            reads[name]()
    with PositionReads(3, model) as found:
        torch.nn.functional.embedding(torch.tensor([[1, 2]]), weight)
        computed[:, :6], computed[:, 5:6], computed[:, -6:]
    assert not found.tables
    with PositionReads(3, model) as found:
        computed[:, 9 - 6 :]
    assert found.tables == {PositionTable(9, 2, False)}


def test_buffers_are_cut_and_parameters_are_not() -> None:
    module = torch.nn.Module()
    module.register_buffer("table", torch.randn(2, 9))
    module.weight = torch.nn.Parameter(torch.randn(9, 2))
    assert shorten(module, 9, 4) and module.table.shape == (2, 4) and module.weight.shape == (9, 2)
    assert not shorten(module, 9, 4)


def test_a_table_that_can_grow_is_part_of_the_models_state() -> None:
    """The search cuts the table, so that forwards replace it."""
    model = build("xglm")
    ids = torch.randint(5, 60, (1, 9), generator=torch.Generator().manual_seed(0))
    model.generate(ids, max_new_tokens=20, **models.PAGED)
    route = hf_paged.last_route(model)
    assert route is not None
    assert route.num_captured_steps > 0 or not records_on_cpu()
    before = fingerprint(model)
    model.model.embed_positions.weights.mul_(2)
    assert fingerprint(model) != before
