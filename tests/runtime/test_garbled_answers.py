"""Ranks whose answer is no reply: the group names them, and ends."""

from collections.abc import Callable
from typing import Any

import msgspec
import pytest
from thread_ranks import ThreadRanks

from tpverify.errors import RankFailure
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
