"""Attention ranks on GPUs: bits of one rank on any number, within the tolerance of float64, and every way to fail."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ClusterError, RankFailure
from tpverify.ops import cuda
from tpverify.report import parity
from tpverify.runtime import cluster
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
def two_gpus() -> Iterator[RankGroup]:
    with cluster.session(), RankGroup(2, "auto", deadline_s=60) as group:
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


@marked(TWO)
def test_more_ranks_than_gpus(two_gpus: RankGroup) -> None:
    gpus = torch.cuda.device_count()
    with pytest.raises(ClusterError, match=f"{gpus + 1} ranks with 1 GPU each .*the cluster has {gpus} GPUs"):
        RankGroup(gpus + 1, "cuda")


def config(layers: int = 1, num_slots: int = 4096) -> RuntimeConfig:
    return RuntimeConfig(2, "cuda", MlaGeometry(HEADS), layers, num_slots, "bfloat16", deadline_s=5.0)


def verify_once(runtime: VerifyRuntime) -> torch.Tensor:
    seq = runtime.open()
    tree = DraftTree.from_parents([1, 2], [-1, 0])
    ones = torch.ones(1, 2, HEADS, 576, dtype=torch.bfloat16)
    return runtime.verify({seq: Draft(tree, ones, ones[:, :, 0])}, softmax_scale=SCALE)[seq].out


@marked(TWO)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
def test_lost_rank_is_named_and_another_runtime_starts(two_gpus: RankGroup, how: signal.Signals) -> None:
    """nccl#289, vllm#50835: survivors waited in the collective for good, and kept their GPUs."""
    two_gpus.close()  # its GPUs are needed; the last tests of the file
    with VerifyRuntime(config()) as runtime:
        pids = runtime._group.pids
        assert torch.equal(verify_once(runtime), torch.ones(1, 2, HEADS, 512, dtype=torch.bfloat16))
        start = time.monotonic()
        threading.Timer(0.05, os.kill, (pids[1], how)).start()
        with pytest.raises(RankFailure, match="^rank 1 failed at step"):
            while time.monotonic() < start + 30:
                verify_once(runtime)
        assert time.monotonic() < start + 20
    assert not any(Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_text() for pid in pids)
    with VerifyRuntime(config()) as runtime:
        assert torch.equal(verify_once(runtime), torch.ones(1, 2, HEADS, 512, dtype=torch.bfloat16))


@marked(TWO)
def test_a_pool_that_no_gpu_holds(two_gpus: RankGroup) -> None:
    two_gpus.close()
    with pytest.raises(RankFailure, match="OutOfMemoryError: CUDA out of memory"):
        VerifyRuntime(config(layers=1024, num_slots=400_000))  # 470 GB
