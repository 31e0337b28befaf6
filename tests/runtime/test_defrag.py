"""Moves, shared prefixes and shrinking on ranks: not a bit of any output changes."""

import mmap
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ArgumentError, PoolFull
from tpverify.kv.log import Append, KvLog, Move, Open, Replica
from tpverify.native import give_back
from tpverify.runtime.attention_worker import AttentionWorker
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.accept import Accept
from tpverify.tree.draft_tree import DraftTree

ROW_BYTES = 2 * 576 * 4
CFG = RuntimeConfig(tp=4, device="cpu", geometry=MlaGeometry(num_heads=8), num_layers=2, num_slots=256, max_batch=4)


def normal(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    return torch.from_numpy(rng.standard_normal(shape, dtype=np.float32))


def interleaved(runtime: VerifyRuntime, rng: np.random.Generator, count: int = 4, rounds: int = 12) -> list[int]:
    """Sequences whose rows lie among each other's."""
    seqs = [runtime.open() for _ in range(count)]
    for _ in range(rounds):
        for seq in seqs:
            runtime.append(seq, normal(rng, 2, int(rng.integers(1, 5)), 576))
    return seqs


def drafts(rng: np.random.Generator, seqs: list[int], n: int = 5) -> dict[int, Draft]:
    tree = DraftTree.from_parents(np.arange(n), [-1, 0, 0, 1, 3])
    return {seq: Draft(tree, normal(rng, 2, n, 8, 576), normal(rng, 2, n, 576)) for seq in seqs}


def outputs(runtime: VerifyRuntime, asked: dict[int, Draft]) -> dict[int, tuple[bytes, bytes]]:
    step = runtime.verify(asked, softmax_scale=0.07)
    return {seq: (one.out.numpy().tobytes(), one.lse.numpy().tobytes()) for seq, one in step.items()}


@pytest.mark.ray
def test_outputs_are_the_same_before_during_and_after(ranks: RankGroup) -> None:
    rng = np.random.default_rng(0)
    with VerifyRuntime(CFG, group=ranks) as runtime:
        seqs = interleaved(runtime, rng)
        asked = drafts(rng, seqs)
        before = outputs(runtime, asked)
        contents = {seq: runtime.content_digest(seq) for seq in seqs}
        scattered = runtime.stats()
        part = runtime.defrag(max_bytes=10 * ROW_BYTES)
        assert (part.moves, part.bytes, part.done) == (10, 10 * ROW_BYTES, False)
        for _ in range(4):  # while the sources leave quarantine
            assert len(set(runtime.digests().values())) == 1
        assert outputs(runtime, asked) == before
        rest = runtime.defrag()
        assert rest.done and rest.moves > 10 and rest.extents_after == len(seqs) < rest.extents_before
        assert outputs(runtime, asked) == before
        assert {seq: runtime.content_digest(seq) for seq in seqs} == contents
        assert runtime.defrag().moves == 0
        assert len(set(runtime.digests().values())) == 1
        after = runtime.stats()
        assert all(after[kind] == scattered[kind] for kind in ("free", "live", "scratch", "quarantined"))
        runtime.commit(seqs[0], Accept(np.array([0, 1, 3], np.int32), 0))  # a tree verified across moves
        assert runtime.length(seqs[0]) > 3


@pytest.mark.ray
def test_a_prefix_left_behind_is_read_again_and_moves_once(ranks: RankGroup) -> None:
    rng = np.random.default_rng(1)
    rows, tokens = normal(rng, 2, 30, 576), rng.integers(0, 1000, 30)
    with VerifyRuntime(CFG, group=ranks) as runtime:
        other, first = runtime.open(), runtime.open()
        for start in range(0, 30, 3):
            runtime.append(first, rows[:, start : start + 3])
            runtime.append(other, normal(rng, 2, 2, 576))
        asked = drafts(rng, [first])
        expected = list(outputs(runtime, asked).values())
        runtime.close(first, tokens)
        readers = [runtime.open(tokens) for _ in range(3)]
        assert [runtime.length(seq) for seq in readers] == [29] * 3, "the last token is left to compute"
        for seq in readers:
            runtime.append(seq, rows[:, 29:])
            assert list(outputs(runtime, {seq: asked[first]}).values()) == expected
        report = runtime.defrag()
        assert report.done and report.moves <= 30 + 20 + 3, "shared rows move once"
        for seq in readers:
            assert list(outputs(runtime, {seq: asked[first]}).values()) == expected
        assert runtime.length(runtime.open([*tokens[:10], 1001, 7])) == 10
        with pytest.raises(ArgumentError, match="tokens"):
            runtime.close(readers[0], [*tokens, 5, 6, 7])
        with pytest.raises(ArgumentError, match="seq: expected the sequence whose tokens these are, got None"):
            runtime.close(tokens=tokens)
        assert runtime.length(readers[0]) == 30, "it has not ended"


@pytest.mark.ray
def test_the_top_of_the_pool_is_emptied_and_given_back(ranks: RankGroup) -> None:
    rng = np.random.default_rng(2)
    with VerifyRuntime(CFG, group=ranks) as runtime:
        seqs = interleaved(runtime, rng)
        asked = drafts(rng, seqs[1:])
        outputs(runtime, asked)
        expected = outputs(runtime, asked)
        live = runtime.stats()["live"]
        runtime.close(seqs[0])
        with pytest.raises(PoolFull, match="slots are in use, 31 would be left"):
            runtime.shrink(32)
        report = runtime.shrink(live)
        assert report.moves > 0 and runtime.stats()["withheld"] >= 256 - live - 15
        assert outputs(runtime, asked) == expected, "drafted anew below the limit"
        assert runtime.shrink(live).done
        with pytest.raises(PoolFull):
            runtime.append(seqs[1], normal(rng, 2, 256 - live, 576))
        assert runtime.shrink(np.int64(256)).done
        runtime.append(seqs[1], normal(rng, 2, 256 - live, 576))


@pytest.mark.ray
def test_memory_of_the_top_goes_back_to_the_system(ranks: RankGroup) -> None:
    """Of each rank's process, as the kernel counts it, and what stays is what it was."""

    def resident(pid: int) -> int:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * mmap.PAGESIZE

    rng = np.random.default_rng(3)
    with VerifyRuntime(replace(CFG, num_slots=16384), group=ranks) as runtime:
        large, small = runtime.open(), runtime.open()
        runtime.append(large, normal(rng, 2, 12000, 576))
        runtime.append(small, normal(rng, 2, 700, 576))
        fork = runtime.fork(small)  # whose tree, which would stay where it is, goes with it
        asked = drafts(rng, [small])
        expected = list(outputs(runtime, {fork: asked[small]}).values())
        runtime.close(fork)
        before = [resident(pid) for pid in ranks.pids]
        runtime.close(large)
        assert runtime.shrink(2000).done
        freed = 10000 * ROW_BYTES
        for pid, bytes_before in zip(ranks.pids, before, strict=True):
            assert resident(pid) < bytes_before - 0.9 * freed
        assert list(outputs(runtime, asked).values()) == expected
        assert runtime.shrink(16384).done
        runtime.append(small, normal(rng, 2, 12000, 576))  # into what had been given back
        runtime.check_content()


def test_only_whole_pages_go_back() -> None:
    values, page = np.ones(1 << 16, np.uint8), mmap.PAGESIZE
    for begin, end in ((5, 5), (5, page), (3, 9 * page + 1)):
        values[:] = 1
        address = values.ctypes.data
        give_back(address + begin, end - begin)
        pages = np.arange(address, address + values.size) // page * page  # of each byte, where its page begins
        gone = (pages >= address + begin) & (pages + page <= address + end)
        assert np.array_equal(values == 0, gone) and gone.sum() >= end - begin - 2 * page


def test_a_top_is_released_once_and_when_nothing_is_left_there() -> None:
    log, replica = KvLog(64), Replica(64)

    def step() -> int | None:
        replica.apply(*log.pending())
        log.acknowledge()
        return replica.take_release()

    one, two = log.open(), log.open()
    log.append(one, 30)
    log.append(two, 10)
    assert step() is None, "nothing was resized"
    log.close(one)
    found = []
    while not log.resize(20).done:
        found.append(step())
    assert set(found) == {None}, "sources of moves are in quarantine"
    assert step() == 20 and step() is None
    log.resize(64)
    assert step() == 64, "no slot at all"
    three = log.open()
    log.append(three, 25)
    log.draft(two, 20)
    log.close(three)
    log.resize(40)
    assert step() is None, "a tree reaches over the limit"
    log.commit(two, [0])
    assert step() == 40


@pytest.mark.ray
@pytest.mark.parametrize("max_bytes", [0, ROW_BYTES - 1, 1.5, True])
def test_a_budget_below_one_row_is_refused(ranks: RankGroup, max_bytes: object) -> None:
    with VerifyRuntime(CFG, group=ranks) as runtime:
        with pytest.raises(ArgumentError, match="max_bytes"):
            runtime.defrag(max_bytes=max_bytes)  # type: ignore[arg-type]


def test_a_row_that_is_not_what_it_was_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A copy that leaves out a layer (SGLang#26982) fails on the rank, with the sequence and the position."""
    options = {"num_heads": 8, "row_dim": 576, "num_layers": 2, "num_slots": 16, "dtype": "float32", "max_batch": 1}
    alone: Any = SimpleNamespace(rank=0, size=1)
    worker = AttentionWorker(alone, "cpu", options | {"max_nodes": 4})
    worker.pool.copy_(normal(np.random.default_rng(3), 2, 16, 576))
    int32 = lambda *values: np.array(values, "<i4").tobytes()  # noqa: E731
    replica = Replica(16)
    replica.apply(1, [Open(7), Append(7, int32(3, 4, 6)), Move(int32(4, 9, 1, 6, 10, 1))])
    whole = worker.pool[:, [3, 4, 6]].clone()
    ((src, dst),) = replica.take_moves()
    worker.kept.move(src, dst, replica)
    assert torch.equal(worker.pool[:, [3, 9, 10]], whole)

    def lower_layer(pool: torch.Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        pool[:1, dst] = pool[:1, src]

    monkeypatch.setattr("tpverify.runtime.moves.move_rows", lower_layer)
    replica.apply(4, [Move(int32(10, 12, 1))])
    with pytest.raises(RuntimeError, match="slot 12, read by sequence 7 at position 2"):
        worker.kept.move(*replica.take_moves()[0], replica)
