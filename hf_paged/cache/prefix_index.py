"""Which full blocks hold which tokens: a tree of token blocks. Plain Python: no tensors, no policy."""

from __future__ import annotations

import functools
import hashlib
import marshal
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from .block_pool import BlockPool

_MARSHAL_VERSION = 2  # bytes that depend on the values alone; later versions look at reference counts


class Link(NamedTuple):
    """One block of tokens on a path, in the pool or not."""

    tokens: tuple[Hashable, ...]
    digest: bytes  # of these tokens, all before them and their namespace: the same in every process
    node: Node | None


class Node:
    """The tokens of one full block after those of its ancestors, and the block of each layer group that holds their K
    and V, as far as one is still there; or, without tokens and its own parent, the root of a namespace's prefixes."""

    __slots__ = ("block_ids", "children", "digest", "epoch", "namespace", "parent", "tokens")

    def __init__(
        self, parent: Node | None, tokens: tuple[Hashable, ...], num_groups: int, namespace: Hashable = None
    ) -> None:
        self.parent: Node | None = parent or self  # None once the index has forgotten the node
        self.tokens, self.namespace = tokens, namespace
        self.children: dict[tuple[Hashable, ...], Node] = {}
        self.block_ids: list[int | None] = [None] * num_groups
        self.epoch = sys.maxsize  # of the oldest sequence whose block it names
        self.digest = b""  # of `Link`, once it was asked for


