"""Sequences one by one through models whose layers cannot take a packed batch: states that are no keys and values,
positions that depend on the batch, attention of their own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Sequence as Sequences
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache

from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..model.state import ModelState
from .request import Sequence


@dataclass
class _State:
    """What transformers' loop would carry from forward to forward."""

    model_kwargs: dict[str, Any]
    num_tokens: int


class RowRunner:
    """
    Runs each sequence by itself, the way transformers' decoding loop would, on a [`PagedCache`] of its own.

    Args:
        model ([`PreTrainedModel`]): Any decoder-only model.
        memory ([`PagedMemory`]): Where the blocks of all sequences are.
    """

    can_capture, num_captured_steps = False, 0

    def __init__(self, model: PreTrainedModel, memory: PagedMemory) -> None:
        self.model, self.memory = model, memory
        self._states: dict[Sequence, _State] = {}

    def begin(self, state: ModelState | None) -> None:
        """Nothing depends on it."""

    @torch.no_grad()
    def run(self, items: list[tuple[Sequence, int]], adapter: str | None = None) -> Tensor:
        """Logits `(n, vocab)` of the items whose sequence has nothing left to compute, in order."""
        logits = []
        for sequence, query_len in items:
            last = self._compute(sequence, query_len)
            if sequence.num_computed_tokens == len(sequence.token_ids):
                logits.append(last)
        return torch.stack(logits) if logits else torch.empty(0, 0)

    def run_ahead(self, sequences: list[Sequence], token_ids: torch.Tensor, adapter: str | None = None) -> None:
        """As [`Runner`]'s: never."""

    def _compute(self, sequence: Sequence, query_len: int) -> Tensor:
        end = sequence.num_computed_tokens
        ids = torch.tensor([sequence.token_ids[:end]], device=self.model.device)
        state = self._states.pop(sequence, None)
        # recurrent states take one more token or a whole prompt, nothing between
        if state is None or state.num_tokens != end - query_len or query_len > 1:
            state, query_len = self._new_state(ids), end
        inputs = self.model.prepare_inputs_for_generation(
            ids,
            next_sequence_length=query_len,
            is_first_iteration=query_len == end,
            **state.model_kwargs,
        )
        try:
            outputs = self.model(**inputs, return_dict=True)
        except BaseException:  # a kept traceback keeps the state: its blocks must not wait for that
            for value in state.model_kwargs.values():
                if isinstance(value, PagedCache):
                    value.discard()
            raise
        state.model_kwargs = self.model._update_model_kwargs_for_generation(outputs, state.model_kwargs)
        state.num_tokens = end
        self._states[sequence] = state
        return outputs.logits[0, -1]

    def _new_state(self, ids: Tensor) -> _State:
        """As `generate` prepares a single prompt without padding."""
        model = self.model
        kwargs: dict[str, Any] = {"use_cache": True, "attention_mask": torch.ones_like(ids)}
        if "position_ids" in inspect.signature(model.forward).parameters:
            kwargs["position_ids"] = model._prepare_position_ids_for_generation(ids, kwargs)
        if model._supports_logits_to_keep():
            kwargs["logits_to_keep"] = 1
        if model._supports_default_dynamic_cache():
            name = "cache_params" if "mamba" in type(model).__name__.lower() else "past_key_values"
            stock = DynamicCache(config=model.config.get_text_config(decoder=True))
            kwargs[name] = PagedCache.from_empty(stock, self.memory)
        return _State(kwargs, 0)

    def fork(self, parent: Sequence, children: Sequences[Sequence]) -> None:
        """`children` begin as copies of `parent`, sharing its blocks."""
        for child in children:
            self._states[child] = copy.deepcopy(self._states[parent])

    def permute(self, sequences: Sequences[Sequence], parents: Sequences[int]) -> None:
        """Sequence `i` continues what `parents[i]` was."""
        old = [self._states.get(sequence) for sequence in sequences]
        taken: set[int] = set()
        for sequence, parent in zip(sequences, parents):
            state = old[parent]
            if state is None:
                self._states.pop(sequence, None)
            else:
                self._states[sequence] = copy.deepcopy(state) if parent in taken else state
            taken.add(parent)

    def forget(self, sequences: Sequences[Sequence]) -> None:
        """What was computed for the sequences is no longer held."""
        for sequence in sequences:
            self._states.pop(sequence, None)
