"""What forwards write into their model: checks take it back, and the prefix cache looks past what
none reads."""

from __future__ import annotations

import copy
import logging
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import hf_paged
from hf_paged.batching.factory import choose_layout
from hf_paged.model import writes
from hf_paged.model.state import fingerprint
from hf_paged.model.writes import Snapshot
from hf_paged.rooms import is_installed
from tests.support import models
from tests.support.checks import assert_paged_is_plain
from tests.support.rooms import needs_fingerprints

OPTIONS: dict[str, Any] = {"max_new_tokens": 8, "do_sample": False}
IDS = models.token_ids(1, 9)
INPUTS = {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}


class Wrapped(nn.Module):
    """A layer of the model that does something in each forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden)


class Record:
    def __init__(self) -> None:
        self.count, self.seen = 0, list[int]()

    def __repr__(self) -> str:
        return f"{self.count} {self.seen}"


class Counting(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("last", torch.zeros(1))
        self.plain, self.number, self.kind = torch.zeros(2), 0, "none"
        self.log, self.recent = list[int](), deque[int](maxlen=3)
        self.by_name = {"count": 0, "tensor": torch.zeros(1)}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.count += 1
        self.last = torch.full((1,), hidden.numel())
        self.plain.add_(2)
        self.number += 1
        self.kind = f"forward {self.number}"
        self.log.append(self.number)
        self.recent.append(self.number)
        self.by_name["count"] += 1
        self.by_name["tensor"] += 1
        return self.inner(hidden)


class Retyping(Wrapped):
    """Stores values whose comparison is no truth value, and scalars in their place."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.plain: Any = torch.zeros(3)
        self.number: Any = np.zeros(2)
        self.log: list[Any] = [torch.zeros(3)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.plain, self.number, self.log = 0.5, None, [np.ones(2)]
        return self.inner(hidden)


class Nesting(Wrapped):
    """Counts in containers within containers, and in an object, and reads what it counted."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.nested: dict[str, Any] = {"counts": {"all": 0}, "pair": ([], torch.zeros(1))}
        self.record = Record()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.nested["counts"]["all"] += 1
        self.nested["pair"][0].append(hidden.numel())
        self.nested["pair"][1].add_(1)
        self.record.count += 1
        self.record.seen.append(hidden.numel())
        return self.inner(hidden) * (1 - 0.01 * self.record.count)


class Normed(Wrapped):
    """Batch normalization that keeps its statistics and does not use them."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.norm = nn.BatchNorm1d(1)
        self.train()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inner(hidden) + 0 * self.norm(hidden.detach().view(-1, 1)).view_as(hidden)


class Drawing(Wrapped):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.generators = {"noise": torch.Generator().manual_seed(3)}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(hidden.shape[-1], generator=self.generators["noise"])
        return self.inner(hidden + 0.01 * noise)


class Running(Wrapped):
    """Adds a running number that is far too small to matter to the checks."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.register_buffer("count", torch.zeros(1))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return self.inner(hidden) * (1 + 1e-6 * self.count)


class Calls(Wrapped):
    """Counts its calls; few of them depend on the count, and none of the checks'."""

    calls = 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.inner(hidden) * (1 + (self.calls % 50 == 0))


class Nested(Calls):
    """Counts its calls deep inside an attribute."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.table = {"counts": [0]}

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.table["counts"][0] += 1
        return self.inner(hidden) * (1 + (self.table["counts"][0] % 50 == 0))


class Shared(Calls):
    """Counts the calls of all instances, which no snapshot of a model can undo."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        Shared.calls += 1
        return self.inner(hidden)


class Last(Wrapped):
    """Replaces a tensor, of which few values change the next call."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.last = torch.zeros(1, dtype=torch.int64)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        last, self.last = self.last, hidden[:1, -1].argmax(-1)
        return self.inner(hidden) * (1 + (last == 27))


class Lazy(Wrapped):
    """Makes a table in the first forward."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__(inner)
        self.table: torch.Tensor | None = None

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.table is None:
            self.table = torch.linspace(0.9, 1.1, hidden.shape[-1])
        return self.inner(hidden * self.table)


def with_layer(make: Callable[[nn.Module], Wrapped]) -> tuple[Any, Any]:
    """A model, and the module that it has in place of a layer's MLP."""
    model = models.build("llama")
    layer = model.model.layers[0]
    layer.mlp = make(layer.mlp)
    return model, layer.mlp


def state(module: nn.Module) -> dict[str, Any]:
    """Everything that a forward of these modules changes, as it is now."""
    buffers = module.named_buffers()
    found: dict[str, Any] = {name: x.double().round(decimals=5).tolist() for name, x in buffers}
    found |= {f"{name}.training": part.training for name, part in module.named_modules()}
    names = ("plain", "number", "kind", "log", "recent", "by_name", "nested", "record", "begun")
    for name in names:
        if hasattr(module, name):
            found[name] = repr(getattr(module, name))
    found["random"] = [x.get_state().tolist() for x in getattr(module, "generators", {}).values()]
    found["global"] = torch.get_rng_state().tolist()
    return found


@pytest.mark.parametrize("make", [Counting, Retyping, Nesting, Normed, Drawing])
def test_a_call_leaves_the_model_as_the_plain_call_does(
    make: Callable[[nn.Module], Wrapped],
) -> None:
    model, module = with_layer(make)
    plain = copy.deepcopy(model)
    its = plain.model.layers[0].mlp
    if make is Drawing:
        its.generators["noise"].set_state(module.generators["noise"].get_state())
    for _ in range(2):
        torch.manual_seed(0)
        expected = plain.generate(**INPUTS, **OPTIONS)
        before = state(its)
        torch.manual_seed(0)
        found = model.generate(**INPUTS, **OPTIONS, **models.PAGED)
        assert torch.equal(found, expected) and state(module) == before
    route = hf_paged.last_route(model)
    assert route is not None
    assert route.road == ("hf_loop" if make in (Drawing, Nesting) else "engine")


class Closed(list[int]):
    def __iter__(self) -> Any:
        raise RuntimeError("not to be iterated")


@pytest.mark.parametrize("make", [Wrapped, Counting])
def test_containers_that_cannot_be_iterated(make: Callable[[nn.Module], Wrapped]) -> None:
    model, module = with_layer(make)
    module.held = Closed([1])
    assert_paged_is_plain(model, INPUTS, OPTIONS)


@pytest.mark.slow
@pytest.mark.parametrize("make", [Normed, Calls, Nested, Last])
def test_the_recording_of_a_step_leaves_the_model_as_it_was(
    make: Callable[[nn.Module], Wrapped],
) -> None:
    """... and replays write what the forward writes, or there are none."""
    model, module = with_layer(make)
    plain = copy.deepcopy(model)
    options: dict[str, Any] = {name: tensor[:1] for name, tensor in INPUTS.items()}
    options |= {"do_sample": False, "max_new_tokens": 120}
    assert torch.equal(model.generate(**options, **models.PAGED), plain.generate(**options))
    route = hf_paged.last_route(model)
    assert route is not None
    assert (route.num_captured_steps > 100) is (make is Normed and is_installed("tape"))
    its = plain.model.layers[0].mlp
    assert getattr(module, "calls", 0) == getattr(its, "calls", 0)
    for name, buffer in its.named_buffers():
        torch.testing.assert_close(module.get_buffer(name), buffer)


def test_a_forward_that_writes_to_a_class_is_not_recorded() -> None:
    model, _ = with_layer(Shared)
    options = {"do_sample": False, "max_new_tokens": 24}
    for _ in range(2):
        before = Shared.calls
        model.generate(**INPUTS, **options, **models.PAGED)
    assert Shared.calls - before >= 24
    route = hf_paged.last_route(model)
    assert route is not None and not route.num_captured_steps
    if is_installed("tape"):
        assert "changes a value that Python code reads" in str(route.slowed_by)


class Stop(BaseException):
    pass


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, Stop])
@pytest.mark.parametrize("turn", [1, 3, 6])
def test_a_check_that_ends_early_leaves_no_trace(turn: int, error: type[BaseException]) -> None:
    model, module = with_layer(Counting)
    turns = iter(range(1, 100))

    def fail() -> None:
        module.begun = True  # an attribute that was not there
        if next(turns) == turn:
            raise error("in a check")

    before = state(module)
    inner = module.inner.forward
    module.inner.forward = lambda hidden: (fail(), inner(hidden))[1]
    cache = hf_paged.PagedCache(model.config)
    if error is RuntimeError:
        choose_layout(model, cache)
    else:
        with pytest.raises(error):
            choose_layout(model, cache)
    assert next(turns) > turn and state(module) == before


