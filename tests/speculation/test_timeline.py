"""The timeline tells of verified drafts."""

from __future__ import annotations

from hf_paged import PagedEngine
from hf_paged.tools.timeline import Activity
from tests.support import models
from tests.support.engine_helpers import prompts


def test_verified_drafts_are_told_by_request_and_step() -> None:
    options = {"do_sample": False, "max_new_tokens": 20}
    with PagedEngine(models.get("llama"), {"block_size": 8}) as engine:
        results = engine.generate(
            prompts(9, 5, 12), options, assistant_model=models.get_assistant("llama")
        )
        told, intervals = engine.timeline.verifications(), engine.timeline.intervals()
    assert any(each.num_accepted_tokens for each in told)
    for number, result in enumerate(results):
        own = [each for each in told if each.number == number]
        assert len(own) == result.num_drafts
        assert sum(each.num_draft_tokens for each in own) == result.num_draft_tokens
        assert sum(each.num_accepted_tokens for each in own) == result.num_accepted_tokens
        assert len({each.step for each in own}) == len(own)
        [decode] = [
            each for each in intervals if each.number == number and each.activity is Activity.DECODE
        ]
        for each in own:
            assert decode.first_step <= each.step < decode.end_step
            assert 0 <= each.num_accepted_tokens <= each.num_draft_tokens
            assert decode.start <= each.start <= each.end <= decode.end
