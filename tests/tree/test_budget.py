"""budget="auto": finds the best budget of a simulated machine, stays put under noise, follows a change."""

import numpy as np
import pytest

from tpverify.errors import ArgumentError
from tpverify.tree import AutoBudget


def simulate(auto, steps, seconds, accepted, seed=0, noise=0.0):
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(steps):
        budget = auto.budget
        chosen.append(budget)
        auto.update(budget + 1, seconds(budget) * (1 + noise * rng.standard_normal()), accepted(budget))
    return chosen


def accepted(budget):
    return 1 + (budget > 4) + (budget > 8) + (budget > 16) + (budget > 64)


@pytest.mark.parametrize(("slope", "best"), [(2e-3, 8), (5e-4, 16), (1e-6, 128)])
def test_finds_the_best_candidate(slope, best):
    candidates = (4, 8, 16, 32, 64, 128)
    seconds = lambda budget: 0.01 + slope * budget  # noqa: E731
    assert max(candidates, key=lambda b: accepted(b) / seconds(b)) == best
    chosen = simulate(AutoBudget(candidates), 400, seconds, accepted)
    assert chosen[: 3 * len(candidates)] == [c for c in candidates for _ in range(3)]
    assert chosen[50:].count(best) > 0.9 * len(chosen[50:])


def test_same_inputs_same_choices():
    runs = [simulate(AutoBudget(), 300, lambda b: 0.01 + 1e-5 * b, accepted, noise=0.1) for _ in range(2)]
    assert runs[0] == runs[1]


def test_margin_holds_near_ties():
    """Two candidates within 2%: a 5% margin keeps the first one found, apart from the retries."""
    auto = AutoBudget((8, 16), margin=0.05)
    chosen = simulate(auto, 1000, lambda b: 0.01, lambda b: 2, noise=0.01)
    assert chosen[6:].count(16) <= 3 * (1000 // 64)


def test_follows_a_change():
    auto = AutoBudget((8, 64))
    simulate(auto, 200, lambda b: 0.01 + 1e-3 * b, accepted)
    assert auto.budget == 8
    chosen = simulate(auto, 1500, lambda b: 0.01, accepted)
    assert chosen[-100:].count(64) > 90


def test_one_candidate():
    assert set(simulate(AutoBudget([32]), 200, lambda b: 0.01, accepted)) == {32}


def test_a_step_counts_for_the_candidate_that_could_have_held_its_tree():
    auto = AutoBudget((8, 64))
    auto.update(6, 0.5, 2)
    auto.update(20, 0.25, 2)
    auto.update(900, 0.25, 2)
    assert auto.rate(0) == 4.0 and auto.rate(1) == 8.0


@pytest.mark.parametrize(
    "arguments",
    [
        {"candidates": []},
        {"candidates": [8, 8]},
        {"candidates": [-1]},
        {"candidates": [1024]},
        {"trial": 0},
        {"retry": 0},
        {"margin": -0.1},
        {"smoothing": 0.0},
        {"smoothing": 1.5},
    ],
)
def test_refuses(arguments):
    with pytest.raises(ArgumentError):
        AutoBudget(**arguments)


@pytest.mark.parametrize("step", [(9, 0.0, 1), (9, float("nan"), 1), (9, float("inf"), 1), (9, 0.1, 0), (9, 0.1, 10)])
def test_update_refuses(step):
    with pytest.raises(ArgumentError):
        AutoBudget().update(*step)
