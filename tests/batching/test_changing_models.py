"""Code that changes a model within a call, or between an engine's steps: tokens are those of the
plain call."""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from decimal import Decimal
from types import MappingProxyType, SimpleNamespace
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
from tests.support.engine_helpers import lone_run, prompts, run_all
from tests.support.rooms import records_on_cpu

WIDTH, AT = 17, 12  # tokens of the prompt, and the new token after which the model changes
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 30}
THIS = sys.modules[__name__]

pytestmark = pytest.mark.skipif(
    not cpp.is_available(), reason="no C++ compiler: nothing is recorded"
)

FACTOR = 1.0
FACTORS = {"now": 1.0}
CONTEXT: ContextVar[float] = ContextVar("factor", default=1.0)
HOLDER = SimpleNamespace(factor=1.0)
FORWARD = LlamaMLP.forward


def helper() -> float:
    return FACTORS["now"]


def factor(value: float = 1.0) -> float:
    return value


def set_code(function: Any) -> None:
    factor.__code__ = function.__code__


@dataclass(slots=True)
class Slotted:
    factor: float = 1.0


class Options:
    factor = 1.0


SLOTTED, NAMED, CODE = Slotted(), {"now": 1.0}, factor.__code__


class Scaled(nn.Module):
    """Multiplies what a module returns by a number that it reads somewhere, in each call."""

    def __init__(self, inner: nn.Module, read: Callable[[Any], Any], **attributes: Any) -> None:
        super().__init__()
        self.inner, self.read = inner, read
        for name, value in attributes.items():
            setattr(self, name, value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(self.read(self))


def scale_by(read: Callable[[Any], Any], **attributes: Any) -> Callable[[Any], Scaled]:
    def install(model: Any) -> Scaled:
        layer = model.model.layers[1]
        layer.mlp = Scaled(layer.mlp, read, **attributes).eval()
        return layer.mlp

    return install


def set_factor(value: float = -0.7) -> None:
    THIS.FACTOR = value


def of_layers(act: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def change(model: Any) -> None:
        for layer in model.model.layers:
            act(layer)

    return change


def halve(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: function(*args, **kwargs) * -0.5


def replace_forward(layer: Any) -> None:
    layer.mlp.forward = halve(layer.mlp.forward)


def closure(box: Any) -> Callable[[Any], Any]:
    def install(model: Any) -> Any:
        mlp = model.model.layers[1].mlp
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) * (box["now"] if isinstance(box, dict) else box.factor)
        return box

    return install


class Halved(LlamaMLP):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * -0.5


SIMPLE: dict[str, Callable[[Any], Any]] = {
    "scaling": of_layers(lambda layer: setattr(layer.self_attn, "scaling", 0.02)),
    "epsilon": of_layers(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 9.0)),
    "tensor": of_layers(lambda layer: setattr(layer.self_attn, "scaling", torch.tensor(0.02))),
    "hook": of_layers(
        lambda layer: layer.mlp.register_forward_hook(lambda module, args, out: out * -0.5)
    ),
    "pre-hook": of_layers(
        lambda layer: layer.mlp.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    ),
    "forward": of_layers(replace_forward),
    "module's class": of_layers(lambda layer: setattr(layer.mlp, "__class__", Halved)),
    "class": lambda model: setattr(LlamaMLP, "forward", halve(LlamaMLP.forward)),
    "weight": of_layers(
        lambda layer: setattr(layer.mlp.up_proj.weight, "data", -layer.mlp.up_proj.weight.data)
    ),
}
# how a model is built, and what changes it, given what the first returned
READ: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "global": (scale_by(lambda own: FACTOR), lambda found: set_factor()),
    "helper": (scale_by(lambda own: helper()), lambda found: FACTORS.update(now=-0.7)),
    "global object": (
        scale_by(lambda own: HOLDER.factor),
        lambda found: setattr(HOLDER, "factor", -0.7),
    ),
    "context": (scale_by(lambda own: CONTEXT.get()), lambda found: CONTEXT.set(-0.7)),
    "held context": (
        scale_by(lambda own: own.held.get(), held=CONTEXT),
        lambda found: CONTEXT.set(-0.7),
    ),
    "deque": (
        scale_by(lambda own: own.held[0], held=deque([1.0])),
        lambda found: found.held.appendleft(-0.7),
    ),
    "decimal": (
        scale_by(lambda own: own.held, held=Decimal(1)),
        lambda found: setattr(found, "held", Decimal("-0.7")),
    ),
    "proxy": (
        scale_by(lambda own: own.held["now"], held=MappingProxyType(FACTORS)),
        lambda found: FACTORS.update(now=-0.7),
    ),
    "nested": (
        scale_by(lambda own: own.held["a"][0], held={"a": [1.0]}),
        lambda found: found.held["a"].__setitem__(0, -0.7),
    ),
    "renamed": (
        scale_by(lambda own: own.held.get("now", 2.0), held=NAMED),
        lambda found: found.held.update(later=found.held.pop("now")),
    ),
    "slots": (
        scale_by(lambda own: own.held.factor, held=SLOTTED),
        lambda found: setattr(SLOTTED, "factor", -0.7),
    ),
    "held class": (
        scale_by(lambda own: own.held.factor, held=Options),
        lambda found: setattr(Options, "factor", -0.7),
    ),
    "code": (scale_by(lambda own: own.held(), held=factor), lambda found: set_code(lambda: -0.7)),
    "defaults": (
        scale_by(lambda own: own.held(), held=factor),
        lambda found: setattr(factor, "__defaults__", (-0.7,)),
    ),
    "function's attribute": (
        scale_by(lambda own: getattr(own.held, "scale", 1.0), held=factor),
        lambda found: setattr(factor, "scale", -0.7),
    ),
    "mode": (scale_by(lambda own: -0.7 if own.training else 1.0), lambda found: found.train()),
    "closed dict": (closure({"now": 1.0}), lambda box: box.update(now=-0.7)),
    "closed object": (
        closure(SimpleNamespace(factor=1.0)),
        lambda box: setattr(box, "factor", -0.7),
    ),
}
ADAPTERS: dict[str, Callable[[Any], Any]] = {
    "set_adapter": lambda model: model.set_adapter("second"),
    "adapter's scaling": lambda model: [
        module.scaling.update(first=9.0) for module in model.modules() if hasattr(module, "lora_A")
    ],
    "disable": lambda model: model.base_model.disable_adapter_layers(),
    "merge": lambda model: model.merge_adapter(),
    "unmerged": lambda model: (
        model.merge_adapter(),
        model.unmerge_adapter(),
        model.set_adapter("second"),
    ),
}
CASES = [*SIMPLE, *READ, *ADAPTERS]
UNSEEN = {"context", "held context"}


