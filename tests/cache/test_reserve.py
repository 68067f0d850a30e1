"""Memory that the process may not map: the engine's reservation, and its error if there is none."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from hf_paged.kernels import cpp

resource = pytest.importorskip("resource")  # not on Windows

CHILD = """
import resource, psutil, torch
from hf_paged import PagedConfig, PagedEngine
from tests.support import models

torch.set_num_threads(1)
model = models.build("llama", **{sizes})
prompt, options = models.token_ids(1, 5)[0].tolist(), {{"max_new_tokens": 6, "do_sample": False}}
expected = model.generate(torch.tensor([prompt]), **options)[0, 5:].tolist()
PagedEngine(model, PagedConfig(num_blocks=8)).generate([prompt], options)  # what is built on first use
limit = psutil.Process().memory_info().vms + ({megabytes} << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
"""


def run(code: str, megabytes: int, **sizes: int) -> str:
    """Output of `code` in a child process that may map `megabytes` MiB more than at the start of
    `code`."""
    command = [sys.executable, "-c", CHILD.format(megabytes=megabytes, sizes=sizes) + code]
    # an arena of glibc, per thread, takes 64 MiB
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
def test_a_default_engine_serves_under_a_limit_of_address_space() -> None:
    code = """
def serve():
    engine = PagedEngine(model)
    for _ in range(2):
        result = engine.generate([prompt], options)[0]
        assert result.error is None, result.error
        assert result.token_ids == expected
    many = engine.generate([prompt] * 64, {**options, "max_new_tokens": 100})  # several blocks each
    assert all(result.error is None and result.token_ids[:6] == expected for result in many)
    engine.check_integrity()
    torch.empty(64 << 20, dtype=torch.uint8)  # the rest is not taken

serve()
resource.getrlimit = lambda which: (resource.RLIM_INFINITY,) * 2
serve()  # as without overcommitting: nothing tells how much there is before it is asked for
"""
    run(code, megabytes=192)


@pytest.mark.slow
def test_an_error_that_remains_names_the_knobs() -> None:
    code = """
engine = PagedEngine(model, PagedConfig(block_size=256, num_blocks=8))
result = engine.generate([prompt], options)[0]
print(result.error)
engine.check_integrity()
assert PagedEngine(model, PagedConfig(num_blocks=1)).generate([prompt], options)[0].token_ids == expected
"""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 2048}
    # 128 in each of two layers for a block of 256 tokens, 8 for one of 16; an allocator's arena
    # that goes may free 64
    message = run(code, megabytes=72, **heads)
    assert "needs 1 blocks of 256 tokens, but memory ran out" in message
    assert "`num_blocks` (8) or `memory_fraction` (None)" in message


@pytest.mark.slow
def test_a_wider_dtype_between_steps_touches_no_memory_that_is_set_aside() -> None:
    code = """
engine = PagedEngine(model, PagedConfig(num_blocks=1 << 17))  # 512 MB a layer
engine.add_request(prompt, options)
engine.step()
before = psutil.Process().memory_info().rss
model.double()
while engine.has_unfinished:
    for output in engine.step():
        assert output.result is None or output.result.error is None
assert psutil.Process().memory_info().rss - before < 256 << 20
assert engine.generate([prompt], options)[0].token_ids == expected
"""
    run(code, megabytes=1 << 14)


KERNEL = """
import resource, psutil, torch
from hf_paged.kernels import cpp
from hf_paged.kernels.cpp.attention import Attention
from hf_paged.step import StepMetadata

torch.set_num_threads({threads})
assert cpp.is_available()
query, blocks = torch.randn(16, 64, 4096), torch.randn(4, 1, 256, 4096)  # 16 MiB, and so is the output
step = StepMetadata.rectangle(torch.tensor([[0, 1, 2, 3]], dtype=torch.int32), (1024,), 256, query_len=16)
kernel = Attention(query, blocks, blocks, scale=1.0)
torch.ones(1 << 20).exp()  # the threads are there
limit = psutil.Process().memory_info().vms + (20 << 20)
resource.setrlimit(resource.RLIMIT_AS, (limit, resource.RLIM_INFINITY))
for _ in range(2):
    try:
        kernel(query, step)
    except MemoryError as error:
        print(error)
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
assert kernel(query, step).isfinite().all()
"""


@pytest.mark.slow_cases("2")
@pytest.mark.skipif(not cpp.is_available(), reason="no C++ compiler")
@pytest.mark.parametrize("threads", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_the_kernel_raises_where_it_gets_no_memory(threads: int) -> None:
    """It wrote to address 0."""
    done = subprocess.run(
        [sys.executable, "-c", KERNEL.format(threads=threads)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout == "not enough memory for the buffers of the attention kernel\n" * 2
