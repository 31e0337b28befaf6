"""Verify attention on one rank: the whole latent pool, and a contiguous shard of the query heads."""

from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np
import torch
from torch import Tensor

from tpverify.kv.log import Replica
from tpverify.ops.attention import TreeMask, VerifyRequest, verify_attention
from tpverify.runtime.comm import Comm
from tpverify.runtime.frames import frame_of, tensor_of
from tpverify.runtime.messages import Attend, ContentDigest, Frame, TreeRequest, Work, Write


class AttentionOptions(msgspec.Struct, frozen=True):
    """Shape of the pool: [num_layers, num_slots, row_dim] of dtype, "float32" or "bfloat16"."""

    num_heads: int
    row_dim: int
    num_layers: int
    num_slots: int
    dtype: str


class AttentionWorker:
    """Rank r of tp has heads r * heads/tp to (r + 1) * heads/tp - 1, and the same pool as every other rank."""

    def __init__(self, comm: Comm, device: str, options: dict[str, Any]) -> None:
        shape = msgspec.convert(options, AttentionOptions)
        torch.set_num_threads(1)  # ranks share cores
        self.comm = comm
        self.local_heads = shape.num_heads // comm.size
        self.pool = torch.zeros(
            shape.num_layers, shape.num_slots, shape.row_dim, dtype=getattr(torch, shape.dtype), device=device
        )

    def handle(self, work: Work, frames: list[memoryview], replica: Replica) -> tuple[Any, list[Frame]]:
        if isinstance(work, Write):
            return None, self._write(work, frames, replica)
        if isinstance(work, Attend):
            return None, self._attend(work, frames, replica)
        if isinstance(work, ContentDigest):
            return self._content_digest(replica.prefix_slots(work.seq)), []
        raise TypeError(f"an attention rank cannot do {type(work).__name__}")

    def _write(self, work: Write, frames: list[memoryview], replica: Replica) -> list[Frame]:
        slots = replica.prefix_slots(work.seq)[work.start : work.start + work.count]
        self._store(slots, self._rows(frames[0], len(slots)))
        return []

    def _attend(self, work: Attend, frames: list[memoryview], replica: Replica) -> list[Frame]:
        requests = [_request(request, replica) for request in work.requests]
        nodes = sum(request.n for request in work.requests)
        self._store(np.concatenate([request.tree_slots for request in requests]), self._rows(frames[0], nodes))
        q = self._rows(frames[1], nodes, self.local_heads)
        layers = [
            verify_attention(layer_q, layer_pool, requests, softmax_scale=work.softmax_scale)
            for layer_q, layer_pool in zip(q, self.pool, strict=True)
        ]
        out = self.comm.gather(torch.stack([out for out, _ in layers]).cpu())
        lse = self.comm.gather(torch.stack([lse for _, lse in layers]).cpu())
        if out is None or lse is None:
            return []
        return [frame_of(torch.cat(out, dim=2)), frame_of(torch.cat(lse, dim=2))]

    def _rows(self, frame: memoryview, *shape: int) -> Tensor:
        """[layers, *shape, row_dim] on the pool's device."""
        layers, _, row_dim = self.pool.shape
        return tensor_of(frame, self.pool.dtype, (layers, *shape, row_dim)).to(self.pool.device)

    def _store(self, slots: np.ndarray, rows: Tensor) -> None:
        self.pool[:, torch.as_tensor(slots.astype(np.int64), device=self.pool.device)] = rows

    def _content_digest(self, slots: np.ndarray) -> str:
        rows = self.pool[:, torch.as_tensor(slots.astype(np.int64), device=self.pool.device)].cpu()
        return blake2b(frame_of(rows), digest_size=8).hexdigest()


def _request(request: TreeRequest, replica: Replica) -> VerifyRequest:
    words = np.frombuffer(request.words, "<u8").reshape(request.n, -1)
    mask = TreeMask(words, np.frombuffer(request.depths, "<i4"))
    return VerifyRequest(replica.prefix_slots(request.seq), replica.tree_slots(request.seq), mask)
