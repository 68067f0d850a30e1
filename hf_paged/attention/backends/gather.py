"""Portable fast attention over block tables: gathers the keys and values of rows of equal or
similar lengths, or views them in virtual storage, then runs dense attention on them. No result
depends on a slot outside its row's visible range. Plain PyTorch: any device, differentiable."""

from __future__ import annotations

import itertools
import math
import threading

import torch
import torch.nn.functional as F
from torch import Tensor

from ...cache.reading import BlockLayout
from ...kernels import quantized
from ...seams import PlacedRows
from ...step import StepMetadata
from . import reference
from .parts import MIN_SEPARATE_QUERIES, MIN_UNPACKED_QUERIES, SLICE_QUERIES, Part, plan_parts
from .reference import AttentionCall

MASK_ALIGNMENT = 16
"""The stride of a mask's rows is a multiple of this many elements. On a GPU, PyTorch's fused
kernels would pad masks with other strides in every layer."""


# Each thread's CPU buffers for gathered keys and values, by index as a string. They are reused,
# since new memory would cost page faults in every call.
_scratch = threading.local()


def attend(call: AttentionCall) -> Tensor:
    """Computes the result of `reference.attend`. Plain bfloat16 and float16 calls round where
    PyTorch's SDPA rounds. Rows that are all first prefills (`StepMetadata.is_first_prefill`) use
    the step's own keys and values (`AttentionCall.fresh`), if the call is plain and has them."""
    return call.by_groups(_attend_rows)


def _attend_rows(call: AttentionCall) -> Tensor:
    """Computes `attend` for rows that all have the same number of queries."""
    step = call.step
    if call.fresh is not None and call.is_plain and step.is_first_prefill:
        query, key, value = (_by_row(states, step) for states in (call.query, *call.fresh))
        return _sdpa(call, query, key, value, query.dtype, None, is_causal=True).flatten(0, 1)
    blocks = call.blocks
    kv_heads = blocks.values.shape[1]
    placed_rows = None
    if blocks.rows is not None and not call.needs_grad:
        placed_rows = blocks.rows.place(step)
    if placed_rows is not None:
        parts, is_complete = placed_rows.parts(kv_heads)
        is_one_part = step.query_len == len(parts) == 1 and is_complete
        if is_one_part and call.is_plain and call.query.shape[1] != kv_heads:
            return _decode_in_place(call, parts[0], placed_rows)
    else:
        key_tensors = quantized.stored_tensors(blocks.keys)
        value_tensors = quantized.stored_tensors(blocks.values)
        layouts = map(BlockLayout.of, (*key_tensors, *value_tensors))
        parts, is_complete = step.plan(plan_parts, *layouts)
    query = _by_row(call.query, step)
    batch, heads, query_len, _ = query.shape
    group_size = heads // kv_heads
    bias = call.bias
    if bias is not None:
        length = bias.shape[-1]
        longest = max(step.seq_lens, default=0)
        bias = bias.expand(batch, heads, query_len, length if length > 1 else longest)
    out = None
    if len(parts) != 1 or not is_complete:
        new_output = query.new_empty if is_complete else query.new_zeros
        out = new_output(batch, query_len, heads, blocks.values.shape[3])
    for part in parts:
        query_heads = slice(part.heads.start * group_size, part.heads.stop * group_size)
        queries = query[part.rows, query_heads, part.first_query :]
        part_bias = None
        if bias is not None:
            part_bias = _bias_of_part(bias, part, query_heads)
        part_call = call.of_heads(query_heads, queries, part_bias)
        key, value = _keys_and_values(part_call, part, placed_rows)
        output = _attend_part(part_call, part, key, value)
        if out is None:
            return output.flatten(0, 1).contiguous()
        out[part.rows, part.first_query :, query_heads] = output
    assert out is not None
    return out.flatten(0, 1)


def _by_row(states: Tensor, step: StepMetadata) -> Tensor:
    """Returns `states` `(T, heads, dim)` as a view `(n, heads, query_len, dim)`; all rows must have
    the same number of queries."""
    assert step.query_len is not None
    return states.unflatten(0, (step.num_rows, step.query_len)).transpose(1, 2)


