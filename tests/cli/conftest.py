"""The command as a function, and two ranks that the tests of a file share."""

import json
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest

from tpverify.cli import main
from tpverify.report import parity  # noqa: F401  with all that imports RankGroup, before tests replace it
from tpverify.runtime import engine, ranks  # noqa: F401
from tpverify.runtime.ranks import RankGroup


class Done(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[RankGroup]:
    with RankGroup(2, "cpu", deadline_s=60) as group:
        yield group


@pytest.fixture
def lent_ranks(two_ranks: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands that start two ranks get these, and leave them running."""

    def lend(size: int, device: str, deadline_s: float, oversubscribe: bool = False) -> RankGroup:
        assert (size, device, oversubscribe) == (2, "cpu", False)
        return two_ranks

    monkeypatch.setattr(RankGroup, "__exit__", lambda *_: None)
    monkeypatch.setattr(ranks, "RankGroup", lend)


@pytest.fixture
def tpverify(capfd: pytest.CaptureFixture[str]) -> Callable[..., Done]:
    """Runs the command in this process. capfd: what libraries print behind Python's back counts too."""

    def run(*arguments: str) -> Done:
        try:
            code = main(arguments)
        except SystemExit as end:
            code = end.code
        return Done(code, *capfd.readouterr())

    return run
