"""RadixTree: token sequences, cut into pages, that share their beginnings.

An edge holds the tokens of a run of pages as bytes: a run is compared in one memcmp, a child is found by the bytes of
its first page, and no Python runs a token or a page. Answers rest on tokens, never on a hash. Each namespace has a root
of its own, so that two never share a page. Thread-safe; a `Match` that nobody locks is good until the next change.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from kvtransfer.kernels.errors import ConfigError, OwnershipError
from kvtransfer.tiers.keys import KEY_BYTES, Algorithm, Tokens, page_keys, token_bytes
from kvtransfer.tree import Node


class Match(NamedTuple):
    """The deepest node of a path, and how many pages from the root on are meant: inside that node, or all of it."""

    node: Node
    pages: int


class RadixTree:
    """The tree of `PrefixIndex` (index.py), which adds to it where pages are. ``tiers``: how many there are."""

    def __init__(self, page_size: int, tiers: int, clock: Callable[[], float], algorithm: Algorithm) -> None:
        if page_size < 1:
            raise ConfigError(f"page_size: expected at least 1 token, got {page_size}")
        if algorithm not in KEY_BYTES:
            raise ConfigError(f"algorithm: expected one of {', '.join(KEY_BYTES)}, got {algorithm!r}")
        self.page_size = page_size
        self.algorithm: Algorithm = algorithm
        self.clock = clock
        self.mutex = threading.RLock()
        self.locks = 0  # taken and not given back, over all nodes
        self.tick = 0
        self.pages = 0  # in the tree
        self._tiers = tiers
        self._page_bytes, self._key_bytes = 4 * page_size, KEY_BYTES[algorithm]
        self._roots: dict[bytes, Node] = {}
        self._names: dict[Node, bytes] = {}

    # --- tokens

    def match(self, tokens: Tokens, namespace: bytes = b"", *, use: bool = True) -> Match:
        """The longest run of known pages that ``tokens`` begin with (a rest shorter than a page does not count).

        ``use`` counts as a hit of these pages: their times and hits are renewed, and a node that they end in is split
        there. Without it nothing changes: probing keeps nothing alive. Raises LayoutError on bad tokens.
        """
        data = token_bytes(tokens)
        with self.mutex:
            found, _ = self._walk(data, self._roots.get(namespace), split=use)
            if use:
                self._touch(found.node, 1)
            return found

    def insert(self, tokens: Tokens, namespace: bytes = b"", *, priority: int = 0) -> Match:
        """Make all whole pages of ``tokens`` known, and renew the times of those that were (no hit). Their priority is
        at least ``priority`` from now on. In no tier yet: see `write`.
        """
        data = token_bytes(tokens)
        stop = len(data) - len(data) % self._page_bytes
        with self.mutex:
            root = self._roots.get(namespace)
            if root is None:
                root = Node(None, b"", 0, 0, self._tiers)
                self._roots[namespace], self._names[root] = root, namespace
            (node, pages), at = self._walk(data, root, split=True)
            if at < stop:
                new = Node(node, bytes(data[at:stop]), pages, stop // self._page_bytes, self._tiers)
                node.children[bytes(data[at : at + self._page_bytes])] = new
                new.born = self.tick + 1
                node, pages = new, new.end
                self.pages += new.pages
            elif node is root:
                self._forget_root(root)
            self._touch(node, 0, priority)
            return Match(node, pages)

    def keys(self, found: Match, first: int = 0) -> list[bytes]:
        """Page keys (keys.py) of the pages from ``first`` on: computed once a node, and kept."""
        with self.mutex:
            parent, width = b"", self._key_bytes
            out: list[bytes] = []
            for node in self.path(found.node):
                a = max(first, node.start) - node.start
                b = max(a, min(found.pages, node.end) - node.start)
                if node.keys is None:
                    ids = np.frombuffer(node.edge, dtype="<u4")
                    keys = page_keys(ids, self.page_size, parent, algorithm=self.algorithm)
                    node.keys = b"".join(keys)
                    out += keys[a:b]
                else:
                    out += [node.keys[at * width : (at + 1) * width] for at in range(a, b)]
                parent = node.keys[-width:]
            return out

    def tokens(self, found: Match, first: int = 0) -> bytes:
        """Token ids of the pages from ``first`` on, little-endian u32."""
        with self.mutex:
            size = self._page_bytes
            parts = self._parts(found.node, first, found.pages)
            return b"".join(node.edge[(a - node.start) * size : (b - node.start) * size] for node, a, b in parts)

    # --- nodes

    def path(self, node: Node) -> list[Node]:
        """From the root's child down to ``node``."""
        nodes = []
        while node.parent is not None:
            nodes.append(node)
            node = node.parent
        nodes.reverse()
        return nodes

    def namespace(self, node: Node) -> bytes:
        """Of which namespace the node is."""
        return self._names.get(node.top(), b"")

    def nodes(self) -> Iterator[Node]:
        """All nodes but the roots. Hold `mutex` while you walk."""
        stack = [child for root in self._roots.values() for child in root.children.values()]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node

    def lock(self, node: Node) -> None:
        """Hold the node and all above it: none is removed, and no tier gives up their pages, until `unlock`."""
        with self.mutex:
            self.locks += 1
            while node.parent is not None:
                node.locks += 1
                node = node.parent

    def unlock(self, node: Node) -> None:
        """Give back one `lock`. Raises OwnershipError where there is none; nothing changes then."""
        with self.mutex:
            if (node.locks < 1 and node.parent is not None) or self.locks < 1:
                raise OwnershipError("unlock: expected a node that is locked, got one without a lock (unlocked twice?)")
            self.locks -= 1
            while node.parent is not None:
                node.locks -= 1
                if not node.locks:
                    self._offer(node)
                node = node.parent

    # --- inside

    def _offer(self, node: Node, tier: int | None = None) -> None:
        """Told of a node that may be given up from now on."""

    def _walk(self, data: memoryview, root: Node | None, *, split: bool) -> tuple[Match, int]:
        """As far as ``data`` goes along known pages: there, and how many bytes that is."""
        step, at = self._page_bytes, 0
        stop = len(data) - len(data) % step
        if root is None:
            return Match(Node(None, b"", 0, 0, 0), 0), 0
        node = root
        while at < stop:
            child = node.children.get(data[at : at + step].tobytes())
            if child is None:
                break
            edge = child.edge
            piece = data[at : min(at + len(edge), stop)]
            if len(piece) == len(edge) and edge.startswith(piece):
                node = child
                at += len(edge)
                continue
            pages = common_pages(edge, piece, step)
            at += pages * step
            if pages == child.pages:
                node = child
            else:
                if split:
                    node = self._split(child, child.start + pages)
                    break
                return Match(child, child.start + pages), at
        return Match(node, node.end), at

    def _touch(self, node: Node, hits: int, priority: int = 0) -> None:
        self.tick += 1
        now, tick = self.clock(), self.tick
        while node.parent is not None:
            node.tick, node.last_used = tick, now
            node.hits += hits
            if priority > node.priority:
                node.priority = priority
            node = node.parent

    def _split(self, node: Node, at: int) -> Node:
        upper = node.split(at, self._page_bytes, self._key_bytes)
        self._offer(upper)
        return upper

    def _parts(self, node: Node, first: int, stop: int) -> Sequence[tuple[Node, int, int]]:
        """(node, first page, page behind the last) of pages ``first`` to ``stop - 1`` on the path, from the root on."""
        parts = []
        while node.parent is not None and node.end > first:
            a, b = max(node.start, first), min(node.end, stop)
            if a < b:
                parts.append((node, a, b))
            node = node.parent
        parts.reverse()
        return parts

    def _detach(self, node: Node) -> None:
        """Take a node without children and pages in tiers out of the tree."""
        parent = node.parent
        assert parent is not None
        del parent.children[node.edge[: self._page_bytes]]
        node.parent = None
        self.pages -= node.pages
        if parent.parent is None:
            self._forget_root(parent)

    def _forget_root(self, root: Node) -> None:
        if not root.children:
            name = self._names.pop(root, None)
            if name is not None:
                del self._roots[name]


def common_pages(edge: bytes, piece: memoryview, page_bytes: int) -> int:
    """How many whole pages two runs have in common from the start."""
    size = min(len(edge), len(piece))
    differ = np.frombuffer(edge, "<u4", size // 4) != np.frombuffer(piece[:size], "<u4")
    first = int(np.argmax(differ)) if differ.any() else size // 4
    return 4 * first // page_bytes
