"""Drafts from a smaller model with the same tokens (assisted generation): its rows run together, in blocks of the
target's memory."""

from __future__ import annotations

import itertools
import sys
import time
import weakref
from collections.abc import Sequence as Items
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, PreTrainedModel
from transformers.cache_utils import DynamicCache
from transformers.generation.logits_process import MinLengthLogitsProcessor

from ... import compat, forks
from ...cache.block_manager import NO_BLOCKS, BlockManager
from ...cache.block_pool import OutOfBlocksError
from ...cache.memory import PagedMemory
from ...cache.paged_cache import PagedCache
from ...model.weights import WeightsGuard
from ...step import NotPackable
from ..decoding.sample import SampleDecoding
from ..decoding.scores import argmax, draw, leaves_rows_alone
from ..decoding.speculation import Draft
from ..request import Request, Sequence
from ..scheduling.scheduler import Scheduler
from .executor import Executor
from .runner import Runner, rows_of_logits

MAX_ROWS = 16  # up to this many missed tokens of a row run as rows of one token each, so that the step can be a replay
_numbers: weakref.WeakKeyDictionary[PreTrainedModel, int] = weakref.WeakKeyDictionary()
_guard = forks.lock()


def assistant_cache(model: PreTrainedModel, memory: PagedMemory) -> PagedCache:
    """An empty cache of the assistant, with separate layer groups in the target's memory."""
    with _guard:
        number = _numbers.get(model)
        if number is None:  # reuses the number of a deleted model, whose groups exist
            taken = set(_numbers.values())
            number = _numbers[model] = next(n for n in itertools.count(1) if n not in taken)
    config = model.config.get_text_config(decoder=True)
    return PagedCache.from_empty(DynamicCache(config=config), memory, f"assistant {number}")


