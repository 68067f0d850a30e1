"""Drafts from a model's multi-token prediction heads (MTP, arXiv 2412.19437, section 2.2): rows run
together, on hidden states that the target's steps store in the target's blocks. transformers'
`MtpModel` implements the heads."""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from .. import compat
from ..attention.switch import calls_interface
from ..batching.decoding.sample import SampleDecoding
from ..batching.decoding.scores import can_run_on_drafts
from ..batching.execution.inputs import pack
from ..batching.execution.packed import PackedRunner
from ..batching.request import Sequence
from ..batching.scheduling.scheduler import Scheduler
from ..cache.groups import GroupSpec
from ..cache.layers import PagedLayer
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import SequenceBlocks
from ..config import PagedConfig
from ..kernels import quantized
from ..model.sharding import is_sharded
from ..plan import StepPlan
from ..step import numbers_on
from ..threads import step_lock
from ..topics import Topic
from .assistant import Assistant, AssistantRow, DraftTasks, assistant_cache

MAX_HEAD_DIM = 128  # maximum `head_dim` of hidden states that are stored as K/V heads


class HiddenNamespace(NamedTuple):
    """The namespace of prefixes whose blocks have hidden states besides keys and values."""

    base: Hashable  # the request's namespace


def uses_mtp(config: Any) -> bool:
    """Whether the model's multi-token prediction heads draft (`use_mtp`). In transformers, two
    other options for drafts take precedence."""
    preceding_options = (config.assistant_early_exit, config.prompt_lookup_num_tokens)
    return bool(config.use_mtp) and preceding_options == (None, None)


def reason_against_mtp(model: PreTrainedModel) -> str | None:
    """Returns why this model's heads cannot draft for rows of a packed step; `None` if they can."""
    config = model.config.get_text_config(decoder=True)
    if not compat.HAS_MTP:
        return Topic.ASSISTED(
            "this version of transformers has no `MtpModel` that runs head by head"
        )
    if not getattr(config, "num_mtp_layers", None):
        return Topic.ASSISTED("the model has no multi-token prediction heads (`num_mtp_layers`)")
    try:
        cache = DynamicCache(config=model.config.get_mtp_config())
    except ValueError as error:
        return Topic.ASSISTED(str(error))
    layer_types = (DynamicLayer, DynamicSlidingWindowLayer)
    if any(type(layer) not in layer_types for layer in cache.layers):
        return Topic.ASSISTED("the model's prediction heads keep more than keys and values")
    if is_sharded(model):
        return Topic.ASSISTED("the model's weights are sharded over several processes")
    shared_modules = (model.get_input_embeddings(), model.get_output_embeddings())
    if any(hasattr(module, "base_layer") for module in shared_modules):
        return Topic.ASSISTED(
            "the model's embeddings or `lm_head` have an adapter, which transformers does not load"
            " for the prediction heads that share them"
        )
    if not calls_interface(model.modules()):
        return Topic.ASSISTED("the model's layers have their own attention code")
    empty_cache = DynamicCache(config=config)
    target_cache = PagedCache.from_empty(empty_cache, PagedMemory(PagedConfig()))
    if config.hidden_size % 2:
        return Topic.ASSISTED(
            f"hidden states of odd size ({config.hidden_size}) cannot be stored as keys and values"
        )
    if GroupSpec() in target_cache.groups:
        return None
    return Topic.ASSISTED("no layer stores all tokens, so no blocks can hold hidden states")


