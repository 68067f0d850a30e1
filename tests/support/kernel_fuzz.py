"""Random calls through every entry point of the C++ library: `python -m tests.support.kernel_fuzz
--calls 1000`.

Small shapes, odd lengths, all dtypes and codes, empty rows, windows, and tensors that are parts of
others; results are compared with PyTorch. Prepared calls run again on what they were not made for,
which they must refuse. Each tensor that the library gets is an allocation of its own, so that a
sanitizer (`tests.support.sanitize`) sees each access beside it.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import copy
import dataclasses
import itertools
import random
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hf_paged.attention.backends import reference
from hf_paged.attention.backends.reference import AttentionCall
from hf_paged.cache.kv_blocks import KVBlocks, store_portable
from hf_paged.kernels import cpp, quantized
from hf_paged.kernels.cpp.attention import Attention
from hf_paged.kernels.cpp.blocks import Gather, Store
from hf_paged.kernels.cpp.build import KERNEL_NAMES, best_path, kernel
from hf_paged.kernels.cpp.linear import linear
from hf_paged.rooms import RoomMissingError, is_installed, room
from hf_paged.step import Lengths, StepMetadata
from tests.support import tools

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DIMS = (1, 2, 3, 8, 9, 16, 24, 31, 32, 40, 64, 96)


class Draws(random.Random):
    """Random choices and tensors of one call."""

    def __init__(self, seed: str) -> None:
        super().__init__(seed)
        self._generator = torch.Generator().manual_seed(self.randrange(1 << 40))

    def one(self, *options: Any) -> Any:
        return self.choice(options)

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def strided(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Numbers whose last dimension is contiguous and whose first two may be swapped in
        memory."""
        if len(shape) < 3 or self.random() < 0.5:
            return self.tensor(*shape, dtype=dtype)
        first, second, *rest = shape
        return self.tensor(second, first, *rest, dtype=dtype).transpose(0, 1)

    def other(self, x: Tensor) -> Tensor:
        others = [dtype for dtype in (*FLOATS, torch.float64) if dtype is not x.dtype]
        make = self.one(
            lambda: x.to(self.choice(others)),
            lambda: x.new_zeros([size + 1 for size in x.shape]),
            lambda: x[:-1] if len(x) else x.new_zeros(1, *x.shape[1:]),
            lambda: x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 2)[..., : 2 * x.shape[-1] : 2],
            lambda: x.to("meta"),
        )
        return make()


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCE.get(found.dtype, 1e-4) * scale
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=tolerance, atol=tolerance, equal_nan=True
    )


NAMED = (TypeError, ValueError, IndexError)  # by docstrings


def refuses(call: Callable[..., Any], *arguments: Any, errors: Any = NAMED) -> None:
    """Checks that a call raises one of these errors."""
    try:
        call(*arguments)
    except errors:
        return
    raise AssertionError("a call that does not fit what it was prepared for was served")


def blocks_of(
    draws: Draws, num_blocks: int, heads: int, block_size: int, dtype: torch.dtype
) -> KVBlocks:
    """Blocks of random numbers, stored as they are or as codes."""
    dims = draws.one(*DIMS), draws.one(*DIMS)
    shape = num_blocks, heads, block_size
    if draws.random() < 0.3 and not any(block_size * dim % 4 for dim in dims):
        # else scales would not be aligned
        codes = draws.one(*quantized.MAX_CODES)
        sizes = [quantized.tile_bytes(block_size, dim) for dim in dims]
        tiles = tuple(torch.zeros(*shape[:2], size, dtype=torch.uint8) for size in sizes)
        both = [quantized.codes(tile, block_size, codes) for tile in tiles]
        for blocks, dim in zip(both, dims):
            quantized.write(blocks, slice(None), draws.tensor(*shape, dim))
        return KVBlocks(tiles, *both, (dtype, dtype))
    if draws.random() < 0.3:
        data = draws.tensor(*shape, sum(dims), dtype=dtype)
        return KVBlocks((data,), *data.split(dims, -1))
    keys, values = (draws.strided(*shape, dim, dtype=dtype) for dim in dims)
    return KVBlocks((keys, values), keys, values)


