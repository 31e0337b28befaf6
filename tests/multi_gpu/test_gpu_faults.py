"""GPU ranks that are lost, GPUs that are full, NCCL that fails: one error in time, free GPUs, and another runtime.

Every row of the fault table is a property of its test in the JUnit report, and printed.
"""

import gc
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from faults import ends_with, faulty

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ClusterError, RankFailure
from tpverify.ops import cuda
from tpverify.runtime import ranks
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree import DraftTree

MISSING = cuda.why_not() or ("under 2 GPUs" if torch.cuda.device_count() < 2 else None)
pytestmark = [
    pytest.mark.multi_gpu, pytest.mark.ray, pytest.mark.skipif(MISSING is not None, reason=f"NOT run: {MISSING}"),
    pytest.mark.usefixtures("one_ray"),
]  # fmt: skip
HEADS = 16
GIB = 1 << 30
SLACK = GIB // 2  # what contexts of other processes may take meanwhile
LIMIT_S = 20.0

Note = Callable[[str, object], None]


def config(num_slots: int = 4096, layers: int = 1) -> RuntimeConfig:
    return RuntimeConfig(2, "cuda", MlaGeometry(HEADS), layers, num_slots, "bfloat16", max_batch=1, deadline_s=5.0)


def verify(runtime: VerifyRuntime) -> None:
    """A step whose result is known: nodes see ones alone."""
    seq = runtime.open()
    ones = torch.ones(1, 2, HEADS, 576, dtype=torch.bfloat16)
    step = runtime.verify({seq: Draft(DraftTree.chain([1, 2]), ones, ones[:, :, 0])}, softmax_scale=0.04)
    runtime.close(seq)
    assert torch.equal(step[seq].out, ones[..., :512])


def live() -> None:
    with VerifyRuntime(config()) as runtime:
        for _ in range(3):
            verify(runtime)


def free() -> list[int]:
    return [torch.cuda.mem_get_info(gpu)[0] for gpu in range(2)]


def process_ended(pid: int) -> bool:
    """Gone, or waiting for its parent."""
    try:
        return not Path(f"/proc/{pid}/cmdline").read_bytes()
    except FileNotFoundError:
        return True


@contextmanager
def released() -> Iterator[None]:
    """The GPUs' memory is free again, and a runtime on the same cluster runs."""
    before = free()
    yield
    for _ in range(100):  # a process's memory goes a moment after the process
        if all(now > then - SLACK for now, then in zip(free(), before, strict=True)):
            break
        time.sleep(0.1)
    assert all(now > then - SLACK for now, then in zip(free(), before, strict=True))
    live()


@pytest.mark.parametrize(
    ("place", "fate", "match"),
    [
        ("start", "SIGKILL", "^rank 1 failed at step 0: its process is gone"),
        ("NCCL init", "SIGKILL", "^rank 1 failed at step 0: its process is gone"),
        ("NCCL init", "SIGSTOP", "^rank 1 failed at step 0: no answer within 12 s, nor to a ping"),
        ("configure", "SIGKILL", "^rank 1 failed at step 1: its process is gone"),
        ("NCCL gather", "SIGKILL", "^rank 1 failed at step 3: its process is gone"),
        ("NCCL gather", "SIGSTOP", "^rank 1 failed at step 3: no answer within 5 s, nor to a ping"),
        ("NCCL gather", "NCCL error", "^rank 1 failed at step 3: ConnectionError: NCCL on rank 1: SystemError"),
    ],
)
def test_rank_that_is_lost(
    place: str, fate: str, match: str, monkeypatch: pytest.MonkeyPatch, record_property: Note
) -> None:
    """nccl#289, vllm#50835: survivors waited in NCCL for good, and kept their GPUs."""
    with released():
        with monkeypatch.context() as patch:
            # A configuring rank has been through the preflight's sockets.
            after = {"configure": 1, "NCCL gather": 1}.get(place, 0)
            patch.setattr(ranks, "Rank", faulty(1, place, fate, after))
            if (place, fate) == ("NCCL init", "SIGSTOP"):
                patch.setattr(ranks, "START_DEADLINE_S", 12.0)
            ends = ends_with(RankFailure, match, f"{fate} of a GPU rank in its {place}", LIMIT_S + 10, record_property)
            if place == "NCCL gather":
                with VerifyRuntime(config()) as runtime:
                    verify(runtime)
                    with ends:
                        verify(runtime)
            else:
                with ends:
                    live()


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP], ids=lambda how: how.name)
@pytest.mark.parametrize("when", ["between steps", "at any time of a step"])
def test_rank_that_is_lost_while_it_serves(how: signal.Signals, when: str, record_property: Note) -> None:
    with released(), VerifyRuntime(config()) as runtime:
        verify(runtime)
        pid, fault = runtime._group.pids[1], f"{how.name} of a GPU rank {when}"
        if when == "between steps":
            os.kill(pid, how)
        else:
            threading.Timer(0.05, os.kill, (pid, how)).start()
        with ends_with(RankFailure, "^rank 1 failed at step", fault, LIMIT_S, record_property):
            end = time.monotonic() + LIMIT_S
            while time.monotonic() < end:
                verify(runtime)
    assert process_ended(pid)


def test_a_pool_larger_than_the_gpu(record_property: Note) -> None:
    """The error says what would fit; nothing was allocated."""
    match = (
        r"num_slots: expected a pool of at most [\d.]+ GiB, free of the GPU's [\d.]+: \d+ slots, got 400000 slots, 439"
    )
    with released(), ends_with(RankFailure, match, "pool of 439 GiB", LIMIT_S, record_property):
        VerifyRuntime(config(num_slots=400_000, layers=1024))


def test_a_gpu_that_others_have_filled(record_property: Note) -> None:
    """Another process's memory is not the runtime's to count on: a pool that would fit an empty GPU is refused."""
    with released():
        taken = torch.empty(free()[0] - 6 * GIB, dtype=torch.uint8, device="cuda:0")
        try:
            with ends_with(RankFailure, "num_slots: expected a pool of at most", "GPU full", LIMIT_S, record_property):
                VerifyRuntime(config(num_slots=1_000_000, layers=8))  # 8.6 GiB
        finally:
            del taken
            gc.collect()
            torch.cuda.empty_cache()


def test_more_ranks_than_gpus(record_property: Note) -> None:
    gpus = torch.cuda.device_count()
    match = f"{gpus + 1} ranks with 1 GPU each .*the cluster has {gpus} GPUs"
    with ends_with(ClusterError, match, f"{gpus + 1} ranks, {gpus} GPUs", LIMIT_S, record_property):
        RankGroup(gpus + 1, "cuda")


def test_gpus_that_another_group_has(record_property: Note) -> None:
    match = "2 ranks with 1 GPU each .* not free within 2 s; .*GPUs free: "
    with released():
        with RankGroup(torch.cuda.device_count(), "cuda"):
            with ends_with(ClusterError, match, "GPUs in use", LIMIT_S, record_property):
                RankGroup(2, "cuda", deadline_s=2.0)
