"""Runs one model's forwards for the loop: as the model is now, each with its adapter, one forward at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.backends import obstacles
from ...attention.latent import wrap_expansions
from ...attention.masks import mask_observer
from ...attention.switch import switchable_configs, use_paged_attention
from ...cache.block_manager import BlockManager
from ...cache.memory import PagedMemory, autocast_dtype
from ...interrupts import let_in, step_lock
from ...model.forwards import compute_device
from ...model.ranks import ranks_of
from ...model.state import ModelState, read_state
from ...model.weights import WeightsGuard
from ...step import ReadCounters, to_device
from ...tape.products import own_products
from ..decoding.base import Fetch
from ..decoding.prepare import num_embeddings
from ..decoding.sample import SampleDecoding
from ..generation import Generation
from ..request import Sequence
from ..scheduling.scheduler import Scheduler
from .adapters import use_adapter

logger = logging.getLogger(__name__)

Launch = Callable[[list[Sequence], Tensor], Tensor | None]
"""Sequences and their next tokens `(n,)` on the device to logits `(n, vocab)`; `None` where that needs the host."""


@dataclass
class Window:
    """Time in which no other code can change the model (`model.weights.WeightsGuard`): a step, or a `generate` call."""

    is_call: bool = False
    is_open: bool = False
    is_settled: bool = False


class Runner(Protocol):
    """Computes scheduled tokens."""

    can_capture: bool = False  # whether steps may be replays of graphs, for which it needs the model's state
    takes_drafts: bool = False  # whether it computes what a sequence's `draft` holds behind its last token
    can_run_ahead: bool = False  # whether the device computes a replay while the host does something else
    has_states: bool = False  # whether a step that failed cannot be taken again
    num_captured_steps: int = 0  # that were replays
    encoder_blocks: BlockManager | None = None  # what holds the keys and values of encoders
    counters: ReadCounters  # of how its forwards read keys and values
    products: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()  # around forwards that run as modules

    def begin(self, state: ModelState | None) -> None:
        """Work begins on a model in this state; `None`: its state is unknown."""
        return None

    def run(self, items: list[tuple[Sequence, int]], adapter: str | None = None) -> Tensor:
        """Computes the last `query_len` of the first `num_computed_tokens` tokens of each sequence, for which its
        tables have room; the model runs with `adapter` now. Of one with a draft its last token, and the draft behind
        it. Returns logits `(n, vocab_size)` in the model's dtype: after the last token of each sequence that is then
        computed as far as it goes, in order, and after each token of its draft."""

    def run_ahead(self, sequences: list[Sequence], token_ids: Tensor, adapter: str | None = None) -> Tensor | None:
        """Logits `(n, vocab_size)` after one more token of each sequence, `(n,)` int64 on the device; `None` if that
        cannot be done before the host has it."""
        return None

    def ordered(self) -> contextlib.AbstractContextManager[None]:
        """Around a step: its work on the device comes after that of the step before, also on other streams."""
        return contextlib.nullcontext()

    def rest(self) -> None:
        """Nothing is in flight any more."""
        return None


def rows_of_logits(items: Items[tuple[Sequence, int]]) -> list[range]:
    """Of each item the rows of logits that a step of all returns: one for its last token and one for each of its draft,
    none where it is not computed as far as it goes."""
    found, start = [], 0
    for sequence, _ in items:
        is_answered = sequence.num_computed_tokens == len(sequence.token_ids)
        end = start + 1 + len(sequence.draft) if is_answered else start
        found.append(range(start, end))
        start = end
    return found


def in_order(parts: Items[tuple[list[Any], Tensor]]) -> Tensor:
    """`(n, vocab)`: the rows of all parts, each of which names their places, by place."""
    places, logits = parts[0]
    if len(parts) == 1 and places == sorted(places):
        return logits
    rows = {place: row for places, logits in parts for place, row in zip(places, logits)}
    return torch.stack([rows[place] for place in sorted(rows)]) if rows else logits


class Launched(NamedTuple):
    """A step that runs on the device, for `n` sequences."""

    logits: Tensor  # (n, vocab)
    # its place, and what it is if all went as guessed: its length, its last token, the last block of each table
    rows: dict[Sequence, tuple[int, tuple[int, int, list[int]]]]


class RunAhead:
    """Launches the next step of decodes while its tokens are still on their way to the host. It is a guess, that every
    row goes on and none joins: else the step is computed as always, and what was launched wrote past their ends."""

    def __init__(self, memory: PagedMemory, scheduler: Scheduler) -> None:
        self._memory, self._scheduler = memory, scheduler
        self._launched: Launched | None = None

    def clear(self) -> None:
        self._launched = None

    def fetch(self, ready: list[tuple[Generation, Tensor]], launch: Launch) -> Fetch | None:
        """What brings the tokens of all these generations' rows, `(n,)` in their order, to the host, and launches the
        next step meanwhile; `None` where there are beams."""
        sequences: list[Sequence] = []
        for generation, _ in ready:
            if not isinstance(generation.decoding, SampleDecoding) or generation.speculation is not None:
                return None
            for row in generation.decoding.open_rows:
                request, index = generation.rows[row]
                sequences.append(request.sequences[index])
        return lambda tokens: self._fetch(sequences, tokens, launch)

    def _fetch(self, sequences: list[Sequence], tokens: Tensor, launch: Launch) -> list[int]:
        arrived = _send(tokens)
        # without the rows that these tokens bring to their greatest length
        going = [row for row, each in enumerate(sequences) if each.num_tokens + 1 < each.request.max_num_tokens]
        chosen, logits = [sequences[row] for row in going], None
        with self._memory.lock:
            num_leaving = len(sequences) - len(going)
            is_next = len(tokens) == len(sequences) and self._scheduler.reserve_next(chosen, num_leaving)
        if going and is_next:
            if len(going) < len(sequences):
                tokens = tokens[to_device(torch.tensor(going, device="cpu"), tokens.device)]
            try:
                logits = launch(chosen, tokens)
            except Exception:  # the step is computed later then, and raises what is wrong
                logger.debug("a step could not be launched ahead", exc_info=True)
        found = arrived()
        if logits is not None:
            states = ((each.num_tokens + 1, found[row], _tails(each)) for row, each in zip(going, chosen))
            self._launched = Launched(logits, dict(zip(chosen, enumerate(states))))
        return found

    def take(self, items: list[tuple[Sequence, int]]) -> tuple[Tensor | None, int]:
        """Logits `(n, vocab)` of the first `n` of the scheduled items, which were launched ahead, and `n`."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None, 0
        found: list[int] = []
        for sequence, query_len in items:
            row, guessed = launched.rows.get(sequence, (0, None))
            # a caller's code may have chosen another token; a preempted sequence may have other blocks
            now = len(sequence.token_ids), sequence.token_ids[-1], _tails(sequence)
            if query_len != 1 or sequence.num_to_compute or now != guessed:
                break
            found.append(row)
        if not found:
            return None, 0
        logits = launched.logits
        if found != list(range(len(logits))):
            logits = logits[to_device(torch.tensor(found, device="cpu"), logits.device)]
        return logits, len(found)


