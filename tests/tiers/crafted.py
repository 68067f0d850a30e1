"""Files of blocks that were crafted: other content than a model's blocks, under a right hash where
there is one."""

from __future__ import annotations

import json
import os
import pickle
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from hf_paged.tiers import block_files

Tensors = dict[str, Tensor]
Metadata = dict[str, str]
Change = Callable[[Tensors, Metadata], tuple[Tensors, Metadata]]


def opened(content: bytes) -> tuple[Tensors, Metadata]:
    """The tensors of a file, and its metadata without the hash."""
    metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
    del metadata["hash"]
    return safetensors.torch.load(content), metadata


def changed(content: bytes, change: Change) -> bytes:
    """The file after a change of its content, with a right hash."""
    tensors, metadata = change(*opened(content))
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items()}
    return safetensors.torch.save(
        tensors, metadata | {"hash": block_files._hash(tensors, metadata)}
    )


def with_header(content: bytes, change: Callable[[str], str]) -> bytes:
    """The file with another header, whose length is right."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = change(content[8:end].decode()).encode()
    return len(header).to_bytes(8, "little") + header + content[end:]


# ------------------------------------------------------------------------ files with a right hash


def said(key: str, value: str) -> Change:
    return lambda tensors, metadata: (tensors, {**metadata, key: value})


def formed(change: Callable[[list[Any]], list[Any]]) -> Change:
    """Changes the `form_of` each layer in the metadata."""

    def apply(tensors: Tensors, metadata: Metadata) -> tuple[Tensors, Metadata]:
        layers = {place: change(form) for place, form in json.loads(metadata["layers"]).items()}
        return tensors, {**metadata, "layers": json.dumps(layers)}

    return apply


def mapped(change: Callable[[Tensor], Tensor]) -> Change:
    return lambda tensors, metadata: ({name: change(x) for name, x in tensors.items()}, metadata)


def both(first: Change, second: Change) -> Change:
    return lambda tensors, metadata: second(*first(tensors, metadata))


def without_last(tensors: Tensors, metadata: Metadata) -> tuple[Tensors, Metadata]:
    layers = json.loads(metadata["layers"])
    last, _ = layers.popitem()
    kept = {name: x for name, x in tensors.items() if name.rpartition(".")[0] != last}
    return kept, {**metadata, "layers": json.dumps(layers)}


def _split(x: Tensor) -> Tensor:
    """Twice as many heads of half the width, in as many bytes."""
    return x.reshape(x.shape[0], 2 * x.shape[1], *x.shape[2:-1], x.shape[-1] // 2)


_DEEP = "[" * 100_000
_SEALED: dict[str, Change] = {
    "no layers": lambda tensors, metadata: ({}, {**metadata, "layers": "{}"}),
    "a layer less": without_last,
    "more heads": both(mapped(_split), formed(lambda form: [2 * form[0], form[1] // 2, *form[2:]])),
    "no such dtype": formed(lambda form: [*form[:2], ["load", "load"], form[3]]),
    "many heads": formed(lambda form: [1 << 62, *form[1:]]),
    "layers that are nested": said("layers", _DEEP),
    "fewer blocks": mapped(lambda x: x[:-1]),
    "more blocks": mapped(lambda x: torch.cat([x, x])),
    "an empty tensor": lambda tensors, metadata: ({**tensors, "extra": torch.empty(0)}, metadata),
    "another name": said("name", "other"),
    "another format": said("format", "hf_paged prefix 0"),
}
_IDS: dict[str, Change] = {  # of saved prefixes of 48 tokens
    "no ids": said("token_ids", "[]"),
    "other ids": said("token_ids", json.dumps(list(range(48)))),
    "fewer ids": said("token_ids", "[1, 2, 3]"),
    "words": said("token_ids", json.dumps(["a"] * 48)),
    "truths": said("token_ids", json.dumps([True] * 48)),
    "large ids": said("token_ids", json.dumps([1 << 70] * 48)),
    "very large ids": said("token_ids", "[" + "9" * 5000 + "]"),
    "nested ids": said("token_ids", _DEEP),
    "a namespace with a dict": said("namespace", '[{"a": 1}, null]'),
    "another namespace": said("namespace", '["other", "tenant"]'),
}

Changes = dict[str, Callable[[bytes], bytes]]
SEALED: Changes = {name: partial(changed, change=change) for name, change in _SEALED.items()}
IDS: Changes = {name: partial(changed, change=change) for name, change in _IDS.items()}

# ------------------------------------------------------------------------------------- other bytes


def _replaced(pattern: str, text: str) -> Callable[[bytes], bytes]:
    return lambda content: with_header(content, lambda header: re.sub(pattern, text, header))


def _overlap(text: str) -> str:
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    header[names[-1]]["data_offsets"][0] = 0
    return json.dumps(header)


RAW: Changes = {
    "empty": lambda content: b"",
    "a header of 2**63 bytes": lambda content: (1 << 63).to_bytes(8, "little") + content[8:],
    "a header as long as the file": lambda content: (
        len(content).to_bytes(8, "little") + content[8:]
    ),
    "no header": lambda content: bytes(8) + content[8:],
    "truncated": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\0",
    "overlapping tensors": lambda content: with_header(content, _overlap),
    "offsets that are NaN": _replaced(r'offsets":\[\d+', 'offsets":[NaN'),
    "no metadata": _replaced(r'"__metadata__":\{[^}]*\},?', ""),
    "a nested header": lambda content: with_header(content, lambda header: _DEEP),
    "a header that is a list": lambda content: with_header(content, lambda header: "[]"),
    "metadata that are a list": lambda content: with_header(
        content, lambda header: '{"__metadata__":["format"]}'
    ),
    "a pickle": lambda content: pickle.dumps({"a": torch.zeros(3)}),
}


def put(kind: str, path: Path, num_bytes: int = 10 << 30) -> None:
    """Puts something else in the place of a file."""
    path.unlink(missing_ok=True)
    if kind == "directory":
        path.mkdir()
    elif kind == "FIFO":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    else:  # a sparse file
        path.write_bytes((1000).to_bytes(8, "little"))
        os.truncate(path, num_bytes)
