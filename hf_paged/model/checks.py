"""Checks of layouts: each compares short forwards in a layout, on random tokens or on a call's
prompts, with plain forwards. `capability` decides which check runs, and keeps its verdict."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import itertools
from typing import Any

import torch
from torch import Tensor

from .. import compat
from ..cache.free_memory import is_out_of_memory
from ..cache.memory import PagedMemory
from ..cache.storage import storage_of
from ..interrupts import is_interrupt
from ..kernels import uses_triton
from ..topics import Topic
from .layout import TOGETHER, Layout, PromptsVerdict
from .own_loop import first_row, map_tensors, next_logits, pad_token_id, tensors_of, with_cross
from .positions import num_positions
from .trial import (
    CONFIG,
    LENGTH,
    ForwardFailedError,
    Step,
    Trial,
    TrialRow,
    TrialRunner,
    sample_tokens,
    scratch_memory,
)
from .writes import Write, changed, copied, is_same, note_write

# prompt tokens of the first two sequences
_FIRST = 8
_SECOND = 9
# tokens of the third sequence's first chunk, and of its prompt where it has no chunks
_CHUNK = 18
_THIRD = 13
_PACKED_PROMPTS = (_FIRST, _SECOND, LENGTH)
# Prompts side by side; decodes beside a chunk after cached tokens; decodes alone, for which the
# head computes the logits of every token.
_PACKED_STEPS: tuple[Step, ...] = (
    ((0, _FIRST), (1, _SECOND), (2, _CHUNK)),
    ((0, 1), (1, 1), (2, LENGTH - _CHUNK)),
    ((0, 1), (1, 1)),
)
_PACKED_ENDS = (
    *((0, _FIRST), (1, _SECOND)),
    *((0, _FIRST + 1), (1, _SECOND + 1), (2, LENGTH)),
    *((0, _FIRST + 2), (1, _SECOND + 2)),
)
"""For each of these steps' logits: the row, and the number of tokens that precede them."""
# A short and a long row; a third row joins them; the long row has left.
_SIDE_STEPS = (
    ((0, _FIRST), (2, _THIRD)),
    ((0, 1), (2, 1)),
    ((1, _SECOND), (0, 1), (2, 1)),
    ((1, 1), (0, 1)),
)
_SIDE_ENDS = (11, 10, 15)  # of the rows' continuations
# Prompts in two chunks. Second chunks of equal length run side by side: they are shorter than a
# convolution's kernel, or longer.
_CONTINUING_STEPS = (
    ((0, _FIRST), (2, 12), (1, 4)),
    ((0, 3), (2, 3), (1, 6)),
)


def self_check(trial: Trial) -> Layout | str:
    """Compares packed steps with plain forwards of whole sequences and of decode steps. Returns the
    packed `Layout`, or how they differ. Raises `ForwardFailedError` if a plain forward fails;
    out-of-memory errors pass through."""
    model = trial.model
    with trial.forwards():
        rows = sample_tokens(model)
        whole = model(input_ids=rows, use_cache=False, return_dict=True).logits
        decoded = trial.plain(rows[:, : _FIRST + 2], _FIRST)
        padded_rows = rows[:, [0, 0, *range(_FIRST + 1)]]
        padded = trial.plain(padded_rows, _FIRST + 2, padding=2)
    memory = scratch_memory()
    try:
        packed = trial.run(Layout(), rows, _PACKED_PROMPTS, _PACKED_STEPS, memory)
    except ForwardFailedError as error:
        return Topic.SELF_CHECK(f"packed, {error}")
    alone = torch.stack([whole[row, end - 1] for row, end in _PACKED_ENDS])
    in_steps = torch.stack([decoded[1, 0], decoded[2, 1], decoded[2, 0]])
    reason = trial.difference(alone, packed) or trial.difference(
        in_steps, packed[[2, 3, 5]], "logits of decode steps"
    )
    if reason is None:
        # the model's `prepare_inputs_for_generation` may prepare other inputs for a first forward
        reason = trial.difference(decoded[0], whole[:, _FIRST - 1], "first logits")
    if reason is not None:
        return reason
    # the model may count padding as positions
    unpadded = decoded[:2].flatten(0, 1)
    can_mix_lengths = trial.difference(unpadded, padded.flatten(0, 1)) is None
    fixed, growing = num_positions(trial)
    if not rows.is_cpu and uses_triton(rows):
        run_kernels(trial)
    grows = growing is not None and (fixed is None or growing < fixed)
    return Layout(
        can_mix_lengths=can_mix_lengths,
        max_positions=growing if grows else fixed,
        grows_unpacked=grows,
        layers=memory.layers(),
    )


