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
import dataclasses
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
from hf_paged.cache.kv_blocks import KVBlocks
from hf_paged.cache.store import store_portable
from hf_paged.kernels import cpp, quantized
from hf_paged.kernels.cpp.attention import Attention, Store, gather
from hf_paged.kernels.cpp.build import KERNEL_NAMES, best_path, kernel
from hf_paged.kernels.cpp.linear import linear
from hf_paged.rooms import RoomMissingError, is_installed, room
from hf_paged.step import Lengths, StepMetadata
from tests.support import tools

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 4e-3}
DIMS = (1, 2, 3, 8, 9, 16, 24, 31, 32, 40, 64, 96)


class Draws:
    """Random choices and tensors of one call."""

    def __init__(self, seed: str) -> None:
        self.choose = random.Random(seed)
        self._generator = torch.Generator().manual_seed(self.choose.randrange(1 << 40))

    def tensor(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=self._generator).to(dtype)

    def order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self._generator)

    def strided(self, *shape: int, dtype: torch.dtype) -> Tensor:
        """Numbers whose last dimension is contiguous and whose first two may be swapped in
        memory."""
        if len(shape) < 3 or self.choose.random() < 0.5:
            return self.tensor(*shape, dtype=dtype)
        first, second, *rest = shape
        return self.tensor(second, first, *rest, dtype=dtype).transpose(0, 1)

    def other(self, x: Tensor) -> Tensor:
        """A tensor of another dtype, shape or layout."""
        others = [dtype for dtype in (*FLOATS, torch.float64) if dtype is not x.dtype]
        kinds: list[Callable[[], Tensor]] = [
            lambda: x.to(self.choose.choice(others)),
            lambda: x.new_zeros([size + 1 for size in x.shape]),
            lambda: x[:-1] if len(x) else x.new_zeros(1, *x.shape[1:]),
            lambda: x.new_zeros(*x.shape[:-1], 2 * x.shape[-1] + 2)[..., : 2 * x.shape[-1] : 2],
            lambda: x.to("meta"),
        ]
        return self.choose.choice(kinds)()


def close(found: Tensor, expected: Tensor, scale: float = 1.0) -> None:
    tolerance = TOLERANCE.get(found.dtype, 1e-4) * scale
    torch.testing.assert_close(
        found, expected.to(found.dtype), rtol=tolerance, atol=tolerance, equal_nan=True
    )


def refuses(call: Callable[[], Any]) -> None:
    """Checks that a call raises one of the errors that its docstring names."""
    try:
        call()
    except (TypeError, ValueError, IndexError):
        return
    raise AssertionError("a call that does not fit what it was prepared for was served")


def blocks_of(
    draws: Draws,
    num_blocks: int,
    heads: int,
    block_size: int,
    dims: tuple[int, int],
    dtype: torch.dtype,
) -> KVBlocks:
    """Blocks of random numbers, stored as they are or as codes."""
    choose = draws.choose
    if choose.random() < 0.3 and not any(block_size * dim % 4 for dim in dims):
        # else scales would not be aligned
        codes = choose.choice(tuple(quantized.MAX_CODES))
        tiles = tuple(
            torch.zeros(num_blocks, heads, quantized.tile_bytes(block_size, dim), dtype=torch.uint8)
            for dim in dims
        )
        keys, values = (quantized.codes(tile, block_size, codes) for tile in tiles)
        for blocks, dim in ((keys, dims[0]), (values, dims[1])):
            quantized.write(blocks, slice(None), draws.tensor(num_blocks, heads, block_size, dim))
        return KVBlocks(tiles, keys, values, (dtype, dtype))
    if choose.random() < 0.3:
        both = draws.tensor(num_blocks, heads, block_size, sum(dims), dtype=dtype)
        return KVBlocks((both,), both[..., : dims[0]], both[..., dims[0] :])
    keys, values = (draws.strided(num_blocks, heads, block_size, dim, dtype=dtype) for dim in dims)
    return KVBlocks((keys, values), keys, values)


