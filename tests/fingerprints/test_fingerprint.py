"""The fingerprint of a model: stable without changes, different after any change."""

from __future__ import annotations

import copy
import decimal
import functools
import itertools
import os
import random
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize as weights
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged import PagedEngine, kernels
from hf_paged.fingerprints.code import code_hash
from hf_paged.fingerprints.state import StateReading, read_state
from hf_paged.kernels import cpp
from hf_paged.kernels.hashing import hash_portable, hash_tensors
from hf_paged.model.state import fingerprint
from tests.support import models
from tests.support.kernels.device import DEVICE, available, interpreted

BACKENDS = [
    pytest.param("cpp", marks=pytest.mark.skipif(not cpp.is_available(), reason="no compiler")),
    "portable",
    pytest.param("triton", marks=interpreted),
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the C++ hash, the PyTorch one and the Triton kernel of GPUs."""
    if request.param != "cpp":
        monkeypatch.setattr(cpp, "is_available", lambda: False)
    if request.param == "triton":
        monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    return request.param


def llama(**options: Any) -> LlamaForCausalLM:
    sizes = dict(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        vocab_size=50,
    )
    return LlamaForCausalLM(LlamaConfig(**sizes, **options)).to(torch.bfloat16)


def read(model: nn.Module) -> bytes:
    found = fingerprint(model)
    assert found is not None and len(found) == 32
    return found


def watched(model: nn.Module) -> StateReading:
    state = read_state(model)
    assert state is not None
    state.accept()
    state.watch()
    assert state.is_same() and state.is_in_place()
    return state


class Plain:
    factor = 2.0


class Small(nn.Module):
    """Something of every kind that a module may hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 7)
        self.register_buffer("kept", torch.arange(6.0).view(2, 3))
        self.register_buffer("hidden", torch.randn(3), persistent=False)
        self.plain = torch.randn(4)
        self.inside = {"tables": [torch.zeros(2, dtype=torch.int8)]}
        self.unlisted = [nn.Linear(2, 2)]
        self.activation = nn.ReLU()
        self.scale, self.names, self.note = 1.0, {"a": [1, (2, None)]}, {"x", "y"}
        self.names["itself"] = self.names
        self.queue, self.exact = deque([1]), decimal.Decimal("1.5")
        self.array, self.object = np.array([0.5, 2.0], np.float32), Plain()
        self.view = MappingProxyType(self.inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * of_globals()


FACTORS = {"now": 1.0}


def of_globals() -> float:
    return FACTORS["now"]


@pytest.mark.slow_cases("triton")
@pytest.mark.usefixtures("backend")
def test_same_while_nothing_changes() -> None:
    model = llama()
    first = read(model)
    assert read(model) == first
    model.eval()
    assert read(model) == first
    model.train()
    assert read(model) == first
    assert read(copy.deepcopy(model)) == first  # addresses do not count
    assert read(Small()) != first
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(5)
        assert read(model) == first
    finally:
        torch.set_num_threads(threads)


def test_what_calls_and_transformers_note_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else blocks of one process are not found by another that has built other models."""
    model: Any = llama().eval()
    notes = ("_can_set_experts_implementation", "_can_set_attn_implementation")
    for note in notes:
        monkeypatch.delattr(LlamaForCausalLM, f"{note}_cached_value", raising=False)
    first = read(model)
    for note in notes:
        getattr(LlamaForCausalLM, note)()
        assert f"{note}_cached_value" in vars(LlamaForCausalLM)
    ids, outputs = torch.randint(0, 50, (2, 5)), ("output_hidden_states", "output_attentions")
    for options in ({"do_sample": False}, {"num_beams": 2, **dict.fromkeys(outputs, True)}):
        model.generate(ids, max_new_tokens=3, pad_token_id=0, **options)
    model(ids, labels=ids).loss.backward()
    assert read(model) == first
    model.engine = PagedEngine(model)
    assert read(model) != first, "an attribute more"
    kept = read(model)
    model.engine.generate([[5, 6, 7]], {"max_new_tokens": 3})
    assert read(model) == kept


# as transformers' and diffusers'
lazy = type("Lazy", (ModuleType,), {"__module__": "lazy_loader"})("other_package")


def test_user_code_may_name_a_lazy_module_and_begin_like_an_undescribed_one() -> None:
    body = {"__module__": "abcnet", "scale": 1.0, "forward": lambda self, x: x * self.scale}
    kind: Any = type("Net", (nn.Module,), body)
    model = kind()
    before = read(model)
    kind.scale = 2.0
    assert read(model) != before
    kind.forward = lambda self, x: x * lazy.factor
    assert StateReading(model).undetectable is None


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    ids = torch.arange(10).view(2, 5)
    model(ids, labels=ids).loss.backward()
    optimizer.step()


def swap_rows(model: nn.Module) -> None:
    weight = model.model.layers[1].mlp.up_proj.weight.data
    weight[[3, 17]] = weight[[17, 3]]


def flip_bit(tensor: torch.Tensor, at: int, bit: int) -> None:
    content = tensor.detach().view(-1).view(torch.uint8)
    content[at] ^= 1 << bit


def write_by_numpy(model: nn.Module) -> None:
    model.model.norm.weight.data.view(torch.int16).numpy()[3] += 1


WRITES: dict[str, Callable[[Any], Any]] = {
    "adamw": lambda m: step(m, torch.optim.AdamW(m.parameters(), lr=0.1)),
    "fused adamw": lambda m: step(m, torch.optim.AdamW(m.parameters(), lr=0.1, fused=True)),
    "sgd": lambda m: step(m, torch.optim.SGD(m.parameters(), lr=1.0)),
    "load_state_dict": lambda m: m.load_state_dict(llama().state_dict()),
    "data.copy_": lambda m: m.lm_head.weight.data.copy_(torch.randn(50, 32)),
    "new data": lambda m: setattr(m.lm_head.weight, "data", torch.randn(50, 32).to(torch.bfloat16)),
    "numpy": write_by_numpy,
    "swapped rows": swap_rows,
    "lowest bit": lambda m: flip_bit(m.model.embed_tokens.weight, 100, 0),
    "sign": lambda m: flip_bit(m.model.layers[0].self_attn.q_proj.weight, 2047, 7),
    "buffer": lambda m: m.model.rotary_emb.inv_freq.mul_(2),
    "dtype": lambda m: m.model.norm.float(),
    "layers exchanged": lambda m: m.model.layers.append(m.model.layers.pop(0)),
    "head shared": lambda m: setattr(m.lm_head, "weight", m.model.embed_tokens.weight),
    "config": lambda m: setattr(m.config, "sliding_window", 3),
    "attribute": lambda m: setattr(m.model.layers[1].self_attn, "scaling", 0.5),
}


@pytest.mark.slow_cases(but=["*-config", "cpp-*", "portable-*"])
@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", WRITES)
def test_any_write_shows(name: str) -> None:
    model = llama()
    before, state = read(model), watched(model)
    WRITES[name](model)
    assert read(model) != before
    # a write to one element through numpy need not change a version or an address
    assert name == "numpy" or not state.is_same()


def steer(factor: float) -> Callable[..., Any]:
    def forward(*args: Any) -> Any:
        return args[-1] * factor

    return forward


CHANGES: dict[str, Callable[[Small], Any]] = {
    "kept buffer": lambda m: m.kept.add_(1),
    "hidden buffer": lambda m: m.hidden.add_(1),
    "plain tensor": lambda m: m.plain.add_(1),
    "tensor in containers": lambda m: m.inside["tables"][0].add_(1),
    "unlisted module": lambda m: m.unlisted[0].weight.data.add_(1),
    "other module": lambda m: setattr(m, "activation", nn.SiLU()),
    "number": lambda m: setattr(m, "scale", 1),
    "deep in a dict": lambda m: m.names["a"].__setitem__(1, (2, 0)),
    "set": lambda m: m.note.add("z"),
    "new attribute": lambda m: setattr(m, "more", None),
    "deque": lambda m: m.queue.append(2),
    "decimal": lambda m: setattr(m, "exact", decimal.Decimal("1.50")),
    "numpy array": lambda m: m.array.__setitem__(1, -1.0),
    "object": lambda m: setattr(m.object, "factor", -1.0),
    "proxy": lambda m: m.inside.update(more=1),
    "global of a forward": lambda m: FACTORS.update(now=FACTORS["now"] + 1),
    "shape": lambda m: setattr(m, "kept", m.kept.view(3, 2)),
    "order in memory": lambda m: setattr(m, "kept", m.kept.view(3, 2).t()),
    "hook": lambda m: m.linear.register_forward_hook(steer(2.0)),
    "hook before": lambda m: m.linear.register_forward_pre_hook(steer(2.0)),
    "forward": lambda m: setattr(m.linear, "forward", steer(2.0)),
    "partial": lambda m: setattr(m.linear, "forward", functools.partial(steer(1.0), 3)),
    "parametrization": lambda m: weights.register_parametrization(m.linear, "weight", nn.Tanh()),
}


@pytest.mark.parametrize("name", CHANGES)
def test_any_other_change_shows(name: str) -> None:
    model = Small()
    before, state = read(model), watched(model)
    CHANGES[name](model)
    assert read(model) != before and not state.is_same()


def depends_on_mode(module: nn.Module) -> bool:
    return module.training


READS_MODE: dict[str, Callable[[Any, Any], Any]] = {
    "method": lambda own, x: x * own.training,
    "helper": lambda own, x: x * depends_on_mode(own),
    "generator": lambda own, x: sum(x for _ in range(2) if own.training),
    "text": lambda own, x: x * getattr(own, "training"),  # noqa: B009
}


@pytest.mark.parametrize("place", ["class", "instance"])
@pytest.mark.parametrize("name", READS_MODE)
def test_the_mode_counts_where_user_code_reads_it(
    name: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, forward = Small(), READS_MODE[name]
    model.activation.train(False)
    without = read(model)
    model.activation.train()
    assert read(model) == without
    if place == "class":
        monkeypatch.setattr(nn.ReLU, "forward", forward)
    else:
        model.activation.forward = functools.partial(forward, model.activation)
    found = [read(model.train(is_on)) for is_on in (True, False)]
    assert found[0] != found[1]


CONTEXT: ContextVar[float] = ContextVar("factor", default=1.0)


def drawing(imports: str, draw: str) -> Any:
    """A function whose globals are only what is imported, and the function."""
    namespace: dict[str, Any] = {"__name__": "user_draws"}
    exec(f"{imports}\ndef forward(x): {draw}", namespace)
    return namespace["forward"]


CHANGING: dict[str, Callable[[Any], Any]] = {
    "context variable": lambda x: x * CONTEXT.get(),
    "clock": lambda x: x * time.time(),
    "random": lambda x: x * random.random(),
    "random, imported late": drawing("", "import random; return x * random.random()"),
    "random of an object": drawing("from random import Random; R = Random()", "return R.random()"),
    "random of numpy": drawing("import numpy as np", "return x * np.random.random()"),
    "function of numpy": drawing("from numpy.random import uniform", "return x * uniform()"),
    "generator of numpy": drawing(
        "import numpy as np; draws = np.random.default_rng(0)", "return x * draws.random()"
    ),
    "environment": lambda x: x * float(os.environ["FACTOR"]),
}


@pytest.mark.parametrize("name", CHANGING)
def test_what_cannot_be_seen_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    model = Small()
    assert StateReading(model).undetectable is None
    model.activation.forward = CHANGING[name]
    assert fingerprint(model) is None and "its code reads" in caplog.text
    assert "its code reads" in str(StateReading(model).undetectable)


def test_what_a_hook_closes_over_counts_and_what_it_collects_does_not() -> None:
    found = []
    vector, collected = torch.ones(3), []
    model = Small()

    def hook(*args: Any) -> Any:
        collected.append(args)
        return args[-1] + vector

    handle = model.linear.register_forward_hook(hook)
    found.append(read(model))
    collected.append(1)
    assert read(model) == found[0]
    vector.add_(1)
    found.append(read(model))
    handle.remove()
    for factor in (2.0, 3.0):
        handle = model.linear.register_forward_hook(steer(factor))
        found.append(read(model))
        handle.remove()
    assert len(set(found)) == 4
    model.linear.register_forward_hook(steer(3.0))
    assert read(model) == found[-1]


@available
def test_pytorch_and_the_kernel_give_the_same_fingerprint(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that fingerprints stay comparable if one replaces the other."""
    monkeypatch.setattr(cpp, "is_available", lambda: False)
    model = llama()
    expected = read(model)
    model.to(DEVICE)
    monkeypatch.setenv(kernels.BACKEND_VARIABLE, "triton")
    assert read(model) == expected


def test_tied_weights_are_read_once() -> None:
    model = llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = StateReading(model)
    stored = {tensor.data_ptr() for tensor in itertools.chain(model.parameters(), model.buffers())}
    assert len(state.tensors) == len({tensor.data_ptr() for tensor in state.tensors}) == len(stored)


FORMS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "transposed": lambda x: x.t(),
    "sliced": lambda x: x[1:-1, 3:-2],
    "strided": lambda x: x[::2, ::3],
    "permuted slice": lambda x: x.view(6, 5, 14)[:, 1:3].permute(2, 0, 1),
    "expanded": lambda x: x[2].expand(1 << 40, -1),
    "scalar": lambda x: x[1, 1],
    "unaligned": lambda x: x.flatten()[1:],
}


