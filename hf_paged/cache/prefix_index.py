"""The prefix index: a tree that finds full blocks by their tokens. Holds no tensors; the pools
evict blocks."""

from __future__ import annotations

import functools
import hashlib
import marshal
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from .block_pool import BlockPool

MARSHAL_VERSION = 2  # later versions write bytes that also depend on refcounts
Offload = Callable[[int, int, bytes], None]
"""Called with the index of the layer group, the id and the digest of an evicted block."""


class Link(NamedTuple):
    """The tokens of one node on a path, and the node itself, if it exists."""

    tokens: tuple[Hashable, ...]
    # if `find` got `tier_has`: hash of these tokens, all earlier ones and the namespace, the same
    # in every process; otherwise unused
    digest: bytes
    node: Node | None


class Node:
    """`node_size` tokens that follow its ancestors' tokens, and for each layer group the block
    that ends with them, if the index has one. The root of a namespace has no tokens and is its own
    parent."""

    __slots__ = ("block_ids", "children", "digest", "epoch", "namespace", "parent", "tokens")

    def __init__(
        self,
        parent: Node | None,
        tokens: tuple[Hashable, ...],
        num_groups: int,
        namespace: Hashable = None,
    ) -> None:
        self.parent: Node | None = parent or self  # `None` once removed from the index
        self.tokens = tokens
        self.namespace = namespace
        self.children: dict[tuple[Hashable, ...], Node] = {}
        self.block_ids: list[int | None] = [None] * num_groups
        self.epoch = sys.maxsize  # of the oldest sequence that filled one of its blocks
        self.digest = b""  # `Link.digest`, once computed


