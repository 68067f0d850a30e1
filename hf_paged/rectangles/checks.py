"""The layouts of rectangles, and the checks that choose them with short steps on random tokens or
on a call's prompts. They compare side-by-side rows with plain forwards (`model.trial`), part of a
batch with the whole batch, and joined rows with separate rows. `capability` decides which checks
run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor
from transformers.utils import ModelOutput

from .. import compat
from ..batching.execution.prompts import EncoderUse
from ..model.layout import Layout
from ..model.own_loop import first_row, map_tensors, next_logits, tensors_of
from ..model.positions import num_positions
from ..model.trial import (
    ForwardFailedError,
    Trial,
    TrialRow,
    TrialRunner,
    sample_tokens,
    scratch_memory,
)
from ..model.writes import values_are_equal
from ..topics import Topic
from .rectangle import with_cross, with_join_keys

_LENGTHS = (8, 9, 13)  # prompt tokens of the three sequences in `_SIDE_BY_SIDE_STEPS`
# (row, new tokens) by step: a short and a long prompt; their decodes; a third row joins; the long
# row has left
_SIDE_BY_SIDE_STEPS = (
    ((0, _LENGTHS[0]), (2, _LENGTHS[2])),
    ((0, 1), (2, 1)),
    ((1, _LENGTHS[1]), (0, 1), (2, 1)),
    ((1, 1), (0, 1)),
)
_SIDE_BY_SIDE_LENGTHS = (11, 10, 15)  # tokens of each row after these steps
# Three prompts in two chunks. The second chunks are shorter or longer than a convolution's kernel;
# two of them have equal lengths, and share a forward.
_CONTINUING_STEPS = (
    ((0, _LENGTHS[0]), (2, 12), (1, 4)),
    ((0, 3), (2, 3), (1, 6)),
)


@dataclasses.dataclass(frozen=True)
class RectangleLayout(Layout):
    """A layout of rows that cannot be packed, and share forwards as rectangles."""

    # prefill and token-by-token decode may give different logits, so a recompute must split the
    # tokens into the same steps as the first computation
    depends_on_splits: bool = False

    @property
    def reason_against_drafts(self) -> str | None:
        if self.is_side_by_side and self.can_chunk:
            return None
        return self.unsupported_reason

    @property
    def reason(self) -> str:
        description = "rows stay in their original batch under the engine's scheduler"
        if self.is_side_by_side:
            description = "rows side by side under the engine's scheduler, not packed"
        return f"{description}: {self.unsupported_reason}"


# rows stay in the batch in which they began, with everything that the model's own loop carries from
# step to step
TOGETHER = RectangleLayout(
    "rows stay together",
    can_mix_lengths=False,
    is_side_by_side=False,
    can_chunk=False,
    depends_on_splits=True,
)


class PromptsRunner(TrialRunner):
    """Runs rows of `Prompts` that may have an encoder's output."""

    def add(self, tokens: list[int], num_prompt_tokens: int, **fields: Any) -> TrialRow:
        encoders = self.runner.encoder_blocks
        if encoders is not None:
            prompts, _ = fields["inputs"]
            fields["encoded"] = encoders.new()
            fields["encoded"].append(prompts.num_encoder_tokens)
        return super().add(tokens, num_prompt_tokens, **fields)

    def advance_isolated(self, *rows: TrialRow) -> Tensor:
        """Runs one step of `advance`, and undoes its writes into modules, so that the rows' next
        step finds the modules as if another call had run in between. Returns the logits."""
        with self.trial.forwards(by_engine=True):
            return self.advance(rows)


