"""What is run while a GPU works: when, and that it goes on for ever without touching anything."""

import numpy as np
import pytest

from tpverify.runtime.rehearsal import BEFORE_S, SHORT_S, Rehearsal


class Counted(Rehearsal):
    runs = 0

    def rehearse(self) -> None:
        self.runs += 1


def wait(rehearsal: Counted, lasts_s: float) -> list[float]:
    """When in a wait it rehearsed, in s."""
    found = []
    for waited_s in np.arange(0, lasts_s, 1e-4):
        before = rehearsal.runs
        rehearsal(waited_s)
        found += [waited_s] * (rehearsal.runs - before)
    return found


def test_once_in_a_wait_and_late_in_it() -> None:
    counted = Counted()
    assert wait(counted, 0.020) == pytest.approx([SHORT_S], abs=2e-4)  # nothing is known of how long it takes
    assert wait(counted, 0.020) == pytest.approx([0.020 - BEFORE_S], abs=2e-4)
    assert wait(counted, 0.030) == pytest.approx([0.020 - BEFORE_S], abs=2e-4)
    assert wait(counted, 0.020) == []
    assert wait(counted, 0.020) == pytest.approx([0.020 - BEFORE_S], abs=2e-4)


def test_not_in_short_waits() -> None:
    counted = Counted()
    for _ in range(100):
        assert wait(counted, SHORT_S) == []


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
