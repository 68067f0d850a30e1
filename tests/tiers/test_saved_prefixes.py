"""Saved prefixes, and blocks of tiers, that are not what a model saved: each is refused before
anything is allocated, and nothing breaks."""

from __future__ import annotations

import json
import os
import pickle
import re
import stat
import tracemalloc
from functools import partial

import pytest
import safetensors.torch
import torch

from hf_paged import PagedEngine
from hf_paged.tiers import block_files
from tests.support import models
from tests.support.checks import in_threads
from tests.support.engine_helpers import assert_drained, lone_run, prompts
from tests.tiers.test_prefix_tiers import (
    GREEDY,
    SIZE,
    blocks_on_disk,
    build,
    config,
    evict_all,
    run,
    save_all,
)

REFUSED = (
    "is not a complete saved prefix|is a block of a tier's folder|was computed by another model"
)
(PROMPT,) = prompts(50)

# ---- files with a right hash, after a change of their tensors and metadata


def opened(content):
    """The tensors of a file, and its metadata without the hash."""
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    del metadata["hash"]
    return safetensors.torch.load(content), metadata


def sealed(change, content):
    tensors, metadata = opened(content)
    change(tensors, metadata)
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    metadata |= {"hash": block_files._hash(tensors, metadata)}
    return safetensors.torch.save(tensors, metadata)


def said(key, value, tensors, metadata):
    metadata[key] = value


def formed(change, tensors, metadata):
    """Changes the `json_arguments` of each layer in the metadata."""
    forms = json.loads(metadata["layers"])
    metadata["layers"] = json.dumps({layer: change(form) for layer, form in forms.items()})


def mapped(change, tensors, metadata):
    tensors.update({name: change(tensor) for name, tensor in tensors.items()})


