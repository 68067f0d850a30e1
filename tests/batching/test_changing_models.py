"""Code that changes a model within a call, or between an engine's steps: tokens are those of the
plain call."""

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

FACTOR = 1.0
FACTORS = {"now": 1.0}
CONTEXT = ContextVar("factor", default=1.0)
FORWARD = LlamaMLP.forward


def helper() -> float:
    return FACTORS["now"]


def set_factor(value: float) -> None:
    global FACTOR
    FACTOR = value


def restore() -> None:
    set_factor(1.0)
    FACTORS["now"] = 1.0
    CONTEXT.set(1.0)
    LlamaMLP.forward = FORWARD


def make_function() -> Any:
    def factor(value: float = 1.0) -> float:
        return value

    return factor


def make_class() -> Any:
    return type("Options", (), {"factor": 1.0})


class Scaled(nn.Module):
    """Multiplies what a module returns by a number that it reads somewhere, in each call."""

    def __init__(self, inner: nn.Module, read: Callable[[Any], Any], held: Any) -> None:
        super().__init__()
        self.inner, self.read, self.held = inner, read, held

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * float(self.read(self))


Install = Callable[[Any], Callable[[], Any]]  # changes a model, and returns what changes it again


def reads(
    read: Callable[[Any], Any], change: Callable[[Any], Any], make: Callable[[], Any] = dict
) -> Install:
    def install(model: Any) -> Callable[[], Any]:
        layer = model.model.layers[1]
        layer.mlp = Scaled(layer.mlp, read, make()).eval()
        return functools.partial(change, layer.mlp)

    return install


def closes(
    read: Callable[[Any], Any], change: Callable[[Any], Any], make: Callable[[], Any]
) -> Install:
    def install(model: Any) -> Callable[[], Any]:
        mlp, box = model.model.layers[1].mlp, make()
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) * read(box)
        return functools.partial(change, box)

    return install


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
    "epsilon": of_layers(lambda layer: setattr(layer.input_layernorm, "variance_epsilon", 9.0)),
    "tensor": of_layers(lambda layer: setattr(layer.self_attn, "scaling", torch.tensor(0.02))),
    "hook": of_layers(lambda layer: layer.mlp.register_forward_hook(lambda *args: args[-1] * -0.5)),
    "pre-hook": of_layers(
        lambda layer: layer.mlp.register_forward_pre_hook(lambda module, args: (args[0] * 3,))
    ),
    "forward": of_layers(lambda layer: setattr(layer.mlp, "forward", halve(layer.mlp.forward))),
    "module's class": of_layers(lambda layer: setattr(layer.mlp, "__class__", Halved)),
    "class": lambda model: setattr(LlamaMLP, "forward", halve(LlamaMLP.forward)),
    "weight": of_layers(
        lambda layer: setattr(layer.mlp.up_proj.weight, "data", -layer.mlp.up_proj.weight.data)
    ),
    "parameter": of_layers(
        lambda layer: setattr(layer.mlp.up_proj, "weight", nn.Parameter(-layer.mlp.up_proj.weight))
    ),
    "module": of_layers(lambda layer: setattr(layer.mlp, "act_fn", nn.Tanh())),
}
READ = {
    "global": reads(lambda own: FACTOR, lambda own: set_factor(NEW)),
    "helper": reads(lambda own: helper(), lambda own: FACTORS.update(now=NEW)),
    "context": reads(lambda own: CONTEXT.get(), lambda own: CONTEXT.set(NEW)),
    "held context": reads(
        lambda own: own.held.get(), lambda own: CONTEXT.set(NEW), lambda: CONTEXT
    ),
    "held class": reads(
        lambda own: own.held.factor, lambda own: setattr(own.held, "factor", NEW), make_class
    ),
    "code": reads(
        lambda own: own.held(),
        lambda own: setattr(own.held, "__code__", (lambda: -0.7).__code__),
        make_function,
    ),
    "defaults": reads(
        lambda own: own.held(), lambda own: setattr(own.held, "__defaults__", (NEW,)), make_function
    ),
    "function's attribute": reads(
        lambda own: getattr(own.held, "scale", 1.0),
        lambda own: setattr(own.held, "scale", NEW),
        make_function,
    ),
    "mode": reads(lambda own: NEW if own.training else 1.0, lambda own: own.train()),
    "closed dict": closes(lambda box: box["now"], lambda box: box.update(now=NEW), FACTORS.copy),
}


def unmerge(model: Any) -> None:
    model.merge_adapter()
    model.unmerge_adapter()
    model.set_adapter("second")


ADAPTERS = {
    "set_adapter": lambda model: model.set_adapter("second"),
    "adapter's scaling": lambda model: [
        module.scaling.update(first=9.0) for module in model.modules() if hasattr(module, "lora_A")
    ],
    "disable": lambda model: model.base_model.disable_adapter_layers(),
    "merge": lambda model: model.merge_adapter(),
    "unmerged": unmerge,
}
CASES = [*SIMPLE, *READ, *ADAPTERS]
UNSEEN = {"context", "held context"}


@pytest.fixture(autouse=True)
def globals_as_before() -> Iterator[None]:
    yield
    restore()