class Executor:
    """Runs the model under its `step_lock`."""

    def __init__(
        self, model: PreTrainedModel, memory: PagedMemory, runner: Runner, scheduler: Scheduler, guard: WeightsGuard
    ) -> None:
        self.model, self.runner, self.guard = model, runner, guard
        self.lock = step_lock(model)
        # processes that compute the forwards together, where an interrupt would leave the others within one
        self.ranks = ranks_of(model)
        self.together: Callable[[], contextlib.AbstractContextManager[None]] | None = None  # around each of these
        self.slowed_by: set[str] = set()  # what kernels said of steps that they did not take
        self.checks_weights = False  # whether prefixes are used (`begin`)
        self.replays = False  # whether graphs are
        self.ahead = RunAhead(memory, scheduler)
        self._configs: list[PreTrainedConfig] | None = None  # whose attention is switched
        self._num_changes = -1  # of the model, when the runner was last told of it
        self._is_state_due = False  # whether it is to be told of the model's state

    def begin(self, check_weights: bool = True, switch_attention: bool = True, replays: bool = True) -> None:
        """Called first, and while nothing is in flight. Without `check_weights` the prefix cache is not used; without
        `replays` no graphs are, for which the model's state is read; without `switch_attention` the caller has turned
        the model's attention to `"hf_paged"`."""
        self._device = compute_device(self.model)
        self.autocast = autocast_dtype(self._device)  # what forwards compute in, whichever thread takes the steps
        self.num_embeddings = num_embeddings(self.model)  # the token ids below it can be computed
        self.checks_weights, self.replays, self._switches_attention = check_weights, replays, switch_attention
        self.guard.begin(check_weights, self.autocast)
        self._forget_model()

    def open(self, window: Window) -> None:
        """Before the first step of a window: forgets cached prefixes and graphs if a quick look finds another model."""
        if not window.is_open:
            with self.lock:
                self.guard.open()
                self.notice_model()
            window.is_open = True

    def settle(self, window: Window) -> None:
        """Before other code runs, in a call after the first token: what was computed gets its weights' fingerprint."""
        if self.guard.is_on and not window.is_settled:
            with self.lock:
                self.guard.settle(window.is_call)
        window.is_settled = True

    def leave(self, window: Window) -> None:
        """The window ends, after a failure perhaps: what it computed without `settle` is not served."""
        if window.is_open and not window.is_settled:
            self.guard.abandon()

    def rest(self) -> None:
        self.ahead.clear()
        self.runner.rest()
        with self.lock:
            self.guard.rest()

    def change_weights(self) -> None:
        """Between steps: the weights are others from here on, and nothing that is cached is served any more."""
        self.guard.change()
        self._forget_model()

    def _forget_model(self) -> None:
        """No graph is used before the model's state has been read again, and its modules may have other configs."""
        self._num_changes, self._configs, self._is_state_due = -1, None, False
        self.ahead.clear()
        self.runner.begin(None)

    def notice_model(self) -> None:
        """After a look at the model: if it is another, what was recorded or launched ahead of it goes."""
        if self.guard.num_changes != self._num_changes:
            self._forget_model()
            self._num_changes = self.guard.num_changes
            self._is_state_due = self.replays and self.runner.can_capture

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Around each step: the model's attention is `"hf_paged"`, and masks are observed by no call."""
        configs = self._configs  # which `begin` forgets, perhaps in the thread of another call
        if configs is None:
            every = list(self.model.modules())
            modules = every if self._switches_attention else []
            self.runner.products = own_products(every)
            wrap_expansions(modules)
            configs = self._configs = switchable_configs(modules)
        tokens = mask_observer.set(None), obstacles.set(self.slowed_by)
        try:
            with torch.no_grad(), use_paged_attention(configs):
                yield
        finally:
            mask_observer.reset(tokens[0])
            obstacles.reset(tokens[1])

    def run(self, items: list[tuple[Sequence, int]]) -> Tensor:
        """[`Runner`]'s logits: of what was launched ahead, then of the rest. Interrupts reach the forward."""
        if self._is_state_due and any(
            query_len == 1 + len(each.draft) for each, query_len in items
        ):  # not where prompts alone wait for it
            self._is_state_due = False
            self.runner.begin(read_state(self.model))
        ahead, count = self.ahead.take(items)
        if ahead is None:
            return self._run_by_adapter(items)
        return torch.cat([ahead, self._run_by_adapter(items[count:])]) if count < len(items) else ahead

    def _run_by_adapter(self, items: list[tuple[Sequence, int]]) -> Tensor:
        names = {sequence.request.adapter for sequence, _ in items}
        if len(names) == 1:
            return self.run_with(names.pop(), items)
        rows = rows_of_logits(items)
        parts: list[tuple[list[int], Tensor]] = []
        for name in sorted(names, key=str):
            places = [place for place, (sequence, _) in enumerate(items) if sequence.request.adapter == name]
            logits = self.run_with(name, [items[place] for place in places])
            parts.append(([row for place in places for row in rows[place]], logits))
        return in_order(parts)

    def run_with(self, adapter: str | None, items: list[tuple[Sequence, int]]) -> Tensor:
        """As `run`, with this adapter, and nothing launched ahead."""
        return self.compute(adapter, lambda: self.runner.run(items, adapter))

    def compute(self, adapter: str | None, work: Callable[[], Tensor]) -> Tensor:
        """A forward with this adapter."""
        window = let_in() if self.ranks is None else (self.together or contextlib.nullcontext)()
        with self._cast(), use_adapter(self.model, adapter), window:
            return work()

    def fetch_while_running_ahead(self, ready: list[tuple[Generation, Tensor]]) -> Fetch | None:
        return self.ahead.fetch(ready, self._run_ahead) if self.runner.can_run_ahead else None

    def _run_ahead(self, sequences: list[Sequence], token_ids: Tensor) -> Tensor | None:
        adapter, *others = {sequence.request.adapter for sequence in sequences}
        if others:
            return None
        known = token_ids.clamp(0, self.num_embeddings - 1)  # ids out of range are reported once the host has them
        with self.lock, self._cast(), use_adapter(self.model, adapter):
            return self.runner.run_ahead(sequences, known, adapter)

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None and autocast_dtype(self._device) is None:
            return contextlib.nullcontext()  # `torch.autocast` would clear its cache of weights in every step
        return torch.autocast(self._device.type, dtype=self.autocast, enabled=self.autocast is not None)


def _tails(sequence: Sequence) -> list[int]:
    return [table.block_ids[-1] for table in sequence.blocks.tables]


def _send(tokens: Tensor) -> Callable[[], list[int]]:
    """Starts the copy to the host; what is returned waits for it, and for nothing launched after it."""
    if tokens.device.type != "cuda":
        found: list[int] = tokens.tolist()
        return lambda: found
    with torch.cuda.device(tokens.device):
        host = torch.empty(tokens.shape, dtype=tokens.dtype, pin_memory=True, device="cpu")
        host.copy_(tokens, non_blocking=True)
        done = torch.cuda.Event()
        done.record()

    def arrived() -> list[int]:
        done.synchronize()
        return list(host.tolist())

    return arrived
