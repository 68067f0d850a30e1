"""An engine runs on parts that its caller gives it (`hf_paged.seams.EngineParts`): one class each,
and no other change."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Any

import pytest

from hf_paged import PagedConfig, PagedEngine, rooms
from hf_paged.batching import admission, engine_core, factory
from hf_paged.batching.decoding.base import Draft
from hf_paged.batching.generation import Generation
from hf_paged.rooms import RoomMissingError
from hf_paged.seams import Drafter, EngineParts
from tests.support import models
from tests.support.engine_helpers import assert_drained, assert_same_as_lone, lone_run, prompts

GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 12}
CONFIG = PagedConfig(block_size=8)


class Toy(Drafter):
    """Drafts what comes next in one of these texts, moved on by `error` in the vocabulary."""

    def __init__(self, texts: list[list[int]], error: int) -> None:
        self.texts = texts
        self.error = error
        self.rows: dict[Generation, list[tuple[int, int]]] = {}  # tokens: drafted, accepted
        self.num_computed = 0

    def attach(self, generation: Generation) -> tuple[bool, Hashable]:
        ((request, _),) = generation.rows
        self.rows[generation] = []
        return False, request.namespace

    def detach(self, generation: Generation) -> None:
        self.rows.pop(generation, None)

    def propose(
        self, num_embeddings: int, num_rows: int
    ) -> Iterator[tuple[Generation, Draft | Exception]]:
        assert num_embeddings == models.VOCAB_SIZE
        for generation in list(self.rows):
            assert generation.is_single
            sequence = generation.sequence_to_draft
            if sequence is not None:
                yield generation, self.draft(sequence.token_ids)

    def draft(self, token_ids: list[int]) -> Draft | Exception:
        length = len(token_ids)
        (text,) = (text for text in self.texts if text[:length] == token_ids)
        ahead = text[length:-1][:3]  # the step itself gives the last token
        return Draft([(token + self.error) % models.VOCAB_SIZE for token in ahead])

    def accepted(self, generation: Generation, num_draft_tokens: int, num_accepted: int) -> None:
        self.rows[generation].append((num_draft_tokens, num_accepted))

    def computed(self, num_tokens: int, seconds: float) -> None:
        self.num_computed += num_tokens

    def reclaim(self) -> bool:
        return False

    def change_weights(self) -> None:
        pass


def toys_of(make: Any) -> tuple[list[Any], EngineParts]:
    """The drafters that an engine with these parts makes, by `make`."""
    toys: list[Any] = []

    def drafter(*given: Any) -> Any:
        toys.append(make())
        return toys[-1]

    return toys, EngineParts(drafter=drafter)


@pytest.mark.parametrize("error", [0, 1])
def test_a_toy_drafter_changes_steps_and_no_tokens(error: int) -> None:
    model, texts = models.get("llama"), prompts(9, 14, 6)
    expected = [lone_run(model, text, GREEDY)[0] for text in texts]
    toys, parts = toys_of(lambda: Toy([a + b for a, b in zip(texts, expected)], error))
    with PagedEngine(model, CONFIG, parts=parts) as engine:
        results = engine.generate(texts, GREEDY)
        stats = engine.stats()
        assert_drained(engine)
    assert [result.token_ids for result in results] == expected
    (toy,) = toys
    assert not toy.rows and toy.num_computed
    is_right = not error
    assert stats.num_draft_tokens > 0
    assert stats.num_accepted_tokens == (stats.num_draft_tokens if is_right else 0)
    assert (stats.num_steps < 8) == is_right
    assert sum(result.num_drafts for result in results) == stats.num_drafts


def test_a_toy_drafter_beside_beams_samples_and_others() -> None:
    model, texts = models.get("llama"), prompts(9, 14, 6, 11)
    asked = [
        GREEDY,
        {**GREEDY, "num_beams": 3},
        {**GREEDY, "do_sample": True},
        {**GREEDY, "do_sample": True, "num_return_sequences": 2},
    ]
    alone = [lone_run(model, text, options, seed=5) for text, options in zip(texts, asked)]
    drafted = [texts[0] + alone[0][0], texts[2] + alone[2][0]]
    _, parts = toys_of(lambda: Toy(drafted, 0))
    with PagedEngine(model, CONFIG, parts=parts) as engine:
        ids = [engine.add_request(text, own, seed=5) for text, own in zip(texts, asked)]
        results: dict[Any, Any] = {}
        while engine.has_unfinished:
            results |= {out.request_id: out.result for out in engine.step() if out.result}
        assert engine.stats().num_accepted_tokens > 0
        assert_drained(engine)
    for name, tokens, options in zip(ids, alone, asked):
        assert_same_as_lone(tokens, results[name], options, name)


class Failing(Toy):
    """Has an error for rows of some lengths."""

    def draft(self, token_ids: list[int]) -> Draft | Exception:
        if len(token_ids) % 5 == 0:
            return ValueError("no draft")
        return super().draft(token_ids)


def test_an_error_of_a_drafter_ends_its_row_alone() -> None:
    model, texts = models.get("llama"), prompts(4, 6)
    options = {**GREEDY, "max_new_tokens": 3}
    expected = [lone_run(model, text, options)[0] for text in texts]
    _, parts = toys_of(lambda: Failing([a + b for a, b in zip(texts, expected)], 1))
    with PagedEngine(model, CONFIG, parts=parts) as engine:
        failed, whole = engine.generate(texts, options)
        assert_drained(engine)
    assert isinstance(failed.error, ValueError) and failed.token_ids == expected[0][:1]
    assert whole.error is None and whole.token_ids == expected[1]


def test_no_drafter_is_made_for_a_call_that_asks_for_none() -> None:
    model = models.get("llama")
    with PagedEngine(model, CONFIG) as engine:
        engine.generate(prompts(9), GREEDY)
        assert engine._core.loop is not None and engine._core.loop.drafting.drafter is None


@pytest.mark.parametrize(
    ("option", "config", "options", "generation"),
    [
        ("speculation", {"speculation": "ngram"}, {}, {}),
        ("prompt_lookup_num_tokens", {}, {}, {"prompt_lookup_num_tokens": 3}),
        ("use_mtp", {}, {}, {"use_mtp": True}),
        ("assistant_model", {}, {"assistant_model": "llama"}, {}),
        ("schema", {}, {"schema": "{}"}, {}),
    ],
)
def test_an_option_of_a_missing_room_names_both(
    option: str,
    config: dict[str, Any],
    options: dict[str, Any],
    generation: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = models.get("llama")
    monkeypatch.setattr(rooms, "is_installed", lambda name: False)
    monkeypatch.setattr(rooms, "room", rooms.room.__wrapped__)
    for module in (factory, admission, engine_core):
        monkeypatch.setattr(module, "room", rooms.room)
    if "assistant_model" in options:
        options = {"assistant_model": models.get_assistant("llama")}
    with PagedEngine(model, PagedConfig(block_size=8, **config)) as engine:
        with pytest.raises(RoomMissingError, match=f"`{option}`.* needs `hf_paged"):
            engine.add_request(prompts(9)[0], {**GREEDY, **generation}, **options)
        assert not engine.has_unfinished