@pytest.fixture(autouse=True)
def globals_as_before() -> Iterator[None]:
    yield
    LlamaMLP.forward = FORWARD
    restore()


def restore() -> None:
    set_factor(1.0)
    FACTORS.update(now=1.0)
    HOLDER.factor = 1.0
    CONTEXT.set(1.0)
    SLOTTED.factor = Options.factor = NAMED["now"] = 1.0
    NAMED.pop("later", None)
    factor.__code__, factor.__defaults__ = CODE, (1.0,)
    vars(factor).clear()


def build(case: str) -> tuple[Any, Callable[[], None]]:
    """A model, and what changes it."""
    restore()
    model: Any = models.build("llama")
    if case in SIMPLE:
        return model, lambda: SIMPLE[case](model)
    if case in READ:
        install, change = READ[case]
        found = install(model)
        for name, value in {"now": 1.0, "factor": 1.0}.items():
            if isinstance(found, dict) and name in found:
                found[name] = value
            elif hasattr(found, name):
                setattr(found, name, value)
        if case == "deque":
            found.held = deque([1.0])
        if case == "nested":
            found.held = {"a": [1.0]}
        return model, lambda: change(found)
    peft = pytest.importorskip("peft")
    options: dict[str, Any] = dict(
        r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False
    )
    torch.manual_seed(0)
    model = peft.get_peft_model(
        model, peft.LoraConfig(task_type="CAUSAL_LM", **options), adapter_name="first"
    )
    model.add_adapter("second", peft.LoraConfig(task_type="CAUSAL_LM", **options))
    return model.eval(), lambda: ADAPTERS[case](model)


