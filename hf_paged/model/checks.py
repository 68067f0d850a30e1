"""Self-checks on random tokens: whether packed forwards give the logits of plain ones, whether rows
are batch-invariant, how many positions the model has, and which of its attributes forwards write
and read. `capability` decides which checks run, and keeps their verdicts."""

from __future__ import annotations

import contextlib
import dataclasses

import torch
from torch import Tensor

from ..cache.free_memory import is_out_of_memory
from ..cache.memory import PagedMemory
from ..cache.storage import storage_of
from ..interrupts import is_interrupt
from ..kernels import uses_triton
from ..topics import Topic
from .layout import Layout
from .positions import num_positions
from .trial import (
    CONFIG,
    LENGTH,
    ForwardFailedError,
    Step,
    Trial,
    sample_tokens,
    scratch_memory,
)
from .writes import Write, alter_value, copy_value, note_write, values_are_equal

# prompt tokens of the first two sequences
_FIRST_LENGTH = 8
_SECOND_LENGTH = 9
_CHUNK_LENGTH = 18  # tokens of the third sequence's first chunk in packed steps
_PACKED_PROMPT_LENGTHS = (_FIRST_LENGTH, _SECOND_LENGTH, LENGTH)
# Two prompts and a chunk of a third; two decodes and the second chunk; decodes alone, for which the
# head computes the logits of every token.
_PACKED_STEPS: tuple[Step, ...] = (
    ((0, _FIRST_LENGTH), (1, _SECOND_LENGTH), (2, _CHUNK_LENGTH)),
    ((0, 1), (1, 1), (2, LENGTH - _CHUNK_LENGTH)),
    ((0, 1), (1, 1)),
)
_PACKED_LOGITS = (
    *((0, _FIRST_LENGTH), (1, _SECOND_LENGTH)),
    *((0, _FIRST_LENGTH + 1), (1, _SECOND_LENGTH + 1), (2, LENGTH)),
    *((0, _FIRST_LENGTH + 2), (1, _SECOND_LENGTH + 2)),
)
"""For each row of logits of `_PACKED_STEPS`: the sequence's index, and its number of tokens."""


def packed_check(trial: Trial) -> Layout | str:
    """Compares the logits of packed steps with the logits of plain forwards, which compute whole
    sequences at once or token by token. Returns the packed `Layout`, or the reason against it.
    Raises `ForwardFailedError` if a plain forward fails; out-of-memory errors pass through."""
    model = trial.model
    with trial.forwards():
        rows = sample_tokens(model)
        whole_logits = model(input_ids=rows, use_cache=False, return_dict=True).logits
        decode_logits = trial.decode_rows(rows[:, : _FIRST_LENGTH + 2], _FIRST_LENGTH)
        padded_rows = rows[:, [0, 0, *range(_FIRST_LENGTH + 1)]]
        padded_logits = trial.decode_rows(padded_rows, _FIRST_LENGTH + 2, padding=2)
    memory = scratch_memory()
    try:
        packed_logits = trial.run(Layout(), rows, _PACKED_PROMPT_LENGTHS, _PACKED_STEPS, memory)
    except ForwardFailedError as error:
        return Topic.SELF_CHECK(f"packed, {error}")
    expected = torch.stack([whole_logits[row, end - 1] for row, end in _PACKED_LOGITS])
    expected_decodes = torch.stack([decode_logits[1, 0], decode_logits[2, 1], decode_logits[2, 0]])
    reason = trial.difference(expected, packed_logits) or trial.difference(
        expected_decodes, packed_logits[[2, 3, 5]], "logits of decode steps"
    )
    if reason is None:
        # the model's `prepare_inputs_for_generation` may change the inputs of the first forward
        first_logits = whole_logits[:, _FIRST_LENGTH - 1]
        condition = "without `prepare_inputs_for_generation`"
        reference = "the first step of `generate`"
        reason = trial.difference(
            decode_logits[0], first_logits, "first logits", condition, reference
        )
    if reason is not None:
        return reason
    # the model may count padding as positions
    unpadded_logits = decode_logits[:2].flatten(0, 1)
    padding_difference = trial.difference(unpadded_logits, padded_logits.flatten(0, 1))
    num_fixed, num_growing = num_positions(trial)
    if not rows.is_cpu and uses_triton(rows):
        warm_up_kernels(trial)
    can_grow = num_growing is not None and (num_fixed is None or num_growing < num_fixed)
    return Layout(
        can_mix_lengths=padding_difference is None,
        max_positions=num_growing if can_grow else num_fixed,
        can_grow_unpacked=can_grow,
        layers=memory.layers(),
    )


def warm_up_kernels(trial: Trial) -> None:
    """Runs a packed prompt and a decode step on blocks in the format of the model's cache, so that
    a kernel that cannot run fails here rather than in a request (`kernels.triton.launch` remembers
    the failure). Does nothing if the other checks used that format. Ignores failed forwards and
    out-of-memory errors."""
    memory = trial.cache.memory
    config = dataclasses.replace(
        CONFIG,
        block_size=memory.config.block_size,
        kv_dtype=memory.config.kv_dtype,
        storage=memory.config.storage,
    )
    if config == CONFIG and memory.make_storage is storage_of:
        return
    end = LENGTH - 1
    steps = ((0, end),), ((0, 1),)
    try:
        rows = sample_tokens(trial.model)
        trial_memory = PagedMemory(
            config, is_bounded=False, sizes=memory.sizes, make_storage=memory.make_storage
        )
        trial.run(Layout(), rows, (end,), steps, trial_memory)
    except Exception as error:
        # large blocks may not fit in memory now, and requests can wait for memory
        if not is_forward_failure(error):
            raise


