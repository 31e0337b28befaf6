"""When defrag that nobody asked for may run."""

MOST_PATIENCE = 64


class Pacer:
    """It gets at most `share` of the time that steps take, and after each plan that finds nothing to move it waits
    twice as long (as Linux defers compaction), up to 64 times.

    The caller reports every step's seconds, asks `due` between steps, and reports what a call of KvLog.defrag cost,
    copies included.
    """

    def __init__(self, share: float = 0.02, first_cost_s: float = 0.01) -> None:
        """first_cost_s: what the first call is expected to cost."""
        self.share = share
        self._cost, self._patience, self._earned = first_cost_s, 1, 0.0

    def step(self, seconds: float) -> None:
        self._earned += self.share * seconds

    def due(self) -> bool:
        return self._earned >= self._cost * self._patience

    def ran(self, seconds: float, moves: int, done: bool) -> None:
        """moves and done as in Moved: a call that only waits for acknowledgements changes nothing about patience."""
        self._earned = min(0.0, self._cost - seconds)
        self._cost = max(seconds, self._cost / 2)
        if moves:
            self._patience = 1
        elif done:
            self._patience = min(2 * self._patience, MOST_PATIENCE)
