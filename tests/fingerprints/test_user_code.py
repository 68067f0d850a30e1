"""Values that user code reads outside of its modules' own attributes: in other Python modules,
classes, closures, and private attributes."""

from __future__ import annotations

import functools
import importlib
import math
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from hf_paged import last_route
from hf_paged.fingerprints import reading
from hf_paged.fingerprints.state import StateReading
from hf_paged.model.state import fingerprint
from tests.fingerprints.test_fingerprint import Small, read, watched
from tests.support import models
from tests.support.rooms import records_on_cpu

# enough tokens to be kept, and enough steps to be recorded
PROMPT = models.token_ids(1, 100)
GREEDY: dict[str, Any] = {"do_sample": False, "max_new_tokens": 40}
NEW = -0.5  # the factor after a change; before, it is 1

Install = Callable[[Any], Callable[[], Any]]  # changes a model, and returns what changes it again

SETTINGS = """
import time

ALPHA = 1.0


class Options:
    def __init__(self):
        self.alpha = 1.0

    def __call__(self):
        return self.alpha


options = Options()


def alpha():
    return ALPHA


def now():
    return time.time()
"""
MODEL = """
import user_names
import user_settings
from torch import nn
from user_settings import alpha, options


class Scaled(nn.Module):
    time = 1.0

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x) * self.factor()
"""
# what a module's method returns, by the name of its class
FACTORS = {
    "OfValue": "user_settings.ALPHA",
    "OfFunction": "alpha()",
    "OfObject": "options()",
    "OfNestedModule": "user_names.settings.ALPHA",
    "OfRenamedModule": "(settings := user_settings).ALPHA",
    "Timed": "self.time * user_settings.ALPHA",
}
CLASSES = [
    f"class {name}(Scaled):\n    def factor(self):\n        return {value}\n"
    for name, value in FACTORS.items()
]


@pytest.fixture(autouse=True)
def scripts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Files of a user beside one another, which are in no package."""
    names = "import user_settings as settings\n"
    model = "\n\n".join([MODEL, *CLASSES])
    files = {"user_settings": SETTINGS, "user_names": names, "user_model": model}
    for name, source in files.items():
        (tmp_path / f"{name}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    yield
    for name in files:
        sys.modules.pop(name, None)


class Options:
    """As a user's own config may be."""

    def __init__(self) -> None:
        self.alpha = self._alpha = 1.0

    def to_dict(self) -> dict[str, float]:
        return {"alpha": self.alpha}


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("alpha", torch.ones(()))


class Scaled(nn.Module):
    """Multiplies what a module returns by a factor."""

    factor: Any

    def __init__(self, inner: nn.Module, options: Any = None) -> None:
        super().__init__()
        self.inner, self.options = inner, options

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) * self.factor()


def put(model: Any, make: Callable[[nn.Module], nn.Module]) -> None:
    for layer in model.model.layers:
        layer.mlp = make(layer.mlp).eval()


def set_alpha(owner: Any) -> None:
    owner.alpha = NEW


def of_script(name: str, change: Callable[[Any], Any]) -> Install:
    def install(model: Any) -> Callable[[], Any]:
        put(model, getattr(importlib.import_module("user_model"), name))
        return functools.partial(change, sys.modules["user_settings"])

    return install


def set_script(settings: Any) -> None:
    settings.ALPHA = NEW


def of_class(body: Callable[[], dict[str, Any]], change: Callable[[Any], Any]) -> Install:
    def install(model: Any) -> Callable[[], Any]:
        kind = type("Kind", (Scaled,), body())
        put(model, kind)
        return functools.partial(change, kind)

    return install


def closes(
    make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], Any]
) -> Install:
    def replace(mlp: Any, box: Any) -> None:
        forward = mlp.forward
        mlp.forward = lambda x: forward(x) * read(box)

    def install(model: Any) -> Callable[[], Any]:
        box = make()
        for layer in model.model.layers:
            replace(layer.mlp, box)
        return functools.partial(change, box)

    return install


def holds(
    make: Callable[[], Any], read: Callable[[Any], Any], change: Callable[[Any], Any]
) -> Install:
    """Each module has what is made as an attribute; none made is the model's config."""

    def install(model: Any) -> Callable[[], Any]:
        held = make() or model.config
        kind = type("Kind", (Scaled,), {"factor": lambda self: read(self.options)})
        put(model, functools.partial(kind, options=held))
        return functools.partial(change, held)

    return install


