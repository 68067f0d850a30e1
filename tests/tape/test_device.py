"""Fused launches give the results of the recorded forward, in Triton's interpreter."""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from hf_paged import PagedConfig, PagedEngine, kernels
from hf_paged.batching.execution import cuda_graphs, graphs
from hf_paged.step import NotCapturable
from hf_paged.tape.record import NothingUnrecorded
from tests.batching.test_runner import SIZE
from tests.support import models
from tests.support.engine_helpers import assert_same_as_lone, lone_run, prompts
from tests.support.graph_helpers import FakeGraphs, results, use_fake_graphs
from tests.support.kernels.device import interpreted
from tests.support.quantized import round_caches
from tests.tape.test_tape import CLOSE, DTYPES, UNARY, tensor

pytestmark = interpreted
CPU = torch.device("cpu")


def check(
    function: Callable[..., Any], *inputs: Tensor, exact: bool = False, launches: int | None = None
) -> None:
    """Records the function on these inputs and compares it on others in the same memory."""
    from hf_paged.tape.device import DeviceTape

    found: list[Tensor] = []

    def run() -> None:
        made = function(*inputs)
        for place, its in enumerate(made if isinstance(made, tuple) else (made,)):
            if len(found) == place:
                found.append(its.clone())
            found[place].copy_(its)

    with torch.no_grad():
        run()  # allocates the results
        tape = DeviceTape.record(run, CPU)
        generator = torch.Generator().manual_seed(5)
        for turn in range(2):
            for x in inputs:
                x.copy_(torch.randn(x.shape, generator=generator) * (1 + turn))
            expected = function(*(x.clone() for x in inputs))
            for x in found:
                x.fill_(7)
            tape.replay(spoils=bool(turn))
            for x, y in zip(found, expected if isinstance(expected, tuple) else (expected,)):
                tolerance = 0 if exact else CLOSE.get(x.dtype, 0)
                torch.testing.assert_close(x, y, rtol=tolerance, atol=tolerance)
    if launches is not None:
        assert tape.num_launches == launches


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", [*UNARY, "gelu_pytorch_tanh"])
def test_operations_on_one_tensor(name: str, dtype: torch.dtype) -> None:
    function = UNARY.get(name) or ACT2FN[name]
    for shape in ((3, 5), (1, 7, 33), (2, 3, 4, 17)):
        check(function, tensor(*shape, dtype=dtype))
    check(function, tensor(6, 4, 10, dtype=dtype).transpose(0, 1))


def test_numbers_that_are_not_numbers() -> None:
    x = torch.tensor(
        [[float("nan"), 1.0, -1.0], [2.0, float("inf"), 0.0], [30.0, -30.0, -float("inf")]]
    )
    check(lambda x: (x.clone(), x.relu(), x.tanh(), x.sigmoid()), x)
    check(lambda x: x.amax(-1, keepdim=True) + x, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operations_on_two_tensors(dtype: torch.dtype) -> None:
    for other in ((2, 3, 8), (8,), (2, 1, 8), (2, 3, 1), ()):
        a, b = tensor(2, 3, 8, dtype=dtype), tensor(*other, dtype=dtype, seed=1)
        check(lambda a, b: (a + b, a - b, a * b, a / b), a, b, exact=True)
        check(lambda a, b: (a * b + b) * a, a, b, exact=True)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 3, 70])
def test_norms(dtype: torch.dtype, rows: int) -> None:
    for make in (LlamaRMSNorm, GemmaRMSNorm, nn.LayerNorm):
        norm = make(96).to(dtype)
        norm.weight.data = tensor(96, seed=3).to(dtype)
        own = make is GemmaRMSNorm and rows > 1  # its weight plus one, which is one row
        check(norm, tensor(1, rows, 96, dtype=dtype), launches=1 + own)
        check(
            lambda x, y, norm=norm: (x + y, norm(x + y)),
            *(tensor(1, rows, 96, dtype=dtype, seed=i) for i in (0, 1)),
        )
    # of each head
    check(LlamaRMSNorm(16).to(dtype), tensor(1, rows, 4, 16, dtype=dtype), launches=1)


def test_numbers_of_python() -> None:
    x = torch.tensor([[1.0, -2.0, 0.0, -0.0]])
    for number in (-0.0, 1e39, -1e39, 1e-40, 1e-300, float("inf"), 0.1):
        check(
            lambda x, number=number: (x * number, x / number, x + number, x - number, -x),
            x,
            exact=True,
        )
    x = tensor(3, 8)
    check(
        lambda x: torch.ops.aten.add.Scalar(x, 2, 3) + torch.ops.aten.sub.Tensor(x, x * 2, alpha=3),
        x,
    )


@pytest.mark.parametrize("width", [64, 2048])
def test_one_number_a_row_in_place(width: int) -> None:
    """Rows are split into parts; no part may change the row's shared number."""

    def scale(x: Tensor) -> Tensor:
        factor = x.pow(2).mean(-1, keepdim=True)
        factor.add_(1.0)
        factor.mul_(2.0)
        return x * factor

    check(scale, tensor(2, width))
    check(lambda x: x * x[:, :1].clone().mul_(2.0).add_(1.0), tensor(2, width))


def test_wide_rows() -> None:
    """Rows as wide as a vocabulary are split into parts, except for sums over them, which PyTorch
    then computes."""
    check(lambda x: torch.tanh(x / 30.0) * 30.0, tensor(3, 20000), launches=1)
    check(lambda x: x * x.mean(-1, keepdim=True), tensor(2, 20000), launches=2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 5])
