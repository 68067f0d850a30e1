"""Replays decode steps of rectangles: chooses the steps, packs their tokens, and defines the
forward that is recorded. `graphs.py` decides when it is recorded."""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.generation import GenerationMixin
from transformers.utils import ModelOutput

from .. import compat
from ..attention.masks import mask_observer, unpadded_columns
from ..batching.execution.inputs import GroupTokens, PackedTokens
from ..cache.paged_cache import PagedCache
from ..interrupts import is_interrupt, setting
from ..model.own_loop import cache_parts, next_inputs
from ..model.state import ModelState
from ..rectangles.states import state_or_indexer_layers, state_specs, state_tensors
from ..seams import ForwardContext
from ..step import NotCapturable, StepMetadata
from ..switches import NOTHING
from . import encoders
from .columns import Columns
from .encoders import encoder_lengths
from .graph_keys import MIN_TABLE_TOKENS
from .length import Length
from .recorders import note_unrecorded
from .step_cache import step_cache, store_states
from .step_inputs import (
    constants_of,
    is_row_input,
    note_row_inputs,
    outputs_of,
    passed_inputs,
    position_axes,
    token_types_of,
    with_cross_states,
    without_encoder_inputs,
)

if TYPE_CHECKING:
    from ..rectangles.rectangle import Rectangle
    from .graphs import StepGraphs

_LOGIT_COUNTS = ("logits_to_keep", "num_logits_to_keep")
_PREPARE = "prepare_inputs_for_generation"
_POSITION_INPUTS = ("position_ids", "decoder_position_ids", "cache_position")


