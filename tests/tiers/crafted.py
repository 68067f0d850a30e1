"""Files of blocks that were crafted: other content than a model's blocks, under a right hash where
there is one."""

from __future__ import annotations

import json
import os
import pickle
import random
import re
from collections.abc import Callable
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


def last_layer(new: str | None) -> Change:
    """Renames the last layer, or leaves it out."""

    def apply(tensors: Tensors, metadata: Metadata) -> tuple[Tensors, Metadata]:
        layers = json.loads(metadata["layers"])
        last, form = layers.popitem()
        kept = {name: x for name, x in tensors.items() if name.rpartition(".")[0] != last}
        if new is not None:
            layers[new] = form
            parts = {name.rpartition(".")[2]: x for name, x in tensors.items() if name not in kept}
            kept |= {f"{new}.{part}": x for part, x in parts.items()}
        return kept, {**metadata, "layers": json.dumps(layers)}

    return apply


def of_dtype(name: str) -> Change:
    return formed(lambda form: [form[0], form[1], [name, name], form[3]])


def _split(x: Tensor) -> Tensor:
    """Twice as many heads of half the width, in as many bytes."""
    return x.reshape(x.shape[0], 2 * x.shape[1], *x.shape[2:-1], x.shape[-1] // 2)


_DEEP = "[" * 100_000
SEALED: dict[str, Change] = {
    "no layers": lambda tensors, metadata: ({}, {**metadata, "layers": "{}"}),
    "a layer less": last_layer(None),
    "another index": last_layer("0.77"),
    "another group": last_layer("7.0"),
    "a negative index": last_layer("0.-1"),
    "more heads": both(mapped(_split), formed(lambda form: [2 * form[0], form[1] // 2, *form[2:]])),
    "integers": both(mapped(lambda x: x.view(torch.int32)), of_dtype("int32")),
    "half precision": both(mapped(torch.Tensor.half), of_dtype("float16")),
    "half precision in the metadata": of_dtype("float16"),
    "no such dtype": of_dtype("load"),
    "heads that are NaN": formed(lambda form: [float("nan"), *form[1:]]),
    "many heads": formed(lambda form: [1 << 62, *form[1:]]),
    "quantized": formed(lambda form: [*form[:3], [8, "int8"]]),
    "layers that are nested": said("layers", _DEEP),
    "layers that are a list": said("layers", "[1, 2]"),
    "fewer blocks": mapped(lambda x: x[:-1]),
    "more blocks": mapped(lambda x: torch.cat([x, x])),
    "blocks of other sizes": mapped(lambda x: x.transpose(1, 2)),
    "an empty tensor": lambda tensors, metadata: ({**tensors, "extra": torch.empty(0)}, metadata),
    "a tensor more": lambda tensors, metadata: ({**tensors, "0.0.2": torch.zeros(3)}, metadata),
    "another name": said("name", "other"),
    "another format": said("format", "hf_paged prefix 0"),
}
IDS: dict[str, Change] = {  # of saved prefixes of 48 tokens
    "no ids": said("token_ids", "[]"),
    "other ids": said("token_ids", json.dumps(list(range(48)))),
    "fewer ids": said("token_ids", "[1, 2, 3]"),
    "words": said("token_ids", json.dumps(["a"] * 48)),
    "lists": said("token_ids", json.dumps([[1]] * 48)),
    "truths": said("token_ids", json.dumps([True] * 48)),
    "NaN": said("token_ids", json.dumps([float("nan")] * 48)),
    "large ids": said("token_ids", json.dumps([1 << 70] * 48)),
    "very large ids": said("token_ids", "[" + "9" * 5000 + "]"),
    "nested ids": said("token_ids", _DEEP),
    "a number": said("token_ids", "48"),
    "a namespace with a dict": said("namespace", '[{"a": 1}, null]'),
    "a namespace that is NaN": said("namespace", "[NaN, null]"),
    "a nested namespace": said("namespace", _DEEP),
    "another namespace": said("namespace", '["other", "tenant"]'),
}

# ------------------------------------------------------------------------------------- other bytes


def _replaced(pattern: str, text: str) -> Callable[[bytes], bytes]:
    return lambda content: with_header(content, lambda header: re.sub(pattern, text, header))


def _overlap(text: str) -> str:
    header = json.loads(text)
    names = [name for name in header if name != "__metadata__"]
    header[names[-1]]["data_offsets"][0] = 0
    return json.dumps(header)


RAW: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda content: b"",
    "seven bytes": lambda content: content[:7],
    "a header of 2**63 bytes": lambda content: (1 << 63).to_bytes(8, "little") + content[8:],
    "a header of 2**64 - 1 bytes": lambda content: b"\xff" * 8 + content[8:],
    "a header as long as the file": lambda content: (
        len(content).to_bytes(8, "little") + content[8:]
    ),
    "no header": lambda content: bytes(8) + content[8:],
    "truncated": lambda content: content[:-1],
    "a byte more": lambda content: content + b"\0",
    "overlapping tensors": lambda content: with_header(content, _overlap),
    "offsets that are NaN": _replaced(r'offsets":\[\d+', 'offsets":[NaN'),
    "sizes that are NaN": _replaced(r'shape":\[\d+', 'shape":[NaN'),
    "negative sizes": _replaced(r'shape":\[', 'shape":[-'),
    "no metadata": _replaced(r'"__metadata__":\{[^}]*\},?', ""),
    "a nested header": lambda content: with_header(content, lambda header: _DEEP),
    "a header that is a list": lambda content: with_header(content, lambda header: "[]"),
    "metadata that are a list": lambda content: with_header(
        content, lambda header: '{"__metadata__":["format"]}'
    ),
    "a pickle": lambda content: pickle.dumps({"a": torch.zeros(3)}),
    "text": lambda content: b"hf_paged prefix 1\n" * 100,
}


def mutated(content: bytes, draw: random.Random) -> bytes:
    """A file at random: other bytes, another length, other fields of the header, or other content
    with a right hash."""
    kind = draw.choice(["bytes", "length", "header", "field", "sealed", "raw"])
    end = 8 + int.from_bytes(content[:8], "little")
    if kind == "bytes":
        mutable = bytearray(content)
        for _ in range(draw.randint(1, 8)):
            mutable[draw.randrange(draw.choice([8, end, len(content)]))] = draw.randrange(256)
        return bytes(mutable)
    if kind == "length":
        return content[: draw.randrange(len(content))] + bytes(draw.choice([0, 0, 1, 8, 5000]))
    if kind == "header":  # one number or word of it
        found = draw.choice(list(re.finditer(r"\w+", content[8:end].decode())))
        value = draw.choice(
            ["NaN", "-1", "0", "null", "1e400", str(1 << 63), "[]", "{}", '""', "F64", "x"]
        )
        return with_header(
            content, lambda header: header[: found.start()] + value + header[found.end() :]
        )
    if kind == "field":
        _, metadata = opened(content)
        key = draw.choice(list(metadata))
        value = metadata[key]
        place = draw.randrange(len(value))
        text = draw.choice(["", "NaN", "[", "]", '"', "{", "9" * 30, "\\", "\0", value])
        return changed(
            content, said(key, value[:place] + text + value[place + draw.randrange(2) :])
        )
    if kind == "sealed":
        return changed(content, draw.choice([*SEALED.values(), *IDS.values()]))
    return draw.choice(list(RAW.values()))(content)


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
