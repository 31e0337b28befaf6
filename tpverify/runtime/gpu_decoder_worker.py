"""The target model on one GPU rank, its choices and the drafter: a step is a few CUDA graphs, one upload, one wait.

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

from tpverify.config import MAX_NODES, MlaGeometry
from tpverify.kv.log import Replica
from tpverify.model.checkpoint import load_checkpoint
from tpverify.model.drafter import Drafter
from tpverify.model.gpu_accept import choose, choose_greedy, paths, rank_tokens, walk
from tpverify.model.gpu_decoder import GpuDecoder
from tpverify.model.gpu_drafter import GpuDrafter
from tpverify.ops.attention import TreeMask, VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.runtime.comm import GpuComm
from tpverify.runtime.decoder_worker import DecoderOptions
from tpverify.runtime.device import latent_pool
from tpverify.runtime.frames import digest_of, frame_of
from tpverify.runtime.gpu_step import Layout, StepBuffers, StepRequest
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
from tpverify.runtime.stages import StageClock

DTYPE = torch.bfloat16
# A root alone or a chain of 15, trees of 32, 64, 128 and a prompt's chunk of 256, each with its root; the widest tree.
NODES_ALONE = (16, 48, 80, 144, 272, MAX_NODES)
NODES_TOGETHER = (16, 144, 528, 2 * MAX_NODES)
BATCH = 8  # requests of a pass; a step of more takes several
WARM_UP_PREFIX = 1024  # tokens for which captured attention chooses its tiles


class Eager(Graphs):
    """Runs the bodies as they are, where a gather cannot be captured: ranks that share a GPU, or have none."""

    def __init__(self, body: Callable[[Bucket], None], buckets: Sequence[Bucket]) -> None:
        self.buckets = sorted(buckets, key=lambda bucket: (bucket.nodes, bucket.batch))
        self._replays = {bucket: partial(body, bucket) for bucket in buckets}


class GpuDecoderWorker:
    """Rank r of tp. Every rank keeps, by slot, the latent rows of all layers, the final hidden state and the drafter's
    context row."""

    def __init__(self, comm: GpuComm, device: str, options: dict[str, Any]) -> None:
        shape = msgspec.convert(options, DecoderOptions)
        torch.set_num_threads(1)  # ranks share cores
        torch.set_grad_enabled(False)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        self.comm, self.device = comm, torch.device(device)
        self.cuda, self.clock = self.device.type == "cuda", StageClock(self.device)
        if self.cuda:
            torch.cuda.set_device(self.device)
        config, tensors = load_checkpoint(shape.checkpoint)
        self.config = config
        self.decoder = GpuDecoder(config, tensors, self.device, DTYPE, comm.rank, comm.size, comm.allgather_into)
        geometry = MlaGeometry(config.num_attention_heads // comm.size, config.kv_lora_rank, config.qk_rope_head_dim)
        zeros = partial(torch.zeros, device=self.device)
        self.pool = latent_pool(config.num_hidden_layers, shape.num_slots, geometry.row_dim, DTYPE, self.device)
        self.hidden = zeros(shape.num_slots, config.hidden_size)
        self.drafter = None
        self.kept = Kept(self.pool, self.hidden)
        layout = Layout(1, 1, 0, 0, config.hidden_size, 0, config.vocab_size)
        if shape.drafter:
            drafter = Drafter.load(shape.checkpoint, tensors["model.embed_tokens.weight"].float())
            longest = drafter.block_size
            self.drafter = GpuDrafter(drafter, self.device, DTYPE, config.max_position_embeddings, longest)
            self.context = zeros(shape.num_slots, drafter.context_dim, dtype=DTYPE)
            self.kept = Kept(self.pool, self.hidden, self.context)
            ranked = min(config.vocab_size, MAX_NODES - 1)
            widths = config.hidden_size, drafter.feature_dim, config.vocab_size
            layout = Layout(drafter.window, longest, longest - 1, ranked, *widths)

        self.longest, self.batch = layout.longest, min(shape.max_batch, BATCH)
        buckets = [Bucket(1, nodes) for nodes in NODES_ALONE]
        buckets += [Bucket(self.batch, nodes) for nodes in NODES_TOGETHER if self.batch > 1]
        self.steps = {bucket: StepBuffers(bucket, layout, self.device, DTYPE) for bucket in buckets}
        self.plans = {}
        for bucket in buckets:
            limits = bucket.batch, min(bucket.nodes, MAX_NODES), shape.num_slots * bucket.batch
            self.plans[bucket] = VerifyPlan(geometry, *limits, self.device)
            self.plans[bucket].update(_typical(bucket, shape.num_slots))
        build = Graphs if self.cuda and comm.capturable else Eager
        self.verify = build(self._verify, buckets)
        self.accept = {sampled: build(partial(self._accept, sampled), buckets) for sampled in (False, True)}
        self.draft = build(self._draft, buckets) if self.drafter is not None else None

    def handle(self, work: Work, frames: list[memoryview], replica: Replica) -> tuple[Any, list[Frame]]:
        if isinstance(work, Decode):
            return self._decode(work, replica), []
        if isinstance(work, HiddenDigest):
            return digest_of(self._rows(self.hidden, replica.prefix_slots(work.seq)[: work.count])), []
        if isinstance(work, HiddenStates):
            rows = self._rows(self.hidden, replica.prefix_slots(work.seq)[: work.count])
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
        if not 0 <= request.tokens.min() <= request.tokens.max() < self.config.vocab_size:
            raise ValueError(f"tokens: expected ids below {self.config.vocab_size}, got {request.tokens.max()}")
        deepest = int(request.depths.max())
        if not request.prompt and deepest >= self.longest:
            raise ValueError(f"parents: expected at most {self.longest - 1} nodes below the root, got {deepest}")
        if request.committed + deepest >= self.config.max_position_embeddings:
            last = request.committed + deepest
            raise ValueError(f"positions: expected less than {self.config.max_position_embeddings}, got {last}")

    def _passes(self, requests: list[StepRequest]) -> Iterator[list[StepRequest]]:
        """Consecutive requests that fit the largest bucket together."""
        together: list[StepRequest] = []
        for request in requests:
            nodes = sum(map(len, together)) + len(request)
            if together and (len(together) == self.batch or nodes > NODES_TOGETHER[-1]):
                yield together
                together = []
            together.append(request)
        yield together

    def _pass(self, requests: list[StepRequest]) -> tuple[list[DecodedRequest], dict[str, float]]:
        bucket = self.verify.bucket_for(len(requests), sum(map(len, requests)))
        step = self.steps[bucket]
        step.upload(requests)
        self.plans[bucket].take([request.verify for request in requests])
        self.clock.start()
        self.verify.replay(bucket)
        self.clock.mark("verify")
        self.accept[any(request.temperature > 0 for request in requests)].replay(bucket)
        self.clock.mark("accept")
        drafted = self.draft is not None and any(request.candidates for request in requests)
        if drafted:
            self.draft.replay(bucket)  # type: ignore[union-attr]
        self.clock.mark("draft")
        step.download(drafted)
        self.comm.wait()
        return step.answers(requests) if self.comm.rank == 0 else [], self.clock.seconds()

    def _verify(self, bucket: Bucket) -> None:
        """All layers over all nodes: latent rows, final hidden states and context rows to the nodes' slots; logits."""
        step, plan = self.steps[bucket], self.plans[bucket]

        def attend(layer: int, rows: Tensor, q: Tensor, out: Tensor) -> None:
            self.pool[layer].index_copy_(0, step.slots, rows)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)
            nodes = len(q) if self.cuda else step.rows  # the reference takes no padding
            out[nodes:] = 0
            plan.run(q[:nodes], self.pool[layer], out[:nodes], lse[:nodes], self.config.softmax_scale)

        layers = self.drafter.feature_layers if self.drafter is not None else ()
        features = step.features if self.drafter is not None else None
        hidden = self.decoder(step.tokens, step.positions, attend, layers, features)
        self.hidden.index_copy_(0, step.slots, hidden)
        if self.drafter is not None:
            self.context.index_copy_(0, step.slots, self.drafter.context(step.features, step.positions))
        step.logits.copy_(self.decoder.logits(hidden))

    def _accept(self, sampled: bool, bucket: Bucket) -> None:
        """The target's choices and where they lead: path, its last node, the token after it."""
        step = self.steps[bucket]
        if sampled:
            choices = choose(step.logits, step.temperatures, step.draws)
        else:
            choices = choose_greedy(step.logits)
        reached = walk(step.tokens, step.parents, choices, self.longest - 1)
        path = paths(reached, step.cells, bucket.batch, self.longest)
        torch.maximum(path.amax(dim=1), step.start, out=step.last)
        torch.index_select(choices, 0, step.last, out=step.bonus)
        step.path.copy_(path)
        step.accepted[:, 0] = step.bonus
        step.accepted[:, 1:] = path

    def _draft(self, bucket: Bucket) -> None:
        """The drafter's tokens below each bonus token."""
        step, drafter = self.steps[bucket], self.drafter
        assert drafter is not None
        path = torch.where(step.path >= 0, step.slots[step.path], 0)
        rows = self.context[torch.cat([step.tail, path], dim=1)]
        accepted = (step.path >= 0).sum(dim=1)
        roots, positions = step.bonus.clamp(min=0), step.positions[step.last] + 1
        logits = drafter(rows, step.earlier, accepted, roots, positions)
        logprobs, token_ids = rank_tokens(logits, step.layout.ranked)
        step.drafted[0].view(torch.float32).copy_(logprobs)
        step.drafted[1].copy_(token_ids)

    def _rows(self, table: Tensor, slots: np.ndarray) -> Tensor:
        """table[slots] on the CPU."""
        return table[torch.from_numpy(slots.astype(np.int64)).to(self.device)].cpu()


def _typical(bucket: Bucket, num_slots: int) -> list[VerifyRequest]:
    """Requests of a bucket's size, all on slot 0."""
    nodes = min(bucket.nodes // bucket.batch, MAX_NODES)
    prefix = np.zeros(min(WARM_UP_PREFIX, num_slots - 1), np.int64)
    return [VerifyRequest(prefix, np.zeros(nodes, np.int64), TreeMask.chain(nodes))] * bucket.batch