def run_kernels(trial: Trial) -> None:
    """Computes a packed prompt and a decode step in blocks of the size and dtype of the model's
    cache, unless the checks' blocks have the same: kernels that cannot run fail here, before a
    request needs them (`kernels.triton.launch`)."""
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
        # memory may not suffice for large blocks: requests then wait for them
        if not _is_expected(error):
            raise


def _is_expected(error: Exception) -> bool:
    """Whether the error means that a forward failed or ran out of memory."""
    return isinstance(error, ForwardFailedError) or (
        is_out_of_memory(error) and not is_interrupt(error)
    )


def invariance_check(trial: Trial) -> str | None:
    """Why the logits of a step are not bitwise equal to those of each row alone, or those of a
    prefill to those of decodes; `None` if they are. Raises as `self_check`."""
    layout = self_check(trial)
    if isinstance(layout, str):
        return layout
    rows = sample_tokens(trial.model)
    end = _FIRST + 2
    at_once = trial.run(Layout(), rows, (end, _SECOND, LENGTH), [((0, end),)])
    together, alone = _together_and_alone(trial, rows)
    decoded = alone[_PACKED_ENDS.index((0, end))]
    if torch.equal(together, alone) and torch.equal(at_once[0], decoded):
        return None
    return Topic.BATCH_INVARIANT("its forward does not compute every row by itself")


def mixing_check(trial: Trial) -> str | None:
    """How the logits of rows in one step differ from those of each row alone; `None` if they
    agree. Raises as `self_check`."""
    together, alone = _together_and_alone(trial, sample_tokens(trial.model))
    return trial.difference(alone, together, how="with several adapters in a forward")