def side_by_side_check(trial: Trial) -> RectangleLayout:
    """Compares side-by-side rows, some of which join or leave, with plain forwards. Returns their
    layout, or `TOGETHER` if results differ or steps fail. Raises the same errors as `packed_check`.
    """
    model = trial.model
    decode_logits = []
    prefill_logits = []
    with trial.forwards():
        rows = sample_tokens(model)
        for row, prompt_length, length in zip(rows.split(1), _LENGTHS, _SIDE_BY_SIDE_LENGTHS):
            decode_logits.append(trial.decode_rows(row[:, :length], prompt_length)[:, 0])
            prefill_logits.append(trial.decode_rows(row[:, :length], length)[0, 0])
    last_logits = torch.stack([logits[-1] for logits in decode_logits])
    depends_on_splits = trial.difference(last_logits, torch.stack(prefill_logits)) is not None
    logits_iterators = list(map(iter, decode_logits))  # by row
    step_rows = [row for step in _SIDE_BY_SIDE_STEPS for row, _ in step]
    expected_logits = torch.stack([next(logits_iterators[row]) for row in step_rows])
    for can_mix_lengths in (True, False):
        layout = RectangleLayout(
            "not packed", can_mix_lengths, can_chunk=False, depends_on_splits=depends_on_splits
        )
        memory = scratch_memory()
        with contextlib.suppress(ForwardFailedError):
            computed_logits = trial.run(layout, rows, _LENGTHS, _SIDE_BY_SIDE_STEPS, memory)
            if trial.difference(expected_logits, computed_logits) is None:
                return dataclasses.replace(
                    layout,
                    can_chunk=(
                        not depends_on_splits and _can_chunk(trial, layout, rows, prefill_logits)
                    ),
                    max_positions=num_positions(trial)[0],
                    layers=memory.layers(),
                )
    return TOGETHER


def _can_chunk(
    trial: Trial, layout: RectangleLayout, rows: Tensor, prefill_logits: list[Tensor]
) -> bool:
    """Whether prompts computed in chunks have the `prefill_logits` of the same prompts computed as
    a whole."""
    first, second, third = prefill_logits
    with contextlib.suppress(ForwardFailedError):
        computed_logits = trial.run(layout, rows, _SIDE_BY_SIDE_LENGTHS, _CONTINUING_STEPS)
        return trial.difference(torch.stack([first, third, second]), computed_logits) is None
    return False


def rows_check(trial: Trial) -> str | EncoderUse:
    """Compares rows of `Prompts`, some of which leave or fork, with the whole batch in the model's
    own loop. Returns why rows cannot leave or fork or, if they can, how forwards use the encoder's
    outputs. Raises the same errors as `packed_check`."""
    model = trial.model
    memory = scratch_memory()
    prompts = copy.deepcopy(trial.prompts)
    batch_prompts = copy.deepcopy(prompts)
    batch_logits: list[Tensor] = []
    with trial.forwards(by_engine=True):
        ids = prompts.input_ids
        batch_cache = trial.cache.empty_twin(memory)
        inputs = {**batch_prompts.model_kwargs, compat.cache_name(model): with_cross(batch_cache)}
        for step in range(3):
            logits, inputs = next_logits(model, ids, inputs, is_first_step=not step)
            batch_logits.append(logits)
            new_tokens = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new_tokens], dim=1)
    num_attended = 0 if batch_cache.cross is None else batch_cache.cross.get_seq_length()
    use = _encoder_use(prompts, batch_prompts, num_attended)
    if isinstance(use, str):
        return use
    prompts = dataclasses.replace(prompts, encoder_use=use)
    runner = PromptsRunner(trial, TOGETHER, memory)
    rows = runner.add_prompts(prompts, ids[:, -3:])
    order = sorted(range(len(rows)), key=prompts.paddings.__getitem__)
    most_padded, least_padded = order[-1], order[0]
    condition = "with only some rows of its batch"
    try:
        first_logits = runner.advance_isolated(*rows)
        row = rows[least_padded]
        fork = dataclasses.replace(row, blocks=row.blocks.fork())
        pair_logits = runner.advance_isolated(row, fork)
        single_logits = batch_logits[1][[most_padded]]
        if most_padded != least_padded:
            single_logits = runner.advance_isolated(rows[most_padded])
        fork_logits = runner.advance_isolated(fork)
    except ForwardFailedError as error:
        return Topic.SELF_CHECK(f"{condition}, {error}")
    computed_logits = torch.cat([first_logits, pair_logits, single_logits, fork_logits])
    first, second, third = batch_logits
    second_logits = second[[least_padded, least_padded, most_padded]]
    expected_logits = torch.cat([first, second_logits, third[[least_padded]]])
    trial.dtypes.update(getattr(layer, "dtype", None) for layer in batch_cache.layers)
    difference = trial.difference(
        expected_logits, computed_logits, condition=condition, reference="the whole batch"
    )
    return difference or use