def more_heads(tensors, metadata):
    """Twice as many of half the width, in as many bytes."""
    mapped(lambda x: x.reshape(x.shape[0], 2 * x.shape[1], *x.shape[2:-1], -1), tensors, metadata)
    formed(lambda form: [2 * form[0], form[1] // 2, *form[2:]], tensors, metadata)


def without_last(tensors, metadata):
    forms = json.loads(metadata["layers"])
    last, _ = forms.popitem()
    metadata["layers"] = json.dumps(forms)
    for name in [name for name in tensors if name.rpartition(".")[0] == last]:
        del tensors[name]


DEEP = "[" * 100_000
SEALED = {
    "no layers": lambda tensors, metadata: (tensors.clear(), metadata.update(layers="{}")),
    "a layer less": without_last,
    "more heads": more_heads,
    "no such dtype": partial(formed, lambda form: [*form[:2], ["load", "load"], form[3]]),
    "many heads": partial(formed, lambda form: [1 << 62, *form[1:]]),
    "layers that are nested": partial(said, "layers", DEEP),
    "fewer blocks": partial(mapped, lambda x: x[:-1]),
    "more blocks": partial(mapped, lambda x: torch.cat([x, x])),
    "an empty tensor": lambda tensors, metadata: tensors.update(extra=torch.empty(0)),
    "another name": partial(said, "name", "other"),
    "another format": partial(said, "format", "hf_paged prefix 0"),
}
IDS = {  # of saved prefixes of 48 tokens
    "no ids": [],
    "other ids": list(range(48)),
    "fewer ids": [1, 2, 3],
    "words": ["a"] * 48,
    "truths": [True] * 48,
    "large ids": [1 << 70] * 48,
}
IDS = {name: partial(said, "token_ids", json.dumps(ids)) for name, ids in IDS.items()}
IDS |= {
    "very large ids": partial(said, "token_ids", f"[{'9' * 5000}]"),
    "nested ids": partial(said, "token_ids", DEEP),
    "a namespace with a dict": partial(said, "namespace", '[{"a": 1}, null]'),
    "another namespace": partial(said, "namespace", '["other", "tenant"]'),
}
SEALED, IDS = (
    {name: partial(sealed, change) for name, change in changes.items()} for changes in (SEALED, IDS)
)

# ---- other bytes


def with_header(change, content):
    """The file with another header, whose length is right."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = change(content[8:end].decode()).encode()
    return len(header).to_bytes(8, "little") + header + content[end:]


def overlap(text):
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    header[names[-1]]["data_offsets"][0] = 0
    return json.dumps(header)


RAW = {
    "empty": lambda content: b"",
    "a header of 2**63 bytes": lambda content: (1 << 63).to_bytes(8, "little") + content[8:],
    "a header as long as the file": lambda content: (
        len(content).to_bytes(8, "little") + content[8:]
    ),
    "no header": lambda content: bytes(8) + content[8:],
    "truncated": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\0",
    "a pickle": lambda content: pickle.dumps({"a": torch.zeros(3)}),
}
HEADERS = {
    "overlapping tensors": overlap,
    "offsets that are NaN": lambda header: re.sub(r'offsets":\[\d+', 'offsets":[NaN', header),
    "no metadata": lambda header: re.sub(r'"__metadata__":\{[^}]*\},?', "", header),
    "a nested header": lambda header: DEEP,
    "a header that is a list": lambda header: "[]",
    "metadata that are a list": lambda header: '{"__metadata__":["format"]}',
}
RAW |= {name: partial(with_header, change) for name, change in HEADERS.items()}


def put(kind, path):
    """Puts something else than a file of its size there."""
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:
        path.write_bytes((1000).to_bytes(8, "little"))
        os.truncate(path, 10 << 30)


# ---- what is done with them


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "prefix"
    with PagedEngine(models.get("llama"), {"block_size": SIZE}) as engine:
        engine.save_prefix(PROMPT, path)
    return path.read_bytes()


@pytest.fixture
def engine():
    with PagedEngine(models.get("llama"), {"block_size": SIZE}) as engine:
        yield engine


def assert_refused(engine, path, what):
    before = engine.memory.stats().held_bytes
    with pytest.raises(ValueError, match=REFUSED):
        engine.load_prefix(path)
        pytest.fail(f"{what} was loaded")
    assert engine.memory.stats().held_bytes == before, what
    engine.check_integrity()


def assert_works(engine, path, content):
    """The real file is loaded, and requests get plain's tokens."""
    path.write_bytes(content)
    engine.reset_prefix_cache()
    assert engine.load_prefix(path) == 48
    assert run(engine, PROMPT) == (lone_run(engine.model, PROMPT, GREEDY)[0], 48)
    assert_drained(engine)


@pytest.mark.parametrize("is_fresh", [True, False], ids=["fresh", "used"])
@pytest.mark.parametrize("kinds", [SEALED, IDS, RAW], ids=["sealed", "ids", "raw"])
def test_a_file_with_other_content_is_refused(kinds, is_fresh, engine, saved, tmp_path):
    """By an engine without layers, and by one whose layers a request has made."""
    path = tmp_path / "prefix"
    if not is_fresh:
        run(engine, prompts(20, seed=5)[0])
    for name, change in kinds.items():
        path.write_bytes(change(saved))
        assert_refused(engine, path, name)
    assert_works(engine, path, saved)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no FIFOs")
@pytest.mark.parametrize("kind", ["directory", "FIFO", "device", "sparse"])
def test_what_is_no_file_of_its_size_is_not_read(kind, engine, saved, tmp_path):
    """A FIFO is not waited for, and a large file is not read."""
    path = tmp_path / kind
    put(kind, path)
    tracemalloc.start()
    in_threads(lambda: assert_refused(engine, path, kind))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20
    if kind == "sparse":  # with the header of a real file
        path.write_bytes(saved)
        os.truncate(path, 10 << 30)
        assert_refused(engine, path, kind)
    assert_works(engine, tmp_path / "prefix", saved)


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o777])
def test_only_the_owner_reads_files(mask, tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    mine.chmod(0o755)
    before = os.umask(mask)
    try:
        with PagedEngine(models.get("llama"), config(mine / "new" / "tier")) as engine:
            engine.save_prefix(PROMPT, mine / "prefix")
            evict_all(engine)
            engine.save_prefix(PROMPT, mine / "prefix")  # replaced
    finally:
        os.umask(before)
    assert len(blocks_on_disk(mine)) == 6 and stat.S_IMODE(mine.stat().st_mode) == 0o755
    modes = {each.lstat().st_mode for each in mine.rglob("*")}
    assert modes == {stat.S_IFDIR | 0o700, stat.S_IFREG | 0o600}


def test_a_model_of_another_dtype_keeps_its_files(tmp_path, caplog):
    """An engine restores blocks of the new dtype before any layer is allocated."""
    model = build("llama")
    with PagedEngine(model, config(tmp_path)) as engine:
        run(engine, PROMPT)
        model.double()
        expected = run(engine, PROMPT)[0]
        save_all(engine)
        assert run(engine, PROMPT) == (expected, 48)
        assert not [record for record in caplog.records if "is dropped" in record.getMessage()]
