"""Replays decode steps of rectangles: chooses the steps, packs their tokens, and defines the
forward that a `Recorder` records and replays."""

from __future__ import annotations

import dataclasses
import inspect
import logging
from collections.abc import Hashable, Iterable
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.generation import GenerationMixin
from transformers.modeling_outputs import BaseModelOutput
from transformers.utils import ModelOutput

from .. import compat
from ..attention.masks import padding_columns
from ..batching.execution.inputs import GroupTokens, PackedTokens
from ..batching.execution.rectangle import Rectangle
from ..cache.paged_cache import PagedCache
from ..cache.states import StateRows, state_layers, state_tensors
from ..model.own_loop import cache_parts
from ..model.state import ModelState
from ..model.trial import excess_of
from ..seams import ForwardContext
from ..step import StepMetadata
from .length import Length
from .step_cache import step_cache, store_states

if TYPE_CHECKING:
    from .graphs import StepGraphs

logger = logging.getLogger(__name__)

_COUNTS = ("logits_to_keep", "num_logits_to_keep")
_POSITIONS = ("position_ids", "decoder_position_ids", "cache_position")


class RectangleReplays:
    """Replays a model's decode steps in rectangles (`seams.RectangleRecorder`).

    A replay does not run the code that prepares masks, so the recorded forward gets masks that hide
    nothing (with `reads_keys`, only columns that are not stored), and the tokens that each row sees
    come from its block tables. The model's own forward also computes the first step of each kind,
    from the same states: if logits or states differ, steps of this kind are not replayed."""

    def __init__(self, model: PreTrainedModel, cache: PagedCache, recorder: StepGraphs) -> None:
        """`cache`: the model's empty cache."""
        self._model = model
        self._cache = cache
        self._recorder = recorder
        self._groups = list(cache.groups.values())
        self._cross = [] if cache.cross is None else list(cache.cross.groups.values())
        self._ids_name = "decoder_input_ids" if model.config.is_encoder_decoder else "input_ids"
        # the argument that hides tokens of the decoder
        self._mask_name = "attention_mask"
        if model.config.is_encoder_decoder:
            self._mask_name = "decoder_attention_mask"
        self._state: ModelState | None = None
        # of the running step, for the forward
        self._prepared: dict[str, Any] = {}
        self._width = self._num_axes = 0
        self._is_padded = False
        self._constants: Hashable = None
        self._zero_token_types: list[str] = []
        self._masking: list[tuple[bool, bool]] = []
        # layers with the states of a replay that is not checked yet
        self._unchecked_layers: list[Any] = []

    def begin(self, state: ModelState | None) -> None:
        """As `Runner.begin`."""
        model = self._model
        self._state = state
        if state is None:
            return
        update = inspect.getattr_static(model, compat.UPDATE_INPUTS)
        self._uses_stock_update = update is vars(GenerationMixin)[compat.UPDATE_INPUTS]
        self._forward_parameters = inspect.signature(model.forward).parameters
        self._cache_name = compat.cache_name(model)
        self._recorder.begin(state)

    def run(self, rectangle: Rectangle, prepared: dict[str, Any]) -> Tensor | None:
        """Replays a step with the model inputs `prepared`; returns logits `(rows, vocab_size)`, or
        `None` if no recording serves the step."""
        self._unchecked_layers = []
        if self._state is None or not self._uses_stock_update:
            return None
        recorder = self._recorder
        if recorder.unsupported_reason is not None or not self._state.is_in_place():
            return None
        if rectangle.width - 1 not in recorder.lengths:
            return None
        self._zero_token_types = _zero_token_types(prepared)
        tokens = self._pack(rectangle, prepared)
        if tokens is None:
            return None
        self._width = rectangle.width
        self._is_padded = any(rectangle.paddings)
        self._num_axes = len(tokens.axes or ())
        self._constants = _constants(prepared), tuple(self._zero_token_types)
        cross_lengths = tokens.groups[-1].seq_lens if self._cross else ()
        self._masking = _row_masking(rectangle, cross_lengths)
        if not recorder.replay_matches.get(self._kind, True):
            return None
        self._prepared = prepared
        kind = (self._is_padded, self._constants)
        layers = rectangle.state_layers
        if layers and not self.is_checked:
            # a copy, since the model's own forward starts from these states, too
            rows = list(range(len(rectangle.blocks)))
            self._unchecked_layers = layers = StateRows([(layers, rows)]).state_layers
        try:
            return recorder.run(tokens, None, self._forward, kind=kind, states=layers)
        finally:
            self._prepared = {}

    @property
    def _kind(self) -> Hashable:
        """The kind of the last step: one check holds for all steps of a kind."""
        return self._constants, self._num_axes, frozenset(self._masking)

    @property
    def is_checked(self) -> bool:
        """Whether the last step is of a kind whose replay has given the logits of the model's own
        forward."""
        return self._kind in self._recorder.replay_matches

    def check(self, rectangle: Rectangle, replayed: Tensor, expected: Tensor) -> None:
        """Compares the logits `(rows, vocab_size)` and states of the last replay with those of the
        model's own forward, separately for rows with and without hidden tokens; if any differ,
        steps of this kind are no longer replayed."""
        pairs = [(expected, replayed)]
        pairs += zip(state_tensors(rectangle.state_layers), state_tensors(self._unchecked_layers))
        self._unchecked_layers = []
        excess = None
        for masking in {*self._masking}:
            rows = [row for row, other in enumerate(self._masking) if other == masking]
            for own, other in pairs:
                dtypes = (own.dtype, getattr(self._model, "dtype", None))
                compared = own[rows].flatten(1), other[rows].flatten(1)
                excess = excess or excess_of(*compared, dtypes)
        self._recorder.replay_matches[self._kind] = excess is None
        if excess is not None:
            logger.info(
                "one kind of rectangle steps is not replayed: its results differ by %s", excess
            )

    def _pack(self, rectangle: Rectangle, prepared: dict[str, Any]) -> PackedTokens | None:
        """Returns the step as packed tokens; `None` if it cannot be recorded."""
        num_rows = len(rectangle.blocks)
        position = rectangle.width - 1
        if self._cross and any(rectangle.paddings):
            return None  # a bias of positions would need each row's padding
        encoded = self._encoder_lengths(rectangle, prepared)
        if encoded is None or not self._are_supported(prepared, rectangle):
            return None
        groups = []
        for number, group in enumerate(self._groups):
            size = group.blocks.block_size
            tables = [blocks.tables[number] for blocks in rectangle.blocks]
            if self._recorder.reads_keys and any(table.num_dropped for table in tables):
                return None  # a mask would need each row's first column
            rows = zip(rectangle.paddings, tables)
            origins = [padding + table.num_dropped * size for padding, table in rows]
            indices = [position - origin for origin in origins]
            block_ids = [table.block_ids for table in tables]
            slots = [
                ids[index // size] * size + index % size for ids, index in zip(block_ids, indices)
            ]
            seq_lens = [index + 1 for index in indices]
            groups.append(GroupTokens(slots, block_ids, seq_lens, origins))
        for number in range(len(self._cross)):
            block_ids = [blocks.tables[number].block_ids for blocks in rectangle.encoded]
            groups.append(GroupTokens([-1] * num_rows, block_ids, encoded, [0] * num_rows))
        token_ids = rectangle.token_ids[:, -1].tolist()
        last = list(range(num_rows))
        positions = [position] * num_rows
        query_start = [*last, num_rows]
        axes = _axes(prepared, num_rows, position)
        return PackedTokens(token_ids, positions, last, query_start, num_rows, groups, [], axes)

    def _encoder_lengths(self, rectangle: Rectangle, prepared: dict[str, Any]) -> list[int] | None:
        """Returns how many of its first encoder tokens each row sees; `None` if a row sees other
        tokens."""
        if not self._cross:
            return []
        lengths = [blocks.tables[0].num_tokens for blocks in rectangle.encoded]
        width = max(lengths)
        columns: Iterable[tuple[int, int]] | None = rectangle.encoder_columns
        if columns is None:  # the model's own code attends to the encoder
            mask = prepared.get("attention_mask")
            if mask is None or bool(mask.all()):
                return lengths
            # a mask of the encoder's inputs
            if mask.shape != (len(lengths), width):
                return None
            visible = padding_columns(mask, len(lengths), width)
            if visible is None:
                return None
            columns = zip(*visible)
        num_visible = []
        for length, (first, end) in zip(lengths, columns):
            origin = width - length
            if first > origin or end <= origin:
                return None
            num_visible.append(end - origin)
        return num_visible

    def _are_supported(self, prepared: dict[str, Any], rectangle: Rectangle) -> bool:
        """Whether the recorded forward can take these inputs, or equivalent ones."""
        if any(rectangle.paddings) and self._mask_name not in prepared:
            return False
        handled = {self._ids_name, self._cache_name, "encoder_outputs"}
        handled.update(self._zero_token_types)
        if self._cross:
            handled.add("attention_mask")  # `_encoder_lengths`
        inputs = [(name, value) for name, value in prepared.items() if name not in handled]
        return all(self._is_supported(name, value, rectangle) for name, value in inputs)

    def _is_supported(self, name: str, value: Any, rectangle: Rectangle) -> bool:
        num_rows, width = len(rectangle.blocks), rectangle.width
        if not isinstance(value, Tensor):  # other numbers may change from step to step
            return value is None or isinstance(value, (bool, str)) or name in _COUNTS
        if name == self._mask_name:
            visible = tuple(rectangle.paddings), (width,) * num_rows
            return value.dim() == 2 and padding_columns(value, num_rows, width) == visible
        if name == "position_ids" and value.shape[-2:] in ((num_rows, 1), (1, 1)):
            return torch.equal(value, value.round())  # `_axes` passes integers
        if name not in _POSITIONS or value.shape not in ((num_rows, 1), (1, 1), (1,)):
            return False
        return bool((value == width - 1).all())

    def _forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        steps: list[StepMetadata],
        kept: Tensor | None,
        context: ForwardContext | None,
        position_ids: Tensor | None = None,
        states: Items[Tensor] = (),
    ) -> Tensor:
        """The recorded forward (`graphs.Forward`): `token_ids` and `positions` `(1, n)`, a step per
        layer group, `position_ids` `(axes, 1, n)` or `(1, n)` (`None`: the columns), and `states`
        `(n, ...)`; returns logits `(n, vocab_size)`. `kept` and `context` are `None`."""
        num_rows = token_ids.shape[1]
        column_steps = []
        for step in steps:
            assert step.slots is not None
            columns = range(step.block_tables.shape[1] * step.block_size)
            slots = step.slots.view(num_rows, 1)
            # nonzero if any row is padded; replays read `lengths.origins`
            origins = (int(self._is_padded),) * num_rows
            step = dataclasses.replace(step, slots=slots, columns=columns, origins=origins)
            column_steps.append(step)
        assert self._state is not None
        self._state.doubt()
        arguments = self._arguments(token_ids, positions, column_steps, position_ids)
        running, *_ = cache_parts(self._prepared[self._cache_name])
        reads_keys = self._recorder.reads_keys
        layers = state_layers(running)
        length = Length(positions[0, 0], self._width - 1, self._recorder.lengths)
        cache = step_cache(self._cache, column_steps, length, layers, states, reads_keys)
        arguments[self._cache_name] = cache
        if reads_keys:
            arguments |= self._masks(column_steps)
        outputs = self._model(**arguments, return_dict=True)
        store_states(cache_parts(cache)[0], states)
        logits: Tensor = outputs.logits[:, -1]
        return logits

    def _arguments(
        self,
        token_ids: Tensor,
        positions: Tensor,
        column_steps: list[StepMetadata],
        position_ids: Tensor | None,
    ) -> dict[str, Any]:
        """The arguments of the forward, except its cache."""
        num_rows = token_ids.shape[1]
        arguments = dict(self._prepared)
        for name in self._zero_token_types:
            arguments[name] = token_ids.new_zeros(num_rows, 1)
        arguments[self._ids_name] = token_ids.view(num_rows, 1)
        if not column_steps:
            arguments.pop(self._mask_name, None)
        elif self._mask_name in self._forward_parameters:
            first = column_steps[0]
            capacity = first.block_tables.shape[1] * first.block_size
            arguments[self._mask_name] = token_ids.new_ones(num_rows, capacity)
        for name in _POSITIONS:
            like = arguments.get(name)
            if not isinstance(like, Tensor):
                continue
            if name == "position_ids" and position_ids is not None:
                rows = position_ids.view(*like.shape[:-2], num_rows, 1)
                arguments[name] = rows.to(like.dtype)
            elif like.dim() == 1:
                arguments[name] = positions[0, :1]
            else:
                arguments[name] = positions.view(num_rows, 1)
        if self._cross:
            arguments["attention_mask"] = None
            arguments["encoder_outputs"] = self._placeholder_encoder_outputs(
                num_rows, column_steps[-1]
            )
        return arguments

    def _masks(self, column_steps: list[StepMetadata]) -> dict[str, Tensor]:
        """Masks `(n, capacity)` of the tokens that rows have stored, for code that computes with
        all columns."""
        num_self = len(column_steps) - len(self._cross)
        masks = {}
        if self._mask_name in self._forward_parameters:
            self_steps = column_steps[:num_self]
            unwindowed = [step for step in self_steps if step.window is None]
            masks[self._mask_name] = _stored((unwindowed or self_steps)[0])
        if self._cross:
            masks["attention_mask"] = _stored(column_steps[-1])
        return masks

    def _placeholder_encoder_outputs(self, num_rows: int, step: StepMetadata) -> ModelOutput:
        """Placeholder encoder outputs of the step's size, which no recorded operation may read."""
        outputs = self._prepared["encoder_outputs"]
        assert step.columns is not None
        hidden = outputs[0]
        blank = hidden.new_empty(()).expand(num_rows, len(step.columns), hidden.shape[-1])
        kind = type(outputs) if isinstance(outputs, ModelOutput) else BaseModelOutput
        return kind(last_hidden_state=blank)


