"""Finds the stop strings of an engine's requests in the text of a row's last tokens. `sample.py`
and the optional package `beams` call it."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

import torch
from torch import Tensor
from transformers import StoppingCriteria

from ... import compat

_TokenText = Any  # `str`, or `bytes` for tokenizers whose tokens may be parts of characters

# by tokenizer: the number of tokens, their names, and the texts of tokens that have occurred
_vocabularies: weakref.WeakKeyDictionary[
    Any, tuple[int, dict[int, str], dict[int, _TokenText | None]]
]
_vocabularies = weakref.WeakKeyDictionary()


class StopStrings(StoppingCriteria):
    """Ends the same rows as transformers' `StopStringCriteria`, which builds a table of all tokens,
    strings and positions. For long strings, the table takes minutes and gigabytes; `StopStrings`
    caches only the texts of tokens that have occurred. Raises transformers' error for tokenizers
    whose tokens have no texts."""

    def __init__(self, tokenizer: Any, stop_strings: str | list[str]) -> None:
        if isinstance(stop_strings, str):
            stop_strings = [stop_strings]
        self.stop_strings = tuple(stop_strings)
        self._strings = compat.stop_texts(tokenizer, self.stop_strings)
        # how many of the last tokens are read; `StopStringCriteria` has the same attribute
        self.maximum_token_len = max(map(len, self._strings))
        self._tokenizer = tokenizer
        self._names_by_token, self._texts_by_token = _vocabulary(tokenizer)
        # raises for tokenizers whose tokens have no texts
        first = next(iter(self._names_by_token), -1)
        self._text(first)

    def __call__(self, input_ids: Tensor, scores: Any = None, **kwargs: Any) -> Tensor:
        are_hits = self.hits(input_ids.tolist())
        return torch.tensor(are_hits, device=input_ids.device)

    def hits(self, rows: list[list[int]]) -> list[bool]:
        """Returns, for each row, whether its last token completes a stop string."""
        return [self._is_hit(tokens) for tokens in rows]

    def _is_hit(self, tokens: list[int]) -> bool:
        last = self._text(tokens[-1])
        if last is None:  # a token without a text completes only an empty stop string
            return not all(self._strings)
        strings = [string for string in self._strings if string[-1:] in last]
        if not strings:
            return False
        earlier = map(self._text, reversed(tokens[-self.maximum_token_len : -1]))
        parts = [last, *itertools.takewhile(lambda text: text is not None, earlier)]
        tail = last[:0].join(reversed(parts))
        start = len(tail) - len(last)
        return any(tail.find(string, max(0, start - len(string) + 1)) >= 0 for string in strings)

    def _text(self, token: int) -> _TokenText | None:
        """Returns the text of a token; `None` for ids without a text, across which no stop string
        matches."""
        if token not in self._texts_by_token:
            name = self._names_by_token.get(token)
            text = None
            if name is not None:
                text = compat.token_text(self._tokenizer, name, token)
            self._texts_by_token[token] = text
        return self._texts_by_token[token]


def _vocabulary(tokenizer: Any) -> tuple[dict[int, str], dict[int, _TokenText | None]]:
    """Returns two dicts by token id, which all requests with this tokenizer share: the names of its
    tokens, and the texts of tokens that have occurred."""
    size = len(tokenizer)
    entry = _vocabularies.get(tokenizer)
    if entry is None or entry[0] != size:  # new, or tokens were added
        names = {token: name for name, token in tokenizer.get_vocab().items()}
        entry = _vocabularies[tokenizer] = (size, names, {})
    return entry[1:]
