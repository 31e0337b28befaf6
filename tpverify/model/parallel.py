"""How the ranks of a group share a forward pass: heads in attention, rows everywhere else.

A row's bits do not depend on the rows beside it, nor a head's on the heads beside it, so sharing changes no bit.
"""

from collections.abc import Callable, Sequence

from torch import Tensor

AllGather = Callable[[Tensor, Sequence[int]], Tensor]  # x [rows[rank], ...], rows -> [sum(rows), ...] in rank order


class TensorParallel:
    """Rank `rank` of `size`. Of n rows it has a consecutive n / size, rounded down or up."""

    def __init__(self, rank: int = 0, size: int = 1, allgather: AllGather | None = None) -> None:
        assert size == 1 or allgather is not None
        self.rank, self.size, self._allgather = rank, size, allgather

    def own(self, n: int) -> slice:
        """This rank's rows of n."""
        return slice(n * self.rank // self.size, n * (self.rank + 1) // self.size)

    def all_rows(self, x: Tensor, n: int) -> Tensor:
        """Own rows [own, ...] -> all rows [n, ...]."""
        if self._allgather is None:
            return x
        return self._allgather(x, [n * (rank + 1) // self.size - n * rank // self.size for rank in range(self.size)])

    def all_heads(self, x: Tensor) -> Tensor:
        """Own heads [n, local heads, v] -> all heads [n, heads, v]."""
        if self._allgather is None:
            return x
        parts = self._allgather(x, [len(x)] * self.size).unflatten(0, (self.size, -1))
        return parts.transpose(0, 1).flatten(1, 2)
