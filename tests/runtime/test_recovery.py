"""A rank lost anywhere is replaced: outputs, tables and rows are those of a run without the fault.

Ranks are threads here; real processes, which are killed and stopped: test_recovery_ray.py.
"""

from typing import Any

import numpy as np
import pytest
import torch
from thread_ranks import PLACES, ThreadRanks, watched  # noqa: F401

from tpverify.config import MlaGeometry, RuntimeConfig
from tpverify.errors import ArgumentError, ClusterError, RankFailure
from tpverify.kv.extents import unpack
from tpverify.kv.replica import Replica
from tpverify.runtime import comm, recovery
from tpverify.runtime.comm import SocketComm
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.engine import Engine
from tpverify.runtime.messages import Ping, Refill
from tpverify.runtime.moves import Kept
from tpverify.runtime.rank import TABLES
from tpverify.runtime.ranks import RankGroup
from tpverify.runtime.runtime import Draft, VerifyRuntime
from tpverify.tree.accept import Accept
from tpverify.tree.draft_tree import DraftTree

pytestmark = pytest.mark.usefixtures("watched")
LAYERS, HEADS, ROW, SLOTS = 2, 4, 576, 96


def config(tp: int) -> RuntimeConfig:
    geometry = MlaGeometry(HEADS)
    return RuntimeConfig(tp, "cpu", geometry, num_layers=LAYERS, num_slots=SLOTS, max_batch=4, max_nodes=8)


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comm, "LOOK_S", 0.02)
    monkeypatch.setattr(recovery, "START_DEADLINE_S", 0.4)
    monkeypatch.setattr(recovery, "ROWS_AT_ONCE", 16)


class Story:
    """Random texts, forks, trees, moves and cached prefixes, the same for every runtime with the same seed."""

    def __init__(self, runtime: VerifyRuntime, seed: int = 0) -> None:
        self.runtime, self.rng, self.outputs = runtime, np.random.default_rng(seed), []
        self.texts: dict[int, list[int]] = {runtime.open(): [] for _ in range(3)}  # token ids, all of them distinct
        for _ in range(2):
            for seq in self.texts:
                self.append(seq, 4)

    def append(self, seq: int, n: int) -> None:
        self.runtime.append(seq, self.rows(n))
        self.wrote(seq, n)

    def wrote(self, seq: int, n: int) -> None:
        self.texts[seq] += self.rng.integers(1 << 60, size=n).tolist()

    def rows(self, n: int) -> torch.Tensor:
        return torch.from_numpy(self.rng.standard_normal((LAYERS, n, ROW), dtype=np.float32))

    def draft(self, n: int) -> Draft:
        tree = DraftTree.from_parents(np.arange(n), [-1, *(int(self.rng.integers(i)) for i in range(1, n))])
        q = self.rng.standard_normal((LAYERS, n, HEADS, ROW), dtype=np.float32)
        return Draft(tree, torch.from_numpy(q), self.rows(n))

    def verify(self, seqs: list[int]) -> None:
        step = self.runtime.verify({seq: self.draft(5) for seq in seqs}, softmax_scale=0.05)
        self.outputs += [part for seq in seqs for part in (step[seq].out, step[seq].lse)]

    def act(self, kind: str) -> None:
        seqs = list(self.texts)
        seq = int(self.rng.choice(seqs))
        if kind == "append":
            self.append(seq, 2)
        elif kind == "verify":
            self.verify([seq])
        elif kind == "commit":  # rows that an earlier step wrote
            self.verify(seqs[:2])
            self.runtime.digests()
            self.runtime.commit(seqs[0], Accept(np.array([0]), 0))
            self.wrote(seqs[0], 1)
        elif kind == "fork":
            new = self.runtime.fork(seq)
            self.texts[new] = list(self.texts[seq])
            self.append(new, 1)
        elif kind == "cache":
            text = self.texts.pop(seq)
            self.runtime.close(seq, text)
            new = self.runtime.open(text)
            self.texts[new] = text[: self.runtime.length(new)]
            self.append(new, 1)
        elif kind == "defrag":
            self.runtime.defrag()

    def tell(self, kinds: list[str]) -> None:
        for kind in kinds:
            self.act(kind)
        self.end()

    def end(self) -> None:
        self.verify(list(self.texts)[:4])


