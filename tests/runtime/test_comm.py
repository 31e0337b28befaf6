"""The star of sockets, one thread a rank, against torch.stack and torch.cat."""

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tpverify.runtime.comm import SocketComm


def on_ranks(rendezvous: Path, size: int, body: Callable[[SocketComm], object], timeout_s: float = 20.0) -> list:
    """body's result or exception on each of `size` ranks."""

    def run(rank: int) -> object:
        comm = SocketComm(str(rendezvous), rank, size, timeout_s)
        try:
            return body(comm)
        except OSError as error:
            return error
        finally:
            comm.destroy()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def rows(rank: int, dtype: torch.dtype, count: int = 2) -> torch.Tensor:
    return (torch.arange(3 * count).reshape(count, 3) + 10 * rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_gather(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    def body(comm: SocketComm) -> object:
        return comm.gather(rows(comm.rank, dtype).T.contiguous().T)  # a strided input

    first, *others = on_ranks(tmp_path / "meet", size, body)
    assert torch.equal(torch.stack(first), torch.stack([rows(rank, dtype) for rank in range(size)]))
    assert others == [None] * (size - 1)


@pytest.mark.parametrize("counts", [[2], [1, 1], [3, 0, 2, 1, 4], [0, 0, 5]])
def test_allgather_of_unequal_shares(tmp_path: Path, counts: list[int]) -> None:
    def body(comm: SocketComm) -> object:
        return [comm.allgather(rows(comm.rank, torch.float32, counts[comm.rank]), counts) for _ in range(3)][-1]

    expected = torch.cat([rows(rank, torch.float32, count) for rank, count in enumerate(counts)])
    assert all(torch.equal(out, expected) for out in on_ranks(tmp_path / "meet", len(counts), body))


@pytest.mark.parametrize("counts", [[2], [1, 1], [3, 0, 2, 1, 4], [0, 0, 5]])
def test_alltoall_of_unequal_shares(tmp_path: Path, counts: list[int]) -> None:
    def body(comm: SocketComm) -> object:
        return [comm.alltoall(rows(comm.rank, torch.float32, sum(counts)), counts) for _ in range(3)][-1]

    everything = torch.stack([rows(rank, torch.float32, sum(counts)) for rank in range(len(counts))], dim=1)
    outs = on_ranks(tmp_path / "meet", len(counts), body)
    assert all(torch.equal(out, own) for out, own in zip(outs, everything.split(counts), strict=True))


def test_more_than_a_socket_holds(tmp_path: Path) -> None:
    big = torch.randn(400_000, 3)

    def body(comm: SocketComm) -> object:
        return comm.allgather(big + comm.rank, [len(big)] * comm.size)

    expected = torch.cat([big, big + 1, big + 2])
    assert all(torch.equal(out, expected) for out in on_ranks(tmp_path / "meet", 3, body))


@pytest.mark.parametrize("leaver", [0, 1])
def test_peer_that_leaves_is_an_error_not_a_hang(tmp_path: Path, leaver: int) -> None:
    def body(comm: SocketComm) -> object:
        if comm.rank == leaver:
            return None
        return comm.allgather(rows(comm.rank, torch.float32), [2, 2])

    results = on_ranks(tmp_path / "meet", 2, body, timeout_s=5)
    assert isinstance(results[1 - leaver], OSError)


def test_silent_peer_is_an_error_at_the_timeout(tmp_path: Path) -> None:
    done = threading.Event()

    def body(comm: SocketComm) -> object:
        if comm.rank == 1:
            done.wait(20)
            return None
        try:
            return comm.gather(rows(0, torch.float32))
        finally:
            done.set()

    start = time.monotonic()
    results = on_ranks(tmp_path / "meet", 2, body, timeout_s=1)
    assert isinstance(results[0], TimeoutError) and time.monotonic() - start < 15


@pytest.mark.parametrize("rank", [0, 1])
def test_peer_that_never_comes_is_an_error_not_a_hang(tmp_path: Path, rank: int) -> None:
    """nccl#289: building a communicator hung when a rank died meanwhile."""
    with pytest.raises(TimeoutError):
        SocketComm(str(tmp_path / "meet"), rank, 2, timeout_s=1)


def test_rendezvous_in_use(tmp_path: Path) -> None:
    (tmp_path / "meet").touch()
    with pytest.raises(OSError, match="Address already in use"):
        SocketComm(str(tmp_path / "meet"), 0, 2, timeout_s=1)


@pytest.mark.parametrize("size", [1, 3])
def test_a_meeting_leaves_nothing_behind(tmp_path: Path, size: int) -> None:
    """Though whoever called it may be killed meanwhile."""
    place = tmp_path / "of ours"
    place.mkdir()
    on_ranks(place / "meet", size, lambda comm: comm.gather(torch.zeros(1)))
    assert not place.exists()


def test_a_look_finds_a_peer_gone_and_takes_nothing_of_what_came(tmp_path: Path) -> None:
    sent, looked = threading.Event(), threading.Event()

    def body(comm: SocketComm) -> object:
        if comm.rank == 1:
            comm.gather(rows(1, torch.float32))
            sent.set()
            assert looked.wait(20)
            return None
        comm.look()
        assert sent.wait(20)
        comm.look()
        found = comm.gather(rows(0, torch.float32))
        looked.set()
        end = time.monotonic() + 20
        while time.monotonic() < end:
            comm.look()
        return found

    first, _ = on_ranks(tmp_path / "meet", 2, body)
    assert isinstance(first, ConnectionResetError)


def test_a_rank_alone_has_nobody_to_look_for(tmp_path: Path) -> None:
    assert on_ranks(tmp_path / "meet", 1, lambda comm: comm.look()) == [None]
