"""Log-probabilities of new tokens, alternatives and prompt tokens, against those from transformers'
outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from tests.support.engine_helpers import run_all
from tests.support.models import get, put, token_ids

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.5, "min_new_tokens": 8},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "num_return_sequences": 3},
    "beams": {"do_sample": False, "num_beams": 4, "num_return_sequences": 2},
    "beam sampled": {"do_sample": True, "num_beams": 4, "temperature": 0.7},
}
OUTPUTS = {"output_scores": True, "output_logits": True, "return_dict_in_generate": True}
TOP = 4
ALL = {"return_logprobs": True, "top_logprobs": TOP}


def _close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected.float().cpu(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "t5"])
@pytest.mark.parametrize("mode", sorted(OPTIONS))
def test_new_tokens_and_their_alternatives(name: str, mode: str, device: torch.device) -> None:
    model, prompt = put(get(name), device), token_ids(1, 21, seed=3).to(device)
    options = {**OPTIONS[mode], "max_new_tokens": 8}
    torch.manual_seed(5)
    plain = model.generate(prompt, **options, **OUTPUTS)
    parents = plain.get("beam_indices")
    processed = model.compute_transition_scores(
        plain.sequences, plain.scores, parents, normalize_logits=parents is None
    )
    with hf_paged.PagedEngine(model) as engine:
        for i, asked in enumerate(({}, {"return_logprobs": True}, {**ALL, "top_logprobs": 2}, ALL)):
            engine.add_request(prompt[0], options, request_id=i, seed=5, **asked)
        results = run_all(engine)
    for i, width in enumerate((None, None, 2)):  # mixed with requests that ask for less
        for sequence in results[i].sequences:
            assert width == (sequence.top_logprobs and len(sequence.top_logprobs[-1]))
    if parents is not None:
        _close([sequence.score for sequence in results[0].sequences], plain.sequences_scores)
    for row, sequence in enumerate(results[3].sequences):
        assert sequence.token_ids == plain.sequences[row, -8:].tolist()
        _close([chosen for _, chosen in sequence.logprobs], processed[row])
        for step, (token, found) in enumerate(zip(sequence.token_ids, sequence.top_logprobs)):
            parent = row if parents is None else parents[row, step]
            raw = plain.logits[step][parent].log_softmax(-1)
            _close(sequence.logprobs[step][0], raw[token])
            best, ids = raw.topk(TOP)
            assert [token for token, _, _ in found] == ids.tolist()
            _close([own for _, own, _ in found], best)
            if parents is None:
                chosen = plain.scores[step][row].log_softmax(-1)[ids]
                _close([chosen for _, _, chosen in found], chosen)


CONFIGS = {
    "default": {},
    "chunks": {"max_num_batched_tokens": 16},
    "recompute": {"num_blocks": 12, "preemption": "recompute"},
    "swap": {"num_blocks": 12, "preemption": "swap"},
    "single tokens": {"max_chunk_tokens": 1},
}


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *(("llama", kind) for kind in CONFIGS),
        *(("mistral", kind) for kind in ("default", "recompute")),
        *(("gpt2", kind) for kind in ("swap", "single tokens")),
    ],
)
def test_prompts(name: str, kind: str) -> None:
    model, config = get(name), CONFIGS[kind]
    prompts = [token_ids(1, length, seed=length) for length in (37, 21, 2, 1, 30)]
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 9}
    with hf_paged.PagedEngine(model, {"block_size": 8, **config}) as engine:
        engine.generate([prompts[0][0]], {"max_new_tokens": 2})  # caches its prefix
        asked = {"top_logprobs": 3, "prompt_logprobs": True}
        for i, prompt in enumerate(prompts):
            given = {**asked, "return_logprobs": i % 2 == 0, "seed": i}
            engine.add_request(prompt[0], options, request_id=i, **given)
        results = run_all(engine)
        if "num_blocks" in config:
            assert engine.stats().num_preemptions
    for i, prompt in enumerate(prompts):
        result = results[i]
        assert result.error is None and result.num_prefix_hit_tokens == 0
        with torch.no_grad():
            expected = model(prompt).logits[0, :-1].log_softmax(-1)
        assert result.prompt_logprobs[0] is None and result.prompt_top_logprobs[0] == []
        assert len(result.prompt_logprobs) == len(result.prompt_top_logprobs) == prompt.shape[1]
        if prompt.shape[1] == 1:
            continue
        _close(result.prompt_logprobs[1:], expected.gather(1, prompt[0, 1:, None])[:, 0])
        best, tokens = expected.topk(3)
        found = torch.tensor(result.prompt_top_logprobs[1:])
        assert torch.equal(found[..., 0].long(), tokens)
        _close(found[..., 1].tolist(), best)


def test_what_is_refused() -> None:
    prompt = token_ids(1, 8)[0]
    a_bool = "`return_logprobs` is 5: it must be True or False.*`top_logprobs`"
    with hf_paged.PagedEngine(get("llama")) as engine:
        for given, message in (
            ({"return_logprobs": 5}, a_bool),
            ({"top_logprobs": 2}, "it needs `return_logprobs=True`"),
            ({"top_logprobs": -1, "return_logprobs": True}, "whole number from 0"),
            ({"prompt_logprobs": 1}, "`prompt_logprobs` is 1"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.add_request(prompt, **given)
        asked = {"return_logprobs": True, "top_logprobs": 10**6}
        (result,) = engine.generate([prompt], {"max_new_tokens": 1}, **asked)
        assert len(result.sequences[0].top_logprobs[0]) == 128  # the whole vocabulary
    with hf_paged.PagedEngine(get("qwen3_next")) as engine:
        with pytest.raises(ValueError, match="packed forwards"):
            engine.add_request(prompt, prompt_logprobs=True)
    assert not engine.has_unfinished
