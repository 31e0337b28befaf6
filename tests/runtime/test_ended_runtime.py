"""A VerifyRuntime that has ended, or that cannot begin: refused calls change nothing and start nothing."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ArgumentError, ClusterError
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.accept import Accept
from tpverify.tree.draft_tree import DraftTree

pytestmark = pytest.mark.ray

ROW = 576
CFG = RuntimeConfig(tp=2, device="cpu", geometry=MlaGeometry(num_heads=8), num_slots=64)


def calls_after_the_end(runtime: VerifyRuntime, seq: int, draft: Draft) -> None:
    """Every call is refused and changes nothing; stats still tells what was, and the end can come again."""
    before = runtime.stats()
    for call in (
        runtime.open,
        lambda: runtime.append(seq, torch.zeros(2, ROW)),
        lambda: runtime.verify({seq: draft}, softmax_scale=0.1),
        lambda: runtime.commit(seq, Accept(np.array([0], np.int32), 0)),
        lambda: runtime.fork(seq),
        lambda: runtime.length(seq),
        lambda: runtime.close(seq),
        lambda: runtime.content_digest(seq),
        runtime.digests,
    ):
        with pytest.raises(ClusterError, match="closed|has ended"):
            call()
        assert runtime.stats() == before
    runtime.close()


def test_an_ended_runtime_changes_nothing(ray_session: None, ranks: RankGroup) -> None:
    """Whether its ranks were its own or lent, and whether it was closed or a later runtime took them over."""
    draft = Draft(DraftTree.chain([1, 2, 3]), torch.zeros(3, 8, ROW), torch.zeros(3, ROW))
    own = VerifyRuntime(replace(CFG, tp=1))
    lent = VerifyRuntime(CFG, group=ranks)
    for runtime in (own, lent):
        seq = runtime.open()
        runtime.verify({seq: draft}, softmax_scale=0.1)
        runtime.close()
        calls_after_the_end(runtime, seq, draft)
    overtaken = VerifyRuntime(CFG, group=ranks)
    seq = overtaken.open()
    overtaken.verify({seq: draft}, softmax_scale=0.1)
    with VerifyRuntime(CFG, group=ranks) as runtime:
        calls_after_the_end(overtaken, seq, draft)
        assert runtime.open() == 0 and len(set(runtime.digests().values())) == 1


@pytest.mark.parametrize("group", [0, "", [], 4])
def test_a_group_of_another_type_starts_no_ranks(group: Any) -> None:
    with pytest.raises(ArgumentError, match="^group: expected a RankGroup or None, got "):
        VerifyRuntime(CFG, group=group)
