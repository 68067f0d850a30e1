"""What an engine checks before a request enters its loop, and prepares for it."""

from __future__ import annotations

from transformers import PreTrainedModel

from ..cache.paged_cache import PagedCache
from ..config import PagedConfig
from ..model.capability import Capability
from ..model.layout import Layout
from ..rooms import SpeculationRoom, room
from ..seams import EngineParts
from ..topics import Topic
from .arguments import ServedByGenerateError, option_for_drafts
from .execution.prompts import Prompts
from .factory import make_runner, not_invariant
from .generation import RequestState


class Admission:
    """Requests of one model whose state stays as it is: checks of prompts with inputs run once.
    `empty`: the model's empty cache."""

    def __init__(
        self, model: PreTrainedModel, config: PagedConfig, parts: EngineParts, empty: PagedCache
    ) -> None:
        self._model = model
        self._config = config
        self._parts = parts
        self._capability = Capability(model, empty, make_runner, known={})

    def take_inputs(self, state: RequestState, layout: Layout) -> bool:
        """Prepares a prompt with inputs for the loop's forwards; returns whether its rows join
        those of others in a rectangle. Raises `ValueError` if the forwards cannot take it."""
        if state.request.inputs is None:
            return False
        if self._config.batch_invariant:
            raise not_invariant(self._model, "prompts are more than token ids")
        prompts: Prompts = state.request.inputs[0]
        if layout.unsupported_reason is None:
            self._take_packed(state, prompts, layout)
        else:
            self._take_rows(state, prompts)
        return prompts.joins is not None

    def _take_packed(self, state: RequestState, prompts: Prompts, layout: Layout) -> None:
        model = self._model
        prompts.find_positions(model)
        reason, can_reuse, begins_behind_text = self._capability.check_prompts(prompts)
        if reason is not None:
            raise self._not_served(reason)
        prompts.merges = self._capability.how_prompts_merge(prompts)
        keys = None
        if can_reuse and self._config.prefix_caching:
            keys = prompts.keys(model.config)
        state.request.limit_positions(layout.max_positions, prompts.shift(0))
        prompts.give(state.request, 0, keys, begins_behind_text)

    def _take_rows(self, state: RequestState, prompts: Prompts) -> None:
        model = self._model
        if not model.config.is_encoder_decoder:
            state.encode_media(model)
        reason = self._capability.reason_against_rows(prompts)
        if reason is not None:
            raise self._not_served(reason)
        prompts.set_joins(self._capability.how_rows_join(prompts))
        count = self._capability.max_positions(prompts)
        state.request.limit_positions(count, prompts.shift(0))
        prompts.give(state.request, 0, None, False)

    def _not_served(self, reason: str) -> ServedByGenerateError:
        return ServedByGenerateError(
            f"an engine cannot serve these `inputs` of {type(self._model).__name__}: {reason}. Call"
            ' `model.generate(..., cache_implementation="paged")`'
        )

    def check_prompt_logprobs(self, state: RequestState, layout: Layout) -> None:
        """Raises `ValueError` if the request wants `prompt_logprobs` and no forward of it returns
        the logits."""
        reason = layout.unsupported_reason
        if state.request.inputs is not None:
            reason = Topic.INPUTS("the prompt is more than token ids")
        if state.request.prompt_logprobs is not None and reason is not None:
            raise ValueError(
                f"`prompt_logprobs` needs packed forwards of token ids: {reason}. Leave it out, or"
                " take the logits of a forward of the model"
            )

    def choose_speculation(
        self,
        state: RequestState,
        layout: Layout,
        takes_drafts: bool,
    ) -> None:
        """Clears the request's assistance unless its row is drafted for. `takes_drafts`: whether
        the loop's forwards verify drafts. Raises `ValueError` if the request asks for assistance
        that cannot run."""
        assistance = state.assistance
        config = state.decoding.config
        assert assistance is not None
        reason = layout.reason_against_drafts
        if state.request.inputs is not None:
            reason = Topic.INPUTS("the prompt is more than token ids")
        elif reason is None and not takes_drafts:
            reason = Topic.ASSISTED("rotary factors depend on a row's length")
        option = option_for_drafts(config, assistance.model)
        if option is not None:
            if reason is None:
                speculation: SpeculationRoom = room("speculation", f"`{option}`")
                reason = speculation.reason_against(self._model, config, assistance)
            if reason is not None:
                raise ValueError(
                    f"the engine cannot assist this request: {reason}. Leave out `assistant_model`,"
                    " `prompt_lookup_num_tokens` and the like, or call `generate` with one row"
                )
        asks = option or self._config.speculation or self._parts.drafter
        if reason is not None or asks is None:
            state.assistance = None