def _together_and_alone(trial: Trial, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The logits of `_PACKED_STEPS`, and those of the same rows when each runs alone: both
    `(len(_PACKED_ENDS), vocab_size)`."""
    together = trial.run(Layout(), rows, _PACKED_PROMPTS, _PACKED_STEPS)
    alone = torch.empty_like(together)
    for row, prompt in enumerate(_PACKED_PROMPTS):
        indices = [index for index, (number, _) in enumerate(_PACKED_ENDS) if number == row]
        prefill = ((row, prompt),)
        decodes = [((row, 1),)] * (len(indices) - 1)
        alone[indices] = trial.run(Layout(), rows, _PACKED_PROMPTS, [prefill, *decodes])
    return together, alone


def side_check(trial: Trial) -> Layout:
    """Compares rows that run side by side, join and leave, with plain forwards. Raises as
    `self_check`."""
    model = trial.model
    prompts = _FIRST, _SECOND, _THIRD
    in_steps = []
    at_once = []
    with trial.forwards():
        rows = sample_tokens(model)
        for row, prompt, end in zip(rows.split(1), prompts, _SIDE_ENDS):
            in_steps.append(trial.plain(row[:, :end], prompt)[:, 0])
            at_once.append(trial.plain(row[:, :end], end)[0, 0])
    decoded = torch.stack([logits[-1] for logits in in_steps])
    depends_on_splits = trial.difference(decoded, torch.stack(at_once)) is not None
    logits_of_row = list(map(iter, in_steps))
    expected = torch.stack([next(logits_of_row[row]) for step in _SIDE_STEPS for row, _ in step])
    for can_mix_lengths in (True, False):
        layout = Layout("not packed", can_mix_lengths, depends_on_splits=depends_on_splits)
        memory = scratch_memory()
        with contextlib.suppress(ForwardFailedError):
            computed = trial.run(layout, rows, prompts, _SIDE_STEPS, memory)
            if trial.difference(expected, computed) is None:
                return layout._replace(
                    can_chunk=not depends_on_splits and _can_chunk(trial, layout, rows, at_once),
                    max_positions=num_positions(trial)[0],
                    layers=memory.layers(),
                )
    return TOGETHER


def _can_chunk(trial: Trial, layout: Layout, rows: Tensor, at_once: list[Tensor]) -> bool:
    """Whether prompts computed in chunks have the logits of `at_once`, the same prompts computed
    whole."""
    short, middle, long = at_once
    with contextlib.suppress(ForwardFailedError):
        computed = trial.run(layout, rows, _SIDE_ENDS, _CONTINUING_STEPS)
        return trial.difference(torch.stack([short, long, middle]), computed) is None
    return False


def rows_check(trial: Trial) -> str | None:
    """Compares rows of `Prompts`, some of which leave or fork, with the whole batch in the model's
    own loop. Returns how they differ, or `None`. Raises as `self_check`."""
    model = trial.model
    memory = scratch_memory()
    prompts = copy.deepcopy(trial.prompts)
    others = copy.deepcopy(prompts)
    plain: list[Tensor] = []
    with trial.forwards(by_engine=True):
        ids = prompts.input_ids
        twin = trial.cache.empty_twin(memory)
        inputs = {**others.model_kwargs, compat.cache_name(model): with_cross(twin)}
        for step in range(3):
            logits, inputs = next_logits(model, ids, inputs, begins=not step)
            plain.append(logits)
            new = logits.argmax(-1, keepdim=True)
            ids = torch.cat([ids, new], dim=1)
    if twin.cross is not None:
        num_attended = twin.cross.get_seq_length()
        if num_attended not in (0, prompts.num_encoder_tokens):
            return Topic.ENCODER(
                "its decoder attends to another number of tokens than its encoder returns"
            )
    after = tensors_of(others.model_kwargs)
    before = tensors_of(prompts.model_kwargs)
    if not all(map(is_same, after, before)):
        return Topic.MODEL_CODE("its forward writes to its inputs")
    runner = TrialRunner(trial, TOGETHER, memory)
    rows = runner.add_prompts(prompts, ids[:, -3:])
    order = sorted(range(len(rows)), key=prompts.paddings.__getitem__)
    a, b = order[-1], order[0]  # rows with the most padding and with the least
    try:
        all_rows = runner.advance_apart(*rows)
        fork = dataclasses.replace(rows[b], blocks=runner.manager.fork(rows[b].blocks))
        forked = runner.advance_apart(rows[b], fork)
        alone = plain[1][[a]]
        if a != b:
            alone = runner.advance_apart(rows[a])
        fork_alone = runner.advance_apart(fork)
    except ForwardFailedError as error:
        return Topic.SELF_CHECK(f"without all rows of its batch, {error}")
    computed = torch.cat([all_rows, forked, alone, fork_alone])
    at_first, at_second, at_third = plain
    expected = torch.cat([at_first, at_second[[b, b, a]], at_third[[b]]])
    trial.dtypes |= {getattr(layer, "dtype", None) for layer in twin.layers}
    return trial.difference(expected, computed, how="without all rows of its batch")


def join_check(trial: Trial) -> tuple[bool, bool] | None:
    """Compares rows of two prompts side by side with each alone. Returns whether their lengths, and
    those of their encoders, must be equal; `None` if the rows may not join. Raises as
    `self_check`."""
    model = trial.model
    width = trial.prompts.num_encoder_tokens
    first = _single(trial.prompts, width, 1)
    like = _single(trial.prompts, width, -1)
    shorter = _single(trial.prompts, max(1, width - 3), -1)
    new = sample_tokens(model)[:1, :3]

    def compute(second: Any, verdict: tuple[bool, bool], joins: bool) -> Tensor:
        """The logits of both rows, which begin together; unless lengths must be equal, one row then
        computes a token more than the other."""
        for single in (first, second):
            single.join_key = None
            single.set_join_keys(verdict if joins else None)
        runner = TrialRunner(trial, TOGETHER)
        (a,) = runner.add_prompts(first, new)
        (b,) = runner.add_prompts(second, new.flip(1))
        logits = [runner.advance_apart(a, b)]
        if not verdict[0]:
            logits.append(runner.advance_apart(a))
        logits.append(runner.advance_apart(a, b))
        logits.append(runner.advance_apart(a, b))
        return torch.cat(logits)

    encoders_must_be_equal = (False, True) if width > 1 else (True,)
    for verdict in itertools.product((False, True), encoders_must_be_equal):
        second = like if verdict[1] else shorter
        with contextlib.suppress(ForwardFailedError):
            alone = compute(second, verdict, joins=False)
            joined = compute(second, verdict, joins=True)
            if first.join_key is not None and trial.difference(alone, joined) is None:
                return verdict
    return None


def _single(prompts: Any, width: int, sign: int) -> Any:
    """The first row of `Prompts` with its encoder's tokens cut to `width`. `sign` -1 negates its
    content, so that swapped rows differ."""
    num_encoded = prompts.num_encoder_tokens
    single = copy.deepcopy(prompts)

    def shorten(x: Tensor) -> Tensor:
        if x.is_floating_point():
            x = sign * x
        if x.dim() > 1 and x.shape[1] == num_encoded:
            return x[:, :width]
        return x

    single.model_kwargs = map_tensors(shorten, first_row(single))
    single.input_ids = single.input_ids[:1]
    single.paddings = single.paddings[:1]
    return single


def positions_check(trial: Trial) -> int | None:
    """How many tokens of a row the model's tables of positions allow; for a model with an encoder,
    of a row of `Prompts`."""
    encoder_inputs = {}
    if trial.model.config.is_encoder_decoder:
        inputs = first_row(copy.deepcopy(trial.prompts))
        encoder_inputs = {name: x for name, x in inputs.items() if "decoder_" not in name}
    return num_positions(trial, encoder_inputs)[0]


def prompts_check(trial: Trial) -> PromptsVerdict:
    """Compares prompts that the model's own forward computes, and packed decode steps after them,
    with plain forwards. Then recomputes each prompt's end, which follows its images or other
    content, in a packed step; and a single prompt by the model's own forward behind its first
    text, which a packed step computed without the content. Raises as `self_check`."""
    model, prompts = trial.model, trial.prompts
    new = sample_tokens(model)[:1, :2]  # stand for generated tokens
    with trial.forwards():
        plain = trial.decode(prompts.input_ids, prompts.model_kwargs, new)
    with trial.forwards(by_engine=True):
        runner = TrialRunner(trial, Layout())
        if runner.runner.rope is not None:
            return PromptsVerdict(
                Topic.BATCH("its rotary embedding depends on the longest position of a prompt")
            )
        rows = runner.add_prompts(prompts, new)
        packed = runner.advance(rows, num_steps=3)
        reason = trial.difference(plain.flatten(0, 1), packed, "logits after a prompt")
        if reason is not None or not _forget_ends(runner, rows, prompts.keys(model.config)):
            return PromptsVerdict(reason)
        if trial.difference(plain[0], runner.advance(rows)) is not None:
            return PromptsVerdict()
    begins_behind_text = False
    num_text = prompts.num_text(model.config)
    if num_text:
        with contextlib.suppress(ForwardFailedError), trial.forwards(by_engine=True):
            behind = _behind_text(TrialRunner(trial, Layout()), prompts, new, num_text)
            begins_behind_text = trial.difference(plain[:2, 0], behind) is None
    return PromptsVerdict(None, True, begins_behind_text)


def _forget_ends(runner: TrialRunner, rows: list[TrialRow], keys: Any) -> bool:
    """Drops the tokens that rows computed behind the content of their prompts; `False` if rows
    cannot compute them again."""
    if keys is None:
        return False
    firsts = [max(1, key.num_content) for key in keys]
    for row, first in zip(rows, firsts):
        if first >= row.num_prompt_tokens:
            return False
        for group, table in zip(runner.manager.groups, row.blocks.tables):
            if table.first_token > group.spec.first_visible(first):
                return False
    for row, first in zip(rows, firsts):
        runner.manager.truncate(row.blocks, first)
        row.num_computed_tokens = first
    return True


def _behind_text(runner: TrialRunner, prompts: Any, new: Tensor, num_text: int) -> Tensor:
    """The logits of two steps of the only row of `Prompts`, whose first text is already cached."""
    (row,) = runner.add_prompts(prompts, new)
    text = runner.add(row.tokens, num_text)
    runner.advance([text])
    row = dataclasses.replace(
        row, blocks=text.blocks, num_computed_tokens=num_text, num_text=num_text
    )
    return runner.advance([row], num_steps=2)


def merge_check(trial: Trial) -> bool:
    """Compares one forward of `prompts` and of longer prompts with other images, and a packed
    decode step after it, with plain forwards of either."""
    model, prompts = trial.model, trial.prompts
    first, new = sample_tokens(model)[:1, :2].split(1, dim=1)
    longer = prompts.longer(int(first))
    try:
        with trial.forwards():
            plain = [
                trial.decode(part.input_ids, part.model_kwargs, new) for part in (prompts, longer)
            ]
        with trial.forwards(by_engine=True):
            together = prompts.merged((longer,), pad_token_id(model))
            longer.find_positions(model)
            together.find_positions(model)
            if together.axes != [*prompts.axes, *longer.axes]:
                return False  # the model counts padding as positions
            runner = TrialRunner(trial, Layout())
            packed = runner.advance(runner.add_prompts(together, new), num_steps=2)
        return trial.difference(torch.cat(plain, dim=1).flatten(0, 1), packed) is None
    except Exception as error:  # memory may suffice for separate forwards
        if not _is_expected(error):
            raise
        return False


Key = tuple[int, str]  # the id of a module's attributes or buffers, and a name in them
Writes = dict[Key, Write]


def judge_writes(trial: Trial) -> None:
    """Notes which attributes every forward of the trial writes and none reads, and which a forward
    reads although a forward of the engine wrote them."""
    last: Writes = {}
    by_engine = set[Key]()
    for write in trial.writes:
        key = id(write.table), write.name
        last[key] = write
        if write.by_engine:
            by_engine.add(key)
    if not last:
        return
    expected, _ = _logits_behind(trial, last)
    if expected is None:
        return
    groups: dict[tuple[type, str], list[Key]] = {}
    for key, write in last.items():
        attribute = type(write.module), write.name
        groups.setdefault(attribute, []).append(key)
    for keys in groups.values():
        altered = dict(last)
        for key in keys:
            altered[key] = last[key]._replace(after=changed(last[key].after))
        if all(is_same(altered[key].after, last[key].after) for key in keys):
            continue  # this type has no other value
        logits, overwritten = _logits_behind(trial, altered)
        is_read = logits is None or not torch.equal(logits, expected)
        for key in overwritten.intersection(keys):
            if not is_read or key in by_engine:
                note_write(trial.model, last[key], is_read)


def _logits_behind(trial: Trial, writes: Writes) -> tuple[Tensor | None, set[Key]]:
    """The logits of a forward that begins with the values `after` of these writes, `None` if it
    fails, and the keys of those that it overwrites."""
    overwritten = set[Key]()
    with contextlib.suppress(ForwardFailedError), trial.forwards():
        row = sample_tokens(trial.model)[:1, : _FIRST + 1]
        for write in writes.values():
            write.table[write.name] = copied(write.after)
        prompts = trial.prompts
        if prompts is None:
            logits = trial.plain(row, _FIRST)
        else:
            logits = trial.decode(prompts.input_ids, prompts.model_kwargs, row[:, :1])
        for key, write in writes.items():
            if not is_same(write.table.get(write.name), write.after):
                overwritten.add(key)
        return logits, overwritten
    return None, set()