class Assistant:
    """The assistant of some rows. It uses free blocks; when the target runs short, it frees all of them and proposes
    nothing for some steps."""

    MAX_PAUSE = 256  # steps
    depth = 1  # the K/V at a position depend on this many tokens from there on

    def __init__(
        self, model: PreTrainedModel, cache: PagedCache, made: tuple[BlockManager, Runner], scheduler: Scheduler,
        max_catch_up: int, max_positions: int | None = None,
    ) -> None:  # fmt: skip
        self.model, self.memory, self._max_catch_up = model, cache.memory, max_catch_up
        self._max_positions = max_positions  # as in `Layout`
        self.blocks, runner = made
        guard = WeightsGuard(model, self.memory, self.blocks)
        self.executor = Executor(model, self.memory, runner, scheduler, guard)
        self.rows: list[AssistantRow] = []
        self.seconds_a_token = 0.0  # average time of a forward with one token per row
        self._pause, self._left = 1, 0

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
                self.executor.rest()

    def most(self, sequence: Sequence) -> int:
        """Returns the most tokens that it may draft behind the target's sequence: it computes all of them but the
        last."""
        return sys.maxsize if self._max_positions is None else self._max_positions + 1 - sequence.num_tokens

    def change_weights(self) -> None:
        """Between steps: notes that the assistant's weights may have changed."""
        with self.executor.lock:
            self.executor.begin(check_weights=False)
        self._free_all()

    def reclaim(self) -> bool:
        """Frees all blocks; returns whether there were any."""
        had_any = self._free_all()
        if had_any:
            self._left, self._pause = self._pause, min(2 * self._pause, self.MAX_PAUSE)
        return had_any

    def _free_all(self) -> bool:
        return sum(self._free(row) for row in list(self.rows)) > 0

    def _free(self, row: AssistantRow) -> bool:
        sequence = row.sequence
        with self.memory.lock:
            had_any = any(table.block_ids for table in sequence.blocks.tables)
            self.blocks.free(sequence.blocks)
            sequence.blocks, sequence.num_computed_tokens = NO_BLOCKS, 0
        return had_any

    @torch.no_grad()
    def propose(self, wanted: Items[tuple[AssistantRow, Sequence, int]]) -> list[Draft | None]:
        """Returns a draft for each row, given the target's sequence and the most tokens to propose; `None` while the
        assistant has not read all the row's tokens, of which it reads up to `max_catch_up` a round over all rows."""
        if self._left:
            self._left -= 1
            return [None] * len(wanted)
        try:
            with self.executor.lock, self.executor.attention():
                self.executor.notice_model()
                drafts = self._propose(wanted)
            self._pause = max(1, self._pause - 1)
            return drafts
        except (OutOfBlocksError, NotPackable):
            # a limit in bytes, met by the first forward, or heads that can no longer be packed: costs only speed
            self.reclaim()
            return [None] * len(wanted)
        except BaseException:  # unknown which tokens were computed
            self._free_all()
            raise

    def _propose(self, wanted: Items[tuple[AssistantRow, Sequence, int]]) -> list[Draft | None]:
        for row, target, _ in wanted:
            self._follow(row, target.token_ids)
        logits = self._catch_up([row for row, _, _ in wanted])
        drafts = {row: Growing(count) for row, _, count in wanted if row in logits}
        going = list(drafts)
        while going:
            going = self._choose(going, drafts, torch.cat([logits[row] for row in going]))
            going = [row for row in going if self._append(row, 1)]
            if going:
                start = time.perf_counter()
                found = self.executor.run([(row.sequence, 1) for row in going])
                self.seconds_a_token += (time.perf_counter() - start - self.seconds_a_token) / 4
                logits = dict(zip(going, found.split(1)))
        return [drafts[row].draft(row.keeps_scores) if row in drafts else None for row, _, _ in wanted]

    def _follow(self, row: AssistantRow, token_ids: list[int]) -> None:
        """Takes over the target's tokens, and drops the K/V of rejected candidates."""
        sequence = row.sequence
        known, same = sequence.token_ids, row.num_followed
        while same < min(len(known), len(token_ids)) and known[same] == token_ids[same]:
            same += 1
        known[same:] = token_ids[same:]
        row.num_followed = len(token_ids)
        kept = max(0, min(sequence.num_computed_tokens, same + 1 - self.depth, len(token_ids) - 1))
        if kept < sequence.num_computed_tokens:
            with self.memory.lock:
                self.blocks.truncate(sequence.blocks, kept)
            sequence.num_computed_tokens = kept

    def _append(self, row: AssistantRow, count: int) -> bool:
        sequence = row.sequence
        with self.memory.lock:
            if sequence.blocks is NO_BLOCKS:
                sequence.blocks = self.blocks.new()
            if not self.blocks.append(sequence.blocks, count, num_settled=max(0, row.num_followed - self.depth)):
                return False
            self.blocks.flush_copies()
        sequence.num_computed_tokens += count
        return True

    def _catch_up(self, rows: Items[AssistantRow]) -> dict[AssistantRow, Tensor]:
        """Computes missed tokens; returns logits `(1, vocab)` of each row that is then fully computed."""
        left = self._max_catch_up
        items: list[tuple[AssistantRow, int]] = []
        for row in rows:
            count = min(row.sequence.num_to_compute, left)
            if count > 0 and self._append(row, count):
                items.append((row, count))
                left -= count
        if not items:
            return {}
        few = [row for row, count in items if 1 < count <= MAX_ROWS and not row.sequence.num_to_compute]
        for row in few:  # run as a draft, so that the step can be a replay
            row.hide(dict(items)[row] - 1)
        items.sort(key=lambda item: item[1] != 1 + len(item[0].sequence.draft))
        scheduled = [(row.sequence, count) for row, count in items]
        answers = rows_of_logits(scheduled)
        try:
            logits = self.executor.run(scheduled)
        finally:
            for row in few:
                row.show()
        return {row: logits[own.stop - 1 : own.stop] for (row, _), own in zip(items, answers) if own}

    def _choose(
        self, rows: Items[AssistantRow], drafts: dict[AssistantRow, Growing], logits: Tensor
    ) -> list[AssistantRow]:
        """Adds a token to each row's draft by its logits, `(rows, vocab)`; returns the rows that continue."""
        self.add_tokens(rows, drafts, logits)
        going = []
        for row in rows:
            growing = drafts[row]
            is_sure = row.threshold is None or growing.confidences[-1] >= row.threshold
            if len(growing.tokens) < growing.count and growing.tokens[-1] not in row.eos_ids and is_sure:
                going.append(row)
            else:
                row.note(growing)
        return going

    @staticmethod
    def add_tokens(rows: Items[AssistantRow], drafts: dict[AssistantRow, Growing], logits: Tensor) -> None:
        """Chooses a token for each row by its logits, `(rows, vocab)`, and adds it to the row and its draft."""
        scores = logits.float()
        for place, row in enumerate(rows):
            if row.processors:
                ids = torch.tensor([row.prefix + row.sequence.token_ids], dtype=torch.long, device=scores.device)
                scores[place : place + 1] = row.processors(ids, scores[place : place + 1].clone())
        tokens = argmax(scores)
        probs = scores.softmax(dim=-1) if any(row.reads_probs for row in rows) else None
        for place, row in enumerate(rows):
            if row.do_sample:
                assert probs is not None
                tokens[place] = draw(probs[place : place + 1].to(row.device), row.generator)[0]
        chosen = tokens.tolist()
        sure = [1.0] * len(rows) if probs is None else probs.gather(1, tokens[:, None])[:, 0].tolist()
        for place, (row, token, confidence) in enumerate(zip(rows, chosen, sure)):
            drafts[row].add(token, confidence, scores[place : place + 1] if row.keeps_scores else None)
            row.sequence.token_ids.append(token)


