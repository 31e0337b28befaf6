"""What a communicator between ranks does, whichever library carries it, and the arguments that it takes."""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from tpverify.config import check_int, check_type
from tpverify.errors import ArgumentError

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.uint8)

Meanwhile = Callable[[float], None]


class Communicator(Protocol):
    """Ranks 0..size-1 that call the same collectives in the same order, with shapes and dtypes that fit.

    Tensors are contiguous, of one of DTYPES, on the communicator's device. A NCCL call is enqueued on `stream`, by
    default the current one, and may be captured in a CUDA graph; a gloo call returns when it is done. An argument that
    does not fit is an ArgumentError, before anything is sent.
    """

    rank: int
    size: int

    def allgather(self, x: Tensor, out: Tensor, stream: Any = None) -> None:
        """Every rank's x, one after another in rank order, into out, which has size times x's elements."""

    def allreduce(self, x: Tensor, out: Tensor, stream: Any = None) -> None:
        """The sum of every rank's x into out, which may be x. uint8 wraps around."""

    def broadcast(self, x: Tensor, root: int, stream: Any = None) -> None:
        """root's x into everyone's x."""

    def send(self, x: Tensor, peer: int, stream: Any = None) -> None:
        """x to the recv of another rank."""

    def recv(self, out: Tensor, peer: int, stream: Any = None) -> None:
        """What another rank sends, into out."""

    def wait(self, stream: Any = None, meanwhile: Meanwhile | None = None) -> None:
        """Return when all that was enqueued on `stream` has run; until then call `meanwhile`, again and again, with the
        seconds waited so far. Raises OSError, after abort, as said above."""

    def async_error(self) -> str | None:
        """What has gone wrong so far, or None."""

    def abort(self) -> None:
        """End what is under way without waiting for anyone. To be called on every rank when one has failed."""

    def destroy(self) -> None:
        """Free everything, in step with the other ranks. Can be called again, and after abort, which it waits for:
        RuntimeError if a CUDA graph still holds collectives of this communicator."""


class Checks:
    """What the two communicators have in common: a shape, arguments that fit it, and an end."""

    device: torch.device
    rank: int
    size: int
    failure: str | None = None

    def require_live(self) -> None:
        if self.failure is not None:
            raise ConnectionError(f"this communicator has ended: {self.failure}")

    def check(self, name: str, x: Tensor, like: Tensor | None = None, times: int = 1) -> None:
        check_type(name, x, Tensor, f"a contiguous tensor on {self.device}")
        if x.device != self.device or not x.is_contiguous():
            raise ArgumentError(name, f"a contiguous tensor on {self.device}", f"{x.stride()} on {x.device}")
        if x.dtype not in DTYPES:
            raise ArgumentError(name, "bfloat16, float16, float32 or uint8", x.dtype)
        if like is not None and (x.dtype != like.dtype or x.numel() != times * like.numel()):
            expected = f"{times * like.numel()} elements of {like.dtype}"
            raise ArgumentError(name, expected, f"{x.numel()} of {x.dtype}")

    def check_peer(self, name: str, peer: int, others: bool) -> None:
        check_int(name, peer, 0, self.size - 1)
        if others and peer == self.rank:
            raise ArgumentError(name, "another rank", peer)
