"""Code that changes a model within a call, or between an engine's steps: tokens are those of the
plain call. `tests/fingerprints` has more kinds of changes, and sees that each is noticed."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_paged import PagedConfig, PagedEngine, last_route
from hf_paged.batching.scheduling.preemption import CostModel
from hf_paged.kernels import cpp
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import lone_run, prompts, run_all
from tests.support.rooms import records_on_cpu

WIDTH, AT = 17, 12  # tokens of the prompt, and the new token after which the model changes
GREEDY = {"do_sample": False, "max_new_tokens": 30}
NEW = -0.7  # the factor from then on

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="no C++ compiler: nothing is recorded"
)

FACTORS = {"now": 1.0}
CONTEXT = ContextVar("factor", default=1.0)
FORWARD = LlamaMLP.forward


@pytest.fixture(autouse=True)
def globals_as_before() -> Iterator[None]:
    yield
    restore()


def restore() -> None:
    FACTORS["now"] = 1.0
    CONTEXT.set(1.0)
    LlamaMLP.forward = FORWARD


class Scaled(nn.Module):
    """Multiplies what a module returns by a number that it reads somewhere, in each call."""

    def __init__(self, inner: nn.Module, read: Callable[[], Any]) -> None:
        super().__init__()
        self.inner, self.read = inner, read

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(self.read())


def scale(model: Any, read: Callable[[], Any]) -> Any:
    layer = model.model.layers[1]
    layer.mlp = Scaled(layer.mlp, read).eval()
    return layer.mlp


def of_layers(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            act(layer)

    return change


def halve(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * -0.5


class Halved(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * -0.5


SIMPLE = {
    "scaling": of_layers(lambda layer: setattr(layer.self_attn, "scaling", 0.02)),
    "hook": of_layers(lambda layer: layer.mlp.register_forward_hook(lambda *args: args[-1] * -0.5)),
    "forward": of_layers(lambda layer: setattr(layer.mlp, "forward", halve(layer.mlp.forward))),
    "module's class": of_layers(lambda layer: setattr(layer.mlp, "__class__", Halved)),
    "class": lambda model: setattr(LlamaMLP, "forward", halve(LlamaMLP.forward)),
    "weight": of_layers(
        lambda layer: setattr(layer.mlp.up_proj.weight, "data", -layer.mlp.up_proj.weight.data)
    ),
}
# what a module reads, and what changes it
READ: dict[str, tuple[Callable[[], Any], Callable[[], Any]]] = {
    "global": (lambda: FACTORS["now"], lambda: FACTORS.update(now=NEW)),
    "context": (lambda: CONTEXT.get(), lambda: CONTEXT.set(NEW)),
}
ADAPTERS = {
    "set_adapter": lambda model: model.set_adapter("second"),
    "merge": lambda model: model.merge_adapter(),
}
CASES = [*SIMPLE, *READ, *ADAPTERS]
IS_UNSEEN = "context"


def build(case: str) -> tuple[Any, Callable[[], Any]]:
    """A model, and what changes it."""
    restore()
    model = models.build("llama")
    if case in SIMPLE:
        return model, functools.partial(SIMPLE[case], model)
    if case in READ:
        read, change = READ[case]
        scale(model, read)
        return model, change
    peft = pytest.importorskip("peft")
    options = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config, adapter_name="first")
    model.add_adapter("second", config)
    return model.eval(), functools.partial(ADAPTERS[case], model)


class Processor:
    """Acts when it sees `AT` new tokens; also as a streamer."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act: Callable[[], Any] | None = act
        self.count = 0

    def see(self, length: int) -> None:
        if length >= WIDTH + AT and self.act is not None:
            act, self.act = self.act, None
            act()

    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.see(ids.shape[1])
        return scores

    def put(self, value: torch.Tensor) -> None:
        self.count += value.numel()
        self.see(self.count)

    def end(self) -> None:
        pass


class Criterion(Processor):
    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        super().__call__(ids, scores)
        return torch.zeros(len(ids), dtype=torch.bool)


