"""Which device ranks get, and why: decided before any rank is started."""

import ast
import subprocess
import sys
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from decoding import held_out

import tpverify
from tpverify import pynccl
from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ArgumentError, ClusterError, RankFailure
from tpverify.ops import cuda
from tpverify.runtime import cluster, device
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.device import Place, choose, for_attention, for_decoder, gpu_index, latent_pool
from tpverify.runtime.engine import Engine
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import VerifyRuntime

HEADS = MlaGeometry(64)
WIDTHS = "kv_lora_rank 512 and qk_rope_head_dim 64"


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installation with CUDA kernels and NCCL."""
    monkeypatch.setattr(cuda, "library", lambda: object())
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(pynccl, "why_not", lambda: None)


@pytest.mark.parametrize(
    ("work", "argument", "text"),
    [
        (("float32", HEADS, 8), "dtype", "expected bfloat16 on device 'cuda', got float32"),
        (("bfloat16", MlaGeometry(1024), 4), "tp", "expected at most 128 heads a rank on device 'cuda', got 256"),
    ],
)
def test_work_that_the_kernel_does_not_take(kernels: None, work: tuple[Any, ...], argument: str, text: str) -> None:
    with pytest.raises(ArgumentError) as error:
        for_attention("cuda", *work)
    assert (error.value.argument, str(error.value)) == (argument, f"{argument}: {text}")
    chosen, reason = for_attention("auto", *work)
    assert chosen == "cpu" and reason.startswith(f"{argument}: the kernel needs")
    assert for_attention("cpu", *work) == ("cpu", "")


def test_work_that_the_kernel_takes(kernels: None) -> None:
    for wanted in ("auto", "cuda", "cpu"):
        assert for_attention(wanted, "bfloat16", HEADS, 8) == (wanted, "")


def test_installation_without_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "library", lambda: "no nvcc")
    with pytest.raises(ArgumentError, match="^device: expected an installation with CUDA kernels .*, got no nvcc"):
        for_attention("cuda", "bfloat16", HEADS, 8)
    assert for_attention("auto", "bfloat16", HEADS, 8) == ("cpu", "device: the kernel needs an installation with CUDA kernels, got no nvcc")  # fmt: skip  # noqa: E501


def test_torch_without_cuda(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(ArgumentError, match="^device: expected a torch built with CUDA on device 'cuda', got "):
        for_attention("cuda", "bfloat16", HEADS, 8)
    for chosen, reason in (for_attention("auto", "bfloat16", HEADS, 8), for_decoder("auto", HEADS, 128, 8)):
        assert chosen == "cpu"
        assert reason == f"device: the kernel needs a torch built with CUDA, got {torch.__version__}"


def test_gpus_that_no_kernels_are_for(kernels: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`auto` took them, and the first launch failed."""
    library = SimpleNamespace(tpv_cuda_archs=lambda: b"90,120")
    capabilities = [(9, 0), (12, 1), (8, 0), (12, 0), (10, 0)]
    monkeypatch.setattr(cuda, "library", lambda: library)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: f"GPU {index}")
    said = "GPUs of compute capability 9.0 or 12.0"
    named = "GPU 2 of compute capability 8.0, GPU 4 of compute capability 10.0"
    with pytest.raises(ArgumentError, match=f"^device: expected {said} on device 'cuda', got {named}"):
        for_attention("cuda", "bfloat16", HEADS, 8)
    assert for_decoder("auto", HEADS, 128, 8) == ("cpu", f"device: the kernel needs {said}, got {named}")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 2)
    assert cuda.why_not() == cuda.why_not(torch.device("cuda")) == "GPU 2 of compute capability 8.0"
    assert cuda.why_not(torch.device("cuda", 1)) is None and cuda.why_not(torch.device("cuda", 5)) == "GPU 5 of 5"
    capabilities[2] = capabilities[4] = (12, 0)
    assert for_attention("auto", "bfloat16", HEADS, 8) == ("auto", "")


@pytest.mark.parametrize(
    ("asked", "place"),
    [
        ((8, "cpu", False, 8), Place("cpu", 0)),
        ((8, "auto", False, 8), Place("cuda", 1, True)),
        ((8, "auto", False, 7), Place("cpu", 0, False, "8 ranks, 7 GPUs on the driver's node")),
        ((1, "auto", True, 0), Place("cpu", 0, False, "1 ranks, 0 GPUs on the driver's node")),
        ((8, "cuda", False, 7), Place("cuda", 1, True)),  # whom Ray then has no place for
        ((8, "cuda", True, 0), Place("cuda", 1, True)),
        ((8, "cuda", True, 8), Place("cuda", 1, True)),
        ((8, "cuda", True, 1), Place("cuda", 0.125)),
        ((8, "auto", True, 2), Place("cuda", 0.25)),
        ((3, "cuda", True, 2), Place("cuda", 0.5)),  # two thirds each would leave no GPU for the third
        ((7, "cuda", True, 3), Place("cuda", 0.3333)),
    ],
)
def test_places(kernels: None, asked: tuple[Any, ...], place: Place) -> None:
    assert choose(*asked) == place
    assert place.gpus in (0, 1) or asked[0] <= asked[3] * int(1 / place.gpus + 1e-9)


