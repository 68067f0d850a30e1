"""Stop strings found in the text of tokens, against transformers' `StopStringCriteria`."""

from __future__ import annotations

import gc
import random
import weakref
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.generation.stopping_criteria import StopStringCriteria

import hf_paged
from hf_paged.batching import arguments
from hf_paged.batching.decoding.stop_strings import StopStrings
from tests.support import models as small

SPECIAL = ["<unk>", "<end>"]


LETTERS = [*"abcdefé", "ab", "ba", "aab", "abc", "cab", "def", "éa"]
SPACES = ["▁", "▁a", "▁ab"]
# a character in two tokens, and tokens of half of one
BYTES = [*"abcdef", "ab", "ba", "aab", "Ã", "©", "Ã©", "©a", "Ġ", "Ġa", "ĠÃ", "bĠ"]
FALLBACK = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
# kind -> tokens, decoder and what splits text
KINDS: dict[str, tuple[list[str], Any, Any]] = {
    "byte level": (
        BYTES,
        decoders.ByteLevel(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
    ),
    "byte fallback": (
        [*LETTERS, *SPACES, "<0xC3>", "<0xA9>", "<0x61>"],
        decoders.Sequence(FALLBACK),
        pre_tokenizers.Metaspace(),
    ),
    "metaspace": ([*LETTERS, *SPACES], decoders.Metaspace(), pre_tokenizers.Metaspace()),
    "word piece": (
        [*LETTERS, *("##" + piece for piece in LETTERS)],
        decoders.WordPiece(),
        pre_tokenizers.Whitespace(),
    ),
    # plain text; one of the tokens has none
    "joined": (
        [*LETTERS, "<nothing>"],
        decoders.Sequence([decoders.Replace("<nothing>", ""), decoders.Fuse()]),
        pre_tokenizers.Whitespace(),
    ),
}


def build(kind: str) -> PreTrainedTokenizerFast:
    pieces, decoder, splitter = KINDS[kind]
    # every other id has no token
    ids = {name: 2 * i for i, name in enumerate([*SPECIAL, *dict.fromkeys(pieces)])}
    is_words = kind == "word piece"
    model = models.WordPiece(ids, unk_token=SPECIAL[0]) if is_words else None
    made = Tokenizer(model or models.BPE(ids, [], unk_token=SPECIAL[0]))
    made.pre_tokenizer, made.decoder = splitter, decoder
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=made, unk_token=SPECIAL[0])
    tokenizer.add_special_tokens({"eos_token": SPECIAL[1]})
    return tokenizer


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", range(4))
def test_hits_are_those_of_transformers(kind: str, seed: int) -> None:
    tokenizer, draw = build(kind), random.Random(seed)
    ids = sorted(tokenizer.get_vocab().values())
    outside = [1, ids[-1] + 1, ids[-1] + 1000]  # ids without a token
    answers = set[bool]()
    for _ in range(40):
        strings = [
            "".join(draw.choices("aab cé", k=draw.randint(1, 6))) for _ in range(draw.randint(1, 3))
        ]
        strings += [SPECIAL[1]] * draw.randint(0, 1)
        try:
            theirs = StopStringCriteria(tokenizer, strings)
        except ValueError as error:  # no token can end any of them
            assert "unable to identify tokens" in str(error)
            continue
        ours = StopStrings(tokenizer, strings)
        assert ours.maximum_token_len == theirs.maximum_token_len
        pieces = [*ids, *ids, *draw.choices(ids, k=4) * 20, *outside]
        for length in (1, 2, 5, 9):
            rows = torch.tensor([[draw.choice(pieces) for _ in range(length)] for _ in range(60)])
            hits = ours(rows, None).tolist()
            assert hits == theirs(rows, None).tolist(), strings
            answers.update(hits)
    assert len(answers) == 2


def test_texts_go_with_their_tokenizer() -> None:
    """Those of tokens that are added later are seen."""
    tokenizer = build("metaspace")
    StopStrings(tokenizer, "ab").hits([[2, 4]])
    tokenizer.add_tokens(["xyz"])
    new = tokenizer.get_vocab()["xyz"]
    assert StopStrings(tokenizer, "yz").hits([[new]]) == [True]
    gone = weakref.ref(tokenizer)
    del tokenizer
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("name", ["llama", "t5"])  # ids; inputs
def test_the_longest_strings_make_no_table(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`StopStringCriteria` would take seconds and gigabytes for these, while other requests
    wait."""
    prompt = small.token_ids(1, 12)[0].tolist()
    options = {"max_new_tokens": 16, "do_sample": False, "eos_token_id": None}
    with hf_paged.PagedEngine(small.get(name), tokenizer=small.tokenizer()) as engine:
        (plain,) = engine.generate([prompt], options)
        stop = plain.text[6:10]
        monkeypatch.setattr(StopStringCriteria, "__init__", None)
        strings = [stop, "a" * (4096 - 62 - len(stop)), *"b" * 62]
        for config in ({**options, "stop_strings": strings}, {**options, "stop_strings": stop}):
            (result,) = engine.generate([prompt], config)
            assert result.error is None and result.finish_reason == "stop_string"
            assert stop in result.text and len(result.token_ids) < 16
            assert result.token_ids == plain.token_ids[: len(result.token_ids)]


def test_more_than_a_request_may_have_is_refused_unless_a_program_raises_the_limit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    no_strings, long = "non-empty list of strings", ["a" * 4097, ["a" * 2048, "b" * 2049]]
    with hf_paged.PagedEngine(small.get("llama"), tokenizer=small.tokenizer()) as engine:
        for value, message in [
            (["a"] * 65, "65 strings"),
            *((each, "4097 characters") for each in long),
            *((each, no_strings) for each in ([], ["a", 1], 7)),
        ]:
            with pytest.raises(ValueError, match=f"`stop_strings` .*{message}"):
                engine.add_request([5, 6], {"stop_strings": value})
        assert not engine.has_unfinished
        monkeypatch.setattr(arguments, "MAX_STOP_CHARACTERS", 5000)
        for value in long:
            assert engine.generate([[5, 6]], {"stop_strings": value, "max_new_tokens": 3})[0].text
