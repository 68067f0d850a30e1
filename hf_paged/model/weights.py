"""Checks whether cached blocks were computed with the current weights, and drops them if the
weights have changed."""

from __future__ import annotations

import logging

import torch
from torch import nn

from ..cache.block_manager import BlockManager
from ..cache.memory import PagedMemory
from .state import ModelState, carries_state, fingerprint

logger = logging.getLogger(__name__)


class WeightsGuard:
    """Lets the prefix cache serve only blocks that the model computed in its current state. User
    code may change the model between *spans* (a call, or one step of an engine). The cache serves
    blocks of earlier spans only after `verify` has found that the model's fingerprint equals the
    one that `memory` holds. Before a span ends, `commit` stores the fingerprint of the weights
    that computed its blocks, unless the span is a step of an engine whose executor watches the
    model (`is_watched`). If a span ends without `commit`, and the model is not watched, its
    blocks are dropped before they are served. The lock of `memory` guards `blocks`."""

    def __init__(self, model: nn.Module, memory: PagedMemory, blocks: BlockManager) -> None:
        self._model = model
        self._memory = memory
        self._blocks = blocks
        self._epochs = blocks.epochs
        self._is_on = False
        # if `blocks` starts without prefix caching, caching stays off
        self._can_cache = blocks.prefix_caching
        self._autocast: torch.dtype | None = None
        # whether the executor compares the model with its last state (`ModelState.is_same`)
        self.is_watched = False
        # how often `_drop_earlier` discarded a stored fingerprint, because the model had changed or
        # could not be fingerprinted; `abandon` is not counted
        self.num_changes = 0
        processes = memory.processes
        self._fingerprint = fingerprint if processes is None else processes.fingerprint

    @property
    def is_on(self) -> bool:
        """Whether blocks are cached and served."""
        return self._is_on and self._blocks.prefix_caching

    def begin(self, is_on: bool, autocast: torch.dtype | None) -> None:
        """Called when work begins, between steps; requests of other calls may be unfinished.
        `is_on`: whether blocks may be cached and served. `autocast`: the dtype to which forwards
        are autocast; `None`: they are not."""
        self._is_on = is_on
        self._autocast = autocast
        if is_on:
            self._blocks.prefix_caching = self._can_cache and not carries_state(self._model)

    def go_idle(self) -> None:
        """Called when work ends, with no request in flight. If evicted blocks go to a tier (host
        memory or disk), fingerprints the weights, so that any process can use the blocks that are
        evicted from now on. Skipped if the weights are already verified, or if no fingerprint is
        stored."""
        needs_check = self._memory.fingerprint is not None and not self._epochs.are_verified
        if self.is_on and self._blocks.tier is not None and needs_check:
            self.begin_span()  # the model may have changed since the last step
            self._compare()
        self.is_watched = False

    def begin_span(self) -> None:
        """Begins a span: user code may have run since the previous one."""
        if self.is_on:
            with self._memory.lock:
                self._epochs.begin_span()

    def verify(self) -> bool:
        """Returns whether the cache may serve the blocks that it has. Fingerprints the weights, but
        at most once per span. Drops the blocks of earlier spans if it may not serve them."""
        return self._epochs.are_verified or self._compare()

    def commit(self, is_call: bool, state: ModelState | None = None) -> None:
        """Called before a span ends. Fingerprints the weights that computed its blocks if no
        fingerprint is stored. Otherwise skips that if the weights are already verified, and in an
        engine's step while the model is watched and the tier wants no confirmation of its blocks.
        `is_call`: whether the span is a call. `state`: the model's state, if it has just been
        read."""
        try:
            tier = self._blocks.tier
            is_needed = is_call or not self.is_watched
            if not is_needed and tier is not None:
                is_needed = tier.wants_confirmation
            is_unknown = self._memory.fingerprint is None
            if is_unknown or (is_needed and not self._epochs.are_verified):
                self._compare(state)
        except BaseException:
            self.abandon()
            raise

    def abandon(self) -> None:
        """Ends a span without `commit`. Unless the weights are verified or the model is watched,
        discards the stored fingerprint, so that the blocks are dropped before they are served."""
        if self.is_on and not self.is_watched and not self._epochs.are_verified:
            self._memory.fingerprint = None

    def drop_all(self) -> None:
        """Called after the model has changed: drops all cached blocks."""
        with self._memory.lock:
            self._epochs.begin_span()
        self._drop_earlier()

    def _compare(self, state: ModelState | None = None) -> bool:
        """Fingerprints the model. If the fingerprint has changed, drops the blocks of earlier
        spans, and all cached blocks of other managers; if there is none, drops all cached blocks
        and turns prefix caching off. Returns whether the fingerprint is unchanged."""
        model_fingerprint = self._fingerprint(self._model, state)
        current = model_fingerprint and (model_fingerprint, self._autocast)
        with self._memory.changing():
            is_unchanged = current is not None and current == self._memory.fingerprint
            if not is_unchanged:
                self._drop_earlier()
                for blocks in self._memory.managers.values():
                    # the managers of other layouts share the fingerprint
                    if blocks is not self._blocks:
                        blocks.drop_cached()
            elif self._blocks.tier is not None:
                self._blocks.tier.confirm()
            if current is None:
                self._blocks.drop_cached()
                self._blocks.prefix_caching = False
            self._memory.fingerprint = current
            self._epochs.verify()
        return is_unchanged

    def _drop_earlier(self) -> None:
        """Drops the blocks of earlier spans, and the stored fingerprint. The model is no longer
        watched."""
        self.is_watched = False
        with self._memory.changing():
            if self._memory.fingerprint is not None:
                self.num_changes += 1
                logger.debug(
                    "the cached prefixes of %s are dropped: the model has changed, or it cannot be"
                    " fingerprinted",
                    type(self._model).__name__,
                )
            self._blocks.index.remove_before(self._epochs.drop_before_span())
            if self._blocks.tier is not None:
                self._blocks.tier.discard()
            self._memory.fingerprint = None
