"""Drafts from a smaller model with the same vocabulary (assisted generation): its rows run
together, in blocks of the target's memory. The sampler verifies the drafts."""

from __future__ import annotations

import copy
import time
import weakref
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.generation.candidate_generator import AssistedCandidateGenerator
from transformers.generation.logits_process import MinLengthLogitsProcessor

from .. import compat, forks
from ..batching.arguments import Assistance
from ..batching.decoding.base import Draft
from ..batching.decoding.sample import SampleDecoding
from ..batching.decoding.scores import argmax, can_run_on_drafts, draw
from ..batching.execution.executor import Executor
from ..batching.execution.runner import Runner
from ..batching.request import Request, Sequence
from ..batching.scheduling.scheduler import Scheduler
from ..cache.block_manager import BlockManager
from ..cache.block_pool import OutOfBlocksError
from ..cache.free_memory import is_out_of_memory
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import NO_BLOCKS
from ..interrupts import is_interrupt
from ..model.trial import stock_cache
from ..model.weights import WeightsGuard
from ..plan import StepPlan
from ..step import NotPackable
from .sources import DrawnDraft, Source

# up to this many missed tokens of a row (tokens of the target that the assistant has not computed)
# run as rows of one token each, so that the step can replay a recording
MAX_CATCH_UP_ROWS = 16
_assistant_numbers: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
_assistant_numbers_lock = forks.lock()

DraftTasks = Items[tuple["AssistantRow", Sequence, int]]
"""Rows that draft, each with the target's sequence and the maximum number of tokens to draft."""


def assistant_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """Returns an empty cache of the assistant, with separate layer groups in the target's
    memory."""
    with _assistant_numbers_lock:
        if model not in _assistant_numbers:
            # numbers of deleted models are reused, since their layer groups still exist
            used_numbers = _assistant_numbers.values()
            free_numbers = set(range(1, len(_assistant_numbers) + 2)).difference(used_numbers)
            _assistant_numbers[model] = min(free_numbers)
        number = _assistant_numbers[model]
    return PagedCache.from_empty(stock_cache(model), memory, f"assistant {number}")


def can_batch_rows(assistance: Assistance, config: Any) -> bool:
    """Whether the assistant is a separate model with the target's vocabulary: only then can its
    rows be batched."""
    has_other_vocabulary = None not in (assistance.tokenizer, assistance.assistant_tokenizer)
    is_separate_model = (
        assistance.assistant_model is not None and config.assistant_early_exit is None
    )
    return is_separate_model and not has_other_vocabulary


