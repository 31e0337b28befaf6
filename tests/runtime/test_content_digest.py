"""Ranks whose rows are not what they should be: found with a move or on demand, named, and never heard again."""

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ClusterError, RankFailure
from tpverify.kv.digest import MASK64, content_digest, mix64
from tpverify.kv.log import Append, Fenced, KvLog, Open, Replica
from tpverify.runtime import messages
from tpverify.runtime.messages import Ping, Step, Write
from tpverify.runtime.moves import Kept, row_hashes_in_torch
from tpverify.runtime.rank import RankServer
from tpverify.runtime.ranks import Answer, RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.draft_tree import DraftTree

LAYERS, ROW = 2, 576
TOKENS = np.arange(100, 112)  # of the sequence that is left in the cache


class LocalRanks(RankGroup):
    """Ranks that are threads of this process, so that a test can reach what they keep."""

    def __init__(self, size: int) -> None:
        self.size, self.deadline_s, self.device, self.device_reason = size, 30.0, "cpu", None
        self.closed, self.coordinator, self.collectives = False, None, {"backend": "sockets"}
        self._driver = os.getpid()
        self.servers = [RankServer(rank, "cpu", False, 30.0) for rank in range(size)]
        self.threads, self.calls = ThreadPoolExecutor(size), 0

    def attempt(self, step: Step, frames: Any = (), own: Any = None, ranks: Any = (), deadline_s: Any = None) -> Any:
        self.calls += 1

        def answer(rank: int) -> Answer:
            sent = [messages.encode(step), *frames, *(own[rank] if own else ())]
            reply, *rest = self.servers[rank].answer([memoryview(frame) for frame in sent])
            return Answer(messages.decode_reply(reply), [memoryview(frame) for frame in rest])

        answers = list(self.threads.map(answer, range(self.size)))
        for got in answers:
            if got.reply.error is not None:
                raise RankFailure(got.reply.rank, step.number, got.reply.error)
        return answers

    def close(self) -> None:
        self.closed = True
        self.threads.shutdown()
        for server in self.servers:
            if server.comm is not None:
                server.comm.destroy()
                server.comm = None

    def pool(self, rank: int) -> torch.Tensor:
        return self.servers[rank].worker.pool  # type: ignore[union-attr]


