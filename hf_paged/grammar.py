"""Constrained decoding by JSON schema, regular expression or grammar, with xgrammar's token masks
(arXiv 2411.15100)."""

from __future__ import annotations

import importlib
import os
from collections import Counter
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessor, PreTrainedModel

from .batching.arguments import RequestOptions
from .config import shown
from .interrupts import is_interrupt
from .step import to_device

COMPILE_METHODS = {  # by option of a request: the method of xgrammar's compiler
    "schema": "compile_json_schema",
    "regex": "compile_regex",
    "grammar": "compile_grammar",
}
MAX_CHARACTERS = 1 << 16  # of a schema (as text), a regular expression or a grammar
CACHE_BYTES = 1 << 28  # size of an engine's LRU cache of compiled grammars


class NoTokenError(RuntimeError):
    """No token may follow under a request's `schema`, `regex` or `grammar`."""


class GrammarCompiler:
    """Compiles and caches the grammars of an engine's requests. Thread-safe."""

    def __init__(self) -> None:
        # (tokenizer, vocabulary size, their compiler)
        self._compiler: tuple[Any, int, Any] | None = None

    def processor(
        self,
        options: RequestOptions,
        tokenizer: Any,
        model: PreTrainedModel,
    ) -> GrammarProcessor:
        """Returns the logits processor for a request's `schema`, `regex` or `grammar`. Raises
        `ValueError` if several are set, if the constraint has a wrong type, is too long or cannot
        be compiled, or without a tokenizer that xgrammar can read; `ImportError` if xgrammar is not
        installed."""
        name, value = _constraint_of(options)
        if tokenizer is None:
            raise ValueError(
                f"`{name}` constrains text, but the engine has no tokenizer: make the engine with"
                " `tokenizer=`"
            )
        config = model.config.get_text_config(decoder=True)
        compiler = self._compiler_for(tokenizer, config.vocab_size)
        compile_value = getattr(compiler, COMPILE_METHODS[name])
        try:
            return GrammarProcessor(compile_value(value))
        except Exception as error:  # xgrammar raises several undocumented types
            if is_interrupt(error):
                raise
            raise ValueError(f"`{name}` cannot be compiled: {error}") from error

    def _compiler_for(self, tokenizer: Any, vocab_size: int) -> Any:
        cached_compiler = self._compiler
        if (
            cached_compiler is None
            or cached_compiler[0] is not tokenizer
            or cached_compiler[1] != vocab_size
        ):
            xgrammar = _xgrammar()
            try:
                info = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=vocab_size)
            except Exception as error:
                if is_interrupt(error):
                    raise
                raise ValueError(
                    f"xgrammar cannot read the tokenizer {type(tokenizer).__name__}: {error}"
                ) from error
            num_threads = max(1, (os.cpu_count() or 1) // 2)  # steps use the other cores
            compiler = xgrammar.GrammarCompiler(
                info,
                max_threads=num_threads,
                cache_limit_bytes=CACHE_BYTES,
            )
            cached_compiler = self._compiler = tokenizer, vocab_size, compiler
        return cached_compiler[2]


def _constraint_of(options: RequestOptions) -> tuple[str, Any]:
    """Returns the name and the value of a request's constraint. Raises `ValueError` for several
    constraints, for one that is too long, and for a `regex` or `grammar` that is not text."""
    values = {name: getattr(options, name) for name in COMPILE_METHODS}
    constraints = {name: value for name, value in values.items() if value is not None}
    if len(constraints) > 1:
        names = ", ".join(f"`{name}`" for name in constraints)
        raise ValueError(f"{names} exclude one another: pass only one of them")
    ((name, value),) = constraints.items()
    if name != "schema" and not isinstance(value, str):
        raise ValueError(f"`{name}` is {shown(value)}: it must be text")
    length = len(value) if isinstance(value, str) else len(repr(value))
    if length > MAX_CHARACTERS:
        raise ValueError(
            f"`{name}` has {length} characters: a request may have at most {MAX_CHARACTERS}"
            f" (`MAX_CHARACTERS` in `{__name__}`), since compiling a longer one takes too long"
        )
    return name, value


class GrammarProcessor(LogitsProcessor):
    """Masks the tokens that may not follow, for each row of one request. Rows may be beams, which
    are reordered, so a row's matcher is looked up by the row's tokens. A matcher that several rows
    continue is forked; a row without a matcher gets a new one, which replays the row's tokens."""

    def __init__(self, compiled: Any) -> None:
        self._compiled = compiled
        self._matcher_type = _xgrammar().GrammarMatcher
        self._vocab_size = compiled.tokenizer_info.vocab_size
        self._stop_tokens: list[int] = []
        self._has_beams = False
        self._num_prompt_tokens: int | None = None  # known from the first call on
        # the last call's matchers, by a row's new tokens; `None` for a row whose text has ended
        self._matchers: dict[tuple[int, ...], Any] = {}

    def set_stop_tokens(self, tokens: Tensor | None, has_beams: bool = False) -> None:
        """Sets the EOS tokens, which are allowed once the text is complete, and whether the rows
        are beams. Negative ids stand for no token. Raises `ValueError` if no token remains."""
        ids = [] if tokens is None else [token for token in tokens.flatten().tolist() if token >= 0]
        if not ids:
            raise ValueError(
                "text that a `schema`, `regex` or `grammar` constrains must end with an EOS token:"
                " set `eos_token_id`"
            )
        self._stop_tokens = ids
        self._has_beams = has_beams

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Returns the scores, with minus infinity for tokens that may not follow. Raises
        `NoTokenError` if no token may follow a row. But after the first step of a beam search, all
        scores of that row are minus infinity instead, since other beams may continue or may have
        finished. If no beam can continue and none has finished, the search ends with an error."""
        vocab_size = self._vocab_size
        if self._num_prompt_tokens is None:
            self._num_prompt_tokens = input_ids.shape[1]
        rows = [tuple(tokens) for tokens in input_ids[:, self._num_prompt_tokens :].tolist()]
        self._matchers = self._advance_matchers(rows)
        shape = (len(rows), -(-vocab_size // 32))
        mask = torch.zeros(shape, dtype=torch.int32, device="cpu")
        ended_rows: list[int] = []
        for row, tokens in enumerate(rows):
            matcher = self._matchers[tokens]
            if matcher is None:
                ended_rows.append(row)
            else:
                matcher.fill_next_token_bitmask(mask, row)
        shifts = torch.arange(32, device=scores.device)
        bits = to_device(mask, scores.device)[:, :, None] >> shifts & 1
        allowed = bits.flatten(1)[:, :vocab_size].bool()  # [rows, vocab]
        # number of columns of `scores` that have no token; if negative, the number of tokens that
        # have no column
        num_extra_columns = scores.shape[1] - vocab_size
        allowed = torch.nn.functional.pad(allowed, (0, num_extra_columns))
        if ended_rows:
            for token in self._stop_tokens:
                allowed[ended_rows, token] = True
        masked_scores = scores.masked_fill(~allowed, float("-inf"))
        if not self._has_beams or not rows[0]:
            _check_rows(masked_scores, mask, ended_rows)
        return masked_scores

    def _advance_matchers(self, rows: list[tuple[int, ...]]) -> dict[tuple[int, ...], Any]:
        """Returns the matchers for the rows' tokens, advanced from those of the last call. A row
        that continues no row of the last call, for example after calls for draft tokens, gets a new
        matcher."""
        matchers: dict[tuple[int, ...], Any] = {}
        num_children = Counter(tokens[:-1] for tokens in set(rows) if tokens)
        for tokens in rows:
            if tokens in matchers:
                continue
            parent = tokens[:-1]
            if parent in self._matchers:
                matcher = self._matchers[parent]
                num_children[parent] -= 1
                if matcher is not None and num_children[parent]:
                    matcher = matcher.fork()  # the last child reuses the parent's matcher
                matchers[tokens] = _accept(matcher, tokens[-1:])
            else:
                matcher = self._matcher_type(self._compiled, override_stop_tokens=self._stop_tokens)
                matchers[tokens] = _accept(matcher, tokens)
        return matchers


def _accept(matcher: Any, tokens: tuple[int, ...]) -> Any:
    """Advances a matcher by tokens and returns it. Returns `None` if the text has ended, by an EOS
    token or by a token that may not follow."""
    for token in tokens:
        if matcher is None or not matcher.accept_token(token) or matcher.is_terminated():
            return None
    return matcher


def _check_rows(scores: Tensor, mask: Tensor, ended_rows: list[int]) -> None:
    """Raises `NoTokenError` if a row of the masked scores `(rows, vocab)`, except `ended_rows`, has
    only minus infinities. `mask`: the bits of the tokens that the constraint allows, by row."""
    for row, is_empty in enumerate((scores == float("-inf")).all(dim=1).tolist()):
        if not is_empty or row in ended_rows:
            continue
        if mask[row].any():
            raise NoTokenError(
                "another option, such as `min_new_tokens`, `suppress_tokens`, `forced_bos_token_id`"
                " or a processor, forbids every token that the `schema`, `regex` or `grammar`"
                " allows here: leave it out, also in the model's `generation_config`"
            )
        raise NoTokenError(
            "no token continues the text under the given `schema`, `regex` or `grammar`: the"
            " vocabulary lacks a character that must come next, or no text is allowed"
        )


def _xgrammar() -> Any:
    try:
        return importlib.import_module("xgrammar")
    except ImportError as error:
        raise ImportError(
            '`schema`, `regex` and `grammar` need xgrammar: pip install "hf_paged[structured]"'
        ) from error