def scaled_by(options: dict[str, float]) -> Callable[..., Any]:
    def decorate(forward: Callable[..., Any]) -> Callable[..., Any]:
        def scaled(self: Any, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x) * options["alpha"]

        return scaled

    return decorate


def decorated(model: Any) -> Callable[[], Any]:
    options = {"alpha": 1.0}
    body = {"forward": scaled_by(options)(Scaled.forward), "factor": lambda self: 1.0}
    put(model, type("Kind", (Scaled,), body))
    return lambda: options.update(alpha=NEW)


def make_function() -> Any:
    def factor(value: float = 1.0) -> float:
        return value

    return factor


def times(own: Any, factor: float) -> float:
    return factor


CASES: dict[str, Install] = {
    "value of a module": of_script("OfValue", set_script),
    "function of a module": of_script("OfFunction", set_script),
    "value of a nested module": of_script("OfNestedModule", set_script),
    "value of a renamed module": of_script("OfRenamedModule", set_script),
    "object of a module": of_script("OfObject", lambda own: set_alpha(own.options)),
    "object of a class": of_class(
        lambda: {"held": Options(), "factor": lambda self: self.held.alpha},
        lambda kind: set_alpha(kind.held),
    ),
    "torch module of a class": of_class(
        lambda: {"held": Buffers(), "factor": lambda self: self.held.alpha},
        lambda kind: kind.held.alpha.fill_(NEW),
    ),
    "partial of a class": of_class(
        lambda: {"factor": staticmethod(functools.partial(float, 1.0))},
        lambda kind: setattr(kind, "factor", staticmethod(functools.partial(float, NEW))),
    ),
    "partialmethod of a class": of_class(
        lambda: {"factor": functools.partialmethod(times, 1.0)},
        lambda kind: setattr(kind, "factor", functools.partialmethod(times, NEW)),
    ),
    "builtin of a class": of_class(
        lambda: {"held": math.cos, "factor": lambda self: self.held(0.0)},
        lambda kind: setattr(kind, "held", math.sin),
    ),
    "closed dict": closes(
        lambda: {"alpha": 1.0}, lambda box: box["alpha"], lambda box: box.update(alpha=NEW)
    ),
    "closed nested dict": closes(
        lambda: {"mlp": {"alpha": 1.0}},
        lambda box: box["mlp"]["alpha"],
        lambda box: box["mlp"].update(alpha=NEW),
    ),
    "closed object": closes(Options, lambda box: box.alpha, set_alpha),
    "code": holds(
        make_function,
        lambda held: held(),
        lambda held: setattr(held, "__code__", (lambda: -0.5).__code__),
    ),
    "defaults": holds(
        make_function, lambda held: held(), lambda held: setattr(held, "__defaults__", (NEW,))
    ),
    "attribute of a function": holds(
        make_function, lambda held: getattr(held, "alpha", 1.0), set_alpha
    ),
    "attribute of a class": holds(
        lambda: type("Kind", (), {"alpha": 1.0}), lambda held: held.alpha, set_alpha
    ),
    "private attribute": holds(
        Options, lambda held: held._alpha, lambda held: setattr(held, "_alpha", NEW)
    ),
    "private attribute of the config": holds(
        lambda: None,
        lambda held: getattr(held, "_alpha", 1.0),
        lambda held: setattr(held, "_alpha", NEW),
    ),
    "decorated method": decorated,
}


@pytest.mark.parametrize("case", CASES)
def test_a_change_is_detected(case: str) -> None:
    model = models.build("llama")
    change = CASES[case](model)
    before, state = read(model), watched(model)
    assert read(model) == before and watched(model).is_like(state)
    change()
    assert not state.is_same()
    assert read(model) != before and not watched(model).is_like(state)


@pytest.mark.parametrize(
    "case", ["value of a module", "object of a class", "closed dict", "private attribute", "code"]
)
def test_calls_before_and_after_a_change_generate_the_tokens_of_plain_calls(case: str) -> None:
    model = models.build("llama")
    change = CASES[case](model)
    tokens = []
    for act in (lambda: None, change):
        act()
        tokens.append(model.generate(PROMPT, **GREEDY))
        found = model.generate(PROMPT, **GREEDY, **models.PAGED)
        assert torch.equal(found, tokens[-1])
        route = last_route(model)
        assert route is not None and route.road == "engine"
        assert route.num_captured_steps or not records_on_cpu()
    assert not torch.equal(*tokens), "the change does nothing: the test is void"


# -------------------------------------------------------------------------- what does not count


