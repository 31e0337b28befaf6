"""A whole step as CUDA graphs, one a bucket of step sizes, captured before the first step is served."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import torch

from tpverify.config import check_int
from tpverify.errors import ArgumentError


class Bucket(NamedTuple):
    """What a graph has room for. batch: requests at most. nodes: at most, those of all requests together."""

    batch: int
    nodes: int


class Graphs:
    """body(bucket) enqueues a step on the current stream, padded to the bucket; replay(bucket) repeats it.

    A body reads and writes buffers that live as long as the graphs, and neither allocates outside torch nor waits. What
    it allocates is memory that all graphs share: a step's results have to lie in buffers from outside. Collectives are
    captured with the rest, so all ranks build their graphs with the same buckets; each body runs twice, first to warm
    up, which wait(stream) waits for. Raises ArgumentError for no bucket; OSError, as it comes, if a peer is lost; and
    RuntimeError, with the bucket and the cause, if one cannot be captured: the process had better end then.
    """

    def __init__(
        self,
        body: Callable[[Bucket], None],
        buckets: Iterable[Bucket],
        wait: Callable[[Any], None] = torch.cuda.Stream.synchronize,
    ) -> None:
        self.buckets = sorted({_checked(bucket) for bucket in buckets}, key=lambda bucket: (bucket.nodes, bucket.batch))
        if not self.buckets:
            raise ArgumentError("buckets", "at least one", "none")
        recorder = Recorder(wait)
        # From the largest down: the others then fit into the memory of the first.
        self._replays = {bucket: _record(recorder, body, bucket) for bucket in reversed(self.buckets)}

    def bucket_for(self, batch: int, nodes: int) -> Bucket:
        """The bucket of fewest nodes, then of fewest requests, that `batch` requests of `nodes` nodes in all fit into.

        Raises ArgumentError if there is none.
        """
        for bucket in self.buckets:
            if batch <= bucket.batch and nodes <= bucket.nodes:
                return bucket
        sizes = ", ".join(f"{bucket.batch} with {bucket.nodes} nodes" for bucket in self.buckets)
        raise ArgumentError("requests", f"at most {sizes}", f"{batch} with {nodes} nodes")

    def replay(self, bucket: Bucket) -> None:
        """Enqueue the step on the current stream: a single launch."""
        self._replays[bucket]()


class Recorder:
    """Captures on a stream of its own; all that it captures shares a pool of memory."""

    def __init__(self, wait: Callable[[Any], None]) -> None:
        self._stream, self._pool, self._wait = torch.cuda.Stream(), torch.cuda.graph_pool_handle(), wait

    def __call__(self, run: Callable[[], None]) -> Callable[[], None]:
        """What `run` enqueues, as a call that enqueues it again."""
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            run()  # libraries make their workspaces, and NCCL its connections, outside the capture
        self._wait(self._stream)
        graph = torch.cuda.CUDAGraph()
        # NCCL's own threads may do what a capture forbids its own thread.
        with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
            run()
        return graph.replay


def _record(recorder: Recorder, body: Callable[[Bucket], None], bucket: Bucket) -> Callable[[], None]:
    raised: list[Exception] = []

    def run() -> None:
        try:
            body(bucket)
        except Exception as failure:
            raised.append(failure)
            raise

    try:
        return recorder(run)
    except Exception as failure:
        cause = raised[0] if raised else failure  # the end of a broken capture raises an error of its own
        if isinstance(cause, OSError):
            raise cause from None
        size = f"{bucket.batch} requests with {bucket.nodes} nodes"
        raise RuntimeError(f"CUDA graph of {size}: {type(cause).__name__}: {cause}") from cause


def _checked(bucket: Bucket) -> Bucket:
    check = partial(check_int, low=1, high=2**31 - 1)
    return Bucket(check("bucket.batch", bucket.batch), check("bucket.nodes", bucket.nodes))
