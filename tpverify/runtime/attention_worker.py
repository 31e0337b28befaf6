"""Verify attention on one rank: the whole latent pool, and a contiguous shard of the query heads."""

import math
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tpverify.config import MAX_TOKENS, MlaGeometry
from tpverify.kv.log import Replica
from tpverify.ops.attention import KV_LORA_RANK
from tpverify.ops.plan import VerifyPlan
from tpverify.ops.staging import Request
from tpverify.runtime.comm import Comm
from tpverify.runtime.device import latent_pool, require_room
from tpverify.runtime.frames import frame_of, tensor_of
from tpverify.runtime.messages import Attend, Frame, TreeRequest, Work, Write
from tpverify.runtime.moves import Kept
from tpverify.runtime.stages import StageClock


class AttentionOptions(msgspec.Struct, frozen=True):
    """Shape of the pool: [num_layers, num_slots, row_dim] of dtype, "float32" or "bfloat16". Limits of a step."""

    num_heads: int
    row_dim: int
    num_layers: int
    num_slots: int
    dtype: str
    max_batch: int
    max_nodes: int


class AttentionWorker:
    """Rank r of tp has heads r * heads/tp to (r + 1) * heads/tp - 1, and the same pool as every other rank.

    On a GPU a step is enqueued as a whole, uploads from pinned memory included, and waited for once, before the reply.
    torch reuses pinned memory only after the copies from it.
    """

    def __init__(self, comm: Comm, device: str, options: dict[str, Any], kept: Kept | None = None) -> None:
        shape = msgspec.convert(options, AttentionOptions)
        torch.set_num_threads(1)  # ranks share cores
        self.comm, self.device = comm, torch.device(device)
        self.pinned = self.device.type == "cuda"
        if self.pinned:
            torch.cuda.set_device(self.device)
        dtype = getattr(torch, shape.dtype)
        pool = shape.num_layers, shape.num_slots, shape.row_dim, dtype, self.device
        if kept is None:  # what a plan needs grows with slots too
            require_room(*pool)
        self._clock = StageClock(self.device)
        self.local_heads = shape.num_heads // comm.size
        max_tokens = min(shape.max_batch * shape.num_slots, MAX_TOKENS)
        geometry = MlaGeometry(self.local_heads)
        self.plan = VerifyPlan(geometry, shape.max_batch, shape.max_nodes, max_tokens, self.device)
        # Last, when what else a step needs is there: so a pool that does not fit is refused by its own number.
        self.kept = kept or Kept(latent_pool(*pool))
        self.pool = self.kept.pool

    def handle(self, work: Work, frames: list[memoryview], replica: Replica) -> tuple[Any, list[Frame]]:
        if isinstance(work, Write):
            return None, self._write(work, frames, replica)
        if isinstance(work, Attend):
            replies = self._attend(work, frames, replica)
            return self._clock.seconds(), replies
        raise TypeError(f"an attention rank cannot do {type(work).__name__}")

    def _write(self, work: Write, frames: list[memoryview], replica: Replica) -> list[Frame]:
        slots = replica.prefix_slots(work.seq)[work.start : work.start + work.count]
        self._store(slots, self._rows(frames[0], len(slots)))
        self.comm.wait()
        return []

    def _attend(self, work: Attend, frames: list[memoryview], replica: Replica) -> list[Frame]:
        self._clock.start()
        requests = [_request(request, replica) for request in work.requests]
        nodes = sum(request.n for request in work.requests)
        self.plan.take(requests)
        self._clock.mark("plan")
        self._store(np.concatenate([request.tree for request in requests]), self._rows(frames[0], nodes))
        q = self._rows(frames[1], nodes, self.local_heads)
        share_bytes = len(self.pool) * nodes * self.local_heads * (KV_LORA_RANK * q.itemsize + 4)
        share = torch.empty(share_bytes, dtype=torch.uint8, device=self.device)
        self._clock.mark("upload")
        for layer in zip(q, self.pool, *self._out_and_lse(share, nodes), strict=True):
            self.plan.run(*layer, work.softmax_scale)
        self._clock.mark("attention")
        shares = self.comm.gather(share)
        self._clock.mark("gather")
        if shares is None:
            self.comm.wait()
            return []
        results = zip(*(self._out_and_lse(share, nodes) for share in shares), strict=True)
        replies = [self._download(torch.cat(parts, dim=2)) for parts in results]
        self._clock.mark("download")
        self.comm.wait()
        return [frame_of(reply) for reply in replies]

    def _out_and_lse(self, share: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
        """Of a rank's share of a step: out [layers, nodes, heads/tp, kv_lora_rank], lse [layers, nodes, heads/tp]."""
        shape = (len(self.pool), nodes, self.local_heads)
        lse = share[-4 * math.prod(shape) :].view(torch.float32)
        out = share[: -4 * lse.numel()].view(self.pool.dtype)
        return out.view(*shape, KV_LORA_RANK), lse.view(shape)

    def _rows(self, frame: memoryview, *shape: int) -> Tensor:
        """[layers, *shape, row_dim] on the pool's device."""
        layers, _, row_dim = self.pool.shape
        rows = tensor_of(frame, self.pool.dtype, (layers, *shape, row_dim), self.pinned)
        return rows.to(self.device, non_blocking=True)

    def _download(self, result: Tensor) -> Tensor:
        """On the CPU, once the stream has been waited for."""
        host = torch.empty(result.shape, dtype=result.dtype, pin_memory=self.pinned)
        return host.copy_(result, non_blocking=True)

    def _store(self, slots: np.ndarray, rows: Tensor) -> None:
        self.pool[:, self._upload(slots)] = rows

    def _upload(self, slots: np.ndarray) -> Tensor:
        index = torch.from_numpy(slots.astype(np.int64))
        return (index.pin_memory() if self.pinned else index).to(self.device, non_blocking=True)


def _request(request: TreeRequest, replica: Replica) -> Request:
    """As the tree and the tables have it: the coordinator checked both."""
    words = np.frombuffer(request.words, "<u8").reshape(request.n, -1)
    depths = np.frombuffer(request.depths, "<i4")
    return Request(replica.prefix_slots(request.seq), replica.tree_slots(request.seq), words, depths)
