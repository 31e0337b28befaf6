"""NCCL that hangs while ranks try it: every rank says so, also who hears first that a peer has given up."""

import threading
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from nccl_library import stand_in

from tpverify.runtime import comm, messages, rank


class Hanging:
    """nccl4py's Communicator, of which nothing ever ends: its init, or its first collective."""

    is_valid = True

    def __init__(self, state: str) -> None:
        self._state = state

    def get_async_error(self) -> str:
        return self._state

    def get_last_error(self) -> str:
        return ""

    def initialize(self, *_: Any) -> None: ...
    def allgather(self, *_: Any, **__: Any) -> None: ...
    def abort(self) -> None: ...


@pytest.fixture(params=["InProgress", "Success"], ids=["init", "collective"])
def hanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in(monkeypatch, lambda: Hanging(request.param), lambda: False)
    monkeypatch.setattr(comm, "join_nccl", on_cpu(comm.join_nccl))
    monkeypatch.setattr(rank, "PREFLIGHT_S", 0.5)


def on_cpu(join: Any) -> Any:
    def joined(*arguments: Any) -> Any:
        found = join(*arguments)
        found.device = torch.device("cpu")  # where the preflight has its tensors
        return found

    return joined


def test_a_rank_that_gives_up_first_does_not_make_an_error_of_the_others(hanging: None, tmp_path: Path) -> None:
    """Ranks start again without peer-to-peer only if all say that NCCL hung."""
    step = messages.encode(messages.Step(0, 1, [], messages.Preflight(2, str(tmp_path / "meet"))))
    found: dict[int, Any] = {}

    def answer(number: int) -> None:
        frames = rank.RankServer(number, "cuda:0", True, 20.0).answer([memoryview(step)])
        found[number] = messages.decode_reply(memoryview(frames[0]))

    threads = [threading.Thread(target=answer, args=(number,)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [found[number].error for number in range(2)] == [None, None]
    assert all(list(msgspec.msgpack.decode(reply.result)) == ["hung"] for reply in found.values())