def build(case: str) -> tuple[Any, Callable[[], Any]]:
    """A model, and what changes it."""
    restore()
    model = models.build("llama")
    if case in SIMPLE:
        return model, functools.partial(SIMPLE[case], model)
    if case in READ:
        return model, READ[case](model)
    peft = pytest.importorskip("peft")
    options = dict(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    config = peft.LoraConfig(task_type="CAUSAL_LM", **options)
    torch.manual_seed(0)
    model = peft.get_peft_model(model, config, adapter_name="first")
    model.add_adapter("second", config)
    return model.eval(), functools.partial(ADAPTERS[case], model)


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
    count = 0

    def put(self, value: torch.Tensor) -> None:
        self.count += value.numel()
        self.see(self.count)

    def end(self) -> None:
        pass


WAYS = {
    "processor": lambda act: {"logits_processor": [Processor(act)]},
    "criterion": lambda act: {"stopping_criteria": [Criterion(act)]},
    "streamer": lambda act: {"streamer": Streamer(act)},
    "thread": lambda act: {"streamer": Streamer(lambda: in_threads(act))},
}


def prompt(num_rows: int = 1) -> dict[str, torch.Tensor]:
    return models.prompt("llama", num_rows, WIDTH)


def generate(model: Any, *processors: Any, num_rows: int = 1, **options: Any) -> torch.Tensor:
    own = {"logits_processor": list(processors)} if processors else {}
    return model.generate(**prompt(num_rows), **GREEDY, **own, **options)


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


@pytest.mark.slow_cases(
    but=[
        "closed dict-processor",
        "code-processor",
        "context-processor",
        "defaults-processor",
        "function's attribute-processor",
        "global-processor",
        "held class-processor",
        "merge-processor",
        "module's class-processor",
        "scaling-*",
        "set_adapter-processor",
    ]
)
@pytest.mark.parametrize(
    ("case", "way"),
    [
        *itertools.product(CASES, ["processor"]),
        *itertools.product(["scaling", "hook"], ["criterion", "streamer", "thread"]),
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
    if case in UNSEEN and records_on_cpu():
        assert not route.num_captured_steps
        assert any("are not recorded" in reason for reason in route.slowed_by)
    elif case not in ("hook", "pre-hook"):
        assert num_recorded(made[1]) > 16, "it is recorded once more"


@pytest.mark.slow_cases(
    but=[
        "code",
        "defaults",
        "forward",
        "function's attribute",
        "held class",
        "module's class",
        "scaling",
    ]
)
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


UNDONE = pytest.mark.parametrize("case", ["scaling", "weights", "data"])


@pytest.mark.slow_cases("scaling-unrecorded", "data-unrecorded")
@pytest.mark.parametrize(
    "options", [models.PAGED, models.UNRECORDED], ids=["recorded", "unrecorded"]
)
@UNDONE
def test_a_change_that_is_undone_leaves_nothing_in_the_prefix_cache(
    case: str, options: dict[str, Any]
) -> None:
    """Blocks computed in between are not served."""
    model, last = models.build("llama"), GREEDY["max_new_tokens"]
    for first, then in ((1, AT), (1, last), (AT, last)):
        numbers = itertools.count(1)

        def process(
            ids: torch.Tensor,
            scores: torch.Tensor,
            factors: dict[int, float] = {first: 4.0, then: 0.25},  # noqa: B006
            numbers: Iterator[int] = numbers,
        ) -> torch.Tensor:
            multiply(case, model, factors.get(next(numbers), 1.0))
            return scores

        found = generate(model, process, num_rows=3, **options)
        longer = {"input_ids": found, "attention_mask": torch.ones_like(found)}
        assert_same(functools.partial(model.generate, **longer, **GREEDY), options)


@UNDONE
def test_a_change_beside_a_call_of_the_same_processor_is_seen(case: str) -> None:
    model, numbers = models.build("llama"), itertools.count(1)

    def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        number = next(numbers)
        if number == 1:
            model.generate(ids[:1, :4], max_new_tokens=2, do_sample=False, **models.PAGED)
            multiply(case, model, 4.0)
        elif number == GREEDY["max_new_tokens"]:
            multiply(case, model, 0.25)
        return scores

    found = generate(model, process, num_rows=3, **models.PAGED)
    longer = {"input_ids": found, "attention_mask": torch.ones_like(found)}
    assert_same(functools.partial(model.generate, **longer, **GREEDY))


@pytest.mark.parametrize("preemption", ["recompute", "auto"])
@UNDONE
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

        def process(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            multiply("scaling", model, 0.95)
            return scores

        found = generate(model, process, **paged)
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
        model, _ = build("scaling")
        reads(lambda own: 0.2 if torch.ones(1).dtype is torch.float64 else 1.0, print)(model)
        if is_set:
            generate(model, **paged)
            set_double()
        return generate(model, Processor(set_double), **paged)

    try:
        assert_same(run)
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.slow
def test_an_assistant_that_changes() -> None:
    def run(**paged: Any) -> torch.Tensor:
        assistant = models.build("llama", seed=3)
        processor = Processor(lambda: SIMPLE["scaling"](assistant))
        return generate(models.build("llama"), processor, assistant_model=assistant, **paged)

    assert_same(run)
