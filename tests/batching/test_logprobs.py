"""Log-probabilities of new tokens, alternatives and prompt tokens, against those from transformers'
outputs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import hf_paged
from tests.support.models import build, get, put, token_ids

OPTIONS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "penalty": {"do_sample": False, "repetition_penalty": 1.5, "min_new_tokens": 8},
    "sampled": {"do_sample": True, "temperature": 0.7, "top_k": 20, "num_return_sequences": 3},
}
TOP = 4


def _close(found: Any, expected: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found), expected.float().cpu(), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("name", ["llama", "qwen3_next", "t5"])
@pytest.mark.parametrize("mode", sorted(OPTIONS))
def test_new_tokens_and_their_alternatives(name: str, mode: str, device: torch.device) -> None:
    model, prompt = put(get(name), device), token_ids(1, 21, seed=3).to(device)
    options = {**OPTIONS[mode], "max_new_tokens": 8}
    torch.manual_seed(5)
    plain = model.generate(
        prompt, **options, output_scores=True, output_logits=True, return_dict_in_generate=True
    )
    processed = model.compute_transition_scores(
        plain.sequences, plain.scores, normalize_logits=True
    )
    raw = model.compute_transition_scores(plain.sequences, plain.logits, normalize_logits=True)
    with hf_paged.PagedEngine(model) as engine:
        for i in range(3):  # mixed with requests with and without log-probabilities
            engine.add_request(
                prompt[0, : 5 + i], options, seed=i, return_logprobs=i > 0, top_logprobs=2 * (i > 1)
            )
        engine.add_request(
            prompt[0], options, request_id="r", seed=5, return_logprobs=True, top_logprobs=TOP
        )
        results = {}
        while engine.has_unfinished:
            results |= {
                out.request_id: out.result for out in engine.step() if out.result is not None
            }
    result = results.pop("r")
    widths = [
        None if s.top_logprobs is None else len(s.top_logprobs[-1])
        for r in results.values()
        for s in r.sequences
    ]
    rows = len(result.sequences)
    assert widths == [None] * 2 * rows + [2] * rows
    for row, sequence in enumerate(result.sequences):
        assert sequence.token_ids == plain.sequences[row, -8:].tolist()
        _close(sequence.logprobs, torch.stack([raw[row], processed[row]], dim=-1))
        for step, found in enumerate(sequence.top_logprobs):
            best, ids = plain.logits[step][row].log_softmax(-1).topk(TOP)
            assert [token for token, _, _ in found] == ids.tolist()
            _close([own for _, own, _ in found], best)
            _close([chosen for _, _, chosen in found], plain.scores[step][row].log_softmax(-1)[ids])


def test_beams() -> None:
    model, prompt = get("llama"), token_ids(1, 13)
    options = {"num_beams": 4, "num_return_sequences": 2, "max_new_tokens": 7, "do_sample": False}
    plain = model.generate(
        prompt, **options, output_scores=True, output_logits=True, return_dict_in_generate=True
    )
    expected = model.compute_transition_scores(plain.sequences, plain.scores, plain.beam_indices)
    with hf_paged.PagedEngine(model) as engine:
        (result,) = engine.generate([prompt[0]], options, return_logprobs=True, top_logprobs=TOP)
    for row, sequence in enumerate(result.sequences):
        assert sequence.token_ids == plain.sequences[row, 13:].tolist()
        _close([processed for _, processed in sequence.logprobs], expected[row])
        for step, found in enumerate(sequence.top_logprobs):
            logits = plain.logits[step][plain.beam_indices[row, step]]
            best, ids = logits.log_softmax(-1).topk(TOP)
            assert [token for token, _, _ in found] == ids.tolist()
            _close([own for _, own, _ in found], best)


def _prompt_logprobs(model: Any, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt).logits[0, :-1].log_softmax(-1)


@pytest.mark.parametrize("name", ["llama", "mistral", "gpt2"])
@pytest.mark.parametrize(
    "config",
    [
        {},
        {"max_num_batched_tokens": 16},
        {"num_blocks": 12, "preemption": "recompute"},
        {"num_blocks": 12, "preemption": "swap"},
        {"max_chunk_tokens": 1},
    ],
    ids=str,
)
def test_prompts(name: str, config: dict[str, Any]) -> None:
    model = get(name)
    prompts = [token_ids(1, length, seed=length) for length in (37, 21, 2, 1, 30)]
    options = {"do_sample": True, "num_return_sequences": 2, "max_new_tokens": 9}
    with hf_paged.PagedEngine(model, {"block_size": 8, **config}) as engine:
        engine.generate([prompts[0][0]], {"max_new_tokens": 2})  # caches its prefix
        ids = [
            engine.add_request(
                prompt[0],
                options,
                return_logprobs=i % 2 == 0,
                top_logprobs=3,
                prompt_logprobs=True,
                seed=i,
            )
            for i, prompt in enumerate(prompts)
        ]
        other = engine.add_request(prompts[0][0], options, seed=0)
        results = {}
        while engine.has_unfinished:
            results |= {
                out.request_id: out.result for out in engine.step() if out.result is not None
            }
        engine.check_integrity()
        if "num_blocks" in config:
            assert engine.stats().num_preemptions
    assert results[other].prompt_logprobs is None and results[other].prompt_top_logprobs is None
    assert results[other].sequences[0].token_ids == results[ids[0]].sequences[0].token_ids
    for name, prompt in zip(ids, prompts):
        result = results[name]
        assert result.error is None and result.num_prefix_hit_tokens == 0
        expected = _prompt_logprobs(model, prompt)
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
    with hf_paged.PagedEngine(build("llama")) as engine:
        for given, message in (
            (
                {"return_logprobs": 5},
                "`return_logprobs` is 5: it must be True or False.*`top_logprobs`",
            ),
            ({"top_logprobs": 2}, "it needs `return_logprobs=True`"),
            ({"top_logprobs": -1, "return_logprobs": True}, "whole number from 0"),
            ({"prompt_logprobs": 1}, "`prompt_logprobs` is 1"),
        ):
            with pytest.raises(ValueError, match=message):
                engine.add_request(prompt, **given)
        (result,) = engine.generate(
            [prompt], {"max_new_tokens": 1}, return_logprobs=True, top_logprobs=10**6
        )
        assert len(result.sequences[0].top_logprobs[0]) == 128  # the whole vocabulary
    with (
        hf_paged.PagedEngine(get("qwen3_next")) as engine,
        pytest.raises(ValueError, match="packed forwards"),
    ):
        engine.add_request(prompt, prompt_logprobs=True)
    assert not engine.has_unfinished


def test_nothing_is_recorded_without_being_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    from hf_paged.batching.decoding import scores

    def fail(*_: Any) -> Any:
        raise AssertionError("recorded")

    monkeypatch.setattr(scores.PromptLogprobs, "record", fail)
    for name in ("alternatives", "logprobs_of"):
        monkeypatch.setattr(f"hf_paged.batching.decoding.sampler.{name}", fail)
    with hf_paged.PagedEngine(get("llama")) as engine:
        results = engine.generate(
            [token_ids(1, 30)[0]] * 2, {"max_new_tokens": 5, "do_sample": True}
        )
    assert [result.error for result in results] == [None, None]
