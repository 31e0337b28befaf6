"""A plan's steps: what is staged counts once it is fetched, and every way in has the plan's limits."""

import numpy as np
import pytest
import torch

from tpverify.config import MAX_TOKENS, MlaGeometry
from tpverify.errors import ArgumentError
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.ops.plan import VerifyPlan
from tpverify.ops.staging import Request

GEOMETRY, SLOTS, SCALE = MlaGeometry(2), 60, 576**-0.5
WAYS = ["update", "take", "stage"]


def requests(*lengths: tuple[int, int]) -> list[VerifyRequest]:
    slots = np.random.default_rng(0).permutation(SLOTS)
    parts = np.split(slots, np.cumsum([size for length in lengths for size in length]))
    return [VerifyRequest(parts[2 * i], parts[2 * i + 1], TreeMask.chain(n)) for i, (_, n) in enumerate(lengths)]


def give(plan: VerifyPlan, way: str, given: list[VerifyRequest]) -> None:
    """To `update` as callers do, to the others as ranks do."""
    if way == "update":
        plan.update(given)
    else:
        tables = [Request(r.prefix_slots, r.tree_slots, r.tree.words, r.tree.depths) for r in given]
        getattr(plan, way)(tables)


class Layer:
    """Rows for any step, and what they are to give."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.q = torch.randn(20, 2, 576, generator=generator)
        self.pool = torch.randn(SLOTS, 576, generator=generator)

    def run(self, plan: VerifyPlan, nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty(nodes, 2, 512), torch.empty(nodes, 2)
        plan.run(self.q[:nodes], self.pool, out, lse, SCALE)
        return out, lse

    def check(self, plan: VerifyPlan, given: list[VerifyRequest]) -> None:
        nodes = sum(len(request.tree_slots) for request in given)
        expected = verify_attention(self.q[:nodes], self.pool, given, softmax_scale=SCALE)
        assert all(map(torch.equal, self.run(plan, nodes), expected))


def test_what_is_staged_is_the_step_only_when_it_has_been_fetched() -> None:
    plan, layer = VerifyPlan(GEOMETRY, 2, 10, 40, "cpu"), Layer()
    first, second, third = requests((20, 5)), requests((7, 2), (0, 6)), requests((3, 1))
    plan.fetch()  # nothing yet
    give(plan, "update", first)
    plan.fetch()
    layer.check(plan, first)
    give(plan, "stage", second)
    layer.check(plan, first)
    with pytest.raises(ArgumentError, match="^q: "):
        layer.run(plan, 8)
    plan.fetch()
    layer.check(plan, second)
    give(plan, "take", third)
    layer.check(plan, third)
    plan.fetch()
    layer.check(plan, second)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("lengths", "said"),
    [
        ([(1, 1)] * 3, "^requests: expected at most 2, got 3"),
        ([(1, 1), (1, 11)], r"^requests\[1\]\.tree: expected at most 10 nodes, got 11"),
        ([(30, 1), (11, 1)], "^requests: expected at most 40 prefix tokens in all, got 41"),
    ],
)
def test_every_way_in_has_the_plans_limits(way: str, lengths: list[tuple[int, int]], said: str) -> None:
    """What a rank hands over, too: a workspace is as large as these limits need. The earlier step is kept."""
    plan, layer, good = VerifyPlan(GEOMETRY, 2, 10, 40, "cpu"), Layer(), requests((30, 10), (10, 10))
    give(plan, way, good)
    with pytest.raises(ArgumentError, match=said):
        give(plan, way, requests(*lengths))
    plan.fetch()
    layer.check(plan, good)


def test_tokens_beyond_32_bit_tables() -> None:
    VerifyPlan(GEOMETRY, 1, 1, MAX_TOKENS, "cpu")
    with pytest.raises(ArgumentError, match="^max_tokens: expected an int from 0 to 1879048192, got 1879048193"):
        VerifyPlan(GEOMETRY, 1, 1, MAX_TOKENS + 1, "cpu")
