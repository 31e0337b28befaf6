"""budget="auto": the draft budget that commits most tokens a second, from what the steps cost and accepted.

The budget decides speed only; the emitted tokens are the same for every budget.
"""

from bisect import bisect_left
from collections.abc import Sequence

from tpverify.config import MAX_NODES
from tpverify.errors import ArgumentError

DEFAULT_CANDIDATES = (8, 16, 32, 64, 128, 256)


class AutoBudget:
    """Chooses among a few budgets; the same updates always give the same choices.

    Each candidate is first tried for `trial` steps, in ascending order. From then on a running mean of seconds and
    accept length (weight `smoothing` on the newest step) rates the candidates by tokens / second; another candidate
    takes over only when it is better by the factor 1 + `margin`. Every `retry` steps the next candidate in turn is
    tried again, so that a rating never goes stale.

    candidates: distinct budgets in 0..1023. Raises ArgumentError.
    """

    def __init__(
        self,
        candidates: Sequence[int] = DEFAULT_CANDIDATES,
        trial: int = 3,
        retry: int = 64,
        margin: float = 0.05,
        smoothing: float = 0.2,
    ) -> None:
        self.candidates = sorted(candidates)
        if not self.candidates or len(set(self.candidates)) < len(self.candidates):
            raise ArgumentError("candidates", "one or more distinct budgets", candidates)
        if not 0 <= self.candidates[0] <= self.candidates[-1] < MAX_NODES:
            raise ArgumentError("candidates", f"budgets in 0..{MAX_NODES - 1}", candidates)
        if trial < 1 or retry < 1:
            raise ArgumentError("trial, retry", "at least 1 step", (trial, retry))
        if not (margin >= 0 and 0 < smoothing <= 1):
            raise ArgumentError("margin, smoothing", ">= 0 and in (0, 1]", (margin, smoothing))
        self._trial, self._retry, self._margin, self._smoothing = trial, retry, margin, smoothing
        self._seconds: list[float | None] = [None] * len(self.candidates)
        self._accepted = [0.0] * len(self.candidates)
        self._best = 0
        self._queue = list(range(len(self.candidates)))  # candidates to try, the first is being tried
        self._next_retry = 0
        self._steps = 0

    @property
    def budget(self) -> int:
        """The budget for the next step."""
        return self.candidates[self._queue[0] if self._queue else self._best]

    def update(self, n_nodes: int, step_seconds: float, accept_length: int) -> None:
        """Records one step: the tree's size (root included), its wall time and its accept length (root included).

        A step counts for the smallest candidate that could have held its tree. Raises ArgumentError.
        """
        if not 0 < step_seconds < float("inf"):
            raise ArgumentError("step_seconds", "a positive finite number", step_seconds)
        if not 1 <= accept_length <= n_nodes:
            raise ArgumentError("accept_length", f"1 to n_nodes = {n_nodes}", accept_length)
        i = min(bisect_left(self.candidates, n_nodes - 1), len(self.candidates) - 1)
        old = self._seconds[i]
        weight = 1.0 if old is None else self._smoothing
        self._seconds[i] = step_seconds if old is None else old + weight * (step_seconds - old)
        self._accepted[i] += weight * (accept_length - self._accepted[i])
        self._steps += 1
        if self._queue:
            if self._steps >= self._trial:
                self._queue.pop(0)
                self._steps = 0
        elif self._steps >= self._retry:
            self._queue.append(self._next_retry)
            self._next_retry = (self._next_retry + 1) % len(self.candidates)
            self._steps = 0
        if not self._queue:
            self._choose()

    def rate(self, i: int) -> float:
        """Tokens a second of candidate i by the running means; 0 before its first step."""
        seconds = self._seconds[i]
        return self._accepted[i] / seconds if seconds else 0.0

    def _choose(self) -> None:
        rates = [self.rate(i) for i in range(len(self.candidates))]
        best = max(range(len(rates)), key=rates.__getitem__)
        if rates[best] > rates[self._best] * (1.0 + self._margin):
            self._best = best
