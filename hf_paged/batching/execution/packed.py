"""A scheduled batch to model inputs to logits: one packed `[1, sum(query_len)]` forward, nothing padded."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING, NamedTuple

import torch
from transformers import PreTrainedModel

from ...cache.paged_cache import PagedCache
from ...model.state import ModelState
from ...step import StepMetadata
from .graphs.decodes import decode_graphs

if TYPE_CHECKING:
    from ...cache.block_table import BlockTable
    from ..request import Sequence


class GroupShare(NamedTuple):
    """What a layer group needs of a step, on the host."""

    slots: list[int]  # of all tokens
    tables: list[list[int]]  # block ids of each row
    seq_lens: list[int]  # tokens that each table holds, those of the step included


class Layout(NamedTuple):
    """A step on the host: the packed tokens, and each group's share."""

    token_ids: list[int]
    positions: list[int]
    last: list[int]  # packed positions whose logits are returned
    query_start: list[int]  # where each row begins, and the end of the last
    num_decodes: int  # leading rows with one token each
    shares: list[GroupShare]

    @property
    def is_decode(self) -> bool:
        """Whether every token is a sequence of its own whose logits are returned."""
        return self.num_decodes == len(self.token_ids) == len(self.last)


class PackedRunner:
    """
    Runs the model's own forward on tokens of many sequences at once; steps of nothing but decodes as replays of a graph
    where there are graphs. The caller that runs a loop of steps switches the model's attention around it
    (`attention.switch.use_paged_attention`).

    Args:
        model (`PreTrainedModel`): A model that `capability.packable` allows.
        cache ([`PagedCache`]): Built for the model and empty: it tells which layers share tables, and owns the memory.

    Attributes:
        can_capture (`bool`): Whether steps may be replays.
        num_captured_steps (`int`): Those that were.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self.model = model
        self.device = model.device
        self.cache = cache
        self.windows: list[int | None] = [spec.window for spec in cache.groups]
        """Tokens that each layer group looks back; `tables[i]` of a sequence's blocks belongs to group `i`."""
        self._block_size = cache.memory.config.block_size
        self._rows = [TableRows() for _ in self.windows]
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters
        self._captured = decode_graphs(model, cache)
        self.can_capture, self.has_states = self._captured is not None, False
        self._is_known = False  # whether the model's state was read when this work began
        self.num_captured_steps = 0

    def begin(self, state: ModelState | None) -> None:
        """
        Work begins on the model in this state, which stays as it is until the work ends. Without one, which is how a
        runner starts, no step is a replay.
        """
        self._is_known = state is not None
        if state is not None and self._captured is not None:
            self._captured.begin(state)

    def rest(self) -> None:
        """Nothing is kept between steps."""

    @torch.no_grad()
    def run(self, items: Items[tuple[Sequence, int]], adapter: str | None = None) -> torch.Tensor:
        """
        Computes the last `query_len` of the first `num_computed_tokens` tokens of each sequence.

        Args:
            items (`Sequence[tuple[Sequence, int]]`): Sequences and their `query_len`, those with 1 first.
                `num_computed_tokens` counts the tokens of this step already, and the block tables have room for them.
            adapter (`str`, *optional*): That the model runs with now; it tells graphs apart.

        Returns:
            `torch.Tensor` of shape `(n, vocab_size)`, in the dtype of the model's logits: what follows the last token
            of each of the `n` sequences that are computed as far as they go, in order.
        """
        layout = self._lay_out(items)
        captured = self._captured if self._is_known and layout.is_decode else None
        if captured is not None:
            replayed = captured.run(layout, adapter, self._forward)
            if replayed is not None:
                self.num_captured_steps += 1
                return replayed
        logits = self._run_eagerly(layout)
        if captured is not None:
            captured.ran_eagerly(logits)
        return logits

    @torch.no_grad()
    def run_ahead(
        self, sequences: Items[Sequence], token_ids: torch.Tensor, adapter: str | None = None
    ) -> torch.Tensor | None:
        """
        The next token of each of these sequences, whose tokens are all computed, while the host does not have it yet:
        launches a replay and waits for nothing.

        Args:
            sequences (`Sequence[Sequence]`): Whose block tables have room for one more token.
            token_ids (`torch.Tensor` of shape `(n,)`, int64): The new tokens, on the device.
            adapter (`str`, *optional*): As in `run`.

        Returns:
            `torch.Tensor` of shape `(n, vocab_size)`: as `run`, or `None` where there is no graph for it.
        """
        if self._captured is None or not self._is_known:
            return None
        count = len(sequences)
        positions = [sequence.num_computed_tokens for sequence in sequences]
        items = [(sequence, 1) for sequence in sequences]
        shares = [self._share(items, group, 1) for group in range(len(self.windows))]
        layout = Layout([0] * count, positions, list(range(count)), list(range(count + 1)), count, shares)
        logits = self._captured.run_ahead(layout, token_ids, adapter, self._forward)
        self.num_captured_steps += logits is not None
        return logits

    def _run_eagerly(self, layout: Layout) -> torch.Tensor:
        inputs, steps = self._prepare(layout)
        last = layout.last
        kept = last or [len(layout.token_ids) - 1]  # a head with weights of another library's may refuse no rows
        arguments = {}
        if self._picks_logits and len(kept) < len(layout.token_ids):
            arguments["logits_to_keep"] = torch.tensor(kept, dtype=torch.long, device=self.device)
        logits = self._forward(inputs[0:1], inputs[1:2], steps, **arguments)[0]
        if logits.shape[0] != len(last):  # the forward gives those of every token
            logits = logits[torch.tensor(last, dtype=torch.long, device=logits.device)]
        return logits

    def _forward(
        self, token_ids: torch.Tensor, positions: torch.Tensor, steps: list[StepMetadata], **arguments: torch.Tensor
    ) -> torch.Tensor:
        """The model's own: `(1, n)` and `(1, n)` int64 to logits `(1, n, vocab_size)`."""
        self.cache.begin(steps)
        try:
            logits: torch.Tensor = self.model(
                input_ids=token_ids,
                position_ids=positions,
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **arguments,
            ).logits
        finally:
            self.cache.begin([None] * len(steps))
        return logits

    def _lay_out(self, items: Items[tuple[Sequence, int]]) -> Layout:
        token_ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        query_start = [0]
        num_decodes = 0
        for sequence, query_len in items:
            end, ids = sequence.num_computed_tokens, sequence.token_ids
            if query_len == 1:
                num_decodes += num_decodes == len(token_ids)  # only those in front
                token_ids.append(ids[end - 1])
                positions.append(end - 1)
            else:
                token_ids += ids[end - query_len : end]
                positions += range(end - query_len, end)
            query_start.append(len(token_ids))
            if end == len(ids):
                last.append(len(token_ids) - 1)
        shares = [self._share(items, group) for group in range(len(self.windows))]
        return Layout(token_ids, positions, last, query_start, num_decodes, shares)

    def _prepare(self, layout: Layout) -> tuple[torch.Tensor, list[StepMetadata]]:
        """
        Model inputs `(2 + groups, num_tokens)` int64: token ids, positions, then every group's slots; each group's
        share of the step.
        """
        # one buffer, so that a device gets one copy
        buffer = array("q", layout.token_ids)
        buffer.extend(layout.positions)
        for share in layout.shares:
            buffer.extend(share.slots)
        inputs = torch.frombuffer(buffer, dtype=torch.long).view(2 + len(layout.shares), -1).to(self.device)
        query_start = tuple(layout.query_start)
        steps = [
            StepMetadata(
                self._rows[group].tensor(tables).to(self.device),
                query_start,
                tuple(seq_lens),
                (0,) * len(seq_lens),
                self._block_size,
                window=self.windows[group],
                slots=inputs[2 + group : 3 + group],
                block_ids=tables[: layout.num_decodes],
            )
            for group, (_, tables, seq_lens) in enumerate(layout.shares)
        ]
        return inputs, steps

    def _share(self, items: Items[tuple[Sequence, int]], group: int, ahead: int = 0) -> GroupShare:
        """Of sequences whose last computed token is this step's, or will be after `ahead` more tokens."""
        size = self._block_size
        slots: list[int] = []
        tables: list[list[int]] = []
        seq_lens: list[int] = []
        for sequence, query_len in items:
            table = sequence.blocks.tables[group]
            seq_len = sequence.num_computed_tokens + ahead - table.num_dropped * size
            block_ids = table.block_ids
            if query_len == 1:
                slots.append(block_ids[(seq_len - 1) // size] * size + (seq_len - 1) % size)
            else:
                slots += chunk_slots(table, seq_len - query_len, seq_len)
            tables.append(block_ids)
            seq_lens.append(seq_len)
        return GroupShare(slots, tables, seq_lens)


def chunk_slots(table: BlockTable, first: int, end: int) -> list[int]:
    """Slots of tokens `[first, end)`, counted from the first that the table holds."""
    size = table.block_size
    if first < 0 or end > len(table.block_ids) * size:
        raise ValueError(
            f"tokens [{first}, {end}) of a table that holds {len(table.block_ids)} blocks of {size} tokens"
        )
    slots: list[int] = []
    for block in range(first // size, -(-end // size)):
        start, base = block * size, table.block_ids[block] * size
        slots += range(base + max(0, first - start), base + min(size, end - start))
    return slots


class TableRows:
    """
    Block tables of a step's rows as one tensor. From step to step only the rows that changed are written, in place: by
    then no code may read through the step before.
    """

    def __init__(self) -> None:
        self._known: list[list[int]] = []
        self._width = 0
        self._buffer = array("i")
        self._tensor = torch.empty(0, 0, dtype=torch.int32)

    def tensor(self, tables: list[list[int]]) -> torch.Tensor:
        """
        `(len(tables), max_blocks)` int32 on the CPU, valid until the next call; what is past a row's ids means nothing.
        """
        rows, width = len(tables), max(map(len, tables), default=0)
        if rows > self._tensor.shape[0] or width > self._width:
            self._resize(max(rows, self._tensor.shape[0]), width)
        known, buffer = self._known, self._buffer
        for row, block_ids in enumerate(tables):
            if known[row] != block_ids:
                known[row] = block_ids.copy()
                start = row * self._width
                buffer[start : start + len(block_ids)] = array("i", block_ids)
        return self._tensor[:rows]

    def _resize(self, rows: int, width: int) -> None:
        self._width = max(width + width // 2, self._width)  # block tables grow by one block at a time
        self._known = [[] for _ in range(rows)]
        self._buffer = array("i", bytes(4 * rows * self._width))
        # shares the buffer, which is never resized
        self._tensor = torch.frombuffer(self._buffer, dtype=torch.int32).view(rows, self._width)
