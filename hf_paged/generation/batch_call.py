"""Runs a `generate` call on the engine and returns the result in transformers' shape. `candidate`
decides whether the engine can serve the call."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Hashable
from typing import Any

import torch

from .. import compat
from ..batching.arguments import Assistance
from ..batching.call_loop import CallLoop
from ..batching.decoding.base import Decoding
from ..batching.decoding.prepare import LoopCall
from ..batching.decoding.sample import SampleDecoding
from ..batching.factory import UNLIMITED, batch_invariant_error, empty_cache, make_loop
from ..batching.generation import Generation
from ..batching.loop import StepLoop
from ..batching.request import Request, Sequence
from ..cache.block_pool import OutOfBlocksError
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import UNCACHED
from ..cache.waits import Shortage, claiming, holding
from ..config import PagedConfig
from ..model.own_loop import cache_parts
from ..model.sharding import is_sharded
from ..model.wrappers import adapters_room_for
from ..plan import StepPlan
from ..rooms import room, room_if_installed
from ..switches import NOTHING
from ..topics import Topic
from .call import Call, caches_in
from .candidate import RIGHT_PADDED, SOFT_MASK, Candidate

# The prefix cache requires a fingerprint of all weights, which takes about as long as computing
# this many tokens.
MIN_CACHED_TOKENS = 128
# Replays require reading the model's state, which takes at least as long as running this many steps
# without replays.
MIN_REPLAYED_STEPS = 16


def batch_of(call: Call, loop: LoopCall) -> BatchCall | None:
    """Prepares a call's decoding loop for the engine; returns `None` if the engine cannot serve it.
    Adds the reason to `call.reason` if the call has built the loop's cache. Raises `ValueError`
    instead of returning `None` if the call sets `batch_invariant`, which needs the engine."""
    with contextlib.ExitStack() as stack:
        adapters = adapters_room_for(call.model)
        adapter_names = None
        if adapters is not None:
            # hides the names from PEFT, which would match them with the rows of each forward, not
            # with the rows of the call
            adapter_names = stack.enter_context(adapters.row_adapters(call.model))
        batch = _batch_of(call, loop, adapter_names)
        if batch is not None:
            call.stack.push(stack.pop_all())
    if batch is None:
        generation_config = loop.arguments["generation_config"]
        config = PagedConfig.coerce(generation_config.cache_config)
        if config.batch_invariant:
            raise batch_invariant_error(call.model, call.reason)
    return batch


def _batch_of(call: Call, loop: LoopCall, adapter_names: list[str] | None) -> BatchCall | None:
    caches = caches_in(loop.arguments.get("model_kwargs", {}))
    if loop.method not in compat.REPLACED_METHODS or not call.reads_in_place or not caches:
        return None
    parts = cache_parts(caches[0])
    cache = parts[0]
    if cache not in call.built_caches or not all(part.is_empty for part in parts):
        return None
    cross_caches = [part for part in parts[1:] if isinstance(part, PagedCache)]
    cache.cross = cross_caches[0].empty_twin(cache.memory) if cross_caches else None
    batch = BatchCall(call, loop, cache, adapter_names)
    reason = next(batch.reasons_against(), None)
    if loop.arguments.get("synced_gpus"):
        reason = Topic.OPTIONS("`synced_gpus` is set")
    for mask_reason in (RIGHT_PADDED, SOFT_MASK):
        if mask_reason in f"{reason} {batch.layout.unsupported_reason}":
            call.slowed_by.add(mask_reason)
    if reason is not None:
        call.reason += f"; not on the engine: {reason}"
        return None
    if loop.method != compat.BEAM_SEARCH and batch.config.compile_config is not None:
        # logs that the option has no effect, as transformers' loop would
        compat.can_compile(call.model, batch.model_kwargs, batch.config)
    call.route_name, call.reason = "engine", batch.layout.reason
    call.route_fields.update(
        is_packed=batch.layout.unsupported_reason is None,
        prefills_shared=call.repeats > 1,
    )
    return batch


class BatchCall(Candidate):
    """A decoding loop of a `generate` call that the engine serves."""

    def run(self) -> Any:
        """Runs the loop on the engine. Returns the result that transformers' `_sample` or
        `_beam_search` would return, or raises the error that they would raise."""
        call = self.call
        decoding: Decoding
        if self.uses_beams:
            decoding = room("beams", "`num_beams`").BeamDecoding(self.model, self.inputs)
        else:
            decoding = SampleDecoding(self.inputs, self.streamer)
        # whether prefix caching can save more time than fingerprinting the weights takes
        num_tokens = len(self.paddings) * decoding.max_length
        num_steps = decoding.max_length - decoding.length
        keeps_prefixes = num_tokens >= MIN_CACHED_TOKENS
        replays = keeps_prefixes or num_steps >= MIN_REPLAYED_STEPS
        generation = self._make_generation(decoding, keeps_prefixes)
        if generation.assistance is not None and not generation.is_single:
            generation.split()  # rows with drafts advance separately
        call.built_caches.clear()  # the loop may take over these caches
        make = functools.partial(
            make_loop,
            self.model,
            self.cache,
            self.layout,
            self.paged_config,
            max_num_seqs=UNLIMITED,
        )
        overlap = room_if_installed("overlap")
        context = holding(CallLoop(make())) if overlap is None else overlap.call_loop(self, make)
        with context as call_loop:
            loop = call_loop.loop
            num_captured = loop.executor.runner.num_captured_steps  # in steps of earlier calls
            finish = functools.partial(self._result, generation)
            claim = NOTHING
            if generation.keep_blocks:  # rows then keep their blocks until the call ends
                preemption = loop.scheduler.preemption
                num_needed = sum(map(preemption.num_needed_blocks, generation.requests))
                claim = claiming(loop.memory, num_needed, lambda: loop.blocks.num_total)
            try:
                with claim:
                    return call_loop.run(generation, keeps_prefixes, replays, finish)
            finally:
                drafts = generation.draft_counts
                call.route_fields.update(
                    num_captured_steps=loop.executor.runner.num_captured_steps - num_captured,
                    num_draft_tokens=drafts["num_draft_tokens"],
                    num_accepted_tokens=drafts["num_accepted_tokens"],
                )
                call.counters.append(loop.executor.runner.counters)
                call.slowed_by.update(loop.executor.slowed_by)

    def _assistance_for(self, decoding: Decoding) -> Assistance | None:
        """Returns the source of the rows' drafts; `None` if there is none. N-grams are a source
        only if drafts do not change the random numbers that rows draw."""
        if is_sharded(self.model):  # draft lengths depend on times, which differ by process
            return None
        may_use_ngrams = self.assistance is None and self.paged_config.speculation == "ngram"
        if may_use_ngrams and self.layout.reason_against_drafts is None:
            if isinstance(decoding, SampleDecoding) and self.prompts is None:
                num_rows = len(self.paddings)
                can_split = num_rows > self.call.repeats and decoding.can_split
                if num_rows == 1 or (can_split and not decoding.do_sample):
                    return Assistance()
        return self.assistance

    def _make_generation(self, decoding: Decoding, keeps_prefixes: bool) -> Generation:
        repeats = self.call.repeats
        layout = self.layout
        prompts = self.prompts
        keys = None
        if prompts is not None and keeps_prefixes:
            keys = prompts.keys(self.model.config)
        # adapter names: one per prompt, or per row if PEFT has repeated them (as it does if the
        # arguments request beams)
        names = self.adapter_names
        rows: list[tuple[Request, int]] = []
        for row in range(0, len(self.paddings), repeats):
            adapter = None if names is None else names[row * len(names) // len(self.paddings)]
            namespace: Hashable = UNCACHED
            if keeps_prefixes:
                # the namespace that requests of a `PagedEngine` have
                namespace = (adapter, self.paged_config.cache_salt)
            request = Request(
                f"row {row}",
                [Sequence(self._tokens(self.inputs.input_ids, row))],
                decoding.max_length + self.num_embedded - self.paddings[row],
                num_rows=repeats,
                namespace=namespace,
                adapter=adapter,
            )
            prompt = row // repeats
            shift = 0
            if prompts is not None:
                request.set_inputs(prompts, prompt, keys)
                shift = prompts.position_shift(prompt, layout.unsupported_reason is not None)
            request.limit_positions(layout.max_positions, shift)
            rows += [(request, index) for index in range(repeats)]
        return Generation(
            decoding,
            rows,
            keep_blocks=bool(self.config.return_dict_in_generate),
            assistance=self._assistance_for(decoding),
        )

    def _tokens(self, ids: torch.Tensor, row: int) -> list[int]:
        """Returns the token ids of a row of `ids` without padding; 0 for each token given as an
        embedding."""
        first_column = self.paddings[row] - self.num_embedded  # negative: embeddings precede `ids`
        return [0] * -first_column + ids[row, max(0, first_column) :].tolist()

    def _result(self, generation: Generation, loop: StepLoop) -> Any:
        """Returns the decoding's result, with a cache if the call returns one."""
        decoding = generation.decoding
        parts = generation.parts
        num_rows = len(self.paddings)
        if parts:
            decoding = decoding.join([part.decoding for part in parts])
        length = self.num_embedded + decoding.length - 1  # no forward computes the last token
        self.call.cache_sizes = {"self": (num_rows, length)}
        if self.prompts is not None:
            self.call.cache_sizes["cross"] = num_rows, self.prompts.num_encoder_tokens
        if not generation.keep_blocks:
            return decoding.result()
        # the returned cache must equal plain `generate`'s: rows that ended early also get the K/V
        # of the padding that follows them
        kept_blocks = [part.kept_blocks[0] for part in parts] or [
            generation.kept_blocks[row] for row in range(num_rows)
        ]
        ids = decoding.input_ids  # (rows, cached tokens + 1)
        sequences = []
        for row, (blocks, num_tokens) in enumerate(kept_blocks):
            request, _ = generation.rows[row]
            token_ids = self._tokens(ids, row)
            sequences.append(
                Sequence(token_ids, request, num_computed_tokens=num_tokens, blocks=blocks)
            )
        executor = loop.executor
        shortage: Shortage | None = None
        while unfinished_sequences := [row for row in sequences if row.num_to_compute > 1]:
            with executor.lock, executor.attention():
                executor.check_model()
                plan = _schedule(loop, unfinished_sequences)
                if len(plan):
                    executor.run_rows(plan)
                    for sequence, count in zip(plan.sequences, plan.counts):
                        sequence.num_computed_tokens += count
            shortage = None if len(plan) else shortage or Shortage(loop.memory)
            if shortage is not None and not shortage.wait():
                first = unfinished_sequences[0]
                count = first.num_to_compute - 1
                num_needed = sum(table.num_needed_blocks(count) for table in first.blocks.tables)
                raise OutOfBlocksError(
                    f"a row of the returned cache needs {num_needed} more blocks, but"
                    f" only {loop.blocks.num_free} are free: raise `num_blocks`, or leave"
                    " `return_dict_in_generate` out"
                )
        cache = empty_cache(self.model, loop.memory)
        # so that the call discards it after an error: the traceback keeps frames that hold it
        self.call.built_caches.append(cache)
        with loop.memory.changing():
            cache.take(
                [blocks.fork() for blocks, _ in kept_blocks],
                tuple(self.paddings),
                length,
            )
        return decoding.result(cache)


def _schedule(loop: StepLoop, sequences: list[Sequence]) -> StepPlan:
    """Returns the plan of a step that computes the missing tokens of these sequences, except each
    sequence's last token, and allocates blocks for them. The step contains as many tokens as the
    token budget and the free blocks allow; the plan may be empty."""
    items = []
    budget = loop.scheduler.max_num_batched_tokens
    with loop.memory.changing():
        for sequence in sequences:
            count = min(budget, sequence.num_to_compute - 1)
            if not count:
                break
            append = sequence.blocks.append
            if not append(count) and not (loop.scheduler.reclaim() and append(count)):
                count = 1  # token by token, since sliding windows then free blocks
                if not append(count):
                    break
            items.append((sequence, count))
            budget -= count
        loop.blocks.flush_copies()
        loop.memory.note_progress()
    return StepPlan.of(sorted(items, key=lambda item: item[1] != 1))