@dataclass
class Growing:
    count: int
    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    scores: list[Tensor] = field(default_factory=list)

    def add(self, token: int, confidence: float, scores: Tensor | None) -> None:
        self.tokens.append(token)
        self.confidences.append(confidence)
        if scores is not None:
            self.scores.append(scores)

    def draft(self, keeps_scores: bool) -> Draft | None:
        if not self.tokens:
            return None
        return Draft(self.tokens, torch.cat(self.scores) if keeps_scores else None)


class AssistantRow:
    """One row's state in an assistant: its tokens, and transformers' strategy for the number of candidates. The
    target's logits processors also apply to candidates, except those that hold a state or force a length."""

    def __init__(self, assistant: Assistant, decoding: SampleDecoding) -> None:
        self.assistant, config = assistant, decoding.config
        ids = decoding.input_ids
        self.strategy, self.processors = self._make(decoding)
        self.do_sample = self.keeps_scores = bool(config.do_sample)
        self.generator, self.device = decoding.generator, ids.device
        eos = compat.special_token(config, "eos")
        self.eos_ids = set() if eos is None else set(eos.flatten().tolist())
        tokens = ids[0].tolist()
        self.prefix: list[int] = []  # tokens before those of `sequence`
        self.sequence = Sequence([])
        Request("draft", [self.sequence], decoding.max_length)
        self.num_followed = 0
        self.num_proposed = 0
        self.max_draft = max(1, decoding.max_length - len(tokens))
        assistant.add(self)

    def _make(self, decoding: SampleDecoding) -> tuple[Any, LogitsProcessorList]:
        """Makes transformers' strategy, and the logits processors of candidates."""
        ids, config = decoding.input_ids, decoding.config
        strategy, made = compat.assisted_candidates(ids, self.assistant.model, config, decoding.logits_processor)
        # transformers makes the processors of minimum lengths for each proposal, from the target's options
        least = [each for each in decoding.logits_processor if type(each) is MinLengthLogitsProcessor]
        return strategy, LogitsProcessorList([*least, *(each for each in made if leaves_rows_alone(each))])

    def hide(self, count: int) -> None:
        """Turns the last `count` computed tokens into a draft, until `show`."""
        sequence = self.sequence
        sequence.draft, sequence.token_ids[-count:] = sequence.token_ids[-count:], []
        sequence.num_computed_tokens -= count

    def show(self) -> None:
        sequence = self.sequence
        sequence.token_ids += sequence.draft
        sequence.num_computed_tokens += len(sequence.draft)
        sequence.draft = []

    @property
    def threshold(self) -> float | None:
        """Probability below which a candidate ends the draft."""
        return self.strategy.generation_config.assistant_confidence_threshold or None

    @property
    def reads_probs(self) -> bool:
        return self.do_sample or self.threshold is not None

    @property
    def most(self) -> int:
        """Number of candidates that the strategy wants now."""
        return int(self.strategy.num_assistant_tokens)

    def note(self, growing: Growing) -> None:
        """Passes the draft's size and confidences to the strategy, which learns from them."""
        self.num_proposed = len(growing.tokens)
        if hasattr(self.strategy, "probs"):
            self.strategy.probs.extend(growing.confidences)

    def observe(self, token_ids: list[int], num_accepted: int) -> None:
        if self.num_proposed:
            scores = torch.empty((1, self.num_proposed + 1, 1))
            self.strategy.update_candidate_strategy(None, scores, num_accepted)
        self.num_proposed = 0

    def close(self) -> None:
        own = self.assistant.model.generation_config
        if own.num_assistant_tokens_schedule == "heuristic":  # kept for the next call, as in transformers
            own.num_assistant_tokens = self.strategy.num_assistant_tokens
        self.assistant.remove(self)