class PrefixIndex:
    """Finds blocks by the tokens they hold and all tokens before them (prefix caching as in SGLang's RadixAttention,
    arXiv 2312.07104, section 3, in steps of whole blocks). A look-up compares the tokens, never only their hash. Only
    the first of several blocks with the same content has a name. A node without its block in a full-attention group is
    forgotten with everything below it; in a window group blocks may be missing. A group of states is one with a window
    that needs the last block alone: the snapshot after its tokens. Nodes hold `block_size` tokens, as the smallest
    blocks do. A block of `ratios[group]` times that size is held by the last of its nodes."""

    def __init__(
        self,
        pools: Sequence[BlockPool],
        windows: Sequence[int | None],
        block_size: int,
        ratios: Sequence[int] | None = None,
    ) -> None:
        self.block_size = block_size
        self._ratios = [1] * len(pools) if ratios is None else list(ratios)
        self.stride = max(self._ratios, default=1)  # nodes from one where blocks of all groups end to the next
        self._pools, self._windows = list(pools), list(windows)
        self._roots: dict[Hashable, Node] = {}
        self._named: list[dict[int, Node]] = [{} for _ in pools]
        self._on_evict = [functools.partial(self._evicted, group) for group in range(len(self._pools))]
        # (group, block id) named since `begin_step`; `None` between steps
        self._step: dict[tuple[int, int], None] | None = None
        # told the group, the id and the digest of a computed block whose place is needed, while it has its content
        self.spill: Callable[[int, int, bytes], None] | None = None

    def root(self, namespace: Hashable) -> Node:
        """Where the prefixes of a namespace begin, for `add`."""
        if namespace not in self._roots:
            self._roots[namespace] = Node(None, (), len(self._pools), namespace)
        return self._roots[namespace]

    def needed(self, group: int, num_nodes: int) -> range:
        """Those of `num_nodes` nodes whose blocks of the group a query right behind them can see."""
        window, ratio = self._windows[group], self._ratios[group]
        visible = 0 if window is None else max(0, num_nodes * self.block_size - window + 1)
        return range((visible // (self.block_size * ratio) + 1) * ratio - 1, num_nodes, ratio)

    def find(
        self, token_ids: Sequence[Hashable], namespace: Hashable, max_nodes: int, without: int | None = None
    ) -> list[Node]:
        """The longest path of at most `max_nodes` nodes along `token_ids` behind which a sequence can start; or could,
        `without` what it needs of this group."""
        node: Node | None = self._roots.get(namespace)
        if node is None:
            return []
        size, usable = self.block_size, 0
        path: list[Node] = []
        present = [0] * len(self._pools)  # blocks in a row, up to and with this node's, that the group has
        while len(path) < max_nodes:
            found = node.children.get(tuple(token_ids[len(path) * size : (len(path) + 1) * size]))
            if found is None:
                break
            node = found
            path.append(node)
            can_start = len(path) % self.stride == 0
            for group, block_id in enumerate(node.block_ids):
                if len(path) % self._ratios[group] == 0:
                    present[group] = 0 if block_id is None else present[group] + 1
                    can_start &= group == without or len(self.needed(group, len(path))) <= present[group]
            if can_start:
                usable = len(path)
        return path[:usable]

    def reach(
        self, token_ids: Sequence[Hashable], namespace: Hashable, max_nodes: int, has: Callable[[int, bytes], bool]
    ) -> list[Link]:
        """As `find`, as if the pools had the blocks, too, that something below them has: `has(group, digest)`."""
        node, digest = self._roots.get(namespace), _first_digest(namespace)
        links: list[Link] = []
        usable, size, present = 0, self.block_size, [0] * len(self._pools)
        while len(links) < max_nodes:
            tokens = tuple(token_ids[len(links) * size : (len(links) + 1) * size])
            node = None if node is None else node.children.get(tokens)
            digest = (node is not None and node.digest) or _next_digest(digest, tokens)
            if not digest:
                break
            if node is not None:
                node.digest = digest
            links.append(Link(tokens, digest, node))
            missing = []
            for group in range(len(self._pools)):
                if (
                    self._windows[group] == 1 or len(links) % self._ratios[group]
                ):  # it needs no blocks, or none ends here
                    continue
                is_there = (node is not None and node.block_ids[group] is not None) or has(group, digest)
                present[group] = present[group] + 1 if is_there else 0
                if len(self.needed(group, len(links))) > present[group]:
                    missing.append(group)
            if not missing and len(links) % self.stride == 0:
                usable = len(links)
            elif any(self._windows[group] is None for group in missing):
                break
        return links[:usable]

    def digest(self, node: Node) -> bytes:
        """That of `Link`; empty if what names the tokens has no bytes that every process finds."""
        path = []
        while not node.digest and node.parent is not None and node.parent is not node:
            path.append(node)
            node = node.parent
        digest = node.digest or (_first_digest(node.namespace) if node.parent is node else b"")
        for each in reversed(path):
            digest = each.digest = _next_digest(digest, each.tokens)
        return digest

    def add(self, parent: Node, tokens: tuple[Hashable, ...], block_ids: Sequence[int | None], epoch: int = 0) -> Node:
        """The node of `tokens` behind `parent`; the block of each group that has one, which a sequence of this epoch
        filled, is named by it where no other is yet."""
        node = parent.children.get(tokens)
        if node is None:
            node = parent.children[tokens] = Node(parent, tokens, len(self._pools))
        for group, block_id in enumerate(block_ids):
            if node.block_ids[group] is None and block_id is not None and block_id not in self._named[group]:
                self._pools[group].keep(block_id, self._on_evict[group])
                self._named[group][block_id] = node
                node.block_ids[group] = block_id
                node.epoch = min(node.epoch, epoch)
                if self._step is not None:
                    self._step[group, block_id] = None
        return node

    def begin_step(self) -> None:
        """What is named from now on can be undone."""
        self._step = {}

    def end_step(self) -> None:
        """What was named is computed."""
        self._step = None

    def undo_step(self) -> None:
        """Forgets the names given since `begin_step`: the content of those blocks was never computed."""
        for group, block_id in self._step or ():
            if block_id in self._named[group]:
                self._pools[group].drop(block_id)
                self._unname(group, block_id)
        self._step = {}

    def clear(self) -> None:
        """Forgets everything."""
        for root in self._roots.values():
            self._forget(root)
        self._roots.clear()

    def forget_before(self, epoch: int) -> None:
        """Forgets every node of an earlier epoch, with all below it."""
        pending = list(self._roots.values())
        while pending:
            for child in list(pending.pop().children.values()):
                if child.epoch < epoch:
                    self._forget(child)
                else:
                    pending.append(child)

    def _evicted(self, group: int, block_id: int) -> None:
        """The pool gives this block to others, who have not written to it yet."""
        try:
            if self.spill is not None:
                self._spill(self._named[group][block_id], group)
        finally:
            self._unname(group, block_id)

    def _spill(self, node: Node, group: int) -> None:
        """Tells of the blocks that go with this one: in full attention all behind it."""
        assert self.spill is not None
        pending = [node]
        while pending:
            lost = pending.pop()
            digest = self.digest(lost)
            groups = range(len(self._pools)) if self._windows[group] is None else (group,)
            for each in groups if digest else ():
                block_id = lost.block_ids[each]
                if block_id is not None and (self._step is None or (each, block_id) not in self._step):
                    self.spill(each, block_id, digest)
            if self._windows[group] is None:
                pending.extend(lost.children.values())

    def _unname(self, group: int, block_id: int) -> None:
        """The pool no longer keeps this block."""
        node = self._named[group].pop(block_id)
        node.block_ids[group] = None
        if self._windows[group] is None:
            self._forget(node)
        else:
            self._forget_empty(node)

    def _forget(self, node: Node) -> None:
        """Forgets a node and all below it; nodes above that led nowhere else go too."""
        parent = node.parent
        assert parent is not None
        if parent is not node:
            del parent.children[node.tokens]
        pending = [node]
        while pending:
            lost = pending.pop()
            pending.extend(lost.children.values())
            lost.children, lost.parent = {}, None
            for group, block_id in enumerate(lost.block_ids):
                if block_id is not None:
                    del self._named[group][block_id]
                    self._pools[group].drop(block_id)
            lost.block_ids = [None] * len(self._pools)
        if parent is not node:
            self._forget_empty(parent)

    def _forget_empty(self, node: Node) -> None:
        while node.parent is not None and node.parent is not node and not node.children:
            if any(block_id is not None for block_id in node.block_ids):
                return
            parent, node.parent = node.parent, None
            del parent.children[node.tokens]
            node = parent
        if node.parent is node and not node.children:  # tenants come and go
            self._roots.pop(node.namespace, None)

    def check_integrity(self) -> None:
        """Raises `AssertionError` unless names and nodes agree, and every node can be reached and has its blocks."""
        seen: list[dict[int, Node]] = [{} for _ in self._pools]
        pending = [(root, 1) for root in self._roots.values()]
        while pending:
            node, depth = pending.pop()
            for tokens, child in node.children.items():
                if child.parent is not node or child.tokens != tokens or len(tokens) != self.block_size:
                    raise AssertionError(f"node {child.tokens} is not where its parent looks for it")
                pending.append((child, depth + 1))
                for group, block_id in enumerate(child.block_ids):
                    if block_id is not None:
                        seen[group][block_id] = child
                    elif self._windows[group] is None and depth % self._ratios[group] == 0:
                        raise AssertionError(f"node {child.tokens} lacks its block in group {group}")
        for group, pool in enumerate(self._pools):
            if seen[group] != self._named[group]:
                raise AssertionError(f"group {group}: names {sorted(self._named[group])}, nodes {sorted(seen[group])}")
            lost = [block_id for block_id in seen[group] if not pool.is_kept(block_id)]
            if lost:
                raise AssertionError(f"group {group}: blocks {lost} are named but not kept")


def _first_digest(namespace: Hashable) -> bytes:
    """Namespaces are made of text, numbers and tuples, named or not, whose `repr` tells them."""
    return hashlib.blake2b(repr(namespace).encode(), digest_size=16).digest()


def _next_digest(digest: bytes, tokens: tuple[Any, ...]) -> bytes:
    try:
        content = marshal.dumps(tokens, _MARSHAL_VERSION)
    except ValueError:  # of another type than numbers, bytes and tuples
        return b""
    return hashlib.blake2b(digest + content, digest_size=16).digest() if digest else b""
