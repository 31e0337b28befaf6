"""The draws: published Philox vectors, exact inverse sampling, and dependence on nothing but the key."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tree_oracles import chi_square_bound

import tpverify.tree as tv
from tpverify.errors import ArgumentError
from tpverify.tree.draws import philox4x32

ONES = 0xFFFFFFFF


@pytest.mark.parametrize(
    ("counter", "key", "words"),
    [
        ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((ONES,) * 4, (ONES,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            (0xA4093822, 0x299F31D0),
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
    ids=["zeros", "ones", "digits of pi"],
)
def test_philox_known_answers(counter, key, words):
    """Random123's kat_vectors, philox4x32 with 10 rounds."""
    assert philox4x32(counter, key) == words


def test_uniform_is_the_first_53_bits():
    assert tv.uniform(0, 0, 0) == ((0x6627E8D5 >> 5) * 2**26 + (0xE169C58D >> 6)) / 2**53


def test_uniform_uses_every_part_of_its_key():
    keys = [(0, 0, 0), (1, 0, 0), (2**32, 0, 0), (2**64 - 1, 0, 0), (0, 1, 0), (0, 2**32, 0), (0, 0, 1), (1, 1, 0)]
    values = [tv.uniform(*key) for key in keys]
    assert len(set(values)) == len(keys) and all(0.0 <= u < 1.0 for u in values)
    assert values == [tv.uniform(*key) for key in keys]


@pytest.mark.parametrize("vary", ["seed", "position", "stream"])
def test_uniform_is_uniform(vary):
    draws = [tv.uniform(*(i if name == vary else 7 for name in ("seed", "position", "stream"))) for i in range(20000)]
    counts = np.bincount((np.array(draws) * 64).astype(int), minlength=64)
    assert ((counts - 20000 / 64) ** 2 / (20000 / 64)).sum() < chi_square_bound(63)


@given(st.lists(st.integers(0, 8), min_size=1, max_size=12).filter(any), st.integers(0, 2**53 - 1))
def test_sample_token_is_the_exact_inverse(weights, numerator):
    """The first token whose cumulative weight exceeds u * total, in rational arithmetic (weights of few bits)."""
    u = numerator / 2**53
    target, cumulative = Fraction(u) * sum(weights), Fraction(0)
    token = -1
    while cumulative <= target:
        token += 1
        cumulative += weights[token]
    found = tv.sample_token(np.array(weights, float), u)
    # u * total is rounded once: an edge within that rounding may fall to the next token with weight.
    assert found == token or abs(Fraction(u * sum(weights)) - target) >= abs(cumulative - target)
    assert weights[found] > 0


def test_sample_token_at_the_edges():
    assert tv.sample_token(np.array([0.0, 0.5, 0.0, 0.5, 0.0]), 0.0) == 1
    assert tv.sample_token(np.array([0.0, 0.5, 0.0, 0.5, 0.0]), 0.5) == 3
    assert tv.sample_token(np.array([0.1] * 10 + [0.0]), 1 - 2.0**-53) == 9


@pytest.mark.parametrize(
    ("probs", "u"),
    [([0.5, -0.1], 0.5), ([math.nan, 1.0], 0.5), ([math.inf, 1.0], 0.5), ([0.0, 0.0], 0.5), ([], 0.5), ([1, 2], 0.5)]
    + [([1.0], 1.0), ([1.0], -0.1), ([1.0], math.nan), ([[1.0]], 0.5)],
)
def test_sample_token_refuses(probs, u):
    with pytest.raises(ArgumentError):
        tv.sample_token(np.array(probs), u)


@pytest.mark.parametrize("key", [(-1, 0, 0), (2**64, 0, 0), (0, -1, 0), (0, 0, 2**32), (0.5, 0, 0)])
def test_uniform_refuses(key):
    with pytest.raises(ArgumentError):
        tv.uniform(*key)


def test_softmax():
    logits = np.random.default_rng(0).normal(0, 5, 50).astype(np.float32)
    for temperature in (0.3, 1.0, 2.0):
        weights = [math.exp(float(x) / temperature) for x in logits]
        assert np.allclose(tv.softmax(logits, temperature), np.array(weights) / math.fsum(weights), rtol=1e-13, atol=0)
    assert tv.softmax(np.array([0.0, -np.inf]), 1.0).tolist() == [1.0, 0.0]
    assert tv.softmax(np.array([1e300, 0.0]), 1e-300).tolist() == [1.0, 0.0]


@pytest.mark.parametrize(
    ("logits", "temperature"),
    [([math.nan, 0.0], 1.0), ([math.inf, 0.0], 1.0), ([-math.inf], 1.0), ([], 1.0), ([0.0], 0.0), ([0.0], math.nan)],
)
def test_softmax_refuses(logits, temperature):
    with pytest.raises(ArgumentError):
        tv.softmax(np.array(logits), temperature)
