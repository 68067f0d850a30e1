"""Where waiting prompts part, beside a comparison of all pairs; the cost of a request does not
depend on the others."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

from hf_paged.batching.request import Request, Sequence
from hf_paged.rectangles.preemption import WaitingPrompts

SIZE = 4


def request(tokens: list[int], namespace: Any = None) -> Request:
    return Request(0, [Sequence(tokens)], 1000, namespace=namespace)


def num_shared(one: Request, other: Request) -> int:
    """Tokens in the blocks that two prompts have in common, each without its last token."""
    first, second = (each.sequences[0].token_ids[:-1] for each in (one, other))
    divergence = next(
        (n for n, pair in enumerate(zip(first, second)) if pair[0] != pair[1]),
        min(len(first), len(second)),
    )
    return divergence // SIZE * SIZE if one.namespace == other.namespace else 0


@pytest.mark.parametrize("seed", range(20))
def test_prompts_part_where_a_comparison_of_all_pairs_finds_it(seed: int) -> None:
    draw, prompts = random.Random(seed), WaitingPrompts(SIZE)
    waiting: list[Request] = []
    for _ in range(60):
        if waiting and draw.random() < 0.4:
            gone = waiting.pop(draw.randrange(len(waiting)))
            prompts.discard(gone)
            prompts.discard(gone)
        else:
            tokens: list[int] = []
            if waiting and draw.random() < 0.8:
                tokens = draw.choice(waiting).sequences[0].token_ids[: draw.randrange(1, 40)]
            tokens = [*tokens, *draw.choices(range(3), k=draw.randrange(1, 12))]
            waiting.append(request(tokens, draw.choice(["one", "two"])))
            prompts.add(waiting[-1])
        for each in waiting:
            expected = {num_shared(each, other) for other in waiting if other is not each} - {0}
            assert prompts.divergences(each) == sorted(expected)
    assert len(prompts) == len(waiting)
    for each in waiting:
        prompts.discard(each)
    assert not len(prompts) and not prompts._counts


def test_a_request_costs_the_same_however_many_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks that are looked at, where all prompts have a beginning in common."""
    num_blocks = 0
    blocks = WaitingPrompts._hash_prefixes

    def counted(*arguments: Any) -> Iterator[Any]:
        nonlocal num_blocks
        for found in blocks(*arguments):
            num_blocks += 1
            yield found

    monkeypatch.setattr(WaitingPrompts, "_hash_prefixes", counted)
    common, costs = list(range(10 * SIZE)), []
    for count in (10, 1000):
        prompts, num_blocks = WaitingPrompts(SIZE), 0
        waiting = [request([*common, n, *[7] * 30 * SIZE]) for n in range(count)]
        for each in waiting:
            prompts.add(each)
        for each in waiting:
            prompts.divergences(each)
            prompts.discard(each)
        costs.append(num_blocks / count)
    assert max(costs) == 10 + 30 and costs[1] == costs[0]
