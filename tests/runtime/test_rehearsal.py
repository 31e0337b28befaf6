"""What is run while a GPU works: how often, and that it goes on for ever without touching anything."""

import pytest

from tpverify.runtime.rehearsal import PERIOD_S, Rehearsal


class Counted(Rehearsal):
    runs = 0

    def rehearse(self) -> None:
        self.runs += 1


def test_once_a_period_and_not_in_short_waits() -> None:
    counted = Counted()
    for _ in range(100):  # waits of half a period, looked at ten times each
        for look in range(10):
            counted(look * PERIOD_S / 20)
    assert counted.runs == 0
    for look in range(55):
        counted(look * PERIOD_S / 10)
    assert counted.runs == 5
    counted(0.0)
    assert counted.runs == 5


def test_tables_of_its_own_last_for_ever() -> None:
    rehearsal = Rehearsal()
    for _ in range(1000):  # several sequences' worth; driver and rank compare their digests each time
        rehearsal.rehearse()
    assert rehearsal._log.stats()["sequences"] == 1


def test_what_goes_wrong_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    rehearsal = Rehearsal()
    monkeypatch.setattr(rehearsal._server.replica, "digest", lambda: "0" * 16)
    with pytest.raises(AssertionError):
        rehearsal.rehearse()
