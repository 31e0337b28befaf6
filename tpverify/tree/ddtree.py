"""DDTree: the most probable prefixes of a factorised draft, best first (Ringel et al., arXiv 2604.12989).

A node's score is the sum of its tokens' float32 log-probabilities, added in float64 from the root down. A node's ranks
are its tokens' places in their depth's candidate order. The tree holds the `budget` best nodes, numbered in the order
(score descending, ranks ascending as tuples, a prefix before its extensions).
"""

import ctypes
import heapq
import math
from dataclasses import replace
from typing import Any

import numpy as np

from tpverify import native
from tpverify.config import MAX_DEPTH, MAX_NODES, check_int
from tpverify.errors import ArgumentError
from tpverify.tree.arrays import INT64_MAX, float_array, int_array
from tpverify.tree.draft_tree import DraftTree, assemble

LOGPROB_MIN = float(np.finfo(np.float32).min)
LOGPROB_SLACK = np.float32(1e-3)  # a log-probability this little above 0 is rounding


def build_ddtree(logits: Any, *, root_token: int, budget: int) -> DraftTree:
    """The DDTree of a draft's logits.

    logits: [depth, vocab], row d for the token d + 1 after the root; numpy or torch CPU, any float type (converted to
    float32), depth 0..64. -inf rules a token out. Log-probabilities are logit - logsumexp over the whole row, computed
    in float64 and rounded to float32, of finite logits to a finite one. Equal logits in a row rank by token id, the
    lower first.
    budget: drafted nodes at most, 0..1023; the root comes on top. Fewer come back when fewer prefixes are possible.

    Raises ArgumentError for a wrong shape or type, NaN, +inf, or a row without a finite logit.
    """
    rows = float_array("logits", logits, 2, np.float32)
    depth, vocab = rows.shape
    _check_depth("logits", depth)
    budget = check_int("budget", budget, 0, MAX_NODES - 1)
    k = min(budget, vocab)
    logprobs, ids = np.empty((depth, k), np.float32), np.empty((depth, k), np.int64)
    for d, row in enumerate(rows):
        top = row.max(initial=-np.inf)
        if not math.isfinite(top):
            raise ArgumentError("logits", "no NaN, no +inf and a finite logit in each row", f"maximum {top} in row {d}")
        logsumexp = float(top) + math.log(np.exp(row.astype(np.float64) - float(top)).sum())
        ids[d] = _top(row, k)
        top_logits = row[ids[d]].astype(np.float64)
        logprobs[d] = np.where(np.isneginf(top_logits), -np.inf, np.maximum(top_logits - logsumexp, LOGPROB_MIN))
    # Built over ranks, not ids: distinct logits may round to one log-probability and must keep their order.
    ranks = np.ascontiguousarray(np.broadcast_to(np.arange(k), (depth, k)))
    tree = _best_first(logprobs, ranks, check_int("root_token", root_token, 0, INT64_MAX), budget, vocab)
    tokens = tree.tokens.copy()
    tokens[1:] = ids[tree.depths[1:] - 1, tokens[1:]]
    tokens.flags.writeable = False
    return replace(tree, tokens=tokens)


def build_ddtree_topk(
    logprobs: Any, token_ids: Any, *, root_token: int, budget: int, vocab_size: int | None = None
) -> DraftTree:
    """The DDTree of each depth's K most probable tokens.

    logprobs: [depth, K] float, full-vocabulary log-probabilities (not renormalised over the K), descending in a row; up
    to 1e-3 above 0 is taken as rounding and counts as 0. token_ids: [depth, K] integers >= 0, distinct in a row. Equal
    log-probabilities in a row rank by token id, the lower first, in whatever order they come. depth 0..64.
    vocab_size: with K equal to it nothing lies beyond rank K. When None it is taken to be the largest id seen + 1.

    `exact` is false if a token beyond rank K could have been in the tree. Such a token scores at most what rank K - 1
    of the same parent scores, so it takes its place in the queue at that score; it matters only if its turn comes
    before the tree is full. With K >= min(budget, vocab_size) that cannot happen.

    Raises ArgumentError for a wrong shape or type, NaN, +inf, a row that is not descending or has no finite entry, and
    repeated or out-of-range ids.
    """
    logprobs = float_array("logprobs", logprobs, 2, np.float32)
    token_ids = int_array("token_ids", token_ids, 2)
    if logprobs.shape != token_ids.shape:
        raise ArgumentError("token_ids", f"the shape of logprobs, {logprobs.shape}", token_ids.shape)
    _check_depth("logprobs", len(logprobs))
    budget = check_int("budget", budget, 0, MAX_NODES - 1)
    root_token = check_int("root_token", root_token, 0, INT64_MAX)
    vocab_size = 0 if vocab_size is None else check_int("vocab_size", vocab_size, 1, INT64_MAX)
    return _best_first(logprobs, token_ids, root_token, budget, vocab_size)


def _check_depth(name: str, depth: int) -> None:
    if depth > MAX_DEPTH:
        raise ArgumentError(name, f"at most {MAX_DEPTH} rows, one a depth", depth)


def _top(row: np.ndarray, k: int) -> np.ndarray:
    """The ids of the k largest entries, descending, equal ones by id."""
    if k == 0:
        return np.empty(0, np.int64)
    threshold = np.partition(row, len(row) - k)[len(row) - k]
    above = np.flatnonzero(row > threshold)
    ids = np.concatenate([above, np.flatnonzero(row == threshold)[: k - len(above)]])
    return ids[np.lexsort((ids, -row[ids]))]