class Assistant:
    """A smaller model that drafts for the rows of its target, in blocks that the target leaves
    free. When the target runs out of blocks, the assistant frees its own, and pauses for some
    steps."""

    MAX_PAUSE = 256  # steps
    depth = 1  # K/V at a position depend on this many tokens, starting at the position

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        blocks_and_runner: tuple[BlockManager, Runner],
        scheduler: Scheduler,
        max_catch_up: int,
        max_positions: int | None = None,
    ) -> None:
        """`cache`: from `assistant_cache`. `max_catch_up`: maximum number of missed tokens to
        compute in a step, over all rows. `max_positions`: as in `Layout`."""
        self.model = model
        self.memory = cache.memory
        self._max_catch_up = max_catch_up
        self._max_positions = max_positions
        self.blocks, runner = blocks_and_runner
        guard = WeightsGuard(model, self.memory, self.blocks)
        self.executor = Executor(model, self.memory, runner, scheduler, guard)
        self.rows: list[AssistantRow] = []
        self.seconds_per_token = 0.0  # moving average: seconds to draft one token for all rows
        self._next_pause = 1  # steps
        self._num_paused = 0  # remaining steps of the current pause

    def add(self, row: AssistantRow) -> None:
        if not self.rows:
            with self.executor.lock:
                self.executor.begin(check_weights=False)
        self.rows.append(row)

    def remove(self, row: AssistantRow) -> None:
        if row in self.rows:
            self._free(row)
            self.rows.remove(row)
            if not self.rows:
                self.executor.go_idle()

    def make_strategy_and_processors(
        self, decoding: SampleDecoding
    ) -> tuple[Any, LogitsProcessorList]:
        """Returns transformers' strategy, which chooses the number of a row's draft tokens, and the
        logits processors for these tokens. These are the target's minimum-length processors, and
        the processors of transformers' assistant (which include the target's) that can run on
        drafts (`can_run_on_drafts`)."""
        strategy, processors = _strategy_and_processors(
            decoding.input_ids,
            self.model,
            decoding.config,
            decoding.logits_processor,
        )
        # not in `processors`: transformers creates them for every draft, from the target's options
        min_length_processors = [
            processor
            for processor in decoding.logits_processor
            if type(processor) is MinLengthLogitsProcessor
        ]
        row_wise_processors = filter(can_run_on_drafts, processors)
        return strategy, LogitsProcessorList([*min_length_processors, *row_wise_processors])

    def max_draft_tokens(self, row: AssistantRow, sequence: Sequence) -> int:
        """Returns the maximum number of tokens to draft after the target's sequence: as many as
        the row's strategy allows now, within the assistant's positions. The last draft token needs
        no position, since the assistant does not compute it."""
        num_tokens = int(row.strategy.num_assistant_tokens)
        if self._max_positions is None:
            return num_tokens
        return min(num_tokens, self._max_positions + 1 - sequence.num_tokens)

    def handle_weight_change(self) -> None:
        """Drops all keys and values, since the weights may have changed. Called between steps."""
        with self.executor.lock:
            self.executor.begin(check_weights=False)
        self._free_all()

    def reclaim(self) -> bool:
        """Frees all blocks, and returns whether there were any. If so, begins a pause."""
        had_blocks = self._free_all()
        if had_blocks:
            self._num_paused = self._next_pause
            self._next_pause = min(2 * self._next_pause, self.MAX_PAUSE)
        return had_blocks

    def _free_all(self) -> bool:
        return sum(self._free(row) for row in list(self.rows)) > 0

    def _free(self, row: AssistantRow) -> bool:
        """Frees the row's blocks and drops its tokens, which `_sync` copies again; returns whether
        the row had blocks."""
        sequence = row.sequence
        with self.memory.changing():
            had_blocks = any(table.block_ids for table in sequence.blocks.tables)
            sequence.reset()
            row.clear()
        return had_blocks

    @torch.no_grad()
    def propose(self, tasks: DraftTasks) -> list[Draft | None]:
        """Returns a draft for each row; `None` for a row with tokens that the assistant has not
        computed yet. Returns `None` for all rows during a pause, and if a forward runs out of
        blocks or memory or cannot be packed."""
        if self._num_paused:
            self._num_paused -= 1
            return [None] * len(tasks)
        try:
            with self.executor.lock, self.executor.attention():
                self.executor.handle_model_change()
                self.executor.is_unchecked = True
                self.executor.check_model()
                for row, target, _ in tasks:
                    self._sync(row, target.token_ids)
                self._draft(tasks)
            self._next_pause = max(1, self._next_pause - 1)
            return [row.draft(max_tokens) for row, _, max_tokens in tasks]
        except BaseException as error:
            is_shortage = is_out_of_memory(error) and not is_interrupt(error)
            if is_shortage or isinstance(error, (OutOfBlocksError, NotPackable)):
                # memory is short, or MTP heads can no longer be packed: without drafts, rows are
                # only slower
                self.reclaim()
                return [None] * len(tasks)
            self._free_all()  # it is unknown which tokens were computed
            raise

    def _draft(self, tasks: DraftTasks) -> None:
        """Computes missed tokens, then drafts for the rows whose tokens are all computed."""
        max_tokens = {row: count for row, _, count in tasks}
        logits = self._catch_up(list(max_tokens))
        drafting_rows = [row for row in max_tokens if row in logits]
        while drafting_rows:
            self.add_tokens(drafting_rows, torch.cat([logits[row] for row in drafting_rows]))
            drafting_rows = [row for row in drafting_rows if row.should_continue(max_tokens[row])]
            drafting_rows = [row for row in drafting_rows if self._allocate(row, 1)]
            if drafting_rows:
                start = time.perf_counter()
                plan = StepPlan.of([(row.sequence, 1) for row in drafting_rows])
                next_logits = self.executor.run(plan)
                for row in drafting_rows:
                    row.sequence.num_computed_tokens += 1
                self._observe_seconds(time.perf_counter() - start)
                logits = dict(zip(drafting_rows, next_logits.split(1)))

    def _observe_seconds(self, seconds: float) -> None:
        self.seconds_per_token += (seconds - self.seconds_per_token) / 4

    def _sync(self, row: AssistantRow, token_ids: list[int]) -> None:
        """Copies the target's tokens to the row, and drops the K/V of rejected draft tokens."""
        num_equal = row.copy_target(token_ids)
        num_valid = max(0, min(num_equal + 1 - self.depth, len(token_ids) - 1))
        if num_valid < row.sequence.num_computed_tokens:
            with self.memory.changing():
                row.sequence.truncate(num_valid)

    def _allocate(self, row: AssistantRow, count: int) -> bool:
        """Allocates blocks for `count` more tokens of the row; returns whether enough were free."""
        sequence = row.sequence
        with self.memory.changing():
            if sequence.blocks is NO_BLOCKS:
                sequence.begin(self.blocks)
            num_committed = max(0, row.num_target_tokens - self.depth)
            is_allocated = sequence.blocks.append(count, num_committed=num_committed)
            if is_allocated:
                self.blocks.flush_copies()
        return is_allocated

    def _allocate_missed(self, rows: Items[AssistantRow]) -> list[tuple[AssistantRow, int]]:
        """Allocates blocks for the missed tokens of these rows, up to `max_catch_up` tokens in
        total. Returns the rows that got blocks, each with its number of tokens to compute."""
        budget = self._max_catch_up
        row_counts = []
        for row in rows:
            count = row.sequence.num_to_compute
            if count > budget:
                # if not all positions fit, computes only positions that depend on no draft token
                count = min(budget, count + 1 - self.depth)
            if count > 0 and self._allocate(row, count):
                row_counts.append((row, count))
                budget -= count
        return row_counts

    def _catch_up(self, rows: Items[AssistantRow]) -> dict[AssistantRow, Tensor]:
        """Computes missed tokens; returns logits `(1, vocab)` of each row that is then fully
        computed."""
        row_counts = self._allocate_missed(rows)
        if not row_counts:
            return {}
        rows_with_drafts = []
        for row, count in row_counts:
            if 1 < count <= MAX_CATCH_UP_ROWS and count == row.sequence.num_to_compute:
                rows_with_drafts.append(row)
                row.move_tail_to_draft(count - 1)  # so that the step can replay a recording
        row_counts.sort(key=lambda item: item[1] != 1 + len(item[0].sequence.draft))
        plan = StepPlan.of([(row.sequence, count) for row, count in row_counts])
        try:
            logits = self.executor.run(plan)
        finally:
            for row in rows_with_drafts:
                row.move_draft_back()
        for row, count in row_counts:
            row.sequence.num_computed_tokens += count
        last_logits = {}
        end = 0
        for (row, _), num_logits in zip(row_counts, plan.num_logits):
            end += num_logits
            if num_logits:
                last_logits[row] = logits[end - 1 : end]
        return last_logits

    @staticmethod
    def add_tokens(rows: Items[AssistantRow], logits: Tensor) -> None:
        """Chooses a token for each row from `logits` `(rows, vocab)`, and adds it to the draft."""
        scores = logits.float()
        for index, row in enumerate(rows):
            if row.processors:
                ids = torch.tensor(
                    [row.prefix + row.sequence.token_ids],
                    dtype=torch.long,
                    device=scores.device,
                )
                row_scores = scores[index : index + 1].clone()
                scores[index : index + 1] = row.processors(ids, row_scores)
        tokens = argmax(scores)
        confidences = [1.0] * len(rows)
        if any(row.reads_probs for row in rows):
            probs = scores.softmax(dim=-1)
            for index, row in enumerate(rows):
                if row.do_sample:
                    row_probs = probs[index : index + 1].to(row.device)
                    tokens[index] = draw(row_probs, row.generator)[0]
            confidences = probs.gather(1, tokens[:, None])[:, 0].tolist()
        token_ids = tokens.tolist()
        for index, (row, token, confidence) in enumerate(zip(rows, token_ids, confidences)):
            row.confidences.append(confidence)
            if row.do_sample:
                row.scores.append(scores[index : index + 1])
            row.sequence.token_ids.append(token)