DTYPES = [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool]


@pytest.mark.parametrize("form", FORMS)
def test_every_element_of_a_view_counts_and_nothing_beside_it(form: str, backend: str) -> None:
    # in the interpreter, which is slow: each form, and each dtype
    number = list(FORMS).index(form)
    dtypes = DTYPES if backend != "triton" else {torch.float32, DTYPES[number % len(DTYPES)]}
    for dtype in dtypes:
        memory = torch.randint(0, 2, (30, 14)).to(dtype)
        model = nn.Module()
        model.view = FORMS[form](memory)
        before = read(model)
        seen = torch.zeros(30, 14, dtype=torch.bool)
        view = FORMS[form](seen)
        (view[:1] if form == "expanded" else view).fill_(True)
        inside, outside = seen.nonzero().tolist(), (~seen).nonzero().tolist()
        for at in [inside[0], inside[len(inside) // 2], inside[-1], *outside[:3]]:
            old = memory[tuple(at)].clone()
            memory[tuple(at)] = torch.logical_not(old).to(dtype)
            assert (read(model) != before) == seen[tuple(at)].item()
            memory[tuple(at)] = old
        assert read(model) == before


class Wrapped(torch.Tensor):
    """A tensor whose content may be anywhere."""


UNREADABLE: dict[str, Callable[[], torch.Tensor]] = {
    "meta": lambda: torch.empty(3, device="meta"),
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.ones(3).as_subclass(Wrapped),
    "lazily conjugated": lambda: torch.ones(3, dtype=torch.complex64).conj(),
    "uninitialised": nn.parameter.UninitializedParameter,
}
if hasattr(torch, "quantize_per_tensor"):  # announced for removal
    UNREADABLE["quantized"] = lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", UNREADABLE)
def test_what_cannot_be_read_gives_none(name: str) -> None:
    tensor = UNREADABLE[name]()
    plain, registered = Small(), Small()
    plain.attribute = [tensor]
    if isinstance(tensor, nn.Parameter):
        registered.weight = tensor
    else:
        registered.register_buffer("buffer", tensor)
    assert fingerprint(plain) is fingerprint(registered) is None


def test_an_empty_model_and_empty_tensors() -> None:
    model = nn.Module()
    empty = read(model)
    model.register_buffer("nothing", torch.empty(0, 3))
    assert read(model) != empty


@pytest.mark.gpu
def test_gpu_reads_what_the_cpu_reads() -> None:
    here = torch.randn(1000, 1001)
    expected = hash_portable(here).tolist()
    assert hash_portable(here.cuda()).tolist() == expected and hash_tensors([here.cuda()]) == [
        None,
        [expected],
    ]
    model = llama().cuda()
    before = read(model)
    assert read(model) == before
    flip_bit(model.model.norm.weight, 1, 6)
    assert read(model) != before


SOURCE = """
def forward(x):
    try:
        return x in {1, 'a', 'b', 'c'}
    except KeyError:
        return 2.5
"""


def test_code_is_told_by_what_it_does_and_not_by_where_it_is() -> None:
    def hash_of(text: str, path: str = "here.py") -> str:
        found: dict[str, Any] = {}
        exec(compile(text, path, "exec"), found)
        return code_hash(found["forward"].__code__)

    assert hash_of(SOURCE) == hash_of("\n\n" + SOURCE, "there.py")
    others = (
        SOURCE.replace("2.5", "2.75"),
        SOURCE.replace("KeyError", "ValueError"),
        SOURCE.replace("'c'", "'d'"),
    )
    assert len({hash_of(text) for text in (SOURCE, *others)}) == 4


_IN_ANOTHER = """
import sys
from hf_paged.fingerprints.code import code_hash
from hf_paged.model.state import fingerprint
from tests.support import models
exec(sys.argv[1])
names = "llama", "gemma2", "qwen3_next"
print(code_hash(forward.__code__), *(fingerprint(models.build(name)).hex() for name in names))
"""


@pytest.mark.slow
def test_processes_agree() -> None:
    found = set()
    for seed in ("1", "2"):  # sets iterate in another order
        env = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", _IN_ANOTHER, SOURCE], capture_output=True, text=True, env=env
        )
        assert done.returncode == 0, done.stderr
        found.add(done.stdout.splitlines()[-1])
    assert len(found) == 1


def test_where_a_model_was_loaded_from_says_nothing(tmp_path: Path) -> None:
    model = models.build("llama")
    found = []
    for name in ("one", "two"):
        model.save_pretrained(tmp_path / name)
        found.append(fingerprint(LlamaForCausalLM.from_pretrained(tmp_path / name)))
    assert found[0] == found[1] is not None
