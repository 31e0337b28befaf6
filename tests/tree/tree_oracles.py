"""Independent, slow statements of what the tree functions compute."""

import itertools
import math

import numpy as np


def brute_force(rows, budget):
    """Every prefix of per-depth candidates, sorted by (score descending, ranks ascending, prefix first).

    rows: a list over depths of (log-probability, token) in rank order. Returns the nodes as rank tuples.
    """
    prefixes = []
    for depth in range(1, len(rows) + 1):
        for ranks in itertools.product(*(range(len(row)) for row in rows[:depth])):
            score = 0.0
            for row, rank in zip(rows, ranks, strict=False):
                score += row[rank][0]
            if score > -math.inf:
                prefixes.append((-score, ranks))
    return [ranks for _, ranks in sorted(prefixes)[:budget]]


def tokens_and_parents(rows, nodes, root_token):
    """The tree of `brute_force`'s nodes as (tokens, parents)."""
    place = {(): 0} | {ranks: i + 1 for i, ranks in enumerate(nodes)}
    tokens = [root_token] + [rows[len(ranks) - 1][ranks[-1]][1] for ranks in nodes]
    return tokens, [-1] + [place[ranks[:-1]] for ranks in nodes]


def ranked_rows(logprobs, token_ids=None):
    """(log-probability, token) rows in rank order: descending, equal ones by id."""
    ids = np.tile(np.arange(logprobs.shape[1]), (len(logprobs), 1)) if token_ids is None else token_ids
    rows = [
        sorted(zip(a, b, strict=True), key=lambda c: (-c[0], c[1]))
        for a, b in zip(logprobs.tolist(), ids.tolist(), strict=True)
    ]
    return rows


def float32_logprobs(logits):
    """logit - logsumexp over the vocabulary, in float64 by math.fsum, rounded to float32."""
    out = np.empty(logits.shape, np.float32)
    for d, row in enumerate(logits.astype(np.float64)):
        top = row.max()
        out[d] = row - (top + math.log(math.fsum(math.exp(x - top) for x in row)))
    return out


def closure(parents):
    """bool [n, n] by following parents from every node."""
    mask = np.zeros((len(parents), len(parents)), bool)
    for i in range(len(parents)):
        j = i
        while j >= 0:
            mask[i, j] = True
            j = parents[j]
    return mask


def tree_fields(tree):
    """All of a tree, to compare two with ==."""
    arrays = (tree.tokens, tree.parents, tree.depths, tree.first_child, tree.next_sibling, tree.ancestor_words())
    return [(a.dtype, a.shape, a.tolist()) for a in arrays] + [tree.exact]


def check_structure(tree):
    """Depths, links, words and mask follow from tokens and parents; arrays are read-only and of the promised types."""
    n, parents = len(tree), tree.parents.tolist()
    assert [a.dtype for a in (tree.tokens, tree.parents, tree.depths)] == [np.int64, np.int32, np.int32]
    assert [a.dtype for a in (tree.first_child, tree.next_sibling, tree.ancestor_words())] == [
        np.int32,
        np.int32,
        np.uint64,
    ]
    mask = closure(parents)
    assert tree.ancestor_mask().dtype == np.bool_ and (tree.ancestor_mask() == mask).all()
    assert tree.depths.tolist() == (mask.sum(1) - 1).tolist()
    words = tree.ancestor_words()
    assert words.shape == (n, -(-n // 64))
    assert [[int(words[i, j // 64]) >> (j % 64) & 1 for j in range(64 * words.shape[1])] for i in range(n)] == [
        [int(x) for x in row] + [0] * (64 * words.shape[1] - n) for row in mask
    ]
    for i in range(n):
        children, child = [], int(tree.first_child[i])
        while child >= 0:
            children.append(child)
            child = int(tree.next_sibling[child])
        assert children == [j for j in range(n) if parents[j] == i]
    for array in (tree.tokens, tree.parents, tree.depths, tree.first_child, tree.next_sibling, words):
        assert not array.flags.writeable


def levelwise(rows, budget):
    """As `brute_force`, for large vocabularies: the best prefixes of each depth come from those of the depth before.

    A prefix among the best has its parent among the best and a rank below `budget`, so nothing is missed.
    """
    found, level = [], [(0.0, ())]
    for row in rows:
        row = row[:budget]
        scores = np.array([score for score, _ in level])[:, None] + np.array([lp for lp, _ in row])[None, :]
        edge = np.partition(-scores.ravel(), min(budget, scores.size) - 1)[min(budget, scores.size) - 1]
        pairs = np.argwhere(scores >= -edge)
        level = sorted(((scores[i, r], (*level[i][1], int(r))) for i, r in pairs), key=lambda e: (-e[0], e[1]))[:budget]
        found += level
    return [ranks for _, ranks in sorted(found, key=lambda e: (-e[0], e[1]))[:budget]]


def chi_square_bound(degrees):
    """The 1 - 1e-5 quantile of the chi-square law (Wilson and Hilferty's cube)."""
    z = 4.265
    return degrees * (1 - 2 / (9 * degrees) + z * math.sqrt(2 / (9 * degrees))) ** 3
