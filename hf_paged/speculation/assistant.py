"""Drafts from a smaller model with the same tokens (assisted generation): its rows run together, in
blocks of the target's memory."""

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
from ..batching.decoding.scores import argmax, draw, leaves_rows_alone
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

# up to this many missed tokens of a row run as rows of one token each, so that the step can be a
# replay
MAX_ROWS = 16
_numbers: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
_guard = forks.lock()

Wanted = Items[tuple["AssistantRow", Sequence, int]]
"""Rows that draft, each with the target's sequence and the most tokens to propose."""


def assistant_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """An empty cache of the assistant, with separate layer groups in the target's memory."""
    with _guard:
        if model not in _numbers:  # reuses the number of a deleted model, whose groups exist
            free = set(range(1, len(_numbers) + 2)).difference(_numbers.values())
            _numbers[model] = min(free)
        number = _numbers[model]
    return PagedCache.from_empty(stock_cache(model), memory, f"assistant {number}")


def is_joint(assistance: Assistance, config: Any) -> bool:
    """Whether the assistant is a model with the target's tokens, so that its rows can be
    batched."""
    has_other_tokens = None not in (assistance.tokenizer, assistance.assistant_tokenizer)
    is_model = assistance.model is not None and config.assistant_early_exit is None
    return is_model and not has_other_tokens


