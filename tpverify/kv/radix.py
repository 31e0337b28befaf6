"""The prefix cache: which slots hold the rows of which tokens. A radix tree (as in SGLang) with page size 1.

It knows tokens and slots, nothing of ranks: the log tells those which slots are kept. What a running sequence reads
is never evicted, and that is read off the slots themselves: they have another reader than the cache. Who reads a slot
of a node reads all before it in the node, so what can go is at its end.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tpverify.kv.slots import NO_SLOTS, Slots, SlotStates

Tokens = npt.NDArray[np.int64]
EVICTED_AT_ONCE = 64  # so that a full pool does not evict anew for every token


@dataclass(eq=False)
class Node:
    """Consecutive tokens and their slots, [n] each; children by their first token."""

    tokens: Tokens
    slots: Slots
    parent: "Node | None" = None
    children: dict[int, "Node"] = field(default_factory=dict)


class RadixCache:
    """Over the slots whose readers `states` counts. Every slot is in at most one node."""

    def __init__(self, states: SlotStates) -> None:
        self._states = states
        self._root = Node(np.empty(0, np.int64), NO_SLOTS)
        self._used: dict[Node, None] = {}  # the least recently used first; a node comes after its children

    def match(self, tokens: Tokens) -> Slots:
        """Slots of the longest cached prefix of tokens int64 [n]. It counts as used."""
        path, matched = self._walk(tokens)
        beyond = sum(node.slots.size for node in path) - matched
        if beyond:
            path[-1] = self._split(path[-1], path[-1].slots.size - beyond)
        self._touch(path)
        return np.concatenate([NO_SLOTS, *(node.slots for node in path)])

    def cached(self, tokens: Tokens) -> int:
        """Length of the longest cached prefix of tokens int64 [n]."""
        return self._walk(tokens)[1]

    def read(self, tokens: Tokens) -> int:
        """How much of the longest cached prefix of tokens int64 [n] is read by a sequence."""
        path, left = self._walk(tokens)
        read = 0
        for node in path:
            read += min(left, node.slots.size - self._unread(node))
            left -= node.slots.size
        return read

    def insert(self, tokens: Tokens, slots: Slots) -> None:
        """Cache what is not cached yet of tokens int64 [n] in slots int32 [n]; what is stays where it is."""
        start = self.match(tokens).size
        path, _ = self._walk(tokens)
        if start < tokens.size:
            parent = path[-1] if path else self._root
            path.append(Node(tokens[start:].copy(), slots[start:].copy(), parent))
            parent.children[int(tokens[start])] = path[-1]
            self._touch(path)

    def evictable(self, below: int) -> int:
        """How many slots lower than `below` could be evicted: neither they nor what follows them in the tree is
        read by a sequence."""
        kept: set[Node | None] = set()
        total = 0
        for node in self._used:
            unread = 0 if node in kept else self._unread(node)
            total += int(np.count_nonzero(node.slots[node.slots.size - unread :] < below))
            if unread < node.slots.size:
                kept.add(node.parent)
        return total

    def evict(self, wanted: int, below: int) -> Slots:
        """Drop the ends of branches, the least recently used first, until `wanted` slots lower than `below` are out, or
        all that can be. Returns all that went."""
        evicted = [NO_SLOTS]
        for node in list(self._used):
            unread = 0 if node.children else self._unread(node)
            while wanted > 0 and unread > 0:
                count = min(unread, max(wanted, EVICTED_AT_ONCE))
                start = node.slots.size - count
                evicted.append(node.slots[start:])
                wanted -= int(np.count_nonzero(evicted[-1] < below))
                unread -= count
                if start == 0:
                    self._remove(node)
                node.tokens, node.slots = node.tokens[:start], node.slots[:start]
        return np.concatenate(evicted)

    def move(self, src: Slots, dst: Slots) -> None:
        """Rows have changed slots: whichever node has a slot src[i] now has dst[i] there."""
        place = np.arange(self._states.states.size, dtype=np.int32)
        place.put(src, dst)
        for node in self._used:
            node.slots = place.take(node.slots)

    def chains(self) -> Iterator[Slots]:
        """All cached slots in chains: a node, then the child that most sequences read, and so on down. Each slot is in
        one chain."""
        starts = list(self._root.children.values())
        while starts:
            node = starts.pop()
            chain = [node.slots]
            while node.children:
                children = sorted(node.children.values(), key=lambda child: self._states.readers[child.slots[0]])
                node = children.pop()
                chain.append(node.slots)
                starts += children
            yield np.concatenate(chain)

    def _walk(self, tokens: Tokens) -> tuple[list[Node], int]:
        """Nodes of the longest match from the top down, and its length, which may end within the last of them."""
        path: list[Node] = []
        end = done = 0
        node = self._root
        while done == end < tokens.size:
            child = node.children.get(int(tokens[done]))
            if child is None:
                break
            path.append(child)
            end += child.slots.size
            done += _common(child.tokens, tokens[done:])
            node = child
        return path, done

    def _split(self, node: Node, at: int) -> Node:
        """Cut a node in two after `at` of its tokens; returns the upper half."""
        assert node.parent is not None
        upper = Node(node.tokens[:at], node.slots[:at], node.parent)
        node.parent.children[int(upper.tokens[0])] = upper
        upper.children[int(node.tokens[at])] = node
        node.tokens, node.slots, node.parent = node.tokens[at:], node.slots[at:], upper
        return upper

    def _touch(self, path: list[Node]) -> None:
        for node in reversed(path):
            self._used.pop(node, None)
            self._used[node] = None

    def _remove(self, node: Node) -> None:
        assert node.parent is not None
        del node.parent.children[int(node.tokens[0])]
        del self._used[node]

    def _unread(self, node: Node) -> int:
        """Slots, at the node's end, that only the cache reads."""
        return int(np.count_nonzero(self._states.readers.take(node.slots) == 1))


def _common(a: Tokens, b: Tokens) -> int:
    """Length of the common prefix."""
    size = min(a.size, b.size)
    differ = np.flatnonzero(a[:size] != b[:size])
    return int(differ[0]) if differ.size else size