def test_ranks_with_a_gpu_each_need_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pynccl, "why_not", lambda: "NCCL needs the package nccl4py")
    assert choose(2, "auto", False, 2) == Place("cpu", 0, False, "NCCL needs the package nccl4py")
    with pytest.raises(ClusterError, match="package nccl4py"):
        choose(2, "cuda", False, 2)
    assert choose(1, "cuda", False, 2) == Place("cuda", 1)
    assert choose(4, "cuda", True, 2) == Place("cuda", 0.5), "ranks that share GPUs gather by sockets"


@pytest.mark.parametrize(
    ("assigned", "visible", "index"),
    [
        ("3", "3", 0),
        ("10", "2,10,11", 1),
        ("11", None, 11),
        ("5", "", 5),
        ("GPU-8f5a", "GPU-1b2c,GPU-8f5a", 1),
    ],
)
def test_own_gpu_among_those_that_the_process_sees(assigned: str, visible: str | None, index: int) -> None:
    """vllm#25113, #14807, #5590: the user's CUDA_VISIBLE_DEVICES was overwritten, ignored, or sorted as text."""
    assert gpu_index(assigned, visible) == index


def test_several_gpus_for_one_rank_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CUDA_VISIBLE_DEVICES of the job's runtime_env makes Ray name all of it to some: two ranks took one GPU."""
    context = SimpleNamespace(get_accelerator_ids=lambda: {"GPU": ["8", "7"]})
    monkeypatch.setattr(device.ray, "get_runtime_context", lambda: context)
    with pytest.raises(ClusterError, match="one GPU from Ray for each rank, got GPUs 8, 7: does a runtime_env"):
        device.own_gpu()


NAMED = (
    f"import sys; sys.path.insert(0, {str(Path(tpverify.__file__).parent.parent)!r})"
    + """
import os, ray
from tpverify.runtime import cluster
os.environ["CUDA_VISIBLE_DEVICES"] = "10,2,11"
begin = ray.init
ray.init = lambda *arguments, **options: begin(*arguments, num_gpus=3, **options)
root = sys.path[0]

class Probe:
    def look(self):
        sys.path.insert(0, root)
        from tpverify.runtime.device import own_gpu
        return os.environ.get("CUDA_VISIBLE_DEVICES"), own_gpu()

with cluster.session():
    for environment in ({}, {"RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES": "1"}):
        actor = ray.remote(num_gpus=1, num_cpus=0, runtime_env={"env_vars": environment})(Probe)
        actors = [actor.remote() for _ in range(3)]
        print(sorted(ray.get([one.look.remote() for one in actors], timeout=60)))
        for one in actors:
            ray.kill(one)
"""
)


@pytest.mark.ray
def test_ray_gives_every_actor_its_own_gpu() -> None:
    """Three GPUs that Ray only believes in, on a machine whose user kept others for himself."""
    done = subprocess.run([sys.executable, "-c", NAMED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    alone, all_see_all = map(ast.literal_eval, done.stdout.splitlines())
    assert alone == [("10", "cuda:0"), ("11", "cuda:0"), ("2", "cuda:0")]
    assert all_see_all == [("10,2,11", f"cuda:{i}") for i in range(3)]


@pytest.fixture
def no_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "_start", lambda *_: pytest.fail("ranks were started"))


def test_float32_on_gpus_is_refused_before_ranks_start(kernels: None, no_start: None) -> None:
    with pytest.raises(ArgumentError, match="^dtype: expected bfloat16 on device 'cuda', got float32$"):
        VerifyRuntime(RuntimeConfig(device="cuda", dtype="float32"))


@pytest.mark.parametrize(
    ("model", "tp", "argument", "text"),
    [
        ((MlaGeometry(8, 256), 128), 1, "model", f"{WIDTHS} on device 'cuda', got (256, 64)"),
        ((MlaGeometry(8, 512, 32), 128), 1, "model", f"{WIDTHS} on device 'cuda', got (512, 32)"),
        ((MlaGeometry(8), 20), 1, "model", "a multiple of 8 values a shard of heads on device 'cuda', got 20"),
        ((MlaGeometry(12), 128), 3, "tp", "a divisor of 4 shards of heads on device 'cuda', got 3"),
        ((MlaGeometry(512), 128), 2, "tp", "at most 128 heads a rank on device 'cuda', got 256"),
    ],
)  # fmt: skip
def test_models_that_gpus_do_not_take(
    kernels: None, model: tuple[MlaGeometry, int], tp: int, argument: str, text: str
) -> None:
    with pytest.raises(ArgumentError) as error:
        for_decoder("cuda", *model, tp)
    assert (error.value.argument, str(error.value)) == (argument, f"{argument}: expected {text}")
    assert for_decoder("auto", *model, tp)[0] == for_decoder("cpu", *model, tp)[0] == "cpu"
    assert for_decoder("cpu", *model, tp)[1] == ""
    assert for_decoder("auto", MlaGeometry(64), 128, 8) == for_decoder("auto", MlaGeometry(16), 20, 8) == ("auto", "")


def test_a_decoder_on_gpus_without_kernels_is_refused_before_ranks_start(
    no_start: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda, "library", lambda: "no nvcc")
    expected = "^device: expected an installation with CUDA kernels on device 'cuda', got no nvcc$"
    with pytest.raises(ArgumentError, match=expected):
        Engine("tiny", device="cuda")


@pytest.mark.ray
def test_hidden_states_of_a_text_are_those_of_its_decoding(ranks: RankGroup) -> None:
    """Teacher forcing; what it leaves in the pool is given back."""
    engine = Engine("tiny", tp=2, group=ranks)
    prompt = held_out(300)[1]
    result = engine.generate(prompt, max_new_tokens=9)
    free = engine.stats()["free"]
    states = engine.hidden_states(list(prompt) + result.tokens[:-1])
    assert states.shape == (308, 256) and states.dtype == np.float32
    assert blake2b(states.tobytes(), digest_size=8).hexdigest() == result.stats["hidden_digest"]
    assert engine.stats()["free"] == free
    with pytest.raises(ArgumentError, match="^tokens: expected token ids"):
        engine.hidden_states([256])


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_an_engine_says_where_it_is_and_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "library", lambda: "no nvcc")
    with Engine("tiny", tp=1) as engine:
        found = engine.stats()
    assert found["device"] == "cpu"
    assert found["device_reason"] == "device: the kernel needs an installation with CUDA kernels, got no nvcc"


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_stats_say_why_auto_took_cpus(kernels: None) -> None:
    with VerifyRuntime(RuntimeConfig(tp=1, num_slots=8)) as runtime:
        found = runtime.stats()
    assert (found["device"], found["collectives"]) == ("cpu", {"backend": "sockets"})
    assert found["device_reason"] == "dtype: the kernel needs bfloat16, got float32"
    gpus = cluster.this_node().gpus
    with RankGroup(gpus + 1, "auto") as group:
        assert (group.device, group.device_reason) == ("cpu", f"{gpus + 1} ranks, {gpus} GPUs on the driver's node")