class Assistant:
    """The assistant of some rows. It uses free blocks; when the target runs short, it frees all of
    them and proposes nothing for some steps."""

    MAX_PAUSE = 256  # steps
    depth = 1  # the K/V at a position depend on this many tokens from there on

    def __init__(
        self,
        model: PreTrainedModel,
        cache: PagedCache,
        made: tuple[BlockManager, Runner],
        scheduler: Scheduler,
        max_catch_up: int,
        max_positions: int | None = None,
    ) -> None:
        self.model = model
        self.memory = cache.memory
        self._max_catch_up = max_catch_up
        self._max_positions = max_positions  # as in `Layout`
        self.blocks, runner = made
        guard = WeightsGuard(model, self.memory, self.blocks)
        self.executor = Executor(model, self.memory, runner, scheduler, guard)
        self.rows: list[AssistantRow] = []
        self.seconds_a_token = 0.0  # average time of a forward with one token per row
        self._pause = 1
        self._left = 0

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
        """Makes transformers' strategy for the number of a row's candidates, and their logits
        processors: the target's, except those that hold a state or force a length."""
        strategy, processors = compat.assisted_candidates(
            decoding.input_ids,
            self.model,
            decoding.config,
            decoding.logits_processor,
        )
        # transformers makes the processors of minimum lengths for each proposal, from the target's
        # options
        least_lengths = [
            processor
            for processor in decoding.logits_processor
            if type(processor) is MinLengthLogitsProcessor
        ]
        kept = filter(leaves_rows_alone, processors)
        return strategy, LogitsProcessorList([*least_lengths, *kept])

    def most(self, row: AssistantRow, sequence: Sequence) -> int:
        """Returns the most tokens that it may draft behind the target's sequence: as many as the
        row's strategy wants now. It computes all of them but the last."""
        wanted = int(row.strategy.num_assistant_tokens)
        if self._max_positions is None:
            return wanted
        return min(wanted, self._max_positions + 1 - sequence.num_tokens)

    def change_weights(self) -> None:
        """Between steps: notes that the assistant's weights may have changed."""
        with self.executor.lock:
            self.executor.begin(check_weights=False)
        self._free_all()

    def reclaim(self) -> bool:
        """Frees all blocks; returns whether there were any."""
        had_any = self._free_all()
        if had_any:
            self._left = self._pause
            self._pause = min(2 * self._pause, self.MAX_PAUSE)
        return had_any

    def _free_all(self) -> bool:
        return sum(self._free(row) for row in list(self.rows)) > 0

    def _free(self, row: AssistantRow) -> bool:
        """Frees the row's blocks, and forgets its tokens, which `_follow` takes over again."""
        sequence = row.sequence
        with self.memory.changing():
            had_any = any(table.block_ids for table in sequence.blocks.tables)
            self.blocks.free(sequence.blocks)
            sequence.blocks, sequence.num_computed_tokens = NO_BLOCKS, 0
            sequence.token_ids, sequence.draft, row.num_followed = [], [], 0
        return had_any

    @torch.no_grad()
    def propose(self, wanted: Wanted) -> list[Draft | None]:
        """Returns a draft for each row; `None` while the assistant has not read all the row's
        tokens, of which it reads up to `max_catch_up` a round over all rows."""
        if self._left:
            self._left -= 1
            return [None] * len(wanted)
        try:
            with self.executor.lock, self.executor.attention():
                self.executor.handle_model_change()
                self.executor.is_unchecked = True
                self.executor.check_model()
                for row, target, _ in wanted:
                    self._follow(row, target.token_ids)
                self._draft(wanted)
            self._pause = max(1, self._pause - 1)
            return [row.draft(count) for row, _, count in wanted]
        except (OutOfBlocksError, NotPackable):
            # a limit in bytes, met by the first forward, or heads that can no longer be packed:
            # costs only speed
            self.reclaim()
            return [None] * len(wanted)
        except BaseException:  # unknown which tokens were computed
            self._free_all()
            raise

    def _draft(self, wanted: Wanted) -> None:
        """Adds draft tokens to the rows that have read all the target's."""
        counts = {row: count for row, _, count in wanted}
        logits = self._catch_up(list(counts))
        going = [row for row in counts if row in logits]
        while going:
            self.add_tokens(going, torch.cat([logits[row] for row in going]))
            going = [row for row in going if row.goes_on(counts[row])]
            going = [row for row in going if self._append(row, 1)]
            if going:
                start = time.perf_counter()
                next_logits = self.executor.run(StepPlan.of([(row.sequence, 1) for row in going]))
                for row in going:
                    row.sequence.num_computed_tokens += 1
                self._time(time.perf_counter() - start)
                logits = dict(zip(going, next_logits.split(1)))

    def _time(self, seconds: float) -> None:
        self.seconds_a_token += (seconds - self.seconds_a_token) / 4

    def _follow(self, row: AssistantRow, token_ids: list[int]) -> None:
        """Takes over the target's tokens, and drops the K/V of rejected candidates."""
        sequence = row.sequence
        read = sequence.token_ids
        same = row.num_followed
        most = min(len(read), len(token_ids))
        while same < most and read[same] == token_ids[same]:
            same += 1
        read[same:] = token_ids[same:]
        row.num_followed = len(token_ids)
        row.confidences, row.scores = [], []
        kept = max(0, min(same + 1 - self.depth, len(token_ids) - 1))
        if kept < sequence.num_computed_tokens:
            with self.memory.changing():
                self.blocks.truncate(sequence.blocks, kept)
            sequence.num_computed_tokens = kept

    def _append(self, row: AssistantRow, count: int) -> bool:
        """Makes room in the row's blocks for so many more tokens."""
        sequence = row.sequence
        with self.memory.changing():
            if sequence.blocks is NO_BLOCKS:
                sequence.blocks = self.blocks.new()
            num_settled = max(0, row.num_followed - self.depth)
            has_room = self.blocks.append(sequence.blocks, count, num_settled=num_settled)
            if has_room:
                self.blocks.flush_copies()
        return has_room

    def _next(self, rows: Items[AssistantRow]) -> list[tuple[AssistantRow, int]]:
        """Makes room for missed tokens of these rows; returns how many of each to compute next."""
        left = self._max_catch_up
        items = []
        for row in rows:
            count = row.sequence.num_to_compute
            if count > left:
                # the tokens that positions depend on are in the text: short of its end, they must
                # not be drafted
                count = min(left, count + 1 - self.depth)
            if count > 0 and self._append(row, count):
                items.append((row, count))
                left -= count
        return items

    def _catch_up(self, rows: Items[AssistantRow]) -> dict[AssistantRow, Tensor]:
        """Computes missed tokens; returns logits `(1, vocab)` of each row that is then fully
        computed."""
        items = self._next(rows)
        if not items:
            return {}
        few = []
        for row, count in items:
            if 1 < count <= MAX_ROWS and count == row.sequence.num_to_compute:
                few.append(row)
                row.hide(count - 1)  # runs as a draft, so that the step can be a replay
        items.sort(key=lambda item: item[1] != 1 + len(item[0].sequence.draft))
        plan = StepPlan.of([(row.sequence, count) for row, count in items])
        try:
            logits = self.executor.run(plan)
        finally:
            for row in few:
                row.show()
        for row, count in items:
            row.sequence.num_computed_tokens += count
        last_logits = {}
        for (row, _), places in zip(items, plan.rows_of_logits()):
            if places:
                last = places.stop - 1
                last_logits[row] = logits[last : last + 1]
        return last_logits

    @staticmethod
    def add_tokens(rows: Items[AssistantRow], logits: Tensor) -> None:
        """Chooses a token for each row by its logits, `(rows, vocab)`, and adds it to the row's
        draft."""
        scores = logits.float()
        for place, row in enumerate(rows):
            if row.processors:
                ids = torch.tensor(
                    [row.prefix + row.sequence.token_ids],
                    dtype=torch.long,
                    device=scores.device,
                )
                row_scores = scores[place : place + 1].clone()
                scores[place : place + 1] = row.processors(ids, row_scores)
        tokens = argmax(scores)
        confidences = [1.0] * len(rows)
        if any(row.reads_probs for row in rows):
            probs = scores.softmax(dim=-1)
            for place, row in enumerate(rows):
                if row.do_sample:
                    row_probs = probs[place : place + 1].to(row.device)
                    tokens[place] = draw(row_probs, row.generator)[0]
            confidences = probs.gather(1, tokens[:, None])[:, 0].tolist()
        chosen = tokens.tolist()
        for place, (row, token, confidence) in enumerate(zip(rows, chosen, confidences)):
            row.confidences.append(confidence)
            if row.do_sample:
                row.scores.append(scores[place : place + 1])
            row.sequence.token_ids.append(token)