class PrefixIndex:
    """Finds blocks by their tokens and all earlier tokens (prefix caching as in SGLang's
    RadixAttention, arXiv 2312.07104, section 3, but by whole blocks). A lookup of the pools' blocks
    compares tokens, not just hashes; blocks in a tier are found by digest. If several blocks have
    the same content, only the first is registered. A node that loses its block in a full-attention
    group is removed with its subtree; in a window group, nodes may lack blocks. A group of states
    is a window group that needs only the last node's block: the snapshot of the states after it. A
    node has `node_size` tokens, the smallest block size. A block of `ratios[group]` times that size
    belongs to the last of the nodes that it spans."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None],
        node_size: int,
        ratios: Sequence[int],
    ) -> None:
        self.node_size = node_size
        self._ratios = ratios
        # distance, in nodes, between positions at which blocks of all groups end
        self.stride = max(self._ratios, default=1)
        self._pools = pools
        self._windows = windows
        self._roots: dict[Hashable, Node] = {}
        self._registered: list[dict[int, Node]] = [{} for _ in pools]
        groups = range(len(self._pools))
        self._on_evict = [functools.partial(self._handle_eviction, group) for group in groups]
        # `(group, block_id)` of blocks registered since `begin_step`, which are not computed yet;
        # `None` outside of a step
        self._step_blocks: dict[tuple[int, int], None] | None = None
        # called with each block that an eviction is about to remove, while the block still has its
        # content, unless the block is not computed yet or has no digest; `None`: no function
        self.offload: Offload | None = None

    def root(self, namespace: Hashable) -> Node:
        """Returns the root node of a namespace, for `add`."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, (), len(self._pools), namespace)
        return self._roots[namespace]

    def needed_nodes(self, group: int, num_nodes: int) -> range:
        """Returns the indices of the nodes, among the first `num_nodes` of a path, whose block in
        the group is visible to the first query after these nodes."""
        window = self._windows[group]
        ratio = self._ratios[group]
        first_visible = 0
        if window is not None:
            first_visible = max(0, num_nodes * self.node_size - window + 1)
        first_block = first_visible // (self.node_size * ratio)
        first_node = (first_block + 1) * ratio - 1
        return range(first_node, num_nodes, ratio)

    def find(
        self,
        token_ids: Sequence[Hashable],
        namespace: Hashable,
        max_nodes: int,
        tier_has: Callable[[int, bytes], bool] | None = None,
        ignored_group: int | None = None,
    ) -> list[Link]:
        """Returns the longest path along `token_ids`, of at most `max_nodes` nodes, from which a
        sequence can continue: all blocks that its next query sees exist, except perhaps in group
        `ignored_group`. With `tier_has(group, digest)`, blocks in the tier count as existing."""
        node = self._roots.get(namespace)
        digest = namespace_digest(namespace)
        links: list[Link] = []
        num_usable = 0
        # consecutive existing blocks of each group that end at the last link
        num_present = [0] * len(self._pools)
        while len(links) < max_nodes:
            first = len(links) * self.node_size
            tokens = tuple(token_ids[first : first + self.node_size])
            if node is not None:
                node = node.children.get(tokens)
            if tier_has is not None:
                digest = _next_digest(digest, tokens) if node is None else self.digest(node)
            if not digest or (tier_has is None and node is None):
                break
            links.append(Link(tokens, digest, node))
            num_links = len(links)
            incomplete_groups = []
            for group, ratio in enumerate(self._ratios):
                if num_links % ratio:
                    continue  # no block of the group ends here
                exists = node is not None and node.block_ids[group] is not None
                if not exists and tier_has is not None:
                    exists = tier_has(group, digest)
                if exists or group == ignored_group:
                    num_present[group] += 1
                else:
                    num_present[group] = 0
                if len(self.needed_nodes(group, num_links)) > num_present[group]:
                    incomplete_groups.append(group)
            if not incomplete_groups and num_links % self.stride == 0:
                num_usable = num_links
            elif any(self._windows[group] is None for group in incomplete_groups):
                break
        return links[:num_usable]

    def digest(self, node: Node) -> bytes:
        """Returns `Link.digest` of a node; `b""` if the tokens up to the node's end have no hash
        that is the same in every process."""
        path = []
        while not node.digest and node.parent is not None and node.parent is not node:
            path.append(node)
            node = node.parent
        digest = namespace_digest(node.namespace) if node.parent is node else node.digest
        for descendant in reversed(path):
            digest = descendant.digest = _next_digest(digest, descendant.tokens)
        return digest

    def add(
        self,
        parent: Node,
        tokens: tuple[Hashable, ...],
        block_ids: Sequence[int | None],
        epoch: int = 0,
    ) -> Node:
        """Returns the node of `tokens` after `parent`, created if missing. In groups where the node
        has no block yet, registers the given blocks, which a sequence of this epoch filled, unless
        they already belong to a node."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, len(self._pools))
        for group, block_id in enumerate(block_ids):
            if block_id is None or node.block_ids[group] is not None:
                continue
            registered = self._registered[group]
            if block_id in registered:
                continue
            self._pools[group].keep(block_id, self._on_evict[group])
            registered[block_id] = node
            node.block_ids[group] = block_id
            node.epoch = min(node.epoch, epoch)
            if self._step_blocks is not None:
                self._step_blocks[group, block_id] = None
        return node

    def begin_step(self) -> None:
        """Begins to record which blocks are registered, for `undo_step`."""
        self._step_blocks = {}

    def end_step(self) -> None:
        """Marks the blocks registered since `begin_step` as computed."""
        self._step_blocks = None

    def undo_step(self) -> None:
        """Removes the blocks registered since `begin_step`, which were never computed, and ends the
        step."""
        for group, block_id in self._step_blocks or ():
            if block_id in self._registered[group]:
                self._pools[group].drop(block_id)
                self._unregister(group, block_id)
        self._step_blocks = None

    def clear(self) -> None:
        """Removes all nodes."""
        self.remove_before(sys.maxsize + 1)
        self._roots.clear()

    def recover(self) -> None:
        """Removes all nodes, even if an exception left them half changed. The caller must then
        recount the pools."""
        self._roots, self._registered, self._step_blocks = {}, [{} for _ in self._pools], None
        for pool, on_evict in zip(self._pools, self._on_evict):
            pool.forget_kept_by(on_evict)

    def remove_before(self, epoch: int) -> None:
        """Removes every node that belongs to an epoch before `epoch`, with its subtree."""
        pending = list(self._roots.values())
        while pending:
            parent = pending.pop()
            for child in list(parent.children.values()):
                if child.epoch < epoch:
                    self._remove(child)
                else:
                    pending.append(child)

    def _handle_eviction(self, group: int, block_id: int) -> None:
        """Unregisters a block that the pool evicts. First offloads it while its content is intact.
        In a full-attention group, this removes the node's whole subtree, so the subtree's blocks in
        all groups are offloaded as well."""
        is_subtree = self._windows[group] is None
        groups = range(len(self._pools)) if is_subtree else (group,)
        pending = [self._registered[group][block_id]]
        try:
            while pending and self.offload is not None:
                node = pending.pop()
                digest = self.digest(node)
                for index in groups:
                    node_block = node.block_ids[index]
                    is_computed = (index, node_block) not in (self._step_blocks or ())
                    if digest and node_block is not None and is_computed:
                        self.offload(index, node_block, digest)
                if is_subtree:
                    pending += node.children.values()
        finally:
            self._unregister(group, block_id)

    def _unregister(self, group: int, block_id: int) -> None:
        """Removes from the index a block that the pool no longer keeps, and the nodes that need the
        block or become empty."""
        node = self._registered[group].pop(block_id)
        node.block_ids[group] = None
        if self._windows[group] is None:
            self._remove(node)
        else:
            self._remove_empty(node)

    def _remove(self, node: Node) -> None:
        """Removes a node, which is not a root, with its subtree, and then each ancestor that
        becomes empty."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.tokens]
        pending = [node]
        while pending:
            node_to_remove = pending.pop()
            pending.extend(node_to_remove.children.values())
            node_to_remove.children, node_to_remove.parent = {}, None
            for group, block_id in enumerate(node_to_remove.block_ids):
                if block_id is not None:
                    del self._registered[group][block_id]
                    self._pools[group].drop(block_id)
            node_to_remove.block_ids = [None] * len(self._pools)
        self._remove_empty(parent)

    def _remove_empty(self, node: Node) -> None:
        """Removes the node if it has neither children nor blocks, and then each ancestor that
        becomes empty."""
        while node.parent is not None and node.parent is not node and not node.children:
            if any(block_id is not None for block_id in node.block_ids):
                return
            parent, node.parent = node.parent, None
            del parent.children[node.tokens]
            node = parent
        if node.parent is node and not node.children:
            # otherwise the roots of unused namespaces would accumulate
            self._roots.pop(node.namespace, None)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless registered blocks and nodes agree, the pools keep these
        blocks, and every node is its parent's child and has its full-attention blocks."""
        nodes: list[dict[int, Node]] = [{} for _ in self._pools]
        pending = [(root, 1) for root in self._roots.values()]
        while pending:
            node, depth = pending.pop()
            for tokens, child in node.children.items():
                is_linked = child.parent is node and child.tokens == tokens
                if not is_linked or len(tokens) != self.node_size:
                    raise AssertionError(
                        f"node {child.tokens} is not the child that its parent lists, or does not"
                        f" have {self.node_size} tokens"
                    )
                pending.append((child, depth + 1))
                for group, block_id in enumerate(child.block_ids):
                    if block_id is not None:
                        nodes[group][block_id] = child
                        continue
                    ends_block = depth % self._ratios[group] == 0
                    if self._windows[group] is None and ends_block:
                        raise AssertionError(
                            f"node {child.tokens} lacks its block in group {group}"
                        )
        for group, pool in enumerate(self._pools):
            if nodes[group] != self._registered[group]:
                raise AssertionError(
                    f"group {group}: blocks {sorted(self._registered[group])} are registered, but"
                    f" the nodes have {sorted(nodes[group])}"
                )
            unkept_ids = [block_id for block_id in nodes[group] if not pool.is_kept(block_id)]
            if unkept_ids:
                raise AssertionError(
                    f"group {group}: blocks {unkept_ids} are registered, but not kept"
                )


def namespace_digest(namespace: Hashable) -> bytes:
    """Hashes the `repr` of a namespace, which consists of text, numbers, `None` and tuples (named
    or not)."""
    content = repr(namespace).encode()
    return hashlib.blake2b(content, digest_size=16).digest()


def _next_digest(digest: bytes, tokens: tuple[Any, ...]) -> bytes:
    try:
        content = marshal.dumps(tokens, MARSHAL_VERSION)
    except ValueError:  # a type that marshal does not support
        return b""
    if not digest:
        return b""
    return hashlib.blake2b(digest + content, digest_size=16).digest()
