"""Drafts from a smaller model with the same tokens (assisted generation): its rows run together, in
blocks of the target's memory. Leaves verifying the drafts to the sampler."""

from __future__ import annotations

import time
import weakref
from collections.abc import Sequence as Items
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
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
from ..cache.memory import PagedMemory
from ..cache.paged_cache import PagedCache
from ..cache.sequence_blocks import NO_BLOCKS
from ..model.trial import stock_cache
from ..model.weights import WeightsGuard
from ..plan import StepPlan
from ..step import NotPackable
from .sources import DrawnDraft, Source

# a row's missed tokens run as rows of one token each, up to this many, so that the step can be a
# replay
MAX_ROWS = 16
_numbers: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
_numbers_lock = forks.lock()

DraftRequests = Items[tuple["AssistantRow", Sequence, int]]
"""Rows that draft, with the target's sequence and the most tokens to propose."""


def assistant_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """Returns an empty cache of the assistant, with separate layer groups in the target's
    memory."""
    with _numbers_lock:
        if model not in _numbers:  # reuse the number of a deleted model, whose groups exist
            free = set(range(1, len(_numbers) + 2)).difference(_numbers.values())
            _numbers[model] = min(free)
        number = _numbers[model]
    return PagedCache.from_empty(stock_cache(model), memory, f"assistant {number}")


def is_joint(assistance: Assistance, config: Any) -> bool:
    """Whether the assistant is a separate model with the target's tokens, so that its rows can be
    batched."""
    has_other_tokens = None not in (assistance.tokenizer, assistance.assistant_tokenizer)
    is_model = assistance.model is not None and config.assistant_early_exit is None
    return is_model and not has_other_tokens