def _axes(prepared: dict[str, Any], num_rows: int, column: int) -> list[list[int]] | None:
    """The rows' position ids on each axis; `None` if they count columns, or there are none."""
    position_ids = prepared.get("position_ids")
    if not isinstance(position_ids, Tensor) or position_ids.dim() == 1:
        return None
    if position_ids.dim() == 2 and bool((position_ids == column).all()):
        return None
    rows = position_ids.expand(*position_ids.shape[:-2], num_rows, 1)
    axes: list[list[int]] = rows.reshape(-1, num_rows).long().tolist()
    return axes


def _stored(step: StepMetadata) -> Tensor:
    """Returns 1 for each column that a row has stored, else 0: `(n, columns)` int64."""
    assert step.columns is not None and step.lengths is not None
    lengths = step.lengths
    assert lengths.origins is not None
    columns = torch.arange(len(step.columns), device=lengths.origins.device)
    positions = columns - lengths.origins[:, None]
    return ((positions >= 0) & (positions < lengths.seq_lens[:, None])).long()


def _zero_token_types(prepared: dict[str, Any]) -> list[str]:
    """Names of token-type inputs that are 0 for the new token of every row."""
    names = []
    for name, value in prepared.items():
        if name.endswith("token_type_ids") and isinstance(value, Tensor):
            is_of_tokens = value.dim() == 2 and value.shape[1] == 1
            if is_of_tokens and value.dtype is torch.int64 and not bool(value.any()):
                names.append(name)
    return names


def _constants(prepared: dict[str, Any]) -> Hashable:
    """The inputs that are recorded as constants."""
    items = prepared.items()
    return tuple((name, value) for name, value in items if isinstance(value, (bool, int, str)))


def _row_masking(rectangle: Rectangle, encoded: Items[int]) -> list[tuple[bool, bool]]:
    """Whether each row has padding, and whether it sees fewer tokens of its encoder, `encoded`,
    than its encoder has."""
    hides = [False] * len(rectangle.paddings)
    for row, num_visible in enumerate(encoded):
        hides[row] = num_visible < rectangle.encoded[row].tables[0].num_tokens
    return [(padding > 0, is_hiding) for padding, is_hiding in zip(rectangle.paddings, hides)]