def test_rotary_embeddings(dtype: torch.dtype, rows: int) -> None:
    def rotate(x: Tensor, y: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        heads = (x.view(1, rows, 4, 16).transpose(1, 2), y.view(1, rows, 2, 16).transpose(1, 2))
        return apply_rotary_pos_emb(*heads, cos, sin)

    x, y = tensor(1, rows, 64, dtype=dtype), tensor(1, rows, 32, dtype=dtype, seed=1)
    check(
        rotate,
        x,
        y,
        tensor(1, rows, 16, dtype=dtype, seed=2),
        tensor(1, rows, 16, dtype=dtype, seed=3),
        exact=True,
    )


class DeviceTapes(FakeGraphs):
    """Records fused launches like `CudaGraphs`, without a device's graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.tapes: list[Any] = []

    def capture(
        self, run: Callable[[], None], model: Any = None, check: Any = None, extra: Any = ()
    ) -> Any:
        with NothingUnrecorded():
            run()
        self.tapes.append(cuda_graphs.fuse(run, CPU, check))
        return self.tapes[-1] or super().capture(run)


@pytest.fixture
def tapes(monkeypatch: pytest.MonkeyPatch) -> DeviceTapes:
    backend = DeviceTapes()
    use_fake_graphs(monkeypatch)
    monkeypatch.setattr(graphs, "graph_backend", lambda device: backend)
    monkeypatch.setenv(kernels.VARIABLE, "triton")
    return backend


def layer_launches(name: str, tapes: DeviceTapes, **options: Any) -> int:
    """Launches of one additional layer, in a decode step of three rows."""
    counts = []
    for layers in (1, 2):
        model = models.build(name, num_hidden_layers=layers, **options)
        with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
            for number in range(3):
                config = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 4}
                engine.add_request(prompts(5 + number, seed=number)[0], generation_config=config)
            while engine.has_unfinished:
                engine.step()
        counts.append(tapes.tapes[-1].num_launches)
    return counts[1] - counts[0]


@pytest.mark.slow
@pytest.mark.full
def test_launches_of_a_layer(tapes: DeviceTapes) -> None:
    """A Llama layer: norms with the sums before them, the rotations of queries and keys, the store,
    attention, the activation, and seven products."""
    assert layer_launches("llama", tapes) <= 16


@pytest.mark.parametrize(
    ("name", "kv_dtype"),
    [
        ("llama", None),
        ("gemma3", None),
        pytest.param("llama", "fp8_e5m2", marks=[pytest.mark.slow, pytest.mark.full]),
    ],
)
def test_engine_gives_plain_tokens(
    name: str, kv_dtype: str | None, tapes: DeviceTapes, monkeypatch: pytest.MonkeyPatch
) -> None:
    layers = {"layer_types": ["sliding_attention", "full_attention"]} if name == "gemma3" else {}
    model = models.build(name, num_hidden_layers=2, **layers)
    jobs: list[Any] = []
    for number, (prompt, new) in enumerate([(5, 8), (9, 6)]):
        options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": new}
        jobs.append((prompts(prompt, seed=number)[0], {"generation_config": options}))
    with PagedEngine(model, PagedConfig(block_size=SIZE, kv_dtype=kv_dtype)) as engine:
        found = results(engine, jobs)
        assert engine.stats().num_captured_steps > 4 and None not in tapes.tapes
    if kv_dtype is not None:
        round_caches(monkeypatch, kv_dtype)
    for (prompt, options), result in zip(jobs, found):
        config = options["generation_config"]
        assert_same_as_lone(lone_run(model, prompt, config), result, config, name)


class _Unseen(nn.Module):
    """Writes without a dispatcher noticing, like another library's kernel."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        found = self.inner(x).contiguous()
        out = torch.empty_like(found)
        ctypes.memmove(out.data_ptr(), found.data_ptr(), out.nbytes)
        return out


def test_what_is_not_seen_is_recorded_as_it_is(
    tapes: DeviceTapes, caplog: pytest.LogCaptureFixture
) -> None:
    model: Any = models.build("llama", num_hidden_layers=1)
    model.model.layers[0].mlp.down_proj = _Unseen(model.model.layers[0].mlp.down_proj)
    caplog.set_level(logging.INFO, logger="hf_paged")
    options = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
    with PagedEngine(model, PagedConfig(block_size=SIZE)) as engine:
        (result,) = results(engine, [(prompts(5)[0], {"generation_config": options})])
    assert_same_as_lone(lone_run(model, prompts(5)[0], options), result, options, "")
    assert tapes.tapes and set(tapes.tapes) == {None} and tapes.num_replays > 1
    assert "without fused operations" in caplog.text


def test_memory_goes_when_it_is_not_needed() -> None:
    """A replay uses no more memory than the forward did, and none afterwards."""
    from hf_paged.tape.device import DeviceTape

    x, out = tensor(64, 64), torch.empty(64, 64)

    def run() -> None:
        y = x
        for _ in range(8):
            y = torch.mm(y, y).tanh()
        out.copy_(y)

    tape = DeviceTape.record(run, CPU)
    tape.replay()
    assert not tape._storages
    with pytest.raises(NotCapturable):
        DeviceTape.record(lambda: out.copy_(torch.rand(64, 64)), CPU)