WAYS = {
    "processor": lambda act: {"logits_processor": [Processor(act)]},
    "criterion": lambda act: {"stopping_criteria": [Criterion(act)]},
    "streamer": lambda act: {"streamer": Processor(act)},
    "thread": lambda act: {"streamer": Processor(lambda: in_threads(act))},
}


def generate(model: Any, *processors: Any, num_rows: int = 1, **options: Any) -> torch.Tensor:
    own = {"logits_processor": list(processors)} if processors else {}
    return model.generate(**models.prompt("llama", num_rows, WIDTH), **GREEDY, **own, **options)


def assert_same(
    run: Callable[..., torch.Tensor], paged: dict[str, Any] = models.PAGED
) -> torch.Tensor:
    """Of a run with the options of a plain call, and one with those of a paged call; returns the
    tokens."""
    expected, found = run(), run(**paged)
    assert torch.equal(found, expected), f"plain\n{expected}\npaged\n{found}"
    return expected


def num_recorded(model: Any) -> int:
    """How many steps of the last call were recorded; where none can be, enough."""
    return last_route(model).num_captured_steps if records_on_cpu() else 30


@pytest.mark.slow_cases("hook-*", "forward-*", "class-*", "weight-*")
@pytest.mark.parametrize(
    ("case", "way"),
    [
        *itertools.product(CASES, ["processor"]),
        *itertools.product(["scaling"], ["criterion", "streamer", "thread"]),
    ],
)
def test_code_of_a_call_that_changes_the_model(case: str, way: str) -> None:
    made = []

    def run(**paged: Any) -> torch.Tensor:
        model, act = build(case)
        made.append(model)
        return generate(model, **WAYS[way](act), **paged)

    same = torch.equal(generate(build(case)[0]), assert_same(run))
    assert case == "merge" or not same, "the change changes nothing: the test is void"
    route = last_route(made[1])
    assert route.road == "engine"
    if case == IS_UNSEEN and records_on_cpu():
        assert not route.num_captured_steps
        assert any("are not recorded" in reason for reason in route.slowed_by)
    elif case != "hook":
        assert num_recorded(made[1]) > 16, "it is recorded once more"


@pytest.mark.slow_cases(but=["forward", "module's class", "scaling", "global"])
@pytest.mark.parametrize("case", CASES)
def test_changes_between_steps_of_an_engine(case: str) -> None:
    """A request that runs, and one that is added after the change."""
    text, later = prompts(WIDTH, 9)
    model, act = build(case)
    expected = [
        lone_run(model, text, GREEDY, logits_processor=[Processor(act)]),
        lone_run(model, later, GREEDY),
    ]
    model, act = build(case)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.add_request(text, GREEDY, request_id="first")
        for _ in range(AT + 1):  # one token a step; a processor sees them one forward later
            engine.step()
        act()
        engine.add_request(later, GREEDY, request_id="later")
        results = run_all(engine)
    assert [[results[name].token_ids] for name in ("first", "later")] == expected


@torch.no_grad()
def multiply(case: str, model: Any, factor: float) -> None:
    for layer in model.model.layers:
        if case == "scaling":
            layer.self_attn.scaling *= factor
        elif case == "weights":
            layer.self_attn.v_proj.weight.mul_(factor)
        else:
            layer.mlp.up_proj.weight.data.mul_(factor)


UNDONE = ["scaling", "weights", "data"]


def changing(model: Any, case: str, factors: dict[int, float], calls: bool = False) -> Any:
    """A processor that multiplies by a factor at each of these calls, the first one of which may
    also call `generate`."""
    numbers = itertools.count(1)

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        number = next(numbers)
        if calls and number == 1:
            model.generate(ids[:1, :4], max_new_tokens=2, do_sample=False, **models.PAGED)
        multiply(case, model, factors.get(number, 1.0))
        return scores

    return process


