"""The star of gloo sends, one thread a rank, against torch.stack."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tpverify.runtime.comm import GlooComm


def on_ranks(rendezvous: Path, size: int, body: Callable[[GlooComm], object], timeout_s: float = 20.0) -> list:
    """body's result or exception on each of `size` ranks."""

    def run(rank: int) -> object:
        comm = GlooComm(str(rendezvous), rank, size, timeout_s)
        try:
            return body(comm)
        except RuntimeError as error:
            return error
        finally:
            comm.destroy()

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))


def rows(rank: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(6).reshape(2, 3) + 10 * rank).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
@pytest.mark.parametrize("size", [1, 2, 5])
def test_gather_and_allgather(tmp_path: Path, size: int, dtype: torch.dtype) -> None:
    def body(comm: GlooComm) -> tuple:
        out = torch.full((size, 2, 3), -1).to(dtype)
        comm.allgather(out, rows(comm.rank, dtype))
        return comm.gather(rows(comm.rank, dtype).T.contiguous().T), out  # a strided input

    expected = torch.stack([rows(rank, dtype) for rank in range(size)])
    results = on_ranks(tmp_path / "meet", size, body)
    assert all(torch.equal(out, expected) for _, out in results)
    assert torch.equal(torch.stack(results[0][0]), expected)
    assert [parts for parts, _ in results[1:]] == [None] * (size - 1)


@pytest.mark.parametrize("root", [0, 2])
def test_broadcast(tmp_path: Path, root: int) -> None:
    def body(comm: GlooComm) -> torch.Tensor:
        x = rows(comm.rank, torch.float32)
        comm.broadcast(x, root)
        comm.barrier()
        return x

    assert all(torch.equal(x, rows(root, torch.float32)) for x in on_ranks(tmp_path / "meet", 3, body))


def test_peer_that_leaves_is_an_error_not_a_hang(tmp_path: Path) -> None:
    def body(comm: GlooComm) -> object:
        return None if comm.rank == 1 else comm.gather(rows(comm.rank, torch.float32))

    results = on_ranks(tmp_path / "meet", 2, body, timeout_s=2)
    assert isinstance(results[0], RuntimeError)


def test_peer_that_never_comes_is_an_error_not_a_hang(tmp_path: Path) -> None:
    """nccl#289: building a communicator hung when a rank died meanwhile."""
    with pytest.raises(RuntimeError):
        GlooComm(str(tmp_path / "meet"), 0, 2, timeout_s=1)
