"""Runs one model's forwards for the loop: as the model is now, each with its adapter, one forward at a time."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.backends import obstacles
from ...attention.latent import wrap_expansions
from ...attention.masks import mask_observer
from ...attention.switch import switchable_configs, use_paged_attention
from ...cache.memory import PagedMemory, autocast_dtype
from ...interrupts import let_in, step_lock
from ...model.forwards import compute_device
from ...model.ranks import ranks_of
from ...model.state import read_state
from ...model.weights import WeightsGuard
from ...step import to_device
from ...tape.products import own_products
from ..decoding.base import Fetch
from ..decoding.prepare import num_embeddings
from ..decoding.sample import SampleDecoding
from ..generation import Generation
from ..request import Sequence
from ..scheduling.scheduler import Scheduler
from .adapter_files import AdapterFile
from .adapters import use_adapter
from .mixing import Adapters, NotMixableError, mixed, mixing, run_mixed
from .runner import Runner, in_order, rows_of_logits

logger = logging.getLogger(__name__)

Launch = Callable[[list[Sequence], Tensor], Tensor | None]
"""Sequences and their next tokens `(n,)` on the device to logits `(n, vocab)`; `None` where that needs the host."""


@dataclass
class Window:
    """Time in which no other code can change the model (`model.weights.WeightsGuard`): a step, or a `generate` call."""

    is_call: bool = False
    is_open: bool = False
    is_settled: bool = False


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
        self.adapters: Adapters | None = None  # what runs rows with several in one forward
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
        if self.adapters is not None:
            self.adapters.forget_model()
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
            return self.run_by_adapter(items)
        return torch.cat([ahead, self.run_by_adapter(items[count:])]) if count < len(items) else ahead

    def run_by_adapter(self, items: list[tuple[Sequence, int]]) -> Tensor:
        """Rows that can be in one forward, whatever their adapters, then those of each other adapter."""
        names = dict.fromkeys(sequence.request.adapter for sequence, _ in items)
        if len(names) == 1:
            return self.run_with(next(iter(names)), items)
        rows = rows_of_logits(items)
        parts: list[tuple[list[int], Tensor]] = []

        def note(places: list[int], logits: Tensor) -> None:
            parts.append(([row for place in places for row in rows[place]], logits))

        alone = list(range(len(items)))
        if self.runner.mixes_adapters and self.adapters is not None:
            with self._loading():
                found = self.adapters.together(names)
            self.slowed_by |= self.adapters.refusals
            places = [x for x in alone if items[x][0].request.adapter in found and items[x][0].request.inputs is None]
            chosen = [found[items[place][0].request.adapter] for place in places]
            if len(set(map(id, chosen))) > 1:
                try:
                    with self._cast(), self._window():
                        own = [items[place] for place in places]
                        note(places, run_mixed(self.model, self.runner, own, chosen, self.adapters.mix))
                    alone = [place for place in alone if place not in set(places)]
                except NotMixableError as error:
                    self.adapters.refuse(chosen, str(error))
        for name in sorted({items[place][0].request.adapter for place in alone}, key=str):
            places = [place for place in alone if items[place][0].request.adapter == name]
            note(places, self.run_with(name, [items[place] for place in places]))
        return in_order(parts)

    def run_with(self, adapter: Hashable, items: list[tuple[Sequence, int]]) -> Tensor:
        """As `run`, all with this adapter, and nothing launched ahead."""
        using = self.using(adapter)
        return self.compute(
            using, lambda: self.runner.run(items, adapter if (mix := mixed.get()) is None else mix.variant)
        )

    def compute(self, using: contextlib.AbstractContextManager[None], work: Callable[[], Tensor]) -> Tensor:
        """A forward, within what gives it its adapters."""
        with self._cast(), self._window(), using:
            return work()

    def _window(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward: interrupts reach it, unless other processes are in theirs meanwhile."""
        return let_in() if self.ranks is None else (self.together or contextlib.nullcontext)()

    def using(self, adapter: Hashable) -> contextlib.AbstractContextManager[None]:
        if isinstance(adapter, AdapterFile) and self.adapters is not None:
            with self._loading():
                return mixing(self.model, self.adapters.alone(adapter))
        return use_adapter(self.model, adapter)

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        """Around what may read adapters from files: interrupts are let in, unless all processes read them."""
        return let_in() if self.ranks is None else contextlib.nullcontext()

    def prefetch(self, adapters: list[Hashable]) -> None:
        """Requests with these are admitted next."""
        if self.adapters is not None:
            self.adapters.prefetch([x for x in adapters if isinstance(x, AdapterFile)])

    def fetch_while_running_ahead(self, ready: list[tuple[Generation, Tensor]]) -> Fetch | None:
        return self.ahead.fetch(ready, self._run_ahead) if self.runner.can_run_ahead else None

    def _run_ahead(self, sequences: list[Sequence], token_ids: Tensor) -> Tensor | None:
        adapter, *others = {sequence.request.adapter for sequence in sequences}
        if others:
            return None
        known = token_ids.clamp(0, self.num_embeddings - 1)  # ids out of range are reported once the host has them
        with self.lock, self._cast(), self.using(adapter):
            return self.runner.run_ahead(sequences, known, adapter if (mix := mixed.get()) is None else mix.variant)

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
