"""Which graph a step takes, and what is said of one that cannot be captured."""

import itertools
from collections.abc import Callable

import pytest

from tpverify.errors import ArgumentError
from tpverify.runtime import graphs
from tpverify.runtime.graphs import Bucket, Graphs

BUCKETS = [Bucket(8, 1032), Bucket(1, 1), Bucket(1, 33), Bucket(8, 8), Bucket(4, 33), Bucket(1, 33)]


class FakeRecorder:
    """Runs twice as the real one does, and repeats by running again. Its capture may end badly."""

    def __init__(self, wait: object, end: Exception | None = None) -> None:
        self._end = end

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        run()
        try:
            run()
        finally:
            if self._end:
                raise self._end
        return run


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(graphs, "Recorder", FakeRecorder)


def test_the_smallest_bucket_that_fits(recorder: None) -> None:
    """Against brute force over all of them."""
    found = Graphs(lambda _: None, BUCKETS)
    for batch, nodes in itertools.product(range(1, 10), (1, 2, 8, 9, 32, 33, 34, 1000, 1032, 1033)):
        fit = [bucket for bucket in BUCKETS if bucket.batch >= batch and bucket.nodes >= nodes]
        if fit:
            assert found.bucket_for(batch, nodes) == min(fit, key=lambda bucket: (bucket.nodes, bucket.batch))
        else:
            with pytest.raises(ArgumentError, match=f"8 with 1032 nodes, got {batch} with {nodes} nodes") as error:
                found.bucket_for(batch, nodes)
            assert error.value.argument == "requests"


def test_every_bucket_is_recorded_once_and_replayed_by_itself(recorder: None) -> None:
    ran: list[Bucket] = []
    found = Graphs(ran.append, BUCKETS)
    largest_first = [Bucket(8, 1032), Bucket(4, 33), Bucket(1, 33), Bucket(8, 8), Bucket(1, 1)]
    assert ran == [bucket for bucket in largest_first for _ in range(2)], "warm-up, then capture"
    ran.clear()
    found.replay(Bucket(4, 33))
    assert ran == [Bucket(4, 33)]


def test_a_body_that_fails_names_its_bucket(recorder: None) -> None:
    def body(bucket: Bucket) -> None:
        if bucket.nodes < 33:
            raise ValueError("no kernel for so few")

    with pytest.raises(RuntimeError, match="^CUDA graph of 8 requests with 8 nodes: ValueError: no kernel for so few$"):
        Graphs(body, BUCKETS)


def test_the_first_error_of_a_broken_capture_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaving the capture raises an error of its own, which says nothing."""
    monkeypatch.setattr(graphs, "Recorder", lambda wait: FakeRecorder(wait, RuntimeError("capture invalidated")))
    runs = itertools.count()

    def body(bucket: Bucket) -> None:
        if next(runs):
            raise MemoryError("synchronised")

    with pytest.raises(RuntimeError, match="8 requests with 1032 nodes: MemoryError: synchronised$"):
        Graphs(body, BUCKETS)
    with pytest.raises(RuntimeError, match="8 requests with 1032 nodes: RuntimeError: capture invalidated$"):
        Graphs(lambda _: None, BUCKETS)


@pytest.mark.parametrize(
    ("buckets", "argument"),
    [([], "buckets"), ([Bucket(0, 1)], "bucket.batch"), ([Bucket(1, True)], "bucket.nodes")],
)
def test_buckets_that_are_none(recorder: None, buckets: list[Bucket], argument: str) -> None:
    with pytest.raises(ArgumentError) as error:
        Graphs(lambda _: None, buckets)
    assert error.value.argument == argument