@pytest.mark.ray
@pytest.mark.usefixtures("ray_session")
def test_ranks_start_again_without_peer_to_peer_if_nccl_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """nccl#1999, vllm#33041: the first collective hangs on PCIe although the driver says that GPUs reach each other."""
    started: list[list[int]] = []

    def preflight(self: RankGroup, peer_to_peer: bool) -> dict[str, Any]:
        started.append(self.pids)
        self.collectives = {"peer_to_peer": peer_to_peer} | ({"hung": "no answer"} if len(started) < hangs + 1 else {})
        return self.collectives

    monkeypatch.setattr("tpverify.runtime.ranks.choose", lambda *_: Place("cpu", 0, True))
    monkeypatch.setattr(RankGroup, "_preflight", preflight)
    hangs = 1
    with RankGroup(2) as group:
        first, second = started
        assert group.pids == second and not set(first) & set(second)
        assert not any(Path(f"/proc/{pid}/cmdline").exists() for pid in first)
        assert group.collectives == {"peer_to_peer": False}
        assert Coordinator(group, "tables", {}, num_slots=8).digests()[1]
    started, hangs = [], 2
    with pytest.raises(RankFailure, match="with and without peer-to-peer: no answer"):
        RankGroup(2)
    assert len(started) == 2


@pytest.mark.parametrize(("slots", "waited"), [(63 << 10, False), (64 << 10, True), (81 << 10, False)])
def test_memory_is_waited_for_only_where_the_gpu_has_as_much(
    slots: int, waited: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost process's memory comes back a moment later; a pool larger than the GPU was refused only after 5 s."""
    gib, slept = 1 << 30, list[float]()
    left = 63 * gib + 80 * gib // 64
    free = iter([left, left])  # and then the other process is gone
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (next(free, 80 * gib), 80 * gib))
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: shape)
    monkeypatch.setattr(device.time, "sleep", slept.append)
    pool = (64, slots, 8192, torch.bfloat16, torch.device("cuda", 0))  # 1 MiB a slot
    if slots > 80 << 10:
        with pytest.raises(ArgumentError, match="num_slots: expected a pool of at most 63.00 GiB, .* got 82944 slots"):
            latent_pool(*pool)
    else:
        assert latent_pool(*pool) == pool[:3]
    assert bool(slept) == waited


def test_rows_beside_a_pool_need_room_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """1 MiB a slot and 1 MiB more: 41 GiB of the pool alone would have been given."""
    gib = 1 << 30
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 * gib, 80 * gib))
    monkeypatch.setattr(torch, "zeros", lambda *shape, **_: shape)
    options = (8192, torch.bfloat16, torch.device("cuda", 0), 1 << 20)
    assert latent_pool(64, 39 << 10, *options) == (64, 39 << 10, 8192)
    with pytest.raises(ArgumentError, match="num_slots: .*: 40320 slots, got 41984 slots, 82.00 GiB"):
        latent_pool(64, 41 << 10, *options)
