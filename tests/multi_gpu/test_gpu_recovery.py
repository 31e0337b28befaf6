"""GPU ranks that die or hang are replaced: tokens, outputs and rows are those of a run without the fault.

A rank is stopped before it is killed, so that the others wait for it in a collective, and those of NCCL in a CUDA
graph. Every other way to be lost: tests/runtime/test_recovery_nccl.py, on threads.
"""

import faulthandler
import os
import signal
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch
from decoding import held_out, same

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.stack import KIMI_K2, PARTS
from tpverify.ops import cuda
from tpverify.runtime import coordinator, ranks
from tpverify.runtime.actor import Rank
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.engine import Engine
from tpverify.runtime.messages import Decode, DecodeRequest
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree import DraftTree
from tpverify.tree.accept import Accept

MISSING = cuda.why_not()
NOT_RUN = pytest.mark.skipif(MISSING is not None, reason=f"NOT run: {MISSING}")
TOO_FEW = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NOT run: under 2 GPUs")
TWO = [pytest.mark.multi_gpu, TOO_FEW]
WAYS = [pytest.param("nccl", marks=TWO), pytest.param("sockets", marks=pytest.mark.gpu)]
pytestmark = [pytest.mark.ray, NOT_RUN]
DEADLINE_S = 6.0
HEADS, LAYERS, SCALE = 16, 3, 576**-0.5
GIB = 1 << 30


def watched_rank(directory: Path) -> type:
    """A Rank that writes down where it is whenever it has been alive for another 20 s, for what it does not survive."""

    class WatchedRank(Rank):
        def __init__(self, *arguments: Any) -> None:
            self._stacks = open(directory / f"{arguments[1]}-{os.getpid()}.stacks", "w")
            faulthandler.dump_traceback_later(20, repeat=True, file=self._stacks)
            super().__init__(*arguments)

    return WatchedRank


ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # ranks do not have the tests on their path


@pytest.fixture(scope="module")
def stacks(one_ray: None) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        patch.setattr(ranks, "Rank", watched_rank(Path(name)))
        yield Path(name)


