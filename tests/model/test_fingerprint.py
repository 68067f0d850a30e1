"""The fingerprint of a model: the same while nothing changed, another after any change."""

from __future__ import annotations

import copy
import ctypes
import functools
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.nn.utils import parametrize as weights
from transformers import LlamaConfig, LlamaForCausalLM

from hf_paged.kernels import cpp
from hf_paged.model import state as state_module
from hf_paged.model.state import ModelState, fingerprint, hash_portable

BACKENDS = [
    pytest.param("cpp", marks=pytest.mark.skipif(not cpp.is_available(), reason="no compiler")),
    "portable",
]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Runs a test with the C++ hash and with the one in PyTorch."""
    if request.param == "portable":
        monkeypatch.setattr(cpp, "is_available", lambda: False)
    return request.param


def llama(**options: Any) -> LlamaForCausalLM:
    sizes = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4, vocab_size=50)
    return LlamaForCausalLM(LlamaConfig(**sizes, **options)).to(torch.bfloat16)


def read(model: nn.Module) -> bytes:
    found = fingerprint(model)
    assert found is not None and len(found) == 32
    return found


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


@pytest.mark.usefixtures("backend")
def test_same_while_nothing_changes() -> None:
    model = llama()
    first = read(model)
    assert read(model) == first
    model.eval()
    assert read(model) == first
    model.train()
    assert read(model) == first
    assert read(copy.deepcopy(model)) == first  # no address counts
    assert read(Small()) != first


def test_a_call_changes_nothing() -> None:
    model = llama().eval()
    before = read(model)
    ids = torch.randint(0, 50, (2, 5))
    model.generate(ids, max_new_tokens=3, do_sample=False, pad_token_id=0)
    model.generate(
        ids, max_new_tokens=3, num_beams=2, pad_token_id=0, output_hidden_states=True, output_attentions=True
    )
    model(ids, labels=ids).loss.backward()
    assert read(model) == before


def test_threads_do_not_count() -> None:
    model = nn.Linear(1000, 1000)
    before, found = torch.get_num_threads(), set()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found.add(read(model))
    finally:
        torch.set_num_threads(before)
    assert len(found) == 1


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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("name", WRITES)
def test_any_write_shows(name: str) -> None:
    model = llama()
    before = read(model)
    WRITES[name](model)
    assert read(model) != before


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
    before = read(model)
    CHANGES[name](model)
    assert read(model) != before


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


def test_containers_that_hold_themselves() -> None:
    model = Small()
    model.names["self"] = model.names
    before = read(model)
    model.scale = 2.0
    assert read(model) != before


def test_adapters() -> None:
    base = llama()
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model = get_peft_model(base, config, adapter_name="one")
    model.add_adapter("two", config)
    model.set_adapter("one")
    one = read(base)
    model.set_adapter("two")
    two = read(base)
    assert read(model) == read(model) != two  # the wrapper has its own attributes
    with model.disable_adapter():
        none = read(base)
    assert read(base) == two
    model.set_adapter("one")
    assert read(base) == one
    layer = base.model.layers[0].self_attn.q_proj
    layer.set_scale("one", 3.0)
    scaled = read(base)
    layer.set_scale("one", 1.0)
    assert read(base) == one
    layer.lora_A["one"].weight.data.add_(1)
    written = read(base)
    model.merge_adapter()
    merged = read(base)
    assert len({one, two, none, scaled, written, merged}) == 6


def test_tied_weights_are_read_once() -> None:
    model = llama(tie_word_embeddings=True)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    state = ModelState(model)
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


@pytest.mark.usefixtures("backend")
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.complex64, torch.bool], ids=str)
def test_every_element_of_a_view_counts_and_nothing_beside_it(form: str, dtype: torch.dtype) -> None:
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
if hasattr(torch, "quantize_per_tensor"):  # announced to go
    UNREADABLE["quantized"] = lambda: torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
@pytest.mark.parametrize("name", UNREADABLE)
@pytest.mark.parametrize("registered", [False, True], ids=["plain", "registered"])
def test_what_cannot_be_read_gives_none(name: str, registered: bool) -> None:
    model, tensor = Small(), UNREADABLE[name]()
    if isinstance(tensor, nn.Parameter):
        model.weight = tensor
    elif registered:
        model.register_buffer("buffer", tensor)
    else:
        model.attribute = [tensor]
    assert fingerprint(model) is None


def test_an_empty_model_and_empty_tensors() -> None:
    model = nn.Module()
    empty = read(model)
    model.register_buffer("nothing", torch.empty(0, 3))
    assert read(model) != empty


WORD = (1 << 64) - 1
SIZES = [0, 1, 7, 8, 9, 255, 4095, 4096, 4097, 3 * 4096 + 5, 262144, 262145, 600_001]


def scramble(x: int) -> int:
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & WORD
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & WORD
    return x ^ (x >> 31)


class Digest:
    def __init__(self) -> None:
        self.a, self.b = 0x243F6A8885A308D3, 0x13198A2E03707344

    def absorb(self, x: int, y: int) -> None:
        self.a = (scramble(self.a ^ x) + self.b) & WORD
        self.b = (scramble(self.b ^ y) + (self.a << 1 | self.a >> 63)) & WORD


def reference(spans: list[bytes]) -> bytes:
    """`hash.cpp`, word by word."""
    keys = [scramble((i + 1) * 0x9E3779B97F4A7C15 & WORD) for i in range(513)]
    low = np.array([key & 0xFFFFFFFF for key in keys], np.uint32)
    high = np.array([key >> 32 for key in keys], np.uint32)
    total = Digest()
    for number, span in enumerate(spans):
        total.absorb(len(span), number)
        for chunk in range(0, len(span), 64 * 4096):
            digest = Digest()
            for start in range(chunk, min(len(span), chunk + 64 * 4096), 4096):
                block = np.frombuffer(span[start : start + 4096].ljust(4096, b"\0"), "<u4").reshape(16, 2, 32)
                left, right = block[:, 0].reshape(-1), block[:, 1].reshape(-1)
                sums = [
                    int(
                        ((left + low[k : k + 512]).astype(np.uint64) * (right + high[k : k + 512])).sum(dtype=np.uint64)
                    )
                    for k in (0, 1)
                ]
                digest.absorb(*sums)
            total.absorb(digest.a, digest.b)
    words = scramble(total.a ^ total.b), scramble((total.b + 1) & WORD)
    return b"".join(word.to_bytes(8, "little") for word in words)


def cpp_hash(spans: list[bytes], offset: int = 0) -> bytes:
    buffers = [ctypes.create_string_buffer(b"?" * offset + span) for span in spans]
    starts = [ctypes.addressof(buffer) + offset for buffer in buffers]
    return cpp.hash_memory(starts, [len(span) for span in spans])


def portable_hash(spans: list[bytes], offset: int = 0) -> list[Any]:
    tensors = [torch.frombuffer(bytearray(b"?" * offset + span + b"?"), dtype=torch.uint8) for span in spans]
    return [(len(span), hash_portable(x[offset:-1]).tolist()) for span, x in zip(spans, tensors)]


@pytest.mark.skipif(not cpp.is_available(), reason="no compiler")
@pytest.mark.parametrize("size", SIZES)
def test_cpp_hash_is_the_reference(size: int) -> None:
    span = np.random.default_rng(size).bytes(size)
    expected = reference([span])
    for offset in (0, 1, 6):
        assert cpp_hash([span], offset) == expected
    assert cpp_hash([b"", span, b"abc", span]) == reference([b"", span, b"abc", span])


@pytest.mark.parametrize("size", SIZES)
def test_portable_hash_is_the_reference(size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    span = np.random.default_rng(size).bytes(size)
    padded = span.ljust(-(-size // 8) * 8, b"\0")
    words = np.frombuffer(padded, "<u8") ^ np.arange(1, len(padded) // 8 + 1, dtype=np.uint64) * np.uint64(
        0x9E3779B97F4A7C15
    )
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB), (31, 0x9E3779B97F4A7C15)):
        words = (words ^ (words >> np.uint64(shift))) * np.uint64(factor)
    second = (words ^ (words >> np.uint64(32))) * np.uint64(0xBF58476D1CE4E5B9)
    expected = [int(x.sum(dtype=np.uint64).astype(np.int64)) for x in (words, second)]
    for chunk_bytes, offset in itertools.product((state_module.CHUNK_BYTES, 1 << 12), (0, 1, 6)):
        monkeypatch.setattr(state_module, "CHUNK_BYTES", chunk_bytes)
        assert portable_hash([span], offset) == [(size, expected)]


HASHES = [pytest.param(cpp_hash, marks=BACKENDS[0].marks, id="cpp"), pytest.param(portable_hash, id="portable")]


@pytest.mark.parametrize("function", HASHES)
def test_structured_changes_never_cancel(function: Callable[[list[bytes]], Any]) -> None:
    """Zeros, one value all over, repeated rows: contents in which naive sums and xors collide."""
    generator = np.random.default_rng(0)
    row = generator.bytes(64)
    contents: list[bytes] = []
    for base in (bytes(8192), b"\x80\x3f" * 4096, row * 128, generator.bytes(8192)):
        contents.append(base)
        for at, bit in itertools.product((0, 1, 7, 63, 64, 4095, 4096, 8191), (0, 7)):  # one bit
            changed = bytearray(base)
            changed[at] ^= 1 << bit
            contents.append(bytes(changed))
        for step in (8, 64, 128, 256, 2048, 4096):  # the same change in two places: signs, exponents
            for mask in (0x80, 0x01, 0xFF):
                changed = bytearray(base)
                changed[7] ^= mask
                changed[7 + step] ^= mask
                contents.append(bytes(changed))
    different = np.frombuffer(generator.bytes(8192), np.uint8).reshape(128, 64)
    for first, second in ((0, 1), (0, 64), (3, 127), (31, 32)):  # exchanged rows
        order = np.arange(128)
        order[[first, second]] = second, first
        contents.append(different[order].tobytes())
    contents += [different.tobytes(), (different ^ 0x80).tobytes(), different[::-1].tobytes(), different.T.tobytes()]
    contents += [bytes(n) for n in range(20)]
    distinct = sorted(set(contents))
    assert len({repr(function([content])) for content in distinct}) == len(distinct)
    assert function([b"ab", b"c"]) != function([b"a", b"bc"])
    assert function([row, row[::-1]]) != function([row[::-1], row])


@pytest.mark.gpu
def test_gpu_reads_what_the_cpu_reads() -> None:
    here = torch.randn(1000, 1001)
    assert hash_portable(here.cuda()).tolist() == hash_portable(here).tolist()
    model = llama().cuda()
    before = read(model)
    assert read(model) == before
    flip_bit(model.model.norm.weight, 1, 6)
    assert read(model) != before
