"""Decides whether the engine can serve a `generate` call or an engine's prompt in rectangles."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from ..batching.execution.prompts import Prompts
from ..batching.factory import make_runner
from ..batching.generation import RequestState
from ..generation.candidate import Candidate, true_reasons
from ..model.capability import Capability
from ..model.layout import Layout
from ..topics import Topic
from .capability import join_requirements, max_positions, reason_against_rows
from .layout import TOGETHER
from .rectangle import set_join_keys


def reasons_against_call(call: Candidate, reason: str) -> Iterator[str]:
    """Yields the reasons why the engine cannot run the rows of a call; `reason` says why they
    cannot be packed. If rows cannot join those of other calls, they stay together, in their
    original batch: then sets the layout and the paddings of such rows."""
    layout = call.layout
    returns_cache = call.config.return_dict_in_generate
    if reason == layout.unsupported_reason and layout.is_side_by_side and not returns_cache:
        if layout.can_mix_lengths or not any(call.paddings):
            return
        reason = Topic.PADDING(f"padding changes the rows' results, and {reason}")
    repeats = call.call.repeats
    call.prompts = prompts = call.prompts or call.find_prompts()
    if prompts is None:
        yield Topic.MODEL_CODE(f"{reason}, and the model overrides how rows are repeated")
        return
    positions = prompts.position_ids
    num_repeated = len(prompts.input_ids) * repeats
    yield from true_reasons(
        {
            Topic.OPTIONS(
                f"the cache is returned (`return_dict_in_generate`), and {reason}"
            ): returns_cache,
            Topic.INPUTS(f"{reason}, and it is unknown which rows belong to which prompt"): repeats
            > 1
            and num_repeated != len(call.inputs.input_ids),
            Topic.INPUTS(f"{reason}, and there is not one position id per token"): (
                positions is not None and positions.shape[-1] != prompts.length
            ),
        }
    )
    capability = Capability(call.model, call.cache, make_runner)
    rows_reason = reason_against_rows(capability, prompts)
    if rows_reason and any(prompts.paddings):  # the model may attend to padding
        prompts.paddings = [0] * len(prompts.paddings)
        rows_reason = reason_against_rows(capability, prompts)
    if rows_reason:
        yield rows_reason if rows_reason in reason else f"{reason}, and {rows_reason}"
    set_join_keys(prompts, join_requirements(capability, prompts))
    call.layout = dataclasses.replace(
        TOGETHER,
        unsupported_reason=reason,
        max_positions=max_positions(capability, prompts),
    )
    call.paddings = [padding for padding in prompts.paddings for _ in range(repeats)]


def prepare(
    capability: Capability, layout: Layout, state: RequestState, prompts: Prompts
) -> tuple[Layout, str | None]:
    """Prepares an engine's prompt with inputs. Returns the layout of the loop that runs it, and why
    it cannot run; `None` if it can. Raises `IndexError` if the prompt is longer than the model's
    table of positions."""
    model = capability.model
    if not model.config.is_encoder_decoder:
        state.encode_media(model)
    reason = reason_against_rows(capability, prompts)
    if reason is not None:
        return layout, reason
    set_join_keys(prompts, join_requirements(capability, prompts))
    shift = prompts.position_shift(0)
    state.request.limit_positions(max_positions(capability, prompts), shift)
    prompts.assign(state.request, 0, None, False)
    # the layout, chosen without these prompts, may rule out side-by-side rows, which they allow
    if prompts.join_key is not None:
        layout = dataclasses.replace(layout, is_side_by_side=True)
    return layout, None
