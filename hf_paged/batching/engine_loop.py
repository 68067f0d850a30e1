"""`EngineLoop` makes the step loop and the memory of an engine. While no request is unfinished, it
replaces both if the model has changed or other block sizes are better. It also checks and prepares
requests before they enter the loop. `engine_core.py` keeps the list of requests."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from collections.abc import Iterable
from typing import Any

from transformers import PreTrainedModel

from ..cache.memory import PagedMemory, autocast_dtype
from ..config import PagedConfig
from ..model.capability import Capability
from ..model.forwards import compute_device
from ..model.layout import Layout
from ..model.positions import grow_positions
from ..model.registry import Route, block_sizes, note_route, route_of
from ..rooms import SpeculationRoom, room, room_if_installed
from ..seams import EngineParts, Leader
from ..topics import Topic
from .arguments import ServedByGenerateError, option_for_drafts
from .execution.prompts import find_media
from .factory import (
    UNLIMITED_BLOCKS,
    batch_invariant_error,
    choose_layout,
    empty_cache,
    find_rectangles,
    make_loop,
    make_runner,
)
from .generation import RequestState
from .loop import StepLoop
from .request import Request, RequestListener

MAX_GROWTH = 8
"""For a request, the table of positions grows to at most this many times the length of the table or
of the prompt, whichever is longer: callers may ask for many more tokens than they get."""


class EngineLoop:
    """Makes and replaces an engine's step loop and memory (`renew`). `leader` drives the processes
    that hold other shards, if any. Callers hold `outer_lock`, the engine's lock."""

    def __init__(
        self,
        model: PreTrainedModel,
        config: PagedConfig,
        parts: EngineParts,
        leader: Leader | None,
        outer_lock: Any,
    ) -> None:
        self.model = model
        self.config = config
        self._parts = parts
        self.leader = leader
        self._outer_lock = outer_lock
        self.loop: StepLoop | None = None  # `None` before the first request, and after `retire`
        self.memory = self._new_memory()  # the loop's memory
        tools = room_if_installed("tools")
        # shared by successive loops
        self.timeline: RequestListener = tools.Timeline() if tools else RequestListener()
        self.layout = Layout()  # of the loop's forwards
        # seconds spent on preparations that later requests reuse, by part (`Route.setup_seconds`)
        self.setup_seconds: dict[str, float] = {}
        # whether any request so far had several rows, for which its prompt is computed only once
        self.has_shared_prefills = False
        self._loop_key: tuple[Any, ...] = ()  # properties of the model that the loop was made for
        self._loop_config_repr = ""  # `_config_repr` of the model when the loop was made
        self._earlier_counts = Counter[str]()  # of earlier loops

    def renew(self, keeps_block_sizes: bool) -> StepLoop:
        """Called without unfinished requests. Returns the loop. Makes a new one if there is none,
        if the model's layers, layout, dtype, device or autocast dtype have changed or, unless
        `keeps_block_sizes`, if other block sizes are better. Raises the errors of `choose_layout`
        (over several processes, of `Leader.choose_layout`) and of `make_loop`."""
        model = self.model
        config = self.config
        probe_cache = empty_cache(model, PagedMemory(config))  # never gets a block
        # `verdicts` caches the results of prompt checks while the model is unchanged
        self._capability = Capability(model, probe_cache, make_runner, verdicts={})
        choose = functools.partial(choose_layout, model, probe_cache, config.batch_invariant)
        layout = choose() if self.leader is None else self.leader.choose_layout(choose)
        device = compute_device(model)
        loop_key = (
            probe_cache.layer_kinds,
            layout,
            model.dtype,
            device,
            autocast_dtype(device),
        )
        if self.loop is not None and loop_key == self._loop_key:
            if keeps_block_sizes or self.memory.better_sizes() is None:
                return self.loop
        self.retire()
        cache = empty_cache(model, self.memory)
        # for all blocks at once, since each growth copies the existing ones
        cache.reserve(config.num_blocks or UNLIMITED_BLOCKS, config.max_num_seqs)
        self.loop = make_loop(
            model,
            cache,
            layout,
            config,
            max_num_seqs=config.max_num_seqs,
            parts=self._parts,
            timeline=self.timeline,
        )
        if self.leader is not None:
            self.leader.make(self.loop)
        self.layout = layout
        self._counters = cache.counters
        self._loop_key = loop_key
        self._loop_config_repr = _config_repr(model)
        if not model.config.is_encoder_decoder:  # its route depends on the first request's prompt
            self.note_route()
        return self.loop

    def check_unchanged(self) -> None:
        """Called while requests are unfinished. Raises `ValueError` if the autocast dtype, or the
        types or windows of the model's layers, have changed since these requests began."""
        if self.loop is None:
            return
        loop_dtype = self.loop.executor.autocast_dtype
        dtype = autocast_dtype(compute_device(self.model))
        if dtype != loop_dtype:
            raise ValueError(
                f"autocast uses {dtype} here, but {loop_dtype} in unfinished requests (None: it is"
                " off): add this request after these have ended"
            )
        if _config_repr(self.model) == self._loop_config_repr:
            return  # the usual case, which needs no cache to compare layers
        loop_layers = self._loop_key[0]
        layers = empty_cache(self.model, self.memory).layer_kinds
        if layers != loop_layers:
            new_names, old_names = (
                [(kind.__name__, window) for kind, window in kinds]
                for kinds in (layers, loop_layers)
            )
            raise ValueError(
                f"the config now has the layers {new_names} (type and window), but unfinished"
                f" requests began with {old_names}: change `sliding_window` and `layer_types` only"
                " when all requests have finished"
            )

    def _new_memory(self, observed_lengths: Iterable[int] = ()) -> PagedMemory:
        return PagedMemory(
            self.config,
            sizes=block_sizes(self.model, self.config, observed=observed_lengths),
            keeps_cached=True,
            make_storage=self._parts.storage,
            processes=self.leader,
            outer_lock=self._outer_lock,
        )

    def retire(self) -> None:
        """Drops the loop, keeps its counts, and replaces its memory with a new, empty one."""
        counts = self.loop_counts()
        if self.leader is not None:
            self.leader.retire()
        try:
            self.memory.evict_cached()
        finally:
            self.memory.drop_recorders()
            memory = self._new_memory(self.memory.sizes.lengths)
            self._earlier_counts, self.loop, self.memory = counts, None, memory

    def loop_counts(self) -> Counter[str]:
        """Returns the counters of [`EngineStats`] that loops keep, summed over all loops so far."""
        counts = self._earlier_counts.copy()
        if self.loop is not None:
            counts.update(self.loop.counts())
        return counts

    @property
    def route(self) -> Route | None:
        """How the loop serves requests; `None` without a loop."""
        if self.loop is None:
            return None
        reason = self.layout.unsupported_reason
        slowed_by = self.loop.executor.slowed_by
        route_name = "engine"
        if not self.layout.is_side_by_side:
            slowed_by = {*slowed_by, f"requests run one by one, not packed: {reason}"}
            route_name = "rows"
        return route_of(
            route_name,
            self.layout.reason,
            [self._counters],
            slowed_by,
            is_packed=reason is None,
            prefills_shared=self.has_shared_prefills,
            num_captured_steps=self.loop_counts()["num_captured_steps"],
            setup_seconds=dict(self.setup_seconds),
        )

    def note_route(self) -> None:
        """Records the route for `last_route(model)`."""
        if self.route is not None:
            note_route(self.model, self.route)

    def prepare(self, state: RequestState) -> None:
        """Prepares a request for the loop's forwards. Raises `ValueError` if the forwards cannot
        compute it, and `IndexError` if the prompt is longer than the model's table of positions."""
        reason = self.layout.unsupported_reason
        reason_against_drafts = self.layout.reason_against_drafts
        if state.request.inputs is None:
            self._grow_positions(state.request)
            state.request.limit_positions(self.layout.max_positions)
        else:
            self._prepare_inputs(state)
            reason = reason_against_drafts = Topic.INPUTS("the prompt is more than token ids")
        if state.request.prompt_logprobs is not None and reason is not None:
            raise ValueError(
                f"`prompt_logprobs` needs packed forwards of token ids: {reason}. Leave it out, or"
                " compute the logits with a forward of the model"
            )
        self._choose_speculation(state, reason_against_drafts)

    def _grow_positions(self, request: Request) -> None:
        """Makes the model's table of positions longer, within `MAX_GROWTH`, if it is too short for
        a request and the model's own forwards, when not packed, make it longer on demand. Does
        nothing for a model that is sharded over several processes."""
        layout, max_positions = self.layout, self.layout.max_positions
        num_positions = request.max_num_tokens - 1  # no forward computes the last token
        if max_positions is None or num_positions <= max_positions:
            return
        if not layout.can_grow_unpacked or self.leader is not None:
            return
        limit = MAX_GROWTH * max(max_positions, request.num_prompt_tokens)
        grow_positions(self.model, min(num_positions, limit))
        probe_cache = empty_cache(self.model, PagedMemory(self.config))
        grown_layout = choose_layout(self.model, probe_cache, self.config.batch_invariant)
        # if the model can no longer run in the loop's layout, the next step notices it
        if dataclasses.replace(grown_layout, max_positions=max_positions) == layout:
            self.layout = grown_layout

    def _prepare_inputs(self, state: RequestState) -> None:
        """Prepares a prompt with inputs besides token ids. Raises `ValueError` if the engine cannot
        compute it."""
        assert state.request.inputs is not None
        if self.config.batch_invariant:
            raise batch_invariant_error(self.model, "prompts are more than token ids")
        is_packed = self.layout.unsupported_reason is None
        if is_packed:
            reason = find_media().prepare(
                self._capability, self.layout, state.request, self.config.prefix_caching
            )
        else:
            self.layout, reason = find_rectangles().prepare(
                self._capability, self.layout, state, state.request.inputs[0]
            )
        if reason is not None:
            raise ServedByGenerateError(
                f"an engine cannot serve these `inputs` of {type(self.model).__name__}: {reason}."
                ' Call `model.generate(..., cache_implementation="paged")`'
            )
        if not is_packed:
            self.note_route()

    def _choose_speculation(self, state: RequestState, reason: str | None) -> None:
        """Sets the request's `assistance` to `None` unless drafts are requested and possible.
        `reason`: why the layout or the prompt rules drafts out; `None` if neither does. Raises
        `ValueError` if the request's own options ask for drafts that are not possible."""
        assistance = state.assistance
        config = state.decoding.config
        assert assistance is not None and self.loop is not None
        if reason is None and not self.loop.executor.runner.supports_drafts:
            reason = Topic.ASSISTED("rotary factors depend on a row's length")
        option = option_for_drafts(config, assistance.assistant_model)
        if option is not None:
            if reason is None:
                speculation: SpeculationRoom = room("speculation", f"`{option}`")
                reason = speculation.reason_against(self.model, config, assistance)
            if reason is not None:
                raise ValueError(
                    f"the engine cannot assist this request: {reason}. Leave out `{option}`, or"
                    " call `generate` with one row"
                )
            return
        source = "`speculation`" if self.config.speculation is not None else "`parts.drafter`"
        draft_source = self.config.speculation or self._parts.drafter
        if reason is not None and draft_source is not None:
            scope = "" if state.request.inputs is None else " for some requests"
            self.loop.executor.slowed_by.add(f"{source} has no effect{scope}: {reason}")
        if reason is not None or draft_source is None:
            state.assistance = None


def _config_repr(model: PreTrainedModel) -> str:
    return repr(vars(model.config.get_text_config(decoder=True)))
