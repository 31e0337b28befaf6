"""A communicator of NCCL's that loses a peer, over a stand-in for the library: what ends when, and what holds what."""

import gc
import threading
import time
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from nccl_library import stand_in

from tpverify import pynccl
from tpverify.errors import ArgumentError


class Library:
    """nccl4py's Communicator. An abort ends when `free` is set, as when the last graph goes."""

    is_valid = True

    def __init__(self) -> None:
        self.free, self.state, self.asked = threading.Event(), "Success", 0

    def initialize(self, *_: Any) -> None:
        pass

    def get_async_error(self) -> str:
        return self.state

    def get_last_error(self) -> str:
        return "what went wrong"

    def abort(self) -> None:
        self.asked += 1
        assert self.free.wait(20)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    stand_in(monkeypatch, lambda: found, lambda: False)
    monkeypatch.setattr(pynccl, "SPIN_S", 0.0)
    monkeypatch.setattr(pynccl, "ABORT_S", 0.05)
    yield found
    found.free.set()


def join(**options: Any) -> pynccl.Communicator:
    return pynccl.init(b"name", 0, 2, device="cuda:0", **options)


def gone() -> None:
    raise ConnectionResetError("a peer has closed its connection")


def test_a_wait_ends_when_the_peer_is_known_to_be_gone(library: Library) -> None:
    """At once, though the abort takes as long as graphs live; nothing can be called afterwards but destroy."""
    comm, start = join(deadline_s=20.0), time.monotonic()
    comm.watch = gone  # type: ignore[attr-defined]
    text = "^NCCL on rank 0: a peer did not take part: a peer has closed its connection$"
    with pytest.raises(ConnectionResetError, match=text):
        comm.wait()
    assert time.monotonic() - start < 10 and library.asked == 1
    with pytest.raises(ConnectionError, match="has ended: NCCL on rank 0: a peer did not"):
        comm.wait()
    with pytest.raises(RuntimeError, match="rank 0 is still not ended, 0.05 s after: NCCL on rank 0: a peer did not"):
        comm.destroy()
    library.free.set()
    comm.abort()
    comm.destroy()
    comm.destroy()
    assert library.asked == 1


@pytest.mark.parametrize("device", ["cpu", "gpu0", 1.5, "meta"])
def test_a_device_that_is_no_gpu_is_named(library: Library, device: Any) -> None:
    with pytest.raises(ArgumentError, match=f"^device: expected a CUDA device, got {device!r}$"):
        pynccl.init(b"name", 0, 2, device=device)


@pytest.mark.parametrize(("device", "taken"), [(0, 0), ("cuda:0", 0), ("cuda", 1), (None, 1), (2, 2)])
def test_a_device_is_the_one_asked_for(
    library: Library, device: Any, taken: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Number 0 was taken for none."""
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert pynccl.init(b"name", 0, 2, device=device).device == torch.device("cuda", taken)


def test_joining_ends_when_a_peer_is_gone(library: Library) -> None:
    library.state = "InProgress"
    with pytest.raises(ConnectionResetError, match="the other ranks did not come: a peer has closed"):
        join(watch=gone)


@pytest.mark.parametrize(
    ("state", "deadline_s", "error"),
    [
        ("SystemError", 20.0, "SystemError: what went wrong$"),
        ("Success", 0.05, "a peer did not take part within 0.05 s$"),
    ],
)
def test_other_ends_of_a_wait(library: Library, state: str, deadline_s: float, error: str) -> None:
    comm = join(deadline_s=deadline_s)
    library.state = state
    with pytest.raises(OSError, match=error):
        comm.wait()
    assert library.asked == 1


@pytest.mark.parametrize("why", ["watch", "deadline", "library"])
def test_an_error_holds_nothing_of_its_callers(library: Library, why: str) -> None:
    """A worker's graphs go when the worker does, or the abort would wait for the cycle collector."""

    class Worker:
        def step(self) -> None:
            comm.wait()

    comm = join(deadline_s=0.05 if why == "deadline" else 20.0)
    comm.watch = gone if why == "watch" else lambda: None  # type: ignore[attr-defined]
    library.state = "SystemError" if why == "library" else "Success"
    gc.collect()
    gc.disable()
    try:
        worker = Worker()
        watched = weakref.ref(worker)
        try:
            worker.step()
        except OSError as error:
            assert str(error)
        else:
            raise AssertionError("a wait for nobody")
        del worker
        assert watched() is None
    finally:
        gc.enable()
