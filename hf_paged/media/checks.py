"""Checks of `MediaPrompts`: comparisons with plain forwards (`model.trial`)."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..batching.execution.prompts import Prompts
from ..batching.request import Request
from ..model.capability import Capability
from ..model.checks import is_forward_failure
from ..model.layout import Layout
from ..model.own_loop import pad_token_id
from ..model.trial import ForwardFailedError, Trial, TrialRow, TrialRunner, sample_tokens
from ..model.writes import alter_value
from ..topics import Topic
from .prompts import MediaPrompts


class PromptsVerdict(NamedTuple):
    """Whether rows may decode in packed steps after the model's own forward has computed their
    prompts, and how other prompts may use cached prefixes."""

    unsupported_reason: str | None = None  # why they cannot; `None`: they can
    can_reuse: bool = False  # other prompts may use a prompt's cached prefix
    can_begin_after_text: bool = False  # the model's own forward may begin after cached text


def check(capability: Capability, prompts: Prompts) -> tuple[MediaPrompts, str | None]:
    """Implements `rooms.MediaRoom.check`."""
    model = capability.model
    media_prompts = MediaPrompts(prompts.input_ids, prompts.model_kwargs, prompts.paddings)
    media_prompts.prepare_positions(model)
    for name, value in media_prompts.decode_inputs.items():
        if not isinstance(value, (Tensor, bool)):  # `inputs_check` cannot try enough other values
            reason = f"decode steps may depend on `{name}`, which is not a tensor"
            return media_prompts, Topic.INPUTS(reason)
    has_text = media_prompts.media_start(model.config) > 0
    names = media_prompts.names
    call_kind = names, media_prompts.axis_counts, media_prompts.hides_tokens, has_text
    verdict = capability.verdict(prompts_check, "packed", media_prompts, call_kind)
    if isinstance(verdict, str):
        verdict = PromptsVerdict(verdict)
    if media_prompts.user_inputs(model):  # their values may affect the K/V of every prompt token
        verdict = verdict._replace(can_reuse=False, can_begin_after_text=False)
    reason, media_prompts.can_reuse, media_prompts.can_begin_after_text = verdict
    if reason is None and media_prompts.decode_inputs:
        reason = capability.verdict(inputs_check, "packed", media_prompts, names)
    return media_prompts, reason


def prepare(
    capability: Capability, layout: Layout, request: Request, prefix_caching: bool
) -> str | None:
    """Implements `rooms.MediaRoom.prepare`."""
    assert request.inputs is not None
    prompts, reason = check(capability, request.inputs[0])
    if reason is not None:
        return reason
    config = capability.model.config
    has_user_inputs = bool(prompts.user_inputs(capability.model))
    similarity_key = None if has_user_inputs else prompts.similarity_key(config)
    call_kind = prompts.names, prompts.axis_counts
    if similarity_key and capability.verdict(merge_check, "packed", prompts, call_kind) is True:
        prompts.merge_key = similarity_key
    keys = prompts.keys(config) if prefix_caching else None
    request.limit_positions(layout.max_positions, prompts.position_shift(0))
    request.set_inputs(prompts, 0, keys)
    return None


def prompts_check(trial: Trial) -> PromptsVerdict:
    """Runs prompts through the model's own forward, then packed decode steps, and compares the
    logits with plain forwards. Two more comparisons set the verdict's flags. For `can_reuse`, a
    packed step recomputes the text after each prompt's last placeholder. For
    `can_begin_after_text`, a packed step computes the text before a single prompt's first
    placeholder, and the model's own forward computes the rest of the prompt. Raises
    `ForwardFailedError` if a forward fails, except in the last comparison."""
    model, prompts = trial.model, trial.prompts
    new_tokens = sample_tokens(model)[:1, :2]  # stand for generated tokens
    with trial.forwards():
        plain = trial.decode(prompts.input_ids, prompts.model_kwargs, new_tokens)
    with trial.forwards(by_engine=True):
        runner = TrialRunner(trial, Layout())
        if runner.runner.rope is not None:
            return PromptsVerdict(
                Topic.BATCH("its rotary embedding depends on the largest position of a prompt")
            )
        rows = runner.add_prompts(prompts, new_tokens)
        packed = runner.advance(rows, num_steps=3)
        expected = plain.flatten(0, 1)
        quantity = "logits after a prompt"
        reason = trial.difference(expected, packed, quantity, reference="plain forwards")
        if reason is not None or not _drop_ends(runner, rows, prompts.keys(model.config)):
            return PromptsVerdict(reason)
        if trial.difference(plain[0], runner.advance(rows)) is not None:
            return PromptsVerdict()
    can_begin_after_text = False
    media_start = prompts.media_start(model.config)
    if media_start:
        with contextlib.suppress(ForwardFailedError), trial.forwards(by_engine=True):
            runner = TrialRunner(trial, Layout())
            logits = _logits_after_text(runner, prompts, new_tokens, media_start)
            can_begin_after_text = trial.difference(plain[:2, 0], logits) is None
    return PromptsVerdict(None, True, can_begin_after_text)


class _UnreadableTensor(Tensor):
    """Stands for a tensor that a forward must not read: every operation on it raises an error."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise RuntimeError("a decode step reads an input")


