"""Drafts from a model's multi-token-prediction heads (`use_mtp`): tokens as without, drafts as
transformers'."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel
from transformers.generation import candidate_generator

import hf_paged
from hf_paged import PagedConfig, PagedEngine, compat
from hf_paged.generation import batch_call
from hf_paged.speculation.mtp import MtpHeads
from hf_paged.speculation.sources import StepCosts
from tests.support import models
from tests.support.engine_helpers import (
    MODES,
    Asked,
    assert_drained,
    lone_run,
    prompts,
    run_all,
)

pytestmark = pytest.mark.skipif(not compat.HAS_MTP, reason="transformers has no `MtpModel`")

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 24}
CONFIG = {"block_size": 8}
PAGED = {"cache_implementation": "paged", "cache_config": CONFIG}
MTP = {"use_mtp": True}
WORDS = 20  # the vocabulary


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("mtp")


@pytest.fixture(autouse=True)
def always_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes drafts worthwhile whatever the step times on this machine."""
    monkeypatch.setattr(StepCosts, "price", lambda *args: 0.05)


SIZES: dict[str, Any] = {
    **dict(vocab_size=WORDS, hidden_size=64, intermediate_size=96, moe_intermediate_size=32),
    **dict(num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2),
    **dict(num_experts_per_tok=2, max_position_embeddings=2048, pad_token_id=0, eos_token_id=None),
}
PLAIN: dict[str, Any] = {"head_dim": 16}
GLM: dict[str, Any] = {"n_routed_experts": 4, "first_k_dense_replace": 1}
LATENTS: dict[str, Any] = {
    **dict(q_lora_rank=None, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16),
    **dict(v_head_dim=16, num_key_value_heads=4, n_group=1, topk_group=1),
}
WINDOWS = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 11}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "glm": ("Glm4Moe", {**PLAIN, **GLM}),
    "deepseek": ("DeepseekV3", {**GLM, **LATENTS}),
    # the head looks back a few tokens
    "mellum": ("Mellum", {**PLAIN, **WINDOWS, "num_experts": 4}),
}
MELLUM_NAMES = {
    "0.eh_proj": "mtp.fc",
    "0.enorm": "mtp.pre_fc_norm_embedding",
    "0.hnorm": "mtp.pre_fc_norm_hidden",
    "0.post_norm": "mtp.norm",
}


def name_in_checkpoint(kind: str, name: str) -> str:
    """Of a tensor of `MtpModel.layers`."""
    if kind != "mellum":
        number, rest = name.split(".", 1)
        return f"model.layers.{2 + int(number)}.{rest.removeprefix('mtp_block.')}"
    module, _, tensor = name.rpartition(".")
    return f"{MELLUM_NAMES[module]}.{tensor}" if module in MELLUM_NAMES else f"mtp.layers.{name}"


def checkpoint(folder: Path, kind: str, num_heads: int) -> Path:
    """A model whose next token depends mostly on the last one, and heads that know how: some drafts
    are right."""
    path = folder / f"{kind}-{num_heads}"
    name, sizes = KINDS[kind]
    config = getattr(transformers, f"{name}Config")(**SIZES | sizes, num_mtp_layers=num_heads)
    torch.manual_seed(0)
    model = getattr(transformers, f"{name}ForCausalLM")(config).float().eval()
    heads = compat.MtpModel(model, num_heads).float()
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *heads.layers.named_parameters()]:
            if "norm" in name:
                parameter.fill_(1.0)
            elif "eh_proj" in name:
                parameter.copy_(0.03 * torch.randn(parameter.shape))
                parameter[:, :64] += torch.eye(64)
            elif "embed" in name or "lm_head" in name:
                parameter.copy_(torch.randn(parameter.shape))
            else:
                parameter.copy_(torch.randn(parameter.shape) * 0.2 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path)
    (file,) = path.glob("*.safetensors")
    tensors = heads.layers.state_dict().items()
    own = {name_in_checkpoint(kind, name): x.contiguous() for name, x in tensors}
    save_file({**load_file(file), **own}, file, metadata={"format": "pt"})
    return path


@functools.cache
def load(folder: Path, num_heads: int, kind: str = "glm") -> PreTrainedModel:
    kinds = getattr(transformers, f"{KINDS[kind][0]}ForCausalLM")
    model: Any = kinds.from_pretrained(checkpoint(folder, kind, num_heads)).eval()
    if kind != "mellum":  # the class names the layers of real sizes
        model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[2-9]\..*"]
    model.generation_config.pad_token_id = 0
    return model


