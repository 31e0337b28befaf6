"""Ranks whose answer is no reply, and a driver that its system refuses something: one error says so, and all ends."""

import errno
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from thread_ranks import ThreadRanks

from tpverify.errors import ClusterError, RankFailure
from tpverify.runtime import cluster
from tpverify.runtime.coordinator import Coordinator
from tpverify.runtime.messages import Ping
from tpverify.runtime.rank import TABLES


def refuse() -> list[memoryview]:
    raise ValueError("message from rank 1: expected at most 4096 frames, got 9999")


ANSWERS: dict[str, Callable[[], list[memoryview]]] = {
    "no frame": list,
    "an empty frame": lambda: [memoryview(b"")],
    "no msgpack": lambda: [memoryview(b"\xc1")],
    "no reply": lambda: [memoryview(msgspec.msgpack.encode({"number": 2}))],
    "no message": refuse,
}


@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize("answer", ANSWERS.values(), ids=ANSWERS.keys())
def test_an_answer_that_is_none(
    answer: Callable[[], list[memoryview]], max_restarts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A new process in the rank's place would run the same code: it is not replaced."""
    with ThreadRanks(2) as group:
        steps = Coordinator(group, TABLES, {}, num_slots=8, max_restarts=max_restarts)
        honest = group.transport.receive

        def receive(rank: int, timeout_s: float) -> Any:
            message = honest(rank, timeout_s)
            return answer() if rank == 1 and message is not None else message

        monkeypatch.setattr(group.transport, "receive", receive)
        with pytest.raises(RankFailure, match="^rank 1 failed at step 2: its answer is no reply: .") as failure:
            steps.step(Ping())
        assert type(failure.value) is RankFailure and group.closed


@pytest.mark.parametrize("call", ["send", "receive"])
def test_a_driver_without_a_descriptor_left(call: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadRanks(2) as group:
        steps = Coordinator(group, TABLES, {}, num_slots=8, max_restarts=3)

        def refused(*_: object) -> None:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        monkeypatch.setattr(group.transport, call, refused)
        with pytest.raises(ClusterError, match="^no way from this process to its ranks: .*Too many open files"):
            steps.step(Ping())
        assert group.closed


def test_temporary_files_have_no_place_any_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks meet in a directory there: at the start, and again when one is replaced."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
    with ThreadRanks(2) as group:
        with pytest.raises(ClusterError, match="^no way from this process to its ranks: .*removed"):
            Coordinator(group, TABLES, {}, num_slots=8)
        assert group.closed


def test_temporary_files_have_no_place_when_a_rank_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with ThreadRanks(2) as group:
        steps = Coordinator(group, TABLES, {}, num_slots=8, max_restarts=3)
        monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "removed"))
        group._actors[1].die()
        with pytest.raises(ClusterError, match="^no way from this process to its ranks: .*removed"):
            steps.step(Ping())
        assert group.closed


def test_whatever_ray_raises_when_it_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """A bare Exception among it, for a node that does not come up in time."""

    def refuse(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setenv("RAY_ADDRESS", "local")
    monkeypatch.setattr(cluster.ray, "is_initialized", lambda: False)
    monkeypatch.setattr(cluster.ray, "shutdown", lambda: None)
    monkeypatch.setattr(cluster.ray, "init", refuse)
    monkeypatch.setattr(cluster, "_users", 0)
    with pytest.raises(ClusterError, match="^cannot reach Ray at local: The current node timed out"), cluster.session():
        pass