STEPS = ["append", "verify", "commit", "fork", "defrag", "cache", "append", "commit", "defrag", "verify"]


def told(seed: int, steps: list[str]) -> list[torch.Tensor]:
    """The outputs of one rank, undisturbed."""
    with ThreadRanks(1) as group:
        story = Story(VerifyRuntime(config(1), group=group), seed)
        story.tell(steps)
        return story.outputs


@pytest.fixture(scope="module")
def undisturbed() -> list[torch.Tensor]:
    return told(0, STEPS)


def whole(story: Story, expected: list[torch.Tensor]) -> None:
    """Every output bit for bit, and every rank's tables and rows."""
    assert len(story.outputs) == len(expected)
    assert all(torch.equal(*pair) for pair in zip(story.outputs, expected, strict=True))
    assert len(set(story.runtime.digests().values())) == 1
    group, held = story.runtime._group, story.runtime._log.held()
    assert isinstance(group, ThreadRanks) and len(held)
    for rank in range(1, group.size):
        assert torch.equal(group.pool(rank)[:, held], group.pool(0)[:, held])
    group.close()


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("fate", ["kill", "hang"])
@pytest.mark.parametrize(
    ("place", "after"), [("entries", 9), ("gather", 0), ("gather", 3), ("move", 0), ("move", 1), ("hashes", 0)]
)
def test_lost_in_a_step(undisturbed: list[torch.Tensor], place: str, after: int, fate: str, rank: int) -> None:
    group = ThreadRanks(4, 0.4)
    story = Story(VerifyRuntime(config(4), group=group, max_restarts=1))
    group.lose(rank, place, fate, after)
    story.tell(STEPS)
    story.runtime.check_content()
    assert not group.fates and group.started == 5, "the fault took place, once"
    whole(story, undisturbed)


def loses_two(
    group: ThreadRanks, first: tuple[str, int], place: str, again: int, undisturbed: list[torch.Tensor]
) -> None:
    """Rank 1 is killed at `first`, a place after so many passes; rank `again` is lost while it is replaced."""
    story = Story(VerifyRuntime(config(4), group=group, max_restarts=3))
    group.lose(1, first[0], after=first[1])
    group.lose(again, place, "hang" if again == 3 else "kill", start=5)
    story.tell(STEPS)
    assert not group.fates and group.started in (6, 7)
    whole(story, undisturbed)


@pytest.mark.parametrize("again", [0, 1, 3], ids=["source", "new", "bystander"])
@pytest.mark.parametrize("place", ["meeting", "refill", "relay", "hashes", "entries"])
def test_another_lost_while_one_is_replaced(undisturbed: list[torch.Tensor], place: str, again: int) -> None:
    loses_two(ThreadRanks(4, 0.4), ("gather", 2), place, again, undisturbed)


@pytest.mark.parametrize("seed", range(12))
def test_any_story_with_any_faults(seed: int) -> None:
    rng = np.random.default_rng(1000 + seed)
    steps = rng.choice(["append", "verify", "commit", "fork", "cache", "defrag"], 14).tolist()
    expected = told(seed, steps)
    group = ThreadRanks(4, 0.4)
    story = Story(VerifyRuntime(config(4), group=group, max_restarts=1000), seed)
    for kind in steps:
        group.fates.clear()  # at most two at once: one rank is left
        group.lose(int(rng.integers(4)), "entries", after=int(rng.integers(3)))
        group.lose(int(rng.integers(4)), str(rng.choice(list(PLACES))), after=int(rng.integers(3)))
        story.act(kind)
    group.fates.clear()
    story.end()
    assert group.started > 4, "some fault took place"
    whole(story, expected)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("mutation", ["a layer", "a slot", "two slots changed places", "a bit"])
