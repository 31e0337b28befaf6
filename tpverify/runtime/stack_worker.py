"""The attention stack on one GPU rank: a step is three CUDA graphs.

The GPU works from the first graph on: it needs no tables, which are packed meanwhile and fetched by the second, and a
graph of 61 layers takes longer to launch than one layer takes to run (plan 0004).
"""

import time
from array import array
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tpverify.config import MAX_NODES, MlaGeometry
from tpverify.kv.log import Replica
from tpverify.model.checkpoint import ModelConfig
from tpverify.model.stack import ALIGNED, AttentionStack
from tpverify.ops.attention import ROW_DIM, TreeMask, VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.runtime.comm import GpuComm
from tpverify.runtime.device import latent_pool, require_room
from tpverify.runtime.gpu_step import StepRequest
from tpverify.runtime.graphs import Bucket, Graphs
from tpverify.runtime.messages import Decode, Decoded, DecodedRequest, DecodeRequest, Frame, Work
from tpverify.runtime.moves import Kept
from tpverify.runtime.rehearsal import NODES, Rehearsal
from tpverify.runtime.stages import GraphClock

FIRST = 1  # layers of a graph that is launched by itself: the launch of the others takes less time than they do


class StackOptions(msgspec.Struct, frozen=True):
    """config: fields of a ModelConfig. buckets: (requests, nodes in all) of a step at most; nodes are rounded up to
    ALIGNED. parts, seed: as of AttentionStack."""

    config: dict[str, Any]
    num_slots: int
    buckets: list[tuple[int, int]]
    parts: list[str]
    seed: int