class RectangleReplays:
    """Replays a model's decode steps in rectangles (`Recorder.rectangles`).

    A replay does not run the code that prepares masks. So the recorded forward gets masks of ones
    (with `reads_keys`: of the stored columns), and block tables and lengths determine the tokens to
    which each row attends. For the first step of each kind and size of tables, and for steps with
    shorter rows than any step checked before, the model's own forward also runs (`checks.Checks`).
    If its logits or states differ from those of the replay, steps of this kind are no longer
    replayed."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, recorder: StepGraphs) -> None:
        """`cache`: the model's empty cache."""
        self._model = model
        self._cache = cache
        self._recorder = recorder
        self._groups = list(cache.groups.values())
        self._cross_groups = [] if cache.cross is None else list(cache.cross.groups.values())
        self._ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        # the name of the argument with the mask of the decoder's tokens
        self._mask_name = "attention_mask"
        if model.config.is_encoder_decoder:
            self._mask_name = "decoder_attention_mask"
        self._state: ModelState | None = None
        # whether a user's code prepares steps, which may change values that the forward reads
        self._is_prepared_by_user = False
        self._values: tuple[Any, ...] | None = None  # those values in the step before
        self._reason_against_replays: str | None = None
        # about the running step, for the recorded forward and the check:
        self._prepared: dict[str, Any] = {}
        self._reads_mask = False  # as `encoders.reads_mask`
        # names of inputs that the encoder also takes, without the mask and the positions
        self._encoder_parameters = set[str]()
        self._width = self._num_axes = 0
        self._is_padded = False
        self._num_past_windows = 0  # layer groups whose windows hide the first position
        self._constants: Hashable = None
        self._token_types: dict[str, int] = {}
        self._row_masking: list[tuple[bool, bool, bool]] = []
        self._input_names: tuple[Hashable, ...] = ()  # of the rectangle's `row_inputs`
        self._tensor_names: Hashable = None  # `_input_names`, names of all inputs that are tensors
        self._unused_layers: frozenset[int] = frozenset()

    def begin(self, state: ModelState | None) -> None:
        """As `Runner.begin`."""
        model = self._model
        self._state = state
        self._values = None  # they keep parts of the model alive
        if state is None:
            return
        update = inspect.getattr_static(model, compat.UPDATE_INPUTS)
        self._has_own_update = update is not vars(GenerationMixin)[compat.UPDATE_INPUTS]
        self._reason_against_replays = None
        if not _is_of_transformers(update):
            # a user's method may do more than return inputs, and must see each step
            self._reason_against_replays = f"it overrides `{compat.UPDATE_INPUTS}`"
        prepare = inspect.getattr_static(model, _PREPARE)
        self._is_prepared_by_user = not _is_of_transformers(prepare)
        self._forward_parameters = _parameters(model)
        if self._cross_groups:
            encoder = inspect.signature(model.get_encoder().forward).parameters
            self._encoder_parameters = set(encoder) - {*_POSITION_INPUTS, "attention_mask"}
        self._cache_name = compat.cache_name(model)
        self._recorder.begin(state)

    def run(self, rectangle: Rectangle, prepared: dict[str, Any]) -> Tensor | None:
        """Replays a step with the model inputs `prepared`; returns logits `(rows, vocab_size)`, or
        `None` if no recording serves the step."""
        if self._state is None:
            return None
        recorder = self._recorder
        if self._is_prepared_by_user and self._are_values_changed():
            changed = f"its own `{_PREPARE}` changes a value that its code reads"
            self._reason_against_replays = changed
        reason = self._reason_against_replays or recorder.unsupported_reason
        if reason is not None:
            note_unrecorded(reason)
            return None
        if not self._state.is_in_place():
            note_unrecorded("its modules or tensors were replaced during the call")
            return None
        if rectangle.width - 1 not in recorder.lengths:
            note_unrecorded("its code compares the number of tokens with a size")
            return None
        self._token_types = token_types_of(prepared)
        tokens = self._pack(rectangle, prepared)
        if isinstance(tokens, str):
            note_unrecorded(tokens)
            return None
        self._width = rectangle.width
        self._is_padded = any(rectangle.paddings)
        self._num_axes = len(tokens.axes or ())
        self._row_masking = _masking_of_rows(rectangle, tokens.groups)
        self._unused_layers = rectangle.unused_layers
        self._prepared = without_encoder_inputs(prepared, self._encoder_parameters)
        self._constants = constants_of(self._prepared), tuple(self._token_types.items())
        layers = state_or_indexer_layers(cache_parts(rectangle.cache)[0])
        self._input_names = ()
        if rectangle.row_inputs is not None:
            layers.append(rectangle.row_inputs)
            self._input_names = rectangle.row_inputs.names
        names = frozenset(name for name, value in prepared.items() if isinstance(value, Tensor))
        self._tensor_names = self._input_names, names
        specs = state_specs(layers, rectangle.width - 1)
        kind = (self._is_padded, self._constants, self._input_names, specs, self._unused_layers)
        try:
            return recorder.run(
                tokens,
                None,
                self._forward,
                kind=kind,
                states=layers,
                checked_as=(
                    self._constants,
                    self._tensor_names,
                    self._unused_layers,
                    self._num_axes,
                    self._num_past_windows,
                    frozenset(self._row_masking),
                ),
            )
        finally:
            self._prepared = {}

    def _are_values_changed(self) -> bool:
        """Whether Python code of the forward reads other values than in the step before. A replay
        would use the values that the code read during the recording."""
        assert self._state is not None
        values = self._state.read_values()
        before, self._values = self._values or values, values
        return values is None or before is None or values[1:] != before[1:]

    def outputs(self, rectangle: Rectangle, prepared: dict[str, Any]) -> ModelOutput:
        """Returns the known outputs of the last replay: the cache, and the inputs in `prepared`
        that the model's own forward returns unchanged."""
        passed = self._recorder.checks.passed_inputs.get(self._tensor_names, {})
        return outputs_of(passed, prepared, rectangle.cache)

    def check(
        self,
        rectangle: Rectangle,
        replayed: Tensor,
        expected: Tensor,
        inputs: dict[str, Any],
        outputs: ModelOutput,
        prepared: dict[str, Any],
    ) -> None:
        """Compares the logits `(rows, vocab_size)` and states of the last replay with those of the
        model's own forward, separately for rows with different values of `_masking_of_rows`.
        `inputs`: the rectangle's inputs before the step. `outputs`: what the model's own forward
        returned for `prepared`. Steps of this kind are no longer replayed if logits or states
        differ, or if the next step's inputs depend on an output of the forward that `self.outputs`
        lacks."""
        results = [(expected, replayed)]
        copied = state_tensors(self._recorder.checks.copied_states)
        layers = state_or_indexer_layers(cache_parts(rectangle.cache)[0])
        # `copied` ends with the `row_inputs`, which the forward does not change
        results += zip(state_tensors(layers), copied)
        pairs = []
        for masking in {*self._row_masking}:
            rows = [row for row, value in enumerate(self._row_masking) if value == masking]
            pairs += [
                (expected_result[rows], replayed_result[rows])
                for expected_result, replayed_result in results
            ]
        reason = None
        passed = passed_inputs(outputs, prepared)
        self._recorder.checks.passed_inputs[self._tensor_names] = passed
        known_outputs = self.outputs(rectangle, prepared)
        if self._has_own_update and not self._can_update(rectangle, inputs, known_outputs):
            reason = f"its `{compat.UPDATE_INPUTS}` reads outputs of the forward"
        self._recorder.check(pairs, reason)

    def _can_update(
        self, rectangle: Rectangle, inputs: dict[str, Any], outputs: ModelOutput
    ) -> bool:
        """Whether the model's override of `compat.UPDATE_INPUTS` returns the next step's inputs
        (`rectangle.inputs`) for the last step's `inputs` and these `outputs` alone."""
        if not all(map(_is_plain, tree_flatten(inputs)[0])):
            return False  # an iterator, which the method may have advanced
        try:
            updated = next_inputs(self._model, outputs, inputs)
        except Exception as error:
            if is_interrupt(error):
                raise
            return False
        leaves, spec = tree_flatten(updated)
        expected, expected_spec = tree_flatten(rectangle.inputs)
        return spec == expected_spec and all(map(_is_equal, leaves, expected))

    def _pack(self, rectangle: Rectangle, prepared: dict[str, Any]) -> PackedTokens | str:
        """Returns the step as packed tokens, or why it cannot be recorded."""
        num_rows = len(rectangle.blocks)
        column = rectangle.width - 1  # of the new tokens
        if self._cross_groups and any(rectangle.paddings):
            return "rows with an encoder are padded"  # a position bias would need the padding
        encoder_ranges: list[tuple[int, int]] | None = []
        if self._cross_groups:
            reads_keys = self._recorder.reads_keys
            self._reads_mask = encoders.reads_mask(rectangle, prepared, reads_keys)
            encoder_ranges = encoders.visible_ranges(rectangle, prepared, self._reads_mask)
        if encoder_ranges is None:
            return "its rows do not attend to consecutive encoder tokens"
        reason = self._reason_against_inputs(prepared, rectangle)
        if reason is not None:
            return reason
        groups = []
        self._num_past_windows = 0
        for number, group in enumerate(self._groups):
            block_size = group.group_memory.block_size
            tables = [blocks.tables[number] for blocks in rectangle.blocks]
            block_ids = [table.block_ids for table in tables]
            num_dropped = [table.num_dropped for table in tables]
            self._num_past_windows += group.spec.first_visible(column) > 0
            if self._recorder.reads_keys and any(num_dropped):
                if column >= max(MIN_TABLE_TOKENS, 2 * block_size * max(map(len, block_ids))):
                    return "reading only the blocks of its windows is faster"
                # the forward gets tables as if no blocks were dropped, and its masks hide the
                # columns of dropped blocks
                rows_blocks = zip(num_dropped, block_ids)
                block_ids = [[*[ids[0]] * count, *ids] for count, ids in rows_blocks]
                num_dropped = [0] * num_rows
            if self._recorder.reads_keys and any(rectangle.paddings):
                # the forward gets a column for each token that a table can hold, so the table must
                # also cover padding: it repeats the row's last block, which is not read again
                num_blocks = column // block_size + 1
                block_ids = [[*ids, *ids[-1:] * (num_blocks - len(ids))] for ids in block_ids]
            if len({*num_dropped}) > 1 and not any(rectangle.paddings):
                return "the first keys of its rows have different positions"
            rows = zip(rectangle.paddings, num_dropped)
            origins = [padding + count * block_size for padding, count in rows]
            indices = [column - origin for origin in origins]
            slots = [
                ids[index // block_size] * block_size + index % block_size
                for ids, index in zip(block_ids, indices)
            ]
            seq_lens = [index + 1 for index in indices]
            groups.append(GroupTokens(slots, block_ids, seq_lens, origins))
        starts = [start for start, _ in encoder_ranges]
        ends = [end for _, end in encoder_ranges]
        for number in range(len(self._cross_groups)):
            block_ids = [blocks.tables[number].block_ids for blocks in rectangle.encoded]
            groups.append(GroupTokens([-1] * num_rows, block_ids, ends, [0] * num_rows, starts))
        ids = prepared.get(self._ids_name)  # which a model's own code may have replaced
        if ids is None or ids.shape != (num_rows, 1):
            ids = rectangle.token_ids
        token_ids = ids[:, -1].tolist()
        last = list(range(num_rows))
        positions = [column] * num_rows
        query_start = [*last, num_rows]
        axes = position_axes(prepared, num_rows, column)
        return PackedTokens(token_ids, positions, last, query_start, num_rows, groups, [], axes)

    def _reason_against_inputs(self, prepared: dict[str, Any], rectangle: Rectangle) -> str | None:
        """Returns why the recorded forward, which replaces some of the inputs in `prepared`, may
        give other results than a forward with `prepared`; `None` if it gives the same. Sets the
        rectangle's `row_inputs`."""
        unsupported = "recordings do not support its input `{}`"
        if any(rectangle.paddings) and self._mask_name not in prepared:
            return unsupported.format(self._mask_name)
        replaced = {self._ids_name, self._cache_name, "encoder_outputs"}
        replaced.update(self._token_types)
        if self._cross_groups and not self._reads_mask:
            replaced.add(encoders.MASK)  # by `encoders.visible_ranges`
        row_inputs: dict[str, Tensor] = {}
        for name, value in prepared.items():
            if name in replaced or self._is_input_supported(name, value, rectangle):
                continue
            is_special = name in (self._mask_name, *_POSITION_INPUTS)
            is_tensor = isinstance(value, Tensor)
            if is_special or not (is_tensor and is_row_input(name, value, rectangle)):
                return unsupported.format(name)
            row_inputs[name] = value
        return note_row_inputs(rectangle, row_inputs)

    def _is_input_supported(self, name: str, value: Any, rectangle: Rectangle) -> bool:
        num_rows, width = len(rectangle.blocks), rectangle.width
        if not isinstance(value, Tensor):  # numbers, except logit counts, may change in every step
            return value is None or isinstance(value, (bool, str)) or name in _LOGIT_COUNTS
        if name == self._mask_name:
            unpadded = tuple(rectangle.paddings), (width,) * num_rows
            return value.dim() == 2 and unpadded_columns(value, num_rows, width) == unpadded
        if name == "position_ids" and value.shape[-2:] in ((num_rows, 1), (1, 1)):
            return torch.equal(value, value.round())  # `position_axes` converts to integers
        if name in self._encoder_parameters:
            return True
        if name not in _POSITION_INPUTS or value.shape not in ((num_rows, 1), (1, 1), (1,)):
            return False
        return bool((value == width - 1).all())

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: list[StepMetadata],
        logit_indices: Tensor | None,
        context: ForwardContext | None,
        position_ids: Tensor | None = None,
        states: Sequence[Tensor] = (),
    ) -> Tensor:
        """The recorded forward (`graphs.Forward`): takes `token_ids` and `positions` `(1, n)`, a
        step per layer group, `position_ids` `(axes, 1, n)` or `(1, n)` (`None`: the columns), and
        `states` `(n, ...)`; returns logits `(n, vocab_size)`. `logit_indices` and `context` are
        `None`."""
        num_rows = token_ids.shape[1]
        column_steps = []
        for step in steps:
            assert step.slots is not None
            columns = range(step.block_tables.shape[1] * step.block_size)
            slots = step.slots.view(num_rows, 1)
            # these only say whether any row is padded, since replays read the origins in `lengths`
            origins = (int(self._is_padded),) * num_rows
            step = dataclasses.replace(step, slots=slots, columns=columns, origins=origins)
            column_steps.append(step)
        assert self._state is not None
        self._state.mark_unchecked()
        arguments = self._arguments(token_ids, positions, column_steps, position_ids)
        running_cache, *_ = cache_parts(self._prepared[self._cache_name])
        reads_keys = self._recorder.reads_keys
        layers = state_or_indexer_layers(running_cache)
        input_tensors = {}
        if self._input_names:
            num_states = len(states) - len(self._input_names)
            input_tensors = dict(zip(self._input_names, states[num_states:], strict=True))
            states = states[:num_states]
        length = Length(positions[0, 0], self._width - 1, self._recorder.lengths)
        cache = step_cache(
            self._cache, column_steps, length, layers, states, reads_keys, self._unused_layers
        )
        prepared_cache = self._prepared[self._cache_name]
        arguments[self._cache_name] = with_cross_states(cache, prepared_cache, input_tensors)
        for name in arguments:
            arguments[name] = input_tensors.get(name, arguments[name])
        if reads_keys:
            arguments |= self._masks(column_steps)
        observing: AbstractContextManager[None] = NOTHING
        if self._reads_mask and not reads_keys:
            observing = setting(mask_observer, encoders.refuse_masked_handles)
        with observing:
            outputs = self._model(**arguments, return_dict=True)
        store_states(cache_parts(cache)[0], states)
        logits: Tensor = outputs.logits[:, -1]
        if isinstance(logits, Columns):
            raise NotCapturable("its forward uses indexer keys for more than a choice of columns")
        return logits

    def _arguments(
        self,
        token_ids: Tensor,
        positions: Tensor,
        column_steps: list[StepMetadata],
        position_ids: Tensor | None,
    ) -> dict[str, Any]:
        """Returns the model's arguments, except its cache and the masks of `_masks`."""
        num_rows = token_ids.shape[1]
        arguments = dict(self._prepared)
        for name, token_type in self._token_types.items():
            arguments[name] = token_ids.new_full((num_rows, 1), token_type)
        arguments[self._ids_name] = token_ids.view(num_rows, 1)
        if not column_steps:
            arguments.pop(self._mask_name, None)
        elif self._mask_name in self._forward_parameters:
            first = column_steps[0]
            capacity = first.block_tables.shape[1] * first.block_size
            arguments[self._mask_name] = token_ids.new_ones(num_rows, capacity)
        for name in _POSITION_INPUTS:
            prepared = arguments.get(name)
            if not isinstance(prepared, Tensor):
                continue
            if name == "position_ids" and position_ids is not None:
                by_row = position_ids.view(*prepared.shape[:-2], num_rows, 1)
                arguments[name] = by_row.to(prepared.dtype)
            elif prepared.dim() == 1:
                arguments[name] = positions[0, :1]
            else:
                arguments[name] = positions.view(num_rows, 1)
        if self._cross_groups:
            columns = column_steps[-1].columns
            assert columns is not None
            has_all_columns = self._recorder.reads_keys or self._reads_mask
            arguments[encoders.MASK] = None
            arguments["encoder_outputs"] = encoders.placeholder_outputs(
                self._prepared["encoder_outputs"], num_rows, len(columns) if has_all_columns else 1
            )
        return arguments

    def _masks(self, column_steps: list[StepMetadata]) -> dict[str, Tensor]:
        """Returns the mask arguments `(n, capacity)`, which select the columns that rows have
        stored, for a model whose code computes with all columns."""
        num_self_groups = len(column_steps) - len(self._cross_groups)
        masks = {}
        if self._mask_name in self._forward_parameters:
            self_steps = column_steps[:num_self_groups]
            unwindowed = [step for step in self_steps if step.window is None]
            masks[self._mask_name] = encoders.visible_columns((unwindowed or self_steps)[0])
        if self._cross_groups and not self._reads_mask:
            masks[encoders.MASK] = encoders.visible_columns(column_steps[-1])
        return masks


