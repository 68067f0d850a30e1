"""The prefix index: a tree of token blocks, in which full blocks are found by their tokens. It
holds no tensors and leaves eviction to the pools."""

from __future__ import annotations

import functools
import hashlib
import marshal
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from .block_pool import BlockPool

MARSHAL_VERSION = 2  # its bytes depend only on values; later versions' also on reference counts
Offload = Callable[[int, int, bytes], None]
"""Called with the group, id and digest of an evicted block."""


class Link(NamedTuple):
    """One block of tokens on a path, whether or not the pool has it."""

    tokens: tuple[Hashable, ...]
    # hash of these tokens, all earlier ones and the namespace; the same in every process
    digest: bytes
    node: Node | None


class Node:
    """The tokens of one full block, after those of its ancestors, and for each layer group the
    block with their K/V, if it still exists. The root of a namespace has no tokens and is its own
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
    RadixAttention, arXiv 2312.07104, section 3, by whole blocks). A lookup compares tokens, never
    only hashes. Of several blocks with the same content only the first is registered. A node that
    loses its block in a full-attention group is removed with its subtree; in a window group blocks
    may be missing. A group of states is a window group that needs only the last block: the snapshot
    after its tokens. A node has `block_size` tokens, the smallest block size. A block of
    `ratios[group]` times that size belongs to the last of its nodes."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None],
        block_size: int,
        ratios: Sequence[int] | None = None,
    ) -> None:
        self.block_size = block_size
        self._ratios = [1] * len(pools) if ratios is None else list(ratios)
        # nodes between positions where blocks of all groups end
        self.stride = max(self._ratios, default=1)
        self._pools = list(pools)
        self._windows = list(windows)
        self._roots: dict[Hashable, Node] = {}
        self._registered: list[dict[int, Node]] = [{} for _ in pools]
        groups = range(len(self._pools))
        self._on_evict = [functools.partial(self._evicted, group) for group in groups]
        # (group, block id) registered since `begin_step`; `None` between steps
        self._step: dict[tuple[int, int], None] | None = None
        self._offload: Offload | None = None

    def offload_to(self, offload: Offload | None) -> None:
        """Sets the function that gets the group, id and digest of each evicted block, while the
        block still has its content."""
        self._offload = offload

    def root(self, namespace: Hashable) -> Node:
        """Returns the root node of a namespace, for `add`."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, (), len(self._pools), namespace)
        return self._roots[namespace]

    def needed_nodes(self, group: int, num_nodes: int) -> range:
        """Returns which of `num_nodes` nodes have blocks of the group that are visible to a query
        right after them."""
        window = self._windows[group]
        ratio = self._ratios[group]
        visible = 0
        if window is not None:
            visible = max(0, num_nodes * self.block_size - window + 1)
        first_block = visible // (self.block_size * ratio)
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
        """Returns the longest path of at most `max_nodes` nodes along `token_ids` after which a
        sequence can start, ignoring the blocks that it needs in group `ignored_group`. With
        `tier_has(group, digest)`, the path if the pools also had the tier's blocks."""
        node = self._roots.get(namespace)
        digest = namespace_digest(namespace)
        links: list[Link] = []
        usable = 0
        # consecutive existing blocks of each group, up to this node
        num_present = [0] * len(self._pools)
        while len(links) < max_nodes:
            first = len(links) * self.block_size
            tokens = tuple(token_ids[first : first + self.block_size])
            if node is not None:
                node = node.children.get(tokens)
            if tier_has is not None:
                digest = _next_digest(digest, tokens) if node is None else self.digest(node)
            if not digest or (tier_has is None and node is None):
                break
            links.append(Link(tokens, digest, node))
            num_links = len(links)
            incomplete = []
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
                    incomplete.append(group)
            if not incomplete and num_links % self.stride == 0:
                usable = num_links
            elif any(self._windows[group] is None for group in incomplete):
                break
        return links[:usable]

    def digest(self, node: Node) -> bytes:
        """Returns `Link.digest` of a node; empty if its tokens have no hash that is the same in
        every process."""
        path = []
        while not node.digest and node.parent is not None and node.parent is not node:
            path.append(node)
            node = node.parent
        digest = node.digest
        if not digest and node.parent is node:
            digest = namespace_digest(node.namespace)
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
        """Returns the node of `tokens` after `parent`, created if missing. Registers the given
        blocks, filled by a sequence of this epoch, in groups where the node has no block yet."""
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
            if self._step is not None:
                self._step[group, block_id] = None
        return node

    def begin_step(self) -> None:
        """Starts to record registrations, for `undo_step`."""
        self._step = {}

    def end_step(self) -> None:
        """Marks the blocks registered since `begin_step` as computed."""
        self._step = None

    def undo_step(self) -> None:
        """Removes the blocks registered since `begin_step`: they were never computed."""
        for group, block_id in self._step or ():
            if block_id in self._registered[group]:
                self._pools[group].drop(block_id)
                self._unregister(group, block_id)
        self._step = {}

    def clear(self) -> None:
        """Removes all nodes."""
        for root in self._roots.values():
            self._forget(root)
        self._roots.clear()

    def recover(self) -> None:
        """Removes everything, even if an exception left it half changed. The caller must then
        recount the pools."""
        self._roots, self._registered, self._step = {}, [{} for _ in self._pools], None
        for pool, on_evict in zip(self._pools, self._on_evict):
            pool.drop_all(on_evict)

    def forget_before(self, epoch: int) -> None:
        """Removes every node of an earlier epoch with its subtree."""
        pending = list(self._roots.values())
        while pending:
            parent = pending.pop()
            for child in list(parent.children.values()):
                if child.epoch < epoch:
                    self._forget(child)
                else:
                    pending.append(child)

    def _evicted(self, group: int, block_id: int) -> None:
        """Handles the eviction of a block, which still has its content."""
        try:
            if self._offload is not None:
                self._offload_subtree(self._registered[group][block_id], group, self._offload)
        finally:
            self._unregister(group, block_id)

    def _offload_subtree(self, node: Node, group: int, offload: Offload) -> None:
        """Offloads the blocks that are removed with this one: in full attention the whole
        subtree."""
        is_subtree = self._windows[group] is None
        groups: Sequence[int] = (group,)
        if is_subtree:
            groups = range(len(self._pools))
        pending = [node]
        while pending:
            removed = pending.pop()
            digest = self.digest(removed)
            if digest:
                for number in groups:
                    block_id = removed.block_ids[number]
                    if block_id is None:
                        continue
                    is_computed = self._step is None or (number, block_id) not in self._step
                    if is_computed:
                        offload(number, block_id, digest)
            if is_subtree:
                pending.extend(removed.children.values())

    def _unregister(self, group: int, block_id: int) -> None:
        """Removes a block that the pool no longer keeps from its node."""
        node = self._registered[group].pop(block_id)
        node.block_ids[group] = None
        if self._windows[group] is None:
            self._forget(node)
        else:
            self._forget_empty(node)

    def _forget(self, node: Node) -> None:
        """Removes a node with its subtree, and ancestors that become empty."""
        parent = node.parent
        assert parent is not None
        if parent is not node:
            del parent.children[node.tokens]
        pending = [node]
        while pending:
            removed = pending.pop()
            pending.extend(removed.children.values())
            removed.children, removed.parent = {}, None
            for group, block_id in enumerate(removed.block_ids):
                if block_id is not None:
                    del self._registered[group][block_id]
                    self._pools[group].drop(block_id)
            removed.block_ids = [None] * len(self._pools)
        if parent is not node:
            self._forget_empty(parent)

    def _forget_empty(self, node: Node) -> None:
        while node.parent is not None and node.parent is not node and not node.children:
            if any(block_id is not None for block_id in node.block_ids):
                return
            parent, node.parent = node.parent, None
            del parent.children[node.tokens]
            node = parent
        if node.parent is node and not node.children:
            # otherwise namespaces of past tenants would accumulate
            self._roots.pop(node.namespace, None)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless registered blocks and nodes agree, and every node is
        reachable and has its blocks."""
        nodes: list[dict[int, Node]] = [{} for _ in self._pools]
        pending = [(root, 1) for root in self._roots.values()]
        while pending:
            node, depth = pending.pop()
            for tokens, child in node.children.items():
                is_linked = child.parent is node and child.tokens == tokens
                if not is_linked or len(tokens) != self.block_size:
                    raise AssertionError(
                        f"node {child.tokens} is not the child that its parent lists"
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
                    f"group {group}: registered {sorted(self._registered[group])}, nodes"
                    f" {sorted(nodes[group])}"
                )
            lost = [block_id for block_id in nodes[group] if not pool.is_kept(block_id)]
            if lost:
                raise AssertionError(f"group {group}: blocks {lost} are registered but not kept")


def namespace_digest(namespace: Hashable) -> bytes:
    """Hashes the `repr` of a namespace, which consists of text, numbers and tuples (named or
    not)."""
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
