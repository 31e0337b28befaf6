"""Random draws that depend on (seed, position, stream) and on nothing else.

Each sampled token takes one draw, keyed by its absolute position. Autoregressive, chain and tree decoding therefore see
the same draw at the same position and give the same stream of tokens, however many tokens a step commits.
"""

import math
import sys

import numpy as np

from tpverify.config import check_int, check_number
from tpverify.errors import ArgumentError
from tpverify.tree.arrays import float_array

UINT32 = 0xFFFFFFFF
FLOAT_MAX = sys.float_info.max


def check_coin(argument: str, value: object) -> float:
    """A draw as a float in [0, 1). Raises ArgumentError."""
    return check_number(argument, value, "a number in [0, 1)", 0.0, math.nextafter(1.0, 0.0))


def philox4x32(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10: ten rounds over four 32-bit words (Salmon et al., "Parallel random numbers", SC 2011)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        low, high = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (high >> 32) ^ c1 ^ k0, high & UINT32, (low >> 32) ^ c3 ^ k1, low & UINT32
        k0, k1 = (k0 + 0x9E3779B9) & UINT32, (k1 + 0xBB67AE85) & UINT32
    return c0, c1, c2, c3


def uniform(seed: int, position: int, stream: int = 0) -> float:
    """A float64 in [0, 1) with 53 random bits. seed and position: 64 bits unsigned; stream: 32 bits, one a purpose."""
    seed, position = check_int("seed", seed, 0, 2**64 - 1), check_int("position", position, 0, 2**64 - 1)
    counter = (position & UINT32, position >> 32, check_int("stream", stream, 0, UINT32), 0)
    a, b, _, _ = philox4x32(counter, (seed & UINT32, seed >> 32))
    return ((a >> 5) << 26 | b >> 6) * 2.0**-53


def softmax(logits: np.ndarray, temperature: float) -> np.ndarray:
    """float64 [vocab] probabilities of one row of logits at a temperature > 0. -inf is a token that cannot be drawn.

    Raises ArgumentError for NaN, +inf, a row without a finite logit, or a temperature that is not positive and finite.
    """
    row = float_array("logits", logits, 1, np.float64)
    temperature = check_number("temperature", temperature, "a positive finite number", math.ulp(0.0), FLOAT_MAX)
    top = row.max(initial=-np.inf)
    if not math.isfinite(top):
        raise ArgumentError("logits", "no NaN, no +inf and one finite logit", f"a maximum of {top}")
    with np.errstate(over="ignore"):  # a temperature near 0 makes the others -inf
        weights = np.exp((row - top) / temperature)
    return weights / weights.sum()


def sample_token(probs: np.ndarray, u: float) -> int:
    """The token whose interval of the cumulative sum, in token order, holds `u` in [0, 1).

    probs: float64 [vocab], weights that need not sum to 1. A token of weight 0 is never drawn. Raises ArgumentError for
    a negative or non-finite weight, a row without weight, or u outside [0, 1).
    """
    weights = float_array("probs", probs, 1, np.float64)
    u = check_coin("u", u)
    if not weights.min(initial=0.0) >= 0.0:
        raise ArgumentError("probs", "weights >= 0", weights.min())
    cumulative = np.cumsum(weights)
    total = cumulative[-1] if len(cumulative) else 0.0
    if not 0.0 < total < np.inf:
        raise ArgumentError("probs", "a positive finite sum", total)
    # u * total may round up to total: the last token with weight then takes it.
    last = int(np.searchsorted(cumulative, total, side="left"))
    return min(int(np.searchsorted(cumulative, u * total, side="right")), last)
