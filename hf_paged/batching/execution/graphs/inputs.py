"""The inputs of a captured step: at fixed addresses, filled for every step with one copy."""

from __future__ import annotations

import ctypes
from array import array
from typing import TYPE_CHECKING

import torch

from ....step import Lengths, StepMetadata

if TYPE_CHECKING:
    from ..packed import Layout


class StaticInputs:
    """
    Buffers for steps of up to `num_rows` sequences with one token each. Rows that a step does not need are aimed at
    nothing: token 0 at position 0, stored nowhere (slot -1), seeing nothing (length 0).

    Args:
        num_rows (`int`): Rows, the last of them perhaps padding.
        widths (`tuple[int, ...]`): Columns of each layer group's block tables.
        windows (`list[int | None]`): Of the groups.
        block_size (`int`): Tokens in a block.
        device (`torch.device`): Where the model is.

    Attributes:
        token_ids, positions (`torch.Tensor` of shape `(1, num_rows)`, int64, on the device).
    """

    def __init__(
        self, num_rows: int, widths: tuple[int, ...], windows: list[int | None], block_size: int, device: torch.device
    ) -> None:
        self.num_rows, self.widths, self.windows, self.block_size = num_rows, widths, windows, block_size
        num_longs = (2 + len(widths)) * num_rows  # token ids, positions, every group's slots
        num_ints = sum((2 + width) * num_rows for width in widths)  # lengths, starts, tables
        on_device = device.type != "cpu"
        with torch.inference_mode(False):  # they outlive the call
            self._host = torch.zeros(num_longs + -(-num_ints // 2), dtype=torch.long, pin_memory=on_device)
            self._buffer = torch.zeros_like(self._host, device=device)
            memory = (ctypes.c_char * self._host.nbytes).from_address(self._host.data_ptr())
            self._longs = memoryview(memory).cast("B").cast("q")
            self._ints = memoryview(memory).cast("B")[8 * num_longs :].cast("i")
            longs = self._buffer[:num_longs].view(-1, 1, num_rows)
            self.token_ids, self.positions, *self._slots = longs
            ints = self._buffer[num_longs:].view(torch.int32)
            self._lengths: list[torch.Tensor] = []  # (2, num_rows): seq_lens, starts
            self._tables: list[torch.Tensor] = []  # (num_rows, width)
            self._offsets: list[int] = []  # of each group in `_ints`
            offset = 0
            for width in widths:
                end = offset + 2 * num_rows
                self._offsets.append(offset)
                self._lengths.append(ints[offset:end].view(2, num_rows))
                offset = end + num_rows * width
                self._tables.append(ints[end:offset].view(num_rows, width))
        self._known: list[list[list[int]]] = [[[]] * num_rows for _ in widths]  # block ids that each row holds
        self._copied = torch.cuda.Event() if device.type == "cuda" else None

    def fill(self, layout: Layout) -> None:
        """
        Takes a step of decodes whose tables are no wider than `widths`. The host writes pinned memory, and waits only
        if the copy before is still to be made.
        """
        if self._copied is not None:
            self._copied.synchronize()
        rows = self.num_rows
        padding = rows - len(layout.token_ids)
        nothing = [0] * padding
        longs = array("q", layout.token_ids + nothing)
        longs.extend(layout.positions + nothing)
        for share in layout.shares:
            longs.extend(share.slots + [-1] * padding)
        self._longs[: len(longs)] = longs
        ints = self._ints
        for share, offset, width, known in zip(layout.shares, self._offsets, self.widths, self._known):
            ints[offset : offset + rows] = array("i", share.seq_lens + nothing)
            offset += 2 * rows
            for row, block_ids in enumerate(share.tables):
                if known[row] != block_ids:
                    known[row] = block_ids.copy()
                    start = offset + row * width
                    ints[start : start + len(block_ids)] = array("i", block_ids)
        self._buffer.copy_(self._host, non_blocking=True)
        if self._copied is not None:
            self._copied.record()

    def steps(self) -> list[StepMetadata]:
        """Each group's share of the step, read from the buffers: right for whatever these hold when it is computed."""
        return [
            StepMetadata(
                tables,
                query_start=tuple(range(self.num_rows + 1)),
                seq_lens=(),
                starts=(),
                block_size=self.block_size,
                window=window,
                slots=slots,
                lengths=Lengths(*lengths),
            )
            for slots, window, tables, lengths in zip(self._slots, self.windows, self._tables, self._lengths)
        ]