def texts(*lengths: int, seed: int = 0) -> list[list[int]]:
    return [
        [3 + token % (WORDS - 3) for token in prompt] for prompt in prompts(*lengths, seed=seed)
    ]


def padded(*lengths: int) -> dict[str, torch.Tensor]:
    return models.left_padded(texts(*lengths))


class Watch:
    """Drafts of transformers' generator, and of ours, after each text. `test_sampled_rows` compares
    what depends on their scores."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.plain: dict[tuple[int, ...], list[int]] = {}
        self.ours: dict[tuple[int, ...], list[int]] = {}
        generator = candidate_generator.MTPCandidateGenerator
        theirs, propose = generator.get_candidates, MtpHeads.propose

        def get_candidates(own: Any, input_ids: Any, *args: Any, **kwargs: Any) -> Any:
            found = theirs(own, input_ids, *args, **kwargs)
            if drawn := found[0][0, input_ids.shape[1] :].tolist():
                self.plain[tuple(input_ids[0].tolist())] = drawn
            return found

        def drafts_of(heads: Any, wanted: Any) -> Any:
            found = propose(heads, wanted)
            for row, target, _ in wanted:
                drawn = row.sequence.token_ids[row.num_target_tokens :]
                self.ours[tuple(target.token_ids)] = drawn
            return found

        monkeypatch.setattr(generator, "get_candidates", get_candidates)
        monkeypatch.setattr(MtpHeads, "propose", drafts_of)

    def assert_same(self, least: int) -> None:
        """Compares texts drafted by both: transformers verifies all drafts, and continues after
        other texts."""
        both = self.plain.keys() & self.ours.keys()
        assert len(both) >= least
        assert {text: self.ours[text] for text in both} == {text: self.plain[text] for text in both}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Watch:
    return Watch(monkeypatch)


@pytest.mark.slow_cases("cpu-*")
@pytest.mark.parametrize(
    ("kind", "num_heads"), [("glm", 1), ("glm", 3), ("deepseek", 2), ("mellum", 1)]
)
def test_a_batch_gives_plain_tokens_and_transformers_candidates(
    kind: str, num_heads: int, folder: Path, device: torch.device, watch: Watch
) -> None:
    model = models.put(load(folder, num_heads, kind), device)
    inputs = models.put(padded(5, 17, 9, 26), device)
    expected = model.generate(**inputs, **GREEDY)
    assert torch.equal(model.generate(**inputs, **GREEDY, **MTP, **PAGED), expected)
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "engine"
    assert 0 < route.num_accepted_tokens < route.num_draft_tokens
    for prompt in texts(5, 17, 9, 26):
        assert lone_run(model, prompt, GREEDY) == lone_run(model, prompt, {**GREEDY, **MTP})
    watch.assert_same(least=12)
    hf_paged.check_integrity(model)


@pytest.mark.slow
@pytest.mark.parametrize("num_heads", [1, 3])
def test_sampled_rows_draw_as_one_row_of_transformers_does(
    num_heads: int, folder: Path, watch: Watch
) -> None:
    """Except for a last token without a draft: there transformers proposes a draft that it cannot
    use."""
    model = load(folder, num_heads)
    options = {"do_sample": True, "temperature": 0.8, "top_k": 12, **MTP}
    asked = []
    with PagedEngine(model, PagedConfig(**CONFIG)) as engine:
        for row, text in enumerate(texts(*range(5, 21), 40)):
            own = {**options, "max_new_tokens": 9 + row % 4}
            asked.append((engine.add_request(text, own, seed=40 + row), text, own))
        results = run_all(engine)
        num_whole = 0
        for row, (name, text, own) in enumerate(asked):
            (expected,) = lone_run(model, text, own, seed=40 + row)
            is_whole = tuple(text + expected[:-1]) not in watch.plain
            num_whole += is_whole
            count = len(expected) - (not is_whole)
            assert results[name].token_ids[:count] == expected[:count]
        stats = engine.stats()
        assert num_whole and 0 < stats.num_accepted_tokens < stats.num_draft_tokens
        watch.assert_same(least=20)
        assert_drained(engine)


@pytest.mark.slow
@pytest.mark.parametrize("preemption", ["recompute", "swap"])
def test_beside_others_with_few_blocks_and_all_options(preemption: str, folder: Path) -> None:
    modes = ["greedy", "greedy_eos", "max_length", "min_new_tokens", "beams"]
    config = PagedConfig(**CONFIG, num_blocks=16, max_num_batched_tokens=24, preemption=preemption)
    with PagedEngine(load(folder, 2), config) as engine:
        asked = Asked(engine)
        for number, text in enumerate(texts(5, 17, 9, 26, 12, 30, 8)):
            mode = modes[number % len(modes)]
            options = MODES[mode]
            if "eos_token_id" in options:
                options = {**options, "eos_token_id": [4, 11]}
            mtp = {} if mode == "beams" or number == 5 else MTP
            name = engine.add_request(text, {**options, **mtp})
            asked.asked[name] = text, options, None
        asked.check()
        stats = engine.stats()
        assert stats.num_preemptions and 0 < stats.num_accepted_tokens <= stats.num_draft_tokens


@pytest.mark.slow
def test_prompts_in_parts_and_prefixes_have_hidden_states(folder: Path, watch: Watch) -> None:
    """Drafts after cached tokens are the same; blocks cached by rows without heads have no hidden
    states."""
    model = load(folder, 2)

    def ask(engine: PagedEngine, text: list[int], num_hits: int) -> None:
        (result,) = engine.generate([text], {**GREEDY, **MTP})
        assert result.token_ids == lone_run(model, text, GREEDY)[0]
        assert result.num_prefix_hit_tokens == num_hits
        lone_run(model, text, {**GREEDY, **MTP})
        assert_drained(engine)

    with PagedEngine(model, PagedConfig(**CONFIG, max_num_batched_tokens=16)) as engine:
        for text in texts(17, 41, 61):
            ask(engine, text, 0)
    (document,), endings = texts(40), texts(3, 5, seed=7)
    with PagedEngine(model, PagedConfig(**CONFIG)) as engine:
        engine.generate([document + endings[0]], GREEDY)
        for ending, num_hits in zip([*endings, endings[0]], (0, 40, 40)):
            ask(engine, document + ending, num_hits)
    watch.assert_same(least=16)


@pytest.mark.slow
@pytest.mark.parametrize("captures", [False, True])
def test_recorded_steps_keep_hidden_states(
    captures: bool, folder: Path, watch: Watch, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Calls share a memory and recordings: with hidden states, and without."""
    model = load(folder, 2)
    # cached blocks keep their memory, and graphs
    monkeypatch.setattr(batch_call, "MIN_CACHED_TOKENS", 0)
    config = {"cache_implementation": "paged", "cache_config": {**CONFIG, "capture": captures}}
    hf_paged.free(model)
    options = {**GREEDY, "max_new_tokens": 40}
    for lengths, own in (
        ((7, 8), {"max_new_tokens": 3, **MTP}),
        ((30, 12, 5, 6, 7, 8, 9, 10), {}),
        ((9, 21), MTP),
    ):
        given = {**padded(*lengths), **options, **own}
        out = model.generate(**given, **config)
        route = hf_paged.last_route(model)
        assert torch.equal(out, model.generate(**{**given, "use_mtp": None}))
    assert route is not None and (route.num_captured_steps > 0) == captures
    for text in texts(9, 21):
        lone_run(model, text, {**options, **MTP})
    watch.assert_same(least=10)


@pytest.mark.slow_cases("llama", "files")
@pytest.mark.parametrize("kind", ["llama", "files", "lm_head", "embed_tokens"])
def test_what_has_no_heads_of_its_own_says_so(kind: str, folder: Path) -> None:
    """A model without them, one without its files, and one with adapters on what heads share."""
    model: Any = models.get("llama")
    message = "num_mtp_layers"
    if kind == "files":
        model = type(load(folder, 1))(load(folder, 1).config).eval()
        message = model.config.name_or_path = str(folder / "nowhere")
    elif kind != "llama":
        peft = pytest.importorskip("peft")
        config = peft.LoraConfig(r=2, target_modules=[kind, "q_proj"])
        model = peft.get_peft_model(copy.deepcopy(load(folder, 1)), config)
        message = "embeddings or `lm_head` have an adapter"
    with PagedEngine(model, PagedConfig(**CONFIG)) as engine:
        with pytest.raises(Exception, match=message):
            engine.add_request([5, 6], MTP)
        assert not engine.has_unfinished
        assert engine.generate([[5, 6]], {**GREEDY, "use_mtp": False})[0].error is None
        assert_drained(engine)
