"""How long the old slot of a row that has moved stays unused."""

from tpverify.kv.slots import Slots


class Quarantine:
    """Sources of moves, in the order of the log. They leave once a step later than that which carried the move has been
    answered by every rank."""

    def __init__(self) -> None:
        self._waiting: list[tuple[int, Slots]] = []  # number of the move
        self._answered: list[Slots] = []  # their move was carried by a step that has been answered

    def __bool__(self) -> bool:
        return bool(self._waiting or self._answered)

    def add(self, number: int, slots: Slots) -> None:
        self._waiting.append((number, slots))

    def step(self, sent: int) -> list[Slots]:
        """A step that carried the log up to entry `sent` has been answered. Returns what leaves."""
        leaving, self._answered = self._answered, [slots for number, slots in self._waiting if number <= sent]
        self._waiting = [(number, slots) for number, slots in self._waiting if number > sent]
        return leaving
