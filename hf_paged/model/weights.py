"""Checks when cached blocks were computed with the current weights, and drops them after a
change."""

from __future__ import annotations

import torch
from torch import nn

from ..cache.block_manager import BlockManager
from ..cache.memory import PagedMemory
from .state import ModelState, carries_state, fingerprint


class WeightsGuard:
    """Lets the prefix cache serve only blocks that the model computed in its current state. User
    code may change the model between *windows* (a call, or one step of an engine). Blocks of
    earlier windows are served once the window's fingerprint (`verify`) equals that of `memory`,
    whose lock guards `blocks`. Before a window ends (`commit`), its blocks get a fingerprint, or
    the executor watches the model (`is_watched`); else they are forgotten."""

    def __init__(self, model: nn.Module, memory: PagedMemory, blocks: BlockManager) -> None:
        self._model = model
        self._memory = memory
        self._blocks = blocks
        self._epochs = blocks.epochs
        self._is_on = False
        # stays off if `blocks` starts with it off
        self._can_cache = blocks.prefix_caching
        self._autocast: torch.dtype | None = None
        # whether the executor compares the model with what it was (`ModelState.is_same`)
        self.is_watched = False
        self.num_changes = 0  # how often the model was found to have changed
        processes = memory.processes
        self._fingerprint = fingerprint if processes is None else processes.fingerprint

    @property
    def is_on(self) -> bool:
        """Whether blocks are cached and served."""
        return self._is_on and self._blocks.prefix_caching

    def begin(self, is_on: bool, autocast: torch.dtype | None) -> None:
        """Begins work, with no request in flight; `autocast` is the dtype of forwards under
        autocast, if any."""
        self._is_on = is_on
        self._autocast = autocast
        self.is_watched = False
        if is_on:
            self._blocks.prefix_caching = self._can_cache and not carries_state(self._model)

    def rest(self) -> None:
        """Ends work: no request is in flight. With a tier, fingerprints the weights, so that blocks
        that move to it later are known to be of these weights in any process."""
        is_known = self._epochs.are_vouched_for or self._memory.fingerprint is None
        if self.is_on and self._blocks.tier is not None and not is_known:
            self.open()  # the model may have changed since the last step
            self._compare()
        self.is_watched = False

    def open(self) -> None:
        """Begins a window: user code may have run since the last."""
        if self.is_on:
            with self._memory.lock:
                self._epochs.begin_window()

    def verify(self) -> bool:
        """Whether blocks of earlier windows may be served in this one, by one fingerprint per
        window; if not, they are dropped."""
        return self._epochs.are_vouched_for or self._compare()

    def commit(self, is_call: bool, state: ModelState | None = None) -> None:
        """Before the end of a window (a step or call): fingerprints the blocks that it computed, if
        caching is on. `state`: the model's, if it has just been read."""
        try:
            tier = self._blocks.tier
            is_needed = is_call or not self.is_watched
            if not is_needed and tier is not None:
                is_needed = tier.wants_confirmation
            is_unknown = self._memory.fingerprint is None
            if is_unknown or (is_needed and not self._epochs.are_vouched_for):
                self._compare(state)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Ends a window without `commit`: forgets its blocks unless something else vouches for
        them."""
        if self.is_on and not self.is_watched and not self._epochs.are_vouched_for:
            self._memory.fingerprint = None

    def change(self) -> None:
        """Notes that the model has changed: forgets all earlier blocks."""
        with self._memory.lock:
            self._epochs.begin_window()
        self._forget()

    def _compare(self, state: ModelState | None = None) -> bool:
        weights = self._fingerprint(self._model, state)
        now = None
        if weights is not None:
            now = (weights, self._autocast)
        with self._memory.changing():
            before = self._memory.fingerprint
            if now is None or now != before:
                self._forget()
                for blocks in self._memory.managers.values():
                    # managers of other layouts share the fingerprint
                    if blocks is not self._blocks:
                        blocks.drop_cached()
            elif self._blocks.tier is not None:
                self._blocks.tier.confirm()
            if now is None:
                self._blocks.drop_cached()
                self._blocks.prefix_caching = False
            self._memory.fingerprint = now
            self._epochs.vouch()
        return now is not None and now == before

    def _forget(self) -> None:
        self.is_watched = False
        with self._memory.changing():
            self.num_changes += self._memory.fingerprint is not None
            self._blocks.forget_before_window()
            if self._blocks.tier is not None:
                self._blocks.tier.discard()
            self._memory.fingerprint = None
