"""Attention ranks on GPUs: bits of one rank on any number, within the tolerance of float64."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.ops import cuda
from tpverify.report import parity
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree import DraftTree
from tpverify.tree.accept import Accept

MISSING = cuda.why_not()
NOT_RUN = pytest.mark.skipif(MISSING is not None, reason=f"NOT run: {MISSING}")
TOO_FEW = torch.cuda.device_count() < 2
TWO = [pytest.mark.multi_gpu, NOT_RUN, pytest.mark.skipif(TOO_FEW, reason="NOT run: under 2 GPUs"), pytest.mark.ray]
ONE = [pytest.mark.gpu, NOT_RUN, pytest.mark.ray]
HEADS, LAYERS = 16, 3
SCALE = 576**-0.5


def marked(marks: list[pytest.MarkDecorator]) -> pytest.MarkDecorator:
    def mark(test):
        for one in marks:
            test = one(test)
        return test

    return mark


@pytest.fixture(scope="module")
def two_gpus(one_ray: None) -> Iterator[RankGroup]:
    with RankGroup(2, "auto", deadline_s=60) as group:
        yield group


@marked(TWO)
def test_two_gpus_give_the_bits_of_one(two_gpus: RankGroup) -> None:
    assert two_gpus.device == "cuda" and two_gpus.collectives["backend"] == "nccl"
    assert two_gpus.collectives["paths"] and two_gpus.collectives["peer_to_peer"]
    cases = parity.draw_cases(24, 2, 0, parity.DTYPES["cuda"])
    outcomes = list(parity.check(two_gpus, 2, cases))
    assert [outcome.row() for outcome in outcomes if not outcome.ok] == []
    assert len(outcomes) == 24


@marked(ONE)
@pytest.mark.parametrize("tp", [1, 8])
def test_one_gpu_for_all_ranks(tp: int) -> None:
    """The command, as on a machine with one GPU."""
    command = [sys.executable, "-m", "tpverify", "parity", "--device", "cuda", "--tp", str(tp), "--oversubscribe"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    found = json.loads(done.stdout)
    assert (found["device"], found["collectives"]["backend"], found["missed"]) == ("cuda", "sockets", 0)
    assert {case["dtype"] for case in found["cases"]} == {"bfloat16"} and len(found["cases"]) == 24


def live(group: RankGroup | None, tp: int, device: str) -> tuple[list[torch.Tensor], list[str]]:
    """Append, verify, commit part of the path, verify again with a fork. Results, and the rows' digests at the end."""
    draw = np.random.default_rng(7)

    def normal(*shape: int) -> torch.Tensor:
        return torch.from_numpy(draw.standard_normal(shape, np.float32)).bfloat16()

    def draft(n: int) -> Draft:
        tree = DraftTree.from_parents(np.arange(n), np.arange(-1, n - 1) // 2)
        return Draft(tree, normal(LAYERS, n, HEADS, 576), normal(LAYERS, n, 576))

    cfg = RuntimeConfig(tp, device, MlaGeometry(HEADS), LAYERS, num_slots=4096, dtype="bfloat16", max_batch=3)
    found = []
    with VerifyRuntime(cfg, group=group) as runtime:
        seq, other = runtime.open(), runtime.open()
        runtime.append(seq, normal(LAYERS, 1500, 576))
        runtime.append(other, normal(LAYERS, 3, 576))
        found += runtime.verify({seq: draft(33), other: draft(7)}, softmax_scale=SCALE).values()
        runtime.commit(seq, Accept(np.array([0, 2, 5], np.int32), 0))
        fork = runtime.fork(seq)
        drafts = {other: draft(65), fork: draft(9), seq: draft(1)}
        found += runtime.verify(drafts, softmax_scale=SCALE).values()
        digests = [digest for one in (seq, other, fork) for digest in runtime.content_digest(one).values()]
        assert len(set(runtime.digests().values())) == 1
    return [tensor for one in found for tensor in (one.out, one.lse)], digests


@marked(TWO)
def test_a_life_of_sequences_on_one_two_and_no_gpus(two_gpus: RankGroup) -> None:
    """GPU ranks give equal bits. The CPU reference, whose sums have another order, is close, and holds equal rows."""
    one, one_digests = live(two_gpus, 1, "cuda")
    two, two_digests = live(two_gpus, 2, "cuda")
    host, host_digests = live(None, 1, "cpu")
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(one, two, strict=True))
    for gpu, cpu in zip(two, host, strict=True):
        torch.testing.assert_close(gpu.float(), cpu.float(), atol=2e-2, rtol=2e-2)
    assert two_digests == [digest for digest in one_digests for _ in range(2)] and one_digests == host_digests
