"""The pairwise grid itself, and the reference over its small cases. No GPU is needed."""

import itertools

import pairwise
import pytest
import torch

GRID = pairwise.pairwise()
SMALL = [case for case in GRID if case.prefix <= 65 and case.nodes * case.heads <= 600 and case.slots != "high"]


def test_every_two_values_meet_in_at_most_300_cases() -> None:
    met = set().union(*map(pairwise.pairs, GRID))
    dimensions = [[(name, value) for value in values] for name, values in pairwise.DIMENSIONS.items()]
    every = {pair for a, b in itertools.combinations(dimensions, 2) for pair in itertools.product(a, b)}
    assert len(every) > 1000 and every <= met
    assert len(GRID) <= 300 and all(map(pairwise.allowed, GRID))


@pytest.mark.parametrize("settings", SMALL[::6], ids=str)
def test_reference(settings: pairwise.Settings) -> None:
    case = pairwise.Run(settings, "cpu")
    case.check(*case())


@pytest.mark.parametrize("strided", ["nothing", "out"])
def test_the_check_sees_a_wrong_row(strided: str) -> None:
    settings = pairwise.Settings(9, 64, 2, "star", 1, strided, "shuffled", False, False, "cuda")
    case = pairwise.Run(settings, "cpu")
    out, lse = case()
    with pytest.raises(AssertionError):
        case.check(out * 1.02, lse)
    with pytest.raises(AssertionError):
        case.check(out, lse + 0.01)
    lse[0, 0] = torch.nan
    with pytest.raises(AssertionError):
        case.check(out, lse)