class Assistant:
    """The assistant of some rows. It uses free blocks. When the target runs out of blocks, it frees
    all of its own, and pauses for some steps."""

    MAX_PAUSE = 256  # steps
    depth = 1  # number of tokens, from a position on, on which the position's K/V depend

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        blocks_and_runner: tuple[BlockManager, Runner],
        scheduler: Scheduler,
        max_catch_up: int,
        max_positions: int | None = None,
    ) -> None:
        self.model = model
        self.memory = cache.memory
        self._max_catch_up = max_catch_up
        self._max_positions = max_positions  # as in `Layout`
        self.blocks, runner = blocks_and_runner
        guard = WeightsGuard(model, self.memory, self.blocks)
        self.executor = Executor(model, self.memory, runner, scheduler, guard)
        self.rows: list[AssistantRow] = []
        self.seconds_per_token = 0.0  # average time of a forward with one token per row
        self._next_pause = 1
        self._num_paused = 0

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

    def candidates(self, decoding: SampleDecoding) -> tuple[Any, LogitsProcessorList]:
        """Creates transformers' strategy for the number of a row's candidates, and the candidates'
        logits processors: the target's, except those that hold a state or force a length."""
        strategy, processors = compat.assisted_candidates(
            decoding.input_ids,
            self.model,
            decoding.config,
            decoding.logits_processor,
        )
        # transformers creates the processors of minimum lengths from the target's options, for
        # every proposal
        min_lengths = [
            processor
            for processor in decoding.logits_processor
            if type(processor) is MinLengthLogitsProcessor
        ]
        row_wise = filter(can_run_on_drafts, processors)
        return strategy, LogitsProcessorList([*min_lengths, *row_wise])

    def max_draft_tokens(self, row: AssistantRow, sequence: Sequence) -> int:
        """Returns the most tokens that it may draft after the target's sequence: the current number
        of the row's strategy. The assistant computes all of them except the last."""
        num_tokens = int(row.strategy.num_assistant_tokens)
        if self._max_positions is None:
            return num_tokens
        return min(num_tokens, self._max_positions + 1 - sequence.num_tokens)

    def change_weights(self) -> None:
        """Between steps, drops everything that was computed with weights that may have changed."""
        with self.executor.lock:
            self.executor.begin(check_weights=False)
        self._free_all()

    def reclaim(self) -> bool:
        """Frees all blocks; returns whether there were any."""
        had_any = self._free_all()
        if had_any:
            self._num_paused = self._next_pause
            self._next_pause = min(2 * self._next_pause, self.MAX_PAUSE)
        return had_any

    def _free_all(self) -> bool:
        return sum(self._free(row) for row in list(self.rows)) > 0

    def _free(self, row: AssistantRow) -> bool:
        """Frees the row's blocks and drops its tokens, which `_sync` copies again."""
        sequence = row.sequence
        with self.memory.changing():
            had_any = any(table.block_ids for table in sequence.blocks.tables)
            self.blocks.free(sequence.blocks)
            sequence.blocks, sequence.num_computed_tokens = NO_BLOCKS, 0
            sequence.token_ids, sequence.draft, row.num_target_tokens = [], [], 0
        return had_any

    @torch.no_grad()
    def propose(self, requests: DraftRequests) -> list[Draft | None]:
        """Returns a draft for each row; `None` while the assistant has not read all of the row's
        tokens. It reads up to `max_catch_up` tokens a step, over all rows."""
        if self._num_paused:
            self._num_paused -= 1
            return [None] * len(requests)
        try:
            with self.executor.lock, self.executor.attention():
                self.executor.handle_model_change()
                self.executor.is_unchecked = True
                self.executor.check_model()
                for row, target, _ in requests:
                    self._sync(row, target.token_ids)
                self._draft(requests)
            self._next_pause = max(1, self._next_pause - 1)
            return [row.draft(count) for row, _, count in requests]
        except (OutOfBlocksError, NotPackable):
            # the first forward met a limit in bytes, or heads can no longer be packed: without
            # drafts, rows are only slower
            self.reclaim()
            return [None] * len(requests)
        except BaseException:  # it is unknown which tokens were computed
            self._free_all()
            raise

    def _draft(self, requests: DraftRequests) -> None:
        """Adds draft tokens to the rows that have read all of the target's tokens."""
        counts = {row: count for row, _, count in requests}
        logits = self._catch_up(list(counts))
        drafting = [row for row in counts if row in logits]
        while drafting:
            self.add_tokens(drafting, torch.cat([logits[row] for row in drafting]))
            drafting = [row for row in drafting if row.should_continue(counts[row])]
            drafting = [row for row in drafting if self._append(row, 1)]
            if drafting:
                start = time.perf_counter()
                plan = StepPlan.of([(row.sequence, 1) for row in drafting])
                next_logits = self.executor.run(plan)
                for row in drafting:
                    row.sequence.num_computed_tokens += 1
                self._time(time.perf_counter() - start)
                logits = dict(zip(drafting, next_logits.split(1)))

    def _time(self, seconds: float) -> None:
        self.seconds_per_token += (seconds - self.seconds_per_token) / 4

    def _sync(self, row: AssistantRow, token_ids: list[int]) -> None:
        """Copies the target's tokens to the row, and drops the K/V of rejected candidates."""
        sequence = row.sequence
        row_ids = sequence.token_ids
        num_same = row.num_target_tokens
        num_both = min(len(row_ids), len(token_ids))
        while num_same < num_both and row_ids[num_same] == token_ids[num_same]:
            num_same += 1
        row_ids[num_same:] = token_ids[num_same:]
        row.num_target_tokens = len(token_ids)
        row.confidences, row.scores = [], []
        num_valid = max(0, min(num_same + 1 - self.depth, len(token_ids) - 1))
        if num_valid < sequence.num_computed_tokens:
            with self.memory.changing():
                self.blocks.truncate(sequence.blocks, num_valid)
            sequence.num_computed_tokens = num_valid

    def _append(self, row: AssistantRow, count: int) -> bool:
        """Grows the row's blocks by `count` tokens; returns whether enough blocks were free."""
        sequence = row.sequence
        with self.memory.changing():
            if sequence.blocks is NO_BLOCKS:
                sequence.blocks = self.blocks.new()
            num_committed = max(0, row.num_target_tokens - self.depth)
            has_room = self.blocks.append(sequence.blocks, count, num_committed=num_committed)
            if has_room:
                self.blocks.flush_copies()
        return has_room

    def _allocate_missed(self, rows: Items[AssistantRow]) -> list[tuple[AssistantRow, int]]:
        """Allocates blocks for missed tokens of these rows; returns the rows with the numbers of
        tokens to compute next."""
        budget = self._max_catch_up
        items = []
        for row in rows:
            count = row.sequence.num_to_compute
            if count > budget:
                # before the end of the text, positions must depend only on its tokens, not on
                # drafted ones
                count = min(budget, count + 1 - self.depth)
            if count > 0 and self._append(row, count):
                items.append((row, count))
                budget -= count
        return items

    def _catch_up(self, rows: Items[AssistantRow]) -> dict[AssistantRow, Tensor]:
        """Computes missed tokens; returns logits `(1, vocab)` of each row that is then fully
        computed."""
        items = self._allocate_missed(rows)
        if not items:
            return {}
        hidden = []
        for row, count in items:
            if 1 < count <= MAX_ROWS and count == row.sequence.num_to_compute:
                hidden.append(row)
                row.hide(count - 1)  # the tokens run as a draft, so that the step can be a replay
        items.sort(key=lambda item: item[1] != 1 + len(item[0].sequence.draft))
        plan = StepPlan.of([(row.sequence, count) for row, count in items])
        try:
            logits = self.executor.run(plan)
        finally:
            for row in hidden:
                row.show()
        for row, count in items:
            row.sequence.num_computed_tokens += count
        last_logits = {}
        for (row, _), logit_rows in zip(items, plan.rows_of_logits()):
            if logit_rows:
                last = logit_rows.stop - 1
                last_logits[row] = logits[last : last + 1]
        return last_logits

    @staticmethod
    def add_tokens(rows: Items[AssistantRow], logits: Tensor) -> None:
        """Chooses a token for each row from its logits, `(rows, vocab)`, and adds it to the row's
        draft."""
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
    """One row's state in an assistant: its strategy, its logits processors and its tokens: first
    `num_target_tokens` of the target, then a draft."""

    def __init__(self, assistant: Assistant, decoding: SampleDecoding) -> None:
        self.assistant = assistant
        config = decoding.config
        ids = decoding.input_ids
        self.strategy, self.processors = assistant.candidates(decoding)
        self.do_sample = bool(config.do_sample)
        self.device = ids.device
        eos = compat.special_token(config, "eos")
        self.eos_ids = set() if eos is None else set(eos.flatten().tolist())
        self.prefix: list[int] = []  # the text's tokens before those of `sequence`
        self.sequence = Sequence([])
        Request("draft", [self.sequence], decoding.max_length)
        self.num_target_tokens = 0
        # by token of the draft: its probability, and for a sampled row its logits `(1, vocab)`
        self.confidences: list[float] = []
        self.scores: list[Tensor] = []
        assistant.add(self)

    def hide(self, count: int) -> None:
        """Moves the last `count` tokens to `sequence.draft`, until `show`."""
        sequence = self.sequence
        draft = sequence.token_ids[-count:]
        sequence.draft, sequence.token_ids[-count:] = draft, []

    def show(self) -> None:
        sequence = self.sequence
        sequence.token_ids += sequence.draft
        sequence.draft = []

    @property
    def threshold(self) -> float | None:
        """The probability below which a candidate ends the draft."""
        if self.strategy is None:
            return None
        return self.strategy.generation_config.assistant_confidence_threshold or None

    @property
    def reads_probs(self) -> bool:
        return self.do_sample or self.threshold is not None

    def should_continue(self, count: int) -> bool:
        """Whether the draft, of up to `count` tokens, gets another token. If not, passes its length
        and confidences to the strategy, which learns from them."""
        confidences = self.confidences
        is_short = len(confidences) < count
        is_confident = self.threshold is None or confidences[-1] >= self.threshold
        if is_short and is_confident and self.sequence.token_ids[-1] not in self.eos_ids:
            return True
        self.num_proposed = len(confidences)
        if hasattr(self.strategy, "probs"):
            self.strategy.probs.extend(confidences)
        return False

    def draft(self, count: int) -> Draft | None:
        """Returns the draft, cut to the `count` tokens to verify; `None` if it is empty."""
        tokens = self.sequence.token_ids[self.num_target_tokens :]
        if not tokens:
            return None
        draft = Draft(tokens)
        if self.scores:
            draft = DrawnDraft(tokens, torch.cat(self.scores))
            self.scores = []  # views, which keep the logits of all rows alive
        del draft.tokens[count:]
        return draft

    def close(self) -> None:
        if self.strategy is not None:
            config = self.assistant.model.generation_config
            if config.num_assistant_tokens_schedule == "heuristic":
                # as in transformers, for the next call
                config.num_assistant_tokens = self.strategy.num_assistant_tokens
        self.assistant.remove(self)
