"""The content digest against its definition in Python integers, and whom it blames."""

import itertools

import numpy as np
import pytest

from tpverify.kv.digest import MASK64, content_digest, mix64, outlier, position_hashes


def keys(stream, n):
    return [int(key) | 1 for key in np.random.PCG64(stream).random_raw(n)]


def by_definition(rows):
    """rows: lists of 64-bit words, a list a table, of one word a position."""
    return [
        sum(key * row for key, row in zip(keys(3, len(rows)), at, strict=True)) & MASK64
        for at in zip(*rows, strict=True)
    ]


@pytest.mark.parametrize(("tables", "n"), [(1, 1), (2, 5), (61, 40), (3, 0)])
def test_it_is_what_its_definition_says(tables, n):
    rows = np.random.default_rng(n).integers(0, 2**64, (tables, n), dtype=np.uint64)
    found = position_hashes(rows)
    assert found.dtype == np.uint64 and found.tolist() == by_definition(rows.tolist())
    total = sum(key * word for key, word in zip(keys(4, n), found.tolist(), strict=True)) & MASK64
    assert content_digest(found) == f"{mix64(total ^ mix64(n)):016x}"


def test_every_small_change_shows():
    """All ways to lay three kinds of rows over two tables and two positions, and all shorter ones: no two are equal."""
    digests, kinds = set(), [mix64(kind) for kind in range(3)]
    for words in itertools.product(kinds, repeat=4):
        digests.add(content_digest(position_hashes(np.array(words, np.uint64).reshape(2, 2))))
    for words in itertools.product(kinds, repeat=2):
        digests.add(content_digest(position_hashes(np.array(words, np.uint64).reshape(2, 1))))
    assert len(digests) == 81 + 9


@pytest.mark.parametrize(
    ("words", "blamed"),
    [
        ("aab", (2, [0, 1], True)),
        ("baa", (0, [1, 2], True)),
        ("ab", (1, [0], False)),
        ("aabb", (3, [0, 1], False)),
        ("abc", (2, [0, 1], False)),
        ("aabca", (2, [0, 1, 3, 4], True)),
        ("aaaaaaba", (6, [0, 1, 2, 3, 4, 5, 7], True)),
    ],
)
def test_who_is_blamed(words, blamed):
    assert outlier(words) == blamed
