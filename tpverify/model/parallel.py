"""How the ranks of a group share a forward pass: heads in attention, rows everywhere else.

A row's bits do not depend on the rows beside it, nor a head's on the heads beside it, so sharing changes no bit.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from tpverify.ops import dense


class Collectives(Protocol):
    """What the ranks of a group call together, each with the same `rows`: how many every rank has. Prepared once for
    contiguous tensors, then done by each call of what comes back."""

    def prepare_allgather(self, x: Tensor, rows: Sequence[int], out: Tensor) -> Callable[[], None]:
        """Own rows [rows[rank], ...] -> all rows, out [sum(rows), ...]."""

    def prepare_alltoall(self, x: Tensor, rows: Sequence[int], out: Tensor) -> Callable[[], None]:
        """Own part of all rows [sum(rows), ...] -> every rank's part of own rows, out [rows[rank], size, ...]."""


class TensorParallel:
    """Rank `rank` of `size`. Of n rows it has a consecutive n / size, rounded down or up."""

    def __init__(self, rank: int = 0, size: int = 1, comm: Collectives | None = None) -> None:
        assert size == 1 or comm is not None
        self.rank, self.size, self._comm = rank, size, comm if size > 1 else None

    def own(self, n: int) -> slice:
        """This rank's rows of n."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def all_rows(self, x: Tensor, n: int) -> Tensor:
        """Own rows [own, ...] -> all rows [n, ...]."""
        if self._comm is None:
            return x
        out = x.new_empty(n, *x.shape[1:])
        dense.perform(self._comm.prepare_allgather(x, self._rows(n), out))
        return out

    def own_rows(self, x: Tensor) -> Tensor:
        """All rows of own heads [n, local heads, v] -> own rows of all heads [own, heads, v]."""
        if self._comm is None:
            return x
        rows = self._rows(x.shape[0])
        out = x.new_empty(rows[self.rank], self.size, *x.shape[1:])
        dense.perform(self._comm.prepare_alltoall(x, rows, out))
        return out.flatten(1, 2)

    def _rows(self, n: int) -> list[int]:
        return [n * (rank + 1) // self.size - n * rank // self.size for rank in range(self.size)]