def attention(draws: Draws) -> None:
    one, dtype, block_size = draws.one, draws.one(*FLOATS), draws.one(1, 3, 8, 16, 33)
    kv_heads, group = one(1, 2, 3), one(1, 2, 5, 9)
    counts = [one(0, 1, 1, 1, 2, 7, 19) for _ in range(one(0, 1, 2, 3, 5))]
    if draws.random() < 0.6:
        counts = [one(1, 3)] * len(counts)
    causal = draws.random() < 0.8
    lengths = [one(count, count + draws.randrange(40), draws.randrange(1, 200)) for count in counts]
    if draws.random() < 0.05 and lengths:
        lengths[0] = 1100  # more than one part
    width = max([1, *(-(-length // block_size) for length in lengths)])
    num_blocks = width * max(1, len(lengths))
    tables = draws.order(num_blocks).view(-1, width)[: len(lengths)].int()
    if len(lengths) > 1 and draws.random() < 0.3:
        tables = tables[:1].repeat(len(lengths), 1)  # shared blocks
    blocks = blocks_of(draws, num_blocks, kv_heads, block_size, dtype)
    step = StepMetadata(
        tables,
        (0, *itertools.accumulate(counts)),
        tuple(lengths),
        tuple(one(0, 0, draws.randrange(length + 1)) for length in lengths),
        block_size,
        causal=causal,
        window=one(None, None, 1, 5, 64) if causal else None,
    )
    heads, dim = kv_heads * group, blocks.keys.shape[3]
    query = draws.strided(step.num_tokens, heads, dim, dtype=dtype)
    sinks = draws.tensor(heads, dtype=one(*FLOATS)) if draws.random() < 0.2 else None
    bias = None
    if counts and draws.random() < 0.3:
        sizes = [one(1, size) for size in (len(counts), heads, step.query_len or 1)]
        bias = draws.tensor(*sizes, max(lengths) + one(1, 4), dtype=one(*FLOATS))
    features = dict(scale=dim**-0.5, softcap=one(None, None, 20.0), sinks=sinks)
    made = Attention(query, blocks.keys, blocks.values, **features)
    is_ordered = draws.random() < 0.2 and is_installed("tape")
    with room("tape", "a fixed order").in_fixed_order() if is_ordered else contextlib.nullcontext():
        found = made(query, step, sinks, bias)
    close(found, reference.attend(AttentionCall(query, blocks, step, bias=bias, **features)))
    refuses(made, draws.other(query), step, sinks, bias)
    refuses(made, query, step, draws.tensor(heads + 1), bias)
    if counts and max(counts):
        lengths[counts.index(max(counts))] = width * block_size + max(counts) + 1
        long = dataclasses.replace(step, seq_lens=tuple(lengths), window=None)
        refuses(made, query, long, sinks)


def store(draws: Draws) -> None:
    one, block_size, num_blocks = draws.one, draws.one(1, 3, 8, 16), draws.one(1, 2, 7)
    dtype, heads, batch = one(*FLOATS), one(1, 2, 3), one(0, 1, 1, 2, 3)
    blocks = blocks_of(draws, num_blocks, heads, block_size, dtype)
    num_slots = num_blocks * block_size
    tokens = min(one(0, 1, 2, 5), num_slots // batch) if batch else 1
    keys, values = (
        draws.tensor(batch, tokens, heads, x.shape[3], dtype=dtype).transpose(1, 2)
        for x in (blocks.keys, blocks.values)
    )
    slots = draws.order(num_slots)[: batch * tokens].view(batch, tokens).clone()
    slots[torch.rand(slots.shape) < 0.2] = -1
    expected = copy.deepcopy(blocks)
    store_portable(keys, values, expected.keys, expected.values, slots)
    made = Store(keys, values, blocks.keys, blocks.values, slots)
    made(keys, values, slots)
    assert all(map(torch.equal, blocks.data, expected.data))
    refuses(made, draws.other(keys), values, slots)
    refuses(made, keys, draws.other(values), slots)
    refuses(made, keys, values, slots.new_zeros(batch + 1, tokens))
    refuses(made, keys, values, slots.int())
    if slots.numel():
        refuses(made, keys, values, slots + num_slots + 1)


def gathers(draws: Draws) -> None:
    one = draws.one
    size, rows, heads = one(1, 3, 8, 16), one(0, 1, 2, 4), one(0, 1, 3)
    begin = one(0, 0, 5)
    columns = range(begin, begin + one(0, 1, 17, 40, 40, 90))
    origins = tuple(one(0, 3, columns.stop, -2) for _ in range(rows))
    width = max([1, *(-(-(columns.stop - origin) // size) for origin in origins)])
    tables = draws.order(rows * width).int().view(rows, width)
    shape = max(1, rows * width), heads, size, one(*DIMS, 300)
    blocks = draws.strided(*shape, dtype=one(*FLOATS))
    lengths = [max(0, columns.stop - origin) for origin in origins]
    step = StepMetadata.rectangle(tables, lengths, size, columns=columns, origins=origins)
    if one(False, True):  # lengths in memory, as a recorded step has them
        lengths = [draws.randint(0, length) for length in lengths]
        numbers = [torch.tensor(x, dtype=torch.int32) for x in (lengths, origins)]
        on_device = Lengths(numbers[0], torch.zeros_like(numbers[0]), origins=numbers[1])
        step = dataclasses.replace(step, seq_lens=(), starts=(), lengths=on_device)
    found = Gather(blocks)(step)
    for row, origin in enumerate(origins):
        for place, column in enumerate(columns):
            token, expected = column - origin, torch.zeros(())
            if 0 <= token < lengths[row]:
                expected = blocks[tables[row, token // size], :, token % size]
            assert (found[row, :, place] == expected).all()
    refuses(Gather(blocks.new_zeros(*shape[:2], size + 1, shape[3])), step)
    refuses(Gather, blocks.new_zeros(*shape[:3], 4)[..., ::2])
    refuses(Gather, blocks.to("meta"))
    if rows and len(columns) and any(lengths) and heads:
        refuses(Gather(blocks), dataclasses.replace(step, block_tables=tables + len(blocks)))


def hashes(draws: Draws) -> None:
    usual = (0, 1, 7, 4095, 4096, 4097, 70000)
    sizes = [draws.one(*usual, draws.randrange(900000)) for _ in range(3)]
    skips = [draws.randrange(4) for _ in sizes]
    memory = [torch.zeros(size + skip, dtype=torch.uint8) for size, skip in zip(sizes, skips)]
    starts = [x.data_ptr() + skip if size else 0 for x, skip, size in zip(memory, skips, sizes)]
    first = cpp.hash_memory(starts, sizes)
    assert first == cpp.hash_memory(starts, sizes)
    if any(sizes):
        place = next(place for place, size in enumerate(sizes) if size)
        memory[place][skips[place] + draws.randrange(sizes[place])] = 1
        assert first != cpp.hash_memory(starts, sizes)
    refuses(cpp.hash_memory, starts, [-1, *sizes[1:]])
    refuses(cpp.hash_memory, [0], [1])


def draw(draws: Draws) -> None:
    rows, size = draws.one(0, 1, 2, 5), draws.one(1, 2, 63, 64, 65, 300, 1000)
    probs = draws.tensor(rows, size).softmax(-1)
    if draws.random() < 0.3:
        probs[:, : size - 1] = 0
    ours, its = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for _ in range(2):
        found = cpp.multinomial(probs, ours)
        if rows:
            assert found.equal(torch.multinomial(probs, 1, generator=its).squeeze(1))
    if rows:
        wrong = draws.one(float("nan"), float("inf"), -1.0)
        probs[draws.randrange(rows), draws.randrange(size)] = wrong
        refuses(cpp.multinomial, probs, ours, errors=RuntimeError)  # as by torch


def linears(draws: Draws) -> None:
    one, dtype = draws.one, draws.one(*FLOATS)
    rows, depth, width = one(0, 1, 2, 5, 17, 33), one(0, *DIMS, 100), one(0, *DIMS, 70, 700)
    x = draws.tensor(rows, depth + 3, dtype=dtype)[:, 1 : 1 + depth]
    weight = draws.tensor(width, depth, dtype=dtype)
    if draws.random() < 0.5:
        x = x.contiguous()
    if draws.random() < 0.3 and depth > 1 and width > 1:
        weight = weight.t().contiguous().t()
    if draws.random() < 0.3:
        weight = (weight.contiguous().float() * 40).clamp(-128, 127).to(torch.int8)
    bias = draws.tensor(width, dtype=dtype) if draws.random() < 0.5 else None
    found = linear(x, weight, bias, draws.randrange(best_path() + 1))
    expected = x.double() @ weight.double().t()
    tolerance = 4.0 if weight.dtype is dtype else 160.0
    close(found, expected if bias is None else expected + bias.double(), tolerance)
    refuses(linear, x, weight.double(), bias)
    refuses(linear, x, draws.tensor(width, depth + 1, dtype=dtype), bias)
    refuses(linear, x, weight, draws.tensor(width + 1, dtype=dtype))


OPERATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(torch.neg, torch.abs, F.relu, torch.exp, torch.tanh, torch.sigmoid, F.silu, F.gelu),
    *(torch.sin, torch.cos, F.softplus, lambda x: x.softmax(-1), lambda x: (x * x + 1).rsqrt()),
    lambda x: x - x.amax(-1, keepdim=True),
    lambda x: x / (1 + x.abs().sum(-1, keepdim=True)),
    *(lambda x: x.clamp(-1, 1), lambda x: x * x.mean(-1, True)),
    *(lambda x: F.gelu(x, approximate="tanh"), lambda x: x * -0.5 + 1, lambda x: x.square().sqrt()),
)


def rows(draws: Draws) -> None:
    dtype = draws.one(*FLOATS)
    sizes = [draws.one(1, 2, 3, 7) for _ in range(draws.randrange(3))]
    x = draws.strided(*sizes, draws.one(*DIMS[1:], 300, 2100), dtype=dtype)
    y = draws.tensor(*x.shape[draws.randrange(x.dim()) :], dtype=draws.one(dtype, torch.float32))
    first, second = draws.sample(OPERATIONS, 2)

    def made() -> tuple[Tensor, ...]:
        return first(x), second(x), x + y

    tape_room = room("tape", "rows")
    with torch.no_grad(), tape_room.in_fixed_order(), tape_room.batch_invariant_operations():
        found = made()
    for ours, its in zip(found, made()):
        close(ours, its, 2.0)


def play(function: Callable[[], Tensor], change: Callable[[], None]) -> Any:
    """Records a function, and replays it on the same memory with other numbers; returns
    the tape."""
    from hf_paged.tape.tape import Tape

    with torch.no_grad():
        out = function().clone()
        tape = Tape.record(lambda: out.copy_(function()), lambda tensor: False)
        for _ in range(2):
            change()
            out.fill_(7)
            tape.replay()
            close(out, function(), 4.0)
    return tape


def pick(draws: Draws) -> None:
    table = nn.Embedding(draws.one(1, 2, 11), draws.one(*DIMS)).to(draws.one(*FLOATS))
    ids = torch.zeros(draws.one(1, 2), draws.one(1, 3), dtype=torch.int64)
    tape = play(lambda: table(ids), lambda: ids.random_(0, table.num_embeddings))
    assert tape.kernel_names.count("pick") == 1
    ids[0, 0] = draws.one(-1, table.num_embeddings, 1 << 40)
    refuses(tape.replay, errors=RuntimeError)


def tape(draws: Draws) -> None:
    """Products, lookups and lists in one recording."""
    one, dtype = draws.one, draws.one(*FLOATS)
    # the widest are divided among threads
    rows, depth, width = one(1, 2, 5, 17), one(*DIMS[3:], 600), one(*DIMS[3:], 900)
    gate, up = nn.Linear(depth, width).to(dtype), nn.Linear(depth, width, bias=False).to(dtype)
    x, y = draws.tensor(1, rows, depth, dtype=dtype), draws.tensor(width, dtype=dtype)
    operation = one(*OPERATIONS)
    play(
        lambda: operation(gate(x)) * up(x) + y,
        lambda: x.copy_(draws.tensor(*x.shape, dtype=dtype)),
    )


def path(draws: Draws) -> None:
    assert kernel("linear_path")(b"") in range(3)
    assert kernel("is_optimized")(b"") in range(2)


ENTRIES: dict[str, Callable[[Draws], None]] = {
    **dict(attention=attention, store=store, gather=gathers, hash=hashes, draw=draw),
    **dict(linear=linears, linear_path=path, is_optimized=path, rows=rows, pick=pick, tape=tape),
}
assert set(ENTRIES) == set(KERNEL_NAMES)


def run(calls: int, seed: int, entries: Sequence[str] = KERNEL_NAMES) -> list[str]:
    """Makes `calls` random calls through each entry point; returns what went wrong, with its
    seed."""
    wrong = []
    for name in entries:
        for number in range(calls):
            key = f"{name} {seed} {number}"
            try:
                ENTRIES[name](Draws(key))
            except (RoomMissingError, ModuleNotFoundError):
                raise
            except Exception:  # a call that fails does not hide others
                wrong.append(f"{key}: {traceback.format_exc()}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = tools.parser(
        __doc__,
        seed=0,
        calls=(1000, "through each entry point"),
        jobs=(1, "threads that call at the same time"),
        threads=(1, "of PyTorch and the library"),
        entries=dict(nargs="+", default=list(KERNEL_NAMES), choices=KERNEL_NAMES),
    )
    options = parser.parse_args(argv)
    torch.set_num_threads(options.threads)
    if not cpp.is_available():
        print("the library is not available")
        return 1
    start, wrong = time.monotonic(), list[str]()

    def work(job: int) -> None:
        share = options.calls * (job + 1) // options.jobs - options.calls * job // options.jobs
        wrong.extend(run(share, options.seed + job, options.entries))

    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        list(pool.map(work, range(options.jobs)))
    for name, count in Counter(error.split()[0] for error in wrong).items():
        first = next(error for error in wrong if error.startswith(f"{name} "))
        print(f"{name}: {count} failed; the first: {first}")
    calls, seconds = options.calls * len(options.entries), time.monotonic() - start
    print(f"{calls:,} calls, {len(wrong)} failed, seed {options.seed}, {seconds:.0f} s")
    return int(bool(wrong))


if __name__ == "__main__":
    sys.exit(main())
