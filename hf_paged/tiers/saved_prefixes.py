"""Saves the cached blocks of one prompt of an engine to a file, and loads them. `block_files.py`
defines the format of the file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any

from ..batching.engine_core import EngineCore
from ..batching.execution.executor import StableSpan
from ..batching.loop import StepLoop
from ..batching.prompt_forms import Prompt, prompt_ids, split_inputs
from ..cache.block_pool import OutOfBlocksError
from ..config import PrefixTiers, is_whole
from ..interrupts import restoring
from ..topics import Topic
from .block_files import BlockFile, CorruptFileError, Layers, parsing, to_bytes, write_private
from .prefixes import TierError, restore_path
from .store import PrefixStore, reason_against_saving


@restoring
def _between_steps(core: EngineCore) -> Iterator[tuple[StepLoop, PrefixStore]]:
    """A context in which the engine takes no step. Verifies the cached blocks against a fingerprint
    of the current weights, then yields the engine's loop and a store that names and copies the
    loop's blocks. Raises `ValueError` if the model's blocks cannot be saved, or if changes of its
    weights cannot be detected."""
    with core.lock:
        core.pauses.wait()
        loop = core.get_loop()
        reason = reason_against_saving(core.memory, loop.blocks)
        if reason is not None:
            raise ValueError(
                f"prefixes of {type(core.model).__name__} cannot be saved or loaded: {reason}"
            )
        executor = loop.executor
        is_idle = not core.requests
        span = StableSpan()
        if is_idle:
            executor.begin()
        try:
            executor.open(span)
            with executor.lock:
                executor.guard.verify()
            if core.memory.fingerprint is None:
                raise ValueError(
                    Topic.PREFIX_CACHE(
                        f"changes of the weights of {type(core.model).__name__} cannot be detected"
                    )
                )
            with core.memory.lock:
                blocks, layout = loop.blocks, core.layout
                yield loop, PrefixStore(core.model, core.memory, blocks, PrefixTiers(), layout)
            executor.commit(span)
        finally:
            executor.close(span)
            if is_idle:
                executor.go_idle()


def _path_in_folder(path: Any) -> Path:
    """Returns `path` as a `Path`. Raises `OSError` if the path's folder is missing, or if the path
    names a folder."""
    target = Path(os.fspath(path))
    if not target.parent.is_dir():
        raise FileNotFoundError(errno.ENOENT, "there is no such folder", str(target.parent))
    if target.is_dir():
        raise IsADirectoryError(
            errno.EISDIR, "the path is a folder, but must name a file", str(target)
        )
    return target


def save(
    core: EngineCore,
    prompt: Prompt,
    tokenizer: Any,
    compute: Callable[[list[int]], tuple[Hashable, ...]],
    path: Any,
) -> int:
    """Implements `rooms.TiersRoom.save`."""
    text, inputs = split_inputs(prompt, None)
    if inputs is not None:
        names = ", ".join(map(str, inputs))
        raise ValueError(f"`prompt` has {names}: only prompts of plain token ids can be saved")
    ids = prompt_ids(text, tokenizer)
    target = _path_in_folder(path)
    with core.keeping_pool():
        namespace = compute(ids)
        with _between_steps(core) as (loop, store):
            manager, rope = loop.blocks, loop.scheduler.rope
            num_tokens = len(ids) // manager.block_size * manager.block_size
            if not num_tokens:
                raise ValueError(
                    f"the prompt has {len(ids)} tokens, but only full blocks of"
                    f" {manager.block_size} tokens can be saved: pass a longer prompt, or lower"
                    " `block_size`"
                )
            if rope is not None and rope.factors_id(len(ids)):
                raise ValueError(
                    "this prompt cannot be saved: its rotary factors depend on the length of the"
                    " whole prompt"
                )
            num_nodes = num_tokens // manager.node_size
            links = manager.index.find(ids, namespace, num_nodes)
            nodes = [link.node for link in links if link.node is not None]
            if len(nodes) < num_nodes:
                raise OutOfBlocksError(
                    f"only {len(nodes) * manager.node_size:,} of the prompt's {num_tokens:,} tokens"
                    f" stayed in the pool: raise `num_blocks` ({core.config.num_blocks})"
                )
            layers_by_group: dict[int, Layers] = {}
            for group in range(len(manager.groups)):
                needed_nodes = manager.index.needed_nodes(group, num_nodes)
                block_ids = (nodes[index].block_ids[group] for index in needed_nodes)
                cached_ids = [block_id for block_id in block_ids if block_id is not None]
                if cached_ids:
                    layers_by_group[group] = store.copy_out(group, cached_ids)
            name = f"{store.weights_hash}/{manager.index.digest(nodes[-1]).hex()}"
    token_ids = json.dumps(ids[:num_tokens])
    content = to_bytes(layers_by_group, name, token_ids=token_ids, namespace=json.dumps(namespace))
    write_private(target, content)
    return num_tokens


def load(core: EngineCore, path: Any) -> int:
    """Implements `rooms.TiersRoom.load`. Raises `ValueError` if the file is not a saved prefix of
    the current model, or if the pool would be freed immediately; `OutOfBlocksError` if too few
    blocks are free; `OSError` if the file cannot be read; and `MemoryError`, `RuntimeError` or
    `ValueError` if copying fails."""
    try:
        with contextlib.closing(BlockFile(Path(os.fspath(path)))) as file:
            return _load(core, path, file)
    except CorruptFileError as error:
        raise ValueError(f"{path} is not a complete saved prefix: {error}") from error


def _load(core: EngineCore, path: Any, file: BlockFile) -> int:
    if not {"token_ids", "namespace"} <= file.metadata.keys():
        raise ValueError(f"{path} is a block of a tier's folder, not a saved prefix")
    with parsing():
        token_ids = json.loads(file.metadata["token_ids"])
        namespace = _to_tuples(json.loads(file.metadata["namespace"]))
        weights_hash, digest = file.metadata["name"].split("/")
        if not token_ids or not all(map(is_whole, token_ids)):
            raise CorruptFileError("its tokens are missing, or are not whole numbers")
    with core.keeping_pool(), _between_steps(core) as (loop, store):
        if not core.requests and core.config.idle_release_seconds == 0 and loop.blocks.tier is None:
            raise ValueError(
                "`idle_release_seconds` is 0, so the pool, including the loaded prefix, would be"
                " freed at once: raise it, load while a request is unfinished, or give"
                " `prefix_tiers` a folder"
            )
        if weights_hash != store.weights_hash:
            raise ValueError(
                f"{path} does not match the current state of this {type(core.model).__name__}: its"
                ' weights, code, dtype, adapters, `block_size` ("auto" may now choose another'
                " one), `kv_dtype` or `batch_invariant` differ, or only one of the two stores"
                " hidden states for `use_mtp`"
            )
        manager = loop.blocks
        num_nodes = len(token_ids) // manager.index.node_size
        # by group: the indices of the nodes whose blocks are visible to the token after the prefix
        node_indices = []
        expected_blocks = {}
        for group in range(len(manager.groups)):
            needed_nodes = manager.index.needed_nodes(group, num_nodes)
            node_indices.append(needed_nodes)
            if needed_nodes:
                expected_blocks[group] = (store.layers(group), len(needed_nodes))
        layers_by_group = file.read(expected_blocks)
        links = manager.index.find(token_ids, namespace, num_nodes, lambda group, digest: True)
        if len(links) * manager.node_size != len(token_ids) or links[-1].digest.hex() != digest:
            raise CorruptFileError("its tokens do not match its name")

        def read(group: int, node_index: int) -> Layers:
            row = node_indices[group].index(node_index)
            return _select_block(layers_by_group[group], row)

        failure = None
        with core.memory.changing():
            try:
                restore_path(store, manager, links, namespace, read)
            except TierError as error:  # raised below: inside, `changing` would recover
                failure = error
        if failure is not None:
            raise failure.cause from failure
    return len(token_ids)


def _to_tuples(value: Any) -> Any:
    """Converts nested lists from JSON back to tuples. Raises `CorruptFileError` for types that no
    namespace contains."""
    if not isinstance(value, (list, str, int, type(None))):
        raise CorruptFileError(f"its namespace contains {value!r}")
    return tuple(map(_to_tuples, value)) if isinstance(value, list) else value


def _select_block(layers: Layers, row: int) -> Layers:
    """Returns block `row` of each layer."""
    selected_layers: Layers = {}
    for index, layer in layers.items():
        selected_layers[index] = layer.like([tensor[row : row + 1] for tensor in layer.data])
    return selected_layers