class StackWorker:
    """Rank r of tp. The pool starts with random rows, the same on every rank: positions that the log commits are the
    prefix of a text that nobody had to compute.

    Trees are walked by the argmax; there is no drafter. Result of rank 0: Decoded, with seconds for "plan" (the tables
    packed, fetched and planned, beside what comes before the first attention), "layers", "head" (the argmax, after the
    product if "gemm" is among the parts, and its download) and "accept" (the walk, on the host).
    """

    def __init__(self, comm: GpuComm, device: str, options: dict[str, Any], kept: Kept | None = None) -> None:
        shape = msgspec.convert(options, StackOptions)
        torch.set_num_threads(1)  # ranks share cores
        torch.set_grad_enabled(False)
        self.comm, self.device = comm, torch.device(device)
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        config = ModelConfig(**shape.config)
        if kept is None:  # what plans need grows with slots too
            require_room(config.num_hidden_layers, shape.num_slots, ROW_DIM, torch.bfloat16, self.device)
        self.stack = AttentionStack(config, comm.rank, comm.size, self.device, torch.bfloat16, shape.seed, shape.parts)
        buckets = [Bucket(batch, -(-nodes // ALIGNED) * ALIGNED) for batch, nodes in shape.buckets]
        most = max((bucket.nodes for bucket in buckets), default=0)
        self._plans = {bucket: self._plan(bucket, shape.num_slots) for bucket in buckets}
        self._buffers = {bucket: self.stack.buffers(bucket.nodes) for bucket in buckets}
        pinned = self.device.type == "cuda"
        self._inputs = torch.zeros(3 * most, dtype=torch.int64, device=self.device)
        self._packed = torch.zeros(3 * most, dtype=torch.int64, pin_memory=pinned)
        # As a step writes them.
        self._rows = {bucket: self._packed[: 3 * bucket.nodes].view(3, -1).numpy() for bucket in buckets}
        self._parts = shape.parts
        self._logits = torch.zeros(most, config.vocab_size, dtype=torch.bfloat16, device=self.device)
        self._lse = torch.zeros(most, self.stack.local_heads, device=self.device)
        self._choices = torch.zeros(most, dtype=torch.int64, device=self.device)
        self._answer = torch.zeros(most, dtype=torch.int64, pin_memory=pinned)
        # Last, when what else the stack needs is there: so a pool that does not fit is refused by its own number.
        self.kept = kept or _random_rows(config.num_hidden_layers, shape, self.device)
        self.pool = self.kept.pool
        self._read_answer = self._answer.numpy()
        self._clock = GraphClock(self.device, "plan", "layers", "head")
        self._rehearsal = StackRehearsal(self.device, comm)
        self._enter = Graphs(self._run_enter, buckets, comm.wait)
        self._first = Graphs(self._run_first, buckets, comm.wait)
        self._others = Graphs(self._run_others, buckets, comm.wait)

    def handle(self, work: Work, frames: list[memoryview], replica: Replica) -> tuple[Any, list[Frame]]:
        if isinstance(work, Decode):
            return self._decode(work.requests, replica), []
        raise TypeError(f"a rank of the stack cannot do {type(work).__name__}")

    def _plan(self, bucket: Bucket, num_slots: int) -> VerifyPlan:
        """Of this bucket alone: its kernel is captured with the tile that fits a full step over a half-full pool."""
        geometry = MlaGeometry(self.stack.local_heads)
        plan = VerifyPlan(geometry, bucket.batch, min(bucket.nodes, MAX_NODES), bucket.batch * num_slots, self.device)
        sizes = np.diff(np.linspace(0, bucket.nodes, bucket.batch + 1).astype(int))
        prefix = np.zeros(num_slots // (2 * bucket.batch), np.int64)
        plan.update([VerifyRequest(prefix, np.zeros(n, np.int64), TreeMask.chain(n)) for n in sizes])
        return plan

    def _run_enter(self, bucket: Bucket) -> None:
        # Copies and the clock are parts of the graphs: one more call of torch takes tens of microseconds in code that
        # has left the caches since the step before.
        self._clock.start()
        packed, inputs = (all_[: 3 * bucket.nodes] for all_ in (self._packed, self._inputs))
        inputs.copy_(packed, non_blocking=True)
        tokens, positions, rows = inputs.view(3, -1)
        self.stack.enter(self._buffers[bucket], tokens, positions, rows, self.pool)

    def _run_first(self, bucket: Bucket) -> None:
        self._plans[bucket].fetch()
        self._clock.mark("plan")
        self._run_layers(range(FIRST), bucket)

    def _run_others(self, bucket: Bucket) -> None:
        self._run_layers(range(FIRST, len(self.stack.layers)), bucket)
        n, hidden = bucket.nodes, self.stack.leave(self._buffers[bucket])
        self._clock.mark("layers")
        logits = self.stack.logits(hidden) if "gemm" in self._parts else self._logits[:n]
        torch.argmax(logits, dim=1, out=self._choices[:n])
        self._answer[:n].copy_(self._choices[:n], non_blocking=True)
        self._clock.mark("head")

    def _run_layers(self, layers: range, bucket: Bucket) -> None:
        n, plan, scale = bucket.nodes, self._plans[bucket], self.stack.config.softmax_scale

        def attend(layer: int, q: Tensor, out: Tensor) -> None:
            plan.run(q, self.pool[layer], out, self._lse[:n], scale)

        self.stack.run(layers, self._buffers[bucket], self._inputs[2 * n : 3 * n], self.pool, attend, self._gather)

    def _gather(self, values: Tensor) -> Tensor:
        if self.comm.size == 1:
            return values
        out = values.new_empty(self.comm.size, *values.shape)
        self.comm.allgather_into(values, out)
        return out.flatten(0, 1)

    def _decode(self, asked: Sequence[DecodeRequest], replica: Replica) -> Decoded | None:
        requests = [StepRequest(one, replica.prefix_slots(one.seq), replica.tree_slots(one.seq)) for one in asked]
        for request in requests:
            request.check_tokens(self.stack.config.vocab_size)
        nodes = sum(map(len, requests))
        bucket = self._enter.bucket_for(len(requests), nodes)
        _pack(self._rows[bucket], requests)
        self._enter.replay(bucket)
        self._plans[bucket].stage([request.verify for request in requests])
        self._first.replay(bucket)
        self._others.replay(bucket)
        children = [_children(request) for request in requests]  # while the GPU is busy
        self.comm.wait(meanwhile=self._rehearsal)
        if self.comm.rank != 0:
            return None
        start, first, found = time.perf_counter(), 0, []
        chosen = self._read_answer[:nodes].tolist()
        for request, below in zip(requests, children, strict=True):
            path, bonus = _walk(below, chosen, first)
            found.append(DecodedRequest(array("i", path).tobytes(), bonus, b"", b""))
            first += len(request)
        accept = time.perf_counter() - start
        return Decoded(found, self._clock.seconds() | {"accept": accept})


def _pack(packed: np.ndarray, requests: Sequence[StepRequest]) -> None:
    """Tokens, positions and pool rows of all nodes, int64 [3, n]; padding is token 0 at position 0, written to slot 0.

    What copied them in the step before has been waited for, as every step is.
    """
    row = 0
    for request in requests:
        rows = slice(row, row := row + len(request))
        packed[0, rows] = request.tokens
        packed[1, rows] = request.depths
        packed[1, rows] += request.committed
        packed[2, rows] = request.slots
    packed[:, row:] = 0


BUCKET = Bucket(1, NODES)


class StackRehearsal(Rehearsal):
    """With what a rank of the stack does between the log and its graphs, on a stream of its own."""

    def __init__(self, device: torch.device, comm: GpuComm) -> None:
        super().__init__()
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._plan = VerifyPlan(MlaGeometry(1), 1, NODES, NODES, device)
        self._packed, self._slots = np.zeros((3, NODES), np.int64), np.arange(NODES, dtype=np.int32)
        self._clock, self._draw = GraphClock(device, "written"), np.random.default_rng(0)
        self._written = torch.zeros(1, device=device)
        self._graph = Graphs(self._write, [BUCKET], comm.wait)

    def rehearse(self) -> None:
        super().rehearse()
        tokens, parents = np.arange(NODES), self._draw.integers(0, np.arange(1, NODES))
        parents = np.concatenate([[-1], parents]).astype("<i4")  # no tree that was seen before
        asked = DecodeRequest(0, tokens.tobytes(), parents.tobytes(), False, 0.0, 0, 0)
        request = StepRequest(asked, self._slots, self._slots)
        _pack(self._packed, [request])
        self._clock.seconds()  # of the one before, which is long done
        with torch.cuda.stream(self._stream):
            self._graph.replay(BUCKET)
        self._plan.stage([request.verify])
        path, bonus = _walk(_children(request), tokens.tolist(), 0)
        msgspec.msgpack.encode(Decoded([DecodedRequest(array("i", path).tobytes(), bonus, b"", b"")], {"accept": 0.0}))

    def _write(self, bucket: Bucket) -> None:
        self._clock.start()
        self._written.zero_()
        self._clock.mark("written")


def _random_rows(layers: int, shape: StackOptions, device: torch.device) -> Kept:
    pool = latent_pool(layers, shape.num_slots, ROW_DIM, torch.bfloat16, device)
    return Kept(pool.normal_(generator=torch.Generator(device).manual_seed(shape.seed)))


Children = dict[tuple[int, int], int]  # a node by its parent and its token, the root included


def _children(request: StepRequest) -> Children:
    below = zip(request.parents.tolist(), request.tokens.tolist(), strict=True)
    return {one: node for node, one in enumerate(below)}


def _walk(children: Children, choices: list[int], first: int) -> tuple[list[int], int]:
    """Path and bonus of a tree whose nodes' choices start at `first`: tree.accept_greedy, where microseconds count."""
    path = [0]
    while (node := children.get((path[-1], choices[first + path[-1]]))) is not None:
        path.append(node)
    return path, choices[first + path[-1]]