def _best_first(logprobs: np.ndarray, ids: np.ndarray, root_token: int, budget: int, vocab_size: int) -> DraftTree:
    library = native.host()
    if library is None:
        return best_first_python(logprobs, ids, root_token, budget, vocab_size)
    return _best_first_native(library, logprobs, ids, root_token, budget, vocab_size)


def _best_first_native(
    library: ctypes.CDLL, logprobs: np.ndarray, ids: np.ndarray, root_token: int, budget: int, vocab_size: int
) -> DraftTree:
    depth, k = logprobs.shape
    capacity = budget + 1
    # One block of int64s: tokens, then the four int32 arrays (two of them in `capacity` int64s), then the words.
    block = np.empty(capacity * (3 + (capacity + 63) // 64), np.int64)
    start = block.ctypes.data
    int32s = start + 8 * capacity
    params = native.DdtreeParams(
        ctypes.sizeof(native.DdtreeParams), depth, k, budget, 0, 0, 0, vocab_size, root_token,
        logprobs.ctypes.data, ids.ctypes.data, start,
        int32s, int32s + 4 * capacity, int32s + 8 * capacity, int32s + 12 * capacity, start + 24 * capacity,
    )  # fmt: skip
    native.check(library, library.tpv_build_ddtree(params))
    n = params.num_nodes
    block.flags.writeable = False
    links = block[capacity : 3 * capacity].view(np.int32)
    width = (n + 63) // 64
    return DraftTree(
        block[:n],
        links[:n],
        links[capacity : capacity + n],
        links[2 * capacity : 2 * capacity + n],
        links[3 * capacity : 3 * capacity + n],
        block[3 * capacity : 3 * capacity + n * width].view(np.uint64).reshape(n, width),
        params.exact != 0,
    )


def best_first_python(
    logprobs: np.ndarray, token_ids: np.ndarray, root_token: int, budget: int, vocab_size: int
) -> DraftTree:
    """The native builder's twin: its oracle in the tests and its stand-in where no compiler was at hand."""
    depth, k = logprobs.shape
    if depth and (budget or k):  # a budget of 0 needs no candidates
        _check_rows(logprobs, token_ids, vocab_size)
    vocab_size = vocab_size or int(token_ids.max(initial=-1)) + 1
    logprobs = np.minimum(logprobs, np.float32(0.0))
    order = np.lexsort((token_ids, -logprobs))
    row_logprobs, row_tokens = logprobs.tolist(), np.take_along_axis(token_ids, order, axis=1).tolist()
    tokens, parents, scores, exact = [root_token], [-1], [0.0], True
    # (-score, ranks, parent): ranks settle every tie, since no two entries share them.
    queue: list[tuple[float, tuple[int, ...], int]] = []

    def offer(parent: int, ranks: tuple[int, ...]) -> None:
        rank = ranks[-1]
        if rank == k and k >= vocab_size:
            return
        logprob = row_logprobs[len(ranks) - 1][min(rank, k - 1)]  # beyond the candidates: at most the last one's
        if logprob > -math.inf:
            heapq.heappush(queue, (-(scores[parent] + logprob), ranks, parent))

    if depth and budget:
        offer(0, (0,))
    while queue and len(tokens) <= budget:
        negated, ranks, parent = heapq.heappop(queue)
        if ranks[-1] == k:
            exact = False
            continue
        node = len(tokens)
        tokens.append(row_tokens[len(ranks) - 1][ranks[-1]])
        parents.append(parent)
        scores.append(-negated)
        offer(parent, (*ranks[:-1], ranks[-1] + 1))
        if len(ranks) < depth:
            offer(node, (*ranks, 0))
    return assemble(tokens, parents, exact)


def _check_rows(logprobs: np.ndarray, token_ids: np.ndarray, vocab_size: int) -> None:
    if not logprobs.shape[1]:
        raise ArgumentError("logprobs", "at least one candidate a row", 0)
    high = ~(logprobs <= LOGPROB_SLACK)  # NaN and +inf too
    if high.any():
        raise ArgumentError("logprobs", "log-probabilities at most 0", f"{logprobs[high][0]} in {_place(high)}")
    capped = np.minimum(logprobs, np.float32(0.0))
    rise = np.zeros(capped.shape, bool)
    rise[:, 1:] = capped[:, 1:] > capped[:, :-1]
    if rise.any():
        raise ArgumentError("logprobs", "descending rows", f"a rise in {_place(rise)}")
    empty = np.isneginf(logprobs[:, 0])
    if empty.any():
        raise ArgumentError("logprobs", "a finite entry in each row", f"none in row {int(empty.argmax())}")
    outside = (token_ids < 0) | (token_ids >= (vocab_size or np.inf))
    if outside.any():
        limit = f"ids in 0..{vocab_size - 1}" if vocab_size else "ids >= 0"
        raise ArgumentError("token_ids", limit, f"{token_ids[outside][0]} in {_place(outside)}")
    ids = np.sort(token_ids, axis=1)
    repeated = ids[:, 1:] == ids[:, :-1]
    if repeated.any():
        row = int(repeated.any(axis=1).argmax())
        raise ArgumentError(
            "token_ids", "distinct ids in a row", f"{ids[row, 1:][repeated[row]][0]} twice in row {row}"
        )


def _place(wrong: np.ndarray) -> str:
    row, column = np.argwhere(wrong)[0].tolist()
    return f"row {row}, column {column}"