def _parameters(model: PreTrainedModel) -> set[str]:
    """Returns the names of the parameters of the model's forward and, as long as a forward takes
    `**kwargs`, which it may pass on, also of the next base class's forward."""
    names = set[str]()
    forwards = [vars(base)["forward"] for base in type(model).__mro__ if "forward" in vars(base)]
    for forward in (model.forward, *forwards):
        parameters = inspect.signature(forward).parameters
        names |= set(parameters)
        if all(x.kind is not inspect.Parameter.VAR_KEYWORD for x in parameters.values()):
            break
    return names


def _is_of_transformers(method: Any) -> bool:
    """Whether a method's code is transformers'. (`__module__` does not tell: `functools.wraps`
    copies it to a user's wrapper.)"""
    namespace = getattr(method, "__globals__", {})
    return str(namespace.get("__name__", "")).startswith("transformers.")


def _is_plain(value: Any) -> bool:
    return value is None or isinstance(value, (Tensor, Cache, bool, int, float, str))


def _is_equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) and isinstance(b, Tensor):
        return a.shape == b.shape and torch.equal(a, b)
    return a is b or (isinstance(a, (bool, int, float, str)) and a == b)


def _masking_of_rows(
    rectangle: Rectangle, groups: Sequence[GroupTokens]
) -> list[tuple[bool, bool, bool]]:
    """Returns for each row whether it has padding, and whether its first and its last encoder
    tokens are hidden. `groups`: the step's; with an encoder, the last has the encoder's tokens."""
    has_padding = [padding > 0 for padding in rectangle.paddings]
    if not groups or not groups[-1].starts:
        return [(is_padded, False, False) for is_padded in has_padding]
    hides_first = [start > 0 for start in groups[-1].starts]
    hides_last = [*map(operator.lt, groups[-1].seq_lens, encoder_lengths(rectangle))]
    return list(zip(has_padding, hides_first, hides_last))
