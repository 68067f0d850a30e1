"""Runs one model's forwards for the batching loop, one at a time, each with its adapter, and notices model changes."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from ...attention.backends import obstacles
from ...attention.latent import wrap_expansions
from ...attention.masks import mask_observer
from ...attention.switch import compiled_layers, switchable_configs, use_paged_attention
from ...cache.memory import PagedMemory, autocast_dtype
from ...compiled import running_eagerly
from ...interrupts import let_in, step_lock
from ...model.forwards import compute_device
from ...model.ranks import ranks_of
from ...model.state import read_state
from ...model.weights import WeightsGuard
from ...step import NotPackable, to_device
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
"""From sequences and their next tokens `(n,)` on the device, logits `(n, vocab)`; `None` if the step needs the host."""


@dataclass
class Window:
    """A period in which no other code changes the model (`model.weights.WeightsGuard`): a step or a `generate` call."""

    is_call: bool = False
    is_open: bool = False
    is_settled: bool = False


class Launched(NamedTuple):
    """A step launched on the device, for `n` sequences."""

    logits: Tensor  # (n, vocab)
    # row in `logits`, and the state the launch assumed: number of tokens, last token, last block of each table
    rows: dict[Sequence, tuple[int, tuple[int, int, list[int]]]]


class RunAhead:
    """Launches the next decode step while its input tokens are still being copied to the host. This assumes that every
    row continues and none joins. Otherwise the step is computed as usual; the launched one only wrote K/V past the
    sequences' ends."""

    def __init__(self, memory: PagedMemory, scheduler: Scheduler) -> None:
        self._memory, self._scheduler = memory, scheduler
        self._launched: Launched | None = None

    def clear(self) -> None:
        self._launched = None

    def fetch(self, ready: list[tuple[Generation, Tensor]], launch: Launch) -> Fetch | None:
        """Returns a function that copies the tokens of all open rows, `(n,)` in order, to the host, and meanwhile
        launches the next step; `None` with other decoding than sampling (beams) or with speculation."""
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
        # rows that reach their maximum length with these tokens do not continue
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
            except Exception:  # the step is then computed as usual, and raises the error
                logger.debug("a step could not be launched ahead", exc_info=True)
        found = arrived()
        if logits is not None:
            states = ((each.num_tokens + 1, found[row], _tails(each)) for row, each in zip(going, chosen))
            self._launched = Launched(logits, dict(zip(chosen, enumerate(states))))
        return found

    def take(self, items: list[tuple[Sequence, int]]) -> tuple[Tensor | None, int]:
        """Returns logits `(n, vocab)` of the first `n` scheduled items, which were launched ahead, and `n`."""
        launched, self._launched = self._launched, None
        if launched is None:
            return None, 0
        found: list[int] = []
        for sequence, query_len in items:
            row, guessed = launched.rows.get(sequence, (0, None))
            # the caller's code may have chosen another token; a preempted sequence may have other blocks
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
        # processes that compute each forward together: an interrupt in one would leave the others stuck in the forward
        self.ranks = ranks_of(model)
        self.together: Callable[[], contextlib.AbstractContextManager[None]] | None = None  # wraps such a forward
        self.slowed_by: set[str] = set()  # why kernels did not serve some steps
        self.checks_weights = False  # whether the prefix cache is used (`begin`)
        self.replays = False  # whether graphs are used
        self.adapters: Adapters | None = None  # runs rows with different adapters in one forward
        self.ahead = RunAhead(memory, scheduler)
        # during a step: compiled layers that run without compiled code, configs whose attention is switched
        self._switched: tuple[list[nn.Module], list[PreTrainedConfig]] | None = None
        self._num_changes = -1  # `guard.num_changes` at the last `notice_model`
        self._is_state_due = False  # whether the runner must still get the model's state

    def begin(self, check_weights: bool = True, switch_attention: bool = True, replays: bool = True) -> None:
        """Starts work on the model; called first, and only while nothing is in flight. Without `check_weights` the
        prefix cache is not used. Without `replays` no graphs are used, so the model's state is not read. Without
        `switch_attention` the caller has set the model's attention to `"hf_paged"`."""
        self._device = compute_device(self.model)
        self.autocast = autocast_dtype(self._device)  # of all forwards, whichever thread runs the steps
        self.checks_weights, self.replays, self._switches_attention = check_weights, replays, switch_attention
        self.guard.begin(check_weights, self.autocast)
        self.runner.pack()
        self._forget_model()

    def open(self, window: Window) -> None:
        """Before a window's first step: drops cached prefixes and graphs if a quick check finds the model changed."""
        if not window.is_open:
            with self.lock:
                self.guard.open()
                self.notice_model()
            window.is_open = True

    def settle(self, window: Window) -> None:
        """Before other code runs (in a call, after its first token): fingerprints the weights of computed blocks."""
        if self.guard.is_on and not window.is_settled:
            with self.lock:
                self.guard.settle(window.is_call)
        window.is_settled = True

    def leave(self, window: Window) -> None:
        """Ends the window, perhaps after a failure: blocks computed without a `settle` are not reused."""
        if window.is_open and not window.is_settled:
            self.guard.abandon()

    def rest(self) -> None:
        self.ahead.clear()
        self.runner.rest()
        with self.lock:
            self.guard.rest()

    def change_weights(self) -> None:
        """Between steps: notes that the weights have changed, so that nothing cached before is reused."""
        self.guard.change()
        self._forget_model()

    def _forget_model(self) -> None:
        """Drops what is known of the model: no graph is used before its state is read again; configs may differ."""
        self._num_changes, self._switched, self._is_state_due = -1, None, False
        self.num_embeddings = num_embeddings(self.model)  # valid token ids are below this
        self.ahead.clear()
        if self.adapters is not None:
            self.adapters.forget_model()
        self.runner.begin(None)

    def notice_model(self) -> None:
        """After the guard's check: if the model has changed, drops graphs and the step launched ahead."""
        if self.guard.num_changes != self._num_changes:
            self._forget_model()
            self._num_changes = self.guard.num_changes
            self._is_state_due = self.replays and self.runner.can_capture

    @contextlib.contextmanager
    def attention(self) -> Iterator[None]:
        """Around each step: switches the model's attention to `"hf_paged"`, runs layers with a cache without compiled
        code, and turns off mask observers."""
        switched = self._switched  # `begin` resets it, perhaps in another call's thread
        if switched is None:
            every = list(self.model.modules())
            modules = every if self._switches_attention else []
            wrap_expansions(modules)
            layers = compiled_layers(every)
            with running_eagerly(layers):
                self.runner.products = own_products(every)
            switched = self._switched = layers, switchable_configs(modules)
        layers, configs = switched
        tokens = mask_observer.set(None), obstacles.set(self.slowed_by)
        try:
            with torch.no_grad(), running_eagerly(layers), use_paged_attention(configs):
                yield
        finally:
            mask_observer.reset(tokens[0])
            obstacles.reset(tokens[1])

    def run(self, items: list[tuple[Sequence, int]]) -> Tensor:
        """As [`Runner`]'s `run`; takes the step launched ahead, if any, and computes the rest. Interruptible."""
        if self._is_state_due and any(
            query_len == 1 + len(each.draft) for each, query_len in items
        ):  # not for steps of nothing but prefill
            self._is_state_due = False
            self.runner.begin(read_state(self.model))
        ahead, count = self.ahead.take(items)
        if ahead is None:
            return self.run_by_adapter(items)
        return torch.cat([ahead, self.run_by_adapter(items[count:])]) if count < len(items) else ahead

    def run_by_adapter(self, items: list[tuple[Sequence, int]]) -> Tensor:
        """As `run`: one forward for all rows whose adapters can be mixed, then one for each other adapter. If a packed
        forward turns out to be impossible, for instance since the caller's code changed the model, the same step, and
        all later ones, run without packing."""
        try:
            return self._run_by_adapter(items)
        except NotPackable as error:
            if not self.runner.unpack(str(error)):
                raise
            self.slowed_by.add(
                f"rows are computed side by side from now on, since a packed forward failed: {error}. Add hooks, "
                "replace code and call `train()` only while no request is running"
            )
        return self._run_by_adapter(items)

    def _run_by_adapter(self, items: list[tuple[Sequence, int]]) -> Tensor:
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
        """As `run`, with all items on one adapter, and nothing launched ahead."""
        using = self.using(adapter)
        return self.compute(
            using, lambda: self.runner.run(items, adapter if (mix := mixed.get()) is None else mix.variant)
        )

    def compute(self, using: contextlib.AbstractContextManager[None], work: Callable[[], Tensor]) -> Tensor:
        """Runs a forward, `work`, within `using`, which sets its adapters."""
        with self._cast(), self._window(), using:
            return work()

    def _window(self) -> contextlib.AbstractContextManager[None]:
        """Around a forward: lets interrupts in, unless other processes compute it as well."""
        return let_in() if self.ranks is None else (self.together or contextlib.nullcontext)()

    def using(self, adapter: Hashable) -> contextlib.AbstractContextManager[None]:
        if isinstance(adapter, AdapterFile) and self.adapters is not None:
            with self._loading():
                return mixing(self.model, self.adapters.alone(adapter))
        return use_adapter(self.model, adapter)

    def _loading(self) -> contextlib.AbstractContextManager[None]:
        """Around code that may read adapter files: lets interrupts in, unless other processes read them as well."""
        return let_in() if self.ranks is None else contextlib.nullcontext()

    def prefetch(self, adapters: list[Hashable]) -> None:
        """Starts to load adapters of the requests that are admitted next."""
        if self.adapters is not None:
            self.adapters.prefetch([x for x in adapters if isinstance(x, AdapterFile)])

    def fetch_while_running_ahead(self, ready: list[tuple[Generation, Tensor]]) -> Fetch | None:
        return self.ahead.fetch(ready, self._run_ahead) if self.runner.can_run_ahead else None

    def _run_ahead(self, sequences: list[Sequence], token_ids: Tensor) -> Tensor | None:
        adapter, *others = {sequence.request.adapter for sequence in sequences}
        if others:
            return None
        known = token_ids.clamp(0, self.num_embeddings - 1)  # the host reports ids out of range once it has them
        with self.lock, self._cast(), self.using(adapter):
            return self.runner.run_ahead(sequences, known, adapter if (mix := mixed.get()) is None else mix.variant)

    def _cast(self) -> contextlib.AbstractContextManager[Any]:
        if self.autocast is None and autocast_dtype(self._device) is None:
            return contextlib.nullcontext()  # `torch.autocast` would clear its weight cache in every step
        return torch.autocast(self._device.type, dtype=self.autocast, enabled=self.autocast is not None)


def _tails(sequence: Sequence) -> list[int]:
    return [table.block_ids[-1] for table in sequence.blocks.tables]


def _send(tokens: Tensor) -> Callable[[], list[int]]:
    """Starts the copy to the host; the returned function waits for the copy only, not for later launches."""
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