class World:
    """Sequences whose rows lie among each other's, two that share rows, and rows that only the cache reads."""

    def __init__(self, tp: int = 4, seed: int = 0) -> None:
        self.rng, self.group = np.random.default_rng(seed), LocalRanks(tp)
        geometry = MlaGeometry(num_heads=8)
        cfg = RuntimeConfig(tp=tp, device="cpu", geometry=geometry, num_layers=LAYERS, num_slots=256, max_batch=4)
        self.runtime = VerifyRuntime(cfg, group=self.group)
        self.seqs = [self.runtime.open() for _ in range(4)]
        for _ in range(6):
            for seq in self.seqs:
                self.runtime.append(seq, self.rows(2))
        self.runtime.close(self.seqs.pop(), TOKENS)  # sequence 3
        self.seqs.append(self.runtime.fork(1))  # sequence 4
        self.runtime.append(4, self.rows(3))

    def rows(self, n: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((LAYERS, n, ROW), dtype=np.float32))

    def draft(self, n: int = 3) -> Draft:
        q = torch.from_numpy(self.rng.standard_normal((LAYERS, n, 8, ROW), dtype=np.float32))
        return Draft(DraftTree.chain(list(range(n))), q, self.rows(n))

    @property
    def log(self) -> KvLog:
        return self.runtime._coordinator._log  # readable after the end

    def slot(self, seq: int, position: int) -> int:
        return int(self.log.prefix_slots(seq)[position])

    def flip(self, rank: int, seq: int, position: int, layer: int = 1) -> None:
        """One bit of one row of one layer."""
        self.group.pool(rank)[layer].view(torch.int32)[self.slot(seq, position), 77] ^= 1 << 5

    def swap(self, rank: int, *places: tuple[int, int]) -> None:
        """Two rows, in all layers."""
        a, b = (self.slot(*place) for place in places)
        self.group.pool(rank)[:, [a, b]] = self.group.pool(rank)[:, [b, a]]

    def first_difference(self) -> tuple[int, int, int]:
        """By comparing bytes: the rank that differs from most, the sequence and the position, in their order."""
        for seq in sorted(self.log.extents()):
            for position in range(self.log.length(seq)):
                slot = self.slot(seq, position)
                held = [self.group.pool(rank)[:, slot].numpy().tobytes() for rank in range(self.group.size)]
                odd = [rank for rank, row in enumerate(held) if held.count(row) <= self.group.size // 2]
                if odd:
                    return odd[0], seq, position
        raise AssertionError("all rows are equal")

    def fails(self, act: Callable[[], object], rank: int, place: str) -> None:
        """act() names the rank and the place; afterwards nothing comes from any rank, nor is asked of one."""
        others = ", ".join(str(other) for other in range(self.group.size) if other != rank)
        with pytest.raises(RankFailure) as failure:
            act()
        assert failure.value.rank == rank
        assert failure.value.cause == f"its rows differ from those of rank {others}: {place}"
        calls = self.group.calls
        for late in (
            lambda: self.runtime.verify({self.seqs[0]: self.draft()}, softmax_scale=0.1),
            self.runtime.check_content,
            self.runtime.digests,
        ):
            with pytest.raises(ClusterError):
                late()
        assert self.group.closed and self.group.calls == calls


@pytest.fixture
def world() -> Any:
    made = World()
    yield made
    made.runtime.close()
    made.group.close()


def test_healthy_ranks_agree_before_and_after_moves(world: World) -> None:
    before = {seq: world.runtime.content_digest(seq) for seq in world.seqs}
    assert all(len(set(digests.values())) == 1 for digests in before.values())
    assert len({digests[0] for digests in before.values()}) == len(before)
    assert world.runtime.check_content() == world.runtime.stats()["live"] == 3 * 12 + 3 + 12
    assert world.runtime.defrag().moves > 10
    assert world.runtime.check_content() == 51
    assert {seq: world.runtime.content_digest(seq) for seq in world.seqs} == before


FAULTS: dict[str, tuple[Callable[[World], object], int, str]] = {
    "a bit of a layer": (lambda w: w.flip(2, 2, 7), 2, "sequence 2 at position 7"),
    "a bit of rank 0": (lambda w: w.flip(0, 0, 0, layer=0), 0, "sequence 0 at position 0"),
    "two bits": (lambda w: (w.flip(1, 2, 9), w.flip(1, 2, 4)), 1, "sequence 2 at position 4"),
    "two rows of a sequence": (lambda w: w.swap(3, (2, 9), (2, 5)), 3, "sequence 2 at position 5"),
    "one position of two sequences": (lambda w: w.swap(3, (0, 6), (2, 6)), 3, "sequence 0 at position 6"),
    "a row that two read": (lambda w: w.flip(1, 4, 8), 1, "sequence 1 at position 8"),
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("found", ["on demand", "with a move", "with the step that carries a move"])
def test_it_is_named_and_nothing_runs_after_it(world: World, fault: str, found: str) -> None:
    damage, rank, place = FAULTS[fault]
    damage(world)
    runtime = world.runtime
    if found == "on demand":
        digests = {seq: runtime.content_digest(seq) for seq in world.seqs}
        bystanders = [seq for seq in world.seqs if f"sequence {seq} " not in place]
        assert any(len(set(digests[seq].values())) == 1 for seq in bystanders)
        world.fails(runtime.check_content, rank, place)
    elif found == "with a move":
        world.fails(runtime.defrag, rank, place)
    else:
        world.log.defrag(256)
        world.fails(lambda: runtime.verify({2: world.draft()}, softmax_scale=0.1), rank, place)


def test_a_row_at_the_top_is_found_when_the_pool_shrinks(world: World) -> None:
    world.runtime.close(world.seqs.pop(0))
    tops = {seq: world.log.prefix_slots(seq) for seq in world.seqs}
    seq = max(tops, key=lambda seq: int(tops[seq].max()))
    position = int(tops[seq].argmax())
    world.flip(2, seq, position)
    world.fails(
        lambda: world.runtime.shrink(world.runtime.stats()["live"] + 1), 2, f"sequence {seq} at position {position}"
    )


def test_a_row_of_a_fork_alone(world: World) -> None:
    world.flip(1, 4, 13)
    world.fails(world.runtime.check_content, 1, "sequence 4 at position 13")


def test_a_row_that_only_the_cache_reads(world: World) -> None:
    reader = world.runtime.open(TOKENS)
    slot = world.slot(reader, 3)
    world.runtime.close(reader)
    world.group.pool(1)[0, slot, 0] += 1
    world.fails(world.runtime.check_content, 1, f"a cached row in slot {slot}")


def test_a_cached_row_is_named_by_its_next_reader(world: World) -> None:
    reader = world.runtime.open(TOKENS)
    world.flip(3, reader, 3)
    world.fails(world.runtime.check_content, 3, f"sequence {reader} at position 3")


@pytest.mark.parametrize("moved", [True, False])
def test_a_write_that_one_rank_missed(world: World, moved: bool) -> None:
    """A stale row: what an earlier sequence left in the slot."""
    worker: Any = world.group.servers[2].worker
    store, worker._store = worker._store, lambda slots, rows: None
    world.runtime.append(2, world.rows(4))
    worker._store = store
    act = world.runtime.defrag if moved else world.runtime.check_content
    world.fails(act, 2, "sequence 2 at position 12")


def test_a_layer_that_one_rank_does_not_move_and_does_not_look_at(world: World) -> None:
    worker: Any = world.group.servers[1].worker

    def lazy(src: np.ndarray, dst: np.ndarray, replica: Replica) -> str:
        worker.pool[:1, dst] = worker.pool[:1, src]
        return content_digest(worker.kept.hashes(dst))

    worker.kept.move = lazy
    world.log.defrag(256)
    with pytest.raises(RankFailure) as failure:
        world.runtime.digests()
    rank, seq, position = world.first_difference()
    assert (failure.value.rank, rank) == (1, 1)
    assert failure.value.cause.endswith(f"sequence {seq} at position {position}")


def test_moves_that_a_rank_did_before_are_no_difference(world: World) -> None:
    """A step that some ranks do again answers nothing about moves: what counts is what lies there."""
    worker: Any = world.group.servers[1].worker
    move = worker.kept.move
    worker.kept.move = lambda src, dst, replica: move(src, dst, replica) and "again"
    assert world.runtime.defrag().moves > 10
    assert world.runtime.check_content() == 51


def test_of_two_ranks_nobody_knows_which_is_right() -> None:
    world = World(tp=2)
    world.flip(0, 2, 7)
    doubt = ", and no majority says which of them is right"
    world.fails(world.runtime.check_content, 1, f"sequence 2 at position 7{doubt}")


def test_one_rank_agrees_with_itself() -> None:
    world = World(tp=1)
    world.flip(0, 2, 7)
    assert world.runtime.check_content() == 51
    world.runtime.close()
    world.group.close()


@pytest.mark.parametrize("seed", range(12))
def test_the_first_place_is_what_comparing_bytes_says(seed: int) -> None:
    rng, world = np.random.default_rng(seed), World(seed=seed)
    rank = int(rng.integers(4))
    if seed % 2:
        world.runtime.defrag()
    for _ in range(int(rng.integers(1, 5))):
        seq = int(rng.choice(world.seqs))
        pool = world.group.pool(rank).view(torch.uint8)
        slot = world.slot(seq, int(rng.integers(world.log.length(seq))))
        pool[int(rng.integers(LAYERS)), slot, int(rng.integers(4 * ROW))] += 1
    blamed, seq, position = world.first_difference()
    world.fails(world.runtime.check_content, blamed, f"sequence {seq} at position {position}")


def test_a_rank_that_fenced_itself_answers_nothing_more(monkeypatch: pytest.MonkeyPatch, world: World) -> None:
    """A copy that leaves out a layer (SGLang#26982), on every rank alike: each notices by itself."""

    def lower_layer(pool: torch.Tensor, src: np.ndarray, dst: np.ndarray) -> None:
        pool[:1, dst] = pool[:1, src]

    monkeypatch.setattr("tpverify.runtime.moves.move_rows", lower_layer)
    with pytest.raises(RankFailure, match="Fenced: a moved row is not what it was: slot "):
        world.runtime.defrag()
    for server in world.group.servers:
        for work in (Ping(), Write(0, 0, 1), messages.ContentDigest(0)):
            reply, *frames = server.answer([memoryview(messages.encode(Step(99, 1, [], work)))])
            assert not frames and str(messages.decode_reply(reply).error).startswith("Fenced: a moved row")


def words_hash(row: bytes) -> int:
    """The hash of a row as csrc/tpverify.h has it: outputs of SplitMix64, whose seed is the word, added up."""
    words = [int.from_bytes(row[i : i + 8], "little") for i in range(0, len(row), 8)]
    return sum(mix64(word + i * 0x9E3779B97F4A7C15 & MASK64) for i, word in enumerate(words)) & MASK64


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_what_its_definition_says(dtype: torch.dtype) -> None:
    rng = torch.Generator().manual_seed(0)
    pool = torch.randn(3, 9, 16, generator=rng).to(dtype)
    hidden, context = torch.randn(9, 12, generator=rng), torch.randn(9, 8, generator=rng)
    kept, slots = Kept(pool, hidden, own=(context,)), [7, 2, 3, 8]
    table_keys = [int(key) | 1 for key in np.random.PCG64(3).random_raw(4)]
    place_keys = [int(key) | 1 for key in np.random.PCG64(4).random_raw(4)]
    expected = []
    for slot in slots:
        rows = [*pool[:, slot], hidden[slot]]
        hashes = [words_hash(row.view(torch.uint8).numpy().tobytes()) for row in rows]
        expected.append(sum(key * row for key, row in zip(table_keys, hashes, strict=True)) & MASK64)
    assert kept.hashes(np.array(slots)).tolist() == expected
    digest = sum(key * word for key, word in zip(place_keys, expected, strict=True)) & MASK64
    replica = Replica(9)
    order = np.array(slots, "<i4")
    replica.apply(1, [Open(5), *(Append(5, order[i : i + 1].tobytes()) for i in range(4))])
    assert kept.answer(messages.ContentDigest(5), replica) == f"{mix64(digest ^ mix64(4)):016x}"

    in_torch = row_hashes_in_torch(pool[0])
    assert [word & MASK64 for word in in_torch.tolist()] == [
        words_hash(row.view(torch.uint8).numpy().tobytes()) for row in pool[0]
    ]


def test_tables_beside_the_pool_count_but_for_those_of_one_rank() -> None:
    """A side buffer that did not follow its rows (SGLang#26982, #31218)."""
    rng = torch.Generator().manual_seed(0)
    pool, hidden, context = torch.randn(2, 9, 16), torch.randn(9, 4, generator=rng), torch.randn(9, 4, generator=rng)
    src, dst, replica = np.array([1, 2], np.int32), np.array([5, 6], np.int32), Replica(9)
    found = []
    for change in ("none", "context", "hidden", "hidden rows swapped"):
        own = [table.clone() for table in (pool, hidden, context)]
        if change == "context":
            own[2][1] = 0
        if change == "hidden":
            own[1][1, 3] += 1
        if change == "hidden rows swapped":
            own[1][[1, 2]] = own[1][[2, 1]]
        found.append(Kept(own[0], own[1], own=(own[2],)).move(src, dst, replica))
        assert all(torch.equal(table[dst], table[src]) for table in own[1:])
    assert found[0] == found[1] and len(set(found)) == 3


def test_a_fence_is_for_good() -> None:
    replica = Replica(9)
    with pytest.raises(Fenced, match="rows"):
        replica.fence("rows")
    with pytest.raises(Fenced, match="rows"):
        replica.apply(1, [Open(0)])


@pytest.mark.ray
def test_a_real_rank_that_was_sent_another_row(ray_session: None) -> None:
    cfg = RuntimeConfig(tp=2, device="cpu", geometry=MlaGeometry(num_heads=8), num_layers=LAYERS, num_slots=64)
    with RankGroup(2, "cpu", deadline_s=60) as group, VerifyRuntime(cfg, group=group) as runtime:
        seqs = [runtime.open() for _ in range(2)]
        for _ in range(4):
            for seq in seqs:
                runtime.append(seq, torch.randn(LAYERS, 2, ROW))
        entries = runtime.stats()["entries"]
        step = messages.encode(Step(99, entries + 1, [], Write(1, 5, 1)))
        group.transport.send(1, [step, bytes(LAYERS * ROW * 4)])
        assert group.transport.receive(1, 30) is not None
        assert len(set(runtime.content_digest(0).values())) == 1
        assert len(set(runtime.content_digest(1).values())) == 2
        with pytest.raises(RankFailure, match="rank 1 failed .* from those of rank 0: sequence 1 at position 5"):
            runtime.defrag()
        assert group.closed
        with pytest.raises(ClusterError):
            runtime.append(0, torch.zeros(LAYERS, 1, ROW))
