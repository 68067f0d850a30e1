"""Operations that move block contents, and messages about them to processes that hold other shards
of the model."""

from __future__ import annotations

import ast
import pickle
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import hf_paged
from hf_paged.cache.groups import GroupSpec
from hf_paged.cache.memory import PagedMemory
from hf_paged.cache.swap import HostBlocks, copy_out, put_back
from hf_paged.config import PagedConfig

# Functions that write to blocks, except the forwards' `KVBlocks.store`, and their callers.
WRITERS: dict[str, set[str]] = {
    "put_blocks": {
        "HostLayer.put_back",
        "MappedStorage.after_in_child",  # a different process
    },
    "copy_blocks": {
        "GroupMemory.copy_blocks",  # mirrored
        "MappedStorage.copy_blocks",  # called by it
        "BlockManager.flush_copies",  # both are called by the one before
        "BlockManager.extend",
        "BlockCopier._launch",  # of tensors
    },
    "put_back": {
        "put_back",
        "PrefixStore.put_back",
        "BlockSwapper.swap_in",
        "CacheRows.__setstate__",  # a separate memory
        "restore_path",
    },
    "clear": {"GroupMemory.release"},  # of a storage
}


def functions(tree: ast.Module) -> Iterator[tuple[str, ast.AST]]:
    """Functions of a module and methods of its classes, by their names."""
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            yield from ((f"{node.name}.{x.name}", x) for x in node.body if hasattr(x, "name"))
        elif isinstance(node, ast.FunctionDef):
            yield node.name, node


@pytest.mark.slow
def test_nothing_else_writes_to_blocks() -> None:
    """A new caller here is either `mirrored`, or uses a memory that is not shared with other
    processes."""
    found, mirrored = defaultdict[str, set[str]](set), set()
    for path in Path(hf_paged.__file__).parent.rglob("*.py"):
        for function, node in functions(ast.parse(path.read_text())):
            if "mirrored" in map(ast.unparse, getattr(node, "decorator_list", ())):
                mirrored.add(function.rpartition(".")[2])
            calls = [ast.unparse(x.func) for x in ast.walk(node) if isinstance(x, ast.Call)]
            for called in calls:
                name = called.rpartition(".")[2]
                if name in WRITERS and (name != "clear" or called.endswith("storage.clear")):
                    found[name].add(function)
    assert found == WRITERS
    assert mirrored == {"copy_blocks", "release", "copy_out", "put_back"}


class Told(list[Any]):
    def moved(self, move: Any, group: Any, arguments: tuple[Any, ...], result: Any) -> None:
        assert pickle.loads(pickle.dumps(move)) is move  # as it is sent
        self.append((move, group.spec, arguments, result))


@pytest.mark.parametrize("window", [None, 16])
def test_a_mirror_that_does_what_it_is_told_holds_the_same(window: int | None) -> None:
    told: Any = Told()
    here = PagedMemory(PagedConfig(block_size=8), processes=told)
    there = PagedMemory(PagedConfig(block_size=8))
    spec, states = GroupSpec(window=window), torch.empty(1, 2, 0, 4)
    groups = [memory.group(spec) for memory in (here, there)]
    for group in groups:
        group.take(4)
        group.layer(0, states, states, num_layers=1, num_new_tables=None)
        for tensor in group.storage.layers[0].data:
            tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape))
    own, other = groups
    own.copy_blocks([(0, 1), (2, 3)])
    host = copy_out(own, [1, 2])
    put_back(own, host, {0: 0, 1: 1})
    assert [move for move, *_ in told] == [type(own).copy_blocks, copy_out, put_back]
    results: dict[int, HostBlocks] = {}
    for move, group_spec, arguments, result in told:
        mirrored = [results.get(id(x), x) for x in arguments]
        results[id(result)] = move(there.group(group_spec), *mirrored)
    for mine, its in zip(own.storage.layers[0].data, other.storage.layers[0].data):
        assert torch.equal(mine[:4], its[:4]) and not torch.equal(mine[0], mine[2])
    own.pool.release([0, 1, 2, 3])
    assert here.release() and told[-1][0] == type(own).release