def is_forward_failure(error: Exception) -> bool:
    """Whether `error` shows that a forward failed or ran out of memory; false for interrupts."""
    return isinstance(error, ForwardFailedError) or (
        is_out_of_memory(error) and not is_interrupt(error)
    )


def invariance_check(trial: Trial) -> str | None:
    """Returns why rows are not batch-invariant; `None` if they are. They are if `packed_check`
    passes and logits are bitwise equal in two comparisons: rows in one step with each row alone,
    and a prefill with decodes. Raises the errors of `packed_check`, and `ForwardFailedError` if a
    later packed step fails."""
    layout = packed_check(trial)
    if isinstance(layout, str):
        return layout
    rows = sample_tokens(trial.model)
    end = _FIRST_LENGTH + 2
    prefill_logits = trial.run(Layout(), rows, (end, _SECOND_LENGTH, LENGTH), [((0, end),)])
    batched_logits, single_logits = batched_and_single_logits(trial, rows)
    decode_logits = single_logits[_PACKED_LOGITS.index((0, end))]
    if torch.equal(batched_logits, single_logits) and torch.equal(prefill_logits[0], decode_logits):
        return None
    return Topic.BATCH_INVARIANT("its logits depend on which tokens a forward computes together")


def batched_and_single_logits(trial: Trial, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the logits of `_PACKED_STEPS`, and the logits of the same sequences when each runs
    alone: both `(len(_PACKED_LOGITS), vocab_size)`."""
    batched_logits = trial.run(Layout(), rows, _PACKED_PROMPT_LENGTHS, _PACKED_STEPS)
    single = torch.empty_like(batched_logits)
    for row, prompt_length in enumerate(_PACKED_PROMPT_LENGTHS):
        indices = [index for index, (owner, _) in enumerate(_PACKED_LOGITS) if owner == row]
        prefill = ((row, prompt_length),)
        decodes = [((row, 1),)] * (len(indices) - 1)
        single[indices] = trial.run(Layout(), rows, _PACKED_PROMPT_LENGTHS, [prefill, *decodes])
    return batched_logits, single


# the id of a module's dict of attributes or buffers, and a name in that dict
WriteKey = tuple[int, str]
Writes = dict[WriteKey, Write]


def classify_writes(trial: Trial) -> None:
    """Records in `writes.Notes` two kinds of attributes that the trial's forwards wrote: attributes
    that every forward overwrites and none reads, and attributes that the engine's forwards
    overwrite and later forwards read."""
    last_writes: Writes = {}
    by_engine = set[WriteKey]()
    for write in trial.writes:
        key = id(write.table), write.name
        is_in_place = write.is_in_place and last_writes.get(key, write).is_in_place
        last_writes[key] = write._replace(is_in_place=is_in_place)
        if write.by_engine:
            by_engine.add(key)
    if not last_writes:
        return
    expected, _ = _logits_after(trial, last_writes)
    if expected is None:
        return
    groups: dict[tuple[type, str], list[WriteKey]] = {}
    for key, write in last_writes.items():
        attribute = type(write.module), write.name
        groups.setdefault(attribute, []).append(key)
    for keys in groups.values():
        altered_writes = dict(last_writes)
        for key in keys:
            write = last_writes[key]
            altered_writes[key] = write._replace(after=alter_value(write.after))
        if all(values_are_equal(altered_writes[key].after, last_writes[key].after) for key in keys):
            continue  # `alter_value` has nothing to alter
        logits, overwritten_keys = _logits_after(trial, altered_writes)
        is_read = logits is None or not torch.equal(logits, expected)
        for key in overwritten_keys.intersection(keys):
            if not is_read or key in by_engine:
                note_write(trial.model, last_writes[key], is_read)


def _logits_after(trial: Trial, writes: Writes) -> tuple[Tensor | None, set[WriteKey]]:
    """Sets each written attribute to its `Write.after`, then runs a prompt and a decode step.
    Returns the logits, and the keys of the attributes that these forwards overwrote. If a forward
    fails, returns `None` and no keys."""
    with contextlib.suppress(ForwardFailedError), trial.forwards():
        row = sample_tokens(trial.model)[:1, : _FIRST_LENGTH + 1]
        for write in writes.values():
            write.table[write.name] = copy_value(write.after)
        prompts = trial.prompts
        if prompts is None:
            logits = trial.decode_rows(row, _FIRST_LENGTH)
        else:
            logits = trial.decode(prompts.input_ids, prompts.model_kwargs, row[:, :1])
        overwritten_keys = {
            key
            for key, write in writes.items()
            if not values_are_equal(write.table.get(write.name), write.after)
        }
        return logits, overwritten_keys
    return None, set()