def test_a_refill_that_is_wrong_is_found(mutation: str, rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is given out that was computed from such rows."""
    right = Kept.refill

    def wrong(kept: Kept, work: Refill, comm: SocketComm, replica: Replica) -> None:
        slots = unpack("slots", work.slots, 1, SLOTS)[0].astype(np.int64)
        before = kept.pool.clone()
        right(kept, work, comm, replica)
        if comm.rank not in work.targets:
            return
        if mutation == "a layer":
            kept.pool[1] = before[1]
        elif mutation == "a slot":
            kept.pool[:, slots[3]] = before[:, slots[3]]
        elif mutation == "two slots changed places":
            kept.pool[:, slots[[0, 3]]] = kept.pool[:, slots[[3, 0]]]
        else:
            kept.pool[0].view(torch.int32)[slots[0], 575] ^= 1

    monkeypatch.setattr(Kept, "refill", wrong)
    group = ThreadRanks(2)
    story = Story(VerifyRuntime(config(2), group=group, max_restarts=1))
    group.lose(rank, "gather", after=1)
    with pytest.raises(RankFailure, match=f"^rank {rank} failed at step .*: what it got from rank {1 - rank} differs: the row in slot"):  # fmt: skip  # noqa: E501
        story.tell(STEPS)
    assert group.closed and not any(process.is_alive() for process in group._actors)
    with pytest.raises(ClusterError):
        story.end()


@pytest.mark.parametrize(
    ("restarts", "lost", "text"),
    [
        (0, [1], "its process is gone$"),
        (1, [1, 2], "its process is gone; no restart is left$"),
        (9, [0, 1, 2, 3], "its process is gone; no rank is left to take its rows from$"),
    ],
)
def test_what_cannot_be_mended_is_one_error(restarts: int, lost: list[int], text: str) -> None:
    group = ThreadRanks(4)
    story = Story(VerifyRuntime(config(4), group=group, max_restarts=restarts))
    for rank in lost:
        group._actors[rank].die()
    with pytest.raises(RankFailure, match=text) as failure:
        story.tell(STEPS)
    assert failure.value.rank in lost and group.closed
    assert not any(process.is_alive() for process in group._actors)


def test_what_is_told_of_a_recovery(undisturbed: list[torch.Tensor], caplog: pytest.LogCaptureFixture) -> None:
    group = ThreadRanks(4)
    story = Story(VerifyRuntime(config(4), group=group, max_restarts=1))
    group.lose(2, "gather")
    story.tell(STEPS)
    (found,) = story.runtime._coordinator.recovered
    assert (found.ranks, found.source) == ({2: "its process is gone"}, 0)
    assert list(found.seconds) == ["detect", "end", "start", "join", "refill", "check", "rerun"]
    (record,) = caplog.records
    assert str(found) == record.getMessage() and record.levelname == "WARNING"
    assert str(found).startswith(f"replaced at step {found.step} in ") and "rank 2: its process is gone" in str(found)
    whole(story, undisturbed)


@pytest.mark.parametrize("restarts", [-1, 1.0, True, None])
def test_bad_numbers_of_restarts(restarts: Any) -> None:
    expected = "^max_restarts: expected an int from 0"
    with ThreadRanks(1) as group:
        earlier = Coordinator(group, TABLES, {}, num_slots=8)
        with pytest.raises(ArgumentError, match=expected):
            Coordinator(group, TABLES, {}, num_slots=8, max_restarts=restarts)
        earlier.step(Ping())
        with pytest.raises(ArgumentError, match=expected):
            VerifyRuntime(config(1), group=group, max_restarts=restarts)
        with pytest.raises(ArgumentError, match=expected):
            Engine("tiny", 1, device="cpu", group=group, max_restarts=restarts)
        earlier.step(Ping())


@pytest.mark.parametrize("restarts", [-1, "3"])
def test_bad_numbers_of_restarts_start_no_rank(restarts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RankGroup, "__init__", lambda *_, **__: pytest.fail("ranks were started"))
    for build in (
        lambda: VerifyRuntime(config(1), max_restarts=restarts),
        lambda: Engine("tiny", 1, device="cpu", max_restarts=restarts),
    ):
        with pytest.raises(ArgumentError, match="^max_restarts: expected an int from 0"):
            build()