class Once:
    """Acts when it sees `AT` new tokens."""

    def __init__(self, act: Callable[[], Any]) -> None:
        self.act: Callable[[], Any] | None = act

    def see(self, length: int) -> None:
        if length >= WIDTH + AT and self.act is not None:
            act, self.act = self.act, None
            act()


class Processor(Once):
    def __call__(self, ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.see(ids.shape[1])
        return scores


class Criterion(Once):
    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        self.see(ids.shape[1])
        return torch.zeros(len(ids), dtype=torch.bool)


class Streamer(Once):
    def __init__(self, act: Callable[[], Any], in_thread: bool = False) -> None:
        super().__init__(act)
        self.count, self.in_thread = 0, in_thread

    def put(self, value: torch.Tensor) -> None:
        self.count += value.numel()
        if self.in_thread:
            thread = threading.Thread(target=self.see, args=(self.count,))
            thread.start()
            thread.join()
        else:
            self.see(self.count)

    def end(self) -> None:
        pass


WAYS: dict[str, Callable[[Callable[[], Any]], dict[str, Any]]] = {
    "processor": lambda act: {"logits_processor": [Processor(act)]},
    "criterion": lambda act: {"stopping_criteria": [Criterion(act)]},
    "streamer": lambda act: {"streamer": Streamer(act)},
    "thread": lambda act: {"streamer": Streamer(act, in_thread=True)},
}


def prompt(num_rows: int = 1) -> dict[str, torch.Tensor]:
    return models.prompt("llama", num_rows, WIDTH)


def unchanged(case: str) -> torch.Tensor:
    model, _ = build(case)
    return model.generate(**prompt(), **GREEDY)


def generate(case: str, way: str, **options: Any) -> tuple[torch.Tensor, Any]:
    """The tokens, and the model."""
    model, act = build(case)
    try:
        return model.generate(**prompt(), **GREEDY, **WAYS[way](act), **options), model
    finally:
        LlamaMLP.forward = FORWARD


def check(case: str, way: str) -> None:
    before, (expected, _) = unchanged(case), generate(case, way)
    assert case == "merge" or not torch.equal(before, expected), (
        "the change changes nothing: the test is void"
    )
    found, model = generate(case, way, **models.PAGED)
    route = last_route(model)
    assert torch.equal(found, expected), f"plain\n{expected}\npaged\n{found}"
    assert route is not None and route.road == "engine"
    if not records_on_cpu():
        return
    if case in UNSEEN:
        assert not route.num_captured_steps
        told = any("are not recorded" in reason for reason in route.slowed_by)
        assert told or not records_on_cpu()
    elif case not in ("hook", "pre-hook") and records_on_cpu():
        assert route.num_captured_steps > 16, "it is recorded once more"


@pytest.mark.slow_cases(
    but=[
        "closed dict",
        "code",
        "context",
        "defaults",
        "deque",
        "function's attribute",
        "global",
        "held class",
        "hook",
        "merge",
        "module's class",
        "renamed",
        "scaling",
        "set_adapter",
        "slots",
    ]
)
@pytest.mark.parametrize("case", CASES)
def test_a_processor_that_changes_the_model(case: str) -> None:
    check(case, "processor")


@pytest.mark.slow_cases("hook-criterion", "hook-thread")
@pytest.mark.parametrize("way", [way for way in WAYS if way != "processor"])
@pytest.mark.parametrize("case", ["scaling", "hook"])
def test_other_code_that_changes_the_model(case: str, way: str) -> None:
    check(case, way)


@pytest.mark.slow_cases(
    but=[
        "code",
        "decimal",
        "defaults",
        "forward",
        "function's attribute",
        "held class",
        "module's class",
        "renamed",
        "scaling",
        "slots",
    ]
)
@pytest.mark.parametrize("case", CASES)
def test_changes_between_steps_of_an_engine(case: str) -> None:
    """A request that runs, and one that is added after the change."""
    text, later = prompts(WIDTH, 9)
    model, act = build(case)
    expected = (
        lone_run(model, text, GREEDY, logits_processor=[Processor(act)]),
        lone_run(model, later, GREEDY),
    )
    LlamaMLP.forward = FORWARD
    model, act = build(case)
    with PagedEngine(model, PagedConfig(block_size=8)) as engine:
        engine.add_request(text, GREEDY, request_id="first")
        for _ in range(AT + 1):  # one token a step; a processor sees them one forward later
            engine.step()
        act()
        engine.add_request(later, GREEDY, request_id="later")
        results = run_all(engine)
    assert ([results["first"].token_ids], [results["later"].token_ids]) == expected


def multiply_scaling(model: Any, factor: float) -> None:
    for layer in model.model.layers:
        layer.self_attn.scaling *= factor


@torch.no_grad()
def multiply_weights(model: Any, factor: float) -> None:
    for layer in model.model.layers:
        layer.self_attn.v_proj.weight.mul_(factor)


def multiply_data(model: Any, factor: float) -> None:
    for layer in model.model.layers:
        layer.mlp.up_proj.weight.data.mul_(factor)


UNDONE = {"scaling": multiply_scaling, "weights": multiply_weights, "data": multiply_data}


@pytest.mark.parametrize(
    "options", [models.PAGED, models.UNRECORDED], ids=["recorded", "unrecorded"]
)
@pytest.mark.parametrize("case", UNDONE)
def test_a_change_that_is_undone_leaves_nothing_in_the_prefix_cache(
    case: str, options: dict[str, Any]
) -> None:
    """Blocks computed in between are not served."""
    model, inputs, last = models.build("llama"), prompt(num_rows=3), GREEDY["max_new_tokens"]
    for first, then in ((1, AT), (1, last), (AT, last)):
        factors = dict.fromkeys(range(1, last + 1), 1.0) | {first: 4.0, then: 0.25}
        left = iter(factors.values())

        def process(
            ids: torch.Tensor, scores: torch.Tensor, left: Iterator[float] = left
        ) -> torch.Tensor:
            if (factor := next(left)) != 1:
                UNDONE[case](model, factor)
            return scores

        found = model.generate(**inputs, **GREEDY, **options, logits_processor=[process])
        longer = {"input_ids": found, "attention_mask": torch.ones_like(found)}
        expected = model.generate(**longer, **GREEDY)
        assert torch.equal(model.generate(**longer, **GREEDY, **options), expected)


@pytest.mark.parametrize("capture", [True, False], ids=["recorded", "unrecorded"])
@pytest.mark.parametrize("case", UNDONE)
def test_a_change_between_an_engines_steps_that_is_undone(case: str, capture: bool) -> None:
    (text,) = prompts(WIDTH)
    model = models.build("llama")
    with PagedEngine(model, PagedConfig(block_size=8, capture=capture)) as engine:
        for first in (1, AT):
            engine.add_request(text, GREEDY)
            new = []
            while engine.has_unfinished:
                new += [output.new_tokens[0] for output in engine.step()]
                if len(new) in (first, first + 8):
                    UNDONE[case](model, 4 if len(new) == first else 0.25)
            longer = [*text, *new]
            assert [engine.generate([longer], GREEDY)[0].token_ids] == lone_run(
                model, longer, GREEDY
            )


@pytest.mark.parametrize("preemption", ["recompute", "auto"])
@pytest.mark.parametrize("case", UNDONE)
def test_preempted_rows_keep_what_the_model_computed_before_it_changed(
    case: str, preemption: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(CostModel, "choose", lambda *given: "recompute")
    found = []
    config = {"block_size": 8, "num_blocks": 20, "preemption": preemption}
    for options in ({}, {"cache_implementation": "paged", "cache_config": config}):
        model = models.build("llama")
        processor = Processor(lambda model=model: UNDONE[case](model, -0.6))
        found.append(model.generate(**prompt(4), **GREEDY, **options, logits_processor=[processor]))
    assert torch.equal(*found)


def test_a_model_that_changes_in_each_step_is_not_recorded_each_time() -> None:
    def run(**options: Any) -> torch.Tensor:
        model: Any = models.build("llama")

        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            for layer in model.model.layers:
                layer.self_attn.scaling *= 0.95
            return scores

        found = model.generate(**prompt(), **GREEDY, **options, logits_processor=[process])
        assert not options or last_route(model).num_captured_steps == 0  # type: ignore[union-attr]
        return found

    assert torch.equal(run(), run(**models.PAGED))


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
    plain = model.generate(**prompt(), **GREEDY)
    with mode():
        expected = model.generate(**prompt(), **GREEDY)
    assert not torch.equal(plain, expected), "the mode changes nothing: the test is void"
    for _ in range(2):
        with mode():
            assert torch.equal(model.generate(**prompt(), **GREEDY, **models.PAGED), expected)
            route = last_route(model)
            assert route is not None and not route.num_captured_steps
            named = any(f"`{mode.__name__}`" in reason for reason in route.slowed_by)
            assert named or not records_on_cpu()
        assert torch.equal(model.generate(**prompt(), **GREEDY, **models.PAGED), plain)
        assert not records_on_cpu() or last_route(model).num_captured_steps > 16  # type: ignore[union-attr]


@pytest.mark.parametrize("mode", [Functions, Dispatches])
def test_a_mode_that_a_processor_enters(mode: Any) -> None:
    found = []
    for options in ({}, models.PAGED):
        model, entered = models.build("llama"), mode()
        try:
            processor = Processor(entered.__enter__)
            found.append(
                model.generate(**prompt(), **GREEDY, **options, logits_processor=[processor])
            )
        finally:
            entered.__exit__(None, None, None)
    assert torch.equal(*found)


def test_the_mode_of_a_default_device_hides_nothing() -> None:
    model = models.build("llama")
    expected = model.generate(**prompt(), **GREEDY)
    with torch.device("cpu"):
        assert torch.equal(model.generate(**prompt(), **GREEDY, **models.PAGED), expected)
    assert not records_on_cpu() or last_route(model).num_captured_steps > 16  # type: ignore[union-attr]


@pytest.mark.parametrize("is_set", [True, False], ids=["before", "within"])
def test_the_default_dtype(is_set: bool) -> None:
    """Of numbers that a forward makes."""

    class Ones(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * (0.2 if torch.ones(1).dtype is torch.float64 else 1.0)

    found = []
    try:
        for options in ({}, models.PAGED):
            torch.set_default_dtype(torch.float32)
            model: Any = models.build("llama")
            model.model.layers[1].mlp = Ones(model.model.layers[1].mlp)
            if is_set:
                model.generate(**prompt(), **GREEDY, **options)
                torch.set_default_dtype(torch.float64)
            processor = Processor(lambda: torch.set_default_dtype(torch.float64))
            found.append(
                model.generate(**prompt(), **GREEDY, **options, logits_processor=[processor])
            )
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(*found)


@pytest.mark.slow
def test_an_assistant_that_changes() -> None:
    found = []
    for options in ({}, models.PAGED):
        model, assistant = models.build("llama"), models.build("llama", seed=3)
        processor = Processor(lambda assistant=assistant: SIMPLE["scaling"](assistant))
        arguments = {
            **prompt(),
            **GREEDY,
            "assistant_model": assistant,
            "logits_processor": [processor],
        }
        found.append(model.generate(**arguments, **options))
    assert torch.equal(*found)