def _encoder_use(prompts: Any, prompts_after: Any, num_attended: int) -> EncoderUse | str:
    """Returns how forwards used the encoder's outputs, or why rows cannot leave or fork after these
    forwards. `prompts` and `prompts_after` hold the inputs before and after the forwards.
    `num_attended`: the number of encoder tokens per row of which the decoder stored K/V."""
    written_names = set[str]()
    for name, value in prompts.model_kwargs.items():
        tensors_after = tensors_of(prompts_after.model_kwargs[name])
        if not all(map(values_are_equal, tensors_after, tensors_of(value))):
            written_names.add(name)
    is_written = "encoder_outputs" in written_names
    if written_names - {"encoder_outputs"}:
        return Topic.MODEL_CODE("its forward writes to its inputs")
    if num_attended in (0, prompts.num_encoder_tokens):
        return EncoderUse(is_written=is_written)
    outputs = prompts.model_kwargs["encoder_outputs"]
    outputs = outputs.to_tuple() if isinstance(outputs, ModelOutput) else outputs
    for index, x in enumerate(outputs):
        if isinstance(x, Tensor) and x.dim() == 3 and x.shape[1] == num_attended:
            return EncoderUse(index, is_written)
    return Topic.ENCODER(
        "its decoder attends to a different number of tokens than its encoder returns"
    )


def join_check(trial: Trial) -> tuple[bool, bool] | None:
    """Compares rows of two prompts in one rectangle with the same rows in separate rectangles.
    Returns whether joined rows must have equal lengths, and whether they must have equal encoder
    lengths; `None` if rows cannot join, or if forwards fail."""
    model = trial.model
    width = trial.prompts.num_encoder_tokens
    first = _single_row(trial.prompts, width, 1)
    equal_second = _single_row(trial.prompts, width, -1)
    shorter_second = _single_row(trial.prompts, max(1, width - 3), -1)
    new_tokens = sample_tokens(model)[:1, :3]

    def compute(pair: list[Any], needs_equal_lengths: bool) -> Tensor:
        """Computes both prompts, then, unless lengths must be equal, one more token of the first
        row alone, then two more tokens of each row. The rows share forwards if their prompts have
        join keys. Returns the logits of all steps."""
        runner = PromptsRunner(trial, TOGETHER)
        (row,) = runner.add_prompts(pair[0], new_tokens)
        (other_row,) = runner.add_prompts(pair[1], new_tokens.flip(1))
        logits = [runner.advance_isolated(row, other_row)]
        if not needs_equal_lengths:
            logits.append(runner.advance_isolated(row))
        logits.append(runner.advance_isolated(row, other_row))
        logits.append(runner.advance_isolated(row, other_row))
        return torch.cat(logits)

    encoder_options = (False, True) if width > 1 else (True,)
    for requirements in itertools.product((False, True), encoder_options):
        needs_equal_lengths, needs_equal_encoders = requirements
        pair = [first, equal_second if needs_equal_encoders else shorter_second]
        keyed_pair = [with_join_keys(single, requirements) for single in pair]
        with contextlib.suppress(ForwardFailedError):
            separate_logits = compute(pair, needs_equal_lengths)
            joined_logits = compute(keyed_pair, needs_equal_lengths)
            if (
                keyed_pair[0].join_key is not None
                and trial.difference(separate_logits, joined_logits) is None
            ):
                return requirements
    return None


def _single_row(prompts: Any, width: int, sign: int) -> Any:
    """Returns `Prompts` of the first row alone, with its encoder tokens cut to `width`. `sign` -1
    negates the row's floating-point inputs, so that an exchange of two rows would change the
    logits."""
    num_encoded = prompts.num_encoder_tokens
    copied_prompts = copy.deepcopy(prompts)

    def cut_and_sign(x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = sign * x
        if x.dim() > 1 and x.shape[1] == num_encoded:
            return x[:, :width]
        return x

    return dataclasses.replace(
        copied_prompts,
        input_ids=copied_prompts.input_ids[:1],
        model_kwargs=map_tensors(cut_and_sign, first_row(copied_prompts)),
        paddings=copied_prompts.paddings[:1],
    )


def positions_check(trial: Trial) -> int | None:
    """Returns the number of positions in the shortest of the model's fixed tables; `None` if no
    limit is known. Passes a model with an encoder the encoder inputs of the trial's `Prompts`."""
    encoder_inputs = {}
    if trial.model.config.is_encoder_decoder:
        inputs = first_row(copy.deepcopy(trial.prompts))
        encoder_inputs = {name: x for name, x in inputs.items() if "decoder_" not in name}
    return num_positions(trial, encoder_inputs)[0]
