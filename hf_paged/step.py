"""What one step's attention needs to know about the block tables, built once and read by every layer.

    |<------------- seq_len ------------->|
    |<-- context_len -->|<-- query_len -->|      context_len: tokens whose K/V is in the cache before this step
                                                 query_len: tokens computed in this step

Positions are *table coordinates* of a row: position `t` lives in block `block_tables[row, t // block_size]` at offset
`t % block_size`. A row whose leading blocks were given back (sliding window) counts from its first block that is left.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepMetadata:
    """
    Args:
        block_tables (`torch.Tensor` of shape `(batch, max_blocks)`, int32, contiguous, on the pool's device):
            Physical block of each logical block. Entries past a row's last block are 0 and must not be read.
        seq_lens (`torch.Tensor` of shape `(batch,)`, int32, on the pool's device):
            Tokens of each row, the `query_len` new ones included. Query `i` sits at position `seq_len - query_len + i`,
            which is negative for a query that is padding.
        starts (`torch.Tensor` of shape `(batch,)`, int32, on the pool's device):
            First position each row may see (0 unless something in front is masked).
        seq_lens_host, starts_host (`tuple[int, ...]`):
            The same two on the host, so that no step waits for the device.
        query_len (`int`): Queries of every row in this step.
        block_size (`int`): Tokens in a block.
        causal (`bool`): Whether the query at position `p` sees keys `<= p` only (else all of `[start, seq_len)`).
        window (`int`, *optional*): With `causal`, a query at position `p` sees keys in `(p - window, p]`.
    """

    block_tables: torch.Tensor
    seq_lens: torch.Tensor
    starts: torch.Tensor
    seq_lens_host: tuple[int, ...]
    starts_host: tuple[int, ...]
    query_len: int
    block_size: int
    causal: bool = True
    window: int | None = None

    @property
    def batch_size(self) -> int:
        """Rows in the step."""
        return len(self.seq_lens_host)

    def visible(self, row: int, query: int) -> tuple[int, int]:
        """The half-open range `[low, high)` of positions that `query` of `row` attends to; empty for a pad query."""
        low, high = self.starts_host[row], self.seq_lens_host[row]
        if self.causal:
            position = high - self.query_len + query
            high = position + 1
            if self.window is not None:
                low = max(low, position - self.window + 1)
        return low, max(low, high)
