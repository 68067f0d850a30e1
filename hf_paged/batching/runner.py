"""A scheduled batch to model inputs to logits: one packed `[1, sum(query_len)]` forward, nothing padded."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Sequence as Items
from typing import TYPE_CHECKING

import torch
from transformers import PreTrainedModel

from ..cache.packed import Chunk, PackedCache, PackedStep
from ..cache.paged_cache import PagedCache

if TYPE_CHECKING:
    from ..cache.block_table import BlockTable
    from .request import Sequence


class PackedRunner:
    """
    Runs the model's own forward on tokens of many sequences at once. Whoever runs a loop of steps switches the model's
    attention around it (`attention.switch.use_paged_attention`).

    Args:
        model (`PreTrainedModel`): A model that `capability.packable` allows.
        cache ([`PagedCache`]): Built for the model and empty: it tells which layers share tables, and owns the memory.
    """

    def __init__(self, model: PreTrainedModel, cache: PagedCache) -> None:
        self.model = model
        self.device = model.device
        self.cache = PackedCache(cache)
        self.windows: list[int | None] = self.cache.windows
        """Tokens that each layer group looks back; `tables[i]` of a sequence's blocks belongs to group `i`."""
        self._block_size = cache.memory.config.block_size
        self._rows = [TableRows() for _ in self.windows]
        self._picks_logits = "logits_to_keep" in inspect.signature(model.forward).parameters

    @torch.no_grad()
    def run(self, items: Items[tuple[Sequence, int]]) -> torch.Tensor:
        """
        Computes the last `query_len` of the first `num_computed_tokens` tokens of each sequence.

        Args:
            items (`Sequence[tuple[Sequence, int]]`): Sequences and their `query_len`, those with 1 first.
                `num_computed_tokens` counts the tokens of this step already, and the block tables have room for them.

        Returns:
            `torch.Tensor` of shape `(n, vocab_size)`, in the dtype of the model's logits: what follows the last token
            of each of the `n` sequences that are computed as far as they go, in order.
        """
        inputs, steps, last = self._prepare(items)
        num_tokens = inputs.shape[1]
        arguments = {}
        if self._picks_logits and len(last) < num_tokens:
            arguments["logits_to_keep"] = torch.tensor(last, dtype=torch.long, device=self.device)
        self.cache.begin(steps)
        try:
            logits = self.model(
                input_ids=inputs[0:1],
                position_ids=inputs[1:2],
                past_key_values=self.cache,
                use_cache=True,
                return_dict=True,
                **arguments,
            ).logits[0]
        finally:
            self.cache.begin(None)
        if logits.shape[0] != len(last):  # the forward gives those of every token
            logits = logits[torch.tensor(last, dtype=torch.long, device=logits.device)]
        return logits

    def _prepare(self, items: Items[tuple[Sequence, int]]) -> tuple[torch.Tensor, list[PackedStep], list[int]]:
        """
        Model inputs `(2 + groups, num_tokens)` int64: token ids, positions, then every group's slots; each group's
        share of the step; the packed positions whose logits somebody waits for.
        """
        token_ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
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
            if end == len(ids):
                last.append(len(token_ids) - 1)
        shares = [self._share(items, group, num_decodes) for group in range(len(self.windows))]
        # one buffer, so that a device gets one copy
        buffer = array("q", token_ids)
        buffer.extend(positions)
        for slots, *_ in shares:
            buffer.extend(slots)
        inputs = torch.frombuffer(buffer, dtype=torch.long).view(2 + len(shares), -1).to(self.device)
        steps = [
            PackedStep(
                num_tokens=len(token_ids),
                slots=inputs[2 + group : 3 + group],
                block_size=self._block_size,
                window=self.windows[group],
                num_decodes=num_decodes,
                tables=self._rows[group].tensor(tables).to(self.device),
                seq_lens=tuple(seq_lens),
                chunks=tuple(chunks),
            )
            for group, (_, tables, seq_lens, chunks) in enumerate(shares)
        ]
        return inputs, steps, last

    def _share(
        self, items: Items[tuple[Sequence, int]], group: int, num_decodes: int
    ) -> tuple[list[int], list[list[int]], list[int], list[Chunk]]:
        """One group's slots of all tokens, tables and lengths of the decodes, and chunks."""
        size = self._block_size
        slots: list[int] = []
        tables: list[list[int]] = []
        seq_lens: list[int] = []
        for sequence, _ in items[:num_decodes]:
            table = sequence.blocks.tables[group]
            seq_len = sequence.num_computed_tokens - table.num_dropped * size
            block_ids = table.block_ids
            slots.append(block_ids[(seq_len - 1) // size] * size + (seq_len - 1) % size)
            tables.append(block_ids)
            seq_lens.append(seq_len)
        chunks: list[Chunk] = []
        for sequence, query_len in items[num_decodes:]:
            table = sequence.blocks.tables[group]
            seq_len = sequence.num_computed_tokens - table.num_dropped * size
            chunks.append(Chunk(len(slots), query_len, seq_len, table.block_ids))
            slots += chunk_slots(table, seq_len - query_len, seq_len)
        return slots, tables, seq_lens, chunks


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
    """Block tables of a step's decodes as one tensor. From step to step only the rows that changed are written."""

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