def test_a_write_that_could_not_be_taken_back_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writes, "MAX_COPIED_BYTES", 1 << 10)
    model, module = with_layer(Running)
    module.count = torch.zeros(1 << 10)
    module.forward = lambda hidden: (module.count.add_(1), module.inner(hidden))[1]
    counts = []
    for _ in range(2):
        model.generate(**INPUTS, **OPTIONS, **models.PAGED)
        counts.append(int(module.count[0]))
    route = hf_paged.last_route(model)
    assert route is not None and route.road == "hf_loop" and "4096 bytes of buffers" in route.reason
    assert counts[1] - counts[0] == 8


def test_a_snapshot_copies_no_parameter() -> None:
    model = models.build("llama")
    model.tied = [next(model.parameters())]  # type: ignore[assignment]
    copied = {copy.shape for _, copy in Snapshot(model)._copies}
    assert copied <= {x.shape for x in model.buffers()}


def hits_of(model: Any) -> list[int]:
    ids = models.token_ids(1, 40)[0].tolist()
    with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:
        return [engine.generate([ids], OPTIONS)[0].num_prefix_hit_tokens for _ in range(3)]


@needs_fingerprints
def test_what_every_forward_writes_and_none_reads_does_not_count() -> None:
    model, module = with_layer(Counting)
    assert hits_of(model) == [0, 32, 32]
    before = fingerprint(model)
    model(torch.tensor([[5, 6, 7]]))
    assert module.number and fingerprint(model) == before
    module.inner.down_proj.weight.data[0, 0] += 1
    assert fingerprint(model) != before
    module.inner.down_proj.weight.data[0, 0] -= 1
    model.train()  # what no forward reads in one mode, it may read in another
    before = fingerprint(model)
    module.count += 1
    assert fingerprint(model) != before