class HiddenStates:
    """Stores hidden states in the blocks of the full-attention layers' group, so that they are
    shared, copied, swapped and cached with K/V: an additional layer of that group stores the first
    half of each hidden state as keys and the second half as values."""

    def __init__(self, cache: PagedCache) -> None:
        self._layer = PagedLayer(cache.groups[GroupSpec()], len(cache.layers))

    def store(self, hidden: Tensor) -> None:
        """Stores hidden states `(1, n, hidden_size)` in the slots of the current packed step."""
        half_size = hidden.shape[2] // 2
        head_dim = math.gcd(half_size, MAX_HEAD_DIM)
        num_heads = half_size // head_dim
        states = hidden.reshape(1, -1, 2 * num_heads, head_dim)
        keys = states[:, :, :num_heads].transpose(1, 2)
        values = states[:, :, num_heads:].transpose(1, 2)
        layer = self._layer
        group = layer.group
        with group.memory.lock:
            # `num_layers` is 1, so that the bytes of other layers are not estimated from this one
            group.group_memory.layer(layer.index, keys, values, 1, group.num_new_tables(0))
        layer.update(keys, values)
        layer.packed_handles.clear()

    def read(self, token_ranges: Iterable[tuple[SequenceBlocks, int, int]]) -> Tensor:
        """Returns the hidden states of tokens `[first, end)` of each sequence, concatenated:
        `(1, n, hidden_size)`."""
        group = self._layer.group
        slots = []
        for sequence, first, end in token_ranges:
            table = sequence.tables[group.index]
            slots += table.slots(first, end)
        with group.memory.lock:
            blocks = group.group_memory.storage.layers[self._layer.index]
            slot_ids = numbers_on(blocks.keys.device, slots)
            size = group.group_memory.block_size
            index = (slot_ids // size, slice(None), slot_ids % size)
            # each (n, heads, head_dim)
            halves = [quantized.read(tensor, index, dtype) for tensor, dtype in blocks.pair]
        return torch.cat([half.flatten(1) for half in halves], dim=1)[None]


class MtpRunner(PackedRunner):
    """Runs the heads, one after another, at positions of many sequences at once. At position `i`,
    head `k` (from 0) reads token `i + k + 1` of the text and the hidden state of the previous head,
    or of the target for head 0; it predicts token `i + k + 2`. The sequences in plans lack the
    first token of the text."""

    def draft(
        self,
        plan: StepPlan,
        hidden: Tensor,
        choose: Callable[[Tensor], None],
    ) -> Tensor:
        """Runs all heads at the plan's positions, and returns the last head's hidden states.
        `hidden` `(1, positions, hidden_size)`: the target's hidden states at these positions. After
        each head, `choose` gets logits `(n, vocab)` of the sequences that the plan computes to
        their end, and appends a token to each. The other sequences already have the tokens that
        later heads read."""
        tokens = pack(plan, self._block_sizes, self.rope)
        inputs, steps = self._to_device(tokens)
        token_ids = inputs[0:1]
        positions = inputs[1:2]
        last = numbers_on(self.device, tokens.last)
        token_lists = [sequence.token_ids for sequence in plan.sequences]
        chunks = list(zip(token_lists, plan.starts, plan.counts))
        self.cache.set_packed_steps(steps, positions)
        try:
            with self.product_context:
                for head in range(self.model.num_mtp_layers):
                    if head:
                        shifted_ids: list[int] = []
                        for ids, first, count in chunks:
                            shifted_ids += ids[first + head : first + head + count]
                        token_ids = numbers_on(self.device, [shifted_ids])
                    hidden = self.model.forward_layer(
                        head,
                        hidden,
                        positions + (head + 1),
                        self.cache,
                        input_ids=token_ids,
                    )
                    if tokens.last:
                        choose(compat.mtp_logits(self.model, hidden[:, last])[0])
        finally:
            self.cache.set_packed_steps([None] * len(steps))
        return hidden


class MtpHeads(Assistant):
    """The MTP heads of one model. Once a row has been added, the target's steps store hidden
    states. Every draft runs all heads, which share block tables, and recomputes positions that
    depend on rejected tokens."""

    def __init__(self, target: PackedRunner, scheduler: Scheduler) -> None:
        model = _load_heads(target.model)
        step_lock(model, target.model)  # the heads share the target's embedding and `lm_head`
        memory = target.cache.memory
        cache = assistant_cache(model, memory)
        self.runner = MtpRunner(model, cache)
        blocks_and_runner = memory.manager(cache.groups), self.runner
        super().__init__(
            model, cache, blocks_and_runner, scheduler, scheduler.max_num_batched_tokens
        )
        self.target = target
        self.hidden = HiddenStates(target.cache)
        self.depth: int = self.model.num_mtp_layers

    def add(self, row: AssistantRow) -> None:
        self.model.train(self.target.model.training)
        super().add(row)
        if self.target.store_hidden is None:
            with self.executor.lock:  # while no forward runs
                self.target.keep_hidden(self.hidden.store)

    def make_strategy_and_processors(
        self, decoding: SampleDecoding
    ) -> tuple[None, LogitsProcessorList]:
        """Returns no strategy: as in transformers' generator, every head drafts a token, whatever
        was accepted before."""
        processors = filter(can_run_on_drafts, decoding.logits_processor)
        return None, LogitsProcessorList(processors)

    def max_draft_tokens(self, row: AssistantRow, sequence: Sequence) -> int:
        # the heads draft only after the first new token, as in transformers
        if sequence.num_tokens <= sequence.request.num_prompt_tokens:
            return 0
        return self.depth

    def _sync(self, row: AssistantRow, token_ids: list[int]) -> None:
        row.prefix = token_ids[:1]
        super()._sync(row, token_ids[1:])

    def _draft(self, tasks: DraftTasks) -> None:
        targets = {row: target for row, target, _ in tasks}
        unfinished_rows = list(targets)
        while row_counts := self._allocate_missed(unfinished_rows):
            drafting_rows = []  # in this forward
            token_ranges = []
            for row, count in row_counts:
                if count == row.sequence.num_to_compute:
                    drafting_rows.append(row)
                    unfinished_rows.remove(row)
                start = row.sequence.num_computed_tokens
                token_ranges.append((targets[row].blocks, start, start + count))
            hidden = self.hidden.read(token_ranges)
            plan = StepPlan.of([(row.sequence, count) for row, count in row_counts])
            choose = functools.partial(self.add_tokens, drafting_rows)
            start_time = time.perf_counter()
            self.executor.compute(self.runner.draft, plan, hidden, choose)
            if len(row_counts) == plan.num_tokens:
                self._observe_seconds((time.perf_counter() - start_time) / self.depth)
            for row, count in row_counts:
                row.sequence.num_computed_tokens += count


def _load_heads(model: Any) -> Any:
    """Loads the `MtpModel` from the model's checkpoint, as `generate` does."""
    last_layer = model.get_decoder().layers[-1]
    device = next(parameter.device for parameter in last_layer.parameters())
    return compat.MtpModel.from_pretrained(model, device_map={"": device})
