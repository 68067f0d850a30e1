"""Modules whose forwards read the content of tensors are called in replays."""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import hf_paged
from hf_paged import PagedEngine
from hf_paged.kernels.cpp.build import observer
from hf_paged.step import NotCapturable
from hf_paged.tape import live
from hf_paged.tape.invariant import in_fixed_order
from hf_paged.tape.live import LiveModules, LiveRefused, LiveValue
from hf_paged.tape.record import ContentReadError, current_recorder, recording
from hf_paged.tape.recorders import RecordedStep
from hf_paged.tape.tape import Tape
from tests.support import models
from tests.support.architecture_configs import tiny_model
from tests.support.engine_helpers import lone_run, prompts
from tests.support.graph_helpers import graphs_of

pytestmark = pytest.mark.usefixtures("needs_compiler")


@pytest.fixture(autouse=True)
def trusts_tests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules of these tests count as those of a library."""
    monkeypatch.setattr(live, "is_user_module", lambda name: False)


OPTIONS = {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}


class Experts(nn.Module):
    """Two experts, each of which computes the rows that choose it. `end` is called with the rows'
    choices and the result."""

    def __init__(self, end: Callable[..., Any] | None = None) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.end = end
        self.kept: list[Any] = []

    def forward(self, x: Tensor, choices: Tensor, *args: Any, scale: float = 1.0) -> Any:
        out = torch.zeros_like(x)
        for index in choices.unique().tolist():
            rows = (choices == index).nonzero()[:, 0]
            out[rows] = self.experts[index](x[rows]).float() * scale
        return out if self.end is None else self.end(self, x, choices, out, *args)


class Sized(nn.Module):
    """Splits rows, sorted by their experts, by the numbers of rows that the experts have."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([expert(y) for expert, y in zip(self.experts, x.split(sizes))])


class Block(nn.Module):
    """Calls experts between operations that are recorded."""

    def __init__(self, experts: nn.Module, call: Callable[..., Tensor] | None = None) -> None:
        super().__init__()
        self.router, self.experts, self.sized = nn.Linear(8, 2), experts, Sized()
        self.call = call or (lambda block, x, choices: block.experts(x, choices))

    def forward(self, x: Tensor) -> Tensor:
        y = torch.tanh(x) * 2
        choices = self.router(y).argmax(-1)
        return x + torch.relu(self.call(self, y, choices)) * 3