def test_a_model_that_reads_what_it_wrote(caplog: pytest.LogCaptureFixture) -> None:
    model, _ = with_layer(Running)
    ids = models.token_ids(1, 40)[0].tolist()
    with caplog.at_level(logging.WARNING):
        assert hits_of(model) == [0, 0, 0]
        with hf_paged.PagedEngine(model, {"block_size": 8}) as engine:  # nor within one step
            results = engine.generate([ids, ids], OPTIONS)
            assert not any(result.num_prefix_hit_tokens for result in results)
    assert sum("Running.count" in record.getMessage() for record in caplog.records) == 1


@needs_fingerprints
def test_a_table_that_the_first_forward_makes_is_part_of_the_model() -> None:
    model, module = with_layer(Lazy)
    assert hits_of(model) == [0, 32, 32]
    before = fingerprint(model)
    module.table += 1
    assert fingerprint(model) != before


class Counted(dict[str, Any]):
    """A container that must be made with an argument."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name


class Uncopied(list[int]):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("a user's container without copies")


class Single(dict[str, int]):
    def __copy__(self) -> Any:
        return self


def test_copies_of_containers_keep_their_class() -> None:
    missing, counted = defaultdict(list, {"a": torch.zeros(1)}), Counted("mine")
    counted["a"] = 1
    recent, nan = deque([1, 2], maxlen=2), float("nan")
    originals = [missing, OrderedDict(b=2, a=1), Counter("aab"), counted, recent, {1, 2}, [nan, 1]]
    for original in originals:
        for copied in (writes.copy_value(original), writes.alter_value(original)):
            assert type(copied) is type(original) and len(copied) == len(original)
        assert writes.values_are_equal(original, writes.copy_value(original))
        assert not writes.values_are_equal(original, writes.alter_value(original))
    assert writes.values_are_equal([nan, 1.0], [float("nan"), 1.0])
    assert writes.values_are_equal(torch.tensor([nan, 1.0]), torch.tensor([nan, 1.0]))
    assert not writes.values_are_equal(torch.tensor([nan, 1.0]), torch.tensor([nan, 2.0]))
    assert writes.values_are_equal(nan, writes.alter_value(nan)), "a number that stays NaN"
    altered = writes.alter_value(missing)
    assert altered["new"] == [] and altered["a"].item() == 1 and missing["a"].item() == 0
    assert writes.copy_value(counted).name == "mine"
    assert writes.copy_value(recent).maxlen == 2
    assert writes.alter_value(OrderedDict(b=2, a=1)) == OrderedDict(b=3, a=2)
    assert writes.alter_value(Uncopied([1])) == [2]
    single = Single(a=1)
    assert writes.alter_value(single) == {"a": 2} and single == {"a": 1}
