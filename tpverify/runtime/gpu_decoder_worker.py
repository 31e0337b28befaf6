"""The target model on one GPU rank, its choices and the drafter: a step is a few CUDA graphs and one wait.

Graphs are those of the stages that a step may do without: verify; accept, greedy or sampled; draft. Every rank runs all
of them, so any could take over from rank 0, which alone answers.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tpverify.kv.log import Replica
from tpverify.runtime.comm import GpuComm
from tpverify.runtime.decoder_worker import DecoderOptions
from tpverify.runtime.frames import digest_of, frame_of
from tpverify.runtime.gpu_stages import NODES_TOGETHER, GpuStages
from tpverify.runtime.gpu_step import StepRequest
from tpverify.runtime.graphs import Bucket, Graphs
from tpverify.runtime.messages import (
    Decode,
    Decoded,
    DecodedRequest,
    Frame,
    HiddenDigest,
    HiddenStates,
    Work,
)
from tpverify.runtime.moves import Kept


class Eager(Graphs):
    """Runs the bodies as they are, where a gather cannot be captured: ranks that share a GPU, or have none."""

    def __init__(self, body: Callable[[Bucket], None], buckets: Sequence[Bucket]) -> None:
        self.buckets = sorted(buckets, key=lambda bucket: (bucket.nodes, bucket.batch))
        self._replays = {bucket: partial(body, bucket) for bucket in buckets}


class GpuDecoderWorker:
    """Rank r of tp. Every rank keeps, by slot, the latent rows of all layers, the final hidden state and the drafter's
    context row."""

    def __init__(self, comm: GpuComm, device: str, options: dict[str, Any], kept: Kept | None = None) -> None:
        torch.set_num_threads(1)  # ranks share cores
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.comm, self.device = comm, torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        self.stages = stages = GpuStages(comm, self.device, msgspec.convert(options, DecoderOptions), kept)
        self.kept, self.config = stages.kept, stages.config

        def build(body: Callable[[Bucket], None]) -> Graphs:
            if comm.capturable:
                return Graphs(body, stages.buckets, comm.wait)
            return Eager(body, stages.buckets)

        self.verify = build(stages.verify)
        self.accept = {sampled: build(partial(stages.accept, sampled)) for sampled in (False, True)}
        self.draft = build(stages.draft) if stages.drafter is not None else None

    def handle(self, work: Work, frames: list[memoryview], replica: Replica) -> tuple[Any, list[Frame]]:
        if isinstance(work, Decode):
            return self._decode(work, replica), []
        if isinstance(work, HiddenDigest):
            return digest_of(self._rows(self.stages.hidden, replica.prefix_slots(work.seq)[: work.count])), []
        if isinstance(work, HiddenStates):
            rows = self._rows(self.stages.hidden, replica.prefix_slots(work.seq)[: work.count])
            return None, [frame_of(rows)] if self.comm.rank == 0 else []
        raise TypeError(f"a decoder rank cannot do {type(work).__name__}")

    def _decode(self, work: Decode, replica: Replica) -> Decoded | None:
        start = time.perf_counter()
        requests = []
        for request in work.requests:
            slots = replica.prefix_slots(request.seq), replica.tree_slots(request.seq)
            requests.append(StepRequest(request, *slots))
            self._check(requests[-1])
        answers: list[DecodedRequest] = []
        seconds = {"verify": 0.0, "accept": 0.0, "draft": 0.0}
        for together in self._passes(requests):
            found, stages = self._pass(together)
            answers += found
            for stage, value in stages.items():
                seconds[stage] += value
        # What no stage of the device's took: tables, launches, and the wait for the rest.
        seconds["verify"] = time.perf_counter() - start - seconds["accept"] - seconds["draft"]
        return Decoded(answers, seconds) if self.comm.rank == 0 else None

    def _check(self, request: StepRequest) -> None:
        """Raise ValueError for what would read beyond a table on the device, which no process survives."""
        request.check_tokens(self.config.vocab_size)
        deepest = int(request.depths.max())
        if not request.prompt and deepest >= self.stages.longest:
            raise ValueError(f"parents: expected at most {self.stages.longest - 1} nodes below the root, got {deepest}")
        if request.committed + deepest >= self.config.max_position_embeddings:
            last = request.committed + deepest
            raise ValueError(f"positions: expected less than {self.config.max_position_embeddings}, got {last}")

    def _passes(self, requests: list[StepRequest]) -> Iterator[list[StepRequest]]:
        """Consecutive requests that fit the largest bucket together."""
        together: list[StepRequest] = []
        for request in requests:
            nodes = sum(map(len, together)) + len(request)
            if together and (len(together) == self.stages.batch or nodes > NODES_TOGETHER[-1]):
                yield together
                together = []
            together.append(request)
        yield together

    def _pass(self, requests: list[StepRequest]) -> tuple[list[DecodedRequest], dict[str, float]]:
        bucket = self.verify.bucket_for(len(requests), sum(map(len, requests)))
        step = self.stages.steps[bucket]
        step.stage(requests)
        self.stages.plans[bucket].stage([request.verify for request in requests])
        self.verify.replay(bucket)
        self.accept[any(request.temperature > 0 for request in requests)].replay(bucket)
        stages = ["verify", "accept"]
        if self.draft is not None and any(request.candidates for request in requests):
            self.draft.replay(bucket)
            stages.append("draft")
        self.comm.wait()
        return step.answers(requests) if self.comm.rank == 0 else [], self.stages.clock.seconds(stages)

    def _rows(self, table: Tensor, slots: np.ndarray) -> Tensor:
        """table[slots] on the CPU."""
        return table[torch.from_numpy(slots.astype(np.int64)).to(self.device)].cpu()
