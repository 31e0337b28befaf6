"""NCCL that hangs while ranks try it: every rank says so, also who hears first that a peer has given up."""

import contextlib
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch

from tpverify import pynccl
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
def hanging(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    core = SimpleNamespace(
        Communicator=lambda: Hanging(request.param),
        UniqueId=SimpleNamespace(from_bytes=bytes),
        NCCLConfig=dict,
        NcclInvalid=ValueError,
        get_unique_id=lambda: bytes(128),
    )
    bindings = SimpleNamespace(Result=lambda name: SimpleNamespace(name=name), NCCLError=ValueError)
    monkeypatch.setattr(pynccl, "_nccl", lambda: core)
    monkeypatch.setattr(pynccl, "_bindings", lambda: bindings)
    monkeypatch.setattr(pynccl, "_keep_log", lambda: None)
    never = SimpleNamespace(query=lambda: False)
    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda: SimpleNamespace(cuda_stream=0, record_event=lambda: never)
    )
    monkeypatch.setattr(comm, "join_nccl", on_cpu(comm.join_nccl))
    monkeypatch.setattr(rank, "PREFLIGHT_S", 0.5)
    yield


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