@contextmanager
def told(stacks: Path) -> Iterator[None]:
    """What ranks have said and where they were, if the body fails."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
        logs = Path(ray._private.worker._global_node.get_logs_dir_path()).glob("worker-*.err")
        for path in [*sorted(stacks.glob("*.stacks")), *sorted(logs, key=lambda path: path.stat().st_mtime)[-6:]]:
            print(f"\n=== {path.name}\n{path.read_text(errors='replace')[-5000:]}", flush=True)
        raise


class Groups:
    """Of two ranks or more, by what carries their results. One that has failed is started anew."""

    def __init__(self) -> None:
        self.now: RankGroup | None = None
        self.way = ""

    def get(self, way: str) -> RankGroup:
        if self.now is None or self.now.closed or self.way != way:
            self.close()
            self.way = way
            if way == "nccl":
                self.now = RankGroup(2, "cuda", deadline_s=DEADLINE_S)
            else:
                self.now = RankGroup(torch.cuda.device_count() + 1, "cuda", deadline_s=DEADLINE_S, oversubscribe=True)
            print("\n", self.now.collectives, flush=True)
            assert self.now.collectives["backend"] == way
        return self.now

    def close(self) -> None:
        if self.now is not None:
            self.now.close()


@pytest.fixture(scope="module")
def groups(stacks: Path) -> Iterator[Groups]:
    found = Groups()
    yield found
    found.close()


def lose(group: RankGroup, rank: int, fate: str) -> None:
    """stop: the others wait for a rank that hangs. kill: they wait for it, and then it dies. any time: whatever it is
    doing."""
    pid = group.pids[rank]
    if fate == "any time":
        threading.Timer(0.005, os.kill, (pid, signal.SIGKILL)).start()
        return
    os.kill(pid, signal.SIGSTOP)
    if fate == "kill":
        threading.Timer(0.5, os.kill, (pid, signal.SIGKILL)).start()


def show(recoveries: list[Any], count: int, rank: int) -> None:
    for one in recoveries[count - 1 :]:
        print("\n", one, flush=True)
    assert len(recoveries) == count and list(recoveries[-1]["ranks"]) == [rank]


@pytest.mark.parametrize("way", WAYS)
def test_the_model_decodes_on(groups: Groups, stacks: Path, way: str) -> None:
    """Both ranks, one after the other, while the shipped model decodes; the memory of what they leave is free again."""
    prompts, options = held_out(250)[:2], {"max_new_tokens": 48, "budget": 16, "temperature": 0.8, "seed": 3}
    with told(stacks):
        group = groups.get(way)
        engine = Engine("tiny", tp=2, group=group, num_slots=8192, prefix_cache=False, max_restarts=100)
        plain = engine.generate(prompts, **options)
        free = torch.cuda.mem_get_info(0)[0]
        faults = [(1, "kill"), (0, "kill"), (1, "stop"), (0, "any time")][: 4 if way == "nccl" else 2]
        for count, (rank, fate) in enumerate(faults, 1):
            steps = engine.stream(prompts[0], **options)
            next(steps)
            lose(group, rank, fate)
            *_, result = steps
            if fate == "any time":  # perhaps after the last of these steps
                engine.generate(prompts, **options)
            show(engine.stats()["recoveries"], count, rank)
            alone = engine.generate(prompts[0], **options)
            assert same(result, alone) and all(map(same, engine.generate(prompts, **options), plain))
            assert engine._coordinator.check_content() == 0, "nothing is cached"
        left = torch.cuda.mem_get_info(0)[0]
        print(f"free on GPU 0 before {free / GIB:.2f}, after {len(faults)} recoveries {left / GIB:.2f} GiB", flush=True)
        assert left > free - GIB


def config(tp: int) -> RuntimeConfig:
    return RuntimeConfig(tp, "cuda", MlaGeometry(HEADS), LAYERS, num_slots=4096, dtype="bfloat16", max_batch=4)


class Story:
    """Sequences in verify steps, the same for every runtime. Between them, whatever `between` does."""

    def __init__(self, runtime: VerifyRuntime) -> None:
        self.runtime, self.draw = runtime, np.random.default_rng(7)

    def normal(self, *shape: int) -> torch.Tensor:
        return torch.from_numpy(self.draw.standard_normal(shape, np.float32)).bfloat16()

    def draft(self, n: int) -> Draft:
        tree = DraftTree.from_parents(np.arange(n), np.arange(-1, n - 1) // 2)
        return Draft(tree, self.normal(LAYERS, n, HEADS, 576), self.normal(LAYERS, n, 576))

    def tell(self, between: Callable[[int], None]) -> list[torch.Tensor]:
        runtime, found = self.runtime, []
        seqs = [runtime.open() for _ in range(3)]
        for length, seq in zip((1200, 3, 64), seqs, strict=True):
            runtime.append(seq, self.normal(LAYERS, length, 576))
        for step in range(4):
            between(step)
            verified = runtime.verify({seq: self.draft(9 + 8 * step) for seq in seqs}, softmax_scale=SCALE)
            found += [tensor for seq in seqs for tensor in (verified[seq].out, verified[seq].lse)]
            for seq in seqs:
                runtime.commit(seq, Accept(np.array([0, 2], np.int32), 0))
        assert runtime.check_content() == 1200 + 3 + 64 + 4 * 3 * 2
        return found


def equal_bits(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_attention_goes_on(groups: Groups, stacks: Path, way: str) -> None:
    with told(stacks):
        group = groups.get(way)
        expected = Story(VerifyRuntime(config(2), group=group)).tell(lambda step: None)
        faults = {1: (1, "kill"), 3: (0, "kill")}
        runtime = VerifyRuntime(config(2), group=group, max_restarts=2)
        found = Story(runtime).tell(lambda step: lose(group, *faults[step]) if step in faults else None)
        recoveries = runtime.stats()["recoveries"]
        show(recoveries[:1], 1, 1)
        show(recoveries, 2, 0)
        assert equal_bits(found, expected)


@pytest.mark.multi_gpu
@TOO_FEW
def test_the_stack_goes_on(groups: Groups, stacks: Path) -> None:
    """Layers at Kimi-K2's widths, in one graph a step: rows of a layer come from the attention of the one before."""
    model = ModelConfig(**{**vars(KIMI_K2), "num_hidden_layers": LAYERS, "vocab_size": 97})
    options = {"config": vars(model), "num_slots": 4096, "buckets": [(1, 33)], "parts": list(PARTS), "seed": 3}

    def decode(group: RankGroup, fault: tuple[int, str] | None) -> tuple[list[Any], list[str]]:
        steps = Coordinator(group, "stack", options, num_slots=4096, max_restarts=1)
        seq, found = steps.log.open(), []
        steps.log.append(seq, 1000)
        for step in range(6):
            if step == 3 and fault is not None:
                lose(group, *fault)
            tree = DraftTree.from_parents((np.arange(33) + step) % 97, np.arange(-1, 32) // 2)
            steps.log.draft(seq, 33)
            request = DecodeRequest(seq, tree.tokens.tobytes(), tree.parents.tobytes(), False, 0.0, 0, 0)
            ((path, bonus, *_),), _ = steps.step(Decode([request]))[0].result()
            steps.log.commit(seq, np.frombuffer(path, "<i4"))
            found.append((np.frombuffer(path, "<i4").tolist(), bonus))
        assert steps.check_content() > 1000
        if fault is not None:
            show(steps.stats()["recoveries"], 1, fault[0])
        return found, sorted(set(steps.digests().values()))

    with told(stacks):
        group = groups.get("nccl")
        assert decode(group, (0, "kill")) == decode(group, None)


@pytest.mark.parametrize("tp", [pytest.param(1, marks=pytest.mark.gpu), pytest.param(2, marks=TWO)])
def test_moves_change_no_bit(groups: Groups, stacks: Path, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """out and lse of every sequence before a defrag, between any two of its waves and after it; a shrink likewise."""
    monkeypatch.setattr(coordinator, "SCATTERED", 1 << 30)  # nothing moves by itself
    with told(stacks):
        group = groups.get("nccl") if torch.cuda.device_count() > 1 else None  # which has all GPUs of two
        runtime = VerifyRuntime(config(tp), group=group)
        story = Story(runtime)
        seqs, others = [runtime.open() for _ in range(3)], runtime.open()
        for _ in range(40):  # every sequence in pieces, with holes between them
            for seq in [*seqs, others]:
                runtime.append(seq, story.normal(LAYERS, 1 + seq, 576))
        seqs.append(runtime.fork(seqs[0]))  # reads the same rows, which move once for both
        runtime.append(seqs[-1], story.normal(LAYERS, 5, 576))
        runtime.close(others)
        drafts = {seq: story.draft(9) for seq in seqs}

        def verify() -> list[torch.Tensor]:
            """By forks, whose trees go with them: a tree is never moved."""
            forks = {runtime.fork(seq): draft for seq, draft in drafts.items()}
            step = runtime.verify(forks, softmax_scale=SCALE)
            for fork in forks:
                runtime.close(fork)
            return [tensor for fork in forks for tensor in (step[fork].out, step[fork].lse)]

        before, waves, moves, done = verify(), 0, 0, False
        shrunk = runtime.shrink(320)
        print("\n", shrunk, flush=True)
        assert shrunk.done and shrunk.moves > 30 and equal_bits(verify(), before), "after the shrink"
        assert runtime.shrink(4096).done
        while not done:
            report = runtime.defrag(max_bytes=48 * runtime._row_bytes())
            waves, moves, done = waves + 1, moves + report.moves, report.done
            assert equal_bits(verify(), before), f"after wave {waves}"
            assert waves < 100
        extents = sum(runtime._log.extents().values())
        assert runtime.check_content() == 40 * (1 + 2 + 3) + 5
        print(f"tp {tp}: {waves} waves, {moves} rows, {extents} extents at the end", flush=True)
        assert waves > 3 and moves > 100 and extents <= 4 * len(seqs)
        runtime.close()