class Layers(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(x)
        return x


def counted(block: Any, x: Tensor, choices: Tensor) -> Tensor:
    out, sizes, _ = block.experts(x, choices)
    order = choices.argsort(stable=True)
    return out + block.sized(x[order], sizes)[order.argsort()]


def in_mode(block: Any, x: Tensor, choices: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return block.experts(x, choices).float()


def noted(block: Any, x: Tensor, choices: Tensor) -> Tensor:
    return block.experts(x, choices, notes := []) + notes[0]


# what experts return after their loop, how a block calls them, and the classes that are live
LIVE: dict[str, tuple[Any, Any, set[type]]] = {
    "tensor": (None, None, {Experts}),
    "scaled": (None, lambda block, x, choices: block.experts(x, choices, scale=0.5), {Experts}),
    "tuple": (
        lambda self, x, choices, out: (out, None),
        lambda block, x, choices: block.experts(x, choices)[0],
        {Experts},
    ),
    "numbers for another module": (
        lambda self, x, choices, out: [out, choices.bincount(minlength=2).tolist(), None],
        counted,
        {Experts, Sized},
    ),
    # the block around the experts is live, too, or only the block
    "numbers for other code": (
        lambda self, x, choices, out: (out, int(choices.sum())),
        lambda block, x, choices: torch.mul(*block.experts(x, choices)),
        {Experts, Block},
    ),
    "argument": (lambda self, x, choices, out: x, None, {Block}),
    "written argument": (lambda self, x, choices, out: x.add_(out) * 1, None, {Block}),
    "expanded": (lambda self, x, choices, out: out[:, :1].expand(-1, 8), None, {Block}),
    "mode": (None, in_mode, {Block}),
    "object": (None, lambda block, x, choices: block.experts(x, choices, object()), {Block}),
    "object result": (
        lambda self, x, choices, out: (out, object()),
        lambda block, x, choices: block.experts(x, choices)[0],
        {Block},
    ),
    "meta result": (
        lambda self, x, choices, out: (out, torch.empty(2, device="meta")),
        lambda block, x, choices: block.experts(x, choices)[0],
        {Block},
    ),
    "list argument": (
        lambda self, x, choices, out, notes: notes.append(out) or out,
        noted,
        {Block},
    ),
    "global": (
        lambda self, x, choices, out: NOTES.append(out + 1) or out,
        lambda block, x, choices: block.experts(x, choices) * NOTES.pop(),
        {Block},
    ),
}
NOTES: list[Tensor] = []


def record(
    model: nn.Module, *tensors: Tensor, live: LiveModules | None = None
) -> tuple[Tape, Tensor, LiveModules]:
    """Records the model on these tensors as a recorder does; returns its result, too."""
    live, results = live or LiveModules(), list[Tensor]()
    addresses = {x.untyped_storage().data_ptr() for x in (*model.parameters(), *model.buffers())}

    def run() -> None:
        out = model(*tensors)
        if not results:
            results.append(torch.empty_like(out))
        results[0].copy_(out)

    def is_persistent(x: Tensor) -> bool:
        return x.untyped_storage().data_ptr() in addresses or any(x is y for y in tensors)

    run()  # allocates the result
    while True:
        try:
            with live.calling():
                return Tape.record(run, is_persistent), results[0], live
        except NotCapturable as error:
            if not live.learn(error):
                raise


@pytest.fixture(autouse=True)
def without_gradients() -> Any:
    torch.manual_seed(0)
    with torch.no_grad():
        yield


def check(model: nn.Module, tape: Tape, x: Tensor, result: Tensor) -> None:
    for seed in range(5):
        x.copy_(torch.randn(x.shape, generator=torch.Generator().manual_seed(seed)))
        expected = model(x.clone())
        tape.replay()
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("name", LIVE)
def test_modules_that_read_content_are_live(name: str) -> None:
    end, call, classes = LIVE[name]
    model = Layers([Block(Experts()), Block(Experts(end), call)])
    x = torch.randn(6, 8)
    tape, result, live = record(model, x)
    assert live.classes == classes and tape.calls_modules
    check(model, tape, x, result)
    hooked = []
    block: Any = model[1]
    module = block if Block in classes else block.experts
    module.register_forward_hook(lambda *args: hooked.append(1))
    tape.replay()
    assert hooked == [1]


OLDER = torch.ones(8)


def call_kernel(*args: Any) -> Tensor:
    observe = observer.get()  # set in a recording
    if observe is not None:
        observe("rows", b"", {}, {})
    return args[-1]  # type: ignore[no-any-return]


# what experts do after their loop, how a block reads it, and the reason against a recording
READ = "reads the content"
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "attribute": (
        lambda self, x, choices, out: setattr(self, "count", int(choices.sum())) or out,
        lambda block, x, choices: block.experts(x, choices) * block.experts.count,
        READ,
    ),
    "list": (
        lambda self, x, choices, out: self.kept.append(int(choices.sum())) or out,
        lambda block, x, choices: block.experts(x, choices) * block.experts.kept[-1],
        READ,
    ),
    "older tensor": (lambda self, x, choices, out: out + OLDER, None, READ),
    "kernel": (lambda self, *args: call_kernel(*args), None, READ),
    "meta tensor": (
        lambda self, x, choices, out: out.view(torch.empty(6, 8, device="meta").t().shape[::-1]),
        None,
        READ,
    ),
    "draws": (lambda self, x, choices, out: out + torch.rand(8), None, "random"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_modules_with_other_effects_are_not(name: str) -> None:
    end, call, match = REFUSED[name]
    with pytest.raises(NotCapturable, match=match):
        record(Layers([Block(Experts(end), call)]), torch.randn(6, 8))


def test_calls_of_modules_may_be_wrapped_by_other_code(monkeypatch: pytest.MonkeyPatch) -> None:
    call = nn.Module._call_impl

    def wrapped(module: nn.Module, *inputs: Any, **options: Any) -> Any:
        return call(module, *inputs, **options)

    monkeypatch.setattr(nn.Module, "_call_impl", wrapped)
    _, _, live = record(Layers([Block(Experts())]), torch.randn(6, 8))
    assert live.classes == {Experts}


class Stateful(Layers):
    """Counts its calls in a buffer."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(layers)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x)


def test_replays_end_where_results_have_other_sizes() -> None:
    """The states are restored, and the next recording calls another module."""
    block = Block(
        Experts(lambda self, x, choices, out: out[choices > 0]),
        lambda block, x, choices: x.masked_scatter(
            (choices > 0)[:, None], block.experts(x, choices)
        ),
    )
    model, x = Stateful(block), torch.randn(6, 8)
    tape, result, live = record(model, x)
    inputs: Any = SimpleNamespace(overwritten_buffers=[model.count])
    step = RecordedStep(inputs, result, tape, None)
    step.replay()
    count = int(model.count)
    x[:] = x[:1]  # all rows choose one expert
    with pytest.raises(LiveRefused, match="Experts returns tensors of different sizes") as error:
        step.replay()
    assert int(model.count) == count and live.learn(error.value) and not live.classes
    tape, result, live = record(model, x, live=live)
    assert live.classes == {Block}
    check(model, tape, x, result)


def test_keys_without_a_mask_are_no_arguments() -> None:
    experts, keys = Experts(), torch.randn(6, 1, 1, 8)

    def forward(x: Tensor) -> Tensor:
        recorder = current_recorder.get()
        if recorder is not None:
            recorder.columns.add(keys, torch.tensor(0))
        return experts(keys[:, 0, 0], x[:, 0].long())  # type: ignore[no-any-return]

    model = Block(experts)
    model.forward = forward  # type: ignore[method-assign]
    with pytest.raises(NotCapturable, match=READ):
        record(Layers([model]), torch.zeros(6, 8))


def test_values_of_live_modules_are_not_used() -> None:
    value: Any = LiveValue()
    with recording():
        for use in (len, bool, int, str, iter, list, hash, lambda x: isinstance(x, list)):
            with pytest.raises(ContentReadError):
                use(value)


def dbrx() -> Any:
    return tiny_model(transformers.DbrxForCausalLM)


def test_steps_are_recorded_for_exactly_their_rows() -> None:
    """Unused rows could change the others' results in a live module."""
    model = dbrx()
    texts = prompts(5, 7, 9)
    with PagedEngine(model) as engine:
        found = engine.generate(texts, [{**OPTIONS, "max_new_tokens": n} for n in (40, 40, 20)])
        keys = list(graphs_of(engine.memory)._graphs)
        assert {key.num_decodes for key in keys} == {2, 3}
        assert engine.stats().num_captured_steps > 20
    for text, result in zip(texts, found):
        length = len(result.token_ids)
        expected = lone_run(model, text, {**OPTIONS, "max_new_tokens": length})
        assert [result.token_ids] == expected


def test_changed_modules_are_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # of `trusts_tests`
    model, inputs = dbrx(), torch.tensor(prompts(8))
    for change in (None, "weight", "module", "forward", "hook"):
        experts = model.transformer.blocks[0].ffn.experts
        forward = experts.forward
        if change == "hook":
            experts.register_forward_hook(lambda module, args, out: out * 3)
        elif change == "forward":
            experts.forward = lambda *args, forward=forward: forward(*args) * -2
        elif change == "weight":
            experts.mlp.w1.data = experts.mlp.w1.data * 2 + 1
        elif change == "module":
            model.transformer.blocks[0].ffn.experts = copy.deepcopy(
                model.transformer.blocks[1].ffn.experts
            )
        expected = model.generate(inputs, **OPTIONS)
        for _ in range(2):
            assert torch.equal(model.generate(inputs, **OPTIONS, **models.PAGED), expected)
        route: Any = hf_paged.last_route(model)
        # code from outside of the libraries is called in plain forwards
        assert bool(route.num_captured_steps) == (change not in ("forward", "hook"))


def test_batch_invariant_steps_are_not_recorded() -> None:
    with in_fixed_order(), pytest.raises(NotCapturable, match=rf"{READ} .*\(Experts\)"):
        record(Layers([Block(Experts())]), torch.randn(6, 8))
