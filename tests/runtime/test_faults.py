"""A rank lost at any time of its life: one error that names it, in time, and the same Ray starts another runtime.

CPU ranks. Those of GPUs, with NCCL: tests/multi_gpu/test_gpu_faults.py.
"""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from faults import ends_with, faulty

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import RankFailure
from tpverify.runtime import ranks
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree import DraftTree

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_session")]
CONFIG = RuntimeConfig(2, "cpu", MlaGeometry(2), num_slots=64, deadline_s=2.0)


def verify(runtime: VerifyRuntime) -> torch.Tensor:
    """One verify step over one node, whose attention is its own latent."""
    seq = runtime.open()
    step = runtime.verify({seq: Draft(DraftTree.chain([1]), np.ones((1, 2, 576), np.float32), np.ones((1, 576), np.float32))}, softmax_scale=1.0)  # fmt: skip  # noqa: E501
    runtime.close(seq)
    return step[seq].out


def live() -> None:
    with VerifyRuntime(CONFIG) as runtime:
        for _ in range(3):
            assert torch.equal(verify(runtime), torch.ones(1, 2, 512))


@pytest.mark.parametrize(
    ("place", "fate", "match"),
    [
        ("start", "SIGKILL", "rank 1 failed at step 0: its process is gone"),
        ("start", "SIGSTOP", "rank 1 failed at step 0: no answer within 10 s, nor to a ping"),
        ("configure", "SIGKILL", "rank 1 failed at step 1: its process is gone"),
        ("gather", "SIGKILL", "rank 1 failed at step 3: its process is gone"),
        ("gather", "SIGSTOP", "rank 1 failed at step 3: no answer within 2 s, nor to a ping"),
    ],
)
def test_rank_that_is_lost(
    place: str, fate: str, match: str, monkeypatch: pytest.MonkeyPatch, record_property: Callable[[str, object], None]
) -> None:
    """In a gather the others wait for it: their errors are not the one that is told."""
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "Rank", faulty(1, place, fate, after=1 if place == "gather" else 0))
        if (place, fate) == ("start", "SIGSTOP"):
            patch.setattr(ranks, "START_DEADLINE_S", 10.0)
        ends = ends_with(RankFailure, match, f"{fate} of a CPU rank in its {place}", 30, record_property)
        if place == "gather":
            with VerifyRuntime(CONFIG) as runtime:
                verify(runtime)
                with ends:
                    verify(runtime)
        else:
            with ends:
                live()
    live()
