"""What one step computes, as columns."""

from __future__ import annotations

from hf_paged.batching.request import Request, Sequence
from hf_paged.plan import StepPlan


def computed(name: str, length: int, count: int) -> Sequence:
    """A row of so many tokens, the first `count` of which are computed."""
    sequence = Sequence(list(range(length)))
    Request(name, [sequence], length + 8)
    sequence.num_computed_tokens = count
    return sequence


def test_a_part_of_a_plan_is_the_plan_of_its_rows() -> None:
    decode, drafted, chunk = computed("a", 5, 4), computed("b", 7, 6), computed("c", 9, 0)
    drafted.draft = [1, 2]
    rows = [(decode, 1), (drafted, 3), (chunk, 6)]
    plan = StepPlan.of(rows)
    assert (plan.starts, plan.counts, plan.num_logits) == ([4, 6, 0], [1, 3, 6], [1, 3, 0])
    for places in ([0], [1], [2], [0, 2], [1, 0], [0, 1, 2]):
        part, own = plan.select(places), StepPlan.of([rows[place] for place in places])
        for name in ("sequences", "starts", "counts", "num_logits", "num_decodes"):
            assert getattr(part, name) == getattr(own, name), name
        assert (part.has_drafts, part.has_chunks) == (own.has_drafts, own.has_chunks)