class AssistantRow(Source):
    """One row's state in an assistant: its strategy and logits processors, and its tokens, of which
    those behind the first `num_followed` are a draft."""

    def __init__(self, assistant: Assistant, decoding: SampleDecoding) -> None:
        self.assistant = assistant
        config = decoding.config
        ids = decoding.input_ids
        self.strategy, self.processors = assistant.candidates(decoding)
        self.do_sample = bool(config.do_sample)
        self.device = ids.device
        eos = compat.special_token(config, "eos")
        self.eos_ids = set() if eos is None else set(eos.flatten().tolist())
        self.prefix: list[int] = []  # tokens before those of `sequence`
        self.sequence = Sequence([])
        Request("draft", [self.sequence], decoding.max_length)
        self.num_followed = 0
        # of the draft's tokens: their probabilities, and logits `(1, vocab)` of a sampled row
        self.confidences: list[float] = []
        self.scores: list[Tensor] = []
        assistant.add(self)

    def hide(self, count: int) -> None:
        """Turns the last `count` tokens into a draft, until `show`."""
        sequence = self.sequence
        draft = sequence.token_ids[-count:]
        sequence.draft, sequence.token_ids[-count:] = draft, []

    def show(self) -> None:
        sequence = self.sequence
        sequence.token_ids += sequence.draft
        sequence.draft = []

    @property
    def threshold(self) -> float | None:
        """Probability below which a candidate ends the draft."""
        if self.strategy is None:
            return None
        return self.strategy.generation_config.assistant_confidence_threshold or None

    @property
    def reads_probs(self) -> bool:
        return self.do_sample or self.threshold is not None

    def goes_on(self, count: int) -> bool:
        """Whether the draft, of up to `count` tokens, gets another one. If not, passes its size and
        confidences to the strategy, which learns from them."""
        confidences = self.confidences
        has_room = len(confidences) < count
        is_sure = self.threshold is None or confidences[-1] >= self.threshold
        if has_room and is_sure and self.sequence.token_ids[-1] not in self.eos_ids:
            return True
        self.num_proposed = len(confidences)
        if hasattr(self.strategy, "probs"):
            self.strategy.probs.extend(confidences)
        return False

    def draft(self, count: int) -> Draft | None:
        """The draft, of which `count` tokens are verified; `None` without any."""
        tokens = self.sequence.token_ids[self.num_followed :]
        if not tokens:
            return None
        draft = Draft(tokens)
        if self.scores:
            draft = DrawnDraft(tokens, torch.cat(self.scores))
            self.scores = []  # each is a view of all rows' logits
        del draft.tokens[count:]
        return draft

    def close(self) -> None:
        if self.strategy is not None:
            config = self.assistant.model.generation_config
            if config.num_assistant_tokens_schedule == "heuristic":
                # kept for the next call, as in transformers
                config.num_assistant_tokens = self.strategy.num_assistant_tokens
        self.assistant.remove(self)
