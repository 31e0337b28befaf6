"""The tree of drafted tokens that one verify step scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from tpverify.config import MAX_NODES, check_int
from tpverify.errors import ArgumentError
from tpverify.tree.ancestry import ancestry
from tpverify.tree.arrays import INT64_MAX, int_array


@dataclass(frozen=True, slots=True, eq=False)
class DraftTree:
    """A tree of n tokens, n <= 1024. Node 0 is the root (the bonus token, not drafted); a parent precedes its children.

    Every array is read-only, in copies and after pickling too. `len(tree)` is n, the verify width.

    tokens: int64 [n]. parents: int32 [n], -1 for the root. depths: int32 [n], 0 for the root.
    first_child, next_sibling: int32 [n], -1 for none; siblings in ascending node index.
    exact: False only if a builder given K candidates a depth needed one beyond them (see `build_ddtree_topk`).
    """

    tokens: np.ndarray
    parents: np.ndarray
    depths: np.ndarray
    first_child: np.ndarray
    next_sibling: np.ndarray
    _words: np.ndarray
    exact: bool = True

    @classmethod
    def from_parents(cls, tokens: Any, parents: Any) -> "DraftTree":
        """A tree from integer arrays tokens [n] and parents [n].

        Raises ArgumentError unless 1 <= n <= 1024, tokens are >= 0, parents[0] == -1, 0 <= parents[i] < i for the rest
        (which excludes cycles and missing parents) and no two children of a node carry the same token.
        """
        tokens, parents = int_array("tokens", tokens, 1), int_array("parents", parents, 1)
        n = len(tokens)
        if not 1 <= n <= MAX_NODES:
            raise ArgumentError("tokens", f"1 to {MAX_NODES} nodes", n)
        if len(parents) != n:
            raise ArgumentError("parents", f"one entry for each of {n} tokens", len(parents))
        if tokens.min() < 0:
            raise ArgumentError("tokens", "token ids >= 0", int(tokens.min()))
        if parents[0] != -1:
            raise ArgumentError("parents[0]", "-1, the root has no parent", int(parents[0]))
        wrong = np.flatnonzero((parents[1:] < 0) | (parents[1:] >= np.arange(1, n)))
        if len(wrong):
            i = int(wrong[0]) + 1
            raise ArgumentError(f"parents[{i}]", f"an earlier node, 0..{i - 1}", int(parents[i]))
        token_list, parent_list = tokens.tolist(), parents.tolist()
        children: set[tuple[int, int]] = set()
        for i in range(1, n):
            child = (parent_list[i], token_list[i])
            if child in children:
                raise ArgumentError(f"tokens[{i}]", f"a token no other child of node {child[0]} has", child[1])
            children.add(child)
        return assemble(token_list, parent_list, exact=True)

    @classmethod
    def chain(cls, tokens: Any) -> "DraftTree":
        """The width-1 tree in which each token follows the one before; a single token gives the root alone."""
        tokens = int_array("tokens", tokens, 1)
        return cls.from_parents(tokens, np.arange(-1, len(tokens) - 1))

    def __reduce__(self) -> tuple[Any, ...]:
        # Rebuilt rather than restored: arrays that were pickled or copied come back writable.
        return assemble, (self.tokens.tolist(), self.parents.tolist(), self.exact)

    def __len__(self) -> int:
        return len(self.tokens)

    def positions(self, committed: int) -> np.ndarray:
        """int64 [n]: a node's absolute position, `committed` + depth; siblings share one."""
        return self.depths + np.int64(check_int("committed", committed, 0, INT64_MAX - MAX_NODES))

    def ancestor_words(self) -> np.ndarray:
        """uint64 [n, ceil(n / 64)]: bit j of row i (bit j % 64 of word j // 64) says that i is j or descends from j."""
        return self._words

    def ancestor_mask(self) -> np.ndarray:
        """bool [n, n]: row i is true at i and at its ancestors."""
        bits = np.unpackbits(self._words.view(np.uint8), axis=1, count=len(self), bitorder="little")
        return bits.view(np.bool_)


def assemble(tokens: Sequence[int], parents: Sequence[int], exact: bool) -> DraftTree:
    """Depths, links and ancestor words of a well-formed tree, in plain Python: the oracle of the native builder."""
    n = len(tokens)
    depths, words = ancestry(parents)
    first_child, next_sibling = [-1] * n, [-1] * n
    for i in range(n - 1, 0, -1):  # insertion at the head, from the back: siblings end in ascending order
        next_sibling[i], first_child[parents[i]] = first_child[parents[i]], i
    int64s, int32s = np.array(tokens, np.int64), np.array([parents, depths, first_child, next_sibling], np.int32)
    int64s.flags.writeable = int32s.flags.writeable = False
    return DraftTree(int64s, int32s[0], int32s[1], int32s[2], int32s[3], words, exact)