def test_what_a_function_on_a_class_of_a_library_collects_does_not_count(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, shapes, forward = models.build("llama"), [], LlamaMLP.forward

    def noting(self: Any, x: torch.Tensor) -> torch.Tensor:
        shapes.append(x.shape)
        return forward(self, x)

    monkeypatch.setattr(LlamaMLP, "forward", noting)
    before = read(model)
    model(PROMPT)
    assert shapes and read(model) == before


installed: Any = None  # a Python module


@pytest.mark.parametrize("folder", ["site-packages", "scripts"])
def test_functions_of_installed_packages_are_not_followed(
    folder: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / folder
    path.mkdir()
    (path / "user_clock.py").write_text(SETTINGS)  # its `now` reads the clock
    monkeypatch.syspath_prepend(path)
    try:
        monkeypatch.setitem(globals(), "installed", importlib.import_module("user_clock"))
        model = Small()
        model.activation.forward = lambda x: x * installed.now()
        assert (StateReading(model).undetectable is None) == (folder == "site-packages")
    finally:
        sys.modules.pop("user_clock", None)


def holds_itself() -> Any:
    def countdown(count: int) -> int:
        return countdown(count - 1) if count else 0

    return countdown


def test_what_can_be_read() -> None:
    """A function that holds itself; `self.time`, which is not the module `time` of the script that
    the code reads."""
    model: Any = models.build("llama")
    put(model, importlib.import_module("user_model").Timed)
    model.held = holds_itself()
    assert StateReading(model).undetectable is None


# ------------------------------------------------------------------------------ what is not read


def test_more_objects_than_are_read_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "_MAX_PLAIN_OBJECTS", 3)
    model: Any = nn.Module()
    model.held = [Options() for _ in range(3)]
    before = read(model)
    model.held[-1].alpha = NEW
    assert read(model) != before
    model.held.append(Options())
    assert fingerprint(model) is None
    assert StateReading(model).undetectable == "it holds more than 3 objects of user classes"


def steps(count: int) -> list[dict[str, float]]:
    return [{"reward": 1.0} for _ in range(count)]


@pytest.mark.parametrize(
    "replay",
    [
        steps(reading._MAX_ITEMS + 1),
        [torch.zeros(1)] * (reading._MAX_ITEMS + 1),
        [steps(reading._MAX_ITEMS) for _ in range(11)],
    ],
    ids=["dicts", "tensors", "nested lists"],
)
def test_closures_that_hold_more_values_than_are_read_are_named(replay: Any) -> None:
    agent = Options()
    agent.replay = replay
    for held in (agent, {"alpha": 1.0, "replay": replay}):
        model = models.build("llama")
        closes(lambda held=held: held, lambda box: 1.0, lambda box: None)(model)
        assert fingerprint(model) is None
        told = "closures of its code hold more than 1,000 values"
        assert StateReading(model).undetectable == told


def test_a_container_in_several_closures_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, rows, seen = models.build("llama"), steps(3), list[Any]()
    closes(lambda: rows, lambda box: 1.0, lambda box: None)(model)
    read_value = reading.Reading._value

    def noting(own: Any, value: Any, depth: int = 0) -> Any:
        seen.append(value)
        return read_value(own, value, depth)

    monkeypatch.setattr(reading.Reading, "_value", noting)
    before = read(model)
    assert sum(value is rows[0] for value in seen) == 1
    rows[-1]["reward"] = 2.0
    assert read(model) != before


def in_lists(count: int, value: Any = (1.0,)) -> Any:
    for _ in range(count):
        value = [value]
    return value


def in_functions(count: int) -> Callable[[], Any]:
    def wrapped(function: Callable[[], Any]) -> Callable[[], Any]:
        return lambda: function()

    function: Callable[[], Any] = Options
    for _ in range(count):
        function = wrapped(function)
    return function


def test_values_that_are_nested_too_deep_are_named() -> None:
    for make in (in_lists, in_functions):
        model: Any = nn.Module()
        model.held = make(reading._MAX_DEPTH)
        assert StateReading(model).undetectable is None
        model.held = make(reading._MAX_DEPTH + 1)
        assert fingerprint(model) is None
        told = "it holds values nested more than 8 levels deep"
        assert StateReading(model).undetectable == told
    inner = [Options()]  # also held elsewhere
    model.held, model.inner = in_lists(reading._MAX_DEPTH, inner), inner
    before = read(model)
    inner[0].alpha = NEW
    assert read(model) != before