@pytest.mark.parametrize(
    ("case", "options"),
    [*itertools.product(UNDONE, [models.PAGED]), ("weights", models.UNRECORDED)],
    ids=["scaling", "weights", "data", "unrecorded"],
)
def test_a_change_that_is_undone_leaves_nothing_in_the_prefix_cache(
    case: str, options: dict[str, Any]
) -> None:
    """Blocks computed in between are not served, also where another call runs beside them."""
    model, last = models.build("llama"), GREEDY["max_new_tokens"]
    for first, then, calls in ((1, AT, False), (1, last, True), (AT, last, False)):
        process = changing(model, case, {first: 4.0, then: 0.25}, calls)
        found = generate(model, process, num_rows=3, **options)
        longer = {"input_ids": found, "attention_mask": torch.ones_like(found)}
        assert_same(functools.partial(model.generate, **longer, **GREEDY), options)


@pytest.mark.parametrize(
    ("case", "preemption"), [*itertools.product(UNDONE, ["recompute"]), ("weights", "auto")]
)
def test_preempted_rows_keep_what_the_model_computed_before_it_changed(
    case: str, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "choose", lambda *given: "recompute")
    config = {"block_size": 8, "num_blocks": 20, "preemption": preemption}

    def run(**paged: Any) -> torch.Tensor:
        model = models.build("llama")
        processor = Processor(lambda: multiply(case, model, -0.6))
        return generate(model, processor, num_rows=4, **paged)

    assert_same(run, {"cache_implementation": "paged", "cache_config": config})


def test_a_model_that_changes_in_each_step_is_not_recorded_each_time() -> None:
    def run(**paged: Any) -> torch.Tensor:
        model = models.build("llama")
        factors = dict.fromkeys(range(1, 31), 0.95)
        found = generate(model, changing(model, "scaling", factors), **paged)
        assert not paged or last_route(model).num_captured_steps == 0
        return found

    assert_same(run)


class Functions(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * -0.6 if func is torch.nn.functional.silu else found


class Dispatches(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * -0.6 if func is torch.ops.aten.silu.default else found


@pytest.mark.slow
@pytest.mark.parametrize("mode", [Functions, Dispatches])
def test_an_active_mode_sees_every_step(mode: Any) -> None:
    model = models.build("llama")
    plain = generate(model)
    with mode():
        expected = generate(model)
    assert not torch.equal(plain, expected), "the mode changes nothing: the test is void"
    for _ in range(2):
        with mode():
            assert torch.equal(generate(model, **models.PAGED), expected)
            route = last_route(model)
            assert not route.num_captured_steps
            named = any(f"`{mode.__name__}`" in reason for reason in route.slowed_by)
            assert named or not records_on_cpu()
        assert torch.equal(generate(model, **models.PAGED), plain)
        assert num_recorded(model) > 16


@pytest.mark.parametrize("mode", [Functions, Dispatches])
def test_a_mode_that_a_processor_enters(mode: Any) -> None:
    def run(**paged: Any) -> torch.Tensor:
        entered = mode()
        try:
            return generate(models.build("llama"), Processor(entered.__enter__), **paged)
        finally:
            entered.__exit__(None, None, None)

    assert_same(run)


def test_the_mode_of_a_default_device_hides_nothing() -> None:
    model = models.build("llama")
    with torch.device("cpu"):
        assert_same(functools.partial(generate, model))
    assert num_recorded(model) > 16


@pytest.mark.parametrize("is_set", [True, False], ids=["before", "within"])
def test_the_default_dtype(is_set: bool) -> None:
    """Of numbers that a forward makes."""
    set_double = functools.partial(torch.set_default_dtype, torch.float64)

    def run(**paged: Any) -> torch.Tensor:
        torch.set_default_dtype(torch.float32)
        model = models.build("llama")
        scale(model, lambda: 0.2 if torch.ones(1).dtype is torch.float64 else 1.0)
        if is_set:
            generate(model, **paged)
            set_double()
        return generate(model, Processor(set_double), **paged)

    try:
        assert_same(run)
    finally:
        torch.set_default_dtype(torch.float32)
