"""One Ray for the folder, and one group of ranks for the tests that leave their ranks healthy."""

import tempfile
from collections.abc import Iterator

import pytest

from tpverify.runtime import cluster, coordinator
from tpverify.runtime.ranks import RankGroup


@pytest.fixture(scope="session")
def ray_session() -> Iterator[None]:
    """Every group of the folder joins this one, so that only the first test waits for Ray to start.

    Temporary files go to a folder that nobody else writes to.
    """
    with (
        cluster.session(),
        tempfile.TemporaryDirectory(prefix="tp-") as directory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(tempfile, "tempdir", directory)
        yield


@pytest.fixture(scope="session")
def ranks(ray_session: None) -> Iterator[RankGroup]:
    with RankGroup(4, "cpu", deadline_s=60) as group:
        yield group


@pytest.fixture(autouse=True)
def nothing_moves_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it does follows the clock; tests that count slots, and texts without moves, are not to depend on that."""
    monkeypatch.setattr(coordinator, "SCATTERED", 1 << 30)
