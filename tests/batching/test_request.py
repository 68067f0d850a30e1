"""A request's properties that describe its sequences."""

from __future__ import annotations

from hf_paged.batching.request import Request, Sequence, Status


def test_counts_what_lacks_keys_and_values() -> None:
    sequence = Sequence([1, 2, 3])
    sequence.num_computed_tokens = 2
    sequence.token_ids.append(4)
    assert (sequence.num_tokens, sequence.num_to_compute) == (4, 2)
    assert repr(sequence) == "Sequence(2 of 4 tokens computed)"


def test_rows_that_are_still_to_be_forked_are_open() -> None:
    request = Request("a", [Sequence([1, 2]), Sequence([1, 2, 3])], max_num_tokens=9, num_rows=4)
    assert (request.num_rows, request.num_open_rows, request.num_prompt_tokens) == (4, 4, 2)
    assert Request("b", [Sequence([1]), Sequence([2])], max_num_tokens=9).num_rows == 2


def test_adopted_sequences_know_their_place() -> None:
    request = Request("a", [Sequence([1])], max_num_tokens=9, num_rows=3)
    request.adopt([Sequence([1, 2]), Sequence([1, 3])])
    assert [sequence.index for sequence in request.sequences] == [0, 1, 2]
    assert all(sequence.request is request for sequence in request.sequences)


def test_awaits_tokens_until_an_open_sequence_gets_one() -> None:
    request = Request("a", [Sequence([1]), Sequence([1])], max_num_tokens=9)
    assert not request.awaits_tokens
    for sequence in request.sequences:
        sequence.logits_length = 1
    assert request.awaits_tokens
    request.sequences[1].token_ids.append(5)
    assert not request.awaits_tokens
    request.sequences[1].is_finished = True
    assert request.awaits_tokens and request.open_sequences == [request.sequences[0]]


def test_status() -> None:
    request = Request("a", [Sequence([1])], max_num_tokens=9)
    assert request.status is Status.WAITING and not request.is_finished and not request.is_swapped
    request.sequences[0].swapped = object()
    request.status = Status.FINISHED
    assert request.is_finished and request.is_swapped
