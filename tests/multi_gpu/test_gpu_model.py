"""The shipped model over GPU ranks: bits and tokens of one rank for any number of them, by NCCL or sharing a GPU."""

import json
import os
import subprocess
import sys

import pytest
import torch
from decoding import held_out, same

from tpverify.ops import cuda
from tpverify.report.generation import Case, decode, score_runs
from tpverify.runtime.engine import Engine
from tpverify.runtime.generation import GenerationResult
from tpverify.runtime.ranks import RankGroup

MISSING = cuda.why_not()
NOT_RUN = pytest.mark.skipif(MISSING is not None, reason=f"NOT run: {MISSING}")
TOO_FEW = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NOT run: under 2 GPUs")
WAYS = [("autoregressive", 0), ("chain", 0), ("ddtree", 16), ("ddtree", 100)]
TEMPERATURES = [0.0, 0.8]


def runs(group: RankGroup, tp: int) -> list[GenerationResult]:
    """Every way, at both temperatures, three prompts together, in chunks. The engine compares the ranks' digests."""
    engine, found = Engine("tiny", tp=tp, group=group, prefill_chunk=100, prefix_cache=False), []
    for strategy, budget in WAYS:
        for temperature in TEMPERATURES:
            options = {"max_new_tokens": 32, "temperature": temperature, "seed": 9}
            found += engine.generate(held_out(250)[:3], strategy=strategy, budget=budget, **options)
    assert engine.stats()["device"] == "cuda"
    return found


@pytest.mark.multi_gpu
@NOT_RUN
@TOO_FEW
@pytest.mark.ray
def test_two_gpus_by_nccl_give_the_tokens_of_one(one_ray: None) -> None:
    with RankGroup(2, "auto", deadline_s=60) as group:
        assert group.collectives["backend"] == "nccl"
        assert all(map(same, runs(group, 2), runs(group, 1)))


@pytest.mark.gpu
@NOT_RUN
@pytest.mark.ray
@pytest.mark.parametrize("tp", [2, 8])
def test_ranks_that_share_a_gpu_give_the_tokens_of_one(one_ray: None, tp: int) -> None:
    """Their steps run without graphs, and results gather through sockets."""
    with RankGroup(1, "cuda", deadline_s=60) as group:
        expected = runs(group, 1)
    with RankGroup(tp, "cuda", deadline_s=60, oversubscribe=True) as group:
        assert group.collectives["backend"] == ("sockets" if torch.cuda.device_count() < tp else "nccl")
        assert all(map(same, runs(group, tp), expected))


@pytest.mark.gpu
@NOT_RUN
@pytest.mark.ray
def test_auto_takes_the_gpu_and_tokens_pass(one_ray: None) -> None:
    with Engine("tiny", tp=1) as engine:
        assert (engine.stats()["device"], engine.stats()["device_reason"]) == ("cuda", "")
        cases = [Case("text", held_out(200)[4].decode(), temperature) for temperature in TEMPERATURES]
        options = {"max_new_tokens": 64, "budget": 32, "seed": 2}
        found = [decode(engine, case, "ddtree", options) for case in cases]
        scores = score_runs(engine, found, seed=2)
    assert all(score.ok and score.exact >= 62 for score in scores)


@pytest.mark.gpu
@NOT_RUN
@pytest.mark.ray
def test_the_command_proves_what_it_prints() -> None:
    command = [sys.executable, "-m", "tpverify", "generate", "--device", "cuda", "--compare", "--tp", "2"]
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "0"}
    command += ["--oversubscribe", "--max-new-tokens", "32"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    *_, greedy, sampled, tp = done.stdout.splitlines()
    assert greedy.startswith("greedy tokens scored again in float32: yes (")
    assert sampled.startswith("sampled tokens scored again in float32: yes (")
    assert tp == "equal across tp 1, 2: yes"
    done = subprocess.run([*command, "--json"], env=environment, capture_output=True, text=True, timeout=300)
    found = json.loads(done.stdout)
    assert found["device"] == "cuda" and found["equal"] is True and found["differences"]["tp"] == []
    assert len(found["scores"]) == 12 and all(row["ok"] for row in found["scores"])
