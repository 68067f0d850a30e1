"""Decides whether the engine can serve a `generate` call, using tables of reasons against it."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import torch

from .. import compat, rooms
from ..attention.masks import unpadded_columns
from ..batching.arguments import Assistance, option_for_drafts
from ..batching.decoding.base import StopChecker
from ..batching.decoding.prepare import LoopCall
from ..batching.decoding.scores import are_row_wise
from ..batching.execution.prompts import Prompts, find_media, prompts_of, uncommon_names
from ..batching.factory import choose_layout, find_rectangles, make_runner
from ..cache.paged_cache import PagedCache
from ..config import PagedConfig
from ..model.capability import Capability
from ..model.layout import Layout
from ..model.own_loop import mismatched_rows
from ..model.rope import find_length_rope
from ..model.sharding import is_sharded
from ..model.structure import is_stock, overridden
from ..topics import Topic
from .call import Call, first_rows

RIGHT_PADDED = Topic.RIGHT_PADDING(
    "the batch is right-padded: set `tokenizer.padding_side = 'left'`"
)
SOFT_MASK = Topic.INPUTS("the attention mask has values other than 0 and 1")


def applicable_reasons(reasons: dict[str, Any]) -> Iterator[str]:
    """Yields the reasons whose conditions hold."""
    return itertools.compress(reasons, reasons.values())


class Candidate:
    """A decoding loop of a `generate` call that the engine may serve. The layout, the paddings and
    the prompts are valid once `reasons_against` has yielded nothing."""

    def __init__(
        self, call: Call, loop: LoopCall, cache: PagedCache, adapter_names: list[str] | None
    ) -> None:
        arguments = loop.arguments
        self.call = call
        self.model = call.model
        self.cache = cache  # empty, built for the call
        # one per row or per prompt; `None` if the call passes none
        self.adapter_names = adapter_names
        self.inputs = loop.inputs()  # each prompt `call.repeats` times
        self.config = self.inputs.generation_config
        # this call's config: the config of its memory may come from another thread's call
        self.paged_config = PagedConfig.coerce(self.config.cache_config)
        # inputs of the model's forward
        self.model_kwargs: dict[str, Any] = arguments.get("model_kwargs", {})
        self.streamer = arguments.get("streamer")
        self.uses_beams = loop.method == compat.BEAM_SEARCH
        self.assistance: Assistance | None = None
        if loop.method == compat.ASSISTED_DECODING:
            self.assistance = Assistance(
                arguments.get("assistant_model"),
                arguments.get("tokenizer"),
                arguments.get("assistant_tokenizer"),
            )
        self.capability = Capability(self.model, cache, make_runner)
        self.layout = Layout()
        self.paddings: list[int] = []  # left padding of each row
        # one row per prompt; `None` if prompts are only token ids with consecutive positions
        self.prompts: Prompts | None = None

    def reasons_against(self) -> Iterator[str]:
        """Yields the reasons why the engine cannot serve the call. Only the first counts: later
        checks may assume that earlier checks have passed."""
        yield from self._reasons_against_options()
        reason = next(self._reasons_against_packing(), None)
        is_invariant = self.paged_config.batch_invariant
        if reason is None:
            if is_invariant and self.prompts is not None:
                yield Topic.INPUTS("prompts are more than token ids")
        elif is_invariant:
            yield reason
        else:
            try:
                rectangles = find_rectangles()
            except rooms.RoomMissingError as error:
                yield f"{reason}; {Topic.ROOMS(str(error))}"
            else:
                yield from rectangles.reasons_against_call(self, reason)
        if self.adapter_names is not None:
            num_rows = len(self.paddings)
            is_packed = self.layout.unsupported_reason is None
            has_criteria = StopChecker(self.inputs.stopping_criteria).callers_criteria
            may_run_model = has_criteria or not are_row_wise(self.inputs.logits_processor, num_rows)
            yield from applicable_reasons(
                {
                    Topic.ADAPTERS("`adapter_names` needs packed forwards of token ids"): (
                        not is_packed or self.prompts is not None
                    ),
                    Topic.ADAPTERS("`adapter_names` needs one name per prompt"): (
                        len(self.adapter_names) not in (num_rows, num_rows // self.call.repeats)
                    ),
                    Topic.ADAPTERS(
                        "`guidance_scale`, or a processor or criterion of the caller, may run the"
                        " model, and the rows have different adapters"
                    ): len(set(self.adapter_names)) > 1 and may_run_model,
                }
            )
        if self.assistance is not None:
            option = option_for_drafts(self.config, self.assistance.assistant_model)
            speculation: rooms.SpeculationRoom = rooms.room("speculation", f"`{option}`")
            yield from speculation.reasons_against_call(self, self.assistance)

    def _reasons_against_options(self) -> Iterator[str]:
        model = self.model
        config = self.config
        model_kwargs = self.model_kwargs
        override = missing_beams = None
        if self.uses_beams:
            override = overridden(model, compat.BEAM_SEARCH)
            missing_beams = rooms.missing("beams", "`num_beams`")
        returns_internals = config.output_attentions or config.output_hidden_states
        is_chunked = config.prefill_chunk_size is not None
        mismatch = None
        is_soft = False
        num_rows = len(self.inputs.input_ids)
        if not model.config.is_encoder_decoder:  # an encoder's inputs may have fewer rows (Dia)
            mismatch = mismatched_rows(model_kwargs, num_rows)
            mask = model_kwargs.get("attention_mask")
            if isinstance(mask, torch.Tensor) and mask.dim() == 2:
                is_soft = bool((mask != mask.bool()).any())
        return applicable_reasons(
            {
                Topic.OPTIONS(str(missing_beams)): missing_beams is not None,
                Topic.MODEL_CODE(f"it overrides `{override}`"): override is not None,
                # if `generate` was called without its decorators
                Topic.OPTIONS("gradients are recorded"): torch.is_grad_enabled(),
                Topic.OPTIONS("`output_attentions` or `output_hidden_states` is set"): (
                    config.return_dict_in_generate and returns_internals
                ),
                # without a cache, transformers' loop passes all tokens in every step
                Topic.OPTIONS(f"`use_cache` is {model_kwargs.get('use_cache')!r}"): (
                    not model_kwargs.get("use_cache", True)
                ),
                Topic.OPTIONS("`is_assistant`, `prefill_chunk_size` or `low_memory` is set"): (
                    config.is_assistant or is_chunked or config.low_memory
                ),
                Topic.OPTIONS("user code that calls the loop may use the cache after it"): (
                    self.call.has_custom_loop
                ),
                Topic.RANKS("each rank would apply `max_time` by its own clock"): (
                    config.max_time is not None and is_sharded(model)
                ),
                Topic.INPUTS("transformers repeats images one by one instead of per row"): (
                    self.call.has_misassigned_images
                ),
                SOFT_MASK: is_soft,
                Topic.INPUTS(f"{mismatch}, but `input_ids` has {num_rows}"): mismatch is not None,
            }
        )

    def _reasons_against_packing(self) -> Iterator[str]:
        """Yields the reasons why rows cannot be packed."""
        yield from self._reasons_against_prompts()
        inputs_reason = self._reason_of_inputs()
        self.layout = layout = choose_layout(
            self.model, self.cache, self.paged_config.batch_invariant, self.capability
        )
        reason = layout.unsupported_reason
        if inputs_reason is not None:
            self.prompts = prompts = self.find_prompts()
            if prompts is None:
                yield inputs_reason
            elif reason is None:
                try:
                    self.prompts, reason = find_media().check(self.capability, prompts)
                except rooms.RoomMissingError as error:
                    reason = Topic.ROOMS(str(error))
            if reason is not None:
                yield f"{inputs_reason}, and {reason}"
        if reason is None:
            yield from applicable_reasons(
                {
                    Topic.PADDING("padding changes the rows' results"): (
                        not layout.can_mix_lengths and any(self.paddings)
                    ),
                    Topic.POSITIONS(
                        "the model's table of positions grows only in forwards that are not packed"
                    ): self._needs_longer_table(),
                    Topic.BATCH("the longest row determines the rotary factors of all rows"): (
                        self._mixes_rotary_factors()
                    ),
                }
            )
        else:
            yield reason

    def _reasons_against_prompts(self) -> Iterator[str]:
        """Yields the reasons why the prompts are not plain rows of tokens, padded only on the left.
        If there are none, sets `paddings`."""
        model_kwargs = self.model_kwargs
        ids = self.inputs.input_ids
        logits_to_keep = model_kwargs.get("logits_to_keep")
        keeps_last = isinstance(logits_to_keep, int) and logits_to_keep == 1
        has_rows = ids.dim() == 2
        num_tokens = ids.shape[1] + self.num_embedded if has_rows else 0
        yield from applicable_reasons(
            {
                Topic.ENCODER("the model has an encoder"): self.model.config.is_encoder_decoder,
                Topic.OPTIONS("`logits_to_keep` is set"): (
                    logits_to_keep is not None and not keeps_last
                ),
                Topic.INPUTS("there are no token ids"): not num_tokens,
                Topic.INPUTS("`inputs_embeds` and token ids differ in length"): (
                    has_rows and self.num_embedded and ids.shape[1]
                ),
            }
        )
        mask = model_kwargs.get("attention_mask")
        row_tensors = [ids]
        if mask is not None:
            if mask.shape != (len(ids), num_tokens):
                yield Topic.INPUTS("the attention mask and the token ids have different shapes")
            row_tensors.append(mask)
        columns = unpadded_columns(mask, len(ids), num_tokens)
        positions = model_kwargs.get("position_ids")
        repeats = self.call.repeats
        yield from applicable_reasons(
            {
                RIGHT_PADDED: mask is not None and (mask[:, -1] == 0).any(),
                Topic.INPUTS("the attention mask hides tokens inside a row"): columns is None,
                Topic.INPUTS("there is not one position id per token"): (
                    positions is not None
                    and (positions.dim() not in (2, 3) or positions.shape[-1] != num_tokens)
                ),
                Topic.INPUTS("the rows expanded from one prompt differ"): repeats > 1
                and any(first_rows(value, repeats) is None for value in row_tensors),
            }
        )
        assert columns is not None
        self.paddings = list(columns[0])

    def _reason_of_inputs(self) -> str | None:
        """Returns a reason if prompts have inputs other than token ids, or position ids other than
        0, 1, 2, ...; otherwise `None`."""
        names = list(uncommon_names(self.model_kwargs))
        if "labels" in names and is_stock(self.model, "prepare_inputs_for_generation"):
            names.remove("labels")  # transformers' code drops them
        if names:
            return Topic.INPUTS(f"model inputs other than token ids: {', '.join(names)}")
        positions = self.model_kwargs.get("position_ids")
        if positions is not None:
            # (rows, length), or with axes in front
            device = positions.device
            columns = torch.arange(positions.shape[-1], device=device)
            paddings = torch.tensor(self.paddings, device=device)
            expected = columns - paddings[:, None]
            differs = (positions != expected) & (expected >= 0)
            if differs.any():
                return Topic.INPUTS("the position ids are not 0, 1, 2, ... in each row")
        return None

    def serve_together(self, prompts: Prompts, layout: Layout) -> None:
        """Makes the engine serve the rows of these prompts in a layout that is not packed."""
        self.prompts, self.layout = prompts, layout
        self.paddings = [padding for padding in prompts.paddings for _ in range(self.call.repeats)]

    def find_prompts(self) -> Prompts | None:
        """Returns `Prompts` with one row per prompt; `None` if the call did not see the prompts
        before the model expanded them to rows."""
        unexpanded = self.call.unexpanded
        if unexpanded is None and self.call.repeats == 1:
            unexpanded = self.inputs.input_ids, self.model_kwargs
        if unexpanded is None:
            return None
        if self.config.token_healing:  # which has already changed the expanded ids
            ids = first_rows(self.inputs.input_ids, self.call.repeats)
            if ids is None:
                return None
            unexpanded = ids, unexpanded[1]
        return prompts_of(unexpanded, self.model_kwargs, self.model.config.is_encoder_decoder)

    def _needs_longer_table(self) -> bool:
        """Whether a row may need more positions than the model's table has, which packed forwards
        do not grow."""
        limit = self.layout.max_positions
        if limit is None or not self.layout.can_grow_unpacked:
            return False
        longest = self.config.max_length + self.num_embedded - min(self.paddings)
        return longest > limit + 1

    def _mixes_rotary_factors(self) -> bool:
        """Whether a row's rotary factors in this batch may differ from those that it would get
        alone, because rows differ in length."""
        if not any(self.paddings):
            return False
        rope = find_length_rope(self.model, self.model.modules())
        if rope is None:
            return False
        min_length = self.inputs.input_ids.shape[1] - max(self.paddings)
        min_factors = rope.factors_id(min_length + self.num_embedded)
        return min_factors != rope.factors_id(self.config.max_length + self.num_embedded)

    @property
    def num_embedded(self) -> int:
        """The number of tokens of each prompt that are given as embeddings, without token ids."""
        embeds = self.model_kwargs.get("inputs_embeds")
        if embeds is None or self.model.config.is_encoder_decoder:
            return 0
        return embeds.shape[1] - self.inputs.input_ids.shape[1]
