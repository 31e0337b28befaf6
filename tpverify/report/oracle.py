"""Tree attention written out densely: in float64 the oracle of parity checks, in a dtype a yardstick for rounding."""

import math

import torch
from torch import Tensor

from tpverify.tree import DraftTree

RANK = 512  # V is the first RANK columns of a row
NOISE = 1e-5  # float32 errors below this say which few rows a case has, not how good the arithmetic is


def visible(tree: DraftTree, prefix: int) -> Tensor:
    """bool [n, prefix + n]: a node sees the whole prefix, itself and its ancestors, by walking the parents."""
    n = len(tree)
    mask = torch.zeros(n, prefix + n, dtype=torch.bool)
    mask[:, :prefix] = True
    for node in range(n):
        seen = node
        while seen >= 0:
            mask[node, prefix + seen] = True
            seen = int(tree.parents[seen])
    return mask


def attention(q: Tensor, rows: Tensor, mask: Tensor, scale: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """q [n, heads, D], rows [keys, D], mask [n, keys]. Returns out [n, heads, RANK] and natural-log lse [n, heads].

    The result of every operation is rounded to dtype, as plain code in that dtype would do; sums inside a product are
    float32 (float64 for float64), which is what matrix units give.
    """
    wide = torch.float64 if dtype == torch.float64 else torch.float32

    def rounded(x: Tensor) -> Tensor:
        return x.to(dtype).to(wide)

    n, heads, dim = q.shape
    q, rows = q.to(wide), rows.to(wide)
    scores = rounded(rounded(q.reshape(n * heads, dim) @ rows.t()) * scale)
    scores = scores.masked_fill_(~mask.repeat_interleave(heads, 0), -torch.inf)
    lse = scores.logsumexp(1)
    out = rounded(rounded(scores.softmax(1)) @ rows[:, :RANK])
    return out.reshape(n, heads, RANK), rounded(lse).reshape(n, heads)


def tolerances(plain: tuple[Tensor, Tensor], exact: tuple[Tensor, Tensor], dtype: torch.dtype) -> tuple[float, float]:
    """The largest error allowed in out and in lse: twice that of `plain`, the same attention computed in `dtype`.

    Not below what rounding one perfect result costs, nor below NOISE.
    """
    unit = torch.finfo(dtype).eps / 2 * exact[0].abs().max().item()
    out, lse = (max_error(*pair) for pair in zip(plain, exact, strict=True))
    return max(2 * out, unit, NOISE), max(2 * lse, NOISE)


def max_error(result: Tensor, exact: Tensor) -> float:
    """Largest absolute difference; NaN if any result is."""
    error = (result.double() - exact.double()).abs().max().item()
    return math.nan if math.isnan(error) else error