def _sdpa(
    call: AttentionCall,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dtype: torch.dtype,
    mask: Tensor | None,
    is_causal: bool,
) -> Tensor:
    """Computes attention of queries `[rows, heads, queries, dim]` in `dtype` by PyTorch's SDPA,
    with the scale of `call`. Returns `[rows, queries, heads, value_dim]` in the queries'
    dtype."""
    output = F.scaled_dot_product_attention(
        query.to(dtype),
        key.to(dtype),
        value.to(dtype),
        mask,
        is_causal=is_causal,
        scale=call.scale,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.to(query.dtype).transpose(1, 2)


def _decode_in_place(call: AttentionCall, part: Part, placed_rows: PlacedRows) -> Tensor:
    """Computes `attend` with as few torch calls as possible. The call must be plain and have one
    query per row, and its rows must have equal lengths and lie in adjacent slots."""
    key, value = _keys_and_values(call, part, placed_rows)
    rows, kv_heads, _, dim = key.shape
    packed_query = call.query.view(rows, kv_heads, -1, dim)
    output = F.scaled_dot_product_attention(packed_query, key, value, scale=call.scale)
    return output.flatten(1, 2)


def _bias_of_part(bias: Tensor, part: Part, heads: slice) -> Tensor:
    """Returns the bias `[rows, heads, queries, length]` of a part, from the bias of all rows."""
    length = part.length
    ranges = [slice(start, start + length) for _, start in part.members]
    if part.positions is not None:
        rows_bias = bias[part.rows, heads]
        index = part.positions[:, None, None].expand(*rows_bias.shape[:3], -1)
        part_bias = rows_bias.gather(3, index)
    elif ranges.count(ranges[0]) == len(ranges):
        part_bias = bias[part.rows, heads, :, ranges[0]]
    else:
        rows = zip(part.members, ranges)
        part_bias = torch.stack([bias[row, heads, :, visible] for (row, _), visible in rows])
    return part_bias[:, :, part.first_query :]


def _attend_part(call: AttentionCall, part: Part, key: Tensor, value: Tensor) -> Tensor:
    """Computes the attention of a part, `[rows, queries, heads, value_dim]`. `call` has the part's
    queries `[rows, heads, queries, dim]`, sinks and bias `[rows, heads, queries, length]`; keys and
    values are `[rows, kv_heads, length, dim]`."""
    rows, heads, num_queries, dim = call.query.shape
    value_dim = value.shape[3]
    is_plain = call.is_plain
    materializes_scores = not is_plain or not call.query.is_cpu or dim != value_dim
    num_head_steps = 1  # the query heads of a K/V head run in this many calls
    if materializes_scores and num_queries >= MIN_SEPARATE_QUERIES:
        num_head_steps = heads // key.shape[1]
    slices = part.slices
    if part.causal and is_plain:
        all_indices = slice(None)
        slices = ((all_indices, all_indices),)
    if len(slices) == num_head_steps == 1:
        return _attend_slice(call, part, key, value)
    out = call.query.new_empty(rows, num_queries, heads, value_dim)
    for (query_range, visible), first_head in itertools.product(slices, range(num_head_steps)):
        query_heads = slice(first_head, None, num_head_steps)
        bias = call.bias
        if bias is not None:
            bias = bias[:, query_heads, query_range, visible]
        slice_call = call.of_heads(query_heads, call.query[:, query_heads, query_range], bias)
        output = _attend_slice(slice_call, part, key[:, :, visible], value[:, :, visible])
        out[:, query_range, query_heads] = output
    return out


def _attend_slice(call: AttentionCall, part: Part, key: Tensor, value: Tensor) -> Tensor:
    """Computes `_attend_part` for consecutive queries and the keys that any of them sees. Uses at
    least float32 if there is a bias, a softcap or sinks. A query that sees no keys gets zeros, as
    in PyTorch's SDPA."""
    query = call.query
    bias = call.bias
    dtype = query.dtype
    _, heads, num_queries, _ = query.shape
    _, kv_heads, num_keys, _ = key.shape
    group_size = heads // kv_heads
    needs_scores = call.softcap is not None or call.sinks is not None
    is_unpacked = num_queries >= MIN_UNPACKED_QUERIES or (group_size == 1 and num_queries > 1)
    if is_unpacked or not call.is_plain:
        if not call.is_plain:
            dtype = torch.promote_types(dtype, torch.float32)
        mask = None
        # a causal slice has all queries of its part (see `_attend_part`)
        is_causal = part.causal and call.is_plain
        if not is_causal:
            mask = _mask(call.step, part, num_queries, num_keys, dtype)
        if bias is not None:
            bias = bias.to(dtype)
            mask = bias if mask is None else bias + mask
        if needs_scores:
            # without a bias, every query sees a key
            return reference.attend_densely(call, key, value, mask, bias is None)
        return _sdpa(call, query, key, value, dtype, mask, is_causal)
    # [rows, kv_heads, group_size * queries, dim]
    packed_query = query.unflatten(1, (kv_heads, group_size)).flatten(2, 3)
    mask = _mask(call.step, part, num_queries, num_keys, dtype, heads=group_size)
    if packed_query.shape[2] == 1 and dtype.itemsize == 2 and query.is_cpu:
        # for a single query, half-precision SDPA on the CPU takes two to three times as long
        scores = torch.matmul(packed_query, key.transpose(-1, -2)).mul_(call.scale)
        if mask is not None:
            scores = scores + mask
        weights = scores.softmax(-1, dtype=torch.float32).to(value.dtype)
        result = torch.matmul(weights, value)
    else:
        result = F.scaled_dot_product_attention(packed_query, key, value, mask, scale=call.scale)
    if num_queries == 1:
        return result.flatten(1, 2).unsqueeze(1)
    return result.unflatten(2, (group_size, num_queries)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def _mask(
    step: StepMetadata,
    part: Part,
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
    heads: int = 1,
) -> Tensor | None:
    """Returns a mask `[1, 1, heads * queries, keys]` to add to the scores of consecutive queries
    and the keys up to the last query; `None` if no key is hidden. The mask is a view of one mask
    that all parts of the step share: if positions count from the end, rows of any length have the
    same mask. A part with padded rows has its own mask, `[rows, 1, heads * queries or 1, keys]`.
    """
    mask_queries = num_queries
    mask_keys = part.length
    if part.is_padding is None:
        if not part.mask_keys:
            return None
        mask_keys = part.mask_keys
        if heads == 1:
            mask_queries = min(step.query_len or 1, SLICE_QUERIES)
    is_causal = part.mask_keys > 0
    mask = step.plan(_make_mask, part.is_padding, is_causal, mask_queries, mask_keys, dtype, heads)
    return mask[..., -heads * num_queries :, -num_keys:]


@torch.inference_mode(False)
def _make_mask(
    step: StepMetadata,
    is_padding: Tensor | None,
    is_causal: bool,
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
    heads: int,
) -> Tensor:
    """Returns a mask that is minus infinity where a query does not see a key, or where the key is
    padding, and otherwise 0. The stride of its rows is a multiple of `MASK_ALIGNMENT`."""
    device = step.block_tables.device
    width = -(-num_keys // MASK_ALIGNMENT) * MASK_ALIGNMENT
    num_masks = 1 if is_padding is None else len(is_padding)
    mask_queries = heads * num_queries if is_causal else 1
    shape = (num_masks, 1, mask_queries, width)
    mask = torch.zeros(shape, dtype=dtype, device=device)[..., :num_keys]
    if is_padding is not None:
        mask.masked_fill_(is_padding, -math.inf)
    if is_causal:
        query = torch.arange(-num_queries, 0, device=device)[:, None]
        key = torch.arange(-num_keys, 0, device=device)
        is_masked = key > query
        if step.window is not None:
            is_masked |= key <= query - step.window
        mask.masked_fill_(is_masked.repeat(heads, 1), -math.inf)
    return mask


# Keys and values of a part


def _keys_and_values(
    call: AttentionCall, part: Part, placed_rows: PlacedRows | None
) -> list[Tensor]:
    """Returns the keys and values of a part, each `[rows, kv_heads, length, dim]` in the query's
    dtype: views of rows that are contiguous in memory (`placed_rows`), otherwise gathered copies.
    On the CPU, the copies may lie in scratch memory, which this thread's next call overwrites; on
    other devices, and if a gradient is required, they lie in new memory."""
    dtype = call.query.dtype
    if placed_rows is not None:
        return [states.to(dtype) for states in placed_rows.view(part)]
    keys = call.blocks.keys
    values = call.blocks.values
    stored_tensors = (*quantized.stored_tensors(keys), *quantized.stored_tensors(values))
    uses_scratch = call.query.is_cpu and not call.needs_grad
    rows = call.query.shape[0]
    kv_heads = part.heads.stop - part.heads.start
    visible = slice(part.offset, part.offset + part.length)
    pieces = []
    for index, (tensor, indices) in enumerate(zip(stored_tensors, part.indices)):
        out = None
        if uses_scratch:
            out = _scratch_view(index, (len(indices.indices), indices.shape[1]), tensor.dtype)
        states = indices.read(tensor, out).view(rows, kv_heads, -1, tensor.shape[3])
        pieces.append(states[:, :, visible])
    half = len(pieces) // 2
    key = quantized.dequantize(pieces[:half], keys, dtype)
    value = quantized.dequantize(pieces[half:], values, dtype)
    return [key, value]


def _scratch_view(index: int, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """Returns a tensor in this thread's buffer `index`, valid until the next call with that
    index."""
    size = math.prod(shape) * dtype.itemsize
    buffers: dict[str, Tensor] = vars(_scratch)
    name = str(index)
    buffer = buffers.get(name)
    if buffer is None or buffer.numel() < size:
        with torch.inference_mode(False):
            # an inference tensor could not be written outside inference mode
            buffer = torch.empty(size, dtype=torch.uint8, device="cpu")
        buffers[name] = buffer
    return buffer[:size].view(dtype).view(shape)