class AssistantRow(Source):
    """The state of one row in an assistant: a strategy, logits processors and a `sequence`, which
    has `num_target_tokens` tokens of the target's row, followed by the tokens of a draft."""

    def __init__(self, assistant: Assistant, decoding: SampleDecoding) -> None:
        self.assistant = assistant
        config = decoding.config
        ids = decoding.input_ids
        self.strategy, self.processors = assistant.make_strategy_and_processors(decoding)
        self.do_sample = bool(config.do_sample)
        self.generator = decoding.generator
        self.device = ids.device
        eos_tokens = compat.special_token(config, "eos")
        self.eos_ids = set() if eos_tokens is None else set(eos_tokens.flatten().tolist())
        self.prefix: list[int] = []  # tokens of the text that precede `sequence`
        self.sequence = Sequence([])
        Request("draft", [self.sequence], decoding.max_length)
        self.num_target_tokens = 0
        # the probability of each draft token; 1 if no row reads probabilities
        self.confidences: list[float] = []
        # the logits `(1, vocab)` of each draft token; empty unless the row is sampled
        self.scores: list[Tensor] = []
        assistant.add(self)

    def clear(self) -> None:
        """Drops all tokens, which `copy_target` copies again."""
        self.sequence.token_ids, self.num_target_tokens = [], 0

    def copy_target(self, token_ids: list[int]) -> int:
        """Replaces the tokens by the target's, and drops the draft. Returns how many leading tokens
        were equal."""
        row_ids = self.sequence.token_ids
        num_equal = self.num_target_tokens
        max_equal = min(len(row_ids), len(token_ids))
        while num_equal < max_equal and row_ids[num_equal] == token_ids[num_equal]:
            num_equal += 1
        row_ids[num_equal:] = token_ids[num_equal:]
        self.num_target_tokens = len(token_ids)
        self.confidences, self.scores = [], []
        return num_equal

    def move_tail_to_draft(self, count: int) -> None:
        """Moves the last `count` tokens to `sequence.draft`, until `move_draft_back`."""
        sequence = self.sequence
        draft = sequence.token_ids[-count:]
        sequence.draft, sequence.token_ids[-count:] = draft, []

    def move_draft_back(self) -> None:
        draft, self.sequence.draft = self.sequence.draft, []
        self.sequence.token_ids.extend(draft)

    @property
    def threshold(self) -> float | None:
        """The probability below which a token ends the draft; `None`: no probability does."""
        if self.strategy is None:
            return None
        return self.strategy.generation_config.assistant_confidence_threshold or None

    @property
    def reads_probs(self) -> bool:
        return self.do_sample or self.threshold is not None

    def should_continue(self, max_tokens: int) -> bool:
        """Whether the draft gets another token, up to `max_tokens`. If not, records the draft's
        length and passes its confidences to the strategy, which learns from them."""
        confidences = self.confidences
        has_space = len(confidences) < max_tokens
        is_confident = self.threshold is None or confidences[-1] >= self.threshold
        if has_space and is_confident and self.sequence.token_ids[-1] not in self.eos_ids:
            return True
        self.num_proposed = len(confidences)
        if hasattr(self.strategy, "probs"):
            self.strategy.probs.extend(confidences)
        return False

    def draft(self, max_tokens: int) -> Draft | None:
        """Returns the draft, cut to `max_tokens` tokens to verify; `None` if it is empty."""
        tokens = self.sequence.token_ids[self.num_target_tokens :]
        if not tokens:
            return None
        draft = Draft(tokens)
        if self.scores:
            draft = DrawnDraft(tokens, torch.cat(self.scores).to(self.device))
            self.scores = []  # frees them: as views, they keep the logits of all rows alive
        del draft.tokens[max_tokens:]
        return draft

    def close(self) -> None:
        if self.strategy is not None:
            config = self.assistant.model.generation_config
            if config.num_assistant_tokens_schedule == "heuristic":
                # like transformers, keeps the number for the next call
                config.num_assistant_tokens = self.strategy.num_assistant_tokens
        self.assistant.remove(self)


def _strategy_and_processors(
    input_ids: Any, assistant: Any, config: Any, processors: Any
) -> tuple[Any, Any]:
    """Returns transformers' candidate generator for an assistant with the target's vocabulary, and
    the logits processors that the assistant's `generate` would build, including the target's."""
    generator = AssistedCandidateGenerator(
        input_ids, assistant, config, {"use_cache": True}, logits_processor=processors
    )
    assistant_config = copy.copy(generator.generation_config)
    assistant_config.min_length = 0
    assistant_processors = compat.get_logits_processor(
        assistant,
        assistant_config,
        input_ids.shape[1],
        input_ids,
        device=input_ids.device,
        model_kwargs={},
        logits_processor=LogitsProcessorList(generator.logits_processor),
    )
    return generator, assistant_processors
