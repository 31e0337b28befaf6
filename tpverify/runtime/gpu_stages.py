"""What the graphs of a decode step run on one GPU rank: the target over all nodes, its choices, the drafter.

They are not methods of the worker that has the graphs: a graph holds what it runs, and a worker whose graphs hold it
would keep its pool until Python's cycle collector comes by.
"""

import numpy as np
import torch
from torch import Tensor

from tpverify.config import MAX_NODES, MlaGeometry
from tpverify.model.checkpoint import load_checkpoint
from tpverify.model.drafter import Drafter
from tpverify.model.gpu_accept import choose, choose_greedy, paths, rank_tokens, walk
from tpverify.model.gpu_decoder import GpuDecoder
from tpverify.model.gpu_drafter import GpuDrafter
from tpverify.ops.attention import TreeMask, VerifyRequest
from tpverify.ops.plan import VerifyPlan
from tpverify.runtime.comm import GpuComm
from tpverify.runtime.decoder_worker import DecoderOptions
from tpverify.runtime.device import latent_pool, require_room
from tpverify.runtime.gpu_step import Layout, StepBuffers
from tpverify.runtime.graphs import Bucket
from tpverify.runtime.moves import Kept
from tpverify.runtime.stages import GraphClock

DTYPE = torch.bfloat16
# A root alone or a chain of 15, trees of 32, 64, 128 and a prompt's chunk of 256, each with its root; the widest tree.
NODES_ALONE = (16, 48, 80, 144, 272, MAX_NODES)
NODES_TOGETHER = (16, 144, 528, 2 * MAX_NODES)
BATCH = 8  # requests of a pass; a step of more takes several
WARM_UP_PREFIX = 1024  # tokens for which captured attention chooses its tiles


class GpuStages:
    """Of rank r of tp, for steps of each bucket, at fixed addresses. kept: the rows that the rank has already, if any.

    With a drafter: features of the layers that it reads, context rows, drafts.
    """

    def __init__(self, comm: GpuComm, device: torch.device, shape: DecoderOptions, kept: Kept | None) -> None:
        self.device, self.clock = device, GraphClock(device, "verify", "accept", "draft")
        config, tensors = load_checkpoint(shape.checkpoint)
        self.config = config
        geometry = MlaGeometry(config.num_attention_heads // comm.size, config.kv_lora_rank, config.qk_rope_head_dim)
        if kept is None:  # what plans need grows with slots too
            require_room(config.num_hidden_layers, shape.num_slots, geometry.row_dim, DTYPE, device)
        self.decoder = GpuDecoder(config, tensors, device, DTYPE, comm.rank, comm.size, comm.allgather_into)
        self.drafter: GpuDrafter | None = None
        layout = Layout(1, 1, 0, 0, config.hidden_size, 0, config.vocab_size)
        if shape.drafter:
            drafter = Drafter.load(shape.checkpoint, tensors["model.embed_tokens.weight"].float())
            longest = drafter.block_size
            self.drafter = GpuDrafter(drafter, device, DTYPE, config.max_position_embeddings, longest)
            ranked = min(config.vocab_size, MAX_NODES - 1)
            widths = config.hidden_size, drafter.feature_dim, config.vocab_size
            layout = Layout(drafter.window, longest, longest - 1, ranked, *widths)
        self.longest, self.batch = layout.longest, min(shape.max_batch, BATCH)
        self.buckets = [Bucket(1, nodes) for nodes in NODES_ALONE]
        self.buckets += [Bucket(self.batch, nodes) for nodes in NODES_TOGETHER if self.batch > 1]
        self.steps = {bucket: StepBuffers(bucket, layout, device, DTYPE) for bucket in self.buckets}
        self.plans = {}
        for bucket in self.buckets:
            limits = bucket.batch, min(bucket.nodes, MAX_NODES), shape.num_slots * bucket.batch
            self.plans[bucket] = VerifyPlan(geometry, *limits, device)
            self.plans[bucket].update(_typical(bucket, shape.num_slots))
        # Last, when what else the model needs is there: so a pool that does not fit is refused by its own number.
        self.kept = self._no_rows(shape.num_slots, geometry.row_dim) if kept is None else kept
        self.pool, (self.hidden, *context) = self.kept.pool, self.kept.tables
        self.context = context[0] if context else None

    def _no_rows(self, num_slots: int, row_dim: int) -> Kept:
        widths = [(self.config.hidden_size, torch.float32)]
        if self.drafter is not None:
            widths.append((self.drafter.context_dim, DTYPE))
        beside = sum(width * dtype.itemsize for width, dtype in widths)
        pool = latent_pool(self.config.num_hidden_layers, num_slots, row_dim, DTYPE, self.device, beside)
        tables = [torch.zeros(num_slots, width, dtype=dtype, device=self.device) for width, dtype in widths]
        return Kept(pool, *tables)

    def verify(self, bucket: Bucket) -> None:
        """All layers over all nodes: latent rows, final hidden states and context rows to the nodes' slots; logits."""
        step, plan = self.steps[bucket], self.plans[bucket]
        self.clock.start()
        step.fetch()
        plan.fetch()

        def attend(layer: int, rows: Tensor, q: Tensor, out: Tensor) -> None:
            self.pool[layer].index_copy_(0, step.slots, rows)
            lse = torch.empty(q.shape[:2], dtype=torch.float32, device=self.device)
            nodes = len(q) if self.device.type == "cuda" else step.rows  # the reference takes no padding
            out[nodes:] = 0
            plan.run(q[:nodes], self.pool[layer], out[:nodes], lse[:nodes], self.config.softmax_scale)

        layers = self.drafter.feature_layers if self.drafter is not None else ()
        features = step.features if self.drafter is not None else None
        hidden = self.decoder(step.tokens, step.positions, attend, layers, features)
        self.hidden.index_copy_(0, step.slots, hidden)
        if self.drafter is not None:
            assert self.context is not None
            self.context.index_copy_(0, step.slots, self.drafter.context(step.features, step.positions))
        step.logits.copy_(self.decoder.logits(hidden))
        self.clock.mark("verify")

    def accept(self, sampled: bool, bucket: Bucket) -> None:
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
        step.give_accepted()
        self.clock.mark("accept")

    def draft(self, bucket: Bucket) -> None:
        """The drafter's tokens below each bonus token."""
        step, drafter = self.steps[bucket], self.drafter
        assert drafter is not None and self.context is not None
        path = torch.where(step.path >= 0, step.slots[step.path], 0)
        rows = self.context[torch.cat([step.tail, path], dim=1)]
        accepted = (step.path >= 0).sum(dim=1)
        roots, positions = step.bonus.clamp(min=0), step.positions[step.last] + 1
        logits = drafter(rows, step.earlier, accepted, roots, positions)
        logprobs, token_ids = rank_tokens(logits, step.layout.ranked)
        step.drafted[0].view(torch.float32).copy_(logprobs)
        step.drafted[1].copy_(token_ids)
        step.give_drafted()
        self.clock.mark("draft")


def _typical(bucket: Bucket, num_slots: int) -> list[VerifyRequest]:
    """Requests of a bucket's size, all on slot 0."""
    nodes = min(bucket.nodes // bucket.batch, MAX_NODES)
    prefix = np.zeros(min(WARM_UP_PREFIX, num_slots - 1), np.int64)
    return [VerifyRequest(prefix, np.zeros(nodes, np.int64), TreeMask.chain(nodes))] * bucket.batch