def inputs_check(trial: Trial) -> str | None:
    """Checks that decode steps ignore the `decode_inputs`, which packed steps do not get. Compares
    a plain decode step with two others in which these inputs are altered, so that each element has
    another value in at least one of them. An altered step that reads a tensor of the `user_inputs`
    fails, since only user code knows which values matter. Returns why the rows cannot decode packed
    if the logits differ or an altered step fails. Returns `None` if neither does: the verdict of
    `prompts_check` then holds for all values of these inputs. Raises `ForwardFailedError` if a
    forward fails with the inputs as they are."""
    prompts = trial.prompts
    new_token = sample_tokens(trial.model)[:1, :1]
    decode = functools.partial(trial.decode, prompts.input_ids, prompts.model_kwargs, new_token)
    with trial.forwards():
        plain = decode()
    user_inputs = prompts.user_inputs(trial.model)
    for alter in (alter_value, _zero_or_invert):
        altered_inputs: dict[str, Any] = {}
        for name, value in prompts.decode_inputs.items():
            is_unknown = name in user_inputs and isinstance(value, Tensor)
            altered_inputs[name] = (
                torch.empty(0).as_subclass(_UnreadableTensor) if is_unknown else alter(value)
            )
        logits = None
        with contextlib.suppress(ForwardFailedError), trial.forwards():
            logits = decode(later_inputs=altered_inputs)
        if logits is None or not torch.equal(plain, logits):
            return Topic.INPUTS("its decode steps may depend on these inputs")
    return None


def _zero_or_invert(value: Tensor | bool) -> Tensor | bool:
    return torch.zeros_like(value) if isinstance(value, Tensor) else not value


def _drop_ends(runner: TrialRunner, rows: list[TrialRow], keys: Any) -> bool:
    """Drops the computed tokens after each prompt's last placeholder, or after the first token of a
    prompt without placeholders. Returns `False`, and drops none, if a row could not recompute them
    or if `keys`, the `PromptKeys` by row, is `None`."""
    if keys is None:
        return False
    kept_lengths = [max(1, key.media_end) for key in keys]
    for row, end in zip(rows, kept_lengths):
        if end >= row.num_prompt_tokens:
            return False
        for group, table in zip(runner.manager.groups, row.blocks.tables):
            if table.first_token > group.spec.first_visible(end):
                return False
    for row, end in zip(rows, kept_lengths):
        row.blocks.truncate(end)
        row.num_computed_tokens = end
    return True


def _logits_after_text(
    runner: TrialRunner, prompts: Any, new_tokens: Tensor, media_start: int
) -> Tensor:
    """Computes the text before the only row's media in a packed step, then the rest of the prompt,
    then a packed decode step. Returns the logits of the last two steps."""
    (row,) = runner.add_prompts(prompts, new_tokens)
    text = runner.add(row.tokens, media_start)
    runner.advance([text])
    row = dataclasses.replace(
        row, blocks=text.blocks, num_computed_tokens=media_start, media_start=media_start
    )
    return runner.advance([row], num_steps=2)


def merge_check(trial: Trial) -> bool:
    """Whether one forward of the trial's prompts together with longer prompts that have different
    images, and the packed decode step after it, give the logits of separate plain forwards."""
    model, prompts = trial.model, trial.prompts
    text_token, new_token = sample_tokens(model)[:1, :2].split(1, dim=1)
    longer = prompts.varied(int(text_token))
    try:
        with trial.forwards():
            plain = [
                trial.decode(part.input_ids, part.model_kwargs, new_token)
                for part in (prompts, longer)
            ]
        with trial.forwards(by_engine=True):
            merged_prompts = prompts.merged((longer,), pad_token_id(model))
            longer.prepare_positions(model)
            merged_prompts.prepare_positions(model)
            if merged_prompts.axes != [*prompts.axes, *longer.axes]:
                return False  # the model counts padding as positions
            runner = TrialRunner(trial, Layout())
            packed = runner.advance(runner.add_prompts(merged_prompts, new_token), num_steps=2)
        return trial.difference(torch.cat(plain, dim=1).flatten(0, 1), packed) is None
    except Exception as error:  # separate forwards may still fit in memory
        if not is_forward_failure(error):
            raise
        return False
