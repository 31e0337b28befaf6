"""The attention stack at Kimi-K2's widths on one GPU and on two: steps as graphs, equal to the bit."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tpverify.model.checkpoint import ModelConfig
from tpverify.model.stack import KIMI_K2, PARTS
from tpverify.ops import cuda
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.messages import ContentDigest, Decode, DecodeRequest
from tpverify.runtime.ranks import RankGroup
from tpverify.tree import DraftTree

MISSING = cuda.why_not() or ("under 2 GPUs" if torch.cuda.device_count() < 2 else None)
pytestmark = [
    pytest.mark.multi_gpu, pytest.mark.ray, pytest.mark.skipif(MISSING is not None, reason=f"NOT run: {MISSING}"),
]  # fmt: skip
CONFIG = ModelConfig(**{**vars(KIMI_K2), "num_hidden_layers": 3, "vocab_size": 97})
SLOTS = 8192


@pytest.fixture(scope="module")
def two_gpus(one_ray: None) -> Iterator[RankGroup]:
    with RankGroup(2, "cuda", deadline_s=60) as group:
        yield group


def tree(n: int, draw: np.random.Generator) -> DraftTree:
    """Siblings differ by their node's number; a vocabulary this small lets some be accepted."""
    parents = [-1] + [int(draw.integers(max(0, i - 4), i)) for i in range(1, n)]
    return DraftTree.from_parents((np.arange(n) + draw.integers(0, 97)) % 97, parents)


def run(group: RankGroup, tp: int, buckets: list[tuple[int, int]]) -> tuple[list[tuple[list[int], int]], list[str]]:
    """Paths and bonus tokens of ten steps over two sequences, and the digests of all their rows at the end."""
    options = {
        "config": vars(CONFIG), "num_slots": SLOTS, "buckets": buckets, "parts": list(PARTS), "seed": 3,
    }  # fmt: skip
    coordinator, draw = Coordinator(group, "stack", options, num_slots=SLOTS, tp=tp), np.random.default_rng(1)
    one, two = coordinator.log.open(), coordinator.log.open()
    coordinator.log.append(one, 3000)
    coordinator.log.append(two, 17)
    found = []
    for _ in range(10):
        trees = {seq: tree(int(draw.integers(1, 33)), draw) for seq in ((one, two), (one,), (two,))[draw.integers(3)]}
        for seq, drafted in trees.items():
            coordinator.log.draft(seq, len(drafted))
        requests = [
            DecodeRequest(seq, t.tokens.tobytes(), t.parents.tobytes(), False, 0.0, 0, 0) for seq, t in trees.items()
        ]
        answers, seconds = coordinator.step(Decode(requests))[0].result()
        for seq, (path, bonus, *_) in zip(trees, answers, strict=True):
            coordinator.log.commit(seq, np.frombuffer(path, "<i4"))
            found.append((np.frombuffer(path, "<i4").tolist(), bonus))
        assert min(seconds.values()) > 0
    digests = [answer.result() for seq in (one, two) for answer in coordinator.step(ContentDigest(seq))]
    assert len(set(coordinator.digests().values())) == 1
    return found, digests


def test_two_gpus_take_the_steps_of_one_with_its_bits(two_gpus: RankGroup) -> None:
    """Rows of a layer come from the attention of the one before, so that equal rows are equal layers."""
    buckets = [(1, 8), (1, 33), (2, 66)]
    one, one_digests = run(two_gpus, 1, buckets)
    two, two_digests = run(two_gpus, 2, buckets)
    assert two == one and two_digests == [digest for digest in one_digests for _ in range(2)]
    assert len(set(one_digests)) == 2 and len({bonus for _, bonus in one}) > 3
