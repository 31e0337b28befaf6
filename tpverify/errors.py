"""Errors a caller can act on. Everything raised for bad input is a ValueError that names the argument."""


class ArgumentError(ValueError):
    """An argument was not what the call accepts: names the argument, what was expected and what came."""

    def __init__(self, argument: str, expected: object, got: object) -> None:
        super().__init__(f"{argument}: expected {expected}, got {got}")
        self.argument = argument


def describe(value: object) -> str:
    """`value` for an error text: short, and never an error of its own."""
    try:
        text = " ".join(repr(value).split())
    except Exception:  # an int of more digits than Python prints, a class with a broken __repr__
        return type(value).__name__
    return text if len(text) <= 80 else f"{text[:77]}..."


class PoolFull(RuntimeError):
    """The KV pool cannot hold the request. Nothing was allocated; the message says how many slots would be needed.

    needed, free, evictable: slots, where the pool is what was full; 0 where it was something else.
    """

    def __init__(self, message: str, *, needed: int = 0, free: int = 0, evictable: int = 0) -> None:
        super().__init__(message)
        self.needed, self.free, self.evictable = needed, free, evictable


class RankFailure(RuntimeError):
    """A rank died, hung past its deadline or diverged: names the rank, the step and the cause."""

    def __init__(self, rank: int, step: int, cause: str) -> None:
        super().__init__(f"rank {rank} failed at step {step}: {cause}")
        self.rank, self.step, self.cause = rank, step, cause


class ClusterError(RuntimeError):
    """The cluster cannot place the ranks: says what was asked for and what there is."""