def attention(draws: Draws) -> None:
    choose = draws.choose
    dtype, block_size = choose.choice(FLOATS), choose.choice((1, 3, 8, 16, 33))
    kv_heads, group = choose.choice((1, 2, 3)), choose.choice((1, 2, 5, 9))
    dims = choose.choice(DIMS), choose.choice(DIMS)
    counts = [choose.choice((0, 1, 1, 1, 2, 7, 19)) for _ in range(choose.choice((0, 1, 2, 3, 5)))]
    if choose.random() < 0.6:
        counts = [choose.choice((1, 3))] * len(counts)
    causal = choose.random() < 0.8
    lengths = [
        choose.choice((count, count + choose.randrange(40), choose.randrange(1, 200)))
        for count in counts
    ]
    if choose.random() < 0.05 and lengths:
        lengths[0] = 1100  # more than one part
    width = max([1, *(-(-length // block_size) for length in lengths)])
    num_blocks = width * max(1, len(lengths))
    tables = draws.order(num_blocks).view(-1, width)[: len(lengths)].int()
    if len(lengths) > 1 and choose.random() < 0.3:
        tables = tables[:1].repeat(len(lengths), 1)  # shared blocks
    blocks = blocks_of(draws, num_blocks, kv_heads, block_size, dims, dtype)
    starts = tuple(choose.choice((0, 0, choose.randrange(length + 1))) for length in lengths)
    step = StepMetadata(
        tables,
        tuple(sum(counts[:place]) for place in range(len(counts) + 1)),
        tuple(lengths),
        starts,
        block_size,
        causal=causal,
        window=choose.choice((None, None, 1, 5, 64)) if causal else None,
    )
    heads = kv_heads * group
    query = draws.strided(step.num_tokens, heads, dims[0], dtype=dtype)
    sinks = draws.tensor(heads, dtype=choose.choice(FLOATS)) if choose.random() < 0.2 else None
    bias = None
    if counts and choose.random() < 0.3:
        sizes = [choose.choice((1, size)) for size in (len(counts), heads, step.query_len or 1)]
        columns = max(lengths) + choose.choice((1, 4))
        bias = draws.tensor(*sizes, columns, dtype=choose.choice(FLOATS))
    features = dict(scale=dims[0] ** -0.5, softcap=choose.choice((None, None, 20.0)), sinks=sinks)
    call = AttentionCall(query, blocks, step, bias=bias, **features)
    made = Attention(query, blocks.keys, blocks.values, **features)
    is_ordered = choose.random() < 0.2 and is_installed("tape")
    with room("tape", "a fixed order").in_fixed_order() if is_ordered else contextlib.nullcontext():
        found = made(query, step, sinks, bias)
    close(found, reference.attend(call))
    refuses(lambda: made(draws.other(query), step, sinks, bias))
    refuses(lambda: made(query, step, draws.tensor(heads + 1), bias))
    if counts and max(counts):
        row = counts.index(max(counts))
        wrong = list(lengths)
        wrong[row] = width * block_size + max(counts) + 1
        long = dataclasses.replace(step, seq_lens=tuple(wrong), window=None)
        refuses(lambda: made(query, long, sinks))


def store(draws: Draws) -> None:
    choose = draws.choose
    dtype, block_size = choose.choice(FLOATS), choose.choice((1, 3, 8, 16))
    num_blocks = choose.choice((1, 2, 7))
    heads, dims = choose.choice((1, 2, 3)), (choose.choice(DIMS), choose.choice(DIMS))
    blocks = blocks_of(draws, num_blocks, heads, block_size, dims, dtype)
    batch = choose.choice((0, 1, 1, 2, 3))
    tokens = choose.choice((0, 1, 2, 5)) if batch else 1
    tokens = min(tokens, num_blocks * block_size // max(1, batch))
    keys, values = (
        draws.tensor(batch, tokens, heads, dim, dtype=dtype).transpose(1, 2) for dim in dims
    )
    slots = draws.order(num_blocks * block_size)[: batch * tokens].view(batch, tokens).clone()
    slots[torch.rand(slots.shape) < 0.2] = -1
    data = tuple(x.clone() for x in blocks.data)
    expected = KVBlocks(data, *_views(blocks, data), blocks.dtypes)
    store_portable(keys, values, expected.keys, expected.values, slots)
    made = Store(keys, values, blocks.keys, blocks.values, slots)
    made(keys, values, slots)
    for ours, its in zip(blocks.data, expected.data):
        assert torch.equal(ours, its)
    refuses(lambda: made(draws.other(keys), values, slots))
    refuses(lambda: made(keys, draws.other(values), slots))
    refuses(lambda: made(keys, values, slots.new_zeros(batch + 1, tokens)))
    refuses(lambda: made(keys, values, slots.int()))
    if slots.numel() and heads:
        refuses(lambda: made(keys, values, slots + num_blocks * block_size + 1))


def _views(blocks: KVBlocks, data: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """Keys and values of these blocks in copies of their data."""
    if blocks.quantized_dtype is not None:
        size, codes = blocks.keys.shape[2], blocks.quantized_dtype
        keys, values = (quantized.codes(x, size, codes) for x in data)
        return keys, values
    if len(data) == 2:
        return data[0], data[1]
    dim = blocks.keys.shape[3]
    return data[0][..., :dim], data[0][..., dim:]


def gathers(draws: Draws) -> None:
    choose = draws.choose
    size, rows = choose.choice((1, 3, 8, 16)), choose.choice((0, 1, 2, 4))
    heads = choose.choice((0, 1, 3))
    begin = choose.choice((0, 0, 5))
    columns = range(begin, begin + choose.choice((0, 1, 17, 40, 40, 90)))
    origins = tuple(choose.choice((0, 3, columns.stop, -2)) for _ in range(rows))
    width = max([1, *(-(-(columns.stop - origin) // size) for origin in origins)])
    tables = draws.order(rows * width).int().view(rows, width)
    shape = max(1, rows * width), heads, size, choose.choice((*DIMS, 300))
    blocks = draws.strided(*shape, dtype=choose.choice(FLOATS))
    lengths = [max(0, columns.stop - origin) for origin in origins]
    step = StepMetadata.rectangle(tables, lengths, size, columns=columns, origins=origins)
    if choose.choice((False, True)):  # lengths in memory, as a recorded step has them
        lengths = [choose.randint(0, length) for length in lengths]
        numbers = [torch.tensor(x, dtype=torch.int32) for x in (lengths, origins)]
        on_device = Lengths(numbers[0], torch.zeros_like(numbers[0]), origins=numbers[1])
        step = dataclasses.replace(step, seq_lens=(), starts=(), lengths=on_device)
    found = gather(step, blocks)
    for row, origin in enumerate(origins):
        for place, column in enumerate(columns):
            token, expected = column - origin, torch.zeros(())
            if 0 <= token < lengths[row]:
                expected = blocks[tables[row, token // size], :, token % size]
            assert (found[row, :, place] == expected).all()
    refuses(lambda: gather(step, blocks.new_zeros(*blocks.shape[:2], size + 1, blocks.shape[3])))
    refuses(lambda: gather(step, blocks.new_zeros(*blocks.shape[:3], 4)[..., ::2]))
    refuses(lambda: gather(step, blocks.to("meta")))
    if rows and len(columns) and any(lengths) and heads:
        wrong = dataclasses.replace(step, block_tables=tables + len(blocks))
        refuses(lambda: gather(wrong, blocks))


def hashes(draws: Draws) -> None:
    choose = draws.choose
    usual = (0, 1, 7, 4095, 4096, 4097, 70000)
    sizes = [choose.choice((*usual, choose.randrange(900000))) for _ in range(3)]
    skips = [choose.randrange(4) for _ in sizes]
    memory = [torch.zeros(size + skip, dtype=torch.uint8) for size, skip in zip(sizes, skips)]
    starts = [x.data_ptr() + skip if size else 0 for x, skip, size in zip(memory, skips, sizes)]
    first = cpp.hash_memory(starts, sizes)
    assert first == cpp.hash_memory(starts, sizes)
    if any(sizes):
        place = next(place for place, size in enumerate(sizes) if size)
        memory[place][skips[place] + choose.randrange(sizes[place])] = 1
        assert first != cpp.hash_memory(starts, sizes)
    refuses(lambda: cpp.hash_memory(starts, [-1, *sizes[1:]]))
    refuses(lambda: cpp.hash_memory([0], [1]))


def draw(draws: Draws) -> None:
    choose = draws.choose
    rows, size = choose.choice((0, 1, 2, 5)), choose.choice((1, 2, 63, 64, 65, 300, 1000))
    probs = draws.tensor(rows, size).softmax(-1)
    if choose.random() < 0.3:
        probs[:, : size - 1] = 0
    ours, its = torch.Generator().manual_seed(7), torch.Generator().manual_seed(7)
    for _ in range(2):
        found = cpp.multinomial(probs, ours)
        if rows:
            assert found.equal(torch.multinomial(probs, 1, generator=its).squeeze(1))
    bad = probs.clone()
    if rows:
        wrong = choose.choice((float("nan"), float("inf"), -1.0))
        bad[choose.randrange(rows), choose.randrange(size)] = wrong
        with contextlib.suppress(RuntimeError):
            cpp.multinomial(bad, ours)
            raise AssertionError("probabilities that torch refuses were drawn from")


def linears(draws: Draws) -> None:
    choose, dtype = draws.choose, draws.choose.choice(FLOATS)
    rows, depth = choose.choice((0, 1, 2, 5, 17, 33)), choose.choice((0, *DIMS, 100))
    width = choose.choice((0, *DIMS, 70, 700))
    x = draws.tensor(rows, depth + 3, dtype=dtype)[:, 1 : 1 + depth]
    weight = draws.tensor(width, depth, dtype=dtype)
    if choose.random() < 0.5:
        x = x.contiguous()
    if choose.random() < 0.3 and depth > 1 and width > 1:
        weight = weight.t().contiguous().t()
    bias = draws.tensor(width, dtype=dtype) if choose.random() < 0.5 else None
    found = linear(x, weight, bias, choose.randrange(best_path() + 1))
    expected = x.double() @ weight.double().t()
    close(found, expected if bias is None else expected + bias.double(), 4.0)
    refuses(lambda: linear(x, weight.double(), bias))
    refuses(lambda: linear(x, draws.tensor(width, depth + 1, dtype=dtype), bias))
    refuses(lambda: linear(x, weight, draws.tensor(width + 1, dtype=dtype)))


OPERATIONS: tuple[Callable[[Tensor], Tensor], ...] = (
    *(torch.neg, torch.abs, F.relu, torch.exp, torch.tanh, torch.sigmoid, F.silu, F.gelu),
    *(torch.sin, torch.cos, F.softplus, lambda x: x.softmax(-1), lambda x: (x * x + 1).rsqrt()),
    lambda x: x - x.amax(-1, keepdim=True),
    lambda x: x / (1 + x.abs().sum(-1, keepdim=True)),
    *(lambda x: x.clamp(-1, 1), lambda x: x * x.mean(-1, True)),
    *(lambda x: F.gelu(x, approximate="tanh"), lambda x: x * -0.5 + 1, lambda x: x.square().sqrt()),
)


def rows(draws: Draws) -> None:
    """Lists of small operations, one call each."""
    choose, dtype = draws.choose, draws.choose.choice(FLOATS)
    sizes = [choose.choice((1, 2, 3, 7)) for _ in range(choose.randrange(3))]
    x = draws.strided(*sizes, choose.choice((*DIMS[1:], 300, 2100)), dtype=dtype)
    shape = x.shape[choose.randrange(x.dim()) :]
    y = draws.tensor(*shape, dtype=choose.choice((dtype, torch.float32)))
    first, second = choose.sample(OPERATIONS, 2)
    expected = [first(x), second(x), x + y]
    tape_room = room("tape", "rows")
    with torch.no_grad(), tape_room.in_fixed_order(), tape_room.batch_invariant_operations():
        made = [first(x), second(x), x + y]
    for found, its in zip(made, expected):
        close(found, its, 2.0)


def play(
    function: Callable[[], Tensor], expect: Callable[[], Tensor], change: Callable[[], None]
) -> Any:
    """Records a function, and replays it on the same memory with other numbers; returns
    the tape."""
    from hf_paged.tape.tape import Tape

    out: list[Tensor] = []

    def run() -> None:
        made = function()
        if not out:
            out.append(made.clone())
        out[0].copy_(made)

    with torch.no_grad():
        run()
        tape = Tape.record(run, lambda tensor: False)
        for _ in range(2):
            change()
            out[0].fill_(7)
            tape.replay()
            close(out[0], expect(), 4.0)
    return tape


def pick(draws: Draws) -> None:
    choose = draws.choose
    table = nn.Embedding(choose.choice((1, 2, 11)), choose.choice(DIMS)).to(choose.choice(FLOATS))
    ids = torch.zeros(choose.choice((1, 2)), choose.choice((1, 3)), dtype=torch.int64)

    def change() -> None:
        ids.random_(0, table.num_embeddings)

    tape = play(lambda: table(ids), lambda: table(ids), change)
    assert tape.kernel_names.count("pick") == 1
    ids[0, 0] = choose.choice((-1, table.num_embeddings, 1 << 40))
    try:
        tape.replay()
    except RuntimeError:
        return
    raise AssertionError("a row outside of the table was read")


def tape(draws: Draws) -> None:
    """Products, lookups and lists in one recording."""
    choose, dtype = draws.choose, draws.choose.choice(FLOATS)
    rows, depth, width = (choose.choice(sizes) for sizes in ((1, 2, 5, 17), DIMS[3:], DIMS[3:]))
    gate, up = nn.Linear(depth, width).to(dtype), nn.Linear(depth, width, bias=False).to(dtype)
    x, y = draws.tensor(1, rows, depth, dtype=dtype), draws.tensor(width, dtype=dtype)
    operation = choose.choice(OPERATIONS)

    def function() -> Tensor:
        return operation(gate(x)) * up(x) + y

    def change() -> None:
        x.copy_(draws.tensor(*x.shape, dtype=dtype))

    play(function, function, change)


def path(draws: Draws) -> None:
    assert kernel("linear_path")(b"") in range(3)


ENTRIES: dict[str, Callable[[Draws], None]] = {
    **dict(attention=attention, store=store, gather=gathers, hash=hashes, draw=draw),
    **dict(linear=linears, linear_path=path, rows=rows, pick=pick, tape=tape),
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
    parser = tools.parser(__doc__, seed=0)
    parser.add_argument("--calls", type=int, default=1000, help="through each entry point")
    parser.add_argument("--jobs", type=int, default=1, help="threads that call at the same time")
    parser.add_argument("--threads", type=int, default=1, help="of PyTorch and the library")
    parser.add_argument("--entries", nargs="+", default=list(KERNEL_NAMES), choices=KERNEL_NAMES)
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
